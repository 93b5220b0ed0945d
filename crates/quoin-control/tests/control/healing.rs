//! Replicas that are gone for too long, and their replacement without a user's request.

use std::time::Duration;

use quoin_api::control::VolumeSpec;
use quoin_cluster::records::{Cause, VolumeRecord};
use quoin_control::Move;
use tokio::time::Instant;

use crate::cluster::{Cluster, by_name, pools, spec};

const LONG: Duration = Duration::from_secs(601);

async fn returns(cluster: &mut Cluster, pool: &str) {
    cluster.pools.iter_mut().find(|p| p.name == pool).unwrap().online = true;
    cluster.settle().await.unwrap();
}

/// Heals now, and again after this time.
async fn looks(cluster: &mut Cluster, later: Duration) {
    let now = Instant::now();
    cluster.controller.work.healer.look_at_all(now).await.unwrap();
    cluster.controller.work.healer.look_at_all(now + later).await.unwrap();
    cluster.settle().await.unwrap();
}

fn newcomers(volume: &VolumeRecord) -> Vec<String> {
    volume.replicas.iter().filter(|r| !volume.is_known(r)).map(|r| r.pool.clone()).collect()
}

fn told(cluster: &Cluster, reason: &str) -> Vec<String> {
    let events = cluster.controller.state.events().after(0).into_iter();
    events.filter(|e| e.reason == reason).map(|e| e.message).collect()
}

/// Proves SCALE-GOAL-06.
#[tokio::test]
async fn a_replica_is_replaced_elsewhere_once_it_is_gone_for_longer_than_replace_after() {
    let mut cluster = Cluster::of(5).await;
    let volume = cluster.create("db").await;
    let old = volume.replicas[0].clone();
    cluster.goes(&old.pool).await;
    looks(&mut cluster, Duration::from_secs(599)).await;
    assert!(newcomers(&cluster.volume("db")).is_empty(), "it may come back by itself");
    looks(&mut cluster, LONG).await;
    let volume = cluster.volume("db");
    let [pool] = &newcomers(&volume)[..] else { panic!("{volume:?}") };
    assert!(["p4", "p5"].contains(&pool.as_str()), "by the rules of placement: {pool}");
    let new = volume.replicas.iter().find(|r| r.pool == *pool).unwrap();
    assert!(new.id == old.id && new.guid != old.guid && new.cause == Cause::Healing);
    assert_eq!(cluster.shown("db").changing, "1 replica being replaced");
    assert_eq!(cluster.shown("db").replicas.iter().filter(|r| r.cause == "healing").count(), 1);
    let said = told(&cluster, "ReplicaHeals");
    assert!(said.len() == 1 && said[0].contains(&old.pool) && said[0].contains("10m"), "{said:?}");
    // The replacement is under way: no other begins, however long it takes.
    looks(&mut cluster, LONG).await;
    assert_eq!(*cluster.volume("db"), *volume);
    // The old one counts until its target swaps the new one in; then it is retired.
    assert_eq!(volume.known_guid(old.id.0), Some(old.guid.0));
    cluster.attach("db", "n1").await.unwrap();
    let epoch = cluster.open_volume(volume.id.0, "n1", 9).await;
    let swap = cluster.swap("db", epoch, 9, |known| {
        known.iter_mut().filter(|m| m.id == new.id.0).for_each(|m| m.guid = new.guid.0);
    });
    cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
    looks(&mut cluster, LONG).await;
    assert_eq!(cluster.volume("db").membership.retired, [old.guid]);
    let membership = cluster.volume("db").membership.clone();
    assert_eq!(cluster.volume("db").replicas.len(), 3);
    assert_eq!((membership.rf, membership.drf), (3, 3), "nothing but people raises or lowers RF");
}

#[tokio::test]
async fn off_is_a_policy_and_a_volume_may_have_another_one_than_its_cluster() {
    // All of them are in the same three pools; others come later.
    let mut cluster = Cluster::new().await;
    for (name, after) in [("never", "off"), ("soon", "5s"), ("usual", "")] {
        let asked = VolumeSpec { replace_after: after.into(), ..spec(name) };
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
    }
    cluster.settle().await.unwrap();
    let shown = ["never", "soon", "usual"].map(|name| cluster.shown(name).replace_after);
    assert_eq!(shown, ["off", "5s", "10m"]);
    cluster.pools.extend(pools(4..=5));
    cluster.settle().await.unwrap();
    cluster.goes("p1").await;
    let begun = |cluster: &Cluster| {
        ["never", "soon", "usual"].map(|name| newcomers(&cluster.volume(name)).len())
    };
    looks(&mut cluster, Duration::from_secs(6)).await;
    assert_eq!(begun(&cluster), [0, 1, 0]);
    looks(&mut cluster, LONG * 1000).await;
    assert_eq!(begun(&cluster), [0, 1, 1]);
}

#[tokio::test]
async fn a_newcomer_whose_pool_goes_away_is_made_elsewhere_unless_a_person_named_the_pool() {
    let mut cluster = Cluster::new().await;
    for name in ["free", "named"] {
        let asked = VolumeSpec { replace_after: "off".into(), ..spec(name) };
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
    }
    cluster.settle().await.unwrap();
    cluster.pools.extend(pools(4..=4));
    cluster.settle().await.unwrap();
    for (name, to) in [("free", ""), ("named", "p4")] {
        let replica = cluster.volume(name).replicas[0].id.0;
        let asked = Move::of(replica).to(to);
        cluster
            .controller
            .volumes
            .replicas
            .move_replica(by_name(name).as_ref(), &asked)
            .await
            .unwrap();
        assert_eq!(newcomers(&cluster.volume(name)), ["p4"]);
    }
    cluster.settle().await.unwrap();
    cluster.pools.extend(pools(5..=5));
    cluster.settle().await.unwrap();
    cluster.goes("p4").await;
    looks(&mut cluster, Duration::from_secs(29)).await;
    assert_eq!(newcomers(&cluster.volume("free")), ["p4"], "it may come back by itself");
    looks(&mut cluster, Duration::from_secs(31)).await;
    assert_eq!(newcomers(&cluster.volume("free")), ["p5"]);
    let said = told(&cluster, "ReplicaHeals");
    assert!(said.len() == 1 && said[0].contains("before it counted"), "{said:?}");
    looks(&mut cluster, LONG).await;
    assert_eq!(newcomers(&cluster.volume("named")), ["p4"]);
    assert_eq!(newcomers(&cluster.volume("free")), ["p5"], "that one is there");
}

#[tokio::test]
async fn what_could_be_the_last_good_copy_is_waited_for_and_the_event_says_so() {
    let mut cluster = Cluster::of(5).await;
    cluster.create("db").await;
    let single = VolumeSpec { replicas: 1, ..spec("single") };
    cluster.controller.volumes.catalog.create(&single, 0).await.unwrap();
    cluster.settle().await.unwrap();
    let pools: Vec<_> = cluster.volume("db").replicas.iter().map(|r| r.pool.clone()).collect();
    let alone = cluster.volume("single").replicas[0].pool.clone();
    for pool in [&pools[0], &pools[1], &alone] {
        cluster.goes(pool).await;
    }
    looks(&mut cluster, LONG).await;
    looks(&mut cluster, LONG * 2).await;
    for name in ["db", "single"] {
        assert!(newcomers(&cluster.volume(name)).is_empty(), "made from nothing");
    }
    let said = told(&cluster, "HealWaits");
    assert!(said.iter().any(|m| m.contains("last good copy") && m.contains(&alone)), "{said:?}");
    assert!(said.iter().any(|m| m.contains("2 are needed")), "{said:?}");
    assert!(said.len() <= 6, "each reason is told once: {said:?}");
    assert!(cluster.controller.work.healer.counts().stuck >= 3);
    // With a majority there again, the third is replaced.
    returns(&mut cluster, &pools[0]).await;
    looks(&mut cluster, LONG).await;
    assert_eq!(newcomers(&cluster.volume("db")).len(), 1);
}

#[tokio::test]
async fn one_that_is_back_in_sync_before_its_successor_is_rebuilt_keeps_its_place() {
    let mut cluster = Cluster::of(5).await;
    let volume = cluster.create("db").await;
    let old = volume.replicas[0].clone();
    cluster.goes(&old.pool).await;
    looks(&mut cluster, LONG).await;
    assert_eq!(newcomers(&cluster.volume("db")).len(), 1);
    returns(&mut cluster, &old.pool).await;
    looks(&mut cluster, LONG).await;
    let after = cluster.volume("db");
    assert!(newcomers(&after).is_empty() && after.discarded.is_empty(), "{after:?}");
    assert_eq!(after.membership, volume.membership);
    assert_eq!(told(&cluster, "HealGivenUp").len(), 1);
    let held: usize = cluster.pools.iter().map(|p| p.holds.len()).sum();
    assert_eq!(held, 3, "what was begun is deleted");
}

#[tokio::test]
async fn the_most_endangered_volume_comes_first_and_a_pool_rebuilds_two_at_a_time() {
    let mut cluster = Cluster::new().await;
    cluster.pools.extend(pools(4..=6));
    // p6 comes last, so that every replacement can go there alone.
    let last = cluster.pools.pop().unwrap();
    cluster.settle().await.unwrap();
    for (name, replicas) in [("a-safe", 5), ("b-safe", 5), ("c-risky", 3), ("d-risky", 3)] {
        let asked = VolumeSpec { replicas, ..spec(name) };
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
        cluster.settle().await.unwrap();
    }
    let names = ["a-safe", "b-safe", "c-risky", "d-risky"];
    // Volumes of three replicas are moved so that all have a replica in p1 and none a free pool but
    // p6.
    for pool in ["p2", "p3", "p4", "p5"] {
        cluster
            .controller
            .work
            .cordons
            .set(&quoin_control::Scope::Pool(pool.into()), quoin_control::Cordoning::Cordon, false)
            .await
            .unwrap();
    }
    for name in ["c-risky", "d-risky"] {
        let volume = cluster.volume(name);
        if volume.replicas.iter().all(|r| r.pool != "p1") {
            let id = volume.replicas[0].id.0;
            cluster
                .controller
                .volumes
                .replicas
                .move_replica(by_name(name).as_ref(), &Move::of(id).to("p1"))
                .await
                .unwrap();
            cluster.settle().await.unwrap();
            cluster.attach(name, "n1").await.unwrap();
            let volume = cluster.volume(name);
            let epoch = cluster.open_volume(volume.id.0, "n1", 9).await;
            let new = volume.replicas.iter().find(|r| r.pool == "p1").unwrap().clone();
            let swap = cluster.swap(name, epoch, 9, |known| {
                known.iter_mut().filter(|m| m.id == new.id.0).for_each(|m| m.guid = new.guid.0);
            });
            cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
            cluster
                .controller
                .volumes
                .attachments
                .unpublish(by_name(name).as_ref(), "n1")
                .await
                .unwrap();
            cluster.settle().await.unwrap();
        }
    }
    cluster.pools.push(last);
    cluster.settle().await.unwrap();
    cluster.goes("p1").await;
    looks(&mut cluster, LONG).await;
    let begun = names.map(|name| newcomers(&cluster.volume(name)).len());
    assert_eq!(begun, [0, 0, 1, 1], "those that can lose the least, and two at a time");
    assert_eq!(cluster.controller.work.healer.counts().waiting, 2);
    looks(&mut cluster, LONG).await;
    assert_eq!(names.map(|name| newcomers(&cluster.volume(name)).len()), begun);
}

#[tokio::test]
async fn a_newcomer_whose_pool_goes_away_is_made_in_another_one() {
    let mut cluster = Cluster::of(5).await;
    let volume = cluster.create("db").await;
    let old = volume.replicas[0].clone();
    cluster.goes(&old.pool).await;
    looks(&mut cluster, LONG).await;
    let [first] = &newcomers(&cluster.volume("db"))[..] else { panic!() };
    cluster.goes(first).await;
    looks(&mut cluster, LONG).await;
    let volume = cluster.volume("db");
    let [second] = &newcomers(&volume)[..] else { panic!("one, not two: {volume:?}") };
    assert_ne!(second, first);
    assert!(volume.discarded.iter().any(|d| d.pool == *first), "deleted once its pool is back");
    assert_eq!(volume.known_guid(old.id.0), Some(old.guid.0));
}

#[tokio::test]
async fn one_change_of_a_volume_is_made_at_a_time() {
    let mut cluster = Cluster::of(5).await;
    let asked = VolumeSpec { replicas: 3, ..spec("db") };
    cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
    cluster.settle().await.unwrap();
    let scale = quoin_control::Scale { replicas: 4, ..Default::default() };
    cluster.controller.volumes.replicas.scale(by_name("db").as_ref(), &scale).await.unwrap();
    cluster.settle().await.unwrap();
    let pool = cluster.volume("db").replicas[0].pool.clone();
    cluster.goes(&pool).await;
    looks(&mut cluster, LONG).await;
    let volume = cluster.volume("db");
    assert_eq!(newcomers(&volume).len(), 1, "the scale-up comes first");
    assert_eq!(volume.replicas.len(), 4);
}

#[tokio::test]
async fn a_replica_that_its_target_reaches_is_there_though_its_pool_does_not_report() {
    let mut cluster = Cluster::of(5).await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 9).await;
    let guids: Vec<String> = volume.replicas.iter().map(|r| r.guid.0.to_string()).collect();
    let states: Vec<(&str, &str)> = guids.iter().map(|g| (g.as_str(), "in-sync")).collect();
    cluster.serving("db", &states).await;
    cluster.goes(&volume.replicas[0].pool).await;
    looks(&mut cluster, LONG).await;
    assert!(newcomers(&cluster.volume("db")).is_empty());
    // A replica that the target does not reach is gone, though its pool reports.
    returns(&mut cluster, &volume.replicas[0].pool).await;
    let states = [
        (guids[0].as_str(), "in-sync"),
        (guids[1].as_str(), "disconnected"),
        (guids[2].as_str(), "in-sync"),
    ];
    cluster.serving("db", &states).await;
    looks(&mut cluster, LONG).await;
    let after = cluster.volume("db");
    assert_eq!(newcomers(&after).len(), 1);
    let new = after.replicas.iter().find(|r| !after.is_known(r)).unwrap();
    assert_eq!(new.id, volume.replicas[1].id);
}
