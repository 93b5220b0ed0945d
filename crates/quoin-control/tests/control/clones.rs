//! Volumes that are made from snapshots and volumes: where their replicas go, what is asked twice,
//! and what stays until they are gone.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{
    ApplyVolumeRequest, DeclaredReplica, SnapshotRef, VolumeRef, VolumeSource, VolumeSpec,
};
use quoin_cluster::records::{BaseUse, SnapshotPhase, VolumeRecord};
use quoin_control::Error;
use tokio::time::Instant;
use tonic::Code;

use crate::cluster::{Cluster, GIB, Memory, by_name, pools};
use crate::snapshots::{attached, by_id, named};

fn of_snapshot(reference: Option<SnapshotRef>) -> VolumeSource {
    VolumeSource { snapshot: reference, volume: None, as_source: true }
}

fn of_volume(reference: Option<VolumeRef>) -> VolumeSource {
    VolumeSource { snapshot: None, volume: reference, as_source: true }
}

fn asked(name: &str) -> VolumeSpec {
    VolumeSpec { name: name.into(), ..VolumeSpec::default() }
}

impl Cluster {
    /// As the API does it, without a wait for the pools.
    async fn copy(
        &self,
        spec: &VolumeSpec,
        limit_bytes: u64,
        source: &VolumeSource,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let (catalog, clones) = (&self.controller.volumes.catalog, &self.controller.volumes.clones);
        let required_bytes = spec.size_bytes;
        match catalog.find_made_from(&spec.name, source)? {
            Some(volume) => catalog.check_made(&volume, spec, required_bytes, limit_bytes),
            None => {
                let source = clones.prepare(&spec.name, source, Duration::ZERO).await?;
                catalog.create_from(spec, required_bytes, limit_bytes, &source).await
            }
        }
    }

    async fn keep(&self) {
        self.controller.snapshots.keeper.look_at_all().await.unwrap();
    }

    async fn delete(&self, volume: &VolumeRecord) {
        self.controller.volumes.catalog.delete(by_id(volume.id.0).as_ref()).await.unwrap();
    }

    fn pools_of(&self, name: &str) -> Vec<String> {
        let mut pools: Vec<_> =
            self.volume(name).replicas.iter().map(|replica| replica.pool.clone()).collect();
        pools.sort();
        pools
    }
}

#[tokio::test]
async fn a_volume_is_made_from_a_snapshot_in_the_pools_that_hold_it_with_the_options_of_its_source()
{
    let mut cluster = attached().await;
    let snapshot = cluster.made("db", "n1", "s").await;
    let made = cluster.copy(&asked("copy"), 0, &of_snapshot(named("s"))).await.unwrap();
    assert_eq!((made.size_bytes, made.spec.replicas), (GIB, 3));
    for pool in &cluster.pools {
        let told = cluster.controller.assignments.of_pool(&pool.name).replicas;
        let clone = told.iter().find(|r| r.volume_id == made.id.0.to_string()).expect("one each");
        let source = clone.source.as_ref().expect("a source");
        assert_eq!(clone.phase, "Clone", "a pool that does not know it makes nothing");
        assert_eq!(source.snapshot_id, snapshot.id.0.to_string());
        assert_eq!(source.volume_id, snapshot.volume.0.to_string());
    }
    cluster.settle().await.unwrap();
    let shown = cluster.shown("copy");
    assert_eq!(shown.phase, "Ready");
    let from = shown.made_from.expect("it says so");
    assert_eq!((from.snapshot_name.as_str(), from.volume_name.as_str()), ("s", "db"));
    assert!(!from.of_volume && cluster.shown("db").made_from.is_none());
    let again = cluster.controller.assignments.of_pool("p1").replicas;
    assert!(again.iter().all(|r| r.source.is_none()), "it is made, and needs none any more");
    let larger = VolumeSpec { size_bytes: 2 * GIB, ..asked("larger") };
    let larger = cluster.copy(&larger, 0, &of_snapshot(named("s"))).await.unwrap();
    assert_eq!(larger.size_bytes, 2 * GIB);
}

/// Proves CSI-CREATEVOLUME-32, CSI-CREATEVOLUME-34: as the control plane refuses them.
#[tokio::test]
async fn a_source_that_is_not_there_or_does_not_fit_is_refused_and_nothing_is_made() {
    let mut cluster = attached().await;
    cluster.made("db", "n1", "s").await;
    let refused = async |cluster: &Cluster, spec: VolumeSpec, limit, source: VolumeSource| {
        let error = cluster.copy(&spec, limit, &source).await.unwrap_err();
        (error.code(), error.to_string())
    };
    let s = || of_snapshot(named("s"));
    let (code, _) = refused(&cluster, asked("c"), 0, of_snapshot(named("t"))).await;
    assert_eq!(code, Code::NotFound);
    let (code, _) = refused(&cluster, asked("c"), 0, of_volume(by_name("x"))).await;
    assert_eq!(code, Code::NotFound);
    let both = VolumeSource { volume: by_name("db"), ..s() };
    for neither in [both, VolumeSource::default()] {
        let (code, message) = refused(&cluster, asked("c"), 0, neither).await;
        assert_eq!(code, Code::InvalidArgument, "{message}");
    }
    let (code, message) = refused(&cluster, asked("c"), GIB / 2, s()).await;
    assert_eq!(code, Code::OutOfRange);
    assert!(message.contains("never smaller"), "{message}");
    let blocks = VolumeSpec { block_size: 512, ..asked("c") };
    let (code, message) = refused(&cluster, blocks, 0, s()).await;
    assert_eq!(code, Code::InvalidArgument);
    assert!(message.contains("blockSize"), "{message}");
    cluster.snap("db", "wished").await.unwrap();
    let (code, message) = refused(&cluster, asked("c"), 0, of_snapshot(named("wished"))).await;
    assert_eq!(code, Code::Unavailable);
    assert!(message.contains("waits for"), "{message}");
    cluster.settle().await.unwrap();
    assert_eq!(cluster.controller.volumes.catalog.list(0, "").unwrap().0.len(), 1);
    assert!(cluster.snapshot("s").unwrap().used_by.is_empty());
}

/// Proves CSI-CREATEVOLUME-39: by the same name with another source, and without one.
#[tokio::test]
async fn a_repeat_finds_the_volume_whatever_became_of_its_source_and_another_source_is_refused() {
    let mut cluster = attached().await;
    let first = cluster.made("db", "n1", "s").await;
    cluster.made("db", "n1", "t").await;
    let source = of_snapshot(Some(SnapshotRef { id: first.id.0.to_string(), name: "".into() }));
    let made = cluster.copy(&asked("copy"), 0, &source).await.unwrap();
    cluster.settle().await.unwrap();
    for other in [of_snapshot(named("t")), of_volume(by_name("db"))] {
        let error = cluster.copy(&asked("copy"), 0, &other).await.unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists);
        assert!(error.to_string().contains("source"), "{error}");
    }
    let plain = VolumeSpec { size_bytes: GIB, ..asked("copy") };
    let error = cluster.controller.volumes.catalog.create(&plain, 0).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    let error = cluster.copy(&asked("db"), 0, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    cluster.controller.snapshots.catalog.delete(named("s").as_ref()).await.unwrap();
    let again = cluster.copy(&asked("copy"), 0, &source).await.unwrap();
    assert_eq!(again.id, made.id);
}

/// Proves CSI-DELETESNAPSHOT-11, CSI-DELETEVOLUME-12: while a volume is being made from it.
#[tokio::test]
async fn a_snapshot_is_deleted_while_its_clone_exists_and_not_while_the_clone_is_being_made() {
    let mut cluster = attached().await;
    let snapshot = cluster.made("db", "n1", "s").await;
    let copy = cluster.copy(&asked("copy"), 0, &of_snapshot(named("s"))).await.unwrap();
    let catalog = &cluster.controller.snapshots.catalog;
    let error = catalog.delete(named("s").as_ref()).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.to_string().contains("is being made"), "{error}");
    assert_eq!(cluster.snapshot("s").unwrap().phase, SnapshotPhase::Ready);
    cluster.settle().await.unwrap();
    cluster.controller.snapshots.catalog.delete(named("s").as_ref()).await.unwrap();
    assert!(cluster.snapshot("s").is_none(), "it is in no list");
    assert_eq!(cluster.obey("n1").await.unwrap(), 0, "its content stays");
    cluster.keep().await;
    // Its volume goes, and is kept for it.
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    let source = cluster.volume("db");
    cluster.delete(&source).await;
    cluster.keep().await;
    cluster.settle().await.unwrap();
    let kept = cluster.controller.volumes.catalog.get(by_id(source.id.0).as_ref()).unwrap();
    assert_eq!(cluster.controller.status.volume(&kept).phase, "Retained");
    cluster.delete(&copy).await;
    for _ in 0..3 {
        cluster.settle().await.unwrap();
        cluster.keep().await;
    }
    assert!(cluster.controller.volumes.catalog.get(by_id(source.id.0).as_ref()).is_err());
    assert_eq!(cluster.pools.iter().map(|pool| pool.holds.len()).sum::<usize>(), 0);
    assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new());
    assert!(cluster.controller.snapshots.catalog.get(named("s").as_ref()).is_err());
    assert_eq!(snapshot.used_by, []);
}

/// Proves CSI-SOURCE-05: as the control plane does it.
#[tokio::test]
async fn a_volume_is_copied_by_a_snapshot_that_nobody_sees_and_that_goes_with_the_copy() {
    let mut cluster = attached().await;
    let source = of_volume(by_name("db"));
    let error = cluster.copy(&asked("copy"), 0, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    let error = cluster.copy(&asked("copy"), 0, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "the same attempt: {error}");
    assert_eq!(cluster.obey("n1").await.unwrap(), 1);
    let list = |cluster: &Cluster| {
        cluster.controller.snapshots.catalog.list(None, 0, "", false, |_| true).unwrap().0.len()
    };
    assert_eq!((list(&cluster), cluster.shown("db").snapshots), (0, 0));
    let copy = cluster.copy(&asked("copy"), 0, &source).await.unwrap();
    cluster.settle().await.unwrap();
    let from = cluster.shown("copy").made_from.unwrap();
    assert!(from.of_volume && from.volume_id == cluster.volume("db").id.0.to_string());
    assert_eq!(cluster.copy(&asked("copy"), 0, &source).await.unwrap().id, copy.id);
    assert_eq!(list(&cluster), 0);
    assert_eq!(cluster.store.keys("snapshot/").len(), 1);
    let second = cluster.copy(&asked("second"), 0, &source).await.unwrap_err();
    assert_eq!(second.code(), Code::Unavailable, "of the content that it has by then");
    cluster.delete(&copy).await;
    for _ in 0..3 {
        cluster.settle().await.unwrap();
        cluster.keep().await;
        cluster.obey("n1").await.unwrap();
    }
    assert_eq!(cluster.store.keys("snapshot/").len(), 1, "the one for the second copy");
}

#[tokio::test]
async fn a_copy_that_was_answered_with_an_error_is_of_the_content_of_the_next_request() {
    let mut cluster = attached().await;
    let source = of_volume(by_name("db"));
    let cut = |cluster: &Cluster| cluster.store.keys("snapshot/");
    let error = cluster.copy(&asked("copy"), 0, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    cluster.obey("n1").await.unwrap();
    let first = cut(&cluster);
    // A request that was never answered leaves its snapshot for its repeat.
    let clones = &cluster.controller.volumes.clones;
    drop(clones.prepare("copy", &source, Duration::ZERO).await.unwrap());
    assert_eq!(cut(&cluster), first);
    let error = cluster.copy(&asked("copy"), GIB / 2, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    cluster.obey("n1").await.unwrap();
    let error = cluster.copy(&asked("copy"), 0, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "cut anew: {error}");
    assert!(first.iter().all(|former| !cut(&cluster).contains(former)));
    cluster.obey("n1").await.unwrap();
    // A second request for the same copy that is refused takes nothing from the one that made it.
    let prepared = clones.prepare("copy", &source, Duration::ZERO).await.unwrap();
    cluster.copy(&asked("copy"), 0, &source).await.unwrap();
    let catalog = &cluster.controller.volumes.catalog;
    let error = catalog.create_from(&asked("copy"), 2 * GIB, 0, &prepared).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
    assert_eq!(cluster.commands("n1"), [], "the snapshot of the copy stays");
    cluster.settle().await.unwrap();
    assert_eq!(cluster.shown("copy").phase, "Ready");
}

#[tokio::test]
async fn replicas_for_which_no_pool_with_the_source_is_left_are_rebuilt_from_the_others() {
    let mut cluster = Cluster::of(4).await;
    cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.made("db", "n1", "s").await;
    let away = cluster.pools_of("db")[0].clone();
    cluster.goes(&away).await;
    let copy = cluster.copy(&asked("copy"), 0, &of_snapshot(named("s"))).await.unwrap();
    let membership = &copy.membership;
    assert_eq!((membership.rf, membership.cf, membership.drf), (2, 2, 3));
    assert_eq!((copy.replicas.len(), membership.known.len()), (3, 2));
    assert!(!cluster.pools_of("copy").contains(&away));
    cluster.settle().await.unwrap();
    assert_eq!(cluster.shown("copy").phase, "Ready");
    let quorum: Vec<bool> = cluster
        .pools
        .iter()
        .flat_map(|pool| pool.holds.values())
        .filter(|(volume, _)| *volume == copy.id.0.to_string())
        .map(|(_, quorum)| *quorum)
        .collect();
    assert_eq!(quorum.iter().filter(|quorum| **quorum).count(), 2, "one is rebuilt first");
}

#[tokio::test]
async fn records_that_were_restored_from_before_a_use_of_a_snapshot_keep_it_again() {
    let mut cluster = attached().await;
    let snapshot = cluster.made("db", "n1", "s").await;
    let backup = cluster.store.entry(&format!("snapshot/{}", snapshot.id.0));
    let copy = cluster.copy(&asked("copy"), 0, &of_snapshot(named("s"))).await.unwrap();
    cluster.settle().await.unwrap();
    cluster.store.put_back(backup);
    cluster.restart().await;
    assert!(cluster.snapshot("s").unwrap().used_by.is_empty(), "the record is the older one");
    cluster.keep().await;
    assert_eq!(cluster.snapshot("s").unwrap().used_by, [copy.id]);
}

#[tokio::test]
async fn a_flattened_volume_gives_its_source_up_once_all_replicas_share_nothing_any_more() {
    let mut cluster = attached().await;
    cluster.made("db", "n1", "s").await;
    let copy = cluster.copy(&asked("copy"), 0, &of_snapshot(named("s"))).await.unwrap();
    let clones = &cluster.controller.volumes.clones;
    let error = clones.flatten(by_name("copy").as_ref()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    cluster.settle().await.unwrap();
    cluster.controller.snapshots.catalog.delete(named("s").as_ref()).await.unwrap();
    // Of a volume that shares nothing there is nothing to do.
    let clones = &cluster.controller.volumes.clones;
    assert!(clones.flatten(by_name("db").as_ref()).await.unwrap().source.is_none());
    let flattening = clones.flatten(by_name("copy").as_ref()).await.unwrap();
    assert_eq!(flattening.source.as_ref().unwrap().base, BaseUse::Flattening);
    for (at, pool) in ["p1", "p2", "p3"].iter().enumerate() {
        assert!(cluster.shown("copy").made_from.unwrap().flattening, "{at} pools are done");
        let told = cluster.controller.assignments.of_pool(pool).replicas;
        let flattens = |r: &&quoin_api::control::ReplicaAssignment| r.flatten;
        let flattened: Vec<_> = told.iter().filter(flattens).collect();
        assert!(flattened.len() == 1 && flattened[0].volume_id == copy.id.0.to_string());
        cluster.pools[at].clones.clear();
        cluster.settle().await.unwrap();
    }
    let from = cluster.shown("copy").made_from.unwrap();
    assert!(from.shares_nothing && !from.flattening, "{from:?}");
    let source = SnapshotRef { id: from.snapshot_id, name: String::new() };
    let again = cluster.copy(&asked("copy"), 0, &of_snapshot(Some(source))).await.unwrap();
    assert_eq!(again.id, copy.id, "a repeat of its request");
    let clones = &cluster.controller.volumes.clones;
    let again = clones.flatten(by_name("copy").as_ref()).await.unwrap();
    assert_eq!(again.source.as_ref().unwrap().base, BaseUse::Flattened);
    cluster.keep().await;
    cluster.obey("n1").await.unwrap();
    assert_eq!(cluster.store.keys("snapshot/"), Vec::<String>::new());
    assert!(cluster.reasons().contains(&"VolumeFlattened".to_owned()));
}

#[tokio::test]
async fn copies_of_copies_are_refused_before_a_look_up_takes_too_many_steps() {
    let mut cluster = attached().await;
    let mut last = "db".to_owned();
    for deep in 1.. {
        let name = format!("copy-{deep}");
        let _cut = cluster.copy(&asked(&name), 0, &of_volume(by_name(&last))).await;
        cluster.obey("n1").await.unwrap();
        match cluster.copy(&asked(&name), 0, &of_volume(by_name(&last))).await {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.code(), Code::FailedPrecondition);
                assert!(error.to_string().contains("quoin volume flatten"), "{error}");
                assert!((8..20).contains(&deep), "{deep}");
                return;
            }
        }
        cluster.settle().await.unwrap();
        cluster.attach(&name, "n1").await.unwrap();
        last = name;
    }
}

#[tokio::test]
async fn a_document_makes_a_copy_once_and_holds_it_to_its_source() {
    let mut cluster = attached().await;
    cluster.made("db", "n1", "s").await;
    cluster.made("db", "n1", "t").await;
    let wish = |source: &str, dry_run| ApplyVolumeRequest {
        spec: Some(asked("copy")),
        source: Some(of_snapshot(named(source))),
        dry_run,
        ..ApplyVolumeRequest::default()
    };
    let declarations = &cluster.controller.volumes.declarations;
    let (none, said) = declarations.apply(&wish("s", true)).await.unwrap();
    assert!(none.is_none() && said[0].contains("snapshot \"s\""), "{said:?}");
    let placed = ApplyVolumeRequest {
        replicas: vec![DeclaredReplica { pool: "p1".into(), ..DeclaredReplica::default() }],
        ..wish("s", false)
    };
    let error = declarations.apply(&placed).await.unwrap_err();
    assert!(error.to_string().contains("leave the list out"), "{error}");
    let (made, said) = declarations.apply(&wish("s", false)).await.unwrap();
    let made = made.unwrap();
    assert_eq!((made.size_bytes, made.spec.replicas), (GIB, 3));
    assert!(said[0].contains("made from snapshot \"s\""), "{said:?}");
    cluster.settle().await.unwrap();
    let declarations = &cluster.controller.volumes.declarations;
    let (again, said) = declarations.apply(&wish("s", false)).await.unwrap();
    assert_eq!((again.unwrap().id, said), (made.id, Vec::new()));
    let error = declarations.apply(&wish("t", false)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.to_string().contains("stays its source"), "{error}");
}

/// The life of two copies in steps, each of which its caller repeats until it is answered.
async fn step(cluster: &mut Cluster, number: usize) -> Result<(), Error> {
    match number {
        0 => cluster.settle().await?,
        1 => {
            let spec = crate::cluster::spec("db");
            cluster.controller.volumes.catalog.create(&spec, 0).await?;
            cluster.settle().await?;
        }
        2 => drop(cluster.attach("db", "n1").await?),
        3 => drop(cluster.snap("db", "s").await?),
        4 | 6 => drop(cluster.obey("n1").await?),
        // Its snapshot is wished, and cut in the next step.
        5 => match cluster.copy(&asked("second"), 0, &of_volume(by_name("db"))).await {
            Err(error) if !error.to_string().contains("is not cut yet") => return Err(error),
            _ => {}
        },
        7 => drop(cluster.copy(&asked("first"), 0, &of_snapshot(named("s"))).await?),
        // A crash behind the use of its snapshot has the volume cut anew.
        8 => loop {
            match cluster.copy(&asked("second"), 0, &of_volume(by_name("db"))).await {
                Err(error) if error.to_string().contains("is not cut yet") => {
                    cluster.obey("n1").await?;
                }
                made => break drop(made?),
            }
        },
        9 | 14 | 16 => cluster.settle().await?,
        10 => cluster.controller.snapshots.catalog.delete(named("s").as_ref()).await?,
        11 => {
            cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await?;
        }
        12 => cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await?,
        13 => {
            for name in ["first", "second"] {
                cluster.controller.volumes.catalog.delete(by_name(name).as_ref()).await?;
            }
        }
        15 | 17 => cluster.controller.snapshots.keeper.look_at_all().await?,
        _ => unreachable!(),
    }
    Ok(())
}

#[tokio::test]
async fn a_crash_at_any_write_of_a_copys_life_makes_it_once_and_leaves_nothing_behind() {
    for last_write_lands in [false, true] {
        for writes in 0.. {
            let store = Memory::crashing(writes, last_write_lands);
            let mut cluster = Cluster::with(store, pools(1..=3)).await;
            let mut crashed = cluster.store.crashed();
            if crashed {
                cluster.restart().await;
            }
            for number in 0..18 {
                while let Err(error) = step(&mut cluster, number).await {
                    assert!(cluster.store.crashed(), "step {number} after {writes}: {error}");
                    assert!(!crashed, "it crashes once");
                    crashed = true;
                    cluster.restart().await;
                    cluster.settle().await.unwrap();
                    if (3..9).contains(&number) {
                        // Its target reports to the new controller.
                        cluster.attach("db", "n1").await.unwrap();
                    }
                }
                if number == 9 {
                    for name in ["first", "second"] {
                        assert_eq!(cluster.shown(name).phase, "Ready", "{name} after {writes}");
                    }
                    let volumes = cluster.controller.volumes.catalog.list(0, "").unwrap().0.len();
                    assert_eq!(volumes, 3, "after {writes}");
                }
            }
            for _ in 0..3 {
                cluster.settle().await.unwrap();
                cluster.keep().await;
            }
            let left = [cluster.store.keys("volume"), cluster.store.keys("snapshot")].concat();
            assert_eq!(left, Vec::<String>::new(), "after {writes}");
            assert!(cluster.pools.iter().all(|pool| pool.holds.is_empty()), "after {writes}");
            if !crashed {
                assert!(writes > 30, "only {writes} writes were seen");
                break;
            }
        }
    }
}

#[tokio::test]
async fn what_a_pool_cannot_make_of_a_clone_any_more_is_rebuilt_elsewhere_and_the_clone_is_ready() {
    let mut cluster = attached().await;
    cluster.made("db", "n1", "s").await;
    cluster.pools.extend(pools(4..=4));
    cluster.settle().await.unwrap();
    let made = cluster.copy(&asked("copy"), 0, &of_snapshot(named("s"))).await.unwrap();
    assert_eq!(cluster.pools_of("copy"), ["p1", "p2", "p3"], "they hold the snapshot");
    cluster.goes("p3").await;
    cluster.settle().await.unwrap();
    let forming = cluster.controller.work.forming.clone();
    let now = Instant::now();
    forming.look_at_all(now).await.unwrap();
    forming.look_at_all(now + Duration::from_secs(29)).await.unwrap();
    assert_eq!(cluster.shown("copy").phase, "Pending", "it may come back by itself");
    assert_eq!(cluster.pools_of("copy"), ["p1", "p2", "p3"]);
    forming.look_at_all(now + Duration::from_secs(30)).await.unwrap();
    assert_eq!(cluster.pools_of("copy"), ["p1", "p2", "p4"]);
    cluster.settle().await.unwrap();
    let copy = cluster.volume("copy");
    assert_eq!(cluster.shown("copy").phase, "Ready");
    let (membership, lost) = (&copy.membership, made.replicas.iter().find(|r| r.pool == "p3"));
    assert_eq!((membership.rf, membership.cf, membership.drf), (2, 2, 3), "p4 is to be rebuilt");
    assert!(membership.known.iter().all(|member| Some(member.guid) != lost.map(|r| r.guid)));
    assert!(cluster.reasons().contains(&"ReplicaMadeElsewhere".to_owned()));
    // It comes back, and makes nothing of its former assignment.
    cluster.pools.iter_mut().for_each(|pool| pool.online = true);
    cluster.settle().await.unwrap();
    let guid = lost.unwrap().guid.0.to_string();
    assert!(cluster.pools.iter().all(|pool| !pool.born().contains(&guid)));
}
