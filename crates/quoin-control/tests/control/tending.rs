//! Volumes without users, and the targets lent to them while their replicas are worked on.

use std::time::Duration;

use quoin_api::control::{AgentEvent, NodeReport, ReplicaProgress, VolumeReport};
use quoin_control::{Cordoning, Scale, Scope};
use tokio::time::Instant;

use crate::cluster::{Cluster, by_name};

/// Makes a volume attached nowhere, with a replica being added; h1 to h4 are nodes too.
async fn growing() -> Cluster {
    let mut cluster = Cluster::of(4).await;
    cluster.create("db").await;
    for n in 1..=4 {
        let report = NodeReport { node: format!("h{n}"), ..NodeReport::default() };
        cluster.controller.reports.node(&report).await.unwrap();
    }
    let scale = Scale { replicas: 4, ..Scale::default() };
    cluster.controller.volumes.replicas.scale(by_name("db").as_ref(), &scale).await.unwrap();
    cluster.settle().await.unwrap();
    cluster
}

fn told(cluster: &Cluster, node: &str) -> Vec<bool> {
    let targets = cluster.controller.assignments.of_node(node).targets;
    targets.iter().map(|target| target.maintenance).collect()
}

#[tokio::test]
async fn a_volume_attached_nowhere_gets_a_target_for_as_long_as_its_replicas_change() {
    let mut cluster = growing().await;
    assert!(cluster.volume("db").opened.owner.is_none());
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    let volume = cluster.volume("db");
    let node = volume.opened.owner.clone().unwrap();
    assert!(volume.attachments.is_empty() && cluster.shown("db").r#use == "detached");
    let hosts: Vec<_> = volume.replicas.iter().map(|r| r.pool.replace('p', "h")).collect();
    assert!(hosts.contains(&node), "where a replica is: {node}");
    assert_eq!(told(&cluster, &node), [true], "no client gets in");
    assert!(!cluster.opens_to_write("db", &node, 8).await, "a replica is added by what reads");
    let epoch = cluster.open_volume(volume.id.0, &node, 9).await;
    let new = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap().clone();
    let member = quoin_types::Member { id: new.id.0, guid: new.guid.0 };
    let swap = cluster.swap("db", epoch, 9, |known| known.push(member));
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner, Some(node.clone()), "it is not done");
    cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
    cluster.settle().await.unwrap();
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    assert!(cluster.volume("db").opened.owner.is_none(), "done, it is closed");
    assert!(told(&cluster, &node).is_empty());
}

#[tokio::test]
async fn nobody_is_warned_of_what_happens_to_a_volume_that_is_only_tended() {
    let mut cluster = growing().await;
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    let volume = cluster.volume("db");
    let node = volume.opened.owner.clone().unwrap();
    cluster.open_volume(volume.id.0, &node, 9).await;
    let guids: Vec<_> = volume.replicas.iter().map(|r| r.guid.0.to_string()).collect();
    let event = |reason: &str| AgentEvent {
        severity: "Warning".into(),
        volume_id: volume.id.0.to_string(),
        reason: reason.into(),
        ..AgentEvent::default()
    };
    let report = |report: &mut VolumeReport| {
        let state = |guid: &String| ReplicaProgress {
            guid: guid.clone(),
            state: "catching-up".into(),
            ..ReplicaProgress::default()
        };
        report.replicas = guids.iter().map(state).collect();
        report.events = vec![event("Waiting"), event("BadBlock")];
    };
    cluster.reports("db", "opening", report).await;
    cluster.settle().await.unwrap();
    assert_eq!(cluster.shown("db").health, "Degraded");
    let warnings = |cluster: &Cluster| {
        let events = cluster.controller.state.events().after(0).into_iter();
        events.filter(|e| e.severity != "Normal").map(|e| e.reason).collect::<Vec<_>>()
    };
    assert_eq!(warnings(&cluster), ["BadBlock"]);
    // A volume whose replica is gone, and one that is used, cause warnings.
    cluster.goes(&volume.replicas[0].pool).await;
    cluster.controller.work.lifecycle.reconcile_all().await.unwrap();
    assert_eq!(warnings(&cluster), ["BadBlock", "VolumeDegraded"]);
    cluster.attach("db", &node).await.unwrap();
    cluster.open_volume(volume.id.0, &node, 10).await;
    cluster.reports("db", "opening", report).await;
    assert!(warnings(&cluster).contains(&"Waiting".to_owned()));
}

#[tokio::test]
async fn who_attaches_it_meanwhile_takes_over_and_lets_clients_in() {
    let cluster = growing().await;
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    let lender = cluster.volume("db").opened.owner.clone().unwrap();
    cluster.attach("db", "n2").await.unwrap();
    assert_eq!((told(&cluster, "n2"), told(&cluster, &lender)), (vec![false], vec![]));
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n2"));
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n2").await.unwrap();
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    assert_eq!(told(&cluster, &cluster.volume("db").opened.owner.clone().unwrap()), [true]);
    // Deleting asks nobody: it is attached nowhere.
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
}

#[tokio::test]
async fn a_node_that_does_not_open_it_is_given_up_for_another_one_and_a_cordoned_one_is_not_asked()
{
    let cluster = growing().await;
    for node in ["h1", "h2", "h3", "h4", "n1"] {
        let scope = Scope::Node(node.into());
        cluster.controller.work.cordons.set(&scope, Cordoning::Cordon, false).await.unwrap();
    }
    let now = Instant::now();
    cluster.controller.work.tender.look_at_all(now).await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n2"));
    cluster
        .controller
        .work
        .cordons
        .set(&Scope::Node("n1".into()), Cordoning::Uncordon, false)
        .await
        .unwrap();
    cluster.controller.work.tender.look_at_all(now + Duration::from_secs(29)).await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n2"));
    cluster.controller.work.tender.look_at_all(now + Duration::from_secs(31)).await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n1"));
}
