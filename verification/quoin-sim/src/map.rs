//! Maps for what a run asks for all the time: a cheap hash, and the same order in every run.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Keys are the simulator's own, so no peer can choose keys that collide.
pub type FixedMap<K, V> = HashMap<K, V, BuildHasherDefault<Mixer>>;

/// One multiplication for each word, folded so that the low bits depend on all of it.
#[derive(Default)]
pub struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(u64::from(number));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = u128::from(self.0.rotate_left(23) ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (mixed >> 64) as u64 ^ mixed as u64;
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}
