//! The end of a volume for its snapshots, and the end of its snapshots for a volume that is
//! Retained.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use quoin_cluster::records::{Record, SnapshotRecord, VolumePhase, VolumeRecord};
use quoin_cluster::wall_clock::is_ahead;
use quoin_types::VolumeId;
use tokio::time::Instant;

use super::groups::Groups;
use super::reverts;
use crate::Error;
use crate::reconcile::{Next, Queue, Reconciler, queue_of_volumes};
use crate::state::events::Severity;
use crate::state::{State, about};
use crate::time::now_ms;

/// A change of records is looked at after this time.
const PAUSE: Duration = Duration::from_millis(100);
/// A snapshot that is made for a copy is given up where no volume came of it for so long.
const COPY_WITHIN_MS: u64 = 600_000;

/// Reconciler of volumes that end with their snapshots.
pub struct SnapshotKeeper {
    state: Arc<State>,
    groups: Arc<Groups>,
    queue: Arc<Queue<VolumeId>>,
}

#[async_trait]
impl Reconciler for SnapshotKeeper {
    type Key = VolumeId;
    const NAME: &'static str = "keep snapshots";

    fn queue(&self) -> &Queue<VolumeId> {
        &self.queue
    }

    async fn reconcile(&self, volume: &VolumeId, _: Instant) -> Result<Next, Error> {
        if self.state.check_ruling().is_ok() {
            self.look(*volume).await?;
            reverts::show_newest(&self.state, *volume).await?;
            self.groups.look_at(*volume);
        }
        Ok(Next::Rest)
    }
}

impl SnapshotKeeper {
    pub(crate) fn new(state: Arc<State>, groups: Arc<Groups>) -> Self {
        let queue = queue_of_volumes(&state, PAUSE);
        // A crash may have left snapshots of a volume that has no record any more, which nothing
        // else brings here.
        for snapshot in state.snapshots.records.list() {
            queue.add(snapshot.volume.0, PAUSE);
        }
        Self { state, groups, queue }
    }

    /// Looks at every volume, and at every one that only snapshots are left of.
    pub async fn look_at_all(&self) -> Result<(), Error> {
        let mut ids: Vec<VolumeId> = self.state.volumes.list().iter().map(|v| v.id.0).collect();
        ids.extend(self.state.snapshots.records.list().iter().map(|s| s.volume.0));
        ids.extend(self.state.snapshots.reverts.list().iter().map(|r| r.volume.0));
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            self.reconcile(&id, Instant::now()).await?;
        }
        Ok(())
    }

    async fn look(&self, id: VolumeId) -> Result<(), Error> {
        let tables = &self.state.snapshots;
        let _changing = tables.changing.lock().await;
        crate::volume::clones::keep_users(&self.state, id).await?;
        self.drop_unused(id).await?;
        let volume = self.state.volumes.get(&id.to_string());
        if let Some(volume) = volume.as_ref().filter(|v| v.phase == VolumePhase::Retained) {
            // A crash may have come before this.
            crate::volume::volumes::free_name(&self.state, volume).await?;
        }
        match volume.map(|volume| volume.phase) {
            Some(VolumePhase::Ready | VolumePhase::Pending) => return Ok(()),
            Some(VolumePhase::Retained) if tables.keeps(id) => {
                // Nobody asks for what only schedules still want.
                self.remove_schedules(id).await?;
                return self.give_up(id).await;
            }
            Some(VolumePhase::Retained) => self.end(id).await?,
            Some(VolumePhase::Deleting) | None => {}
        }
        // The replicas go with all that they hold.
        if tables.reverts.get(&id.to_string()).is_some() {
            tables.reverts.remove(&id.to_string(), |_| true).await?;
        }
        self.remove_schedules(id).await?;
        for snapshot in tables.of_volume(id) {
            tables.free_name(&snapshot).await?;
            tables.records.remove(&snapshot.name(), |_| true).await?;
        }
        Ok(())
    }

    /// Snapshots that were made for copies of the volume which never came to be.
    async fn drop_unused(&self, id: VolumeId) -> Result<(), Error> {
        let tables = &self.state.snapshots;
        let is_unused = |s: &SnapshotRecord| {
            let now_ms = now_ms();
            let is_old = now_ms.saturating_sub(s.wished_ms) > COPY_WITHIN_MS;
            let is_over = is_old || is_ahead(s.wished_ms, now_ms);
            !s.made_for.is_empty() && s.used_by.is_empty() && is_over
        };
        for snapshot in tables.of_volume(id).iter().filter(|s| is_unused(s)) {
            let change =
                |snapshot: &mut SnapshotRecord| Ok(is_unused(snapshot).then(|| snapshot.remove()));
            let updated = tables.records.update(&snapshot.name(), change).await?;
            if updated.is_some_and(|(_, removed)| removed == Some(true)) {
                self.state.tell_target(id);
            }
        }
        Ok(())
    }

    /// Attempts at snapshots of a volume that nobody can use any more.
    async fn give_up(&self, id: VolumeId) -> Result<(), Error> {
        let tables = &self.state.snapshots;
        for snapshot in tables.of_volume(id).iter().filter(|s| s.is_listed() && !s.is_kept()) {
            let change = |snapshot: &mut SnapshotRecord| {
                if !snapshot.is_kept() {
                    snapshot.remove();
                }
                Ok(())
            };
            tables.records.update(&snapshot.name(), change).await?;
            tables.free_name(snapshot).await?;
        }
        Ok(())
    }

    /// The last snapshot of a volume that was deleted is gone: now the volume goes.
    async fn end(&self, id: VolumeId) -> Result<(), Error> {
        let change = |volume: &mut VolumeRecord| {
            let ends = volume.phase == VolumePhase::Retained;
            if ends {
                volume.begin_deletion();
            }
            Ok(ends)
        };
        match self.state.update_volume(id, change).await {
            Ok((volume, true)) => {
                let message = "its last snapshot is gone; its replicas are being removed";
                let object = about(&volume);
                self.state.events.record(Severity::Normal, object, "VolumeDeleted", message);
                Ok(())
            }
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn remove_schedules(&self, id: VolumeId) -> Result<(), Error> {
        let schedules = &self.state.snapshots.schedules;
        for schedule in schedules.indexed(|index| index.of_volume(id)) {
            schedules.remove(&schedule.name, |found| found.volume.0 == id).await?;
        }
        Ok(())
    }
}
