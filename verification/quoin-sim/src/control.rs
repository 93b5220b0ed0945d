//! The control plane's record of the volume, reached only by compare-and-swap over a network
//! that delays and loses questions and answers.

use quoin_replication::primary::LiveOptions;
use quoin_types::{Desired, Epoch, Incarnation, Member, Membership, Term};

/// The linearizable record.
#[derive(Clone, Debug)]
pub struct Record {
    /// Of the controller that rules.
    pub term: Term,
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    /// The target host that owns the volume.
    pub owner: usize,
    pub membership: Membership,
    /// The desired membership: as operators ask, with the replicas that pools have made for it.
    pub desired: Desired,
    /// `None`: they never changed.
    pub options: Option<LiveOptions>,
}

#[derive(Clone, Debug)]
pub enum Question {
    Acquire { incarnation: Incarnation, at_least: Epoch },
    Swap { epoch: Epoch, version: u64, next: Membership },
}

#[derive(Clone, Debug)]
pub enum Answer {
    Granted {
        incarnation: Incarnation,
        epoch: Epoch,
        membership: Membership,
        /// Options of the record at that moment. `None`: they never changed.
        options: Option<LiveOptions>,
    },
    NotOwner {
        incarnation: Incarnation,
    },
    Swapped {
        version: u64,
        membership: Membership,
    },
}

impl Record {
    /// Executes one compare-and-swap. A swap that does not fit leaves the record and says how
    /// it is; a membership that breaks the rules is refused with the rule's words.
    pub fn execute(&mut self, asker: usize, question: &Question) -> Result<Answer, &'static str> {
        match question {
            Question::Acquire { incarnation, .. } if self.owner != asker => {
                Ok(Answer::NotOwner { incarnation: *incarnation })
            }
            Question::Acquire { incarnation, at_least } => {
                let again = self.incarnation == *incarnation && *at_least <= self.epoch;
                if again && quoin_types::mutant::is("epoch-reused") {
                    self.epoch.0 -= 1;
                }
                let after = self.epoch.max(*at_least);
                self.epoch = self.term.next_epoch(after).ok_or("an epoch of a later term")?;
                self.incarnation = *incarnation;
                Ok(Answer::Granted {
                    incarnation: *incarnation,
                    epoch: self.epoch,
                    membership: self.membership.clone(),
                    options: self.options,
                })
            }
            Question::Swap { epoch, version, next } => {
                let fits = *epoch == self.epoch && *version == self.membership.version;
                if fits && self.wishes(next) {
                    next.check()?;
                    if next.version != version + 1 {
                        return Err("a membership version must grow by one (MembershipMonotone)");
                    }
                    if !self.membership.retired.iter().all(|g| next.retired.contains(g)) {
                        return Err("a retired GUID was forgotten (RetiredNeverBack)");
                    }
                    let left = |m: &&Member| !next.known.contains(m);
                    if self
                        .membership
                        .known
                        .iter()
                        .filter(left)
                        .any(|m| !next.retired.contains(&m.guid))
                    {
                        return Err("who left the list is not retired (RetiredNeverBack)");
                    }
                    let before = std::mem::replace(&mut self.membership, next.clone());
                    self.desired.newcomers.retain(|n| {
                        !next.known.contains(&n.member) && !before.withdraws(next, n.member)
                    });
                    self.desired.leaving.retain(|m| next.known.contains(m));
                }
                Ok(Answer::Swapped { version: *version, membership: self.membership.clone() })
            }
        }
    }

    /// Returns true if a change is one that operators (still) ask for.
    fn wishes(&self, next: &Membership) -> bool {
        let (now, desired) = (&self.membership, &self.desired);
        let mut added = next.known.iter().filter(|m| !now.contains(**m));
        let mut removed = now.known.iter().filter(|m| !next.contains(**m));
        let followed = |m: &Member| next.known.iter().any(|k| k.id == m.id);
        added.all(|m| desired.newcomer(*m).is_some())
            && removed.all(|m| followed(m) || desired.leaving.contains(m))
            && (next.cf == desired.cf_of(next.rf) || (next.rf, next.cf) == (now.rf, now.cf))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            term: Term::default(),
            epoch: Epoch(4),
            incarnation: Incarnation(1),
            owner: 0,
            membership: Membership { version: 1, rf: 1, cf: 1, drf: 1, ..Default::default() },
            desired: Desired::default(),
            options: None,
        }
    }

    #[test]
    fn only_the_owner_gets_an_epoch_and_each_is_new() {
        let mut record = record();
        let ask = |at_least| Question::Acquire { incarnation: Incarnation(7), at_least };
        assert!(matches!(record.execute(1, &ask(Epoch(9))), Ok(Answer::NotOwner { .. })));
        assert_eq!(record.epoch, Epoch(4));
        let Ok(Answer::Granted { epoch, .. }) = record.execute(0, &ask(Epoch(9))) else { panic!() };
        assert_eq!(epoch, Epoch(10));
        let Ok(Answer::Granted { epoch, .. }) = record.execute(0, &ask(Epoch(3))) else { panic!() };
        assert_eq!(epoch, Epoch(11));
    }

    #[test]
    fn a_swap_works_once_and_only_under_its_epoch() {
        let mut record = record();
        let next = Membership { version: 2, ..record.membership.clone() };
        let swap = |epoch| Question::Swap { epoch, version: 1, next: next.clone() };
        record.execute(0, &swap(Epoch(3))).unwrap();
        assert_eq!(record.membership.version, 1);
        record.execute(0, &swap(Epoch(4))).unwrap();
        assert_eq!(record.membership.version, 2);
        let again = record.execute(0, &swap(Epoch(4))).unwrap();
        assert!(matches!(again, Answer::Swapped { membership, .. } if membership.version == 2));
    }
}
