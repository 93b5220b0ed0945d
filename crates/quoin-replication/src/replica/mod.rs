//! One copy of a volume: promises, leases, strict order, durability (R1 to R4).
//!
//! A [`Replica`] never answers for data that its store does not hold: `Applied` is sent after
//! `ReplicaStore::append` returned, `durable` after a sync that began later, `OpenAck` after the
//! promise is on media and every lease of another incarnation has run out by this host's clock. The
//! driver calls [`Replica::on`] for each event and [`Replica::flush`] after each batch of events:
//! acknowledgements are cumulative, one for each batch.

pub mod appends;
mod copying;
mod fence;
mod increment_queue;
mod refused;
mod repair_request;
mod session;
pub mod store;

use copying::Way;
pub use fence::FENCED_SESSION;
use quoin_types::ids::SessionKey;
use quoin_types::membership::RETIRED_MAX;
use quoin_types::message::{BadCopy, Failure, FromReplica, OpenAck, RoomGrant, ToReplica};
use quoin_types::mutant;
use quoin_types::time::Time;
use quoin_types::{ClientTable, Durability, Epoch, Incarnation, Lsn, SnapshotId};
use refused::{Place, RefusedReads};
use session::{PendingOpen, Session};
use std::time::Duration;
use store::{BootCookie, FetchTicket, ReplicaMeta, ReplicaStore, StoreError, SyncTicket};

/// Number of a transport connection, chosen by the driver.
pub type ConnectionId = u64;

#[derive(Clone, Debug)]
pub enum ReplicaEvent {
    Message {
        connection: ConnectionId,
        session: SessionKey,
        message: ToReplica,
    },
    Disconnected {
        connection: ConnectionId,
    },
    /// A sync that covers `ticket` ended. After a failed sync, no retry can prove what is on media.
    Synced {
        ticket: SyncTicket,
        result: Result<(), StoreError>,
    },
    /// All that a call which answered [`StoreError::Pending`] lacked was read: it is made again.
    Fetched {
        ticket: FetchTicket,
    },
    Timer,
    /// The store found this replica's own data damaged, in work outside of any session.
    Damaged(&'static str),
    /// The pool found a bad copy outside of any read: another member's is requested, if a target
    /// feeds this replica now.
    BadCopy(BadCopy),
    /// The pool grants other room than before. Sent to the target, again in each session.
    Room(RoomGrant),
    /// The control plane took back its grants up to this epoch: nothing opens under them any more.
    /// A session that is open has [`FENCED_SESSION`] to close, or no time at all.
    Fence {
        epoch: Epoch,
        at_once: bool,
    },
    /// The pool is stopping: the replica notifies the target and accepts no more messages.
    Shutdown,
}

#[derive(Clone, PartialEq, Debug)]
pub enum ReplicaAction {
    Send {
        connection: ConnectionId,
        session: SessionKey,
        message: FromReplica,
    },
    /// Ends the connection after everything sent before.
    Disconnect {
        connection: ConnectionId,
    },
    /// Requests a call of `on(Timer)` at this time; replaces any earlier timer, `None` cancels it.
    Timer {
        at: Option<quoin_types::Time>,
    },
    Note(ReplicaNote),
}

/// Information for operators; drivers turn notes into events, logs and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReplicaNote {
    Opened {
        session: SessionKey,
    },
    Closed,
    Damaged(&'static str),
    DiskFailed(StoreError),
    /// The disk refuses to read what a session needs; this may be transient.
    Unreadable(StoreError),
    /// The pool has no room for an entry.
    Full,
    /// The pool's metadata ring has no room for a record of the replica.
    RingFull,
    Rebuilt {
        position: quoin_types::Position,
    },
    /// Another member's copy replaced a bad one here; not `done`: the block was overwritten since,
    /// or the map cannot be mended now.
    Repaired(Repaired),
    /// A peer sent what an invariant forbids; the session was ended. Names the invariant.
    InvariantRefused(&'static str),
}

/// Outcome of one repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Repaired {
    /// The snapshot whose copy it was; `None`: the live view's.
    pub snapshot: Option<SnapshotId>,
    pub lba: u64,
    /// Set if the map of the range that begins there was repaired, not the block.
    pub whole_map: bool,
    pub done: bool,
}

/// Share by which the clocks of two hosts may diverge (1/20). Leases are shortened at the target
/// and lengthened at the replica by it.
pub const CLOCK_SKEW_DIVISOR: u32 = 20;

/// Lease of targets, in milliseconds: the delay that a dead target causes its successor.
pub const LEASE_MS: u32 = 2000;

/// Time for which a replica honours a granted lease: `lease_ms` and the share for skewed clocks.
pub fn granted_lease(lease_ms: u32) -> Duration {
    let lease = Duration::from_millis(lease_ms.into());
    lease + lease / CLOCK_SKEW_DIVISOR
}

const UNREADABLE: &str = "what its disk refuses to read";

/// The lease that delays a newer incarnation's `OpenAck`.
#[derive(Clone, Copy, Debug)]
struct Lease {
    /// Holder of the lease; `None` after a restart: any holder is waited out.
    holder: Option<(Epoch, Incarnation)>,
    until: Time,
}

pub struct Replica {
    boot: BootCookie,
    /// Set if everything it ever applied is still there (module docs of `docs/replication.md`).
    continuous: bool,
    /// Set after a failed write or sync: nothing is promised or acknowledged until the pool is
    /// reopened.
    failed: Option<StoreError>,
    lease: Option<Lease>,
    pending: Option<PendingOpen>,
    session: Option<Session>,
    /// Set while the pool stops; once this sync is done, everything applied is on media.
    stopping: Option<SyncTicket>,
    timer: Option<Time>,
    /// Time at which a fenced session is ended.
    fenced_until: Option<Time>,
    /// Grant of the pool.
    room: RoomGrant,
    refused_reads: RefusedReads,
}

impl Replica {
    /// `boot` is the present boot of this host and device. The pool must have synced once since it
    /// was opened, so that unreported errors have surfaced.
    pub fn new(now: Time, boot: BootCookie, store: &dyn ReplicaStore) -> Self {
        let meta = store.meta();
        let media = matches!(
            store.state().last_view,
            Some((_, ref view)) if view.durability == Durability::Media
        );
        let fresh = store.state().position.lsn == Lsn::ZERO && meta.promised == Epoch::ZERO;
        let kept = meta.closed_continuous || (meta.session_open && meta.cookie == boot);
        Self {
            boot,
            continuous: fresh || kept || media || mutant::is("always-continuous"),
            failed: None,
            lease: (meta.session_open && !mutant::is("lease-forgotten-at-restart"))
                .then(|| Lease { holder: None, until: now + granted_lease(meta.lease_ms) }),
            pending: None,
            session: None,
            stopping: None,
            timer: None,
            fenced_until: None,
            room: RoomGrant::UNBOUNDED,
            refused_reads: RefusedReads::default(),
        }
    }

    /// Returns true if a target has it open now.
    pub fn is_open(&self) -> bool {
        self.session.is_some()
    }

    /// Returns true if a target's lease lives, that of an unknown target after a restart included.
    pub fn hears_target(&self, now: Time) -> bool {
        self.lease.is_some_and(|lease| now < lease.until)
    }

    /// The session that is open, and its own connection.
    pub fn session(&self) -> Option<(ConnectionId, SessionKey)> {
        self.session.as_ref().map(|s| (s.connection, s.key))
    }

    /// Returns true if a target feeds it now, so that the target can be asked for good copies.
    pub fn is_fed(&self) -> bool {
        self.session.as_ref().is_some_and(Session::is_fed)
    }

    pub fn is_continuous(&self) -> bool {
        self.continuous
    }

    /// Every step that is under way, in the order of [`crate::Step::ALL`].
    pub fn steps(&self, store: &dyn ReplicaStore) -> Vec<crate::Step> {
        use crate::Step;
        let mut steps = Vec::new();
        if let Some(pending) = &self.pending {
            let waited = pending.synced_to.is_some();
            steps.push(if waited { Step::LeaseWaited } else { Step::PromiseUnsynced });
        }
        if let Some(session) = &self.session {
            session.steps(&mut steps);
        }
        if store.shadow().is_some() {
            steps.push(Step::ShadowOpen);
        }
        steps.sort_unstable();
        steps.dedup();
        steps
    }

    /// The LSN known to be on media, while a session is open.
    pub fn durable(&self) -> Option<Lsn> {
        self.session.as_ref().map(|s| s.durable)
    }

    pub fn on(
        &mut self,
        now: Time,
        event: ReplicaEvent,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        match event {
            ReplicaEvent::Message { connection, session, message } => {
                self.on_message(now, connection, session, message, store, actions);
            }
            ReplicaEvent::Disconnected { connection } => self.forget(connection, store, actions),
            ReplicaEvent::Synced { ticket, result } => {
                self.on_synced(now, ticket, result, store, actions);
            }
            ReplicaEvent::Fetched { ticket } => self.on_fetched(now, ticket, store, actions),
            ReplicaEvent::Timer => {
                self.timer = None;
                self.end_fenced(now, store, actions);
                self.answer_open(now, store, actions);
                self.go_on_beginning(now, store, actions);
            }
            ReplicaEvent::Damaged(what) => self.damaged(what, store, actions),
            ReplicaEvent::BadCopy(copy) => {
                if let Some(session) = &self.session {
                    session.ask_for(copy, actions);
                }
            }
            ReplicaEvent::Room(room) => {
                self.room = room;
                if let Some(session) = &self.session {
                    session.tell_room(room, actions);
                }
            }
            ReplicaEvent::Fence { epoch, at_once } => {
                self.fence(now, epoch, at_once, store, actions);
            }
            ReplicaEvent::Shutdown => {
                self.end_all(Failure::Stopping, store, actions);
                self.stopping = Some(store.request_sync());
            }
        }
    }

    /// Sends one acknowledgement for all events since the last call.
    pub fn flush(&mut self, actions: &mut Vec<ReplicaAction>) {
        if let Some(session) = &mut self.session {
            session.acknowledge(actions);
        }
    }

    fn on_message(
        &mut self,
        now: Time,
        connection: ConnectionId,
        key: SessionKey,
        message: ToReplica,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if let ToReplica::Open { .. } = message {
            return self.on_open(now, connection, key, message, store, actions);
        }
        if let ToReplica::OpenBulk { number } = message {
            return self.on_open_bulk(connection, key, number, actions);
        }
        let Some(session) = &mut self.session else { return };
        match session.way(connection, key) {
            Some(Way::Own) => session.renew(now, &mut self.lease),
            Some(way) => return self.on_bulk(now, way, message, store, actions),
            None => return,
        }
        let (place, parked) = (Place::of(&message), session.parked());
        let outcome = session.on_message(message, self.boot, &mut self.continuous, store, actions);
        // Of what waits for the disk nothing was read yet.
        if outcome.is_ok() && session.parked() <= parked {
            self.copied(now, place, actions);
        }
        self.go_on(now, place, outcome, store, actions);
    }

    /// Ends the session, and with it what it had pinned and its bulk connection.
    fn take_session(
        &mut self,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Option<Session> {
        let mut session = self.session.take()?;
        store.unpin(session.key.nonce);
        if let Some(connection) = session.copying.take_bulk()
            && !mutant::is("connections-never-closed")
        {
            actions.push(ReplicaAction::Disconnect { connection });
        }
        Some(session)
    }

    /// Acts on the outcome of a message: the session stays, is closed by its target, or failed.
    fn go_on(
        &mut self,
        now: Time,
        place: Place,
        outcome: Result<session::Next, session::Fault>,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        match outcome {
            Ok(session::Next::Stay) => {}
            Ok(session::Next::Closed) => {
                self.take_session(store, actions);
                self.lease = None;
                actions.push(ReplicaAction::Note(ReplicaNote::Closed));
            }
            Err(failure) => self.fail(now, place, failure, store, actions),
        }
    }

    /// R1: the promise is the write fence from here on; the answer waits for media and leases.
    fn on_open(
        &mut self,
        now: Time,
        connection: ConnectionId,
        key: SessionKey,
        message: ToReplica,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let ToReplica::Open { volume, replica, guid, membership, lease_ms } = message else {
            return;
        };
        let refuse = |failure: Failure, promised: Epoch, actions: &mut Vec<ReplicaAction>| {
            let message = FromReplica::Refuse { promised, failure };
            actions.push(ReplicaAction::Send { connection, session: key, message });
            actions.push(ReplicaAction::Disconnect { connection });
        };
        let identity = store.identity();
        let meta = store.meta();
        if identity.volume != volume || identity.replica != replica || identity.guid != guid {
            return refuse(Failure::Unknown, Epoch::ZERO, actions);
        }
        if membership.retired.contains(&guid) || meta.membership.retired.contains(&guid) {
            return refuse(Failure::Retired, Epoch::ZERO, actions);
        }
        if self.failed.is_some() {
            return refuse(Failure::Io, Epoch::ZERO, actions);
        }
        if membership.check().is_err() || !(500..=30_000).contains(&lease_ms) {
            return refuse(Failure::Protocol, Epoch::ZERO, actions);
        }
        // A fence promises its epoch to no target, and incarnation 0 stands for that.
        if key.incarnation == Incarnation(0) && !mutant::is("opened-by-nobody") {
            return refuse(Failure::Fenced, meta.promised, actions);
        }
        let promised = (meta.promised, meta.promised_incarnation);
        let other = key.incarnation != promised.1 && !mutant::is("equal-epoch-accepted");
        let older = key.epoch < promised.0 && !mutant::is("older-epoch-accepted");
        if older || (key.epoch == promised.0 && other) {
            return refuse(Failure::Fenced, promised.0, actions);
        }
        // Connections are not ordered among each other: an older session's Open may come late.
        let newest = self.pending.as_ref().map(|p| p.key).or(self.session.as_ref().map(|s| s.key));
        if newest.is_some_and(|n| {
            n.epoch == key.epoch && n.incarnation == key.incarnation && n.nonce >= key.nonce
        }) {
            return actions.push(ReplicaAction::Disconnect { connection });
        }
        let mut next = ReplicaMeta {
            promised: key.epoch,
            promised_incarnation: key.incarnation,
            session_open: true,
            lease_ms: if meta.session_open { meta.lease_ms.max(lease_ms) } else { lease_ms },
            cookie: if self.continuous { self.boot } else { BootCookie::default() },
            closed_continuous: meta.closed_continuous && mutant::is("word-kept-over-an-open"),
            ..meta.clone()
        };
        if membership.version > meta.membership.version || meta.membership.rf == 0 {
            let mut retired = membership.retired.clone();
            retired.extend(&meta.membership.retired);
            retired.sort_unstable();
            retired.dedup();
            retired.truncate(RETIRED_MAX);
            next.membership = quoin_types::Membership { retired, ..membership };
        }
        let monotone = next.promised >= meta.promised || mutant::is("older-epoch-accepted");
        assert!(monotone, "PromiseMonotone");
        assert!(next.membership.version >= meta.membership.version, "MembershipMonotone");
        self.stopping = None;
        self.end_others(connection, store, actions);
        if mutant::is("lease-forgotten-at-open") {
            self.lease = None;
        }
        match store.put_meta(next) {
            Ok(()) => {}
            // Nothing was promised, and the disk is as good as before.
            Err(StoreError::RingFull) => {
                actions.push(ReplicaAction::Note(ReplicaNote::RingFull));
                return refuse(Failure::Full, store.meta().promised, actions);
            }
            Err(error) => return self.disk_failed(error, store, actions),
        }
        let ticket = store.request_sync();
        let expected = store.state().position.lsn;
        let synced_to = mutant::is("answer-before-the-promise-is-on-media").then_some(expected);
        self.pending = Some(PendingOpen { connection, key, lease_ms, ticket, synced_to, expected });
        self.answer_open(now, store, actions);
    }

    /// Requests a call at this time, unless an earlier one is due.
    fn wake(&mut self, at: Time, actions: &mut Vec<ReplicaAction>) {
        if self.timer.is_none_or(|set| at < set) {
            self.timer = Some(at);
            actions.push(ReplicaAction::Timer { at: self.timer });
        }
    }

    /// Answers the pending open once its promise is on media and other leases ran out.
    fn answer_open(
        &mut self,
        now: Time,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Some(pending) = &self.pending else { return };
        let Some(durable) = pending.synced_to else { return };
        let holder = (pending.key.epoch, pending.key.incarnation);
        if let Some(lease) = self.lease
            && lease.holder != Some(holder)
            && now < lease.until
            && !mutant::is("answer-before-the-lease-ended")
        {
            return self.wake(lease.until, actions);
        }
        let pending = self.pending.take().expect("checked above");
        self.lease = Some(Lease { holder: Some(holder), until: now });
        let state = store.state();
        let meta = store.meta();
        let view_version = state.last_view.as_ref().map_or(0, |v| v.1.rule.membership_version);
        let ack = OpenAck {
            position: state.position,
            chain: state.chain,
            epoch_table: store.epoch_table(),
            stable: state.stable,
            durable,
            base: state.base,
            last_view: state.last_view,
            clients: match mutant::is("clients-left-out-of-the-open") {
                true => ClientTable::default(),
                false => store.clients(),
            },
            continuous: self.continuous,
            membership_version: meta.membership.version.max(view_version),
            quorum: meta.quorum,
            damaged: meta.damaged,
            volume_blocks: state.volume_blocks,
            room: self.room,
            snapshots: store.snapshots(),
            shadow: store.shadow(),
            shadow_cut: store.shadow_cut(),
            heads: store.snapshot_heads(),
        };
        let session = Session::new(&pending, durable);
        session.renew(now, &mut self.lease);
        actions.push(ReplicaAction::Send {
            connection: pending.connection,
            session: pending.key,
            message: FromReplica::OpenAck(Box::new(ack)),
        });
        actions.push(ReplicaAction::Note(ReplicaNote::Opened { session: pending.key }));
        self.session = Some(session);
        self.fenced_until = None;
    }

    fn on_synced(
        &mut self,
        now: Time,
        ticket: SyncTicket,
        result: Result<(), StoreError>,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if let Err(error) = result {
            if mutant::is("sync-error-retried") {
                let _ = store.request_sync();
                return;
            }
            return self.disk_failed(error, store, actions);
        }
        if let Some(pending) = &mut self.pending {
            pending.on_synced(ticket);
            self.answer_open(now, store, actions);
        }
        if self.stopping.take_if(|all| *all <= ticket).is_some() {
            self.record_clean_stop(store, actions);
        }
        let Some(session) = &mut self.session else { return };
        let outcome = session.on_synced(ticket, store, actions);
        self.go_on(now, Place::Elsewhere, outcome, store, actions);
    }

    /// Records for the next start that everything it ever applied is on media, regardless of the
    /// host's caches. A host that stops everything at once may end pools before they receive the
    /// target's Close. The session stays open, since its lease does.
    fn record_clean_stop(
        &mut self,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let meta = store.meta();
        let continuous = self.continuous || mutant::is("clean-stop-without-its-caches");
        let said = meta.closed_continuous || mutant::is("stopped-without-its-word");
        if !continuous || !meta.session_open || said {
            return;
        }
        let meta = ReplicaMeta { closed_continuous: true, ..meta.clone() };
        match store.put_meta(meta) {
            Ok(()) => drop(store.request_sync()),
            // The next start finds out what is on media.
            Err(StoreError::RingFull) => actions.push(ReplicaAction::Note(ReplicaNote::RingFull)),
            Err(error) => self.disk_failed(error, store, actions),
        }
    }

    /// Handles a failed write or sync. The data that the kernel dropped is unknown, so nothing is
    /// continuous any more, and nothing is answered until the pool has been reopened from media.
    fn disk_failed(
        &mut self,
        error: StoreError,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        self.continuous = false;
        self.failed = Some(error);
        let meta = ReplicaMeta {
            cookie: BootCookie::default(),
            closed_continuous: false,
            ..store.meta().clone()
        };
        // The disk may refuse this too; a later boot cookie or the reopened pool decides then.
        let _ = store.put_meta(meta);
        actions.push(ReplicaAction::Note(ReplicaNote::DiskFailed(error)));
        self.end_all(Failure::Io, store, actions);
    }

    /// Ends the session for a reason that is sent to the target.
    fn fail(
        &mut self,
        now: Time,
        place: Place,
        failure: session::Fault,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        match failure {
            session::Fault::Store(StoreError::Full) => {
                actions.push(ReplicaAction::Note(ReplicaNote::Full));
                self.end_all(Failure::Full, store, actions);
            }
            session::Fault::Store(StoreError::RingFull) => {
                actions.push(ReplicaAction::Note(ReplicaNote::RingFull));
                self.end_all(Failure::Full, store, actions);
            }
            session::Fault::Store(StoreError::Rule(what)) => {
                actions.push(ReplicaAction::Note(ReplicaNote::InvariantRefused(what)));
                self.end_all(Failure::Protocol, store, actions);
            }
            session::Fault::Store(StoreError::Damaged(what)) => {
                self.damaged(what, store, actions);
            }
            session::Fault::Store(error) if error.is_refused_read() => {
                // A read that fails loses nothing, and the failure may be transient: the target
                // asks again. Data that stays unreadable is as good as lost, and must not keep
                // others waiting.
                if self.refused_reads.refused(now, place) {
                    return self.damaged(UNREADABLE, store, actions);
                }
                actions.push(ReplicaAction::Note(ReplicaNote::Unreadable(error)));
                self.end_all(Failure::Io, store, actions);
            }
            session::Fault::Store(error) => self.disk_failed(error, store, actions),
            session::Fault::BelowStable => self.damaged("StableNeverCut", store, actions),
            session::Fault::Protocol(what) => {
                actions.push(ReplicaAction::Note(ReplicaNote::InvariantRefused(what)));
                self.end_all(Failure::Protocol, store, actions);
            }
        }
    }

    fn damaged(
        &mut self,
        what: &'static str,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let meta = ReplicaMeta { damaged: true, ..store.meta().clone() };
        if store.put_meta(meta).is_ok() {
            store.request_sync();
        }
        actions.push(ReplicaAction::Note(ReplicaNote::Damaged(what)));
        self.end_all(Failure::Damaged, store, actions);
    }

    fn end_all(
        &mut self,
        failure: Failure,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if let Some(session) = self.take_session(store, actions) {
            let message = FromReplica::Failed(failure);
            let (connection, session) = (session.connection, session.key);
            actions.push(ReplicaAction::Send { connection, session, message });
            actions.push(ReplicaAction::Disconnect { connection });
        }
        if let Some(pending) = self.pending.take() {
            let message = FromReplica::Failed(failure);
            let connection = pending.connection;
            actions.push(ReplicaAction::Send { connection, session: pending.key, message });
            actions.push(ReplicaAction::Disconnect { connection });
        }
    }

    /// Ends older sessions for a newer open; their leases remain in force.
    fn end_others(
        &mut self,
        keep: ConnectionId,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let ended = [
            self.take_session(store, actions).map(|s| (s.connection, s.key.nonce)),
            self.pending.take().map(|p| (p.connection, p.key.nonce)),
        ];
        for (connection, nonce) in ended.into_iter().flatten() {
            store.unpin(nonce);
            if connection != keep && !mutant::is("connections-never-closed") {
                actions.push(ReplicaAction::Disconnect { connection });
            }
        }
    }

    fn forget(
        &mut self,
        connection: ConnectionId,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let bulk = self.session.as_mut().is_some_and(|s| s.lost_bulk(connection));
        let ends = bulk && mutant::is("bulk-failure-ends-the-session");
        if ends || self.session.as_ref().is_some_and(|s| s.connection == connection) {
            self.take_session(store, actions);
        }
        if self.pending.as_ref().is_some_and(|p| p.connection == connection) {
            self.pending = None;
        }
    }
}
