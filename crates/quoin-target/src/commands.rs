//! The controller's commands for volumes that are served here, and their outcomes.
//!
//! A command goes to the shard of its volume, which wishes it of the volume's state machine; what that
//! answers is reported. Nothing is kept in between: the controller repeats a command until it has the
//! outcome, and the state machine answers a repeat as it did the first one.

use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{
    CommandOutcome, CommandRefused, SnapshotMade, SnapshotRemoved, TargetCommand,
    WatchCommandsRequest, command_outcome, command_refused, target_command,
};
use quoin_identity::convert::id;
use quoin_replication::primary::{SnapshotOutcome, SnapshotWish, USER_SNAPSHOTS_MAX};
use quoin_types::ids::SnapshotId;
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

/// The wish of a command; `None`: this version does not know it.
///
/// # Errors
/// An id of the command is none.
fn wish(command: &TargetCommand) -> Result<Option<(VolumeId, SnapshotId, SnapshotWish)>, String> {
    use target_command::What;
    let (snapshot, wish) = match &command.what {
        Some(What::MakeSnapshot(make)) => (&make.snapshot_id, SnapshotWish::Make),
        Some(What::RemoveSnapshot(remove)) => (&remove.snapshot_id, SnapshotWish::Delete),
        None => return Ok(None),
    };
    Ok(Some((id("volume", &command.volume_id)?, id("snapshot", snapshot)?, wish)))
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
        SnapshotOutcome::TooMany => command_outcome::What::Refused(CommandRefused {
            reason: command_refused::Reason::TooManySnapshots.into(),
            message: format!("the volume has {USER_SNAPSHOTS_MAX} snapshots"),
        }),
        SnapshotOutcome::Unsupported => command_outcome::What::Refused(CommandRefused {
            reason: command_refused::Reason::Unspecified.into(),
            message: "the pool of an in-sync replica runs a version without snapshots: update it"
                .to_owned(),
        }),
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
        let request = WatchCommandsRequest { node: self.options.node.clone() };
        let mut client = AgentClient::new(self.channel.clone());
        let mut commands = client.watch_commands(request).await?.into_inner();
        while let Some(command) = commands.message().await? {
            let refused = |error: quoin_identity::Error| Status::unavailable(error.to_string());
            // A controller of a former term may wish what was deleted since, or delete what was made.
            if !self.identity.accept_controller_term(&command.term, true).map_err(refused)? {
                return Err(Status::unavailable("the controller's term is over"));
            }
            match wish(&command) {
                Ok(Some((volume, id, wish))) => {
                    self.tell(volume, Input::Snapshot { volume, id, wish });
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
        assert_eq!(wished, Some((VolumeId(7), SnapshotId(5), SnapshotWish::Make)));
        assert_eq!(wish(&command(None)), Ok(None));
        let wrong =
            target_command::What::RemoveSnapshot(RemoveSnapshot { snapshot_id: "no hex".into() });
        assert!(wish(&command(Some(wrong))).is_err());
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
