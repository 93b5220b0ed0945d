//! Entries that an epoch acknowledged and its replicas lost with their caches are owed to the reads
//! of the next epoch, also if a pool has no room for the entries that are sequenced again.

use crate::hand::*;
use quoin_replication::primary::{LiveOptions, OnFull, OnQuorumLoss, PrimaryEvent, ReadMode};
use quoin_types::block::Operation;
use quoin_types::message::{Content, FromReplica, OpenAck, Ping, RoomGrant, Slot, ToReplica};
use quoin_types::*;

/// The last entry that every replica holds, of the epoch before.
const HELD: Lsn = Lsn(10);

struct Owed {
    hand: Hand,
    /// LSN at which the write was sequenced again.
    written: Lsn,
}

impl Owed {
    /// Volume in which a write reached so many of three replicas and no disk; then two of them lost
    /// their caches, so many times in a row. One pool has no room for the write when it is
    /// sequenced again.
    fn after(holders: u128, reopens: usize) -> Self {
        Self::after_events(holders, reopens, Vec::new())
    }

    /// The same, where these events come after the write reached its holders.
    fn after_events(holders: u128, reopens: usize, events: Vec<PrimaryEvent>) -> Self {
        let table = [row(5, 1, HELD.0, 55)];
        let mut hand = Hand::new(config());
        hand.serve(&table, HELD.0);
        hand.write(1, 3);
        for id in 1..=holders {
            hand.applied(id, false);
        }
        for event in events {
            hand.on(event);
        }
        let mut first = hand.entries_of(1)[0].clone();
        let mut rows = table.to_vec();
        for _ in 0..reopens {
            hand.overtaken(3);
            rows.push(row(first.epoch.0, first.lsn.0, first.lsn.0, first.chain.0));
            hand.sent.clear();
            for id in 1..=3 {
                let whole = ack(rows.clone(), HELD.0);
                hand.answer(id, OpenAck { continuous: id == 3, ..whole });
            }
            for id in 1..=3 {
                hand.truncated(id);
            }
            hand.applied(1, true);
            hand.applied(2, true);
            assert!(hand.target.status().serving);
            first = hand.entries_of(1)[0].clone();
        }
        let entries = hand.entries_of(1);
        let written = entries.iter().find(|e| e.kind == EntryKind::Write);
        let written = written.expect("it is sequenced again").lsn;
        assert_eq!(written, hand.target.status().commit.next());
        hand.say(1, FromReplica::NoRoom { applied: hand.target.status().commit });
        Self { hand, written }
    }

    /// Reads the block that was written. The member that is asked answers as soon as it may.
    fn read(&mut self) -> Lsn {
        let hand = &mut self.hand;
        hand.sent.clear();
        hand.submit(2, Operation::Read { offset: 3 * 4096, length: 4096 });
        let asked = hand.sent.iter().find_map(|(m, message)| match message {
            ToReplica::Read { id, after, .. } => Some((*m, *id, *after)),
            _ => None,
        });
        let (from, id, after) = asked.expect("a member is asked");
        let at = hand.target.status().commit;
        if after <= at {
            let slots = vec![Slot { lba: 3, blocks: 1, version: Lsn(0), content: Content::Hole }];
            let ping = Ping(hand.now.0);
            hand.say(from.id.0, FromReplica::Data { id, at, slots, ping });
        }
        after
    }

    fn is_answered(&self, token: u64) -> bool {
        self.hand.replies.iter().any(|reply| reply.token == token)
    }
}

#[test]
fn beside_a_full_pool_a_read_waits_for_what_was_acknowledged_before_the_reopen() {
    for reopens in 1..=3 {
        let mut owed = Owed::after(2, reopens);
        assert!(owed.is_answered(1), "the write was acknowledged");
        let after = owed.read();
        assert!(!owed.is_answered(2), "the block as it was before, {reopens} reopens");
        assert_eq!(after, owed.written, "{reopens} reopens");
    }
}

/// A read that is open already when a pool runs out of room is owed the same.
#[test]
fn a_read_that_is_open_when_a_pool_runs_full_keeps_what_it_waits_for() {
    let mut owed = Owed::after(2, 1);
    owed.hand.say(1, FromReplica::Room(RoomGrant::UNBOUNDED));
    assert_eq!(owed.read(), owed.written);
    let applied = owed.hand.target.status().commit;
    owed.hand.say(1, FromReplica::NoRoom { applied });
    owed.hand.say(2, FromReplica::NoRoom { applied });
    let lowered = owed.hand.sent.iter().any(
        |(_, message)| matches!(message, ToReplica::Read { after, .. } if *after < owed.written),
    );
    assert!(!lowered, "{:?}", owed.hand.sent);
}

/// A write that was never acknowledged may stay unseen, and reads continue without it.
#[test]
fn beside_a_full_pool_no_read_waits_for_what_was_never_acknowledged() {
    let mut owed = Owed::after(1, 1);
    assert!(!owed.is_answered(1));
    assert!(owed.read() < owed.written);
    assert!(owed.is_answered(2));
}

/// Under `media` nothing above stable is owed, but for what `cache` had acknowledged before.
#[test]
fn what_was_acknowledged_before_a_change_to_media_is_owed_after_it() {
    let options = LiveOptions {
        version: 1,
        durability: Durability::Media,
        on_quorum_loss: OnQuorumLoss::Wait,
        on_full: OnFull::Wait,
        reads: ReadMode::Leased,
    };
    let change = PrimaryEvent::Options(options);
    let mut owed = Owed::after_events(2, 1, vec![change]);
    assert!(owed.is_answered(1), "it was acknowledged under cache");
    assert_eq!(owed.read(), owed.written);
    assert!(!owed.is_answered(2));
}
