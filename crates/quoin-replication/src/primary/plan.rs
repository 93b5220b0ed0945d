//! Plan of a change of membership: from the present and the desired one to the next membership, one
//! kind of change at a time.
//!
//! | kind | when |
//! |---|---|
//! | replace, move | a newcomer under a listed ReplicaId is ready |
//! | add | newcomers under other ReplicaIds are ready and RF < DRF; one change adds all |
//! | remove | replicas are named to leave and every one that stays is in sync |
//! | CF | the factor alone differs |
//!
//! Redundancy comes back first: changes that add copies precede those that remove copies.

use quoin_types::membership::{Desired, Member, Membership, RETIRED_MAX};
use quoin_types::mutant;

/// State of a replica with respect to a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    Away,
    /// Connected, and on its way to having everything.
    Coming,
    /// Outside the in-sync set, with everything that a member of it must have.
    Ready,
    InSync,
}

/// The next membership.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Next {
    pub membership: Membership,
    /// Newcomers among its replicas.
    pub newcomers: Vec<Member>,
}

/// Change that is possible now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Plan {
    Nothing,
    /// More newcomers may come: additions that belong together are one change. If none comes, the
    /// change is this one.
    Hold(Box<Next>),
    Go(Box<Next>),
}

/// Returns the next membership, if a change is possible.
pub(super) fn plan(
    now: &Membership,
    desired: &Desired,
    standing: impl Fn(Member) -> Standing,
) -> Plan {
    let mut next = now.clone();
    next.version += 1;
    next.drf = desired.drf.max(now.rf);
    let go = |membership, newcomers| Plan::Go(Box::new(Next { membership, newcomers }));
    let full = now.retired.len() >= RETIRED_MAX;
    let fresh = |m: &Member| {
        let retired = now.retired.contains(&m.guid) && !mutant::is("retired-admitted");
        !now.known.iter().any(|k| k.guid == m.guid) && !retired
    };
    let newcomers = || desired.newcomers.iter().map(|n| n.member).filter(fresh);
    let listed = |m: &Member| now.known.iter().any(|k| k.id == m.id);
    // A replica that leaves gets no successor; otherwise it would be listed under the new GUID and
    // stay.
    let leaves = |m: &Member| desired.leaving.iter().any(|l| l.id == m.id);
    let mut replacing = newcomers().filter(|m| listed(m) && !leaves(m));
    let replacing = replacing.find(|m| standing(*m) == Standing::Ready);
    if let Some(newcomer) = replacing.filter(|_| !full) {
        replace(&mut next, newcomer);
        if desired.cf != 0 {
            next.cf = desired.cf_of(next.rf);
        }
        return go(next, vec![newcomer]);
    }
    // Missing entries of the list are filled before RF is raised.
    let missing = usize::from(now.rf).saturating_sub(now.known.len());
    let raise = usize::from(desired.drf.saturating_sub(now.rf));
    let room = if missing > 0 { missing } else { raise };
    let mut added: Vec<Member> = Vec::new();
    let mut coming = false;
    for newcomer in newcomers().filter(|m| !listed(m)) {
        let twice = added.iter().any(|m| m.id == newcomer.id);
        match standing(newcomer) {
            Standing::Ready if added.len() < room && !twice => added.push(newcomer),
            Standing::Coming => coming = true,
            _ => {}
        }
    }
    if !added.is_empty() {
        next.known.extend(&added);
        if missing == 0 {
            next.rf += added.len() as u8;
            next.cf = desired.cf_of(next.rf);
        }
        let hold = added.len() < room;
        let there = Box::new(Next { membership: next, newcomers: added });
        return match (hold, coming) {
            // The change waits for a replica that is being rebuilt, but not for one that may never
            // come.
            (true, true) => Plan::Nothing,
            (true, false) => Plan::Hold(there),
            (false, _) => Plan::Go(there),
        };
    }
    let leaving: Vec<Member> =
        now.known.iter().copied().filter(|m| desired.leaving.contains(m)).collect();
    let stays = |m: &&Member| !leaving.contains(m);
    let healthy = now.known.iter().filter(stays).all(|m| standing(*m) == Standing::InSync);
    let some_stay = leaving.len() < now.known.len();
    let remembered = now.retired.len() + leaving.len() <= RETIRED_MAX;
    let may_leave = healthy || mutant::is("leaves-unhealthy-behind");
    if !leaving.is_empty() && some_stay && may_leave && remembered {
        next.known.retain(|m| !leaving.contains(m));
        next.rf = next.rf.saturating_sub(leaving.len() as u8).max(1);
        if !mutant::is("removed-not-retired") {
            next.retired.extend(leaving.iter().map(|m| m.guid));
        }
        next.cf = desired.cf_of(next.rf);
        return go(next, Vec::new());
    }
    if desired.cf != 0 && desired.cf_of(now.rf) != now.cf {
        next.cf = desired.cf_of(now.rf);
        return go(next, Vec::new());
    }
    Plan::Nothing
}

fn replace(next: &mut Membership, newcomer: Member) {
    let Some(at) = next.known.iter().position(|m| m.id == newcomer.id) else { return };
    let old = next.known[at];
    if mutant::is("two-replicas-of-one-id") {
        next.rf += 1;
        next.known.push(newcomer);
    } else {
        next.known[at] = newcomer;
    }
    if mutant::is("more-known-than-rf") {
        next.known.push(old);
    }
    next.retired.push(old.guid);
}

#[cfg(test)]
mod tests {
    use super::*;
    use Standing::*;
    use quoin_types::membership::{Newcomer, default_cf};
    use quoin_types::{ReplicaGuid, ReplicaId};

    fn member(id: u128, guid: u128) -> Member {
        Member { id: ReplicaId(id), guid: ReplicaGuid(guid) }
    }

    fn membership(rf: u8) -> Membership {
        let known = (1..=u128::from(rf)).map(|i| member(i, 100 + i)).collect();
        let cf = default_cf(rf);
        Membership { version: 7, rf, cf, drf: rf, known, retired: vec![], formed: true }
    }

    fn coming(members: &[Member], drf: u8) -> Desired {
        let newcomers = members.iter().map(|m| Newcomer { member: *m, beside: false }).collect();
        Desired { drf, newcomers, ..Desired::default() }
    }

    fn gone_to(plan: Plan) -> Next {
        match plan {
            Plan::Go(next) => {
                next.membership.check().expect("a sound membership");
                assert_eq!(next.membership.version, 8);
                *next
            }
            other => panic!("{other:?}"),
        }
    }

    /// Proves SCALE-KNOWN-02, SCALE-SHORT-07.
    #[test]
    fn a_replacement_exchanges_the_guid_of_its_entry_and_touches_no_other() {
        let new = member(2, 202);
        let next = gone_to(plan(&membership(3), &coming(&[new], 3), |_| Ready));
        assert_eq!(next.membership.known, [member(1, 101), new, member(3, 103)]);
        assert_eq!((next.membership.rf, next.membership.cf), (3, 2));
        assert_eq!(next.membership.retired, [ReplicaGuid(102)]);
        assert_eq!(next.newcomers, [new]);
    }

    /// Proves SCALE-KNOWN-05.
    #[test]
    fn an_entry_that_the_list_lacks_is_filled_before_the_factor_is_raised() {
        let mut short = membership(3);
        short.known.pop();
        let new = [member(3, 203), member(4, 204)];
        let next = gone_to(plan(&short, &coming(&new, 4), |_| Ready));
        assert_eq!(next.membership.known, [member(1, 101), member(2, 102), new[0]]);
        assert_eq!((next.membership.rf, next.membership.cf, next.newcomers.len()), (3, 2, 1));
        let next = plan(&Membership { version: 7, ..next.membership }, &coming(&new, 4), |_| Ready);
        assert_eq!(gone_to(next).membership.rf, 4);
    }

    /// Proves SCALE-KNOWN-03, SCALE-LIST-05, SCALE-CF-01.
    #[test]
    fn an_addition_appends_an_entry_and_raises_rf_and_cf_with_it() {
        let new = member(4, 204);
        let next = gone_to(plan(&membership(3), &coming(&[new], 4), |_| Ready));
        assert_eq!(next.membership.known.len(), 4);
        assert_eq!((next.membership.rf, next.membership.cf), (4, 3));
        assert!(next.membership.retired.is_empty());
    }

    /// Proves SCALE-STORY-09.
    #[test]
    fn additions_that_are_ready_together_are_one_change() {
        let new = [member(4, 204), member(5, 205)];
        let mut one = membership(1);
        one.drf = 3;
        let next = gone_to(plan(&one, &coming(&new, 3), |_| Ready));
        assert_eq!((next.membership.rf, next.membership.cf), (3, 2));
        let waits = |m: Member| if m == new[0] { Ready } else { Coming };
        assert_eq!(plan(&one, &coming(&new, 3), waits), Plan::Nothing);
        let alone = |m: Member| if m == new[0] { Ready } else { Away };
        assert!(matches!(plan(&one, &coming(&new, 3), alone), Plan::Hold(_)));
    }

    /// Proves SCALE-KNOWN-06.
    #[test]
    fn with_rf_at_drf_no_replica_is_added() {
        let new = member(4, 204);
        assert_eq!(plan(&membership(3), &coming(&[new], 3), |_| Ready), Plan::Nothing);
    }

    /// Proves SCALE-VALID-03.
    #[test]
    fn replicas_leave_by_name_and_only_where_all_that_stay_are_in_sync() {
        let three = membership(3);
        let leaving = vec![three.known[0], three.known[2]];
        let desired = Desired { drf: 1, leaving: leaving.clone(), ..Desired::default() };
        let next = gone_to(plan(&three, &desired, |_| InSync));
        assert_eq!(next.membership.known, [three.known[1]]);
        assert_eq!((next.membership.rf, next.membership.cf), (1, 1));
        assert_eq!(next.membership.retired, [ReplicaGuid(101), ReplicaGuid(103)]);
        let others_away = |m: Member| if leaving.contains(&m) { Away } else { InSync };
        gone_to(plan(&three, &desired, others_away));
        let survivor_lags = |m: Member| if leaving.contains(&m) { InSync } else { Coming };
        assert_eq!(plan(&three, &desired, survivor_lags), Plan::Nothing);
    }

    /// Two requests conflict, or a record is restored: the replica that is to leave has a newcomer.
    #[test]
    fn a_replica_that_leaves_gets_no_successor_though_a_newcomer_is_ready() {
        let three = membership(3);
        let new = member(2, 202);
        let leaving = vec![three.known[1]];
        let desired = Desired { leaving, ..coming(&[new], 2) };
        let ready = |m: Member| if m == new { Ready } else { InSync };
        let next = gone_to(plan(&three, &desired, ready));
        assert_eq!(next.membership.known, [three.known[0], three.known[2]]);
        assert!(three.withdraws(&next.membership, new));
    }

    #[test]
    fn not_all_replicas_can_leave() {
        let three = membership(3);
        let desired = Desired { drf: 1, leaving: three.known.clone(), ..Desired::default() };
        assert_eq!(plan(&three, &desired, |_| InSync), Plan::Nothing);
    }

    #[test]
    fn the_consistency_factor_changes_alone_and_only_where_it_was_asked_for() {
        let mut three = membership(3);
        three.cf = 1;
        assert_eq!(plan(&three, &coming(&[], 3), |_| InSync), Plan::Nothing);
        let desired = Desired { drf: 3, cf: 3, ..Desired::default() };
        let next = gone_to(plan(&three, &desired, |_| InSync));
        assert_eq!((next.membership.rf, next.membership.cf), (3, 3));
        assert_eq!(next.membership.known, three.known);
    }

    /// Proves SCALE-ADMIT-16.
    #[test]
    fn a_retired_guid_never_comes_back_in_any_place() {
        let mut three = membership(3);
        three.retired.push(ReplicaGuid(202));
        for back in [member(2, 202), member(4, 202)] {
            assert_eq!(plan(&three, &coming(&[back], 4), |_| Ready), Plan::Nothing);
        }
    }

    #[test]
    fn copies_come_before_copies_go() {
        let three = membership(3);
        let new = member(1, 201);
        let mut desired = coming(&[new], 3);
        desired.leaving.push(three.known[2]);
        let next = gone_to(plan(&three, &desired, |m| if m == new { Ready } else { InSync }));
        assert_eq!(next.newcomers, [new]);
        assert_eq!(next.membership.rf, 3);
    }
}
