//! The records of group snapshots: snapshots of several volumes at one point.

use std::collections::{BTreeSet, HashMap};

use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, SnapshotId};
use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Cut, Index, Record, Text};

/// Steps of a group snapshot. It never goes back to an earlier one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum GroupPhase {
    /// Its snapshots are being made.
    Wished,
    Ready,
    /// Nobody sees it any more; its snapshots are being deleted.
    Deleting,
}

impl GroupPhase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wished => "Wished",
            Self::Ready => "Ready",
            Self::Deleting => "Deleting",
        }
    }
}

/// One volume of a group snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupMember {
    pub volume: Text<VolumeId>,
    /// The volume's name when the group was asked for.
    pub volume_name: String,
    /// The snapshot of the present attempt, or of the one that counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Text<SnapshotId>>,
    /// The cut that counts. All members have theirs in one write, which is what makes the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
}

/// Snapshots of several volumes at one point: no member holds an effect whose cause another lacks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupRecord {
    pub id: Text<GroupId>,
    pub name: String,
    pub phase: GroupPhase,
    pub wished_ms: u64,
    pub members: Vec<GroupMember>,
}

impl GroupRecord {
    /// Users see it.
    pub fn is_listed(&self) -> bool {
        self.phase != GroupPhase::Deleting
    }

    pub fn volumes(&self) -> BTreeSet<VolumeId> {
        self.members.iter().map(|member| member.volume.0).collect()
    }

    /// Time of the common cut, or 0.
    pub fn cut_ms(&self) -> u64 {
        self.members.first().and_then(|member| member.cut).map_or(0, |cut| cut.at_ms)
    }

    /// The cut of this snapshot, if it is a member's.
    pub fn cut_of(&self, snapshot: SnapshotId) -> Option<Cut> {
        let member = self.members.iter().find(|m| m.snapshot == Some(Text(snapshot)));
        member.and_then(|member| member.cut)
    }
}

impl Record for GroupRecord {
    type Index = GroupIndex;
    const PREFIX: &'static str = "group-snapshot/";
    fn name(&self) -> String {
        self.id.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}

/// Names of groups' records by the names that users know, and by their volumes.
#[derive(Debug, Default)]
pub struct GroupIndex {
    /// Groups that users see.
    by_name: HashMap<String, BTreeSet<String>>,
    by_volume: HashMap<VolumeId, BTreeSet<String>>,
}

impl GroupIndex {
    pub fn named(&self, name: &str) -> Option<&BTreeSet<String>> {
        self.by_name.get(name)
    }

    pub fn of_volume(&self, volume: VolumeId) -> Option<&BTreeSet<String>> {
        self.by_volume.get(&volume)
    }
}

fn forget<K: std::hash::Hash + Eq>(
    index: &mut HashMap<K, BTreeSet<String>>,
    key: &K,
    name: &String,
) {
    if let Some(names) = index.get_mut(key) {
        names.remove(name);
        if names.is_empty() {
            index.remove(key);
        }
    }
}

impl Index<GroupRecord> for GroupIndex {
    fn follow(&mut self, before: Option<&GroupRecord>, after: Option<&GroupRecord>) {
        if let Some(group) = before {
            let name = Record::name(group);
            forget(&mut self.by_name, &group.name, &name);
            for volume in group.volumes() {
                forget(&mut self.by_volume, &volume, &name);
            }
        }
        if let Some(group) = after {
            let name = Record::name(group);
            for volume in group.volumes() {
                self.by_volume.entry(volume).or_default().insert(name.clone());
            }
            if group.is_listed() {
                self.by_name.entry(group.name.clone()).or_default().insert(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_knows_a_group_by_its_name_while_users_see_it_and_by_its_volumes_to_the_end() {
        let member = |volume| GroupMember {
            volume: Text(VolumeId(volume)),
            volume_name: "db".into(),
            snapshot: None,
            cut: None,
        };
        let wished = GroupRecord {
            id: Text(GroupId(5)),
            name: "nightly".into(),
            phase: GroupPhase::Wished,
            wished_ms: 7,
            members: vec![member(1), member(2)],
        };
        let mut index = GroupIndex::default();
        index.follow(None, Some(&wished));
        assert!(index.named("nightly").is_some() && index.of_volume(VolumeId(2)).is_some());
        let deleting = GroupRecord { phase: GroupPhase::Deleting, ..wished.clone() };
        index.follow(Some(&wished), Some(&deleting));
        assert!(index.named("nightly").is_none() && index.of_volume(VolumeId(2)).is_some());
        index.follow(Some(&deleting), None);
        assert!(index.by_name.is_empty() && index.by_volume.is_empty());
    }
}
