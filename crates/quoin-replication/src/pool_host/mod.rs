//! Decisions of a pool's process, pure: the driver in `quoin-pool` feeds them, and the simulator
//! drives the same code.
//!
//! Each module is one subject with a state of its own; none of them knows another. Sockets,
//! threads, files and the disk stay in the driver, which does what these decide.

pub mod access;
pub mod answers;
pub mod background;
pub mod copying;
pub mod holdings;
pub mod recognition;
pub mod repairs;
pub mod restart;
pub mod round;
pub mod scrub;
pub mod turns;
