//! Batches: what segments are made of. A header, then its data, all 4 KiB-aligned.
//!
//! Headers of a replica's log form one chain over all its segments: each carries the checksum of
//! the one before. Batches that clean-up or an increment writes are flagged and keep their LSNs;
//! they and the batches of map nodes are chained within their segment only.

use std::mem::offset_of;

use quoin_types::{BLOCK_SIZE, HOLE_BLOCKS_MAX, ReplicaGuid, VOLUME_BLOCKS_MAX, WRITE_BLOCKS_MAX};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::take;

const BATCH_MAGIC: [u8; 4] = *b"QBAT";
pub const HEADER_LENGTH: usize = size_of::<HeaderOnDisk>();
const ENTRY_LENGTH: usize = size_of::<EntryOnDisk>();
/// The tag of the per-block check field: a plain CRC32C.
const CHECK_CRC32C: u8 = 1;
const BATCH_FORMAT: u16 = 1;
/// No batch header is longer; what claims to be is damage.
const HEADER_BLOCKS_MAX: usize = 64;

/// The fixed part of a batch's header on disk. Entries follow, then zeros up to a block's end.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | `QBAT` |
/// | 4 | 4 | length of the header without padding |
/// | 8 | 8 | CRC-64/NVME of bytes 16 … length |
/// | 16 | 2 | header format: 1 |
/// | 18 | 1 | stream |
/// | 19 | 1 | type of the per-block check field: 1 = CRC32C |
/// | 20 | 4 | entries |
/// | 24 | 8 | sequence number of the segment |
/// | 32 | 8 | batch index |
/// | 40 | 8 | checksum of the header before it |
/// | 48 | 8 | CRC-64 of the replica GUID |
/// | 56 | 8 | watermark: min(stable, durable) then; never truncated, never lost |
/// | 64 | 8 | the pool's start counter |
/// | 72 | 4 | data blocks |
/// | 76 | 4 | key id; 0: not encrypted |
/// | 80 | | entries |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderOnDisk {
    magic: [u8; 4],
    length: U32,
    check: U64,
    format: U16,
    stream: u8,
    block_check: u8,
    entries: U32,
    sequence: U64,
    index: U64,
    previous: U64,
    guid_hash: U64,
    watermark: U64,
    starts: U64,
    data_blocks: U32,
    key: U32,
}
const _: () = assert!(size_of::<HeaderOnDisk>() == 80);

/// The first byte that a header's checksum covers.
const CHECKED_FROM: usize = offset_of!(HeaderOnDisk, format);

/// An entry on disk: this, then for a Write a CRC32C a block, then the payload.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | epoch |
/// | 8 | 8 | LSN |
/// | 16 | 8 | LBA |
/// | 24 | 4 | blocks |
/// | 28 | 1 | kind: 1 Write, 2 Trim, 3 Zero, 4 Snapshot, 5 DeleteSnapshot, 6 Revert, 7 Resize, 8 View, |
/// | | | 9 BeginClient, 10 EndClient |
/// | 29 | 1 | flags: 1 = FUA, 2 = a part of a client's request, which the payload ends with |
/// | 30 | 2 | bytes of payload |
/// | 32 | 8 | history chain |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct EntryOnDisk {
    epoch: U64,
    lsn: U64,
    lba: U64,
    blocks: U32,
    kind: u8,
    flags: u8,
    payload: U16,
    chain: U64,
}
const _: () = assert!(size_of::<EntryOnDisk>() == 40);

/// Blocks of a small segment of most pools; a longer one has no longer batches.
const LONGEST_BATCH_BLOCKS: u32 = 1024;

/// Blocks of the longest batch, its header included: each fits into a small segment, wherever there
/// is room for it. Recovery looks so far behind a header that is no more, for the one that says
/// whether it was flushed.
pub fn batch_blocks_max(unit_blocks: u32) -> u32 {
    unit_blocks.min(LONGEST_BATCH_BLOCKS) - 1
}

/// The three open segments of a family, and the kinds of batches in them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stream {
    /// The log as clients wrote it.
    Log = 0,
    /// Blocks moved by clean-up, repair or an increment.
    Moved = 1,
    /// Nodes of the map.
    Nodes = 2,
}

impl Stream {
    pub fn from_code(code: u8) -> Option<Self> {
        [Stream::Log, Stream::Moved, Stream::Nodes].into_iter().find(|s| *s as u8 == code)
    }
}

/// Fixed part of a batch's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchHeader {
    pub stream: Stream,
    /// The sequence number of the segment it was written in.
    pub sequence: u64,
    pub index: u64,
    /// Checksum of the header before it in its chain.
    pub previous: u64,
    pub guid_hash: u64,
    /// min(stable, durable) when it was written: never truncated, never lost.
    pub watermark: u64,
    /// The pool's start counter: a batch of an earlier life never continues a later one's chain.
    pub starts: u64,
    pub data_blocks: u32,
    /// Which key encrypts the blocks; 0: none.
    pub key: u32,
}

/// Entry of a header. For nodes: `epoch` is the byte place, `lba` the first LBA covered,
/// `blocks` the length in bytes, `kind` the level, `lsn` the newest version inside. For moved blocks:
/// `epoch` is the logical place of the first, or 0.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BatchEntry<'a> {
    pub epoch: u64,
    pub lsn: u64,
    pub lba: u64,
    pub blocks: u32,
    pub kind: u8,
    pub flags: u8,
    pub chain: u64,
    pub payload: &'a [u8],
    /// Little-endian CRC32Cs, one a block.
    pub crcs: &'a [u8],
}

/// Builds a header in a buffer that is kept from batch to batch.
pub struct HeaderWriter<'a> {
    out: &'a mut Vec<u8>,
    entries: u32,
}

impl<'a> HeaderWriter<'a> {
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        out.clear();
        out.resize(HEADER_LENGTH, 0);
        Self { out, entries: 0 }
    }

    pub fn entry(&mut self, entry: &BatchEntry<'_>, crcs: impl Iterator<Item = u32>) {
        let out = &mut *self.out;
        let raw = EntryOnDisk {
            epoch: entry.epoch.into(),
            lsn: entry.lsn.into(),
            lba: entry.lba.into(),
            blocks: entry.blocks.into(),
            kind: entry.kind,
            flags: entry.flags,
            payload: (entry.payload.len() as u16).into(),
            chain: entry.chain.into(),
        };
        out.extend_from_slice(raw.as_bytes());
        for crc in crcs {
            out.extend_from_slice(&crc.to_le_bytes());
        }
        out.extend_from_slice(entry.payload);
        self.entries += 1;
    }

    /// Fills in the header, pads to whole blocks and returns the header's checksum.
    pub fn finish(self, header: &BatchHeader) -> u64 {
        let length = self.out.len();
        let mut raw = HeaderOnDisk {
            magic: BATCH_MAGIC,
            length: (length as u32).into(),
            check: U64::ZERO,
            format: BATCH_FORMAT.into(),
            stream: header.stream as u8,
            block_check: CHECK_CRC32C,
            entries: self.entries.into(),
            sequence: header.sequence.into(),
            index: header.index.into(),
            previous: header.previous.into(),
            guid_hash: header.guid_hash.into(),
            watermark: header.watermark.into(),
            starts: header.starts.into(),
            data_blocks: header.data_blocks.into(),
            key: header.key.into(),
        };
        self.out[..HEADER_LENGTH].copy_from_slice(raw.as_bytes());
        let check = checksum(&self.out[CHECKED_FROM..]);
        raw.check = check.into();
        self.out[..HEADER_LENGTH].copy_from_slice(raw.as_bytes());
        self.out.resize(length.next_multiple_of(BLOCK_SIZE), 0);
        check
    }
}

/// Bytes that an entry takes in a header.
pub fn entry_length(crcs: usize, payload: usize) -> usize {
    ENTRY_LENGTH + 4 * crcs + payload
}

fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Half of a GUID's checksum: tells replicas' batches apart without spending 16 bytes on each.
pub fn guid_hash(guid: ReplicaGuid) -> u64 {
    checksum(&guid.0.to_le_bytes())
}

/// A header as it was read, checked.
pub struct Batch<'a> {
    pub header: BatchHeader,
    pub check: u64,
    pub header_blocks: u32,
    /// Bytes of the header without padding.
    pub header_length: usize,
    entries: &'a [u8],
    count: u32,
}

/// How many blocks the header that starts here claims to take; `None`: no header starts here.
pub fn header_blocks(first: &[u8]) -> Option<usize> {
    let (raw, _) = HeaderOnDisk::ref_from_prefix(first).ok()?;
    let length = raw.length.get() as usize;
    let blocks = length.div_ceil(BLOCK_SIZE);
    let is_header =
        raw.magic == BATCH_MAGIC && length >= HEADER_LENGTH && blocks <= HEADER_BLOCKS_MAX;
    is_header.then_some(blocks)
}

impl<'a> Batch<'a> {
    /// Parses what [`header_blocks`] delimited. `None`: torn, rotten or something else.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let blocks = header_blocks(bytes)?;
        let (raw, _) = HeaderOnDisk::ref_from_prefix(bytes).ok()?;
        let length = raw.length.get() as usize;
        let check = raw.check.get();
        if checksum(bytes.get(CHECKED_FROM..length)?) != check
            || raw.format.get() != BATCH_FORMAT
            || raw.block_check != CHECK_CRC32C
        {
            return None;
        }
        let header = BatchHeader {
            stream: Stream::from_code(raw.stream)?,
            sequence: raw.sequence.get(),
            index: raw.index.get(),
            previous: raw.previous.get(),
            guid_hash: raw.guid_hash.get(),
            watermark: raw.watermark.get(),
            starts: raw.starts.get(),
            data_blocks: raw.data_blocks.get(),
            key: raw.key.get(),
        };
        let batch = Batch {
            header,
            check,
            header_blocks: blocks as u32,
            header_length: length,
            entries: &bytes[HEADER_LENGTH..length],
            count: raw.entries.get(),
        };
        batch.is_consistent().then_some(batch)
    }

    /// Entries fill the header exactly, and their data the batch.
    fn is_consistent(&self) -> bool {
        let (mut rest, mut data, mut count) = (self.entries, 0u64, 0u32);
        while let Some((entry, tail)) = split_entry(rest, self.header.stream) {
            data += entry.crcs().len() as u64;
            count += 1;
            rest = tail;
        }
        let nodes = self.header.stream == Stream::Nodes;
        rest.is_empty()
            && count == self.count
            && (nodes || data == u64::from(self.header.data_blocks))
    }

    pub fn entries(&self) -> impl Iterator<Item = BatchEntry<'a>> + use<'a> {
        let (mut rest, stream) = (self.entries, self.header.stream);
        std::iter::from_fn(move || {
            let (entry, tail) = split_entry(rest, stream)?;
            rest = tail;
            Some(entry)
        })
    }

    pub fn blocks(&self) -> u32 {
        self.header_blocks.saturating_add(self.header.data_blocks)
    }
}

fn split_entry(bytes: &[u8], stream: Stream) -> Option<(BatchEntry<'_>, &[u8])> {
    let mut rest = bytes;
    let raw = take::<EntryOnDisk>(&mut rest)?;
    let blocks = raw.blocks.get();
    let is_write = stream != Stream::Nodes && raw.kind == 1;
    if is_write && blocks > WRITE_BLOCKS_MAX || stream != Stream::Nodes && blocks > HOLE_BLOCKS_MAX
    {
        return None;
    }
    let crcs = if is_write { size_of::<U32>() * blocks as usize } else { 0 };
    let (crcs, rest) = rest.split_at_checked(crcs)?;
    let (payload, rest) = rest.split_at_checked(raw.payload.get().into())?;
    let entry = BatchEntry {
        epoch: raw.epoch.get(),
        lsn: raw.lsn.get(),
        lba: raw.lba.get(),
        blocks,
        kind: raw.kind,
        flags: raw.flags,
        chain: raw.chain.get(),
        payload,
        crcs,
    };
    (entry.lba <= VOLUME_BLOCKS_MAX).then_some((entry, rest))
}

impl BatchEntry<'_> {
    pub fn crcs(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.crcs.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().expect("4 bytes")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(entries: u64) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer = HeaderWriter::new(&mut out);
        for lsn in 1..=entries {
            let entry = BatchEntry { lsn, lba: 9, blocks: 2, kind: 1, ..BatchEntry::default() };
            writer.entry(&entry, [3, 4].into_iter());
        }
        let header = BatchHeader {
            stream: Stream::Log,
            sequence: 5,
            index: 6,
            previous: 7,
            guid_hash: 8,
            watermark: 1,
            starts: 2,
            data_blocks: 2 * entries as u32,
            key: 0,
        };
        writer.finish(&header);
        out
    }

    proptest! {
        #[test]
        fn a_header_is_read_back_whole_or_not_at_all(
            entries in 1u64..200, flip in any::<prop::sample::Index>(), mask in 1u8..,
        ) {
            let mut bytes = sample(entries);
            let batch = Batch::parse(&bytes).expect("its own header");
            prop_assert_eq!(batch.entries().count() as u64, entries);
            prop_assert!(batch.entries().all(|e| e.crcs().eq([3, 4])));
            let length = u32::from_le_bytes(bytes[4..8].try_into().expect("4 bytes")) as usize;
            let at = flip.index(length);
            bytes[at] ^= mask;
            prop_assert!(Batch::parse(&bytes).is_none());
        }

        #[test]
        fn garbage_is_no_header(mut bytes in prop::collection::vec(any::<u8>(), 4096)) {
            bytes[..4].copy_from_slice(&BATCH_MAGIC);
            prop_assert!(Batch::parse(&bytes).is_none());
        }
    }
}
