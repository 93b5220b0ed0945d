//! The thread that serves a pool's sockets does its long work too, so every step is short: its
//! work is bounded by a number, whatever it is that has to be done in all.

mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{identity, new_pool, options, sync};
use quoin_core::entry::SharedEntry;
use quoin_core::replica::store::{ReplicaMeta, ReplicaStore};
use quoin_core::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid};
use quoin_store::{Disk, Due, MemoryDisk, Pool, ReplicaPool};

const GUID: ReplicaGuid = ReplicaGuid(0x57);
/// Bytes of a unit of these pools.
const UNIT_BYTES: u64 = 32 * BLOCK_SIZE as u64;

/// A pool with one replica that is written to and is stable at once.
struct Volume {
    disk: MemoryDisk,
    pool: Pool<MemoryDisk>,
    chain: Chain,
    lsn: u64,
}

impl Volume {
    fn new(pool_bytes: u64, blocks: u64) -> Self {
        let (disk, mut pool) = new_pool(pool_bytes);
        pool.create(identity(GUID), ReplicaMeta::default(), blocks).expect("room");
        Volume { disk, pool, chain: Chain(0), lsn: 0 }
    }

    fn append(&mut self, kind: EntryKind, lba: u64, blocks: u32) {
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn + 1) };
        let data = match kind {
            EntryKind::Write => Bytes::from(vec![self.lsn as u8 | 1; blocks as usize * BLOCK_SIZE]),
            _ => Bytes::new(),
        };
        let entry: SharedEntry =
            Arc::new(Entry::after(self.chain, position, kind, lba, blocks, data, false));
        let mut replica = self.pool.replica(GUID).expect("it");
        replica.append(std::slice::from_ref(&entry)).expect("room");
        replica.set_stable(entry.lsn);
        (self.chain, self.lsn) = (entry.chain, entry.lsn.0);
    }

    /// Does what there is to do, step by step, and gives each to `each`.
    fn work(&mut self, mut each: impl FnMut(&mut Pool<MemoryDisk>)) {
        for _ in 0..100_000 {
            let idle = self.pool.background_due() == Due::Idle;
            if !idle {
                self.pool.background(1).expect("background work");
                each(&mut self.pool);
            }
            let Some(ticket) = self.pool.sync_wanted() else {
                if idle {
                    return;
                }
                continue;
            };
            let result = self.pool.disk().sync();
            self.pool.sync_finished(ticket, result);
            each(&mut self.pool);
        }
        panic!("the pool does not come to rest");
    }
}

#[test]
fn a_large_replica_that_is_deleted_gives_its_space_back_a_few_units_at_a_time() {
    for restarts in [false, true] {
        let mut volume = Volume::new(64 << 20, 16_000);
        for lba in (0..10_500).step_by(30) {
            volume.append(EntryKind::Write, lba, 30);
        }
        sync(&mut volume.pool);
        let (held, given) = (volume.disk.allocated_bytes(), volume.disk.discarded_bytes());
        assert!(held > 300 * UNIT_BYTES && given == 0, "{held} held, {given} given back");
        volume.pool.delete(GUID).expect("room for a delete");
        let ticket = volume.pool.sync_wanted().expect("a delete is to be durable");
        let result = volume.pool.disk().sync();
        volume.pool.sync_finished(ticket, result);
        let free = volume.pool.stats().free_bytes;
        assert!(free > 50 << 20, "clients have the room at once, not {free}");
        if restarts {
            volume.pool.background(1).expect("a step");
            volume.pool = Pool::open(volume.disk.clone(), options()).expect("a sound pool");
        }
        let mut before = volume.disk.discarded_bytes();
        let mut most = before - given;
        volume.work(|pool| {
            let now = pool.disk().discarded_bytes();
            most = most.max(now - before);
            before = now;
        });
        assert!(most <= 8 * UNIT_BYTES, "one step gave {} units back", most / UNIT_BYTES);
        let left = volume.disk.allocated_bytes();
        assert!(left < held / 20, "{left} of {held} are still taken, restarts: {restarts}");
    }
}
