//! A segment in the table of segments: an entry of a leaf, like a block of the map.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

use crate::format::batch::Stream;
use crate::format::checkpoint::SegmentState;
use crate::format::node::BlockAt;
use crate::format::superblock::LARGE_UNITS;

/// The place of an entry. The version of the entry is the sequence number of the segment, the
/// CRC32C its live bytes.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | stream, and 4 where the segment is large, 8 where it has a logical number |
/// | 1 | 4 | blocks written |
/// | 5 | 1 | 1: an entry is no hole |
/// | 6 | 2 | zero |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct PlaceOnDisk {
    form: u8,
    used_blocks: U32,
    is_segment: u8,
    zero: [u8; 2],
}
const _: () = assert!(size_of::<PlaceOnDisk>() == 8);

/// The place of an entry whose segment has a logical number.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | as above |
/// | 1 | 3 | blocks written |
/// | 4 | 4 | logical number, less than 2³² − 1 |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct LogicalPlaceOnDisk {
    form: u8,
    used_blocks: [u8; 3],
    logical: U32,
}
const _: () = assert!(size_of::<LogicalPlaceOnDisk>() == 8);

const IS_LARGE: u8 = 4;
const IS_LOGICAL: u8 = 8;

/// The entry of a segment, and its live bytes.
pub fn entry_of(state: &SegmentState) -> (BlockAt, u32) {
    let live = u32::try_from(state.live_bytes).unwrap_or(u32::MAX);
    let size = if state.units == LARGE_UNITS { IS_LARGE } else { 0 };
    let form = state.stream as u8 | size;
    let place: U64 = match state.logical {
        0 => zerocopy::transmute!(PlaceOnDisk {
            form,
            used_blocks: state.used_blocks.into(),
            is_segment: 1,
            zero: [0; 2],
        }),
        logical => {
            let [a, b, c, _] = state.used_blocks.to_le_bytes();
            zerocopy::transmute!(LogicalPlaceOnDisk {
                form: form | IS_LOGICAL,
                used_blocks: [a, b, c],
                logical: logical.into(),
            })
        }
    };
    (BlockAt { version: state.sequence, place: place.get(), crc: live }, live)
}

/// The segment of an entry at this unit, if it is one.
pub fn segment_of(unit: u32, entry: &BlockAt) -> Option<SegmentState> {
    let raw: PlaceOnDisk = zerocopy::transmute!(U64::new(entry.place));
    let (used_blocks, logical) = match raw.form & IS_LOGICAL {
        0 if (raw.is_segment, raw.zero) == (1, [0; 2]) => (raw.used_blocks.get(), 0),
        0 => return None,
        _ => {
            let raw: LogicalPlaceOnDisk = zerocopy::transmute!(U64::new(entry.place));
            let [a, b, c] = raw.used_blocks;
            (u32::from_le_bytes([a, b, c, 0]), raw.logical.get())
        }
    };
    if raw.form & IS_LOGICAL != 0 && !(1..u32::MAX).contains(&logical) {
        return None;
    }
    Some(SegmentState {
        unit,
        units: if raw.form & IS_LARGE == 0 { 1 } else { LARGE_UNITS },
        stream: Stream::from_code(raw.form & !IS_LARGE & !IS_LOGICAL)?,
        sequence: entry.version,
        used_blocks,
        live_bytes: entry.crc.into(),
        last_lsn: 0,
        last_index: 0,
        logical,
    })
}

#[cfg(test)]
mod tests {
    use quoin_types::BLOCK_SIZE;

    use super::*;
    use crate::format::node::LOST_PLACE;

    #[test]
    fn every_segment_is_read_back_from_its_entry() {
        for (stream, units) in [(Stream::Log, 1), (Stream::Moved, 8), (Stream::Nodes, 8)] {
            let logicals = [0, 1, u32::MAX - 1];
            let sizes = [1, 1024, units * (1 << 16)];
            for (used_blocks, logical) in sizes.iter().flat_map(|s| logicals.map(|l| (*s, l))) {
                let state = SegmentState {
                    unit: 16,
                    units,
                    stream,
                    sequence: 7 << 32 | 5,
                    used_blocks,
                    live_bytes: u64::from(used_blocks) * BLOCK_SIZE as u64,
                    last_lsn: 0,
                    last_index: 0,
                    logical,
                };
                let (entry, _) = entry_of(&state);
                let entry = BlockAt { crc: state.live_bytes as u32, ..entry };
                assert!(entry.place != 0 && entry.place < LOST_PLACE);
                assert_eq!(segment_of(16, &entry), Some(state));
            }
        }
        let lost = BlockAt { version: 1, place: LOST_PLACE, crc: 0 };
        assert_eq!(segment_of(16, &lost), None);
    }
}
