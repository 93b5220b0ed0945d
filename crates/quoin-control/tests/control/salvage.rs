//! Records made to agree with what pools hold, where some of the pools are away.

use std::time::Duration;

use quoin_api::control::VolumeSpec;
use quoin_control::salvage::{RecoverRecords, Recovered, Told};
use quoin_types::ReplicaGuid;

use crate::cluster::{Cluster, spec};

/// Recovers, while each of these pools tells that it holds nothing and deleted these by order.
async fn recover(
    cluster: &Cluster,
    without: &[&str],
    answers: &[(&str, &[ReplicaGuid])],
) -> Recovered {
    let without_pools = without.iter().map(|pool| (*pool).to_owned()).collect();
    let asked = RecoverRecords { without_pools, ..RecoverRecords::default() };
    let controller = &cluster.controller;
    let answering = async {
        loop {
            for (pool, deleted) in answers {
                let reporting = cluster.pools.iter().find(|p| p.name == *pool).unwrap();
                controller.report_pool(&reporting.report()).await.unwrap();
                let request = controller.pool_assignment(pool).holdings_request;
                let deleted = deleted.iter().copied().collect();
                let told = Told { deleted, ..Told::default() };
                controller.take_holdings(pool, request, told);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        recovered = controller.recover_records(&asked) => recovered.unwrap(),
        () = answering => unreachable!("it goes on for ever"),
    }
}

#[tokio::test]
async fn the_last_copy_of_a_volume_that_was_moved_outlives_a_recovery_without_its_pool() {
    let mut cluster = Cluster::of(3).await;
    let wanted = VolumeSpec { replicas: 2, consistency_factor: 2, ..spec("db") };
    cluster.controller.create_volume(&wanted, 0).await.unwrap();
    cluster.settle().await.unwrap();
    let volume = cluster.volume("db");
    let [moved, last] = &volume.replicas[..] else { panic!("{:?}", volume.replicas) };
    let third = cluster.pools.iter().map(|pool| pool.name.clone());
    let third = third.clone().find(|p| ![&moved.pool, &last.pool].contains(&p)).unwrap();
    // These records are of before the first replica moved to the third pool, which is lost.
    cluster.offline_after = Duration::from_millis(200);
    cluster.restart().await;
    let answers: &[(&str, &[ReplicaGuid])] = &[(&moved.pool, &[moved.guid.0])];
    let without: &[&str] = &[&last.pool, &third];
    let recovered = recover(&cluster, without, answers).await;
    let (finding, _) = &recovered.findings[0];
    assert!(finding.message.contains("that may hold copies"), "{}", finding.message);
    let phase_of = |cluster: &Cluster, pool: &str, guid: &str| {
        let ordered = cluster.controller.pool_assignment(pool).replicas;
        ordered.into_iter().find(|replica| replica.guid == guid).map(|replica| replica.phase)
    };
    let guid = last.guid.0.to_string();
    assert_eq!(phase_of(&cluster, &last.pool, &guid).as_deref(), Some("Keep"));
    assert_eq!(cluster.volume("db").spec.name, "db", "its name is taken");
    // A person may still delete it.
    cluster.controller.delete_volume(crate::cluster::by_name("db").as_ref()).await.unwrap();
    assert_eq!(phase_of(&cluster, &last.pool, &guid).as_deref(), Some("Delete"));
}
