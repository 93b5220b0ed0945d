//! Options that change while the volume is served: durability by a View, the others at once.

use std::time::Duration;

use crate::common;
use crate::hand::*;
use quoin_replication::primary::{
    LiveOptions, OnFull, OnQuorumLoss, PrimaryConfig, PrimaryEvent, ReadMode,
};
use quoin_types::block::{BlockError, Operation};
use quoin_types::message::{FromReplica, Ping};
use quoin_types::*;

const HELD: Lsn = Lsn(10);

fn options(version: u64, durability: Durability) -> LiveOptions {
    LiveOptions {
        version,
        durability,
        on_quorum_loss: OnQuorumLoss::Wait,
        on_full: OnFull::Wait,
        reads: ReadMode::Leased,
    }
}

fn change(version: u64, durability: Durability) -> PrimaryEvent {
    PrimaryEvent::Options(options(version, durability))
}

fn served(config: PrimaryConfig) -> Hand {
    let mut hand = Hand::new(config);
    hand.serve(&[row(5, 1, HELD.0, 55)], HELD.0);
    hand.sent.clear();
    hand
}

fn is_answered(hand: &Hand, token: u64) -> bool {
    hand.replies.iter().any(|reply| reply.token == token)
}

/// Durability of the Views that were sent to a replica, in their order.
fn views(hand: &Hand, id: u128) -> Vec<Durability> {
    let entries = hand.entries_of(id);
    let views = entries.iter().filter_map(|entry| match &entry.kind {
        EntryKind::View(view) => Some(view.durability),
        _ => None,
    });
    views.collect()
}

#[test]
fn after_a_change_to_media_nothing_is_acknowledged_before_it_is_stable() {
    let mut hand = served(config());
    hand.write(1, 3);
    hand.on(change(1, Durability::Media));
    assert_eq!(views(&hand, 1), [Durability::Media]);
    assert_eq!(hand.target.status().options_version, 0, "its View is not active");
    hand.write(2, 4);
    hand.applied(1, false);
    hand.applied(2, false);
    assert!(!is_answered(&hand, 1) && !is_answered(&hand, 2), "on no medium");
    hand.applied(1, true);
    hand.applied(2, true);
    assert!(is_answered(&hand, 1) && is_answered(&hand, 2));
    assert_eq!(hand.target.status().options_version, 1);
}

#[test]
fn after_a_change_to_cache_answers_wait_for_stable_until_its_view_is_active() {
    let mut hand = served(PrimaryConfig { durability: Durability::Media, ..config() });
    hand.on(change(1, Durability::Cache));
    hand.write(1, 3);
    hand.applied(1, false);
    hand.applied(2, false);
    assert!(!is_answered(&hand, 1));
    assert_eq!(hand.target.status().options_version, 0);
    hand.applied(1, true);
    hand.applied(2, true);
    assert!(is_answered(&hand, 1));
    assert_eq!(hand.target.status().options_version, 1);
    hand.write(2, 4);
    hand.applied(1, false);
    hand.applied(2, false);
    assert!(is_answered(&hand, 2), "commit is enough from now on");
    assert_eq!(views(&hand, 1), [Durability::Cache]);
}

#[test]
fn older_options_change_nothing_whichever_way_they_come() {
    let mut hand = served(config());
    hand.on(change(5, Durability::Media));
    hand.applied(1, true);
    hand.applied(2, true);
    hand.on(change(4, Durability::Cache));
    assert_eq!(hand.target.status().options_version, 5);
    assert_eq!(views(&hand, 1), [Durability::Media]);
    // Restored records count from lower again, in a term of their own.
    let (former, next) = (Term::default(), Term { number: 1, ..Term::default() });
    assert!(next.version_of(2) > former.version_of(5));
    hand.on(change(next.version_of(2), Durability::Cache));
    hand.applied(1, true);
    hand.applied(2, true);
    assert_eq!(hand.target.status().options_version, next.version_of(2));
    assert_eq!(views(&hand, 1), [Durability::Media, Durability::Cache]);
}

#[test]
fn options_are_in_force_at_a_target_that_serves_and_not_before() {
    let mut hand = Hand::new(config());
    hand.on(change(5, Durability::Media));
    assert_eq!(hand.target.status().options_version, 0, "another target may serve");
    hand.serve(&[row(5, 1, HELD.0, 55)], HELD.0);
    assert_eq!(hand.target.status().options_version, 5);
}

#[test]
fn without_a_quorum_io_fails_as_soon_as_the_option_says_so() {
    let mut hand = served(config());
    hand.write(1, 3);
    for id in [1, 2] {
        let session = hand.session(id).unwrap();
        hand.sessions.retain(|(s, _)| *s != session);
        hand.on(PrimaryEvent::Disconnected { session });
    }
    hand.pass(3 * u64::from(config().lease_ms));
    assert!(!is_answered(&hand, 1), "it waits");
    let fails = LiveOptions { on_quorum_loss: OnQuorumLoss::Fail, ..options(1, Durability::Cache) };
    hand.on(PrimaryEvent::Options(fails));
    let reply = hand.replies.iter().find(|reply| reply.token == 1).expect("it is answered");
    assert!(matches!(reply.result, Err(BlockError::NoQuorum)));
}

#[test]
fn reads_that_must_be_confirmed_wait_for_a_ping_that_was_sent_after_they_arrived() {
    let mut hand = served(config());
    let confirmed = LiveOptions { reads: ReadMode::Confirmed, ..options(1, Durability::Cache) };
    hand.on(PrimaryEvent::Options(confirmed));
    hand.pass(10);
    hand.submit(1, Operation::Read { offset: 0, length: 4096 });
    let (from, id, at) = hand
        .sent
        .iter()
        .rev()
        .find_map(|(member, message)| match message {
            quoin_types::message::ToReplica::Read { id, after, .. } => Some((*member, *id, *after)),
            _ => None,
        })
        .expect("a member is asked");
    let before = Ping(hand.now.0 - 10);
    let hole = quoin_types::message::Content::Hole;
    let slots =
        vec![quoin_types::message::Slot { lba: 0, blocks: 1, version: Lsn(0), content: hole }];
    hand.say(from.id.0, FromReplica::Data { id, at, slots, ping: before });
    assert!(!is_answered(&hand, 1), "no later ping came back");
    let now = Ping(hand.now.0);
    for id in 1..=2 {
        hand.say(id, FromReplica::Applied { applied: HELD, durable: HELD, ping: now });
    }
    assert!(is_answered(&hand, 1));
}

#[test]
fn replicas_follow_the_durability_forth_and_back_while_the_volume_is_written() {
    let mut c = common::Cluster::new(3, common::config());
    c.write(0, 1);
    c.wait_in_sync(3);
    for (version, durability) in
        [(1, Durability::Media), (2, Durability::Cache), (3, Durability::Media)]
    {
        c.write(version, 2);
        c.event(PrimaryEvent::Options(options(version, durability)));
        c.write(version, 3);
        c.run(Duration::from_secs(1));
        assert_eq!(c.target.status().options_version, version, "in force within a second");
        for host in &mut c.hosts {
            assert_eq!(host.last_view().durability, durability);
        }
        assert_eq!(c.read(version * 4096, 4096), [3; 4096]);
    }
}
