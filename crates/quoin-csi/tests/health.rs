//! The health calls of edition 1.13, and the conditions of 1.8 that show the same judgements.

use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::Ordering;

use crate::common::*;
use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::*;
use tonic::Code;

fn get(volume_id: &str) -> ControllerGetVolumeHealthRequest {
    ControllerGetVolumeHealthRequest { volume_id: volume_id.into(), ..Default::default() }
}

fn list(max_entries: i32, starting_token: &str) -> ControllerListVolumeHealthRequest {
    ControllerListVolumeHealthRequest {
        max_entries,
        starting_token: starting_token.into(),
        ..Default::default()
    }
}

fn on_node(volume_id: &str) -> NodeGetVolumeHealthRequest {
    NodeGetVolumeHealthRequest { volume_id: volume_id.into(), ..Default::default() }
}

fn reasons(health: &VolumeHealth) -> Vec<(&str, i32)> {
    health.health_statuses.iter().map(|one| (one.reason.as_str(), one.status)).collect()
}

/// Proves CSIN-HEALTH-01, CSIN-HEALTH-03.
#[tokio::test]
async fn health_and_conditions_are_both_advertised() {
    let mut world = World::start().await;
    let request = ControllerGetCapabilitiesRequest::default();
    let controller = world.controller.controller_get_capabilities(request).await.unwrap();
    let controller: Vec<i32> = controller
        .into_inner()
        .capabilities
        .iter()
        .filter_map(|one| one.r#type.as_ref())
        .map(|controller_service_capability::Type::Rpc(rpc)| rpc.r#type)
        .collect();
    assert!([11, 16, 17].iter().all(|kind| controller.contains(kind)), "{controller:?}");
    let node = world.node.node_get_capabilities(NodeGetCapabilitiesRequest::default()).await;
    let node = node.unwrap();
    let node: Vec<i32> = node
        .into_inner()
        .capabilities
        .iter()
        .filter_map(|one| one.r#type.as_ref())
        .map(|node_service_capability::Type::Rpc(rpc)| rpc.r#type)
        .collect();
    assert!([4, 7, 8].iter().all(|kind| node.contains(kind)), "{node:?}");
}

/// Proves CSIN-HEALTH-04, CSIN-HEALTH-09, CSIN-HEALTH-11, CSIN-HEALTH-12, CSIN-HEALTH-13,
/// CSIN-HEALTH-14, CSIN-HEALTH-15, CSIN-HEALTH-16, CSIN-HEALTH-17, CSIN-HEALTH-24.
#[tokio::test]
async fn the_controller_lists_exactly_the_volumes_with_a_condition() {
    let mut world = World::start().await;
    let mut ids = Vec::new();
    for name in ["a", "b", "c", "d"] {
        ids.push(world.create(name, 64 * MIB).await.volume_id);
    }
    ids.sort();
    for id in [&ids[1], &ids[3]] {
        let publish = ControllerPublishVolumeRequest {
            volume_id: id.to_string(),
            node_id: NODE.into(),
            volume_capability: Some(writer()),
            ..Default::default()
        };
        world.controller.controller_publish_volume(publish).await.unwrap();
        world.cluster.degrade(id, NODE).await;
    }
    let records = world.cluster.volumes().await;
    for (index, id) in ids.iter().enumerate() {
        let answer = world.controller.controller_get_volume_health(get(id)).await.unwrap();
        let health = answer.into_inner().volume_health.unwrap();
        assert_eq!(health.volume_id, *id);
        let ill = index % 2 == 1;
        let expected = if ill { vec![("ReplicaOffline", 1)] } else { Vec::new() };
        assert_eq!(reasons(&health), expected);
        let request = ControllerGetVolumeRequest { volume_id: id.clone() };
        let got = world.controller.controller_get_volume(request).await.unwrap().into_inner();
        let condition = got.status.unwrap().volume_condition.unwrap();
        assert_eq!(condition.abnormal, ill);
        assert_eq!(condition.message.contains("ReplicaOffline"), ill, "{}", condition.message);
    }
    let listed = world.controller.list_volumes(ListVolumesRequest::default()).await.unwrap();
    for entry in listed.into_inner().entries {
        let ill = [&ids[1], &ids[3]].contains(&&entry.volume.unwrap().volume_id);
        assert_eq!(entry.status.unwrap().volume_condition.unwrap().abnormal, ill);
    }
    for max_entries in [0, 1, 2, 5] {
        let (mut seen, mut token) = (Vec::new(), String::new());
        loop {
            let request = list(max_entries, &token);
            let page = world.controller.controller_list_volume_health(request).await.unwrap();
            let page = page.into_inner();
            assert!(max_entries == 0 || page.entries.len() <= max_entries as usize);
            for health in &page.entries {
                assert_eq!(reasons(health), [("ReplicaOffline", 1)]);
            }
            seen.extend(page.entries.into_iter().map(|health| health.volume_id));
            token = page.next_token;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(seen, [ids[1].clone(), ids[3].clone()], "pages of {max_entries}");
    }
    let page = world.controller.controller_list_volume_health(list(1, "")).await.unwrap();
    let token = page.into_inner().next_token;
    let request = DeleteVolumeRequest { volume_id: ids[0].clone(), ..Default::default() };
    world.controller.delete_volume(request).await.unwrap();
    let rest = world.controller.controller_list_volume_health(list(0, &token)).await.unwrap();
    let rest: Vec<_> = rest.into_inner().entries.into_iter().map(|one| one.volume_id).collect();
    assert_eq!(rest, [ids[3].clone()]);
    for (request, expected) in [
        (list(-1, ""), Code::InvalidArgument),
        (list(0, "invalid-token"), Code::Aborted),
        (list(0, &"0".repeat(token.len())), Code::Aborted),
    ] {
        let answer = world.controller.controller_list_volume_health(request).await;
        assert_eq!(code(&answer), expected);
    }
    for (id, expected) in
        [("", Code::InvalidArgument), (UNKNOWN, Code::NotFound), (&ids[0], Code::NotFound)]
    {
        let answer = world.controller.controller_get_volume_health(get(id)).await;
        assert_eq!(code(&answer), expected, "{id}");
    }
    let after = world.cluster.volumes().await;
    let versions = |volumes: &[quoin_api::control::Volume]| -> Vec<_> {
        let kept = volumes.iter().filter(|volume| volume.id != ids[0]);
        kept.map(|volume| (volume.id.clone(), volume.resource_version)).collect()
    };
    assert_eq!(versions(&records), versions(&after), "nothing was recorded");
    world.stop_control().await;
    let answer = world.controller.controller_get_volume_health(get(&ids[1])).await;
    assert_eq!(code(&answer), Code::Unavailable);
    let answer = world.controller.controller_list_volume_health(list(0, "")).await;
    assert_eq!(code(&answer), Code::Unavailable);
}

/// Proves CSIN-HEALTH-18, CSIN-HEALTH-19, CSIN-HEALTH-20.
#[tokio::test]
async fn a_node_knows_why_staging_failed_and_which_volumes_there_are() {
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    let id = stage.volume_id.as_str();
    let health = world.node.node_get_volume_health(on_node(id)).await.unwrap().into_inner();
    assert_eq!(reasons(&health.volume_health.unwrap()), [], "known, and not here");
    for (request, expected) in [
        (on_node(""), Code::InvalidArgument),
        (
            NodeGetVolumeHealthRequest { volume_publish_path: "relative".into(), ..on_node(id) },
            Code::InvalidArgument,
        ),
        (
            NodeGetVolumeHealthRequest { staging_target_path: "./x".into(), ..on_node(id) },
            Code::InvalidArgument,
        ),
        (on_node(UNKNOWN), Code::NotFound),
    ] {
        assert_eq!(code(&world.node.node_get_volume_health(request).await), expected);
    }
    world.cluster.kill_node(NODE);
    let staged = world.node.node_stage_volume(stage.clone()).await;
    assert_eq!(code(&staged), Code::Unavailable, "no target listens");
    world.stop_control().await;
    let health = world.node.node_get_volume_health(on_node(id)).await.unwrap().into_inner();
    let health = health.volume_health.unwrap();
    assert_eq!(reasons(&health), [("StagingFailed", 2)]);
    assert!(health.health_statuses[0].message.contains("waited"), "{health:?}");
    let answer = world.node.node_get_volume_health(on_node(&"0".repeat(32))).await;
    assert_eq!(code(&answer), Code::Unavailable, "nothing is known of it, here or elsewhere");
}

/// Proves CSIN-HEALTH-04, CSIN-HEALTH-10, CSI-CTRLCAPS-15: with real mounts and devices.
#[tokio::test]
async fn a_node_sees_a_lost_mount_and_a_lost_device_also_of_a_block_volume() {
    if !can_mount() {
        return;
    }
    for capability in [writer(), block_capability(AccessMode::SingleNodeWriter)] {
        let mut world = World::start().await;
        let stage = world.published(capability).await;
        let id = stage.volume_id.as_str();
        world.node.node_stage_volume(stage.clone()).await.unwrap();
        let publish = world.publish_at(&stage, "pods/a");
        world.node.node_publish_volume(publish.clone()).await.unwrap();
        let ask = || NodeGetVolumeHealthRequest {
            volume_publish_path: publish.target_path.clone(),
            staging_target_path: stage.staging_target_path.clone(),
            ..on_node(id)
        };
        let health = world.node.node_get_volume_health(ask()).await.unwrap().into_inner();
        assert_eq!(reasons(&health.volume_health.unwrap()), []);
        let stats = || NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: stage.staging_target_path.clone(),
            ..Default::default()
        };
        let answer = world.node.node_get_volume_stats(stats()).await.unwrap().into_inner();
        assert!(!answer.volume_condition.unwrap().abnormal);
        let unmounted = Command::new("umount").arg("-l").arg(&publish.target_path).status();
        assert!(unmounted.unwrap().success());
        let health = world.node.node_get_volume_health(ask()).await.unwrap().into_inner();
        assert_eq!(reasons(&health.volume_health.unwrap()), [("MountMissing", 2)]);
        let answer = world.node.node_get_volume_stats(stats()).await.unwrap().into_inner();
        let condition = answer.volume_condition.unwrap();
        assert!(condition.abnormal && condition.message.contains("MountMissing"));
        world.cluster.degrade(id, NODE).await;
        let request = ControllerGetVolumeRequest { volume_id: id.to_owned() };
        let got = world.controller.controller_get_volume(request).await.unwrap().into_inner();
        let message = got.status.unwrap().volume_condition.unwrap().message;
        assert!(message.contains("ReplicaOffline") && !message.contains("Mount"), "{message}");
        let answer = world.node.node_get_volume_stats(stats()).await.unwrap().into_inner();
        let message = answer.volume_condition.unwrap().message;
        assert!(!message.contains("Replica"), "each side has its own view: {message}");
        let _ = Command::new("umount").arg("-l").arg(&stage.staging_target_path).status();
        world.attacher.detach_all();
        let mut found = Vec::new();
        for _ in 0..100 {
            let health = world.node.node_get_volume_health(ask()).await.unwrap().into_inner();
            found = health.volume_health.unwrap().health_statuses;
            if found.iter().any(|one| one.reason == "DeviceMissing") {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert!(found.iter().any(|one| one.reason == "DeviceMissing" && one.status == 2));
    }
}

/// A file system on a path whose server never answers: each question to it waits until this is
/// dropped.
struct Hanging {
    path: String,
    server: Option<std::fs::File>,
}

impl Hanging {
    fn over(path: &str) -> Self {
        let server = std::fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("hanging", path, "fuse", flags, Some(options.as_c_str())).unwrap();
        Self { path: path.to_owned(), server: Some(server) }
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // Its end answers the questions that wait.
        self.server = None;
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// Proves CSIN-HEALTH-21: of a file system that hangs, and of an attach process that does.
#[tokio::test]
async fn health_is_told_in_time_of_a_mount_and_of_a_session_that_hang() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let ask = || {
        let mut request = tonic::Request::new(on_node(&stage.volume_id));
        request.set_timeout(std::time::Duration::from_secs(15));
        request
    };
    let is_told = |answer: NodeGetVolumeHealthResponse, reason: &str| {
        let health = answer.volume_health.unwrap();
        let inaccessible = VolumeHealthErrorType::Inaccessible as i32;
        assert!(reasons(&health).contains(&(reason, inaccessible)), "{health:?}");
    };
    let hanging = Hanging::over(&stage.staging_target_path);
    for _ in 0..3 {
        let answer = world.node.node_get_volume_health(ask()).await.unwrap();
        is_told(answer.into_inner(), "MountHangs");
    }
    drop(hanging);
    world.attacher.is_silent.store(true, Ordering::Relaxed);
    let answer = world.node.node_get_volume_health(ask()).await.unwrap();
    is_told(answer.into_inner(), "AttachProcessAway");
    world.attacher.is_silent.store(false, Ordering::Relaxed);
    let health = loop {
        let answer = world.node.node_get_volume_health(ask()).await.unwrap().into_inner();
        let health = answer.volume_health.unwrap();
        // The last question to the file system comes back a moment after its end.
        if !reasons(&health).iter().any(|(reason, _)| *reason == "MountHangs") {
            break health;
        }
    };
    assert_eq!(reasons(&health), []);
}

/// Proves CSIN-HEALTH-22, CSIN-HEALTH-23: a node that reaches no pool.
#[tokio::test]
async fn a_node_that_reaches_no_pool_reports_its_storage_as_unreachable() {
    let mut world = World::start().await;
    let ask = NodeGetStorageHealthRequest::default;
    let statuses = |answer: NodeGetStorageHealthResponse| {
        let all = answer.backend_health.into_iter();
        all.map(|one| (one.reason, one.status)).collect::<Vec<_>>()
    };
    let answer = world.node.node_get_storage_health(ask()).await.unwrap().into_inner();
    assert_eq!(statuses(answer), [("NoPoolReached".to_owned(), 2)]);
    world.stop_control().await;
    let answer = world.node.node_get_storage_health(ask()).await.unwrap().into_inner();
    assert_eq!(
        statuses(answer),
        [("NoPoolReached".to_owned(), 2), ("ControllerUnreachable".to_owned(), 1)]
    );
    world.restart_plugin().await;
    let answer = world.node.node_get_storage_health(ask()).await;
    assert_eq!(code(&answer), Code::Unavailable, "it knows of no pool, and asks nobody");
}
