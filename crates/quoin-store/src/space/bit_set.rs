//! A set of small numbers as bits, with a bit above for each word that has any: a bit for each
//! number, and the first, the next or the last in a few steps, however many there may be.

const WORD: usize = u64::BITS as usize;

pub struct BitSet {
    /// The numbers, then level by level which words of the level below are not zero.
    levels: Vec<Vec<u64>>,
    len: u32,
}

impl BitSet {
    /// A set without numbers, which takes those below `limit`.
    pub fn new(limit: u32) -> Self {
        let mut levels = Vec::new();
        let mut words = (limit as usize).div_ceil(WORD).max(1);
        loop {
            levels.push(vec![0; words]);
            if words == 1 {
                return BitSet { levels, len: 0 };
            }
            words = words.div_ceil(WORD);
        }
    }

    /// A set of all numbers below `limit`.
    pub fn full(limit: u32) -> Self {
        let mut set = Self::new(limit);
        let mut bits = limit as usize;
        for level in &mut set.levels {
            let (whole, rest) = (bits / WORD, bits % WORD);
            level[..whole].fill(u64::MAX);
            if rest > 0 {
                level[whole] = (1 << rest) - 1;
            }
            bits = bits.div_ceil(WORD);
        }
        set.len = limit;
        set
    }

    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        self.levels.iter().map(|level| level.capacity() * size_of::<u64>()).sum()
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn contains(&self, number: u32) -> bool {
        let at = number as usize;
        self.levels[0].get(at / WORD).is_some_and(|word| word >> (at % WORD) & 1 == 1)
    }

    /// The eight numbers from a multiple of eight on, as bits.
    pub fn eight_from(&self, number: u32) -> u8 {
        let at = number as usize;
        let word = self.levels[0].get(at / WORD).copied().unwrap_or(0);
        (word >> ((at % WORD) & !7)) as u8
    }

    pub fn insert(&mut self, number: u32) {
        if self.contains(number) {
            return;
        }
        self.len += 1;
        let mut at = number as usize;
        for level in &mut self.levels {
            let word = &mut level[at / WORD];
            let had_any = *word != 0;
            *word |= 1 << (at % WORD);
            if had_any {
                break;
            }
            at /= WORD;
        }
    }

    pub fn remove(&mut self, number: u32) {
        if !self.contains(number) {
            return;
        }
        self.len -= 1;
        let mut at = number as usize;
        for level in &mut self.levels {
            let word = &mut level[at / WORD];
            *word &= !(1 << (at % WORD));
            if *word != 0 {
                break;
            }
            at /= WORD;
        }
    }

    pub fn first(&self) -> Option<u32> {
        self.next(0)
    }

    /// The first number from this one on.
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut at = from as usize;
        for (level, words) in self.levels.iter().enumerate() {
            let bits = words.get(at / WORD)? & u64::MAX << (at % WORD);
            if bits != 0 {
                let found = at / WORD * WORD + bits.trailing_zeros() as usize;
                let below = self.levels[..level].iter().rev();
                let first =
                    |at: usize, words: &Vec<u64>| at * WORD + words[at].trailing_zeros() as usize;
                return Some(below.fold(found, first) as u32);
            }
            at = at / WORD + 1;
        }
        None
    }

    pub fn last(&self) -> Option<u32> {
        (self.len > 0).then(|| {
            let last = |at: usize, words: &Vec<u64>| {
                at * WORD + WORD - 1 - words[at].leading_zeros() as usize
            };
            self.levels.iter().rev().fold(0, last) as u32
        })
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.first(), |number| self.next(number.checked_add(1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_equals_a_plain_set(
            limit in prop::sample::select(vec![1u32, 7, 64, 65, 4096, 4097, 300_000]),
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 0..200),
            is_full in any::<bool>(),
        ) {
            let (mut set, mut model) = match is_full && limit < 5000 {
                true => (BitSet::full(limit), (0..limit).collect()),
                false => (BitSet::new(limit), BTreeSet::new()),
            };
            for (adds, index) in steps {
                // Many of them are the same few.
                let number = index.index(limit as usize) as u32 / 3 * 3 % limit;
                match adds {
                    true => {
                        set.insert(number);
                        model.insert(number);
                    }
                    false => {
                        set.remove(number);
                        model.remove(&number);
                    }
                }
                prop_assert_eq!(set.len() as usize, model.len());
                prop_assert_eq!(set.contains(number), model.contains(&number));
                prop_assert_eq!((set.first(), set.last()), (model.first().copied(), model.last().copied()));
                prop_assert_eq!(set.next(number), model.range(number..).next().copied());
                let eight = number & !7;
                let bits = (0..8).filter(|i| model.contains(&(eight + i))).map(|i| 1u8 << i);
                prop_assert_eq!(set.eight_from(eight), bits.sum::<u8>());
            }
            prop_assert!(set.iter().eq(model.iter().copied()));
            prop_assert!(!set.contains(limit) && !set.contains(u32::MAX));
            prop_assert_eq!(set.next(u32::MAX), None);
        }
    }
}
