//! What a replica needs of its storage. `quoin-store` implements it on files and devices, and
//! once more as a plain in-memory model that every property test compares with.
//!
//! All calls but syncing are answered at once: a write "returned" means that the kernel holds
//! the bytes (buffered write returned, or O_DIRECT write completed), never process memory. One
//! exception, for entries that count only once they are durable: [`ReplicaStore::append`].
//! Durability is asynchronous: [`ReplicaStore::request_sync`] gives a ticket, and the driver
//! reports [`super::ReplicaEvent::Synced`] once a sync that *began after* the request is done.

use quoin_types::entry::{Chain, SharedEntry, View};
use quoin_types::ids::{Epoch, Incarnation, Lsn, Position, ReplicaGuid, ReplicaId, VolumeId};
use quoin_types::membership::Membership;
use quoin_types::message::{EpochEnd, IncrementEnd, ReadView, Slot, SnapshotInfo};

/// Grows with every request; a completed ticket covers all smaller ones of the same pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SyncTicket(pub u64);

/// Identifies one boot of one host's kernel together with one identity of the pool's device.
/// Page-cache content survives exactly as long as the cookie stays equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct BootCookie(pub u128);

/// What a replica is: all but the volume's description is fixed when it is created.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReplicaIdentity {
    pub volume: VolumeId,
    pub replica: ReplicaId,
    pub guid: ReplicaGuid,
    /// The volume's name and parameters as the records had them last, opaque here, for recovery
    /// from pools alone.
    pub volume_spec: bytes::Bytes,
}

/// The small durable state beside the log, kept in the pool's metadata ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReplicaMeta {
    pub promised: Epoch,
    pub promised_incarnation: Incarnation,
    /// A session may have granted a lease that is not known to be over.
    pub session_open: bool,
    /// The longest lease granted under `promised`, in milliseconds.
    pub lease_ms: u32,
    pub membership: Membership,
    /// Counts for quorum: its data may be read and its acknowledgements counted.
    pub quorum: bool,
    /// Parts below stable were lost or are unreadable: not to be counted until rebuilt.
    pub damaged: bool,
    /// The boot under which everything applied is known to be held since.
    pub cookie: BootCookie,
    /// The last session was closed with everything durable while continuous.
    pub closed_continuous: bool,
}

/// Where the log and the map stand.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoreState {
    pub position: Position,
    pub chain: Chain,
    /// Highest LSN ≤ which folding and clean-up are allowed; never above what was `set_stable`.
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
    #[error("the disk failed: {0}")]
    Io(IoFault),
    #[error("damaged data in the pool: {0}")]
    Damaged(&'static str),
    #[error("the store was asked for what its rules forbid: {0}")]
    Rule(&'static str),
}

impl StoreError {
    /// The disk refused to read. Unlike a refused write it loses nothing, and it may pass.
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
    /// Where to go on; `None` at the end of the view.
    pub cursor: Option<u64>,
    /// At the end of the view: the state it is of.
    pub end: Option<Box<IncrementEnd>>,
}

pub trait ReplicaStore {
    fn identity(&self) -> &ReplicaIdentity;
    fn meta(&self) -> &ReplicaMeta;
    /// Durable with the next requested sync. Has room even in a full pool.
    fn put_meta(&mut self, meta: ReplicaMeta) -> Result<(), StoreError>;

    fn state(&self) -> StoreState;
    /// The newest [`quoin_types::message::EPOCH_TABLE_MAX`] epochs of the history, oldest first.
    fn epoch_table(&self) -> Vec<EpochEnd>;
    fn snapshots(&self) -> Vec<SnapshotInfo>;

    /// Appends entries that follow `state().position` without a gap; their chains must continue
    /// `state().chain`. One call is one batch on disk. Where the last View before the call says
    /// `durability: media`, the batch may stay in process memory until a sync that began later,
    /// and what is appended behind it (after a truncation too) may be lost with it: the caller
    /// says none of that to be applied before. Snapshot, DeleteSnapshot (of an unknown
    /// id: nothing to do), Revert and Resize take effect here.
    fn append(&mut self, entries: &[SharedEntry]) -> Result<(), StoreError>;
    /// Entries of epochs before this one are of the history that an open found, and not new ones
    /// of a client: where the pool is full they may take some of what it keeps in reserve. IO can
    /// wait for them, and only what is stable gives room, which waits for IO to start.
    fn owe_before(&mut self, epoch: Epoch);
    /// Removes all entries after `keep`; `keep` below stable is refused with `Rule`.
    /// Durable with the next requested sync.
    fn truncate(&mut self, keep: Lsn) -> Result<(), StoreError>;
    /// Everything ≤ `stable` may be folded, cleaned and reused from now on. Never goes back.
    fn set_stable(&mut self, stable: Lsn);
    fn request_sync(&mut self) -> SyncTicket;

    /// Slots covering exactly `[lba, lba + blocks)` in order. A block that fails its checksum is
    /// [`quoin_types::message::Content::Bad`], never an error and never wrong bytes. Without
    /// `want_data` the blocks themselves are not read and data slots come with empty bytes.
    fn read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError>;

    /// Compares live blocks with their checksums on media, past what is cached, and says what
    /// they are: slots that cover a prefix of the range, data without bytes, until about
    /// `bytes_max` of data were read. `note`: what is bad is remembered as any read would, so
    /// that another copy is asked for.
    fn verify(
        &mut self,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError>;

    /// Entries after `after` in order, about `bytes_max` of them; `None` if the log starts later.
    fn fetch(&mut self, after: Lsn, bytes_max: u32)
    -> Result<Option<Vec<SharedEntry>>, StoreError>;

    /// Slots of `view` with `version > from`, holes included, LBA order, from `cursor` on.
    /// `Ok(None)`: the view does not exist. A pull of [`ReadView::Base`] at cursor 0 pins the
    /// base for `session` until its last chunk, the next pull of it, or [`ReplicaStore::unpin`].
    fn pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
    ) -> Result<Option<PullChunk>, StoreError>;
    /// The session is over: what it had pinned, and the increment that it waited to begin.
    fn unpin(&mut self, session: u64);

    /// A shadow left by an interrupted increment: rebuild id, `from`, and the next LBA. An entry
    /// that is appended ends it, prepared or not: a flip behind that is refused with `Rule`.
    fn shadow(&self) -> Option<(u64, Lsn, u64)>;
    /// Starts a shadow on top of the state at `from` (`from` = 0 starts empty); the same rebuild
    /// id resumes. `from` above stable is refused with `Rule`. `Ok(false)`: the log up to `from` is
    /// not folded yet. One bounded step of that was done, and the caller asks again until it has
    /// its answer or [`ReplicaStore::unpin`]s its session.
    fn increment_begin(&mut self, rebuild: u64, from: Lsn) -> Result<bool, StoreError>;
    /// One part of an increment, as long as an answer to a pull may be; a longer one is refused with
    /// `Rule`.
    fn increment_feed(
        &mut self,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
    ) -> Result<(), StoreError>;
    fn increment_cut(&mut self, rebuild: u64, snapshot: SnapshotInfo) -> Result<(), StoreError>;
    /// First half: everything of the shadow is written and waits for a sync.
    fn increment_prepare(&mut self, rebuild: u64, end: &IncrementEnd) -> Result<(), StoreError>;
    /// After that sync: flips, atomically and durably with the next sync. The log is empty then,
    /// position, stable and base are `end.position`. Snapshots that `end` does not list are gone.
    fn increment_flip(&mut self, rebuild: u64) -> Result<(), StoreError>;

    /// Replaces a bad copy; `Ok(false)` if the live slot no longer has this version.
    fn repair(
        &mut self,
        lba: u64,
        version: Lsn,
        crc: u32,
        data: &bytes::Bytes,
    ) -> Result<bool, StoreError>;
    /// Rebuilds the damaged map of a stretch from a peer's live slots that cover it exactly, as
    /// of a position ≤ this replica's own; `Ok(true)` also if it is whole there by now, `Ok(false)`
    /// if it cannot be mended now. Blocks that were written since the base stay bad in the base,
    /// never wrong.
    fn mend(&mut self, lba: u64, slots: &[Slot]) -> Result<bool, StoreError>;
}
