//! A full pool keeps its room for Views, promises and deletes; trimmed space comes back.

mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{identity, new_pool, sync};
use quoin_core::replica::store::{ReplicaMeta, ReplicaStore, StoreError};
use quoin_core::{Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid};
use quoin_store::{MemoryDisk, Pool, ReplicaPool};

const GUID: ReplicaGuid = ReplicaGuid(0xf);

struct Writer {
    pool: Pool<MemoryDisk>,
    chain: Chain,
    lsn: u64,
}

impl Writer {
    fn new(pool_bytes: u64, blocks: u64) -> Self {
        let (_, mut pool) = new_pool(pool_bytes);
        pool.create(identity(GUID), ReplicaMeta::default(), blocks).expect("room");
        Writer { pool, chain: Chain(0), lsn: 0 }
    }

    fn entry(&self, kind: EntryKind, lba: u64, blocks: u32) -> Arc<Entry> {
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn + 1) };
        let data = match kind {
            EntryKind::Write => Bytes::from(vec![self.lsn as u8; blocks as usize * 4096]),
            _ => Bytes::new(),
        };
        Arc::new(Entry::after(self.chain, position, kind, lba, blocks, data, false))
    }

    fn append(&mut self, kind: EntryKind, lba: u64, blocks: u32) -> Result<(), StoreError> {
        let entry = self.entry(kind, lba, blocks);
        let mut replica = self.pool.replica(GUID).expect("it");
        replica.append(std::slice::from_ref(&entry))?;
        (self.chain, self.lsn) = (entry.chain, self.lsn + 1);
        replica.set_stable(entry.lsn);
        Ok(())
    }
}

#[test]
fn a_full_pool_still_takes_views_promises_and_deletes_and_trim_gives_space_back() {
    let mut writer = Writer::new(8 << 20, 4000);
    let mut lba = 0;
    while writer.append(EntryKind::Write, lba, 8).is_ok() {
        lba += 8;
        assert!(lba < 3990, "the pool never filled up");
    }
    for _ in 0..20 {
        let view = EntryKind::View(Box::new(common::some_view()));
        writer.append(view, 0, 0).expect("a View has room in a full pool");
        let id = quoin_core::SnapshotId(1);
        writer.append(EntryKind::DeleteSnapshot { id }, 0, 0).expect("and so has a delete");
    }
    let mut replica = writer.pool.replica(GUID).expect("it");
    let meta = ReplicaMeta { promised: Epoch(9), ..replica.meta().clone() };
    replica.put_meta(meta).expect("and a promise");
    let free = writer.pool.stats().free_bytes;
    // A delete of the replica gives everything back.
    assert_eq!(writer.pool.delete(GUID), Ok(true));
    sync(&mut writer.pool);
    assert!(writer.pool.stats().free_bytes > free + (5 << 20));
    assert!(writer.pool.create(identity(GUID), ReplicaMeta::default(), 8).is_err());

    let mut writer = Writer::new(8 << 20, 4000);
    for lba in (0..1000).step_by(8) {
        writer.append(EntryKind::Write, lba, 8).expect("room");
    }
    let before = writer.pool.stats().free_bytes;
    writer.append(EntryKind::Trim, 0, 1000).expect("a trim");
    writer.pool.settle().expect("folded");
    for _ in 0..200 {
        writer.pool.background(4 << 20).expect("background work");
        sync(&mut writer.pool);
    }
    let gained = writer.pool.stats().free_bytes - before;
    assert!(gained > 3 << 20, "a trim of 4 MiB gave {gained} bytes back");
}
