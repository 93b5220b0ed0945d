//! The vocabulary of the data plane: identifiers, entries, membership, messages, and the block
//! interface of a volume.
//!
//! Every crate of the data plane uses these types; none of them makes decisions. Names are those of
//! `docs/replication.md`. Decoding accepts hostile bytes: it fails with [`codec::Malformed`], and
//! never panics.

pub mod block;
pub mod client;
pub mod codec;
pub mod entry;
pub mod history;
pub mod ids;
pub mod key_map;
pub mod membership;
pub mod message;
pub mod mutant;
pub mod term;
pub mod time;

pub use client::{ClientTable, Origin, Part};
pub use entry::{Chain, Entry, EntryKind, View};
pub use ids::{
    BulkKey, ClientId, Epoch, GroupId, Incarnation, Lsn, PointId, PoolId, Position, ReplicaGuid,
    ReplicaId, SessionKey, SnapshotId, TermId, VolumeId,
};
pub use membership::{Desired, Durability, Member, Membership, Newcomer};
pub use term::Term;
pub use time::Time;

/// The internal block: the unit of checksums, versions and placement.
pub const BLOCK_SIZE: usize = 4096;
/// `log2(BLOCK_SIZE)`.
pub const BLOCK_SHIFT: u32 = 12;
/// Largest `Write` entry (1 MiB); longer client requests become several entries.
pub const WRITE_BLOCKS_MAX: u32 = 256;
/// Largest `Trim` or `Zero` entry (1 GiB).
pub const HOLE_BLOCKS_MAX: u32 = 1 << 18;
/// Blocks in one read of a replica, with data; a target requests fewer.
pub const READ_BLOCKS_MAX: u32 = 1024;
/// Blocks in one read without data.
pub const STATUS_BLOCKS_MAX: u32 = 1 << 16;
/// Largest volume: 2^44 blocks are 64 PiB, so an LBA always fits 44 bits.
pub const VOLUME_BLOCKS_MAX: u64 = 1 << 44;

/// Largest LSN that a peer may name, so that sums with it never overflow.
pub const LSN_MAX: Lsn = Lsn(1 << 62);
/// Largest epoch that a peer may name.
pub const EPOCH_MAX: Epoch = Epoch(1 << 62);
/// Limit of how far above the record's own epoch a target may request one. Promises of replicas can
/// be ahead of records restored from a backup, but by no more than the number of opens in between.
/// A hostile node must not use up the numbers.
pub const EPOCHS_AHEAD_MAX: u64 = 1 << 20;

/// CRC32C (Castagnoli), the checksum of every block.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}
