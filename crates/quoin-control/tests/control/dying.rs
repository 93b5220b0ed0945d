//! Pools whose disks are failing: emptied before they are gone.

use quoin_api::control::{Pool, PoolWear, VolumeSpec};
use quoin_control::{Cordoning, Scope};

use crate::cluster::{Cluster, spec};

async fn report(cluster: &Cluster, pool: &str, operations: u64, errors: u64) {
    let from = cluster.pools.iter().find(|p| p.name == pool).unwrap();
    let wear = Some(PoolWear { operations, errors, bad: 0, stalls: 0 });
    let report = quoin_api::control::PoolReport { wear, ..from.report() };
    cluster.controller.reports.pool(&report).await.unwrap();
}

fn shown(cluster: &Cluster, name: &str) -> Pool {
    let pools = cluster.controller.status.pools();
    pools.into_iter().find(|pool| pool.name == name).unwrap()
}

#[tokio::test]
async fn a_pool_whose_disk_fails_too_often_is_emptied_until_a_person_opens_it_again() {
    let mut cluster = Cluster::of(4).await;
    cluster.create("db").await;
    cluster.settle().await.unwrap();
    let name = cluster.volume("db").replicas[0].pool.clone();
    report(&cluster, &name, 100_000, 4).await;
    report(&cluster, &name, 200_000, 20).await;
    assert_eq!(shown(&cluster, &name).state, "Online", "a few of very many are no death");
    report(&cluster, &name, 201_000, 400).await;
    let pool = shown(&cluster, &name);
    assert_eq!((pool.state.as_str(), pool.cordon.as_str()), ("Dying", "draining"));
    assert!(pool.dying.contains("396 of 101000"), "{}", pool.dying);
    let told = |cluster: &Cluster| cluster.reasons().iter().filter(|r| *r == "PoolDying").count();
    assert_eq!(told(&cluster), 1);
    report(&cluster, &name, 201_500, 800).await;
    assert_eq!(told(&cluster), 1, "once");

    // The pool takes nothing new, and its replicas are made elsewhere.
    let four = VolumeSpec { replicas: 4, ..spec("four") };
    let refused =
        cluster.controller.volumes.catalog.create(&four, 0).await.unwrap_err().to_string();
    assert!(refused.contains(&name), "{refused}");
    cluster.controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
    let volume = cluster.volume("db");
    let newcomers: Vec<_> = volume.replicas.iter().filter(|r| !volume.is_known(r)).collect();
    assert_eq!(newcomers.len(), 1, "one change at a time");
    assert!(newcomers[0].pool != name && newcomers[0].id == volume.replicas[0].id);

    // Good reports do not help: only a user opens it, and then earlier faults count no more.
    cluster.restart().await;
    cluster.settle().await.unwrap();
    report(&cluster, &name, 900_000, 800).await;
    assert_eq!(shown(&cluster, &name).state, "Dying");
    let scope = Scope::Pool(name.clone());
    cluster.controller.work.cordons.set(&scope, Cordoning::Uncordon, false).await.unwrap();
    report(&cluster, &name, 900_100, 800).await;
    assert_eq!(shown(&cluster, &name).state, "Online");
    report(&cluster, &name, 900_200, 900).await;
    assert_eq!(shown(&cluster, &name).state, "Dying");
}

#[tokio::test]
async fn where_most_pools_fail_together_it_is_told_and_none_of_the_later_ones_is_emptied() {
    let cluster = Cluster::of(3).await;
    let names: Vec<String> = cluster.pools.iter().map(|pool| pool.name.clone()).collect();
    for name in &names {
        report(&cluster, name, 100, 0).await;
    }
    for _ in 0..2 {
        for name in &names {
            report(&cluster, name, 200, 90).await;
        }
    }
    let dying = names.iter().filter(|name| shown(&cluster, name).state == "Dying").count();
    assert_eq!(dying, 1);
    let told = |reason: &str| cluster.reasons().iter().filter(|r| *r == reason).count();
    assert_eq!((told("PoolDying"), told("PoolsFailTogether")), (1, 2), "each once");
}
