//! From a socket to a session: the handshake, then Hello and Welcome, on a helper thread.
//!
//! A shard only gets connections whose peer is proven and whose Hello was accepted. The steps
//! before that cost the shard nothing. They are bounded by [`HANDSHAKE_MAX`], [`Limits::HELLO`] and
//! the number of helper threads that a role allows.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use quoin_types::Epoch;
use quoin_types::ids::SessionKey;
use quoin_types::message::{Failure, FromReplica};
use rustix::event::{PollFd, PollFlags, poll};
use rustls_pki_types::CertificateDer;

use crate::connection::{Connection, ReadOutcome};
use crate::decode::{Frame, Incoming};
#[cfg(doc)]
use crate::frame::Limits;
use crate::frame::WireError;
use crate::handshake::{
    ClientSecurity, Established, HANDSHAKE_MAX, HandshakeError, ServerSecurity, accept, connect,
    connect_same_host,
};
use crate::hello::{Hello, SupportedProtocol, Welcome};
use crate::same_host::{self, PeerAddress, Stream};

#[derive(Debug, thiserror::Error)]
pub enum EstablishError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the peer sent no Hello within {HANDSHAKE_MAX:?}")]
    Deadline,
    #[error("the peer's first frame is not a Hello")]
    Unexpected,
    #[error("the pool refused the session: {0}")]
    Refused(Failure),
    #[error("refused: {}", .0.reason)]
    Rejected(Rejection),
    /// Carries the proof of the newer term.
    #[error("the pool knows a newer term of the controller than the grant's")]
    FormerTerm(Bytes),
    #[error("incompatible versions of Quoin: {0}")]
    Versions(String),
}

/// Reason for which a peer is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rejection {
    pub reason: String,
    /// Proof of a term that is newer than that of the peer's grant; empty for any other reason.
    pub term: Bytes,
}

impl From<String> for Rejection {
    fn from(reason: String) -> Self {
        Self { reason, term: Bytes::new() }
    }
}

/// Connection of a session, on the side that was dialled.
pub struct Accepted {
    pub connection: Connection,
    pub session: SessionKey,
    pub hello: Hello,
    pub peer_address: PeerAddress,
}

/// Connects to a pool, within the host if the pool is on this one, proves both sides, and
/// introduces the session. Blocks.
pub fn dial(
    pool: &str,
    address: SocketAddr,
    security: &ClientSecurity,
    session: SessionKey,
    hello: &Hello,
) -> Result<Connection, EstablishError> {
    let deadline = Instant::now() + HANDSHAKE_MAX;
    let established = match same_host::connect(pool, address.port()) {
        Ok(unix) => match connect_same_host(unix, security) {
            Ok(established) => established,
            // The attempt used up its time; the network would be as slow.
            Err(error @ HandshakeError::Deadline) => return Err(error.into()),
            // The listener there is not usable, or it is another pool with the same name and port:
            // the right one may be on another host.
            Err(_) => connect(address, security)?,
        },
        Err(_) => connect(address, security)?,
    };
    introduce(established, session, hello, deadline)
}

fn introduce(
    established: Established,
    session: SessionKey,
    hello: &Hello,
    deadline: Instant,
) -> Result<Connection, EstablishError> {
    let mut connection =
        Connection::new(established.socket, established.sealer, established.opener);
    connection.send_hello(session, hello)?;
    flush(&mut connection, deadline)?;
    let answer = first_frame(&mut connection, deadline)?;
    match answer.frame {
        Frame::Welcome(welcome) if answer.session == session => {
            welcome.validate(hello).map_err(EstablishError::Versions)?;
            if !welcome.term.is_empty() {
                return Err(EstablishError::FormerTerm(welcome.term));
            }
            connection.authenticated(welcome.features);
            Ok(connection)
        }
        Frame::FromReplica(FromReplica::Refuse { failure, .. }) => {
            Err(EstablishError::Refused(failure))
        }
        _ => Err(EstablishError::Unexpected),
    }
}

/// Proves both sides of an accepted connection and reads the Hello. `verify` decides by the
/// peer's certificates (none on a plain connection), its session and its Hello. Blocks.
pub fn answer(
    stream: Stream,
    peer_address: PeerAddress,
    security: &ServerSecurity,
    verify: impl FnOnce(&[CertificateDer<'static>], &SessionKey, &Hello) -> Result<(), Rejection>,
) -> Result<Accepted, EstablishError> {
    let deadline = Instant::now() + HANDSHAKE_MAX;
    let established = accept(stream, peer_address, security)?;
    let mut connection =
        Connection::new(established.socket, established.sealer, established.opener);
    let Incoming { session, frame: Frame::Hello(hello) } = first_frame(&mut connection, deadline)?
    else {
        return Err(EstablishError::Unexpected);
    };
    let welcome = hello.negotiate(&SupportedProtocol::THIS_BUILD);
    if let Err(reason) = welcome.validate(&hello) {
        // The target reaches the same verdict by this answer, and can report it.
        connection.send_welcome(session, &welcome)?;
        flush(&mut connection, deadline)?;
        return Err(EstablishError::Versions(reason));
    }
    match verify(&established.peer_certificates, &session, &hello) {
        Ok(()) => {
            connection.send_welcome(session, &welcome)?;
            flush(&mut connection, deadline)?;
            connection.authenticated(welcome.features);
            Ok(Accepted { connection, session, hello, peer_address })
        }
        Err(rejection) => {
            let term = rejection.term.clone();
            if !term.is_empty() {
                connection.send_welcome(session, &Welcome { term, ..welcome })?;
            }
            let refuse = FromReplica::Refuse { promised: Epoch::ZERO, failure: Failure::Protocol };
            connection.send_from_replica(session, &refuse)?;
            flush(&mut connection, deadline)?;
            Err(EstablishError::Rejected(rejection))
        }
    }
}

fn first_frame(connection: &mut Connection, deadline: Instant) -> Result<Incoming, EstablishError> {
    loop {
        if let Some(incoming) = connection.next_frame()? {
            return Ok(incoming);
        }
        wait(connection, PollFlags::IN, deadline)?;
        if connection.receive()? == ReadOutcome::End {
            return Err(WireError::Closed.into());
        }
    }
}

fn flush(connection: &mut Connection, deadline: Instant) -> Result<(), EstablishError> {
    while !connection.flush()? {
        wait(connection, PollFlags::OUT, deadline)?;
    }
    Ok(())
}

fn wait(
    connection: &Connection,
    flags: PollFlags,
    deadline: Instant,
) -> Result<(), EstablishError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(EstablishError::Deadline);
    }
    let timeout = quoin_reactor::timespec(left);
    let socket = connection.socket();
    match poll(&mut [PollFd::new(&socket, flags)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(WireError::Io { operation: "poll", source: errno.into() }.into()),
    }
}
