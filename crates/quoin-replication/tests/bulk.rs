//! Rebuilds by a connection of their own: the loss of the connection or of its session does not end
//! the other, and messages of the two need no order between them.

use std::time::Duration;

use crate::common::{Cluster, config};
use quoin_replication::primary::PrimaryNote;
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::ReplicaPool;
use quoin_types::message::ToReplica;
use quoin_types::*;

const BLOCKS: u64 = 1000;

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

/// Number of blocks up to which the receiver's shadow is complete.
fn shadow_blocks(c: &mut Cluster) -> u64 {
    let guid = c.hosts[2].member.guid;
    let shadow = c.hosts[2].pool.replica(guid).unwrap().shadow();
    shadow.map_or(0, |(_, _, cursor)| cursor)
}

fn copied_bytes(c: &Cluster) -> Vec<u64> {
    let copied = c.notes.iter().filter_map(|note| match note {
        PrimaryNote::Rebuilt { moved_bytes, .. } => Some(*moved_bytes),
        _ => None,
    });
    copied.collect()
}

/// Runs a paced rebuild beside a client until so many blocks were copied.
fn copy_up_to(c: &mut Cluster, blocks: u64) {
    for _ in 0..10_000 {
        if shadow_blocks(c) >= blocks {
            return;
        }
        c.read(0, 4096);
        c.run(Duration::from_millis(1));
    }
    panic!("{} of {blocks} blocks were copied", shadow_blocks(c));
}

fn sessions(c: &Cluster) -> Vec<SessionKey> {
    (0..3).flat_map(|host| c.sessions_with(host)).collect()
}

fn check_whole(c: &mut Cluster) {
    c.wait_in_sync(3);
    for block in 0..BLOCKS {
        assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
    }
}

#[test]
fn bulk_connections_that_are_lost_end_no_session_and_nothing_is_copied_twice() {
    let mut c = rebuilding();
    copy_up_to(&mut c, 1);
    let before = sessions(&c);
    assert_eq!(before.len(), 3);
    for quarter in 1..4 {
        copy_up_to(&mut c, BLOCKS * quarter / 4);
        for host in 0..3 {
            assert_eq!(c.disconnect_bulk(host), 1, "host {host} copies");
        }
        // The two in-sync replicas are fed and acknowledge as before.
        c.write(1, quarter as u8);
    }
    check_whole(&mut c);
    assert_eq!(sessions(&c), before);
    let copied = copied_bytes(&c);
    let needed = BLOCKS * 4096;
    assert_eq!(copied.len(), 1, "{copied:?}");
    assert!((needed..needed / 10 * 12).contains(&copied[0]), "{copied:?} of {needed}");
}

#[test]
fn without_a_bulk_connection_clients_continue_and_no_copy_uses_the_sessions_own() {
    let mut c = rebuilding();
    c.bulk_cut = true;
    let pulls: u64 = c.hosts.iter().map(|h| h.pulls).sum();
    for n in 0..40 {
        c.write(n, n as u8);
        c.run(Duration::from_millis(500));
    }
    assert_eq!(c.hosts.iter().map(|h| h.pulls).sum::<u64>(), pulls, "nothing was asked for");
    assert_eq!((c.sessions_with(0).len(), c.sessions_with(1).len()), (1, 1));
    c.bulk_cut = false;
    check_whole(&mut c);
}

#[test]
fn a_commit_that_is_lost_with_its_connection_is_sent_again_and_flips_once() {
    let mut c = rebuilding();
    c.lose_bulk = |message| matches!(message, ToReplica::IncrementCommit { .. });
    copy_up_to(&mut c, 1);
    let before = sessions(&c);
    check_whole(&mut c);
    assert_eq!(sessions(&c), before);
    assert_eq!(copied_bytes(&c).len(), 1);
}

#[test]
fn every_message_to_the_receiver_may_be_the_one_that_its_connection_is_lost_with() {
    let lost: [fn(&ToReplica) -> bool; 4] = [
        |m| matches!(m, ToReplica::OpenBulk { .. }),
        |m| matches!(m, ToReplica::IncrementBegin { .. }),
        |m| matches!(m, ToReplica::IncrementFeed { .. }),
        |m| matches!(m, ToReplica::Pull { .. }),
    ];
    for lost in lost {
        let mut c = rebuilding();
        c.lose_bulk = lost;
        check_whole(&mut c);
        assert!(!lost(&ToReplica::Close) && !(c.lose_bulk)(&ToReplica::Close));
    }
}

#[test]
fn bulk_connections_are_closed_once_no_rebuild_needs_them_and_the_volume_falls_silent() {
    let mut c = rebuilding();
    check_whole(&mut c);
    assert!(c.bulks_with(0) > 0 && c.bulks_with(2) > 0);
    c.run(Duration::from_secs(15));
    assert_eq!((c.bulks_with(0), c.bulks_with(1), c.bulks_with(2)), (0, 0, 0));
    c.run(Duration::from_secs(5));
    assert!(!c.target_has_timer());
}

#[test]
fn a_session_that_ends_takes_its_bulk_connection_along() {
    let mut c = rebuilding();
    copy_up_to(&mut c, 100);
    c.crash_replica(2);
    c.run(Duration::from_millis(10));
    assert_eq!(c.bulks_with(2), 0);
    assert_eq!((c.sessions_with(0).len(), c.sessions_with(1).len()), (1, 1));
}
