//! Rot in pool files under live volumes, on real processes: found, answered by another replica,
//! repaired and told.

mod support;

use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use quoin_frontend::nbd::client::{Client, RequestError};
use support::{Dev, Scratch, block, blocks_of, is_online, rot, signal, test_blocks};

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

/// Has a pool read all it holds, and gives what it says of that.
fn scrub(dev: &Dev, pool: &str) -> serde_json::Value {
    dev.json(&["pool", "scrub", pool, "--wait"])
}

fn wait_until_repaired(dev: &Dev, pool: &str) {
    dev.eventually(&format!("what is bad in {pool} is repaired"), || {
        (dev.replica("db", pool)["badBlocks"] == 0).then_some(())
    });
}

fn says(dev: &Dev, words: &str) -> bool {
    dev.ok(&["events"]).contains(words)
}

/// Proves: a corrupted byte anywhere in a pool file is found, answered from another replica,
/// repaired, reported; all replicas of a block bad: EIO.
#[test]
fn rot_in_a_pool_file_is_found_answered_by_others_repaired_and_told() {
    let scratch = Scratch::new("rot");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let client = dev.client("db");
    fill(&client, 1);
    dev.wait_for_volume("db", "online", is_online);

    // Bytes of blocks, in a pool whose volume is in use.
    let file = dev.pool_file("pool-b");
    let places = test_blocks(&file);
    let harmed: Vec<u64> = (0..20).map(|n| places[&(n * 300 + 7, 1)][0]).collect();
    harmed.iter().for_each(|offset| rot(&file, offset + 2000));
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
        let told = ["BadBlocks", "BadBlocksRepaired", "ScrubEnded"];
        told.iter().all(|reason| says(&dev, reason)).then_some(())
    });
    check(&client, 1);

    // Nodes of the map, while the pool does not look: it comes back with a map full of holes.
    dev.eventually("the log was folded into a map", || (!nodes(&file).is_empty()).then_some(()));
    signal(dev.pid("pool-b").unwrap(), "STOP");
    let nodes = nodes(&file);
    nodes.iter().for_each(|offset| rot(&file, *offset));
    dev.kill("pool-b");
    dev.wait_for_volume("db", "whole again", |volume| {
        volume["replicas"].as_array().unwrap().iter().all(|r| r["phase"] == "InSync")
    });
    scrub(&dev, "pool-b");
    wait_until_repaired(&dev, "pool-b");
    dev.eventually("the mended map is told", || says(&dev, "MapRepaired").then_some(()));
    check(&client, 1);

    // Without a target the repair waits, and says so.
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let lonely = test_blocks(&file)[&(4242, 1)].clone();
    lonely.iter().for_each(|offset| rot(&file, offset + 100));
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
        test_blocks(&file)[&(100, 1)].iter().for_each(|offset| rot(&file, offset + 3000));
    }
    assert_eq!(client.read(100 * BLOCK, 4096), Err(RequestError::Refused(EIO)));
    assert_eq!(client.read(99 * BLOCK, 4096).unwrap(), block(99, 1));
    assert_eq!(client.read(101 * BLOCK, 4096).unwrap(), block(101, 1));
    dev.eventually("the loss is told", || says(&dev, "BlockLost").then_some(()));
    client.write(100 * BLOCK, Bytes::from(block(100, 1)), false).unwrap();
    check(&client, 1);
    client.stop();

    // And the file as a whole is sound, read with nothing running.
    dev.stop();
    let check = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["pool", "check"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
}

/// Spots all over the batches of map nodes.
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
