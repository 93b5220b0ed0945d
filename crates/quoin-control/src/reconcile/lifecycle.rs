//! Making the records follow what is observed: idempotent steps, run after every report and
//! at least once a second. Each reads the present state and moves one volume one step on.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use quoin_types::ReplicaGuid;

use crate::Error;
use crate::controller::{Controller, about, random_id};
use crate::state::changes::Concerned;
use crate::state::events::{Object, Severity};
use crate::state::observed::ReplicaState;
use crate::state::records::{Discarded, ReplicaPhase, Text, VolumePhase, VolumeRecord};
use crate::status::{ReplicaStatus, VolumeStatus};

/// What pools have answered about the incarnations of one volume: (pool, GUID) → state.
type Answers = HashMap<(String, ReplicaGuid), ReplicaState>;
type News = (Severity, Object, &'static str, String);

impl Controller {
    /// Moves everything on by what is known now. Safe to call at any time, by anyone.
    pub async fn reconcile(&self) -> Result<(), Error> {
        if self.check_ruling().is_err() {
            return Ok(());
        }
        self.reconcile_those(&self.volumes.list()).await
    }

    /// The same of some volumes.
    pub(crate) async fn reconcile_those(&self, volumes: &[Arc<VolumeRecord>]) -> Result<(), Error> {
        if self.check_ruling().is_err() {
            return Ok(());
        }
        for volume in volumes {
            self.reconcile_volume(volume).await?;
        }
        Ok(())
    }

    async fn reconcile_volume(&self, volume: &Arc<VolumeRecord>) -> Result<(), Error> {
        let answers = self.answers(volume);
        let mut trial = VolumeRecord::clone(volume);
        let mut news = Vec::new();
        step(&mut trial, &answers, &mut news);
        if trial.phase == VolumePhase::Deleting {
            self.free_name(volume).await?;
            if trial.replicas.is_empty() && trial.discarded.is_empty() {
                let deleting = |v: &VolumeRecord| v.phase == VolumePhase::Deleting;
                self.volumes.remove(&volume.id.0.to_string(), deleting).await?;
                self.forget(volume);
                self.forget_verification(volume.id.0).await?;
                return Ok(());
            }
        }
        let current = if trial == **volume {
            volume.clone()
        } else {
            let change = |volume: &mut VolumeRecord| {
                news.clear();
                step(volume, &answers, &mut news);
                Ok(())
            };
            let (current, ()) = match self.update_volume(volume.id.0, change).await {
                Err(Error::NotFound { .. }) => return Ok(()),
                updated => updated?,
            };
            for (severity, object, reason, message) in news {
                self.events.record(severity, object, reason, message);
            }
            current
        };
        self.announce_health(&current);
        Ok(())
    }

    /// Only what pools say that are alive, reached or not: they say it by themselves. Silence is no
    /// answer.
    fn answers(&self, volume: &VolumeRecord) -> Answers {
        let observed = self.observed();
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
            let Some(seen) = observed.heard_pool(pool, self.settings.offline_after) else {
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

    fn forget(&self, volume: &VolumeRecord) {
        let mut observed = self.observed();
        observed.volumes.remove(&volume.id.0);
        observed.confirmed.remove(&volume.id.0);
        observed.health.remove(&volume.id.0);
        observed.openings.remove(&volume.id.0);
    }

    /// An event when a volume's health turns.
    pub(crate) fn announce_health(&self, volume: &VolumeRecord) {
        let status = self.shown_status(volume);
        let now = status.health;
        // Who was taken in since the target's last report is not in that: the next one tells.
        let is_passing = || is_tended(volume, &status) || self.is_not_yet_told(volume, &status);
        if matches!(now, "Unknown" | "Opening") || (now == "Degraded" && is_passing()) {
            return;
        }
        let before = self.observed().health.insert(volume.id.0, now);
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
        let waiting = self.waiting_for(volume);
        let message = if waiting.is_empty() {
            "all replicas are in sync".to_owned()
        } else {
            format!("waiting for {waiting}")
        };
        self.events.record(severity, about(volume), reason, message);
        self.announce(&Concerned::Status);
    }

    /// Whether all that keeps a volume from being whole are replicas that its target has not spoken
    /// of yet, its last report being older than the membership that has them.
    fn is_not_yet_told(&self, volume: &VolumeRecord, status: &VolumeStatus) -> bool {
        let observed = self.observed();
        let Some(seen) = self.serving(&observed, volume) else { return false };
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

    /// Says who has not reported for too long, once each time.
    pub fn announce_absent(&self) {
        let after = self.settings.offline_after;
        let mut absent = Vec::new();
        {
            let mut observed = self.observed();
            if observed.starting(after) {
                return;
            }
            for pool in self.pools.list() {
                if observed.heard_pool(&pool.name, after).is_none()
                    && observed.absent.insert(("pool", pool.name.clone()))
                {
                    absent.push((Object::new("pool", &pool.pool_id, &pool.name), "PoolOffline"));
                }
            }
            for node in self.nodes.list() {
                if !observed.node_online(&node.name, after)
                    && observed.absent.insert(("node", node.name.clone()))
                {
                    absent.push((Object::new("node", &node.name, &node.name), "NodeOffline"));
                }
            }
        }
        let some = !absent.is_empty();
        for (object, reason) in absent {
            let message = format!("no report for {} ms", after.as_millis());
            self.events.record(Severity::Warning, object, reason, message);
        }
        if some {
            self.announce(&Concerned::Status);
            for volume in self.volumes.list() {
                self.announce_health(&volume);
            }
        }
    }
}

/// Whether a volume that is attached nowhere is only being opened and worked on, with all of its
/// replicas there: nobody's IO waits, and a target that does not get on is replaced.
fn is_tended(volume: &VolumeRecord, status: &VolumeStatus) -> bool {
    let is_there =
        |status: &ReplicaStatus| ["InSync", "CatchingUp", "Rebuilding"].contains(&status.phase);
    volume.attachments.is_empty()
        && volume.owner.is_some()
        && status.replicas.iter().filter(|status| status.known).all(is_there)
}

/// One step of one volume, from its record and the pools' answers alone.
fn step(volume: &mut VolumeRecord, answers: &Answers, news: &mut Vec<News>) {
    let answer = |pool: &str, guid: ReplicaGuid| answers.get(&(pool.to_owned(), guid)).copied();
    let present = |pool: &str, guid| answer(pool, guid) == Some(ReplicaState::Present);
    let gone = |pool: &str, guid| answer(pool, guid) == Some(ReplicaState::Gone);
    let discarded = |d: &Discarded| !gone(&d.pool, d.guid.0);
    volume.discarded.retain(discarded);
    match volume.phase {
        VolumePhase::Deleting => {
            volume.replicas.retain(|replica| !gone(&replica.pool, replica.guid.0));
        }
        VolumePhase::Pending => {
            if volume.replicas.iter().all(|r| present(&r.pool, r.guid.0)) {
                // From here on no pool creates anything under these GUIDs again.
                volume.phase = VolumePhase::Ready;
                volume.membership.formed = true;
                volume.membership.version += 1;
                volume.replicas.iter_mut().for_each(|r| r.phase = ReplicaPhase::Keep);
                let message = "every pool has created its replica".to_owned();
                news.push((Severity::Normal, about(volume), "VolumeReady", message));
            }
        }
        VolumePhase::Ready => {
            discard_retired(volume, answers);
            let name = volume.spec.name.clone();
            let known = volume.membership.known.clone();
            // Those whose place another record takes are not made anew where they were.
            let followed: Vec<_> = volume
                .replicas
                .iter()
                .filter(|r| r.leaving || volume.is_followed(r))
                .map(|r| r.guid)
                .collect();
            let mut surplus = Vec::new();
            for replica in &mut volume.replicas {
                let object = || Object::new("replica", replica.id.0, &name);
                let known = known.iter().find(|member| member.id == replica.id).map(|m| m.guid);
                let returned =
                    known.filter(|known| *known != replica.guid && present(&replica.pool, known.0));
                if let Some(known) = returned {
                    let message = format!("pool {} has {} again", replica.pool, known.0);
                    news.push((Severity::Normal, object(), "ReplicaReturned", message));
                    let (id, pool) = (replica.id, replica.pool.clone());
                    let guid = std::mem::replace(&mut replica.guid, known);
                    surplus.push(Discarded { id, guid, pool });
                    replica.phase = ReplicaPhase::Keep;
                } else if followed.contains(&replica.guid) {
                    continue;
                } else if replica.phase == ReplicaPhase::Keep && gone(&replica.pool, replica.guid.0)
                {
                    // A GUID is born once: what comes in its place has another one.
                    let new = Text(ReplicaGuid(random_id()));
                    let message = format!(
                        "pool {} has lost {}; {} is made in its place and will be rebuilt",
                        replica.pool, replica.guid.0, new.0
                    );
                    news.push((Severity::Warning, object(), "ReplicaGone", message));
                    replica.guid = new;
                    replica.phase = ReplicaPhase::Recreate;
                } else if replica.phase == ReplicaPhase::Recreate
                    && present(&replica.pool, replica.guid.0)
                {
                    replica.phase = ReplicaPhase::Keep;
                }
            }
            volume.discarded.extend(surplus);
        }
    }
}

/// Retired incarnations that turn up in their pools (a disk came back) are never used again,
/// so they may go.
fn discard_retired(volume: &mut VolumeRecord, answers: &Answers) {
    for ((pool, guid), state) in answers {
        let guid = Text(*guid);
        if *state == ReplicaState::Gone
            || !volume.membership.retired.contains(&guid)
            || volume.discarded.iter().any(|d| d.guid == guid && d.pool == *pool)
        {
            continue;
        }
        let id = volume.replicas.iter().find(|replica| replica.pool == *pool).map(|r| r.id);
        let id = id.unwrap_or_default();
        volume.discarded.push(Discarded { id, guid, pool: pool.clone() });
    }
    volume.discarded.sort_by(|a, b| (&a.pool, a.guid).cmp(&(&b.pool, b.guid)));
}
