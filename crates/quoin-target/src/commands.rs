//! The controller's commands for volumes that are served here, and their outcomes.
//!
//! A command goes to the shard of its volume, which wishes it of the volume's state machine; what that
//! answers is reported. Nothing is kept in between: the controller repeats a command until it has the
//! outcome, and the state machine answers a repeat as it did the first one.

use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{
    CommandOutcome, CommandRefused, PointCut, PointHeld, PointReleased, SnapshotGone, SnapshotMade,
    SnapshotRemoved, TargetCommand, WatchCommandsRequest, command_outcome, command_refused,
    target_command,
};
use quoin_identity::convert::id;
use quoin_replication::primary::{
    PointOutcome, PointWish, SnapshotOutcome, SnapshotWish, USER_SNAPSHOTS_MAX,
};
use quoin_types::ids::{PointId, SnapshotId};
use quoin_types::message::SnapshotInfo;
use quoin_types::{BLOCK_SIZE, VolumeId};
use tokio::sync::watch;
use tonic::Status;

use crate::control::Control;
use crate::shard::Input;

/// Pause before the stream of commands is opened again.
const RETRY: Duration = Duration::from_millis(500);
/// The same for a controller of a version that has no commands.
const UNKNOWN_RETRY: Duration = Duration::from_secs(30);
const CALL_MAX: Duration = Duration::from_secs(5);

/// What a volume's state machine made of a wish.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    Snapshot {
        id: SnapshotId,
        outcome: SnapshotOutcome,
        /// The snapshot as the volume's history has it; `None`: it has none of this id.
        snapshot: Option<SnapshotInfo>,
        /// When this process passed the wish on; `None`: an earlier one did.
        wished_at: Option<SystemTime>,
    },
    Point {
        id: PointId,
        outcome: PointOutcome,
    },
}

/// The wish of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    Snapshot(SnapshotId, SnapshotWish),
    Point(PointId, PointWish),
}

/// The wish of a command; `None`: this version does not know it.
///
/// # Errors
/// An id of the command is none.
fn wish(command: &TargetCommand) -> Result<Option<(VolumeId, Wish)>, String> {
    use target_command::What;
    let snapshot = |text: &str| id::<SnapshotId>("snapshot", text);
    let point = |wish| Ok::<_, String>(Wish::Point(id("point", &command.id)?, wish));
    let wish = match &command.what {
        Some(What::MakeSnapshot(make)) => {
            Wish::Snapshot(snapshot(&make.snapshot_id)?, SnapshotWish::Make)
        }
        Some(What::RemoveSnapshot(remove)) => {
            Wish::Snapshot(snapshot(&remove.snapshot_id)?, SnapshotWish::Delete)
        }
        Some(What::ConfirmSnapshot(confirm)) => {
            Wish::Snapshot(snapshot(&confirm.snapshot_id)?, SnapshotWish::Confirm)
        }
        Some(What::HoldPoint(hold)) => point(PointWish::Hold { for_ms: hold.for_ms })?,
        Some(What::CutPoint(cut)) => {
            point(PointWish::Cut { snapshot: snapshot(&cut.snapshot_id)? })?
        }
        Some(What::ReleasePoint(_)) => point(PointWish::Release)?,
        None => return Ok(None),
    };
    Ok(Some((id("volume", &command.volume_id)?, wish)))
}

fn refused(outcome: SnapshotOutcome) -> command_outcome::What {
    let (reason, message) = match outcome {
        SnapshotOutcome::TooMany => (
            command_refused::Reason::TooManySnapshots,
            format!("the volume has {USER_SNAPSHOTS_MAX} snapshots"),
        ),
        _ => (
            command_refused::Reason::Unspecified,
            "the pool of an in-sync replica runs a version without snapshots: update it".to_owned(),
        ),
    };
    command_outcome::What::Refused(CommandRefused { reason: reason.into(), message })
}

fn of_snapshot(
    id: SnapshotId,
    outcome: SnapshotOutcome,
    snapshot: Option<SnapshotInfo>,
    wished_at: Option<SystemTime>,
) -> command_outcome::What {
    let snapshot_id = id.to_string();
    match outcome {
        SnapshotOutcome::Made { lsn, head } => command_outcome::What::SnapshotMade(SnapshotMade {
            snapshot_id,
            lsn: lsn.0,
            cut_at: wished_at.map(timestamp),
            size_bytes: snapshot.map_or(0, |s| s.blocks * BLOCK_SIZE as u64),
            epoch: head.map(|head| head.epoch.0),
            chain: head.map(|head| head.chain.0),
        }),
        SnapshotOutcome::Deleted => {
            command_outcome::What::SnapshotRemoved(SnapshotRemoved { snapshot_id })
        }
        SnapshotOutcome::Gone => command_outcome::What::SnapshotGone(SnapshotGone { snapshot_id }),
        SnapshotOutcome::TooMany | SnapshotOutcome::Unsupported => refused(outcome),
    }
}

fn of_point(outcome: PointOutcome) -> command_outcome::What {
    match outcome {
        PointOutcome::Held => command_outcome::What::PointHeld(PointHeld {}),
        PointOutcome::Cut { snapshot, lsn, epoch } => command_outcome::What::PointCut(PointCut {
            snapshot_id: snapshot.to_string(),
            lsn: lsn.0,
            epoch: epoch.0,
        }),
        PointOutcome::Refused(outcome) => refused(outcome),
        PointOutcome::Released { unbroken } => {
            command_outcome::What::PointReleased(PointReleased { unbroken })
        }
    }
}

/// The outcome of a command, as it is reported.
fn outcome(node: &str, volume: VolumeId, answer: &Answer) -> CommandOutcome {
    let (id, what) = match *answer {
        Answer::Snapshot { id, outcome, snapshot, wished_at } => {
            (id.to_string(), of_snapshot(id, outcome, snapshot, wished_at))
        }
        Answer::Point { id, outcome } => (id.to_string(), of_point(outcome)),
    };
    CommandOutcome { id, node: node.to_owned(), volume_id: volume.to_string(), what: Some(what) }
}

fn timestamp(at: SystemTime) -> Timestamp {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() as i32 }
}

impl Control {
    /// Carries out the controller's commands until `shutdown`; reconnects without limit.
    pub async fn obey(&self, mut shutdown: watch::Receiver<bool>) {
        loop {
            let pause = match self.obey_once().await {
                Err(status) if status.code() == tonic::Code::Unimplemented => UNKNOWN_RETRY,
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

    async fn obey_once(&self) -> Result<(), Status> {
        let request = WatchCommandsRequest { node: self.options.node.clone(), points: true };
        let mut client = AgentClient::new(self.channel.clone());
        let mut commands = client.watch_commands(request).await?.into_inner();
        while let Some(command) = commands.message().await? {
            let refused = |error: quoin_identity::Error| Status::unavailable(error.to_string());
            // A controller of a former term may wish what was deleted since, or delete what was made.
            if !self.identity.accept_controller_term(&command.term, true).map_err(refused)? {
                return Err(Status::unavailable("the controller's term is over"));
            }
            match wish(&command) {
                Ok(Some((volume, Wish::Snapshot(id, wish)))) => {
                    self.tell(volume, Input::Snapshot { volume, id, wish });
                }
                Ok(Some((volume, Wish::Point(point, wish)))) => {
                    self.tell(volume, Input::Point { volume, point, wish });
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
        let mut request = tonic::Request::new(outcome(&self.options.node, volume, &answer));
        request.set_timeout(CALL_MAX);
        if let Err(status) = AgentClient::new(self.channel.clone()).report_outcome(request).await {
            tracing::debug!(%volume, %status, "an outcome did not reach the controller");
        }
    }
}

#[cfg(test)]
mod tests {
    use quoin_api::control::{MakeSnapshot, RemoveSnapshot};
    use quoin_types::Lsn;

    use super::*;

    fn command(what: Option<target_command::What>) -> TargetCommand {
        let volume_id = VolumeId(7).to_string();
        TargetCommand { id: "x".into(), volume_id, term: Vec::new(), what }
    }

    #[test]
    fn a_command_of_a_later_version_is_left_alone_and_a_wrong_id_refused() {
        let snapshot_id = SnapshotId(5).to_string();
        let make =
            target_command::What::MakeSnapshot(MakeSnapshot { snapshot_id: snapshot_id.clone() });
        let wished = wish(&command(Some(make))).unwrap();
        let make = Wish::Snapshot(SnapshotId(5), SnapshotWish::Make);
        assert_eq!(wished, Some((VolumeId(7), make)));
        assert_eq!(wish(&command(None)), Ok(None));
        let wrong =
            target_command::What::RemoveSnapshot(RemoveSnapshot { snapshot_id: "no hex".into() });
        assert!(wish(&command(Some(wrong))).is_err());
    }

    #[test]
    fn an_outcome_has_the_command_s_id_and_what_the_history_says_of_the_snapshot() {
        let snapshot = SnapshotInfo { id: SnapshotId(5), lsn: Lsn(9), hidden: false, blocks: 256 };
        let answer = |outcome| Answer::Snapshot {
            id: SnapshotId(5),
            outcome,
            snapshot: Some(snapshot),
            wished_at: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_500)),
        };
        let made = answer(SnapshotOutcome::Made { lsn: Lsn(9), head: None });
        let told = outcome("n1", VolumeId(7), &made);
        assert_eq!(
            (told.id.as_str(), told.node.as_str()),
            (SnapshotId(5).to_string().as_str(), "n1")
        );
        let Some(command_outcome::What::SnapshotMade(made)) = told.what else { panic!("{told:?}") };
        assert_eq!((made.lsn, made.size_bytes), (9, 1 << 20));
        assert_eq!(made.cut_at, Some(Timestamp { seconds: 1, nanos: 500_000_000 }));
        let told = outcome("n1", VolumeId(7), &answer(SnapshotOutcome::TooMany));
        assert!(matches!(told.what, Some(command_outcome::What::Refused(_))));
    }

    #[test]
    fn a_step_of_a_point_is_wished_and_answered_under_the_point_s_id() {
        use target_command::What;
        let point = PointId(9);
        let of = |what| {
            let id = point.to_string();
            wish(&TargetCommand { id, ..command(Some(what)) }).unwrap().unwrap().1
        };
        let hold = of(What::HoldPoint(quoin_api::control::HoldPoint { for_ms: 70 }));
        assert_eq!(hold, Wish::Point(point, PointWish::Hold { for_ms: 70 }));
        let snapshot_id = SnapshotId(5).to_string();
        let cut = of(What::CutPoint(quoin_api::control::CutPoint { snapshot_id }));
        assert_eq!(cut, Wish::Point(point, PointWish::Cut { snapshot: SnapshotId(5) }));
        let released = PointOutcome::Released { unbroken: true };
        let told = outcome("n1", VolumeId(7), &Answer::Point { id: point, outcome: released });
        assert_eq!(told.id, point.to_string());
        let Some(command_outcome::What::PointReleased(released)) = told.what else {
            panic!("{told:?}")
        };
        assert!(released.unbroken);
        let no_point = wish(&command(Some(What::ReleasePoint(Default::default()))));
        assert!(no_point.is_err(), "its id is none");
    }
}
