//! Replicas that report a promise for a newer epoch, checked against the record.
//!
//! A promise comes from a grant, so the target asks the record before it believes the replica: the
//! next epoch that the record grants is above every promise that it ever granted. There are two
//! exceptions: the record is an old copy of itself, or the replica lies. The target follows such a
//! report a few times: it asks the record for an epoch above the promise. After that it ignores the
//! replica, since a single member would keep the volume closed permanently. The replica is shut
//! out, and the open continues with the others. A promise of a later term is not passed to the
//! record, since no former controller grants that.

use std::time::Duration;

use quoin_types::EPOCHS_AHEAD_MAX;
use quoin_types::ids::Epoch;
use quoin_types::membership::Member;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Number of unfounded reports of one replica that are followed.
const FOLLOWED_MAX: u32 = 3;
/// Time after which unfounded reports are forgotten: a control plane may be restored more than
/// once.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);
/// Limit of replicas kept here; more than a volume ever has at a time.
const REMEMBERED_MAX: usize = 64;

/// A replica whose report no grant explains.
struct Unfounded {
    member: Member,
    times: u32,
    last: Time,
}

#[derive(Default)]
pub(super) struct Refusals {
    /// The record is to grant an epoch above this.
    at_least: Epoch,
    /// Report since the last grant, not checked against the record yet.
    said: Option<(Member, Epoch)>,
    unfounded: Vec<Unfounded>,
}

/// Outcome of a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Judged {
    GoOn,
    /// The record is to be asked again, for an epoch above the reported one.
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

    /// The newest epoch that was reported.
    pub fn newest(&self) -> Epoch {
        self.said.map_or(self.at_least, |(_, epoch)| epoch.max(self.at_least))
    }

    /// Handles a replica that refuses because it has promised this epoch. Returns false if it is
    /// not believed any more.
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

    /// Checks the report against a granted epoch; `before` was the last one.
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
            // No record follows it there. But a former controller may have granted the epoch, which
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
    fn above_an_old_copy_of_the_record_a_replica_is_followed_a_limited_number_of_times() {
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
    fn a_promise_that_no_record_grants_is_never_followed() {
        let promised = Epoch((11 + EPOCHS_AHEAD_MAX) + 1);
        let mut refusals = Refusals::default();
        assert!(refusals.hear(at(0), ONE, promised));
        assert_eq!(refusals.judge(at(0), Epoch(10), Epoch(11)), Judged::GoOn);
        assert_eq!(refusals.at_least(), Epoch(0));
        assert!(!refusals.hear(at(0), ONE, promised));
        // The epoch of this target, promised to another incarnation.
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
    fn the_number_of_remembered_replicas_is_limited() {
        let mut refusals = Refusals::default();
        for n in 0..1000 {
            let member = Member { id: ReplicaId(n), guid: ReplicaGuid(n) };
            refusals.hear(at(0), member, Epoch(99));
            refusals.judge(at(0), Epoch(10), Epoch(11));
        }
        assert_eq!(refusals.unfounded.len(), REMEMBERED_MAX);
    }
}
