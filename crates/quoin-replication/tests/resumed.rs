//! Interrupted rebuilds resume at the state of the receiver's shadow: data copied before is not
//! copied again.

use std::time::Duration;

use crate::common::{Cluster, config};
use quoin_replication::primary::PrimaryNote;
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::ReplicaPool;

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
    shadow.map_or(0, |(_, _, cursor)| cursor * 4096)
}

/// Interrupts the rebuild again and again; returns the bytes copied in total, once it is complete.
fn interrupted(mut interrupt: impl FnMut(&mut Cluster)) -> u64 {
    let mut c = rebuilding();
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
