//! What dies with a view that a fold deletes is taken off the counters of the segments.
//!
//! That is what the view before it does not have yet and the view behind it has no more. Only the
//! nodes in which the view differs from the one behind it are looked at, a bounded number in a step:
//! the cost follows what changed, never the size of the map.

use quoin_replication::replica::store::StoreError;
use quoin_types::{EntryKind, mutant};

use crate::background::checkpoint::CheckpointJob;
use crate::core::Core;
use crate::disk::Disk;
use crate::format::node::{BAD_PLACE, BlockAt, LEAF_BLOCKS, Node, Root};
use crate::map::tree::{self, Difference, Nodes};
use crate::replica::{Replica, may_lack};

/// A view that an entry deletes, between its neighbours.
struct Deleted {
    /// Newest version that the view before it can hold.
    from: u64,
    /// The maps of the view and of the one behind it.
    views: [Root; 2],
}

impl CheckpointJob {
    fn deleted(&self, kind: &EntryKind) -> Option<Deleted> {
        let EntryKind::DeleteSnapshot { id } = kind else { return None };
        let snapshots = &self.work.snapshots;
        let at = snapshots.iter().position(|s| s.info.id == *id)?;
        let from = at.checked_sub(1).map_or(0, |before| snapshots[before].info.lsn.0);
        let behind = snapshots.get(at + 1).map_or(self.work.root, |s| s.root);
        Some(Deleted { from, views: [snapshots[at].root, behind] })
    }
}

impl Replica {
    fn deleted_by(&self, job: &CheckpointJob, lsn: u64) -> Option<Deleted> {
        job.deleted(&self.log.kind(lsn, self.log.get(lsn)?))
    }

    /// Counts some of what goes with the view that the entry at `lsn` deletes, if it deletes one.
    /// True once all of that is done.
    pub(super) fn count_what_goes<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        job: &mut CheckpointJob,
        lsn: u64,
    ) -> Result<bool, StoreError> {
        let Some(Deleted { from, views }) = self.deleted_by(job, lsn) else { return Ok(true) };
        if mutant::is("deleted-views-not-counted") {
            return Ok(true);
        }
        let mut left = core.options.step_nodes.max(1);
        let mut io = self.io(core);
        // Clones may show it still.
        io.kept_through = from.max(io.family.relatives.kept_through);
        let (mut is_unread, mut is_done) = (false, false);
        while left > 0 {
            let (mut above, cursor) = (Vec::new(), job.deleted_cursor);
            let found = tree::next_difference(&mut io, views, from, cursor, &mut left, &mut above)?;
            for (level, start, node) in above {
                io.node_replaced(level, start, &node);
            }
            let (start, node) = match found {
                Some(Difference::Leaf { start, node }) => (start, node),
                Some(Difference::Stopped(at)) => {
                    job.deleted_cursor = at;
                    break;
                }
                None => {
                    is_done = true;
                    break;
                }
            };
            job.deleted_cursor = start + LEAF_BLOCKS as u64;
            let loaded = io.load(0, &node)?;
            io.node_replaced(0, start, &node);
            let Some(Node::Leaf(leaf)) = loaded.as_deref() else {
                is_unread = true;
                continue;
            };
            let mut beside = [BlockAt::default(); LEAF_BLOCKS];
            tree::blocks(&mut io, views[1], start, &mut beside)?;
            is_unread |= beside.iter().any(|block| block.place == BAD_PLACE);
            for (lba, (block, beside)) in (start..).zip(leaf.blocks.iter().zip(&beside)) {
                // What a Revert brought back counts for each version that it has.
                let stays = (block.place, block.version) == (beside.place, beside.version);
                if block.place != 0 && !stays {
                    io.replaced(lba, block.place, block.version);
                }
            }
        }
        // The two views do not tell everything then.
        if is_unread || self.count.job.is_some() {
            self.count.request();
        }
        Ok(is_done)
    }

    /// Looks at what the next step of [`Replica::count_what_goes`] reads.
    pub(super) fn look_ahead_of_what_goes<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        job: &CheckpointJob,
        lsn: u64,
    ) -> Result<(), StoreError> {
        let Some(Deleted { from, views }) = self.deleted_by(job, lsn) else { return Ok(()) };
        let (mut left, mut cursor) = (core.options.step_nodes.max(1), job.deleted_cursor);
        let (mut io, mut lacking) = (self.io(core), Ok(()));
        while left > 0 {
            let above = &mut Vec::new();
            let found = tree::next_difference(&mut io, views, from, cursor, &mut left, above);
            let Some(Difference::Leaf { start, .. }) = found? else { break };
            cursor = start + LEAF_BLOCKS as u64;
            for view in views {
                let mut blocks = [BlockAt::default(); LEAF_BLOCKS];
                let looked = io.blocks(view, start, &mut blocks);
                lacking = lacking.and(may_lack(looked)?);
            }
        }
        lacking
    }
}
