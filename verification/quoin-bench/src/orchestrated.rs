//! Volumes as an orchestrator handles them, over CSI: a first mount beside one by hand, a thousand
//! volumes, and the time until a change of a volume's options is in force.
//!
//! A volume needs a mount, so these cases need root and /dev/fuse; without them they are left out.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use quoin_api::csi::*;
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::compare::median;
use crate::further::Fact;
use crate::product::Product;
use crate::{Error, Options, usage};

pub const FIRST_MOUNT: &str = "csi-first-mount";
pub const MANY: &str = "csi-volumes";
pub const MODIFY: &str = "csi-modify";

const VOLUME_BYTES: i64 = 1 << 30;
/// Volumes of the case with many, which are never written.
const SMALL_BYTES: i64 = 16 << 20;
const PAGE: i32 = 100;
/// Pairs of a first mount by hand and over CSI.
const PAIRS: usize = 5;
const CHANGES: usize = 20;
/// Calls of the case with many volumes that are under way at a time, as sidecars have workers.
const CALLERS: usize = 16;
/// An orchestrator repeats what is busy for so long.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let names = [FIRST_MOUNT, MANY, MODIFY];
    if !names.iter().any(|name| options.wants(name)) {
        return Ok(Vec::new());
    }
    if !may_mount(&names.join(", ")) {
        return Ok(Vec::new());
    }
    let product = Product::start_attaching(quoin, &directory.join("quoin"), &[])?;
    let socket = product.path("run/csi/csi.sock");
    let mut orchestrator = Orchestrator::new(&socket, directory)?;
    let mut facts = Vec::new();
    if options.wants(FIRST_MOUNT) {
        eprintln!("measuring {FIRST_MOUNT}");
        facts.extend(first_mount(&mut orchestrator, directory)?);
    }
    if options.wants(MODIFY) {
        eprintln!("measuring {MODIFY}");
        facts.push(modify(&mut orchestrator)?);
    }
    if options.wants(MANY) {
        let count = options.further.csi_volumes;
        eprintln!("measuring {MANY} with {count} volumes");
        let callers = (0..CALLERS).map(|_| Orchestrator::new(&socket, directory));
        facts.extend(many(&mut callers.collect::<Result<Vec<_>, _>>()?, &product, count)?);
    }
    Ok(facts)
}

/// Returns true if volumes can be mounted here; otherwise it is said which cases are left out.
pub(crate) fn may_mount(cases: &str) -> bool {
    let may = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !may {
        eprintln!("leaving out {cases}: mounts need root and /dev/fuse");
    }
    may
}

/// Create, publish, stage and publish on the node, as a multiple of what is done by hand: `mkfs` and
/// `mount` on the device of a volume that is attached, and the same on a plain file, which has one
/// copy and no network.
fn first_mount(orchestrator: &mut Orchestrator, directory: &Path) -> Result<Vec<Fact>, Error> {
    let (mut beside_device, mut beside_file) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        let on_file = ByHand::on_file(directory)?;
        let by_hand = orchestrator.create(&format!("by-hand-{pair}"), VOLUME_BYTES, &block())?;
        orchestrator.bring_up(&by_hand, &block())?;
        let on_device = ByHand::on_device(&orchestrator.target, directory)?;
        orchestrator.take_down(&by_hand)?;
        orchestrator.delete(&by_hand)?;

        let began = Instant::now();
        let volume_id = orchestrator.create(&format!("first-{pair}"), VOLUME_BYTES, &mount())?;
        orchestrator.bring_up(&volume_id, &mount())?;
        let over_csi = began.elapsed().as_secs_f64();
        orchestrator.take_down(&volume_id)?;
        orchestrator.delete(&volume_id)?;
        beside_device.push(over_csi / on_device.as_secs_f64());
        beside_file.push(over_csi / on_file.as_secs_f64());
    }
    let fact =
        |name: String, ratios, goal| Fact { name, value: median(ratios), unit: "× by hand", goal };
    Ok(vec![
        fact(FIRST_MOUNT.to_owned(), beside_device, 1.5),
        fact(format!("{FIRST_MOUNT}-plain-file"), beside_file, 20.0),
    ])
}

/// A file system made and mounted by hand; unmounted when it is dropped.
struct ByHand {
    mount: PathBuf,
    file: Option<PathBuf>,
}

impl ByHand {
    /// Returns the time that it took on a new file of the same disk.
    fn on_file(directory: &Path) -> Result<Duration, Error> {
        let path = directory.join("plain");
        let began = Instant::now();
        let file = std::fs::File::create(&path).map_err(Error::io("make a file"))?;
        file.set_len(VOLUME_BYTES.unsigned_abs()).map_err(Error::io("size a file"))?;
        let made = Self { mount: directory.join("by-hand"), file: Some(path.clone()) };
        made.make(&path, began)
    }

    /// Returns the time that it took on the device of a volume.
    fn on_device(device: &Path, directory: &Path) -> Result<Duration, Error> {
        Self { mount: directory.join("by-hand"), file: None }.make(device, Instant::now())
    }

    fn make(self, device: &Path, began: Instant) -> Result<Duration, Error> {
        std::fs::create_dir_all(&self.mount).map_err(Error::io("make a directory"))?;
        let (device, mount) = (device.to_string_lossy(), self.mount.to_string_lossy());
        tool("mkfs.ext4", &["-q", "-F", &device])?;
        let loops: &[&str] = if self.file.is_some() { &["-o", "loop"] } else { &[] };
        tool("mount", &[loops, &[&device, &mount]].concat())?;
        Ok(began.elapsed())
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = tool("umount", &[&self.mount.to_string_lossy()]);
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn tool(name: &str, arguments: &[&str]) -> Result<(), Error> {
    let mut command = Command::new(name);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let status = command.status().map_err(Error::io(format!("run {name}")))?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::Failed(format!("{name} ended with {status}"))),
    }
}

/// Longest time until ControllerModifyVolume of a mounted volume says that the change is in force.
fn modify(orchestrator: &mut Orchestrator) -> Result<Fact, Error> {
    let volume_id = orchestrator.create("modified", VOLUME_BYTES, &mount())?;
    orchestrator.bring_up(&volume_id, &mount())?;
    let mut longest = Duration::ZERO;
    for change in 0..CHANGES {
        let values = [
            ("iopsLimit".to_owned(), (100_000 + change).to_string()),
            ("durability".to_owned(), ["media", "cache"][change % 2].to_owned()),
        ];
        let request = ControllerModifyVolumeRequest {
            volume_id: volume_id.clone(),
            mutable_parameters: values.into_iter().collect(),
            ..Default::default()
        };
        let began = Instant::now();
        orchestrator.controller(request, |mut client, request| async move {
            client.controller_modify_volume(request).await
        })?;
        longest = longest.max(began.elapsed());
    }
    orchestrator.take_down(&volume_id)?;
    orchestrator.delete(&volume_id)?;
    Ok(Fact { name: MODIFY.to_owned(), value: longest.as_secs_f64(), unit: "s", goal: 1.0 })
}

/// Volumes that are made, listed, snapshotted and deleted.
fn many(callers: &mut [Orchestrator], product: &Product, count: usize) -> Result<Vec<Fact>, Error> {
    let controllers = || product.pids_of("controller");
    let memory = || controllers().iter().filter_map(|pid| usage::resident_bytes(*pid)).max();
    let before = memory().unwrap_or_default();
    let began = Instant::now();
    let ids = for_each(callers, count, |caller, number| {
        caller.create(&format!("many-{number}"), SMALL_BYTES, &mount())
    })?;
    let made = began.elapsed();
    let held = memory().unwrap_or_default().saturating_sub(before);
    let began = Instant::now();
    let listed = callers[0].list()?;
    let listing = began.elapsed();
    if listed != count {
        return Err(Error::Failed(format!("{listed} of {count} volumes are listed")));
    }
    let began = Instant::now();
    for_each(callers, count, |caller, number| {
        caller.snapshot(&ids[number], &format!("snapshot-{number}"))
    })?;
    let snapshots = began.elapsed();
    let began = Instant::now();
    for_each(callers, count, |caller, number| caller.delete(&ids[number]))?;
    let deleted = began.elapsed();
    let fact = |what: &str, value, unit, goal| {
        Fact::of(format!("{MANY}-{count}"), what, value, unit, goal)
    };
    let each = |time: Duration| time.as_secs_f64() * 1e3 / count.max(1) as f64;
    Ok(vec![
        fact("made", each(made), "ms each", 100.0),
        fact("listed", listing.as_secs_f64(), "s", 1.0),
        fact("snapshotted", each(snapshots), "ms each", 500.0),
        fact("deleted", each(deleted), "ms each", 100.0),
        fact("memory", held as f64 / 1024.0 / count.max(1) as f64, "KiB each", 20.0),
    ])
}

/// Calls once for each number below `count`, all callers at once, and returns the answers in order.
fn for_each<T: Send>(
    callers: &mut [Orchestrator],
    count: usize,
    call: impl Fn(&Orchestrator, usize) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let next = AtomicUsize::new(0);
    let work = |caller: &Orchestrator| {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        let numbers = numbers.take_while(|number| *number < count);
        numbers.map(|number| Ok((number, call(caller, number)?))).collect::<Result<Vec<_>, Error>>()
    };
    let answers = std::thread::scope(|scope| {
        let started: Vec<_> =
            callers.iter_mut().map(|caller| scope.spawn(|| work(caller))).collect();
        let ended = started.into_iter().map(|thread| thread.join().expect("no caller panics"));
        ended.collect::<Result<Vec<_>, Error>>()
    })?;
    let mut answers: Vec<_> = answers.into_iter().flatten().collect();
    answers.sort_by_key(|(number, _)| *number);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

/// A client of one CSI socket.
pub(crate) struct Orchestrator {
    runtime: Runtime,
    channel: Channel,
    node_id: String,
    staging: PathBuf,
    /// Path of a volume that was brought up.
    pub target: PathBuf,
}

fn capability(access_type: AccessType) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(access_type),
    }
}

pub(crate) fn mount() -> VolumeCapability {
    capability(AccessType::Mount(MountVolume { fs_type: "ext4".into(), ..MountVolume::default() }))
}

pub(crate) fn block() -> VolumeCapability {
    capability(AccessType::Block(BlockVolume {}))
}

impl Orchestrator {
    pub fn new(socket: &Path, directory: &Path) -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Error::io("start a runtime"))?;
        let channel = {
            let _context = runtime.enter();
            quoin_identity::unix_channel(socket)
        };
        let (staging, target) = (directory.join("staging"), directory.join("pods/target"));
        for made in [&staging, &directory.join("pods")] {
            std::fs::create_dir_all(made).map_err(Error::io("make a directory"))?;
        }
        let mut this = Self { runtime, channel, node_id: String::new(), staging, target };
        let info = this.node(NodeGetInfoRequest {}, |mut client, request| async move {
            client.node_get_info(request).await
        })?;
        this.node_id = info.node_id;
        Ok(this)
    }

    /// Calls until it works, as orchestrators do.
    fn call<T, F>(&self, mut attempt: impl FnMut() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let began = Instant::now();
        loop {
            let status = match self.runtime.block_on(attempt()) {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) => status,
            };
            let is_passing = [Code::Unavailable, Code::Aborted].contains(&status.code());
            if !is_passing || began.elapsed() > PATIENCE {
                return Err(Error::Failed(status.message().to_owned()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn controller<R: Clone, T, F>(
        &self,
        request: R,
        call: impl Fn(ControllerClient<Channel>, R) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.call(|| call(ControllerClient::new(self.channel.clone()), request.clone()))
    }

    fn node<R: Clone, T, F>(
        &self,
        request: R,
        call: impl Fn(NodeClient<Channel>, R) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.call(|| call(NodeClient::new(self.channel.clone()), request.clone()))
    }

    fn create(
        &self,
        name: &str,
        bytes: i64,
        capability: &VolumeCapability,
    ) -> Result<String, Error> {
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            volume_capabilities: vec![capability.clone()],
            ..Default::default()
        };
        let made = self.controller(request, |mut client, request| async move {
            client.create_volume(request).await
        })?;
        Ok(made.volume.unwrap_or_default().volume_id)
    }

    /// Publishes a volume, stages it, and publishes it on the node.
    pub fn bring_up(&self, volume_id: &str, capability: &VolumeCapability) -> Result<(), Error> {
        let publish = ControllerPublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            node_id: self.node_id.clone(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        let published = self.controller(publish, |mut client, request| async move {
            client.controller_publish_volume(request).await
        })?;
        let stage = NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            publish_context: published.publish_context.clone(),
            staging_target_path: self.staging.to_string_lossy().into_owned(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        self.node(
            stage,
            |mut client, request| async move { client.node_stage_volume(request).await },
        )?;
        let place = NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            publish_context: published.publish_context,
            staging_target_path: self.staging.to_string_lossy().into_owned(),
            target_path: self.target.to_string_lossy().into_owned(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        self.node(place, |mut client, request| async move {
            client.node_publish_volume(request).await
        })?;
        Ok(())
    }

    fn take_down(&self, volume_id: &str) -> Result<(), Error> {
        self.unstage(volume_id)?;
        self.unpublish(volume_id)
    }

    /// Takes a volume from the node's paths; it stays published to the node.
    pub fn unstage(&self, volume_id: &str) -> Result<(), Error> {
        let unplace = NodeUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            target_path: self.target.to_string_lossy().into_owned(),
        };
        self.node(unplace, |mut client, request| async move {
            client.node_unpublish_volume(request).await
        })?;
        let unstage = NodeUnstageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: self.staging.to_string_lossy().into_owned(),
        };
        self.node(unstage, |mut client, request| async move {
            client.node_unstage_volume(request).await
        })?;
        Ok(())
    }

    pub fn unpublish(&self, volume_id: &str) -> Result<(), Error> {
        let unpublish = ControllerUnpublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            node_id: self.node_id.clone(),
            ..Default::default()
        };
        self.controller(unpublish, |mut client, request| async move {
            client.controller_unpublish_volume(request).await
        })?;
        Ok(())
    }

    fn delete(&self, volume_id: &str) -> Result<(), Error> {
        let request = DeleteVolumeRequest { volume_id: volume_id.to_owned(), ..Default::default() };
        self.controller(request, |mut client, request| async move {
            client.delete_volume(request).await
        })?;
        Ok(())
    }

    fn snapshot(&self, volume_id: &str, name: &str) -> Result<(), Error> {
        let request = CreateSnapshotRequest {
            source_volume_id: volume_id.to_owned(),
            name: name.to_owned(),
            ..Default::default()
        };
        self.controller(request, |mut client, request| async move {
            client.create_snapshot(request).await
        })?;
        Ok(())
    }

    /// Returns the number of volumes, read page by page.
    fn list(&self) -> Result<usize, Error> {
        let (mut count, mut starting_token) = (0, String::new());
        loop {
            let request = ListVolumesRequest { max_entries: PAGE, starting_token };
            let page = self.controller(request, |mut client, request| async move {
                client.list_volumes(request).await
            })?;
            count += page.entries.len();
            starting_token = page.next_token;
            if starting_token.is_empty() {
                return Ok(count);
            }
        }
    }
}

impl Drop for Orchestrator {
    fn drop(&mut self) {
        // A case that failed leaves its mounts.
        for path in [&self.target, &self.staging] {
            let mut command = Command::new("umount");
            command.args(["-l", "-q"]).arg(path).stdin(Stdio::null()).stderr(Stdio::null());
            let _ = command.status();
        }
    }
}
