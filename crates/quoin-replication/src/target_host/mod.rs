//! Decisions of a target's process, pure: the driver in `quoin-target` feeds them, and the
//! simulator drives the same code.
//!
//! Each module is one subject with a state of its own; none of them knows another. Sockets,
//! threads and clients stay in the driver.

pub mod dial;
pub mod memory;
pub mod orders;
pub mod round;
pub mod throttle;
