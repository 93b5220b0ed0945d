//! Structures on disk.

pub mod batch;
pub mod node;
pub mod record;
#[cfg(test)]
mod recorded;
pub mod superblock;
