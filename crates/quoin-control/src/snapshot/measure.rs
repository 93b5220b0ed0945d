//! Space of a snapshot, counted from what its volume's target says: bytes that it has, and bytes that
//! nothing else of its volume has, which its deletion gives back.

use std::ops::Range;

use quoin_api::control::PulledPart;
use quoin_types::BLOCK_SIZE;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Blocks of a view from one block on, in order, as far as they are known.
#[derive(Debug)]
pub(super) struct Known {
    blocks: Vec<Range<u64>>,
    /// First block of which nothing is known.
    pub end: u64,
}

impl Known {
    pub fn from(block: u64) -> Self {
        Self { blocks: Vec::new(), end: block }
    }

    /// Adds the part that begins where what is known ends.
    pub fn add(&mut self, part: &PulledPart) {
        self.blocks.extend(part.ranges.iter().map(|range| {
            let first = range.offset / BLOCK;
            first..first + range.length.div_ceil(BLOCK)
        }));
        self.end = part.next_block.unwrap_or(u64::MAX);
    }
}

/// Bytes of a snapshot from one block on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Measured {
    pub data_bytes: u64,
    pub exclusive_bytes: u64,
    /// First block that is not counted.
    pub end: u64,
}

/// Counts from `first` on as far as all three views are known: `held` by the snapshot, changed in it
/// since the older one (`new`), and changed since it in the newer one or the volume (`gone`).
pub(super) fn measured(first: u64, held: &Known, new: &Known, gone: &Known) -> Measured {
    let end = held.end.min(new.end).min(gone.end);
    let bytes = |blocks: &[Range<u64>]| {
        let within = |range: &Range<u64>| range.end.min(end).saturating_sub(range.start.max(first));
        blocks.iter().map(within).sum::<u64>() * BLOCK
    };
    let exclusive = common(&common(&held.blocks, &new.blocks), &gone.blocks);
    Measured { data_bytes: bytes(&held.blocks), exclusive_bytes: bytes(&exclusive), end }
}

/// Blocks of both; each is in order.
fn common(left: &[Range<u64>], right: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut both, mut at) = (Vec::new(), 0);
    for range in left {
        while right.get(at).is_some_and(|other| other.end <= range.start) {
            at += 1;
        }
        let others = right[at..].iter().take_while(|other| other.start < range.end);
        both.extend(others.map(|other| range.start.max(other.start)..range.end.min(other.end)));
    }
    both
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quoin_api::control::SnapshotRange;

    use super::*;

    fn known(blocks: &[bool]) -> Known {
        let ranges =
            (0..blocks.len() as u64).filter(|at| blocks[*at as usize]).map(|at| at..at + 1);
        let mut merged = Vec::<Range<u64>>::new();
        for range in ranges {
            match merged.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => merged.push(range),
            }
        }
        Known { blocks: merged, end: blocks.len() as u64 }
    }

    proptest! {
        #[test]
        fn a_block_is_exclusive_that_was_new_in_the_snapshot_and_is_gone_after_it(
            held in prop::collection::vec(any::<bool>(), 1..60),
            new in prop::collection::vec(any::<bool>(), 1..60),
            gone in prop::collection::vec(any::<bool>(), 1..60),
            first in 0u64..20,
        ) {
            let end = held.len().min(new.len()).min(gone.len()) as u64;
            let counted = || (first..end).map(|at| at as usize);
            let of = |is: &dyn Fn(usize) -> bool| counted().filter(|at| is(*at)).count() as u64 * BLOCK;
            let found = measured(first, &known(&held), &known(&new), &known(&gone));
            prop_assert_eq!(found.data_bytes, of(&|at| held[at]));
            prop_assert_eq!(found.exclusive_bytes, of(&|at| held[at] && new[at] && gone[at]));
            prop_assert_eq!(found.end, end);
        }
    }

    #[test]
    fn parts_are_added_one_after_the_other_and_the_last_one_is_known_to_be_that() {
        let range = |block: u64, blocks: u64| SnapshotRange {
            offset: block * BLOCK,
            length: blocks * BLOCK,
            ..SnapshotRange::default()
        };
        let part = |ranges, next_block| PulledPart { ranges, next_block, ..PulledPart::default() };
        let mut known = Known::from(2);
        known.add(&part(vec![range(2, 1), range(4, 2)], Some(6)));
        assert_eq!((known.blocks.as_slice(), known.end), (&[2..3, 4..6][..], 6));
        known.add(&part(vec![range(9, 1)], None));
        assert_eq!((known.blocks.as_slice(), known.end), (&[2..3, 4..6, 9..10][..], u64::MAX));
    }
}
