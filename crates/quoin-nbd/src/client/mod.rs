//! The client's side of NBD, over unix sockets and plain TCP on loopback.
//!
//! * [`Pipe`] is one connection with many requests in flight.
//! * [`Link`] is a pipe that is established again whenever it breaks: it holds unanswered requests
//!   and sends them again, without a time limit, until it is stopped. Both are driven by their
//!   owner's event loop.
//! * [`Client`] is a link with a thread of its own, for callers without a loop.
//!
//! Sending again is safe because the submitter of a request has not seen an answer to it, so
//! nothing of its own could be ordered after it. Where other hosts change the volume too, requests
//! are numbered ([`Register`]), and one that took effect is not done again. Another danger is an old
//! copy of a write that still lies
//! unread in the server's socket while its new copy has been answered. So a link that ends a
//! connection by itself waits until the server closes it too; then the server reads nothing more
//! from it.

mod handshake;
mod link;
mod numbers;
mod pipe;
mod register;
mod thread;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use handshake::ExportInfo;
pub use link::Link;
pub use numbers::{Keyed, Numbers};
pub use pipe::{Done, Pipe};
pub use register::{Memory, Register, RequestKey};
pub use thread::{Client, Completion};

use super::protocol::error;

/// Address of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

#[derive(Clone, Debug)]
pub struct ClientOptions {
    pub address: Address,
    /// The export's name; empty asks for the server's default.
    pub export: String,
    /// Set to hold IO and reconnect without a time limit, instead of failing it when the connection
    /// breaks.
    pub reconnect: bool,
    /// Set for a client that changes nothing: it has no numbers where others number their requests.
    pub read_only: bool,
    /// Time for the server to complete the negotiation.
    pub handshake_timeout: Duration,
}

impl ClientOptions {
    pub fn new(address: Address) -> Self {
        let handshake_timeout = Duration::from_secs(2);
        let (export, reconnect, read_only) = (String::new(), true, false);
        Self { address, export, reconnect, read_only, handshake_timeout }
    }
}

/// Reason for which there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(
        "no target serves {address} ({source}): it is being restarted, or the \
             volume was detached from this node"
    )]
    Connect { address: Address, source: std::io::Error },
    #[error("the NBD negotiation with {address} failed: {reason}")]
    Negotiation { address: Address, reason: String },
    #[error("the export at {address} changed from {was} to {is} bytes: not the same volume")]
    Shrunk { address: Address, was: u64, is: u64 },
    #[error(
        "{address} serves another use of the volume, since epoch {is}, than the one since epoch \
             {was}: another node used it meanwhile"
    )]
    OtherUse { address: Address, was: u64, is: u64 },
    #[error("{address} knows this client no longer: {reason}")]
    ClientOver { address: Address, reason: String },
    #[error("cannot start the client's thread: {0}")]
    Thread(std::io::Error),
}

/// Reason for which one request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The server's answer, one of [`super::protocol::error`] (the values of Linux's errno).
    #[error("the server replied with error {0}")]
    Refused(u32),
    #[error("the connection to the server was lost")]
    Disconnected,
    #[error("the client was stopped")]
    Stopped,
}

impl RequestError {
    /// Returns the error as a positive Linux errno, for kernels.
    pub fn errno(self) -> i32 {
        match self {
            Self::Refused(number @ (error::PERM | error::INVAL | error::NOSPC | error::NOTSUP)) => {
                number as i32
            }
            Self::Refused(_) | Self::Disconnected | Self::Stopped => error::IO as i32,
        }
    }
}
