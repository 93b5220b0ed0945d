//! Slots as bytes of a stream: compressed where that gains something.

use bytes::Bytes;
use quoin_cluster::mirror::sending::{BLOCKS_MAX, RANGES_MAX};
use quoin_types::BLOCK_SIZE;
use quoin_wire::WireError;
use quoin_wire::frame::{HEADER_LEN, Header, Limits};
use quoin_wire::history::{Message, Slots};

use super::frame::{Packed, SLOTS_BYTES_MAX};

/// Level of the compression: the fastest one.
const LEVEL: i32 = 1;
/// Frames in a row without a gain after which only some are tried, and each how many then.
const DRY_MAX: u32 = 8;
const DRY_EVERY: u32 = 16;

const _: () = assert!(BLOCKS_MAX * (BLOCK_SIZE + 4) + RANGES_MAX * 17 + 1024 < SLOTS_BYTES_MAX);

/// Reason why bytes are no slots.
#[derive(Debug, thiserror::Error)]
pub enum Unpacked {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("compressed slots that cannot be read: {0}")]
    Zstd(std::io::Error),
    #[error("slots of another length than was said")]
    Length,
    #[error("a frame that has no slots")]
    NoSlots,
}

/// Choice of the frames that are compressed.
#[derive(Default, Debug)]
pub struct Packer {
    /// Frames since the last one that gained something.
    dry: u32,
}

impl Packer {
    fn is_worth_a_try(&self) -> bool {
        self.dry < DRY_MAX || self.dry.is_multiple_of(DRY_EVERY)
    }

    /// Packs slots on a thread for that.
    ///
    /// # Errors
    /// They are longer than a frame.
    pub async fn pack(&mut self, slots: Slots, may_compress: bool) -> Result<Packed, WireError> {
        let tries = may_compress && self.is_worth_a_try();
        let packed = tokio::task::spawn_blocking(move || pack(slots, tries)).await;
        let ended = |_| WireError::Malformed("slots: the thread that packs them ended");
        let packed = packed.map_err(ended)??;
        self.dry = if packed.is_zstd { 0 } else { self.dry.saturating_add(1) };
        Ok(packed)
    }
}

fn pack(slots: Slots, tries: bool) -> Result<Packed, WireError> {
    let mut raw = Vec::new();
    Message::Slots(slots).write(&mut raw)?;
    let too_long = WireError::Malformed("slots: longer than a frame");
    let raw_length = u32::try_from(raw.len()).ok().filter(|_| raw.len() <= SLOTS_BYTES_MAX);
    let raw_length = raw_length.ok_or(too_long)?;
    if tries {
        // Output that would gain nothing has no room, and is given up early.
        let room = raw.len() - raw.len() / 10;
        let mut smaller = vec![0; room];
        if let Ok(length) = zstd::bulk::compress_to_buffer(&raw, &mut smaller, LEVEL) {
            smaller.truncate(length);
            return Ok(Packed { is_zstd: true, raw_length, bytes: smaller.into() });
        }
    }
    Ok(Packed { is_zstd: false, raw_length, bytes: raw.into() })
}

/// The frame of a history socket, as it was packed, and the slots in it.
///
/// # Errors
/// It has none, or more than was said.
pub fn unpack(packed: Packed) -> Result<(Bytes, Slots), Unpacked> {
    let length = packed.raw_length as usize;
    if length > SLOTS_BYTES_MAX {
        return Err(Unpacked::Length);
    }
    let raw = match packed.is_zstd {
        true => {
            let raw = zstd::bulk::decompress(&packed.bytes, length).map_err(Unpacked::Zstd)?;
            Bytes::from(raw)
        }
        false => packed.bytes,
    };
    if raw.len() != length {
        return Err(Unpacked::Length);
    }
    let begin = raw.first_chunk::<HEADER_LEN>().ok_or(Unpacked::Length)?;
    let header = Header::decode(begin, &Limits::SESSION)?;
    match Message::decode(&header, raw.clone())? {
        Message::Slots(slots) if slots.part.has_its_blocks() => Ok((raw, slots)),
        _ => Err(Unpacked::NoSlots),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quoin_cluster::mirror::sending::cut;
    use quoin_types::crc32c;
    use quoin_types::message::ChangedRange;
    use quoin_wire::history::{Block, Part};

    use super::*;

    fn block(fill: u8) -> Block {
        let data = Bytes::from(vec![fill; BLOCK_SIZE]);
        Block { crc: crc32c(&data), data }
    }

    fn noise(blocks: u8) -> Slots {
        let mut seed = 1u64;
        let mut random = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed as u8
        };
        let data = (0..blocks).map(|_| {
            let data = Bytes::from((0..BLOCK_SIZE).map(|_| random()).collect::<Vec<_>>());
            Block { crc: crc32c(&data), data }
        });
        let ranges = vec![ChangedRange { lba: 0, blocks: u64::from(blocks), hole: false }];
        let part = Part { ranges, blocks: data.collect(), next: Some(u64::from(blocks)) };
        Slots { place: 0, part, end: None }
    }

    fn plain(blocks: u64) -> Slots {
        let ranges = vec![ChangedRange { lba: 0, blocks, hole: false }];
        let blocks_of = (0..blocks).map(|fill| block(fill as u8)).collect();
        Slots { place: 0, part: Part { ranges, blocks: blocks_of, next: Some(blocks) }, end: None }
    }

    #[tokio::test]
    async fn slots_are_compressed_where_it_gains_and_tried_seldom_where_it_does_not() {
        let mut packer = Packer::default();
        let packed = packer.pack(plain(8), true).await.unwrap();
        assert!(packed.is_zstd && packed.bytes.len() < packed.raw_length as usize / 10);
        assert_eq!(unpack(packed).unwrap().1, plain(8));
        let raw = packer.pack(plain(8), false).await.unwrap();
        assert!(!raw.is_zstd);
        assert_eq!(unpack(raw).unwrap().1, plain(8));
        let mut packer = Packer::default();
        let mut tried = 0;
        for _ in 0..64 {
            tried += u32::from(packer.is_worth_a_try());
            assert!(!packer.pack(noise(2), true).await.unwrap().is_zstd);
        }
        assert_eq!(tried, DRY_MAX + 64 / DRY_EVERY - 1);
    }

    #[test]
    fn slots_that_unpack_to_more_than_was_said_or_to_something_else_are_refused() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], LEVEL).unwrap();
        let of = |raw_length, bytes: &[u8]| {
            let bytes = Bytes::copy_from_slice(bytes);
            unpack(Packed { is_zstd: true, raw_length, bytes }).unwrap_err().to_string()
        };
        assert!(of(SLOTS_BYTES_MAX as u32, &bomb).contains("cannot be read"));
        assert!(of(u32::MAX, &bomb).contains("another length"));
        assert!(of(5, b"no zstd").contains("cannot be read"));
        let mut raw = Vec::new();
        Message::Part(plain(1).part).write(&mut raw).unwrap();
        let packed = zstd::bulk::compress(&raw, LEVEL).unwrap();
        assert!(of(raw.len() as u32, &packed).contains("no slots"));
        assert!(of(raw.len() as u32 + 1, &packed).contains("another length"));
        let told = Slots { part: Part { blocks: Vec::new(), ..plain(1).part }, ..plain(1) };
        let no_blocks = pack(told, false).unwrap();
        assert!(unpack(no_blocks).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_peer_make_unpacking_panic(
            is_zstd: bool, raw_length in 0u32..200, bytes: Vec<u8>,
        ) {
            let _ = unpack(Packed { is_zstd, raw_length, bytes: bytes.into() });
        }

        #[test]
        fn a_part_that_is_cut_has_all_its_blocks_in_their_order(
            lengths in prop::collection::vec((0u64..3, 1u64..9, any::<bool>()), 0..12),
            blocks_max in 1usize..7,
            is_last: bool,
        ) {
            let (mut ranges, mut blocks, mut at) = (Vec::new(), Vec::new(), 5);
            for (gap, length, hole) in lengths {
                ranges.push(ChangedRange { lba: at + gap, blocks: length, hole });
                at += gap + length;
                let of = if hole { 0 } else { length };
                blocks.extend((0..of).map(|_| block(blocks.len() as u8)).collect::<Vec<_>>());
            }
            let next = (!is_last).then_some(at + 1);
            let part = Part { ranges: ranges.clone(), blocks: blocks.clone(), next };
            let slots = cut(part, 5, blocks_max);
            let mut place = Some(5);
            let (mut got_blocks, mut covered) = (Vec::new(), Vec::new());
            for one in &slots {
                prop_assert_eq!(Some(one.place), place);
                place = one.part.next;
                prop_assert!(one.part.has_its_blocks() && one.part.blocks.len() <= blocks_max);
                got_blocks.extend(one.part.blocks.clone());
                for range in &one.part.ranges {
                    covered.extend((range.lba..range.lba + range.blocks).map(|lba| (lba, range.hole)));
                }
                let end = one.part.next.is_none().then_some(1);
                let mut raw = Vec::new();
                Message::Slots(Slots { end, ..one.clone() }).write(&mut raw).unwrap();
                prop_assert!(Message::read(&mut &raw[..]).is_ok());
            }
            prop_assert_eq!(place, next);
            prop_assert_eq!(got_blocks, blocks);
            let all = |range: &ChangedRange| {
                let hole = range.hole;
                (range.lba..range.lba + range.blocks).map(move |lba| (lba, hole)).collect::<Vec<_>>()
            };
            prop_assert_eq!(covered, ranges.iter().flat_map(all).collect::<Vec<_>>());
        }
    }
}
