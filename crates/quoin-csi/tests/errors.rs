//! The error tables of the interface, condition by condition, and what successful answers must have.

use std::future::Future;
use std::pin::Pin;

use quoin_api::csi::group_controller_client::GroupControllerClient;
use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::*;
use tonic::Code;

use crate::common::*;

type Call = Pin<Box<dyn Future<Output = Code>>>;

/// One condition: the call, the condition in the words of the table, the code that it prints, and what
/// fulfils it.
type Row = (&'static str, &'static str, Code, Call);

fn id(text: &str) -> String {
    text.to_owned()
}

/// Ends a call with its code.
macro_rules! asked {
    ($client:expr, $method:ident, $request:expr) => {{
        let (mut client, request) = ($client.clone(), $request);
        Box::pin(async move { code(&client.$method(request).await) }) as Call
    }};
}

/// Proves CSI-ERR-03: with the conditions of the tables that a single call can fulfil; those of calls at
/// the same time, and of parts that are away, are proven where these are made.
#[tokio::test]
async fn each_condition_of_the_error_tables_has_its_code() {
    let mut world = World::start().await;
    let (controller, node) = (world.controller.clone(), world.node.clone());
    let groups = GroupControllerClient::new(world.channel.clone());
    let volume = world.create("db", 64 * MIB).await.volume_id;
    let other = world.create("other", 64 * MIB).await.volume_id;
    let publish = |volume_id: &str, node_id: &str| ControllerPublishVolumeRequest {
        volume_id: id(volume_id),
        node_id: id(node_id),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    let mut client = controller.clone();
    client.controller_publish_volume(publish(&volume, NODE)).await.unwrap();
    world.cluster.serve_volume(&volume, NODE);
    let snap = |volume_id: &str, name: &str| CreateSnapshotRequest {
        source_volume_id: id(volume_id),
        name: id(name),
        ..Default::default()
    };
    client.create_snapshot(snap(&volume, "s")).await.unwrap();
    let group = |name: &str, ids: &[&str]| CreateVolumeGroupSnapshotRequest {
        name: id(name),
        source_volume_ids: ids.iter().map(|one| id(one)).collect(),
        ..Default::default()
    };
    let made = groups.clone().create_volume_group_snapshot(group("g", &[&volume])).await.unwrap();
    let made = made.into_inner().group_snapshot.unwrap();
    let of = |snapshot_id: &str| {
        let source = volume_content_source::SnapshotSource { snapshot_id: id(snapshot_id) };
        let r#type = Some(volume_content_source::Type::Snapshot(source));
        Some(VolumeContentSource { r#type })
    };
    let expand = |volume_id: &str, required, limit| ControllerExpandVolumeRequest {
        volume_id: id(volume_id),
        capacity_range: Some(range(required, limit)),
        ..Default::default()
    };
    let modify = |volume_id: &str, key: &str| ControllerModifyVolumeRequest {
        volume_id: id(volume_id),
        mutable_parameters: map(&[(key, "media")]),
        ..Default::default()
    };
    let far = Topology { segments: map(&[("quoin.io/zone", "nowhere")]) };
    let stage = |volume_id: &str| NodeStageVolumeRequest {
        volume_id: id(volume_id),
        staging_target_path: world.text("stage"),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    let place = |volume_id: &str| NodePublishVolumeRequest {
        volume_id: id(volume_id),
        staging_target_path: world.text("stage"),
        target_path: world.text("pods/a"),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    let grow = |volume_id: &str| NodeExpandVolumeRequest {
        volume_id: id(volume_id),
        volume_path: world.text("pods/a"),
        ..Default::default()
    };
    let rows: Vec<Row> = vec![
        (
            "CreateVolume",
            "source incompatible or not supported",
            Code::InvalidArgument,
            asked!(
                controller,
                create_volume,
                CreateVolumeRequest {
                    volume_content_source: of(&made.snapshots[0].snapshot_id),
                    parameters: map(&[("blockSize", "512")]),
                    ..create("x", 64 * MIB)
                }
            ),
        ),
        (
            "CreateVolume",
            "source does not exist",
            Code::NotFound,
            asked!(
                controller,
                create_volume,
                CreateVolumeRequest { volume_content_source: of(UNKNOWN), ..create("x", 64 * MIB) }
            ),
        ),
        (
            "CreateVolume",
            "volume already exists but is incompatible",
            Code::AlreadyExists,
            asked!(controller, create_volume, create("db", 128 * MIB)),
        ),
        (
            "CreateVolume",
            "unable to provision in accessible_topology",
            Code::ResourceExhausted,
            asked!(controller, create_volume, {
                let mut pinned = create("x", 64 * MIB);
                // Of another class it would be reachable from there, wherever its replicas are.
                pinned.parameters.insert("local".to_owned(), "pinned".to_owned());
                let (requisite, preferred) = (vec![far], Vec::new());
                let topology = TopologyRequirement { requisite, preferred };
                CreateVolumeRequest { accessibility_requirements: Some(topology), ..pinned }
            }),
        ),
        (
            "CreateVolume",
            "unsupported capacity_range",
            Code::OutOfRange,
            asked!(controller, create_volume, create("x", i64::MAX)),
        ),
        (
            "DeleteVolume",
            "volume in use",
            Code::FailedPrecondition,
            asked!(
                controller,
                delete_volume,
                DeleteVolumeRequest { volume_id: volume.clone(), ..Default::default() }
            ),
        ),
        (
            "ControllerPublishVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(controller, controller_publish_volume, publish(UNKNOWN, NODE)),
        ),
        (
            "ControllerPublishVolume",
            "node does not exist",
            Code::NotFound,
            asked!(controller, controller_publish_volume, publish(&other, "nobody")),
        ),
        (
            "ControllerPublishVolume",
            "volume published but is incompatible",
            Code::AlreadyExists,
            asked!(
                controller,
                controller_publish_volume,
                ControllerPublishVolumeRequest { readonly: true, ..publish(&volume, NODE) }
            ),
        ),
        (
            "ControllerPublishVolume",
            "volume published to another node",
            Code::FailedPrecondition,
            asked!(controller, controller_publish_volume, publish(&volume, control::OTHER_NODE)),
        ),
        (
            "ValidateVolumeCapabilities",
            "volume does not exist",
            Code::NotFound,
            asked!(
                controller,
                validate_volume_capabilities,
                ValidateVolumeCapabilitiesRequest {
                    volume_id: id(UNKNOWN),
                    volume_capabilities: vec![writer()],
                    ..Default::default()
                }
            ),
        ),
        (
            "ListVolumes",
            "invalid starting_token",
            Code::Aborted,
            asked!(
                controller,
                list_volumes,
                ListVolumesRequest { starting_token: id("x"), ..Default::default() }
            ),
        ),
        (
            "ControllerGetVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(
                controller,
                controller_get_volume,
                ControllerGetVolumeRequest { volume_id: id(UNKNOWN) }
            ),
        ),
        (
            "ControllerModifyVolume",
            "parameters not supported",
            Code::InvalidArgument,
            asked!(controller, controller_modify_volume, modify(&volume, "colour")),
        ),
        (
            "ControllerModifyVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(controller, controller_modify_volume, modify(UNKNOWN, "durability")),
        ),
        (
            "CreateSnapshot",
            "snapshot already exists but is incompatible",
            Code::AlreadyExists,
            asked!(controller, create_snapshot, snap(&other, "s")),
        ),
        (
            "CreateSnapshot",
            "source volume does not exist",
            Code::NotFound,
            asked!(controller, create_snapshot, snap(UNKNOWN, "t")),
        ),
        (
            "DeleteSnapshot",
            "member of a group",
            Code::InvalidArgument,
            asked!(
                controller,
                delete_snapshot,
                DeleteSnapshotRequest {
                    snapshot_id: made.snapshots[0].snapshot_id.clone(),
                    ..Default::default()
                }
            ),
        ),
        (
            "ListSnapshots",
            "invalid starting_token",
            Code::Aborted,
            asked!(
                controller,
                list_snapshots,
                ListSnapshotsRequest { starting_token: id("x"), ..Default::default() }
            ),
        ),
        (
            "GetSnapshot",
            "snapshot does not exist",
            Code::NotFound,
            asked!(
                controller,
                get_snapshot,
                GetSnapshotRequest { snapshot_id: id(UNKNOWN), ..Default::default() }
            ),
        ),
        (
            "ControllerExpandVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(controller, controller_expand_volume, expand(UNKNOWN, 128 * MIB, 0)),
        ),
        (
            "ControllerExpandVolume",
            "unsupported capacity_range",
            Code::OutOfRange,
            asked!(controller, controller_expand_volume, expand(&volume, 0, MIB)),
        ),
        (
            "CreateVolumeGroupSnapshot",
            "group already exists but is incompatible",
            Code::AlreadyExists,
            asked!(groups, create_volume_group_snapshot, group("g", &[&other])),
        ),
        (
            "CreateVolumeGroupSnapshot",
            "source volume does not exist",
            Code::NotFound,
            asked!(groups, create_volume_group_snapshot, group("h", &[UNKNOWN])),
        ),
        (
            "GetVolumeGroupSnapshot",
            "group does not exist",
            Code::NotFound,
            asked!(
                groups,
                get_volume_group_snapshot,
                GetVolumeGroupSnapshotRequest {
                    group_snapshot_id: id(UNKNOWN),
                    snapshot_ids: vec![id("x")],
                    ..Default::default()
                }
            ),
        ),
        (
            "NodeStageVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(node, node_stage_volume, stage(UNKNOWN)),
        ),
        (
            "NodeStageVolume",
            "exceeds capabilities",
            Code::FailedPrecondition,
            asked!(
                node,
                node_stage_volume,
                NodeStageVolumeRequest {
                    volume_capability: Some(mount_capability(
                        "ext4",
                        AccessMode::MultiNodeMultiWriter
                    )),
                    ..stage(&volume)
                }
            ),
        ),
        (
            "NodeUnstageVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(
                node,
                node_unstage_volume,
                NodeUnstageVolumeRequest {
                    volume_id: id(UNKNOWN),
                    staging_target_path: world.text("stage"),
                }
            ),
        ),
        (
            "NodePublishVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(node, node_publish_volume, place(UNKNOWN)),
        ),
        (
            "NodePublishVolume",
            "staging target path is not set or not staged",
            Code::FailedPrecondition,
            asked!(node, node_publish_volume, place(&volume)),
        ),
        (
            "NodeUnpublishVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(
                node,
                node_unpublish_volume,
                NodeUnpublishVolumeRequest {
                    volume_id: id(UNKNOWN),
                    target_path: world.text("pods/a"),
                }
            ),
        ),
        (
            "NodeGetVolumeStats",
            "volume does not exist",
            Code::NotFound,
            asked!(
                node,
                node_get_volume_stats,
                NodeGetVolumeStatsRequest {
                    volume_id: id(UNKNOWN),
                    volume_path: world.text("pods/a"),
                    ..Default::default()
                }
            ),
        ),
        (
            "NodeExpandVolume",
            "volume does not exist",
            Code::NotFound,
            asked!(node, node_expand_volume, grow(UNKNOWN)),
        ),
    ];
    let mut wrong = Vec::new();
    for (call, condition, expected, answer) in rows {
        let found = answer.await;
        if found != expected {
            wrong.push(format!("{call}, {condition}: {found:?}, and the table says {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Proves CSI-FIELD-01: each field that the interface marks as required, of every answer that has one.
#[tokio::test]
async fn every_successful_answer_has_its_required_fields() {
    let mut world = World::start().await;
    let volume = world.create("db", 64 * MIB).await;
    assert!(!volume.volume_id.is_empty());
    let volume_id = volume.volume_id;
    let controller = &mut world.controller;
    let publish = ControllerPublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: id(NODE),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    controller.controller_publish_volume(publish).await.unwrap();
    world.cluster.serve_volume(&volume_id, NODE);
    let is_whole = |snapshot: &Snapshot| {
        !snapshot.snapshot_id.is_empty()
            && snapshot.source_volume_id == volume_id
            && snapshot.creation_time.is_some()
    };
    let snap = CreateSnapshotRequest {
        source_volume_id: volume_id.clone(),
        name: id("s"),
        ..Default::default()
    };
    let snapshot = controller.create_snapshot(snap).await.unwrap().into_inner().snapshot.unwrap();
    assert!(is_whole(&snapshot));
    let get = GetSnapshotRequest { snapshot_id: snapshot.snapshot_id, ..Default::default() };
    let found = controller.get_snapshot(get).await.unwrap().into_inner();
    assert!(is_whole(&found.snapshot.unwrap()));
    let listed = controller.list_snapshots(ListSnapshotsRequest::default()).await.unwrap();
    let listed = listed.into_inner().entries;
    assert!(listed.len() == 1 && listed.iter().all(|one| is_whole(one.snapshot.as_ref().unwrap())));
    let listed = controller.list_volumes(ListVolumesRequest::default()).await.unwrap().into_inner();
    let ids: Vec<_> =
        listed.entries.iter().map(|one| one.volume.as_ref().unwrap().volume_id.clone()).collect();
    assert_eq!(ids, std::slice::from_ref(&volume_id));
    let get = ControllerGetVolumeRequest { volume_id: volume_id.clone() };
    let found = controller.controller_get_volume(get).await.unwrap().into_inner();
    assert_eq!(found.volume.unwrap().volume_id, volume_id);
    assert!(found.status.is_some());
    let validate = ValidateVolumeCapabilitiesRequest {
        volume_id: volume_id.clone(),
        volume_capabilities: vec![writer()],
        ..Default::default()
    };
    let found = controller.validate_volume_capabilities(validate).await.unwrap().into_inner();
    assert_eq!(found.confirmed.unwrap().volume_capabilities, [writer()]);
    let expand = ControllerExpandVolumeRequest {
        volume_id: volume_id.clone(),
        capacity_range: Some(range(128 * MIB, 0)),
        ..Default::default()
    };
    let grown = controller.controller_expand_volume(expand).await.unwrap().into_inner();
    assert_eq!(grown.capacity_bytes, 128 * MIB);
    let health =
        ControllerGetVolumeHealthRequest { volume_id: volume_id.clone(), ..Default::default() };
    let found = controller.controller_get_volume_health(health).await.unwrap().into_inner();
    assert_eq!(found.volume_health.unwrap().volume_id, volume_id);
    let capacity = controller.get_capacity(GetCapacityRequest::default()).await.unwrap();
    assert!(capacity.into_inner().available_capacity > 0);
    let mut groups = GroupControllerClient::new(world.channel.clone());
    let make = CreateVolumeGroupSnapshotRequest {
        name: id("g"),
        source_volume_ids: vec![volume_id.clone()],
        ..Default::default()
    };
    let made = groups.create_volume_group_snapshot(make).await.unwrap().into_inner();
    let made = made.group_snapshot.unwrap();
    let get = GetVolumeGroupSnapshotRequest {
        group_snapshot_id: made.group_snapshot_id.clone(),
        snapshot_ids: made.snapshots.iter().map(|one| one.snapshot_id.clone()).collect(),
        ..Default::default()
    };
    let found = groups.get_volume_group_snapshot(get).await.unwrap().into_inner();
    for group in [made, found.group_snapshot.unwrap()] {
        assert!(!group.group_snapshot_id.is_empty() && group.creation_time.is_some());
        assert!(!group.snapshots.is_empty() && group.snapshots.iter().all(is_whole));
    }
    let info = world.identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
    assert!(!info.name.is_empty() && !info.vendor_version.is_empty());
    let info = world.node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert!(!info.node_id.is_empty());
    if can_mount() {
        let stage = NodeStageVolumeRequest {
            volume_id: volume_id.clone(),
            staging_target_path: world.text("stage"),
            volume_capability: Some(writer()),
            ..Default::default()
        };
        world.node.node_stage_volume(stage.clone()).await.unwrap();
        let publish = world.publish_at(&stage, "pods/a");
        world.node.node_publish_volume(publish.clone()).await.unwrap();
        let stats = NodeGetVolumeStatsRequest {
            volume_id: volume_id.clone(),
            volume_path: publish.target_path,
            ..Default::default()
        };
        let usage = world.node.node_get_volume_stats(stats).await.unwrap().into_inner().usage;
        assert!(!usage.is_empty() && usage.iter().all(|one| one.total > 0 && one.unit != 0));
        let health =
            NodeGetVolumeHealthRequest { volume_id: volume_id.clone(), ..Default::default() };
        let found = world.node.node_get_volume_health(health).await.unwrap().into_inner();
        assert_eq!(found.volume_health.unwrap().volume_id, volume_id);
    }
}
