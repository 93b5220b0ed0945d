//! Logical places: what leaves of the map say of where a block lies.
//!
//! A leaf names the unit in which a block was written first, and the unit's generation. The block
//! keeps that name when clean-up moves it, so no leaf changes. A segment that is opened in a unit
//! of which blocks were moved away gets another generation than they have, so no name has two
//! meanings. Generation 0 is what a pool had before there were generations: such a name is the
//! block's number in the pool.
//!
//! Where moved blocks lie is said for groups of up to 64 of them. A group lies within one unit and
//! moves as a whole: its blocks stand side by side at their new place, in the order of their names,
//! without those that had died.

use crate::format::node::{BASE_PLACE, BlockAt, LOST_PLACE};
use crate::format::superblock::Superblock;

const GENERATION_SHIFT: u32 = 48;
const BLOCK_MASK: u64 = (1 << GENERATION_SHIFT) - 1;
/// The last generation that fits in a place beside the marks of lost blocks.
const GENERATION_MAX: u64 = 0x7ffe;
/// Keys of the table of moved blocks: what a tree of nodes can hold.
const KEYS_MAX: u64 = 1 << 50;
/// A unit has at least so many groups, where it has so many blocks: what does not fit at a
/// segment's end is a group at most.
const GROUPS_A_UNIT_MIN: u32 = 16;
const GROUP_SHIFT_MAX: u32 = 6;

/// The name of a block in the map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogicalPlace {
    pub generation: u16,
    /// Where it was written first, as a block of the pool.
    pub block: u64,
}

impl LogicalPlace {
    /// The place in a leaf, if it is one of a block.
    pub fn decode(place: u64) -> Option<Self> {
        (place != 0 && place < BASE_PLACE).then_some(LogicalPlace {
            generation: (place >> GENERATION_SHIFT) as u16,
            block: place & BLOCK_MASK,
        })
    }

    pub fn encode(self) -> u64 {
        u64::from(self.generation) << GENERATION_SHIFT | self.block
    }
}

/// How the units of a pool are divided into groups.
#[derive(Clone, Copy)]
pub struct Groups {
    superblock: Superblock,
    shift: u32,
    groups_a_unit: u64,
    /// Keys of one generation: whole leaves, so that generations share none.
    keys_a_generation: u64,
}

impl Groups {
    pub fn of(superblock: &Superblock) -> Self {
        let blocks = superblock.unit_blocks;
        let shift = (blocks / GROUPS_A_UNIT_MIN).max(1).ilog2().min(GROUP_SHIFT_MAX);
        let groups_a_unit = u64::from(blocks.div_ceil(1 << shift));
        let keys = (groups_a_unit * u64::from(superblock.units())).next_multiple_of(256).max(256);
        Groups { superblock: *superblock, shift, groups_a_unit, keys_a_generation: keys }
    }

    /// Generations that a unit can have.
    pub fn generations(&self) -> u64 {
        (KEYS_MAX / self.keys_a_generation).min(GENERATION_MAX)
    }

    /// The key of the group that a block is in, and its number there. None: it is in no unit.
    pub fn key(&self, place: LogicalPlace) -> Option<(u64, u32)> {
        let unit = self.superblock.unit_of(place.block)?;
        let offset = place.block - self.superblock.unit_start(unit);
        let first = self.keys(place.generation, unit).start;
        let in_group = (1 << self.shift) - 1;
        Some((first + (offset >> self.shift), (offset & in_group) as u32))
    }

    /// Keys of all groups of a unit.
    pub fn keys(&self, generation: u16, unit: u32) -> std::ops::Range<u64> {
        let first =
            u64::from(generation) * self.keys_a_generation + u64::from(unit) * self.groups_a_unit;
        first..first + self.groups_a_unit
    }
}

/// Where the blocks of a group lie: an entry of the table of moved blocks, which is like a block of
/// the map. The version of the entry has a bit for each block that lives there, its place is that
/// of the first of them, its CRC32C is zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedGroup {
    pub blocks: u64,
    /// Block of the pool.
    pub place: u64,
}

impl MovedGroup {
    /// None: the group was never moved, or nothing of it is left.
    pub fn of(entry: &BlockAt) -> Option<Self> {
        (entry.place != 0).then_some(MovedGroup { blocks: entry.version, place: entry.place })
    }

    /// Where a block of the group lies; none of one that had died when the group moved, or where
    /// the entry is lost.
    pub fn place_of(&self, number: u32) -> Option<u64> {
        let bit = 1u64.checked_shl(number)?;
        let before = (self.blocks & (bit - 1)).count_ones();
        let lives = self.blocks & bit != 0 && self.place < LOST_PLACE;
        lives.then_some(self.place.wrapping_add(before.into()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quoin_types::PoolId;

    use super::*;
    use crate::format::node::BAD_PLACE;
    use crate::format::superblock::FormatOptions;

    fn superblock(unit_blocks: u32) -> Superblock {
        let options = FormatOptions { unit_blocks, ..FormatOptions::new(PoolId(1)) };
        Superblock::new(1 << 40, &options).expect("a fit pool")
    }

    #[test]
    fn marks_of_lost_blocks_and_holes_are_no_names_and_old_places_are_of_generation_zero() {
        for place in [0, BASE_PLACE, LOST_PLACE, BAD_PLACE] {
            assert_eq!(LogicalPlace::decode(place), None);
        }
        assert_eq!(LogicalPlace::decode(77), Some(LogicalPlace { generation: 0, block: 77 }));
        let last = LogicalPlace { generation: GENERATION_MAX as u16, block: BLOCK_MASK };
        assert!(last.encode() < BASE_PLACE);
        assert_eq!(LogicalPlace::decode(last.encode()), Some(last));
    }

    proptest! {
        #[test]
        fn no_two_blocks_have_the_same_key_and_number(
            unit_blocks in prop::sample::select(vec![16u32, 17, 32, 100, 512, 1024, 1 << 16]),
            pairs in prop::collection::vec((0u16..5, 0u32..50, any::<u32>()), 2..40),
        ) {
            let superblock = superblock(unit_blocks);
            let groups = Groups::of(&superblock);
            prop_assert!(groups.generations() > 1000);
            let mut seen = std::collections::BTreeMap::new();
            for (generation, unit, offset) in pairs {
                let offset = u64::from(offset % unit_blocks);
                let block = superblock.unit_start(unit) + offset;
                let place = LogicalPlace { generation, block };
                let (key, number) = groups.key(place).expect("it is in a unit");
                prop_assert!(number < 64 && groups.keys(generation, unit).contains(&key));
                prop_assert!(key < KEYS_MAX);
                let known = *seen.entry((key, number)).or_insert(place);
                prop_assert_eq!(known, place);
            }
        }

        #[test]
        fn the_place_of_a_block_is_its_rank_among_those_that_moved(blocks in any::<u64>()) {
            let group = MovedGroup { blocks, place: 1000 };
            let mut next = 1000;
            for number in 0..64 {
                let lives = blocks >> number & 1 == 1;
                prop_assert_eq!(group.place_of(number), lives.then_some(next));
                next += u64::from(lives);
            }
            prop_assert_eq!(group.place_of(64), None);
        }
    }

    #[test]
    fn what_a_lost_entry_names_is_nowhere() {
        let lost = MovedGroup::of(&BlockAt { version: 7, place: LOST_PLACE, crc: 0 });
        assert_eq!(lost.expect("it was moved").place_of(0), None);
    }
}
