//! Attempts at group snapshots, and what becomes of a group when one ends.

use std::time::Duration;

use async_trait::async_trait;
use quoin_cluster::records::{
    Cut, GroupPhase, GroupRecord, Record, SnapshotPhase, SnapshotRecord, Text,
};
use quoin_replication::group_point::{Broken, PointCut, PointVerdict};
use quoin_replication::primary::HOLD_MS_MAX;
use quoin_types::VolumeId;
use quoin_types::ids::PointId;
use tokio::time::Instant;

use super::catalog::{about, too_many};
use super::groups::{Failure, Groups};
use super::points::{Ended, in_words};
use crate::Error;
use crate::reconcile::{Next, Queue, Reconciler};
use crate::state::events::Severity;
use crate::state::random_id;
use crate::text;

/// Hold of the first attempt; each further one may take twice as long.
const HOLD_MS: u32 = 1000;
/// Attempts at one group.
const TRIES_MAX: u32 = 5;
/// Between two looks at an attempt, and at volumes that no target serves yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const WAITS: Duration = Duration::from_millis(250);
/// Failures that are remembered for those who wait.
const FAILURES_MAX: usize = 256;

#[async_trait]
impl Reconciler for Groups {
    type Key = String;
    const NAME: &'static str = "make group snapshots";

    fn queue(&self) -> &Queue<String> {
        &self.queue
    }

    async fn reconcile(&self, name: &String, now: Instant) -> Result<Next, Error> {
        if self.state.check_ruling().is_err() || self.state.check_term().is_err() {
            return Ok(Next::After(Duration::from_secs(1)));
        }
        self.look(name, now).await
    }
}

impl Groups {
    /// Looks at every group once.
    pub async fn look_at_all(&self, now: Instant) -> Result<(), Error> {
        for group in self.state.snapshots.groups.list() {
            self.reconcile(&group.name(), now).await?;
        }
        Ok(())
    }

    /// Brings a group one step on.
    async fn look(&self, name: &str, now: Instant) -> Result<Next, Error> {
        let Some(group) = self.state.snapshots.groups.get(name) else { return Ok(Next::Rest) };
        let ended = self.points.ended(now, group.id.0);
        if ended.is_none() && self.points.is_running(group.id.0) {
            if group.phase != GroupPhase::Wished || !self.is_wished(&group) {
                self.points.give_up(now, group.id.0);
            }
            self.wake_targets(&group);
            return Ok(Next::After(LOOK_EVERY));
        }
        let _changing = self.state.snapshots.changing.lock().await;
        let Some(group) = self.state.snapshots.groups.get(name) else { return Ok(Next::Rest) };
        let next = match (group.phase, &ended) {
            (GroupPhase::Wished, Some(ended)) => self.conclude(&group, ended).await?,
            (GroupPhase::Wished, None) => return self.begin(&group, now).await,
            (GroupPhase::Ready, _) => self.complete(&group).await?,
            (GroupPhase::Deleting, _) => {
                self.delete_members(&group).await?;
                Next::Rest
            }
        };
        // Its outcome is on record: a failure before this has it concluded again.
        self.points.forget(group.id.0);
        Ok(next)
    }

    /// Returns true if each member has a snapshot that is to be made.
    fn is_wished(&self, group: &GroupRecord) -> bool {
        group.members.iter().all(|member| {
            let snapshot = member.snapshot.and_then(|id| self.snapshot(id.0));
            snapshot.is_some_and(|snapshot| snapshot.phase == SnapshotPhase::Wished)
        })
    }

    /// Begins an attempt, once every volume is served.
    async fn begin(&self, group: &GroupRecord, now: Instant) -> Result<Next, Error> {
        let tries = self.memory().making.get(&group.id.0).copied();
        let Some(tries) = tries else {
            let why = "the controller was started while it was made; ask for it again";
            return self.fail(group, Failure::Passing(why.to_owned())).await;
        };
        if group.members.iter().all(|member| member.snapshot.is_none()) {
            if let Err(error) = self.prepare(group).await {
                let failure = match error {
                    Error::Exhausted(text) => Failure::Exhausted(text),
                    Error::NotFound { .. } => Failure::Precondition(error.to_string()),
                    error => return Err(error),
                };
                return self.fail(group, failure).await;
            }
            return Ok(Next::After(Duration::ZERO));
        }
        if !self.is_wished(group) {
            let why = "one of its volumes was deleted, or one of its snapshots given up";
            return self.fail(group, Failure::Precondition(why.to_owned())).await;
        }
        for member in &group.members {
            if !self.is_served(member.volume.0) {
                return Ok(Next::After(WAITS));
            }
        }
        let hold_ms = HOLD_MS.saturating_mul(1 << tries.min(8)).min(HOLD_MS_MAX);
        let ids = group.members.iter().filter_map(|m| Some((m.volume.0, m.snapshot?.0)));
        let point = PointId(random_id());
        if self.points.begin(now, group.id.0, point, hold_ms, ids.collect()) {
            if let Some(tries) = self.memory().making.get_mut(&group.id.0) {
                *tries += 1;
            }
            self.wake_targets(group);
        }
        Ok(Next::After(LOOK_EVERY))
    }

    /// Returns true if the volume's target is ready for a point.
    fn is_served(&self, volume: VolumeId) -> bool {
        let owner =
            self.state.volumes.get(&volume.to_string()).and_then(|v| v.opened.owner.clone());
        let Some(node) = owner else { return false };
        let is_serving = {
            let observed = self.state.observed();
            observed
                .volumes
                .get(&volume)
                .is_some_and(|seen| seen.node == node && seen.state == "serving")
        };
        is_serving && self.points.is_followed_by(&node)
    }

    async fn conclude(&self, group: &GroupRecord, ended: &Ended) -> Result<Next, Error> {
        let broken = match &ended.verdict {
            PointVerdict::Broken(broken) => *broken,
            PointVerdict::Made(cuts) if self.is_wished(group) => {
                let change = |group: &mut GroupRecord| {
                    Ok(group.phase == GroupPhase::Wished && take_cuts(group, cuts, ended))
                };
                let updated = self.state.snapshots.groups.update(&group.name(), change).await?;
                return match updated {
                    Some((group, true)) => {
                        self.memory().making.remove(&group.id.0);
                        self.complete(&group).await
                    }
                    _ => self.end(group).await.map(|()| Next::Rest),
                };
            }
            PointVerdict::Made(_) => Broken::GivenUp,
        };
        let tries = self.memory().making.get(&group.id.0).copied().unwrap_or(TRIES_MAX);
        let name = |volume| {
            let member = group.members.iter().find(|member| member.volume.0 == volume);
            member.map_or_else(String::new, |member| member.volume_name.clone())
        };
        let why = in_words(broken, name);
        if !broken.may_pass() || tries >= TRIES_MAX {
            let failure = match broken {
                Broken::TooManySnapshots(volume) => {
                    Failure::Exhausted(too_many(&name(volume)).to_string())
                }
                Broken::GivenUp => Failure::Precondition(
                    "one of its volumes was deleted, or one of its snapshots given up".to_owned(),
                ),
                _ => Failure::Passing(format!("it was not cut in {tries} tries: {why}")),
            };
            return self.fail(group, failure).await;
        }
        tracing::info!(group = group.name, tries, why, "not cut at one point, trying again");
        self.remove_snapshots(group, |_| false).await?;
        let change = |group: &mut GroupRecord| {
            group.members.iter_mut().for_each(|member| member.snapshot = None);
            Ok(())
        };
        self.state.snapshots.groups.update(&group.name(), change).await?;
        Ok(Next::After(WAITS * tries))
    }

    /// Gives a group up. The caller holds the lock of changes.
    async fn fail(&self, group: &GroupRecord, failure: Failure) -> Result<Next, Error> {
        let message = format!("group snapshot {:?} is given up: {}", group.name, failure.text());
        {
            let mut memory = self.memory();
            if memory.failures.len() >= FAILURES_MAX {
                memory.failures.pop_front();
            }
            let failure = match failure {
                Failure::Exhausted(_) => Failure::Exhausted(message.clone()),
                Failure::Precondition(_) => Failure::Precondition(message.clone()),
                Failure::Passing(_) => Failure::Passing(message.clone()),
            };
            memory.failures.push_back((group.id.0, failure));
        }
        self.tell(group, Severity::Warning, "GroupSnapshotGivenUp", &message);
        self.end(group).await?;
        Ok(Next::Rest)
    }

    /// Makes the records of the members agree with the group's.
    async fn complete(&self, group: &GroupRecord) -> Result<Next, Error> {
        for snapshot in self.state.snapshots.of_group(group.id.0) {
            let Some(cut) = group.cut_of(snapshot.id.0) else { continue };
            let change = |snapshot: &mut SnapshotRecord| Ok(snapshot.made(cut));
            let updated = self.state.snapshots.records.update(&snapshot.name(), change).await?;
            if let Some((snapshot, true)) = updated {
                let message = format!(
                    "snapshot {:?} of group {:?}: {}, as of LSN {}",
                    snapshot.name,
                    group.name,
                    text::bytes(cut.size_bytes),
                    cut.lsn
                );
                let object = about(&snapshot);
                self.state.events.record(Severity::Normal, object, "SnapshotCreated", message);
            }
        }
        self.remove_snapshots(group, |id| group.cut_of(id).is_some()).await?;
        if !self.state.snapshots.of_group(group.id.0).iter().any(|snapshot| snapshot.is_kept()) {
            // Its volumes are gone, or a recovery found none of its snapshots.
            self.end(group).await?;
        }
        Ok(Next::Rest)
    }
}

fn take_cuts(group: &mut GroupRecord, cuts: &[PointCut], ended: &Ended) -> bool {
    let mut is_whole = true;
    for member in &mut group.members {
        let cut = cuts.iter().find(|cut| member.snapshot == Some(Text(cut.snapshot)));
        member.cut = cut.map(|cut| Cut {
            lsn: cut.lsn.0,
            epoch: cut.epoch.0,
            chain: cut.chain,
            at_ms: ended.cut_ms,
            size_bytes: ended.sizes.get(&cut.snapshot).copied().unwrap_or(0),
        });
        is_whole &= member.cut.is_some();
    }
    if is_whole {
        group.phase = GroupPhase::Ready;
    }
    is_whole
}
