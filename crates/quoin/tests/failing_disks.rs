//! Pools whose disks are failing, on real processes: emptied while they still answer, under a
//! client that verifies.

use crate::support;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use support::faulty::FaultyDisk;
use support::load::Load;
use support::{Dev, Scratch, can_attach, is_online, skipped};

/// Longer than the time after which a pool takes a disk for stalled.
const STALL: Duration = Duration::from_secs(21);

fn pool(dev: &Dev, name: &str) -> Value {
    let pools = dev.json(&["pool", "list"]);
    pools.as_array().unwrap().iter().find(|pool| pool["name"] == name).cloned().unwrap()
}

/// Waits until the pool is dying, for this reason, and holds nothing any more.
fn wait_until_emptied(dev: &Dev, name: &str, why: &str) {
    dev.eventually(&format!("{name} is called dying"), || {
        let events = dev.ok(&["events"]);
        let reported = |line: &&str| line.contains("PoolDying") && line.contains(name);
        let line = events.lines().find(reported)?.to_owned();
        assert!(line.contains(why), "{line}");
        Some(())
    });
    dev.eventually(&format!("{name} is emptied"), || {
        let pool = pool(dev, name);
        (pool["replicas"] == 0 && pool["cordon"] == "drained").then_some(())
    });
}

fn replica_pools(dev: &Dev) -> Vec<String> {
    let replicas = dev.json(&["replica", "list", "db"]);
    let known = replicas.as_array().unwrap().iter().filter(|r| r["known"] == true);
    known.map(|r| r["pool"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_pool_with_a_failing_disk_is_drained_before_it_is_lost() {
    if !can_attach() {
        return skipped("a disk that fails on demand needs root and /dev/fuse");
    }
    let scratch = Scratch::new("dying-pools");
    // Only replicas on failing disks may be replaced, and one stall is enough.
    let flags = [
        "--no-attach",
        "--pool-size",
        "256MiB",
        "--pools",
        "5",
        "--replace-after",
        "off",
        "--dying-stalls",
        "1",
        "--dying-errors",
        "4",
    ];
    Dev::start(&scratch.cluster(), &flags).stop();
    let disks = ["pool-a", "pool-b"].map(|name| {
        let data = scratch.cluster().join("pools").join(name).join("data");
        let [below, faulty]: [PathBuf; 2] =
            ["below", "disk"].map(|what| scratch.0.join(format!("{name}-{what}")));
        std::fs::rename(&data, &below).unwrap();
        let disk = FaultyDisk::serve(&faulty, &below);
        std::os::unix::fs::symlink(&faulty, &data).unwrap();
        disk
    });
    let dev = Dev::start(&scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 17);
    load.assert_progress(&dev, 200);
    dev.wait_for_volume("db", "online", is_online);
    let taken = replica_pools(&dev);
    assert!(["pool-a", "pool-b"].iter().all(|pool| taken.iter().any(|t| t == pool)), "{taken:?}");

    disks[0].refuse_syncs(5);
    wait_until_emptied(&dev, "pool-a", "its disk refused");
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", |volume| is_online(volume) && volume["changing"] == "");

    disks[1].stall_a_sync(STALL);
    wait_until_emptied(&dev, "pool-b", "took far too long");
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", |volume| is_online(volume) && volume["changing"] == "");

    let mut left = replica_pools(&dev);
    left.sort();
    assert_eq!(left, ["pool-c", "pool-d", "pool-e"]);
    load.verify();
    // The verification fails where a copy is bad or differs from another.
    dev.ok(&["volume", "verify", "db"]);
    dev.stop();
}

/// Proves that a pool whose file is moved away is told of while its data are still there, and that one whose file is
/// emptied stops counting, beside a client that loses nothing.
#[test]
fn a_pool_whose_file_is_moved_or_emptied_is_told_and_clients_go_on() {
    let scratch = Scratch::new("emptied-pool");
    let flags = ["--no-attach", "--pool-size", "256MiB", "--pools", "3", "--replace-after", "off"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 19);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "online", is_online);
    let file = |pool: &str| scratch.cluster().join("pools").join(pool).join("data");

    let away = scratch.0.join("away");
    std::fs::rename(file("pool-a"), &away).unwrap();
    let told = |reason: &str, pool: &str| {
        let events = dev.ok(&["events"]);
        let line = events.lines().find(|line| line.contains(reason) && line.contains(pool));
        line.map(str::to_owned)
    };
    let line = dev.eventually("the file is missed", || told("PoolFileGone", "pool-a"));
    assert!(line.contains("put the file back, or drain the pool"), "{line}");
    let shows = |is_gone: bool| {
        let shown = pool(&dev, "pool-a").to_string();
        (shown.contains("its data end with this process") == is_gone).then_some(())
    };
    dev.eventually("the list of pools says it", || shows(true));
    load.assert_progress(&dev, 100);
    assert!(is_online(&dev.json(&["volume", "get", "db"])), "its data are there still");
    std::fs::rename(&away, file("pool-a")).unwrap();
    dev.eventually("it is whole again", || shows(false));

    let emptied = std::fs::OpenOptions::new().write(true).open(file("pool-b")).unwrap();
    emptied.set_len(0).unwrap();
    let line = dev.eventually("the pool fails", || told("DiskFailed", "pool-b"));
    assert!(line.contains("its file was cut or emptied"), "{line}");
    dev.wait_for_volume("db", "without the pool", |volume| !is_online(volume));
    let reason = dev.eventually("the pool says why it is not served", || {
        let reason = pool(&dev, "pool-b").to_string();
        reason.contains("Quoin pool").then_some(reason)
    });
    assert!(!reason.contains("\"state\":\"Online\""), "{reason}");
    load.assert_progress(&dev, 100);
    load.verify();
    dev.stop();
}
