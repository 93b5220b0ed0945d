//! The data plane between a target and its replicas: frames, their protection, and the connections
//! that carry them.
//!
//! * [`frame`] is the fixed header of a frame and the limits that are checked before anything is
//!   allocated; [`encode`] and [`decode`] convert `quoin_types::message` to and from bytes.
//!   Decoding never copies block data: it stays in the buffer the socket was read into.
//! * [`security`] seals and opens frames on an authenticated connection; [`handshake`] makes such a
//!   connection (TLS 1.3, both sides with certificates, keys by the TLS exporter). [`same_host`] is
//!   the shorter path to a pool on the same host. [`establish`] adds Hello and Welcome, so that
//!   shards get accepted sessions only.
//! * [`queue`] holds bytes to send (one vectored write) and bytes received.
//! * [`history`] is the stream of a snapshot's content on a target's own socket, for exports.
//! * [`connection`] ties a socket, its protection and its queues together for the shards of both
//!   roles.
//! * [`connection_slots`] limits unproven connections by their source.
//!
//! Peers are hostile until proven otherwise: no input makes this crate panic or hold more memory
//! than [`frame::Limits`] allows. Checksums of blocks are verified by the state machines, once for
//! each block that they accept.

pub mod connection;
pub mod connection_slots;
pub mod decode;
pub mod encode;
pub mod establish;
pub mod frame;
pub mod handshake;
pub mod hello;
pub mod history;
pub mod queue;
pub mod same_host;
pub mod security;

pub use connection::{Connection, ReadOutcome};
pub use decode::{Frame, Incoming};
pub use frame::{Limits, WireError};
pub use hello::{ConnectionKind, Hello, SupportedProtocol, Welcome};
pub use security::{Mode, Opener, Sealer};
