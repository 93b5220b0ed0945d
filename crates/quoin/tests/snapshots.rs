//! Snapshots on real processes: their content on every replica, names, kills in the middle, volumes
//! that are deleted before their snapshots.

use crate::common::{Cluster, Place};
use crate::support;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use quoin_nbd::client::{Address, Client, ClientOptions};
use serde_json::Value;
use support::{Dev, Scratch, block, eventually, is_online, signal};

pub const BLOCK: u64 = 4096;
const BLOCKS: u64 = 400;
pub const POOLS: [&str; 3] = ["pool-a", "pool-b", "pool-c"];

pub fn start(scratch: &Scratch) -> Dev {
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    dev
}

/// Writes each of these blocks in this version, and flushes.
pub fn fill(client: &Client, blocks: std::ops::Range<u64>, version: u64) {
    for lba in blocks {
        client.write(lba * BLOCK, Bytes::from(block(lba, version)), false).unwrap();
    }
    client.flush().unwrap();
}

pub fn refusal(dev: &Dev, arguments: &[&str]) -> String {
    let output = dev.quoin(arguments);
    assert!(!output.status.success(), "{arguments:?} is not refused");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn names(dev: &Dev, of: &[&str]) -> Vec<String> {
    let listed = dev.json(&[&["snapshot", "list"], of].concat());
    let names = listed.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap().to_owned());
    names.collect()
}

pub fn has(image: &std::fs::File, lba: u64, version: u64) -> bool {
    let mut read = vec![0; BLOCK as usize];
    image.read_exact_at(&mut read, lba * BLOCK).unwrap();
    read == if version == 0 { vec![0; BLOCK as usize] } else { block(lba, version) }
}

#[test]
fn a_snapshot_has_the_content_of_its_moment_on_every_replica_attached_or_not() {
    let scratch = Scratch::new("snapshots");
    let dev = start(&scratch);
    let client = dev.client("db");
    fill(&client, 0..BLOCKS, 1);
    let first = dev.json(&["snapshot", "create", "db", "--name", "first"]);
    assert_eq!((&first["phase"], &first["sizeBytes"]), (&"Ready".into(), &(16 << 20).into()));
    fill(&client, 0..BLOCKS / 2, 2);
    let second = dev.json(&["snapshot", "create", "db", "--name", "second"]);
    fill(&client, 0..BLOCKS, 3);
    assert!(first["lsn"].as_u64() < second["lsn"].as_u64());

    // The same request finds the same snapshot; the name belongs to it.
    let again = dev.json(&["snapshot", "create", "db", "--name", "first"]);
    assert_eq!((&again["id"], &again["cutAt"]), (&first["id"], &first["cutAt"]));
    dev.ok(&["volume", "create", "other", "--size", "1MiB", "--replicas", "3"]);
    let refused = refusal(&dev, &["snapshot", "create", "other", "--name", "first"]);
    assert!(refused.contains("choose another name"), "{refused}");
    assert_eq!(names(&dev, &["db"]), ["first", "second"]);
    assert_eq!(names(&dev, &["other"]), [""; 0]);

    // A volume that nobody uses: a target is lent to it.
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let third = dev.json(&["snapshot", "create", "db", "--name", "third"]);
    assert_eq!(third["phase"], "Ready");
    let deleted = dev.ok(&["snapshot", "delete", "second", "--yes"]);
    assert!(deleted.contains("second is deleted"), "{deleted}");
    assert!(refusal(&dev, &["snapshot", "get", "second"]).contains("quoin snapshot list"));
    assert!(refusal(&dev, &["snapshot", "delete", "first"]).contains("--yes"));
    assert_eq!(names(&dev, &[]), ["first", "third"]);
    let shown = dev.ok(&["volume", "get", "db"]);
    assert!(shown.contains("2, the newest third of"), "{shown}");
    dev.eventually("the volume is closed again", || {
        let events = dev.ok(&["events"]);
        let volume = dev.json(&["volume", "get", "db"]);
        (events.contains("SnapshotDeleted") && volume["waitingFor"] == "").then_some(())
    });
    let (offline, to) = (Offline { cluster: dev.directory.clone() }, scratch.0.join("image"));
    dev.stop();
    for pool in POOLS {
        let image = offline.export(pool, &first, &to);
        assert!((0..BLOCKS).all(|lba| has(&image, lba, 1)), "{pool}: not the first moment");
        assert!(has(&image, BLOCKS, 0), "{pool}: never written");
        let image = offline.export(pool, &third, &to);
        assert!((0..BLOCKS).all(|lba| has(&image, lba, 3)), "{pool}: not the third moment");
        assert!(!offline.holds(pool, &second), "{pool}: a deleted snapshot is there");
    }
}

/// The pools of a cluster that has ended.
struct Offline {
    cluster: std::path::PathBuf,
}

impl Offline {
    fn quoin(&self, arguments: &[&str]) -> String {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(arguments)
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {printed}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn data(&self, pool: &str) -> String {
        self.cluster.join("pools").join(pool).to_str().unwrap().to_owned()
    }

    fn export(&self, pool: &str, snapshot: &Value, to: &Path) -> std::fs::File {
        let _ = std::fs::remove_file(to);
        let (id, image) = (snapshot["id"].as_str().unwrap(), to.to_str().unwrap());
        let volume = snapshot["volume"].as_str().unwrap();
        let data = self.data(pool);
        self.quoin(&[
            "pool",
            "export",
            &data,
            "--replica",
            volume,
            "--snapshot",
            id,
            "--to",
            image,
        ]);
        std::fs::File::open(to).unwrap()
    }

    fn holds(&self, pool: &str, snapshot: &Value) -> bool {
        let inspected = self.quoin(&["pool", "inspect", &self.data(pool), "-o", "json"]);
        inspected.contains(snapshot["id"].as_str().unwrap())
    }
}

/// A snapshot that waits for its replicas is made once, whoever is killed meanwhile.
#[test]
fn a_snapshot_under_way_outlives_its_controller_and_its_target() {
    let scratch = Scratch::new("snapshot-kills");
    let dev = start(&scratch);
    let client = dev.client("db");
    fill(&client, 0..50, 1);
    for (victim, name) in [("controller", "one"), ("target", "two")] {
        let stopped: Vec<_> = POOLS[..2].iter().map(|pool| dev.pid(pool).unwrap()).collect();
        stopped.iter().for_each(|pid| signal(*pid, "STOP"));
        let user = &*dev;
        let asked = std::thread::scope(|scope| {
            let asking = scope
                .spawn(|| user.quoin(&["snapshot", "create", "db", "--name", name, "--no-wait"]));
            dev.eventually("it is wished", || {
                let found = dev.quoin(&["snapshot", "get", name, "-o", "json"]);
                let found: Value = serde_json::from_slice(&found.stdout).ok()?;
                (found["phase"] == "Wished").then_some(())
            });
            dev.kill(victim);
            asking.join().unwrap()
        });
        // The command whose controller was killed has failed; the same command finds the attempt.
        assert!(asked.status.success() || victim == "controller", "{asked:?}");
        stopped.iter().for_each(|pid| signal(*pid, "CONT"));
        let made = dev.json(&["snapshot", "create", "db", "--name", name]);
        assert_eq!(made["phase"], "Ready", "{made}");
        fill(&client, 0..50, 2);
    }
    assert_eq!(names(&dev, &["db"]), ["one", "two"]);
    dev.wait_for_volume("db", "online", is_online);
    // Deleted while the target is away.
    dev.kill("target");
    for name in ["one", "two"] {
        dev.ok(&["snapshot", "delete", name, "--yes"]);
    }
    assert_eq!(names(&dev, &[]), [""; 0]);
    let reuse = dev.json(&["snapshot", "create", "db", "--name", "one"]);
    assert_eq!(reuse["phase"], "Ready");
    client.stop();
    dev.stop();
}

#[test]
fn snapshots_outlive_their_volume_and_a_schedule_ends_with_it() {
    let scratch = Scratch::new("snapshot-retained");
    let dev = start(&scratch);
    let client = dev.client("db");
    fill(&client, 0..50, 1);
    let made = dev.ok(&["schedule", "create", "db", "--every", "1h", "--keep", "3"]);
    assert!(made.contains("every 1h, and keeps 3"), "{made}");
    let schedule = dev.eventually("its first snapshot is made", || {
        let schedule = dev.json(&["schedule", "get", "db"]);
        (schedule["newest"]["phase"] == "Ready").then_some(schedule)
    });
    assert_eq!(schedule["snapshots"], 1);
    let refused = refusal(&dev, &["schedule", "create", "db", "--every", "2h", "--keep", "3"]);
    assert!(refused.contains("quoin schedule delete"), "{refused}");
    dev.ok(&["schedule", "create", "db", "--every", "1h", "--keep", "3"]);
    let newest = schedule["newest"]["name"].as_str().unwrap();
    let kept = dev.json(&["snapshot", "get", newest]);
    assert_eq!(kept["schedule"], "db");
    client.stop();
    dev.ok(&["volume", "detach", "db"]);

    let deleted = dev.ok(&["volume", "delete", "db", "--yes"]);
    assert!(deleted.contains("1 snapshot"), "{deleted}");
    let volume_id = kept["volumeId"].as_str().unwrap();
    assert_eq!(dev.json(&["volume", "list"]).as_array().unwrap().len(), 0);
    assert_eq!(names(&dev, &[volume_id]), [newest]);
    assert_eq!(dev.json(&["snapshot", "get", newest])["volumeDeleted"], true);
    eventually("the schedule ends", || {
        dev.json(&["schedule", "list"]).as_array().unwrap().is_empty().then_some(())
    });
    // Its name is free.
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    assert_eq!(names(&dev, &["db"]), [""; 0]);
    assert_eq!(dev.json(&["snapshot", "get", newest])["volumeDeleted"], true);
    dev.ok(&["snapshot", "delete", newest, "--yes"]);
    dev.eventually("the former volume is gone", || {
        let replicas = dev.json(&["replica", "list"]);
        (replicas.as_array()?.len() == 3).then_some(())
    });
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(dev.json(&["volume", "list"]).as_array().unwrap().len(), 1);
    dev.stop();
}

/// Space of a volume that was deleted: that of its snapshots, and of nothing else.
#[test]
fn what_no_snapshot_has_of_a_deleted_volume_is_given_back_and_then_what_the_newest_alone_has() {
    const PART: u64 = 12 << 20;
    /// Space of which a pool gives back only whole pieces.
    const PIECES: u64 = 8 << 20;
    const CHUNK: u64 = 1 << 20;
    let scratch = Scratch::new("snapshot-trimmed");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let client = dev.client("db");
    let chunk = |number: u64| vec![number as u8 + 1; CHUNK as usize];
    let write = |parts: std::ops::Range<u64>| {
        for number in parts.start * PART / CHUNK..parts.end * PART / CHUNK {
            client.write(number * CHUNK, Bytes::from(chunk(number)), false).unwrap();
        }
        client.flush().unwrap();
    };
    write(0..1);
    dev.json(&["snapshot", "create", "db", "--name", "first"]);
    write(1..2);
    dev.json(&["snapshot", "create", "db", "--name", "second"]);
    write(2..5);
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let used = || {
        let pools = dev.json(&["pool", "list"]);
        pools.as_array()?.iter().map(|pool| pool["usedBytes"].as_u64()).sum::<Option<u64>>()
    };
    let bytes = |parts: u64| 3 * (parts * PART - PIECES);
    dev.eventually("all of it is reported", || used().filter(|used| *used >= 3 * 5 * PART));
    for (parts, delete) in [(3, ["volume", "delete", "db"]), (1, ["snapshot", "delete", "second"])]
    {
        let before = used().unwrap();
        dev.ok(&[&delete[..], &["--yes"]].concat());
        dev.eventually(&format!("{delete:?} gives back {parts} parts"), || {
            used().filter(|used| *used + bytes(parts) <= before)
        });
    }
    // The other one has all that it had.
    dev.ok(&["volume", "create", "copy", "--from-snapshot", "first"]);
    let copy = dev.client("copy");
    for number in 0..2 * PART / CHUNK {
        let expected = if number < PART / CHUNK { chunk(number) } else { vec![0; CHUNK as usize] };
        assert!(copy.read(number * CHUNK, CHUNK as u32).unwrap() == expected, "chunk {number}");
    }
    copy.stop();
    dev.stop();
}

/// Connects to the volume at the address that `quoin volume attach --nbd` prints.
fn connect(address: &str) -> Client {
    let socket = address.split_once("socket=").unwrap().1.to_owned();
    eventually("its target listens", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.clone().into()))).ok()
    })
}

/// The target of another node finds what the first one made, and deletes it.
#[test]
fn a_volume_that_moves_to_another_node_takes_its_snapshots_along() {
    let here = Place::here();
    let mut cluster = Cluster::start("snapshot-moves", &here, &[]);
    for pool in ["p1", "p2", "p3"] {
        cluster.pool(&here, pool, &[]);
    }
    cluster.node(&here, "n1", &[], &[]);
    let (state, run, token) =
        (cluster.path("node-2"), cluster.path("run-2"), cluster.token("node"));
    let second = ["target", "--name", "n2", "--state", &state, "--run", &run, "--join", &token];
    let mut second: Vec<String> = second.map(String::from).to_vec();
    second.extend(["--controller".into(), cluster.controller.clone()]);
    cluster.run(&here, "target-2", second);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let client = connect(&cluster.ok(&["volume", "attach", "db", "--nbd"]));
    fill(&client, 0..50, 1);
    let made = cluster.json(&["snapshot", "create", "db", "--name", "first"]);
    client.stop();
    cluster.ok(&["volume", "detach", "db"]);
    let address = cluster.eventually("the second node takes it", || {
        let attached = cluster.quoin(&["volume", "attach", "db", "--nbd", "--run", &run]);
        attached.status.success().then(|| String::from_utf8(attached.stdout).unwrap())
    });
    let client = connect(address.trim());
    fill(&client, 0..50, 2);
    assert_eq!(cluster.json(&["volume", "get", "db"])["nodes"][0], "n2");
    let again = cluster.json(&["snapshot", "create", "db", "--name", "first"]);
    assert_eq!((&again["id"], &again["lsn"]), (&made["id"], &made["lsn"]));
    let later = cluster.json(&["snapshot", "create", "db", "--name", "second"]);
    assert!(later["lsn"].as_u64() > made["lsn"].as_u64());
    cluster.ok(&["snapshot", "delete", "first", "--yes"]);
    let listed = cluster.json(&["snapshot", "list", "db"]);
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    client.stop();
}
