//! Commands of the controller about a volume's snapshots, and the state machine's answers.

use std::collections::VecDeque;
use std::time::SystemTime;

use quoin_replication::primary::{
    ChangesAnswer, PointWish, PrimaryEvent, SnapshotOutcome, SnapshotWish, USER_SNAPSHOTS_MAX,
};
use quoin_types::ids::SnapshotId;
use quoin_types::{BLOCK_SIZE, Time, VolumeId};

use super::{Ask, Shard};
use crate::commands::{Answer, Command};
use crate::history::Pull;

/// When wishes were passed on first, for the time of the cut: the last ones, in their order.
#[derive(Default)]
pub(super) struct Wished(VecDeque<(SnapshotId, SystemTime)>);

impl Wished {
    fn at(&self, id: SnapshotId) -> Option<SystemTime> {
        self.0.iter().find(|(wished, _)| *wished == id).map(|(_, at)| *at)
    }

    fn passed_on(&mut self, id: SnapshotId) {
        if self.at(id).is_some() {
            return;
        }
        // A volume has no places for more at a time.
        if self.0.len() >= USER_SNAPSHOTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back((id, SystemTime::now()));
    }
}

/// Bytes of data in a part of a snapshot.
pub(super) fn data_bytes(answer: &ChangesAnswer) -> u64 {
    match answer {
        ChangesAnswer::Part { slots, .. } => slots.len() as u64 * BLOCK_SIZE as u64,
        _ => 0,
    }
}

impl Shard {
    pub(super) fn command(&mut self, now: Time, id: VolumeId, command: Command) {
        match command {
            Command::Snapshot { id: snapshot, wish } => self.wish_snapshot(now, id, snapshot, wish),
            Command::Revert { snapshot, attempt } => {
                self.event(now, id, PrimaryEvent::Revert { snapshot, attempt });
            }
            Command::Pull(request) => self.event(now, id, PrimaryEvent::Changes(request)),
            Command::Point { point, wish } => {
                if let PointWish::Cut { snapshot } = wish
                    && let Some(volume) = self.volumes.get_mut(&id)
                    && volume.stage.served
                {
                    volume.wished.passed_on(snapshot);
                }
                self.event(now, id, PrimaryEvent::Point { point, wish });
            }
        }
    }

    /// Asks for a part that a stream wants. Dropped, its answer says that the volume is not served here.
    pub(super) fn pull(&mut self, now: Time, id: VolumeId, pull: Pull) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if !volume.target.is_serving() {
            return;
        }
        let request = volume.pulls.insert(pull);
        self.event(now, id, PrimaryEvent::Changes(request));
    }

    /// Passes a wish on. A volume that does not serve drops it, and the controller repeats it.
    fn wish_snapshot(&mut self, now: Time, id: VolumeId, snapshot: SnapshotId, wish: SnapshotWish) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        match wish {
            // The entry is appended with the first wish that comes while IO is served.
            SnapshotWish::Make if volume.stage.served => volume.wished.passed_on(snapshot),
            SnapshotWish::Make | SnapshotWish::Confirm => {}
            SnapshotWish::Delete => volume.wished.0.retain(|(wished, _)| *wished != snapshot),
        }
        self.event(now, id, PrimaryEvent::Snapshot { id: snapshot, wish });
    }

    pub(super) fn answer_snapshot(
        &mut self,
        id: VolumeId,
        snapshot: SnapshotId,
        outcome: SnapshotOutcome,
    ) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let answer = Answer {
            id: snapshot,
            outcome,
            snapshot: volume.target.snapshot(snapshot),
            // The answer may be lost, and a repeat is to say the same.
            wished_at: volume.wished.at(snapshot),
        };
        self.reports.ask(Ask::Answered { volume: id, answer });
    }
}
