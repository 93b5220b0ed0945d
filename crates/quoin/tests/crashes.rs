//! Real processes killed and stopped at random instants, under a client that verifies: no write is
//! lost, none is undone, and the client sees no error.

use crate::support;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_nbd::client::{Client, RequestError};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rustix::process::{Pid, Signal, kill_process};
use support::load::Load;
use support::stories::{ask, events};
use support::{
    Dev, Scratch, block, eventually, is_online, is_root, isolated_command, signal, skipped,
};

const BLOCK: u64 = 4096;

fn all_in_sync(volume: &serde_json::Value) -> bool {
    volume["replicas"].as_array().unwrap().iter().all(|r| r["phase"] == "InSync")
}

/// Proves: acknowledged writes survive `kill -9` of every process at any instant, and a client
/// sees no error while a majority comes back.
#[test]
fn kills_of_pools_and_target_cause_no_lost_write_and_no_error() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let scratch = Scratch::new("kills");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), seed);
    load.assert_progress(&dev, 20);
    let pools = ["pool-a", "pool-b", "pool-c"];
    for round in 0..10 {
        std::thread::sleep(Duration::from_millis(random.random_range(0..700)));
        let pool = pools[random.random_range(0..3)];
        let victims: &[&str] = match round % 5 {
            0 | 2 => &[pool],
            1 => &["target"],
            3 => &["target", pool],
            _ => &["target", "pool-a", "pool-b", "pool-c"],
        };
        let old: Vec<_> = victims.iter().map(|name| dev.pid(name)).collect();
        old.iter().flatten().for_each(|pid| signal(*pid, "KILL"));
        for (name, old) in victims.iter().zip(old) {
            dev.eventually(&format!("{name} is started again"), || {
                dev.pid(name).filter(|pid| Some(*pid) != old)
            });
        }
        load.assert_progress(&dev, 20);
    }
    dev.wait_for_volume("db", "whole again", all_in_sync);
    load.verify();
    assert!(!dev.ok(&["events"]).contains("UnflushedTailMayBeLost"), "no cache was lost here");
    dev.stop();
}

/// Proves: a slow replica never slows the volume while CF others answer.
#[test]
fn a_hanging_pool_does_not_delay_io_and_catches_up_when_it_continues() {
    let scratch = Scratch::new("stops");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 7);
    dev.wait_for_volume("db", "online", is_online);
    for pool in ["pool-a", "pool-b", "pool-c"] {
        let pid = dev.pid(pool).unwrap();
        signal(pid, "STOP");
        // All of this happens while the pool hangs: nothing waits for it.
        load.assert_progress(&dev, 200);
        dev.wait_for_volume("db", "told as degraded", |volume| volume["health"] == "Degraded");
        load.assert_progress(&dev, 200);
        signal(pid, "CONT");
        dev.wait_for_volume("db", "whole again", all_in_sync);
    }
    load.verify();
    dev.stop();
}

/// Lets one pool run for a tenth of the time only. Returns the rate of operations while it stands
/// still, as a share of the rate while it runs freely. Both are measured in turns, because of other
/// load on the machine.
fn rate_beside_a_slow_one(load: &Load, pool: i64) -> f64 {
    const STILL: Duration = Duration::from_millis(54);
    let pid = Pid::from_raw(pool as i32).unwrap();
    let rate_of = |work: &dyn Fn()| {
        let (done, began) = (load.done(), Instant::now());
        work();
        ((load.done() - done) as f64, began.elapsed().as_secs_f64())
    };
    let (mut free, mut slow) = ((0.0, 0.0), (0.0, 0.0));
    for _ in 0..20 {
        let (done, seconds) = rate_of(&|| std::thread::sleep(3 * STILL));
        free = (free.0 + done, free.1 + seconds);
        for _ in 0..3 {
            kill_process(pid, Signal::STOP).unwrap();
            let (done, seconds) = rate_of(&|| std::thread::sleep(STILL));
            slow = (slow.0 + done, slow.1 + seconds);
            kill_process(pid, Signal::CONT).unwrap();
            std::thread::sleep(STILL / 9);
        }
    }
    (slow.0 / slow.1) / (free.0 / free.1)
}

/// Proves: a slow replica never slows the volume while CF others answer.
#[test]
fn a_slow_pool_does_not_lower_the_rate_unless_writes_wait_for_all_replicas() {
    let scratch = Scratch::new("merely-slow");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 13);
    dev.wait_for_volume("db", "online", is_online);
    let pool = dev.pid("pool-b").unwrap();
    let rate = rate_beside_a_slow_one(&load, pool);
    assert!(rate > 0.5, "a slow replica leaves {rate:.2} of the rate");
    // The slowness of the pool is visible where all replicas are waited for.
    dev.wait_for_volume("db", "whole", all_in_sync);
    dev.ok(&["volume", "scale", "db", "--consistency-factor", "3", "--wait"]);
    let waits = rate_beside_a_slow_one(&load, pool);
    println!("{rate:.2} of the rate beside a slow replica, {waits:.2} with a wait for it");
    assert!(waits < rate / 2.0, "{waits:.2} of the rate while all are waited for, {rate:.2} else");
    dev.wait_for_volume("db", "whole", all_in_sync);
    load.verify();
    dev.stop();
}

/// Proves: SIGTERM drains IO, and the next start is continuous.
#[test]
fn a_clean_stop_under_load_drains_and_loses_no_write() {
    let scratch = Scratch::new("drain");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 11);
    load.assert_progress(&dev, 100);
    for _ in 0..3 {
        for name in ["target", "pool-a", "pool-b", "pool-c"] {
            let old = dev.pid(name);
            signal(old.unwrap(), "TERM");
            dev.eventually(&format!("{name} is started again"), || {
                dev.pid(name).filter(|pid| Some(*pid) != old)
            });
            load.assert_progress(&dev, 20);
        }
    }
    dev.wait_for_volume("db", "whole again", all_in_sync);
    load.verify();
    assert!(!dev.ok(&["events"]).contains("UnflushedTailMayBeLost"));
    dev.stop();
}

/// Returns `quoin` in a mount table of its own, where the kernel's boot has the name in `file`: a
/// process that starts after it changed considers unsynced data lost with the power.
fn under_a_boot_of(file: &Path) -> Command {
    let mut command = isolated_command(file.parent().unwrap());
    let script = r#"mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@""#;
    command.args(["sh", "-c", script, "sh"]).arg(file).arg(env!("CARGO_BIN_EXE_quoin"));
    command
}

/// Ends the target and all pools at once, and names another boot before they are restarted.
fn end_all_and_boot_again(dev: &Dev, with: &str, boot: &Path, number: u64) {
    let names = ["target", "pool-a", "pool-b", "pool-c"];
    let old = names.map(|name| dev.pid(name).unwrap());
    boot_as(boot, number);
    old.iter().for_each(|pid| signal(*pid, with));
    for (name, old) in names.into_iter().zip(old) {
        dev.eventually(&format!("{name} is started again"), || {
            dev.pid(name).filter(|pid| *pid != old)
        });
    }
}

/// The file is written in place, because it is the one that is mounted.
fn boot_as(file: &Path, number: u64) {
    std::fs::write(file, format!("00000000-0000-4000-8000-{number:012x}\n")).unwrap();
}

fn write_unflushed(client: &Client, version: u64) {
    for lba in 0..200 {
        client.write(lba * BLOCK, Bytes::from(block(lba, version)), false).unwrap();
    }
}

/// Proves: SIGTERM drains IO, and the next start is continuous.
#[test]
fn a_clean_stop_makes_unflushed_writes_durable_before_a_power_failure() {
    if !is_root() {
        return skipped("a table of mounts of its own needs root");
    }
    let scratch = Scratch::new("drain-all");
    let boot = scratch.0.join("boot");
    boot_as(&boot, 1);
    let flags = ["--no-attach", "--pool-size", "512MiB"];
    let dev = Dev::start_by(under_a_boot_of(&boot), &scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let client = dev.client("db");
    dev.wait_for_volume("db", "online", is_online);
    for round in 1..=3 {
        write_unflushed(&client, round);
        end_all_and_boot_again(&dev, "TERM", &boot, 1 + round);
        for lba in 0..200 {
            let read = client.read(lba * BLOCK, BLOCK as u32).unwrap();
            assert_eq!(read, block(lba, round), "block {lba} after stop {round}");
        }
    }
    dev.wait_for_volume("db", "whole again", all_in_sync);
    assert_eq!(events(&dev, "UnflushedTailMayBeLost"), [""; 0], "a clean stop syncs");

    // The same end without a clean stop is noticed; otherwise the part above would prove nothing.
    write_unflushed(&client, 9);
    end_all_and_boot_again(&dev, "KILL", &boot, 9);
    dev.eventually("the loss of all caches is told", || {
        (!events(&dev, "UnflushedTailMayBeLost").is_empty()).then_some(())
    });
    client.stop();
    dev.stop();
}

/// Returns the number of the pools' syncs so far.
fn syncs(dev: &Dev) -> u64 {
    let settings = std::fs::read(dev.directory.join("dev.json")).unwrap();
    let settings: serde_json::Value = serde_json::from_slice(&settings).unwrap();
    let pools = settings["pools"].as_array().unwrap();
    let of_one = |pool: &serde_json::Value| {
        let metrics = ask(pool["http"].as_str().unwrap(), "/metrics").expect("the pool answers");
        let line = metrics.lines().find(|line| line.starts_with("quoin_pool_syncs_total")).unwrap();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    pools.iter().map(of_one).sum()
}

#[test]
fn the_options_for_quorum_loss_and_durability_are_obeyed() {
    const WRITES: u64 = 50;
    let scratch = Scratch::new("options");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    let create = ["volume", "create", "--size", "8MiB", "--replicas", "3"];
    let clients = [
        ("plain", ["--durability", "cache"]),
        ("media", ["--durability", "media"]),
        ("fails", ["--on-quorum-loss", "fail"]),
    ]
    .map(|(name, option)| {
        dev.ok(&[&create[..], &[name], &option].concat());
        let client = dev.client(name);
        dev.wait_for_volume(name, "online", is_online);
        client
    });
    let [plain, media, fails] = &clients;
    let cost = |client: &Client| {
        let before = syncs(&dev);
        for lba in 0..WRITES {
            client.write(lba * BLOCK, Bytes::from(block(lba, 1)), false).unwrap();
        }
        syncs(&dev) - before
    };
    let (cached, synced) = (cost(plain), cost(media));
    println!("{WRITES} writes: {cached} syncs under cache, {synced} under media");
    assert!(synced >= 2 * WRITES, "answered before a majority had it on media: {synced}");
    assert!(cached < WRITES, "a write that asked for nothing is synced: {cached}");

    let write = |version| fails.write(0, Bytes::from(block(0, version)), false);
    write(1).unwrap();
    let away = ["pool-a", "pool-b"].map(|pool| dev.pid(pool).unwrap());
    away.iter().for_each(|pid| signal(*pid, "STOP"));
    assert_eq!(write(2), Err(RequestError::Refused(5)), "an IO error is what was asked for");
    away.iter().for_each(|pid| signal(*pid, "CONT"));
    eventually("it is written again", || write(3).ok());
    assert_eq!(fails.read(0, BLOCK as u32).unwrap(), block(0, 3));
    clients.into_iter().for_each(Client::stop);
    dev.stop();
}
