//! The fate of a volume's grants: which node has the present epoch, and which ones no pool opens.

use serde::{Deserialize, Serialize};

use crate::records::{VolumeRecord, is_zero};

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
