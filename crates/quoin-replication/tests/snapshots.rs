//! Snapshots of users, on replicas that come, go and are rebuilt.

use crate::common::{Cluster, config};
use quoin_replication::primary::{
    ChangesAnswer, ChangesRequest, PrimaryEvent, PrimaryNote, RevertOutcome, SnapshotOutcome,
    SnapshotWish, USER_SNAPSHOTS_MAX,
};
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::ReplicaPool;
use quoin_types::block::Operation;
use quoin_types::message::{Content, ReadView, Slot};
use quoin_types::{Lsn, SnapshotId};

const BLOCKS: u64 = 1024;

fn wish(c: &mut Cluster, id: u128, wish: SnapshotWish) {
    c.event(PrimaryEvent::Snapshot { id: SnapshotId(id), wish });
    c.settle();
}

fn outcomes(c: &Cluster, id: u128) -> Vec<SnapshotOutcome> {
    let of = |note: &PrimaryNote| match note {
        PrimaryNote::Snapshot { id: of, outcome } if of.0 == id => Some(*outcome),
        _ => None,
    };
    c.notes.iter().filter_map(of).collect()
}

fn made(c: &Cluster, id: u128) -> Option<Lsn> {
    outcomes(c, id).into_iter().find_map(|outcome| match outcome {
        SnapshotOutcome::Made { lsn, .. } => Some(lsn),
        _ => None,
    })
}

fn held(c: &mut Cluster, host: usize, view: ReadView) -> Vec<Slot> {
    let host = &mut c.hosts[host];
    let mut slots = Vec::new();
    let mut store = host.pool.replica(host.member.guid).expect("it is there");
    for lba in (0..BLOCKS).step_by(256) {
        store.read(view, lba, 256, true, &mut slots).expect("it can be read");
    }
    slots
}

/// Makes a snapshot, and waits until it is on media.
fn make(c: &mut Cluster, id: u128) -> Lsn {
    wish(c, id, SnapshotWish::Make);
    c.run(std::time::Duration::from_secs(3));
    made(c, id).expect("it is answered")
}

#[test]
fn a_snapshot_holds_what_was_there_on_every_replica_until_it_is_deleted() {
    let mut c = Cluster::new(3, config());
    for block in 0..20 {
        c.write(block, 1);
    }
    let before = held(&mut c, 0, ReadView::Live);
    make(&mut c, 7);
    for block in 10..30 {
        c.write(block, 2);
    }
    c.run(std::time::Duration::from_secs(3));
    for host in 0..3 {
        assert_eq!(held(&mut c, host, ReadView::Snapshot(SnapshotId(7))), before, "host {host}");
    }
    wish(&mut c, 7, SnapshotWish::Delete);
    c.run(std::time::Duration::from_secs(3));
    assert_eq!(outcomes(&c, 7).last(), Some(&SnapshotOutcome::Deleted));
    assert!(c.hosts.iter_mut().all(|host| host.snapshots() == 0));
}

#[test]
fn a_wish_said_again_is_answered_again_and_changes_nothing() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    let lsn = make(&mut c, 7);
    c.write(0, 2);
    assert_eq!(make(&mut c, 7), lsn);
    let said = outcomes(&c, 7);
    assert_eq!(said[0], said[1]);
    assert_eq!(said.len(), 2);
    wish(&mut c, 8, SnapshotWish::Delete);
    c.run(std::time::Duration::from_secs(3));
    assert_eq!(outcomes(&c, 8), [SnapshotOutcome::Deleted]);
}

#[test]
fn more_snapshots_than_a_replica_may_list_are_refused() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    for id in 0..=USER_SNAPSHOTS_MAX as u128 {
        wish(&mut c, id + 1, SnapshotWish::Make);
    }
    c.run(std::time::Duration::from_secs(3));
    let last = USER_SNAPSHOTS_MAX as u128;
    assert!(made(&c, last).is_some());
    assert_eq!(outcomes(&c, last + 1), [SnapshotOutcome::TooMany]);
}

#[test]
fn no_snapshot_is_answered_before_it_is_on_media_of_cf() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    c.crash_replica(1);
    c.crash_replica(2);
    wish(&mut c, 7, SnapshotWish::Make);
    c.run(std::time::Duration::from_secs(1));
    assert_eq!(outcomes(&c, 7), []);
    c.start_replica(1);
    c.wait_in_sync(2);
    wish(&mut c, 7, SnapshotWish::Make);
    c.run(std::time::Duration::from_secs(3));
    assert!(made(&c, 7).is_some());
}

/// All members have the entry and two of three disks still work on it: commit and lease alone are no
/// proof that the snapshot outlives a power cut.
#[test]
fn a_snapshot_that_every_member_has_and_one_disk_alone_is_not_answered() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    c.do_ok(Operation::Flush);
    c.hosts[1..].iter_mut().for_each(|host| host.holds_syncs = true);
    wish(&mut c, 7, SnapshotWish::Make);
    c.run(std::time::Duration::from_secs(1));
    assert_eq!(c.read(0, 4096), vec![1; 4096], "its lease is live");
    assert!(c.hosts.iter_mut().all(|host| host.snapshots() == 1), "all have applied it");
    assert_eq!(outcomes(&c, 7), []);
    c.hosts[1].holds_syncs = false;
    c.run(std::time::Duration::from_secs(3));
    assert!(made(&c, 7).is_some());
}

#[test]
fn a_rebuilt_replica_has_the_snapshots_that_it_missed() {
    let mut c = Cluster::new(3, config());
    for block in 0..40 {
        c.write(block, 1);
    }
    make(&mut c, 6);
    c.crash_replica(1);
    for block in 0..400 {
        c.write(block, 2);
    }
    make(&mut c, 7);
    for block in 0..300 {
        c.write(block, 3);
    }
    c.start_replica(1);
    c.wait_in_sync(3);
    assert!(c.notes.iter().any(|n| matches!(n, PrimaryNote::Rebuilt { .. })));
    for id in [6, 7] {
        let view = ReadView::Snapshot(SnapshotId(id));
        assert_eq!(held(&mut c, 1, view), held(&mut c, 0, view), "snapshot {id}");
    }
    assert_eq!(held(&mut c, 1, ReadView::Live), held(&mut c, 0, ReadView::Live));
}

/// The base precedes the snapshot, whose entry follows it.
#[test]
fn a_replica_brought_to_a_base_gets_the_snapshots_above_it_with_their_entries() {
    let mut c = Cluster::new(3, config());
    for block in 0..40 {
        c.write(block, 1);
    }
    c.crash_replica(0);
    for block in 0..400 {
        c.write(block, 2);
    }
    wish(&mut c, 7, SnapshotWish::Make);
    for block in 0..40 {
        c.write(block, 3);
    }
    c.crash_replica(1);
    c.replace_target(config());
    c.start_replica(0);
    c.run(std::time::Duration::from_secs(20));
    assert_eq!(c.read(0, 4096), vec![3; 4096]);
    let view = ReadView::Snapshot(SnapshotId(7));
    let slots = held(&mut c, 2, view);
    assert_eq!(held(&mut c, 0, view), slots);
    assert_eq!(held(&mut c, 0, ReadView::Live), held(&mut c, 2, ReadView::Live));
}

#[test]
fn a_wish_that_is_said_again_before_it_is_answered_is_answered_once() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    for _ in 0..3 {
        c.event(PrimaryEvent::Snapshot { id: SnapshotId(7), wish: SnapshotWish::Make });
    }
    c.run(std::time::Duration::from_secs(3));
    assert!(matches!(outcomes(&c, 7)[..], [SnapshotOutcome::Made { .. }]), "{:?}", outcomes(&c, 7));
}

/// The owner's records name the history by them, so a later target has to say the same.
#[test]
fn a_snapshot_is_answered_with_its_epoch_and_chain_by_every_target_and_after_a_rebuild() {
    let mut c = Cluster::new(3, config());
    for block in 0..40 {
        c.write(block, 1);
    }
    c.crash_replica(1);
    for block in 0..400 {
        c.write(block, 2);
    }
    make(&mut c, 7);
    for block in 0..300 {
        c.write(block, 3);
    }
    let first = *outcomes(&c, 7).last().expect("it is answered");
    assert!(
        matches!(first, SnapshotOutcome::Made { head: Some(head), .. } if head.epoch == c.epoch)
    );
    c.start_replica(1);
    c.wait_in_sync(3);
    assert!(c.notes.iter().any(|n| matches!(n, PrimaryNote::Rebuilt { .. })));
    let guid = c.hosts[1].member.guid;
    let held = c.hosts[1].pool.replica(guid).expect("it").snapshot_heads();
    let SnapshotOutcome::Made { head, .. } = first else { unreachable!("seen above") };
    assert_eq!(head, held.first().copied(), "its rebuild carried the head");
    // The rebuilt one is among those that the next target asks.
    c.crash_replica(2);
    c.replace_target(config());
    c.wait_in_sync(2);
    wish(&mut c, 7, SnapshotWish::Make);
    c.run(std::time::Duration::from_secs(3));
    assert_eq!(outcomes(&c, 7).last(), Some(&first));
}

/// The target asks for the sync with the entry; no replica holds its answer back for one.
#[test]
fn a_snapshot_waits_for_its_sync_and_holds_up_no_write_behind_it() {
    assert!(
        !quoin_types::EntryKind::Snapshot { id: SnapshotId(1), hidden: false }.is_durable_first()
    );
    assert!(!quoin_types::EntryKind::DeleteSnapshot { id: SnapshotId(1) }.is_durable_first());
    assert!(quoin_types::EntryKind::Revert { id: SnapshotId(1) }.is_durable_first());
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    let before = c.target.status().stable;
    wish(&mut c, 7, SnapshotWish::Make);
    // Well before the sync that comes by itself.
    c.run(std::time::Duration::from_millis(50));
    assert!(made(&c, 7).is_some_and(|lsn| lsn > before));
}

fn revert(c: &mut Cluster, snapshot: u128, attempt: u128) {
    let before = reverted(c, attempt).len();
    // It is said again until it is answered: at first not everything is stable.
    for _ in 0..5 {
        let (snapshot, attempt) = (SnapshotId(snapshot), SnapshotId(attempt));
        c.event(PrimaryEvent::Revert { snapshot, attempt });
        c.run(std::time::Duration::from_millis(1500));
        if reverted(c, attempt.0).len() > before {
            break;
        }
    }
}

fn reverted(c: &Cluster, attempt: u128) -> Vec<RevertOutcome> {
    let of = |note: &PrimaryNote| match note {
        PrimaryNote::Reverted { attempt: of, outcome } if of.0 == attempt => Some(*outcome),
        _ => None,
    };
    c.notes.iter().filter_map(of).collect()
}

fn contents(slots: &[Slot]) -> Vec<(u64, u32, Option<u32>)> {
    let each = slots.iter().flat_map(|s| (0..u64::from(s.blocks)).map(move |n| (s.lba + n, s)));
    each.map(|(lba, slot)| match &slot.content {
        Content::Data { crc, .. } => (lba, 1, Some(*crc)),
        _ => (lba, 1, None),
    })
    .collect()
}

#[test]
fn a_revert_shows_the_snapshot_on_every_replica_with_versions_that_only_grow() {
    let mut c = Cluster::new(3, config());
    for block in 0..20 {
        c.write(block, 1);
    }
    make(&mut c, 7);
    for block in 10..30 {
        c.write(block, 2);
    }
    let before = held(&mut c, 0, ReadView::Live);
    revert(&mut c, 7, 70);
    let [RevertOutcome::Done { lsn, head: Some(_) }] = reverted(&c, 70)[..] else {
        panic!("{:?}", reverted(&c, 70));
    };
    let kept = held(&mut c, 0, ReadView::Snapshot(SnapshotId(7)));
    for host in 0..3 {
        let now = held(&mut c, host, ReadView::Live);
        assert_eq!(contents(&now), contents(&kept), "host {host}");
        let changed = now.iter().filter(|slot| slot.version > before[0].version.max(Lsn(30)));
        assert!(changed.clone().count() > 0);
        assert!(changed.clone().all(|slot| slot.version.next() == lsn), "its own version");
    }
    assert_eq!(c.read(15 * 4096, 4096), vec![1; 4096]);
}

#[test]
fn a_revert_that_is_asked_for_again_is_answered_and_not_done_again() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    make(&mut c, 7);
    c.write(0, 2);
    revert(&mut c, 7, 70);
    c.write(0, 3);
    c.replace_target(config());
    c.wait_in_sync(3);
    revert(&mut c, 7, 70);
    let said = reverted(&c, 70);
    assert!(matches!(said[..], [RevertOutcome::Done { .. }, RevertOutcome::Done { .. }]));
    assert_eq!(said[0], said[1]);
    assert_eq!(c.read(0, 4096), vec![3; 4096], "what was written since stays");
    wish(&mut c, 70, SnapshotWish::Delete);
    c.run(std::time::Duration::from_secs(3));
    assert_eq!(outcomes(&c, 70), [SnapshotOutcome::Deleted]);
    revert(&mut c, 9, 71);
    assert_eq!(reverted(&c, 71), [RevertOutcome::NoSnapshot]);
}

/// Nothing would bring a replica that missed both past the Revert.
#[test]
fn a_snapshot_is_deleted_once_the_revert_to_it_is_stable() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    make(&mut c, 7);
    c.write(0, 2);
    c.run(std::time::Duration::from_secs(3));
    c.hosts[1..].iter_mut().for_each(|host| host.holds_syncs = true);
    let (snapshot, attempt) = (SnapshotId(7), SnapshotId(70));
    c.event(PrimaryEvent::Revert { snapshot, attempt });
    c.settle();
    wish(&mut c, 7, SnapshotWish::Delete);
    c.hosts[1..].iter_mut().for_each(|host| host.holds_syncs = false);
    c.run(std::time::Duration::from_secs(3));
    assert!(matches!(reverted(&c, 70)[..], [RevertOutcome::Done { .. }]));
    assert_eq!(outcomes(&c, 7).len(), 1, "it was made, and the wish is to be said again");
    wish(&mut c, 7, SnapshotWish::Delete);
    c.run(std::time::Duration::from_secs(3));
    assert_eq!(outcomes(&c, 7).last(), Some(&SnapshotOutcome::Deleted));
}

#[test]
fn a_revert_waits_for_requests_of_clients_that_are_under_way() {
    let mut c = Cluster::new(3, config());
    c.write(0, 1);
    make(&mut c, 7);
    c.write(0, 2);
    c.crash_replica(1);
    c.crash_replica(2);
    let data = bytes::Bytes::from(vec![9; 4096]);
    let token = c.submit(Operation::Write { offset: 0, data, fua: false });
    c.settle();
    revert(&mut c, 7, 70);
    c.start_replica(1);
    c.wait_in_sync(2);
    assert!(c.answer(token).is_some_and(|reply| reply.result.is_ok()));
    assert_eq!((reverted(&c, 70).len(), c.read(0, 4096)), (0, vec![9; 4096]));
}

/// Versions never fall, so what changed since its position is found without a rule for Reverts.
#[test]
fn a_replica_that_missed_a_revert_is_rebuilt_to_what_the_others_hold() {
    let mut c = Cluster::new(3, config());
    for block in 0..200 {
        c.write(block, 1);
    }
    make(&mut c, 7);
    for block in 0..200 {
        c.write(block, 2);
    }
    c.wait_in_sync(3);
    c.crash_replica(1);
    revert(&mut c, 7, 70);
    for block in 100..500 {
        c.write(block, 3);
    }
    wish(&mut c, 7, SnapshotWish::Delete);
    c.start_replica(1);
    c.wait_in_sync(3);
    assert!(c.notes.iter().any(|n| matches!(n, PrimaryNote::Rebuilt { .. })));
    assert_eq!(held(&mut c, 1, ReadView::Live), held(&mut c, 0, ReadView::Live));
    assert_eq!(c.hosts[1].look(5), c.hosts[0].look(5));
}

#[test]
fn a_rotten_block_of_a_snapshot_is_replaced_by_another_members_copy_of_it() {
    let mut c = Cluster::new(3, config());
    c.write(4, 1);
    make(&mut c, 7);
    c.write(4, 2);
    c.wait_in_sync(3);
    let view = ReadView::Snapshot(SnapshotId(7));
    let (member, good) = (c.hosts[1].member.guid, held(&mut c, 0, view));
    assert!(c.hosts[1].pool.replica(member).expect("it").spoil_in(view, 4));
    assert_ne!(held(&mut c, 1, view), good);
    let version = good.iter().find(|slot| slot.lba == 4).expect("it").version;
    c.found_bad_in(1, SnapshotId(7), 4, version);
    c.settle();
    assert_eq!(held(&mut c, 1, view), good);
    assert_eq!(c.read(4 * 4096, 4096), vec![2; 4096], "the live block is another");
    // Of a snapshot that was deleted meanwhile nothing is left to repair.
    c.notes.clear();
    wish(&mut c, 7, SnapshotWish::Delete);
    c.found_bad_in(1, SnapshotId(7), 4, version);
    c.run(std::time::Duration::from_secs(3));
    let troubles = |n: &PrimaryNote| {
        matches!(n, PrimaryNote::BlockLost { .. } | PrimaryNote::InvariantRefused { .. })
    };
    assert!(!c.notes.iter().any(troubles), "{:?}", c.notes);
}

/// All parts of the changes between two snapshots: block and whether it is a hole, as any of the
/// members say it.
fn changes(
    c: &mut Cluster,
    from: Option<u128>,
    to: impl Into<Option<u128>>,
) -> Result<Vec<(u64, bool)>, ChangesAnswer> {
    let (from, to) = (from.map(SnapshotId), to.into().map(SnapshotId));
    let (mut cursor, mut token, mut blocks) = (0, 0, Vec::new());
    loop {
        token += 1;
        c.changes.clear();
        c.event(PrimaryEvent::Changes(ChangesRequest {
            token,
            from,
            to,
            cursor,
            want_data: false,
        }));
        c.run(std::time::Duration::from_secs(1));
        let (said, answer) = c.changes.pop().expect("an answer");
        assert_eq!(said, token);
        let ChangesAnswer::Part { ranges, next, .. } = answer else { return Err(answer) };
        for range in ranges {
            blocks.extend((range.lba..range.lba + range.blocks).map(|lba| (lba, range.hole)));
        }
        match next {
            Some(next) => cursor = next,
            None => return Ok(blocks),
        }
        // It goes on at another target, with another member.
        c.crash_replica(0);
        c.replace_target(config());
        c.wait_in_sync(2);
        c.start_replica(0);
        c.wait_in_sync(3);
    }
}

#[test]
fn the_changes_between_two_snapshots_are_the_blocks_that_differ_and_a_revert_changes_them_too() {
    let mut c = Cluster::new(3, config());
    for block in 0..20 {
        c.write(block, 1);
    }
    make(&mut c, 6);
    for block in (5..400).step_by(3) {
        c.write(block, 2);
    }
    c.do_ok(Operation::Trim { offset: 0, length: 3 * 4096, fua: false });
    make(&mut c, 7);
    c.write(900, 3);
    revert(&mut c, 6, 60);
    make(&mut c, 8);
    let written: Vec<(u64, bool)> = (5..400).step_by(3).map(|lba| (lba, false)).collect();
    let trimmed = [(0, true), (1, true), (2, true)];
    let differ: Vec<(u64, bool)> = trimmed.iter().copied().chain(written.clone()).collect();
    assert_eq!(changes(&mut c, Some(6), 7), Ok(differ));
    let back = |(lba, _): (u64, bool)| (lba, lba >= 20);
    let all = trimmed.into_iter().chain(written).chain([(900, false)]);
    let back: Vec<(u64, bool)> = all.map(back).collect();
    assert_eq!(changes(&mut c, Some(7), 8), Ok(back.clone()));
    assert_eq!(changes(&mut c, Some(6), 8), Ok(back));
    let allocated = changes(&mut c, None, 8).expect("it is there");
    assert_eq!(allocated, (0..20).map(|lba| (lba, false)).collect::<Vec<_>>());
    assert_eq!(changes(&mut c, Some(8), None), Ok(Vec::new()), "nothing was written since");
    c.write(30, 4);
    c.do_ok(Operation::Trim { offset: 0, length: 4096, fua: false });
    assert_eq!(changes(&mut c, Some(8), None), Ok(vec![(0, true), (30, false)]));
    assert_eq!(changes(&mut c, Some(8), 7), Err(ChangesAnswer::NoSnapshot));
    assert_eq!(changes(&mut c, Some(6), 99), Err(ChangesAnswer::NoSnapshot));
}

/// One answer to a request for the content of a snapshot from this block on.
fn content(c: &mut Cluster, to: u128, cursor: u64) -> ChangesAnswer {
    c.changes.clear();
    let to = Some(SnapshotId(to));
    c.event(PrimaryEvent::Changes(ChangesRequest {
        token: 1,
        from: None,
        to,
        cursor,
        want_data: true,
    }));
    c.run(std::time::Duration::from_secs(2));
    c.changes.pop().expect("an answer").1
}

/// Block and first byte of each, of the parts from `cursor` on; or the answer that is no part.
fn pulled_contents(c: &mut Cluster, to: u128) -> Result<Vec<(u64, u8)>, ChangesAnswer> {
    let (mut cursor, mut blocks) = (0, Vec::new());
    loop {
        let answer = content(c, to, cursor);
        let ChangesAnswer::Part { slots, next, .. } = &answer else { return Err(answer) };
        for slot in slots {
            let Content::Data { data, .. } = &slot.content else { panic!("{slot:?}") };
            blocks.push((slot.lba, data[0]));
        }
        match next {
            Some(next) => cursor = *next,
            None => return Ok(blocks),
        }
    }
}

#[test]
fn data_of_a_snapshot_comes_as_stored_from_a_member_with_a_good_copy_and_what_is_lost_is_said() {
    let mut c = Cluster::new(3, config());
    for block in 0..200 {
        c.write(block * 2, block as u8);
    }
    make(&mut c, 7);
    for block in 0..400 {
        c.write(block, 0xee);
    }
    let whole: Vec<(u64, u8)> = (0..200).map(|block| (block * 2, block as u8)).collect();
    assert_eq!(pulled_contents(&mut c, 7), Ok(whole.clone()));
    let view = ReadView::Snapshot(SnapshotId(7));
    let spoil = |c: &mut Cluster, host: usize, lba| {
        let guid = c.hosts[host].member.guid;
        assert!(c.hosts[host].pool.replica(guid).expect("it").spoil_in(view, lba));
    };
    // No member is good everywhere, and all together they have everything.
    for (host, lba) in [(0, 0), (1, 100), (2, 200), (0, 102), (1, 0)] {
        spoil(&mut c, host, lba);
    }
    assert_eq!(pulled_contents(&mut c, 7), Ok(whole));
    for host in [0, 2] {
        spoil(&mut c, host, 100);
    }
    assert_eq!(pulled_contents(&mut c, 7), Err(ChangesAnswer::Damaged { lba: 100 }));
    assert!(matches!(content(&mut c, 7, 101), ChangesAnswer::Part { .. }), "others are there");
}

#[test]
fn no_part_of_a_snapshot_is_read_before_it_is_on_media_of_a_quorum() {
    let mut c = Cluster::new(3, config());
    c.write(3, 1);
    c.settle();
    c.hold_syncs = true;
    c.event(PrimaryEvent::Snapshot { id: SnapshotId(7), wish: SnapshotWish::Make });
    c.settle();
    c.changes.clear();
    let to = Some(SnapshotId(7));
    let request = ChangesRequest { token: 1, from: None, to, cursor: 0, want_data: false };
    c.event(PrimaryEvent::Changes(request));
    c.run(std::time::Duration::from_millis(300));
    assert_eq!(c.changes, [], "all have applied it, and none has it on media");
    c.hold_syncs = false;
    c.run(std::time::Duration::from_secs(3));
    let [(1, ChangesAnswer::Part { ranges, .. })] = &c.changes[..] else {
        panic!("{:?}", c.changes)
    };
    assert_eq!((ranges.len(), ranges[0].lba), (1, 3));
}
