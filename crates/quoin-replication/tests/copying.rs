//! Copying of a rebuild: requests to its sources and data for its receiver, with each answer chosen
//! by the test.

use crate::hand::*;
use bytes::Bytes;
use quoin_replication::primary::PrimaryEvent;
use quoin_types::message::{Content, FromReplica, Slot, ToReplica};
use quoin_types::*;

const TABLE_END: u64 = 10;
/// Blocks in one answer of a source.
const CHUNK_BLOCKS: u64 = 16;

/// Replica 3 was away for longer than the log is kept, and its copying began.
fn rebuilding() -> Hand {
    let mut hand = Hand::new(config());
    let table = [row(5, 1, TABLE_END, 55)];
    hand.serve(&table, TABLE_END);
    let session = hand.session(3).expect("it is connected");
    hand.sessions.retain(|(s, _)| *s != session);
    hand.on(PrimaryEvent::Disconnected { session });
    // More than the window, and no part of it has to be kept for the connected replicas.
    for block in 0..100 {
        hand.write(block, block);
        (1..=2).for_each(|id| hand.applied(id, true));
    }
    hand.pass(300);
    hand.answer(3, ack(table.to_vec(), TABLE_END));
    hand.truncated(3);
    hand.settle();
    let begun = hand.sent_bulk.iter().find_map(|(_, message)| match message {
        ToReplica::IncrementBegin { rebuild, .. } => Some(*rebuild),
        _ => None,
    });
    let (rebuild, cut) = (begun.expect("the receiver is asked"), Lsn(TABLE_END));
    hand.say_bulk(3, FromReplica::IncrementBegun { rebuild, cursor: 0, cut });
    hand
}

impl Hand {
    /// Both complete replicas acknowledge, until they have a rebuild's boundary too.
    fn settle(&mut self) {
        for _ in 0..10 {
            self.pass(10);
            (1..=2).for_each(|id| self.applied(id, true));
        }
    }

    /// Answers the first request to a source; returns whether there was one.
    fn pulled(&mut self) -> bool {
        let pull = |(_, m): &(Member, ToReplica)| matches!(m, ToReplica::Pull { .. });
        let Some(at) = self.sent_bulk.iter().position(pull) else { return false };
        let (source, ToReplica::Pull { id, cursor, .. }) = self.sent_bulk.remove(at) else {
            unreachable!("it was looked for")
        };
        let slots = (cursor..cursor + CHUNK_BLOCKS).map(slot).collect();
        let cursor = Some(cursor + CHUNK_BLOCKS);
        let end = None;
        self.say_bulk(source.id.0, FromReplica::Pulled { id, slots, cursor, end, gone: false });
        true
    }

    /// Chunks sent to the receiver: the rebuild, and the cursor.
    fn fed(&self) -> Vec<(u64, u64)> {
        let fed = self.sent_bulk.iter().filter_map(|(m, message)| match message {
            ToReplica::IncrementFeed { rebuild, cursor, .. } if *m == member(3) => {
                Some((*rebuild, *cursor))
            }
            _ => None,
        });
        fed.collect()
    }
}

fn slot(lba: u64) -> Slot {
    let data = Bytes::from(vec![1; 4096]);
    let crc = crc32c(&data);
    Slot { lba, blocks: 1, version: Lsn(3), content: Content::Data { crc, data } }
}

#[test]
fn a_receiver_that_takes_nothing_is_sent_four_chunks_and_no_more_is_asked_for_on_its_behalf() {
    let mut hand = rebuilding();
    while hand.fed().len() < 4 {
        assert!(hand.pulled(), "{:?}", hand.fed());
    }
    // Requests that each source received before.
    let rest = (0..).take_while(|_| hand.pulled()).count();
    assert!(rest <= 2, "{rest}");
    assert_eq!(hand.fed().len(), 4);
    let (rebuild, cursor) = hand.fed()[0];
    hand.say_bulk(3, FromReplica::IncrementFed { rebuild, cursor });
    assert!(hand.pulled(), "it goes on");
    while hand.pulled() {}
    assert_eq!(hand.fed().len(), 5);
}
