//! Authenticated connections for tonic: one TCP listener in, a stream of TLS streams out.
//!
//! Whatever arrives on the port, a slow or nonsensical client costs a bounded amount: its
//! handshake has a deadline, handshakes and connections are counted, those without a
//! certificate are few and short-lived, and nobody waits for anybody else's handshake. A
//! connection ends when its certificate does, so a peer must show a renewed one to stay.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::identity::{CALENDAR_LOOK, validity_of};
use crate::{Peer, peer_of};

/// Who made a request; every request of a served connection carries it as an extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Over a unix socket: the file's permissions let them in.
    Local,
    /// Over TLS with a verified certificate of this cluster.
    Member(Peer),
    /// Over TLS without a certificate.
    Newcomer,
}

/// What one port bears.
#[derive(Clone, Copy, Debug)]
pub struct IncomingLimits {
    pub connections_max: usize,
    /// Of these, without a certificate.
    pub newcomers_max: usize,
    pub handshakes_max: usize,
    pub handshake_ms: u64,
    /// How long a connection without a certificate may last.
    pub newcomer_ms: u64,
}

impl Default for IncomingLimits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            newcomers_max: 64,
            handshakes_max: 128,
            handshake_ms: 10_000,
            newcomer_ms: 30_000,
        }
    }
}

/// One authenticated connection.
pub struct PeerStream {
    stream: TlsStream<TcpStream>,
    caller: Caller,
    /// When the certificate is over; `None`: at the next look, as a newcomer's time is.
    ends: Option<SystemTime>,
    next_look: Pin<Box<Sleep>>,
    _permits: [Option<OwnedSemaphorePermit>; 2],
}

impl PeerStream {
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    fn over(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.next_look.as_mut().poll(cx).is_ready() {
            let Some(wait) = self.ends.and_then(until_next_look) else {
                let text = "the peer's certificate has run out";
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            };
            self.next_look.as_mut().reset(Instant::now() + wait);
        }
        Ok(())
    }
}

/// How long to sleep before the next look at whether it `ends`; `None`: it has. A sleep does not
/// count the time for which the machine is suspended, so none is long.
fn until_next_look(ends: SystemTime) -> Option<Duration> {
    let left = ends.duration_since(SystemTime::now()).ok()?;
    (!left.is_zero()).then(|| left.min(CALENDAR_LOOK))
}

impl Connected for PeerStream {
    type ConnectInfo = Caller;
    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.over(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.over(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Accepts, shakes hands and hands over; dropping the stream closes the port.
pub fn serve_incoming(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    limits: IncomingLimits,
) -> impl futures::Stream<Item = io::Result<PeerStream>> + Send {
    let (ready, streams) = mpsc::channel(16);
    tokio::spawn(accept(listener, TlsAcceptor::from(config), limits, ready));
    tokio_stream::wrappers::ReceiverStream::new(streams)
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    limits: IncomingLimits,
    ready: mpsc::Sender<io::Result<PeerStream>>,
) {
    let semaphore = |permits: usize| Arc::new(Semaphore::new(permits));
    let handshakes = semaphore(limits.handshakes_max);
    let connections = semaphore(limits.connections_max);
    let newcomers = semaphore(limits.newcomers_max);
    loop {
        // Waiting here leaves the rest in the kernel's queue, which is bounded too.
        let Ok(handshake) = handshakes.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ready.closed() => return,
        };
        let (tcp, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        let (connections, newcomers) = (connections.clone(), newcomers.clone());
        tokio::spawn(async move {
            let _handshake = handshake;
            let Ok(connection) = connections.try_acquire_owned() else {
                return tracing::warn!(%address, "too many connections, one more was refused");
            };
            let _ = tcp.set_nodelay(true);
            let limit = Duration::from_millis(limits.handshake_ms);
            let stream = match tokio::time::timeout(limit, acceptor.accept(tcp)).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return tracing::debug!(%address, %error, "handshake failed"),
                Err(_) => return tracing::debug!(%address, "no handshake in time"),
            };
            let Some((caller, ends)) = caller_of(&stream) else {
                return tracing::debug!(%address, "certificate unreadable");
            };
            let newcomer = match caller {
                Caller::Newcomer => match newcomers.try_acquire_owned() {
                    Ok(permit) => Some(permit),
                    Err(_) => return tracing::warn!(%address, "too many newcomers at once"),
                },
                _ => None,
            };
            let first_look = match ends {
                Some(ends) => until_next_look(ends).unwrap_or_default(),
                None => Duration::from_millis(limits.newcomer_ms),
            };
            let next_look = Box::pin(tokio::time::sleep(first_look));
            let _permits = [Some(connection), newcomer];
            let _ = ready.send(Ok(PeerStream { stream, caller, ends, next_look, _permits })).await;
        });
    }
}

/// Who has connected, and when a member's certificate is over.
fn caller_of(stream: &TlsStream<TcpStream>) -> Option<(Caller, Option<SystemTime>)> {
    let Some(leaf) = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()) else {
        return Some((Caller::Newcomer, None));
    };
    let (_, until) = validity_of(leaf)?;
    Some((Caller::Member(peer_of(leaf).ok()?), Some(until)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_connection_looks_at_the_calendar_again_soon_and_a_short_one_at_its_end() {
        let now = SystemTime::now();
        let month = Duration::from_secs(30 * 86_400);
        assert_eq!(until_next_look(now + month), Some(CALENDAR_LOOK));
        assert!(until_next_look(now + CALENDAR_LOOK / 2).unwrap() <= CALENDAR_LOOK / 2);
        assert_eq!(until_next_look(now), None);
        assert_eq!(until_next_look(now - month), None);
    }
}
