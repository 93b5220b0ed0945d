//! The command line of each process, and how each becomes a member.

use anyhow::{Context, Result};
use quoin_identity::{JoinRequest, Role, load_or_join};
use std::net::SocketAddr;
use std::path::Path;

use super::Policy;
use super::keeper::Process;
use super::layout::Layout;
use super::settings::{PoolSettings, Settings};

/// Availability of block devices on this machine.
pub enum Attaching {
    Yes,
    No { reason: String },
}

impl Attaching {
    pub fn of_this_host(is_disabled: bool) -> Self {
        if is_disabled {
            return Self::No { reason: "--no-attach was given".into() };
        }
        match crate::host::can_attach() {
            Ok(()) => Self::Yes,
            Err(reason) => Self::No { reason },
        }
    }
}

/// Makes the cluster's records and authority at the first start.
pub async fn init_controller(layout: &Layout, policy: &Policy) -> Result<()> {
    let directory = layout.controller();
    if !quoin_control::is_initialised(&directory) {
        quoin_control::init(&directory, policy.lifetime.into())
            .await
            .with_context(|| format!("make a cluster in {}", directory.display()))?;
    }
    Ok(())
}

/// Gets the member in `directory` its certificate, by a token as on any other host.
pub async fn join(
    settings: &Settings,
    role: Role,
    name: &str,
    directory: &Path,
    token: &str,
) -> Result<()> {
    let request = JoinRequest {
        controller: settings.controller.listen.to_string(),
        token: token.parse().context("the controller's join token")?,
        role,
        name: name.into(),
    };
    load_or_join(directory, Some(&request)).await.with_context(|| format!("{name} joins"))?;
    Ok(())
}

fn process(
    name: &str,
    role: &[&str],
    flags: &[(&str, String)],
    http: Option<SocketAddr>,
) -> Process {
    let mut arguments: Vec<String> = role.iter().map(ToString::to_string).collect();
    let http = http.map(|address| ("--http", address.to_string()));
    for (flag, value) in flags.iter().cloned().chain(http) {
        arguments.extend([flag.to_string(), value]);
    }
    Process { name: name.into(), arguments, outlives: false }
}

fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

pub fn controller(layout: &Layout, settings: &Settings, policy: &Policy) -> Process {
    let mut flags = vec![
        ("--state", path(&layout.controller())),
        ("--admin-socket", path(&layout.admin_socket())),
        ("--listen", settings.controller.listen.to_string()),
        // Single machine: only pools can fail independently of each other.
        ("--default-spread", "pool".into()),
        ("--data-security", policy.security.clone()),
    ];
    flags.extend(policy.healing.flags());
    flags.extend(policy.lifetime.flags());
    process("controller", &["controller", "run"], &flags, Some(settings.controller.http))
}

pub fn pool(layout: &Layout, settings: &Settings, policy: &Policy, pool: &PoolSettings) -> Process {
    let directory = layout.pool(&pool.name);
    let flags = [
        ("--state", path(&directory)),
        ("--data", path(&layout.pool_data(&pool.name))),
        ("--capacity", pool.capacity_bytes.to_string()),
        ("--node", settings.node.clone()),
        ("--name", pool.name.clone()),
        ("--listen", pool.listen.to_string()),
        ("--controller", settings.controller.listen.to_string()),
    ];
    let mut process = process(&pool.name, &["pool", "run"], &flags, Some(pool.http));
    // All of it lies in one directory: a pool whose file was removed there is meant to be lost.
    process.arguments.push("--replace".into());
    if policy.network_only {
        process.arguments.push("--network-only".into());
    }
    process
}

pub fn target(layout: &Layout, settings: &Settings) -> Process {
    let flags = [
        ("--state", path(&layout.node())),
        ("--run", path(&layout.run())),
        ("--controller", settings.controller.listen.to_string()),
    ];
    process("target", &["target"], &flags, Some(settings.target_http))
}

/// Links this cluster to its peers.
pub fn mirror(layout: &Layout, settings: &Settings) -> Process {
    let flags = [
        ("--state", path(&layout.mirror())),
        ("--run", path(&layout.run())),
        ("--node", settings.node.clone()),
        ("--listen", settings.mirror_listen.to_string()),
        ("--controller", settings.controller.listen.to_string()),
    ];
    process("mirror", &["mirror", "run"], &flags, Some(settings.mirror_http))
}

pub const PEER: &str = "peer";

/// The second cluster, which supervises its own processes.
pub fn peer(layout: &Layout, policy: &Policy, attaching: &Attaching) -> Process {
    let mut flags = vec![
        ("--dir", path(&layout.peer())),
        ("--data-security", policy.security.clone()),
        ("--csi-edition", policy.csi_edition.to_string()),
    ];
    if let Some(pools) = policy.peer_pools {
        flags.push(("--pools", pools.to_string()));
    }
    if let Some(size) = policy.peer_pool_size {
        flags.push(("--pool-size", size.to_string()));
    }
    flags.extend(policy.healing.flags());
    flags.extend(policy.lifetime.flags());
    let mut process = process(PEER, &["dev"], &flags, None);
    process.arguments.push("--mirror".into());
    if let Attaching::No { .. } = attaching {
        process.arguments.push("--no-attach".into());
    }
    if policy.network_only {
        process.arguments.push("--network-only".into());
    }
    process
}

pub const HOLDER: &str = "attach-holder";

/// The holder ends with its supervisor: an attach process that goes on gives all to the next
/// holder.
pub fn holder(layout: &Layout) -> Process {
    process(HOLDER, &["attach-holder"], &[("--run", path(&layout.run()))], None)
}

pub fn attach(layout: &Layout, settings: &Settings) -> Process {
    let flags = [("--run", path(&layout.run()))];
    let process = process("attach", &["attach"], &flags, Some(settings.attach_http));
    Process { outlives: true, ..process }
}

pub fn node(
    layout: &Layout,
    settings: &Settings,
    attaching: &Attaching,
    csi_edition: quoin_csi::Edition,
) -> Process {
    let mut flags = vec![
        ("--state", path(&layout.node())),
        ("--run", path(&layout.run())),
        ("--controller", settings.controller.listen.to_string()),
        ("--csi-endpoint", format!("unix://{}", layout.csi_socket().display())),
        ("--csi-addons-endpoint", format!("unix://{}", layout.csi_addons_socket().display())),
        ("--csi-edition", csi_edition.to_string()),
    ];
    if let Attaching::No { .. } = attaching {
        flags.push(("--mode", "controller".into()));
    }
    process("node", &["node", "run"], &flags, Some(settings.node_http))
}
