//! What is due of each replica, kept as replicas change.
//!
//! What to do next is asked at every turn of the pool's loop, and a pool may hold thousands of
//! replicas. So each says once what is due of it, and again only after it was used
//! ([`Pool::touch`]). Sets and sums over all of them answer the question.

use std::cell::Ref;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use quoin_types::{BLOCK_SIZE, ReplicaGuid};

use crate::core::PoolOptions;
use crate::disk::Disk;
use crate::pool::Pool;
use crate::replica::Replica;
use crate::segment_table::Held;

/// A fact about a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Is {
    /// A fold is under way.
    Folding,
    /// A fold or a clean-up is under way.
    AtWork,
    CountDue,
    /// Its log is rotten in a place that only a fold makes harmless.
    FoldWanted,
    /// Trims wait in its log that free more than is kept of it.
    Trimmed,
    /// Its record is older than its maps.
    ToRecord,
    /// A commit waits for a sync.
    Committing,
    /// Something was appended since the last sync began.
    Unsynced,
    /// Something waits for the sync under way.
    Syncing,
}

const FACTS: usize = Is::Syncing as usize + 1;

/// What is due of one replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Standing {
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
    changes: u64,
}

impl Standing {
    fn of(replica: &Replica, options: &PoolOptions) -> Self {
        let work = &replica.maintenance;
        // One that waits for its rebuild is not worked on.
        let is_workable = replica.quarantine.replica.is_none();
        let (position, synced) = (replica.head.position.lsn, &replica.synced);
        let is_foldable = is_workable && replica.has_foldable();
        let may_fold = is_foldable && replica.log.bytes > 0;
        let may_commit = is_workable && replica.may_commit();
        let may_clean = is_workable && !replica.is_clean_blocked();
        let trimmed = replica.log.hole_blocks * BLOCK_SIZE as u64;
        let segments = &replica.family.segments;
        let mut facts = [false; FACTS];
        let mut set = |fact: Is, holds: bool| facts[fact as usize] = holds;
        set(Is::Folding, is_workable && work.checkpoint.is_some());
        set(Is::AtWork, is_workable && work.has_job());
        set(Is::CountDue, is_workable && replica.is_count_due());
        set(Is::FoldWanted, work.fold_wanted && may_fold);
        set(Is::Trimmed, trimmed > options.log_keep_bytes && may_fold);
        set(Is::ToRecord, work.dirty && may_commit);
        set(Is::Committing, work.commit.is_some());
        set(Is::Unsynced, position != synced.syncing);
        set(Is::Syncing, synced.syncing > synced.durable);
        Standing {
            facts,
            emptied: if may_commit { work.pending_free.len() as u32 } else { 0 },
            coming_units: work.pending_units() + work.committing_units(),
            log_bytes: if is_workable { replica.log.bytes } else { 0 },
            is_foldable,
            candidates: if may_clean { segments.candidates() } else { Held::default() },
            least_live_percent: segments.least_live_percent().filter(|_| may_clean),
            changes: replica.family.changes,
        }
    }
}

/// What is due of all replicas of a pool.
#[derive(Default)]
pub struct Standings {
    of: BTreeMap<ReplicaGuid, Standing>,
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

impl Standings {
    /// The first replica of which this holds.
    pub fn first(&self, fact: Is) -> Option<ReplicaGuid> {
        self.facts[fact as usize].first().copied()
    }

    /// The replicas of which one of these holds, in order.
    pub fn either(&self, one: Is, other: Is) -> Vec<ReplicaGuid> {
        let [one, other] = [one, other].map(|fact| &self.facts[fact as usize]);
        one.union(other).copied().collect()
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

    fn put(&mut self, guid: ReplicaGuid, now: Option<Standing>) {
        let before = self.of.get(&guid).copied();
        if before == now {
            return;
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
            self.changes = self.changes.wrapping_sub(before.changes);
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
        self.changes = self.changes.wrapping_add(now.changes);
    }
}

impl<D: Disk> Pool<D> {
    /// Notes that a replica is used now, which may change what is due of it.
    pub(crate) fn touch(&self, guid: ReplicaGuid) {
        self.standings.borrow_mut().touched.insert(guid);
    }

    pub(crate) fn touch_all(&self) {
        self.standings.borrow_mut().touched.extend(self.replicas.keys());
    }

    /// What is due of all replicas as they are now.
    pub(crate) fn standings(&self) -> Ref<'_, Standings> {
        // Empty unless a replica was used, so nested calls find nothing to do.
        let is_stale = !self.standings.borrow().touched.is_empty();
        if is_stale {
            let mut standings = self.standings.borrow_mut();
            for guid in std::mem::take(&mut standings.touched) {
                let replica = self.replicas.get(&guid);
                let now = replica.map(|replica| Standing::of(replica, &self.core.options));
                standings.put(guid, now);
            }
        }
        let standings = self.standings.borrow();
        debug_assert!(
            self.replicas.len() == standings.of.len()
                && self.replicas.iter().all(|(guid, replica)| {
                    standings.of.get(guid) == Some(&Standing::of(replica, &self.core.options))
                }),
            "a replica was changed without a note of it"
        );
        standings
    }
}
