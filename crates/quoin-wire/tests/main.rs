//! Frames, handshakes and connections between real sockets. One program, so that it is linked once.

mod common;

mod establish;
mod formats;
mod frames;
mod handshake;
