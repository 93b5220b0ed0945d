//! The records of verifications.

use quoin_types::{ReplicaId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Record, Text};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum VerifyState {
    /// Wanted.
    #[default]
    Open,
    Ended,
    Failed,
    Stopped,
}

/// The last verification of a volume, wanted or done.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VerifyRecord {
    pub volume: Text<VolumeId>,
    pub request: u64,
    pub repair: bool,
    pub from: Option<Text<ReplicaId>>,
    pub state: VerifyState,
    pub began_ms: u64,
    pub ended_ms: u64,
    pub message: String,
    #[serde(flatten)]
    pub found: VerifyCounts,
    pub replicas: Vec<ReplicaResult>,
    pub findings: Vec<FindingRecord>,
}

/// How far a verification is, and blocks that it found.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VerifyCounts {
    pub checked_bytes: u64,
    pub total_bytes: u64,
    pub read_bytes: u64,
    pub bad: u64,
    pub lost: u64,
    pub differing: u64,
    pub repaired: u64,
    pub unsettled: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaResult {
    pub replica_id: String,
    pub guid: String,
    pub pool: String,
    pub checked_bytes: u64,
    pub bad: u64,
    pub repaired: u64,
    pub left_out: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FindingRecord {
    pub offset: u64,
    pub length: u64,
    pub what: String,
    pub replica_id: String,
    pub pool: String,
    pub repaired: bool,
    pub message: String,
}

impl Record for VerifyRecord {
    type Index = ();
    const PREFIX: &'static str = "verify/";
    fn name(&self) -> String {
        self.volume.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        Concerned::all_nodes()
    }
    fn volume(&self) -> Option<VolumeId> {
        Some(self.volume.0)
    }
}
