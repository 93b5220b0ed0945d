//! Real processes killed and stopped at random instants, under a client that verifies: no write is
//! lost, none is taken back, and the client sees no error.

mod support;

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng};
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
