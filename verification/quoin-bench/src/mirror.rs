//! Copies in a second cluster: full transfers beside their floor (as many bytes read from a file, sent through one
//! TLS stream, and written to a file with a sync each MiB), what a change costs on the wire, what shipping costs
//! clients, how far groups are behind, and how long roles take to change.

mod failovers;
mod services;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use quoin_identity::{
    Authority, Identity, Lifetimes, Role, TrustedPeers, foreign, key_hash_of_request,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::compare::median;
use crate::further::Fact;
use crate::load::{Generator, Load, Pattern};
use crate::orchestrated::may_mount;
use crate::product::Product;
use crate::snapshots::nearest_rank;
use crate::{Class, Error, Options, usage};

pub const FULL: &str = "mirror-full";
pub const DELTA: &str = "mirror-delta";
pub const SHIPPING: &str = "mirror-shipping";
pub const LAG: &str = "mirror-lag";
pub const ROLES: &str = "mirror-roles";
pub const IDLE: &str = "mirror-at-rest";
pub const CUTS: &str = "mirror-cuts";
pub const BEYOND: &str = "mirror-fed-beyond";

const BYTES: u64 = 512 << 20;
/// Size of a volume whose transfer is to take a while.
const LONG_BYTES: u64 = 1 << 30;
const PIECE_BYTES: usize = 1 << 20;
const BLOCK_BYTES: u64 = 4096;
const PAIRS: usize = 5;
/// Times that the link of a transfer is cut, and what it may send in a second meanwhile.
const CUT_TIMES: u64 = 10;
const CUT_LIMIT: &str = "64MiB";
const MOVES: usize = 5;
const MEMBERS: usize = 10;
const GROUPS: usize = 10;
const MEMBERS_OF_GROUP: usize = 5;
/// Of each volume, so that all of them write a thousand blocks in a second.
const WRITES_PER_SECOND: &str = "20";
const LAG_FOR: Duration = Duration::from_secs(90);
const IDLE_FOR: Duration = Duration::from_secs(30);
const WITHIN: Duration = Duration::from_secs(120);

/// Two clusters that are peers.
struct Two<'a> {
    product: &'a Product,
    failovers: u32,
    seed: Option<u64>,
}

impl Two<'_> {
    /// Seed of what is killed and when; one that was drawn is said.
    fn seed(&self) -> u64 {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let seed = self.seed.unwrap_or(u64::from(since.subsec_nanos()));
        eprintln!("seed of the kills {seed}, --failover-seed repeats them");
        seed
    }

    fn first(&self, arguments: &[&str]) -> Result<String, Error> {
        self.product.command(arguments)
    }

    fn second(&self, arguments: &[&str]) -> Result<String, Error> {
        self.product.command_of("peer", arguments)
    }

    fn on(&self, is_second: bool, arguments: &[&str]) -> Result<String, Error> {
        if is_second { self.second(arguments) } else { self.first(arguments) }
    }

    fn status(&self, of: &str) -> Result<serde_json::Value, Error> {
        self.status_on(false, of)
    }

    fn status_on(&self, is_second: bool, of: &str) -> Result<serde_json::Value, Error> {
        let text = self.on(is_second, &["mirror", "status", of, "-o", "json"])?;
        serde_json::from_str(&text)
            .map_err(|error| Error::Failed(format!("mirror status: {error}")))
    }

    fn enable(&self, of: &str, flags: &[&str]) -> Result<(), Error> {
        let enable = ["mirror", "enable", of, "--every", "10s", "--wait", "--timeout", "600"];
        self.first(&[&enable[..], flags].concat()).map(drop)
    }

    /// Ends a mirror, and removes its copies.
    fn end(&self, of: &str, volumes: &[String]) -> Result<(), Error> {
        self.first(&["mirror", "disable", of])?;
        eventually("the copy is an orphan", || {
            let text = self.second(&["mirror", "status", of, "-o", "json"])?;
            Ok(text.contains("orphan").then_some(()))
        })?;
        self.second(&["mirror", "promote", of])?;
        for volume in volumes {
            self.second(&["volume", "delete", volume, "--yes"])?;
        }
        eventually("the copies are gone", || {
            let left = self.second(&["volume", "list", "-o", "json"])?;
            Ok(volumes.iter().all(|volume| !left.contains(volume)).then_some(()))
        })
    }

    /// Processes of one of the clusters with this role.
    fn pids_of(&self, role: &str, is_second: bool) -> Vec<u32> {
        let peer = self.product.path("peer/").to_string_lossy().into_owned();
        let is_of_it = |pid: &u32| {
            usage::command_line(*pid).is_some_and(|line| line.contains(&peer) == is_second)
        };
        self.product.pids_of(role).into_iter().filter(is_of_it).collect()
    }

    /// Bytes that a copy has taken of the transfer under way; `None`: no transfer, or no copy yet.
    fn taken_bytes(&self, of: &str) -> Option<u64> {
        self.status_on(true, of).ok()?["transfer"]["doneBytes"].as_u64()
    }

    /// Bytes that the mirror of the first cluster has sent.
    fn wire_bytes(&self) -> Result<u64, Error> {
        let text = self.product.metrics_of("mirror_http")?;
        let of = |line: &str| line.strip_prefix("quoin_mirror_wire_bytes_total").map(str::to_owned);
        let values = text.lines().filter_map(of);
        let number = |value: String| value.rsplit(' ').next().and_then(|v| v.parse::<f64>().ok());
        Ok(values.filter_map(number).sum::<f64>() as u64)
    }
}

fn eventually<T>(
    what: &str,
    mut found: impl FnMut() -> Result<Option<T>, Error>,
) -> Result<T, Error> {
    let end = Instant::now() + WITHIN;
    loop {
        if let Some(found) = found()? {
            return Ok(found);
        }
        if Instant::now() > end {
            return Err(Error::Failed(format!("never: {what}")));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let mut facts = Vec::new();
    type Case = fn(&Two<'_>, &Path) -> Result<Vec<Fact>, Error>;
    let cases: [(&str, Case); 11] = [
        (FULL, full),
        (DELTA, delta),
        (SHIPPING, shipping),
        (LAG, lag),
        (ROLES, roles),
        (IDLE, idle),
        (CUTS, cuts),
        (BEYOND, |two, _| failovers::fed_beyond(two)),
        (failovers::TAKE_OVER, |two, _| failovers::take_over(two)),
        (failovers::FAILOVERS, |two, _| failovers::failovers(two)),
        (services::SERVICES, services::services),
    ];
    for (name, case) in cases {
        if options.wants(name) {
            eprintln!("measuring {name}");
            // A rebuild needs a pool beside those of its volume.
            let pools = if name == LAG { "3" } else { "2" };
            let flags = ["--peer", "--pools", pools, "--pool-size", "6GiB"];
            let product = match name {
                services::SERVICES if !may_mount(name) => continue,
                services::SERVICES => Product::start_attaching(quoin, directory, &flags)?,
                _ => Product::start_with(quoin, directory, &flags)?,
            };
            let two = Two {
                product: &product,
                failovers: options.further.failovers,
                seed: options.further.failover_seed,
            };
            eventually("both clusters are peers", || {
                let heard = |text: String| text.contains("\"heardMs\"").then_some(());
                let first = two.first(&["mirror", "peers", "-o", "json"]).ok().and_then(heard);
                let second = two.second(&["mirror", "peers", "-o", "json"]).ok().and_then(heard);
                Ok(first.and(second))
            })?;
            let found = case(&two, directory)?;
            // The table comes at the end, which a later case that fails does not reach.
            for Fact { name, value, unit, goal } in &found {
                eprintln!("  {name} {value:.2} {unit}, at most {goal}");
            }
            facts.extend(found);
        }
    }
    Ok(facts)
}

/// A volume with two replicas that was written whole.
fn written(two: &Two<'_>, name: &str, bytes: u64) -> Result<Generator, Error> {
    let socket = two.product.volume_with(name, Class::Cache, bytes, 2)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(1 << 20)?;
    generator.flush()?;
    Ok(generator)
}

/// Time and CPU time of one copy.
struct Cost {
    took: Duration,
    cpu: Duration,
}

fn full(two: &Two<'_>, directory: &Path) -> Result<Vec<Fact>, Error> {
    let _generator = written(two, "full", BYTES)?;
    let source = directory.join("source");
    std::fs::create_dir_all(directory).map_err(Error::io("create a directory"))?;
    write_source(&source)?;
    let volumes = ["full".to_owned()];
    let mut facts = Vec::new();
    for compression in ["none", "zstd"] {
        let (mut times, mut floor_cpu, mut cpu) = (Vec::new(), Duration::ZERO, Duration::ZERO);
        let controllers = two.product.pids_of("controller");
        let mut of_controllers = Duration::ZERO;
        for _ in 0..PAIRS {
            let floor = copy(&source, directory)?;
            let before = usage::cpu(&controllers);
            let quoin = transfer(two, compression)?;
            of_controllers += usage::cpu(&controllers).saturating_sub(before);
            two.end("full", &volumes)?;
            times.push(floor.took.as_secs_f64() / quoin.took.as_secs_f64());
            (floor_cpu, cpu) = (floor_cpu + floor.cpu, cpu + quoin.cpu);
        }
        let ratio = |part: Duration, whole: Duration| part.as_secs_f64() / whole.as_secs_f64();
        let name = format!("{FULL}-{compression}");
        // The bounds are upper ones: 0.6 of the floor's rate is 1.67 times its time.
        let time = 1.0 / median(times);
        facts.push(Fact::of(&name, "time", time, "× its floor", 1.67));
        facts.push(Fact::of(&name, "cpu", ratio(cpu, floor_cpu), "× its floor", 1.5));
        let share = ratio(of_controllers, cpu) * 100.0;
        facts.push(Fact::of(&name, "controllers", share, "% of the CPU", 1.0));
    }
    std::fs::remove_file(&source).map_err(Error::io("remove a file"))?;
    Ok(facts)
}

fn transfer(two: &Two<'_>, compression: &str) -> Result<Cost, Error> {
    let spent = || usage::cpu(&two.product.pids());
    let (before, began) = (spent(), Instant::now());
    two.enable("full", &["--compression", compression])?;
    Ok(Cost { took: began.elapsed(), cpu: spent().saturating_sub(before) })
}

/// Blocks that are not like each other, as what a generator writes.
fn write_source(path: &Path) -> Result<(), Error> {
    let failed = || Error::io(format!("write {}", path.display()));
    let mut file = File::create(path).map_err(failed())?;
    let mut state = 1;
    for _ in 0..BYTES / PIECE_BYTES as u64 {
        let words = (0..PIECE_BYTES / 8).map(|_| crate::load::next(&mut state).to_le_bytes());
        file.write_all(&words.flatten().collect::<Vec<u8>>()).map_err(failed())?;
    }
    file.sync_all().map_err(failed())
}

fn mirror(directory: &Path, name: &str) -> Result<(Authority, Identity), Error> {
    let failed = |error: quoin_identity::Error| Error::Failed(error.to_string());
    let directory = directory.join(name);
    std::fs::create_dir_all(&directory).map_err(Error::io("create a directory"))?;
    let authority = Authority::create(&directory, Lifetimes::default()).map_err(failed)?;
    let identity = authority.issue_identity(&directory.join("mirror"), Role::Mirror, name);
    Ok((authority, identity.map_err(failed)?))
}

/// The floor: one file to another through a TLS stream, with the certificates of two clusters.
fn copy(source: &Path, directory: &Path) -> Result<Cost, Error> {
    let scratch = directory.join("floor");
    let _ = std::fs::remove_dir_all(&scratch);
    let failed = |error: quoin_identity::Error| Error::Failed(error.to_string());
    let (here, there) = (mirror(&scratch, "here")?, mirror(&scratch, "there")?);
    let trusted = |(authority, identity): &(Authority, Identity)| {
        let trusted = TrustedPeers::new();
        let key = identity.renewal_request().and_then(|request| key_hash_of_request(&request));
        let key = key.map_err(failed)?;
        trusted.set(authority.cluster(), &authority.authorities_pem(), &[key]).map_err(failed)?;
        Ok::<_, Error>(trusted)
    };
    let server = there.1.foreign_server_config(&trusted(&here)?).map_err(failed)?;
    let client = here.1.foreign_client_config(&trusted(&there)?, there.0.cluster());
    let client = client.map_err(failed)?;
    let runtime = || {
        let made = tokio::runtime::Builder::new_current_thread().enable_all().build();
        made.map_err(Error::io("start a runtime"))
    };
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listener = listener.map_err(Error::io("listen"))?;
    let address = listener.local_addr().map_err(Error::io("listen"))?.to_string();
    listener.set_nonblocking(true).map_err(Error::io("listen"))?;
    let (before, began) = (usage::own(), Instant::now());
    let to = scratch.join("copy");
    let receiver = std::thread::spawn(move || {
        runtime()?.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener);
            let listener = listener.map_err(Error::io("listen"))?;
            let (tcp, _) = listener.accept().await.map_err(Error::io("accept"))?;
            let (mut stream, ..) = foreign::accept(tcp, server).await.map_err(failed)?;
            let mut file = File::create(&to).map_err(Error::io("create a file"))?;
            let mut piece = vec![0; PIECE_BYTES];
            for _ in 0..BYTES / PIECE_BYTES as u64 {
                stream.read_exact(&mut piece).await.map_err(Error::io("receive"))?;
                file.write_all(&piece).map_err(Error::io("write"))?;
                file.sync_data().map_err(Error::io("sync"))?;
            }
            Ok::<_, Error>(())
        })
    });
    let source = File::open(source).map_err(Error::io("open a file"))?;
    runtime()?.block_on(async {
        let (mut stream, ..) = foreign::connect(&address, client).await.map_err(failed)?;
        let mut piece = vec![0; PIECE_BYTES];
        for number in 0..BYTES / PIECE_BYTES as u64 {
            let read = source.read_exact_at(&mut piece, number * PIECE_BYTES as u64);
            read.map_err(Error::io("read"))?;
            stream.write_all(&piece).await.map_err(Error::io("send"))?;
        }
        stream.flush().await.map_err(Error::io("send"))?;
        stream.shutdown().await.map_err(Error::io("send"))
    })?;
    let received = receiver.join().map_err(|_| Error::Failed("the receiver panicked".into()))?;
    received?;
    let cost = Cost { took: began.elapsed(), cpu: usage::own().saturating_sub(before) };
    std::fs::remove_dir_all(&scratch).map_err(Error::io("remove a directory"))?;
    Ok(cost)
}

/// Waits until everything of before now is on the other side; returns the time that is told.
fn synced(two: &Two<'_>, of: &str) -> Result<(), Error> {
    let points = |two: &Two<'_>| two.status(of).map(|status| status["points"][0]["id"].clone());
    let before = points(two)?;
    eventually("the change is on the other side", || {
        let status = two.status(of)?;
        let is_newer = status["points"].as_array().is_some_and(|points| {
            points.len() == 1 && points[0]["id"] != before && points[0]["is"] == "common"
        });
        Ok(is_newer.then_some(()))
    })
}

fn delta(two: &Two<'_>, _: &Path) -> Result<Vec<Fact>, Error> {
    let mut generator = written(two, "delta", BYTES)?;
    two.enable("delta", &["--compression", "none"])?;
    let mut ratios = Vec::new();
    for _ in 0..PAIRS {
        let before = two.wire_bytes()?;
        // One block of each MiB.
        generator.touch_each_mib(true, 1)?;
        synced(two, "delta")?;
        let changed = (BYTES >> 20) * BLOCK_BYTES;
        ratios.push((two.wire_bytes()?.saturating_sub(before)) as f64 / changed as f64);
    }
    Ok(vec![Fact::of(DELTA, "wire", median(ratios), "× changed", 1.1)])
}

fn shipping(two: &Two<'_>, _: &Path) -> Result<Vec<Fact>, Error> {
    let mut generator = written(two, "shipped", BYTES)?;
    generator.wear_in()?;
    two.enable("shipped", &[])?;
    let time = Duration::from_secs(12);
    let pattern = Pattern::Random;
    let load = Load { writes_percent: 100, pattern, block_bytes: 4096, depth: 8, time };
    let (mut rates, mut tails) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        two.first(&["mirror", "pause", "shipped"])?;
        let without = generator.run(load)?;
        two.first(&["mirror", "resume", "shipped"])?;
        let with = generator.run(load)?;
        rates.push(without.per_second() / with.per_second());
        tails.push(with.percentile_us(0.99) / without.percentile_us(0.99));
    }
    Ok(vec![
        Fact::of(SHIPPING, "rate", median(rates), "× slower", 1.11),
        Fact::of(SHIPPING, "p99", median(tails), "× without", 1.5),
    ])
}

fn lag(two: &Two<'_>, _: &Path) -> Result<Vec<Fact>, Error> {
    let mut generators = Vec::new();
    for group in 0..GROUPS {
        let mut names = Vec::new();
        for member in 0..MEMBERS_OF_GROUP {
            let name = format!("v{group}-{member}");
            let create = ["volume", "create", &name, "--size", "64MiB", "--replicas", "2"];
            let limit = ["--iops-limit", WRITES_PER_SECOND];
            two.first(&[&create[..], &limit].concat())?;
            generators.push(Generator::connect(&two.product.attach(&name)?)?);
            names.push(name);
        }
        let group = format!("g{group}");
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        two.first(&[&["group", "create", &group][..], &names].concat())?;
        two.enable(&group, &[])?;
    }
    // Replicas of another volume move to other pools all the time.
    let moved = written(two, "moved", 256 << 20)?;
    drop(moved);
    let events = || {
        let text = two.first(&["events", "-o", "json"])?;
        let all: serde_json::Value = serde_json::from_str(&text)
            .map_err(|error| Error::Failed(format!("events: {error}")))?;
        let is_of_mirrors = |event: &&serde_json::Value| {
            let text = event.to_string();
            text.contains("irror") || text.contains("napshot")
        };
        let all = all.as_array().cloned().unwrap_or_default();
        Ok::<_, Error>(all.iter().filter(is_of_mirrors).count())
    };
    let written_bytes =
        |pids: &[u32]| -> u64 { pids.iter().filter_map(|pid| usage::written_bytes(*pid)).sum() };
    let controllers = two.product.pids_of("controller");
    let (events_before, bytes_before) = (events()?, written_bytes(&controllers));
    let before = usage::cpu(&controllers);
    let pattern = Pattern::Random;
    let load = Load { writes_percent: 100, pattern, block_bytes: 4096, depth: 1, time: LAG_FOR };
    let mut lags = std::thread::scope(|scope| {
        let running: Vec<_> = generators
            .iter_mut()
            .map(|generator| scope.spawn(move || generator.run(load)))
            .collect();
        let mut lags = Vec::new();
        let end = Instant::now() + LAG_FOR;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_secs(1));
            let replicas = two.product.replicas("moved")?;
            if let [one, _] = &replicas[..]
                && replicas.iter().all(|replica| replica.phase == "InSync")
            {
                // A move that cannot begin yet is tried again.
                let _ = two.first(&["replica", "move", "moved", &one.guid]);
            }
            let text = two.first(&["mirror", "status", "-o", "json"])?;
            let all: serde_json::Value = serde_json::from_str(&text)
                .map_err(|error| Error::Failed(format!("mirror status: {error}")))?;
            let all = all.as_array().cloned().unwrap_or_default();
            lags.extend(all.iter().filter_map(|mirror| mirror["lagMs"].as_f64()));
        }
        for load in running {
            load.join().map_err(|_| Error::Failed("the load panicked".into()))??;
        }
        Ok::<_, Error>(lags)
    })?;
    lags.sort_unstable_by(f64::total_cmp);
    let cpu = usage::cpu(&controllers).saturating_sub(before).as_secs_f64();
    let share = cpu / LAG_FOR.as_secs_f64() / controllers.len().max(1) as f64 * 100.0;
    let bytes = written_bytes(&controllers).saturating_sub(bytes_before) as f64;
    let bytes_a_second = bytes / LAG_FOR.as_secs_f64() / controllers.len().max(1) as f64;
    Ok(vec![
        Fact::of(LAG, "events", events()?.saturating_sub(events_before) as f64, "of mirrors", 0.0),
        Fact::of(LAG, "records", bytes_a_second / 1e6, "MB/s a controller", 2.0),
        Fact::of(LAG, "p99", nearest_rank(&lags, 0.99) / 1e3, "s", 20.0),
        Fact::of(LAG, "most", lags.last().copied().unwrap_or_default() / 1e3, "s", 30.0),
        Fact::of(LAG, "controller", share, "% of a core", 5.0),
    ])
}

fn roles(two: &Two<'_>, _: &Path) -> Result<Vec<Fact>, Error> {
    let names: Vec<String> = (0..MEMBERS).map(|n| format!("r{n}")).collect();
    for name in &names {
        let create = ["volume", "create", name, "--size", "64MiB", "--replicas", "2"];
        two.first(&create)?;
        let mut generator = Generator::connect(&two.product.attach(name)?)?;
        generator.fill(1 << 20)?;
        drop(generator);
        two.first(&["volume", "detach", name])?;
    }
    let members: Vec<&str> = names.iter().map(String::as_str).collect();
    two.first(&[&["group", "create", "all"][..], &members].concat())?;
    two.enable("all", &[])?;
    let (mut demotions, mut promotions) = (Vec::new(), Vec::new());
    for turn in 0..MOVES {
        let is_back = turn % 2 == 1;
        let call = |is_here: bool, role: &str| {
            let began = Instant::now();
            match is_here {
                true => two.first(&["mirror", role, "all"])?,
                false => two.second(&["mirror", role, "all"])?,
            };
            Ok::<_, Error>(began.elapsed().as_secs_f64())
        };
        demotions.push(call(!is_back, "demote")?);
        promotions.push(call(is_back, "promote")?);
    }
    Ok(vec![
        Fact::of(ROLES, "demote", median(demotions), "s", 3.0),
        Fact::of(ROLES, "promote", median(promotions), "s", 3.0),
    ])
}

fn idle(two: &Two<'_>, _: &Path) -> Result<Vec<Fact>, Error> {
    let _generator = written(two, "idle", 64 << 20)?;
    let spent = || {
        std::thread::sleep(Duration::from_secs(15));
        let before = cpus(two.product);
        std::thread::sleep(IDLE_FOR);
        let after = cpus(two.product);
        let percent = |(before, after): (&Duration, &Duration)| {
            after.saturating_sub(*before).as_secs_f64() / IDLE_FOR.as_secs_f64() * 100.0
        };
        before.iter().zip(&after).map(percent).collect::<Vec<f64>>()
    };
    let alone = spent();
    two.enable("idle", &[])?;
    let seen = || {
        let status = two.status("idle")?;
        Ok::<_, Error>((status["points"].clone(), status["lagMs"].as_f64().unwrap_or(f64::MAX)))
    };
    std::thread::sleep(Duration::from_secs(15));
    let ((points, _), wire) = (seen()?, two.wire_bytes()?);
    let mirrored = spent();
    let (points_after, lag_ms) = seen()?;
    let most = mirrored.iter().copied().fold(0.0, f64::max);
    let added = mirrored.iter().zip(&alone).map(|(mirrored, alone)| mirrored - alone);
    let sent = two.wire_bytes()?.saturating_sub(wire);
    let is_same = points == points_after;
    Ok(vec![
        Fact::of(IDLE, "points", if is_same { 0.0 } else { 1.0 }, "new", 0.0),
        Fact::of(IDLE, "wire", sent as f64, "bytes", 0.0),
        Fact::of(IDLE, "lag", lag_ms / 1e3, "s", 20.0),
        Fact::of(IDLE, "cpu", most, "% of a core a process", 0.1),
        Fact::of(IDLE, "added-cpu", added.fold(0.0, f64::max), "% of a core a process", 0.1),
    ])
}

/// Bytes that are sent in all where the mirror of the other side is killed again and again.
fn cuts(two: &Two<'_>, _: &Path) -> Result<Vec<Fact>, Error> {
    let _generator = written(two, "cut", LONG_BYTES)?;
    let before = two.wire_bytes()?;
    let enable = ["mirror", "enable", "cut", "--every", "10s", "--compression", "none"];
    two.first(&[&enable[..], &["--bandwidth-limit", CUT_LIMIT]].concat())?;
    for cut in 0..CUT_TIMES {
        let at = LONG_BYTES / (CUT_TIMES + 1) * (cut + 1);
        eventually("the transfer is so far", || {
            Ok(two.taken_bytes("cut").filter(|taken| *taken >= at).map(drop))
        })?;
        let mirrors = two.pids_of("mirror", true);
        if mirrors.is_empty() {
            return Err(Error::Failed("the other cluster has no mirror to kill".to_owned()));
        }
        usage::end(&mirrors);
    }
    eventually("all is on the other side", || {
        let is_common = two.status("cut")?["points"][0]["is"] == "common";
        Ok(is_common.then_some(()))
    })?;
    let sent = two.wire_bytes()?.saturating_sub(before);
    Ok(vec![Fact::of(CUTS, "wire", sent as f64 / LONG_BYTES as f64, "× the content", 1.1)])
}

fn cpus(product: &Product) -> Vec<Duration> {
    product.pids().iter().map(|pid| usage::cpu(&[*pid])).collect()
}

/// The page with the metrics at an address.
pub fn page(address: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}
