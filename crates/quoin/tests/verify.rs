//! All replicas of a volume compared with each other under a client's load, on real processes.

use crate::damage::figure;
use crate::support;

use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use quoin_nbd::client::Client;
use serde_json::Value;
use support::load::Load;
use support::stories::settings;
use support::{Dev, Scratch, block, damage, is_online, test_blocks};

const BLOCK: u64 = 4096;
/// Written once and then unchanged, beside the load's writes.
const STILL: std::ops::Range<u64> = 3000..7000;
/// Exit code of `quoin volume verify` where blocks are bad.
const FOUND: Option<i32> = Some(3);

fn fill(client: &Client) {
    for first in STILL.step_by(100) {
        let data: Vec<u8> = (first..first + 100).flat_map(|lba| block(lba, 1)).collect();
        client.write(first * BLOCK, Bytes::from(data), false).unwrap();
    }
    client.flush().unwrap();
}

fn check(client: &Client) {
    for first in STILL.step_by(100) {
        let read = client.read(first * BLOCK, 100 * BLOCK as u32).unwrap();
        for (lba, got) in (first..).zip(read.chunks(BLOCK as usize)) {
            assert!(got == block(lba, 1), "block {lba} is not what was written");
        }
    }
}

/// Runs `quoin volume verify` or `repair`; returns its exit code and output.
fn compare(dev: &Dev, what: &str) -> (Option<i32>, Value) {
    let output = dev.quoin(&["volume", what, "db", "-o", "json"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let printed = serde_json::from_str(&text).unwrap_or_else(|error| {
        dev.show_logs();
        panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr))
    });
    (output.status.code(), printed)
}

/// Copies that the pools replaced by another one's, on any request.
fn repaired(dev: &Dev) -> u64 {
    let of_pool = |pool: &Value| {
        let (name, http) = (pool["name"].as_str().unwrap(), pool["http"].as_str().unwrap());
        figure(http, name, "bad_copies_repaired").unwrap()
    };
    settings(dev)["pools"].as_array().unwrap().iter().map(of_pool).sum()
}

fn of<'a>(printed: &'a Value, pool: &str) -> &'a Value {
    let all = printed["replicas"].as_array().unwrap();
    all.iter().find(|replica| replica["pool"] == pool).unwrap_or_else(|| panic!("{printed}"))
}

fn is_whole(file: &Path, lba: u64) -> bool {
    let bytes = std::fs::File::open(file).unwrap();
    test_blocks(file).get(&(lba, 1)).into_iter().flatten().any(|offset| {
        let mut read = vec![0; BLOCK as usize];
        bytes.read_exact_at(&mut read, *offset).unwrap();
        read == block(lba, 1)
    })
}

/// Proves: all replicas are compared while a client writes; flipped bytes are reported by
/// replica and block and nothing else is; a repair fixes them; a client never reads wrong data.
#[test]
fn flipped_bytes_of_a_volume_in_use_are_reported_by_replica_and_block_and_repaired() {
    let scratch = Scratch::new("verify");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let client = dev.client("db");
    fill(&client);
    dev.wait_for_volume("db", "online", is_online);
    let load = Load::start(dev.client("db"), 7);

    let (code, printed) = compare(&dev, "verify");
    assert_eq!(
        (code, &printed["bad"], &printed["differing"]),
        (Some(0), &0.into(), &0.into()),
        "{printed}"
    );
    assert_eq!(printed["checkedBytes"], 64 << 20, "{printed}");
    assert_eq!(printed["replicas"].as_array().unwrap().len(), 3, "{printed}");
    assert!(printed["readBytes"].as_u64().unwrap() >= 3 * 4000 * BLOCK, "{printed}");
    load.assert_progress(&dev, 100);

    let harm = |pool: &str, lbas: &[u64]| {
        let file = dev.pool_file(pool);
        let offsets = test_blocks(&file);
        for lba in lbas {
            offsets[&(*lba, 1)].iter().for_each(|offset| damage(&file, offset + 2000));
        }
        file
    };
    let in_b: Vec<u64> = (0..12).map(|n| 3007 + n * 300).collect();
    let in_c = [3100, 4200, 6999];
    let (file_b, file_c) = (harm("pool-b", &in_b), harm("pool-c", &in_c));

    let (code, printed) = compare(&dev, "verify");
    assert_eq!(code, FOUND, "{printed}");
    assert_eq!((&printed["bad"], &printed["lost"]), (&15.into(), &0.into()), "{printed}");
    assert_eq!((&printed["differing"], &printed["repaired"]), (&0.into(), &0.into()), "{printed}");
    assert_eq!(
        (&of(&printed, "pool-b")["bad"], &of(&printed, "pool-c")["bad"]),
        (&12.into(), &3.into())
    );
    let mut found: Vec<(String, u64)> = printed["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| (f["pool"].as_str().unwrap().to_owned(), f["offset"].as_u64().unwrap() / BLOCK))
        .collect();
    found.sort();
    let named = |pool: &str, lbas: &[u64]| -> Vec<_> {
        lbas.iter().map(|lba| (pool.to_owned(), *lba)).collect()
    };
    assert_eq!(found, [named("pool-b", &in_b), named("pool-c", &in_c)].concat());
    assert!(!is_whole(&file_b, in_b[0]), "a verification changes nothing");
    assert!(dev.ok(&["events"]).contains("VolumeVerified"));
    assert!(dev.ok(&["volume", "get", "db"]).contains("15 bad"));
    load.assert_progress(&dev, 100);

    let (code, printed) = compare(&dev, "repair");
    assert_eq!((code, &printed["repaired"]), (Some(0), &printed["bad"]), "{printed}");
    // Clean-up may have come to some of them before: together they repaired each once.
    assert_eq!(repaired(&dev), 15, "{printed}");
    assert!(in_b.iter().all(|lba| is_whole(&file_b, *lba)));
    assert!(in_c.iter().all(|lba| is_whole(&file_c, *lba)));
    let (code, printed) = compare(&dev, "verify");
    assert_eq!((code, &printed["bad"]), (Some(0), &0.into()), "{printed}");
    load.assert_progress(&dev, 100);
    load.verify();
    check(&client);
    client.stop();

    // A volume that is attached nowhere is opened for as long as it takes.
    dev.ok(&["volume", "detach", "db"]);
    harm("pool-a", &[5000]);
    let (code, printed) = compare(&dev, "verify");
    assert_eq!((code, &of(&printed, "pool-a")["bad"]), (FOUND, &1.into()), "{printed}");
    let (code, printed) = compare(&dev, "repair");
    assert_eq!((code, &printed["repaired"]), (Some(0), &1.into()), "{printed}");
    assert_eq!(dev.json(&["volume", "get", "db"])["use"], "detached");
    let client = dev.client("db");
    check(&client);
    client.stop();
    dev.stop();
}
