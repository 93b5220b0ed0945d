//! Values under small numbers that are reused: no allocation for each value in the long run.

pub(super) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub fn insert(&mut self, value: T) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = Some(value);
                index
            }
            None => {
                self.slots.push(Some(value));
                self.slots.len() - 1
            }
        }
    }

    pub fn get(&self, index: usize) -> Option<&T> {
        self.slots.get(index)?.as_ref()
    }

    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.slots.get_mut(index)?.as_mut()
    }

    pub fn take(&mut self, index: usize) -> Option<T> {
        let value = self.slots.get_mut(index)?.take()?;
        self.free.push(index);
        Some(value)
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| Some((index, slot.as_ref()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(index, slot)| Some((index, slot.as_mut()?)))
    }

    /// The numbers in use, smallest first.
    pub fn indices(&self) -> Vec<usize> {
        self.iter().map(|(index, _)| index).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_stands_for_one_value_until_it_is_taken_and_is_then_used_again() {
        let mut slab = Slab::default();
        assert!(slab.is_empty());
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.get(a), slab.get(b), slab.get(7)), (Some(&'a'), Some(&'b'), None));
        assert_eq!((slab.take(a), slab.take(a), slab.take(7)), (Some('a'), None, None));
        assert_eq!((slab.indices(), slab.is_empty()), (vec![b], false));
        assert_eq!(slab.len(), 1);
        assert_eq!(slab.insert('c'), a);
        for (_, value) in slab.iter_mut() {
            value.make_ascii_uppercase();
        }
        assert_eq!(slab.iter().map(|(_, v)| *v).collect::<String>(), "CB");
    }
}
