//! Real processes killed and stopped at random instants, under a client that verifies: no write is
//! lost, none is taken back, and the client sees no error.

mod support;

use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng, rngs::StdRng};
use rustix::process::{Pid, Signal, kill_process};
use support::load::Load;
use support::{Dev, Scratch, is_online, signal};

fn all_in_sync(volume: &serde_json::Value) -> bool {
    volume["replicas"].as_array().unwrap().iter().all(|r| r["phase"] == "InSync")
}

/// Proves: acknowledged writes survive `kill -9` of every process at any instant, and a client
/// sees no error while a majority comes back.
#[test]
fn no_write_is_lost_and_no_error_is_seen_while_pools_and_the_target_are_killed() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let scratch = Scratch::new("kills");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), seed);
    load.goes_on(&dev, 20);
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
        load.goes_on(&dev, 20);
    }
    dev.wait_for_volume("db", "whole again", all_in_sync);
    load.verify();
    assert!(!dev.ok(&["events"]).contains("UnflushedTailMayBeLost"), "no cache was lost here");
    dev.stop();
}

/// Proves: a slow replica never slows the volume while CF others answer.
#[test]
fn a_pool_that_hangs_holds_up_nobody_and_catches_up_when_it_goes_on() {
    let scratch = Scratch::new("stops");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 7);
    dev.wait_for_volume("db", "online", is_online);
    for pool in ["pool-a", "pool-b", "pool-c"] {
        let pid = dev.pid(pool).unwrap();
        signal(pid, "STOP");
        // All of this happens while it hangs: nothing waits for it.
        load.goes_on(&dev, 200);
        dev.wait_for_volume("db", "told as degraded", |volume| volume["health"] == "Degraded");
        load.goes_on(&dev, 200);
        signal(pid, "CONT");
        dev.wait_for_volume("db", "whole again", all_in_sync);
    }
    load.verify();
    dev.stop();
}

/// How many operations are done while one pool runs for a tenth of the time only, in parts of what
/// is done when it is let run; both in turns, for whatever else goes on here.
fn rate_beside_a_slow_one(load: &Load, pool: i64) -> f64 {
    const TURN: Duration = Duration::from_millis(300);
    let pid = Pid::from_raw(pool as i32).unwrap();
    let (mut free, mut slow) = (0, 0);
    for _ in 0..6 {
        let before = load.done();
        std::thread::sleep(TURN);
        let between = load.done();
        let began = Instant::now();
        while began.elapsed() < TURN {
            kill_process(pid, Signal::STOP).unwrap();
            std::thread::sleep(Duration::from_millis(18));
            kill_process(pid, Signal::CONT).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        free += between - before;
        slow += load.done() - between;
    }
    slow as f64 / free as f64
}

/// Proves: a slow replica never slows the volume while CF others answer.
#[test]
fn a_pool_that_is_merely_slow_takes_no_rate_unless_all_replicas_are_waited_for() {
    let scratch = Scratch::new("slow");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 13);
    dev.wait_for_volume("db", "online", is_online);
    let pool = dev.pid("pool-b").unwrap();
    let rate = rate_beside_a_slow_one(&load, pool);
    assert!(rate > 0.5, "a slow replica leaves {rate:.2} of the rate");
    // That the pool is slow indeed shows where it is waited for.
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
fn a_clean_stop_under_load_drains_and_the_next_start_finds_nothing_missing() {
    let scratch = Scratch::new("drain");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 11);
    load.goes_on(&dev, 100);
    for _ in 0..3 {
        for name in ["target", "pool-a", "pool-b", "pool-c"] {
            let old = dev.pid(name);
            signal(old.unwrap(), "TERM");
            dev.eventually(&format!("{name} is started again"), || {
                dev.pid(name).filter(|pid| Some(*pid) != old)
            });
            load.goes_on(&dev, 20);
        }
    }
    dev.wait_for_volume("db", "whole again", all_in_sync);
    load.verify();
    assert!(!dev.ok(&["events"]).contains("UnflushedTailMayBeLost"));
    dev.stop();
}
