//! A Revert is a write: every block that changed since its snapshot has the snapshot's content, with
//! the Revert's LSN as version.

use std::sync::Arc;

use crate::common::{flat, identity, new_pool_with, options, pull_all, read_all, sync};
use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::{Due, MemoryDisk, Pool, PoolOptions, ReplicaPool};
use quoin_types::message::ReadView;
use quoin_types::{
    BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, SnapshotId,
};

const GUID: ReplicaGuid = ReplicaGuid(0x7e);
const BLOCKS: u64 = 2000;
const KEPT: SnapshotId = SnapshotId(7);

/// A replica alone in its pool, and the end of its history.
struct Volume {
    disk: MemoryDisk,
    pool: Pool<MemoryDisk>,
    chain: Chain,
    lsn: u64,
}

impl Volume {
    fn new(options: PoolOptions) -> Self {
        let (disk, mut pool) = new_pool_with(64 << 20, options);
        pool.create(identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room");
        Volume { disk, pool, chain: Chain(0), lsn: 0 }
    }

    fn try_append(&mut self, kind: EntryKind, lba: u64, blocks: u32) -> Result<Lsn, StoreError> {
        let data = match kind {
            EntryKind::Write => {
                Bytes::from(vec![(self.lsn + 1) as u8; blocks as usize * BLOCK_SIZE])
            }
            _ => Bytes::new(),
        };
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn + 1) };
        let entry = Entry::after(self.chain, position, kind, lba, blocks, data, false);
        let chain = entry.chain;
        self.pool.replica(GUID).expect("it").append(&[Arc::new(entry)])?;
        (self.chain, self.lsn) = (chain, self.lsn + 1);
        Ok(position.lsn)
    }

    fn append(&mut self, kind: EntryKind, lba: u64, blocks: u32) -> Lsn {
        self.try_append(kind, lba, blocks).expect("room")
    }

    fn write(&mut self, lba: u64, blocks: u32) -> Lsn {
        self.append(EntryKind::Write, lba, blocks)
    }

    fn snapshot(&mut self, id: SnapshotId) -> Lsn {
        self.append(EntryKind::Snapshot { id, hidden: false }, 0, 0)
    }

    fn revert(&mut self, id: SnapshotId) -> Lsn {
        self.append(EntryKind::Revert { id }, 0, 0)
    }

    fn stable(&mut self) {
        let stable = Lsn(self.lsn);
        self.pool.replica(GUID).expect("it").set_stable(stable);
    }

    /// Folds and records what is stable.
    fn settle(&mut self) {
        self.stable();
        self.pool.settle().expect("folded and recorded");
    }

    fn blocks(&mut self, view: ReadView) -> Vec<(u64, u64, Option<Bytes>)> {
        let mut replica = self.pool.replica(GUID).expect("it");
        let size = replica.state().volume_blocks;
        let listed = replica.snapshots();
        let size = match view {
            ReadView::Snapshot(id) => listed.iter().find(|s| s.id == id).expect("it").blocks,
            _ => size,
        };
        flat(&read_all(&mut replica, view, size))
    }

    /// Works until nothing is left to do.
    fn rest(&mut self) {
        for _ in 0..200 {
            while self.pool.background_due() > Due::Idle {
                self.pool.background(1 << 20).expect("background work");
            }
            sync(&mut self.pool);
        }
    }
}

/// What a Revert at `lsn` to the state as of `since` must make of these blocks.
fn reverted(
    now: &[(u64, u64, Option<Bytes>)],
    kept: &[(u64, u64, Option<Bytes>)],
    since: Lsn,
    lsn: Lsn,
) -> Vec<(u64, u64, Option<Bytes>)> {
    let content = |lba: u64| kept.get(lba as usize).and_then(|block| block.2.clone());
    let each = now.iter().map(|(lba, version, data)| match *version > since.0 {
        true => (*lba, lsn.0, content(*lba)),
        false => (*lba, *version, data.clone()),
    });
    each.collect()
}

#[test]
fn a_revert_changes_the_blocks_written_since_its_snapshot_and_gives_them_its_own_version() {
    for folded in [false, true] {
        let mut volume = Volume::new(options());
        volume.write(0, 20);
        volume.append(EntryKind::Trim, 5, 5);
        let since = volume.snapshot(KEPT);
        let kept = volume.blocks(ReadView::Live);
        volume.write(3, 4);
        volume.write(600, 9);
        volume.append(EntryKind::Trim, 15, 900);
        volume.append(EntryKind::Resize { blocks: BLOCKS + 500 }, 0, 0);
        volume.write(BLOCKS + 100, 4);
        if folded {
            volume.settle();
        }
        let now = volume.blocks(ReadView::Live);
        let before = Lsn(volume.lsn);
        let lsn = volume.revert(KEPT);
        let expected = reverted(&now, &kept, since, lsn);
        for step in 0..3 {
            assert_eq!(volume.blocks(ReadView::Live), expected, "step {step}, folded {folded}");
            let mut replica = volume.pool.replica(GUID).expect("it");
            assert_eq!(replica.state().volume_blocks, BLOCKS + 500, "it never shrinks");
            let (changed, _) = pull_all(&mut replica, ReadView::Live, before);
            let changed: Vec<_> = flat(&changed);
            let newer = expected.iter().filter(|block| block.1 > before.0).cloned();
            assert_eq!(changed, newer.collect::<Vec<_>>(), "what changed since, step {step}");
            assert_eq!(volume.blocks(ReadView::Snapshot(KEPT)), kept);
            match step {
                0 => volume.settle(),
                _ => {
                    let disk = volume.disk.clone();
                    volume.pool = Pool::open(disk, options()).expect("a pool");
                }
            }
        }
    }
}

#[test]
fn the_content_of_a_revert_outlives_its_snapshot_and_those_after_it_through_clean_up() {
    // The block that the Revert shows again is in no view between the two snapshots.
    let mut volume = Volume::new(options());
    for lba in (0..BLOCKS).step_by(20) {
        volume.write(lba, 20);
    }
    volume.snapshot(KEPT);
    let kept = volume.blocks(ReadView::Live);
    for lba in (0..BLOCKS).step_by(40) {
        volume.write(lba, 20);
    }
    let between = SnapshotId(8);
    volume.snapshot(between);
    volume.settle();
    volume.revert(KEPT);
    volume.settle();
    for id in [KEPT, between] {
        volume.append(EntryKind::DeleteSnapshot { id }, 0, 0);
    }
    volume.settle();
    // Most of each segment dies, so that the rest is moved.
    for _ in 0..6 {
        for lba in (8..BLOCKS).step_by(20) {
            volume.write(lba, 12);
        }
        volume.settle();
        volume.rest();
    }
    let held = volume.pool.replica_stats(GUID).expect("it").allocated_bytes;
    let first_writes = BLOCKS / 20 * 32 * BLOCK_SIZE as u64;
    assert!(held < 2 * first_writes, "{held} bytes: the segments of {first_writes} were kept");
    let now = volume.blocks(ReadView::Live);
    let same = |lba: usize| lba % 20 < 8;
    for (lba, block) in now.iter().enumerate().filter(|(lba, _)| same(*lba)) {
        assert_eq!(block.2, kept[lba].2, "block {lba}");
    }
}

#[test]
fn a_revert_that_is_cut_off_leaves_no_trace() {
    let mut volume = Volume::new(options());
    volume.write(0, 20);
    volume.snapshot(KEPT);
    volume.write(10, 20);
    volume.stable();
    let (before, chain) = (volume.blocks(ReadView::Live), volume.chain);
    let lsn = volume.revert(KEPT);
    assert_ne!(volume.blocks(ReadView::Live), before);
    volume.pool.replica(GUID).expect("it").truncate(Lsn(lsn.0 - 1)).expect("above stable");
    (volume.chain, volume.lsn) = (chain, lsn.0 - 1);
    assert_eq!(volume.blocks(ReadView::Live), before);
    volume.settle();
    assert_eq!(volume.blocks(ReadView::Live), before);
}

#[test]
fn reverts_that_are_too_many_above_the_map_wait_until_some_are_folded() {
    let mut volume = Volume::new(options());
    volume.write(0, 20);
    volume.snapshot(KEPT);
    let refused = (0..1000).find(|n| {
        volume.write(n % 20, 1);
        volume.try_append(EntryKind::Revert { id: KEPT }, 0, 0) == Err(StoreError::Full)
    });
    assert!(refused.is_some(), "each costs every read a lookup");
    volume.stable();
    volume.rest();
    let lsn = volume.revert(KEPT);
    let first = volume.blocks(ReadView::Live)[0].clone();
    assert!(first.1 <= lsn.0 && first.2 == Some(Bytes::from(vec![1; BLOCK_SIZE])));
}

/// A client that deletes a snapshot of a volume that it does not use wants its space all the same.
#[test]
fn a_deleted_snapshot_of_an_idle_replica_gives_its_space_back_by_itself() {
    let mut volume = Volume::new(options());
    let fill = |volume: &mut Volume| {
        for lba in (0..1000).step_by(20) {
            volume.write(lba, 20);
        }
    };
    fill(&mut volume);
    volume.snapshot(KEPT);
    fill(&mut volume);
    volume.settle();
    volume.rest();
    let free = |volume: &Volume| volume.pool.stats().free_bytes;
    let before = free(&volume);
    let lsn = volume.append(EntryKind::DeleteSnapshot { id: KEPT }, 0, 0);
    volume.rest();
    assert!(volume.pool.replica(GUID).expect("it").state().base < lsn, "it is not stable yet");
    volume.stable();
    volume.rest();
    assert!(volume.pool.replica(GUID).expect("it").state().base >= lsn);
    let gained = free(&volume).saturating_sub(before);
    assert!(gained >= 900 * BLOCK_SIZE as u64, "{gained} bytes became free");
}

#[test]
fn a_revert_of_an_idle_replica_is_folded_by_itself() {
    let mut volume = Volume::new(options());
    volume.write(0, 20);
    volume.snapshot(KEPT);
    volume.write(5, 5);
    let lsn = volume.revert(KEPT);
    volume.stable();
    volume.rest();
    assert!(volume.pool.replica(GUID).expect("it").state().base >= lsn);
}
