//! The fence of a replica: epochs that the control plane took back open nothing any more.

use crate::one_replica::*;
use bytes::Bytes;
use quoin_replication::pool_host::access::appends;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_replication::replica::{FENCED_SESSION, LEASE_MS, ReplicaEvent, granted_lease};
use quoin_store::ReplicaPool;
use quoin_store::model::ModelPool;
use quoin_types::message::{Failure, FromReplica, ToReplica};
use quoin_types::*;
use std::time::Duration;

fn fenced(epoch: u64, at_once: bool) -> ReplicaEvent {
    ReplicaEvent::Fence { epoch: Epoch(epoch), at_once }
}

#[test]
fn a_grant_that_was_taken_back_opens_nothing_whatever_becomes_of_pool_and_target() {
    let mut one = One::new();
    let refused = [FromReplica::Refuse { promised: Epoch(6), failure: Failure::Fenced }];
    let closed = key(5, 1, 1);
    one.opened(closed);
    one.feed(closed);
    one.send(closed, ToReplica::Close);
    one.on(fenced(6, false));
    assert_eq!(one.open(key(5, 1, 2)), refused);
    one.pool.power_cut(|_| 0);
    one.restart();
    assert_eq!(one.open(key(5, 1, 3)), refused);
    // The next grant is above the fence, and the closed replica is complete.
    assert!(one.opened(key(7, 2, 1)).continuous);
    // A late repetition of the fence concerns an epoch that is over.
    one.on(fenced(6, true));
    one.feed(key(7, 2, 1));
}

#[test]
fn a_fence_leaves_its_epoch_to_nobody_and_nobody_opens_a_replica_in_the_name_of_no_target() {
    let mut one = One::new();
    let refused = |promised| [FromReplica::Refuse { promised, failure: Failure::Fenced }];
    assert_eq!(one.open(key(5, 0, 1)), refused(Epoch::ZERO));
    one.opened(key(5, 1, 2));
    one.feed(key(5, 1, 2));
    one.send(key(5, 1, 2), ToReplica::Close);
    one.on(fenced(6, false));
    for (epoch, incarnation) in [(6, 0), (6, 1), (6, 2), (7, 0)] {
        assert_eq!(one.open(key(epoch, incarnation, 3)), refused(Epoch(6)));
    }
    one.opened(key(7, 2, 4));
}

#[test]
fn a_session_that_was_fenced_may_close_in_its_time_and_keeps_its_data() {
    let mut one = One::new();
    let session = key(5, 1, 1);
    one.opened(session);
    one.feed(session);
    one.on(fenced(6, false));
    // The session drains: accepted entries are written, synced and closed cleanly.
    let entry = one.entry(5, 1);
    assert!(!one.append(session, entry).is_empty());
    one.now = one.now + FENCED_SESSION - Duration::from_millis(1);
    one.on(ReplicaEvent::Timer);
    one.send(session, ToReplica::Close);
    one.pool.power_cut(|_| 0);
    one.restart();
    let ack = one.opened(key(7, 2, 1));
    assert_eq!((ack.position.lsn, ack.continuous), (Lsn(1), true));
}

#[test]
fn a_fenced_session_ends_when_its_time_is_over_or_at_once_if_the_fence_requires_it() {
    for at_once in [false, true] {
        let mut one = One::new();
        let session = key(5, 1, 1);
        one.opened(session);
        one.feed(session);
        one.on(fenced(6, at_once));
        if !at_once {
            assert!(one.replica.is_open());
            // A repeated fence does not extend the time.
            one.now = one.now + FENCED_SESSION / 2;
            one.on(fenced(6, false));
            one.now = one.now + FENCED_SESSION / 2;
            one.on(ReplicaEvent::Timer);
        }
        assert!(!one.replica.is_open());
        let entry = one.entry(5, 1);
        assert_eq!(one.append(session, entry), []);
        assert_eq!(one.position().lsn, Lsn(0));
        assert!(matches!(one.open(key(5, 1, 2))[..], [FromReplica::Refuse { .. }]));
    }
}

#[test]
fn an_open_that_waits_when_its_grant_is_taken_back_is_refused() {
    let mut one = One::new();
    one.opened(key(5, 1, 1));
    assert_eq!(one.open(key(6, 2, 2)), []);
    let refused = FromReplica::Refuse { promised: Epoch(7), failure: Failure::Fenced };
    assert_eq!(one.on(fenced(7, false)), [refused]);
    one.now = one.now + granted_lease(LEASE_MS);
    assert_eq!(one.on(ReplicaEvent::Timer), []);
    // A session of the next epoch is not fenced.
    let next = key(8, 3, 3);
    one.opened(next);
    one.now = one.now + FENCED_SESSION;
    one.on(ReplicaEvent::Timer);
    one.feed(next);
}

#[test]
fn a_replica_that_was_fenced_before_its_first_open_lacks_nothing() {
    let mut one = One::new();
    one.pool = ModelPool::new();
    let identity = ReplicaIdentity {
        volume: VOLUME,
        replica: OWN.id,
        guid: OWN.guid,
        volume_spec: Bytes::new(),
    };
    let meta = ReplicaMeta { quorum: true, ..ReplicaMeta::default() };
    one.pool.create(identity, meta, 64).unwrap();
    one.restart();
    one.on(fenced(6, false));
    one.pool.power_cut(|_| 0);
    one.restart();
    let ack = one.opened(key(7, 1, 1));
    assert!(ack.continuous);
    // The replica knew of no membership, and learns it in its first session.
    let known = one.pool.replica(OWN.guid).unwrap().meta().membership.clone();
    assert_eq!(known, membership());
}

#[test]
fn a_grant_that_reads_lets_a_target_bring_history_along_and_change_nothing() {
    let entry = |epoch, kind| {
        let position = Position { epoch: Epoch(epoch), lsn: Lsn(9) };
        Entry::after(Chain(1), position, kind, 0, 1, Bytes::new(), false)
    };
    let id = SnapshotId(1);
    let changing = [
        EntryKind::Write,
        EntryKind::Trim,
        EntryKind::Zero { no_hole: false },
        EntryKind::Revert { id },
    ];
    for kind in changing {
        assert!(appends(true, Epoch(4), &entry(4, kind.clone())), "{kind:?}");
        assert!(!appends(false, Epoch(4), &entry(4, kind.clone())), "{kind:?}");
        assert!(appends(false, Epoch(4), &entry(3, kind.clone())), "{kind:?} is history");
    }
    let others = [
        EntryKind::Snapshot { id, hidden: false },
        EntryKind::DeleteSnapshot { id },
        EntryKind::Resize { blocks: 9 },
        EntryKind::View(Box::default()),
    ];
    for kind in others {
        assert!(appends(false, Epoch(4), &entry(4, kind.clone())), "{kind:?}");
    }
}
