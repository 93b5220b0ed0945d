//! `quoin volume attach|detach`: a volume as a device of this host, without CSI.

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use quoin_frontend::attach::AttachClient;
use quoin_frontend::attach::protocol::AttachVolume;
use quoin_proto::control::{
    ListNodesRequest, PublishVolumeRequest, UnpublishVolumeRequest, Volume,
};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::client::{ClientOptions, Cluster, get_volume, refusal, volume_ref};
use crate::output;

#[derive(Args)]
pub struct AttachOptions {
    volume: String,
    /// Only serve it as NBD and print its address: for qemu, nbdcopy, fio; needs no root.
    /// `--nbd` is the unix socket of this host, `--nbd=tcp` the address for other hosts, where
    /// the node's target has one (`quoin target --nbd-listen`).
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true,
          default_missing_value = "unix", value_name = "WHERE")]
    nbd: Option<Nbd>,
    #[arg(long)]
    read_only: bool,
    /// The node that this host is [default: the one node of the cluster].
    #[arg(long)]
    node: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Nbd {
    Unix,
    Tcp,
}

#[derive(Args)]
pub struct DetachOptions {
    volume: String,
    /// The node to detach it from [default: every one].
    #[arg(long)]
    node: Option<String>,
}

pub async fn attach(
    cluster: &mut Cluster,
    options: AttachOptions,
    client: &ClientOptions,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let node = match options.node {
        Some(node) => node,
        None => only_node(cluster).await?,
    };
    let request = PublishVolumeRequest {
        volume: Some(volume_ref(&volume.id)),
        node: node.clone(),
        read_only: options.read_only,
        multi_node: false,
        usage: "command".into(),
    };
    cluster.publish_volume(request).await.map_err(refusal)?;
    if options.nbd == Some(Nbd::Tcp) {
        return output::print_line(&wait_for_uri(cluster, &volume, &node, client).await?);
    }
    let socket = nbd_socket(client, &volume.id);
    wait_for_target(cluster, &volume, &socket, client).await?;
    if options.nbd == Some(Nbd::Unix) {
        // A socket serves one volume, as its default export.
        return output::print_line(&format!("nbd+unix:///?socket={}", socket.display()));
    }
    let request = AttachVolume {
        volume: volume.id.clone(),
        nbd_socket: socket,
        size: volume.size_bytes,
        block_size: volume.spec.as_ref().map_or(0, |spec| spec.block_size),
        read_only: options.read_only,
        file_only: false,
    };
    let attached = attach_daemon(client).attach(request).await.context(
        "the volume is served but is no block device yet; `--nbd` gives its NBD address instead",
    )?;
    output::print_line(&attached.device.display().to_string())
}

fn attach_daemon(client: &ClientOptions) -> AttachClient {
    AttachClient::new(client.run_directory().join("attach").join("attach.sock"))
}

/// Lets the block device of this host, if there is one, show the volume's new size.
pub async fn resize_device(volume: &Volume, client: &ClientOptions) -> Result<()> {
    let daemon = attach_daemon(client);
    // Without a daemon there is no device of this host that could show anything.
    let Ok(attached) = daemon.list().await else { return Ok(()) };
    if attached.iter().any(|attached| attached.volume == volume.id) {
        daemon.resize(&volume.id, volume.size_bytes).await.context("grow the block device")?;
    }
    Ok(())
}

pub async fn detach(
    cluster: &mut Cluster,
    options: DetachOptions,
    client: &ClientOptions,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    // The device first: it must not be left over a socket that nobody serves.
    match attach_daemon(client).detach(&volume.id).await {
        // No daemon, no device.
        Ok(()) | Err(quoin_frontend::attach::Error::Daemon { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let request = UnpublishVolumeRequest {
        volume: Some(volume_ref(&volume.id)),
        node: options.node.unwrap_or_default(),
    };
    cluster.unpublish_volume(request).await.map_err(refusal)?;
    let began = Instant::now();
    loop {
        let now = get_volume(cluster, &volume.id).await?;
        if now.attachments.is_empty() {
            return output::print_line(&format!("volume {} is detached", options.volume));
        }
        if began.elapsed() > client.timeout() {
            bail!(
                "volume {} is still {} on {}: {}",
                options.volume,
                now.attachments[0].phase.to_lowercase(),
                now.attachments[0].node,
                now.attachments[0].message
            );
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Where the target of this host serves the volume.
fn nbd_socket(client: &ClientOptions, volume_id: &str) -> PathBuf {
    client.run_directory().join("nbd").join(format!("{volume_id}.sock"))
}

/// The node to attach to when none is named: unambiguous in `quoin dev`, asked for elsewhere.
async fn only_node(cluster: &mut Cluster) -> Result<String> {
    let nodes = cluster.list_nodes(ListNodesRequest {}).await.map_err(refusal)?.into_inner().nodes;
    match nodes.as_slice() {
        [node] => Ok(node.name.clone()),
        [] => bail!("no node has joined yet: start one with `quoin node run --join TOKEN`"),
        several => {
            let names: Vec<_> = several.iter().map(|node| node.name.as_str()).collect();
            bail!("which of the nodes is this host? Name it with --node: {}", names.join(", "))
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
    // The file alone says nothing: a killed target leaves it behind.
    while tokio::net::UnixStream::connect(socket).await.is_err() {
        if began.elapsed() > client.timeout() {
            let now = get_volume(cluster, &volume.id).await?;
            let reason = match now.waiting_for.as_str() {
                "" => "its target does not listen yet",
                reason => reason,
            };
            bail!(
                "the volume is published, but after {} s {} is not served: {reason}. \
                 `quoin events` tells more, and the command may be repeated",
                client.timeout,
                socket.display()
            );
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    Ok(())
}
