//! The rules of one replica (R1 to R4), each with the message that would break it.

use crate::one_replica::*;
use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore, StoreError};
use quoin_replication::replica::{LEASE_MS, ReplicaEvent, granted_lease};
use quoin_store::ReplicaPool;
use quoin_types::message::{Failure, FromReplica, Ping, ToReplica};
use quoin_types::*;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn an_older_epoch_and_an_equal_one_of_another_incarnation_are_refused() {
    let mut one = One::new();
    one.opened(key(5, 1, 1));
    for session in [key(4, 1, 2), key(5, 2, 2)] {
        let sent = one.open(session);
        let refused = FromReplica::Refuse { promised: Epoch(5), failure: Failure::Fenced };
        assert_eq!(sent, [refused]);
    }
    one.opened(key(5, 1, 2));
}

#[test]
fn a_promise_outlives_a_restart() {
    let mut one = One::new();
    one.opened(key(5, 1, 1));
    one.pool.power_cut(|_| 0);
    one.restart();
    assert!(matches!(one.open(key(4, 9, 1))[..], [FromReplica::Refuse { .. }]));
}

#[test]
fn a_newer_incarnation_is_answered_only_when_the_older_lease_ran_out() {
    let mut one = One::new();
    one.opened(key(5, 1, 1));
    assert_eq!(one.open(key(6, 2, 2)), []);
    one.now = one.now + granted_lease(LEASE_MS) - Duration::from_millis(1);
    assert_eq!(one.on(ReplicaEvent::Timer), []);
    one.now = one.now + Duration::from_millis(1);
    assert!(matches!(one.on(ReplicaEvent::Timer)[..], [FromReplica::OpenAck(_)]));
}

#[test]
fn the_write_fence_is_up_before_the_lease_ran_out() {
    let mut one = One::new();
    let old = key(5, 1, 1);
    one.opened(old);
    one.feed(old);
    one.open(key(6, 2, 2));
    let entry = one.entry(5, 1);
    assert_eq!(one.append(old, entry), []);
    assert_eq!(one.position().lsn, Lsn(0));
}

#[test]
fn no_further_open_and_no_restart_forgets_a_lease() {
    let mut one = One::new();
    one.opened(key(5, 1, 1));
    assert_eq!(one.open(key(6, 2, 2)), []);
    assert_eq!(one.open(key(7, 3, 3)), []);
    one.restart();
    assert_eq!(one.open(key(8, 4, 4)), []);
    assert_eq!(one.open(key(8, 4, 5)), []);
    one.now = one.now + granted_lease(LEASE_MS);
    assert!(matches!(one.on(ReplicaEvent::Timer)[..], [FromReplica::OpenAck(_)]));
}

#[test]
fn truncation_below_stable_is_never_executed_and_makes_the_replica_damaged() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    for fill in 0..3 {
        let entry = one.entry(5, fill);
        one.append(session, entry);
    }
    one.send(session, ToReplica::Ping { stable: Lsn(2), ping: Ping(1) });
    let next = key(5, 1, 2);
    one.opened(next);
    let sent = one.send(next, ToReplica::Truncate { keep: Lsn(1), tip: Lsn(3) });
    assert_eq!(sent, [FromReplica::Failed(Failure::Damaged)]);
    assert_eq!(one.position().lsn, Lsn(3));
    assert!(one.pool.replica(OWN.guid).unwrap().meta().damaged);
}

#[test]
fn entries_out_of_order_of_another_history_or_with_changed_bytes_are_refused() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let good = one.entry(5, 1);
    let gap = Entry { lsn: Lsn(2), ..(*good).clone() };
    let other_history = Entry { chain: Chain(good.chain.0 ^ 1), ..(*good).clone() };
    let changed = Entry { data: Bytes::from(vec![7; BLOCK_SIZE]), ..(*good).clone() };
    let newer_epoch = Entry { epoch: Epoch(6), ..(*good).clone() };
    for (nonce, bad) in [gap, other_history, changed, newer_epoch].into_iter().enumerate() {
        let session = key(5, 1, nonce as u64 + 2);
        one.opened(session);
        one.feed(session);
        let sent = one.append(session, Arc::new(bad));
        assert_eq!(sent, [FromReplica::Failed(Failure::Protocol)]);
        assert_eq!(one.position().lsn, Lsn(0));
    }
}

#[test]
fn a_message_of_another_session_is_dropped() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let entry = one.entry(5, 1);
    assert_eq!(one.append(key(5, 1, 7), entry.clone()), []);
    assert_eq!(one.append(key(5, 2, 1), entry), []);
    assert_eq!(one.position().lsn, Lsn(0));
}

#[test]
fn a_read_waits_until_its_entry_is_applied() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let read = ToReplica::Read {
        id: 1,
        view: quoin_types::message::ReadView::Live,
        lba: 3,
        blocks: 1,
        after: Lsn(1),
        want_data: true,
        ping: Ping(3),
    };
    assert_eq!(one.send(session, read), []);
    let entry = one.entry(5, 6);
    let sent = one.append(session, entry);
    let data = sent.iter().find_map(|m| match m {
        FromReplica::Data { at, slots, .. } => Some((*at, slots[0].version)),
        _ => None,
    });
    assert_eq!(data, Some((Lsn(1), Lsn(1))));
}

#[test]
fn after_a_power_cut_an_open_session_leaves_the_replica_not_continuous_until_a_view() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    assert!(one.opened(session).continuous);
    one.feed(session);
    one.pool.power_cut(|_| 0);
    one.restart();
    one.now = one.now + granted_lease(LEASE_MS);
    let session = key(6, 2, 1);
    assert!(!one.opened(session).continuous);
    one.feed(session);
    let view = one.view(6, Durability::Cache);
    one.append(session, view);
    assert!(one.replica.is_continuous());
}

#[test]
fn a_failed_sync_ends_the_session_and_is_never_retried() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let entry = one.entry(5, 1);
    one.append(session, entry);
    let fault =
        quoin_replication::replica::store::IoFault { operation: "sync", offset: 0, errno: 5 };
    let ticket = quoin_replication::replica::store::SyncTicket(u64::MAX);
    let sent = one.on(ReplicaEvent::Synced { ticket, result: Err(StoreError::Io(fault)) });
    assert_eq!(sent, [FromReplica::Failed(Failure::Io)]);
    assert!(!one.replica.is_continuous());
    let refused = FromReplica::Refuse { promised: Epoch(0), failure: Failure::Io };
    assert_eq!(one.open(key(5, 1, 2)), [refused]);
}

#[test]
fn a_retired_replica_is_refused_permanently() {
    let mut one = One::new();
    let mut later = membership();
    later.version = 2;
    later.known = vec![later.known[1]];
    later.retired = vec![OWN.guid];
    let message = ToReplica::Open {
        volume: VOLUME,
        replica: OWN.id,
        guid: OWN.guid,
        membership: later,
        lease_ms: LEASE_MS,
    };
    let refused = FromReplica::Refuse { promised: Epoch(0), failure: Failure::Retired };
    assert_eq!(one.send(key(9, 1, 1), message), [refused]);
}

#[test]
fn a_replica_of_another_volume_or_another_guid_is_unknown() {
    let mut one = One::new();
    for (volume, guid) in [(VolumeId(6), OWN.guid), (VOLUME, ReplicaGuid(99))] {
        let message = ToReplica::Open {
            volume,
            replica: OWN.id,
            guid,
            membership: membership(),
            lease_ms: LEASE_MS,
        };
        let refused = FromReplica::Refuse { promised: Epoch(0), failure: Failure::Unknown };
        assert_eq!(one.send(key(9, 1, 1), message), [refused]);
    }
}

/// A clean close states that the data is on media; a power cut must not leave the close without the
/// data.
#[test]
fn a_clean_close_is_on_media_only_after_the_data() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let entry = one.entry(5, 1);
    one.append(session, entry);
    let mut actions = Vec::new();
    {
        let mut store = one.pool.replica(OWN.guid).unwrap();
        let event = ReplicaEvent::Message { connection: 1, session, message: ToReplica::Close };
        one.replica.on(one.now, event, &mut store, &mut actions);
        one.replica.flush(&mut actions);
    }
    // The small state is stored apart from the log, and may reach the media first.
    let mut asked = 0;
    one.pool.power_cut(|n| {
        asked += 1;
        if asked % 2 == 1 { 0 } else { n }
    });
    one.restart();
    assert_eq!(one.position().lsn, Lsn(0));
    assert!(!one.replica.is_continuous(), "it claims to hold what it lost");
}

#[test]
fn a_close_with_entries_not_yet_on_media_syncs_them_and_ends_durable() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let entry = one.entry(5, 1);
    one.append(session, entry);
    assert_eq!(one.send(session, ToReplica::Close), [FromReplica::Closed]);
    one.pool.power_cut(|_| 0);
    one.restart();
    assert_eq!(one.position().lsn, Lsn(1));
    assert!(one.replica.is_continuous());
    assert!(!one.pool.replica(OWN.guid).unwrap().meta().session_open);
}

#[test]
fn an_increment_that_cannot_be_true_ends_the_session() {
    use quoin_types::message::{Content, FedSum, IncrementEnd, Slot};
    let slot = Slot { lba: u64::MAX, blocks: 2, version: Lsn(1), content: Content::Hole };
    let end = IncrementEnd {
        position: Position { epoch: Epoch(5), lsn: Lsn(u64::MAX) },
        chain: Chain(1),
        epoch_table: Vec::new(),
        last_view: None,
        volume_blocks: 64,
        snapshots: Vec::new(),
        clients: Default::default(),
    };
    const BULK: u64 = 100;
    let by_bulk = |one: &mut One, session, message| {
        one.on(ReplicaEvent::Message { connection: BULK, session, message })
    };
    let begin = || ToReplica::IncrementBegin { rebuild: 1, from: Lsn(0) };
    let hostile = [
        ToReplica::IncrementFeed { rebuild: 1, slots: vec![slot], cursor: 1, after: 0 },
        ToReplica::IncrementCommit { rebuild: 1, to: Box::new(end), fed: FedSum::default() },
    ];
    for (nonce, message) in (1..).zip(hostile) {
        let mut one = One::new();
        let session = key(5, 1, nonce);
        one.opened(session);
        one.feed(session);
        assert_eq!(by_bulk(&mut one, session, ToReplica::OpenBulk { number: 1 }), []);
        let begun = FromReplica::IncrementBegun { rebuild: 1, cursor: 0, cut: Lsn(0) };
        assert_eq!(by_bulk(&mut one, session, begin()), [begun]);
        let refused = by_bulk(&mut one, session, message);
        assert!(refused.contains(&FromReplica::Failed(Failure::Protocol)), "{refused:?}");
    }
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    by_bulk(&mut one, session, ToReplica::OpenBulk { number: 1 });
    let refused = by_bulk(&mut one, session, begin());
    assert!(refused.contains(&FromReplica::Failed(Failure::Protocol)), "{refused:?}");
}

/// A replica that was away learns of a change by the first open after it, and by a View.
#[test]
fn a_newer_membership_is_kept_whether_an_open_or_a_view_says_it() {
    let mut one = One::new();
    let newer = Membership { version: 3, cf: 1, ..membership() };
    let open = |membership| ToReplica::Open {
        volume: VOLUME,
        replica: OWN.id,
        guid: OWN.guid,
        membership,
        lease_ms: LEASE_MS,
    };
    let session = key(5, 1, 1);
    one.send(session, open(newer.clone()));
    assert_eq!(one.pool.replica(OWN.guid).unwrap().meta().membership, newer);
    // An older membership does not replace a newer one.
    let session = key(6, 1, 2);
    one.send(session, open(membership()));
    assert_eq!(one.pool.replica(OWN.guid).unwrap().meta().membership, newer);

    one.now = one.now + granted_lease(LEASE_MS);
    one.on(ReplicaEvent::Timer);
    one.feed(session);
    let append_view = |one: &mut One, version, cf, known: &[Member]| {
        let known = known.to_vec();
        let rule = entry::Rule { membership_version: version, rf: 2, cf, known };
        let view = View { in_sync: vec![OWN], rule, ..View::default() };
        let state = one.pool.replica(OWN.guid).unwrap().state();
        let position = Position { epoch: Epoch(6), lsn: state.position.lsn.next() };
        let kind = EntryKind::View(Box::new(view));
        let entry = Entry::after(state.chain, position, kind, 0, 0, Bytes::new(), false);
        one.append(session, Arc::new(entry));
        let membership = one.pool.replica(OWN.guid).unwrap().meta().membership.clone();
        (membership.version, membership.cf, membership.known)
    };
    assert_eq!(append_view(&mut one, 4, 2, &[OWN]), (4, 2, vec![OWN]));
    assert_eq!(append_view(&mut one, 3, 1, &newer.known), (4, 2, vec![OWN]), "an older one");
}

/// The target counts on a newcomer's quorum once the first View is durable there. A slow disk takes it
/// together with the one that leaves the newcomer out.
#[test]
fn a_view_that_lists_a_replica_turns_its_quorum_on_also_where_the_next_one_comes_with_it() {
    let mut one = One::new();
    let off = ReplicaMeta { quorum: false, ..one.pool.replica(OWN.guid).unwrap().meta().clone() };
    one.pool.replica(OWN.guid).unwrap().put_meta(off).unwrap();
    let session = key(5, 1, 1);
    assert!(!one.opened(session).quorum);
    one.feed(session);
    let rule = entry::Rule { membership_version: 1, rf: 2, cf: 2, known: membership().known };
    let mut chain = one.pool.replica(OWN.guid).unwrap().state().chain;
    let mut lsn = one.position().lsn;
    let views = [vec![OWN], vec![rule.known[1]]].map(|in_sync| {
        lsn = lsn.next();
        let view = View { in_sync, rule: rule.clone(), ..View::default() };
        let (position, kind) = (Position { epoch: Epoch(5), lsn }, EntryKind::View(Box::new(view)));
        let entry = Entry::after(chain, position, kind, 0, 0, Bytes::new(), false);
        chain = entry.chain;
        Arc::new(entry)
    });
    let (entries, stable) = (views.to_vec(), Lsn(0));
    one.send(session, ToReplica::Append { entries, stable, sync: false, ping: Ping(9) });
    assert!(one.pool.replica(OWN.guid).unwrap().meta().quorum);
}

/// Slots that mend a map are below it from then on: they must match the request, and be complete.
#[test]
fn a_stretch_that_is_not_covered_or_whose_data_is_not_good_mends_nothing() {
    use quoin_types::message::{Content, Slot};
    let data = Bytes::from(vec![7; BLOCK_SIZE]);
    let slot = |lba, crc| Slot {
        lba,
        blocks: 1,
        version: Lsn(1),
        content: Content::Data { crc, data: data.clone() },
    };
    let good = crc32c(&data);
    for (lbas, crc) in [([3, 4], good + 1), ([3, 5], good), ([2, 3], good)] {
        let mut one = One::new();
        let session = key(5, 1, 1);
        one.opened(session);
        one.feed(session);
        let entry = one.entry(5, 7);
        one.append(session, entry);
        let slots = lbas.map(|lba| slot(lba, crc)).to_vec();
        let sent = one.send(
            session,
            ToReplica::Mend { lba: 3, blocks: 2, at: Lsn(1), slots, snapshot: None },
        );
        let mended = |m: &FromReplica| matches!(m, FromReplica::Mended { .. });
        assert!(!sent.iter().any(mended), "{sent:?}");
        let entry = one.entry(5, 8);
        assert_eq!(one.append(session, entry), [], "such a session is over");
    }
}

/// No correct target requests more at once; any request must not make a pool hold a whole volume.
#[test]
fn an_answer_from_the_log_or_of_an_increment_is_bounded_for_any_request() {
    use quoin_types::message::ReadView;
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let append = |one: &mut One, kind, lba, blocks: u32| {
        let state = one.pool.replica(OWN.guid).unwrap().state();
        let position = Position { epoch: Epoch(5), lsn: state.position.lsn.next() };
        let data = Bytes::from(vec![7; blocks as usize * BLOCK_SIZE]);
        let entry = Entry::after(state.chain, position, kind, lba, blocks, data, false);
        one.append(session, Arc::new(entry));
    };
    append(&mut one, EntryKind::Resize { blocks: 4096 }, 0, 0);
    for lba in (0..2048).step_by(256) {
        append(&mut one, EntryKind::Write, lba, 256);
    }
    let sent = one.send(session, ToReplica::Fetch { id: 1, after: Lsn(0), bytes_max: u32::MAX });
    let [FromReplica::Fetched { entries, .. }] = &sent[..] else { panic!("{sent:?}") };
    let bytes: usize = entries.iter().map(|entry| entry.data.len()).sum();
    assert!((1 << 20..=4 << 20).contains(&bytes), "{bytes} bytes of the log");
    let (view, from, bytes_max) = (ReadView::Live, Lsn(0), u32::MAX);
    let sent = one.send(
        session,
        ToReplica::Pull { id: 2, view, from, cursor: 0, bytes_max, want_data: true },
    );
    let [FromReplica::Pulled { slots, cursor: Some(_), .. }] = &sent[..] else {
        panic!("{} messages: all at once", sent.len())
    };
    assert!(slots.len() * BLOCK_SIZE <= 4 << 20, "{} slots of an increment", slots.len());
}

/// Connections are not ordered among each other.
#[test]
fn an_open_of_an_older_session_that_comes_late_ends_nothing() {
    let mut one = One::new();
    let session = key(5, 1, 7);
    one.opened(session);
    one.feed(session);
    assert_eq!(one.open(key(5, 1, 6)), []);
    let entry = one.entry(5, 1);
    let sent = one.append(session, entry);
    assert!(matches!(sent[..], [FromReplica::Applied { applied: Lsn(1), .. }]), "{sent:?}");
    one.opened(key(5, 1, 8));
}

#[test]
fn under_durability_media_nothing_is_said_to_be_applied_before_it_is_on_media() {
    for (durability, said) in [(Durability::Cache, Some(Lsn(2))), (Durability::Media, None)] {
        let mut one = One::new();
        let session = key(5, 1, 1);
        one.opened(session);
        one.feed(session);
        let view = one.view(5, durability);
        one.append(session, view);
        one.syncs_wait = true;
        let entry = one.entry(5, 1);
        let mut sent = one.append(session, entry);
        sent.extend(one.send(session, ToReplica::Ping { stable: Lsn(0), ping: Ping(10) }));
        let newest = sent.iter().filter_map(|message| match message {
            FromReplica::Applied { applied, .. } => Some(*applied),
            _ => None,
        });
        assert_eq!(newest.max().filter(|lsn| *lsn > Lsn(1)), said, "{durability:?}");
    }
}

#[test]
fn a_replica_that_waits_for_nothing_is_in_the_middle_of_nothing() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let waits = |one: &mut One| {
        let store = one.pool.replica(OWN.guid).unwrap();
        one.replica.steps(&store).contains(&quoin_replication::step::Step::ReadsWaiting)
    };
    assert!(!waits(&mut one));
    let read = ToReplica::Read {
        id: 1,
        view: quoin_types::message::ReadView::Live,
        lba: 3,
        blocks: 1,
        after: Lsn(1),
        want_data: true,
        ping: Ping(3),
    };
    one.send(session, read);
    assert!(waits(&mut one));
}

/// The target has grown the volume, and this replica's pool is too full to apply that.
#[test]
fn a_read_behind_the_end_that_a_replica_knows_finds_a_hole_and_ends_no_session() {
    use quoin_types::message::{Content, ReadView, Slot};
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    let hole = |slot: &Slot| slot.content == Content::Hole && slot.version == Lsn(0);
    let covered = |slots: &[Slot]| {
        let joined = slots.windows(2).all(|w| w[0].lba + u64::from(w[0].blocks) == w[1].lba);
        let end = slots.last().map(|last| last.lba + u64::from(last.blocks))?;
        (joined && slots.iter().all(hole)).then_some((slots[0].lba, end))
    };
    // The volume has 64 blocks.
    for (lba, blocks) in [(60, 8), (64, 4), (1000, 1), (0, 128)] {
        let view = ReadView::Live;
        let (after, ping) = (Lsn(0), Ping(3));
        let read = ToReplica::Read { id: 1, view, lba, blocks, after, want_data: true, ping };
        let verify = ToReplica::Verify {
            id: 2,
            lba,
            blocks,
            bytes_max: 1 << 20,
            after,
            repair: false,
            ping,
            snapshot: None,
        };
        for message in [read, verify] {
            let sent = one.send(session, message);
            let slots = sent.iter().find_map(|m| match m {
                FromReplica::Data { slots, .. } | FromReplica::Verified { slots, .. } => {
                    Some(slots)
                }
                _ => None,
            });
            let slots = slots.unwrap_or_else(|| panic!("{lba} {blocks}: {sent:?}"));
            assert_eq!(covered(slots), Some((lba, lba + u64::from(blocks))), "{slots:?}");
        }
    }
}
