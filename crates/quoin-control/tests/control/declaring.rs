//! Volumes made by a declaring document.

use quoin_api::control::{ApplyVolumeRequest, DeclaredReplica, Durability, VolumeSpec};
use quoin_cluster::records::VolumeRecord;
use quoin_control::Error;
use quoin_types::Member;

use crate::cluster::{Cluster, GIB, spec};

fn wish(replicas: u32, pools: &[&str]) -> ApplyVolumeRequest {
    let place =
        |pool: &&str| DeclaredReplica { pool: (*pool).to_owned(), ..DeclaredReplica::default() };
    ApplyVolumeRequest {
        spec: Some(VolumeSpec { replicas, size_bytes: GIB, ..spec("db") }),
        replicas: pools.iter().map(place).collect(),
        ..ApplyVolumeRequest::default()
    }
}

async fn apply(cluster: &mut Cluster, asked: &ApplyVolumeRequest) -> Vec<String> {
    let (_, said) = cluster.controller.volumes.declarations.apply(asked).await.unwrap();
    cluster.settle().await.unwrap();
    said
}

async fn refused(cluster: &Cluster, asked: &ApplyVolumeRequest) -> String {
    let before = cluster.volume("db");
    let refusal = cluster.controller.volumes.declarations.apply(asked).await.unwrap_err();
    assert_eq!(*cluster.volume("db"), *before, "a refusal changes nothing");
    refusal.to_string()
}

/// Returns the present or future pools of the replicas.
fn pools(volume: &VolumeRecord) -> Vec<String> {
    let goes = |id| volume.replicas.iter().any(|r| r.id == id && !volume.is_known(r));
    let stays =
        volume.replicas.iter().filter(|r| !r.leaving && (!volume.is_known(r) || !goes(r.id)));
    let mut pools: Vec<_> = stays.map(|r| r.pool.clone()).collect();
    pools.sort();
    pools
}

/// Carries out the declared changes, as a target would: newcomers in, leaving ones out.
async fn carry_out(cluster: &mut Cluster) {
    let volume = cluster.volume("db");
    if volume.opened.owner.is_none() {
        cluster.attach("db", "n1").await.unwrap();
    }
    let epoch = cluster.open_volume(volume.id.0, "n1", 9).await;
    let new: Vec<Member> = volume
        .replicas
        .iter()
        .filter(|r| !volume.is_known(r))
        .map(|r| Member { id: r.id.0, guid: r.guid.0 })
        .collect();
    let leaving: Vec<_> = volume.replicas.iter().filter(|r| r.leaving).map(|r| r.id.0).collect();
    let swap = cluster.swap("db", epoch, 9, |known| {
        known.retain(|m| !leaving.contains(&m.id) && new.iter().all(|n| n.id != m.id));
        known.extend(&new);
    });
    cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
    cluster.settle().await.unwrap();
    cluster
        .controller
        .volumes
        .attachments
        .unpublish(crate::cluster::by_name("db").as_ref(), "")
        .await
        .unwrap();
}

/// Proves SCALE-CONF-06, SCALE-ID-06, SCALE-STORY-01.
#[tokio::test]
async fn a_volume_is_made_where_it_is_declared_and_the_same_document_again_changes_nothing() {
    let mut cluster = Cluster::of(5).await;
    let asked = wish(3, &["p2", "p5"]);
    let dry = ApplyVolumeRequest { dry_run: true, ..asked.clone() };
    assert_eq!(apply(&mut cluster, &dry).await, ["volume made: 1 GiB, 3 replicas"]);
    assert!(cluster.store.keys("volume/").is_empty());
    apply(&mut cluster, &asked).await;
    let volume = cluster.volume("db");
    let made = pools(&volume);
    assert!(made.len() == 3 && made.contains(&"p2".into()) && made.contains(&"p5".into()));
    for again in [&asked, &dry, &wish(0, &[]), &wish(3, &[])] {
        assert!(apply(&mut cluster, again).await.is_empty());
    }
    assert_eq!(*cluster.volume("db"), *volume);
    let nowhere = ApplyVolumeRequest {
        spec: Some(spec("other")),
        replicas: wish(0, &["p9"]).replicas,
        ..ApplyVolumeRequest::default()
    };
    assert!(matches!(
        cluster.controller.volumes.declarations.apply(&nowhere).await,
        Err(Error::NotFound { .. })
    ));
}

/// Proves SCALE-STORY-01, SCALE-STORY-04, SCALE-VALID-01, SCALE-VALID-03, SCALE-TEST-10,
/// SCALE-TEST-11.
#[tokio::test]
async fn replicas_are_added_moved_and_taken_away_as_the_list_says_and_fewer_only_by_name() {
    let mut cluster = Cluster::of(5).await;
    apply(&mut cluster, &wish(3, &["p1", "p2", "p3"])).await;
    // More: one in its named pool, one in a pool of the cluster's choice.
    let said = apply(&mut cluster, &wish(4, &["p1", "p2", "p3", "p5"])).await;
    assert!(said.len() == 1 && said[0].contains("p5"), "{said:?}");
    carry_out(&mut cluster).await;
    assert_eq!(pools(&cluster.volume("db")), ["p1", "p2", "p3", "p5"]);
    // Fewer, without naming them; and more than allowed.
    let text = refused(&cluster, &wish(3, &[])).await;
    assert!(text.contains("name in spec.replicas those that stay"), "{text}");
    assert!(refused(&cluster, &wish(3, &["p1", "p2"])).await.contains("all of them"));
    assert!(refused(&cluster, &wish(6, &[])).await.contains("at most 5"));
    assert!(refused(&cluster, &wish(2, &["p1", "p2", "p3"])).await.contains("3 are named"));
    assert!(refused(&cluster, &wish(0, &["p1", "p1"])).await.contains("twice"));
    // The staying replicas are named: the other leaves.
    let said = apply(&mut cluster, &wish(3, &["p1", "p2", "p5"])).await;
    assert!(said.len() == 1 && said[0].contains("3 stay"), "{said:?}");
    carry_out(&mut cluster).await;
    let volume = cluster.volume("db");
    assert_eq!((volume.membership.rf, volume.membership.drf), (3, 3));
    assert_eq!(pools(&volume), ["p1", "p2", "p5"]);
    // One unnamed replica and one named pool: it moves there, under its id.
    let moved = volume.replicas.iter().find(|r| r.pool == "p5").unwrap().id;
    apply(&mut cluster, &wish(3, &["p1", "p2", "p4"])).await;
    assert_eq!(cluster.shown("db").changing, "1 replica moving");
    carry_out(&mut cluster).await;
    let volume = cluster.volume("db");
    assert!(volume.replicas.iter().any(|r| r.pool == "p4" && r.id == moved));
    // The same by its id.
    let place = DeclaredReplica { replica_id: moved.0.to_string(), pool: "p3".into() };
    let by_id = ApplyVolumeRequest { replicas: vec![place], ..wish(0, &[]) };
    apply(&mut cluster, &by_id).await;
    carry_out(&mut cluster).await;
    assert_eq!(pools(&cluster.volume("db")), ["p1", "p2", "p3"]);
    let stranger = DeclaredReplica { replica_id: "0".repeat(32), pool: "p3".into() };
    let stranger = ApplyVolumeRequest { replicas: vec![stranger], ..wish(0, &[]) };
    assert!(refused(&cluster, &stranger).await.contains("replica"));
}

#[tokio::test]
async fn other_fields_change_where_they_can_and_are_refused_by_name_where_they_cannot() {
    let mut cluster = Cluster::of(5).await;
    apply(&mut cluster, &wish(3, &[])).await;
    let with = |change: fn(&mut VolumeSpec)| {
        let mut asked = wish(0, &[]);
        change(asked.spec.as_mut().unwrap());
        asked
    };
    let said = apply(&mut cluster, &with(|s| s.size_bytes = 2 * GIB)).await;
    assert_eq!(said, ["1 GiB to 2 GiB"]);
    assert_eq!(cluster.volume("db").size_bytes, 2 * GIB);
    let grown = with(|s| {
        s.size_bytes = 0;
        s.replace_after = "off".into();
    });
    assert_eq!(apply(&mut cluster, &grown).await, ["replaceAfter the cluster's to off"]);
    assert_eq!(cluster.shown("db").replace_after, "off");
    let factor = ApplyVolumeRequest { consistency_factor: Some(3), ..grown.clone() };
    assert_eq!(apply(&mut cluster, &factor).await.len(), 1);
    assert!(apply(&mut cluster, &factor).await.is_empty());
    assert!(refused(&cluster, &with(|_| {})).await.contains("never shrink"));
    let media = with(|s| {
        s.size_bytes = 0;
        s.set_durability(Durability::Media);
    });
    assert_eq!(apply(&mut cluster, &media).await, ["durability cache to media"]);
    let blocks = with(|s| {
        s.size_bytes = 0;
        s.block_size = 512;
    });
    let text = refused(&cluster, &blocks).await;
    assert!(text.starts_with("blockSize:") && text.contains("cannot be changed"), "{text}");
    let low = ApplyVolumeRequest { consistency_factor: Some(1), ..grown.clone() };
    assert!(refused(&cluster, &low).await.contains("allowLossOnSingleFailure"));
    // A version from before another change.
    let version = cluster.shown("db").resource_version;
    let current = ApplyVolumeRequest { resource_version: version, ..grown.clone() };
    assert!(apply(&mut cluster, &current).await.is_empty());
    let old = ApplyVolumeRequest { resource_version: version - 1, ..grown };
    assert!(refused(&cluster, &old).await.contains("read it again"));
}
