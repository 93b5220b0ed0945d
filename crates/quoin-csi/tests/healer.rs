//! NodeHealer over both sockets, with real mounts on loop devices.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_lc_rs::digest;
use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::*;
use quoin_api::csi_addons::healer::healer_node_client::HealerNodeClient;
use quoin_api::csi_addons::healer::{NodeHealerRequest, NodeHealerResponse};
use quoin_csi::{Callers, Mode};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::common::*;

impl World {
    /// Returns both sockets on which the healer is served.
    fn sockets(&self) -> [Channel; 2] {
        [self.channel.clone(), self.addons.clone()]
    }

    /// Heals by the socket of CSI-Addons.
    async fn heal(&self, request: NodeHealerRequest) -> NodeHealerResponse {
        heal(&self.addons, request).await.unwrap().into_inner()
    }
}

async fn heal(
    channel: &Channel,
    request: NodeHealerRequest,
) -> Result<Response<NodeHealerResponse>, Status> {
    HealerNodeClient::new(channel.clone()).node_healer(request).await
}

/// Returns a call as a sidecar makes it for a staged volume.
fn request(stage: &NodeStageVolumeRequest, path: &str) -> NodeHealerRequest {
    NodeHealerRequest {
        volume_id: stage.volume_id.clone(),
        volume_path: path.to_owned(),
        staging_target_path: stage.staging_target_path.clone(),
        volume_capability: stage.volume_capability.clone(),
        volume_context: stage.volume_context.clone(),
        ..Default::default()
    }
}

/// Asserts that a volume is well. The target of these tests opens nothing, and after some seconds the
/// controller says so.
#[track_caller]
fn assert_well(told: &NodeHealerResponse) {
    assert!(!told.abnormal || told.message.starts_with("NotOpened: "), "{told:?}");
}

/// A process that has a file open until it is dropped.
struct User(Child);

impl User {
    fn of(path: &str) -> Self {
        let mut child = Command::new("sh")
            .args(["-c", "exec 3<\"$0\" && echo open && exec sleep 600"])
            .arg(path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = [0; 5];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut told).unwrap();
        Self(child)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn unmount(path: &str) {
    assert!(Command::new("umount").arg("-l").arg(path).status().unwrap().success(), "{path}");
}

fn sync(path: &str) {
    fs::File::open(path).unwrap().sync_all().unwrap();
}

/// Proves HEAL-GENERAL-03, HEAL-GENERAL-04, HEAL-REQ-01, HEAL-REQ-02, HEAL-REQ-04, HEAL-REQ-06,
/// HEAL-REQ-07, HEAL-REQ-11, HEAL-REQ-12, HEAL-ERR-01, HEAL-ERR-02, HEAL-ERR-08.
#[tokio::test]
async fn each_wrong_call_has_its_code_on_both_sockets() {
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    let good = request(&stage, &stage.staging_target_path);
    let with = |change: &dyn Fn(&mut NodeHealerRequest)| {
        let mut request = good.clone();
        change(&mut request);
        request
    };
    let changed: std::collections::HashMap<_, _> =
        stage.volume_context.keys().map(|key| (key.clone(), "other".to_owned())).collect();
    let rows = [
        ("no volume_id", with(&|one| one.volume_id.clear()), Code::InvalidArgument),
        ("no volume_path", with(&|one| one.volume_path.clear()), Code::InvalidArgument),
        ("relative", with(&|one| one.volume_path = "pods/a".into()), Code::InvalidArgument),
        (
            "relative staging",
            with(&|one| one.staging_target_path = "stage".into()),
            Code::InvalidArgument,
        ),
        (
            "no access type",
            with(&|one| one.volume_capability.as_mut().unwrap().access_type = None),
            Code::InvalidArgument,
        ),
        ("other context", with(&|one| one.volume_context = changed.clone()), Code::InvalidArgument),
        (
            "a secret's key with a space",
            with(&|one| one.secrets = map(&[("a b", "c")])),
            Code::InvalidArgument,
        ),
        ("unknown", with(&|one| one.volume_id = UNKNOWN.into()), Code::NotFound),
        ("a known one that is not here", good.clone(), Code::NotFound),
        (
            "a path of 128 bytes",
            with(&|one| one.volume_path = format!("/{}", "x".repeat(127))),
            Code::NotFound,
        ),
        (
            "paths as long as the system allows",
            with(&|one| {
                one.volume_path = "/x".repeat(2047);
                one.staging_target_path = "/y".repeat(2047);
            }),
            Code::NotFound,
        ),
    ];
    for channel in world.sockets() {
        for (what, request, expected) in &rows {
            assert_eq!(code(&heal(&channel, request.clone()).await), *expected, "{what}");
        }
    }
    // A record that cannot be read fits no row of the table.
    fs::write(world.path("state/volumes").join(format!("{}.json", stage.volume_id)), "{").unwrap();
    for channel in world.sockets() {
        let failed = heal(&channel, good.clone()).await;
        assert_eq!(code(&failed), Code::Unknown);
        assert!(failed.unwrap_err().message().contains("move it away"));
    }
    fs::remove_dir_all(world.path("state/volumes")).unwrap();
}

/// Proves HEAL-ERR-03: of both sockets, before any argument is read.
#[tokio::test]
async fn a_process_without_the_node_heals_nothing() {
    let world = World::start_in(Mode::CONTROLLER).await;
    for channel in world.sockets() {
        let answer = heal(&channel, NodeHealerRequest::default()).await;
        assert_eq!(code(&answer), Code::Unimplemented);
    }
}

/// Proves HEAL-RESP-01, HEAL-RESP-02, HEAL-RESP-03, HEAL-ERR-10: a mounted and a block volume; lost mounts, a lost device, one of an
/// earlier use, and a replica that lags.
#[tokio::test]
async fn what_was_lost_of_a_volume_is_made_again_with_its_data_and_nothing_else_is_touched() {
    if !can_mount() {
        return;
    }
    for capability in [writer(), block_capability(AccessMode::SingleNodeWriter)] {
        let is_block = capability == block_capability(AccessMode::SingleNodeWriter);
        let mut world = World::start().await;
        let stage = world.published(capability).await;
        world.node.node_stage_volume(stage.clone()).await.unwrap();
        let publish = world.publish_at(&stage, "pods/a");
        world.node.node_publish_volume(publish.clone()).await.unwrap();
        let (staged, target) = (stage.staging_target_path.clone(), publish.target_path.clone());
        let write = |text: &str| match is_block {
            true => {
                let mut device = fs::File::options().write(true).open(&target).unwrap();
                device.write_all(text.as_bytes()).unwrap();
                device.sync_all().unwrap();
            }
            false => {
                fs::write(format!("{target}/file"), text).unwrap();
                sync(&format!("{target}/file"));
            }
        };
        let read = |bytes: usize| match is_block {
            true => {
                let mut text = vec![0; bytes];
                let mut device = fs::File::open(&target).unwrap();
                std::io::Read::read_exact(&mut device, &mut text).unwrap();
                String::from_utf8(text).unwrap()
            }
            false => fs::read_to_string(format!("{target}/file")).unwrap(),
        };
        write("kept");
        let before = world.mounts();

        // Without a fault nothing is done, whatever the optional fields are.
        for channel in world.sockets() {
            for path in [&staged, &target] {
                let full = request(&stage, path);
                let bare = NodeHealerRequest {
                    staging_target_path: String::new(),
                    volume_capability: None,
                    volume_context: Default::default(),
                    ..full.clone()
                };
                for one in [full, bare] {
                    let told = heal(&channel, one).await.unwrap().into_inner();
                    assert_well(&told);
                    assert!(!told.message.is_empty());
                }
            }
            let foreign = world.text("pods/other");
            for one in [
                request(&stage, &foreign),
                NodeHealerRequest {
                    staging_target_path: foreign.clone(),
                    ..request(&stage, &target)
                },
            ] {
                assert_eq!(code(&heal(&channel, one).await), Code::NotFound, "a foreign path");
            }
        }
        assert_eq!(world.mounts(), before, "no mount was touched");

        // The mount at the target is lost.
        unmount(&target);
        let told = world.heal(request(&stage, &target)).await;
        assert_well(&told);
        assert!(told.message.contains("bound"), "{told:?}");
        assert_eq!(read(4), "kept");

        // As a reboot leaves it: no mount, no device.
        unmount(&target);
        if !is_block {
            unmount(&staged);
        }
        world.attacher.detach_all();
        let made = world.attacher.made.load(Ordering::Relaxed);
        let told = world.heal(request(&stage, &target)).await;
        assert_well(&told);
        assert!(told.message.contains("device anew"), "{told:?}");
        assert_eq!(world.attacher.made.load(Ordering::Relaxed), made + 1, "one device");
        assert_eq!(read(4), "kept");

        // The device is of an earlier use: another node had the volume, and this one has it again.
        let user = User::of(&if is_block { target.clone() } else { format!("{target}/file") });
        *world.attacher.dead.lock().unwrap() = Some("served by node-b since epoch 31".into());
        let told = world.heal(request(&stage, &target)).await;
        assert!(told.abnormal && told.message.contains("DeviceDead"), "{told:?}");
        assert!(told.message.contains(") has it open"), "{told:?}");
        assert!(told.message.contains("restart the workload"), "the way out: {told:?}");
        assert_eq!(world.mounts().len(), before.len(), "a mount in use stays");
        drop(user);
        let told = world.heal(request(&stage, &target)).await;
        assert_well(&told);
        assert_eq!(world.mounts().len(), before.len());
        assert_eq!(read(4), "kept");
        write("more");
        assert_eq!(read(4), "more");
        if is_block {
            assert!(fs::metadata(&target).unwrap().file_type().is_block_device());
        }

        // A replica that lags is no fault of the node, and the volume is not at its best.
        world.cluster.degrade(&stage.volume_id, NODE).await;
        for channel in world.sockets() {
            let told = heal(&channel, request(&stage, &target)).await.unwrap().into_inner();
            assert!(told.abnormal && told.message.contains("ReplicaOffline"), "{told:?}");
        }

        // The orchestrator has taken it away: nothing is published or made behind its back.
        let unpublish = ControllerUnpublishVolumeRequest {
            volume_id: stage.volume_id.clone(),
            node_id: NODE.into(),
            ..Default::default()
        };
        world.controller.controller_unpublish_volume(unpublish).await.unwrap();
        unmount(&target);
        let left = world.mounts();
        let told = world.heal(request(&stage, &target)).await;
        assert!(told.abnormal && told.message.contains("NotPublishedHere"), "{told:?}");
        assert_eq!(world.mounts(), left);
        let asked =
            NodeGetVolumeHealthRequest { volume_id: stage.volume_id.clone(), ..Default::default() };
        let health = world.node.node_get_volume_health(asked).await.unwrap().into_inner();
        let health = health.volume_health.unwrap().health_statuses;
        assert_eq!(health[0].reason, "NotPublishedHere", "one judgement: {health:?}");
    }
}

/// Proves HEAL-RESP-01, HEAL-RESP-03: of an ext4 that the kernel stopped after an error.
#[tokio::test]
async fn a_file_system_that_turned_read_only_is_checked_and_mounted_anew_once_nobody_uses_it() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let publish = world.publish_at(&stage, "pods/a");
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    let target = publish.target_path;
    let file = format!("{target}/file");
    fs::write(&file, "kept").unwrap();
    sync(&file);
    let device = world.attacher.attached()[0].file_name().unwrap().to_owned();
    let trigger = Path::new("/sys/fs/ext4").join(device).join("trigger_fs_error");
    if fs::write(&trigger, "1").is_err() {
        quoin_testkit::skipped("needs trigger_fs_error of ext4");
        return;
    }
    let user = User::of(&file);
    let told = world.heal(request(&stage, &target)).await;
    assert!(told.abnormal && told.message.contains("TurnedReadOnly"), "{told:?}");
    assert!(told.message.contains(") has it open"), "{told:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept", "what could be read can be read");
    drop(user);
    // No controller is needed for that.
    world.stop_control().await;
    let told = world.heal(request(&stage, &target)).await;
    assert_well(&told);
    assert!(told.message.contains("checked and mounted"), "{told:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    fs::write(&file, "written").unwrap();
    sync(&file);
    // A new device needs it, and a volume of which nothing is known here cannot be judged.
    unmount(&target);
    unmount(&stage.staging_target_path);
    world.attacher.detach_all();
    let told = world.heal(request(&stage, &target)).await;
    assert!(told.abnormal && told.message.contains("controller"), "{told:?}");
    let unknown = NodeHealerRequest { volume_id: "0".repeat(32), ..request(&stage, &target) };
    assert_eq!(code(&heal(&world.addons, unknown).await), Code::Unavailable);
    world.start_control().await;
    let told = world.heal(request(&stage, &target)).await;
    assert_well(&told);
    assert_eq!(fs::read_to_string(&file).unwrap(), "written");
}

/// Parts that come back by themselves are in it too.
#[tokio::test]
async fn calls_for_one_volume_at_the_same_time_repair_once_and_a_part_that_comes_back_is_waited_for()
 {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let publish = world.publish_at(&stage, "pods/a");
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    let target = publish.target_path;
    fs::write(format!("{target}/file"), "kept").unwrap();
    sync(&format!("{target}/file"));
    unmount(&target);
    unmount(&stage.staging_target_path);
    world.attacher.detach_all();
    let made = world.attacher.made.load(Ordering::Relaxed);
    world.attacher.is_stuck.store(true, Ordering::Relaxed);
    let mut calls = tokio::task::JoinSet::new();
    for channel in world.sockets() {
        let request = request(&stage, &target);
        calls.spawn(async move { heal(&channel, request).await });
    }
    // One of them holds the volume for as long as no device can be made.
    let refused = calls.join_next().await.unwrap().unwrap();
    assert_eq!(code(&refused), Code::Aborted);
    let refused = refused.unwrap_err();
    assert!(refused.message().contains("in progress"), "{refused}");
    let staging = world.node.node_stage_volume(stage.clone()).await;
    assert_eq!(code(&staging), Code::Aborted, "staging and healing share their turn");
    world.attacher.is_stuck.store(false, Ordering::Relaxed);
    let told = calls.join_next().await.unwrap().unwrap().unwrap().into_inner();
    assert_well(&told);
    assert_eq!(world.attacher.made.load(Ordering::Relaxed), made + 1);
    let calls = (0..8).map(|at| {
        let channel = world.sockets()[at % 2].clone();
        let request = request(&stage, &target);
        tokio::spawn(async move { heal(&channel, request).await })
    });
    let calls: Vec<_> = calls.collect();
    for call in calls {
        let answer = call.await.unwrap();
        assert!(matches!(code(&answer), Code::Ok | Code::Aborted));
    }
    assert_eq!(world.mounts().len(), 2, "no mount was dropped, and none made twice");
    assert_eq!(fs::read_to_string(format!("{target}/file")).unwrap(), "kept");

    // The attach process, and then the target, are away for a moment.
    let attacher = world.attacher.clone();
    for part in [&attacher.is_away, &attacher.is_cut_off] {
        part.store(true, Ordering::Relaxed);
        let back = tokio::time::sleep(Duration::from_millis(700));
        let (told, ()) = tokio::join!(world.heal(request(&stage, &target)), async {
            back.await;
            part.store(false, Ordering::Relaxed);
        });
        assert_well(&told);
        assert!(told.message.contains("waited for"), "{told:?}");
        assert_eq!(world.attacher.made.load(Ordering::Relaxed), made + 1, "no second device");
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Proves HEAL-REQ-11, HEAL-ERR-07, ADDONS-IDENTITY-12: of the healer's secrets.
#[tokio::test]
async fn a_caller_without_its_secret_heals_nothing_and_no_secret_is_in_the_log() {
    const KEY: &str = "correct horse battery";
    const OTHER: &str = "incorrect horse battery";
    const TOKEN: &str = "a token of a caller";
    const STRANGER: &str = "a token of nobody";
    let log = Log::default();
    let writer_of_log = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer_of_log.clone())
        .finish();
    // One thread runs all of this test, the server included.
    let _guard = tracing::subscriber::set_default(subscriber);
    tracing::info!("entries are kept");
    let list = tempfile::NamedTempFile::new().unwrap();
    let digest = digest::digest(&digest::SHA256, TOKEN.as_bytes());
    let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let all = "'*'";
    fs::write(
        list.path(),
        format!("callers: [{{name: healer, tokenSha256: {digest}, may: [{all}]}}]"),
    )
    .unwrap();
    let mut world = World::start_with(Mode::ALL, Callers::read(list.path()).unwrap()).await;
    let token = || map(&[("callerToken", TOKEN)]);
    let made = CreateVolumeRequest {
        parameters: map(&[("encrypted", "true")]),
        secrets: map(&[("encryptionKey", KEY), ("callerToken", TOKEN)]),
        ..create("db", 64 * MIB)
    };
    let volume = world.controller.create_volume(made).await.unwrap().into_inner().volume.unwrap();
    let publish = ControllerPublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        node_id: NODE.into(),
        volume_capability: Some(writer()),
        secrets: token(),
        ..Default::default()
    };
    world.controller.controller_publish_volume(publish).await.unwrap();
    let stage = NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: world.text("stage"),
        volume_capability: Some(writer()),
        secrets: map(&[("encryptionKey", KEY), ("callerToken", TOKEN)]),
        ..Default::default()
    };
    let request =
        |secrets| NodeHealerRequest { secrets, ..request(&stage, &stage.staging_target_path) };
    let mut messages = String::new();
    for (secrets, expected) in [
        (map(&[]), Code::Unauthenticated),
        (map(&[("callerToken", STRANGER)]), Code::Unauthenticated),
        (map(&[("callerToken", TOKEN), ("encryptionKey", OTHER)]), Code::Unauthenticated),
        (map(&[("callerToken", TOKEN), ("encryptionKey", "hunter2")]), Code::InvalidArgument),
        (token(), Code::NotFound),
    ] {
        for channel in world.sockets() {
            let answer = heal(&channel, request(secrets.clone())).await;
            assert_eq!(code(&answer), expected);
            messages += answer.unwrap_err().message();
        }
    }
    // One of the keys that were issued, without the other.
    assert_eq!(volume.volume_context.len(), 2, "{:?}", volume.volume_context);
    let one = volume.volume_context.iter().take(1).map(|(k, v)| (k.clone(), v.clone()));
    let part = NodeHealerRequest { volume_context: one.collect(), ..request(token()) };
    assert_eq!(code(&heal(&world.addons, part).await), Code::InvalidArgument);
    if can_mount() {
        world.node.node_stage_volume(stage.clone()).await.unwrap();
        // Its key is needed for a device, and goes to the target alone.
        unmount(&stage.staging_target_path);
        world.attacher.detach_all();
        let told = world.heal(request(stage.secrets.clone())).await;
        assert_well(&told);
        assert!(told.message.contains("device anew"), "{told:?}");
        messages += &told.message;
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("entries are kept"), "{log}");
    for secret in [KEY, OTHER, TOKEN, STRANGER, "hunter2"] {
        assert!(!messages.contains(secret) && !log.contains(secret), "{secret}");
    }
}
