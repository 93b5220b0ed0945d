//! Self-healing makes replicas elsewhere without a request: replicas that are gone for longer than
//! the volume's `replaceAfter`, and replicas on pools that are being drained.
//!
//! A volume is looked at when something of it changes, and every second while it is not at rest. What
//! its look finds is a need. Once a second the needs have their turn, the most endangered volume first:
//! the volume that could lose the fewest further replicas. Each volume has one change at a time, and each pool a
//! few rebuilds at a time, placed by the rules of new replicas. Self-healing removes no replica:
//! the old one counts until the target has rebuilt the new one and swapped it in, so no last good
//! copy is ever given up. An event reports where too few replicas are left to rebuild from.
//!
//! A newcomer whose pool goes away before it counts is made elsewhere sooner, unless a user named its
//! pool: nothing that counts is there.
//!
//! The controller counts the time from when it first missed the replica. A restart counts anew,
//! which can only lengthen the wait. A replica that its target reaches is present, also if the
//! pool's reports are missing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use quoin_cluster::records::{Cause, ReplicaRecord, VolumeRecord};
use quoin_types::membership::open_quorum;
use quoin_types::{ReplicaGuid, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::reconcile::rebalance::Balancer;
use crate::reconcile::{LOOK_EVERY, Next, Queue, Reconciler, SETTLES_WITHIN, VOLUMES_MAX};
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::status::{ReplicaStatus, VolumeStatus};
use crate::volume::placement::Candidate;
use crate::volume::policy::ReplaceAfter;
use crate::volume::scale::relocate;

/// Most replicas begun in one turn; the next turn is a second later.
const BEGUN_MAX: usize = 16;
/// A newcomer that does not count yet is made elsewhere where its pool is away for so long.
const NEWCOMER_GONE_AFTER: Duration = Duration::from_secs(30);

/// Counts of self-healing, for the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Healing {
    pub begun: u64,
    pub given_up: u64,
    /// Replicas that wait for their turn.
    pub waiting: u64,
    /// Replicas that cannot be made elsewhere now.
    pub stuck: u64,
}

/// Reconciler that makes replicas elsewhere.
pub struct Healer {
    state: Arc<State>,
    balancer: Arc<Balancer>,
    queue: Arc<Queue<Step>>,
    memory: Mutex<Memory>,
}

/// Work of the healer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) enum Step {
    Volume(VolumeId),
    /// The needs that were found have their turn.
    Turn,
}

/// Kept between two looks.
#[derive(Debug, Default)]
struct Memory {
    counts: Healing,
    /// Since when replicas are missed.
    gone: HashMap<VolumeId, HashMap<ReplicaGuid, Instant>>,
    /// Replicas that should be elsewhere, by the last look at their volume.
    needs: BTreeMap<VolumeId, Vec<Need>>,
    /// Reasons of the replicas that cannot be made elsewhere, as they were told.
    stuck: HashMap<ReplicaGuid, String>,
}

impl Memory {
    fn forget(&mut self, volume: VolumeId) {
        self.gone.remove(&volume);
        self.needed(volume, Vec::new());
    }

    /// It was begun.
    fn met(&mut self, met: &Need) {
        let needs = self.needs.remove(&met.volume).into_iter().flatten();
        let left: Vec<_> = needs.filter(|need| need.guid != met.guid).collect();
        if !left.is_empty() {
            self.needs.insert(met.volume, left);
        }
        self.stuck.remove(&met.guid);
    }

    fn needed(&mut self, volume: VolumeId, needs: Vec<Need>) {
        let before = match needs.is_empty() {
            true => self.needs.remove(&volume),
            false => self.needs.insert(volume, needs),
        };
        for need in before.into_iter().flatten() {
            let now = self.needs.get(&volume).into_iter().flatten();
            if now.into_iter().all(|now| now.guid != need.guid) {
                self.stuck.remove(&need.guid);
            }
        }
    }
}

/// Replica that should be elsewhere.
#[derive(Clone, Copy, Debug)]
struct Need {
    volume: VolumeId,
    guid: ReplicaGuid,
    cause: Cause,
    /// Number of known replicas that the volume can still lose before its writes wait.
    spare: i16,
    gone: Duration,
    /// It is no replica that counts, and is made elsewhere before the volume's time is over.
    newcomer: bool,
}

#[async_trait]
impl Reconciler for Healer {
    type Key = Step;
    const NAME: &'static str = "heal";

    fn queue(&self) -> &Queue<Step> {
        &self.queue
    }

    async fn reconcile(&self, step: &Step, now: Instant) -> Result<Next, Error> {
        match (step, self.state.check_ruling()) {
            (Step::Volume(volume), Ok(())) => {
                self.look(*volume, &crate::reconcile::cordon::draining(&self.state), now).await
            }
            (Step::Volume(_), Err(_)) => Ok(Next::Rest),
            (Step::Turn, ruling) => {
                if ruling.is_ok() {
                    self.turn().await?;
                }
                Ok(Next::After(LOOK_EVERY))
            }
        }
    }
}

impl Healer {
    pub(crate) fn new(state: Arc<State>, balancer: Arc<Balancer>) -> Self {
        let queue = Arc::new(Queue::new(VOLUMES_MAX));
        let filled = queue.clone();
        state.queue_volumes(move |id| filled.add(Step::Volume(id), SETTLES_WITHIN));
        queue.add(Step::Turn, LOOK_EVERY);
        Self { state, balancer, queue, memory: Mutex::default() }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().expect("no holder of this lock panics")
    }

    pub fn counts(&self) -> Healing {
        self.memory().counts
    }

    /// Returns true if replicas should be elsewhere and wait for it.
    pub(crate) fn is_busy(&self) -> bool {
        let memory = self.memory();
        memory.needs.values().map(Vec::len).sum::<usize>() > memory.stuck.len()
    }

    /// Looks at every volume, and at the balance of the pools, as of this time.
    pub async fn look_at_all(&self, now: Instant) -> Result<(), Error> {
        if self.state.check_ruling().is_err() {
            return Ok(());
        }
        let volumes = self.state.volumes.list();
        self.look_at(&volumes, now).await?;
        let begun = self.turn().await?;
        self.balancer.look(begun > 0 || self.is_busy(), now).await
    }

    /// Looks at these volumes now instead of after a pause, and begins what is due.
    pub(crate) async fn heal(&self, volumes: &[Arc<VolumeRecord>]) -> Result<(), Error> {
        if self.state.check_ruling().is_ok() {
            self.look_at(volumes, Instant::now()).await?;
            self.turn().await?;
        }
        Ok(())
    }

    async fn look_at(&self, volumes: &[Arc<VolumeRecord>], now: Instant) -> Result<(), Error> {
        let draining = crate::reconcile::cordon::draining(&self.state);
        for volume in volumes {
            self.look(volume.id.0, &draining, now).await?;
        }
        Ok(())
    }

    /// Finds what one volume needs, and drops newcomers that it needs no more.
    async fn look(
        &self,
        id: VolumeId,
        draining: &HashSet<String>,
        now: Instant,
    ) -> Result<Next, Error> {
        let volume = self.state.volumes.get(&id.to_string());
        let Some(volume) = volume.filter(|volume| volume.phase.is_kept()) else {
            self.memory().forget(id);
            self.balancer.forget(id);
            return Ok(Next::Rest);
        };
        let status = crate::status::of(&self.state, &volume);
        let missed = self.miss(&volume, &status, now);
        let needed = self.needs(&volume, &status, &missed, draining);
        let urgent = needed.iter().map(|need| need.guid).collect();
        if self.give_up(&volume, &status, draining).await?
            || self.release(&volume, &missed).await?
            || self.balancer.give_up_move(&volume, &missed, &urgent, now).await?
        {
            self.memory().needed(id, Vec::new());
            return Ok(Next::After(LOOK_EVERY));
        }
        let is_changing = volume.replicas.iter().any(|r| !volume.is_known(r) || r.leaving);
        let next = match (is_changing || !needed.is_empty(), self.overdue_in(&volume, &missed)) {
            (true, _) => Next::After(LOOK_EVERY),
            (false, Some(left)) => Next::After(left.max(LOOK_EVERY)),
            (false, None) => Next::Rest,
        };
        self.memory().needed(id, needed);
        Ok(next)
    }

    /// Time until the first missed replica of a volume is overdue.
    fn overdue_in(
        &self,
        volume: &VolumeRecord,
        missed: &HashMap<ReplicaGuid, Duration>,
    ) -> Option<Duration> {
        let ReplaceAfter::After(after) = self.state.replace_after(volume) else { return None };
        missed.values().map(|gone| after.saturating_sub(*gone)).min()
    }

    /// Begins the replicas whose turn it is. Returns their number.
    async fn turn(&self) -> Result<usize, Error> {
        let mut needs: Vec<Need> = self.memory().needs.values().flatten().copied().collect();
        needs.sort_by_key(|need| (need.spare, Reverse(need.gone), need.volume));
        let begun = self.begin_first(&needs).await?;
        {
            let memory = &mut *self.memory();
            let (waiting, stuck) = (needs.len().saturating_sub(begun), memory.stuck.len());
            memory.counts.begun += begun as u64;
            memory.counts.waiting = waiting.saturating_sub(stuck) as u64;
            memory.counts.stuck = stuck as u64;
        }
        crate::reconcile::cordon::tell_drained(&self.state).await?;
        Ok(begun)
    }

    /// Begins the replicas whose turn it is, in this order. Returns their number.
    async fn begin_first(&self, needs: &[Need]) -> Result<usize, Error> {
        if needs.is_empty() {
            return Ok(0);
        }
        let _one_at_a_time = self.state.creating.lock().await;
        let mut room = self.room();
        let mut begun = 0;
        for need in needs {
            if begun == BEGUN_MAX {
                break;
            }
            if self.begin(need, &room).await? {
                begun += 1;
                self.memory().met(need);
                room = self.room();
            }
        }
        Ok(begun)
    }

    /// Current room of the pools; it has to be read anew after each beginning.
    fn room(&self) -> Room {
        let (most, candidates) =
            (self.state.settings.heals_per_pool, crate::volume::volumes::candidates(&self.state));
        let mut free = candidates.clone();
        self.state.volumes.index(|index| {
            for candidate in &mut free {
                if index.rebuilds().to(&candidate.name) >= most {
                    candidate.unusable = format!("{most} replicas are being rebuilt there");
                }
            }
        });
        Room { candidates, free }
    }

    /// Missed replicas, and the time for which each is missed.
    fn miss(
        &self,
        volume: &VolumeRecord,
        status: &VolumeStatus,
        now: Instant,
    ) -> HashMap<ReplicaGuid, Duration> {
        let mut memory = self.memory();
        let before = memory.gone.remove(&volume.id.0).unwrap_or_default();
        let pairs = volume.replicas.iter().zip(&status.replicas);
        let gone = pairs.filter(|(_, status)| status.gone).map(|(replica, _)| replica.guid.0);
        let gone: HashMap<_, _> =
            gone.map(|guid| (guid, before.get(&guid).copied().unwrap_or(now))).collect();
        let missed = gone.iter().map(|(guid, since)| (*guid, now.duration_since(*since))).collect();
        if !gone.is_empty() {
            memory.gone.insert(volume.id.0, gone);
        }
        missed
    }

    fn needs(
        &self,
        volume: &VolumeRecord,
        status: &VolumeStatus,
        missed: &HashMap<ReplicaGuid, Duration>,
        draining: &HashSet<String>,
    ) -> Vec<Need> {
        let after = self.state.replace_after(volume);
        let spare = in_sync(volume, status) as i16 - i16::from(volume.membership.cf);
        let mut needs = Vec::new();
        for replica in volume.replicas.iter().filter(|r| !r.leaving && !volume.is_followed(r)) {
            let gone = missed.get(&replica.guid.0).copied().unwrap_or_default();
            let overdue = matches!(after, ReplaceAfter::After(after) if gone >= after);
            let newcomer =
                !overdue && is_free_to_go(volume, replica) && gone >= NEWCOMER_GONE_AFTER;
            let cause = match (overdue, newcomer, draining.contains(&replica.pool)) {
                (true, ..) => Cause::Healing,
                (_, true, _) => replica.cause,
                (_, _, true) => Cause::Drain,
                _ => continue,
            };
            let guid = replica.guid.0;
            needs.push(Need { volume: volume.id.0, guid, cause, spare, gone, newcomer });
        }
        needs
    }

    /// Begins to make a replica elsewhere, if its turn has come and it is possible.
    async fn begin(&self, need: &Need, room: &Room) -> Result<bool, Error> {
        let state = &self.state;
        let Some(volume) = state.volumes.get(&need.volume.to_string()) else { return Ok(false) };
        let Some(replica) = volume.replicas.iter().find(|r| r.guid.0 == need.guid) else {
            return Ok(false);
        };
        if is_changing_beside(&volume, need.guid) {
            return Ok(false);
        }
        if let Err(why) = rebuildable(&volume, &crate::status::of(state, &volume)) {
            self.stuck(&volume, need, &why);
            return Ok(false);
        }
        let mut trial = VolumeRecord::clone(&volume);
        if let Err(refusal) = relocate(&mut trial, need.guid, "", &room.candidates, need.cause) {
            self.stuck(&volume, need, &refusal.to_string());
            return Ok(false);
        }
        let most = state.settings.heals_per_pool;
        // Draining a pool is limited to as many rebuilds at a time as filling one.
        let from = state.volumes.index(|index| index.rebuilds().from(&replica.pool));
        if need.cause == Cause::Drain && from >= most {
            return Ok(false);
        }
        let gone = need.gone;
        let change = |volume: &mut VolumeRecord| {
            // If the volume changed since this check, the next check decides.
            if !volume.phase.is_kept()
                || is_changing_beside(volume, need.guid)
                || !volume.replicas.iter().any(|r| r.guid.0 == need.guid && !r.leaving)
            {
                return Ok(None);
            }
            match relocate(volume, need.guid, "", &room.free, need.cause) {
                Err(Error::Exhausted(_)) => Ok(None),
                other => other.map(Some),
            }
        };
        let begun = match state.update_volume(need.volume, change).await {
            Err(Error::NotFound { .. }) => return Ok(false),
            other => other?.1,
        };
        let Some((old, pool)) = begun else { return Ok(false) };
        let (reason, why) = match need.cause {
            _ if need.newcomer => (
                "ReplicaHeals",
                format!("gone from pool {} for {} s before it counted", old.pool, gone.as_secs()),
            ),
            Cause::Drain => ("ReplicaDrained", format!("pool {} is being drained", old.pool)),
            _ => (
                "ReplicaHeals",
                format!(
                    "gone from pool {} for {} s, replaceAfter is {}",
                    old.pool,
                    gone.as_secs(),
                    state.replace_after(&volume)
                ),
            ),
        };
        let message = format!("{why}: it is made anew on pool {pool}");
        let object = Object::new("replica", old.id.0, &volume.spec.name);
        state.events.record(Severity::Normal, object, reason, message);
        Ok(true)
    }

    /// Records why a replica stays where it should not be, with one event for each reason.
    fn stuck(&self, volume: &VolumeRecord, need: &Need, why: &str) {
        let told = self.memory().stuck.insert(need.guid, why.to_owned());
        if told.is_some_and(|told| told == why) {
            return;
        }
        let Some(replica) = volume.replicas.iter().find(|r| r.guid.0 == need.guid) else {
            return;
        };
        let what = match need.cause {
            Cause::Drain => format!("pool {} is being drained", replica.pool),
            _ => format!("gone from pool {}", replica.pool),
        };
        let object = Object::new("replica", replica.id.0, &volume.spec.name);
        let message = format!("{what}, and it cannot be made anew: {why}");
        self.state.events.record(Severity::Warning, object, "HealWaits", message);
    }

    /// Drops a newcomer whose old replica came back before the rebuild was done: the old replica
    /// has nearly all data.
    async fn give_up(
        &self,
        volume: &Arc<VolumeRecord>,
        status: &VolumeStatus,
        draining: &HashSet<String>,
    ) -> Result<bool, Error> {
        if !volume.replicas.iter().any(|replica| replica.cause == Cause::Healing) {
            return Ok(false);
        }
        let good: HashSet<_> = volume
            .replicas
            .iter()
            .zip(&status.replicas)
            .filter(|(replica, status)| {
                status.phase == "InSync" && !draining.contains(&replica.pool)
            })
            .map(|(replica, _)| replica.guid)
            .collect();
        let is_surplus = |volume: &VolumeRecord, at: usize| {
            let newcomer = &volume.replicas[at];
            newcomer.cause == Cause::Healing
                && !volume.is_known(newcomer)
                && volume.replicas.iter().any(|old| {
                    old.id == newcomer.id && volume.is_known(old) && good.contains(&old.guid)
                })
        };
        if !(0..volume.replicas.len()).any(|at| is_surplus(volume, at)) {
            return Ok(false);
        }
        let change = |volume: &mut VolumeRecord| {
            let surplus = (0..volume.replicas.len()).find(|at| is_surplus(volume, *at));
            Ok(surplus.map(|at| volume.discard(at)))
        };
        let (volume, gone) = match self.state.update_volume(volume.id.0, change).await {
            Err(Error::NotFound { .. }) => return Ok(true),
            other => other?,
        };
        if let Some(gone) = gone {
            self.memory().counts.given_up += 1;
            let object = Object::new("replica", gone.id.0, &volume.spec.name);
            let message = format!("it is back; the one begun on pool {} is dropped", gone.pool);
            self.state.events.record(Severity::Normal, object, "HealGivenUp", message);
        }
        Ok(true)
    }

    /// Removes overdue newcomers from the record where a target waits for them to open the volume.
    /// These newcomers count nowhere; only a joint View names them. They are made elsewhere where
    /// that is possible.
    async fn release(
        &self,
        volume: &Arc<VolumeRecord>,
        missed: &HashMap<ReplicaGuid, Duration>,
    ) -> Result<bool, Error> {
        if volume.replicas.iter().all(|replica| volume.is_known(replica)) {
            return Ok(false);
        }
        let silent = crate::disaster::recovery::silent(&self.state, volume);
        let ReplaceAfter::After(after) = self.state.replace_after(volume) else { return Ok(false) };
        let overdue = |volume: &VolumeRecord, replica: &ReplicaRecord| {
            let guid = replica.guid.0;
            !volume.is_known(replica)
                && silent.contains(&guid)
                && missed.get(&guid).is_some_and(|gone| *gone >= after)
        };
        if !volume.replicas.iter().any(|replica| overdue(volume, replica)) {
            return Ok(false);
        }
        let candidates = crate::volume::volumes::candidates(&self.state);
        let change = |volume: &mut VolumeRecord| {
            let mut released = Vec::new();
            while let Some(at) = volume.replicas.iter().position(|r| overdue(volume, r)) {
                let newcomer = volume.replicas[at].clone();
                let cause = newcomer.cause;
                match relocate(volume, newcomer.guid.0, "", &candidates, cause) {
                    Ok((_, pool)) => released.push((newcomer, Some(pool))),
                    Err(_) => {
                        volume.discard(at);
                        released.push((newcomer, None));
                    }
                }
            }
            Ok(released)
        };
        let (volume, released) = match self.state.update_volume(volume.id.0, change).await {
            Err(Error::NotFound { .. }) => return Ok(true),
            other => other?,
        };
        for (gone, elsewhere) in released {
            let object = Object::new("replica", gone.id.0, &volume.spec.name);
            let elsewhere = match elsewhere {
                Some(pool) => format!("it is made anew on pool {pool}"),
                None => "it is dropped".to_owned(),
            };
            let pool = gone.pool;
            let message =
                format!("gone from pool {pool}, and the volume waits for it: {elsewhere}");
            self.state.events.record(Severity::Warning, object, "NewcomerDropped", message);
        }
        Ok(true)
    }

    /// Reason why a replica that should be elsewhere stays where it is.
    pub(crate) fn why_stuck(&self, guid: ReplicaGuid) -> Option<String> {
        self.memory().stuck.get(&guid).cloned()
    }
}

/// Pools where a replica may be made.
struct Room {
    candidates: Vec<Candidate>,
    /// The same, without those that take enough rebuilds already.
    free: Vec<Candidate>,
}

/// Returns true if a replica counts nowhere yet, and no user named its pool. A move that evens out
/// pools is given up instead.
fn is_free_to_go(volume: &VolumeRecord, replica: &ReplicaRecord) -> bool {
    !volume.is_known(replica) && !replica.placed && replica.cause != Cause::Balance
}

/// Number of known replicas that are in sync.
pub(crate) fn in_sync(volume: &VolumeRecord, status: &VolumeStatus) -> usize {
    let pairs = volume.replicas.iter().zip(&status.replicas);
    pairs.filter(|(r, s)| volume.is_known(r) && s.phase == "InSync").count()
}

/// Returns true if another change of the volume's replicas is under way.
fn is_changing_beside(volume: &VolumeRecord, guid: ReplicaGuid) -> bool {
    let newcomer = |r: &ReplicaRecord| r.guid.0 != guid && !volume.is_known(r);
    volume.replicas.iter().any(|replica| replica.leaving || newcomer(replica))
}

/// Checks that a replica can be rebuilt from the others; the error says which pools are missing.
pub(crate) fn rebuildable(volume: &VolumeRecord, status: &VolumeStatus) -> Result<(), String> {
    let membership = &volume.membership;
    let needed = usize::from(open_quorum(membership.rf, membership.cf));
    let pairs = || volume.replicas.iter().zip(&status.replicas).filter(|(r, _)| volume.is_known(r));
    let present =
        |status: &ReplicaStatus| ["InSync", "CatchingUp", "Rebuilding"].contains(&status.phase);
    let there = pairs().filter(|(_, status)| present(status)).count();
    if there >= needed && pairs().any(|(_, status)| status.phase == "InSync") {
        return Ok(());
    }
    let mut away: Vec<_> =
        pairs().filter(|(_, s)| !present(s)).map(|(r, _)| r.pool.as_str()).collect();
    away.sort_unstable();
    let last = match (membership.rf, there) {
        (1, _) => "it is the last good copy".to_owned(),
        (_, 0) => "no good copy is within reach".to_owned(),
        (rf, n) => format!("{n} of {rf} replicas are there, {needed} are needed to rebuild from"),
    };
    Err(format!("{last}; bring pool {} back", away.join(" or ")))
}

/// Text with the good copies that a volume would have without these pools.
pub(crate) fn without(
    volume: &VolumeRecord,
    status: &VolumeStatus,
    pools: &HashSet<String>,
) -> String {
    let pairs = volume.replicas.iter().zip(&status.replicas);
    let good = pairs
        .filter(|(r, s)| volume.is_known(r) && s.phase == "InSync" && !pools.contains(&r.pool))
        .count();
    let (rf, cf) = (volume.membership.rf, volume.membership.cf);
    match good {
        0 => "no good copy".to_owned(),
        n if n < usize::from(cf) => format!("{n} of {rf} good copies; its IO would wait for {cf}"),
        n => format!("{n} of {rf} good copies"),
    }
}
