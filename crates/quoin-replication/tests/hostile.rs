//! One target with replicas controlled by hand: answers that a broken or hostile replica might
//! give, and orders of events that are rare with a correct one.

use std::time::Duration;

use crate::hand::*;
use bytes::Bytes;
use quoin_replication::primary::{PrimaryConfig, PrimaryEvent, PrimaryNote};
use quoin_types::block::{BlockError, Operation, Request};
use quoin_types::message::{
    Content, Failure, FromReplica, OpenAck, Ping, Slot, SnapshotHead, SnapshotInfo, ToReplica,
};
use quoin_types::*;

#[test]
fn an_answer_that_no_replica_can_give_is_refused_and_does_no_harm() {
    let good = ack(vec![row(5, 1, 10, 55)], 5);
    let mut bad = vec![
        OpenAck { position: Position { epoch: Epoch(99), lsn: Lsn(10) }, ..good.clone() },
        OpenAck { position: Position { epoch: Epoch(5), lsn: Lsn(u64::MAX) }, ..good.clone() },
        OpenAck { volume_blocks: u64::MAX, ..good.clone() },
        OpenAck { stable: Lsn(11), ..good.clone() },
        OpenAck { epoch_table: vec![row(5, 1, 9, 55)], ..good.clone() },
        OpenAck { epoch_table: vec![row(5, 4, 10, 55), row(5, 1, 10, 55)], ..good.clone() },
        ack(vec![row(99, 1, 10, 55)], 5),
        ack(vec![row(5, 1, u64::MAX, 55)], 5),
    ];
    bad.push(OpenAck { damaged: true, ..ack(vec![row(5, 1, u64::MAX, 55)], 5) });
    for answer in bad {
        let mut hand = Hand::new(config());
        hand.answer(3, answer.clone());
        assert!(hand.session(3).is_none(), "believed: {answer:?}");
        hand.answer(1, good.clone());
        hand.answer(2, good.clone());
        hand.pass(400);
        hand.truncated(1);
        hand.truncated(2);
        hand.applied(1, true);
        hand.applied(2, true);
        assert!(hand.target.status().serving);
    }
}

#[test]
fn a_replica_of_another_history_is_shut_out_and_the_others_open() {
    let mut hand = Hand::new(config());
    // The replica is first in the list, so that others follow it in every loop over replicas.
    hand.answer(1, ack(vec![row(5, 1, 10, 66)], 5));
    hand.answer(2, ack(vec![row(5, 1, 10, 55), row(6, 11, 11, 56)], 5));
    hand.answer(3, ack(vec![row(5, 1, 10, 55), row(6, 11, 11, 56)], 5));
    // Equal (E, LSN) and other chains: detected where both histories end their epoch.
    for id in 2..=3 {
        if hand.truncate_sent(id).is_some() {
            hand.truncated(id);
            hand.applied(id, true);
        }
    }
    assert!(hand.notes.iter().any(|n| matches!(
        n,
        PrimaryNote::InvariantRefused { member: m, invariant: "OneContent" } if *m == member(1)
    )));
    assert!(hand.target.status().serving, "{:?}", hand.notes);
}

#[test]
fn a_replica_that_would_be_cut_below_its_stable_is_damaged_and_rebuilt_from_nothing() {
    let mut hand = Hand::new(config());
    let authority = vec![row(3, 1, 4, 33), row(5, 5, 10, 55)];
    hand.answer(1, ack(vec![row(3, 1, 20, 34)], 20));
    hand.answer(2, ack(authority.clone(), 4));
    hand.answer(3, ack(authority.clone(), 4));
    for id in 2..=3 {
        hand.truncated(id);
    }
    for id in 2..=3 {
        hand.applied(id, true);
    }
    assert!(hand.target.status().serving);
    assert_eq!(hand.truncate_sent(1), Some(Lsn(0)));
    hand.say(1, FromReplica::Failed(Failure::Damaged));
    // The in-sync replicas continue; the View without it becomes active.
    for id in 2..=3 {
        hand.applied(id, true);
    }
    hand.pass(200);
    hand.answer(1, OpenAck { damaged: true, ..ack(vec![row(3, 1, 20, 34)], 20) });
    hand.truncated(1);
    for _ in 0..3 {
        hand.pass(100);
        for id in 2..=3 {
            hand.applied(id, true);
        }
    }
    assert!(
        hand.sent_bulk.iter().any(|(m, message)| *m == member(1)
            && matches!(message, ToReplica::IncrementBegin { from: Lsn(0), .. })),
        "never rebuilt: {:?}",
        hand.target.status()
    );
}

#[test]
fn a_refusal_with_an_absurd_epoch_leaves_the_record_alone() {
    let mut hand = Hand::new(config());
    let promised = Epoch(u64::MAX);
    hand.say(3, FromReplica::Refuse { promised, failure: Failure::Fenced });
    hand.pass(5000);
    assert!(hand.asked.iter().all(|e| *e < EPOCH_MAX), "{:?}", hand.asked);
}

#[test]
fn an_open_that_lost_its_quorum_again_waits_without_spinning() {
    let mut hand = Hand::new(config());
    hand.answer(1, ack(vec![row(5, 1, 10, 55)], 5));
    hand.answer(2, ack(vec![row(5, 1, 10, 55)], 5));
    let session = hand.session(2).unwrap();
    hand.on(PrimaryEvent::Disconnected { session });
    hand.pass(1000);
    let timer = hand.timer.expect("it waits for answers");
    assert!(timer.since(hand.now) > Duration::from_millis(100), "{:?}", timer.since(hand.now));
}

#[test]
fn growth_that_an_epoch_did_not_keep_is_made_again_before_writes_behind_the_old_end() {
    let table = [row(5, 1, 10, 55)];
    let mut hand = Hand::new(config());
    hand.serve(&table, 10);
    hand.on(PrimaryEvent::Resize { blocks: 2048 });
    hand.write(1, 2000);
    hand.overtaken(3);
    // No replica received anything after the first View.
    let first = hand.entries_of(1)[0].clone();
    let after = [row(5, 1, 10, 55), row(first.epoch.0, 11, 11, first.chain.0)];
    hand.serve(&after, 11);
    let entries = hand.entries_of(1);
    let grown = entries.iter().position(|e| matches!(e.kind, EntryKind::Resize { blocks: 2048 }));
    let written = entries.iter().position(|e| e.lba == 2000 && e.kind == EntryKind::Write);
    assert!(grown.is_some() && written.is_some(), "{entries:?}");
    assert!(grown < written);
}

#[test]
fn a_volume_smaller_than_its_record_is_grown_when_it_opens() {
    let mut hand = Hand::new(PrimaryConfig { volume_blocks: 4096, ..config() });
    hand.serve(&[row(5, 1, 10, 55)], 10);
    hand.pass(10);
    hand.on(PrimaryEvent::Timer);
    assert_eq!(hand.target.status().volume_blocks, 4096);
    hand.on(PrimaryEvent::Resize { blocks: u64::MAX });
    assert_eq!(hand.target.status().volume_blocks, VOLUME_BLOCKS_MAX);
}

/// The record had grown, and clients of the volume knew it, before its target opened.
#[test]
fn requests_behind_the_old_end_that_waited_for_the_open_find_the_volume_grown() {
    let mut hand = Hand::new(PrimaryConfig { volume_blocks: 4096, ..config() });
    hand.write(1, 4000);
    hand.serve(&[row(5, 1, 10, 55)], 10);
    let refused = hand.replies.iter().find(|r| r.result.is_err());
    assert!(refused.is_none(), "{refused:?}");
    let entries = hand.entries_of(1);
    let grown = entries.iter().position(|e| matches!(e.kind, EntryKind::Resize { blocks: 4096 }));
    let written = entries.iter().position(|e| e.lba == 4000 && e.kind == EntryKind::Write);
    assert!(grown.is_some() && grown < written, "{entries:?}");
}

/// The authority was rebuilt itself, and so never had the boundary of another replica's rebuild.
#[test]
fn a_boundary_that_only_one_replica_still_has_is_deleted_there_too() {
    let (first, later) = (SnapshotId::of_boundary(71), SnapshotId::of_boundary(72));
    let with = |id: SnapshotId, mut ack: OpenAck| {
        ack.snapshots = vec![SnapshotInfo { id, lsn: Lsn(4), hidden: true, blocks: 1024 }];
        ack.heads = vec![SnapshotHead::default()];
        ack
    };
    let table = [row(5, 1, 10, 55)];
    let mut hand = Hand::new(config());
    hand.answer(1, with(first, ack(table.to_vec(), 10)));
    hand.answer(3, ack(table.to_vec(), 10));
    hand.pass(1000);
    for id in [1, 3] {
        hand.truncated(id);
        hand.applied(id, true);
    }
    assert!(hand.target.status().serving);
    let deletes = |hand: &Hand, id| {
        let entries = hand.entries_of(3);
        entries.iter().filter(|e| e.kind == EntryKind::DeleteSnapshot { id }).count()
    };
    assert_eq!((deletes(&hand, first), deletes(&hand, later)), (1, 0));
    hand.answer(2, with(later, ack(table.to_vec(), 10)));
    hand.pass(10);
    assert_eq!((deletes(&hand, first), deletes(&hand, later)), (1, 1));
}

/// A hidden snapshot may pin a point for a transfer, or record a Revert.
#[test]
fn an_open_deletes_the_boundaries_of_rebuilds_and_no_other_hidden_snapshot() {
    let (boundary, owned) = (SnapshotId::of_boundary(71), SnapshotId(72));
    let table = [row(5, 1, 10, 55)];
    let info = |id| SnapshotInfo { id, lsn: Lsn(4), hidden: true, blocks: 1024 };
    let snapshots = vec![info(boundary), info(owned)];
    let mut hand = Hand::new(config());
    for id in [1, 3] {
        let heads = vec![SnapshotHead::default(); snapshots.len()];
        hand.answer(id, OpenAck { snapshots: snapshots.clone(), heads, ..ack(table.to_vec(), 10) });
    }
    hand.pass(1000);
    for id in [1, 3] {
        hand.truncated(id);
        hand.applied(id, true);
    }
    assert!(hand.target.status().serving);
    hand.answer(2, OpenAck { snapshots, ..ack(table.to_vec(), 10) });
    hand.pass(10);
    let deleted: Vec<SnapshotId> = hand
        .entries_of(3)
        .iter()
        .filter_map(|e| match e.kind {
            EntryKind::DeleteSnapshot { id } => Some(id),
            _ => None,
        })
        .collect();
    assert_eq!(deleted, [boundary]);
}

#[test]
fn a_flush_after_a_reopen_asks_for_a_sync_though_lsns_went_back() {
    let table = [row(5, 1, 10, 55)];
    let mut hand = Hand::new(config());
    hand.serve(&table, 10);
    // A member leaves and returns: two Views, which are not written again when they are lost.
    let session = hand.session(3).unwrap();
    hand.on(PrimaryEvent::Disconnected { session });
    hand.sessions.retain(|(s, _)| *s != session);
    hand.applied(1, true);
    hand.applied(2, true);
    hand.pass(100);
    let last = hand.entries_of(1).last().unwrap().clone();
    let rows = vec![row(5, 1, 10, 55), row(last.epoch.0, 11, last.lsn.0, last.chain.0)];
    hand.answer(3, ack(rows, 10));
    hand.truncated(3);
    assert_eq!(hand.target.status().last.lsn, Lsn(13));
    hand.submit(7, Operation::Flush);
    let first = hand.entries_of(1)[0].clone();
    hand.overtaken(3);
    let after = [row(5, 1, 10, 55), row(first.epoch.0, 11, 11, first.chain.0)];
    hand.serve(&after, 11);
    hand.write(8, 3);
    hand.submit(9, Operation::Flush);
    for id in 1..=3 {
        hand.applied(id, false);
    }
    assert!(hand.sent.iter().any(|(_, m)| matches!(m, ToReplica::Sync { .. })));
    for id in 1..=3 {
        hand.applied(id, true);
    }
    let mut answered: Vec<u64> = hand.replies.iter().map(|r| r.token).collect();
    answered.sort_unstable();
    assert_eq!(answered, [7, 8, 9]);
}

#[test]
fn a_read_of_before_a_reopen_waits_for_what_is_written_again() {
    let table = [row(5, 1, 10, 55)];
    let mut hand = Hand::new(PrimaryConfig { window_bytes: 64 << 20, ..config() });
    hand.serve(&table, 10);
    // More than may be in flight to one replica: the end of it is sent late.
    let chunk = Bytes::from(vec![1; 1 << 20]);
    for token in 0..12 {
        let offset = (token % 4) << 20;
        hand.submit(token, Operation::Write { offset, data: chunk.clone(), fua: false });
    }
    hand.submit(99, Operation::Read { offset: 0, length: 4096 });
    let first = hand.entries_of(1)[0].clone();
    hand.overtaken(3);
    let after = [row(5, 1, 10, 55), row(first.epoch.0, 11, 11, first.chain.0)];
    hand.serve(&after, 11);
    let read = hand.sent.iter().find_map(|(_, m)| match m {
        ToReplica::Read { after, .. } => Some(*after),
        _ => None,
    });
    assert!(read.expect("it is asked again") >= Lsn(11 + 1 + 12));
}

#[test]
fn what_is_not_on_media_is_bounded_too() {
    let mut hand = Hand::new(PrimaryConfig { window_bytes: 1 << 20, ..config() });
    hand.serve(&[row(5, 1, 10, 55)], 10);
    let start = hand.target.status().last.lsn.0;
    for token in 0..100 {
        let data = Bytes::from(vec![1; 1 << 18]);
        hand.submit(token, Operation::Write { offset: 0, data, fua: false });
        // Applied by all, synced by none: their disks hang.
        for id in 1..=3 {
            hand.applied(id, false);
        }
    }
    let sequenced = hand.target.status().last.lsn.0 - start;
    assert!((16..40).contains(&sequenced), "{sequenced} of 100 writes of 256 KiB");
}

#[test]
fn an_increment_with_impossible_slots_is_never_passed_on() {
    let slot = |lba, blocks| Slot { lba, blocks, version: Lsn(1), content: Content::Hole };
    assert!(!slot(u64::MAX, 2).is_good(Lsn(5)));
    assert!(!slot(VOLUME_BLOCKS_MAX, 1).is_good(Lsn(5)));
    assert!(!slot(0, 0).is_good(Lsn(5)));
    assert!(!Slot { version: Lsn(6), ..slot(0, 1) }.is_good(Lsn(5)));
    let data = Bytes::from(vec![1; 4096]);
    let crc = crc32c(&data);
    let whole = Slot { content: Content::Data { crc, data: data.clone() }, ..slot(3, 1) };
    assert!(whole.is_good(Lsn(5)));
    assert!(!Slot { blocks: 2, ..whole.clone() }.is_good(Lsn(5)));
    let content = Content::Data { crc: crc ^ 1, data };
    assert!(!Slot { content, ..whole }.is_good(Lsn(5)));
}

#[test]
fn an_open_keeps_no_more_than_the_window_for_a_member_that_is_far_behind() {
    let mut hand = Hand::new(config());
    let mut chain = Chain(55);
    let data = Bytes::from(vec![1; 1 << 16]);
    let entries: Vec<entry::SharedEntry> = (101..=200)
        .map(|lsn| {
            let position = Position { epoch: Epoch(5), lsn: Lsn(lsn) };
            let e = Entry::after(chain, position, EntryKind::Write, 0, 16, data.clone(), false);
            chain = e.chain;
            entry::SharedEntry::new(e)
        })
        .collect();
    let whole = || ack(vec![row(5, 1, 200, chain.0)], 50);
    hand.answer(1, whole());
    hand.answer(3, ack(vec![row(5, 1, 100, 55)], 50));
    hand.answer(2, whole());
    for part in entries.chunks(10) {
        let asked = hand.sent.iter().rev().find_map(|(m, message)| match message {
            ToReplica::Fetch { after, .. } => Some((m.id.0, *after)),
            _ => None,
        });
        let (authority, after) = asked.expect("it reads the authority's log");
        assert_eq!(after.next(), part[0].lsn);
        let entries = part.to_vec();
        hand.say(authority, FromReplica::Fetched { id: 0, entries, gone: false });
    }
    for id in 1..=3 {
        hand.truncated(id);
    }
    let first = hand.entries_of(1)[0].clone();
    let EntryKind::View(view) = &first.kind else { panic!("{first:?}") };
    assert_eq!(view.in_sync, [member(1), member(2)]);
    hand.applied(1, true);
    hand.applied(2, true);
    assert!(hand.target.status().serving);
    assert_eq!(hand.entries_of(3), []);
}

impl Hand {
    /// Submits reads in one batch; returns the member that each was sent to.
    fn read_in_one_batch(&mut self, count: u64, length: u32) -> Vec<Member> {
        self.sent.clear();
        for token in 0..count {
            let operation = Operation::Read { offset: token * u64::from(length), length };
            let event = PrimaryEvent::Submit(Request { token, operation, origin: None });
            self.target.on(self.now, event, &mut Vec::new());
        }
        self.on(PrimaryEvent::Timer);
        self.asked_for_reads()
    }

    fn asked_for_reads(&self) -> Vec<Member> {
        let reads = self.sent.iter().filter(|(_, m)| matches!(m, ToReplica::Read { .. }));
        reads.map(|(member, _)| *member).collect()
    }
}

#[test]
fn small_reads_of_one_batch_go_to_one_member_and_large_ones_share_the_work() {
    let mut hand = Hand::new(config());
    hand.serve(&[row(5, 1, 10, 55)], 10);
    let asked = hand.read_in_one_batch(48, 4096);
    let runs = asked.chunk_by(|a, b| a == b).map(<[_]>::len).collect::<Vec<_>>();
    assert_eq!(runs, [48]);

    let mut hand = Hand::new(config());
    hand.serve(&[row(5, 1, 10, 55)], 10);
    let mut asked = hand.read_in_one_batch(3, 64 << 10);
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked.len(), 3);
}

#[test]
fn a_read_that_is_not_answered_in_time_is_asked_of_another_member_and_no_other_read_is() {
    let mut hand = Hand::new(config());
    hand.serve(&[row(5, 1, 10, 55)], 10);
    let first = hand.read_in_one_batch(2, 4096);
    assert_eq!(first.len(), 2);
    let answered = hand.sent.iter().find_map(|(m, message)| match message {
        ToReplica::Read { id, lba, .. } => Some((*m, *id, *lba)),
        _ => None,
    });
    let (from, id, lba) = answered.expect("it was asked");
    let slot = Slot { lba, blocks: 1, version: Lsn(0), content: Content::Hole };
    let at = hand.target.status().last.lsn;
    let answer = FromReplica::Data { id, at, slots: vec![slot], ping: Ping(hand.now.0) };
    hand.say(from.id.0, answer);
    hand.sent.clear();
    hand.pass(450);
    assert_eq!(hand.asked_for_reads(), []);
    // One check finds it late, the next one asks.
    hand.pass(1200);
    let again = hand.asked_for_reads();
    assert!(!again.is_empty() && again[0] != first[1], "{again:?}");
    assert_eq!(hand.replies.iter().filter(|r| r.token == 0).count(), 1);
}

#[test]
fn a_request_that_changes_nothing_is_answered_under_a_live_lease_too() {
    let mut hand = Hand::new(config());
    hand.serve(&[row(5, 1, 10, 55)], 10);
    // The last message is answered; then none is, until the lease has lapsed.
    for id in 1..=3 {
        hand.applied(id, true);
    }
    hand.pass(2100);
    hand.submit(1, Operation::Trim { offset: 512, length: 512, fua: true });
    assert_eq!(hand.replies, []);
    for id in 1..=2 {
        hand.applied(id, true);
    }
    assert_eq!(hand.replies.iter().map(|r| r.token).collect::<Vec<_>>(), [1]);
}

/// A newer target may have grown the volume, or written the block that is lost here.
#[test]
fn an_error_is_answered_under_a_live_lease_too() {
    let lapsed = || {
        let mut hand = Hand::new(PrimaryConfig { read_only: true, ..config() });
        hand.serve(&[row(5, 1, 10, 55)], 10);
        for id in 1..=3 {
            hand.applied(id, true);
        }
        hand.pass(2100);
        hand.sent.clear();
        hand
    };
    let told = |hand: &Hand| hand.replies.iter().map(|r| r.result.clone().unwrap_err()).collect();
    let end = 1024 * 4096;
    let refused = [
        (Operation::Read { offset: end, length: 4096 }, BlockError::OutOfRange),
        (Operation::Read { offset: 1, length: 512 }, BlockError::Misaligned),
        (Operation::Trim { offset: 0, length: 4096, fua: false }, BlockError::ReadOnly),
    ];
    for (operation, error) in refused {
        let mut hand = lapsed();
        hand.submit(1, operation);
        assert_eq!(hand.replies, []);
        // The lease is renewed for it.
        assert!(hand.sent.iter().any(|(_, m)| matches!(m, ToReplica::Ping { .. })));
        let applied = hand.target.status().last.lsn;
        for id in 1..=2 {
            let ping = Ping(hand.now.0);
            hand.say(id, FromReplica::Applied { applied, durable: applied, ping });
        }
        let told: Vec<BlockError> = told(&hand);
        assert_eq!(told, [error]);
    }
    // No good copy is left.
    let mut hand = lapsed();
    hand.submit(1, Operation::Read { offset: 0, length: 4096 });
    for _ in 0..3 {
        let asked = hand.sent.iter().rev().find_map(|(m, message)| match message {
            ToReplica::Read { id, .. } => Some((m.id.0, *id)),
            _ => None,
        });
        let (from, id) = asked.expect("a member is asked");
        let slots = vec![Slot { lba: 0, blocks: 1, version: Lsn(0), content: Content::Bad }];
        let at = hand.target.status().last.lsn;
        hand.say(from, FromReplica::Data { id, at, slots, ping: Ping(0) });
    }
    assert!(hand.notes.contains(&PrimaryNote::BlockLost { lba: 0 }));
    assert_eq!(hand.replies, []);
    let applied = hand.target.status().last.lsn;
    for id in 1..=2 {
        let ping = Ping(hand.now.0);
        hand.say(id, FromReplica::Applied { applied, durable: applied, ping });
    }
    let told: Vec<BlockError> = told(&hand);
    assert_eq!(told, [BlockError::Damaged]);
}

/// Two of three are enough: the absence of the third ends nothing.
#[test]
fn one_replica_whose_pool_no_longer_has_it_does_not_end_an_open() {
    let mut hand = Hand::new(config());
    let (asked, good) = (hand.asked.len(), ack(vec![row(5, 1, 10, 55)], 5));
    hand.say(3, FromReplica::Refuse { promised: Epoch::ZERO, failure: Failure::Unknown });
    hand.answer(1, good.clone());
    hand.answer(2, good);
    hand.pass(1000);
    assert_eq!(hand.asked.len(), asked, "the epoch is the same");
    assert!(hand.truncate_sent(1).is_some() && hand.truncate_sent(2).is_some());
}

fn tails_lost(hand: &Hand) -> usize {
    hand.notes.iter().filter(|n| **n == PrimaryNote::UnflushedTailMayBeLost).count()
}

#[test]
fn unflushed_data_is_given_up_at_the_end_of_the_grace_and_not_before() {
    let mut hand = Hand::new(config());
    let lost = OpenAck { continuous: false, ..ack(vec![row(5, 1, 10, 55)], 5) };
    hand.answer(1, lost.clone());
    hand.answer(2, lost);
    hand.pass(9_999);
    assert_eq!((tails_lost(&hand), hand.truncate_sent(1)), (0, None));
    hand.pass(1);
    assert_eq!((tails_lost(&hand), hand.truncate_sent(1)), (1, Some(Lsn(10))));
}

/// The View with this mark is the last entry until IO has started after it.
#[test]
fn a_lost_tail_is_told_again_while_its_view_is_the_last_entry_and_no_longer() {
    for (at, told) in [(10, 1), (9, 0)] {
        let mut hand = Hand::new(config());
        let mut marked = ack(vec![row(5, 1, 10, 55)], 5);
        let view = View { unflushed_tail_lost: true, ..marked.last_view.take().unwrap().1 };
        marked.last_view = Some((Lsn(at), view));
        (1..=3).for_each(|id| hand.answer(id, marked.clone()));
        assert_eq!(tails_lost(&hand), told, "the View is {at} of 10");
    }
}

#[test]
fn an_open_that_reads_a_log_begins_anew_without_its_source_and_goes_on_without_a_bystander() {
    let mut hand = Hand::new(config());
    hand.answer(1, ack(vec![row(5, 1, 10, 55)], 5));
    hand.answer(2, ack(vec![row(5, 1, 8, 44)], 5));
    hand.pass(300);
    assert!(hand.sent.iter().any(|(m, s)| *m == member(1) && matches!(s, ToReplica::Fetch { .. })));
    let asked = hand.asked.len();
    for (id, more) in [(3, 0), (1, 1)] {
        let session = hand.session(id).unwrap();
        hand.on(PrimaryEvent::Disconnected { session });
        hand.pass(200);
        assert_eq!(hand.asked.len(), asked + more, "replica {id} is gone");
    }
}
