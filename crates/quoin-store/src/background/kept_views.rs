//! Which views have to be asked whether a block is live.
//!
//! Versions only grow from view to view. A block of version v is shown by the first view that can
//! hold v and by those that follow it, up to the one in which it was replaced. So the first one
//! decides, and the others need no look, whatever their number. A **break** in the history is an LSN
//! from which on views may show a block that the views before do not: under the version of a Revert
//! that brought it back, or as the copy of a peer that mended this view alone. The first view behind
//! each break is asked too. Breaks between which no view is left count as one, so there are no more
//! of them than views.

use crate::format::node::Root;

/// LSNs from which on a view may show what the ones before it do not, in ascending order.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Breaks(Vec<u64>);

impl Breaks {
    /// Breaks that were recorded, in any order.
    pub fn restored(mut lsns: Vec<u64>) -> Self {
        lsns.sort_unstable();
        lsns.dedup();
        Breaks(lsns)
    }

    /// A history of which nothing is known but its snapshots: each view may begin anew.
    pub fn unknown(snapshots: impl Iterator<Item = u64>) -> Self {
        Breaks::restored(snapshots.map(|lsn| lsn.saturating_add(1)).collect())
    }

    pub fn add(&mut self, lsn: u64) {
        if let Err(at) = self.0.binary_search(&lsn) {
            self.0.insert(at, lsn);
        }
    }

    /// Forgets those that make no difference beside these snapshots, `newest` in ascending order.
    /// Views only go, or come behind all others.
    pub fn forget_needless(&mut self, newest: &[u64]) {
        self.0.dedup_by_key(|lsn| view_behind(newest, *lsn));
        self.0.retain(|lsn| view_behind(newest, *lsn) > 0);
    }

    pub fn lsns(&self) -> &[u64] {
        &self.0
    }
}

/// The first view that can hold this version. Behind the snapshots comes the live map.
fn view_behind(newest: &[u64], version: u64) -> usize {
    newest.partition_point(|lsn| *lsn < version)
}

/// The views that must survive.
pub struct KeptViews {
    /// Snapshots and the live map, in the order of the history, and the newest versions that the
    /// snapshots can hold.
    history: Vec<Root>,
    newest: Vec<u64>,
    /// The first view behind each break.
    begins: Vec<usize>,
    /// Views of transfers and increments, which are always asked.
    others: Vec<Root>,
}

impl KeptViews {
    /// `snapshots`: the newest version and the map of each, in ascending order.
    pub fn new(
        snapshots: Vec<(u64, Root)>,
        live: Root,
        breaks: &Breaks,
        others: Vec<Root>,
    ) -> Self {
        let (newest, mut history): (Vec<u64>, Vec<Root>) = snapshots.into_iter().unzip();
        history.push(live);
        let begins = breaks.0.iter().map(|lsn| view_behind(&newest, *lsn)).collect();
        KeptViews { history, newest, begins, others }
    }

    /// The live map alone.
    pub fn live_alone(live: Root) -> Self {
        KeptViews::new(Vec::new(), live, &Breaks::default(), Vec::new())
    }

    /// Number of views that may have to be asked about one block.
    pub fn asked_max(&self) -> usize {
        1 + self.begins.len() + self.others.len()
    }

    /// The views to ask about a block of this version.
    pub fn ask(&self, version: u64) -> Question<'_> {
        Question { views: self, at: view_behind(&self.newest, version), is_decided: false }
    }
}

/// A block that is looked for in one view after the other.
pub struct Question<'a> {
    views: &'a KeptViews,
    /// The next view; the others come behind the history.
    at: usize,
    is_decided: bool,
}

impl Question<'_> {
    /// The view that was asked last does not show the block, and would if the next ones did.
    pub fn decided(&mut self) {
        self.is_decided = true;
    }

    /// The map of the next view to ask.
    pub fn next_view(&mut self) -> Option<Root> {
        let history = &self.views.history;
        if std::mem::take(&mut self.is_decided) && self.at < history.len() {
            let begins = &self.views.begins;
            let next = begins.partition_point(|begin| *begin < self.at);
            self.at = begins.get(next).copied().unwrap_or(history.len());
        }
        let root = match self.at.checked_sub(history.len()) {
            None => history[self.at],
            Some(other) => *self.views.others.get(other)?,
        };
        self.at += 1;
        Some(root)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn root(level: u8) -> Root {
        Root { level, ..Root::default() }
    }

    /// Levels of the views that are asked if each decides.
    fn asked(views: &KeptViews, version: u64) -> Vec<u8> {
        let (mut question, mut levels) = (views.ask(version), Vec::new());
        while let Some(root) = question.next_view() {
            levels.push(root.level);
            question.decided();
        }
        levels
    }

    fn views(breaks: &[u64]) -> KeptViews {
        let snapshots = vec![(10, root(0)), (20, root(1)), (30, root(2)), (40, root(3))];
        let breaks = Breaks::restored(breaks.to_vec());
        KeptViews::new(snapshots, root(4), &breaks, vec![root(9)])
    }

    #[test]
    fn the_first_view_that_can_hold_a_version_decides_and_one_behind_each_later_break_is_asked() {
        for (breaks, version, levels) in [
            (&[][..], 5, &[0, 9][..]),
            (&[], 10, &[0, 9]),
            (&[], 11, &[1, 9]),
            (&[], 41, &[4, 9]),
            // Reverts behind the second snapshot and behind all of them.
            (&[25, 26, 45], 5, &[0, 2, 4, 9]),
            (&[25, 26, 45], 27, &[2, 4, 9]),
            (&[25, 26, 45], 31, &[3, 4, 9]),
            (&[25, 26, 45], 44, &[4, 9]),
        ] {
            assert_eq!(asked(&views(breaks), version), levels, "version {version}, {breaks:?}");
        }
    }

    #[test]
    fn a_view_that_cannot_tell_leaves_it_to_the_next_one() {
        let views = views(&[]);
        let mut question = views.ask(15);
        let all: Vec<u8> =
            std::iter::from_fn(|| question.next_view().map(|root| root.level)).collect();
        assert_eq!(all, [1, 2, 3, 4, 9]);
    }

    #[test]
    fn of_a_history_that_is_not_known_every_view_is_asked() {
        let snapshots = vec![(10, root(0)), (20, root(1))];
        let breaks = Breaks::unknown([10, 20].into_iter());
        let views = KeptViews::new(snapshots, root(2), &breaks, Vec::new());
        assert_eq!(asked(&views, 5), [0, 1, 2]);
    }

    proptest! {
        /// Breaks that were forgotten are not missed, whatever snapshots go and come later.
        #[test]
        fn what_is_forgotten_makes_no_difference_to_any_later_question(
            newest in prop::collection::btree_set(1u64..60, 0..8),
            breaks in prop::collection::vec(1u64..60, 0..10),
            goes in any::<u8>(),
            comes in prop::collection::btree_set(61u64..80, 0..3),
            version in 1u64..90,
        ) {
            let mut newest: Vec<u64> = newest.into_iter().collect();
            let all = Breaks::restored(breaks);
            let mut kept = all.clone();
            kept.forget_needless(&newest);
            prop_assert!(kept.lsns().len() <= newest.len());
            let mut number = 0;
            newest.retain(|_| {
                number += 1;
                goes >> (number - 1) & 1 == 0
            });
            newest.extend(comes);
            let of = |breaks: &Breaks| {
                let levels = (0..).map(root);
                let snapshots = newest.iter().copied().zip(levels).collect();
                asked(&KeptViews::new(snapshots, root(99), breaks, Vec::new()), version)
            };
            prop_assert_eq!(of(&all), of(&kept));
        }
    }
}
