//! Opening a replica: the last durable state, then the log behind it.
//!
//! The log's batches form one chain. Recovery follows it from where the last checkpoint says,
//! over log segments in order of their sequence numbers. Where it ends is decided by R4: a
//! break above the last durable watermark is a torn tail and is cut there, one at or below it
//! is damage. Nothing behind a break is looked at for content, only for a later watermark.
//!
//! Log above the watermark is read from the media itself, and not from the kernel's cache. Opening
//! began with a sync, but an earlier sync may have failed, and its process may have been killed
//! before it could record that. Its pages read well and will never be written. Where the media
//! lack what the cache shows, the log ends, and the replica's claim to hold everything that it
//! ever applied is withdrawn. The claim is also withdrawn where the log ends at an unreadable
//! place, or before batches of the pool's last process: a process that dies tears nothing off
//! before its last write.
//!
//! A sector that cannot be read may be a torn one. Where nothing at all can be read behind the
//! end, it is unknown whether what was flushed is still there, and that is damage. Where the disk
//! refuses the superblock as well, the disk fails and the pool is not opened: what cannot be read
//! now is perhaps whole. Recovery writes nothing before its findings are on media: a start that is
//! killed and repeated finds what the first one found.

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::{BootCookie, StoreError};
use quoin_types::codec::Reader;
use quoin_types::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, Part, mutant};

use crate::background::checkpoint;
use crate::clones::Relatives;
use crate::core::Core;
use crate::disk::Disk;
use crate::error::PoolError;
use crate::format::batch::{Batch, BatchEntry, Stream, batch_blocks_max};
use crate::format::checkpoint::{Checkpoint, LogStart, SegmentState};
use crate::format::relatives::RelativesState;
use crate::format::superblock::FORMAT_VERSION;
use crate::log::memtable::Log;
use crate::metadata::state::DurableReplica;
use crate::rebuild::shadow::Shadow;
use crate::replica::{Image, Replica, Synced};
use crate::space::batches::{header_at, read_header, readable};
use crate::space::logical::Logical;
use crate::space::segment_table::Segments;
use crate::space::segments::Segment;
use crate::space::table::{self, FoundTable};

/// Blocks that are read at once behind the end of a log. Where the disk shows nothing of the first
/// so many, it shows nothing of the log's end.
const PIECE_BLOCKS: u32 = 384;

/// A batch of the chain, its header without padding.
struct Found {
    unit: u32,
    offset_blocks: u32,
    place: u64,
    header: Vec<u8>,
}

/// Where the chain stands.
#[derive(Clone, Copy)]
struct End {
    unit: Option<u32>,
    offset_blocks: u32,
    index: u64,
    previous: u64,
}

/// Makes the replica that the durable state describes. `durable` is corrected where the log
/// turned out shorter than it says. With it comes the block at the log's end, if that is to be
/// wiped once the corrected state is on media, and what is to be searched for once all replicas
/// have their segments.
pub fn recover<D: Disk>(
    core: &mut Core<D>,
    durable: &mut DurableReplica,
) -> Result<(Replica, Option<u64>, FoundTable), PoolError> {
    let checkpoint = Checkpoint::decode(durable.checkpoint.clone());
    let checkpoint = checkpoint.map_err(|_| PoolError::MetadataLost)?;
    let blocks = checkpoint.head.volume_blocks;
    let mut replica = Replica::new(
        durable.identity.clone(),
        durable.meta.clone(),
        blocks,
        core.superblock.unit_blocks,
    );
    let relatives = RelativesState::decode(durable.relatives.clone());
    let relatives = relatives.map_err(|_| PoolError::MetadataLost)?;
    replica.family.relatives = Relatives {
        base: relatives.base,
        kept_through: core.bases.kept_through(durable.identity.guid),
        is_remnant: relatives.is_remnant,
    };
    let guid = durable.identity.guid;
    let logical = Logical::opened(&core.superblock, checkpoint.logical.as_ref());
    if !logical.is_learned() {
        // Counters do not go down for blocks of which it is not known where they were moved.
        replica.maintenance.count.request();
    }
    core.logical.insert(guid, logical);
    let first_sequence = match checkpoint.log.sequence {
        0 => checkpoint.sequence + 1,
        sequence => sequence,
    };
    let is_followed = |s: &SegmentState| s.stream == Stream::Log && s.sequence >= first_sequence;
    for state in checkpoint.segments.iter().chain(&durable.log_segments) {
        let (state, too_high) = state.counted();
        if too_high {
            replica.maintenance.count.request();
        }
        let state = admitted(core, &state).ok_or(PoolError::MetadataLost)?;
        core.logical_of(guid).insert(&state);
        match is_followed(&state) {
            true => drop(replica.family.segments.insert(Segment::opened(state))),
            false => replica.family.segments.insert_settled(&state),
        }
    }
    let mut found = FoundTable::default();
    if let Some(table) = &checkpoint.table {
        if table.too_high {
            replica.maintenance.count.request();
        }
        let read = table::read_table(&mut replica, core, table, |core, replica, state| {
            let state = admitted(core, state);
            let admit = |state: SegmentState| {
                core.logical_of(guid).insert(&state);
                replica.family.segments.insert_recorded(&state);
            };
            state.map(admit).is_some()
        });
        found = read?.ok_or(PoolError::MetadataLost)?;
        found.newest = checkpoint.sequence;
    }
    replica.maintenance.node_gain.changed(checkpoint.sequence);
    let folded = checkpoint.head.position.lsn;
    replica.folded =
        Image { head: checkpoint.head, root: checkpoint.root, snapshots: checkpoint.snapshots };
    replica.log = Log::after(folded);
    replica.shadow = checkpoint.shadow.map(Shadow::restored);
    replica.stable = checkpoint.stable;
    replica.replay_head();

    let mut segments: Vec<SegmentState> =
        replica.family.segments.all_busy().map(|s| s.state).collect();
    segments.sort_unstable_by_key(|s| s.sequence);
    replica.family.log_order = segments.iter().map(|s| (s.sequence, s.unit)).collect();

    let (chain, refused) = follow(core, &replica, &segments, checkpoint.log)?;
    let mut watermark = folded.max(durable.watermark).0;
    for found in &chain {
        if let Some(batch) = Batch::parse(&found.header) {
            watermark = watermark.max(batch.header.watermark);
        }
    }
    let (end, lost) = replay(core, &mut replica, durable, &chain, checkpoint.log, watermark)?;
    let behind = search(core, &replica, &segments, end)?;
    let lost = lost || refused || behind.lost;
    if lost {
        core.check_readable()?;
    }
    if lost {
        for meta in [&mut replica.meta, &mut durable.meta] {
            (meta.cookie, meta.closed_continuous) = (BootCookie::default(), false);
        }
    }
    watermark = watermark.max(behind.watermark);

    let position = replica.head.position.lsn;
    if (position.0 < watermark || behind.unseen) && !mutant::is("rot-taken-for-a-torn-tail") {
        replica.meta.damaged = true;
        durable.meta.damaged = true;
    }
    replica.stable = replica.stable.max(Lsn(watermark)).min(position);
    // Opening began with a sync: what was read is on the media.
    replica.synced = Synced { durable: position, syncing: position };
    // A cut may have outlived batches before it: what is appended now is not meant by it.
    for (index, _) in &mut durable.cuts {
        *index = (*index).min(end.index);
    }
    let wiped = close(core, &mut replica, durable, &segments, end)?;
    replica.family.forget_log_before(checkpoint::log_start(&replica).index);
    Ok((replica, wiped, found))
}

/// Takes the units of a segment that the metadata name; `None`: it cannot be.
fn admitted<D: Disk>(core: &mut Core<D>, state: &SegmentState) -> Option<SegmentState> {
    let room = state.units.saturating_mul(core.superblock.unit_blocks);
    let can_be = state.used_blocks <= room
        && Segments::is_possible(state.unit, state.units)
        && core.allocator.take(state.unit, state.units);
    // An estimate from the disk must not be larger than anything can be.
    let live_bytes = state.live_bytes.min(u64::from(room) * BLOCK_SIZE as u64);
    can_be.then_some(SegmentState { live_bytes, ..*state })
}

/// Collects the batches of the chain, as far as it goes. Returns whether it ends at what the
/// disk refuses to read.
fn follow<D: Disk>(
    core: &Core<D>,
    replica: &Replica,
    segments: &[SegmentState],
    start: LogStart,
) -> Result<(Vec<Found>, bool), StoreError> {
    let (mut chain, mut refused) = (Vec::new(), false);
    let (mut index, mut previous) = (start.index, start.previous);
    for segment in segments {
        let mut at = match segment.sequence == start.sequence {
            true => start.offset_blocks.max(1),
            false => 1,
        };
        let blocks = segment.units * core.superblock.unit_blocks;
        let first = core.superblock.unit_start(segment.unit);
        while at < blocks {
            let mut header = None;
            let read = header_at(core, first + u64::from(at), blocks - at);
            refused |= !readable(read.map(|found| header = found))?;
            let valid = header.as_deref().and_then(Batch::parse).is_some();
            if !valid && mutant::is("torn-tail-accepted-behind-a-hole") {
                at += 1;
                continue;
            }
            let Some(mut bytes) = header else { break };
            let Some(batch) = Batch::parse(&bytes) else { break };
            let header = batch.header;
            let stale = mutant::is("stale-segment-replayed");
            let own = header.stream == Stream::Log
                && (header.sequence == segment.sequence || stale)
                && header.guid_hash == replica.family.guid_hash;
            if !own
                || ((header.index, header.previous) != (index, previous)
                    && !stale
                    && !mutant::is("torn-tail-accepted-behind-a-hole"))
                || batch.blocks() > blocks - at
            {
                break;
            }
            let (taken, header_blocks) = (batch.blocks(), batch.header_blocks);
            index += 1;
            previous = batch.check;
            let length = batch.header_length;
            bytes.truncate(length);
            bytes.shrink_to_fit();
            let place = first + u64::from(at) + u64::from(header_blocks);
            chain.push(Found { unit: segment.unit, offset_blocks: at, place, header: bytes });
            (at, refused) = (at + taken, false);
        }
    }
    Ok((chain, refused))
}

/// Applies the chain's entries above the folded map. Returns where the log goes on, and whether
/// the cache shows more of it than the media hold.
fn replay<D: Disk>(
    core: &mut Core<D>,
    replica: &mut Replica,
    durable: &mut DurableReplica,
    chain: &[Found],
    start: LogStart,
    watermark: u64,
) -> Result<(End, bool), PoolError> {
    let mut lost = false;
    let start_unit = replica.family.segments.all_busy();
    let start_unit = start_unit.filter(|s| s.state.sequence == start.sequence);
    let mut end = End {
        unit: start_unit.map(|s| s.state.unit).next().filter(|_| start.sequence != 0),
        offset_blocks: start.offset_blocks,
        index: start.index,
        previous: start.previous,
    };
    for found in chain {
        let Some(batch) = Batch::parse(&found.header) else { break };
        let limit = durable.cuts.iter().filter(|(index, _)| *index > batch.header.index);
        let limit = limit.map(|(_, keep)| keep.0).min().unwrap_or(u64::MAX);
        let mut place = found.place;
        let (mut good, mut accepted, mut last) = (true, 0u32, 0u64);
        if batch.entries().any(|e| e.lsn > watermark) && !header_on_media(core, found)? {
            // Nothing of it, nor what had begun to replace it, comes back with the next start.
            durable.cuts.push((end.index, replica.head.position.lsn));
            lost = true;
            break;
        }
        for raw in batch.entries() {
            let at = if raw.crcs.is_empty() { 0 } else { place };
            place += raw.crcs().len() as u64;
            last = last.max(raw.lsn);
            if raw.lsn <= replica.folded.head.position.lsn.0 || raw.lsn > limit {
                // Counted as live with its batch, which no view needs.
                if raw.lsn > limit {
                    replica.maintenance.count.request();
                }
                accepted += 1;
                continue;
            }
            let before = replica.head.position.lsn;
            good = match replay_entry(core, replica, &raw, at, watermark)? {
                Replayed::Yes => true,
                Replayed::No => false,
                Replayed::Lost => {
                    lost = true;
                    false
                }
            };
            if good && replica.head.position.lsn <= before {
                // The next start knows a higher watermark and would not believe it.
                let keep = Lsn(raw.lsn - 1);
                durable.cuts.push((batch.header.index, keep));
            }
            if !good {
                break;
            }
            accepted += 1;
        }
        if accepted > 0 {
            let log_start = LogStart {
                sequence: batch.header.sequence,
                offset_blocks: found.offset_blocks,
                index: batch.header.index,
                previous: batch.header.previous,
            };
            replica.log.push_batch(last.min(limit), log_start);
            end = End {
                unit: Some(found.unit),
                offset_blocks: found.offset_blocks + batch.blocks(),
                index: batch.header.index + 1,
                previous: batch.check,
            };
            note_batch(replica, found, &batch, last);
        }
        if !good {
            // The rest of this batch, or what it had begun to replace, must not come back with
            // the next start. It was counted as live.
            replica.maintenance.count.request();
            durable.cuts.push((end.index, replica.head.position.lsn));
            break;
        }
    }
    Ok((end, lost))
}

/// Whether the header that was found is more than a page of the cache.
fn header_on_media<D: Disk>(core: &Core<D>, found: &Found) -> Result<bool, StoreError> {
    let mut bytes = vec![0; found.header.len().next_multiple_of(BLOCK_SIZE)];
    let first = found.place - (bytes.len() / BLOCK_SIZE) as u64;
    Ok(readable(core.read_media(first, &mut bytes))? && bytes.starts_with(&found.header))
}

fn note_batch(replica: &mut Replica, found: &Found, batch: &Batch<'_>, last: u64) {
    if let Some(segment) = replica.family.segments.busy_mut(found.unit) {
        let state = &mut segment.state;
        // Batches that were there when the state was recorded were counted then.
        let known = match quoin_types::mutant::is("log-counted-twice-at-a-start") {
            true => 0,
            false => state.used_blocks,
        };
        if found.offset_blocks >= known {
            state.live_bytes += u64::from(batch.header.data_blocks) * BLOCK_SIZE as u64;
            state.used_blocks = found.offset_blocks + batch.blocks();
        }
        state.last_lsn = state.last_lsn.max(last);
        state.last_index = batch.header.index;
    }
}

/// Whether the log goes on with an entry.
#[derive(PartialEq, Eq)]
enum Replayed {
    Yes,
    No,
    /// The kernel shows it and the media do not have it, or the disk refuses to show it.
    Lost,
}

fn replay_entry<D: Disk>(
    core: &mut Core<D>,
    replica: &mut Replica,
    raw: &BatchEntry<'_>,
    place: u64,
    watermark: u64,
) -> Result<Replayed, PoolError> {
    let mut position = replica.head.position.lsn;
    if raw.lsn <= position.0 {
        // Appended again after a truncation whose record did not reach the media.
        if raw.lsn <= watermark {
            return Ok(Replayed::No);
        }
        replica.cut(core, Lsn(raw.lsn - 1));
        position = replica.head.position.lsn;
    }
    let behind = mutant::is("torn-tail-accepted-behind-a-hole");
    if behind && raw.lsn > position.0 + 1 {
        // Missing entries are taken for holes of no length.
        for lsn in position.0 + 1..raw.lsn {
            replica.log.push(&Entry { lsn: Lsn(lsn), epoch: Epoch(raw.epoch), ..missing() }, 0);
        }
    } else if raw.lsn != position.0 + 1 {
        return Ok(Replayed::No);
    }
    let mut payload = Bytes::copy_from_slice(raw.payload);
    let mut part = None;
    if raw.flags & Entry::FLAG_PART != 0 {
        let Some(at) = payload.len().checked_sub(Part::BYTES) else { return Ok(Replayed::No) };
        match Part::decode(&mut Reader::new(payload.split_off(at))) {
            Ok(decoded) => part = Some(decoded),
            Err(_) => return Ok(Replayed::No),
        }
    }
    let kind = EntryKind::decode(raw.kind, payload);
    let Ok(kind) = kind else {
        return Err(PoolError::Newer { version: FORMAT_VERSION });
    };
    let mut entry = Entry {
        epoch: Epoch(raw.epoch),
        lsn: Lsn(raw.lsn),
        kind,
        lba: raw.lba,
        blocks: raw.blocks,
        crcs: raw.crcs().collect(),
        data: Bytes::new(),
        chain: Chain(raw.chain),
        fua: raw.flags & Entry::FLAG_FUA != 0,
        part,
    };
    if entry.chain_after(replica.head.chain) != entry.chain && !behind {
        return Ok(Replayed::No);
    }
    let trusted = mutant::is("torn-data-accepted");
    if raw.lsn > watermark && !entry.crcs.is_empty() && !trusted {
        let mut data = BytesMut::zeroed(entry.crcs.len() * BLOCK_SIZE);
        let on_media = readable(core.read_media(place, &mut data))?;
        entry.data = data.freeze();
        if !on_media || !entry.data_is_good() {
            let mut data = BytesMut::zeroed(entry.crcs.len() * BLOCK_SIZE);
            let cached = readable(core.read(place, &mut data))?;
            entry.data = data.freeze();
            return Ok(match !cached || entry.data_is_good() {
                true => Replayed::Lost,
                false => Replayed::No,
            });
        }
        entry.data = Bytes::new();
    }
    replica.apply(&entry, place);
    Ok(Replayed::Yes)
}

/// An entry of nothing, for the mutant.
fn missing() -> Entry {
    Entry {
        epoch: Epoch(0),
        lsn: Lsn(0),
        kind: EntryKind::Trim,
        lba: 0,
        blocks: 0,
        crcs: Vec::new(),
        data: Bytes::new(),
        chain: Chain(0),
        fua: false,
        part: None,
    }
}

/// Findings behind the end of a log.
#[derive(Default)]
struct Behind {
    /// The highest watermark that batches there claim: the log should reach it.
    watermark: u64,
    /// The log went on when its process died.
    lost: bool,
    /// The disk shows nothing of a whole stretch.
    unseen: bool,
}

/// Blocks behind the end of a log that are searched for a later batch: the longest batch, whose
/// header is no more, and the first block of what follows it.
fn searched_blocks(unit_blocks: u32) -> u32 {
    match mutant::is("large-batches-not-looked-behind") {
        true => PIECE_BLOCKS,
        false => batch_blocks_max(unit_blocks) + 1,
    }
}

/// Blocks of a segment that were read at once.
struct Piece {
    start: u32,
    blocks: u32,
    bytes: Vec<u8>,
}

impl Piece {
    /// Reads `from..until` of the segment that begins at `first`. One block that cannot be read
    /// hides no others: it is taken for zeroes. Returns which ones the disk refuses.
    fn read<D: Disk>(
        &mut self,
        core: &Core<D>,
        first: u64,
        from: u32,
        until: u32,
    ) -> Result<Vec<u32>, StoreError> {
        (self.start, self.blocks) = (from, until - from);
        self.bytes.resize(self.blocks as usize * BLOCK_SIZE, 0);
        let mut refused = Vec::new();
        if core.read(first + u64::from(from), &mut self.bytes).is_err() {
            for (block, chunk) in (from..).zip(self.bytes.chunks_mut(BLOCK_SIZE)) {
                if !readable(core.read(first + u64::from(block), chunk))? {
                    chunk.fill(0);
                    refused.push(block);
                }
            }
        }
        Ok(refused)
    }

    fn block(&self, number: u32) -> &[u8] {
        let at = (number - self.start) as usize * BLOCK_SIZE;
        &self.bytes[at..at + BLOCK_SIZE]
    }
}

/// Looks behind the end for batches of this log.
fn search<D: Disk>(
    core: &Core<D>,
    replica: &Replica,
    segments: &[SegmentState],
    end: End,
) -> Result<Behind, StoreError> {
    let sequence_at_end =
        end.unit.and_then(|unit| segments.iter().find(|s| s.unit == unit).map(|s| s.sequence));
    let mut behind = Behind::default();
    let searched = searched_blocks(core.superblock.unit_blocks);
    for segment in segments.iter().filter(|s| sequence_at_end.is_none_or(|q| s.sequence >= q)) {
        let blocks = segment.units * core.superblock.unit_blocks;
        let first = core.superblock.unit_start(segment.unit);
        let start = match Some(segment.unit) == end.unit {
            true => end.offset_blocks.min(blocks),
            false => 1,
        };
        let mut until = blocks.min(start.saturating_add(searched));
        let mut at = start;
        let mut piece = Piece { start, blocks: 0, bytes: Vec::new() };
        while at < until {
            if at >= piece.start + piece.blocks {
                let refused = piece.read(core, first, at, blocks.min(at + PIECE_BLOCKS))?;
                if at == start && !refused.is_empty() {
                    // A single sector may be the torn one that the log ended with.
                    let unseen = refused.len() > 1 && refused.len() as u32 == piece.blocks;
                    behind.lost |= unseen || refused[0] == start;
                    behind.unseen |= unseen;
                }
            }
            let looks_like = crate::format::batch::header_blocks(piece.block(at)).is_some();
            let header = match looks_like {
                true => read_header(core, first + u64::from(at), blocks - at)?,
                false => None,
            };
            let batch = header.as_deref().and_then(Batch::parse);
            match batch.filter(|b| {
                b.header.sequence == segment.sequence
                    && b.header.guid_hash == replica.family.guid_hash
            }) {
                Some(batch) => {
                    behind.watermark = behind.watermark.max(batch.header.watermark);
                    behind.lost |= batch.header.starts + 1 == core.superblock.starts;
                    at = at.saturating_add(batch.blocks());
                    until = blocks.min(at.saturating_add(searched));
                }
                None => at += 1,
            }
        }
    }
    Ok(behind)
}

/// Sets the end of the log. What lies behind it must never be taken for its continuation, also
/// not where the next batch goes to another place: a stale header at the end is wiped, log
/// segments behind it are no longer listed. The caller states the metadata anew, and only when
/// that is on media wipes the block that this returns: it is what tells of a loss.
fn close<D: Disk>(
    core: &mut Core<D>,
    replica: &mut Replica,
    durable: &mut DurableReplica,
    segments: &[SegmentState],
    end: End,
) -> Result<Option<u64>, PoolError> {
    (replica.family.log_end.next_index, replica.family.log_end.previous) =
        (end.index, end.previous);
    let position = segments.iter().position(|s| Some(s.unit) == end.unit);
    let stale = &segments[position.map_or(0, |p| p + 1)..];
    if !stale.is_empty() {
        let listed = |s: &SegmentState| stale.iter().all(|gone| gone.unit != s.unit);
        let mut checkpoint =
            Checkpoint::decode(durable.checkpoint.clone()).map_err(|_| PoolError::MetadataLost)?;
        checkpoint.segments.retain(listed);
        durable.checkpoint = checkpoint.encode();
        durable.log_segments.retain(listed);
        for segment in stale {
            replica.family.segments.remove(segment.unit);
            core.logical_of(replica.family.guid).remove(segment);
            core.freed.add(0, segment.unit, segment.units);
        }
    }
    let Some(segment) = end.unit.and_then(|unit| replica.family.segments.busy_mut(unit)) else {
        return Ok(None);
    };
    let state = &mut segment.state;
    state.used_blocks = end.offset_blocks;
    replica.family.open[Stream::Log as usize] = Some(state.unit);
    if end.offset_blocks < state.units * core.superblock.unit_blocks {
        let block = core.superblock.unit_start(state.unit) + u64::from(end.offset_blocks);
        let mut bytes = vec![0; BLOCK_SIZE];
        if core.read(block, &mut bytes).is_err()
            || crate::format::batch::header_blocks(&bytes).is_some()
        {
            return Ok(Some(block));
        }
    }
    Ok(None)
}
