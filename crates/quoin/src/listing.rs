//! `quoin pool|node list`, `quoin pool|node remove` and `quoin cluster …`.

use anyhow::{Result, bail};
use clap::Subcommand;
use quoin_api::control::{
    GetClusterInfoRequest, ListNodesRequest, ListPoolsRequest, Node, Pool, RemoveNodeRequest,
    RemovePoolRequest, RotateAuthorityRequest, SetNodeRequest,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal};

use crate::client::{ClientOptions, refusal};
use crate::output::{self, Format, Row, fields};
use crate::size::show_size;

#[derive(Subcommand)]
pub enum PoolCommand {
    /// The pools, their state and their space.
    #[command(visible_alias = "ls")]
    List,
    /// Have a pool take no new replicas.
    Cordon {
        /// Its name, as `quoin pool list` shows it.
        pool: String,
    },
    /// Move all replicas off a pool, so that it can be taken away; it takes no new ones.
    #[command(after_help = crate::cordon::POOL_EXAMPLE)]
    Drain(crate::cordon::DrainOptions),
    /// Have a pool take new replicas again; what moved away stays where it is.
    Uncordon {
        /// Its name, as `quoin pool list` shows it.
        pool: String,
    },
    /// Read all that a pool holds, compare it with its checksums, and have what is bad repaired
    /// from the other replicas; by itself each pool does so once a week.
    #[command(after_help = "Example:\n  quoin pool scrub shelf-3 --wait")]
    Scrub(crate::scrub::ScrubOptions),
    /// Serve the replicas in one pool.
    #[command(after_help = "Example:\n  QUOIN_JOIN_TOKEN=… quoin pool run --name shelf-3 \\\n    \
        --state /var/lib/quoin/shelf-3 --data /dev/sdb --controller control:7400")]
    Run(Box<crate::roles::PoolOptions>),
    /// Take a pool that is gone for good out of the cluster; refused while a volume needs it.
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name, as `quoin pool list` shows it.
        pool: String,
        #[command(flatten)]
        leaving: LeavingOptions,
    },
    /// Contents of a pool, read with nothing of Quoin running.
    #[command(after_help = "Example:\n  quoin pool inspect /var/lib/quoin/shelf-3/data")]
    Inspect(crate::offline::OfflineOptions),
    /// Read every block and checksum of a pool that nothing serves; changes nothing.
    Check(crate::offline::OfflineOptions),
    /// Write a volume or snapshot out of a pool as a raw image.
    #[command(after_help = "Example:\n  quoin pool export /dev/sdb --replica GUID --to db.img")]
    Export(crate::offline::ExportOptions),
}

#[derive(Subcommand)]
pub enum NodeCommand {
    /// The hosts that can use volumes.
    #[command(visible_alias = "ls")]
    List,
    /// Have all pools of a node take no new replicas.
    Cordon {
        /// Its name, as `quoin node list` shows it.
        node: String,
    },
    /// Move all replicas off the pools of a node, so that it can be taken away.
    #[command(after_help = crate::cordon::NODE_EXAMPLE)]
    Drain(crate::cordon::DrainOptions),
    /// Have the pools of a node take new replicas again; what moved away stays where it is.
    Uncordon {
        /// Its name, as `quoin node list` shows it.
        node: String,
    },
    /// Take a node that is gone for good out of the cluster; refused while volumes are attached.
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name, as `quoin node list` shows it.
        node: String,
        #[command(flatten)]
        leaving: LeavingOptions,
    },
    /// Change what a node may do.
    #[command(after_help = "Example:\n  quoin node set host-1 --manages-volumes true")]
    Set {
        /// Its name, as `quoin node list` shows it.
        node: String,
        /// True if it may create, delete and publish any volume, as CSI's controller service does;
        /// without that it sees the volumes that are attached to it, and no others.
        #[arg(long, value_name = "BOOL", action = clap::ArgAction::Set)]
        manages_volumes: bool,
    },
    /// Serve CSI on this host: attach, format, mount.
    Run(Box<crate::roles::NodeOptions>),
}

#[derive(Subcommand)]
pub enum ClusterCommand {
    /// The cluster's id, version and how its data connections are secured.
    Info,
    /// Join as an admin: govern the cluster from this host, by a certificate.
    ///
    /// Makes a context, which commands use where no controller runs on their own host; --context
    /// names it. With --to, the certificate alone goes into a directory, for tools such as NBD over
    /// TCP. Again later, it renews the one that is there.
    #[command(after_help = "Examples:\n  \
        quoin token create --role admin                  where the controller runs\n  \
        QUOIN_JOIN_TOKEN=… quoin cluster join --role admin --controller control:7400 --name ops\n  \
        quoin volume list                                on this host from now on\n\n  \
        QUOIN_JOIN_TOKEN=… quoin cluster join --controller control:7400 --name ops --to ~/.quoin\n  \
        nbdinfo \"nbds://node-1:10809/db?tls-certificates=$HOME/.quoin\"")]
    Join(crate::roles::JoinOptions),
    /// Make a new certificate authority and let every part change over to it, with IO running.
    RotateAuthority {
        /// For an authority whose key, or a backup with it, is in foreign hands: nothing that it
        /// signed is trusted from now on. Every pool, node, admin and mirror joins again
        /// with a new token. `quoin cluster info` shows its fingerprint; a repeat changes nothing.
        #[arg(
            long,
            value_name = "FINGERPRINT",
            value_parser = clap::builder::NonEmptyStringValueParser::new()
        )]
        at_once: Option<String>,
        /// Replace it at once without the question; needed where there is no terminal.
        #[arg(long, requires = "at_once")]
        yes: bool,
    },
}

pub async fn pools(client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let pools = cluster.list_pools(ListPoolsRequest {}).await.map_err(refusal)?.into_inner().pools;
    let rows: Vec<_> = pools.into_iter().map(PoolView::from).collect();
    output::print_list(
        format,
        &rows,
        "no pools: `quoin token create --role pool` makes a token \
                                       for one",
    )
}

pub async fn nodes(client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let nodes = cluster.list_nodes(ListNodesRequest {}).await.map_err(refusal)?.into_inner().nodes;
    let rows: Vec<_> = nodes.into_iter().map(NodeView::from).collect();
    output::print_list(
        format,
        &rows,
        "no nodes: `quoin token create --role node` makes a token \
                                       for one",
    )
}

pub async fn cluster(
    command: ClusterCommand,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    // A newcomer has no admin socket to ask.
    if let ClusterCommand::Join(options) = command {
        return crate::roles::join(options, client, format).await;
    }
    let mut cluster = client.connect().await?;
    match command {
        ClusterCommand::Join(_) => Ok(()),
        ClusterCommand::Info => {
            let request = GetClusterInfoRequest {};
            let info = cluster.get_cluster_info(request).await.map_err(refusal)?.into_inner();
            let view = ClusterView {
                cluster_id: info.cluster_id,
                version: info.version,
                data_security: info.data_security,
                recovery: info.recovery,
                term: info.term,
                clocks: info.clocks.into_iter().map(|clock| clock.message).collect(),
                authority: info.authority,
            };
            let recovery = match view.recovery.as_str() {
                "" => String::new(),
                why => format!("do not rule, for {why}: `quoin controller recover`"),
            };
            output::print_one(format, &view, || {
                fields(&[
                    ("cluster", view.cluster_id.clone()),
                    ("version", view.version.clone()),
                    ("data security", view.data_security.clone()),
                    ("records", recovery.clone()),
                    ("term", if view.term == 0 { String::new() } else { view.term.to_string() }),
                    ("clocks", view.clocks.join("; ")),
                    ("authority", view.authority.clone()),
                ])
            })
        }
        ClusterCommand::RotateAuthority { at_once, yes } => {
            if at_once.is_some() && !yes {
                confirm_at_once()?;
            }
            let request = RotateAuthorityRequest { at_once: at_once.unwrap_or_default() };
            let answer = cluster.rotate_authority(request).await.map_err(refusal)?.into_inner();
            let view = MessageView { message: answer.message };
            output::print_one(format, &view, || view.message.clone())
        }
    }
}

/// Question to a person before all members are cut from the controller; --yes in a script is the answer.
fn confirm_at_once() -> Result<()> {
    const CONSEQUENCE: &str = "every pool, node, admin and mirror is cut from the controller until it \
        joins again with a new token";
    if !std::io::stdin().is_terminal() {
        bail!("{CONSEQUENCE}: add --yes to do it without the question");
    }
    eprint!("At once {CONSEQUENCE}. Type `at once` to continue: ");
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if answer.trim() != "at once" {
        bail!("nothing was changed: that was not `at once`");
    }
    Ok(())
}

/// Message of the controller about work that it has begun.
#[derive(Serialize)]
struct MessageView {
    message: String,
}

/// A member that was taken out.
#[derive(Serialize)]
pub struct RemovedView<'a> {
    pub kind: &'static str,
    pub name: &'a str,
    pub state: &'static str,
}

/// Removal of a member that may be online still.
#[derive(clap::Args)]
pub struct LeavingOptions {
    /// Wait until it is known to be offline, which takes some seconds after its process has ended,
    /// and until a drain of the pool has emptied it; --timeout is for how long. Interrupted, it
    /// stays a member.
    #[arg(long, conflicts_with = "force")]
    wait: bool,
    /// Do not wait for that: its process has ended. One that has not is shut out all the same.
    #[arg(long)]
    force: bool,
}

impl LeavingOptions {
    /// Asks for the removal; with --wait, repeats that until it is done.
    async fn remove(
        &self,
        client: &ClientOptions,
        mut ask: impl AsyncFnMut(bool) -> Result<(), tonic::Status>,
        mut may_come: impl AsyncFnMut() -> Result<bool>,
    ) -> Result<()> {
        let began = std::time::Instant::now();
        loop {
            let refused = match ask(self.force).await {
                Ok(()) => return Ok(()),
                Err(status) => status,
            };
            let may_pass = refused.code() == tonic::Code::FailedPrecondition && self.wait;
            if !may_pass || began.elapsed() > client.timeout() {
                return Err(refusal(refused));
            }
            if !may_come().await? {
                // Last attempt: the state may have changed since the one before.
                return ask(self.force).await.map_err(refusal);
            }
            tokio::time::sleep(std::time::Duration::from_millis(250)).await;
        }
    }
}

pub async fn remove_pool(
    pool: &str,
    leaving: &LeavingOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let cluster = client.connect().await?;
    let ask = async |force| {
        let request = RemovePoolRequest { pool: pool.into(), force };
        cluster.clone().remove_pool(request).await.map(drop)
    };
    let may_come = async || {
        let pools = cluster.clone().list_pools(ListPoolsRequest {}).await.map_err(refusal)?;
        let found = pools.into_inner().pools.into_iter().find(|found| found.name == pool);
        Ok(found.is_some_and(|found| found.state != "Offline" || found.cordon == "draining"))
    };
    leaving.remove(client, ask, may_come).await?;
    let view = RemovedView { kind: "pool", name: pool, state: "removed" };
    output::print_one(format, &view, || {
        format!("pool {pool} is removed: the data on its disk is neither changed nor used again")
    })
}

pub async fn remove_node(
    node: &str,
    leaving: &LeavingOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let cluster = client.connect().await?;
    let ask = async |force| {
        let request = RemoveNodeRequest { node: node.into(), force };
        cluster.clone().remove_node(request).await.map(drop)
    };
    let is_online = async || {
        let nodes = cluster.clone().list_nodes(ListNodesRequest {}).await.map_err(refusal)?;
        let mut nodes = nodes.into_inner().nodes.into_iter();
        Ok(nodes.any(|found| found.name == node && found.state != "Offline"))
    };
    leaving.remove(client, ask, is_online).await?;
    let view = RemovedView { kind: "node", name: node, state: "removed" };
    output::print_one(format, &view, || format!("node {node} is removed"))
}

pub async fn set_node(
    node: &str,
    manages_volumes: bool,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct SetView<'a> {
        name: &'a str,
        manages_volumes: bool,
    }

    let mut cluster = client.connect().await?;
    let request = SetNodeRequest { node: node.into(), manages_volumes };
    cluster.set_node(request).await.map_err(refusal)?;
    let view = SetView { name: node, manages_volumes };
    output::print_one(format, &view, || match manages_volumes {
        true => format!("node {node} may create, delete and publish volumes"),
        false => format!("node {node} sees the volumes that are attached to it, and no others"),
    })
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ClusterView {
    cluster_id: String,
    version: String,
    data_security: String,
    /// Why the records do not rule; empty where they do.
    recovery: String,
    /// How often they were recovered: a controller of a former term is refused by all members.
    term: u64,
    /// Clocks that differ, in words.
    clocks: Vec<String>,
    /// Fingerprint of the authority.
    authority: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PoolView {
    name: String,
    id: String,
    node: String,
    address: String,
    state: String,
    capacity_bytes: u64,
    used_bytes: u64,
    /// Part of the used bytes that volumes and snapshots need.
    live_bytes: u64,
    free_bytes: u64,
    replicas: u32,
    message: String,
    /// cordoned, draining or drained; empty: it takes new replicas.
    cordon: String,
    scrub: crate::scrub::ScrubView,
    topology: BTreeMap<String, String>,
}

impl From<Pool> for PoolView {
    fn from(pool: Pool) -> Self {
        Self {
            name: pool.name,
            id: pool.id,
            node: pool.node,
            address: pool.address,
            state: pool.state,
            capacity_bytes: pool.capacity_bytes,
            used_bytes: pool.used_bytes,
            live_bytes: pool.live_bytes,
            free_bytes: pool.free_bytes,
            replicas: pool.replicas,
            message: pool.message,
            cordon: pool.cordon,
            scrub: pool.scrub.unwrap_or_default().into(),
            topology: pool.topology.into_iter().collect(),
        }
    }
}

impl Row for PoolView {
    const HEADER: &'static [&'static str] = &[
        "NAME", "NODE", "STATE", "CAPACITY", "USED", "FREE", "REPLICAS", "MESSAGE", "LIVE",
        "SCRUB", "ADDRESS", "ID", "TOPOLOGY",
    ];
    const NARROW: usize = 8;

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.node.clone(),
            self.state.clone(),
            show_size(self.capacity_bytes),
            show_size(self.used_bytes),
            show_size(self.free_bytes),
            self.replicas.to_string(),
            [self.cordon.as_str(), self.message.as_str()]
                .into_iter()
                .filter(|words| !words.is_empty())
                .collect::<Vec<_>>()
                .join("; "),
            show_size(self.live_bytes),
            self.scrub.sentence(),
            self.address.clone(),
            self.id.clone(),
            segments(&self.topology),
        ]
    }
}

/// Segments of topology in one cell.
fn segments(topology: &BTreeMap<String, String>) -> String {
    let pairs: Vec<_> = topology.iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeView {
    name: String,
    state: String,
    attached: u32,
    volumes_max: u32,
    version: String,
    /// Cordon as of a pool: of all pools on the node.
    cordon: String,
    manages_volumes: bool,
    address: String,
    host_addresses: Vec<String>,
    /// Block by which it is fenced; empty: it is not.
    fenced_by: String,
    topology: BTreeMap<String, String>,
}

impl From<Node> for NodeView {
    fn from(node: Node) -> Self {
        Self {
            name: node.name,
            state: node.state,
            attached: node.attached,
            volumes_max: node.volumes_max,
            version: node.version,
            cordon: node.cordon,
            manages_volumes: node.manages_volumes,
            address: node.address,
            host_addresses: node.host_addresses,
            fenced_by: node.fenced_by,
            topology: node.topology.into_iter().collect(),
        }
    }
}

impl Row for NodeView {
    const HEADER: &'static [&'static str] =
        &["NAME", "STATE", "ATTACHED", "VERSION", "POOLS", "MAY", "ADDRESS", "TOPOLOGY"];
    const NARROW: usize = 6;

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.state.clone(),
            self.attached.to_string(),
            self.version.clone(),
            self.cordon.clone(),
            match (self.fenced_by.is_empty(), self.manages_volumes) {
                (false, _) => "nothing: fenced".to_owned(),
                (true, true) => "manage volumes".to_owned(),
                (true, false) => "use volumes".to_owned(),
            },
            self.address.clone(),
            segments(&self.topology),
        ]
    }
}
