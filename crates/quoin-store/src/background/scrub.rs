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
//! **Nobody waits for it.** In a call that may wait, a part of the scrub reads nothing of the disk
//! itself: what it lacks is fetched beside, and then the part is done anew. So a part first looks at
//! all that it reads, and changes something only once that is at hand.
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
use crate::background::listing::Listing;
use crate::clones::lookup::{self, first_of};
use crate::core::{BadBlock, Core};
use crate::disk::Disk;
use crate::disk::fetch::Owner;
use crate::format::checkpoint::SegmentState;
use crate::format::node::{BAD_PLACE, BlockAt, FANOUT, LEAF_BLOCKS, LOST_PLACE, NodeRef, Root};
use crate::format::segment::{decode_header, segment_header};
use crate::log::memtable::LogRecord;
use crate::map::tree::{self, Change, Edit, Nodes, Part};
use crate::replica::{Replica, Source, may_lack};
use crate::space::logical;
use crate::space::segment_table::PAGE_UNITS;

/// Bytes of the log's entries that are read together.
const ENTRIES_BYTES: usize = 256 << 10;
/// Entries that are looked at together.
const ENTRIES_MAX: usize = 64;
/// Calls for one part that lack something, one after the other.
const LACKED_MAX: u8 = 16;
/// Blocks of the metadata ring that are read together.
const RING_BLOCKS: u32 = 64;
/// Assumed cost of a leaf, an entry or a header, beside the bytes that it names.
const PART_BYTES: u64 = 4096;

/// What a scrub of a replica reads, one after the other.
///
/// Blocks only ever move down this order, from the log into the map and from the map into a
/// snapshot, so a fold in the middle of a pass hides nothing from it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum ScrubStage {
    #[default]
    Log,
    /// The folded map.
    Map,
    /// The oldest snapshot of this LSN or a later one. Snapshots come and go during a pass: the LSN is
    /// of one of them alone, and says which are behind it.
    Snapshot(u64),
    /// Bases without another reader.
    Bases,
    /// The map of moved blocks.
    Logical,
    Segments,
}

impl ScrubStage {
    /// The stage as one number, for those who keep it.
    pub fn number(self) -> u64 {
        const FIRST_SNAPSHOT: u64 = 16;
        match self {
            ScrubStage::Log => 0,
            ScrubStage::Map => 1,
            ScrubStage::Bases => 2,
            ScrubStage::Logical => 3,
            ScrubStage::Segments => 4,
            ScrubStage::Snapshot(lsn) => lsn.saturating_add(FIRST_SNAPSHOT),
        }
    }

    /// The stage of a number; one of no stage is the first.
    pub fn of(number: u64) -> Self {
        match number {
            1 => ScrubStage::Map,
            2 => ScrubStage::Bases,
            3 => ScrubStage::Logical,
            4 => ScrubStage::Segments,
            16.. => ScrubStage::Snapshot(number - 16),
            _ => ScrubStage::Log,
        }
    }

    /// The next one, whatever snapshots there are.
    fn next(self) -> Option<Self> {
        match self {
            ScrubStage::Log => Some(ScrubStage::Map),
            ScrubStage::Map => Some(ScrubStage::Snapshot(0)),
            ScrubStage::Snapshot(lsn) => Some(ScrubStage::Snapshot(lsn.saturating_add(1))),
            ScrubStage::Bases => Some(ScrubStage::Logical),
            ScrubStage::Logical => Some(ScrubStage::Segments),
            ScrubStage::Segments => None,
        }
    }
}

/// Place where a scrub of a replica goes on. The default is the beginning.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct ScrubAt {
    pub stage: ScrubStage,
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

/// Result of a step of the scrub of what belongs to no replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MetadataScrubbed {
    /// Where to go on; `None`: all of it was read.
    pub next: Option<u64>,
    /// Copies that were bad, and are written again.
    pub bad: u32,
}

/// The scrub between its calls.
#[derive(Default)]
pub struct Scrubbing {
    /// The headers of a segment, as far as they were read.
    pub listing: Option<Listing>,
    /// How far that was when the present call began.
    reached: u32,
    /// Calls that lacked something, one after the other.
    lacked: u8,
}

impl Scrubbing {
    /// Begins a call, which may wait unless too many did already: others may take the room for what it
    /// needs each time.
    pub fn begin<D: Disk>(&mut self, core: &mut Core<D>, owner: Owner, may_wait: bool) {
        self.reached = self.listing.as_ref().map_or(0, Listing::reached);
        if may_wait && self.lacked < LACKED_MAX && core.disk.may_lack() {
            core.fetches.begin(owner, 0);
        }
    }

    /// Ends a call: `Pending` where it lacked something.
    pub fn end<D: Disk>(&mut self, core: &mut Core<D>) -> Result<(), StoreError> {
        let Some(ticket) = core.fetches.end() else {
            self.lacked = 0;
            return Ok(());
        };
        let goes_on = self.listing.as_ref().is_some_and(|listing| listing.reached() > self.reached);
        self.lacked = if goes_on { 1 } else { self.lacked + 1 };
        Err(StoreError::Pending(ticket))
    }
}

/// Scrubs a leaf, some entries or a segment. Returns where to go on. `listing`: the
/// headers of the segment that calls before have read. `reads_bases`: some base has no other reader
/// of it.
pub fn scrub_part<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    mut at: ScrubAt,
    reads_bases: bool,
    done: &mut Scrubbed,
    listing: &mut Option<Listing>,
) -> Result<Option<ScrubAt>, StoreError> {
    done.read_bytes += PART_BYTES;
    if let ScrubStage::Snapshot(from) = at.stage {
        let mut lsns = replica.folded.snapshots.iter().map(|s| s.info.lsn.0);
        match lsns.find(|lsn| *lsn >= from) {
            Some(lsn) if lsn == from => {}
            // The one before was read to its end, or is gone.
            Some(lsn) => at = ScrubAt { stage: ScrubStage::Snapshot(lsn), cursor: 0 },
            None => at = ScrubAt { stage: ScrubStage::Bases, cursor: 0 },
        }
    }
    let next = match at.stage {
        ScrubStage::Log => scrub_entries(replica, core, at.cursor, done)?,
        ScrubStage::Map => scrub_leaf(replica, core, None, at.cursor, done)?,
        ScrubStage::Snapshot(lsn) => scrub_leaf(replica, core, Some(lsn), at.cursor, done)?,
        ScrubStage::Bases if !reads_bases => None,
        ScrubStage::Bases => scrub_bases(replica, core, at.cursor, done)?,
        ScrubStage::Logical => scrub_logical(replica, core, at.cursor, done)?,
        ScrubStage::Segments => scrub_segment(replica, core, at.cursor, done, listing)?,
    };
    Ok(match next {
        Some(cursor) => Some(ScrubAt { cursor, ..at }),
        None => at.stage.next().map(|stage| ScrubAt { stage, cursor: 0 }),
    })
}

/// The next leaf of the snapshot of this LSN or of the folded map, without what an older view showed.
fn scrub_leaf<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    lsn: Option<u64>,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    let views = &replica.folded.snapshots;
    let is_folded = lsn.is_none();
    // The number of snapshots that are older than this view.
    let older = lsn.and_then(|lsn| views.iter().position(|s| s.info.lsn.0 == lsn));
    let older = older.unwrap_or(views.len());
    let root = views.get(older).map_or(replica.folded.root, |s| s.root);
    let snapshot = views.get(older).map(|s| s.info.id);
    let view = snapshot.map_or(ReadView::Live, ReadView::Snapshot);
    let from = older.checked_sub(1).and_then(|s| views.get(s)).map_or(0, |s| s.info.lsn.0);
    let Some(part) = tree::next_part(&mut replica.io(core), root, from, cursor)? else {
        return Ok(None);
    };
    let (start, end) = part.range();
    match part {
        Part::Hole { .. } => {}
        Part::Damaged { newest, .. } => {
            let (start, known) = (start.max(cursor), core.faults.bad.len());
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
            let nodes = may_lack(scrub_nodes(replica, core, root, start, cursor, done))?;
            replica.find(core, &Source::Root(root), start, LEAF_BLOCKS as u32)?;
            core.forget_found();
            let (mut slots, known) = (Vec::new(), core.faults.bad.len());
            let blocks = replica.slots(core, view, start, Lsn(from), true, &mut slots);
            nodes.and(may_lack(blocks)?)?;
            done.read_bytes += (slots.len() * BLOCK_SIZE) as u64;
            match is_folded {
                true => leave_overwritten(replica, core, known)?,
                false => note_live_too(replica, core, known)?,
            }
        }
    }
    Ok(Some(end))
}

/// The next leaf of the bases that a clone shows, where nobody else reads one of them. What is bad of
/// them is asked for as the clone's own.
fn scrub_bases<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    let size = replica.head.volume_blocks;
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
    let path: Vec<_> = path.into_iter().filter(first_seen).collect();
    let rotten = rotten_nodes(core, &path)?;
    done.read_bytes += path.iter().map(|(.., node)| u64::from(node.length)).sum::<u64>();
    waits_no_more(core, &rotten);
    for (level, base, node) in rotten {
        if !cleaner::is_blocked(replica) && replica.io(core).load(level, &node)?.is_some() {
            done.headers += 1;
            replica.maintenance.dirty = true;
            let change = Change::Renew { place: node.place, level, newest: node.newest };
            cleaner::renew(replica, core, &[Edit { lba: base, blocks: 1, change }])?;
        }
    }
    Ok(())
}

/// Ends a call that may wait, and lacked nothing, where nodes are to be written anew: other views may
/// lead to them by nodes that are not at hand, and what has begun to change must come to its end.
fn waits_no_more<D>(core: &mut Core<D>, rotten: &[(u8, u64, NodeRef)]) {
    if !rotten.is_empty() {
        core.fetches.end();
    }
}

/// Nodes of these that are bad on media.
fn rotten_nodes<D: Disk>(
    core: &mut Core<D>,
    nodes: &[(u8, u64, NodeRef)],
) -> Result<Vec<(u8, u64, NodeRef)>, StoreError> {
    let (mut rotten, mut lacking) = (Vec::new(), Ok(()));
    for (level, base, node) in nodes {
        let mut is_whole = true;
        let read = core.is_whole_on_media(*level, node).map(|found| is_whole = found);
        lacking = lacking.and(may_lack(read)?);
        if !is_whole {
            rotten.push((*level, *base, *node));
        }
    }
    lacking.map(|()| rotten)
}

/// Reads blocks from the media, and where they cannot be read together each by itself. Returns which
/// of them were read. `is_expected`: whether these are the bytes of the block of this number.
fn read_each<D: Disk>(
    core: &mut Core<D>,
    place: u64,
    bytes: &mut [u8],
    is_expected: &dyn Fn(usize, &[u8]) -> bool,
) -> Result<Vec<bool>, StoreError> {
    core.disk.forget_cached(place * BLOCK_SIZE as u64, bytes.len() as u64);
    let are_expected =
        |bytes: &[u8]| bytes.chunks(BLOCK_SIZE).enumerate().all(|(i, block)| is_expected(i, block));
    match core.read_beside(place, bytes, &are_expected) {
        Ok(()) => return Ok(vec![true; bytes.len() / BLOCK_SIZE]),
        Err(lacking @ StoreError::Pending(_)) => return Err(lacking),
        Err(_) => {}
    }
    let (mut readable, mut lacking) = (Vec::new(), Ok(()));
    for (i, chunk) in bytes.chunks_mut(BLOCK_SIZE).enumerate() {
        let is_expected = |bytes: &[u8]| is_expected(i, bytes);
        match may_lack(core.read_beside(place + i as u64, chunk, &is_expected)) {
            Ok(read) => {
                lacking = lacking.and(read);
                readable.push(true);
            }
            Err(_) => readable.push(false),
        }
    }
    lacking.map(|()| readable)
}

/// The first entries of the log from this LSN on that have data.
fn scrub_entries<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    cursor: u64,
    done: &mut Scrubbed,
) -> Result<Option<u64>, StoreError> {
    let first = cursor.max(replica.log.first_lsn());
    let (mut bytes, mut lacking, mut next) = (0, Ok(()), None);
    let mut found = 0;
    for lsn in first..replica.log.next_lsn() {
        let Some(record) = replica.log.get(lsn).filter(|r| r.place != 0).copied() else { continue };
        if found == ENTRIES_MAX || bytes > ENTRIES_BYTES {
            break;
        }
        bytes += record.blocks as usize * BLOCK_SIZE;
        found += 1;
        next = Some(lsn + 1);
        lacking = lacking.and(may_lack(scrub_entry(replica, core, lsn, &record))?);
    }
    lacking?;
    done.read_bytes += bytes as u64;
    Ok(next)
}

fn scrub_entry<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    lsn: u64,
    record: &LogRecord,
) -> Result<(), StoreError> {
    let crcs: Vec<u32> = replica.log.crcs(record).collect();
    let mut bytes = vec![0; crcs.len() * BLOCK_SIZE];
    let is_expected = |i: usize, bytes: &[u8]| crcs.get(i) == Some(&crc32c(bytes));
    let readable = read_each(core, record.place, &mut bytes, &is_expected)?;
    for (i, (chunk, crc)) in bytes.chunks(BLOCK_SIZE).zip(crcs).enumerate() {
        if readable[i] && crc32c(chunk) == crc {
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
    Ok(())
}

/// The headers of the first segment from this unit on.
fn scrub_segment<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    cursor: u64,
    done: &mut Scrubbed,
    listing: &mut Option<Listing>,
) -> Result<Option<u64>, StoreError> {
    let Ok(from) = u32::try_from(cursor) else { return Ok(None) };
    let Some(state) = replica.family.segments.next_from(from) else { return Ok(None) };
    let mut listed = match listing.take().filter(|listing| listing.is_of_former(&state)) {
        Some(listed) => listed,
        None => {
            let page = state.unit / PAGE_UNITS;
            let begins_page = cursor == 0 || (from - 1) / PAGE_UNITS < page;
            scrub_first_blocks(replica, core, &state, begins_page.then_some(page), done)?;
            Listing::of(core, &replica.family, state)
        }
    };
    // The open segments' ends move; a batch is in them once its write returned.
    let walked = listed.go_on(core);
    if let Err(lacking @ StoreError::Pending(_)) = walked {
        *listing = Some(listed);
        return Err(lacking);
    }
    let is_whole = walked?;
    done.read_bytes += listed.header_blocks * BLOCK_SIZE as u64;
    if !is_whole {
        done.headers += 1;
        replica.family.segments.set_aside(state.unit);
        replica.maintenance.fold_wanted |= state.last_index >= checkpoint::log_start(replica).index;
    }
    Ok(Some(u64::from(state.unit) + 1))
}

/// The header of a segment, and the nodes of the table of segments that lead to a page. Memory has
/// what a bad one says.
fn scrub_first_blocks<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    state: &SegmentState,
    page: Option<u32>,
    done: &mut Scrubbed,
) -> Result<(), StoreError> {
    let mut nodes = Vec::new();
    if let Some(page) = page {
        replica.io(core).flush()?;
        let (root, unit) = (replica.family.segments.recorded.root, u64::from(page * PAGE_UNITS));
        nodes = tree::path(&mut replica.io(core), root, unit)?;
    }
    let (start, guid) = (core.superblock.unit_start(state.unit), replica.identity.guid);
    let (mut header, mut is_read) = (vec![0; BLOCK_SIZE], false);
    let expected = segment_header(&core.superblock, guid, state);
    let is_expected = |_: usize, bytes: &[u8]| bytes == &expected[..];
    let read = read_each(core, start, &mut header, &is_expected);
    let read = read.map(|readable| is_read = readable[0]);
    let lacking = may_lack(read)?;
    let mut rotten = Vec::new();
    lacking.and(may_lack(rotten_nodes(core, &nodes).map(|found| rotten = found))?)?;
    done.read_bytes += nodes.iter().map(|(.., node)| u64::from(node.length)).sum::<u64>();
    if let (Some(page), false) = (page, rotten.is_empty()) {
        done.headers += rotten.len() as u32;
        replica.family.segments.recorded.write_again(page);
        replica.maintenance.dirty = true;
    }
    let found = decode_header(&core.superblock, guid, state.unit, &header).filter(|_| is_read);
    let says = |s: &SegmentState| (s.units, s.stream, s.sequence);
    if found.is_none_or(|found| says(&found) != says(state)) {
        core.write(start, &[std::io::IoSlice::new(&expected)])?;
        core.tickets.request();
        done.headers += 1;
    }
    Ok(())
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
    let first_seen = |(_, base, node): &(u8, u64, NodeRef)| *base >= cursor && node.is_possible();
    let path: Vec<_> = path.into_iter().filter(first_seen).collect();
    let rotten = rotten_nodes(core, &path)?;
    done.read_bytes += path.iter().map(|(.., node)| u64::from(node.length)).sum::<u64>();
    waits_no_more(core, &rotten);
    for (level, base, node) in rotten {
        done.headers += 1;
        replica.maintenance.dirty = true;
        if !cleaner::is_blocked(replica) && replica.io(core).load(level, &node)?.is_some() {
            let change = Change::Renew { place: node.place, level, newest: node.newest };
            logical::update_logical(replica, core, &[Edit { lba: base, blocks: 1, change }], &[])?;
        }
    }
    Ok(Some(part.range().1))
}

/// A part of what belongs to no replica: both copies of the superblock first, then those of the
/// metadata ring. `at`: the copy of the ring in the upper half, and the block in it.
pub fn scrub_metadata<D: Disk>(
    core: &mut Core<D>,
    at: Option<u64>,
) -> Result<MetadataScrubbed, StoreError> {
    core.check_usable()?;
    let Some(at) = at else {
        let (expected, mut bad, mut lacking) = (core.superblock.encode(), 0, Ok(()));
        for block in core.superblock.places() {
            let mut bytes = vec![0; BLOCK_SIZE];
            let read = read_each(core, block, &mut bytes, &|_, bytes| bytes == &expected[..]);
            let mut is_good = true;
            let read = read.map(|readable| is_good = readable[0] && bytes == expected);
            lacking = lacking.and(may_lack(read)?);
            if !is_good {
                // It may have been written since this was read: it is read once more.
                core.disk.forget_cached(block * BLOCK_SIZE as u64, BLOCK_SIZE as u64);
                is_good = core.read(block, &mut bytes).is_ok() && bytes == expected;
            }
            bad += u32::from(!is_good);
        }
        lacking?;
        if bad > 0 {
            core.superblock.write(&core.disk)?;
            core.tickets.request();
        }
        return Ok(MetadataScrubbed { next: Some(0), bad });
    };
    let (copy, first) = ((at >> 32) as usize, at as u32);
    let Some((place, blocks)) = core.ring.used(copy, first, RING_BLOCKS) else {
        let next = (copy == 0).then_some(1 << 32);
        return Ok(MetadataScrubbed { next, bad: 0 });
    };
    let mut bytes = vec![0; blocks as usize * BLOCK_SIZE];
    // What looks bad of the ring is read once more below.
    let readable = read_each(core, place, &mut bytes, &|_, _| true)?;
    let mut bad = 0;
    for ((index, chunk), is_read) in (first..).zip(bytes.chunks(BLOCK_SIZE)).zip(readable) {
        // The ring may have been written since this was read: what looks bad is read once more.
        let is_good = is_read && core.ring.is_block(index, chunk);
        bad += u32::from(!is_good && !core.ring.is_good_copy(&core.disk, copy, index));
    }
    if bad > 0 {
        core.restate()?;
        core.tickets.request();
    }
    Ok(MetadataScrubbed { next: Some(at + u64::from(blocks)), bad })
}
