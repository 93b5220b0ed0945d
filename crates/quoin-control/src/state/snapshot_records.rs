//! The records of snapshots and of schedules that make them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use quoin_types::ids::{GroupId, SnapshotId};
use quoin_types::{Lsn, VolumeId};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::snapshot::history::Pulls;
use crate::state::changes::{Changes, Concerned};
use crate::state::group_records::GroupRecord;
use crate::state::records::{Record, Text};
use crate::state::revert_records::RevertRecord;
use crate::state::store::{Store, StoreError};
use crate::state::table::{Index, Table};
use crate::time::CORRECTION_MS;
use crate::volume::devices::is_zero;

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
}

impl SnapshotRecord {
    /// Users see it.
    pub fn is_listed(&self) -> bool {
        matches!(self.phase, SnapshotPhase::Wished | SnapshotPhase::Ready)
            && self.made_for.is_empty()
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
    pub(crate) fn made(&mut self, cut: Cut) -> bool {
        if self.phase != SnapshotPhase::Wished {
            return false;
        }
        (self.phase, self.cut) = (SnapshotPhase::Ready, Some(cut));
        true
    }

    /// A volume is made from it.
    pub(crate) fn begin_use(&mut self, volume: Text<VolumeId>) {
        if !self.used_by.contains(&volume) {
            self.used_by.push(volume);
        }
        if !self.made_for.is_empty() {
            // It is for this one alone.
            self.remove();
        }
    }

    /// The volume does not need it any more. With the last one it goes, unless it is a user's.
    pub(crate) fn end_use(&mut self, volume: Text<VolumeId>) {
        self.used_by.retain(|user| *user != volume);
        if self.used_by.is_empty() && self.phase == SnapshotPhase::Retained {
            self.phase = SnapshotPhase::Deleting;
        }
    }

    /// Removes it from the users' sight; false: it was removed before.
    pub(crate) fn remove(&mut self) -> bool {
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

/// Snapshots of one volume at intervals.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ScheduleRecord {
    pub name: String,
    pub volume: Text<VolumeId>,
    pub volume_name: String,
    pub every_ms: u64,
    /// Snapshots that are kept; 0: no limit.
    pub keep: u32,
    /// Time for which a snapshot is kept; 0: no limit.
    pub keep_for_ms: u64,
    /// The first run; the others follow it at the interval.
    pub created_ms: u64,
    /// Time of the last run that was carried out, as planned; 0: none was.
    pub last_ms: u64,
}

impl ScheduleRecord {
    /// The last run that was planned up to `now_ms`. Of several that were missed it is the only one
    /// that is made up for.
    pub fn planned_ms(&self, now_ms: u64) -> u64 {
        let every_ms = self.every_ms.max(1);
        // The interval that the runs keep to, also where the first run lies ahead.
        let phase_ms = self.created_ms % every_ms;
        let since = (now_ms % every_ms + every_ms - phase_ms) % every_ms;
        now_ms.saturating_sub(since)
    }

    /// Returns whether a time is so far ahead that a clock was wrong: it binds nothing.
    fn is_wrong(&self, at_ms: u64, now_ms: u64) -> bool {
        at_ms > now_ms.saturating_add(self.every_ms.min(CORRECTION_MS))
    }

    /// Time of the last run as it counts by this clock. A run that was carried out by a clock that was
    /// ahead leaves the present one due: it is made twice rather than not at all.
    pub(crate) fn last_by(&self, now_ms: u64) -> u64 {
        match self.is_wrong(self.last_ms, now_ms) {
            true => self.planned_ms(now_ms).saturating_sub(self.every_ms),
            false => self.last_ms,
        }
    }

    /// The planned run that is due; `None`: the last one was carried out.
    pub fn due_ms(&self, now_ms: u64) -> Option<u64> {
        let planned = self.planned_ms(now_ms);
        // A clock that was set back a little makes no run due that was carried out.
        let has_begun = now_ms >= self.created_ms || self.is_wrong(self.created_ms, now_ms);
        (has_begun && planned > self.last_by(now_ms)).then_some(planned)
    }

    /// Time of the next planned run.
    pub fn next_ms(&self, now_ms: u64) -> u64 {
        match self.due_ms(now_ms) {
            Some(due) => due,
            None if now_ms < self.created_ms && !self.is_wrong(self.created_ms, now_ms) => {
                self.created_ms
            }
            None => self.planned_ms(now_ms.max(self.last_by(now_ms))) + self.every_ms,
        }
    }
}

impl Record for ScheduleRecord {
    type Index = ScheduleIndex;
    const PREFIX: &'static str = "schedule/";
    fn name(&self) -> String {
        self.name.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
    fn volume(&self) -> Option<VolumeId> {
        Some(self.volume.0)
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

/// Names of schedules by their volumes.
#[derive(Debug, Default)]
pub struct ScheduleIndex {
    by_volume: HashMap<VolumeId, BTreeSet<String>>,
}

impl ScheduleIndex {
    pub fn of_volume(&self, volume: VolumeId) -> Option<&BTreeSet<String>> {
        self.by_volume.get(&volume)
    }
}

impl Index<ScheduleRecord> for ScheduleIndex {
    fn follow(&mut self, before: Option<&ScheduleRecord>, after: Option<&ScheduleRecord>) {
        if let Some(schedule) = before
            && let Some(names) = self.by_volume.get_mut(&schedule.volume.0)
        {
            names.remove(&schedule.name);
            if names.is_empty() {
                self.by_volume.remove(&schedule.volume.0);
            }
        }
        if let Some(schedule) = after {
            self.by_volume.entry(schedule.volume.0).or_default().insert(schedule.name.clone());
        }
    }
}

/// Tables of snapshots, their names, their schedules and Reverts to them; and what is read of them.
pub(crate) struct SnapshotTables {
    pub records: Table<SnapshotRecord>,
    pub names: Table<SnapshotName>,
    pub schedules: Table<ScheduleRecord>,
    pub groups: Table<GroupRecord>,
    pub reverts: Table<RevertRecord>,
    pub pulls: Pulls,
    /// Makes the look at a volume or a name and the change that rests on it one step.
    pub changing: tokio::sync::Mutex<()>,
    /// A Revert begins while nobody attaches a volume: writers begin one, readers attach.
    pub reverting: tokio::sync::RwLock<()>,
}

impl SnapshotTables {
    pub async fn load(store: &Arc<dyn Store>, changes: &Changes) -> Result<Self, StoreError> {
        Ok(Self {
            records: Table::load(store.clone(), changes.clone()).await?,
            names: Table::load(store.clone(), changes.clone()).await?,
            schedules: Table::load(store.clone(), changes.clone()).await?,
            groups: Table::load(store.clone(), changes.clone()).await?,
            reverts: Table::load(store.clone(), changes.clone()).await?,
            pulls: Pulls::default(),
            changing: tokio::sync::Mutex::new(()),
            reverting: tokio::sync::RwLock::new(()),
        })
    }

    pub async fn read_unanswered(&self) -> Result<(), Error> {
        self.records.read_unanswered().await?;
        self.names.read_unanswered().await?;
        self.reverts.read_unanswered().await?;
        self.schedules.read_unanswered().await?;
        self.groups.read_unanswered().await
    }

    /// All snapshots of a volume, those that are being deleted included.
    pub fn of_volume(&self, volume: VolumeId) -> Vec<Arc<SnapshotRecord>> {
        self.records.indexed(|index| index.of_volume(volume))
    }

    /// All snapshots that a schedule made of its volume. Those that an earlier schedule of the same name
    /// left of another volume are none of its own.
    pub fn of_schedule(&self, schedule: &ScheduleRecord) -> Vec<Arc<SnapshotRecord>> {
        let mut made = self.records.indexed(|index| index.of_schedule(&schedule.name));
        made.retain(|snapshot| snapshot.volume == schedule.volume);
        made
    }

    /// All snapshots of a group, those of attempts that did not count included.
    pub fn of_group(&self, group: GroupId) -> Vec<Arc<SnapshotRecord>> {
        self.records.indexed(|index| index.of_group(group))
    }

    pub fn group(&self, id: GroupId) -> Option<Arc<GroupRecord>> {
        self.groups.get(&id.to_string())
    }

    /// Snapshots of a volume of which its target has something to do.
    pub fn open_of(&self, volume: VolumeId) -> Vec<Arc<SnapshotRecord>> {
        self.records.indexed(|index| index.open().get(&volume))
    }

    /// Snapshots that a volume was made from.
    pub fn used_by(&self, volume: VolumeId) -> Vec<Arc<SnapshotRecord>> {
        self.records.indexed(|index| index.used_by(volume))
    }

    /// A snapshot of the volume must stay.
    pub fn keeps(&self, volume: VolumeId) -> bool {
        self.of_volume(volume).iter().any(|snapshot| snapshot.is_kept())
    }

    /// The snapshot that has this name now.
    pub fn named(&self, name: &str) -> Option<Arc<SnapshotRecord>> {
        let id = self.names.get(name)?.snapshot_id.0.to_string();
        self.records.get(&id).filter(|snapshot| snapshot.is_listed() && snapshot.name == name)
    }

    /// Makes a name free, unless another snapshot has it by now.
    pub async fn free_name(&self, snapshot: &SnapshotRecord) -> Result<(), Error> {
        let ours = |name: &SnapshotName| name.snapshot_id == snapshot.id;
        if self.names.get(&snapshot.name).is_some_and(|name| ours(&name)) {
            self.names.remove(&snapshot.name, ours).await?;
        }
        Ok(())
    }

    /// Removes names that no snapshot has: a crash between the two writes leaves the name.
    pub async fn drop_unused_names(&self) -> Result<(), Error> {
        for name in self.names.list() {
            if self.named(&name.snapshot_name).is_none() {
                self.names.remove(&name.snapshot_name, |found| *found == *name).await?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn snapshot(id: u128, volume: u128) -> SnapshotRecord {
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
        }
    }

    pub(crate) fn cut(at_ms: u64) -> Cut {
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
    fn of_runs_that_were_missed_the_last_one_is_made_up_for_and_none_is_made_twice() {
        let mut hourly = ScheduleRecord {
            name: "db".into(),
            volume: Text(VolumeId(7)),
            volume_name: "db".into(),
            every_ms: 3600,
            keep: 2,
            keep_for_ms: 0,
            created_ms: 10_000,
            last_ms: 0,
        };
        assert_eq!((hourly.due_ms(9_999), hourly.due_ms(10_000)), (None, Some(10_000)));
        hourly.last_ms = 10_000;
        assert_eq!((hourly.due_ms(13_599), hourly.due_ms(13_600)), (None, Some(13_600)));
        assert_eq!(hourly.next_ms(11_000), 13_600);
        // The controller was away for ten intervals.
        assert_eq!(hourly.due_ms(10_000 + 36_500), Some(10_000 + 36_000));
        hourly.last_ms = 10_000 + 36_000;
        assert_eq!(hourly.due_ms(10_000 + 36_500), None);
        assert_eq!(hourly.next_ms(10_000 + 36_500), 10_000 + 39_600);
        // The clock was set back by less than an interval.
        assert_eq!((hourly.due_ms(45_000), hourly.next_ms(45_000)), (None, 10_000 + 39_600));
    }

    #[test]
    fn no_run_is_bound_by_a_time_that_lies_ahead() {
        let (day, now) = (86_400_000, 1_700_000_000_000);
        let minutely = ScheduleRecord {
            name: "m".into(),
            volume: Text(VolumeId(7)),
            volume_name: "db".into(),
            every_ms: 60_000,
            keep: 2,
            keep_for_ms: 0,
            created_ms: now - day,
            last_ms: now + 25 * day,
        };
        let due = minutely.due_ms(now).expect("a run of the future was carried out");
        assert!(due <= now && now - due < 60_000, "{due}");
        assert_eq!(minutely.next_ms(now), due);
        // The first run of all lies ahead: the clock was wrong as the schedule was made.
        let created = ScheduleRecord { created_ms: now + 25 * day, last_ms: 0, ..minutely.clone() };
        let due = created.due_ms(now).expect("a first run of the future");
        assert!(
            due <= now && now - due < 60_000 && (created.created_ms - due).is_multiple_of(60_000)
        );
        // Once it is carried out, the next one is an interval later.
        let carried_out = ScheduleRecord { last_ms: due, ..created };
        assert_eq!((carried_out.due_ms(now), carried_out.next_ms(now)), (None, due + 60_000));
        // A step back by seconds, across a run: nothing is made twice.
        let stepped = ScheduleRecord { created_ms: now - day, last_ms: now, ..minutely };
        assert_eq!(stepped.due_ms(now - 2_000), None);
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
