//! Free units, segments, and space that is given back; the names of blocks that clean-up moves.

pub mod batches;
pub mod bit_set;
pub mod freed;
pub mod logical;
pub mod ready;
pub mod segment_table;
pub mod segments;
pub mod shares;
pub mod table;
pub mod uses;
