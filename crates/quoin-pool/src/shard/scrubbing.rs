//! Work of the shard between requests for the health of its replicas: steps of the scrub, and
//! asking targets for good copies of what was found bad.

use std::time::{Duration, Instant};

use quoin_replication::pool_host::scrub::Place;
use quoin_replication::replica::store::{ReplicaStore, StoreError};
use quoin_replication::replica::{Repaired, ReplicaEvent};
use quoin_store::{BadBlock, Due, ReplicaPool, ScrubAt, ScrubStage};
use quoin_telemetry::notices::Severity;
use quoin_types::message::BadCopy;
use quoin_types::{BLOCK_SIZE, ReplicaGuid, Time};

use super::Shard;
use super::holdings::Held;
use crate::facts::PoolFacts;
use crate::scrub::{Scrub, ScrubPlan, ScrubState};

/// Read in one step.
const STEP_BYTES: u64 = 512 << 10;
/// Stage of a pass that has read all replicas.
const METADATA: u64 = u64::MAX;
/// Clients come first where their next writes depend on background work.
const GIVE_WAY: Duration = Duration::from_millis(50);
/// A replica that is open but not fed yet is looked at again.
const FEED_SOON: Duration = Duration::from_millis(250);

/// The scrub, and the repairs that wait.
pub(super) struct Health {
    pub(super) scrub: Scrub,
    /// Time at which targets are to be asked for good copies.
    repair_at: Option<Time>,
}

impl Health {
    pub(super) fn new(plan: ScrubPlan) -> Self {
        Self { scrub: Scrub::new(plan), repair_at: None }
    }

    /// How long until there is something to do.
    pub(super) fn due_in(&self, now: Time) -> Option<Duration> {
        let repair = self.repair_at.map(|at| at.since(now));
        [self.scrub.due_in(now), repair].into_iter().flatten().min()
    }

    fn is_scrub_due(&self, now: Time) -> bool {
        self.scrub.due_in(now) == Some(Duration::ZERO)
    }

    fn is_repair_due(&self, now: Time) -> bool {
        self.repair_at.is_some_and(|at| at <= now)
    }
}

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    pub(super) fn keep_healthy(&mut self, now: Time) {
        if self.stop.has_begun() || self.failure.is_some() {
            return;
        }
        if self.health.is_scrub_due(now) {
            self.step_scrub(now);
        }
        if self.health.is_repair_due(now) {
            self.collect_bad_copies(now);
            self.ask_for_copies(now);
        }
    }

    pub(super) fn ask_for_scrub(&mut self, now: Time, request: u64) {
        let used = self.pool.space().used_bytes;
        if self.health.scrub.ask(now, request, used) {
            tracing::info!(request, "a scrub was asked for");
        }
    }

    pub(super) fn scrub_state(&self) -> ScrubState {
        self.health.scrub.state()
    }

    fn step_scrub(&mut self, now: Time) {
        if self.pool.background_due() == Due::Urgent {
            return self.health.scrub.postpone(now, GIVE_WAY);
        }
        let used = self.pool.space().used_bytes;
        let Some(place) = self.health.scrub.step(now, used) else { return };
        // The replica may be gone since: the next one then, from its start.
        let Some(guid) = self.replicas.next_from(place.replica) else {
            return self.scrub_metadata(now, place);
        };
        let at = match guid == place.replica {
            true => ScrubAt { stage: ScrubStage::of(place.stage), cursor: place.cursor },
            false => ScrubAt::default(),
        };
        let began = Instant::now();
        let done = match self.pool.scrub(guid, at, STEP_BYTES) {
            Ok(done) => done,
            Err(StoreError::Damaged(what)) => {
                self.deliver(now, guid, ReplicaEvent::Damaged(what));
                Default::default()
            }
            Err(StoreError::Pending(_)) => return self.wait_for_disk(now),
            // Room for what is written again comes with time.
            Err(StoreError::Full | StoreError::RingFull | StoreError::Rule(_)) => {
                return self.health.scrub.postpone(now, Duration::from_secs(10));
            }
            Err(error @ StoreError::Io(_)) => return self.fail(error),
        };
        let next = match done.next {
            Some(at) => Place { replica: guid, stage: at.stage.number(), cursor: at.cursor },
            None => Place { replica: ReplicaGuid(guid.0.saturating_add(1)), ..Place::default() },
        };
        self.parts.metrics.scrub.read.inc_by(done.read_bytes);
        if done.headers > 0 {
            self.health.scrub.found(now, done.headers.into());
            self.parts.metrics.scrub.found.inc_by(done.headers.into());
            self.tell_of(
                guid,
                Severity::Warning,
                "BadHeaders",
                format!(
                    "{} headers or nodes of the pool's own were bad on media; they were written \
                     again or are no longer needed",
                    done.headers
                ),
            );
        }
        self.collect_bad_copies(now);
        self.health.scrub.stepped(now, began.elapsed(), done.read_bytes, next);
        self.begin_sync();
    }

    /// The step is done once what it lacks was read.
    fn wait_for_disk(&mut self, now: Time) {
        self.health.scrub.wait(now);
        self.begin_fetches(now);
    }

    /// A step of the end of a pass, which reads all that belongs to no replica.
    fn scrub_metadata(&mut self, now: Time, place: Place) {
        let (at, began) = ((place.stage == METADATA).then_some(place.cursor), Instant::now());
        let done = match self.pool.scrub_metadata(at) {
            Ok(done) => done,
            Err(StoreError::Pending(_)) => return self.wait_for_disk(now),
            Err(error @ StoreError::Io(_)) => return self.fail(error),
            Err(error) => {
                tracing::warn!(%error, "the metadata could not be scrubbed");
                Default::default()
            }
        };
        if done.bad > 0 {
            self.health.scrub.found(now, done.bad.into());
            self.parts.metrics.scrub.found.inc_by(done.bad.into());
            let message =
                format!("{} bad copies of the pool's metadata were written again", done.bad);
            self.parts.notices.push(Severity::Warning, "", "", "MetadataRepaired", message);
        }
        match done.next {
            Some(cursor) => {
                let next = Place { stage: METADATA, cursor, ..place };
                self.health.scrub.stepped(now, began.elapsed(), 0, next);
                self.begin_sync();
            }
            None => self.end_scrub(now),
        }
    }

    fn end_scrub(&mut self, now: Time) {
        let state = self.health.scrub.ended(now);
        self.parts.metrics.scrub.runs.inc();
        let severity = if state.found == 0 { Severity::Normal } else { Severity::Warning };
        let found = match state.found {
            0 => "nothing was bad".to_owned(),
            1 => "1 thing was bad".to_owned(),
            n => format!("{n} things were bad"),
        };
        let (mib, seconds) = (state.read_bytes >> 20, state.ended_s.saturating_sub(state.began_s));
        let message = format!("{mib} MiB read in {seconds} s: {found}");
        self.parts.notices.push(severity, "", "", "ScrubEnded", message);
        self.begin_sync();
    }

    /// Takes over what the store found bad; asked for at once where a target feeds the replica.
    pub(super) fn collect_bad_copies(&mut self, now: Time) {
        let mut found = 0;
        for bad in self.pool.take_bad_blocks() {
            let Some(held) = self.replicas.get_mut(bad.replica) else { continue };
            let BadBlock { lba, blocks, version, snapshot, .. } = bad;
            let copy = BadCopy { lba, blocks, version, snapshot };
            if held.repairs.found(now, copy) {
                found += 1;
                self.health.repair_at = Some(now);
            }
        }
        self.health.scrub.found(now, found);
        self.parts.metrics.scrub.found.inc_by(found);
    }

    fn ask_for_copies(&mut self, now: Time) {
        let mut next: Option<Time> = None;
        let wanting = self.replicas.iter().filter(|(_, held)| !held.repairs.is_empty());
        for guid in wanting.map(|(guid, _)| guid).collect::<Vec<_>>() {
            let Some(held) = self.replicas.get_mut(guid) else { continue };
            let at = match (held.replica.is_open(), held.replica.is_fed()) {
                (false, _) => continue,
                (true, false) => Some(now + FEED_SOON),
                (true, true) => {
                    let copies: Vec<_> = std::iter::from_fn(|| held.repairs.next(now)).collect();
                    let due = held.repairs.due().map(|due| due.max(now + GIVE_WAY));
                    for copy in copies {
                        self.deliver(now, guid, ReplicaEvent::BadCopy(copy));
                    }
                    due
                }
            };
            next = [next, at].into_iter().flatten().min();
        }
        self.health.repair_at = next;
        self.finish_round(now);
    }

    /// A target opened the replica: what waited for one can be asked for.
    pub(super) fn opened(&mut self, guid: ReplicaGuid) {
        let now = quoin_reactor::now();
        if let Some(held) = self.replicas.get_mut(guid)
            && !held.repairs.is_empty()
        {
            held.repairs.opened(now);
            self.health.repair_at = Some(now);
        }
    }

    pub(super) fn copy_came(&mut self, guid: ReplicaGuid, repaired: Repaired) {
        let now = quoin_reactor::now();
        let Some(held) = self.replicas.get_mut(guid) else { return };
        if held.repairs.answered(now, repaired) {
            self.parts.metrics.scrub.repaired.inc();
        }
        if !held.repairs.is_empty() {
            self.health.repair_at = Some(now);
        }
    }

    /// One notice a replica and turn: a bad spot of a disk is seldom one block.
    pub(super) fn tell_repairs(&mut self, replicas: &[ReplicaGuid]) {
        for guid in replicas.iter().copied() {
            let has_news = |held: &Held| held.repairs.has_news();
            if !self.replicas.get(guid).is_some_and(has_news) {
                continue;
            }
            let Some(held) = self.replicas.get_mut(guid) else { continue };
            let (news, open) = (held.repairs.take_news(), held.replica.is_open());
            if news.found > 0 {
                let way = match open {
                    true => "another replica's copies replace them",
                    false => "they are repaired while the volume is attached",
                };
                let message = format!(
                    "{} bad blocks or stretches were found, the first at offset {}: reads are \
                     served by other replicas; {way}",
                    news.found,
                    news.first_lba * BLOCK_SIZE as u64
                );
                self.tell_of(guid, Severity::Warning, "BadBlocks", message);
            }
            if news.mended > 0 {
                let message = format!("{} bad copies were replaced", news.mended);
                self.tell_of(guid, Severity::Normal, "BadBlocksRepaired", message);
            }
        }
    }

    pub(super) fn tell_of(
        &mut self,
        guid: ReplicaGuid,
        severity: Severity,
        reason: &str,
        message: String,
    ) {
        let Some(store) = self.pool.replica(guid) else { return };
        let (volume, replica) = (store.identity().volume, store.identity().replica);
        drop(store);
        self.parts.notices.push(severity, volume, replica, reason, message);
    }
}
