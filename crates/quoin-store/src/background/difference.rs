//! Counting what a view that went away leaves dead, by what it differs in.
//!
//! Each version of a block is live as long as some view shows it, and views show it without a gap:
//! from the first one that is as new as the version to the last one before the block changed. So what
//! dies with a view is newer than the view before it and not in the view behind it. The map of the
//! view is walked where it has such versions, and compared with the map of the view behind it. Nodes
//! that both have are not read. The cost follows what changed between the three, never the size of
//! the map.
//!
//! Until it was counted a view that went away **is leaving**: clean-up keeps its nodes and blocks, and
//! what the live map gives up of it stays counted. From the front of the queue one view at a time is
//! counted in steps, and below the cursor it is no view any more. A start after a crash knows nothing
//! of it, so the counters are recorded as too high, and it counts all views
//! ([`crate::background::recount`]). So does a replica that is fed by a rebuild, and one of whose
//! nodes cannot be read.

use std::collections::VecDeque;

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, mutant};

use crate::background::recount;
use crate::core::{Core, Kept};
use crate::disk::Disk;
use crate::format::node::{Child, LEAF_BLOCKS, Leaf, Node, NodeRef, Root};
use crate::map::tree::{self, Difference, Nodes};
use crate::replica::Replica;

/// A view that went away.
#[derive(Clone, Copy, Debug)]
pub struct LeavingView {
    pub root: Root,
    /// No version of it is newer.
    pub lsn: u64,
    /// LBA up to which it was counted: below it is no view any more.
    pub cursor: u64,
}

impl LeavingView {
    pub fn new(root: Root, lsn: u64) -> Self {
        LeavingView { root, lsn, cursor: 0 }
    }
}

/// Views that went away and count still, in the order of their going.
#[derive(Default)]
pub struct LeavingViews(VecDeque<LeavingView>);

impl LeavingViews {
    pub fn add(&mut self, views: impl IntoIterator<Item = LeavingView>) {
        self.0.extend(views);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &LeavingView> {
        self.0.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut LeavingView> {
        self.0.iter_mut()
    }

    /// Blocks and nodes that they keep beside other views, which keep all versions up to `through`.
    pub fn kept(&self, through: u64) -> Kept {
        if mutant::is("leaving-view-keeps-nothing") {
            return Kept { through, ..Kept::default() };
        }
        let whole = self.0.iter().skip(1).map(|view| view.lsn);
        let through = whole.fold(through, u64::max);
        Kept { through, leaving: self.0.front().map(|view| (view.lsn, view.cursor)) }
    }
}

/// A view that is leaving, and those it is compared with.
struct Compared {
    view: LeavingView,
    /// The newest version that the view before it can hold.
    from: u64,
    /// The map of the view behind it.
    later: Root,
}

/// Result of one step of the comparison.
enum Counted {
    Part,
    All,
    /// A node of one of the maps cannot be read.
    Unknown,
}

/// Returns true if a view that went away can be counted now: not beside a fold, whose map is not in
/// place yet, and not where all views are to be counted.
pub fn is_due(replica: &Replica) -> bool {
    let work = &replica.maintenance;
    !work.count.leaving.is_empty() && work.checkpoint.is_none() && !recount::is_due(replica)
}

/// Counts on what the views that went away leave dead.
pub fn step<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    if replica.shadow.is_some() {
        // It shows versions out of the order of the views.
        replica.maintenance.count.request();
        return Ok(());
    }
    let Some(mut compared) = compared(replica, core) else { return Ok(()) };
    for _ in 0..core.options.step_nodes.max(1) {
        match count_difference(replica, core, &mut compared)? {
            Counted::Part => {}
            Counted::All => {
                replica.maintenance.count.leaving.0.pop_front();
                replica.map_changed(core);
                // The record says until then that a start has to count all.
                replica.maintenance.dirty |= replica.maintenance.count.leaving.is_empty();
                return Ok(());
            }
            Counted::Unknown => {
                replica.maintenance.count.request();
                return Ok(());
            }
        }
        if let Some(front) = replica.maintenance.count.leaving.0.front_mut() {
            front.cursor = compared.view.cursor;
        }
    }
    Ok(())
}

/// Looks at the nodes that the next step reads.
pub fn look_ahead<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let Some(Compared { view, from, later }) = compared(replica, core) else { return Ok(()) };
    let (mut io, mut lacking, mut cursor) = (replica.io(core), Ok(()), view.cursor);
    for _ in 0..io.core.options.step_nodes.max(1) {
        let found = tree::next_difference(&mut io, view.root, later, from, cursor)?;
        let Some(Difference::Leaf { start, node, later, .. }) = found else { break };
        cursor = start + LEAF_BLOCKS as u64;
        lacking = lacking.and(io.load(0, &node).map(drop));
        if let Child::Node(later) = later {
            lacking = lacking.and(io.load(0, &later).map(drop));
        }
    }
    lacking
}

fn compared<D: Disk>(replica: &Replica, core: &Core<D>) -> Option<Compared> {
    let leaving = &replica.maintenance.count.leaving.0;
    let view = *leaving.front()?;
    let mut views: Vec<(u64, Root)> =
        replica.folded.snapshots.iter().map(|s| (s.info.lsn.0, s.root)).collect();
    views.extend(core.bases.of(replica.identity.guid).map(|(_, base)| (base.lsn, base.root)));
    views.extend(leaving.iter().skip(1).map(|other| (other.lsn, other.root)));
    let before = views.iter().map(|(lsn, _)| *lsn).filter(|lsn| *lsn < view.lsn);
    let from = before.max().unwrap_or(0);
    let behind = views.iter().filter(|(lsn, _)| *lsn >= view.lsn);
    let behind = behind.min_by_key(|(lsn, _)| *lsn);
    let later = behind.map_or(replica.folded.root, |(_, root)| *root);
    Some(Compared { view, from, later })
}

/// Counts the next leaf in which the view differs from the one behind it.
fn count_difference<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    compared: &mut Compared,
) -> Result<Counted, StoreError> {
    let Compared { view, from, later } = compared;
    let mut io = replica.io(core);
    let found = tree::next_difference(&mut io, view.root, *later, *from, view.cursor)?;
    let (above, start, node, later) = match found {
        None => return Ok(Counted::All),
        Some(Difference::Damaged) => return Ok(Counted::Unknown),
        Some(Difference::Leaf { above, start, node, later }) => (above, start, node, later),
    };
    let Some(own) = io.load(0, &node)? else { return Ok(Counted::Unknown) };
    let loaded = match later {
        Child::Node(later) if later.is_possible() => match io.load(0, &later)? {
            None => return Ok(Counted::Unknown),
            loaded => loaded,
        },
        _ => None,
    };
    let later = loaded.as_deref();
    if let Node::Leaf(own) = &*own {
        for place in dead_blocks(own, later, *from) {
            replica.family.sub_live(core, place, BLOCK_SIZE as u64);
        }
    }
    for NodeRef { place, length, .. } in above.iter().chain([&node]) {
        replica.family.sub_live(core, place / BLOCK_SIZE as u64, u64::from(*length));
    }
    view.cursor = start + LEAF_BLOCKS as u64;
    Ok(Counted::Part)
}

/// Places of the blocks of a leaf that are newer than `from` and that a later leaf does not have. A
/// block that was mended in one of the two has a copy in each.
fn dead_blocks(own: &Leaf, later: Option<&Node>, from: u64) -> impl Iterator<Item = u64> {
    let later = match later {
        Some(Node::Leaf(leaf)) if !mutant::is("difference-without-the-view-behind") => Some(leaf),
        _ => None,
    };
    let blocks = own.blocks.iter().enumerate();
    let dead = blocks.filter(move |(i, block)| {
        let is_shown = later.is_some_and(|leaf| leaf.blocks[*i] == **block);
        block.place != 0 && block.version > from && !is_shown
    });
    dead.map(|(_, block)| block.place)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
    use quoin_types::{Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, SnapshotId};

    use super::*;
    use crate::format::batch::Stream;
    use crate::format::checkpoint::SegmentState;
    use crate::format::node::FANOUT;
    use crate::{Due, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

    struct Volume {
        disk: MemoryDisk,
        pool: Pool<MemoryDisk>,
        chain: Chain,
        lsn: u64,
    }

    impl Volume {
        fn new(pool_bytes: u64, blocks: u64) -> Self {
            let disk = MemoryDisk::new(pool_bytes);
            let format = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(1)) };
            Pool::format(&disk, &format).expect("a fit disk");
            let mut pool = Pool::open(disk.clone(), Self::options()).expect("a fresh pool");
            pool.create(ReplicaIdentity::default(), ReplicaMeta::default(), blocks).expect("room");
            Volume { disk, pool, chain: Chain(0), lsn: 0 }
        }

        fn options() -> PoolOptions {
            PoolOptions {
                step_nodes: 1,
                cache_bytes: 1 << 20,
                log_keep_bytes: 64 << 10,
                checkpoint_bytes: 256 << 10,
                ..PoolOptions::default()
            }
        }

        fn append(&mut self, kind: EntryKind, lba: u64, blocks: u32) {
            self.lsn += 1;
            let is_write = matches!(kind, EntryKind::Write);
            let data =
                vec![self.lsn as u8; if is_write { blocks as usize * BLOCK_SIZE } else { 0 }];
            let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn) };
            let data = Bytes::from(data);
            let entry =
                Arc::new(Entry::after(self.chain, position, kind, lba, blocks, data, false));
            self.chain = entry.chain;
            let mut replica = self.pool.replica(ReplicaIdentity::default().guid).expect("it");
            replica.append(&[entry]).expect("room");
            replica.set_stable(Lsn(self.lsn));
        }

        fn rest(&mut self) {
            self.pool.settle().expect("folded and recorded");
            while self.pool.background_due() != Due::Idle || self.pool.sync_wanted().is_some() {
                self.pool.background(1).expect("background work");
                if let Some(ticket) = self.pool.sync_wanted() {
                    let result = self.disk.sync();
                    self.pool.sync_finished(ticket, result).expect("a sync");
                }
            }
        }

        fn it(&mut self) -> &mut Replica {
            self.pool.touch_all();
            self.pool.replicas.get_mut(&ReplicaIdentity::default().guid).expect("it")
        }

        /// Live bytes of blocks, and of nodes.
        fn counters(&mut self) -> (u64, u64) {
            let segments = self.it().family.segments.iter();
            let (nodes, blocks): (Vec<_>, Vec<_>) =
                segments.partition(|state| state.stream == Stream::Nodes);
            let sum = |of: Vec<SegmentState>| of.iter().map(|state| state.live_bytes).sum();
            (sum(blocks), sum(nodes))
        }
    }

    /// The map has 2,000 leaves, of which 20 differ from the snapshot before and 20 from the live map.
    #[test]
    fn a_deleted_snapshot_costs_reads_in_proportion_to_what_it_differs_in() {
        const LEAVES: u64 = 2000;
        const DIFFERENT: u64 = 20;
        let mut volume = Volume::new(64 << 20, LEAVES * LEAF_BLOCKS as u64);
        let each_of =
            |count: u64| (0..count).map(move |i| i * (LEAVES / count) * LEAF_BLOCKS as u64);
        each_of(LEAVES).for_each(|lba| volume.append(EntryKind::Write, lba, 1));
        for id in [1, 2].map(SnapshotId) {
            volume.append(EntryKind::Snapshot { id, hidden: false }, 0, 0);
            each_of(DIFFERENT).for_each(|lba| volume.append(EntryKind::Write, lba, 1));
        }
        volume.rest();
        // Nothing is in a cache.
        volume.pool = Pool::open(volume.disk.clone(), Volume::options()).expect("a sound pool");
        volume.rest();
        let (blocks, nodes) = volume.counters();
        volume.append(EntryKind::DeleteSnapshot { id: SnapshotId(2) }, 0, 0);
        volume.pool.settle().expect("folded and recorded");
        let before = volume.disk.reads();
        volume.pool.touch_all();
        let replica = volume.pool.replicas.get_mut(&ReplicaIdentity::default().guid).expect("it");
        while !replica.maintenance.count.leaving.is_empty() {
            step(replica, &mut volume.pool.core).expect("a step");
        }
        let reads = volume.disk.reads() - before;
        // The leaves are spread over all nodes of the level above, and there is one more above those.
        let different = DIFFERENT + LEAVES.div_ceil(FANOUT as u64) + 1;
        assert!(reads <= 3 * different, "{reads} reads for {different} nodes");
        let (left_blocks, left_nodes) = volume.counters();
        assert_eq!(blocks - left_blocks, DIFFERENT * BLOCK_SIZE as u64);
        assert!(left_nodes < nodes, "{left_nodes} of {nodes}");
    }
}
