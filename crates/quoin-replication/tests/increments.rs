//! Increments of one replica by bulk connections: missing parts are detected, and messages of an
//! older connection are ignored.

use crate::broken;
use bytes::Bytes;
use quoin_replication::replica::store::{FetchTicket, ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_replication::replica::{LEASE_MS, Replica, ReplicaAction, ReplicaEvent};
use quoin_store::ReplicaPool;
use quoin_store::model::ModelPool;
use quoin_types::message::{
    Content, EpochEnd, Failure, FedSum, FromReplica, IncrementEnd, Ping, Slot, ToReplica,
};
use quoin_types::*;
use std::time::Duration;

const OWN: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(11) };
const VOLUME: VolumeId = VolumeId(5);
const SESSION: SessionKey = SessionKey { epoch: Epoch(5), incarnation: Incarnation(1), nonce: 1 };
const REBUILD: u64 = 77;
/// The session's own connection.
const LOG: u64 = 1;

struct One {
    pool: ModelPool,
    replica: Replica,
    syncs_wait: bool,
    /// Its answers, each with the connection.
    sent: Vec<(u64, FromReplica)>,
    closed: Vec<u64>,
    now: Time,
    /// Time of the next call that it requested.
    timer: Option<Time>,
}

fn membership() -> Membership {
    let known = vec![OWN, Member { id: ReplicaId(2), guid: ReplicaGuid(12) }];
    Membership { version: 1, rf: 2, cf: 2, drf: 2, known, retired: vec![], formed: true }
}

impl One {
    /// Opened, cut to nothing, and ready for an increment.
    fn new() -> Self {
        broken::break_a_rule();
        let mut pool = ModelPool::new();
        let identity = ReplicaIdentity {
            volume: VOLUME,
            replica: OWN.id,
            guid: OWN.guid,
            volume_spec: Bytes::new(),
        };
        let meta = ReplicaMeta { membership: membership(), ..ReplicaMeta::default() };
        pool.create(identity, meta, 64).unwrap();
        let cookie = pool.cookie();
        let replica =
            Replica::new(Time::from_millis(1000), cookie, &pool.replica(OWN.guid).unwrap());
        let (sent, closed) = (Vec::new(), Vec::new());
        let (now, timer) = (Time::from_millis(1000), None);
        let mut one = Self { pool, replica, syncs_wait: false, sent, closed, now, timer };
        one.say(
            LOG,
            ToReplica::Open {
                volume: VOLUME,
                replica: OWN.id,
                guid: OWN.guid,
                membership: membership(),
                lease_ms: LEASE_MS,
            },
        );
        one.say(LOG, ToReplica::Truncate { keep: Lsn(0), tip: Lsn(0) });
        one.sent.clear();
        one
    }

    fn on(&mut self, event: ReplicaEvent) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut actions = Vec::new();
            {
                let mut store = self.pool.replica(OWN.guid).unwrap();
                let now = self.now;
                self.replica.on(now, event, &mut store, &mut actions);
                self.replica.flush(&mut actions);
            }
            for action in actions {
                match action {
                    ReplicaAction::Send { connection, message, .. } => {
                        self.sent.push((connection, message));
                    }
                    ReplicaAction::Disconnect { connection } => self.closed.push(connection),
                    ReplicaAction::Timer { at } => self.timer = at,
                    _ => {}
                }
            }
            if !self.syncs_wait
                && let Some(ticket) = self.pool.sync_wanted()
            {
                self.pool.sync_finished(ticket, Ok(())).expect("a sync");
                events.push(ReplicaEvent::Synced { ticket, result: Ok(()) });
            }
        }
    }

    fn say(&mut self, connection: u64, message: ToReplica) {
        self.on(ReplicaEvent::Message { connection, session: SESSION, message });
    }

    /// Takes its answers since the last call.
    fn said(&mut self) -> Vec<(u64, FromReplica)> {
        std::mem::take(&mut self.sent)
    }

    fn open_bulk(&mut self, connection: u64, number: u64) {
        self.say(connection, ToReplica::OpenBulk { number });
    }

    fn begin(&mut self, connection: u64) {
        self.say(connection, ToReplica::IncrementBegin { rebuild: REBUILD, from: Lsn(0) });
    }

    /// Runs the timer that it requested, `late` after its time. Returns the delay that was
    /// requested.
    fn wake(&mut self, late: Duration) -> Duration {
        let at = self.timer.take().expect("it goes on by itself");
        let waited = at.since(self.now);
        self.now = at + late;
        self.on(ReplicaEvent::Timer);
        waited
    }

    fn position(&mut self) -> Position {
        self.pool.replica(OWN.guid).unwrap().state().position
    }
}

fn slots(lba: u64) -> Vec<Slot> {
    let data = Bytes::from(vec![lba as u8 + 1; BLOCK_SIZE]);
    let content = Content::Data { crc: crc32c(&data), data };
    vec![Slot { lba, blocks: 1, version: Lsn(3 + lba), content }]
}

fn feed(lba: u64, after: u64, cursor: u64) -> ToReplica {
    ToReplica::IncrementFeed { rebuild: REBUILD, slots: slots(lba), cursor, after }
}

fn sum(lbas: &[u64]) -> FedSum {
    let mut sum = FedSum::default();
    lbas.iter().for_each(|lba| sum.add(&slots(*lba)));
    sum
}

fn commit(fed: FedSum) -> ToReplica {
    let (position, chain) = (Position { epoch: Epoch(4), lsn: Lsn(20) }, Chain(9));
    let row = EpochEnd { epoch: Epoch(4), first: Lsn(1), last: Lsn(20), chain };
    let to = IncrementEnd {
        position,
        chain,
        epoch_table: vec![row],
        last_view: None,
        volume_blocks: 64,
        snapshots: Vec::new(),
        clients: Default::default(),
    };
    ToReplica::IncrementCommit { rebuild: REBUILD, to: Box::new(to), fed }
}

fn done() -> FromReplica {
    let position = Position { epoch: Epoch(4), lsn: Lsn(20) };
    FromReplica::IncrementDone { rebuild: REBUILD, position }
}

#[test]
fn a_flip_is_told_by_the_sessions_own_connection_after_it_was_made() {
    let mut one = One::new();
    one.open_bulk(10, 1);
    one.begin(10);
    assert_eq!(
        one.said(),
        [(10, FromReplica::IncrementBegun { rebuild: REBUILD, cursor: 0, cut: Lsn(0) })]
    );
    one.say(10, feed(0, 0, 1));
    one.say(10, feed(1, 1, u64::MAX));
    one.said();
    one.syncs_wait = true;
    one.say(10, commit(sum(&[0, 1])));
    let taken = FromReplica::IncrementFed { rebuild: REBUILD, cursor: u64::MAX };
    assert_eq!(one.said(), [(10, taken)]);
    assert_eq!(one.position().lsn, Lsn(0));
    one.syncs_wait = false;
    one.say(LOG, ToReplica::Ping { stable: Lsn(0), ping: Ping(1) });
    assert!(one.said().contains(&(LOG, done())));
    assert_eq!(one.position().lsn, Lsn(20));
}

#[test]
fn an_increment_of_which_a_feed_was_dropped_does_not_flip() {
    // Lost in the middle; at the end; and one that the commit counts although no later feed depends
    // on it.
    let lost = [
        vec![feed(0, 0, 1), feed(2, 2, u64::MAX), commit(sum(&[0, 1, 2]))],
        vec![feed(0, 0, 1), commit(sum(&[0, 1]))],
        vec![feed(0, 0, 1), feed(2, 1, u64::MAX), commit(sum(&[0, 1, 2]))],
    ];
    for messages in lost {
        let mut one = One::new();
        one.open_bulk(10, 1);
        one.begin(10);
        messages.into_iter().for_each(|message| one.say(10, message));
        assert_eq!(one.position().lsn, Lsn(0));
        let failed = FromReplica::Failed(Failure::Protocol);
        assert!(one.sent.iter().any(|(_, message)| *message == failed), "{:?}", one.sent);
        assert!(!one.sent.iter().any(|(_, message)| *message == done()));
    }
}

#[test]
fn what_a_former_bulk_connection_still_carries_is_not_taken_once_its_successor_began() {
    let mut one = One::new();
    one.open_bulk(10, 1);
    one.begin(10);
    one.say(10, feed(0, 0, 1));
    one.open_bulk(11, 2);
    assert_eq!(one.closed, [10]);
    one.begin(11);
    one.said();
    // Late messages have no effect.
    one.say(10, feed(1, 1, 2));
    one.say(10, commit(sum(&[0])));
    assert_eq!(one.said(), []);
    one.say(11, feed(1, 1, u64::MAX));
    one.say(11, commit(sum(&[1])));
    assert_eq!(one.position().lsn, Lsn(20));
    // A connection that comes after its successor is refused.
    one.open_bulk(12, 1);
    assert_eq!(one.closed, [10, 12]);
}

#[test]
fn a_bulk_connection_that_ends_leaves_its_session_and_the_shadow_as_they_are() {
    let mut one = One::new();
    one.open_bulk(10, 1);
    one.begin(10);
    one.say(10, feed(0, 0, 1));
    one.on(ReplicaEvent::Disconnected { connection: 10 });
    one.said();
    one.say(LOG, ToReplica::Ping { stable: Lsn(0), ping: Ping(4) });
    assert!(matches!(one.said()[..], [(LOG, FromReplica::Applied { ping: Ping(4), .. })]));
    one.open_bulk(11, 2);
    one.begin(11);
    assert_eq!(
        one.said(),
        [(11, FromReplica::IncrementBegun { rebuild: REBUILD, cursor: 1, cut: Lsn(0) })]
    );
}

#[test]
fn a_target_that_lost_the_connection_of_its_commit_gets_the_outcome() {
    for flipped in [false, true] {
        let mut one = One::new();
        one.open_bulk(10, 1);
        one.begin(10);
        one.say(10, feed(0, 0, u64::MAX));
        one.syncs_wait = !flipped;
        one.say(10, commit(sum(&[0])));
        one.on(ReplicaEvent::Disconnected { connection: 10 });
        one.said();
        one.open_bulk(11, 2);
        one.begin(11);
        let taken = (11, FromReplica::IncrementFed { rebuild: REBUILD, cursor: u64::MAX });
        let mut said = one.said();
        assert_eq!(said.remove(0), taken);
        assert_eq!(said, if flipped { vec![(LOG, done())] } else { vec![] });
        // No other rebuild may begin during the flip.
        if !flipped {
            let other = ToReplica::IncrementBegin { rebuild: REBUILD + 1, from: Lsn(0) };
            one.say(11, other);
            let failed = FromReplica::Failed(Failure::Protocol);
            assert!(one.said().iter().any(|(_, message)| *message == failed));
        }
    }
}

#[test]
fn a_bulk_connection_of_no_open_session_is_closed_and_ends_with_its_session() {
    let mut one = One::new();
    let other = SessionKey { nonce: 2, ..SESSION };
    let message = ToReplica::OpenBulk { number: 9 };
    one.on(ReplicaEvent::Message { connection: 10, session: other, message });
    assert_eq!(one.closed, [10]);
    one.open_bulk(11, 1);
    one.on(ReplicaEvent::Disconnected { connection: LOG });
    assert_eq!(one.closed, [10, 11]);
}

/// Close uses the session's own connection, and may overtake earlier requests.
#[test]
fn requests_of_a_rebuild_after_close_are_no_fault() {
    let mut one = One::new();
    one.open_bulk(10, 1);
    one.syncs_wait = true;
    one.say(LOG, ToReplica::Close);
    let (view, from) = (quoin_types::message::ReadView::Live, Lsn(0));
    one.say(
        10,
        ToReplica::Pull { id: 1, view, from, cursor: 0, bytes_max: 1 << 16, want_data: true },
    );
    one.syncs_wait = false;
    one.on(ReplicaEvent::Disconnected { connection: 10 });
    assert_eq!(one.said(), [(LOG, FromReplica::Closed)]);
}

/// Merging the log below an increment into the map may take minutes. It runs step by step, and the
/// target gets the answer after the last step.
#[test]
fn a_begin_waits_for_the_fold_below_it_without_holding_anything_up() {
    let mut one = One::new();
    one.pool.replica(OWN.guid).unwrap().set_fold_steps(3);
    one.open_bulk(10, 1);
    one.begin(10);
    for _ in 0..2 {
        assert!(one.said().is_empty());
        one.wake(Duration::ZERO);
    }
    one.say(LOG, ToReplica::Ping { stable: Lsn(0), ping: Ping(7) });
    let ping = FromReplica::Applied { applied: Lsn(0), durable: Lsn(0), ping: Ping(7) };
    assert_eq!(one.said(), [(LOG, ping)], "pings are answered meanwhile");
    one.on(ReplicaEvent::Timer);
    assert!(one.said().is_empty(), "a call for something else is no step");
    one.wake(Duration::ZERO);
    assert_eq!(
        one.said(),
        [(10, FromReplica::IncrementBegun { rebuild: REBUILD, cursor: 0, cut: Lsn(0) })]
    );
    assert_eq!(one.timer, None);
    one.say(10, feed(0, 0, u64::MAX));
    assert_eq!(
        one.said(),
        [(10, FromReplica::IncrementFed { rebuild: REBUILD, cursor: u64::MAX })]
    );
}

/// The thread that merges the log serves the clients of other volumes too.
#[test]
fn between_the_steps_of_a_begin_is_as_much_time_as_they_take() {
    let mut one = One::new();
    one.pool.replica(OWN.guid).unwrap().set_fold_steps(9);
    one.open_bulk(10, 1);
    one.begin(10);
    let slow = Duration::from_millis(50);
    let pauses = [slow, slow, Duration::ZERO, Duration::from_secs(9), Duration::ZERO]
        .map(|late| one.wake(late));
    assert_eq!(pauses.map(|pause| pause.as_millis()), [1, 50, 50, 1, 200]);
}

#[test]
fn a_begin_that_waits_ends_with_its_session() {
    let mut one = One::new();
    one.pool.replica(OWN.guid).unwrap().set_fold_steps(3);
    one.open_bulk(10, 1);
    one.begin(10);
    one.on(ReplicaEvent::Disconnected { connection: LOG });
    one.wake(Duration::ZERO);
    one.pool.replica(OWN.guid).unwrap().set_fold_steps(0);
    one.on(ReplicaEvent::Timer);
    assert!(one.said().is_empty());
    assert_eq!(one.pool.replica(OWN.guid).unwrap().shadow(), None);
}

/// A bulk connection must not outlive its session: nothing else would end it.
#[test]
fn a_session_whose_grant_was_taken_back_ends_with_its_bulk_connection() {
    let mut one = One::new();
    one.open_bulk(10, 1);
    one.on(ReplicaEvent::Fence { epoch: Epoch(6), at_once: true });
    one.closed.sort_unstable();
    assert_eq!(one.closed, [LOG, 10]);
}

/// An increment was begun by a bulk connection, and the disk has nothing at hand.
fn begun_and_cold() -> One {
    let mut one = One::new();
    one.open_bulk(10, 1);
    one.begin(10);
    one.said();
    one.pool.slow_reads.on = true;
    one
}

fn fetched(one: &mut One) {
    let ticket = one.pool.slow_reads.last;
    one.on(ReplicaEvent::Fetched { ticket });
}

fn fed(connection: u64, cursor: u64) -> (u64, FromReplica) {
    (connection, FromReplica::IncrementFed { rebuild: REBUILD, cursor })
}

/// The thread that would wait serves the clients of other volumes too.
#[test]
fn what_follows_a_feed_that_waits_for_the_disk_is_taken_after_it() {
    let mut one = begun_and_cold();
    one.say(10, feed(0, 0, 1));
    one.say(10, feed(1, 1, u64::MAX));
    one.say(10, commit(sum(&[0, 1])));
    assert_eq!(one.said(), [], "nothing is at hand");
    // The session's own connection is not held up.
    one.say(LOG, ToReplica::Ping { stable: Lsn(0), ping: Ping(4) });
    assert!(matches!(one.said()[..], [(LOG, FromReplica::Applied { ping: Ping(4), .. })]));
    fetched(&mut one);
    assert_eq!(one.said(), [], "it lacks another level of the map");
    one.on(ReplicaEvent::Fetched { ticket: FetchTicket(1) });
    assert_eq!(one.said(), [], "of a look that is over");
    one.pool.slow_reads.on = false;
    fetched(&mut one);
    assert_eq!(one.said(), [fed(10, 1), fed(10, u64::MAX), fed(10, u64::MAX), (LOG, done())]);
    assert_eq!(one.position().lsn, Lsn(20));
}

#[test]
fn a_feed_that_lacks_something_again_and_again_has_the_pool_wait_in_the_end() {
    let mut one = begun_and_cold();
    one.say(10, feed(0, 0, 1));
    let times = (0..100).find(|_| {
        fetched(&mut one);
        !one.sent.is_empty()
    });
    assert_eq!(one.said(), [fed(10, 1)]);
    assert!(times > Some(4), "a map has more levels: {times:?}");
}

#[test]
fn a_begin_goes_on_by_its_timer_after_it_waited_for_the_disk() {
    let mut one = One::new();
    one.pool.replica(OWN.guid).unwrap().set_fold_steps(1);
    one.pool.slow_reads.on = true;
    one.open_bulk(10, 1);
    one.begin(10);
    one.pool.slow_reads.on = false;
    fetched(&mut one);
    assert_eq!(one.said(), [], "the fold has another step");
    one.wake(Duration::ZERO);
    let begun = FromReplica::IncrementBegun { rebuild: REBUILD, cursor: 0, cut: Lsn(0) };
    assert_eq!(one.said(), [(10, begun)]);
}

#[test]
fn an_increment_by_the_sessions_own_connection_is_refused() {
    for message in [
        ToReplica::IncrementBegin { rebuild: REBUILD, from: Lsn(0) },
        feed(0, 0, 1),
        commit(sum(&[0])),
    ] {
        let mut one = One::new();
        one.open_bulk(10, 1);
        one.begin(10);
        one.said();
        one.say(LOG, message);
        assert!(one.said().contains(&(LOG, FromReplica::Failed(Failure::Protocol))));
    }
}

#[test]
fn feeds_that_wait_for_the_disk_end_with_their_bulk_connection() {
    let mut one = begun_and_cold();
    one.say(10, feed(0, 0, 1));
    one.on(ReplicaEvent::Disconnected { connection: 10 });
    one.pool.slow_reads.on = false;
    fetched(&mut one);
    assert_eq!(one.said(), []);
    assert_eq!(one.pool.replica(OWN.guid).unwrap().shadow(), Some((REBUILD, Lsn(0), 0)));
}

#[test]
fn feeds_that_wait_for_the_disk_end_with_their_bulk_connection_s_successor() {
    let mut one = begun_and_cold();
    one.say(10, feed(0, 0, 1));
    one.say(10, feed(1, 1, u64::MAX));
    one.open_bulk(11, 2);
    one.pool.slow_reads.on = false;
    one.said();
    fetched(&mut one);
    assert_eq!(one.said(), []);
    one.begin(11);
    let begun = FromReplica::IncrementBegun { rebuild: REBUILD, cursor: 0, cut: Lsn(0) };
    assert_eq!(one.said(), [(11, begun)]);
    one.say(11, feed(2, 0, u64::MAX));
    one.say(11, commit(sum(&[2])));
    assert_eq!(one.said(), [fed(11, u64::MAX), fed(11, u64::MAX), (LOG, done())]);
}

#[test]
fn no_more_feeds_wait_for_the_disk_than_a_target_has_under_way() {
    let mut one = begun_and_cold();
    (0..20).for_each(|lba| one.say(10, feed(lba, lba, lba + 1)));
    assert!(one.said().contains(&(LOG, FromReplica::Failed(Failure::Protocol))));
    one.pool.slow_reads.on = false;
    fetched(&mut one);
    assert_eq!(one.said(), [], "its session is over");
}

#[test]
fn a_step_of_a_begin_waits_for_the_disk_and_not_for_its_timer() {
    let mut one = One::new();
    one.pool.replica(OWN.guid).unwrap().set_fold_steps(1);
    one.open_bulk(10, 1);
    one.begin(10);
    one.pool.slow_reads.on = true;
    one.wake(Duration::ZERO);
    one.on(ReplicaEvent::Timer);
    assert_eq!(one.pool.slow_reads.last, FetchTicket(1), "one look is under way");
    assert_eq!(one.said(), []);
    one.pool.slow_reads.on = false;
    fetched(&mut one);
    let begun = FromReplica::IncrementBegun { rebuild: REBUILD, cursor: 0, cut: Lsn(0) };
    assert_eq!(one.said(), [(10, begun)]);
}
