//! Two clusters, of which one keeps copies of what the other one has: points, moves, disasters, and back.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quoin_nbd::client::{Address, Client, ClientOptions};
use serde_json::Value;

use crate::common::dev::Dev;
use crate::common::{Cluster, Scratch, User, signal};
use crate::support::{block, stories};

const BLOCK: u64 = 4096;

/// A cluster and its peer, each with one pool.
pub struct Two {
    pub dev: Dev,
    pub second: User,
    pub scratch: Scratch,
}

impl Two {
    fn start(name: &str) -> Self {
        Self::start_with(name, &["--no-attach"])
    }

    pub fn start_with(name: &str, flags: &[&str]) -> Self {
        let scratch = Scratch::new(name);
        let directory = scratch.cluster();
        let all = ["--peer", "--pools", "1", "--pool-size", "2GiB"];
        let dev = Dev::start(&directory, &[&all[..], flags].concat());
        dev.wait_for_line("A second cluster is up");
        let second = User {
            admin_socket: directory.join("peer/run/admin.sock"),
            logs: directory.join("peer/logs"),
        };
        Self { dev, second, scratch }
    }

    fn create(&self, name: &str, size: &str) {
        self.dev.ok(&["volume", "create", name, "--size", size, "--replicas", "1"]);
    }

    pub fn enable(&self, of: &str) {
        self.dev.ok(&["mirror", "enable", of, "--to", "second", "--every", "10s", "--wait"]);
    }

    /// Directory of the second cluster.
    pub fn of_second(&self) -> PathBuf {
        self.dev.directory.join("peer")
    }

    pub fn stop(self) {
        self.dev.stop();
        drop(self.scratch);
    }
}

/// Processes without which a cluster is lost.
pub const LOST: [&str; 3] = ["controller", "target", "mirror"];

/// Ends a process of the cluster in this directory, or lets it start again.
fn hold(directory: &Path, process: &str, is_held: bool) {
    hold_all(directory, &[process], is_held);
}

/// Ends processes of the cluster in this directory together, or lets them start again.
pub fn hold_all(directory: &Path, processes: &[&str], is_held: bool) {
    let holds = processes.iter().map(|process| directory.join(format!("run/hold-{process}")));
    if !is_held {
        return holds.for_each(|hold| std::fs::remove_file(hold).unwrap());
    }
    holds.for_each(|hold| std::fs::write(hold, "").unwrap());
    let text = std::fs::read(directory.join("run/processes.json")).unwrap();
    let pids: BTreeMap<String, i64> = serde_json::from_slice(&text).unwrap();
    processes.iter().for_each(|process| signal(pids[*process], "KILL"));
    for process in processes {
        let gone = format!("/proc/{}/fd", pids[*process]);
        crate::common::eventually("it is gone", || std::fs::read_dir(&gone).is_err().then_some(()));
    }
}

fn client(user: &User, volume: &str) -> Client {
    client_by(user, &["volume", "attach", volume, "--nbd"])
}

pub fn client_by(user: &User, attach: &[&str]) -> Client {
    let mut address = String::new();
    user.eventually("the volume is attached", || {
        let output = user.quoin(attach);
        address = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        let is_done = output.status.success();
        if !is_done {
            eprintln!("{attach:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        is_done.then_some(())
    });
    let socket = address.split_once("socket=").unwrap().1.to_owned();
    user.eventually("the volume is served", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.clone().into()))).ok()
    })
}

pub fn detach(user: &User, volume: &str, client: Client) {
    drop(client);
    user.ok(&["volume", "detach", volume]);
}

fn status(user: &User, of: &str) -> Value {
    user.json(&["mirror", "status", of])
}

fn wait_for_role(user: &User, of: &str, role: &str) {
    let mut last = Value::Null;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(90) {
        last = status(user, of);
        if last["role"] == role {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    user.show_logs();
    panic!("{of} is not {role}: {last:#}");
}

fn refused(user: &User, arguments: &[&str]) -> String {
    let output = user.quoin(arguments);
    assert!(!output.status.success(), "{arguments:?} was not refused");
    String::from_utf8(output.stderr).unwrap()
}

/// Writes these versions of blocks, each acknowledged.
pub fn write(client: &Client, blocks: &[(u64, u64)]) {
    for (lba, version) in blocks {
        client.write(lba * BLOCK, block(*lba, *version).into(), false).unwrap();
    }
    client.flush().unwrap();
}

#[track_caller]
pub fn assert_holds(client: &Client, blocks: &[(u64, u64)]) {
    let newest: BTreeMap<u64, u64> = blocks.iter().copied().collect();
    for (lba, version) in newest {
        let found = client.read(lba * BLOCK, BLOCK as u32).unwrap();
        assert!(found[..] == block(lba, version)[..], "block {lba} has not version {version}");
    }
}

pub fn some(from: u64, count: u64, version: u64) -> Vec<(u64, u64)> {
    (from..from + count).map(|lba| (lba * 7 % 4096, version)).collect()
}

/// Proves that a planned move loses nothing, in both directions, and that a copy is nobody's but the mirror's.
#[test]
fn a_volume_moves_to_the_other_cluster_and_back_with_every_acknowledged_write() {
    let two = Two::start("mirror-move");
    let (first, second) = (&two.dev, &two.second);
    two.create("db", "64MiB");
    let here = client(first, "db");
    let mut written = some(0, 300, 1);
    write(&here, &written);
    two.enable("db");
    assert_eq!(status(second, "db")["role"], "secondary");

    // A copy is published, changed and deleted by nobody.
    let published = refused(second, &["volume", "attach", "db", "--nbd"]);
    assert!(published.contains("copy") && published.contains("promote"), "{published}");
    let grown = refused(second, &["volume", "resize", "db", "--size", "128MiB"]);
    assert!(grown.contains("copy"), "{grown}");
    let cut = refused(second, &["snapshot", "create", "db"]);
    assert!(cut.contains("copy"), "{cut}");
    let cut = refused(second, &["snapshot", "create", "--group", "both", "db"]);
    assert!(cut.contains("copy"), "{cut}");
    let deleted = refused(second, &["volume", "delete", "db", "--yes"]);
    assert!(deleted.contains("copy") && deleted.contains("mirror disable"), "{deleted}");
    second.ok(&["mirror", "disable", "db"]);
    assert_eq!(status(second, "db")["role"], "secondary", "a clean-up changes nothing");
    let mirrored = refused(first, &["volume", "delete", "db", "--yes"]);
    assert!(mirrored.contains("detach") || mirrored.contains("mirror disable"), "{mirrored}");
    let live = refused(second, &["mirror", "promote", "db"]);
    assert!(live.contains("demote"), "{live}");
    let used = refused(first, &["mirror", "demote", "db"]);
    assert!(used.contains("unpublish") && used.contains("--force"), "{used}");

    let more = some(100, 300, 2);
    write(&here, &more);
    written.extend(more);
    detach(first, "db", here);
    first.ok(&["mirror", "demote", "db"]);
    first.ok(&["mirror", "demote", "db"]);
    let promoted = second.ok(&["mirror", "promote", "db"]);
    assert!(promoted.contains("primary here, in generation 2"), "{promoted}");
    second.ok(&["mirror", "promote", "db"]);
    assert_eq!(status(first, "db")["role"], "secondary");
    let there = client(second, "db");
    assert_holds(&there, &written);

    // And back: the first cluster gets what changed alone.
    let more = some(50, 200, 3);
    write(&there, &more);
    written.extend(more);
    detach(second, "db", there);
    second.ok(&["mirror", "demote", "db"]);
    first.ok(&["mirror", "promote", "db"]);
    let here = client(first, "db");
    assert_holds(&here, &written);
    detach(first, "db", here);

    first.ok(&["mirror", "disable", "db"]);
    wait_for_role(second, "db", "orphan");
    first.eventually("the record goes once the other side knows", || {
        let output = first.quoin(&["mirror", "status", "db"]);
        String::from_utf8(output.stderr).unwrap().contains("not mirrored").then_some(())
    });
    second.ok(&["mirror", "promote", "db"]);
    let there = client(second, "db");
    detach(second, "db", there);
    two.stop();
}

/// Proves that a promotion with force shows the last complete point, that the other side is then told to have
/// diverged, and that a resync keeps what it discards.
#[test]
fn a_lost_cluster_is_replaced_at_its_last_point_and_comes_back_as_a_copy() {
    let two = Two::start("mirror-disaster");
    let (first, second) = (&two.dev, &two.second);
    // The second cluster is the one that is lost.
    second.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "1"]);
    let there = client(second, "db");
    let kept = some(0, 300, 1);
    write(&there, &kept);
    second.ok(&["mirror", "enable", "db", "--to", "first", "--every", "10s", "--wait"]);
    let silent = refused(first, &["mirror", "promote", "db", "--force"]);
    assert!(silent.contains("demote"), "it is heard: {silent}");
    hold(&two.of_second(), "mirror", true);
    let lost = some(0, 10, 2);
    write(&there, &lost);
    first.eventually("the other cluster counts as silent", || {
        let output = first.quoin(&["mirror", "promote", "db"]);
        let text = String::from_utf8(output.stderr).unwrap();
        text.contains("only force promotes").then_some(())
    });
    let promoted = first.ok(&["mirror", "promote", "db", "--force"]);
    assert!(promoted.contains("generation 2") && promoted.contains("is not here"), "{promoted}");
    let here = client(first, "db");
    assert_holds(&here, &kept);
    let newer = some(1000, 50, 3);
    write(&here, &newer);

    // The old side is back: both wrote, and neither is overwritten.
    hold(&two.of_second(), "mirror", false);
    first.eventually("the split is seen", || {
        status(first, "db")["message"].as_str()?.contains("split brain").then_some(())
    });
    assert_holds(&there, &lost);
    detach(second, "db", there);
    second.ok(&["mirror", "demote", "db"]);
    wait_for_role(second, "db", "diverged");
    let aborted = refused(second, &["mirror", "promote", "db", "--force"]);
    assert!(aborted.contains("resync --force") && aborted.contains("accept-diverged"), "{aborted}");
    let unforced = refused(second, &["mirror", "resync", "db"]);
    assert!(unforced.contains("keeps what this one wrote"), "{unforced}");
    second.ok(&["mirror", "resync", "db", "--force"]);
    let kept_lost = status(second, "db")["lost"].as_str().unwrap().to_owned();
    assert!(kept_lost.starts_with("lost-"), "{kept_lost}");

    // Failback, with what the first cluster wrote; and what was discarded can be looked at.
    detach(first, "db", here);
    first.ok(&["mirror", "demote", "db"]);
    second.ok(&["mirror", "promote", "db"]);
    let there = client(second, "db");
    assert_holds(&there, &[kept.clone(), newer].concat());
    detach(second, "db", there);
    second.ok(&["volume", "create", "old", "--from-snapshot", &kept_lost]);
    let old = client(second, "old");
    assert_holds(&old, &[kept, lost].concat());
    detach(second, "old", old);
    two.stop();
}

/// Proves that a group has one point over all its members, that a member joins, that a copy is cloned for a drill,
/// and that sizes travel.
#[test]
fn a_group_is_mirrored_grows_and_is_drilled_on_its_copy() {
    let two = Two::start("mirror-group");
    let (first, second) = (&two.dev, &two.second);
    for name in ["data", "log", "late"] {
        two.create(name, "32MiB");
    }
    first.ok(&["group", "create", "shop", "data", "log"]);
    let alone = refused(first, &["mirror", "enable", "data"]);
    assert!(alone.contains("group"), "{alone}");
    let (data, log) = (client(first, "data"), client(first, "log"));
    two.enable("shop");
    let versions = |version| some(0, 40, version);
    for version in 1..=3 {
        write(&data, &versions(version));
        write(&log, &versions(version));
    }
    let grown = ["volume", "resize", "data", "--size", "48MiB"];
    first.ok(&grown);
    first.ok(&["group", "modify", "shop", "--add", "late"]);
    let late = client(first, "late");
    write(&late, &versions(7));
    first.eventually("the copy has all of it", || {
        let status = status(first, "shop");
        let members = status["members"].as_array()?;
        let has_all = members.len() == 3 && members.iter().all(|m| m["hasBase"] == true);
        let point = second.json(&["mirror", "points", "shop"]);
        let is_complete =
            point.as_array()?.iter().any(|p| p["is"].as_str().unwrap().contains("complete"));
        (has_all && is_complete && status["lagMs"].as_u64()? < 3000).then_some(())
    });
    assert_eq!(second.json(&["group", "get", "shop"])["volumes"].as_array().unwrap().len(), 3);
    let size = |user: &User| user.json(&["volume", "get", "data"])["sizeBytes"].as_u64();
    second.eventually("the copy is as large", || (size(second)? >= size(first)?).then_some(()));

    second.ok(&["volume", "create", "drill", "--from-volume", "log"]);
    let drill = client(second, "drill");
    assert_holds(&drill, &versions(3));
    detach(second, "drill", drill);

    detach(first, "data", data);
    detach(first, "log", log);
    detach(first, "late", late);
    first.ok(&["mirror", "demote", "shop"]);
    second.ok(&["mirror", "promote", "shop"]);
    for (name, version) in [("data", 3), ("log", 3), ("late", 7)] {
        let there = client(second, name);
        assert_holds(&there, &versions(version));
        detach(second, name, there);
    }
    wait_for_role(first, "shop", "secondary");

    // A member that leaves is a volume of its own on both sides.
    second.ok(&["group", "modify", "shop", "--remove", "late"]);
    for side in [second, first] {
        side.eventually("it is a volume of its own", || {
            side.json(&["volume", "get", "late"])["mirror"].is_null().then_some(())
        });
        let left = client(side, "late");
        assert_holds(&left, &versions(7));
        detach(side, "late", left);
        let members = status(side, "shop")["members"].as_array().unwrap().len();
        assert_eq!(members, 2);
    }
    two.stop();
}

/// Proves that records which are restored from before a promotion make no second primary, and that those of a copy
/// which are lost are made again from its pools and its peer.
#[test]
fn records_that_are_restored_or_lost_take_no_role_back_and_lose_no_copy() {
    let two = Two::start("mirror-records");
    let (first, second) = (&two.dev, &two.second);
    two.create("db", "64MiB");
    let here = client(first, "db");
    let mut written = some(0, 100, 1);
    write(&here, &written);
    two.enable("db");
    let backup = two.scratch.0.join("backup").display().to_string();
    second.ok(&["controller", "backup", &backup]);
    detach(first, "db", here);
    first.ok(&["mirror", "demote", "db"]);
    second.ok(&["mirror", "promote", "db"]);
    let there = client(second, "db");
    let more = some(50, 100, 2);
    write(&there, &more);
    written.extend(more);

    let state = two.of_second().join("controller").display().to_string();
    hold(&two.of_second(), "controller", true);
    second.ok(&["controller", "restore", &backup, "--state", &state, "--replace"]);
    hold(&two.of_second(), "controller", false);
    second.eventually("the records are compared", || {
        second.quoin(&["controller", "recover"]).status.success().then_some(())
    });
    let role = status(second, "db");
    assert_eq!((&role["role"], &role["generation"]), (&"primary".into(), &2.into()), "{role:#}");
    second.eventually("it is sure of its points", || {
        (status(second, "db")["unsure"] == false).then_some(())
    });
    assert_eq!(status(first, "db")["role"], "secondary");
    assert_holds(&there, &written);
    let more = some(70, 100, 3);
    write(&there, &more);
    written.extend(more);

    // The copy's records are gone, and its peer with them.
    let directory = two.dev.directory.clone();
    hold(&directory, "controller", true);
    let state = directory.join("controller");
    std::fs::remove_file(state.join("records.redb")).unwrap();
    first.ok(&["controller", "init", "--state", state.to_str().unwrap(), "--records-lost"]);
    hold(&directory, "controller", false);
    first.eventually("the records are made again", || {
        first.quoin(&["controller", "recover"]).status.success().then_some(())
    });
    assert_eq!(status(first, "db")["role"], "secondary");
    let publish = refused(first, &["volume", "attach", "db", "--nbd"]);
    assert!(publish.contains("copy"), "{publish}");
    let settings = std::fs::read(two.of_second().join("dev.json")).unwrap();
    let settings: Value = serde_json::from_slice(&settings).unwrap();
    let address = settings["controller"]["listen"].as_str().unwrap();
    first.eventually("both are peers again", || {
        let invite = ["mirror", "invite", "--name", "first", "--address", address];
        let paired = first.quoin(&["mirror", "pair", "--name", "second", &second.ok(&invite)]);
        let peers = first.json(&["mirror", "peers"]);
        let is_known = peers[0]["addresses"].as_array().is_some_and(|all| !all.is_empty());
        (paired.status.success() && is_known).then_some(())
    });
    first.eventually("the copy follows again", || {
        let status = status(second, "db");
        let is_synced = status["lagMs"].as_u64().is_some_and(|lag| lag < 20_000);
        (status["health"] == "healthy" && is_synced).then_some(())
    });
    detach(second, "db", there);
    second.ok(&["mirror", "demote", "db"]);
    first.ok(&["mirror", "promote", "db"]);
    let here = client(first, "db");
    assert_holds(&here, &written);
    detach(first, "db", here);
    two.stop();
}

/// Proves that a planned move loses nothing where each part of both clusters is killed in the middle of it: whatever
/// was begun goes on from the records.
#[test]
fn a_group_moves_to_and_fro_while_every_part_is_killed() {
    let two = Two::start("mirror-kills");
    let sides = [two.dev.directory.clone(), two.of_second()];
    let users: [&User; 2] = [&two.dev, &two.second];
    let names = ["a", "b", "c"];
    for name in names {
        two.create(name, "64MiB");
    }
    two.dev.ok(&["group", "create", "all", "a", "b", "c"]);
    two.enable("all");
    let mut written: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    let mut random = 88_172_645_463_325_252u64;
    let mut draw = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    for round in 0..6u64 {
        let (from, to) = ((round % 2) as usize, ((round + 1) % 2) as usize);
        for name in names {
            let client = client(users[from], name);
            let known = written.entry(name).or_default();
            assert_holds(&client, known);
            let more = some(draw(2000), 100 + draw(400), round + 2);
            write(&client, &more);
            known.extend(more);
            detach(users[from], name, client);
        }
        let parts = ["mirror", "target", "controller", "pool-a"];
        let victims: Vec<(usize, &str)> =
            (0..3).map(|_| (draw(2) as usize, parts[draw(4) as usize])).collect();
        let pauses: Vec<u64> = (0..3).map(|_| draw(700)).collect();
        let killing = {
            let (sides, victims) = (sides.clone(), victims.clone());
            std::thread::spawn(move || {
                for ((side, part), pause_ms) in victims.into_iter().zip(pauses) {
                    std::thread::sleep(Duration::from_millis(pause_ms));
                    kill(&sides[side], part);
                }
            })
        };
        println!("round {round}: {victims:?}");
        asked_until(users[from], &["mirror", "demote", "all"]);
        asked_until(users[to], &["mirror", "promote", "all"]);
        killing.join().unwrap();
        wait_for_role(users[to], "all", "primary");
        wait_for_role(users[from], "all", "secondary");
    }
    two.stop();
}

/// Kills a process, which its supervisor starts again.
fn kill(directory: &Path, process: &str) {
    let text = std::fs::read(directory.join("run/processes.json")).unwrap_or_default();
    let pids: BTreeMap<String, i64> = serde_json::from_slice(&text).unwrap_or_default();
    if let Some(pid) = pids.get(process) {
        let _ = std::process::Command::new("kill").args(["-KILL", &pid.to_string()]).status();
    }
}

/// Asks again where a part that was killed does not answer.
#[track_caller]
fn asked_until(user: &User, arguments: &[&str]) {
    let began = Instant::now();
    let mut last = String::new();
    while began.elapsed() < Duration::from_secs(90) {
        let output = user.quoin(arguments);
        if output.status.success() {
            return;
        }
        last = String::from_utf8_lossy(&output.stderr).into_owned();
        std::thread::sleep(Duration::from_millis(200));
    }
    user.show_logs();
    panic!("{arguments:?}: {last}");
}

/// Proves that an encrypted volume travels as it is stored, without its key, and that a rotation of the key slots
/// counts on the other side too.
#[test]
fn an_encrypted_volume_is_opened_on_the_other_side_by_its_key_alone() {
    let two = Two::start("mirror-keys");
    let (first, second) = (&two.dev, &two.second);
    let file = |name: &str, key: &str| {
        let path = two.scratch.0.join(name);
        std::fs::write(&path, key).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        path.display().to_string()
    };
    let (key, new) = (file("key", &"5c".repeat(32)), file("new", &"a7".repeat(32)));
    let create = ["volume", "create", "db", "--size", "32MiB", "--replicas", "1", "--encrypt"];
    first.ok(&[&create[..], &["--key-file", &key]].concat());
    let here = client_by(first, &["volume", "attach", "db", "--nbd", "--key-file", &key]);
    let written = some(0, 100, 1);
    write(&here, &written);
    two.enable("db");
    first.ok(&["volume", "key", "rotate", "db", "--key-file", &key, "--new-key-file", &new]);
    detach(first, "db", here);
    let slots = |user: &User| user.json(&["volume", "get", "db"])["encryption"]["keySlots"].clone();
    second.eventually("the key slots of the copy are those of its source", || {
        (slots(second) == slots(first)).then_some(())
    });
    first.ok(&["mirror", "demote", "db"]);
    second.ok(&["mirror", "promote", "db"]);
    let without = refused(second, &["volume", "attach", "db", "--nbd"]);
    assert!(without.contains("--key-file"), "{without}");
    let former = refused(second, &["volume", "attach", "db", "--nbd", "--key-file", &key]);
    assert!(former.contains("opens no key slot"), "{former}");
    let there = client_by(second, &["volume", "attach", "db", "--nbd", "--key-file", &new]);
    assert_holds(&there, &written);
    detach(second, "db", there);
    two.stop();
}

/// Proves that the lag in bytes is what was written since the last common point, each block once, on both sides, in the
/// points and in the metrics.
#[test]
fn the_lag_in_bytes_is_what_a_delta_would_carry_on_either_side() {
    let two = Two::start("mirror-lag");
    let (first, second) = (&two.dev, &two.second);
    two.create("db", "64MiB");
    let here = client(first, "db");
    write(&here, &some(0, 100, 1));
    first.ok(&["mirror", "enable", "db", "--to", "second", "--every", "1h", "--wait"]);
    let settings = stories::settings(&two.dev);
    let http = settings["controller"]["http"].as_str().unwrap().to_owned();
    let is = |bytes: u64| {
        let told = move |status: &Value| {
            status["lagBytes"].as_u64() == Some(bytes) && status["lagBytesAreLeast"] == false
        };
        for side in [first as &User, second] {
            let mut last = Value::Null;
            let began = Instant::now();
            while !told(&last) {
                assert!(began.elapsed() < Duration::from_secs(60), "not {bytes} bytes: {last:#}");
                std::thread::sleep(Duration::from_millis(200));
                last = status(side, "db");
            }
            let points = side.json(&["mirror", "points", "db"]);
            let point = points.as_array().unwrap().iter().find(|p| p["is"] == "complete,common");
            let point =
                point.or_else(|| points.as_array().unwrap().iter().find(|p| p["is"] == "common"));
            assert_eq!(point.unwrap()["lagBytes"], bytes, "{points:#}");
        }
        let metrics = stories::ask(&http, "/metrics").unwrap();
        let line = format!("quoin_mirror_lag_bytes{{mirror=\"db\"}} {bytes}");
        assert!(metrics.contains(&line), "{line}: {metrics}");
    };
    is(0);
    write(&here, &some(50, 100, 2));
    is(100 * BLOCK);
    // A block that is written again is sent once.
    write(&here, &some(50, 120, 3));
    is(120 * BLOCK);
    let shown = second.ok(&["mirror", "status", "db"]);
    assert!(shown.contains("480.0 KiB, as first counted"), "{shown}");
    assert!(shown.contains("is not here: 480.0 KiB and what came since"), "{shown}");
    detach(first, "db", here);
    first.ok(&["mirror", "demote", "db"]);
    second.ok(&["mirror", "promote", "db"]);
    second.eventually("the new primary counts for itself", || {
        (status(second, "db")["lagBytes"] == 0).then_some(())
    });
    two.stop();
}

/// Has a command wait until it says this, and interrupts it.
fn interrupt_once_it_says(user: &User, arguments: &[&str], awaited: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(arguments)
        .env("QUOIN_SOCKET", &user.admin_socket)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(command.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains(awaited) {
        assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "it ended: {said}");
    }
    signal(command.id(), "INT");
    stderr.read_to_string(&mut said).unwrap();
    assert!(!command.wait().unwrap().success(), "{said}");
    assert!(said.contains("it continues by itself"), "{said}");
}

/// Proves that a take-over of a live primary waits until this side has everything, tells how far it is, and goes on
/// where it is interrupted, and that nothing that was acknowledged is lost.
#[test]
fn a_live_primary_with_a_writer_is_taken_over_without_the_loss_of_an_acknowledged_write() {
    let two = Two::start("mirror-take-over");
    let (first, second) = (&two.dev, &two.second);
    two.create("db", "64MiB");
    let here = client(first, "db");
    let mut written = some(0, 2000, 1);
    write(&here, &written);
    let slow = ["--take-over", "--bandwidth-limit", "1MiB", "--compression", "none"];
    let enable = ["mirror", "enable", "db", "--to", "second", "--every", "1h", "--wait"];
    first.ok(&[&enable[..], &slow].concat());
    let unforced = refused(second, &["mirror", "promote", "db"]);
    assert!(unforced.contains("promote --force"), "{unforced}");
    // 8 MiB of the final point take eight seconds.
    let more = some(1000, 2000, 2);
    write(&here, &more);
    written.extend(more);
    // A client holds what its volume does not take now: the thread is left with the write that is never answered.
    let acknowledged = Arc::new(Mutex::new(Vec::new()));
    let told = acknowledged.clone();
    std::thread::spawn(move || {
        for version in 3u64.. {
            let lba = 3000 + version % 500;
            if here.write(lba * BLOCK, block(lba, version).into(), true).is_err() {
                break;
            }
            told.lock().unwrap().push((lba, version));
        }
    });
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..2 {
        let promote = ["mirror", "promote", "db", "--force"];
        interrupt_once_it_says(second, &promote, "a point of first comes: it is at");
        assert_eq!(status(second, "db")["takesOver"], true, "the same command waits again");
    }
    // Its controller dies, and no command asks again.
    hold(&two.of_second(), "controller", true);
    hold(&two.of_second(), "controller", false);
    second.eventually("the controller is back", || {
        second.quoin(&["mirror", "status", "db"]).status.success().then_some(())
    });
    wait_for_role(second, "db", "primary");
    let promoted = second.ok(&["mirror", "promote", "db", "--force"]);
    assert!(promoted.contains("primary here, in generation 2"), "{promoted}");
    wait_for_role(first, "db", "secondary");
    let there = client(second, "db");
    let acknowledged = std::mem::take(&mut *acknowledged.lock().unwrap());
    assert!(acknowledged.len() > 10, "the writer wrote {} blocks", acknowledged.len());
    // A block that was on its way when its primary stepped down may be there too.
    let last = *acknowledged.last().unwrap();
    written.extend(acknowledged);
    let next = 3000 + (last.1 + 1) % 500;
    let sure: Vec<_> = written.into_iter().filter(|(lba, _)| *lba != next).collect();
    assert_holds(&there, &sure);
    detach(second, "db", there);
    two.stop();
}

fn verify(user: &User, of: &str) -> (Option<i32>, String) {
    let output = user.quoin(&["mirror", "verify", of]);
    let all = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&all).into_owned())
}

/// Proves that a comparison reads both sides, is answered by either one, goes on where a controller was killed in the
/// middle of it, and ends with the reason where the peer is away.
#[test]
fn both_sides_are_compared_over_a_restart_and_an_absent_peer_is_named() {
    let two = Two::start("mirror-verify");
    let (first, second) = (&two.dev, &two.second);
    for name in ["data", "log"] {
        two.create(name, "48MiB");
        let here = client(first, name);
        write(&here, &some(0, 500, 1));
        detach(first, name, here);
    }
    first.ok(&["group", "create", "shop", "data", "log"]);
    let early = refused(first, &["mirror", "verify", "shop"]);
    assert!(early.contains("not mirrored"), "{early}");
    two.enable("shop");
    for side in [first as &User, second] {
        let mut last = (None, String::new());
        side.eventually("both sides hold one point", || {
            last = verify(side, "shop");
            (last.0 == Some(0)).then_some(())
        });
        let peer = if last.1.contains("second") { "second" } else { "first" };
        let said = format!("shop is equal here and on {peer}: 96.0 MiB were compared");
        assert!(last.1.contains(&said), "{}", last.1);
    }

    // The target of the copy is away, and the controller that compares is killed meanwhile.
    hold(&two.of_second(), "target", true);
    let comparison = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["mirror", "verify", "shop"])
        .env("QUOIN_SOCKET", &first.admin_socket)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut comparison = comparison.unwrap();
    let state = || status(first, "shop")["comparison"]["state"].as_str().unwrap().to_owned();
    first.eventually("it is begun", || (state() == "comparing").then_some(()));
    kill(&two.dev.directory, "controller");
    // The command may outlive the controller, and would then wait for the target that is held.
    let _ = comparison.kill();
    let _ = comparison.wait();
    first.eventually("the controller is back, and compares", || {
        let output = first.quoin(&["mirror", "status", "shop", "-o", "json"]);
        let seen: Value = serde_json::from_slice(&output.stdout).ok()?;
        (seen["comparison"]["state"] == "comparing").then_some(())
    });
    hold(&two.of_second(), "target", false);
    first.eventually("it goes on and ends", || {
        let comparison = &status(first, "shop")["comparison"];
        assert_ne!(comparison["state"], "failed", "{comparison}");
        (comparison["state"] == "equal").then_some(())
    });
    let events = first.ok(&["events"]);
    assert!(events.contains("MirrorVerified"), "{events}");

    hold(&two.of_second(), "mirror", true);
    first.eventually("an absent peer is named", || {
        let (code, said) = verify(first, "shop");
        (code == Some(1) && said.contains("no mirror of the peer is heard")).then_some(())
    });
    hold(&two.of_second(), "mirror", false);
    two.stop();
}

/// Proves that a block of the copy that has other bytes under a valid checksum is found, named, a condition of the
/// volume, and gone once everything was sent anew.
#[test]
fn a_copy_with_other_bytes_under_valid_checksums_is_found_and_sent_anew() {
    let two = Two::start("mirror-differs");
    two.create("db", "64MiB");
    let here = client(&two.dev, "db");
    let written = some(0, 1000, 1);
    write(&here, &written);
    let enable = ["mirror", "enable", "db", "--to", "second", "--every", "1h", "--wait"];
    two.dev.ok(&enable);
    detach(&two.dev, "db", here);
    let Two { dev, second, scratch } = two;
    let directory = dev.directory.clone();
    dev.stop();
    let (lba, _) = written[100];
    let file = directory.join("peer/pools/pool-a/data");
    crate::differing::overwrite_block(&file, lba, &block(lba, 77).into());

    let flags = ["--peer", "--no-attach", "--pools", "1", "--pool-size", "2GiB"];
    let dev = Dev::start(&directory, &flags);
    dev.wait_for_line("A second cluster is up");
    let first: &User = &dev;
    let mut last = (None, String::new());
    first.eventually("the difference is found", || {
        last = verify(first, "db");
        last.1.contains("differ").then_some(())
    });
    let at = format!("volume db at {}.0 MiB", (lba * BLOCK) >> 20);
    assert!(last.0 == Some(1) && last.1.contains("1 range of 1 MiB"), "{last:?}");
    assert!(last.1.contains(&at), "{at}: {}", last.1);
    let doctor = String::from_utf8(first.quoin(&["volume", "doctor", "db"]).stdout).unwrap();
    assert!(doctor.contains("MirrorDiffers") && doctor.contains("mirror disable db"), "{doctor}");
    assert!(first.ok(&["events"]).contains("MirrorDiffers"));

    first.ok(&["mirror", "disable", "db"]);
    wait_for_role(&second, "db", "orphan");
    second.ok(&["mirror", "promote", "db"]);
    second.eventually("the orphan is deleted", || {
        second.quoin(&["volume", "delete", "db", "--yes"]).status.success().then_some(())
    });
    first.eventually("it is mirrored anew", || first.quoin(&enable).status.success().then_some(()));
    first.eventually("both sides are equal", || (verify(first, "db").0 == Some(0)).then_some(()));
    let doctor = String::from_utf8(first.quoin(&["volume", "doctor", "db"]).stdout).unwrap();
    assert!(!doctor.contains("MirrorDiffers"), "{doctor}");
    dev.stop();
    drop(scratch);
}

/// Proves that a peer gets no more copies than its quota allows, that the refusal names it and the way out, and that an
/// orphan goes after the time that the peer's limits say, with an event before and after.
#[test]
fn a_peer_has_as_many_copies_as_its_quota_and_its_orphans_go_after_their_time() {
    let two = Two::start("mirror-quota");
    let (first, second) = (&two.dev, &two.second);
    let quota = |limits: &[&str]| second.ok(&[&["mirror", "quota", "first"], limits].concat());
    let kept = quota(&["--copies", "1"]);
    assert!(kept.contains("0 of 1 copies") && kept.contains("orphans are kept"), "{kept}");
    for name in ["one", "two"] {
        two.create(name, "64MiB");
    }
    two.enable("one");
    let peer = || second.json(&["mirror", "peers"])[0].clone();
    assert_eq!((&peer()["copies"], &peer()["copiesMax"]), (&1.into(), &1.into()));
    assert_eq!(peer()["copiesBytes"], 64u64 << 20);
    let enable = ["mirror", "enable", "two", "--to", "second", "--every", "10s"];
    let no = refused(first, &enable);
    assert!(no.contains("1 of 1 copies"), "{no}");
    assert!(no.contains("quoin mirror quota first --copies 2"), "{no}");
    quota(&["--copies", "2", "--bytes", "100MiB"]);
    let no = refused(first, &enable);
    assert!(no.contains("quoin mirror quota first --bytes 134217728"), "{no}");
    let limits = quota(&["--bytes", "1GiB", "--orphans", "1m"]);
    assert!(limits.contains("1 of 2 copies") && limits.contains("deleted after 1m"), "{limits}");
    two.enable("two");
    let wrong = refused(second, &["mirror", "quota", "first", "--orphans", "5s"]);
    assert!(wrong.contains("a minute to a year"), "{wrong}");

    first.ok(&["mirror", "disable", "one"]);
    wait_for_role(second, "one", "orphan");
    second.eventually("its end is announced", || {
        second.ok(&["events"]).contains("OrphanExpires").then_some(())
    });
    // The time that it was seen survives the controller.
    std::thread::sleep(Duration::from_secs(10));
    kill(&two.of_second(), "controller");
    let began = Instant::now();
    loop {
        let output = second.quoin(&["events"]);
        let events = String::from_utf8(output.stdout).unwrap();
        if events.contains("OrphanDeleted") {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(150), "it stays: {events}");
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(began.elapsed() > Duration::from_secs(30), "it went early");
    second.eventually("its volume is gone", || {
        (!second.quoin(&["volume", "get", "one"]).status.success()).then_some(())
    });
    assert_eq!(status(second, "two")["role"], "secondary", "a copy is none");
    assert!(first.quoin(&["volume", "get", "one"]).status.success());
    two.stop();
}

/// Library that moves the wall clock of the processes of the second cluster by as much as a file says.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int is_second = -1;

static long moved(void) {
    char text[4096] = {0};
    if (is_second < 0) {
        int command = open("/proc/self/cmdline", O_RDONLY);
        ssize_t length = command < 0 ? 0 : read(command, text, sizeof text - 1);
        if (command >= 0) close(command);
        is_second = 0;
        for (ssize_t at = 0; at < length; at++)
            if (strncmp(text + at, "/peer/", 6) == 0) is_second = 1;
    }
    const char *path = getenv("QUOIN_TEST_CLOCK");
    if (!is_second || !path) return 0;
    int file = open(path, O_RDONLY);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length < 0 ? 0 : length] = 0;
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int outcome = real(clock, time);
    if (clock == CLOCK_REALTIME) time->tv_sec += moved();
    return outcome;
}
"#;

/// Proves that a clock of the other side that jumps an hour ahead, and an hour back, changes neither lag nor sync time, hides no
/// silence, and promotes nobody.
#[test]
fn a_peer_s_clock_that_jumps_by_an_hour_each_way_changes_no_lag_and_no_role() {
    let scratch = Scratch::new("mirror-clock");
    let (source, library) = (scratch.0.join("clock.c"), scratch.0.join("clock.so"));
    std::fs::write(&source, CLOCK).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        return crate::common::skipped("no C compiler is here to move a clock");
    }
    let clock = scratch.0.join("clock");
    std::fs::write(&clock, "0").unwrap();
    let jump = |seconds: &str| {
        let new = scratch.0.join("clock.new");
        std::fs::write(&new, seconds).unwrap();
        std::fs::rename(new, &clock).unwrap();
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_quoin"));
    command.env("LD_PRELOAD", &library).env("QUOIN_TEST_CLOCK", &clock);
    let directory = scratch.cluster();
    let flags = ["--peer", "--no-attach", "--pools", "1", "--pool-size", "2GiB"];
    let dev = Dev::start_by(command, &directory, &flags);
    dev.wait_for_line("A second cluster is up");
    let second = User {
        admin_socket: directory.join("peer/run/admin.sock"),
        logs: directory.join("peer/logs"),
    };
    let first: &User = &dev;
    first.ok(&["volume", "create", "db", "--size", "32MiB", "--replicas", "1"]);
    let here = client(first, "db");
    let mut written = some(0, 50, 1);
    write(&here, &written);
    first.ok(&["mirror", "enable", "db", "--to", "second", "--every", "10s", "--wait"]);
    second.eventually("the primary told of its clock", || {
        status(&second, "db")["lagBytes"].as_u64().map(drop)
    });
    let mut version = 2;
    for moved in ["3600", "0"] {
        jump(moved);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(25) {
            let more = some(0, 20, version);
            write(&here, &more);
            written.extend(more);
            version += 1;
            let (own, theirs) = (status(first, "db"), status(&second, "db"));
            for (seen, role) in [(&own, "primary"), (&theirs, "secondary")] {
                assert_eq!(seen["role"], role, "clock {moved}: {seen:#}");
                assert_eq!(seen["generation"], 1, "clock {moved}: {seen:#}");
                // The first moments are those before the primary told of its clock again.
                let lag_ms = seen["lagMs"].as_u64().unwrap();
                assert!(lag_ms < 30_000, "clock {moved}: {seen:#}");
            }
            assert_ne!(own["health"], "error", "clock {moved}: {own:#}");
            std::thread::sleep(Duration::from_millis(500));
        }
    }
    // Silence is counted by a clock that does not jump.
    jump("3600");
    let early = refused(&second, &["mirror", "promote", "db", "--force"]);
    assert!(early.contains("demote"), "{early}");
    hold(&directory, "mirror", true);
    let since = Instant::now();
    let mut last = String::new();
    while !last.contains("only force promotes") {
        assert!(since.elapsed() < Duration::from_secs(90), "silence is not found: {last}");
        last = refused(&second, &["mirror", "promote", "db"]);
        if since.elapsed() > Duration::from_secs(10) && since.elapsed() < Duration::from_secs(12) {
            jump("0");
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(since.elapsed() > Duration::from_secs(25), "silence was found early");
    assert_eq!(status(&second, "db")["role"], "secondary");
    hold(&directory, "mirror", false);
    second.eventually("the peer is heard again", || {
        (status(&second, "db")["message"].is_null()).then_some(())
    });
    detach(first, "db", here);
    first.ok(&["mirror", "demote", "db"]);
    second.ok(&["mirror", "promote", "db"]);
    let there = client(&second, "db");
    assert_holds(&there, &written);
    detach(&second, "db", there);
    dev.stop();
}

/// Proves that a link that is cut in one direction, either one, is found on both sides, that the told sync time stays
/// true meanwhile, that nobody is promoted, and that everything is caught up with after it.
#[test]
fn a_link_that_is_cut_in_one_direction_is_found_and_tells_no_wrong_sync_time() {
    let Some(network) = crate::common::network::Network::new(&["first", "second"]) else { return };
    let places = [network.place(0), network.place(1)];
    let names = ["first", "second"];
    let mut sides: Vec<Cluster> = Vec::new();
    for (place, name) in places.iter().zip(names) {
        let scratch = format!("mirror-cut-{name}");
        let mut side = Cluster::start(&scratch, place, &["--default-replicas", "1"]);
        side.pool(place, "p1", &[]);
        side.node(place, "n1", &[], &[]);
        side.wait_for_pools(1);
        let listen = format!("{}:7500", place.address);
        let (state, run, token) = (side.path("mirror"), side.path("run"), side.token("mirror"));
        let arguments = ["mirror", "run", "--name", "m1", "--node", "n1", "--state", &state]
            .into_iter()
            .chain(["--run", &run, "--listen", &listen, "--controller", &side.controller])
            .chain(["--join", &token]);
        let arguments = arguments.map(String::from).collect();
        side.run(place, "mirror", arguments);
        sides.push(side);
    }
    let (first, second) = (&sides[0], &sides[1]);
    first.eventually("both are linked", || {
        let invite = ["mirror", "invite", "--name", "second", "--address", &first.controller];
        second.quoin(&["mirror", "pair", "--name", "first", &first.ok(&invite)]);
        let is_linked = |side: &Cluster| side.json(&["mirror", "peers"])[0]["state"] == "linked";
        (is_linked(first) && is_linked(second)).then_some(())
    });
    first.ok(&["volume", "create", "db", "--size", "32MiB", "--replicas", "1"]);
    let here = client(first, "db");
    let mut written = some(0, 50, 1);
    write(&here, &written);
    first.ok(&["mirror", "enable", "db", "--to", "second", "--every", "10s", "--wait"]);
    let mut version = 2;
    for (from, to) in [(0, 1), (1, 0)] {
        network.lose("add", from, to);
        let cut = Instant::now();
        let (mut are_silent, mut most) = ([false; 2], 0);
        while cut.elapsed() < Duration::from_secs(75) && !(are_silent[0] && are_silent[1]) {
            let more = some(0, 10, version);
            write(&here, &more);
            written.extend(more);
            version += 1;
            for (index, side) in sides.iter().enumerate() {
                let seen = status(side, "db");
                assert_eq!(seen["role"], ["primary", "secondary"][index], "{seen:#}");
                let message = seen["message"].as_str().unwrap_or_default();
                are_silent[index] |= message.contains("the peer is silent");
                // Nothing of after the cut is on the other side, but for what was on its way then.
                let lag_ms = u128::from(seen["lagMs"].as_u64().unwrap());
                let since_ms = cut.elapsed().as_millis();
                assert!(lag_ms + 3000 >= since_ms, "{names:?} {index} at {since_ms}: {seen:#}");
                most = most.max(lag_ms);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        assert_eq!(are_silent, [true; 2], "the cut from {from} to {to} is not found");
        assert!(most > 25_000, "the lag was {most} ms at most");
        let unforced = refused(second, &["mirror", "promote", "db"]);
        assert!(unforced.contains("only force promotes"), "{unforced}");
        network.lose("del", from, to);
        first.eventually("it is caught up with", || {
            let seen = status(first, "db");
            let is_near = seen["lagMs"].as_u64().is_some_and(|lag_ms| lag_ms < 20_000);
            (is_near && seen["health"] == "healthy").then_some(())
        });
    }
    for side in [first, second] {
        assert_eq!(status(side, "db")["generation"], 1, "somebody was promoted");
    }
    detach(first, "db", here);
    first.ok(&["mirror", "demote", "db"]);
    second.ok(&["mirror", "promote", "db"]);
    let there = client(second, "db");
    assert_holds(&there, &written);
    detach(second, "db", there);
}
