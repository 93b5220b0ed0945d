//! Calls of targets that arrive late, twice, or after their subject is over.

use quoin_api::control::VolumeReport;
use quoin_types::{Epoch, Incarnation, Member, Membership, ReplicaGuid};

use crate::cluster::{Cluster, by_name};

/// A volume that node n1 has opened, with a later change.
struct Scene {
    cluster: Cluster,
    /// Epoch of n1's target.
    epoch: Epoch,
    report: VolumeReport,
}

const OWN: u128 = 9;
const OTHER: u128 = 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Since {
    Nothing,
    /// The same target has opened it again.
    OpenedAgain,
    /// Another target of the same node has opened it.
    Restarted,
    Detached,
    /// Detached and attached to the same node; no target has opened it.
    AttachedAgain,
    /// Another node owns it and has not opened it yet.
    Moved,
    MovedAndOpened,
    Deleted,
}

const ALL: [Since; 8] = [
    Since::Nothing,
    Since::OpenedAgain,
    Since::Restarted,
    Since::Detached,
    Since::AttachedAgain,
    Since::Moved,
    Since::MovedAndOpened,
    Since::Deleted,
];

async fn scene(since: Since) -> Scene {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    let (id, db) = (volume.id.0, by_name("db"));
    cluster.attach("db", "n1").await.unwrap();
    let epoch = cluster.open_volume(id, "n1", OWN).await;
    let report = cluster.report_of("db", "serving");
    match since {
        Since::Nothing => {}
        Since::OpenedAgain => drop(cluster.open_volume(id, "n1", OWN).await),
        Since::Restarted => drop(cluster.open_volume(id, "n1", OTHER).await),
        _ => cluster.controller.volumes.attachments.unpublish(db.as_ref(), "n1").await.unwrap(),
    }
    match since {
        Since::AttachedAgain => drop(cluster.attach("db", "n1").await.unwrap()),
        Since::Moved | Since::MovedAndOpened => drop(cluster.attach("db", "n2").await.unwrap()),
        Since::Deleted => {
            cluster.controller.volumes.catalog.delete(db.as_ref()).await.unwrap();
            cluster.settle().await.unwrap();
        }
        _ => {}
    }
    if since == Since::MovedAndOpened {
        cluster.open_volume(id, "n2", OTHER).await;
    }
    Scene { cluster, epoch, report }
}

#[tokio::test]
async fn an_epoch_is_granted_to_the_owner_alone_and_never_the_same_one_twice() {
    for since in ALL {
        let Scene { cluster, epoch, report } = scene(since).await;
        let id = report.volume_id.parse().unwrap();
        let mut last = epoch;
        // The request, and the same one again, as a network may deliver it.
        for _ in 0..2 {
            let before = cluster.controller.volumes.catalog.get(by_name("db").as_ref()).ok();
            let asked =
                cluster.controller.volumes.epochs.acquire(id, "n1", Incarnation(OWN), epoch).await;
            let owns = before.as_ref().is_some_and(|v| v.opened.owner.as_deref() == Some("n1"));
            match asked.unwrap() {
                Ok(granted) => {
                    assert!(owns, "{since:?}");
                    assert!(granted.epoch > last && granted.epoch.0 > before.unwrap().opened.epoch);
                    last = granted.epoch;
                }
                Err(_) => {
                    assert!(!owns, "{since:?}");
                    let now = cluster.controller.volumes.catalog.get(by_name("db").as_ref()).ok();
                    assert_eq!(before, now, "{since:?}: a refusal changes nothing");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_swap_counts_once_under_the_epoch_of_the_record_and_under_no_other() {
    for since in ALL {
        // The newcomer was on its way before, so the records request the swap in any case.
        let Scene { mut cluster, epoch, report } = scene(since).await;
        if since == Since::Deleted {
            continue;
        }
        let volume = cluster.volume("db");
        let asked = cluster.swap("db", epoch, OWN, |known| {
            known.reverse();
        });
        let asked = quoin_control::MembershipSwap { node: "n1".into(), ..asked };
        let before = Membership::from(&volume.membership);
        let (now, outcome) =
            cluster.controller.volumes.epochs.swap_membership(&asked).await.unwrap();
        let current = since == Since::Nothing;
        assert_eq!(outcome.is_ok(), current, "{since:?}: {outcome:?}");
        assert_eq!(now.version, before.version + u64::from(current), "{since:?}");
        // Told again, late: the same answer, and nothing more changes.
        let (again, outcome) =
            cluster.controller.volumes.epochs.swap_membership(&asked).await.unwrap();
        assert_eq!((outcome.is_ok(), &again), (current, &now), "{since:?}");
        if current {
            // After the next change the old one is over, whatever it requests.
            let next = cluster.swap("db", epoch, OWN, |known| known.reverse());
            let (third, outcome) =
                cluster.controller.volumes.epochs.swap_membership(&next).await.unwrap();
            assert!(outcome.is_ok() && third.version == now.version + 1);
            let (stays, outcome) =
                cluster.controller.volumes.epochs.swap_membership(&asked).await.unwrap();
            assert!(outcome.is_err());
            assert_eq!(stays, third);
        }
        // No unknown replica becomes known by any of them.
        let stranger = Member { id: asked.known[0].id, guid: ReplicaGuid(0xbad) };
        let mut foreign = asked.clone();
        foreign.version = cluster.volume("db").membership.version;
        foreign.known[0] = stranger;
        assert!(
            cluster.controller.volumes.epochs.swap_membership(&foreign).await.unwrap().1.is_err()
        );
        cluster.settle().await.unwrap();
        drop(report);
    }
}

#[tokio::test]
async fn a_report_counts_for_the_owner_at_the_records_epoch_and_gets_a_grant_then_alone() {
    for since in ALL {
        let Scene { cluster, report, .. } = scene(since).await;
        let shown = |cluster: &Cluster| {
            let volume = cluster.controller.volumes.catalog.get(by_name("db").as_ref()).ok()?;
            Some(cluster.controller.status.volume(&volume).waiting_for)
        };
        let before = shown(&cluster);
        for _ in 0..2 {
            let late = VolumeReport { waiting_for: "late words".into(), ..report.clone() };
            let grant = cluster.controller.reports.volume(&late).await;
            let current = since == Since::Nothing;
            assert_eq!(grant.is_ok_and(|grant| !grant.is_empty()), current, "{since:?}");
            let heard = shown(&cluster).is_some_and(|text| text.contains("late words"));
            assert_eq!(heard, current, "{since:?}: {before:?}");
        }
    }
}
