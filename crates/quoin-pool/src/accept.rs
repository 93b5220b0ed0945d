//! Admission of connections, from the network and from this host. Helper threads prove accepted sockets
//! and read their Hello, a bounded number at a time, shared out by source, and hand them to the shard as
//! believed sessions.

use std::io::ErrorKind::WouldBlock;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use quoin_identity::{Identity, Role, peer_of};
use quoin_reactor::Waker;
use quoin_reactor::descriptors::Shortage;
use quoin_replication::pool_host::access::Granted;
use quoin_types::Term;
use quoin_types::ids::SessionKey;
use quoin_types::term::TermOrder;
use quoin_wire::Hello;
use quoin_wire::connection_slots::ConnectionSlots;
use quoin_wire::establish::{EstablishError, Rejection, answer};
use quoin_wire::handshake::{HandshakeError, ServerSecurity};
use quoin_wire::same_host::{self, PeerAddress, Stream};
use rustls::pki_types::CertificateDer;

use crate::metrics::Metrics;
use crate::shard::Input;

/// Handshakes under way at once; more connections than that are closed unheard.
const HANDSHAKES_MAX: usize = 64;
/// A target with a grant of a former term is told of this often.
const TOLD_AGAIN: Duration = Duration::from_secs(60);
/// A handshake needs little stack.
const STACK_BYTES: usize = 256 << 10;

/// Rights of a believed session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Leave {
    /// Of its grant.
    pub term: Term,
    /// It may change the volume's content.
    pub writes: bool,
}

/// Why a session may be opened by this peer.
#[derive(Clone)]
pub enum Belief {
    /// The peer's certificate is a node's, and a controller granted that node this session, in no term
    /// that is over.
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
    ) -> Result<Leave, Rejection> {
        let Belief::Grants(identity) = self else {
            return Ok(Leave { term: Term::default(), writes: true });
        };
        let certificate =
            certificates.first().ok_or_else(|| "the peer showed no certificate".to_owned())?;
        let peer = peer_of(certificate).map_err(|e| e.to_string())?;
        if peer.role != Role::Node {
            return Err(format!("{peer} is not a node: only targets open replicas").into());
        }
        let grant = identity.verify_grant(&hello.grant).map_err(|e| e.to_string())?;
        let (volume, epoch, incarnation) = (grant.volume, grant.epoch, grant.incarnation);
        let granted = Granted { volume, epoch, incarnation, node: &grant.node };
        if !granted.covers(hello.volume, session, &peer.name) {
            return Err(format!(
                "the grant is for volume {}, epoch {} on node {}, not for what {peer} asked",
                grant.volume, grant.epoch, grant.node
            )
            .into());
        }
        let proof = if grant.term == Term::default() { &[] } else { &hello.grant[..] };
        let order = identity.accept_term(proof).map_err(|e| e.to_string())?;
        if order.is_refused() {
            let known = identity.terms().highest();
            let reason = format!(
                "the grant of {peer} is of term {} of the controller, and this pool goes by term {}{}",
                grant.term,
                known.term,
                if order == TermOrder::Rival { " of another one" } else { "" }
            );
            return Err(Rejection { reason, term: known.proof });
        }
        Ok(Leave { term: grant.term, writes: grant.writes })
    }

    /// Returns true if a session that was believed may open now: a newer term may have been heard
    /// of since.
    pub(crate) fn still_opens(&self, term: Term) -> bool {
        match self {
            Belief::Grants(identity) => !identity.terms().compare_with(term).is_refused(),
            Belief::Everybody => true,
        }
    }
}

pub struct Acceptor {
    network: TcpListener,
    /// `None`: targets of this host come by the network, as it was asked for or as the name is
    /// another process's.
    same_host: Option<UnixListener>,
    security: Arc<std::sync::Mutex<ServerSecurity>>,
    belief: Belief,
    places: ConnectionSlots,
    shortage: Shortage,
    inputs: Sender<Input>,
    waker: Waker,
    metrics: Metrics,
    told: Told,
}

/// The last refusal of a former term that was told: its target comes again and again.
#[derive(Clone, Default)]
struct Told(Arc<std::sync::Mutex<Option<(String, Instant)>>>);

impl Told {
    fn is_news(&self, reason: &str) -> bool {
        let mut told = self.0.lock().expect("never held across a panic");
        let same = told.as_ref().filter(|(last, at)| last == reason && at.elapsed() < TOLD_AGAIN);
        if same.is_some() {
            return false;
        }
        *told = Some((reason.to_owned(), Instant::now()));
        true
    }
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
        let (places, shortage) = (ConnectionSlots::new(HANDSHAKES_MAX), Shortage::default());
        Ok(Acceptor {
            network,
            same_host,
            security,
            belief,
            places,
            shortage,
            inputs,
            waker,
            metrics,
            told: Told::default(),
        })
    }

    /// See [`Belief::still_opens`].
    pub(crate) fn still_opens(&self, term: Term) -> bool {
        self.belief.still_opens(term)
    }

    /// Listeners that are readable while a connection waits to be accepted.
    pub fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(self.network.as_fd()), self.same_host.as_ref().map(AsFd::as_fd)].into_iter().flatten()
    }

    /// Accepts the connections that wait; called when a listener is readable. False: the system has no
    /// descriptor for it, and the listeners are to rest.
    pub fn accept(&mut self) -> bool {
        // A bounded turn for each: the shard's sessions come first.
        for _ in 0..16 {
            match self.network.accept() {
                Ok((tcp, from)) => self.hear(Stream::Tcp(tcp), PeerAddress::Network(from)),
                Err(error) if error.kind() == WouldBlock => break,
                Err(error) if self.shortage.is_behind(&error) => return false,
                Err(error) => cannot_accept(&error),
            }
        }
        for _ in 0..16 {
            let Some(same_host) = &self.same_host else { return true };
            match same_host.accept() {
                // Others are told by the closed connection to come by the network.
                Ok((unix, _)) => match same_host::is_of_this_user(&unix) {
                    Ok(true) => self.hear(Stream::SameHost(unix), PeerAddress::SameHost),
                    Ok(false) => drop(self.metrics.connections_refused.inc()),
                    Err(error) => cannot_accept(&error),
                },
                Err(error) if error.kind() == WouldBlock => break,
                Err(error) if self.shortage.is_behind(&error) => return false,
                Err(error) => cannot_accept(&error),
            }
        }
        true
    }

    fn hear(&self, stream: Stream, from: PeerAddress) {
        let Some(place) = self.places.acquire(from) else {
            self.metrics.connections_refused.inc();
            return;
        };
        let security = self.security.lock().expect("never held across a panic").clone();
        let belief = self.belief.clone();
        let (inputs, waker) = (self.inputs.clone(), self.waker.clone());
        let (metrics, told) = (self.metrics.clone(), self.told.clone());
        let spawned = std::thread::Builder::new()
            .name("handshake".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let mut leave = Leave::default();
                let heard = answer(stream, from, &security, |certificates, session, hello| {
                    leave = belief.judge(certificates, session, hello)?;
                    Ok(())
                });
                drop(place);
                match heard {
                    Ok(answered) => {
                        // Fails only when the shard is gone, and the connection with it.
                        let _ = inputs.send(Input::Answered(Box::new(answered), leave));
                        waker.wake();
                    }
                    // A member that looks whether this pool is reached here, as the controller does.
                    Err(EstablishError::Handshake(HandshakeError::NoModeAsked)) => {}
                    Err(error) => {
                        metrics.connections_refused.inc();
                        refused(from, &error);
                        if let EstablishError::Rejected(Rejection { reason, term }) = error
                            && !term.is_empty()
                            && told.is_news(&reason)
                        {
                            let _ = inputs.send(Input::TermRefused(reason));
                            waker.wake();
                        }
                    }
                }
            });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for a handshake");
        }
    }
}

fn cannot_accept(error: &std::io::Error) {
    tracing::warn!(%error, "cannot accept a data connection");
}

fn refused(from: PeerAddress, error: &EstablishError) {
    match error {
        // Port scanners and cut connections are daily life; a peer with a certificate that is
        // not believed is somebody's mistake, or worse, and versions that do not fit need people.
        EstablishError::Rejected(_) | EstablishError::Versions(_) => {
            tracing::warn!(%from, %error, "data connection")
        }
        _ => tracing::info!(%from, %error, "data connection refused"),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use quoin_identity::{Authority, Grant, Lifetimes};
    use quoin_types::ids::{Epoch, Incarnation, TermId};
    use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};
    use quoin_wire::ConnectionKind;
    use rustls::pki_types::pem::PemObject as _;

    use super::*;

    /// Every part of a grant in which it can differ from what is asked, and every kind of peer that can
    /// show it: a name more is a row more.
    #[test]
    fn a_session_is_believed_by_a_grant_for_exactly_it_and_by_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("ca"), Lifetimes::default()).unwrap();
        let identity = |role: Role, name: &str| {
            let place = dir.path().join(format!("{role}-{name}"));
            let identity = authority.issue_identity(&place, role, name).unwrap();
            let chain = CertificateDer::pem_file_iter(place.join("cert.pem")).unwrap();
            (identity, chain.map(Result::unwrap).collect::<Vec<_>>())
        };
        let (controller, _) = identity(Role::Controller, "c");
        let (pool, _) = identity(Role::Pool, "p");
        let term = |number, id| Term { number, id: TermId(id) };
        let present = term(5, 1);
        pool.accept_term(&controller.sign_term(present).unwrap()).unwrap();
        let belief = Belief::Grants(pool);
        let key = |epoch, incarnation| SessionKey {
            epoch: Epoch(epoch),
            incarnation: Incarnation(incarnation),
            nonce: 1,
        };
        let granted = Grant {
            volume: VolumeId(1),
            epoch: Epoch(3),
            incarnation: Incarnation(4),
            node: "n".into(),
            writes: true,
            term: present,
        };
        let judged = |grant: &Grant, of: Role, name: &str, session: &SessionKey| {
            let (_, certificates) = identity(of, name);
            let proof = Bytes::from(controller.sign_grant(grant).unwrap());
            let hello = Hello::new(VolumeId(1), ReplicaId(1), ReplicaGuid(1), proof);
            belief.judge(&certificates, session, &hello)
        };
        let asked = key(3, 4);
        let of = |grant: &Grant| judged(grant, Role::Node, "n", &asked);
        for writes in [true, false] {
            let leave = Leave { term: present, writes };
            assert_eq!(of(&Grant { writes, ..granted.clone() }), Ok(leave), "{writes}");
        }
        let refused = [
            ("volume", of(&Grant { volume: VolumeId(2), ..granted.clone() })),
            ("epoch before", of(&Grant { epoch: Epoch(2), ..granted.clone() })),
            ("epoch after", of(&Grant { epoch: Epoch(4), ..granted.clone() })),
            ("incarnation", of(&Grant { incarnation: Incarnation(5), ..granted.clone() })),
            ("node", of(&Grant { node: "m".into(), ..granted.clone() })),
            ("another node's certificate", judged(&granted, Role::Node, "m", &asked)),
            ("another session", judged(&granted, Role::Node, "n", &key(3, 5))),
            ("former term", of(&Grant { term: term(4, 1), ..granted.clone() })),
            ("rival term", of(&Grant { term: term(5, 2), ..granted.clone() })),
            ("no term", of(&Grant { term: Term::default(), ..granted.clone() })),
        ];
        for (what, judged) in refused {
            let rejection = judged.expect_err(what);
            // Only a target with a grant of a former term is told of the present one.
            let has_term = !rejection.term.is_empty();
            assert_eq!(has_term, what.ends_with("term"), "{what}: {}", rejection.reason);
        }
        for role in [Role::Pool, Role::Controller] {
            let rejection = judged(&granted, role, "n", &asked).unwrap_err();
            assert!(rejection.reason.contains("is not a node"), "{}", rejection.reason);
        }
        assert!(belief.still_opens(present));
        let higher = term(6, 2);
        let by_higher = of(&Grant { term: higher, ..granted.clone() }).unwrap();
        assert_eq!(by_higher, Leave { term: higher, writes: true });
        assert!(!belief.still_opens(present), "one that was believed before a newer term came");
        assert!(belief.still_opens(higher) && of(&granted).is_err());
    }

    #[test]
    fn a_refusal_is_told_once_a_while_and_another_one_at_once() {
        let told = Told::default();
        assert!(told.is_news("one") && !told.is_news("one"));
        assert!(told.is_news("two") && !told.is_news("two"));
        let ago = Instant::now().checked_sub(TOLD_AGAIN).unwrap();
        told.0.lock().unwrap().as_mut().unwrap().1 = ago;
        assert!(told.is_news("two"));
    }

    #[test]
    fn a_peer_without_a_certificate_that_can_be_read_is_refused_for_either_kind_of_connection() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("ca"), Lifetimes::default()).unwrap();
        let pool = authority.issue_identity(&dir.path().join("p"), Role::Pool, "p").unwrap();
        let session = SessionKey { epoch: Epoch(1), incarnation: Incarnation(1), nonce: 1 };
        let hello = Hello::new(VolumeId(1), ReplicaId(1), ReplicaGuid(1), Bytes::new());
        let bulk = Hello { kind: ConnectionKind::Bulk, ..hello.clone() };
        let (all, grants) = (Belief::Everybody, Belief::Grants(pool));
        let unreadable = [CertificateDer::from(vec![0x30, 3, 1, 2, 3])];
        for hello in [&hello, &bulk] {
            let refusal = |certificates: &[CertificateDer<'static>]| {
                grants.judge(certificates, &session, hello).unwrap_err().reason
            };
            assert!(refusal(&[]).contains("no certificate"));
            assert!(!refusal(&unreadable).contains("no certificate"));
            let leave = Leave { term: Term::default(), writes: true };
            assert_eq!(all.judge(&[], &session, hello), Ok(leave));
        }
    }
}
