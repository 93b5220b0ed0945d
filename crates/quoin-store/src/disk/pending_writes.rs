//! Writes that a process holds until the next sync: copied into aligned memory, one behind the
//! other, so that what arrives while one sync runs becomes one direct write of the next.
//!
//! Pure bookkeeping: [`crate::FileDisk`] does the IO. A write is in `waiting`, then in `writing`
//! while a sync carries it, and reads are laid over with both. Zeros that are to follow a write
//! are in `padding` for as long, see [`Held::is_padding`].

use std::io::IoSlice;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::disk::aligned_memory::{AlignedMemory, PIECE_BYTES};

/// Unused pieces that are kept for later writes.
const SPARE_PIECES: usize = 16;

/// Bytes of one stretch of the disk, at an address that direct IO takes. A longer write takes several.
pub(crate) struct Piece {
    memory: AlignedMemory,
    length: usize,
    pub offset: u64,
}

impl Piece {
    pub fn new() -> Self {
        Piece { memory: AlignedMemory::of(PIECE_BYTES), length: 0, offset: 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[..self.length]
    }

    pub fn end(&self) -> u64 {
        self.offset + self.length as u64
    }

    fn room(&self) -> usize {
        PIECE_BYTES - self.length
    }

    fn push(&mut self, bytes: &[u8]) {
        self.memory[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }
}

/// Returns `length` zeros, at most a piece, at an address that direct IO takes. All calls share
/// the memory, since faulting in fresh pages costs more than writing them.
pub(crate) fn zeros(length: usize) -> &'static [u8] {
    static ZEROS: OnceLock<AlignedMemory> = OnceLock::new();
    let zeros = ZEROS.get_or_init(|| {
        let mut memory = AlignedMemory::of(PIECE_BYTES);
        memory.fill(0);
        memory
    });
    &zeros[..length.min(PIECE_BYTES)]
}

/// Writes that wait for a sync, and those that a sync is writing.
#[derive(Default)]
pub(crate) struct Held {
    waiting: Vec<Piece>,
    writing: Option<Arc<Vec<Piece>>>,
    spare: Vec<Piece>,
    pub waiting_bytes: usize,
    /// Zeros that may follow what waits, and what is being written.
    padding: Vec<Range<u64>>,
    padding_now: Vec<Range<u64>>,
}

impl Held {
    pub fn push(&mut self, offset: u64, parts: &[IoSlice<'_>]) {
        let mut at = offset;
        for part in parts {
            let mut rest: &[u8] = part;
            while !rest.is_empty() {
                let fits = self.waiting.last().is_some_and(|p| p.end() == at && p.room() > 0);
                if !fits {
                    let mut piece = self.spare.pop().unwrap_or_else(Piece::new);
                    (piece.offset, piece.length) = (at, 0);
                    self.waiting.push(piece);
                }
                let piece = self.waiting.last_mut().expect("pushed above");
                let (now, later) = rest.split_at(rest.len().min(piece.room()));
                piece.push(now);
                self.waiting_bytes += now.len();
                at += now.len() as u64;
                rest = later;
            }
        }
    }

    /// Zeros may follow what was pushed last, when it is written.
    pub fn pad(&mut self, padding: Range<u64>) {
        if !padding.is_empty() {
            self.padding.push(padding);
        }
    }

    /// Whether zeros may yet be written somewhere there: what is written there must come after
    /// them.
    pub fn is_padding(&self, offset: u64, length: usize) -> bool {
        let end = offset + length as u64;
        let mut all = self.padding.iter().chain(&self.padding_now);
        all.any(|range| range.start < end && range.end > offset)
    }

    /// How many zeros follow a stretch of what [`Held::begin`] gave: none over other pieces.
    pub fn padding_after(&self, stretch: &[Piece], all: &[Piece]) -> usize {
        let end = stretch.last().map_or(0, Piece::end);
        let ranges = self.padding_now.iter().filter(|r| r.start <= end && r.end > end);
        let Some(until) = ranges.map(|range| range.end).min() else { return 0 };
        let is_free = all.iter().all(|piece| piece.end() <= end || piece.offset >= until);
        if is_free { ((until - end) as usize).min(PIECE_BYTES) } else { 0 }
    }

    /// Everything that waits now, in the order in which it came.
    pub fn begin(&mut self) -> Option<Arc<Vec<Piece>>> {
        if self.waiting.is_empty() {
            return None;
        }
        self.waiting_bytes = 0;
        self.padding_now = std::mem::take(&mut self.padding);
        let writing = Arc::new(std::mem::take(&mut self.waiting));
        self.writing = Some(writing.clone());
        Some(writing)
    }

    /// Ends the writing of what [`Held::begin`] returned: the kernel or the disk has it.
    pub fn end(&mut self, writing: Arc<Vec<Piece>>) {
        self.writing = None;
        self.padding_now.clear();
        if let Ok(pieces) = Arc::try_unwrap(writing) {
            let room = SPARE_PIECES.saturating_sub(self.spare.len());
            self.spare.extend(pieces.into_iter().take(room));
        }
    }

    /// Copies of what is held of `[offset, offset + length)`, oldest first.
    pub fn overlapping(&self, offset: u64, length: usize) -> Vec<(usize, Vec<u8>)> {
        let end = offset + length as u64;
        let writing = self.writing.iter().flat_map(|pieces| pieces.iter());
        writing
            .chain(&self.waiting)
            .filter(|piece| piece.offset < end && piece.end() > offset)
            .map(|piece| {
                let from = piece.offset.max(offset);
                let to = piece.end().min(end);
                let bytes = &piece.bytes()[(from - piece.offset) as usize..];
                ((from - offset) as usize, bytes[..(to - from) as usize].to_vec())
            })
            .collect()
    }
}

/// Pieces as stretches without a gap, each no more parts than one system call takes.
pub(crate) fn stretches(pieces: &[Piece], parts_max: usize) -> Vec<&[Piece]> {
    let mut out = Vec::new();
    let mut rest = pieces;
    while !rest.is_empty() {
        let joined = rest.windows(2).take_while(|w| w[0].end() == w[1].offset).count() + 1;
        let (now, later) = rest.split_at(joined.min(parts_max));
        out.push(now);
        rest = later;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use quoin_types::BLOCK_SIZE;

    proptest! {
        /// Whatever is written where, reads see the newest bytes and the pieces hold them all.
        #[test]
        fn what_is_held_reads_as_it_was_written(
            writes in prop::collection::vec((0u64..200, 1usize..90, any::<u8>()), 1..20),
            split in any::<prop::sample::Index>(),
        ) {
            let mut held = Held::default();
            let mut expected = vec![0u8; 300 * BLOCK_SIZE];
            let mut writing = None;
            for (i, (block, blocks, byte)) in writes.iter().enumerate() {
                if i == split.index(writes.len()) {
                    writing = held.begin();
                }
                let bytes = vec![*byte; blocks * BLOCK_SIZE];
                let offset = block * BLOCK_SIZE as u64;
                held.push(offset, &[IoSlice::new(&bytes[..BLOCK_SIZE]), IoSlice::new(&bytes[BLOCK_SIZE..])]);
                expected[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
            }
            let mut seen = vec![0u8; expected.len()];
            for (at, bytes) in held.overlapping(0, expected.len()) {
                seen[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            prop_assert!(seen == expected);
            let mut written = vec![0u8; expected.len()];
            let waiting = held.begin();
            for pieces in [writing, waiting].into_iter().flatten() {
                for stretch in stretches(&pieces, 3) {
                    prop_assert!(stretch.len() <= 3);
                    prop_assert!(stretch.windows(2).all(|w| w[0].end() == w[1].offset));
                    for piece in stretch {
                        prop_assert_eq!(piece.bytes().as_ptr().addr() % BLOCK_SIZE, 0);
                        let at = piece.offset as usize;
                        written[at..at + piece.bytes().len()].copy_from_slice(piece.bytes());
                    }
                }
            }
            prop_assert!(written == expected);
        }
    }

    #[test]
    fn zeros_follow_the_last_write_of_a_stretch_and_never_cover_another_one() {
        let mut held = Held::default();
        let (block, blocks) = (vec![1; BLOCK_SIZE], |n: u64| n * BLOCK_SIZE as u64);
        held.push(0, &[IoSlice::new(&block)]);
        held.pad(blocks(1)..blocks(8));
        held.push(blocks(1), &[IoSlice::new(&block)]);
        held.push(blocks(20), &[IoSlice::new(&block)]);
        held.pad(blocks(21)..blocks(28));
        held.push(blocks(25), &[IoSlice::new(&block)]);
        assert!(held.is_padding(blocks(7), BLOCK_SIZE) && !held.is_padding(blocks(8), BLOCK_SIZE));
        let writing = held.begin().expect("something waits");
        let padding = |held: &Held| -> Vec<usize> {
            let stretches = stretches(&writing, 9);
            stretches.iter().map(|s| held.padding_after(s, &writing) / BLOCK_SIZE).collect()
        };
        assert_eq!(padding(&held), [6, 0, 2]);
        assert!(held.is_padding(blocks(7), BLOCK_SIZE), "until it is written");
        held.end(writing.clone());
        assert_eq!(padding(&held), [0, 0, 0]);
        assert!(!held.is_padding(0, 100 * BLOCK_SIZE));
    }

    #[test]
    fn pieces_are_used_again() {
        let mut held = Held::default();
        let block = vec![1; BLOCK_SIZE];
        for round in 0..50u64 {
            held.push(round * 8192, &[IoSlice::new(&block)]);
            let writing = held.begin().expect("something waits");
            held.end(writing);
            assert_eq!((held.spare.len(), held.waiting_bytes), (1, 0));
        }
    }
}
