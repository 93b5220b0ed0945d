//! Group snapshots through the GroupController service.

use quoin_api::csi::group_controller_client::GroupControllerClient;
use quoin_api::csi::group_controller_service_capability::{Type, rpc};
use quoin_api::csi::*;
use quoin_csi::Mode;
use tonic::Code;
use tonic::transport::Channel;

use crate::common::*;

struct Groups {
    world: World,
    client: GroupControllerClient<Channel>,
}

fn make(name: &str, volumes: &[&str]) -> CreateVolumeGroupSnapshotRequest {
    CreateVolumeGroupSnapshotRequest {
        name: name.to_owned(),
        source_volume_ids: volumes.iter().map(|id| (*id).to_owned()).collect(),
        ..Default::default()
    }
}

fn members(group: &VolumeGroupSnapshot) -> Vec<String> {
    group.snapshots.iter().map(|snapshot| snapshot.snapshot_id.clone()).collect()
}

fn remove(id: &str, snapshot_ids: Vec<String>) -> DeleteVolumeGroupSnapshotRequest {
    let group_snapshot_id = id.to_owned();
    DeleteVolumeGroupSnapshotRequest { group_snapshot_id, snapshot_ids, ..Default::default() }
}

fn get(id: &str, snapshot_ids: Vec<String>) -> GetVolumeGroupSnapshotRequest {
    let group_snapshot_id = id.to_owned();
    GetVolumeGroupSnapshotRequest { group_snapshot_id, snapshot_ids, ..Default::default() }
}

impl Groups {
    async fn start() -> Self {
        let world = World::start().await;
        let client = GroupControllerClient::new(world.channel.clone());
        Self { world, client }
    }

    /// A volume that is published to this node, and that its target serves.
    async fn served(&mut self, name: &str) -> String {
        let volume_id = self.world.create(name, 64 * MIB).await.volume_id;
        let request = ControllerPublishVolumeRequest {
            volume_id: volume_id.clone(),
            node_id: NODE.to_owned(),
            volume_capability: Some(writer()),
            ..Default::default()
        };
        self.world.controller.controller_publish_volume(request).await.unwrap();
        self.world.cluster.serve_volume(&volume_id, NODE);
        volume_id
    }

    async fn made(&mut self, name: &str, volumes: &[&str]) -> VolumeGroupSnapshot {
        let answer = self.client.create_volume_group_snapshot(make(name, volumes)).await.unwrap();
        answer.into_inner().group_snapshot.expect("a successful answer has it")
    }

    async fn snapshots(&mut self) -> Vec<Snapshot> {
        let request = ListSnapshotsRequest::default();
        let listed = self.world.controller.list_snapshots(request).await.unwrap().into_inner();
        listed.entries.into_iter().filter_map(|entry| entry.snapshot).collect()
    }
}

/// Proves CSI-GROUPCAPS-01, CSI-GROUPCAPS-04, CSIN-GROUP-01, CSIN-GROUP-02, CSI-GROUPCREATE-01,
/// CSI-GROUPDELETE-01, CSI-GROUPGET-01.
#[tokio::test]
async fn the_group_capability_is_advertised_by_default_and_all_of_its_calls_are_served() {
    let mut groups = Groups::start().await;
    let request = GetPluginCapabilitiesRequest {};
    let told = groups.world.identity.get_plugin_capabilities(request).await.unwrap().into_inner();
    let wanted = plugin_capability::Type::Service(plugin_capability::Service {
        r#type: plugin_capability::service::Type::GroupControllerService.into(),
    });
    assert!(told.capabilities.iter().any(|told| told.r#type.as_ref() == Some(&wanted)));
    let request = GroupControllerGetCapabilitiesRequest {};
    let told = groups.client.group_controller_get_capabilities(request).await.unwrap();
    let told = told.into_inner().capabilities;
    let [GroupControllerServiceCapability { r#type: Some(Type::Rpc(told)) }] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!(told.r#type(), rpc::Type::CreateDeleteGetVolumeGroupSnapshot);

    let (a, b) = (groups.served("a").await, groups.served("b").await);
    let made = groups.made("g", &[&a, &b]).await;
    let ids = members(&made);
    let found = groups.client.get_volume_group_snapshot(get(&made.group_snapshot_id, ids.clone()));
    assert_eq!(found.await.unwrap().into_inner().group_snapshot, Some(made.clone()));
    let gone = groups.client.delete_volume_group_snapshot(remove(&made.group_snapshot_id, ids));
    gone.await.unwrap();
    assert!(groups.snapshots().await.is_empty());

    let node_only = World::start_in(Mode::NODE).await;
    let mut client = GroupControllerClient::new(node_only.channel.clone());
    let codes = [
        code(
            &client
                .group_controller_get_capabilities(GroupControllerGetCapabilitiesRequest {})
                .await,
        ),
        code(&client.create_volume_group_snapshot(make("", &[])).await),
        code(&client.delete_volume_group_snapshot(remove("", vec![])).await),
        code(&client.get_volume_group_snapshot(get("", vec![])).await),
    ];
    assert_eq!(codes, [Code::Unimplemented; 4]);
}

/// Proves CSI-GROUPCREATE-03, CSI-GROUPCREATE-04, CSI-GROUPCREATE-18, CSI-GROUPCREATE-20,
/// CSI-GROUPSNAP-01, CSI-GROUPSNAP-03, CSI-GROUPSNAP-04, CSI-GROUPSNAP-05, CSI-SNAPSHOT-11,
/// CSI-SNAPSHOT-12, CSIN-GROUP-03, CSIN-GETSNAPSHOT-06.
#[tokio::test]
async fn a_group_is_made_once_and_each_member_names_it_wherever_it_is_shown() {
    let mut groups = Groups::start().await;
    let (a, b) = (groups.served("a").await, groups.served("b").await);
    let c = groups.world.create("c", 64 * MIB).await.volume_id;
    let made = groups.made("g", &[&a, &b]).await;
    assert!(!made.group_snapshot_id.is_empty() && made.group_snapshot_id.len() <= 128);
    let mut sources: Vec<_> = made.snapshots.iter().map(|s| s.source_volume_id.clone()).collect();
    sources.sort();
    let mut expected = vec![a.clone(), b.clone()];
    expected.sort();
    assert_eq!(sources, expected);
    assert!(made.ready_to_use && made.snapshots.iter().all(|snapshot| snapshot.ready_to_use));
    assert!(made.creation_time.is_some());
    for snapshot in &made.snapshots {
        assert_eq!(snapshot.group_snapshot_id, made.group_snapshot_id);
        assert_eq!(snapshot.creation_time, made.creation_time, "the cut is common");
    }
    // A repeat, in any order of the volumes, finds it.
    assert_eq!(groups.made("g", &[&a, &b]).await, made);
    assert_eq!(groups.made("g", &[&b, &a]).await, made);
    for others in [&[&a[..]][..], &[&a, &c], &[&a, &b, &c]] {
        let answer = groups.client.create_volume_group_snapshot(make("g", others)).await;
        assert_eq!(code(&answer), Code::AlreadyExists, "{others:?}");
    }
    let second = groups.made("h", &[&a, &b]).await;
    assert_ne!(second.group_snapshot_id, made.group_snapshot_id);
    let alone =
        CreateSnapshotRequest { source_volume_id: a, name: "alone".into(), ..Default::default() };
    let alone = groups.world.controller.create_snapshot(alone).await.unwrap().into_inner();
    let alone = alone.snapshot.unwrap();
    assert_eq!(alone.group_snapshot_id, "");
    // Lists and single looks say the same.
    let listed = groups.snapshots().await;
    assert_eq!(listed.len(), 5);
    for group in [&made, &second] {
        for member in &group.snapshots {
            assert!(listed.contains(member));
            let request = GetSnapshotRequest {
                snapshot_id: member.snapshot_id.clone(),
                ..Default::default()
            };
            let found = groups.world.controller.get_snapshot(request).await.unwrap();
            assert_eq!(found.into_inner().snapshot.as_ref(), Some(member));
        }
    }
    assert_eq!(listed.iter().filter(|s| s.group_snapshot_id.is_empty()).count(), 1);
    let request = DeleteSnapshotRequest { snapshot_id: alone.snapshot_id, ..Default::default() };
    groups.world.controller.delete_snapshot(request).await.unwrap();
    assert_eq!(groups.snapshots().await.len(), 4);
}

/// Proves CSI-GROUPCREATE-12, CSI-GROUPCREATE-13, CSI-GROUPCREATE-14, CSI-GROUPCREATE-17,
/// CSI-GROUPCREATE-19, CSI-GROUPDELETE-02, CSI-GROUPDELETE-03, CSI-GROUPDELETE-06,
/// CSI-GROUPDELETE-08, CSI-GROUPGET-03, CSI-GROUPGET-06, CSI-GROUPGET-09, CSI-GROUPGET-11.
#[tokio::test]
async fn an_invalid_request_about_groups_is_refused_with_its_code_and_changes_nothing() {
    let mut groups = Groups::start().await;
    let a = groups.served("a").await;
    let good = || make("g", &[&a]);
    let of_parameters = |pairs: &[(&str, &str)]| CreateVolumeGroupSnapshotRequest {
        parameters: map(pairs),
        ..good()
    };
    let bad = [
        make("", &[&a]),
        make(&"x".repeat(129), &[&a]),
        make("a\u{7f}", &[&a]),
        make("a\u{0}", &[&a]),
        make("a\u{9f}", &[&a]),
        make("g", &[]),
        make("g", &[""]),
        make("g", &[&a, &a]),
        of_parameters(&[("colour", "red")]),
        CreateVolumeGroupSnapshotRequest { secrets: map(&[("pass word", "x")]), ..good() },
    ];
    for (index, request) in bad.into_iter().enumerate() {
        let answer = groups.client.create_volume_group_snapshot(request).await;
        assert_eq!(code(&answer), Code::InvalidArgument, "request {index}");
    }
    for unknown in [UNKNOWN, &"0".repeat(32)] {
        let answer = groups.client.create_volume_group_snapshot(make("g", &[&a, unknown])).await;
        assert_eq!(code(&answer), Code::NotFound, "{unknown}");
        for ids in [vec![], vec!["x".to_owned()]] {
            let answer = groups.client.get_volume_group_snapshot(get(unknown, ids.clone())).await;
            assert_eq!(code(&answer), Code::NotFound, "{unknown}");
            let answer = groups.client.delete_volume_group_snapshot(remove(unknown, ids)).await;
            assert_eq!(code(&answer), Code::Ok, "{unknown}");
        }
    }
    assert!(groups.snapshots().await.is_empty());
    let ids = vec!["x".to_owned()];
    let answer = groups.client.delete_volume_group_snapshot(remove("", ids.clone())).await;
    assert_eq!(code(&answer), Code::InvalidArgument);
    let answer = groups.client.get_volume_group_snapshot(get("", ids)).await;
    assert_eq!(code(&answer), Code::InvalidArgument);

    // Keys that sidecars add are nobody's parameters, and names may be of any script and length.
    let sidecar = of_parameters(&[("csi.storage.k8s.io/volumegroupsnapshot/name", "claim")]);
    groups.client.create_volume_group_snapshot(sidecar).await.unwrap();
    groups.made(&"名".repeat(42), &[&a]).await;
    let made = groups.made(&"x".repeat(128), &[&a]).await;
    let id = &made.group_snapshot_id;
    for wrong in [vec![], vec![UNKNOWN.to_owned()]] {
        let answer = groups.client.get_volume_group_snapshot(get(id, wrong.clone())).await;
        assert_eq!(code(&answer), Code::InvalidArgument, "{wrong:?}");
        let answer = groups.client.delete_volume_group_snapshot(remove(id, wrong.clone())).await;
        assert_eq!(code(&answer), Code::InvalidArgument, "{wrong:?}");
    }
    assert_eq!(groups.snapshots().await.len(), 3);
}

/// Proves CSI-GROUPDELETE-05, CSI-GROUPGET-05, CSI-GROUPGET-08, CSI-DELETESNAPSHOT-06,
/// CSI-DELETESNAPSHOT-10, CSI-SNAPSHOT-09: each member names its group.
#[tokio::test]
async fn a_group_goes_whole_and_only_by_the_list_of_its_members() {
    let mut groups = Groups::start().await;
    let (a, b) = (groups.served("a").await, groups.served("b").await);
    let made = groups.made("g", &[&a, &b]).await;
    let other = groups.made("h", &[&a]).await;
    let (id, ids) = (&made.group_snapshot_id, members(&made));
    let with_another = [ids.clone(), members(&other)].concat();
    for wrong in [ids[..1].to_vec(), with_another] {
        let answer = groups.client.get_volume_group_snapshot(get(id, wrong.clone())).await;
        assert_eq!(code(&answer), Code::InvalidArgument, "{wrong:?}");
        let answer = groups.client.delete_volume_group_snapshot(remove(id, wrong.clone())).await;
        assert_eq!(code(&answer), Code::InvalidArgument, "{wrong:?}");
    }
    assert!(made.snapshots.iter().all(|member| member.group_snapshot_id == *id));
    for snapshot_id in ids.clone() {
        let request = DeleteSnapshotRequest { snapshot_id, ..Default::default() };
        let status = groups.world.controller.delete_snapshot(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("group"), "{status}");
    }
    assert_eq!(groups.snapshots().await.len(), 3);
    let found = groups.client.get_volume_group_snapshot(get(id, ids.clone())).await.unwrap();
    assert_eq!(found.into_inner().group_snapshot, Some(made.clone()));
    for _ in 0..2 {
        groups.client.delete_volume_group_snapshot(remove(id, ids.clone())).await.unwrap();
    }
    assert_eq!(groups.snapshots().await, other.snapshots);
    let answer = groups.client.get_volume_group_snapshot(get(id, ids)).await;
    assert_eq!(code(&answer), Code::NotFound);
}

/// Proves CSI-GROUPCREATE-10: nothing is listed, and the same call succeeds later.
#[tokio::test]
async fn a_group_whose_volumes_cannot_be_cut_together_is_no_group_and_leaves_no_snapshot() {
    let mut groups = Groups::start().await;
    let (a, b) = (groups.served("a").await, groups.served("b").await);
    groups.world.cluster.stop_obeying(NODE);
    let answer = groups.client.create_volume_group_snapshot(make("g", &[&a, &b])).await;
    assert_eq!(code(&answer), Code::Unavailable);
    assert!(groups.snapshots().await.is_empty());
    groups.world.cluster.start_obeying(NODE);
    let made = loop {
        match groups.client.create_volume_group_snapshot(make("g", &[&a, &b])).await {
            Ok(made) => break made.into_inner().group_snapshot.unwrap(),
            Err(status) => assert_eq!(status.code(), Code::Unavailable),
        }
    };
    assert_eq!(made.snapshots.len(), 2);
    assert_eq!(groups.snapshots().await.len(), 2);
}
