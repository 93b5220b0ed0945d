//! The records of pools.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Nodes, Record};

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolRecord {
    pub name: String,
    /// Which storage this is; another one under the same name has lost all its replicas.
    pub pool_id: String,
    pub node: String,
    pub address: String,
    pub topology: BTreeMap<String, String>,
    /// The highest seen; a lower one means that an older state of the disk came back.
    pub start_counter: u64,
    /// Nonce of the start with that counter; 0: not reported. Another one means the same.
    pub start_nonce: u64,
    /// Start before that one, and its nonce; 0: none is known. A report with them is late.
    pub former_start: u64,
    pub former_nonce: u64,
    /// The highest mark that it told: a count that moves with what it promises and acknowledges.
    pub mark: u64,
    pub rolled_back: bool,
    /// Grows with every request for a scrub.
    pub scrub_request: u64,
}

impl Record for PoolRecord {
    type Index = ();
    const PREFIX: &'static str = "pool/";
    fn name(&self) -> String {
        self.name.clone()
    }
    fn is_news(&self, before: &Self) -> bool {
        *before != PoolRecord { mark: before.mark, ..self.clone() }
    }
    fn concerned(&self) -> Concerned {
        // Nodes are told its address.
        Concerned::Some { pools: [self.name.clone()].into(), nodes: Nodes::All }
    }
}

/// That a pool, or all pools of a node, take nothing new; apart from the pool's and the node's
/// own records, which follow what these report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CordonRecord {
    /// "pool" or "node".
    pub kind: String,
    pub holder: String,
    /// Its replicas move away.
    pub drain: bool,
    /// That it was empty was told.
    pub told: bool,
    pub since_ms: u64,
    /// Why the pool's disk is taken to be failing; empty: it is not.
    pub dying: String,
}

impl Record for CordonRecord {
    type Index = ();
    const PREFIX: &'static str = "cordon/";
    fn name(&self) -> String {
        Self::name_of(&self.kind, &self.holder)
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}

impl CordonRecord {
    pub fn name_of(kind: &str, holder: &str) -> String {
        format!("{kind}/{holder}")
    }
}
