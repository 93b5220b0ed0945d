//! Volumes as an orchestrator handles them, over CSI: a first mount beside one by hand, a thousand
//! volumes, and the time until a change of a volume's options is in force.
//!
//! A volume needs a mount, so these cases need root and /dev/fuse; without them they are left out.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{AccessMode, AccessType, MountVolume};
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
/// An orchestrator repeats what is busy for so long.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let names = [FIRST_MOUNT, MANY, MODIFY];
    if !names.iter().any(|name| options.wants(name)) {
        return Ok(Vec::new());
    }
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || !Path::new("/dev/fuse").exists() {
        eprintln!("leaving out {}: mounts need root and /dev/fuse", names.join(", "));
        return Ok(Vec::new());
    }
    let product = Product::start_attaching(quoin, &directory.join("quoin"))?;
    let mut orchestrator = Orchestrator::new(&product.path("run/csi/csi.sock"), directory)?;
    let mut facts = Vec::new();
    if options.wants(FIRST_MOUNT) {
        eprintln!("measuring {FIRST_MOUNT}");
        facts.push(first_mount(&mut orchestrator, directory)?);
    }
    if options.wants(MODIFY) {
        eprintln!("measuring {MODIFY}");
        facts.push(modify(&mut orchestrator)?);
    }
    if options.wants(MANY) {
        let count = options.further.csi_volumes;
        eprintln!("measuring {MANY} with {count} volumes");
        facts.extend(many(&mut orchestrator, &product, count)?);
    }
    Ok(facts)
}

/// Create, publish, stage and publish on the node, as a multiple of mkfs and mount on a plain file.
fn first_mount(orchestrator: &mut Orchestrator, directory: &Path) -> Result<Fact, Error> {
    let mut ratios = Vec::new();
    for pair in 0..PAIRS {
        let by_hand = ByHand::time(directory)?;
        let name = format!("first-{pair}");
        let began = Instant::now();
        let volume_id = orchestrator.create(&name, VOLUME_BYTES)?;
        orchestrator.mount(&volume_id)?;
        let over_csi = began.elapsed();
        orchestrator.unmount(&volume_id)?;
        orchestrator.delete(&volume_id)?;
        ratios.push(over_csi.as_secs_f64() / by_hand.as_secs_f64());
    }
    Ok(Fact { name: FIRST_MOUNT.to_owned(), value: median(ratios), unit: "× by hand", goal: 1.5 })
}

/// A file system on a file of the same disk.
struct ByHand {
    file: PathBuf,
    mount: PathBuf,
}

impl ByHand {
    fn time(directory: &Path) -> Result<Duration, Error> {
        let plain = Self { file: directory.join("plain"), mount: directory.join("plain-mount") };
        std::fs::create_dir_all(&plain.mount).map_err(Error::io("make a directory"))?;
        let began = Instant::now();
        let file = std::fs::File::create(&plain.file).map_err(Error::io("make a file"))?;
        file.set_len(VOLUME_BYTES.unsigned_abs()).map_err(Error::io("size a file"))?;
        tool("mkfs.ext4", &["-q", "-F", &plain.file.to_string_lossy()])?;
        let (file, mount) = (plain.file.to_string_lossy(), plain.mount.to_string_lossy());
        tool("mount", &["-o", "loop", &file, &mount])?;
        Ok(began.elapsed())
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = tool("umount", &[&self.mount.to_string_lossy()]);
        let _ = std::fs::remove_file(&self.file);
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
    let volume_id = orchestrator.create("modified", VOLUME_BYTES)?;
    orchestrator.mount(&volume_id)?;
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
    orchestrator.unmount(&volume_id)?;
    orchestrator.delete(&volume_id)?;
    Ok(Fact { name: MODIFY.to_owned(), value: longest.as_secs_f64(), unit: "s", goal: 1.0 })
}

/// Volumes that are made, listed, snapshotted and deleted one after the other.
fn many(
    orchestrator: &mut Orchestrator,
    product: &Product,
    count: usize,
) -> Result<Vec<Fact>, Error> {
    let controllers = || product.pids_of("controller");
    let memory = || controllers().iter().filter_map(|pid| usage::resident_bytes(*pid)).max();
    let before = memory().unwrap_or_default();
    let mut ids = Vec::new();
    let began = Instant::now();
    for number in 0..count {
        ids.push(orchestrator.create(&format!("many-{number}"), SMALL_BYTES)?);
    }
    let made = began.elapsed();
    let held = memory().unwrap_or_default().saturating_sub(before);
    let began = Instant::now();
    let listed = orchestrator.list()?;
    let listing = began.elapsed();
    if listed != count {
        return Err(Error::Failed(format!("{listed} of {count} volumes are listed")));
    }
    let began = Instant::now();
    for (number, volume_id) in ids.iter().enumerate() {
        orchestrator.snapshot(volume_id, &format!("snapshot-{number}"))?;
    }
    let snapshots = began.elapsed();
    let began = Instant::now();
    ids.iter().try_for_each(|volume_id| orchestrator.delete(volume_id))?;
    let deleted = began.elapsed();
    let fact = |what: &str, value, unit, goal| Fact {
        name: format!("{MANY}-{count}-{what}"),
        value,
        unit,
        goal,
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

/// A client of one CSI socket.
struct Orchestrator {
    runtime: Runtime,
    channel: Channel,
    node_id: String,
    staging: PathBuf,
    target: PathBuf,
}

fn capability() -> VolumeCapability {
    let mount = MountVolume { fs_type: "ext4".into(), ..MountVolume::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

impl Orchestrator {
    fn new(socket: &Path, directory: &Path) -> Result<Self, Error> {
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

    fn create(&self, name: &str, bytes: i64) -> Result<String, Error> {
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            volume_capabilities: vec![capability()],
            ..Default::default()
        };
        let made = self.controller(request, |mut client, request| async move {
            client.create_volume(request).await
        })?;
        Ok(made.volume.unwrap_or_default().volume_id)
    }

    fn mount(&self, volume_id: &str) -> Result<(), Error> {
        let publish = ControllerPublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            node_id: self.node_id.clone(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        let published = self.controller(publish, |mut client, request| async move {
            client.controller_publish_volume(request).await
        })?;
        let stage = NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            publish_context: published.publish_context.clone(),
            staging_target_path: self.staging.to_string_lossy().into_owned(),
            volume_capability: Some(capability()),
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
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.node(place, |mut client, request| async move {
            client.node_publish_volume(request).await
        })?;
        Ok(())
    }

    fn unmount(&self, volume_id: &str) -> Result<(), Error> {
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
