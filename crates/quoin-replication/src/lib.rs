//! Replication as pure state machines: no I/O, no clock, no threads, no async.
//!
//! [`primary::Primary`] is the one writer of a volume, [`replica::Replica`] one copy of it.
//! [`pool_host`] and [`target_host`] are what the processes around them decide.
//! Both are driven as `on(now, event, &mut actions)`: time and randomness are arguments, so
//! the simulator and the real drivers run the very same code. The protocol is
//! `docs/replication.md`; names here are its names, and the types that cross the crates are
//! those of `quoin-types`.

pub mod group_point;
pub mod pool_host;
pub mod primary;
pub mod recognition;
pub mod replica;
pub mod step;
pub mod target_host;

pub use step::Step;
