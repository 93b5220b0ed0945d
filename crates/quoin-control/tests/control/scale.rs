//! Replicas that users add, move and remove: refused requests, recorded ones, and their use by a
//! target.

use quoin_api::control::TargetAssignment;
use quoin_cluster::records::{ReplicaPhase, VolumeRecord};
use quoin_control::{Error, MembershipSwap, Move, Scale, Which};
use quoin_types::{Epoch, Member, ReplicaId};

use crate::cluster::{Cluster, SimPool, by_name};

fn to(replicas: u32) -> Scale {
    Scale { replicas, ..Scale::default() }
}

/// Makes an attached volume of three replicas on six pools, opened by its target.
async fn opened() -> (Cluster, Epoch) {
    let mut cluster = Cluster::of(6).await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let epoch = cluster.open_volume(volume.id.0, "n1", 9).await;
    (cluster, epoch)
}

fn told(cluster: &Cluster) -> TargetAssignment {
    cluster.controller.assignments.of_node("n1").targets.remove(0)
}

fn newcomers(volume: &VolumeRecord) -> Vec<Member> {
    let new = volume.replicas.iter().filter(|r| !volume.is_known(r));
    new.map(|r| Member { id: r.id.0, guid: r.guid.0 }).collect()
}

async fn refused(cluster: &Cluster, scale: Scale) -> String {
    let before = cluster.volume("db");
    let refusal = cluster.controller.volumes.replicas.scale(by_name("db").as_ref(), &scale).await;
    assert_eq!(*cluster.volume("db"), *before, "a refusal changes nothing");
    refusal.unwrap_err().to_string()
}

async fn swap(cluster: &mut Cluster, asked: &MembershipSwap) -> Result<(), String> {
    let (_, outcome) = cluster.controller.volumes.epochs.swap_membership(asked).await.unwrap();
    cluster.settle().await.unwrap();
    outcome
}

/// Proves SCALE-STORY-01, SCALE-STORY-02, SCALE-ID-05, SCALE-QUORUM-12, SCALE-CONF-06,
/// SCALE-CONF-08, SCALE-LIST-05.
#[tokio::test]
async fn a_volume_that_is_to_have_more_replicas_gets_them_made_shown_and_known_in_one_swap() {
    let (mut cluster, epoch) = opened().await;
    assert_eq!(told(&cluster).desired_replication_factor, 3);
    let db = by_name("db");
    cluster.controller.volumes.replicas.scale(db.as_ref(), &to(5)).await.unwrap();
    cluster.settle().await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!(
        (volume.membership.rf, volume.membership.drf),
        (3, 5),
        "RF is the target's to raise"
    );
    let new = newcomers(&volume);
    assert_eq!(new.len(), 2);
    for member in &new {
        let held = cluster.pools.iter().find_map(|p| p.holds.get(&member.guid.to_string()));
        assert!(!held.expect("a pool made it").1, "quorum off");
        assert!(volume.membership.known.iter().all(|m| m.id.0 != member.id));
    }
    let target = told(&cluster);
    assert_eq!(target.desired_replication_factor, 5);
    let fresh: Vec<_> = target.replicas.iter().filter(|r| r.candidate).collect();
    assert!(fresh.len() == 2 && fresh.iter().all(|r| !r.beside));
    assert_eq!(cluster.shown("db").changing, "2 replicas being added");
    // Asked for once more: nothing new.
    cluster.controller.volumes.replicas.scale(db.as_ref(), &to(5)).await.unwrap();
    assert_eq!(cluster.volume("db").replicas.len(), 5);
    let both = cluster.swap("db", epoch, 9, |known| known.extend(&new));
    swap(&mut cluster, &both).await.unwrap();
    let membership = cluster.volume("db").membership.clone();
    assert_eq!((membership.rf, membership.cf, membership.known.len()), (5, 3, 5));
    assert!(membership.retired.is_empty());
    assert_eq!(cluster.shown("db").changing, "");
    // The answer was lost: the repeat is accepted, and done once.
    swap(&mut cluster, &both).await.unwrap();
    assert_eq!(cluster.volume("db").membership, membership);
    cluster.restart().await;
    assert_eq!(cluster.volume("db").membership, membership);
}

/// Proves SCALE-CONF-01, SCALE-CONF-02, SCALE-CONF-03, SCALE-CONF-04, SCALE-CONF-05,
/// SCALE-CONF-07, SCALE-CONF-09, SCALE-CONF-12, SCALE-CONF-14, SCALE-LIST-01.
#[tokio::test]
async fn the_known_list_is_part_of_the_volume_and_a_target_is_told_it_after_any_restart() {
    let (mut cluster, epoch) = opened().await;
    let db = by_name("db");
    cluster.controller.volumes.replicas.scale(db.as_ref(), &to(4)).await.unwrap();
    assert_eq!(told(&cluster).desired_replication_factor, 4, "told at once, with no restart");
    cluster.settle().await.unwrap();
    let new = newcomers(&cluster.volume("db"));
    let asked = cluster.swap("db", epoch, 9, |known| known.extend(&new));
    let (answered, outcome) =
        cluster.controller.volumes.epochs.swap_membership(&asked).await.unwrap();
    outcome.unwrap();
    for round in 0..2 {
        let shown = cluster.shown("db").membership.unwrap();
        let listed: Vec<_> = shown.known.iter().map(|m| m.guid.clone()).collect();
        let expected: Vec<_> = answered.known.iter().map(|m| m.guid.to_string()).collect();
        assert_eq!(listed, expected);
        assert_eq!((shown.rf, shown.cf, shown.drf), (4, 3, 4));
        // A target's grant has the same list, and the same factors.
        let (incarnation, at_least) = (quoin_types::Incarnation(20 + round), Epoch(0));
        let granted = cluster
            .controller
            .volumes
            .epochs
            .acquire(asked.volume, "n1", incarnation, at_least)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(granted.membership, answered);
        let target = told(&cluster);
        assert_eq!(target.replicas.iter().filter(|r| !r.candidate).count(), 4);
        cluster.restart().await;
        cluster.settle().await.unwrap();
    }
}

/// Proves SCALE-VALID-01, SCALE-VALID-03, SCALE-TEST-10, SCALE-TEST-11, SCALE-CF-02.
#[tokio::test]
async fn what_a_volume_cannot_be_scaled_to_is_refused_by_name_and_changes_nothing() {
    let (cluster, _) = opened().await;
    assert!(refused(&cluster, to(2)).await.contains("quoin replica remove"));
    assert!(refused(&cluster, to(6)).await.contains("at most 5"));
    let factor = |n| Scale { consistency_factor: Some(n), ..Scale::default() };
    assert!(refused(&cluster, factor(4)).await.contains("more than the 3 replicas"));
    assert!(refused(&cluster, factor(1)).await.contains("allowLossOnSingleFailure"));
    let named =
        |pools: &[&str]| Scale { pools: pools.iter().map(|p| (*p).to_owned()).collect(), ..to(4) };
    let used = cluster.volume("db").replicas[0].pool.clone();
    assert!(refused(&cluster, named(&[&used])).await.contains("holds a replica"));
    assert!(refused(&cluster, named(&["p9"])).await.contains("p9"));
    assert!(refused(&cluster, named(&["p4", "p5"])).await.contains("1 are needed"));
    cluster.controller.volumes.replicas.scale(by_name("db").as_ref(), &to(5)).await.unwrap();
    // On its way to five it does not turn round by itself.
    assert!(refused(&cluster, to(4)).await.contains("take back the newcomers"));
}

#[tokio::test]
async fn without_other_pools_a_volume_is_not_scaled_and_the_refusal_says_why() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let text = refused(&cluster, to(4)).await;
    assert!(text.contains("0 found") && text.contains("holds a replica"), "{text}");
    cluster.pools.push(SimPool::new("p4", "h1"));
    cluster.settle().await.unwrap();
    let text = refused(&cluster, to(4)).await;
    assert!(text.contains("p4 (host h1 holds a replica of the volume)"), "{text}");
}

/// Proves SCALE-STORY-04, SCALE-STORY-06, SCALE-ID-02, SCALE-ID-04.
#[tokio::test]
async fn a_replica_moves_under_its_id_with_a_new_guid_and_its_old_pool_is_cleared() {
    let (mut cluster, epoch) = opened().await;
    let db = by_name("db");
    let old = cluster.volume("db").replicas[0].clone();
    let free = cluster.pools.iter().find(|p| p.holds.is_empty()).unwrap().name.clone();
    cluster
        .controller
        .volumes
        .replicas
        .move_replica(db.as_ref(), &Move::of(old.id.0).to(&free))
        .await
        .unwrap();
    cluster.settle().await.unwrap();
    let volume = cluster.volume("db");
    let [new] = newcomers(&volume)[..] else { panic!() };
    assert!(new.id == old.id.0 && new.guid != old.guid.0);
    let target = told(&cluster);
    let fresh: Vec<_> = target.replicas.iter().filter(|r| r.candidate).collect();
    assert!(fresh.len() == 1 && fresh[0].beside && fresh[0].pool == free);
    assert_eq!(cluster.shown("db").changing, "1 replica moving");
    assert_eq!(cluster.shown("db").health, "Online", "the old one serves on");
    // Again, without a pool or with the same: the same move. To another one: not now.
    cluster
        .controller
        .volumes
        .replicas
        .move_replica(db.as_ref(), &Move::of(old.id.0))
        .await
        .unwrap();
    assert_eq!(*cluster.volume("db"), *volume);
    let mut free = cluster.pools.iter().filter(|p| p.holds.is_empty());
    let other = &free.next().unwrap().name;
    let other = cluster
        .controller
        .volumes
        .replicas
        .move_replica(db.as_ref(), &Move::of(old.id.0).to(other))
        .await;
    assert!(other.unwrap_err().to_string().contains("already on its way"));
    let asked = cluster.swap("db", epoch, 9, |known| {
        known.iter_mut().filter(|m| m.id == new.id).for_each(|m| m.guid = new.guid);
    });
    swap(&mut cluster, &asked).await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!((volume.membership.rf, volume.replicas.len()), (3, 3));
    assert_eq!(volume.membership.retired, [old.guid]);
    assert!(volume.discarded.is_empty(), "{:?}", volume.discarded);
    let pool = cluster.pools.iter().find(|p| p.name == old.pool).unwrap();
    assert!(pool.holds.is_empty(), "the old pool has deleted it");
}

#[tokio::test]
async fn a_replica_on_a_pool_that_is_away_is_replaced_elsewhere_and_not_made_anew_when_it_is_back()
{
    let (mut cluster, _) = opened().await;
    let old = cluster.volume("db").replicas[0].clone();
    cluster
        .controller
        .volumes
        .replicas
        .move_replica(by_name("db").as_ref(), &Move::of(old.id.0))
        .await
        .unwrap();
    let pool = cluster.pools.iter_mut().find(|p| p.name == old.pool).unwrap();
    pool.wipe();
    cluster.settle().await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!(newcomers(&volume).len(), 1, "one takes its place, not two");
    let pool = cluster.pools.iter().find(|p| p.name == old.pool).unwrap();
    assert!(pool.holds.is_empty());
}

/// Proves SCALE-VALID-02, SCALE-VALID-03.
#[tokio::test]
async fn replicas_leave_by_name_while_those_that_stay_are_in_sync_and_are_retired() {
    let (mut cluster, epoch) = opened().await;
    let db = by_name("db");
    let ids: Vec<ReplicaId> = cluster.volume("db").replicas.iter().map(|r| r.id.0).collect();
    let remove = async |cluster: &Cluster, ids: &[ReplicaId]| {
        cluster.controller.volumes.replicas.remove(by_name("db").as_ref(), ids).await
    };
    let guids: Vec<String> =
        cluster.volume("db").replicas.iter().map(|r| r.guid.0.to_string()).collect();
    cluster
        .serving(
            "db",
            &[(&guids[0], "catching-up"), (&guids[1], "in-sync"), (&guids[2], "in-sync")],
        )
        .await;
    let text = remove(&cluster, &ids[1..2]).await.unwrap_err().to_string();
    assert!(text.contains("in sync") && text.contains(&ids[0].to_string()), "{text}");
    assert!(remove(&cluster, &ids).await.unwrap_err().to_string().contains("delete it"));
    assert!(matches!(remove(&cluster, &[ReplicaId(5)]).await, Err(Error::NotFound { .. })));
    assert!(cluster.volume("db").replicas.iter().all(|r| !r.leaving));
    // The one that lags may leave: those that stay are in sync.
    remove(&cluster, &ids[..1]).await.unwrap();
    cluster.settle().await.unwrap();
    let target = told(&cluster);
    assert_eq!(target.replicas.iter().filter(|r| r.leaving).count(), 1);
    assert_eq!(target.desired_replication_factor, 2);
    let other = cluster.swap("db", epoch, 9, |known| known.truncate(2));
    let why = swap(&mut cluster, &other).await.unwrap_err();
    assert!(why.contains("not named to leave"), "{why}");
    let asked = cluster.swap("db", epoch, 9, |known| known.retain(|m| m.id != ids[0]));
    swap(&mut cluster, &asked).await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!((volume.membership.rf, volume.membership.cf, volume.membership.drf), (2, 2, 2));
    assert_eq!(volume.membership.retired.len(), 1);
    assert_eq!(volume.replicas.len(), 2);
    assert!(cluster.pools.iter().all(|p| !p.holds.contains_key(&guids[0])));
    cluster.controller.volumes.replicas.scale(db.as_ref(), &to(3)).await.unwrap();
    assert_eq!(newcomers(&cluster.volume("db")).len(), 1);
}

#[tokio::test]
async fn a_newcomer_that_is_not_known_yet_is_given_up_by_name_at_once() {
    let (mut cluster, epoch) = opened().await;
    let db = by_name("db");
    cluster.controller.volumes.replicas.scale(db.as_ref(), &to(4)).await.unwrap();
    cluster.settle().await.unwrap();
    let [new] = newcomers(&cluster.volume("db"))[..] else { panic!() };
    let late = cluster.swap("db", epoch, 9, |known| known.push(new));
    cluster.controller.volumes.replicas.remove(db.as_ref(), &[new.id]).await.unwrap();
    cluster.settle().await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!((volume.membership.drf, volume.replicas.len()), (3, 3));
    assert!(cluster.pools.iter().all(|p| !p.holds.contains_key(&new.guid.to_string())));
    assert!(swap(&mut cluster, &late).await.is_err(), "a target that asks too late is refused");
}

/// Proves SCALE-CF-01, SCALE-CF-02.
#[tokio::test]
async fn the_consistency_factor_is_the_formulas_until_another_one_is_asked_for() {
    let (mut cluster, epoch) = opened().await;
    let db = by_name("db");
    let factor = |n, allow| Scale {
        consistency_factor: Some(n),
        allow_loss_on_single_failure: allow,
        ..Scale::default()
    };
    assert_eq!(told(&cluster).consistency_factor, 0);
    cluster.controller.volumes.replicas.scale(db.as_ref(), &factor(3, false)).await.unwrap();
    assert_eq!(told(&cluster).consistency_factor, 3);
    let with = |cf| MembershipSwap { cf, ..cluster.swap("db", epoch, 9, |_| {}) };
    let (one, three) = (with(1), with(3));
    assert!(swap(&mut cluster, &one).await.is_err());
    swap(&mut cluster, &three).await.unwrap();
    assert_eq!(cluster.volume("db").membership.cf, 3);
    // Back to the formula.
    cluster.controller.volumes.replicas.scale(db.as_ref(), &factor(0, false)).await.unwrap();
    assert_eq!(told(&cluster).consistency_factor, 2);
    let two = MembershipSwap { cf: 2, ..cluster.swap("db", epoch, 9, |_| {}) };
    swap(&mut cluster, &two).await.unwrap();
    assert_eq!(told(&cluster).consistency_factor, 0);
    assert_eq!(cluster.volume("db").replicas[0].phase, ReplicaPhase::Keep);
}

#[tokio::test]
async fn a_move_or_a_replacement_that_is_asked_for_again_changes_nothing_whoever_asks() {
    let (mut cluster, epoch) = opened().await;
    let db = by_name("db");
    let before = VolumeRecord::clone(&cluster.volume("db"));
    let (old, other) = (before.replicas[0].clone(), before.replicas[1].clone());
    let is_free = |name: &String| before.replicas.iter().all(|r| r.pool != *name);
    let free = cluster.pools.iter().map(|p| p.name.clone()).find(is_free).unwrap();
    let of_pool = |pool: &str| Move { which: Which::OfPool(pool.into()), ..Move::of(old.id.0) };
    let replace = Move { unless_in_sync: true, ..Move::of(old.id.0) };
    let unchanged = async |cluster: &Cluster, asked: &Move| {
        let before = cluster.volume("db");
        cluster.controller.volumes.replicas.move_replica(db.as_ref(), asked).await.unwrap();
        assert_eq!(*cluster.volume("db"), *before, "{asked:?}");
    };
    // The replica is in sync where it is.
    unchanged(&cluster, &replace).await;
    unchanged(&cluster, &Move::of(old.id.0).to(&old.pool)).await;
    let refused = async |cluster: &Cluster, asked: Move| {
        let before = cluster.volume("db");
        let refusal = cluster
            .controller
            .volumes
            .replicas
            .move_replica(db.as_ref(), &asked)
            .await
            .unwrap_err();
        assert_eq!(*cluster.volume("db"), *before, "{asked:?}");
        assert!(matches!(refusal, Error::NotFound { .. }), "{refusal}");
    };
    refused(&cluster, of_pool(&free)).await;
    refused(&cluster, of_pool("p9").to(&other.pool)).await;
    let asked = of_pool("p9").to(&other.pool);
    let refusal =
        cluster.controller.volumes.replicas.move_replica(db.as_ref(), &asked).await.unwrap_err();
    assert!(refusal.to_string().contains("pool \"p9\" does not exist"), "{refusal}");
    // The replica is on its way, and then there.
    let asked = of_pool(&old.pool).to(&free);
    cluster.controller.volumes.replicas.move_replica(db.as_ref(), &asked).await.unwrap();
    for again in [asked.clone(), Move::of(old.id.0).to(&free), Move::of(old.id.0), replace.clone()]
    {
        unchanged(&cluster, &again).await;
    }
    cluster.settle().await.unwrap();
    let new = newcomers(&cluster.volume("db"))[0];
    let moved = cluster.swap("db", epoch, 9, |known| {
        known.iter_mut().filter(|m| m.id == new.id).for_each(|m| *m = new);
    });
    swap(&mut cluster, &moved).await.unwrap();
    for again in [asked, Move::of(old.id.0).to(&free), replace] {
        unchanged(&cluster, &again).await;
    }
    refused(&cluster, of_pool("p9").to(&free)).await;
    refused(&cluster, of_pool(&old.pool)).await;
}
