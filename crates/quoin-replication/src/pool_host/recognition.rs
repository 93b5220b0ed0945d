//! Recognition of a start of the pool by the controller, which alone can tell that the pool's disk
//! was put back to an older state ([`crate::recognition`]).
//!
//! A pool whose disk went back lacks what its replicas acknowledged. So no target is let in before
//! the controller has seen this start, or could not be reached for [`AWAITED_MAX`]: its absence must
//! not keep a volume from its replicas.

use std::time::Duration;

use quoin_types::mutant;
use quoin_types::time::Time;

use crate::recognition::{MarkSchedule, PoolCounts};

/// Longest wait of a start for the controller's answer: less than a target waits for a connection.
pub const AWAITED_MAX: Duration = Duration::from_secs(3);

/// Admission of targets to the replicas here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recognition {
    Awaited,
    /// Also of pools that no controller knows, in tests and benchmarks.
    Given,
    /// An older state of the disk: what is here must not be read.
    Refused,
}

impl Recognition {
    /// Recognition of a pool that is opened anew from its media, as its disk failed; `first`: that
    /// of its process's begin. What the next start finds on the disk, no controller has seen yet.
    pub fn after_disk_failure(self, first: Recognition) -> Self {
        match self {
            Recognition::Refused => Recognition::Refused,
            _ if mutant::is("recognition-kept-over-a-failed-disk") => self,
            _ => first,
        }
    }
}

/// Step of a pool after it heard of the controller, or heard nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Nothing,
    /// Targets are accepted from now on.
    LetIn,
    /// All sessions end, and nobody is accepted any more.
    ShutOut,
}

/// One start of the pool: what it tells of itself, and what it was told.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    recognition: Recognition,
    nonce: u64,
    marks: MarkSchedule,
}

impl Start {
    /// `nonce`: drawn for this start, never 0.
    pub fn new(recognition: Recognition, nonce: u64) -> Self {
        Self { recognition, nonce, marks: MarkSchedule::default() }
    }

    pub fn recognition(&self) -> Recognition {
        self.recognition
    }

    /// The counts that a report carries.
    pub fn counts(&self, starts: u64, mark: u64) -> PoolCounts {
        PoolCounts { starts, nonce: self.nonce, mark }
    }

    /// The controller's answer to the report of the start with this nonce, which told this mark.
    /// One about a former start says nothing of what the disk holds now.
    pub fn answered(&mut self, rolled_back: bool, nonce: u64, mark: u64) -> Change {
        if nonce != self.nonce {
            return Change::Nothing;
        }
        if !rolled_back {
            self.marks.heard(mark);
        }
        self.judged(rolled_back)
    }

    /// The controller was not reached within [`AWAITED_MAX`].
    pub fn waited(&mut self) -> Change {
        match self.recognition {
            Recognition::Awaited => self.judged(false),
            Recognition::Given | Recognition::Refused => Change::Nothing,
        }
    }

    fn judged(&mut self, rolled_back: bool) -> Change {
        match (self.recognition, rolled_back) {
            (Recognition::Given, false) | (Recognition::Refused, true) => Change::Nothing,
            (_, false) => {
                self.recognition = Recognition::Given;
                Change::LetIn
            }
            (_, true) => {
                self.recognition = Recognition::Refused;
                Change::ShutOut
            }
        }
    }

    /// Returns true if the mark is to be raised before the report of now; `changed`: something was
    /// promised or acknowledged since it was raised last.
    pub fn raises_mark(&mut self, now: Time, mark: u64, changed: bool) -> bool {
        let due = self.marks.is_due(now, mark, changed);
        if due {
            self.marks.raised(now);
        }
        due
    }

    /// Returns true if the mark is to be raised at the end of a process, so that its last report
    /// covers all that it did.
    pub fn raises_last_mark(&self, mark: u64, changed: bool) -> bool {
        changed && self.marks.is_heard(mark)
    }
}

#[cfg(test)]
mod tests {
    use super::Recognition::{Awaited, Given, Refused};
    use super::*;

    #[test]
    fn an_answer_lets_targets_in_once_and_an_older_state_shuts_them_out() {
        // Recognition, whether the controller calls it rolled back, what is done, recognition then.
        let table = [
            (Awaited, false, Change::LetIn, Given),
            (Awaited, true, Change::ShutOut, Refused),
            (Given, false, Change::Nothing, Given),
            (Given, true, Change::ShutOut, Refused),
            (Refused, false, Change::LetIn, Given),
            (Refused, true, Change::Nothing, Refused),
        ];
        for (before, rolled_back, change, after) in table {
            let mut start = Start::new(before, 7);
            assert_eq!(start.answered(rolled_back, 8, 0), Change::Nothing, "of a former start");
            assert_eq!(start.recognition(), before);
            assert_eq!(start.answered(rolled_back, 7, 0), change, "{before:?} {rolled_back}");
            assert_eq!(start.recognition(), after);
        }
    }

    #[test]
    fn a_controller_that_is_not_reached_keeps_nobody_out_and_lets_nobody_back_in() {
        for (before, change) in
            [(Awaited, Change::LetIn), (Given, Change::Nothing), (Refused, Change::Nothing)]
        {
            assert_eq!(Start::new(before, 7).waited(), change);
        }
    }

    #[test]
    fn a_disk_that_failed_has_to_be_recognised_anew_unless_it_is_an_older_one() {
        assert_eq!(Given.after_disk_failure(Awaited), Awaited);
        assert_eq!(Given.after_disk_failure(Given), Given, "a pool that no controller knows");
        assert_eq!(Refused.after_disk_failure(Awaited), Refused);
    }

    #[test]
    fn a_mark_rises_after_the_present_one_was_heard() {
        let now = Time::from_millis(100_000);
        let mut start = Start::new(Awaited, 7);
        assert!(!start.raises_mark(now, 3, true) && !start.raises_last_mark(3, true));
        start.answered(true, 7, 3);
        assert!(!start.raises_last_mark(3, true), "an answer that refuses is none");
        start.answered(false, 7, 3);
        assert!(start.raises_last_mark(3, true) && !start.raises_last_mark(3, false));
        assert!(start.raises_mark(now, 3, true));
        assert!(!start.raises_mark(now, 3, true), "it was raised just now");
        assert_eq!(start.counts(4, 3), PoolCounts { starts: 4, nonce: 7, mark: 3 });
    }
}
