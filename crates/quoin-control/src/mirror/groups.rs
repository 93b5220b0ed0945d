//! Groups of volumes: named sets, each of which is mirrored as one.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{self as api, VolumeGroupRef, VolumeRef};
use quoin_cluster::mirror::answers::{Answer, Call};
use quoin_cluster::mirror::{MEMBERS_MAX, Member, Role};
use quoin_cluster::records::{GroupClaim, MirrorRecord, Record, Text, VolumeGroupRecord};
use quoin_replication::group_point::POINT_VOLUMES_MAX;
use quoin_types::VolumeId;
use quoin_types::ids::GroupId;

use super::driver::Mirrors;
use super::rules;
use crate::Error;
use crate::state::events::{Object, Severity};
use crate::state::{State, random_id};
use crate::time::{now_ms, timestamp};
use crate::volume::spec;

/// Time that a change of an orphan waits for its last point.
const LEFT_WITHIN: Duration = Duration::from_secs(3);
/// Most groups of a cluster.
const GROUPS_MAX: usize = 1000;

// A point over fewer volumes than a group has would leave members uncut.
const _: () = assert!(POINT_VOLUMES_MAX >= MEMBERS_MAX);

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
        self.record(VolumeGroupRecord::new(GroupId(random_id()), name, members, now_ms())).await
    }

    async fn record(&self, group: VolumeGroupRecord) -> Result<Arc<VolumeGroupRecord>, Error> {
        if self.state.mirrored.groups.count() >= GROUPS_MAX {
            return Err(Error::Exhausted(format!("the cluster has {GROUPS_MAX} groups")));
        }
        match self.state.mirrored.groups.create(group).await? {
            Ok(made) => {
                let message = format!("of {} volumes", made.members.len());
                self.event(&made, "GroupCreated", message);
                Ok(made)
            }
            Err(_) => Err(Error::Busy("a group's id was drawn twice; try again".to_owned())),
        }
    }

    /// Makes a group for an orchestrator, or finds the one that it has. Members of a group that is there are
    /// not changed: that is another call. A mirrored group of exactly these volumes that no orchestrator of this
    /// cluster has is that group, and gets the name.
    ///
    /// # Errors
    /// The name is none, or was given with another prefix; a volume is missing, or in another group.
    pub async fn claim(
        &self,
        claim: GroupClaim,
        volumes: &[VolumeRef],
    ) -> Result<Arc<VolumeGroupRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let name = claim.shown();
        spec::check_name(&claim.name)?;
        spec::check_name(&name)?;
        let _one = self.state.mirrored.changing.lock().await;
        let is_it = |group: &&Arc<VolumeGroupRecord>| {
            group.claim.as_ref().is_some_and(|held| held.name == claim.name)
        };
        if let Some(found) = self.state.mirrored.groups.list().iter().find(is_it) {
            return match found.claim.as_ref() == Some(&claim) {
                true => Ok(found.clone()),
                false => Err(Error::Exists {
                    what: "group",
                    name: claim.name,
                    difference: "volumeGroupNamePrefix".to_owned(),
                }),
            };
        }
        let named = self.named(&name);
        let wanted = self.sorted(volumes)?;
        let is_it = |group: &Arc<VolumeGroupRecord>| {
            group.claim.is_none() && sorted(group.members.clone()) == wanted
        };
        let claimed = match named.clone().filter(is_it) {
            Some(group) => Some(group),
            None => self.unclaimed_mirrored(&wanted),
        };
        if let Some(group) = claimed {
            let is_free = named.is_none_or(|other| other.id == group.id);
            let change = |found: &mut VolumeGroupRecord| {
                if is_free {
                    found.group_name.clone_from(&name);
                }
                found.claim = Some(claim.clone());
                Ok(())
            };
            let updated = self.state.mirrored.groups.update(&group.name(), change).await?;
            let (group, ()) = updated.ok_or_else(|| Error::missing("group", &group.group_name))?;
            let change = |mirror: &mut MirrorRecord| {
                mirror.group_name.clone_from(&group.group_name);
                Ok(())
            };
            drop(self.state.mirrored.records.update(&group.name(), change).await?);
            self.event(&group, "GroupClaimed", "an orchestrator made it its own".to_owned());
            return Ok(group);
        }
        if named.is_some() {
            return Err(Error::Exists {
                what: "group",
                name,
                difference: "name of its orchestrator".to_owned(),
            });
        }
        let members = self.members(volumes, None)?;
        let mut group = VolumeGroupRecord::new(GroupId(random_id()), name, members, now_ms());
        group.claim = Some(claim);
        self.record(group).await
    }

    /// The mirrored group of exactly these volumes that no orchestrator of this cluster has.
    fn unclaimed_mirrored(&self, wanted: &[Text<VolumeId>]) -> Option<Arc<VolumeGroupRecord>> {
        let first = wanted.first()?;
        let groups = self.state.mirrored.groups.indexed(|index| index.of_volume(first.0));
        let is_it = |group: &Arc<VolumeGroupRecord>| {
            let members = sorted(group.members.clone());
            let role = self.state.mirrored.group(group.id.0).map(|mirror| mirror.role());
            members == wanted && group.claim.is_none() && role.is_some_and(|role| role != Role::Off)
        };
        groups.into_iter().find(is_it)
    }

    /// Ids of volumes, in their order.
    fn sorted(&self, volumes: &[VolumeRef]) -> Result<Vec<Text<VolumeId>>, Error> {
        let volumes = volumes.iter().take(MEMBERS_MAX + 1);
        let ids = volumes.map(|reference| Ok(self.state.volume(Some(reference))?.id));
        ids.collect::<Result<_, Error>>().map(sorted)
    }

    fn members(
        &self,
        volumes: &[VolumeRef],
        of: Option<GroupId>,
    ) -> Result<Vec<Text<VolumeId>>, Error> {
        if volumes.len() > MEMBERS_MAX {
            let rule =
                format!("volumes: {} are named; a group has up to {MEMBERS_MAX}", volumes.len());
            return Err(Error::Exhausted(rule));
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

    /// A page of groups in the order of their ids, and the token of the next one.
    ///
    /// # Errors
    /// The token is none that this cluster gave.
    pub fn page(
        &self,
        max_entries: u32,
        starting_token: &str,
    ) -> Result<(Vec<Arc<VolumeGroupRecord>>, String), Error> {
        let after = starting_token.get(..32).unwrap_or_default();
        if !starting_token.is_empty() && starting_token != self.token_after(after) {
            let rule = "starting token: not one that this cluster gave; list from the start";
            return Err(Error::Aborted(rule.to_owned()));
        }
        let mut page = self.list()?;
        page.retain(|group| group.id.0.to_string().as_str() > after);
        page.sort_by_key(|group| group.id.0.to_string());
        let count = if max_entries == 0 { usize::MAX } else { max_entries as usize };
        if page.len() <= count {
            return Ok((page, String::new()));
        }
        page.truncate(count);
        let last = page.last().map(|group| group.id.0.to_string()).unwrap_or_default();
        Ok((page, self.token_after(&last)))
    }

    /// The token of the page after a group, which may be gone by then: a checksum tells that it was given here.
    fn token_after(&self, id: &str) -> String {
        let text = format!("groups of {} after {id}", self.state.identity.cluster());
        let sum = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
        format!("{id}{}", hex::encode(&sum.as_ref()[..8]))
    }

    /// Gives a group other members. Those of a mirrored group are those of its mirror: they join and leave it.
    ///
    /// # Errors
    /// It is a copy's that keeps what it has, or a volume cannot be a member; members of an orphan may not leave
    /// it yet.
    pub async fn modify(
        &self,
        driver: &Mirrors,
        reference: Option<&VolumeGroupRef>,
        volumes: &[VolumeRef],
    ) -> Result<Arc<VolumeGroupRecord>, Error> {
        self.state.check_term()?;
        let _one = self.state.mirrored.changing.lock().await;
        let group = self.get(reference)?;
        let role = self.state.mirrored.group(group.id.0).map(|mirror| mirror.role());
        match role {
            Some(role) if role.is_copy() => return Ok(group),
            Some(role) if role.is_primary() && volumes.is_empty() => return Err(mirrored(&group)),
            _ => {}
        }
        let members = self.members(volumes, Some(group.id.0))?;
        if role.is_some_and(|role| role.is_primary()) {
            self.check_joiners(&group, &members)?;
        }
        let leaves = group.members.iter().any(|member| !members.contains(member));
        if leaves && role == Some(Role::Orphan) {
            check_leaves(driver, &group).await?;
        }
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

    /// A volume that joins a mirrored group is mirrored from then on.
    fn check_joiners(
        &self,
        group: &VolumeGroupRecord,
        members: &[Text<VolumeId>],
    ) -> Result<(), Error> {
        let joins = members.iter().filter(|member| !group.members.contains(member));
        let volumes = joins.filter_map(|member| self.state.volumes.get(&member.0.to_string()));
        volumes.into_iter().try_for_each(|volume| rules::check_mirrored(&volume))
    }

    /// Has the mirror of a group take its members over.
    async fn pass_on(&self, group: &VolumeGroupRecord) -> Result<(), Error> {
        let change = |mirror: &mut MirrorRecord| {
            let mut record = mirror.brain().clone();
            if !record.role.is_primary() && record.role != Role::Orphan {
                return Ok(());
            }
            record.members.retain(|member| group.members.contains(&Text(member.volume)));
            // An orphan follows no other side, so none joins it.
            for volume in group.members.iter().filter(|_| record.role.is_primary()) {
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
    /// The group is mirrored from here, or has members although an empty one alone is to be deleted.
    pub async fn delete(
        &self,
        reference: Option<&VolumeGroupRef>,
        only_empty: bool,
    ) -> Result<(), Error> {
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
            _ if only_empty && !group.members.is_empty() => {
                return Err(Error::Precondition(format!(
                    "group {:?} has {} volumes: take them out first",
                    group.group_name,
                    group.members.len()
                )));
            }
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

fn sorted(mut members: Vec<Text<VolumeId>>) -> Vec<Text<VolumeId>> {
    members.sort();
    members
}

/// A volume that leaves an orphan keeps what its view shows. That may be a part of a transfer, until it is back at the
/// last complete point.
async fn check_leaves(driver: &Mirrors, group: &VolumeGroupRecord) -> Result<(), Error> {
    match driver.call(group.id.0, Call::RemoveMembers, LEFT_WITHIN).await {
        Ok((_, Answer::NotYet)) => Err(Error::Busy(format!(
            "group {:?} is a copy whose mirror was ended, on its way back to its last point; try again",
            group.group_name
        ))),
        Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn mirrored(group: &VolumeGroupRecord) -> Error {
    Error::Precondition(format!(
        "group {:?} is mirrored to another cluster: end that first (`quoin mirror disable`)",
        group.group_name
    ))
}
