//! Folding a Revert: the slots that it changes are written into the map once, each with the
//! Revert's LSN as version; the blocks stay where they are.
//!
//! Only what is newer than the snapshot is walked, a bounded number of leaves a step.

use quoin_replication::replica::store::StoreError;
use quoin_types::BLOCK_SIZE;

use crate::background::checkpoint::{self, CheckpointJob, Edits};
use crate::clones::lookup::{self, first_of, shows_base};
use crate::core::Core;
use crate::disk::Disk;
use crate::format::node::{BASE_PLACE, BlockAt, Child, HOLE_PLACE, LEAF_BLOCKS, LOST_PLACE, Root};
use crate::map::tree::{self, Change, Part};
use crate::replica::upper::reverted;
use crate::replica::{Replica, may_lack};

/// Longest stretch that is changed by one edit.
const STRETCH_BLOCKS_MAX: u64 = 1 << 30;

/// A Revert that is being folded.
#[derive(Clone, Copy)]
pub struct RevertFold {
    pub lsn: u64,
    /// LSN and map of its snapshot.
    pub since: u64,
    pub kept: Root,
    /// LBA from which on the map is not changed yet.
    pub cursor: u64,
    /// Size of the volume.
    pub blocks: u64,
}

/// Folds some of a Revert into the job's map; true once all of it is.
pub(super) fn fold_revert<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    job: &mut CheckpointJob,
) -> Result<bool, StoreError> {
    let Some(mut revert) = job.revert.take() else { return Ok(true) };
    let mut part = std::mem::take(&mut job.part);
    part.clear();
    let mut is_done = false;
    for _ in 0..stretches_a_step(core) {
        if !edits_of_leaf(replica, core, job.work.root, &mut revert, &mut part)? {
            is_done = true;
            break;
        }
    }
    let kept = checkpoint::kept_beside_fold(replica, job);
    let mut io = replica.io(core);
    io.kept = kept;
    job.work.root = tree::update(&mut io, job.work.root, &part.edits, &part.crcs, None)?;
    for edit in &part.edits {
        // The snapshot and the map both show the block from now on, as two views do.
        if let Change::Data { place, .. } = edit.change {
            replica.family.add_live(core, place, BLOCK_SIZE as u64);
        }
    }
    job.part = part;
    if !is_done {
        job.revert = Some(revert);
    }
    Ok(is_done)
}

/// Looks at the nodes that the next step reads: those of the map, of the snapshot and of the bases
/// behind both.
pub(super) fn look_ahead<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    root: Root,
    mut revert: RevertFold,
) -> Result<(), StoreError> {
    let (mut part, mut lacking) = (Edits::default(), Ok(()));
    for _ in 0..stretches_a_step(core) {
        let before = revert.cursor;
        let looked = edits_of_leaf(replica, core, root, &mut revert, &mut part);
        part.clear();
        let is_end = matches!(looked, Ok(false));
        lacking = lacking.and(may_lack(looked.map(drop))?);
        // Where it lacks a leaf the next one is known, and is fetched at the same time.
        if is_end || revert.cursor == before {
            break;
        }
    }
    lacking
}

/// Stretches of a step. Each may be a leaf of the map and one of the snapshot.
fn stretches_a_step<D>(core: &Core<D>) -> usize {
    (core.options.step_nodes / 2).max(1)
}

/// Adds the edits of the next stretch that the Revert may change; false if there is none.
fn edits_of_leaf<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    root: Root,
    revert: &mut RevertFold,
    part: &mut Edits,
) -> Result<bool, StoreError> {
    let changed = tree::next_part(&mut replica.io(core), root, revert.since, revert.cursor)?;
    let Some(changed) = changed else { return Ok(false) };
    let (start, end) = changed.range();
    let start = start.max(revert.cursor);
    let mut end = end.min(start.saturating_add(STRETCH_BLOCKS_MAX)).min(revert.blocks);
    if start >= end {
        return Ok(false);
    }
    let hole = Change::Hole { version: revert.lsn };
    let lost = Change::Lost { version: revert.lsn };
    match changed {
        Part::Leaf { .. } => {
            revert.cursor = end;
            edits_in_leaf(replica, core, root, revert, (start, end), part)?;
        }
        Part::Damaged { .. } => part.push(start, end, lost),
        Part::Hole { .. } => {
            // Blocks that were trimmed since: the snapshot's map says where there was anything.
            let kept = lookup::next_parts(&mut replica.io(core), revert.kept, 0, start)?;
            let is_lost =
                |part: &&Part| matches!(part, Part::Damaged { .. }) && part.range().0 <= start;
            match first_of(&kept, start) {
                None => part.push(start, end, hole),
                Some((first, _)) if first > start => {
                    end = end.min(first);
                    part.push(start, end, hole);
                }
                Some((_, Some(hole_end))) => {
                    end = end.min(hole_end);
                    part.push(start, end, hole);
                }
                Some((_, None)) => {
                    let own = kept.first().filter(|_| revert.kept.child != Child::EMPTY);
                    if let Some(damaged) = own.filter(is_lost) {
                        end = end.min(damaged.range().1);
                        part.push(start, end, lost);
                    } else {
                        end = end.min((start / LEAF_BLOCKS as u64 + 1) * LEAF_BLOCKS as u64);
                        revert.cursor = end;
                        edits_in_leaf(replica, core, root, revert, (start, end), part)?;
                    }
                }
            }
        }
    }
    revert.cursor = end;
    Ok(true)
}

/// Adds the edits of the blocks of one leaf.
fn edits_in_leaf<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    root: Root,
    revert: &RevertFold,
    (start, end): (u64, u64),
    part: &mut Edits,
) -> Result<(), StoreError> {
    let count = ((end - start) as usize).min(LEAF_BLOCKS);
    let mut now = vec![BlockAt::default(); count];
    let mut kept = now.clone();
    let looked = tree::blocks(&mut replica.io(core), root, start, &mut now);
    let lacking = may_lack(looked)?;
    let looked = tree::blocks(&mut replica.io(core), revert.kept, start, &mut kept);
    lacking.and(may_lack(looked)?)?;
    let has_base = replica.family.relatives.base.is_some();
    for block in kept.iter_mut().filter(|block| has_base && shows_base(block)) {
        // Its place is none of this replica's, and may change.
        block.place = BASE_PLACE;
    }
    // What the base does not say of itself the clone's map says of the Revert's state too.
    kept.iter_mut().filter(|block| block.place == HOLE_PLACE).for_each(|block| block.place = 0);
    for ((lba, now), kept) in (start..).zip(now).zip(kept) {
        if now.version <= revert.since {
            continue;
        }
        let BlockAt { version, place, crc } = reverted(now, kept, revert.since, revert.lsn);
        let change = match place {
            0 => Change::Hole { version },
            LOST_PLACE => Change::Lost { version },
            place => {
                part.crcs.push(crc);
                Change::Data { version, place, crc_at: part.crcs.len() as u32 - 1 }
            }
        };
        part.push(lba, lba + 1, change);
    }
    Ok(())
}
