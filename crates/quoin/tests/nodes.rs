//! Nodes that are cordoned and drained, and volumes of more replicas than by default: a cluster of
//! several nodes, each with a pool of its own, under a client that verifies.

use crate::common;
use crate::support;

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Cluster, Place, eventually, signal};
use quoin_nbd::client::{Address, Client, ClientOptions};
use serde_json::Value;
use support::load::Load;

const WAIT: [&str; 3] = ["--wait", "--timeout", "170"];

fn cluster(name: &str, pools: usize, flags: &[&str]) -> Cluster {
    let mut cluster = Cluster::start(name, &Place::here(), flags);
    for n in 1..=pools {
        cluster.pool(&Place::here(), &format!("p{n}"), &[]);
    }
    cluster.node(&Place::here(), "n1", &[], &[]);
    cluster.wait_for_pools(pools);
    cluster
}

fn client(cluster: &Cluster) -> Client {
    let address = cluster.ok(&["volume", "attach", "db", "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1.to_owned();
    eventually("the volume is served", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.clone().into()))).ok()
    })
}

fn assert_progress(cluster: &Cluster, load: &Load) {
    load.assert_progress_or(100, || cluster.show_logs());
}

fn waiting(cluster: &Cluster, command: &[&str]) -> Value {
    let arguments: Vec<&str> = command.iter().copied().chain(WAIT).collect();
    cluster.json(&arguments)
}

fn refused(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.quoin(arguments);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {printed}");
    printed
}

fn all_in_sync(cluster: &Cluster) {
    cluster.wait_for_volume("db", "whole", |volume| {
        let replicas = volume["replicas"].as_array().unwrap();
        volume["changing"] == "" && replicas.iter().all(|r| r["phase"] == "InSync")
    });
}

/// Returns pools and GUIDs of the known replicas.
fn known(cluster: &Cluster) -> Vec<(String, String)> {
    let replicas = cluster.json(&["replica", "list", "db"]);
    let text = |r: &Value, key: &str| r[key].as_str().unwrap().to_owned();
    let replicas = replicas.as_array().unwrap().iter();
    let known = replicas.filter(|r| r["known"] == true);
    known.map(|r| (text(r, "pool"), text(r, "guid"))).collect()
}

fn replica_pools(cluster: &Cluster) -> Vec<String> {
    let mut replica_pools: Vec<_> = known(cluster).into_iter().map(|(pool, _)| pool).collect();
    replica_pools.sort();
    replica_pools
}

#[test]
fn nodes_are_cordoned_drained_and_opened_again_under_load_and_no_write_is_lost() {
    let cluster = cluster("nodes", 4, &["--replace-after", "off"]);
    // A pool's node has the pool's name.
    cluster.ok(&["node", "cordon", "p2"]);
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    assert_eq!(replica_pools(&cluster), ["p1", "p3", "p4"], "a cordoned node takes nothing new");
    let load = Load::start(client(&cluster), 3);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);
    let before = known(&cluster);

    // There is no destination while the only free one is closed.
    let text = refused(&cluster, &["node", "drain", "p1"]);
    assert!(text.contains("p2") && text.contains("nothing was begun"), "{text}");
    assert_eq!(known(&cluster), before);
    cluster.ok(&["node", "uncordon", "p2"]);
    let planned = cluster.json(&["node", "drain", "p1", "--dry-run"]);
    assert_eq!(planned["replicas"][0]["to"], "p2", "{planned}");
    assert_eq!(known(&cluster), before, "a dry run moves nothing");
    let drained = waiting(&cluster, &["node", "drain", "p1"]);
    assert_eq!(drained["state"], "drained", "{drained}");
    assert_eq!(replica_pools(&cluster), ["p2", "p3", "p4"]);
    let after = known(&cluster);
    let stayed = before.iter().filter(|(pool, _)| pool != "p1");
    assert!(stayed.clone().count() == 2 && stayed.clone().all(|stays| after.contains(stays)));
    assert_progress(&cluster, &load);

    // The pool can be removed once empty, and the volume does not miss it.
    let nobody = cluster.json(&["pool", "list"]);
    let pool = nobody.as_array().unwrap().iter().find(|pool| pool["name"] == "p1").unwrap();
    assert_eq!(pool["replicas"], 0, "{pool}");
    let text = refused(&cluster, &["node", "drain", "p3"]);
    assert!(text.contains("p1"), "a drained node takes nothing: {text}");
    cluster.ok(&["node", "uncordon", "p1"]);
    waiting(&cluster, &["node", "drain", "p3"]);
    assert_eq!(replica_pools(&cluster), ["p1", "p2", "p4"]);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);
    load.verify();
}

/// Starts a removal of the pool p1 that waits.
fn removal(cluster: &Cluster) -> Child {
    // A shell that starts the tests in the background makes them ignore SIGINT, and their children
    // too.
    let mut child = Command::new("env")
        .args(["--default-signal=INT", env!("CARGO_BIN_EXE_quoin")])
        .args(["pool", "remove", "p1"])
        .args(WAIT)
        .env("QUOIN_SOCKET", &cluster.admin_socket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(child.try_wait().unwrap(), None, "it waits");
    child
}

#[test]
fn a_removal_waits_until_its_pool_is_offline_and_drained_and_may_be_interrupted() {
    let mut cluster = cluster("removal", 4, &["--replace-after", "off"]);
    cluster.ok(&["pool", "cordon", "p4"]);
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    cluster.ok(&["pool", "uncordon", "p4"]);
    let load = Load::start(client(&cluster), 3);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);

    // The pool is online and in use.
    let mut waits = removal(&cluster);
    // The only pool that has space for the replica does not answer, so the drain continues.
    let free = cluster.process("p4").pid();
    signal(free, "STOP");
    cluster.ok(&["pool", "drain", "p1"]);
    let at = cluster.processes.iter().position(|process| process.name == "p1").unwrap();
    cluster.processes.remove(at).stop();
    let standing = |name: &str| {
        let pools = cluster.json(&["pool", "list"]);
        let pool = pools.as_array().unwrap().iter().find(|pool| pool["name"] == name).cloned();
        pool.map(|pool| (pool["state"].clone(), pool["cordon"].clone()))
    };
    cluster.eventually("it is offline, and not empty", || {
        standing("p1").filter(|standing| *standing == ("Offline".into(), "draining".into()))
    });
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(waits.try_wait().unwrap(), None, "it waits on");
    signal(waits.id(), "INT");
    let output = waits.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(standing("p1").is_some(), "nothing was done");
    assert_progress(&cluster, &load);

    let waits = removal(&cluster);
    signal(free, "CONT");
    let output = waits.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("pool p1 is removed"));
    assert_eq!(standing("p1"), None);
    assert_eq!(replica_pools(&cluster), ["p2", "p3", "p4"]);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);
    load.verify();
}

#[test]
fn more_replicas_than_the_default_limit_need_a_higher_limit() {
    let cluster = cluster("seven", 6, &["--max-replicas", "7", "--replace-after", "off"]);
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(client(&cluster), 3);
    assert_progress(&cluster, &load);
    let scaled = waiting(&cluster, &["volume", "scale", "db", "--replicas", "6"]);
    let factors = |volume: &Value| {
        ["replicationFactor", "consistencyFactor", "desiredReplicationFactor"]
            .map(|key| volume[key].as_u64().unwrap())
    };
    assert_eq!(factors(&scaled), [6, 4, 6]);
    let before = known(&cluster);
    assert_eq!(before.len(), 6);
    assert_progress(&cluster, &load);
    let text = refused(&cluster, &["volume", "scale", "db", "--replicas", "8"]);
    assert!(text.contains("8 is too many, a volume has at most 7"), "{text}");
    // The allowed number is another limit: there is no pool for it.
    let text = refused(&cluster, &["volume", "scale", "db", "--replicas", "7"]);
    assert!(text.contains("add a pool"), "{text}");
    let text = refused(&cluster, &["volume", "scale", "db", "--replicas", "5"]);
    assert!(text.contains("quoin replica remove"), "a smaller DRF than RF: {text}");
    assert_eq!(factors(&cluster.json(&["volume", "get", "db"])), [6, 4, 6]);
    assert_eq!(known(&cluster), before);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);
    load.verify();
}
