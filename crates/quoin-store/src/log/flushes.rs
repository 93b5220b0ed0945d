//! Whether flushes follow a replica's writes, as of a database: learned from the syncs that are asked for.
//!
//! A sync that finds its writes in the kernel's cache alone has to write them first. Where each few writes
//! are followed by one, their write-out begins with them, while they are answered and the flush is on
//! its way. A log writes each place once, so nothing is written twice by that.

/// Bytes that one flush follows, at most: more of them are on their way to the disk already.
const FEW_BYTES: u64 = 256 << 10;
/// Syncs of few bytes after which the next ones are expected, and how many are remembered.
const EXPECTED_AFTER: u8 = 3;
const REMEMBERED: u8 = 8;

#[derive(Default)]
pub struct Flushes {
    /// Bytes since the last sync was asked for.
    written_bytes: u64,
    /// Syncs that followed few bytes, less those that followed many.
    seen: u8,
}

impl Flushes {
    pub fn written(&mut self, bytes: u64) {
        self.written_bytes = self.written_bytes.saturating_add(bytes);
    }

    /// A sync is asked for.
    pub fn asked(&mut self) {
        match self.written_bytes {
            // Several wait for the same writes.
            0 => {}
            1..=FEW_BYTES => self.seen = (self.seen + 1).min(REMEMBERED),
            _ => self.seen = 0,
        }
        self.written_bytes = 0;
    }

    /// Returns true if a flush is expected to follow what was written last.
    pub fn are_expected(&self) -> bool {
        self.seen >= EXPECTED_AFTER && self.written_bytes <= FEW_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(syncs: impl IntoIterator<Item = u64>) -> Flushes {
        let mut flushes = Flushes::default();
        for bytes in syncs {
            flushes.written(bytes);
            flushes.asked();
        }
        flushes
    }

    #[test]
    fn flushes_are_expected_after_some_that_followed_few_bytes_each() {
        assert!(!after([8192, 8192]).are_expected());
        assert!(after([8192, 8192, 4096]).are_expected());
        assert!(after([8192, 0, 0, 8192, FEW_BYTES]).are_expected(), "others at the same writes");
        assert!(!after([8192, 0, 0]).are_expected());
    }

    #[test]
    fn flushes_of_much_are_not_expected_and_nothing_is_begun_behind_much() {
        assert!(!after([8192; 100].into_iter().chain([FEW_BYTES + 1])).are_expected());
        let mut flushes = after([8192; 100]);
        flushes.written(FEW_BYTES + 1);
        assert!(!flushes.are_expected(), "a stream of writes is written out by the stretch");
    }
}
