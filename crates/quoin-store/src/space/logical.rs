//! Logical places: names of blocks that stay while clean-up moves them.
//!
//! A segment of data gets a **logical number** when it is opened, never twice in the life of a
//! replica, and each of its blocks a logical place: the number of its unit and the block in it.
//! Leaves name blocks so. A block lies where it was written until its segment is emptied. From then
//! on a map of the replica, from logical blocks to places of the pool, says where it is. So clean-up
//! changes a few nodes of that map for a whole segment, and no leaf, view, snapshot or base,
//! however many of them show the block.
//!
//! **Order.** What was moved is noted in memory, and merged into the map with the next commit, that of
//! several segments together. Where there is no room for nodes it stands in the record. The map's root stands in the checkpoint. A segment is free only after
//! the record that has the root of the map without it, as ever. So after a crash its blocks are
//! where they were, and the copies of an emptying that ended half-way are nobody's.
//!
//! **Who names what.** Blocks of the log get their logical places when they are folded, and blocks that
//! clean-up finds under a place of the pool when it moves them. Those are blocks that a rebuild fed:
//! they have places of the pool, since a flip gives up the map of the state before it.
//!
//! **Counters.** Which segment holds a moved block is known by stretches of logical blocks, kept in
//! memory: what clean-up moves keeps its order, so a segment's blocks are in few of them. They only
//! say whose counter goes down. After a start they are learned by a walk of the map beside all else,
//! and a count follows.

use std::collections::BTreeMap;

use quoin_replication::replica::store::StoreError;
use quoin_types::mutant;

use crate::core::{Core, NodeIo, Tree};
use crate::disk::Disk;
use crate::format::checkpoint::{LogicalState, MovedState, SegmentState};
use crate::format::node::{BAD_PLACE, BlockAt, LEAF_BLOCKS, LOST_PLACE, Node, Root};
use crate::format::superblock::Superblock;
use crate::map::tree::{self, Change, Edit, Nodes, Part};
use crate::replica::{Replica, may_lack};
use crate::space::segments::Family;

/// Bit of a place that is a logical one.
const LOGICAL: u64 = 1 << 62;
/// The map takes no greater blocks.
const BLOCKS_MAX: u64 = 1 << 50;
/// Moved blocks that wait in memory to be merged into the map. Where there is no room for its nodes
/// more wait, a few times as many.
const PENDING_MAX: usize = 4096;
const PENDING_HARD_MAX: usize = 4 * PENDING_MAX;
/// Numbers that may be given between two records: an open begins so many behind what the last one says.
const NUMBERS_AHEAD: u32 = 1 << 14;
/// Version of entries in the map of moved blocks, which has none.
const NAMED: u64 = 1;

/// Returns true for a logical place.
pub fn is_logical(place: u64) -> bool {
    place >> 62 == 1
}

/// The logical block of a logical place.
pub fn block_of(place: u64) -> u64 {
    place & !LOGICAL
}

/// Blocks that clean-up moved to one segment: where they end, and its first unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    pub start: u64,
    pub end: u64,
    pub unit: u32,
}

/// The logical places of one replica.
#[derive(Default)]
pub struct Logical {
    unit_blocks: u64,
    /// The first number that was not given yet.
    next: u32,
    /// What the last record says of that for sure, what the record says that may be on media, and the
    /// one that is on its way.
    durable_next: u32,
    recorded_next: u32,
    stated_next: u32,
    /// First unit and units, by logical number, of segments that hold their blocks where they were
    /// written.
    segments: BTreeMap<u32, (u32, u32)>,
    /// End and first unit of what is known of the others, by the first block.
    moved: BTreeMap<u64, (u64, u32)>,
    /// The map of moved blocks.
    pub root: Root,
    /// Blocks that the map lacks: place and checksum by logical block; place 0: a dead one.
    pending: BTreeMap<u64, (u64, u32)>,
    /// All of the map is in `moved`.
    is_learned: bool,
}

impl Logical {
    pub fn new(superblock: &Superblock, state: Option<&LogicalState>) -> Self {
        let root = state.map_or_else(Root::default, |state| state.root);
        let moved = state.map_or(&[][..], |state| &state.moved);
        Logical {
            pending: moved.iter().map(|m| (m.block, (m.place, m.crc))).collect(),
            unit_blocks: superblock.unit_blocks.into(),
            next: state.map_or(1, |state| state.next.max(1)),
            durable_next: state.map_or(1, |state| state.next.max(1)),
            recorded_next: 1,
            stated_next: 1,
            root,
            is_learned: root == Root::default() && moved.is_empty(),
            ..Logical::default()
        }
    }

    /// Logical places as an open finds them. Numbers that were given after the last record may be those
    /// of segments whose headers are on the disk still: none of them is given again.
    pub fn opened(superblock: &Superblock, state: Option<&LogicalState>) -> Self {
        let mut logical = Logical::new(superblock, state);
        logical.next = logical.next.saturating_add(NUMBERS_AHEAD);
        logical.durable_next = logical.next;
        logical
    }

    /// A record is on its way that says which numbers were given.
    pub fn stated(&mut self) {
        self.stated_next = self.next;
    }

    /// That record is in the ring, and the one before is on media.
    pub fn recorded(&mut self) {
        self.durable_next = self.durable_next.max(self.recorded_next);
        self.recorded_next = self.stated_next;
    }

    /// Whether some number of a segment is that of another one that is known.
    pub fn is_taken(&self, state: &SegmentState) -> bool {
        let end = state.logical.saturating_add(state.units);
        let before = self.segments.range(..end).next_back();
        let reaches = |(first, (_, units)): (&u32, &(u32, u32))| first + units > state.logical;
        state.logical != 0 && before.is_some_and(reaches)
    }

    pub fn state(&self) -> Option<LogicalState> {
        let of = |(block, (place, crc)): (&u64, &(u64, u32))| MovedState {
            block: *block,
            place: *place,
            crc: *crc,
        };
        (self.next > 1).then(|| LogicalState {
            root: self.root,
            next: self.next,
            moved: self.pending.iter().map(of).collect(),
        })
    }

    /// A number for a segment of so many units; 0: there are no more, or none before the next record.
    pub fn number(&mut self, units: u32) -> u32 {
        let first = self.next;
        if first.saturating_add(units) > self.durable_next.saturating_add(NUMBERS_AHEAD) {
            return 0;
        }
        let end = first.checked_add(units).filter(|end| *end < u32::MAX);
        let end = end.filter(|end| u64::from(*end) * self.unit_blocks <= BLOCKS_MAX);
        let Some(end) = end.filter(|_| self.unit_blocks > 0) else { return 0 };
        self.next = end;
        first
    }

    /// A segment holds its blocks where they were written.
    pub fn insert(&mut self, state: &SegmentState) {
        if state.logical != 0 {
            self.segments.insert(state.logical, (state.unit, state.units));
            self.next = self.next.max(state.logical.saturating_add(state.units));
        }
    }

    /// A segment is given up.
    pub fn remove(&mut self, state: &SegmentState) {
        if self.is_in(state.logical, state.unit) {
            self.segments.remove(&state.logical);
        }
    }

    /// Returns true if the blocks of this number lie where they were written, in the segment of this
    /// unit.
    fn is_in(&self, number: u32, unit: u32) -> bool {
        number != 0 && self.segments.get(&number).is_some_and(|(at, _)| *at == unit)
    }

    /// The logical place of a block of a segment, counted from the segment's start.
    pub fn place(&self, state: &SegmentState, block: u64) -> Option<u64> {
        let first = u64::from(state.logical) * self.unit_blocks;
        (state.logical != 0).then_some(LOGICAL | (first + block))
    }

    /// The segment that a block was written to, if it lies there still: its first unit, and the block
    /// counted from its start.
    fn written_in(&self, block: u64) -> Option<(u32, u64)> {
        let number = u32::try_from(block.checked_div(self.unit_blocks)?).ok()?;
        let (first, (unit, units)) = self.segments.range(..=number).next_back()?;
        (number - first < *units).then(|| (*unit, block - u64::from(*first) * self.unit_blocks))
    }

    /// The place of the pool of a logical block that lies where it was written.
    fn in_place(&self, superblock: &Superblock, block: u64) -> Option<u64> {
        let (unit, offset) = self.written_in(block)?;
        Some(superblock.unit_start(unit) + offset)
    }

    /// The stretch of moved blocks that a block is in.
    fn stretch_of(&self, block: u64) -> Option<Stretch> {
        let (start, (end, unit)) = self.moved.range(..=block).next_back()?;
        (block < *end).then_some(Stretch { start: *start, end: *end, unit: *unit })
    }

    /// The segment that holds what a place names, by its first unit, and the block of the pool where
    /// that is known without a look at the map.
    pub fn holder(&self, superblock: &Superblock, place: u64) -> Option<(u32, Option<u64>)> {
        let block = block_of(place);
        if let Some((unit, offset)) = self.written_in(block) {
            return Some((unit, Some(superblock.unit_start(unit) + offset)));
        }
        self.stretch_of(block).map(|stretch| (stretch.unit, None))
    }

    /// A segment was emptied: these of its blocks were moved, and `had` names all that it held.
    fn emptied(&mut self, unit: u32, had: impl Iterator<Item = u64>, moved: &[Stretch]) {
        for block in had {
            if let Some(stretch) = self.stretch_of(block).filter(|stretch| stretch.unit == unit) {
                self.moved.remove(&stretch.start);
            }
        }
        for stretch in moved {
            self.moved.insert(stretch.start, (stretch.end, stretch.unit));
        }
    }

    /// Blocks with these logical places were copied and stay where they are.
    pub fn forget_copies(&mut self, places: std::ops::Range<u64>) {
        let blocks = block_of(places.start)..block_of(places.end);
        self.pending.extract_if(blocks, |_, _| true).for_each(drop);
    }

    /// Forgets all names but those of what these segments hold.
    pub fn begin_anew(&mut self, segments: impl Iterator<Item = SegmentState>) {
        self.segments = segments
            .filter(|state| state.logical != 0)
            .map(|state| (state.logical, (state.unit, state.units)))
            .collect();
        self.moved.clear();
        self.pending.clear();
        (self.root, self.is_learned) = (Root::default(), true);
    }

    pub fn is_learned(&self) -> bool {
        self.is_learned
    }
}

/// Blocks that are being moved, in the order of their logical blocks.
#[derive(Default)]
pub struct Moves(Vec<(Stretch, Option<u64>)>);

impl Moves {
    /// Notes that a block was moved to the segment of this unit. `origin`: what it was in before.
    fn push(&mut self, block: u64, unit: u32, origin: Option<u64>) {
        match self.0.last_mut() {
            Some((last, of)) if last.unit == unit && *of == origin && last.end <= block => {
                last.end = block + 1;
            }
            _ => self.0.push((Stretch { start: block, end: block + 1, unit }, origin)),
        }
    }
}

/// Replaces the logical places of a replica's blocks by places of the pool.
pub fn resolve<D: Disk>(
    io: &mut NodeIo<'_, D>,
    replica: quoin_types::ReplicaGuid,
    found: &mut [BlockAt],
) -> Result<(), StoreError> {
    let (mut at, mut lacking) = (0, Ok(()));
    while at < found.len() {
        let first = found[at].place;
        if !is_logical(first) {
            at += 1;
            continue;
        }
        let run = found[at..].iter().zip(first..).take_while(|(b, place)| b.place == *place);
        let run = run.count().min(LEAF_BLOCKS);
        let blocks = &mut found[at..at + run];
        at += run;
        lacking = lacking.and(may_lack(resolve_run(io, replica, blocks))?);
    }
    lacking
}

fn resolve_run<D: Disk>(
    io: &mut NodeIo<'_, D>,
    replica: quoin_types::ReplicaGuid,
    found: &mut [BlockAt],
) -> Result<(), StoreError> {
    let first = block_of(found[0].place);
    let logical = io.core.logical.get(&replica);
    let in_place = |block| logical?.in_place(&io.core.superblock, block);
    let pending = |block| logical?.pending.get(&block).map(|(place, _)| *place);
    let mut moved = Vec::new();
    for (i, block) in found.iter_mut().enumerate() {
        let number = first + i as u64;
        match in_place(number).or_else(|| pending(number)) {
            Some(0) => block.place = BAD_PLACE,
            Some(place) => block.place = place,
            None => moved.push(i),
        }
    }
    let Some((from, to)) = moved.first().zip(moved.last()) else { return Ok(()) };
    let root = logical.map_or_else(Root::default, |logical| logical.root);
    let mut places = vec![BlockAt::default(); to - from + 1];
    let looked = tree::blocks(io, root, first + *from as u64, &mut places);
    for i in &moved {
        found[*i].place = match places[i - from].place {
            // A block that is named and cannot be found is no hole.
            0 => BAD_PLACE,
            place => place,
        };
    }
    looked
}

impl Family {
    /// The segment that a place names a block of, by its first unit; and the block of the pool, where
    /// that is known without a look at the map.
    pub fn holder_of<D>(&self, core: &Core<D>, place: u64) -> Option<(u32, Option<u64>)> {
        if is_logical(place) {
            return core.logical.get(&self.guid)?.holder(&core.superblock, place);
        }
        let unit = self.segments.containing(core.superblock.unit_of(place)?)?;
        Some((unit, Some(place)))
    }

    /// The place by which leaves name a block that lies here.
    pub fn named<D>(&self, core: &Core<D>, place: u64) -> u64 {
        let named = || {
            let unit = self.segments.containing(core.superblock.unit_of(place)?)?;
            let state = self.segments.state_of(unit)?;
            let offset = place - core.superblock.unit_start(unit);
            core.logical.get(&self.guid)?.place(&state, offset)
        };
        match mutant::is("folded-under-places-of-the-pool") {
            true => place,
            false => named().unwrap_or(place),
        }
    }
}

fn logical_io<'a, D: Disk>(replica: &'a mut Replica, core: &'a mut Core<D>) -> NodeIo<'a, D> {
    NodeIo { tree: Tree::Logical, ..replica.io(core) }
}

/// Compares blocks of the segment of this unit, each the place by which leaves name it and where it
/// lies, with what the names stand for: an emptying that ended half-way left copies.
pub fn stand_for_their_names<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    unit: u32,
    blocks: impl Iterator<Item = (u64, u64)>,
) -> Result<Vec<bool>, StoreError> {
    let guid = replica.family.guid;
    let root = core.logical_of(guid).root;
    let (mut stand, mut lacking) = (Vec::new(), Ok(()));
    for (name, at) in blocks {
        if !is_logical(name) {
            stand.push(true);
            continue;
        }
        let number = block_of(name);
        let logical = core.logical_of(guid);
        if let Some((written_in, _)) = logical.written_in(number) {
            stand.push(written_in == unit);
            continue;
        }
        if let Some((place, _)) = logical.pending.get(&number) {
            stand.push(*place == at);
            continue;
        }
        let mut found = [BlockAt::default()];
        let looked = tree::blocks(&mut logical_io(replica, core), root, number, &mut found);
        lacking = lacking.and(may_lack(looked)?);
        // A name stands for one content: with the map lost, a good copy is as good as any.
        let is_lost = matches!(found[0].place, BAD_PLACE | LOST_PLACE);
        stand.push(is_lost || found[0].place == at);
    }
    lacking.map(|()| stand)
}

/// Looks at the nodes that a move of these blocks reads.
pub fn look_ahead_of_names<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    places: impl Iterator<Item = u64>,
) -> Result<(), StoreError> {
    let root = core.logical_of(replica.family.guid).root;
    let named = places.filter(|place| is_logical(*place)).map(block_of);
    let stretches = named.map(|block| (block, block + 1));
    tree::look_ahead(&mut logical_io(replica, core), root, stretches, LEAF_BLOCKS)
}

/// Looks at the nodes that a walk of the map of moved blocks from this block on reads in one step.
pub fn look_ahead_of_walk<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: u64,
    reads_leaves: bool,
) -> Result<(), StoreError> {
    let (root, step_nodes) = (core.logical_of(replica.family.guid).root, core.options.step_nodes);
    let io = &mut logical_io(replica, core);
    tree::look_ahead_of_walk(io, root, 0, from, step_nodes, reads_leaves)
}

/// Looks at the nodes that a merge reads which naming so many more moved blocks brings about.
pub fn look_ahead_of_naming<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    blocks: usize,
) -> Result<(), StoreError> {
    // Of those that are moved and of those that are found dead.
    let pending = core.logical_of(replica.family.guid).pending.len() + blocks;
    if pending > PENDING_MAX { look_ahead_of_merge(replica, core) } else { Ok(()) }
}

/// Looks at the nodes that the next merge of what was moved reads.
pub fn look_ahead_of_merge<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
) -> Result<(), StoreError> {
    let logical = core.logical_of(replica.family.guid);
    let (root, blocks): (Root, Vec<u64>) =
        (logical.root, logical.pending.keys().copied().collect());
    let nodes_max = nodes_a_merge(core);
    let stretches = blocks.into_iter().map(|block| (block, block + 1));
    tree::look_ahead(&mut logical_io(replica, core), root, stretches, nodes_max)
}

/// Looks at the nodes that writing these anew reads.
pub fn look_ahead_of_renewals<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    nodes: &[Edit],
) -> Result<(), StoreError> {
    let root = core.logical_of(replica.family.guid).root;
    tree::look_ahead_of_renewals(&mut logical_io(replica, core), root, nodes)
}

/// Nodes that one merge of moved blocks looks at: a step of clean-up may have moved some of each.
fn nodes_a_merge<D>(core: &Core<D>) -> usize {
    4 * core.options.step_nodes.max(1)
}

/// Has logical places stand for blocks that were moved to a place of the pool, with this checksum;
/// place 0: the block is dead.
pub fn name_moved<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    moved: impl Iterator<Item = (u64, u64, u32)>,
) -> Result<(), StoreError> {
    let logical = core.logical_of(replica.family.guid);
    logical.pending.extend(moved.map(|(name, place, crc)| (block_of(name), (place, crc))));
    let pending = logical.pending.len();
    match pending {
        0..=PENDING_MAX => Ok(()),
        PENDING_HARD_MAX.. => merge_some(replica, core, usize::MAX).map(drop),
        _ => merge_moved(replica, core).map(drop),
    }
}

/// Merges some of what was moved into the map, if there is room for its nodes: else the record has
/// it. Returns true if all that can be is merged.
pub fn merge_moved<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<bool, StoreError> {
    let nodes_max = nodes_a_merge(core);
    match merge_some(replica, core, nodes_max) {
        Err(StoreError::Full) => {
            // Nodes on the way to what is dropped were counted.
            replica.maintenance.count.begin_anew();
            Ok(true)
        }
        merged => merged,
    }
}

/// Merges what was moved, and stops after about so many nodes; true: all of it was.
fn merge_some<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    nodes_max: usize,
) -> Result<bool, StoreError> {
    let logical = core.logical_of(replica.family.guid);
    if logical.pending.is_empty() || mutant::is("names-not-merged-with-a-commit") {
        return Ok(true);
    }
    let (mut edits, mut crcs) = (Vec::new(), Vec::new());
    for (block, (place, crc)) in &logical.pending {
        let change = match *place {
            0 => Change::Hole { version: 0 },
            place => Change::Data { version: NAMED, place, crc_at: crcs.len() as u32 },
        };
        edits.push(Edit { lba: *block, blocks: 1, change });
        crcs.extend((*place != 0).then_some(*crc));
    }
    let stopped = update_some(replica, core, &edits, &crcs, nodes_max)?;
    let logical = core.logical_of(replica.family.guid);
    logical.pending = stopped.map_or_else(BTreeMap::new, |at| logical.pending.split_off(&at));
    Ok(stopped.is_none())
}

/// Changes the map of moved blocks.
pub fn update_logical<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    edits: &[Edit],
    crcs: &[u32],
) -> Result<(), StoreError> {
    update_some(replica, core, edits, crcs, usize::MAX).map(drop)
}

/// Changes the map of moved blocks, and stops after about so many nodes. Returns the block from
/// which on nothing was changed then.
fn update_some<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    edits: &[Edit],
    crcs: &[u32],
    nodes_max: usize,
) -> Result<Option<u64>, StoreError> {
    let guid = replica.family.guid;
    let root = core.logical_of(guid).root;
    let mut io = logical_io(replica, core);
    let (root, stopped) = tree::update_some(&mut io, root, edits, crcs, None, nodes_max)?;
    io.core.logical_of(guid).root = root;
    if io.core.bases.of(guid).next().is_some() {
        // Clones read nodes from the disk: they know nothing of what waits here to be written.
        io.flush()?;
    }
    Ok(stopped)
}

/// Whether some block of a segment's number is another's, or was moved: what the number stands for
/// is known then.
pub fn is_known<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    state: &SegmentState,
) -> Result<bool, StoreError> {
    let logical = core.logical_of(replica.family.guid);
    let first = u64::from(state.logical) * logical.unit_blocks;
    let blocks = u64::from(state.units) * logical.unit_blocks;
    if state.logical == 0 || logical.is_taken(state) {
        return Ok(state.logical != 0);
    }
    let is_pending = logical.pending.range(first..first + blocks).next().is_some();
    let (root, mut moved) = (logical.root, vec![BlockAt::default(); blocks as usize]);
    tree::blocks(&mut logical_io(replica, core), root, first, &mut moved)?;
    let is_there = |block: &BlockAt| !matches!(block.place, 0 | BAD_PLACE | LOST_PLACE);
    Ok(is_pending || moved.iter().any(is_there))
}

/// Notes a moved block: by what it was in before, in the segment of this unit.
pub fn note_move<D: Disk>(
    replica: &Replica,
    core: &Core<D>,
    moves: &mut Moves,
    place: u64,
    unit: u32,
) {
    let Some(logical) = core.logical.get(&replica.family.guid) else { return };
    let block = block_of(place);
    let origin = match logical.written_in(block) {
        Some((_, offset)) => Some(block - offset),
        None => logical.stretch_of(block).map(|stretch| stretch.start),
    };
    // Blocks of one unit are taken for one stretch before that is known.
    let origin = origin.or(block.checked_div(logical.unit_blocks).map(|unit| !unit));
    moves.push(block, unit, origin);
}

/// A segment was emptied, of which the blocks had these names.
pub fn emptied<D: Disk>(
    replica: &Replica,
    core: &mut Core<D>,
    state: &SegmentState,
    names: impl Iterator<Item = u64>,
    moves: &Moves,
) {
    let logical = core.logical_of(replica.family.guid);
    logical.remove(state);
    let moved: Vec<Stretch> = moves.0.iter().map(|(stretch, _)| *stretch).collect();
    let names = names.filter(|place| is_logical(*place)).map(block_of);
    logical.emptied(state.unit, names, &moved);
}

/// The next leaf of the map of moved blocks from this one on.
pub fn next_of_logical<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: u64,
) -> Result<Option<Part>, StoreError> {
    let logical = core.logical_of(replica.family.guid);
    let (root, end) = (logical.root, u64::from(logical.next) * logical.unit_blocks);
    let part = tree::next_part(&mut logical_io(replica, core), root, 0, from)?;
    // Nothing is behind the last number, and a walk of what is made up need not end.
    Ok(part.filter(|part| part.range().0 < end))
}

/// Learns which segments hold the moved blocks of the next leaf from this block on. `None`: there
/// is none.
pub fn learn_moved<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: u64,
) -> Result<Option<u64>, StoreError> {
    let Some(part) = next_of_logical(replica, core, from)? else {
        core.logical_of(replica.family.guid).is_learned = true;
        return Ok(None);
    };
    let (start, end) = part.range();
    let Part::Leaf { node, .. } = part else { return Ok(Some(end)) };
    let loaded = logical_io(replica, core).load(0, &node)?;
    let Some(Node::Leaf(leaf)) = loaded.as_deref() else { return Ok(Some(end)) };
    let units = leaf
        .blocks
        .iter()
        .map(|block| replica.family.segments.containing(core.superblock.unit_of(block.place)?));
    let units: Vec<Option<u32>> = units.collect();
    let logical = core.logical_of(replica.family.guid);
    for (block, unit) in (start..).zip(units) {
        let Some(unit) = unit else { continue };
        if logical.stretch_of(block).is_some() || logical.written_in(block).is_some() {
            continue;
        }
        match logical.moved.range_mut(..block).next_back() {
            Some((_, (end, of))) if *of == unit && (*end..=*end + 256).contains(&block) => {
                *end = block + 1;
            }
            _ => drop(logical.moved.insert(block, (block + 1, unit))),
        }
    }
    Ok(Some(end))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
    use quoin_types::message::{Content, ReadView};
    use quoin_types::{Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position};

    use super::*;
    use crate::format::batch::Stream;
    use crate::{Disk, Due, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

    fn superblock() -> Superblock {
        let format = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(1)) };
        Superblock::new(64 << 20, &format).expect("a fit disk")
    }

    fn state(unit: u32, units: u32, logical: u32) -> SegmentState {
        SegmentState {
            unit,
            units,
            stream: Stream::Log,
            sequence: 1,
            used_blocks: 1,
            live_bytes: 0,
            last_lsn: 0,
            last_index: 0,
            logical,
        }
    }

    #[test]
    fn a_number_is_given_once_and_a_block_is_found_where_its_segment_lies() {
        let superblock = superblock();
        let mut logical = Logical::new(&superblock, None);
        assert_eq!((logical.state(), logical.number(1), logical.number(8)), (None, 1, 2));
        assert_eq!(logical.number(1), 10);
        logical.insert(&state(5, 1, 1));
        logical.insert(&state(16, 8, 2));
        let place = logical.place(&state(16, 8, 2), 40).expect("it has a number");
        assert!(is_logical(place) && place < LOST_PLACE);
        let at = superblock.unit_start(16) + 40;
        assert_eq!(logical.holder(&superblock, place), Some((16, Some(at))));
        // Another segment lies in its units by now, under a number of its own.
        logical.remove(&state(16, 8, 2));
        logical.insert(&state(16, 8, 10));
        assert_eq!(logical.holder(&superblock, place), None);
        let known = logical.state().expect("numbers were given");
        assert_eq!(Logical::new(&superblock, Some(&known)).number(1), 18);
    }

    #[test]
    fn an_open_gives_no_number_that_was_given_since_the_last_record() {
        let superblock = superblock();
        let mut logical = Logical::new(&superblock, None);
        logical.number(1);
        let recorded = logical.state().expect("numbers were given");
        let given: Vec<u32> = std::iter::from_fn(|| Some(logical.number(8)))
            .take_while(|number| *number != 0)
            .collect();
        let last = given.last().expect("some") + 8;
        assert!(last <= recorded.next + NUMBERS_AHEAD, "no more before the next record");
        let mut opened = Logical::opened(&superblock, Some(&recorded));
        assert!(opened.number(1) >= last);
        // With records on media there are more.
        for _ in 0..2 {
            logical.stated();
            logical.recorded();
        }
        assert!(logical.number(8) >= last);
    }

    #[test]
    fn a_number_is_taken_if_a_part_of_it_is() {
        let mut logical = Logical::new(&superblock(), None);
        logical.insert(&state(16, 8, 2));
        let taken = [(1, 1), (1, 2), (2, 1), (9, 1), (10, 1), (9, 8), (0, 1)]
            .map(|(number, units)| logical.is_taken(&state(40, units, number)));
        assert_eq!(taken, [false, true, true, true, false, true, false]);
    }

    #[test]
    fn there_are_no_numbers_behind_the_last_one() {
        let superblock = superblock();
        let last = LogicalState { next: u32::MAX - 9, ..LogicalState::default() };
        let mut logical = Logical::new(&superblock, Some(&last));
        assert_eq!([logical.number(8), logical.number(8)], [u32::MAX - 9, 0]);
        assert_eq!(logical.place(&state(1, 1, 0), 3), None);
        let format = FormatOptions { unit_blocks: 1 << 16, ..FormatOptions::new(PoolId(1)) };
        let superblock = Superblock::new(64 << 30, &format).expect("a fit disk");
        assert!(Logical::new(&superblock, Some(&last)).number(1) > 0);
    }

    #[test]
    fn blocks_moved_on_are_counted_where_they_went_and_no_others() {
        let superblock = superblock();
        let mut logical = Logical::new(&superblock, None);
        let stretch = |start, end, unit| Stretch { start, end, unit };
        logical.emptied(1, 0..32, &[stretch(32, 40, 7), stretch(44, 60, 8)]);
        logical.emptied(2, 0..32, &[stretch(64, 96, 7)]);
        let unit = |logical: &Logical, block| {
            logical.holder(&superblock, LOGICAL | block).map(|(unit, _)| unit)
        };
        assert_eq!([31, 35, 42, 59, 80].map(|b| unit(&logical, b)), {
            [None, Some(7), None, Some(8), Some(7)]
        });
        // Blocks of unit 7 go on to 9; one half of the second stretch died.
        logical.emptied(7, (32..40).chain(64..96), &[stretch(33, 40, 9), stretch(64, 80, 9)]);
        assert_eq!([32, 35, 59, 70, 90].map(|b| unit(&logical, b)), {
            [None, Some(9), Some(8), Some(9), None]
        });
    }

    /// A commit may need no unit: it is what makes some free.
    #[test]
    fn a_commit_without_room_for_nodes_has_what_was_moved_in_its_record() {
        const BLOCKS: u64 = 400;
        let disk = MemoryDisk::new(8 << 20);
        let format = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(1)) };
        Pool::format(&disk, &format).expect("a fit disk");
        let options = PoolOptions { log_keep_bytes: 0, ..PoolOptions::default() };
        let mut pool = Pool::open(disk.clone(), options).expect("a fresh pool");
        pool.create(ReplicaIdentity::default(), ReplicaMeta::default(), BLOCKS).expect("room");
        let guid = ReplicaIdentity::default().guid;
        let (mut chain, mut last) = (Chain(0), vec![0; BLOCKS as usize]);
        for lsn in 1..1000 {
            let lba = lsn * 7 % BLOCKS;
            let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
            let data = Bytes::from(vec![lsn as u8; 4096]);
            let entry = Entry::after(chain, position, EntryKind::Write, lba, 1, data, false);
            (chain, last[lba as usize]) = (entry.chain, lsn);
            let mut replica = pool.replica(guid).expect("it");
            replica.append(&[Arc::new(entry)]).expect("room");
            replica.set_stable(Lsn(lsn));
            if lsn % 50 == 0 {
                pool.settle().expect("folded");
                while pool.background_due() > Due::Relaxed {
                    pool.background(1).expect("background work");
                    pool.settle().expect("recorded");
                }
            }
        }
        pool.settle().expect("folded");
        let state = |pool: &Pool<MemoryDisk>| {
            let logical = pool.core.logical.get(&guid).expect("its places");
            logical.state().expect("numbers were given")
        };
        let emptied = |pool: &Pool<MemoryDisk>| pool.replicas[&guid].maintenance.pending_units();
        // Most of the room is gone, so that segments are emptied.
        let take = |pool: &mut Pool<MemoryDisk>, left: u32| {
            let mut taken = Vec::new();
            while pool.core.allocator.free_units() > left {
                taken.extend(pool.core.allocator.allocate(false).map(|(unit, ..)| unit));
            }
            taken
        };
        let mut taken = take(&mut pool, 8);
        pool.touch_all();
        for _ in 0..1000 {
            if emptied(&pool) > 0 && !state(&pool).moved.is_empty() {
                break;
            }
            pool.background(1).expect("background work");
            if let Some(ticket) = pool.sync_wanted() {
                pool.sync_finished(ticket, disk.sync()).expect("a sync");
            }
        }
        let moved = state(&pool).moved;
        assert!(emptied(&pool) > 0 && !moved.is_empty(), "nothing was emptied");
        taken.extend(take(&mut pool, 0));
        let replica = pool.replicas.get_mut(&guid).expect("it");
        replica.io(&mut pool.core).flush().expect("in their segment");
        replica.family.close(Stream::Nodes);
        pool.settle().expect("there is room in the ring");
        assert_eq!(state(&pool).moved, moved, "the record has it");
        assert!(pool.core.allocator.free_units() > 0, "what was emptied is free");
        taken.iter().for_each(|unit| pool.core.allocator.give(*unit, 1));
        drop(pool);
        disk.power_cut(|| false);
        let mut pool = Pool::open(disk, options).expect("a pool");
        assert!(!state(&pool).moved.is_empty());
        for is_merged in [false, true] {
            let mut replica = pool.replica(guid).expect("it");
            for (lba, lsn) in (0..).zip(&last) {
                let mut slots = Vec::new();
                replica.read(ReadView::Live, lba, 1, true, &mut slots).expect("a read");
                assert_eq!(slots[0].version.0, *lsn, "block {lba}");
                if *lsn > 0 {
                    let Content::Data { data, .. } = &slots[0].content else { panic!("{lba}") };
                    assert_eq!(data[0], *lsn as u8, "block {lba}");
                }
            }
            if !is_merged {
                pool.replicas.get_mut(&guid).expect("it").maintenance.dirty = true;
                pool.settle().expect("recorded");
                assert!(state(&pool).moved.is_empty());
            }
        }
    }

    #[test]
    fn moves_of_one_stretch_to_one_segment_are_one_stretch() {
        let mut moves = Moves::default();
        for (block, unit, origin) in [
            (3, 7, Some(0)),
            (9, 7, Some(0)),
            (12, 8, Some(0)),
            (40, 8, Some(32)),
            (44, 8, Some(32)),
        ] {
            moves.push(block, unit, origin);
        }
        let stretches: Vec<_> = moves.0.iter().map(|(s, _)| (s.start, s.end, s.unit)).collect();
        assert_eq!(stretches, [(3, 10, 7), (12, 13, 8), (40, 45, 8)]);
    }
}
