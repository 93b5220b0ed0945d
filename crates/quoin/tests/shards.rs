//! A target of several shards, as on any machine with more than a few cores, on real processes.

use crate::support;

use std::process::Command;

use support::load::Load;
use support::{Dev, Scratch, is_online};

const SHARDS: usize = 3;
const VOLUMES: [&str; 5] = ["v1", "v2", "v3", "v4", "v5"];

/// Returns how many threads of the target serve volumes.
fn shards(dev: &Dev) -> usize {
    let tasks = format!("/proc/{}/task", dev.pid("target").unwrap());
    let names = std::fs::read_dir(tasks)
        .unwrap()
        .flatten()
        .map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    names.filter(|name| name.starts_with("shard-")).count()
}

#[test]
fn volumes_of_several_shards_are_independent_and_survive_the_target() {
    let scratch = Scratch::new("shards");
    let mut quoin = Command::new(env!("CARGO_BIN_EXE_quoin"));
    quoin.env("QUOIN_TARGET_SHARDS", SHARDS.to_string());
    let flags = ["--no-attach", "--pool-size", "512MiB"];
    let dev = Dev::start_by(quoin, &scratch.cluster(), &flags);
    assert_eq!(shards(&dev), SHARDS);
    for name in VOLUMES {
        dev.ok(&["volume", "create", name, "--size", "16MiB", "--replicas", "3"]);
    }
    let loads: Vec<Load> =
        (1..).zip(VOLUMES).map(|(seed, name)| Load::start(dev.client(name), seed)).collect();
    loads.iter().for_each(|load| load.assert_progress(&dev, 200));

    // An operation on one disturbs no other, whichever shard they share.
    dev.ok(&["volume", "resize", "v2", "--size", "32MiB"]);
    dev.wait_for_volume("v2", "grown", |volume| volume["sizeBytes"] == 32 << 20);
    let mut loads = loads.into_iter();
    let kept: Vec<Load> = loads.by_ref().take(3).collect();
    let [detached, deleted] = [loads.next().unwrap(), loads.next().unwrap()];
    detached.verify();
    deleted.verify();
    dev.ok(&["volume", "detach", "v4"]);
    dev.ok(&["volume", "detach", "v5"]);
    dev.ok(&["volume", "delete", "v5", "--yes"]);
    dev.ok(&["volume", "create", "v6", "--size", "16MiB", "--replicas", "3"]);
    let fourth = dev.client("v4");
    fourth.read(0, 4096).expect("it is served again");
    let sixth = Load::start(dev.client("v6"), 60);
    kept.iter().for_each(|load| load.assert_progress(&dev, 100));

    dev.kill("target");
    kept.iter().for_each(|load| load.assert_progress(&dev, 200));
    assert_eq!(shards(&dev), SHARDS);
    for name in ["v1", "v2", "v3", "v4", "v6"] {
        dev.wait_for_volume(name, "online", is_online);
    }
    sixth.assert_progress(&dev, 200);
    fourth.read(0, 4096).expect("it is served by the next target");
    fourth.stop();
    kept.into_iter().chain([sixth]).for_each(Load::verify);
    dev.stop();
}
