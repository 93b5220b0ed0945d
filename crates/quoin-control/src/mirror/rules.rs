//! The rules of a mirror for everything else that is asked of its volumes.

use std::sync::Arc;

use quoin_api::volume::Local;
use quoin_cluster::mirror::Role;
use quoin_cluster::ownership::mirrored::snapshot_of;
use quoin_cluster::records::{MirrorRecord, Record, SnapshotRecord, VolumeRecord};
use quoin_cluster::wall_clock::is_ahead;

use crate::Error;
use crate::mirror::observe::pools_keep;
use crate::state::State;
use crate::time::now_ms;

/// Role of the side that has the volume; `None`: it is not mirrored, or its records are lost.
fn role(state: &State, volume: &VolumeRecord) -> Option<Role> {
    state.mirrored.of(volume).map(|record| record.role())
}

fn copy(volume: &VolumeRecord, what: &str) -> Error {
    Error::Precondition(format!(
        "volume {:?} is a copy of a volume of another cluster, which alone changes it: {what}",
        volume.spec.name
    ))
}

/// Publishing needs both records, the group's and the volume's, to say Primary, and the pools to keep that.
///
/// # Errors
/// It is a copy, or on its way from or to one.
pub(crate) fn check_publish(state: &State, volume: &VolumeRecord) -> Result<(), Error> {
    let Some(mirror) = &volume.mirror else { return Ok(()) };
    let name = &volume.spec.name;
    let busy = |why: &str| Err(Error::Busy(format!("volume {name:?}: {why}; try again")));
    match role(state, volume) {
        None => Err(Error::Precondition(format!(
            "volume {name:?} is mirrored, and the records of its mirror are lost: `quoin mirror status` \
             shows it, once the other cluster was heard; `quoin mirror promote --force` makes it \
             primary here"
        ))),
        Some(Role::Off) => Ok(()),
        Some(Role::Orphan) => Err(Error::Precondition(format!(
            "volume {name:?} is a copy whose mirror was ended: promote it first (`quoin mirror promote`), \
             or clone it"
        ))),
        Some(Role::Primary) if !mirror.is_primary || !pools_keep(state, volume) => {
            busy("its pools have not heard yet that it is primary here")
        }
        Some(Role::Primary) => Ok(()),
        Some(Role::Demoting) => busy("it is being demoted"),
        Some(Role::Promoting) => busy("it is being promoted"),
        Some(Role::Secondary | Role::Diverged | Role::Resyncing) => {
            Err(copy(volume, "promote it first (`quoin mirror promote`), or clone it for a drill"))
        }
    }
}

/// # Errors
/// It is a copy, which only the other side changes, also where the records of its mirror are lost; or an orphan, whose
/// live view may be on its way back to its last point.
pub(crate) fn check_change(state: &State, volume: &VolumeRecord) -> Result<(), Error> {
    let is_kept_as_copy = volume.mirror.as_ref().is_some_and(|mirror| !mirror.is_primary);
    match role(state, volume) {
        Some(role) if role.is_copy() => Err(copy(volume, "change it there")),
        None if is_kept_as_copy => Err(copy(volume, "change it there")),
        Some(Role::Orphan) => Err(Error::Precondition(format!(
            "volume {:?} is a copy whose mirror was ended: promote it first (`quoin mirror promote`), or \
             clone it",
            volume.spec.name
        ))),
        _ => Ok(()),
    }
}

/// The snapshot that a clone of a copy or an orphan is made from: its last complete point, as its live view may be on
/// its way to the next one, or back from there. `None`: it is neither.
///
/// # Errors
/// No point of it is complete.
pub(crate) fn shown_point(
    state: &State,
    volume: &VolumeRecord,
) -> Result<Option<Arc<SnapshotRecord>>, Error> {
    let is_copy = |role: Role| role.is_copy() || role == Role::Orphan;
    let Some(record) = state.mirrored.of(volume).filter(|record| is_copy(record.role())) else {
        return Ok(None);
    };
    let points = &record.brain().points;
    let point = [points.complete, points.last, points.common].into_iter().flatten();
    let found = point.filter_map(|point| {
        let id = snapshot_of(point, volume.id.0).to_string();
        state.snapshots.records.get(&id).filter(|snapshot| snapshot.is_kept())
    });
    let none =
        || Error::Busy(format!("no point of the copy {:?} is complete yet", volume.spec.name));
    found.into_iter().next().map(Some).ok_or_else(none)
}

/// # Errors
/// A copy of the volume would be of no use in another cluster.
pub(crate) fn check_mirrored(volume: &VolumeRecord) -> Result<(), Error> {
    match volume.spec.options.local {
        Local::Required => Err(Error::Precondition(format!(
            "volume {:?} is bound to nodes of this cluster (local: required), so its copy would be of no use \
             there",
            volume.spec.name
        ))),
        Local::Any | Local::Preferred | Local::Pinned => Ok(()),
    }
}

/// Returns true for a copy, of which a clean-up takes nothing: it belongs to the mirror.
///
/// # Errors
/// It is mirrored from here.
pub(crate) fn keeps_all(state: &State, volume: &VolumeRecord) -> Result<bool, Error> {
    match role(state, volume) {
        Some(role) if role.is_copy() => Ok(true),
        Some(Role::Primary | Role::Demoting) => Err(Error::Precondition(format!(
            "volume {:?} is mirrored to another cluster: end that first (`quoin mirror disable`)",
            volume.spec.name
        ))),
        _ => Ok(false),
    }
}

/// Notes that an orchestrator of this side deleted a copy, which stays.
pub(crate) async fn release(state: &State, volume: &VolumeRecord) -> Result<(), Error> {
    let Some(mirror) = state.mirrored.of(volume) else { return Ok(()) };
    if mirror.released.contains(&volume.id) {
        return Ok(());
    }
    let change = |mirror: &mut MirrorRecord| {
        if mirror.role().is_copy() && !mirror.released.contains(&volume.id) {
            mirror.released.push(volume.id);
        }
        Ok(())
    };
    state.mirrored.records.update(&mirror.name(), change).await.map(drop)
}

/// # Errors
/// The volume is in a group, whose members are not deleted.
pub(crate) fn check_member(state: &State, volume: &VolumeRecord) -> Result<(), Error> {
    let groups = state.mirrored.groups.indexed(|index| index.of_volume(volume.id.0));
    match groups.first() {
        Some(group) => Err(Error::Precondition(format!(
            "volume {:?} is in group {:?}: take it out of that first (`quoin group modify`), or delete \
             the group (`quoin group delete`), whose volumes stay",
            volume.spec.name, group.group_name
        ))),
        None => Ok(()),
    }
}

/// Work of a mirror for which a volume that nobody has attached needs a target.
pub(crate) fn work(state: &State, volume: &VolumeRecord) -> Option<String> {
    let mirror = volume.mirror.as_ref()?;
    if state.mirrored.send(volume.id.0).is_some() {
        return Some("a point of it is sent to another cluster".to_owned());
    }
    let record = state.mirrored.of(volume)?;
    let is_alive = || mirror.fence.0.0 != 0 && !mirror.is_fenced;
    match record.role() {
        Role::Demoting => Some("its mirror is demoted".to_owned()),
        Role::Promoting => Some("its mirror is promoted".to_owned()),
        Role::Resyncing => Some("its mirror is synced again".to_owned()),
        Role::Secondary if record.brain().receiving.is_some() => {
            Some("it takes a point of another cluster".to_owned())
        }
        // Between two transfers it stays open, as long as they come.
        Role::Secondary if state.mirrored.is_fed(volume) && is_recent(state, volume, &record) => {
            Some("it takes points of another cluster".to_owned())
        }
        _ if is_alive() => Some("its mirror fences it".to_owned()),
        _ => None,
    }
}

/// The last point came within three intervals.
fn is_recent(state: &State, volume: &VolumeRecord, record: &MirrorRecord) -> bool {
    let newest = state.snapshots.of_volume(volume.id.0).iter().map(|s| s.wished_ms).max();
    let within_ms = record.settings.interval_s.saturating_mul(3000).min(600_000);
    let now_ms = now_ms();
    newest.is_some_and(|at| !is_ahead(at, now_ms) && now_ms.saturating_sub(at) < within_ms)
}
