//! The data plane between a target and its replicas: frames, their protection, and the connections
//! that carry them.
//!
//! * [`frame`] is the fixed header of a frame and the limits that are checked before anything
//!   is allocated; [`encode`] and [`decode`] give `quoin_types::message` its bytes. Block data is
//!   never copied by decoding: it stays in the buffer the socket was read into.
//! * [`security`] seals and opens frames on an authenticated connection; [`handshake`] makes such
//!   a connection (TLS 1.3, both sides with certificates, keys by the TLS exporter).
//!   [`same_host`] is the shorter way to a pool of one's own host. [`establish`] adds Hello and
//!   Welcome, so that shards see believed sessions only.
//! * [`queue`] holds what goes out (one vectored write) and what came in.
//! * [`connection`] ties a socket, its protection and its queues together for the shards of both
//!   roles.
//! * [`places`] shares out what unproven connections may take.
//!
//! Peers are hostile until proven otherwise: no input makes this crate panic or hold more memory
//! than [`frame::Limits`] says. Checksums of blocks are the state machines' business: they verify
//! each block that they take, once.

pub mod connection;
pub mod decode;
pub mod encode;
pub mod establish;
pub mod frame;
pub mod handshake;
pub mod hello;
pub mod places;
pub mod queue;
pub mod same_host;
pub mod security;

pub use connection::{Connection, ReadOutcome};
pub use decode::{Frame, Incoming};
pub use frame::{Limits, WireError};
pub use hello::{ConnectionKind, Hello, Spoken, Welcome};
pub use security::{Mode, Opener, Sealer};
