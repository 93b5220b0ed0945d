//! Increments. Receiving: a shadow is a map of its own in the same family, fed slot by slot and
//! no part of the replica's state until the flip. Sending: slots of a pinned view above an LSN.

use quoin_replication::replica::store::StoreError;
use quoin_types::message::{Content, CutHead, IncrementEnd, Slot, SnapshotInfo};
use quoin_types::{BLOCK_SIZE, Lsn, mutant};

use crate::background::checkpoint;
use crate::background::relocation::{self, MovedBlock, Naming};
use crate::core::Core;
use crate::disk::Disk;
use crate::format::batch::Stream;
use crate::format::checkpoint::{
    Checkpoint, LogStart, LogicalState, SegmentState, ShadowState, SnapshotState, TableState,
};
use crate::format::node::{LEAF_BLOCKS, LEAF_SHIFT, Root};
use crate::log::history::Head;
use crate::log::memtable::Log;
use crate::map::tree::{self, Change, Edit};
use crate::rebuild::sending::{BLOCKS_A_PULL, WINDOW_HOLE_BLOCKS_MAX, WINDOWS_A_PULL};
use crate::replica::upper::Upper;
use crate::replica::{Image, Replica, Synced, may_lack};
use crate::space::logical;
use crate::space::segments::Claim;
use crate::space::table::{self, NextStep, Successor};

/// Edits that wait in memory to be merged into the shadow's map, where they are of few leaves.
const EDITS_PENDING_MAX: usize = 8192;
/// Leaves that one feed may be about: those of one pull, of which each window may begin and end
/// within one.
const LEAVES_A_FEED: u64 =
    2 * WINDOWS_A_PULL as u64 + (BLOCKS_A_PULL + WINDOW_HOLE_BLOCKS_MAX) / LEAF_BLOCKS as u64;

pub struct Shadow {
    state: ShadowState,
    edits: Vec<Edit>,
    crcs: Vec<u32>,
    /// Leaves that the edits are in: each is looked at when they are merged.
    leaves: u64,
    /// The end it was prepared for, and the sync that must be over before the flip.
    pub prepared: Option<(Box<IncrementEnd>, u64)>,
}

impl Shadow {
    pub fn restored(state: ShadowState) -> Self {
        Shadow { state, edits: Vec::new(), crcs: Vec::new(), leaves: 0, prepared: None }
    }

    fn push(&mut self, edit: Edit) {
        let before = self.edits.last().map(|before| (before.lba, before.blocks));
        self.leaves += more_leaves(before, (edit.lba, edit.blocks));
        self.edits.push(edit);
    }

    /// Without the edits that were not merged: a commit merges them first.
    pub fn state(&self) -> ShadowState {
        self.state.clone()
    }

    pub fn progress(&self) -> (u64, Lsn, u64) {
        (self.state.rebuild, self.state.from, self.state.cursor)
    }

    /// LSN of the last snapshot that it is complete for, or its start.
    pub fn cut(&self) -> Lsn {
        let newest = self.state.snapshots.iter().map(|s| s.info.lsn).max();
        newest.map_or(self.state.from, |lsn| lsn.max(self.state.from))
    }

    pub fn roots(&self) -> impl Iterator<Item = Root> + '_ {
        std::iter::once(self.state.root).chain(self.state.snapshots.iter().map(|s| s.root))
    }

    pub fn roots_mut(&mut self) -> impl Iterator<Item = &mut Root> {
        let snapshots = self.state.snapshots.iter_mut().map(|s| &mut s.root);
        std::iter::once(&mut self.state.root).chain(snapshots)
    }
}

/// Leaves that a stretch is in, without the one in which the stretch before it ends. Stretches are
/// an LBA and blocks, one at least.
fn more_leaves(before: Option<(u64, u32)>, stretch: (u64, u32)) -> u64 {
    let last_of = |(lba, blocks): (u64, u32)| {
        lba.saturating_add(u64::from(blocks).saturating_sub(1)) >> LEAF_SHIFT
    };
    let first = stretch.0 >> LEAF_SHIFT;
    let is_other = before.is_none_or(|before| last_of(before) != first);
    last_of(stretch) - first + u64::from(is_other)
}

/// Leaves that slots are in, without the one in which the stretch before them ends.
fn leaves_of(mut before: Option<(u64, u32)>, slots: &[Slot]) -> u64 {
    let mut leaves = 0;
    for slot in slots {
        leaves += more_leaves(before, (slot.lba, slot.blocks));
        before = Some((slot.lba, slot.blocks));
    }
    leaves
}

/// A rebuild from nothing is over, or given up.
fn end_table_of_flip(replica: &mut Replica) {
    replica.family.segments.next[Successor::AtFlip as usize] = None;
}

fn shadow_of(replica: &mut Replica, rebuild: u64) -> Result<&mut Shadow, StoreError> {
    let shadow = replica.shadow.as_mut().filter(|s| s.state.rebuild == rebuild);
    shadow.ok_or(StoreError::Rule("no such increment was begun"))
}

/// Begins an increment from this LSN, or goes on with the one of this name. `Ok(false)`: some of
/// what it needs was done (the fold up to there, another table of segments), and it is to be called again.
pub fn begin<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    rebuild: u64,
    from: Lsn,
) -> Result<bool, StoreError> {
    core.check_usable()?;
    replica.maintenance.fold_for_increment = None;
    let resumed = replica.shadow.as_ref().map(|s| &s.state);
    let resumed = resumed.filter(|state| (state.rebuild, state.from) == (rebuild, from));
    if let Some(state) = resumed {
        if from > Lsn::ZERO || mutant::is("table-of-a-flip-in-one-step") {
            return Ok(true);
        }
        let first_sequence = state.first_sequence;
        table::begin_next_table(replica, Successor::AtFlip, first_sequence, false);
        return Ok(table::step_next_table(replica, core, Successor::AtFlip)? != NextStep::GoesOn);
    }
    if from > replica.stable {
        return Err(StoreError::Rule("an increment starts above stable"));
    }
    let Some((root, snapshots)) = shadow_start(replica, core, from)? else {
        replica.maintenance.fold_for_increment = Some(from.0);
        return Ok(false);
    };
    if replica.shadow.take().is_some() {
        // Blocks and nodes that the abandoned shadow wrote are dead now.
        replica.maintenance.count.request();
    }
    // The shadow's blocks and nodes begin in segments of their own, which an abandoned or a
    // complete shadow then gives back as a whole.
    replica.io(core).flush()?;
    replica.family.close(Stream::Moved);
    replica.family.close(Stream::Nodes);
    let (cursor, first_sequence) = (0, core.sequence + 1);
    let state = ShadowState { rebuild, from, cursor, root, snapshots, first_sequence };
    replica.shadow = Some(Shadow::restored(state));
    end_table_of_flip(replica);
    if from == Lsn::ZERO && !mutant::is("table-of-a-flip-in-one-step") {
        table::begin_next_table(replica, Successor::AtFlip, first_sequence, true);
    }
    replica.family.changes += 1;
    replica.maintenance.dirty = true;
    Ok(true)
}

/// Drops the increment of a replica that gets entries again, and requests the count of what died with it. A
/// crash may bring it back, until the next entry. A prepared increment is dropped too: its session ended
/// before the flip, a flip now would lose the entry, and until then no fold and no commit frees anything.
pub fn abandon(replica: &mut Replica) {
    if replica.shadow.take().is_some() {
        end_table_of_flip(replica);
        replica.maintenance.count.request();
        replica.maintenance.dirty = true;
        replica.family.changes += 1;
    }
}

/// The map at `from` and the snapshots up to there. `None`: the log up to there is not folded
/// yet; a step of that was done.
fn shadow_start<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: Lsn,
) -> Result<Option<(Root, Vec<SnapshotState>)>, StoreError> {
    if from == Lsn::ZERO {
        return Ok(Some((Root::default(), Vec::new())));
    }
    if replica.folded.head.position.lsn < from && !fold_towards(replica, core, from)? {
        return Ok(None);
    }
    let folded = replica.folded.head.position.lsn;
    let snapshot = replica.folded.snapshots.iter().find(|s| s.info.lsn == from).map(|s| s.root);
    let root = match snapshot {
        Some(root) => root,
        None if from == folded => replica.folded.root,
        None => return Err(StoreError::Rule("an increment starts at an unknown point")),
    };
    let older = replica.folded.snapshots.iter().filter(|s| s.info.lsn <= from);
    Ok(Some((root, older.cloned().collect())))
}

/// Does one step of the fold up to `from`, or of the one under way; true once it is done.
fn fold_towards<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: Lsn,
) -> Result<bool, StoreError> {
    replica.family.changes += 1;
    if replica.maintenance.checkpoint.is_none() {
        checkpoint::begin_to(replica, from.0);
        if replica.maintenance.checkpoint.is_some() && !mutant::is("increment-begun-in-one-step") {
            // The nodes that its first step reads can be looked up now.
            return Ok(false);
        }
    }
    let all = mutant::is("increment-begun-in-one-step");
    let stepped = loop {
        match checkpoint::step(replica, core) {
            Ok(false) if all => {}
            stepped => break stepped,
        }
    };
    if let Err(error) = stepped {
        // The counters include work towards a result that is dropped.
        replica.maintenance.count.begin_anew();
        return Err(error);
    }
    Ok(replica.folded.head.position.lsn >= from)
}

/// Takes the slots of a pull, which end at this cursor, into the shadow. Its data is written at once, its
/// map as edits come together.
pub fn feed<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    rebuild: u64,
    slots: &[Slot],
    cursor: u64,
) -> Result<(), StoreError> {
    core.check_usable()?;
    shadow_of(replica, rebuild)?;
    // All of their map may have to be looked at in one go.
    if leaves_of(None, slots) > LEAVES_A_FEED && !mutant::is("feeds-of-any-length") {
        return Err(StoreError::Rule("a part of an increment is longer than what a pull finds"));
    }
    let mut data = Vec::new();
    for slot in slots {
        match &slot.content {
            Content::Bad => return Err(StoreError::Rule("an increment carries a bad block")),
            Content::Data { crc, data: bytes } if bytes.len() == BLOCK_SIZE => {
                let (lba, version, crc) = (slot.lba, slot.version.0, *crc);
                let block = MovedBlock::of(lba, version, crc, 0, bytes.clone());
                let block = block.ok_or(StoreError::Rule("a slot without its bytes"))?;
                data.push(block);
            }
            Content::Data { .. } => return Err(StoreError::Rule("a slot without its block")),
            Content::Hole => {}
        }
    }
    let places = relocation::write_moved(replica, core, &data, Naming::Place, Claim::Spare)?;
    let mut written = data.iter().zip(places);
    for slot in slots {
        if slot.blocks == 0 {
            continue;
        }
        make_room_for_edit(replica, core, slot.lba)?;
        let shadow = shadow_of(replica, rebuild)?;
        let version = slot.version.0;
        let change = match slot.content {
            Content::Hole | Content::Bad => Change::Hole { version },
            Content::Data { crc, .. } => {
                let (_, place) = written.next().expect("one place for each block");
                shadow.crcs.push(crc);
                Change::Data { version, place, crc_at: shadow.crcs.len() as u32 - 1 }
            }
        };
        shadow.push(Edit { lba: slot.lba, blocks: slot.blocks, change });
    }
    shadow_of(replica, rebuild)?.state.cursor = cursor;
    replica.maintenance.dirty = true;
    // Where there is no room now, there may be at the end.
    table::step_next_table(replica, core, Successor::AtFlip).map(drop)
}

/// Merges what waits if it is much, or if an edit at `lba` would not follow it.
fn make_room_for_edit<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    lba: u64,
) -> Result<(), StoreError> {
    let Some(shadow) = &replica.shadow else { return Ok(()) };
    let end = shadow.edits.last().map_or(0, |e| e.lba + u64::from(e.blocks));
    let is_much =
        shadow.edits.len() >= EDITS_PENDING_MAX || shadow.leaves >= core.options.step_nodes as u64;
    if is_much || lba < end {
        merge(replica, core)?;
    }
    Ok(())
}

/// Looks at what the next step of the fold reads that an increment from this LSN waits for.
pub fn look_ahead_of_begin<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    from: Lsn,
) -> Result<(), StoreError> {
    match replica.folded.head.position.lsn < from {
        true => checkpoint::look_ahead(replica, core),
        false => table::look_ahead_of_next(replica, core, Successor::AtFlip),
    }
}

/// Looks at the nodes that a feed of these slots reads, which are none unless it merges what waits.
pub fn look_ahead_of_feed<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    slots: &[Slot],
) -> Result<(), StoreError> {
    let table = may_lack(table::look_ahead_of_next(replica, core, Successor::AtFlip))?;
    let Some(shadow) = &replica.shadow else { return table };
    let stretch = |slot: &Slot| (slot.lba, slot.lba.saturating_add(slot.blocks.into()));
    let end = shadow.edits.last().map_or(0, |edit| edit.stretch().1);
    let follows = slots.iter().try_fold(end, |end, slot| {
        let (from, until) = stretch(slot);
        (from >= end).then_some(until)
    });
    let edits = shadow.edits.len() + slots.len();
    let before = shadow.edits.last().map(|edit| (edit.lba, edit.blocks));
    let leaves = shadow.leaves + leaves_of(before, slots);
    if follows.is_some() && edits < EDITS_PENDING_MAX && leaves < core.options.step_nodes as u64 {
        return table;
    }
    let root = shadow.state.root;
    let looked = look_ahead(replica, core);
    let stretches = slots.iter().map(stretch);
    let rest = tree::look_ahead(&mut replica.io(core), root, stretches, LEAVES_A_FEED as usize);
    table.and(looked).and(rest)
}

/// Looks at the nodes that the end of an increment reads, and a cut: the rest of its map, the map of
/// moved blocks, and the table of its segments.
pub fn look_ahead_of_end<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
) -> Result<(), StoreError> {
    let table = may_lack(table::look_ahead_of_next(replica, core, Successor::AtFlip))?;
    let moved = may_lack(logical::look_ahead_of_merge(replica, core))?;
    table.and(moved).and(look_ahead(replica, core))
}

/// Looks at the nodes that merging what waits reads.
pub fn look_ahead<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let Some(shadow) = replica.shadow.take() else { return Ok(()) };
    let (root, stretches) = (shadow.state.root, shadow.edits.iter().map(Edit::stretch));
    let looked = tree::look_ahead(&mut replica.io(core), root, stretches, LEAVES_A_FEED as usize);
    replica.shadow = Some(shadow);
    looked
}

/// Merges the edits that wait into the shadow's map.
pub fn merge<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let Some(mut shadow) = replica.shadow.take() else { return Ok(()) };
    let root = shadow.state.root;
    let merged = tree::update(&mut replica.io(core), root, &shadow.edits, &shadow.crcs, None);
    if let Ok(root) = merged {
        shadow.state.root = root;
        shadow.edits.clear();
        shadow.crcs.clear();
        shadow.leaves = 0;
    }
    replica.shadow = Some(shadow);
    merged.map(|_| ())
}

/// Ends one view of the increment: what was fed so far is this snapshot.
pub fn cut<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    rebuild: u64,
    info: SnapshotInfo,
    head: &CutHead,
) -> Result<(), StoreError> {
    core.check_usable()?;
    shadow_of(replica, rebuild)?;
    merge(replica, core)?;
    let state = &mut shadow_of(replica, rebuild)?.state;
    state.snapshots.retain(|s| s.info.id != info.id);
    if state.snapshots.len() >= quoin_types::message::SNAPSHOTS_MAX {
        return Err(StoreError::Rule("too many snapshots"));
    }
    let position = quoin_types::Position { epoch: head.head.epoch, lsn: info.lsn };
    let (root, chain, last_view) = (state.root, head.head.chain, head.last_view.clone());
    state.snapshots.push(SnapshotState { info, root, position, chain, last_view });
    state.cursor = 0;
    replica.maintenance.dirty = true;
    Ok(())
}

/// Ends the increment: it is complete up to this end, and may flip once all of it is durable. Until then the
/// replica's maps do not change.
pub fn prepare<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    rebuild: u64,
    end: &IncrementEnd,
) -> Result<(), StoreError> {
    core.check_usable()?;
    let state = &shadow_of(replica, rebuild)?.state;
    let complete = end.snapshots.iter().all(|wanted| {
        wanted.lsn == end.position.lsn || state.snapshots.iter().any(|s| s.info == *wanted)
    });
    if !complete {
        return Err(StoreError::Rule("an increment lacks a snapshot that its end lists"));
    }
    // From here to the flip no block and no node of the shadow may move: what the record
    // will refer to is what the next sync makes durable.
    replica.maintenance.clean = None;
    while !logical::merge_moved(replica, core)? {}
    merge(replica, core)?;
    let state = &shadow_of(replica, rebuild)?.state;
    let (empty_start, first_sequence) = (state.from == Lsn::ZERO, state.first_sequence);
    if empty_start {
        table::complete_table_of_flip(replica, core, first_sequence)?;
    }
    replica.io(core).flush()?;
    let ticket = core.tickets.request().0;
    shadow_of(replica, rebuild)?.prepared = Some((Box::new(end.clone()), ticket));
    replica.family.changes += 1;
    Ok(())
}

/// Puts the shadow in the replica's place, in one record: its map, its snapshots and its history are the
/// replica's, and the log before it is given up.
pub fn flip<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    rebuild: u64,
) -> Result<(), StoreError> {
    core.check_usable()?;
    let synced = core.tickets.synced;
    let shadow = shadow_of(replica, rebuild)?;
    let Some((end, ticket)) = &shadow.prepared else {
        return Err(StoreError::Rule("a flip without a prepared increment"));
    };
    if *ticket > synced && !mutant::is("flip-before-the-shadow-is-on-media") {
        return Err(StoreError::Rule("a flip before the increment is durable"));
    }
    let head = Head::from_end(end);
    let state = &shadow.state;
    let mut snapshots = state.snapshots.clone();
    snapshots.retain(|s| end.snapshots.contains(&s.info));
    for info in &end.snapshots {
        if !snapshots.iter().any(|s| s.info == *info) {
            snapshots.push(SnapshotState {
                info: *info,
                root: state.root,
                position: head.position,
                chain: head.chain,
                last_view: head.last_view.clone(),
            });
        }
    }
    snapshots.sort_by_key(|s| s.info.lsn);
    let (root, first_sequence, empty_start) =
        (state.root, state.first_sequence, state.from == Lsn::ZERO);
    // A shadow that began empty shares nothing with what was there before, but for what clones
    // show of it.
    let keeps_bases =
        replica.family.relatives.kept_through > 0 && !mutant::is("bases-forgotten-at-a-flip");
    let frees_old = empty_start && replica.pins.is_empty() && !keeps_bases;
    let forgets = mutant::is("count-forgotten-at-a-flip");
    let of = &replica.family.segments;
    let next = of.next[Successor::AtFlip as usize].as_ref();
    if frees_old && next.is_none() {
        return Err(StoreError::Rule("a flip without the table of its segments"));
    }
    let (segments, table): (Vec<SegmentState>, _) = match frees_old {
        true => (of.unrecorded_at_flip(), next.and_then(|next| next.state(!forgets))),
        false => (of.unrecorded(), table::table_state(replica)),
    };
    let log = LogStart {
        index: replica.family.log_end.next_index,
        previous: replica.family.log_end.previous,
        ..LogStart::default()
    };
    let checkpoint = Checkpoint {
        root,
        head: head.clone(),
        stable: head.position.lsn,
        snapshots: snapshots.clone(),
        log,
        // Counters of the old map are too high: a start after a crash counts anew as well.
        segments: segments.into_iter().map(|s| s.recorded(!forgets)).collect(),
        sequence: core.sequence,
        shadow: None,
        table: table.map(|table| TableState { too_high: !forgets, ..table }),
        logical: core.logical_of(replica.family.guid).state().map(|state| match frees_old {
            // The map is about segments that go.
            true => LogicalState { next: state.next, ..LogicalState::default() },
            false => state,
        }),
    };
    let mut relatives = checkpoint::relatives_state(replica, core);
    if empty_start {
        // All of it is its own now.
        relatives.base = None;
    }
    let given_up = replica.family.relatives.base.filter(|_| relatives.base.is_none());
    checkpoint::record_state(replica, core, checkpoint.encode(), relatives.encode())?;
    let recorded = replica.maintenance.take_given_up_bases();
    recorded.into_iter().for_each(|base| core.bases.end_use(base));
    if let Some(base) = given_up {
        replica.family.relatives.base = None;
        replica.maintenance.flatten = None;
        // What a transfer holds on to shows the base.
        replica.pins.clear();
        core.bases.end_use(base);
    }

    let ticket = core.tickets.request().0;
    let ticket = if mutant::is("flip-frees-by-an-older-sync") { 0 } else { ticket };
    if frees_old {
        core.freed.add_all(ticket, replica.family.segments.leave_older(first_sequence));
        core.logical_of(replica.family.guid).begin_anew(replica.family.segments.iter());
        replica.family.segments.change_tables(Successor::AtFlip);
        // The one that was lost is given up with all else.
        replica.family.segments.next = [None, None];
    }
    end_table_of_flip(replica);
    let open = replica.family.open;
    replica.family.open = open.map(|u| u.filter(|u| replica.family.segments.busy(*u).is_some()));
    replica.family.close(Stream::Log);
    replica.family.changes += 1;
    if let Some(commit) = replica.maintenance.commit.take() {
        // Its record would bring the old state back.
        replica.maintenance.pending_free.extend(commit.frees);
    }
    replica.maintenance.fold_for_increment = None;
    replica.maintenance.checkpoint = None;
    replica.maintenance.clean = None;
    replica.maintenance.quarantined = None;
    replica.shadow = None;
    replica.maintenance.count.begin_anew();
    replica.maintenance.dirty = true;
    replica.frozen.clear();
    replica.stable = head.position.lsn;
    replica.synced = Synced::default();
    core.tickets.written.add(replica.identity.guid);
    replica.log = Log::after(head.position.lsn);
    replica.upper = Upper::default();
    replica.folded = Image { head, root, snapshots };
    replica.replay_head();
    replica.family.forget_log_before(checkpoint::log_start(replica).index);
    Ok(())
}
