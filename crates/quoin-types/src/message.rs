//! The data-plane messages between a target and one replica.
//!
//! Messages are plain values; `quoin-wire` encodes them. A replica handles the messages of one
//! connection strictly in order, so an `Append` sent before a `Read` is applied before it. Rebuild
//! data uses a second connection of the session, the bulk connection. Between the two connections
//! there is no order except the one that the messages themselves state (`docs/replication.md`).

use bytes::Bytes;

use crate::client::ClientTable;
use crate::entry::{Chain, SharedEntry, View};
use crate::ids::{Epoch, Lsn, Position, ReplicaGuid, ReplicaId, SnapshotId, VolumeId};
use crate::membership::Membership;
use crate::{BLOCK_SIZE, LSN_MAX, VOLUME_BLOCKS_MAX, crc32c};

/// The target's clock when it sent a message, echoed by the replica: only the target reads it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Ping(pub u64);

/// Number of a request within its session.
pub type RequestId = u64;

/// State of the volume that a read or an increment refers to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReadView {
    Live,
    Snapshot(SnapshotId),
    /// The replica's base: its state at [`OpenAck::base`] or later, pinned by the pull.
    Base,
}

/// One range of blocks in an increment, a digest or a read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slot {
    pub lba: u64,
    /// Length of the range: holes may span many blocks; data slots are one block.
    pub blocks: u32,
    /// LSN of the entry that wrote (or trimmed) the range. 0: never written.
    pub version: Lsn,
    pub content: Content,
}

impl Slot {
    /// Returns true if the slot can be a part of an increment: within any volume, with a version
    /// that `newest` allows, and with bytes that match their checksum.
    pub fn is_good(&self, newest: Lsn) -> bool {
        let whole = match &self.content {
            Content::Hole => self.blocks > 0,
            Content::Bad => false,
            Content::Data { crc, data } => {
                self.blocks == 1 && data.len() == BLOCK_SIZE && crc32c(data) == *crc
            }
        };
        let end = self.lba.checked_add(self.blocks.into());
        whole && self.version <= newest && end.is_some_and(|end| end <= VOLUME_BLOCKS_MAX)
    }
}

/// Range of blocks that changed between two snapshots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangedRange {
    pub lba: u64,
    pub blocks: u64,
    /// The range is a hole in the newer snapshot.
    pub hole: bool,
}

/// Sum of what an increment was fed so far, so that its end can state how much that must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FedSum {
    pub slots: u64,
    /// CRC32C over all slots in order; a block enters with its checksum.
    pub checksum: u32,
}

impl FedSum {
    pub fn add(&mut self, slots: &[Slot]) {
        for slot in slots {
            let (is_data, crc) = match &slot.content {
                Content::Data { crc, .. } => (1, *crc),
                Content::Hole | Content::Bad => (0, 0),
            };
            let mut bytes = [0; 29];
            bytes[..4].copy_from_slice(&self.checksum.to_le_bytes());
            bytes[4..12].copy_from_slice(&slot.lba.to_le_bytes());
            bytes[12..16].copy_from_slice(&slot.blocks.to_le_bytes());
            bytes[16..24].copy_from_slice(&slot.version.0.to_le_bytes());
            bytes[24] = is_data;
            bytes[25..].copy_from_slice(&crc.to_le_bytes());
            self.checksum = crc32c(&bytes);
            self.slots += 1;
        }
    }
}

/// Returns true if the slots cover exactly the range, in order; only holes span more than one
/// block.
pub fn covers(slots: &[Slot], lba: u64, blocks: u32) -> bool {
    let mut at = lba;
    for slot in slots {
        let single = matches!(slot.content, Content::Hole) || slot.blocks == 1;
        if slot.lba != at || slot.blocks == 0 || !single {
            return false;
        }
        at += u64::from(slot.blocks);
    }
    at == lba + u64::from(blocks)
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    Hole,
    /// Exactly 4096 bytes whose CRC32C is `crc`; no bytes where the request wanted none.
    Data {
        crc: u32,
        data: Bytes,
    },
    /// The replica has this version, but its copy fails the checksum.
    Bad,
}

/// Damage that a replica found in its own copy, by scrub or by the cleaner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BadCopy {
    pub lba: u64,
    /// 1: the bytes of this block are bad. More: the map of this range is bad, and so all of its
    /// blocks; the range may reach beyond the volume's end.
    pub blocks: u32,
    /// Version of the block; in a range, that of the newest block.
    pub version: Lsn,
    /// The snapshot that shows it; `None`: the live view does.
    pub snapshot: Option<SnapshotId>,
}

impl BadCopy {
    /// Limit of blocks in one report.
    pub const BLOCKS_MAX: u32 = crate::WRITE_BLOCKS_MAX;
}

/// One row of the epoch table: the last entry of an epoch that the replica holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EpochEnd {
    pub epoch: Epoch,
    /// First and last LSN of the epoch in this replica's log.
    pub first: Lsn,
    pub last: Lsn,
    /// Chain at `last`.
    pub chain: Chain,
}

/// Limit of epoch-table rows in an `OpenAck` (the newest ones).
pub const EPOCH_TABLE_MAX: usize = 256;

/// Snapshot, as a replica holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotInfo {
    pub id: SnapshotId,
    pub lsn: Lsn,
    pub hidden: bool,
    /// Size of the volume at the snapshot, in blocks.
    pub blocks: u64,
}

impl SnapshotInfo {
    /// Returns true for the boundary of a rebuild, which exists for that rebuild alone. Other
    /// hidden snapshots have an owner.
    pub fn is_boundary(&self) -> bool {
        self.hidden && self.id.is_of_boundary()
    }
}

/// Epoch and chain of the history at a snapshot's LSN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SnapshotHead {
    pub epoch: Epoch,
    pub chain: Chain,
}

/// Head of the history at a snapshot, as an increment carries it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CutHead {
    pub head: SnapshotHead,
    pub last_view: Option<(Lsn, View)>,
}

/// Limit of snapshots of one volume.
pub const SNAPSHOTS_MAX: usize = 4096;

impl ToReplica {
    /// Returns true for messages of a rebuild, which a bulk connection carries.
    pub fn is_copying(&self) -> bool {
        matches!(
            self,
            ToReplica::Pull { .. }
                | ToReplica::IncrementBegin { .. }
                | ToReplica::IncrementFeed { .. }
                | ToReplica::IncrementCut { .. }
                | ToReplica::IncrementCommit { .. }
        )
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ToReplica {
    /// First message of a session.
    Open {
        volume: VolumeId,
        replica: ReplicaId,
        guid: ReplicaGuid,
        /// Membership that the epoch was granted with; the replica keeps a durable copy.
        membership: Membership,
        lease_ms: u32,
    },
    /// Removes every entry after `keep`. Never executed below stable. Always the first message
    /// after the `OpenAck` of a replica that is going to be fed, also where nothing is removed.
    Truncate {
        keep: Lsn,
        /// The target's last LSN when this session began. A View above it makes the replica
        /// continuous; an older View received while catching up does not.
        tip: Lsn,
    },
    Append {
        entries: Vec<SharedEntry>,
        stable: Lsn,
        /// Requests an immediate sync (FUA, `durability: media`), without a `Sync` of its own.
        sync: bool,
        ping: Ping,
    },
    /// Makes everything up to `lsn` durable; the replica confirms it.
    Sync { lsn: Lsn, ping: Ping },
    /// Renews the lease and passes on stable.
    Ping { stable: Lsn, ping: Ping },
    Read {
        id: RequestId,
        view: ReadView,
        lba: u64,
        blocks: u32,
        /// The replica answers once it has applied this LSN.
        after: Lsn,
        /// False: `Content::Data` comes with its checksum but without its bytes (block status,
        /// comparison of copies).
        want_data: bool,
        ping: Ping,
    },
    /// Requests log entries after `after`, about `bytes_max` at most.
    Fetch { id: RequestId, after: Lsn, bytes_max: u32 },
    /// Requests slots of `view` with `from < version`, starting at LBA `cursor`.
    Pull {
        id: RequestId,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        /// False: data slots come without bytes.
        want_data: bool,
    },
    /// First message of a bulk connection. From now on, requests of rebuilds for this session come
    /// by it, and no longer by one with a lower number.
    OpenBulk { number: u64 },
    /// Starts (or, with the same `rebuild` id, resumes) a shadow whose start is `from`. It also states
    /// that everything up to `from` is stable. Messages of increments come by the bulk connection
    /// alone.
    IncrementBegin { rebuild: u64, from: Lsn },
    IncrementFeed {
        rebuild: u64,
        slots: Vec<Slot>,
        /// Completeness of the shadow within the view being fed: the next LBA.
        cursor: u64,
        /// Completeness required before this message.
        after: u64,
    },
    /// Ends a snapshot: all data fed since the last cut is the whole of this snapshot.
    IncrementCut {
        rebuild: u64,
        snapshot: SnapshotInfo,
        /// The history's head there.
        head: Box<CutHead>,
    },
    /// Verifies, syncs, and flips atomically to this state.
    IncrementCommit {
        rebuild: u64,
        to: Box<IncrementEnd>,
        /// Sum of all data fed since the shadow was last begun or resumed.
        fed: FedSum,
    },
    /// Replaces the bad copy of a block, only if the replica holds the same version.
    Repair {
        lba: u64,
        version: Lsn,
        crc: u32,
        data: Bytes,
        /// The snapshot whose block it is; `None`: the live view's.
        snapshot: Option<SnapshotId>,
    },
    /// Carries another member's slots for a range whose map is damaged, as of its LSN `at`: those
    /// of the snapshot, or the live ones. A replica that has not applied as much, or whose map is
    /// intact there, ignores it.
    Mend { lba: u64, blocks: u32, at: Lsn, slots: Vec<Slot>, snapshot: Option<SnapshotId> },
    /// Compares blocks of a view with their checksums on media and reports the result for a prefix of
    /// the range, about `bytes_max` of data.
    Verify {
        id: RequestId,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        /// The replica answers once it has applied this LSN.
        after: Lsn,
        /// True: bad copies are requested from the other members. False: they are only reported.
        repair: bool,
        ping: Ping,
        /// The snapshot whose blocks are compared; `None`: the live ones.
        snapshot: Option<SnapshotId>,
    },
    /// Ends the session cleanly; everything is durable.
    Close,
}

/// Limit of blocks in one [`ToReplica::Verify`], mostly for holes.
pub const VERIFY_BLOCKS_MAX: u32 = 1 << 16;

/// The state that an increment ends in: everything that a replica knows beside its blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IncrementEnd {
    pub position: Position,
    pub chain: Chain,
    pub epoch_table: Vec<EpochEnd>,
    pub last_view: Option<(Lsn, View)>,
    pub volume_blocks: u64,
    /// Snapshots that exist at `position`; the receiver drops any others.
    pub snapshots: Vec<SnapshotInfo>,
    /// Clients of the volume at `position`.
    pub clients: ClientTable,
}

impl IncrementEnd {
    /// Checks the shape that every end of an increment must have; `epoch` is that of the session.
    /// The error names the part that does not fit.
    pub fn check(&self, epoch: Epoch) -> Result<(), &'static str> {
        check_history(self.position, self.chain, &self.epoch_table, epoch)?;
        if self.volume_blocks == 0 || self.volume_blocks > VOLUME_BLOCKS_MAX {
            return Err("an impossible volume size");
        }
        if self.snapshots.len() > SNAPSHOTS_MAX {
            return Err("more snapshots than a volume may have");
        }
        let last = self.position.lsn;
        if self.last_view.as_ref().is_some_and(|(lsn, _)| *lsn > last)
            || self.snapshots.iter().any(|s| s.lsn > last)
            || !self.clients.is_within(last)
        {
            return Err("a View, snapshot or request beyond the history's end");
        }
        Ok(())
    }
}

/// Checks a position and the epoch table that leads to it.
fn check_history(
    position: Position,
    chain: Chain,
    table: &[EpochEnd],
    epoch: Epoch,
) -> Result<(), &'static str> {
    if position.epoch > epoch || position.lsn > LSN_MAX {
        return Err("an impossible position");
    }
    let ordered = table.iter().all(|row| row.first <= row.last)
        && table.windows(2).all(|w| w[0].epoch < w[1].epoch && w[0].last < w[1].first);
    if table.len() > EPOCH_TABLE_MAX || !ordered {
        return Err("an epoch table out of order");
    }
    let end = table.last().map(|row| (row.epoch, row.last, row.chain));
    let wanted = (position.lsn > Lsn::ZERO).then_some((position.epoch, position.lsn, chain));
    if end == wanted { Ok(()) } else { Err("an epoch table that does not end at the position") }
}

impl OpenAck {
    /// Checks the shape that every answer must have; `epoch` is that of the session. The error
    /// names the part that does not fit. For a replica that reports itself damaged only the bounds
    /// are checked: the rest is not used.
    pub fn check(&self, epoch: Epoch) -> Result<(), &'static str> {
        let last = self.position.lsn;
        if self.volume_blocks > VOLUME_BLOCKS_MAX {
            return Err("an impossible volume size");
        }
        if self.heads.len() != self.snapshots.len() {
            return Err("heads of other snapshots");
        }
        if self.snapshots.len() > SNAPSHOTS_MAX || self.epoch_table.len() > EPOCH_TABLE_MAX {
            return Err("more snapshots or epochs than a volume may have");
        }
        if self.damaged {
            let possible = self.position.epoch <= epoch && last <= LSN_MAX;
            return if possible { Ok(()) } else { Err("an impossible position") };
        }
        check_history(self.position, self.chain, &self.epoch_table, epoch)?;
        let behind = [self.stable, self.durable, self.base];
        if behind.iter().any(|lsn| *lsn > last)
            || self.base > self.stable
            || self.last_view.as_ref().is_some_and(|(lsn, _)| *lsn > last)
            || self.snapshots.iter().any(|s| s.lsn > last)
            || !self.clients.is_within(last)
        {
            return Err("a state beyond the history's end");
        }
        Ok(())
    }
}

/// A replica's report of its own state when a target opens it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenAck {
    pub position: Position,
    pub chain: Chain,
    pub epoch_table: Vec<EpochEnd>,
    pub stable: Lsn,
    pub durable: Lsn,
    /// Base: the map contains everything up to here; the log holds everything after.
    pub base: Lsn,
    pub last_view: Option<(Lsn, View)>,
    pub continuous: bool,
    pub membership_version: u64,
    pub quorum: bool,
    pub damaged: bool,
    pub volume_blocks: u64,
    pub room: RoomGrant,
    pub snapshots: Vec<SnapshotInfo>,
    /// A shadow left by an interrupted rebuild: its id, its start, and the next LBA.
    pub shadow: Option<(u64, Lsn, u64)>,
    /// LSN of the last snapshot that the shadow is complete for; its start if there is none. The
    /// next LBA counts within the view after it.
    pub shadow_cut: Option<Lsn>,
    /// Heads of the snapshots, in their order.
    pub heads: Vec<SnapshotHead>,
    /// Clients of the volume at `position`.
    pub clients: ClientTable,
}

/// Reason for which a replica refused a session or ended it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    #[error("a newer epoch is promised")]
    Fenced,
    #[error("no such replica here (wrong volume, replica id or GUID)")]
    Unknown,
    #[error("the GUID is retired")]
    Retired,
    #[error("the pool has no room")]
    Full,
    #[error("the disk failed")]
    Io,
    #[error("the log is damaged")]
    Damaged,
    #[error("the message breaks the protocol")]
    Protocol,
    #[error("the pool is shutting down")]
    Stopping,
}

/// Entries of a client that a pool has room for, each including those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Takes {
    /// None. What frees space, opens and heals has room all the same.
    Nothing,
    /// Trims and zeroes.
    Holes,
    Writes,
}

/// Room that a pool grants to one replica: entries of clients may be sequenced while those that the
/// replica has not applied stay within `share_blocks`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoomGrant {
    pub takes: Takes,
    /// Blocks of data, and one for each entry.
    pub share_blocks: u32,
}

impl RoomGrant {
    /// All that there can be.
    pub const UNBOUNDED: RoomGrant = RoomGrant { takes: Takes::Writes, share_blocks: u32::MAX };
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FromReplica {
    OpenAck(Box<OpenAck>),
    Refuse {
        promised: Epoch,
        failure: Failure,
    },
    Truncated {
        position: Position,
        chain: Chain,
    },
    /// Cumulative: everything ≤ `applied` is in the kernel, everything ≤ `durable` on media.
    Applied {
        applied: Lsn,
        durable: Lsn,
        ping: Ping,
    },
    Data {
        id: RequestId,
        /// The replica's applied LSN when it read.
        at: Lsn,
        slots: Vec<Slot>,
        ping: Ping,
    },
    /// Answer to [`ToReplica::Verify`]; data slots carry no bytes.
    Verified {
        id: RequestId,
        /// The replica's applied LSN when it read.
        at: Lsn,
        slots: Vec<Slot>,
        ping: Ping,
    },
    Fetched {
        id: RequestId,
        entries: Vec<SharedEntry>,
        /// The log does not reach back to `after`: the target uses an increment.
        gone: bool,
    },
    Pulled {
        id: RequestId,
        slots: Vec<Slot>,
        /// The next LBA to pull from; `None` at the end of the view.
        cursor: Option<u64>,
        /// State of the view, with the last chunk of [`ReadView::Base`] or a snapshot.
        end: Option<Box<IncrementEnd>>,
        /// The view does not exist here (any more).
        gone: bool,
    },
    /// The shadow is durable up to here (credit for the sender).
    IncrementFed {
        rebuild: u64,
        cursor: u64,
    },
    /// Answer to [`ToReplica::IncrementBegin`]: how far the shadow is complete within the view that is
    /// being fed.
    IncrementBegun {
        rebuild: u64,
        cursor: u64,
        /// As [`OpenAck::shadow_cut`].
        cut: Lsn,
    },
    /// Always sent by the session's own connection: what follows the flip uses that one.
    IncrementDone {
        rebuild: u64,
        position: Position,
    },
    Repaired {
        lba: u64,
        version: Lsn,
        done: bool,
    },
    /// Answer to [`ToReplica::Mend`].
    Mended {
        lba: u64,
        blocks: u32,
        done: bool,
    },
    /// The pool had no room for the entries after `applied`: they were not taken. None is taken
    /// until the next one in order is sent again.
    NoRoom {
        applied: Lsn,
    },
    /// Room of the pool, at each change since the OpenAck.
    Room(RoomGrant),
    /// The replica found its own copy bad and requests another member's.
    BadCopy(BadCopy),
    Closed,
    /// The session is over; the replica may be opened again.
    Failed(Failure),
}
