//! The bases of all clones of a pool.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included, Unbounded};

use quoin_types::{ReplicaGuid, SnapshotId};

use crate::format::node::Root;
use crate::format::relatives::{BaseId, BaseState};

/// Bases one behind the other that a look-up may have to go through: clones of clones of clones.
/// A longer line is refused when a clone is made, and ends in damage where a disk says so.
pub const BASES_DEEP_MAX: usize = 16;

/// A base.
#[derive(Clone, Copy, Debug)]
pub struct Base {
    /// No block of it has a higher version.
    pub lsn: u64,
    pub blocks: u64,
    /// Its map. Clean-up of the replica that keeps it moves blocks and nodes.
    pub root: Root,
    /// The base that shows where this one has no block.
    pub parent: Option<BaseId>,
    /// Clones and bases that show it.
    users: usize,
}

impl Base {
    pub fn new(state: &BaseState) -> Self {
        let BaseState { lsn, blocks, root, parent, .. } = *state;
        Base { lsn, blocks, root, parent, users: 0 }
    }

    fn state(&self, snapshot: SnapshotId) -> BaseState {
        let Base { lsn, blocks, root, parent, .. } = *self;
        BaseState { snapshot, lsn, blocks, parent, root }
    }
}

/// All bases of a pool, each under the replica that keeps it.
#[derive(Default)]
pub struct Bases {
    all: BTreeMap<BaseId, Base>,
    /// Some base may have lost its last user.
    has_unused: bool,
}

impl Bases {
    pub fn get(&self, id: BaseId) -> Option<&Base> {
        self.all.get(&id)
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Adds a base without users.
    pub fn insert(&mut self, replica: ReplicaGuid, state: &BaseState) {
        let id = BaseId { replica, snapshot: state.snapshot };
        self.all.entry(id).or_insert_with(|| Base::new(state));
        self.has_unused = true;
    }

    /// The bases that a replica keeps, by their snapshots.
    pub fn of(&self, replica: ReplicaGuid) -> impl Iterator<Item = (SnapshotId, &Base)> {
        self.all.range(Self::range_of(replica)).map(|(id, base)| (id.snapshot, base))
    }

    pub fn of_mut(&mut self, replica: ReplicaGuid) -> impl Iterator<Item = &mut Base> {
        self.all.range_mut(Self::range_of(replica)).map(|(_, base)| base)
    }

    fn range_of(replica: ReplicaGuid) -> (std::ops::Bound<BaseId>, std::ops::Bound<BaseId>) {
        let first = BaseId { replica, snapshot: SnapshotId(0) };
        let end = match replica.0.checked_add(1) {
            Some(next) => Excluded(BaseId { replica: ReplicaGuid(next), snapshot: SnapshotId(0) }),
            None => Unbounded,
        };
        (Included(first), end)
    }

    /// What a record says of the bases that a replica keeps.
    pub fn states(&self, replica: ReplicaGuid) -> Vec<BaseState> {
        self.of(replica).map(|(snapshot, base)| base.state(snapshot)).collect()
    }

    /// The highest LSN of the bases that a replica keeps; 0: it keeps none.
    pub fn kept_through(&self, replica: ReplicaGuid) -> u64 {
        self.of(replica).map(|(_, base)| base.lsn).max().unwrap_or(0)
    }

    /// The base and those behind it, at most [`BASES_DEEP_MAX`].
    pub fn line(&self, first: Option<BaseId>) -> impl Iterator<Item = (BaseId, &Base)> {
        let get = |id: BaseId| self.all.get(&id).map(|base| (id, base));
        let next = move |(_, base): &(BaseId, &Base)| base.parent.and_then(get);
        std::iter::successors(first.and_then(get), next).take(BASES_DEEP_MAX)
    }

    /// Whether the line of bases from here on is whole and short enough to be read.
    pub fn is_sound(&self, first: BaseId) -> bool {
        let (mut next, mut deep) = (Some(first), 0);
        while let Some(id) = next {
            let Some(base) = self.all.get(&id) else { return false };
            deep += 1;
            if deep > BASES_DEEP_MAX {
                return false;
            }
            next = base.parent;
        }
        true
    }

    /// How many bases lie one behind the other from here on.
    pub fn depth(&self, first: Option<BaseId>) -> usize {
        self.line(first).count()
    }

    /// A clone or a base shows this base from now on.
    pub fn begin_use(&mut self, id: BaseId) {
        if let Some(base) = self.all.get_mut(&id) {
            base.users += 1;
        }
    }

    /// A clone or a base does not show it any more.
    pub fn end_use(&mut self, id: BaseId) {
        if let Some(base) = self.all.get_mut(&id) {
            base.users = base.users.saturating_sub(1);
            self.has_unused |= base.users == 0;
        }
    }

    /// Takes a base out that no one shows any more.
    pub fn take_unused(&mut self) -> Option<(BaseId, Base)> {
        if !self.has_unused {
            return None;
        }
        let unused = self.all.iter().find(|(_, base)| base.users == 0).map(|(id, _)| *id);
        let Some(id) = unused else {
            self.has_unused = false;
            return None;
        };
        let base = self.all.remove(&id)?;
        if let Some(parent) = base.parent {
            self.end_use(parent);
        }
        Some((id, base))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(replica: u128, snapshot: u128) -> BaseId {
        BaseId { replica: ReplicaGuid(replica), snapshot: SnapshotId(snapshot) }
    }

    fn add(bases: &mut Bases, of: BaseId, lsn: u64, parent: Option<BaseId>) {
        let (root, blocks) = (Root::default(), 8);
        let state = BaseState { snapshot: of.snapshot, lsn, blocks, parent, root };
        bases.insert(of.replica, &state);
        parent.into_iter().for_each(|parent| bases.begin_use(parent));
    }

    #[test]
    fn a_base_is_given_up_with_its_last_user_and_takes_its_own_base_along() {
        let mut bases = Bases::default();
        add(&mut bases, id(1, 1), 5, None);
        add(&mut bases, id(2, 1), 9, Some(id(1, 1)));
        bases.begin_use(id(2, 1));
        bases.begin_use(id(2, 1));
        assert!(bases.take_unused().is_none());
        bases.end_use(id(2, 1));
        assert!(bases.take_unused().is_none(), "another clone shows it");
        bases.end_use(id(2, 1));
        let mut taken = || bases.take_unused().map(|(id, _)| id);
        assert_eq!([taken(), taken()], [Some(id(2, 1)), Some(id(1, 1))]);
        assert!(bases.take_unused().is_none() && bases.is_empty());
    }

    #[test]
    fn bases_are_found_by_the_replica_that_keeps_them() {
        let mut bases = Bases::default();
        for (of, lsn) in [(id(1, 9), 3), (id(2, 1), 7), (id(2, 5), 4), (id(u128::MAX, 1), 8)] {
            add(&mut bases, of, lsn, None);
        }
        let of = |replica| -> Vec<u64> {
            bases.of(ReplicaGuid(replica)).map(|(_, base)| base.lsn).collect()
        };
        assert_eq!([of(1), of(2), of(3), of(u128::MAX)], [vec![3], vec![7, 4], vec![], vec![8]]);
        assert_eq!(bases.kept_through(ReplicaGuid(2)), 7);
    }

    #[test]
    fn a_line_without_an_end_is_not_sound_and_is_not_followed_for_ever() {
        let mut bases = Bases::default();
        add(&mut bases, id(1, 1), 5, Some(id(2, 1)));
        assert!(!bases.is_sound(id(1, 1)), "a base is missing");
        add(&mut bases, id(2, 1), 9, None);
        assert!(bases.is_sound(id(1, 1)));
        add(&mut bases, id(3, 1), 9, Some(id(3, 1)));
        assert!(!bases.is_sound(id(3, 1)), "a circle");
        assert_eq!(bases.depth(Some(id(3, 1))), BASES_DEEP_MAX);
    }
}
