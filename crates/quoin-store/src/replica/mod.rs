//! A replica: its folded map, the log above it, and how the two answer together.

pub mod frozen;
pub mod slots;
pub mod upper;

use std::collections::BTreeMap;
use std::io::IoSlice;

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, StoreError, StoreState};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{Content, ReadView, Slot, SnapshotHead, SnapshotInfo};
use quoin_types::{BLOCK_SIZE, EntryKind, Epoch, Lsn, SnapshotId, crc32c, mutant};

use self::slots::push_slot;
use crate::background::checkpoint;
use crate::background::maintenance::Maintenance;
use crate::clones::lookup;
use crate::core::{BadBlock, Core, Kept, NodeBatch, NodeIo, Tree};
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
use crate::rebuild::shadow::{self, Shadow};
use crate::replica::frozen::FrozenViews;
use crate::replica::upper::{REVERTS_UNFOLDED_MAX, Upper};
use crate::space::segments::{Claim, Family, LogEnd};

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
    pub pins: BTreeMap<u64, Pin>,
    pub shadow: Option<Shadow>,
    pub maintenance: Maintenance,
    /// Entries of epochs before this one are owed to it: others hold them.
    pub owed_before: Epoch,
    /// Blocks left of its share since the pool granted room last; `None`: all of it.
    pub share_left: Option<u32>,
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
            pins: BTreeMap::new(),
            shadow: None,
            maintenance: Maintenance::default(),
            owed_before: Epoch::ZERO,
            share_left: None,
        }
    }

    /// Returns true if an increment waits for its flip: the maps must not change until then.
    pub fn is_prepared(&self) -> bool {
        self.shadow.as_ref().is_some_and(|s| s.prepared.is_some())
    }

    /// A map was changed, or it became known what is dead, by something else than clean-up.
    pub fn map_changed<D: Disk>(&mut self, core: &Core<D>) {
        self.maintenance.node_gain.changed(core.sequence);
        self.family.changes += 1;
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

    /// Blocks and nodes that other views keep when this image's live map gives them up.
    pub fn kept_beside(&self, image: &Image) -> Kept {
        let snapshots = image.snapshots.iter().map(|s| s.info.lsn.0);
        let through = snapshots.fold(self.family.relatives.kept_through, u64::max);
        self.maintenance.count.leaving.kept(through)
    }

    pub fn io<'a, D: Disk>(&'a mut self, core: &'a mut Core<D>) -> NodeIo<'a, D> {
        let kept = self.kept_beside(&self.folded);
        NodeIo {
            core,
            family: &mut self.family,
            batch: &mut self.nodes,
            recount: self.maintenance.count.job.as_mut(),
            kept,
            gives_up: false,
            tree: Tree::Map,
        }
    }

    // ---- append and truncate -------------------------------------------------------------

    /// Appends entries to the log and shows them in the memtable. They are in the kernel then, or under
    /// `durability: media` in this process, and durable after the next sync.
    pub fn append<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        entries: &[SharedEntry],
    ) -> Result<(), StoreError> {
        core.check_usable()?;
        self.head.check_append(self.snapshots.len(), entries)?;
        shadow::abandon(self);
        core.mark.change();
        core.tickets.written.add(self.identity.guid);
        let (taken, refused) = entries.split_at(self.fitting_reverts(entries));
        let mut rest = taken;
        while !rest.is_empty() {
            let (holes, owed) = (core.allocator.takes_holes(), core.allocator.takes_owed());
            let has_reserve = |e: &SharedEntry| match e.kind {
                // A target sequences trims and zeroes only where they are granted.
                EntryKind::Trim | EntryKind::Zero { .. } if holes => true,
                EntryKind::Write | EntryKind::Trim | EntryKind::Zero { .. } => {
                    owed && e.epoch < self.owed_before
                }
                // What frees space comes behind others of these: none may wait for room.
                _ => true,
            };
            let room = self.family.room(&core.superblock, Stream::Log);
            let longest = batch_blocks_max(core.superblock.unit_blocks);
            let (count, blocks) = match fitting(rest, room.min(longest)) {
                (0, _) => fitting(rest, longest),
                fits => fits,
            };
            let (now, later) = rest.split_at(count.max(1));
            let first = now.iter().take_while(|e| has_reserve(e)).count();
            let claim = if first == now.len() { Claim::Reserve } else { Claim::Granted };
            let appended = match claim == Claim::Reserve || self.takes_share(core, blocks) {
                true => self.append_batch(core, now, blocks, claim),
                false => Err(StoreError::Full),
            };
            match appended {
                Err(StoreError::Full) if claim != Claim::Reserve => {
                    // Entries that free space must not wait behind entries that need some.
                    if first > 0 {
                        self.append_batch(core, &now[..first], 0, Claim::Reserve)?;
                    }
                    return Err(StoreError::Full);
                }
                done => done?,
            }
            rest = later;
        }
        match refused.is_empty() {
            true => Ok(()),
            false => {
                // Folding makes room for the next one.
                self.maintenance.fold_wanted = true;
                Err(StoreError::Full)
            }
        }
    }

    /// Takes so many blocks of the replica's share, where the pool has no more than the shares of
    /// all. False: it has had its share, and others have not.
    fn takes_share<D: Disk>(&mut self, core: &Core<D>, blocks: u32) -> bool {
        let share = core.allocator.shares.share_blocks;
        if !core.allocator.is_tight() {
            self.share_left = None;
            return true;
        }
        let left = self.share_left.unwrap_or(share).checked_sub(blocks);
        self.share_left = left.or(self.share_left);
        left.is_some() || mutant::is("shares-not-enforced")
    }

    /// How many of these entries come before the first Revert that is one too many above the map.
    fn fitting_reverts(&self, entries: &[SharedEntry]) -> usize {
        let reverts = entries.iter().enumerate();
        let mut reverts = reverts.filter(|(_, e)| matches!(e.kind, EntryKind::Revert { .. }));
        let room = REVERTS_UNFOLDED_MAX.saturating_sub(self.log.reverts().len());
        reverts.nth(room).map_or(entries.len(), |(at, _)| at)
    }

    fn append_batch<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        entries: &[SharedEntry],
        blocks: u32,
        claim: Claim,
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
        self.family.flushes.written(u64::from(total) * BLOCK_SIZE as u64);
        let is_flushed_soon = self.family.flushes.are_expected();
        let before = self.family.open[Stream::Log as usize];
        let end = self.family.log_end;
        let segment = self.family.segment_for(core, Stream::Log, total, claim)?;
        let state = segment.state;
        let mut writer = HeaderWriter::new(&mut core.buffers.header);
        for entry in entries {
            let payload = payload(entry);
            let raw = BatchEntry {
                epoch: entry.epoch.0,
                lsn: entry.lsn.0,
                lba: entry.lba,
                blocks: entry.blocks,
                kind: entry.kind.code(),
                flags: entry.flags(),
                chain: entry.chain.0,
                payload: &payload,
                crcs: &[],
            };
            writer.entry(&raw, entry.crcs.iter().copied());
        }
        let check = writer.finish(&BatchHeader {
            stream: Stream::Log,
            sequence: state.sequence,
            index: end.next_index,
            previous: end.previous,
            guid_hash,
            watermark: self.stable.min(self.synced.durable).0,
            starts: core.superblock.starts,
            data_blocks,
            key: 0,
        });
        let start = core.superblock.unit_start(state.unit) + u64::from(state.used_blocks);
        let spare = if waits { segment.make_ready(&core.superblock, total) } else { 0 };
        core.will_append(start, u64::from(total) + u64::from(spare));
        let mut parts = reused(std::mem::take(&mut core.buffers.parts));
        parts.push(IoSlice::new(&core.buffers.header));
        parts.extend(entries.iter().filter(|e| !e.data.is_empty()).map(|e| IoSlice::new(&e.data)));
        let offset = start * BLOCK_SIZE as u64;
        let written = match waits {
            true => core.disk.write_with_sync(offset, &parts, spare as usize * BLOCK_SIZE),
            false => core.disk.write_at(offset, &parts),
        };
        core.buffers.parts = reused(parts);
        written.map_err(StoreError::Io)?;

        let last = entries.last().map_or(0, |e| e.lsn.0);
        segment.state.used_blocks += total;
        segment.state.live_bytes += u64::from(data_blocks) * BLOCK_SIZE as u64;
        segment.state.last_lsn = segment.state.last_lsn.max(last);
        segment.state.last_index = end.next_index;
        match waits {
            true => segment.written_out_blocks = segment.state.used_blocks,
            false if is_flushed_soon => segment.write_out_rest(core),
            false => segment.write_out(core),
        }
        let log_start = LogStart {
            sequence: state.sequence,
            offset_blocks: state.used_blocks,
            index: end.next_index,
            previous: end.previous,
        };
        self.family.log_end = LogEnd { next_index: end.next_index + 1, previous: check };
        self.log.push_batch(last, log_start);
        if before != Some(state.unit) {
            // All of the log before may have been folded.
            self.family.forget_log_before(checkpoint::log_start(self).index);
        }
        let mut place = start + u64::from(header_blocks);
        for entry in entries {
            let at = if entry.crcs.is_empty() { 0 } else { place };
            self.apply(entry, at);
            place += entry.crcs.len() as u64;
        }
        Ok(())
    }

    /// Takes an entry, whose data lie at `place`, into the log and everything that follows it.
    pub fn apply(&mut self, entry: &quoin_types::Entry, place: u64) {
        self.log.push(entry, place);
        self.head.apply(entry.position(), entry.chain, &entry.kind, entry.part.as_ref());
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
        let (guid, index) = (self.identity.guid, self.family.log_end.next_index);
        if !mutant::is("cut-not-recorded") {
            core.record(Record::Cut { guid, index, keep })?;
        }
        self.cut(core, keep);
        self.family.forget_log_before(checkpoint::log_start(self).index);
        Ok(())
    }

    /// Forgets the entries after `keep`, in memory.
    pub fn cut<D: Disk>(&mut self, core: &mut Core<D>, keep: Lsn) {
        for lsn in keep.0 + 1..self.log.next_lsn() {
            if let Some(record) = self.log.get(lsn).filter(|r| r.place != 0) {
                let bytes = u64::from(record.blocks) * BLOCK_SIZE as u64;
                self.family.sub_live(core, record.place, bytes);
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
            let part = self.log.part(lsn);
            if record.has_range() && part.is_none() {
                self.head.advance(position, chain);
                continue;
            }
            let kind = self.log.kind(lsn, record);
            self.head.apply(position, chain, &kind, part);
            let blocks = self.head.volume_blocks;
            apply_snapshots(&mut self.snapshots, Lsn(lsn), &kind, blocks);
        }
    }

    /// Epoch and chain at each snapshot.
    pub fn snapshot_heads(&self) -> Vec<SnapshotHead> {
        let head = |info: &SnapshotInfo| {
            if let Some(kept) = self.folded.snapshots.iter().find(|s| s.info.id == info.id) {
                return SnapshotHead { epoch: kept.position.epoch, chain: kept.chain };
            }
            let record = self.log.get(info.lsn.0);
            record.map_or_else(SnapshotHead::default, |record| SnapshotHead {
                epoch: Epoch(record.epoch),
                chain: quoin_types::Chain(record.chain),
            })
        };
        self.snapshots.iter().map(head).collect()
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
                if info.lsn > folded && !self.frozen.renew(info.lsn, folded) {
                    self.frozen.keep(info.lsn, folded, self.upper_at(info.lsn));
                }
                Some(info.blocks)
            }
        }
    }

    /// Fills `core.buffers.found` with what a view (resolved before) says of a range.
    pub fn find<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: &Source,
        lba: u64,
        blocks: u32,
    ) -> Result<(), StoreError> {
        let mut found = std::mem::take(&mut core.buffers.found);
        found.clear();
        found.resize(blocks as usize, BlockAt::default());
        let result = self.find_into(core, view, lba, &mut found);
        core.buffers.found = found;
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
        let Replica { family, nodes: batch, upper, frozen, log, folded, .. } = self;
        let (kept, recount, gives_up, tree) = (Kept::ALL, None, false, Tree::Map);
        let mut io = NodeIo { core, family, batch, recount, kept, gives_up, tree };
        if let (Some(root), Source::Live) = (shadow, view)
            && mutant::is("increment-visible-before-the-flip")
        {
            return lookup::blocks(&mut io, root, lba, found);
        }
        let upper = match view {
            Source::Root(root) => return lookup::blocks(&mut io, *root, lba, found),
            Source::Live => &*upper,
            Source::Frozen(lsn) => frozen.get(*lsn).ok_or(StoreError::Rule("no such view"))?,
        };
        upper.find(&mut io, log, folded, lba, found)
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
        self.slots(core, view, lba, Lsn::ZERO, want_data, out)
    }

    /// Turns `core.buffers.found`, of a view, into slots, reading contiguous places with one call. Holes of
    /// version `from` and older are left out if `from` is above zero. Fails only where something is
    /// lacking that is fetched beside; all that is lacking is.
    pub fn slots<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: ReadView,
        lba: u64,
        from: Lsn,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let found = std::mem::take(&mut core.buffers.found);
        let (mut at, mut lacking) = (0, Ok(()));
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
                        let bad = BadBlock::stretch(guid, first_lba, newest);
                        core.note_bad(bad.of(snapshot_of(view)));
                    }
                    let content = if bad { Content::Bad } else { Content::Hole };
                    let version = Lsn(block.version);
                    push_slot(out, Slot { lba: first_lba, blocks: 1, version, content });
                    at += 1;
                }
                place if want_data => {
                    let count = run.count();
                    let run = &found[at..at + count];
                    let read = self.read_run(core, view, place, first_lba, run, out);
                    lacking = lacking.and(read);
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
        core.buffers.found = found;
        lacking
    }

    /// Reads a run of places. Fails only where some of them are lacking, and are fetched beside.
    fn read_run<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        view: ReadView,
        place: u64,
        lba: u64,
        run: &[BlockAt],
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let mut buffer = ReadBuffer::of(run.len() * BLOCK_SIZE);
        let is_block = |block: &BlockAt, bytes: &[u8]| crc32c(bytes) == block.crc;
        let are_blocks = |bytes: &[u8]| {
            run.iter().zip(bytes.chunks(BLOCK_SIZE)).all(|(block, bytes)| is_block(block, bytes))
        };
        let mut lacking = may_lack(core.read_beside(place, &mut buffer, &are_blocks));
        if lacking.is_err() {
            // An unreadable sector must not make its neighbours unreadable.
            lacking = Ok(Ok(()));
            for (i, chunk) in buffer.chunks_mut(BLOCK_SIZE).enumerate() {
                let is_it = |bytes: &[u8]| is_block(&run[i], bytes);
                match may_lack(core.read_beside(place + i as u64, chunk, &is_it)) {
                    Ok(Ok(())) => {}
                    Ok(lacks) => lacking = Ok(lacks),
                    Err(_) => chunk.fill(0),
                }
            }
        }
        lacking.and_then(|lacks| lacks)?;
        let mut buffer = Bytes::from_owner(buffer);
        for (i, block) in run.iter().enumerate() {
            // The last block takes the buffer itself: a run of one block, the usual, is not shared.
            let data = buffer.split_to(BLOCK_SIZE);
            let (lba, version, crc) = (lba + i as u64, Lsn(block.version), block.crc);
            let crc = if mutant::is("block-checksum-not-checked") { crc32c(&data) } else { crc };
            let content = match crc32c(&data) == crc {
                true => Content::Data { crc, data },
                false => {
                    let bad = BadBlock::block(self.identity.guid, lba, version);
                    core.note_bad(bad.of(snapshot_of(view)));
                    Content::Bad
                }
            };
            out.push(Slot { lba, blocks: 1, version, content });
        }
        Ok(())
    }

    /// The bytes of a log entry. An entry that fails its checksums is damage; one that the disk
    /// refuses to read may be there again later.
    pub fn entry<D: Disk>(&self, core: &mut Core<D>, lsn: u64) -> Result<SharedEntry, StoreError> {
        const DAMAGED: StoreError = StoreError::Damaged("an entry of the log");
        let record = self.log.get(lsn).ok_or(DAMAGED)?;
        let mut data = BytesMut::new();
        if record.place != 0 {
            data.resize(record.blocks as usize * BLOCK_SIZE, 0);
            let crcs: Vec<u32> = self.log.crcs(record).collect();
            let are_blocks = |bytes: &[u8]| {
                let mut each = bytes.chunks(BLOCK_SIZE).zip(&crcs);
                each.all(|(bytes, crc)| crc32c(bytes) == *crc)
            };
            core.read_beside(record.place, &mut data, &are_blocks)?;
        }
        let entry = self.log.entry(lsn, data.freeze()).ok_or(DAMAGED)?;
        if entry.data_is_good() { Ok(entry) } else { Err(DAMAGED) }
    }
}

/// Sets apart what a call lacks, which it may go on without to find what else it lacks.
pub fn may_lack(read: Result<(), StoreError>) -> Result<Result<(), StoreError>, StoreError> {
    match read {
        Err(StoreError::Pending(_)) => Ok(read),
        read => read.map(Ok),
    }
}

/// The snapshot that a view is, if it is one.
fn snapshot_of(view: ReadView) -> Option<SnapshotId> {
    match view {
        ReadView::Snapshot(id) => Some(id),
        ReadView::Live | ReadView::Base => None,
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

/// What an entry's header has beside its fixed fields: the payload of its kind, and then the part
/// of a client's request that it is.
pub fn payload(entry: &quoin_types::Entry) -> Bytes {
    let payload = match entry.kind {
        EntryKind::Write | EntryKind::Trim => Bytes::new(),
        _ => entry.kind.encode_payload(),
    };
    match &entry.part {
        None => payload,
        Some(part) => [&payload[..], &part.to_bytes()].concat().into(),
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
