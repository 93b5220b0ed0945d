//! Recognition of a pool whose disk was rolled back to an older state of itself.
//!
//! A pool cannot detect that its disk was restored from an image: everything that it could compare
//! was restored too. The controller can, by two counts that every report of a pool carries and that
//! the controller keeps. The **start counter** grows with each opening of the pool. The **mark**
//! grows with the promises and acknowledgements of the pool, so an image taken since the last
//! opening differs from the present state as well.
//!
//! The mark is raised only after the controller has received the present one. So a disk that was
//! rolled back cannot count up to the mark that the controller knows, regardless of how often its
//! pool is started or what it serves while no controller is reached.
//!
//! A report of the pool's former process may arrive after the first one of the present process. It
//! has the lower start counter too, and is known by the nonce of the former opening.

use std::time::Duration;

use quoin_types::mutant;
use quoin_types::time::Time;

/// Time between two marks of a busy pool. Each costs the pool a metadata record and a sync, and the
/// controller a record.
const MARK_EVERY: Duration = Duration::from_secs(5);

/// The counts of a pool, as it reports them and as the controller keeps them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolCounts {
    /// Openings of the pool; 0: not reported.
    pub starts: u64,
    /// Random number drawn at each opening; 0: not reported. Two openings with equal counts and
    /// different nonces belong to two histories.
    pub nonce: u64,
    /// The highest mark that is on the pool's media.
    pub mark: u64,
}

impl PoolCounts {
    /// Returns true if a pool that reports these counts is in an older state than `known`, the
    /// counts that it reported before.
    pub fn are_older_than(&self, known: &PoolCounts) -> bool {
        if self.starts == 0 || mutant::is("rolled-back-disk-not-noticed") {
            return false;
        }
        let told = ![self.nonce, known.nonce].contains(&0);
        let another = self.starts == known.starts && self.nonce != known.nonce && told;
        // Reports of one opening may overtake each other.
        let same = self.nonce == known.nonce && told;
        let below = self.mark < known.mark && !mutant::is("mark-of-a-pool-not-compared");
        self.starts < known.starts || another || (below && !same)
    }

    /// Returns true if a report with these counts is of the opening before the present one, whose counts
    /// are `former`: it was sent before that one ended and overtaken since. An older state of the disk
    /// draws a nonce of its own when it is opened. A pool that leaves tells its nonce alone.
    pub fn are_late(&self, former: &PoolCounts) -> bool {
        self.nonce != 0
            && self.nonce == former.nonce
            && (self.starts == 0 || self.starts == former.starts)
    }

    /// Returns the counts that are known after this report, which is not older than `known`.
    pub fn after(self, known: &PoolCounts) -> PoolCounts {
        PoolCounts { mark: self.mark.max(known.mark), ..self }
    }
}

/// Schedule by which a pool raises its mark.
#[derive(Clone, Copy, Debug, Default)]
pub struct MarkSchedule {
    /// The highest mark in a report that the controller has answered.
    heard: Option<u64>,
    raised_at: Option<Time>,
}

impl MarkSchedule {
    /// Records that the controller has answered a report with this mark, and uses the pool.
    pub fn heard(&mut self, mark: u64) {
        self.heard = self.heard.max(Some(mark));
    }

    /// Returns true if the controller knows this mark.
    pub fn is_heard(&self, mark: u64) -> bool {
        self.heard.is_some_and(|heard| heard >= mark)
    }

    /// Returns true if the mark is to be raised now; `changed`: the pool has promised or
    /// acknowledged something since it was raised last.
    pub fn is_due(&self, now: Time, mark: u64, changed: bool) -> bool {
        let rested = self.raised_at.is_none_or(|at| now.since(at) >= MARK_EVERY);
        changed && rested && self.is_heard(mark)
    }

    pub fn raised(&mut self, now: Time) {
        self.raised_at = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(starts: u64, nonce: u64, mark: u64) -> PoolCounts {
        PoolCounts { starts, nonce, mark }
    }

    #[test]
    fn an_older_state_is_recognized_by_its_starts_its_nonce_or_its_mark() {
        let known = counts(5, 50, 9);
        for same_or_newer in
            [(5, 50, 9), (5, 50, 10), (5, 50, 8), (6, 60, 9), (6, 0, 12), (5, 0, 9)]
        {
            let (starts, nonce, mark) = same_or_newer;
            assert!(!counts(starts, nonce, mark).are_older_than(&known), "{same_or_newer:?}");
        }
        for older in [(4, 40, 9), (5, 51, 9), (6, 60, 8), (9, 90, 0), (6, 0, 8)] {
            let (starts, nonce, mark) = older;
            assert!(counts(starts, nonce, mark).are_older_than(&known), "{older:?}");
        }
        assert_eq!(counts(5, 50, 8).after(&known), known, "an overtaken report");
        assert!(!counts(0, 0, 0).are_older_than(&known), "a pool that opens tells nothing");
    }

    #[test]
    fn a_report_of_the_opening_before_is_late_and_one_of_an_older_state_is_not() {
        let former = counts(4, 40, 9);
        assert!(counts(4, 40, 7).are_late(&former) && counts(0, 40, 9).are_late(&former));
        for other in [(4, 41, 9), (5, 50, 9), (3, 40, 9), (0, 0, 9), (4, 0, 9)] {
            let (starts, nonce, mark) = other;
            assert!(!counts(starts, nonce, mark).are_late(&former), "{other:?}");
        }
        assert!(!counts(0, 0, 0).are_late(&PoolCounts::default()), "there was none");
    }

    #[test]
    fn a_mark_is_raised_once_the_present_one_was_received_and_something_changed() {
        let now = Time::default() + Duration::from_secs(100);
        let mut schedule = MarkSchedule::default();
        assert!(!schedule.is_due(now, 0, true), "no controller has heard any mark");
        schedule.heard(0);
        assert!(!schedule.is_due(now, 0, false), "an idle pool writes nothing");
        assert!(schedule.is_due(now, 0, true));
        schedule.raised(now);
        assert!(!schedule.is_due(now + MARK_EVERY, 1, true), "mark 1 was not heard");
        schedule.heard(1);
        assert!(!schedule.is_due(now + MARK_EVERY / 2, 1, true), "one in this time is enough");
        assert!(schedule.is_due(now + MARK_EVERY, 1, true));
        schedule.heard(0);
        assert!(schedule.is_heard(1), "answers may come in another order");
    }
}
