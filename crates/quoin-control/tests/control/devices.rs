//! Nodes' reports of their devices, and the consequences: dead devices, and confirmation before a
//! volume is taken away. Also a volume's state while it is opened, and once it is deleted.

use std::time::Duration;

use quoin_api::control::*;
use quoin_control::store::{Store, Swap};
use tonic::Code;

use crate::cluster::{Cluster, by_name, spec};

fn device(cluster: &Cluster, in_use: bool, since_epoch: u64) -> DeviceReport {
    DeviceReport {
        volume_id: cluster.volume("db").id.0.to_string(),
        device: "/dev/loop7".into(),
        in_use,
        mounts: if in_use { vec!["/mnt/db".into()] } else { Vec::new() },
        since_epoch,
        size_bytes: 0,
        dead: String::new(),
    }
}

/// Reports these devices as a node; returns the answer.
async fn reports(
    cluster: &Cluster,
    node: &str,
    devices: Vec<DeviceReport>,
) -> Vec<ServedElsewhere> {
    let report =
        NodeReport { node: node.into(), devices, knows_devices: true, ..NodeReport::default() };
    cluster.controller.reports.node(&report).await.unwrap().served_elsewhere
}

async fn detach(cluster: &Cluster, node: &str) {
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), node).await.unwrap();
}

/// Checks each node that has the volume attached and is meant.
fn check_unused(cluster: &Cluster, node: &str) -> Result<(), quoin_control::Error> {
    let volume = cluster.volume("db");
    let nodes = volume.attachments.iter().map(|attachment| attachment.node.as_str());
    let mut meant = nodes.filter(|on| node.is_empty() || *on == node);
    meant.try_for_each(|on| cluster.controller.volumes.devices.check_unused(&volume, on))
}

async fn opened() -> Cluster {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 9).await;
    cluster
}

fn told_since(cluster: &Cluster, node: &str) -> u64 {
    cluster.controller.assignments.of_node(node).targets[0].used_since_epoch
}

#[tokio::test]
async fn a_device_is_dead_once_another_node_has_opened_its_volume_and_also_when_that_is_back() {
    let mut cluster = opened().await;
    let id = cluster.volume("db").id.0;
    let first = told_since(&cluster, "n1");
    let mounted = device(&cluster, true, first);
    assert!(reports(&cluster, "n1", vec![mounted.clone()]).await.is_empty());

    // Detached and attached to the same node it is the same use, over any number of openings.
    detach(&cluster, "n1").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(id, "n1", 10).await;
    assert_eq!(told_since(&cluster, "n1"), first);
    assert!(reports(&cluster, "n1", vec![mounted.clone()]).await.is_empty());

    detach(&cluster, "n1").await;
    cluster.attach("db", "n2").await.unwrap();
    assert!(reports(&cluster, "n1", vec![mounted.clone()]).await.is_empty(), "not opened yet");
    let epoch = cluster.open_volume(id, "n2", 11).await;
    let served = reports(&cluster, "n1", vec![mounted.clone()]).await;
    assert_eq!((served[0].node.as_str(), served[0].name.as_str()), ("n2", "db"));
    assert!(served[0].since_epoch > first && served[0].since_epoch <= epoch.0);
    assert_eq!(cluster.controller.assignments.of_node("n1").served_elsewhere, served);
    let shown = cluster.shown("db").devices.remove(0);
    assert!(shown.node == "n1" && shown.dead.contains("served by n2 since epoch"), "{shown:?}");
    // Each report gets the answer, and users get one event.
    reports(&cluster, "n1", vec![mounted.clone()]).await;
    let told = cluster.reasons().iter().filter(|reason| *reason == "MountsDead").count();
    assert_eq!(told, 1);

    // Back on the first node, the earlier device is useless to it.
    cluster.restart().await;
    cluster.settle().await.unwrap();
    detach(&cluster, "n2").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(id, "n1", 12).await;
    let now = told_since(&cluster, "n1");
    assert!(now > epoch.0);
    let served = reports(&cluster, "n1", vec![mounted, device(&cluster, true, now)]).await;
    assert_eq!((served.len(), served[0].since_epoch), (1, now));
    assert!(reports(&cluster, "n1", Vec::new()).await.is_empty());
    assert!(cluster.shown("db").devices.is_empty());
}

/// The volume is not opened anew there, so its use counts from the present epoch.
#[tokio::test]
async fn a_device_is_dead_also_where_its_volume_went_to_a_node_whose_target_was_lent_to_it() {
    let mut cluster = Cluster::of(4).await;
    let id = cluster.create("db").await.id.0;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(id, "n1", 9).await;
    let mounted = device(&cluster, true, told_since(&cluster, "n1"));
    reports(&cluster, "n1", vec![mounted.clone()]).await;
    detach(&cluster, "n1").await;
    for n in 1..=4 {
        let report = NodeReport { node: format!("h{n}"), ..NodeReport::default() };
        cluster.controller.reports.node(&report).await.unwrap();
    }
    let scale = quoin_control::Scale { replicas: 4, ..Default::default() };
    cluster.controller.volumes.replicas.scale(by_name("db").as_ref(), &scale).await.unwrap();
    cluster.settle().await.unwrap();
    cluster.controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
    let lent = cluster.volume("db").opened.owner.clone().unwrap();
    assert_ne!(lent, "n1");
    let epoch = cluster.open_volume(id, &lent, 10).await;
    assert!(reports(&cluster, "n1", vec![mounted.clone()]).await.is_empty(), "nobody uses it");

    cluster.attach("db", &lent).await.unwrap();
    assert_eq!(cluster.volume("db").epoch(), epoch, "its target goes on");
    let served = reports(&cluster, "n1", vec![mounted]).await;
    assert_eq!((served[0].node.as_str(), served[0].since_epoch), (lent.as_str(), epoch.0));
    let own = device(&cluster, true, told_since(&cluster, &lent));
    assert!(reports(&cluster, &lent, vec![own]).await.is_empty());
}

#[tokio::test]
async fn a_target_tells_the_devices_of_a_host_without_csi_and_is_told_which_are_dead() {
    let cluster = opened().await;
    let since = told_since(&cluster, "n1");
    let report = TargetReport {
        node: "n1".into(),
        devices: vec![device(&cluster, true, since)],
        knows_devices: true,
        ..TargetReport::default()
    };
    let served = cluster.controller.reports.target(&report).await.unwrap().served_elsewhere;
    assert!(served.is_empty());
    let refused = check_unused(&cluster, "n1").unwrap_err();
    assert!(refused.to_string().contains("in use on node n1"), "{refused}");
    // A report without devices, as CSI's without an attach process, removes none.
    let csi = NodeReport { node: "n1".into(), ..NodeReport::default() };
    cluster.controller.reports.node(&csi).await.unwrap();
    assert!(check_unused(&cluster, "n1").is_err());
    detach(&cluster, "n1").await;
    cluster.attach("db", "n2").await.unwrap();
    cluster.open_volume(cluster.volume("db").id.0, "n2", 11).await;
    let served = cluster.controller.reports.target(&report).await.unwrap().served_elsewhere;
    assert_eq!((served.len(), served[0].node.as_str()), (1, "n2"));
}

/// A volume that is detached or deleted cannot come back by itself, so its device must not wait.
#[tokio::test]
async fn a_node_is_told_of_devices_whose_volume_it_has_no_more_and_of_those_that_are_too_small() {
    let cluster = opened().await;
    let volume = cluster.volume("db");
    let own = device(&cluster, true, told_since(&cluster, "n1"));
    let report = |device: &DeviceReport| NodeReport {
        node: "n1".into(),
        devices: vec![device.clone()],
        knows_devices: true,
        ..NodeReport::default()
    };
    let answer = async |device: &DeviceReport| {
        cluster.controller.reports.node(&report(device)).await.unwrap()
    };
    let told = || cluster.reasons().iter().filter(|reason| *reason == "DeviceLeft").count();
    let sized = |size_bytes| DeviceReport { size_bytes, ..own.clone() };
    assert_eq!(answer(&sized(volume.size_bytes)).await, Default::default());
    assert_eq!(answer(&sized(0)).await, Default::default(), "its size is unknown");
    let sizes = answer(&sized(volume.size_bytes - 4096)).await.sizes;
    assert_eq!((sizes.len(), sizes[0].size_bytes), (1, volume.size_bytes));

    detach(&cluster, "n1").await;
    let detached = answer(&sized(volume.size_bytes - 4096)).await;
    assert_eq!((detached.detached.len(), detached.sizes.len()), (1, 0));
    assert_eq!(detached.detached[0].name, "db");
    // Its IO is held yet.
    assert_eq!(told(), 0);
    let dead = DeviceReport { dead: "not attached here".into(), ..own.clone() };
    answer(&dead).await;
    answer(&dead).await;
    assert_eq!(told(), 1);
    assert_eq!(cluster.shown("db").devices[0].dead, "not attached here");

    cluster.attach("db", "n1").await.unwrap();
    assert!(answer(&own).await.detached.is_empty());
    detach(&cluster, "n1").await;
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    let gone = answer(&dead).await.detached;
    assert_eq!((gone.len(), gone[0].volume_id.as_str()), (1, own.volume_id.as_str()));
}

#[tokio::test]
async fn a_volume_is_not_taken_from_a_node_that_uses_it_or_of_which_nobody_knows() {
    let cluster = opened().await;
    let db = by_name("db");
    let refused = |node: &str| {
        let outcome = check_unused(&cluster, node);
        outcome.map_err(|error| (error.code(), error.to_string()))
    };
    let since = told_since(&cluster, "n1");
    reports(&cluster, "n1", vec![device(&cluster, true, since)]).await;
    for node in ["", "n1"] {
        let (code, said) = refused(node).unwrap_err();
        assert_eq!(code, Code::FailedPrecondition);
        assert!(said.contains("in use on node n1") && said.contains("/mnt/db"), "{said}");
        assert!(said.contains("--force"), "{said}");
    }
    assert_eq!(refused("n2"), Ok(()), "it is not attached there");
    reports(&cluster, "n1", vec![device(&cluster, false, since)]).await;
    assert_eq!(refused(""), Ok(()));

    // A node that has left does not report open devices.
    let last_words = NodeReport { node: "n1".into(), leaving: true, ..NodeReport::default() };
    cluster.controller.reports.node(&last_words).await.unwrap();
    let (code, said) = refused("").unwrap_err();
    assert_eq!(code, Code::FailedPrecondition);
    assert!(said.contains("node n1 has not reported") && said.contains("--force"), "{said}");
    // Orchestrators have unstaged it, or take the node for gone.
    cluster.controller.volumes.attachments.unpublish(db.as_ref(), "n1").await.unwrap();
    assert_eq!(refused(""), Ok(()));
}

/// The state after a recovery of the records: a target that continues requests nothing, so no
/// message names the holder of the epoch.
#[tokio::test]
async fn a_volume_is_not_taken_from_a_silent_node_where_no_record_says_who_opened_it() {
    let mut cluster = opened().await;
    let key = cluster.store.keys("volume/").remove(0);
    let entry = cluster.store.get(&key).await.unwrap().unwrap();
    let record = String::from_utf8(entry.value).unwrap();
    let unsaid = record.replace(r#""holder":"n1","#, "");
    assert_ne!(unsaid, record);
    let written = cluster.store.compare_and_swap(&key, entry.revision, Some(unsaid.into())).await;
    assert!(matches!(written, Ok(Swap::Done(_))));
    cluster.restart().await;
    assert_eq!(cluster.volume("db").grants.holder, "");
    let said = check_unused(&cluster, "").unwrap_err().to_string();
    assert!(said.contains("node n1 has not reported since the controller started"), "{said}");
    detach(&cluster, "n1").await;
    check_unused(&cluster, "").unwrap();
}

/// The proof is a recent report alone: a controller that has just started knows nothing, and an
/// attach process that hangs reports nothing.
#[tokio::test]
async fn a_volume_is_not_taken_from_a_node_that_does_not_say_what_it_has() {
    let mut cluster = opened().await;
    let since = told_since(&cluster, "n1");
    reports(&cluster, "n1", vec![device(&cluster, true, since)]).await;
    let serving = cluster.report_of("db", "serving");
    cluster.restart().await;
    // Its target speaks first, and proves that the node is there.
    cluster.controller.reports.volume(&serving).await.unwrap();
    let refused = |cluster: &Cluster| {
        let refused = check_unused(cluster, "").unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        refused.to_string()
    };
    let said = refused(&cluster);
    assert!(said.contains("node n1 has not said since the controller started"), "{said}");
    assert!(said.contains("--node n1 --force"), "{said}");
    reports(&cluster, "n1", vec![device(&cluster, true, since)]).await;
    assert!(refused(&cluster).contains("in use on node n1"));
    reports(&cluster, "n1", vec![device(&cluster, false, since)]).await;
    check_unused(&cluster, "").unwrap();

    // An old report proves nothing about the present.
    cluster.offline_after = Duration::from_millis(500);
    cluster.restart().await;
    reports(&cluster, "n1", vec![device(&cluster, false, since)]).await;
    let hangs = NodeReport { node: "n1".into(), ..NodeReport::default() };
    loop {
        cluster.controller.reports.node(&hangs).await.unwrap();
        match check_unused(&cluster, "") {
            Err(error) if error.to_string().contains("node n1 has not said for") => break,
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }

    // A node that holds no epoch has had no device of the volume.
    detach(&cluster, "n1").await;
    cluster.attach("db", "n2").await.unwrap();
    check_unused(&cluster, "").unwrap();
}

#[tokio::test]
async fn hostile_reports_of_devices_are_refused_by_field() {
    let cluster = opened().await;
    let good = device(&cluster, true, 1);
    let long = DeviceReport { device: "x".repeat(2000), ..good.clone() };
    let mounts = DeviceReport { mounts: vec!["/m".into(); 9], ..good.clone() };
    let volume = DeviceReport { volume_id: "db".into(), ..good.clone() };
    for devices in [vec![long], vec![mounts], vec![volume], vec![good; 4097]] {
        let node = "n1".into();
        let report = NodeReport { node, devices, knows_devices: true, ..NodeReport::default() };
        let error = cluster.controller.reports.node(&report).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
    }
}

/// Proves CSI-CONDITION-01: a volume to which nothing has happened is not abnormal.
#[tokio::test]
async fn a_volume_that_is_just_opened_is_opening_and_not_ill() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    let guids: Vec<_> = volume.replicas.iter().map(|r| r.guid.0.to_string()).collect();
    let all = |state| guids.iter().map(|guid| (guid.as_str(), state)).collect::<Vec<_>>();
    cluster.attach("db", "n1").await.unwrap();
    assert_eq!(cluster.shown("db").health, "Opening");
    cluster.open_volume(volume.id.0, "n1", 9).await;
    // One pool holds the first View of the epoch before the target and other pools report it.
    let first = volume.replicas[0].guid.0.to_string();
    let pool = cluster.pools.iter().find(|pool| pool.holds.contains_key(&first)).unwrap();
    let mut report = pool.report();
    let epoch = cluster.volume("db").opened.epoch;
    report.replicas.iter_mut().filter(|replica| replica.guid == first).for_each(|replica| {
        (replica.position_epoch, replica.position_lsn) = (epoch, 3);
    });
    cluster.controller.reports.pool(&report).await.unwrap();
    let shown = cluster.shown("db");
    assert_eq!((shown.health.as_str(), shown.replicas[1].phase.as_str()), ("Opening", "InSync"));
    cluster.controller.reports.pool(&pool.report()).await.unwrap();
    let replicas = all("disconnected").into_iter().map(|(guid, state)| ReplicaProgress {
        guid: guid.into(),
        state: state.into(),
        ..ReplicaProgress::default()
    });
    let replicas: Vec<_> = replicas.collect();
    let waits = |report: &mut VolumeReport| {
        report.replicas.clone_from(&replicas);
        report.waiting_for = "pool p1, p2, p3".into();
    };
    cluster.reports("db", "waiting", waits).await;
    let shown = cluster.shown("db");
    assert_eq!(shown.health, "Opening");
    assert!(!shown.waiting_for.contains("pool"), "{}", shown.waiting_for);
    assert!(shown.replicas.iter().all(|replica| replica.phase == "InSync"));
    cluster.serving("db", &all("catching-up")).await;
    assert_eq!(
        (cluster.shown("db").health.as_str(), &*cluster.shown("db").waiting_for),
        ("Opening", "")
    );
    cluster.serving("db", &all("in-sync")).await;
    assert_eq!(cluster.shown("db").health, "Online");
    assert!(!cluster.reasons().contains(&"VolumeDegraded".to_owned()));

    // A volume that stays so for long has a problem, and so has one whose pool is away.
    cluster.open_volume(volume.id.0, "n1", 10).await;
    cluster.reports("db", "waiting", waits).await;
    assert_eq!(cluster.shown("db").health, "Opening");
    while cluster.shown("db").health != "Faulted" {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cluster.open_volume(volume.id.0, "n1", 11).await;
    cluster.goes("p1").await;
    assert_eq!(cluster.shown("db").health, "Degraded");
}

/// Proves CSI-DELETEVOLUME-02: once it is answered, no list shows the volume any more.
#[tokio::test]
async fn a_deleted_volume_is_on_no_list_and_its_name_is_free_while_pools_still_clear_it_away() {
    let mut cluster = Cluster::new().await;
    let first = cluster.create("db").await;
    cluster.create("other").await;
    let reference = Some(VolumeRef { id: first.id.0.to_string(), name: String::new() });
    cluster.controller.volumes.catalog.delete(reference.as_ref()).await.unwrap();
    // No pool has heard of it yet.
    let names = |cluster: &Cluster| -> Vec<String> {
        let (page, end) = cluster.controller.volumes.catalog.list(0, "").unwrap();
        assert_eq!(end, "");
        page.iter().map(|volume| volume.spec.name.clone()).collect()
    };
    assert_eq!(names(&cluster), ["other"]);
    let (page, token) = cluster.controller.volumes.catalog.list(1, "").unwrap();
    assert_eq!((page.len(), token.as_str()), (1, ""), "nothing comes after it");
    assert_eq!(
        cluster.controller.volumes.catalog.get(by_name("db").as_ref()).unwrap_err().code(),
        Code::NotFound
    );
    cluster.controller.volumes.catalog.delete(reference.as_ref()).await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    let second = cluster.controller.volumes.catalog.create(&spec("db"), 0).await.unwrap();
    assert_ne!(second.id, first.id);
    assert_eq!(names(&cluster).len(), 2);
    // The first one goes by its id, and takes nothing of the second along.
    cluster.controller.volumes.catalog.delete(reference.as_ref()).await.unwrap();
    cluster.settle().await.unwrap();
    assert_eq!(cluster.volume("db").id, second.id);
    assert_eq!(names(&cluster).len(), 2);
}
