//! Members that leave a mirror: an ordinary volume is left, without the mirror's points.

use quoin_cluster::ownership::mirrored;
use quoin_cluster::records::{SnapshotRecord, VolumeRecord};
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, SnapshotId};

use crate::Error;
use crate::state::State;

/// Deletes a point, unless volumes are made from it, which keep it for themselves.
pub(super) async fn drop_point(
    state: &State,
    volume: VolumeId,
    id: SnapshotId,
) -> Result<(), Error> {
    let change = |snapshot: &mut SnapshotRecord| Ok(snapshot.remove());
    let removed = state.snapshots.records.update(&id.to_string(), change).await?;
    if removed.is_some_and(|(_, removed)| removed) {
        state.tell_target(volume);
    }
    Ok(())
}

/// Makes a member an ordinary volume.
pub(super) async fn release(state: &State, group: GroupId, id: VolumeId) -> Result<(), Error> {
    state.mirrored.forget(id);
    let all = state.snapshots.of_volume(id);
    for point in all.iter().filter(|s| s.point.is_some() && (s.is_kept() || s.is_open())) {
        drop_point(state, id, point.id.0).await?;
    }
    let volume = state.volumes.get(&id.to_string());
    let is_named = volume
        .is_some_and(|volume| volume.mirror.as_ref().is_some_and(|mirror| mirror.group.0 == group));
    if is_named {
        let change = |volume: &mut VolumeRecord| {
            mirrored::release(volume, group);
            Ok(())
        };
        state.update_volume(id, change).await?;
    }
    Ok(())
}
