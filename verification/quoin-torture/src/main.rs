//! `quoin-torture`: the real binaries on hosts of their own, under continuous faults.
//!
//! Hosts (network namespaces): the controller, three pools, and a node with its target and
//! attach process; and, where hosts have networks of their own, a sixth with the target of another
//! node. They have a raw volume whose clients record a history that is checked, another one that
//! both nodes share and write, and, as root with FUSE, an ext4 and an xfs file system on which fio
//! writes and verifies and which are checked at each stop, and volumes that an orchestrator uses by CSI
//! while their host is damaged ([`pods`]). Faults are drawn from a seed. The report has the faults, the
//! checks, the longest turn of each pool's thread, the longest pause of a client, and the lost data (none,
//! or the run fails).
//!
//! With `--upgrade-from` the same cluster and clients run through upgrades and downgrades instead
//! of faults. With `--hosts` another cluster has hosts that are lost and return ([`hosts`]).

mod client;
mod cluster;
mod disk;
mod faults;
mod files;
mod hosts;
mod network;
mod pods;
mod turns;
mod upgrade;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::client::Clients;
use crate::cluster::Cluster;
use crate::faults::{Fault, Injected};
use crate::files::Files;
use crate::hosts::HostOptions;
use crate::pods::{Damage, Pods};
use crate::turns::Turns;

/// Tortures real Quoin processes and checks every byte
#[derive(Parser)]
struct Options {
    /// Duration of the faults
    #[arg(long, default_value_t = 10.0, value_name = "N")]
    minutes: f64,
    /// Seed of the faults; the same seed draws the same ones (their instants differ)
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Only these faults, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FAULTS")]
    only: Vec<Fault>,
    /// Only these damages of the node's host, separated by commas: to volumes that an orchestrator uses by
    /// CSI, and has healed. Needs root, /dev/fuse and loop devices
    #[arg(long, value_enum, value_delimiter = ',', value_name = "DAMAGES")]
    damages: Vec<Damage>,
    /// No damages of hosts, and no volumes that are used by CSI
    #[arg(long, conflicts_with = "damages")]
    no_damages: bool,
    /// The binary to torture
    #[arg(long, value_name = "FILE")]
    quoin: PathBuf,
    /// No faults: begin with this older binary, and replace it process by process by the other one,
    /// in several orders, and back
    #[arg(long, value_name = "FILE")]
    upgrade_from: Option<PathBuf>,
    /// Do not go back: the older version cannot open what the newer one has written
    #[arg(long, requires = "upgrade_from")]
    forward_only: bool,
    /// No file systems and no damages of hosts, only the raw volume
    #[arg(long, conflicts_with = "damages")]
    no_files: bool,
    #[command(flatten)]
    hosts: HostOptions,
    /// Directory in which the cluster's directory is made
    #[arg(long, value_name = "DIR")]
    under: Option<PathBuf>,
}

/// Interval between two checks of the file systems.
const STOP_EVERY: Duration = Duration::from_secs(120);
const FLOW_BUDGET: Duration = Duration::from_secs(90);
const HEAL_BUDGET: Duration = Duration::from_secs(240);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    let options = Options::parse();
    catch_interrupts();
    let under = options.under.clone().unwrap_or_else(std::env::temp_dir);
    let directory = under.join(format!("quoin-torture-{}", std::process::id()));
    match torture(&options, &directory) {
        Ok(()) => {
            if let Err(error) = std::fs::remove_dir_all(&directory) {
                eprintln!("could not remove {}: {error}", directory.display());
            }
            if INTERRUPTED.load(Ordering::SeqCst) { ExitCode::from(130) } else { ExitCode::SUCCESS }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            eprintln!("logs and pools are left in {}", directory.display());
            ExitCode::FAILURE
        }
    }
}

/// Makes Ctrl-C end the faults; everything is checked and removed as at the end.
fn catch_interrupts() {
    extern "C" fn note(_: i32) {
        INTERRUPTED.store(true, Ordering::SeqCst);
    }
    // SAFETY: the handler only stores to an atomic, which is allowed in a signal handler.
    unsafe { libc::signal(libc::SIGINT, note as *const () as libc::sighandler_t) };
}

/// Gives this process a mount table of its own. Another program of the machine that copies the table for itself
/// would keep the mounts, and with them the file systems that are to be checked or healed.
fn leave_mount_table() -> Result<()> {
    // SAFETY: the process has one thread, and the arguments are constants or null where the kernel takes it.
    let left = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                std::ptr::null(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
    };
    match left {
        true => Ok(()),
        false => Err(std::io::Error::last_os_error()).context("a mount table of its own"),
    }
}

fn torture(options: &Options, directory: &Path) -> Result<()> {
    let seed = options.seed.unwrap_or_else(rand::random);
    println!("seed {seed}");
    if options.hosts.hosts {
        let quoin = options.quoin.canonicalize().context("--quoin")?;
        return hosts::torture(&options.hosts, options.minutes, seed, &quoin, directory);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let files_possible = match files::possible() {
        _ if options.no_files => false,
        Ok(()) => true,
        Err(why) => {
            println!("without file systems: {why}");
            false
        }
    };
    let quoin = options.quoin.canonicalize().context("--quoin")?;
    let older = options.upgrade_from.as_ref().map(|older| older.canonicalize());
    let older = older.transpose().context("--upgrade-from")?;
    let first = older.as_ref().unwrap_or(&quoin);
    if files_possible {
        leave_mount_table()?;
    }
    let before = pods::Before::look();
    let mut cluster = Cluster::start(first, directory, files_possible, older.is_none())?;
    match &cluster.network {
        None => println!("all on loopback (no root or no `ip`): links are not harmed"),
        Some(network) if !network.delays => println!("this kernel cannot delay packets (netem)"),
        Some(_) => {}
    }
    let id = cluster.volume("raw", "64MiB", &["--nbd"])?;
    let socket = directory.join(format!("run/nbd/{id}.sock"));
    cluster.wait("the volume's socket", |_| Ok(socket.exists()))?;
    let mut clients = vec![Clients::start(&[socket], seed)?];
    if cluster.has("sharer") {
        let id = cluster.volume("shared", "16MiB", &["--nbd", "--share", "multi-writer"])?;
        let socket = directory.join(format!("run/nbd/{id}.sock"));
        cluster.wait("the shared volume's socket", |_| Ok(socket.exists()))?;
        let other = cluster.share("shared", &id)?;
        clients.push(Clients::start(&[socket, other], seed.wrapping_add(1))?);
    }
    let mut files = Vec::new();
    if files_possible {
        files.push(Files::make(&cluster, "ext4", false)?);
        files.push(Files::make(&cluster, "xfs", true)?);
    }
    let mut pods = match files_possible && older.is_none() && !options.no_damages {
        true => Some(Pods::start(&mut cluster)?),
        false => None,
    };
    let (mut injected, mut turns) = (Injected::default(), Turns::default());
    let done = match &older {
        Some(older) => {
            let forward_only = options.forward_only;
            upgrade::run(&mut cluster, &clients[0], &mut files, older, &quoin, forward_only)
        }
        None => {
            let drawn = (&mut injected, &mut rng);
            let used = (&mut files[..], pods.as_mut());
            rounds(options, &mut cluster, &clients, used, &mut turns, drawn)
        }
    };
    let outcome = done.and_then(|()| end(&mut cluster, clients, &mut files, pods.as_mut()));
    turns.look(&cluster);
    turns.print();
    let file_rounds: u64 = files.iter().map(|f| f.rounds).sum();
    let file_checks: u64 = files.iter().map(|f| f.checks).sum();
    for one in &injected.0 {
        println!("{:<18} {:>6}", format!("{:?}", one.0), one.1);
    }
    if let Some(pods) = &pods {
        for (damage, times) in &pods.happened {
            println!("{:<18} {times:>6}", format!("{damage:?}"));
        }
    }
    let judgement = outcome?;
    if let Some(pods) = &pods {
        println!(
            "{} damages of the host, {} heals, the longest {:.1} s, {} writes of workloads",
            pods.happened.values().sum::<u64>(),
            pods.heals,
            pods.longest_heal.as_secs_f64(),
            pods.writes
        );
    }
    println!(
        "{} faults, {} IOs checked ({} blocks undecided), {file_rounds} rounds of fio verified, \
         {file_checks} file system checks clean",
        injected.0.values().sum::<u64>(),
        judgement.checked,
        judgement.undecided,
    );
    println!("longest pause {:.1} s, losses 0", judgement.longest_pause.as_secs_f64());
    drop(files);
    for name in ["raw", "ext4", "xfs"] {
        if cluster.command(&["volume", "get", name]).is_ok() {
            cluster.command(&["volume", "detach", name])?;
        }
    }
    for node in ["sharer", "torture"] {
        if cluster.has("sharer") {
            cluster.command(&["volume", "detach", "shared", "--node", node])?;
        }
    }
    if files_possible && older.is_none() {
        pods::nothing_is_left(&mut cluster, &before)?;
        println!("nothing is left on the host");
    }
    cluster.stop();
    Ok(())
}

fn rounds(
    options: &Options,
    cluster: &mut Cluster,
    clients: &[Clients],
    (files, mut pods): (&mut [Files], Option<&mut Pods>),
    turns: &mut Turns,
    (injected, rng): (&mut Injected, &mut ChaCha8Rng),
) -> Result<()> {
    let (began, mut stopped) = (Instant::now(), Instant::now());
    let lasts = Duration::from_secs_f64(options.minutes * 60.0);
    while began.elapsed() < lasts && !INTERRUPTED.load(Ordering::SeqCst) {
        files.iter_mut().try_for_each(Files::tend)?;
        turns.look(cluster);
        if let Some(pods) = pods.as_deref_mut() {
            pods.check()?;
            let damages_alone = !options.damages.is_empty() && options.only.is_empty();
            if damages_alone || rng.random_range(0..3) == 0 {
                let damage = pods::draw(rng, &options.damages)?;
                // A replica that is behind is a condition of the volume too, which no node heals.
                heal(cluster, clients)?;
                println!("[{:>6.1} s] {damage:?}", began.elapsed().as_secs_f64());
                let happened = pods.happen(damage, cluster, files, rng);
                happened.with_context(|| format!("{damage:?}"))?;
                pods.flows(FLOW_BUDGET).with_context(|| format!("after {damage:?}"))?;
                continue;
            }
        }
        let fault = faults::draw(rng, cluster, &options.only)?;
        println!(
            "[{:>6.1} s] {fault:?}; {} IOs checked",
            began.elapsed().as_secs_f64(),
            clients.iter().map(Clients::checked).sum::<u64>()
        );
        injected.inject(fault, cluster, rng)?;
        for of_volume in clients {
            of_volume.flows(FLOW_BUDGET).with_context(|| format!("after {fault:?}"))?;
        }
        if let Some(pods) = pods.as_deref_mut() {
            pods.flows(FLOW_BUDGET).with_context(|| format!("after {fault:?}"))?;
        }
        // Sometimes the next fault is injected before the cluster has healed from this one.
        if rng.random_range(0..3) != 0 {
            heal(cluster, clients)?;
        }
        if stopped.elapsed() > STOP_EVERY {
            heal(cluster, clients)?;
            files.iter_mut().try_for_each(Files::check)?;
            stopped = Instant::now();
        }
    }
    Ok(())
}

fn heal(cluster: &mut Cluster, clients: &[Clients]) -> Result<()> {
    let healed = cluster.wait_for("all replicas in sync", HEAL_BUDGET, |cluster| {
        clients.iter().try_for_each(Clients::check)?;
        let behind = cluster.unhealed()?;
        if behind.is_empty() { Ok(true) } else { bail!("{behind}") }
    });
    clients.iter().try_for_each(Clients::check)?;
    healed
}

fn end(
    cluster: &mut Cluster,
    clients: Vec<Clients>,
    files: &mut [Files],
    pods: Option<&mut Pods>,
) -> Result<client::Judgement> {
    println!("now nothing more is done: everything must heal, be whole and agree");
    heal(cluster, &clients)?;
    if let Some(pods) = pods {
        pods.end(cluster)?;
    }
    files.iter_mut().try_for_each(Files::check)?;
    let mut all = client::Judgement::default();
    for of_volume in clients {
        let one = of_volume.finish()?;
        all.checked += one.checked;
        all.undecided += one.undecided;
        all.longest_pause = all.longest_pause.max(one.longest_pause);
    }
    Ok(all)
}
