//! Grants are revoked from a node when it loses a volume, without its cooperation.

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::*;
use quoin_identity::Role;
use quoin_types::{EPOCHS_AHEAD_MAX, Epoch, Incarnation};
use tonic::Code;

use crate::cluster::{Cluster, by_name};
use crate::server::Server;

/// Returns the order of every pool about the volume's epochs; the same for all of them.
fn told(cluster: &Cluster) -> (u64, bool) {
    let told = |pool: &crate::cluster::SimPool| {
        let assignment = cluster.controller.assignments.of_pool(&pool.name);
        let fences = assignment.replicas.iter().map(|r| (r.fence_epoch, r.fence_at_once));
        fences.collect::<Vec<_>>()
    };
    let all: Vec<_> = cluster.pools.iter().flat_map(told).collect();
    assert_eq!(all.len(), 3);
    assert!(all.iter().all(|fence| *fence == all[0]), "{all:?}");
    all[0]
}

async fn opened() -> (Cluster, Epoch) {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let epoch = cluster.open_volume(volume.id.0, "n1", 9).await;
    assert_eq!(told(&cluster), (0, false));
    (cluster, epoch)
}

#[tokio::test]
async fn a_detach_fences_all_that_was_granted_and_the_next_grant_is_above() {
    let (mut cluster, epoch) = opened().await;
    let db = by_name("db");
    cluster.controller.volumes.attachments.unpublish(db.as_ref(), "n1").await.unwrap();
    let (fence, at_once) = told(&cluster);
    assert!(fence > epoch.0 && !at_once);
    // Repeated, it takes nothing more.
    cluster.controller.volumes.attachments.unpublish(db.as_ref(), "n1").await.unwrap();
    assert_eq!(told(&cluster), (fence, false));
    cluster.restart().await;
    assert_eq!(told(&cluster), (fence, false), "a fence outlives the controller's process");

    cluster.settle().await.unwrap();
    cluster.attach("db", "n2").await.unwrap();
    let id = cluster.volume("db").id.0;
    let next = cluster.open_volume(id, "n2", 10).await;
    assert!(next.0 > fence);
    assert_eq!(told(&cluster), (fence, false), "the new owner is not fenced");

    // A target that is not trusted any more is given no time.
    cluster.controller.volumes.attachments.detach(db.as_ref(), "", true).await.unwrap();
    let (second, at_once) = told(&cluster);
    assert!(second > next.0 && at_once);
}

#[tokio::test]
async fn a_volume_that_was_never_opened_needs_no_fence() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    assert_eq!(told(&cluster), (0, false));
    cluster.attach("db", "n2").await.unwrap();
    assert_eq!(cluster.open_volume(volume.id.0, "n2", 1).await, Epoch(1));
}

#[tokio::test]
async fn a_detach_that_came_later_than_a_detach_cuts_what_is_still_open() {
    let (cluster, _) = opened().await;
    let db = by_name("db");
    cluster.controller.volumes.attachments.unpublish(db.as_ref(), "n1").await.unwrap();
    let (fence, _) = told(&cluster);
    cluster.controller.volumes.attachments.detach(db.as_ref(), "n1", true).await.unwrap();
    let (cut, at_once) = told(&cluster);
    assert!(cut > fence && at_once);
}

/// The epoch of a fence was granted to no node, so it must stay free: no later fence would end a
/// session that a pool opened under it.
#[tokio::test]
async fn a_node_that_asked_for_no_epoch_gets_no_grant_by_naming_that_of_a_fence() {
    let (mut cluster, _) = opened().await;
    let db = by_name("db");
    cluster.controller.volumes.attachments.unpublish(db.as_ref(), "n1").await.unwrap();
    let (fence, _) = told(&cluster);
    cluster.settle().await.unwrap();
    cluster.attach("db", "n2").await.unwrap();
    let claim = cluster.report_of("db", "serving");
    assert_eq!((claim.node.as_str(), claim.epoch), ("n2", fence));
    assert!(cluster.controller.reports.volume(&claim).await.unwrap().is_empty());
    assert_ne!(cluster.shown("db").health, "Online", "nor is what it says believed");

    // It is cut off above that epoch all the same, whoever signed what for it before.
    cluster.controller.volumes.attachments.detach(db.as_ref(), "n2", true).await.unwrap();
    let (cut, at_once) = told(&cluster);
    assert!(cut > fence && at_once);

    // A node that requests an epoch gets a grant, and gets it anew with its reports.
    cluster.attach("db", "n2").await.unwrap();
    let id = cluster.volume("db").id.0;
    cluster.open_volume(id, "n2", 10).await;
    let serving = cluster.report_of("db", "serving");
    let grant = cluster.controller.reports.volume(&serving).await.unwrap();
    let grant = cluster.controller.state.identity().verify_grant(&grant).unwrap();
    assert_eq!((grant.epoch.0, grant.incarnation), (serving.epoch, Incarnation(10)));
}

#[tokio::test]
async fn a_node_that_is_removed_is_cut_off_from_all_that_it_ever_opened_last() {
    let (cluster, _) = opened().await;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    let (fence, _) = told(&cluster);
    let last_words = NodeReport { node: "n1".into(), leaving: true, ..NodeReport::default() };
    cluster.controller.reports.node(&last_words).await.unwrap();
    cluster.controller.removals.node("n1", false).await.unwrap();
    let (cut, at_once) = told(&cluster);
    assert!(cut > fence && at_once);
}

#[tokio::test]
async fn a_target_that_missed_its_detach_is_cut_once_it_reports_the_epoch_that_was_taken_back() {
    let (cluster, epoch) = opened().await;
    let old = cluster.report_of("db", "serving");
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster.controller.reports.volume(&old).await.unwrap();
    let (fence, at_once) = told(&cluster);
    assert!(!at_once, "it has lost the volume, and may be closing it");
    cluster.attach("db", "n1").await.unwrap();
    assert!(cluster.controller.reports.volume(&old).await.unwrap().is_empty());
    let (cut, at_once) = told(&cluster);
    assert!(cut > fence && at_once);
    cluster.controller.reports.volume(&old).await.unwrap();
    assert_eq!(told(&cluster), (cut, true), "once is enough");
    let id = cluster.volume("db").id.0;
    assert!(cluster.open_volume(id, "n1", 9).await > epoch);
    let now = cluster.report_of("db", "serving");
    assert!(!cluster.controller.reports.volume(&now).await.unwrap().is_empty());
    // A late report of before it changes nothing.
    cluster.controller.reports.volume(&old).await.unwrap();
    assert_eq!(cluster.volume("db").opened.epoch, now.epoch);
}

#[tokio::test]
async fn no_target_gets_an_epoch_as_the_incarnation_that_stands_for_none() {
    let (cluster, _) = opened().await;
    let id = cluster.volume("db").id.0;
    let asked = cluster.controller.volumes.epochs.acquire(id, "n1", Incarnation(0), Epoch(0)).await;
    assert_eq!(asked.unwrap_err().code(), Code::InvalidArgument);
}

/// One far above would leave few epochs for all later targets.
#[tokio::test]
async fn an_epoch_that_a_target_asks_for_may_not_be_far_above_the_record_s() {
    let (cluster, _) = opened().await;
    let volume = cluster.volume("db");
    let ask = |epoch: u64| {
        let asked = (volume.id.0, "n1", Incarnation(9), Epoch(epoch));
        cluster.controller.volumes.epochs.acquire(asked.0, asked.1, asked.2, asked.3)
    };
    let farthest = volume.opened.epoch + EPOCHS_AHEAD_MAX;
    for epoch in [farthest + 1, farthest + 2, u64::MAX] {
        let refused = ask(epoch).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{epoch}");
    }
    assert_eq!(cluster.volume("db").opened.epoch, volume.opened.epoch);
    assert!(ask(farthest).await.unwrap().is_ok());
    assert!(cluster.volume("db").opened.epoch > farthest);
}

#[tokio::test]
async fn a_node_whose_name_is_given_to_another_key_keeps_no_grant() {
    let server = Server::start().await;
    let first = server.member(Role::Node, "n1").await;
    let mut local = server.local_agent();
    let report = |n: u32, replicas: Vec<ReplicaReport>| PoolReport {
        pool: format!("p{n}"),
        pool_id: format!("id{n}"),
        node: format!("h{n}"),
        capacity_bytes: 1 << 40,
        free_bytes: 1 << 40,
        replicas,
        ..PoolReport::default()
    };
    for n in 1..=3 {
        local.report_pool(report(n, Vec::new())).await.unwrap();
    }
    let spec = VolumeSpec { name: "db".into(), size_bytes: 1 << 30, ..Default::default() };
    let mut creating = server.admin();
    let created = tokio::spawn(async move {
        let spec = Some(spec);
        creating.create_volume(CreateVolumeRequest { spec, ..Default::default() }).await
    });
    while !created.is_finished() {
        for n in 1..=3 {
            let told = server.controller.assignments.of_pool(&format!("p{n}")).replicas;
            let made = told.into_iter().map(|told| ReplicaReport {
                replica_id: told.replica_id,
                guid: told.guid,
                volume_id: told.volume_id,
                state: "created".into(),
                ..ReplicaReport::default()
            });
            local.report_pool(report(n, made.collect())).await.unwrap();
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let volume = created.await.unwrap().unwrap().into_inner();
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    let mut agent = AgentClient::new(first.channel(&server.address).unwrap());
    agent.report_node(report).await.unwrap();
    let publish = PublishVolumeRequest {
        volume: Some(VolumeRef { id: volume.id.clone(), name: String::new() }),
        node: "n1".into(),
        ..PublishVolumeRequest::default()
    };
    server.admin().publish_volume(publish).await.unwrap();
    let acquire = AcquireEpochRequest {
        volume_id: volume.id.clone(),
        node: "n1".into(),
        incarnation: "1".repeat(32),
        at_least: 0,
        ..AcquireEpochRequest::default()
    };
    let granted = agent.acquire_epoch(acquire.clone()).await.unwrap().into_inner();

    let token = server.token("node", "n1", 60).await;
    let home = server.home("second");
    let second =
        quoin_identity::join(&server.address, &token, Role::Node, "n1", &home).await.unwrap();
    let told = server.controller.assignments.of_pool("p1").replicas.remove(0);
    assert!(told.fence_epoch > granted.epoch && told.fence_at_once);
    // The volume is still attached to the node of that name, which is another one now.
    let mut agent = AgentClient::new(second.channel(&server.address).unwrap());
    let next = agent.acquire_epoch(acquire).await.unwrap().into_inner();
    assert!(next.epoch > told.fence_epoch);
    server.stop().await;
}
