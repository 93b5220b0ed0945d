//! Group snapshots on real processes: volumes whose targets are on different nodes, with writes that
//! follow each other from one volume to the other.

use crate::common::{Cluster, Place};
use crate::support;

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use quoin_nbd::client::{Address, Client, ClientOptions};
use serde_json::Value;
use support::{Dev, Scratch, block, eventually, signal};

const BLOCK: u64 = 4096;
/// Each version has a block of its own for a while, so that the newest one of a snapshot is found.
const BLOCKS: u64 = 2000;
const VOLUMES: [&str; 2] = ["db", "log"];

fn connect(address: &str) -> Client {
    let socket = address.split_once("socket=").unwrap().1.trim().to_owned();
    eventually("its target listens", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.clone().into()))).ok()
    })
}

/// The newest version in an image.
fn newest(image: &std::fs::File) -> u64 {
    let mut read = vec![0; BLOCK as usize];
    let mut newest = 0;
    for lba in 0..BLOCKS {
        image.read_exact_at(&mut read, lba * BLOCK).unwrap();
        if read.starts_with(b"TESTDATA") {
            let version = u64::from_le_bytes(read[16..24].try_into().unwrap());
            assert!(read == block(lba, version), "block {lba} is of no version");
            newest = newest.max(version);
        }
    }
    newest
}

fn export(data: &str, volume: &str, id: &str, to: &str) -> std::fs::File {
    let _ = std::fs::remove_file(to);
    let arguments = ["pool", "export", data, "--replica", volume, "--snapshot", id, "--to", to];
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_quoin")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::File::open(to).unwrap()
}

/// Each write goes to the first volume, and once it is answered to the second one: so a group has at
/// most one more of the first.
///
/// Proves CSI-GROUPCREATE-02: with targets on two nodes.
#[test]
fn a_group_over_two_nodes_never_has_a_write_without_the_one_that_was_answered_before_it() {
    let here = Place::here();
    let mut cluster = Cluster::start("group-snapshots", &here, &[]);
    cluster.pool(&here, "p1", &[]);
    cluster.node(&here, "n1", &[], &[]);
    let (state, run, token) =
        (cluster.path("node-2"), cluster.path("run-2"), cluster.token("node"));
    let second = ["target", "--name", "n2", "--state", &state, "--run", &run, "--join", &token];
    let mut second: Vec<String> = second.map(String::from).to_vec();
    second.extend(["--controller".into(), cluster.controller.clone()]);
    cluster.run(&here, "target-2", second);
    cluster.wait_for_pools(1);
    for volume in VOLUMES {
        cluster.ok(&["volume", "create", volume, "--size", "16MiB", "--replicas", "1"]);
    }
    let db = connect(&cluster.ok(&["volume", "attach", "db", "--nbd"]));
    let address = cluster.eventually("the second node takes it", || {
        let attached = cluster.quoin(&["volume", "attach", "log", "--nbd", "--run", &run]);
        attached.status.success().then(|| String::from_utf8(attached.stdout).unwrap())
    });
    let log = connect(&address);
    assert_eq!(cluster.json(&["volume", "get", "log"])["nodes"][0], "n2");

    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let groups: Vec<Value> = std::thread::scope(|scope| {
        scope.spawn(|| {
            for version in 1.. {
                let lba = version % BLOCKS;
                for client in [&db, &log] {
                    client.write(lba * BLOCK, Bytes::from(block(lba, version)), false).unwrap();
                }
                written.store(version, Ordering::Relaxed);
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let groups = (0..6).map(|n| {
            let before = written.load(Ordering::Relaxed);
            eventually("writes go on", || {
                (written.load(Ordering::Relaxed) > before + 20).then_some(())
            });
            let name = format!("g{n}");
            cluster.json(&["snapshot", "create", "--group", &name, "db", "log"])
        });
        let groups = groups.collect();
        stop.store(true, Ordering::Relaxed);
        groups
    });
    db.stop();
    log.stop();
    let listed = cluster.json(&["snapshot", "group", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), groups.len());
    let (data, to) = (cluster.path("p1-data"), cluster.path("image"));
    cluster.processes.retain_mut(|process| process.name == "controller");
    let mut last = 0;
    for group in &groups {
        assert_eq!(group["phase"], "Ready", "{group}");
        let versions = [0, 1].map(|n| {
            let member = &group["members"][n];
            assert_eq!(member["volume"], VOLUMES[n]);
            let id = member["snapshot"]["id"].as_str().unwrap();
            newest(&export(&data, VOLUMES[n], id, &to))
        });
        let [first, second] = versions;
        assert!(first == second || first == second + 1, "{versions:?} of {group}");
        assert!(second > last, "each one is later: {versions:?}");
        last = second;
    }
}

/// What a group needs is away or dies in the middle; writes go on within the longest hold.
#[test]
fn a_group_survives_no_kill_in_the_middle_and_the_same_command_makes_it_afterwards() {
    let scratch = Scratch::new("group-kills");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB"]);
    for volume in VOLUMES {
        dev.ok(&["volume", "create", volume, "--size", "16MiB", "--replicas", "3"]);
    }
    let client = dev.client("db");
    client.write(0, Bytes::from(block(0, 1)), false).unwrap();
    // The other one is attached nowhere: a target is lent to it.
    let made = dev.json(&["snapshot", "create", "--group", "first", "db", "log"]);
    assert_eq!(made["phase"], "Ready", "{made}");
    for victim in ["controller", "target"] {
        let stopped: Vec<_> =
            ["pool-a", "pool-b"].map(|pool| dev.pid(pool).unwrap()).into_iter().collect();
        stopped.iter().for_each(|pid| signal(*pid, "STOP"));
        std::thread::scope(|scope| {
            let user = &*dev;
            let asking = scope.spawn(move || {
                user.quoin(&["snapshot", "create", "--group", victim, "db", "log", "--no-wait"])
            });
            std::thread::sleep(Duration::from_millis(700));
            dev.kill(victim);
            let _outcome = asking.join().unwrap();
        });
        stopped.iter().for_each(|pid| signal(*pid, "CONT"));
        let made = dev.eventually("the same command makes it", || {
            let output =
                dev.quoin(&["snapshot", "create", "--group", victim, "db", "log", "-o", "json"]);
            serde_json::from_slice::<Value>(&output.stdout).ok()
        });
        assert_eq!(made["phase"], "Ready", "{made}");
        client.write(0, Bytes::from(block(0, 2)), false).unwrap();
    }
    let listed = dev.json(&["snapshot", "group", "list"]);
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|g| g["name"].clone()).collect();
    assert_eq!(names, ["first", "controller", "target"]);
    // Attempts that did not count have left nothing.
    dev.eventually("six snapshots are there", || {
        let replica = dev.json(&["snapshot", "list"]);
        (replica.as_array()?.len() == 6).then_some(())
    });
    for name in ["first", "controller", "target"] {
        dev.ok(&["snapshot", "group", "delete", name, "--yes"]);
    }
    assert_eq!(dev.json(&["snapshot", "list"]).as_array().unwrap().len(), 0);
    client.stop();
    dev.stop();
}
