//! Doubles for tests and for the simulator.

pub mod memory_disk;
pub mod model;
