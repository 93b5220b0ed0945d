//! The map from LBA to block.

pub mod node_cache;
pub mod tree;
