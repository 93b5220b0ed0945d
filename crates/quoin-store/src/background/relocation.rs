//! Batches of blocks that keep their version: moved by clean-up, or fed by an increment.

use std::io::IoSlice;

use bytes::Bytes;
use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, crc32c, mutant};

use crate::core::Core;
use crate::disk::Disk;
use crate::format::batch::{BatchEntry, BatchHeader, HeaderWriter, Stream};
use crate::replica::Replica;
use crate::space::segments::Claim;

/// Blocks of one batch at most; its header fits three blocks.
const BLOCKS_A_BATCH: usize = 256;
const WRITE_KIND: u8 = 1;

/// A block to be written again elsewhere, whose bytes are what its checksum says: none can be made with
/// others.
pub struct MovedBlock {
    lba: u64,
    version: u64,
    crc: u32,
    /// Logical place that it has already; 0: none.
    name: u64,
    bytes: Bytes,
}

impl MovedBlock {
    /// `None`: these are not the bytes of this checksum, and are written nowhere.
    pub fn of(lba: u64, version: u64, crc: u32, name: u64, bytes: Bytes) -> Option<Self> {
        let is_it = bytes.len() == BLOCK_SIZE && crc32c(&bytes) == crc;
        let is_it = is_it || mutant::is("moved-block-is-not-verified");
        is_it.then_some(MovedBlock { lba, version, crc, name, bytes })
    }

    pub fn crc(&self) -> u32 {
        self.crc
    }
}

/// Naming, by leaves, of blocks that had no logical place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Naming {
    /// By where they lie.
    Place,
    /// By a logical place, if their segment has a number.
    Logical,
}

/// The naming of what is written to the stream of moved blocks. A flip gives up the map of logical
/// places, so what a rebuild may show has none.
pub fn naming(replica: &Replica) -> Naming {
    if replica.shadow.is_some() { Naming::Place } else { Naming::Logical }
}

/// Writes blocks to the stream of moved ones. Returns where they are: of those that have no logical
/// place, how leaves are to name them.
pub fn write_moved<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    blocks: &[MovedBlock],
    naming: Naming,
    claim: Claim,
) -> Result<Vec<u64>, StoreError> {
    let mut places = Vec::with_capacity(blocks.len());
    let mut rest = blocks;
    while !rest.is_empty() {
        let room = replica.family.room(&core.superblock, Stream::Moved) as usize;
        let fresh = core.superblock.unit_blocks as usize - 1;
        let most = |room: usize| {
            let all = rest.len().min(BLOCKS_A_BATCH);
            (1..=all).rev().find(|n| n + header_blocks(*n) <= room)
        };
        let count = most(room).or_else(|| most(fresh));
        let count = count.ok_or(StoreError::Rule("a segment too small for a block"))?;
        let (now, later) = rest.split_at(count);
        write_moved_batch(replica, core, now, naming, claim, &mut places)?;
        rest = later;
    }
    Ok(places)
}

fn write_moved_batch<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    blocks: &[MovedBlock],
    naming: Naming,
    claim: Claim,
    places: &mut Vec<u64>,
) -> Result<(), StoreError> {
    core.check_usable()?;
    let total = (blocks.len() + header_blocks(blocks.len())) as u32;
    let guid_hash = replica.family.guid_hash;
    let segment = replica.family.segment_for(core, Stream::Moved, total, claim)?;
    let state = segment.state;
    let header = header_blocks(blocks.len()) as u64;
    let start = core.superblock.unit_start(state.unit) + u64::from(state.used_blocks);
    let logical = core.logical.get(&replica.identity.guid).filter(|_| naming == Naming::Logical);
    let first = u64::from(state.used_blocks) + header;
    let first = logical.and_then(|logical| logical.place(&state, first));
    let mut writer = HeaderWriter::new(&mut core.buffers.header);
    for (block, offset) in blocks.iter().zip(0..) {
        let name = match block.name {
            0 => first.map_or(0, |first| first + offset),
            name => name,
        };
        places.push(if block.name == 0 && name != 0 { name } else { start + header + offset });
        let entry = BatchEntry {
            epoch: name,
            lsn: block.version,
            lba: block.lba,
            blocks: 1,
            kind: WRITE_KIND,
            ..BatchEntry::default()
        };
        writer.entry(&entry, std::iter::once(block.crc));
    }
    let check = writer.finish(&BatchHeader {
        stream: Stream::Moved,
        sequence: state.sequence,
        index: segment.next_index,
        previous: segment.previous,
        guid_hash,
        watermark: 0,
        starts: core.superblock.starts,
        data_blocks: blocks.len() as u32,
        key: 0,
    });
    debug_assert_eq!(header, (core.buffers.header.len() / BLOCK_SIZE) as u64);
    core.will_append(start, u64::from(total));
    let mut parts = Vec::with_capacity(blocks.len() + 1);
    parts.push(IoSlice::new(&core.buffers.header));
    parts.extend(blocks.iter().map(|b| IoSlice::new(&b.bytes)));
    core.disk.write_at(start * BLOCK_SIZE as u64, &parts).map_err(StoreError::Io)?;
    segment.state.used_blocks += header as u32 + blocks.len() as u32;
    segment.state.live_bytes += (blocks.len() * BLOCK_SIZE) as u64;
    segment.next_index += 1;
    segment.previous = check;
    segment.write_out(core);
    Ok(())
}

fn header_blocks(blocks: usize) -> usize {
    let length =
        crate::format::batch::HEADER_LENGTH + blocks * crate::format::batch::entry_length(1, 0);
    length.div_ceil(BLOCK_SIZE)
}

/// Blocks that fit in a segment of so many, its headers counted.
pub fn packed_blocks(segment_blocks: u32) -> u64 {
    let room = segment_blocks.saturating_sub(1) as usize;
    let whole = BLOCKS_A_BATCH + header_blocks(BLOCKS_A_BATCH);
    let rest = room % whole;
    (room / whole * BLOCKS_A_BATCH + rest.saturating_sub(header_blocks(rest))) as u64
}
