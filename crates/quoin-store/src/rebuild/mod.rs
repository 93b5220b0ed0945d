//! Increments, sent and received.

pub mod shadow;
