//! Background work of one replica: jobs under way, and why it has none.

use crate::background::checkpoint::{CheckpointJob, Commit};
use crate::background::cleaner::CleanJob;
use crate::background::recount::LiveCount;
use crate::clones::flatten::Flatten;
use crate::format::relatives::BaseId;

/// Work that is under way or owed.
#[derive(Default)]
pub struct Maintenance {
    pub checkpoint: Option<CheckpointJob>,
    pub clean: Option<CleanJob>,
    pub commit: Option<Commit>,
    /// The metadata ring had no room for the last commit: another one has to wait for a change.
    pub commit_waits: bool,
    /// Segments that no view needs, to be freed with the next commit: first unit, units.
    pub pending_free: Vec<(u32, u32)>,
    /// The durable record is older than the maps in memory (blocks moved, a view dropped).
    pub dirty: bool,
    /// The log is to be folded however little of it there is: some of it is rotten and only needed until it
    /// is folded, it has too many Reverts, or a clone waits for a snapshot in it.
    pub fold_wanted: bool,
    /// Dead blocks are to be given back, though space is plenty.
    pub reclaims: bool,
    /// An increment waits for the fold up to this LSN, where it begins: nothing is folded beyond.
    pub fold_for_increment: Option<u64>,
    /// A clone on its way to blocks of its own alone.
    pub flatten: Option<Flatten>,
    /// Bases that the maps in memory do not show any more, and the last record still does.
    pub given_up_bases: Vec<BaseId>,
    pub node_gain: NodeGain,
    pub count: LiveCount,
    /// The replica has no background work, for this reason.
    pub quarantined: Option<Cause>,
}

impl Maintenance {
    /// No commit is under way, and none has to wait for a change.
    pub fn may_commit(&self) -> bool {
        self.commit.is_none() && !self.commit_waits
    }

    pub fn has_job(&self) -> bool {
        self.checkpoint.is_some() || self.clean.is_some()
    }

    pub fn pending_units(&self) -> u32 {
        self.pending_free.iter().map(|(_, units)| *units).sum()
    }

    /// Units that the commit under way frees.
    pub fn committing_units(&self) -> u32 {
        self.commit.iter().flat_map(|c| &c.frees).map(|(_, units)| *units).sum()
    }

    /// All bases that wait for a record without them.
    pub fn take_given_up_bases(&mut self) -> Vec<BaseId> {
        let committing = self.commit.iter_mut().flat_map(|c| std::mem::take(&mut c.given_up_bases));
        let mut all: Vec<BaseId> = committing.collect();
        all.append(&mut self.given_up_bases);
        all
    }

    /// Ends the quarantine of a replica that the disk refused to read, which may have passed.
    pub fn try_again(&mut self) {
        self.quarantined.take_if(|cause| *cause == Cause::Unreadable);
    }

    /// All segments, `(first unit, units)`, that wait to be freed.
    pub fn into_frees(self) -> impl Iterator<Item = (u32, u32)> {
        let committing = self.commit.into_iter().flat_map(|c| c.frees);
        self.pending_free.into_iter().chain(committing)
    }
}

/// Gain of emptying segments of nodes. With nodes that are written anew those above them
/// are, and leave as much dead where they were. Where leaves have a block or two each that is most of
/// what is written: two segments could have each other emptied for ever.
#[derive(Clone, Copy, Default)]
pub struct NodeGain {
    /// The newest segment when a map was changed last by anything but clean-up. What is dead in younger
    /// segments clean-up left there.
    changed_at_sequence: u64,
    /// Emptying a younger one has written more than half of what it made free.
    is_spent: bool,
}

impl NodeGain {
    /// Something else than clean-up changed a map, or made known what is dead of it.
    pub fn changed(&mut self, sequence: u64) {
        *self = NodeGain { changed_at_sequence: sequence, is_spent: false };
    }

    /// A segment of nodes was emptied.
    pub fn emptied(&mut self, sequence: u64, freed_bytes: u64, written_bytes: u64) {
        self.is_spent |= sequence > self.changed_at_sequence && 2 * written_bytes > freed_bytes;
    }

    /// Returns true if nothing is to be gained by emptying the segment.
    pub fn is_none_of(&self, sequence: u64) -> bool {
        self.is_spent && sequence > self.changed_at_sequence
    }
}

/// Why a replica has no background work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Its own data is damaged: it waits for its rebuild.
    Damaged,
    /// The disk refused to read something, which may pass.
    Unreadable,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_disk_refused_is_tried_again_and_damage_waits_for_its_rebuild() {
        for (cause, left) in [(Cause::Unreadable, None), (Cause::Damaged, Some(Cause::Damaged))] {
            let mut work = Maintenance { quarantined: Some(cause), ..Maintenance::default() };
            work.try_again();
            assert_eq!(work.quarantined, left);
        }
    }

    #[test]
    fn segments_that_clean_up_made_are_emptied_as_long_as_that_gains_half_of_each() {
        let mut gain = NodeGain::default();
        gain.changed(7);
        gain.emptied(7, 1000, 2000);
        assert!(!gain.is_none_of(8), "that one was older");
        gain.emptied(8, 1000, 500);
        assert!(!gain.is_none_of(9));
        gain.emptied(9, 1000, 501);
        assert!(gain.is_none_of(8) && !gain.is_none_of(7));
        gain.changed(8);
        assert!(!gain.is_none_of(8) && !gain.is_none_of(9));
    }

    #[test]
    fn a_deleted_replica_frees_what_waited_for_a_commit_and_what_one_was_under_way_for() {
        let frees = vec![(4, 1)];
        let (record, relatives) = (bytes::Bytes::new(), Default::default());
        let commit = Commit { ticket: 1, record, relatives, frees, given_up_bases: Vec::new() };
        let commit = Some(commit);
        let work = Maintenance { commit, pending_free: vec![(1, 2)], ..Maintenance::default() };
        assert_eq!(
            (work.pending_units(), work.committing_units(), work.may_commit()),
            (2, 1, false)
        );
        assert_eq!(work.into_frees().collect::<Vec<_>>(), [(1, 2), (4, 1)]);
    }
}
