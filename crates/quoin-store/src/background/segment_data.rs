//! Contents of a segment that is being emptied, read ahead where the disk would keep a step waiting.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::StoreError;
use quoin_types::BLOCK_SIZE;

use crate::core::Core;
use crate::disk::Disk;

/// Blocks read at once of a segment that is in no cache.
const PIECE_BLOCKS: u64 = 64;

/// Contents of a segment that is being emptied. Where no cache has them, they are read by the piece
/// and not one by one.
pub(super) struct SegmentData {
    /// The segment's blocks, where it is read by the piece.
    range: Option<Range<u64>>,
    pieces: BTreeMap<u64, Bytes>,
    /// Blocks that were read ahead of the next step.
    ahead: BTreeMap<u64, Bytes>,
}

impl SegmentData {
    /// `range`: the segment's blocks, if it is read by the piece.
    pub fn new(range: Option<Range<u64>>) -> Self {
        SegmentData { range, pieces: BTreeMap::new(), ahead: BTreeMap::new() }
    }

    /// Something was written in place: what was read before may be older.
    pub fn read_again(&mut self) {
        self.pieces.clear();
        self.ahead.clear();
    }

    /// The step is done that blocks were read ahead of.
    pub fn step_is_done(&mut self) {
        self.ahead.clear();
    }

    /// The piece that has a block, if the segment is read by the piece: its first block and bytes.
    fn piece_of(&self, place: u64) -> Option<(u64, usize)> {
        let range = self.range.clone().filter(|range| range.contains(&place))?;
        let first = place - (place - range.start) % PIECE_BLOCKS;
        Some((first, (range.end - first).min(PIECE_BLOCKS) as usize * BLOCK_SIZE))
    }

    /// Has a block read beside, if it is not here yet.
    pub fn look_ahead<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        place: u64,
    ) -> Result<(), StoreError> {
        let piece = self.piece_of(place);
        let (first, length) = piece.unwrap_or((place, BLOCK_SIZE));
        let into = if piece.is_some() { &mut self.pieces } else { &mut self.ahead };
        if let Entry::Vacant(entry) = into.entry(first) {
            let mut bytes = BytesMut::zeroed(length);
            core.take_beside(first, &mut bytes)?;
            entry.insert(bytes.freeze());
        }
        Ok(())
    }

    pub fn block<D: Disk>(&mut self, core: &Core<D>, place: u64) -> Result<Bytes, StoreError> {
        if let Some(block) = self.ahead.remove(&place) {
            return Ok(block);
        }
        if let Some((first, length)) = self.piece_of(place) {
            // Blocks are requested in the order of their places.
            self.pieces = self.pieces.split_off(&first);
            if let Entry::Vacant(entry) = self.pieces.entry(first) {
                let mut bytes = BytesMut::zeroed(length);
                // Where a piece cannot be read, the block that is wanted may be.
                if core.read_once(first, &mut bytes).is_ok() {
                    entry.insert(bytes.freeze());
                }
            }
            if let Some(piece) = self.pieces.get(&first) {
                let at = (place - first) as usize * BLOCK_SIZE;
                return Ok(piece.slice(at..at + BLOCK_SIZE));
            }
        }
        let mut bytes = BytesMut::zeroed(BLOCK_SIZE);
        core.read(place, &mut bytes)?;
        Ok(bytes.freeze())
    }
}
