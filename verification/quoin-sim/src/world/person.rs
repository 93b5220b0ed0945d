//! A person who has the last word on two sides of a mirror: decides what no rule decides, so that a run comes to its
//! end.

use quoin_cluster::mirror::answers::{Answer, Call};
use quoin_cluster::mirror::{Record, Role};

/// World in which the person makes calls.
pub(super) trait Person {
    fn asks(&mut self, side: usize, call: Call) -> Option<Answer>;
    /// One of the two sides, where either will do.
    fn picks(&mut self) -> usize;
}

/// Makes the call that leads on from these records, if one is needed.
pub(super) fn decide(person: &mut impl Person, records: &[Record; 2]) {
    let roles = [records[0].role, records[1].role];
    let tops = [records[0].chain.top().generation, records[1].chain.top().generation];
    match roles {
        [Role::Primary, Role::Primary] => {
            let older = usize::from(tops[1] < tops[0]);
            person.asks(older, Call::Demote { force: true });
        }
        [Role::Diverged, Role::Diverged] => {
            let newer = usize::from(tops[1] > tops[0]);
            if person.asks(newer, Call::AcceptDiverged) == Some(Answer::NotYet) {
                person.asks(1 - newer, Call::Resync { force: true });
            }
        }
        [Role::Diverged, other] | [other, Role::Diverged] => {
            let diverged = usize::from(roles[1] == Role::Diverged);
            if other == Role::Primary {
                person.asks(diverged, Call::Resync { force: true });
            } else if matches!(other, Role::Secondary | Role::Resyncing) {
                let answer = person.asks(diverged, Call::AcceptDiverged);
                // A side without a final point cannot be taken for the truth.
                if answer == Some(Answer::NotYet) && records[diverged].points.last.is_none() {
                    person.asks(1 - diverged, Call::Promote { force: true });
                }
            }
        }
        [Role::Secondary, Role::Resyncing] => {
            person.asks(0, Call::Promote { force: true });
        }
        [Role::Resyncing, Role::Secondary] => {
            person.asks(1, Call::Promote { force: true });
        }
        [Role::Secondary, Role::Secondary] => {
            let to = person.picks();
            person.asks(to, Call::Promote { force: false });
        }
        [Role::Primary, Role::Secondary] | [Role::Secondary, Role::Primary] => {
            let primary = usize::from(roles[1] == Role::Primary);
            let other = &records[1 - primary].chain;
            // The other side was promoted with force since, and demoted: no side follows this one.
            if other.has(tops[primary]) && !records[primary].chain.has(tops[1 - primary]) {
                person.asks(primary, Call::Demote { force: true });
            }
        }
        _ => {}
    }
}
