//! Counting anew how much of each segment is live, after what only such a count can tell: a Revert,
//! the end of a rebuild, a crash, or a step that failed on its way. (What a deleted snapshot leaves
//! dead is counted by what it differs in: [`crate::background::difference`].)
//!
//! The count walks every leaf of every view, which takes minutes where there are millions. So it is
//! the last of all background work and stops at any leaf: folds, commits and clean-up go on beside
//! it and find its result right, by two rules.
//!
//! * Only space that grows no more is counted: closed segments and the part of open ones that was
//!   written as the count began ([`OpenPart`]), less log of which something was not folded then.
//!   Later writes go elsewhere, and are counted as they are written, as ever.
//! * Counted space only loses. Blocks that a view gives up behind the place of the count
//!   ([`Recount::gone`]) are subtracted; before that place the count does not meet them any more.
//!
//! Each version of a block belongs to the oldest view that shows it, and is counted there. The
//! views are walked in the order of the newest version that each can hold. In each view only
//! versions count that are newer than the view before can hold. Snapshots taken meanwhile come
//! before the folded map, which they were when it was walked. A snapshot that is deleted meanwhile
//! stays a view until the count is done.
//!
//! Log that was not folded yet as the count began is left out and keeps its counters, also where it is
//! folded meanwhile. Another count follows once all of it is folded.

use std::collections::{BTreeMap, BTreeSet};

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, mutant};

use crate::background::checkpoint;
use crate::background::difference::{LeavingView, LeavingViews};
use crate::core::{Core, Tree};
use crate::disk::Disk;
use crate::format::batch::Stream;
use crate::format::checkpoint::SegmentState;
use crate::format::node::{LEAF_BLOCKS, Node, Root};
use crate::map::tree::{self, Nodes, Part};
use crate::replica::Replica;
use crate::space::logical;
use crate::space::table;

/// A view among those that are counted: the newest version that it can hold, and which of the views
/// with the same one it is.
type ViewKey = (u64, usize);

/// A count of what is live, by segment, over all views.
pub struct Recount {
    /// The last view that was walked to its end.
    done: Option<ViewKey>,
    /// The one that is walked, and how far.
    at: Option<ViewKey>,
    cursor: u64,
    live: BTreeMap<u32, u64>,
    through_sequence: u64,
    /// Segments that were open as the count began, less the log that was not folded.
    open: BTreeMap<u32, OpenPart>,
    /// Segments of log that was not folded as the count began.
    log: BTreeSet<u32>,
    /// Whether the count was requested, and does not follow another one.
    is_first: bool,
    /// Moved blocks up to this one are known; `None`: all are.
    learned_to: Option<u64>,
    /// Unit up to which the table of segments was walked, which comes last but one.
    table_cursor: u64,
    is_table_counted: bool,
    /// Logical block up to which the map of moved blocks was walked, which comes last.
    logical_cursor: u64,
}

/// Part of a segment that was written before a count began, where later writes follow it.
struct OpenPart {
    /// The first block behind it.
    end: u64,
    /// The segment's counter for this part, kept like the counter.
    counter: u64,
    /// Logical blocks that were moved here since, which are not of this part.
    moved_since: BTreeSet<u64>,
}

/// A block of a segment, as it is known without a look at the map of moved blocks.
#[derive(Clone, Copy)]
pub enum BlockOf {
    /// Block of the pool in which it lies.
    At(u64),
    /// Place that names it, since it was moved.
    Moved(u64),
}

impl OpenPart {
    fn has(&self, block: BlockOf) -> bool {
        match block {
            BlockOf::At(block) => block < self.end,
            BlockOf::Moved(place) => !self.moved_since.contains(&place),
        }
    }
}

/// The need to count the live bytes of a replica's segments anew.
#[derive(Default)]
pub struct LiveCount {
    due: bool,
    /// Views that went away, of which it is not counted yet what they leave dead.
    pub leaving: LeavingViews,
    pub job: Option<Recount>,
    /// Another count is due once the log up to this segment sequence number is folded.
    after: Option<u64>,
}

impl LiveCount {
    /// Another count is due; one that is under way stays right and ends first.
    pub fn request(&mut self) {
        self.due = true;
        self.leaving.clear();
    }

    /// These views went away.
    pub fn leave(&mut self, views: impl IntoIterator<Item = LeavingView>) {
        if !self.due {
            self.leaving.add(views);
        }
    }

    /// A count that is under way is worth nothing any more.
    pub fn begin_anew(&mut self) {
        self.request();
        self.job = None;
    }

    /// The counters are recorded as too high, so that a start after a crash counts anew.
    pub fn is_too_high(&self) -> bool {
        self.due || self.job.is_some() || self.after.is_some() || !self.leaving.is_empty()
    }
}

impl Recount {
    /// The counter of this segment went down by so many bytes, which begin in this block.
    pub fn counter_lowered(&mut self, unit: u32, block: BlockOf, bytes: u64) {
        if let Some(part) = self.open.get_mut(&unit).filter(|part| part.has(block)) {
            part.counter = part.counter.saturating_sub(bytes);
        }
    }

    /// Whether a block of this segment is counted: not if it was written since the count began.
    fn counts(&self, unit: u32, block: BlockOf) -> bool {
        self.open.get(&unit).is_none_or(|part| part.has(block))
    }

    /// Clean-up moved what this place names to this segment.
    pub fn moved(&mut self, place: u64, unit: u32) {
        if let Some(part) = self.open.get_mut(&unit)
            && !mutant::is("moved-beside-a-count-is-counted")
        {
            part.moved_since.insert(place);
        }
    }

    /// Bytes of this segment, which begin in this block and held this version at this LBA, are no
    /// longer part of the live map.
    pub fn gone(&mut self, unit: u32, block: BlockOf, lba: u64, version: u64, bytes: u64) {
        if !self.counts(unit, block) {
            return;
        }
        let in_done = self.done.is_some_and(|(newest, _)| version <= newest);
        let behind = self.at.is_some_and(|(newest, _)| version <= newest) && lba < self.cursor;
        if (in_done || behind)
            && !mutant::is("what-dies-beside-a-count-is-counted")
            && let Some(live) = self.live.get_mut(&unit)
        {
            *live = live.saturating_sub(bytes);
        }
    }

    /// This leaf of a tree beside the maps, from `base` on, was replaced.
    pub fn gone_beside(&mut self, tree: Tree, unit: u32, block: BlockOf, base: u64, bytes: u64) {
        let cursor = match tree {
            Tree::Logical => self.logical_cursor,
            _ => self.table_cursor,
        };
        if self.counts(unit, block)
            && base < cursor
            && let Some(live) = self.live.get_mut(&unit)
        {
            *live = live.saturating_sub(bytes);
        }
    }

    /// The view to go on with, and above which version.
    fn next(&mut self, views: &[(ViewKey, Root)]) -> Option<(ViewKey, Root, u64)> {
        let done = self.done;
        let (key, root) = *views.iter().find(|(key, _)| done.is_none_or(|done| *key > done))?;
        // The one that was walked is gone: what it shared with this one may be counted twice.
        if self.at.is_some_and(|at| at < key) {
            self.cursor = 0;
        }
        self.at = Some(key);
        let from = done.map_or(0, |(newest, _)| if newest < key.0 { newest } else { 0 });
        Some((key, root, from))
    }
}

/// The views whose blocks count as live, oldest first. What only a transfer holds on to dies
/// with it.
fn counted_views<D: Disk>(replica: &Replica, core: &Core<D>) -> Vec<(ViewKey, Root)> {
    let mut views: Vec<(Root, u64)> =
        replica.folded.snapshots.iter().map(|s| (s.root, s.info.lsn.0)).collect();
    let bases = core.bases.of(replica.identity.guid).map(|(_, base)| (base.root, base.lsn));
    let leaving = replica.maintenance.count.leaving.iter().map(|view| (view.root, view.lsn));
    for view in bases.chain(leaving) {
        // The snapshot that a base was made from is counted as such.
        if !views.contains(&view) {
            views.push(view);
        }
    }
    views.push((replica.folded.root, u64::MAX));
    if let Some(shadow) = &replica.shadow {
        views.extend(shadow.roots().map(|r| (r, u64::MAX)));
    }
    views.sort_by_key(|(_, newest)| *newest);
    let (mut keyed, mut before) = (Vec::<(ViewKey, Root)>::with_capacity(views.len()), None);
    for (root, newest) in views {
        let key = match before {
            Some((same, index)) if same == newest => (newest, index + 1),
            _ => (newest, 0),
        };
        keyed.push((key, root));
        before = Some(key);
    }
    keyed
}

/// Returns true if the replica's segments are to be counted, or are being counted.
pub fn is_due(replica: &Replica) -> bool {
    let follows =
        || {
            replica.maintenance.count.after.is_some_and(|sequence| {
                !unfolded_log(replica).any(|state| state.sequence <= sequence)
            })
        };
    replica.maintenance.count.due || replica.maintenance.count.job.is_some() || follows()
}

fn begin<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<Recount, StoreError> {
    // Nodes that wait are counted already, and have their places.
    replica.io(core).flush()?;
    let is_first = std::mem::take(&mut replica.maintenance.count.due);
    replica.maintenance.count.after = None;
    replica.maintenance.count.leaving.clear();
    Ok(Recount {
        is_first,
        done: None,
        at: None,
        cursor: 0,
        live: BTreeMap::new(),
        through_sequence: core.sequence,
        open: open_parts(replica, core),
        log: unfolded_log(replica).map(|state| state.unit).collect(),
        learned_to: (!core.logical_of(replica.family.guid).is_learned()).then_some(0),
        table_cursor: 0,
        is_table_counted: false,
        logical_cursor: 0,
    })
}

fn open_parts<D: Disk>(replica: &Replica, core: &Core<D>) -> BTreeMap<u32, OpenPart> {
    let streams = [Stream::Log, Stream::Moved, Stream::Nodes];
    let open = streams.map(|stream| replica.family.open_segment(stream)).into_iter().flatten();
    let open = open.map(|segment| &segment.state);
    let is_folded =
        |state: &&SegmentState| !unfolded_log(replica).any(|log| log.unit == state.unit);
    let parts = open.filter(is_folded).map(|state| {
        let end = core.superblock.unit_start(state.unit) + u64::from(state.used_blocks);
        (state.unit, OpenPart { end, counter: state.live_bytes, moved_since: BTreeSet::new() })
    });
    parts.collect()
}

/// Segments of log of which something is not folded.
fn unfolded_log(replica: &Replica) -> impl Iterator<Item = &SegmentState> {
    let (folded, first_needed) =
        (replica.folded.head.position.lsn.0, checkpoint::log_start(replica).index);
    let busy = replica.family.segments.all_busy().map(|segment| &segment.state);
    // Entries that were cut away are needed by no view, whatever their LSNs.
    busy.filter(move |state| {
        let is_needed = state.last_index >= first_needed && state.last_lsn > folded;
        matches!(state.stream, Stream::Log) && is_needed
    })
}

/// Counts on; true when the estimates have been replaced.
pub fn step<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<bool, StoreError> {
    let mut job = match replica.maintenance.count.job.take() {
        Some(job) => job,
        None => begin(replica, core)?,
    };
    let views = counted_views(replica, core);
    for _ in 0..core.options.step_nodes.max(1) {
        match count_part(replica, core, &mut job, &views)? {
            Counted::Part => {}
            // What the next tree reads can be looked up now.
            Counted::Tree => break,
            Counted::All => {
                finish(replica, &job);
                replica.map_changed(core);
                return Ok(true);
            }
        }
    }
    replica.maintenance.count.job = Some(job);
    Ok(false)
}

/// Looks at the leaves that the next step of a count reads. A step is about one tree.
pub fn look_ahead<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let views = counted_views(replica, core);
    let is_learned = core.logical_of(replica.family.guid).is_learned();
    let job = replica.maintenance.count.job.as_ref();
    if let Some(from) = job.map_or((!is_learned).then_some(0), |job| job.learned_to) {
        if mutant::is("moved-blocks-learned-without-a-look-ahead") {
            return Ok(());
        }
        return logical::look_ahead_of_walk(replica, core, from, true);
    }
    let done = job.and_then(|job| job.done);
    let Some((key, root)) = views.iter().find(|(key, _)| done.is_none_or(|done| *key > done))
    else {
        let (table, logical) = job.map_or((0, 0), |job| (job.table_cursor, job.logical_cursor));
        return match job.is_some_and(|job| job.is_table_counted) {
            true => logical::look_ahead_of_walk(replica, core, logical, false),
            false => table::look_ahead_of_walk(replica, core, table),
        };
    };
    let from = done.map_or(0, |(newest, _)| if newest < key.0 { newest } else { 0 });
    let cursor = job.filter(|job| job.at == Some(*key)).map_or(0, |job| job.cursor);
    let step_nodes = core.options.step_nodes;
    tree::look_ahead_of_walk(&mut replica.io(core), *root, from, cursor, step_nodes, true)
}

/// Outcome of a part of a count.
enum Counted {
    Part,
    /// All of one tree.
    Tree,
    All,
}

/// Counts the next leaf.
fn count_part<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    job: &mut Recount,
    views: &[(ViewKey, Root)],
) -> Result<Counted, StoreError> {
    let of_tree = |goes_on: bool| if goes_on { Counted::Part } else { Counted::Tree };
    if let Some(from) = job.learned_to {
        job.learned_to = logical::learn_moved(replica, core, from)?;
        return Ok(of_tree(job.learned_to.is_some()));
    }
    let Some((key, root, from)) = job.next(views) else {
        if !job.is_table_counted {
            job.is_table_counted = !count_table(replica, core, job)?;
            return Ok(of_tree(!job.is_table_counted));
        }
        let goes_on = count_logical(replica, core, job)?;
        return Ok(if goes_on { Counted::Part } else { Counted::All });
    };
    let mut io = replica.io(core);
    let Some(part) = tree::next_part(&mut io, root, from, job.cursor)? else {
        (job.done, job.at, job.cursor) = (Some(key), None, 0);
        return Ok(Counted::Tree);
    };
    job.cursor = part.range().1;
    let Part::Leaf { node, .. } = part else { return Ok(Counted::Part) };
    let Some(loaded) = io.load(0, &node)? else { return Ok(Counted::Part) };
    let Node::Leaf(leaf) = &*loaded else { return Ok(Counted::Part) };
    let mut count = |place: u64, bytes: u64| {
        let held = replica.family.holder_of(core, place);
        let counts = |(unit, block): &(u32, Option<u64>)| {
            job.counts(*unit, block.map_or(BlockOf::Moved(place), BlockOf::At))
        };
        if let Some((unit, _)) = held.filter(counts) {
            *job.live.entry(unit).or_default() += bytes;
        }
    };
    count(node.place / BLOCK_SIZE as u64, node.length.into());
    for i in (0..LEAF_BLOCKS).filter(|i| leaf.blocks[*i].place != 0) {
        if leaf.blocks[i].version > from {
            count(leaf.blocks[i].place, BLOCK_SIZE as u64);
        }
    }
    Ok(Counted::Part)
}

/// Counts the next leaf of the table of segments; false: there is none.
fn count_table<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    job: &mut Recount,
) -> Result<bool, StoreError> {
    let Some(part) = table::next_of_table(replica, core, job.table_cursor)? else {
        return Ok(false);
    };
    job.table_cursor = part.range().1;
    count_node(replica, core, job, part);
    Ok(true)
}

/// Counts the next leaf of the map of moved blocks; false: there is none.
fn count_logical<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    job: &mut Recount,
) -> Result<bool, StoreError> {
    let Some(part) = logical::next_of_logical(replica, core, job.logical_cursor)? else {
        return Ok(false);
    };
    job.logical_cursor = part.range().1;
    count_node(replica, core, job, part);
    Ok(true)
}

fn count_node<D: Disk>(replica: &Replica, core: &Core<D>, job: &mut Recount, part: Part) {
    let Part::Leaf { node, .. } = part else { return };
    let block = node.place / BLOCK_SIZE as u64;
    let held = replica.family.holder_of(core, block);
    if let Some((unit, _)) = held.filter(|(unit, _)| job.counts(*unit, BlockOf::At(block))) {
        *job.live.entry(unit).or_default() += u64::from(node.length);
    }
}

fn finish(replica: &mut Replica, job: &Recount) {
    replica.family.segments.recounted(|state| {
        if state.sequence > job.through_sequence {
            return None;
        }
        let live = job.live.get(&state.unit).copied().unwrap_or(0);
        let is_settled = state.last_lsn == 0;
        let is_folded = !job.log.contains(&state.unit)
            || is_settled && mutant::is("log-folded-beside-a-count-is-counted");
        match job.open.get(&state.unit) {
            Some(_) if mutant::is("open-segments-not-counted") => None,
            Some(part) => Some((state.live_bytes + live).saturating_sub(part.counter)),
            None if state.stream != Stream::Log || is_folded => Some(live),
            None => None,
        }
    });
    if job.is_first && !job.log.is_empty() {
        replica.maintenance.count.after = Some(job.through_sequence);
    }
}
