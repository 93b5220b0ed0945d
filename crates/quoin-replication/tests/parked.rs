//! Reads that wait for the disk: they hold nothing else back, and end with their session.

use crate::one_replica::*;
use quoin_replication::replica::ReplicaEvent;
use quoin_replication::replica::store::FetchTicket;
use quoin_replication::step::Step;
use quoin_store::ReplicaPool;
use quoin_types::message::{Content, Failure, FromReplica, Ping, ReadView, ToReplica};
use quoin_types::*;

fn read(id: u64, after: u64) -> ToReplica {
    let (view, after, ping) = (ReadView::Live, Lsn(after), Ping(id));
    ToReplica::Read { id, view, lba: 3, blocks: 1, after, want_data: true, ping }
}

/// A replica that is fed, whose block 3 holds ones, and whose disk has nothing at hand.
fn cold() -> (One, SessionKey) {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let entry = one.entry(5, 1);
    one.append(session, entry);
    one.pool.slow_reads.on = true;
    (one, session)
}

/// Requests that were answered with data, each with the LSN that it was read at and its first byte.
fn answered(sent: &[FromReplica]) -> Vec<(u64, u64, u8)> {
    let data = sent.iter().filter_map(|message| match message {
        FromReplica::Data { id, at, slots, ping } => {
            assert_eq!(*ping, Ping(*id), "the ping of its own request");
            let Content::Data { data, .. } = &slots[0].content else { panic!("{slots:?}") };
            Some((*id, at.0, data[0]))
        }
        _ => None,
    });
    data.collect()
}

/// The disk has given what this call lacked.
fn fetched(one: &mut One, ticket: u64) -> Vec<FromReplica> {
    one.on(ReplicaEvent::Fetched { ticket: FetchTicket(ticket) })
}

fn is_parked(one: &mut One) -> bool {
    let store = one.pool.replica(OWN.guid).unwrap();
    one.replica.steps(&store).contains(&Step::ReadsWaiting)
}

#[test]
fn a_read_that_waits_for_the_disk_holds_back_neither_writes_nor_later_reads() {
    let (mut one, session) = cold();
    assert_eq!(answered(&one.send(session, read(7, 1))), []);
    assert!(is_parked(&mut one));
    let entry = one.entry(5, 2);
    let sent = one.append(session, entry);
    let applied = |m: &FromReplica| matches!(m, FromReplica::Applied { applied: Lsn(2), .. });
    assert!(sent.iter().any(applied), "{sent:?}");
    one.pool.slow_reads.on = false;
    assert_eq!(answered(&one.send(session, read(8, 0))), [(8, 2, 2)]);
    // The answer is the content that the replica holds by now, and says so.
    assert_eq!(answered(&fetched(&mut one, 1)), [(7, 2, 2)]);
    assert!(!is_parked(&mut one));
    assert_eq!(fetched(&mut one, 1), [], "it was answered once");
}

#[test]
fn a_read_whose_entry_came_waits_for_the_disk_then() {
    let (mut one, session) = cold();
    assert_eq!(answered(&one.send(session, read(7, 2))), []);
    let entry = one.entry(5, 2);
    assert_eq!(answered(&one.append(session, entry)), []);
    one.pool.slow_reads.on = false;
    assert_eq!(answered(&fetched(&mut one, 1)), [(7, 2, 2)]);
}

#[test]
fn a_read_that_lacks_something_again_and_again_has_the_pool_wait_in_the_end() {
    let (mut one, session) = cold();
    let mut sent = one.send(session, read(7, 1));
    let mut times = 0;
    while answered(&sent).is_empty() {
        times += 1;
        assert!(times < 100, "it is never answered");
        let ticket = one.pool.slow_reads.last.0;
        sent = fetched(&mut one, ticket);
    }
    assert!(times > 4, "a map has more levels");
    assert_eq!(answered(&sent), [(7, 1, 1)]);
}

#[test]
fn reads_that_wait_for_the_disk_end_with_their_session() {
    let (mut one, session) = cold();
    one.send(session, read(7, 1));
    one.send(session, read(8, 1));
    let next = key(5, 1, 2);
    one.opened(next);
    one.pool.slow_reads.on = false;
    assert_eq!(fetched(&mut one, 1), []);
    one.feed(next);
    assert_eq!(fetched(&mut one, 2), [], "the next session has asked for nothing");
    assert!(!is_parked(&mut one));
}

#[test]
fn a_read_that_waits_for_the_disk_is_not_answered_after_close() {
    let (mut one, session) = cold();
    one.send(session, read(7, 1));
    one.syncs_wait = true;
    one.send(session, ToReplica::Close);
    one.pool.slow_reads.on = false;
    assert_eq!(fetched(&mut one, 1), []);
}

#[test]
fn entries_and_slots_that_wait_for_the_disk_are_sent_once_it_has_given_them() {
    let (mut one, session) = cold();
    let pull = ToReplica::Pull {
        id: 21,
        view: ReadView::Live,
        from: Lsn(0),
        cursor: 0,
        want_data: true,
        bytes_max: 1 << 20,
    };
    assert_eq!(one.send(session, pull), []);
    let fetch = ToReplica::Fetch { id: 22, after: Lsn(0), bytes_max: 1 << 20 };
    assert_eq!(one.send(session, fetch), []);
    one.pool.slow_reads.on = false;
    let sent = fetched(&mut one, 2);
    let entries = |m: &FromReplica| match m {
        FromReplica::Fetched { id: 22, entries, gone: false } => Some(entries.len()),
        _ => None,
    };
    assert_eq!(sent.iter().find_map(entries), Some(1), "{sent:?}");
    let sent = fetched(&mut one, 1);
    let slots = |m: &FromReplica| match m {
        FromReplica::Pulled { id: 21, slots, gone: false, .. } => Some(slots.len()),
        _ => None,
    };
    assert_eq!(sent.iter().find_map(slots), Some(1), "{sent:?}");
}

/// Proves that a hostile target cannot pile up reads.
#[test]
fn no_more_reads_wait_for_the_disk_than_a_session_may_have() {
    let (mut one, session) = cold();
    let refused = |sent: &[FromReplica]| sent.contains(&FromReplica::Failed(Failure::Protocol));
    let least = (0..10_000).find(|id| refused(&one.send(session, read(*id, 1))));
    assert_eq!(least, Some(4096));
    assert!(!is_parked(&mut one));
}
