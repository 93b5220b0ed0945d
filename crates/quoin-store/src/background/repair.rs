//! Repair of one replica from its peers: a stretch is verified by its checksums on media, a bad block is written
//! again where it lies, and what is lost of a map is rebuilt from slots.

use bytes::Bytes;
use quoin_replication::replica::store::StoreError;
use quoin_types::message::{Content, ReadView, Slot};
use quoin_types::{BLOCK_SIZE, Lsn, crc32c, mutant};

use crate::background::cleaner;
use crate::background::relocation::{self, MovedBlock};
use crate::core::{BadBlock, Core};
use crate::disk::Disk;
use crate::format::node::{BAD_PLACE, BlockAt, HOLE_PLACE, LEAF_BLOCKS, LOST_PLACE, Root};
use crate::map::tree::{self, Change, Edit};
use crate::replica::slots::{push_slot, without_bytes};
use crate::replica::{Replica, Source, may_lack};
use crate::space::segments::Claim;

/// Leaves that a mend may be about: it is no longer than one, and may begin in the middle.
const LEAVES_A_MEND: usize = 2;

/// Compares blocks of a view with their checksums on media: `ReplicaStore::verify`.
#[allow(clippy::too_many_arguments)]
pub fn verify<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    view: ReadView,
    lba: u64,
    blocks: u32,
    bytes_max: u32,
    note: bool,
    out: &mut Vec<Slot>,
) -> Result<(), StoreError> {
    let size = replica.view_size(view).ok_or(StoreError::Rule("no such view"))?;
    let end = lba.checked_add(u64::from(blocks)).filter(|end| *end <= size);
    let end = end.ok_or(StoreError::Rule("a verification outside the volume"))?;
    let source = replica.source(view).ok_or(StoreError::Rule("no such view"))?;
    let known = core.faults.bad.len();
    let (mut at, mut left, mut lacking) = (lba, u64::from(bytes_max), Ok(()));
    while at < end && (left > 0 || at == lba) {
        let leaf = LEAF_BLOCKS as u64;
        let count = (leaf - at % leaf).min(end - at).min(left.div_ceil(BLOCK_SIZE as u64));
        let count = count.max(1);
        let found = may_lack(replica.find(core, &source, at, count as u32))?;
        // The leaf may have been read too.
        left = left.saturating_sub(BLOCK_SIZE as u64);
        let mut slots = Vec::new();
        if found.is_ok() {
            core.forget_found();
            let is_data = |block: &&BlockAt| !matches!(block.place, 0 | BAD_PLACE | LOST_PLACE);
            let data = core.buffers.found.iter().filter(is_data).count();
            let read = may_lack(replica.slots(core, view, at, Lsn::ZERO, true, &mut slots))?;
            if read.is_err() {
                // Its blocks are on their way and count as much as those that are here.
                slots.clear();
                left = left.saturating_sub((data * BLOCK_SIZE) as u64);
            }
            lacking = lacking.and(read);
        }
        // Later leaves are looked at all the same, so that all of it is fetched at once.
        lacking = lacking.and(found);
        for mut slot in slots {
            if slot.content != Content::Hole {
                left = left.saturating_sub(u64::from(slot.blocks) * BLOCK_SIZE as u64);
            }
            without_bytes(&mut slot);
            push_slot(out, slot);
        }
        at += count;
    }
    if !note || lacking.is_err() {
        core.faults.bad.truncate(known);
    }
    lacking
}

/// Writes a block again where it lies, if it is the one that the view shows: `ReplicaStore::repair`.
pub fn repair<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    view: ReadView,
    lba: u64,
    version: Lsn,
    crc: u32,
    data: &Bytes,
) -> Result<bool, StoreError> {
    core.check_usable()?;
    let Some(size) = replica.view_size(view) else { return Ok(false) };
    if lba >= size || data.len() != BLOCK_SIZE {
        return Ok(false);
    }
    let Some(source) = replica.source(view) else { return Ok(false) };
    replica.find(core, &source, lba, 1)?;
    let Some(block) = core.buffers.found.first().copied() else { return Ok(false) };
    let same =
        (block.version, block.crc) == (version.0, crc) || mutant::is("repair-of-another-version");
    let unplaced = matches!(block.place, 0 | BAD_PLACE | LOST_PLACE);
    if !same || unplaced || crc32c(data) != crc {
        return Ok(false);
    }
    // Version and checksum are the same: nothing good can be overwritten by it.
    core.write(block.place, &[std::io::IoSlice::new(data)])?;
    // A segment that could not be emptied for it can be now.
    replica.family.segments.try_again();
    // Every view that shows this block has it mended.
    let bad = BadBlock::block(replica.identity.guid, lba, version);
    core.faults.bad.retain(|b| b.of(None) != bad);
    Ok(true)
}

/// Looks at the nodes that a repair reads.
pub fn look_ahead<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    view: ReadView,
    lba: u64,
) -> Result<(), StoreError> {
    match (replica.view_size(view), replica.source(view)) {
        (Some(size), Some(source)) if lba < size => replica.find(core, &source, lba, 1),
        _ => Ok(()),
    }
}

/// Looks at the nodes that a mend reads.
pub fn look_ahead_of_mend<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    view: ReadView,
    lba: u64,
    blocks: u32,
) -> Result<(), StoreError> {
    let (root, size) = match view {
        ReadView::Snapshot(id) => {
            let Some(kept) = replica.folded.snapshots.iter().find(|s| s.info.id == id) else {
                return Ok(());
            };
            (kept.root, kept.info.blocks)
        }
        ReadView::Live | ReadView::Base => (replica.folded.root, replica.head.volume_blocks),
    };
    let stretch = (lba, lba.saturating_add(blocks.into()));
    if stretch.1 > size || blocks > LEAF_BLOCKS as u32 {
        return Ok(());
    }
    // A clone's blocks are those of its base, where it has none.
    replica.find(core, &Source::Root(root), lba, blocks)?;
    tree::look_ahead(&mut replica.io(core), root, std::iter::once(stretch), LEAVES_A_MEND)
}

/// Rebuilds what is lost of the map of a stretch, by the module's rule.
pub fn mend<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    view: ReadView,
    lba: u64,
    slots: &[Slot],
) -> Result<bool, StoreError> {
    core.check_usable()?;
    let blocks: u64 = slots.iter().map(|s| u64::from(s.blocks)).sum();
    // The map of a snapshot that is not folded is the live one, whose turn comes first.
    let kept = match view {
        ReadView::Snapshot(id) => {
            let Some(at) = replica.folded.snapshots.iter().position(|s| s.info.id == id) else {
                return Ok(false);
            };
            Some(at)
        }
        ReadView::Live | ReadView::Base => None,
    };
    let snapshot = kept.map(|at| &replica.folded.snapshots[at]);
    let size = snapshot.map_or(replica.head.volume_blocks, |s| s.info.blocks);
    let root = snapshot.map_or(replica.folded.root, |s| s.root);
    let base = snapshot.map_or(replica.folded.head.position.lsn, |s| s.info.lsn);
    let id = snapshot.map(|s| s.info.id);
    if cleaner::is_blocked(replica)
        || blocks > LEAF_BLOCKS as u64
        || lba.checked_add(blocks).is_none_or(|end| end > size)
    {
        return Ok(false);
    }
    replica.find(core, &Source::Root(root), lba, blocks as u32)?;
    let lost: Vec<bool> =
        core.buffers.found.iter().map(|b| matches!(b.place, BAD_PLACE | LOST_PLACE)).collect();
    if !lost.contains(&true) {
        // A fold dropped what was lost, since the log had overwritten it.
        return Ok(true);
    }
    if slots.iter().any(|slot| slot.version > base) {
        // Entries of the log for these blocks may rest on what is lost under them.
        replica.maintenance.fold_wanted = true;
    }
    let (mut edits, mut moved) = (Vec::new(), Vec::new());
    let each = slots.iter().flat_map(|s| (s.lba..s.lba + u64::from(s.blocks)).map(move |l| (l, s)));
    for ((lba, slot), _) in
        each.zip(&lost).filter(|((_, slot), lost)| **lost && slot.version <= base)
    {
        let version = slot.version.0;
        let mut change = match (version, replica.family.relatives.base) {
            // A hole that was never written lets the base show, which is what is lost.
            (0, Some(_)) if !mutant::is("base-shows-where-a-clone-was-mended") => {
                Change::Data { version, place: HOLE_PLACE, crc_at: u32::MAX }
            }
            _ => Change::Hole { version },
        };
        if let Content::Data { crc, data } = &slot.content {
            let crc_at = moved.len() as u32;
            change = Change::Data { version, place: 0, crc_at };
            let Some(block) = MovedBlock::of(lba, version, *crc, 0, data.clone()) else {
                return Err(StoreError::Rule("a slot whose bytes are not those of its checksum"));
            };
            moved.push(block);
        }
        edits.push(Edit { lba, blocks: 1, change });
    }
    let places = relocation::write_moved(
        replica,
        core,
        &moved,
        relocation::naming(replica),
        Claim::Reserve,
    )?;
    let mut crcs: Vec<u32> = moved.iter().map(MovedBlock::crc).collect();
    let of_holes = crcs.len() as u32;
    crcs.push(0);
    for edit in &mut edits {
        match &mut edit.change {
            Change::Data { place: HOLE_PLACE, crc_at, .. } => *crc_at = of_holes,
            Change::Data { place, crc_at, .. } => {
                *place = places.get(*crc_at as usize).copied().unwrap_or(LOST_PLACE);
            }
            _ => {}
        }
    }
    let mut io = replica.io(core);
    io.gives_up = true;
    let mended = tree::update(&mut io, root, &edits, &crcs, None)?;
    match kept {
        Some(at) => replica.folded.snapshots[at].root = mended,
        None => replica.folded.root = mended,
    }
    mend_bases(replica, core, root, mended)?;
    replica.maintenance.dirty = true;
    replica.find(core, &Source::Root(mended), lba, blocks as u32)?;
    let is_lost = |edit: &Edit| {
        let found = core.buffers.found.get((edit.lba - lba) as usize);
        found.is_none_or(|block| matches!(block.place, BAD_PLACE | LOST_PLACE))
    };
    if edits.iter().any(is_lost) {
        return Ok(false);
    }
    let guid = replica.identity.guid;
    core.faults.bad.retain(|b| (b.replica, b.lba, b.snapshot) != (guid, lba, id) || b.blocks == 1);
    Ok(true)
}

/// Clones that show the map that was mended show the mended one.
fn mend_bases<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    root: Root,
    mended: Root,
) -> Result<(), StoreError> {
    let guid = replica.identity.guid;
    if core.bases.of(guid).any(|(_, base)| base.root == root) {
        // They read nodes from the disk: they know nothing of what waits here to be written.
        replica.io(core).flush()?;
        core.bases.of_mut(guid).filter(|base| base.root == root).for_each(|base| {
            base.root = mended;
        });
    }
    Ok(())
}
