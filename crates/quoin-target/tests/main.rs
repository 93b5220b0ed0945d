//! The target's driver between real sockets, pools played by hand. One program, so that it is linked once.

mod support;

mod bulk;
mod dials;
mod feeding;
mod sessions;
mod volume;
