//! The one source of chance in a run: a seed gives the same numbers on every machine, for ever.
//!
//! Written here (xoshiro256**, seeded by splitmix64) so that no update of a dependency can change
//! what a pasted seed replays.

/// A small fast generator; never for secrets.
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 4],
}

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    pub fn new(seed: u64) -> Self {
        let mut s = seed;
        Self { state: std::array::from_fn(|_| splitmix(&mut s)) }
    }

    /// A generator of its own, so that drawing more in one part does not shift another.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::new(self.draw())
    }

    pub fn draw(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in `[0, bound)`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64 }
    }

    /// Uniform in `[low, high]`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    pub fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    /// True `percent` times of a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.index(items.len())]
    }

    /// An index drawn with these weights.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let total: u64 = weights.iter().map(|w| u64::from(*w)).sum();
        let mut left = self.below(total);
        for (i, w) in weights.iter().enumerate() {
            if left < u64::from(*w) {
                return i;
            }
            left -= u64::from(*w);
        }
        0
    }

    /// Mostly near `typical`, now and then ten times as much: how delays are in life.
    pub fn delay(&mut self, typical: u64) -> u64 {
        let base = typical / 2 + self.below(typical + 1);
        if self.one_in(40) { base * (2 + self.below(10)) } else { base }
    }

    pub fn wide(&mut self) -> u128 {
        (u128::from(self.draw()) << 64) | u128::from(self.draw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_for_ever() {
        let mut random = Random::new(42);
        let first: Vec<u64> = (0..3).map(|_| random.draw()).collect();
        assert_eq!(
            first,
            [1546998764402558742, 6990951692964543102, 12544586762248559009],
            "changing the generator would make every pasted seed another run"
        );
    }

    #[test]
    fn numbers_stay_within_their_bounds_and_reach_both_ends() {
        let mut random = Random::new(1);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            let n = random.between(10, 14);
            seen[(n - 10) as usize] = true;
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(random.below(0), 0);
    }
}
