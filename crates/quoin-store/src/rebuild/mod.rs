//! Increments, sent and received.

pub mod sending;
pub mod shadow;
