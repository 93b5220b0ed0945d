//! A limited number of places of which no holder gets more than a share.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard};

/// Places, and the share of one holder. Cheap to clone; clones share the places.
pub struct Shares<K> {
    places_max: usize,
    share_max: usize,
    taken: Arc<Mutex<Taken<K>>>,
}

impl<K> Clone for Shares<K> {
    fn clone(&self) -> Self {
        let Self { places_max, share_max, ref taken } = *self;
        Self { places_max, share_max, taken: taken.clone() }
    }
}

/// An entry is there only while its holder has a place, so the map is never larger than the places.
struct Taken<K> {
    all: usize,
    by_holder: HashMap<K, usize>,
}

/// One place; free again when this is dropped.
pub struct Slot<K: Hash + Eq> {
    holder: K,
    taken: Arc<Mutex<Taken<K>>>,
}

/// Why there is no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoSlot {
    /// All places are taken.
    Full,
    /// The holder has its share.
    ShareTaken,
}

impl<K: Hash + Eq + Clone> Shares<K> {
    pub fn new(places_max: usize, share_max: usize) -> Self {
        let taken = Taken { all: 0, by_holder: HashMap::new() };
        Self { places_max, share_max, taken: Arc::new(Mutex::new(taken)) }
    }

    pub fn take(&self, holder: K) -> Result<Slot<K>, NoSlot> {
        let mut taken = locked(&self.taken);
        let has = taken.by_holder.get(&holder).copied().unwrap_or(0);
        if has >= self.share_max {
            return Err(NoSlot::ShareTaken);
        }
        if taken.all >= self.places_max {
            return Err(NoSlot::Full);
        }
        taken.all += 1;
        taken.by_holder.insert(holder.clone(), has + 1);
        drop(taken);
        Ok(Slot { holder, taken: self.taken.clone() })
    }

    pub fn taken(&self) -> usize {
        locked(&self.taken).all
    }
}

impl<K: Hash + Eq> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut taken = locked(&self.taken);
        taken.all -= 1;
        if let Some(has) = taken.by_holder.get_mut(&self.holder) {
            *has -= 1;
            if *has == 0 {
                taken.by_holder.remove(&self.holder);
            }
        }
    }
}

fn locked<K>(taken: &Mutex<Taken<K>>) -> MutexGuard<'_, Taken<K>> {
    taken.lock().expect("no holder of this lock panics")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_gets_its_share_and_other_holders_get_the_rest() {
        let shares = Shares::new(8, 2);
        let of_one: Vec<_> = (0..2).map(|_| shares.take("one").ok().unwrap()).collect();
        assert_eq!(shares.take("one").err(), Some(NoSlot::ShareTaken));
        let others = ["two", "three", "four"];
        let of_others: Vec<_> =
            others.iter().flat_map(|other| [*other; 2]).map(|o| shares.take(o).ok()).collect();
        assert!(of_others.iter().all(Option::is_some));
        assert_eq!((shares.taken(), shares.take("five").err()), (8, Some(NoSlot::Full)));
        drop(of_one);
        assert!(shares.take("one").is_ok());
        drop(of_others);
        assert_eq!(shares.taken(), 0);
        assert!(locked(&shares.taken).by_holder.is_empty(), "holders without a slot have no entry");
    }
}
