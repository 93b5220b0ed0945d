//! Messages of the storage interface, as clients of its older and newer editions encode them.

use prost::Message;
use quoin_api::csi::{
    CreateVolumeGroupSnapshotRequest, DeleteVolumeGroupSnapshotRequest,
    GetVolumeGroupSnapshotRequest, Snapshot, VolumeGroupSnapshot,
};

/// A client of 1.8 knows them as alpha messages, and one of 1.11 as stable ones. The field numbers
/// are those of both documents.
///
/// Proves CSIN-GROUP-04: for the messages' bytes.
#[test]
fn group_messages_have_the_same_bytes_for_clients_of_all_editions() {
    let snapshot = Snapshot {
        size_bytes: 1,
        snapshot_id: "s".into(),
        source_volume_id: "v".into(),
        ready_to_use: true,
        group_snapshot_id: "g".into(),
        ..Default::default()
    };
    assert_eq!(snapshot.encode_to_vec(), b"\x08\x01\x12\x01s\x1a\x01v\x28\x01\x32\x01g");
    let group = VolumeGroupSnapshot {
        group_snapshot_id: "g".into(),
        snapshots: vec![snapshot],
        creation_time: None,
        ready_to_use: true,
    };
    let bytes = b"\x0a\x01g\x12\x0d\x08\x01\x12\x01s\x1a\x01v\x28\x01\x32\x01g\x20\x01";
    assert_eq!(group.encode_to_vec(), bytes);
    let asked = CreateVolumeGroupSnapshotRequest {
        name: "n".into(),
        source_volume_ids: vec!["v".into(), "w".into()],
        ..Default::default()
    };
    assert_eq!(asked.encode_to_vec(), b"\x0a\x01n\x12\x01v\x12\x01w");
    let (group_snapshot_id, snapshot_ids) = ("g".to_owned(), vec!["s".to_owned()]);
    let delete = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: group_snapshot_id.clone(),
        snapshot_ids: snapshot_ids.clone(),
        ..Default::default()
    };
    assert_eq!(delete.encode_to_vec(), b"\x0a\x01g\x12\x01s");
    let get =
        GetVolumeGroupSnapshotRequest { group_snapshot_id, snapshot_ids, ..Default::default() };
    assert_eq!(get.encode_to_vec(), b"\x0a\x01g\x12\x01s");
}
