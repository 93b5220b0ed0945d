//! The times and amounts of a target's actions, and the actions that it does not take yet. Replicas
//! are controlled by hand, and the test chooses each moment.

use std::time::Duration;

use crate::hand::*;
use bytes::Bytes;
use quoin_replication::primary::{
    PrimaryAction, PrimaryConfig, PrimaryEvent, PrimaryNote, ReadMode,
};
use quoin_replication::replica::{LEASE_MS, granted_lease};
use quoin_replication::step::Step;
use quoin_types::block::{BlockError, Operation, Payload, Request};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{
    BadCopy, Content, Failure, FromReplica, OpenAck, Ping, RequestId, Slot, ToReplica,
};
use quoin_types::*;

const TABLE_END: u64 = 10;

/// A volume that serves; its first View is LSN 11, on media everywhere.
fn served(config: PrimaryConfig) -> Hand {
    let mut hand = Hand::new(config);
    hand.serve(&[row(5, 1, TABLE_END, 55)], TABLE_END);
    hand
}

impl Hand {
    fn gone(&mut self, id: u128) {
        let session = self.session(id).expect("it is connected");
        self.sessions.retain(|(s, _)| *s != session);
        self.on(PrimaryEvent::Disconnected { session });
    }

    /// Acknowledges everything up to these LSNs now.
    fn holds(&mut self, id: u128, applied: u64, durable: u64) {
        let (applied, durable, ping) = (Lsn(applied), Lsn(durable), Ping(self.now.0));
        self.say(id, FromReplica::Applied { applied, durable, ping });
    }

    /// Several requests that reach the target in one batch.
    fn submit_at_once(&mut self, operations: impl IntoIterator<Item = Operation>) {
        for (token, operation) in (1..).zip(operations) {
            let event = PrimaryEvent::Submit(Request { token, operation, origin: None });
            self.target.on(self.now, event, &mut Vec::new());
        }
        self.on(PrimaryEvent::Timer);
    }

    fn appends(&self, id: u128) -> Vec<Vec<SharedEntry>> {
        let sent = self.sent.iter().filter(|(m, _)| *m == member(id));
        sent.filter_map(|(_, message)| match message {
            ToReplica::Append { entries, .. } => Some(entries.clone()),
            _ => None,
        })
        .collect()
    }

    fn pings(&self) -> usize {
        self.sent.iter().filter(|(_, m)| matches!(m, ToReplica::Ping { .. })).count()
    }

    /// The last read request, and its member.
    fn asked_read(&self) -> Option<(u128, RequestId, u64, u32)> {
        self.sent.iter().rev().find_map(|(m, message)| match message {
            ToReplica::Read { id, lba, blocks, .. } => Some((m.id.0, *id, *lba, *blocks)),
            _ => None,
        })
    }

    /// Answers the last read request with this content.
    fn answer_read(&mut self, content: Content) -> u128 {
        let (from, id, lba, blocks) = self.asked_read().expect("somebody is asked");
        let at = self.target.status().last.lsn;
        let slots = vec![Slot { lba, blocks, version: Lsn(3), content }];
        self.sent.clear();
        self.say(from, FromReplica::Data { id, at, slots, ping: Ping(self.now.0) });
        from
    }

    fn dropped(&self) -> Vec<(Member, &'static str)> {
        let dropped = |note: &PrimaryNote| match note {
            PrimaryNote::Dropped { member, reason } => Some((*member, *reason)),
            _ => None,
        };
        self.notes.iter().filter_map(dropped).collect()
    }

    fn closes(&self) -> usize {
        self.sent.iter().filter(|(_, m)| matches!(m, ToReplica::Close)).count()
    }
}

fn read(offset: u64) -> Operation {
    Operation::Read { offset, length: 4096 }
}

fn write(block: u64, bytes: usize) -> Operation {
    Operation::Write { offset: block * 4096, data: Bytes::from(vec![7; bytes]), fua: false }
}

#[test]
fn attempts_to_open_follow_each_other_ever_more_slowly_and_never_more_than_a_half_early() {
    let mut hand = Hand::new(config());
    hand.membership.formed = false;
    let promised = hand.epoch.next();
    hand.say(1, FromReplica::Refuse { promised, failure: Failure::Fenced });
    for doubled in 0..7 {
        let (asked, began) = (hand.asked.len(), hand.now);
        while hand.asked.len() == asked {
            hand.pass(1);
            assert!(hand.now.since(began) < Duration::from_secs(20), "{doubled}");
        }
        let rested = hand.now.since(began).as_millis();
        let most = 100 << doubled;
        assert!((most / 2..=most + 2).contains(&rested), "{doubled}: {rested} ms");
    }
}

/// Data that was acknowledged and never flushed is lost with every cache; the target still has it.
#[test]
fn a_living_target_goes_on_after_a_lost_tail_and_writes_it_again() {
    let mut hand = served(config());
    let first = hand.entries_of(1)[0].clone();
    hand.write(1, 3);
    (1..=3).for_each(|id| hand.holds(id, 12, 11));
    assert_eq!(hand.replies.len(), 1, "it was acknowledged");
    hand.overtaken(3);
    hand.sent.clear();
    let after = ack(vec![row(5, 1, TABLE_END, 55), row(first.epoch.0, 11, 11, first.chain.0)], 11);
    for id in 1..=3 {
        hand.answer(id, OpenAck { continuous: false, ..after.clone() });
    }
    assert!(hand.notes.contains(&PrimaryNote::UnflushedTailMayBeLost));
    for id in 1..=3 {
        hand.truncated(id);
    }
    for id in 1..=3 {
        hand.applied(id, true);
    }
    assert!(hand.target.status().serving, "{:?}", hand.notes);
    let again = hand.entries_of(1).iter().filter(|e| e.kind == EntryKind::Write).count();
    assert_eq!(again, 1);
}

#[test]
fn a_known_replica_that_claims_a_membership_of_nobody_s_making_is_shut_out_by_name() {
    let mut hand = served(config());
    hand.gone(3);
    hand.pass(200);
    hand.answer(3, OpenAck { membership_version: 2, ..ack(vec![row(5, 1, 10, 55)], 10) });
    let refused =
        PrimaryNote::InvariantRefused { member: member(3), invariant: "MembershipMonotone" };
    assert!(hand.notes.contains(&refused), "{:?}", hand.notes);
    // The replica accepted the epoch, so the record is an old copy: the operator must know.
    let behind = PrimaryNote::ControlPlaneBehind { durable_version: 2 };
    assert!(hand.notes.contains(&behind), "{:?}", hand.notes);
    assert!(hand.session(3).is_none());
}

/// Only the absent member could still have a good copy.
#[test]
fn a_block_of_which_the_copies_at_hand_are_bad_waits_for_the_member_that_is_away() {
    let mut hand = served(config());
    hand.gone(3);
    hand.submit(1, read(0));
    hand.answer_read(Content::Bad);
    hand.answer_read(Content::Bad);
    assert_eq!(hand.replies, [], "not lost yet");
    hand.pass(200);
    assert_eq!(hand.replies, [], "not lost yet");
    // The View without it is in force: it is not waited for any more.
    (1..=2).for_each(|id| hand.holds(id, 12, 12));
    let results: Vec<_> = hand.replies.iter().map(|r| r.result.clone()).collect();
    assert_eq!(results, [Err(BlockError::Damaged)]);
}

#[test]
fn a_confirmed_read_is_answered_by_the_word_of_the_moment_in_which_it_came() {
    let mut hand = served(PrimaryConfig { reads: ReadMode::Confirmed, ..config() });
    hand.pass(300);
    hand.sent.clear();
    hand.submit(1, read(0));
    assert!(hand.pings() >= 2, "who counts is asked");
    hand.answer_read(Content::Hole);
    assert_eq!(hand.replies, [], "nobody has said that this target still rules");
    hand.holds(1, 11, 11);
    assert_eq!(hand.replies, [], "CF must say so");
    hand.holds(2, 11, 11);
    assert!(matches!(hand.replies[..], [ref r] if matches!(r.result, Ok(Payload::Data(_)))));
}

#[test]
fn a_member_that_lost_the_map_of_a_stretch_is_given_what_another_has_there() {
    let mut hand = served(config());
    hand.say(
        1,
        FromReplica::BadCopy(BadCopy { lba: 8, blocks: 4, version: Lsn(5), snapshot: None }),
    );
    let from = hand.answer_read(Content::Hole);
    assert_ne!(from, 1);
    let mended = hand.sent.iter().find_map(|(m, message)| match message {
        ToReplica::Mend { lba, blocks, slots, .. } => Some((*m, *lba, *blocks, slots.len())),
        _ => None,
    });
    assert_eq!(mended, Some((member(1), 8, 4, 1)));
}

/// A restarted replica waits out the longest lease that it may have granted before it answers.
#[test]
fn an_open_that_is_not_answered_is_given_up_after_a_lease_and_half_a_minute() {
    let mut hand = Hand::new(config());
    let session = hand.session(3).expect("it is connected");
    let patience = granted_lease(LEASE_MS) + Duration::from_secs(30);
    let began = hand.now;
    while hand.session(3) == Some(session) {
        for id in 1..=2 {
            // Each answer is given once.
            if hand.truncate_sent(id).is_none() {
                hand.answer(id, ack(vec![row(5, 1, 10, 55)], 10));
            }
        }
        for id in 1..=2 {
            if hand.entries_of(id).is_empty() && hand.truncate_sent(id).is_some() {
                hand.truncated(id);
            }
        }
        for id in 1..=2 {
            if !hand.entries_of(id).is_empty() {
                hand.applied(id, true);
            }
        }
        hand.pass(500);
        assert!(hand.now.since(began) < patience * 2, "it is never given up");
    }
    let waited = hand.now.since(began);
    assert!(waited >= patience && waited < patience + Duration::from_secs(2), "{waited:?}");
}

/// Of two that must have everything, one lags: replica 1 was counted before it left.
fn lagging() -> Hand {
    let mut hand = served(config());
    hand.write(1, 3);
    (1..=2).for_each(|id| hand.holds(id, 12, 12));
    hand.holds(3, 11, 11);
    assert_eq!(hand.target.reach().0, Lsn(12));
    hand.gone(1);
    hand
}

#[test]
fn a_member_that_has_to_catch_up_is_spoken_of_after_a_second_and_not_at_once() {
    let mut hand = lagging();
    let waiting = |hand: &Hand| hand.target.status().waiting;
    assert!(!waiting(&hand).contains("caught up"), "{}", waiting(&hand));
    hand.pass(900);
    hand.on(PrimaryEvent::Timer);
    assert!(!waiting(&hand).contains("caught up"), "{}", waiting(&hand));
    hand.pass(200);
    hand.on(PrimaryEvent::Timer);
    assert!(waiting(&hand).contains("caught up"), "{}", waiting(&hand));
}

#[test]
fn a_volume_whose_counted_members_are_all_there_is_not_opened_anew_because_one_lags() {
    let mut hand = lagging();
    let asked = hand.asked.len();
    for _ in 0..40 {
        hand.pass(200);
        hand.holds(2, 12, 12);
        hand.holds(3, 11, 11);
    }
    assert_eq!(hand.asked.len(), asked, "an open would find no more than is here");
    assert_eq!(hand.target.status().epoch, hand.epoch);
}

#[test]
fn a_queue_of_large_writes_is_sent_in_parts_and_more_of_it_when_those_are_applied() {
    let mut hand =
        served(PrimaryConfig { window_bytes: 64 << 20, sync_bytes: 64 << 20, ..config() });
    hand.sent.clear();
    hand.submit_at_once((0..16).map(|n| write(n % 4 * 256, 1 << 20)));
    let sent = hand.appends(1);
    assert!(sent.iter().all(|entries| entries.len() == 1), "each is a megabyte");
    assert!((8..=10).contains(&sent.len()), "{} are on their way", sent.len());
    hand.applied(1, false);
    assert!(hand.appends(1).len() > sent.len(), "it has room for more");
}

#[test]
fn a_queue_of_small_writes_is_sent_many_at_a_time_and_never_more_than_a_megabyte() {
    let mut hand =
        served(PrimaryConfig { window_bytes: 64 << 20, sync_bytes: 64 << 20, ..config() });
    hand.sent.clear();
    hand.submit_at_once((0..600).map(|n| write(n, 4096)));
    let sent = hand.appends(1);
    let weights = sent.iter().map(|entries| entries.iter().map(|e| e.weight()).sum::<usize>());
    let heaviest = weights.max().unwrap_or(0);
    assert!(heaviest <= 1 << 20, "{heaviest} bytes in one message");
    assert_eq!(sent.iter().map(Vec::len).sum::<usize>(), 600);
    assert!(sent.len() < 6, "{} messages", sent.len());
}

#[test]
fn a_lease_is_renewed_in_its_second_half_and_not_before() {
    let mut hand = served(config());
    (1..=3).for_each(|id| hand.applied(id, true));
    hand.write(1, 3);
    hand.sent.clear();
    hand.pass(u64::from(LEASE_MS) * 4 / 10);
    hand.on(PrimaryEvent::Timer);
    assert_eq!(hand.pings(), 0, "half of it is left");
    hand.pass(u64::from(LEASE_MS) * 4 / 10);
    assert!(hand.pings() >= 3, "it would lapse while a client waits");
}

#[test]
fn a_member_is_dropped_when_it_lacks_more_than_the_window_and_not_when_it_lacks_all_of_it() {
    let mut hand = served(config());
    hand.write(1, 0);
    let weight = hand.entries_of(1).last().expect("it was sent").weight();
    let mut hand = served(PrimaryConfig { window_bytes: 10 * weight, ..config() });
    for n in 0..10 {
        hand.write(n, n);
        (1..=2).for_each(|id| hand.holds(id, 12 + n, 12 + n));
    }
    assert_eq!(hand.dropped(), []);
    hand.write(10, 10);
    assert_eq!(hand.dropped(), [(member(3), "it is too far behind")]);
}

#[test]
fn a_member_that_makes_no_progress_is_dropped_in_time_though_nothing_else_happens() {
    let mut hand = served(PrimaryConfig { drop_after_ms: 1500, ..config() });
    hand.write(1, 3);
    (1..=2).for_each(|id| hand.holds(id, 12, 12));
    hand.pass(1490);
    assert_eq!(hand.dropped(), []);
    hand.pass(20);
    assert_eq!(hand.dropped(), [(member(3), "it made no progress for too long")]);
}

#[test]
fn a_shutdown_closes_after_the_last_answer_and_ends_when_all_have_closed() {
    let mut hand = served(config());
    (1..=3).for_each(|id| hand.applied(id, true));
    hand.submit(1, read(0));
    hand.on(PrimaryEvent::Shutdown);
    assert_eq!(hand.closes(), 0, "a client waits for an answer");
    hand.answer_read(Content::Hole);
    assert_eq!(hand.replies.len(), 1);
    assert_eq!(hand.closes(), 3);
    for id in 1..=3 {
        hand.pass(100);
        assert!(!hand.target.status().stopped, "{id} has not closed yet");
        hand.say(id, FromReplica::Closed);
    }
    hand.pass(100);
    assert!(hand.target.status().stopped);
}

#[test]
fn a_deadline_that_stands_is_not_set_again() {
    let mut hand = served(config());
    hand.write(1, 3);
    let mut actions = Vec::new();
    hand.target.on(hand.now, PrimaryEvent::Timer, &mut actions);
    hand.target.flush(hand.now, &mut actions);
    actions.clear();
    hand.target.flush(hand.now, &mut actions);
    let set = actions.iter().filter(|a| matches!(a, PrimaryAction::Timer { .. })).count();
    assert_eq!(set, 0, "each is a system call");
}

#[test]
fn an_open_by_the_log_is_not_told_as_one_by_increments() {
    let mut hand = Hand::new(config());
    (1..=3).for_each(|id| hand.answer(id, ack(vec![row(5, 1, 10, 55)], 10)));
    let steps = hand.target.steps();
    assert!(steps.contains(&Step::Recovering), "{steps:?}");
    assert!(!steps.contains(&Step::RecoveringByBase), "{steps:?}");
}

/// Versions above those that all have applied give no result, and are asked for again a limited
/// number of times.
#[test]
fn blocks_that_are_written_all_the_time_are_counted_as_unsettled_and_not_as_differing() {
    use quoin_replication::primary::VerifyOrder;
    let mut hand = served(PrimaryConfig { volume_blocks: 1024, ..config() });
    let order = VerifyOrder { request: 1, repair: false, from: None };
    hand.sent.clear();
    hand.on(PrimaryEvent::Verify(Some(order)));
    for _ in 0..20_000 {
        let asked: Vec<_> = std::mem::take(&mut hand.sent)
            .into_iter()
            .filter_map(|(m, message)| match message {
                ToReplica::Verify { id, lba, blocks, .. } => Some((m, id, lba, blocks)),
                _ => None,
            })
            .collect();
        for (m, id, lba, blocks) in asked {
            // Block 0 is written between any two reads; one of them was before the write.
            let (at, version) = match (m == member(1), lba) {
                (true, _) => (Lsn(10), Lsn(3)),
                (false, 0) => (Lsn(11), Lsn(11)),
                (false, _) => (Lsn(11), Lsn(3)),
            };
            let hole = |lba, blocks, version| Slot { lba, blocks, version, content: Content::Hole };
            let mut slots = vec![hole(lba, 1, version)];
            if blocks > 1 {
                slots.push(hole(lba + 1, blocks - 1, Lsn(3)));
            }
            hand.say(m.id.0, FromReplica::Verified { id, at, slots, ping: Ping(hand.now.0) });
        }
        if hand.target.status().verify.is_some_and(|report| report.ended) {
            break;
        }
        hand.pass(5);
    }
    let report = hand.target.status().verify.expect("it was ordered");
    assert!(report.ended, "{report:?}");
    assert_eq!((report.unsettled, report.differing, report.lost), (1, 0, 0));
    assert_eq!(report.checked_blocks, 1024);
}

#[test]
fn a_write_that_waits_for_the_rest_of_its_block_keeps_others_of_that_block_behind_it() {
    let mut hand = served(config());
    let data = Bytes::from(vec![9; 512]);
    hand.submit(1, Operation::Write { offset: 512, data, fua: false });
    hand.submit(2, write(0, 4096));
    hand.submit(3, write(1, 4096));
    let written = |hand: &Hand| {
        let entries = hand.entries_of(1);
        let writes = entries.iter().filter(|e| e.kind == EntryKind::Write);
        writes.map(|e| (e.lba, e.data[512])).collect::<Vec<_>>()
    };
    assert_eq!(written(&hand), [(1, 7)], "what lies beside it does not wait");
    let (from, id, lba, blocks) = hand.asked_read().expect("the rest is read");
    let at = hand.target.status().last.lsn;
    let slots = vec![Slot { lba, blocks, version: Lsn(3), content: Content::Hole }];
    hand.say(from, FromReplica::Data { id, at, slots, ping: Ping(hand.now.0) });
    assert_eq!(written(&hand), [(1, 7), (0, 9), (0, 7)]);
    assert!(hand.replies.iter().all(|r| r.result != Err(BlockError::Damaged)));
}
