//! The controller against simulated pools, nodes and targets, and over real sockets.

mod access;
mod backing_up;
mod balancing;
mod by_key;
mod cluster;
mod crash;
mod crash_changes;
mod declaring;
mod devices;
mod draining;
mod dying;
mod fencing;
mod gate;
mod healing;
mod late_calls;
mod leaving;
mod lifecycle;
mod recovering;
mod replacement;
mod salvage;
mod scale;
mod server;
mod taking_back;
mod targets;
mod tending;
mod terms;
