//! Clean-up: what is still needed of a segment is moved out of it, and the segment is free.
//!
//! Which blocks are needed is asked of every view that is kept (the live map, snapshots, pins,
//! a shadow), never of a counter: counters only choose the victim. Blocks with a logical place
//! are moved in the order of these, and only the map of moved blocks changes
//! ([`crate::space::logical`]). Others are moved in LBA order, so that runs form again, and change
//! the leaves of every view; views that share nodes go on sharing them. Nodes are moved by writing
//! them anew. Everything is done in steps of about a megabyte.

use std::ops::Range;

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, Lsn, mutant};

use crate::background::difference::LeavingView;
use crate::background::listing::Listing;
use crate::background::relocation::{self, MovedBlock};
use crate::background::segment_data::SegmentData;
use crate::core::{BadBlock, Core, Kept};
use crate::disk::Disk;
use crate::format::batch::Stream;
use crate::format::node::{BAD_PLACE, BlockAt, LEAF_BLOCKS, Root};
use crate::map::tree::{self, Change, Edit, Memo};
use crate::rebuild::shadow;
use crate::replica::{Replica, Source, may_lack};
use crate::space::logical::{self, Moves, is_logical};
use crate::space::segments::Claim;
use crate::space::table;

/// Blocks looked at in one step.
const BLOCKS_A_STEP: usize = 256;

/// A block of a segment that is being emptied.
#[derive(Clone, Copy)]
pub struct Candidate {
    pub lba: u64,
    pub version: u64,
    /// Where it lies.
    pub place: u64,
    /// How leaves name it: a logical place, or where it lies.
    pub name: u64,
    pub crc: u32,
}

impl Candidate {
    /// Order of moving: logical places behind all others, which go by LBA.
    fn order(&self) -> (u64, u64, u64) {
        match is_logical(self.name) {
            true => (self.name, self.place, 0),
            false => (0, self.lba, self.version),
        }
    }
}

/// A view whose blocks must survive.
#[derive(PartialEq, Eq)]
struct KeptView {
    root: Root,
    /// The newest version that it can hold.
    newest: u64,
    /// The first LBA that it shows still.
    from: u64,
}

impl KeptView {
    fn whole(root: Root, newest: u64) -> Self {
        KeptView { root, newest, from: 0 }
    }

    fn may_show(&self, lba: u64, version: u64) -> bool {
        version <= self.newest && lba >= self.from
    }
}

/// A segment that is being emptied.
pub struct CleanJob {
    unit: u32,
    blocks: Vec<Candidate>,
    nodes: Vec<Edit>,
    done: usize,
    /// Some of it was moved, and is here no more.
    moved: bool,
    /// Some of it was copied, and is read here until all of it was.
    copied: bool,
    moves: Moves,
    /// Bytes of nodes that the replica had written when the job began.
    written_before: u64,
    /// Logical places of its own blocks.
    own: Range<u64>,
    data: SegmentData,
    /// The next step's blocks, as they were looked up ahead of it.
    looked: Option<Looked>,
}

/// Which of some blocks these views show.
struct Looked {
    views: Vec<KeptView>,
    shown: Vec<bool>,
}

/// Returns true if no segment of the replica may be emptied now.
pub fn is_blocked(replica: &Replica) -> bool {
    replica.maintenance.checkpoint.is_some() || replica.is_prepared()
}

/// Segments that may be cleaned now, by a look at all: closed, and no part of the log that is
/// kept. What [`crate::space::segment_table`] knows is compared with it.
#[cfg(any(test, debug_assertions))]
pub fn victims(
    replica: &Replica,
) -> impl Iterator<Item = crate::format::checkpoint::SegmentState> + '_ {
    let first_needed = crate::background::checkpoint::log_start(replica).index;
    let blocked = is_blocked(replica);
    replica
        .family
        .segments
        .iter()
        .filter(move |s| !blocked && !replica.family.open.contains(&Some(s.unit)))
        .filter(|s| !replica.family.segments.is_aside(s.unit))
        .filter(move |s| {
            s.stream != Stream::Log
                || s.last_index < first_needed
                || mutant::is("cleaned-above-stable")
        })
}

/// Begins to empty a segment, of which as much is listed already as was looked at. `Ok(false)`: its
/// headers cannot be read, so it stays.
pub fn begin<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    unit: u32,
    mut listing: Listing,
) -> Result<bool, StoreError> {
    shadow::merge(replica, core)?;
    replica.io(core).flush()?;
    let complete = listing.go_on(core)?;
    if complete {
        let own = listing.own();
        let Listing { mut blocks, mut nodes, data, .. } = listing;
        blocks.sort_unstable_by_key(Candidate::order);
        nodes.sort_unstable_by_key(|e| e.lba);
        let moves = Moves::default();
        let (done, moved, copied) = (0, false, false);
        let (written_before, looked) = (replica.nodes.written_bytes, None);
        replica.maintenance.clean = Some(CleanJob {
            unit,
            blocks,
            nodes,
            done,
            moved,
            copied,
            moves,
            written_before,
            own,
            data,
            looked,
        });
    }
    Ok(complete)
}

/// Cleans on; true once the segment is empty and waits for the next commit to be free.
pub fn step<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<bool, StoreError> {
    let Some(mut job) = replica.maintenance.clean.take() else { return Ok(true) };
    shadow::merge(replica, core)?;
    let end = end_of_step(&job);
    if !job.blocks.is_empty() {
        let step = &job.blocks[job.done..end];
        let named = step.iter().map(|block| (block.name, block.place));
        let stand = logical::stand_for_their_names(replica, core, job.unit, named)?;
        let live = live_of(replica, core, step, &stand, job.looked.take())?;
        let copies = live.iter().filter(|c| job.own.contains(&c.name)).count();
        let gone = names_gone(step, &stand, &live, &job.own);
        let moved = move_blocks(replica, core, &live, gone, &mut job.data, &mut job.moves)?;
        if moved != Moved::All {
            match moved {
                Moved::Bad => replica.family.segments.set_aside_for_repair(job.unit),
                // The disk may give them another time, after the next commit: the segment stays.
                _ => replica.family.segments.set_aside(job.unit),
            }
            if job.moved || job.copied {
                // Moved blocks were counted in their new segment, and in this one as well.
                replica.maintenance.count.begin_anew();
            }
            replica.maintenance.dirty |= job.moved;
            core.logical_of(replica.family.guid).forget_copies(job.own);
            return Ok(true);
        }
        job.data.end_of_step();
        job.moved |= copies < live.len();
        job.copied |= copies > 0;
    } else if !job.nodes.is_empty() {
        renew(replica, core, &job.nodes[job.done..end])?;
    }
    job.done = end;
    if job.done < job.blocks.len().max(job.nodes.len()) {
        replica.maintenance.clean = Some(job);
        return Ok(false);
    }
    if let Some(segment) = replica.family.segments.remove(job.unit) {
        logical::emptied(
            replica,
            core,
            &segment,
            job.blocks.iter().map(|block| block.name),
            &job.moves,
        );
        replica.maintenance.pending_free.push((job.unit, segment.units));
        if segment.stream == Stream::Nodes {
            let freed = u64::from(segment.used_blocks) * BLOCK_SIZE as u64;
            let written = replica.nodes.written_bytes.saturating_sub(job.written_before);
            replica.maintenance.node_gain.emptied(segment.sequence, freed, written);
        }
    }
    replica.maintenance.dirty = true;
    Ok(true)
}

/// Where the next step ends among what is moved.
fn end_of_step(job: &CleanJob) -> usize {
    (job.done + BLOCKS_A_STEP).min(job.blocks.len().max(job.nodes.len()))
}

/// Looks at what the next step of a clean-up reads: nodes first, then the blocks that it moves.
pub fn look_ahead<D: Disk>(replica: &mut Replica, core: &mut Core<D>) -> Result<(), StoreError> {
    let Some(mut job) = replica.maintenance.clean.take() else { return Ok(()) };
    let looked = look_ahead_of_job(replica, core, &mut job);
    replica.maintenance.clean = Some(job);
    looked
}

fn look_ahead_of_job<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    job: &mut CleanJob,
) -> Result<(), StoreError> {
    let end = |count: usize| end_of_step(job).min(count);
    let candidates = &job.blocks[job.done.min(job.blocks.len())..end(job.blocks.len())];
    let nodes = &job.nodes[job.done.min(job.nodes.len())..end(job.nodes.len())];
    job.looked = None;
    let (views, mut lacking) = (views(replica, core), Ok(()));
    for view in &views {
        let io = &mut replica.io(core);
        lacking = lacking.and(tree::look_ahead_of_renewals(io, view.root, nodes));
    }
    lacking = lacking.and(logical::look_ahead_of_renewals(replica, core, nodes));
    lacking = lacking.and(table::look_ahead_of_renewals(replica, core, nodes));
    let names = candidates.iter().map(|candidate| candidate.name);
    lacking = lacking.and(logical::look_ahead_of_names(replica, core, names));
    lacking = lacking.and(logical::look_ahead_of_naming(replica, core, candidates.len()));
    let looked = shown_by(replica, core, &views, candidates, |_| true);
    lacking?;
    let Shown { shown, lost } = looked?;
    for (candidate, _) in candidates.iter().zip(&shown).filter(|(_, shown)| **shown) {
        lacking = lacking.and(job.data.look_ahead(core, candidate.place, candidate.crc));
    }
    // Those without a logical place change the leaves of every view, whichever shows them.
    let moved = candidates.iter().zip(&shown).filter(|(_, shown)| **shown);
    let moved = moved.map(|(candidate, _)| candidate).filter(|c| !is_logical(c.name));
    let stretches: Vec<(u64, u64)> = moved.map(|c| (c.lba, c.lba + 1)).collect();
    lacking = lacking.and(look_ahead_of_views(replica, core, &stretches));
    // A lost leaf is given up by the step, which looks again then.
    job.looked = lost.is_empty().then_some(Looked { views, shown });
    lacking
}

/// Looks at the nodes that an update of these stretches in all views reads.
pub fn look_ahead_of_views<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    stretches: &[(u64, u64)],
) -> Result<(), StoreError> {
    let mut lacking = Ok(());
    for view in views(replica, core) {
        let io = &mut replica.io(core);
        let each = stretches.iter().copied();
        lacking = lacking.and(may_lack(tree::look_ahead(io, view.root, each, BLOCKS_A_STEP))?);
    }
    lacking
}

/// Blocks that views show.
struct Shown {
    /// Each block, whether some view shows it.
    shown: Vec<bool>,
    /// Leaves that are damaged in a view.
    lost: Vec<Edit>,
}

/// Looks for the wanted ones of these blocks in all views. Fails only where something is lacking, or the
/// disk refuses it; what else is lacking is looked at all the same.
fn shown_by<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    views: &[KeptView],
    candidates: &[Candidate],
    is_wanted: impl Fn(usize) -> bool,
) -> Result<Shown, StoreError> {
    let mut io = replica.io(core);
    let (mut shown, mut lost) = (vec![false; candidates.len()], Vec::<Edit>::new());
    let mut by_lba: Vec<usize> = (0..candidates.len()).filter(|at| is_wanted(*at)).collect();
    by_lba.sort_unstable_by_key(|at| (candidates[*at].lba, candidates[*at].version));
    let mut lacking = Ok(());
    for at in by_lba {
        let candidate = &candidates[at];
        for view in views.iter().filter(|view| view.may_show(candidate.lba, candidate.version)) {
            let mut found = [BlockAt::default()];
            let looked = tree::blocks(&mut io, view.root, candidate.lba, &mut found);
            if let Err(lacks) = may_lack(looked)? {
                lacking = Err(lacks);
                continue;
            }
            if found[0].place == BAD_PLACE {
                let leaf = candidate.lba & !(LEAF_BLOCKS as u64 - 1);
                if lost.last().is_none_or(|edit| edit.lba != leaf) {
                    lost.push(Edit { lba: leaf, blocks: 1, change: Change::Reach });
                }
            }
            if found[0].place == candidate.name {
                shown[at] = true;
                break;
            }
        }
    }
    lacking.map(|()| Shown { shown, lost })
}

/// Every view that must survive.
fn views<D: Disk>(replica: &Replica, core: &Core<D>) -> Vec<KeptView> {
    if mutant::is("views-forgotten-by-clean-up") {
        return vec![KeptView::whole(replica.folded.root, u64::MAX)];
    }
    let snapshots = replica.folded.snapshots.iter();
    let mut views: Vec<KeptView> =
        snapshots.map(|s| KeptView::whole(s.root, s.info.lsn.0)).collect();
    if !mutant::is("pinned-base-forgotten-by-clean-up") {
        let pins = replica.pins.values();
        views.extend(pins.map(|p| KeptView::whole(p.root, p.head.position.lsn.0)));
    }
    if !mutant::is("bases-forgotten-by-clean-up") {
        let bases = core.bases.of(replica.identity.guid);
        views.extend(bases.map(|(_, base)| KeptView::whole(base.root, base.lsn)));
    }
    let leaving = replica.maintenance.count.leaving.iter();
    views.extend(leaving.map(|view| KeptView {
        root: view.root,
        newest: view.lsn,
        from: view.cursor,
    }));
    views.push(KeptView::whole(replica.folded.root, u64::MAX));
    if let Some(shadow) = &replica.shadow {
        views.extend(shadow.roots().map(|root| KeptView::whole(root, u64::MAX)));
    }
    views
}

fn views_mut(replica: &mut Replica) -> Vec<&mut Root> {
    let mut views: Vec<&mut Root> =
        replica.folded.snapshots.iter_mut().map(|s| &mut s.root).collect();
    views.extend(replica.pins.values_mut().map(|p| &mut p.root));
    views.push(&mut replica.folded.root);
    if let Some(shadow) = &mut replica.shadow {
        views.extend(shadow.roots_mut());
    }
    views
}

/// The blocks that stand for their names and that some view shows, in their order. `looked`: what was
/// looked up ahead, which holds while the views are the same.
fn live_of<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    candidates: &[Candidate],
    stand: &[bool],
    looked: Option<Looked>,
) -> Result<Vec<Candidate>, StoreError> {
    let views = views(replica, core);
    let looked = looked.filter(|looked| looked.views == views);
    let Shown { mut shown, lost } = match looked {
        Some(Looked { shown, .. }) => Shown { shown, lost: Vec::new() },
        None => shown_by(replica, core, &views, candidates, |at| stand[at])?,
    };
    if !lost.is_empty() {
        // Where the blocks lay is lost with a rotten node; one that cannot be read ends the job.
        update_views(replica, core, &lost, &[])?;
        return live_of(replica, core, candidates, stand, None);
    }
    if mutant::is("moved-block-overwrites-a-newer-one") {
        shown.fill(true);
    }
    let all = candidates.iter().zip(stand).zip(shown);
    let mut live: Vec<Candidate> =
        all.filter(|((_, stands), shown)| **stands && *shown).map(|((one, _), _)| *one).collect();
    live.sort_unstable_by_key(Candidate::order);
    // One of two copies is enough, where the map of names is lost.
    live.dedup_by(|b, a| is_logical(a.name) && a.name == b.name);
    Ok(live)
}

/// Outcome of a step that moves blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    All,
    /// The disk does not give one of them now: it is perhaps good, so none is moved.
    Refused,
    /// One has other bytes than its checksum says, which would take its place for ever: none is moved.
    Bad,
}

fn move_blocks<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    live: &[Candidate],
    gone: Vec<(u64, u64, u32)>,
    data: &mut SegmentData,
    job_moves: &mut Moves,
) -> Result<Moved, StoreError> {
    let (mut blocks, mut bad) = (Vec::with_capacity(live.len()), Vec::new());
    for candidate in live {
        let Candidate { lba, version, place, crc, .. } = *candidate;
        let Ok(bytes) = data.block(core, place, crc) else { return Ok(Moved::Refused) };
        let name = if is_logical(candidate.name) { candidate.name } else { 0 };
        match MovedBlock::of(lba, version, crc, name, bytes) {
            Some(block) => blocks.push(block),
            None => bad.push((lba, place)),
        }
    }
    if !bad.is_empty() {
        // They stay where they are until a peer repairs them, or they are overwritten.
        for (lba, place) in bad {
            note_bad_place(replica, core, lba, place)?;
        }
        return Ok(Moved::Bad);
    }
    let places = relocation::write_moved(
        replica,
        core,
        &blocks,
        relocation::naming(replica),
        Claim::Reserve,
    )?;
    let crcs: Vec<u32> = live.iter().map(|c| c.crc).collect();
    let (mut moves, mut named) = (Vec::new(), gone);
    for (i, (from, to)) in live.iter().zip(places).enumerate() {
        if is_logical(from.name) {
            let unit = core.superblock.unit_of(to);
            let unit = unit.and_then(|unit| replica.family.segments.containing(unit));
            if let Some(unit) = unit {
                logical::note_move(replica, core, job_moves, from.name, unit);
                if let Some(count) = &mut replica.maintenance.count.job {
                    count.moved(from.name, unit);
                }
            }
            named.push((from.name, to, from.crc));
            continue;
        }
        let change = match mutant::is("moved-block-overwrites-a-newer-one") {
            true => Change::Data { version: from.version, place: to, crc_at: i as u32 },
            false => Change::Move { from: from.name, to },
        };
        moves.push(Edit { lba: from.lba, blocks: 1, change });
    }
    if !mutant::is("moved-blocks-without-their-names") {
        logical::name_moved(replica, core, named.into_iter())?;
    }
    // Two versions of one block need two passes: edits of a pass do not overlap.
    while !moves.is_empty() {
        let (mut pass, mut later) = (Vec::<Edit>::new(), Vec::new());
        for edit in moves {
            match pass.last() {
                Some(last) if last.lba == edit.lba => later.push(edit),
                _ => pass.push(edit),
            }
        }
        update_views(replica, core, &pass, &crcs)?;
        moves = later;
    }
    Ok(Moved::All)
}

/// Notes a block as bad in a view that shows this place: the live one if it does.
fn note_bad_place<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    lba: u64,
    place: u64,
) -> Result<(), StoreError> {
    let snapshots: Vec<_> =
        replica.folded.snapshots.iter().map(|s| (Source::Root(s.root), Some(s.info.id))).collect();
    for (source, id) in std::iter::once((Source::Live, None)).chain(snapshots) {
        replica.find(core, &source, lba, 1)?;
        if let Some(block) = core.buffers.found.first().filter(|block| block.place == place) {
            let version = Lsn(block.version);
            core.note_bad(BadBlock::block(replica.identity.guid, lba, version).of(id));
            break;
        }
    }
    Ok(())
}

/// Writes nodes anew, wherever they are shared.
pub fn renew<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    nodes: &[Edit],
) -> Result<(), StoreError> {
    update_views(replica, core, nodes, &[])?;
    logical::update_logical(replica, core, nodes, &[])?;
    table::renew_table(replica, core, nodes)
}

/// Applies the edits to all views, or to none.
pub fn update_views<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    edits: &[Edit],
    crcs: &[u32],
) -> Result<(), StoreError> {
    let mut memo = Memo::default();
    let guid = replica.identity.guid;
    let mut old: Vec<Root> = views_mut(replica).into_iter().map(|r| *r).collect();
    let own = old.len();
    old.extend(core.bases.of(guid).map(|(_, base)| base.root));
    let leaving: Vec<LeavingView> = replica.maintenance.count.leaving.iter().copied().collect();
    let mut new = Vec::with_capacity(old.len());
    let mut io = replica.io(core);
    // All views give the node up together, so none keeps it alive.
    io.kept = Kept::default();
    for root in old {
        new.push(tree::update(&mut io, root, edits, crcs, Some(&mut memo))?);
    }
    let mut new_leaving = Vec::with_capacity(leaving.len());
    for view in leaving {
        // Below its cursor it is no view any more.
        let edits = edits.iter().filter(|edit| edit.reach() > view.cursor);
        let edits: Vec<Edit> = edits.copied().collect();
        new_leaving.push(tree::update(&mut io, view.root, &edits, crcs, Some(&mut memo))?);
    }
    if new.len() > own {
        // Clones read them from the disk: they know nothing of what waits here to be written.
        io.flush()?;
    }
    for (view, new) in replica.maintenance.count.leaving.iter_mut().zip(new_leaving) {
        view.root = new;
    }
    for (root, new) in views_mut(replica).into_iter().zip(&new) {
        *root = *new;
    }
    for (base, new) in core.bases.of_mut(guid).zip(&new[own..]) {
        base.root = *new;
    }
    Ok(())
}

/// Dead blocks that were moved here, whose names are to stand for nothing: as
/// [`logical::name_moved`] takes them.
fn names_gone(
    step: &[Candidate],
    stand: &[bool],
    live: &[Candidate],
    own: &Range<u64>,
) -> Vec<(u64, u64, u32)> {
    let mut live = live.iter().filter(|c| is_logical(c.name)).peekable();
    let mut gone = Vec::new();
    for (candidate, stands) in step.iter().zip(stand) {
        if !is_logical(candidate.name) || own.contains(&candidate.name) {
            continue;
        }
        while live.next_if(|live| live.name < candidate.name).is_some() {}
        let is_live = live.peek().is_some_and(|live| live.name == candidate.name);
        if *stands && !is_live {
            gone.push((candidate.name, 0, 0));
        }
    }
    gone
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
    use quoin_types::message::ReadView;
    use quoin_types::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position};

    use crate::background::listing::Listing;
    use crate::format::batch::Stream;
    use crate::format::checkpoint::SegmentState;
    use crate::{Disk, Due, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

    /// A sector that is never read again had the pool try for ever, with a sync each time.
    #[test]
    fn a_segment_of_which_a_part_cannot_be_read_is_left_in_peace_and_counted_as_it_is() {
        let disk = MemoryDisk::new(64 << 20);
        let mut format = FormatOptions::new(PoolId(1));
        // Emptied in more than one step.
        format.unit_blocks = 2 * super::BLOCKS_A_STEP as u32;
        Pool::format(&disk, &format).expect("a fit disk");
        let mut pool = Pool::open(disk.clone(), PoolOptions::default()).expect("a fresh pool");
        let guid = ReplicaIdentity::default().guid;
        pool.create(ReplicaIdentity::default(), ReplicaMeta::default(), 4000).expect("room");

        let (mut chain, mut lsn) = (Chain(0), 0);
        let mut append = |pool: &mut Pool<MemoryDisk>, kind, lba, blocks: u32| {
            lsn += 1;
            let length = if kind == EntryKind::Write { blocks as usize * BLOCK_SIZE } else { 0 };
            let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
            let data = Bytes::from(vec![lsn as u8; length]);
            let entry = Arc::new(Entry::after(chain, position, kind, lba, blocks, data, false));
            chain = entry.chain;
            let mut replica = pool.replica(guid).expect("it");
            replica.append(&[entry]).expect("room");
            replica.set_stable(Lsn(lsn));
        };
        // Two segments of log. Of the first one 20 blocks are left at its beginning and 20 behind.
        for n in 0..10 {
            append(&mut pool, EntryKind::Write, n * 100, 100);
        }
        append(&mut pool, EntryKind::Trim, 20, 430);
        append(&mut pool, EntryKind::Trim, 470, 30);
        let replica = pool.replicas.get_mut(&guid).expect("it");
        replica.find(&mut pool.core, &crate::replica::Source::Live, 460, 1).expect("found");
        disk.break_block(pool.core.buffers.found[0].place);
        pool.settle().expect("folded and recorded");

        for _ in 0..50 {
            while pool.background_due() != Due::Idle {
                pool.background(1).expect("background work");
            }
            let Some(ticket) = pool.sync_wanted() else { break };
            let result = disk.sync();
            pool.sync_finished(ticket, result).expect("a sync");
        }
        assert_eq!((pool.background_due(), pool.sync_wanted()), (Due::Idle, None), "no rest");
        let live = pool.replica_stats(guid).expect("it").live_bytes / BLOCK_SIZE as u64;
        assert!((540..550).contains(&live), "{live} of 540 blocks and some nodes are live");

        let (used, good) = (pool.stats().used_bytes, Bytes::from(vec![5; BLOCK_SIZE]));
        let mut replica = pool.replica(guid).expect("it");
        let crc = quoin_types::crc32c(&good);
        assert_eq!(
            replica.repair(ReadView::Live, 460, Lsn(5), crc, &good),
            Ok(true),
            "from another replica"
        );
        append(&mut pool, EntryKind::Trim, 2000, 1);
        for _ in 0..4 {
            pool.settle().expect("recorded");
            while pool.background_due() != Due::Idle {
                pool.background(1).expect("background work");
            }
        }
        assert!(pool.stats().used_bytes < used, "it can be read, and is not emptied");
    }

    /// A record said that the segment ends in the middle of a batch: blocks behind its end were looked for in
    /// pieces that do not have them.
    #[test]
    fn a_segment_whose_last_batch_ends_behind_it_is_not_listed() {
        let disk = MemoryDisk::new(128 << 20);
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a fit disk");
        let mut pool = Pool::open(disk.clone(), PoolOptions::default()).expect("a fresh pool");
        let guid = ReplicaIdentity::default().guid;
        pool.create(ReplicaIdentity::default(), ReplicaMeta::default(), 4000).expect("room");
        let (kind, position) = (EntryKind::Write, Position { epoch: Epoch(1), lsn: Lsn(1) });
        let data = Bytes::from(vec![7; 100 * BLOCK_SIZE]);
        let entry = Arc::new(Entry::after(Chain(0), position, kind, 0, 100, data, false));
        pool.replica(guid).expect("it").append(&[entry]).expect("room");

        let family = &pool.replicas[&guid].family;
        let state = family.segments.iter().find(|s| s.stream == Stream::Log).expect("a log");
        for (less, is_listed) in [(0, true), (1, false), (99, false)] {
            let segment = SegmentState { used_blocks: state.used_blocks - less, ..state };
            let mut listing = Listing::of(&pool.core, family, segment);
            assert_eq!(listing.go_on(&mut pool.core), Ok(is_listed), "{less} blocks less");
        }
    }
}
