//! The tables of snapshots.

use std::sync::Arc;

use quoin_cluster::records::{
    GroupRecord, RevertRecord, ScheduleRecord, SnapshotName, SnapshotRecord,
};
use quoin_types::VolumeId;
use quoin_types::ids::GroupId;

use crate::Error;
use crate::state::changes::Changes;
use crate::state::pulls::Pulls;
use crate::state::store::{Store, StoreError};
use crate::state::table::Table;

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
