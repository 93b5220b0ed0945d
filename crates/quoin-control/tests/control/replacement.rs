//! Replicas that are lost, replaced or return, and disks restored to an older state.

use quoin_api::control::PoolReport;
use quoin_cluster::records::{ReplicaPhase, VolumeRecord};
use quoin_control::MembershipSwap;
use quoin_types::{Epoch, Incarnation, ReplicaGuid, ReplicaId};

use crate::cluster::Cluster;

/// A replacement as a target requests it.
#[derive(Clone, Debug)]
struct Asked {
    swap: MembershipSwap,
    replica: ReplicaId,
    old: ReplicaGuid,
    new: ReplicaGuid,
}

impl Asked {
    fn with(&self, change: impl FnOnce(&mut MembershipSwap)) -> MembershipSwap {
        let mut swap = self.swap.clone();
        change(&mut swap);
        swap
    }

    /// Returns the same with another newcomer.
    fn instead(&self, new: ReplicaGuid) -> MembershipSwap {
        self.with(|swap| {
            for member in swap.known.iter_mut().filter(|m| m.id == self.replica) {
                member.guid = new;
            }
        })
    }
}

/// Wipes the pool of the first replica of an attached volume; returns its target's next request.
async fn lost(cluster: &mut Cluster) -> Asked {
    let before = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let epoch = cluster.open_volume(before.id.0, "n1", 9).await;
    wipe(cluster, &before.replicas[0].pool).await;
    let after = cluster.volume("db");
    let swap = cluster.swap("db", epoch, 9, |known| {
        known[0].guid = after.replicas[0].guid.0;
    });
    Asked {
        swap,
        replica: before.replicas[0].id.0,
        old: before.replicas[0].guid.0,
        new: after.replicas[0].guid.0,
    }
}

async fn wipe(cluster: &mut Cluster, pool: &str) {
    cluster.pools.iter_mut().find(|p| p.name == pool).unwrap().wipe();
    cluster.settle().await.unwrap();
}

fn known(volume: &VolumeRecord, asked: &Asked) -> bool {
    volume.known_guid(asked.replica) == Some(asked.new)
}

/// Proves SCALE-ID-03, SCALE-QUORUM-12.
#[tokio::test]
async fn what_a_pool_has_lost_is_made_anew_under_another_guid_and_shown_to_the_target() {
    let mut cluster = Cluster::new().await;
    let asked = lost(&mut cluster).await;
    assert_ne!(asked.old, asked.new);
    let volume = cluster.volume("db");
    assert_eq!(volume.known_guid(asked.replica), Some(asked.old), "the known list is the target's");
    assert_eq!(volume.replicas[0].phase, ReplicaPhase::Keep, "born once, then only kept");
    let target = cluster.controller.assignments.of_node("n1").targets.remove(0);
    let candidates: Vec<_> = target.replicas.iter().filter(|r| r.candidate).collect();
    assert_eq!(candidates.len(), 1);
    assert_eq!(candidates[0].guid, asked.new.to_string());
    assert_eq!(candidates[0].replica_id, asked.replica.to_string());
    assert!(cluster.reasons().contains(&"ReplicaGone".to_owned()));
    let shown = cluster.shown("db");
    assert_eq!(shown.health, "Degraded");
    assert_eq!(shown.replicas[0].phase, "Rebuilding");
    assert!(!shown.replicas[0].quorum);
}

/// Proves SCALE-KNOWN-02, SCALE-TEST-05.
#[tokio::test]
async fn a_rebuilt_newcomer_takes_the_place_in_one_swap_and_the_old_guid_is_retired() {
    let mut cluster = Cluster::new().await;
    let asked = lost(&mut cluster).await;
    let (membership, outcome) =
        cluster.controller.volumes.epochs.swap_membership(&asked.swap).await.unwrap();
    outcome.unwrap();
    assert_eq!(membership.version, asked.swap.version + 1);
    assert_eq!(membership.known.len(), 3);
    assert_eq!(membership.retired, [asked.old]);
    assert!(membership.check().is_ok());
    assert!(known(&cluster.volume("db"), &asked));
    // The answer got lost; the target asks again and learns that it is done.
    let (again, outcome) =
        cluster.controller.volumes.epochs.swap_membership(&asked.swap).await.unwrap();
    outcome.unwrap();
    assert_eq!(again, membership);
    cluster.restart().await;
    cluster.settle().await.unwrap();
    let (again, outcome) =
        cluster.controller.volumes.epochs.swap_membership(&asked.swap).await.unwrap();
    assert!(outcome.is_ok() && again == membership);
    assert_eq!(cluster.shown("db").health, "Online");
    let target = cluster.controller.assignments.of_node("n1").targets.remove(0);
    assert!(target.replicas.iter().all(|replica| !replica.candidate));
}

/// Proves SCALE-TEST-06.
#[tokio::test]
async fn a_swap_of_another_epoch_version_node_or_guid_is_refused_and_changes_nothing() {
    let mut cluster = Cluster::new().await;
    let asked = lost(&mut cluster).await;
    let before = cluster.volume("db");
    let wrong = [
        asked.with(|s| s.epoch = Epoch(s.epoch.0 + 1)),
        asked.with(|s| s.incarnation = Incarnation(8)),
        asked.with(|s| s.version += 1),
        asked.with(|s| s.version -= 1),
        asked.with(|s| s.node = "n2".into()),
        asked.instead(ReplicaGuid(5)),
        asked.instead(before.replicas[1].guid.0),
        asked.with(|s| s.known[1].guid = ReplicaGuid(5)),
        asked.with(|s| s.known.truncate(2)),
        asked.with(|s| {
            s.known.pop();
            (s.rf, s.cf) = (2, 2);
        }),
        asked.with(|s| s.known.push(s.known[0])),
        asked.with(|s| (s.rf, s.cf) = (4, 3)),
        asked.with(|s| s.cf = 1),
        asked.with(|s| s.cf = 0),
        asked.with(|s| s.known.clear()),
    ];
    for wrong in wrong {
        let (membership, outcome) =
            cluster.controller.volumes.epochs.swap_membership(&wrong).await.unwrap();
        assert!(outcome.is_err(), "{wrong:?}");
        assert_eq!(membership.version, asked.swap.version);
    }
    assert_eq!(*cluster.volume("db"), *before);
    // A newer target has opened: the older one's swap comes too late.
    cluster.open_volume(asked.swap.volume, "n1", 10).await;
    let (_, outcome) =
        cluster.controller.volumes.epochs.swap_membership(&asked.swap).await.unwrap();
    assert!(outcome.unwrap_err().contains("is over"));
}

#[tokio::test]
async fn a_lost_newcomer_gets_yet_another_guid() {
    let mut cluster = Cluster::new().await;
    let asked = lost(&mut cluster).await;
    let pool = cluster.volume("db").replicas[0].pool.clone();
    wipe(&mut cluster, &pool).await;
    let third = cluster.volume("db").replicas[0].guid.0;
    assert!(third != asked.new && third != asked.old);
    let (_, outcome) =
        cluster.controller.volumes.epochs.swap_membership(&asked.swap).await.unwrap();
    assert!(outcome.is_err(), "the newcomer that was lost must not become known");
    let retry = asked.instead(third);
    cluster.controller.volumes.epochs.swap_membership(&retry).await.unwrap().1.unwrap();
}

#[tokio::test]
async fn a_known_replica_that_returns_before_it_is_replaced_is_taken_back() {
    let mut cluster = Cluster::new().await;
    let asked = lost(&mut cluster).await;
    let pool_name = cluster.volume("db").replicas[0].pool.clone();
    let pool = cluster.pools.iter_mut().find(|p| p.name == pool_name).unwrap();
    pool.holds.insert(asked.old.to_string(), (asked.swap.volume.to_string(), true));
    cluster.settle().await.unwrap();
    let volume = cluster.volume("db");
    assert_eq!(volume.replicas[0].guid.0, asked.old);
    assert!(volume.discarded.is_empty(), "and the newcomer is removed: {:?}", volume.discarded);
    let pool = cluster.pools.iter().find(|p| p.name == pool_name).unwrap();
    assert!(!pool.holds.contains_key(&asked.new.to_string()));
    let (_, outcome) =
        cluster.controller.volumes.epochs.swap_membership(&asked.swap).await.unwrap();
    assert!(outcome.is_err());
    assert_eq!(cluster.shown("db").health, "Opening");
}

/// Proves SCALE-SHORT-01.
#[tokio::test]
async fn a_retired_replica_that_turns_up_again_is_removed_and_never_known() {
    let mut cluster = Cluster::new().await;
    let asked = lost(&mut cluster).await;
    cluster.controller.volumes.epochs.swap_membership(&asked.swap).await.unwrap().1.unwrap();
    let pool_name = cluster.volume("db").replicas[0].pool.clone();
    let pool = cluster.pools.iter_mut().find(|p| p.name == pool_name).unwrap();
    pool.holds.insert(asked.old.to_string(), (asked.swap.volume.to_string(), true));
    cluster.settle().await.unwrap();
    let pool = cluster.pools.iter().find(|p| p.name == pool_name).unwrap();
    assert!(!pool.holds.contains_key(&asked.old.to_string()));
    assert!(known(&cluster.volume("db"), &asked));
}

#[tokio::test]
async fn replicas_of_an_older_disk_state_are_flagged_and_kept_from_targets() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let pool = cluster.pools.iter_mut().find(|p| p.name == volume.replicas[0].pool).unwrap();
    pool.start_counter = 5;
    cluster.settle().await.unwrap();
    let pool = cluster.pools.iter_mut().find(|p| p.name == volume.replicas[0].pool).unwrap();
    // A pool that opens or leaves does not report its number of starts.
    let empty =
        PoolReport { capacity_bytes: 0, start_counter: 0, replicas: vec![], ..pool.report() };
    let silent = PoolReport { start_counter: 0, ..pool.report() };
    let leaving = PoolReport { leaving: true, start_counter: 1, ..pool.report() };
    for report in [silent, leaving] {
        cluster.controller.reports.pool(&report).await.unwrap();
    }
    assert!(!cluster.reasons().contains(&"PoolRolledBack".to_owned()));
    cluster.controller.reports.pool(&empty).await.unwrap();
    assert_eq!(cluster.shown("db").replicas[0].phase, "InSync", "silence is no loss");
    let pool = cluster.pools.iter_mut().find(|p| p.name == volume.replicas[0].pool).unwrap();
    pool.start_counter = 4;
    cluster.settle().await.unwrap();
    assert!(cluster.reasons().contains(&"PoolRolledBack".to_owned()));
    let target = cluster.controller.assignments.of_node("n1").targets.remove(0);
    let unusable = target.replicas.iter().filter(|replica| replica.address.is_empty()).count();
    assert_eq!(unusable, 1);
    cluster.restart().await;
    cluster.settle().await.unwrap();
    let shown = cluster.controller.status.pools();
    let failed: Vec<_> = shown.iter().filter(|pool| pool.state == "Failed").collect();
    assert_eq!(failed.len(), 1, "a restart forgets nothing");
    // New storage under the same name is a new pool, whose replicas are gone.
    let pool = cluster.pools.iter_mut().find(|p| p.name == volume.replicas[0].pool).unwrap();
    pool.id = "another".into();
    pool.start_counter = 1;
    pool.wipe();
    cluster.settle().await.unwrap();
    assert!(cluster.reasons().contains(&"PoolReplaced".to_owned()));
    assert!(cluster.controller.status.pools().iter().all(|pool| pool.state == "Online"));
    assert_ne!(cluster.volume("db").replicas[0].guid, volume.replicas[0].guid);
}

/// An image of before the last start counts up to the same number.
#[tokio::test]
async fn another_start_of_the_same_count_is_an_older_state_of_the_disk() {
    let mut cluster = Cluster::new().await;
    for (counter, nonce, is_older) in
        [(5, 50, false), (5, 50, false), (6, 60, false), (6, 61, true)]
    {
        (cluster.pools[0].start_counter, cluster.pools[0].start_nonce) = (counter, nonce);
        cluster.settle().await.unwrap();
        let name = cluster.pools[0].name.clone();
        assert_eq!(
            cluster.controller.state.is_rolled_back(&name),
            is_older,
            "start {counter} {nonce}"
        );
    }
    // An earlier build reports none.
    let name = cluster.pools[1].name.clone();
    for nonce in [7, 0, 8] {
        cluster.pools[1].start_nonce = nonce;
        (cluster.pools[1].start_counter) += u64::from(nonce == 7);
        cluster.settle().await.unwrap();
    }
    assert!(!cluster.controller.state.is_rolled_back(&name));
}

/// An image of the pool's present life counts its starts on, and its mark is below the value that
/// the pool has reported since.
#[tokio::test]
async fn a_new_start_with_a_lower_mark_is_an_older_state_of_the_disk() {
    let mut cluster = Cluster::new().await;
    let name = cluster.pools[0].name.clone();
    let mut tell = async |starts: u64, nonce: u64, mark: u64| {
        let pool = &mut cluster.pools[0];
        (pool.start_counter, pool.start_nonce, pool.mark) = (starts, nonce, mark);
        let report = pool.report();
        cluster.controller.reports.pool(&report).await.unwrap();
        cluster.controller.state.is_rolled_back(&name)
    };
    for (starts, nonce, mark) in [(5, 50, 0), (5, 50, 1), (6, 60, 1), (6, 60, 3), (6, 60, 2)] {
        assert!(!tell(starts, nonce, mark).await, "{starts} {nonce} {mark}");
    }
    assert!(tell(7, 70, 2).await, "a report that was overtaken takes nothing back");
    assert!(tell(9, 90, 9).await, "only a person can take it back");
    let message = cluster
        .controller
        .state
        .events()
        .after(0)
        .into_iter()
        .find(|e| e.reason == "PoolRolledBack");
    assert!(message.is_some_and(|e| e.message.contains("mark 2") && e.message.contains("mark 3")));
}

/// A report that was on its way as the process was killed arrives after the next process's first.
#[tokio::test]
async fn a_late_report_of_a_pools_former_process_is_no_older_state_of_its_disk() {
    let mut cluster = Cluster::new().await;
    let pool = &mut cluster.pools[0];
    (pool.start_counter, pool.start_nonce, pool.mark) = (5, 50, 1);
    let former = pool.report();
    let left = PoolReport { leaving: true, start_counter: 0, ..former.clone() };
    let present = PoolReport {
        start_counter: 6,
        start_nonce: 60,
        address: "10.9.9.9:1".into(),
        free_bytes: 4096,
        mark: 2,
        ..former.clone()
    };
    let reports = &cluster.controller.reports;
    for report in [&former, &present, &former, &left, &former] {
        reports.pool(report).await.unwrap();
    }
    let shown = || {
        let pools = cluster.controller.status.pools();
        pools.into_iter().find(|pool| pool.name == former.pool).unwrap()
    };
    assert!(!cluster.controller.state.is_rolled_back(&former.pool));
    assert_eq!((shown().state.as_str(), shown().address.as_str()), ("Online", "10.9.9.9:1"));
    assert!(!cluster.reasons().contains(&"PoolRolledBack".to_owned()));
    // A disk that went back to that time draws another nonce with the same start.
    let older = PoolReport { start_nonce: 51, ..former.clone() };
    reports.pool(&older).await.unwrap();
    assert!(cluster.controller.state.is_rolled_back(&former.pool));
}

/// The last report of a process that ends in order has the mark and no start.
#[tokio::test]
async fn the_mark_of_a_pools_last_report_is_kept() {
    let mut cluster = Cluster::new().await;
    for (index, mark, is_older) in [(0, 2, false), (1, 1, true)] {
        let pool = &mut cluster.pools[index];
        (pool.start_counter, pool.start_nonce, pool.mark) = (5, 50, 1);
        let report = pool.report();
        let leaving = PoolReport { leaving: true, start_counter: 0, mark: 2, ..report.clone() };
        let of_another = PoolReport { start_nonce: 51, mark: 9, ..leaving.clone() };
        let next = PoolReport { start_counter: 6, start_nonce: 60, mark, ..report.clone() };
        for report in [&report, &leaving, &of_another, &next] {
            cluster.controller.reports.pool(report).await.unwrap();
        }
        assert_eq!(cluster.controller.state.is_rolled_back(&report.pool), is_older, "mark {mark}");
    }
}

/// The counts of the replaced storage do not bind the new one, even where that reports first while
/// it opens.
#[tokio::test]
async fn the_counts_of_a_replaced_pool_are_not_held_against_the_new_one() {
    let mut cluster = Cluster::new().await;
    let name = cluster.pools[0].name.clone();
    let pool = &mut cluster.pools[0];
    (pool.start_counter, pool.mark) = (9, 9);
    let report = pool.report();
    let new = PoolReport { pool_id: "another".into(), mark: 0, ..report.clone() };
    let opening = PoolReport { start_counter: 0, start_nonce: 0, ..new.clone() };
    let opened = PoolReport { start_counter: 2, start_nonce: 2, ..new };
    for report in [&report, &opening, &opened] {
        cluster.controller.reports.pool(report).await.unwrap();
        assert!(!cluster.controller.state.is_rolled_back(&name));
    }
}

#[tokio::test]
async fn replicas_that_no_record_names_are_kept_and_told_of_once() {
    let mut cluster = Cluster::new().await;
    let (guid, volume) = ("ab".repeat(16), "cd".repeat(16));
    cluster.pools[0].holds.insert(guid.clone(), (volume, true));
    cluster.settle().await.unwrap();
    cluster.settle().await.unwrap();
    assert!(cluster.pools[0].holds.contains_key(&guid));
    let told = cluster.reasons().iter().filter(|reason| *reason == "ReplicaUnknown").count();
    assert_eq!(told, 1);
}
