//! Looks ahead of background work, so that a step of it finds at hand what it reads.
//!
//! Before a step is done, what it is going to read is looked up, and nothing is changed. What the
//! disk does not have at hand is fetched, all of it at once, and meanwhile the pool has no
//! background work. Then the step is chosen again: it is another one if something more useful has
//! come, and it is done once nothing is lacking. A node that left the caches in between is read
//! by the step itself.

use quoin_replication::replica::store::{FetchTicket, StoreError};
use quoin_types::{BLOCK_SIZE, ReplicaGuid};

use crate::background::scheduler::Step;
use crate::core::Core;
use crate::disk::Disk;
use crate::disk::fetch::Owner;
use crate::format::batch::{Batch, header_blocks};
use crate::format::checkpoint::SegmentState;
use crate::pool::Pool;
use crate::replica::Replica;

/// Looks for one step: each may find a level of the map that is not in memory. A step that lacks
/// something still is done as it is, since caches may have no room for all that it needs.
const LOOKS_MAX: u8 = 16;
/// Blocks that are read together in search of headers.
const PIECE_BLOCKS: u32 = 16;

/// What background work waits for.
#[derive(Default)]
pub struct LookAhead {
    waits_for: Option<FetchTicket>,
    /// Looks that lacked something, one after the other.
    looks: u8,
}

/// How far the headers of a segment were looked at before it is emptied.
#[derive(Clone, Copy, Default)]
pub struct HeadersRead {
    sequence: u64,
    /// The first block that was not looked at.
    at: u32,
}

impl<D: Disk> Pool<D> {
    /// Whether the next step waits for the disk.
    pub(crate) fn waits_for_disk(&self) -> bool {
        self.look_ahead.waits_for.is_some_and(|ticket| self.core.fetches.waits(ticket))
    }

    /// Looks ahead of a step; true if it has to wait for the disk.
    pub(crate) fn lacks(&mut self, guid: ReplicaGuid, step: &Step) -> bool {
        let looks = std::mem::take(&mut self.look_ahead).looks;
        if looks >= LOOKS_MAX || !self.core.disk.may_lack() {
            return false;
        }
        let Some(replica) = self.replicas.get_mut(&guid) else { return false };
        self.core.fetches.begin(Owner::Background(guid));
        // Whatever else is wrong with it the step itself comes to.
        let _ = replica.look_ahead(&mut self.core, step);
        let waits_for = self.core.fetches.end();
        if waits_for.is_some() {
            self.look_ahead = LookAhead { waits_for, looks: looks + 1 };
        }
        waits_for.is_some()
    }
}

impl Replica {
    fn look_ahead<D: Disk>(&mut self, core: &mut Core<D>, step: &Step) -> Result<(), StoreError> {
        match step {
            Step::Release | Step::Discard | Step::Fold(..) => Ok(()),
            Step::GoOn(_) if self.maintenance.checkpoint.is_some() => self.look_ahead_of_fold(core),
            Step::GoOn(_) => {
                self.look_ahead_of_merge(core)?;
                self.look_ahead_of_moves(core)
            }
            Step::Commit(_) => self.look_ahead_of_merge(core),
            Step::Empty(_, segment) => {
                self.look_ahead_of_merge(core)?;
                self.look_ahead_of_headers(core, segment)
            }
            Step::Difference(_) => self.look_ahead_of_difference(core),
            Step::Recount(_) => self.look_ahead_of_count(core),
            Step::Flatten(_) => self.look_ahead_of_flatten(core),
        }
    }

    /// Reads the headers of a segment, and so brings them into the kernel's cache. Each says where
    /// the next one is.
    fn look_ahead_of_headers<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        segment: &SegmentState,
    ) -> Result<(), StoreError> {
        let start = core.superblock.unit_start(segment.unit);
        let read = self.maintenance.headers_read;
        let mut at = if read.sequence == segment.sequence { read.at } else { 1 };
        while at < segment.used_blocks {
            let blocks = PIECE_BLOCKS.min(segment.used_blocks - at);
            let mut piece = vec![0; blocks as usize * BLOCK_SIZE];
            core.take_beside(start + u64::from(at), &mut piece)?;
            let next = next_header(at, &piece);
            at = next.filter(|next| *next > at).unwrap_or(segment.used_blocks);
            self.maintenance.headers_read = HeadersRead { sequence: segment.sequence, at };
        }
        Ok(())
    }
}

/// Where the first header is of which the blocks from `at` on, with which one begins, do not have
/// all. `None`: they hold something else.
fn next_header(at: u32, piece: &[u8]) -> Option<u32> {
    let mut here = 0;
    while let Some(rest) = piece.get(here as usize * BLOCK_SIZE..).filter(|rest| !rest.is_empty()) {
        let blocks = header_blocks(rest)?;
        let Some(header) = rest.get(..blocks * BLOCK_SIZE) else {
            // A longer one is read by the step itself.
            let is_long = here == 0;
            return is_long.then_some(u32::MAX).or(Some(at + here));
        };
        here = here.saturating_add(Batch::parse(header)?.blocks());
    }
    Some(at.saturating_add(here))
}
