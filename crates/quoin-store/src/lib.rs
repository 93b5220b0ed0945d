//! The replica store: many replicas in one preallocated file or raw block device.
//!
//! A [`ReplicaPool`] holds replicas; each is used through
//! [`quoin_replication::replica::store::ReplicaStore`]. The [`model`] is the plain in-memory
//! reference. Everything goes through [`disk::Disk`]: no clock, no threads, no randomness, so that
//! a simulated disk makes the whole store deterministic. The format is described byte by byte in
//! `docs/store.md`.

mod background;
mod batch;
mod bit_set;
mod cache_identity;
mod checkpoint;
mod clean;
mod core;
mod fill;
mod freed;
mod held;
mod layout;
mod maintenance;
mod mark;
mod memtable;
mod moved;
mod node;
mod pool;
mod read_buffer;
mod ready;
#[cfg(test)]
mod recorded;
mod records;
mod recount;
mod recover;
mod replica;
mod ring;
mod scrub;
mod segment_table;
mod segments;
mod shadow;
mod standing;
mod table;
mod tree;

pub mod api;
pub mod contents;
pub mod disk;
pub mod error;
pub mod file_disk;
pub mod history;
pub mod memory_disk;
pub mod model;
pub mod offline;

pub use api::{Due, ReplicaPool, give_up_continuity};
pub use cache_identity::{CacheIdentity, Mounted};
pub use core::{BadBlock, PoolOptions};
pub use disk::Disk;
pub use error::PoolError;
pub use file_disk::{Exposed, FileDisk, FileDiskError};
pub use layout::FormatOptions;
pub use memory_disk::MemoryDisk;
pub use pool::{Handle, Pool, PoolStats, ReplicaStats};
pub use scrub::{ScrubAt, Scrubbed};
