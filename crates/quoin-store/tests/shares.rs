//! Room that is kept for what targets have sequenced: it fits, for every replica of the pool.

use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::{MemoryDisk, Pool, ReplicaPool};
use quoin_types::entry::EntryKind;
use quoin_types::message::{RoomGrant, Takes};
use quoin_types::{Chain, Entry, Epoch, Lsn, Position, ReplicaGuid, SnapshotId};

use crate::common::{identity, new_pool, options, sync};

struct Target {
    guid: ReplicaGuid,
    chain: Chain,
    lsn: u64,
}

impl Target {
    fn append(
        &mut self,
        pool: &mut Pool<MemoryDisk>,
        kind: EntryKind,
        blocks: u32,
    ) -> Result<(), StoreError> {
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn + 1) };
        let data = match kind {
            EntryKind::Write => Bytes::from(vec![self.lsn as u8; blocks as usize * 4096]),
            _ => Bytes::new(),
        };
        let lba = if blocks > 8 { 0 } else { self.lsn * 8 % 3900 };
        let entry = Arc::new(Entry::after(self.chain, position, kind, lba, blocks, data, false));
        let mut replica = pool.replica(self.guid).expect("it");
        replica.append(std::slice::from_ref(&entry))?;
        (self.chain, self.lsn) = (entry.chain, self.lsn + 1);
        replica.set_stable(entry.lsn);
        Ok(())
    }

    /// Blocks that it has appended of a share of writes of so many, until it is refused.
    fn append_all(&mut self, pool: &mut Pool<MemoryDisk>, blocks: u32) -> u32 {
        let mut appended = 0;
        while self.append(pool, EntryKind::Write, blocks).is_ok() {
            appended += blocks + 1;
            assert!(appended < 4000, "no pool is that large");
        }
        appended
    }
}

/// A pool that has just refused its targets more writes, and what it grants.
fn filled(replicas: u128) -> (MemoryDisk, Pool<MemoryDisk>, Vec<Target>, RoomGrant) {
    let (disk, mut pool) = new_pool(12 << 20);
    let mut targets = Vec::new();
    for guid in (1..=replicas).map(ReplicaGuid) {
        pool.create(identity(guid), ReplicaMeta::default(), 4000).expect("room");
        targets.push(Target { guid, chain: Chain(0), lsn: 0 });
    }
    let mut told = RoomGrant::UNBOUNDED;
    for round in 0.. {
        told = pool.room(told);
        if told.takes < Takes::Writes {
            break;
        }
        let target = &mut targets[round % replicas as usize];
        target.append(&mut pool, EntryKind::Write, 8).expect("it takes writes");
        assert!(round < 1000, "the pool never filled up");
    }
    assert_eq!(told.takes, Takes::Holes);
    (disk, pool, targets, told)
}

#[test]
fn what_all_targets_had_under_way_when_the_pool_stopped_taking_writes_fits() {
    for replicas in [1, 2, 4] {
        for blocks in [1, 8] {
            let (_, mut pool, mut targets, told) = filled(replicas);
            for target in &mut targets {
                for _ in 0..told.share_blocks / (blocks + 1) {
                    let done = target.append(&mut pool, EntryKind::Write, blocks);
                    done.unwrap_or_else(|error| {
                        panic!("{error:?}: {told:?} of {replicas}, {:?}", pool.stats())
                    });
                }
            }
        }
    }
}

/// One that lags is owed any amount, and was granted nothing of it.
#[test]
fn a_replica_gets_no_more_than_its_share_of_what_is_kept_and_the_others_still_get_theirs() {
    let (_, mut pool, mut targets, told) = filled(4);
    let taken = targets[0].append_all(&mut pool, 8);
    assert!(taken <= told.share_blocks + 9, "{taken} of {told:?}");
    for target in &mut targets[1..] {
        for _ in 0..told.share_blocks / 9 {
            target.append(&mut pool, EntryKind::Write, 8).expect("its share");
        }
    }
}

#[test]
fn what_frees_space_has_room_behind_all_that_and_writes_are_taken_again() {
    let (disk, mut pool, mut targets, mut told) = filled(2);
    let id = SnapshotId(7);
    for target in &mut targets {
        target.append_all(&mut pool, 8);
        let make = EntryKind::Snapshot { id, hidden: false };
        target.append(&mut pool, make, 0).expect("a snapshot takes no room of clients");
    }
    // The pool starts again: what is kept is kept for replicas, not for sessions.
    sync(&mut pool);
    drop(pool);
    let mut pool = Pool::open(disk, options()).expect("it opens");
    for target in &mut targets {
        target.lsn = pool.replica(target.guid).expect("it").state().position.lsn.0;
        target.append(&mut pool, EntryKind::DeleteSnapshot { id }, 0).expect("it frees space");
        for _ in 0..3 {
            target.append(&mut pool, EntryKind::Trim, 2000).expect("so does this");
        }
        target.append(&mut pool, EntryKind::Zero { no_hole: false }, 8).expect("and this");
    }
    for _ in 0..500 {
        pool.background(1 << 20).expect("clean-up");
        sync(&mut pool);
        told = pool.room(told);
    }
    assert_eq!(told.takes, Takes::Writes, "{:?}", pool.stats());
}
