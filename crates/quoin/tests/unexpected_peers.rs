//! Connected peers, by the report of the target, whatever restarts: replicas of the list, and never
//! one that was replaced or removed while its pool was away.

use crate::support;

use serde_json::Value;
use support::load::Load;
use support::stories::*;
use support::{Dev, block, signal};

const POOLS: [&str; 4] = ["pool-a", "pool-b", "pool-c", "pool-d"];
/// Controller, target and pools, in every combination.
const RESTARTS: std::ops::RangeInclusive<u8> = 1..=7;

/// Numbers of replicas in the target's report, by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Connected {
    in_sync: u64,
    catching_up: u64,
    rebuilding: u64,
}

impl Connected {
    fn all(self) -> u64 {
        self.in_sync + self.catching_up + self.rebuilding
    }
}

/// Returns the report of the target; `None` while it does not run.
fn connected(dev: &Dev) -> Option<Connected> {
    let text = ask_target(dev, "/metrics")?;
    let count = |state: &str| connected_as(&text, state);
    Some(Connected {
        in_sync: count("in_sync")?,
        catching_up: count("catching_up")?,
        rebuilding: count("rebuilding")?,
    })
}

/// Returns the GUIDs of the replicas that the target reaches, by its report to the controller. None
/// while the controller does not answer.
fn reached(dev: &Dev) -> Vec<String> {
    let output = dev.quoin(&["replica", "list", "db", "-o", "json"]);
    let replicas: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let phases = ["InSync", "CatchingUp", "Rebuilding"];
    let reached = |r: &&Value| phases.contains(&r["phase"].as_str().unwrap());
    let replicas = replicas.as_array().into_iter().flatten().filter(reached);
    replicas.map(|r| r["guid"].as_str().unwrap().to_owned()).collect()
}

/// Waits until exactly those of the list are connected, and asserts that no other was.
fn only_known_ones_connect(dev: &Dev, drf: u64, stranger: &str) {
    dev.eventually("all of the list are connected", || {
        assert!(!reached(dev).iter().any(|guid| guid == stranger), "{stranger} is connected");
        let now = connected(dev)?;
        assert!(now.all() <= drf, "{now:?}");
        (now == Connected { in_sync: drf, ..Connected::default() }).then_some(())
    });
    dev.wait_for_volume("db", "whole", all_in_sync);
    let list = known(dev);
    assert!(list.len() as u64 == drf && list.iter().all(|(.., guid)| guid != stranger));
}

fn spare(dev: &Dev) -> &'static str {
    let list = known(dev);
    POOLS.into_iter().find(|pool| list.iter().all(|(held, ..)| held != pool)).unwrap()
}

/// Restarts a combination of the parts while the pool with the stranger is stopped; then that pool
/// continues, or restarts where pools are among them, and reports its replicas.
fn restart(dev: &Dev, combination: u8, pool: &str, stopped: i64) {
    let mut parts = Vec::new();
    parts.extend((combination & 1 != 0).then_some("controller"));
    parts.extend((combination & 2 != 0).then_some("target"));
    if combination & 4 != 0 {
        parts.extend(POOLS);
    }
    let old: Vec<_> = parts.iter().map(|part| dev.pid(part).unwrap()).collect();
    for pid in &old {
        signal(pid, "KILL");
    }
    for (part, old) in parts.iter().zip(old) {
        dev.eventually(&format!("{part} is started again"), || {
            dev.pid(part).filter(|pid| *pid != old)
        });
    }
    if !parts.contains(&pool) {
        signal(stopped, "CONT");
    }
}

/// Waits until the pool of a stranger has received the order about its replica, and deleted it;
/// asserts that it was never connected.
fn comes_back_and_is_cleared(dev: &Dev, pool: &str, drf: u64, stranger: &str) {
    dev.eventually("its pool came back, and deletes it", || {
        assert!(!reached(dev).iter().any(|guid| guid == stranger), "{stranger} is connected");
        if let Some(now) = connected(dev) {
            assert!(now.all() <= drf, "{now:?}");
        }
        let output = dev.quoin(&["pool", "list", "-o", "json"]);
        let pools: Value = serde_json::from_slice(&output.stdout).ok()?;
        let pool = pools.as_array()?.iter().find(|p| p["name"] == pool)?;
        (pool["state"] == "Online" && pool["replicas"] == 0).then_some(())
    });
    only_known_ones_connect(dev, drf, stranger);
}

/// Proves SCALE-TEST-01.
#[test]
fn an_old_replica_that_is_started_does_not_connect() {
    let (scratch, dev) = cluster("old", "4");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let (pool, _, old) = known(&dev)[0].clone();
    let pid = dev.pid(&pool).unwrap();
    signal(pid, "STOP");
    waiting(&dev, &["replica", "replace", "db", &pool]);
    // Writes that it misses.
    load.assert_progress(&dev, 200);
    signal(pid, "KILL");
    comes_back_and_is_cleared(&dev, &pool, 3, &old);
    load.assert_progress(&dev, 100);
    end(&scratch, dev, load, 3);
}

/// Proves SCALE-TEST-02.
#[test]
fn there_are_never_more_than_the_desired_number_of_quorum_replicas() {
    let (scratch, dev) = cluster("at-most", "4");
    let load = volume(&dev, "2");
    let at_most = |dev: &Dev, drf: u64, what: &str, reached: &dyn Fn(&Value) -> bool| {
        dev.eventually(what, || {
            if let Some(now) = connected(dev) {
                assert!(now.all() <= drf, "{what}: {now:?}");
            }
            let output = dev.quoin(&["volume", "get", "db", "-o", "json"]);
            let volume = serde_json::from_slice(&output.stdout).ok()?;
            (all_in_sync(&volume) && reached(&volume)).then_some(())
        });
    };
    dev.wait_for_volume("db", "whole", all_in_sync);
    dev.ok(&["volume", "scale", "db", "--replicas", "3"]);
    at_most(&dev, 3, "it grows", &|volume| factors(volume) == [3, 2, 3]);
    for part in ["target", "pool-a", "controller", "pool-b"] {
        dev.kill(part);
        at_most(&dev, 3, "it is whole again", &|_| true);
        load.assert_progress(&dev, 50);
    }
    // One of the three is replaced while its pool is away, and comes back.
    let (pool, _, old) = known(&dev)[2].clone();
    let pid = dev.pid(&pool).unwrap();
    signal(pid, "STOP");
    dev.eventually("it is missed", || {
        (dev.replica("db", &pool)["phase"] == "Offline").then_some(())
    });
    dev.ok(&["replica", "replace", "db", &pool]);
    at_most(&dev, 3, "it is replaced", &|_| known(&dev).iter().all(|(.., guid)| *guid != old));
    signal(pid, "CONT");
    comes_back_and_is_cleared(&dev, &pool, 3, &old);
    dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
    at_most(&dev, 4, "it grows", &|volume| factors(volume) == [4, 3, 4]);
    load.assert_progress(&dev, 50);
    end(&scratch, dev, load, 4);
}

/// Proves SCALE-TEST-03.
#[test]
fn no_replica_without_quorum_connects_beside_all_desired_ones_with_quorum() {
    let (scratch, dev) = cluster("none-beside", "4");
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    // A fourth is desired, and hangs before it has all: it is connected, beside three of four.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
    let new = made(&dev);
    let (pool, stranger) = (new["pool"].as_str().unwrap(), new["guid"].as_str().unwrap());
    let pid = dev.pid(pool).unwrap();
    signal(pid, "STOP");
    signal(target, "CONT");
    load.assert_progress(&dev, 50);
    // The fourth is given up: the known ones stay, and it belongs to no list when it comes back.
    dev.ok(&["replica", "remove", "db", pool]);
    dev.wait_for_volume("db", "desired as before", |volume| factors(volume) == [3, 2, 3]);
    assert_eq!(known(&dev), before);
    only_known_ones_connect(&dev, 3, stranger);
    signal(pid, "CONT");
    comes_back_and_is_cleared(&dev, pool, 3, stranger);
    assert_eq!(known(&dev), before, "those that had quorum are the ones that are kept");
    load.assert_progress(&dev, 50);
    end(&scratch, dev, load, 3);
}

/// Loses a replica for each combination of restarted parts: while its pool is away it is lost by
/// `lose` (given its pool, its id, its GUID and a spare pool), comes back, and is never connected.
fn whichever_parts_restart(scratch: &str, lose: impl Fn(&Dev, &str, &str, &str, &str)) {
    let (scratch, dev) = cluster(scratch, "4");
    let load = volume(&dev, "3");
    for combination in RESTARTS {
        dev.wait_for_volume("db", "whole", all_in_sync);
        let (pool, id, old) = known(&dev)[usize::from(combination) % 3].clone();
        let pid = dev.pid(&pool).unwrap();
        signal(pid, "STOP");
        lose(&dev, &pool, &id, &old, spare(&dev));
        let list = known(&dev);
        load.assert_progress(&dev, 30);
        restart(&dev, combination, &pool, pid);
        comes_back_and_is_cleared(&dev, &pool, 3, &old);
        assert_eq!(known(&dev), list, "after restart {combination:03b}");
        load.assert_progress(&dev, 30);
    }
    end(&scratch, dev, load, 3);
}

/// Proves SCALE-TEST-07, SCALE-KNOWN-02, SCALE-ID-03.
#[test]
fn only_replicas_of_the_list_connect_after_any_restart() {
    whichever_parts_restart("listed", |dev, pool, id, old, to| {
        waiting(dev, &["replica", "replace", "db", pool]);
        let list = known(dev);
        let takes = list.iter().find(|(_, same, _)| same == id).unwrap();
        assert!(takes.0 == to && takes.2 != old, "the list has another GUID under this id");
    });
}

/// Proves SCALE-TEST-08, SCALE-SHORT-04.
#[test]
fn replicas_outside_the_list_do_not_connect_after_any_restart() {
    whichever_parts_restart("unlisted", |dev, pool, id, old, to| {
        // Removed by name and another one added: its id is on no list.
        let removed = waiting(dev, &["replica", "remove", "db", pool]);
        assert_eq!(factors(&removed), [2, 2, 2]);
        let scaled = waiting(dev, &["volume", "scale", "db", "--replicas", "3", "--pool", to]);
        assert_eq!(factors(&scaled), [3, 2, 3]);
        assert!(known(dev).iter().all(|(_, other, guid)| other != id && guid != old));
    });
}

/// Proves SCALE-TEST-10, SCALE-VALID-01.
#[test]
fn a_desired_factor_below_the_present_one_is_refused_and_changes_nothing() {
    let (scratch, dev) = cluster("smaller", "4");
    let file = scratch.0.join("db.yaml");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    let declare = |drf: u32| {
        let head = "apiVersion: quoin/v1\nkind: Volume\nmetadata: {name: db}\n";
        std::fs::write(&file, format!("{head}spec: {{desiredReplicationFactor: {drf}}}\n"))
            .unwrap();
        refused(&dev, &["apply", "-f", file.to_str().unwrap()])
    };
    for drf in [1, 2] {
        let text = refused(&dev, &["volume", "scale", "db", "--replicas", &drf.to_string()]);
        assert!(text.contains("quoin replica remove"), "{text}");
        assert!(declare(drf).contains("name in spec.replicas those that stay"));
    }
    assert!(refused(&dev, &["volume", "scale", "db", "--replicas", "6"]).contains("at most 5"));
    assert!(declare(6).contains("at most 5"));
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 2, 3]);
    // The same while a fourth is being made.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
    refused(&dev, &["volume", "scale", "db", "--replicas", "3"]);
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 2, 4]);
    assert_eq!(known(&dev), before);
    signal(target, "CONT");
    dev.wait_for_volume("db", "whole", |volume| {
        all_in_sync(volume) && factors(volume) == [4, 3, 4]
    });
    load.assert_progress(&dev, 50);
    end(&scratch, dev, load, 4);
}

/// Proves SCALE-SHORT-03, SCALE-IO-02.
#[test]
fn two_replaced_replicas_are_no_quorum_without_the_list() {
    let (scratch, dev) = cluster("no-quorum", "5");
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let client = dev.client("db");
    client.write(0, block(0, 1).into(), true).unwrap();
    dev.wait_for_volume("db", "whole", all_in_sync);
    // One after the other is lost and replaced; each misses the writes since.
    let mut lost = Vec::new();
    for (version, spare) in [(2, "pool-d"), (3, "pool-e")] {
        let (pool, _, guid) = known(&dev)[version as usize - 1].clone();
        let pid = dev.pid(&pool).unwrap();
        signal(pid, "STOP");
        // A pool that was stopped a moment ago is not known to be away, and might be chosen.
        waiting(&dev, &["replica", "replace", "db", &pool, "--pool", spare]);
        client.write(0, block(0, version).into(), true).unwrap();
        lost.push((pool, pid, guid));
    }
    dev.wait_for_volume("db", "whole", all_in_sync);
    let list = known(&dev);
    assert!(lost.iter().all(|(.., old)| list.iter().all(|(.., guid)| guid != old)));
    let away: Vec<_> = list.iter().map(|(pool, ..)| dev.pid(pool).unwrap()).collect();
    away.iter().for_each(|pid| signal(pid, "STOP"));
    // Both replicas come back with quorum on, to a target that knows nothing but its list.
    for (_, pid, _) in &lost {
        signal(pid, "CONT");
    }
    dev.kill("target");
    let read = std::thread::spawn(move || (client.read(0, 4096).unwrap(), client));
    dev.eventually("the old ones are back, and those of the list away", || {
        let pools = dev.json(&["pool", "list"]);
        let state = |name: &str| {
            let pool = pools.as_array().unwrap().iter().find(|p| p["name"] == name);
            pool.unwrap()["state"] == "Online"
        };
        assert!(!reached(&dev).iter().any(|guid| lost.iter().any(|(.., old)| guid == old)));
        let back = lost.iter().all(|(pool, ..)| state(pool));
        (back && list.iter().all(|(pool, ..)| !state(pool))).then_some(())
    });
    assert!(!read.is_finished(), "served by those that are not on the list");
    away.iter().for_each(|pid| signal(pid, "CONT"));
    let (newest, client) = read.join().unwrap();
    assert_eq!(newest, block(0, 3));
    client.stop();
    compare(&scratch, dev, 3);
}
