//! `quoin volume detach`: a volume taken from the node that has it, and this host's device of it.

use anyhow::{Result, bail};
use clap::Args;
use quoin_api::control::{UnpublishVolumeRequest, Volume, VolumeSpec};
use quoin_attach::protocol::{Attached, Kind};
use quoin_attach::{Error as AttachError, file_name};
use serde::Serialize;
use std::io::{BufRead, IsTerminal};
use std::time::{Duration, Instant};

use super::at_boot;
use super::attach::{
    HostOptions, attach_daemon, attached_here, local_device, node_here, other_daemons_device,
    warn_about_dead_mounts,
};
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::host::at_boot::Etc;
use crate::host::loop_devices;
use crate::output::{self, Format};

#[derive(Args)]
pub struct DetachOptions {
    /// Its name or id.
    volume: String,
    /// The node to detach it from [default: this host; where that is no node, every one].
    #[arg(long)]
    node: Option<String>,
    /// Detach it though a node uses it, or is silent so that nobody knows; end this host's device
    /// whatever is mounted on it. What uses it loses what it has not synced, and fails from then on.
    #[arg(long)]
    force: bool,
    /// Cut what the node has open, at once, rather than give it time to close: for one that is not
    /// trusted any more. What it has not flushed yet may be lost.
    #[arg(long)]
    at_once: bool,
    #[command(flatten)]
    host: HostOptions,
}

/// Result for a volume that was to be taken away.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DetachedView {
    pub volume: String,
    pub id: String,
    /// "detached", "deleted" or, where a pool is still waited for, "deleting"; "removed": what this
    /// host had of a volume that stays attached to another one, or of an earlier use.
    pub state: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waiting_for: String,
}

pub async fn detach(
    cluster: &mut Cluster,
    options: DetachOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let client = &options.host.client(client);
    let volume = match get_volume(cluster, &options.volume).await {
        Ok(volume) => volume,
        // A device of a volume that was deleted is removed all the same.
        Err(error) => match left_here(&options.volume, client).await? {
            Some(left) => return detach_left(&left, &options, client, format).await,
            None => return Err(error),
        },
    };
    if let Some(device) = other_daemons_device(&volume, client)? {
        bail!(
            "volume {} is a device of this host, {}, served by another `quoin attach` than the one \
             of {}: name the directory of its cluster with --run",
            options.volume,
            device.path.display(),
            client.run_directory().display()
        );
    }
    let node_here = node_here(client);
    let is_elsewhere = options.node.is_some() && node_here.is_some() && options.node != node_here;
    // Device first: it must not be left over a socket without a server.
    let here = match is_elsewhere {
        true => LocalDevice::Nothing,
        false => detach_local_device(&volume, &options, client).await?,
    };
    warn_about_dead_mounts(&volume, client);
    let gone = |state| DetachedView {
        volume: options.volume.clone(),
        id: volume.id.clone(),
        state,
        waiting_for: String::new(),
    };
    let nodes: Vec<_> = volume.attachments.iter().map(|on| on.node.as_str()).collect();
    if let Some(node) = &options.node
        && !nodes.is_empty()
        && !nodes.contains(&node.as_str())
    {
        bail!(
            "volume {} is not attached to node {node}, so nothing was detached: it is attached to {}",
            options.volume,
            nodes.join(", ")
        );
    }
    let Some(node) = node_to_detach(&options, node_here.as_deref(), here, &nodes) else {
        let on = nodes.join(", ");
        if here == LocalDevice::Nothing {
            bail!(
                "volume {} is attached to {on}, not to this host: name the node that it is to be \
                 taken from with --node",
                options.volume
            );
        }
        let view = gone("removed");
        return output::print_one(format, &view, || {
            let was = if here == LocalDevice::WasDead { " from an earlier use" } else { "" };
            let volume = &view.volume;
            format!(
                "the device of volume {volume} on this host{was} is removed; the volume stays \
                 attached to {on}"
            )
        });
    };
    // A host that has just taken its device down knows that the volume is unused. A node that has
    // the volume from now on is not to be forced.
    let is_unused = here == LocalDevice::TakenDown && node_here.as_ref() == Some(&node);
    let forced = options.force && !nodes.is_empty();
    let request = UnpublishVolumeRequest {
        volume: Some(id_ref(&volume.id)),
        node: node.clone(),
        at_once: options.at_once,
        unless_in_use: !is_unused && !forced && !options.at_once,
        forced,
    };
    unpublish(cluster, request, &options.volume).await?;
    let began = Instant::now();
    loop {
        let now = get_volume(cluster, &volume.id).await?;
        let still = now.attachments.iter().find(|on| node.is_empty() || on.node == node);
        let Some(still) = still else {
            if !is_elsewhere {
                at_boot::forget(&volume)?;
            }
            let view = gone("detached");
            return output::print_one(format, &view, || {
                format!("volume {} is detached", view.volume)
            });
        };
        if began.elapsed() > client.timeout() {
            bail!(
                "volume {} is still {} on {}: {}",
                options.volume,
                still.phase.to_lowercase(),
                still.node,
                still.message
            );
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Finds what this host has of a volume without a record, by its id or by the name of its link.
async fn left_here(named: &str, client: &ClientOptions) -> Result<Option<Volume>> {
    let answer_max = client.timeout().min(Duration::from_secs(2));
    let listed = tokio::time::timeout(answer_max, attach_daemon(client).list()).await;
    let is_it = |attached: &&Attached| {
        let link = attached.link.as_ref().and_then(|link| link.file_name());
        let by_link = link.is_some() && link == file_name(named).as_deref().map(AsRef::as_ref);
        attached.volume == named || by_link
    };
    let listed = listed.ok().and_then(Result::ok).unwrap_or_default();
    let mut id = listed.iter().find(is_it).map(|attached| attached.volume.clone());
    if id.is_none() {
        let run = std::fs::canonicalize(client.run_directory()).unwrap_or_default();
        let devices = loop_devices::Device::over(&run)?;
        id = devices.into_iter().map(|device| device.volume).find(|volume| volume == named);
    }
    let at_boot = Etc::default().find_by_name_or_id(named);
    let id = id.or_else(|| at_boot.as_ref().map(|record| record.id.clone()));
    let name = at_boot.map_or_else(|| named.to_owned(), |record| record.volume);
    let spec = VolumeSpec { name, ..VolumeSpec::default() };
    Ok(id.map(|id| Volume { id, spec: Some(spec), ..Volume::default() }))
}

/// Removes what this host has of a volume without a record.
async fn detach_left(
    volume: &Volume,
    options: &DetachOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    detach_local_device(volume, options, client).await?;
    at_boot::forget(volume)?;
    let view = DetachedView {
        volume: options.volume.clone(),
        id: volume.id.clone(),
        state: "removed",
        waiting_for: String::new(),
    };
    output::print_one(format, &view, || {
        format!("there is no volume {} any more; what this host had of it is removed", view.volume)
    })
}

/// The node that a volume is to be taken from, empty for each that it is attached to; `None`: it
/// stays attached where it is. State found on this host says nothing about another node that has
/// the volume by now, so by default this host takes it from itself alone.
fn node_to_detach(
    options: &DetachOptions,
    node_here: Option<&str>,
    here: LocalDevice,
    attached_to: &[&str],
) -> Option<String> {
    if let Some(node) = &options.node {
        return Some(node.clone());
    }
    let is_of_this_host = node_here.is_some_and(|here| attached_to.contains(&here));
    match (attached_to, node_here) {
        ([], _) => Some(String::new()),
        (_, Some(node)) if is_of_this_host && here != LocalDevice::WasDead => Some(node.to_owned()),
        (_, None) if here == LocalDevice::Nothing => Some(String::new()),
        _ => None,
    }
}

/// Result for the device of this host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LocalDevice {
    /// There was none.
    Nothing,
    TakenDown,
    /// The device was of an earlier use of the volume, which another node has since.
    WasDead,
}

/// Takes this host's device of the volume away; with force, also one in use.
async fn detach_local_device(
    volume: &Volume,
    options: &DetachOptions,
    client: &ClientOptions,
) -> Result<LocalDevice> {
    let daemon = attach_daemon(client);
    let answer_max = client.timeout().min(Duration::from_secs(2));
    let attached = tokio::time::timeout(answer_max, attached_here(volume, client)).await;
    let before = match attached.ok().flatten() {
        Some(attached) if attached.dead.is_empty() => LocalDevice::TakenDown,
        Some(_) => LocalDevice::WasDead,
        None => LocalDevice::Nothing,
    };
    if options.force {
        let did = match tokio::time::timeout(client.timeout(), daemon.end(&volume.id)).await {
            Ok(Ok(did)) => did,
            // A process that is away or stuck ends nothing; the kernel does.
            Ok(Err(_)) | Err(_) => cut_off(volume, client)?,
        };
        // On stderr: what became of the volume is the command's answer.
        did.iter().for_each(|did| eprintln!("this host's device: {did}"));
        return Ok(match before {
            _ if did.is_empty() => LocalDevice::Nothing,
            // The attach process did not report what it has.
            LocalDevice::Nothing => LocalDevice::TakenDown,
            before => before,
        });
    }
    match daemon.detach(&volume.id).await {
        Ok(()) => Ok(before),
        // No daemon, no device.
        Err(AttachError::Daemon { .. }) => Ok(LocalDevice::Nothing),
        Err(AttachError::Refused { kind: Kind::Busy, .. }) => {
            let here = local_device(volume, client).await;
            let (device, mounts) = here.map(|here| (here.device, here.mounts)).unwrap_or_default();
            let mounted = match mounts.as_slice() {
                [] => "close it".into(),
                mounts => format!("unmount {}", mounts.join(" and ")),
            };
            bail!(
                "volume {} is in use as {device}: {mounted} first (--force ends it anyway: its IO \
                 fails)",
                options.volume
            );
        }
        Err(error) => Err(error.into()),
    }
}

/// Ends the volume's devices of this host without the attach process; what was done, in words.
fn cut_off(volume: &Volume, client: &ClientOptions) -> Result<Vec<String>> {
    let run = std::fs::canonicalize(client.run_directory()).unwrap_or_default();
    let mut did = Vec::new();
    for device in loop_devices::Device::over(&run)?.into_iter().filter(|d| d.volume == volume.id) {
        let path = device.path.display().to_string();
        // Its server is in another table of mounts: it is another host's, or a container's.
        if !device.cut_off()? {
            continue;
        }
        did.push(format!("the connection below {path} is aborted, its IO fails from now on"));
        device.free()?;
        did.push(match device.still_there() {
            true => format!("{path} goes with its last user: unmount it, end its users"),
            false => format!("{path} is freed"),
        });
    }
    Ok(did)
}

/// Nodes report what they use every two seconds. Within this time a release of a moment ago is
/// known, and a controller that has just started knows what they have.
const REPORTED_WITHIN: Duration = Duration::from_secs(5);

/// Takes the volume from its nodes. Where one of them may use it, a user at a terminal is asked.
async fn unpublish(
    cluster: &mut Cluster,
    mut request: UnpublishVolumeRequest,
    name: &str,
) -> Result<()> {
    let began = Instant::now();
    loop {
        let refused = match cluster.unpublish_volume(request.clone()).await {
            Ok(_) => return Ok(()),
            Err(status) => status,
        };
        let may_be_forced =
            request.unless_in_use && refused.code() == tonic::Code::FailedPrecondition;
        if !may_be_forced {
            return Err(refusal(refused));
        }
        let may_pass = ["is in use on node", "has not said"];
        let may_pass = may_pass.iter().any(|why| refused.message().contains(why));
        if may_pass && began.elapsed() < REPORTED_WITHIN {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        }
        if !std::io::stdin().is_terminal() {
            return Err(refusal(refused));
        }
        eprint!("{}\nType the volume's name to detach it anyway: ", refused.message());
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer)?;
        if answer.trim() != name {
            bail!("not detached: that was not its name");
        }
        (request.unless_in_use, request.forced) = (false, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: DetachOptions,
    }

    /// The node of `detach db` with these arguments.
    fn detach_node(
        arguments: &[&str],
        node_here: Option<&str>,
        here: LocalDevice,
        attached_to: &[&str],
    ) -> Option<String> {
        let line = Line::parse_from([&["detach", "db"], arguments].concat());
        node_to_detach(&line.options, node_here, here, attached_to)
    }

    #[test]
    fn a_host_detaches_only_its_own_attachment_unless_another_node_is_named() {
        let all = [LocalDevice::Nothing, LocalDevice::TakenDown, LocalDevice::WasDead];
        for forced in [&[][..], &["--force"]] {
            for here in all {
                assert_eq!(detach_node(forced, Some("h1"), here, &["h2"]), None, "{here:?}");
                assert_eq!(detach_node(forced, Some("h1"), here, &[]).as_deref(), Some(""));
                let named = [forced, &["--node", "h2"]].concat();
                let named = detach_node(&named, Some("h1"), here, &["h2"]);
                assert_eq!(named.as_deref(), Some("h2"), "{here:?}");
            }
            let own = |here| detach_node(forced, Some("h1"), here, &["h1"]);
            assert_eq!(own(LocalDevice::Nothing).as_deref(), Some("h1"));
            assert_eq!(own(LocalDevice::TakenDown).as_deref(), Some("h1"));
            assert_eq!(own(LocalDevice::WasDead), None, "what it has today is another use");
            // A host that is no node only asks, unless it had a device, which must be of some node.
            let asks = |here| detach_node(forced, None, here, &["h2"]);
            assert_eq!(asks(LocalDevice::Nothing).as_deref(), Some(""));
            assert_eq!((asks(LocalDevice::TakenDown), asks(LocalDevice::WasDead)), (None, None));
        }
    }
}
