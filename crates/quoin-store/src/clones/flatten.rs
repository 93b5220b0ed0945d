//! A clone takes over the blocks of its base, so that it shares none any more.
//!
//! The base is walked in the order of its LBAs, a leaf in a step. What any view of the replica shows of
//! it there is written among the replica's own moved blocks, with the same version, and each view
//! that shows the base takes it over. So nothing that can be read changes, and a crash at any moment
//! leaves a clone that begins again and finds what it has done already.
//!
//! The base is given up once a record without it is in the ring: its replica may then record that it
//! keeps it no more. What cannot be read of the base is lost in the clone, and is asked of a peer.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, Lsn, crc32c, mutant};

use crate::background::cleaner;
use crate::background::relocation::{self, MovedBlock};
use crate::clones::bases::BASES_DEEP_MAX;
use crate::clones::lookup::{self, first_of, shows_base};
use crate::core::{BadBlock, Core, NodeIo};
use crate::disk::Disk;
use crate::format::node::{BAD_PLACE, BlockAt, LEAF_BLOCKS, LOST_PLACE, Root};
use crate::format::relatives::BaseId;
use crate::map::tree::{self, Change, Edit, Part};
use crate::replica::{Replica, may_lack};
use crate::space::segments::Claim;

/// Longest hole that one step takes over.
const HOLE_BLOCKS_MAX: u64 = 1 << 30;

/// How far a clone has come.
#[derive(Default)]
pub struct Flatten {
    cursor: u64,
    /// Blocks of the next step that were read ahead, by their places.
    ahead: BTreeMap<u64, Bytes>,
}

/// What a step takes over.
enum Stretch {
    Hole {
        start: u64,
        end: u64,
        version: u64,
    },
    Leaf {
        start: u64,
        found: Vec<BlockAt>,
    },
    /// The base has nothing more.
    End,
}

/// Returns true if the next step of a flattening can be done now.
pub fn is_due(replica: &Replica) -> bool {
    // A rebuild gives all of it blocks of its own.
    let is_rebuilt = replica.shadow.is_some();
    replica.maintenance.flatten.is_some() && !cleaner::is_blocked(replica) && !is_rebuilt
}

/// Returns true if the replica shows a base, by its maps or by its last record.
pub fn shows_a_base(replica: &Replica) -> bool {
    let work = &replica.maintenance;
    let in_commit = work.commit.as_ref().is_some_and(|c| !c.given_up_bases.is_empty());
    replica.family.relatives.base.is_some() || !work.given_up_bases.is_empty() || in_commit
}

/// Begins to take over the blocks of its base, if it has one.
pub fn begin(replica: &mut Replica) {
    if replica.family.relatives.base.is_some() && replica.maintenance.flatten.is_none() {
        replica.maintenance.flatten = Some(Flatten::default());
    }
}

fn next_to_flatten<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    base: BaseId,
    cursor: u64,
) -> Result<Stretch, StoreError> {
    let step_nodes = core.options.step_nodes.max(1);
    let roots = roots_over_base(replica, core);
    let mut io = replica.io(core);
    let parts = lookup::next_of_bases(&mut io, 0, cursor)?;
    let Some((start, hole_end)) = first_of(&parts, cursor) else { return Ok(Stretch::End) };
    let leaf_end = (start / LEAF_BLOCKS as u64 + 1) * LEAF_BLOCKS as u64;
    let count = if hole_end.is_some() { 1 } else { (leaf_end - start) as usize };
    let mut found = vec![BlockAt::default(); count];
    lookup::blocks_of(&mut io, base, start, &mut found, BASES_DEEP_MAX)?;
    Ok(match hole_end {
        Some(end) => {
            let mut end = end.min(start.saturating_add(HOLE_BLOCKS_MAX));
            // All leaves of its own in there are looked at.
            for root in roots {
                end = end_of_leaves(&mut io, root, (start, end), step_nodes)?;
            }
            Stretch::Hole { start, end, version: found[0].version }
        }
        None => Stretch::Leaf { start, found },
    })
}

/// Where the first so many leaves of a map end that are in a stretch, or the stretch itself does.
fn end_of_leaves<D: Disk>(
    io: &mut NodeIo<'_, D>,
    root: Root,
    (start, end): (u64, u64),
    leaves_max: usize,
) -> Result<u64, StoreError> {
    let (mut at, mut leaves) = (start, 0);
    while let Some(part) = tree::next_part(io, root, 0, at)? {
        if part.range().0 >= end {
            break;
        }
        at = part.range().1;
        leaves += usize::from(matches!(part, Part::Leaf { .. }));
        if leaves == leaves_max {
            return Ok(end.min(at));
        }
    }
    Ok(end)
}

/// Roots of all views that may show the base.
fn roots_over_base<D: Disk>(replica: &Replica, core: &Core<D>) -> Vec<Root> {
    let mut roots: Vec<Root> = replica.folded.snapshots.iter().map(|s| s.root).collect();
    roots.extend(replica.pins.values().map(|pin| pin.root));
    roots.extend(core.bases.of(replica.identity.guid).map(|(_, base)| base.root));
    roots.push(replica.folded.root);
    roots
}

/// Which blocks of a stretch some view shows of the base.
fn shown_of_base<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    start: u64,
    count: usize,
) -> Result<Vec<bool>, StoreError> {
    let (mut shown, mut own) = (vec![false; count], vec![BlockAt::default(); count]);
    let mut lacking = Ok(());
    for root in roots_over_base(replica, core) {
        let looked = tree::blocks(&mut replica.io(core), root, start, &mut own);
        lacking = lacking.and(may_lack(looked)?);
        for (shown, block) in shown.iter_mut().zip(&own) {
            *shown |= shows_base(block);
        }
    }
    lacking.map(|()| shown)
}

/// Takes over some of the base.
pub fn step<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let (Some(Flatten { cursor, ahead }), Some(base)) =
        (&mut replica.maintenance.flatten, replica.family.relatives.base)
    else {
        replica.maintenance.flatten = None;
        return Ok(());
    };
    let (cursor, ahead) = (*cursor, std::mem::take(ahead));
    replica.map_changed(core);
    let end = match next_to_flatten(replica, core, base, cursor)? {
        Stretch::Hole { start, end, version } => {
            let blocks = (end - start) as u32;
            let change = Change::FillHole { version };
            cleaner::update_views(replica, core, &[Edit { lba: start, blocks, change }], &[])?;
            end
        }
        Stretch::Leaf { start, found } => {
            take_over(replica, core, start, &found, ahead)?;
            start + found.len() as u64
        }
        Stretch::End => {
            end(replica, core, base);
            return Ok(());
        }
    };
    replica.maintenance.flatten = Some(Flatten { cursor: end, ahead: BTreeMap::new() });
    replica.maintenance.dirty = true;
    Ok(())
}

fn take_over<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    start: u64,
    found: &[BlockAt],
    mut ahead: BTreeMap<u64, Bytes>,
) -> Result<(), StoreError> {
    let shown = shown_of_base(replica, core, start, found.len())?;
    let (mut edits, mut moved) = (Vec::new(), Vec::new());
    let wanted = (start..).zip(found).zip(shown).filter(|(_, shown)| *shown);
    for ((lba, block), _) in wanted {
        let BlockAt { version, place, crc } = *block;
        let change = match place {
            0 if version == 0 => continue,
            0 => Change::FillHole { version },
            _ => {
                let crc_at = moved.len() as u32;
                // What was read ahead is a hint: only the disk says that it is bad.
                let as_moved = |bytes| MovedBlock::of(lba, version, crc, 0, bytes);
                let read_ahead = ahead.remove(&place).and_then(as_moved);
                match read_ahead.or_else(|| read_block(core, block).and_then(as_moved)) {
                    Some(block) => {
                        moved.push(block);
                        Change::Fill { version, place: 0, crc_at }
                    }
                    None => {
                        let bad = BadBlock::stretch(replica.identity.guid, lba, Lsn(version));
                        core.note_bad(bad);
                        Change::Fill { version, place: LOST_PLACE, crc_at: u32::MAX }
                    }
                }
            }
        };
        edits.push(Edit { lba, blocks: 1, change });
    }
    if edits.is_empty() {
        return Ok(());
    }
    let places =
        relocation::write_moved(replica, core, &moved, relocation::naming(replica), Claim::Spare)?;
    let mut crcs: Vec<u32> = moved.iter().map(MovedBlock::crc).collect();
    let lost_at = crcs.len() as u32;
    crcs.push(0);
    for edit in &mut edits {
        if let Change::Fill { place, crc_at, .. } = &mut edit.change {
            match places.get(*crc_at as usize) {
                Some(written) => *place = *written,
                None => *crc_at = lost_at,
            }
        }
    }
    cleaner::update_views(replica, core, &edits, &crcs)
}

/// All of it is its own by now.
fn end<D: Disk>(replica: &mut Replica, core: &mut Core<D>, base: BaseId) {
    replica.maintenance.flatten = None;
    replica.family.relatives.base = None;
    let mut given_up = vec![base];
    for own in core.bases.of_mut(replica.identity.guid) {
        given_up.extend(own.parent.take());
    }
    if mutant::is("base-given-up-before-its-clone-is-recorded") {
        given_up.drain(..).for_each(|base| core.bases.end_use(base));
    }
    replica.maintenance.given_up_bases.append(&mut given_up);
    (replica.maintenance.dirty, replica.maintenance.commit_waits) = (true, false);
}

/// Looks at what the next step reads.
pub fn look_ahead<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let (Some(Flatten { cursor, .. }), Some(base)) =
        (&replica.maintenance.flatten, replica.family.relatives.base)
    else {
        return Ok(());
    };
    let cursor = *cursor;
    let (start, found) = match next_to_flatten(replica, core, base, cursor)? {
        Stretch::Leaf { start, found } => (start, found),
        Stretch::Hole { start, end, .. } => {
            return cleaner::look_ahead_of_views(replica, core, &[(start, end)]);
        }
        Stretch::End => return Ok(()),
    };
    let stretch = (start, start + found.len() as u64);
    let views = may_lack(cleaner::look_ahead_of_views(replica, core, &[stretch]))?;
    let shown = shown_of_base(replica, core, start, found.len());
    let mut lacking = views;
    let shown = shown?;
    let Some(Flatten { ahead, .. }) = &mut replica.maintenance.flatten else { return lacking };
    for (block, _) in found.iter().zip(shown).filter(|(block, shown)| *shown && is_there(block)) {
        let is_it = |bytes: &[u8]| crc32c(bytes) == block.crc;
        if ahead.get(&block.place).is_some_and(|bytes| is_it(bytes)) {
            continue;
        }
        let mut buffer = BytesMut::zeroed(BLOCK_SIZE);
        match core.take_beside(block.place, &mut buffer, &is_it) {
            Ok(()) => drop(ahead.insert(block.place, buffer.freeze())),
            Err(error) => lacking = lacking.and(Err(error)),
        }
    }
    lacking
}

fn is_there(block: &BlockAt) -> bool {
    !matches!(block.place, 0 | BAD_PLACE | LOST_PLACE)
}

/// The bytes of a block, if they can be read.
fn read_block<D: Disk>(core: &Core<D>, block: &BlockAt) -> Option<Bytes> {
    let mut bytes = BytesMut::zeroed(BLOCK_SIZE);
    let is_read = is_there(block) && core.read(block.place, &mut bytes).is_ok();
    is_read.then(|| bytes.freeze())
}
