//! Uses of a volume.
//!
//! The caches of a node hold the volume's state as that node left it. Once another node has used
//! the volume, nothing from these caches may reach it, also when the first node has the volume
//! again. So a record numbers its uses ([`Use`]): a use is the time in which one node, or a set of
//! nodes that share it, has the volume, over any number of attachments and openings.

use std::mem;

use quoin_types::mutant;
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
    /// Holder of the last use before this one that was opened; empty: not known. A use that nobody
    /// opens changes no block, and what was dead before it stays so.
    #[serde(default, rename = "used_before_by", skip_serializing_if = "String::is_empty")]
    pub before_by: String,
    /// Lower limit of the epochs of that use.
    #[serde(default, rename = "used_before_since_epoch", skip_serializing_if = "is_zero")]
    pub before_since_epoch: u64,
    /// The records were recovered and lack the node of the last epoch, which may be another one's. The
    /// use goes on only if its own node proves to hold that epoch.
    #[serde(default, rename = "used_unproven", skip_serializing_if = "std::ops::Not::not")]
    pub unproven: bool,
}

/// Stands for the nodes of a use that several share; no node has this name.
const SHARED: &str = "*";

impl Use {
    /// Begins the use of a node. `since_epoch` is above all epochs of other nodes' uses; `epoch`: the
    /// one that the volume has.
    pub fn begin(&mut self, node: &str, since_epoch: u64, epoch: u64) {
        if self.by != node || self.unproven {
            self.end(epoch);
            node.clone_into(&mut self.by);
            self.since_epoch = since_epoch;
        }
    }

    /// Begins a use by several nodes. It lasts as long as nodes that share the volume follow each
    /// other: what one of them has cached is its own affair.
    pub fn begin_shared(&mut self, since_epoch: u64, epoch: u64) {
        self.begin(SHARED, since_epoch, epoch);
    }

    /// Ends the use without a next one: the next one is new, whoever begins it. `epoch`: the one that the
    /// volume has.
    pub fn end(&mut self, epoch: u64) {
        if self.is_opened(epoch) && !mutant::is("opened-use-forgotten-at-the-next") {
            (self.before_by, self.before_since_epoch) = (mem::take(&mut self.by), self.since_epoch);
        }
        self.by.clear();
        self.unproven = false;
    }

    /// Marks the use of a record that was recovered and lacks openings.
    pub fn doubt(&mut self) {
        self.unproven = !self.by.is_empty() && !mutant::is("use-of-recovered-records-believed");
    }

    /// A node that has the volume in this use holds the last epoch.
    pub fn prove(&mut self, node: &str) {
        self.unproven &= self.by != node && !self.is_shared();
    }

    /// The use that is not proven ends, and the same nodes begin another one.
    pub fn begin_anew(&mut self, since_epoch: u64, epoch: u64) {
        let by = self.by.clone();
        self.begin(&by, since_epoch, epoch);
    }

    /// Returns true if the volume was opened in this use.
    fn is_opened(&self, epoch: u64) -> bool {
        !self.by.is_empty() && epoch >= self.since_epoch
    }

    pub fn is_shared(&self) -> bool {
        self.by == SHARED
    }

    /// The last use that was opened: the node that had it, in words, and its lower limit of epochs.
    pub fn last_opened(&self, epoch: u64) -> (&str, u64) {
        let (by, since_epoch) = match self.is_opened(epoch) {
            true => (&self.by, self.since_epoch),
            false => (&self.before_by, self.before_since_epoch),
        };
        (if by == SHARED { "other nodes" } else { by }, since_epoch)
    }

    /// First epoch of this node's use; 0 where the use is another node's.
    pub fn since_of(&self, node: &str) -> u64 {
        if self.by == node || self.is_shared() { self.since_epoch } else { 0 }
    }

    /// Returns true if a device on a node was made for an earlier use than the last one that was opened.
    /// `is_attached`: the node has the volume.
    pub fn is_over(&self, node: &str, made_for: u64, epoch: u64, is_attached: bool) -> bool {
        let is_of = |by: &str| if by == SHARED { is_attached } else { by == node };
        let is_before = |since_epoch: u64| made_for != 0 && made_for < since_epoch;
        if self.is_opened(epoch) {
            return !is_of(&self.by) || is_before(self.since_epoch);
        }
        // A device of unknown use may be of the one that begins now.
        let is_anothers = !is_of(&self.before_by) && (made_for != 0 || !is_of(&self.by));
        let since_epoch = self.before_since_epoch;
        !self.before_by.is_empty()
            && (is_before(since_epoch) || (is_anothers && made_for <= since_epoch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_lasts_over_attachments_of_one_node_and_ends_with_another_ones_opening() {
        let mut used = Use::default();
        assert!(!used.is_over("h1", 0, 9, true), "records of former versions say nothing");
        used.begin("h1", 5, 4);
        used.begin("h1", 9, 4);
        assert_eq!((used.since_of("h1"), used.since_of("h2")), (5, 0));
        assert!(!used.is_over("h1", 5, 7, true));

        used.begin("h2", 8, 7);
        assert!(!used.is_over("h1", 5, 7, false), "nobody has opened it there yet");
        assert!(used.is_over("h1", 5, 8, false));
        assert!(used.is_over("h1", 0, 8, false), "also where its use was not told");
        assert!(!used.is_over("h2", 8, 8, true));

        // Back on the first node: a device of its former use does not belong to its new use.
        used.begin("h1", 9, 8);
        assert!(used.is_over("h1", 5, 9, true));
        assert!(!used.is_over("h1", 9, 9, true));
    }

    #[test]
    fn a_shared_use_lasts_over_the_nodes_that_have_it_and_ends_for_each_one_that_leaves() {
        let mut used = Use::default();
        used.begin("h1", 5, 4);
        used.begin_shared(8, 7);
        used.begin_shared(11, 7);
        assert_eq!((used.since_of("h1"), used.since_of("h2")), (8, 8));
        assert!(used.is_over("h1", 5, 8, true), "of the use that it had alone");
        assert!(!used.is_over("h1", 8, 12, true) && !used.is_over("h2", 0, 12, true));
        assert!(used.is_over("h2", 8, 12, false), "it is not attached there any more");
        used.begin("h1", 14, 13);
        assert!(used.is_over("h1", 8, 14, true) && used.is_over("h2", 8, 14, false));
    }

    #[test]
    fn a_use_of_recovered_records_goes_on_for_the_holder_of_the_last_epoch_alone() {
        crate::break_a_rule();
        let mut used = Use::default();
        used.doubt();
        assert!(!used.unproven, "there is none");
        used.begin("h1", 5, 4);
        used.doubt();
        let mut proven = used.clone();
        proven.prove("h2");
        assert_eq!(proven, used, "it is not its use");
        proven.prove("h1");
        proven.begin("h1", 12, 11);
        assert_eq!((proven.since_of("h1"), proven.unproven), (5, false));
        used.begin_anew(12, 11);
        assert_eq!((used.since_of("h1"), used.unproven), (12, false));
        assert!(used.is_over("h1", 5, 12, true) && !used.is_over("h1", 12, 12, true));
        used.doubt();
        used.begin("h1", 14, 13);
        assert_eq!(used.since_of("h1"), 14);
    }

    #[test]
    fn a_use_that_nobody_opens_hides_no_opened_one_before_it() {
        let mut used = Use::default();
        used.begin("h1", 3, 2);
        used.begin("h2", 5, 4);
        assert!(used.is_over("h1", 3, 5, false));
        // The first node comes back, a third one comes, or a revert ends the use; nobody opens it.
        for next in ["h1", "h3", ""] {
            let mut used = used.clone();
            match next {
                "" => used.end(6),
                node => used.begin(node, 7, 6),
            }
            assert!(used.is_over("h1", 3, 6, next == "h1"), "{next}");
            assert_eq!(used.last_opened(6), ("h2", 5));
            assert!(!used.is_over("h2", 5, 6, false), "nothing was changed after it: {next}");
            assert!(next.is_empty() || !used.is_over(next, 7, 6, true), "it is to be opened");
            assert!(!used.is_over("h1", 0, 6, true) || next != "h1", "it may be the new one");
            // Another one that nobody opens follows.
            used.begin("h4", 8, 6);
            assert!(used.is_over("h1", 3, 6, false) && used.is_over("h1", 0, 6, false), "{next}");
            used.begin("h2", 9, 8);
            assert!(used.is_over("h2", 5, 8, true), "the fourth one opened it: {next}");
        }
        // Shared: each one that left stays dead, and each one that has it goes on.
        used.begin_shared(7, 6);
        used.begin("h1", 9, 8);
        assert!(used.is_over("h2", 7, 8, false) && !used.is_over("h1", 7, 8, true));
        assert!(!used.is_over("h1", 9, 8, false), "detached again before it was opened");
    }
}
