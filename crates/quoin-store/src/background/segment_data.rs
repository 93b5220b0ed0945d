//! Contents of a segment that is being emptied, as far as they were read.
//!
//! A log under durability `media` was written past the cache. It is read past the cache as well, by
//! the piece: its headers and its blocks are taken out of the same pieces, so that each block is
//! read once. All pieces of a segment that fits in [`PIECES_MAX`] are kept. A larger segment is read
//! for its headers from one end to the other, and then where blocks are needed, and no more than as
//! many pieces are kept; where they are needed in no order, blocks are read one by one. Few pieces are requested at once, since the log's syncs wait behind them.
//!
//! Any other segment is in the kernel's cache for the most part. Its headers are read a few blocks
//! at a time, as the next one is often near, and its blocks one by one.
//!
//! **Nothing older than the disk is kept.** Nothing is appended to such a segment any more. But a
//! good copy may replace a bad block in it, and then what was read before is dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bytes::Bytes;
use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, crc32c};

use crate::core::{Core, LACKING};
use crate::disk::Disk;
use crate::disk::fetch::{Stretch, believes_a_former_use};

/// Blocks of a piece that is read past the cache: 256 KiB.
const PIECE_BLOCKS: u32 = 64;
/// Blocks of a piece that is read through the cache in search of headers.
const HEADER_PIECE_BLOCKS: u32 = 16;
/// Pieces that are held or requested, at most: 8 MiB.
const PIECES_MAX: usize = 32;
/// Pieces that are requested and not here yet, at most.
const PIECES_AT_ONCE: usize = 2;

/// State of a piece that was requested.
enum Piece {
    Awaited,
    Here(Bytes),
    /// It cannot be read as a whole. The block that is wanted may be.
    Unreadable,
}

pub struct SegmentData {
    /// The segment's blocks.
    range: Range<u64>,
    is_cached: bool,
    /// Blocks are read by the piece, and not one by one.
    by_piece: bool,
    /// Pieces by their first blocks.
    pieces: BTreeMap<u64, Piece>,
    /// Blocks that were read ahead one by one.
    ahead: BTreeMap<u64, Bytes>,
    /// Those of them that were read a second time, as others had come first than were expected.
    again: BTreeSet<u64>,
    /// Writes in place before all of this was read.
    as_of: u64,
}

impl SegmentData {
    /// Nothing of a segment. `is_cached`: it was written through the kernel's cache.
    pub fn of<D>(core: &Core<D>, range: Range<u64>, is_cached: bool) -> Self {
        let (pieces, ahead, again) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let (by_piece, as_of) = (!is_cached, core.writes_in_place);
        SegmentData { range, is_cached, by_piece, pieces, ahead, again, as_of }
    }

    /// In a call that may wait: has a block of the header that begins at `start` read beside, if it is
    /// not here yet, and with it what is likely to be needed next. What is before that header is
    /// needed no more.
    pub fn look_ahead_of_header<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        start: u64,
        place: u64,
    ) -> Result<(), StoreError> {
        if self.has(core, place) {
            return Ok(());
        }
        if !self.keeps_all() {
            self.pieces = self.pieces.split_off(&self.piece_of(start).first);
        }
        let first = self.piece_of(place).first;
        let pieces = if self.is_cached { 1 } else { PIECES_AT_ONCE };
        let following = (first..self.range.end).step_by(self.piece_blocks() as usize);
        let lacking = self.request(core, following.take(pieces));
        if self.in_piece(place).is_some() {
            return Ok(());
        }
        lacking?;
        self.take_alone(core, place, &|_| true)
    }

    /// The headers are known. Of a segment that is not kept as a whole the blocks are read anew, by the
    /// piece if they will be needed `in_order`.
    pub fn end_of_headers(&mut self, in_order: bool) {
        if !self.keeps_all() {
            self.pieces.clear();
            self.by_piece &= in_order;
        }
        self.ahead.clear();
    }

    /// In a call that may wait: has a block of this checksum read beside, if it is not here yet. Where
    /// others come than it says, the block is read once more, by itself.
    pub fn look_ahead<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        place: u64,
        crc: u32,
    ) -> Result<(), StoreError> {
        let is_it = |bytes: &[u8]| crc32c(bytes) == crc;
        if !self.has(core, place) {
            if let Some(first) = self.piece_with_room(place) {
                self.request(core, std::iter::once(first))?;
            }
            self.take_alone(core, place, &is_it)?;
        }
        if self.again.contains(&place) || self.held(place).is_none_or(|bytes| is_it(&bytes)) {
            return Ok(());
        }
        // What was read by itself was read again before it came.
        if !self.ahead.contains_key(&place) {
            let block = self.take(core, Stretch { first: place, blocks: 1 }, &is_it)?;
            self.ahead.insert(place, block);
        }
        self.again.insert(place);
        Ok(())
    }

    /// Returns true if a block was read, and since then nothing was written in place.
    pub fn has<D>(&mut self, core: &Core<D>, place: u64) -> bool {
        self.drop_older(core);
        self.held(place).is_some()
    }

    /// A block that may have a header; the disk is read where it was not looked ahead of it.
    pub fn header<D: Disk>(&mut self, core: &Core<D>, place: u64) -> Result<Bytes, StoreError> {
        self.drop_older(core);
        self.held(place).map_or_else(|| alone(core, place), Ok)
    }

    /// A block of this checksum, which it has unless the disk has other bytes than these; the disk is
    /// read where it was not looked ahead of it.
    pub fn block<D: Disk>(
        &mut self,
        core: &Core<D>,
        place: u64,
        crc: u32,
    ) -> Result<Bytes, StoreError> {
        let bytes = self.any_block(core, place)?;
        if crc32c(&bytes) == crc || self.again.contains(&place) || believes_a_former_use() {
            return Ok(bytes);
        }
        // What was read ahead is a hint: only the disk says that it is bad.
        alone(core, place)
    }

    fn any_block<D: Disk>(&mut self, core: &Core<D>, place: u64) -> Result<Bytes, StoreError> {
        self.drop_older(core);
        if let Some(first) = self.piece_with_room(place)
            && matches!(self.pieces.get(&first), None | Some(Piece::Awaited))
        {
            let read = core.read_once(self.piece_of(place));
            self.pieces.insert(first, read.map_or(Piece::Unreadable, Piece::Here));
        }
        self.held(place).map_or_else(|| alone(core, place), Ok)
    }

    /// The blocks that were needed are moved: makes room for those of the next step.
    pub fn end_of_step(&mut self) {
        self.ahead.clear();
        self.again.clear();
        if !self.keeps_all() && self.pieces.len() >= PIECES_MAX {
            self.pieces.clear();
        }
    }

    /// Drops what was read before something was written in place.
    fn drop_older<D>(&mut self, core: &Core<D>) {
        if self.as_of != core.writes_in_place {
            self.pieces.clear();
            self.ahead.clear();
            self.again.clear();
            self.as_of = core.writes_in_place;
        }
    }

    fn keeps_all(&self) -> bool {
        let blocks = self.range.end - self.range.start;
        !self.is_cached && blocks <= PIECES_MAX as u64 * u64::from(PIECE_BLOCKS)
    }

    fn piece_blocks(&self) -> u32 {
        if self.is_cached { HEADER_PIECE_BLOCKS } else { PIECE_BLOCKS }
    }

    /// The piece that has a block.
    fn piece_of(&self, place: u64) -> Stretch {
        let blocks = self.piece_blocks();
        let first = place - (place - self.range.start) % u64::from(blocks);
        Stretch { first, blocks: (self.range.end - first).min(blocks.into()) as u32 }
    }

    /// The first block of the piece that has a block, if data are read by the piece and it was
    /// requested or there is room for it.
    fn piece_with_room(&self, place: u64) -> Option<u64> {
        let first = self.piece_of(place).first;
        let has_room = self.pieces.contains_key(&first) || self.pieces.len() < PIECES_MAX;
        (self.by_piece && has_room).then_some(first)
    }

    /// A block of a piece that is here.
    fn in_piece(&self, place: u64) -> Option<Bytes> {
        let first = self.piece_of(place).first;
        let Some(Piece::Here(bytes)) = self.pieces.get(&first) else { return None };
        let at = (place - first) as usize * BLOCK_SIZE;
        Some(bytes.slice(at..at + BLOCK_SIZE))
    }

    fn held(&self, place: u64) -> Option<Bytes> {
        self.ahead.get(&place).cloned().or_else(|| self.in_piece(place))
    }

    /// Takes what has arrived, and requests as many of these pieces as may be. Something is lacking
    /// while anything is awaited.
    fn request<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        wanted: impl Iterator<Item = u64>,
    ) -> Result<(), StoreError> {
        let is_awaited = |(_, piece): &(&u64, &Piece)| matches!(piece, Piece::Awaited);
        let awaited: Vec<u64> = self.pieces.iter().filter(is_awaited).map(|(at, _)| *at).collect();
        let mut left = 0;
        for first in awaited {
            left += usize::from(self.take_piece(core, first).is_err());
        }
        for first in wanted {
            if left < PIECES_AT_ONCE && !self.pieces.contains_key(&first) {
                left += usize::from(self.take_piece(core, first).is_err());
            }
        }
        if left > 0 { Err(LACKING) } else { Ok(()) }
    }

    /// Requests a piece, or takes it.
    fn take_piece<D: Disk>(&mut self, core: &mut Core<D>, first: u64) -> Result<(), StoreError> {
        let taken = self.take(core, self.piece_of(first), &|_| true);
        let piece = match taken {
            Err(LACKING) => Piece::Awaited,
            taken => taken.map_or(Piece::Unreadable, Piece::Here),
        };
        let is_awaited = matches!(piece, Piece::Awaited);
        self.pieces.insert(first, piece);
        if is_awaited { Err(LACKING) } else { Ok(()) }
    }

    /// Requests a block without its piece, or takes it, if it is not here.
    fn take_alone<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        place: u64,
        is_expected: &dyn Fn(&[u8]) -> bool,
    ) -> Result<(), StoreError> {
        if self.in_piece(place).is_none() {
            let block = self.take(core, Stretch { first: place, blocks: 1 }, is_expected)?;
            self.ahead.insert(place, block);
        }
        Ok(())
    }

    fn take<D: Disk>(
        &self,
        core: &mut Core<D>,
        stretch: Stretch,
        is_expected: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Bytes, StoreError> {
        if !self.is_cached {
            return core.take_once(stretch, is_expected);
        }
        let mut bytes = vec![0; stretch.bytes()];
        core.take_beside(stretch.first, &mut bytes, is_expected)?;
        Ok(bytes.into())
    }
}

fn alone<D: Disk>(core: &Core<D>, place: u64) -> Result<Bytes, StoreError> {
    let mut bytes = vec![0; BLOCK_SIZE];
    core.read(place, &mut bytes)?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use quoin_types::{PoolId, ReplicaGuid};

    use super::*;
    use crate::disk::fetch::Owner;
    use crate::{FormatOptions, MemoryDisk, Pool, PoolOptions};

    const HELD_MAX: usize = PIECES_MAX * PIECE_BLOCKS as usize * BLOCK_SIZE;

    fn pool(disk: &MemoryDisk) -> Pool<MemoryDisk> {
        Pool::format(disk, &FormatOptions::new(PoolId(1))).expect("a fit disk");
        Pool::open(disk.clone(), PoolOptions::default()).expect("a fresh pool")
    }

    fn held_bytes(data: &SegmentData) -> usize {
        let piece = |piece: &Piece| match piece {
            Piece::Here(bytes) => bytes.len(),
            Piece::Awaited | Piece::Unreadable => 0,
        };
        data.pieces.values().map(piece).sum::<usize>()
            + data.ahead.values().map(Bytes::len).sum::<usize>()
    }

    /// Looks until nothing is lacking. Returns the bytes that were requested, and the most at once.
    fn look(
        core: &mut Core<MemoryDisk>,
        data: &mut SegmentData,
        mut look: impl FnMut(&mut SegmentData, &mut Core<MemoryDisk>),
    ) -> (usize, usize) {
        let (mut all, mut most) = (0, 0);
        for _ in 0..100 {
            core.fetches.begin(Owner::Background(ReplicaGuid(1)), 0);
            look(data, core);
            let waits = core.fetches.end().is_some();
            assert!(held_bytes(data) <= HELD_MAX + (1 << 20), "{}", held_bytes(data));
            if !waits {
                return (all, most);
            }
            let mut bytes = 0;
            while let Some(fetch) = core.fetches.next_fetch() {
                bytes += fetch.length;
                core.fetches.arrived(fetch.id, core.disk.fetch(&fetch));
            }
            (all, most) = (all + bytes, most.max(bytes));
        }
        panic!("it lacks something for ever");
    }

    #[test]
    fn what_is_held_of_a_segment_is_bounded_and_little_is_requested_at_once() {
        let disk = MemoryDisk::new(128 << 20);
        let mut pool = pool(&disk);
        let zeroes = crc32c(&[0; BLOCK_SIZE]);
        for (blocks, in_order) in [(1024, false), (8192, true), (8192, false)] {
            let range = 3000..3000 + blocks;
            let mut data = SegmentData::of(&pool.core, range.clone(), false);
            let (mut all, mut most) = (0, 0);
            for place in range.clone().step_by(33) {
                let looked = look(&mut pool.core, &mut data, |data, core| {
                    let _ = data.look_ahead_of_header(core, place, place);
                });
                (all, most) = (all + looked.0, most.max(looked.1));
                assert!(data.has(&pool.core, place));
            }
            let at_once = PIECES_AT_ONCE * PIECE_BLOCKS as usize * BLOCK_SIZE;
            assert_eq!((all, most), (blocks as usize * BLOCK_SIZE, at_once), "of {blocks} blocks");
            data.end_of_headers(in_order);
            let alone = blocks == 8192 && !in_order;
            // Steps over blocks that lie as far apart as they can.
            for step in 0..4 {
                let places = range.clone().skip(step).step_by(blocks as usize / 256);
                let looked = look(&mut pool.core, &mut data, |data, core| {
                    for place in places.clone() {
                        let _ = data.look_ahead(core, place, zeroes);
                    }
                });
                if alone {
                    // By the piece they took as many looks as there may be, and 32 times the bytes.
                    let each = places.clone().count() * BLOCK_SIZE;
                    assert_eq!(looked, (each, each), "all at once and nothing else");
                }
                for place in places {
                    assert!(data.has(&pool.core, place));
                    assert_eq!(
                        data.block(&pool.core, place, zeroes).expect("a block").len(),
                        BLOCK_SIZE
                    );
                }
                data.end_of_step();
                assert!(held_bytes(&data) <= HELD_MAX);
            }
        }
    }

    #[test]
    fn of_a_piece_that_cannot_be_read_the_other_blocks_are_read() {
        let disk = MemoryDisk::new(128 << 20);
        let mut pool = pool(&disk);
        disk.break_block(3010);
        let zeroes = crc32c(&[0; BLOCK_SIZE]);
        let mut data = SegmentData::of(&pool.core, 3000..4000, false);
        look(&mut pool.core, &mut data, |data, core| {
            for place in 3000..4000 {
                let _ = data.look_ahead(core, place, crc32c(&[0; BLOCK_SIZE]));
            }
        });
        for place in 3000..4000 {
            assert_eq!(data.has(&pool.core, place), place != 3010);
            assert_eq!(data.block(&pool.core, place, zeroes).is_ok(), place != 3010);
        }
    }
}
