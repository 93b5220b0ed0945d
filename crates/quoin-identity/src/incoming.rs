//! Authenticated connections for tonic: one TCP listener in, a stream of TLS streams out.
//!
//! A slow or malformed client costs a bounded amount. A connection that sends nothing is closed
//! after [`IncomingLimits::first_bytes_ms`], or earlier where there are too many: the one that has
//! been silent for longest makes room for the next, so silence never keeps others out. A handshake
//! has a deadline. Handshakes and connections without a certificate are counted for each source
//! address, connections with one for each member, and none gets more than a share of the places. A
//! connection ends when its certificate expires, so a peer must show a renewed one to stay.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use quoin_wire::connection_slots::{ConnectionSlot, ConnectionSlots, Source};
use quoin_wire::same_host::PeerAddress;
use rustls::ServerConfig;
use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake};
use tonic::transport::server::Connected;

use crate::clock::Validity;
use crate::identity::CALENDAR_CHECK;
use crate::shares::{Shares, Slot};
use crate::{Peer, key_hash_of, peer_of};

/// The caller of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Connected over a unix socket: the file's permissions let it in.
    Local,
    /// Connected over TLS with a verified certificate of this cluster, or of a trusted one at a mirror's
    /// port for other clusters.
    Member(Member),
    /// Connected over TLS without a certificate.
    Newcomer,
}

/// Calls at a time on a connection without a certificate.
const NEWCOMERS_CALLS_MAX: usize = 2;

/// One connection as its requests see it: every request of a served one carries it as an extension.
#[derive(Clone, Debug)]
pub struct Connection {
    pub caller: Caller,
    calls: Arc<Semaphore>,
}

impl Connection {
    fn new(caller: Caller) -> Self {
        Self { caller, calls: Arc::new(Semaphore::new(NEWCOMERS_CALLS_MAX)) }
    }

    /// Returns the place of a call without a certificate; `None`: this connection has none left.
    #[must_use]
    pub fn begin_call(&self) -> Option<OwnedSemaphorePermit> {
        self.calls.clone().try_acquire_owned().ok()
    }
}

/// The holder of a verified certificate. Several certificates may name one holder: the key
/// distinguishes them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Member {
    pub peer: Peer,
    /// See [`key_hash_of`].
    pub key_hash: String,
    /// Start of its connection: a change of trust after it did not let the connection in.
    pub connected: std::time::Instant,
    /// First moment of the certificate where that lay ahead as the connection began. Until then the
    /// connection serves for a renewal alone; it lasts as long as a newcomer's.
    pub valid_from: Option<SystemTime>,
}

impl Member {
    /// Returns whether the certificate is not valid yet.
    #[must_use]
    pub fn is_early(&self) -> bool {
        self.valid_from.is_some_and(|from| SystemTime::now() < from)
    }
}

/// Limits of one port.
#[derive(Clone, Copy, Debug)]
pub struct IncomingLimits {
    pub connections_max: usize,
    /// Most connections of one member, of the number above.
    pub connections_a_member_max: usize,
    /// Most connections without a certificate, of the number above; a quarter of them of one
    /// address.
    pub newcomers_max: usize,
    /// Most connections whose handshake has not begun; a quarter of them of one address.
    pub unauthenticated_max: usize,
    /// Most handshakes under way; a quarter of them of one address.
    pub handshakes_max: usize,
    pub handshake_ms: u64,
    /// Longest time for which a connection may send nothing at all.
    pub first_bytes_ms: u64,
    /// Longest time for which a connection without a certificate may last.
    pub newcomer_ms: u64,
}

impl Default for IncomingLimits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            connections_a_member_max: 64,
            newcomers_max: 128,
            unauthenticated_max: 2048,
            handshakes_max: 512,
            handshake_ms: 10_000,
            first_bytes_ms: 2_000,
            newcomer_ms: 30_000,
        }
    }
}

/// One authenticated connection.
pub struct PeerStream {
    stream: TlsStream<TcpStream>,
    connection: Connection,
    /// Expiry of the certificate; `None`: at the next check, as the end of a newcomer's time is, and
    /// of a member's that is not valid yet.
    ends: Option<SystemTime>,
    next_check: Pin<Box<Sleep>>,
    /// Held for as long as the connection lasts.
    _place: Place,
}

/// Limits that a connection is counted against.
enum Place {
    Member { _slot: Slot<Peer> },
    Newcomer { _slot: ConnectionSlot },
}

impl PeerStream {
    pub fn caller(&self) -> &Caller {
        &self.connection.caller
    }

    fn check_expiry(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.next_check.as_mut().poll(cx).is_ready() {
            let Some(wait) = self.ends.and_then(until_next_check) else {
                let text = "the peer's certificate has run out";
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            };
            self.next_check.as_mut().reset(Instant::now() + wait);
        }
        Ok(())
    }
}

/// Returns the time to sleep before the next check whether it `ends`; `None`: it has ended. A sleep
/// does not count the time for which the machine is suspended, so none is long.
fn until_next_check(ends: SystemTime) -> Option<Duration> {
    let left = ends.duration_since(SystemTime::now()).ok()?;
    (!left.is_zero()).then(|| left.min(CALENDAR_CHECK))
}

impl Connected for PeerStream {
    type ConnectInfo = Connection;
    fn connect_info(&self) -> Connection {
        self.connection.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_expiry(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_expiry(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Accepts connections, performs handshakes and returns the streams; dropping the stream closes the
/// port.
pub fn serve_incoming(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    limits: IncomingLimits,
) -> impl futures::Stream<Item = io::Result<PeerStream>> + Send {
    let (ready, streams) = mpsc::channel(16);
    tokio::spawn(accept(listener, config, limits, ready));
    tokio_stream::wrappers::ReceiverStream::new(streams)
}

/// The places of one port.
struct Admission {
    config: Arc<ServerConfig>,
    limits: IncomingLimits,
    unauthenticated: ConnectionSlots,
    handshakes: Arc<Semaphore>,
    handshakes_by_source: Mutex<HashMap<Source, Arc<Semaphore>>>,
    members: Shares<Peer>,
    newcomers: ConnectionSlots,
    refusals: Mutex<Refusals>,
}

/// A line that a caller can cause, written at most every ten seconds.
#[derive(Default)]
struct Refusals(Option<Instant>);

impl Refusals {
    fn is_due(&mut self) -> bool {
        const AGAIN: Duration = Duration::from_secs(10);
        let is_due = self.0.is_none_or(|last| last.elapsed() >= AGAIN);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// The connections that have sent nothing yet, the oldest first.
#[derive(Default)]
struct Silent(VecDeque<AbortHandle>);

impl Silent {
    /// Ends the oldest where there are too many with the one that comes.
    fn make_room(&mut self, max: usize) {
        if self.0.len() >= max {
            self.0.retain(|task| !task.is_finished());
        }
        if self.0.len() >= max
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
    }
}

async fn accept(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    limits: IncomingLimits,
    ready: mpsc::Sender<io::Result<PeerStream>>,
) {
    let admission = Arc::new(Admission {
        config,
        limits,
        unauthenticated: ConnectionSlots::new(limits.unauthenticated_max),
        handshakes: Arc::new(Semaphore::new(limits.handshakes_max)),
        handshakes_by_source: Mutex::default(),
        members: Shares::new(limits.connections_max, limits.connections_a_member_max),
        newcomers: ConnectionSlots::new(limits.newcomers_max),
        refusals: Mutex::default(),
    });
    let mut silent = Silent::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ready.closed() => return,
        };
        let (tcp, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Half of the places is for those that have sent something and wait for their handshake.
        silent.make_room(limits.unauthenticated_max.div_ceil(2));
        let Some(slot) = admission.unauthenticated.acquire(PeerAddress::Network(address)) else {
            tracing::debug!(%address, "too many connections wait for authentication");
            continue;
        };
        let (admission, ready) = (admission.clone(), ready.clone());
        let waiting = tokio::spawn(async move {
            if let Some(handshake) = admission.read_client_hello(tcp).await {
                // A task of its own: from here on it is not ended for another connection.
                tokio::spawn(async move {
                    admission.authenticate(handshake, address, slot, ready).await
                });
            }
        });
        silent.0.push_back(waiting.abort_handle());
    }
}

impl Admission {
    /// Reads the client's first message, whole.
    async fn read_client_hello(&self, tcp: TcpStream) -> Option<StartHandshake<TcpStream>> {
        let _ = tcp.set_nodelay(true);
        let limit = Duration::from_millis(self.limits.first_bytes_ms);
        let hello = LazyConfigAcceptor::new(Acceptor::default(), tcp);
        tokio::time::timeout(limit, hello).await.ok()?.ok()
    }

    /// Performs the handshake in turn with others of its address, and returns the stream.
    async fn authenticate(
        &self,
        handshake: StartHandshake<TcpStream>,
        address: SocketAddr,
        unauthenticated: ConnectionSlot,
        ready: mpsc::Sender<io::Result<PeerStream>>,
    ) {
        let limit = Duration::from_millis(self.limits.handshake_ms);
        let connected = std::time::Instant::now();
        let performing_handshake = async {
            // The turn of the address comes first: its others do not wait for a place meanwhile.
            let slots = self.handshake_slots_of(Source::of(PeerAddress::Network(address)));
            let _turn = slots.acquire_owned().await.ok()?;
            let _place = self.handshakes.acquire().await.ok()?;
            let shaken = handshake.into_stream(self.config.clone()).await;
            shaken.inspect_err(|error| tracing::debug!(%address, %error, "handshake failed")).ok()
        };
        let stream = match tokio::time::timeout(limit, performing_handshake).await {
            Ok(Some(stream)) => stream,
            Ok(None) => return,
            Err(_) => return tracing::debug!(%address, "the handshake timed out"),
        };
        drop(unauthenticated);
        let Some((caller, ends)) = caller_of(&stream, connected) else {
            return tracing::debug!(%address, "cannot read the certificate");
        };
        let Some(place) = self.place_of(&caller, address) else {
            // A line for each would let strangers write the log.
            if self.refusals.lock().expect("no holder of this lock panics").is_due() {
                tracing::warn!(%address, ?caller, "connections are refused: no free slot");
            }
            return;
        };
        let first_check = match ends {
            Some(ends) => until_next_check(ends).unwrap_or_default(),
            None => Duration::from_millis(self.limits.newcomer_ms),
        };
        let next_check = Box::pin(tokio::time::sleep(first_check));
        let connection = Connection::new(caller);
        let _ = ready
            .send(Ok(PeerStream { stream, connection, ends, next_check, _place: place }))
            .await;
    }

    /// Returns a place among the members, or among the callers without a certificate.
    fn place_of(&self, caller: &Caller, address: SocketAddr) -> Option<Place> {
        match caller {
            Caller::Member(member) => {
                let slot = self.members.take(member.peer.clone()).ok()?;
                Some(Place::Member { _slot: slot })
            }
            _ => {
                let slot = self.newcomers.acquire(PeerAddress::Network(address))?;
                Some(Place::Newcomer { _slot: slot })
            }
        }
    }

    /// Returns the handshakes of one address. Entries that no connection waits for are removed once
    /// there are many.
    fn handshake_slots_of(&self, source: Source) -> Arc<Semaphore> {
        const KEPT_MAX: usize = 1024;
        let mut slots_by_source =
            self.handshakes_by_source.lock().expect("no holder of this lock panics");
        if slots_by_source.len() >= KEPT_MAX {
            slots_by_source.retain(|_, slots| Arc::strong_count(slots) > 1);
        }
        let share = self.limits.handshakes_max.div_ceil(4);
        slots_by_source.entry(source).or_insert_with(|| Arc::new(Semaphore::new(share))).clone()
    }
}

/// Returns the caller, and when a member's certificate expires.
fn caller_of(
    stream: &TlsStream<TcpStream>,
    connected: std::time::Instant,
) -> Option<(Caller, Option<SystemTime>)> {
    let Some(leaf) = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()) else {
        return Some((Caller::Newcomer, None));
    };
    let validity = Validity::of(leaf)?;
    let (peer, key_hash) = (peer_of(leaf).ok()?, key_hash_of(leaf).ok()?);
    let valid_from = validity.is_not_yet(SystemTime::now()).then_some(validity.from);
    let ends = valid_from.is_none().then_some(validity.until);
    Some((Caller::Member(Member { peer, key_hash, connected, valid_from }), ends))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_finished_connection_is_removed_before_the_oldest_silent_one() {
        let silent = |tasks: &[&tokio::task::JoinHandle<()>]| {
            Silent(tasks.iter().map(|task| task.abort_handle()).collect())
        };
        let waiting = || tokio::spawn(std::future::pending::<()>());
        let (oldest, next) = (waiting(), waiting());
        let finished = tokio::spawn(async {});
        while !finished.is_finished() {
            tokio::task::yield_now().await;
        }
        let mut three = silent(&[&oldest, &finished, &next]);
        three.make_room(4);
        assert_eq!(three.0.len(), 3, "below the limit no connection is ended");
        three.make_room(3);
        assert_eq!(three.0.len(), 2);
        tokio::task::yield_now().await;
        assert!(!oldest.is_finished(), "a finished one is removed first");

        three.make_room(2);
        assert_eq!(three.0.len(), 1);
        assert!(oldest.await.unwrap_err().is_cancelled() && !next.is_finished());
    }

    #[test]
    fn a_long_connection_checks_the_clock_often_and_a_short_one_at_its_end() {
        let now = SystemTime::now();
        let month = Duration::from_secs(30 * 86_400);
        assert_eq!(until_next_check(now + month), Some(CALENDAR_CHECK));
        assert!(until_next_check(now + CALENDAR_CHECK / 2).unwrap() <= CALENDAR_CHECK / 2);
        assert_eq!(until_next_check(now), None);
        assert_eq!(until_next_check(now - month), None);
    }
}
