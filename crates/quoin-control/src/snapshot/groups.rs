//! Group snapshots: snapshots of several volumes at one point.
//!
//! A group's record comes first, then a snapshot's for each member, then one attempt at a point
//! ([`super::points`]). An attempt that does not count has its snapshots deleted, and the next one has
//! new ones. What makes the group is one write of its record, with the cuts of all members; the
//! members' own records follow it ([`super::group_attempts`]). A group that another process of the
//! controller was making is given up: nobody knows how far its targets had come.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use quoin_api::control::{GroupSnapshotRef, VolumeRef};
use quoin_cluster::records::{
    GroupMember, GroupPhase, GroupRecord, Record, SnapshotPhase, SnapshotRecord, Text, VolumePhase,
    VolumeRecord,
};
use quoin_replication::group_point::POINT_VOLUMES_MAX;
use quoin_replication::primary::USER_SNAPSHOTS_MAX;
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, SnapshotId};
use tokio::time::Instant;

use super::catalog::{Snapshots, too_many};
use super::points::Points;
use crate::Error;
use crate::reconcile::Queue;
use crate::state::events::Severity;
use crate::state::{State, random_id};
use crate::time::now_ms;
use crate::volume::spec;

/// Groups in the queue.
const QUEUE_MAX: usize = 1 << 16;

/// Creation, deletion and lists of group snapshots, and the reconciler that makes them.
pub struct Groups {
    pub(super) state: Arc<State>,
    snapshots: Arc<Snapshots>,
    pub(super) points: Arc<Points>,
    pub(super) queue: Arc<Queue<String>>,
    memory: Mutex<Memory>,
}

#[derive(Default)]
pub(super) struct Memory {
    /// Groups that this process makes, with the attempts at each.
    pub making: HashMap<GroupId, u32>,
    pub failures: VecDeque<(GroupId, Failure)>,
}

/// Why a group was given up.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    Exhausted(String),
    Precondition(String),
    /// Another try may succeed.
    Passing(String),
}

impl Failure {
    pub fn text(&self) -> &str {
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

impl Groups {
    pub(crate) fn new(state: Arc<State>, snapshots: Arc<Snapshots>, points: Arc<Points>) -> Self {
        let queue = Arc::new(Queue::new(QUEUE_MAX));
        for group in state.snapshots.groups.list() {
            queue.add(group.name(), Duration::ZERO);
        }
        Self { state, snapshots, points, queue, memory: Mutex::default() }
    }

    pub(super) fn memory(&self) -> MutexGuard<'_, Memory> {
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
            crate::mirror::rules::check_change(&self.state, &volume)?;
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
    pub(super) async fn prepare(&self, group: &GroupRecord) -> Result<Arc<GroupRecord>, Error> {
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

    /// Returns true if the records of all members say what the group's says.
    fn is_complete(&self, group: &GroupRecord) -> bool {
        group.members.iter().all(|member| {
            let record = member.snapshot.and_then(|id| self.snapshot(id.0));
            record.is_none_or(|snapshot| snapshot.phase != SnapshotPhase::Wished)
        })
    }

    pub(super) fn snapshot(&self, id: SnapshotId) -> Option<Arc<SnapshotRecord>> {
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
    pub fn list(
        &self,
        after: &str,
        count: usize,
        is_seen: impl Fn(&GroupRecord) -> bool,
    ) -> Result<Vec<Arc<GroupRecord>>, Error> {
        self.state.check_ruling()?;
        let is_listed = |group: &GroupRecord| group.is_listed() && is_seen(group);
        Ok(self.state.snapshots.groups.page_of(after, count, is_listed))
    }

    /// Deletes a group with all its snapshots. One that does not exist is deleted already.
    ///
    /// # Errors
    /// A volume is being made from one of its snapshots.
    pub async fn delete(&self, reference: Option<&GroupSnapshotRef>) -> Result<(), Error> {
        let _changing = self.state.snapshots.changing.lock().await;
        let group = match self.get(reference) {
            Ok(group) => group,
            Err(Error::NotFound { .. }) => return self.finish_deletions(reference).await,
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

    /// Ends deletions of groups of a reference that a failure interrupted: their snapshots are still
    /// shown.
    async fn finish_deletions(&self, reference: Option<&GroupSnapshotRef>) -> Result<(), Error> {
        let Some(reference) = reference else { return Ok(()) };
        let is_meant = |group: &GroupRecord| {
            let is_named = !reference.name.is_empty() && group.name == reference.name;
            !group.is_listed() && (group.name() == reference.id || is_named)
        };
        for group in self.state.snapshots.groups.page_of("", usize::MAX, is_meant) {
            if !self.points.is_running(group.id.0) {
                self.delete_members(&group).await?;
            }
        }
        Ok(())
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
    pub(super) async fn end(&self, group: &GroupRecord) -> Result<(), Error> {
        match self.mark_deleting(group).await? {
            Some(group) => self.delete_members(&group).await,
            None => Ok(()),
        }
    }

    /// Has the snapshots of a group deleted, which go on by themselves, and then forgets it.
    pub(super) async fn delete_members(&self, group: &GroupRecord) -> Result<(), Error> {
        self.remove_snapshots(group, |_| false).await?;
        self.state.snapshots.groups.remove(&group.name(), |_| true).await?;
        self.memory().making.remove(&group.id.0);
        Ok(())
    }

    pub(super) async fn remove_snapshots(
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

    pub(super) fn wake_targets(&self, group: &GroupRecord) {
        group.members.iter().for_each(|member| self.state.tell_target(member.volume.0));
    }

    /// An event of each volume of the group.
    pub(super) fn tell(
        &self,
        group: &GroupRecord,
        severity: Severity,
        reason: &'static str,
        message: &str,
    ) {
        for member in &group.members {
            let object =
                crate::state::events::Object::new("volume", member.volume.0, &member.volume_name);
            self.state.events.record(severity, object, reason, message.to_owned());
        }
    }
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
