//! Pools that run full: what is sequenced fits, what frees space passes, and entries that others hold
//! already are owed to a pool that is full when a volume is opened.

use crate::common::*;
use crate::hand::{self, Hand, row};
use quoin_replication::primary::{PrimaryEvent, PrimaryNote, SnapshotOutcome, SnapshotWish};
use quoin_replication::replica::appends::{Append, Appends};
use quoin_replication::replica::store::{BootCookie, ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_replication::replica::{LEASE_MS, Replica, ReplicaAction, ReplicaEvent, ReplicaNote};
use quoin_store::ReplicaPool;
use quoin_types::block::Operation;
use quoin_types::entry::{Chain, Entry, EntryKind, SharedEntry, View};
use quoin_types::message::{Failure, FromReplica, Ping, RoomGrant, Takes, ToReplica};
use quoin_types::*;
use std::time::Duration;

/// Two of two with one full pool: `written` blocks more reached the other one before the power cut.
fn opened_with_a_full_pool(reserve_blocks: u64, written: u64) -> Cluster {
    let mut c = Cluster::new(2, config());
    c.write(0, 1);
    c.wait_in_sync(2);
    c.hosts[1].room = Some(0);
    let waiting: Vec<u64> = (1..=written).map(|n| c.submit(write_of(n, 2))).collect();
    c.run(Duration::from_secs(2));
    assert!(waiting.iter().all(|w| !c.replies.iter().any(|r| r.token == *w)), "not on both");
    c.hosts[1].reserve.0 = reserve_blocks;
    c.replace_target(config());
    c
}

fn write_of(block: u64, fill: u8) -> quoin_types::block::Operation {
    let data = bytes::Bytes::from(vec![fill; 4096]);
    quoin_types::block::Operation::Write { offset: block * 4096, data, fua: false }
}

/// Only stable entries free room; nothing is stable before the open is done, and the open waits for
/// the entries. Found by the simulator, broad seed 1322.
#[test]
fn an_open_feeds_a_full_pool_what_the_others_hold_from_its_reserve() {
    let mut c = opened_with_a_full_pool(5, 5);
    assert_eq!(c.read(5 * 4096, 4096), vec![2; 4096], "the open is done");
    c.wait_in_sync(2);
    assert_eq!(c.hosts[0].position(), c.hosts[1].position());
    assert_eq!(c.hosts[1].reserve.0, 0, "one block each");
}

#[test]
fn new_writes_use_nothing_of_that_reserve() {
    let mut c = opened_with_a_full_pool(100, 5);
    assert_eq!(c.read(5 * 4096, 4096), vec![2; 4096]);
    let new = c.submit(write_of(9, 3));
    c.run(Duration::from_secs(20));
    assert!(!c.replies.iter().any(|r| r.token == new), "its pool is full");
    assert_eq!(c.hosts[1].reserve.0, 95);
    c.hosts[1].room = None;
    assert!(c.answer(new).expect("there is room").result.is_ok());
}

/// A write of a client that is gone must not take effect after a later write of another one.
#[test]
fn what_waits_without_an_lsn_goes_with_the_client_that_asked_for_it() {
    let token = |c: &mut Cluster, block, fill| c.submit(write_of(block, fill));
    let abandon = |c: &mut Cluster, tokens: Vec<u64>| {
        c.event(PrimaryEvent::Abandon(tokens));
        c.settle();
    };
    // A write waits for room, with a trim of the next client in between.
    let mut c = Cluster::new(2, config());
    c.write(5, 1);
    c.wait_in_sync(2);
    c.say_short(0..2, true);
    c.settle();
    let gone = token(&mut c, 5, 2);
    let stays = token(&mut c, 6, 3);
    c.settle();
    abandon(&mut c, vec![gone]);
    c.do_ok(Operation::Trim { offset: 5 * 4096, length: 4096, fua: false });
    c.say_short(0..2, false);
    assert!(c.answer(stays).expect("there is room").result.is_ok());
    assert_eq!(c.read(5 * 4096, 8192), [vec![0; 4096], vec![3; 4096]].concat());
    // A write waits for an open.
    let mut c = Cluster::new(2, config());
    c.hosts[1].cut = true;
    let gone = token(&mut c, 5, 2);
    let stays = token(&mut c, 6, 3);
    c.run(Duration::from_secs(1));
    abandon(&mut c, vec![gone, stays + 1]);
    c.hosts[1].cut = false;
    assert!(c.answer(stays).expect("it is open").result.is_ok());
    assert_eq!(c.read(5 * 4096, 8192), [vec![0; 4096], vec![3; 4096]].concat());
    // A write waits for the content of the blocks at its edges, with another request behind it.
    let mut c = Cluster::new(2, config());
    c.write(5, 1);
    c.wait_in_sync(2);
    let half = Operation::Write { offset: 5 * 4096 + 512, data: vec![2; 512].into(), fua: false };
    let gone = c.submit(half);
    let stays = token(&mut c, 5, 3);
    abandon(&mut c, vec![gone]);
    assert!(c.answer(stays).expect("nothing is before it").result.is_ok());
    assert!(c.replies.iter().all(|reply| reply.token != gone || reply.result.is_err()));
    assert_eq!(c.read(5 * 4096, 4096), vec![3; 4096]);
}

/// One replica without its cache, whose pool has room for nothing but Views. Returns whether a View
/// makes it count, if its session began to be fed at `tip`.
fn counts_after_a_view_that_only_just_fit(tip: u64) -> (bool, bool) {
    let own = Member { id: ReplicaId(1), guid: ReplicaGuid(11) };
    let (known, volume) = (vec![own], VolumeId(5));
    let rule = entry::Rule { membership_version: 1, rf: 1, cf: 1, known: known.clone() };
    let membership = Membership {
        version: 1,
        rf: 1,
        cf: 1,
        drf: 1,
        known: known.clone(),
        retired: Vec::new(),
        formed: true,
    };
    let identity =
        ReplicaIdentity { volume, replica: own.id, guid: own.guid, volume_spec: "".into() };
    let meta = ReplicaMeta { membership: membership.clone(), ..ReplicaMeta::default() };
    // The replica lost its cache while it was used.
    let meta = ReplicaMeta { session_open: true, cookie: BootCookie(99), ..meta };
    let mut pool = quoin_store::model::ModelPool::new();
    pool.create(identity, meta, 64).unwrap();
    let at = |lsn| Position { epoch: Epoch(5), lsn: Lsn(lsn) };
    let write = |chain, lsn| {
        let data = vec![1; BLOCK_SIZE].into();
        Entry::after(chain, at(lsn), EntryKind::Write, 3, 1, data, false)
    };
    let before = write(Chain::default(), 1);
    let chain = before.chain;
    pool.replica(own.guid).unwrap().append(&[before.into()]).unwrap();
    let now = Time::from_millis(1000);
    let mut replica = Replica::new(now, pool.cookie(), &pool.replica(own.guid).unwrap());
    assert!(!replica.is_continuous());

    let session = SessionKey { epoch: Epoch(5), incarnation: Incarnation(1), nonce: 1 };
    let view = View { in_sync: known, rule, ..View::default() };
    let kind = EntryKind::View(Box::new(view));
    let view = Entry::after(chain, at(2), kind, 0, 0, "".into(), false);
    let write = write(view.chain, 3);
    let entries = vec![view.into(), write.into()];
    let guid = own.guid;
    let open = ToReplica::Open { volume, replica: own.id, guid, membership, lease_ms: LEASE_MS };
    let said = [
        open,
        ToReplica::Truncate { keep: Lsn(1), tip: Lsn(tip) },
        ToReplica::Append { entries, stable: Lsn(0), sync: false, ping: Ping(9) },
    ];
    let (mut room, mut reserve) = (Some(0), (0, Epoch::ZERO));
    for message in said {
        let mut event = Some(ReplicaEvent::Message { connection: 1, session, message });
        while let Some(next) = event.take() {
            let (inner, room, reserve) = (pool.replica(guid).unwrap(), &mut room, &mut reserve);
            let mut store = Bounded { inner, room, reserve, unreadable: false, ring_full: false };
            replica.on(now, next, &mut store, &mut Vec::new());
            replica.flush(&mut Vec::new());
            if let Some(ticket) = pool.sync_wanted() {
                pool.sync_finished(ticket, Ok(())).expect("a sync");
                event = Some(ReplicaEvent::Synced { ticket, result: Ok(()) });
            }
        }
    }
    let store = pool.replica(guid).unwrap();
    assert_eq!(store.state().position.lsn, Lsn(2), "the write found no room");
    (replica.is_continuous(), store.meta().quorum)
}

/// A View of this session states that the replica has everything before it, though the entries
/// after the View in its message found no room; a View from before the session states nothing.
#[test]
fn a_view_teaches_a_full_pool_what_it_teaches_any_and_one_of_the_past_teaches_none() {
    assert_eq!(counts_after_a_view_that_only_just_fit(1), (true, true));
    assert_eq!(counts_after_a_view_that_only_just_fit(2), (false, false));
    assert_eq!(counts_after_a_view_that_only_just_fit(3), (false, false));
}

/// Records have room of their own, so a promise that finds none says nothing of the disk.
#[test]
fn a_full_metadata_ring_refuses_an_open_by_its_name_and_is_no_failed_disk() {
    let own = Member { id: ReplicaId(1), guid: ReplicaGuid(11) };
    let membership = Membership {
        version: 1,
        rf: 1,
        cf: 1,
        drf: 1,
        known: vec![own],
        retired: Vec::new(),
        formed: true,
    };
    let volume = VolumeId(5);
    let (guid, volume_spec) = (own.guid, "".into());
    let identity = ReplicaIdentity { volume, replica: own.id, guid, volume_spec };
    let meta = ReplicaMeta { membership: membership.clone(), ..ReplicaMeta::default() };
    let mut pool = quoin_store::model::ModelPool::new();
    pool.create(identity, meta, 64).unwrap();
    let now = Time::from_millis(1000);
    let mut replica = Replica::new(now, pool.cookie(), &pool.replica(guid).unwrap());
    let mut said = |ring_full, event| {
        let (mut room, mut reserve) = (None, (0, Epoch::ZERO));
        let (inner, room, reserve) = (pool.replica(guid).unwrap(), &mut room, &mut reserve);
        let mut store = Bounded { inner, room, reserve, unreadable: false, ring_full };
        let mut actions = Vec::new();
        replica.on(now, event, &mut store, &mut actions);
        let promised = store.meta().promised;
        (actions, promised, pool.sync_wanted())
    };
    let session = SessionKey { epoch: Epoch(5), incarnation: Incarnation(1), nonce: 1 };
    let lease_ms = LEASE_MS;
    let message = ToReplica::Open { volume, replica: own.id, guid, membership, lease_ms };
    let open = || ReplicaEvent::Message { connection: 1, session, message: message.clone() };
    let fence = || ReplicaEvent::Fence { epoch: Epoch(4), at_once: true };
    for event in [open(), fence()] {
        let (actions, promised, _) = said(true, event);
        assert_eq!(promised, Epoch::ZERO);
        let is_told = |a: &ReplicaAction| matches!(a, ReplicaAction::Note(ReplicaNote::RingFull));
        assert!(actions.iter().any(is_told), "{actions:?}");
        let failed =
            |a: &ReplicaAction| matches!(a, ReplicaAction::Note(ReplicaNote::DiskFailed(_)));
        assert!(!actions.iter().any(failed), "{actions:?}");
        assert!(actions.iter().all(|a| match a {
            ReplicaAction::Send { message, .. } => {
                *message == FromReplica::Refuse { promised: Epoch::ZERO, failure: Failure::Full }
            }
            _ => true,
        }));
    }
    // Once there is room the same replica opens: nothing of it has failed.
    let (_, promised, sync) = said(false, open());
    assert!(promised == Epoch(5) && sync.is_some());
}

fn append(entries: Vec<SharedEntry>) -> ToReplica {
    ToReplica::Append { entries, stable: Lsn(0), sync: false, ping: Ping(9) }
}

/// Position of a replica that had no room for entries 1 to 3, while 4 to 6 were on their way, and
/// to which all six were sent again once there was room. All messages up to then arrive in one turn
/// of the driver. The second value holds its answers since there was room.
fn offered_again_in_one_turn(
    joined: fn(&[Vec<SharedEntry>; 2]) -> Vec<ToReplica>,
) -> (Lsn, Vec<FromReplica>) {
    crate::broken::break_a_rule();
    let own = Member { id: ReplicaId(1), guid: ReplicaGuid(11) };
    let (known, volume, guid) = (vec![own], VolumeId(5), own.guid);
    let retired = Vec::new();
    let membership = Membership { version: 1, rf: 1, cf: 1, drf: 1, known, retired, formed: true };
    let identity = ReplicaIdentity { volume, replica: own.id, guid, volume_spec: "".into() };
    let meta = ReplicaMeta { membership: membership.clone(), ..ReplicaMeta::default() };
    let mut pool = quoin_store::model::ModelPool::new();
    pool.create(identity, meta, 64).unwrap();
    let mut chain = Chain::default();
    let entries: Vec<SharedEntry> = (1..=6)
        .map(|lsn| {
            let at = Position { epoch: Epoch(5), lsn: Lsn(lsn) };
            let data = vec![1; BLOCK_SIZE].into();
            let entry = Entry::after(chain, at, EntryKind::Write, 3, 1, data, false);
            chain = entry.chain;
            entry.into()
        })
        .collect();
    let turn = joined(&[entries[3..].to_vec(), entries.clone()]);
    let now = Time::from_millis(1000);
    let session = SessionKey { epoch: Epoch(5), incarnation: Incarnation(1), nonce: 1 };
    let open = ToReplica::Open { volume, replica: own.id, guid, membership, lease_ms: LEASE_MS };
    let first = append(entries[..3].to_vec());
    let before = vec![open, ToReplica::Truncate { keep: Lsn(0), tip: Lsn(0) }, first];
    let mut replica = Replica::new(now, pool.cookie(), &pool.replica(guid).unwrap());
    let (mut reserve, mut answers) = ((0, Epoch::ZERO), Vec::new());
    for (messages, room) in [(before, 0), (turn, 1000)] {
        let (mut room, mut actions) = (Some(room), Vec::new());
        for message in messages {
            let mut event = Some(ReplicaEvent::Message { connection: 1, session, message });
            while let Some(next) = event.take() {
                let (inner, room, reserve) = (pool.replica(guid).unwrap(), &mut room, &mut reserve);
                let mut store =
                    Bounded { inner, room, reserve, unreadable: false, ring_full: false };
                replica.on(now, next, &mut store, &mut actions);
                replica.flush(&mut actions);
                if let Some(ticket) = pool.sync_wanted() {
                    pool.sync_finished(ticket, Ok(())).unwrap();
                    event = Some(ReplicaEvent::Synced { ticket, result: Ok(()) });
                }
            }
        }
        answers.clear();
        answers.extend(actions.into_iter().filter_map(|action| match action {
            ReplicaAction::Send { message, .. } => Some(message),
            _ => None,
        }));
    }
    (pool.replica(guid).unwrap().state().position.lsn, answers)
}

/// Entries that were on their way when the pool had no room are dropped. The repeated ones after
/// them are not: they would not be sent again.
#[test]
fn an_offer_that_comes_with_what_was_on_its_way_is_taken() {
    let (position, answers) = offered_again_in_one_turn(|appends| {
        let (mut joined, mut turn) = (Appends::default(), Vec::new());
        for entries in appends.iter().cloned() {
            let next = Append { entries, stable: Lsn(0), sync: false, ping: Ping(9) };
            turn.extend(joined.add(next));
        }
        turn.extend(joined.take());
        turn
    });
    assert_eq!(position, Lsn(6));
    let applied = |answer: &FromReplica| match answer {
        FromReplica::Applied { applied, .. } => Some(*applied),
        _ => None,
    };
    assert_eq!(answers.iter().filter_map(applied).next_back(), Some(Lsn(6)), "{answers:?}");
}

/// If they are joined wrongly, the session ends and feeding begins anew: nothing waits
/// indefinitely.
#[test]
fn a_full_pool_refuses_a_batch_that_goes_back_within_itself() {
    let (position, answers) = offered_again_in_one_turn(|appends| vec![append(appends.concat())]);
    assert_eq!(position, Lsn(0));
    let failed = FromReplica::Failed(Failure::Protocol);
    assert!(answers.contains(&failed), "{answers:?}");
}

fn grant(takes: Takes, share_blocks: u32) -> RoomGrant {
    RoomGrant { takes, share_blocks }
}

/// Every entry has a header, which is a block at most.
#[test]
fn what_is_sequenced_stays_within_the_shares_of_cf_members_and_goes_on_as_they_apply() {
    crate::broken::break_a_rule();
    let mut hand = Hand::new(hand::config());
    hand.serve(&[row(5, 1, 10, 55)], 10);
    for id in [1, 2] {
        hand.say(id, FromReplica::Room(grant(Takes::Writes, 24)));
    }
    hand.say(3, FromReplica::Room(grant(Takes::Holes, 24)));
    hand.sent.clear();
    (0..30).for_each(|n| hand.write(100 + n, n));
    let first = hand.entries_of(1).len();
    assert!((8..=12).contains(&first), "{first} writes are under way");
    assert_eq!(hand.entries_of(3).len(), first, "they are owed to all");
    hand.applied(1, false);
    assert_eq!(hand.entries_of(1).len(), first, "CF is two");
    hand.applied(2, false);
    let second = hand.entries_of(1).len();
    assert!((first + 8..=first + 12).contains(&second), "{second}");
    // What is behind them in the queue is not behind them in the history.
    hand.say(1, FromReplica::Room(grant(Takes::Holes, 24)));
    hand.applied(1, false);
    hand.applied(2, false);
    assert_eq!(hand.entries_of(1).len(), second, "its pool takes no writes");
    hand.submit(500, Operation::Trim { offset: 0, length: 4096, fua: false });
    assert!(hand.entries_of(1).last().is_some_and(|e| e.kind == EntryKind::Trim));
    hand.applied(1, false);
    hand.applied(2, false);
    hand.say(1, FromReplica::Room(grant(Takes::Writes, 24)));
    assert!(hand.entries_of(1).len() > second + 1, "there is room again");
}

#[test]
fn a_write_longer_than_a_share_is_sequenced_in_parts_and_answered_once() {
    let mut c = Cluster::new(2, config());
    c.write(0, 1);
    c.wait_in_sync(2);
    c.say_room(0..2, grant(Takes::Writes, 24));
    let bytes: Vec<u8> = (0..100 * 4096_u32).map(|n| (n / 4096 + n) as u8).collect();
    for offset in [4096 * 3, 4096 * 3 + 512] {
        let data: bytes::Bytes = bytes.clone().into();
        let token = c.submit(Operation::Write { offset, data, fua: false });
        assert!(c.answer(token).expect("it is answered").result.is_ok());
        assert!(c.replies.iter().all(|reply| reply.token != token), "once");
        assert_eq!(c.read(offset, 100 * 4096), bytes);
    }
    // The rest of one whose client is gone is dropped with it.
    c.say_room(0..2, grant(Takes::Holes, 24));
    c.settle();
    let gone = c.submit(Operation::Write { offset: 0, data: bytes.into(), fua: false });
    c.event(PrimaryEvent::Abandon(vec![gone]));
    c.say_room(0..2, grant(Takes::Writes, 24));
    assert!(c.answer(gone).expect("it is answered").result.is_err());
    assert_eq!(c.read(0, 4096), vec![1; 4096]);
}

/// No volume waits for what only it could free.
#[test]
fn what_frees_space_passes_writes_that_wait_for_room() {
    let mut c = Cluster::new(2, config());
    c.write(5, 1);
    c.wait_in_sync(2);
    let ids = [SnapshotId(1), SnapshotId(2)];
    for id in ids {
        c.event(PrimaryEvent::Snapshot { id, wish: SnapshotWish::Make });
    }
    c.settle();
    let is_deleted = |c: &Cluster, id| {
        let told = PrimaryNote::Snapshot { id, outcome: SnapshotOutcome::Deleted };
        c.notes.contains(&told)
    };
    let trim = Operation::Trim { offset: 5 * 4096, length: 4096, fua: false };
    c.say_room(0..2, grant(Takes::Holes, 24));
    c.settle();
    let write = c.submit(write_of(9, 2));
    c.do_ok(trim.clone());
    c.event(PrimaryEvent::Snapshot { id: ids[0], wish: SnapshotWish::Delete });
    c.do_ok(Operation::Flush);
    c.settle();
    assert!(is_deleted(&c, ids[0]), "{:?}", c.notes);
    // Trims take of the reserve: clean-up needs some of it.
    c.say_room(0..2, grant(Takes::Nothing, 24));
    c.settle();
    let trimmed = c.submit(trim);
    c.event(PrimaryEvent::Snapshot { id: ids[1], wish: SnapshotWish::Delete });
    c.do_ok(Operation::Flush);
    c.settle();
    assert!(is_deleted(&c, ids[1]), "{:?}", c.notes);
    let waits = [write, trimmed];
    assert!(c.replies.iter().all(|reply| !waits.contains(&reply.token)));
    c.say_room(0..2, grant(Takes::Holes, 24));
    assert!(c.answer(trimmed).expect("trims are granted").result.is_ok());
    c.say_room(0..2, grant(Takes::Writes, 24));
    assert!(c.answer(write).expect("writes are granted").result.is_ok());
}
