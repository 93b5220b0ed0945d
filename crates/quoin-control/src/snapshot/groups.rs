//! Group snapshots: snapshots of several volumes at one point.
//!
//! A group's record comes first, then a snapshot's for each member, then one attempt at a point
//! ([`super::points`]). An attempt that does not count has its snapshots deleted, and the next one has
//! new ones. What makes the group is one write of its record, with the cuts of all members; the
//! members' own records follow it. A group that another process of the controller was making is given
//! up: nobody knows how far its targets had come.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use quoin_api::control::{GroupSnapshotRef, VolumeRef};
use quoin_replication::group_point::{Broken, POINT_VOLUMES_MAX, PointCut, PointVerdict};
use quoin_replication::primary::{HOLD_MS_MAX, SnapshotOutcome, USER_SNAPSHOTS_MAX};
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId, SnapshotId};
use tokio::time::Instant;

use super::catalog::{Snapshots, about, too_many};
use super::points::{Ended, Points, in_words};
use crate::Error;
use crate::reconcile::{Next, Queue, Reconciler};
use crate::state::events::Severity;
use crate::state::group_records::{GroupMember, GroupPhase, GroupRecord};
use crate::state::records::{Record, Text, VolumePhase, VolumeRecord};
use crate::state::snapshot_records::{Cut, SnapshotPhase, SnapshotRecord};
use crate::state::{State, random_id};
use crate::text;
use crate::time::now_ms;
use crate::volume::spec;

/// Hold of the first attempt; each further one may take twice as long.
const HOLD_MS: u32 = 1000;
/// Attempts at one group.
const TRIES_MAX: u32 = 5;
/// Between two looks at an attempt, and at volumes that no target serves yet.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const WAITS: Duration = Duration::from_millis(250);
/// Groups in the queue.
const QUEUE_MAX: usize = 1 << 16;
/// Failures that are remembered for those who wait.
const FAILURES_MAX: usize = 256;

/// Creation, deletion and lists of group snapshots, and the reconciler that makes them.
pub struct Groups {
    state: Arc<State>,
    snapshots: Arc<Snapshots>,
    points: Arc<Points>,
    queue: Arc<Queue<String>>,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    /// Groups that this process makes, with the attempts at each.
    making: HashMap<GroupId, u32>,
    failures: VecDeque<(GroupId, Failure)>,
}

/// Why a group was given up.
#[derive(Clone, Debug)]
enum Failure {
    Exhausted(String),
    Precondition(String),
    /// Another try may succeed.
    Passing(String),
}

impl Failure {
    fn text(&self) -> &str {
        match self {
            Self::Exhausted(text) | Self::Precondition(text) | Self::Passing(text) => text,
        }
    }

    fn error(self) -> Error {
        match self {
            Self::Exhausted(text) => Error::Exhausted(text),
            Self::Precondition(text) => Error::Precondition(text),
            Self::Passing(text) => Error::Busy(text),
        }
    }
}

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
    pub(crate) fn new(state: Arc<State>, snapshots: Arc<Snapshots>, points: Arc<Points>) -> Self {
        let queue = Arc::new(Queue::new(QUEUE_MAX));
        for group in state.snapshots.groups.list() {
            queue.add(group.name(), Duration::ZERO);
        }
        Self { state, snapshots, points, queue, memory: Mutex::default() }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().expect("no holder of this lock panics")
    }

    /// Has the groups of a volume looked at, of which something changed.
    pub(crate) fn look_at(&self, volume: VolumeId) {
        for group in self.state.snapshots.groups.indexed(|index| index.of_volume(volume)) {
            self.queue.add(group.name(), Duration::ZERO);
        }
    }

    /// Has a group looked at, of which a target said something.
    pub(crate) fn look_at_group(&self, group: GroupId) {
        self.queue.add(group.to_string(), Duration::ZERO);
    }

    /// Records that a group snapshot is wanted, or finds the one that the same request made before.
    /// It is not cut yet when this returns: see [`Self::cut`].
    pub async fn create(
        &self,
        name: &str,
        volumes: &[VolumeRef],
    ) -> Result<Arc<GroupRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        if name.is_empty() {
            return Err(Error::invalid("name", "a group snapshot needs one"));
        }
        spec::check_name(name)?;
        if volumes.is_empty() || volumes.len() > POINT_VOLUMES_MAX {
            let rule = format!("{} are named; a group has 1 to {POINT_VOLUMES_MAX}", volumes.len());
            return Err(Error::invalid("volumes", rule));
        }
        let group = {
            let _changing = self.state.snapshots.changing.lock().await;
            if let Some(found) = self.named(name) {
                return self.same(found, volumes);
            }
            let members = self.members(volumes)?;
            let group = GroupRecord {
                id: Text(GroupId(random_id())),
                name: name.to_owned(),
                phase: GroupPhase::Wished,
                wished_ms: now_ms(),
                members,
            };
            match self.state.snapshots.groups.create(group).await? {
                Ok(group) => {
                    self.memory().making.insert(group.id.0, 0);
                    match self.prepare(&group).await {
                        Ok(group) => group,
                        Err(error) => {
                            self.end(&group).await?;
                            return Err(error);
                        }
                    }
                }
                Err(_) => {
                    let why = "a group's id was drawn twice; try again";
                    return Err(Error::Busy(why.to_owned()));
                }
            }
        };
        self.queue.add(group.name(), Duration::ZERO);
        Ok(group)
    }

    /// The volumes of a new group.
    fn members(&self, volumes: &[VolumeRef]) -> Result<Vec<GroupMember>, Error> {
        let mut members: Vec<GroupMember> = Vec::new();
        for reference in volumes {
            let volume = self.state.volume(Some(reference))?;
            check_volume(&volume, reference)?;
            if members.iter().any(|member| member.volume == volume.id) {
                let rule = format!("{:?} is named twice", volume.spec.name);
                return Err(Error::invalid("volumes", rule));
            }
            members.push(GroupMember {
                volume: volume.id,
                volume_name: volume.spec.name.clone(),
                snapshot: None,
                cut: None,
            });
        }
        Ok(members)
    }

    /// A group that has the name is the one that is asked for, if it is of the same volumes.
    fn same(
        &self,
        found: Arc<GroupRecord>,
        volumes: &[VolumeRef],
    ) -> Result<Arc<GroupRecord>, Error> {
        let id = |reference: &VolumeRef| match self.state.volume(Some(reference)) {
            Ok(volume) => Some(volume.id.0),
            // It may be one that was deleted since.
            Err(_) => reference.id.parse().ok(),
        };
        let asked: Option<BTreeSet<VolumeId>> = volumes.iter().map(id).collect();
        if asked.is_some_and(|asked| asked == found.volumes()) {
            return Ok(found);
        }
        let names: Vec<_> = found.members.iter().map(|m| format!("{:?}", m.volume_name)).collect();
        Err(Error::Exists {
            what: "group snapshot",
            name: found.name.clone(),
            difference: format!(
                "volumes: it is of {}; choose another name, or delete it (`quoin snapshot group \
                 delete`)",
                names.join(", ")
            ),
        })
    }

    /// Records the snapshots of an attempt. The caller holds the lock of changes.
    async fn prepare(&self, group: &GroupRecord) -> Result<Arc<GroupRecord>, Error> {
        let mut ids = Vec::new();
        for member in &group.members {
            let gone = || Error::missing("volume", &member.volume_name);
            let volume = self.state.volumes.get(&member.volume.0.to_string()).ok_or_else(gone)?;
            if volume.phase != VolumePhase::Ready {
                return Err(gone());
            }
            if self.state.snapshots.of_volume(volume.id.0).len() >= USER_SNAPSHOTS_MAX {
                return Err(too_many(&volume.spec.name));
            }
            let name = self.member_name(group, &volume);
            let snapshot = self.snapshots.record(&volume, &name, "", Some(group.id)).await?;
            ids.push(snapshot.id);
        }
        let change = |group: &mut GroupRecord| {
            for (member, id) in group.members.iter_mut().zip(&ids) {
                member.snapshot = Some(*id);
            }
            Ok(())
        };
        let updated = self.state.snapshots.groups.update(&group.name(), change).await?;
        updated
            .map(|(group, ())| group)
            .ok_or_else(|| Error::missing("group snapshot", &group.name))
    }

    /// Name of a member's snapshot: the group's and the volume's, where that is free and short enough.
    fn member_name(&self, group: &GroupRecord, volume: &VolumeRecord) -> String {
        let name = format!("{}-{}", group.name, volume.spec.name);
        let is_fit = spec::check_name(&name).is_ok() && self.state.snapshots.named(&name).is_none();
        if is_fit { name } else { format!("group-{}-{:08x}", group.id.0, random_id() as u32) }
    }

    /// Waits until a group is cut, at most so long; returns it as it is then.
    ///
    /// # Errors
    /// It was given up, with the reason.
    pub async fn cut(
        &self,
        group: Arc<GroupRecord>,
        within: Duration,
    ) -> Result<Arc<GroupRecord>, Error> {
        let id = group.name();
        let mut changes = self.state.changes();
        let waiting = async {
            loop {
                match self.state.snapshots.groups.get(&id) {
                    Some(found) if found.phase == GroupPhase::Ready && self.is_complete(&found) => {
                        return Ok(found);
                    }
                    Some(found) if found.phase != GroupPhase::Deleting => {}
                    _ => return Err(self.failure(&group)),
                }
                if changes.changed().await.is_err() {
                    return Ok(group.clone());
                }
            }
        };
        match tokio::time::timeout(within, waiting).await {
            Ok(ended) => ended,
            Err(_) => Ok(self.state.snapshots.groups.get(&id).unwrap_or(group)),
        }
    }

    fn failure(&self, group: &GroupRecord) -> Error {
        let memory = self.memory();
        let found = memory.failures.iter().find(|(id, _)| *id == group.id.0);
        match found {
            Some((_, failure)) => failure.clone().error(),
            None => {
                let what = format!("group snapshot {:?} was deleted before it was cut", group.name);
                Error::Aborted(what)
            }
        }
    }

    /// Whether the records of all members say what the group's says.
    fn is_complete(&self, group: &GroupRecord) -> bool {
        group.members.iter().all(|member| {
            let record = member.snapshot.and_then(|id| self.snapshot(id.0));
            record.is_none_or(|snapshot| snapshot.phase != SnapshotPhase::Wished)
        })
    }

    fn snapshot(&self, id: SnapshotId) -> Option<Arc<SnapshotRecord>> {
        self.state.snapshots.records.get(&id.to_string())
    }

    fn named(&self, name: &str) -> Option<Arc<GroupRecord>> {
        let found = self.state.snapshots.groups.indexed(|index| index.named(name));
        found.into_iter().next()
    }

    /// Finds the group of a reference: by id or, where the id is empty or unknown, by name.
    pub fn get(&self, reference: Option<&GroupSnapshotRef>) -> Result<Arc<GroupRecord>, Error> {
        let needed = || Error::invalid("group snapshot", "an id or a name is needed");
        let reference = reference.ok_or_else(needed)?;
        self.state.check_ruling()?;
        if reference.id.is_empty() && reference.name.is_empty() {
            return Err(needed());
        }
        let by_id = self.state.snapshots.groups.get(&reference.id);
        let found = by_id.filter(|group| group.is_listed()).or_else(|| self.named(&reference.name));
        let text = if reference.name.is_empty() { &reference.id } else { &reference.name };
        let shown = || text.chars().take(160).collect::<String>();
        found.ok_or_else(|| Error::missing("group snapshot", shown()))
    }

    /// A page of groups in the order of their ids: those after this id.
    pub fn list(&self, after: &str, count: usize) -> Result<Vec<Arc<GroupRecord>>, Error> {
        self.state.check_ruling()?;
        Ok(self.state.snapshots.groups.page_of(after, count, GroupRecord::is_listed))
    }

    /// Deletes a group with all its snapshots. One that does not exist is deleted already.
    ///
    /// # Errors
    /// A volume is being made from one of its snapshots.
    pub async fn delete(&self, reference: Option<&GroupSnapshotRef>) -> Result<(), Error> {
        let _changing = self.state.snapshots.changing.lock().await;
        let group = match self.get(reference) {
            Ok(group) => group,
            Err(Error::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.state.check_term()?;
        if let Some((snapshot, volume)) = self.use_of(&group) {
            return Err(Error::Precondition(format!(
                "group snapshot {:?}: volume {volume:?} is being made from its snapshot {:?}; delete \
                 the group once that is there",
                group.name, snapshot.name
            )));
        }
        let group = self.mark_deleting(&group).await?;
        let Some(group) = group else { return Ok(()) };
        let message = format!("group snapshot {:?}, with its snapshots", group.name);
        self.tell(&group, Severity::Normal, "GroupSnapshotDeleted", &message);
        match self.points.is_running(group.id.0) {
            // Its holds are released first.
            true => {
                self.points.give_up(Instant::now(), group.id.0);
                self.wake_targets(&group);
                self.queue.add(group.name(), Duration::ZERO);
                Ok(())
            }
            false => self.delete_members(&group).await,
        }
    }

    /// A member's snapshot that a volume is being made from, and that volume.
    fn use_of(&self, group: &GroupRecord) -> Option<(Arc<SnapshotRecord>, String)> {
        self.state.snapshots.of_group(group.id.0).into_iter().find_map(|snapshot| {
            let volumes = snapshot.used_by.iter().filter_map(|volume| {
                self.state.volumes.get(&volume.0.to_string()).map(|volume| {
                    (volume.phase == VolumePhase::Pending).then(|| volume.spec.name.clone())
                })
            });
            let in_making = volumes.flatten().next()?;
            Some((snapshot, in_making))
        })
    }

    async fn mark_deleting(&self, group: &GroupRecord) -> Result<Option<Arc<GroupRecord>>, Error> {
        let change = |group: &mut GroupRecord| {
            group.phase = GroupPhase::Deleting;
            Ok(())
        };
        let updated = self.state.snapshots.groups.update(&group.name(), change).await?;
        Ok(updated.map(|(group, ())| group))
    }

    /// Ends a group that is not to be. The caller holds the lock of changes.
    async fn end(&self, group: &GroupRecord) -> Result<(), Error> {
        match self.mark_deleting(group).await? {
            Some(group) => self.delete_members(&group).await,
            None => Ok(()),
        }
    }

    /// Has the snapshots of a group deleted, which go on by themselves, and then forgets it.
    async fn delete_members(&self, group: &GroupRecord) -> Result<(), Error> {
        self.remove_snapshots(group, |_| false).await?;
        self.state.snapshots.groups.remove(&group.name(), |_| true).await?;
        self.memory().making.remove(&group.id.0);
        Ok(())
    }

    async fn remove_snapshots(
        &self,
        group: &GroupRecord,
        stays: impl Fn(SnapshotId) -> bool,
    ) -> Result<(), Error> {
        for snapshot in self.state.snapshots.of_group(group.id.0) {
            if !snapshot.is_listed() || stays(snapshot.id.0) {
                continue;
            }
            let change = |snapshot: &mut SnapshotRecord| Ok(snapshot.remove());
            self.state.snapshots.records.update(&snapshot.name(), change).await?;
            self.state.snapshots.free_name(&snapshot).await?;
            self.state.tell_target(snapshot.volume.0);
        }
        Ok(())
    }

    fn wake_targets(&self, group: &GroupRecord) {
        group.members.iter().for_each(|member| self.state.tell_target(member.volume.0));
    }

    /// An event of each volume of the group.
    fn tell(&self, group: &GroupRecord, severity: Severity, reason: &'static str, message: &str) {
        for member in &group.members {
            let object =
                crate::state::events::Object::new("volume", member.volume.0, &member.volume_name);
            self.state.events.record(severity, object, reason, message.to_owned());
        }
    }

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
        // What it came to is on record: a failure before this has it concluded again.
        self.points.forget(group.id.0);
        Ok(next)
    }

    /// Whether each member has a snapshot that is to be made.
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
            match self.serves(member.volume.0) {
                Serves::Yes => {}
                Serves::NotYet => return Ok(Next::After(WAITS)),
                Serves::KnowsNoPoints(node) => {
                    let why = format!(
                        "volume {:?}: the target of node {node} runs a version without group \
                         snapshots; update it",
                        member.volume_name
                    );
                    return self.fail(group, Failure::Precondition(why)).await;
                }
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

    fn serves(&self, volume: VolumeId) -> Serves {
        let owner = self.state.volumes.get(&volume.to_string()).and_then(|v| v.owner.clone());
        let Some(node) = owner else { return Serves::NotYet };
        let is_serving = {
            let observed = self.state.observed();
            observed
                .volumes
                .get(&volume)
                .is_some_and(|seen| seen.node == node && seen.state == "serving")
        };
        match self.points.knows(&node) {
            Some(false) => Serves::KnowsNoPoints(node),
            Some(true) if is_serving => Serves::Yes,
            _ => Serves::NotYet,
        }
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
                Broken::Refused(volume, SnapshotOutcome::TooMany) => {
                    Failure::Exhausted(too_many(&name(volume)).to_string())
                }
                Broken::Refused(..) => Failure::Precondition(format!("{why}; update it")),
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

/// Whether a volume has a target that can take part in a point.
enum Serves {
    Yes,
    NotYet,
    KnowsNoPoints(String),
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

fn check_volume(volume: &VolumeRecord, reference: &VolumeRef) -> Result<(), Error> {
    match volume.phase {
        VolumePhase::Ready => Ok(()),
        VolumePhase::Pending => {
            Err(Error::Busy(format!("volume {:?} is not ready", volume.spec.name)))
        }
        VolumePhase::Deleting | VolumePhase::Retained => {
            Err(crate::state::missing(Some(reference)))
        }
    }
}
