//! Incarnations of a primary: each attempt to open the volume has one that never repeats.

use quoin_types::Incarnation;

pub(super) struct Incarnations {
    random: u64,
    current: Incarnation,
}

impl Incarnations {
    /// `seed` must not repeat for a volume.
    pub fn new(seed: u64) -> Self {
        Self { random: seed, current: Incarnation(0) }
    }

    pub fn current(&self) -> Incarnation {
        self.current
    }

    /// Begins the next attempt.
    pub fn begin_next(&mut self) {
        let (high, low) = (self.random(), self.random());
        self.current = Incarnation(u128::from(high) << 64 | u128::from(low));
    }

    /// Takes the same incarnation for every attempt: a defect that tests must notice.
    pub fn repeat(&mut self, always: u128) {
        self.current = Incarnation(always);
    }

    /// splitmix64.
    pub fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
