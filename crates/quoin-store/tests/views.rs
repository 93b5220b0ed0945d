//! The log above the folded map answers for every view of a replica as a plain list of blocks
//! does: through long trims, snapshots that are not folded, Reverts, truncations and folds.

use std::sync::Arc;

use crate::common::{identity, new_pool_with, short_steps, sync};
use bytes::Bytes;
use proptest::prelude::*;
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore};
use quoin_store::{Due, MemoryDisk, Pool, ReplicaPool};
use quoin_types::message::{Content, ReadView};
use quoin_types::{
    BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, SnapshotId,
};

const GUID: ReplicaGuid = ReplicaGuid(0x7e);
/// More than 256 leaves, so that the log's tree has three levels.
const BLOCKS: u64 = 70_000;

/// Version of each block, negative for a hole.
type Versions = Arc<Vec<i64>>;

#[derive(Clone)]
struct State {
    live: Versions,
    snapshots: Vec<(SnapshotId, Versions, i64)>,
    chain: Chain,
}

/// A replica beside the state after each of its entries.
struct World {
    pool: Pool<MemoryDisk>,
    states: Vec<State>,
    stable: usize,
    epoch: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u32),
    Trim(u64, u32),
    Snapshot,
    DeleteSnapshot(usize),
    Revert(usize),
    /// Cuts so many entries off, as far as they are not stable.
    Truncate(usize),
    Stable,
    /// Steps of background work.
    Work(u8),
    Fold,
    /// Reads a stretch of every view.
    Read(u64, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = || prop_oneof![0u64..600, 0..BLOCKS];
    let length = || prop_oneof![4 => 1u32..40, 1 => 200u32..600];
    let long = prop_oneof![2 => length(), 1 => 1u32..BLOCKS as u32];
    let step = prop_oneof![
        8 => (at(), length().prop_map(|n| n.min(28))).prop_map(|(at, n)| Step::Write(at, n)),
        4 => (at(), long).prop_map(|(at, n)| Step::Trim(at, n)),
        3 => Just(Step::Snapshot),
        1 => (0usize..8).prop_map(Step::DeleteSnapshot),
        1 => (0usize..8).prop_map(Step::Revert),
        2 => (0usize..12).prop_map(Step::Truncate),
        2 => Just(Step::Stable),
        2 => (1u8..6).prop_map(Step::Work),
        1 => Just(Step::Fold),
        4 => (at(), 1u64..700).prop_map(|(at, n)| Step::Read(at, n)),
    ];
    prop::collection::vec(step, 1..50)
}

impl World {
    fn new() -> Self {
        let (_, mut pool) = new_pool_with(64 << 20, short_steps());
        pool.create(identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room");
        let live = Arc::new(vec![0; BLOCKS as usize]);
        let state = State { live, snapshots: Vec::new(), chain: Chain(0) };
        World { pool, states: vec![state], stable: 0, epoch: 1 }
    }

    fn state(&self) -> &State {
        self.states.last().expect("the empty one is there")
    }

    fn append(&mut self, kind: EntryKind, lba: u64, blocks: u32) {
        let lsn = self.states.len() as u64;
        let mut state = self.state().clone();
        let blocks = u64::from(blocks).min(BLOCKS - lba) as u32;
        let range = lba as usize..lba as usize + blocks as usize;
        let mut data = Bytes::new();
        match &kind {
            EntryKind::Write => {
                data = Bytes::from(vec![lsn as u8; blocks as usize * BLOCK_SIZE]);
                Arc::make_mut(&mut state.live)[range].fill(lsn as i64);
            }
            EntryKind::Trim => Arc::make_mut(&mut state.live)[range].fill(-(lsn as i64)),
            EntryKind::Snapshot { id, .. } => {
                state.snapshots.push((*id, state.live.clone(), lsn as i64));
            }
            EntryKind::DeleteSnapshot { id } => state.snapshots.retain(|(other, ..)| other != id),
            EntryKind::Revert { id } => {
                let found = state.snapshots.iter().find(|(other, ..)| other == id);
                let (_, kept, since) = found.expect("it is listed").clone();
                let live = Arc::make_mut(&mut state.live).iter_mut();
                for (block, kept) in live.zip(kept.iter()).filter(|(b, _)| b.abs() > since) {
                    *block = if *kept > 0 { lsn as i64 } else { -(lsn as i64) };
                }
            }
            _ => unreachable!("not made here"),
        }
        let position = Position { epoch: Epoch(self.epoch), lsn: Lsn(lsn) };
        let entry = Entry::after(state.chain, position, kind, lba, blocks, data, false);
        state.chain = entry.chain;
        let mut replica = self.pool.replica(GUID).expect("the replica");
        replica.append(&[Arc::new(entry)]).expect("room");
        self.states.push(state);
    }

    fn snapshot(&self, number: usize) -> Option<SnapshotId> {
        let snapshots = &self.state().snapshots;
        Some(snapshots.get(number % snapshots.len().max(1))?.0)
    }

    fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            if self.pool.background_due() > Due::Idle {
                self.pool.background(1).expect("background work");
            }
            sync(&mut self.pool);
        }
    }

    fn check(&mut self, lba: u64, blocks: u64) {
        let state = self.state().clone();
        let blocks = blocks.min(BLOCKS - lba);
        let snapshots = state.snapshots.iter().map(|(id, held, _)| (ReadView::Snapshot(*id), held));
        // Twice in turn: a view is found again after others were read.
        let views: Vec<_> = snapshots.chain([(ReadView::Live, &state.live)]).collect();
        for (view, held) in views.iter().chain(&views) {
            let mut slots = Vec::new();
            let mut replica = self.pool.replica(GUID).expect("the replica");
            replica.read(*view, lba, blocks as u32, false, &mut slots).expect("a read");
            let mut at = lba as usize;
            for slot in slots {
                for _ in 0..slot.blocks {
                    let version = slot.version.0 as i64;
                    let found = match slot.content {
                        Content::Hole => -version,
                        Content::Data { .. } => version,
                        Content::Bad => panic!("a bad block at {at}"),
                    };
                    assert_eq!(found, held[at], "block {at} of {view:?}");
                    at += 1;
                }
            }
            assert_eq!(at as u64, lba + blocks);
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Write(lba, blocks) => self.append(EntryKind::Write, *lba, *blocks),
            Step::Trim(lba, blocks) => self.append(EntryKind::Trim, *lba, *blocks),
            Step::Snapshot => {
                // One that is cut off never comes back under its id.
                let id = SnapshotId(u128::from(self.epoch) << 64 | self.states.len() as u128);
                self.append(EntryKind::Snapshot { id, hidden: false }, 0, 0);
            }
            Step::DeleteSnapshot(number) => {
                if let Some(id) = self.snapshot(*number) {
                    self.append(EntryKind::DeleteSnapshot { id }, 0, 0);
                }
            }
            Step::Revert(number) => {
                if let Some(id) = self.snapshot(*number) {
                    self.append(EntryKind::Revert { id }, 0, 0);
                }
            }
            Step::Truncate(count) => {
                let keep = (self.states.len() - 1).saturating_sub(*count).max(self.stable);
                let mut replica = self.pool.replica(GUID).expect("the replica");
                replica.truncate(Lsn(keep as u64)).expect("above stable");
                self.states.truncate(keep + 1);
                self.epoch += 1;
            }
            Step::Stable => {
                self.stable = self.states.len() - 1;
                let mut replica = self.pool.replica(GUID).expect("the replica");
                replica.set_stable(Lsn(self.stable as u64));
            }
            Step::Work(steps) => self.work((*steps).into()),
            Step::Fold => self.pool.settle().expect("folded and recorded"),
            Step::Read(lba, blocks) => self.check(*lba, *blocks),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn every_view_shows_the_newest_entry_of_its_history_in_every_block(steps in steps()) {
        let mut world = World::new();
        steps.iter().for_each(|step| world.step(step));
        for lba in (0..BLOCKS).step_by(5000) {
            world.check(lba, 5000);
        }
    }
}
