//! Replicas that say they promised a newer epoch, and what the record makes of it.
//!
//! A promise comes from a grant, so the record is asked before the replica is believed: an epoch
//! that the record grants next is above every promise that it ever granted. Only where the record
//! is an old copy of itself, or the replica lies, is it not. Such a word is followed a few times:
//! the record is told to go above it. One that goes on is not: a single member would keep the
//! volume closed for good. It is shut out, and the open goes on with the others. The record is told
//! nothing of a promise of a later term, since no former controller grants that.

use std::time::Duration;

use quoin_types::EPOCHS_AHEAD_MAX;
use quoin_types::ids::Epoch;
use quoin_types::membership::Member;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Words without a grant behind them that one replica is followed in.
const FOLLOWED_MAX: u32 = 3;
/// They are forgotten after so long: a control plane may be restored more than once.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);
/// Replicas that are remembered; more than a volume ever has at a time.
const REMEMBERED_MAX: usize = 64;

/// A replica whose word no grant stood behind.
struct Unfounded {
    member: Member,
    times: u32,
    last: Time,
}

#[derive(Default)]
pub(super) struct Refusals {
    /// The record is to grant more than this.
    at_least: Epoch,
    /// Said since the last grant, and not held against the record yet.
    said: Option<(Member, Epoch)>,
    unfounded: Vec<Unfounded>,
}

/// What becomes of a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Judged {
    GoOn,
    /// The record is to be asked again, for an epoch above what was said.
    AskAgain,
}

impl Refusals {
    /// The record is asked for an epoch above this.
    pub fn at_least(&self) -> Epoch {
        self.at_least
    }

    pub fn ask_above(&mut self, epoch: Epoch) {
        self.at_least = self.at_least.max(epoch);
    }

    /// The newest epoch that was spoken of.
    pub fn newest(&self) -> Epoch {
        self.said.map_or(self.at_least, |(_, epoch)| epoch.max(self.at_least))
    }

    /// A replica refuses, as it has promised this epoch. False: it is not believed any more.
    pub fn hear(&mut self, now: Time, member: Member, promised: Epoch) -> bool {
        self.unfounded.retain(|u| now < u.last + FORGOTTEN_AFTER);
        let known = self.unfounded.iter().find(|u| u.member == member);
        if known.is_some_and(|u| u.times > FOLLOWED_MAX) && !mutant::is("refusals-always-followed")
        {
            return false;
        }
        self.said = Some((member, promised));
        true
    }

    /// The record granted an epoch, after `before` was the last one.
    pub fn judge(&mut self, now: Time, before: Epoch, granted: Epoch) -> Judged {
        let Some((member, promised)) = self.said.take() else { return Judged::GoOn };
        if before < promised && promised < granted {
            return Judged::GoOn;
        }
        let known = self.unfounded.iter().position(|u| u.member == member);
        let at = known.unwrap_or_else(|| {
            if self.unfounded.len() == REMEMBERED_MAX {
                self.unfounded.remove(0);
            }
            self.unfounded.push(Unfounded { member, times: 0, last: now });
            self.unfounded.len() - 1
        });
        let unfounded = &mut self.unfounded[at];
        (unfounded.times, unfounded.last) = (unfounded.times.saturating_add(1), now);
        if promised.0 > granted.0.saturating_add(EPOCHS_AHEAD_MAX) {
            // No record follows it there. But the controller that granted may be a former one, which
            // has not heard of the term in which the replica promised.
            if promised.term_number() <= granted.term_number() {
                unfounded.times = FOLLOWED_MAX + 1;
            }
            return Judged::GoOn;
        }
        let followed = unfounded.times <= FOLLOWED_MAX || mutant::is("refusals-always-followed");
        if followed && granted <= promised {
            self.ask_above(promised);
            return Judged::AskAgain;
        }
        Judged::GoOn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::{ReplicaGuid, ReplicaId, Term};

    const ONE: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(11) };
    const OTHER: Member = Member { id: ReplicaId(2), guid: ReplicaGuid(12) };

    fn at(s: u64) -> Time {
        Time::from_millis(s * 1000)
    }

    #[test]
    fn a_promise_that_the_record_granted_is_believed_without_end_and_costs_nothing() {
        let mut refusals = Refusals::default();
        for epoch in (10..1000).step_by(2) {
            assert!(refusals.hear(at(0), ONE, Epoch(epoch + 1)));
            let judged = refusals.judge(at(0), Epoch(epoch), Epoch(epoch + 2));
            assert_eq!((judged, refusals.at_least()), (Judged::GoOn, Epoch(0)));
        }
    }

    #[test]
    fn above_an_old_copy_of_the_record_a_replica_is_followed_and_one_that_goes_on_is_not() {
        let mut refusals = Refusals::default();
        for epoch in [100, 200, 300] {
            assert!(refusals.hear(at(0), ONE, Epoch(epoch)));
            assert_eq!(refusals.judge(at(0), Epoch(10), Epoch(11)), Judged::AskAgain);
            assert_eq!(refusals.at_least(), Epoch(epoch));
            assert_eq!(refusals.judge(at(0), Epoch(11), Epoch(epoch + 1)), Judged::GoOn);
        }
        assert!(refusals.hear(at(0), ONE, Epoch(400)));
        assert_eq!(refusals.judge(at(0), Epoch(301), Epoch(302)), Judged::GoOn);
        assert_eq!(refusals.at_least(), Epoch(300), "the record is left alone");
        assert!(!refusals.hear(at(1), ONE, Epoch(400)));
        assert!(refusals.hear(at(1), OTHER, Epoch(400)), "each for itself");
        assert!(refusals.hear(at(3601), ONE, Epoch(400)));
    }

    #[test]
    fn what_no_record_grants_is_never_followed() {
        let promised = Epoch((11 + EPOCHS_AHEAD_MAX) + 1);
        let mut refusals = Refusals::default();
        assert!(refusals.hear(at(0), ONE, promised));
        assert_eq!(refusals.judge(at(0), Epoch(10), Epoch(11)), Judged::GoOn);
        assert_eq!(refusals.at_least(), Epoch(0));
        assert!(!refusals.hear(at(0), ONE, promised));
        // The epoch that is this target's own, promised to another incarnation.
        let mut refusals = Refusals::default();
        let mut granted = 10;
        while refusals.hear(at(0), ONE, Epoch(granted)) {
            assert_eq!(refusals.judge(at(0), Epoch(granted), Epoch(granted + 1)), Judged::GoOn);
            granted += 1;
        }
        assert_eq!(granted, 14);
    }

    #[test]
    fn a_promise_of_a_later_term_is_believed_beside_a_former_controller_but_not_without_end() {
        let later = Term { number: 2, ..Term::default() }.floor().next();
        for promised in [later, quoin_types::EPOCH_MAX] {
            let mut refusals = Refusals::default();
            let mut granted = 10;
            while refusals.hear(at(0), ONE, promised) {
                assert_eq!(refusals.judge(at(0), Epoch(granted), Epoch(granted + 1)), Judged::GoOn);
                assert_eq!(
                    refusals.at_least(),
                    Epoch(0),
                    "the former controller cannot grant that"
                );
                granted += 1;
            }
            assert_eq!(granted, 14);
        }
    }

    #[test]
    fn so_many_replicas_are_remembered_and_no_more() {
        let mut refusals = Refusals::default();
        for n in 0..1000 {
            let member = Member { id: ReplicaId(n), guid: ReplicaGuid(n) };
            refusals.hear(at(0), member, Epoch(99));
            refusals.judge(at(0), Epoch(10), Epoch(11));
        }
        assert_eq!(refusals.unfounded.len(), REMEMBERED_MAX);
    }
}
