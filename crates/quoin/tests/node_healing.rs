//! Damages of a volume on its node, each made for real, and the healer called as its sidecar calls it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{self, AccessType, BlockVolume, MountVolume};
use quoin_api::csi::*;
use quoin_api::csi_addons::healer::healer_node_client::HealerNodeClient;
use quoin_api::csi_addons::healer::{NodeHealerRequest, NodeHealerResponse};
use quoin_api::csi_addons::reclaimspace::NodeReclaimSpaceRequest;
use quoin_api::csi_addons::reclaimspace::reclaim_space_node_client::ReclaimSpaceNodeClient;
use tonic::Status;
use tonic::transport::Channel;

use crate::common::{Cluster, Place, User as Person};
use crate::returned_host::Host;
use crate::support::orchestrator as dr;
use crate::support::*;

const KEY: &str = "correct horse battery staple";

/// The orchestrator of one cluster.
struct Orchestrator {
    runtime: tokio::runtime::Runtime,
    csi: Channel,
    addons: Channel,
    node: String,
    scratch: PathBuf,
}

/// A volume that is staged and published at `target`.
#[derive(Clone)]
struct Used {
    id: String,
    capability: VolumeCapability,
    staging: String,
    target: String,
    secrets: HashMap<String, String>,
}

impl Orchestrator {
    fn new(dev: &Dev, scratch: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (csi, addons) = {
            let _context = runtime.enter();
            let channel = |socket: &str| quoin_identity::unix_channel(&dev.directory.join(socket));
            (channel("run/csi/csi.sock"), channel("run/csi-addons/csi-addons.sock"))
        };
        let node = dev.json(&["node", "list"])[0]["name"].as_str().unwrap().to_owned();
        Self { runtime, csi, addons, node, scratch: scratch.to_owned() }
    }

    /// That of one of several nodes: the socket of CSI alone is there.
    fn of_node(host: &Host, scratch: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let csi = {
            let _context = runtime.enter();
            quoin_identity::unix_channel(&Path::new(&host.run).join("csi.sock"))
        };
        std::fs::create_dir(scratch).unwrap();
        let (addons, node) = (csi.clone(), host.name.to_owned());
        Self { runtime, csi, addons, node, scratch: scratch.into() }
    }

    fn publish_to_node(&self, volume: &Used) {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.node.clone(),
            volume_capability: Some(volume.capability.clone()),
            ..Default::default()
        };
        let mut controller = ControllerClient::new(self.csi.clone());
        self.runtime.block_on(controller.controller_publish_volume(request)).unwrap();
    }

    fn take_from_node(&self, volume: &Used) {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.node.clone(),
            ..Default::default()
        };
        let mut controller = ControllerClient::new(self.csi.clone());
        self.runtime.block_on(controller.controller_unpublish_volume(request)).unwrap();
    }

    /// Publishes, stages and publishes a volume at its target.
    fn use_volume(&self, person: &Person, name: &str, access: AccessType) -> Used {
        self.use_volume_as(person, name, access, Mode::SingleNodeWriter, None)
    }

    fn use_volume_as(
        &self,
        person: &Person,
        name: &str,
        access: AccessType,
        mode: Mode,
        key: Option<&str>,
    ) -> Used {
        let mode = volume_capability::AccessMode { mode: mode.into() };
        let path = |what: &str| format!("{}/{name}-{what}", self.scratch.display());
        let used = Used {
            id: person.json(&["volume", "get", name])["id"].as_str().unwrap().to_owned(),
            capability: VolumeCapability { access_type: Some(access), access_mode: Some(mode) },
            staging: path("staging"),
            target: path("target"),
            secrets: secret(key),
        };
        std::fs::create_dir_all(&used.staging).unwrap();
        self.publish_to_node(&used);
        let stage = NodeStageVolumeRequest {
            volume_id: used.id.clone(),
            staging_target_path: used.staging.clone(),
            volume_capability: Some(used.capability.clone()),
            secrets: used.secrets.clone(),
            ..Default::default()
        };
        let publish = NodePublishVolumeRequest {
            volume_id: used.id.clone(),
            staging_target_path: used.staging.clone(),
            target_path: used.target.clone(),
            volume_capability: Some(used.capability.clone()),
            ..Default::default()
        };
        let mut node = NodeClient::new(self.csi.clone());
        // As an orchestrator does where its target ends a connection because a further node may use the volume now.
        eventually("it is staged", || {
            match self.runtime.block_on(node.node_stage_volume(stage.clone())) {
                Err(status) if status.code() == tonic::Code::Unavailable => None,
                staged => Some(staged.unwrap()),
            }
        });
        self.runtime.block_on(node.node_publish_volume(publish)).unwrap();
        used
    }

    fn end_use(&self, volume: &Used) {
        let unpublish = NodeUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            target_path: volume.target.clone(),
        };
        let unstage = NodeUnstageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: volume.staging.clone(),
        };
        let mut node = NodeClient::new(self.csi.clone());
        self.runtime.block_on(node.node_unpublish_volume(unpublish)).unwrap();
        self.runtime.block_on(node.node_unstage_volume(unstage)).unwrap();
    }

    fn try_heal(&self, volume: &Used, key: Option<&str>) -> Result<NodeHealerResponse, Status> {
        self.try_heal_by(&self.addons, volume, key)
    }

    fn try_heal_by(
        &self,
        socket: &Channel,
        volume: &Used,
        key: Option<&str>,
    ) -> Result<NodeHealerResponse, Status> {
        let mut request = tonic::Request::new(NodeHealerRequest {
            volume_id: volume.id.clone(),
            volume_path: volume.target.clone(),
            staging_target_path: volume.staging.clone(),
            volume_capability: Some(volume.capability.clone()),
            secrets: secret(key),
            ..Default::default()
        });
        request.set_timeout(Duration::from_secs(120));
        let mut healer = HealerNodeClient::new(socket.clone());
        let began = Instant::now();
        let answer = self.runtime.block_on(healer.node_healer(request));
        let took = began.elapsed();
        println!("healer after {took:?}: {answer:?}");
        assert!(took < Duration::from_secs(45), "a call is bounded: {took:?}");
        answer.map(tonic::Response::into_inner)
    }

    /// Has a file system trimmed, as the sidecar does: by its staging path alone.
    fn reclaim(&self, volume: &Used) {
        let request = NodeReclaimSpaceRequest {
            volume_id: volume.id.clone(),
            staging_target_path: volume.staging.clone(),
            ..Default::default()
        };
        let mut node = ReclaimSpaceNodeClient::new(self.addons.clone());
        self.runtime.block_on(node.node_reclaim_space(request)).unwrap();
    }

    /// A call that meets another one, or the node's own clean-up, is made again.
    fn heal(&self, volume: &Used) -> NodeHealerResponse {
        eventually("no other call is under way", || match self.try_heal(volume, None) {
            Err(status) if status.code() == tonic::Code::Aborted => None,
            answered => Some(answered.unwrap()),
        })
    }

    /// Heals until the volume is normal; what a controller says of replicas may be late by moments.
    fn healed(&self, volume: &Used, what: &str) -> NodeHealerResponse {
        eventually(what, || Some(self.heal(volume)).filter(|told| !told.abnormal))
    }

    fn ill(&self, volume: &Used, words: &[&str]) -> NodeHealerResponse {
        let told = self.heal(volume);
        assert!(told.abnormal, "{told:?}");
        for word in words {
            assert!(told.message.contains(word), "{word}: {told:?}");
        }
        told
    }
}

fn block() -> AccessType {
    AccessType::Block(BlockVolume {})
}

fn mounted(fs_type: &str) -> AccessType {
    AccessType::Mount(MountVolume { fs_type: fs_type.to_owned(), ..Default::default() })
}

fn secret(key: Option<&str>) -> HashMap<String, String> {
    key.map(|key| ("encryptionKey".to_owned(), key.to_owned())).into_iter().collect()
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
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
        Self(child)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The device of a volume, as the kernel's table of loop devices has it.
fn loop_devices(dev: &Dev, id: &str) -> Vec<PathBuf> {
    loop_devices_of(&dev.directory.join("run"), id)
}

/// The same, by the directory of the attach process that made it.
fn loop_devices_of(run: &Path, id: &str) -> Vec<PathBuf> {
    let file = run.join("attach/volumes").canonicalize().unwrap().join(id);
    let is_of_it = |entry: &std::fs::DirEntry| {
        std::fs::read_to_string(entry.path().join("loop/backing_file"))
            .is_ok_and(|backing| backing.trim().starts_with(file.to_str().unwrap()))
    };
    let entries = std::fs::read_dir("/sys/block").unwrap().flatten().filter(is_of_it);
    entries.map(|entry| Path::new("/dev").join(entry.file_name())).collect()
}

/// Returns the bytes of each pool that hold data.
fn used_bytes(dev: &Dev) -> Vec<u64> {
    let pools = dev.json(&["pool", "list"]);
    let pools = pools.as_array().unwrap().iter();
    let bytes = pools.filter_map(|pool| pool["usedBytes"].as_u64()).collect::<Vec<_>>();
    assert!(!bytes.is_empty());
    bytes
}

fn mounts_at(path: &str) -> usize {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().filter(|line| line.split(' ').nth(1) == Some(path)).count()
}

/// The kernel's number of the mount at a path.
fn mount_number(path: &str) -> String {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.split(' ').nth(4) == Some(path)).expect(path);
    line.split(' ').next().unwrap().to_owned()
}

/// Has the kernel stop an ext4 as after an error; false: this kernel cannot.
fn stop_file_system(device: &Path) -> bool {
    let name = device.file_name().unwrap();
    std::fs::write(Path::new("/sys/fs/ext4").join(name).join("trigger_fs_error"), "1").is_ok()
}

fn free_device(device: &Path) {
    assert!(Command::new("losetup").arg("-d").arg(device).status().unwrap().success());
}

fn unmount_lazily(path: &str) {
    assert!(Command::new("umount").args(["-l", path]).status().unwrap().success(), "{path}");
}

fn write_synced(path: &str, text: &str) {
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.sync_all().unwrap();
}

/// Proves HEAL-GENERAL-04, HEAL-RESP-01, HEAL-RESP-03: with processes that are killed and
/// stopped, devices that are freed, mounts that are gone, file systems that the kernel stopped or whose
/// journal was aborted, an attachment that was taken away, a lost key, and without a controller.
/// Proves ADDONS-RECLAIM-06: by what the pools hold.
#[test]
fn each_damage_of_a_volume_on_its_node_is_healed_or_told_with_the_way_out() {
    if !can_attach() || !have("mkfs.ext4") || !have("losetup") {
        return;
    }
    let scratch = Scratch::new("node-healing");
    let dev = Dev::start(&scratch.cluster(), &["--pool-size", "512MiB"]);
    let keys = tempfile::tempdir().unwrap();
    let key_file = keys.path().join("key");
    std::fs::write(&key_file, KEY).unwrap();
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    dev.ok(&["volume", "create", "raw", "--size", "16MiB"]);
    let key_file = key_file.to_str().unwrap();
    dev.ok(&["volume", "create", "box", "--size", "64MiB", "--encrypt", "--key-file", key_file]);
    let orchestrator = Orchestrator::new(&dev, &scratch.0);
    let db = orchestrator.use_volume(&dev, "db", mounted(""));
    let raw = orchestrator.use_volume(&dev, "raw", block());
    let file = format!("{}/file", db.target);
    write_synced(&file, "kept");
    let kept = |what: &str| assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept", "{what}");
    let marks = [9_u8; 4096];
    let mut device = std::fs::File::options().write(true).open(&raw.target).unwrap();
    device.write_all(&marks).unwrap();
    device.sync_all().unwrap();
    drop(device);
    let raw_kept = |what: &str| {
        let mut read = [0; 4096];
        std::fs::File::open(&raw.target).unwrap().read_exact(&mut read).unwrap();
        assert_eq!(read, marks, "{what}");
    };
    orchestrator.healed(&db, "well from the start");
    orchestrator.healed(&raw, "well from the start");
    let by_csi = orchestrator.try_heal_by(&orchestrator.csi, &db, None).unwrap();
    assert_eq!(by_csi, orchestrator.heal(&db), "both sockets say the same");
    let told = dev.json(&["volume", "heal", "db"]);
    assert_eq!(told["well"], true, "{told}");

    // The attach process dies, and its holder keeps the devices.
    let before = loop_devices(&dev, &db.id);
    signal(dev.pid("attach").unwrap(), "KILL");
    orchestrator.healed(&db, "the attach process is back");
    assert_eq!(loop_devices(&dev, &db.id), before, "no second device");
    kept("after the attach process died");

    // The holder dies with it, so the device is gone; a workload holds the mount.
    let user = User::of(&file);
    dev.kill_together(&["attach", "attach-holder"]);
    orchestrator.ill(&db, &["DeviceMissing", ") has it open", "restart the workload"]);
    assert_eq!((mounts_at(&db.staging), mounts_at(&db.target)), (1, 1), "nothing was taken");
    drop(user);
    let told = orchestrator.healed(&db, "the device is made anew");
    assert!(told.message.contains("device anew"), "{told:?}");
    kept("after the device was made anew");
    let user = User::of(&raw.target);
    orchestrator.ill(&raw, &["DeviceMissing", ") has it open"]);
    drop(user);
    orchestrator.healed(&raw, "the block device is made anew");
    raw_kept("after the device was made anew");
    write_synced(&file, "kept");

    // Another program frees the loop device under a living attach process.
    for volume in [&raw, &db] {
        unmount_lazily(&volume.target);
        if volume.id == db.id {
            unmount_lazily(&volume.staging);
        }
        free_device(&loop_devices(&dev, &volume.id).remove(0));
        eventually("the device is freed", || {
            loop_devices(&dev, &volume.id).is_empty().then_some(())
        });
        orchestrator.healed(volume, "a freed device is made again");
        assert_eq!(loop_devices(&dev, &volume.id).len(), 1);
    }
    kept("after the device was freed");
    raw_kept("after the device was freed");

    // The kernel has no mount of what the record has, as after a reboot.
    unmount_lazily(&db.target);
    unmount_lazily(&db.staging);
    let ended = dev.quoin(&["volume", "heal", "db", "-o", "json"]);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    kept("mounted again by a person");

    // Trimmed by the node, a file system gives back what a deleted file had in the pools.
    const GONE: u64 = 24 << 20;
    let gone = format!("{}/gone", db.target);
    std::fs::write(&gone, vec![0xa5; GONE as usize]).unwrap();
    run("sync", &["-f", &db.target]);
    let full = eventually("every pool tells what it holds", || {
        let full = used_bytes(&dev);
        full.iter().all(|used| *used >= GONE).then_some(full)
    });
    std::fs::remove_file(&gone).unwrap();
    // ext4 trims only blocks that its journal has released.
    run("sync", &["-f", &db.target]);
    orchestrator.reclaim(&db);
    eventually("every pool has it free", || {
        let now = used_bytes(&dev);
        let freed = |(full, now): (&u64, &u64)| now + GONE / 2 <= *full;
        full.iter().zip(&now).all(freed).then_some(())
    });
    kept("after the trim");

    // The kernel stops the file system after an error.
    if stop_file_system(&loop_devices(&dev, &db.id).remove(0)) {
        let user = User::of(&file);
        orchestrator.ill(&db, &["TurnedReadOnly", ") has it open"]);
        let ended = dev.quoin(&["volume", "heal", "db"]);
        assert_eq!(ended.status.code(), Some(3));
        drop(user);
        orchestrator.healed(&db, "the file system is checked and mounted again");
        kept("after the file system was stopped");
        write_synced(&file, "kept");
    } else {
        quoin_testkit::skipped("trigger_fs_error: this kernel's ext4 has none");
    }
    a_stopped_file_system_of_a_block_volume_is_its_owners(&dev, &orchestrator);
    if have("mkfs.xfs") && have("xfs_io") {
        an_aborted_journal_is_replayed(&dev, &orchestrator);
    }

    // The target is stopped for longer than is waited, and then goes on; it is killed.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    let words = ["SessionLost", "its IO waits", "doctor"];
    std::thread::scope(|scope| {
        let of_block = scope.spawn(|| orchestrator.ill(&raw, &words));
        orchestrator.ill(&db, &words);
        of_block.join().unwrap();
    });
    assert_eq!(dev.pid("target"), Some(target), "the healer ends no process");
    signal(target, "CONT");
    orchestrator.healed(&db, "the target goes on");
    signal(target, "KILL");
    orchestrator.healed(&db, "the target is back");
    kept("after the target was killed");

    // The orchestrator takes the volume away by force, and gives it back.
    orchestrator.take_from_node(&db);
    orchestrator.ill(&db, &["NotPublishedHere"]);
    let attached = dev.json(&["volume", "get", "db"])["nodes"].clone();
    assert_eq!(attached, serde_json::json!([]), "not published by itself");
    orchestrator.publish_to_node(&db);
    orchestrator.healed(&db, "the volume is used here again");
    kept("after it was taken away");
    write_synced(&file, "kept");

    // The key is lost with all that had it.
    let by_key = (mounted(""), Mode::SingleNodeWriter, Some(KEY));
    let locked = orchestrator.use_volume_as(&dev, "box", by_key.0, by_key.1, by_key.2);
    let inside = format!("{}/file", locked.target);
    write_synced(&inside, "secret");
    dev.kill_together(&["target", "attach", "attach-holder"]);
    eventually("the healer says that the key is missing", || {
        let told = orchestrator.heal(&locked);
        assert!(told.abnormal, "{told:?}");
        told.message.contains("encryptionKey").then_some(())
    });
    let wrong = orchestrator.try_heal(&locked, Some("another horse battery staple")).unwrap_err();
    assert_eq!(wrong.code(), tonic::Code::Unauthenticated);
    let told = eventually("the key opens it", || {
        let told = orchestrator.try_heal(&locked, Some(KEY)).unwrap();
        (!told.abnormal).then_some(told)
    });
    assert!(!told.message.contains(KEY));
    assert_eq!(std::fs::read_to_string(&inside).unwrap(), "secret");
    orchestrator.healed(&db, "the others come back as well");
    orchestrator.healed(&raw, "the others come back as well");

    // The controller is away: what is on this host is judged and healed without it.
    let hold = dev.directory.join("run/hold-controller");
    std::fs::write(&hold, "").unwrap();
    signal(dev.pid("controller").unwrap(), "KILL");
    unmount_lazily(&db.target);
    let told = orchestrator.healed(&db, "bound again without the controller");
    assert!(told.message.contains("controller does not answer"), "{told:?}");
    kept("without the controller");
    let unknown = Used { id: "0".repeat(32), secrets: HashMap::new(), ..db.clone() };
    let refused = orchestrator.try_heal(&unknown, None).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused}");
    std::fs::remove_file(&hold).unwrap();
    dev.eventually("the controller answers", || {
        dev.quoin(&["cluster", "info"]).status.success().then_some(())
    });
    dev.eventually("the controller is told what was healed", || {
        let told = |volume: &str| dev.ok(&["events", "--volume", volume]).contains("VolumeHealed");
        (told("db") && told("raw")).then_some(())
    });
    for volume in [&db, &raw, &locked] {
        orchestrator.healed(volume, "all is well");
        orchestrator.end_use(volume);
    }
    dev.stop();
    assert_nothing_is_left(&scratch.cluster());
}

/// Content of a block volume is its owner's, and nothing that a heal looks at: the volume is well, and the mount
/// stays as it is.
fn a_stopped_file_system_of_a_block_volume_is_its_owners(dev: &Dev, orchestrator: &Orchestrator) {
    dev.ok(&["volume", "create", "own", "--size", "16MiB"]);
    let own = orchestrator.use_volume(dev, "own", block());
    run("mkfs.ext4", &["-q", &own.target]);
    let mount = format!("{}/own", orchestrator.scratch.display());
    std::fs::create_dir(&mount).unwrap();
    run("mount", &["-o", "errors=remount-ro", &own.target, &mount]);
    if stop_file_system(&loop_devices(dev, &own.id).remove(0)) {
        let before = (mount_number(&mount), loop_devices(dev, &own.id));
        let told = orchestrator.healed(&own, "its device is well");
        assert!(!told.message.contains("this call"), "{told:?}");
        assert_eq!((mount_number(&mount), loop_devices(dev, &own.id)), before);
        assert!(std::fs::write(format!("{mount}/file"), "new").is_err(), "it is still stopped");
    }
    crate::common::unmount(Path::new(&mount));
    orchestrator.end_use(&own);
    orchestrator.take_from_node(&own);
}

/// An XFS whose journal was aborted: no flag of its mount says so.
fn an_aborted_journal_is_replayed(dev: &Dev, orchestrator: &Orchestrator) {
    dev.ok(&["volume", "create", "docs", "--size", "320MiB"]);
    let docs = orchestrator.use_volume(dev, "docs", mounted("xfs"));
    let page = format!("{}/page", docs.target);
    write_synced(&page, "kept");
    orchestrator.healed(&docs, "well from the start");
    let (user, before) = (User::of(&page), mount_number(&docs.staging));
    run("xfs_io", &["-x", "-c", "shutdown", &docs.target]);
    assert!(std::fs::read(&page).is_err());
    // No process is named: a file on it tells nothing any more of where it is.
    orchestrator.ill(&docs, &["FileSystemStopped", "a process at", "restart the workload"]);
    assert_eq!(mount_number(&docs.staging), before, "nothing was taken");
    assert!(std::fs::read(&page).is_err(), "and nothing mounted again over the aborted journal");
    drop(user);
    let told = orchestrator.healed(&docs, "its journal is replayed by another mount");
    assert!(told.message.contains("checked and mounted"), "{told:?}");
    assert_eq!(std::fs::read_to_string(&page).unwrap(), "kept");
    write_synced(&page, "more");
    orchestrator.end_use(&docs);
    orchestrator.take_from_node(&docs);
}

/// A client that writes the first block of a device without end, each time with the number of the write.
struct Writes<'a> {
    count: AtomicU64,
    stop: AtomicBool,
    path: &'a str,
}

impl<'a> Writes<'a> {
    fn to(path: &'a str) -> Self {
        Self { count: AtomicU64::new(0), stop: AtomicBool::new(false), path }
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let number = self.count.load(Ordering::Relaxed) + 1;
            let mut device = std::fs::File::options().write(true).open(self.path).unwrap();
            device.write_all(&number.to_le_bytes().repeat(512)).unwrap();
            device.sync_all().unwrap();
            self.count.store(number, Ordering::Relaxed);
        }
    }

    /// Waits until writes that began after now are acknowledged.
    fn go_on(&self) {
        let before = self.count.load(Ordering::Relaxed);
        eventually("writes go on", || {
            (self.count.load(Ordering::Relaxed) > before + 3).then_some(())
        });
    }
}

/// Two nodes, each with its target, attach process and socket. Proves HEAL-RESP-03: a heal of one node takes
/// nothing from another one, and brings no cache over the content that another node has written since.
#[test]
fn a_heal_touches_nothing_of_other_nodes_and_serves_no_cache_of_before_another_nodes_use() {
    if !can_attach() || !have("mkfs.ext4") || !have("losetup") {
        return;
    }
    let mut cluster = Cluster::start("heals-of-two", &Place::here(), &[]);
    for name in ["p1", "p2", "p3"] {
        cluster.pool(&Place::here(), name, &[]);
    }
    let hosts = ["h1", "h2"].map(|name| Host::start(&mut cluster, name));
    cluster.wait_for_pools(3);
    for host in &hosts {
        cluster.ok(&["node", "set", host.name, "--manages-volumes", "true"]);
    }
    let [first, second] = hosts
        .each_ref()
        .map(|host| Orchestrator::of_node(host, &cluster.path(&format!("{}-volumes", host.name))));
    let runs = hosts.each_ref().map(|host| PathBuf::from(&host.run));
    cluster.ok(&["volume", "create", "both", "--size", "16MiB", "--replicas", "3"]);
    let shared = |orchestrator: &Orchestrator| {
        orchestrator.use_volume_as(&cluster, "both", block(), Mode::MultiNodeMultiWriter, None)
    };
    let [here, there] = [shared(&first), shared(&second)];
    let devices = |at: usize| loop_devices_of(&runs[at], &here.id);
    let untouched = devices(0);
    first.healed(&here, "well from the start");
    second.healed(&there, "well from the start");
    let writes = Writes::to(&here.target);
    std::thread::scope(|scope| {
        let io = scope.spawn(|| writes.run());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            writes.go_on();
            unmount_lazily(&there.target);
            free_device(&devices(1).remove(0));
            eventually("the device is freed", || devices(1).is_empty().then_some(()));
            let told = second.healed(&there, "its own device is made anew");
            assert!(told.message.contains("device anew"), "{told:?}");
            writes.go_on();
        }));
        writes.stop.store(true, Ordering::Relaxed);
        io.join().unwrap();
        outcome.unwrap();
    });
    assert_eq!((devices(0), devices(1).len()), (untouched, 1));
    let mut read = [0; 8];
    std::fs::File::open(&there.target).unwrap().read_exact(&mut read).unwrap();
    assert_eq!(u64::from_le_bytes(read), writes.count.load(Ordering::Relaxed));
    assert_eq!(cluster.json(&["volume", "get", "both"])["nodes"], serde_json::json!(["h1", "h2"]));

    // A volume goes to the other node and comes back, while a process here has it open all the time.
    cluster.ok(&["volume", "create", "moves", "--size", "64MiB", "--replicas", "3"]);
    let moves = first.use_volume(&cluster, "moves", mounted(""));
    let file = format!("{}/file", moves.target);
    write_synced(&file, "before");
    let user = User::of(&file);
    first.take_from_node(&moves);
    let elsewhere = second.use_volume(&cluster, "moves", mounted(""));
    let same = format!("{}/file", elsewhere.target);
    assert_eq!(std::fs::read_to_string(&same).unwrap(), "before");
    write_synced(&same, "by the other node");
    second.end_use(&elsewhere);
    second.take_from_node(&elsewhere);
    first.publish_to_node(&moves);
    // A call that found the target away waited for it, and told of the process in the next one.
    eventually("its device is known to be of an earlier use, and who has it open", || {
        let told = first.heal(&moves);
        assert!(told.abnormal, "a process has it open: {told:?}");
        let words = ["DeviceDead", ") has it open"];
        words.iter().all(|word| told.message.contains(word)).then_some(())
    });
    drop(user);
    first.healed(&moves, "the dead device is made anew");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "by the other node");
    for (orchestrator, used) in [(&first, &here), (&second, &there), (&first, &moves)] {
        orchestrator.end_use(used);
        orchestrator.take_from_node(used);
    }
}

/// A demotion by force, as in a failover, under the volume's user.
#[test]
fn a_volume_that_became_a_copy_under_its_user_is_told_so_and_nothing_is_taken_from_it() {
    if !can_attach() || !have("mkfs.ext4") {
        return;
    }
    let scratch = Scratch::new("heals-of-a-copy");
    let dev = Dev::start(&scratch.cluster(), &["--peer", "--pools", "1", "--pool-size", "1GiB"]);
    dev.wait_for_line("A second cluster is up");
    let orchestrator = Orchestrator::new(&dev, &scratch.0);
    let runtime = dr::runtime();
    let side = dr::Side::of(&runtime, dev.directory.clone(), orchestrator.node.clone());
    let source = dr::volume(&side.create("db", None));
    let used = orchestrator.use_volume(&dev, "db", mounted(""));
    let file = format!("{}/file", used.target);
    write_synced(&file, "kept");
    dr::retried("it is primary", || side.turn_primary(&source, "refuse"));
    orchestrator.healed(&used, "a primary is well");
    let user = User::of(&file);
    dr::retried("DemoteVolume", || side.demote(&source, true));
    let told = eventually("it is a copy now", || {
        let told = orchestrator.heal(&used);
        told.message.contains("BecameCopy").then_some(told)
    });
    assert!(told.abnormal && told.message.contains("promote this one"), "{told:?}");
    assert!(told.message.contains("not this node's to change"), "{told:?}");
    assert!(!told.message.contains("this call"), "{told:?}");
    assert_eq!((mounts_at(&used.staging), mounts_at(&used.target)), (1, 1));
    drop(user);
    orchestrator.end_use(&used);
    orchestrator.take_from_node(&used);
    dev.stop();
}

/// Heals of each kind in a row, beside a volume that is used without its node's devices. `QUOIN_HEALS`: how many of
/// each; then the longest pause of the other volume's IO is held to half a second too.
#[test]
fn heals_in_a_row_end_in_their_time_beside_io_of_another_volume() {
    const HEAL_MAX: Duration = Duration::from_secs(30);
    if !can_attach() || !have("mkfs.ext4") || !have("losetup") {
        return;
    }
    let measured = std::env::var("QUOIN_HEALS").ok().and_then(|count| count.parse::<u32>().ok());
    let scratch = Scratch::new("heals-in-a-row");
    let dev = Dev::start(&scratch.cluster(), &["--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    dev.ok(&["volume", "create", "beside", "--size", "16MiB"]);
    let orchestrator = Orchestrator::new(&dev, &scratch.0);
    let db = orchestrator.use_volume(&dev, "db", mounted(""));
    let file = format!("{}/file", db.target);
    write_synced(&file, "kept");
    orchestrator.healed(&db, "well from the start");
    let beside = dev.client("beside");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let ends = || stop.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        let io = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !ends() {
                let began = Instant::now();
                beside.write(0, vec![7; 4096].into(), true).unwrap();
                longest = longest.max(began.elapsed());
                std::thread::sleep(Duration::from_millis(2));
            }
            longest
        });
        // Stops the IO in every case: a scope waits for its threads.
        let healed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for kind in ["attach process", "device", "loop device", "mounts", "file system"] {
                for turn in 0..measured.unwrap_or(1) {
                    if !damage(&dev, &db, kind) {
                        break;
                    }
                    let began = Instant::now();
                    orchestrator.healed(&db, kind);
                    let took = began.elapsed();
                    println!("{kind}, {turn}: healed after {took:?}");
                    assert!(took < HEAL_MAX, "{kind}: {took:?}");
                    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept", "{kind}");
                }
            }
        }));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let longest = io.join().unwrap();
        if let Err(panic) = healed {
            std::panic::resume_unwind(panic);
        }
        println!("the longest write beside the heals took {longest:?}");
        if measured.is_some() {
            assert!(longest < Duration::from_millis(500), "{longest:?}");
        }
    });
    drop(beside);
    dev.ok(&["volume", "detach", "beside"]);
    orchestrator.end_use(&db);
    orchestrator.take_from_node(&db);
    dev.stop();
}

/// Damages a volume that is in use on its node; false: this kernel cannot.
fn damage(dev: &Dev, db: &Used, kind: &str) -> bool {
    match kind {
        "attach process" => signal(dev.pid("attach").unwrap(), "KILL"),
        "device" => dev.kill_together(&["attach", "attach-holder"]),
        "loop device" => {
            unmount_lazily(&db.target);
            unmount_lazily(&db.staging);
            free_device(&loop_devices(dev, &db.id).remove(0));
            eventually("the device is freed", || {
                loop_devices(dev, &db.id).is_empty().then_some(())
            });
        }
        "mounts" => {
            unmount_lazily(&db.target);
            unmount_lazily(&db.staging);
        }
        _ => return stop_file_system(&loop_devices(dev, &db.id).remove(0)),
    }
    true
}
