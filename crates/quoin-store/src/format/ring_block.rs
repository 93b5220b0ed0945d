//! A block of the metadata ring. A record takes one or more of them.

use std::mem::offset_of;

use bytes::Bytes;
use quoin_types::{BLOCK_SIZE, crc32c};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const RING_MAGIC: [u8; 4] = *b"QRNG";
/// Bytes of a record that one block takes.
pub const PAYLOAD: usize = 4072;

/// Flag of the first block of a record.
pub const FIRST: u8 = 1;
/// Flag of the last block of a record.
pub const LAST: u8 = 2;
/// Flag of a state that was not on media yet when the half before it was still in use.
pub const AHEAD: u8 = 4;
/// Flag of the note that a half ends with once the other one has taken over: a record without
/// payload.
pub const SUCCEEDED: u8 = 8;

/// A block of the ring on disk.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | `QRNG` |
/// | 4 | 4 | CRC32C of bytes 8 … 4096 |
/// | 8 | 8 | generation |
/// | 16 | 4 | index of the block in its half |
/// | 20 | 2 | bytes of payload |
/// | 22 | 1 | 1: first block of a record, 2: last, 4: of a state written ahead, 8: the note that the other half has taken over |
/// | 23 | 1 | zero |
/// | 24 | 4072 | payload |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OnDisk {
    magic: [u8; 4],
    crc: U32,
    generation: U64,
    index: U32,
    length: U16,
    flags: u8,
    zero: u8,
    payload: [u8; PAYLOAD],
}
const _: () = assert!(size_of::<OnDisk>() == BLOCK_SIZE);

impl OnDisk {
    fn crc(&self) -> u32 {
        crc32c(&self.as_bytes()[offset_of!(OnDisk, generation)..])
    }
}

/// A block of the ring as it was read, checked.
pub struct RingBlock {
    pub generation: u64,
    pub index: u32,
    pub flags: u8,
    pub payload: Bytes,
}

impl RingBlock {
    /// `None`: no block of a ring, or a damaged one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let raw = OnDisk::ref_from_bytes(bytes).ok()?;
        if raw.magic != RING_MAGIC || raw.crc.get() != raw.crc() {
            return None;
        }
        Some(RingBlock {
            generation: raw.generation.get(),
            index: raw.index.get(),
            flags: raw.flags,
            payload: Bytes::copy_from_slice(raw.payload.get(..raw.length.get().into())?),
        })
    }
}

/// Blocks that a record takes.
pub fn blocks_of(record: &[u8]) -> u32 {
    record.len().div_ceil(PAYLOAD).max(1) as u32
}

/// The blocks of a record; `first` is the index of its first one.
pub fn encode(record: &[u8], generation: u64, first: u32, flags: u8) -> Vec<u8> {
    let blocks = blocks_of(record);
    let mut out = vec![0; blocks as usize * BLOCK_SIZE];
    for (i, block) in (0..blocks).zip(out.chunks_exact_mut(BLOCK_SIZE)) {
        let rest = &record[i as usize * PAYLOAD..];
        let chunk = &rest[..rest.len().min(PAYLOAD)];
        let raw = OnDisk::mut_from_bytes(block).expect("a whole block");
        raw.magic = RING_MAGIC;
        raw.generation = generation.into();
        raw.index = (first + i).into();
        raw.length = (chunk.len() as u16).into();
        raw.flags = flags | if i == 0 { FIRST } else { 0 };
        raw.flags |= if i + 1 == blocks { LAST } else { 0 };
        raw.payload[..chunk.len()].copy_from_slice(chunk);
        raw.crc = raw.crc().into();
    }
    out
}
