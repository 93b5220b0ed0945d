//! Good copies that are not the same, between which only a user may choose: made by hand in a
//! pool's file, reported by a verification, and settled by `quoin volume repair --from`.

use crate::support;

use std::path::Path;

use bytes::Bytes;
use quoin_nbd::client::Client;
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::{FileDisk, Pool, PoolOptions, ReplicaPool};
use quoin_types::message::{Content, ReadView};
use quoin_types::{Lsn, crc32c};
use serde_json::Value;
use support::stories::all_in_sync;
use support::{Dev, Scratch, block};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1000;
/// The block that is made to differ.
const DIFFERS: u64 = 10;

/// Gives the only replica in a pool's file another content of a block, under the version and with
/// the checksum that make it a good copy: all its data is copied into a rebuild of itself.
pub fn overwrite_block(file: &Path, lba: u64, content: &Bytes) {
    let disk = FileDisk::open(file).unwrap();
    let mut sync = quoin_store::Disk::syncer(&disk);
    let mut pool = Pool::open(disk, PoolOptions::default()).unwrap();
    let mut prepare = |pool: &mut Pool<FileDisk>| {
        pool.request_sync();
        let ticket = pool.sync_wanted().unwrap();
        pool.sync_finished(ticket, sync()).expect("a sync");
    };
    let guids = pool.replicas();
    let [guid] = guids[..] else { panic!("{guids:?}") };
    let mut replica = pool.replica(guid).unwrap();
    replica.increment_begin(7, Lsn(0)).unwrap();
    let (mut cursor, mut forged) = (0, 0);
    let end = loop {
        let chunk =
            replica.pull(1, ReadView::Live, Lsn(0), cursor, 1 << 20, true).unwrap().unwrap();
        let mut slots = chunk.slots;
        for slot in slots.iter_mut().filter(|slot| slot.lba == lba) {
            assert!(matches!(slot.content, Content::Data { .. }), "{slot:?}");
            slot.content = Content::Data { crc: crc32c(content), data: content.clone() };
            forged += 1;
        }
        let blocks = replica.state().volume_blocks;
        replica.increment_feed(7, &slots, chunk.cursor.unwrap_or(blocks)).unwrap();
        match chunk.cursor {
            Some(next) => cursor = next,
            None => break chunk.end.unwrap(),
        }
    };
    assert_eq!(forged, 1, "the replica does not hold the block");
    replica.increment_prepare(7, &end).unwrap();
    prepare(&mut pool);
    pool.replica(guid).unwrap().increment_flip(7).unwrap();
    prepare(&mut pool);
}

fn compare(dev: &Dev, arguments: &[&str]) -> (Option<i32>, Value) {
    let all: Vec<&str> = ["volume"].into_iter().chain(arguments.iter().copied()).collect();
    let output = dev.quoin(&[&all[..], &["-o", "json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    let printed = serde_json::from_str(&text).unwrap_or_else(|error| {
        dev.show_logs();
        panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr))
    });
    (output.status.code(), printed)
}

fn counts(printed: &Value) -> [u64; 3] {
    ["bad", "differing", "repaired"].map(|key| printed[key].as_u64().unwrap())
}

fn check(client: &Client, but: u64) {
    for lba in (0..BLOCKS).filter(|lba| *lba != but) {
        assert_eq!(client.read(lba * BLOCK, BLOCK as u32).unwrap(), block(lba, 1));
    }
}

#[test]
fn differing_good_copies_are_reported_and_repaired_from_a_named_replica() {
    let scratch = Scratch::new("differing");
    let flags = ["--no-attach", "--pool-size", "256MiB", "--replace-after", "off"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let client = dev.client("db");
    for first in (0..BLOCKS).step_by(100) {
        let data: Vec<u8> = (first..first + 100).flat_map(|lba| block(lba, 1)).collect();
        client.write(first * BLOCK, Bytes::from(data), false).unwrap();
    }
    client.flush().unwrap();
    dev.wait_for_volume("db", "whole", all_in_sync);
    client.stop();
    let file = dev.pool_file("pool-b");
    dev.stop();
    let other = Bytes::from(block(DIFFERS, 2));
    overwrite_block(&file, DIFFERS, &other);

    let dev = Dev::start(&scratch.cluster(), &flags);
    let client = dev.client("db");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let (code, printed) = compare(&dev, &["verify", "db"]);
    assert_eq!((code, counts(&printed)), (Some(3), [0, 1, 0]), "{printed}");
    let finding = &printed["findings"][0];
    assert_eq!((&finding["what"], &finding["offset"]), (&"differs".into(), &40_960.into()));
    // No copy is chosen without the user's choice.
    let (code, printed) = compare(&dev, &["repair", "db"]);
    assert_eq!((code, counts(&printed)), (Some(3), [0, 1, 0]), "{printed}");
    let (code, printed) = compare(&dev, &["repair", "db", "--from", "pool-b"]);
    assert_eq!((code, counts(&printed)), (Some(0), [0, 1, 1]), "{printed}");
    let (code, printed) = compare(&dev, &["verify", "db"]);
    assert_eq!((code, counts(&printed)), (Some(0), [0, 0, 0]), "{printed}");
    // Any replica may answer.
    for _ in 0..12 {
        assert_eq!(client.read(DIFFERS * BLOCK, BLOCK as u32).unwrap(), other);
    }
    check(&client, DIFFERS);
    client.stop();
    dev.stop();
}
