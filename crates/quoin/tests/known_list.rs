//! The known list and the factors from the records to a running target and back: the ones that a
//! target uses after its start and while it runs, and the result of a change whose answer is lost.
//!
//! The configuration of a target is the controller's assignment; the push of a changed assignment
//! and the answered request for a new list are its two ways on the control connection.

use crate::support;

use std::path::Path;
use std::process::Command;

use quoin_nbd::client::Client;
use serde_json::Value;
use support::load::Load;
use support::stories::*;
use support::{Dev, block, signal};

const BLOCK: u64 = 4096;
const POOLS: [&str; 5] = ["pool-a", "pool-b", "pool-c", "pool-d", "pool-e"];
/// First block beyond those of a load.
const BEYOND: u64 = 2500;

const FIVE: [&str; 5] = ["volume", "scale", "db", "--replicas", "5"];

fn in_sync(dev: &Dev) -> Option<u64> {
    connected_as(&ask_target(dev, "/metrics")?, "in_sync")
}

/// Waits until the target reports that IO waits for this.
fn waits_for(dev: &Dev, what: &str) {
    let mut printed = String::new();
    dev.eventually(what, || {
        printed = ask_target(dev, "/healthz")?;
        println!("{printed}");
        printed.contains(what).then_some(())
    });
}

fn stop(dev: &Dev, pools: &[&str]) -> Vec<i64> {
    let pids: Vec<_> = pools.iter().map(|pool| dev.pid(pool).unwrap()).collect();
    pids.iter().for_each(|pid| signal(pid, "STOP"));
    pids
}

fn resume(pids: &[i64]) {
    pids.iter().for_each(|pid| signal(pid, "CONT"));
}

/// A write that the volume is to hold back: sent now, and read by the same client later.
struct Held {
    version: u64,
    writing: std::thread::JoinHandle<Client>,
}

impl Held {
    fn write(client: Client, version: u64) -> Self {
        let writing = std::thread::spawn(move || {
            client.write(BEYOND * BLOCK, block(BEYOND, version).into(), false).unwrap();
            client
        });
        Self { version, writing }
    }

    fn is_held(&self) {
        assert!(!self.writing.is_finished(), "acknowledged below the factor in force");
    }

    fn acknowledged(self, dev: &Dev) -> Client {
        dev.eventually("the write is acknowledged", || self.writing.is_finished().then_some(()));
        let client = self.writing.join().unwrap();
        assert_eq!(client.read(BEYOND * BLOCK, BLOCK as u32).unwrap(), block(BEYOND, self.version));
        client
    }
}

/// Returns the replicas in the records, newcomers included: pool, id, GUID, known, quorum.
fn replicas(dev: &Dev) -> Vec<(String, String, String, bool, bool)> {
    let text = |r: &Value, key: &str| r[key].as_str().unwrap().to_owned();
    let replicas = dev.json(&["replica", "list", "db"]);
    let one = |r: &Value| {
        let (known, quorum) = (r["known"] == true, r["quorum"] == true);
        (text(r, "pool"), text(r, "id"), text(r, "guid"), known, quorum)
    };
    replicas.as_array().unwrap().iter().map(one).collect()
}

/// Reads a pool with nothing of Quoin running; returns the pool, ids and GUIDs.
fn inspect(pool: &str, file: &Path) -> Vec<(String, String, String)> {
    let output = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["pool", "inspect", "-o", "json"])
        .arg(file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let replicas: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |r: &Value, key: &str| r[key].as_str().unwrap().to_owned();
    let replicas = replicas.as_array().unwrap().iter();
    replicas.map(|r| (pool.to_owned(), text(r, "id"), text(r, "guid"))).collect()
}

/// Returns true if no thread of a process runs or wants to.
fn is_asleep(pid: i64) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.map(|task| task.unwrap().path().join("stat")).all(|stat| {
        let stat = std::fs::read_to_string(stat).unwrap_or_default();
        // The name before may have brackets of its own.
        stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with('S'))
    })
}

/// Begins a change that makes so many newcomers, up to where they hold both rules and the request
/// reaches the controller, which is stopped. Returns the pids of target and controller.
fn unanswered(dev: &Dev, load: &Load, change: &[&str], newcomers: usize) -> (i64, i64) {
    let (target, controller) = (dev.pid("target").unwrap(), dev.pid("controller").unwrap());
    let before = known(dev).len();
    // An earlier report of the target proves nothing about this change.
    dev.eventually("the known ones are in sync", || (in_sync(dev)? == before as u64).then_some(()));
    signal(target, "STOP");
    dev.ok(change);
    dev.eventually("all are made", || {
        let replicas = dev.json(&["replica", "list", "db"]);
        let new = replicas.as_array().unwrap().iter().filter(|r| r["known"] == false);
        (new.filter(|r| r["phase"] == "Rebuilding").count() == newcomers).then_some(())
    });
    // The record is on its way to the target while some thread of the controller runs.
    dev.eventually("the target is told", || is_asleep(controller).then_some(()));
    signal(controller, "STOP");
    signal(target, "CONT");
    dev.eventually("all are in sync under both rules", || {
        (in_sync(dev)? == (before + newcomers) as u64).then_some(())
    });
    load.assert_progress(dev, 50);
    (target, controller)
}

/// Proves SCALE-CONF-01, SCALE-CONF-02, SCALE-CONF-03, SCALE-CONF-04, SCALE-CONF-05,
/// SCALE-CONF-08, SCALE-CONF-14.
#[test]
fn a_target_uses_the_factors_and_the_list_of_the_records_at_its_start() {
    let (scratch, dev) = cluster("start", "5");
    // Four replicas, of which two are enough for a write: to begin, RF - CF + 1 = 3 are needed.
    dev.ok(&[
        "volume",
        "create",
        "db",
        "--size",
        "16MiB",
        "--replicas",
        "4",
        "--consistency-factor",
        "2",
        "--allow-loss-on-single-failure",
    ]);
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let client = dev.client("db");
    let before = known(&dev);
    let held: Vec<&str> = before.iter().map(|(pool, ..)| pool.as_str()).collect();
    // Target and controller restart while two of the four are away.
    let away = stop(&dev, &held[..2]);
    for part in ["controller", "target"] {
        dev.kill(part);
    }
    waits_for(&dev, "2 of 4 known answered, 3 are needed to open");
    // The third is the last that RF requires, and CF two after that.
    resume(&away[1..]);
    dev.eventually("three are in sync", || (in_sync(&dev)? == 3).then_some(()));
    load.assert_progress(&dev, 100);
    let third = stop(&dev, &held[1..2]);
    dev.eventually("two are left", || (in_sync(&dev)? == 2).then_some(()));
    load.assert_progress(&dev, 100);
    let fourth = stop(&dev, &held[2..3]);
    waits_for(&dev, "1 of 4 replicas are connected and in sync, 2 are needed");
    let write = Held::write(client, 1);
    write.is_held();
    resume(&[third, fourth, away].concat());
    write.acknowledged(&dev).stop();
    dev.wait_for_volume("db", "whole", all_in_sync);
    assert_eq!(known(&dev), before, "a restart changes nobody's list");
    // Requested while the target does not receive: its successor has it from its start.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    dev.ok(&["volume", "scale", "db", "--replicas", "5", "--consistency-factor", "0"]);
    dev.kill("controller");
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [4, 2, 5]);
    dev.kill("target");
    dev.wait_for_volume("db", "grown", |volume| {
        all_in_sync(volume) && factors(volume) == [5, 3, 5]
    });
    let after = known(&dev);
    assert!(after.len() == 5 && before.iter().all(|one| after.contains(one)));
    load.assert_progress(&dev, 100);
    end(&scratch, dev, load, 5);
}

/// Proves SCALE-STORY-02, SCALE-QUORUM-11, SCALE-QUORUM-12, SCALE-KNOWN-01, SCALE-ID-02,
/// SCALE-CONF-08, SCALE-CONF-09.
#[test]
fn recreated_and_added_replicas_start_without_quorum_and_are_distinguished() {
    let (scratch, dev) = cluster("born", "5");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    // No target fills the replicas that are made now: a fourth, and one whose pool has lost all.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
    let (lost, id, gone) = before[1].clone();
    std::fs::remove_file(dev.pool_file(&lost)).unwrap();
    dev.kill(&lost);
    let born = dev.eventually("both are made", || {
        let replicas = dev.json(&["replica", "list", "db"]);
        let new = replicas.as_array().unwrap().iter().filter(|r| r["known"] == false);
        let new: Vec<_> = new.filter(|r| r["phase"] == "Rebuilding").cloned().collect();
        (new.len() == 2).then_some(new)
    });
    let there = replicas(&dev);
    assert!(there.iter().filter(|(.., quorum)| *quorum).count() <= 2, "{there:?}");
    assert!(born.iter().all(|new| new["quorum"] == false), "{born:?}");
    assert!(there.iter().all(|(_, _, guid, ..)| *guid != gone), "{there:?}");
    let anew = born.iter().find(|new| new["pool"] == *lost).unwrap();
    assert_eq!(anew["id"], *id, "the copy that was lost");
    let fourth = born.iter().find(|new| new["pool"] != *lost).unwrap();
    assert!(before.iter().all(|(_, old, _)| fourth["id"] != *old), "a copy of its own");
    signal(target, "CONT");
    dev.wait_for_volume("db", "whole", |volume| {
        all_in_sync(volume) && factors(volume) == [4, 3, 4]
    });
    // One took its entry, the other one got an entry and raised RF.
    let entry = |new: &Value| {
        let text = |key: &str| new[key].as_str().unwrap().to_owned();
        (text("pool"), text("id"), text("guid"))
    };
    let mut expected = vec![before[0].clone(), entry(anew), before[2].clone(), entry(fourth)];
    let mut after = known(&dev);
    expected.sort();
    after.sort();
    assert_eq!(after, expected);
    load.assert_progress(&dev, 100);

    // A running target receives a fifth: no restart, no new epoch, and IO never waits.
    let epoch = dev.json(&["volume", "get", "db"])["epoch"].clone();
    let waited = events(&dev, "Waiting").len();
    dev.ok(&["volume", "scale", "db", "--replicas", "5"]);
    dev.wait_for_volume("db", "grown", |volume| {
        load.assert_progress(&dev, 1);
        all_in_sync(volume) && factors(volume) == [5, 3, 5]
    });
    assert_eq!(dev.pid("target"), Some(target), "the same process");
    assert_eq!(dev.json(&["volume", "get", "db"])["epoch"], epoch);
    assert_eq!(events(&dev, "Waiting").len(), waited);
    load.assert_progress(&dev, 100);
    // Each id has the one GUID of the list on the disks, and nothing else is there.
    let mut listed = known(&dev);
    let files: Vec<_> = POOLS.map(|pool| (pool, dev.pool_file(pool))).into();
    end(&scratch, dev, load, 5);
    let mut held: Vec<_> = files.iter().flat_map(|(pool, file)| inspect(pool, file)).collect();
    listed.sort();
    held.sort();
    assert_eq!(held, listed);
}

/// Proves SCALE-CONF-12, SCALE-CONF-13, SCALE-SHORT-02.
#[test]
fn both_rules_hold_until_a_change_is_confirmed_and_no_newcomer_counts_before() {
    let (scratch, dev) = cluster("answer", "5");
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let client = dev.client("db");
    let before = known(&dev);
    let old: Vec<&str> = before.iter().map(|(pool, ..)| pool.as_str()).collect();

    // Refused: both newcomers are taken back while the request for them has had no answer.
    let (target, _) = unanswered(&dev, &load, &FIVE, 2);
    signal(target, "STOP");
    dev.kill("controller");
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 2, 5], "it was never heard");
    let fresh = replicas(&dev).into_iter().filter(|(_, _, _, known, _)| !known);
    for (_, id, ..) in fresh.collect::<Vec<_>>() {
        dev.ok(&["replica", "remove", "db", &id]);
    }
    signal(target, "CONT");
    dev.eventually("the target hears of it", || events(&dev, "ChangeGivenUp").pop());
    dev.wait_for_volume("db", "as before", |volume| {
        all_in_sync(volume) && factors(volume) == [3, 2, 3]
    });
    assert_eq!(known(&dev), before);
    assert_eq!(dev.pid("target"), Some(target));
    // The old rule alone: two of three are enough again.
    let away = stop(&dev, &old[..1]);
    let client = Held::write(client, 1).acknowledged(&dev);
    resume(&away);
    dev.wait_for_volume("db", "whole", all_in_sync);

    // No answer: a write needs two of the old three, and three of the new five.
    let (_, controller) = unanswered(&dev, &load, &FIVE, 2);
    let new: Vec<&str> = POOLS.into_iter().filter(|pool| !old.contains(pool)).collect();
    let away = stop(&dev, &old[..2]);
    waits_for(&dev, "1 of 3 replicas are connected and in sync, 2 are needed while");
    let write = Held::write(client, 2);
    write.is_held();
    resume(&away);
    let client = write.acknowledged(&dev);
    load.assert_progress(&dev, 100);
    dev.eventually("all are in sync", || (in_sync(&dev)? == 5).then_some(()));
    let away = stop(&dev, &[new[0], new[1], old[0]]);
    waits_for(&dev, "2 of 5 replicas are connected and in sync, 3 are needed while");
    let write = Held::write(client, 3);
    write.is_held();
    // The answer: all five are known, and any three of them are enough.
    resume(&away);
    signal(controller, "CONT");
    write.acknowledged(&dev).stop();
    dev.wait_for_volume("db", "grown", |volume| {
        all_in_sync(volume) && factors(volume) == [5, 3, 5]
    });
    let shown = dev.json(&["volume", "get", "db", "--manifest"]);
    let list = shown["status"]["replicaList"].as_array().unwrap();
    for (_, id, guid) in known(&dev) {
        assert!(
            list.iter().any(|r| r["replicaId"] == *id && r["replicaGuid"] == *guid),
            "{list:?}"
        );
    }
    assert!(list.len() == 5 && before.iter().all(|one| known(&dev).contains(one)));
    let away = stop(&dev, &old[..2]);
    dev.eventually("three are left", || (in_sync(&dev)? == 3).then_some(()));
    load.assert_progress(&dev, 100);
    let fourth = stop(&dev, &old[2..]);
    waits_for(&dev, "2 of 5 replicas are connected and in sync, 3 are needed");
    resume(&[away, fourth].concat());
    end(&scratch, dev, load, 5);
}

/// Proves SCALE-ADMIT-06.
#[test]
fn a_surplus_newcomer_is_refused_and_alarms() {
    let (scratch, dev) = cluster("too-many", "4");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    // A fourth is made, and one of the three leaves: three are desired, and still connected.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
    let new = made(&dev);
    dev.ok(&["replica", "remove", "db", &before[0].0]);
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 2, 3]);
    signal(target, "CONT");
    let reported = dev.eventually("an alarm", || events(&dev, "TooManyReplicas").pop());
    assert_eq!(
        reported,
        format!(
            "pool {}: it was turned away: too many replicas are connecting: all that are desired are \
             known and connected",
            new["pool"].as_str().unwrap()
        )
    );
    let reported = dev.ok(&["events", "-o", "json"]);
    let reported: Vec<Value> = serde_json::from_str(&reported).unwrap();
    let alarms: Vec<_> = reported.iter().filter(|e| e["reason"] == "TooManyReplicas").collect();
    assert!(alarms.iter().all(|e| e["severity"] == "Warning"), "{alarms:?}");
    // There is a place for it once the other one has left.
    dev.wait_for_volume("db", "exchanged", |volume| {
        all_in_sync(volume) && factors(volume) == [3, 2, 3]
    });
    let after = known(&dev);
    assert!(after.iter().any(|(_, id, _)| new["id"] == **id), "{after:?}");
    assert!(!after.contains(&before[0]) && after.contains(&before[1]), "{after:?}");
    load.assert_progress(&dev, 100);
    end(&scratch, dev, load, 3);
}

/// Proves SCALE-ID-08.
#[test]
fn two_replicas_with_one_id_count_once() {
    let (scratch, dev) = cluster("once", "4");
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let client = dev.client("db");
    let before = known(&dev);
    let pools: Vec<&str> = before.iter().map(|(pool, ..)| pool.as_str()).collect();
    let to = POOLS.into_iter().find(|pool| !pools.contains(pool)).unwrap();
    // Both hold everything, and the new one may rule alone soon.
    let (target, controller) =
        unanswered(&dev, &load, &["replica", "move", "db", pools[0], "--to", to], 1);
    let others = stop(&dev, &pools[1..]);
    waits_for(&dev, "1 of 3 replicas are connected and in sync, 2 are needed while");
    let write = Held::write(client, 1);
    write.is_held();
    resume(&others);
    let client = write.acknowledged(&dev);
    signal(controller, "CONT");
    dev.wait_for_volume("db", "moved", |volume| {
        all_in_sync(volume) && factors(volume) == [3, 2, 3]
    });
    let after = known(&dev);
    let of_the_id: Vec<_> = after.iter().filter(|(_, id, _)| *id == before[0].1).collect();
    assert!(of_the_id.len() == 1 && of_the_id[0].0 == to, "{after:?}");
    // The newcomer connects anew and replaces its own session.
    for _ in 0..3 {
        dev.kill(to);
        dev.eventually("all are in sync", || {
            let now = in_sync(&dev)?;
            assert!(now <= 3, "{now} of three");
            (now == 3).then_some(())
        });
        load.assert_progress(&dev, 50);
    }
    assert_eq!(dev.pid("target"), Some(target));
    client.stop();
    end(&scratch, dev, load, 3);
}

/// Returns a list that a target reports: the factors, and pool, id and GUID of each entry.
fn reported(list: &Value) -> ([u64; 3], Vec<(String, String, String)>) {
    let text = |entry: &Value, key: &str| entry[key].as_str().unwrap().to_owned();
    let entry = |e: &Value| (text(e, "pool"), text(e, "replicaId"), text(e, "replicaGuid"));
    let entries = list["replicaList"].as_array().unwrap();
    (factors(list), entries.iter().map(entry).collect())
}

/// Proves SCALE-CONF-01, SCALE-CONF-02, SCALE-CONF-03, SCALE-CONF-04, SCALE-CONF-05,
/// SCALE-CONF-14.
#[test]
fn a_target_shows_its_initial_present_and_requested_configuration() {
    const CONFIG: [&str; 3] = ["target", "config", "db"];
    let (scratch, dev) = cluster("config", "5");
    let printed = refused(&dev, &CONFIG);
    assert!(printed.contains("volume \"db\" does not exist"), "{printed}");
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let printed = refused(&dev, &CONFIG);
    assert!(
        printed.contains("attached nowhere") && printed.contains("quoin volume attach"),
        "{printed}"
    );
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let three = ([3, 2, 3], known(&dev));
    // The target may have reported nothing yet, which is an error.
    let telling = || {
        let output = dev.quoin(&[&CONFIG[..], &["-o", "json"]].concat());
        serde_json::from_slice::<Value>(&output.stdout).ok()
    };
    let shown =
        dev.eventually("three are in sync", || telling().filter(|shown| shown["inSync"] == 3));
    assert_eq!(
        (reported(&shown["atStart"]), reported(&shown["now"])),
        (three.clone(), three.clone())
    );
    assert_eq!((&shown["state"], &shown["neededToOpen"]), (&"serving".into(), &2.into()));
    assert_eq!(shown["epoch"], dev.json(&["volume", "get", "db"])["epoch"]);
    assert!(shown.get("askedFor").is_none(), "{shown}");

    // Requested while the target does not receive: both are shown.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    dev.ok(&FIVE);
    let shown = dev.json(&CONFIG);
    assert_eq!(
        (reported(&shown["atStart"]), reported(&shown["now"])),
        (three.clone(), three.clone())
    );
    let asked = &shown["askedFor"];
    assert_eq!((&asked["replicationFactor"], &asked["consistencyFactor"]), (&5.into(), &3.into()));
    assert_eq!(
        (&asked["told"], &asked["changing"]),
        (&false.into(), &"2 replicas being added".into())
    );
    let text = dev.ok(&CONFIG);
    assert!(text.contains("5 replicas, 3 of which hold a write: 2 replicas being added"), "{text}");
    assert!(text.contains("the target does not know it yet"), "{text}");
    signal(target, "CONT");
    dev.wait_for_volume("db", "grown", |volume| {
        all_in_sync(volume) && factors(volume) == [5, 3, 5]
    });
    let five = ([5, 3, 5], known(&dev));
    let shown = dev.eventually("it says so", || {
        telling().filter(|shown| shown["inSync"] == 5 && shown["askedFor"].is_null())
    });
    assert_eq!((reported(&shown["atStart"]), reported(&shown["now"])), (three, five.clone()));
    let text = dev.ok(&CONFIG);
    assert!(text.contains("5 (3 at its start)"), "{text}");
    assert_eq!(text.matches("since its start").count(), 2, "{text}");
    assert!(dev.ok(&[&CONFIG[..], &["-o", "yaml"]].concat()).contains("replicationFactor: 5"));

    // The target's successor begins with the present records.
    dev.kill("target");
    let shown = dev.eventually("it is told anew", || {
        telling().filter(|shown| reported(&shown["atStart"]).0 == [5, 3, 5])
    });
    assert_eq!((reported(&shown["atStart"]), reported(&shown["now"])), (five.clone(), five));
    load.assert_progress(&dev, 100);
    end(&scratch, dev, load, 5);
}

/// Proves SCALE-ADMIT-13.
#[test]
fn a_first_replica_is_known_at_once_and_a_later_one_after_its_rebuild() {
    let (scratch, dev) = cluster("first", "3");
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let first = replicas(&dev);
    assert!(first.iter().all(|(.., known, quorum)| *known && *quorum), "{first:?}");
    // IO starts on two; the third is on the list, empty, with its quorum on.
    let away = stop(&dev, &[&first[2].0]);
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.eventually("two are in sync", || (in_sync(&dev)? == 2).then_some(()));
    assert_eq!(known(&dev).len(), 3);
    resume(&away);
    dev.wait_for_volume("db", "whole", all_in_sync);
    assert_eq!(replicas(&dev), first);
    // The list has been complete: its replacement is not known before it is rebuilt.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    let (pool, id, guid, ..) = &first[2];
    std::fs::remove_file(dev.pool_file(pool)).unwrap();
    dev.kill(pool);
    let new = made(&dev);
    assert_eq!((&new["known"], &new["quorum"]), (&false.into(), &false.into()));
    assert!(new["id"] == **id && new["guid"] != **guid, "{new}");
    signal(target, "CONT");
    dev.wait_for_volume("db", "whole", all_in_sync);
    assert!(known(&dev).iter().any(|(_, same, now)| same == id && new["guid"] == **now));
    load.assert_progress(&dev, 100);
    end(&scratch, dev, load, 3);
}
