//! From a connected socket to keys: a TLS 1.3 handshake with certificates on both sides.
//!
//! The handshake blocks, with a deadline, on a helper thread. Its result is a non-blocking socket
//! with its [`Sealer`] and [`Opener`] for a shard. TLS itself carries no data: records are read one
//! by one, never beyond the handshake's last, so the next byte on the socket belongs to a frame.
//! Session tickets are off for the same reason.
//!
//! The protection mode is the ALPN protocol, so it is negotiated under the handshake's own
//! protection: a pool set to `encrypt` refuses a target that only authenticates. Within a host
//! ([`crate::same_host`]) it is always [`Mode::Plain`], which is never offered to a network
//! connection.

use std::io::{Cursor, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustls::{ClientConfig, ClientConnection, Connection as Tls, ServerConfig, ServerConnection};
use rustls_pki_types::{CertificateDer, ServerName};

use crate::same_host::{PeerAddress, Stream};
use crate::security::{Mode, Opener, SECRET_LEN, Sealer};
use quoin_reactor::timespec;

/// Limit of a whole handshake, connecting included.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Limit until an accepted peer sends its first bytes: one lost packet is sent again within a
/// second.
pub const SILENCE_MAX: Duration = Duration::from_secs(2);
/// Limit of bytes from a peer before it is authenticated.
const HANDSHAKE_BYTES_MAX: usize = 128 << 10;
const EXPORTER_LABEL: &[u8] = b"EXPORTER-quoin-data-v1";

#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("cannot connect to {address}: {source}")]
    Connect { address: SocketAddr, source: std::io::Error },
    #[error("the peer did not finish the handshake within {HANDSHAKE_MAX:?}")]
    Deadline,
    #[error("the peer sent nothing within {SILENCE_MAX:?}")]
    Silent,
    #[error("the peer closed the connection during the handshake")]
    Closed,
    #[error("the peer sent something that is not a TLS handshake")]
    NotTls,
    #[error("the handshake failed: {0}")]
    Tls(#[from] rustls::Error),
    #[error("the peer and this side do not agree on how data connections are protected")]
    NoCommonMode,
    #[error("the peer authenticated itself without asking for a data connection")]
    NoModeAsked,
    #[error("plain data connections are allowed on the loopback only, not with {0}")]
    PlainBeyondLoopback(SocketAddr),
    #[error("the connection failed during the handshake: {0}")]
    Io(#[from] std::io::Error),
}

/// Protection that this side uses for its data connections.
#[derive(Clone)]
pub enum ClientSecurity {
    /// Mutual TLS, then frames in this mode; plain ones within a host.
    Tls { config: Arc<ClientConfig>, server_name: ServerName<'static>, mode: Mode },
    /// No protection at all; refused unless the peer is on the loopback.
    PlainLoopback,
}

/// Protection that this side requires for its data connections.
#[derive(Clone)]
pub enum ServerSecurity {
    /// Mutual TLS; `least` is the weakest mode accepted from the network.
    Tls { config: Arc<ServerConfig>, least: Mode },
    /// No protection at all; refused unless the peer is on the loopback.
    PlainLoopback,
}

/// A connection whose peer is proven (unless plain).
pub struct Established {
    /// Non-blocking, TCP_NODELAY.
    pub socket: OwnedFd,
    pub peer_address: PeerAddress,
    /// The peer's certificates, its own first; empty on a plain connection.
    pub peer_certificates: Vec<CertificateDer<'static>>,
    pub mode: Mode,
    pub sealer: Sealer,
    pub opener: Opener,
}

/// Connects and proves both sides. Blocks for [`HANDSHAKE_MAX`] at most.
pub fn connect(
    address: SocketAddr,
    security: &ClientSecurity,
) -> Result<Established, HandshakeError> {
    let deadline = Instant::now() + HANDSHAKE_MAX;
    let tcp = TcpStream::connect_timeout(&address, HANDSHAKE_MAX)
        .map_err(|source| HandshakeError::Connect { address, source })?;
    prove(Stream::Tcp(tcp), PeerAddress::Network(address), security, deadline)
}

/// Proves both sides of a connection within the host. Blocks for [`HANDSHAKE_MAX`] at most.
pub fn connect_same_host(
    unix: UnixStream,
    security: &ClientSecurity,
) -> Result<Established, HandshakeError> {
    let deadline = Instant::now() + HANDSHAKE_MAX;
    prove(Stream::SameHost(unix), PeerAddress::SameHost, security, deadline)
}

fn prove(
    stream: Stream,
    peer: PeerAddress,
    security: &ClientSecurity,
    deadline: Instant,
) -> Result<Established, HandshakeError> {
    stream.prepare()?;
    match security {
        ClientSecurity::PlainLoopback => plain(stream, peer),
        ClientSecurity::Tls { config, server_name, mode } => {
            let mode = if peer == PeerAddress::SameHost { Mode::Plain } else { *mode };
            let mut config = (**config).clone();
            config.alpn_protocols = vec![alpn(mode).to_vec()];
            config.resumption = rustls::client::Resumption::disabled();
            let tls = ClientConnection::new(Arc::new(config), server_name.clone())?;
            handshake(stream, peer, tls.into(), deadline)
        }
    }
}

/// Proves both sides of an accepted connection. Blocks for [`HANDSHAKE_MAX`] at most, and for
/// [`SILENCE_MAX`] if the peer sends nothing.
pub fn accept(
    stream: Stream,
    peer: PeerAddress,
    security: &ServerSecurity,
) -> Result<Established, HandshakeError> {
    let deadline = Instant::now() + HANDSHAKE_MAX;
    stream.prepare()?;
    match security {
        ServerSecurity::PlainLoopback => plain(stream, peer),
        ServerSecurity::Tls { config, least } => {
            let mut config = (**config).clone();
            config.alpn_protocols = match (&stream, least) {
                (Stream::SameHost(_), _) => vec![alpn(Mode::Plain).to_vec()],
                (_, Mode::Encrypt) => vec![alpn(Mode::Encrypt).to_vec()],
                _ => vec![alpn(Mode::Encrypt).to_vec(), alpn(Mode::Authenticate).to_vec()],
            };
            config.send_tls13_tickets = 0;
            let tls = ServerConnection::new(Arc::new(config))?;
            wait_for_first_bytes(&stream)?;
            handshake(stream, peer, tls.into(), deadline)
        }
    }
}

fn alpn(mode: Mode) -> &'static [u8] {
    match mode {
        Mode::Encrypt => b"quoin-data/1+encrypt",
        Mode::Authenticate => b"quoin-data/1+authenticate",
        Mode::Plain => b"quoin-data/1+same-host",
    }
}

fn plain(stream: Stream, peer: PeerAddress) -> Result<Established, HandshakeError> {
    if let PeerAddress::Network(address) = peer
        && !address.ip().is_loopback()
    {
        return Err(HandshakeError::PlainBeyondLoopback(address));
    }
    stream.set_nonblocking()?;
    Ok(Established {
        socket: stream.into(),
        peer_address: peer,
        peer_certificates: Vec::new(),
        mode: Mode::Plain,
        sealer: Sealer::plain(),
        opener: Opener::plain(),
    })
}

fn handshake(
    mut stream: Stream,
    peer: PeerAddress,
    mut tls: Tls,
    deadline: Instant,
) -> Result<Established, HandshakeError> {
    let mut received = 0;
    loop {
        while tls.wants_write() {
            bound(&stream, deadline)?;
            tls.write_tls(&mut stream).map_err(io)?;
        }
        if !tls.is_handshaking() {
            break;
        }
        let record = read_record(&mut stream, deadline)?;
        received += record.len();
        if received > HANDSHAKE_BYTES_MAX {
            return Err(HandshakeError::NotTls);
        }
        let mut cursor = Cursor::new(&record[..]);
        while (cursor.position() as usize) < record.len() {
            tls.read_tls(&mut cursor)?;
            if let Err(error) = tls.process_new_packets() {
                // Sends the reason to the peer, as far as it still reads.
                let _ = bound(&stream, deadline).map(|()| tls.write_tls(&mut stream));
                return Err(error.into());
            }
        }
    }
    let mode = match tls.alpn_protocol() {
        Some(p) if p == alpn(Mode::Encrypt) => Mode::Encrypt,
        Some(p) if p == alpn(Mode::Authenticate) => Mode::Authenticate,
        // Offered and accepted within a host only.
        Some(p) if p == alpn(Mode::Plain) && peer == PeerAddress::SameHost => Mode::Plain,
        None => return Err(HandshakeError::NoModeAsked),
        _ => return Err(HandshakeError::NoCommonMode),
    };
    let mut secrets = [0u8; 2 * SECRET_LEN];
    let secrets = tls.export_keying_material(&mut secrets[..], EXPORTER_LABEL, Some(alpn(mode)))?;
    let half = |at: usize| secrets[at..at + SECRET_LEN].try_into().expect("half of the secrets");
    let (client, server) = (half(0), half(SECRET_LEN));
    let (send, receive) =
        if matches!(tls, Tls::Client(_)) { (client, server) } else { (server, client) };
    let peer_certificates = tls
        .peer_certificates()
        .unwrap_or_default()
        .iter()
        .map(|c| c.clone().into_owned())
        .collect();
    stream.set_timeout(None)?;
    stream.set_nonblocking()?;
    Ok(Established {
        socket: stream.into(),
        peer_address: peer,
        peer_certificates,
        mode,
        sealer: Sealer::new(mode, send),
        opener: Opener::new(mode, receive),
    })
}

/// Waits for a peer's first bytes. A correct client sends at once, so a silent one takes its place
/// for this time only.
fn wait_for_first_bytes(stream: &Stream) -> Result<(), HandshakeError> {
    let until = Instant::now() + SILENCE_MAX;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&timespec(left))) {
            Ok(0) => return Err(HandshakeError::Silent),
            Err(Errno::INTR) => {}
            outcome => return Ok(outcome.map(drop).map_err(std::io::Error::from)?),
        }
    }
}

/// Reads exactly one TLS record.
fn read_record(stream: &mut Stream, deadline: Instant) -> Result<Vec<u8>, HandshakeError> {
    let mut record = vec![0u8; 5];
    read_exact(stream, &mut record, deadline)?;
    let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
    if !(20..=23).contains(&record[0]) || record[1] != 3 || length > (1 << 14) + 256 {
        return Err(HandshakeError::NotTls);
    }
    record.resize(5 + length, 0);
    read_exact(stream, &mut record[5..], deadline)?;
    Ok(record)
}

/// Sets the socket's time-outs to the remaining time, before each call: a peer that sends a byte
/// now and then gets no more time than a silent one.
fn bound(stream: &Stream, deadline: Instant) -> Result<(), HandshakeError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(HandshakeError::Deadline);
    }
    stream.set_timeout(Some(left))?;
    Ok(())
}

fn read_exact(
    stream: &mut Stream,
    mut into: &mut [u8],
    deadline: Instant,
) -> Result<(), HandshakeError> {
    while !into.is_empty() {
        bound(stream, deadline)?;
        match stream.read(into) {
            Ok(0) => return Err(HandshakeError::Closed),
            Ok(n) => into = &mut into[n..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(io(error)),
        }
    }
    Ok(())
}

fn io(error: std::io::Error) -> HandshakeError {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => HandshakeError::Deadline,
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => HandshakeError::Closed,
        _ => HandshakeError::Io(error),
    }
}
