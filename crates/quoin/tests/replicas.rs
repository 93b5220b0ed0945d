//! The user stories of replicas on real processes: added, moved, replaced, removed, under a client
//! that verifies; and afterwards every copy alone, read with nothing of Quoin running.

use crate::support;

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use support::load::Load;
use support::stories::*;
use support::{Dev, block, signal};

/// Proves SCALE-TEST-04, SCALE-TEST-05, SCALE-GOAL-01, SCALE-GOAL-03, SCALE-STORY-01,
/// SCALE-CONF-10, SCALE-CONF-11.
#[test]
fn a_volume_of_one_replica_is_scaled_to_three_complete_replicas() {
    let (scratch, dev) = cluster("scale", "5");
    let load = volume(&dev, "1");
    let before = known(&dev);
    let scaled = waiting(&dev, &["volume", "scale", "db", "--replicas", "3"]);
    assert_eq!(factors(&scaled), [3, 2, 3]);
    // Formed is version 2: both joined in one change.
    assert_eq!(scaled["membershipVersion"], 3);
    let after = known(&dev);
    assert!(after.len() == 3 && before.iter().all(|first| after.contains(first)));
    load.assert_progress(&dev, 100);
    let scaled = waiting(&dev, &["volume", "scale", "db", "--replicas", "5"]);
    assert_eq!(factors(&scaled), [5, 3, 5]);
    load.assert_progress(&dev, 100);
    end(&scratch, dev, load, 5);
}

#[test]
fn cancelled_newcomers_under_load_cost_no_new_epoch() {
    let (scratch, dev) = cluster("taken-back", "4");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let epoch = dev.json(&["volume", "get", "db"])["epoch"].clone();
    for round in 0..6 {
        dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
        // During its creation, during its rebuild, and while the change is joint.
        std::thread::sleep(Duration::from_millis(round * 60));
        let replicas = dev.json(&["replica", "list", "db"]);
        let newcomer = replicas.as_array().unwrap().iter().find(|r| r["known"] == false);
        // A newcomer that is known by now leaves, which is a change like others.
        if newcomer.is_none() {
            dev.wait_for_volume("db", "whole", all_in_sync);
        }
        let last = newcomer.unwrap_or(&replicas[3])["pool"].as_str().unwrap().to_owned();
        dev.ok(&["replica", "remove", "db", &last]);
        let three = |volume: &Value| all_in_sync(volume) && factors(volume) == [3, 2, 3];
        dev.wait_for_volume("db", "of three replicas and whole", three);
        load.assert_progress(&dev, 100);
    }
    let scaled = waiting(&dev, &["volume", "scale", "db", "--replicas", "4"]);
    assert_eq!((factors(&scaled), &scaled["epoch"]), ([4, 3, 4], &epoch));
    end(&scratch, dev, load, 4);
}

/// Proves SCALE-STORY-04, SCALE-STORY-06, SCALE-ID-04, SCALE-GOAL-01, SCALE-GOAL-04.
#[test]
fn a_replica_is_moved_to_another_pool_under_load_and_leaves_nothing_behind() {
    let (scratch, dev) = cluster("move", "4");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    let (from, id, guid) = before[0].clone();
    let taken: Vec<_> = before.iter().map(|(pool, ..)| pool.as_str()).collect();
    let free = ["pool-a", "pool-b", "pool-c", "pool-d"];
    let free = free.into_iter().find(|pool| !taken.contains(pool)).unwrap();
    let moved = waiting(&dev, &["replica", "move", "db", &from, "--to", free]);
    assert_eq!(factors(&moved), [3, 2, 3]);
    let after = known(&dev);
    let (.., new) = after.iter().find(|(pool, same, _)| pool == free && *same == id).unwrap();
    assert_ne!(*new, guid);
    dev.eventually("the old pool deletes its copy", || {
        let pools = dev.json(&["pool", "list"]);
        let old = pools.as_array().unwrap().iter().find(|p| p["name"] == *from).cloned();
        old.filter(|pool| pool["replicas"] == 0)
    });
    load.assert_progress(&dev, 100);
    // Requested again, by the pool it was on or by its id, it is there already.
    for named in [from.as_str(), id.as_str()] {
        let printed = dev.ok(&["replica", "move", "db", named, "--to", free]);
        assert_eq!(printed.matches(&format!("replica {id} is on pool {free} already")).count(), 1);
    }
    let printed = dev.ok(&["replica", "replace", "db", &id]);
    assert!(printed.contains("nothing is to be replaced"), "{printed}");
    let text = refused(&dev, &["replica", "move", "db", "pool-x", "--to", free]);
    assert!(text.contains("there is no pool pool-x; pools are pool-a, pool-b"), "{text}");
    assert_eq!(known(&dev), after);
    // Moved back, though it was there before: under yet another GUID.
    waiting(&dev, &["replica", "move", "db", free, "--to", &from]);
    assert!(known(&dev).iter().all(|(_, _, again)| *again != guid && again != new));
    end(&scratch, dev, load, 3);
}

/// Proves SCALE-STORY-07, SCALE-SHORT-01, SCALE-GOAL-05.
#[test]
fn a_replaced_replica_of_a_hanging_pool_never_connects_again() {
    let (scratch, dev) = cluster("replace", "4");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let (pool, id, old) = known(&dev)[1].clone();
    let pid = dev.pid(&pool).unwrap();
    signal(pid, "STOP");
    load.assert_progress(&dev, 200);
    let replaced = waiting(&dev, &["replica", "replace", "db", &pool]);
    assert_eq!(factors(&replaced), [3, 2, 3]);
    let (.., new) = known(&dev).into_iter().find(|(_, same, _)| *same == id).unwrap();
    assert_ne!(new, old);
    load.assert_progress(&dev, 100);
    // The replaced one comes back, with everything else restarted in every order.
    signal(pid, "CONT");
    let restarts: [&[&str]; 4] =
        [&[], &["target"], &["controller", "target"], &["pool-a", "pool-b", "pool-c", "pool-d"]];
    for restart in restarts {
        for process in restart {
            dev.kill(process);
        }
        load.assert_progress(&dev, 50);
        dev.wait_for_volume("db", "whole", all_in_sync);
        let list = known(&dev);
        assert!(list.len() == 3 && list.iter().all(|(.., guid)| *guid != old), "{list:?}");
    }
    dev.eventually("the retired copy is deleted", || {
        let pools = dev.json(&["pool", "list"]);
        let there = pools.as_array().unwrap().iter().find(|p| p["name"] == *pool).cloned();
        there.filter(|there| there["replicas"] == 0)
    });
    end(&scratch, dev, load, 3);
}

/// Proves SCALE-TEST-11, SCALE-VALID-03.
#[test]
fn replicas_are_removed_only_by_name_and_wrong_requests_change_nothing() {
    let (scratch, dev) = cluster("remove", "3");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    let text = refused(&dev, &["volume", "scale", "db", "--replicas", "2"]);
    assert!(text.contains("quoin replica remove"), "{text}");
    assert!(refused(&dev, &["volume", "scale", "db", "--replicas", "6"]).contains("at most 5"));
    let text = refused(&dev, &["volume", "scale", "db", "--replicas", "4"]);
    assert!(text.contains("add a pool"), "{text}");
    let text = refused(&dev, &["volume", "scale", "db", "--consistency-factor", "1"]);
    assert!(text.contains("--allow-loss-on-single-failure"), "{text}");
    let text = refused(&dev, &["replica", "remove", "db", "pool-a", "pool-b", "pool-c"]);
    assert!(text.contains("delete it"), "{text}");
    assert!(
        refused(&dev, &["replica", "move", "db", "pool-a", "--to", "pool-b"]).contains("pool-b")
    );
    assert_eq!(known(&dev), before);
    // A remaining one is away: none leaves.
    let pid = dev.pid("pool-c").unwrap();
    signal(pid, "STOP");
    dev.wait_for_volume("db", "degraded", |volume| volume["health"] == "Degraded");
    let text = refused(&dev, &["replica", "remove", "db", "pool-a"]);
    assert!(text.contains("not in sync"), "{text}");
    signal(pid, "CONT");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let removed = waiting(&dev, &["replica", "remove", "db", "pool-a", "pool-b"]);
    assert_eq!(factors(&removed), [1, 1, 1]);
    let text = refused(&dev, &["replica", "remove", "db", &before[0].1]);
    assert!(text.contains("no replica") && text.contains("on pool pool-c"), "{text}");
    load.assert_progress(&dev, 100);
    dev.kill("target");
    load.assert_progress(&dev, 100);
    let scaled = waiting(&dev, &["volume", "scale", "db", "--replicas", "3"]);
    assert_eq!(factors(&scaled), [3, 2, 3]);
    let gone: Vec<_> = before.iter().filter(|(pool, ..)| pool != "pool-c").collect();
    let after = known(&dev);
    assert!(gone.iter().all(|(_, id, guid)| after.iter().all(|(_, i, g)| i != id && g != guid)));
    end(&scratch, dev, load, 3);
}

/// Proves SCALE-TEST-06.
#[test]
fn a_change_is_completed_after_kills_of_controller_target_and_newcomers() {
    let (scratch, dev) = cluster("dying", "4");
    let load = volume(&dev, "3");
    for (round, victims) in
        [&["controller"][..], &["target"], &["pool-d"], &["controller", "target"]]
            .iter()
            .enumerate()
    {
        dev.wait_for_volume("db", "whole", all_in_sync);
        let list = known(&dev);
        let spare = ["pool-a", "pool-b", "pool-c", "pool-d"]
            .into_iter()
            .find(|pool| list.iter().all(|(held, ..)| held != pool))
            .unwrap();
        let (pool, id, guid) = list[round % 3].clone();
        dev.ok(&["replica", "move", "db", &pool, "--to", spare]);
        std::thread::sleep(Duration::from_millis(40 * round as u64));
        for victim in *victims {
            dev.kill(victim);
        }
        dev.wait_for_volume("db", "changed", |volume| volume["changing"] == "");
        let after = known(&dev);
        assert!(after.len() == 3 && after.iter().all(|(.., g)| *g != guid), "{after:?}");
        assert!(after.iter().any(|(pool, i, _)| pool == spare && *i == id));
        load.assert_progress(&dev, 50);
    }
    end(&scratch, dev, load, 3);
}

/// Proves SCALE-SHORT-01, SCALE-ADMIT-16, SCALE-GOAL-06.
#[test]
fn a_replica_on_an_absent_pool_is_replaced_automatically_and_completely() {
    let (scratch, dev) = healing("heal", "4", "2s");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let (pool, id, old) = known(&dev)[1].clone();
    let pid = dev.pid(&pool).unwrap();
    signal(pid, "STOP");
    dev.eventually("it is replaced", || {
        let list = known(&dev);
        (list.len() == 3 && list.iter().all(|(.., guid)| *guid != old)).then_some(())
    });
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    let (place, ..) = known(&dev).into_iter().find(|(_, same, _)| *same == id).unwrap();
    assert_ne!(place, pool);
    let reported = events(&dev, "ReplicaHeals");
    assert!(
        reported.len() == 1 && reported[0].contains(&pool) && reported[0].contains("2s"),
        "{reported:?}"
    );
    // Back with all its data, it is refused and cleared.
    signal(pid, "CONT");
    dev.eventually("the old copy is deleted", || (held(&dev, &pool) == 0).then_some(()));
    load.assert_progress(&dev, 100);
    assert!(known(&dev).iter().all(|(.., guid)| *guid != old));
    let kept = factors(&dev.json(&["volume", "get", "db"]));
    assert_eq!(kept, [3, 2, 3], "nobody but a person raises RF or DRF");
    end(&scratch, dev, load, 3);
}

#[test]
fn a_pool_is_drained_under_load_through_a_kill_of_the_controller() {
    let (scratch, dev) = cluster("drained", "4");
    let load = volume(&dev, "3");
    dev.wait_for_volume("db", "whole", all_in_sync);
    let (pool, id, old) = known(&dev)[0].clone();
    // All pools of `quoin dev` are on one node.
    let nodes = dev.json(&["node", "list"]);
    let node = nodes[0]["name"].as_str().unwrap();
    let text = refused(&dev, &["node", "drain", node]);
    assert!(text.contains("no good copy") && text.contains("nothing was begun"), "{text}");
    let planned = dev.json(&["pool", "drain", &pool, "--dry-run"]);
    assert_eq!(planned["replicas"][0]["without"], "2 of 3 good copies");
    assert!(planned["replicas"][0]["to"].as_str().is_some_and(|to| to.starts_with("pool-")));
    dev.ok(&["pool", "drain", &pool]);
    dev.kill("controller");
    dev.wait_for_volume("db", "changed", |_| true);
    let drained = waiting(&dev, &["pool", "drain", &pool]);
    assert_eq!(drained["state"], "drained");
    load.assert_progress(&dev, 100);
    let after = known(&dev);
    assert!(after.iter().all(|(place, _, guid)| *place != pool && *guid != old));
    assert!(after.iter().any(|(_, same, _)| *same == id));
    assert_eq!(held(&dev, &pool), 0);
    // The node takes nothing new, until it is opened again; and now there is no destination left.
    let other = after[0].0.clone();
    let text = refused(&dev, &["pool", "drain", &other]);
    assert!(text.contains(&format!("{pool} (drained)")), "{text}");
    dev.ok(&["pool", "uncordon", &pool]);
    dev.wait_for_volume("db", "whole", all_in_sync);
    waiting(&dev, &["pool", "drain", &other]);
    assert_eq!(held(&dev, &other), 0);
    end(&scratch, dev, load, 3);
}

#[test]
fn a_detached_volume_is_scaled_and_healed_without_loss() {
    let (scratch, dev) = healing("unused", "5", "2s");
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "1"]);
    let client = dev.client("db");
    for lba in 0..512 {
        client.write(lba * 4096, block(lba, 7).into(), false).unwrap();
    }
    client.flush().unwrap();
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let scaled = waiting(&dev, &["volume", "scale", "db", "--replicas", "3"]);
    assert_eq!(factors(&scaled), [3, 2, 3]);
    assert_eq!(scaled["use"], "detached");
    let (pool, _, old) = known(&dev)[0].clone();
    let pid = dev.pid(&pool).unwrap();
    signal(pid, "STOP");
    dev.eventually("it is replaced", || {
        let list = known(&dev);
        (list.len() == 3 && list.iter().all(|(.., guid)| *guid != old)).then_some(())
    });
    signal(pid, "CONT");
    dev.wait_for_volume("db", "whole", all_in_sync);
    // No client could have connected, and no process keeps it open.
    let id = dev.json(&["volume", "get", "db"])["id"].as_str().unwrap().to_owned();
    assert!(!dev.directory.join(format!("run/nbd/{id}.sock")).exists());
    dev.eventually("its target is gone", || {
        dev.log("target").lines().last()?.contains("not served here any more").then_some(())
    });
    let tended = events(&dev, "VolumeTended");
    assert!(tended.len() >= 2 && tended[0].contains("2 replicas being added"), "{tended:?}");
    let client = dev.client("db");
    for lba in 0..512 {
        assert_eq!(client.read(lba * 4096, 4096).unwrap(), block(lba, 7));
    }
    client.stop();
    compare(&scratch, dev, 3);
}

/// Proves SCALE-CONF-06, SCALE-CONF-07, SCALE-CONF-15, SCALE-ID-06, SCALE-STORY-05, SCALE-TEST-05,
/// SCALE-TEST-10.
#[test]
fn a_document_declares_where_replicas_are_and_its_status_shows_the_known_list() {
    let (scratch, dev) = cluster("declare", "4");
    let file = scratch.0.join("db.yaml");
    let path = file.to_str().unwrap();
    let write = |spec: &str| {
        let head = "apiVersion: quoin/v1\nkind: Volume\nmetadata: {name: db}\nspec:\n";
        std::fs::write(&file, format!("{head}{spec}")).unwrap();
    };
    write("  size: 8MiB\n  desiredReplicationFactor: 1\n  replicas: [{pool: pool-b}]\n");
    assert_eq!(dev.quoin(&["diff", "-f", path]).status.code(), Some(3));
    dev.ok(&["apply", "-f", path]);
    assert_eq!(dev.ok(&["diff", "-f", path]), "volume db: as declared");
    let load = Load::start(dev.client("db"), 3);
    load.assert_progress(&dev, 100);
    // A field of the status is not a request.
    write("  replicationFactor: 3\n");
    assert!(refused(&dev, &["apply", "-f", path]).contains("replicationFactor"));
    write("  desiredReplicationFactor: 3\n  replicas: [{pool: pool-b}, {pool: pool-d}]\n");
    dev.ok(&["apply", "-f", path, "--wait", "--timeout", "170"]);
    let shown = dev.json(&["volume", "get", "db", "--manifest"]);
    let status = &shown["status"];
    assert_eq!(
        (&status["replicationFactor"], &status["consistencyFactor"]),
        (&3.into(), &2.into())
    );
    let list = status["replicaList"].as_array().unwrap();
    for (pool, id, guid) in known(&dev) {
        assert!(list.iter().any(|r| r["replicaId"] == *id && r["replicaGuid"] == *guid), "{pool}");
        let listed = shown["spec"]["replicas"].as_array().unwrap();
        assert!(listed.iter().any(|r| r["replicaId"] == *id && r["pool"] == *pool));
    }
    assert!(list.len() == 3 && known(&dev).iter().any(|(pool, ..)| pool == "pool-d"));
    write("  desiredReplicationFactor: 2\n");
    assert!(
        refused(&dev, &["apply", "-f", path]).contains("name in spec.replicas those that stay")
    );
    // No document of several is applied where one cannot be.
    let several = "  size: 8MiB\n---\napiVersion: quoin/v1\nkind: Volume\nmetadata: {name: db}\n\
                   spec:\n  desiredReplicationFactor: 2\n";
    std::fs::write(
        &file,
        format!("apiVersion: quoin/v1\nkind: Volume\nmetadata: {{name: second}}\nspec:\n{several}"),
    )
    .unwrap();
    assert!(refused(&dev, &["apply", "-f", path]).contains("name in spec.replicas"));
    assert!(refused(&dev, &["volume", "get", "second"]).contains("second"));
    // The result of the other one is reported all the same.
    for command in [&["diff", "-f", path][..], &["apply", "--dry-run", "-f", path]] {
        let output = dev.quoin(command);
        assert_eq!(output.status.code(), Some(1));
        let [printed, error] =
            [output.stdout, output.stderr].map(|o| String::from_utf8(o).unwrap());
        assert!(printed.contains("volume second: volume made: 8 MiB"), "{printed}");
        assert!(error.contains("volume db") && error.contains("name in spec.replicas"), "{error}");
    }
    // A document that an editor saves is applied.
    let editor = "sed -i s/pool-d/pool-c/";
    let taken: Vec<_> = known(&dev).into_iter().map(|(pool, ..)| pool).collect();
    let free = ["pool-a", "pool-c"].into_iter().find(|p| !taken.iter().any(|t| t == p)).unwrap();
    let edited = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["edit", "db"])
        .env("QUOIN_SOCKET", &dev.admin_socket)
        .env("QUOIN_EDITOR", editor.replace("pool-c", free))
        .output()
        .unwrap();
    assert!(edited.status.success(), "{}", String::from_utf8_lossy(&edited.stderr));
    dev.wait_for_volume("db", "moved", |volume| volume["changing"] == "");
    assert!(known(&dev).iter().any(|(pool, ..)| pool == free));
    load.assert_progress(&dev, 100);
    end(&scratch, dev, load, 3);
}

/// Reads a pool with nothing of Quoin running; returns replica ids, GUIDs and quorum.
fn inspect(file: &std::path::Path) -> Vec<(String, String, bool)> {
    let output = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["pool", "inspect", "-o", "json"])
        .arg(file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let replicas: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |r: &Value, key: &str| r[key].as_str().unwrap().to_owned();
    let replicas = replicas.as_array().unwrap().iter();
    replicas.map(|r| (text(r, "id"), text(r, "guid"), r["quorum"] == true)).collect()
}

/// Proves SCALE-ID-01, SCALE-ID-07, SCALE-QUORUM-01, SCALE-QUORUM-02, SCALE-QUORUM-04,
/// SCALE-QUORUM-05, SCALE-QUORUM-06, SCALE-QUORUM-07.
#[test]
fn a_replica_stores_its_id_and_quorum_and_only_a_first_one_starts_with_quorum() {
    let (scratch, dev) = cluster("quorum", "4");
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let quorums = |dev: &Dev| -> Vec<(String, String, bool)> {
        let replicas = dev.json(&["replica", "list", "db"]);
        let text = |r: &Value, key: &str| r[key].as_str().unwrap().to_owned();
        let held = replicas.as_array().unwrap().iter();
        held.map(|r| (text(r, "pool"), text(r, "guid"), r["quorum"] == true)).collect()
    };
    // Made with the volume, before anything was ever written: on.
    assert!(quorums(&dev).len() == 3 && quorums(&dev).iter().all(|(.., quorum)| *quorum));
    let load = Load::start(dev.client("db"), 5);
    load.assert_progress(&dev, 100);
    dev.wait_for_volume("db", "whole", all_in_sync);
    // No target fills the new one: it is unchanged since its creation.
    let target = dev.pid("target").unwrap();
    signal(target, "STOP");
    dev.ok(&["volume", "scale", "db", "--replicas", "4"]);
    let born = dev.eventually("it is made", || {
        let new = dev.json(&["replica", "list", "db"]);
        let new = new.as_array().unwrap().iter().find(|r| r["known"] == false).cloned()?;
        (new["phase"] == "Rebuilding").then_some(new)
    });
    assert_eq!(born["quorum"], false);
    let pool = born["pool"].as_str().unwrap().to_owned();
    dev.kill(&pool);
    dev.eventually("it is there again", || {
        let now = dev.replica("db", &pool);
        (now["phase"] == "Rebuilding").then_some(())
    });
    let again = dev.replica("db", &pool);
    assert_eq!((&again["guid"], &again["quorum"]), (&born["guid"], &false.into()));
    signal(target, "CONT");
    dev.wait_for_volume("db", "whole", |volume| {
        all_in_sync(volume) && factors(volume) == [4, 3, 4]
    });
    assert!(quorums(&dev).iter().all(|(.., quorum)| *quorum), "what it holds may be read");
    load.assert_progress(&dev, 100);
    let listed = known(&dev);
    let files: Vec<_> = listed.iter().map(|(pool, ..)| dev.pool_file(pool)).collect();
    end(&scratch, dev, load, 4);
    for ((_, id, guid), file) in listed.iter().zip(files) {
        assert_eq!(inspect(&file), [(id.clone(), guid.clone(), true)]);
    }
}

/// Proves SCALE-TEST-12, SCALE-GOAL-02, SCALE-STORY-08, SCALE-STORY-09.
#[test]
fn a_volume_is_rebuilt_from_one_copy_after_two_pools_were_recreated() {
    let (scratch, dev) = cluster("recover", "3");
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let client = dev.client("db");
    for lba in 0..512 {
        client.write(lba * 4096, block(lba, 9).into(), false).unwrap();
    }
    client.flush().unwrap();
    dev.wait_for_volume("db", "whole", all_in_sync);
    let before = known(&dev);
    let text = refused(&dev, &["volume", "recover", "db", "--keep", "pool-a"]);
    assert!(text.contains("keep it too"), "with all there, nothing is given up: {text}");
    for pool in ["pool-b", "pool-c"] {
        std::fs::remove_file(dev.pool_file(pool)).unwrap();
    }
    dev.kill_together(&["pool-b", "pool-c"]);
    dev.eventually("both are known to be lost", || {
        let lost = events(&dev, "ReplicaGone").len();
        (lost >= 2).then_some(())
    });
    dev.wait_for_volume("db", "without a quorum", |volume| volume["health"] != "Online");
    let text = dev.eventually("it is refused without the word", || {
        let output = dev.quoin(&["volume", "recover", "db", "--keep", "pool-a"]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success());
        text.contains("--accept-loss-of").then_some(text)
    });
    assert!(text.contains("1 of 3 replicas are left"), "{text}");
    assert!(dev.json(&["volume", "get", "db"])["replicationFactor"] == 3);
    let command = ["volume", "recover", "db", "--keep", "pool-a", "--accept-loss-of", "db"];
    let output = dev.quoin(&[&command[..], &["-o", "json"]].concat());
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(warned.contains("may count on what is lost"), "{warned}");
    let recovered: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(factors(&recovered), [1, 1, 3]);
    // DRF is unchanged: RF follows by itself.
    dev.wait_for_volume("db", "whole", |volume| {
        all_in_sync(volume) && factors(volume) == [3, 2, 3]
    });
    let after = known(&dev);
    assert_eq!(after.len(), 3);
    assert!(after.contains(before.iter().find(|(pool, ..)| pool == "pool-a").unwrap()));
    let retired: Vec<_> = before.iter().filter(|(pool, ..)| pool != "pool-a").collect();
    assert!(retired.iter().all(|(.., old)| after.iter().all(|(.., guid)| guid != old)));
    // The client stayed connected; it reads everything that it wrote, and continues to write.
    for lba in 0..512 {
        assert_eq!(client.read(lba * 4096, 4096).unwrap(), block(lba, 9));
    }
    client.write(0, block(0, 10).into(), true).unwrap();
    client.stop();
    let shown = dev.json(&["volume", "get", "db"]);
    assert!(shown["contract"].as_str().unwrap().contains("recovered by hand"));
    assert_eq!(events(&dev, "VolumeRecovered").len(), 1);
    compare(&scratch, dev, 3);
}
