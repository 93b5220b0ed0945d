//! Cases without a floor: the cost of idle volumes and full caches, the time until a pool that died
//! answers again, and the effect of changes on clients ([`crate::members`]).

use std::fmt::Display;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::load::Generator;
use crate::product::{Away, Product};
use crate::{
    Class, Error, Options, absence, clones, export, groups, heal, history, making, members, mirror,
    orchestrated, overwrites, snapshots, takeover, usage,
};

const IDLE_VOLUME_BYTES: u64 = 64 << 20;
/// Share of the measured time for which a new cluster settles before it counts as idle.
const SETTLE_SHARE: f64 = 0.5;
/// Number of times that the whole is written, so that a map is folded and written out: its log
/// alone puts no node into a cache.
const FULL_CACHE_WRITES: u64 = 4;
const RESTART_TIMEOUT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(2);

/// Sizes of the cases without a floor.
#[derive(clap::Args, Clone, Debug)]
pub struct FurtherOptions {
    /// Volumes of the idle case
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub volumes: usize,
    /// Seconds for which the idle case measures them, after half as many in which they settle
    #[arg(long, default_value_t = 20.0, value_name = "SECONDS", value_parser = crate::seconds)]
    pub idle_seconds: f64,
    /// Size of the volume that fills the pools' caches, in GiB; 128 MiB of cache hold 25
    #[arg(long, default_value_t = 32, value_name = "GIB", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub cache_gib: u64,
    /// Volumes of the case that makes, lists, snapshots and deletes many over CSI
    #[arg(long, default_value_t = 1000, value_name = "N")]
    pub csi_volumes: usize,
    /// Volumes that are there already when the case `making` makes 300 more
    #[arg(long, default_value_t = 6000, value_name = "N", value_parser = clap::value_parser!(u64).range(300..=8000))]
    pub beside: u64,
    /// Snapshots of one volume in the case that lists them and opens it
    #[arg(long, default_value_t = 1000, value_name = "N")]
    pub snapshots: usize,
    /// Size of the full volume that is cloned, in GiB
    #[arg(long, default_value_t = 10, value_name = "GIB", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub clone_gib: u64,
    /// Failovers of fifty volumes, one after the other; and moves of twelve through the services
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub failovers: u32,
    /// Seed of the processes that are killed before those [default: drawn]
    #[arg(long, value_name = "N")]
    pub failover_seed: Option<u64>,
    /// Data of the cold start case, in GiB
    #[arg(long, default_value_t = 10, value_name = "GIB", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub data_gib: u64,
}

/// One figure of Quoin alone.
pub struct Fact {
    pub name: String,
    pub value: f64,
    pub unit: &'static str,
    /// Upper bound.
    pub goal: f64,
}

impl Fact {
    /// Returns a figure of a case.
    pub fn of(case: impl Display, what: &str, value: f64, unit: &'static str, goal: f64) -> Self {
        Self { name: format!("{case}-{what}"), value, unit, goal }
    }
}

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let mut facts = Vec::new();
    if options.wants("idle") {
        eprintln!("measuring idle with {} attached volumes", options.further.volumes);
        facts.extend(idle(options, quoin, &directory.join("idle"))?);
    }
    if options.wants("full-cache") {
        eprintln!("measuring full-cache with {} GiB", options.further.cache_gib);
        facts.push(full_cache(quoin, &directory.join("cache"), options.further.cache_gib)?);
    }
    if options.wants("cold-start") {
        let (bytes, room) = (options.further.data_gib << 30, free_bytes(directory)?);
        // The data once, and as much again for clean-up and the pool's own needs.
        if room < 2 * bytes {
            eprintln!(
                "leaving out cold-start: {} has {} GiB free and {} are needed; use --dir or a \
                 smaller --data-gib",
                directory.display(),
                room >> 30,
                options.further.data_gib * 2
            );
        } else {
            eprintln!("measuring cold-start with {} GiB", options.further.data_gib);
            facts.extend(cold_start(quoin, &directory.join("cold"), options.further.data_gib)?);
        }
    }
    // Short names: they contain sockets, whose paths have a limit.
    let mixes = [(members::MIXED_REBUILD, 30, "mixed"), (members::REBUILD, 100, "members")];
    for (name, writes_percent, directory_name) in mixes {
        if options.wants(name) {
            let directory = directory.join(directory_name);
            facts.extend(members::during_rebuild(
                name,
                writes_percent,
                options,
                quoin,
                &directory,
            )?);
        }
    }
    if options.wants(clones::NAME) {
        facts.extend(clones::run(options, quoin, &directory.join("clones"))?);
    }
    facts.extend(snapshots::run(options, quoin, &directory.join("points"))?);
    facts.extend(export::run(options, quoin, &directory.join("export"))?);
    facts.extend(mirror::run(options, quoin, &directory.join("mirror"))?);
    facts.extend(history::run(options, quoin, &directory.join("history"))?);
    facts.extend(overwrites::run(options, quoin, &directory.join("overwrites"))?);
    if options.wants(groups::NAME) {
        facts.extend(groups::run(quoin, &directory.join("groups"))?);
    }
    facts.extend(orchestrated::run(options, quoin, &directory.join("csi"))?);
    if options.wants(making::NAME) {
        eprintln!("measuring making beside {} volumes", options.further.beside);
        facts.extend(making::run(options, quoin, &directory.join("making"))?);
    }
    if options.wants(takeover::NAME) {
        facts.extend(takeover::run(quoin, &directory.join("takeover"))?);
    }
    if options.wants(absence::NAME) {
        facts.extend(absence::run(options, quoin, &directory.join("absence"))?);
    }
    if options.wants(members::CHANGE) {
        facts.extend(members::change(quoin, &directory.join("change"))?);
    }
    if options.wants(members::DEATH) {
        facts.extend(members::target_death(quoin, &directory.join("death"))?);
    }
    if options.wants(heal::NAME) {
        facts.extend(heal::run(options, quoin, &directory.join("heal"))?);
    }
    Ok(facts)
}

/// CPU and memory of a Quoin whose volumes are attached and not used.
fn idle(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let (volumes, seconds) = (options.further.volumes, options.further.idle_seconds);
    let product = Product::start(quoin, directory)?;
    let mut connections = Vec::new();
    for number in 0..volumes {
        let socket = product.volume(&format!("idle-{number}"), Class::Cache, IDLE_VOLUME_BYTES)?;
        let mut generator = Generator::connect(&socket)?;
        // Each has been used, so that none is idle only because it never began.
        generator.read_one()?;
        connections.push(generator);
    }
    std::thread::sleep(Duration::from_secs_f64(seconds * SETTLE_SHARE));
    let pids = product.pids();
    let before = usage::cpu(&pids);
    let watched = Instant::now();
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let used = usage::cpu(&pids).saturating_sub(before);
    let watched = watched.elapsed();
    let fact = |what: &str, value, unit, goal| {
        Fact::of(format!("idle-{volumes}-volumes"), what, value, unit, goal)
    };
    let facts = vec![
        fact("cpu", used.as_secs_f64() / watched.as_secs_f64() * 100.0, "% of a core", 1.0),
        fact("memory-pool", largest_mib(&product, "pool"), "MiB", 300.0),
        fact("memory-target", largest_mib(&product, "target"), "MiB", 300.0),
    ];
    drop(connections);
    Ok(facts)
}

/// Returns the memory of the largest process of a role.
pub fn largest_mib(product: &Product, role: &str) -> f64 {
    let pids = product.pids_of(role);
    let bytes = pids.iter().filter_map(|pid| usage::resident_bytes(*pid)).max();
    bytes.unwrap_or_default() as f64 / f64::from(1 << 20)
}

/// Measures the memory of a pool whose caches are full. The caches hold nodes of maps, and a leaf
/// takes the same space however few of its blocks were written: so many GiB are mapped with little
/// data.
fn full_cache(quoin: &Path, directory: &Path, cache_gib: u64) -> Result<Fact, Error> {
    let pool_size = format!("{}GiB", cache_gib + cache_gib / 2 + 1);
    let product = Product::start_with(quoin, directory, &["--pool-size", &pool_size])?;
    let socket = product.volume("cached", Class::Cache, cache_gib << 30)?;
    let mut generator = Generator::connect(&socket)?;
    generator.touch_each_mib(true, FULL_CACHE_WRITES)?;
    generator.touch_each_mib(false, 1)?;
    Ok(Fact {
        name: format!("full-cache-{cache_gib}-gib-memory-pool"),
        value: largest_mib(&product, "pool"),
        unit: "MiB",
        goal: 300.0,
    })
}

/// Kills all pools. Measures when they are healthy again with nothing of theirs in memory, and when
/// their data can be read.
fn cold_start(quoin: &Path, directory: &Path, data_gib: u64) -> Result<Vec<Fact>, Error> {
    // A volume may fill four fifths of a pool.
    let pool_size = format!("{}GiB", data_gib + data_gib / 2 + 1);
    let product = Product::start_with(quoin, directory, &["--pool-size", &pool_size])?;
    let socket = product.volume_with("cold", Class::Cache, data_gib << 30, 1)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(1 << 20)?;
    let old = product.pids_of("pool");
    let peak = old.iter().filter_map(|pid| usage::peak_bytes(*pid)).max().unwrap_or_default();
    let pools = ["pool-a", "pool-b", "pool-c"];
    let away: Vec<Away> =
        pools.iter().map(|pool| product.take_away(pool)).collect::<Result<_, Error>>()?;
    pools.iter().try_for_each(|pool| product.drop_cached(pool))?;
    let back = Instant::now();
    away.into_iter().try_for_each(Away::give_back)?;
    // The read ends only when a pool answers; meanwhile the pools' health pages are polled.
    let reader = std::thread::spawn(move || {
        let outcome = generator.read_one();
        (outcome, Instant::now())
    });
    let (mut started, mut healthy) = (None, None);
    while healthy.is_none() || !reader.is_finished() {
        let pools = product.pids_of("pool");
        let all = pools.len() >= old.len() && pools.iter().all(|pid| !old.contains(pid));
        if started.is_none() && all {
            started = Some(Instant::now());
        }
        if healthy.is_none() && all && pools.iter().all(|pid| is_healthy(*pid)) {
            healthy = Some(Instant::now());
        }
        if back.elapsed() > RESTART_TIMEOUT {
            return Err(Error::Failed(format!(
                "the pools did not answer within {} s after they were let start",
                RESTART_TIMEOUT.as_secs()
            )));
        }
        std::thread::sleep(POLL);
    }
    let (outcome, answered) =
        reader.join().map_err(|_| Error::Failed("the reader panicked".into()))?;
    outcome?;
    let (Some(started), Some(healthy)) = (started, healthy) else {
        return Err(Error::Failed("a read was answered before all pools were back".into()));
    };
    let fact = |what: &str, value, goal| Fact {
        name: format!("cold-start-{data_gib}-gib{what}"),
        value,
        unit: "s",
        goal,
    };
    let memory = Fact {
        name: format!("cold-start-{data_gib}-gib-memory-pool"),
        // Peak of one pool while the data was written.
        value: peak as f64 / f64::from(1 << 20),
        unit: "MiB",
        goal: 300.0,
    };
    Ok(vec![
        memory,
        fact("", (healthy - started).as_secs_f64(), 2.0),
        // The time includes the lease of two seconds for which a replica waits when it cannot know
        // the holder.
        fact("-first-read", (answered - back).as_secs_f64(), 4.0),
    ])
}

/// Returns whether a role that serves `/healthz` reports that it is healthy.
fn is_healthy(pid: u32) -> bool {
    get(pid, "/healthz").is_some_and(|answer| answer.as_bytes().get(8..12) == Some(b" 200"))
}

/// Returns one figure of a role's metrics, summed over its labels; `None`: it has none.
pub fn scrape(pid: u32, name: &str) -> Option<f64> {
    sum_of(&get(pid, "/metrics")?, name)
}

fn sum_of(metrics: &str, name: &str) -> Option<f64> {
    let value = |line: &str| -> Option<f64> {
        let rest = line.strip_prefix(name)?;
        // A longer name is another figure.
        rest.starts_with([' ', '{']).then(|| rest.rsplit(' ').next()?.parse().ok())?
    };
    metrics.lines().filter_map(value).reduce(|sum, value| sum + value)
}

/// Returns a role's answer on its HTTP port.
fn get(pid: u32, path: &str) -> Option<String> {
    let line = usage::command_line(pid)?;
    let address = line.split(' ').skip_while(|word| *word != "--http").nth(1)?;
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: quoin\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

pub fn free_bytes(directory: &Path) -> Result<u64, Error> {
    let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(existing)
        .map_err(|error| Error::io(format!("measure {}", existing.display()))(error.into()))?;
    Ok(stat.f_bavail * stat.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_found_with_labels_and_without_and_never_taken_for_another() {
        let metrics = "# TYPE written_total counter\nwritten_total{pool=\"a b\"} 4096\n\
                       written_total{pool=\"c\"} 4\nwritten_total_ever 7\nmoved 12.5\n";
        assert_eq!(sum_of(metrics, "written_total"), Some(4100.0));
        assert_eq!(sum_of(metrics, "moved"), Some(12.5));
        assert_eq!(sum_of(metrics, "written"), None);
    }
}
