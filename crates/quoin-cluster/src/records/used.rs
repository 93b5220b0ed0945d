//! Uses of a volume.
//!
//! The caches of a node hold the volume's state as that node left it. Once another node has used
//! the volume, nothing from these caches may reach it, also when the first node has the volume
//! again. So a record numbers its uses ([`Use`]): a use is the time in which one node alone has the
//! volume, over any number of attachments and openings.

use serde::{Deserialize, Serialize};

use crate::records::is_zero;

/// Use of a volume by one node.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Use {
    /// Node that had the volume attached last; empty: not known.
    #[serde(default, rename = "used_by", skip_serializing_if = "String::is_empty")]
    pub by: String,
    /// Lower limit of the epochs of this use; all epochs of earlier uses are lower.
    #[serde(default, rename = "used_since_epoch", skip_serializing_if = "is_zero")]
    pub since_epoch: u64,
}

/// Stands for the nodes of a use that several share; no node has this name.
const SHARED: &str = "*";

impl Use {
    /// Begins the use of a node. `since_epoch` is above all epochs of other nodes' uses.
    pub fn begin(&mut self, node: &str, since_epoch: u64) {
        if self.by != node {
            node.clone_into(&mut self.by);
            self.since_epoch = since_epoch;
        }
    }

    /// Begins a use by several nodes. It lasts as long as nodes that share the volume follow each
    /// other: what one of them has cached is its own affair.
    pub fn begin_shared(&mut self, since_epoch: u64) {
        self.begin(SHARED, since_epoch);
    }

    /// Ends the use without a next one: the next one is new, whoever begins it.
    pub fn end(&mut self) {
        self.by.clear();
    }

    pub fn is_shared(&self) -> bool {
        self.by == SHARED
    }

    /// Node that has it, in words.
    pub fn user(&self) -> &str {
        if self.is_shared() { "other nodes" } else { &self.by }
    }

    /// First epoch of this node's use; 0 where the use is another node's.
    pub fn since_of(&self, node: &str) -> u64 {
        if self.by == node || self.is_shared() { self.since_epoch } else { 0 }
    }

    /// Returns true if a device on a node was made for an earlier use, and this use has begun with an
    /// opening. `is_attached`: the node has the volume.
    pub fn is_over(&self, node: &str, made_for: u64, epoch: u64, is_attached: bool) -> bool {
        let is_another = match self.is_shared() {
            true => !is_attached,
            false => self.by != node,
        };
        let is_earlier = is_another || (made_for != 0 && made_for < self.since_epoch);
        !self.by.is_empty() && is_earlier && epoch >= self.since_epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_lasts_over_attachments_of_one_node_and_ends_with_another_ones_opening() {
        let mut used = Use::default();
        assert!(!used.is_over("h1", 0, 9, true), "records of former versions say nothing");
        used.begin("h1", 5);
        used.begin("h1", 9);
        assert_eq!((used.since_of("h1"), used.since_of("h2")), (5, 0));
        assert!(!used.is_over("h1", 5, 7, true));

        used.begin("h2", 8);
        assert!(!used.is_over("h1", 5, 7, false), "nobody has opened it there yet");
        assert!(used.is_over("h1", 5, 8, false));
        assert!(used.is_over("h1", 0, 8, false), "also where its use was not told");
        assert!(!used.is_over("h2", 8, 8, true));

        // Back on the first node: a device of its former use does not belong to its new use.
        used.begin("h1", 8);
        assert!(used.is_over("h1", 5, 9, true));
        assert!(!used.is_over("h1", 9, 9, true));
    }

    #[test]
    fn a_shared_use_lasts_over_the_nodes_that_have_it_and_ends_for_each_one_that_leaves() {
        let mut used = Use::default();
        used.begin("h1", 5);
        used.begin_shared(8);
        used.begin_shared(11);
        assert_eq!((used.since_of("h1"), used.since_of("h2")), (8, 8));
        assert!(used.is_over("h1", 5, 8, true), "of the use that it had alone");
        assert!(!used.is_over("h1", 8, 12, true) && !used.is_over("h2", 0, 12, true));
        assert!(used.is_over("h2", 8, 12, false), "it is not attached there any more");
        used.begin("h1", 14);
        assert!(used.is_over("h1", 8, 14, true) && used.is_over("h2", 8, 14, false));
    }
}
