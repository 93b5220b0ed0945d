//! The records of Reverts: returns of volumes to snapshots.

use std::collections::{BTreeSet, HashMap};

use quoin_types::VolumeId;
use quoin_types::ids::SnapshotId;
use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Index, Record, SnapshotRecord, Text, is_zero};

/// Steps of a Revert.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum RevertPhase {
    /// The target of the volume is to do it.
    Wished,
    /// The volume shows the snapshot's content, on media.
    Done,
    /// The target refused it. A repeat of the command may still be on its way, so the outcome is
    /// certain only once the deletion that follows it is answered.
    Failing,
    Failed,
}

/// The last Revert of a volume, under way or over.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RevertRecord {
    pub volume: Text<VolumeId>,
    /// Id of the attempt, and of the hidden snapshot that records it in the volume's history.
    pub attempt: Text<SnapshotId>,
    pub snapshot: Text<SnapshotId>,
    pub snapshot_name: String,
    pub phase: RevertPhase,
    pub wished_ms: u64,
    /// 0: under way.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ended_ms: u64,
    /// Place in the volume's history; 0: not done.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lsn: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub failure: String,
    /// The hidden snapshot may be there, and is to be removed once the Revert is answered.
    pub recorded: bool,
    /// Made by the controller itself: the volume is kept for its snapshots alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trims: bool,
    /// Ids of the Reverts before it, the last ones: a late repeat of one of them begins none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<Text<SnapshotId>>,
}

/// Former Reverts of a volume that are remembered.
const FORMER_MAX: usize = 32;

impl RevertRecord {
    /// Returns an attempt whose target is still to be told.
    pub fn wished(snapshot: &SnapshotRecord, attempt: SnapshotId, now_ms: u64) -> Self {
        Self {
            volume: snapshot.volume,
            attempt: Text(attempt),
            snapshot: snapshot.id,
            snapshot_name: snapshot.name.clone(),
            phase: RevertPhase::Wished,
            wished_ms: now_ms,
            ended_ms: 0,
            lsn: 0,
            failure: String::new(),
            recorded: false,
            trims: false,
            former: Vec::new(),
        }
    }

    /// Begins the next Revert of the volume in the place of this one.
    pub fn replace_by(&mut self, next: &Self) {
        let mut former = std::mem::take(&mut self.former);
        former.push(self.attempt);
        former.drain(..former.len().saturating_sub(FORMER_MAX));
        *self = Self { former, ..next.clone() };
    }

    /// The volume's content may change by it at any moment: no node may attach the volume.
    pub fn is_under_way(&self) -> bool {
        matches!(self.phase, RevertPhase::Wished | RevertPhase::Failing)
    }

    /// The target of the volume has something to do for it.
    pub fn is_open(&self) -> bool {
        self.is_under_way() || self.recorded
    }

    /// Takes over that the target did it; false: that is known. An attempt that was given up may
    /// have been done all the same.
    pub fn done(&mut self, lsn: u64, now_ms: u64) -> bool {
        if self.phase == RevertPhase::Done {
            return false;
        }
        (self.phase, self.lsn, self.ended_ms) = (RevertPhase::Done, lsn, now_ms);
        (self.recorded, self.failure) = (true, String::new());
        true
    }

    /// Takes over that the target refused it; false: that is known, or is of an earlier moment.
    /// `for_good`: no repeat of the command can do it.
    pub fn refused(&mut self, failure: &str, for_good: bool, now_ms: u64) -> bool {
        if self.phase != RevertPhase::Wished {
            return false;
        }
        failure.clone_into(&mut self.failure);
        match for_good {
            true => (self.phase, self.recorded) = (RevertPhase::Failed, false),
            false => (self.phase, self.recorded) = (RevertPhase::Failing, true),
        }
        self.ended_ms = if for_good { now_ms } else { 0 };
        true
    }

    /// Takes over that the hidden snapshot is gone; true: the Revert has failed by that.
    pub fn cleared(&mut self, now_ms: u64) -> bool {
        if self.phase == RevertPhase::Wished {
            return false;
        }
        self.recorded = false;
        let fails = self.phase == RevertPhase::Failing;
        if fails {
            (self.phase, self.ended_ms) = (RevertPhase::Failed, now_ms);
        }
        fails
    }

    /// Gives it up after the records were restored: nobody knows whether it was done since. False:
    /// it was over.
    pub fn give_up(&mut self, failure: &str, now_ms: u64) -> bool {
        let gives_up = self.is_under_way();
        if gives_up {
            (self.phase, self.recorded) = (RevertPhase::Failed, true);
            (self.failure, self.ended_ms) = (failure.to_owned(), now_ms);
        }
        gives_up
    }
}

impl Record for RevertRecord {
    type Index = RevertIndex;
    const PREFIX: &'static str = "revert/";
    fn name(&self) -> String {
        self.volume.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        // The node of the volume's target is told by [`crate::state::State::tell_target`].
        Concerned::Status
    }
    fn volume(&self) -> Option<VolumeId> {
        Some(self.volume.0)
    }
}

/// Names of the records of Reverts of which a target has something to do.
#[derive(Debug, Default)]
pub struct RevertIndex {
    open: BTreeSet<String>,
    /// Volumes of attempts, for the answers of targets.
    by_attempt: HashMap<SnapshotId, VolumeId>,
}

impl RevertIndex {
    pub fn open(&self) -> &BTreeSet<String> {
        &self.open
    }

    pub fn volume_of(&self, attempt: SnapshotId) -> Option<VolumeId> {
        self.by_attempt.get(&attempt).copied()
    }
}

impl Index<RevertRecord> for RevertIndex {
    fn follow(&mut self, before: Option<&RevertRecord>, after: Option<&RevertRecord>) {
        if let Some(revert) = before {
            self.open.remove(&revert.name());
            self.by_attempt.remove(&revert.attempt.0);
        }
        if let Some(revert) = after {
            self.by_attempt.insert(revert.attempt.0, revert.volume.0);
            if revert.is_open() {
                self.open.insert(revert.name());
            }
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn revert(volume: u128, attempt: u128) -> RevertRecord {
        RevertRecord {
            volume: Text(VolumeId(volume)),
            attempt: Text(SnapshotId(attempt)),
            snapshot: Text(SnapshotId(1)),
            snapshot_name: "s1".into(),
            phase: RevertPhase::Wished,
            wished_ms: 1_700_000_000_000,
            ended_ms: 0,
            lsn: 0,
            failure: String::new(),
            recorded: false,
            trims: false,
            former: Vec::new(),
        }
    }

    #[test]
    fn the_former_reverts_that_are_remembered_are_the_last_ones_and_have_a_limit() {
        let mut last = revert(7, 1);
        (2..=100).for_each(|attempt| last.replace_by(&revert(7, attempt)));
        assert_eq!((last.attempt.0, last.former.len()), (SnapshotId(100), FORMER_MAX));
        assert_eq!(last.former.last(), Some(&Text(SnapshotId(99))));
    }

    #[test]
    fn a_revert_is_done_once_and_its_record_in_the_history_is_removed_after_it() {
        let mut revert = revert(7, 9);
        assert!(!revert.cleared(4) && revert.is_under_way(), "it is not answered yet");
        assert!(revert.done(12, 5));
        assert!(!revert.done(13, 6), "a repeat");
        assert!(!revert.refused("late", false, 7));
        assert!(!revert.is_under_way() && revert.is_open());
        assert!(!revert.cleared(8));
        assert_eq!((revert.is_open(), revert.lsn, revert.ended_ms), (false, 12, 5));
    }

    #[test]
    fn a_refusal_is_certain_once_no_repeat_of_the_command_can_do_it_any_more() {
        let mut gone = revert(7, 9);
        assert!(gone.refused("there is no such snapshot", true, 5));
        assert!(!gone.is_open() && gone.phase == RevertPhase::Failed);
        let mut refused = revert(7, 9);
        assert!(refused.refused("too many", false, 5));
        assert!(refused.is_under_way() && refused.ended_ms == 0);
        let mut overtaken = refused.clone();
        assert!(overtaken.done(12, 6), "a repeat found a place");
        assert_eq!((overtaken.phase, overtaken.failure.as_str()), (RevertPhase::Done, ""));
        assert!(refused.cleared(7));
        assert_eq!((refused.phase, refused.ended_ms), (RevertPhase::Failed, 7));
        assert!(!refused.is_open());
    }

    #[test]
    fn the_index_follows_every_change() {
        let mut index = RevertIndex::default();
        let wished = revert(7, 9);
        index.follow(None, Some(&wished));
        assert_eq!((index.open().len(), index.volume_of(SnapshotId(9))), (1, Some(VolumeId(7))));
        let mut over = wished.clone();
        over.refused("gone", true, 5);
        index.follow(Some(&wished), Some(&over));
        assert_eq!((index.open().len(), index.volume_of(SnapshotId(9))), (0, Some(VolumeId(7))));
        index.follow(Some(&over), None);
        assert_eq!(index.volume_of(SnapshotId(9)), None);
    }
}
