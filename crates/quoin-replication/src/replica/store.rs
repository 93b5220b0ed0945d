//! Requirements of a replica on its storage. `quoin-store` implements them on files and devices,
//! and once more as a plain in-memory model that every property test compares with.
//!
//! All calls except syncs return when they are done. A write that returned is in the kernel (the
//! buffered write returned, or the O_DIRECT write completed), never in process memory alone. There
//! is one exception, for entries that count only once they are durable: [`ReplicaStore::append`].
//! Calls whose names begin with `try_` do not wait for the disk either ([`StoreError::Pending`]).
//! Durability is asynchronous: [`ReplicaStore::request_sync`] returns a ticket, and the driver
//! reports [`super::ReplicaEvent::Synced`] once a sync that *began after* the request is done.

use quoin_types::client::ClientTable;
use quoin_types::entry::{Chain, SharedEntry, View};
use quoin_types::ids::{
    Epoch, Incarnation, Lsn, Position, ReplicaGuid, ReplicaId, SnapshotId, VolumeId,
};
use quoin_types::membership::Membership;
use quoin_types::message::{
    CutHead, EpochEnd, IncrementEnd, ReadView, Slot, SnapshotHead, SnapshotInfo,
};

/// Number of a sync request; it grows with every request. A completed ticket covers all smaller
/// ones of the same pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SyncTicket(pub u64);

/// Number of a call that waits for reads of the disk ([`StoreError::Pending`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FetchTicket(pub u64);

/// Identifies one boot of one host's kernel together with one identity of the pool's device.
/// Page-cache content survives exactly as long as the cookie stays equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct BootCookie(pub u128);

/// Identity of a replica: everything but the volume's description is fixed at creation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReplicaIdentity {
    pub volume: VolumeId,
    pub replica: ReplicaId,
    pub guid: ReplicaGuid,
    /// The volume's name and parameters as the records had them last, opaque here, for recovery
    /// from pools alone.
    pub volume_spec: bytes::Bytes,
}

/// The snapshot from which a clone is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CloneSource {
    pub volume: VolumeId,
    pub snapshot: SnapshotId,
}

/// The small durable state beside the log, kept in the pool's metadata ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReplicaMeta {
    pub promised: Epoch,
    pub promised_incarnation: Incarnation,
    /// Set if a session may have granted a lease that is not known to be over.
    pub session_open: bool,
    /// The longest lease granted under `promised`, in milliseconds.
    pub lease_ms: u32,
    pub membership: Membership,
    /// Set if the replica counts for quorum: its data may be read and its acknowledgements counted.
    pub quorum: bool,
    /// Set if parts below stable were lost or are unreadable: the replica does not count until
    /// rebuilt.
    pub damaged: bool,
    /// The boot since which everything applied is known to be held.
    pub cookie: BootCookie,
    /// Set if the last session was closed with everything durable while continuous.
    pub closed_continuous: bool,
}

/// Positions of the log and the map.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoreState {
    pub position: Position,
    pub chain: Chain,
    /// Highest LSN up to which checkpoints and the cleaner may work; never above the last
    /// `set_stable`.
    pub stable: Lsn,
    /// The log is kept (and [`ReplicaStore::fetch`] answers) for entries after this LSN.
    pub base: Lsn,
    /// The last View entry at or before `position`.
    pub last_view: Option<(Lsn, View)>,
    pub volume_blocks: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the pool is full")]
    Full,
    /// Records of replicas have no room, however much there is for data.
    #[error(
        "the pool's metadata ring is full: delete replicas or snapshots in this pool, or add pools"
    )]
    RingFull,
    #[error("the disk failed: {0}")]
    Io(IoFault),
    #[error("damaged data in the pool: {0}")]
    Damaged(&'static str),
    #[error("the store was asked for what its rules forbid: {0}")]
    Rule(&'static str),
    /// The answer needs reads that the caller need not wait for. Other threads make them. The call
    /// is made again once the driver reports the ticket with [`super::ReplicaEvent::Fetched`]. Only
    /// calls that say so answer this.
    #[error("the answer waits for the disk")]
    Pending(FetchTicket),
}

impl StoreError {
    /// Returns true if the pool lacks room, for data or for records. Its disk is as good as before.
    pub fn is_lack_of_room(&self) -> bool {
        matches!(self, StoreError::Full | StoreError::RingFull)
    }

    /// Returns true if the disk refused to read. Unlike a refused write this loses nothing, and it
    /// may be transient.
    pub fn is_refused_read(&self) -> bool {
        matches!(self, StoreError::Io(fault) if fault.operation == "read")
    }
}

/// An I/O error without its host types, so that stores can be simulated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{operation} at {offset}: {}", std::io::Error::from_raw_os_error(*.errno))]
pub struct IoFault {
    /// "read", "write", "sync", …
    pub operation: &'static str,
    pub offset: u64,
    pub errno: i32,
}

/// A chunk of an increment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PullChunk {
    pub slots: Vec<Slot>,
    /// LBA of the next chunk; `None` at the end of the view.
    pub cursor: Option<u64>,
    /// State of the view, with its last chunk.
    pub end: Option<Box<IncrementEnd>>,
}

/// Work that changes what a replica holds, and reads a part of its map for that.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Upcoming<'a> {
    /// [`ReplicaStore::increment_begin`] from this LSN.
    Begin { from: Lsn },
    /// [`ReplicaStore::increment_feed`] of these slots.
    Feed { slots: &'a [Slot] },
    /// [`ReplicaStore::increment_cut`] or [`ReplicaStore::increment_prepare`].
    Merge,
    /// [`ReplicaStore::repair`] of the block at this LBA.
    Repair { view: ReadView, lba: u64 },
    /// [`ReplicaStore::mend`] of so many blocks from this LBA on.
    Mend { view: ReadView, lba: u64, blocks: u32 },
}

pub trait ReplicaStore {
    fn identity(&self) -> &ReplicaIdentity;
    fn meta(&self) -> &ReplicaMeta;
    /// Stores the small state; durable with the next requested sync. Has room even in a full pool;
    /// `RingFull` only where the pool's metadata ring itself has none.
    fn put_meta(&mut self, meta: ReplicaMeta) -> Result<(), StoreError>;

    fn state(&self) -> StoreState;
    /// The newest [`quoin_types::message::EPOCH_TABLE_MAX`] epochs of the history, oldest first.
    fn epoch_table(&self) -> Vec<EpochEnd>;
    /// Clients of the volume at the end of the log.
    fn clients(&self) -> ClientTable;
    fn snapshots(&self) -> Vec<SnapshotInfo>;
    /// Returns the heads of [`ReplicaStore::snapshots`], in their order.
    fn snapshot_heads(&self) -> Vec<SnapshotHead>;

    /// Appends entries that follow `state().position` without a gap; their chains must continue
    /// `state().chain`. One call is one batch on disk. If the last View before the call has
    /// `durability: media`, the batch may stay in process memory until a sync that began later, and
    /// entries appended after it (after a truncation too) may be lost with it: the caller must not
    /// acknowledge any of them as applied before. Snapshot, DeleteSnapshot (of an unknown id:
    /// nothing to do), Revert and Resize take effect here. A Revert gives every block whose version
    /// is above its snapshot's LSN the snapshot's content, with the Revert's LSN as version; the
    /// size stays. Where too many of them wait to be merged into the map, the next one is refused
    /// with `Full`, and fits later.
    fn append(&mut self, entries: &[SharedEntry]) -> Result<(), StoreError>;
    /// Sets the epoch before which entries belong to the history that an open found, and are no new
    /// writes of a client. In a full pool they may use a part of its reserve: IO can wait for them,
    /// and space is freed only by what becomes stable, which waits for IO to start.
    fn owe_before(&mut self, epoch: Epoch);
    /// Removes all entries after `keep`; `keep` below stable is refused with `Rule`. Durable with
    /// the next requested sync.
    fn truncate(&mut self, keep: Lsn) -> Result<(), StoreError>;
    /// Permits everything ≤ `stable` to be merged, cleaned and reused from now on. Never goes back.
    fn set_stable(&mut self, stable: Lsn);
    fn request_sync(&mut self) -> SyncTicket;

    /// Returns slots covering exactly `[lba, lba + blocks)` in order. A block that fails its
    /// checksum is [`quoin_types::message::Content::Bad`], never an error and never wrong bytes.
    /// Without `want_data` the blocks themselves are not read and data slots come with empty bytes.
    fn read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError>;

    /// Reads like [`ReplicaStore::read`], but does not wait for the disk: `Pending` where what is
    /// needed is in no cache. `out` is as it was then. The call may be made again at any time, with
    /// the state of the store as it is by then.
    fn try_read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.read(view, lba, blocks, want_data, out)
    }

    /// Compares blocks of a view with their checksums on media, bypassing caches, and reports them:
    /// slots that cover a prefix of the range, data without bytes, until about `bytes_max` of data
    /// were read. `note`: bad copies are recorded as by any read, so that another copy is
    /// requested.
    fn verify(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError>;

    /// Compares like [`ReplicaStore::verify`], but answers `Pending` instead of waiting for the disk;
    /// `out` is as it was then.
    fn try_verify(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.verify(view, lba, blocks, bytes_max, note, out)
    }

    /// Returns entries after `after` in order, about `bytes_max` of them; `None` if the log starts
    /// later.
    fn fetch(&mut self, after: Lsn, bytes_max: u32)
    -> Result<Option<Vec<SharedEntry>>, StoreError>;

    /// Reads like [`ReplicaStore::fetch`], but answers `Pending` instead of waiting for the disk.
    fn try_fetch(
        &mut self,
        after: Lsn,
        bytes_max: u32,
    ) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        self.fetch(after, bytes_max)
    }

    /// Returns slots of `view` with `version > from`, holes included, in LBA order, starting at
    /// `cursor`. `Ok(None)`: the view does not exist. A pull of [`ReadView::Base`] at cursor 0 pins
    /// the base for `session` until its last chunk, the next pull of it, or
    /// [`ReplicaStore::unpin`]. Without `want_data` the blocks are not read and data slots come with
    /// empty bytes.
    fn pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError>;
    /// Reads like [`ReplicaStore::pull`], but answers `Pending` instead of waiting for the disk.
    fn try_pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError> {
        self.pull(session, view, from, cursor, bytes_max, want_data)
    }
    /// Releases what a session that is over had pinned, the increment that it waited to begin, and
    /// the calls that waited for the disk.
    fn unpin(&mut self, session: u64);

    /// Looks up what this work reads, and changes nothing. `Pending` where the disk does not have it
    /// at hand: the call is made again then, and after it the work waits for no read of what was
    /// looked up and is still cached. Any other error is left to the work.
    fn look_ahead(&mut self, _upcoming: Upcoming<'_>) -> Result<(), StoreError> {
        Ok(())
    }

    /// Returns a shadow left by an interrupted increment: rebuild id, `from`, and the next LBA. Any
    /// entry that is appended ends the shadow, prepared or not: a later flip is refused with
    /// `Rule`.
    fn shadow(&self) -> Option<(u64, Lsn, u64)>;
    /// Returns the LSN of the last snapshot that the shadow is complete for, or its start.
    fn shadow_cut(&self) -> Option<Lsn>;
    /// Starts a shadow on top of the state at `from` (`from` = 0 starts empty); the same rebuild id
    /// resumes. `from` above stable is refused with `Rule`. `Ok(false)`: the log up to `from` is
    /// not merged into the map yet. The call did one bounded step of that; the caller repeats it
    /// until it returns true, or calls [`ReplicaStore::unpin`] for its session.
    fn increment_begin(&mut self, rebuild: u64, from: Lsn) -> Result<bool, StoreError>;
    /// Adds one part of an increment, as long as an answer to a pull may be; a longer one is
    /// refused with `Rule`.
    fn increment_feed(
        &mut self,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
    ) -> Result<(), StoreError>;
    fn increment_cut(
        &mut self,
        rebuild: u64,
        snapshot: SnapshotInfo,
        head: &CutHead,
    ) -> Result<(), StoreError>;
    /// First half of the commit: everything of the shadow is written and waits for a sync.
    fn increment_prepare(&mut self, rebuild: u64, end: &IncrementEnd) -> Result<(), StoreError>;
    /// Second half, after that sync: flips, atomically and durably with the next sync. The log is
    /// empty then; position, stable and base are `end.position`. Snapshots that `end` does not list
    /// are deleted.
    fn increment_flip(&mut self, rebuild: u64) -> Result<(), StoreError>;

    /// Replaces a bad copy in `view` (live, or a snapshot); `Ok(false)` if its slot no longer has
    /// this version, or there is no such view.
    fn repair(
        &mut self,
        view: ReadView,
        lba: u64,
        version: Lsn,
        crc: u32,
        data: &bytes::Bytes,
    ) -> Result<bool, StoreError>;
    /// Rebuilds the damaged map of a range from a peer's slots of the same view that cover it
    /// exactly, as of a position ≤ this replica's own. `Ok(true)` also if the map is intact by now;
    /// `Ok(false)` if it cannot be mended now. Blocks that were written since the base stay bad in
    /// the base, never wrong.
    fn mend(&mut self, view: ReadView, lba: u64, slots: &[Slot]) -> Result<bool, StoreError>;
}
