//! Block interface of a volume: the requests that every front-end submits.
//!
//! A front-end is a [`Frontend`] session: bytes in, requests out; replies in, bytes out. A session
//! does no I/O of its own, so the target's shard drives sockets and sessions on one thread.

use bytes::{Bytes, BytesMut};

use crate::client::Origin;
use crate::ids::ClientId;

/// Number of one request within its session; chosen by the session, given back with the reply.
pub type Token = u64;

/// Byte offsets and lengths; the target accepts any alignment of at least the logical block size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    Read {
        offset: u64,
        length: u32,
    },
    Write {
        offset: u64,
        data: Bytes,
        fua: bool,
    },
    Flush,
    Trim {
        offset: u64,
        length: u64,
        fua: bool,
    },
    WriteZeroes {
        offset: u64,
        length: u64,
        fua: bool,
        no_hole: bool,
    },
    /// Asks which parts hold data and which are holes.
    Status {
        offset: u64,
        length: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub token: Token,
    pub operation: Operation,
    /// The request of its client, which may send it again, if the client numbers them.
    pub origin: Option<Origin>,
}

/// Reason for which a request failed; every front-end maps it to its own codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    #[error("the request lies outside the volume")]
    OutOfRange,
    #[error("the request is not aligned to the logical block size")]
    Misaligned,
    #[error("no good copy of a block is left")]
    Damaged,
    #[error("fewer than CF in-sync replicas hold the volume (onQuorumLoss: fail)")]
    NoQuorum,
    #[error("every replica's pool is full (onFull: enospc)")]
    NoSpace,
    #[error("the volume is published read-only")]
    ReadOnly,
    #[error("the target is shutting down or was fenced by a newer epoch")]
    Stopped,
    #[error(
        "the volume no longer knows this client: its attachment ended, or another one followed"
    )]
    NoClient,
    #[error("the request's number is not one of those that its client may use now")]
    OutOfWindow,
}

/// One part of the answer to [`Operation::Status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    pub length: u64,
    pub hole: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Answer to write, flush, trim and zero.
    None,
    /// Answer to a read: chunks in order whose lengths add up to the request's.
    Data(Vec<Bytes>),
    Status(Vec<StatusExtent>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub token: Token,
    pub result: Result<Payload, BlockError>,
}

/// Properties of a volume that a front-end shows to its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub name: String,
    pub size_bytes: u64,
    /// Block size in bytes: 512 or 4096.
    pub block_size: u32,
    pub read_only: bool,
}

/// Protocol session of one client, without I/O.
///
/// The driver reads the socket into `input`, calls [`Frontend::receive`], submits the requests, and
/// hands each reply to [`Frontend::complete`]. Both push onto `output`, which the driver writes
/// with one vectored write. Sessions bound their own memory: the driver does not read for a session
/// whose [`Frontend::wants_input`] is false until replies have been written.
pub trait Frontend: Send {
    /// Consumes what it can of `input`; the rest stays there. `Err` closes the connection after
    /// `output` has been written.
    ///
    /// The driver also calls it, with no new bytes, once after the connection was accepted (some
    /// protocols greet first) and whenever [`Frontend::wants_input`] has become true again after
    /// [`Frontend::complete`]: whole requests may be waiting in `input`.
    fn receive(
        &mut self,
        input: &mut BytesMut,
        requests: &mut Vec<Request>,
        output: &mut Vec<Bytes>,
    ) -> Result<(), Closed>;

    fn complete(&mut self, reply: Reply, output: &mut Vec<Bytes>);

    fn wants_input(&self) -> bool;

    /// Bytes of data that requests under way carry, or will be answered with.
    fn held_bytes(&self) -> usize;

    /// Sets the limit: one more request is accepted while those under way hold less than this.
    fn set_held_bytes_max(&mut self, bytes: usize);

    /// Returns the client whose requests the session numbers, once that is negotiated, and whether it
    /// begins with this session.
    fn client(&self) -> Option<(ClientId, bool)> {
        None
    }

    /// Called when the volume has grown or its mode has changed.
    fn device_changed(&mut self, _info: &DeviceInfo) {}
}

/// End of the session; the text gives the reason, for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Closed(pub String);
