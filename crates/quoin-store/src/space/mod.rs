//! Free units, segments, and space that is given back.

pub mod freed;
pub mod ready;
pub mod segments;
