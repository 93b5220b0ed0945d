//! The pool's one thread: its epoll loop, its sessions, its replicas.
//!
//! A round is: wait, take what other threads sent, read every readable socket and handle its
//! frames, acknowledge, hand over the reads that no cache could serve, write, begin a sync. Consecutive `Append`s of a session become one call
//! of the store (one write on disk), and each session gets one cumulative acknowledgement.
//!
//! Limits: a connection whose answers are not taken is not read from
//! ([`quoin_replication::pool_host::answers`]). Input is handled as it is read, so it never piles up.

mod background;
mod connections;
mod copying;
mod disk;
mod fetching;
mod holdings;
mod listeners;
mod recognition;
mod replicas;
mod scrubbing;
mod sessions;
mod stop;

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use quoin_reactor::{Interest, Reactor, Ready, Timers, now};
use quoin_replication::pool_host::background::{Background, QUIET};
use quoin_replication::pool_host::copying::Copying;
use quoin_replication::pool_host::recognition::{AWAITED_MAX, Start};
use quoin_replication::pool_host::round::Round;
use quoin_replication::pool_host::turns::{Turns, Work};
use quoin_replication::recognition::PoolCounts;
use quoin_replication::replica::store::{IoFault, ReplicaStore, StoreError, SyncTicket};
use quoin_replication::replica::{ReplicaAction, ReplicaEvent, ReplicaNote};
use quoin_store::{Medium, ReplicaPool};
use quoin_telemetry::notices::{Notices, Severity};
use quoin_types::ids::SessionKey;
use quoin_types::message::{Failure, FromReplica, RoomGrant, ToReplica};
use quoin_types::{Epoch, ReplicaGuid, Time};
use quoin_wire::establish::Accepted;
use quoin_wire::frame::WireError;

use crate::accept::{Acceptor, Leave};
use crate::assignment::{Assignment, AssignmentChange, PoolState, ReclaimOrder};
use crate::facts::{PoolFacts, Space};
use crate::held::Holdings;
use crate::metrics::Metrics;
use crate::scrub::ScrubPlan;
use crate::syncer::Syncer;
use crate::witness::Witness;
use connections::Connections;
use disk::DiskThreads;
pub use recognition::Recognition;
use replicas::Replicas;
use scrubbing::Health;
use stop::Stop;

/// Answers that are written before the rest of a batch is.
const EARLY_BYTES: usize = 64 << 10;

/// A read or a sync that takes so long says that the disk is failing, not that it is busy.
const STALL: Duration = Duration::from_secs(20);

/// Refusals that follow each other as quickly are of one place.
const SAME_REFUSAL: Duration = Duration::from_secs(60);

/// How long a peer whose session was ended may take to close its side, once it took all answers.
const LINGER: Duration = Duration::from_secs(2);
/// How long it may take over those answers and its side together.
const ENDING_MAX: Duration = Duration::from_secs(10);

/// Marks the keys of bulk connections: what they carry waits for all else that a round has to do.
const BULK: u64 = 1 << 62;
/// Names the listeners, and the timer that ends their rest or the wait for recognition.
const LISTENERS: u64 = 0;
/// Names the ring that reads from the disk.
const READS: u64 = 1 << 61;
/// Why a pool is short of room.
const FULL: &str =
    "next to nothing is free, and nothing can be cleaned up: delete or trim, or add pools";
const FULL_BELOW: &str = "the disk under the pool is full: free space on it, trim or delete volumes, or add pools \
     elsewhere";

/// Why a pool takes no more replicas.
const RING_FULL: &str = "the metadata ring has no room for another replica: delete replicas or snapshots in this \
     pool, or add pools";

/// Why a pool's data are not there for long.
const FILE_GONE: &str = "its file was moved, deleted or replaced, and its data end with this process: put the file \
     back, or drain the pool (`quoin pool drain`) before its process ends";

/// Messages of other threads to the shard.
pub enum Input {
    /// With what its grant lets it do.
    Answered(Box<Accepted>, Leave),
    /// A target came by a grant of a former term, and was turned away.
    TermRefused(String),
    Synced {
        ticket: SyncTicket,
        result: Result<(), IoFault>,
    },
    /// A read of [`ReplicaPool::next_fetch`] ended, after so long.
    Fetched {
        id: u64,
        result: Result<Bytes, IoFault>,
        took: Duration,
    },
    Assign(Assignment),
    /// The last assignment holds with these changes.
    Reassign(AssignmentChange),
    /// A scrub is wanted; numbers that were seen ask for nothing.
    Scrub {
        request: u64,
    },
    /// The dead space of these replicas is to be given back.
    Reclaim(Vec<ReclaimOrder>),
    /// Space, and replicas: all, or those that were used since the last answer.
    State {
        all: bool,
        answer: tokio::sync::oneshot::Sender<PoolState>,
    },
    Holdings(tokio::sync::oneshot::Sender<Holdings>),
    /// The controller's answer to a report of the start with this nonce, which told this mark.
    Judged {
        rolled_back: bool,
        nonce: u64,
        mark: u64,
    },
    Shutdown,
}

/// Why the shard ended.
#[derive(Debug)]
pub enum Ended {
    /// Asked to; everything is on media.
    Stopped,
    /// The disk failed: the pool must be opened anew from its media.
    DiskFailed(StoreError),
    /// The operating system refused the event loop itself.
    LoopFailed(std::io::Error),
}

/// Surroundings of a shard, beside the pool.
pub struct Parts {
    pub reactor: Reactor,
    pub acceptor: Acceptor,
    pub inputs: Receiver<Input>,
    pub notices: Notices,
    pub metrics: Metrics,
    pub scrub: ScrubPlan,
    pub recognition: Recognition,
    /// Counts of the pool as of its last report or the end of its process.
    pub counts: Arc<Mutex<PoolCounts>>,
    /// The last one with all changes since; each life of the pool begins with it.
    pub assignment: Assignment,
    /// Part of every cookie.
    pub witness: Witness,
    /// Told when creations and deletions are on media.
    pub made: Arc<tokio::sync::Notify>,
}

pub struct Shard<'a, P> {
    pool: P,
    parts: &'a mut Parts,
    disk: DiskThreads,
    replicas: Replicas,
    connections: Connections,
    timers: Timers,
    actions: Vec<ReplicaAction>,
    failure: Option<StoreError>,
    /// The file had no name at the last look.
    is_nameless: bool,
    background: Background,
    round: Round,
    turns: Turns,
    stop: Stop,
    health: Health,
    /// Space and live bytes when all replicas were told of last, of which they are sums; `None`: they
    /// never were.
    space: Option<(Space, u64)>,
    /// Room that was granted to the targets.
    room: RoomGrant,
    /// How often that changed.
    room_changes: u64,
    /// Shortage of room that was announced.
    short: bool,
    copying: Copying,
    start: Start,
}

impl<'a, P: ReplicaPool + PoolFacts> Shard<'a, P> {
    pub fn new(pool: P, parts: &'a mut Parts, syncer: Syncer) -> std::io::Result<Self> {
        let health = Health::new(parts.scrub.clone());
        let start = Start::new(parts.recognition, rand::random::<u64>().max(1));
        let mut shard = Shard {
            disk: DiskThreads::new(syncer, pool.read_ring(), pool.reader()),
            pool,
            parts,
            replicas: Replicas::default(),
            connections: Connections::new(),
            timers: Timers::default(),
            actions: Vec::new(),
            failure: None,
            is_nameless: false,
            background: Background::default(),
            round: Round::begin(now()),
            turns: Turns::default(),
            stop: Stop::default(),
            health,
            space: None,
            room: RoomGrant::UNBOUNDED,
            room_changes: 0,
            short: false,
            copying: Copying::default(),
            start,
        };
        if let Some(ring) = shard.disk.fetchers.descriptor() {
            shard.parts.reactor.register(ring, READS, Interest::READ)?;
        }
        let now = now();
        match shard.parts.recognition {
            Recognition::Given => shard.let_in()?,
            Recognition::Awaited => shard.timers.set(LISTENERS, Some(now + AWAITED_MAX)),
            Recognition::Refused => {}
        }
        for guid in shard.pool.replicas() {
            shard.hold(now, guid, SyncTicket(0));
        }
        let assignment = shard.parts.assignment.clone();
        shard.assign(now, assignment);
        Ok(shard)
    }

    /// Serves until it is asked to stop or the disk fails.
    pub fn run(mut self) -> Ended {
        let mut ready = Vec::new();
        let mut last_work = now();
        let mut began = last_work;
        let ended = loop {
            let timeout = self.timeout(now());
            let turn = now().since(began);
            self.parts.metrics.turn.observe(turn.as_secs_f64());
            if let Err(error) = self.parts.reactor.wait(timeout, &mut ready) {
                break Ended::LoopFailed(error);
            }
            let now = now();
            (began, self.round) = (now, Round::begin(now));
            let mut worked = !ready.is_empty();
            while let Ok(input) = self.parts.inputs.try_recv() {
                self.input(now, input);
                worked = true;
            }
            self.take_read(now);
            self.serve(now, &mut ready);
            while let Some(key) = self.timers.pop(now) {
                self.timer(now, key);
            }
            self.try_again(now);
            if !self.turns.puts_off(Work::Copying, now, quoin_reactor::now()) {
                self.copy();
            }
            self.finish_round(now);
            if worked {
                last_work = now;
            }
            if !self.turns.puts_off(Work::Background, now, quoin_reactor::now()) {
                self.background(now, now.since(last_work) >= QUIET);
            }
            self.keep_healthy(now);
            if let Some(failure) = self.failure.take() {
                break Ended::DiskFailed(failure);
            }
            if self.has_stopped(now) {
                break Ended::Stopped;
            }
        };
        self.health.scrub.stop(now());
        self.tell_counts();
        self.shut();
        self.parts.metrics.sessions.set(0);
        ended
    }

    fn timeout(&mut self, now: Time) -> Option<Duration> {
        if self.replicas.has_touched() || self.connections.has_dirty() {
            return Some(Duration::ZERO);
        }
        let next = self.timers.until_next(now);
        let stop = self.stop.due_in(now);
        let urgency = background::urgency(self.pool.background_due());
        let background = self.background.due_in(now, urgency);
        let copying = self.copying.due_in(now);
        let hung = self.background.hung_in(now);
        let undone = self.replicas.undone.due_in(now);
        let unread = self.disk.fetchers.retry_in();
        [next, stop, background, hung, copying, undone, unread, self.health.due_in(now)]
            .into_iter()
            .flatten()
            .min()
    }

    fn took(&self, duration: Duration) {
        if duration >= STALL {
            self.parts.metrics.disk.stalls.inc();
        }
    }

    /// A disk that wants room is not a failing one.
    fn refused(&self, error: &StoreError) {
        let errno = |code: i32| rustix::io::Errno::from_raw_os_error(code);
        let room = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT];
        if matches!(error, StoreError::Io(fault) if !room.contains(&errno(fault.errno))) {
            self.parts.metrics.disk.refusals.inc();
        }
    }

    fn fail(&mut self, error: StoreError) {
        self.parts.metrics.disk.failures.inc();
        if self.failure.is_none() {
            // Each replica tells of the same refusal.
            self.refused(&error);
        }
        self.failure.get_or_insert(error);
    }

    /// Has a pool whose file was cut opened anew, which fails and says why. One whose file has no name any more goes
    /// on: its data may be the last good copy, and are there as long as this process is.
    fn mind_medium(&mut self) {
        let medium = self.pool.medium();
        if medium == Medium::Cut {
            self.fail(StoreError::Damaged("its file was cut or emptied"));
        }
        let is_nameless = medium == Medium::Nameless;
        if is_nameless && !self.is_nameless {
            self.parts.notices.push(Severity::Error, "", "", "PoolFileGone", FILE_GONE.to_owned());
        }
        self.is_nameless = is_nameless;
    }

    fn input(&mut self, now: Time, input: Input) {
        match input {
            Input::Answered(answered, leave) => self.admit(now, *answered, leave),
            Input::TermRefused(why) => {
                self.parts.notices.push(Severity::Warning, "", "", "TermRefused", why);
            }
            Input::Synced { ticket, result } => self.sync_ended(now, ticket, result),
            Input::Fetched { id, result, took } => self.fetched(now, id, result, took),
            Input::Assign(assignment) => self.assign(now, assignment),
            Input::Reassign(change) => self.reassign(now, change),
            Input::State { all, answer } => {
                self.mind_medium();
                self.pool.look_below();
                self.mind_room(now);
                self.raise_mark(now);
                let state = self.state(now, all);
                // The asker may have given up waiting.
                let _ = answer.send(state);
            }
            Input::Holdings(answer) => drop(answer.send(self.holdings())),
            Input::Scrub { request } => self.ask_for_scrub(now, request),
            Input::Reclaim(orders) => self.begin_reclaims(&orders),
            Input::Judged { rolled_back, nonce, mark } => {
                self.answered(now, rolled_back, nonce, mark);
            }
            Input::Shutdown => self.begin_stop(now),
        }
    }

    /// Serves what is ready, until the round is long enough. The next wait reports the others again.
    fn serve(&mut self, at: Time, ready: &mut [Ready]) {
        self.turns.order(ready, |ready| ready.key, |ready| ready.key & BULK != 0);
        for (served, one) in ready.iter().enumerate() {
            if served > 0 && self.turns.is_enough(at, now()) {
                return self.turns.pass_over(ready[served..].iter().map(|ready| ready.key));
            }
            self.ready(at, *one);
        }
    }

    fn ready(&mut self, now: Time, ready: Ready) {
        if ready.key == LISTENERS {
            return self.accept(now);
        }
        if ready.key == READS {
            // They were taken before.
            return;
        }
        if ready.writable {
            self.write(now, ready.key);
        }
        if ready.readable {
            self.read(ready.key);
        }
    }

    /// Messages of a rebuild wait for those of clients' sessions.
    fn take(
        &mut self,
        now: Time,
        connection: u64,
        guid: ReplicaGuid,
        session: SessionKey,
        message: ToReplica,
    ) {
        let message = match message {
            message if message.is_copying() => {
                let spare = self.spare(guid);
                let Some(oldest) = self.copying.wait(connection, spare, message) else { return };
                oldest
            }
            ToReplica::Close => {
                self.copying.forget(connection);
                ToReplica::Close
            }
            message => {
                if let ToReplica::Append { .. } | ToReplica::Read { .. } = message {
                    self.copying.client(now);
                }
                message
            }
        };
        self.message(now, connection, guid, session, message);
    }

    fn message(
        &mut self,
        now: Time,
        connection: u64,
        guid: ReplicaGuid,
        session: SessionKey,
        message: ToReplica,
    ) {
        if self.stop.has_begun() {
            return self.end(connection);
        }
        let metrics = &self.parts.metrics;
        let timed = match &message {
            ToReplica::Append { entries, .. } => {
                metrics.log.appends.inc();
                metrics.log.entries.inc_by(entries.len() as u64);
                metrics.log.written.inc_by(entries.iter().map(|e| e.data.len() as u64).sum());
                Some(metrics.log.append_duration.clone())
            }
            ToReplica::Read { .. } => {
                metrics.reads.inc();
                Some(metrics.read_duration.clone())
            }
            _ => None,
        };
        // Blocks that are found bad are asked of the others at once.
        let finds = matches!(message, ToReplica::Verify { repair: true, .. });
        if !self.replicas.contains(guid) {
            let refuse = FromReplica::Refuse { promised: Epoch::ZERO, failure: Failure::Unknown };
            self.send(connection, session, &refuse);
            return self.end(connection);
        }
        let began = std::time::Instant::now();
        self.deliver(now, guid, ReplicaEvent::Message { connection, session, message });
        if finds {
            self.collect_bad_copies(now);
        }
        if let Some(histogram) = timed {
            let took = began.elapsed();
            self.took(took);
            histogram.observe(took.as_secs_f64());
        }
    }

    fn deliver(&mut self, now: Time, guid: ReplicaGuid, event: ReplicaEvent) {
        self.tell_room(now, guid);
        self.deliver_alone(now, guid, event);
    }

    /// Tells a replica the room as it changed last, if it was not told.
    fn tell_room(&mut self, now: Time, guid: ReplicaGuid) {
        let changes = self.room_changes;
        let held = self.replicas.get_mut(guid).filter(|held| held.room_told != changes);
        if let Some(held) = held {
            held.room_told = changes;
            self.deliver_alone(now, guid, ReplicaEvent::Room(self.room));
        }
    }

    fn deliver_alone(&mut self, now: Time, guid: ReplicaGuid, event: ReplicaEvent) {
        let Some(held) = self.replicas.get_mut(guid) else { return };
        {
            let Some(mut store) = self.pool.replica(guid) else { return };
            held.replica.on(now, event, &mut store, &mut self.actions);
        }
        self.replicas.touch(guid);
        self.act(guid);
    }

    fn act(&mut self, guid: ReplicaGuid) {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                ReplicaAction::Send { connection, session, message } => {
                    self.send(connection, session, &message);
                }
                ReplicaAction::Disconnect { connection } => self.end(connection),
                ReplicaAction::Timer { at } => {
                    if let Some(held) = self.replicas.get(guid) {
                        self.timers.set(held.timer_key, at);
                    }
                }
                ReplicaAction::Note(note) => self.note(guid, &note),
            }
        }
        self.actions = actions;
    }

    fn note(&mut self, guid: ReplicaGuid, note: &ReplicaNote) {
        let Some(store) = self.pool.replica(guid) else { return };
        let (volume, replica) = (store.identity().volume, store.identity().replica);
        drop(store);
        let (severity, reason, message) = match note {
            ReplicaNote::Opened { session } => {
                tracing::info!(%volume, %replica, epoch = %session.epoch, "opened");
                self.opened(guid);
                return;
            }
            ReplicaNote::Repaired(repaired) => {
                self.copy_came(guid, *repaired);
                return;
            }
            ReplicaNote::Closed => {
                tracing::info!(%volume, %replica, "closed");
                return;
            }
            ReplicaNote::Damaged(what) => (
                Severity::Error,
                "ReplicaDamaged",
                format!("{what}; it is rebuilt from the other replicas"),
            ),
            ReplicaNote::DiskFailed(error) => {
                self.fail(*error);
                (
                    Severity::Error,
                    "DiskFailed",
                    format!("{error}; the pool is opened anew from its media"),
                )
            }
            ReplicaNote::Unreadable(error) => {
                // Its target comes back to the same sector until it gives up: that is one refusal.
                let now = now();
                let held = self.replicas.get_mut(guid);
                let before = held.and_then(|held| held.refused_at.replace(now));
                if before.is_none_or(|before| now.since(before) > SAME_REFUSAL) {
                    self.refused(error);
                }
                (
                    Severity::Error,
                    "DiskRefusesToRead",
                    format!("{error}; it is tried again, and rebuilt from the others if it stays"),
                )
            }
            ReplicaNote::Full => (
                Severity::Error,
                "PoolFull",
                "no room for the volume's next writes: they wait, or this replica falls out of \
                 sync, until space is freed"
                    .into(),
            ),
            ReplicaNote::RingFull => (
                Severity::Error,
                "MetadataRingFull",
                "the pool's metadata ring has no room for the replica's records, whatever room there \
                 is for data: delete replicas or snapshots in this pool, or move replicas to others"
                    .into(),
            ),
            ReplicaNote::Rebuilt { position } => (
                Severity::Normal,
                "ReplicaRebuilt",
                format!("complete up to epoch {} LSN {}", position.epoch, position.lsn),
            ),
            ReplicaNote::InvariantRefused(name) => (
                Severity::Error,
                "InvariantRefused",
                format!("a target sent what {name} forbids; its session was ended"),
            ),
        };
        self.parts.notices.push(severity, volume, replica, reason, message);
    }

    fn timer(&mut self, now: Time, key: u64) {
        if key == LISTENERS {
            return self.listen_again(now);
        }
        match self.replicas.of_timer(key) {
            Some(guid) => self.deliver(now, guid, ReplicaEvent::Timer),
            None => self.lost(now, key, &WireError::Closed),
        }
    }

    /// One acknowledgement a session, one sync for all, one write a socket.
    fn finish_round(&mut self, now: Time) {
        self.mind_room(now);
        while let Some((guid, held)) = self.replicas.next_touched() {
            held.replica.flush(&mut self.actions);
            self.act(guid);
        }
        // The disk works while the answers are written.
        self.begin_fetches(now);
        self.begin_sync();
        let mut copying = Vec::new();
        while let Some(key) = self.connections.next_dirty() {
            if key & BULK != 0 {
                copying.push(key);
                continue;
            }
            self.connections.mark_clean(key);
            self.write(now, key);
        }
        for key in copying {
            self.connections.mark_clean(key);
            self.write(now, key);
        }
        // Frames that had waited for their answers to be taken may have been handled by now.
        self.begin_fetches(now);
        self.begin_sync();
    }

    /// Grants room to targets before they learn which entries this round applied.
    fn mind_room(&mut self, now: Time) {
        let room = self.pool.room(self.room);
        if room != self.room {
            (self.room, self.room_changes) = (room, self.room_changes + 1);
            // The others hear of it as they are used next: there may be thousands of them.
            for guid in self.replicas.in_session() {
                self.tell_room(now, guid);
            }
        }
        let short = self.pool.is_short(self.short);
        if short == self.short {
            return;
        }
        let below = self.pool.is_short_below();
        self.short = short;
        let (severity, reason, message) = match short {
            true if below => (Severity::Error, "PoolShort", FULL_BELOW),
            true => (Severity::Error, "PoolShort", FULL),
            false => (Severity::Normal, "PoolHasRoom", "there is room again"),
        };
        self.parts.notices.push(severity, "", "", reason, message.into());
    }

    fn begin_sync(&mut self) {
        if let Some(ticket) = self.pool.sync_wanted() {
            self.parts.metrics.disk.syncs.inc();
            self.disk.begin_sync(now(), ticket);
        }
    }

    fn sync_ended(&mut self, now: Time, ticket: SyncTicket, result: Result<(), IoFault>) {
        if let Some(took) = self.disk.syncs.ended(now, ticket) {
            self.parts.metrics.disk.sync_duration.observe(took.as_secs_f64());
            self.took(took);
        }
        let result = self.pool.sync_finished(ticket, result);
        if result.is_ok() {
            self.disk.syncs.succeeded(ticket);
            if self.replicas.untold.take_if(|made| self.disk.syncs.covers(*made)).is_some() {
                self.parts.made.notify_one();
            }
            self.background.disk_answered(now);
        }
        let told = match result {
            Ok(()) => self.pool.take_served(),
            Err(_) => self.replicas.guids(),
        };
        for guid in told {
            self.parts.metrics.disk.sync_deliveries.inc();
            self.deliver(now, guid, ReplicaEvent::Synced { ticket, result });
        }
        if let Err(error) = result {
            self.fail(error);
        }
    }
}
