//! Checkpoints: folding the log into the map, and recording the result durably.
//!
//! A checkpoint job folds entries ≤ its target in bounded steps into a map of its own; reads go
//! on with the old map and the log until it is done. Then a **commit** makes the new state what
//! recovery begins with, in an order that a power cut cannot break: nodes and moved blocks are
//! written, synced, only then the record is appended to the metadata ring, synced again, and
//! only then the space that it no longer refers to is free.

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, EntryKind, Lsn, mutant};

use crate::background::difference::LeavingView;
use crate::background::reverts::{self, RevertFold};
use crate::clones::Relatives;
use crate::core::{Core, Kept};
use crate::disk::Disk;
use crate::format::checkpoint::{Checkpoint, LogStart, SnapshotState};
use crate::format::node::LEAF_SHIFT;
use crate::format::record::Record;
use crate::format::relatives::{BaseId, RelativesState};
use crate::log::memtable_tree::Memtable;
use crate::map::tree::{self, Change, Edit};
use crate::rebuild::shadow;
use crate::replica::{Image, Replica, may_lack};
use crate::space::freed;
use crate::space::logical::{self, Logical};
use crate::space::table;

/// Entries of the log that one step collects.
const ENTRIES_A_STEP: u64 = 4096;
/// Edits that one step takes up; how many of them it comes to is counted in nodes.
const EDITS_A_STEP: usize = 1024;

/// A fold under way. It goes in stages: the entries up to the next one that changes the views are
/// collected, what is newest of them is folded in the order of its LBAs, then that one entry.
pub struct CheckpointJob {
    target: u64,
    pub(super) work: Image,
    /// The first entry that is not in `work` or in `newest`.
    next: u64,
    /// The first entry that is no part of the stage.
    stage_end: u64,
    /// The stage's entries, and the LBA from which on they are not in `work` yet.
    newest: Memtable,
    cursor: u64,
    /// The entry that ends the stage.
    special: Option<u64>,
    /// Snapshots that the job's entries deleted.
    leaving: Vec<LeavingView>,
    /// A Revert that ended the stage and is not in `work` yet.
    pub(super) revert: Option<RevertFold>,
    /// Edits of a step, kept from step to step.
    pub(super) part: Edits,
}

/// Part of a stage on its way into the map.
#[derive(Default)]
pub(super) struct Edits {
    /// The cursor that they were made for.
    made_for: Option<u64>,
    pub edits: Vec<Edit>,
    pub crcs: Vec<u32>,
    end: u64,
}

impl Edits {
    pub fn clear(&mut self) {
        self.edits.clear();
        self.crcs.clear();
    }

    /// Adds the change of the blocks from `start` to `end`, which follow all others.
    pub fn push(&mut self, start: u64, end: u64, change: Change) {
        self.edits.push(Edit { lba: start, blocks: (end - start) as u32, change });
    }
}

/// A state on its way to the ring.
pub struct Commit {
    /// The sync that makes everything durable to which the record refers.
    pub ticket: u64,
    pub record: bytes::Bytes,
    /// Its place among its relatives, with the roots of its bases.
    pub relatives: RelativesState,
    pub frees: Vec<(u32, u32)>,
    /// Bases that the state does not show any more.
    pub given_up_bases: Vec<BaseId>,
}

/// Up to where the log may be folded now.
pub fn foldable(replica: &Replica) -> u64 {
    let wanted = replica.maintenance.fold_for_increment.unwrap_or(u64::MAX);
    replica.stable.0.min(wanted)
}

/// Begins folding what is stable, less what is kept for replicas that lag.
pub fn begin(replica: &mut Replica, log_keep_bytes: u64) {
    let mut target = foldable(replica).min(replica.log.lsn_before_last(log_keep_bytes));
    if mutant::is("base-folded-above-stable") {
        target = replica.head.position.lsn.0;
    }
    begin_to(replica, target);
}

pub fn begin_to(replica: &mut Replica, target: u64) {
    let work = replica.folded.clone();
    let next = replica.log.first_lsn();
    if replica.maintenance.checkpoint.is_none() && target >= next {
        let newest = Memtable::default();
        let mut job = CheckpointJob {
            target,
            work,
            next,
            stage_end: next,
            newest,
            cursor: u64::MAX,
            special: None,
            leaving: Vec::new(),
            revert: None,
            part: Edits::default(),
        };
        begin_stage(replica, &mut job);
        replica.maintenance.checkpoint = Some(job);
    }
}

/// Folds on; true once the job is done and its result is in place.
pub fn step<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<bool, StoreError> {
    let Some(mut job) = replica.maintenance.checkpoint.take() else { return Ok(true) };
    let stepped = step_job(replica, core, &mut job);
    match stepped {
        Ok(true) => {
            core.keep_memtable(std::mem::take(&mut job.newest));
            finish(replica, job);
            replica.map_changed(core);
            Ok(true)
        }
        Ok(false) => {
            replica.maintenance.checkpoint = Some(job);
            Ok(false)
        }
        // The work is forgotten; the log still has everything.
        Err(error) => Err(error),
    }
}

fn step_job<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    job: &mut CheckpointJob,
) -> Result<bool, StoreError> {
    if job.next == job.stage_end && job.cursor < u64::MAX {
        fold_some(replica, core, job)?;
    } else if job.next < job.stage_end {
        gather(replica, core, job);
    }
    if job.next < job.stage_end || job.cursor < u64::MAX {
        return Ok(false);
    }
    if let Some(lsn) = job.special.take() {
        fold_special(replica, job, lsn);
        job.next = lsn + 1;
        if job.revert.is_some() {
            // The nodes that it reads can be looked up now.
            return Ok(false);
        }
    }
    if job.revert.is_some() && !reverts::fold_revert(replica, core, job)? {
        return Ok(false);
    }
    if job.next > job.target {
        return Ok(true);
    }
    begin_stage(replica, job);
    Ok(false)
}

fn begin_stage(replica: &Replica, job: &mut CheckpointJob) {
    let special = replica.log.special_from(job.next).find(|(_, kind)| {
        matches!(
            kind,
            EntryKind::Snapshot { .. }
                | EntryKind::DeleteSnapshot { .. }
                | EntryKind::Revert { .. }
        )
    });
    job.special = special.map(|(lsn, _)| lsn).filter(|lsn| *lsn <= job.target);
    job.stage_end = job.special.unwrap_or(job.target + 1);
    job.newest.clear();
    job.cursor = 0;
    job.part.made_for = None;
}

/// Collects some of the stage's entries.
fn gather<D: Disk>(replica: &mut Replica, core: &mut Core<D>, job: &mut CheckpointJob) {
    if job.newest.bytes() == 0 {
        job.newest = std::mem::take(&mut core.buffers.memtable);
    }
    let end = job.stage_end.min(job.next + ENTRIES_A_STEP);
    // Entries lie one behind the other, many of them in one unit: its number, the place of its
    // first entry, and the bytes of all.
    let mut run = (None, 0, 0);
    for lsn in job.next..end {
        let Some(record) = replica.log.get(lsn).copied() else { continue };
        let kind = replica.log.kind(lsn, &record);
        let part = replica.log.part(lsn);
        job.work.head.apply(record.position(lsn), quoin_types::Chain(record.chain), &kind, part);
        if record.has_range() {
            job.newest.insert(record.lba, record.end(), lsn);
        }
        if record.place != 0 {
            let unit = core.superblock.unit_of(record.place);
            if unit != run.0 && run.2 > 0 {
                replica.family.sub_live(core, run.1, run.2);
                run.2 = 0;
            }
            if run.2 == 0 {
                (run.0, run.1) = (unit, record.place);
            }
            run.2 += u64::from(record.blocks) * BLOCK_SIZE as u64;
        }
    }
    if run.2 > 0 {
        replica.family.sub_live(core, run.1, run.2);
    }
    job.next = end;
}

/// Folds some of what was collected, up to where the nodes end that a step may look at.
fn fold_some<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    job: &mut CheckpointJob,
) -> Result<(), StoreError> {
    let nodes_max = nodes_a_step(core);
    let mut part = part_of(replica, core, job, nodes_max);
    part.made_for = None;
    let kept = kept_beside_fold(replica, job);
    let mut io = replica.io(core);
    io.kept = kept;
    let (root, stopped) =
        tree::update_some(&mut io, job.work.root, &part.edits, &part.crcs, None, nodes_max)?;
    job.work.root = root;
    let until = match mutant::is("fold-goes-on-behind-where-it-stopped") {
        true => part.end,
        false => stopped.unwrap_or(part.end),
    };
    for edit in part.edits.iter().filter(|edit| edit.lba < until) {
        if let Change::Data { place, .. } = edit.change {
            let blocks = u64::from(edit.blocks).min(until - edit.lba);
            replica.family.add_live(core, place, blocks * BLOCK_SIZE as u64);
        }
    }
    (job.cursor, job.part) = (until, part);
    Ok(())
}

/// Looks at the nodes that the next step of a fold reads.
pub fn look_ahead<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let Some(mut job) = replica.maintenance.checkpoint.take() else { return Ok(()) };
    let mut looked = Ok(());
    if job.next == job.stage_end && job.cursor < u64::MAX {
        let nodes_max = nodes_a_step(core);
        job.part = part_of(replica, core, &mut job, nodes_max);
        let stretches = job.part.edits.iter().map(Edit::stretch);
        looked = tree::look_ahead(&mut replica.io(core), job.work.root, stretches, nodes_max);
    } else if let Some(revert) = job.revert
        && !mutant::is("revert-folded-without-a-look-ahead")
    {
        looked = reverts::look_ahead(replica, core, job.work.root, revert);
    }
    replica.maintenance.checkpoint = Some(job);
    looked
}

/// Looks at the nodes that the next step of a commit reads.
pub fn look_ahead_of_commit<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
) -> Result<(), StoreError> {
    let shadow = may_lack(shadow::look_ahead(replica, core))?;
    if mutant::is("commit-without-a-look-ahead") {
        return shadow;
    }
    let moved = may_lack(logical::look_ahead_of_merge(replica, core))?;
    let table = may_lack(table::look_ahead(replica, core))?;
    shadow.and(moved).and(table)
}

/// The edits of the next step of a fold, which may have been made before.
fn part_of<D: Disk>(
    replica: &Replica,
    core: &Core<D>,
    job: &mut CheckpointJob,
    nodes_max: usize,
) -> Edits {
    let mut part = std::mem::take(&mut job.part);
    if part.made_for != Some(job.cursor) {
        edits_from(replica, core, job, nodes_max, &mut part);
        part.made_for = Some(job.cursor);
    }
    part
}

/// Next edits of a stage, about as many as one step can do.
fn edits_from<D: Disk>(
    replica: &Replica,
    core: &Core<D>,
    job: &CheckpointJob,
    nodes_max: usize,
    part: &mut Edits,
) {
    part.clear();
    part.end = u64::MAX;
    let (mut leaves, mut last_leaf) = (0, u64::MAX);
    for (start, end, lsn) in job.newest.range(job.cursor, u64::MAX) {
        if part.edits.len() >= EDITS_A_STEP || leaves > nodes_max as u64 {
            part.end = start;
            break;
        }
        let (first, last) = (start >> LEAF_SHIFT, (end - 1) >> LEAF_SHIFT);
        leaves += last - first + u64::from(first != last_leaf);
        last_leaf = last;
        let Some(record) = replica.log.get(lsn) else { continue };
        // Longer holes than an edit can say do not occur: entries are shorter.
        let blocks = (end - start) as u32;
        let change = match record.place {
            0 if mutant::is("trim-without-version") => Change::Hole { version: 0 },
            0 => Change::Hole { version: lsn },
            place => {
                let crc_at = part.crcs.len() as u32;
                let offset = start - record.lba;
                let crcs = replica.log.crcs(record).skip(offset as usize).take(blocks as usize);
                part.crcs.extend(crcs);
                let place = replica.family.named(core, place + offset);
                Change::Data { version: lsn, place, crc_at }
            }
        };
        part.edits.push(Edit { lba: start, blocks, change });
    }
}

fn fold_special(replica: &mut Replica, job: &mut CheckpointJob, lsn: u64) {
    let Some(record) = replica.log.get(lsn).copied() else { return };
    let kind = replica.log.kind(lsn, &record);
    let work = &mut job.work;
    work.head.apply(record.position(lsn), quoin_types::Chain(record.chain), &kind, None);
    match kind {
        EntryKind::Snapshot { id, hidden } => {
            let (lsn, blocks) = (Lsn(lsn), work.head.volume_blocks);
            work.snapshots.push(SnapshotState {
                info: quoin_types::message::SnapshotInfo { id, lsn, hidden, blocks },
                root: work.root,
                position: work.head.position,
                chain: work.head.chain,
                last_view: work.head.last_view.clone(),
            });
        }
        EntryKind::DeleteSnapshot { id } => {
            let gone = work.snapshots.extract_if(.., |s| s.info.id == id);
            job.leaving.extend(gone.map(|s| LeavingView::new(s.root, s.info.lsn.0)));
        }
        EntryKind::Revert { id } => {
            let (cursor, blocks) = (0, work.head.volume_blocks);
            let kept = work.snapshots.iter().find(|s| s.info.id == id);
            job.revert = kept.map(|s| {
                let (since, kept) = (s.info.lsn.0, s.root);
                RevertFold { lsn, since, kept, cursor, blocks }
            });
            replica.maintenance.count.request();
        }
        _ => {}
    }
}

/// Blocks and nodes that views keep when the job's map gives them up.
pub(super) fn kept_beside_fold(replica: &Replica, job: &CheckpointJob) -> Kept {
    let mut kept = replica.kept_beside(&job.work);
    let leaving = job.leaving.iter().map(|view| view.lsn);
    kept.through = leaving.fold(kept.through, u64::max);
    kept
}

fn finish(replica: &mut Replica, job: CheckpointJob) {
    replica.folded = job.work;
    replica.maintenance.count.leave(job.leaving);
    replica.log.drop_through(job.target);
    let first_needed = log_start(replica).index;
    replica.family.forget_log_before(first_needed);
    let folded = replica.folded.head.position.lsn;
    replica.frozen.fold(folded);
    if replica.upper.has_reverts() {
        replica.upper = replica.upper_at(replica.head.position.lsn);
    } else {
        replica.upper.memtable.forget_through(job.target);
    }
    (replica.maintenance.dirty, replica.maintenance.commit_waits) = (true, false);
}

/// Folds everything up to `target` at once.
pub fn run_now<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    target: u64,
) -> Result<(), StoreError> {
    while replica.maintenance.checkpoint.is_some() && !step(replica, core)? {}
    begin_to(replica, target);
    while !step(replica, core)? {}
    Ok(())
}

/// Where recovery has to begin reading the log.
pub fn log_start(replica: &Replica) -> LogStart {
    use crate::format::batch::Stream;
    replica.log.start().unwrap_or_else(|| LogStart {
        sequence: replica.family.open_segment(Stream::Log).map_or(0, |s| s.state.sequence),
        offset_blocks: replica.family.open_segment(Stream::Log).map_or(0, |s| s.state.used_blocks),
        index: replica.family.log_end.next_index,
        previous: replica.family.log_end.previous,
    })
}

pub fn state<D: Disk>(replica: &Replica, core: &Core<D>) -> Checkpoint {
    let too_high = replica.maintenance.count.is_too_high();
    let segments =
        replica.family.segments.unrecorded().into_iter().map(|s| s.recorded(too_high)).collect();
    Checkpoint {
        root: replica.folded.root,
        head: replica.folded.head.clone(),
        stable: replica.stable,
        snapshots: replica.folded.snapshots.clone(),
        log: log_start(replica),
        segments,
        sequence: core.sequence,
        shadow: replica.shadow.as_ref().map(|s| s.state()),
        table: table::table_state(replica),
        logical: core.logical.get(&replica.identity.guid).and_then(Logical::state),
    }
}

/// Writes what the current state refers to and asks for the sync that its record waits for. Where
/// the table of segments has to be written anew, or many blocks were moved, it does some of that, and is
/// called again.
pub fn begin_commit<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    if replica.maintenance.commit.is_some() {
        return Ok(());
    }
    shadow::merge(replica, core)?;
    if !logical::merge_moved(replica, core)? || !table::write_table(replica, core)? {
        return Ok(());
    }
    replica.io(core).flush()?;
    let record = state(replica, core).encode();
    core.logical_of(replica.identity.guid).stated();
    let mut frees = std::mem::take(&mut replica.maintenance.pending_free);
    if mutant::is("freed-before-its-checkpoint") {
        for (unit, units) in frees.drain(..) {
            core.freed.add(0, unit, units);
        }
        freed::release(core, 0);
    }
    let ticket = core.tickets.request().0;
    if mutant::is("checkpoint-recorded-before-it-is-on-media") {
        core.record(Record::Checkpoint(replica.identity.guid, record.clone()))?;
    }
    core.tickets.committing.add(replica.identity.guid);
    let relatives = relatives_state(replica, core);
    let given_up_bases = std::mem::take(&mut replica.maintenance.given_up_bases);
    replica.maintenance.commit = Some(Commit { ticket, record, relatives, frees, given_up_bases });
    replica.maintenance.dirty = false;
    Ok(())
}

/// A sync is done: records the state that waited for it.
pub fn finish_commit<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    synced: u64,
) -> Result<(), StoreError> {
    let Some(commit) = replica.maintenance.commit.take_if(|c| c.ticket <= synced) else {
        return Ok(());
    };
    let recorded = record_state(replica, core, commit.record, commit.relatives.encode());
    if let Err(error) = recorded {
        // The state before it stands, and what that refers to is not free: the next fold's
        // commit, which may be smaller, frees it too.
        replica.maintenance.pending_free.extend(commit.frees);
        replica.maintenance.given_up_bases.extend(commit.given_up_bases);
        (replica.maintenance.dirty, replica.maintenance.commit_waits) = (true, true);
        return Err(error);
    }
    commit.given_up_bases.into_iter().for_each(|base| core.bases.end_use(base));
    core.logical_of(replica.identity.guid).recorded();
    // Segments that the disk refused to read are tried again: read errors may pass.
    replica.family.segments.try_some_again();
    let ticket = core.tickets.request().0;
    commit.frees.iter().for_each(|(unit, units)| core.freed.add(ticket, *unit, *units));
    Ok(())
}

/// A replica's place among its relatives, as a record states it.
pub fn relatives_state<D: Disk>(replica: &Replica, core: &Core<D>) -> RelativesState {
    let Relatives { base, is_remnant, .. } = replica.family.relatives;
    RelativesState { base, is_remnant, bases: core.bases.states(replica.identity.guid) }
}

/// Records a checkpoint with the replica's place among its relatives, both or none: its bases lie
/// in the segments that the checkpoint lists.
pub fn record_state<D: Disk>(
    replica: &Replica,
    core: &mut Core<D>,
    checkpoint: bytes::Bytes,
    relatives: bytes::Bytes,
) -> Result<(), StoreError> {
    let guid = replica.identity.guid;
    let known = core.durable.replicas().get(&guid).map(|durable| &durable.relatives);
    let is_known = known.is_some_and(|known| *known == relatives);
    if is_known || mutant::is("bases-not-recorded-with-their-segments") {
        return core.record(Record::Checkpoint(guid, checkpoint));
    }
    core.record_all([Record::Checkpoint(guid, checkpoint), Record::Relatives(guid, relatives)])
}

/// Nodes that one step of a fold looks at.
fn nodes_a_step<D>(core: &Core<D>) -> usize {
    let all = mutant::is("fold-in-one-step");
    if all { usize::MAX } else { core.options.step_nodes.max(1) }
}
