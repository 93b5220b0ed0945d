//! The metadata ring: small durable state outside the segments, so that it has room in a full
//! pool. It is mirrored at both ends of the pool and has two halves.
//!
//! A half begins with one record that holds the whole state; what changes is appended behind it.
//! When a half is full, the whole state is written to the other one under the next generation,
//! and synced before anything follows. A record is one or more blocks; a block counts if either
//! copy is good, and the first one that is good in neither ends the half (a torn tail). One that the
//! disk refuses to read ends nothing where the other copy is not good either: what it says may be a
//! promise, so the ring is not opened.
//!
//! A half whose first record is broken was being written when the power went, and the half before it
//! holds the same. Records behind that one tell otherwise: they were appended after the sync, so it
//! was whole once, and what the older half says is no longer true. Then the metadata are lost.

use std::io::IoSlice;

use bytes::{BufMut, Bytes, BytesMut};
use quoin_core::replica::store::{IoFault, StoreError};
use quoin_core::{BLOCK_SIZE, crc32c, mutant};

use crate::disk::Disk;
use crate::error::PoolError;
use crate::layout::Superblock;

const RING_MAGIC: u32 = u32::from_le_bytes(*b"QRNG");
const HEAD: usize = 24;
const PAYLOAD: usize = BLOCK_SIZE - HEAD;
const FIRST: u8 = 1;
const LAST: u8 = 2;

pub struct Ring {
    starts: [u64; 2],
    half_blocks: u32,
    generation: u64,
    next: u32,
}

struct RingBlock {
    generation: u64,
    index: u32,
    flags: u8,
    payload: Bytes,
}

impl Ring {
    fn blank(superblock: &Superblock) -> Self {
        let half_blocks = superblock.ring_blocks / 2;
        Ring { starts: superblock.rings(), half_blocks, generation: 0, next: half_blocks }
    }

    /// A ring without records: the first [`Ring::restate`] makes it one.
    pub fn format<D: Disk>(disk: &D, superblock: &Superblock) -> Result<Self, StoreError> {
        let zeroes = vec![0; BLOCK_SIZE];
        for start in superblock.rings() {
            for block in start..start + u64::from(superblock.ring_blocks) {
                write(disk, block, &zeroes)?;
            }
        }
        Ok(Self::blank(superblock))
    }

    /// Bytes that the whole state may take.
    pub fn capacity(&self) -> usize {
        self.half_blocks as usize * PAYLOAD
    }

    /// Reads the records of the newest complete half, oldest first.
    pub fn open<D: Disk>(
        disk: &D,
        superblock: &Superblock,
    ) -> Result<(Self, Vec<Bytes>), PoolError> {
        let mut ring = Self::blank(superblock);
        let mut firsts = [None; 2];
        for (first, half) in firsts.iter_mut().zip(0..) {
            *first = ring.read_block(disk, half, 0, None)?.map(|block| block.generation);
        }
        let mut generations: Vec<u64> = firsts.into_iter().flatten().collect();
        generations.sort_unstable();
        while let Some(generation) = generations.pop() {
            ring.generation = generation;
            let records = ring.read_half(disk)?;
            if records.is_empty() {
                continue;
            }
            let other = 1 - generation % 2;
            let is_older = firsts[other as usize].is_some_and(|first| first < generation);
            if !is_older && ring.was_appended_to(disk, other)? {
                return Err(PoolError::MetadataLost);
            }
            return Ok((ring, records));
        }
        Err(PoolError::MetadataLost)
    }

    /// Whether a half holds a record behind its first one that is newer than this generation.
    fn was_appended_to<D: Disk>(&self, disk: &D, half: u64) -> Result<bool, IoFault> {
        if mutant::is("newer-half-of-the-ring-forgotten") {
            return Ok(false);
        }
        let mut buffer = vec![0; BLOCK_SIZE];
        let mut refused = None;
        for (index, copy) in (1..self.half_blocks).flat_map(|index| [(index, 0), (index, 1)]) {
            let offset = self.block_of(copy, half, index) * BLOCK_SIZE as u64;
            if let Err(fault) = disk.read_at(offset, &mut buffer) {
                refused = Some(fault);
                continue;
            }
            let newer = decode(&buffer).filter(|b| {
                b.generation > self.generation && b.generation % 2 == half && b.index == index
            });
            if newer.is_some_and(|block| block.flags & FIRST != 0) {
                return Ok(true);
            }
        }
        refused.map_or(Ok(false), Err)
    }

    fn read_half<D: Disk>(&mut self, disk: &D) -> Result<Vec<Bytes>, IoFault> {
        let (mut records, mut open) = (Vec::new(), None::<BytesMut>);
        self.next = 0;
        for index in 0..self.half_blocks {
            let half = self.generation % 2;
            let Some(block) = self.read_block(disk, half, index, Some(self.generation))? else {
                break;
            };
            if block.flags & FIRST != 0 {
                open = Some(BytesMut::new());
            }
            let Some(record) = &mut open else { break };
            record.extend_from_slice(&block.payload);
            if block.flags & LAST != 0
                && let Some(record) = open.take()
            {
                records.push(record.freeze());
                self.next = index + 1;
            }
        }
        Ok(records)
    }

    fn block_of(&self, copy: usize, half: u64, index: u32) -> u64 {
        self.starts[copy] + half * u64::from(self.half_blocks) + u64::from(index)
    }

    fn read_block<D: Disk>(
        &self,
        disk: &D,
        half: u64,
        index: u32,
        generation: Option<u64>,
    ) -> Result<Option<RingBlock>, IoFault> {
        let mut buffer = vec![0; BLOCK_SIZE];
        let (mut refused, mut is_older) = (None, false);
        for copy in 0..2 {
            let offset = self.block_of(copy, half, index) * BLOCK_SIZE as u64;
            if let Err(fault) = disk.read_at(offset, &mut buffer) {
                refused = Some(fault);
                continue;
            }
            let Some(block) = decode(&buffer) else {
                is_older |= buffer.iter().all(|byte| *byte == 0);
                continue;
            };
            if block.index != index || block.generation % 2 != half {
                continue;
            }
            if generation.is_none_or(|g| g == block.generation) {
                return Ok(Some(block));
            }
            is_older = true;
        }
        // A copy that shows what was there before says that nothing was written.
        match refused {
            Some(fault) if !is_older && !mutant::is("refused-copy-ends-the-ring") => Err(fault),
            _ => Ok(None),
        }
    }

    /// How many blocks of the records that count are bad in one of their copies.
    pub fn bad_copies<D: Disk>(&self, disk: &D) -> u32 {
        let mut buffer = vec![0; BLOCK_SIZE];
        let mut bad = 0;
        for (copy, index) in (0..2).flat_map(|copy| (0..self.next).map(move |i| (copy, i))) {
            let offset = self.block_of(copy, self.generation % 2, index) * BLOCK_SIZE as u64;
            disk.forget_cached(offset, BLOCK_SIZE as u64);
            let read = disk.read_at(offset, &mut buffer).is_ok();
            let block = decode(&buffer).filter(|_| read);
            let good = block.is_some_and(|b| (b.generation, b.index) == (self.generation, index));
            bad += u32::from(!good);
        }
        bad
    }

    /// Appends a record to both copies; `Ok(false)`: no room, restate first.
    pub fn append<D: Disk>(&mut self, disk: &D, record: &[u8]) -> Result<bool, StoreError> {
        let blocks = record.len().div_ceil(PAYLOAD).max(1) as u32;
        if self.next + blocks > self.half_blocks {
            return Ok(false);
        }
        let bytes = encode(record, self.generation, self.next);
        for copy in 0..2 {
            write(disk, self.block_of(copy, self.generation % 2, self.next), &bytes)?;
        }
        self.next += blocks;
        Ok(true)
    }

    /// Writes the whole state to the other half, durably.
    pub fn restate<D: Disk>(&mut self, disk: &D, state: &[u8]) -> Result<(), StoreError> {
        if state.len() > self.capacity() {
            return Err(StoreError::Full);
        }
        let before = (self.generation, self.next);
        (self.generation, self.next) = (self.generation + 1, 0);
        let written = self.append(disk, state).and_then(|_| disk.sync().map_err(StoreError::Io));
        if written.is_err() {
            (self.generation, self.next) = before;
        }
        written
    }
}

fn write<D: Disk>(disk: &D, block: u64, bytes: &[u8]) -> Result<(), StoreError> {
    disk.write_at(block * BLOCK_SIZE as u64, &[IoSlice::new(bytes)]).map_err(StoreError::Io)
}

fn encode(record: &[u8], generation: u64, first: u32) -> Vec<u8> {
    let chunks: Vec<&[u8]> =
        if record.is_empty() { vec![record] } else { record.chunks(PAYLOAD).collect() };
    let mut out = Vec::with_capacity(chunks.len() * BLOCK_SIZE);
    for (i, chunk) in chunks.iter().enumerate() {
        let start = out.len();
        let last = if i + 1 == chunks.len() { LAST } else { 0 };
        out.put_u32_le(RING_MAGIC);
        out.put_u32_le(0);
        out.put_u64_le(generation);
        out.put_u32_le(first + i as u32);
        out.put_u16_le(chunk.len() as u16);
        out.put_u8(last | if i == 0 { FIRST } else { 0 });
        out.put_u8(0);
        out.extend_from_slice(chunk);
        out.resize(start + BLOCK_SIZE, 0);
        let crc = crc32c(&out[start + 8..]);
        out[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
    }
    out
}

fn decode(bytes: &[u8]) -> Option<RingBlock> {
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    if u32_at(0) != RING_MAGIC || u32_at(4) != crc32c(&bytes[8..]) {
        return None;
    }
    let length = usize::from(u16::from_le_bytes([bytes[20], bytes[21]]));
    Some(RingBlock {
        generation: u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes")),
        index: u32_at(16),
        flags: bytes[22],
        payload: Bytes::copy_from_slice(bytes.get(HEAD..HEAD + length)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDisk;
    use crate::layout::FormatOptions;
    use quoin_core::PoolId;

    fn ring() -> (MemoryDisk, Superblock, Ring) {
        let disk = MemoryDisk::new(16 << 20);
        let options = FormatOptions { unit_blocks: 16, ..FormatOptions::new(PoolId(1)) };
        let superblock = Superblock::new(disk.size(), &options).expect("a fit pool");
        let ring = Ring::format(&disk, &superblock).expect("a ring");
        (disk, superblock, ring)
    }

    #[test]
    fn records_come_back_in_order_through_many_turns_and_the_loss_of_one_copy() {
        let (disk, superblock, mut ring) = ring();
        let mut expected = vec![];
        for i in 0..500u32 {
            let record = vec![i as u8; 1 + (i as usize * 37) % 9000];
            if !ring.append(&disk, &record).expect("a write") {
                let state = vec![0xee; 5000];
                ring.restate(&disk, &state).expect("a restatement");
                expected = vec![state];
                assert!(ring.append(&disk, &record).expect("a write"));
            }
            expected.push(record);
            let (_, found) = Ring::open(&disk, &superblock).expect("a ring");
            assert_eq!(found, expected);
        }
        for block in 0..u64::from(superblock.ring_blocks) {
            disk.rot((superblock.rings()[0] + block) * BLOCK_SIZE as u64 + 100, 3);
        }
        let (_, found) = Ring::open(&disk, &superblock).expect("the mirror");
        assert_eq!(found, expected);
    }

    #[test]
    fn a_restatement_that_was_cut_off_leaves_the_half_before_it() {
        let (disk, superblock, mut ring) = ring();
        ring.restate(&disk, &[1; 9000]).expect("a restatement");
        disk.fail_after(Some(0));
        assert!(ring.restate(&disk, &[2; 9000]).is_err());
        disk.fail_after(None);
        disk.fail_syncs();
        assert!(ring.restate(&disk, &[2; 9000]).is_err());
        disk.power_cut(|| false);
        let (_, found) = Ring::open(&disk, &superblock).expect("the half before");
        assert_eq!(found, vec![Bytes::from(vec![1; 9000])]);
    }
}
