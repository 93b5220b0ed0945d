//! Clones come and go, and bases with them.
//!
//! **One record makes a clone**: its creation, the base that it shows, and the base at the replica
//! that keeps it, with the root that the last record of that replica has of the snapshot. A record on
//! its way to the ring gets the base too. So after a crash at any moment a clone has its base, or
//! neither is there.
//!
//! **One record makes a remnant.** It is the last record of the replica without its live view, its
//! snapshots and its log. What memory has since is recorded by the next commit, as ever.
//!
//! A base is given up after the record that made it needless. A crash in between leaves a base that
//! no clone shows; the next start gives it up.

use std::collections::BTreeMap;

use quoin_replication::replica::store::{CloneSource, ReplicaIdentity, ReplicaMeta, StoreError};
use quoin_types::{
    Chain, Epoch, Lsn, Position, ReplicaGuid, SnapshotId, VOLUME_BLOCKS_MAX, mutant,
};

use crate::api::Cloned;
use crate::background::difference::LeavingView;
use crate::clones::Relatives;
use crate::clones::bases::BASES_DEEP_MAX;
use crate::core::Core;
use crate::disk::Disk;
use crate::error::PoolError;
use crate::format::batch::Stream;
use crate::format::checkpoint::{Checkpoint, LogStart, SnapshotState, TableState};
use crate::format::node::Root;
use crate::format::record::Record;
use crate::format::relatives::{BaseId, BaseState, RelativesState};
use crate::log::memtable::Log;
use crate::metadata::state::DurableState;
use crate::pool::{CREATION_BYTES, Pool};
use crate::rebuild::shadow;
use crate::replica::upper::Upper;
use crate::replica::{Replica, Synced};

const UNREADABLE: StoreError = StoreError::Damaged("the record of a clone's source");

/// Takes up the bases that records tell of.
pub fn read_bases<D: Disk>(core: &mut Core<D>, durable: &DurableState) -> Result<(), PoolError> {
    for (guid, replica) in durable.replicas() {
        let relatives = RelativesState::decode(replica.relatives.clone());
        let relatives = relatives.map_err(|_| PoolError::MetadataLost)?;
        for base in &relatives.bases {
            core.bases.insert(*guid, base);
        }
    }
    for (guid, replica) in durable.replicas() {
        let Ok(relatives) = RelativesState::decode(replica.relatives.clone()) else { continue };
        let parents = relatives.bases.iter().filter_map(|base| base.parent);
        parents.chain(relatives.base).for_each(|id| core.bases.begin_use(id));
        // Its own snapshots may need more; that is found when it is recovered.
        debug_assert_eq!(*guid, replica.identity.guid);
    }
    Ok(())
}

/// Marks clones as damaged whose base is missing or has no end: they are rebuilt from peers.
pub fn check_bases<D: Disk>(
    core: &mut Core<D>,
    replicas: &mut BTreeMap<ReplicaGuid, Replica>,
    durable: &mut DurableState,
) {
    for (guid, replica) in replicas {
        let Some(base) = replica.family.relatives.base else { continue };
        if core.bases.is_sound(base) {
            continue;
        }
        replica.meta.damaged = true;
        durable.with(*guid, |durable| durable.meta.damaged = true);
    }
}

/// The base that a checkpoint's snapshot makes.
fn base_of(
    checkpoint: bytes::Bytes,
    snapshot: SnapshotId,
    parent: Option<BaseId>,
) -> Result<Option<BaseState>, StoreError> {
    let checkpoint = Checkpoint::decode(checkpoint).map_err(|_| UNREADABLE)?;
    let kept = checkpoint.snapshots.iter().find(|s| s.info.id == snapshot);
    Ok(kept.map(|kept| state_of(kept, parent)))
}

fn state_of(kept: &SnapshotState, parent: Option<BaseId>) -> BaseState {
    let (lsn, blocks) = (kept.info.lsn.0, kept.info.blocks);
    BaseState { snapshot: kept.info.id, lsn, blocks, parent, root: kept.root }
}

/// See [`crate::ReplicaPool::create_clone`].
pub fn make_clone<D: Disk>(
    pool: &mut Pool<D>,
    identity: ReplicaIdentity,
    meta: ReplicaMeta,
    blocks: u64,
    source: &CloneSource,
) -> Result<Cloned, StoreError> {
    pool.core.check_usable()?;
    let guid = identity.guid;
    let is_known = pool.replicas.contains_key(&guid);
    if is_known || pool.core.durable.retired.contains(&guid) {
        return Err(StoreError::Rule("a GUID is born once"));
    }
    if pool.ring_lacks(identity.volume_spec.len() + 2 * CREATION_BYTES) {
        return Err(StoreError::RingFull);
    }
    let Some(keeper) = holder_of(pool, source) else {
        return Err(StoreError::Rule("a clone is made where its snapshot is"));
    };
    pool.touch(keeper);
    let Some(replica) = pool.replicas.get_mut(&keeper) else { return Err(UNREADABLE) };
    if !is_sound(replica) {
        return Err(StoreError::Damaged("the replica that has the snapshot of a clone"));
    }
    let Some(kept) = replica.folded.snapshots.iter().find(|s| s.info.id == source.snapshot) else {
        // It is above the map still.
        replica.maintenance.fold_wanted = true;
        return Ok(Cloned::NotYet);
    };
    if blocks < kept.info.blocks || blocks > VOLUME_BLOCKS_MAX {
        return Err(StoreError::Rule("a clone has the size of its snapshot at least"));
    }
    let kept = kept.clone();
    let parent = replica.family.relatives.base;
    if pool.core.bases.depth(parent) + 1 >= BASES_DEEP_MAX {
        return Err(StoreError::Rule(
            "clones of clones are too deep: flatten one of those that it comes from",
        ));
    }
    let id = BaseId { replica: keeper, snapshot: source.snapshot };
    let durable = pool.core.durable.replicas().get(&keeper).ok_or(UNREADABLE)?;
    let mut relatives = RelativesState::decode(durable.relatives.clone());
    let relatives = relatives.as_mut().map_err(|_| UNREADABLE)?;
    // A map shows the base that was recorded with it.
    let recorded = base_of(durable.checkpoint.clone(), source.snapshot, relatives.base)?;
    let Some(recorded) = recorded else {
        // Its map is not recorded yet.
        pool.replicas.entry(keeper).and_modify(|r| r.maintenance.dirty = true);
        return Ok(Cloned::NotYet);
    };
    let is_base = relatives.bases.iter().any(|base| base.snapshot == source.snapshot);
    if !is_base {
        relatives.bases.push(recorded);
    }
    let clone = new_clone(identity.clone(), meta.clone(), blocks, source, &kept, id, &pool.core);
    let own = RelativesState { base: Some(id), ..RelativesState::default() };
    let checkpoint = Checkpoint {
        head: clone.folded.head.clone(),
        stable: clone.stable,
        sequence: pool.core.sequence,
        ..Checkpoint::default()
    };
    let records = [
        Record::Create(identity),
        Record::Meta(guid, Box::new(meta), clone.stable),
        Record::Checkpoint(guid, checkpoint.encode()),
        Record::Relatives(guid, own.encode()),
        Record::Relatives(keeper, relatives.encode()),
    ];
    if mutant::is("base-recorded-apart-from-its-clone") {
        let [create, meta, checkpoint, own, base] = records;
        pool.core.record_all([create, meta, checkpoint, own])?;
        pool.core.record(base)?;
    } else {
        pool.core.record_all(records)?;
    }
    keep_base(pool, keeper, &kept, parent)?;
    pool.core.bases.begin_use(id);
    pool.replicas.insert(guid, clone);
    pool.core.share_among(pool.replicas.len());
    pool.touch(guid);
    pool.touch(keeper);
    Ok(Cloned::Made)
}

fn is_sound(replica: &Replica) -> bool {
    !replica.meta.damaged && replica.maintenance.quarantined.is_none()
}

/// The replica that has a snapshot, as a part of its log or of its map. A pool may have a second one
/// for a while: a damaged one, and the one that was made in its place.
fn holder_of<D: Disk>(pool: &Pool<D>, source: &CloneSource) -> Option<ReplicaGuid> {
    let has = |replica: &Replica| {
        replica.identity.volume == source.volume
            && !is_remnant(replica)
            && replica.snapshots.iter().any(|s| s.id == source.snapshot && !s.hidden)
    };
    let holders = pool.replicas.iter().filter(|(_, replica)| has(replica));
    holders.min_by_key(|(_, replica)| !is_sound(replica)).map(|(guid, _)| *guid)
}

/// Makes a snapshot a base, in memory and in the record that is on its way.
fn keep_base<D: Disk>(
    pool: &mut Pool<D>,
    keeper: ReplicaGuid,
    kept: &SnapshotState,
    parent: Option<BaseId>,
) -> Result<(), StoreError> {
    let core = &mut pool.core;
    let Some(replica) = pool.replicas.get_mut(&keeper) else { return Ok(()) };
    let id = BaseId { replica: keeper, snapshot: kept.info.id };
    if let Some(commit) = &mut replica.maintenance.commit
        && !commit.relatives.bases.iter().any(|base| base.snapshot == kept.info.id)
        && !mutant::is("base-forgotten-by-a-commit-under-way")
    {
        // The snapshot is in it: it is in the map, and in the record before.
        let base = base_of(commit.record.clone(), kept.info.id, commit.relatives.base)?;
        commit.relatives.bases.extend(base);
    }
    if core.bases.get(id).is_none() {
        // The clone reads nodes from the disk that wait here to be written.
        replica.io(core).flush()?;
        core.bases.insert(keeper, &state_of(kept, parent));
        parent.into_iter().for_each(|parent| core.bases.begin_use(parent));
    }
    replica.family.relatives.kept_through = core.bases.kept_through(keeper);
    replica.family.changes += 1;
    Ok(())
}

/// Deletes a replica whose bases clones show: they stay, and all else goes.
pub fn leave_remnant<D: Disk>(pool: &mut Pool<D>, guid: ReplicaGuid) -> Result<(), StoreError> {
    let core = &mut pool.core;
    let Some(replica) = pool.replicas.get_mut(&guid) else { return Ok(()) };
    let durable = core.durable.replicas().get(&guid).ok_or(UNREADABLE)?;
    let mut checkpoint = Checkpoint::decode(durable.checkpoint.clone()).map_err(|_| UNREADABLE)?;
    let mut relatives =
        RelativesState::decode(durable.relatives.clone()).map_err(|_| UNREADABLE)?;
    (checkpoint.root, checkpoint.shadow) = (Root::default(), None);
    checkpoint.snapshots.clear();
    checkpoint.segments.extend(durable.log_segments.iter().copied());
    // Much of what they hold is dead now.
    checkpoint.segments =
        checkpoint.segments.iter().map(|s| s.counted().0.recorded(true)).collect();
    checkpoint.table = checkpoint.table.map(|table| TableState { too_high: true, ..table });
    checkpoint.log = LogStart {
        index: replica.family.log_end.next_index,
        previous: replica.family.log_end.previous,
        ..LogStart::default()
    };
    checkpoint.sequence = core.sequence;
    checkpoint.stable = checkpoint.head.position.lsn;
    (relatives.base, relatives.is_remnant) = (None, true);
    core.record_all([
        Record::Checkpoint(guid, checkpoint.encode()),
        Record::Relatives(guid, relatives.encode()),
        Record::Retired(guid),
    ])?;
    become_remnant(replica);
    core.tickets.request();
    pool.victim.set(None);
    pool.drop_calls(guid);
    pool.touch(guid);
    Ok(())
}

/// Gives up bases that no clone shows any more, and remnants that have none left.
pub fn drop_unused_bases<D: Disk>(pool: &mut Pool<D>) -> Result<(), StoreError> {
    while let Some((BaseId { replica: keeper, .. }, base)) = pool.core.bases.take_unused() {
        pool.touch(keeper);
        let Some(replica) = pool.replicas.get_mut(&keeper) else { continue };
        replica.family.relatives.kept_through = pool.core.bases.kept_through(keeper);
        replica.family.changes += 1;
        replica.maintenance.count.leave([LeavingView::new(base.root, base.lsn)]);
        replica.maintenance.dirty = true;
        if is_remnant(replica) && !keeps_bases(replica) {
            pool.remove(keeper)?;
        }
    }
    Ok(())
}

/// Removes remnants of which a crash, or a hostile hand, left no bases.
pub fn drop_empty_remnants<D: Disk>(pool: &mut Pool<D>) -> Result<(), StoreError> {
    let is_empty = |replica: &Replica| is_remnant(replica) && !keeps_bases(replica);
    let all = pool.replicas.iter();
    let empty: Vec<ReplicaGuid> =
        all.filter(|(_, replica)| is_empty(replica)).map(|(guid, _)| *guid).collect();
    empty.into_iter().try_for_each(|guid| pool.remove(guid))
}

/// A clone as it begins: without a block of its own.
fn new_clone<D: Disk>(
    identity: ReplicaIdentity,
    meta: ReplicaMeta,
    blocks: u64,
    source: &CloneSource,
    kept: &SnapshotState,
    base: BaseId,
    core: &Core<D>,
) -> Replica {
    let lsn = kept.info.lsn;
    let mut clone = Replica::new(identity, meta, blocks, core.superblock.unit_blocks);
    let position = Position { epoch: Epoch::ZERO, lsn };
    let chain = Chain::of_clone(source.volume, source.snapshot, lsn, kept.chain);
    clone.folded.head.advance(position, chain);
    clone.head = clone.folded.head.clone();
    clone.log = Log::after(lsn);
    clone.stable = lsn;
    clone.synced = Synced { durable: lsn, syncing: lsn };
    clone.family.relatives = Relatives { base: Some(base), ..Relatives::default() };
    clone
}

/// Returns true if the replica was deleted, and nothing but its bases is left.
pub fn is_remnant(replica: &Replica) -> bool {
    replica.family.relatives.is_remnant
}

/// Returns true if clones show snapshots of the replica.
pub fn keeps_bases(replica: &Replica) -> bool {
    replica.family.relatives.kept_through > 0
}

fn become_remnant(replica: &mut Replica) {
    (replica.family.relatives.base, replica.family.relatives.is_remnant) = (None, true);
    shadow::abandon(replica);
    replica.pins.clear();
    replica.maintenance.checkpoint = None;
    replica.maintenance.clean = None;
    replica.maintenance.flatten = None;
    replica.maintenance.fold_for_increment = None;
    replica.maintenance.fold_wanted = false;
    if let Some(commit) = replica.maintenance.commit.take() {
        // Its record would bring the replica back.
        replica.maintenance.pending_free.extend(commit.frees);
    }
    let last = replica.head.position.lsn;
    replica.folded.head = replica.head.clone();
    (replica.folded.root, replica.stable) = (Root::default(), last);
    replica.folded.snapshots.clear();
    replica.snapshots.clear();
    replica.log = Log::after(last);
    replica.upper = Upper::default();
    replica.frozen.clear();
    replica.synced = Synced { durable: Lsn(last.0), syncing: Lsn(last.0) };
    replica.family.close(Stream::Log);
    replica.family.forget_log_before(replica.family.log_end.next_index);
    replica.family.changes += 1;
    replica.maintenance.quarantined = None;
    replica.maintenance.count.begin_anew();
    (replica.maintenance.dirty, replica.maintenance.commit_waits) = (true, false);
}

#[cfg(test)]
mod tests {
    use quoin_replication::replica::store::ReplicaStore;
    use quoin_types::message::{Content, ReadView};
    use quoin_types::{PoolId, VolumeId};

    use super::*;
    use crate::{Disk, FormatOptions, MemoryDisk, PoolOptions, ReplicaPool};

    fn identity(n: u128) -> ReplicaIdentity {
        let (volume, guid) = (VolumeId(n), ReplicaGuid(n));
        ReplicaIdentity { volume, guid, ..ReplicaIdentity::default() }
    }

    fn base(replica: u128, snapshot: u128) -> BaseId {
        BaseId { replica: ReplicaGuid(replica), snapshot: SnapshotId(snapshot) }
    }

    /// A pool whose records say this of its replicas 1 and 2.
    fn opened(one: &RelativesState, two: &RelativesState) -> Pool<MemoryDisk> {
        let disk = MemoryDisk::new(128 << 20);
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a fit disk");
        let mut pool = Pool::open(disk.clone(), PoolOptions::default()).expect("a fresh pool");
        for (n, relatives) in [(1, one), (2, two)] {
            pool.create(identity(n), ReplicaMeta::default(), 64).expect("room");
            let record = Record::Relatives(ReplicaGuid(n), relatives.encode());
            pool.core.record(record).expect("room");
        }
        disk.sync().expect("a sync");
        Pool::open(disk, PoolOptions::default()).expect("a pool")
    }

    #[test]
    fn a_clone_whose_base_is_missing_or_has_no_end_is_damaged_and_harms_no_other_replica() {
        let keeps = |snapshot: u128, parent| {
            let (root, snapshot) = (Root::default(), SnapshotId(snapshot));
            BaseState { snapshot, lsn: 5, blocks: 64, parent, root }
        };
        let of = |base, bases| RelativesState { base, is_remnant: false, bases };
        let (none, missing) = (RelativesState::default(), of(Some(base(1, 7)), vec![]));
        let circle = of(None, vec![keeps(7, Some(base(1, 8))), keeps(8, Some(base(1, 7)))]);
        let itself = of(None, vec![keeps(7, Some(base(1, 7)))]);
        let whole = of(None, vec![keeps(7, None)]);
        for (keeper, is_damaged) in
            [(&none, true), (&circle, true), (&itself, true), (&whole, false)]
        {
            let mut pool = opened(keeper, &missing);
            let clone = pool.replica(ReplicaGuid(2)).expect("it");
            assert_eq!(clone.meta().damaged, is_damaged, "{keeper:?}");
            let mut slots = Vec::new();
            let mut replica = pool.replica(ReplicaGuid(2)).expect("it");
            replica.read(ReadView::Live, 0, 64, true, &mut slots).expect("an answer");
            let is_bad = slots.iter().all(|slot| slot.content == Content::Bad);
            assert_eq!(is_bad, is_damaged, "what is not known is no hole");
            assert!(!pool.replica(ReplicaGuid(1)).expect("it").meta().damaged);
            pool.settle().expect("recorded");
        }
    }

    #[test]
    fn a_base_that_no_clone_shows_and_a_remnant_without_bases_are_given_up_at_a_start() {
        let (root, snapshot) = (Root::default(), SnapshotId(7));
        let unused = BaseState { snapshot, lsn: 5, blocks: 64, parent: None, root };
        for is_remnant in [false, true] {
            let one = RelativesState { base: None, is_remnant, bases: vec![unused] };
            let pool = opened(&one, &RelativesState::default());
            assert!(pool.core.bases.is_empty());
            assert_eq!(pool.replicas.contains_key(&ReplicaGuid(1)), !is_remnant);
        }
        let empty = RelativesState { is_remnant: true, ..RelativesState::default() };
        let mut pool = opened(&empty, &RelativesState::default());
        pool.settle().expect("recorded");
        assert!(!pool.replicas.contains_key(&ReplicaGuid(1)) && pool.replicas().len() == 1);
    }
}
