//! Records made to agree with pools' holdings: where some of the pools are away, and where one
//! reports unasked.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{PoolHoldings, VolumeSpec};
use quoin_control::salvage::{RecoverRecords, Recovered, Told};
use quoin_identity::Role;
use quoin_types::ReplicaGuid;
use tonic::Code;

use crate::cluster::{Cluster, spec};
use crate::server::Server;
use crate::terms::{follow, report};

/// Recovers, while each of these pools reports that it holds nothing and deleted these by order.
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
                controller.reports.pool(&reporting.report()).await.unwrap();
                let request = controller.assignments.of_pool(pool).holdings_request;
                let told = Told::nothing_but_deleted(deleted.iter().copied());
                controller.disaster.salvage.take(pool, request, told);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        recovered = controller.disaster.records.recover(&asked) => recovered.unwrap(),
        () = answering => unreachable!("it goes on for ever"),
    }
}

#[tokio::test]
async fn the_last_copy_of_a_volume_that_was_moved_outlives_a_recovery_without_its_pool() {
    let mut cluster = Cluster::of(3).await;
    let wanted = VolumeSpec { replicas: 2, consistency_factor: 2, ..spec("db") };
    cluster.controller.volumes.catalog.create(&wanted, 0).await.unwrap();
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
        let ordered = cluster.controller.assignments.of_pool(pool).replicas;
        ordered.into_iter().find(|replica| replica.guid == guid).map(|replica| replica.phase)
    };
    let guid = last.guid.0.to_string();
    assert_eq!(phase_of(&cluster, &last.pool, &guid).as_deref(), Some("Keep"));
    assert_eq!(cluster.volume("db").spec.name, "db", "its name is taken");
    // A person may still delete it.
    cluster
        .controller
        .volumes
        .catalog
        .delete(crate::cluster::by_name("db").as_ref())
        .await
        .unwrap();
    assert_eq!(phase_of(&cluster, &last.pool, &guid).as_deref(), Some("Delete"));
}

fn piece(request: u64) -> PoolHoldings {
    let deleted = vec![7; 16 << 10];
    PoolHoldings { pool: "p1".into(), request, deleted, ..PoolHoldings::default() }
}

#[tokio::test]
async fn a_pool_that_is_not_asked_what_it_holds_is_refused_at_its_first_piece() {
    let server = Server::start().await;
    let pool = server.member(Role::Pool, "p1").await;
    let mut agent = AgentClient::new(pool.controller(&server.address).unwrap());
    agent.report_pool(report("p1")).await.unwrap();
    for request in [0, 1, u64::MAX] {
        let sent = Arc::new(AtomicUsize::new(0));
        let count = sent.clone();
        let endless = futures::stream::repeat_with(move || {
            count.fetch_add(1, Ordering::SeqCst);
            piece(request)
        });
        let refused = agent.report_holdings(endless).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        // Pieces that fit into the windows of the connection were sent before the answer came.
        assert!(sent.load(Ordering::SeqCst) < 1000, "{sent:?} pieces were read");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_pool_has_one_answer_and_one_that_it_left_open_holds_up_nobody() {
    let server = Server::start().await;
    let pool = server.member(Role::Pool, "p1").await;
    let mut agent = AgentClient::new(pool.controller(&server.address).unwrap());
    agent.report_pool(report("p1")).await.unwrap();
    let controller = server.controller.clone();
    let recovering = tokio::spawn(async move {
        let asked = RecoverRecords { dry_run: true, ..RecoverRecords::default() };
        controller.disaster.records.recover(&asked).await
    });
    let request = loop {
        match server.controller.assignments.of_pool("p1").holdings_request {
            0 => tokio::time::sleep(Duration::from_millis(10)).await,
            request => break request,
        }
    };
    let (pieces, left_open) = futures::channel::mpsc::unbounded();
    pieces.unbounded_send(piece(request)).unwrap();
    let left_open = tokio::spawn(async move { agent.report_holdings(left_open).await });
    let following = follow(&pool, &server);
    let recovered = recovering.await.unwrap().unwrap();
    assert_eq!((recovered.pools, recovered.missing_pools.len()), (vec!["p1".to_owned()], 0));
    following.abort();
    assert_eq!(
        server.controller.assignments.of_pool("p1").holdings_request,
        0,
        "it is asked no more"
    );
    // Refused already, where its first piece came late.
    let _ = pieces.unbounded_send(piece(request));
    let refused = left_open.await.unwrap().unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    server.stop().await;
}
