//! The records of snapshots and of schedules that make them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use quoin_types::ids::{GroupId, PointId, SnapshotId};
use quoin_types::{Lsn, VolumeId};
use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Index, Record, Text, is_zero};

/// Steps of a snapshot. It never goes back to an earlier one: its id stands for one attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SnapshotPhase {
    /// The target of its volume is to make it.
    Wished,
    Ready,
    /// Nobody sees it any more; the target is to delete it.
    Deleting,
    /// Deleted by its user, and kept because volumes are made from it.
    Retained,
}

impl SnapshotPhase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wished => "Wished",
            Self::Ready => "Ready",
            Self::Deleting => "Deleting",
            Self::Retained => "Retained",
        }
    }
}

/// The point of a volume's history at which a snapshot was cut, as its target reported it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Cut {
    pub lsn: u64,
    /// 0: not reported.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub epoch: u64,
    /// 0: not reported.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub chain: u64,
    /// By the target's clock.
    pub at_ms: u64,
    /// Size of the volume.
    pub size_bytes: u64,
}

impl Cut {
    pub fn lsn(&self) -> Lsn {
        Lsn(self.lsn)
    }
}

/// One attempt at a snapshot. The id is drawn for the attempt and names no other content, ever.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SnapshotRecord {
    pub id: Text<SnapshotId>,
    pub name: String,
    pub volume: Text<VolumeId>,
    /// The volume's name when the snapshot was made.
    pub volume_name: String,
    pub phase: SnapshotPhase,
    pub wished_ms: u64,
    /// `None`: not cut yet.
    pub cut: Option<Cut>,
    /// The schedule that made it; empty: a user did.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub schedule: String,
    /// The group that it is a member of; `None`: it stands alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Text<GroupId>>,
    /// Reason why the attempt was given up; empty: it was not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub failure: String,
    /// Volumes that are made from it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub used_by: Vec<Text<VolumeId>>,
    /// Name of the volume that is made from it; empty: it is a user's. Others are in no list.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub made_for: String,
    /// The point of a mirror that it is, which is in no list. `None`: it is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<Text<PointId>>,
}

impl SnapshotRecord {
    /// Users see it.
    pub fn is_listed(&self) -> bool {
        matches!(self.phase, SnapshotPhase::Wished | SnapshotPhase::Ready)
            && self.made_for.is_empty()
            && self.point.is_none()
    }

    /// Its content must stay.
    pub fn is_kept(&self) -> bool {
        matches!(self.phase, SnapshotPhase::Ready | SnapshotPhase::Retained)
    }

    /// The target of its volume has something to do for it.
    pub fn is_open(&self) -> bool {
        matches!(self.phase, SnapshotPhase::Wished | SnapshotPhase::Deleting)
    }

    /// Time of the cut, or 0.
    pub fn cut_ms(&self) -> u64 {
        self.cut.map_or(0, |cut| cut.at_ms)
    }

    /// Takes over the cut that the target reported; false: the attempt was given up before, or this
    /// is a repeat.
    pub fn made(&mut self, cut: Cut) -> bool {
        if self.phase != SnapshotPhase::Wished {
            return false;
        }
        (self.phase, self.cut) = (SnapshotPhase::Ready, Some(cut));
        true
    }

    /// A volume is made from it.
    pub fn begin_use(&mut self, volume: Text<VolumeId>) {
        if !self.used_by.contains(&volume) {
            self.used_by.push(volume);
        }
        if !self.made_for.is_empty() {
            // It is for this one alone.
            self.remove();
        }
    }

    /// The volume does not need it any more. With the last one it goes, unless it is a user's.
    pub fn end_use(&mut self, volume: Text<VolumeId>) {
        self.used_by.retain(|user| *user != volume);
        if self.used_by.is_empty() && self.phase == SnapshotPhase::Retained {
            self.phase = SnapshotPhase::Deleting;
        }
    }

    /// Removes it from the users' sight; false: it was removed before.
    pub fn remove(&mut self) -> bool {
        let before = self.phase;
        self.phase = match before {
            SnapshotPhase::Ready if !self.used_by.is_empty() => SnapshotPhase::Retained,
            SnapshotPhase::Wished | SnapshotPhase::Ready => SnapshotPhase::Deleting,
            other => other,
        };
        self.phase != before
    }
}

impl Record for SnapshotRecord {
    type Index = SnapshotIndex;
    const PREFIX: &'static str = "snapshot/";
    fn name(&self) -> String {
        self.id.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        // The node of the volume's target is told by [`crate::state::State::tell_target`].
        Concerned::Status
    }
    fn volume(&self) -> Option<VolumeId> {
        Some(self.volume.0)
    }
}

/// Makes a snapshot's name its own: created before the snapshot, removed where it is deleted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SnapshotName {
    pub snapshot_name: String,
    pub snapshot_id: Text<SnapshotId>,
}

impl Record for SnapshotName {
    type Index = ();
    const PREFIX: &'static str = "snapshot-name/";
    fn name(&self) -> String {
        self.snapshot_name.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Nobody
    }
}

/// Names of snapshots' records by their volumes and schedules.
#[derive(Debug, Default)]
pub struct SnapshotIndex {
    by_volume: HashMap<VolumeId, BTreeSet<String>>,
    by_schedule: HashMap<String, BTreeSet<String>>,
    /// By the volumes that are made from them.
    by_user: HashMap<VolumeId, BTreeSet<String>>,
    by_group: HashMap<GroupId, BTreeSet<String>>,
    /// Snapshots of which a target has something to do.
    open: BTreeMap<VolumeId, BTreeSet<String>>,
}

impl SnapshotIndex {
    pub fn of_volume(&self, volume: VolumeId) -> Option<&BTreeSet<String>> {
        self.by_volume.get(&volume)
    }

    pub fn of_schedule(&self, schedule: &str) -> Option<&BTreeSet<String>> {
        self.by_schedule.get(schedule)
    }

    /// Snapshots that a volume was made from.
    pub fn used_by(&self, volume: VolumeId) -> Option<&BTreeSet<String>> {
        self.by_user.get(&volume)
    }

    pub fn of_group(&self, group: GroupId) -> Option<&BTreeSet<String>> {
        self.by_group.get(&group)
    }

    /// Snapshots of which a target has something to do, by their volumes.
    pub fn open(&self) -> &BTreeMap<VolumeId, BTreeSet<String>> {
        &self.open
    }

    fn remove(&mut self, snapshot: &SnapshotRecord) {
        let name = snapshot.name();
        if let Some(names) = self.by_volume.get_mut(&snapshot.volume.0) {
            names.remove(&name);
            if names.is_empty() {
                self.by_volume.remove(&snapshot.volume.0);
            }
        }
        if let Some(names) = self.by_schedule.get_mut(&snapshot.schedule) {
            names.remove(&name);
            if names.is_empty() {
                self.by_schedule.remove(&snapshot.schedule);
            }
        }
        for user in &snapshot.used_by {
            if let Some(names) = self.by_user.get_mut(&user.0) {
                names.remove(&name);
                if names.is_empty() {
                    self.by_user.remove(&user.0);
                }
            }
        }
        if let Some(Text(group)) = snapshot.group
            && let Some(names) = self.by_group.get_mut(&group)
        {
            names.remove(&name);
            if names.is_empty() {
                self.by_group.remove(&group);
            }
        }
        if let Some(names) = self.open.get_mut(&snapshot.volume.0) {
            names.remove(&name);
            if names.is_empty() {
                self.open.remove(&snapshot.volume.0);
            }
        }
    }

    fn insert(&mut self, snapshot: &SnapshotRecord) {
        let name = snapshot.name();
        self.by_volume.entry(snapshot.volume.0).or_default().insert(name.clone());
        if !snapshot.schedule.is_empty() {
            let of_schedule = self.by_schedule.entry(snapshot.schedule.clone());
            of_schedule.or_default().insert(name.clone());
        }
        for user in &snapshot.used_by {
            self.by_user.entry(user.0).or_default().insert(name.clone());
        }
        if let Some(Text(group)) = snapshot.group {
            self.by_group.entry(group).or_default().insert(name.clone());
        }
        if snapshot.is_open() {
            self.open.entry(snapshot.volume.0).or_default().insert(name);
        }
    }
}

impl Index<SnapshotRecord> for SnapshotIndex {
    fn follow(&mut self, before: Option<&SnapshotRecord>, after: Option<&SnapshotRecord>) {
        if let Some(snapshot) = before {
            self.remove(snapshot);
        }
        if let Some(snapshot) = after {
            self.insert(snapshot);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn snapshot(id: u128, volume: u128) -> SnapshotRecord {
        SnapshotRecord {
            id: Text(SnapshotId(id)),
            name: format!("s{id}"),
            volume: Text(VolumeId(volume)),
            volume_name: "db".into(),
            phase: SnapshotPhase::Wished,
            wished_ms: 1_700_000_000_000,
            cut: None,
            schedule: String::new(),
            group: None,
            failure: String::new(),
            used_by: Vec::new(),
            made_for: String::new(),
            point: None,
        }
    }

    pub fn cut(at_ms: u64) -> Cut {
        Cut { lsn: 9, epoch: 3, chain: 0xc4a1, at_ms, size_bytes: 1 << 30 }
    }

    #[test]
    fn an_attempt_that_was_given_up_is_never_ready_and_never_wished_again() {
        let mut attempt = snapshot(1, 7);
        assert!(attempt.remove());
        assert_eq!(attempt.phase, SnapshotPhase::Deleting);
        assert!(!attempt.made(cut(5)), "its target answers late");
        assert!(!attempt.remove());
        assert_eq!((attempt.phase, attempt.cut), (SnapshotPhase::Deleting, None));
    }

    #[test]
    fn a_cut_is_taken_over_once_and_a_repeat_changes_nothing() {
        let mut attempt = snapshot(1, 7);
        assert!(attempt.made(cut(5)));
        assert!(!attempt.made(cut(6)));
        assert_eq!((attempt.phase, attempt.cut_ms()), (SnapshotPhase::Ready, 5));
    }

    #[test]
    fn a_snapshot_that_volumes_are_made_from_leaves_the_lists_and_keeps_its_content() {
        let mut used = SnapshotRecord { used_by: vec![Text(VolumeId(8))], ..snapshot(1, 7) };
        used.made(cut(5));
        assert!(used.remove());
        assert_eq!(used.phase, SnapshotPhase::Retained);
        assert!(used.is_kept() && !used.is_listed() && !used.is_open());
    }

    #[test]
    fn a_snapshot_is_given_up_with_the_last_volume_that_was_made_from_it() {
        let mut used = snapshot(1, 7);
        used.made(cut(5));
        [8, 9, 8].into_iter().for_each(|volume| used.begin_use(Text(VolumeId(volume))));
        assert_eq!(used.used_by.len(), 2);
        assert!(used.remove() && used.phase == SnapshotPhase::Retained);
        used.end_use(Text(VolumeId(8)));
        assert_eq!(used.phase, SnapshotPhase::Retained);
        used.end_use(Text(VolumeId(9)));
        assert_eq!(used.phase, SnapshotPhase::Deleting);
        let mut listed = snapshot(2, 7);
        listed.made(cut(5));
        listed.begin_use(Text(VolumeId(8)));
        listed.end_use(Text(VolumeId(8)));
        assert_eq!(listed.phase, SnapshotPhase::Ready, "its user keeps it");
    }

    #[test]
    fn a_snapshot_that_is_made_for_a_clone_is_in_no_list_and_goes_with_it() {
        let mut hidden = SnapshotRecord { made_for: "copy".into(), ..snapshot(1, 7) };
        hidden.made(cut(5));
        assert!(!hidden.is_listed() && hidden.is_kept());
        hidden.begin_use(Text(VolumeId(8)));
        assert_eq!(hidden.phase, SnapshotPhase::Retained);
        hidden.end_use(Text(VolumeId(8)));
        assert_eq!(hidden.phase, SnapshotPhase::Deleting);
    }

    #[test]
    fn the_index_follows_every_change() {
        let mut index = SnapshotIndex::default();
        let group = Some(Text(GroupId(3)));
        let scheduled = SnapshotRecord { schedule: "hourly".into(), group, ..snapshot(1, 7) };
        index.follow(None, Some(&scheduled));
        index.follow(None, Some(&snapshot(2, 7)));
        assert_eq!(index.of_volume(VolumeId(7)).map(BTreeSet::len), Some(2));
        assert_eq!(index.of_schedule("hourly").map(BTreeSet::len), Some(1));
        assert_eq!(index.of_group(GroupId(3)).map(BTreeSet::len), Some(1));
        let mut ready = scheduled.clone();
        ready.made(cut(5));
        index.follow(Some(&scheduled), Some(&ready));
        assert_eq!(index.open().get(&VolumeId(7)).map(BTreeSet::len), Some(1));
        index.follow(Some(&ready), None);
        index.follow(Some(&snapshot(2, 7)), None);
        assert!(index.of_volume(VolumeId(7)).is_none() && index.of_schedule("hourly").is_none());
        assert!(index.of_group(GroupId(3)).is_none());
        assert!(index.open().is_empty());
    }
}
