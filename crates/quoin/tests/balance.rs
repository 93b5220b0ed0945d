//! Pools that fill unevenly, on real processes: replicas move by themselves until they are even,
//! under a client that verifies, and no written data is lost.

use crate::support;

use bytes::Bytes;
use quoin_nbd::client::Client;
use serde_json::Value;
use support::load::Load;
use support::{Dev, Scratch, block};

const BLOCK: u64 = 4096;
/// Blocks of each quiet volume: 24 MiB.
const BLOCKS: u64 = 6144;
const PART: u64 = 64;
const QUIET: [&str; 3] = ["quiet-0", "quiet-1", "quiet-2"];
const POOLS: [&str; 4] = ["pool-a", "pool-b", "pool-c", "pool-d"];

fn fill(client: &Client, version: u64) {
    for at in (0..BLOCKS).step_by(PART as usize) {
        let data: Vec<u8> = (at..at + PART).flat_map(|lba| block(lba, version)).collect();
        client.write(at * BLOCK, Bytes::from(data), false).unwrap();
    }
    client.flush().unwrap();
}

fn check(client: &Client, version: u64) {
    for at in (0..BLOCKS).step_by(PART as usize) {
        let read = client.read(at * BLOCK, (PART * BLOCK) as u32).unwrap();
        for (lba, got) in (at..).zip(read.chunks(BLOCK as usize)) {
            assert_eq!(got, block(lba, version), "block {lba} of version {version}");
        }
    }
}

fn pools(dev: &Dev) -> Vec<Value> {
    dev.json(&["pool", "list"]).as_array().unwrap().clone()
}

/// Returns the pool of each replica of a volume.
fn replica_pools(dev: &Dev, volume: &str) -> Vec<String> {
    let replicas = dev.json(&["replica", "list", volume]);
    let replicas = replicas.as_array().unwrap().iter();
    replicas.map(|r| r["pool"].as_str().unwrap().to_owned()).collect()
}

fn reported(dev: &Dev, reason: &str) -> usize {
    dev.ok(&["events"]).lines().filter(|line| line.contains(reason)).count()
}

/// Returns the used percentage of each pool that takes replicas.
fn shares(dev: &Dev) -> Vec<u64> {
    let open = |pool: &&Value| pool["cordon"] == "";
    let share = |pool: &Value| {
        100 * pool["usedBytes"].as_u64().unwrap() / pool["capacityBytes"].as_u64().unwrap()
    };
    pools(dev).iter().filter(open).map(share).collect()
}

#[test]
fn replicas_move_from_a_full_pool_until_pools_are_balanced() {
    let scratch = Scratch::new("balance");
    let flags = ["--no-attach", "--pool-size", "256MiB", "--pools", "4", "--rebalance-at", "25%"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    // All replicas are placed in one pool, as where others were added later.
    for pool in &POOLS[1..] {
        dev.ok(&["pool", "cordon", pool]);
    }
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "1"]);
    let load = Load::start(dev.client("db"), 11);
    load.assert_progress(&dev, 100);
    let mut quiet = Vec::new();
    for (version, name) in (1..).zip(QUIET) {
        dev.ok(&["volume", "create", name, "--size", "24MiB", "--replicas", "1"]);
        let client = dev.client(name);
        fill(&client, version);
        quiet.push(client);
    }
    assert!(QUIET.iter().all(|name| replica_pools(&dev, name) == ["pool-a"]));
    // One pool stays closed: it is the emptiest, and takes nothing.
    for pool in ["pool-b", "pool-c"] {
        dev.ok(&["pool", "uncordon", pool]);
    }
    dev.eventually("a replica moves by itself", || {
        (reported(&dev, "ReplicaRebalances") > 0).then_some(())
    });
    load.assert_progress(&dev, 100);
    dev.eventually("the pools are even", || {
        let shares = shares(&dev);
        let (most, least) = (shares.iter().max().unwrap(), shares.iter().min().unwrap());
        let still = |name| dev.json(&["volume", "get", name])["changing"] == "";
        (most - least <= 25 && QUIET.into_iter().chain(["db"]).all(still)).then_some(())
    });
    let moved = reported(&dev, "ReplicaRebalances");
    assert!((1..=4).contains(&moved), "each replica once at most: {moved}");
    let all: Vec<String> =
        QUIET.iter().chain(&["db"]).flat_map(|v| replica_pools(&dev, v)).collect();
    assert!(all.len() == 4 && all.iter().any(|pool| pool != "pool-a"), "{all:?}");
    assert!(!all.contains(&"pool-d".to_owned()), "it is cordoned: {all:?}");
    // Clients noticed nothing, and read what they wrote.
    load.assert_progress(&dev, 100);
    load.verify();
    for (version, client) in (1..).zip(quiet) {
        check(&client, version);
        client.stop();
    }
    let scraped = dev.ok(&["events"]);
    assert!(scraped.contains("% full"), "{scraped}");
    dev.stop();
}
