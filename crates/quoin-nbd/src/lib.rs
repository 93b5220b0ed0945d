//! NBD: fixed newstyle, structured replies, block status of allocation.
//!
//! * [`Session`] is the server's side of one connection as a state machine over bytes; it
//!   implements [`quoin_types::block::Frontend`].
//! * [`client`] is the other side: pipelined, and able to outlive its server.
//!
//! The session offers one export, or the choice among several ([`Exports`]). Block sizes: the
//! minimum is the volume's logical block, 4096 is preferred, the maximum is 32 MiB. Clients that
//! never ask assume this maximum anyway, so no request is refused for its size. It supports FUA,
//! flush, trim, write-zeroes, cache and multi-conn (a flush on any connection covers what any other
//! was answered, because one target orders all). The protocol has no message for a grown volume: a
//! client learns the new size when it negotiates again, while the session accepts requests into the
//! new part at once.
//!
//! A driver that serves several connections of one volume drops the unread input of a connection
//! whose peer has hung up *before* it accepts requests of a newer one: a client that resubmits
//! after a broken connection must not see its old copy applied after the new one.

pub mod client;
mod exports;
mod negotiation;
pub mod protocol;
mod secure;
mod session;
mod transmission;

pub use exports::{
    Description, Exports, Numbering, Proven, Refused, VolumeExport, connection_secret,
};
pub use session::{Limits, Session, TlsPolicy};
