//! The map from LBA to block.

pub mod tree;
