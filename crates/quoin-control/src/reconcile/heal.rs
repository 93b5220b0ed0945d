//! Self-healing makes replicas elsewhere without a request: replicas that are gone for longer than
//! the volume's `replaceAfter`, and replicas on pools that are being drained.
//!
//! The needs are checked anew every second, the most endangered volume first: the volume that
//! could lose the fewest further replicas. Each volume has one change at a time, and each pool a
//! few rebuilds at a time, placed by the rules of new replicas. Self-healing removes no replica:
//! the old one counts until the target has rebuilt the new one and swapped it in, so no last good
//! copy is ever given up. An event reports where too few replicas are left to rebuild from.
//!
//! The controller counts the time from when it first missed the replica. A restart counts anew,
//! which can only lengthen the wait. A replica that its target reaches is present, also if the
//! pool's reports are missing.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use quoin_types::membership::open_quorum;
use quoin_types::{ReplicaGuid, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::controller::Controller;
use crate::reconcile::rebalance::Balancing;
use crate::state::events::{Object, Severity};
use crate::state::records::{Cause, ReplicaRecord, VolumePhase, VolumeRecord};
use crate::status::{ReplicaStatus, Standing, VolumeStatus};
use crate::volume::placement::Candidate;
use crate::volume::policy::ReplaceAfter;
use crate::volume::scale::relocate;

/// Most replicas begun in one check; the next check is a second later.
const BEGUN_MAX: usize = 16;

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

/// State kept between two checks.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// Time since which a replica is missed.
    gone: HashMap<ReplicaGuid, Instant>,
    /// Reason why a replica that should be elsewhere cannot be made there.
    pub stuck: HashMap<ReplicaGuid, String>,
    pub healing: Healing,
    /// Time since which an unused volume lags, and time since which its target is awaited.
    pub lagging: HashMap<VolumeId, Instant>,
    pub opening: HashMap<VolumeId, Instant>,
    pub balancing: Balancing,
}

/// Replica that should be elsewhere.
struct Need<'a> {
    volume: &'a Arc<VolumeRecord>,
    status: &'a VolumeStatus,
    guid: ReplicaGuid,
    cause: Cause,
    /// Number of known replicas that the volume can still lose before its writes wait.
    spare: i16,
    gone: Duration,
}

impl Controller {
    /// Policy of a volume: its own, or the cluster's.
    pub fn replace_after(&self, volume: &VolumeRecord) -> ReplaceAfter {
        volume.spec.options.replace_after.unwrap_or(self.settings.replace_after)
    }

    pub fn healing(&self) -> Healing {
        self.observed().looks.healing
    }

    /// Checks every volume once; safe to call at any time.
    pub async fn heal(&self) -> Result<(), Error> {
        self.heal_at(Instant::now()).await
    }

    /// Runs [`Self::heal`] as of the caller's time.
    pub async fn heal_at(&self, now: Instant) -> Result<(), Error> {
        self.heal_those(&self.standings(), now).await
    }

    pub(crate) async fn heal_those(&self, ready: &[Standing], now: Instant) -> Result<(), Error> {
        if self.check_ruling().is_err() {
            return Ok(());
        }
        let mut needs = Vec::new();
        let mut seen = HashSet::new();
        let draining = self.draining();
        for Standing { volume, status } in ready {
            seen.extend(volume.replicas.iter().map(|replica| replica.guid.0));
            let missed = self.miss(volume, status, now);
            let needed = self.needs(volume, status, &missed, &draining);
            let urgent = needed.iter().map(|need| need.guid).collect();
            if self.give_up(volume, status, &draining).await?
                || self.release(volume, &missed).await?
                || self.give_up_move(volume, &missed, &urgent, now).await?
            {
                continue;
            }
            needs.extend(needed);
        }
        needs.sort_by_key(|need| (need.spare, Reverse(need.gone), need.volume.id));
        let wanted: HashSet<_> = needs.iter().map(|need| need.guid).collect();
        {
            let looks = &mut self.observed().looks;
            looks.gone.retain(|guid, _| seen.contains(guid));
            looks.stuck.retain(|guid, _| wanted.contains(guid));
            looks.balancing.forget(&seen);
        }
        let begun = self.begin_first(&needs).await?;
        let waits = {
            let Looks { stuck, healing, .. } = &mut self.observed().looks;
            let waiting = needs.len().saturating_sub(begun).saturating_sub(stuck.len());
            healing.begun += begun as u64;
            healing.waiting = waiting as u64;
            healing.stuck = stuck.len() as u64;
            waiting > 0 || begun > 0
        };
        self.tell_drained().await?;
        self.rebalance(ready, waits, now).await
    }

    /// Begins the replicas whose turn it is, in this order. Returns their number.
    async fn begin_first(&self, needs: &[Need<'_>]) -> Result<usize, Error> {
        if needs.is_empty() {
            return Ok(0);
        }
        let _one_at_a_time = self.creating.lock().await;
        let mut room = self.room();
        let mut begun = 0;
        for need in needs {
            if begun == BEGUN_MAX {
                break;
            }
            if self.begin(need, &room).await? {
                begun += 1;
                room = self.room();
            }
        }
        Ok(begun)
    }

    /// Current room of the pools; it has to be read anew after each beginning.
    fn room(&self) -> Room {
        Room { candidates: self.candidates(), busy: self.busy() }
    }

    /// Missed replicas, and the time for which each is missed.
    fn miss(
        &self,
        volume: &VolumeRecord,
        status: &VolumeStatus,
        now: Instant,
    ) -> HashMap<ReplicaGuid, Duration> {
        let gone = &mut self.observed().looks.gone;
        let mut missed = HashMap::new();
        for (replica, status) in volume.replicas.iter().zip(&status.replicas) {
            if !status.gone {
                gone.remove(&replica.guid.0);
                continue;
            }
            let since = *gone.entry(replica.guid.0).or_insert(now);
            missed.insert(replica.guid.0, now.duration_since(since));
        }
        missed
    }

    fn needs<'a>(
        &self,
        volume: &'a Arc<VolumeRecord>,
        status: &'a VolumeStatus,
        missed: &HashMap<ReplicaGuid, Duration>,
        draining: &HashSet<String>,
    ) -> Vec<Need<'a>> {
        let after = self.replace_after(volume);
        let spare = in_sync(volume, status) as i16 - i16::from(volume.membership.cf);
        let mut needs = Vec::new();
        for replica in volume.replicas.iter().filter(|r| !r.leaving && !volume.is_followed(r)) {
            let gone = missed.get(&replica.guid.0).copied().unwrap_or_default();
            let overdue = matches!(after, ReplaceAfter::After(after) if gone >= after);
            let cause = match (overdue, draining.contains(&replica.pool)) {
                (true, _) => Cause::Healing,
                (_, true) => Cause::Drain,
                _ => continue,
            };
            let guid = replica.guid.0;
            needs.push(Need { volume, status, guid, cause, spare, gone });
        }
        needs
    }

    /// Begins to make a replica elsewhere, if its turn has come and it is possible.
    async fn begin(&self, need: &Need<'_>, room: &Room) -> Result<bool, Error> {
        let Need { volume, status, .. } = need;
        let Some(replica) = volume.replicas.iter().find(|r| r.guid.0 == need.guid) else {
            return Ok(false);
        };
        if is_changing_beside(volume, need.guid) {
            return Ok(false);
        }
        if let Err(why) = rebuildable(volume, status) {
            self.stuck(need, &why);
            return Ok(false);
        }
        let Room { candidates, busy } = room;
        let mut trial = VolumeRecord::clone(volume);
        if let Err(refusal) = relocate(&mut trial, need.guid, "", candidates, need.cause) {
            self.stuck(need, &refusal.to_string());
            return Ok(false);
        }
        let most = self.settings.heals_per_pool;
        // Draining a pool is limited to as many rebuilds at a time as filling one.
        if need.cause == Cause::Drain && busy.from.get(&replica.pool).is_some_and(|n| *n >= most) {
            return Ok(false);
        }
        let idle = |candidate: &mut Candidate| {
            if busy.to.get(&candidate.name).is_some_and(|n| *n >= most) {
                candidate.unusable = format!("{most} replicas are being rebuilt there");
            }
        };
        let mut free = candidates.clone();
        free.iter_mut().for_each(idle);
        let gone = need.gone;
        let change = |volume: &mut VolumeRecord| {
            // If the volume changed since this check, the next check decides.
            if volume.phase != VolumePhase::Ready
                || is_changing_beside(volume, need.guid)
                || !volume.replicas.iter().any(|r| r.guid.0 == need.guid && !r.leaving)
            {
                return Ok(None);
            }
            match relocate(volume, need.guid, "", &free, need.cause) {
                Err(Error::Exhausted(_)) => Ok(None),
                other => other.map(Some),
            }
        };
        let begun = match self.update_volume(volume.id.0, change).await {
            Err(Error::NotFound { .. }) => return Ok(false),
            other => other?.1,
        };
        let Some((old, pool)) = begun else { return Ok(false) };
        self.observed().looks.stuck.remove(&need.guid);
        let (reason, why) = match need.cause {
            Cause::Drain => ("ReplicaDrained", format!("pool {} is being drained", old.pool)),
            _ => (
                "ReplicaHeals",
                format!(
                    "gone from pool {} for {} s, replaceAfter is {}",
                    old.pool,
                    gone.as_secs(),
                    self.replace_after(volume)
                ),
            ),
        };
        let message = format!("{why}: it is made anew on pool {pool}");
        let object = Object::new("replica", old.id.0, &volume.spec.name);
        self.events.record(Severity::Normal, object, reason, message);
        Ok(true)
    }

    /// Records why a replica stays where it should not be, with one event for each reason.
    fn stuck(&self, need: &Need<'_>, why: &str) {
        let told = self.observed().looks.stuck.insert(need.guid, why.to_owned());
        if told.is_some_and(|told| told == why) {
            return;
        }
        let Some(replica) = need.volume.replicas.iter().find(|r| r.guid.0 == need.guid) else {
            return;
        };
        let what = match need.cause {
            Cause::Drain => format!("pool {} is being drained", replica.pool),
            _ => format!("gone from pool {}", replica.pool),
        };
        let object = Object::new("replica", replica.id.0, &need.volume.spec.name);
        let message = format!("{what}, and it cannot be made anew: {why}");
        self.events.record(Severity::Warning, object, "HealWaits", message);
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
        let (volume, gone) = match self.update_volume(volume.id.0, change).await {
            Err(Error::NotFound { .. }) => return Ok(true),
            other => other?,
        };
        if let Some(gone) = gone {
            self.observed().looks.healing.given_up += 1;
            let object = Object::new("replica", gone.id.0, &volume.spec.name);
            let message = format!("it is back; the one begun on pool {} is dropped", gone.pool);
            self.events.record(Severity::Normal, object, "HealGivenUp", message);
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
        let silent = self.silent(volume);
        let ReplaceAfter::After(after) = self.replace_after(volume) else { return Ok(false) };
        let overdue = |volume: &VolumeRecord, replica: &ReplicaRecord| {
            let guid = replica.guid.0;
            !volume.is_known(replica)
                && silent.contains(&guid)
                && missed.get(&guid).is_some_and(|gone| *gone >= after)
        };
        if !volume.replicas.iter().any(|replica| overdue(volume, replica)) {
            return Ok(false);
        }
        let candidates = self.candidates();
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
        let (volume, released) = match self.update_volume(volume.id.0, change).await {
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
            self.events.record(Severity::Warning, object, "NewcomerDropped", message);
        }
        Ok(true)
    }

    /// Rebuilds under way that no user requested.
    fn busy(&self) -> Busy {
        let mut busy = Busy::default();
        for volume in self.volumes.list() {
            let own = |r: &&ReplicaRecord| r.cause != Cause::Asked && !volume.is_known(r);
            for newcomer in volume.replicas.iter().filter(own) {
                *busy.to.entry(newcomer.pool.clone()).or_default() += 1;
                let old =
                    volume.replicas.iter().find(|r| r.id == newcomer.id && volume.is_known(r));
                if let Some(old) = old {
                    *busy.from.entry(old.pool.clone()).or_default() += 1;
                }
            }
        }
        busy
    }

    /// Reason why a replica that should be elsewhere stays where it is.
    pub(crate) fn why_stuck(&self, guid: ReplicaGuid) -> Option<String> {
        self.observed().looks.stuck.get(&guid).cloned()
    }
}

/// Pools where a replica may be made, and the rebuilds under way there.
struct Room {
    candidates: Vec<Candidate>,
    busy: Busy,
}

/// Rebuilds by the pool that takes the new replica, and by the pool of the old one.
#[derive(Default)]
struct Busy {
    to: HashMap<String, u32>,
    from: HashMap<String, u32>,
}

/// Number of known replicas that are in sync.
pub(crate) fn in_sync(volume: &VolumeRecord, status: &VolumeStatus) -> usize {
    let pairs = volume.replicas.iter().zip(&status.replicas);
    pairs.filter(|(r, s)| volume.is_known(r) && s.phase == "InSync").count()
}

/// Whether another change of the volume's replicas is under way.
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
