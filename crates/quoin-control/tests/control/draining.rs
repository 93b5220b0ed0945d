//! Pools that take nothing new, and pools that are emptied before they are removed.

use quoin_api::control::{CordonStatus, VolumeSpec};
use quoin_control::{Cordoning, Error, Move, Scope};

use crate::cluster::{Cluster, Memory, SimPool, by_name, spec};

fn pool(name: &str) -> Scope {
    Scope::Pool(name.into())
}

async fn drain(cluster: &Cluster, scope: &Scope) -> Result<CordonStatus, Error> {
    cluster.controller.work.cordons.set(scope, Cordoning::Drain, false).await
}

/// Attaches a volume, and swaps in its newcomers as a target would, until there are none.
async fn carry_out(cluster: &mut Cluster, name: &str) {
    cluster.attach(name, "n1").await.unwrap();
    let mut incarnation = 100;
    for _ in 0..8 {
        cluster.settle().await.unwrap();
        let volume = cluster.volume(name);
        let Some(new) = volume.replicas.iter().find(|r| !volume.is_known(r)).cloned() else {
            break;
        };
        assert_eq!(
            volume.replicas.iter().filter(|r| !volume.is_known(r)).count(),
            1,
            "one change at a time"
        );
        incarnation += 1;
        let epoch = cluster.open_volume(volume.id.0, "n1", incarnation).await;
        let swap = cluster.swap(name, epoch, incarnation, |known| {
            known.iter_mut().filter(|m| m.id == new.id.0).for_each(|m| m.guid = new.guid.0);
        });
        cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
        cluster.settle().await.unwrap();
        cluster.controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
    }
    cluster.controller.volumes.attachments.unpublish(by_name(name).as_ref(), "n1").await.unwrap();
    cluster.settle().await.unwrap();
}

#[tokio::test]
async fn a_drained_pool_is_emptied_one_replica_of_each_volume_at_a_time_and_tells_when() {
    let mut cluster = Cluster::of(4).await;
    let single = VolumeSpec { replicas: 1, ..spec("single") };
    for asked in [spec("db"), single] {
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
        cluster.settle().await.unwrap();
    }
    let from = cluster.volume("db").replicas[0].pool.clone();
    let alone = cluster.volume("single").replicas[0].pool.clone();
    let status = drain(&cluster, &pool(&from)).await.unwrap();
    assert_eq!(status.state, "draining");
    assert!(status.replicas.iter().any(|r| r.volume_name == "db" && r.state == "moving"));
    // Requested again: the same.
    assert_eq!(drain(&cluster, &pool(&from)).await.unwrap(), status);
    cluster.restart().await;
    cluster.settle().await.unwrap();
    carry_out(&mut cluster, "db").await;
    cluster.controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
    carry_out(&mut cluster, "single").await;
    cluster.controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
    assert_eq!(cluster.controller.work.cordons.status(&pool(&from)).unwrap().state, "drained");
    assert!(cluster.reasons().contains(&"Drained".to_owned()));
    assert!(cluster.pools.iter().find(|p| p.name == from).unwrap().holds.is_empty());
    // A volume of a single replica moved as well, or was not there.
    let now = cluster.volume("single").replicas[0].pool.clone();
    assert!(now != from && (alone == from || now == alone));
    let shown = cluster.controller.status.pools();
    assert!(shown.iter().any(|p| p.name == from && p.cordon == "drained"));
    // New replicas go there again once it is opened.
    let text = cluster
        .controller
        .volumes
        .catalog
        .create(&VolumeSpec { replicas: 4, ..spec("wide") }, 0)
        .await;
    assert!(text.unwrap_err().to_string().contains(&format!("{from} (drained)")));
    cluster.controller.work.cordons.set(&pool(&from), Cordoning::Uncordon, false).await.unwrap();
    cluster
        .controller
        .volumes
        .catalog
        .create(&VolumeSpec { replicas: 4, ..spec("wide") }, 0)
        .await
        .unwrap();
}

/// Former replicas stay on the disk of a host that is lost, where no process can clear them away.
#[tokio::test]
async fn a_drain_of_a_pool_that_is_gone_ends_once_no_volume_has_a_replica_there() {
    let mut cluster = Cluster::of(4).await;
    cluster.create("db").await;
    cluster.settle().await.unwrap();
    let from = cluster.volume("db").replicas[0].pool.clone();
    cluster.goes(&from).await;
    drain(&cluster, &pool(&from)).await.unwrap();
    carry_out(&mut cluster, "db").await;
    cluster.controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
    assert!(cluster.volume("db").replicas.iter().all(|replica| replica.pool != from));
    assert_eq!(cluster.controller.work.cordons.status(&pool(&from)).unwrap().state, "drained");
    assert!(cluster.reasons().contains(&"Drained".to_owned()));
    let listed = cluster.controller.status.pools();
    let listed = listed.iter().find(|pool| pool.name == from).unwrap();
    assert_eq!(listed.cordon, "drained", "the list says so too");
}

#[tokio::test]
async fn a_drain_with_nowhere_to_go_is_refused_for_each_volume_with_the_reason() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let planned =
        cluster.controller.work.cordons.set(&pool("p1"), Cordoning::Drain, true).await.unwrap();
    assert!(planned.replicas[0].state == "stuck" && planned.state.is_empty(), "{planned:?}");
    let refusal = drain(&cluster, &pool("p1")).await.unwrap_err();
    let text = refusal.to_string();
    assert!(matches!(refusal, Error::Precondition(_)));
    assert!(text.contains("\"db\" would be left with 2 of 3 good copies"), "{text}");
    assert!(text.contains("0 found"), "{text}");
    let status = cluster.controller.work.cordons.status(&pool("p1")).unwrap();
    assert!(status.state.is_empty() && status.replicas.len() == 1, "nothing was begun");
    assert!(cluster.volume("db").replicas.len() == 3);
    assert!(matches!(drain(&cluster, &pool("p9")).await, Err(Error::NotFound { .. })));
}

#[tokio::test]
async fn a_refused_drain_has_a_line_for_each_volume_once_and_counts_those_that_are_too_many() {
    // Two pools of each host: a volume may have two replicas on one.
    let two = |n: usize| SimPool::new(&format!("p{n}"), &format!("h{}", n.div_ceil(2)));
    let mut cluster = Cluster::with(Memory::new(), (1..=4).map(two).collect()).await;
    for n in 0..23 {
        let by_pool = quoin_api::control::Spread::Pool.into();
        let asked = VolumeSpec { replicas: 4, spread: by_pool, ..spec(&format!("v{n:02}")) };
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
    }
    cluster.settle().await.unwrap();
    let text = drain(&cluster, &Scope::Node("h1".into())).await.unwrap_err().to_string();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "node \"h1\" cannot be drained, nothing was begun:");
    assert!(text.len() < 5000, "{} bytes", text.len());
    let named = lines.iter().filter(|line| line.starts_with("  volume \"v")).count();
    assert_eq!(named, lines.len() - 2, "{text}");
    for line in &lines[1..=named] {
        let name = &line[10..13];
        assert_eq!(
            text.matches(&format!("\"{name}\"")).count(),
            1,
            "{name} more than once: {text}"
        );
    }
    assert!(lines[lines.len() - 1].starts_with(&format!("  and {} more", 23 - named)), "{text}");
    assert!((5..=20).contains(&named), "{named}");
}

/// State that a target had no time to report yet is no problem.
#[tokio::test]
async fn a_drain_that_goes_well_warns_of_nothing() {
    let mut cluster = Cluster::of(4).await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let epoch = cluster.open_volume(volume.id.0, "n1", 7).await;
    let guids: Vec<_> = volume.replicas.iter().map(|r| r.guid.0.to_string()).collect();
    let states: Vec<_> = guids.iter().map(|guid| (guid.as_str(), "in-sync")).collect();
    cluster.serving("db", &states).await;
    drain(&cluster, &pool(&volume.replicas[0].pool)).await.unwrap();
    cluster.settle().await.unwrap();
    let now = cluster.volume("db");
    let new = now.replicas.iter().find(|r| !now.is_known(r)).unwrap().clone();
    let swap = cluster.swap("db", epoch, 7, |known| {
        known.iter_mut().filter(|m| m.id == new.id.0).for_each(|m| m.guid = new.guid.0);
    });
    cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
    cluster.settle().await.unwrap();
    let warnings = |cluster: &Cluster| {
        let events = cluster.controller.state.events().after(0).into_iter();
        events.filter(|e| e.severity != "Normal").map(|e| e.message).collect::<Vec<_>>()
    };
    assert_eq!(warnings(&cluster), Vec::<String>::new());
    // A target that knows the newcomer and does not reach it causes a warning.
    let new = new.guid.0.to_string();
    let states = [(guids[1].as_str(), "in-sync"), (&guids[2], "in-sync"), (&new, "disconnected")];
    cluster.serving("db", &states).await;
    assert!(warnings(&cluster).iter().any(|m| m.contains("does not reach it")));
}

#[tokio::test]
async fn a_drain_that_would_take_the_last_good_copy_is_refused() {
    let mut cluster = Cluster::of(4).await;
    let single = VolumeSpec { replicas: 1, ..spec("single") };
    cluster.controller.volumes.catalog.create(&single, 0).await.unwrap();
    cluster.settle().await.unwrap();
    let alone = cluster.volume("single").replicas[0].pool.clone();
    cluster.goes(&alone).await;
    let text = drain(&cluster, &pool(&alone)).await.unwrap_err().to_string();
    assert!(text.contains("no good copy") && text.contains("last good copy"), "{text}");
}

#[tokio::test]
async fn the_room_that_one_replica_takes_is_not_there_for_the_next_one() {
    let mut cluster = Cluster::new().await;
    let cordon = async |cluster: &Cluster, name: &str, action| {
        cluster.controller.work.cordons.set(&pool(name), action, false).await.unwrap();
    };
    // Both volumes are in p1, and only p3 may take them: 80 GiB of it, 40 for each.
    for name in ["p2", "p3"] {
        cordon(&cluster, name, Cordoning::Cordon).await;
    }
    for n in 0..2 {
        let asked = VolumeSpec { size_bytes: 50 << 30, replicas: 1, ..spec(&format!("v{n}")) };
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
        cluster.settle().await.unwrap();
    }
    cordon(&cluster, "p3", Cordoning::Uncordon).await;
    let mut report = cluster.pools[0].report();
    report.replicas.iter_mut().for_each(|replica| replica.used_bytes = 40 << 30);
    report.used_bytes = 80 << 30;
    cluster.controller.reports.pool(&report).await.unwrap();
    let plan =
        cluster.controller.work.cordons.set(&pool("p1"), Cordoning::Drain, true).await.unwrap();
    let mut states: Vec<_> = plan.replicas.iter().map(|r| (r.state.as_str(), &*r.to)).collect();
    states.sort_unstable();
    assert_eq!(states, [("stuck", ""), ("waits", "p3")], "{plan:?}");
    let refusal = drain(&cluster, &pool("p1")).await.unwrap_err().to_string();
    assert!(refusal.contains("room for 40 GiB of 50 GiB"), "{refusal}");
}

#[tokio::test]
async fn a_cordoned_pool_keeps_what_it_has_and_takes_nothing_new() {
    let mut cluster = Cluster::of(4).await;
    cluster.controller.work.cordons.set(&pool("p2"), Cordoning::Cordon, false).await.unwrap();
    let volume = cluster.create("db").await;
    assert!(volume.replicas.iter().all(|r| r.pool != "p2"));
    cluster.controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
    assert_eq!(*cluster.volume("db"), *volume);
    cluster.restart().await;
    cluster.settle().await.unwrap();
    let shown = cluster.controller.status.pools();
    assert!(shown.iter().any(|p| p.name == "p2" && p.cordon == "cordoned"), "it outlives us");
    let id = volume.replicas[0].id.0;
    let text = cluster
        .controller
        .volumes
        .replicas
        .move_replica(by_name("db").as_ref(), &Move::of(id).to("p2"))
        .await;
    assert!(text.unwrap_err().to_string().contains("cordoned"));
}

#[tokio::test]
async fn a_node_is_drained_with_all_its_pools_and_names_the_volumes_that_use_it() {
    let mut cluster = Cluster::of(4).await;
    cluster.pools.push(SimPool::new("p5", "h1"));
    cluster.settle().await.unwrap();
    cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let on_h1 =
        cluster.volume("db").replicas.iter().any(|r| ["p1", "p5"].contains(&r.pool.as_str()));
    let status = drain(&cluster, &Scope::Node("h1".into())).await.unwrap();
    assert_eq!(status.pools, ["p1", "p5"]);
    assert_eq!(status.replicas.len(), usize::from(on_h1));
    let status = drain(&cluster, &Scope::Node("n1".into())).await.unwrap();
    assert_eq!((status.state.as_str(), &status.attached[..]), ("drained", &["db".to_owned()][..]));
    let nodes = cluster.controller.status.nodes();
    assert!(nodes.iter().any(|n| n.name == "n1" && n.cordon == "drained"));
    let pools = cluster.controller.status.pools();
    assert!(pools.iter().filter(|p| !p.cordon.is_empty()).count() == 2);
}
