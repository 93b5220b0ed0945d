//! Tests of frames, handshakes and connections between real sockets. They are one program, so that
//! it is linked once.

mod common;

mod establish;
mod formats;
mod frames;
mod handshake;
