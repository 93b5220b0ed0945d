//! The end of a mirror, and another one of the same group after it: when a record may be forgotten, and what a side
//! does that still has one of the former mirror.

use quoin_types::ids::{GroupId, VolumeId};

use super::chain::{Begun, Chain, ClusterId, Generation};
use super::record::{Parameters, Record, Role};

impl Record {
    /// The record of a mirror that begins here. Its first generation has an id that was drawn at random, as one of the
    /// same group may have begun, and ended, before.
    pub fn begun(
        group: GroupId,
        [cluster, peer]: [ClusterId; 2],
        members: Vec<VolumeId>,
        parameters: Parameters,
        (id, term): (u128, u64),
    ) -> Self {
        let generation = Generation { number: 1, cluster, id };
        let chain = Chain::new(Begun { generation, at: None });
        Self { chain, term, ..Self::primary(group, [cluster, peer], members, parameters) }
    }

    /// Returns true for the record of a mirror that was ended and that the other side knows of, or never had a copy
    /// of. `heard`: the role of the other side's last word.
    pub fn is_over(&self, heard: Option<Role>) -> bool {
        let knows = matches!(heard, Some(Role::Orphan | Role::Off));
        let has_no_copy = !self.is_own() || !self.is_paired;
        self.role == Role::Off && (knows || has_no_copy)
    }

    /// Returns true if the other side begins a mirror that is not the one of this record: its first generation is none
    /// of this side's.
    pub fn is_another(&self, theirs: &Self) -> bool {
        let begun = theirs.chain.all();
        begun[0].at.is_none() && !begun.iter().any(|begun| self.chain.has(begun.generation))
    }
}
