//! Memory at addresses that direct IO takes.
//!
//! Memory of one length is kept for its next user, on whatever thread: fresh pages have to be found
//! and cleared first, which costs as much as a read into them.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use quoin_types::BLOCK_SIZE;

/// The length that is kept.
pub(crate) const PIECE_BYTES: usize = 256 << 10;
/// Pieces kept by the process, at most: 4 MiB.
const KEPT_MAX: usize = 16;

static KEPT: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn kept() -> MutexGuard<'static, Vec<Vec<u8>>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns true if direct IO takes the address of this memory.
pub(crate) fn is_aligned(memory: &[u8]) -> bool {
    memory.as_ptr().addr().is_multiple_of(BLOCK_SIZE)
}

/// Memory of any length; its first contents are zeros or another user's bytes.
pub(crate) struct AlignedMemory {
    memory: Vec<u8>,
    /// Where the aligned part begins.
    start: usize,
    length: usize,
}

impl AlignedMemory {
    pub fn of(length: usize) -> Self {
        let kept = if length == PIECE_BYTES { kept().pop() } else { None };
        let memory = kept.unwrap_or_else(|| vec![0; length + BLOCK_SIZE]);
        let address = memory.as_ptr().addr();
        let start = address.next_multiple_of(BLOCK_SIZE) - address;
        AlignedMemory { memory, start, length }
    }
}

impl Deref for AlignedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }
}

impl DerefMut for AlignedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

impl AsRef<[u8]> for AlignedMemory {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for AlignedMemory {
    fn drop(&mut self) {
        if self.length != PIECE_BYTES {
            return;
        }
        let memory = std::mem::take(&mut self.memory);
        let mut kept = kept();
        if kept.len() < KEPT_MAX {
            kept.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_whatever_its_length_and_a_bounded_part_of_it_is_kept() {
        for length in [BLOCK_SIZE, 3 * BLOCK_SIZE, PIECE_BYTES, 2 * PIECE_BYTES] {
            let mut memory = AlignedMemory::of(length);
            memory.fill(1);
            assert!(is_aligned(&memory) && memory.len() == length);
        }
        let many: Vec<_> = (0..2 * KEPT_MAX).map(|_| AlignedMemory::of(PIECE_BYTES)).collect();
        drop(many);
        assert!(kept().len() <= KEPT_MAX);
    }
}
