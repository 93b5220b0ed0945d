//! Free units, segments, and space that is given back.

pub mod bit_set;
pub mod freed;
pub mod ready;
pub mod segment_table;
pub mod segments;
pub mod table;
