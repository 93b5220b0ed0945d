//! `quoin volume attach`: a volume as a device of this host, without CSI.

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use quoin_api::control::{ListNodesRequest, PublishVolumeRequest, UnpublishVolumeRequest, Volume};
use quoin_attach::protocol::{AttachVolume, Attached, Kind};
use quoin_attach::{AttachClient, Error as AttachError};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::LocalDeviceView;
use super::at_boot::AtBootOptions;
use super::keys::{self, KeyFile};
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::host::attacher::Attacher;
use crate::host::{loop_devices, lost};
use crate::output::{self, Format};

#[derive(Args)]
pub struct AttachOptions {
    /// Its name or id.
    volume: String,
    /// Only serve it as NBD and print its address: for qemu, nbdcopy, fio; needs no root.
    /// `--nbd` is the unix socket of this host, `--nbd=tcp` the address for other hosts, where
    /// the node's target has one (`quoin target --nbd-listen`).
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true,
          default_missing_value = "unix", value_name = "WHERE")]
    nbd: Option<Nbd>,
    /// Let nobody on this host write to it.
    #[arg(long)]
    read_only: bool,
    /// The node that is to use the volume [default: this host, or else the one node of the cluster].
    /// Where that is another host, its own attach process makes the device there.
    #[arg(long)]
    node: Option<String>,
    /// The file with the key of an encrypted volume; - is the standard input.
    #[arg(long, value_name = "FILE")]
    key_file: Option<KeyFile>,
    /// Share it with other nodes, which ask for that too. A file system such as ext4 bears one writer;
    /// several need one that is made for them, or a program that agrees with itself.
    #[arg(long, value_name = "MODE", conflicts_with_all = ["at_boot", "not_at_boot"])]
    share: Option<Share>,
    #[command(flatten)]
    boot: AtBootOptions,
    #[command(flatten)]
    host: HostOptions,
}

/// Where a command finds the processes of its own host.
#[derive(Args)]
pub struct HostOptions {
    /// The directory that `quoin target` and `quoin attach` of this host were given as --run
    /// [default: where the admin socket is; with a context, /run/quoin].
    #[arg(long, value_name = "DIRECTORY", env = "QUOIN_RUN")]
    run: Option<PathBuf>,
}

impl HostOptions {
    pub fn client(&self, client: &ClientOptions) -> ClientOptions {
        ClientOptions { run: self.run.clone(), ..client.clone() }
    }
}

/// How a volume is to be reached on this host now.
#[derive(Serialize, Clone)]
#[serde(rename_all = "camelCase")]
pub struct AttachedView {
    pub volume: String,
    pub id: String,
    pub node: String,
    /// The block device, as the kernel calls it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The link to it under the volume's name, which another attachment has too.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub link: String,
    /// The NBD address that was asked for instead.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub nbd_uri: String,
    pub read_only: bool,
}

/// Usage name that distinguishes a command's attachments from others.
pub const USAGE: &str = "command";

/// How nodes share a volume.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Share {
    /// All may write.
    MultiWriter,
    /// At most one writes; the others attach it read-only.
    SingleWriter,
    /// None writes.
    ReadOnly,
}

impl Share {
    fn word(self) -> &'static str {
        match self {
            Self::MultiWriter => "multi-writer",
            Self::SingleWriter => "single-writer",
            Self::ReadOnly => "read-only",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Nbd {
    Unix,
    Tcp,
}

pub async fn attach(
    cluster: &mut Cluster,
    options: AttachOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let client = &options.host.client(client);
    let volume = get_volume(cluster, &options.volume).await?;
    options.boot.check(&volume)?;
    let here = node_here(client);
    let node = match options.node.or_else(|| here.clone()) {
        Some(node) => node,
        None => only_node(cluster, client).await?,
    };
    let is_elsewhere = match &here {
        Some(here) => *here != node,
        // A host with neither a target nor an attach process only asks.
        None => options.nbd.is_none() && attach_daemon(client).find("").await.is_err(),
    };
    if is_elsewhere && options.nbd == Some(Nbd::Unix) {
        bail!(
            "--nbd is a unix socket of this host, and {node} is another: --nbd=tcp is for other \
             hosts, and without --nbd it gets a block device there"
        );
    }
    if is_elsewhere && options.boot.changes() {
        bail!("attachment at boot is set on the host itself: run the command on {node}");
    }
    if is_elsewhere && keys::is_encrypted(&volume) {
        bail!(
            "the volume is encrypted, and its key is given to a target on its own host only: run \
             the command on {node}"
        );
    }
    if is_elsewhere && options.boot.shows_partitions() {
        bail!("--partitions makes devices of the host it is given on: run the command on {node}");
    }
    let boot_key = match options.boot.is_at_boot() {
        true => keys::boot_key(&volume, options.key_file.as_ref())?,
        false => None,
    };
    let key = keys::key_of(&volume, options.key_file.as_ref())?;
    if is_elsewhere && options.nbd.is_none() {
        let sharing = options.share.map(Share::word).unwrap_or_default();
        let read_only = options.read_only;
        let request = super::remote::Request { volume, node, read_only, sharing };
        return super::remote::attach(cluster, request, client, format).await;
    }
    if options.nbd.is_none() {
        // Before anything is changed: without it the volume would be left half attached.
        check_daemon(client).await?;
    }
    let was_here = volume.attachments.iter().any(|attachment| attachment.node == node);
    let request = PublishVolumeRequest {
        volume: Some(id_ref(&volume.id)),
        node: node.clone(),
        read_only: options.read_only,
        usage: USAGE.into(),
        sharing: options.share.map(Share::word).unwrap_or_default().to_owned(),
        ..PublishVolumeRequest::default()
    };
    cluster.publish_volume(request).await.map_err(refusal)?;
    if let Some(key) = &key {
        keys::hand_over(&volume.id, key, client).await?;
    }
    let view = AttachedView {
        volume: volume.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default(),
        id: volume.id.clone(),
        node: node.clone(),
        device: String::new(),
        link: String::new(),
        nbd_uri: String::new(),
        read_only: options.read_only,
    };
    let nbd = |nbd_uri: String| {
        let view = AttachedView { nbd_uri, ..view.clone() };
        output::print_one(format, &view, || view.nbd_uri.clone())
    };
    if options.nbd == Some(Nbd::Tcp) {
        return nbd(wait_for_uri(cluster, &volume, &node, client).await?);
    }
    let socket = nbd_socket(client, &volume.id);
    wait_for_target(cluster, &volume, &socket, client).await?;
    if options.nbd == Some(Nbd::Unix) {
        // A socket serves one volume, as its default export.
        return nbd(format!("nbd+unix:///?socket={}", socket.display()));
    }
    let request = AttachVolume {
        volume: volume.id.clone(),
        nbd_socket: socket,
        size: volume.size_bytes,
        block_size: volume.spec.as_ref().map_or(0, |spec| spec.block_size),
        read_only: options.read_only || options.share == Some(Share::ReadOnly),
        file_only: false,
        key,
    };
    let daemon = attach_daemon(client);
    let Ok(answer) = tokio::time::timeout(client.timeout(), daemon.attach(request)).await else {
        bail!(
            "the volume is served, and is no block device after {} s (--timeout): the attach process \
             waits for the kernel, or for the volume's IO (`quoin volume get {}` says what it waits \
             for). Run the command again to wait on, or take its NBD address with --nbd",
            client.timeout,
            output::quoted(&view.volume)
        );
    };
    let attached = match answer {
        // The refusal is permanent, so the volume does not stay attached without a device.
        Err(AttachError::Refused { kind: Kind::Host, message }) if !was_here => {
            let request = UnpublishVolumeRequest {
                volume: Some(id_ref(&volume.id)),
                node,
                ..UnpublishVolumeRequest::default()
            };
            cluster.unpublish_volume(request).await.map_err(refusal)?;
            bail!("{message}; the volume is detached again (`--nbd` attaches it without a device)")
        }
        answered => answered.context(
            "the volume is served but is no block device yet; `--nbd` gives its NBD address instead",
        )?,
    };
    // Before all that can fail: commands and fstab use the link. A device without one, where something
    // is in the way, is a device all the same, and the attach process reports that in its log.
    let linked = daemon.link(&volume.id, &view.volume).await.ok().and_then(|linked| linked.link);
    warn_about_dead_mounts(&volume, client);
    let after = options.boot.apply(&volume, options.read_only, boot_key, &attached.device);
    after.with_context(|| {
        let made = linked.as_deref().unwrap_or(&attached.device);
        format!("the volume is attached as {}", made.display())
    })?;
    if volume.spec.as_ref().is_some_and(|spec| spec.block_size == 4096)
        && has_small_sectors(&attached.device)
    {
        eprintln!(
            "note: the volume holds a partition table for sectors of 512 bytes, and has blocks of \
             4096: its partitions are not found. Copy the image to a volume made with --block-size 512"
        );
    }
    let shown = |path: &Path| path.display().to_string();
    let view = AttachedView {
        device: shown(&attached.device),
        link: linked.as_deref().map(shown).unwrap_or_default(),
        ..view
    };
    output::print_one(format, &view, || match view.link.as_str() {
        "" => view.device.clone(),
        link => link.to_owned(),
    })
}

/// Time for a device to show its first bytes; a volume without a majority shows none.
const LOOK: Duration = Duration::from_secs(2);

/// Returns true if the device holds a GPT that was made for sectors of 512 bytes.
fn has_small_sectors(device: &Path) -> bool {
    use std::io::Read;
    let device = device.to_owned();
    let (answer, looked) = std::sync::mpsc::channel();
    // On a thread, which can be given up.
    std::thread::spawn(move || {
        let mut head = [0; 4096];
        let read = std::fs::File::open(device).and_then(|mut file| file.read_exact(&mut head));
        // The caller may have stopped waiting.
        let _ = answer.send(read.is_ok() && is_for_small_sectors(&head));
    });
    looked.recv_timeout(LOOK).unwrap_or(false)
}

/// A protective MBR with one partition of kind `ee`, and the header of the GPT at byte 512.
fn is_for_small_sectors(head: &[u8; 4096]) -> bool {
    const PARTITION_KIND: usize = 446 + 4;
    head[510..512] == *b"\x55\xaa"
        && (0..4).any(|entry| head[PARTITION_KIND + entry * 16] == 0xee)
        && head[512..520] == *b"EFI PART"
}

pub(super) fn attach_daemon(client: &ClientOptions) -> AttachClient {
    AttachClient::new(client.run_directory().join("attach").join("attach.sock"))
}

/// Succeeds if this host can have block devices, asked of the process that makes them.
async fn check_daemon(client: &ClientOptions) -> Result<()> {
    let attacher = Attacher::of(&client.run_directory());
    if let Some(stuck) = attacher.filter(Attacher::is_stuck) {
        bail!(
            "this host cannot make block devices: {stuck}. {}; or take an NBD address with --nbd",
            stuck.way_out()
        );
    }
    // Any volume will do: an answer is proof enough.
    match attach_daemon(client).find("").await {
        Ok(_) => Ok(()),
        Err(_) if !rustix::process::geteuid().is_root() => bail!(
            "a block device needs root: run the command with sudo where `quoin attach` runs, or \
             take an NBD address, which needs none, with --nbd"
        ),
        Err(AttachError::Daemon { socket, .. }) => bail!(
            "no `quoin attach` serves {}: `quoin dev` starts one where root, /dev/fuse and loop \
             devices are there. Where it runs with another --run, name that directory with --run; \
             or take an NBD address with --nbd",
            socket.display()
        ),
        Err(error) => Err(error.into()),
    }
}

/// The block device that this host has of the volume.
async fn device_here(volume: &Volume, client: &ClientOptions) -> Option<PathBuf> {
    attached_here(volume, client).await.map(|attached| attached.device)
}

pub(super) async fn attached_here(volume: &Volume, client: &ClientOptions) -> Option<Attached> {
    // Without a daemon there is no device.
    attach_daemon(client).find(&volume.id).await.ok()?
}

/// Devices and mounts of a volume on this host; `None` where there is nothing to report.
pub async fn local_device(volume: &Volume, client: &ClientOptions) -> Option<LocalDeviceView> {
    // The daemon is busy with the volume itself for as long as an attach takes.
    let asked = tokio::time::timeout(Duration::from_secs(2), attached_here(volume, client));
    let attached = asked.await.ok().flatten();
    let link = attached.as_ref().and_then(|attached| attached.link.clone());
    let ended = attached.as_ref().map(|attached| attached.dead.clone()).unwrap_or_default();
    let mut device = attached.map(|attached| attached.device);
    let stuck = Attacher::of(&client.run_directory()).filter(Attacher::is_stuck);
    if device.is_none() && stuck.is_some() {
        // The kernel knows what it holds.
        let run = std::fs::canonicalize(client.run_directory()).unwrap_or_default();
        let held = loop_devices::Device::over(&run).unwrap_or_default();
        device = held.into_iter().find(|held| held.volume == volume.id).map(|held| held.path);
    }
    let mounts =
        device.as_deref().map(loop_devices::mounts_of_all).and_then(Result::ok).unwrap_or_default();
    let shown = |mount: &loop_devices::Mount| mount.target.display().to_string();
    let dead = lost::mounts_of(&client.run_directory(), &volume.id);
    if device.is_none() && dead.is_empty() && stuck.is_none() {
        return None;
    }
    Some(LocalDeviceView {
        device: device.map(|device| device.display().to_string()).unwrap_or_default(),
        link: link.map(|link| link.display().to_string()).unwrap_or_default(),
        ended,
        mounts: mounts.iter().map(shown).collect(),
        blocked: stuck.map(|stuck| format!("{stuck}: {}", stuck.way_out())).unwrap_or_default(),
        dead_mounts: dead.iter().map(|(_, mount)| shown(mount)).collect(),
    })
}

/// Warns of file systems that lost their device: they still look mounted.
pub(super) fn warn_about_dead_mounts(volume: &Volume, client: &ClientOptions) {
    for (device, mount) in lost::mounts_of(&client.run_directory(), &volume.id) {
        let (device, target) = (device.path.display(), mount.target.display());
        eprintln!(
            "warning: {target} is a dead mount of this volume: {device} below it was lost with \
             the process that served it. End its users and run `umount {target}`"
        );
    }
}

/// This host's device of the volume, where the attach process of another run directory serves it: a
/// wrong directory must not look like a host without a device.
pub(super) fn other_daemons_device(
    volume: &Volume,
    client: &ClientOptions,
) -> Result<Option<loop_devices::Device>> {
    let run = std::path::absolute(client.run_directory()).context("find the run directory")?;
    let run = std::fs::canonicalize(&run).unwrap_or(run);
    let all = loop_devices::Device::over(Path::new("/"))?;
    // Paths alone do not suffice: a device of another table of mounts is not this host's.
    let alive = |device: &loop_devices::Device| {
        device.volume == volume.id && device.is_mounted_here() && !device.is_dead()
    };
    Ok(all.into_iter().find(|device| alive(device) && !device.is_below(&run)))
}

/// Lets the block device of this host, if there is one, show the volume's new size. Gives the
/// commands by which the file systems on it follow.
pub async fn resize_device(volume: &Volume, client: &ClientOptions) -> Result<Vec<String>> {
    let Some(device) = device_here(volume, client).await else {
        if let Some(device) = other_daemons_device(volume, client)? {
            eprintln!(
                "warning: {} is this volume, served by another `quoin attach` than the one of {}: it \
                 grows when this is run again with the right --run",
                device.path.display(),
                client.run_directory().display()
            );
        }
        return Ok(Vec::new());
    };
    let daemon = attach_daemon(client);
    let began = Instant::now();
    // The target receives the new size a moment later than this command.
    loop {
        match daemon.resize(&volume.id, volume.size_bytes).await {
            Ok(_) => break,
            Err(AttachError::Refused { kind: Kind::Unavailable, .. })
                if began.elapsed() < client.timeout() =>
            {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => return Err(error).context("grow the block device"),
        }
    }
    let mut mounts = loop_devices::mounts_of(&device)?;
    mounts.dedup_by(|one, other| one.filesystem == other.filesystem);
    Ok(mounts
        .iter()
        .map(|mount| match mount.filesystem.as_str() {
            "xfs" => format!("xfs_growfs {}", output::quoted(&mount.target.to_string_lossy())),
            _ => format!("resize2fs {}", device.display()),
        })
        .collect())
}

/// Where the target of this host serves the volume.
fn nbd_socket(client: &ClientOptions, volume_id: &str) -> PathBuf {
    client.run_directory().join("nbd").join(format!("{volume_id}.sock"))
}

/// The node that this host is, as its target reports.
pub(super) fn node_here(client: &ClientOptions) -> Option<String> {
    let path = client.run_directory().join(quoin_target::NODE_FILE);
    let name = std::fs::read_to_string(path).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// The node to attach to when none is named and this host is no node: the only one; with several,
/// the error asks for a name.
async fn only_node(cluster: &mut Cluster, client: &ClientOptions) -> Result<String> {
    let nodes = cluster.list_nodes(ListNodesRequest {}).await.map_err(refusal)?.into_inner().nodes;
    match nodes.as_slice() {
        [node] => Ok(node.name.clone()),
        [] => bail!(
            "no node has joined yet: a host that uses volumes runs `quoin target`, started the first \
             time with a token of `quoin token create --role node`"
        ),
        several => {
            let names: Vec<_> = several.iter().map(|node| node.name.as_str()).collect();
            bail!(
                "no `quoin target` of this host serves {}: name the node that is to use the volume \
                 with --node ({}), or this host's directory with --run",
                client.run_directory().display(),
                names.join(", ")
            )
        }
    }
}

/// The address that the node's target reports once it serves the volume.
async fn wait_for_uri(
    cluster: &mut Cluster,
    volume: &Volume,
    node: &str,
    client: &ClientOptions,
) -> Result<String> {
    let began = Instant::now();
    loop {
        let now = get_volume(cluster, &volume.id).await?;
        let attachment = now.attachments.iter().find(|attachment| attachment.node == node);
        match attachment {
            Some(attachment) if !attachment.nbd_uri.is_empty() => {
                return Ok(attachment.nbd_uri.clone());
            }
            Some(attachment) if attachment.phase == "Attached" => bail!(
                "the target of node {node} serves the volume on its own host only: start it with \
                 --nbd-listen to have NBD over TCP"
            ),
            _ if began.elapsed() > client.timeout() => bail!(
                "the volume is published, but after {} s node {node} does not serve it: {}",
                client.timeout,
                attachment.map_or("it was detached meanwhile", |attachment| &attachment.message)
            ),
            _ => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
        }
    }
}

async fn wait_for_target(
    cluster: &mut Cluster,
    volume: &Volume,
    socket: &Path,
    client: &ClientOptions,
) -> Result<()> {
    let began = Instant::now();
    // The file alone proves nothing: a killed target leaves it behind.
    while tokio::net::UnixStream::connect(socket).await.is_err() {
        if began.elapsed() > client.timeout() {
            let now = get_volume(cluster, &volume.id).await?;
            let reason = match now.waiting_for.as_str() {
                "" => "its target does not listen yet",
                reason => reason,
            };
            bail!(
                "the volume is published, but after {} s {} is not served: {reason}. \
                 `quoin events` tells more, and the command may be repeated; where this host's \
                 target runs with another --run, name that directory with --run",
                client.timeout,
                socket.display()
            );
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_table_for_other_sectors_is_recognised() {
        let mut head = [0; 4096];
        assert!(!is_for_small_sectors(&head));
        head[510..512].copy_from_slice(b"\x55\xaa");
        head[450] = 0xee;
        assert!(!is_for_small_sectors(&head), "the table itself may be at byte 4096");
        head[512..520].copy_from_slice(b"EFI PART");
        assert!(is_for_small_sectors(&head));
        head[450] = 0x83;
        assert!(!is_for_small_sectors(&head));
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!has_small_sectors(file.path()), "it is too small");
        head[450] = 0xee;
        std::fs::write(file.path(), head).unwrap();
        assert!(has_small_sectors(file.path()));
    }
}
