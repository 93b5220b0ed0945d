//! Real processes killed and stopped at random instants, under a client that verifies: no write is
//! lost, none is taken back, and the client sees no error.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_frontend::nbd::client::Client;
use rand::{Rng, SeedableRng, rngs::StdRng};
use support::{BUDGET, Dev, Scratch, block, is_online, signal};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 2048;
const WRITERS: u64 = 4;

/// Writers that each own a part of the volume and know what every block of it must say.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    writers: Vec<std::thread::JoinHandle<Vec<u64>>>,
    client: Arc<Client>,
}

impl Load {
    fn start(client: Client, seed: u64) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = Arc::new(client);
        let writers = (0..WRITERS)
            .map(|writer| {
                let (stop, done, client) = (stop.clone(), done.clone(), client.clone());
                std::thread::spawn(move || work(&client, writer, seed, &stop, &done))
            })
            .collect();
        Load { stop, done, writers, client }
    }

    /// Waits until so many more operations are done.
    fn goes_on(&self, dev: &Dev, operations: u64) {
        let (from, began) = (self.done.load(Ordering::Relaxed), Instant::now());
        while self.done.load(Ordering::Relaxed) < from + operations {
            if began.elapsed() > BUDGET || self.writers.iter().any(|w| w.is_finished()) {
                dev.show_logs();
                panic!(
                    "IO does not go on: {} operations",
                    self.done.load(Ordering::Relaxed) - from
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it and reads everything once more.
    fn verify(self) {
        self.stop.store(true, Ordering::Relaxed);
        for (writer, handle) in (0..).zip(self.writers) {
            let versions = handle.join().expect("a writer saw what it must not see");
            for (n, version) in (0..).zip(versions) {
                expect(&self.client, n * WRITERS + writer, version);
            }
        }
        assert!(self.done.load(Ordering::Relaxed) > 100);
        Arc::into_inner(self.client).unwrap().stop();
    }
}

fn expect(client: &Client, lba: u64, version: u64) {
    let read = client.read(lba * BLOCK, BLOCK as u32).unwrap();
    let good = match version {
        0 => read.iter().all(|b| *b == 0),
        version => read == block(lba, version),
    };
    assert!(good, "block {lba} is not at version {version}: {:?}", &read[..24]);
}

fn work(client: &Client, writer: u64, seed: u64, stop: &AtomicBool, done: &AtomicU64) -> Vec<u64> {
    let mut random = StdRng::seed_from_u64(seed ^ (writer << 32));
    let mut versions = vec![0; (BLOCKS / WRITERS) as usize];
    while !stop.load(Ordering::Relaxed) {
        let n = random.random_range(0..versions.len());
        let lba = n as u64 * WRITERS + writer;
        match random.random_range(0..10) {
            0..6 => {
                versions[n] += 1;
                let data = Bytes::from(block(lba, versions[n]));
                let fua = random.random_range(0..20) == 0;
                client.write(lba * BLOCK, data, fua).expect("a write is never refused");
            }
            6..9 => expect(client, lba, versions[n]),
            _ => client.flush().expect("a flush is never refused"),
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    versions
}

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
