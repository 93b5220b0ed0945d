//! Newcomers that are removed from a record again: a joint View may name them already, and no
//! target may wait for a replica that is being deleted.

use std::time::Duration;

use quoin_cluster::records::VolumeRecord;
use quoin_control::{Move, Recovery, Scale};
use quoin_types::{Epoch, ReplicaId};
use tokio::time::Instant;

use crate::cluster::{Cluster, by_name};

/// Makes a volume with a fourth replica on its way.
async fn growing() -> (Cluster, VolumeRecord, Epoch) {
    let mut cluster = Cluster::of(6).await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let epoch = cluster.open_volume(volume.id.0, "n1", 9).await;
    let four = Scale { replicas: 4, ..Scale::default() };
    cluster.controller.volumes.replicas.scale(by_name("db").as_ref(), &four).await.unwrap();
    cluster.settle().await.unwrap();
    let volume = VolumeRecord::clone(&cluster.volume("db"));
    (cluster, volume, epoch)
}

fn newcomer(volume: &VolumeRecord) -> ReplicaId {
    volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap().id.0
}

async fn take_back(cluster: &Cluster, id: ReplicaId) {
    cluster.controller.volumes.replicas.remove(by_name("db").as_ref(), &[id]).await.unwrap();
}

#[tokio::test]
async fn taking_a_newcomer_back_takes_the_membership_to_its_next_version_whoever_does_it() {
    let (cluster, volume, epoch) = growing().await;
    cluster.serving("db", &[]).await;
    let version = volume.membership.version;
    // The target requests it, and a user takes it back before that arrives.
    let member = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap().clone();
    let late = cluster.swap("db", epoch, 9, |known| {
        known.push(quoin_types::Member { id: member.id.0, guid: member.guid.0 });
    });
    take_back(&cluster, member.id.0).await;
    let after = cluster.volume("db");
    assert_eq!(after.membership.version, version + 1);
    assert_eq!(after.membership.known, volume.membership.known);
    let target = cluster.controller.assignments.of_node("n1").targets.remove(0);
    assert_eq!(target.membership_version, version + 1, "its target is told");
    let (now, refused) = cluster.controller.volumes.epochs.swap_membership(&late).await.unwrap();
    assert!(refused.is_err() && now.version == version + 1);
    // The target's next request is for the present list.
    let same = cluster.swap("db", epoch, 9, |_| {});
    let same = quoin_control::MembershipSwap { version, ..same };
    let (now, done) = cluster.controller.volumes.epochs.swap_membership(&same).await.unwrap();
    assert!(done.is_ok() && now.version == version + 1, "{done:?}");

    // The newcomer's pool loses it: another one comes, and the first never rules.
    let (mut cluster, volume, _) = growing().await;
    cluster.serving("db", &[]).await;
    let pool = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap().pool.clone();
    cluster.pools.iter_mut().find(|p| p.name == pool).unwrap().wipe();
    cluster.settle().await.unwrap();
    let after = cluster.volume("db");
    assert_eq!(after.membership.version, volume.membership.version + 1);
    assert_eq!(after.replicas.len(), 4);

    // A newcomer that becomes known is not taken back.
    let (mut cluster, volume, epoch) = growing().await;
    cluster.serving("db", &[]).await;
    let member = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap().clone();
    let swap = cluster.swap("db", epoch, 9, |known| {
        known.push(quoin_types::Member { id: member.id.0, guid: member.guid.0 });
    });
    cluster.controller.volumes.epochs.swap_membership(&swap).await.unwrap().1.unwrap();
    cluster.settle().await.unwrap();
    assert_eq!(cluster.volume("db").membership.version, volume.membership.version + 1, "once");
}

/// An old copy may call a replica a newcomer that counted for long: the version must continue to
/// show what that copy does not know.
#[tokio::test]
async fn a_record_that_nothing_has_confirmed_yet_keeps_its_version() {
    let (mut cluster, volume, _) = growing().await;
    cluster.serving("db", &[]).await;
    cluster.restart().await;
    take_back(&cluster, newcomer(&volume)).await;
    assert_eq!(cluster.volume("db").membership.version, volume.membership.version);

    // Served under another membership than the record's.
    let (cluster, volume, _) = growing().await;
    cluster.reports("db", "serving", |report| report.membership_version += 1).await;
    cluster.reports("db", "serving", |report| report.membership_version = 0).await;
    cluster.reports("db", "opening", |_| {}).await;
    take_back(&cluster, newcomer(&volume)).await;
    assert_eq!(cluster.volume("db").membership.version, volume.membership.version);
}

/// Makes a volume whose target waits to open for a newcomer that a joint View names, and whose pool
/// is away.
async fn waiting_for_newcomer() -> (Cluster, VolumeRecord) {
    let (mut cluster, volume, _) = growing().await;
    cluster.serving("db", &[]).await;
    let newcomer = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap();
    cluster.goes(&newcomer.pool).await;
    waits(&cluster, &volume).await;
    (cluster, volume)
}

async fn waits(cluster: &Cluster, volume: &VolumeRecord) {
    let newcomer = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap();
    cluster
        .reports("db", "waiting", |report| {
            report.silent = vec![newcomer.guid.0.to_string()];
            report.waiting_for = "replicas that may know of a change of membership".into();
        })
        .await;
}

#[tokio::test]
async fn a_volume_that_waits_for_an_unknown_change_goes_on_by_the_word_of_a_person() {
    let (cluster, volume, _) = growing().await;
    let keep: Vec<ReplicaId> = volume.membership.known.iter().map(|m| m.id.0).collect();
    let recovery = Recovery { keep, accept_loss_of: "db".into(), ..Recovery::default() };
    let db = by_name("db");
    let recover = async |cluster: &Cluster, recovery: &Recovery| {
        cluster.controller.disaster.volumes.recover(db.as_ref(), recovery).await
    };
    let refused = recover(&cluster, &recovery).await.unwrap_err().to_string();
    assert!(refused.contains("nothing must be given up"), "{refused}");
    waits(&cluster, &volume).await;
    let refused = recover(&cluster, &recovery).await.unwrap_err().to_string();
    assert!(refused.contains("is there and may know"), "{refused}");

    let (cluster, volume) = waiting_for_newcomer().await;
    let newcomer = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap();
    let keep: Vec<ReplicaId> = volume.membership.known.iter().map(|m| m.id.0).collect();
    let recovery = Recovery { keep, ..recovery };
    let waits = cluster.shown("db").waiting_for;
    assert!(waits.contains("quoin volume recover"), "{waits}");
    let unaccepted = Recovery { accept_loss_of: String::new(), ..recovery.clone() };
    let refused = recover(&cluster, &unaccepted).await.unwrap_err().to_string();
    assert!(refused.contains("--accept-loss-of"), "{refused}");
    let recovered = recover(&cluster, &recovery).await.unwrap();
    assert_eq!(recovered.membership.known, volume.membership.known);
    // The version is past the one under which it may have ruled, and it never comes back.
    assert_eq!(recovered.membership.version, volume.membership.version + 2);
    assert_eq!(recovered.membership.retired, [newcomer.guid]);
    assert!(recovered.replicas.iter().all(|r| r.guid != newcomer.guid));
    assert!(recovered.opened.epoch > volume.opened.epoch && recovered.may_have_lost_ms > 0);
}

#[tokio::test]
async fn healing_drops_an_overdue_newcomer_that_a_volume_waits_for_and_makes_it_elsewhere() {
    for spare in [true, false] {
        let (mut cluster, volume) = waiting_for_newcomer().await;
        let newcomer = volume.replicas.iter().find(|r| !volume.is_known(r)).unwrap();
        if !spare {
            let taken: Vec<String> = volume.replicas.iter().map(|r| r.pool.clone()).collect();
            let free = cluster.pools.iter().map(|p| p.name.clone());
            for pool in free.filter(|p| !taken.contains(p)).collect::<Vec<_>>() {
                cluster.goes(&pool).await;
            }
        }
        waits(&cluster, &volume).await;
        let now = Instant::now();
        cluster.controller.work.healer.look_at_all(now).await.unwrap();
        assert_eq!(cluster.volume("db").membership, volume.membership, "it may be back");
        cluster.controller.work.healer.look_at_all(now + Duration::from_secs(601)).await.unwrap();
        let after = cluster.volume("db");
        assert_eq!(after.membership.version, volume.membership.version + 1);
        assert!(after.discarded.iter().any(|gone| gone.guid == newcomer.guid));
        assert_eq!(after.replicas.len(), if spare { 4 } else { 3 });
        assert!(cluster.reasons().contains(&"NewcomerDropped".to_owned()));
    }
}

#[tokio::test]
async fn a_move_is_taken_back_by_moving_it_where_it_was_and_goes_elsewhere_where_its_pool_is_away()
{
    let mut cluster = Cluster::of(6).await;
    let volume = cluster.create("db").await;
    let old = volume.replicas[0].clone();
    let taken: Vec<String> = volume.replicas.iter().map(|r| r.pool.clone()).collect();
    let free = cluster.pools.iter().map(|p| p.name.clone());
    let free: Vec<String> = free.filter(|p| !taken.contains(p)).collect();
    let db = by_name("db");
    let to = async |cluster: &Cluster, pool: &str| {
        cluster
            .controller
            .volumes
            .replicas
            .move_replica(db.as_ref(), &Move::of(old.id.0).to(pool))
            .await
    };
    let newcomers = |volume: &VolumeRecord| -> Vec<String> {
        let new = volume.replicas.iter().filter(|r| !volume.is_known(r));
        new.map(|r| r.pool.clone()).collect()
    };
    assert_eq!(newcomers(&to(&cluster, &free[0]).await.unwrap()), [free[0].clone()]);
    cluster.settle().await.unwrap();
    let refused = to(&cluster, &free[1]).await.unwrap_err().to_string();
    assert!(refused.contains("already on its way"), "{refused}");
    let back = to(&cluster, &old.pool).await.unwrap();
    assert!(newcomers(&back).is_empty() && back.discarded.len() == 1);
    to(&cluster, &free[0]).await.unwrap();
    cluster.settle().await.unwrap();
    cluster.goes(&free[0]).await;
    assert_eq!(newcomers(&to(&cluster, &free[1]).await.unwrap()), [free[1].clone()]);
}
