//! Hash of a range of a volume, by which two copies of it are compared: SHA-256 over the blocks that are not all
//! zero, each behind its place in the range. A block that was never written and one of zeros are the same.

use aws_lc_rs::digest;

/// Bytes of one hash.
pub const HASH_BYTES: usize = 32;

/// Hash of one range, block by block in their order.
pub struct ContentHash(digest::Context);

impl Default for ContentHash {
    fn default() -> Self {
        Self(digest::Context::new(&digest::SHA256))
    }
}

impl ContentHash {
    /// Adds the block at this place of the range.
    pub fn add(&mut self, place: u32, block: &[u8]) {
        if block.iter().any(|byte| *byte != 0) {
            self.0.update(&place.to_le_bytes());
            self.0.update(block);
        }
    }

    pub fn finish(self) -> [u8; HASH_BYTES] {
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(self.0.finish().as_ref());
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(blocks: &[(u32, [u8; 8])]) -> [u8; HASH_BYTES] {
        let mut hash = ContentHash::default();
        blocks.iter().for_each(|(place, block)| hash.add(*place, block));
        hash.finish()
    }

    #[test]
    fn places_and_bytes_count_and_blocks_of_zeros_are_as_if_never_written() {
        let (one, two) = ([1; 8], [2; 8]);
        assert_eq!(hash(&[(0, one), (1, [0; 8]), (9, two)]), hash(&[(0, one), (9, two)]));
        assert_ne!(hash(&[(0, one)]), hash(&[(1, one)]));
        assert_ne!(hash(&[(0, one)]), hash(&[(0, two)]));
        assert_ne!(hash(&[(0, one)]), hash(&[]));
        assert_eq!(hash(&[(5, [0; 8])]), hash(&[]));
    }
}
