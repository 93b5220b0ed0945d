//! Newcomers for which a change of membership leaves no place.

use crate::broken;
use quoin_types::*;

#[test]
fn a_change_withdraws_who_was_to_follow_one_that_leaves_and_nobody_else() {
    broken::break_a_rule();
    let member = |id: u128, guid: u128| Member { id: ReplicaId(id), guid: ReplicaGuid(guid) };
    let known = vec![member(1, 101), member(2, 102), member(3, 103)];
    let now = Membership { rf: 3, cf: 2, known, ..Membership::default() };
    let without = |id: u128| {
        let mut next = now.clone();
        next.known.retain(|m| m.id.0 != id);
        next
    };
    let mut replaced = now.clone();
    replaced.known[0] = member(1, 201);
    assert!(now.withdraws(&without(1), member(1, 201)));
    assert!(!now.withdraws(&without(2), member(1, 201)), "its place is still there");
    assert!(!now.withdraws(&replaced, member(1, 201)), "it is known");
    assert!(!now.withdraws(&without(1), member(4, 204)), "an addition");
}
