//! Replicas that should be elsewhere, made there without anybody asking for each: those that are
//! gone for longer than the volume's `replaceAfter`, and those on pools that are being drained.
//!
//! Every second the needs are looked at anew, the most endangered volume first: the one that
//! could lose the fewest further replicas. One change at a time for each volume, a few rebuilds
//! at a time into each pool, placed by the rules of new replicas. Nothing is taken away here: the
//! old replica counts until the target has rebuilt the new one and swapped it in, so no last good
//! copy is ever given up; where too few replicas are left to rebuild from, that is said instead.
//!
//! How long a replica is gone is counted by this controller, from when it first missed it: a
//! restart counts anew, which errs on the side of waiting. A replica that its target reaches is
//! there, even if its pool's reports are not.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use quoin_types::membership::open_quorum;
use quoin_types::{ReplicaGuid, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::controller::Controller;
use crate::events::{Object, Severity};
use crate::placement::Candidate;
use crate::policy::ReplaceAfter;
use crate::rebalance::Balancing;
use crate::records::{Cause, ReplicaRecord, VolumePhase, VolumeRecord};
use crate::scale::relocate;
use crate::status::{ReplicaStatus, Standing, VolumeStatus};

/// Begun in one look; the next one is a second away.
const BEGUN_MAX: usize = 16;

/// What self-healing has done and waits for; told by metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Healing {
    pub begun: u64,
    pub given_up: u64,
    /// Replicas that wait for their turn.
    pub waiting: u64,
    /// Replicas that cannot be made elsewhere now.
    pub stuck: u64,
}

/// What is remembered between two looks.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// Since when a replica is missed.
    gone: HashMap<ReplicaGuid, Instant>,
    /// Why a replica that should be elsewhere cannot be made there.
    pub stuck: HashMap<ReplicaGuid, String>,
    pub healing: Healing,
    /// Since when a volume that nobody uses lags, and since when its target is waited for.
    pub lagging: HashMap<VolumeId, Instant>,
    pub opening: HashMap<VolumeId, Instant>,
    pub balancing: Balancing,
}

/// A replica that should be elsewhere.
struct Need<'a> {
    volume: &'a Arc<VolumeRecord>,
    status: &'a VolumeStatus,
    guid: ReplicaGuid,
    cause: Cause,
    /// How many more known replicas the volume can lose before its writes wait.
    spare: i16,
    gone: Duration,
}

impl Controller {
    /// The policy of a volume: its own, or the cluster's.
    pub fn replace_after(&self, volume: &VolumeRecord) -> ReplaceAfter {
        volume.spec.options.replace_after.unwrap_or(self.settings.replace_after)
    }

    pub fn healing(&self) -> Healing {
        self.observed().looks.healing
    }

    /// Looks once at every volume; safe to call at any time.
    pub async fn heal(&self) -> Result<(), Error> {
        self.heal_at(Instant::now()).await
    }

    /// [`Self::heal`] at a time of the caller's.
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

    /// Begins those whose turn it is, in this order; how many.
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

    /// Looked at anew whenever something was begun.
    fn room(&self) -> Room {
        Room { candidates: self.candidates(), busy: self.busy() }
    }

    /// Which replicas are missed, and for how long.
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

    /// Makes a replica elsewhere, if its turn has come and it is possible.
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
        // A drain does not empty a pool faster than it could be filled.
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
            // What changed since this look is looked at again in the next one.
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

    /// Says why a replica stays where it should not, once for each reason.
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

    /// A replica that came back before the one in its place was rebuilt keeps its place: it has
    /// nearly everything.
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

    /// Takes overdue newcomers off the record that a target waits for, which opens the volume: they
    /// count nowhere, and a joint View alone names them. They are made elsewhere where that is
    /// possible.
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

    /// Rebuilds under way that nobody asked for.
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

    /// Why a replica that should be elsewhere stays where it is.
    pub(crate) fn why_stuck(&self, guid: ReplicaGuid) -> Option<String> {
        self.observed().looks.stuck.get(&guid).cloned()
    }
}

/// Where a replica may be made, and what goes on there.
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

/// Known replicas that have everything.
pub(crate) fn in_sync(volume: &VolumeRecord, status: &VolumeStatus) -> usize {
    let pairs = volume.replicas.iter().zip(&status.replicas);
    pairs.filter(|(r, s)| volume.is_known(r) && s.phase == "InSync").count()
}

/// Whether something else about the volume's replicas is under way.
fn is_changing_beside(volume: &VolumeRecord, guid: ReplicaGuid) -> bool {
    let newcomer = |r: &ReplicaRecord| r.guid.0 != guid && !volume.is_known(r);
    volume.replicas.iter().any(|replica| replica.leaving || newcomer(replica))
}

/// Whether there is something to rebuild a replica from; the error says what is missing.
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

/// What a volume is left with without these pools, in words.
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
