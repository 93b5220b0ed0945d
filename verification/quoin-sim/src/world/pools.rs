//! The driver of replicas: what `quoin-pool` does with sockets, disks and timers.

use quoin_replication::pool_host::access::Lane;
use quoin_replication::replica::appends::{Append, Appends};
use quoin_replication::replica::store::{ReplicaStore, StoreError, SyncTicket};
use quoin_replication::replica::{Replica, ReplicaAction, ReplicaEvent, ReplicaNote};
use quoin_store::disk::fetch::{Fetch, Owner};
use quoin_types::message::{Failure, FromReplica, Ping, RoomGrant, ToReplica};
use quoin_types::{Epoch, Member, Position, SessionKey, Time};

use super::checkers::{Connected, Observation};
use super::health::Health;
use super::pool_rounds::Rounds;
use super::{Event, Mend, Mutant, World, brief};
use crate::control::Record;
use crate::faults::FaultKind;
use crate::network::{ConnectionId, Taken, Way};
use crate::schedule::{MICROSECOND, MILLISECOND};
use crate::storage::Outage;

/// Time that a read of a cold disk takes which the pool's thread waits for, caches counted.
const BLOCKED_READ: u64 = 500 * MICROSECOND;

/// One life of a pool process.
pub(crate) struct Process {
    /// `None`: the pool holds no replica of the volume.
    pub(super) replica: Option<Replica>,
    timer: Option<Time>,
    arm: u32,
    idle_planned: bool,
    /// The room that its replica was granted.
    room: Option<RoomGrant>,
    /// Its disk is in the middle of a sync: what that makes free is not free yet.
    pub(super) syncing: bool,
    /// The promise of its replica when that sync began, and the one on media: pools tell that alone.
    promised_at_sync: Epoch,
    pub(super) promised: Epoch,
    stopping: Option<Stopping>,
    pub(super) rounds: Rounds,
    pub(super) health: Health,
}

/// A process that was told to end, and admits no connection any more.
struct Stopping {
    /// It goes on when this is on media.
    all: SyncTicket,
    /// Its replica has recorded a clean stop, and `all` is the sync of that.
    clean_stop_recorded: bool,
    /// Its host is switched off then.
    then_power: bool,
    restart_ns: u64,
}

impl Process {
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.is_some()
    }

    /// Returns the steps that its replica is in the middle of.
    pub fn steps(&self, store: &dyn ReplicaStore) -> Vec<quoin_replication::Step> {
        self.replica.as_ref().map(|r| r.steps(store)).unwrap_or_default()
    }

    /// Its replica holds everything that it ever applied.
    pub fn is_continuous(&self) -> bool {
        self.replica.as_ref().is_some_and(Replica::is_continuous)
    }
}

impl World {
    pub(crate) fn start_pool(&mut self, pool: usize) {
        let now = self.schedule.now();
        let host = self.pools[pool].host;
        if self.pools[pool].process.is_some()
            || !self.hosts.powered[host]
            || self.operators.recovery.is_away(pool)
        {
            return;
        }
        let here = &mut self.pools[pool];
        let withdraw = here.starts.begins(here.outage);
        if let Err(error) = here.storage.reopen(here.outage, withdraw, &mut self.random) {
            self.trace.line(now, || format!("pool {pool} does not open: {error}"));
            if matches!(error, StoreError::Io(_)) {
                // As the product's driver does: the next start hears nothing of it any more.
                let here = &mut self.pools[pool];
                here.outage = Outage::DiskFailed;
                here.starts.disk_failed(self.processes.process_ends());
                here.cache_lost = true;
            }
            if matches!(error, StoreError::Damaged(_)) && self.setup.may_be_damaged(pool) {
                return self.replace_disk(pool);
            }
            let delay = self.random.between(100, 1000) * MILLISECOND;
            self.schedule.after(delay, Event::StartPool { pool });
            return;
        }
        if self.setup.mutant == Some(Mutant::ForgetsSilently) && here.life > 0 {
            here.storage.forget();
        }
        here.starts.opened();
        here.outage = Outage::Process;
        here.ended_in_order = false;
        here.life += 1;
        let (life, guid, gone) = (here.life, here.member.guid, here.gone);
        let boot = here.starts.cookie(here.storage.cookie());
        let local = self.local(host);
        let mut replica = None;
        let mut promised = Epoch::ZERO;
        let mut position = Position::default();
        if !gone {
            self.pools[pool].storage.with(guid, &mut |store| {
                replica = Some(Replica::new(local, boot, &*store));
                promised = store.meta().promised;
                position = store.state().position;
            });
            if replica.is_none()
                && self.checkers.assertions.has_answered(pool, guid)
                && self.is_needed(pool)
                && self.pools[pool].rolled_back != Some(guid)
                && !self.setup.may_be_damaged(pool)
            {
                let why = format!("pool {pool} has lost replica {guid} over an outage");
                self.violate("StableSurvives", why);
                return;
            }
            if replica.is_none() {
                // Its creation was not on media yet. Its first answer comes only after its promise
                // is on media, unless the disk loses what it reported as synced.
                self.pools[pool].gone = true;
                let delay = self.random.between(500, 4000) * MILLISECOND;
                self.schedule.after(delay, Event::Recreate { pool });
            }
        }
        let has_replica = replica.is_some();
        self.observe(&Observation::PoolStarts { pool, promised, has_replica });
        if has_replica {
            self.operators.recovery.starts_at(pool, position);
        }
        self.trace.line(now, || {
            let state =
                if has_replica { format!("{position:?} of {promised:?}") } else { String::new() };
            format!("pool {pool} starts (life {life}) {state}")
        });
        self.pools[pool].process = Some(Process {
            replica,
            timer: None,
            arm: 0,
            idle_planned: false,
            room: None,
            syncing: false,
            promised_at_sync: promised,
            promised,
            stopping: None,
            rounds: Rounds::begin(local),
            health: Health::new(local.0 / 1_000_000_000),
        });
        self.plan_health(pool);
        self.pool_began(pool, life);
        self.restart_fences(pool);
        self.control.terms.pool_restarts(pool);
    }

    /// A pool that cannot be read at all gets a new disk, and makes another replica there.
    pub(super) fn replace_disk(&mut self, pool: usize) {
        let here = &mut self.pools[pool];
        if here.storage.replace(&mut self.random).is_err() {
            return self.violate("Setup", format!("pool {pool}'s new disk cannot be formatted"));
        }
        here.starts.of_a_new_disk();
        here.rolled_back = None;
        here.gone = true;
        self.trace.line(self.schedule.now(), || format!("pool {pool} gets a new disk"));
        let delay = self.random.between(500, 8000) * MILLISECOND;
        self.schedule.after(MILLISECOND, Event::StartPool { pool });
        self.schedule.after(delay, Event::Recreate { pool });
    }

    /// The process dies as it is.
    pub(crate) fn kill_pool(&mut self, pool: usize, outage: Outage, restart_ns: u64) {
        let here = &mut self.pools[pool];
        if outage == Outage::DiskFailed {
            here.starts.disk_failed(self.processes.process_ends());
        }
        if outage == Outage::Power || here.outage == Outage::Process {
            here.outage = outage;
        }
        if outage != Outage::Process && !here.is_spare() && !here.ended_in_order {
            here.cache_lost = true;
            self.operators.recovery.cache_is_lost(pool);
        }
        here.paused = false;
        let was = here.process.take().is_some();
        here.life += 1;
        self.schedule.after(restart_ns, Event::StartPool { pool });
        if !was {
            return;
        }
        self.trace.line(self.schedule.now(), || format!("pool {pool} is dead ({outage:?})"));
        let polite = self.hosts.powered[self.pools[pool].host];
        for id in self.sessions_of(pool) {
            self.end_of_pool_dies(id, polite);
        }
    }

    /// A replica that is deleted has no session any more: its pool ends the connections for it.
    pub(super) fn end_sessions_of_deleted(&mut self, pool: usize) {
        if let Some(process) = &mut self.pools[pool].process {
            process.replica = None;
        }
        for id in self.sessions_of(pool) {
            self.pool_closes(id);
        }
    }

    /// The process ends as people end it: on media first, and its word for that after it.
    pub(super) fn stop_pool(&mut self, pool: usize, restart_ns: u64, then_power: bool) {
        self.feed_pool(pool, vec![ReplicaEvent::Shutdown]);
        let here = &mut self.pools[pool];
        let Some(process) = &mut here.process else { return };
        let mut all = None;
        here.storage.with(here.member.guid, &mut |store| all = Some(store.request_sync()));
        let Some(all) = all else { return self.kill_pool(pool, Outage::Process, restart_ns) };
        process.stopping =
            Some(Stopping { all, clean_stop_recorded: false, then_power, restart_ns });
        let life = here.life;
        self.plan_sync(pool);
        // A supervisor waits some seconds and then kills.
        self.lasting(9000, Mend::KillPool { pool, life });
    }

    fn go_on_stopping(&mut self, pool: usize, synced: SyncTicket) {
        let here = &mut self.pools[pool];
        let Some(Process { stopping: Some(stopping), .. }) = &mut here.process else { return };
        if synced < stopping.all {
            return;
        }
        if !stopping.clean_stop_recorded {
            stopping.clean_stop_recorded = true;
            let word = &mut stopping.all;
            here.storage.with(here.member.guid, &mut |store| *word = store.request_sync());
            return self.plan_sync(pool);
        }
        let (then_power, restart_ns) = (stopping.then_power, stopping.restart_ns);
        here.ended_in_order = true;
        self.kill_pool(pool, Outage::Process, restart_ns);
        if then_power {
            self.power_cut(&[pool]);
        }
    }

    fn sessions_of(&self, pool: usize) -> Vec<ConnectionId> {
        let connections = self.network.connections.iter();
        connections.filter(|(_, c)| c.pool == pool && c.pool_open).map(|(id, _)| *id).collect()
    }

    /// The process goes on and serves no target any more.
    pub(super) fn end_sessions_of(&mut self, pool: usize) {
        for id in self.sessions_of(pool) {
            self.pool_closes(id);
            self.feed_pool(pool, vec![ReplicaEvent::Disconnected { connection: id }]);
        }
    }

    fn end_of_pool_dies(&mut self, id: ConnectionId, polite: bool) {
        if polite {
            self.pool_closes(id);
            return;
        }
        if let Some(connection) = self.network.connections.get_mut(&id) {
            connection.pool_open = false;
            connection.to_pool.deaf = true;
        }
        self.network.lose_tail(id);
        let delay = self.random.between(1000, 8000) * MILLISECOND;
        self.schedule.after(delay, Event::TargetEndLost { connection: id });
    }

    pub(super) fn pool_closes(&mut self, id: ConnectionId) {
        let now = self.schedule.now();
        if let Some(connection) = self.network.connections.get_mut(&id) {
            connection.pool_open = false;
            connection.to_pool.deaf = true;
            let pool = connection.pool;
            self.forget_chunks(pool, id);
        }
        if let Some(due) = self.network.send_end(now, Way::ToTarget, id) {
            self.schedule.at(due, Event::ToTarget { connection: id });
        }
        self.network.forget_closed(id);
    }

    /// A message to a target, as a real pool would send it.
    pub(super) fn pool_sends(
        &mut self,
        id: ConnectionId,
        session: SessionKey,
        message: &FromReplica,
    ) {
        let now = self.schedule.now();
        if let Some(pool) = self.network.connections.get(&id).map(|c| c.pool) {
            self.observe(&Observation::PoolSends { pool, session, message });
        }
        match self.network.send_to_target(now, id, session, message) {
            Ok(Some(due)) => self.schedule.at(due, Event::ToTarget { connection: id }),
            Ok(None) => {}
            Err(error) => {
                self.violate("Wire", format!("a pool cannot say {}: {error}", brief(message)))
            }
        }
    }

    pub(crate) fn pool_end_lost(&mut self, id: ConnectionId) {
        let Some(connection) = self.network.connections.get_mut(&id) else { return };
        if !connection.pool_open {
            return;
        }
        let (pool, life) = (connection.pool, connection.pool_life);
        let is_bulk = connection.bulk.is_some();
        if self.pools[pool].life == life && self.pools[pool].paused {
            self.schedule.after(20 * MILLISECOND, Event::PoolEndLost { connection: id });
            return;
        }
        connection.pool_open = false;
        connection.to_pool.deaf = true;
        self.network.forget_closed(id);
        if self.pools[pool].life == life {
            self.forget_chunks(pool, id);
            let before = self.session_at(pool);
            self.feed_pool(pool, vec![ReplicaEvent::Disconnected { connection: id }]);
            if is_bulk && before != self.session_at(pool) {
                let detail = format!("pool {pool} ends a session for its bulk connection");
                self.violate("BulkApart", detail);
            }
        }
    }

    /// Everything that is due at this pool from this connection, in one batch.
    pub(crate) fn deliver_to_pool(&mut self, id: ConnectionId) {
        let now = self.schedule.now();
        let Some(connection) = self.network.connections.get(&id) else { return };
        if !connection.established || !connection.pool_open {
            return;
        }
        let (pool, life, target) = (connection.pool, connection.pool_life, connection.target);
        let (member, own) = (connection.member, connection.session);
        let lane = if connection.bulk.is_some() { Lane::Bulk } else { Lane::Log };
        let from = self.targets[target].host;
        let to = self.pools[pool].host;
        let blocked = self.network.is_blocked(from, to);
        if self.pools[pool].life != life || self.pools[pool].paused || blocked {
            return;
        }
        if self.pools[pool].process.as_ref().is_some_and(Process::is_stopping) {
            self.pool_closes(id);
            return self.feed_pool(pool, vec![ReplicaEvent::Disconnected { connection: id }]);
        }
        let mut arrived = Vec::new();
        let taken = loop {
            let each = |session, message| arrived.push((session, message));
            match self.network.take_for_pool(now, id, each) {
                Taken::Some => {}
                taken => break taken,
            }
        };
        let (mut events, mut opened) = (Vec::new(), false);
        let mut appends = Appends::default();
        let of_connection =
            |session, message| ReplicaEvent::Message { connection: id, session, message };
        for (session, message) in arrived {
            if self.unknown_here(pool, member, &message) {
                self.refuse_unknown(id, session);
                continue;
            }
            if let ToReplica::Open { .. } = message {
                if !self.control.terms.may_open(pool, session) {
                    self.refuse_former(id, session);
                    continue;
                }
                self.observe(&Observation::OpenTaken { pool, session });
                opened = true;
            }
            if self.setup.mutant == Some(Mutant::AcknowledgesBeforeHolding) {
                self.acknowledge_early(id, session, &message);
            }
            let (received, at) = (&message, self.local(self.pools[pool].host));
            self.observe(&Observation::PoolReceives { pool, session, message: received, at });
            // As the pool does it: Appends that continue each other become one batch.
            let message = match message {
                ToReplica::Append { entries, stable, sync, ping } => {
                    self.note_client(pool);
                    let before = appends.add(Append { entries, stable, sync, ping });
                    events.extend(before.map(|message| of_connection(session, message)));
                    continue;
                }
                other => other,
            };
            events.extend(appends.take().map(|message| of_connection(session, message)));
            let received = &message;
            self.observe(&Observation::Claimed { pool, target, member, lane, message: received });
            let message = self.waits_for_its_turn(pool, id, message);
            events.extend(message.map(|message| of_connection(session, message)));
        }
        events.extend(appends.take().map(|message| of_connection(own, message)));
        events.extend(self.served_at_once(pool));
        if !events.is_empty() {
            if self.setup.mutant == Some(Mutant::AcknowledgesBeforeHolding)
                && self.random.percent(2)
            {
                // It said so; it does not hold it.
                self.kill_pool(pool, Outage::Process, 200 * MILLISECOND);
                return;
            }
            let at = self.receipt(pool);
            self.feed_pool_at(pool, at, events);
        }
        if opened {
            self.observe_connected(pool);
        }
        match taken {
            Taken::End => self.pool_end_lost(id),
            Taken::Refused => {
                let stream = self.network.connections.get(&id).map(|c| &c.to_pool);
                let why = stream.filter(|s| !s.spoiled).map(|s| s.receiver.refusal());
                if let Some(why) = why {
                    let detail = format!("pool {pool} refuses what target {target} sent: {why}");
                    self.violate("Wire", detail);
                }
                self.pool_closes(id);
                self.feed_pool(pool, vec![ReplicaEvent::Disconnected { connection: id }]);
            }
            Taken::Nothing | Taken::Some => {}
        }
    }

    /// Shows the connections that the pool has open.
    fn observe_connected(&mut self, pool: usize) {
        let connections = self.network.connections.values();
        let here = connections.filter(|c| c.pool == pool && c.pool_open);
        let open: Vec<Connected> = here.map(|c| (c.session, c.bulk)).collect();
        self.observe(&Observation::Connected { pool, open: &open });
    }

    /// A pool answers for replicas that it does not have.
    fn unknown_here(&self, pool: usize, member: Member, message: &ToReplica) -> bool {
        matches!(message, ToReplica::Open { .. })
            && (self.pools[pool].gone || self.pools[pool].member.guid != member.guid)
    }

    fn refuse_unknown(&mut self, id: ConnectionId, session: SessionKey) {
        let message = FromReplica::Refuse { promised: Epoch::ZERO, failure: Failure::Unknown };
        self.pool_sends(id, session, &message);
        self.pool_closes(id);
    }

    fn acknowledge_early(&mut self, id: ConnectionId, session: SessionKey, message: &ToReplica) {
        let ToReplica::Append { entries, .. } = message else { return };
        let Some(last) = entries.last() else { return };
        let message = FromReplica::Applied { applied: last.lsn, durable: last.lsn, ping: Ping(0) };
        self.pool_sends(id, session, &message);
    }

    pub(crate) fn feed_pool(&mut self, pool: usize, events: Vec<ReplicaEvent>) {
        let now = self.local(self.pools[pool].host);
        self.feed_pool_at(pool, now, events);
    }

    pub(super) fn feed_pool_at(&mut self, pool: usize, now: Time, events: Vec<ReplicaEvent>) {
        let here = &mut self.pools[pool];
        let guid = here.member.guid;
        let Some(process) = &mut here.process else { return };
        let Some(replica) = &mut process.replica else { return };
        let mut actions = Vec::new();
        let told = process.room.unwrap_or(RoomGrant::UNBOUNDED);
        let first = process.room.is_none().then(|| ReplicaEvent::Room(here.storage.room(told)));
        let mut events = Some(first.into_iter().chain(events));
        let found = here.storage.with(guid, &mut |store| {
            for event in events.take().into_iter().flatten() {
                replica.on(now, event, store, &mut actions);
            }
        });
        // The room is told before what these events applied is acknowledged.
        let room = here.storage.room(told);
        let is_new = process.room.replace(room) != Some(room);
        here.storage.with(guid, &mut |store| {
            if is_new {
                replica.on(now, ReplicaEvent::Room(room), store, &mut actions);
            }
            replica.flush(&mut actions);
        });
        if !found {
            self.trace.line(self.schedule.now(), || format!("pool {pool} does not hold {guid}"));
        }
        for action in actions {
            self.pool_action(pool, action);
        }
        self.check_store(pool);
        self.plan_fetches(pool);
        self.plan_sync(pool);
        self.plan_idle(pool);
    }

    /// Another volume takes all the room, or gives it back.
    pub(crate) fn set_full(&mut self, pool: usize, full: bool) {
        self.pools[pool].storage.set_full(full);
        self.plan_sync(pool);
        self.plan_idle(pool);
    }

    fn stop_without_room(&mut self, pool: usize) {
        let stops = self.setup.stops_without_room && !self.faults.over;
        if stops && !self.pools[pool].paused && self.random.percent(30) {
            self.pools[pool].paused = true;
            self.stats.faults.add(FaultKind::ReplicaPause);
            self.lasting(2400, Mend::ResumePool(pool));
        }
    }

    fn check_store(&mut self, pool: usize) {
        if let Some((rule, what)) = self.pools[pool].storage.take_broken() {
            self.violate(rule, format!("pool {pool}: {what}"));
        }
    }

    fn pool_action(&mut self, pool: usize, action: ReplicaAction) {
        let now = self.schedule.now();
        match action {
            ReplicaAction::Send { connection, session, message } => {
                if self.network.connections.get(&connection).is_some_and(|c| c.pool_open) {
                    self.pool_sends(connection, session, &message);
                }
                if let FromReplica::NoRoom { .. } = message {
                    self.stop_without_room(pool);
                }
            }
            ReplicaAction::Disconnect { connection } => {
                if self.network.connections.get(&connection).is_some_and(|c| c.pool_open) {
                    self.pool_closes(connection);
                }
            }
            ReplicaAction::Timer { at } => {
                if let Some(process) = &mut self.pools[pool].process {
                    process.timer = at;
                    process.arm += 1;
                }
                self.plan_pool_timer(pool);
            }
            ReplicaAction::Note(note) => {
                self.trace.line(now, || format!("pool {pool} notes: {note:?}"));
                self.note_repair(pool, &note);
                match note {
                    ReplicaNote::DiskFailed(_) => {
                        self.kill_pool(pool, Outage::DiskFailed, 50 * MILLISECOND);
                    }
                    // The replica checks the blocks, not the frame: it refuses what changed.
                    ReplicaNote::InvariantRefused(
                        "SameBytesEverywhere"
                        | "a bad slot in an increment"
                        | "repair data"
                        | "mend data",
                    ) if self.was_spoiled_for(pool) => {}
                    ReplicaNote::InvariantRefused(invariant) => {
                        self.violate(invariant, format!("pool {pool} refused a message"));
                    }
                    ReplicaNote::Damaged("StableNeverCut")
                        if self
                            .operators
                            .recovery
                            .may_hold_what_is_lost(self.pools[pool].member) => {}
                    ReplicaNote::Damaged(what) if !self.setup.may_be_damaged(pool) => {
                        let why = format!("pool {pool} is damaged ({what}) without a cause");
                        self.violate("StableNeverCut", why);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Returns true if a byte was changed on its way to this pool, on a connection that is still
    /// known.
    fn was_spoiled_for(&self, pool: usize) -> bool {
        self.network.connections.values().any(|c| c.pool == pool && c.to_pool.spoiled)
    }

    pub(super) fn plan_sync(&mut self, pool: usize) {
        let here = &mut self.pools[pool];
        if here.process.is_none() {
            return;
        }
        if let Some(ticket) = here.storage.sync_begin() {
            let delay = self.random.delay(self.setup.sync_ns) * here.slow;
            let (life, mut promised) = (here.life, Epoch::ZERO);
            self.schedule.after(delay, Event::SyncDone { pool, life, ticket });
            if !here.gone {
                let guid = here.member.guid;
                here.storage.with(guid, &mut |store| promised = store.meta().promised);
            }
            if let Some(process) = &mut here.process {
                process.syncing = true;
                process.promised_at_sync = promised;
            }
        }
    }

    pub(crate) fn sync_done(&mut self, pool: usize, life: u32, ticket: SyncTicket) {
        let here = &mut self.pools[pool];
        if here.life != life || here.process.is_none() {
            return;
        }
        if here.paused || here.stuck {
            self.schedule.after(5 * MILLISECOND, Event::SyncDone { pool, life, ticket });
            return;
        }
        if let Some(process) = &mut here.process {
            process.syncing = false;
        }
        let result = if self.setup.mutant == Some(Mutant::SyncLies) {
            here.storage.sync_lie(ticket);
            Ok(())
        } else {
            here.storage.sync_end(ticket, &mut self.random)
        };
        match (&result, &mut here.process) {
            (Ok(()), Some(process)) => process.promised = process.promised_at_sync,
            (Ok(()), None) => {}
            (Err(error), _) => {
                self.trace.line(self.schedule.now(), || format!("pool {pool} sync: {error}"));
            }
        }
        // As the driver has it: only those that wait for a sync are told of it.
        let here = &mut self.pools[pool];
        let waits = here.storage.take_served().contains(&here.member.guid) || result.is_err();
        let synced = waits.then_some(ReplicaEvent::Synced { ticket, result });
        self.feed_pool(pool, synced.into_iter().collect());
        self.go_on_stopping(pool, ticket);
    }

    /// The reads that nobody waits for begin; each ends at a time of its own.
    pub(super) fn plan_fetches(&mut self, pool: usize) {
        let here = &mut self.pools[pool];
        if here.process.is_none() {
            return;
        }
        while let Some(fetch) = here.storage.fetch_begin() {
            let delay = self.random.between(20, 8000) * MICROSECOND * here.slow;
            let life = here.life;
            self.schedule.after(delay, Event::Fetched { pool, life, fetch });
        }
    }

    pub(crate) fn fetched(&mut self, pool: usize, life: u32, fetch: Fetch) {
        let here = &mut self.pools[pool];
        if here.life != life || here.process.is_none() {
            return;
        }
        // A medium that does not answer syncs reads nothing either.
        if here.paused || here.stuck {
            let again = Event::Fetched { pool, life, fetch };
            return self.schedule.after(5 * MILLISECOND, again);
        }
        here.storage.fetch_end(fetch.id);
        let guid = here.member.guid;
        let ready: Vec<_> = std::iter::from_fn(|| here.storage.take_fetched()).collect();
        let local = self.local(self.pools[pool].host);
        if ready.iter().any(|(owner, _)| *owner == Owner::Scrub(guid))
            && let Some(process) = &mut self.pools[pool].process
        {
            process.health.scrub.answered(local);
        }
        let own = [Owner::Sessions(guid), Owner::Copying(guid)];
        let of_it = ready.into_iter().filter(|(owner, _)| own.contains(owner));
        let events = of_it.map(|(_, ticket)| ReplicaEvent::Fetched { ticket }).collect();
        self.feed_pool(pool, events);
    }

    pub(crate) fn plan_pool_timer(&mut self, pool: usize) {
        let host = self.pools[pool].host;
        let life = self.pools[pool].life;
        let Some(process) = &self.pools[pool].process else { return };
        let (Some(at), arm) = (process.timer, process.arm) else { return };
        if let Some(at) = self.hosts.clocks[host].global(at, self.schedule.now()) {
            self.schedule.at(at, Event::PoolTimer { pool, life, arm });
        }
    }

    pub(crate) fn pool_timer(&mut self, pool: usize, life: u32, arm: u32) {
        let local = self.local(self.pools[pool].host);
        if self.pools[pool].life != life || self.pools[pool].paused {
            return;
        }
        let Some(process) = &mut self.pools[pool].process else { return };
        if process.arm != arm {
            return;
        }
        match process.timer {
            Some(at) if at <= local => {
                process.timer = None;
                self.feed_pool(pool, vec![ReplicaEvent::Timer]);
            }
            Some(_) => self.plan_pool_timer(pool),
            None => {}
        }
    }

    pub(super) fn plan_idle(&mut self, pool: usize) {
        let here = &mut self.pools[pool];
        let life = here.life;
        if !here.storage.wants_background() {
            return;
        }
        let Some(process) = &mut here.process else { return };
        if !std::mem::replace(&mut process.idle_planned, true) {
            let delay = self.random.between(50, 5000) * MICROSECOND;
            self.schedule.after(delay, Event::PoolIdle { pool, life });
        }
    }

    /// The pool's background work: checkpoints, clean-up.
    pub(crate) fn pool_idle(&mut self, pool: usize, life: u32) {
        let here = &mut self.pools[pool];
        if here.life != life {
            return;
        }
        let Some(process) = &mut here.process else { return };
        process.idle_planned = false;
        if here.paused {
            return;
        }
        here.storage.take_blocked_reads();
        let worked = here.storage.background();
        let blocked = here.storage.take_blocked_reads();
        if blocked > 0 {
            // Its thread does nothing else until they have ended.
            here.paused = true;
            self.schedule.after(blocked * BLOCKED_READ, Event::Mend(Mend::ResumePool(pool)));
        }
        self.plan_fetches(pool);
        if let Err(error) = worked {
            self.trace.line(self.schedule.now(), || format!("pool {pool} background: {error}"));
            if matches!(error, quoin_replication::replica::store::StoreError::Io(_)) {
                self.kill_pool(pool, Outage::DiskFailed, 50 * MILLISECOND);
                return;
            }
        }
        // Its targets hear whether there is room again.
        self.feed_pool(pool, Vec::new());
    }

    /// The pool finds that its replica is lost and, told so by the control plane, makes an empty
    /// one under a new GUID that is not counted before it is adopted.
    pub(crate) fn recreate(&mut self, pool: usize) {
        if !self.pools[pool].gone || self.pools[pool].is_spare() {
            return;
        }
        if self.pools[pool].process.is_none() {
            self.schedule.after(200 * MILLISECOND, Event::Recreate { pool });
            return;
        }
        // The newest copy of the record knows of it, and says so once it is back.
        let lost = self.pools[pool].member;
        let named = |record: &Record| record.desired.newcomer(lost).is_some();
        if self.control.backup.as_ref().is_some_and(named) && !named(&self.control.record) {
            self.schedule.after(200 * MILLISECOND, Event::Recreate { pool });
            return;
        }
        let Some(newcomer) = self.replacement_for(pool) else {
            // Another record takes its place, and may be withdrawn. The pool says it with each report.
            if self.control.record.membership.contains(lost) {
                self.schedule.after(500 * MILLISECOND, Event::Recreate { pool });
                return;
            }
            self.pools[pool].member = Member::default();
            self.pools[pool].cache_lost = false;
            return;
        };
        if !self.make_replica(pool, newcomer) {
            self.pools[pool].member = newcomer;
            self.schedule.after(500 * MILLISECOND, Event::Recreate { pool });
            return;
        }
        self.stats.replicas.replacements += 1;
        self.send_desired();
    }
}
