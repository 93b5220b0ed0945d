//! Factors that change and growth one by one, under a client that verifies; and the document of a
//! volume meanwhile.

use crate::support;

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use support::load::Load;
use support::stories::*;
use support::{Dev, block, signal};

const BLOCK: u64 = 4096;
/// First block beyond those of a load.
const BEYOND: u64 = 3000;

fn manifest(dev: &Dev) -> Value {
    dev.json(&["volume", "get", "db", "--manifest"])
}

/// Returns known ids and GUIDs from the document.
fn list(status: &Value) -> BTreeSet<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let listed = status["replicaList"].as_array().unwrap().iter();
    listed.map(|r| (text(&r["replicaId"]), text(&r["replicaGuid"]))).collect()
}

/// Proves SCALE-CF-02.
#[test]
fn a_consistency_factor_is_raised_and_lowered_under_load_and_every_write_obeys_it() {
    let (scratch, dev) = cluster("factor", "3");
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 2, 3]);
    for refused_factor in ["4", "9"] {
        let text =
            refused(&dev, &["volume", "scale", "db", "--consistency-factor", refused_factor]);
        assert!(text.contains("more than the 3 replicas"), "{text}");
    }
    waiting(&dev, &["volume", "scale", "db", "--consistency-factor", "3"]);
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 3, 3]);
    assert_eq!(known(&dev), before, "nobody joined and nobody left");
    load.assert_progress(&dev, 100);

    // One is away: with two copies no write is held.
    let away = dev.pid("pool-c").unwrap();
    signal(away, "STOP");
    let client = dev.client("db");
    let write = std::thread::spawn(move || {
        client.write(BEYOND * BLOCK, Bytes::from(block(BEYOND, 1)), true).unwrap();
        client
    });
    dev.eventually("it is missed", || {
        (dev.replica("db", "pool-c")["phase"] == "Offline").then_some(())
    });
    assert!(!write.is_finished(), "acknowledged with two copies under a factor of three");
    signal(away, "CONT");
    let client = write.join().unwrap();
    assert_eq!(client.read(BEYOND * BLOCK, 4096).unwrap(), block(BEYOND, 1));
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);

    // Two copies are enough again by the formula.
    waiting(&dev, &["volume", "scale", "db", "--consistency-factor", "0"]);
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 2, 3]);
    signal(away, "STOP");
    dev.eventually("it is missed", || {
        (dev.replica("db", "pool-c")["phase"] == "Offline").then_some(())
    });
    client.write(BEYOND * BLOCK, Bytes::from(block(BEYOND, 2)), true).unwrap();
    load.assert_progress(&dev, 100);
    signal(away, "CONT");
    assert_eq!(client.read(BEYOND * BLOCK, 4096).unwrap(), block(BEYOND, 2));
    client.stop();
    end(&scratch, dev, load, 3);
}

/// Returns the bytes that rebuilds copied since the target began.
fn moved_bytes(dev: &Dev) -> u64 {
    let metrics = ask_target(dev, "/metrics").expect("the target answers");
    let name = "quoin_target_rebuild_moved_bytes_total ";
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    line.expect("it counts what it moves").trim().parse().unwrap()
}

#[test]
fn a_returning_pool_gets_only_the_changes_and_is_not_replaced_with_healing_off() {
    const BLOCKS: u64 = 24_576;
    const CHANGED: u64 = 1024;
    let (scratch, dev) = cluster("delta", "4");
    dev.ok(&["volume", "create", "db", "--size", "96MiB", "--replicas", "3"]);
    let client = dev.client("db");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let write = |blocks: u64, version| {
        for first in (0..blocks).step_by(256) {
            let data: Vec<u8> = (first..first + 256).flat_map(|lba| block(lba, version)).collect();
            client.write(first * BLOCK, Bytes::from(data), false).unwrap();
        }
    };
    write(BLOCKS, 1);
    client.flush().unwrap();
    dev.wait_for_volume("db", "whole", all_in_sync);
    let (before, members) = (moved_bytes(&dev), known(&dev));
    let away = dev.pid(&members[2].0).unwrap();
    // The missing entries are sent where the others have not cut their logs yet, and nothing is
    // copied: then the replica is away once more, and for longer.
    let moved = (1..6).find_map(|attempt| {
        signal(away, "STOP");
        dev.eventually("it is missed", || {
            (dev.replica("db", &members[2].0)["phase"] == "Offline").then_some(())
        });
        // Writes beyond the limit of any retained log, of the same few blocks.
        (2..26).for_each(|version| write(CHANGED, attempt * 100 + version));
        client.flush().unwrap();
        std::thread::sleep(Duration::from_secs(attempt * 2));
        assert_eq!(known(&dev), members, "somebody came in its place");
        assert_eq!(dev.json(&["replica", "list", "db"]).as_array().unwrap().len(), 3);
        assert_eq!(events(&dev, "ReplicaHeals"), [""; 0], "replacing was turned off");
        signal(away, "CONT");
        dev.wait_for_volume("db", "whole", all_in_sync);
        // The bytes are counted at the target's next update of its metrics.
        std::thread::sleep(Duration::from_secs(1));
        Some(moved_bytes(&dev) - before).filter(|moved| *moved > 0)
    });
    let moved = moved.expect("it was never rebuilt");
    println!("{moved} bytes were copied");
    assert!((CHANGED * BLOCK..8 << 20).contains(&moved), "{moved} bytes were copied");
    client.stop();
    compare(&scratch, dev, 3);
}

/// Proves SCALE-CF-01, SCALE-LIST-02, SCALE-LIST-03, SCALE-LIST-04, SCALE-LIST-05, SCALE-KNOWN-03,
/// SCALE-ID-05, SCALE-STORY-03.
#[test]
fn the_list_and_the_factors_of_a_growing_volume_always_belong_to_one_step() {
    let (scratch, dev) = cluster("grow", "5");
    let load = volume(&dev, "1");
    let mut ever = list(&manifest(&dev)["status"]);
    for (factor, majority) in [(2, 2), (3, 2), (4, 3), (5, 3)] {
        let before = list(&manifest(&dev)["status"]);
        dev.ok(&["volume", "scale", "db", "--replicas", &factor.to_string()]);
        let after = dev.eventually("it has grown", || {
            let status = manifest(&dev)["status"].clone();
            let now = list(&status);
            let printed = (now.len() as u64, &status["consistencyFactor"]);
            assert_eq!(status["replicationFactor"], printed.0, "{status}");
            let old = [1, 2, 2, 3][factor as usize - 2];
            assert!(printed == (factor - 1, &old.into()) || printed == (factor, &majority.into()));
            (printed.0 == factor && status.get("changing").is_none()).then_some(now)
        });
        assert!(before.is_subset(&after));
        let new: Vec<_> = after.difference(&before).cloned().collect();
        let [(id, guid)] = &new[..] else { panic!("{new:?}") };
        assert!(ever.iter().all(|(i, g)| i != id && g != guid), "{id} {guid} was there before");
        ever.extend(new);
        load.assert_progress(&dev, 50);
    }
    dev.eventually("all of the list have quorum on", || {
        let shown = dev.json(&["replica", "list", "db"]);
        let replicas = shown.as_array().unwrap();
        let counts = |r: &Value| r["known"] == true && r["quorum"] == true;
        (replicas.len() == 5 && replicas.iter().all(counts)).then_some(())
    });
    end(&scratch, dev, load, 5);
}

#[test]
fn the_document_shows_positions_of_replicas_and_progress_of_rebuilds() {
    let (scratch, dev) = cluster("progress", "4");
    dev.ok(&["volume", "create", "db", "--size", "128MiB", "--replicas", "3"]);
    let client = dev.client("db");
    for first in (BEYOND..BEYOND + 24_000).step_by(200) {
        let data: Vec<u8> = (first..first + 200).flat_map(|lba| block(lba, 1)).collect();
        client.write(first * BLOCK, Bytes::from(data), false).unwrap();
    }
    client.flush().unwrap();
    client.stop();
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let shown = manifest(&dev);
    let old = list(&shown["status"]);
    let replicas = shown["status"]["replicas"].as_array().unwrap();
    assert!(replicas.len() == 3 && replicas.iter().all(|r| r.get("rebuild").is_none()), "{shown}");
    // A fast machine may finish between two polls; then it is made again.
    let look = || {
        dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
        dev.eventually("a rebuild is shown while it runs, or over", || {
            let status = manifest(&dev)["status"].clone();
            let replicas = status["replicas"].as_array().unwrap();
            let shown: Vec<_> = replicas.iter().filter(|r| r.get("rebuild").is_some()).collect();
            let [new] = shown[..] else {
                return (status["replicationFactor"] == 4).then_some(None);
            };
            assert!(old.iter().all(|(_, guid)| new["replicaGuid"] != *guid), "{status}");
            assert_eq!((&new["phase"], &new["quorum"]), (&"Rebuilding".into(), &"off".into()));
            Some(Some(new["rebuild"].clone()))
        })
    };
    let known: Vec<String> = known(&dev).into_iter().map(|(pool, ..)| pool).collect();
    let again = || {
        dev.wait_for_volume("db", "whole", |volume| {
            all_in_sync(volume) && factors(volume) == [4, 3, 4]
        });
        let pools = ["pool-a", "pool-b", "pool-c", "pool-d"];
        let fourth = pools.into_iter().find(|pool| !known.contains(&(*pool).to_owned())).unwrap();
        waiting(&dev, &["replica", "remove", "db", fourth]);
    };
    let seen = (0..10).find_map(|_| {
        look().or_else(|| {
            again();
            None
        })
    });
    let rebuild = seen.expect("one of ten is seen");
    let bytes = |field: &str| rebuild[field].as_u64().unwrap();
    assert!(bytes("doneBytes") <= bytes("totalBytes"), "{rebuild}");
    assert!(bytes("totalBytes") >= 24_000 * BLOCK, "{rebuild}");
    dev.wait_for_volume("db", "whole", |volume| {
        all_in_sync(volume) && factors(volume) == [4, 3, 4]
    });
    load.assert_progress(&dev, 100);
    load.verify();
    // All are at one position at rest, which is of the open epoch.
    dev.eventually("all replicas are at one position", || {
        let status = manifest(&dev)["status"].clone();
        let replicas = status["replicas"].as_array().unwrap();
        assert!(replicas.len() == 4 && replicas.iter().all(|r| r.get("rebuild").is_none()));
        let positions: BTreeSet<_> =
            replicas.iter().map(|r| r["position"].as_str().unwrap()).collect();
        let epoch = format!("{}.", status["epoch"]);
        (positions.len() == 1 && positions.first()?.starts_with(&epoch)).then_some(())
    });
    compare(&scratch, dev, 4);
}
