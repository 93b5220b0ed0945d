//! The fate of a volume's grants: which node has the present epoch, and which ones no pool opens.

use std::collections::BTreeMap;

use quoin_types::mutant;
use serde::{Deserialize, Serialize};

use crate::records::{VolumeRecord, is_zero};

/// Stands for nodes that are not known; no node has this name.
pub const ANY_NODE: &str = "*";
/// Most former holders that are told apart.
const FORMER_MAX: usize = 64;

/// A part of a volume's record; its fields stand among the record's own.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Grants {
    /// Left out when the next epoch is given: a record that was made from pools cannot know of
    /// epochs that were given and never shown to a pool.
    pub epochs_skipped: u64,
    /// The node that acquired the record's epoch; empty: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub holder: String,
    /// Sessions up to this epoch are opened by no pool any more that has its orders since: see [`crate::ownership::grants::fence`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fenced: u64,
    /// Replicas that are open do not get time to close either.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fenced_at_once: bool,
    /// The last epoch by whose grant the content may have been changed; 0: there was none. `None`: it is not
    /// known, as in records that were recovered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<u64>,
    /// Nodes that held earlier epochs, with the last one of each, as long as their targets may still acknowledge
    /// under them; [`ANY_NODE`]: others too.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub former: BTreeMap<String, u64>,
    /// Nothing is acknowledged any more under a lower epoch: a quorum of the pools has promised this one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ended: u64,
}

impl Grants {
    /// A node acquires the epoch after `epoch`: the sessions of its predecessor may live on.
    pub fn hand_over(&mut self, node: &str, epoch: u64) {
        let before = std::mem::replace(&mut self.holder, node.to_owned());
        // The epoch of a fence was granted to no node.
        let last = if self.fenced == epoch { epoch.saturating_sub(1) } else { epoch };
        if before == node || last < self.ended.max(1) || mutant::is("former-holders-forgotten") {
            return;
        }
        self.former.insert(if before.is_empty() { ANY_NODE.to_owned() } else { before }, last);
        if self.former.len() > FORMER_MAX {
            self.former = [(ANY_NODE.to_owned(), last)].into();
        }
    }

    /// Nothing is acknowledged any more under an epoch below `ended`.
    pub fn end_below(&mut self, ended: u64) {
        self.ended = self.ended.max(ended);
        self.former.retain(|_, last| *last >= self.ended);
    }
}

impl VolumeRecord {
    /// Returns true if a node that has it may write it at present.
    pub fn has_writers(&self) -> bool {
        self.attachments.iter().any(|attachment| !attachment.writes_nothing())
    }

    /// Returns true if there is a grant that its holder may still use.
    pub fn is_granted(&self) -> bool {
        self.grants.fenced < self.opened.epoch
    }

    /// Returns true if this node may hold the current grant. Recovered records do not say which
    /// node holds the epoch.
    pub fn may_be_held_by(&self, node: &str) -> bool {
        self.is_granted() && (self.grants.holder.is_empty() || self.grants.holder == node)
    }
}
