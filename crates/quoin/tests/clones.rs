//! Clones on real processes: what they begin with, that each goes its own way, and that they outlive
//! their sources.

use crate::support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_nbd::client::Client;
use serde_json::Value;
use support::{Dev, Scratch, block, is_online};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 400;
/// Data behind these blocks.
const BULK_MIB: std::ops::Range<u64> = 32..80;
/// Pools that have nothing new report every two seconds.
const REPORTS: Duration = Duration::from_secs(5);
const POOLS: [&str; 3] = ["pool-a", "pool-b", "pool-c"];

fn start(scratch: &Scratch) -> Dev {
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "80MiB", "--replicas", "3"]);
    dev
}

/// Writes each of these blocks in this version, and flushes.
fn fill(client: &Client, blocks: std::ops::Range<u64>, version: u64) {
    for lba in blocks {
        client.write(lba * BLOCK, Bytes::from(block(lba, version)), false).unwrap();
    }
    client.flush().unwrap();
}

/// Returns true if these blocks are all of this version; 0: never written.
fn holds(client: &Client, blocks: std::ops::Range<u64>, version: u64) -> bool {
    blocks.into_iter().all(|lba| {
        let read = client.read(lba * BLOCK, BLOCK as u32).unwrap();
        let wanted = if version == 0 { vec![0; BLOCK as usize] } else { block(lba, version) };
        read[..] == wanted[..]
    })
}

fn used_bytes(dev: &Dev) -> u64 {
    let pools = dev.json(&["pool", "list"]);
    let pools = pools.as_array().unwrap().iter();
    pools.map(|pool| pool["usedBytes"].as_u64().unwrap()).sum()
}

/// Returns the same once the pools have reported twice without a change.
fn settled_bytes(dev: &Dev) -> u64 {
    let (mut last, mut since) = (used_bytes(dev), Instant::now());
    while since.elapsed() < REPORTS {
        std::thread::sleep(Duration::from_millis(200));
        let used = used_bytes(dev);
        if used != last {
            (last, since) = (used, Instant::now());
        }
    }
    last
}

/// Proves CSI-CREATEVOLUME-23, CSI-SOURCE-03: with commands, from a snapshot and from a volume.
#[test]
fn a_clone_begins_with_its_source_shares_its_space_and_each_goes_its_own_way() {
    let scratch = Scratch::new("clones");
    let dev = start(&scratch);
    let db = dev.client("db");
    fill(&db, 0..BLOCKS, 1);
    // Much more than a pool may come to use in the meantime for other reasons.
    for mib in BULK_MIB {
        db.write(mib << 20, Bytes::from(vec![mib as u8; 1 << 20]), false).unwrap();
    }
    db.flush().unwrap();
    dev.ok(&["snapshot", "create", "db", "--name", "first"]);
    fill(&db, 0..BLOCKS / 2, 2);
    let before = settled_bytes(&dev);
    let made = dev.ok(&["volume", "create", "test", "--from-snapshot", "first"]);
    assert!(made.contains("volume test is ready: 80.0 MiB, 3 replicas"), "{made}");
    let test = dev.client("test");
    assert!(holds(&test, 0..BLOCKS, 1) && holds(&test, BLOCKS..BLOCKS + 10, 0));
    let taken = settled_bytes(&dev).saturating_sub(before);
    let copied = (3 * (BULK_MIB.end - BULK_MIB.start)) << 20;
    assert!(taken < copied / 2, "{taken} bytes more in three pools; a copy takes {copied}");
    let larger = ["volume", "create", "copy", "--from-volume", "db", "--size", "96MiB"];
    let larger = dev.json(&larger);
    assert_eq!(
        (&larger["sizeBytes"], &larger["madeFrom"]["volume"]),
        (&(96 << 20).into(), &"db".into())
    );
    let copy = dev.client("copy");
    assert!(holds(&copy, 0..BLOCKS / 2, 2) && holds(&copy, BLOCKS / 2..BLOCKS, 1));
    assert!(holds(&copy, 22_000..22_010, 0), "behind the end of its source");
    fill(&test, 0..50, 3);
    fill(&copy, 50..100, 4);
    fill(&copy, 22_000..22_010, 4);
    fill(&db, 100..150, 5);
    assert!(holds(&test, 0..50, 3) && holds(&test, 50..BLOCKS, 1));
    assert!(holds(&copy, 0..50, 2) && holds(&copy, 50..100, 4) && holds(&copy, 100..200, 2));
    assert!(holds(&db, 0..100, 2) && holds(&db, 100..150, 5));
    let listed = dev.json(&["snapshot", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 1, "the copy's own is in no list: {listed}");
    let shown = dev.ok(&["volume", "get", "test"]);
    assert!(shown.contains("snapshot first of volume db"), "{shown}");
    let again = dev.ok(&["volume", "create", "test", "--from-snapshot", "first"]);
    assert!(again.contains("volume test is ready"), "{again}");
    for client in [db, test, copy] {
        client.stop();
    }
    dev.stop();
}

#[test]
fn a_clone_outlives_its_snapshot_its_volume_and_kills_of_all_pools() {
    let scratch = Scratch::new("clones-outlive");
    let dev = start(&scratch);
    let db = dev.client("db");
    fill(&db, 0..BLOCKS, 1);
    dev.ok(&["snapshot", "create", "db", "--name", "first"]);
    fill(&db, 0..BLOCKS, 2);
    dev.ok(&["volume", "create", "test", "--from-snapshot", "first"]);
    let test = dev.client("test");
    fill(&test, 0..50, 3);
    dev.ok(&["volume", "create", "second", "--from-volume", "test"]);
    db.stop();
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["snapshot", "delete", "first", "--yes"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    let volumes = dev.json(&["volume", "list"]);
    assert_eq!(volumes.as_array().unwrap().len(), 2, "{volumes}");
    for pool in POOLS {
        dev.kill(pool);
    }
    dev.wait_for_volume("test", "online", is_online);
    assert!(holds(&test, 0..50, 3) && holds(&test, 50..BLOCKS, 1));
    test.stop();
    dev.ok(&["volume", "detach", "test"]);
    dev.ok(&["volume", "delete", "test", "--yes"]);
    let second = dev.client("second");
    assert!(holds(&second, 0..50, 3) && holds(&second, 50..BLOCKS, 1));
    second.stop();
    dev.ok(&["volume", "detach", "second"]);
    dev.ok(&["volume", "delete", "second", "--yes"]);
    dev.eventually("nothing is left of the family", || {
        let replicas = dev.json(&["replica", "list"]);
        (replicas.as_array()?.is_empty() && used_bytes(&dev) == 0).then_some(())
    });
    dev.stop();
}

/// Proves: a clone that was flattened shares nothing, in space or otherwise, and IO goes on meanwhile.
#[test]
fn a_flattened_clone_takes_its_own_space_and_its_source_goes() {
    let scratch = Scratch::new("clones-flatten");
    let dev = start(&scratch);
    let db = dev.client("db");
    fill(&db, 0..BLOCKS, 1);
    dev.ok(&["snapshot", "create", "db", "--name", "first"]);
    dev.ok(&["volume", "create", "test", "--from-snapshot", "first"]);
    let test = dev.client("test");
    fill(&test, 0..50, 2);
    let done = dev.ok(&["volume", "flatten", "test"]);
    assert!(done.contains("volume test shares nothing"), "{done}");
    let from = &dev.json(&["volume", "get", "test"])["madeFrom"];
    assert_eq!((&from["sharesNothing"], &from["snapshot"]), (&true.into(), &"first".into()));
    let repeated = dev.ok(&["volume", "create", "test", "--from-snapshot", "first"]);
    assert!(repeated.contains("volume test is ready"), "{repeated}");
    assert!(holds(&test, 0..50, 2) && holds(&test, 50..BLOCKS, 1));
    let again = dev.ok(&["volume", "flatten", "test"]);
    assert!(again.contains("volume test shares nothing"), "{again}");
    db.stop();
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["snapshot", "delete", "first", "--yes"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    dev.eventually("nothing is left of its source", || {
        let replicas = dev.json(&["replica", "list"]);
        (replicas.as_array()?.len() == 3).then_some(())
    });
    for pool in POOLS {
        dev.kill(pool);
    }
    dev.wait_for_volume("test", "online", is_online);
    assert!(holds(&test, 0..50, 2) && holds(&test, 50..BLOCKS, 1));
    test.stop();
    dev.stop();
}

/// A replica of a clone that a pool has lost is rebuilt whole from the others.
#[test]
fn a_replica_of_a_clone_moves_to_a_pool_that_does_not_have_its_source() {
    let scratch = Scratch::new("clones-move");
    let flags = ["--no-attach", "--pools", "4", "--pool-size", "256MiB"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let db = dev.client("db");
    fill(&db, 0..BLOCKS, 1);
    dev.ok(&["snapshot", "create", "db", "--name", "first"]);
    dev.ok(&["volume", "create", "test", "--from-snapshot", "first"]);
    let pools = |volume: &str| -> Vec<String> {
        let volume = dev.json(&["volume", "get", volume]);
        let replicas = volume["replicas"].as_array().unwrap().iter();
        replicas.map(|r: &Value| r["pool"].as_str().unwrap().to_owned()).collect()
    };
    let test = dev.client("test");
    fill(&test, 0..50, 2);
    let all = dev.json(&["pool", "list"]);
    let all = all.as_array().unwrap().iter().map(|pool| pool["name"].as_str().unwrap().to_owned());
    let (used, first) = (pools("test"), pools("test")[0].clone());
    let free = all.into_iter().find(|pool| !used.contains(pool)).unwrap();
    dev.ok(&["replica", "move", "test", &first, "--to", &free, "--wait"]);
    assert!(pools("test").contains(&free));
    dev.ok(&["volume", "verify", "test"]);
    assert!(holds(&test, 0..50, 2) && holds(&test, 50..BLOCKS, 1));
    for client in [db, test] {
        client.stop();
    }
    dev.stop();
}
