//! The controller dies at any write, before or after it lands; the next one continues.

use std::sync::atomic::Ordering;

use quoin_api::control::VolumeRef;
use quoin_control::{Error, Publish};
use quoin_types::{Epoch, Incarnation};

use crate::cluster::{Cluster, GIB, Memory, by_name, pools, spec};

/// A volume's whole life in steps, each of which its caller repeats until it is answered.
async fn step(cluster: &mut Cluster, number: usize) -> Result<(), Error> {
    let db = by_name("db");
    match number {
        0 => cluster.settle().await?,
        1 => drop(cluster.controller.volumes.catalog.create(&spec("db"), 0).await?),
        2 => cluster.settle().await?,
        3 => {
            let publish = Publish { node: "n1".into(), ..Publish::default() };
            cluster.controller.volumes.attachments.publish(db.as_ref(), &publish).await?;
        }
        4 => {
            let id = cluster.volume("db").id.0;
            let before = cluster.volume("db").opened.epoch;
            let acquired = cluster
                .controller
                .volumes
                .epochs
                .acquire(id, "n1", Incarnation(3), Epoch(0))
                .await?;
            let granted = acquired.expect("n1 is the owner");
            assert!(granted.epoch.0 > before, "an epoch was granted twice");
        }
        5 => {
            let pool = cluster.volume("db").replicas[0].pool.clone();
            let pool = cluster.pools.iter_mut().find(|p| p.name == pool).unwrap();
            // Only what is known is lost here, so that a repeat of the step loses nothing more.
            let volume = cluster.controller.volumes.catalog.get(db.as_ref())?;
            let known = &volume.membership.known[0].guid.0.to_string();
            pool.holds.remove(known);
            cluster.settle().await?;
        }
        6 => {
            let volume = cluster.volume("db");
            let known = volume.known_guid(volume.replicas[0].id.0).unwrap();
            if known != volume.replicas[0].guid.0 {
                let (epoch, who) = (Epoch(volume.opened.epoch), volume.opened.incarnation.0.0);
                let new = volume.replicas[0].guid.0;
                let asked = cluster.swap("db", epoch, who, |known| known[0].guid = new);
                cluster
                    .controller
                    .volumes
                    .epochs
                    .swap_membership(&asked)
                    .await?
                    .1
                    .expect("nothing else changed");
            }
        }
        7 => drop(cluster.controller.volumes.catalog.resize(db.as_ref(), 2 * GIB, 0).await?),
        8 => {
            let volume = cluster.volume("db");
            assert_eq!((volume.size_bytes, volume.membership.retired.len()), (2 * GIB, 1));
            cluster.controller.volumes.attachments.unpublish(db.as_ref(), "n1").await?;
            // Its target closes it in order: nobody's lease is waited for later.
            cluster
                .pools
                .iter_mut()
                .for_each(|pool| (pool.is_closed, pool.is_silent) = (true, true));
            cluster.settle().await?;
        }
        9 => {
            for volume in cluster.controller.volumes.catalog.list(0, "")?.0 {
                let id = VolumeRef { id: volume.id.0.to_string(), name: String::new() };
                cluster.controller.volumes.catalog.delete(Some(&id)).await?;
            }
        }
        10 => cluster.settle().await?,
        _ => unreachable!(),
    }
    Ok(())
}

const STEPS: usize = 11;

/// Runs a life with a crash after so many writes; returns whether it crashed. The number of writes
/// of a life without a crash bounds where one can be.
async fn live(crash_after: i64, last_write_lands: bool) -> bool {
    let store = Memory::crashing(crash_after, last_write_lands);
    let mut cluster = Cluster::with(store, pools(1..=3)).await;
    let mut crashed = cluster.store.crashed();
    if crashed {
        cluster.restart().await;
    }
    for number in 0..STEPS {
        while let Err(error) = step(&mut cluster, number).await {
            assert!(cluster.store.crashed(), "step {number} after {crash_after}: {error}");
            assert!(!crashed, "it crashes once");
            crashed = true;
            cluster.restart().await;
            if number > 0 {
                cluster.settle().await.unwrap();
            }
        }
        if let Ok(volume) = cluster.controller.volumes.catalog.get(by_name("db").as_ref()) {
            let membership = quoin_types::Membership::from(&volume.membership);
            membership.check().expect("the membership keeps its rules at every moment");
        }
    }
    cluster.settle().await.unwrap();
    assert_eq!(cluster.store.keys("volume"), Vec::<String>::new(), "after {crash_after}");
    assert!(cluster.pools.iter().all(|pool| pool.holds.is_empty()), "after {crash_after}");
    crashed
}

#[tokio::test]
async fn a_crash_at_any_write_of_a_volumes_life_loses_nothing_and_leaves_nothing_behind() {
    for last_write_lands in [false, true] {
        let mut writes = 0;
        while live(writes, last_write_lands).await {
            writes += 1;
        }
        assert!(writes > 15, "only {writes} writes were seen");
    }
}

#[tokio::test]
async fn a_write_without_an_answer_is_looked_at_by_the_tick_and_an_opening_of_the_records_is_told_once()
 {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let told = |cluster: &Cluster| {
        cluster.reasons().iter().filter(|reason| *reason == "RecordsOpenedAgain").count()
    };
    cluster.store.fail_at(0, true, false);
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap_err();
    cluster.store.opened_again.store(1, Ordering::SeqCst);
    for _ in 0..2 {
        cluster.controller.state.read_unanswered().await.unwrap();
        assert_eq!(told(&cluster), 1);
    }
    // The step was carried out all the same, and the rest follows by itself.
    assert_eq!(cluster.volume("db").phase, quoin_cluster::records::VolumePhase::Deleting);
    cluster.settle().await.unwrap();
    assert_eq!(cluster.store.keys("volume/"), Vec::<String>::new());
}
