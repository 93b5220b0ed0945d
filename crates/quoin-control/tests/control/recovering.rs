//! Continuation with the replicas that are left, which a user decides.

use quoin_api::control::VolumeSpec;
use quoin_control::{Error, Recovery};
use quoin_types::ReplicaId;

use crate::cluster::{Cluster, by_name, spec};

async fn refused(cluster: &Cluster, recovery: &Recovery) -> String {
    let before = cluster.volume("db");
    let refusal =
        cluster.controller.disaster.volumes.recover(by_name("db").as_ref(), recovery).await;
    assert_eq!(*cluster.volume("db"), *before, "a refusal changes nothing");
    refusal.unwrap_err().to_string()
}

/// Proves SCALE-VALID-03, SCALE-GOAL-02, SCALE-STORY-08.
#[tokio::test]
async fn what_is_left_becomes_the_volume_once_the_rest_is_surely_gone_and_the_loss_is_accepted() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    let ids: Vec<ReplicaId> = volume.replicas.iter().map(|r| r.id.0).collect();
    let pools: Vec<String> = volume.replicas.iter().map(|r| r.pool.clone()).collect();
    let keep = |n: usize| Recovery { keep: ids[..n].to_vec(), ..Recovery::default() };
    // All are there, then a majority.
    assert!(refused(&cluster, &keep(1)).await.contains("keep it too"));
    assert!(refused(&cluster, &keep(3)).await.contains("nothing must be given up"));
    assert!(refused(&cluster, &Recovery::default()).await.contains("name the replicas"));
    cluster.goes(&pools[2]).await;
    let two = Recovery { destroyed: ids[2..].to_vec(), ..keep(2) };
    assert!(refused(&cluster, &two).await.contains("nothing must be given up"));
    // The second pool is there, and has lost its replica; the third may only be cut off.
    let second = cluster.pools.iter_mut().find(|p| p.name == pools[1]).unwrap();
    second.wipe();
    cluster.settle().await.unwrap();
    let text = refused(&cluster, &keep(1)).await;
    assert!(text.contains("may live on") && text.contains(&pools[2]), "{text}");
    let sure = Recovery { destroyed: vec![ids[2]], ..keep(1) };
    let text = refused(&cluster, &sure).await;
    assert!(
        text.contains("1 of 3 replicas are left") && text.contains("--accept-loss-of \"db\""),
        "{text}"
    );
    let other = Recovery { accept_loss_of: "other".into(), ..sure.clone() };
    assert!(refused(&cluster, &other).await.contains("--accept-loss-of"));
    let stranger = Recovery { keep: vec![ReplicaId(7)], ..sure.clone() };
    assert!(refused(&cluster, &stranger).await.contains("does not exist"));

    cluster.attach("db", "n1").await.unwrap();
    let old = cluster.open_volume(volume.id.0, "n1", 5).await;
    let accepted = Recovery { accept_loss_of: "db".into(), ..sure };
    let recovered = cluster
        .controller
        .disaster
        .volumes
        .recover(by_name("db").as_ref(), &accepted)
        .await
        .unwrap();
    let membership = &recovered.membership;
    assert_eq!((membership.rf, membership.cf, membership.drf), (1, 1, 3));
    assert_eq!(membership.known.len(), 1);
    assert_eq!(membership.retired, [volume.replicas[1].guid, volume.replicas[2].guid]);
    assert!(
        recovered.epoch() > old
            && recovered.opened.owner.is_none()
            && recovered.may_have_lost_ms > 0
    );
    // The target that had it open may change nothing any more.
    let late = cluster.swap("db", old, 5, |_| {});
    let late = quoin_control::MembershipSwap { node: "n1".into(), ..late };
    assert!(cluster.controller.volumes.epochs.swap_membership(&late).await.unwrap().1.is_err());
    // It is given back to the node that it is attached to, for a new epoch.
    let now = tokio::time::Instant::now();
    cluster.controller.work.tender.look_at_all(now).await.unwrap();
    assert!(cluster.volume("db").opened.owner.is_none(), "its target has not seen it yet");
    let later = now + std::time::Duration::from_secs(4);
    cluster.controller.work.tender.look_at_all(later).await.unwrap();
    assert_eq!(cluster.volume("db").opened.owner.as_deref(), Some("n1"));
    let target = cluster.controller.assignments.of_node("n1").targets.remove(0);
    assert!(!target.maintenance && target.desired_replication_factor == 3);
    assert_eq!(target.replicas.iter().filter(|r| !r.candidate).count(), 1);
    assert!(cluster.shown("db").contract.contains("recovered by hand"));
    assert!(cluster.reasons().contains(&"VolumeRecovered".to_owned()));
    // The replica that it was made from is not given up a second time.
    let again =
        cluster.controller.disaster.volumes.recover(by_name("db").as_ref(), &accepted).await;
    assert!(matches!(again, Err(Error::NotFound { .. } | Error::Precondition(_))));
}

/// Proves SCALE-STORY-08: of five with CF 2 three are left, of which any may be the only one that
/// holds an acknowledged write: two of them are not enough to open.
#[tokio::test]
async fn the_first_open_after_a_recovery_hears_all_that_are_left_and_cf_falls_after_it() {
    let mut cluster = Cluster::of(5).await;
    let wanted = VolumeSpec {
        replicas: 5,
        consistency_factor: 2,
        allow_loss_on_single_failure: true,
        ..spec("db")
    };
    cluster.controller.volumes.catalog.create(&wanted, 0).await.unwrap();
    cluster.settle().await.unwrap();
    let volume = cluster.volume("db");
    let ids: Vec<ReplicaId> = volume.replicas.iter().map(|r| r.id.0).collect();
    for replica in &volume.replicas[3..] {
        cluster.goes(&replica.pool).await;
    }
    let recovery = Recovery {
        keep: ids[..3].to_vec(),
        destroyed: ids[3..].to_vec(),
        accept_loss_of: "db".into(),
    };
    let db = by_name("db");
    let recovered =
        cluster.controller.disaster.volumes.recover(db.as_ref(), &recovery).await.unwrap();
    let membership = quoin_types::Membership::from(&recovered.membership);
    assert_eq!((membership.rf, membership.cf, membership.drf), (3, 3, 5));
    assert_eq!(membership.open_quorum(), 3);
    // No pool has space for others: the target sets CF to the requested value at once.
    assert_eq!(recovered.replicas.len(), 3);
    assert_eq!(recovered.desired_cf(), 2);
    assert!(recovered.changing().contains("consistency factor 3 to 2"), "{}", recovered.changing());
}
