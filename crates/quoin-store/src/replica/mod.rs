//! A replica: its folded map, the log above it, and how the two answer together.

pub mod frozen;

use std::collections::BTreeMap;
use std::io::IoSlice;

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, StoreError, StoreState};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{Content, ReadView, Slot, SnapshotInfo};
use quoin_types::{BLOCK_SIZE, EntryKind, Epoch, Lsn, crc32c, mutant};

use crate::background::maintenance::{Maintenance, Quarantine};
use crate::background::recount::LiveCount;
use crate::core::{BadBlock, Core, NodeBatch, NodeIo, Tree};
use crate::disk::Disk;
use crate::disk::read_buffer::ReadBuffer;
use crate::format::batch::{
    BatchEntry, BatchHeader, HeaderWriter, Stream, batch_blocks_max, entry_length,
};
use crate::format::checkpoint::{LogStart, SnapshotState};
use crate::format::node::{BAD_PLACE, BlockAt, LOST_PLACE, Root};
use crate::format::record::Record;
use crate::log::history::Head;
use crate::log::memtable::Log;
use crate::log::memtable_tree::Memtable;
use crate::rebuild::shadow::Shadow;
use crate::replica::frozen::FrozenViews;
use crate::space::segments::Family;
use crate::testing::model::push_slot;

/// Header bytes that a batch may take; more entries become several batches.
const HEADER_BYTES_MAX: usize = 60 * BLOCK_SIZE;

/// A map with its history, as of an LSN ≤ stable.
#[derive(Clone, Default)]
pub struct Image {
    pub head: Head,
    pub root: Root,
    pub snapshots: Vec<SnapshotState>,
}

/// A view that a transfer holds on to.
#[derive(Clone)]
pub struct Pin {
    pub root: Root,
    pub head: Head,
}

/// The log above the folded map as one view of it.
#[derive(Clone, Default)]
pub struct Upper {
    /// Newest entries, on top of `lower`.
    pub memtable: Memtable,
    /// The folded map, or that of the snapshot which the last Revert went back to.
    pub lower: Root,
    /// Whether `lower` is a snapshot's.
    pub reverted: bool,
}

/// Where the next batch of the log goes on, and what of the log is not written out.
#[derive(Clone, Copy, Default)]
pub struct LogEnd {
    pub next_index: u64,
    /// The check of the batch before it.
    pub previous: u64,
    /// Offset and bytes of what was appended since writing out was begun.
    unwritten: (u64, u64),
}

impl LogEnd {
    /// Tells the disk to begin writing out, in stretches, so that a later sync finds little.
    fn write_out<D: Disk>(&mut self, core: &Core<D>, offset: u64, length: u64) {
        let (start, so_far) = self.unwritten;
        self.unwritten = match start + so_far == offset && so_far > 0 {
            true => (start, so_far + length),
            false => {
                if so_far > 0 {
                    core.disk.write_out(start, so_far);
                }
                (offset, length)
            }
        };
        if self.unwritten.1 >= core.options.write_out_bytes {
            core.disk.write_out(self.unwritten.0, self.unwritten.1);
            self.unwritten = (0, 0);
        }
    }
}

/// How far syncs of the log reach.
#[derive(Clone, Copy, Default)]
pub struct Synced {
    /// The last LSN that a finished sync covers.
    pub durable: Lsn,
    /// The last LSN that the sync under way covers.
    pub syncing: Lsn,
}

impl Synced {
    pub fn finish(&mut self) {
        self.durable = self.durable.max(self.syncing);
    }

    /// Entries after `keep` are no part of the log any more.
    pub fn cut(&mut self, keep: Lsn) {
        self.durable = self.durable.min(keep);
        self.syncing = self.syncing.min(keep);
    }
}

pub struct Replica {
    pub identity: ReplicaIdentity,
    pub meta: ReplicaMeta,
    pub folded: Image,
    /// State at the end of the log.
    pub head: Head,
    pub snapshots: Vec<SnapshotInfo>,
    pub stable: Lsn,
    pub log: Log,
    pub upper: Upper,
    pub frozen: FrozenViews,
    pub synced: Synced,
    pub family: Family,
    pub nodes: NodeBatch,
    pub end: LogEnd,
    pub pins: BTreeMap<u64, Pin>,
    pub shadow: Option<Shadow>,
    pub maintenance: Maintenance,
    pub quarantine: Quarantine,
    pub count: LiveCount,
    /// Entries of epochs before this one are owed to it: others hold them.
    pub owed_before: Epoch,
}

impl Replica {
    pub fn new(
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
        unit_blocks: u32,
    ) -> Self {
        let head = Head { volume_blocks: blocks, ..Head::default() };
        let folded = Image { head: head.clone(), ..Image::default() };
        Replica {
            family: Family::new(identity.guid, blocks, unit_blocks),
            identity,
            meta,
            folded,
            head,
            snapshots: Vec::new(),
            stable: Lsn::ZERO,
            log: Log::after(Lsn::ZERO),
            upper: Upper::default(),
            frozen: FrozenViews::default(),
            synced: Synced::default(),
            nodes: NodeBatch::default(),
            end: LogEnd::default(),
            pins: BTreeMap::new(),
            shadow: None,
            maintenance: Maintenance::default(),
            quarantine: Quarantine::default(),
            count: LiveCount::default(),
            owed_before: Epoch::ZERO,
        }
    }

    pub fn state(&self) -> StoreState {
        StoreState {
            position: self.head.position,
            chain: self.head.chain,
            stable: self.stable,
            base: self.folded.head.position.lsn,
            last_view: self.head.last_view.clone(),
            volume_blocks: self.head.volume_blocks,
        }
    }

    pub fn io<'a, D: Disk>(&'a mut self, core: &'a mut Core<D>) -> NodeIo<'a, D> {
        let kept_through = self.folded.snapshots.iter().map(|s| s.info.lsn.0).max().unwrap_or(0);
        NodeIo {
            core,
            family: &mut self.family,
            batch: &mut self.nodes,
            recount: self.count.job.as_mut(),
            kept_through,
            gives_up: false,
            tree: Tree::Map,
        }
    }

    // ---- append and truncate -------------------------------------------------------------

    pub fn append<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        entries: &[SharedEntry],
    ) -> Result<(), StoreError> {
        core.check_usable()?;
        self.head.check_append(self.snapshots.len(), entries)?;
        self.abandon_shadow();
        core.mark.change();
        core.tickets.written.add(self.identity.guid);
        let mut rest = entries;
        while !rest.is_empty() {
            let (trims, owed) = (core.allocator.takes_trims(), core.allocator.takes_owed());
            let has_reserve = |e: &SharedEntry| match e.kind {
                EntryKind::View(_) | EntryKind::DeleteSnapshot { .. } => true,
                EntryKind::Trim if trims => true,
                _ => owed && e.epoch < self.owed_before,
            };
            let room = self.family.room(&core.superblock, Stream::Log);
            let longest = batch_blocks_max(core.superblock.unit_blocks);
            let (count, blocks) = match fitting(rest, room.min(longest)) {
                (0, _) => fitting(rest, longest),
                fits => fits,
            };
            let (now, later) = rest.split_at(count.max(1));
            let first = now.iter().take_while(|e| has_reserve(e)).count();
            let from_reserve = first == now.len();
            match self.append_batch(core, now, blocks, from_reserve) {
                Err(StoreError::Full) if !from_reserve => {
                    // Entries that free space must not wait behind entries that need some.
                    if first > 0 {
                        self.append_batch(core, &now[..first], 0, true)?;
                    }
                    return Err(StoreError::Full);
                }
                done => done?,
            }
            rest = later;
        }
        Ok(())
    }

    fn append_batch<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        entries: &[SharedEntry],
        blocks: u32,
        from_reserve: bool,
    ) -> Result<(), StoreError> {
        let header_length: usize = crate::format::batch::HEADER_LENGTH
            + entries.iter().map(|e| entry_length(e.crcs.len(), payload(e).len())).sum::<usize>();
        let header_blocks = header_length.div_ceil(BLOCK_SIZE) as u32;
        let data_blocks: u32 = entries.iter().map(|e| e.crcs.len() as u32).sum();
        debug_assert!(blocks == 0 || blocks == header_blocks + data_blocks);
        let total = header_blocks + data_blocks;
        let guid_hash = self.family.guid_hash;
        // The caller follows the same rule (`ReplicaStore::append`): none of these entries is
        // reported as applied before it is durable.
        let waits = self.head.is_media();
        self.family.log_waits = waits;
        let before = self.family.open[Stream::Log as usize];
        let batch = &mut self.nodes;
        let segment = self.family.segment_for(core, batch, Stream::Log, total, from_reserve)?;
        let state = segment.state;
        let mut writer = HeaderWriter::new(&mut core.header);
        for entry in entries {
            let payload = payload(entry);
            let raw = BatchEntry {
                epoch: entry.epoch.0,
                lsn: entry.lsn.0,
                lba: entry.lba,
                blocks: entry.blocks,
                kind: entry.kind.code(),
                flags: u8::from(entry.fua),
                chain: entry.chain.0,
                payload: &payload,
                crcs: &[],
            };
            writer.entry(&raw, entry.crcs.iter().copied());
        }
        let check = writer.finish(&BatchHeader {
            stream: Stream::Log,
            sequence: state.sequence,
            index: self.end.next_index,
            previous: self.end.previous,
            guid_hash,
            watermark: self.stable.min(self.synced.durable).0,
            starts: core.superblock.starts,
            data_blocks,
            key: 0,
        });
        let start = core.superblock.unit_start(state.unit) + u64::from(state.used_blocks);
        let mut parts = reused(std::mem::take(&mut core.parts));
        parts.push(IoSlice::new(&core.header));
        parts.extend(entries.iter().filter(|e| !e.data.is_empty()).map(|e| IoSlice::new(&e.data)));
        let offset = start * BLOCK_SIZE as u64;
        let written = match waits {
            true => {
                let spare = segment.make_ready(&core.superblock, total) as usize * BLOCK_SIZE;
                core.disk.write_with_sync(offset, &parts, spare)
            }
            false => core.disk.write_at(offset, &parts),
        };
        core.parts = reused(parts);
        written.map_err(StoreError::Io)?;

        let last = entries.last().map_or(0, |e| e.lsn.0);
        segment.state.used_blocks += total;
        segment.state.live_bytes += u64::from(data_blocks) * BLOCK_SIZE as u64;
        segment.state.last_lsn = segment.state.last_lsn.max(last);
        segment.state.last_index = self.end.next_index;
        let log_start = LogStart {
            sequence: state.sequence,
            offset_blocks: state.used_blocks,
            index: self.end.next_index,
            previous: self.end.previous,
        };
        self.end.next_index += 1;
        self.end.previous = check;
        self.log.push_batch(last, log_start);
        if before != Some(state.unit) {
            // All of the log before may have been folded.
            self.family.forget_log_before(self.log_start().index);
        }
        let mut place = start + u64::from(header_blocks);
        for entry in entries {
            let at = if entry.crcs.is_empty() { 0 } else { place };
            self.apply(entry, at);
            place += entry.crcs.len() as u64;
        }
        if !waits {
            self.end.write_out(core, offset, u64::from(total) * BLOCK_SIZE as u64);
        }
        Ok(())
    }

    /// Takes an entry, whose data lie at `place`, into the log and everything that follows it.
    pub fn apply(&mut self, entry: &quoin_types::Entry, place: u64) {
        self.log.push(entry, place);
        self.head.apply(entry.position(), entry.chain, &entry.kind);
        apply_snapshots(&mut self.snapshots, entry.lsn, &entry.kind, self.head.volume_blocks);
        match &entry.kind {
            EntryKind::Write | EntryKind::Trim | EntryKind::Zero { .. } => {
                let end = entry.lba + u64::from(entry.blocks);
                self.upper.memtable.insert(entry.lba, end, entry.lsn.0);
            }
            EntryKind::Revert { .. } => self.upper = self.upper_at(entry.lsn),
            _ => {}
        }
    }

    pub fn truncate<D: Disk>(&mut self, core: &mut Core<D>, keep: Lsn) -> Result<(), StoreError> {
        core.check_usable()?;
        if keep < self.stable && !mutant::is("cut-below-stable") {
            return Err(StoreError::Rule("truncation below stable (StableNeverCut)"));
        }
        if keep > self.head.position.lsn {
            return Err(StoreError::Rule("truncation behind the end of the log"));
        }
        if keep == self.head.position.lsn {
            return Ok(());
        }
        let (guid, index) = (self.identity.guid, self.end.next_index);
        if !mutant::is("cut-not-recorded") {
            core.record(Record::Cut { guid, index, keep })?;
        }
        self.cut(core, keep);
        self.family.forget_log_before(self.log_start().index);
        Ok(())
    }

    /// Forgets the entries after `keep`, in memory.
    pub fn cut<D: Disk>(&mut self, core: &mut Core<D>, keep: Lsn) {
        for lsn in keep.0 + 1..self.log.next_lsn() {
            if let Some(record) = self.log.get(lsn).filter(|r| r.place != 0) {
                let bytes = u64::from(record.blocks) * BLOCK_SIZE as u64;
                self.family.sub_live(&core.superblock, record.place, bytes);
            }
        }
        self.log.cut_after(keep.0);
        self.frozen.clear();
        self.synced.cut(keep);
        self.replay_head();
        self.upper = self.upper_at(keep);
    }

    /// Makes `head` and `snapshots` from the folded state and the log.
    pub fn replay_head(&mut self) {
        self.head = self.folded.head.clone();
        self.snapshots = self.folded.snapshots.iter().map(|s| s.info).collect();
        for lsn in self.log.first_lsn()..self.log.next_lsn() {
            let Some(record) = self.log.get(lsn) else { continue };
            let (position, chain) = (record.position(lsn), quoin_types::Chain(record.chain));
            if record.has_range() {
                self.head.advance(position, chain);
                continue;
            }
            let kind = self.log.kind(lsn, record);
            self.head.apply(position, chain, &kind);
            let blocks = self.head.volume_blocks;
            apply_snapshots(&mut self.snapshots, Lsn(lsn), &kind, blocks);
        }
    }

    /// The view of the log's entries up to `lsn`.
    pub fn upper_at(&self, lsn: Lsn) -> Upper {
        let mut upper = Upper { lower: self.folded.root, ..Upper::default() };
        let mut first = self.log.first_lsn();
        // The last Revert decides what is below; what came before it does not matter.
        let revert = self.log.special_from(first).filter(|(l, _)| *l <= lsn.0);
        let revert = revert
            .filter_map(|(l, k)| match k {
                EntryKind::Revert { id } => Some((l, *id)),
                _ => None,
            })
            .last();
        if let Some((at, id)) = revert {
            let made =
                self.log.special_from(first).take_while(|(l, _)| *l < at).filter_map(|(l, k)| {
                    matches!(k, EntryKind::Snapshot { id: i, .. } if *i == id).then_some(l)
                });
            let folded = self.folded.snapshots.iter().find(|s| s.info.id == id);
            match (made.last(), folded) {
                (Some(made), _) => upper = self.upper_at(Lsn(made)),
                (None, Some(folded)) => {
                    upper = Upper { lower: folded.root, reverted: true, ..Upper::default() };
                }
                // Reverting to what does not exist changes nothing.
                (None, None) => upper = self.upper_at(Lsn(at - 1)),
            }
            first = at + 1;
        }
        for l in first..=lsn.0.min(self.log.next_lsn() - 1) {
            if let Some(record) = self.log.get(l).filter(|r| r.has_range()) {
                upper.memtable.insert(record.lba, record.end(), l);
            }
        }
        upper
    }

    // ---- read ----------------------------------------------------------------------------

    /// Resolves a view; its size in blocks comes with it.
    pub fn view_size(&mut self, view: ReadView) -> Option<u64> {
        match view {
            ReadView::Live => Some(self.head.volume_blocks),
            ReadView::Base => Some(self.folded.head.volume_blocks),
            ReadView::Snapshot(id) => {
                let info = *self.snapshots.iter().find(|s| s.id == id)?;
                let folded = self.folded.head.position.lsn;
                if info.lsn > folded && !self.frozen.renew(info.lsn, folded, self.folded.root) {
                    self.frozen.keep(info.lsn, folded, self.upper_at(info.lsn));
                }
                Some(info.blocks)
            }
        }
    }

    /// Fills `core.found` with what a view (resolved before) says of a range.
    pub fn find<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: &Source,
        lba: u64,
        blocks: u32,
    ) -> Result<(), StoreError> {
        let mut found = std::mem::take(&mut core.found);
        found.clear();
        found.resize(blocks as usize, BlockAt::default());
        let result = self.find_into(core, view, lba, &mut found);
        core.found = found;
        result
    }

    fn find_into<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: &Source,
        lba: u64,
        found: &mut [BlockAt],
    ) -> Result<(), StoreError> {
        let shadow = self.shadow.as_ref().and_then(|s| s.roots().next());
        let Replica { family, nodes: batch, upper, frozen, log, .. } = self;
        let (kept_through, recount, gives_up, tree) = (u64::MAX, None, false, Tree::Map);
        let mut io = NodeIo { core, family, batch, recount, kept_through, gives_up, tree };
        if let (Some(root), Source::Live) = (shadow, view)
            && mutant::is("increment-visible-before-the-flip")
        {
            return io.blocks(root, lba, found);
        }
        let upper = match view {
            Source::Root(root) => return io.blocks(*root, lba, found),
            Source::Live => &*upper,
            Source::Frozen(lsn) => frozen.get(*lsn).ok_or(StoreError::Rule("no such view"))?,
        };
        let (end, mut at) = (lba + found.len() as u64, lba);
        for (from, to, lsn) in upper.memtable.range(lba, end) {
            if from > at {
                let gap = &mut found[(at - lba) as usize..(from - lba) as usize];
                io.blocks(upper.lower, at, gap)?;
            }
            let record = log.get(lsn).ok_or(StoreError::Damaged("the log in memory"))?;
            for lba_now in from..to {
                let offset = lba_now - record.lba;
                found[(lba_now - lba) as usize] = match record.place {
                    0 if mutant::is("trim-without-version") => BlockAt::default(),
                    0 => BlockAt { version: lsn, place: 0, crc: 0 },
                    place => {
                        let crc = log.crc(record, offset);
                        BlockAt { version: lsn, place: place + offset, crc }
                    }
                };
            }
            at = to;
        }
        if at < end {
            io.blocks(upper.lower, at, &mut found[(at - lba) as usize..])?;
        }
        Ok(())
    }

    pub fn source(&self, view: ReadView) -> Option<Source> {
        Some(match view {
            ReadView::Live => Source::Live,
            ReadView::Base => Source::Root(self.folded.root),
            ReadView::Snapshot(id) => {
                match self.folded.snapshots.iter().find(|s| s.info.id == id) {
                    Some(folded) => Source::Root(folded.root),
                    None => Source::Frozen(self.snapshots.iter().find(|s| s.id == id)?.lsn),
                }
            }
        })
    }

    pub fn read<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let size = self.view_size(view).ok_or(StoreError::Rule("no such view"))?;
        if lba.checked_add(u64::from(blocks)).is_none_or(|end| end > size) {
            return Err(StoreError::Rule("a read outside the view"));
        }
        let source = self.source(view).ok_or(StoreError::Rule("no such view"))?;
        self.find(core, &source, lba, blocks)?;
        self.slots(core, lba, Lsn::ZERO, want_data, out);
        Ok(())
    }

    /// Turns `core.found` into slots, reading contiguous places with one call. Holes of version
    /// `from` and older are left out if `from` is above zero.
    pub fn slots<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        lba: u64,
        from: Lsn,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) {
        let found = std::mem::take(&mut core.found);
        let mut at = 0;
        while at < found.len() {
            let block = found[at];
            let first_lba = lba + at as u64;
            if block.version <= from.0 && from > Lsn::ZERO {
                at += 1;
                continue;
            }
            let run = found[at..].iter().enumerate().take_while(|(i, b)| {
                b.place == block.place + *i as u64 && (from == Lsn::ZERO || b.version > from.0)
            });
            match block.place {
                0 | BAD_PLACE | LOST_PLACE => {
                    let bad = block.place != 0;
                    if bad {
                        let (guid, newest) = (self.identity.guid, Lsn(block.version));
                        core.note_bad(BadBlock::stretch(guid, first_lba, newest));
                    }
                    let content = if bad { Content::Bad } else { Content::Hole };
                    let version = Lsn(block.version);
                    push_slot(out, Slot { lba: first_lba, blocks: 1, version, content });
                    at += 1;
                }
                place if want_data => {
                    let count = run.count();
                    self.read_run(core, place, first_lba, &found[at..at + count], out);
                    at += count;
                }
                _ => {
                    let content = Content::Data { crc: block.crc, data: Bytes::new() };
                    let version = Lsn(block.version);
                    out.push(Slot { lba: first_lba, blocks: 1, version, content });
                    at += 1;
                }
            }
        }
        core.found = found;
    }

    fn read_run<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        place: u64,
        lba: u64,
        run: &[BlockAt],
        out: &mut Vec<Slot>,
    ) {
        let mut buffer = ReadBuffer::of(run.len() * BLOCK_SIZE);
        let whole = core.read(place, &mut buffer).is_ok();
        if !whole {
            // An unreadable sector must not make its neighbours unreadable.
            for (i, chunk) in buffer.chunks_mut(BLOCK_SIZE).enumerate() {
                if core.read(place + i as u64, chunk).is_err() {
                    chunk.fill(0);
                }
            }
        }
        let mut buffer = Bytes::from_owner(buffer);
        for (i, block) in run.iter().enumerate() {
            // The last block takes the buffer itself: a run of one block, the usual, is not shared.
            let data = buffer.split_to(BLOCK_SIZE);
            let (lba, version, crc) = (lba + i as u64, Lsn(block.version), block.crc);
            let crc = if mutant::is("block-checksum-not-checked") { crc32c(&data) } else { crc };
            let content = match crc32c(&data) == crc {
                true => Content::Data { crc, data },
                false => {
                    core.note_bad(BadBlock::block(self.identity.guid, lba, version));
                    Content::Bad
                }
            };
            out.push(Slot { lba, blocks: 1, version, content });
        }
    }

    /// The bytes of a log entry. An entry that fails its checksums is damage; one that the disk
    /// refuses to read may be there again later.
    pub fn entry<D: Disk>(&self, core: &Core<D>, lsn: u64) -> Result<SharedEntry, StoreError> {
        const DAMAGED: StoreError = StoreError::Damaged("an entry of the log");
        let record = self.log.get(lsn).ok_or(DAMAGED)?;
        let mut data = BytesMut::new();
        if record.place != 0 {
            data.resize(record.blocks as usize * BLOCK_SIZE, 0);
            core.read(record.place, &mut data)?;
        }
        let entry = self.log.entry(lsn, data.freeze()).ok_or(DAMAGED)?;
        if entry.data_is_good() { Ok(entry) } else { Err(DAMAGED) }
    }
}

/// Where a resolved view is found.
#[derive(Clone, Copy)]
pub enum Source {
    Live,
    /// The snapshot of this LSN in [`Replica::frozen`].
    Frozen(Lsn),
    Root(Root),
}

pub fn payload(entry: &quoin_types::Entry) -> Bytes {
    match entry.kind {
        EntryKind::Write | EntryKind::Trim => Bytes::new(),
        _ => entry.kind.encode_payload(),
    }
}

/// The same vector, empty, for slices that live shorter or longer: its memory is used again.
fn reused<'a>(mut parts: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    parts.clear();
    // Nothing is left to convert, so the collection takes the vector over as it is.
    parts.into_iter().map(|_| IoSlice::new(&[])).collect()
}

/// How many entries fit into a batch of `room` blocks, and the blocks they take.
fn fitting(entries: &[SharedEntry], room: u32) -> (usize, u32) {
    let (mut header, mut data, mut blocks) = (crate::format::batch::HEADER_LENGTH, 0u32, 0);
    for (count, entry) in entries.iter().enumerate() {
        header += entry_length(entry.crcs.len(), payload(entry).len());
        data += entry.crcs.len() as u32;
        let total = header.div_ceil(BLOCK_SIZE) as u32 + data;
        if total > room || header > HEADER_BYTES_MAX {
            return (count, blocks);
        }
        blocks = total;
    }
    (entries.len(), blocks)
}

fn apply_snapshots(
    snapshots: &mut Vec<SnapshotInfo>,
    lsn: Lsn,
    kind: &EntryKind,
    volume_blocks: u64,
) {
    match kind {
        EntryKind::Snapshot { id, hidden } => {
            snapshots.push(SnapshotInfo { id: *id, lsn, hidden: *hidden, blocks: volume_blocks });
        }
        EntryKind::DeleteSnapshot { id } => snapshots.retain(|s| s.id != *id),
        _ => {}
    }
}
