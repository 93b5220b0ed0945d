//! Block front-ends: how a volume is offered to its user, without any storage logic.
//!
//! * [`nbd`]: a server session (bytes in, requests out, no I/O of its own) that the target drives,
//!   and a client that holds IO through restarts of the server.

pub mod nbd;
