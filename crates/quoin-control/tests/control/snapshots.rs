//! Snapshots: what users ask for, what targets are told, and what is recorded of their answers.

use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use quoin_api::control::command_outcome::What as Ended;
use quoin_api::control::target_command::What as Told;
use quoin_api::control::{
    CommandOutcome, CommandRefused, CreateScheduleRequest, Holding, Keepsake, NodeReport,
    PoolHoldings, SnapshotMade, SnapshotRef, SnapshotRemoved, TargetCommand, VolumeRef,
    VolumeReverted, command_refused,
};
use quoin_cluster::records::{
    ScheduleRecord, SnapshotPhase, SnapshotRecord, VolumePhase, VolumeRecord,
};
use quoin_control::salvage::{RecoverRecords, Told as Holdings};
use quoin_control::store::Store;
use quoin_control::{Error, Verifying};
use tokio::time::Instant;

use crate::cluster::{Cluster, Memory, by_name, pools};

const NOW: Duration = Duration::ZERO;

pub(super) fn named(name: &str) -> Option<SnapshotRef> {
    Some(SnapshotRef { id: String::new(), name: name.into() })
}

pub fn by_id(id: impl ToString) -> Option<VolumeRef> {
    Some(VolumeRef { id: id.to_string(), name: String::new() })
}

impl Cluster {
    pub(super) async fn snap(
        &self,
        volume: &str,
        name: &str,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        self.controller.snapshots.catalog.create(by_name(volume).as_ref(), name).await
    }

    pub(super) fn snapshot(&self, name: &str) -> Option<Arc<SnapshotRecord>> {
        self.controller.snapshots.catalog.get(named(name).as_ref()).ok()
    }

    /// Commands that a stream that begins now sends to a node.
    pub(super) fn commands(&self, node: &str) -> Vec<TargetCommand> {
        self.controller.snapshots.commands.of_node(node).next(Instant::now(), b"").0
    }

    /// The node's target carries out all that it is told.
    pub(super) async fn obey(&self, node: &str) -> Result<usize, Error> {
        let commands = self.commands(node);
        for command in &commands {
            self.controller.snapshots.commands.ended(&outcome(node, command)).await?;
        }
        Ok(commands.len())
    }

    pub(super) async fn made(&self, volume: &str, node: &str, name: &str) -> Arc<SnapshotRecord> {
        self.snap(volume, name).await.unwrap();
        self.obey(node).await.unwrap();
        self.snapshot(name).unwrap()
    }

    /// Makes a snapshot at this place of the volume's history.
    async fn made_at(&self, volume: &str, name: &str, lsn: u64) -> Arc<SnapshotRecord> {
        self.snap(volume, name).await.unwrap();
        let [command] = &self.commands("n1")[..] else { panic!("one command") };
        let mut ended = outcome("n1", command);
        let Some(Ended::SnapshotMade(made)) = &mut ended.what else { panic!("{ended:?}") };
        made.lsn = lsn;
        self.controller.snapshots.commands.ended(&ended).await.unwrap();
        self.snapshot(name).unwrap()
    }
}

pub(super) fn outcome(node: &str, command: &TargetCommand) -> CommandOutcome {
    let what = match command.what.clone().expect("a command") {
        Told::MakeSnapshot(make) => Ended::SnapshotMade(SnapshotMade {
            snapshot_id: make.snapshot_id,
            lsn: 7,
            size_bytes: 1 << 30,
            cut_at: Some(std::time::SystemTime::now().into()),
            ..Default::default()
        }),
        Told::RemoveSnapshot(remove) => {
            Ended::SnapshotRemoved(SnapshotRemoved { snapshot_id: remove.snapshot_id })
        }
        Told::RevertTo(_) => Ended::VolumeReverted(VolumeReverted { lsn: 12 }),
        Told::PullPart(_) => panic!("answered by a call of its own"),
        // Groups have tests of their own.
        step => panic!("{step:?}"),
    };
    CommandOutcome {
        id: command.id.clone(),
        node: node.into(),
        volume_id: command.volume_id.clone(),
        what: Some(what),
    }
}

/// A volume that is attached to n1.
pub async fn attached() -> Cluster {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster
}

#[tokio::test]
async fn a_snapshot_is_ready_once_the_target_of_its_volume_says_so_and_a_repeat_finds_it() {
    let cluster = attached().await;
    let wished = cluster.snap("db", "s").await.unwrap();
    assert_eq!(wished.phase, SnapshotPhase::Wished);
    assert!(cluster.commands("n2").is_empty(), "only the target of the volume is told");
    let [command] = &cluster.commands("n1")[..] else { panic!("one command") };
    assert!(matches!(command.what, Some(Told::MakeSnapshot(_))));
    let of_another = outcome("n2", command);
    cluster.controller.snapshots.commands.ended(&of_another).await.unwrap();
    assert_eq!(cluster.snapshot("s").unwrap().phase, SnapshotPhase::Wished);
    assert_eq!(cluster.obey("n1").await.unwrap(), 1);
    let ready = cluster.snapshot("s").unwrap();
    assert_eq!((ready.phase, ready.id), (SnapshotPhase::Ready, wished.id));
    assert_eq!(ready.cut.unwrap().lsn, 7);
    // As the target says, which cut it after it was asked to.
    assert!(ready.cut_ms() >= ready.wished_ms && ready.cut_ms() < ready.wished_ms + 3_600_000);
    assert!(cluster.commands("n1").is_empty());
    assert_eq!(cluster.snap("db", "s").await.unwrap(), ready, "the same request");
    assert!(cluster.reasons().contains(&"SnapshotCreated".to_owned()));
    let shown = cluster.shown("db");
    assert_eq!((shown.snapshots, shown.newest_snapshot.unwrap().name.as_str()), (1, "s"));
}

#[tokio::test]
async fn a_command_is_sent_again_until_its_outcome_is_recorded_and_not_before_some_time() {
    let cluster = attached().await;
    cluster.snap("db", "s").await.unwrap();
    let mut stream = cluster.controller.snapshots.commands.of_node("n1");
    let begin = Instant::now();
    let mut at = |ms| stream.next(begin + Duration::from_millis(ms), b"").0.len();
    assert_eq!((at(0), at(499), at(500), at(999), at(1000)), (1, 0, 1, 0, 1));
    let (_, pause) = stream.next(begin + Duration::from_millis(1001), b"");
    assert!(pause.is_some(), "it looks again by itself");
    cluster.obey("n1").await.unwrap();
    let (commands, pause) = stream.next(begin + Duration::from_secs(9), b"");
    assert!(commands.is_empty() && pause.is_none());
}

#[tokio::test]
async fn a_name_belongs_to_one_snapshot_of_the_cluster() {
    let mut cluster = attached().await;
    cluster.create("other").await;
    cluster.made("db", "n1", "s").await;
    let refused = cluster.snap("other", "s").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    assert!(refused.to_string().contains("choose another name"), "{refused}");
    for wrong in ["", "a\u{1}"] {
        let refused = cluster.snap("db", wrong).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{wrong:?}");
    }
    let refused = cluster.snap("nosuch", "t").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn a_deleted_snapshot_is_gone_for_users_at_once_and_its_id_is_never_wished_again() {
    let cluster = attached().await;
    let first = cluster.made("db", "n1", "s").await;
    let catalog = &cluster.controller.snapshots.catalog;
    catalog.delete(named("s").as_ref()).await.unwrap();
    catalog.delete(named("s").as_ref()).await.unwrap();
    assert!(cluster.snapshot("s").is_none());
    assert!(catalog.list(None, 0, "", false, |_| true).unwrap().0.is_empty());
    let second = cluster.snap("db", "s").await.unwrap();
    assert_ne!(second.id, first.id, "another attempt has another id");
    let told: Vec<_> = cluster
        .commands("n1")
        .into_iter()
        .map(|command| (command.id, matches!(command.what, Some(Told::MakeSnapshot(_)))))
        .collect();
    let mut expected = vec![(first.id.0.to_string(), false), (second.id.0.to_string(), true)];
    expected.sort();
    assert_eq!(told, expected);
    cluster.obey("n1").await.unwrap();
    assert_eq!(cluster.snapshot("s").unwrap().id, second.id);
    assert_eq!(cluster.store.keys("snapshot/").len(), 1);
}

#[tokio::test]
async fn an_attempt_that_is_deleted_before_its_cut_stays_deleted_when_its_target_answers_late() {
    let cluster = attached().await;
    cluster.snap("db", "s").await.unwrap();
    let [make] = &cluster.commands("n1")[..] else { panic!("one command") };
    cluster.controller.snapshots.catalog.delete(named("s").as_ref()).await.unwrap();
    cluster.controller.snapshots.commands.ended(&outcome("n1", make)).await.unwrap();
    assert!(cluster.snapshot("s").is_none());
    let [remove] = &cluster.commands("n1")[..] else { panic!("one command") };
    assert!(matches!(remove.what, Some(Told::RemoveSnapshot(_))));
    cluster.obey("n1").await.unwrap();
    assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new());
    assert_eq!(cluster.made("db", "n1", "s").await.phase, SnapshotPhase::Ready, "with a place");
}

#[tokio::test]
async fn a_volume_attached_nowhere_is_lent_a_target_until_its_snapshot_is_made() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    for n in 1..=3 {
        let report = NodeReport { node: format!("h{n}"), ..NodeReport::default() };
        cluster.controller.reports.node(&report).await.unwrap();
    }
    cluster.snap("db", "s").await.unwrap();
    let look = |cluster: &Cluster| {
        let tender = cluster.controller.work.tender.clone();
        async move { tender.look_at_all(Instant::now()).await.unwrap() }
    };
    look(&cluster).await;
    let node = cluster.volume("db").opened.owner.clone().expect("a target is lent");
    assert!(cluster.volume("db").attachments.is_empty());
    let epoch = cluster.open_volume(cluster.volume("db").id.0, &node, 9).await;
    cluster.serving("db", &[]).await;
    assert_eq!(cluster.obey(&node).await.unwrap(), 1);
    assert_eq!(cluster.snapshot("s").unwrap().phase, SnapshotPhase::Ready);
    look(&cluster).await;
    let volume = cluster.volume("db");
    assert!(volume.opened.owner.is_none(), "it is taken back: {epoch} {volume:?}");
}

/// Proves CSI-CREATESNAPSHOT-24: of a volume that has no place for another one.
#[tokio::test]
async fn a_refused_attempt_is_given_up_with_the_way_out_and_leaves_nothing() {
    let cluster = attached().await;
    let wished = cluster.snap("db", "s").await.unwrap();
    let [make] = &cluster.commands("n1")[..] else { panic!("one command") };
    let refused = CommandRefused {
        reason: command_refused::Reason::TooManySnapshots.into(),
        message: String::new(),
    };
    let outcome = CommandOutcome { what: Some(Ended::Refused(refused)), ..outcome("n1", make) };
    cluster.controller.snapshots.commands.ended(&outcome).await.unwrap();
    let error = cluster.controller.snapshots.catalog.cut(wished, NOW).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::ResourceExhausted);
    assert!(error.to_string().contains("quoin snapshot delete"), "{error}");
    // A repeat of the command that is on its way may have found a place.
    cluster.obey("n1").await.unwrap();
    assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new());
}

#[tokio::test]
async fn a_volume_has_no_more_snapshots_than_it_has_places_for() {
    let cluster = attached().await;
    let most = quoin_replication::primary::USER_SNAPSHOTS_MAX;
    for n in 0..most {
        cluster.snap("db", &format!("s{n}")).await.unwrap();
    }
    let error = cluster.snap("db", "more").await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::ResourceExhausted);
    assert!(error.to_string().contains("quoin schedule list"), "{error}");
    let mut stream = cluster.controller.snapshots.commands.of_node("n1");
    let mut next = || stream.next(Instant::now(), b"").0.len();
    let at_once = next();
    assert!(at_once < most, "one look sends a bounded number: {at_once}");
    let mut sent = at_once;
    while sent < most {
        let more = next();
        assert!(more > 0 && more <= at_once, "{more} behind {sent}");
        sent += more;
    }
    assert_eq!((sent, next()), (most, 0));
}

#[tokio::test]
async fn pages_lack_no_snapshot_that_was_there_all_the_time_and_have_none_twice() {
    let cluster = attached().await;
    for n in 0..9 {
        cluster.made("db", "n1", &format!("s{n}")).await;
    }
    cluster.snap("db", "not-cut").await.unwrap();
    let catalog = &cluster.controller.snapshots.catalog;
    for volume in [None, by_name("db")] {
        let (first, token) = catalog.list(volume.as_ref(), 4, "", true, |_| true).unwrap();
        assert_eq!(first.len(), 4);
        // The one behind which the next page begins is gone, and others come.
        let last = first.last().unwrap();
        catalog.delete(named(&last.name).as_ref()).await.unwrap();
        cluster.made("db", "n1", &format!("later-{}", last.name)).await;
        let (rest, end) = catalog.list(volume.as_ref(), 0, &token, true, |_| true).unwrap();
        assert_eq!(end, "");
        let names: Vec<_> = first.iter().chain(&rest).map(|s| s.id).collect();
        let mut once = names.clone();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), names.len(), "none twice");
        let all = catalog.list(None, 0, "", true, |_| true).unwrap().0;
        // The first volume command that is obeyed cuts the one that waited for its cut.
        let was_there =
            |s: &Arc<SnapshotRecord>| !s.name.starts_with("later") && s.name != "not-cut";
        assert!(all.iter().filter(|s| was_there(s)).all(|s| names.contains(&s.id)));
        let wrong = format!("{}x", &token[..token.len() - 1]);
        let error = catalog.list(volume.as_ref(), 4, &wrong, true, |_| true).unwrap_err();
        assert_eq!(error.code(), tonic::Code::Aborted);
    }
    assert!(catalog.list(by_name("nosuch").as_ref(), 0, "", false, |_| true).unwrap().0.is_empty());
}

#[tokio::test]
async fn a_deleted_volume_is_kept_for_its_snapshots_and_goes_with_the_last_one() {
    let mut cluster = attached().await;
    let id = cluster.volume("db").id;
    cluster.made("db", "n1", "a").await;
    cluster.made("db", "n1", "b").await;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster.snap("db", "wished").await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    cluster.controller.volumes.catalog.delete(by_id(id.0).as_ref()).await.unwrap();
    cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
    let kept = cluster.controller.volumes.catalog.get(by_id(id.0).as_ref()).unwrap();
    assert_eq!(cluster.controller.status.volume(&kept).phase, "Retained");
    let listed = cluster.controller.volumes.catalog.list(0, "").unwrap().0;
    assert!(listed.is_empty(), "users do not see it");
    assert!(cluster.snapshot("wished").is_none(), "nobody asks for what is not cut any more");
    assert_eq!(cluster.snapshot("a").unwrap().volume, id);
    let publish = quoin_control::Publish { node: "n1".into(), ..Default::default() };
    let former = by_id(id.0);
    let attach = cluster.controller.volumes.attachments.publish(former.as_ref(), &publish);
    assert_eq!(attach.await.unwrap_err().code(), tonic::Code::NotFound);
    // Its name is free, and a snapshot of the new volume is of that one.
    let again = cluster.create("db").await;
    assert_ne!(again.id, id);
    cluster.settle().await.unwrap();
    assert_eq!(cluster.pools.iter().map(|pool| pool.holds.len()).sum::<usize>(), 6);
    let snapshots = &cluster.controller.snapshots;
    for (name, phase) in [("a", "Retained"), ("b", "")] {
        snapshots.catalog.delete(named(name).as_ref()).await.unwrap();
        snapshots.keeper.look_at_all().await.unwrap();
        let found = cluster.controller.volumes.catalog.get(by_id(id.0).as_ref());
        let shown = found.map(|volume| cluster.controller.status.volume(&volume).phase);
        assert!(phase.is_empty() || shown.unwrap() == phase);
    }
    cluster.settle().await.unwrap();
    cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
    assert!(cluster.controller.volumes.catalog.get(by_id(id.0).as_ref()).is_err());
    assert_eq!(cluster.pools.iter().map(|pool| pool.holds.len()).sum::<usize>(), 3);
    assert_eq!(cluster.store.keys("snapshot"), Vec::<String>::new());
    assert_eq!(cluster.volume("db").id, again.id);
}

/// Data behind the newest snapshot has no use once the volume is deleted.
#[tokio::test]
async fn a_volume_that_is_kept_for_its_snapshots_shows_the_newest_of_those_that_are_left() {
    let mut cluster = attached().await;
    let id = cluster.volume("db").id;
    // Their order is that of the history, and not of their names.
    let older = cluster.made_at("db", "b", 20).await;
    let newest = cluster.made_at("db", "a", 30).await;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    for n in 1..=3 {
        let report = NodeReport { node: format!("h{n}"), ..NodeReport::default() };
        cluster.controller.reports.node(&report).await.unwrap();
    }
    for (expected, name) in [(&newest, "a"), (&older, "b")] {
        for _ in 0..2 {
            cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
        }
        let now = Instant::now();
        cluster.controller.work.tender.look_at_all(now).await.unwrap();
        let volume = cluster.controller.volumes.catalog.get(by_id(id.0).as_ref()).unwrap();
        let node = volume.opened.owner.clone().expect("a target is lent");
        let told = cluster.commands(&node);
        let reverts = told.iter().filter_map(|command| match &command.what {
            Some(Told::RevertTo(to)) => Some(to.snapshot_id.clone()),
            _ => None,
        });
        assert_eq!(reverts.collect::<Vec<_>>(), [expected.id.0.to_string()]);
        // The Revert, and then the removal of its record and of what was deleted before.
        for _ in 0..2 {
            cluster.obey(&node).await.unwrap();
        }
        cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
        assert!(cluster.commands(&node).is_empty(), "it is done once");
        cluster.controller.snapshots.catalog.delete(named(name).as_ref()).await.unwrap();
    }
    assert!(cluster.reasons().contains(&"RetainedTrimmed".to_owned()));
    cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
    cluster.settle().await.unwrap();
    cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
    for table in ["snapshot", "revert", "volume/"] {
        assert_eq!(cluster.store.keys(table), Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_volume_that_is_kept_for_its_snapshots_is_kept_by_the_next_controller_too() {
    let mut cluster = attached().await;
    let id = cluster.volume("db").id;
    cluster.made("db", "n1", "a").await;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    cluster.restart().await;
    cluster.settle().await.unwrap();
    cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
    let kept = cluster.controller.volumes.catalog.get(by_id(id.0).as_ref()).unwrap();
    assert_eq!(cluster.controller.status.volume(&kept).phase, "Retained");
    assert_eq!(cluster.snapshot("a").unwrap().phase, SnapshotPhase::Ready);
}

/// Nobody knows whether an attempt of before the restore was made, and deleted, since.
#[tokio::test]
async fn attempts_under_way_are_given_up_when_records_are_recovered_and_what_is_cut_stays() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.made("db", "n1", "cut").await;
    let attempt = cluster.snap("db", "wished").await.unwrap();
    cluster.offline_after = Duration::from_millis(200);
    cluster.restart().await;
    let without_pools = ["p1", "p2", "p3"].map(str::to_owned).to_vec();
    let asked = RecoverRecords { without_pools, ..RecoverRecords::default() };
    cluster.controller.disaster.records.recover(&asked).await.unwrap();
    assert!(cluster.snapshot("wished").is_none());
    assert_eq!(cluster.snapshot("cut").unwrap().phase, SnapshotPhase::Ready);
    let [remove] = &cluster.commands("n1")[..] else { panic!("{:?}", cluster.commands("n1")) };
    assert_eq!(remove.id, attempt.id.0.to_string());
    assert!(matches!(remove.what, Some(Told::RemoveSnapshot(_))), "it is never wished again");
    assert!(cluster.reasons().contains(&"SnapshotGivenUp".to_owned()));
}

#[tokio::test]
async fn a_verification_under_way_is_given_up_when_records_are_recovered_and_an_ended_one_stays() {
    let mut cluster = Cluster::new().await;
    for name in ["db", "other"] {
        cluster.create(name).await;
        let verifier = &cluster.controller.volumes.verifier;
        let repair = Verifying::Repair { from: None };
        verifier.verify(by_name(name).as_ref(), repair).await.unwrap();
    }
    let verifier = &cluster.controller.volumes.verifier;
    verifier.verify(by_name("other").as_ref(), Verifying::Stop).await.unwrap();
    cluster.offline_after = Duration::from_millis(200);
    cluster.restart().await;
    let without_pools = ["p1", "p2", "p3"].map(str::to_owned).to_vec();
    let asked = RecoverRecords { without_pools, ..RecoverRecords::default() };
    cluster.controller.disaster.records.recover(&asked).await.unwrap();
    let shown = |name: &str| cluster.shown(name).verification.unwrap();
    assert_eq!(shown("db").state, "failed");
    assert!(shown("db").message.contains("ask for it again"), "{:?}", shown("db"));
    assert_eq!((shown("other").state.as_str(), shown("other").message.as_str()), ("stopped", ""));
    assert_eq!(cluster.reasons().iter().filter(|r| *r == "VerificationGivenUp").count(), 1);
}

/// A pool's account of a volume: the record as it was told of it, and its snapshots by id, with LSN
/// 9 of each.
fn holding(pool: &str, volume: &VolumeRecord, note: Vec<u8>, ids: &[u128]) -> Holding {
    let replica = volume.replicas.iter().find(|replica| replica.pool == pool).unwrap();
    let snapshot = |id: &u128| {
        let numbers = [9u64.to_le_bytes(), 256u64.to_le_bytes()].concat();
        [id.to_le_bytes().to_vec(), numbers].concat()
    };
    Holding {
        volume_id: volume.id.0.to_string(),
        replica_id: replica.id.0.to_string(),
        guid: replica.guid.0.to_string(),
        quorum: true,
        promised_epoch: 1,
        position_epoch: 1,
        position_lsn: 40,
        blocks: volume.size_bytes / 4096,
        spec: Keepsake { record: note, generation: volume.generation }.encode_to_vec(),
        snapshots: ids.iter().flat_map(snapshot).collect(),
        ..Holding::default()
    }
}

/// Recovers the records by what each pool tells.
async fn recover(cluster: &Cluster, told_by: impl Fn(&str) -> Vec<Holding>) {
    let controller = &cluster.controller;
    let answering = async {
        loop {
            for pool in &cluster.pools {
                controller.reports.pool(&pool.report()).await.unwrap();
                let request = controller.assignments.of_pool(&pool.name).holdings_request;
                let (replicas, pool) = (told_by(&pool.name), pool.name.clone());
                let mut told = Holdings::default();
                let piece = PoolHoldings { pool, request, replicas, ..Default::default() };
                told.add(&piece).unwrap();
                controller.disaster.salvage.take(&piece.pool, request, told);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let asked = RecoverRecords::default();
    tokio::select! {
        recovered = controller.disaster.records.recover(&asked) => {
            recovered.unwrap();
        }
        () = answering => unreachable!("it goes on for ever"),
    }
}

#[tokio::test]
async fn a_recovery_finds_the_snapshots_that_the_pools_hold_and_forgets_those_that_none_has() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let kept = cluster.made("db", "n1", "kept").await;
    cluster.made("db", "n1", "gone").await;
    cluster.offline_after = Duration::from_millis(200);
    cluster.restart().await;
    let ids = [kept.id.0.0, 0xabcd << 112];
    recover(&cluster, |pool| vec![holding(pool, &volume, Vec::new(), &ids)]).await;
    assert_eq!(cluster.snapshot("kept"), Some(kept));
    assert!(cluster.snapshot("gone").is_none());
    let found = cluster.snapshot("found-abcd0000").expect("it has a name again");
    assert_eq!((found.volume, found.phase), (volume.id, SnapshotPhase::Ready));
    let cut = found.cut.unwrap();
    assert_eq!((cut.lsn, cut.size_bytes), (9, 1 << 20));
    let reasons = cluster.reasons();
    assert!(reasons.contains(&"SnapshotFound".to_owned()), "{reasons:?}");
    assert!(reasons.contains(&"SnapshotGone".to_owned()), "{reasons:?}");
}

/// A cluster whose records are lost, and what its pools were told: of a volume that was deleted and
/// is kept for its snapshot, and of a younger one that has its name.
async fn lost_with_a_retained_volume() -> (Cluster, [(Arc<VolumeRecord>, Vec<u8>); 2]) {
    let mut cluster = attached().await;
    let id = cluster.volume("db").id;
    cluster.made("db", "n1", "a").await;
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    let again = cluster.create("db").await;
    let mut told = Vec::new();
    for id in [id, again.id] {
        let volume = cluster.controller.volumes.catalog.get(by_id(id.0).as_ref()).unwrap();
        let note = cluster.store.get(&format!("volume/{}", id.0)).await.unwrap().unwrap().value;
        told.push((volume, note));
    }
    cluster.store = Memory::new();
    cluster.offline_after = Duration::from_millis(200);
    cluster.restart().await;
    (cluster, told.try_into().unwrap())
}

/// Names and times of snapshots are lost with the records. That the volume was deleted is not: every
/// pool was told.
#[tokio::test]
async fn a_volume_that_was_kept_for_its_snapshots_is_hidden_again_by_a_recovery_without_records() {
    let (cluster, [kept, again]) = lost_with_a_retained_volume().await;
    recover(&cluster, |pool| {
        let old = holding(pool, &kept.0, kept.1.clone(), &[0xabcd << 112]);
        vec![old, holding(pool, &again.0, again.1.clone(), &[])]
    })
    .await;
    let catalog = &cluster.controller.volumes.catalog;
    assert_eq!(cluster.volume("db").id, again.0.id, "the name is the younger one's");
    let listed = catalog.list(0, "").unwrap().0;
    assert_eq!(listed.iter().map(|volume| volume.id).collect::<Vec<_>>(), [again.0.id]);
    let keeper = &cluster.controller.snapshots.keeper;
    keeper.look_at_all().await.unwrap();
    let hidden = catalog.get(by_id(kept.0.id.0).as_ref()).unwrap();
    assert_eq!((hidden.phase, hidden.spec.name.as_str()), (VolumePhase::Retained, "db"));
    let snapshot = cluster.snapshot("found-abcd0000").expect("it has a name again");
    assert_eq!((snapshot.volume, snapshot.volume_name.as_str()), (kept.0.id, "db"));
    assert!(cluster.reasons().contains(&"VolumeRetained".to_owned()));
    // It goes with its last snapshot, as if nothing had been lost.
    cluster.controller.snapshots.catalog.delete(named("found-abcd0000").as_ref()).await.unwrap();
    keeper.look_at_all().await.unwrap();
    let going = catalog.get(by_id(kept.0.id.0).as_ref()).unwrap();
    assert_eq!(going.phase, VolumePhase::Deleting);
}

/// The life of two snapshots in steps, each of which its caller repeats until it is answered.
async fn step(cluster: &mut Cluster, number: usize) -> Result<(), Error> {
    let catalog = |cluster: &Cluster| cluster.controller.snapshots.catalog.clone();
    match number {
        0 => cluster.settle().await?,
        1 => {
            let spec = crate::cluster::spec("db");
            cluster.controller.volumes.catalog.create(&spec, 0).await?;
            cluster.settle().await?;
        }
        2 => drop(cluster.attach("db", "n1").await?),
        3 => drop(cluster.snap("db", "a").await?),
        4 => drop(cluster.obey("n1").await?),
        5 => drop(cluster.snap("db", "b").await?),
        6 => drop(cluster.obey("n1").await?),
        7 => catalog(cluster).delete(named("a").as_ref()).await?,
        8 => drop(cluster.obey("n1").await?),
        9 => {
            cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await?;
        }
        10 => cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await?,
        11 => {
            cluster.controller.snapshots.keeper.look_at_all().await?;
            let b = catalog(cluster).get(named("b").as_ref())?;
            assert!(cluster.controller.volumes.catalog.get(by_id(b.volume.0).as_ref()).is_ok());
        }
        12 => catalog(cluster).delete(named("b").as_ref()).await?,
        13 => cluster.controller.snapshots.keeper.look_at_all().await?,
        14 => cluster.settle().await?,
        15 => cluster.controller.snapshots.keeper.look_at_all().await?,
        _ => unreachable!(),
    }
    Ok(())
}

/// Proves CSI-DELETESNAPSHOT-03: with every part of a deletion that a crash can leave.
#[tokio::test]
async fn a_crash_at_any_write_of_a_snapshots_life_loses_no_snapshot_and_leaves_nothing_behind() {
    for last_write_lands in [false, true] {
        for writes in 0.. {
            let mut cluster =
                Cluster::with(Memory::crashing(writes, last_write_lands), pools(1..=3)).await;
            let mut crashed = cluster.store.crashed();
            if crashed {
                cluster.restart().await;
            }
            for number in 0..16 {
                while let Err(error) = step(&mut cluster, number).await {
                    assert!(cluster.store.crashed(), "step {number} after {writes}: {error}");
                    assert!(!crashed, "it crashes once");
                    crashed = true;
                    cluster.restart().await;
                    cluster.settle().await.unwrap();
                }
            }
            cluster.settle().await.unwrap();
            cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
            let left = [cluster.store.keys("volume"), cluster.store.keys("snapshot")].concat();
            assert_eq!(left, Vec::<String>::new(), "after {writes}");
            assert!(cluster.pools.iter().all(|pool| pool.holds.is_empty()), "after {writes}");
            if !crashed {
                assert!(writes > 20, "only {writes} writes were seen");
                break;
            }
        }
    }
}

fn hourly(keep: u32, keep_for_s: u64) -> CreateScheduleRequest {
    CreateScheduleRequest {
        volume: by_name("db"),
        name: "hourly".into(),
        every_s: 3600,
        keep,
        keep_for_s,
    }
}

#[tokio::test]
async fn a_schedule_makes_one_snapshot_an_interval_and_makes_up_for_missed_ones_once() {
    let mut cluster = attached().await;
    let schedule = cluster.controller.snapshots.schedules.create(&hourly(400, 0)).await.unwrap();
    let begin = schedule.created_ms;
    let hour = 3_600_000;
    let count = |cluster: &Cluster| {
        cluster.controller.snapshots.catalog.list(None, 0, "", false, |_| true).unwrap().0.len()
    };
    for (at, expected) in [(0, 1), (1, 1), (hour - 1, 1), (hour, 2), (hour + 5, 2)] {
        cluster.controller.snapshots.schedules.look("hourly", begin + at).await.unwrap();
        cluster.obey("n1").await.unwrap();
        assert_eq!(count(&cluster), expected, "at {at}");
    }
    // Nobody was there for ten hours. A crash in the middle of a run makes no second snapshot.
    cluster.restart().await;
    for _ in 0..3 {
        let schedules = &cluster.controller.snapshots.schedules;
        schedules.look("hourly", begin + 12 * hour + 7).await.unwrap();
        cluster.obey("n1").await.unwrap();
    }
    assert_eq!(count(&cluster), 3);
    let shown = cluster.controller.snapshots.schedules.get("hourly").unwrap();
    assert_eq!(shown.next_ms(begin + 12 * hour + 7), begin + 13 * hour);
}

#[tokio::test]
async fn a_schedule_begins_no_snapshot_while_one_waits_and_deletes_what_it_does_not_keep() {
    let mut cluster = attached().await;
    cluster.made("db", "n1", "by-hand").await;
    let schedule = cluster.controller.snapshots.schedules.create(&hourly(2, 0)).await.unwrap();
    let at = |n: u64| schedule.created_ms + n * 3_600_000;
    let names = |cluster: &Cluster| {
        let listed =
            cluster.controller.snapshots.catalog.list(None, 0, "", false, |_| true).unwrap().0;
        let mut names: Vec<_> = listed.iter().map(|s| (s.wished_ms, s.name.clone())).collect();
        names.sort();
        names.into_iter().map(|(_, name)| name).collect::<Vec<_>>()
    };
    let schedules = cluster.controller.snapshots.schedules.clone();
    schedules.look("hourly", at(0)).await.unwrap();
    schedules.look("hourly", at(1)).await.unwrap();
    schedules.look("hourly", at(2)).await.unwrap();
    assert_eq!(names(&cluster).len(), 2, "the first one is not cut yet");
    for n in 2..6 {
        cluster.obey("n1").await.unwrap();
        schedules.look("hourly", at(n)).await.unwrap();
    }
    cluster.obey("n1").await.unwrap();
    schedules.look("hourly", at(5)).await.unwrap();
    let left = names(&cluster);
    assert_eq!(left.len(), 3, "two of its own, and the one by hand: {left:?}");
    assert_eq!(left[0], "by-hand");
    // Equal settings are the same schedule; others are refused.
    assert_eq!(schedules.create(&hourly(2, 0)).await.unwrap().name, "hourly");
    let refused = schedules.create(&hourly(3, 0)).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::AlreadyExists);
    schedules.delete("hourly").await.unwrap();
    schedules.delete("hourly").await.unwrap();
    assert_eq!(names(&cluster), left, "its snapshots stay");
    // A schedule ends with its volume.
    schedules.create(&hourly(2, 0)).await.unwrap();
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    cluster.controller.snapshots.keeper.look_at_all().await.unwrap();
    assert!(schedules.get("hourly").is_err());
    cluster.settle().await.unwrap();
}

#[tokio::test]
async fn a_schedule_under_a_used_name_counts_and_deletes_no_snapshot_of_another_volume() {
    let mut cluster = attached().await;
    cluster.create("web").await;
    cluster.attach("web", "n1").await.unwrap();
    let schedules = cluster.controller.snapshots.schedules.clone();
    let run = async |schedule: &ScheduleRecord, times| {
        for n in 0..times {
            let at_ms = schedule.created_ms + n * 3_600_000;
            schedules.look("hourly", at_ms).await.unwrap();
            cluster.obey("n1").await.unwrap();
            schedules.look("hourly", at_ms).await.unwrap();
            cluster.obey("n1").await.unwrap();
        }
    };
    let of = |volume: &str| {
        let volume = by_name(volume);
        let catalog = &cluster.controller.snapshots.catalog;
        catalog.list(volume.as_ref(), 0, "", false, |_| true).unwrap().0.len()
    };
    let former = schedules.create(&hourly(3, 0)).await.unwrap();
    run(&former, 3).await;
    // The last one waits for its cut, and holds up no schedule of another volume.
    schedules.look("hourly", former.created_ms + 3 * 3_600_000).await.unwrap();
    assert_eq!(of("db"), 4);
    schedules.delete("hourly").await.unwrap();

    // The clock of the second schedule's runs is later, and so are its names.
    let of_web = CreateScheduleRequest { volume: by_name("web"), ..hourly(1, 0) };
    let schedule = schedules.create(&of_web).await.unwrap();
    let later =
        ScheduleRecord { created_ms: schedule.created_ms + 9 * 3_600_000, ..(*schedule).clone() };
    run(&later, 3).await;
    assert_eq!((of("db"), of("web")), (4, 1));
}
