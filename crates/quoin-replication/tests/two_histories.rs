//! An epoch that was granted twice, to two targets that opened different replicas: a control plane
//! was rolled back and had lost the first grant. The replica of the one comes back to the other.

use crate::common::{Cluster, config};
use bytes::Bytes;
use quoin_replication::primary::PrimaryNote;
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::ReplicaPool;
use quoin_types::*;

/// The third replica is away while the others are written to under the present epoch.
fn without_the_third(new_epoch: bool) -> Cluster {
    let mut c = Cluster::new(3, config());
    for block in 0..10 {
        c.write(block, 1);
    }
    c.wait_in_sync(3);
    c.hosts[2].cut = true;
    c.disconnect(2);
    if new_epoch {
        c.replace_target(config());
    }
    for block in 0..50 {
        c.write(block, 2);
    }
    c
}

/// Another target wrote so many blocks to it, under the number of the present epoch.
fn written_by_another(c: &mut Cluster, writes: u64) {
    let (epoch, guid) = (c.epoch, c.hosts[2].member.guid);
    let mut store = c.hosts[2].pool.replica(guid).unwrap();
    for block in 0..writes {
        let state = store.state();
        let position = Position { epoch, lsn: state.position.lsn.next() };
        let data = Bytes::from(vec![9; BLOCK_SIZE]);
        let entry = Entry::after(state.chain, position, EntryKind::Write, block, 1, data, false);
        store.append(&[entry.into()]).unwrap();
    }
}

fn comes_back(c: &mut Cluster) {
    c.hosts[2].cut = false;
    c.wait_in_sync(3);
    let refused = |note: &PrimaryNote| {
        matches!(note, PrimaryNote::InvariantRefused { invariant: "OneContent", .. })
    };
    assert!(c.notes.iter().any(refused), "its operator is told");
    for host in 0..2 {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    for block in 0..50 {
        assert_eq!(c.hosts[2].look(block), c.hosts[0].look(block), "block {block}");
    }
}

#[test]
fn a_replica_of_another_history_under_the_same_epoch_is_cut_to_before_it_and_fed() {
    for writes in [1, 7, 20] {
        let mut c = without_the_third(true);
        written_by_another(&mut c, writes);
        let before = c.notes.len();
        comes_back(&mut c);
        let rebuilt = |note: &PrimaryNote| matches!(note, PrimaryNote::Rebuilt { .. });
        assert!(!c.notes[before..].iter().any(rebuilt), "what it has of before is kept");
    }
}

/// Its part of the earlier history is stable, so none of it can be cut.
#[test]
fn where_that_is_below_its_stable_it_finds_itself_damaged_and_is_rebuilt() {
    let mut c = without_the_third(false);
    written_by_another(&mut c, 5);
    comes_back(&mut c);
    assert!(c.notes.iter().any(|note| matches!(note, PrimaryNote::Rebuilt { .. })));
}
