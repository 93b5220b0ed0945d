//! Reverts, and the content of snapshots part by part: what users ask for, what targets are told, and
//! what becomes of their answers.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::command_outcome::What as Ended;
use quoin_api::control::target_command::What as Told;
use quoin_api::control::{
    CommandOutcome, CommandRefused, MeasureSnapshotRequest, NodeReport, PullPart,
    PullSnapshotRequest, PulledPart, SnapshotPart, SnapshotRange, command_refused,
};
use quoin_cluster::records::{RevertPhase, RevertRecord};
use quoin_control::Error;
use quoin_types::SnapshotId;
use tokio::time::Instant;

use crate::cluster::{Cluster, by_name};
use crate::snapshots::{named, outcome};

const NOW: Duration = Duration::ZERO;

impl Cluster {
    async fn revert(&self, volume: &str, snapshot: &str) -> Result<Arc<RevertRecord>, Error> {
        self.revert_by(volume, snapshot, SnapshotId(rand::random())).await
    }

    async fn revert_by(
        &self,
        volume: &str,
        snapshot: &str,
        attempt: SnapshotId,
    ) -> Result<Arc<RevertRecord>, Error> {
        let reverts = &self.controller.snapshots.reverts;
        reverts.begin(by_name(volume).as_ref(), named(snapshot).as_ref(), attempt).await
    }

    async fn now(&self, revert: &Arc<RevertRecord>) -> Arc<RevertRecord> {
        self.controller.snapshots.reverts.ended(revert.clone(), NOW).await.unwrap()
    }

    /// The volume has a snapshot, is detached, and a target is lent to it by the next look.
    async fn detached() -> (Cluster, String) {
        let mut cluster = Cluster::new().await;
        cluster.create("db").await;
        for n in 1..=3 {
            let report = NodeReport { node: format!("h{n}"), ..NodeReport::default() };
            cluster.controller.reports.node(&report).await.unwrap();
        }
        cluster.snap("db", "s").await.unwrap();
        let node = cluster.lent().await;
        cluster.obey(&node).await.unwrap();
        (cluster, node)
    }

    /// Looks until a target is lent to the volume, which serves it then.
    async fn lent(&self) -> String {
        self.look().await;
        let node = self.volume("db").opened.owner.clone().expect("a target is lent");
        let incarnation = 100 + u128::from(self.volume("db").opened.epoch);
        self.open_volume(self.volume("db").id.0, &node, incarnation).await;
        self.serving("db", &[]).await;
        node
    }

    async fn look(&self) {
        self.controller.work.tender.look_at_all(Instant::now()).await.unwrap();
    }

    async fn refuse(&self, node: &str, reason: command_refused::Reason) {
        let [command] = &self.commands(node)[..] else { panic!("one command") };
        let refused = CommandRefused { reason: reason.into(), message: "in words".into() };
        let outcome =
            CommandOutcome { what: Some(Ended::Refused(refused)), ..outcome(node, command) };
        self.controller.snapshots.commands.ended(&outcome).await.unwrap();
    }
}

#[tokio::test]
async fn a_volume_goes_back_while_nobody_has_it_and_nobody_gets_it_meanwhile() {
    let (cluster, node) = Cluster::detached().await;
    assert!(!cluster.opens_to_write("db", &node, 6).await, "a snapshot is made by what reads");
    let wished = cluster.revert("db", "s").await.unwrap();
    assert_eq!(wished.phase, RevertPhase::Wished);
    let repeated = cluster.revert_by("db", "s", wished.attempt.0).await.unwrap();
    assert_eq!(repeated, wished, "the same request");
    let other = cluster.revert("db", "s").await.unwrap_err();
    assert_eq!(other.code(), tonic::Code::Unavailable, "{other}");
    assert!(other.to_string().contains(&format!("--id {}", wished.attempt.0)), "{other}");
    let refused = cluster.attach("db", "n1").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable, "{refused}");
    let [command] = &cluster.commands(&node)[..] else { panic!("one command") };
    assert!(matches!(command.what, Some(Told::RevertTo(_))));
    assert!(cluster.opens_to_write("db", &node, 7).await, "this work alone changes the content");
    let of_another = outcome("n2", command);
    cluster.controller.snapshots.commands.ended(&of_another).await.unwrap();
    assert_eq!(cluster.now(&wished).await.phase, RevertPhase::Wished);
    cluster.obey(&node).await.unwrap();
    let done = cluster.now(&wished).await;
    assert_eq!((done.phase, done.lsn), (RevertPhase::Done, 12));
    assert!(cluster.reasons().contains(&"VolumeReverted".to_owned()));
    assert_eq!(cluster.shown("db").revert.unwrap().phase, "Done");
    cluster.attach("db", "n1").await.unwrap();
}

#[tokio::test]
async fn the_record_of_a_revert_in_the_history_is_removed_before_the_next_one_begins() {
    let (cluster, node) = Cluster::detached().await;
    let first = cluster.revert("db", "s").await.unwrap();
    cluster.obey(&node).await.unwrap();
    let again = cluster.revert("db", "s").await.unwrap_err();
    assert_eq!(again.code(), tonic::Code::Unavailable, "{again}");
    let [remove] = &cluster.commands(&node)[..] else { panic!("one command") };
    assert!(matches!(remove.what, Some(Told::RemoveSnapshot(_))));
    assert_eq!(remove.id, first.attempt.0.to_string());
    cluster.obey(&node).await.unwrap();
    assert!(cluster.commands(&node).is_empty());
    let second = cluster.revert("db", "s").await.unwrap();
    assert_ne!(second.attempt, first.attempt, "an attempt has an id of its own");
    assert_eq!(cluster.store.keys("revert/").len(), 1);
}

#[tokio::test]
async fn a_revert_that_is_sent_again_begins_no_second_one_whatever_came_after_it() {
    let (cluster, node) = Cluster::detached().await;
    let reverts = &cluster.controller.snapshots.reverts;
    let first = cluster.revert("db", "s").await.unwrap();
    cluster.obey(&node).await.unwrap();
    cluster.obey(&node).await.unwrap();
    let done = cluster.now(&first).await;
    assert!(done.phase == RevertPhase::Done && !done.is_open());
    // The volume is used meanwhile, and the answer was lost.
    cluster.attach("db", "n1").await.unwrap();
    assert_eq!(cluster.revert_by("db", "s", first.attempt.0).await.unwrap(), done);
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    assert_eq!(cluster.revert_by("db", "s", first.attempt.0).await.unwrap(), done);
    assert_eq!(reverts.get(by_name("db").as_ref(), first.attempt.0).unwrap(), done);

    // Another one has followed it.
    let second = cluster.revert("db", "s").await.unwrap();
    let node = cluster.lent().await;
    cluster.obey(&node).await.unwrap();
    cluster.obey(&node).await.unwrap();
    let late = cluster.revert_by("db", "s", first.attempt.0).await.unwrap_err();
    assert_eq!(late.code(), tonic::Code::FailedPrecondition, "{late}");
    assert_eq!(cluster.now(&second).await.phase, RevertPhase::Done);
    let unknown = reverts.get(by_name("db").as_ref(), SnapshotId(9)).unwrap_err();
    assert_eq!(unknown.code(), tonic::Code::NotFound, "{unknown}");
    // Its hidden snapshot is removed under the id.
    let taken = cluster.snapshot("s").unwrap().id.0;
    let refused = cluster.revert_by("db", "s", taken).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
}

#[tokio::test]
async fn a_volume_that_somebody_has_stays_and_so_does_one_of_another_snapshot() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.create("other").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.made("db", "n1", "s").await;
    let refused = cluster.revert("db", "s").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.to_string().contains("n1"), "{refused}");
    let refused = cluster.revert("other", "s").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    let refused = cluster.revert("db", "nosuch").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
    cluster.snap("db", "uncut").await.unwrap();
    let refused = cluster.revert("db", "uncut").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    assert!(cluster.store.keys("revert/").is_empty());
}

#[tokio::test]
async fn a_snapshot_that_is_deleted_meanwhile_ends_the_revert_with_that_reason() {
    let (cluster, node) = Cluster::detached().await;
    let wished = cluster.revert("db", "s").await.unwrap();
    cluster.refuse(&node, command_refused::Reason::NoSnapshot).await;
    let failed = cluster.now(&wished).await;
    assert_eq!(failed.phase, RevertPhase::Failed);
    assert!(failed.failure.contains("was deleted meanwhile"), "{}", failed.failure);
    assert!(cluster.commands(&node).is_empty());
    assert!(cluster.reasons().contains(&"VolumeRevertFailed".to_owned()));
    cluster.attach("db", "n1").await.unwrap();
}

#[tokio::test]
async fn a_refused_revert_has_failed_once_no_repeat_of_its_command_is_on_its_way() {
    let (cluster, node) = Cluster::detached().await;
    let wished = cluster.revert("db", "s").await.unwrap();
    cluster.refuse(&node, command_refused::Reason::TooManySnapshots).await;
    assert!(cluster.now(&wished).await.is_under_way());
    assert!(cluster.attach("db", "n1").await.is_err());
    let [remove] = &cluster.commands(&node)[..] else { panic!("one command") };
    assert!(matches!(remove.what, Some(Told::RemoveSnapshot(_))));
    cluster.obey(&node).await.unwrap();
    let failed = cluster.now(&wished).await;
    assert_eq!((failed.phase, failed.failure.as_str()), (RevertPhase::Failed, "in words"));
    cluster.attach("db", "n1").await.unwrap();
}

#[tokio::test]
async fn the_use_before_a_revert_is_over_also_for_the_node_that_had_the_volume() {
    let (cluster, node) = Cluster::detached().await;
    cluster.attach("db", "n1").await.unwrap();
    let before = cluster.open_volume(cluster.volume("db").id.0, "n1", 3).await;
    let used = cluster.volume("db").used.since_epoch;
    assert!(used <= before.0);
    let unpublished = by_name("db");
    let attachments = &cluster.controller.volumes.attachments;
    attachments.unpublish(unpublished.as_ref(), "n1").await.unwrap();
    cluster.revert("db", "s").await.unwrap();
    let lent = cluster.lent().await;
    cluster.obey(&lent).await.unwrap();
    cluster.attach("db", "n1").await.unwrap();
    let used = cluster.volume("db").used.clone();
    assert_eq!(used.by, "n1");
    assert!(used.since_epoch > before.0, "what n1 cached before is of another content: {used:?}");
    assert!(!node.is_empty());
}

#[tokio::test]
async fn a_volume_that_goes_back_is_lent_a_target_until_that_is_done() {
    let (cluster, _) = Cluster::detached().await;
    cluster.look().await;
    assert!(cluster.volume("db").opened.owner.is_none(), "its snapshot is made");
    cluster.revert("db", "s").await.unwrap();
    let node = cluster.lent().await;
    cluster.obey(&node).await.unwrap();
    cluster.look().await;
    assert!(cluster.volume("db").opened.owner.is_some(), "its record is to be removed yet");
    cluster.obey(&node).await.unwrap();
    cluster.look().await;
    assert!(cluster.volume("db").opened.owner.is_none());
}

#[tokio::test]
async fn the_last_revert_of_a_volume_goes_with_it() {
    let (mut cluster, node) = Cluster::detached().await;
    cluster.revert("db", "s").await.unwrap();
    cluster.obey(&node).await.unwrap();
    let catalog = &cluster.controller.snapshots.catalog;
    catalog.delete(named("s").as_ref()).await.unwrap();
    cluster.obey(&node).await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    cluster.settle().await.unwrap();
    cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
    assert!(cluster.store.keys("revert/").is_empty());
}

fn asked(snapshot: &str, offset: u64) -> PullSnapshotRequest {
    PullSnapshotRequest { snapshot: named(snapshot), offset, ..PullSnapshotRequest::default() }
}

/// A volume that is attached to n1, with two snapshots.
async fn with_two() -> Cluster {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.snap("db", "s").await.unwrap();
    for (name, lsn) in [("s", 7), ("t", 9)] {
        cluster.snap("db", name).await.unwrap();
        let commands = cluster.commands("n1");
        let [command] = &commands[..] else { panic!("one command") };
        let mut outcome = outcome("n1", command);
        let Some(Ended::SnapshotMade(made)) = &mut outcome.what else { panic!("{outcome:?}") };
        made.lsn = lsn;
        cluster.controller.snapshots.commands.ended(&outcome).await.unwrap();
    }
    cluster
}

/// Asks for a part, whose target answers with `answer` of the command's id.
async fn pulled(
    cluster: &Cluster,
    asked: PullSnapshotRequest,
    answer: impl Fn(String) -> PulledPart,
) -> Result<SnapshotPart, Error> {
    let asking = cluster.controller.snapshots.history.pull(&asked);
    answered(cluster, asking, |_, id| answer(id)).await
}

/// Waits for an answer while the target of n1 answers each of its commands with a part.
async fn answered<T>(
    cluster: &Cluster,
    asking: impl Future<Output = T>,
    answer: impl Fn(&PullPart, String) -> PulledPart,
) -> T {
    let answering = async {
        let mut begun = cluster.controller.snapshots.commands.of_node("n1").begun();
        loop {
            for command in cluster.commands("n1") {
                let Some(Told::PullPart(pull)) = &command.what else { panic!("{command:?}") };
                let part = PulledPart {
                    node: "n1".into(),
                    volume_id: command.volume_id.clone(),
                    ..answer(pull, command.id.clone())
                };
                cluster.controller.snapshots.commands.part(part).unwrap();
            }
            begun.changed().await.unwrap();
        }
    };
    tokio::select! {
        outcome = asking => outcome,
        () = answering => unreachable!("it goes on for ever"),
    }
}

/// Ranges as a target names them, of blocks by their first one and their end.
fn ranges(blocks: &[(u64, u64)]) -> Vec<SnapshotRange> {
    let range = |(first, end): &(u64, u64)| SnapshotRange {
        offset: first * 4096,
        length: (end - first) * 4096,
        ..SnapshotRange::default()
    };
    blocks.iter().map(range).collect()
}

#[tokio::test]
async fn a_snapshot_is_measured_between_the_one_before_it_and_the_one_or_the_volume_after_it() {
    let cluster = with_two().await;
    let id = |name: &str| cluster.snapshot(name).unwrap().id.0.to_string();
    let (s, t) = (id("s"), id("t"));
    let measure = async |name: &str, offset| {
        let asked = MeasureSnapshotRequest { snapshot: named(name), offset };
        let answer = |pull: &PullPart, id: String| {
            let views = (pull.since_snapshot_id.as_str(), pull.snapshot_id.as_str());
            let (blocks, next) = match (views, pull.cursor_block) {
                // All that s has, which is all that is new in it: the older one is none.
                (("", to), _) if to == s => (ranges(&[(0, 10), (20, 30)]), None),
                // t has one part after the other.
                (("", to), 0) if to == t => (ranges(&[(0, 12)]), Some(12)),
                (("", to), 12) if to == t => (ranges(&[(20, 30)]), None),
                ((since, to), 0) if (since, to) == (&s, &t) => (ranges(&[(4, 6)]), Some(6)),
                ((since, to), 6) if (since, to) == (&s, &t) => (ranges(&[(8, 12), (25, 26)]), None),
                ((since, to), 12) if (since, to) == (&s, &t) => (ranges(&[(25, 26)]), None),
                ((since, ""), 0) if since == t => (ranges(&[(5, 6), (11, 21)]), None),
                ((since, ""), 12) if since == t => (ranges(&[(12, 21), (25, 90)]), None),
                other => panic!("{other:?}"),
            };
            let next_block = next;
            PulledPart { id, ranges: blocks, next_block, ..PulledPart::default() }
        };
        let asking = cluster.controller.snapshots.history.measure(&asked);
        let found = answered(&cluster, asking, answer).await.unwrap();
        assert_eq!(found.size_bytes, 1 << 30);
        (found.data_bytes / 4096, found.exclusive_bytes / 4096, found.next_offset)
    };
    assert_eq!(measure("s", 0).await, (20, 2 + 2 + 1, None));
    // Blocks 5 and 11: what changed up to block 12 takes two parts.
    assert_eq!(measure("t", 0).await, (12, 2, Some(12 * 4096)));
    assert_eq!(measure("t", 12 * 4096).await, (10, 1, None));
    assert_eq!(measure("t", 1 << 30).await, (0, 0, None), "its end needs nobody");
}

#[tokio::test]
async fn a_part_of_a_snapshot_is_what_the_target_of_its_volume_answers() {
    let cluster = with_two().await;
    let range = SnapshotRange { offset: 8192, length: 4096, ..SnapshotRange::default() };
    let ranges = vec![range];
    let answer = |id: String| PulledPart {
        id,
        ranges: ranges.clone(),
        next_block: Some(5),
        ..PulledPart::default()
    };
    let part = pulled(&cluster, asked("s", 4096), answer).await.unwrap();
    assert_eq!((part.ranges.len(), part.next_offset), (1, Some(5 * 4096)));
    assert_eq!((part.size_bytes, part.encrypted), (1 << 30, false));
    assert!(cluster.commands("n1").is_empty(), "nothing of it is left");
    // The end of the snapshot needs nobody.
    let end = cluster.controller.snapshots.history.pull(&asked("s", 1 << 30)).await.unwrap();
    assert!(end.ranges.is_empty() && end.next_offset.is_none());
}

#[tokio::test]
async fn what_is_no_part_of_a_snapshot_is_refused_with_the_field_and_the_rule() {
    let mut cluster = with_two().await;
    cluster.create("other").await;
    cluster.attach("other", "n2").await.unwrap();
    cluster.made("other", "n2", "o").await;
    let history = &cluster.controller.snapshots.history;
    let code =
        |asked: PullSnapshotRequest| async move { history.pull(&asked).await.unwrap_err().code() };
    let since = |snapshot, since| PullSnapshotRequest { since: named(since), ..asked(snapshot, 0) };
    assert_eq!(code(asked("nosuch", 0)).await, tonic::Code::NotFound);
    assert_eq!(code(since("s", "nosuch")).await, tonic::Code::NotFound);
    assert_eq!(code(since("s", "t")).await, tonic::Code::InvalidArgument, "in the wrong order");
    assert_eq!(code(since("s", "s")).await, tonic::Code::InvalidArgument);
    assert_eq!(code(since("s", "o")).await, tonic::Code::InvalidArgument, "of another volume");
    for offset in [1, (1 << 30) + 4096, u64::MAX] {
        assert_eq!(code(asked("s", offset)).await, tonic::Code::OutOfRange);
    }
    assert_eq!(code(PullSnapshotRequest::default()).await, tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn a_target_s_refusal_of_a_part_says_what_is_lost_or_gone_and_nonsense_is_not_passed_on() {
    let cluster = with_two().await;
    let refused = |reason: command_refused::Reason| {
        move |id: String| PulledPart {
            id,
            refused: Some(CommandRefused { reason: reason.into(), message: "byte 4096".into() }),
            ..PulledPart::default()
        }
    };
    let gone = refused(command_refused::Reason::NoSnapshot);
    let error = pulled(&cluster, asked("s", 0), gone).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::NotFound);
    let lost = refused(command_refused::Reason::Damaged);
    let error = pulled(&cluster, asked("s", 0), lost).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::DataLoss);
    assert!(error.to_string().contains("byte 4096"), "{error}");
    let nonsense = |id: String| PulledPart { id, next_block: Some(0), ..PulledPart::default() };
    let error = pulled(&cluster, asked("s", 0), nonsense).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::Unavailable);
}
