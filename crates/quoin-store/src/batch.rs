//! Batches: what segments are made of. A header, then its data, all 4 KiB-aligned.
//!
//! Headers of a replica's log form one chain over all its segments: each carries the checksum of
//! the one before. Batches that clean-up or an increment writes are flagged and keep their LSNs;
//! they and the batches of map nodes are chained within their segment only.

use quoin_types::{BLOCK_SIZE, HOLE_BLOCKS_MAX, VOLUME_BLOCKS_MAX, WRITE_BLOCKS_MAX};

pub const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"QBAT");
pub const HEADER_LENGTH: usize = 80;
pub const ENTRY_LENGTH: usize = 40;
/// The tag of the per-block check field: a plain CRC32C.
const CHECK_CRC32C: u8 = 1;
const BATCH_FORMAT: u16 = 1;
/// No batch header is longer; what claims to be is damage.
const HEADER_BLOCKS_MAX: usize = 64;

/// Blocks of the longest batch, its header included: each fits into a small segment, wherever there
/// is room for it. Recovery looks so far behind a header that is no more, for the one that says
/// whether it was flushed.
pub fn batch_blocks_max(unit_blocks: u32) -> u32 {
    unit_blocks - 1
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
/// `blocks` the length in bytes, `kind` the level, `lsn` the newest version inside.
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
        let mut head = [0; ENTRY_LENGTH];
        head[..8].copy_from_slice(&entry.epoch.to_le_bytes());
        head[8..16].copy_from_slice(&entry.lsn.to_le_bytes());
        head[16..24].copy_from_slice(&entry.lba.to_le_bytes());
        head[24..28].copy_from_slice(&entry.blocks.to_le_bytes());
        (head[28], head[29]) = (entry.kind, entry.flags);
        head[30..32].copy_from_slice(&(entry.payload.len() as u16).to_le_bytes());
        head[32..].copy_from_slice(&entry.chain.to_le_bytes());
        let out = &mut *self.out;
        out.extend_from_slice(&head);
        for crc in crcs {
            out.extend_from_slice(&crc.to_le_bytes());
        }
        out.extend_from_slice(entry.payload);
        self.entries += 1;
    }

    /// Fills in the header, pads to whole blocks and returns the header's checksum.
    pub fn finish(self, header: &BatchHeader) -> u64 {
        let length = self.out.len();
        let head = &mut self.out[..HEADER_LENGTH];
        head[..4].copy_from_slice(&BATCH_MAGIC.to_le_bytes());
        head[4..8].copy_from_slice(&(length as u32).to_le_bytes());
        head[16..18].copy_from_slice(&BATCH_FORMAT.to_le_bytes());
        head[18] = header.stream as u8;
        head[19] = CHECK_CRC32C;
        head[20..24].copy_from_slice(&self.entries.to_le_bytes());
        head[24..32].copy_from_slice(&header.sequence.to_le_bytes());
        head[32..40].copy_from_slice(&header.index.to_le_bytes());
        head[40..48].copy_from_slice(&header.previous.to_le_bytes());
        head[48..56].copy_from_slice(&header.guid_hash.to_le_bytes());
        head[56..64].copy_from_slice(&header.watermark.to_le_bytes());
        head[64..72].copy_from_slice(&header.starts.to_le_bytes());
        head[72..76].copy_from_slice(&header.data_blocks.to_le_bytes());
        head[76..80].copy_from_slice(&header.key.to_le_bytes());
        let check = checksum(&self.out[16..]);
        self.out[8..16].copy_from_slice(&check.to_le_bytes());
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

/// A header as it was read, checked.
pub struct Batch<'a> {
    pub header: BatchHeader,
    pub check: u64,
    pub header_blocks: u32,
    entries: &'a [u8],
    count: u32,
}

/// How many blocks the header that starts here claims to take; `None`: no header starts here.
pub fn header_blocks(first: &[u8]) -> Option<usize> {
    if first.len() < HEADER_LENGTH || first[..4] != BATCH_MAGIC.to_le_bytes() {
        return None;
    }
    let length = u32::from_le_bytes(first[4..8].try_into().ok()?) as usize;
    let blocks = length.div_ceil(BLOCK_SIZE);
    (length >= HEADER_LENGTH && blocks <= HEADER_BLOCKS_MAX).then_some(blocks)
}

impl<'a> Batch<'a> {
    /// Parses what [`header_blocks`] delimited. `None`: torn, rotten or something else.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let blocks = header_blocks(bytes)?;
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let length = u32_at(4) as usize;
        let body = bytes.get(16..length)?;
        let check = u64_at(8);
        if checksum(body) != check
            || body[..2] != BATCH_FORMAT.to_le_bytes()
            || body[3] != CHECK_CRC32C
        {
            return None;
        }
        let header = BatchHeader {
            stream: Stream::from_code(body[2])?,
            sequence: u64_at(24),
            index: u64_at(32),
            previous: u64_at(40),
            guid_hash: u64_at(48),
            watermark: u64_at(56),
            starts: u64_at(64),
            data_blocks: u32_at(72),
            key: u32_at(76),
        };
        let entries = &bytes[HEADER_LENGTH..length];
        let batch =
            Batch { header, check, header_blocks: blocks as u32, entries, count: u32_at(20) };
        batch.is_consistent().then_some(batch)
    }

    /// Entries fill the header exactly, and their data the batch.
    fn is_consistent(&self) -> bool {
        let (mut rest, mut data, mut count) = (self.entries, 0u64, 0u32);
        while let Some((entry, tail)) = split_entry(rest, self.header.stream) {
            data += (entry.crcs.len() / 4) as u64;
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
    let (head, rest) = bytes.split_at_checked(ENTRY_LENGTH)?;
    let u64_at = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
    let blocks = u32::from_le_bytes(head[24..28].try_into().expect("4 bytes"));
    let kind = head[28];
    let payload_length = u16::from_le_bytes(head[30..32].try_into().expect("2 bytes"));
    let is_write = stream != Stream::Nodes && kind == 1;
    if is_write && blocks > WRITE_BLOCKS_MAX || stream != Stream::Nodes && blocks > HOLE_BLOCKS_MAX
    {
        return None;
    }
    let (crcs, rest) = rest.split_at_checked(if is_write { 4 * blocks as usize } else { 0 })?;
    let (payload, rest) = rest.split_at_checked(payload_length.into())?;
    let entry = BatchEntry {
        epoch: u64_at(0),
        lsn: u64_at(8),
        lba: u64_at(16),
        blocks,
        kind,
        flags: head[29],
        chain: u64_at(32),
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
            bytes[..4].copy_from_slice(&BATCH_MAGIC.to_le_bytes());
            prop_assert!(Batch::parse(&bytes).is_none());
        }
    }
}
