//! Background work of a pool: which replica folds, which segment is emptied, when states are
//! recorded. (The scrub is in [`crate::background::scrub`].)
//!
//! A single function decides ([`Pool::next_step`]). Both the urgency of the work and the step
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
use quoin_types::{ReplicaGuid, mutant};

use crate::api::Due;
use crate::background::due_work::Fact;
use crate::background::maintenance::Cause;
use crate::disk::Disk;
use crate::format::batch::Stream;
use crate::format::checkpoint::SegmentState;
use crate::pool::{Pool, STEP_BYTES};
use crate::replica::Replica;
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
const CLEAN_BELOW_PERCENT: u64 = 12;
const URGENT_BELOW_PERCENT: u64 = 3;
/// Free percent (above the reserve) below which a pool that can gain nothing calls itself short:
/// what targets have on their way still fits.
const SHORT_BELOW_PERCENT: u32 = 2;
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

impl Replica {
    pub(crate) fn may_commit(&self) -> bool {
        self.maintenance.may_commit() && !self.is_prepared()
    }

    /// Whether some of its log could be folded now.
    pub(crate) fn has_foldable(&self) -> bool {
        !self.is_prepared() && self.foldable() >= self.log.first_lsn()
    }

    /// About how many units a fold lets clean-up gain: closed log that only waits for it, and
    /// what the entries replace.
    fn fold_gain(&self, unit_blocks: u64) -> u64 {
        if !self.has_foldable() {
            return 0;
        }
        let first_needed = self.log_start().index;
        let held = |s: &&crate::space::segments::Segment| {
            let state = &s.state;
            state.last_lsn <= self.stable.0 && !self.family.open.contains(&Some(state.unit))
        };
        let log = self.family.log_from(first_needed);
        let held: u64 = log.filter(held).map(|s| u64::from(s.state.units)).sum();
        // A view that goes away may give up any number of blocks.
        let views = self.log.special_from(0).take_while(|(lsn, _)| *lsn <= self.stable.0);
        let views = views.filter(|(_, kind)| drops_a_view(kind)).count() as u64;
        held + self.log.hole_blocks / unit_blocks + views * FOLD_SEGMENTS
    }
}

fn drops_a_view(kind: &quoin_types::EntryKind) -> bool {
    use quoin_types::EntryKind::{DeleteSnapshot, Revert};
    matches!(kind, DeleteSnapshot { .. } | Revert { .. })
}

impl<D: Disk> Pool<D> {
    fn percent(&self, units: u32) -> u64 {
        u64::from(units) * 100 / u64::from(self.core.allocator.units().max(1))
    }

    /// Units that the next commits and syncs make free.
    fn coming_units(&self) -> u32 {
        self.core.freed.units() + self.due_work().coming_units()
    }

    fn log_bytes(&self) -> u64 {
        self.due_work().log_bytes()
    }

    pub(crate) fn due(&self) -> Due {
        if self.core.faults.failed.is_some() || self.waits_for_disk() || self.next_step().is_none()
        {
            return Due::Idle;
        }
        let (log, limit) = (self.log_bytes(), self.core.options.checkpoint_bytes);
        let usable = self.percent(self.core.allocator.free_for_clients());
        match () {
            _ if usable < URGENT_BELOW_PERCENT || log > 2 * limit => Due::Urgent,
            _ if usable < CLEAN_BELOW_PERCENT || log > limit => Due::Soon,
            _ => Due::Relaxed,
        }
    }

    /// How full a segment may be that is emptied now.
    fn live_limit_percent(&self) -> u64 {
        let free = self.core.allocator.free_for_clients() + self.coming_units();
        // In thousandths, so that a small pool has a slope and no stairs.
        let free = u64::from(free) * 1000 / u64::from(self.core.allocator.units().max(1));
        let (most, least) = (10 * CLEAN_BELOW_PERCENT, 10 * URGENT_BELOW_PERCENT);
        let short = most.saturating_sub(free).min(most - least);
        EAGER_LIVE_PERCENT + (MOST_LIVE_PERCENT - EAGER_LIVE_PERCENT) * short / (most - least)
    }

    /// How full a segment may be that is emptied because too much of the pool is dead. Counted are
    /// the segments that can be emptied: the log changes with every write, which gains nothing.
    fn sprawl_limit_percent(&self) -> u64 {
        let Held { capacity, live } = self.due_work().candidates();
        let dead = (capacity.saturating_sub(live) * 100).checked_div(capacity).unwrap_or(0);
        let (from, to) = (SPRAWL_PERCENT.start, SPRAWL_PERCENT.end);
        let sprawl = dead.saturating_sub(from).min(to - from);
        EAGER_LIVE_PERCENT + (SPRAWL_LIVE_PERCENT - EAGER_LIVE_PERCENT) * sprawl / (to - from)
    }

    /// The segment to empty next. Looked for again only when something has changed that decides
    /// it, since this is asked at every turn.
    fn best_victim(&self, limit: u64) -> Option<(ReplicaGuid, SegmentState)> {
        let changes = self.due_work().changes();
        let free_units = self.core.allocator.free_units();
        let key = VictimKey { changes, free_units, limit, starved: self.starved };
        if let Some((found_for, victim)) = self.victim.get()
            && found_for == key
        {
            #[cfg(any(test, debug_assertions))]
            self.compare_victim(changes, limit, victim);
            return victim;
        }
        let victim = self.find_victim(limit);
        #[cfg(any(test, debug_assertions))]
        self.compare_victim(changes, limit, victim);
        self.victim.set(Some((key, victim)));
        victim
    }

    fn find_victim(&self, limit: u64) -> Option<(ReplicaGuid, SegmentState)> {
        let limit = limit.max(self.sprawl_limit_percent());
        let work = self.due_work();
        // A segment gains as much as any other of its class, or more if it is older.
        let candidates = work.with_candidates(limit).filter_map(|guid| {
            let segments = &self.replicas.get(&guid)?.family.segments;
            Some((guid, segments))
        });
        candidates
            .flat_map(|(guid, segments)| {
                segments.oldest_of_classes().map(move |(class, s)| (guid, class, s))
            })
            .filter_map(|(guid, class, s)| {
                let benefit = self.benefit(guid, class.live_percent.into(), limit, &s)?;
                Some((benefit, guid, s))
            })
            .max_by_key(|(benefit, _, s)| (*benefit, std::cmp::Reverse(s.sequence)))
            .map(|(_, guid, s)| (guid, s))
    }

    /// What emptying a segment gains, if it may be emptied.
    fn benefit(
        &self,
        guid: ReplicaGuid,
        live_percent: u64,
        limit: u64,
        segment: &SegmentState,
    ) -> Option<u64> {
        let newest = self.core.sequence;
        let age = newest.saturating_sub(segment.sequence).clamp(1, 1 << 40);
        let limit = match segment.stream {
            Stream::Nodes => limit.min(NODES_LIVE_PERCENT),
            Stream::Log | Stream::Moved => limit,
        };
        let may = live_percent <= limit
            && (segment.live_bytes == 0 || self.has_room(segment))
            && !self.gains_nothing(guid, segment);
        may.then(|| match live_percent <= EAGER_LIVE_PERCENT || limit == MOST_LIVE_PERCENT {
            // Next to nothing to move, or no time to lose: the emptiest.
            true => (1 << 50) - live_percent,
            false => (100 - live_percent) * age / (100 + live_percent),
        })
    }

    /// Returns true if emptying a segment of nodes would gain nothing and space is not short.
    fn gains_nothing(&self, guid: ReplicaGuid, segment: &SegmentState) -> bool {
        let gain = self.replicas.get(&guid).map(|replica| replica.maintenance.node_gain);
        segment.stream == Stream::Nodes
            && segment.live_bytes > 0
            && gain.is_some_and(|gain| gain.is_none_of(segment.sequence))
            && self.live_limit_percent() <= EAGER_LIVE_PERCENT
            && !mutant::is("clean-up-follows-itself")
    }

    /// Compares a choice with one by a look at all segments; where these are many, a choice of many.
    #[cfg(any(test, debug_assertions))]
    fn compare_victim(
        &self,
        changes: u64,
        limit: u64,
        victim: Option<(ReplicaGuid, SegmentState)>,
    ) {
        const FEW_UNITS: u32 = 4096;
        const ONE_OF: u64 = 1024;
        let used = self.core.allocator.units() - self.core.allocator.free_units();
        if used <= FEW_UNITS || changes.is_multiple_of(ONE_OF) {
            assert_eq!(victim.map(|(_, s)| s.unit), self.victim_of_all(limit));
        }
    }

    /// The choice by a look at all segments: what [`Pool::find_victim`] has to come to.
    #[cfg(any(test, debug_assertions))]
    fn victim_of_all(&self, limit: u64) -> Option<u32> {
        let limit = limit.max(self.sprawl_limit_percent());
        let workable = self.replicas.values().filter(|r| r.maintenance.quarantined.is_none());
        workable
            .flat_map(|r| r.victims().map(move |s| (r, s)))
            .filter_map(|(r, s)| {
                let capacity = r.family.segments.capacity(s.units);
                let live_percent = (s.live_bytes * 100 / capacity).min(100);
                Some((self.benefit(r.identity.guid, live_percent, limit, &s)?, s))
            })
            .max_by_key(|(benefit, s)| (*benefit, std::cmp::Reverse(s.sequence)))
            .map(|(_, s)| s.unit)
    }

    /// Whether what a segment holds, and the nodes that then change, can be written elsewhere.
    fn has_room(&self, segment: &SegmentState) -> bool {
        let needed = 2 * segment.units + 1;
        !self.starved && self.core.allocator.free_units() >= needed
    }

    pub(crate) fn work(&mut self, budget_bytes: u64) -> Result<bool, StoreError> {
        self.core.check_usable()?;
        let mut left = budget_bytes.max(1) as i64;
        while left > 0 {
            if self.waits_for_disk() {
                return Ok(false);
            }
            let Some(step) = self.next_step() else { return Ok(false) };
            let guid = step.replica();
            if guid.is_some_and(|guid| self.lacks(guid, &step)) {
                return Ok(false);
            }
            self.counts_next = !matches!(step, Step::Difference(_) | Step::Recount(_));
            self.victim.set(None);
            if let Some(guid) = guid {
                self.touch(guid);
            }
            match self.step(step) {
                // Damage of one replica must not keep the others' logs from being folded.
                Err(StoreError::Damaged(what)) => {
                    if let Some(guid) = guid
                        && let Some(replica) = self.replicas.get_mut(&guid)
                    {
                        replica.maintenance.quarantined = Some(Cause::Damaged);
                        self.core.faults.damaged.push((guid, what));
                    }
                }
                // Waiting loses no data.
                Err(error) if error.is_refused_read() => {
                    if let Some(replica) = guid.and_then(|g| self.replicas.get_mut(&g)) {
                        replica.maintenance.quarantined = Some(Cause::Unreadable);
                    }
                }
                Err(error) if error.is_lack_of_room() => {
                    // Until a unit is given back only what needs none is tried.
                    self.starved = true;
                    return Err(error);
                }
                done => done?,
            }
            self.victim.set(None);
            left -= STEP_BYTES as i64;
        }
        Ok(self.due() > Due::Idle)
    }

    /// Makes free some of what finished syncs allow.
    pub(crate) fn release_some(&mut self) {
        let free = self.core.allocator.free_units();
        self.core.release(self.core.tickets.synced);
        self.starved &= self.core.allocator.free_units() == free;
    }

    /// Whether the pool can take little more: next to nothing is free, and no work that is done
    /// or waited for gains anything. `was`: the last answer, for hysteresis.
    pub fn is_short(&self, was: bool) -> bool {
        let allocator = &self.core.allocator;
        let margin = (allocator.units() * SHORT_BELOW_PERCENT / 100).max(2);
        let free = allocator.free_for_clients();
        match was {
            true => free < 2 * margin,
            false => {
                free < margin
                    && self.coming_units() == 0
                    && (self.starved || self.next_step().is_none())
            }
        }
    }

    /// Looks whether the file system below is short of room, or has it again.
    pub fn look_below(&mut self) {
        self.core.look_below();
    }

    /// Whether it is the file system below that is short of room, not the pool.
    pub fn is_short_below(&self) -> bool {
        self.core.allocator.short_below
    }

    /// Replicas that were set aside for what could not be read are worked on again: now and then
    /// it can be.
    pub fn look_again(&mut self) {
        self.victim.set(None);
        self.touch_all();
        for replica in self.replicas.values_mut() {
            replica.maintenance.try_again();
            replica.maintenance.commit_waits = false;
        }
        // Segments that could not be read wait for the next commit. Where they are all that could
        // give room there is none: a full pool takes nothing that would need it.
        let short = self.percent(self.core.allocator.free_for_clients()) < CLEAN_BELOW_PERCENT;
        if short && self.next_step().is_none() {
            for replica in self.replicas.values_mut() {
                replica.family.segments.try_again();
            }
            self.touch_all();
            self.victim.set(None);
        }
    }

    /// The most useful thing that can be done now. `None`: nothing would be gained, or what was
    /// gained waits for a sync.
    fn next_step(&self) -> Option<Step> {
        let allocator = &self.core.allocator;
        let work = self.due_work();
        if self.core.freed.is_due(self.core.tickets.synced) {
            return Some(Step::Release);
        }
        let live_limit = self.live_limit_percent();
        let short = live_limit > EAGER_LIVE_PERCENT;
        // Counts that are too high hide what can be gained, and clean-up need not wait for them.
        let difference = || work.first(Fact::ViewLeaving).map(Step::Difference);
        let recount = || work.first(Fact::CountDue).map(Step::Recount);
        let first = short && self.counts_next && work.first(Fact::Folding).is_none();
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
        let unit_blocks = u64::from(self.core.superblock.unit_blocks);
        if !self.starved {
            let keep = if short { 0 } else { self.core.options.log_keep_bytes };
            let much = self.log_bytes() > self.core.options.checkpoint_bytes;
            if let Some(guid) = work.first(Fact::FoldWanted) {
                return Some(Step::Fold(guid, 0));
            }
            if let Some((bytes, guid)) = work.longest_log()
                && much
                && bytes > keep
            {
                return Some(Step::Fold(guid, keep));
            }
            if short && let Some(guid) = self.best_fold(FOLD_SEGMENTS, unit_blocks) {
                return Some(Step::Fold(guid, 0));
            }
        }
        // Its cost follows what it makes known, and clean-up goes by it.
        if !short && let Some(step) = difference() {
            return Some(step);
        }
        if !short && self.core.discard_due() {
            return Some(Step::Discard);
        }
        if let Some((guid, segment)) = self.best_victim(live_limit) {
            return Some(Step::Empty(guid, segment));
        }
        if short
            && !self.starved
            && let Some(guid) = self.best_fold(1, unit_blocks)
        {
            return Some(Step::Fold(guid, 0));
        }
        // The folded map holds trimmed blocks until the trim is folded too. A client that trims an
        // idle volume writes nothing that would make a fold due.
        if !self.starved
            && let Some(guid) = work.first(Fact::Trimmed)
        {
            return Some(Step::Fold(guid, 0));
        }
        if let Some(guid) = work.first(Fact::ToRecord) {
            return Some(Step::Commit(guid));
        }
        if self.core.discard_due() {
            return Some(Step::Discard);
        }
        // It takes room, and is in no hurry.
        if !short
            && !self.starved
            && let Some(guid) = work.first(Fact::Flattening)
        {
            return Some(Step::Flatten(guid));
        }
        difference().or_else(recount)
    }

    /// The replica whose fold lets the most be gained, if that is at least so many units.
    fn best_fold(&self, units: u64, unit_blocks: u64) -> Option<ReplicaGuid> {
        self.due_work()
            .foldable()
            .filter_map(|guid| {
                let gain = self.replicas.get(&guid)?.fold_gain(unit_blocks);
                Some((gain, std::cmp::Reverse(guid)))
            })
            .filter(|(gain, _)| *gain >= units)
            .max()
            .map(|(_, guid)| guid.0)
    }

    fn step(&mut self, step: Step) -> Result<(), StoreError> {
        let core = &mut self.core;
        let replica = step.replica().and_then(|guid| self.replicas.get_mut(&guid));
        let Some(replica) = replica else {
            match step {
                Step::Release => self.release_some(),
                Step::Discard => core.discard_some(),
                _ => {}
            }
            return Ok(());
        };
        let done = match step {
            Step::Release | Step::Discard => Ok(()),
            Step::GoOn(_) if replica.maintenance.checkpoint.is_some() => {
                replica.step_checkpoint(core).map(drop)
            }
            Step::GoOn(_) => replica.step_clean(core).map(drop),
            Step::Commit(_) => replica.begin_commit(core),
            Step::Fold(_, keep) => {
                replica.begin_checkpoint(keep);
                replica.maintenance.fold_wanted = false;
                Ok(())
            }
            Step::Empty(_, segment) => {
                let listing = self.look_ahead.listing(core, &replica.family, segment);
                replica.begin_clean(core, segment.unit, listing).map(|complete| {
                    if !complete {
                        replica.family.segments.set_aside(segment.unit);
                    }
                })
            }
            Step::Difference(_) => replica.step_difference(core),
            Step::Recount(_) => replica.step_recount(core).map(drop),
            Step::Flatten(_) => replica.step_flatten(core),
        };
        if done.is_err() {
            // The counters include work towards a result that is dropped.
            replica.maintenance.count.begin_anew();
        }
        done
    }

    /// Writes everything that is foldable and recorded in one go: for a clean shutdown, so that
    /// the next start has nothing to replay. Syncs on this thread.
    pub fn settle(&mut self) -> Result<(), StoreError> {
        self.victim.set(None);
        self.touch_all();
        for replica in self.replicas.values_mut() {
            if !replica.is_prepared() {
                replica.checkpoint_now(&mut self.core, replica.stable.0)?;
            }
            replica.family.segments.recorded.write_drifted();
        }
        // Nodes, then the record, then what it frees.
        for _ in 0..3 {
            for replica in self.replicas.values_mut() {
                while replica.maintenance.dirty
                    && !replica.is_prepared()
                    && replica.maintenance.commit.is_none()
                {
                    replica.begin_commit(&mut self.core)?;
                }
            }
            self.touch_all();
            self.core.tickets.request();
            use crate::api::ReplicaPool;
            if let Some(ticket) = self.sync_wanted() {
                let result = self.core.disk.sync();
                self.sync_finished(ticket, result)?;
            }
        }
        Ok(())
    }
}

impl crate::replica::Replica {
    /// Whether an increment waits for its flip: its maps must not change until then.
    pub fn is_prepared(&self) -> bool {
        self.shadow.as_ref().is_some_and(|s| s.prepared.is_some())
    }
}
