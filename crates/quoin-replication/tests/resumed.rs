//! Interrupted rebuilds resume at the state of the receiver's shadow: data copied before is not
//! copied again.

use std::time::Duration;

use crate::common::{Cluster, config};
use quoin_replication::primary::{PrimaryEvent, PrimaryNote, SnapshotWish};
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::ReplicaPool;
use quoin_types::block::Operation;
use quoin_types::{Lsn, SnapshotId};

/// 4 MiB, sixteen times the window.
const BLOCKS: u64 = 1000;
const NEEDED_BYTES: u64 = BLOCKS * 4096;

/// A volume of three replicas. The last one missed all writes, and is being rebuilt.
fn rebuilding() -> Cluster {
    let mut c = Cluster::new(3, config());
    c.wait_in_sync(3);
    c.crash_replica(2);
    for block in 0..BLOCKS {
        c.write(block, (block % 200) as u8 + 1);
    }
    c.wait_in_sync(2);
    c.start_replica(2);
    c
}

/// The same, with snapshots of a half of the writes and of three quarters.
fn rebuilding_snapshots() -> Cluster {
    let mut c = Cluster::new(3, config());
    c.wait_in_sync(3);
    c.crash_replica(2);
    for block in 0..BLOCKS {
        if block == BLOCKS / 2 || block == BLOCKS / 4 * 3 {
            let (id, wish) = (SnapshotId(block.into()), SnapshotWish::Make);
            c.event(PrimaryEvent::Snapshot { id, wish });
            c.settle();
        }
        c.write(block, (block % 200) as u8 + 1);
    }
    c.wait_in_sync(2);
    c.start_replica(2);
    c
}

/// Bytes that the last reported rebuild has processed, and their total.
fn gone_through(c: &Cluster) -> (u64, u64) {
    let told = c.notes.iter().rev().find_map(|note| match note {
        PrimaryNote::Rebuilding { done_bytes, total_bytes, .. } => {
            Some((*done_bytes, *total_bytes))
        }
        _ => None,
    });
    told.unwrap_or_default()
}

fn rebuilt(c: &Cluster) -> Vec<u64> {
    let moved = c.notes.iter().filter_map(|note| match note {
        PrimaryNote::Rebuilt { moved_bytes, .. } => Some(*moved_bytes),
        _ => None,
    });
    moved.collect()
}

/// Runs a client that reads, beside which a rebuild is paced, until so many bytes were fed to the
/// replica.
fn feed_beside_a_client(c: &mut Cluster, bytes: u64) {
    for _ in 0..10_000 {
        if fed(c) >= bytes {
            return;
        }
        assert!(rebuilt(c).is_empty(), "it ended before it could be interrupted");
        c.read(0, 4096);
        c.run(Duration::from_millis(1));
    }
    let fed = fed(c);
    panic!("{fed} of {bytes} bytes are fed: {:?}", c.target.status());
}

/// Progress that the receiver's shadow reports.
fn fed(c: &mut Cluster) -> u64 {
    let guid = c.hosts[2].member.guid;
    let shadow = c.hosts[2].pool.replica(guid).unwrap().shadow();
    shadow.map_or(0, |(_, _, cursor)| cursor.saturating_mul(4096))
}

/// Interrupts the rebuild again and again; returns the bytes copied in total, once it is complete.
fn interrupted(interrupt: impl FnMut(&mut Cluster)) -> u64 {
    interrupted_while(rebuilding(), interrupt)
}

fn interrupted_while(mut c: Cluster, mut interrupt: impl FnMut(&mut Cluster)) -> u64 {
    for quarter in 1..4 {
        feed_beside_a_client(&mut c, NEEDED_BYTES * quarter / 4);
        interrupt(&mut c);
    }
    c.wait_in_sync(3);
    for block in 0..BLOCKS {
        assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
    }
    let (done, total) = gone_through(&c);
    assert!(done <= total, "{done} of {total}");
    let moved = rebuilt(&c);
    assert_eq!(moved.len(), 1, "it is one rebuild: {moved:?}");
    moved[0]
}

fn check(moved: u64) {
    assert!(moved >= NEEDED_BYTES, "{moved} bytes were copied of {NEEDED_BYTES}");
    assert!(moved * 10 <= NEEDED_BYTES * 12, "{moved} bytes were copied of {NEEDED_BYTES}");
}

#[test]
fn a_rebuild_whose_connection_is_lost_midway_copies_nothing_twice() {
    check(interrupted(|c| {
        c.hosts[2].cut = true;
        c.disconnect(2);
        c.run(Duration::from_secs(5));
        c.hosts[2].cut = false;
    }));
}

#[test]
fn a_rebuild_whose_receiver_dies_midway_copies_nothing_twice() {
    check(interrupted(|c| {
        c.crash_replica(2);
        c.run(Duration::from_secs(5));
        c.start_replica(2);
    }));
}

/// Its boundary pins blocks that are overwritten, and is given up.
#[test]
fn a_rebuild_that_was_parked_for_too_long_is_begun_anew() {
    let moved = interrupted(|c| {
        c.crash_replica(2);
        c.run(Duration::from_secs(1200));
        c.start_replica(2);
    });
    assert!(moved > NEEDED_BYTES * 2, "{moved} bytes were copied of {NEEDED_BYTES}");
}

fn cut_and_join(c: &mut Cluster) {
    c.hosts[2].cut = true;
    c.disconnect(2);
    c.run(Duration::from_secs(5));
    c.hosts[2].cut = false;
}

/// The receiver says which snapshots its shadow is complete for.
#[test]
fn a_rebuild_goes_on_in_the_view_that_it_was_interrupted_in() {
    check(interrupted_while(rebuilding_snapshots(), cut_and_join));
    check(interrupted_while(rebuilding_snapshots(), |c| {
        c.crash_replica(2);
        c.run(Duration::from_secs(5));
        c.start_replica(2);
    }));
}

/// A receiver that loses its cache loses cuts that no sync has followed. What follows them is not
/// fed on top of a shadow that lacks them.
#[test]
fn a_rebuild_goes_back_to_the_view_whose_cut_its_receiver_lost_with_its_cache() {
    for rounds in (5..200).step_by(15) {
        let mut c = rebuilding_snapshots();
        for _ in 0..4 {
            for _ in 0..rounds {
                c.read(0, 4096);
                c.run(Duration::from_millis(1));
            }
            // Slots that are fed from here on may be lost.
            c.do_ok(Operation::Flush);
            for _ in 0..rounds {
                c.read(0, 4096);
                c.run(Duration::from_millis(1));
            }
            c.crash_replica(2);
            c.hosts[2].pool.power_cut(|_| 0);
            c.run(Duration::from_secs(5));
            c.start_replica(2);
        }
        c.wait_in_sync(3);
        for block in 0..BLOCKS {
            assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
        }
        assert_eq!(c.hosts[2].snapshots(), c.hosts[0].snapshots());
        assert!(c.refused.is_empty(), "it was fed behind a cut that it lost: {:?}", c.refused);
    }
}

fn shadow(c: &mut Cluster) -> Option<(u64, Lsn, u64)> {
    let guid = c.hosts[2].member.guid;
    c.hosts[2].pool.replica(guid).unwrap().shadow()
}

/// With a point every few seconds no rebuild would ever end.
#[test]
fn a_rebuild_goes_on_with_the_same_shadow_when_the_snapshot_that_it_copies_is_deleted() {
    for joined in [true, false] {
        let mut c = rebuilding_snapshots();
        feed_beside_a_client(&mut c, NEEDED_BYTES / 4);
        let (id, ..) = shadow(&mut c).expect("it is being fed");
        let (deleted, wish) = (SnapshotId((BLOCKS / 2).into()), SnapshotWish::Delete);
        c.event(PrimaryEvent::Snapshot { id: deleted, wish });
        c.settle();
        if !joined {
            // The cursor that it reports is that of the deleted view.
            cut_and_join(&mut c);
        }
        for _ in 0..10_000 {
            if !rebuilt(&c).is_empty() {
                break;
            }
            if let Some((now, ..)) = shadow(&mut c) {
                assert_eq!(now, id, "it was begun anew");
            }
            c.read(0, 4096);
            c.run(Duration::from_millis(1));
        }
        c.wait_in_sync(3);
        for block in 0..BLOCKS {
            assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
        }
        assert_eq!(c.hosts[2].snapshots(), c.hosts[0].snapshots());
    }
}

/// A snapshot behind which every block is written again.
const REWRITTEN: SnapshotId = SnapshotId(7);

/// A volume of three replicas. The last one missed that snapshot and all writes, and is being rebuilt.
fn rewritten_since_a_snapshot() -> Cluster {
    let mut c = Cluster::new(3, config());
    c.wait_in_sync(3);
    c.crash_replica(2);
    for round in 1..=2 {
        for block in 0..BLOCKS {
            c.write(block, round);
        }
        if round == 1 {
            c.event(PrimaryEvent::Snapshot { id: REWRITTEN, wish: SnapshotWish::Make });
            c.settle();
        }
    }
    c.wait_in_sync(2);
    c.start_replica(2);
    c
}

fn shadow_cut(c: &mut Cluster) -> Option<Lsn> {
    let guid = c.hosts[2].member.guid;
    c.hosts[2].pool.replica(guid).unwrap().shadow_cut()
}

/// Everything is written again behind the snapshot, so the next view has each block anew. The
/// session ends before the receiver gets anything of that view: its cursor is of the deleted one.
#[test]
fn a_cursor_within_a_view_that_was_skipped_hides_nothing_of_the_view_after_it() {
    let mut c = rewritten_since_a_snapshot();
    feed_beside_a_client(&mut c, NEEDED_BYTES / 2);
    let (rebuild, ..) = shadow(&mut c).expect("it is being fed");
    c.event(PrimaryEvent::Snapshot { id: REWRITTEN, wish: SnapshotWish::Delete });
    cut_and_join(&mut c);
    let (same, _, cursor) = shadow(&mut c).expect("it is kept");
    assert_eq!(same, rebuild);
    assert!(cursor >= BLOCKS / 2, "the cursor of the deleted view, not {cursor}");
    c.wait_in_sync(3);
    for block in 0..BLOCKS {
        assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
    }
    assert_eq!(rebuilt(&c).len(), 1, "it is one rebuild");
    assert!(c.refused.is_empty(), "{:?}", c.refused);
}

/// The shadow outlived the power cut and the cut behind it did not. Everything was written again since
/// the snapshot, so a rebuild that went on behind that cut would leave blocks out: told, where the
/// snapshot is listed at the end, and silently, where it was deleted since.
#[test]
fn a_rebuild_goes_on_before_a_cut_that_was_lost_though_its_snapshot_is_deleted_since() {
    for is_deleted in [false, true] {
        let mut c = rewritten_since_a_snapshot();
        feed_beside_a_client(&mut c, NEEDED_BYTES / 2);
        c.hosts[2].pool.request_sync();
        c.settle();
        let (rebuild, start, kept) = shadow(&mut c).expect("it is being fed");
        // The next view is fed beyond the cursor that outlives the power cut.
        let is_beyond = |c: &mut Cluster| {
            let (.., cursor) = shadow(c).expect("it is being fed");
            shadow_cut(c) > Some(start) && cursor > kept
        };
        while !is_beyond(&mut c) {
            assert!(rebuilt(&c).is_empty(), "it ended before it could be interrupted");
            c.read(0, 4096);
            c.run(Duration::from_millis(1));
        }
        c.crash_replica(2);
        c.hosts[2].pool.power_cut(|_| 0);
        assert_eq!(
            shadow(&mut c),
            Some((rebuild, start, kept)),
            "the cut is lost, and nothing else"
        );
        assert_eq!(shadow_cut(&mut c), Some(start));
        if is_deleted {
            c.event(PrimaryEvent::Snapshot { id: REWRITTEN, wish: SnapshotWish::Delete });
        }
        c.run(Duration::from_secs(5));
        c.start_replica(2);
        c.wait_in_sync(3);
        for block in 0..BLOCKS {
            assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
        }
        assert_eq!(c.hosts[2].snapshots(), c.hosts[0].snapshots());
        assert!(c.refused.is_empty(), "{:?}", c.refused);
        assert_eq!(rebuilt(&c).len(), 1, "it is one rebuild");
    }
}

/// The shadow is complete up to the boundary as the volume goes back to a snapshot, which is deleted then: a
/// receiver that lacks the snapshot cannot follow, so it gets a boundary behind that. Of the blocks that
/// the Revert changed it has others.
#[test]
fn a_rebuild_whose_boundary_is_moved_over_a_revert_sends_what_the_revert_changed() {
    let mut c = Cluster::new(3, config());
    for block in 0..BLOCKS {
        c.write(block, 7);
    }
    c.event(PrimaryEvent::Snapshot { id: REWRITTEN, wish: SnapshotWish::Make });
    c.wait_in_sync(3);
    c.crash_replica(2);
    for block in 0..BLOCKS {
        c.write(block, (block % 200) as u8 + 8);
    }
    c.wait_in_sync(2);
    c.start_replica(2);
    feed_beside_a_client(&mut c, NEEDED_BYTES / 2);
    let attempt = SnapshotId(70);
    c.event(PrimaryEvent::Revert { attempt, snapshot: REWRITTEN });
    c.settle();
    c.event(PrimaryEvent::Snapshot { id: REWRITTEN, wish: SnapshotWish::Delete });
    c.wait_in_sync(3);
    for block in 0..BLOCKS {
        assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
    }
    assert_eq!(rebuilt(&c).len(), 1, "it is one rebuild");
    assert!(c.refused.is_empty(), "{:?}", c.refused);
}
