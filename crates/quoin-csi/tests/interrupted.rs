//! Faults: callers that time out in the middle, a control plane that is away or comes back, a node
//! that is dead.

use std::time::Duration;

use crate::common::*;
use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::*;
use quoin_testkit::attempts_while_processes_start;
use tonic::{Code, Request, Response, Status};

fn publish(volume: &Volume, node_id: &str) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        node_id: node_id.to_owned(),
        volume_capability: Some(writer()),
        volume_context: volume.volume_context.clone(),
        ..Default::default()
    }
}
fn unpublish(volume: &Volume, node_id: &str) -> ControllerUnpublishVolumeRequest {
    ControllerUnpublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        node_id: node_id.to_owned(),
        ..Default::default()
    }
}

/// Returns a request whose caller gives up after `patience`.
fn impatient<T>(message: T, patience: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(patience);
    request
}

/// Repeats a call while it is under way, as orchestrators do.
async fn until_done<T, F>(mut call: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    loop {
        match call().await {
            Ok(answer) => return answer.into_inner(),
            Err(status) if status.code() == Code::Aborted => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(status) => panic!("{status}"),
        }
    }
}

/// Proves CSI-TIMEOUT-02: however early the caller gives up, the same call again ends with the
/// result of one that was waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_times_out_and_retries_gets_one_volume_and_one_mount() {
    let mut world = World::start().await;
    for (index, micros) in [1, 300, 1000, 3000, 10_000].into_iter().enumerate() {
        let patience = Duration::from_micros(micros);
        let name = format!("db{index}");
        let (controller, node) = (world.controller.clone(), world.node.clone());
        let wanted = create(&name, 64 * MIB);
        let _ = controller.clone().create_volume(impatient(wanted.clone(), patience)).await;
        let again = || {
            let (mut controller, wanted) = (controller.clone(), wanted.clone());
            async move { controller.create_volume(wanted).await }
        };
        let volume = until_done(again).await.volume.unwrap();
        let named = |one: &quoin_api::control::Volume| one.spec.as_ref().unwrap().name == name;
        assert_eq!(world.cluster.volumes().await.iter().filter(|one| named(one)).count(), 1);

        let wanted = publish(&volume, NODE);
        let hurried = impatient(wanted.clone(), patience);
        let _ = controller.clone().controller_publish_volume(hurried).await;
        let again = || {
            let (mut controller, wanted) = (controller.clone(), wanted.clone());
            async move { controller.controller_publish_volume(wanted).await }
        };
        until_done(again).await;

        if can_mount() {
            let stage = NodeStageVolumeRequest {
                volume_id: volume.volume_id.clone(),
                staging_target_path: world.text("stage"),
                volume_capability: Some(writer()),
                ..Default::default()
            };
            let _ = node.clone().node_stage_volume(impatient(stage.clone(), patience)).await;
            let again = || {
                let (mut node, stage) = (node.clone(), stage.clone());
                async move { node.node_stage_volume(stage).await }
            };
            until_done(again).await;
            assert_eq!(world.mounts().len(), 1);
            assert_eq!(world.attacher.attached().len(), 1);
            let unstage = NodeUnstageVolumeRequest {
                volume_id: volume.volume_id.clone(),
                staging_target_path: world.text("stage"),
            };
            let _ = node.clone().node_unstage_volume(impatient(unstage.clone(), patience)).await;
            let again = || {
                let (mut node, unstage) = (node.clone(), unstage.clone());
                async move { node.node_unstage_volume(unstage).await }
            };
            until_done(again).await;
            world.assert_node_is_clean();
        }

        let hurried = impatient(unpublish(&volume, NODE), patience);
        let _ = controller.clone().controller_unpublish_volume(hurried).await;
        let again = || {
            let (mut controller, wanted) = (controller.clone(), unpublish(&volume, NODE));
            async move { controller.controller_unpublish_volume(wanted).await }
        };
        until_done(again).await;
        let delete =
            DeleteVolumeRequest { volume_id: volume.volume_id.clone(), ..Default::default() };
        let _ = world.controller.delete_volume(impatient(delete.clone(), patience)).await;
        let again = || {
            let (mut controller, delete) = (controller.clone(), delete.clone());
            async move { controller.delete_volume(delete).await }
        };
        until_done(again).await;
        assert!(world.cluster.volumes().await.is_empty());
    }
}

/// Proves CSI-CREATEVOLUME-31, CSI-DELETEVOLUME-11, CSI-CTRLPUBLISH-24, CSI-CTRLUNPUBLISH-12,
/// CSI-VALIDATE-16, CSI-LISTVOLUMES-15, CSI-GETVOLUME-08, CSI-GETCAPACITY-14, CSI-NODESTAGE-20,
/// CSI-NODEINFO-13, CSI-DELETESNAPSHOT-09, CSI-LISTSNAPSHOTS-15: and nothing of it was done when it is
/// back.
#[tokio::test]
async fn without_a_control_plane_no_call_reports_success() {
    let mut world = World::start().await;
    let volume = world.create("db", 64 * MIB).await;
    world.stop_control().await;
    // A plugin that never reached it has nothing cached.
    world.restart_plugin().await;
    let id = || volume.volume_id.clone();
    let expand = ControllerExpandVolumeRequest {
        volume_id: id(),
        capacity_range: Some(range(128 * MIB, 0)),
        ..Default::default()
    };
    let validate = ValidateVolumeCapabilitiesRequest {
        volume_id: id(),
        volume_capabilities: vec![writer()],
        ..Default::default()
    };
    let stage = NodeStageVolumeRequest {
        volume_id: id(),
        staging_target_path: world.text("stage"),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    let delete = DeleteVolumeRequest { volume_id: id(), ..Default::default() };
    let snap = CreateSnapshotRequest {
        source_volume_id: id(),
        name: "s".to_owned(),
        ..Default::default()
    };
    let remove = DeleteSnapshotRequest { snapshot_id: "0".repeat(32), ..Default::default() };
    let controller = &mut world.controller;
    let codes = [
        code(&controller.create_volume(create("other", 64 * MIB)).await),
        code(&controller.delete_volume(delete).await),
        code(&controller.controller_publish_volume(publish(&volume, NODE)).await),
        code(&controller.controller_unpublish_volume(unpublish(&volume, NODE)).await),
        code(&controller.controller_expand_volume(expand).await),
        code(&controller.validate_volume_capabilities(validate).await),
        code(&controller.list_volumes(ListVolumesRequest::default()).await),
        code(&controller.get_capacity(GetCapacityRequest::default()).await),
        code(
            &controller.controller_get_volume(ControllerGetVolumeRequest { volume_id: id() }).await,
        ),
        code(&controller.create_snapshot(snap).await),
        code(&controller.delete_snapshot(remove).await),
        code(&controller.list_snapshots(ListSnapshotsRequest::default()).await),
        code(&world.node.node_stage_volume(stage).await),
    ];
    assert_eq!(codes, [Code::Unavailable; 13]);
    // The node knows itself.
    world.node.node_get_info(NodeGetInfoRequest {}).await.unwrap();
    world.start_control().await;
    let volumes = world.cluster.volumes().await;
    assert_eq!(volumes.len(), 1);
    assert_eq!(volumes[0].size_bytes, u64::try_from(64 * MIB).unwrap());
    assert!(volumes[0].attachments.is_empty());
}

/// Proves CSI-VOLUME-08, CSI-VOLUME-09, CSI-CTRLPUBLISH-19, CSI-CTRLPUBLISH-20, CSI-VOLUME-02.
#[tokio::test]
async fn volume_contexts_stay_the_same_through_restarts_and_growth() {
    let mut world = World::start().await;
    let volume = world.create("db", 64 * MIB).await;
    let request = publish(&volume, NODE);
    let given = world.controller.controller_publish_volume(request.clone()).await.unwrap();
    let given = given.into_inner().publish_context;
    world.stop_control().await;
    world.start_control().await;
    world.restart_plugin().await;
    let expand = ControllerExpandVolumeRequest {
        volume_id: volume.volume_id.clone(),
        capacity_range: Some(range(128 * MIB, 0)),
        ..Default::default()
    };
    world.controller.controller_expand_volume(expand).await.unwrap();
    let get = ControllerGetVolumeRequest { volume_id: volume.volume_id.clone() };
    let shown = world.controller.controller_get_volume(get).await.unwrap().into_inner();
    let shown = shown.volume.unwrap();
    assert_eq!(shown.volume_context, volume.volume_context);
    assert_eq!(shown.capacity_bytes, 128 * MIB);
    let again = world.controller.controller_publish_volume(request).await.unwrap().into_inner();
    assert_eq!(again.publish_context, given);
    if can_mount() {
        let stage = NodeStageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: world.text("stage"),
            volume_capability: Some(writer()),
            volume_context: volume.volume_context.clone(),
            publish_context: given,
            ..Default::default()
        };
        world.node.node_stage_volume(stage).await.unwrap();
    }
}

/// Proves CSI-CTRLUNPUBLISH-04, CSI-CTRLUNPUBLISH-09.
#[tokio::test]
async fn only_a_dead_node_loses_its_volume_to_another() {
    let mut world = World::start().await;
    let volume = world.create("db", 64 * MIB).await;
    let dead = control::OTHER_NODE;
    world.controller.controller_publish_volume(publish(&volume, dead)).await.unwrap();
    world.cluster.kill_node(dead);
    world.controller.controller_unpublish_volume(unpublish(&volume, NODE)).await.unwrap();
    let attached = world.cluster.volumes().await[0].attachments.clone();
    assert_eq!(attached[0].node, dead, "only the named node loses the volume");
    world.controller.controller_unpublish_volume(unpublish(&volume, dead)).await.unwrap();
    world.controller.controller_publish_volume(publish(&volume, NODE)).await.unwrap();
    assert_eq!(world.cluster.volumes().await[0].attachments[0].node, NODE);
}

/// Repeats the request as a caller does, while a file that was closed is in use.
async fn until_it_is_free<T>(mut ask: impl AsyncFnMut() -> Result<T, tonic::Status>) -> T {
    for () in attempts_while_processes_start() {
        match ask().await {
            Err(status) if status.code() == Code::Unavailable => {}
            answer => return answer.unwrap(),
        }
    }
    panic!("the file stays in use");
}

/// Proves CSI-NODEUNSTAGE-12, CSI-NODEUNPUBLISH-10, CSI-NODESTATS-18.
#[tokio::test]
async fn a_mount_in_use_is_not_reported_as_unmounted() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let target = world.publish_at(&stage, "pods/a");
    world.node.node_publish_volume(target.clone()).await.unwrap();
    let unpublish = NodeUnpublishVolumeRequest {
        volume_id: stage.volume_id.clone(),
        target_path: target.target_path.clone(),
    };
    let unstage = NodeUnstageVolumeRequest {
        volume_id: stage.volume_id.clone(),
        staging_target_path: stage.staging_target_path.clone(),
    };
    let held = std::fs::File::create(world.path("pods/a/held")).unwrap();
    let answer = world.node.node_unpublish_volume(unpublish.clone()).await;
    assert_eq!(code(&answer), Code::Unavailable);
    drop(held);
    until_it_is_free(async || world.node.node_unpublish_volume(unpublish.clone()).await).await;
    let held = std::fs::File::open(world.path("stage/held")).unwrap();
    assert_eq!(code(&world.node.node_unstage_volume(unstage.clone()).await), Code::Unavailable);
    assert_eq!(world.mounts().len(), 1);
    drop(held);
    until_it_is_free(async || world.node.node_unstage_volume(unstage.clone()).await).await;
    let stats = NodeGetVolumeStatsRequest {
        volume_id: stage.volume_id,
        volume_path: stage.staging_target_path,
        ..Default::default()
    };
    assert_ne!(code(&world.node.node_get_volume_stats(stats).await), Code::Ok);
    world.assert_node_is_clean();
}

/// Proves CSI-NODEEXPAND-22: ext4 grows online only for a process that has CAP_SYS_RESOURCE; for
/// another, with the next staging.
#[tokio::test]
async fn a_mounted_ext4_grows_at_once_or_with_the_next_staging() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(mount_capability("ext4", AccessMode::SingleNodeWriter)).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let expand = ControllerExpandVolumeRequest {
        volume_id: stage.volume_id.clone(),
        capacity_range: Some(range(256 * MIB, 0)),
        ..Default::default()
    };
    world.controller.controller_expand_volume(expand).await.unwrap();
    let grow = NodeExpandVolumeRequest {
        volume_id: stage.volume_id.clone(),
        volume_path: stage.staging_target_path.clone(),
        staging_target_path: stage.staging_target_path.clone(),
        ..Default::default()
    };
    let answer = world.node.node_expand_volume(grow).await;
    if has_sys_resource() {
        assert_eq!(answer.unwrap().into_inner().capacity_bytes, 256 * MIB);
    } else {
        let status = answer.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("CAP_SYS_RESOURCE"), "{}", status.message());
        let unstage = NodeUnstageVolumeRequest {
            volume_id: stage.volume_id.clone(),
            staging_target_path: stage.staging_target_path.clone(),
        };
        world.node.node_unstage_volume(unstage).await.unwrap();
        world.node.node_stage_volume(stage.clone()).await.unwrap();
    }
    let stats = NodeGetVolumeStatsRequest {
        volume_id: stage.volume_id,
        volume_path: stage.staging_target_path,
        ..Default::default()
    };
    let stats = world.node.node_get_volume_stats(stats).await.unwrap().into_inner();
    assert!(stats.usage[0].total > 200 * MIB, "{:?}", stats.usage);
}

fn has_sys_resource() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap() >> CAP_SYS_RESOURCE & 1 == 1
}
