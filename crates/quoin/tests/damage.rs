//! Corruption in pool files under live volumes, on real processes: found, answered by another
//! replica, repaired and reported.

use crate::common;
use crate::support;

use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use common::{Cluster, Place, free_port};
use quoin_nbd::client::{Address, Client, ClientOptions, RequestError};
use support::stories::ask;
use support::{Dev, Scratch, block, blocks_of, damage, is_online, signal, test_blocks};

const BLOCK: u64 = 4096;
/// More than a sixteenth of a pool, so that the log is folded into the map.
const BLOCKS: u64 = 7000;
const EIO: u32 = 5;

fn fill(client: &Client, version: u64) {
    for first in (0..BLOCKS).step_by(100) {
        let data: Vec<u8> = (first..first + 100).flat_map(|lba| block(lba, version)).collect();
        client.write(first * BLOCK, Bytes::from(data), false).unwrap();
    }
    client.flush().unwrap();
}

fn check(client: &Client, version: u64) {
    for first in (0..BLOCKS).step_by(100) {
        let read = client.read(first * BLOCK, 100 * BLOCK as u32).unwrap();
        for (lba, got) in (first..).zip(read.chunks(BLOCK as usize)) {
            assert!(got == block(lba, version), "block {lba} is not what was written");
        }
    }
}

/// Makes a pool read its whole content, and returns its report of that.
fn scrub(dev: &Dev, pool: &str) -> serde_json::Value {
    dev.json(&["pool", "scrub", pool, "--wait"])
}

fn wait_until_repaired(dev: &Dev, pool: &str) {
    dev.eventually(&format!("what is bad in {pool} is repaired"), || {
        (dev.replica("db", pool)["badBlocks"] == 0).then_some(())
    });
}

fn has_event(dev: &Dev, words: &str) -> bool {
    dev.ok(&["events"]).contains(words)
}

/// Proves: a corrupted byte anywhere in a pool file is found, answered from another replica,
/// repaired, reported; all replicas of a block bad: EIO.
#[test]
fn damage_in_a_pool_file_is_detected_repaired_and_reported() {
    let scratch = Scratch::new("rot");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let client = dev.client("db");
    fill(&client, 1);
    dev.wait_for_volume("db", "online", is_online);

    // Bytes of blocks, in a pool whose volume is in use.
    let file = dev.pool_file("pool-b");
    let offsets = test_blocks(&file);
    let harmed: Vec<u64> = (0..20).map(|n| offsets[&(n * 300 + 7, 1)][0]).collect();
    harmed.iter().for_each(|offset| damage(&file, offset + 2000));
    let done = scrub(&dev, "pool-b");
    assert!(done["found"].as_u64().unwrap() >= 20, "{done}");
    wait_until_repaired(&dev, "pool-b");
    assert!(dev.replica("db", "pool-b")["repaired"].as_u64().unwrap() >= 20);
    let whole = test_blocks(&file);
    let bytes = std::fs::File::open(&file).unwrap();
    for n in 0..20 {
        let lba = n * 300 + 7;
        let good = whole.get(&(lba, 1)).into_iter().flatten().any(|offset| {
            let mut read = vec![0; BLOCK as usize];
            std::os::unix::fs::FileExt::read_exact_at(&bytes, &mut read, *offset).unwrap();
            read == block(lba, 1)
        });
        assert!(good, "block {lba} is not whole in the file");
    }
    dev.eventually("the events tell it", || {
        let reported = ["BadBlocks", "BadBlocksRepaired", "ScrubEnded"];
        reported.iter().all(|reason| has_event(&dev, reason)).then_some(())
    });
    check(&client, 1);

    // Nodes of the map, while the pool does not check: it comes back with a map full of holes.
    dev.eventually("the log was folded into a map", || (!nodes(&file).is_empty()).then_some(()));
    signal(dev.pid("pool-b").unwrap(), "STOP");
    let nodes = nodes(&file);
    nodes.iter().for_each(|offset| damage(&file, *offset));
    dev.kill("pool-b");
    dev.wait_for_volume("db", "whole again", |volume| {
        volume["replicas"].as_array().unwrap().iter().all(|r| r["phase"] == "InSync")
    });
    scrub(&dev, "pool-b");
    wait_until_repaired(&dev, "pool-b");
    dev.eventually("the mended map is told", || has_event(&dev, "MapRepaired").then_some(()));
    check(&client, 1);

    // The repair waits without a target, and reports that.
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let lonely = test_blocks(&file)[&(4242, 1)].clone();
    lonely.iter().for_each(|offset| damage(&file, offset + 100));
    scrub(&dev, "pool-b");
    dev.wait_for_volume("db", "waiting for an attachment", |volume| {
        volume["waitingFor"].as_str().unwrap().contains("attachment")
    });
    let client = dev.client("db");
    wait_until_repaired(&dev, "pool-b");
    check(&client, 1);

    // All copies of one block: an error for this block and for no other, until it is written.
    for pool in ["pool-a", "pool-b", "pool-c"] {
        let file = dev.pool_file(pool);
        test_blocks(&file)[&(100, 1)].iter().for_each(|offset| damage(&file, offset + 3000));
    }
    assert_eq!(client.read(100 * BLOCK, 4096), Err(RequestError::Refused(EIO)));
    assert_eq!(client.read(99 * BLOCK, 4096).unwrap(), block(99, 1));
    assert_eq!(client.read(101 * BLOCK, 4096).unwrap(), block(101, 1));
    dev.eventually("the loss is told", || has_event(&dev, "BlockLost").then_some(()));
    client.write(100 * BLOCK, Bytes::from(block(100, 1)), false).unwrap();
    check(&client, 1);
    client.stop();

    // The file as a whole is sound, read with nothing running.
    dev.stop();
    let check = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["pool", "check"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
}

/// Returns a figure of a pool among its metrics.
pub fn figure(address: &str, pool: &str, name: &str) -> Option<u64> {
    let name = format!("quoin_pool_{name}_total{{pool=\"{pool}\"}} ");
    let metrics = ask(address, "/metrics")?;
    metrics.lines().find_map(|line| line.strip_prefix(&name))?.trim().parse().ok()
}

/// Proves: corruption is found by the schedule of the pool alone, repaired from another replica and
/// reported, and no pool reads more often than configured.
#[test]
fn damage_is_detected_repaired_and_reported_by_the_scheduled_scrub() {
    const BLOCKS: u64 = 400;
    let flags = ["--default-spread", "pool"];
    let mut cluster = Cluster::start("schedule", &Place::here(), &flags);
    let addresses: Vec<String> = (0..3).map(|_| format!("127.0.0.1:{}", free_port())).collect();
    let periods = ["never", "1s", "7d"];
    for ((pool, every), http) in ["p1", "p2", "p3"].into_iter().zip(periods).zip(&addresses) {
        cluster.pool(&Place::here(), pool, &["--scrub-every", every, "--http", http]);
    }
    cluster.node(&Place::here(), "n1", &[], &[]);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let address = cluster.ok(&["volume", "attach", "db", "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1;
    let client = cluster.eventually("the volume is served", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.into()))).ok()
    });
    let data: Vec<u8> = (0..BLOCKS).flat_map(|lba| block(lba, 1)).collect();
    client.write(0, Bytes::from(data), false).unwrap();
    client.flush().unwrap();
    cluster.wait_for_volume("db", "online", is_online);
    let of = |pool: usize, name: &str| figure(&addresses[pool], ["p1", "p2", "p3"][pool], name);
    cluster.eventually("a pass ends by itself", || (of(1, "scrubs")? > 0).then_some(()));
    assert_eq!(of(1, "bad_copies_found"), Some(0), "nothing is bad yet");

    let file = cluster.scratch.0.join("p2-data");
    let offsets = test_blocks(&file);
    for n in 0..10 {
        damage(&file, offsets[&(n * 40 + 3, 1)][0] + 2000);
    }
    cluster.eventually("it is found and repaired", || {
        (of(1, "bad_copies_found")? >= 10 && of(1, "bad_copies_repaired")? >= 10).then_some(())
    });
    cluster.eventually("it is told", || {
        let reported = cluster.ok(&["events"]);
        let reasons = ["BadBlocks ", "BadBlocksRepaired", "ScrubEnded"];
        reasons.iter().all(|reason| reported.contains(reason)).then_some(())
    });
    cluster.eventually("nothing bad is left", || {
        let replicas = cluster.json(&["replica", "list", "db"]);
        let replica = replicas.as_array()?.iter().find(|r| r["pool"] == "p2")?.clone();
        (replica["badBlocks"] == 0 && replica["repaired"].as_u64()? >= 10).then_some(())
    });
    let (whole, bytes) = (test_blocks(&file), std::fs::File::open(&file).unwrap());
    for n in 0..10 {
        let lba = n * 40 + 3;
        let good = whole.get(&(lba, 1)).into_iter().flatten().any(|offset| {
            let mut read = vec![0; BLOCK as usize];
            std::os::unix::fs::FileExt::read_exact_at(&bytes, &mut read, *offset).unwrap();
            read == block(lba, 1)
        });
        assert!(good, "block {lba} is not whole in the file");
    }
    // A later pass finds nothing any more.
    let (passes, found) = (of(1, "scrubs").unwrap(), of(1, "bad_copies_found").unwrap());
    cluster.eventually("two more passes end", || (of(1, "scrubs")? >= passes + 2).then_some(()));
    assert_eq!(of(1, "bad_copies_found"), Some(found));
    assert_eq!((of(0, "scrubs"), of(2, "scrubs")), (Some(0), Some(0)), "by their own schedules");
    client.stop();
}

/// Returns offsets all over the batches of map nodes.
fn nodes(file: &Path) -> Vec<u64> {
    const NODES: u8 = 2;
    let found = blocks_of(file, |block| {
        let length = u32::from_le_bytes(block[72..76].try_into().unwrap());
        (block.starts_with(b"QBAT") && block[18] == NODES).then_some(u64::from(length))
    });
    let each =
        |(offset, blocks): (u64, u64)| (offset + BLOCK..offset + BLOCK * (1 + blocks)).step_by(256);
    found.into_iter().flat_map(each).collect()
}
