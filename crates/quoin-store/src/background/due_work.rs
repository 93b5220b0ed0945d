//! What is due of each replica, kept as replicas change.
//!
//! What to do next is asked at every turn of the pool's loop, and a pool may hold thousands of
//! replicas. So each says once what is due of it, and again only after it was used
//! (`Pool::touch`). Sets and sums over all of them answer the question.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use quoin_types::{BLOCK_SIZE, ReplicaGuid};

use crate::background::checkpoint;
use crate::background::cleaner;
use crate::background::difference;
use crate::background::recount;
use crate::background::scheduler;
use crate::clones::flatten;
use crate::core::PoolOptions;
use crate::replica::Replica;
use crate::space::segment_table::Held;

/// A fact about a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fact {
    /// A fold is under way.
    Folding,
    /// A fold or a clean-up is under way.
    AtWork,
    CountDue,
    /// A view went away, and what it leaves dead can be counted.
    ViewLeaving,
    /// Its log is to be folded however little of it there is (`Maintenance::fold_wanted`).
    FoldWanted,
    /// Trims wait in its log that free more than is kept of it, or the end of a view: a Revert, which
    /// also costs every read a second lookup, or a deleted snapshot.
    Trimmed,
    /// Its record is older than its maps.
    ToRecord,
    /// It takes over blocks of its base, and may now.
    Flattening,
    /// Its dead blocks are to be given back, and much of it is dead.
    Reclaiming,
}

/// Debug builds compare what is known of so many replicas with what they say, each time.
const COMPARED_REPLICAS: usize = 256;

const FACTS: usize = Fact::Reclaiming as usize + 1;

/// What is due of one replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct ReplicaWork {
    facts: [bool; FACTS],
    /// Segments that were emptied and wait for a commit, if one may begin.
    emptied: u32,
    /// Units that its next commits free.
    coming_units: u32,
    /// Bytes of its log; 0 of one that is not worked on.
    log_bytes: u64,
    /// Some of its log could be folded.
    is_foldable: bool,
    /// Of one whose segments may be emptied.
    candidates: Held,
    /// Live percent of the segment with the least to move.
    least_live_percent: Option<u8>,
    /// Differs whenever another of its segments may be worth emptying.
    changes: u64,
}

impl ReplicaWork {
    /// What the choice of a victim depends on.
    fn of_victims(&self) -> (u64, Held, Option<u8>, bool) {
        let reclaims = self.facts[Fact::Reclaiming as usize];
        (self.changes, self.candidates, self.least_live_percent, reclaims)
    }

    fn of(replica: &Replica, options: &PoolOptions) -> Self {
        let work = &replica.maintenance;
        // One that waits for its rebuild is not worked on.
        let is_workable = replica.maintenance.quarantined.is_none();
        let is_foldable = is_workable && scheduler::has_foldable(replica);
        let may_fold = is_foldable && replica.log.bytes > 0;
        let may_commit = is_workable && scheduler::may_commit(replica);
        let may_clean = is_workable && !cleaner::is_blocked(replica);
        let trimmed = replica.log.hole_blocks * BLOCK_SIZE as u64;
        let segments = &replica.family.segments;
        let mut facts = [false; FACTS];
        let mut set = |fact: Fact, holds: bool| facts[fact as usize] = holds;
        set(Fact::Folding, is_workable && work.checkpoint.is_some());
        set(Fact::AtWork, is_workable && work.has_job());
        set(Fact::CountDue, is_workable && recount::is_due(replica));
        set(Fact::ViewLeaving, is_workable && difference::is_due(replica));
        set(Fact::FoldWanted, work.fold_wanted && may_fold);
        let gone =
            replica.log.first_view_gone().is_some_and(|lsn| lsn <= checkpoint::foldable(replica));
        set(Fact::Trimmed, (trimmed > options.log_keep_bytes || gone) && may_fold);
        set(Fact::ToRecord, work.dirty && may_commit);
        set(Fact::Flattening, is_workable && flatten::is_due(replica));
        set(Fact::Reclaiming, is_workable && scheduler::reclaims(replica));
        ReplicaWork {
            facts,
            emptied: if may_commit { work.pending_free.len() as u32 } else { 0 },
            coming_units: work.pending_units() + work.committing_units(),
            log_bytes: if is_workable { replica.log.bytes } else { 0 },
            is_foldable,
            candidates: if may_clean { segments.candidates() } else { Held::default() },
            least_live_percent: segments.least_live_percent().filter(|_| may_clean),
            changes: replica.family.changes + segments.aside_changes(),
        }
    }
}

/// What is due of all replicas of a pool.
#[derive(Default)]
pub struct DueWork {
    of: BTreeMap<ReplicaGuid, ReplicaWork>,
    /// Replicas that were used since they said what is due of them.
    touched: BTreeSet<ReplicaGuid>,
    facts: [BTreeSet<ReplicaGuid>; FACTS],
    by_emptied: BTreeSet<(u32, ReplicaGuid)>,
    by_log: BTreeSet<(u64, Reverse<ReplicaGuid>)>,
    by_live_percent: BTreeSet<(u8, ReplicaGuid)>,
    coming_units: u32,
    log_bytes: u64,
    candidates: Held,
    changes: u64,
}

impl DueWork {
    /// The first replica of which this holds.
    pub fn first(&self, fact: Fact) -> Option<ReplicaGuid> {
        self.facts[fact as usize].first().copied()
    }

    /// The replica with the most emptied segments that wait for a commit.
    pub fn most_emptied(&self) -> Option<(u32, ReplicaGuid)> {
        self.by_emptied.last().copied()
    }

    /// Replicas some of whose log could be folded.
    pub fn foldable(&self) -> impl Iterator<Item = ReplicaGuid> + '_ {
        self.by_log.iter().map(|(_, guid)| guid.0)
    }

    /// The one of them with the most log.
    pub fn longest_log(&self) -> Option<(u64, ReplicaGuid)> {
        self.by_log.last().map(|(bytes, guid)| (*bytes, guid.0))
    }

    /// Replicas with a segment that may be emptied and is no fuller than this.
    pub fn with_candidates(&self, live_percent: u64) -> impl Iterator<Item = ReplicaGuid> + '_ {
        let emptiest_first = self.by_live_percent.iter();
        emptiest_first
            .take_while(move |(percent, _)| u64::from(*percent) <= live_percent)
            .map(|(_, guid)| *guid)
    }

    pub fn coming_units(&self) -> u32 {
        self.coming_units
    }

    pub fn log_bytes(&self) -> u64 {
        self.log_bytes
    }

    /// Sums of all segments that may be emptied.
    pub fn candidates(&self) -> Held {
        self.candidates
    }

    /// Differs whenever another segment may be worth emptying.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Notes that a replica is used now, which may change what is due of it.
    pub fn touch(&mut self, guid: ReplicaGuid) {
        self.touched.insert(guid);
    }

    /// Returns true if a replica was used since the last [`DueWork::update`].
    pub fn is_stale(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Asks the replicas that were used what is due of them now.
    pub fn update(&mut self, replicas: &BTreeMap<ReplicaGuid, Replica>, options: &PoolOptions) {
        for guid in std::mem::take(&mut self.touched) {
            let now = replicas.get(&guid).map(|replica| ReplicaWork::of(replica, options));
            self.put(guid, now);
        }
    }

    /// Returns true if what is known is what the replicas say. Of many replicas that is not asked.
    pub fn agrees_with(
        &self,
        replicas: &BTreeMap<ReplicaGuid, Replica>,
        options: &PoolOptions,
    ) -> bool {
        let is_known = |(guid, replica): (&ReplicaGuid, &Replica)| {
            self.of.get(guid) == Some(&ReplicaWork::of(replica, options))
        };
        replicas.len() > COMPARED_REPLICAS
            || replicas.len() == self.of.len() && replicas.iter().all(is_known)
    }

    fn put(&mut self, guid: ReplicaGuid, now: Option<ReplicaWork>) {
        let before = self.of.get(&guid).copied();
        if before == now {
            return;
        }
        if before.map(|work| work.of_victims()) != now.map(|work| work.of_victims()) {
            self.changes += 1;
        }
        if let Some(before) = before {
            self.of.remove(&guid);
            for replicas in &mut self.facts {
                replicas.remove(&guid);
            }
            self.by_emptied.remove(&(before.emptied, guid));
            self.by_log.remove(&(before.log_bytes, Reverse(guid)));
            if let Some(percent) = before.least_live_percent {
                self.by_live_percent.remove(&(percent, guid));
            }
            self.coming_units -= before.coming_units;
            self.log_bytes -= before.log_bytes;
            self.candidates.capacity -= before.candidates.capacity;
            self.candidates.live -= before.candidates.live;
        }
        let Some(now) = now else { return };
        self.of.insert(guid, now);
        for (replicas, _) in self.facts.iter_mut().zip(now.facts).filter(|(_, holds)| *holds) {
            replicas.insert(guid);
        }
        if now.emptied > 0 {
            self.by_emptied.insert((now.emptied, guid));
        }
        if now.is_foldable {
            self.by_log.insert((now.log_bytes, Reverse(guid)));
        }
        self.by_live_percent.extend(now.least_live_percent.map(|percent| (percent, guid)));
        self.coming_units += now.coming_units;
        self.log_bytes += now.log_bytes;
        self.candidates.capacity += now.candidates.capacity;
        self.candidates.live += now.candidates.live;
    }
}
