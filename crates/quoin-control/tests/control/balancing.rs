//! Pools that fill unevenly: the replicas that move, the time of their moves, and the precedence of
//! other work.

use std::time::Duration;

use quoin_api::control::{ReplicaProgress, VolumeSpec};
use quoin_cluster::records::{Cause, ReplicaRecord, VolumeRecord};
use quoin_control::{Cordoning, Move, Scope};
use tokio::time::Instant;

use crate::cluster::{Cluster, GIB, by_name, spec};

/// Longer than the rest of pools after a change.
const RESTED: Duration = Duration::from_secs(11);

async fn cordon(cluster: &Cluster, pool: &str, action: Cordoning) {
    cluster.controller.work.cordons.set(&Scope::Pool(pool.into()), action, false).await.unwrap();
}

/// Makes three pools of 100 GiB, and these volumes of one replica in the first: 15 GiB in each.
async fn uneven(asked: &[VolumeSpec]) -> Cluster {
    let mut cluster = Cluster::new().await;
    for pool in ["p2", "p3"] {
        cordon(&cluster, pool, Cordoning::Cordon).await;
    }
    for asked in asked {
        let single = VolumeSpec { replicas: 1, ..asked.clone() };
        cluster.controller.volumes.catalog.create(&single, 0).await.unwrap();
        cluster.settle().await.unwrap();
    }
    for pool in ["p2", "p3"] {
        cordon(&cluster, pool, Cordoning::Uncordon).await;
    }
    cluster.pools.iter_mut().for_each(|pool| pool.replica_bytes = 15 * GIB);
    cluster.settle().await.unwrap();
    cluster
}

fn four() -> Vec<VolumeSpec> {
    (0..4).map(|n| spec(&format!("v{n}"))).collect()
}

/// Balances now and once more after a rest.
async fn looks(cluster: &mut Cluster, now: &mut Instant) {
    cluster.controller.work.healer.look_at_all(*now).await.unwrap();
    *now += RESTED;
    cluster.controller.work.healer.look_at_all(*now).await.unwrap();
    cluster.settle().await.unwrap();
}

/// Returns replicas that are on their way, with their volumes.
fn moving(cluster: &Cluster, names: &[&str]) -> Vec<(VolumeRecord, ReplicaRecord)> {
    let of = |name: &&str| {
        let volume = cluster.volume(name);
        let new = volume.replicas.iter().find(|r| !volume.is_known(r)).cloned();
        new.map(|new| ((*volume).clone(), new))
    };
    names.iter().filter_map(of).collect()
}

/// Makes the target swap in the replica that is on its way.
async fn carry_out(cluster: &mut Cluster, volume: &VolumeRecord, new: &ReplicaRecord) {
    let name = &volume.spec.name;
    cluster.attach(name, "n1").await.unwrap();
    let epoch = cluster.open_volume(volume.id.0, "n1", 9).await;
    let swap = cluster.swap(name, epoch, 9, |known| {
        known.iter_mut().filter(|m| m.id == new.id.0).for_each(|m| m.guid = new.guid.0);
    });
    cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
    cluster.settle().await.unwrap();
    cluster.controller.volumes.attachments.unpublish(by_name(name).as_ref(), "n1").await.unwrap();
    cluster.settle().await.unwrap();
}

fn told(cluster: &Cluster, reason: &str) -> Vec<String> {
    let events = cluster.controller.state.events().after(0).into_iter();
    events.filter(|e| e.reason == reason).map(|e| e.message).collect()
}

const NAMES: [&str; 4] = ["v0", "v1", "v2", "v3"];

#[tokio::test]
async fn replicas_move_one_at_a_time_with_a_rest_between_until_the_pools_are_even() {
    let mut cluster = uneven(&four()).await;
    let mut now = Instant::now();
    cluster.controller.work.healer.look_at_all(now).await.unwrap();
    assert!(moving(&cluster, &NAMES).is_empty(), "not before pools had time to speak");
    for (count, percent, to) in [(1, "60%", "p2"), (2, "45%", "p3")] {
        looks(&mut cluster, &mut now).await;
        looks(&mut cluster, &mut now).await;
        let under_way = moving(&cluster, &NAMES);
        let [(volume, new)] = &under_way[..] else { panic!("{under_way:?}") };
        assert_eq!((new.cause, new.pool.as_str()), (Cause::Balance, to));
        assert_eq!(cluster.shown(&volume.spec.name).changing, "1 replica moving");
        let said = told(&cluster, "ReplicaRebalances");
        assert!(said.len() == count && said[count - 1].contains(percent), "{said:?}");
        let shown = cluster.controller.status.pools();
        assert!(shown[0].message.contains("rebalancing"), "{}", shown[0].message);
        let (volume, new) = (volume.clone(), new.clone());
        carry_out(&mut cluster, &volume, &new).await;
    }
    // 30, 15 and 15 % of them are used.
    for _ in 0..5 {
        looks(&mut cluster, &mut now).await;
        assert!(moving(&cluster, &NAMES).is_empty(), "they are even enough");
    }
    assert_eq!(cluster.controller.work.balancer.counts().begun, 2);
    assert!((149_000..=151_000).contains(&cluster.controller.work.balancer.counts().spread));
    assert!(cluster.controller.status.pools().iter().all(|pool| pool.message.is_empty()));
}

#[tokio::test]
async fn what_must_be_made_elsewhere_comes_first_and_a_move_gives_way_to_it() {
    let mut cluster = uneven(&four()).await;
    let wide = VolumeSpec { replicas: 2, ..spec("wide") };
    cluster.controller.volumes.catalog.create(&wide, 0).await.unwrap();
    cluster.settle().await.unwrap();
    assert!(cluster.volume("wide").replicas.iter().all(|r| r.pool != "p1"));
    // One pool of it is drained: no balancing meanwhile.
    cordon(&cluster, "p3", Cordoning::Drain).await;
    let mut now = Instant::now();
    for _ in 0..3 {
        looks(&mut cluster, &mut now).await;
    }
    assert!(moving(&cluster, &NAMES).is_empty());
    let drained = moving(&cluster, &["wide"]);
    let [(volume, new)] = &drained[..] else { panic!("{drained:?}") };
    assert_eq!((new.cause, new.pool.as_str()), (Cause::Drain, "p1"));
    carry_out(&mut cluster, volume, new).await;
    looks(&mut cluster, &mut now).await;
    looks(&mut cluster, &mut now).await;
    let under_way = moving(&cluster, &NAMES);
    let [(_, new)] = &under_way[..] else { panic!("{under_way:?}") };
    assert_eq!(new.pool, "p2", "a drained pool takes nothing");
    // The destination is away: the old replica is there, so nothing is waited for.
    cluster.goes("p2").await;
    let (name, new) = (under_way[0].0.spec.name.clone(), under_way[0].1.clone());
    looks(&mut cluster, &mut now).await;
    assert_eq!(moving(&cluster, &NAMES).len(), 1, "it may be back");
    now += Duration::from_secs(20);
    looks(&mut cluster, &mut now).await;
    assert!(moving(&cluster, &NAMES).is_empty());
    let said = told(&cluster, "RebalanceGivenUp");
    assert!(said.len() == 1 && said[0].contains("p2 is away"), "{said:?}");
    assert_eq!(cluster.controller.work.balancer.counts().given_up, 1);
    let volume = cluster.volume(&name);
    assert!(volume.discarded.iter().any(|gone| gone.guid == new.guid));
}

#[tokio::test]
async fn a_volume_whose_policy_is_off_stays_and_what_cannot_be_evened_out_is_said_once() {
    let stay = |asked: VolumeSpec| VolumeSpec { replace_after: "off".into(), ..asked };
    let mut cluster = uneven(&four().into_iter().map(stay).collect::<Vec<_>>()).await;
    let mut now = Instant::now();
    for _ in 0..3 {
        looks(&mut cluster, &mut now).await;
    }
    assert!(moving(&cluster, &NAMES).is_empty());
    let said = told(&cluster, "RebalanceWaits");
    assert!(said.len() == 1 && said[0].contains("fuller than pool p2"), "{said:?}");
    assert!(cluster.controller.status.pools()[0].message.contains("fuller than pool p2"));
}

#[tokio::test]
async fn a_move_that_gets_no_further_is_given_up_and_not_begun_again_for_a_while() {
    let mut cluster = uneven(&four()).await;
    let mut now = Instant::now();
    looks(&mut cluster, &mut now).await;
    let under_way = moving(&cluster, &NAMES);
    let [(volume, new)] = &under_way[..] else { panic!("{under_way:?}") };
    let (name, first) = (volume.spec.name.clone(), new.pool.clone());
    cluster.attach(&name, "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 9).await;
    let guid = new.guid.0.to_string();
    // The newcomer progresses for an hour, then no more.
    for lsn in 0..7 {
        cluster
            .reports(&name, "serving", |report| {
                let guid = guid.clone();
                let state = "rebuilding".into();
                let progress =
                    ReplicaProgress { guid, state, applied_lsn: lsn, ..ReplicaProgress::default() };
                report.replicas = vec![progress];
            })
            .await;
        now += Duration::from_secs(590);
        looks(&mut cluster, &mut now).await;
        assert!(told(&cluster, "RebalanceGivenUp").is_empty());
    }
    now += Duration::from_secs(601);
    looks(&mut cluster, &mut now).await;
    let said = told(&cluster, "RebalanceGivenUp");
    assert!(said.len() == 1 && said[0].contains("no further"), "{said:?}");
    // The next move is of another volume, or to another pool.
    looks(&mut cluster, &mut now).await;
    let under_way = moving(&cluster, &NAMES);
    let [(other, new)] = &under_way[..] else { panic!("{under_way:?}") };
    assert!(other.spec.name != name || new.pool != first);
}

#[tokio::test]
async fn a_replica_stays_in_the_pool_that_was_named_for_it() {
    let mut cluster = uneven(&four()).await;
    for name in NAMES {
        let (volume, db) = (cluster.volume(name), by_name(name));
        let (id, pool) = (volume.replicas[0].id.0, "p3");
        let moved = cluster
            .controller
            .volumes
            .replicas
            .move_replica(db.as_ref(), &Move::of(id).to(pool))
            .await
            .unwrap();
        cluster.settle().await.unwrap();
        let new = moved.replicas.iter().find(|r| !moved.is_known(r)).unwrap();
        carry_out(&mut cluster, &moved, new).await;
    }
    let mut now = Instant::now();
    for _ in 0..3 {
        looks(&mut cluster, &mut now).await;
    }
    assert!(NAMES.iter().all(|name| cluster.volume(name).replicas[0].pool == "p3"));
    assert!(moving(&cluster, &NAMES).is_empty());
    assert_eq!(told(&cluster, "RebalanceWaits").len(), 1);
}

#[tokio::test]
async fn a_person_moves_a_replica_elsewhere_though_it_is_on_its_way_by_itself() {
    let mut cluster = uneven(&four()).await;
    let mut now = Instant::now();
    looks(&mut cluster, &mut now).await;
    let under_way = moving(&cluster, &NAMES);
    let [(volume, new)] = &under_way[..] else { panic!("{under_way:?}") };
    let by_name = by_name(&volume.spec.name);
    let elsewhere = if new.pool == "p2" { "p3" } else { "p2" };
    let id = new.id.0;
    let moved = cluster
        .controller
        .volumes
        .replicas
        .move_replica(by_name.as_ref(), &Move::of(id).to(elsewhere))
        .await
        .unwrap();
    let fresh: Vec<_> = moved.replicas.iter().filter(|r| r.id.0 == id).collect();
    assert_eq!(fresh.len(), 2, "the one that is known, and the one that was asked for");
    assert!(fresh.iter().any(|r| r.pool == elsewhere && r.cause == Cause::Asked));
    assert!(moved.discarded.iter().any(|gone| gone.guid == new.guid));
    // A move that a person asked for is not taken back for another pool.
    let again = cluster
        .controller
        .volumes
        .replicas
        .move_replica(by_name.as_ref(), &Move::of(id).to(&new.pool))
        .await;
    assert!(again.unwrap_err().to_string().contains("already on its way"));
}
