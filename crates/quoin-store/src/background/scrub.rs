//! The scrub: everything that a pool holds is read from its media and compared with its checksums,
//! and what is bad is mended, from here where it can be made again, from a peer otherwise.
//!
//! | what | bad: |
//! |---|---|
//! | superblock, metadata ring | written again from memory |
//! | a segment's header | written again: it follows from the metadata |
//! | a block of a view or of the log | asked of a peer, the same version only ([`Replica::repair`]) |
//! | a node of the map | its stretch is asked of a peer ([`Replica::mend`]) |
//! | a batch's header | the log above the map is folded, so that no recovery needs it; of a segment that is closed it costs the space until the blocks in it die |
//!
//! **Mending a stretch.** The base is the map as of its LSN F ≤ stable. A peer's live slot of
//! version v ≤ F, read at a position that this replica has reached too, is what the base held:
//! nothing touched the block from v to that position (a Revert is a write like others). A slot
//! of a later version lies in this replica's own log, which answers for it; what the base held
//! under it is unknown, stays marked as lost and is replaced by the next fold. So nothing is ever
//! guessed, and a mended stretch shows each block as it was or not at all.

use quoin_replication::replica::store::StoreError;
use quoin_types::message::{Content, ReadView, Slot};
use quoin_types::{BLOCK_SIZE, Lsn, ReplicaGuid, crc32c};

use crate::background::cleaner::walk;
use crate::background::relocation::MovedBlock;
use crate::clones::lookup::first_of;
use crate::core::{BadBlock, Core};
use crate::disk::Disk;
use crate::format::checkpoint::SegmentState;
use crate::format::node::{BAD_PLACE, BlockAt, FANOUT, LEAF_BLOCKS, LOST_PLACE, NodeRef, Root};
use crate::format::segment::{decode_header, segment_header};
use crate::map::tree::{self, Change, Edit, Nodes, Part};
use crate::pool::Pool;
use crate::replica::{Replica, Source};
use crate::space::segment_table::PAGE_UNITS;
use crate::testing::model::{push_slot, without_bytes};

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

impl<D: Disk> Pool<D> {
    /// Reads about `budget_bytes` of a replica from its media; bad blocks come with
    /// [`Pool::take_bad_blocks`].
    pub fn scrub(
        &mut self,
        guid: ReplicaGuid,
        at: ScrubAt,
        budget_bytes: u64,
    ) -> Result<Scrubbed, StoreError> {
        let mut done = Scrubbed { next: Some(at), ..Scrubbed::default() };
        self.touch(guid);
        let Some(replica) = self.replicas.get_mut(&guid) else {
            return Ok(Scrubbed::default());
        };
        self.core.check_usable()?;
        while done.read_bytes < budget_bytes.max(1)
            && let Some(at) = done.next
        {
            done.next = replica.scrub_part(&mut self.core, at, &mut done)?;
        }
        Ok(done)
    }

    /// Compares both copies of superblock and metadata ring with what they must say, and writes
    /// them again where one does not; how many were bad.
    pub fn scrub_metadata(&mut self) -> Result<u32, StoreError> {
        let core = &mut self.core;
        core.check_usable()?;
        let mut bad = core.superblock.bad_copies(&core.disk);
        if bad > 0 {
            core.superblock.write(&core.disk)?;
        }
        let rotten = core.ring.bad_copies(&core.disk);
        if rotten > 0 {
            bad += rotten;
            core.restate()?;
        }
        if bad > 0 {
            core.tickets.request();
        }
        Ok(bad)
    }
}

impl Replica {
    /// Scrubs a leaf, an entry or a segment. Returns where to go on.
    fn scrub_part<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        at: ScrubAt,
        done: &mut Scrubbed,
    ) -> Result<Option<ScrubAt>, StoreError> {
        let views = 1 + self.folded.snapshots.len() as u32;
        let on = |cursor| Some(ScrubAt { cursor, ..at });
        let next_stage = Some(ScrubAt { stage: at.stage.saturating_add(1), cursor: 0 });
        done.read_bytes += PART_BYTES;
        Ok(match at.stage {
            0 => self.scrub_entry(core, at.cursor, done)?.map_or(next_stage, on),
            view if view <= views => self.scrub_leaf(core, at, done)?.map_or(next_stage, on),
            stage if stage == views + 1 => {
                self.scrub_bases(core, at.cursor, done)?.map_or(next_stage, on)
            }
            stage if stage == views + 2 => {
                self.scrub_logical(core, at.cursor, done)?.map_or(next_stage, on)
            }
            stage if stage == views + 3 => self.scrub_segment(core, at.cursor, done)?.and_then(on),
            _ => None,
        })
    }

    /// The next leaf of a snapshot or of the folded map, without what an older view showed.
    fn scrub_leaf<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        at: ScrubAt,
        done: &mut Scrubbed,
    ) -> Result<Option<u64>, StoreError> {
        let views = &self.folded.snapshots;
        let is_folded = at.stage == 1;
        // The number of snapshots that are older than this view.
        let older = (at.stage as usize).checked_sub(2).unwrap_or(views.len());
        let root = views.get(older).map_or(self.folded.root, |s| s.root);
        let snapshot = views.get(older).map(|s| s.info.id);
        let view = snapshot.map_or(ReadView::Live, ReadView::Snapshot);
        let from = older.checked_sub(1).and_then(|s| views.get(s)).map_or(0, |s| s.info.lsn.0);
        let Some(part) = tree::next_part(&mut self.io(core), root, from, at.cursor)? else {
            return Ok(None);
        };
        let (start, end) = part.range();
        match part {
            Part::Hole { .. } => {}
            Part::Damaged { newest, .. } => {
                let (start, known) = (start.max(at.cursor), core.faults.bad.len());
                let many = (FANOUT * LEAF_BLOCKS) as u64;
                for lba in (start..end.min(start + many)).step_by(LEAF_BLOCKS) {
                    let bad = BadBlock::stretch(self.identity.guid, lba, Lsn(newest));
                    core.note_bad(bad.of(snapshot));
                }
                match is_folded {
                    true => self.leave_overwritten(core, known)?,
                    false => self.note_live_too(core, known)?,
                }
                return Ok(Some(end.min(start + many)));
            }
            Part::Leaf { .. } => {
                self.scrub_nodes(core, root, start, at.cursor, done)?;
                self.find(core, &Source::Root(root), start, LEAF_BLOCKS as u32)?;
                core.forget_found();
                let (mut slots, known) = (Vec::new(), core.faults.bad.len());
                self.slots(core, view, start, Lsn(from), true, &mut slots)?;
                done.read_bytes += (slots.len() * BLOCK_SIZE) as u64;
                match is_folded {
                    true => self.leave_overwritten(core, known)?,
                    false => self.note_live_too(core, known)?,
                }
            }
        }
        Ok(Some(end))
    }

    /// The next leaf of the bases that a clone shows, where their replicas are gone and nobody else
    /// reads them. What is bad of them is asked for as the clone's own.
    fn scrub_bases<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        cursor: u64,
        done: &mut Scrubbed,
    ) -> Result<Option<u64>, StoreError> {
        let size = self.head.volume_blocks;
        if !core.bases.line(self.family.relatives.base).any(|base| base.is_left) {
            return Ok(None);
        }
        let parts = self.io(core).next_of_bases(0, cursor)?;
        let Some((start, hole_end)) = first_of(&parts, cursor).filter(|(start, _)| *start < size)
        else {
            return Ok(None);
        };
        if let Some(end) = hole_end {
            return Ok(Some(end));
        }
        let blocks = (LEAF_BLOCKS as u64 - start % LEAF_BLOCKS as u64).min(size - start);
        self.find(core, &Source::Live, start, blocks as u32)?;
        core.forget_found();
        let mut slots = Vec::new();
        self.slots(core, ReadView::Live, start, Lsn::ZERO, true, &mut slots)?;
        done.read_bytes += (slots.len() * BLOCK_SIZE) as u64;
        Ok(Some(start + blocks))
    }

    /// What a snapshot and the live view share is bad in both. A block is mended where it lies, so
    /// its live copy is asked for, which any target knows; a stretch of the map is mended in each.
    fn note_live_too<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        known: usize,
    ) -> Result<(), StoreError> {
        for bad in core.faults.bad.split_off(known.min(core.faults.bad.len())) {
            let Some(id) = bad.snapshot.filter(|_| bad.lba < self.head.volume_blocks) else {
                core.note_bad(bad);
                continue;
            };
            self.find(core, &Source::Live, bad.lba, 1)?;
            let live = core.buffers.found.first().copied();
            let is_lost = |b: BlockAt| matches!(b.place, BAD_PLACE | LOST_PLACE);
            if bad.blocks > 1 {
                core.note_bad(bad);
                if live.is_some_and(is_lost) {
                    core.note_bad(bad.of(None));
                }
                continue;
            }
            let source = self.source(ReadView::Snapshot(id));
            let Some(source) = source else { continue };
            self.find(core, &source, bad.lba, 1)?;
            let is_shared = live.is_some() && core.buffers.found.first().copied() == live;
            core.note_bad(bad.of(Some(id).filter(|_| !is_shared)));
        }
        Ok(())
    }

    /// Forgets bad blocks of the folded map that the log has overwritten. They need no repair, and
    /// could get none: the next fold drops them.
    fn leave_overwritten<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        known: usize,
    ) -> Result<(), StoreError> {
        let folded = Source::Root(self.folded.root);
        for bad in core.faults.bad.split_off(known.min(core.faults.bad.len())) {
            let blocks = u64::from(bad.blocks).min(self.head.volume_blocks.saturating_sub(bad.lba));
            self.find(core, &folded, bad.lba, blocks as u32)?;
            let before = core.buffers.found.clone();
            self.find(core, &Source::Live, bad.lba, blocks as u32)?;
            let stays = |(old, new): (&BlockAt, &BlockAt)| {
                let is_bad = bad.blocks == 1 || matches!(old.place, BAD_PLACE | LOST_PLACE);
                is_bad && (old.place, old.version) == (new.place, new.version)
            };
            if before.iter().zip(&core.buffers.found).any(stays) {
                core.note_bad(bad);
            } else {
                self.maintenance.fold_wanted = true;
            }
        }
        Ok(())
    }

    /// The nodes that lead to a leaf, those that the scrub comes to first. One that is bad on
    /// media and good in the cache is written again, wherever it is shared.
    fn scrub_nodes<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        root: Root,
        lba: u64,
        cursor: u64,
        done: &mut Scrubbed,
    ) -> Result<(), StoreError> {
        // Nodes that wait to be written are not on media yet.
        self.io(core).flush()?;
        let path = tree::path(&mut self.io(core), root, lba)?;
        // Nodes that are known to be lost are reported with the blocks under them.
        let first_seen =
            |(_, base, node): &(u8, u64, NodeRef)| *base >= cursor && node.is_possible();
        for (level, base, node) in path.into_iter().filter(first_seen) {
            done.read_bytes += u64::from(node.length);
            let rotten = !core.is_whole_on_media(level, &node)?;
            if rotten && self.job_is_free() && self.io(core).load(level, &node)?.is_some() {
                done.headers += 1;
                let change = Change::Renew { place: node.place, level, newest: node.newest };
                self.renew(core, &[Edit { lba: base, blocks: 1, change }])?;
                self.maintenance.dirty = true;
            }
        }
        Ok(())
    }

    /// Whether the maps may be changed beside what background work has begun.
    fn job_is_free(&self) -> bool {
        self.maintenance.checkpoint.is_none() && !self.is_prepared()
    }

    /// The first entry of the log from this LSN on that has data.
    fn scrub_entry<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        cursor: u64,
        done: &mut Scrubbed,
    ) -> Result<Option<u64>, StoreError> {
        let first = cursor.max(self.log.first_lsn());
        let found = (first..self.log.next_lsn())
            .find_map(|lsn| Some((lsn, *self.log.get(lsn).filter(|r| r.place != 0)?)));
        let Some((lsn, record)) = found else { return Ok(None) };
        let crcs: Vec<u32> = self.log.crcs(&record).collect();
        let mut bytes = vec![0; crcs.len() * BLOCK_SIZE];
        core.disk.forget_cached(record.place * BLOCK_SIZE as u64, bytes.len() as u64);
        let whole = core.read(record.place, &mut bytes).is_ok();
        for (i, (chunk, crc)) in bytes.chunks_mut(BLOCK_SIZE).zip(crcs).enumerate() {
            let read = whole || core.read(record.place + i as u64, chunk).is_ok();
            if read && crc32c(chunk) == crc {
                continue;
            }
            let lba = record.lba + i as u64;
            self.find(core, &Source::Live, lba, 1)?;
            if core.buffers.found.first().is_some_and(|block| block.version == lsn) {
                core.note_bad(BadBlock::block(self.identity.guid, lba, Lsn(lsn)));
            } else {
                // Overwritten since: of use only to one that lags, who can ask others.
                self.maintenance.fold_wanted = true;
            }
        }
        done.read_bytes += bytes.len() as u64;
        Ok(Some(lsn + 1))
    }

    /// The headers of the first segment from this unit on.
    fn scrub_segment<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        cursor: u64,
        done: &mut Scrubbed,
    ) -> Result<Option<u64>, StoreError> {
        let Ok(from) = u32::try_from(cursor) else { return Ok(None) };
        let Some(state) = self.family.segments.next_from(from) else { return Ok(None) };
        let page = state.unit / PAGE_UNITS;
        if cursor == 0 || (from - 1) / PAGE_UNITS < page {
            self.scrub_table(core, page, done)?;
        }
        let mut header = vec![0; BLOCK_SIZE];
        let start = core.superblock.unit_start(state.unit);
        core.disk.forget_cached(start * BLOCK_SIZE as u64, BLOCK_SIZE as u64);
        let guid = self.identity.guid;
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
        let whole = walk(core, &state, self.family.guid_hash, |_, batch| {
            done.read_bytes += u64::from(batch.header_blocks) * BLOCK_SIZE as u64;
        })?;
        if !whole {
            done.headers += 1;
            self.family.segments.set_aside(state.unit);
            self.maintenance.fold_wanted |= state.last_index >= self.log_start().index;
        }
        Ok(Some(u64::from(state.unit) + 1))
    }

    /// The nodes that lead to the next leaf of the map of moved blocks. One that is bad on media and
    /// good in the cache is written again. What a lost one named is bad where it is read.
    fn scrub_logical<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        cursor: u64,
        done: &mut Scrubbed,
    ) -> Result<Option<u64>, StoreError> {
        self.io(core).flush()?;
        let Some(part) = self.next_of_logical(core, cursor)? else { return Ok(None) };
        let root = core.logical_of(self.family.guid).root;
        let start = part.range().0.max(cursor);
        let path = tree::path(&mut self.io(core), root, start)?;
        for (level, base, node) in path.into_iter().filter(|(_, _, node)| node.is_possible()) {
            if base < cursor {
                continue;
            }
            done.read_bytes += u64::from(node.length);
            if !core.is_whole_on_media(level, &node)? {
                done.headers += 1;
                if self.job_is_free() && self.io(core).load(level, &node)?.is_some() {
                    let change = Change::Renew { place: node.place, level, newest: node.newest };
                    self.update_logical(core, &[Edit { lba: base, blocks: 1, change }], &[])?;
                    self.maintenance.dirty = true;
                }
            }
        }
        Ok(Some(part.range().1))
    }

    /// The nodes of the table of segments that lead to a page. Memory has what a bad one says.
    fn scrub_table<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        page: u32,
        done: &mut Scrubbed,
    ) -> Result<(), StoreError> {
        self.io(core).flush()?;
        let (root, unit) = (self.family.segments.recorded.root, u64::from(page * PAGE_UNITS));
        for (level, _, node) in tree::path(&mut self.io(core), root, unit)? {
            done.read_bytes += u64::from(node.length);
            if !core.is_whole_on_media(level, &node)? {
                done.headers += 1;
                self.family.segments.recorded.write_again(page);
                self.maintenance.dirty = true;
            }
        }
        Ok(())
    }

    /// Compares blocks of a view with their checksums on media: `ReplicaStore::verify`.
    #[allow(clippy::too_many_arguments)]
    pub fn verify<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: ReadView,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let size = self.view_size(view).ok_or(StoreError::Rule("no such view"))?;
        let end = lba.checked_add(u64::from(blocks)).filter(|end| *end <= size);
        let end = end.ok_or(StoreError::Rule("a verification outside the volume"))?;
        let source = self.source(view).ok_or(StoreError::Rule("no such view"))?;
        let known = core.faults.bad.len();
        let (mut at, mut left) = (lba, u64::from(bytes_max));
        while at < end && (left > 0 || at == lba) {
            let leaf = LEAF_BLOCKS as u64;
            let count = (leaf - at % leaf).min(end - at).min(left.div_ceil(BLOCK_SIZE as u64));
            let count = count.max(1);
            self.find(core, &source, at, count as u32)?;
            // The leaf may have been read too.
            left = left.saturating_sub(BLOCK_SIZE as u64);
            core.forget_found();
            let mut slots = Vec::new();
            self.slots(core, view, at, Lsn::ZERO, true, &mut slots)?;
            for mut slot in slots {
                if slot.content != Content::Hole {
                    left = left.saturating_sub(u64::from(slot.blocks) * BLOCK_SIZE as u64);
                }
                without_bytes(&mut slot);
                push_slot(out, slot);
            }
            at += count;
        }
        if !note {
            core.faults.bad.truncate(known);
        }
        Ok(())
    }

    /// Rebuilds what is lost of the map of a stretch, by the module's rule.
    pub fn mend<D: Disk>(
        &mut self,
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
                let Some(at) = self.folded.snapshots.iter().position(|s| s.info.id == id) else {
                    return Ok(false);
                };
                Some(at)
            }
            ReadView::Live | ReadView::Base => None,
        };
        let snapshot = kept.map(|at| &self.folded.snapshots[at]);
        let size = snapshot.map_or(self.head.volume_blocks, |s| s.info.blocks);
        let root = snapshot.map_or(self.folded.root, |s| s.root);
        let base = snapshot.map_or(self.folded.head.position.lsn, |s| s.info.lsn);
        let id = snapshot.map(|s| s.info.id);
        if !self.job_is_free()
            || blocks > LEAF_BLOCKS as u64
            || lba.checked_add(blocks).is_none_or(|end| end > size)
        {
            return Ok(false);
        }
        self.find(core, &Source::Root(root), lba, blocks as u32)?;
        let lost: Vec<bool> =
            core.buffers.found.iter().map(|b| matches!(b.place, BAD_PLACE | LOST_PLACE)).collect();
        if !lost.contains(&true) {
            // A fold dropped what was lost, since the log had overwritten it.
            return Ok(true);
        }
        if slots.iter().any(|slot| slot.version > base) {
            // What the log says of these blocks may rest on what is lost under them.
            self.maintenance.fold_wanted = true;
        }
        let (mut edits, mut moved) = (Vec::new(), Vec::new());
        let each =
            slots.iter().flat_map(|s| (s.lba..s.lba + u64::from(s.blocks)).map(move |l| (l, s)));
        for ((lba, slot), _) in
            each.zip(&lost).filter(|((_, slot), lost)| **lost && slot.version <= base)
        {
            let version = slot.version.0;
            let mut change = Change::Hole { version };
            if let Content::Data { crc, data } = &slot.content {
                let crc_at = moved.len() as u32;
                change = Change::Data { version, place: 0, crc_at };
                moved.push(MovedBlock { lba, version, crc: *crc, name: 0, bytes: data.clone() });
            }
            edits.push(Edit { lba, blocks: 1, change });
        }
        let places = self.write_moved(core, &moved, self.naming(), true)?;
        for edit in &mut edits {
            if let Change::Data { place, crc_at, .. } = &mut edit.change {
                *place = places.get(*crc_at as usize).copied().unwrap_or(LOST_PLACE);
            }
        }
        let crcs: Vec<u32> = moved.iter().map(|m| m.crc).collect();
        let mut io = self.io(core);
        io.gives_up = true;
        let mended = tree::update(&mut io, root, &edits, &crcs, None)?;
        match kept {
            Some(at) => self.folded.snapshots[at].root = mended,
            None => self.folded.root = mended,
        }
        self.maintenance.dirty = true;
        let guid = self.identity.guid;
        core.faults
            .bad
            .retain(|b| (b.replica, b.lba, b.snapshot) != (guid, lba, id) || b.blocks == 1);
        Ok(true)
    }
}
