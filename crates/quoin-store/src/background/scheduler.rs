//! Background work of a pool: which replica folds, which segment is emptied, when states are
//! recorded. (The scrub is in [`crate::background::scrub`].)
//!
//! A single function decides ([`next_step`]). Both the urgency of the work and the step
//! itself follow it. So a pool that reports work as due always has a step that makes progress, and
//! a pool that waits for a sync or for room reports nothing as due.
//!
//! Policy: segments that are all but empty are emptied at once, so that trimmed space comes back
//! soon. Others are emptied once about half of what is held is dead, however much room there is: a
//! log that spreads over the pool writes every byte to memory and space that was not used lately.
//! This also bounds the space that a sparse pool takes from its file system. Others are
//! also emptied when space is short: the shorter it is, the fuller a segment may be. So clean-up
//! waits as long as it can (blocks die while it waits), and what it writes for each block gained is
//! bounded. Among these segments the benefit decides (space gained times age, over the cost of
//! gaining it). Under a uniform load that is as good as the emptiest first, under a skewed one far
//! better. The table of the clean-up simulation is in `docs/store.md`.

use std::cell::Cell;

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, ReplicaGuid, mutant};

use crate::api::Due;
use crate::background::checkpoint;
use crate::background::cleaner;
use crate::background::difference;
use crate::background::due_work::Fact;
use crate::background::look_ahead;
use crate::background::maintenance::Cause;
use crate::background::recount;
use crate::clones::flatten;
use crate::disk::Disk;
use crate::format::batch::Stream;
use crate::format::checkpoint::SegmentState;
use crate::pool::{Pool, STEP_BYTES};
use crate::replica::Replica;
use crate::space::freed;
use crate::space::segment_table::{Held, MOST_LIVE_PERCENT};

/// Live percent up to which a segment is emptied though space is plenty.
const EAGER_LIVE_PERCENT: u64 = 10;
/// Live percent up to which a segment of nodes is emptied, however short space is. With the nodes
/// that are written anew those above them are, and leave as much dead where they were: a fuller
/// segment would give next to nothing, again and again.
const NODES_LIVE_PERCENT: u64 = 60;
/// Dead percent of all that could be emptied at which the pool begins to sprawl, and at which it
/// does: then segments of this many live percent are emptied, so one block is moved for one gained
/// at most.
const SPRAWL_PERCENT: std::ops::Range<u64> = 35..50;
const SPRAWL_LIVE_PERCENT: u64 = 50;
/// Free percent of the pool (above the reserve) at which cleaning begins, and becomes urgent.
pub const CLEAN_BELOW_PERCENT: u64 = 12;
const URGENT_BELOW_PERCENT: u64 = 3;
/// Live percent (rounded down) up to which a segment is emptied when cleaning becomes urgent: clean-up
/// writes ten blocks at most for each one gained. Fuller ones, up to [`MOST_LIVE_PERCENT`], are the last
/// that a pool empties before it calls itself short: a volume that waits for room overwrites nothing,
/// so that no block dies.
const URGENT_LIVE_PERCENT: u64 = 90;
/// Blocks that each of the last ones gives, about: fewer might not pay for the nodes that are written
/// for them.
const LAST_GAIN_BLOCKS: u64 = 16;
/// Free percent (above the reserve) below which a pool that can gain nothing calls itself short:
/// what targets have on their way still fits.
const SHORT_BELOW_PERCENT: u32 = 2;
/// Live percent up to which a segment is emptied of a replica of which space is to be given back, and of
/// what the replica holds at which there is little left to gain.
const RECLAIM_LIVE_PERCENT: u64 = 90;
/// Emptied segments that wait for a commit.
const PENDING_FREE_MAX: u32 = 8;
/// Closed segments of log that make a fold worth its nodes when space is short.
const FOLD_SEGMENTS: u64 = 2;

/// State on which the choice of a victim depends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct VictimKey {
    changes: u64,
    free_units: u32,
    limit: u64,
    starved: bool,
}

/// A choice as it was made, and what for.
pub(crate) type Victim = Cell<Option<(VictimKey, Option<(ReplicaGuid, SegmentState)>)>>;

/// Next step of a pool.
pub(crate) enum Step {
    /// Makes free what finished syncs allow.
    Release,
    /// Gives space back to what is below.
    Discard,
    /// Goes on with the job that a replica has begun.
    GoOn(ReplicaGuid),
    Commit(ReplicaGuid),
    Fold(ReplicaGuid, u64),
    Empty(ReplicaGuid, SegmentState),
    /// Counts what a view that went away leaves dead.
    Difference(ReplicaGuid),
    /// Counts all that is live.
    Recount(ReplicaGuid),
    Flatten(ReplicaGuid),
}

impl Step {
    /// The replica that it is done on; what is free belongs to none.
    fn replica(&self) -> Option<ReplicaGuid> {
        match self {
            Step::Release | Step::Discard => None,
            Step::GoOn(guid)
            | Step::Commit(guid)
            | Step::Fold(guid, _)
            | Step::Empty(guid, _)
            | Step::Difference(guid)
            | Step::Recount(guid)
            | Step::Flatten(guid) => Some(*guid),
        }
    }
}

pub fn may_commit(replica: &Replica) -> bool {
    replica.maintenance.may_commit() && !replica.is_prepared()
}

/// Returns true if some of the replica's log could be folded now.
pub fn has_foldable(replica: &Replica) -> bool {
    !replica.is_prepared() && checkpoint::foldable(replica) >= replica.log.first_lsn()
}

/// Returns true if space of the replica is to be given back, and more of it is dead than is left alone.
pub fn reclaims(replica: &Replica) -> bool {
    let segments = &replica.family.segments;
    let held = segments.units() * segments.capacity(1);
    replica.maintenance.reclaims && segments.live_bytes() * 100 < held * RECLAIM_LIVE_PERCENT
}

/// Begins to give space of a replica back: what waits in its log first, as that hides what is dead.
pub fn begin_reclaim(replica: &mut Replica) {
    replica.maintenance.reclaims = true;
    replica.maintenance.fold_wanted |= replica.log.bytes > 0 && has_foldable(replica);
}

/// Returns true while space of a replica is given back: there is work to do for it, or what was gained
/// waits for a sync.
pub fn is_reclaiming<D: Disk>(pool: &Pool<D>, guid: ReplicaGuid) -> bool {
    let Some(replica) = pool.replicas.get(&guid) else { return false };
    let work = &replica.maintenance;
    if !work.reclaims || work.quarantined.is_some() {
        return false;
    }
    let is_at_work = work.has_job() || work.fold_wanted && has_foldable(replica);
    let is_coming = work.pending_units() + work.committing_units() > 0;
    is_at_work || is_coming || reclaims(replica) && next_step(pool).is_some()
}

/// About how many units a fold lets clean-up gain: closed log that only waits for it, and
/// what the entries replace.
fn fold_gain(replica: &Replica, unit_blocks: u64) -> u64 {
    if !has_foldable(replica) {
        return 0;
    }
    let first_needed = checkpoint::log_start(replica).index;
    let held = |s: &&crate::space::segments::Segment| {
        let state = &s.state;
        state.last_lsn <= replica.stable.0 && !replica.family.open.contains(&Some(state.unit))
    };
    let log = replica.family.log_from(first_needed);
    let held: u64 = log.filter(held).map(|s| u64::from(s.state.units)).sum();
    // A view that goes away may give up any number of blocks.
    let views = replica.log.special_from(0).take_while(|(lsn, _)| *lsn <= replica.stable.0);
    let views = views.filter(|(_, kind)| drops_a_view(kind)).count() as u64;
    held + replica.log.hole_blocks / unit_blocks + views * FOLD_SEGMENTS
}

fn drops_a_view(kind: &quoin_types::EntryKind) -> bool {
    use quoin_types::EntryKind::{DeleteSnapshot, Revert};
    matches!(kind, DeleteSnapshot { .. } | Revert { .. })
}

pub fn percent<D: Disk>(pool: &Pool<D>, units: u32) -> u64 {
    u64::from(units) * 100 / u64::from(pool.core.allocator.units().max(1))
}

/// Units that the next commits and syncs make free.
pub fn coming_units<D: Disk>(pool: &Pool<D>) -> u32 {
    pool.core.freed.units() + pool.due_work().coming_units()
}

fn log_bytes<D: Disk>(pool: &Pool<D>) -> u64 {
    pool.due_work().log_bytes()
}

pub fn due<D: Disk>(pool: &Pool<D>) -> Due {
    if pool.core.faults.failed.is_some()
        || look_ahead::waits_for_disk(pool)
        || next_step(pool).is_none()
    {
        return Due::Idle;
    }
    let (log, limit) = (log_bytes(pool), pool.core.options.checkpoint_bytes);
    let usable = percent(pool, pool.core.allocator.free_for_clients());
    match () {
        _ if usable < URGENT_BELOW_PERCENT || log > 2 * limit => Due::Urgent,
        _ if usable < CLEAN_BELOW_PERCENT || log > limit => Due::Soon,
        _ => Due::Relaxed,
    }
}

/// Free units (above the reserve) below which a pool that can gain nothing is short.
pub fn short_below_units<D: Disk>(pool: &Pool<D>) -> u32 {
    let units = pool.core.allocator.units() * SHORT_BELOW_PERCENT / 100;
    units.max(2).max(pool.core.allocator.shares.kept_units)
}

/// How full a segment may be that is emptied now.
fn live_limit_percent<D: Disk>(pool: &Pool<D>) -> u64 {
    let free = pool.core.allocator.free_for_clients() + coming_units(pool);
    if free < short_below_units(pool) {
        return MOST_LIVE_PERCENT;
    }
    // In thousandths, so that a small pool has a slope and no stairs.
    let free = u64::from(free) * 1000 / u64::from(pool.core.allocator.units().max(1));
    let (most, least) = (10 * CLEAN_BELOW_PERCENT, 10 * URGENT_BELOW_PERCENT);
    let short = most.saturating_sub(free).min(most - least);
    EAGER_LIVE_PERCENT + (URGENT_LIVE_PERCENT - EAGER_LIVE_PERCENT) * short / (most - least)
}

/// How full a segment may be that is emptied because too much of the pool is dead. Counted are
/// the segments that can be emptied: the log changes with every write, which gains nothing.
fn sprawl_limit_percent<D: Disk>(pool: &Pool<D>) -> u64 {
    let Held { capacity, live } = pool.due_work().candidates();
    let dead = (capacity.saturating_sub(live) * 100).checked_div(capacity).unwrap_or(0);
    let (from, to) = (SPRAWL_PERCENT.start, SPRAWL_PERCENT.end);
    let sprawl = dead.saturating_sub(from).min(to - from);
    EAGER_LIVE_PERCENT + (SPRAWL_LIVE_PERCENT - EAGER_LIVE_PERCENT) * sprawl / (to - from)
}

/// The segment to empty next. Looked for again only when something has changed that decides
/// it, since this is asked at every turn.
fn best_victim<D: Disk>(pool: &Pool<D>, limit: u64) -> Option<(ReplicaGuid, SegmentState)> {
    let changes = pool.due_work().changes();
    let free_units = pool.core.allocator.free_units();
    let key = VictimKey { changes, free_units, limit, starved: pool.starved };
    if let Some((found_for, victim)) = pool.victim.get()
        && found_for == key
    {
        #[cfg(any(test, debug_assertions))]
        compare_victim(pool, changes, limit, victim);
        return victim;
    }
    let victim = find_victim(pool, limit);
    #[cfg(any(test, debug_assertions))]
    compare_victim(pool, changes, limit, victim);
    pool.victim.set(Some((key, victim)));
    victim
}

fn find_victim<D: Disk>(pool: &Pool<D>, limit: u64) -> Option<(ReplicaGuid, SegmentState)> {
    let limit = limit.max(sprawl_limit_percent(pool));
    let work = pool.due_work();
    let widest = match work.first(Fact::Reclaiming) {
        Some(_) => limit.max(RECLAIM_LIVE_PERCENT),
        None => limit,
    };
    // A segment gains as much as any other of its class, or more if it is older.
    let candidates = work.with_candidates(widest).filter_map(|guid| {
        let replica = pool.replicas.get(&guid)?;
        Some((guid, limit_of(replica, limit), &replica.family.segments))
    });
    candidates
        .flat_map(|(guid, limit, segments)| {
            segments.oldest_of_classes().map(move |(class, s)| (guid, limit, class, s))
        })
        .filter_map(|(guid, limit, class, s)| {
            let benefit = benefit(pool, guid, class.live_percent.into(), limit, &s)?;
            Some((benefit, guid, s))
        })
        .max_by_key(|(benefit, _, s)| (*benefit, std::cmp::Reverse(s.sequence)))
        .map(|(_, guid, s)| (guid, s))
}

/// How full a segment of a replica may be that is emptied.
fn limit_of(replica: &Replica, limit: u64) -> u64 {
    if reclaims(replica) { limit.max(RECLAIM_LIVE_PERCENT) } else { limit }
}

/// Gain of emptying a segment, if it may be emptied.
fn benefit<D: Disk>(
    pool: &Pool<D>,
    guid: ReplicaGuid,
    live_percent: u64,
    limit: u64,
    segment: &SegmentState,
) -> Option<u64> {
    let newest = pool.core.sequence;
    let age = newest.saturating_sub(segment.sequence).clamp(1, 1 << 40);
    let is_urgent = limit >= URGENT_LIVE_PERCENT;
    let limit = match segment.stream {
        Stream::Nodes => limit.min(NODES_LIVE_PERCENT),
        Stream::Log | Stream::Moved => limit,
    };
    let may = live_percent <= limit
        && (live_percent <= URGENT_LIVE_PERCENT || pays(pool, guid, live_percent, segment))
        && (segment.live_bytes == 0 || has_room(pool, segment))
        && !gains_nothing(pool, guid, segment);
    may.then(|| match live_percent <= EAGER_LIVE_PERCENT || is_urgent {
        // Next to nothing to move, or no time to lose: the emptiest.
        true => (1 << 50) - live_percent,
        false => (100 - live_percent) * age / (100 + live_percent),
    })
}

/// Returns true if a segment of the fullest that are emptied gives enough, and most of the reserve is
/// left: each replica may need units of its own for what is moved.
fn pays<D: Disk>(
    pool: &Pool<D>,
    guid: ReplicaGuid,
    live_percent: u64,
    segment: &SegmentState,
) -> bool {
    let allocator = &pool.core.allocator;
    let Some(replica) = pool.replicas.get(&guid) else { return false };
    let capacity = replica.family.segments.capacity(segment.units);
    let gain_blocks = capacity * (100 - live_percent) / 100 / BLOCK_SIZE as u64;
    gain_blocks >= LAST_GAIN_BLOCKS && allocator.free_units() > allocator.reserve_units / 4 * 3
}

/// Returns true if emptying a segment of nodes would gain nothing and space is not short.
fn gains_nothing<D: Disk>(pool: &Pool<D>, guid: ReplicaGuid, segment: &SegmentState) -> bool {
    let gain = pool.replicas.get(&guid).map(|replica| replica.maintenance.node_gain);
    segment.stream == Stream::Nodes
        && segment.live_bytes > 0
        && gain.is_some_and(|gain| gain.is_none_of(segment.sequence))
        && live_limit_percent(pool) <= EAGER_LIVE_PERCENT
        && !mutant::is("clean-up-follows-itself")
}

/// Compares a choice with one by a look at all segments; where these are many, a choice of many.
#[cfg(any(test, debug_assertions))]
fn compare_victim<D: Disk>(
    pool: &Pool<D>,
    changes: u64,
    limit: u64,
    victim: Option<(ReplicaGuid, SegmentState)>,
) {
    const FEW_UNITS: u32 = 4096;
    const ONE_OF: u64 = 1024;
    let used = pool.core.allocator.units() - pool.core.allocator.free_units();
    if used <= FEW_UNITS || changes.is_multiple_of(ONE_OF) {
        assert_eq!(victim.map(|(_, s)| s.unit), victim_of_all(pool, limit));
    }
}

/// The choice by a look at all segments: what [`find_victim`] has to come to.
#[cfg(any(test, debug_assertions))]
fn victim_of_all<D: Disk>(pool: &Pool<D>, limit: u64) -> Option<u32> {
    let limit = limit.max(sprawl_limit_percent(pool));
    let workable = pool.replicas.values().filter(|r| r.maintenance.quarantined.is_none());
    workable
        .flat_map(|r| cleaner::victims(r).map(move |s| (r, s)))
        .filter_map(|(r, s)| {
            let capacity = r.family.segments.capacity(s.units);
            let live_percent = (s.live_bytes * 100 / capacity).min(100);
            let limit = limit_of(r, limit);
            Some((benefit(pool, r.identity.guid, live_percent, limit, &s)?, s))
        })
        .max_by_key(|(benefit, s)| (*benefit, std::cmp::Reverse(s.sequence)))
        .map(|(_, s)| s.unit)
}

/// Returns true if there is room to write a segment's content, and the nodes that then change, elsewhere.
fn has_room<D: Disk>(pool: &Pool<D>, segment: &SegmentState) -> bool {
    let needed = 2 * segment.units + 1;
    !pool.starved && pool.core.allocator.free_units() >= needed
}

pub fn work<D: Disk>(pool: &mut Pool<D>, budget_bytes: u64) -> Result<bool, StoreError> {
    pool.core.check_usable()?;
    let mut left = budget_bytes.max(1) as i64;
    while left > 0 {
        if look_ahead::waits_for_disk(pool) {
            return Ok(false);
        }
        let Some(step) = next_step(pool) else { return Ok(false) };
        let guid = step.replica();
        if guid.is_some_and(|guid| look_ahead::lacks(pool, guid, &step)) {
            return Ok(false);
        }
        pool.counts_next = !matches!(step, Step::Difference(_) | Step::Recount(_));
        pool.victim.set(None);
        if let Some(guid) = guid {
            pool.touch(guid);
        }
        match execute(pool, step) {
            // Damage of one replica must not keep the others' logs from being folded.
            Err(StoreError::Damaged(what)) => {
                if let Some(guid) = guid
                    && let Some(replica) = pool.replicas.get_mut(&guid)
                {
                    replica.maintenance.quarantined = Some(Cause::Damaged);
                    pool.core.faults.damaged.push((guid, what));
                }
            }
            // Waiting loses no data.
            Err(error) if error.is_refused_read() => {
                if let Some(replica) = guid.and_then(|g| pool.replicas.get_mut(&g)) {
                    replica.maintenance.quarantined = Some(Cause::Unreadable);
                }
            }
            Err(error) if error.is_lack_of_room() => {
                // Until a unit is given back only what needs none is tried.
                pool.starved = true;
                return Err(error);
            }
            done => done?,
        }
        pool.victim.set(None);
        left -= STEP_BYTES as i64;
    }
    Ok(due(pool) > Due::Idle)
}

/// Makes free some of what finished syncs allow.
pub fn release_some<D: Disk>(pool: &mut Pool<D>) {
    let free = pool.core.allocator.free_units();
    let synced = pool.core.tickets.synced;
    freed::release(&mut pool.core, synced);
    pool.starved &= pool.core.allocator.free_units() == free;
}

/// The most useful thing that can be done now. `None`: nothing would be gained, or what was
/// gained waits for a sync.
pub fn next_step<D: Disk>(pool: &Pool<D>) -> Option<Step> {
    let allocator = &pool.core.allocator;
    let work = pool.due_work();
    if pool.core.freed.is_due(pool.core.tickets.synced) {
        return Some(Step::Release);
    }
    let live_limit = live_limit_percent(pool);
    let short = live_limit > EAGER_LIVE_PERCENT;
    // Counts that are too high hide what can be gained, and clean-up need not wait for them.
    let difference = || work.first(Fact::ViewLeaving).map(Step::Difference);
    let recount = || work.first(Fact::CountDue).map(Step::Recount);
    let first = short && pool.counts_next && work.first(Fact::Folding).is_none();
    if (first || mutant::is("count-before-all-else"))
        && let Some(step) = difference().or_else(recount)
    {
        return Some(step);
    }
    // A job that was begun is finished before another starts.
    if let Some(guid) = work.first(Fact::AtWork) {
        return Some(Step::GoOn(guid));
    }
    // Emptied segments are worth nothing until they are recorded as such; clean-up must not
    // use up the room it works in before it has its gains.
    let limit = PENDING_FREE_MAX.min(allocator.reserve_units / 3).max(1);
    let tight = allocator.free_units() <= allocator.reserve_units;
    if let Some((most, guid)) = work.most_emptied()
        && (most >= limit || (tight && most > 0))
    {
        return Some(Step::Commit(guid));
    }
    let unit_blocks = u64::from(pool.core.superblock.unit_blocks);
    if !pool.starved {
        let keep = if short { 0 } else { pool.core.options.log_keep_bytes };
        let much = log_bytes(pool) > pool.core.options.checkpoint_bytes;
        if let Some(guid) = work.first(Fact::FoldWanted) {
            return Some(Step::Fold(guid, 0));
        }
        if let Some((bytes, guid)) = work.longest_log()
            && much
            && bytes > keep
        {
            return Some(Step::Fold(guid, keep));
        }
        if short && let Some(guid) = best_fold(pool, FOLD_SEGMENTS, unit_blocks) {
            return Some(Step::Fold(guid, 0));
        }
    }
    // Its cost follows what it makes known, and clean-up goes by it.
    if !short && let Some(step) = difference() {
        return Some(step);
    }
    if !short && freed::discard_due(&pool.core) {
        return Some(Step::Discard);
    }
    if let Some((guid, segment)) = best_victim(pool, live_limit) {
        return Some(Step::Empty(guid, segment));
    }
    if short
        && !pool.starved
        && let Some(guid) = best_fold(pool, 1, unit_blocks)
    {
        return Some(Step::Fold(guid, 0));
    }
    // The folded map holds trimmed blocks until the trim is folded too. A client that trims an
    // idle volume writes nothing that would make a fold due.
    if !pool.starved
        && let Some(guid) = work.first(Fact::Trimmed)
    {
        return Some(Step::Fold(guid, 0));
    }
    if let Some(guid) = work.first(Fact::ToRecord) {
        return Some(Step::Commit(guid));
    }
    if freed::discard_due(&pool.core) {
        return Some(Step::Discard);
    }
    // It takes room, and is in no hurry.
    if !short
        && !pool.starved
        && let Some(guid) = work.first(Fact::Flattening)
    {
        return Some(Step::Flatten(guid));
    }
    difference().or_else(recount)
}

/// The replica whose fold lets the most be gained, if that is at least so many units.
fn best_fold<D: Disk>(pool: &Pool<D>, units: u64, unit_blocks: u64) -> Option<ReplicaGuid> {
    pool.due_work()
        .foldable()
        .filter_map(|guid| {
            let gain = fold_gain(pool.replicas.get(&guid)?, unit_blocks);
            Some((gain, std::cmp::Reverse(guid)))
        })
        .filter(|(gain, _)| *gain >= units)
        .max()
        .map(|(_, guid)| guid.0)
}

fn execute<D: Disk>(pool: &mut Pool<D>, step: Step) -> Result<(), StoreError> {
    let core = &mut pool.core;
    let replica = step.replica().and_then(|guid| pool.replicas.get_mut(&guid));
    let Some(replica) = replica else {
        match step {
            Step::Release => release_some(pool),
            Step::Discard => freed::discard_some(core),
            _ => {}
        }
        return Ok(());
    };
    let done = match step {
        Step::Release | Step::Discard => Ok(()),
        Step::GoOn(_) if replica.maintenance.checkpoint.is_some() => {
            checkpoint::step(replica, core).map(drop)
        }
        Step::GoOn(_) => cleaner::step(replica, core).map(drop),
        Step::Commit(_) => checkpoint::begin_commit(replica, core),
        Step::Fold(_, keep) => {
            checkpoint::begin(replica, keep);
            replica.maintenance.fold_wanted = false;
            Ok(())
        }
        Step::Empty(_, segment) => {
            let listing = pool.look_ahead.listing(core, &replica.family, segment);
            cleaner::begin(replica, core, segment.unit, listing).map(|complete| {
                if !complete {
                    replica.family.segments.set_aside(segment.unit);
                }
            })
        }
        Step::Difference(_) => difference::step(replica, core),
        Step::Recount(_) => recount::step(replica, core).map(drop),
        Step::Flatten(_) => flatten::step(replica, core),
    };
    if done.is_err() {
        // The counters include work towards a result that is dropped.
        replica.maintenance.count.begin_anew();
    }
    done
}
