//! Common parts of the user stories of replicas: a cluster with a volume `db` under a load, its
//! state in the records, and every copy alone, read with nothing of Quoin running.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::load::Load;
use super::{Dev, Scratch, is_online};

const WAIT: [&str; 3] = ["--wait", "--timeout", "170"];

/// Starts a cluster that replaces nothing by itself.
pub fn cluster(name: &str, pools: &str) -> (Scratch, Dev) {
    healing(name, pools, "off")
}

/// Starts a cluster that replaces replicas by itself after this time.
pub fn healing(name: &str, pools: &str, after: &str) -> (Scratch, Dev) {
    let scratch = Scratch::new(name);
    let flags =
        ["--no-attach", "--pool-size", "512MiB", "--pools", pools, "--replace-after", after];
    let dev = Dev::start(&scratch.cluster(), &flags);
    (scratch, dev)
}

pub fn events(dev: &Dev, reason: &str) -> Vec<String> {
    let events = dev.ok(&["events", "-o", "json"]);
    let events: Vec<Value> = serde_json::from_str(&events).unwrap();
    let reported = events.iter().filter(|e| e["reason"] == reason);
    reported.map(|e| e["message"].as_str().unwrap().to_owned()).collect()
}

/// Settings of a cluster of `quoin dev`: its ports, among others.
pub fn settings(dev: &Dev) -> Value {
    let settings = std::fs::read(dev.directory.join("dev.json")).unwrap();
    serde_json::from_slice(&settings).unwrap()
}

/// Returns the target's own answer under a path, whether or not a controller answers.
pub fn ask_target(dev: &Dev, path: &str) -> Option<String> {
    ask(settings(dev)["target_http"].as_str()?, path)
}

/// Returns a process's answer under a path of its own HTTP address.
pub fn ask(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: quoin\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

/// Returns how many replicas the target has in this state, by its metrics.
pub fn connected_as(metrics: &str, state: &str) -> Option<u64> {
    let name = format!("quoin_target_replicas{{state=\"{state}\"}} ");
    metrics.lines().find_map(|line| line.strip_prefix(&name))?.trim().parse().ok()
}

/// Returns the newcomer, once its pool has made it and a target that would fill it is waited for.
pub fn made(dev: &Dev) -> Value {
    dev.eventually("it is made", || {
        let replicas = dev.json(&["replica", "list", "db"]);
        let new = replicas.as_array().unwrap().iter().find(|r| r["known"] == false).cloned()?;
        (new["phase"] == "Rebuilding").then_some(new)
    })
}

/// Returns how many replicas the records have in a pool.
pub fn held(dev: &Dev, pool: &str) -> u64 {
    let pools = dev.json(&["pool", "list"]);
    let held = pools.as_array().unwrap().iter().find(|p| p["name"] == pool).unwrap();
    held["replicas"].as_u64().unwrap()
}

/// Makes a volume `db` of 8 MiB, under a load.
pub fn volume(dev: &Dev, replicas: &str) -> Load {
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", replicas]);
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(dev, 100);
    load
}

pub fn waiting(dev: &Dev, command: &[&str]) -> Value {
    let arguments: Vec<&str> = command.iter().copied().chain(WAIT).collect();
    dev.json(&arguments)
}

pub fn factors(volume: &Value) -> [u64; 3] {
    ["replicationFactor", "consistencyFactor", "desiredReplicationFactor"]
        .map(|key| volume[key].as_u64().unwrap())
}

pub fn all_in_sync(volume: &Value) -> bool {
    is_online(volume)
        && volume["changing"] == ""
        && volume["replicas"].as_array().unwrap().iter().all(|r| r["phase"] == "InSync")
}

/// Returns the known replicas: pool, id and GUID of each.
pub fn known(dev: &Dev) -> Vec<(String, String, String)> {
    let replicas = dev.json(&["replica", "list", "db"]);
    let text = |r: &Value, key: &str| r[key].as_str().unwrap().to_owned();
    let replicas = replicas.as_array().unwrap();
    let known = replicas.iter().filter(|r| r["known"] == true);
    known.map(|r| (text(r, "pool"), text(r, "id"), text(r, "guid"))).collect()
}

/// Stops the load and the cluster, and compares the content of each copy alone with the others.
pub fn end(scratch: &Scratch, dev: Dev, load: Load, copies: usize) {
    dev.wait_for_volume("db", "whole", all_in_sync);
    load.verify();
    compare(scratch, dev, copies);
}

/// Stops the cluster, and compares the content of each copy alone with the others.
pub fn compare(scratch: &Scratch, dev: Dev, copies: usize) {
    dev.wait_for_volume("db", "whole", all_in_sync);
    let known = known(&dev);
    assert_eq!(known.len(), copies);
    let files: Vec<(PathBuf, String)> =
        known.into_iter().map(|(pool, _, guid)| (dev.pool_file(&pool), guid)).collect();
    dev.stop();
    let images: Vec<Vec<u8>> = files
        .iter()
        .map(|(file, guid)| {
            let image = scratch.0.join(format!("{guid}.img"));
            let exported = Command::new(env!("CARGO_BIN_EXE_quoin"))
                .args(["pool", "export"])
                .arg(file)
                .args(["--replica", guid, "--to"])
                .arg(&image)
                .output()
                .unwrap();
            assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
            std::fs::read(image).unwrap()
        })
        .collect();
    assert!(images[0].windows(8).any(|bytes| bytes == b"TESTDATA"));
    for image in &images[1..] {
        assert!(*image == images[0], "a copy differs");
    }
}

/// Returns the message of a command that must be refused.
pub fn refused(dev: &Dev, arguments: &[&str]) -> String {
    let output = dev.quoin(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
