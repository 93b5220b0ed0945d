//! The controller's commands for volumes that are served here, and their outcomes.
//!
//! A command goes to the shard of its volume, which wishes it of the volume's state machine; what that
//! answers is reported. Nothing is kept in between: the controller repeats a command until it has the
//! outcome, and the state machine answers a repeat as it did the first one. To read a
//! part of a snapshot's content is a command too, and the part is its outcome.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{
    CommandOutcome, CommandRefused, PointCut, PointHeld, PointReleased, PullPart, PulledPart,
    SnapshotGone, SnapshotMade, SnapshotRange, SnapshotRemoved, TargetCommand, VolumeReverted,
    WatchCommandsRequest, command_outcome, command_refused, target_command,
};
use quoin_identity::convert::id;
use quoin_replication::primary::{
    ChangedRange, ChangesAnswer, ChangesRequest, PointOutcome, PointWish, RevertOutcome,
    SnapshotOutcome, SnapshotWish, USER_SNAPSHOTS_MAX,
};
use quoin_types::ids::{PointId, SnapshotId};
use quoin_types::message::{Content, Slot, SnapshotInfo};
use quoin_types::{BLOCK_SIZE, VolumeId, crc32c};
use quoin_wire::history::Refused;
use tokio::sync::watch;
use tonic::Status;

use crate::control::Control;
use crate::history::{self, RANGE_BLOCKS};
use crate::shard::Input;

/// Pause before the stream of commands is opened again.
const RETRY: Duration = Duration::from_millis(500);
const CALL_MAX: Duration = Duration::from_secs(5);

/// Commands whose ranges are hashed at a time, and the most ranges of one.
const HASHING_MAX: usize = 4;
const HASH_RANGES_MAX: u32 = 64;

/// Outcome of a wish in a volume's state machine.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    pub id: SnapshotId,
    pub outcome: SnapshotOutcome,
    /// The snapshot as the volume's history has it; `None`: it has none of this id.
    pub snapshot: Option<SnapshotInfo>,
    /// When this process passed the wish on; `None`: an earlier one did.
    pub wished_at: Option<SystemTime>,
}

/// Something to do with a volume that is served here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    Snapshot {
        id: SnapshotId,
        wish: SnapshotWish,
    },
    Revert {
        snapshot: SnapshotId,
        attempt: SnapshotId,
    },
    Pull(ChangesRequest),
    /// A step of a point over several volumes.
    Point {
        point: PointId,
        wish: PointWish,
    },
}

/// The command of a message; `None`: this version does not know it.
///
/// # Errors
/// An id of the command is none.
fn command(message: &TargetCommand) -> Result<Option<(VolumeId, Command)>, String> {
    use target_command::What;
    let snapshot = |text: &str| id::<SnapshotId>("snapshot", text);
    let point = |wish| Ok::<_, String>(Command::Point { point: id("point", &message.id)?, wish });
    let command = match &message.what {
        Some(What::MakeSnapshot(make)) => {
            Command::Snapshot { id: snapshot(&make.snapshot_id)?, wish: SnapshotWish::Make }
        }
        Some(What::RemoveSnapshot(remove)) => {
            Command::Snapshot { id: snapshot(&remove.snapshot_id)?, wish: SnapshotWish::Delete }
        }
        Some(What::RevertTo(to)) => Command::Revert {
            snapshot: snapshot(&to.snapshot_id)?,
            attempt: id("command", &message.id)?,
        },
        Some(What::PullPart(pull)) => Command::Pull(changes(&message.id, pull)?),
        Some(What::HoldPoint(hold)) => point(PointWish::Hold { for_ms: hold.for_ms })?,
        Some(What::CutPoint(cut)) => {
            point(PointWish::Cut { snapshot: snapshot(&cut.snapshot_id)? })?
        }
        Some(What::ReleasePoint(_)) => point(PointWish::Release)?,
        Some(What::ConfirmSnapshot(confirm)) => {
            Command::Snapshot { id: snapshot(&confirm.snapshot_id)?, wish: SnapshotWish::Confirm }
        }
        None => return Ok(None),
    };
    Ok(Some((id("volume", &message.volume_id)?, command)))
}

/// # Errors
/// An id is none.
fn changes(command: &str, pull: &PullPart) -> Result<ChangesRequest, String> {
    let is_number = command.len() == 16 && command.bytes().all(|byte| byte.is_ascii_hexdigit());
    let token = u64::from_str_radix(command, 16).ok().filter(|_| is_number);
    let token = token.ok_or_else(|| {
        let shown: String = command.chars().take(40).collect();
        format!("command {shown:?}: its id is not 16 hex digits")
    })?;
    let known = |field, text: &String| match text.is_empty() {
        true => Ok(None),
        false => id(field, text).map(Some),
    };
    if pull.want_data && pull.snapshot_id.is_empty() {
        return Err("data of no snapshot is requested".to_owned());
    }
    Ok(ChangesRequest {
        token,
        from: known("since_snapshot", &pull.since_snapshot_id)?,
        to: known("snapshot", &pull.snapshot_id)?,
        cursor: pull.cursor_block,
        want_data: pull.want_data,
    })
}

/// Ranges of a snapshot that are to be hashed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct HashAsked {
    token: u64,
    volume: VolumeId,
    snapshot: SnapshotId,
    first: u64,
    ranges: u32,
}

/// # Errors
/// An id is none, or more is asked for than one answer has.
fn hashed(message: &TargetCommand, pull: &PullPart) -> Result<HashAsked, String> {
    let request = changes(&message.id, &PullPart { want_data: false, ..pull.clone() })?;
    let snapshot = request.to.ok_or_else(|| "hashes of no snapshot are requested".to_owned())?;
    if pull.hash_ranges > HASH_RANGES_MAX {
        return Err(format!("hashes of {} ranges at once", pull.hash_ranges));
    }
    Ok(HashAsked {
        token: request.token,
        volume: id("volume", &message.volume_id)?,
        snapshot,
        first: request.cursor / RANGE_BLOCKS,
        ranges: pull.hash_ranges,
    })
}

/// Hashes, as they are reported.
fn told(
    node: &str,
    (volume, token): (VolumeId, u64),
    hashed: Result<Vec<u8>, Refused>,
) -> PulledPart {
    use command_refused::Reason;
    let mut part = PulledPart {
        id: pull_id(token),
        node: node.to_owned(),
        volume_id: volume.to_string(),
        ..PulledPart::default()
    };
    match hashed {
        Ok(hashes) => part.hashes = hashes,
        Err(why) => {
            let reason = match why {
                Refused::NoSnapshot => Reason::NoSnapshot,
                Refused::Damaged { .. } => Reason::Damaged,
                _ => Reason::Busy,
            };
            let message = match why {
                Refused::Damaged { lba } => format!("byte {}", lba * BLOCK_SIZE as u64),
                why => why.to_string(),
            };
            part.refused = Some(refused(reason, message));
        }
    }
    part
}

/// The id of a pull's command, by the number that the state machine knows it by.
fn pull_id(token: u64) -> String {
    format!("{token:016x}")
}

fn refused(reason: command_refused::Reason, message: impl Into<String>) -> CommandRefused {
    CommandRefused { reason: reason.into(), message: message.into() }
}

/// Why no snapshot is made.
fn too_many_snapshots() -> command_outcome::What {
    let message = format!("the volume has {USER_SNAPSHOTS_MAX} snapshots");
    let reason = command_refused::Reason::TooManySnapshots;
    command_outcome::What::Refused(refused(reason, message))
}

/// The outcome of a step of a point, as it is reported.
fn step_outcome(
    node: &str,
    volume: VolumeId,
    point: PointId,
    outcome: PointOutcome,
) -> CommandOutcome {
    let what = match outcome {
        PointOutcome::Held => command_outcome::What::PointHeld(PointHeld {}),
        PointOutcome::Cut { snapshot, lsn, epoch } => command_outcome::What::PointCut(PointCut {
            snapshot_id: snapshot.to_string(),
            lsn: lsn.0,
            epoch: epoch.0,
        }),
        PointOutcome::TooManySnapshots => too_many_snapshots(),
        PointOutcome::Released { unbroken } => {
            command_outcome::What::PointReleased(PointReleased { unbroken })
        }
    };
    let (id, volume_id) = (point.to_string(), volume.to_string());
    CommandOutcome { id, node: node.to_owned(), volume_id, what: Some(what) }
}

/// The outcome of a Revert, as it is reported.
fn revert_outcome(
    node: &str,
    volume: VolumeId,
    attempt: SnapshotId,
    outcome: RevertOutcome,
) -> CommandOutcome {
    use command_refused::Reason;
    let refused = |reason, message: &str| command_outcome::What::Refused(refused(reason, message));
    let what = match outcome {
        RevertOutcome::Done { lsn, .. } => {
            command_outcome::What::VolumeReverted(VolumeReverted { lsn: lsn.0 })
        }
        RevertOutcome::NoSnapshot => refused(Reason::NoSnapshot, "there is no such snapshot"),
        RevertOutcome::TooMany => refused(
            Reason::TooManySnapshots,
            "the volume has too many snapshots to record it: delete some",
        ),
    };
    CommandOutcome {
        id: attempt.to_string(),
        node: node.to_owned(),
        volume_id: volume.to_string(),
        what: Some(what),
    }
}

/// A part of a snapshot, as it is reported.
fn pulled(node: &str, volume: VolumeId, token: u64, answer: &ChangesAnswer) -> PulledPart {
    use command_refused::Reason;
    let mut part = PulledPart {
        id: pull_id(token),
        node: node.to_owned(),
        volume_id: volume.to_string(),
        ..PulledPart::default()
    };
    match answer {
        ChangesAnswer::Part { ranges, slots, next } => {
            part.next_block = *next;
            let mut slots = slots.iter().peekable();
            part.ranges = ranges
                .iter()
                .map(|range| {
                    let until = range.lba + range.blocks;
                    let of_range = std::iter::from_fn(|| slots.next_if(|s| s.lba < until));
                    self::range(range, of_range)
                })
                .collect();
        }
        ChangesAnswer::NoSnapshot => {
            part.refused = Some(refused(Reason::NoSnapshot, "there is no such snapshot"));
        }
        ChangesAnswer::Damaged { lba } => {
            let message = format!("byte {}", lba * BLOCK_SIZE as u64);
            part.refused = Some(refused(Reason::Damaged, message));
        }
        ChangesAnswer::Busy => {
            part.refused = Some(refused(Reason::Busy, "too many parts are read at once"));
        }
    }
    part
}

/// A range with the bytes of its blocks, which are in order.
fn range<'a>(range: &ChangedRange, slots: impl Iterator<Item = &'a Slot>) -> SnapshotRange {
    let mut data = Vec::new();
    for slot in slots {
        if let Content::Data { data: block, .. } = &slot.content {
            data.extend_from_slice(block);
        }
    }
    SnapshotRange {
        offset: range.lba * BLOCK_SIZE as u64,
        length: range.blocks * BLOCK_SIZE as u64,
        hole: range.hole,
        checksum: if data.is_empty() { 0 } else { crc32c(&data) },
        data,
    }
}

/// The outcome of a command, as it is reported.
fn outcome(node: &str, volume: VolumeId, answer: &Answer) -> CommandOutcome {
    let snapshot_id = answer.id.to_string();
    let what = match answer.outcome {
        SnapshotOutcome::Made { lsn, head } => command_outcome::What::SnapshotMade(SnapshotMade {
            snapshot_id: snapshot_id.clone(),
            lsn: lsn.0,
            cut_at: answer.wished_at.map(timestamp),
            size_bytes: answer.snapshot.map_or(0, |s| s.blocks * BLOCK_SIZE as u64),
            epoch: head.map(|head| head.epoch.0),
            chain: head.map(|head| head.chain.0),
        }),
        SnapshotOutcome::Deleted => {
            let snapshot_id = snapshot_id.clone();
            command_outcome::What::SnapshotRemoved(SnapshotRemoved { snapshot_id })
        }
        SnapshotOutcome::Gone => {
            let snapshot_id = snapshot_id.clone();
            command_outcome::What::SnapshotGone(SnapshotGone { snapshot_id })
        }
        SnapshotOutcome::TooMany => too_many_snapshots(),
    };
    CommandOutcome {
        id: snapshot_id,
        node: node.to_owned(),
        volume_id: volume.to_string(),
        what: Some(what),
    }
}

fn timestamp(at: SystemTime) -> Timestamp {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() as i32 }
}

impl Control {
    /// Carries out the controller's commands until `shutdown`; reconnects without limit.
    pub async fn obey(self: Arc<Self>, mut shutdown: watch::Receiver<bool>) {
        loop {
            let pause = match self.obey_once().await {
                Err(status) => {
                    tracing::debug!(%status, "the stream of commands ended");
                    RETRY
                }
                Ok(()) => RETRY,
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = shutdown.wait_for(|down| *down) => return,
            }
        }
    }

    async fn obey_once(self: &Arc<Self>) -> Result<(), Status> {
        let request = WatchCommandsRequest { node: self.options.node.clone() };
        let mut client = AgentClient::new(self.channel.clone());
        let mut commands = client.watch_commands(request).await?.into_inner();
        while let Some(command) = commands.message().await? {
            let refused = |error: quoin_identity::Error| Status::unavailable(error.to_string());
            // A controller of a former term may wish what was deleted since, or delete what was made.
            if !self.identity.accept_controller_term(&command.term, true).map_err(refused)? {
                return Err(Status::unavailable("the controller's term is over"));
            }
            if let Some(target_command::What::PullPart(pull)) = &command.what
                && pull.hash_ranges > 0
            {
                match hashed(&command, pull) {
                    Ok(asked) => self.begin_to_hash(asked),
                    Err(reason) => tracing::error!(reason, "a command that makes no sense"),
                }
                continue;
            }
            match self::command(&command) {
                // A target that only reads is opened anew before: the command comes again.
                Ok(Some((volume, Command::Revert { .. }))) if self.only_reads(volume) => {}
                Ok(Some((volume, command))) => {
                    self.tell(volume, Input::Command { volume, command });
                }
                Ok(None) => {
                    tracing::debug!(id = command.id, "a command of a newer controller: update");
                }
                Err(reason) => tracing::error!(reason, "a command that makes no sense"),
            }
        }
        Ok(())
    }

    /// Reports the outcome of a command. Where that fails the controller repeats the command, and
    /// the next outcome is reported.
    pub async fn report_outcome(&self, volume: VolumeId, answer: Answer) {
        self.report_ended(volume, outcome(&self.options.node, volume, &answer)).await;
    }

    /// As [`Self::report_outcome`], of a step of a point.
    pub async fn report_step(&self, volume: VolumeId, point: PointId, outcome: PointOutcome) {
        let outcome = step_outcome(&self.options.node, volume, point, outcome);
        self.report_ended(volume, outcome).await;
    }

    /// As [`Self::report_outcome`], of a Revert.
    pub async fn report_revert(
        &self,
        volume: VolumeId,
        attempt: SnapshotId,
        outcome: RevertOutcome,
    ) {
        let outcome = revert_outcome(&self.options.node, volume, attempt, outcome);
        self.report_ended(volume, outcome).await;
    }

    /// As [`Self::report_outcome`], of a pull.
    pub async fn report_part(&self, volume: VolumeId, token: u64, answer: ChangesAnswer) {
        let part = pulled(&self.options.node, volume, token, &answer);
        drop(answer);
        self.report_pulled(volume, part).await;
    }

    async fn report_pulled(&self, volume: VolumeId, part: PulledPart) {
        let mut request = tonic::Request::new(part);
        request.set_timeout(CALL_MAX);
        if let Err(status) = AgentClient::new(self.channel.clone()).report_part(request).await {
            tracing::debug!(%volume, %status, "a part did not reach the controller");
        }
    }

    /// Hashes ranges of a snapshot beside the commands that follow, and reports them.
    fn begin_to_hash(self: &Arc<Self>, asked: HashAsked) {
        let mut hashing = self.hashing.lock().expect("no holder of this lock panics");
        // A command that is not begun comes again.
        if hashing.len() >= HASHING_MAX || !hashing.insert(asked.token) {
            return;
        }
        drop(hashing);
        let control = self.clone();
        tokio::spawn(async move {
            let of = control.clone();
            let HashAsked { token, volume, snapshot, first, ranges } = asked;
            let hashed = tokio::task::spawn_blocking(move || {
                history::hash_ranges(&of, (volume, snapshot), first, ranges)
            });
            // A thread that failed is a command that comes again.
            if let Ok(hashed) = hashed.await {
                let part = told(&control.options.node, (volume, token), hashed);
                control.report_pulled(volume, part).await;
            }
            control.hashing.lock().expect("no holder of this lock panics").remove(&token);
        });
    }

    async fn report_ended(&self, volume: VolumeId, outcome: CommandOutcome) {
        let mut request = tonic::Request::new(outcome);
        request.set_timeout(CALL_MAX);
        if let Err(status) = AgentClient::new(self.channel.clone()).report_outcome(request).await {
            tracing::debug!(%volume, %status, "an outcome did not reach the controller");
        }
    }
}

#[cfg(test)]
mod tests {
    use quoin_api::control::{MakeSnapshot, RemoveSnapshot, RevertTo};
    use quoin_types::Lsn;

    use super::*;

    fn message(id: &str, what: Option<target_command::What>) -> TargetCommand {
        let volume_id = VolumeId(7).to_string();
        TargetCommand { id: id.into(), volume_id, term: Vec::new(), what }
    }

    #[test]
    fn a_command_of_a_later_version_is_left_alone_and_a_wrong_id_refused() {
        let snapshot_id = SnapshotId(5).to_string();
        let make =
            target_command::What::MakeSnapshot(MakeSnapshot { snapshot_id: snapshot_id.clone() });
        let meant = Command::Snapshot { id: SnapshotId(5), wish: SnapshotWish::Make };
        assert_eq!(command(&message("x", Some(make))), Ok(Some((VolumeId(7), meant))));
        assert_eq!(command(&message("x", None)), Ok(None));
        let wrong =
            target_command::What::RemoveSnapshot(RemoveSnapshot { snapshot_id: "no hex".into() });
        assert!(command(&message("x", Some(wrong))).is_err());
        let revert = target_command::What::RevertTo(RevertTo { snapshot_id });
        assert!(command(&message("x", Some(revert.clone()))).is_err(), "an attempt has an id");
        let attempt = SnapshotId(6);
        let meant = Command::Revert { snapshot: SnapshotId(5), attempt };
        let message = message(&attempt.to_string(), Some(revert));
        assert_eq!(command(&message), Ok(Some((VolumeId(7), meant))));
    }

    #[test]
    fn hashes_are_asked_of_a_snapshot_by_whole_ranges_and_so_many_at_most() {
        let snapshot_id = SnapshotId(5).to_string();
        let pull =
            PullPart { snapshot_id, cursor_block: 513, hash_ranges: 3, ..PullPart::default() };
        let of = |pull: &PullPart| hashed(&message(&pull_id(9), None), pull);
        let (volume, snapshot) = (VolumeId(7), SnapshotId(5));
        let asked = HashAsked { token: 9, volume, snapshot, first: 2, ranges: 3 };
        assert_eq!(of(&pull), Ok(asked));
        assert!(of(&PullPart { hash_ranges: HASH_RANGES_MAX + 1, ..pull.clone() }).is_err());
        assert!(of(&PullPart { snapshot_id: String::new(), ..pull }).is_err());
        let part = told("n", (volume, 9), Err(Refused::Damaged { lba: 2 }));
        assert_eq!(part.refused.unwrap().message, "byte 8192");
        let part = told("n", (volume, 9), Ok(vec![1, 2]));
        assert!(part.refused.is_none() && part.hashes == [1, 2] && part.id == pull_id(9));
    }

    #[test]
    fn a_step_of_a_point_is_understood_and_reported_under_the_point_s_id() {
        use quoin_api::control::{CutPoint, HoldPoint};
        use target_command::What;
        let point = PointId(9);
        let of = |what| command(&message(&point.to_string(), Some(what))).unwrap().unwrap().1;
        let hold = of(What::HoldPoint(HoldPoint { for_ms: 70 }));
        assert_eq!(hold, Command::Point { point, wish: PointWish::Hold { for_ms: 70 } });
        let snapshot_id = SnapshotId(5).to_string();
        let cut = of(What::CutPoint(CutPoint { snapshot_id }));
        let wish = PointWish::Cut { snapshot: SnapshotId(5) };
        assert_eq!(cut, Command::Point { point, wish });
        let without_an_id = message("x", Some(What::ReleasePoint(Default::default())));
        assert!(command(&without_an_id).is_err());
        let released = PointOutcome::Released { unbroken: true };
        let told = step_outcome("n1", VolumeId(7), point, released);
        assert_eq!(told.id, point.to_string());
        let unbroken = command_outcome::What::PointReleased(PointReleased { unbroken: true });
        assert_eq!(told.what, Some(unbroken));
    }

    #[test]
    fn a_pull_is_known_by_its_command_and_a_wrong_one_refused() {
        let pull = PullPart {
            snapshot_id: SnapshotId(5).to_string(),
            since_snapshot_id: String::new(),
            cursor_block: 9,
            want_data: true,
            hash_ranges: 0,
        };
        let of = |id: &str, pull: &PullPart| {
            let what = target_command::What::PullPart(pull.clone());
            command(&message(id, Some(what)))
        };
        let meant = ChangesRequest {
            token: 0xab,
            from: None,
            to: Some(SnapshotId(5)),
            cursor: 9,
            want_data: true,
        };
        let understood = Ok(Some((VolumeId(7), Command::Pull(meant))));
        assert_eq!(of(&pull_id(0xab), &pull), understood);
        for wrong in ["", "no hex", "11112222333344445", "+111222233334444"] {
            assert!(of(wrong, &pull).is_err(), "{wrong}");
        }
        let since = PullPart { since_snapshot_id: "no hex".into(), ..pull.clone() };
        assert!(of(&pull_id(0xab), &since).is_err());
        let of_the_volume = PullPart { snapshot_id: String::new(), ..pull };
        assert!(of(&pull_id(0xab), &of_the_volume).is_err(), "data that changes meanwhile");
        let changes = PullPart { want_data: false, ..of_the_volume };
        let meant = ChangesRequest { to: None, want_data: false, ..meant };
        let understood = Ok(Some((VolumeId(7), Command::Pull(meant))));
        assert_eq!(of(&pull_id(0xab), &changes), understood);
    }

    #[test]
    fn a_part_has_each_block_in_its_range_and_a_checksum_over_them() {
        let slot = |lba: u64| {
            let data = bytes::Bytes::from(vec![lba as u8; BLOCK_SIZE]);
            let content = Content::Data { crc: crc32c(&data), data };
            Slot { lba, blocks: 1, version: Lsn(3), content }
        };
        let ranges = vec![
            ChangedRange { lba: 3, blocks: 2, hole: false },
            ChangedRange { lba: 5, blocks: 4, hole: true },
            ChangedRange { lba: 9, blocks: 1, hole: false },
        ];
        let slots = vec![slot(3), slot(4), slot(9)];
        let answer = ChangesAnswer::Part { ranges, slots, next: Some(10) };
        let part = pulled("n1", VolumeId(7), 5, &answer);
        assert_eq!((part.id.as_str(), part.next_block), ("0000000000000005", Some(10)));
        let lengths: Vec<usize> = part.ranges.iter().map(|range| range.data.len()).collect();
        assert_eq!(lengths, [2 * BLOCK_SIZE, 0, BLOCK_SIZE]);
        assert_eq!(part.ranges[0].checksum, crc32c(&part.ranges[0].data));
        assert_eq!(part.ranges[2].data[0], 9);
        assert!(part.ranges[1].hole && part.ranges[1].length == 4 * BLOCK_SIZE as u64);
        let lost = pulled("n1", VolumeId(7), 5, &ChangesAnswer::Damaged { lba: 2 });
        assert!(lost.refused.is_some_and(|refused| refused.message == "byte 8192"));
    }

    #[test]
    fn a_revert_is_reported_under_its_attempt_and_a_refusal_says_why() {
        let of = |outcome| revert_outcome("n1", VolumeId(7), SnapshotId(6), outcome);
        let done = of(RevertOutcome::Done { lsn: Lsn(9), head: None });
        assert_eq!(done.id, SnapshotId(6).to_string());
        let reverted = command_outcome::What::VolumeReverted(VolumeReverted { lsn: 9 });
        assert_eq!(done.what, Some(reverted));
        for refusal in [RevertOutcome::NoSnapshot, RevertOutcome::TooMany] {
            let Some(command_outcome::What::Refused(refused)) = of(refusal).what else {
                panic!("{refusal:?}")
            };
            assert!(!refused.message.is_empty());
        }
    }

    #[test]
    fn an_outcome_has_the_command_s_id_and_what_the_history_says_of_the_snapshot() {
        let snapshot = SnapshotInfo { id: SnapshotId(5), lsn: Lsn(9), hidden: false, blocks: 256 };
        let answer = Answer {
            id: SnapshotId(5),
            outcome: SnapshotOutcome::Made { lsn: Lsn(9), head: None },
            snapshot: Some(snapshot),
            wished_at: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_500)),
        };
        let told = outcome("n1", VolumeId(7), &answer);
        assert_eq!(
            (told.id.as_str(), told.node.as_str()),
            (SnapshotId(5).to_string().as_str(), "n1")
        );
        let Some(command_outcome::What::SnapshotMade(made)) = told.what else { panic!("{told:?}") };
        assert_eq!((made.lsn, made.size_bytes), (9, 1 << 20));
        assert_eq!(made.cut_at, Some(Timestamp { seconds: 1, nanos: 500_000_000 }));
        let refused = Answer { outcome: SnapshotOutcome::TooMany, ..answer };
        let told = outcome("n1", VolumeId(7), &refused);
        assert!(matches!(told.what, Some(command_outcome::What::Refused(_))));
    }
}
