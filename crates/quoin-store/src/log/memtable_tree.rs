//! The newest entry of the log for each block, as a radix tree of flat parts.
//!
//! A node has 256 children: blocks in a leaf, nodes of the level below elsewhere. It has a bitmap
//! of those that are there, and their values packed in order. All nodes lie in one vector, all
//! values in another, and what is given up is used again. So a write finds its place in a few
//! steps whatever is there, allocates nothing once the vectors have grown, and an entry costs a
//! few words.
//!
//! Entries are inserted in the order of their LSNs, so what is inserted last is newest. A range
//! that covers a whole child is one value in its parent, however many blocks it has. A node made
//! below such a value keeps it as its fill, the version of all children that have none of their
//! own.

const SHIFT: u32 = 8;
const FANOUT: usize = 1 << SHIFT;
/// Marks a value as a node's number; LSNs are smaller.
const NODE: u64 = 1 << 63;
/// No node.
const NONE: u32 = u32::MAX;
/// Values of the smallest part of a node. Each class has twice as many as the one before.
const CLASS_MIN: u32 = 2;
const CLASSES: usize = 8;
/// A table that has forgotten most of what it held gives its memory back above this size.
const KEPT_BYTES: usize = 64 << 10;
/// Part of its memory that a table must use to keep it.
const USED_PART: usize = 32;

#[derive(Clone, Debug)]
struct Node {
    /// Which children are there.
    bits: [u64; FANOUT / 64],
    /// Version of the others; 0: none.
    fill: u64,
    /// The first of its values, and their class.
    at: u32,
    class: u8,
}

impl Node {
    /// Children that are there before this one.
    fn rank(&self, child: usize) -> usize {
        let word = child / 64;
        let before: u32 = self.bits[..word].iter().map(|bits| bits.count_ones()).sum();
        let below = (1u64 << (child % 64)) - 1;
        (before + (self.bits[word] & below).count_ones()) as usize
    }

    fn has(&self, child: usize) -> bool {
        self.bits[child / 64] & (1 << (child % 64)) != 0
    }

    fn len(&self) -> usize {
        self.bits.iter().map(|bits| bits.count_ones() as usize).sum()
    }

    /// The first child from this one on that is there.
    fn next(&self, child: usize) -> Option<usize> {
        let mut word = child / 64;
        let mut bits = *self.bits.get(word)? & (u64::MAX << (child % 64));
        while bits == 0 {
            word += 1;
            bits = *self.bits.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn set(&mut self, from: usize, to: usize) {
        for (word, bits) in self.bits.iter_mut().enumerate() {
            let (low, high) = (from.max(word * 64), to.min(word * 64 + 64));
            if low < high {
                *bits |= (u64::MAX >> (64 - (high - low))) << (low % 64);
            }
        }
    }
}

fn capacity(class: u8) -> usize {
    (CLASS_MIN << class) as usize
}

/// The class with room for so many values.
fn class_of(values: usize) -> u8 {
    let parts = values.max(1).div_ceil(CLASS_MIN as usize).next_power_of_two();
    parts.trailing_zeros() as u8
}

/// Binary logarithm of the blocks that a child of a node on this level covers.
fn child_shift(level: u8) -> u32 {
    SHIFT * u32::from(level)
}

/// The newest entry by range: disjoint stretches of blocks, each with an LSN.
#[derive(Clone, Debug)]
pub struct Memtable {
    nodes: Vec<Node>,
    /// Nodes that are not used, each with the number of the next one in `at`.
    free_node: u32,
    values: Vec<u64>,
    /// Parts of `values` that are not used, by class; each begins with the place of the next.
    free_values: [u32; CLASSES],
    root: u32,
    /// Levels above the leaves.
    level: u8,
    /// Nodes in use, and the values that they have.
    used_nodes: usize,
    used_values: usize,
}

impl Default for Memtable {
    fn default() -> Self {
        Memtable {
            nodes: Vec::new(),
            free_node: NONE,
            values: Vec::new(),
            free_values: [NONE; CLASSES],
            root: NONE,
            level: 0,
            used_nodes: 0,
            used_values: 0,
        }
    }
}

impl Memtable {
    /// Makes a range the newest version's. LSNs of later calls are larger.
    pub fn insert(&mut self, start: u64, end: u64, lsn: u64) {
        if start >= end {
            return;
        }
        if self.root == NONE {
            self.root = self.new_node(0);
            self.level = 0;
        }
        while (end - 1) >> child_shift(self.level + 1) != 0 {
            let above = self.new_node(0);
            self.replace(above, 0, 1, NODE | u64::from(self.root));
            self.root = above;
            self.level += 1;
        }
        self.insert_below(self.root, self.level, start, end, lsn);
    }

    /// `start..end` is relative to the node and not empty.
    fn insert_below(&mut self, node: u32, level: u8, start: u64, end: u64, lsn: u64) {
        if level == 0 {
            self.replace(node, start as usize, end as usize, lsn);
            return;
        }
        let shift = child_shift(level);
        let span = 1u64 << shift;
        let (mut first, last) = ((start >> shift) as usize, (end >> shift) as usize);
        if first == last {
            let child = self.child(node, first);
            self.insert_below(child, level - 1, start % span, end % span, lsn);
            return;
        }
        if !start.is_multiple_of(span) {
            let child = self.child(node, first);
            self.insert_below(child, level - 1, start % span, span, lsn);
            first += 1;
        }
        if !end.is_multiple_of(span) {
            let child = self.child(node, last);
            self.insert_below(child, level - 1, 0, end % span, lsn);
        }
        if first < last {
            self.release_below(node, first, last);
            self.replace(node, first, last, lsn);
        }
    }

    /// The node below this one, made if there is none.
    fn child(&mut self, node: u32, child: usize) -> u32 {
        let above = &self.nodes[node as usize];
        let fill = match above.has(child) {
            true => {
                let value = self.values[above.at as usize + above.rank(child)];
                if value & NODE != 0 {
                    return (value & !NODE) as u32;
                }
                value
            }
            false => above.fill,
        };
        let made = self.new_node(fill);
        self.replace(node, child, child + 1, NODE | u64::from(made));
        made
    }

    /// Gives these children one value.
    fn replace(&mut self, number: u32, from: usize, to: usize, value: u64) {
        let node = &self.nodes[number as usize];
        let (first, behind) =
            (node.rank(from), if to == FANOUT { node.len() } else { node.rank(to) });
        let (old, new) = (behind - first, to - from);
        if old < new {
            let length = node.len();
            let needed = length + new - old;
            if needed > capacity(node.class) {
                self.grow(number, needed);
            }
            self.used_values += new - old;
            let node = &mut self.nodes[number as usize];
            node.set(from, to);
            let at = node.at as usize;
            self.values.copy_within(at + behind..at + length, at + first + new);
        }
        let at = self.nodes[number as usize].at as usize + first;
        self.values[at..at + new].fill(value);
    }

    fn grow(&mut self, number: u32, needed: usize) {
        let node = &self.nodes[number as usize];
        let (at, class, length) = (node.at, node.class, node.len());
        let larger = class_of(needed);
        let new = self.new_values(larger);
        self.values.copy_within(at as usize..at as usize + length, new as usize);
        self.release_values(at, class);
        let node = &mut self.nodes[number as usize];
        (node.at, node.class) = (new, larger);
    }

    fn new_node(&mut self, fill: u64) -> u32 {
        let at = self.new_values(0);
        let node = Node { bits: [0; FANOUT / 64], fill, at, class: 0 };
        self.used_nodes += 1;
        if self.free_node == NONE {
            self.nodes.push(node);
            return self.nodes.len() as u32 - 1;
        }
        let number = self.free_node;
        self.free_node = std::mem::replace(&mut self.nodes[number as usize], node).at;
        number
    }

    fn new_values(&mut self, class: u8) -> u32 {
        let free = self.free_values[class as usize];
        if free == NONE {
            let at = self.values.len();
            self.values.resize(at + capacity(class), 0);
            return at as u32;
        }
        self.free_values[class as usize] = self.values[free as usize] as u32;
        free
    }

    fn release_values(&mut self, at: u32, class: u8) {
        self.values[at as usize] = u64::from(self.free_values[class as usize]);
        self.free_values[class as usize] = at;
    }

    fn release_node(&mut self, number: u32) {
        let node = &self.nodes[number as usize];
        self.used_nodes -= 1;
        self.used_values -= node.len();
        self.release_values(node.at, node.class);
        self.nodes[number as usize].at = self.free_node;
        self.free_node = number;
    }

    /// Gives up the nodes below these children, with all that is below them.
    fn release_below(&mut self, number: u32, from: usize, to: usize) {
        let mut child = from;
        while let Some(found) = self.nodes[number as usize].next(child).filter(|next| *next < to) {
            let node = &self.nodes[number as usize];
            let value = self.values[node.at as usize + node.rank(found)];
            if value & NODE != 0 {
                self.release_tree((value & !NODE) as u32);
            }
            child = found + 1;
        }
    }

    fn release_tree(&mut self, number: u32) {
        let node = &self.nodes[number as usize];
        let (at, length) = (node.at as usize, node.len());
        for value in at..at + length {
            let value = self.values[value];
            // The values of a leaf are LSNs.
            if value & NODE != 0 {
                self.release_tree((value & !NODE) as u32);
            }
        }
        self.release_node(number);
    }

    /// The version at a block, 0 for none, and the first block behind it that may have another.
    fn piece(&self, lba: u64, leaf: &mut CachedLeaf) -> (u64, u64) {
        if leaf.number != NONE && lba >> SHIFT == leaf.index {
            return self.piece_of_leaf(leaf.number, lba);
        }
        if self.root == NONE || lba >> child_shift(self.level + 1) != 0 {
            return (0, u64::MAX);
        }
        let (mut number, mut level) = (self.root, self.level);
        loop {
            if level == 0 {
                *leaf = CachedLeaf { index: lba >> SHIFT, number };
                return self.piece_of_leaf(number, lba);
            }
            let node = &self.nodes[number as usize];
            let shift = child_shift(level);
            let base = lba >> (shift + SHIFT) << (shift + SHIFT);
            let child = (lba >> shift) as usize % FANOUT;
            if !node.has(child) {
                let next = node.next(child).unwrap_or(FANOUT) as u64;
                return (node.fill, base + (next << shift));
            }
            let value = self.values[node.at as usize + node.rank(child)];
            if value & NODE == 0 {
                return (value, base + ((child as u64 + 1) << shift));
            }
            (number, level) = ((value & !NODE) as u32, level - 1);
        }
    }

    fn piece_of_leaf(&self, number: u32, lba: u64) -> (u64, u64) {
        let node = &self.nodes[number as usize];
        let child = lba as usize % FANOUT;
        let base = lba - child as u64;
        if !node.has(child) {
            return (node.fill, base + node.next(child).unwrap_or(FANOUT) as u64);
        }
        let at = node.at as usize + node.rank(child);
        let value = self.values[at];
        let same = (child + 1..FANOUT).zip(at + 1..);
        let same = same.take_while(|(next, at)| node.has(*next) && self.values[*at] == value);
        (value, base + child as u64 + 1 + same.count() as u64)
    }

    /// Stretches of one version in `[start, end)`, clipped to it, in order: start, end and LSN.
    pub fn range(&self, start: u64, end: u64) -> Stretches<'_> {
        Stretches { table: self, at: start, end, next: None, leaf: CachedLeaf::default() }
    }

    /// The first stretch of `[cursor, until)` that is newer than `from`.
    pub fn next(&self, cursor: u64, until: u64, from: u64) -> Option<(u64, u64)> {
        let newer = self.range(cursor, until).find(|(_, _, lsn)| *lsn > from)?;
        Some((newer.0, newer.1))
    }

    /// Forgets entries up to an LSN: they are folded now.
    pub fn forget_through(&mut self, lsn: u64) {
        if self.root != NONE && !self.keep_after(self.root, lsn) {
            self.clear();
        }
        let used = self.used_bytes();
        if self.bytes() > KEPT_BYTES && used < self.bytes() / USED_PART {
            let mut smaller = Memtable::default();
            smaller.nodes.reserve(self.used_nodes);
            smaller.values.reserve(self.used_values);
            // Each block is in one stretch, so their order is of no consequence.
            for (start, end, lsn) in self.range(0, u64::MAX) {
                smaller.insert(start, end, lsn);
            }
            *self = smaller;
        }
    }

    /// Drops what is not newer below a node; false: nothing is left of it.
    fn keep_after(&mut self, number: u32, lsn: u64) -> bool {
        let node = &self.nodes[number as usize];
        let at = node.at as usize;
        let (mut bits, fill) = (node.bits, if node.fill > lsn { node.fill } else { 0 });
        let (mut from, mut to) = (at, at);
        for word in &mut bits {
            let mut left = *word;
            while left != 0 {
                let bit = left & left.wrapping_neg();
                left ^= bit;
                let value = self.values[from];
                from += 1;
                let keeps = match value & NODE {
                    0 => value > lsn,
                    _ => {
                        let child = (value & !NODE) as u32;
                        let keeps = self.keep_after(child, lsn);
                        if !keeps {
                            self.release_node(child);
                        }
                        keeps
                    }
                };
                if keeps {
                    self.values[to] = value;
                    to += 1;
                } else {
                    *word ^= bit;
                }
            }
        }
        self.used_values -= from - to;
        let node = &mut self.nodes[number as usize];
        (node.bits, node.fill) = (bits, fill);
        fill != 0 || to > at
    }

    /// Forgets everything and keeps its memory.
    pub fn clear(&mut self) {
        let (mut nodes, mut values) =
            (std::mem::take(&mut self.nodes), std::mem::take(&mut self.values));
        nodes.clear();
        values.clear();
        *self = Memtable { nodes, values, ..Memtable::default() };
    }

    /// Memory that it takes, used or not.
    pub fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.values.capacity() * size_of::<u64>()
    }

    fn used_bytes(&self) -> usize {
        self.used_nodes * size_of::<Node>() + self.used_values * size_of::<u64>()
    }
}

/// The leaf that was looked at last.
#[derive(Clone, Copy)]
struct CachedLeaf {
    index: u64,
    number: u32,
}

impl Default for CachedLeaf {
    fn default() -> Self {
        CachedLeaf { index: 0, number: NONE }
    }
}

/// Iterator over stretches of one version, see [`Memtable::range`].
pub struct Stretches<'a> {
    table: &'a Memtable,
    at: u64,
    end: u64,
    /// A stretch that may go on at `at`.
    next: Option<(u64, u64)>,
    leaf: CachedLeaf,
}

impl Iterator for Stretches<'_> {
    type Item = (u64, u64, u64);

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.end {
            let (lsn, end) = self.table.piece(self.at, &mut self.leaf);
            let start = self.at;
            self.at = end.min(self.end);
            match self.next {
                Some((_, same)) if same == lsn => {}
                Some((first, before)) => {
                    self.next = (lsn != 0).then_some((start, lsn));
                    return Some((first, start, before));
                }
                None => self.next = (lsn != 0).then_some((start, lsn)),
            }
        }
        let (first, lsn) = self.next.take()?;
        Some((first, self.end, lsn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// The same by block, or by the end of the ranges where these are long.
    #[derive(Default)]
    struct Plain {
        entries: Vec<(u64, u64, u64)>,
    }

    impl Plain {
        /// Version by each place where it may change.
        fn stretches(&self, start: u64, end: u64) -> Vec<(u64, u64, u64)> {
            let mut bounds = BTreeMap::from([(start, 0), (end, 0)]);
            for (from, to, _) in &self.entries {
                bounds.extend([(*from, 0), (*to, 0)]);
            }
            let bounds: Vec<u64> = bounds.range(start..=end).map(|(at, _)| *at).collect();
            let mut out = Vec::<(u64, u64, u64)>::new();
            for pair in bounds.windows(2) {
                let covers = |entry: &&(u64, u64, u64)| entry.0 <= pair[0] && pair[1] <= entry.1;
                let Some((_, _, lsn)) = self.entries.iter().rev().find(covers) else { continue };
                match out.last_mut() {
                    Some(last) if last.1 == pair[0] && last.2 == *lsn => last.1 = pair[1],
                    _ => out.push((pair[0], pair[1], *lsn)),
                }
            }
            out
        }

        /// What is newest is decided before anything is forgotten.
        fn forget_through(&mut self, lsn: u64) {
            let mut kept = self.stretches(0, u64::MAX);
            kept.retain(|(_, _, version)| *version > lsn);
            self.entries = kept;
        }
    }

    /// Ranges as writes and trims have them, near each other or far apart.
    fn ranges() -> impl Strategy<Value = (u64, u64)> {
        let near = (0u64..2000, 1u64..300);
        let blocks = (0u64..70_000, Just(1u64));
        let aligned = (0u64..600, 1u64..600).prop_map(|(at, n)| (at * 256, n * 256));
        let far = (0u64..1 << 44, 1u64..=1 << 18);
        prop_oneof![3 => near, 3 => blocks, 2 => aligned, 1 => far]
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u64, u64),
        /// Forgets this part of what was inserted, in percent.
        Forget(u64),
        Clear,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            12 => ranges().prop_map(|(at, blocks)| Step::Insert(at, at + blocks)),
            1 => (0u64..=100).prop_map(Step::Forget),
            1 => Just(Step::Clear),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        #[test]
        fn the_newest_entry_wins_in_every_block(
            steps in steps(),
            windows in prop::collection::vec(ranges(), 1..4),
        ) {
            let (mut table, mut plain) = (Memtable::default(), Plain::default());
            let mut folded = 0;
            for (step, lsn) in steps.iter().zip(1u64..) {
                match step {
                    Step::Insert(start, end) => {
                        table.insert(*start, *end, lsn);
                        plain.entries.push((*start, *end, lsn));
                    }
                    Step::Forget(percent) => {
                        folded += (lsn - folded) * percent / 100;
                        table.forget_through(folded);
                        plain.forget_through(folded);
                    }
                    Step::Clear => {
                        table.clear();
                        plain.entries.clear();
                    }
                }
                let all: Vec<_> = table.range(0, u64::MAX).collect();
                prop_assert_eq!(&all, &plain.stretches(0, u64::MAX));
            }
            for (start, blocks) in windows {
                let (end, old) = (start + blocks, steps.len() as u64 / 2);
                let found: Vec<_> = table.range(start, end).collect();
                prop_assert_eq!(&found, &plain.stretches(start, end));
                let next = found.iter().find(|(_, _, lsn)| *lsn > old).map(|(s, e, _)| (*s, *e));
                prop_assert_eq!(table.next(start, end, old), next);
            }
            let used = table.range(0, u64::MAX).count();
            prop_assert!(used > 0 || table.used_nodes == 0, "{} nodes of nothing", table.used_nodes);
        }
    }

    #[test]
    fn a_long_trim_is_a_few_values_and_gives_up_what_it_covers() {
        let mut table = Memtable::default();
        (0..4096u64).for_each(|i| table.insert(i * 61, i * 61 + 1, i + 1));
        let before = table.used_bytes();
        table.insert(0, 1 << 18, 5000);
        assert_eq!(table.range(0, u64::MAX).collect::<Vec<_>>(), [(0, 1 << 18, 5000)]);
        assert!(table.used_bytes() < 4096, "{} of {before} bytes", table.used_bytes());
        table.insert(1000, 1001, 5001);
        let stretches = [(0, 1000, 5000), (1000, 1001, 5001), (1001, 1 << 18, 5000)];
        assert_eq!(table.range(0, 1 << 20).collect::<Vec<_>>(), stretches);
    }

    #[test]
    fn a_table_takes_no_more_memory_in_the_rounds_after_the_first() {
        let (mut table, mut lsn, mut random) = (Memtable::default(), 0u64, 1u64);
        let mut sizes = Vec::new();
        for _ in 0..12 {
            for _ in 0..40_000 {
                random =
                    random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                lsn += 1;
                let lba = (random >> 33) % (1 << 18);
                table.insert(lba, lba + 1, lsn);
            }
            table.forget_through(lsn - 13_000);
            sizes.push(table.bytes());
        }
        assert!(sizes[1..].iter().all(|bytes| *bytes <= 2 * sizes[1]), "{sizes:?}");
        assert!(sizes[11] <= 60_000 * 100, "{} bytes for at most 53,000 entries", sizes[11]);
        table.forget_through(lsn - 10);
        assert!(table.bytes() <= 2 * KEPT_BYTES, "{} bytes for ten entries", table.bytes());
    }
}
