//! Bulk connections of a target, with each message of a replica chosen by the test.

use crate::hand;
use crate::hand::{Hand, ack, row};
use bytes::Bytes;
use quoin_replication::primary::PrimaryEvent;
use quoin_types::message::{Content, Failure, FromReplica, Slot, ToReplica};
use quoin_types::*;

const TABLE_END: u64 = 10;

/// Replica 3 was away for longer than the log is kept; its increment began.
fn by_hand() -> Hand {
    let mut hand = Hand::new(hand::config());
    let table = [row(5, 1, TABLE_END, 55)];
    hand.serve(&table, TABLE_END);
    let session = hand.session(3).expect("it is connected");
    hand.sessions.retain(|(s, _)| *s != session);
    hand.on(PrimaryEvent::Disconnected { session });
    for block in 0..100 {
        hand.write(block, block);
        (1..=2).for_each(|id| hand.applied(id, true));
    }
    hand.pass(300);
    hand.answer(3, ack(table.to_vec(), TABLE_END));
    hand.truncated(3);
    for _ in 0..10 {
        hand.pass(10);
        (1..=2).for_each(|id| hand.applied(id, true));
    }
    hand
}

fn begun(hand: &Hand) -> Option<u64> {
    hand.sent_bulk.iter().rev().find_map(|(m, message)| match message {
        ToReplica::IncrementBegin { rebuild, .. } if *m == hand::member(3) => Some(*rebuild),
        _ => None,
    })
}

fn take_pull(hand: &mut Hand) -> Option<(u128, u64, u64)> {
    let at = hand.sent_bulk.iter().position(|(_, m)| matches!(m, ToReplica::Pull { .. }))?;
    let (source, message) = hand.sent_bulk.remove(at);
    let ToReplica::Pull { id, cursor, .. } = message else { unreachable!("looked for") };
    Some((source.id.0, id, cursor))
}

fn slot(lba: u64) -> Slot {
    let data = Bytes::from(vec![1; 4096]);
    let crc = crc32c(&data);
    Slot { lba, blocks: 1, version: Lsn(3), content: Content::Data { crc, data } }
}

fn answer_pull(hand: &mut Hand, (source, id, cursor): (u128, u64, u64)) {
    let slots = (cursor..cursor + 8).map(slot).collect();
    let cursor = Some(cursor + 8);
    hand.say_bulk(source, FromReplica::Pulled { id, slots, cursor, end: None, gone: false });
}

#[test]
fn a_source_whose_bulk_connection_owes_an_answer_for_too_long_is_asked_no_more_and_stays_counted() {
    let mut hand = by_hand();
    let rebuild = begun(&hand).expect("the receiver is asked");
    hand.say_bulk(3, FromReplica::IncrementBegun { rebuild, cursor: 0, cut: Lsn(TABLE_END) });
    let asked = [take_pull(&mut hand).expect("asked"), take_pull(&mut hand).expect("asked")];
    assert_ne!(asked[0].0, asked[1].0, "each source for a part");
    let (silent, other) = (asked[0], asked[1]);
    let (session, bulk) = (hand.session(silent.0), hand.bulk(silent.0));
    // Its own connection answers all the time.
    for round in 0..30 {
        hand.pass(500);
        hand.write(1000 + round, round);
        (1..=2).for_each(|id| hand.applied(id, true));
        if round == 0 {
            answer_pull(&mut hand, other);
        }
    }
    assert_ne!(hand.bulk(silent.0), bulk, "it was given up, and made anew");
    assert_eq!(hand.session(silent.0), session);
    assert!(hand.target.status().serving);
    // Its late message on the closed connection is ignored.
    let before = hand.sent_bulk.len();
    let (_, id, cursor) = silent;
    let late =
        FromReplica::Pulled { id, slots: vec![slot(cursor)], cursor: None, end: None, gone: true };
    hand.on(PrimaryEvent::BulkMessage { bulk: bulk.unwrap(), message: late });
    assert_eq!(hand.sent_bulk.len(), before);
}

#[test]
fn a_source_that_cannot_read_for_a_rebuild_loses_its_bulk_connection_alone() {
    let mut hand = by_hand();
    let rebuild = begun(&hand).expect("the receiver is asked");
    hand.say_bulk(3, FromReplica::IncrementBegun { rebuild, cursor: 0, cut: Lsn(TABLE_END) });
    let (source, ..) = take_pull(&mut hand).expect("asked");
    let (session, bulk) = (hand.session(source), hand.bulk(source));
    hand.say_bulk(source, FromReplica::Failed(Failure::Io));
    assert_eq!(hand.session(source), session);
    assert_ne!(hand.bulk(source), bulk);
}

#[test]
fn a_receiver_that_claims_more_than_it_was_fed_is_begun_anew() {
    let mut hand = by_hand();
    let first = begun(&hand).expect("the receiver is asked");
    hand.say_bulk(
        3,
        FromReplica::IncrementBegun { rebuild: first, cursor: 512, cut: Lsn(TABLE_END) },
    );
    for _ in 0..10 {
        hand.pass(10);
        (1..=2).for_each(|id| hand.applied(id, true));
    }
    assert_ne!(begun(&hand), Some(first));
}

#[test]
fn a_receiver_that_refuses_what_it_is_fed_is_opened_anew() {
    let mut hand = by_hand();
    let session = hand.session(3);
    let rebuild = begun(&hand).expect("the receiver is asked");
    hand.say_bulk(3, FromReplica::IncrementBegun { rebuild, cursor: 0, cut: Lsn(TABLE_END) });
    hand.say_bulk(3, FromReplica::Failed(Failure::Protocol));
    assert_ne!(hand.session(3), session);
    assert_eq!(hand.bulk(3), None);
}
