//! Replicas that refuse a target because they promised a newer epoch: which reports are believed,
//! whether one replica can keep the volume closed, and whose requests continue after that.

use crate::hand::*;
use quoin_replication::primary::PrimaryNote;
use quoin_types::message::{Failure, FromReplica};
use quoin_types::*;

/// Returns how often the target opened until it served, beside a third replica that refuses every
/// request with a promise `ahead` of the epoch; the other two are honest.
fn opens_beside_a_liar(ahead: u64) -> usize {
    let mut hand = Hand::new(config());
    let table = [row(5, 1, 10, 55)];
    for _ in 0..200 {
        if hand.session(3).is_some() {
            let promised = Epoch((hand.epoch.0 + ahead).min(EPOCH_MAX.0));
            hand.say(3, FromReplica::Refuse { promised, failure: Failure::Fenced });
        }
        for id in 1..=2 {
            if hand.session(3).is_none() && hand.session(id).is_some() {
                hand.answer(id, ack(table.to_vec(), 10));
            }
        }
        hand.pass(400);
        if hand.truncate_sent(1).is_some() && hand.truncate_sent(2).is_some() {
            for id in 1..=2 {
                hand.truncated(id);
            }
            for id in 1..=2 {
                hand.applied(id, true);
            }
            assert!(hand.target.status().serving);
            let note =
                PrimaryNote::InvariantRefused { member: member(3), invariant: "PromiseMonotone" };
            assert!(hand.notes.contains(&note), "its operator is told");
            return hand.asked.len();
        }
    }
    panic!("one of three keeps the volume closed: {:?}", hand.target.status());
}

#[test]
fn one_replica_that_refuses_without_end_keeps_no_volume_closed() {
    for ahead in [0, 1, 7, 1 << 20, 1 << 40, u64::MAX / 2] {
        let opens = opens_beside_a_liar(ahead);
        assert!(opens < 12, "{ahead}: {opens} opens");
    }
}

/// The record is an old copy: promises of replicas under the newer one are above its grants.
#[test]
fn above_an_old_copy_of_the_record_the_promises_of_replicas_are_passed() {
    let mut hand = Hand::new(config());
    let promised = Epoch(hand.epoch.0 + 500);
    hand.say(3, FromReplica::Refuse { promised, failure: Failure::Fenced });
    hand.pass(1000);
    assert!(hand.epoch > promised, "{:?}", hand.asked);
    hand.serve(&[row(5, 1, 10, 55)], 10);
}

/// A target with waiting requests has not served yet. Another one is granted the next epoch and
/// writes; then the volume comes back.
fn come_back_to(waits: bool) -> Hand {
    let mut hand = Hand::new(config());
    if waits {
        hand.write(1, 3);
    }
    hand.overtaken(3);
    let theirs = hand.epoch.0 - 1;
    hand.sent.clear();
    for id in 1..=3 {
        hand.answer(id, ack(vec![row(5, 1, 10, 55), row(theirs, 11, 12, 56)], 10));
    }
    hand
}

#[test]
fn requests_that_waited_since_before_another_writer_are_never_executed_after_it() {
    let mut hand = come_back_to(true);
    assert!(hand.target.status().stopped, "{:?}", hand.notes);
    assert_eq!(hand.entries_of(1), []);
    // Without waiting requests nothing could be overwritten.
    hand = come_back_to(false);
    for id in 1..=3 {
        hand.truncated(id);
    }
    for id in 1..=3 {
        hand.applied(id, true);
    }
    assert!(hand.target.status().serving);
}
