//! Snapshots through the Controller service.

use quoin_api::csi::controller_service_capability::{Type, rpc};
use quoin_api::csi::*;
use quoin_csi::Mode;
use tonic::Code;

use crate::common::*;

fn make(volume_id: &str, name: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest {
        source_volume_id: volume_id.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    }
}

pub fn remove(snapshot_id: &str) -> DeleteSnapshotRequest {
    DeleteSnapshotRequest { snapshot_id: snapshot_id.to_owned(), ..Default::default() }
}

fn get(snapshot_id: &str) -> GetSnapshotRequest {
    GetSnapshotRequest { snapshot_id: snapshot_id.to_owned(), ..Default::default() }
}

impl World {
    /// A volume that is published to this node, so that a target serves it.
    pub async fn served(&mut self, name: &str) -> String {
        let volume_id = self.create(name, 64 * MIB).await.volume_id;
        self.serve(&volume_id).await;
        volume_id
    }

    pub async fn serve(&mut self, volume_id: &str) {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            node_id: NODE.to_owned(),
            volume_capability: Some(writer()),
            ..Default::default()
        };
        self.controller.controller_publish_volume(request).await.unwrap();
    }

    pub async fn unserved(&mut self, volume_id: &str) {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            node_id: NODE.to_owned(),
            ..Default::default()
        };
        self.controller.controller_unpublish_volume(request).await.unwrap();
    }

    pub async fn snap(&mut self, volume_id: &str, name: &str) -> Snapshot {
        let made = self.controller.create_snapshot(make(volume_id, name)).await.unwrap();
        made.into_inner().snapshot.unwrap()
    }

    async fn listed(&mut self, request: ListSnapshotsRequest) -> (Vec<Snapshot>, String) {
        let listed = self.controller.list_snapshots(request).await.unwrap().into_inner();
        let snapshots = listed.entries.into_iter().map(|entry| entry.snapshot.unwrap());
        (snapshots.collect(), listed.next_token)
    }
}

/// Proves CSI-CREATESNAPSHOT-01, CSI-DELETESNAPSHOT-01, CSI-LISTSNAPSHOTS-01, CSIN-GETSNAPSHOT-01:
/// what is advertised works, and a process without the controller mode serves none of it.
#[tokio::test]
async fn the_calls_for_snapshots_are_advertised_and_served_in_the_modes_with_a_controller() {
    let mut world = World::start().await;
    let request = ControllerGetCapabilitiesRequest {};
    let told = world.controller.controller_get_capabilities(request).await.unwrap().into_inner();
    let told: Vec<_> = told
        .capabilities
        .into_iter()
        .filter_map(|capability| capability.r#type.map(|Type::Rpc(rpc)| rpc.r#type()))
        .collect();
    for wanted in
        [rpc::Type::CreateDeleteSnapshot, rpc::Type::ListSnapshots, rpc::Type::GetSnapshot]
    {
        assert!(told.contains(&wanted), "{told:?}");
    }
    let volume = world.served("db").await;
    let snapshot = world.snap(&volume, "s").await;
    world.controller.get_snapshot(get(&snapshot.snapshot_id)).await.unwrap();
    assert_eq!(
        world.listed(ListSnapshotsRequest::default()).await.0,
        std::slice::from_ref(&snapshot)
    );
    world.controller.delete_snapshot(remove(&snapshot.snapshot_id)).await.unwrap();
    assert!(world.listed(ListSnapshotsRequest::default()).await.0.is_empty());

    let mut node_only = World::start_in(Mode::NODE).await;
    let controller = &mut node_only.controller;
    let codes = [
        code(&controller.create_snapshot(CreateSnapshotRequest::default()).await),
        code(&controller.delete_snapshot(DeleteSnapshotRequest::default()).await),
        code(&controller.list_snapshots(ListSnapshotsRequest::default()).await),
        code(&controller.get_snapshot(GetSnapshotRequest::default()).await),
    ];
    assert_eq!(codes, [Code::Unimplemented; 4]);
}

/// Proves CSI-CREATESNAPSHOT-02, CSI-CREATESNAPSHOT-20, CSI-CREATESNAPSHOT-22, CSI-SNAPSHOT-02,
/// CSI-SNAPSHOT-03, CSI-SNAPSHOT-05, CSI-SNAPSHOT-07, CSI-CREATESNAPSHOT-10, CSIN-GETSNAPSHOT-04,
/// CSIN-GETSNAPSHOT-05: of snapshots that are cut, after which there is nothing to process.
#[tokio::test]
async fn a_repeat_finds_the_same_snapshot_and_another_volume_may_not_take_its_name() {
    let mut world = World::start().await;
    let (volume, other) = (world.served("db").await, world.served("other").await);
    let first = world.snap(&volume, "s").await;
    assert!(!first.snapshot_id.is_empty() && first.snapshot_id.len() <= 128);
    assert_eq!((first.size_bytes, &first.source_volume_id), (64 * MIB, &volume));
    assert!(first.creation_time.is_some() && first.ready_to_use);
    assert_eq!(world.snap(&volume, "s").await, first);
    let second = world.snap(&volume, "t").await;
    assert_ne!(second.snapshot_id, first.snapshot_id);
    let taken = world.controller.create_snapshot(make(&other, "s")).await;
    assert_eq!(code(&taken), Code::AlreadyExists);
    for snapshot in [&first, &second] {
        let found = world.controller.get_snapshot(get(&snapshot.snapshot_id)).await.unwrap();
        assert_eq!(found.into_inner().snapshot.as_ref(), Some(snapshot));
    }
    // Of the same name at another time: another snapshot.
    world.controller.delete_snapshot(remove(&first.snapshot_id)).await.unwrap();
    let again = world.snap(&other, "s").await;
    assert_ne!(again.snapshot_id, first.snapshot_id);
}

/// Proves CSI-CREATESNAPSHOT-14, CSI-CREATESNAPSHOT-15, CSI-CREATESNAPSHOT-16,
/// CSI-CREATESNAPSHOT-17, CSI-CREATESNAPSHOT-19, CSI-CREATESNAPSHOT-21, CSI-DELETESNAPSHOT-02,
/// CSI-DELETESNAPSHOT-07, CSI-LISTSNAPSHOTS-08, CSI-LISTSNAPSHOTS-16, CSIN-GETSNAPSHOT-02,
/// CSIN-GETSNAPSHOT-03.
#[tokio::test]
async fn an_invalid_request_about_snapshots_is_refused_with_its_code_and_changes_nothing() {
    let mut world = World::start().await;
    let volume = world.served("db").await;
    let good = || make(&volume, "s");
    let of_parameters =
        |pairs: &[(&str, &str)]| CreateSnapshotRequest { parameters: map(pairs), ..good() };
    let bad = [
        make("", "s"),
        make(&volume, ""),
        make(&volume, &"x".repeat(129)),
        make(&volume, "a\u{7f}"),
        make(&volume, "a\u{0}"),
        make(&volume, "a\u{9f}"),
        of_parameters(&[("colour", "red")]),
        CreateSnapshotRequest { secrets: map(&[("pass word", "x")]), ..good() },
        CreateSnapshotRequest {
            accessibility_requirements: Some(TopologyRequirement::default()),
            ..good()
        },
    ];
    for (index, request) in bad.into_iter().enumerate() {
        let answer = world.controller.create_snapshot(request).await;
        assert_eq!(code(&answer), Code::InvalidArgument, "request {index}");
    }
    for unknown in [UNKNOWN, &"0".repeat(32)] {
        let answer = world.controller.create_snapshot(make(unknown, "s")).await;
        assert_eq!(code(&answer), Code::NotFound, "{unknown}");
        assert_eq!(code(&world.controller.get_snapshot(get(unknown)).await), Code::NotFound);
        assert_eq!(code(&world.controller.delete_snapshot(remove(unknown)).await), Code::Ok);
    }
    assert_eq!(code(&world.controller.delete_snapshot(remove("")).await), Code::InvalidArgument);
    assert_eq!(code(&world.controller.get_snapshot(get("")).await), Code::InvalidArgument);
    let negative = ListSnapshotsRequest { max_entries: -1, ..Default::default() };
    assert_eq!(code(&world.controller.list_snapshots(negative).await), Code::InvalidArgument);
    for token in ["x", &"0".repeat(48)] {
        let starting_token = token.to_owned();
        let request = ListSnapshotsRequest { starting_token, ..Default::default() };
        assert_eq!(code(&world.controller.list_snapshots(request).await), Code::Aborted, "{token}");
    }
    assert!(world.listed(ListSnapshotsRequest::default()).await.0.is_empty());
    // Keys that sidecars add are nobody's parameters, and names may be of any script.
    let sidecar = of_parameters(&[("csi.storage.k8s.io/volumesnapshot/name", "claim")]);
    world.controller.create_snapshot(sidecar).await.unwrap();
    world.snap(&volume, &"名".repeat(42)).await;
    world.snap(&volume, &"x".repeat(128)).await;
}

/// Proves CSI-LISTSNAPSHOTS-02, CSI-LISTSNAPSHOTS-05, CSI-LISTSNAPSHOTS-06, CSI-LISTSNAPSHOTS-17:
/// pages hold as many as are asked for, continue where the last one ended while snapshots come and
/// go, and list what commands made too.
#[tokio::test]
async fn pages_of_snapshots_are_bounded_and_complete_and_filtered_by_volume_and_id() {
    let mut world = World::start().await;
    let (volume, other) = (world.served("db").await, world.served("other").await);
    let mut all = Vec::new();
    for n in 0..5 {
        all.push(world.snap(&volume, &format!("s{n}")).await.snapshot_id);
    }
    // Made by a command.
    let request = quoin_api::control::CreateSnapshotRequest {
        volume: Some(quoin_api::control::VolumeRef { id: volume.clone(), name: String::new() }),
        name: "by-command".into(),
        ..Default::default()
    };
    let made = world.cluster.client().create_snapshot(request).await.unwrap().into_inner();
    all.push(made.id);
    let of_other = world.snap(&other, "o").await;
    let (mut found, mut token) = (Vec::new(), String::new());
    loop {
        let request = ListSnapshotsRequest {
            max_entries: 2,
            starting_token: token,
            source_volume_id: volume.clone(),
            ..Default::default()
        };
        let (page, next) = world.listed(request).await;
        assert!(page.len() <= 2 && page.iter().all(|s| s.ready_to_use));
        found.extend(page.into_iter().map(|snapshot| snapshot.snapshot_id));
        token = next;
        if token.is_empty() {
            break;
        }
        // The one behind which the next page begins goes away.
        let last = found.last().unwrap().clone();
        world.controller.delete_snapshot(remove(&last)).await.unwrap();
    }
    all.sort();
    found.sort();
    assert_eq!(found, all, "each of them once");
    let one =
        ListSnapshotsRequest { snapshot_id: of_other.snapshot_id.clone(), ..Default::default() };
    assert_eq!(world.listed(one.clone()).await.0, [of_other]);
    let of_volume = ListSnapshotsRequest { source_volume_id: volume, ..one };
    assert!(world.listed(of_volume).await.0.is_empty(), "it is of another volume");
    for unknown in [UNKNOWN, &"0".repeat(32)] {
        let id = unknown.to_owned();
        let request = ListSnapshotsRequest { source_volume_id: id.clone(), ..Default::default() };
        assert!(world.listed(request).await.0.is_empty());
        let request = ListSnapshotsRequest { snapshot_id: id, ..Default::default() };
        assert!(world.listed(request).await.0.is_empty());
    }
}

/// Proves CSI-CREATESNAPSHOT-11, CSI-CREATESNAPSHOT-13, CSI-LISTSNAPSHOTS-03: for a target that does
/// not answer.
#[tokio::test]
async fn a_snapshot_that_is_not_cut_is_an_error_and_in_no_list_and_a_repeat_finds_it() {
    let mut world = World::start().await;
    let volume = world.served("db").await;
    world.cluster.stop_obeying(NODE);
    let answer = world.controller.create_snapshot(make(&volume, "s")).await;
    assert_eq!(code(&answer), Code::Unavailable);
    assert!(world.listed(ListSnapshotsRequest::default()).await.0.is_empty());
    world.cluster.start_obeying(NODE);
    assert!(world.snap(&volume, "s").await.ready_to_use);
}

/// Proves CSI-DELETEVOLUME-05, CSIN-GETSNAPSHOT-07: but for its use as a source.
#[tokio::test]
async fn snapshots_of_a_deleted_volume_stay_listed_with_the_volume_that_they_always_had() {
    let mut world = World::start().await;
    let volume = world.served("db").await;
    let snapshot = world.snap(&volume, "s").await;
    world.unserved(&volume).await;
    for _ in 0..2 {
        let request = DeleteVolumeRequest { volume_id: volume.clone(), ..Default::default() };
        world.controller.delete_volume(request).await.unwrap();
    }
    let request = ControllerGetVolumeRequest { volume_id: volume.clone() };
    assert_eq!(code(&world.controller.controller_get_volume(request).await), Code::NotFound);
    assert!(world.cluster.volumes().await.is_empty());
    assert_eq!(
        world.listed(ListSnapshotsRequest::default()).await.0,
        std::slice::from_ref(&snapshot)
    );
    let of_volume = ListSnapshotsRequest { source_volume_id: volume.clone(), ..Default::default() };
    assert_eq!(world.listed(of_volume).await.0, std::slice::from_ref(&snapshot));
    let found = world.controller.get_snapshot(get(&snapshot.snapshot_id)).await.unwrap();
    assert_eq!(found.into_inner().snapshot, Some(snapshot.clone()));
    // Its name is free for another volume.
    assert_ne!(world.create("db", 64 * MIB).await.volume_id, volume);
    world.controller.delete_snapshot(remove(&snapshot.snapshot_id)).await.unwrap();
    world.controller.delete_snapshot(remove(&snapshot.snapshot_id)).await.unwrap();
    assert_eq!(
        code(&world.controller.get_snapshot(get(&snapshot.snapshot_id)).await),
        Code::NotFound
    );
}
