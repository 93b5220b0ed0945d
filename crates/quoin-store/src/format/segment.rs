//! The first block of a segment, which names it. Recovery believes the metadata ring.

use std::mem::offset_of;

use quoin_types::{BLOCK_SIZE, ReplicaGuid};
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::batch::Stream;
use crate::format::checkpoint::{IS_LOGICAL, SegmentState};
use crate::format::superblock::{FORMAT_VERSION, FeatureWords, Superblock};

const SEGMENT_MAGIC: [u8; 8] = *b"QUOINSEG";

/// A segment's header on disk, followed by zeros up to the block's end.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | `QUOINSEG` |
/// | 8 | 4 | format version |
/// | 12 | 4 | unit |
/// | 16 | 24 | feature words |
/// | 40 | 16 | pool id |
/// | 56 | 16 | family (the GUID of its first replica) |
/// | 72 | 8 | sequence number: start counter · 2³² + n, so new at each reuse |
/// | 80 | 4 | units |
/// | 84 | 1 | stream: 0 log, 1 moved blocks, 2 map nodes; and 128 where it has a logical number |
/// | 85 | 4 | CRC32C of what is before |
///
/// A [`NumberOnDisk`] follows where it has a logical number.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OnDisk {
    magic: [u8; 8],
    version: U32,
    unit: U32,
    features: FeatureWords,
    pool: U128,
    family: U128,
    sequence: U64,
    units: U32,
    stream: u8,
    crc: U32,
}
const _: () = assert!(size_of::<OnDisk>() == 89);

/// | offset | size | field |
/// |---|---|---|
/// | 89 | 4 | logical number |
/// | 93 | 4 | CRC32C of all before |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NumberOnDisk {
    logical: U32,
    crc: U32,
}
const _: () = assert!(size_of::<NumberOnDisk>() == 8);

/// The header's block as it is written when the segment is opened.
pub fn segment_header(superblock: &Superblock, guid: ReplicaGuid, state: &SegmentState) -> Vec<u8> {
    let mut raw = OnDisk {
        magic: SEGMENT_MAGIC,
        version: FORMAT_VERSION.into(),
        unit: state.unit.into(),
        features: superblock.features.into(),
        pool: superblock.pool.0.into(),
        family: guid.0.into(),
        sequence: state.sequence.into(),
        units: state.units.into(),
        stream: state.stream as u8 | if state.logical == 0 { 0 } else { IS_LOGICAL },
        crc: U32::ZERO,
    };
    raw.crc = quoin_types::crc32c(&raw.as_bytes()[..offset_of!(OnDisk, crc)]).into();
    let mut out = vec![0; BLOCK_SIZE];
    let end = size_of::<OnDisk>();
    out[..end].copy_from_slice(raw.as_bytes());
    if state.logical != 0 {
        let logical = U32::new(state.logical);
        let numbered = [raw.as_bytes(), logical.as_bytes()].concat();
        let number = NumberOnDisk { logical, crc: quoin_types::crc32c(&numbered).into() };
        out[end..end + size_of::<NumberOnDisk>()].copy_from_slice(number.as_bytes());
    }
    out
}

/// Decodes the first block of a segment of this replica, if it is one. The block does not have the
/// counts of written and live blocks.
pub fn decode_header(
    superblock: &Superblock,
    guid: ReplicaGuid,
    unit: u32,
    bytes: &[u8],
) -> Option<SegmentState> {
    let (raw, rest) = OnDisk::ref_from_prefix(bytes).ok()?;
    let logical = match raw.stream & IS_LOGICAL {
        0 => 0,
        _ => NumberOnDisk::ref_from_prefix(rest).ok()?.0.logical.get(),
    };
    let state = SegmentState {
        unit,
        units: raw.units.get(),
        stream: Stream::from_code(raw.stream & !IS_LOGICAL)?,
        sequence: raw.sequence.get(),
        used_blocks: 1,
        live_bytes: 0,
        last_lsn: 0,
        last_index: 0,
        logical,
    };
    // Features are those of the time when it was written.
    let written_by = Superblock { features: raw.features.into(), ..*superblock };
    (bytes == segment_header(&written_by, guid, &state)).then_some(state)
}
