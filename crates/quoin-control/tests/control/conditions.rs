//! The judgement of a volume's health, by what pools and targets report.

use quoin_api::control::{AgentEvent, ReplicaReport, Volume, volume_condition::Severity};

use crate::cluster::{Cluster, SimPool, pools};

fn reasons(volume: &Volume) -> Vec<(&str, Severity)> {
    assert_eq!(volume.not_judged, "");
    volume.conditions.iter().map(|one| (one.reason.as_str(), one.severity())).collect()
}

/// Makes an attached volume that its target serves with all replicas.
async fn served() -> (Cluster, Vec<String>) {
    let mut cluster = Cluster::of(4).await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 9).await;
    let guids = volume.membership.known.iter().map(|m| m.guid.0.to_string()).collect();
    (cluster, guids)
}

async fn reports(cluster: &Cluster, guids: &[String], states: [&str; 3]) {
    let pairs: Vec<_> = guids.iter().map(String::as_str).zip(states).collect();
    cluster.serving("db", &pairs).await;
}

/// Proves CSIN-HEALTH-07, CSIN-HEALTH-08, CSIN-HEALTH-09, CSIN-HEALTH-13: the judgement itself.
#[tokio::test]
async fn each_condition_has_its_entry_until_it_is_over_and_a_worse_one_hides_none() {
    let (cluster, guids) = served().await;
    reports(&cluster, &guids, ["in-sync"; 3]).await;
    assert_eq!(reasons(&cluster.shown("db")), []);
    reports(&cluster, &guids, ["in-sync", "in-sync", "disconnected"]).await;
    let offline = ("ReplicaOffline", Severity::Degraded);
    assert_eq!(reasons(&cluster.shown("db")), [offline]);
    reports(&cluster, &guids, ["in-sync", "catching-up", "disconnected"]).await;
    let behind = ("ReplicaRebuilding", Severity::Degraded);
    assert_eq!(reasons(&cluster.shown("db")), [offline, behind]);
    let waiting = |kind: &'static str, state: &'static str| {
        let guids = guids.clone();
        move |report: &mut quoin_api::control::VolumeReport| {
            report.waiting_for = "something".into();
            report.waiting_kind = kind.into();
            report.replicas = guids
                .iter()
                .map(|guid| quoin_api::control::ReplicaProgress {
                    guid: guid.clone(),
                    state: state.into(),
                    ..Default::default()
                })
                .collect();
        }
    };
    cluster.reports("db", "waiting", waiting("quorum", "disconnected")).await;
    let quorum = ("NoQuorum", Severity::Inaccessible);
    let shown = cluster.shown("db");
    assert_eq!(reasons(&shown), [quorum, offline]);
    for condition in &shown.conditions {
        assert!(condition.since.is_some() && !condition.message.is_empty());
        assert!(!condition.action.is_empty() && condition.way_out.contains("`quoin "));
    }
    for (kind, reason) in [("room", "PoolsFull"), ("records", "RecordsBehind")] {
        // Its replicas are all there, and no node can reach it.
        cluster.reports("db", "waiting", waiting(kind, "in-sync")).await;
        let shown = cluster.shown("db");
        assert!(reasons(&shown).contains(&(reason, Severity::Inaccessible)), "{shown:?}");
        assert_eq!(shown.health, "Faulted", "one judgement, wherever it is shown");
    }
    reports(&cluster, &guids, ["in-sync"; 3]).await;
    assert_eq!(reasons(&cluster.shown("db")), []);
}

#[tokio::test]
async fn a_lost_block_is_a_loss_of_data_until_a_verification_finds_none() {
    let (cluster, guids) = served().await;
    reports(&cluster, &guids, ["in-sync"; 3]).await;
    let event = |volume_id: String| AgentEvent {
        severity: "Error".into(),
        volume_id,
        reason: "BlockLost".into(),
        ..AgentEvent::default()
    };
    let foreign = event("0".repeat(32));
    cluster.reports("db", "serving", |report| report.events = vec![foreign]).await;
    reports(&cluster, &guids, ["in-sync"; 3]).await;
    assert_eq!(reasons(&cluster.shown("db")), [], "another volume's");
    let own = event(cluster.volume("db").id.0.to_string());
    cluster.reports("db", "serving", |report| report.events = vec![own]).await;
    reports(&cluster, &guids, ["in-sync"; 3]).await;
    assert_eq!(reasons(&cluster.shown("db")), [("BlocksLost", Severity::DataLoss)]);
}

#[tokio::test]
async fn a_replica_that_is_wanted_and_not_in_sync_yet_is_a_condition() {
    let (mut cluster, guids) = served().await;
    let scale = quoin_control::Scale { replicas: 4, ..quoin_control::Scale::default() };
    let db = crate::cluster::by_name("db");
    cluster.controller.volumes.replicas.scale(db.as_ref(), &scale).await.unwrap();
    cluster.settle().await.unwrap();
    reports(&cluster, &guids, ["in-sync"; 3]).await;
    assert_eq!(reasons(&cluster.shown("db")), [("ReplicaRebuilding", Severity::Degraded)]);
}

/// Proves CSIN-HEALTH-14: the judgement that is not made.
#[tokio::test]
async fn before_its_pools_have_reported_a_volume_is_not_judged_and_never_called_well() {
    let mut cluster = Cluster::of(3).await;
    cluster.create("db").await;
    assert_eq!(reasons(&cluster.shown("db")), []);
    cluster.pools = pools(1..=3);
    cluster.restart().await;
    let shown = cluster.shown("db");
    assert!(shown.conditions.is_empty() && shown.not_judged.contains("reported"));
}

#[tokio::test]
async fn a_volume_that_is_being_created_says_what_it_waits_for() {
    let mut cluster = Cluster::of(3).await;
    cluster.pools.iter_mut().for_each(|pool| pool.online = false);
    cluster.controller.volumes.catalog.create(&crate::cluster::spec("db"), 0).await.unwrap();
    let shown = cluster.shown("db");
    assert_eq!(reasons(&shown), [("BeingCreated", Severity::Inaccessible)]);
    assert!(shown.conditions[0].message.contains("p1"), "{shown:?}");
}

#[tokio::test]
async fn a_pool_says_that_records_are_old_by_the_replicas_that_they_have_in_it_and_by_no_others() {
    let mut cluster = Cluster::of(4).await;
    let volume = cluster.create("db").await;
    let holds = |pool: &str| volume.replicas.iter().find(|replica| replica.pool == pool);
    let (with, without): (Vec<_>, Vec<_>) =
        cluster.pools.iter().partition(|pool| holds(&pool.name).is_some());
    let says = async |pool: &SimPool, guid: String| {
        let mut report = pool.report();
        report.replicas.retain(|replica| replica.guid != guid);
        report.replicas.push(ReplicaReport {
            volume_id: volume.id.0.to_string(),
            guid,
            state: "closed".into(),
            position_epoch: 1 << 30,
            ..ReplicaReport::default()
        });
        cluster.controller.reports.pool(&report).await.unwrap();
        cluster.reasons().contains(&"RecordsBehind".to_owned())
    };
    assert!(!says(without[0], "f".repeat(32)).await, "it has nothing of the volume");
    let elsewhere = holds(&with[0].name).unwrap().guid.0.to_string();
    assert!(!says(without[0], elsewhere.clone()).await, "nor is that replica its own");
    assert!(says(with[0], elsewhere).await);
}
