//! The data path under load, without a control plane: three pool processes, a target process and
//! the benchmark's generator. Prints IOPS, latency, and the CPU of each server process per IO.
//!
//! `cargo run --release -p quoin-target --example load -- DIR [plain|authenticate|encrypt] [media]`

#[path = "../tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use quoin_bench::load::{Generator, Load, Pattern};
use quoin_pool::accept::Belief;
use quoin_store::{FileDisk, FormatOptions, Pool, PoolOptions};
use quoin_target::dial::Reach;
use quoin_target::shard::ReplicaPlace;
use quoin_types::PoolId;
use quoin_wire::handshake::ServerSecurity;
use support::*;

const BLOCKS: u64 = (1 << 30) / 4096;
const POOL_BYTES: u64 = 6 << 30;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("pool") => pool(&arguments[2], arguments[3].parse().expect("a number")),
        Some("target") => target(&arguments[2], &arguments[3..]),
        Some(dir) => drive(Path::new(dir), &arguments[2..]),
        None => panic!("which directory?"),
    }
}

/// Serves until its standard input ends.
fn until_told() {
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

fn pool(path: &str, n: u128) {
    let disk = FileDisk::create(Path::new(path), POOL_BYTES, true).expect("a file");
    Pool::format(&disk, &FormatOptions::new(PoolId(n))).expect("formats");
    let pool = Pool::open(disk, PoolOptions::default()).expect("opens");
    let syncer = pool.syncer();
    let running = RunningPool::start(
        pool,
        syncer,
        "127.0.0.1:0",
        ServerSecurity::PlainLoopback,
        Belief::Everybody,
    );
    let known = members(3);
    create_replica(&running, known[n as usize - 1], &membership(&known, 2), BLOCKS);
    println!("{}", running.address);
    until_told();
    running.stop();
}

fn target(socket: &str, rest: &[String]) {
    let known = members(3);
    let media = rest[0] == "media";
    let places = known.iter().zip(&rest[1..]).map(|(member, address)| ReplicaPlace {
        member: *member,
        pool: "p".into(),
        address: address.clone(),
    });
    let control = Control::default();
    let target =
        RunningTarget::start(&control, membership(&known, 2), Reach::PlainLoopback, |_, _| {
            Bytes::new()
        });
    target.open(Path::new(socket), places.collect(), BLOCKS, media);
    println!("serving");
    until_told();
    target.stop();
}

struct Server {
    name: String,
    child: Child,
    said: String,
}

fn spawn(name: &str, arguments: &[&str]) -> Server {
    let mut child = Command::new(std::env::current_exe().expect("a path"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut said = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut said).expect("speaks");
    Server { name: name.into(), child, said: said.trim().into() }
}

/// CPU seconds of a process so far.
fn cpu_s(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name")..].split(' ').collect();
    (fields[12].parse::<f64>().expect("ticks") + fields[13].parse::<f64>().expect("ticks")) / 100.0
}

fn drive(dir: &Path, flags: &[String]) {
    let seconds: u64 = std::env::var("SECONDS_EACH").ok().map_or(3, |s| s.parse().expect("s"));
    let media = if flags.iter().any(|f| f == "media") { "media" } else { "cache" };
    let mut servers = Vec::new();
    for n in 1..=3 {
        let path = dir.join(format!("pool-{n}"));
        let path = path.to_str().expect("a plain path");
        servers.push(spawn(&format!("pool {n}"), &["pool", path, &n.to_string()]));
    }
    let socket: PathBuf = dir.join("v.sock");
    let mut arguments = vec!["target", socket.to_str().expect("a plain path"), media];
    let addresses: Vec<String> = servers.iter().map(|s| s.said.clone()).collect();
    arguments.extend(addresses.iter().map(String::as_str));
    servers.push(spawn("target", &arguments));
    eventually("the socket is there", || socket.exists());
    let mut generator = Generator::connect(&socket).expect("connects");
    let mut case = |name: &str, load: Load| {
        let before: Vec<f64> = servers.iter().map(|s| cpu_s(s.child.id())).collect();
        let outcome = generator.run(load).expect("runs");
        let ios = outcome.per_second() * seconds as f64;
        let costs: Vec<String> = servers
            .iter()
            .zip(before)
            .map(|(s, b)| format!("{} {:.1}", s.name, (cpu_s(s.child.id()) - b) * 1e6 / ios))
            .collect();
        println!(
            "{name:14} {:8.0}/s p50 {:6.0} p99 {:6.0} us; CPU us/IO: {}",
            outcome.per_second(),
            outcome.percentile_us(0.5),
            outcome.percentile_us(0.99),
            costs.join(", ")
        );
    };
    let only = std::env::var("ONLY").unwrap_or_default();
    for (name, write, depth, block_bytes) in [
        ("write-4k-qd32", true, 32, 4096),
        ("write-4k-qd1", true, 1, 4096),
        ("read-4k-qd32", false, 32, 4096),
        ("read-4k-qd1", false, 1, 4096),
        ("write-128k-qd8", true, 8, 131_072),
        ("read-128k-qd8", false, 8, 131_072),
    ] {
        if name.contains(&only) {
            let pattern = if depth == 8 { Pattern::Sequential } else { Pattern::Random };
            let time = Duration::from_secs(seconds);
            let writes_percent = if write { 100 } else { 0 };
            case(name, Load { writes_percent, pattern, block_bytes, depth, time });
        }
    }
    drop(generator);
    for mut server in servers.into_iter().rev() {
        let _ = server.child.stdin.take().expect("piped").write_all(b"\n");
        let _ = server.child.wait();
    }
}
