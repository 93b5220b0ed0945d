//! Requirements of a block device on its host, and the space that a file system on it frees. Needs
//! root, /dev/fuse and loop devices.

use crate::common::dev as running;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use quoin_api::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use running::{
    Dev, Scratch, can_attach, eventually, have, is_online, isolated_command, run, signal, unmount,
};
use tonic::{Code, Status};

/// A process of the test in a mount table of its own; killed with the test.
struct Apart(Child);

impl Apart {
    /// Starts `quoin attach` in a namespace where /dev may be changed.
    fn attach(run: &Path, log: &Path) -> Self {
        let log = std::fs::File::create(log).unwrap();
        let mut command = isolated_command(run);
        command.args([env!("CARGO_BIN_EXE_quoin"), "attach", "--run"]).arg(run);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    fn run_inside(&self, command: &[&str]) {
        let pid = self.0.id().to_string();
        run("nsenter", &[&["--mount", "--target", &pid], command].concat());
    }

    fn stop(mut self) {
        signal(self.0.id(), "TERM");
        let status = eventually("a clean end", || self.0.try_wait().unwrap());
        assert!(status.success(), "{status}");
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `quoin attach` after a shell has changed /dev.
fn attach_after(change: &str, run: &Path) -> Output {
    let script = format!("set -e; {change}; exec \"$0\" attach --run \"$1\"");
    let mut command = isolated_command(run);
    command.args(["sh", "-c", &script, env!("CARGO_BIN_EXE_quoin")]).arg(run);
    command.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn without_dev_fuse_an_attach_is_refused_with_the_way_out_and_leaves_nothing() {
    if !can_attach() || !have("unshare") || !have("nsenter") {
        return;
    }
    let scratch = Scratch::new("nofuse");
    let elsewhere = scratch.0.join("elsewhere");
    for (change, way_out) in [
        ("mount --bind /dev/null /dev/fuse", "mknod /dev/fuse c 10 229"),
        ("mount -t tmpfs none /dev; mknod /dev/loop-control c 10 237", "modprobe fuse"),
    ] {
        let refused = attach_after(change, &elsewhere);
        let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{printed}");
        assert!(printed.contains("/dev/fuse") && printed.contains(way_out), "{printed}");
        assert!(printed.contains("NBD"), "{printed}");
        assert!(!elsewhere.exists(), "sockets are left of what never ran");
    }

    // The device existed when the attach process began.
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    let run_directory = dev.directory.join("run");
    let attach = Apart::attach(&run_directory, &scratch.0.join("attach.log"));
    let socket = run_directory.join("attach/attach.sock");
    eventually("attach listens", || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok().then_some(())
    });
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    attach.run_inside(&["mount", "--bind", "/dev/null", "/dev/fuse"]);
    let before = entries(&run_directory.join("attach"));
    let refused = dev.quoin(&["volume", "attach", "db"]);
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{printed}");
    assert!(printed.contains("mknod /dev/fuse c 10 229") && printed.contains("--nbd"), "{printed}");
    let shown = dev.json(&["volume", "get", "db"]);
    assert_eq!(shown["nodes"], serde_json::json!([]), "{shown}");
    assert_eq!(entries(&run_directory.join("attach")), before, "something is half-made");

    // A volume that is used over NBD keeps its connection.
    dev.ok(&["volume", "attach", "db", "--nbd"]);
    assert_eq!(dev.quoin(&["volume", "attach", "db"]).status.code(), Some(1));
    assert_ne!(dev.json(&["volume", "get", "db"])["nodes"], serde_json::json!([]));

    // Everything else works again with the device back.
    attach.run_inside(&["umount", "/dev/fuse"]);
    let device = dev.device("db");
    assert!(device.starts_with("/dev/loop"), "{device}");
    dev.ok(&["volume", "detach", "db"]);
    attach.stop();
    dev.stop();
}

fn capability() -> VolumeCapability {
    let mount = MountVolume { fs_type: "ext4".into(), ..MountVolume::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

/// The device is removed under a running cluster, and restored.
#[test]
fn a_volume_is_staged_only_while_dev_fuse_exists() {
    if !can_attach() || !have("unshare") || !have("nsenter") || !have("mkfs.ext4") {
        return;
    }
    let scratch = Scratch::new("stage");
    let mut command = isolated_command(&scratch.0);
    command.arg(env!("CARGO_BIN_EXE_quoin"));
    let dev = Dev::start_by(command, &scratch.cluster(), &[]);
    let run_inside = |command: &[&str]| {
        let pid = dev.child.id().to_string();
        run("nsenter", &[&["--mount", "--target", &pid], command].concat());
    };
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let staging = scratch.0.join("staging");
    let mut staged = Staged::published(&dev, "db", &staging);

    run_inside(&["mount", "--bind", "/dev/null", "/dev/fuse"]);
    let attached = dev.directory.join("run/attach");
    let before = entries(&attached);
    let refused = staged.stage().unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("mknod /dev/fuse c 10 229"), "{refused}");
    assert_eq!(entries(&attached), before, "something is half-made");
    assert_eq!(entries(&staging).len(), 0);
    // Orchestrators undo their request, also where it was never carried out.
    staged.unstage().unwrap();

    run_inside(&["umount", "/dev/fuse"]);
    staged.stage().unwrap();
    run_inside(&["mountpoint", "-q", staging.to_str().unwrap()]);
    staged.unstage().unwrap();
    dev.stop();
}

/// A tool that asks whether its device is mounted would ask the hanging process about its own.
#[test]
fn a_volume_is_formatted_beside_a_mounted_one_whose_attach_process_hangs() {
    if !can_attach() || !have("mkfs.ext4") {
        return;
    }
    let scratch = Scratch::new("beside");
    let (hanging, dev) = (scratch.0.join("hanging"), scratch.cluster());
    let (hanging, dev) = (Dev::start(&hanging, &[]), Dev::start(&dev, &[]));
    for cluster in [&hanging, &dev] {
        cluster.ok(&["volume", "create", "db", "--size", "64MiB"]);
    }
    let mut mounted = Staged::published(&hanging, "db", &scratch.0.join("mounted"));
    mounted.stage().unwrap();
    let mut staged = Staged::published(&dev, "db", &scratch.0.join("staging"));
    let attach = hanging.pid("attach").unwrap();
    signal(attach, "STOP");
    let formatted = staged.stage();
    signal(attach, "CONT");
    formatted.unwrap();
    staged.unstage().unwrap();
    signal(attach, "STOP");
    let checked = staged.stage();
    signal(attach, "CONT");
    checked.unwrap();
    staged.unstage().unwrap();
    mounted.unstage().unwrap();
    hanging.stop();
    dev.stop();
}

/// The kernel keeps partitions with the number of a device: the next volume must not have them.
#[test]
fn partitions_are_devices_where_they_are_asked_for_and_gone_at_the_detach() {
    const FIRST_SECTOR: u32 = 2048;
    const SECTORS: u32 = 32768;
    if !can_attach() || !have("partx") {
        return;
    }
    let scratch = Scratch::new("partitions");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "disk", "--size", "64MiB", "--block-size", "512"]);
    let mut table = [0u8; 512];
    // One Linux partition in a table of the kind that a BIOS reads.
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 12].copy_from_slice(&FIRST_SECTOR.to_le_bytes());
    table[446 + 12..446 + 16].copy_from_slice(&SECTORS.to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    let device = std::fs::File::options().write(true).open(dev.device("disk")).unwrap();
    device.write_all_at(&table, 0).unwrap();
    device.sync_all().unwrap();
    drop(device);
    dev.ok(&["volume", "detach", "disk"]);

    let attached = dev.ok(&["volume", "attach", "disk", "--partitions"]);
    let device = std::fs::canonicalize(attached.trim()).unwrap();
    let number = device.file_name().unwrap().to_str().unwrap().to_owned();
    let partition = Path::new("/sys/class/block").join(format!("{number}p1"));
    let sectors = std::fs::read_to_string(partition.join("size")).unwrap();
    assert_eq!(sectors.trim(), SECTORS.to_string());
    dev.ok(&["volume", "detach", "disk"]);
    assert!(!partition.exists(), "{} outlives its volume", partition.display());

    dev.ok(&["volume", "create", "other", "--size", "64MiB", "--block-size", "512"]);
    let other = std::fs::canonicalize(dev.device("other")).unwrap();
    let number = other.file_name().unwrap().to_str().unwrap();
    let partition = Path::new("/sys/class/block").join(format!("{number}p1"));
    assert!(!partition.exists(), "{} is of no table of this volume", partition.display());
    dev.stop();
}

/// The block is one that no sample of the whole device has.
#[test]
fn a_volume_of_which_one_block_was_written_is_not_formatted() {
    if !can_attach() || !have("mkfs.ext4") {
        return;
    }
    let scratch = Scratch::new("written");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let device = std::fs::File::options().write(true).open(dev.device("db")).unwrap();
    device.write_all_at(b"x", (32 << 20) + 8192).unwrap();
    device.sync_all().unwrap();
    drop(device);
    dev.ok(&["volume", "detach", "db"]);
    let mut staged = Staged::published(&dev, "db", &scratch.0.join("staging"));
    let refused = staged.stage().unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("unknown"), "{refused}");
    staged.unstage().unwrap();
    dev.stop();
}

/// A volume that is published to the one node of a cluster.
struct Staged {
    runtime: tokio::runtime::Runtime,
    controller: ControllerClient<tonic::transport::Channel>,
    node: NodeClient<tonic::transport::Channel>,
    node_id: String,
    request: NodeStageVolumeRequest,
}

impl Staged {
    fn published(dev: &Dev, name: &str, staging: &Path) -> Self {
        std::fs::create_dir(staging).unwrap();
        let volume_id = dev.json(&["volume", "get", name])["id"].as_str().unwrap().to_owned();
        let node_id = dev.json(&["node", "list"])[0]["name"].as_str().unwrap().to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let channel = {
            let _context = runtime.enter();
            quoin_identity::unix_channel(&dev.directory.join("run/csi/csi.sock"))
        };
        let publish = ControllerPublishVolumeRequest {
            volume_id: volume_id.clone(),
            node_id: node_id.clone(),
            volume_capability: Some(capability()),
            ..ControllerPublishVolumeRequest::default()
        };
        let mut controller = ControllerClient::new(channel.clone());
        let published = runtime.block_on(controller.controller_publish_volume(publish)).unwrap();
        let request = NodeStageVolumeRequest {
            volume_id,
            publish_context: published.into_inner().publish_context,
            staging_target_path: staging.to_str().unwrap().to_owned(),
            volume_capability: Some(capability()),
            ..NodeStageVolumeRequest::default()
        };
        Self { runtime, controller, node: NodeClient::new(channel), node_id, request }
    }

    fn publish(&mut self) {
        let request = ControllerPublishVolumeRequest {
            volume_id: self.request.volume_id.clone(),
            node_id: self.node_id.clone(),
            volume_capability: Some(capability()),
            ..ControllerPublishVolumeRequest::default()
        };
        self.runtime.block_on(self.controller.controller_publish_volume(request)).unwrap();
    }

    /// As an orchestrator does that detaches by force.
    fn unpublish(&mut self) {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: self.request.volume_id.clone(),
            node_id: self.node_id.clone(),
            ..ControllerUnpublishVolumeRequest::default()
        };
        self.runtime.block_on(self.controller.controller_unpublish_volume(request)).unwrap();
    }

    /// Grows the volume, and calls nothing on its node.
    fn grow(&mut self, bytes: i64) {
        let range = CapacityRange { required_bytes: bytes, limit_bytes: 0 };
        let request = ControllerExpandVolumeRequest {
            volume_id: self.request.volume_id.clone(),
            capacity_range: Some(range),
            ..ControllerExpandVolumeRequest::default()
        };
        self.runtime.block_on(self.controller.controller_expand_volume(request)).unwrap();
    }

    fn stage(&mut self) -> Result<(), Status> {
        let call = self.node.node_stage_volume(self.request.clone());
        let limited = async { tokio::time::timeout(Duration::from_secs(60), call).await };
        match self.runtime.block_on(limited) {
            Ok(answer) => answer.map(drop),
            Err(_) => Err(Status::deadline_exceeded("no answer within 60 s")),
        }
    }

    fn publish_at(&mut self, target: &Path) {
        let request = NodePublishVolumeRequest {
            volume_id: self.request.volume_id.clone(),
            staging_target_path: self.request.staging_target_path.clone(),
            target_path: target.to_str().unwrap().to_owned(),
            volume_capability: self.request.volume_capability.clone(),
            ..NodePublishVolumeRequest::default()
        };
        self.runtime.block_on(self.node.node_publish_volume(request)).unwrap();
    }

    fn unpublish_at(&mut self, target: &Path) -> Result<(), Status> {
        let request = NodeUnpublishVolumeRequest {
            volume_id: self.request.volume_id.clone(),
            target_path: target.to_str().unwrap().to_owned(),
        };
        self.runtime.block_on(self.node.node_unpublish_volume(request)).map(drop)
    }

    fn unstage(&mut self) -> Result<(), Status> {
        self.unstage_within(Duration::from_secs(60))
    }

    fn unstage_within(&mut self, time: Duration) -> Result<(), Status> {
        let mut request = tonic::Request::new(NodeUnstageVolumeRequest {
            volume_id: self.request.volume_id.clone(),
            staging_target_path: self.request.staging_target_path.clone(),
        });
        request.set_timeout(time);
        self.runtime.block_on(self.node.node_unstage_volume(request)).map(drop)
    }
}

fn is_mounted(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == path.to_str())
}

/// Devices of this cluster that the kernel has, with their sizes in bytes.
fn devices(dev: &Dev) -> Vec<(String, u64)> {
    let run = dev.directory.join("run").canonicalize().unwrap();
    let entries = std::fs::read_dir("/sys/block").unwrap().flatten();
    let of_it = entries.filter(|entry| {
        std::fs::read_to_string(entry.path().join("loop/backing_file"))
            .is_ok_and(|file| Path::new(file.trim()).starts_with(&run))
    });
    of_it
        .filter_map(|entry| {
            let sectors = std::fs::read_to_string(entry.path().join("size")).ok()?;
            let name = entry.file_name().to_string_lossy().into_owned();
            Some((name, sectors.trim().parse::<u64>().ok()? * 512))
        })
        .collect()
}

/// An orchestrator detaches a volume by force, and may never come back to its host.
#[test]
fn a_volume_that_is_detached_under_its_users_fails_their_io_and_leaves_nothing_on_its_host() {
    if !can_attach() || !have("mkfs.ext4") {
        return;
    }
    let scratch = Scratch::new("left");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let mut staged = Staged::published(&dev, "db", &scratch.0.join("staging"));
    staged.stage().unwrap();

    // A growth of which nobody tells the host.
    staged.grow(80 << 20);
    eventually("the device grows", || (devices(&dev)[0].1 == 80 << 20).then_some(()));

    std::fs::write(scratch.0.join("staging/file"), vec![1; 1 << 20]).unwrap();
    staged.unpublish();
    let began = std::time::Instant::now();
    while staged.unstage().is_err() {
        assert!(began.elapsed() < Duration::from_secs(30), "{}", dev.log("attach"));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(began.elapsed() > Duration::from_secs(2), "it could not be attached again");
    assert_eq!(devices(&dev), []);
    let events = dev.ok(&["events"]);
    assert!(events.contains("DeviceLeft") && events.contains("detach --force"), "{events}");

    // Nobody has it open, and no call comes at all.
    dev.ok(&["volume", "attach", "db"]);
    assert_eq!(devices(&dev).len(), 1);
    staged.unpublish();
    eventually("the device goes", || devices(&dev).is_empty().then_some(()));

    // The same of one that is mounted: its mounts go too, once no program has a file open there.
    staged.publish();
    staged.stage().unwrap();
    let held = std::fs::File::create(scratch.0.join("staging/held")).unwrap();
    staged.unpublish();
    eventually("its IO fails", || {
        let devices = dev.json(&["volume", "get", "db"])["devices"].clone();
        devices.to_string().contains("not attached to this host").then_some(())
    });
    // Reports come every two seconds.
    std::thread::sleep(Duration::from_secs(3));
    assert!(is_mounted(&scratch.0.join("staging")), "it is taken from nobody");
    drop(held);
    eventually("the mount goes", || (!is_mounted(&scratch.0.join("staging"))).then_some(()));
    eventually("the device goes", || devices(&dev).is_empty().then_some(()));
    eventually("its orchestrator may come after all", || staged.unstage().ok());

    // In use, and its volume is deleted: the command takes what is here.
    let id = staged.request.volume_id.clone();
    let device = dev.ok(&["volume", "attach", "db"]);
    let held = std::fs::File::open(device.trim()).unwrap();
    staged.unpublish();
    dev.ok(&["volume", "delete", "db", "--yes"]);
    let removed = dev.ok(&["volume", "detach", &id, "--force"]);
    assert!(removed.contains("removed"), "{removed}");
    drop(held);
    eventually("the device goes", || devices(&dev).is_empty().then_some(()));
    assert!(!dev.quoin(&["volume", "detach", &id]).status.success());
    dev.stop();
}

/// Two of three replicas do not answer, so the IO of a volume that is attached here waits for them.
#[test]
fn without_a_quorum_unpublishing_ends_well_and_unstaging_ends_in_time_and_well_once_it_is_detached()
{
    if !can_attach() || !have("mkfs.ext4") {
        return;
    }
    let scratch = Scratch::new("unpublished-without-quorum");
    let dev = Dev::start(&scratch.cluster(), &["--pools", "3", "--replace-after", "off"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let mut staged = Staged::published(&dev, "db", &scratch.0.join("staging"));
    staged.stage().unwrap();
    let target = scratch.0.join("target");
    staged.publish_at(&target);
    std::fs::write(target.join("file"), vec![1; 1 << 20]).unwrap();
    let pools: Vec<_> = ["pool-b", "pool-c"].iter().map(|name| dev.pid(name).unwrap()).collect();
    pools.iter().for_each(|pid| signal(*pid, "STOP"));

    let began = std::time::Instant::now();
    staged.unpublish_at(&target).unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(!target.exists());
    // With the deadline of its caller; the call goes on behind.
    let began = std::time::Instant::now();
    let refused = staged.unstage_within(Duration::from_secs(4)).unwrap_err();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}: {refused}");

    staged.unpublish();
    let began = std::time::Instant::now();
    while let Err(status) = staged.unstage_within(Duration::from_secs(4)) {
        assert!(began.elapsed() < Duration::from_secs(30), "{status}: {}", dev.log("node"));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(!is_mounted(&scratch.0.join("staging")));
    assert_eq!(devices(&dev), []);
    pools.iter().for_each(|pid| signal(*pid, "CONT"));
    dev.stop();
}

/// Returns the names in a directory.
fn entries(directory: &Path) -> Vec<std::ffi::OsString> {
    let entries = std::fs::read_dir(directory).unwrap().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    names.sort();
    names
}

/// Returns the bytes of each pool that hold data.
fn used(dev: &Dev) -> Vec<u64> {
    let pools = dev.json(&["pool", "list"]);
    pools.as_array().unwrap().iter().map(|pool| pool["usedBytes"].as_u64().unwrap()).collect()
}

#[test]
fn trimmed_blocks_of_a_file_system_are_freed_in_every_pool() {
    const FILE: u64 = 96 << 20;
    /// A sixty-fourth of the pool: trims of so much may wait for more of them.
    const WAITING: u64 = 16 << 20;
    if !can_attach() || !have("mkfs.ext4") || !have("fstrim") {
        return;
    }
    let scratch = Scratch::new("trim");
    let dev = Dev::start(&scratch.cluster(), &["--pool-size", "1GiB"]);
    dev.ok(&["volume", "create", "db", "--size", "256MiB", "--replicas", "3"]);
    let device = dev.device("db");
    dev.wait_for_volume("db", "online", is_online);
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    let kept: Vec<u8> = (0..4 << 20).map(|at: u32| (at / 4096) as u8 ^ at as u8).collect();
    std::fs::write(mount.join("kept"), &kept).unwrap();
    std::fs::write(mount.join("gone"), vec![0xa5; FILE as usize]).unwrap();
    run("sync", &["-f", mount.to_str().unwrap()]);
    let full = dev.eventually("every pool tells what it holds", || {
        let full = used(&dev);
        full.iter().all(|used| *used >= FILE + kept.len() as u64).then_some(full)
    });

    std::fs::remove_file(mount.join("gone")).unwrap();
    // ext4 trims only blocks that its journal has released.
    run("sync", &["-f", mount.to_str().unwrap()]);
    run("fstrim", &[mount.to_str().unwrap()]);
    // The volume gets no more writes.
    dev.eventually("every pool has it free", || {
        let now = used(&dev);
        let freed = |(full, now): (&u64, &u64)| now + FILE - WAITING <= *full;
        full.iter().zip(&now).all(freed).then_some(())
    });
    assert!(std::fs::read(mount.join("kept")).unwrap() == kept, "what was kept is another");
    unmount(&mount);
    dev.stop();
}
