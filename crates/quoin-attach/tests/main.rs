//! Tests of the attach daemon on real FUSE mounts and loop devices. They are one program, so that
//! it is linked once.

mod daemon;
mod detached;
mod kill_table;

mod another_use;
mod attach;
mod containers;
mod limits;
mod loopdev;
