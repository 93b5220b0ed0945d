//! The records of the controller's own term, and of records that do not rule.

use quoin_types::{Term, TermId};
use serde::{Deserialize, Serialize};

use crate::records::{Record, Text};

/// The term in which this controller rules, or did; without one it is term 0.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TermRecord {
    pub number: u64,
    pub id: Text<TermId>,
    pub since_ms: u64,
}

impl TermRecord {
    /// There is one at most.
    pub const NAME: &'static str = "controller";

    pub fn term(&self) -> Term {
        Term { number: self.number, id: self.id.0 }
    }
}

impl Record for TermRecord {
    type Index = ();
    const PREFIX: &'static str = "term/";
    fn name(&self) -> String {
        Self::NAME.to_owned()
    }
}

/// That a controller of a higher term took the place of this one, which ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SupersededRecord {
    pub number: u64,
    pub id: Text<TermId>,
    /// The member that proved it.
    pub told_by: String,
    pub since_ms: u64,
}

impl SupersededRecord {
    /// There is one at most.
    pub const NAME: &'static str = "controller";

    pub fn by(&self) -> Term {
        Term { number: self.number, id: self.id.0 }
    }
}

impl Record for SupersededRecord {
    type Index = ();
    const PREFIX: &'static str = "superseded/";
    fn name(&self) -> String {
        Self::NAME.to_owned()
    }
}

/// That the records were lost or come from an old copy: until they agree with what the pools hold,
/// no member gets an order by them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecoveryRecord {
    /// In words, as in "they were lost".
    pub why: String,
    pub since_ms: u64,
}

impl RecoveryRecord {
    /// There is one at most.
    pub const NAME: &'static str = "records";
}

impl Record for RecoveryRecord {
    type Index = ();
    const PREFIX: &'static str = "recovery/";
    fn name(&self) -> String {
        Self::NAME.to_owned()
    }
}

/// That the records here are not the cluster's to rule by: they are being made, or the cluster's have moved to another
/// store. No controller starts on them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MoveRecord {
    pub state: MoveState,
    /// Of the move or the restore: the same on both ends. For a move, the id of the term that begins with it.
    pub id: Text<TermId>,
    /// Number of that term.
    pub number: u64,
    /// The other end, in words.
    pub place: String,
    pub since_ms: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MoveState {
    /// They come from `place`, and may not be all there.
    Filling,
    /// They are at `place` now.
    Moved,
}

impl MoveRecord {
    /// There is one at most.
    pub const NAME: &'static str = "records";
}

impl Record for MoveRecord {
    type Index = ();
    const PREFIX: &'static str = "move/";
    fn name(&self) -> String {
        Self::NAME.to_owned()
    }
}
