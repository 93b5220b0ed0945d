//! Conversion of the control plane's records into the interface's messages.

use std::collections::HashMap;

use quoin_api::control as api;
use quoin_api::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use quoin_api::csi::{
    Snapshot, Volume, VolumeCondition, VolumeContentSource, VolumeGroupSnapshot,
    list_snapshots_response, list_volumes_response,
};

use crate::capacity::signed;
use crate::{context, parameters, topology};

/// Returns the volume message, the same in every answer.
pub fn volume(volume: &api::Volume) -> Volume {
    let topologies = volume.spec.as_ref().map_or(&[][..], |spec| &spec.accessible_topology);
    Volume {
        capacity_bytes: signed(volume.size_bytes),
        volume_id: volume.id.clone(),
        volume_context: context::of_volume(volume),
        content_source: volume.made_from.as_ref().map(content_source),
        accessible_topology: topology::of_record(topologies),
    }
}

/// Returns what a volume was made from.
fn content_source(made: &api::MadeFrom) -> VolumeContentSource {
    let source = match made.of_volume {
        true => Type::Volume(VolumeSource { volume_id: made.volume_id.clone() }),
        false => Type::Snapshot(SnapshotSource { snapshot_id: made.snapshot_id.clone() }),
    };
    VolumeContentSource { r#type: Some(source) }
}

/// Returns the snapshot message, the same in every answer.
pub fn snapshot(snapshot: &api::Snapshot) -> Snapshot {
    Snapshot {
        size_bytes: signed(snapshot.size_bytes),
        snapshot_id: snapshot.id.clone(),
        source_volume_id: snapshot.volume_id.clone(),
        creation_time: snapshot.cut_at,
        ready_to_use: snapshot.phase == "Ready",
        group_snapshot_id: snapshot.group_id.clone().unwrap_or_default(),
        accessible_topology: topology::of_record(&snapshot.accessible_topology),
    }
}

/// Returns the group snapshot message, the same in every answer.
pub fn group_snapshot(group: &api::GroupSnapshot) -> VolumeGroupSnapshot {
    let snapshots: Vec<Snapshot> =
        group.members.iter().filter_map(|member| member.snapshot.as_ref().map(snapshot)).collect();
    VolumeGroupSnapshot {
        group_snapshot_id: group.id.clone(),
        ready_to_use: group.phase == "Ready" && snapshots.iter().all(|one| one.ready_to_use),
        snapshots,
        creation_time: group.cut_at,
    }
}

/// Returns one line of a list of snapshots.
pub fn snapshot_entry(one: &api::Snapshot) -> list_snapshots_response::Entry {
    list_snapshots_response::Entry { snapshot: Some(snapshot(one)) }
}

/// Returns one line of a list.
pub fn entry(one: &api::Volume) -> list_volumes_response::Entry {
    list_volumes_response::Entry {
        volume: Some(volume(one)),
        status: Some(list_volumes_response::VolumeStatus {
            published_node_ids: nodes(one),
            volume_condition: Some(condition(one)),
        }),
    }
}

/// Returns every node that a volume is published to, or not yet wholly unpublished from.
pub fn nodes(volume: &api::Volume) -> Vec<String> {
    volume.attachments.iter().map(|attachment| attachment.node.clone()).collect()
}

/// Returns the condition as the controller sees it: replicas and quorum, not mounts.
pub fn condition(volume: &api::Volume) -> VolumeCondition {
    let mut parts = vec![volume.health.clone()];
    if !volume.not_judged.is_empty() {
        parts.push(format!("not judged yet: {}", volume.not_judged));
    }
    let conditions = &volume.conditions;
    parts.extend(conditions.iter().map(|one| format!("{}: {}", one.reason, one.message)));
    if conditions.is_empty() && !volume.contract.is_empty() {
        parts.push(volume.contract.clone());
    }
    VolumeCondition { abnormal: !conditions.is_empty(), message: cut(parts.join("; ")) }
}

/// Returns whether given creation parameters are those of the volume.
///
/// # Errors
/// Which key differs.
pub fn same_parameters(
    volume: &api::Volume,
    given: &HashMap<String, String>,
) -> Result<(), String> {
    let wanted = parameters::read(given).map_err(|status| status.message().to_owned())?;
    let own = volume.spec.as_ref().map(|spec| &spec.parameters);
    let mut keys: Vec<_> = wanted.parameters.iter().collect();
    keys.sort();
    for (key, value) in keys {
        if own.and_then(|own| own.get(key)) != Some(value) {
            return Err(format!("parameters has another {key:?} than the volume was created with"));
        }
    }
    Ok(())
}

/// Shortens a string to the interface's maximum of 128 bytes.
pub fn cut(mut text: String) -> String {
    const BYTES: usize = 128;
    if text.len() > BYTES {
        let at = (0..=BYTES - 3).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(at);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Proves CSI-SIZE-01: for messages with parts of unknown length.
        #[test]
        fn a_truncated_text_has_at_most_128_bytes_and_is_marked(text: String) {
            let cut = cut(text.clone());
            prop_assert!(cut.len() <= 128);
            prop_assert!(cut == text || cut.ends_with('…'));
        }
    }

    #[test]
    fn a_text_is_cut_where_it_is_longer_than_it_may_be_and_nowhere_else() {
        assert_eq!(cut("x".repeat(127)).len(), 127);
        assert_eq!(cut("x".repeat(128)), "x".repeat(128));
        assert_eq!(cut("x".repeat(129)), format!("{}…", "x".repeat(125)));
        // Letters of two bytes are not cut through.
        assert_eq!(cut("ü".repeat(64)), "ü".repeat(64));
        assert_eq!(cut("ü".repeat(65)), format!("{}…", "ü".repeat(62)));
        assert_eq!(cut(format!("x{}", "ü".repeat(64))), format!("x{}…", "ü".repeat(62)));
    }

    /// Proves CSI-CONDITION-01, CSI-CONDITION-02: as the controller sees it.
    #[test]
    fn a_volume_is_abnormal_exactly_with_a_condition_and_always_has_a_text() {
        let healthy = api::Volume { health: "Online".to_owned(), ..Default::default() };
        assert!(!condition(&healthy).abnormal && condition(&healthy).message == "Online");
        let not_judged = api::Volume { not_judged: "silence".into(), ..healthy.clone() };
        assert!(!condition(&not_judged).abnormal);
        assert!(condition(&not_judged).message.contains("not judged yet: silence"));
        let one = api::VolumeCondition {
            reason: "ReplicaOffline".into(),
            message: "on pool a".into(),
            ..Default::default()
        };
        let ill = api::Volume { conditions: vec![one], ..healthy };
        let condition = condition(&ill);
        assert!(condition.abnormal && condition.message == "Online; ReplicaOffline: on pool a");
    }
}
