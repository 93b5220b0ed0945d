//! The table of a replica's segments on disk: nodes like those of its map, from units to segments.
//!
//! A replica of many segments cannot state all of them with each commit, and the metadata ring has
//! no room for the lists of a large pool. So the segments to which nothing is added any more stand
//! in a tree whose leaves cover 256 units, written by the rules of the map: a commit writes the
//! changed leaves, syncs, and records the new root. What the table does not have yet stands in the
//! record itself: open segments, log that is not folded, and a few others. So a
//! replica of few segments has no table, most commits write none of it, and a commit that finds no
//! room for nodes still says in the ring what it makes free.
//!
//! **Counters.** A page whose live bytes drifted far from what its leaf says is written with the
//! next commit, and at an orderly end each that drifted at all. They only choose what is emptied.
//!
//! **Rebuilds from nothing** give up all segments of before at their flip, with the nodes of the
//! table among them. So a second table, of the segments that the rebuild writes, is written as it
//! goes on ([`NextTable`]), and the flip finds no more to write than a commit does.
//! A table with a lost node is written anew in the same way, before the next commit: what a record
//! says of the lost one may lie in segments that it frees.
//!
//! **Rot.** While the pool is open, memory has all that the table says, and a bad node is written
//! again. At an open the segments under a bad leaf are found by their headers, once all others are
//! known. A stale header of a unit that is free claims too much, never too little, and clean-up
//! finds nothing in it.

use std::collections::{BTreeMap, BTreeSet};

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, mutant};

use crate::core::{Core, NodeIo, Tree};
use crate::disk::Disk;
use crate::format::batch::{Batch, header_blocks};
use crate::format::checkpoint::{SegmentState, TableState};
use crate::format::node::{BlockAt, Child, LEAF_BLOCKS, Node, Root};
use crate::format::segment::decode_header;
use crate::format::table::{entry_of, segment_of};
use crate::map::tree::{self, Change, Edit, Nodes, Part};
use crate::replica::{Replica, may_lack};
use crate::space::batches::read_header;
use crate::space::logical;
use crate::space::segment_table::{PAGE_UNITS, Segments};

/// Pages that one commit writes.
const PAGES_A_COMMIT: usize = 64;
/// Part of what the segments of a page can hold by which its counters may drift, as a divisor.
const DRIFT_PART: u64 = 16;
/// Free units that a commit leaves to others: with fewer, the record has the changes.
const UNITS_LEFT: u32 = 8;
const _: () = assert!(PAGE_UNITS as usize == LEAF_BLOCKS);

/// What the table on disk has, and what it lacks, of the segments that change no more.
#[derive(Default)]
pub struct Recorded {
    pub root: Root,
    /// Segments that it does not have.
    changed: BTreeSet<u32>,
    /// First units of segments that it has and that are gone.
    removed: BTreeSet<u32>,
    /// Pages that are to be written for another reason.
    stale: BTreeSet<u32>,
    /// Bytes by which the counters of a page changed since it was written.
    drift: BTreeMap<u32, u64>,
    /// A node of it is lost: all of it is written again.
    is_lost: bool,
}

/// When another table takes the place of the one in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Successor {
    /// A rebuild from nothing is done.
    AtFlip,
    /// A node of the one in use is lost.
    AtLoss,
}

/// A table on its way to take the place of the one in use.
pub struct NextTable {
    /// Older segments are given up with the table in use.
    pub first_sequence: u64,
    pub recorded: Recorded,
    /// Pages from this one on were not looked at yet.
    pub looked_at: u32,
}

impl NextTable {
    /// `is_new`: there are no segments for it yet.
    pub fn new(first_sequence: u64, is_new: bool) -> Self {
        let looked_at = if is_new { u32::MAX } else { 0 };
        NextTable { first_sequence, recorded: Recorded::default(), looked_at }
    }

    fn has_to_know(&self, unit: u32, sequence: u64) -> bool {
        sequence >= self.first_sequence && unit / PAGE_UNITS < self.looked_at
    }

    /// A segment changes no more.
    pub fn added(&mut self, unit: u32, sequence: u64) {
        if self.has_to_know(unit, sequence) {
            self.recorded.added(unit);
        }
    }

    pub fn removed(&mut self, unit: u32, sequence: u64) {
        if self.has_to_know(unit, sequence) {
            self.recorded.removed(unit);
        }
    }

    pub fn drifted(&mut self, page: u32, bytes: u64, capacity: u64) {
        if page < self.looked_at {
            self.recorded.drifted(page, bytes, capacity);
        }
    }

    /// Segments that it does not have.
    pub fn changed(&self) -> impl Iterator<Item = u32> + '_ {
        let forgets = mutant::is("flip-forgets-what-its-table-lacks") && self.recorded.exists();
        self.recorded.changed().filter(move |_| !forgets)
    }

    pub fn changes(&self) -> usize {
        self.recorded.changes()
    }

    /// What a record says of it.
    pub fn state(&self, too_high: bool) -> Option<TableState> {
        self.recorded.state(too_high)
    }
}

/// How far another table has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextStep {
    /// A record has room for what it lacks.
    Complete,
    GoesOn,
    /// There is no room for its nodes.
    NoRoom,
}

impl Recorded {
    fn exists(&self) -> bool {
        self.root.child != Child::EMPTY
    }

    /// A segment changes no more.
    pub fn added(&mut self, unit: u32) {
        self.changed.insert(unit);
    }

    pub fn removed(&mut self, unit: u32) {
        if !self.changed.remove(&unit) && self.exists() {
            self.removed.insert(unit);
        }
    }

    /// How many changes it does not have.
    fn changes(&self) -> usize {
        self.changed.len() + self.removed.len()
    }

    /// What a record says of it.
    fn state(&self, too_high: bool) -> Option<TableState> {
        self.exists().then(|| TableState {
            root: self.root,
            removed: self.removed.iter().copied().collect(),
            too_high,
        })
    }

    /// Segments that the table does not have.
    pub fn changed(&self) -> impl Iterator<Item = u32> + '_ {
        self.changed.iter().copied()
    }

    /// The counters of a page, whose segments can hold so many bytes, changed by so many.
    pub fn drifted(&mut self, page: u32, bytes: u64, capacity: u64) {
        if self.exists() {
            let drift = self.drift.entry(page).or_default();
            *drift = drift.saturating_add(bytes);
            if *drift > capacity / DRIFT_PART {
                self.stale.insert(page);
            }
        }
    }

    /// Counters that drifted at all are written with the next commits.
    pub fn write_drifted(&mut self) {
        self.stale.extend(self.drift.keys());
    }

    /// This page is written with the next commit.
    pub fn write_again(&mut self, page: u32) {
        if self.exists() {
            self.stale.insert(page);
        }
    }

    /// Pages that the next commit writes.
    fn due_pages(&self, unrecorded_max: usize) -> Vec<u32> {
        let mut pages = BTreeSet::new();
        if self.changes() > unrecorded_max {
            let units = self.changed.iter().chain(&self.removed);
            for unit in units {
                pages.insert(unit / PAGE_UNITS);
                if pages.len() == PAGES_A_COMMIT {
                    break;
                }
            }
        }
        let more = PAGES_A_COMMIT - pages.len();
        pages.extend(self.stale.iter().take(more));
        pages.into_iter().collect()
    }

    /// Changes of these pages: the segments that changed, and those that are gone.
    fn changes_of(&self, pages: &[u32]) -> [Vec<u32>; 2] {
        let units = |page: &u32| page * PAGE_UNITS..page * PAGE_UNITS + PAGE_UNITS;
        let of = |set: &BTreeSet<u32>| {
            pages.iter().flat_map(|page| set.range(units(page)).copied()).collect()
        };
        [of(&self.changed), of(&self.removed)]
    }

    /// The table has these pages, with these changes. Its own nodes may have filled a segment in
    /// the meantime, which it does not have.
    fn written(&mut self, pages: &[u32], [changed, removed]: [Vec<u32>; 2], root: Root) {
        self.root = root;
        for unit in changed {
            self.changed.remove(&unit);
        }
        for unit in removed {
            self.removed.remove(&unit);
        }
        for page in pages {
            self.stale.remove(page);
            self.drift.remove(page);
        }
    }
}

/// What an open could not find in the table.
#[derive(Default)]
pub struct FoundTable {
    /// Stretches of units of which nothing is known.
    pub lost: Vec<(u64, u64)>,
    /// No segment has a greater sequence number.
    pub newest: u64,
}

fn table_io<'a, D: Disk>(replica: &'a mut Replica, core: &'a mut Core<D>) -> NodeIo<'a, D> {
    NodeIo { tree: Tree::Segments, ..replica.io(core) }
}

/// State of the table for a record.
pub fn table_state(replica: &Replica) -> Option<TableState> {
    replica.family.segments.recorded.state(replica.maintenance.count.is_too_high())
}

/// Writes what the table lacks, a bounded number of pages, where that is more than a record is
/// to have. `Ok(false)`: a lost table is not written anew yet, and the commit waits for it.
pub fn write_table<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<bool, StoreError> {
    if replica.family.segments.recorded.is_lost {
        return write_lost_table(replica, core);
    }
    let recorded = &replica.family.segments.recorded;
    let pages = recorded.due_pages(core.options.unrecorded_segments);
    if pages.is_empty() || core.allocator.free_units() < UNITS_LEFT {
        return Ok(true);
    }
    let (root, changes) = (recorded.root, recorded.changes_of(&pages));
    match write_pages(replica, core, root, &pages, 0) {
        Ok(root) => {
            replica.family.segments.recorded.written(&pages, changes, root);
            Ok(true)
        }
        Err(StoreError::Damaged(_)) => {
            replica.family.segments.recorded.is_lost = true;
            write_lost_table(replica, core)
        }
        Err(StoreError::Full) => {
            // The record has it. Nodes on the way to what is dropped were counted.
            replica.maintenance.count.begin_anew();
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

/// Writes some of the table that takes the place of a lost one; true once it does.
fn write_lost_table<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
) -> Result<bool, StoreError> {
    begin_next_table(replica, Successor::AtLoss, 0, false);
    if step_next_table(replica, core, Successor::AtLoss)? == NextStep::NoRoom {
        list_for(replica, core, Successor::AtLoss, 0)?;
    } else if !is_next_complete(replica, core, Successor::AtLoss) {
        return Ok(false);
    }
    replica.family.segments.change_tables(Successor::AtLoss);
    // A count that went on beside it knows nothing of its nodes.
    replica.maintenance.count.begin_anew();
    Ok(true)
}

fn write_pages<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    root: Root,
    pages: &[u32],
    first_sequence: u64,
) -> Result<Root, StoreError> {
    let self_root = replica.family.segments.recorded.root;
    let (mut edits, mut crcs) = (Vec::new(), Vec::new());
    let hole = |from: u32, until: u32| Edit {
        lba: from.into(),
        blocks: until - from,
        change: Change::Hole { version: 0 },
    };
    for page in pages {
        let mut at = page * PAGE_UNITS;
        let settled = replica.family.segments.settled_of(*page);
        for state in settled.filter(|s| s.sequence >= first_sequence) {
            if state.unit > at {
                edits.push(hole(at, state.unit));
            }
            let (BlockAt { version, place, .. }, live) = entry_of(&state);
            let change = Change::Data { version, place, crc_at: crcs.len() as u32 };
            edits.push(Edit { lba: state.unit.into(), blocks: 1, change });
            crcs.push(live);
            at = state.unit + 1;
        }
        let end = page * PAGE_UNITS + PAGE_UNITS;
        if at < end {
            edits.push(hole(at, end));
        }
    }
    let mut io = table_io(replica, core);
    if root != self_root {
        // No count looks at another table than the one in use.
        io.recount = None;
    }
    tree::update(&mut io, root, &edits, &crcs, None)
}

/// Writes some of another table.
pub fn step_next_table<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    which: Successor,
) -> Result<NextStep, StoreError> {
    let most = core.options.unrecorded_segments;
    replica.family.segments.look_on(which, most);
    let Some(next) = &replica.family.segments.next[which as usize] else {
        return Ok(NextStep::Complete);
    };
    if next.changes() <= most {
        let is_complete = next.looked_at == u32::MAX;
        return Ok(if is_complete { NextStep::Complete } else { NextStep::GoesOn });
    }
    if core.allocator.free_units() < UNITS_LEFT {
        return Ok(NextStep::NoRoom);
    }
    let (root, first_sequence) = (next.recorded.root, next.first_sequence);
    let pages = next.recorded.due_pages(most);
    let changes = next.recorded.changes_of(&pages);
    let written = write_pages(replica, core, root, &pages, first_sequence);
    if let (Ok(root), Some(next)) = (&written, &mut replica.family.segments.next[which as usize]) {
        next.recorded.written(&pages, changes, *root);
    }
    match written {
        Err(StoreError::Full) => {
            replica.maintenance.count.begin_anew();
            Ok(NextStep::NoRoom)
        }
        written => next_table_is(replica, which, written).map(|()| NextStep::GoesOn),
    }
}

fn is_next_complete<D: Disk>(replica: &Replica, core: &Core<D>, which: Successor) -> bool {
    replica.family.segments.next[which as usize].as_ref().is_none_or(|next| {
        next.looked_at == u32::MAX && next.changes() <= core.options.unrecorded_segments
    })
}

/// Completes the table that takes over at a flip. Where there is no room for it, the record has
/// all segments, if the metadata ring has room for them.
pub fn complete_table_of_flip<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    first_sequence: u64,
) -> Result<(), StoreError> {
    begin_next_table(replica, Successor::AtFlip, first_sequence, false);
    loop {
        match step_next_table(replica, core, Successor::AtFlip)? {
            NextStep::Complete => return Ok(()),
            NextStep::GoesOn => {}
            NextStep::NoRoom => return list_for(replica, core, Successor::AtFlip, first_sequence),
        }
    }
}

/// Has records list all segments that another table would have: there is no room for its nodes.
fn list_for<D: Disk>(
    replica: &mut Replica,
    core: &Core<D>,
    which: Successor,
    first_sequence: u64,
) -> Result<(), StoreError> {
    let most = core.ring.segments_in_a_record();
    let mut next = NextTable::new(first_sequence, true);
    for state in replica.family.segments.settled() {
        next.added(state.unit, state.sequence);
        if next.changes() > most {
            return Err(StoreError::RingFull);
        }
    }
    replica.family.segments.next[which as usize] = Some(next);
    Ok(())
}

/// Begins another table, unless it was begun. `is_new`: nothing was written of what it will have.
pub fn begin_next_table(
    replica: &mut Replica,
    which: Successor,
    first_sequence: u64,
    is_new: bool,
) {
    let next = &mut replica.family.segments.next[which as usize];
    if next.as_ref().is_none_or(|next| next.first_sequence != first_sequence) {
        *next = Some(NextTable::new(first_sequence, is_new));
    }
}

/// Writes nodes of the table anew, where they lie at the places that the edits name.
pub fn renew_table<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    nodes: &[Edit],
) -> Result<(), StoreError> {
    let root = replica.family.segments.recorded.root;
    match tree::update(&mut table_io(replica, core), root, nodes, &[], None) {
        Ok(root) => replica.family.segments.recorded.root = root,
        Err(StoreError::Damaged(_)) => replica.family.segments.recorded.is_lost = true,
        Err(error) => return Err(error),
    }
    for which in [Successor::AtFlip, Successor::AtLoss] {
        let Some(next) = &replica.family.segments.next[which as usize] else { continue };
        let root = next.recorded.root;
        let mut io = NodeIo { recount: None, ..table_io(replica, core) };
        let renewed = tree::update(&mut io, root, nodes, &[], None);
        next_table_is(replica, which, renewed)?;
    }
    Ok(())
}

/// Takes over the root of another table as it was written, or begins it anew where a node of it is
/// lost.
fn next_table_is(
    replica: &mut Replica,
    which: Successor,
    written: Result<Root, StoreError>,
) -> Result<(), StoreError> {
    let Some(next) = &mut replica.family.segments.next[which as usize] else { return Ok(()) };
    match written {
        Ok(root) => next.recorded.root = root,
        Err(StoreError::Damaged(_)) => *next = NextTable::new(next.first_sequence, false),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// The next leaf of the table from this unit on: where it ends, and its bytes with its place.
pub fn next_of_table<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: u64,
) -> Result<Option<Part>, StoreError> {
    let root = replica.family.segments.recorded.root;
    tree::next_part(&mut table_io(replica, core), root, 0, from)
}

/// Looks at the nodes that a walk of the table from this unit on reads in one step.
pub fn look_ahead_of_walk<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: u64,
) -> Result<(), StoreError> {
    let (root, step_nodes) = (replica.family.segments.recorded.root, core.options.step_nodes);
    let io = &mut table_io(replica, core);
    tree::look_ahead_of_walk(io, root, 0, from, step_nodes, false)
}

/// Looks at the nodes that the next part of the table that is written reads: of the one in use, or of
/// those that take its place.
pub fn look_ahead<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let most = core.options.unrecorded_segments;
    let recorded = &replica.family.segments.recorded;
    let (root, pages) = match recorded.is_lost {
        true => (recorded.root, Vec::new()),
        false => (recorded.root, recorded.due_pages(most)),
    };
    let own = look_ahead_of_pages(replica, core, root, &pages);
    let of_loss = look_ahead_of_next(replica, core, Successor::AtLoss);
    own.and(of_loss)
}

/// Looks at the nodes that the next part of another table reads.
pub fn look_ahead_of_next<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    which: Successor,
) -> Result<(), StoreError> {
    let most = core.options.unrecorded_segments;
    // As the step does: it changes nothing but what is known to be lacking.
    replica.family.segments.look_on(which, most);
    let Some(next) = &replica.family.segments.next[which as usize] else { return Ok(()) };
    if next.changes() <= most {
        return Ok(());
    }
    let (root, pages) = (next.recorded.root, next.recorded.due_pages(most));
    look_ahead_of_pages(replica, core, root, &pages)
}

fn look_ahead_of_pages<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    root: Root,
    pages: &[u32],
) -> Result<(), StoreError> {
    let first = |page: &u32| u64::from(*page) * u64::from(PAGE_UNITS);
    let stretches = pages.iter().map(|page| (first(page), first(page) + u64::from(PAGE_UNITS)));
    tree::look_ahead(&mut table_io(replica, core), root, stretches, PAGES_A_COMMIT)
}

/// Looks at the nodes that writing these anew reads.
pub fn look_ahead_of_renewals<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    nodes: &[Edit],
) -> Result<(), StoreError> {
    let segments = &replica.family.segments;
    let next = segments.next.iter().flatten().map(|next| next.recorded.root);
    let roots: Vec<Root> = std::iter::once(segments.recorded.root).chain(next).collect();
    let mut lacking = Ok(());
    for root in roots {
        let io = &mut table_io(replica, core);
        lacking = lacking.and(may_lack(tree::look_ahead_of_renewals(io, root, nodes))?);
    }
    lacking
}

/// Reads the table that a record tells of, and hands out its segments.
pub fn read_table<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    table: &TableState,
    mut admit: impl FnMut(&mut Core<D>, &mut Replica, &SegmentState) -> bool,
) -> Result<Option<FoundTable>, StoreError> {
    let removed: BTreeSet<u32> = table.removed.iter().copied().collect();
    let mut found = FoundTable::default();
    // Segments that the record states beside the table are known already.
    let recorded = &mut replica.family.segments.recorded;
    (recorded.root, recorded.removed) = (table.root, removed.clone());
    let mut at = 0;
    while let Some(part) = next_of_table(replica, core, at)? {
        let (start, end) = part.range();
        if start >= core.allocator.units().into() {
            // No table has anything there, and a walk of what is made up need not end.
            break;
        }
        at = end;
        let loaded = match part {
            Part::Hole { .. } => continue,
            Part::Damaged { .. } => None,
            Part::Leaf { node, .. } => table_io(replica, core).load(0, &node)?,
        };
        let Some(Node::Leaf(leaf)) = loaded.as_deref() else {
            found.lost.push((start, end));
            continue;
        };
        for (number, entry) in (start..).zip(&leaf.blocks).filter(|(_, e)| e.place != 0) {
            let unit = u32::try_from(number).ok();
            let Some(state) = unit.and_then(|unit| segment_of(unit, entry)) else {
                return Ok(None);
            };
            if !removed.contains(&state.unit) && !admit(core, replica, &state) {
                return Ok(None);
            }
        }
    }
    if !found.lost.is_empty() {
        replica.family.segments.recorded.is_lost = true;
        replica.maintenance.count.request();
        replica.maintenance.dirty = true;
    }
    Ok(Some(found))
}

/// Finds segments in stretches of units whose leaves are lost, by the headers that lie in units
/// which nobody is known to use.
pub fn search_lost<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    found: &FoundTable,
) -> Result<(), StoreError> {
    let mut headers = Vec::new();
    for (from, until) in &found.lost {
        let until = (*until).min(core.allocator.units().into());
        for unit in (*from..until).map(|unit| unit as u32) {
            let recorded = &replica.family.segments.recorded;
            if !core.allocator.is_cold(unit) || recorded.removed.contains(&unit) {
                continue;
            }
            let mut bytes = vec![0; BLOCK_SIZE];
            if core.read(core.superblock.unit_start(unit), &mut bytes).is_err() {
                continue;
            }
            let header = decode_header(&core.superblock, replica.identity.guid, unit, &bytes);
            let Some(state) = header else { continue };
            let is_ours =
                state.sequence <= found.newest && Segments::is_possible(unit, state.units);
            if is_ours {
                headers.push(state);
            }
        }
    }
    // Of two with the same number the older one was lost with power, and its number given again.
    headers.sort_by_key(|state| std::cmp::Reverse(state.sequence));
    for mut state in headers {
        // What is known is never overridden by what may be left of before.
        if logical::is_known(replica, core, &state)?
            || !core.allocator.take(state.unit, state.units)
        {
            continue;
        }
        state.used_blocks = end_of(replica, core, &state)?;
        state.live_bytes = u64::from(state.used_blocks) * BLOCK_SIZE as u64;
        core.logical_of(replica.identity.guid).insert(&state);
        replica.family.segments.insert_settled(&state);
    }
    Ok(())
}

/// Blocks of a segment up to the end of its batches. All of it where one of them may be rotten:
/// such a segment is never taken for empty.
fn end_of<D: Disk>(
    replica: &Replica,
    core: &Core<D>,
    state: &SegmentState,
) -> Result<u32, StoreError> {
    let blocks = state.units * core.superblock.unit_blocks;
    let start = core.superblock.unit_start(state.unit);
    let is_own = |batch: &Batch<'_>| {
        let header = &batch.header;
        (header.sequence, header.guid_hash) == (state.sequence, replica.family.guid_hash)
    };
    let (mut at, mut end, mut is_whole) = (1, 1, true);
    let mut bytes = vec![0; BLOCK_SIZE];
    while at < blocks {
        let looks_like = core.read(start + u64::from(at), &mut bytes).is_err()
            || header_blocks(&bytes).is_some();
        let header = match looks_like {
            true => read_header(core, start + u64::from(at), blocks - at)?,
            false => None,
        };
        match header.as_deref().and_then(Batch::parse).filter(is_own) {
            Some(_) if !is_whole => return Ok(blocks),
            Some(batch) => {
                at = at.saturating_add(batch.blocks());
                end = at;
            }
            None => (at, is_whole) = (at + 1, false),
        }
    }
    Ok(end.min(blocks))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use quoin_replication::replica::store::{ReplicaIdentity, ReplicaStore};
    use quoin_types::message::{Content, ReadView};
    use quoin_types::{Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, ReplicaGuid};

    use super::*;
    use crate::format::batch::Stream;
    use crate::{Disk, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

    const BLOCKS: u64 = 4000;

    fn options() -> PoolOptions {
        PoolOptions {
            // A path of nodes, and some beside it.
            cache_bytes: 128 << 10,
            log_keep_bytes: 0,
            unrecorded_segments: 4,
            ..PoolOptions::default()
        }
    }

    fn open(disk: &MemoryDisk) -> Pool<MemoryDisk> {
        Pool::open(disk.clone(), options()).expect("a pool")
    }

    fn formatted() -> MemoryDisk {
        let disk = MemoryDisk::new(64 << 20);
        let format = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(1)) };
        Pool::format(&disk, &format).expect("a fit disk");
        disk
    }

    struct Writer {
        pool: Pool<MemoryDisk>,
        chain: Chain,
        lsn: u64,
        /// What was written last to each block.
        last: Vec<u64>,
    }

    impl Writer {
        fn new(disk: &MemoryDisk) -> Self {
            let mut pool = open(disk);
            let (identity, meta) = Default::default();
            pool.create(identity, meta, BLOCKS).expect("room");
            Writer { pool, chain: Chain(0), lsn: 0, last: vec![0; BLOCKS as usize] }
        }

        fn write(&mut self, lba: u64, blocks: u32) {
            self.lsn += 1;
            let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn) };
            let data = Bytes::from(vec![self.lsn as u8; blocks as usize * BLOCK_SIZE]);
            let entry =
                Entry::after(self.chain, position, EntryKind::Write, lba, blocks, data, false);
            self.chain = entry.chain;
            let mut replica = self.pool.replica(Default::default()).expect("it");
            replica.append(&[Arc::new(entry)]).expect("room");
            replica.set_stable(Lsn(self.lsn));
            self.last[lba as usize..][..blocks as usize].fill(self.lsn);
        }

        /// Writes all blocks, then overwrites some, with background work in between.
        fn live(&mut self, overwrites: u64) {
            for lba in (0..BLOCKS).step_by(8) {
                self.write(lba, 8);
                self.work(lba / 8);
            }
            for n in 0..overwrites {
                self.write(n * 7919 % (BLOCKS - 2), 2);
                self.work(n);
            }
            self.pool.settle().expect("recorded");
            self.pool.settle().expect("recorded");
        }

        fn work(&mut self, round: u64) {
            if !round.is_multiple_of(20) {
                return;
            }
            for _ in 0..2 {
                self.pool.settle().expect("folded");
                while self.pool.background_due() != crate::Due::Idle {
                    self.pool.background(4 << 20).expect("background work");
                }
            }
        }

        fn check(&mut self) {
            let mut replica = self.pool.replica(Default::default()).expect("it");
            for (lba, lsn) in (0..).zip(&self.last) {
                let mut slots = Vec::new();
                replica.read(ReadView::Live, lba, 1, true, &mut slots).expect("a read");
                assert_eq!(slots[0].version.0, *lsn, "block {lba}");
                assert!(matches!(slots[0].content, Content::Data { .. }), "block {lba}");
            }
        }

        fn replica(&mut self) -> &mut Replica {
            self.pool.replicas.get_mut(&ReplicaIdentity::default().guid).expect("it")
        }

        /// Segments with all that an open must know of them.
        fn segments(&mut self) -> Vec<(u32, u32, Stream, u64, u32)> {
            let all = self.replica().family.segments.iter();
            all.map(|s| (s.unit, s.units, s.stream, s.sequence, s.used_blocks)).collect()
        }

        fn open_again(&mut self) {
            self.pool = open(&self.pool.disk().clone());
        }
    }

    #[test]
    fn a_table_brings_back_every_segment_and_the_record_stays_short() {
        let disk = formatted();
        let mut writer = Writer::new(&disk);
        let mut longest = 0;
        for round in 1..6 {
            writer.live(round * 100);
            let recorded = &writer.replica().family.segments.recorded;
            assert!(recorded.exists() && recorded.changed.len() <= 4 + 2, "round {round}");
            longest = longest.max(writer.pool.core.durable.encoded_len());
            let (before, live) = (writer.segments(), writer.replica().family.segments.live_bytes());
            assert!(before.len() > 100, "{} segments", before.len());
            writer.open_again();
            assert!(writer.segments() == before, "round {round}");
            // But for what its own nodes changed as it was written.
            let drift = writer.replica().family.segments.live_bytes().abs_diff(live);
            assert!(drift < 64 << 10, "{drift} bytes in round {round}");
            writer.check();
        }
        assert!(longest < 4096, "{longest} bytes");
    }

    /// Segments of all kinds, every third unit or so.
    fn segments_of_all_kinds(many: u32) -> Vec<SegmentState> {
        let mut unit = 0;
        let of = |n: u32| {
            let units = if n.is_multiple_of(16) { 8 } else { 1 };
            unit = if units == 8 { u32::next_multiple_of(unit, 8) } else { unit };
            let state = SegmentState {
                unit,
                units,
                stream: [Stream::Log, Stream::Moved, Stream::Nodes][n as usize % 3],
                sequence: u64::from(n) + 1,
                used_blocks: units * 1000,
                live_bytes: u64::from(n % 97) * 40_000,
                last_lsn: 0,
                last_index: 0,
                logical: n / 2,
            };
            unit += units + 2;
            state
        };
        (0..many).map(of).collect()
    }

    /// Time is a matter of the machine: reads and bytes are counted.
    #[test]
    fn a_pool_of_100_tib_opens_with_a_read_a_leaf_and_takes_few_bytes_a_segment() {
        const SEGMENTS: u32 = 30_000;
        let disk = MemoryDisk::new(100 << 40);
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a fit disk");
        let opened = || {
            let before = disk.reads();
            let pool = open(&disk);
            (pool, disk.reads() - before)
        };
        let (mut pool, reads) = opened();
        let units = pool.core.allocator.units();
        assert!((1 << 20..=1 << 21).contains(&units), "{units} units");
        assert!(reads < 40, "{reads} reads of an empty pool");
        assert!(pool.core.allocator.held_bytes() < 2 << 20);
        let free = pool.core.allocator.free_units();
        for n in 1..500 {
            let identity = ReplicaIdentity { guid: ReplicaGuid(n), ..Default::default() };
            pool.create(identity, Default::default(), 1 << 30).expect("room");
        }
        (1..500).for_each(|n| assert_eq!(pool.delete(ReplicaGuid(n)), Ok(true)));

        pool.create(Default::default(), Default::default(), 1 << 34).expect("room");
        let guid = ReplicaIdentity::default().guid;
        pool.core.sequence += u64::from(SEGMENTS);
        let all = segments_of_all_kinds(SEGMENTS);
        let replica = pool.replicas.get_mut(&guid).expect("it");
        for state in &all {
            assert!(pool.core.allocator.take(state.unit, state.units));
            replica.family.segments.insert_settled(state);
        }
        let held = replica.family.segments.held_bytes();
        assert!(held < 100 * all.len(), "{held} bytes for {} segments", all.len());
        let is_recorded = |pool: &mut Pool<MemoryDisk>| {
            let replica = pool.replicas.get_mut(&guid).expect("it");
            replica.maintenance.dirty = true;
            replica.family.segments.recorded.changes() <= options().unrecorded_segments
        };
        while !is_recorded(&mut pool) {
            pool.settle().expect("room");
        }
        pool.settle().expect("room");
        // The first start after it still has the records of before in the ring.
        drop(pool);
        drop(opened());
        let (mut pool, reads) = opened();
        let pages = u64::from(all.last().expect("many").unit / PAGE_UNITS) + 1;
        assert!(reads < pages + 100, "{reads} reads for {pages} leaves");
        let replica = pool.replicas.get_mut(&guid).expect("it");
        for state in &all {
            assert_eq!(replica.family.segments.state_of(state.unit), Some(*state));
        }

        assert_eq!(pool.delete(guid), Ok(true));
        let ticket = pool.sync_wanted().expect("a delete is to be durable");
        pool.sync_finished(ticket, disk.sync()).expect("a sync");
        while pool.core.freed.is_due(u64::MAX) {
            pool.background(1).expect("background work");
        }
        assert_eq!(pool.core.allocator.free_units(), free);
    }

    #[test]
    fn a_rotten_node_of_the_table_costs_no_segment_and_is_written_again() {
        let disk = formatted();
        let mut writer = Writer::new(&disk);
        writer.live(300);
        let before = writer.segments();
        let root = writer.replica().family.segments.recorded.root;
        let pool = &mut writer.pool;
        let replica = pool.replicas.get_mut(&ReplicaIdentity::default().guid).expect("it");
        let mut io = table_io(replica, &mut pool.core);
        let mut nodes = tree::path(&mut io, root, 0).expect("a path");
        nodes.extend(tree::path(&mut io, root, 300).expect("a path"));
        assert!(nodes.len() >= 3);
        disk.power_cut(|| true);
        for (level, base, node) in nodes {
            let image = disk.fork();
            image.rot(node.place + u64::from(node.length) / 2, 0x10);
            writer.pool = open(&image);
            let found = writer.segments();
            assert!(before.iter().all(|s| found.contains(s)), "level {level} from {base}");
            writer.check();
            for _ in 0..3 {
                writer.pool.settle().expect("recorded");
                while writer.pool.background(1 << 20).expect("background work") {}
            }
            writer.check();
            let replica = writer.replica();
            assert!(!replica.family.segments.recorded.is_lost, "level {level} from {base}");
            writer.open_again();
            writer.check();
            let report = crate::offline::check(image, |_| ()).expect("a check");
            assert!(report.is_sound(), "{report:?}");
        }
    }

    /// Segments with a number whose blocks are live, and units of no segment.
    fn named_and_free(replica: &Replica) -> (Vec<SegmentState>, Vec<u32>) {
        let segments = &replica.family.segments;
        let named = |s: &SegmentState| s.logical != 0 && s.live_bytes > 0;
        let is_free = |unit: &u32| segments.containing(*unit).is_none();
        let named = segments.settled().filter(named).collect();
        (named, (0..1000).filter(is_free).collect())
    }

    /// Power took the record of a segment, and its number was given again. Its header is still there.
    #[test]
    fn a_stale_header_takes_no_number_whose_blocks_are_known() {
        let disk = formatted();
        let mut writer = Writer::new(&disk);
        writer.live(300);
        let guid = ReplicaIdentity::default().guid;
        let (named, free) = named_and_free(writer.replica());
        disk.power_cut(|| true);
        let mut tried = 0;
        for state in named.iter().step_by(named.len() / 8 + 1) {
            let Some(unit) = free.iter().find(|unit| **unit > state.unit) else { continue };
            let pool = &mut writer.pool;
            let replica = pool.replicas.get_mut(&guid).expect("it");
            let root = replica.family.segments.recorded.root;
            let mut io = table_io(replica, &mut pool.core);
            let path = tree::path(&mut io, root, u64::from(*unit)).expect("a path");
            let Some((0, _, leaf)) = path.last() else { continue };
            let superblock = &pool.core.superblock;
            let stale = SegmentState { unit: *unit, units: 1, ..*state };
            let header = crate::format::segment::segment_header(superblock, guid, &stale);
            let image = disk.fork();
            let at = superblock.unit_start(*unit) * BLOCK_SIZE as u64;
            image.write_at(at, &[std::io::IoSlice::new(&header)]).expect("a write");
            image.sync().expect("a sync");
            image.rot(leaf.place + u64::from(leaf.length) / 2, 0x10);
            let before = std::mem::replace(&mut writer.pool, open(&image));
            writer.check();
            writer.pool = before;
            tried += 1;
        }
        assert!(tried > 2, "{tried} headers");
    }

    /// As above, and the header that power left stands before the one that has the number since.
    #[test]
    fn of_two_headers_with_a_number_the_newer_one_has_it() {
        let disk = formatted();
        let mut writer = Writer::new(&disk);
        writer.live(300);
        let guid = ReplicaIdentity::default().guid;
        let (named, free) = named_and_free(writer.replica());
        disk.power_cut(|| true);
        let mut tried = 0;
        for state in named.iter().step_by(named.len() / 8 + 1) {
            let units = state.units;
            let is_room =
                |run: &&[u32]| run[0] > state.unit && run[0] + units - 1 == run[run.len() - 1];
            let Some(room) = free.windows(units as usize).find(is_room) else { continue };
            let moved = SegmentState { unit: room[0], ..*state };
            let pool = &mut writer.pool;
            let replica = pool.replicas.get_mut(&guid).expect("it");
            let root = replica.family.segments.recorded.root;
            let mut io = table_io(replica, &mut pool.core);
            let leaves = [state.unit, moved.unit].map(|unit| {
                let path = tree::path(&mut io, root, u64::from(unit)).expect("a path");
                path.last().map(|(level, _, leaf)| (*level, leaf.place, leaf.length))
            });
            let (Some((0, place, length)), true) = (leaves[0], leaves[0] == leaves[1]) else {
                continue;
            };
            let superblock = &pool.core.superblock;
            let at = |unit: u32| superblock.unit_start(unit) * BLOCK_SIZE as u64;
            let header = |state: &SegmentState| {
                crate::format::segment::segment_header(superblock, guid, state)
            };
            let stale = SegmentState { sequence: state.sequence - 1, ..*state };
            let mut bytes = vec![0; (units * superblock.unit_blocks) as usize * BLOCK_SIZE];
            let image = disk.fork();
            image.read_at(at(state.unit), &mut bytes).expect("a read");
            bytes[..BLOCK_SIZE].copy_from_slice(&header(&moved));
            image.write_at(at(moved.unit), &[std::io::IoSlice::new(&bytes)]).expect("a write");
            bytes.fill(0);
            bytes[..BLOCK_SIZE].copy_from_slice(&header(&stale));
            image.write_at(at(stale.unit), &[std::io::IoSlice::new(&bytes)]).expect("a write");
            image.sync().expect("a sync");
            image.rot(place + u64::from(length) / 2, 0x10);
            let before = std::mem::replace(&mut writer.pool, open(&image));
            writer.check();
            writer.pool = before;
            tried += 1;
        }
        assert!(tried > 2, "{tried} headers");
    }
}
