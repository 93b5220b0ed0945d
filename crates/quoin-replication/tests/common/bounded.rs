//! Pools that run full, and disks that refuse to read.

use bytes::Bytes;
use quoin_replication::replica::store::{
    IoFault, PullChunk, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError, StoreState,
    SyncTicket,
};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{
    CutHead, EpochEnd, IncrementEnd, ReadView, Slot, SnapshotHead, SnapshotInfo,
};
use quoin_types::*;

/// Error of a refused read, which loses nothing and may be transient.
const REFUSED: StoreError = StoreError::Io(IoFault { operation: "read", offset: 0, errno: 5 });

/// A store whose pool has this much room and no more (entries without data always fit), and whose
/// disk may refuse reads that a session needs.
pub struct Bounded<'a, S> {
    pub inner: S,
    pub room: &'a mut Option<u64>,
    pub reserve: &'a mut (u64, Epoch),
    pub unreadable: bool,
    /// The pool's metadata ring has room for no record.
    pub ring_full: bool,
}

impl<S: ReplicaStore> ReplicaStore for Bounded<'_, S> {
    fn append(&mut self, entries: &[SharedEntry]) -> Result<(), StoreError> {
        for entry in entries {
            let blocks = entry.crcs.len() as u64;
            let (reserve, owed) = &mut *self.reserve;
            match self.room {
                Some(room) if *room < blocks && entry.epoch < *owed && *reserve >= blocks => {
                    *reserve -= blocks;
                }
                Some(room) if *room < blocks => return Err(StoreError::Full),
                Some(room) => *room -= blocks,
                None => {}
            }
            self.inner.append(std::slice::from_ref(entry))?;
        }
        Ok(())
    }
    fn owe_before(&mut self, epoch: Epoch) {
        self.reserve.1 = epoch;
        self.inner.owe_before(epoch);
    }
    fn identity(&self) -> &ReplicaIdentity {
        self.inner.identity()
    }
    fn meta(&self) -> &ReplicaMeta {
        self.inner.meta()
    }
    fn put_meta(&mut self, meta: ReplicaMeta) -> Result<(), StoreError> {
        if self.ring_full {
            return Err(StoreError::RingFull);
        }
        self.inner.put_meta(meta)
    }
    fn state(&self) -> StoreState {
        self.inner.state()
    }
    fn epoch_table(&self) -> Vec<EpochEnd> {
        self.inner.epoch_table()
    }
    fn clients(&self) -> ClientTable {
        self.inner.clients()
    }
    fn snapshots(&self) -> Vec<SnapshotInfo> {
        self.inner.snapshots()
    }
    fn snapshot_heads(&self) -> Vec<SnapshotHead> {
        self.inner.snapshot_heads()
    }
    fn truncate(&mut self, keep: Lsn) -> Result<(), StoreError> {
        self.inner.truncate(keep)
    }
    fn set_stable(&mut self, stable: Lsn) {
        self.inner.set_stable(stable);
    }
    fn request_sync(&mut self) -> SyncTicket {
        self.inner.request_sync()
    }
    fn read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.inner.read(view, lba, blocks, want_data, out)
    }
    fn fetch(&mut self, after: Lsn, max: u32) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        if self.unreadable {
            return Err(REFUSED);
        }
        self.inner.fetch(after, max)
    }
    fn pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError> {
        if self.unreadable {
            return Err(REFUSED);
        }
        self.inner.pull(session, view, from, cursor, bytes_max, want_data)
    }
    fn unpin(&mut self, session: u64) {
        self.inner.unpin(session);
    }
    fn shadow(&self) -> Option<(u64, Lsn, u64)> {
        self.inner.shadow()
    }
    fn shadow_cut(&self) -> Option<Lsn> {
        self.inner.shadow_cut()
    }
    fn increment_begin(&mut self, rebuild: u64, from: Lsn) -> Result<bool, StoreError> {
        self.inner.increment_begin(rebuild, from)
    }
    fn increment_feed(&mut self, id: u64, slots: &[Slot], at: u64) -> Result<(), StoreError> {
        self.inner.increment_feed(id, slots, at)
    }
    fn increment_cut(
        &mut self,
        id: u64,
        snapshot: SnapshotInfo,
        head: &CutHead,
    ) -> Result<(), StoreError> {
        self.inner.increment_cut(id, snapshot, head)
    }
    fn increment_prepare(&mut self, id: u64, end: &IncrementEnd) -> Result<(), StoreError> {
        self.inner.increment_prepare(id, end)
    }
    fn increment_flip(&mut self, id: u64) -> Result<(), StoreError> {
        self.inner.increment_flip(id)
    }
    fn repair(
        &mut self,
        view: ReadView,
        lba: u64,
        v: Lsn,
        crc: u32,
        data: &Bytes,
    ) -> Result<bool, StoreError> {
        self.inner.repair(view, lba, v, crc, data)
    }
    fn verify(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.inner.verify(view, lba, blocks, bytes_max, note, out)
    }
    fn mend(&mut self, view: ReadView, lba: u64, slots: &[Slot]) -> Result<bool, StoreError> {
        self.inner.mend(view, lba, slots)
    }
}
