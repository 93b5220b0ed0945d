//! The table of moved blocks of a replica: where blocks lie that clean-up moved.
//!
//! Leaves of the map keep naming the place where a block was written first
//! ([`crate::format::logical`]). While the segment there is the one that the name means, the block
//! is at home and nothing is looked up. Otherwise the table says where it lies: nodes like those of
//! the map, from groups of names to places. So a block that moves changes one entry of the table,
//! however many views show it. A block that moves again changes the same entry: a name is looked up
//! once, never in a chain.
//!
//! **Order.** Copies and nodes of the table are on media before a record names the new root, and
//! only then the former places are free. That is the rule of every commit.
//!
//! **When names are free.** An entry stands while its group has a block in the segment to which it
//! moved. It changes only when that segment is emptied, after each block was looked up in the views.
//! A unit in which names are taken gets another generation with its next segment. An entry that the
//! last record still has takes its names too: a start after a crash begins with that record.
//!
//! **Rot.** Blocks under a node that is lost are reported with the stretch of the map that names
//! them, and mended from a peer under new names. Their old names stay taken.

use std::ops::Range;

use quoin_replication::replica::store::StoreError;
use quoin_types::mutant;

use crate::background::kept_views::Breaks;
use crate::core::{Core, NodeBatch, NodeIo, Tree};
use crate::disk::Disk;
use crate::format::batch::Stream;
use crate::format::checkpoint::{MovedState, SegmentState};
use crate::format::logical::{Groups, LogicalPlace, MovedGroup};
use crate::format::node::{BAD_PLACE, BlockAt, Child, LEAF_BLOCKS, LOST_PLACE, Root};
use crate::format::superblock::Superblock;
use crate::map::tree::{self, Change, Edit, Part};
use crate::replica::{Replica, may_lack};
use crate::space::segments::Family;

/// The table as it is, and what records say of it.
#[derive(Default)]
pub struct MovedBlocks {
    pub root: Root,
    /// The root in the last record.
    recorded: Root,
    /// No segment was opened with a higher generation.
    generation: u16,
    /// Where views may show blocks that the views before them do not.
    pub breaks: Breaks,
}

impl MovedBlocks {
    pub fn restored(state: MovedState) -> Self {
        let MovedState { root, generation, breaks } = state;
        MovedBlocks { root, recorded: root, generation, breaks: Breaks::restored(breaks) }
    }

    /// A table without entries, of a replica of which no record tells where its history breaks.
    pub fn none(snapshots: impl Iterator<Item = u64>) -> Self {
        MovedBlocks { breaks: Breaks::unknown(snapshots), ..MovedBlocks::default() }
    }

    /// What a record says; none of a replica of which no block was ever moved.
    pub fn state(&self) -> Option<MovedState> {
        let MovedBlocks { root, generation, .. } = *self;
        let is_there = root.child != Child::EMPTY || generation > 0;
        let breaks = || self.breaks.lsns().to_vec();
        is_there.then(|| MovedState { root, generation, breaks: breaks() })
    }

    /// Whether every block is where it was written first.
    pub fn is_empty(&self) -> bool {
        self.root.child == Child::EMPTY
    }

    /// The record with this root is in the ring.
    pub fn recorded(&mut self, root: Root) {
        self.recorded = root;
    }

    /// The root in the last record.
    pub fn recorded_root(&self) -> Root {
        self.recorded
    }

    /// A segment was opened with this generation.
    pub fn opened(&mut self, generation: u16) {
        self.generation = self.generation.max(generation);
    }

    /// All segments of before are given up, and so are the names of their blocks.
    pub fn forget_all(&mut self) {
        self.root = Root::default();
        self.recorded = Root::default();
        self.breaks = Breaks::default();
    }
}

/// What was found last: names come in runs.
#[derive(Default)]
struct Last {
    /// Names in a unit that is their home.
    home: Range<u64>,
    entry: Option<(u64, MovedGroup)>,
}

impl Family {
    /// The name of a block that is written here first; marks of lost blocks stay what they are.
    pub fn logical(&self, superblock: &Superblock, block: u64) -> u64 {
        let unit = superblock.unit_of(block);
        let generation = unit.and_then(|unit| self.segments.generation_at(unit));
        LogicalPlace { generation: generation.unwrap_or(0), block }.encode()
    }

    /// The names of the unit that a block was written in first, if it was never moved.
    fn at_home(&self, superblock: &Superblock, place: LogicalPlace) -> Option<Range<u64>> {
        let unit = superblock.unit_of(place.block)?;
        let generation = self.segments.generation_at(unit)?;
        let is_home =
            generation == place.generation || mutant::is("moved-blocks-looked-for-at-home");
        let first = LogicalPlace { block: superblock.unit_start(unit), ..place }.encode();
        is_home.then_some(first..first + u64::from(superblock.unit_blocks))
    }

    /// The lowest generation of which no name in these units is taken.
    pub fn free_generation<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        batch: &mut NodeBatch,
        unit: u32,
        units: u32,
    ) -> Result<u16, StoreError> {
        let roots = [self.moved.root, self.moved.recorded];
        let highest = self.moved.generation;
        if roots.iter().all(|root| root.child == Child::EMPTY) || mutant::is("names-used-again") {
            return Ok(0);
        }
        let groups = Groups::of(&core.superblock);
        let mut io = NodeIo {
            core,
            family: self,
            batch,
            recount: None,
            kept_through: u64::MAX,
            gives_up: false,
            tree: Tree::Moved,
        };
        for generation in 0..=highest {
            let keys =
                groups.keys(generation, unit).start..groups.keys(generation, unit + units - 1).end;
            let mut is_free = true;
            for root in roots {
                is_free = is_free && io.are_free(root, keys.clone())?;
            }
            if is_free {
                return Ok(generation);
            }
        }
        // No segment had it, so no name has it, whatever can be read of the table.
        let next = u64::from(highest) + 1;
        if next >= groups.generations() { Err(StoreError::Full) } else { Ok(next as u16) }
    }
}

impl<D: Disk> NodeIo<'_, D> {
    /// Looks for the places of the blocks that these stretches have in a map, at most of so many
    /// leaves, and finds all that is lacking of them at once.
    pub fn look_ahead_of_places(
        &mut self,
        root: Root,
        stretches: impl Iterator<Item = (u64, u64)>,
        leaves_max: usize,
    ) -> Result<(), StoreError> {
        let (mut lacking, mut left) = (Ok(()), leaves_max);
        for (start, end) in stretches {
            let mut at = start;
            while at < end && left > 0 {
                let leaf_end = (at / LEAF_BLOCKS as u64 + 1) * LEAF_BLOCKS as u64;
                let mut blocks = [BlockAt::default(); LEAF_BLOCKS];
                let until = end.min(leaf_end);
                let looked = self.blocks(root, at, &mut blocks[..(until - at) as usize]);
                lacking = lacking.and(may_lack(looked)?);
                (at, left) = (until, left - 1);
            }
        }
        lacking
    }

    /// Replaces the names of blocks by the places where they lie.
    pub fn find_places(&mut self, blocks: &mut [BlockAt]) -> Result<(), StoreError> {
        let (mut last, mut lacking) = (Last::default(), Ok(()));
        for block in blocks.iter_mut().filter(|block| block.place != 0) {
            match self.physical_after(block.place, &mut last) {
                Ok(place) => block.place = place,
                Err(error @ StoreError::Pending(_)) => lacking = Err(error),
                Err(error) => return Err(error),
            }
        }
        lacking
    }

    /// Where a block lies that a leaf names so: [`BAD_PLACE`] where that is not known any more.
    pub fn physical(&mut self, place: u64) -> Result<u64, StoreError> {
        self.physical_after(place, &mut Last::default())
    }

    fn physical_after(&mut self, place: u64, last: &mut Last) -> Result<u64, StoreError> {
        let Some(logical) = LogicalPlace::decode(place) else { return Ok(place) };
        if last.home.contains(&place) {
            return Ok(logical.block);
        }
        if let Some(home) = self.family.at_home(&self.core.superblock, logical) {
            last.home = home;
            return Ok(logical.block);
        }
        let groups = Groups::of(&self.core.superblock);
        let Some((key, number)) = groups.key(logical) else { return Ok(BAD_PLACE) };
        let known = last.entry.filter(|(known, _)| *known == key).map(|(_, group)| group);
        let group = match known {
            Some(group) => Some(group),
            None => self.group(key)?,
        };
        last.entry = group.map(|group| (key, group));
        let block = group.and_then(|group| group.place_of(number));
        let superblock = &self.core.superblock;
        Ok(block.filter(|block| superblock.unit_of(*block).is_some()).unwrap_or(BAD_PLACE))
    }

    /// The entry of a group in the table as it is.
    pub fn group(&mut self, key: u64) -> Result<Option<MovedGroup>, StoreError> {
        let (root, mut entry) = (self.family.moved.root, [BlockAt::default()]);
        tree::blocks(self, root, key, &mut entry)?;
        Ok(MovedGroup::of(&entry[0]))
    }

    /// Whether a table has none of these keys. Those of which it cannot be read count as there.
    fn are_free(&mut self, root: Root, keys: Range<u64>) -> Result<bool, StoreError> {
        self.none_of(root, keys, |entry| entry.place != 0)
    }

    fn none_of(
        &mut self,
        root: Root,
        keys: Range<u64>,
        is_one: impl Fn(&BlockAt) -> bool,
    ) -> Result<bool, StoreError> {
        let mut at = keys.start;
        while at < keys.end {
            let mut entries = [BlockAt::default(); LEAF_BLOCKS];
            let count = (keys.end - at).min(LEAF_BLOCKS as u64) as usize;
            tree::blocks(self, root, at, &mut entries[..count])?;
            if entries[..count].iter().any(&is_one) {
                return Ok(false);
            }
            at += count as u64;
        }
        Ok(true)
    }
}

impl Replica {
    pub fn moved_io<'a, D: Disk>(&'a mut self, core: &'a mut Core<D>) -> NodeIo<'a, D> {
        NodeIo { tree: Tree::Moved, ..self.io(core) }
    }

    /// Notes where groups lie from now on; none of a group of which nothing is left. They come in
    /// the order of their keys.
    pub fn note_moved<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        groups: impl Iterator<Item = (u64, Option<MovedGroup>)>,
    ) -> Result<(), StoreError> {
        let edits: Vec<Edit> = groups
            .map(|(lba, group)| Edit {
                lba,
                blocks: 1,
                change: match group {
                    Some(MovedGroup { blocks, place }) => {
                        Change::Data { version: blocks, place, crc_at: 0 }
                    }
                    None => Change::Hole { version: 0 },
                },
            })
            .collect();
        if edits.is_empty() {
            return Ok(());
        }
        core.begin_moved_blocks()?;
        let root = self.family.moved.root;
        self.family.moved.root = tree::update(&mut self.moved_io(core), root, &edits, &[0], None)?;
        self.share_moved(core)
    }

    /// The entry of a group. Rot does not pass: an entry under a bad node is lost from here on, and
    /// takes the names of its group still. A node that cannot be read is an error.
    pub fn group_or_lost<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        key: u64,
    ) -> Result<Option<MovedGroup>, StoreError> {
        let group = self.io(core).group(key)?;
        if group.is_none_or(|group| group.place != BAD_PLACE) {
            return Ok(group);
        }
        let change = Change::Renew { node: u64::MAX };
        self.renew_moved(core, &[Edit { lba: key, blocks: 1, change }])?;
        self.maintenance.dirty = true;
        self.io(core).group(key)
    }

    /// Writes nodes of the table anew, where they lie at the places that the edits name.
    pub fn renew_moved<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        nodes: &[Edit],
    ) -> Result<(), StoreError> {
        let root = self.family.moved.root;
        self.family.moved.root = tree::update(&mut self.moved_io(core), root, nodes, &[], None)?;
        self.share_moved(core)
    }

    /// Whether blocks were moved out of this segment. All of them are noted in the step that gives
    /// it up, so it is no more than the stale header of a free unit then.
    pub fn was_emptied<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        segment: &SegmentState,
    ) -> Result<bool, StoreError> {
        let (groups, root) = (Groups::of(&core.superblock), self.family.moved.root);
        if segment.stream == Stream::Nodes {
            return Ok(false);
        }
        let is_known = |entry: &BlockAt| entry.place != 0 && entry.place < LOST_PLACE;
        for unit in segment.unit..segment.unit + segment.units {
            let keys = groups.keys(segment.generation, unit);
            if !self.moved_io(core).none_of(root, keys, is_known)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The next leaf of the table from this key on.
    pub fn next_of_moved<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        from: u64,
    ) -> Result<Option<Part>, StoreError> {
        let root = self.family.moved.root;
        tree::next_part(&mut self.moved_io(core), root, 0, from)
    }
}

#[cfg(test)]
mod tests;
