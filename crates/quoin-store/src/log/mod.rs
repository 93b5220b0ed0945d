//! Entries above the folded map, and the state that they leave beside blocks.

pub mod flushes;
pub mod history;
pub mod memtable;
pub mod memtable_tree;
