//! `quoin dev`: a whole cluster on one machine, one process a role, under one supervisor.
//!
//! The processes are the ones of a real cluster: each is this binary with the role's own command,
//! pools and node join with tokens, every connection has its certificates. A process that ends is
//! started again; Ctrl-C (or SIGTERM) ends all in the order in which nothing is lost and nothing is
//! left: node, mounts, attach, target, pools, controller. A file system in use is waited for
//! ([`cleanup`]). All files are in one directory ([`layout`]); a second start goes on with what is
//! there, and with attached devices that a killed one left ([`keeper`]).

mod blocked;
mod cleanup;
pub mod keeper;
pub mod layout;
mod lock;
pub mod members;
mod peer;
pub mod processes;
pub mod settings;

use anyhow::{Context, Result, bail};
use clap::Args;
use quoin_api::control::{GetClusterInfoRequest, ListNodesRequest, ListPoolsRequest, Pool};
use quoin_identity::{Identity, Role};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::client::{self, Cluster};
use crate::roles::{HealingOptions, LifetimeOptions};
use crate::size::{number_within, parse_pool_size, show_size};
use blocked::Blocked;
use cleanup::Dead;
use keeper::{Keeper, Process, Roster};
use layout::Layout;
use processes::Attaching;
use settings::{PoolSettings, Settings};

/// All parts must be up within this; a machine under load takes its time.
const START_BUDGET: Duration = Duration::from_secs(90);
/// A pool that is Failed for this long at a start is not waited for.
const FAILED_AFTER: Duration = Duration::from_secs(5);

#[derive(Args)]
pub struct DevOptions {
    /// Where everything lives [default: /var/lib/quoin-dev as root, else
    /// ~/.local/share/quoin-dev].
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
    /// How many pools, each a process of its own; only at the first start in a directory
    /// [default: 3].
    #[arg(long, allow_hyphen_values = true,
          value_parser = number_within::<u8>(1..=8, "`quoin dev` runs 1 to 8 pools"))]
    pub pools: Option<u8>,
    /// Space that each pool may take; only at the first start in a directory [default: a share
    /// of what the disk has free].
    #[arg(long, value_name = "SIZE", value_parser = parse_pool_size, allow_hyphen_values = true)]
    pub pool_size: Option<u64>,
    /// Do not attach block devices (no root and no FUSE needed): volumes are served as NBD.
    #[arg(long)]
    pub no_attach: bool,
    /// Protection of data connections beside the proof of who is there: `encrypt` hides what they
    /// carry and costs little more than `authenticate`, which is for those who must look into the
    /// traffic. Neither is needed within a host, where a unix socket takes TCP's place.
    #[arg(long, value_parser = ["authenticate", "encrypt"], default_value = "encrypt")]
    pub data_security: String,
    /// Let targets meet pools by TCP, as between hosts, and not by unix sockets.
    #[arg(long)]
    pub network_only: bool,
    /// A second cluster beside this one, with which it is paired, to try disaster recovery: in `peer/` of
    /// the same directory.
    #[arg(long)]
    pub peer: bool,
    /// Run a mirror, which links this cluster to its peers.
    #[arg(long)]
    pub mirror: bool,
    /// As of `quoin node run`.
    #[arg(long, value_name = "EDITION", default_value_t = quoin_csi::Edition::default())]
    pub csi_edition: quoin_csi::Edition,
    #[command(flatten)]
    pub healing: HealingOptions,
    #[command(flatten)]
    pub lifetime: LifetimeOptions,
}

/// Prints one line for the user of `quoin dev`.
fn print_line(line: &str) {
    let mut output = std::io::stdout().lock();
    // A closed terminal must not end the cluster.
    let _ = writeln!(output, "{line}");
    let _ = output.flush();
}

pub fn run(options: DevOptions) -> Result<()> {
    let root = options.dir.clone().unwrap_or_else(client::default_root);
    let layout = Layout::open(&root)?;
    let _lock = lock::take(&layout)?;
    let settings =
        Settings::load_or_create(&layout, options.pools.map(usize::from), options.pool_size);
    let (settings, notes) = settings.inspect_err(|_| layout.discard_unused())?;
    for note in notes {
        print_line(&note);
    }
    let attaching = Attaching::of_this_host(options.no_attach);
    if let Attaching::No { reason } = &attaching {
        print_line(&format!("volumes are served as NBD sockets only: {reason}"));
    }
    // Single thread: the kernel ends the children with the thread that started them.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tasks = tokio::task::LocalSet::new();
    let policy = Policy {
        security: options.data_security,
        network_only: options.network_only,
        csi_edition: options.csi_edition,
        peers: match (options.peer, options.mirror) {
            (true, _) => Peers::SecondCluster,
            (false, true) => Peers::MirrorAlone,
            (false, false) => Peers::None,
        },
        peer_pools: options.pools,
        peer_pool_size: options.pool_size,
        healing: options.healing,
        lifetime: options.lifetime,
    };
    tasks.block_on(&runtime, supervise(&layout, &settings, &attaching, &policy))
}

/// Options of the processes at each start.
pub(crate) struct Policy {
    security: String,
    network_only: bool,
    csi_edition: quoin_csi::Edition,
    peers: Peers,
    peer_pools: Option<u8>,
    peer_pool_size: Option<u64>,
    healing: HealingOptions,
    lifetime: LifetimeOptions,
}

/// Other clusters beside this one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peers {
    None,
    /// A mirror runs, and whoever wants to pairs with this cluster.
    MirrorAlone,
    /// A second cluster is run, and paired with.
    SecondCluster,
}

/// Signals that end the cluster: Ctrl-C, `kill`, a closed terminal.
pub(crate) struct Ends([Signal; 3]);

impl Ends {
    fn new() -> Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [first, second, third] = kinds.map(signal);
        Ok(Self([first?, second?, third?]))
    }

    async fn wait(&mut self) {
        let [first, second, third] = &mut self.0;
        tokio::select! {
            _ = first.recv() => {}
            _ = second.recv() => {}
            _ = third.recv() => {}
        }
    }
}

async fn supervise(
    layout: &Layout,
    settings: &Settings,
    attaching: &Attaching,
    policy: &Policy,
) -> Result<()> {
    let mut ends = Ends::new()?;
    let mut keepers = Vec::new();
    let outcome = tokio::select! {
        outcome = start(layout, settings, attaching, policy, &mut keepers) => match outcome {
            Ok((pools, blocked)) => {
                greet(layout, settings, pools, attaching, blocked.as_ref()).await;
                if policy.peers == Peers::SecondCluster {
                    peer::greet(layout);
                }
                tokio::select! {
                    () = ends.wait() => Ok(()),
                    never = report_when_unblocked(layout, blocked) => match never {},
                    error = first_failure(&keepers) => Err(error),
                    never = members::watch_members(layout, settings, &keepers) => match never {},
                }
            }
            Err(error) => Err(error),
        },
        () = ends.wait() => Ok(()),
    };
    print_line("stopping");
    let stopped = stop(layout, keepers, &mut ends).await;
    outcome.and(stopped)
}

/// Reports once that block devices can be made again, where they could not.
async fn report_when_unblocked(
    layout: &Layout,
    blocked: Option<Blocked>,
) -> std::convert::Infallible {
    if let Some(blocked) = blocked {
        blocked.over(layout).await;
        print_line("block devices can be made again");
    }
    std::future::pending().await
}

/// Says which file systems died with the process that served their devices, and frees what of
/// those is not mounted. What is still served is left alone.
fn report_dead_mounts(layout: &Layout) -> Result<()> {
    for (device, mount) in cleanup::release_leftovers(layout, Dead::Stays)? {
        let (device, target) = (device.path.display(), mount.target.display());
        let users = mount.users();
        let (used, end) = match users.is_empty() {
            true => (String::new(), ""),
            false => (format!(", and is in use by {}", users.join(", ")), "end its users, "),
        };
        print_line(&format!(
            "{target} is dead: {device} below it was lost with the process that served it{used}. \
             Nothing can be read or written there. To have it back: {end}run `umount {target}`, \
             then attach and mount the volume again: what was synced is there"
        ));
    }
    Ok(())
}

/// Starts everything in order; members that have not joined yet join. Returns the number of pools,
/// and what keeps block devices from being made.
async fn start(
    layout: &Layout,
    settings: &Settings,
    attaching: &Attaching,
    policy: &Policy,
    keepers: &mut Vec<Keeper>,
) -> Result<(usize, Option<Blocked>)> {
    let began = Instant::now();
    let left = keeper::listener_of(&layout.attach_socket()).await;
    keeper::await_the_last(layout, left).await;
    let roster = Roster::new(layout);
    report_dead_mounts(layout)?;
    let start = |process: Process| Keeper::start(process, layout.clone(), roster.clone());

    processes::init_controller(layout, policy).await?;
    keepers.push(start(processes::controller(layout, settings, policy))?);
    let mut cluster = wait_for_controller(layout, keepers, began).await?;

    let pools = members::pools_to_start(&mut cluster, layout, settings).await?;
    for pool in &pools {
        let directory = layout.pool(&pool.name);
        if Identity::load(&directory).is_ok() && !layout.pool_data(&pool.name).exists() {
            let name = &pool.name;
            print_line(&format!(
                "the file of {name} is missing: an empty one is made, and its replicas are rebuilt"
            ));
        }
        members::join(&mut cluster, settings, Role::Pool, &pool.name, &directory).await?;
        keepers.push(start(processes::pool(layout, settings, policy, pool))?);
    }
    members::join(&mut cluster, settings, Role::Node, &settings.node, &layout.node()).await?;
    keepers.push(start(processes::target(layout, settings))?);
    if left.is_some() || matches!(attaching, Attaching::Yes) {
        keepers.push(start(processes::holder(layout))?);
        wait_for_holder(layout, keepers, began).await?;
    }
    if let Some(pid) = left {
        print_line("attached devices of the last `quoin dev`, which was killed, continue");
        let (layout, roster) = (layout.clone(), roster.clone());
        keepers.push(Keeper::adopt(processes::attach(&layout, settings), pid, layout, roster)?);
    } else if let Attaching::Yes = attaching {
        keepers.push(start(processes::attach(layout, settings))?);
    }
    keepers.push(start(processes::node(layout, settings, attaching, policy.csi_edition))?);
    if policy.peers != Peers::None {
        let (node, directory) = (&settings.node, layout.mirror());
        members::join(&mut cluster, settings, Role::Mirror, node, &directory).await?;
        keepers.push(start(processes::mirror(layout, settings))?);
    }
    if policy.peers == Peers::SecondCluster {
        keepers.push(start(processes::peer(layout, policy, attaching))?);
    }
    wait_until_all_are_online(&mut cluster, layout, settings, keepers, &pools, began).await?;
    let blocked = match keepers.iter().find(|keeper| keeper.name == "attach") {
        Some(attach) => blocked::wait(layout, attach).await,
        None => None,
    };
    if let Some(blocked) = &blocked {
        blocked.report(&layout.admin_socket(), &settings.node).await;
    }
    if policy.peers == Peers::SecondCluster {
        peer::pair(&mut cluster, layout, keepers, began).await?;
    }
    Ok((pools.len(), blocked))
}

async fn wait_for_controller(
    layout: &Layout,
    keepers: &[Keeper],
    began: Instant,
) -> Result<Cluster> {
    loop {
        if let Ok(mut cluster) = client::connect(&layout.admin_socket()).await
            && cluster.get_cluster_info(GetClusterInfoRequest {}).await.is_ok()
        {
            return Ok(cluster);
        }
        let hopeless = |keeper: &Keeper| keeper.has_ended() || keeper.cannot_start();
        if began.elapsed() > START_BUDGET || keepers.iter().any(hopeless) {
            let log = layout.log("controller");
            bail!(
                "the controller does not start: {}; its log is {}",
                last_line(&log),
                log.display()
            );
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// "Quoin is up" promises that the attach process may be killed.
async fn wait_for_holder(layout: &Layout, keepers: &[Keeper], began: Instant) -> Result<()> {
    while !quoin_attach::holder::is_served(&layout.holder_socket()) {
        if began.elapsed() > START_BUDGET || keepers.iter().any(Keeper::has_ended) {
            bail!(
                "the attach holder does not answer; its log is {}",
                layout.log(processes::HOLDER).display()
            );
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

async fn wait_until_all_are_online(
    cluster: &mut Cluster,
    layout: &Layout,
    settings: &Settings,
    keepers: &[Keeper],
    started: &[&PoolSettings],
    began: Instant,
) -> Result<()> {
    loop {
        let pools = cluster.list_pools(ListPoolsRequest {}).await;
        let nodes = cluster.list_nodes(ListNodesRequest {}).await;
        let (mut missing, mut failed) = (Vec::new(), Vec::new());
        if let (Ok(pools), Ok(nodes)) = (pools, nodes) {
            let (pools, nodes) = (pools.into_inner().pools, nodes.into_inner().nodes);
            // A pool that is full, or dying, serves the data it has.
            let serves = |pool: &Pool| ["Online", "Full", "Dying"].contains(&pool.state.as_str());
            let cannot_start = |name: &str| {
                keepers.iter().any(|keeper| keeper.name == name && keeper.cannot_start())
            };
            for wanted in started {
                match pools.iter().find(|pool| pool.name == wanted.name) {
                    Some(pool) if serves(pool) => {}
                    // The others may work without it; its repair is up to the operator.
                    Some(pool) if pool.state == "Failed" && began.elapsed() > FAILED_AFTER => {
                        failed.push(format!("pool {} is not used: {}", pool.name, pool.message));
                    }
                    _ if cannot_start(&wanted.name) => {
                        let why = last_line(&layout.log(&wanted.name));
                        failed.push(format!("pool {} does not start: {why}", wanted.name));
                    }
                    _ => missing.push(wanted.name.clone()),
                }
            }
            if !nodes.iter().any(|node| node.name == settings.node && node.state == "Online") {
                missing.push("node".into());
            }
            if missing.is_empty() {
                failed.iter().for_each(|line| print_line(line));
                return Ok(());
            }
        }
        if began.elapsed() > START_BUDGET {
            bail!(
                "not all parts are up after {} s (missing: {}); their logs are in {}",
                START_BUDGET.as_secs(),
                missing.join(", "),
                layout.logs().display()
            );
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Last line of a process's log, which may say why the process ended.
fn last_line(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let tail = String::from_utf8_lossy(&text[text.len().saturating_sub(4096)..]).into_owned();
    let last = tail.lines().rev().find(|line| !line.trim().is_empty());
    last.map_or("its log is empty", |line| line.trim_start_matches("error: ")).to_owned()
}

async fn greet(
    layout: &Layout,
    settings: &Settings,
    pools: usize,
    attaching: &Attaching,
    blocked: Option<&Blocked>,
) {
    let capacity = settings.pools.first().map_or(0, |pool| pool.capacity_bytes);
    let is_default = *layout.root() == client::default_root();
    let socket = if is_default {
        String::new()
    } else {
        format!("\n  export QUOIN_SOCKET={}", layout.admin_socket().display())
    };
    let attach = match attaching {
        Attaching::Yes if blocked.is_none() => {
            "quoin volume attach db             prints a block device"
        }
        _ => "quoin volume attach db --nbd       prints an NBD address",
    };
    let without = match blocked {
        Some(blocked) => {
            let held = blocked.shown(&layout.admin_socket()).await;
            let held = if held.is_empty() { held } else { format!(" ({held})") };
            format!(", but block devices cannot be made: {}{held}\n", blocked.why)
        }
        None => ": ".to_owned(),
    };
    print_line(&format!(
        "Quoin is up{without}{} pools of up to {} each (sparse), node {}\n  data   {}\n  admin  {}\n  \
         csi    unix://{}\n  logs   {}\n\nIn another terminal:{socket}\n  \
         quoin volume create db --size 1GiB --replicas 3\n  {attach}\n  quoin events -w\n\n\
         Ctrl-C stops everything and keeps the data.",
        pools,
        show_size(capacity),
        settings.node,
        layout.root().display(),
        layout.admin_socket().display(),
        layout.csi_socket().display(),
        layout.logs().display(),
    ));
}

/// Resolves when a process cannot be started any more (its binary or log is gone).
async fn first_failure(keepers: &[Keeper]) -> anyhow::Error {
    loop {
        let has_failed = |keeper: &&Keeper| keeper.has_ended() && !keeper.was_asked_to_stop();
        if let Some(keeper) = keepers.iter().find(has_failed) {
            return anyhow::anyhow!("{} cannot be started again; see the line above", keeper.name);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Ends everything, the latest started first: node, attach, target, pools, controller. Goes on
/// after a failure, so that one stuck process leaves no other behind.
async fn stop(layout: &Layout, keepers: Vec<Keeper>, ends: &mut Ends) -> Result<()> {
    let mut problems = Vec::new();
    let (pools, mut others): (Vec<_>, Vec<_>) =
        keepers.into_iter().partition(|keeper| keeper.name.starts_with("pool-"));
    let controller = if others.is_empty() { None } else { Some(others.remove(0)) };
    while let Some(keeper) = others.pop() {
        if keeper.name == "attach" {
            let outcome = cleanup::release_devices(layout, ends).await;
            // The holder goes first: what is in use even now would be left to it, and no attach
            // process will come to take it over.
            if others.last().is_some_and(|next| next.name == processes::HOLDER)
                && let Some(holder) = others.pop()
                && let Err(error) = holder.stop().await
            {
                problems.push(format!("{error:#}"));
            }
            if let Err(error) = outcome {
                problems.push(format!("{error:#}"));
                // The attach process reports this failure too, and must not be asked twice.
                let _ = keeper.stop().await;
                continue;
            }
        }
        if let Err(error) = keeper.stop().await {
            problems.push(format!("{error:#}"));
        }
    }
    // Pools are independent of each other: all at once.
    let pools: Vec<_> =
        pools.into_iter().map(|keeper| tokio::task::spawn_local(keeper.stop())).collect();
    for pool in pools {
        if let Err(error) = pool.await.context("stop a pool").and_then(|outcome| outcome) {
            problems.push(format!("{error:#}"));
        }
    }
    if let Some(controller) = controller
        && let Err(error) = controller.stop().await
    {
        problems.push(format!("{error:#}"));
    }
    if let Err(error) = cleanup::release_leftovers(layout, Dead::Goes) {
        problems.push(format!("{error:#}"));
    }
    // A start that was broken off before it came to the attach process of the last one.
    if let Some(pid) = keeper::listener_of(&layout.attach_socket()).await {
        cleanup::report_leftovers(layout, pid);
    }
    if problems.is_empty() {
        print_line("stopped; the data stays for the next start");
        return Ok(());
    }
    bail!("{}", problems.join("; "))
}
