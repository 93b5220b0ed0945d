//! `quoin volume heal`: the healer of this host's node, for a person.

use anyhow::{Context, Result, bail};
use clap::Args;
use quoin_api::control::Volume;
use quoin_api::csi_addons::healer::NodeHealerRequest;
use quoin_api::csi_addons::healer::healer_node_client::HealerNodeClient;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::attach::HostOptions;
use super::doctor::ILL;
use super::keys::KeyFile;
use crate::client::{ClientOptions, Cluster, get_volume};
use crate::output::{self, Format};

/// Records of the node where the package is installed.
const PACKAGED_STATE: &str = "/var/lib/quoin/node";
/// Longer than a call takes.
const CALL_MAX: Duration = Duration::from_secs(60);

pub const HELP: &str = "Run it on the host that has the volume staged. Nothing is discarded, and nothing \
    that a process uses is taken from it. Ends with 0 where the volume is well afterwards, 3 where \
    something is still wrong, 1 where that cannot be said.\n\nExamples:\n  quoin volume heal db\n  \
    quoin volume heal db --key-file key    an encrypted one whose target lost its key\n\n\
    docs/csi-addons.md says which damage is healed, and how.";

#[derive(Args)]
pub struct HealOptions {
    /// Its name or id.
    volume: String,
    /// Where it is staged, or shown to its user [default: as this node has recorded].
    #[arg(long, value_name = "PATH")]
    path: Option<PathBuf>,
    /// The file with the key of an encrypted volume; - is the standard input.
    #[arg(long, value_name = "FILE")]
    key_file: Option<KeyFile>,
    /// The node's directory (`quoin node run --state`) [default: beside the run directory, or
    /// /var/lib/quoin/node].
    #[arg(long, value_name = "DIRECTORY")]
    state: Option<PathBuf>,
    /// The node's socket of CSI-Addons [default: csi-addons/csi-addons.sock in the run directory].
    #[arg(long, value_name = "unix:///PATH.sock")]
    csi_addons_endpoint: Option<String>,
    /// The file with the token of a caller, where the node has a list of them (`--callers`); - is the
    /// standard input.
    #[arg(long, value_name = "FILE")]
    caller_token_file: Option<KeyFile>,
    #[command(flatten)]
    host: HostOptions,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HealView {
    volume: String,
    id: String,
    well: bool,
    /// The faults with the way out, or that there is none; and the steps that were made.
    message: String,
}

pub async fn heal(
    cluster: &mut Cluster,
    options: HealOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let client = &options.host.client(client);
    let volume = get_volume(cluster, &options.volume).await?;
    let path = match &options.path {
        Some(path) => std::path::absolute(path).context("make --path absolute")?,
        None => staged_at(&options, client, &volume)?,
    };
    let socket = match &options.csi_addons_endpoint {
        Some(endpoint) => quoin_csi::parse_addons_endpoint(endpoint, Path::new("/"))?,
        None => client.run_directory().join("csi-addons/csi-addons.sock"),
    };
    let mut request = tonic::Request::new(NodeHealerRequest {
        volume_id: volume.id.clone(),
        volume_path: path.to_str().context("--path is text")?.to_owned(),
        secrets: secrets(&options)?,
        ..NodeHealerRequest::default()
    });
    request.set_timeout(CALL_MAX);
    let mut healer = HealerNodeClient::new(quoin_identity::unix_channel(&socket));
    let answer = healer.node_healer(request).await;
    let answer = answer.map_err(|status| {
        let socket = socket.display();
        anyhow::anyhow!(
            "the node at {socket} does not heal {}: {}",
            options.volume,
            status.message()
        )
    })?;
    let answer = answer.into_inner();
    let view = HealView {
        volume: options.volume,
        id: volume.id,
        well: !answer.abnormal,
        message: answer.message,
    };
    output::print_one(format, &view, || format!("volume {}: {}\n", view.volume, view.message))?;
    if !view.well {
        std::process::exit(ILL);
    }
    Ok(())
}

/// The staging path in the records of this host's node.
fn staged_at(options: &HealOptions, client: &ClientOptions, volume: &Volume) -> Result<PathBuf> {
    let beside = client.run_directory().parent().map(|root| root.join("node"));
    let directories = match &options.state {
        Some(state) => vec![state.clone()],
        None => beside.into_iter().chain([PACKAGED_STATE.into()]).collect(),
    };
    for directory in &directories {
        if let Some(path) = quoin_csi::staged_at(directory, &volume.id)? {
            return Ok(path);
        }
    }
    let nodes: Vec<_> = volume.attachments.iter().map(|one| one.node.as_str()).collect();
    let elsewhere = match nodes.as_slice() {
        [] => "it is attached to no node".to_owned(),
        nodes => format!("it is attached to {}: run this there", nodes.join(", ")),
    };
    let looked: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
    bail!(
        "volume {} is not staged by CSI on this host ({} has no record of it); {elsewhere}, or name its \
         place with --path",
        options.volume,
        looked.join(", ")
    )
}

fn secrets(options: &HealOptions) -> Result<std::collections::HashMap<String, String>> {
    let mut secrets = std::collections::HashMap::new();
    if let Some(file) = &options.key_file {
        secrets.insert(quoin_csi::ENCRYPTION_KEY.to_owned(), file.text()?);
    }
    if let Some(file) = &options.caller_token_file {
        secrets.insert(quoin_csi::CALLER_TOKEN.to_owned(), file.line()?);
    }
    Ok(secrets)
}
