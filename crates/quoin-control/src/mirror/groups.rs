//! Groups of volumes: named sets, each of which is mirrored as one.

use std::sync::Arc;

use quoin_api::control::{self as api, VolumeGroupRef, VolumeRef};
use quoin_cluster::mirror::{MEMBERS_MAX, Member};
use quoin_cluster::records::{MirrorRecord, Record, Text, VolumeGroupRecord};
use quoin_types::VolumeId;
use quoin_types::ids::GroupId;

use crate::Error;
use crate::state::events::{Object, Severity};
use crate::state::{State, random_id};
use crate::time::{now_ms, timestamp};
use crate::volume::spec;

/// Most groups of a cluster.
const GROUPS_MAX: usize = 1000;

/// Creation, changes, deletion and lists of groups.
pub struct VolumeGroups {
    state: Arc<State>,
}

impl VolumeGroups {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Makes a group, or finds the one that the same request made before.
    ///
    /// # Errors
    /// The name is none, or is of a group of other volumes; a volume is missing, or in another group.
    pub async fn create(
        &self,
        name: &str,
        volumes: &[VolumeRef],
    ) -> Result<Arc<VolumeGroupRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        spec::check_name(name)?;
        let _one = self.state.mirrored.changing.lock().await;
        let members = self.members(volumes, None)?;
        if let Some(found) = self.named(name) {
            let mut same = (found.members.clone(), members);
            same.0.sort();
            same.1.sort();
            return match same.0 == same.1 {
                true => Ok(found),
                false => Err(Error::Exists {
                    what: "group",
                    name: name.to_owned(),
                    difference: "volumes; change it with `quoin group modify`".to_owned(),
                }),
            };
        }
        if self.state.mirrored.groups.count() >= GROUPS_MAX {
            return Err(Error::Exhausted(format!("the cluster has {GROUPS_MAX} groups")));
        }
        let group = VolumeGroupRecord {
            id: Text(GroupId(random_id())),
            group_name: name.to_owned(),
            members,
            created_ms: now_ms(),
        };
        match self.state.mirrored.groups.create(group).await? {
            Ok(made) => {
                let message = format!("of {} volumes", made.members.len());
                self.event(&made, "GroupCreated", message);
                Ok(made)
            }
            Err(_) => Err(Error::Busy("a group's id was drawn twice; try again".to_owned())),
        }
    }

    fn members(
        &self,
        volumes: &[VolumeRef],
        of: Option<GroupId>,
    ) -> Result<Vec<Text<VolumeId>>, Error> {
        if volumes.len() > MEMBERS_MAX {
            let rule = format!("{} are named; a group has up to {MEMBERS_MAX}", volumes.len());
            return Err(Error::invalid("volumes", rule));
        }
        let mut members = Vec::new();
        for reference in volumes {
            let volume = self.state.volume(Some(reference))?;
            let name = &volume.spec.name;
            if members.contains(&volume.id) {
                return Err(Error::invalid("volumes", format!("{name:?} is named twice")));
            }
            let groups = self.state.mirrored.groups.indexed(|index| index.of_volume(volume.id.0));
            if let Some(other) = groups.iter().find(|group| Some(group.id.0) != of) {
                return Err(Error::Precondition(format!(
                    "volume {name:?} is in group {:?}; take it out of that first",
                    other.group_name
                )));
            }
            if volume.mirror.as_ref().is_some_and(|mirror| Some(mirror.group.0) != of) {
                return Err(Error::Precondition(format!(
                    "volume {name:?} is mirrored by itself; end that first (`quoin mirror disable`)"
                )));
            }
            members.push(volume.id);
        }
        Ok(members)
    }

    fn named(&self, name: &str) -> Option<Arc<VolumeGroupRecord>> {
        self.state.mirrored.groups.indexed(|index| index.named(name)).into_iter().next()
    }

    /// The group of a reference: by id or, where that is empty or unknown, by name.
    pub fn get(&self, reference: Option<&VolumeGroupRef>) -> Result<Arc<VolumeGroupRecord>, Error> {
        self.state.check_ruling()?;
        let needed = || Error::invalid("group", "an id or a name is needed");
        let reference = reference.ok_or_else(needed)?;
        if reference.id.is_empty() && reference.name.is_empty() {
            return Err(needed());
        }
        let by_id = self.state.mirrored.groups.get(&reference.id);
        let found = by_id.or_else(|| self.named(&reference.name));
        let text = if reference.name.is_empty() { &reference.id } else { &reference.name };
        found.ok_or_else(|| Error::missing("group", text.chars().take(160).collect::<String>()))
    }

    pub fn list(&self) -> Result<Vec<Arc<VolumeGroupRecord>>, Error> {
        self.state.check_ruling()?;
        let mut all = self.state.mirrored.groups.list();
        all.sort_by(|one, other| one.group_name.cmp(&other.group_name));
        Ok(all)
    }

    /// Gives a group other members. Those of a mirrored group are those of its mirror: they join and leave it.
    ///
    /// # Errors
    /// It is a copy's that keeps what it has, or a volume cannot be a member.
    pub async fn modify(
        &self,
        reference: Option<&VolumeGroupRef>,
        volumes: &[VolumeRef],
    ) -> Result<Arc<VolumeGroupRecord>, Error> {
        self.state.check_term()?;
        let _one = self.state.mirrored.changing.lock().await;
        let group = self.get(reference)?;
        if let Some(mirror) = self.state.mirrored.group(group.id.0) {
            if mirror.role().is_copy() {
                return Ok(group);
            }
            if volumes.is_empty() {
                return Err(mirrored(&group));
            }
        }
        let members = self.members(volumes, Some(group.id.0))?;
        let before = group.members.clone();
        let change = |found: &mut VolumeGroupRecord| {
            found.members.clone_from(&members);
            Ok(())
        };
        let updated = self.state.mirrored.groups.update(&group.name(), change).await?;
        let (group, ()) = updated.ok_or_else(|| Error::missing("group", &group.group_name))?;
        self.pass_on(&group).await?;
        // The mirror does it too, where this life ends here.
        for left in before.iter().filter(|member| !members.contains(member)) {
            super::leaving::release(&self.state, group.id.0, left.0).await?;
        }
        Ok(group)
    }

    /// Has the mirror of a group take its members over.
    async fn pass_on(&self, group: &VolumeGroupRecord) -> Result<(), Error> {
        let change = |mirror: &mut MirrorRecord| {
            let mut record = mirror.brain().clone();
            if !record.role.is_primary() {
                return Ok(());
            }
            record.members.retain(|member| group.members.contains(&Text(member.volume)));
            for volume in &group.members {
                if !record.members.iter().any(|member| member.volume == volume.0) {
                    record.members.push(Member { volume: volume.0, has_base: false });
                }
            }
            if record.members != mirror.brain().members {
                let version = mirror.version;
                mirror.change(version, record);
            }
            Ok(())
        };
        self.state.mirrored.records.update(&group.name(), change).await.map(drop)
    }

    /// Deletes a group; its volumes stay. One that does not exist is deleted already.
    ///
    /// # Errors
    /// It is mirrored from here.
    pub async fn delete(&self, reference: Option<&VolumeGroupRef>) -> Result<(), Error> {
        self.state.check_term()?;
        let _one = self.state.mirrored.changing.lock().await;
        let group = match self.get(reference) {
            Err(Error::NotFound { .. }) => return Ok(()),
            found => found?,
        };
        match self.state.mirrored.group(group.id.0).map(|mirror| mirror.role()) {
            // It belongs to the mirror.
            Some(role) if role.is_copy() => return Ok(()),
            Some(role) if role.is_primary() => return Err(mirrored(&group)),
            _ => {}
        }
        self.state.mirrored.groups.remove(&group.name(), |_| true).await?;
        self.event(&group, "GroupDeleted", "its volumes stay".to_owned());
        Ok(())
    }

    pub fn view(&self, group: &VolumeGroupRecord) -> api::VolumeGroup {
        let volume = |id: &Text<VolumeId>| {
            let name = self.state.volumes.get(&id.0.to_string());
            let name = name.map(|volume| volume.spec.name.clone()).unwrap_or_default();
            VolumeRef { id: id.0.to_string(), name }
        };
        let role = self.state.mirrored.group(group.id.0).map(|mirror| mirror.role());
        api::VolumeGroup {
            id: group.id.0.to_string(),
            name: group.group_name.clone(),
            volumes: group.members.iter().map(volume).collect(),
            created_at: Some(timestamp(group.created_ms)),
            role: role.map(super::view::role).unwrap_or_default().to_owned(),
        }
    }

    fn event(&self, group: &VolumeGroupRecord, reason: &'static str, message: String) {
        let about = Object::new("group", group.id.0, &group.group_name);
        self.state.events.record(Severity::Normal, about, reason, message);
    }
}

fn mirrored(group: &VolumeGroupRecord) -> Error {
    Error::Precondition(format!(
        "group {:?} is mirrored to another cluster: end that first (`quoin mirror disable`)",
        group.group_name
    ))
}
