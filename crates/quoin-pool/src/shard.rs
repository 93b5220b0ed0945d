//! The pool's one thread: its epoll loop, its sessions, its replicas.
//!
//! A round is: wait, take what other threads sent, read every readable socket and handle its
//! frames, acknowledge, write, begin a sync. Consecutive `Append`s of a session become one call
//! of the store (one write on disk), and each session gets one cumulative acknowledgement.
//!
//! Limits: a connection whose answers are not taken is not read from ([`QUEUED_MAX`]), nor is any
//! that owes answers once the pool as a whole holds [`POOL_QUEUED_MAX`]. Input is handled as it
//! is read, so it never piles up.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use quoin_core::entry::SharedEntry;
use quoin_core::ids::SessionKey;
use quoin_core::message::{Failure, FromReplica, Ping, ToReplica};
use quoin_core::replica::store::{IoFault, ReplicaMeta, ReplicaStore, StoreError, SyncTicket};
use quoin_core::replica::{Replica, ReplicaAction, ReplicaEvent, ReplicaNote};
use quoin_core::{Epoch, Lsn, Position, ReplicaGuid, Time};
use quoin_store::{Due, ReplicaPool};
use quoin_wire::establish::Answered;
use quoin_wire::frame::WireError;
use quoin_wire::notices::{Notices, Severity};
use quoin_wire::reactor::{Interest, Reactor, Ready, Timers, now};
use quoin_wire::{Connection, Frame, ReadOutcome};
use rustix::net::Shutdown;

use crate::accept::Acceptor;
use crate::assignment::{Assignment, Phase, PoolState, ReplicaState, Wanted};
use crate::metrics::Metrics;
use crate::syncer::Syncer;

/// Answers one connection may owe before it is not read from.
const QUEUED_MAX: usize = 16 << 20;
/// Answers all connections may owe before those that owe any are not read from.
const POOL_QUEUED_MAX: usize = 256 << 20;
/// Sessions of all replicas together.
const CONNECTIONS_MAX: usize = 8192;
/// Entries that become one call of the store.
const APPEND_BYTES_MAX: usize = 4 << 20;
/// Background work between two looks at the sockets.
const BACKGROUND_STEP_BYTES: u64 = 1 << 20;
/// How long nothing must have come in before relaxed background work is done.
const QUIET: Duration = Duration::from_millis(2);
/// How long a stopping pool waits for its last sync and for answers to be taken.
const STOP_MAX: Duration = Duration::from_secs(10);

/// How long a peer whose session was ended may take to close its side.
const LINGER: Duration = Duration::from_secs(2);

const LISTENER: u64 = 0;

/// What other threads tell the shard.
pub enum Input {
    Answered(Box<Answered>),
    Synced { ticket: SyncTicket, result: Result<(), IoFault> },
    Assign(Assignment),
    State(tokio::sync::oneshot::Sender<PoolState>),
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

/// What a shard needs beside the pool.
pub struct Parts {
    pub reactor: Reactor,
    pub acceptor: Acceptor,
    pub inputs: Receiver<Input>,
    pub notices: Notices,
    pub metrics: Metrics,
}

/// Space, as a pool reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    /// What clients may still fill.
    pub free_bytes: u64,
}

/// What a pool tells beside holding replicas.
pub trait PoolFacts {
    fn space(&self) -> Space;
    /// Bytes that this replica takes.
    fn replica_bytes(&self, guid: ReplicaGuid) -> u64;
    /// Times the pool was opened.
    fn start_counter(&self) -> u64;
}

/// One believed connection.
struct Peer {
    connection: Connection,
    session: SessionKey,
    guid: ReplicaGuid,
    interest: Interest,
    /// Whole frames may wait in its buffer: its answers were not taken fast enough.
    stalled: bool,
    /// To be closed: what is queued is written, what still comes is not looked at.
    ending: bool,
    /// Listed in `dirty`.
    dirty: bool,
}

struct Held {
    replica: Replica,
    timer_key: u64,
    /// Listed in `touched`.
    touched: bool,
    /// Created but not on media before this ticket is done.
    born: SyncTicket,
}

pub struct Shard<'a, P> {
    pool: P,
    parts: &'a mut Parts,
    syncer: Syncer,
    replicas: BTreeMap<ReplicaGuid, Held>,
    by_timer: HashMap<u64, ReplicaGuid>,
    peers: HashMap<u64, Peer>,
    timers: Timers,
    /// Replicas that were assigned here but are not held.
    gone: Vec<ReplicaState>,
    dirty: Vec<u64>,
    touched: Vec<ReplicaGuid>,
    actions: Vec<ReplicaAction>,
    /// Names connections and timers; 0 is the listener.
    next_key: u64,
    queued: usize,
    synced: SyncTicket,
    failure: Option<StoreError>,
    stopping: Option<(SyncTicket, Time)>,
}

impl<'a, P: ReplicaPool + PoolFacts> Shard<'a, P> {
    pub fn new(pool: P, parts: &'a mut Parts, syncer: Syncer) -> std::io::Result<Self> {
        parts.reactor.register(parts.acceptor.listener(), LISTENER, Interest::READ)?;
        let mut shard = Shard {
            pool,
            parts,
            syncer,
            replicas: BTreeMap::new(),
            by_timer: HashMap::new(),
            peers: HashMap::new(),
            timers: Timers::default(),
            gone: Vec::new(),
            dirty: Vec::new(),
            touched: Vec::new(),
            actions: Vec::new(),
            next_key: LISTENER + 1,
            queued: 0,
            synced: SyncTicket(0),
            failure: None,
            stopping: None,
        };
        let now = now();
        for guid in shard.pool.replicas() {
            shard.hold(now, guid, SyncTicket(0));
        }
        Ok(shard)
    }

    /// Serves until it is asked to stop or the disk fails.
    pub fn run(mut self) -> Ended {
        let mut ready = Vec::new();
        let mut last_work = now();
        let ended = loop {
            let timeout = self.timeout(now());
            if let Err(error) = self.parts.reactor.wait(timeout, &mut ready) {
                break Ended::LoopFailed(error);
            }
            let now = now();
            let mut worked = !ready.is_empty();
            while let Ok(input) = self.parts.inputs.try_recv() {
                self.input(now, input);
                worked = true;
            }
            for ready in &ready {
                self.ready(now, *ready);
            }
            while let Some(key) = self.timers.pop(now) {
                self.timer(now, key);
            }
            self.finish_round(now);
            if worked {
                last_work = now;
            }
            self.background(now.since(last_work) >= QUIET);
            if let Some(failure) = self.failure.take() {
                break Ended::DiskFailed(failure);
            }
            if let Some((ticket, deadline)) = self.stopping
                && (now >= deadline || (self.synced >= ticket && self.queued == 0))
            {
                break Ended::Stopped;
            }
        };
        self.parts.reactor.deregister(self.parts.acceptor.listener());
        self.parts.metrics.sessions.set(0);
        ended
    }

    fn timeout(&mut self, now: Time) -> Option<Duration> {
        let next = self.timers.until_next(now);
        let stop = self.stopping.map(|(_, deadline)| deadline.since(now));
        let background = match self.pool.background_due() {
            Due::Idle => None,
            Due::Relaxed => Some(QUIET),
            Due::Soon | Due::Urgent => Some(Duration::ZERO),
        };
        [next, stop, background].into_iter().flatten().min()
    }

    fn background(&mut self, quiet: bool) {
        let step = match self.pool.background_due() {
            Due::Idle => return,
            Due::Relaxed if !quiet => return,
            _ => self.pool.background(BACKGROUND_STEP_BYTES),
        };
        match step {
            Ok(_) => self.begin_sync(),
            // A full pool is what clients are told when they write; nothing is broken.
            Err(StoreError::Full) => {}
            Err(error) => self.fail(error),
        }
    }

    fn fail(&mut self, error: StoreError) {
        self.parts.metrics.disk_failures.inc();
        self.failure.get_or_insert(error);
    }

    fn input(&mut self, now: Time, input: Input) {
        match input {
            Input::Answered(answered) => self.admit(*answered),
            Input::Synced { ticket, result } => self.sync_ended(now, ticket, result),
            Input::Assign(assignment) => self.assign(now, assignment),
            Input::State(answer) => {
                let state = self.state();
                // The asker may have given up waiting.
                let _ = answer.send(state);
            }
            Input::Shutdown => self.stop(now),
        }
    }

    fn admit(&mut self, answered: Answered) {
        let Answered { connection, session, hello, peer_address } = answered;
        if self.peers.len() >= CONNECTIONS_MAX || self.stopping.is_some() {
            return;
        }
        let key = self.key();
        if let Err(error) = self.parts.reactor.register(connection.socket(), key, Interest::READ) {
            tracing::warn!(%error, %peer_address, "cannot watch a data connection");
            return;
        }
        let peer = Peer {
            connection,
            session,
            guid: hello.guid,
            interest: Interest::READ,
            stalled: false,
            ending: false,
            dirty: false,
        };
        self.peers.insert(key, peer);
        self.parts.metrics.sessions.set(self.peers.len() as i64);
    }

    fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    fn ready(&mut self, now: Time, ready: Ready) {
        if ready.key == LISTENER {
            return self.parts.acceptor.accept();
        }
        if ready.writable {
            self.write(now, ready.key);
        }
        if ready.readable {
            self.read(now, ready.key);
        }
    }

    fn read(&mut self, now: Time, key: u64) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let outcome = peer.connection.receive();
        if peer.ending {
            peer.connection.discard_input();
        } else {
            self.take_frames(now, key);
        }
        match outcome {
            Ok(ReadOutcome::End) => self.lost(now, key, &WireError::Closed),
            Ok(_) => {}
            Err(error) => self.lost(now, key, &error),
        }
    }

    /// Handles the whole frames that a connection has read, as long as its answers are taken.
    fn take_frames(&mut self, now: Time, key: u64) {
        let mut appends = Appends::default();
        loop {
            let Some(peer) = self.peers.get_mut(&key) else { return };
            if peer.ending {
                return;
            }
            let queued = peer.connection.queued_bytes();
            peer.stalled = queued > QUEUED_MAX || (queued > 0 && self.queued > POOL_QUEUED_MAX);
            if peer.stalled {
                break;
            }
            let (guid, session) = (peer.guid, peer.session);
            let message = match peer.connection.next_frame() {
                Ok(Some(incoming)) => match incoming.frame {
                    Frame::ToReplica(message) if incoming.session == session => message,
                    _ => return self.lost(now, key, &WireError::Malformed("session")),
                },
                Ok(None) => break,
                Err(error) => {
                    self.append(now, key, &mut appends);
                    return self.lost(now, key, &error);
                }
            };
            let ToReplica::Append { entries, stable, sync, ping } = message else {
                self.append(now, key, &mut appends);
                self.message(now, key, guid, session, message);
                continue;
            };
            appends.add(entries, stable, sync, ping);
            if appends.bytes >= APPEND_BYTES_MAX {
                self.append(now, key, &mut appends);
            }
        }
        self.append(now, key, &mut appends);
        self.watch(key);
    }

    fn append(&mut self, now: Time, key: u64, appends: &mut Appends) {
        let Some(message) = appends.take() else { return };
        let Some(peer) = self.peers.get(&key) else { return };
        let (guid, session) = (peer.guid, peer.session);
        self.message(now, key, guid, session, message);
    }

    fn message(
        &mut self,
        now: Time,
        connection: u64,
        guid: ReplicaGuid,
        session: SessionKey,
        message: ToReplica,
    ) {
        let metrics = &self.parts.metrics;
        match &message {
            ToReplica::Append { entries, .. } => {
                metrics.appends.inc();
                metrics.entries.inc_by(entries.len() as u64);
                metrics.written.inc_by(entries.iter().map(|e| e.data.len() as u64).sum());
            }
            ToReplica::Read { .. } => {
                metrics.reads.inc();
            }
            _ => {}
        }
        if !self.replicas.contains_key(&guid) {
            let refuse = FromReplica::Refuse { promised: Epoch::ZERO, failure: Failure::Unknown };
            self.send(connection, session, &refuse);
            return self.end(connection);
        }
        self.deliver(now, guid, ReplicaEvent::Message { connection, session, message });
    }

    fn deliver(&mut self, now: Time, guid: ReplicaGuid, event: ReplicaEvent) {
        let Some(held) = self.replicas.get_mut(&guid) else { return };
        {
            let Some(mut store) = self.pool.replica(guid) else { return };
            held.replica.on(now, event, &mut store, &mut self.actions);
        }
        if !held.touched {
            held.touched = true;
            self.touched.push(guid);
        }
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
                    if let Some(held) = self.replicas.get(&guid) {
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
            ReplicaNote::Full => (
                Severity::Error,
                "PoolFull",
                "the pool is full: its replicas fall out of sync until space is freed or added"
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

    fn send(&mut self, connection: u64, session: SessionKey, message: &FromReplica) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        if peer.ending {
            return;
        }
        let before = peer.connection.queued_bytes();
        if let Err(error) = peer.connection.send_from_replica(session, message) {
            tracing::error!(%error, "an answer could not be framed");
            return self.end(connection);
        }
        self.queued += peer.connection.queued_bytes() - before;
        self.mark_dirty(connection);
    }

    /// Closes a connection after what was sent before.
    fn end(&mut self, connection: u64) {
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.ending = true;
            self.mark_dirty(connection);
        }
    }

    fn mark_dirty(&mut self, key: u64) {
        if let Some(peer) = self.peers.get_mut(&key)
            && !peer.dirty
        {
            peer.dirty = true;
            self.dirty.push(key);
        }
    }

    fn write(&mut self, now: Time, key: u64) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let before = peer.connection.queued_bytes();
        let flushed = peer.connection.flush();
        self.queued -= before - peer.connection.queued_bytes();
        match flushed {
            Err(error) => return self.lost(now, key, &error),
            Ok(true) if peer.ending => {
                // The peer must be able to read what was said last, so the socket is not torn
                // down under it: it is given a moment to close its side.
                let _ = rustix::net::shutdown(peer.connection.socket(), Shutdown::Write);
                self.timers.set(key, Some(now + LINGER));
            }
            Ok(_) => {}
        }
        if peer.stalled && peer.connection.queued_bytes() <= QUEUED_MAX / 2 {
            self.take_frames(now, key);
        }
        self.watch(key);
    }

    /// Asks for exactly the readiness that this connection can use.
    fn watch(&mut self, key: u64) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let interest = Interest {
            read: !peer.stalled,
            write: peer.connection.queued_bytes() > 0 && !peer.dirty,
        };
        if interest != peer.interest {
            peer.interest = interest;
            if let Err(error) = self.parts.reactor.modify(peer.connection.socket(), key, interest) {
                tracing::warn!(%error, "cannot watch a data connection");
            }
        }
    }

    fn lost(&mut self, now: Time, key: u64, why: &WireError) {
        let Some(peer) = self.peers.remove(&key) else { return };
        self.parts.reactor.deregister(peer.connection.socket());
        self.timers.set(key, None);
        self.queued -= peer.connection.queued_bytes();
        self.parts.metrics.sessions.set(self.peers.len() as i64);
        if !peer.ending && !matches!(why, WireError::Closed) {
            tracing::warn!(error = %why, guid = %peer.guid, "a session's connection failed");
        }
        self.deliver(now, peer.guid, ReplicaEvent::Disconnected { connection: key });
    }

    fn timer(&mut self, now: Time, key: u64) {
        match self.by_timer.get(&key).copied() {
            Some(guid) => self.deliver(now, guid, ReplicaEvent::Timer),
            None => self.lost(now, key, &WireError::Closed),
        }
    }

    /// One acknowledgement a session, one write a socket, one sync for all.
    fn finish_round(&mut self, now: Time) {
        while let Some(guid) = self.touched.pop() {
            if let Some(held) = self.replicas.get_mut(&guid) {
                held.touched = false;
                held.replica.flush(&mut self.actions);
                self.act(guid);
            }
        }
        while let Some(key) = self.dirty.pop() {
            if let Some(peer) = self.peers.get_mut(&key) {
                peer.dirty = false;
            }
            self.write(now, key);
        }
        self.begin_sync();
    }

    fn begin_sync(&mut self) {
        if let Some(ticket) = self.pool.sync_wanted() {
            self.parts.metrics.syncs.inc();
            self.syncer.begin(ticket);
        }
    }

    fn sync_ended(&mut self, now: Time, ticket: SyncTicket, result: Result<(), IoFault>) {
        self.pool.sync_finished(ticket, result);
        if result.is_ok() {
            self.synced = self.synced.max(ticket);
        }
        let result = result.map_err(StoreError::Io);
        for guid in self.replicas.keys().copied().collect::<Vec<_>>() {
            self.deliver(now, guid, ReplicaEvent::Synced { ticket, result });
        }
        if let Err(error) = result {
            self.fail(error);
        }
    }

    fn stop(&mut self, now: Time) {
        for guid in self.replicas.keys().copied().collect::<Vec<_>>() {
            self.deliver(now, guid, ReplicaEvent::Shutdown);
        }
        self.stopping = Some((self.pool.request_sync(), now + STOP_MAX));
    }

    fn hold(&mut self, now: Time, guid: ReplicaGuid, born: SyncTicket) {
        let cookie = self.pool.cookie();
        let Some(store) = self.pool.replica(guid) else { return };
        let replica = Replica::new(now, cookie, &store);
        drop(store);
        let timer_key = self.key();
        self.by_timer.insert(timer_key, guid);
        self.replicas.insert(guid, Held { replica, timer_key, touched: false, born });
        self.parts.metrics.replicas.set(self.replicas.len() as i64);
    }

    fn assign(&mut self, now: Time, assignment: Assignment) {
        self.gone.clear();
        for wanted in assignment.0 {
            let held = self.replicas.contains_key(&wanted.identity.guid);
            match (wanted.phase, held) {
                (Phase::Delete, true) => self.delete(now, &wanted),
                (Phase::Init | Phase::Recreate, false)
                    if !self.pool.is_retired(wanted.identity.guid) =>
                {
                    self.create(now, wanted);
                }
                (_, true) => {}
                (_, false) => self.gone.push(gone(&wanted)),
            }
        }
    }

    fn create(&mut self, now: Time, wanted: Wanted) {
        let guid = wanted.identity.guid;
        let (volume, replica) = (wanted.identity.volume, wanted.identity.replica);
        let meta = ReplicaMeta {
            membership: wanted.membership,
            quorum: wanted.phase == Phase::Init,
            ..ReplicaMeta::default()
        };
        match self.pool.create(wanted.identity, meta, wanted.blocks) {
            Ok(()) => {
                let ticket = self.pool.request_sync();
                self.hold(now, guid, ticket);
                tracing::info!(%volume, %replica, %guid, "replica created");
            }
            Err(error) => {
                let message = format!("cannot create the replica: {error}");
                self.parts.notices.push(
                    Severity::Error,
                    volume,
                    replica,
                    "ReplicaNotCreated",
                    message,
                );
            }
        }
    }

    fn delete(&mut self, now: Time, wanted: &Wanted) {
        let guid = wanted.identity.guid;
        self.deliver(now, guid, ReplicaEvent::Shutdown);
        match self.pool.delete(guid) {
            Ok(_) => {
                if let Some(held) = self.replicas.remove(&guid) {
                    self.timers.set(held.timer_key, None);
                    self.by_timer.remove(&held.timer_key);
                }
                let ending: Vec<u64> =
                    self.peers.iter().filter(|(_, p)| p.guid == guid).map(|(k, _)| *k).collect();
                for key in ending {
                    self.end(key);
                }
                self.pool.request_sync();
                self.parts.metrics.replicas.set(self.replicas.len() as i64);
                self.gone.push(gone(wanted));
                tracing::info!(volume = %wanted.identity.volume, %guid, "replica deleted");
            }
            Err(error) => self.fail(error),
        }
    }

    fn state(&mut self) -> PoolState {
        let mut replicas = self.gone.clone();
        for (guid, held) in &self.replicas {
            let used_bytes = self.pool.replica_bytes(*guid);
            let Some(store) = self.pool.replica(*guid) else { continue };
            // Not said before it is on media: "created" is what lets a volume be formed.
            if held.born > self.synced {
                continue;
            }
            let (state, meta) = (store.state(), store.meta());
            replicas.push(ReplicaState {
                volume: store.identity().volume,
                replica: store.identity().replica,
                guid: *guid,
                state: if meta.damaged {
                    "damaged"
                } else if held.replica.is_open() {
                    "open"
                } else if meta.promised == Epoch::ZERO {
                    "created"
                } else {
                    "closed"
                },
                quorum: meta.quorum,
                position: state.position,
                stable: state.stable.0,
                used_bytes,
            });
        }
        let space = self.pool.space();
        self.parts.metrics.used.set(space.used_bytes as i64);
        self.parts.metrics.capacity.set(space.capacity_bytes as i64);
        PoolState { space, start_counter: self.pool.start_counter(), replicas }
    }
}

fn gone(wanted: &Wanted) -> ReplicaState {
    ReplicaState {
        volume: wanted.identity.volume,
        replica: wanted.identity.replica,
        guid: wanted.identity.guid,
        state: "gone",
        quorum: false,
        position: Position::default(),
        stable: 0,
        used_bytes: 0,
    }
}

/// Consecutive `Append`s on their way to become one.
#[derive(Default)]
struct Appends {
    entries: Vec<SharedEntry>,
    stable: Lsn,
    sync: bool,
    ping: Ping,
    bytes: usize,
    any: bool,
}

impl Appends {
    fn add(&mut self, entries: Vec<SharedEntry>, stable: Lsn, sync: bool, ping: Ping) {
        self.bytes += entries.iter().map(|e| e.weight()).sum::<usize>();
        if self.entries.is_empty() {
            self.entries = entries;
        } else {
            self.entries.extend(entries);
        }
        self.stable = self.stable.max(stable);
        self.sync |= sync;
        self.ping = self.ping.max(ping);
        self.any = true;
    }

    fn take(&mut self) -> Option<ToReplica> {
        let Appends { entries, stable, sync, ping, any, .. } = std::mem::take(self);
        any.then_some(ToReplica::Append { entries, stable, sync, ping })
    }
}

/// The reference model holds its replicas in memory: it has no size and is opened once.
impl PoolFacts for quoin_store::model::ModelPool {
    fn space(&self) -> Space {
        Space::default()
    }
    fn replica_bytes(&self, _guid: ReplicaGuid) -> u64 {
        0
    }
    fn start_counter(&self) -> u64 {
        1
    }
}

impl<D: quoin_store::Disk> PoolFacts for quoin_store::Pool<D> {
    fn space(&self) -> Space {
        let stats = self.stats();
        Space {
            capacity_bytes: stats.size_bytes,
            used_bytes: stats.used_bytes,
            free_bytes: stats.free_bytes,
        }
    }
    fn replica_bytes(&self, guid: ReplicaGuid) -> u64 {
        self.replica_stats(guid).map_or(0, |stats| stats.allocated_bytes)
    }
    fn start_counter(&self) -> u64 {
        self.starts()
    }
}
