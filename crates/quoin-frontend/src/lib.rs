//! Block front-ends: how a volume is offered to its user, without any storage logic.
//!
//! * [`nbd`]: a server session (bytes in, requests out, no I/O of its own) that the target drives,
//!   and a client that holds IO through restarts of the server.
//! * [`fuse`] and [`loopdev`]: a volume as a file, and a block device on that file.
//! * [`attach`]: the daemon that keeps such devices while everything else comes and goes.

mod apart;
pub mod attach;
pub mod fuse;
pub mod loopdev;
pub mod nbd;
