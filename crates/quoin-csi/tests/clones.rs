//! Volumes from snapshots and from volumes through the Controller service.

use quoin_api::csi::controller_service_capability::{Type as Capability, rpc};
use quoin_api::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use quoin_api::csi::*;
use tonic::Code;

use crate::common::*;

fn snapshot_of(id: &str) -> Option<VolumeContentSource> {
    let source = SnapshotSource { snapshot_id: id.to_owned() };
    Some(VolumeContentSource { r#type: Some(Type::Snapshot(source)) })
}

fn volume_of(id: &str) -> Option<VolumeContentSource> {
    let source = VolumeSource { volume_id: id.to_owned() };
    Some(VolumeContentSource { r#type: Some(Type::Volume(source)) })
}

fn from(name: &str, source: Option<VolumeContentSource>) -> CreateVolumeRequest {
    CreateVolumeRequest { volume_content_source: source, ..create(name, 64 * MIB) }
}

impl World {
    async fn made_from(&mut self, request: CreateVolumeRequest) -> Volume {
        self.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap()
    }

    async fn delete_volume(&mut self, volume_id: &str) {
        self.unserved(volume_id).await;
        let request = DeleteVolumeRequest { volume_id: volume_id.to_owned(), ..Default::default() };
        self.controller.delete_volume(request).await.unwrap();
    }
}

/// Proves CSI-VOLUME-14, CSI-SOURCE-05, CSI-CREATEVOLUME-16, CSI-CREATEVOLUME-39,
/// CSI-CTRLCAPS-07, CSI-CTRLCAPS-10, CSI-CREATEVOLUME-42, CSI-SNAPSHOT-01, CSI-SNAPSHOT-08: sources are
/// named in every answer, sizes respected, and repeats compared; what is ready is accepted.
#[tokio::test]
async fn volumes_are_made_from_snapshots_and_volumes_and_name_their_source() {
    let mut world = World::start().await;
    let told = world
        .controller
        .controller_get_capabilities(ControllerGetCapabilitiesRequest {})
        .await
        .unwrap()
        .into_inner();
    let is_clone = |capability: &ControllerServiceCapability| {
        let kind = capability.r#type.as_ref();
        kind.is_some_and(|Capability::Rpc(rpc)| rpc.r#type() == rpc::Type::CloneVolume)
    };
    assert!(told.capabilities.iter().any(is_clone));
    let source = world.served("db").await;
    let snapshot = world.snap(&source, "s").await.snapshot_id;
    let request = GetSnapshotRequest { snapshot_id: snapshot.clone(), ..Default::default() };
    let found = world.controller.get_snapshot(request).await.unwrap().into_inner();
    assert!(found.snapshot.unwrap().ready_to_use);
    let restored = world.made_from(from("restored", snapshot_of(&snapshot))).await;
    assert_eq!(restored.content_source, snapshot_of(&snapshot));
    assert_eq!(restored.capacity_bytes, 64 * MIB);
    let copied = world.made_from(from("copied", volume_of(&source))).await;
    assert_eq!(copied.content_source, volume_of(&source));
    let ids = [&source, &restored.volume_id, &copied.volume_id];
    assert!(ids.iter().all(|id| ids.iter().filter(|other| *other == id).count() == 1));
    let listed = world.controller.list_volumes(ListVolumesRequest::default()).await.unwrap();
    for entry in listed.into_inner().entries {
        let volume = entry.volume.unwrap();
        let expected = match volume.volume_id.as_str() {
            id if id == restored.volume_id => snapshot_of(&snapshot),
            id if id == copied.volume_id => volume_of(&source),
            _ => None,
        };
        assert_eq!(volume.content_source, expected);
    }
    // The same again, and under the name of another.
    assert_eq!(world.made_from(from("restored", snapshot_of(&snapshot))).await, restored);
    assert_eq!(world.made_from(from("copied", volume_of(&source))).await, copied);
    for other in [None, volume_of(&source)] {
        let answer = world.controller.create_volume(from("restored", other)).await;
        assert_eq!(code(&answer), Code::AlreadyExists);
    }
    let answer = world.controller.create_volume(from("db", snapshot_of(&snapshot))).await;
    assert_eq!(code(&answer), Code::AlreadyExists);
    // A copy is as large as it is asked for, and never smaller than its source.
    let sized = |name: &str, range: Option<CapacityRange>| CreateVolumeRequest {
        capacity_range: range,
        ..from(name, snapshot_of(&snapshot))
    };
    for (name, asked, expected) in [
        ("larger", Some(range(128 * MIB, 128 * MIB)), 128 * MIB),
        ("smaller", Some(range(MIB, 0)), 64 * MIB),
        ("any", None, 64 * MIB),
        ("limited", Some(range(0, 100 * MIB)), 64 * MIB),
    ] {
        assert_eq!(world.made_from(sized(name, asked)).await.capacity_bytes, expected, "{name}");
    }
    for source in [snapshot_of(&snapshot), volume_of(&source)] {
        let tiny = CreateVolumeRequest {
            capacity_range: Some(range(MIB, 2 * MIB)),
            ..from("tiny", source)
        };
        assert_eq!(code(&world.controller.create_volume(tiny).await), Code::OutOfRange);
    }
}

/// Proves CSI-CREATEVOLUME-34, CSI-CREATEVOLUME-32, CSI-CTRLCAPS-10.
#[tokio::test]
async fn a_source_that_does_not_exist_or_cannot_be_used_makes_nothing() {
    let mut world = World::start().await;
    let source = world.served("db").await;
    let snapshot = world.snap(&source, "s").await.snapshot_id;
    for unknown in [UNKNOWN, &"0".repeat(32)] {
        for source in [snapshot_of(unknown), volume_of(unknown)] {
            let answer = world.controller.create_volume(from("copy", source)).await;
            assert_eq!(code(&answer), Code::NotFound, "{unknown}");
        }
    }
    // An id of the other kind.
    for source in [snapshot_of(&source), volume_of(&snapshot)] {
        let answer = world.controller.create_volume(from("copy", source)).await;
        assert_eq!(code(&answer), Code::NotFound);
    }
    let clash = CreateVolumeRequest {
        parameters: map(&[("blockSize", "512")]),
        ..from("copy", snapshot_of(&snapshot))
    };
    assert_eq!(code(&world.controller.create_volume(clash).await), Code::InvalidArgument);
    let encrypted = CreateVolumeRequest {
        parameters: map(&[("encrypted", "true")]),
        secrets: map(&[("encryptionKey", &"7".repeat(64))]),
        ..from("copy", snapshot_of(&snapshot))
    };
    assert_eq!(code(&world.controller.create_volume(encrypted).await), Code::InvalidArgument);
    assert_eq!(world.cluster.volumes().await.len(), 1);
}

/// Proves CSI-ERR-11: for CreateVolume with a source; who gets 16 deletes nothing.
#[tokio::test]
async fn a_copy_of_an_encrypted_source_with_another_key_makes_nothing() {
    const KEY: &str = "correct horse battery";
    const OTHER: &str = "incorrect horse battery";
    let with = |key: &str, request: CreateVolumeRequest| CreateVolumeRequest {
        parameters: map(&[("encrypted", "true")]),
        secrets: map(&[("encryptionKey", key)]),
        ..request
    };
    let mut world = World::start().await;
    let source = world.made_from(with(KEY, create("db", 64 * MIB))).await.volume_id;
    world.serve(&source).await;
    let snapshot = world.snap(&source, "s").await.snapshot_id;
    for source in [snapshot_of(&snapshot), volume_of(&source)] {
        let answer = world.controller.create_volume(with(OTHER, from("copy", source))).await;
        assert_eq!(code(&answer), Code::Unauthenticated);
        assert_eq!(world.cluster.volumes().await.len(), 1);
    }
    world.delete_volume(&source).await;
    let copy = |key| with(key, from("copy", snapshot_of(&snapshot)));
    let before = world.cluster.volumes().await.len();
    assert_eq!(code(&world.controller.create_volume(copy(OTHER)).await), Code::Unauthenticated);
    assert_eq!(world.cluster.volumes().await.len(), before);
    let made = world.made_from(copy(KEY)).await;
    assert_eq!(world.made_from(copy(KEY)).await.volume_id, made.volume_id);
    assert_eq!(code(&world.controller.create_volume(copy(OTHER)).await), Code::Unauthenticated);
}

/// Proves CSI-DELETEVOLUME-05, CSI-DELETEVOLUME-06, CSI-DELETEVOLUME-07, CSI-DELETEVOLUME-12,
/// CSI-DELETESNAPSHOT-11: a clone stands on its own, a snapshot of a deleted volume still serves as a
/// source, and so no deletion is refused because of snapshots.
#[tokio::test]
async fn sources_are_deleted_before_their_clones_and_snapshots_outlive_their_volumes_as_sources() {
    let mut world = World::start().await;
    let source = world.served("db").await;
    let snapshot = world.snap(&source, "s").await.snapshot_id;
    let first = world.made_from(from("first", snapshot_of(&snapshot))).await;
    world.delete_volume(&source).await;
    let second = world.made_from(from("second", snapshot_of(&snapshot))).await;
    assert_eq!(second.content_source, snapshot_of(&snapshot));
    let request = DeleteSnapshotRequest { snapshot_id: snapshot.clone(), ..Default::default() };
    world.controller.delete_snapshot(request.clone()).await.unwrap();
    world.controller.delete_snapshot(request).await.unwrap();
    let listed = world.controller.list_snapshots(ListSnapshotsRequest::default()).await.unwrap();
    assert!(listed.into_inner().entries.is_empty());
    let answer = world.controller.create_volume(from("third", snapshot_of(&snapshot))).await;
    assert_eq!(code(&answer), Code::NotFound);
    for volume in [&first, &second] {
        let request = ControllerGetVolumeRequest { volume_id: volume.volume_id.clone() };
        let found = world.controller.controller_get_volume(request).await.unwrap().into_inner();
        assert_eq!(found.volume.unwrap().content_source, snapshot_of(&snapshot));
        world.delete_volume(&volume.volume_id).await;
    }
}

/// Proves CSI-TIMEOUT-02: of copies, by callers that give up at any moment, and with a control plane
/// that goes away in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_caller_gives_up_and_repeats_is_made_once_and_goes_whole() {
    let mut world = World::start().await;
    let source = world.served("db").await;
    let snapshot = world.snap(&source, "s").await.snapshot_id;
    let mut made = Vec::new();
    for (index, micros) in [1, 300, 1000, 3000, 10_000, 30_000].into_iter().enumerate() {
        let content = if index % 2 == 0 { snapshot_of(&snapshot) } else { volume_of(&source) };
        let wanted = from(&format!("copy-{index}"), content);
        let mut hurried = tonic::Request::new(wanted.clone());
        hurried.set_timeout(std::time::Duration::from_micros(micros));
        let _ = world.controller.clone().create_volume(hurried).await;
        if index == 3 {
            world.stop_control().await;
            let code = loop {
                let answer = world.controller.create_volume(wanted.clone()).await;
                // The call whose caller gave up may be under way.
                match code(&answer) {
                    Code::Aborted => {}
                    code => break code,
                }
            };
            assert!([Code::Ok, Code::Unavailable].contains(&code), "{code:?}");
            world.start_control().await;
        }
        let copy = loop {
            match world.controller.create_volume(wanted.clone()).await {
                Ok(answer) => break answer.into_inner().volume.unwrap(),
                Err(status) => {
                    let is_passing = [Code::Aborted, Code::Unavailable].contains(&status.code());
                    assert!(is_passing, "{status}");
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
            }
        };
        made.push(copy.volume_id);
    }
    let parallel = (0..8).map(|_| {
        let mut controller = world.controller.clone();
        let wanted = from("copy-0", snapshot_of(&snapshot));
        tokio::spawn(async move { controller.create_volume(wanted).await })
    });
    for call in parallel.collect::<Vec<_>>() {
        match call.await.unwrap() {
            Ok(answer) => assert_eq!(answer.into_inner().volume.unwrap().volume_id, made[0]),
            Err(status) => assert_eq!(status.code(), Code::Aborted),
        }
    }
    assert_eq!(world.cluster.volumes().await.len(), made.len() + 1);
    for volume_id in &made {
        world.delete_volume(volume_id).await;
    }
    let request = DeleteSnapshotRequest { snapshot_id: snapshot, ..Default::default() };
    world.controller.delete_snapshot(request).await.unwrap();
    world.delete_volume(&source).await;
    assert!(world.cluster.volumes().await.is_empty());
}
