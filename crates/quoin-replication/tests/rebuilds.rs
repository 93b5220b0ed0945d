//! Rebuilds of replicas that lack more than the log holds: data that is copied, sources, and
//! outcomes.

use std::time::Duration;

use crate::common::{Cluster, config};
use bytes::Bytes;
use quoin_replication::primary::{PrimaryConfig, PrimaryEvent, PrimaryNote};
use quoin_types::Durability;
use quoin_types::block::Operation;

#[test]
fn a_replica_that_missed_more_than_the_window_is_rebuilt_by_increments() {
    let mut c = Cluster::new(3, config());
    c.write(500, 7);
    c.crash_replica(1);
    for block in 0..300 {
        c.write(block, 4);
    }
    c.do_ok(Operation::Trim { offset: 500 * 4096, length: 4096, fua: false });
    c.start_replica(1);
    c.wait_in_sync(3);
    assert!(c.notes.iter().any(|n| matches!(n, PrimaryNote::Rebuilt { .. })), "{:?}", c.notes);
    // The rebuilt replica and one other must now hold the volume's content.
    c.crash_replica(0);
    assert_eq!(c.read(299 * 4096, 4096), vec![4; 4096]);
    assert_eq!(c.read(500 * 4096, 4096), vec![0; 4096]);
}

#[test]
fn a_rebuild_is_copied_from_all_the_others_at_once() {
    let mut c = Cluster::new(4, config());
    c.crash_replica(3);
    for block in 0..1000 {
        c.write(block, (block % 200) as u8 + 1);
    }
    c.start_replica(3);
    c.wait_in_sync(4);
    let pulls: Vec<u64> = c.hosts.iter().map(|host| host.pulls).collect();
    assert!(pulls[..3].iter().all(|n| *n >= 3) && pulls[3] == 0, "{pulls:?}");
    assert!(c.notes.iter().any(|n| {
        matches!(n, PrimaryNote::Rebuilt { moved_bytes, .. } if *moved_bytes == 1000 * 4096)
    }));
    for block in 0..1000 {
        assert_eq!(c.hosts[3].look(block), c.hosts[0].look(block), "block {block}");
    }
}

#[test]
fn a_replica_that_was_away_is_copied_the_blocks_changed_meanwhile_and_no_others() {
    let mut c = Cluster::new(3, config());
    for block in 0..800 {
        c.write(block, 1);
    }
    c.crash_replica(1);
    for block in 200..300 {
        c.write(block, 2);
    }
    c.start_replica(1);
    c.wait_in_sync(3);
    let rebuilt = c.notes.iter().filter_map(|n| match n {
        PrimaryNote::Rebuilt { moved_bytes, rounds, .. } => Some((*moved_bytes, *rounds)),
        _ => None,
    });
    assert_eq!(rebuilt.collect::<Vec<_>>(), [(100 * 4096, 1)]);
}

#[test]
fn writes_during_a_rebuild_follow_as_entries_though_they_exceed_the_window() {
    // No entry is kept for being unstable.
    let mut c = Cluster::new(3, PrimaryConfig { durability: Durability::Media, ..config() });
    c.crash_replica(1);
    for block in 0..300 {
        c.write(block, 1);
    }
    c.start_replica(1);
    let is_rebuilding = |n: &PrimaryNote| matches!(n, PrimaryNote::Rebuilding { .. });
    while !c.notes.iter().any(is_rebuilding) {
        c.run(Duration::from_millis(1));
    }
    // More than two windows, at once.
    let writes = (0..150).map(|block| {
        let data = Bytes::from(vec![2; 4096]);
        c.submit(Operation::Write { offset: block * 4096, data, fua: false })
    });
    let writes: Vec<u64> = writes.collect();
    assert!(writes.into_iter().all(|token| c.answer(token).unwrap().result.is_ok()));
    c.wait_in_sync(3);
    let rounds = c.notes.iter().filter_map(|n| match n {
        PrimaryNote::Rebuilt { rounds, .. } => Some(*rounds),
        _ => None,
    });
    assert_eq!(rounds.collect::<Vec<_>>(), [1]);
    for block in 0..300 {
        assert_eq!(c.hosts[1].look(block), c.hosts[0].look(block), "block {block}");
    }
}

/// Writes 40 blocks while one of three replicas is away, then brings it back. Returns how it came
/// back (the data copied, or none), and the bytes that were kept for it.
fn back_after_forty_blocks(bytes_max: Option<usize>) -> (Option<u64>, usize) {
    let mut c = Cluster::new(3, PrimaryConfig { durability: Durability::Media, ..config() });
    c.write(500, 7);
    c.crash_replica(1);
    let write = |c: &mut Cluster, blocks: std::ops::Range<u64>| {
        for block in blocks {
            c.do_ok(Operation::Write {
                offset: block * 4096,
                data: Bytes::from(vec![4; 4096]),
                fua: true,
            });
        }
    };
    write(&mut c, 0..20);
    if let Some(bytes_max) = bytes_max {
        c.event(PrimaryEvent::Retain { bytes_max });
        c.settle();
        assert!(c.target.retained_bytes() <= bytes_max, "what is there already goes too");
    }
    write(&mut c, 20..40);
    let kept = c.target.retained_bytes();
    // The way back uses what the limit left.
    c.start_replica(1);
    c.wait_in_sync(3);
    c.crash_replica(0);
    for block in 0..40 {
        assert_eq!(c.read(block * 4096, 4096), vec![4; 4096], "block {block}");
    }
    let moved = c.notes.iter().find_map(|n| match n {
        PrimaryNote::Rebuilt { moved_bytes, .. } => Some(*moved_bytes),
        _ => None,
    });
    (moved, kept)
}

#[test]
fn limited_memory_keeps_no_entries_for_a_replica_that_is_away_and_it_is_rebuilt() {
    let (moved, kept) = back_after_forty_blocks(None);
    assert_eq!(moved, None, "the window holds all of it");
    assert!(kept >= 40 * 4096, "{kept}");
    let (moved, kept) = back_after_forty_blocks(Some(32 << 10));
    assert_eq!(moved, Some(40 * 4096));
    assert!(kept <= 32 << 10, "{kept}");
    let (moved, kept) = back_after_forty_blocks(Some(0));
    assert_eq!((moved, kept), (Some(40 * 4096), 0));
}
