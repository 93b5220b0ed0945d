//! Snapshots and schedules as users see them.

use std::sync::Arc;

use quoin_api::control as api;
use quoin_types::VolumeId;

use crate::state::State;
use crate::state::records::{VolumePhase, VolumeRecord};
use crate::state::snapshot_records::{ScheduleRecord, SnapshotPhase, SnapshotRecord};
use crate::time::{now_ms, timestamp};

/// The message of a snapshot.
pub(crate) fn snapshot(state: &State, snapshot: &SnapshotRecord) -> api::Snapshot {
    let volume = state.volumes.get(&snapshot.volume.0.to_string());
    let is_deleted = |volume: &VolumeRecord| {
        matches!(volume.phase, VolumePhase::Retained | VolumePhase::Deleting)
    };
    let cut = snapshot.cut;
    api::Snapshot {
        id: snapshot.id.0.to_string(),
        name: snapshot.name.clone(),
        volume_id: snapshot.volume.0.to_string(),
        volume_name: snapshot.volume_name.clone(),
        phase: snapshot.phase.as_str().to_owned(),
        waiting_for: match snapshot.phase {
            SnapshotPhase::Wished => waiting_for(state, volume.as_deref()),
            _ => String::new(),
        },
        wished_at: Some(timestamp(snapshot.wished_ms)),
        cut_at: cut.map(|cut| timestamp(cut.at_ms)),
        size_bytes: cut.map_or(0, |cut| cut.size_bytes),
        lsn: cut.map_or(0, |cut| cut.lsn),
        epoch: cut.map_or(0, |cut| cut.epoch),
        chain: cut.map_or(0, |cut| cut.chain),
        schedule: snapshot.schedule.clone(),
        // The record of a volume stays until its last snapshot is gone.
        accessible_topology: volume
            .as_deref()
            .map(|volume| crate::volume::topology::write(&volume.spec.accessible_topology))
            .unwrap_or_default(),
        volume_deleted: volume.as_deref().is_none_or(is_deleted),
    }
}

/// What a snapshot of the volume waits for.
pub(super) fn waiting_for(state: &State, volume: Option<&VolumeRecord>) -> String {
    let Some(volume) = volume else { return "its volume, which is gone".to_owned() };
    let Some(node) = &volume.owner else {
        let waiting = crate::status::waiting_for(state, volume);
        return match waiting.as_str() {
            "" => "a node that opens the volume".to_owned(),
            waiting => format!("a node that opens the volume, which waits for {waiting}"),
        };
    };
    match crate::status::waiting_for(state, volume).as_str() {
        "" => format!("the target of node {node} (one of an older version never answers)"),
        waiting => format!("the target of node {node}: {waiting}"),
    }
}

fn newest(snapshots: &[Arc<SnapshotRecord>]) -> Option<&Arc<SnapshotRecord>> {
    let ready = snapshots.iter().filter(|s| s.phase == SnapshotPhase::Ready);
    ready.max_by_key(|snapshot| (snapshot.cut_ms(), snapshot.id))
}

fn listed(snapshots: &[Arc<SnapshotRecord>]) -> u32 {
    snapshots.iter().filter(|snapshot| snapshot.is_listed()).count() as u32
}

/// Number of a volume's snapshots, and the newest of them.
pub(crate) fn of_volume(state: &State, volume: VolumeId) -> (u32, Option<api::Snapshot>) {
    let all = state.snapshots.of_volume(volume);
    (listed(&all), newest(&all).map(|newest| snapshot(state, newest)))
}

/// Age of the newest snapshot of a schedule; of the schedule itself where it has none.
pub(crate) fn newest_age_ms(state: &State, schedule: &ScheduleRecord) -> u64 {
    let all = state.snapshots.of_schedule(&schedule.name);
    let since_ms = newest(&all).map_or(schedule.created_ms, |newest| newest.cut_ms());
    now_ms().saturating_sub(since_ms)
}

/// The message of a schedule.
pub(crate) fn schedule(state: &State, schedule: &ScheduleRecord) -> api::Schedule {
    let all = state.snapshots.of_schedule(&schedule.name);
    let now_ms = now_ms();
    let waiting = all.iter().find(|snapshot| snapshot.phase == SnapshotPhase::Wished);
    let waiting_for = waiting.map(|waiting| {
        let volume = state.volumes.get(&waiting.volume.0.to_string());
        waiting_for(state, volume.as_deref())
    });
    api::Schedule {
        name: schedule.name.clone(),
        volume_id: schedule.volume.0.to_string(),
        volume_name: schedule.volume_name.clone(),
        every_s: schedule.every_ms / 1000,
        keep: schedule.keep,
        keep_for_s: schedule.keep_for_ms / 1000,
        created_at: Some(timestamp(schedule.created_ms)),
        snapshots: listed(&all),
        newest_snapshot: newest(&all).map(|newest| snapshot(state, newest)),
        next_at: Some(timestamp(schedule.next_ms(now_ms))),
        waiting_for: waiting_for.unwrap_or_default(),
    }
}
