//! Small durable state outside the segments.

pub mod mark;
pub mod ring;
pub mod state;
pub mod tickets;
