//! Group snapshots: what their targets are told, and what is recorded of the answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use quoin_api::control::command_outcome::What as Ended;
use quoin_api::control::target_command::What as Told;
use quoin_api::control::{
    CommandOutcome, CommandRefused, GroupSnapshotRef, PointCut, PointHeld, PointReleased,
    SnapshotGone, SnapshotMade, SnapshotRef, SnapshotRemoved, TargetCommand, command_refused,
};
use quoin_cluster::records::{GroupPhase, GroupRecord, SnapshotPhase};
use quoin_control::Error;
use tokio::time::Instant;

use crate::cluster::{Cluster, Memory, by_name, pools};

const EPOCH: u64 = 3;

fn named(name: &str) -> Option<GroupSnapshotRef> {
    Some(GroupSnapshotRef { id: String::new(), name: name.into() })
}

/// Answer of a target to a command.
type Behaviour = fn(&Told) -> Option<Ended>;

fn well(command: &Told) -> Option<Ended> {
    Some(match command.clone() {
        Told::HoldPoint(_) => Ended::PointHeld(PointHeld {}),
        Told::CutPoint(cut) => {
            Ended::PointCut(PointCut { snapshot_id: cut.snapshot_id, lsn: 7, epoch: EPOCH })
        }
        Told::ReleasePoint(_) => Ended::PointReleased(PointReleased { unbroken: true }),
        Told::ConfirmSnapshot(confirm) => Ended::SnapshotMade(SnapshotMade {
            snapshot_id: confirm.snapshot_id,
            lsn: 7,
            size_bytes: 1 << 30,
            epoch: Some(EPOCH),
            chain: Some(9),
            ..Default::default()
        }),
        Told::RemoveSnapshot(remove) => {
            Ended::SnapshotRemoved(SnapshotRemoved { snapshot_id: remove.snapshot_id })
        }
        other => panic!("a member is never made alone: {other:?}"),
    })
}

impl Cluster {
    async fn group(&self, name: &str, volumes: &[&str]) -> Result<Arc<GroupRecord>, Error> {
        let volumes: Vec<_> = volumes.iter().map(|name| by_name(name).unwrap()).collect();
        self.controller.snapshots.groups.create(name, &volumes).await
    }

    fn found(&self, name: &str) -> Option<Arc<GroupRecord>> {
        self.controller.snapshots.groups.get(named(name).as_ref()).ok()
    }

    fn told(&self, node: &str) -> Vec<TargetCommand> {
        let mut stream = self.controller.snapshots.commands.of_node(node);
        stream.next(Instant::now(), b"").0
    }

    /// Both targets take their commands for as long as there are any, and the controller looks.
    async fn go_on(&self, behaviours: [Behaviour; 2]) -> Result<(), Error> {
        // From here on the controller knows what the targets know.
        for node in ["n1", "n2"] {
            self.told(node);
        }
        let mut idle = 0;
        while idle < 4 {
            self.controller.snapshots.groups.look_at_all(Instant::now()).await?;
            let mut any = false;
            for (node, behaviour) in ["n1", "n2"].into_iter().zip(behaviours) {
                for command in self.told(node) {
                    let Some(what) = behaviour(command.what.as_ref().unwrap()) else { continue };
                    any = true;
                    let outcome = CommandOutcome {
                        id: command.id,
                        node: node.into(),
                        volume_id: command.volume_id,
                        what: Some(what),
                    };
                    self.controller.snapshots.commands.ended(&outcome).await?;
                }
            }
            idle = if any { 0 } else { idle + 1 };
        }
        self.controller.snapshots.groups.look_at_all(Instant::now()).await
    }

    fn snapshots(&self) -> Vec<(String, SnapshotPhase)> {
        let all = self.controller.snapshots.catalog.list(None, 0, "", false, |_| true).unwrap().0;
        all.iter().map(|snapshot| (snapshot.name.clone(), snapshot.phase)).collect()
    }
}

/// Volumes a and b, which targets on n1 and n2 serve.
async fn served() -> Cluster {
    let mut cluster = Cluster::with(Memory::new(), pools(1..=3)).await;
    for (name, node) in [("a", "n1"), ("b", "n2")] {
        cluster.create(name).await;
        cluster.attach(name, node).await.unwrap();
        cluster.open_volume(cluster.volume(name).id.0, node, 9).await;
        cluster.serving(name, &[]).await;
    }
    cluster
}

#[tokio::test]
async fn a_group_is_ready_once_all_targets_have_held_cut_and_released_and_a_repeat_finds_it() {
    let cluster = served().await;
    let wished = cluster.group("g", &["a", "b"]).await.unwrap();
    assert_eq!(wished.phase, GroupPhase::Wished);
    cluster.go_on([well, well]).await.unwrap();
    let ready = cluster.found("g").unwrap();
    assert_eq!((ready.phase, ready.id), (GroupPhase::Ready, wished.id));
    assert!(ready.cut_ms() > 0 && ready.members.iter().all(|m| m.cut.unwrap().chain == 9));
    let mut all = cluster.snapshots();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(all, ["g-a", "g-b"].map(|name| (name.to_owned(), SnapshotPhase::Ready)));
    assert_eq!(cluster.group("g", &["b", "a"]).await.unwrap(), ready, "the same request");
    let refused = cluster.group("g", &["a"]).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    assert!(refused.to_string().contains("quoin snapshot group delete"), "{refused}");
    assert!(cluster.reasons().contains(&"SnapshotCreated".to_owned()));
}

#[tokio::test]
async fn every_target_is_told_one_step_and_the_next_only_once_all_have_taken_it() {
    let cluster = served().await;
    cluster.group("g", &["a", "b"]).await.unwrap();
    cluster.told("n1");
    cluster.told("n2");
    cluster.controller.snapshots.groups.look_at_all(Instant::now()).await.unwrap();
    let kinds = |node: &str| -> Vec<&'static str> {
        let kind = |command: TargetCommand| match command.what.unwrap() {
            Told::HoldPoint(_) => "hold",
            Told::CutPoint(_) => "cut",
            Told::ReleasePoint(_) => "release",
            Told::ConfirmSnapshot(_) => "confirm",
            _ => "other",
        };
        cluster.told(node).into_iter().map(kind).collect()
    };
    for step in ["hold", "cut", "release", "confirm"] {
        assert_eq!((kinds("n1"), kinds("n2")), (vec![step], vec![step]));
        for (n, node) in ["n1", "n2"].into_iter().enumerate() {
            for command in cluster.told(node) {
                let outcome = CommandOutcome {
                    id: command.id,
                    node: node.into(),
                    volume_id: command.volume_id,
                    what: well(command.what.as_ref().unwrap()),
                };
                cluster.controller.snapshots.commands.ended(&outcome).await.unwrap();
                // A repeat that comes late changes nothing.
                cluster.controller.snapshots.commands.ended(&outcome).await.unwrap();
            }
            if n == 0 {
                assert_eq!((kinds("n1"), kinds("n2")), (vec![], vec![step]));
            }
        }
    }
    cluster.controller.snapshots.groups.look_at_all(Instant::now()).await.unwrap();
    assert_eq!(cluster.found("g").unwrap().phase, GroupPhase::Ready);
}

#[tokio::test]
async fn steps_are_sent_again_soon_and_only_to_the_target_of_their_volume() {
    let cluster = served().await;
    cluster.told("n2");
    let mut stream = cluster.controller.snapshots.commands.of_node("n1");
    cluster.group("g", &["a", "b"]).await.unwrap();
    cluster.controller.snapshots.groups.look_at_all(Instant::now()).await.unwrap();
    let begin = Instant::now();
    let mut at = |ms| stream.next(begin + Duration::from_millis(ms), b"").0.len();
    assert_eq!((at(0), at(199), at(200), at(399), at(400)), (1, 0, 1, 0, 1));
    let [command] = &cluster.told("n2")[..] else { panic!("one command") };
    // The other node says that it was done.
    let outcome = CommandOutcome {
        id: command.id.clone(),
        node: "n1".into(),
        volume_id: command.volume_id.clone(),
        what: well(command.what.as_ref().unwrap()),
    };
    cluster.controller.snapshots.commands.ended(&outcome).await.unwrap();
    assert_eq!(cluster.told("n2").len(), 1);
}

/// Proves CSI-GROUPCREATE-10, CSI-GROUPCREATE-21: by the reason that is known.
#[tokio::test]
async fn a_group_that_cannot_be_cut_at_one_point_is_given_up_and_leaves_nothing() {
    let broken: Behaviour = |command| match command {
        Told::ReleasePoint(_) => Some(Ended::PointReleased(PointReleased { unbroken: false })),
        other => well(other),
    };
    let lost: Behaviour = |command| match command {
        Told::ConfirmSnapshot(confirm) => {
            Some(Ended::SnapshotGone(SnapshotGone { snapshot_id: confirm.snapshot_id.clone() }))
        }
        other => well(other),
    };
    let another_cut: Behaviour = |command| match well(command) {
        Some(Ended::SnapshotMade(made)) => {
            Some(Ended::SnapshotMade(SnapshotMade { lsn: 8, ..made }))
        }
        other => other,
    };
    let too_many: Behaviour = |command| match command {
        Told::CutPoint(_) => Some(Ended::Refused(CommandRefused {
            reason: command_refused::Reason::TooManySnapshots.into(),
            message: String::new(),
        })),
        other => well(other),
    };
    for (n, (behaviour, code)) in [
        (broken, tonic::Code::Unavailable),
        (lost, tonic::Code::Unavailable),
        (another_cut, tonic::Code::Unavailable),
        (too_many, tonic::Code::ResourceExhausted),
    ]
    .into_iter()
    .enumerate()
    {
        let cluster = served().await;
        let group = cluster.group("g", &["a", "b"]).await.unwrap();
        for _ in 0..8 {
            cluster.go_on([well, behaviour]).await.unwrap();
        }
        assert!(cluster.found("g").is_none(), "case {n}");
        let groups = &cluster.controller.snapshots.groups;
        let error = groups.cut(group, Duration::ZERO).await.unwrap_err();
        assert_eq!(error.code(), code, "case {n}: {error}");
        assert!(error.to_string().contains("\"b\""), "it names the volume: {error}");
        assert!(cluster.snapshots().is_empty(), "case {n}");
        cluster.go_on([well, well]).await.unwrap();
        assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new(), "case {n}");
        assert_eq!(cluster.store.keys("group"), Vec::<String>::new(), "case {n}");
        assert!(cluster.reasons().contains(&"GroupSnapshotGivenUp".to_owned()));
    }
}

#[tokio::test]
async fn an_attempt_that_was_broken_is_followed_by_one_with_ids_of_its_own() {
    let cluster = served().await;
    cluster.group("g", &["a", "b"]).await.unwrap();
    let first = cluster.found("g").unwrap();
    static WAS_BROKEN: AtomicBool = AtomicBool::new(false);
    let broken: Behaviour = |command| match command {
        Told::CutPoint(_) if !WAS_BROKEN.swap(true, Ordering::Relaxed) => {
            Some(Ended::PointReleased(PointReleased { unbroken: false }))
        }
        Told::RemoveSnapshot(_) => None,
        other => well(other),
    };
    let mute: Behaviour = |command| match command {
        Told::RemoveSnapshot(_) => None,
        other => well(other),
    };
    cluster.go_on([mute, broken]).await.unwrap();
    assert_eq!(cluster.store.keys("snapshot/").len(), 4, "the first ones wait for their deletion");
    cluster.go_on([well, well]).await.unwrap();
    cluster.go_on([well, well]).await.unwrap();
    let ready = cluster.found("g").unwrap();
    assert_eq!((ready.phase, ready.id), (GroupPhase::Ready, first.id));
    for (before, after) in first.members.iter().zip(&ready.members) {
        assert_ne!(before.snapshot, after.snapshot);
    }
    assert_eq!(cluster.store.keys("snapshot/").len(), 2, "those of the first attempt are gone");
}

#[tokio::test]
async fn the_next_controller_gives_up_what_was_under_way_and_completes_what_was_decided() {
    let mut cluster = served().await;
    cluster.group("g", &["a", "b"]).await.unwrap();
    let until_cut: Behaviour = |command| match command {
        Told::ReleasePoint(_) => None,
        other => well(other),
    };
    cluster.go_on([until_cut, until_cut]).await.unwrap();
    cluster.restart().await;
    for name in ["a", "b"] {
        cluster.serving(name, &[]).await;
    }
    cluster.go_on([well, well]).await.unwrap();
    assert!(cluster.found("g").is_none() && cluster.snapshots().is_empty());
    assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new());
    assert!(cluster.reasons().contains(&"GroupSnapshotGivenUp".to_owned()));
    // Of the same name, by the next controller.
    cluster.group("g", &["a", "b"]).await.unwrap();
    cluster.go_on([well, well]).await.unwrap();
    assert_eq!(cluster.found("g").unwrap().phase, GroupPhase::Ready);
    cluster.restart().await;
    cluster.go_on([well, well]).await.unwrap();
    assert_eq!(cluster.snapshots().len(), 2);
}

#[tokio::test]
async fn no_hold_begins_before_every_volume_is_served() {
    let mut cluster = served().await;
    cluster.create("c").await;
    cluster.group("g", &["a", "c"]).await.unwrap();
    for _ in 0..3 {
        cluster.controller.snapshots.groups.look_at_all(Instant::now()).await.unwrap();
        assert!(cluster.told("n1").is_empty());
    }
    cluster.attach("c", "n2").await.unwrap();
    cluster.open_volume(cluster.volume("c").id.0, "n2", 9).await;
    cluster.serving("c", &[]).await;
    cluster.go_on([well, well]).await.unwrap();
    assert_eq!(cluster.found("g").unwrap().phase, GroupPhase::Ready);
}

/// Proves CSI-GROUPCREATE-22, CSI-GROUPDELETE-10, CSI-DELETESNAPSHOT-06.
#[tokio::test]
async fn a_member_is_not_deleted_alone_and_a_group_with_all_of_its_snapshots() {
    let cluster = served().await;
    cluster.group("g", &["a", "b"]).await.unwrap();
    cluster.go_on([well, well]).await.unwrap();
    let member = Some(SnapshotRef { id: String::new(), name: "g-a".into() });
    let refused = cluster.controller.snapshots.catalog.delete(member.as_ref()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    assert!(refused.to_string().contains("quoin snapshot group delete"), "{refused}");
    assert_eq!(cluster.snapshots().len(), 2);
    for _ in 0..2 {
        cluster.controller.snapshots.groups.delete(named("g").as_ref()).await.unwrap();
    }
    assert!(cluster.found("g").is_none() && cluster.snapshots().is_empty());
    cluster.go_on([well, well]).await.unwrap();
    assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new());
    // With no place left in one volume nothing of the other is begun.
    let makes: Behaviour = |command| match command.clone() {
        Told::MakeSnapshot(make) => Some(Ended::SnapshotMade(SnapshotMade {
            snapshot_id: make.snapshot_id,
            lsn: 7,
            ..Default::default()
        })),
        _ => well(command),
    };
    let most = quoin_replication::primary::USER_SNAPSHOTS_MAX;
    for n in 0..most {
        let snapshots = &cluster.controller.snapshots.catalog;
        snapshots.create(by_name("b").as_ref(), &format!("s{n}")).await.unwrap();
    }
    cluster.go_on([makes, makes]).await.unwrap();
    let refused = cluster.group("h", &["a", "b"]).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    assert_eq!(cluster.snapshots().len(), most);
    assert!(cluster.found("h").is_none());
    let one = Some(SnapshotRef { id: String::new(), name: "s0".into() });
    cluster.controller.snapshots.catalog.delete(one.as_ref()).await.unwrap();
    // Its place is free once its target has deleted it.
    cluster.go_on([makes, makes]).await.unwrap();
    cluster.group("h", &["a", "b"]).await.unwrap();
}

#[tokio::test]
async fn a_group_that_is_deleted_while_it_is_made_releases_its_targets_first() {
    let cluster = served().await;
    let group = cluster.group("g", &["a", "b"]).await.unwrap();
    let holds: Behaviour = |command| match command {
        Told::HoldPoint(_) => well(command),
        _ => None,
    };
    cluster.go_on([holds, holds]).await.unwrap();
    cluster.controller.snapshots.groups.delete(named("g").as_ref()).await.unwrap();
    assert!(cluster.found("g").is_none());
    for node in ["n1", "n2"] {
        let [command] = &cluster.told(node)[..] else { panic!("{:?}", cluster.told(node)) };
        assert!(matches!(command.what, Some(Told::ReleasePoint(_))), "{command:?}");
    }
    cluster.go_on([well, well]).await.unwrap();
    cluster.go_on([well, well]).await.unwrap();
    assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new());
    assert_eq!(cluster.store.keys("group"), Vec::<String>::new());
    let groups = &cluster.controller.snapshots.groups;
    assert_eq!(groups.cut(group, Duration::ZERO).await.unwrap_err().code(), tonic::Code::Aborted);
}

#[tokio::test]
async fn what_cannot_be_a_group_is_refused_with_the_rule() {
    let cluster = served().await;
    for (name, volumes, word) in [
        ("", &["a"][..], "needs one"),
        ("g", &[], "1 to 128"),
        ("g", &["a", "a"], "twice"),
        ("a\u{1}", &["a"], "control character"),
    ] {
        let refused = cluster.group(name, volumes).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        assert!(refused.to_string().contains(word), "{refused}");
    }
    let refused = cluster.group("g", &["a", "nosuch"]).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
    assert!(cluster.snapshots().is_empty());
    assert_eq!(cluster.store.keys("group"), Vec::<String>::new());
}

#[tokio::test]
async fn a_crash_at_any_write_of_a_groups_life_leaves_it_whole_or_nothing_of_it() {
    for last_write_lands in [false, true] {
        for writes in 0.. {
            let mut cluster = served().await;
            cluster.store.fail_at(writes, last_write_lands, true);
            let mut crashed = false;
            for step in 0..4 {
                while let Err(error) = life(&cluster, step).await {
                    assert!(cluster.store.crashed(), "step {step} after {writes}: {error}");
                    crashed = true;
                    cluster.restart().await;
                    for name in ["a", "b"] {
                        cluster.serving(name, &[]).await;
                    }
                }
                let all = cluster.snapshots();
                let ready = all.iter().filter(|(_, phase)| *phase == SnapshotPhase::Ready).count();
                let is_ready = cluster.found("g").is_some_and(|g| g.phase == GroupPhase::Ready);
                assert!(
                    ready == if is_ready { 2 } else { 0 },
                    "step {step} after {writes}: {all:?}"
                );
            }
            let left = [cluster.store.keys("snapshot"), cluster.store.keys("group")].concat();
            assert_eq!(left, Vec::<String>::new(), "after {writes}");
            if !crashed {
                assert!(writes > 10, "only {writes} writes were seen");
                break;
            }
        }
    }
}

async fn life(cluster: &Cluster, step: usize) -> Result<(), Error> {
    match step {
        0 => drop(cluster.group("g", &["a", "b"]).await?),
        1 => cluster.go_on([well, well]).await?,
        2 => cluster.controller.snapshots.groups.delete(named("g").as_ref()).await?,
        _ => {
            cluster.go_on([well, well]).await?;
            cluster.go_on([well, well]).await?;
        }
    }
    Ok(())
}
