//! The replicas that a shard holds: creating and deleting them as assigned, and telling of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quoin_replication::pool_host::holdings::{Step, step};
use quoin_replication::pool_host::repairs::Repairs;
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore, StoreError, SyncTicket};
use quoin_replication::replica::{Replica, ReplicaEvent};
use quoin_store::{Cloned, ReplicaPool};
use quoin_telemetry::notices::Severity;
use quoin_types::{Epoch, Position, ReplicaGuid, ReplicaId, Time, VolumeId};

use super::disk::Syncs;
use super::{FILE_GONE, FULL, FULL_BELOW, RING_FULL, Shard};
use crate::assignment::{
    Assignment, AssignmentChange, Fence, PoolState, ReclaimOrder, ReplicaState, Wanted, generation,
    is_news,
};
use crate::facts::PoolFacts;
use crate::held::{Held as HeldReplica, Holdings};

/// Time until a creation or a deletion that failed is tried again.
const UNDONE_AGAIN: Duration = Duration::from_secs(10);

/// Time until a clone is tried again whose snapshot may be on its way to this pool.
const CLONE_AGAIN: Duration = Duration::from_secs(1);
/// The same where its snapshot is on its way into the map of its replica, which takes moments.
const CLONE_SOON: Duration = Duration::from_millis(10);

/// Replicas whose creation or deletion failed, and when each is tried again.
#[derive(Default)]
pub(super) struct Undone {
    replicas: BTreeMap<ReplicaGuid, Time>,
}

impl Undone {
    /// Takes out those that are due.
    fn take_due(&mut self, now: Time) -> BTreeSet<ReplicaGuid> {
        let due = self.replicas.iter().filter(|(_, at)| **at <= now).map(|(guid, _)| *guid);
        let due: BTreeSet<ReplicaGuid> = due.collect();
        self.replicas.retain(|guid, _| !due.contains(guid));
        due
    }

    /// One is tried again in moments.
    fn is_soon(&self, now: Time) -> bool {
        self.due_in(now).is_some_and(|due| due <= CLONE_SOON)
    }

    pub(super) fn due_in(&self, now: Time) -> Option<Duration> {
        self.replicas.values().min().map(|at| at.since(now))
    }
}

pub(super) struct Held {
    pub(super) replica: Replica,
    pub(super) timer_key: u64,
    /// Listed in `touched`.
    pub(super) touched: bool,
    /// Listed in `used`.
    pub(super) used: bool,
    /// Created but not on media before this ticket is done.
    pub(super) born: SyncTicket,
    pub(super) record: Recorded,
    pub(super) promise: PromiseTold,
    pub(super) reclaim: Reclaim,
    pub(super) repairs: Repairs,
    /// When the disk last refused what a session needs.
    pub(super) refused_at: Option<Time>,
    /// The change of the room that it was told last.
    pub(super) room_told: u64,
}

/// Generation of the record that a replica keeps about its volume.
#[derive(Clone, Copy)]
pub(super) struct Recorded {
    /// Counts until the ticket is done.
    former: u64,
    last: u64,
    ticket: SyncTicket,
}

impl Recorded {
    fn of(kept: &[u8], ticket: SyncTicket) -> Self {
        Self { former: 0, last: generation(kept), ticket }
    }

    fn becomes(&mut self, told: &[u8], ticket: SyncTicket, syncs: &Syncs) {
        let former = self.on_media(syncs);
        *self = Self { former, last: generation(told), ticket };
    }

    fn is_on_media(&self, syncs: &Syncs) -> bool {
        syncs.covers(self.ticket)
    }

    fn on_media(&self, syncs: &Syncs) -> u64 {
        if self.is_on_media(syncs) { self.last } else { self.former }
    }
}

/// Orders to give space of a replica back, by their numbers; 0: none.
#[derive(Clone, Copy, Default)]
pub(super) struct Reclaim {
    under_way: u64,
    done: u64,
}

/// The promise of a replica, which the controller is told once it is on media.
#[derive(Clone, Copy)]
pub(super) struct PromiseTold {
    /// Counts until the ticket is done.
    former: Epoch,
    last: Epoch,
    ticket: SyncTicket,
}

impl PromiseTold {
    fn of(promised: Epoch, ticket: SyncTicket) -> Self {
        Self { former: Epoch::ZERO, last: promised, ticket }
    }

    fn becomes(&mut self, promised: Epoch, ticket: SyncTicket, syncs: &Syncs) {
        *self = Self { former: self.on_media(syncs), last: promised, ticket };
    }

    fn is_on_media(&self, syncs: &Syncs) -> bool {
        syncs.covers(self.ticket)
    }

    fn on_media(&self, syncs: &Syncs) -> Epoch {
        if self.is_on_media(syncs) { self.last } else { self.former }
    }
}

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    pub(super) fn hold(&mut self, now: Time, guid: ReplicaGuid, born: SyncTicket) {
        let cookie = self.parts.witness.cookie(self.pool.cookie());
        let Some(store) = self.pool.replica(guid) else { return };
        let replica = Replica::new(now, cookie, &store);
        let record = Recorded::of(&store.identity().volume_spec, born);
        let promise = PromiseTold::of(store.meta().promised, born);
        drop(store);
        let (timer_key, repairs) = (self.connections.key(), Repairs::default());
        let room_told = self.room_changes;
        let (touched, used, refused_at) = (false, false, None);
        let held = Held {
            replica,
            timer_key,
            touched,
            used,
            born,
            record,
            promise,
            reclaim: Reclaim::default(),
            repairs,
            refused_at,
            room_told,
        };
        self.replicas.insert(guid, held);
        if !self.disk.syncs.covers(born) {
            self.replicas.untold = Some(born);
        }
        self.parts.metrics.space.replicas.set(self.replicas.len() as i64);
        // The others hear of it with the end of the round: with one more the share of each is smaller.
        let room = self.pool.room(self.room);
        self.deliver(now, guid, ReplicaEvent::Room(room));
    }

    pub(super) fn assign(&mut self, now: Time, assignment: Assignment) {
        self.parts.assignment = assignment.clone();
        self.replicas.gone.clear();
        self.replicas.undone = Undone::default();
        for wanted in assignment.0 {
            self.obey(now, wanted);
        }
    }

    /// Takes a change of the last assignment in, and tries again what failed of the others.
    pub(super) fn reassign(&mut self, now: Time, change: AssignmentChange) {
        self.parts.assignment.apply(&change);
        let AssignmentChange { wanted, removed } = change;
        for guid in wanted.iter().map(|wanted| wanted.identity.guid).chain(removed) {
            self.replicas.gone.retain(|gone| gone.guid != guid);
            self.replicas.undone.replicas.remove(&guid);
        }
        // This very change may have taken away whatever stood in the way.
        self.replicas.undone.replicas.values_mut().for_each(|at| *at = now);
        self.try_again(now);
        for wanted in wanted {
            self.obey(now, wanted);
        }
    }

    fn obey(&mut self, now: Time, wanted: Wanted) {
        let (guid, fence, phase) = (wanted.identity.guid, wanted.fence, wanted.phase);
        let flatten = wanted.flatten;
        let held = self.pool.replica(guid).map(|store| store.identity().clone());
        let retired = self.pool.is_retired(guid);
        let step = step(phase, &wanted.identity, held.as_ref(), retired);
        let mut pause = UNDONE_AGAIN;
        match step {
            Step::Create { quorum } => self.create(now, wanted, quorum),
            Step::Clone => pause = self.make_clone(now, wanted),
            Step::Describe => self.describe(&wanted),
            Step::Delete => self.delete(now, &wanted),
            Step::Absent => self.replicas.gone.push(gone(&wanted)),
            Step::OfAnother => return self.tell_of_another(&wanted),
        }
        self.fence(now, guid, fence);
        if flatten {
            self.pool.flatten(guid);
        }
        let is_held = self.replicas.contains(guid);
        let is_undone = match step {
            Step::Create { .. } | Step::Clone => !is_held,
            Step::Delete => is_held,
            Step::Describe | Step::Absent | Step::OfAnother => false,
        };
        if is_undone {
            self.replicas.undone.replicas.insert(guid, now + pause);
        }
    }

    /// Creations and deletions that failed are tried again, whether or not anything is assigned anew.
    pub(super) fn try_again(&mut self, now: Time) {
        // Every turn asks, and nearly none has anything to do here.
        if self.replicas.undone.replicas.is_empty() {
            return;
        }
        let undone = self.replicas.undone.take_due(now);
        let assigned = self.parts.assignment.0.iter();
        let wanted = assigned.filter(|wanted| undone.contains(&wanted.identity.guid)).cloned();
        let wanted: Vec<_> = if undone.is_empty() { Vec::new() } else { wanted.collect() };
        for wanted in wanted {
            self.obey(now, wanted);
        }
    }

    /// Nothing was done, and people have to know: the records and this pool disagree.
    fn tell_of_another(&mut self, wanted: &Wanted) {
        let (volume, replica) = (wanted.identity.volume, wanted.identity.replica);
        let message = format!(
            "the replica with GUID {} that this pool holds is of another volume or has another id: \
             it is left as it is",
            wanted.identity.guid
        );
        tracing::error!(%volume, %replica, message);
        self.parts.notices.push(Severity::Error, volume, replica, "ReplicaOfAnother", message);
    }

    fn create(&mut self, now: Time, wanted: Wanted, quorum: bool) {
        let guid = wanted.identity.guid;
        let (volume, replica) = (wanted.identity.volume, wanted.identity.replica);
        let meta = ReplicaMeta { membership: wanted.membership, quorum, ..ReplicaMeta::default() };
        match self.pool.create(wanted.identity, meta, wanted.blocks) {
            Ok(()) => {
                let ticket = self.pool.request_sync();
                self.hold(now, guid, ticket);
                tracing::info!(%volume, %replica, %guid, "replica created");
            }
            Err(error) => {
                let message = format!("cannot create the replica: {error}");
                self.tell_not_created(volume, replica, message);
            }
        }
    }

    fn tell_not_created(&mut self, volume: VolumeId, replica: ReplicaId, message: String) {
        let reason = "ReplicaNotCreated";
        self.parts.notices.push(Severity::Error, volume, replica, reason, message);
    }

    /// Makes a replica that begins with a snapshot. Where that is not to be had now it waits: one that
    /// begins with anything else would count for the volume's content. Returns the time until it is
    /// tried again.
    fn make_clone(&mut self, now: Time, wanted: Wanted) -> Duration {
        let guid = wanted.identity.guid;
        let (volume, replica) = (wanted.identity.volume, wanted.identity.replica);
        let Some(source) = wanted.source else { return CLONE_AGAIN };
        let meta =
            ReplicaMeta { membership: wanted.membership, quorum: true, ..ReplicaMeta::default() };
        match self.pool.create_clone(wanted.identity, meta, wanted.blocks, &source) {
            Ok(Cloned::Made) => {
                let ticket = self.pool.request_sync();
                self.hold(now, guid, ticket);
                tracing::info!(%volume, %replica, %guid, of = %source.snapshot, "clone made");
            }
            Ok(Cloned::NotYet) => {
                tracing::debug!(%volume, "the snapshot is not in the map yet");
                return CLONE_SOON;
            }
            Err(error) => {
                let message = format!(
                    "cannot make the replica from snapshot {} of volume {}: {error}",
                    source.snapshot, source.volume
                );
                self.tell_not_created(volume, replica, message);
            }
        }
        CLONE_AGAIN
    }

    /// Has a replica open nothing any more by grants that were taken back. What it has promised
    /// already costs nothing here, since the same is told again with each assignment.
    fn fence(&mut self, now: Time, guid: ReplicaGuid, fence: Fence) {
        let Fence { epoch, at_once } = fence;
        if epoch != Epoch::ZERO {
            self.deliver(now, guid, ReplicaEvent::Fence { epoch, at_once });
        }
    }

    /// Has a replica keep what its volume is by now: the records may once have to be made from it.
    fn describe(&mut self, wanted: &Wanted) {
        let (guid, told) = (wanted.identity.guid, &wanted.identity.volume_spec);
        let Some(store) = self.pool.replica(guid) else { return };
        let news = is_news(&store.identity().volume_spec, told);
        drop(store);
        if !news {
            return;
        }
        match self.pool.describe(guid, told.clone()) {
            Ok(()) => {
                let ticket = self.pool.request_sync();
                if let Some(held) = self.replicas.get_mut(guid) {
                    held.record.becomes(told, ticket, &self.disk.syncs);
                }
                self.replicas.untold = Some(ticket);
            }
            Err(StoreError::Io(fault)) => self.fail(StoreError::Io(fault)),
            Err(error) => tracing::warn!(%guid, %error, "an older description of it is kept"),
        }
    }

    /// All that the pool keeps about its replicas.
    pub(super) fn holdings(&mut self) -> Holdings {
        let mut replicas = Vec::new();
        for (guid, held) in self.replicas.iter() {
            let Some(store) = self.pool.replica(guid) else { continue };
            // A replica that is not on media may be gone after the next start.
            if self.disk.syncs.covers(held.born) {
                replicas.push(HeldReplica {
                    identity: store.identity().clone(),
                    meta: store.meta().clone(),
                    state: store.state(),
                    snapshots: store.snapshots().into_iter().filter(|s| !s.hidden).collect(),
                });
            }
        }
        Holdings { replicas, deleted: self.pool.retired() }
    }

    fn delete(&mut self, now: Time, wanted: &Wanted) {
        let guid = wanted.identity.guid;
        self.deliver(now, guid, ReplicaEvent::Shutdown);
        match self.pool.delete(guid) {
            Ok(_) => {
                if let Some(held) = self.replicas.remove(guid) {
                    self.timers.set(held.timer_key, None);
                }
                for key in self.connections.keys_of(|peer| peer.claim.guid == guid) {
                    self.end(key);
                }
                self.replicas.deleted = self.pool.request_sync();
                self.replicas.untold = Some(self.replicas.deleted);
                self.parts.metrics.space.replicas.set(self.replicas.len() as i64);
                self.replicas.gone.push(gone(wanted));
                tracing::info!(volume = %wanted.identity.volume, %guid, "replica deleted");
            }
            Err(error @ StoreError::Io(_)) => self.fail(error),
            // Tried again later; its disk is as good as before.
            Err(error) => tracing::error!(%guid, %error, "a replica cannot be deleted"),
        }
    }

    /// Tells of all replicas, or of those that were used since it told last. A pool may hold thousands,
    /// and is asked every few milliseconds while some are made.
    pub(super) fn state(&mut self, now: Time, all: bool) -> PoolState {
        self.collect_bad_copies(now);
        // Another life told of the replicas before.
        let all = all || self.space.is_none();
        let untold = self.replicas.take_untold(all);
        self.tell_repairs(&untold);
        if all {
            self.pool.look_again();
            self.space = Some((self.pool.space(), self.pool.live_bytes()));
        }
        // Not said before it is on media: until then a failing disk may bring one back.
        let mut replicas = match self.disk.syncs.covers(self.replicas.deleted) {
            true => self.replicas.gone.clone(),
            false => Vec::new(),
        };
        let mut is_making = self.replicas.undone.is_soon(now);
        for guid in untold {
            // Not said before it is on media: "created" is what lets a volume be formed.
            if self.replicas.get(guid).is_some_and(|held| !self.disk.syncs.covers(held.born)) {
                is_making = true;
                self.replicas.get_mut(guid);
            } else if let Some(state) = self.replica_state(now, guid) {
                let held = self.replicas.get(guid);
                let is_recording = held.is_some_and(|held| {
                    let syncs = &self.disk.syncs;
                    !held.record.is_on_media(syncs)
                        || !held.promise.is_on_media(syncs)
                        || held.reclaim.under_way != 0
                });
                if state.hears_target || is_recording {
                    // The end of its lease is no event, and a takeover waits for the word of it. Nor
                    // is the end of a sync one.
                    self.replicas.get_mut(guid);
                }
                replicas.push(state);
            }
        }
        let (space, live_bytes) = self.space.unwrap_or_default();
        self.parts.metrics.filled(space, live_bytes);
        let scrub = self.scrub_state();
        let ring_full = self.pool.is_ring_full();
        let warning = match (self.short, self.pool.is_short_below()) {
            _ if self.is_nameless => FILE_GONE,
            (_, true) => FULL_BELOW,
            (true, false) => FULL,
            (false, false) if ring_full => RING_FULL,
            (false, false) => "",
        };
        let (counts, mark_rises) = (self.tell_counts(), self.pool.is_mark_rising());
        PoolState {
            space,
            live_bytes,
            warning,
            ring_full,
            counts,
            mark_rises,
            is_making,
            scrub,
            replicas,
            is_partial: !all,
        }
    }

    fn replica_state(&mut self, now: Time, guid: ReplicaGuid) -> Option<ReplicaState> {
        let used_bytes = self.pool.replica_bytes(guid);
        let is_clone = self.pool.is_clone(guid);
        self.note_promise(guid);
        self.note_reclaim(guid);
        let held = self.replicas.get(guid)?;
        let store = self.pool.replica(guid)?;
        let (state, meta) = (store.state(), store.meta());
        Some(ReplicaState {
            volume: store.identity().volume,
            replica: store.identity().replica,
            guid,
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
            bad_blocks: held.repairs.bad_blocks(),
            repaired: held.repairs.mended(),
            is_clone,
            hears_target: held.replica.hears_target(now),
            record_generation: held.record.on_media(&self.disk.syncs),
            promised: held.promise.on_media(&self.disk.syncs),
            reclaimed: held.reclaim.done,
        })
    }

    /// Begins to give space of replicas back. An order that was carried out, or is under way, is no news.
    pub(super) fn begin_reclaims(&mut self, orders: &[ReclaimOrder]) {
        for ReclaimOrder { guid, request } in orders {
            let Some(held) = self.replicas.get(*guid) else { continue };
            if [held.reclaim.under_way, held.reclaim.done].contains(request) {
                continue;
            }
            self.pool.reclaim(*guid);
            if let Some(held) = self.replicas.get_mut(*guid) {
                held.reclaim.under_way = *request;
            }
        }
    }

    /// Takes down the end of such work, which is no event.
    fn note_reclaim(&mut self, guid: ReplicaGuid) {
        let under_way = self.replicas.get(guid).map_or(0, |held| held.reclaim.under_way);
        if under_way == 0 || self.pool.is_reclaiming(guid) {
            return;
        }
        self.pool.end_reclaim(guid);
        if let Some(held) = self.replicas.get_mut(guid) {
            held.reclaim = Reclaim { under_way: 0, done: under_way };
        }
    }

    /// Takes down another promise of a replica, and the sync that has it on media.
    fn note_promise(&mut self, guid: ReplicaGuid) {
        let Some(store) = self.pool.replica(guid) else { return };
        let promised = store.meta().promised;
        drop(store);
        if self.replicas.get(guid).is_none_or(|held| held.promise.last == promised) {
            return;
        }
        let ticket = self.pool.request_sync();
        if let Some(held) = self.replicas.get_mut(guid) {
            held.promise.becomes(promised, ticket, &self.disk.syncs);
        }
        self.replicas.untold = self.replicas.untold.max(Some(ticket));
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
        bad_blocks: 0,
        hears_target: false,
        record_generation: 0,
        promised: Epoch::ZERO,
        reclaimed: 0,
        repaired: 0,
        is_clone: false,
    }
}
