//! Snapshots of users, on replicas that come, go and are rebuilt.

use crate::common::{Cluster, config};
use quoin_replication::primary::{
    PrimaryEvent, PrimaryNote, SnapshotOutcome, SnapshotWish, USER_SNAPSHOTS_MAX,
};
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::ReplicaPool;
use quoin_types::message::{ReadView, Slot};
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
        SnapshotOutcome::Made { lsn } => Some(lsn),
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
    assert_eq!(outcomes(&c, 7), [SnapshotOutcome::Made { lsn }; 2]);
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
