//! Blocks of addresses are fenced: nodes in them write nothing any more, whether or not they answer.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use quoin_api::control::{NodeReport, TargetReport, VolumeRef, VolumeSpec};
use quoin_cluster::records::Sharing;
use quoin_control::store::Embedded;
use quoin_control::{Error, Publish};
use quoin_types::{Epoch, Incarnation, VolumeId};
use tonic::Code;

use crate::cluster::*;

const BLOCK: &str = "192.0.2.1/32";

fn words(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

impl Cluster {
    /// The target of a node reports, with these addresses, and carries out the fences that it is told of.
    async fn target_reports(&self, node: &str, addresses: &[&str]) {
        let told = self.controller.assignments.of_node(node).fences;
        let report = TargetReport {
            node: node.into(),
            addresses: words(addresses),
            share_address: addresses.first().map_or(String::new(), |ip| format!("{ip}:7403")),
            fences_digest: told.map_or(0, |fences| fences.digest),
            ..TargetReport::default()
        };
        self.controller.reports.target(&report).await.unwrap();
    }

    async fn pools_report(&mut self) {
        for pool in self.pools.iter_mut().filter(|pool| pool.online) {
            pool.obey(&self.controller);
            self.controller.reports.pool(&pool.report()).await.unwrap();
        }
    }

    /// The pools report that they have promised this epoch of a volume.
    async fn pools_promise(&mut self, name: &str, epoch: u64) {
        let volume = self.volume(name);
        for pool in &mut self.pools {
            for replica in &volume.replicas {
                pool.promised.insert(replica.guid.0.to_string(), epoch);
            }
            self.controller.reports.pool(&pool.report()).await.unwrap();
        }
    }

    async fn fence(&self, blocks: &[&str]) -> Result<(), Error> {
        let wait = Duration::from_millis(300);
        self.controller.volumes.network_fences.add_within(wait, &words(blocks)).await
    }

    async fn unfence(&self, blocks: &[&str]) -> Result<(), Error> {
        self.controller.volumes.network_fences.remove(&words(blocks)).await
    }

    fn fenced(&self) -> Vec<String> {
        self.controller.volumes.network_fences.list().into_iter().map(|f| f.block).collect()
    }

    async fn acquire(&self, node: &str) -> Result<Epoch, Error> {
        let id = self.volume("db").id.0;
        let incarnation = Incarnation(77);
        let acquired =
            self.controller.volumes.epochs.acquire(id, node, incarnation, Epoch(0)).await?;
        Ok(acquired.expect("it owns the volume").epoch)
    }
}

/// A cluster with a volume that node n1 has opened, and an address of each node.
async fn opened() -> Cluster {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.target_reports("n1", &["192.0.2.1", "fd00::1"]).await;
    cluster.target_reports("n2", &["192.0.2.2"]).await;
    cluster.attach("db", "n1").await.unwrap();
    let id = cluster.volume("db").id.0;
    cluster.open_volume(id, "n1", 9).await;
    cluster
}

#[tokio::test]
async fn a_fence_holds_once_a_quorum_has_promised_it_for_a_lease_and_until_then_is_asked_for_again()
{
    let mut cluster = opened().await;
    // Nothing of the node is needed, and nothing of the pools is known.
    let refused = cluster.fence(&[BLOCK]).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.to_string().contains("pools of volume db"), "{refused}");
    let fence = cluster.volume("db").grants.clone();
    assert!(fence.fenced_at_once && fence.fenced == cluster.volume("db").opened.epoch);
    // One of three is not enough, however long it says so.
    let (first, others) = cluster.pools.split_first_mut().unwrap();
    first.obey(&cluster.controller);
    cluster.controller.reports.pool(&first.report()).await.unwrap();
    for pool in others {
        cluster.controller.reports.pool(&pool.report()).await.unwrap();
    }
    assert_eq!(cluster.fence(&[BLOCK]).await.unwrap_err().code(), Code::Unavailable);
    cluster.pools[2].online = false;
    cluster.pools_report().await;
    let began = tokio::time::Instant::now();
    cluster.controller.volumes.network_fences.add(&words(&[BLOCK])).await.unwrap();
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1900), "the lease was not waited for: {took:?}");
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert_eq!(cluster.volume("db").grants.fenced, fence.fenced, "a repeat takes nothing back");
    let began = tokio::time::Instant::now();
    cluster.fence(&[BLOCK]).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(100));
    assert_eq!(cluster.fenced(), [BLOCK]);
}

#[tokio::test]
async fn pools_that_hear_no_target_need_no_lease_to_pass() {
    let mut cluster = opened().await;
    cluster.fence(&[BLOCK]).await.unwrap_err();
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    cluster.pools_report().await;
    let began = tokio::time::Instant::now();
    cluster.fence(&[BLOCK]).await.unwrap();
    assert!(began.elapsed() < Duration::from_millis(200));
}

/// Proves ADDONS-FENCE-07 of the controller: its restart, and each way to a grant.
#[tokio::test]
async fn a_fenced_node_gets_no_epoch_no_volume_and_no_target_that_is_lent_before_the_fence_is_lifted()
 {
    let mut cluster = opened().await;
    cluster.fence(&[BLOCK]).await.unwrap_err();
    cluster.create("other").await;
    for restarts in [false, true] {
        if restarts {
            cluster.restart().await;
            cluster.settle().await.unwrap();
        }
        assert_eq!(cluster.fenced(), [BLOCK]);
        let refused = cluster.acquire("n1").await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.to_string().contains(BLOCK), "{refused}");
        let refused = cluster.attach("other", "n1").await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.to_string().contains(&format!("quoin fence remove {BLOCK}")), "{refused}");
        // The node's own word for another address does not free it.
        cluster.target_reports("n1", &["198.51.100.1"]).await;
        assert!(cluster.acquire("n1").await.is_err());
    }
    // Its replicas stay in service, and so do other nodes.
    cluster.target_reports("n2", &["192.0.2.2"]).await;
    cluster.attach("other", "n2").await.unwrap();
    let id = cluster.volume("other").id.0;
    cluster.open_volume(id, "n2", 3).await;
    cluster.unfence(&[BLOCK]).await.unwrap();
    assert_eq!(cluster.fenced(), Vec::<String>::new());
    assert!(cluster.acquire("n1").await.unwrap().0 > cluster.volume("db").grants.fenced);
    cluster.attach("other", "n1").await.expect_err("n2 has it");
}

#[tokio::test]
async fn unfence_lifts_exactly_its_blocks_and_a_node_is_free_once_no_other_covers_it() {
    let mut cluster = opened().await;
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    let blocks = ["192.0.2.0/25", BLOCK, "fd00::/64", "203.0.113.0/24"];
    cluster.fence(&blocks).await.unwrap_err();
    cluster.pools_report().await;
    cluster.fence(&blocks).await.unwrap();
    assert_eq!(cluster.fenced().len(), 4, "each block once");
    // A block that is not fenced counts as lifted; one inside of a fenced one is another one.
    cluster.unfence(&["192.0.2.0/26", "198.51.100.0/24"]).await.unwrap();
    assert_eq!(cluster.fenced().len(), 4);
    cluster.unfence(&[BLOCK]).await.unwrap();
    assert!(cluster.acquire("n1").await.is_err());
    cluster.unfence(&["192.0.2.0/25"]).await.unwrap();
    assert!(cluster.acquire("n1").await.is_err(), "its other address is covered still");
    cluster.unfence(&["fd00::/64"]).await.unwrap();
    assert_eq!(cluster.fenced(), ["203.0.113.0/24"]);
    assert!(cluster.acquire("n1").await.is_ok());
}

#[tokio::test]
async fn one_text_that_is_no_block_fails_the_call_and_no_other_takes_effect() {
    let cluster = opened().await;
    for wrong in [&[][..], &["198.51.100.0/24", "198.51.100.0/33"], &["h1"], &["192.0.2.1"]] {
        for refused in [cluster.fence(wrong).await, cluster.unfence(wrong).await] {
            let refused = refused.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert!(refused.to_string().starts_with("blocks:"), "{refused}");
        }
    }
    assert_eq!(cluster.fenced(), Vec::<String>::new());
    assert_eq!(cluster.fence(&["198.51.100.0/24"]).await.unwrap_err().code(), Code::Unavailable);
    let wrong = ["198.51.100.0/24", "x/1"];
    assert_eq!(cluster.unfence(&wrong).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(cluster.fenced(), ["198.51.100.0/24"]);
}

/// Clients of other nodes' targets come from a fenced block: the targets say that they turned them away.
#[tokio::test]
async fn a_block_without_a_node_is_fenced_once_each_target_says_that_it_turned_its_clients_away() {
    let cluster = opened().await;
    let block = "203.0.113.0/24";
    let refused = cluster.fence(&[block]).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.to_string().contains("node n1"), "{refused}");
    let told = cluster.controller.assignments.of_node("n1").fences.unwrap();
    assert_eq!((told.blocks, told.nodes), (words(&[block]), Vec::new()));
    // A target that has not may be granted nothing anew.
    let id = cluster.volume("db").id.0;
    let behind =
        cluster.controller.volumes.epochs.acquire_behind(0, id, "n1", Incarnation(10), Epoch(0));
    assert_eq!(behind.await.unwrap_err().code(), Code::Unavailable);
    let before = cluster.volume("db");
    cluster.target_reports("n1", &["192.0.2.1"]).await;
    cluster.fence(&[block]).await.unwrap();
    assert_eq!(cluster.volume("db").opened, before.opened, "nobody else is disturbed");
    assert!(cluster.acquire("n1").await.is_ok());
    cluster.unfence(&[block]).await.unwrap();
    assert!(cluster.controller.assignments.of_node("n1").fences.is_none());
}

/// Proves ADDONS-FENCE-05 of the records: of a volume that went to another node before the fence.
#[tokio::test]
async fn a_fence_waits_for_the_end_of_what_its_node_had_before_others_and_for_no_other_volume() {
    let mut cluster = opened().await;
    cluster.create("unrelated").await;
    cluster.attach("unrelated", "n2").await.unwrap();
    cluster.open_volume(cluster.volume("unrelated").id.0, "n2", 5).await;
    // The volume goes to n2, and no pool has heard of that yet.
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster.attach("db", "n2").await.unwrap();
    let epoch = cluster.acquire("n2").await.unwrap();
    assert_eq!(cluster.volume("db").grants.former.keys().collect::<Vec<_>>(), ["n1"]);
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    cluster.pools_promise("unrelated", 0).await;
    cluster.pools_promise("db", epoch.0 - 1).await;
    let _ = cluster.fence(&[BLOCK]).await;
    cluster.target_reports("n2", &["192.0.2.2"]).await;
    let refused = cluster.fence(&[BLOCK]).await.unwrap_err();
    assert!(refused.to_string().contains("pools of volume db"), "{refused}");
    assert_eq!(cluster.volume("db").opened.epoch, epoch.0, "n2 has it, and is not disturbed");
    cluster.pools_promise("db", epoch.0).await;
    cluster.fence(&[BLOCK]).await.unwrap();
}

#[tokio::test]
async fn a_volume_that_was_closed_before_delays_no_fence_when_its_pools_are_away_later() {
    let mut cluster = opened().await;
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    let attachments = &cluster.controller.volumes.attachments;
    attachments.detach(by_name("db").as_ref(), "n1", true).await.unwrap();
    cluster.settle().await.unwrap();
    let closed = cluster.volume("db");
    assert!(!closed.is_granted() && closed.grants.ended == closed.opened.epoch, "{closed:?}");
    cluster.restart().await;
    cluster.target_reports("n1", &["192.0.2.1"]).await;
    cluster.fence(&[BLOCK]).await.unwrap();
}

#[tokio::test]
async fn a_detached_volume_that_its_target_closed_is_over_at_once_and_one_that_may_be_open_is_not()
{
    let mut cluster = opened().await;
    let attachments = &cluster.controller.volumes.attachments;
    attachments.detach(by_name("db").as_ref(), "n1", false).await.unwrap();
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    cluster.pools_report().await;
    cluster.settle().await.unwrap();
    let detached = cluster.volume("db");
    assert!(detached.grants.ended < detached.opened.epoch, "a session may be open: {detached:?}");
    cluster.pools.iter_mut().for_each(|pool| pool.is_closed = true);
    cluster.pools_report().await;
    cluster.settle().await.unwrap();
    let closed = cluster.volume("db");
    assert_eq!(closed.grants.ended, closed.opened.epoch);
    assert!(!closed.grants.fenced_at_once, "nothing was cut");
    cluster.fence(&[BLOCK]).await.unwrap();
    assert_eq!(cluster.volume("db").grants, closed.grants, "a fence has nothing to do there");
}

#[tokio::test]
async fn a_fence_waits_for_leases_on_a_volume_whose_deletion_was_ordered_and_its_record_is_kept_so_long()
 {
    let mut cluster = opened().await;
    let attachments = &cluster.controller.volumes.attachments;
    attachments.detach(by_name("db").as_ref(), "n1", false).await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    let refused = cluster.fence(&[BLOCK]).await.unwrap_err();
    assert!(refused.to_string().contains("pools of volume db"), "{refused}");
    // The replicas are gone, and answers of theirs may still be on their way.
    let began = tokio::time::Instant::now();
    cluster.pools_report().await;
    cluster.settle().await.unwrap();
    let refused = cluster.fence(&[BLOCK]).await.unwrap_err();
    assert!(refused.to_string().contains("lease on volume db"), "{refused}");
    cluster.controller.volumes.network_fences.add(&words(&[BLOCK])).await.unwrap();
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1900), "the lease was not waited for: {took:?}");
    cluster.settle().await.unwrap();
    assert!(cluster.store.keys("volume/").is_empty(), "it is deleted now");
}

/// A target that is stopped would go on under its grant, before it hears of the fence.
#[tokio::test]
async fn a_target_that_does_not_answer_is_cut_before_a_fence_of_its_clients_holds() {
    let mut cluster = opened().await;
    let publish = |node: &str| Publish {
        node: node.into(),
        sharing: Sharing::MultiWriter,
        ..Publish::default()
    };
    let attachments = &cluster.controller.volumes.attachments;
    attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    for node in ["n2", "n1"] {
        attachments.publish(by_name("db").as_ref(), &publish(node)).await.unwrap();
    }
    let id = cluster.volume("db").id.0;
    cluster.target_reports("n2", &["192.0.2.2"]).await;
    let epoch = cluster.open_volume(id, "n2", 11).await;
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    cluster.pools_promise("db", epoch.0).await;
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = false);
    let granted = cluster.volume("db").opened.epoch;
    let refused = cluster.fence(&[BLOCK]).await.unwrap_err();
    assert!(refused.to_string().contains("node n2"), "{refused}");
    assert_eq!(cluster.volume("db").opened.epoch, granted, "it may hear of it in a moment");
    tokio::time::sleep(Duration::from_secs(5)).await;
    cluster.pools_promise("db", epoch.0).await;
    assert!(cluster.fence(&[BLOCK]).await.is_err());
    assert_eq!(cluster.volume("db").opened.epoch, granted, "no pool says that it is silent");
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    cluster.pools_report().await;
    assert!(cluster.fence(&[BLOCK]).await.is_err());
    let cut = cluster.volume("db");
    assert!(cut.grants.fenced_at_once && !cut.is_granted() && cut.opened.epoch > granted);
    assert_eq!(cut.opened.owner.as_deref(), Some("n2"), "it keeps the volume");
    cluster.pools_report().await;
    cluster.fence(&[BLOCK]).await.unwrap();
    let behind =
        cluster.controller.volumes.epochs.acquire_behind(0, id, "n2", Incarnation(12), Epoch(0));
    assert_eq!(behind.await.unwrap_err().code(), Code::Unavailable);
    assert!(cluster.acquire("n2").await.is_ok(), "after it has turned n1 away");
}

#[tokio::test]
async fn a_volume_that_a_fenced_node_serves_for_others_goes_to_another_node_that_has_it() {
    let mut cluster = opened().await;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    for node in ["n1", "n2"] {
        let sharing = Sharing::MultiWriter;
        let publish = Publish { node: node.into(), sharing, ..Publish::default() };
        cluster
            .controller
            .volumes
            .attachments
            .publish(by_name("db").as_ref(), &publish)
            .await
            .unwrap();
    }
    let id = cluster.volume("db").id.0;
    cluster.open_volume(id, "n1", 11).await;
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    cluster.fence(&[BLOCK]).await.unwrap_err();
    cluster.controller.work.failover.look().await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n2"));
    let told = cluster.controller.assignments.of_node("n2").fences.unwrap();
    assert_eq!(told.nodes, ["n1"], "the target of n2 lets n1 in no more");
    cluster.pools_report().await;
    cluster.target_reports("n2", &["192.0.2.2"]).await;
    cluster.fence(&[BLOCK]).await.unwrap();
    assert!(cluster.acquire("n2").await.is_ok());
}

#[tokio::test]
async fn a_node_that_comes_to_a_fenced_address_is_fenced_with_what_it_has() {
    let mut cluster = opened().await;
    cluster.pools.iter_mut().for_each(|pool| pool.is_silent = true);
    cluster.target_reports("n1", &["192.0.2.1"]).await;
    let block = "203.0.113.0/24";
    cluster.fence(&[block]).await.unwrap_err();
    assert!(cluster.volume("db").is_granted());
    let nodes = || cluster.controller.volumes.network_fences.list().remove(0).nodes;
    assert_eq!(nodes(), Vec::<String>::new());
    cluster.target_reports("n1", &["192.0.2.1", "203.0.113.9"]).await;
    assert_eq!(nodes(), ["n1"]);
    assert!(!cluster.volume("db").is_granted() && cluster.acquire("n1").await.is_err());
    let wrong = TargetReport {
        node: "n1".into(),
        addresses: words(&["10.0.0.300"]),
        ..TargetReport::default()
    };
    let refused = cluster.controller.reports.target(&wrong).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    // CSI's report of the node says nothing of its addresses.
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    cluster.controller.reports.node(&report).await.unwrap();
    let shown = cluster.controller.status.nodes();
    let shown = shown.iter().find(|node| node.name == "n1").unwrap();
    assert_eq!(shown.host_addresses, ["192.0.2.1", "203.0.113.9"]);
    assert_eq!(shown.fenced_by, block);
}

/// With the records on a disk, where each commit is synced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_a_thousand_volumes_is_fenced_within_ten_seconds() {
    const VOLUMES: usize = 1000;
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("state.db")).unwrap();
    let controller = open_on(Arc::new(store), Duration::from_secs(3600)).await.unwrap();
    let (controller, mut pools) = (Arc::new(controller), pools(1..=3));
    let report = TargetReport {
        node: "n1".into(),
        addresses: words(&["192.0.2.1"]),
        ..TargetReport::default()
    };
    controller.reports.target(&report).await.unwrap();
    let settle = async |pools: &mut Vec<SimPool>| {
        for _ in 0..3 {
            for pool in pools.iter_mut() {
                pool.obey(&controller);
                controller.reports.pool(&pool.report()).await.unwrap();
            }
        }
    };
    settle(&mut pools).await;
    let each = |number: usize| {
        let controller = controller.clone();
        async move {
            let spec = VolumeSpec {
                name: format!("v{number}"),
                size_bytes: 1 << 20,
                ..VolumeSpec::default()
            };
            controller.volumes.catalog.create(&spec, 0).await.unwrap().id.0
        }
    };
    let ids = join_all((0..VOLUMES).map(each)).await;
    settle(&mut pools).await;
    let each = |id: VolumeId| {
        let controller = controller.clone();
        async move {
            let reference = Some(VolumeRef { id: id.to_string(), name: String::new() });
            let publish = Publish { node: "n1".into(), ..Publish::default() };
            let attachments = &controller.volumes.attachments;
            attachments.publish(reference.as_ref(), &publish).await.unwrap();
            let epochs = &controller.volumes.epochs;
            epochs.acquire(id, "n1", Incarnation(7), Epoch(0)).await.unwrap().unwrap();
        }
    };
    join_all(ids.into_iter().map(each)).await;
    settle(&mut pools).await;

    let began = tokio::time::Instant::now();
    let fencing = {
        let controller = controller.clone();
        tokio::spawn(async move {
            loop {
                match controller.volumes.network_fences.add(&words(&[BLOCK])).await {
                    Ok(()) => return began.elapsed(),
                    Err(refused) => assert_eq!(refused.code(), Code::Unavailable, "{refused}"),
                }
            }
        })
    };
    // The pools hear of their orders, and report what they promised.
    while !fencing.is_finished() {
        settle(&mut pools).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let took = fencing.await.unwrap();
    println!("{VOLUMES} volumes of a node are fenced after {took:?}");
    assert!(took <= Duration::from_secs(10), "{took:?}");
}
