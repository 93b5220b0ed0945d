//! Orders of calls of orchestrators of disaster recovery, over the sockets of two clusters.
//!
//! The manager of today enables and promotes what is to be primary and demotes the rest; that of the first edition
//! names volumes by `volume_id` and enables on every turn. After each move RamenDR cleans the old side up. Each byte of
//! each volume is compared with what was acknowledged.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use quoin_api::csi::ControllerGetVolumeRequest;
use quoin_api::csi_addons::replication::get_volume_replication_info_response::Status as State;
use quoin_api::csi_addons::replication::replication_destination::Type as Destination;
use quoin_nbd::client::Client;
use tonic::Code;

use crate::common::Scratch;
use crate::mirrors::{LOST, hold_all};
use crate::support::block;
use crate::support::orchestrator::*;

/// Application over a group of two volumes and one volume alone.
struct Application {
    a: String,
    b: String,
    group: String,
    alone: String,
    written: BTreeMap<String, Written>,
}

impl Application {
    fn ids(&self) -> [&str; 2] {
        [&self.a, &self.b]
    }

    fn write(&mut self, id: &str, client: &Client, from: u64, version: u64) {
        write(client, self.written.entry(id.to_owned()).or_default(), from, 200, version);
    }
}

/// Proves REPL-ENABLE-18, REPL-PROMOTE-20, REPL-PROMOTE-22, REPL-PROMOTE-23, REPL-DEMOTE-19, REPL-RESYNC-12,
/// REPL-INFO-09, REPL-INFO-22, REPL-DEST-09, REPL-COPY-01, REPL-COPY-02, REPL-COPY-05, REPL1-PROMOTE-01,
/// REPL1-RESYNC-13, ADDONS-GROUP-11, ADDONS-GROUP-22.
#[test]
fn orchestrators_deploy_fail_over_clean_up_and_come_back_and_every_byte_is_there() {
    let scratch = Scratch::new("orchestrators");
    let runtime = runtime();
    let (dev, [first, second]) = start(&scratch, &runtime);
    let began = Instant::now();
    let step = |what: &str| println!("{:5.1} s  {what}", began.elapsed().as_secs_f64());

    step("deployed");
    let mut application = deploy(&first, &second);
    step("a volume alone moves while both live");
    take_over_and_relocate(&first, &second, &mut application);
    step("the first cluster is lost");
    let more = fail_over(&first, &second, &mut application);
    step("it is back");
    old_side_comes_back(&first, &second, &application, &more);
    step("failback");
    fail_back(&first, &second, &mut application);
    step("the application is deleted");
    delete_application(&first, &second, &application);
    step("done");
    dev.stop();
}

fn deploy(first: &Side, second: &Side) -> Application {
    let [a, b, alone] = ["a", "b", "alone"].map(|name| first.create(name, None));
    let group_id = first.create_group("vgr-1", &[&a, &b]);
    let source = group(&group_id);
    let mut application = Application { a, b, group: group_id, alone, written: BTreeMap::new() };
    let Application { a, b, alone, .. } = &application;
    let (a, b, alone) = (a.clone(), b.clone(), alone.clone());
    for id in [&a, &b, &alone] {
        let client = first.open(id);
        application.write(id, &client, 0, 1);
        first.close(id, client);
    }
    // Asked for right after the group is made, before anything is enabled.
    assert_eq!(code(&first.destination(&source)), Code::FailedPrecondition);
    retried("turn", || first.turn_primary(&source, "refuse"));
    let Destination::Volumegroup(found) = first.destination(&source).unwrap() else {
        panic!("it is no group")
    };
    assert_eq!(found.volume_group_id, application.group);
    assert_eq!(found.volume_ids, [&a, &b].map(|id| (id.clone(), id.clone())).into());
    for _ in 0..3 {
        retried("turn", || first.first_edition_turn_primary(&alone, "takeOver"));
    }
    // The id is the same one, which the driver of the other side accepts.
    for id in [&a, &b, &alone] {
        let request = ControllerGetVolumeRequest { volume_id: id.clone() };
        let found = second.runtime.block_on(second.csi.clone().controller_get_volume(request));
        assert_eq!(&found.unwrap().into_inner().volume.unwrap().volume_id, id);
    }
    wait_for_sync(first, &source);
    wait_for_sync(first, &volume(&alone));
    give_the_present_members_again(first, &mut application);
    assert_eq!(code(&second.info(&source)), Code::FailedPrecondition, "it is a copy");
    assert_eq!(second.destination(&source).unwrap(), Destination::Volumegroup(found));

    // A drill: a clone of a copy has its last complete point.
    let drill = second.create("drill", Some(&a));
    let client = second.open(&drill);
    assert_holds(&client, &application.written[&a]);
    second.close(&drill, client);
    assert_eq!(second.delete(&drill), Code::Ok);

    // An idle group is known to be in sync at later moments.
    let before = first.info(&source).unwrap().last_sync_time.unwrap();
    let began = Instant::now();
    while first.info(&source).unwrap().last_sync_time.unwrap().seconds <= before.seconds {
        assert!(began.elapsed() < Duration::from_secs(20), "two intervals are over");
        std::thread::sleep(AGAIN);
    }
    // A copy is not promoted beside a primary, and force does not help.
    assert_eq!(code(&second.promote(&source, "refuse", false)), Code::Aborted);
    assert_eq!(code(&second.promote(&source, "refuse", true)), Code::Aborted);
    application
}

/// The members that a group has are asked for again and again, beside writes and exchanges.
fn give_the_present_members_again(first: &Side, application: &mut Application) {
    let source = group(&application.group);
    let [a, b] = application.ids().map(str::to_owned);
    let client = first.open(&a);
    // A lent target of a volume that is not attached may come and go.
    let beside = first.open(&b);
    let before = first.epochs();
    let destination = first.destination(&source).unwrap();
    let synced = first.info(&source).unwrap().last_sync_time.unwrap();
    let (mut version, mut longest) = (10, Duration::ZERO);
    let began = Instant::now();
    // Longer than an interval of the exchanges.
    while began.elapsed() < Duration::from_secs(12) {
        let order = if version % 2 == 0 { [a.as_str(), &b] } else { [b.as_str(), &a] };
        let answer = std::thread::scope(|scope| {
            let call = scope.spawn(|| first.modify_group(&application.group, &order));
            while !call.is_finished() {
                let began = Instant::now();
                client.write(0, block(0, version).into(), true).unwrap();
                longest = longest.max(began.elapsed());
            }
            call.join().unwrap()
        });
        assert_eq!(answer.unwrap(), 2);
        let info = first.info(&source).unwrap();
        assert_ne!(info.status(), State::Error, "{info:?}");
        application.written.get_mut(&a).unwrap().insert(0, version);
        version += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("the longest write beside {} calls took {longest:?}", version - 10);
    wait_for_sync(first, &source);
    let info = first.info(&source).unwrap();
    assert!(info.last_sync_time.unwrap().seconds > synced.seconds, "the exchanges go on");
    assert!(info.last_sync_bytes < VOLUME_BYTES as i64 / 8, "with what changed alone: {info:?}");
    assert_eq!(first.epochs(), before, "no target opened a volume again");
    assert_eq!(first.destination(&source).unwrap(), destination);
    first.close(&b, beside);
    first.close(&a, client);
}

/// With `takeOver` a failover beside a primary that lives loses nothing; then the volume is relocated.
fn take_over_and_relocate(first: &Side, second: &Side, application: &mut Application) {
    let id = application.alone.clone();
    let source = volume(&id);
    let client = first.open(&id);
    application.write(&id, &client, 100, 2);
    assert_eq!(code(&first.demote(&source, false)), Code::FailedPrecondition, "it is published");
    assert_eq!(code(&second.promote(&source, "takeOver", false)), Code::FailedPrecondition);
    retried("turn", || second.first_edition_turn_primary(&id, "takeOver"));
    drop(client);
    let there = second.open(&id);
    assert_holds(&there, &application.written[&id]);
    // The old side is cleaned up, and follows.
    first.unpublish(&id);
    assert_eq!(first.disable(&source), Code::Ok);
    assert_eq!(first.delete(&id), Code::Ok);
    assert_eq!(code(&first.publish(&id)), Code::FailedPrecondition);
    application.write(&id, &there, 250, 3);
    second.close(&id, there);

    first.turn_secondary(&source, true);
    retried("DemoteVolume", || second.demote(&source, false));
    assert_eq!(code(&second.demote(&source, false)), Code::Ok, "again");
    retried("turn", || first.first_edition_turn_primary(&id, "takeOver"));
    let here = first.open(&id);
    assert_holds(&here, &application.written[&id]);
    first.close(&id, here);
    second.turn_secondary(&source, true);
    assert_eq!(second.disable(&source), Code::Ok);
    assert_eq!(second.delete(&id), Code::Ok);
    // A demotion is forced on a volume that is published, and loses nothing.
    let here = first.open(&id);
    application.write(&id, &here, 300, 4);
    retried("DemoteVolume", || first.demote(&source, true));
    drop(here);
    retried("turn", || second.turn_primary(&source, "takeOver"));
    let there = second.open(&id);
    assert_holds(&there, &application.written[&id]);
    second.close(&id, there);
    first.turn_secondary(&source, true);
}

/// Returns what was acknowledged on the first side before it was lost.
fn fail_over(
    first: &Side,
    second: &Side,
    application: &mut Application,
) -> BTreeMap<String, Written> {
    let source = group(&application.group);
    let ids = application.ids().map(str::to_owned);
    let clients = ids.clone().map(|id| (first.open(&id), id));
    for (client, id) in &clients {
        application.write(id, client, 400, 5);
    }
    wait_for_sync(first, &source);
    let synced = application.written.clone();
    for (client, id) in &clients {
        application.write(id, client, 500, 6);
    }
    let more = application.written.clone();
    hold_all(&first.directory, &LOST, true);
    drop(clients);
    let refused = second.promote(&source, "refuse", true);
    assert!(matches!(code(&refused), Code::Aborted | Code::Unavailable), "{refused:?}");
    until("it is silent", Code::FailedPrecondition, || second.promote(&source, "refuse", false));
    retried("turn", || second.turn_primary(&source, "refuse"));
    assert_eq!(code(&second.promote(&source, "refuse", false)), Code::Ok, "again");
    assert_eq!(code(&second.enable(&source, "refuse")), Code::Ok, "with the peer away");
    assert!(second.destination(&source).is_ok(), "with the peer away");
    for id in &ids {
        let there = second.open(id);
        let (before, after) = (&synced[id], &more[id]);
        assert_bytes(&there, |lba| vec![before.get(&lba).copied(), after.get(&lba).copied()]);
        // Writes that were not shipped are not there.
        let written = application.written.get_mut(id).unwrap();
        for (lba, version) in after {
            let found = there.read(lba * BLOCK, BLOCK as u32).unwrap();
            if found[..] != block(*lba, *version)[..] {
                match before.get(lba) {
                    Some(version) => drop(written.insert(*lba, *version)),
                    None => drop(written.remove(lba)),
                }
            }
        }
        write(&there, written, 600, 200, 7);
        assert_holds(&there, written);
        second.close(id, there);
    }
    more
}

fn old_side_comes_back(
    first: &Side,
    second: &Side,
    application: &Application,
    more: &BTreeMap<String, Written>,
) {
    let source = group(&application.group);
    hold_all(&first.directory, &LOST, false);
    let ids = application.ids().map(str::to_owned);
    // Both are primary, and both say so. The one that was promoted has no sync of its own to tell of.
    let began = Instant::now();
    loop {
        let told = [first, second].map(|side| match side.info(&source) {
            Ok(info) => info.status() == State::Error,
            Err(why) => why.code() == Code::NotFound && why.message().contains("split brain"),
        });
        if told == [true, true] {
            break;
        }
        assert!(began.elapsed() < BUDGET, "{:?} {:?}", first.info(&source), second.info(&source));
        std::thread::sleep(AGAIN);
    }
    // The old side has what its applications were told, until it is demoted.
    for id in &ids {
        let here = first.open(id);
        assert_holds(&here, &more[id]);
        write(&here, &mut more[id].clone(), 0, 100, 9);
        first.close(id, here);
        // Nothing of the old side reaches the one that was promoted.
        let there = second.open(id);
        assert_holds(&there, &application.written[id]);
        second.close(id, there);
    }
    retried("DemoteVolume", || first.demote(&source, false));
    // Diverged: nothing is discarded without force.
    let began = Instant::now();
    loop {
        assert!(!first.resync(&source, false).unwrap_or(false));
        if code(&first.promote(&source, "refuse", true)) == Code::Aborted {
            break;
        }
        assert!(began.elapsed() < BUDGET, "it has not diverged");
        std::thread::sleep(AGAIN);
    }
    first.clean_up(&application.group, &application.ids());
    assert!(!first.resync(&source, false).unwrap(), "its data stay");
    assert_eq!(code(&first.demote(&source, false)), Code::Ok);
    first.turn_secondary(&source, true);
    first.clean_up(&application.group, &application.ids());
    // Again: what is sent meanwhile is waited for.
    first.turn_secondary(&source, true);
    wait_for_sync(second, &source);
}

fn fail_back(first: &Side, second: &Side, application: &mut Application) {
    let source = group(&application.group);
    let ids = application.ids().map(str::to_owned);
    for id in &ids {
        let there = second.open(id);
        application.write(id, &there, 700, 8);
        second.close(id, there);
    }
    retried("DemoteVolume", || second.demote(&source, false));
    retried("turn", || first.turn_primary(&source, "refuse"));
    // The orchestrator of this side asks for the members that it restored.
    let restored = first.modify_group(&application.group, &application.ids()).unwrap();
    assert_eq!(restored, 2);
    for id in &ids {
        let here = first.open(id);
        assert_holds(&here, &application.written[id]);
        first.close(id, here);
    }
    second.turn_secondary(&source, true);
    second.clean_up(&application.group, &application.ids());
}

fn delete_application(first: &Side, second: &Side, application: &Application) {
    let source = group(&application.group);
    assert_eq!(first.delete(&application.a), Code::FailedPrecondition, "it is replicated");
    assert_eq!(first.delete_group(&application.group), Code::FailedPrecondition);
    for _ in 0..2 {
        assert_eq!(first.disable(&source), Code::Ok);
    }
    assert_eq!(first.modify_group(&application.group, &[]).unwrap(), 0);
    assert_eq!(first.delete_group(&application.group), Code::Ok);
    for id in application.ids() {
        let here = first.open(id);
        assert_holds(&here, &application.written[id]);
        first.close(id, here);
        assert_eq!(first.delete(id), Code::Ok);
    }
    // The copies are orphans, which only a person or this cluster's own orchestrator deletes.
    until("it is an orphan", Code::FailedPrecondition, || second.enable(&source, "refuse"));
    retried("PromoteVolume", || second.promote(&source, "refuse", false));
    for id in application.ids() {
        let there = second.open(id);
        assert_holds(&there, &application.written[id]);
        second.close(id, there);
    }
    assert_eq!(second.modify_group(&application.group, &[]).unwrap(), 0);
    assert_eq!(second.delete_group(&application.group), Code::Ok);
    application.ids().iter().for_each(|id| assert_eq!(second.delete(id), Code::Ok));
}
