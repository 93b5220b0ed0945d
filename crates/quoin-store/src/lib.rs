//! The replica store: many replicas in one preallocated file or raw block device.
//!
//! A [`ReplicaPool`] holds replicas; each is used through
//! [`quoin_replication::replica::store::ReplicaStore`]. The [`model`] is the plain in-memory
//! reference. Everything goes through [`disk::Disk`]: no clock, no threads, no randomness, so that
//! a simulated disk makes the whole store deterministic. The format is described byte by byte in
//! `docs/store.md`.
//!
//! | room | what it holds |
//! |---|---|
//! | `format` | structures on disk, byte by byte: nothing else writes or reads offsets |
//! | `disk` | the file or device below, and the kernel's cache over it |
//! | `metadata` | the metadata ring and the durable state that its records add up to |
//! | `space` | free units, segments, space that is given back |
//! | `log` | entries above the folded map, the state that they leave beside blocks |
//! | `map` | the copy-on-write map from LBA to block |
//! | `replica` | one replica: its map, the log above it, how the two answer together |
//! | `clones` | replicas that show a snapshot of another one where they have no block of their own |
//! | `background` | what is done beside requests: checkpoints, cleaning, scrub |
//! | `rebuild` | increments, sent and received |
//! | `recovery` | opening a replica after a stop or a crash |

mod background;
mod clones;
mod core;
mod format;
mod log;
mod map;
mod metadata;
mod pool;
mod rebuild;
mod recovery;
mod replica;
mod space;
mod testing;

pub mod api;
pub mod disk;
pub mod error;
pub mod offline;

pub use api::{CloneSource, Cloned, Due, ReplicaPool, give_up_continuity};
pub use background::scrub::{MetadataScrubbed, ScrubAt, ScrubStage, Scrubbed};
pub use core::{BadBlock, PoolOptions};
pub use disk::cache_identity::{CacheIdentity, Mounted};
pub use disk::contents;
pub use disk::file::{Exposed, FileDisk, FileDiskError};
pub use disk::{Disk, Medium};
pub use error::PoolError;
pub use format::superblock::FormatOptions;
pub use pool::{Handle, Pool, PoolStats, ReplicaStats};
pub use testing::memory_disk::MemoryDisk;
pub use testing::{memory_disk, model};
