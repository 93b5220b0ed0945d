//! Who gets in, by the network or from this host: accepted sockets are proven and heard on helper
//! threads, a bounded number at a time, and handed to the shard as believed sessions.

use std::io::ErrorKind::WouldBlock;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use quoin_core::ids::SessionKey;
use quoin_identity::{Identity, Role, peer_of};
use quoin_wire::establish::{EstablishError, answer};
use quoin_wire::handshake::ServerSecurity;
use quoin_wire::reactor::Waker;
use quoin_wire::same_host::{self, PeerAddress, Stream};
use quoin_wire::{ConnectionKind, Hello};
use rustls::pki_types::CertificateDer;

use crate::metrics::Metrics;
use crate::shard::Input;

/// Handshakes under way at once; more connections than that are closed unheard.
const HANDSHAKES_MAX: usize = 64;
/// A handshake needs little stack.
const STACK_BYTES: usize = 256 << 10;

/// Why a session may be opened by this peer.
#[derive(Clone)]
pub enum Belief {
    /// The peer's certificate is a node's, and a controller granted that node this session.
    Grants(Identity),
    /// Anybody on the loopback: tests and benchmarks.
    Everybody,
}

impl Belief {
    /// Pools believe an open only with a controller's grant for exactly this volume, epoch,
    /// incarnation and the node that the peer's certificate names.
    fn judge(
        &self,
        certificates: &[CertificateDer<'static>],
        session: &SessionKey,
        hello: &Hello,
    ) -> Result<(), String> {
        if hello.kind == ConnectionKind::Bulk {
            return Err("bulk connections are not served by this version".into());
        }
        let Belief::Grants(identity) = self else { return Ok(()) };
        let certificate = certificates.first().ok_or("the peer showed no certificate")?;
        let peer = peer_of(certificate).map_err(|e| e.to_string())?;
        if peer.role != Role::Node {
            return Err(format!("{peer} is not a node: only targets open replicas"));
        }
        let grant = identity.verify_grant(&hello.grant).map_err(|e| e.to_string())?;
        let exact = grant.volume == hello.volume
            && grant.epoch == session.epoch
            && grant.incarnation == session.incarnation
            && grant.node == peer.name;
        if !exact {
            return Err(format!(
                "the grant is for volume {}, epoch {} on node {}, not for what {peer} asked",
                grant.volume, grant.epoch, grant.node
            ));
        }
        Ok(())
    }
}

pub struct Acceptor {
    network: TcpListener,
    /// `None`: targets of this host come by the network, as it was asked for or as the name is
    /// another process's.
    same_host: Option<UnixListener>,
    security: Arc<std::sync::Mutex<ServerSecurity>>,
    belief: Belief,
    under_way: Arc<AtomicUsize>,
    inputs: Sender<Input>,
    waker: Waker,
    metrics: Metrics,
}

impl Acceptor {
    /// `pool`: the name by which targets of this host look for it, with the listener's port;
    /// `None`: they are not to find it.
    pub fn new(
        network: TcpListener,
        pool: Option<&str>,
        security: Arc<std::sync::Mutex<ServerSecurity>>,
        belief: Belief,
        inputs: Sender<Input>,
        waker: Waker,
        metrics: Metrics,
    ) -> std::io::Result<Self> {
        network.set_nonblocking(true)?;
        let port = network.local_addr()?.port();
        let same_host = pool.and_then(|pool| {
            same_host::listen(pool, port)
                .inspect_err(|error| {
                    tracing::warn!(%error, "targets of this host come by the network");
                })
                .ok()
        });
        let under_way = Arc::default();
        Ok(Acceptor { network, same_host, security, belief, under_way, inputs, waker, metrics })
    }

    /// What is readable when somebody waits at the door.
    pub fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(self.network.as_fd()), self.same_host.as_ref().map(AsFd::as_fd)].into_iter().flatten()
    }

    /// Takes what waits at the door; called when a listener is readable.
    pub fn accept(&self) {
        self.accept_from(|| {
            let (tcp, from) = self.network.accept()?;
            Ok(Some((Stream::Tcp(tcp), PeerAddress::Network(from))))
        });
        let Some(same_host) = &self.same_host else { return };
        self.accept_from(|| {
            let (unix, _) = same_host.accept()?;
            // Others are told by the closed connection to come by the network.
            Ok(same_host::is_of_this_user(&unix)?
                .then_some((Stream::SameHost(unix), PeerAddress::SameHost)))
        });
    }

    fn accept_from(&self, next: impl Fn() -> std::io::Result<Option<(Stream, PeerAddress)>>) {
        // A bounded turn: the shard's sessions come first.
        for _ in 0..16 {
            match next() {
                Ok(Some((stream, from))) => self.hear(stream, from),
                Ok(None) => drop(self.metrics.connections_refused.inc()),
                Err(error) if error.kind() == WouldBlock => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a data connection");
                    return;
                }
            }
        }
    }

    fn hear(&self, stream: Stream, from: PeerAddress) {
        if self.under_way.fetch_add(1, Ordering::AcqRel) >= HANDSHAKES_MAX {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            self.metrics.connections_refused.inc();
            return;
        }
        let security = self.security.lock().expect("never held across a panic").clone();
        let (belief, under_way) = (self.belief.clone(), self.under_way.clone());
        let (inputs, waker) = (self.inputs.clone(), self.waker.clone());
        let metrics = self.metrics.clone();
        let spawned = std::thread::Builder::new()
            .name("handshake".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let heard = answer(stream, from, &security, |certificates, session, hello| {
                    belief.judge(certificates, session, hello)
                });
                under_way.fetch_sub(1, Ordering::AcqRel);
                match heard {
                    Ok(answered) => {
                        // Fails only when the shard is gone, and the connection with it.
                        let _ = inputs.send(Input::Answered(Box::new(answered)));
                        waker.wake();
                    }
                    Err(error) => {
                        metrics.connections_refused.inc();
                        refused(from, &error);
                    }
                }
            });
        if let Err(error) = spawned {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%error, "no thread for a handshake");
        }
    }
}

fn refused(from: PeerAddress, error: &EstablishError) {
    match error {
        // Port scanners and cut connections are daily life; a peer with a certificate that is
        // not believed is somebody's mistake, or worse, and versions that do not fit need people.
        EstablishError::Disbelieved(_) | EstablishError::Versions(_) => {
            tracing::warn!(%from, %error, "data connection")
        }
        _ => tracing::info!(%from, %error, "data connection refused"),
    }
}
