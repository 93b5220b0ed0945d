//! Maps keyed by internal numbers: counters and block addresses in a pool.
//!
//! Every request looks up several of them, and the standard hasher is slow because it defends
//! against chosen keys. Outsiders cannot choose these keys. A process that writes a pool's files to
//! make addresses collide slows that pool only.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub type KeyMap<V> = HashMap<u64, V, BuildHasherDefault<KeyHasher>>;

/// Hasher that multiplies and folds twice: addresses are multiples of large powers of two, and a
/// table uses the lowest and the highest bits of a hash.
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, key: u64) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        for _ in 0..2 {
            let product = (self.0 ^ key).wrapping_mul(ODD);
            self.0 = product ^ (product >> 32);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Number of buckets, of 4096, that the hashes of these keys hit.
    fn buckets(keys: impl Iterator<Item = u64>) -> usize {
        let hash = |key| {
            let mut hasher = KeyHasher::default();
            hasher.write_u64(key);
            hasher.finish() % 4096
        };
        keys.map(hash).collect::<HashSet<_>>().len()
    }

    #[test]
    fn keys_of_any_alignment_spread_over_the_buckets() {
        // 4096 keys thrown at random hit about 2590 of 4096 buckets.
        for shift in 0..40 {
            let hit = buckets((0..4096).map(|i| i << shift));
            assert!(hit > 2000, "{hit} buckets for multiples of 2^{shift}");
        }
    }
}
