//! Background work of a pool: which replica folds, which segment is emptied, when states are
//! recorded, and the scrub.
//!
//! Policy: segments that are all but empty are emptied at once, so that trimmed space comes back
//! soon; others only when free space is short, by benefit (space gained times age, over the cost
//! of gaining it): under a uniform load that is as good as the emptiest first, under a skewed one
//! far better. The table of the clean-up simulation is in `docs/store.md`.

use quoin_core::replica::store::StoreError;
use quoin_core::{Lsn, ReplicaGuid};

use crate::api::Due;
use crate::core::BadBlock;
use crate::disk::Disk;
use crate::node::LEAF_BLOCKS;
use crate::pool::{Pool, STEP_BYTES};
use crate::records::SegmentState;
use crate::replica::Source;
use crate::tree;

/// Live percent up to which a segment is emptied though space is plenty.
const EAGER_LIVE_PERCENT: u64 = 10;
/// Live percent from which emptying a segment is not worth it even when space is short.
const HOPELESS_LIVE_PERCENT: u64 = 96;
/// Free percent of the pool (above the reserve) at which cleaning begins, and becomes urgent.
const CLEAN_BELOW_PERCENT: u32 = 15;
const URGENT_BELOW_PERCENT: u32 = 4;
/// Emptied segments that wait for a commit.
const LIMBO_MAX: usize = 8;

impl<D: Disk> Pool<D> {
    fn free_percent(&self) -> u32 {
        let allocator = &self.core.allocator;
        let coming: u32 = self.core.freeing.iter().map(|(_, _, units)| *units).sum();
        let limbo = |r: &crate::replica::Replica| -> u32 {
            let waiting = r.commit.iter().flat_map(|c| &c.frees);
            r.limbo.iter().chain(waiting).map(|(_, units)| *units).sum()
        };
        let coming = coming + self.replicas.values().map(limbo).sum::<u32>();
        let free = allocator.free_for_clients() + coming;
        (u64::from(free) * 100 / u64::from(allocator.units().max(1))) as u32
    }

    fn log_bytes(&self) -> u64 {
        self.replicas.values().map(|r| r.log.bytes).sum()
    }

    pub(crate) fn due(&self) -> Due {
        if self.core.failed.is_some() {
            return Due::Idle;
        }
        let log = self.log_bytes();
        let limit = self.core.options.checkpoint_bytes;
        let allocator = &self.core.allocator;
        let usable = allocator.free_for_clients() * 100 / allocator.units().max(1);
        let in_work = self.replicas.values().any(|r| {
            r.checkpoint.is_some()
                || r.clean.is_some()
                || r.recount
                || r.recount_job.is_some()
                || (r.dirty && r.commit.is_none())
        });
        match () {
            _ if usable < URGENT_BELOW_PERCENT && self.can_gain() => Due::Urgent,
            _ if log > 2 * limit => Due::Urgent,
            _ if log > limit || (self.free_percent() < CLEAN_BELOW_PERCENT && self.can_gain()) => {
                Due::Soon
            }
            _ if in_work || self.best_victim(false).is_some() => Due::Relaxed,
            _ => Due::Idle,
        }
    }

    fn can_gain(&self) -> bool {
        let foldable = |r: &crate::replica::Replica| r.stable.0 >= r.log.first_lsn();
        self.best_victim(true).is_some() || self.replicas.values().any(foldable)
    }

    /// The segment to empty next.
    fn best_victim(&self, short: bool) -> Option<(ReplicaGuid, SegmentState)> {
        let unit_bytes =
            u64::from(self.core.superblock.unit_blocks) * quoin_core::BLOCK_SIZE as u64;
        let limit = if short { HOPELESS_LIVE_PERCENT } else { EAGER_LIVE_PERCENT };
        let newest = self.core.sequence;
        self.replicas
            .iter()
            .flat_map(|(guid, r)| r.victims().map(move |s| (*guid, s)))
            .map(|(guid, s)| {
                let live = (s.live_bytes * 100 / (u64::from(s.units) * unit_bytes)).min(100);
                let age = newest.saturating_sub(s.sequence).clamp(1, 1 << 40);
                (live, (100 - live) * age / (100 + live), guid, s)
            })
            .filter(|(live, ..)| *live <= limit)
            .max_by_key(|(_, benefit, _, s)| (*benefit, std::cmp::Reverse(s.unit)))
            .map(|(_, _, guid, s)| (guid, s))
    }

    pub(crate) fn work(&mut self, budget_bytes: u64) -> Result<bool, StoreError> {
        self.core.check_usable()?;
        let mut left = budget_bytes.max(1) as i64;
        while left > 0 {
            if !self.step()? {
                return Ok(false);
            }
            left -= STEP_BYTES as i64;
        }
        Ok(self.due() > Due::Idle)
    }

    /// One step of whatever is most useful; false if nothing can be done now.
    fn step(&mut self) -> Result<bool, StoreError> {
        let core = &mut self.core;
        // What was begun is finished first.
        for replica in self.replicas.values_mut() {
            if replica.checkpoint.is_some() {
                replica.step_checkpoint(core)?;
                return Ok(true);
            }
            if replica.clean.is_some() {
                replica.step_clean(core)?;
                return Ok(true);
            }
            if replica.recount_job.is_some() {
                replica.step_recount(core)?;
                return Ok(true);
            }
        }
        let short = self.free_percent() < CLEAN_BELOW_PERCENT;
        for replica in self.replicas.values_mut() {
            let much = replica.limbo.len() >= LIMBO_MAX;
            if much && replica.commit.is_none() && !replica.is_prepared() {
                replica.begin_commit(&mut self.core)?;
                return Ok(true);
            }
        }
        if self.log_bytes() > self.core.options.checkpoint_bytes || short {
            let keep = if short { 0 } else { self.core.options.log_keep_bytes };
            let foldable = |r: &crate::replica::Replica| {
                r.stable.0.min(r.log.lsn_before_last(keep)) >= r.log.first_lsn()
            };
            let largest = self
                .replicas
                .values_mut()
                .filter(|r| foldable(r) && !r.is_prepared())
                .max_by_key(|r| (r.log.bytes, std::cmp::Reverse(r.identity.guid)));
            if let Some(replica) = largest
                && (!short || replica.log.bytes > 0)
            {
                replica.begin_checkpoint(keep);
                return Ok(true);
            }
        }
        if let Some((guid, segment)) = self.best_victim(short)
            && let Some(replica) = self.replicas.get_mut(&guid)
        {
            if !replica.begin_clean(&mut self.core, segment)? {
                replica.unreadable.insert(segment.unit);
            }
            return Ok(true);
        }
        for replica in self.replicas.values_mut() {
            if replica.dirty && replica.commit.is_none() && !replica.is_prepared() {
                replica.begin_commit(&mut self.core)?;
                return Ok(true);
            }
            if replica.recount {
                replica.begin_recount(&self.core);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads about `budget_bytes` of what the replica's live view and snapshots hold, and
    /// compares checksums; bad blocks come with [`Pool::take_bad_blocks`]. `None`: the end;
    /// otherwise where to go on. Start with `(0, 0)`.
    pub fn scrub(
        &mut self,
        guid: ReplicaGuid,
        at: (usize, u64),
        budget_bytes: u64,
    ) -> Result<Option<(usize, u64)>, StoreError> {
        let Some(replica) = self.replicas.get_mut(&guid) else { return Ok(None) };
        let core = &mut self.core;
        let (mut view, mut cursor) = at;
        let mut left = budget_bytes.max(1) as i64;
        while left > 0 {
            // Snapshots in order, then the folded map; each only above the one before.
            let snapshots = &replica.folded.snapshots;
            let root = match snapshots.get(view) {
                Some(snapshot) => snapshot.root,
                None if view == snapshots.len() => replica.folded.root,
                None => return Ok(None),
            };
            let from =
                view.checked_sub(1).and_then(|v| snapshots.get(v)).map_or(0, |s| s.info.lsn.0);
            let part = tree::next_part(&mut replica.io(core), root, from, cursor)?;
            let Some(part) = part else {
                (view, cursor) = (view + 1, 0);
                continue;
            };
            let (start, end) = part.range();
            cursor = end;
            left -= 4096;
            match part {
                tree::Part::Hole { .. } => {}
                tree::Part::Damaged { newest, .. } => {
                    core.note_bad(BadBlock { replica: guid, lba: start, version: Lsn(newest) })
                }
                tree::Part::Leaf { .. } => {
                    replica.find(core, &Source::Root(root), start, LEAF_BLOCKS as u32)?;
                    let mut slots = Vec::new();
                    // Blocks of older views are skipped by their version.
                    replica.slots(core, start, Lsn(from), true, &mut slots);
                    left -= slots.len() as i64 * 4096;
                }
            }
        }
        Ok(Some((view, cursor)))
    }

    /// Writes everything that is foldable and recorded in one go: for a clean shutdown, so that
    /// the next start has nothing to replay. Syncs on this thread.
    pub fn settle(&mut self) -> Result<(), StoreError> {
        for replica in self.replicas.values_mut() {
            if !replica.is_prepared() {
                replica.checkpoint_now(&mut self.core, replica.stable.0)?;
            }
        }
        // Nodes, then the record, then what it frees.
        for _ in 0..3 {
            for replica in self.replicas.values_mut() {
                if replica.dirty && !replica.is_prepared() {
                    replica.begin_commit(&mut self.core)?;
                }
            }
            self.core.tickets.request();
            use crate::api::ReplicaPool;
            if let Some(ticket) = self.sync_wanted() {
                let result = self.core.disk.sync();
                self.sync_finished(ticket, result);
                self.core.check_usable()?;
            }
        }
        Ok(())
    }
}

impl crate::replica::Replica {
    /// Whether an increment waits for its flip: its maps must not change until then.
    pub fn is_prepared(&self) -> bool {
        self.shadow.as_ref().is_some_and(|s| s.prepared.is_some())
    }
}
