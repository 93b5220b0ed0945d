//! The content of snapshots on real processes: exported while the cluster runs, compared, and what a
//! volume goes back to.

use std::fs::File;
use std::process::Command;

use quoin_types::block::Operation;
use serde_json::{Value, json};

use crate::snapshots::{BLOCK, POOLS, fill, has, refusal, start};
use crate::support::{Dev, Scratch, signal};

/// Blocks of the volume.
const ALL: u64 = (16 << 20) / BLOCK;

/// Runs a command that needs no cluster.
fn offline(arguments: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(arguments)
        .env("QUOIN_SOCKET", "/nonexistent")
        .output()
        .unwrap()
}

fn offline_ok(arguments: &[&str]) -> String {
    let output = offline(arguments);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {printed}");
    String::from_utf8(output.stdout).unwrap()
}

/// Version of each block in the second snapshot of the test below.
fn second(lba: u64) -> u64 {
    match lba {
        100..150 => 2,
        150..200 => 0,
        0..300 => 1,
        ALL_BUT_LAST..ALL => 2,
        _ => 0,
    }
}

const ALL_BUT_LAST: u64 = ALL - 1;

/// Bytes that the controller has written to files and sockets.
fn written_by(dev: &Dev) -> u64 {
    let pid = dev.pid("controller").unwrap();
    let counted = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    let line = counted.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap();
    line.parse().unwrap()
}

/// Proves CSIN-METADATA-13, CSIN-METADATA-14: with the bytes themselves.
#[test]
fn a_snapshot_is_exported_while_the_volume_is_written_and_its_changes_make_the_next_one_of_it() {
    let scratch = Scratch::new("snapshot-exports");
    let dev = start(&scratch);
    let path = |name: &str| scratch.0.join(name).to_str().unwrap().to_owned();
    let client = dev.client("db");
    fill(&client, 0..300, 1);
    dev.ok(&["snapshot", "create", "db", "--name", "first"]);
    fill(&client, 100..150, 2);
    fill(&client, ALL_BUT_LAST..ALL, 2);
    let (offset, length) = (150 * BLOCK, 50 * BLOCK);
    client.call(Operation::Trim { offset, length, fua: false }).unwrap();
    client.flush().unwrap();
    dev.ok(&["snapshot", "create", "db", "--name", "second"]);
    fill(&client, 0..ALL, 3);

    let diff = dev.json(&["snapshot", "diff", "db", "first", "second"]);
    let range = |lba: u64, blocks: u64, change: &str| json!({"offset": lba * BLOCK, "length": blocks * BLOCK, "change": change});
    let expected = [range(100, 50, "data"), range(150, 50, "hole"), range(ALL_BUT_LAST, 1, "data")];
    assert_eq!(diff["ranges"], Value::from(expected.to_vec()));
    assert_eq!(diff["changedBytes"], 101 * BLOCK);
    let backwards = refusal(&dev, &["snapshot", "diff", "db", "second", "first"]);
    assert!(backwards.contains("was not cut before"), "{backwards}");
    let space = |row: &Value| {
        let blocks = |field: &str| row[field].as_u64().unwrap() / BLOCK;
        (blocks("dataBytes"), blocks("exclusiveBytes"), blocks("sharedBytes"))
    };
    let measured = dev.json(&["snapshot", "space", "db"]);
    let names: Vec<_> = measured.as_array().unwrap().iter().map(|row| &row["snapshot"]).collect();
    assert_eq!(names, ["first", "second"]);
    // Blocks that changed between the two are in the older one alone.
    assert_eq!(space(&measured[0]), (300, 100, 200));
    // The volume was written whole since the newer one.
    assert_eq!(space(&measured[1]), (251, 51, 200));
    assert_eq!(dev.json(&["snapshot", "space", "db", "second"])[0], measured[1]);
    let pools = dev.json(&["pool", "list"]);
    for pool in pools.as_array().unwrap() {
        let bytes = |field: &str| pool[field].as_u64().unwrap();
        assert!(bytes("liveBytes") <= bytes("usedBytes"), "{pool}");
    }

    let (full, more) = (path("full"), path("more"));
    let made = dev.json(&["snapshot", "export", "first", "--to", &full]);
    assert_eq!(
        (&made["dataBytes"], &made["sizeBytes"]),
        (&(300 * BLOCK).into(), &(16 << 20).into())
    );
    let made = dev.json(&["snapshot", "export", "second", "--since", "first", "--to", &more]);
    assert_eq!(made["dataBytes"], 51 * BLOCK);
    assert_eq!(made["holeBytes"], 50 * BLOCK);
    // The file is the memory of an export: what is cut off or damaged at its end is made again.
    let whole = std::fs::read(&full).unwrap();
    for length in [0, 10, 5000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&full, &whole[..length]).unwrap();
        dev.ok(&["snapshot", "export", "first", "--to", &full]);
        assert!(std::fs::read(&full).unwrap() == whole, "{length}");
    }
    dev.ok(&["snapshot", "export", "first", "--to", &full]);
    let refused = refusal(&dev, &["snapshot", "export", "second", "--to", &full]);
    assert!(refused.contains("is of snapshot first of volume db"), "{refused}");

    let raw = path("raw");
    dev.ok(&["snapshot", "export", "second", "--raw", "--to", &raw]);
    let refused = refusal(&dev, &["snapshot", "export", "second", "--raw", "--to", &raw]);
    assert!(refused.contains("exists already"), "{refused}");
    // The target of this host serves the volume: what is exported goes from it to the file.
    dev.ok(&["snapshot", "create", "db", "--name", "third"]);
    let third = path("third");
    let before = written_by(&dev);
    dev.ok(&["snapshot", "export", "third", "--raw", "--to", &third]);
    let passed = written_by(&dev) - before;
    assert!(passed < 2 << 20, "{passed} bytes of 16 MiB passed the controller");
    let file = File::open(&third).unwrap();
    assert!((0..ALL).all(|lba| has(&file, lba, 3)));
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    // Attached nowhere, a target is lent to the volume.
    let again = path("again");
    dev.ok(&["snapshot", "export", "second", "--since", "first", "--to", &again]);
    assert!(std::fs::read(&again).unwrap() == std::fs::read(&more).unwrap());
    dev.stop();

    let image = path("image");
    let verified = offline_ok(&["snapshot", "verify", &full, &more]);
    assert_eq!(verified.lines().count(), 2, "{verified}");
    offline_ok(&["snapshot", "unpack", &full, &more, "--to", &image]);
    for name in [&raw, &image] {
        let file = File::open(name).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 16 << 20);
        assert!((0..ALL).all(|lba| has(&file, lba, second(lba))), "{name}");
    }
    let mut rotten = whole;
    let at = rotten.len() / 2;
    rotten[at] ^= 1;
    std::fs::write(&full, rotten).unwrap();
    let refused = offline(&["snapshot", "verify", &full]);
    let printed = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && printed.contains("damaged at byte"), "{printed}");
}

#[test]
fn a_volume_goes_back_to_a_snapshot_whoever_is_killed_meanwhile_and_nobody_has_it_till_then() {
    let scratch = Scratch::new("snapshot-reverts");
    let dev = start(&scratch);
    let client = dev.client("db");
    fill(&client, 0..200, 1);
    dev.ok(&["snapshot", "create", "db", "--name", "first"]);
    fill(&client, 100..300, 2);
    dev.ok(&["snapshot", "create", "db", "--name", "second"]);
    let refused = refusal(&dev, &["snapshot", "revert", "db", "first", "--yes"]);
    assert!(refused.contains("detach it first"), "{refused}");
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let refused = refusal(&dev, &["snapshot", "revert", "db", "first"]);
    assert!(refused.contains("--yes"), "{refused}");

    // Without a quorum it waits, and it is done once, whoever is killed meanwhile.
    let stopped: Vec<_> = POOLS[..2].iter().map(|pool| dev.pid(pool).unwrap()).collect();
    stopped.iter().for_each(|pid| signal(*pid, "STOP"));
    let waits = dev.quoin(&["snapshot", "revert", "db", "first", "--yes", "--timeout", "1"]);
    assert!(!waits.status.success(), "{waits:?}");
    let printed = String::from_utf8_lossy(&waits.stderr).into_owned();
    let (_, id) = printed.rsplit_once("--id ").expect("the command that waits on");
    let id = &id[..32];
    let attached = refusal(&dev, &["volume", "attach", "db", "--nbd", "--timeout", "1"]);
    assert!(attached.contains("goes back to snapshot"), "{attached}");
    dev.kill("target");
    dev.kill("controller");
    stopped.iter().for_each(|pid| signal(*pid, "CONT"));
    let done = dev.eventually("the controller is back, and the volume goes back", || {
        let done = dev.quoin(&["snapshot", "revert", "db", "--id", id, "-o", "json"]);
        serde_json::from_slice::<Value>(&done.stdout).ok()
    });
    assert_eq!((&done["phase"], &done["snapshot"]), (&"Done".into(), &"first".into()));
    assert!(dev.ok(&["volume", "get", "db"]).contains("to snapshot first, at"));
    let client = dev.client("db");
    let is = |lba: u64, version: u64| {
        let read = client.read(lba * BLOCK, BLOCK as u32).unwrap();
        read[..]
            == if version == 0 {
                vec![0; BLOCK as usize]
            } else {
                crate::support::block(lba, version)
            }[..]
    };
    assert!((0..200).all(|lba| is(lba, 1)), "the content of the snapshot");
    assert!((200..300).all(|lba| is(lba, 0)), "what was written since is gone");
    fill(&client, 0..50, 4);
    // To wait for it once more begins none, and what was written since stays.
    let again = dev.json(&["snapshot", "revert", "db", "--id", id]);
    assert_eq!(again, done);
    assert!((0..50).all(|lba| is(lba, 4)));
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let again = dev.json(&["snapshot", "revert", "db", "--id", id]);
    assert_eq!(again, done);
    // Another snapshot has what was there before.
    let done = dev.json(&["snapshot", "revert", "db", "second", "--yes"]);
    assert_eq!(done["phase"], "Done");
    let client = dev.client("db");
    let read = client.read(150 * BLOCK, BLOCK as u32).unwrap();
    assert_eq!(read[..], crate::support::block(150, 2)[..]);
    let changed = dev.json(&["snapshot", "create", "db", "--name", "third"]);
    assert_eq!(changed["sizeBytes"], 16 << 20);
    let diff = dev.json(&["snapshot", "diff", "db", "second", "third"]);
    assert!(diff["changedBytes"].as_u64().unwrap() >= 250 * BLOCK, "they were written: {diff}");
    client.stop();
    dev.stop();
}
