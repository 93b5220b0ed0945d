//! The Node service over a real socket, with real mounts on loop devices.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::sync::atomic::Ordering;

use crate::common::*;
use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::volume_capability::{AccessType, MountVolume};
use quoin_api::csi::volume_usage::Unit;
use quoin_api::csi::*;
use tonic::Code;

fn unstage_of(stage: &NodeStageVolumeRequest) -> NodeUnstageVolumeRequest {
    NodeUnstageVolumeRequest {
        volume_id: stage.volume_id.clone(),
        staging_target_path: stage.staging_target_path.clone(),
    }
}
fn unpublish_of(publish: &NodePublishVolumeRequest) -> NodeUnpublishVolumeRequest {
    NodeUnpublishVolumeRequest {
        volume_id: publish.volume_id.clone(),
        target_path: publish.target_path.clone(),
    }
}
fn stats_of(volume_id: &str, volume_path: &str) -> NodeGetVolumeStatsRequest {
    NodeGetVolumeStatsRequest {
        volume_id: volume_id.to_owned(),
        volume_path: volume_path.to_owned(),
        ..Default::default()
    }
}

/// Proves CSI-NODESTAGE-01, CSI-NODESTAGE-02, CSI-NODESTAGE-05, CSI-NODEUNSTAGE-05, CSI-NODEPUBLISH-01,
/// CSI-NODEPUBLISH-03, CSI-NODEPUBLISH-30, CSI-NODEPUBLISH-31, CSI-INTERACT-10,
/// CSI-INTERACT-11, CSI-NODEUNPUBLISH-01, CSI-NODEUNPUBLISH-03, CSI-NODEUNPUBLISH-07,
/// CSI-NODEUNSTAGE-01, CSI-NODEUNSTAGE-02, CSI-NODEUNSTAGE-07, CSI-NODEPUBLISH-43,
/// CSI-NODEPUBLISH-21, CSI-CTRLCAPS-19, CSI-NODEPUBLISH-39.
#[tokio::test]
async fn a_mounted_volume_passes_all_steps_forth_and_back_twice() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    let publish = world.publish_at(&stage, "pods/a");
    for round in 0..2 {
        let early = world.node.node_publish_volume(publish.clone()).await;
        assert_eq!(code(&early), Code::FailedPrecondition, "not staged");
        for _ in 0..2 {
            world.node.node_stage_volume(stage.clone()).await.unwrap();
            assert_eq!(world.mounts().len(), 1);
        }
        let unset =
            NodePublishVolumeRequest { staging_target_path: String::new(), ..publish.clone() };
        let answer = world.node.node_publish_volume(unset).await;
        assert_eq!(code(&answer), Code::FailedPrecondition);
        for _ in 0..2 {
            world.node.node_publish_volume(publish.clone()).await.unwrap();
            assert_eq!(world.mounts().len(), 2);
        }
        let file = world.path("pods/a/greeting");
        if round == 0 {
            fs::write(&file, "hello").unwrap();
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "hello");
        let early = world.node.node_unstage_volume(unstage_of(&stage)).await;
        assert_eq!(code(&early), Code::FailedPrecondition, "still published");
        assert_eq!(fs::read_to_string(&file).unwrap(), "hello");
        for _ in 0..2 {
            world.node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
            assert!(!world.path("pods/a").exists());
        }
        for _ in 0..2 {
            world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
            world.assert_node_is_clean();
        }
    }
}

fn with_group(group: &str) -> VolumeCapability {
    let volume_mount_group = group.to_owned();
    let mount = MountVolume { volume_mount_group, ..MountVolume::default() };
    VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..writer() }
}

/// An orchestrator that sees the capability leaves the files to the node.
#[tokio::test]
async fn groups_of_files_are_no_capability_and_are_refused_unless_the_node_is_started_for_them() {
    use node_service_capability::{Type, rpc::Type as Kind};
    if !can_mount() {
        return;
    }
    let usual = quoin_csi::Options::new("node", "run", "controller", "socket");
    assert!(!usual.volume_mount_group);
    let mut world = World::start().await;
    let stage = world.published(with_group("4242")).await;
    let publish = world.publish_at(&stage, "pods/a");
    world.node.node_stage_volume(stage).await.unwrap();
    for gives_groups in [false, true] {
        world.restart_plugin_of(gives_groups).await;
        let answer = world.node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap();
        let capabilities = answer.into_inner().capabilities;
        let is_told = capabilities.iter().any(|one| match one.r#type.as_ref().unwrap() {
            Type::Rpc(rpc) => rpc.r#type() == Kind::VolumeMountGroup,
        });
        assert_eq!(is_told, gives_groups);
        let refused = world.node.node_publish_volume(publish.clone()).await.err();
        let way_out = refused.map(|status| status.message().contains("--volume-mount-group"));
        assert_eq!(way_out, (!gives_groups).then_some(true));
    }
}

/// Proves CSI-VOLCAP-06: the root belongs to the group and lets it write, and so does all below where the
/// root did not have that group yet.
#[tokio::test]
async fn a_mount_group_gets_all_files_of_a_writable_publication() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(with_group("4242")).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    fs::write(world.path("stage/own"), "x").unwrap();
    let root = || fs::metadata(world.path("stage")).unwrap();
    let before = (root().gid(), root().mode());
    let publish = world.publish_at(&stage, "pods/a");
    let mut node = world.node.clone();
    let read_only = NodePublishVolumeRequest { readonly: true, ..publish.clone() };
    node.node_publish_volume(read_only).await.unwrap();
    assert_eq!((root().gid(), root().mode()), before, "a reader changes nothing");
    node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
    for _ in 0..2 {
        node.node_publish_volume(publish.clone()).await.unwrap();
        assert_eq!(root().gid(), 4242);
        assert_eq!(root().permissions().mode() & 0o2070, 0o2070);
        // A repeat completes what a call that was cut off left.
        std::os::unix::fs::chown(world.path("stage"), None, Some(0)).unwrap();
    }
    let own = fs::metadata(world.path("stage/own")).unwrap();
    assert_eq!((own.gid(), own.mode() & 0o060), (4242, 0o060));
    let wrong = NodePublishVolumeRequest {
        volume_capability: Some(with_group("staff")),
        ..publish.clone()
    };
    assert_eq!(code(&node.node_publish_volume(wrong).await), Code::InvalidArgument);
}

/// Proves CSI-NODEPUBLISH-29, CSI-NODEPUBLISH-36: for block access.
#[tokio::test]
async fn a_read_only_block_volume_is_a_device_that_refuses_writes() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(block_capability(AccessMode::SingleNodeWriter)).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let publish = world.publish_at(&stage, "pods/disk");
    let target = world.path("pods/disk");
    let write = || -> std::io::Result<()> {
        use std::os::unix::fs::FileExt;
        let device = fs::File::options().write(true).open(&target)?;
        device.write_all_at(&[7; 4096], 0)?;
        device.sync_all()
    };
    for readonly in [false, true] {
        let publish = NodePublishVolumeRequest { readonly, ..publish.clone() };
        world.node.node_publish_volume(publish.clone()).await.unwrap();
        assert!(fs::metadata(&target).unwrap().file_type().is_block_device());
        assert_eq!(write().is_err(), readonly);
        world.node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
        assert!(!target.exists());
    }
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
}

/// Proves CSI-NODEPUBLISH-36, CSI-ACCESSMODE-03: for mount access.
#[tokio::test]
async fn read_only_use_and_mount_flags_show_in_the_mount() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let with_flags = VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            fs_type: "xfs".into(),
            mount_flags: vec!["noatime".into()],
            volume_mount_group: String::new(),
        })),
        ..writer()
    };
    let volume = {
        let request = create("db", 400 * MIB);
        world.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap()
    };
    let ask = |capability: &VolumeCapability| ControllerPublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        node_id: NODE.into(),
        volume_capability: Some(capability.clone()),
        ..Default::default()
    };
    world.controller.controller_publish_volume(ask(&with_flags)).await.unwrap();
    let stage = NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: world.text("stage"),
        volume_capability: Some(with_flags),
        ..Default::default()
    };
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    assert!(world.mounts()[0].options.contains(&"noatime".to_owned()));
    assert_eq!(world.mounts()[0].fs_type, "xfs");
    let publish = NodePublishVolumeRequest { readonly: true, ..world.publish_at(&stage, "pods/a") };
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    let refused = fs::write(world.path("pods/a/x"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    world.node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    let all = ControllerUnpublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        ..Default::default()
    };
    world.controller.controller_unpublish_volume(all).await.unwrap();

    // The reader-only mode needs no readonly flag anywhere.
    let reader = mount_capability("xfs", AccessMode::SingleNodeReaderOnly);
    world.controller.controller_publish_volume(ask(&reader)).await.unwrap();
    let stage = NodeStageVolumeRequest { volume_capability: Some(reader), ..stage };
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let publish = world.publish_at(&stage, "pods/b");
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    for path in ["stage/x", "pods/b/x"] {
        assert!(fs::write(world.path(path), "x").is_err(), "{path}");
    }
    world.node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
}

/// Of several nodes that are to mount a file system read-only, the first one replays its journal.
#[tokio::test]
async fn nobody_mounts_a_file_system_before_its_journal_is_replayed_by_one_of_its_readers() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let written = world.published(writer()).await;
    world.node.node_stage_volume(written.clone()).await.unwrap();
    world.node.node_unstage_volume(unstage_of(&written)).await.unwrap();
    let everywhere = ControllerUnpublishVolumeRequest {
        volume_id: written.volume_id.clone(),
        ..Default::default()
    };
    world.controller.controller_unpublish_volume(everywhere.clone()).await.unwrap();

    let reader = mount_capability("ext4", AccessMode::MultiNodeReaderOnly);
    for node in [control::OTHER_NODE, NODE] {
        let publish = ControllerPublishVolumeRequest {
            volume_id: written.volume_id.clone(),
            node_id: node.to_owned(),
            volume_capability: Some(reader.clone()),
            ..Default::default()
        };
        for _ in 0..2 {
            world.controller.controller_publish_volume(publish.clone()).await.unwrap();
        }
    }
    let stage = NodeStageVolumeRequest { volume_capability: Some(reader), ..written };
    let refused = world.node.node_stage_volume(stage.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains(control::OTHER_NODE), "{refused}");
    world.assert_node_is_clean();

    // The node that was to do it leaves, and this one takes its place.
    let leaves =
        ControllerUnpublishVolumeRequest { node_id: control::OTHER_NODE.to_owned(), ..everywhere };
    world.controller.controller_unpublish_volume(leaves).await.unwrap();
    let replays = async |world: &World| world.cluster.volumes().await[0].attachments[0].replays;
    assert!(replays(&world).await);
    for _ in 0..2 {
        world.node.node_stage_volume(stage.clone()).await.unwrap();
        assert!(!replays(&world).await, "it may write no more");
    }
    assert!(fs::write(world.path("stage/x"), "x").is_err());
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
}

/// Proves CSI-NODESTAGE-08, CSI-NODESTAGE-10, CSI-NODESTAGE-11, CSI-NODESTAGE-13,
/// CSI-NODESTAGE-16, CSI-NODESTAGE-17, CSI-NODESTAGE-19, CSI-NODESTAGE-21, CSI-NODESTAGE-22,
/// CSI-NODESTAGE-23, CSI-NODESTAGE-24.
#[tokio::test]
async fn a_wrong_stage_request_is_refused_with_its_code_and_changes_nothing() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let good = world.published(writer()).await;
    fs::write(world.path("file"), "kept").unwrap();
    let mut bad = vec![
        (
            NodeStageVolumeRequest { volume_id: String::new(), ..good.clone() },
            Code::InvalidArgument,
        ),
        (NodeStageVolumeRequest { volume_id: UNKNOWN.into(), ..good.clone() }, Code::NotFound),
    ];
    for path in ["", "stage", "./stage", &world.text("file")] {
        let request = NodeStageVolumeRequest { staging_target_path: path.into(), ..good.clone() };
        bad.push((request, Code::InvalidArgument));
    }
    for volume_capability in malformed() {
        let request = NodeStageVolumeRequest { volume_capability, ..good.clone() };
        bad.push((request, Code::InvalidArgument));
    }
    for unsupported in [
        mount_capability("ext4", AccessMode::MultiNodeMultiWriter),
        mount_capability("btrfs", AccessMode::SingleNodeWriter),
    ] {
        let volume_capability = Some(unsupported);
        let request = NodeStageVolumeRequest { volume_capability, ..good.clone() };
        bad.push((request, Code::FailedPrecondition));
    }
    let volume_context = good.volume_context.keys().map(|key| (key.clone(), "x".into())).collect();
    bad.push((NodeStageVolumeRequest { volume_context, ..good.clone() }, Code::InvalidArgument));
    for (index, (request, expected)) in bad.into_iter().enumerate() {
        let answer = world.node.node_stage_volume(request).await;
        assert_eq!(code(&answer), expected, "request {index}");
    }
    world.assert_node_is_clean();
    assert_eq!(fs::read_to_string(world.path("file")).unwrap(), "kept");

    world.node.node_stage_volume(good.clone()).await.unwrap();
    let volume_capability = Some(block_capability(AccessMode::SingleNodeWriter));
    let other = NodeStageVolumeRequest { volume_capability, ..good.clone() };
    assert_eq!(code(&world.node.node_stage_volume(other).await), Code::AlreadyExists);
    fs::create_dir(world.path("elsewhere")).unwrap();
    let other_request =
        NodeStageVolumeRequest { staging_target_path: world.text("elsewhere"), ..good };
    let answer = world.node.node_stage_volume(other_request).await;
    assert_eq!(code(&answer), Code::FailedPrecondition);
    assert_eq!(world.attacher.made.load(Ordering::Relaxed), 1, "no second device");
    assert_eq!(world.mounts().len(), 1);
}

/// Proves CSI-NODEPUBLISH-22, CSI-NODEPUBLISH-24, CSI-NODEPUBLISH-27, CSI-NODEPUBLISH-32,
/// CSI-NODEPUBLISH-34, CSI-NODEPUBLISH-35, CSI-NODEPUBLISH-38, CSI-NODEPUBLISH-40,
/// CSI-NODEPUBLISH-41, CSI-NODEPUBLISH-42, CSI-ACCESSMODE-07.
#[tokio::test]
async fn a_wrong_publish_request_is_refused_with_its_code_and_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let capability = mount_capability("ext4", AccessMode::SingleNodeSingleWriter);
    let stage = world.published(capability).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let good = world.publish_at(&stage, "pods/a");
    let mut bad = vec![
        (
            NodePublishVolumeRequest { volume_id: String::new(), ..good.clone() },
            Code::InvalidArgument,
        ),
        (NodePublishVolumeRequest { volume_id: UNKNOWN.into(), ..good.clone() }, Code::NotFound),
        (
            NodePublishVolumeRequest { staging_target_path: "stage".into(), ..good.clone() },
            Code::InvalidArgument,
        ),
    ];
    for path in ["", "pods/a"] {
        let request = NodePublishVolumeRequest { target_path: path.into(), ..good.clone() };
        bad.push((request, Code::InvalidArgument));
    }
    for volume_capability in malformed() {
        let request = NodePublishVolumeRequest { volume_capability, ..good.clone() };
        bad.push((request, Code::InvalidArgument));
    }
    for unsupported in [
        mount_capability("ext4", AccessMode::MultiNodeMultiWriter),
        mount_capability("btrfs", AccessMode::SingleNodeSingleWriter),
    ] {
        let volume_capability = Some(unsupported);
        let request = NodePublishVolumeRequest { volume_capability, ..good.clone() };
        bad.push((request, Code::FailedPrecondition));
    }
    let volume_context = good.volume_context.keys().map(|key| (key.clone(), "x".into())).collect();
    let request = NodePublishVolumeRequest { volume_context, ..good.clone() };
    bad.push((request, Code::InvalidArgument));
    for (index, (request, expected)) in bad.into_iter().enumerate() {
        let answer = world.node.node_publish_volume(request).await;
        assert_eq!(code(&answer), expected, "request {index}");
        assert!(!world.path("pods/a").exists(), "request {index}");
    }
    world.node.node_publish_volume(good.clone()).await.unwrap();
    let other = NodePublishVolumeRequest { readonly: true, ..good.clone() };
    assert_eq!(code(&world.node.node_publish_volume(other).await), Code::AlreadyExists);
    let volume_capability = Some(mount_capability("ext4", AccessMode::SingleNodeWriter));
    let other = NodePublishVolumeRequest { volume_capability, ..good.clone() };
    assert_eq!(code(&world.node.node_publish_volume(other).await), Code::AlreadyExists);
    let second = world.publish_at(&stage, "pods/b");
    let answer = world.node.node_publish_volume(second).await;
    assert_eq!(code(&answer), Code::FailedPrecondition);
    fs::write(world.path("pods/a/x"), "the first publication stays").unwrap();
    assert_eq!(world.mounts().len(), 2);
}

/// Proves CSI-ACCESSMODE-08, CSI-NODECAPS-07: several targets, one node.
#[tokio::test]
async fn several_targets_of_one_node_share_a_multi_writer_volume() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let capability = mount_capability("ext4", AccessMode::SingleNodeMultiWriter);
    let stage = world.published(capability.clone()).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let (one, two) = (world.publish_at(&stage, "pods/a"), world.publish_at(&stage, "pods/b"));
    let two = NodePublishVolumeRequest { readonly: true, ..two };
    for request in [&one, &two] {
        world.node.node_publish_volume(request.clone()).await.unwrap();
    }
    fs::write(world.path("pods/a/x"), "shared").unwrap();
    assert_eq!(fs::read_to_string(world.path("pods/b/x")).unwrap(), "shared");
    assert!(fs::write(world.path("pods/b/y"), "y").is_err(), "each with its own arguments");
    let other_request = ControllerPublishVolumeRequest {
        volume_id: stage.volume_id.clone(),
        node_id: "node-b".into(),
        volume_capability: Some(capability),
        ..Default::default()
    };
    let answer = world.controller.controller_publish_volume(other_request).await;
    assert_eq!(code(&answer), Code::FailedPrecondition);
    for request in [&one, &two] {
        world.node.node_unpublish_volume(unpublish_of(request)).await.unwrap();
    }
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
}

/// Proves CSI-NODEUNSTAGE-08, CSI-NODEUNSTAGE-09, CSI-NODEUNSTAGE-10, CSI-NODEUNSTAGE-13,
/// CSI-NODEUNPUBLISH-05, CSI-NODEUNPUBLISH-06, CSI-NODEUNPUBLISH-08, CSI-NODEUNPUBLISH-11.
#[tokio::test]
async fn the_code_for_an_absent_mount_depends_on_whether_the_volume_exists() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let id = world.create("db", 64 * MIB).await.volume_id;
    let long = format!("/{}", "x".repeat(127));
    let cases = [
        (id.clone(), world.text("stage"), Code::Ok),
        (id.clone(), world.text("never/was"), Code::Ok),
        (id.clone(), long, Code::Ok),
        (UNKNOWN.to_owned(), world.text("pods/a"), Code::NotFound),
        (String::new(), world.text("stage"), Code::InvalidArgument),
        (id.clone(), String::new(), Code::InvalidArgument),
        (id.clone(), "stage".to_owned(), Code::InvalidArgument),
    ];
    for (volume_id, path, expected) in cases.clone() {
        let request = NodeUnstageVolumeRequest {
            volume_id: volume_id.clone(),
            staging_target_path: path.clone(),
        };
        let answer = world.node.node_unstage_volume(request).await;
        assert_eq!(code(&answer), expected, "unstage {volume_id} {path}");
    }
    for (volume_id, path, expected) in cases {
        let request = NodeUnpublishVolumeRequest {
            volume_id: volume_id.clone(),
            target_path: path.replace("stage", "pods/a"),
        };
        let answer = world.node.node_unpublish_volume(request).await;
        let expected = if path == "stage" { Code::InvalidArgument } else { expected };
        assert_eq!(code(&answer), expected, "unpublish {volume_id} {path}");
    }
    // No look-up is possible: unstaging is better than hanging.
    world.stop_control().await;
    let request = NodeUnstageVolumeRequest {
        volume_id: "0".repeat(32),
        staging_target_path: world.text("stage"),
    };
    assert_eq!(code(&world.node.node_unstage_volume(request).await), Code::Ok);
}

/// Proves CSI-NODESTATS-01, CSI-NODESTATS-05, CSI-NODESTATS-07, CSI-NODESTATS-08,
/// CSI-NODESTATS-10, CSI-NODESTATS-13, CSI-NODESTATS-14, CSI-NODESTATS-15, CSI-NODESTATS-16,
/// CSI-NODESTATS-17, CSI-NODESTATS-19, CSI-NODECAPS-04.
#[tokio::test]
async fn statistics_are_returned_only_for_the_paths_of_a_volume() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let publish = world.publish_at(&stage, "pods/a");
    world.node.node_publish_volume(publish).await.unwrap();
    let id = stage.volume_id.as_str();
    for path in ["stage", "pods/a"] {
        let request = stats_of(id, &world.text(path));
        let answer = world.node.node_get_volume_stats(request).await.unwrap().into_inner();
        let units: Vec<_> = answer.usage.iter().map(VolumeUsage::unit).collect();
        assert_eq!(units, [Unit::Bytes, Unit::Inodes]);
        for usage in &answer.usage {
            assert!(usage.total > 0 && usage.used >= 0 && usage.available >= 0, "{usage:?}");
            assert!(usage.used + usage.available <= usage.total);
        }
        let condition = answer.volume_condition.unwrap();
        assert!(!condition.abnormal && !condition.message.is_empty());
    }
    let stage_path = world.text("stage");
    let relative =
        NodeGetVolumeStatsRequest { staging_target_path: "x".into(), ..stats_of(id, &stage_path) };
    for (request, expected) in [
        (stats_of("", &stage_path), Code::InvalidArgument),
        (stats_of(id, ""), Code::InvalidArgument),
        (relative, Code::InvalidArgument),
        (stats_of(id, "some/path"), Code::NotFound),
        (stats_of(UNKNOWN, "some/path"), Code::NotFound),
        (stats_of(UNKNOWN, &stage_path), Code::NotFound),
        (stats_of(id, &world.text("pods")), Code::NotFound),
    ] {
        assert_eq!(code(&world.node.node_get_volume_stats(request).await), expected);
    }
}

/// Proves CSI-NODEEXPAND-01, CSI-NODEEXPAND-02, CSI-NODEEXPAND-10, CSI-NODEEXPAND-11,
/// CSI-NODEEXPAND-14, CSI-NODEEXPAND-20, CSI-NODEEXPAND-21, CSI-NODEEXPAND-23.
#[tokio::test]
async fn a_volume_in_use_grows_on_its_node_after_the_controller_grew_it() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = {
        // XFS grows without CAP_SYS_RESOURCE, which containers often lack.
        let capability = mount_capability("xfs", AccessMode::SingleNodeWriter);
        let volume = world.create("db", 400 * MIB).await;
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            node_id: NODE.into(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        world.controller.controller_publish_volume(request).await.unwrap();
        NodeStageVolumeRequest {
            volume_id: volume.volume_id,
            staging_target_path: world.text("stage"),
            volume_capability: Some(capability),
            ..Default::default()
        }
    };
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let id = stage.volume_id.clone();
    let good = || NodeExpandVolumeRequest {
        volume_id: id.clone(),
        volume_path: stage.staging_target_path.clone(),
        capacity_range: Some(range(800 * MIB, 0)),
        ..Default::default()
    };
    let early = world.node.node_expand_volume(good()).await;
    assert_eq!(code(&early), Code::OutOfRange, "the controller must grow the volume first");
    let request = ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(range(800 * MIB, 0)),
        ..Default::default()
    };
    world.controller.controller_expand_volume(request).await.unwrap();
    for _ in 0..2 {
        let answer = world.node.node_expand_volume(good()).await.unwrap().into_inner();
        assert_eq!(answer.capacity_bytes, 800 * MIB);
    }
    let request = stats_of(&id, &stage.staging_target_path);
    let stats = world.node.node_get_volume_stats(request).await.unwrap().into_inner();
    assert!(stats.usage[0].total > 700 * MIB);
    let multi = Some(mount_capability("ext4", AccessMode::MultiNodeMultiWriter));
    for (request, expected) in [
        (NodeExpandVolumeRequest { volume_id: String::new(), ..good() }, Code::InvalidArgument),
        (NodeExpandVolumeRequest { volume_path: String::new(), ..good() }, Code::InvalidArgument),
        (
            NodeExpandVolumeRequest { staging_target_path: "x".into(), ..good() },
            Code::InvalidArgument,
        ),
        (NodeExpandVolumeRequest { volume_capability: multi, ..good() }, Code::InvalidArgument),
        (NodeExpandVolumeRequest { volume_id: UNKNOWN.into(), ..good() }, Code::NotFound),
        (
            NodeExpandVolumeRequest {
                volume_id: UNKNOWN.into(),
                volume_path: "x/y".into(),
                ..good()
            },
            Code::NotFound,
        ),
        (NodeExpandVolumeRequest { volume_path: world.text("pods"), ..good() }, Code::NotFound),
        (
            NodeExpandVolumeRequest { capacity_range: Some(range(0, MIB)), ..good() },
            Code::OutOfRange,
        ),
    ] {
        assert_eq!(code(&world.node.node_expand_volume(request).await), expected);
    }
}

/// Proves CSI-SIZE-04, CSI-NODESTAGE-15, CSI-NODEPUBLISH-26, CSI-NODEPUBLISH-33,
/// CSI-NODEUNSTAGE-11, CSI-NODEUNPUBLISH-09, CSI-NODESTATS-09, CSI-NODESTATS-11,
/// CSI-NODEEXPAND-12, CSI-NODEEXPAND-15.
#[tokio::test]
async fn paths_far_longer_than_a_string_work_everywhere() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let deep = format!("deep/{}", vec!["d".repeat(200); 5].join("/"));
    fs::create_dir_all(world.path(&deep)).unwrap();
    let staging = format!("{deep}/stage");
    fs::create_dir(world.path(&staging)).unwrap();
    let stage = NodeStageVolumeRequest {
        staging_target_path: world.text(&staging),
        ..world.published(writer()).await
    };
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let publish = world.publish_at(&stage, &format!("{deep}/target"));
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    let staging_target_path = stage.staging_target_path.clone();
    let request = NodeGetVolumeStatsRequest {
        staging_target_path: staging_target_path.clone(),
        ..stats_of(&stage.volume_id, &publish.target_path)
    };
    world.node.node_get_volume_stats(request).await.unwrap();
    let request = NodeExpandVolumeRequest {
        volume_id: stage.volume_id.clone(),
        volume_path: publish.target_path.clone(),
        staging_target_path,
        ..Default::default()
    };
    world.node.node_expand_volume(request).await.unwrap();
    world.node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
}

#[tokio::test]
async fn mounts_survive_the_plugin_and_the_next_one_unpublishes_them() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    let publish = world.publish_at(&stage, "pods/a");
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    world.restart_plugin().await;
    fs::write(world.path("pods/a/x"), "still there").unwrap();
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    assert_eq!(world.mounts().len(), 2);
    world.node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
}

#[tokio::test]
async fn a_staged_volume_is_published_and_unpublished_without_the_control_plane() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    let publish = world.publish_at(&stage, "pods/a");
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    world.stop_control().await;
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    fs::write(world.path("pods/a/x"), "x").unwrap();
    world.node.node_unpublish_volume(unpublish_of(&publish)).await.unwrap();
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
    let answer = world.node.node_stage_volume(stage).await;
    assert_eq!(code(&answer), Code::Unavailable, "a new staging needs a lookup at the controller");
}

/// Proves CSI-ERR-12: the refusal names what the call under way waits for, and the caller whose time is
/// over gets the same instead of a status of its own library's making.
#[tokio::test]
async fn a_call_that_is_not_answered_in_time_and_one_beside_it_say_what_is_waited_for() {
    use std::sync::atomic::Ordering;
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    world.attacher.is_stuck.store(true, Ordering::Relaxed);
    let mut request = tonic::Request::new(stage.clone());
    // The header alone: the client library would end the call at the same moment.
    request.metadata_mut().insert("grpc-timeout", "3S".parse().unwrap());
    let late = world.node.node_stage_volume(request).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    for part in ["NodeStageVolume", &stage.volume_id, "goes on", "staging is at \"attaching"] {
        assert!(late.message().contains(part), "{part}: {late}");
    }
    let beside = world.node.node_stage_volume(stage.clone()).await.unwrap_err();
    assert_eq!(beside.code(), Code::Aborted);
    assert!(beside.message().contains("staging is at \"attaching"), "{beside}");
    world.attacher.is_stuck.store(false, Ordering::Relaxed);
    while code(&world.node.node_stage_volume(stage.clone()).await) == Code::Aborted {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    world.node.node_unstage_volume(unstage_of(&stage)).await.unwrap();
    world.assert_node_is_clean();
}
