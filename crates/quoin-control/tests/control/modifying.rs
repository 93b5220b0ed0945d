//! Options of a volume that exists: changed in one update, told to the target and to every grant,
//! and in force once the target says so.

use quoin_api::control::{Durability, TargetAssignment, VolumeSpec};
use quoin_api::volume::NO_LIMIT;
use quoin_control::Error;
use quoin_types::{Epoch, Incarnation};
use tonic::Code;

use crate::cluster::{Cluster, by_name, spec};

fn media() -> VolumeSpec {
    VolumeSpec { durability: Durability::Media.into(), iops_limit: 500, ..VolumeSpec::default() }
}

async fn modify(cluster: &Cluster, asked: &VolumeSpec) -> Result<Vec<String>, Error> {
    let modifications = &cluster.controller.volumes.modifications;
    modifications.modify(by_name("db").as_ref(), asked, false).await.map(|(_, changes)| changes)
}

fn waits(cluster: &Cluster) -> String {
    cluster.controller.volumes.modifications.waiting_for(&cluster.volume("db"))
}

fn told(cluster: &Cluster) -> TargetAssignment {
    cluster.controller.assignments.of_node("n1").targets.remove(0)
}

/// Proves CSIN-MODIFY-09, CSIN-MODIFY-12, CSIN-MODIFY-13: what the records and the target's side of
/// them do.
#[tokio::test]
async fn what_is_named_changes_and_reaches_the_target_and_every_grant_with_a_later_version() {
    let mut cluster = Cluster::new().await;
    let id = cluster.create("db").await.id.0;
    cluster.attach("db", "n1").await.unwrap();
    let before = told(&cluster);
    let changes = modify(&cluster, &media()).await.unwrap();
    assert_eq!(changes, ["durability cache to media", "iopsLimit no limit to 500"]);
    assert_eq!(modify(&cluster, &media()).await.unwrap(), Vec::<String>::new(), "a repeat");
    let reasons = cluster.reasons();
    assert_eq!(reasons.iter().filter(|reason| *reason == "VolumeChanged").count(), 2);
    for round in 0..2 {
        let after = told(&cluster);
        assert!(after.options_version > before.options_version);
        let options = after.spec.unwrap();
        assert_eq!((options.durability(), options.iops_limit), (Durability::Media, 500));
        assert_eq!(options.on_full, before.spec.as_ref().unwrap().on_full);
        let epochs = &cluster.controller.volumes.epochs;
        let acquired = epochs.acquire(id, "n1", Incarnation(7 + round), Epoch(0)).await;
        let granted = acquired.unwrap().unwrap().record;
        assert_eq!(granted.generation, after.options_version, "a grant has the same options");
        cluster.restart().await;
        cluster.settle().await.unwrap();
    }
    let none = VolumeSpec { iops_limit: NO_LIMIT, ..VolumeSpec::default() };
    assert_eq!(modify(&cluster, &none).await.unwrap(), ["iopsLimit 500 to no limit"]);
}

/// Proves CSIN-MODIFY-10, CSIN-MODIFY-11, CSIN-MODIFY-15: each refusal leaves the record as it was.
#[tokio::test]
async fn of_a_request_that_is_refused_nothing_takes_effect() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let record = cluster.volume("db");
    for (asked, code, words) in [
        (VolumeSpec { block_size: 512, ..media() }, Code::InvalidArgument, "blockSize"),
        (VolumeSpec { reads: "odd".into(), ..media() }, Code::InvalidArgument, "reads"),
        (VolumeSpec { bandwidth_limit: 1, ..media() }, Code::InvalidArgument, "bandwidthLimit"),
        (VolumeSpec { replicas: 2, ..media() }, Code::InvalidArgument, "replicas"),
        (VolumeSpec { replicas: 9, ..media() }, Code::InvalidArgument, "replicas"),
        (VolumeSpec { replicas: 5, ..media() }, Code::ResourceExhausted, "hosts"),
    ] {
        let refused = modify(&cluster, &asked).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        assert!(refused.to_string().contains(words), "{refused}");
        assert_eq!(*cluster.volume("db"), *record);
    }
    let modifications = &cluster.controller.volumes.modifications;
    let (_, changes) = modifications.modify(by_name("db").as_ref(), &media(), true).await.unwrap();
    assert_eq!((changes.len(), &*cluster.volume("db")), (2, &*record), "a dry run");
    let unknown = modifications.modify(by_name("nowhere").as_ref(), &media(), false).await;
    assert_eq!(unknown.unwrap_err().code(), Code::NotFound);
    // A volume that is being created is another operation's.
    cluster.pools.iter_mut().for_each(|pool| pool.online = false);
    cluster.controller.volumes.catalog.create(&spec("new"), 0).await.unwrap();
    let early = modifications.modify(by_name("new").as_ref(), &media(), false).await;
    assert_eq!(early.unwrap_err().code(), Code::Aborted);
}

#[tokio::test]
async fn options_and_replicas_change_together_in_one_update() {
    let mut cluster = Cluster::of(6).await;
    cluster.create("db").await;
    let generation = cluster.volume("db").generation;
    let changes = modify(&cluster, &VolumeSpec { replicas: 5, ..media() }).await.unwrap();
    assert_eq!(changes.len(), 3);
    let volume = cluster.volume("db");
    assert_eq!((volume.membership.drf, volume.generation), (5, generation + 1));
}

#[tokio::test]
async fn a_change_is_in_force_once_the_owner_reports_its_version_and_not_before() {
    let mut cluster = Cluster::new().await;
    let id = cluster.create("db").await.id.0;
    assert_eq!(waits(&cluster), "", "nobody has it open");
    cluster.attach("db", "n1").await.unwrap();
    modify(&cluster, &media()).await.unwrap();
    assert!(waits(&cluster).contains("a report of the target on node n1"));
    cluster.open_volume(id, "n1", 9).await;
    let version = cluster.volume("db").generation;
    cluster.reports("db", "serving", |report| report.options_version = version - 1).await;
    assert!(waits(&cluster).contains("to put them in force"));
    cluster
        .reports("db", "waiting", |report| {
            report.options_version = version - 1;
            report.waiting_for = "quorum: 1 of 3".into();
        })
        .await;
    assert!(waits(&cluster).contains("quorum: 1 of 3"));
    cluster.reports("db", "serving", |report| report.options_version = version).await;
    assert_eq!(cluster.controller.volumes.modifications.wait(&cluster.volume("db")).await, "");
    // A target of another epoch says nothing about the present one.
    cluster.open_volume(id, "n1", 10).await;
    assert!(waits(&cluster).contains("a report"));
}

/// Proves CSIN-MODIFY-05: the comparison itself.
#[tokio::test]
async fn a_repeated_creation_is_compared_with_what_the_first_one_asked_for() {
    let mut cluster = Cluster::new().await;
    let mutable = |value: &str| {
        let parameters = [("iopsLimit".to_owned(), value.to_owned())];
        let iops_limit = value.parse().unwrap();
        VolumeSpec { mutable_parameters: parameters.into(), iops_limit, ..spec("db") }
    };
    let catalog = &cluster.controller.volumes.catalog;
    let id = catalog.create(&mutable("100"), 0).await.unwrap().id;
    cluster.settle().await.unwrap();
    modify(&cluster, &media()).await.unwrap();
    for _ in 0..2 {
        let catalog = &cluster.controller.volumes.catalog;
        assert_eq!(catalog.create(&mutable("100"), 0).await.unwrap().id, id);
        for other in [mutable("500"), spec("db"), VolumeSpec { name: "db".into(), ..media() }] {
            let other = VolumeSpec { size_bytes: spec("db").size_bytes, ..other };
            let refused = catalog.create(&other, 0).await.unwrap_err();
            assert_eq!(refused.code(), Code::AlreadyExists);
        }
        cluster.restart().await;
        cluster.settle().await.unwrap();
    }
    assert_eq!(cluster.volume("db").spec.options.iops_limit, 500);
}
