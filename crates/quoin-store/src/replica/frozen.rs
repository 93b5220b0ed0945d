//! Views of snapshots above the folded map, made from the log when they are first read.
//!
//! Making one reads all of the log, which every request of a rebuild beside writers and clean-up
//! would pay for. So those that were read last are kept, several at once: transfers of different
//! snapshots take turns.

use quoin_types::Lsn;

use crate::replica::upper::Upper;

/// Views kept at once. Each takes about as much memory as the log's entries up to its snapshot;
/// one more is made anew whenever it is its turn.
const VIEWS_MAX: usize = 4;

struct Frozen {
    /// LSN of the snapshot.
    lsn: Lsn,
    /// Where the folded map ended that it stands on.
    stands_on: Lsn,
    upper: Upper,
}

/// The views of one replica, the one read last at the end.
#[derive(Default)]
pub struct FrozenViews {
    views: Vec<Frozen>,
}

impl FrozenViews {
    pub fn get(&self, lsn: Lsn) -> Option<&Upper> {
        self.views.iter().find(|view| view.lsn == lsn).map(|view| &view.upper)
    }

    /// Notes a read of the view of a snapshot. Returns false if no such view stands on the folded map: it
    /// has to be made.
    pub fn renew(&mut self, lsn: Lsn, folded: Lsn) -> bool {
        let found = self.views.iter().position(|view| (view.lsn, view.stands_on) == (lsn, folded));
        let Some(at) = found else { return false };
        self.views[at..].rotate_left(1);
        true
    }

    /// Keeps a view that was made, in place of the one that was not read for longest.
    pub fn keep(&mut self, lsn: Lsn, folded: Lsn, upper: Upper) {
        self.views.retain(|view| view.lsn != lsn);
        if self.views.len() >= VIEWS_MAX {
            self.views.remove(0);
        }
        self.views.push(Frozen { lsn, stands_on: folded, upper });
    }

    /// The log was folded up to here.
    pub fn fold(&mut self, folded: Lsn) {
        self.views.retain(|view| view.lsn > folded && !view.upper.has_reverts());
        for view in &mut self.views {
            view.stands_on = folded;
            view.upper.memtable.forget_through(folded.0);
        }
    }

    pub fn clear(&mut self) {
        self.views.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_views_read_last_are_kept_until_they_are_folded() {
        let mut frozen = FrozenViews::default();
        for lsn in 1..=6 {
            assert!(!frozen.renew(Lsn(lsn), Lsn::ZERO), "{lsn} is not there");
            frozen.keep(Lsn(lsn), Lsn::ZERO, Upper::default());
            // The first one is read between any two others.
            let is_first = frozen.renew(Lsn(1), Lsn::ZERO);
            assert!(is_first, "{lsn} took the place of the one that is in use");
        }
        let kept: Vec<u64> = (1..=6).filter(|lsn| frozen.get(Lsn(*lsn)).is_some()).collect();
        assert_eq!(kept, [1, 4, 5, 6]);
        assert!(frozen.renew(Lsn(5), Lsn::ZERO));
        assert!(!frozen.renew(Lsn(5), Lsn(3)), "it stands on an older map");
        frozen.fold(Lsn(4));
        assert!(frozen.renew(Lsn(5), Lsn(4)) && frozen.get(Lsn(4)).is_none());
    }
}
