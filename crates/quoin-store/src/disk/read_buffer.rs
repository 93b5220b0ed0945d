//! Where blocks are read to.
//!
//! A buffer of one block, which is what most reads want, is taken again as soon as its answer has
//! gone out: the C library keeps pieces of this size in lists that it searches, and the one that
//! was given back last is still in the processor's cache.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use quoin_types::BLOCK_SIZE;

/// Kept by each thread, at most: 1 MiB.
const KEPT_MAX: usize = 256;

thread_local! {
    static KEPT: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// Buffer of any length; its first contents are zeros or another read's bytes.
pub struct ReadBuffer(Box<[u8]>);

impl ReadBuffer {
    pub fn of(bytes: usize) -> Self {
        let kept = match bytes {
            BLOCK_SIZE => KEPT.with_borrow_mut(Vec::pop),
            _ => None,
        };
        Self(kept.unwrap_or_else(|| vec![0; bytes].into()))
    }
}

impl Deref for ReadBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for ReadBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl AsRef<[u8]> for ReadBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for ReadBuffer {
    fn drop(&mut self) {
        if self.0.len() != BLOCK_SIZE {
            return;
        }
        let block = std::mem::take(&mut self.0);
        // Where the thread is at its end there is nothing to keep it in.
        let _ = KEPT.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if kept.len() < KEPT_MAX {
                kept.push(block);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn kept() -> usize {
        KEPT.with_borrow(Vec::len)
    }

    #[test]
    fn a_block_is_taken_again_once_nobody_holds_it_and_not_before() {
        let mut first = ReadBuffer::of(BLOCK_SIZE);
        first.fill(7);
        let held = Bytes::from_owner(first);
        let also = held.slice(8..);
        let second = ReadBuffer::of(BLOCK_SIZE);
        assert_ne!(second.as_ptr(), held.as_ptr());
        let at = held.as_ptr();
        drop(held);
        assert_eq!((kept(), also[0]), (0, 7));
        drop(also);
        assert_eq!((kept(), ReadBuffer::of(BLOCK_SIZE).as_ptr()), (1, at));
    }

    #[test]
    fn no_more_is_kept_than_its_bound_and_nothing_of_another_length() {
        let many: Vec<_> = (0..2 * KEPT_MAX).map(|_| ReadBuffer::of(BLOCK_SIZE)).collect();
        drop(many);
        assert_eq!(kept(), KEPT_MAX);
        drop(ReadBuffer::of(3 * BLOCK_SIZE));
        assert_eq!(kept(), KEPT_MAX);
        assert_eq!(ReadBuffer::of(3 * BLOCK_SIZE).len(), 3 * BLOCK_SIZE);
    }
}
