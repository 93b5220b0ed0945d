//! Steps of a volume's record: idempotent, run after every report and for whatever changed. Each reads
//! the present state and moves one volume one step on.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use quoin_cluster::ownership::lifecycle::{self, Answers, News};
use quoin_cluster::records::{Concerned, VolumePhase, VolumeRecord};
use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::reconcile::{Next, Queue, Reconciler, queue_of_volumes};
use crate::state::events::{Object, Severity};
use crate::state::observed::ReplicaState;
use crate::state::{State, about, random_id};
use crate::status::health::Conditions;
use crate::status::{ReplicaStatus, VolumeStatus};
use crate::volume::fencing::Fences;
use crate::volume::verification::Verifier;

/// Reconciler of each volume's record with what its pools answer. It also announces turns of
/// health, and takes back grants that nobody may use.
pub struct Lifecycle {
    state: Arc<State>,
    verifier: Arc<Verifier>,
    fences: Fences,
    conditions: Arc<Conditions>,
    queue: Arc<Queue<VolumeId>>,
    /// Last announced health of each volume.
    health: Mutex<HashMap<VolumeId, &'static str>>,
}

/// Reports bring on what follows from them; this is for what they and errors left over.
const PAUSE: Duration = Duration::from_secs(5);
/// Time between two looks at leases on a volume that is being deleted: their end is no event.
const ENDS_SOON: Duration = Duration::from_millis(500);

#[async_trait]
impl Reconciler for Lifecycle {
    type Key = VolumeId;
    const NAME: &'static str = "reconcile";

    fn queue(&self) -> &Queue<VolumeId> {
        &self.queue
    }

    async fn reconcile(&self, volume: &VolumeId, _: Instant) -> Result<Next, Error> {
        let Some(volume) = self.state.volumes.get(&volume.to_string()) else {
            self.health().remove(volume);
            return Ok(Next::Rest);
        };
        if self.state.check_ruling().is_err() {
            return Ok(Next::Rest);
        }
        let next = self.reconcile_volume(&volume).await?;
        self.fences.left_over(&volume).await?;
        Ok(next)
    }
}

impl Lifecycle {
    pub(crate) fn new(
        state: Arc<State>,
        verifier: Arc<Verifier>,
        conditions: Arc<Conditions>,
    ) -> Self {
        let queue = queue_of_volumes(&state, PAUSE);
        let fences = Fences::new(state.clone());
        Self { state, verifier, fences, conditions, queue, health: Mutex::default() }
    }

    fn health(&self) -> MutexGuard<'_, HashMap<VolumeId, &'static str>> {
        self.health.lock().expect("no holder of this lock panics")
    }

    /// Moves everything on by what is known now. Safe to call at any time, by anyone.
    pub async fn reconcile_all(&self) -> Result<(), Error> {
        self.reconcile_those(&self.state.volumes.list()).await
    }

    /// The same of some volumes.
    pub(crate) async fn reconcile_those(&self, volumes: &[Arc<VolumeRecord>]) -> Result<(), Error> {
        if self.state.check_ruling().is_err() {
            return Ok(());
        }
        for volume in volumes {
            self.reconcile_volume(volume).await?;
        }
        Ok(())
    }

    async fn reconcile_volume(&self, volume: &Arc<VolumeRecord>) -> Result<Next, Error> {
        let state = &self.state;
        let is_deleting = volume.phase == VolumePhase::Deleting;
        if is_deleting && !self.fences.deleted(volume).await? {
            crate::volume::volumes::free_name(state, volume).await?;
            return Ok(Next::After(ENDS_SOON));
        }
        let answers = self.answers(volume);
        let mut trial = VolumeRecord::clone(volume);
        let mut news = Vec::new();
        let are_own = self.are_own(volume);
        lifecycle::step(&mut trial, &answers, are_own, &mut new_guid, &mut news);
        if trial.phase == VolumePhase::Deleting {
            crate::volume::volumes::free_name(state, volume).await?;
            if trial.replicas.is_empty() && trial.discarded.is_empty() {
                let deleting = |v: &VolumeRecord| v.phase == VolumePhase::Deleting;
                state.volumes.remove(&volume.id.0.to_string(), deleting).await?;
                self.forget(volume);
                self.verifier.forget(volume.id.0).await?;
                return Ok(Next::Rest);
            }
        }
        let current = if trial == **volume {
            volume.clone()
        } else {
            let change = |volume: &mut VolumeRecord| {
                news.clear();
                lifecycle::step(volume, &answers, are_own, &mut new_guid, &mut news);
                Ok(())
            };
            let (current, ()) = match state.update_volume(volume.id.0, change).await {
                Err(Error::NotFound { .. }) => return Ok(Next::Rest),
                updated => updated?,
            };
            news.into_iter().for_each(|news| self.announce(&current, news));
            current
        };
        self.announce_health(&current);
        self.fences.former(&current).await?;
        Ok(Next::Rest)
    }

    fn announce(&self, volume: &VolumeRecord, news: News) {
        let of = |replica: ReplicaId| Object::new("replica", replica, &volume.spec.name);
        let (severity, object, reason, message) = match news {
            News::Ready => {
                let message = "every pool has created its replica".to_owned();
                (Severity::Normal, about(volume), "VolumeReady", message)
            }
            News::Flattened => {
                let source = crate::volume::clones::in_words(volume.source.as_ref());
                let message = format!("it shares nothing with {source} any more");
                (Severity::Normal, about(volume), "VolumeFlattened", message)
            }
            News::Returned { replica, pool, guid } => {
                let message = format!("pool {pool} has {guid} again");
                (Severity::Normal, of(replica), "ReplicaReturned", message)
            }
            News::Gone { replica, pool, guid, new } => {
                let message = format!(
                    "pool {pool} has lost {guid}; {new} is made in its place and will be rebuilt"
                );
                (Severity::Warning, of(replica), "ReplicaGone", message)
            }
        };
        self.state.events.record(severity, object, reason, message);
    }

    /// Only what pools say that are alive, reached or not: they say it by themselves. Silence is no
    /// answer.
    fn answers(&self, volume: &VolumeRecord) -> Answers {
        let observed = self.state.observed();
        let held = volume.replicas.iter().map(|r| &r.pool);
        let mut pools: Vec<_> = held.chain(volume.discarded.iter().map(|d| &d.pool)).collect();
        pools.sort();
        pools.dedup();
        let membership = &volume.membership;
        let wanted = volume.replicas.iter().map(|r| r.guid).chain(membership.retired.clone());
        let wanted = wanted.chain(volume.discarded.iter().map(|d| d.guid));
        let wanted: HashSet<_> = wanted.chain(membership.known.iter().map(|m| m.guid)).collect();
        let mut answers = Answers::new();
        for pool in pools {
            let Some(seen) = observed.heard_pool(pool, self.state.settings.offline_after) else {
                continue;
            };
            for guid in &wanted {
                let held = seen.replicas.get(&guid.0).filter(|held| held.volume == volume.id.0);
                if let Some(held) = held {
                    answers.insert((pool.clone(), guid.0), held.state);
                }
            }
        }
        answers
    }

    /// Returns true if all replicas said that they share no block with the source of the volume any more.
    fn are_own(&self, volume: &VolumeRecord) -> bool {
        let observed = self.state.observed();
        volume.replicas.iter().all(|replica| {
            let pool = observed.heard_pool(&replica.pool, self.state.settings.offline_after);
            let held = pool.and_then(|pool| pool.replicas.get(&replica.guid.0));
            held.is_some_and(|held| held.state == ReplicaState::Present && !held.is_clone)
        })
    }

    fn forget(&self, volume: &VolumeRecord) {
        let mut observed = self.state.observed();
        observed.volumes.remove(&volume.id.0);
        observed.confirmed.remove(&volume.id.0);
        observed.openings.remove(&volume.id.0);
        drop(observed);
        self.health().remove(&volume.id.0);
        self.conditions.forget(volume.id.0);
    }

    /// An event when a volume's health turns.
    pub(crate) fn announce_health(&self, volume: &VolumeRecord) {
        self.conditions.look(volume);
        let status = crate::status::shown(&self.state, volume);
        let now = status.health;
        // A replica that was taken in since the target's last report is not in that: the next one
        // tells.
        let is_passing = || is_tended(volume, &status) || self.is_not_yet_told(volume, &status);
        if matches!(now, "Unknown" | "Opening") || (now == "Degraded" && is_passing()) {
            return;
        }
        let before = self.health().insert(volume.id.0, now);
        if before == Some(now) || (before.is_none() && now == "Online") {
            return;
        }
        let severity = match now {
            "Online" => Severity::Normal,
            "Degraded" => Severity::Warning,
            _ => Severity::Error,
        };
        let reason = match now {
            "Online" => "VolumeOnline",
            "Degraded" => "VolumeDegraded",
            _ => "VolumeFaulted",
        };
        let waiting = crate::status::waiting_for(&self.state, volume);
        let message = if waiting.is_empty() {
            "all replicas are in sync".to_owned()
        } else {
            format!("waiting for {waiting}")
        };
        self.state.events.record(severity, about(volume), reason, message);
        self.state.announce(&Concerned::Status);
    }

    /// Returns true if all that keeps a volume from being whole are replicas that its target has
    /// not spoken of yet, its last report being older than the membership that has them.
    fn is_not_yet_told(&self, volume: &VolumeRecord, status: &VolumeStatus) -> bool {
        let observed = self.state.observed();
        let Some(seen) = crate::status::serving(&self.state, &observed, volume) else {
            return false;
        };
        let mut lacking = volume
            .replicas
            .iter()
            .zip(&status.replicas)
            .filter(|(_, status)| status.known && status.phase != "InSync")
            .peekable();
        seen.state == "serving"
            && seen.membership_version < volume.membership.version
            && lacking.peek().is_some()
            && lacking.all(|(replica, _)| !seen.replicas.contains_key(&replica.guid.0))
    }
}

/// Returns true if a volume that is attached nowhere is only being opened and worked on, with all
/// of its replicas there: nobody's IO waits, and a target that does not get on is replaced.
fn is_tended(volume: &VolumeRecord, status: &VolumeStatus) -> bool {
    let is_there =
        |status: &ReplicaStatus| ["InSync", "CatchingUp", "Rebuilding"].contains(&status.phase);
    volume.attachments.is_empty()
        && volume.opened.owner.is_some()
        && status.replicas.iter().filter(|status| status.known).all(is_there)
}

fn new_guid() -> ReplicaGuid {
    ReplicaGuid(random_id())
}
