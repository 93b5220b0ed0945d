//! A volume's life, as seen from outside.

use std::time::Duration;

use quoin_api::control::{AgentEvent, NodeReport, PoolReport, VolumeRef, VolumeReport, VolumeSpec};
use quoin_control::Publish;
use quoin_types::{Epoch, Incarnation};
use tokio::time::Instant;
use tonic::Code;

use crate::cluster::{Cluster, GIB, SimPool, by_name, spec};

#[tokio::test]
async fn a_volume_is_pending_until_every_pool_has_created_its_replica_and_then_ready() {
    let mut cluster = Cluster::new().await;
    cluster.pools[2].online = false;
    let volume = cluster.controller.volumes.catalog.create(&spec("db"), 0).await.unwrap();
    assert_eq!(volume.membership.known.len(), 3);
    cluster.settle().await.unwrap();
    let shown = cluster.shown("db");
    assert_eq!(shown.phase, "Pending");
    assert!(!shown.membership.unwrap().formed);
    assert_eq!(shown.waiting_for, "pool p3 to create its replica");
    let attached = cluster.attach("db", "n1").await.unwrap_err();
    assert_eq!(attached.code(), Code::Unavailable);
    assert!(attached.to_string().contains("pool p3"), "{attached}");
    let acquired =
        cluster.controller.volumes.epochs.acquire(volume.id.0, "n1", Incarnation(1), Epoch(0));
    assert!(acquired.await.unwrap().is_err(), "no target opens before the volume is formed");

    cluster.pools[2].online = true;
    cluster.settle().await.unwrap();
    let shown = cluster.shown("db");
    assert_eq!((shown.phase.as_str(), shown.health.as_str()), ("Ready", "Online"));
    assert_eq!((shown.r#use.as_str(), shown.waiting_for.as_str()), ("detached", ""));
    let membership = shown.membership.unwrap();
    assert!(membership.formed);
    assert_eq!((membership.rf, membership.cf), (3, 2));
    // The replicas chosen at creation are the known ones now.
    let chosen: Vec<_> = volume.membership.known.iter().map(|m| m.guid.0.to_string()).collect();
    assert_eq!(membership.known.iter().map(|m| m.guid.clone()).collect::<Vec<_>>(), chosen);
    assert!(shown.contract.contains("survive the loss of one host"), "{}", shown.contract);
}

/// Proves SCALE-QUORUM-11.
#[tokio::test]
async fn never_more_than_rf_replicas_are_made_with_quorum_on() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.pools[0].wipe();
    cluster.settle().await.unwrap();
    cluster.pools[1].wipe();
    cluster.settle().await.unwrap();
    let on = cluster.pools.iter().flat_map(|p| p.holds.values()).filter(|(_, on)| *on).count();
    let all = cluster.pools.iter().map(|pool| pool.holds.len()).sum::<usize>();
    assert_eq!((on, all), (1, 3), "what is made in place of lost ones has quorum off");
}

/// A pool refuses a replica whose records have no room in its metadata ring, and the volume would be
/// Pending without end.
#[tokio::test]
async fn a_volume_goes_to_no_pool_that_has_no_room_for_the_records_of_another_replica() {
    let mut cluster = Cluster::of(4).await;
    cluster.pools[0].ring_full = true;
    cluster.settle().await.unwrap();
    let volume = cluster.create("db").await;
    let mut pools: Vec<_> = volume.replicas.iter().map(|replica| replica.pool.as_str()).collect();
    pools.sort_unstable();
    assert_eq!(pools, ["p2", "p3", "p4"]);
    let wanted = VolumeSpec { replicas: 4, ..spec("four") };
    let refused = cluster.controller.volumes.catalog.create(&wanted, 0).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.to_string().contains("p1 (RingFull: its metadata ring"), "{refused}");
    // Once something was deleted there, it is a pool like others.
    cluster.pools[0].ring_full = false;
    cluster.settle().await.unwrap();
    cluster.controller.volumes.catalog.create(&wanted, 0).await.unwrap();
}

#[tokio::test]
async fn creating_again_finds_the_same_volume_and_refuses_a_different_one_by_field() {
    let mut cluster = Cluster::new().await;
    let first = cluster.create("db").await;
    let again = cluster.controller.volumes.catalog.create(&spec("db"), 2 * GIB).await.unwrap();
    assert_eq!(first.id, again.id);
    let smaller = VolumeSpec { size_bytes: GIB / 2, ..spec("db") };
    let fits = cluster.controller.volumes.catalog.create(&smaller, GIB).await.unwrap();
    assert_eq!(first.id, fits.id, "the size that it has lies within what is asked");
    for (field, asked) in [
        ("size", VolumeSpec { size_bytes: 2 * GIB, ..spec("db") }),
        ("replicas", VolumeSpec { replicas: 2, ..spec("db") }),
        ("fsType", VolumeSpec { fs_type: "xfs".into(), ..spec("db") }),
    ] {
        let error = cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists);
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[tokio::test]
async fn too_few_hosts_are_refused_and_spread_pool_says_what_it_does_not_survive() {
    let pools = (1..=3).map(|n| SimPool::new(&format!("p{n}"), "h1")).collect();
    let mut cluster = Cluster::with(crate::cluster::Memory::new(), pools).await;
    let error = cluster.controller.volumes.catalog.create(&spec("db"), 0).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("need 3 hosts"), "{error}");
    assert!(cluster.store.keys("volume").is_empty(), "a refusal leaves nothing behind");
    let mut asked = spec("db");
    asked.set_spread(quoin_api::control::Spread::Pool);
    cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
    cluster.settle().await.unwrap();
    let contract = cluster.shown("db").contract;
    assert!(contract.contains("survive the loss of one pool, not of one host"), "{contract}");
    assert_eq!(creations(&cluster), [format!("1 GiB on pools p1, p2, p3: {contract}")]);
}

/// Returns the events about volumes that were made.
fn creations(cluster: &Cluster) -> Vec<String> {
    let events = cluster.controller.state.events().after(0).into_iter();
    events.filter(|event| event.reason == "VolumeCreated").map(|event| event.message).collect()
}

#[tokio::test]
async fn the_event_of_a_creation_says_what_the_volume_survives() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let contract = cluster.shown("db").contract;
    assert!(contract.contains("survive the loss of one host"), "{contract}");
    assert_eq!(creations(&cluster), [format!("1 GiB on pools p1, p2, p3: {contract}")]);
}

#[tokio::test]
async fn no_volume_takes_another_s_id_for_its_name_and_a_name_that_looks_like_one_is_found() {
    let mut cluster = Cluster::new().await;
    let id = cluster.create("db").await.id.0.to_string();
    let error = cluster.controller.volumes.catalog.create(&spec(&id), 0).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("the id of volume \"db\""), "{error}");

    let alike = "0123456789abcdef0123456789abcdef";
    let volume = cluster.create(alike).await;
    let asked = |id: &str, name: &str| Some(VolumeRef { id: id.into(), name: name.into() });
    let found = cluster.controller.volumes.catalog.get(asked(alike, alike).as_ref()).unwrap();
    assert_eq!(found.id, volume.id);
    // A caller that gives an id alone never means a name: it may be that of a volume which is gone.
    assert!(cluster.controller.volumes.catalog.get(asked(alike, "").as_ref()).is_err());
    let found = cluster.controller.volumes.catalog.get(asked(&id, "nobody's").as_ref()).unwrap();
    assert_eq!(found.id.0.to_string(), id);
}

#[tokio::test]
async fn an_attached_volume_is_not_deleted_and_a_deleted_one_goes_when_every_pool_has_answered() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let error =
        cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.to_string().contains("node n1"), "{error}");
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();

    cluster.pools[1].online = false;
    let by_id = Some(VolumeRef { id: volume.id.0.to_string(), name: String::new() });
    cluster.controller.volumes.catalog.delete(by_id.as_ref()).await.unwrap();
    cluster.settle().await.unwrap();
    let left = cluster.controller.volumes.catalog.get(by_id.as_ref()).unwrap();
    let shown = cluster.controller.status.volume(&left);
    assert_eq!(shown.phase, "Deleting");
    assert_eq!(shown.waiting_for, "pool p2 to remove its replica");
    // Meanwhile the name is free, and deleting again is no error.
    cluster.controller.volumes.catalog.delete(by_id.as_ref()).await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    assert_eq!(cluster.attach("db", "n1").await.unwrap_err().code(), Code::NotFound);

    cluster.restart().await;
    cluster.pools[1].online = true;
    cluster.settle().await.unwrap();
    assert!(cluster.controller.volumes.catalog.get(by_id.as_ref()).is_err());
    assert!(cluster.store.keys("volume").is_empty());
    assert!(cluster.pools.iter().all(|pool| pool.holds.is_empty()));
}

#[tokio::test]
async fn a_volume_grows_and_never_shrinks() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let resize = |size, limit| {
        let controller = &cluster.controller;
        async move { controller.volumes.catalog.resize(by_name("db").as_ref(), size, limit).await }
    };
    assert_eq!(resize(2 * GIB, 0).await.unwrap().size_bytes, 2 * GIB);
    assert_eq!(resize(GIB, 0).await.unwrap().size_bytes, 2 * GIB, "asking less changes nothing");
    assert_eq!(resize(GIB, GIB).await.unwrap_err().code(), Code::OutOfRange);
    assert_eq!(resize(0, 0).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(resize(1 << 63, 0).await.unwrap_err().code(), Code::OutOfRange);
    // Pools have 100 GiB, of which 80 may be used.
    assert_eq!(resize(500 * GIB, 0).await.unwrap_err().code(), Code::OutOfRange);
    let told = cluster.controller.assignments.of_pool("p1").replicas[0].size_bytes;
    assert_eq!(told, 2 * GIB);
}

#[tokio::test]
async fn one_node_at_a_time_has_a_volume_and_asking_twice_is_the_same_as_once() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.attach("db", "n1").await.unwrap();
    let second = cluster.attach("db", "n2").await.unwrap_err();
    assert_eq!(second.code(), Code::FailedPrecondition);
    assert!(second.to_string().contains("attached to node n1"), "{second}");
    let differently = Publish { node: "n1".into(), read_only: true, ..Publish::default() };
    let differs =
        cluster.controller.volumes.attachments.publish(by_name("db").as_ref(), &differently).await;
    assert_eq!(differs.unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(cluster.attach("db", "n9").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(cluster.controller.assignments.of_node("n1").targets.len(), 1);
    assert!(cluster.controller.assignments.of_node("n2").targets.is_empty());

    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "").await.unwrap();
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster
        .controller
        .volumes
        .attachments
        .unpublish(by_name("nothing").as_ref(), "n1")
        .await
        .unwrap();
    assert!(cluster.controller.assignments.of_node("n1").targets.is_empty());
    cluster.attach("db", "n2").await.unwrap();
    let target = cluster.controller.assignments.of_node("n2").targets.remove(0);
    assert_eq!(target.replicas.len(), 3);
    assert!(target.replicas.iter().all(|r| !r.candidate && !r.address.is_empty()));
}

#[tokio::test]
async fn epochs_only_grow_only_for_the_owner_and_outlive_the_controller() {
    let mut cluster = Cluster::new().await;
    let id = cluster.create("db").await.id.0;
    cluster.attach("db", "n1").await.unwrap();
    let acquire = |cluster: &Cluster, node: &'static str, at_least: u64| {
        let controller = &cluster.controller;
        let acquired = controller.volumes.epochs.acquire(id, node, Incarnation(7), Epoch(at_least));
        futures::executor::block_on(acquired)
    };
    let granted = acquire(&cluster, "n1", 0).unwrap().unwrap();
    assert_eq!(granted.epoch, Epoch(1));
    assert!(granted.membership.formed);
    let grant = cluster.controller.state.identity().verify_grant(&granted.grant).unwrap();
    assert_eq!((grant.volume, grant.epoch, grant.node.as_str()), (id, Epoch(1), "n1"));
    assert_eq!(acquire(&cluster, "n1", 0).unwrap().unwrap().epoch, Epoch(2), "never twice");
    assert_eq!(acquire(&cluster, "n1", 40).unwrap().unwrap().epoch, Epoch(41));
    assert!(acquire(&cluster, "n2", 0).unwrap().unwrap_err().contains("node n1 owns"));
    assert!(acquire(&cluster, "n1", u64::MAX).is_err(), "the numbers must not be used up");
    cluster.restart().await;
    assert_eq!(acquire(&cluster, "n1", 0).unwrap().unwrap().epoch, Epoch(42));
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    assert!(acquire(&cluster, "n1", 0).unwrap().unwrap_err().contains("attached to no node"));
    cluster.attach("db", "n2").await.unwrap();
    assert!(acquire(&cluster, "n1", 0).unwrap().is_err(), "the former owner stays fenced");
    let next = acquire(&cluster, "n2", 0).unwrap().unwrap().epoch;
    assert_eq!(next, Epoch(44), "one was used up to fence the former owner");
}

#[tokio::test]
async fn of_many_acquisitions_at_once_no_two_get_the_same_epoch() {
    let mut cluster = Cluster::new().await;
    let id = cluster.create("db").await.id.0;
    cluster.attach("db", "n1").await.unwrap();
    let acquire = |n| cluster.controller.volumes.epochs.acquire(id, "n1", Incarnation(n), Epoch(0));
    let all = futures::future::join_all((1..=20).map(acquire)).await;
    let mut epochs: Vec<_> = all.into_iter().map(|one| one.unwrap().unwrap().epoch).collect();
    epochs.sort();
    epochs.dedup();
    assert_eq!(epochs.len(), 20);
}

#[tokio::test]
async fn health_and_waiting_follow_the_pools_and_the_target() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    let guids: Vec<_> = volume.replicas.iter().map(|r| r.guid.0.to_string()).collect();
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 1).await;
    let shown = cluster.shown("db");
    assert_eq!(shown.waiting_for, "the target on node n1 to open it");
    assert_eq!(
        (shown.r#use.as_str(), shown.attachments[0].phase.as_str()),
        ("attached", "Attaching")
    );

    let grant = cluster
        .serving("db", &[(&guids[0], "in-sync"), (&guids[1], "in-sync"), (&guids[2], "in-sync")])
        .await;
    assert_eq!(cluster.controller.state.identity().verify_grant(&grant).unwrap().epoch, Epoch(1));
    let shown = cluster.shown("db");
    assert_eq!((shown.health.as_str(), shown.waiting_for.as_str()), ("Online", ""));
    assert_eq!(shown.attachments[0].phase, "Attached");

    cluster
        .serving(
            "db",
            &[(&guids[0], "in-sync"), (&guids[1], "in-sync"), (&guids[2], "catching-up")],
        )
        .await;
    let shown = cluster.shown("db");
    assert_eq!(shown.health, "Degraded");
    assert!(shown.waiting_for.ends_with("to catch up"), "{}", shown.waiting_for);
    assert!(cluster.reasons().contains(&"VolumeDegraded".to_owned()));

    // A target that reports is proof enough of its node.
    let leaving = NodeReport { node: "n1".into(), leaving: true, ..NodeReport::default() };
    cluster.controller.reports.node(&leaving).await.unwrap();
    assert_eq!(cluster.shown("db").attachments[0].message, "node n1 is offline");
    let all = [(&*guids[0], "in-sync"), (&*guids[1], "in-sync"), (&*guids[2], "in-sync")];
    cluster.serving("db", &all).await;
    assert_eq!(cluster.shown("db").attachments[0].phase, "Attached");

    // A new controller knows nothing yet, and reports that instead of a false alarm.
    cluster.restart().await;
    assert_eq!(cluster.shown("db").health, "Unknown");
    let refused = cluster.controller.volumes.catalog.create(&spec("new"), 0).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    // Members without a report for any time count as offline from here on.
    let patient = std::mem::replace(&mut cluster.offline_after, Duration::ZERO);
    cluster.restart().await;
    assert_eq!(cluster.shown("db").health, "Faulted");
    cluster.controller.work.announce_absent();
    assert!(cluster.reasons().contains(&"PoolOffline".to_owned()));
    let waiting = cluster.shown("db").waiting_for;
    assert!(waiting.contains("pool p1: its pool is offline"), "{waiting}");
    cluster.settle().await.unwrap();
    assert!(cluster.reasons().contains(&"PoolOnline".to_owned()));
    cluster.offline_after = patient;
    cluster.restart().await;
    cluster.settle().await.unwrap();
    assert_eq!(cluster.shown("db").health, "Online");
}

#[tokio::test]
async fn volumes_are_listed_in_pages_and_a_foreign_token_is_aborted() {
    let mut cluster = Cluster::new().await;
    for name in ["a", "b", "c"] {
        cluster.create(name).await;
    }
    let (first, token) = cluster.controller.volumes.catalog.list(2, "").unwrap();
    assert_eq!(first.len(), 2);
    let (second, end) = cluster.controller.volumes.catalog.list(2, &token).unwrap();
    assert_eq!((second.len(), end.as_str()), (1, ""));
    let mut names: Vec<_> = first.iter().chain(&second).map(|v| v.spec.name.clone()).collect();
    names.sort();
    assert_eq!(names, ["a", "b", "c"]);
    let error = cluster.controller.volumes.catalog.list(2, "invalid-token").unwrap_err();
    assert_eq!(error.code(), Code::Aborted);
}

#[tokio::test]
async fn hostile_reports_are_refused_by_field() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 9).await;
    let many = cluster.report_of("db", "opening");
    let many = VolumeReport { silent: vec![format!("{:032x}", 7); 17], ..many };
    let error = cluster.controller.reports.volume(&many).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("silent"), "{error}");

    let good = cluster.pools[0].report();
    let mut long = good.clone();
    long.error = "x".repeat(2000);
    let mut name = good.clone();
    name.pool = "../p1".into();
    let mut state = good.clone();
    state.replicas.push(quoin_api::control::ReplicaReport::default());
    for (field, report) in [("error", long), ("pool", name), ("state", state)] {
        let error = cluster.controller.reports.pool(&report).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[tokio::test]
async fn what_keeps_a_pool_from_taking_more_is_shown_while_it_serves_on() {
    let cluster = Cluster::new().await;
    let report = |free_bytes, warning: &str| PoolReport {
        warning: warning.into(),
        free_bytes,
        ..cluster.pools[0].report()
    };
    for (free_bytes, state) in [(1 << 20, "Online"), (0, "Full")] {
        cluster.controller.reports.pool(&report(free_bytes, "the disk is full")).await.unwrap();
        let shown = cluster.controller.status.pools().remove(0);
        assert_eq!((shown.state.as_str(), shown.message.as_str()), (state, "the disk is full"));
    }
    let long = report(0, &"x".repeat(2000));
    assert!(cluster.controller.reports.pool(&long).await.is_err());
}

#[tokio::test]
async fn a_volume_too_small_for_its_file_system_is_refused_at_its_creation() {
    let cluster = Cluster::new().await;
    let asked = |size_bytes| VolumeSpec { fs_type: "xfs".into(), size_bytes, ..spec("small") };
    let refusal =
        cluster.controller.volumes.catalog.create(&asked(299 << 20), 0).await.unwrap_err();
    assert_eq!(refusal.code(), Code::OutOfRange);
    assert!(refusal.to_string().contains("300 MiB") && refusal.to_string().contains("ext4"));
    cluster.controller.volumes.catalog.create(&asked(300 << 20), 0).await.unwrap();
}

#[tokio::test]
async fn a_name_that_is_taken_is_refused_by_what_there_is_and_what_was_asked_field_by_field() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let asked = VolumeSpec {
        size_bytes: 2 * GIB,
        replicas: 2,
        iops_limit: 100,
        durability: quoin_api::control::Durability::Media.into(),
        ..spec("db")
    };
    let refusal = cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap_err();
    assert_eq!(refusal.code(), Code::AlreadyExists);
    let text = refusal.to_string();
    for words in [
        "size: it has 1 GiB, 2 GiB are asked for",
        "replicas: it was made with 3, 2 is asked for",
        "durability: it was made with cache, media is asked for",
        "iopsLimit: it was made with no limit, 100 is asked for",
        "quoin volume resize",
    ] {
        assert!(text.contains(words), "{text}");
    }
    assert!(!text.contains("consistencyFactor"), "2 of 2 as 2 of 3: {text}");
    let small = VolumeSpec { size_bytes: GIB / 2, ..spec("db") };
    let text =
        cluster.controller.volumes.catalog.create(&small, GIB / 2).await.unwrap_err().to_string();
    assert!(text.contains("it has 1 GiB, at most 512 MiB are asked for"), "{text}");
}

#[tokio::test]
async fn nothing_is_made_or_grown_in_pools_without_a_free_byte() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    for pool in &cluster.pools {
        let full = PoolReport {
            free_bytes: 0,
            warning: "the disk below it is full".into(),
            ..pool.report()
        };
        cluster.controller.reports.pool(&full).await.unwrap();
    }
    let refusal = cluster.controller.volumes.catalog.create(&spec("more"), 0).await.unwrap_err();
    assert_eq!(refusal.code(), Code::ResourceExhausted);
    let text = refusal.to_string();
    for name in ["p1", "p2", "p3"] {
        assert!(text.contains(&format!("{name} (full: the disk below it is full)")), "{text}");
    }
    assert!(text.contains("free space") && text.contains("add a pool"), "{text}");
    let grown = cluster.controller.volumes.catalog.resize(by_name("db").as_ref(), 2 * GIB, 0).await;
    let text = grown.unwrap_err().to_string();
    assert!(text.contains("is full: the disk below it is full"), "{text}");
    // Space there counts as space.
    cluster.settle().await.unwrap();
    cluster.create("more").await;
}

#[tokio::test]
async fn an_event_about_a_replica_names_its_pool() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    let replica = &volume.replicas[1];
    let event = |message: &str| AgentEvent {
        severity: "Warning".into(),
        volume_id: volume.id.0.to_string(),
        replica_id: replica.id.0.to_string(),
        reason: "Told".into(),
        message: message.into(),
    };
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 1).await;
    let told = [event("out of sync"), event(&format!("pool {} is slow", replica.pool))];
    cluster.reports("db", "serving", |report| report.events = told.to_vec()).await;
    let pool = cluster.pools.iter().find(|pool| pool.name == replica.pool).unwrap();
    let report = PoolReport { events: vec![event("it is damaged")], ..pool.report() };
    cluster.controller.reports.pool(&report).await.unwrap();
    let events = cluster.controller.state.events().after(0).into_iter();
    let said: Vec<_> = events.filter(|e| e.reason == "Told").map(|e| e.message).collect();
    let name = &replica.pool;
    assert_eq!(
        said,
        [
            format!("pool {name}: out of sync"),
            format!("pool {name} is slow"),
            format!("pool {name}: it is damaged")
        ]
    );
}

/// Proves CSI-DELETEVOLUME-03: the record's part.
#[tokio::test]
async fn a_volume_of_which_replicas_are_gone_already_is_deleted_with_all_that_is_left() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.pools[0].wipe();
    cluster.pools[1].wipe();
    let db = by_name("db");
    for _ in 0..2 {
        cluster.controller.volumes.catalog.delete(db.as_ref()).await.unwrap();
        cluster.settle().await.unwrap();
    }
    assert!(cluster.pools.iter().all(|pool| pool.holds.is_empty()));
    assert!(cluster.store.keys("volume/").is_empty(), "no record is left");
}

#[tokio::test]
async fn a_replica_whose_pool_cannot_make_it_is_made_elsewhere_and_never_where_it_was_to_be() {
    let mut cluster = Cluster::of(4).await;
    let volume = cluster.controller.volumes.catalog.create(&spec("db"), 0).await.unwrap();
    let lost = volume.replicas[1].clone();
    cluster.goes(&lost.pool).await;
    cluster.settle().await.unwrap();
    let forming = cluster.controller.work.forming.clone();
    let now = Instant::now();
    forming.look_at_all(now).await.unwrap();
    forming.look_at_all(now + Duration::from_secs(31)).await.unwrap();
    let elsewhere = cluster.volume("db");
    assert!(elsewhere.replicas.iter().all(|replica| replica.pool != lost.pool));
    assert_eq!(elsewhere.membership.retired, [lost.guid]);
    assert_eq!(elsewhere.membership.version, volume.membership.version + 1);
    cluster.settle().await.unwrap();
    let ready = cluster.volume("db");
    assert_eq!(cluster.shown("db").phase, "Ready");
    assert_eq!((ready.membership.rf, ready.membership.known.len()), (3, 3));
    cluster.pools.iter_mut().for_each(|pool| pool.online = true);
    cluster.settle().await.unwrap();
    let guid = lost.guid.0.to_string();
    assert!(
        cluster.pools.iter().all(|pool| !pool.born().contains(&guid)),
        "it was told to delete it"
    );
    assert!(cluster.volume("db").discarded.is_empty(), "it said that it has none");
}
