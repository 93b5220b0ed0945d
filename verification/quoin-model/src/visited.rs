//! The states that were seen: 64-bit fingerprints in one open-addressed table that two threads
//! share without locks.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use zerocopy::FromZeros;

/// Mixes 16 bytes at a time through a 128-bit product; what is left is padded with zeroes (all
/// keys have one length, so padding confuses nothing).
pub fn fingerprint(bytes: &[u8]) -> u64 {
    const A: u64 = 0x9e37_79b9_7f4a_7c15;
    const B: u64 = 0xc2b2_ae3d_27d4_eb4f;
    let mut state = A;
    for chunk in bytes.chunks(16) {
        let mut words = [0u8; 16];
        words[..chunk.len()].copy_from_slice(chunk);
        let low = u64::from_le_bytes(words[..8].try_into().expect("eight bytes"));
        let high = u64::from_le_bytes(words[8..].try_into().expect("eight bytes"));
        state = fold(low ^ state, high ^ B).wrapping_add(state.rotate_left(29) ^ A);
    }
    // 0 marks a free slot.
    fold(state, B).max(1)
}

fn fold(x: u64, y: u64) -> u64 {
    let product = u128::from(x) * u128::from(y);
    (product as u64) ^ (product >> 64) as u64
}

pub struct Visited {
    slots: Vec<AtomicU64>,
    /// From which state each was reached first; empty where no trace is wanted.
    parents: Vec<AtomicU64>,
    count: AtomicUsize,
    slots_max: usize,
}

impl Visited {
    /// `slots` and more as they are needed (a power of two), in `memory_bytes` at most.
    pub fn new(slots: usize, memory_bytes: usize, with_parents: bool) -> Self {
        let each = if with_parents { 16 } else { 8 };
        let most = (memory_bytes / each).max(slots);
        Self::with(slots, 1 << most.ilog2(), with_parents)
    }

    fn with(slots: usize, slots_max: usize, with_parents: bool) -> Self {
        Self {
            slots: zeroed(slots),
            parents: if with_parents { zeroed(slots) } else { Vec::new() },
            count: AtomicUsize::new(0),
            slots_max,
        }
    }

    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// False if it was there already.
    pub fn insert(&self, key: u64, parent: u64) -> bool {
        let mask = self.slots.len() - 1;
        let mut at = (key >> 7) as usize & mask;
        loop {
            match self.slots[at].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    self.count.fetch_add(1, Ordering::Relaxed);
                    if let Some(slot) = self.parents.get(at) {
                        slot.store(parent, Ordering::Relaxed);
                    }
                    return true;
                }
                Err(there) if there == key => return false,
                Err(_) => at = (at + 1) & mask,
            }
        }
    }

    pub fn parent(&self, key: u64) -> Option<u64> {
        let mask = self.slots.len() - 1;
        let mut at = (key >> 7) as usize & mask;
        loop {
            match self.slots[at].load(Ordering::Relaxed) {
                0 => return None,
                there if there == key => {
                    return self.parents.get(at).map(|slot| slot.load(Ordering::Relaxed));
                }
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// Room for so many more, with slots left free for the search to be short. False: there is
    /// none.
    pub fn make_room(&mut self, more: usize) -> bool {
        loop {
            let (full, slots) = (self.len() + more, self.capacity());
            if full * 10 <= slots * 6 || (slots == self.slots_max && full * 20 <= slots * 17) {
                return true;
            }
            if slots == self.slots_max {
                return false;
            }
            self.grow();
        }
    }

    /// Doubles the size; from an eighth of the largest size, grows at once to the largest, as the
    /// old table is there until the new one is filled. No other thread may use it meanwhile.
    fn grow(&mut self) {
        let twice = self.slots.len() * 2;
        let slots = if twice > self.slots_max / 8 { self.slots_max } else { twice };
        let new = Self::with(slots, self.slots_max, !self.parents.is_empty());
        let old = std::mem::replace(self, new);
        for (at, slot) in old.slots.iter().enumerate() {
            let key = slot.load(Ordering::Relaxed);
            if key != 0 {
                let parent = old.parents.get(at).map_or(0, |slot| slot.load(Ordering::Relaxed));
                self.insert(key, parent);
            }
        }
    }
}

fn zeroed(slots: usize) -> Vec<AtomicU64> {
    // Memory that was never written to is the system's to give when it is.
    AtomicU64::new_vec_zeroed(slots).expect("there is memory for the table")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_new_once_and_keeps_its_parent_when_the_table_grows() {
        let mut visited = Visited::new(1 << 4, 1 << 10, true);
        assert!(visited.make_room(9));
        for key in 1..=12 {
            assert!(visited.insert(key * 0x1234_5677, key));
        }
        assert!(visited.make_room(7));
        assert_eq!((visited.len(), visited.capacity()), (12, 64), "all that there may be");
        for key in 1..=12 {
            assert!(!visited.insert(key * 0x1234_5677, 0));
            assert_eq!(visited.parent(key * 0x1234_5677), Some(key));
        }
        assert!(visited.make_room(42));
        assert!(!visited.make_room(43), "the search for a free slot would be long");
    }

    #[test]
    fn one_changed_byte_anywhere_changes_the_fingerprint() {
        let mut bytes = [0u8; 437];
        let mut seen = std::collections::HashSet::from([fingerprint(&bytes)]);
        for at in 0..bytes.len() {
            for value in [1, 2, 128] {
                bytes[at] = value;
                assert!(seen.insert(fingerprint(&bytes)));
            }
            bytes[at] = 0;
        }
    }
}
