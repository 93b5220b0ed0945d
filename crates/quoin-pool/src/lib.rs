//! A pool: the storage of one host and the replicas in it, served to targets.
pub mod accept;
pub mod assignment;
pub mod metrics;
pub mod shard;
pub mod syncer;
