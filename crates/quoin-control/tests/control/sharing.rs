//! Volumes that several nodes have, and volumes of nodes that are lost.

use std::time::Duration;

use quoin_api::control::replica_report::Hearing;
use quoin_api::control::{NodeReport, PoolReport, ServedAt, Sharer, TargetReport};
use quoin_cluster::records::Sharing;
use quoin_control::{Error, Publish};
use tonic::Code;

use crate::cluster::*;

const TIMEOUT: Duration = Duration::from_millis(500);

fn publish(node: &str, sharing: Sharing, read_only: bool) -> Publish {
    Publish { node: node.into(), sharing, read_only, ..Publish::default() }
}

impl Cluster {
    async fn publish(&self, publish: &Publish) -> Result<(), Error> {
        let db = by_name("db");
        self.controller.volumes.attachments.publish(db.as_ref(), publish).await.map(drop)
    }

    async fn refused(&self, publish: &Publish) -> String {
        let refused = self.publish(publish).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        refused.to_string()
    }

    /// All pools report, with this word on each replica; so do these nodes.
    async fn hear(&self, word: Hearing, nodes: &[&str]) {
        for pool in &self.pools {
            let mut report: PoolReport = pool.report();
            report.replicas.iter_mut().for_each(|replica| replica.set_hearing(word));
            self.controller.reports.pool(&report).await.unwrap();
        }
        for node in nodes {
            let report = NodeReport { node: (*node).into(), ..NodeReport::default() };
            self.controller.reports.node(&report).await.unwrap();
        }
    }

    /// Lets the time-out of node n1 pass, with this word of the pools.
    async fn let_n1_be_silent(&self, word: Hearing) {
        for _ in 0..7 {
            tokio::time::sleep(TIMEOUT / 5).await;
            self.hear(word, &["n2"]).await;
        }
    }
}

/// A cluster whose nodes are lost soon, with a volume.
async fn impatient() -> Cluster {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.offline_after = TIMEOUT;
    cluster.restart().await;
    cluster.settle().await.unwrap();
    cluster
}

/// Proves CSI-CTRLPUBLISH-28: also where the controller alone does not hear the node.
#[tokio::test]
async fn a_volume_is_taken_from_its_node_only_once_neither_controller_nor_pools_hear_of_it() {
    let cluster = impatient().await;
    cluster.attach("db", "n1").await.unwrap();
    let id = cluster.volume("db").id.0;
    let epoch = cluster.open_volume(id, "n1", 9).await;
    let elsewhere = publish("n2", Sharing::Exclusive, false);
    let refused = cluster.refused(&elsewhere).await;
    assert!(refused.contains("node n1") && refused.contains("it reported"), "{refused}");

    // The controller's link is cut, and the target serves on with its pools.
    cluster.let_n1_be_silent(Hearing::Hears).await;
    let refused = cluster.refused(&elsewhere).await;
    assert!(refused.contains("node n1") && refused.contains("hears its target"), "{refused}");
    // Pools that do not say may hear it.
    cluster.let_n1_be_silent(Hearing::Unknown).await;
    assert!(cluster.refused(&elsewhere).await.contains("and 2 must"));

    cluster.hear(Hearing::Hears, &["n2"]).await;
    cluster.hear(Hearing::Silent, &["n2"]).await;
    assert!(cluster.refused(&elsewhere).await.contains("heard its target 0 s ago"));
    assert_eq!(cluster.volume("db").attachments[0].node, "n1", "it keeps its access");
    cluster.let_n1_be_silent(Hearing::Silent).await;
    cluster.publish(&elsewhere).await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!((volume.opened.owner.as_deref(), volume.attachments.len()), (Some("n2"), 1));
    assert!(volume.opened.epoch > epoch.0 && volume.grants.fenced_at_once);
    assert!(cluster.reasons().contains(&"VolumeTakenOver".to_owned()));
    let refused = cluster.refused(&publish("n1", Sharing::Exclusive, false)).await;
    assert!(refused.contains("node n2"), "{refused}");
    let lost = cluster.controller.volumes.epochs.acquire(
        id,
        "n1",
        quoin_types::Incarnation(9),
        quoin_types::Epoch(0),
    );
    assert!(lost.await.unwrap().unwrap_err().contains("n2"));
}

#[tokio::test]
async fn one_pool_that_says_otherwise_than_a_quorum_keeps_no_volume_on_a_lost_node_and_is_named() {
    let cluster = impatient().await;
    cluster.attach("db", "n1").await.unwrap();
    let id = cluster.volume("db").id.0;
    cluster.open_volume(id, "n1", 9).await;
    let elsewhere = publish("n2", Sharing::Exclusive, false);
    for _ in 0..7 {
        tokio::time::sleep(TIMEOUT / 5).await;
        cluster.hear(Hearing::Silent, &["n2"]).await;
        let mut liar = cluster.pools[1].report();
        liar.replicas.iter_mut().for_each(|replica| replica.set_hearing(Hearing::Hears));
        cluster.controller.reports.pool(&liar).await.unwrap();
    }
    cluster.publish(&elsewhere).await.unwrap();
    let events = cluster.controller.state.events().after(0);
    let named = events.iter().find(|event| event.reason == "PoolDissents").unwrap();
    let liar = &cluster.pools[1].name;
    assert!(named.message.contains(&format!("pool {liar} hears its target")), "{}", named.message);
    assert_eq!(named.severity, "Warning");
    assert_eq!(named.object_name, "db");
}

/// Proves CSI-ACCESSMODE-05.
#[tokio::test]
async fn nodes_that_share_a_volume_are_led_to_the_one_that_serves_it() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.publish(&publish("n1", Sharing::SingleWriter, false)).await.unwrap();
    let id = cluster.volume("db").id.0;
    cluster.open_volume(id, "n1", 9).await;
    let refused = cluster.refused(&publish("n2", Sharing::SingleWriter, false)).await;
    assert!(refused.contains("written by node n1"), "{refused}");
    let reader = publish("n2", Sharing::SingleWriter, true);
    cluster.publish(&reader).await.unwrap();
    cluster.publish(&reader).await.unwrap();
    let differently = cluster.publish(&publish("n2", Sharing::MultiWriter, true)).await;
    assert_eq!(differently.unwrap_err().code(), Code::AlreadyExists);

    let targets = |node: &str| cluster.controller.assignments.of_node(node).targets;
    let (served, led) = (targets("n1").remove(0), targets("n2").remove(0));
    assert_eq!(
        served.sharers,
        [Sharer { node: "n2".into(), read_only: true, ..Default::default() }]
    );
    assert!(served.served_at.is_none() && !served.read_only && !served.replicas.is_empty());
    let nowhere = ServedAt { node: "n1".into(), ..Default::default() };
    assert_eq!((led.served_at, led.read_only, led.replicas.len()), (Some(nowhere), true, 0));
    assert_eq!((led.used_since_epoch, led.sharers.len()), (served.used_since_epoch, 0));
    let shown = cluster.shown("db");
    let of_n2 = shown.attachments.iter().find(|a| a.node == "n2").unwrap();
    assert_eq!((of_n2.served_by.as_str(), of_n2.sharing.as_str()), ("n1", "single-writer"));
    assert!(of_n2.message.contains("node n1"), "{}", of_n2.message);

    let at = |share_address: &str| TargetReport {
        node: "n1".into(),
        share_address: share_address.into(),
        ..TargetReport::default()
    };
    for wrong in ["10.0.0.1", "10.0.0.1:0", ":1", "a b:1", "h:99999"] {
        let refused = cluster.controller.reports.target(&at(wrong)).await.unwrap_err();
        assert!(refused.to_string().starts_with("share_address:"), "{refused}");
    }
    cluster.controller.reports.target(&at("10.0.0.1:10809")).await.unwrap();
    assert_eq!(targets("n2")[0].served_at.as_ref().unwrap().address, "10.0.0.1:10809");

    // The one that serves it leaves: the other one's target goes on, at a higher epoch.
    let since = targets("n1")[0].used_since_epoch;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    assert!(targets("n1").is_empty());
    let served = targets("n2").remove(0);
    assert!(served.served_at.is_none() && served.sharers.is_empty() && served.read_only);
    assert_eq!(served.used_since_epoch, since, "it is the same use");
}

#[tokio::test]
async fn the_target_of_a_shared_volume_moves_from_a_node_that_is_lost_and_its_attachment_stays() {
    let cluster = impatient().await;
    cluster.publish(&publish("n1", Sharing::MultiWriter, false)).await.unwrap();
    cluster.publish(&publish("n2", Sharing::MultiWriter, false)).await.unwrap();
    let id = cluster.volume("db").id.0;
    let epoch = cluster.open_volume(id, "n1", 9).await;
    let failover = &cluster.controller.work.failover;
    cluster.let_n1_be_silent(Hearing::Hears).await;
    failover.look().await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n1"), "its pools hear it");
    cluster.let_n1_be_silent(Hearing::Silent).await;
    failover.look().await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!((volume.opened.owner.as_deref(), volume.attachments.len()), (Some("n2"), 2));
    assert!(volume.opened.epoch > epoch.0);
    assert!(cluster.reasons().contains(&"TargetMoved".to_owned()));
    // It is back, and led to the other one.
    let led = cluster.controller.assignments.of_node("n1").targets.remove(0);
    assert_eq!(led.served_at.unwrap().node, "n2");
    failover.look().await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n2"));
}

#[tokio::test]
async fn a_node_that_loses_a_shared_volume_by_force_loses_what_the_target_holds_for_it() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.publish(&publish("n1", Sharing::MultiWriter, false)).await.unwrap();
    cluster.publish(&publish("n2", Sharing::MultiWriter, false)).await.unwrap();
    let id = cluster.volume("db").id.0;
    let epoch = cluster.open_volume(id, "n1", 9).await;
    let attachments = &cluster.controller.volumes.attachments;
    attachments.detach(by_name("db").as_ref(), "n2", true).await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!((volume.opened.owner.as_deref(), volume.attachments.len()), (Some("n1"), 1));
    assert!(volume.grants.fenced > epoch.0, "the target opens it anew, without that node");
}

/// Proves CSI-ACCESSMODE-02: a node that has a volume read-only gets no leave to write it, and where a
/// journal is due, none beyond the replay and its time.
#[tokio::test]
async fn a_node_that_reads_has_no_grant_that_writes_except_while_it_replays_a_journal() {
    let look = async |cluster: &Cluster, after: Duration| {
        let now = tokio::time::Instant::now() + after;
        cluster.controller.work.tender.look_at_all(now).await.unwrap();
    };
    let reader =
        |node: &str, replays| Publish { replays, ..publish(node, Sharing::ReadOnly, true) };
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.publish(&reader("n1", false)).await.unwrap();
    assert!(!cluster.opens_to_write("db", "n1", 1).await);
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "").await.unwrap();

    // It confirms: its grant is taken back, and the next one reads.
    cluster.publish(&reader("n1", true)).await.unwrap();
    assert!(cluster.opens_to_write("db", "n1", 2).await);
    cluster.serving("db", &[]).await;
    let granted = cluster.volume("db").opened.epoch;
    let shown = cluster.shown("db").attachments.remove(0);
    assert!(shown.replays && shown.message.contains("300 s at most"), "{}", shown.message);
    look(&cluster, Duration::ZERO).await;
    look(&cluster, Duration::from_secs(299)).await;
    assert!(cluster.shown("db").attachments[0].replays, "it has time yet");
    let confirmed = async || {
        let volume = cluster.volume("db");
        cluster.controller.volumes.attachments.confirm_replay(&volume, "n1").await
    };
    confirmed().await.unwrap();
    let volume = cluster.volume("db");
    assert!(volume.grants.fenced > granted && volume.opened.epoch == volume.grants.fenced);
    assert!(!cluster.opens_to_write("db", "n1", 3).await);
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "").await.unwrap();

    // It does not: its leave goes to the node that waits, and then ends.
    cluster.publish(&reader("n1", true)).await.unwrap();
    cluster.publish(&reader("n2", true)).await.unwrap();
    assert!(cluster.opens_to_write("db", "n1", 4).await);
    look(&cluster, Duration::from_secs(1000)).await;
    look(&cluster, Duration::from_secs(1301)).await;
    let of = |node: &str| {
        let shown = cluster.shown("db").attachments;
        let of_it = shown.into_iter().find(|a| a.node == node).unwrap();
        (of_it.replays, of_it.replay_is_late)
    };
    assert_eq!((of("n1"), of("n2")), ((false, true), (true, false)));
    assert!(confirmed().await.unwrap_err().to_string().contains("node n2"));
    assert!(cluster.opens_to_write("db", "n1", 5).await, "for n2, which reaches it there");
    look(&cluster, Duration::from_secs(1302)).await;
    look(&cluster, Duration::from_secs(1700)).await;
    assert_eq!((of("n1"), of("n2")), ((false, true), (false, true)));
    assert!(cluster.volume("db").grants.fenced_at_once, "it is cut");
    assert!(!cluster.opens_to_write("db", "n1", 6).await);
    assert!(confirmed().await.unwrap_err().to_string().contains("detach it there"));
    let late = cluster.reasons().into_iter().filter(|reason| reason == "ReplayLate");
    assert_eq!(late.count(), 2);
}

#[tokio::test]
async fn the_last_node_that_writes_takes_the_grant_that_writes_with_it() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.publish(&publish("n1", Sharing::SingleWriter, true)).await.unwrap();
    assert!(!cluster.opens_to_write("db", "n1", 1).await);
    cluster.publish(&publish("n2", Sharing::SingleWriter, false)).await.unwrap();
    assert!(cluster.opens_to_write("db", "n1", 2).await, "for n2, which reaches it there");
    let granted = cluster.volume("db").opened.epoch;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n2").await.unwrap();
    assert!(cluster.volume("db").grants.fenced > granted);
    assert!(!cluster.opens_to_write("db", "n1", 3).await);
}
