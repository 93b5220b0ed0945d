//! Tests of the NBD session and client, byte by byte and over sockets. They are one program, so
//! that it is linked once.

mod client;
mod client_bytes;
mod edges;
mod protocol;
mod tls;
mod tools;
