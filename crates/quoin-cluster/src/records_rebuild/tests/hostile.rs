//! The word of one hostile pool rules over nobody else.

use crate::ownership::grants::use_up_epoch;

use super::*;

/// Three replicas, of which the third's pool tells this instead.
fn beside_two(hostile: impl FnOnce(&mut Held)) -> Vec<Held> {
    let current = rule(2, &[1, 2, 3]);
    let told = record(2, &[1, 2, 3], 9);
    let mut all: Vec<Held> = (1..=3).map(|n| held(n, &current, Some(told.clone()))).collect();
    hostile(&mut all[2]);
    all
}

fn alone(version: u64) -> (Rule, Membership) {
    let rule = rule(version, &[3]);
    let known = rule.known.clone();
    (rule, Membership { version, rf: 1, cf: 1, drf: 3, known, ..Membership::default() })
}

#[test]
fn a_membership_of_one_pool_retires_no_replicas_that_are_here_and_have_not_heard_of_it() {
    let (newer, membership) = alone(9);
    let own = record(2, &[1, 2, 3], 4);
    type Lie<'a> = &'a dyn Fn(&mut Held);
    let lies: [Lie<'_>; 4] = [
        &|h| h.view = Some(newer.clone()),
        &|h| h.membership = Some(membership.clone()),
        &|h| h.note = Some(Box::new(record(9, &[3], 10))),
        &|h| {
            h.joint = Some(newer.clone());
            h.position.lsn = Lsn(1 << 50);
        },
    ];
    for (n, lie) in lies.iter().enumerate() {
        for record in [None, Some(&own)] {
            // With both of the others, and with one of them.
            for first in [0, 1] {
                let all = beside_two(lie).split_off(first);
                let finding = judged(record, all, &[]);
                assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None), "lie {n}");
                let message = &finding.message;
                assert!(
                    message.contains("pool pool-3 alone") && message.contains("pool-2"),
                    "{message}"
                );
            }
        }
    }
    // Taken away it has no word.
    let mut all = beside_two(|_| {});
    all.truncate(2);
    assert_eq!(judged(Some(&own), all, &[]).outcome, Outcome::Updated);
}

/// The joint View of a change that came to nothing has the version of the one that comes next.
#[test]
fn a_joint_rule_that_was_given_up_is_no_knowledge_of_a_membership_of_its_version() {
    crate::break_a_rule();
    let (newer, _) = alone(3);
    let all = beside_two(|h| h.view = Some(newer));
    let given_up = rule(3, &[1, 2, 4]);
    let witness = Held { joint: Some(given_up), ..all[1].clone() };
    let finding = judged(None, vec![witness, all[2].clone()], &[]);
    assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None));
    assert!(finding.message.contains("pool pool-3 alone"), "{}", finding.message);
}

#[test]
fn a_membership_of_one_pool_lowers_no_factor_where_no_cf_of_the_list_before_can_have_agreed() {
    let own = record(2, &[1, 2, 3], 4);
    let lowered = Rule { cf: 1, ..rule(3, &[1, 2, 3]) };
    let finding = judged(Some(&own), beside_two(|h| h.view = Some(lowered.clone())), &[]);
    assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None));
    // One of the two that agreed is away: it may be so.
    let all = beside_two(|h| h.view = Some(lowered.clone())).split_off(1);
    assert_eq!(judged(Some(&own), all, &[]).version, 3);
}

#[test]
fn a_membership_of_one_pool_rules_where_nobody_who_is_here_can_miss_it() {
    // The only replica moved to a pool that the record does not know.
    let (moved, old) = (rule(3, &[4]), record(2, &[1], 4));
    let finding = judged(Some(&old), vec![held(4, &moved, None)], &[1]);
    assert_eq!((finding.outcome, listed(&finding)), (Outcome::Updated, vec![4]));
    // It moved with this one looking on: what it left behind has the View of the change.
    let left = Held { joint: Some(moved.clone()), ..held(1, &rule(2, &[1]), None) };
    let finding = judged(Some(&old), vec![held(4, &moved, None), left], &[]);
    assert_eq!((finding.outcome, listed(&finding)), (Outcome::Updated, vec![4]));
    // The same list under a later version is no change.
    let ready = Held {
        note: Some(Box::new(record(3, &[1, 2, 3], 9))),
        ..held(1, &rule(2, &[1, 2, 3]), None)
    };
    let all = vec![ready, held(2, &rule(2, &[1, 2, 3]), None), held(3, &rule(2, &[1, 2, 3]), None)];
    assert_eq!(judged(None, all, &[]).outcome, Outcome::Created);
}

#[test]
fn an_epoch_of_a_term_that_nobody_proved_and_numbers_far_beyond_all_others_are_not_believed() {
    let own = record(2, &[1, 2, 3], 9);
    let unproven = Epoch(2 << 40);
    let note = |version, generation| Some(Box::new(record(version, &[1, 2, 3], generation)));
    type Lie<'a> = &'a dyn Fn(&mut Held);
    let lies: [(Lie<'_>, &str); 6] = [
        (&|h| h.promised = Epoch(1 << 60), "epoch"),
        (&|h| h.promised = unproven, "epoch"),
        (&|h| h.position.epoch = unproven, "epoch"),
        // The term is proven, and this controller alone grants in it.
        (&|h| h.promised = Epoch((1 << 40) + EPOCHS_AHEAD_MAX + 1), "epoch"),
        (&|h| h.note = note(2, 1 << 59), "generation"),
        (&|h| h.note = note(1 << 59, 9), "membership version"),
    ];
    for (lie, what) in lies {
        let finding = judged(Some(&own), beside_two(lie), &[]);
        assert_eq!((finding.outcome, finding.write), (Outcome::AsRecorded, None), "{what}");
        assert_eq!((finding.answered, finding.standings[2].1), (2, "not-believed"));
        assert!(finding.message.contains(&format!("it tells of {what}")), "{}", finding.message);
        let made = judged(None, beside_two(lie), &[]).write.unwrap();
        assert_eq!(
            (made.opened.epoch, made.generation, made.membership.version),
            (5, 10, 2),
            "{what}"
        );
    }
    // Epochs of a former term are as far as they are.
    let last = Epoch((1 << 40) - 1);
    let finding = judged(Some(&own), beside_two(|h| h.promised = last), &[]);
    let mut written = *finding.write.unwrap();
    assert_eq!(written.epoch(), last);
    use_up_epoch(&mut written, Epoch(0), TERM).expect("the term that began is above it");
    // A word that is not believed proves no deletion either.
    let mut lying = beside_two(|h| h.promised = Epoch(1 << 60)).split_off(2);
    lying[0].quorum = false;
    assert_eq!(judged(Some(&own), lying, &[1, 2]).outcome, Outcome::Undecided);
}

#[test]
fn the_copy_of_the_record_in_one_pool_orders_nothing_deleted_in_another() {
    let own = record(2, &[1, 2, 3], 4);
    let discard = |n: u128, pool: u128| Discarded {
        id: Text(ReplicaId(n)),
        guid: Text(ReplicaGuid(n)),
        pool: format!("pool-{pool}"),
    };
    let mut noted = record(2, &[1, 2, 3], 10);
    // A known one, one of another volume, and its own.
    noted.discarded = vec![discard(1, 1), discard(77, 2), discard(8, 3)];
    let mut all = beside_two(|h| h.note = Some(Box::new(noted)));
    all.push(Held { pool: "pool-3".into(), quorum: false, ..held(8, &rule(2, &[1, 2, 3]), None) });
    for record in [None, Some(&own)] {
        let written = judged(record, all.clone(), &[]).write.unwrap();
        assert_eq!(written.generation, 11);
        assert_eq!(written.discarded, [discard(8, 3)]);
    }
    // That the volume is being deleted is to be said by all who hold it.
    let mut going = record(2, &[1, 2, 3], 10);
    going.phase = VolumePhase::Deleting;
    let all = beside_two(|h| h.note = Some(Box::new(going.clone())));
    let finding = judged(Some(&own), all.clone(), &[]);
    assert_eq!(
        (finding.outcome, finding.write.unwrap().phase),
        (Outcome::Updated, VolumePhase::Ready)
    );
    let finding = judged(None, all, &[]);
    assert_eq!(
        (finding.outcome, finding.write.unwrap().phase),
        (Outcome::Created, VolumePhase::Ready)
    );
}

#[test]
fn a_list_of_the_retired_that_names_known_replicas_keeps_no_volume_closed() {
    let own = record(2, &[1, 2, 3], 9);
    let (_, mut membership) = alone(1);
    membership.retired = vec![ReplicaGuid(1), ReplicaGuid(2)];
    let finding = judged(Some(&own), beside_two(|h| h.membership = Some(membership)), &[]);
    assert_eq!(
        (finding.outcome, finding.write),
        (Outcome::AsRecorded, None),
        "{}",
        finding.message
    );
}
