//! The scrub: everything that a pool holds is read from its media and compared with its checksums,
//! and what is bad is mended, from here where it can be made again, from a peer otherwise.
//!
//! | what | bad: |
//! |---|---|
//! | superblock, metadata ring | written again from memory |
//! | a segment's header | written again: it follows from the metadata |
//! | a block of a view or of the log | asked of a peer, the same version only ([`repair`](crate::background::repair::repair)) |
//! | a node of the map | its stretch is asked of a peer ([`mend`](crate::background::repair::mend)) |
//! | a batch's header | the log above the map is folded, so that no recovery needs it; of a segment that is closed it costs the space until the blocks in it die |
//!
//! **Mending a stretch.** The base is the map as of its LSN F ≤ stable. A peer's live slot of
//! version v ≤ F, read at a position that this replica has reached too, is what the base held:
//! nothing touched the block from v to that position (a Revert is a write like others). A slot
//! of a later version lies in this replica's own log, which answers for it; what the base held
//! under it is unknown, stays marked as lost and is replaced by the next fold. So nothing is ever
//! guessed, and a mended stretch shows each block as it was or not at all.

use quoin_replication::replica::store::StoreError;
use quoin_types::message::ReadView;
use quoin_types::{BLOCK_SIZE, Lsn, crc32c};

use crate::background::checkpoint;
use crate::background::cleaner;
use crate::clones::lookup::{self, first_of};
use crate::core::{BadBlock, Core};
use crate::disk::Disk;
use crate::format::checkpoint::SegmentState;
use crate::format::node::{BAD_PLACE, BlockAt, FANOUT, LEAF_BLOCKS, LOST_PLACE, NodeRef, Root};
use crate::format::segment::{decode_header, segment_header};
use crate::map::tree::{self, Change, Edit, Nodes, Part};
use crate::replica::{Replica, Source};
use crate::space::batches::walk;
use crate::space::logical;
use crate::space::segment_table::PAGE_UNITS;

/// Assumed cost of a leaf, an entry or a header, beside the bytes that it names.
const PART_BYTES: u64 = 4096;

/// Place where a scrub of a replica goes on: the stage (the log, the folded map, snapshots in
/// order, bases that only clones show, the map of moved blocks, the segments) and the cursor in it. The default is the beginning.
///
/// Blocks only ever move down this order, from the log into the map and from the map into a
/// snapshot, so a fold in the middle of a pass hides nothing from it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct ScrubAt {
    pub stage: u32,
    pub cursor: u64,
}

/// Result of a step of a scrub.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Scrubbed {
    /// Where to go on; `None`: the replica was read to its end.
    pub next: Option<ScrubAt>,
    /// About what was read.
    pub read_bytes: u64,
    /// Headers that were bad: written again, or made harmless by a fold.
    pub headers: u32,
}

/// Scrubs a leaf, an entry or a segment. Returns where to go on.
pub fn scrub_part<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    at: ScrubAt,
    done: &mut Scrubbed,
) -> Result<Option<ScrubAt>, StoreError> {
    let views = 1 + replica.folded.snapshots.len() as u32;
    let on = |cursor| Some(ScrubAt { cursor, ..at });
    let next_stage = Some(ScrubAt { stage: at.stage.saturating_add(1), cursor: 0 });
    done.read_bytes += PART_BYTES;
    Ok(match at.stage {
        0 => scrub_entry(replica, core, at.cursor, done)?.map_or(next_stage, on),
        view if view <= views => scrub_leaf(replica, core, at, done)?.map_or(next_stage, on),
        stage if stage == views + 1 => {
            scrub_bases(replica, core, at.cursor, done)?.map_or(next_stage, on)
        }
        stage if stage == views + 2 => {
            scrub_logical(replica, core, at.cursor, done)?.map_or(next_stage, on)
        }
        stage if stage == views + 3 => scrub_segment(replica, core, at.cursor, done)?.and_then(on),
        _ => None,
    })
}

/// The next leaf of a snapshot or of the folded map, without what an older view showed.
fn scrub_leaf<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    at: ScrubAt,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    let views = &replica.folded.snapshots;
    let is_folded = at.stage == 1;
    // The number of snapshots that are older than this view.
    let older = (at.stage as usize).checked_sub(2).unwrap_or(views.len());
    let root = views.get(older).map_or(replica.folded.root, |s| s.root);
    let snapshot = views.get(older).map(|s| s.info.id);
    let view = snapshot.map_or(ReadView::Live, ReadView::Snapshot);
    let from = older.checked_sub(1).and_then(|s| views.get(s)).map_or(0, |s| s.info.lsn.0);
    let Some(part) = tree::next_part(&mut replica.io(core), root, from, at.cursor)? else {
        return Ok(None);
    };
    let (start, end) = part.range();
    match part {
        Part::Hole { .. } => {}
        Part::Damaged { newest, .. } => {
            let (start, known) = (start.max(at.cursor), core.faults.bad.len());
            let many = (FANOUT * LEAF_BLOCKS) as u64;
            for lba in (start..end.min(start + many)).step_by(LEAF_BLOCKS) {
                let bad = BadBlock::stretch(replica.identity.guid, lba, Lsn(newest));
                core.note_bad(bad.of(snapshot));
            }
            match is_folded {
                true => leave_overwritten(replica, core, known)?,
                false => note_live_too(replica, core, known)?,
            }
            return Ok(Some(end.min(start + many)));
        }
        Part::Leaf { .. } => {
            scrub_nodes(replica, core, root, start, at.cursor, done)?;
            replica.find(core, &Source::Root(root), start, LEAF_BLOCKS as u32)?;
            core.forget_found();
            let (mut slots, known) = (Vec::new(), core.faults.bad.len());
            replica.slots(core, view, start, Lsn(from), true, &mut slots)?;
            done.read_bytes += (slots.len() * BLOCK_SIZE) as u64;
            match is_folded {
                true => leave_overwritten(replica, core, known)?,
                false => note_live_too(replica, core, known)?,
            }
        }
    }
    Ok(Some(end))
}

/// The next leaf of the bases that a clone shows, where their replicas are gone and nobody else
/// reads them. What is bad of them is asked for as the clone's own.
fn scrub_bases<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    let size = replica.head.volume_blocks;
    if !core.bases.line(replica.family.relatives.base).any(|base| base.is_left) {
        return Ok(None);
    }
    let parts = lookup::next_of_bases(&mut replica.io(core), 0, cursor)?;
    let Some((start, hole_end)) = first_of(&parts, cursor).filter(|(start, _)| *start < size)
    else {
        return Ok(None);
    };
    if let Some(end) = hole_end {
        return Ok(Some(end));
    }
    let blocks = (LEAF_BLOCKS as u64 - start % LEAF_BLOCKS as u64).min(size - start);
    replica.find(core, &Source::Live, start, blocks as u32)?;
    core.forget_found();
    let mut slots = Vec::new();
    replica.slots(core, ReadView::Live, start, Lsn::ZERO, true, &mut slots)?;
    done.read_bytes += (slots.len() * BLOCK_SIZE) as u64;
    Ok(Some(start + blocks))
}

/// What a snapshot and the live view share is bad in both. A block is mended where it lies, so
/// its live copy is asked for, which any target knows; a stretch of the map is mended in each.
fn note_live_too<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    known: usize,
) -> Result<(), StoreError> {
    for bad in core.faults.bad.split_off(known.min(core.faults.bad.len())) {
        let Some(id) = bad.snapshot.filter(|_| bad.lba < replica.head.volume_blocks) else {
            core.note_bad(bad);
            continue;
        };
        replica.find(core, &Source::Live, bad.lba, 1)?;
        let live = core.buffers.found.first().copied();
        let is_lost = |b: BlockAt| matches!(b.place, BAD_PLACE | LOST_PLACE);
        if bad.blocks > 1 {
            core.note_bad(bad);
            if live.is_some_and(is_lost) {
                core.note_bad(bad.of(None));
            }
            continue;
        }
        let source = replica.source(ReadView::Snapshot(id));
        let Some(source) = source else { continue };
        replica.find(core, &source, bad.lba, 1)?;
        let is_shared = live.is_some() && core.buffers.found.first().copied() == live;
        core.note_bad(bad.of(Some(id).filter(|_| !is_shared)));
    }
    Ok(())
}

/// Forgets bad blocks of the folded map that the log has overwritten. They need no repair, and
/// could get none: the next fold drops them.
fn leave_overwritten<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    known: usize,
) -> Result<(), StoreError> {
    let folded = Source::Root(replica.folded.root);
    for bad in core.faults.bad.split_off(known.min(core.faults.bad.len())) {
        let blocks = u64::from(bad.blocks).min(replica.head.volume_blocks.saturating_sub(bad.lba));
        replica.find(core, &folded, bad.lba, blocks as u32)?;
        let before = core.buffers.found.clone();
        replica.find(core, &Source::Live, bad.lba, blocks as u32)?;
        let stays = |(old, new): (&BlockAt, &BlockAt)| {
            let is_bad = bad.blocks == 1 || matches!(old.place, BAD_PLACE | LOST_PLACE);
            is_bad && (old.place, old.version) == (new.place, new.version)
        };
        if before.iter().zip(&core.buffers.found).any(stays) {
            core.note_bad(bad);
        } else {
            replica.maintenance.fold_wanted = true;
        }
    }
    Ok(())
}

/// The nodes that lead to a leaf, those that the scrub comes to first. One that is bad on
/// media and good in the cache is written again, wherever it is shared.
fn scrub_nodes<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    root: Root,
    lba: u64,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<(), StoreError> {
    // Nodes that wait to be written are not on media yet.
    replica.io(core).flush()?;
    let path = tree::path(&mut replica.io(core), root, lba)?;
    // Nodes that are known to be lost are reported with the blocks under them.
    let first_seen = |(_, base, node): &(u8, u64, NodeRef)| *base >= cursor && node.is_possible();
    for (level, base, node) in path.into_iter().filter(first_seen) {
        done.read_bytes += u64::from(node.length);
        let rotten = !core.is_whole_on_media(level, &node)?;
        if rotten && !cleaner::is_blocked(replica) && replica.io(core).load(level, &node)?.is_some()
        {
            done.headers += 1;
            let change = Change::Renew { place: node.place, level, newest: node.newest };
            cleaner::renew(replica, core, &[Edit { lba: base, blocks: 1, change }])?;
            replica.maintenance.dirty = true;
        }
    }
    Ok(())
}

/// The first entry of the log from this LSN on that has data.
fn scrub_entry<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    let first = cursor.max(replica.log.first_lsn());
    let found = (first..replica.log.next_lsn())
        .find_map(|lsn| Some((lsn, *replica.log.get(lsn).filter(|r| r.place != 0)?)));
    let Some((lsn, record)) = found else { return Ok(None) };
    let crcs: Vec<u32> = replica.log.crcs(&record).collect();
    let mut bytes = vec![0; crcs.len() * BLOCK_SIZE];
    core.disk.forget_cached(record.place * BLOCK_SIZE as u64, bytes.len() as u64);
    let whole = core.read(record.place, &mut bytes).is_ok();
    for (i, (chunk, crc)) in bytes.chunks_mut(BLOCK_SIZE).zip(crcs).enumerate() {
        let read = whole || core.read(record.place + i as u64, chunk).is_ok();
        if read && crc32c(chunk) == crc {
            continue;
        }
        let lba = record.lba + i as u64;
        replica.find(core, &Source::Live, lba, 1)?;
        if core.buffers.found.first().is_some_and(|block| block.version == lsn) {
            core.note_bad(BadBlock::block(replica.identity.guid, lba, Lsn(lsn)));
        } else {
            // Overwritten since: of use only to one that lags, who can ask others.
            replica.maintenance.fold_wanted = true;
        }
    }
    done.read_bytes += bytes.len() as u64;
    Ok(Some(lsn + 1))
}

/// The headers of the first segment from this unit on.
fn scrub_segment<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    let Ok(from) = u32::try_from(cursor) else { return Ok(None) };
    let Some(state) = replica.family.segments.next_from(from) else { return Ok(None) };
    let page = state.unit / PAGE_UNITS;
    if cursor == 0 || (from - 1) / PAGE_UNITS < page {
        scrub_table(replica, core, page, done)?;
    }
    let mut header = vec![0; BLOCK_SIZE];
    let start = core.superblock.unit_start(state.unit);
    core.disk.forget_cached(start * BLOCK_SIZE as u64, BLOCK_SIZE as u64);
    let guid = replica.identity.guid;
    let is_read = core.read(start, &mut header).is_ok();
    let found = decode_header(&core.superblock, guid, state.unit, &header).filter(|_| is_read);
    let says = |s: &SegmentState| (s.units, s.stream, s.sequence);
    if found.is_none_or(|found| says(&found) != says(&state)) {
        let expected = segment_header(&core.superblock, guid, &state);
        core.write(start, &[std::io::IoSlice::new(&expected)])?;
        core.tickets.request();
        done.headers += 1;
    }
    // The open segments' ends move; a batch is in them once its write returned.
    let whole = walk(core, &state, replica.family.guid_hash, |_, batch| {
        done.read_bytes += u64::from(batch.header_blocks) * BLOCK_SIZE as u64;
    })?;
    if !whole {
        done.headers += 1;
        replica.family.segments.set_aside(state.unit);
        replica.maintenance.fold_wanted |= state.last_index >= checkpoint::log_start(replica).index;
    }
    Ok(Some(u64::from(state.unit) + 1))
}

/// The nodes that lead to the next leaf of the map of moved blocks. One that is bad on media and
/// good in the cache is written again. What a lost one named is bad where it is read.
fn scrub_logical<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    replica.io(core).flush()?;
    let Some(part) = logical::next_of_logical(replica, core, cursor)? else { return Ok(None) };
    let root = core.logical_of(replica.family.guid).root;
    let start = part.range().0.max(cursor);
    let path = tree::path(&mut replica.io(core), root, start)?;
    for (level, base, node) in path.into_iter().filter(|(_, _, node)| node.is_possible()) {
        if base < cursor {
            continue;
        }
        done.read_bytes += u64::from(node.length);
        if !core.is_whole_on_media(level, &node)? {
            done.headers += 1;
            if !cleaner::is_blocked(replica) && replica.io(core).load(level, &node)?.is_some() {
                let change = Change::Renew { place: node.place, level, newest: node.newest };
                logical::update_logical(
                    replica,
                    core,
                    &[Edit { lba: base, blocks: 1, change }],
                    &[],
                )?;
                replica.maintenance.dirty = true;
            }
        }
    }
    Ok(Some(part.range().1))
}

/// The nodes of the table of segments that lead to a page. Memory has what a bad one says.
fn scrub_table<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    page: u32,
    done: &mut Scrubbed,
) -> Result<(), StoreError> {
    replica.io(core).flush()?;
    let (root, unit) = (replica.family.segments.recorded.root, u64::from(page * PAGE_UNITS));
    for (level, _, node) in tree::path(&mut replica.io(core), root, unit)? {
        done.read_bytes += u64::from(node.length);
        if !core.is_whole_on_media(level, &node)? {
            done.headers += 1;
            replica.family.segments.recorded.write_again(page);
            replica.maintenance.dirty = true;
        }
    }
    Ok(())
}
