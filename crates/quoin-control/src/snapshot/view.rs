//! Snapshots and schedules as users see them.

use std::sync::Arc;

use quoin_api::control as api;
use quoin_cluster::records::{
    GroupPhase, GroupRecord, ScheduleRecord, SnapshotPhase, SnapshotRecord, VolumePhase,
    VolumeRecord,
};
use quoin_cluster::wall_clock::is_ahead;
use quoin_types::VolumeId;

use crate::state::State;
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
        group_id: listed_group(state, snapshot).map(|group| group.id.0.to_string()),
        group_name: listed_group(state, snapshot).map(|group| group.name.clone()),
        // The record of a volume stays until its last snapshot is gone.
        accessible_topology: volume
            .as_deref()
            .map(|volume| volume.spec.topologies())
            .unwrap_or_default(),
        volume_deleted: volume.as_deref().is_none_or(is_deleted),
    }
}

/// The group that a snapshot is a member of.
fn listed_group(state: &State, snapshot: &SnapshotRecord) -> Option<Arc<GroupRecord>> {
    let group = state.snapshots.group(snapshot.group?.0)?;
    let is_member = |g: &GroupRecord| g.members.iter().any(|m| m.snapshot == Some(snapshot.id));
    Some(group).filter(|group| group.is_listed() && is_member(group))
}

/// The message of a group snapshot.
pub(crate) fn group(state: &State, group: &GroupRecord) -> api::GroupSnapshot {
    let members: Vec<api::GroupSnapshotMember> = group
        .members
        .iter()
        .map(|member| {
            let id = member.snapshot.map(|id| id.0.to_string()).unwrap_or_default();
            let record = state.snapshots.records.get(&id).filter(|record| record.is_listed());
            api::GroupSnapshotMember {
                volume_id: member.volume.0.to_string(),
                volume_name: member.volume_name.clone(),
                snapshot: record.map(|record| snapshot(state, &record)),
                snapshot_id: id,
            }
        })
        .collect();
    let is_ready = group.phase == GroupPhase::Ready;
    let is_whole = members.iter().all(|member| member.snapshot.is_some());
    let cut_ms = Some(group.cut_ms()).filter(|ms| *ms > 0);
    api::GroupSnapshot {
        id: group.id.0.to_string(),
        name: group.name.clone(),
        phase: match is_ready && !is_whole {
            true => "Incomplete".to_owned(),
            false => group.phase.as_str().to_owned(),
        },
        waiting_for: if is_ready { String::new() } else { group_waits_for(state, group) },
        wished_at: Some(timestamp(group.wished_ms)),
        cut_at: cut_ms.map(timestamp),
        members,
    }
}

/// The reason why a group that is not cut yet waits: the first of its volumes that is not ready for it.
fn group_waits_for(state: &State, group: &GroupRecord) -> String {
    for member in &group.members {
        let volume = state.volumes.get(&member.volume.0.to_string());
        let serves = volume.as_deref().is_some_and(|volume| {
            volume.opened.owner.is_some() && crate::status::waiting_for(state, volume).is_empty()
        });
        if !serves {
            let what = waiting_for(state, volume.as_deref());
            return format!("volume {:?}, which needs {what}", member.volume_name);
        }
    }
    "the targets of its volumes, which hold their IO for a moment together".to_owned()
}

/// The reason why a snapshot of the volume waits.
pub(super) fn waiting_for(state: &State, volume: Option<&VolumeRecord>) -> String {
    let Some(volume) = volume else { return "its volume, which is gone".to_owned() };
    let Some(node) = &volume.opened.owner else {
        let waiting = crate::status::waiting_for(state, volume);
        return match waiting.as_str() {
            "" => "a node that opens the volume".to_owned(),
            waiting => format!("a node that opens the volume, which waits for {waiting}"),
        };
    };
    match crate::status::waiting_for(state, volume).as_str() {
        "" => format!("the target of node {node}"),
        waiting => format!("the target of node {node}: {waiting}"),
    }
}

fn newest(snapshots: &[Arc<SnapshotRecord>]) -> Option<&Arc<SnapshotRecord>> {
    let ready = snapshots.iter().filter(|s| s.phase == SnapshotPhase::Ready);
    let now_ms = now_ms();
    // Cut by a clock that was ahead, it would be the newest one for as long.
    ready.max_by_key(|snapshot| {
        let cut_ms = snapshot.cut_ms();
        (!is_ahead(cut_ms, now_ms), cut_ms, snapshot.id)
    })
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
    let all = state.snapshots.of_schedule(schedule);
    let since_ms = newest(&all).map_or(schedule.created_ms, |newest| newest.cut_ms());
    now_ms().saturating_sub(since_ms)
}

/// The message of a schedule.
pub(crate) fn schedule(state: &State, schedule: &ScheduleRecord) -> api::Schedule {
    let all = state.snapshots.of_schedule(schedule);
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
