pub mod client;
pub mod dial;
pub mod listen;
pub mod metrics;
mod notes;
pub mod shard;
pub mod tokens;
