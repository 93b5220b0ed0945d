//! Connections to replicas, made on helper threads and handed to the shard when they are proven.
//! Which are made next is decided by [`quoin_replication::target_host::dial`].

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use prometheus_client::metrics::gauge::Gauge;

use quoin_identity::{Expected, Identity, Role};
use quoin_reactor::Waker;
use quoin_replication::target_host::dial::{Queue, is_answered};
use quoin_types::VolumeId;
use quoin_types::ids::SessionKey;
use quoin_wire::establish::{EstablishError, dial};
use quoin_wire::handshake::ClientSecurity;
use quoin_wire::{Connection, Hello, Mode};
use rustls::pki_types::ServerName;

use crate::shard::Input;

const STACK_BYTES: usize = 256 << 10;

/// Protection of connections to replicas.
#[derive(Clone)]
pub enum Reach {
    /// Mutual TLS; the pool must hold the certificate of its name.
    Tls { identity: Identity, mode: Mode },
    /// Unprotected, on the loopback only: tests and benchmarks.
    PlainLoopback,
}

impl Reach {
    fn security(&self, pool: &str) -> Result<ClientSecurity, String> {
        match self {
            Reach::PlainLoopback => Ok(ClientSecurity::PlainLoopback),
            Reach::Tls { identity, mode } => Ok(ClientSecurity::Tls {
                config: identity
                    .client_config(Expected::Named(Role::Pool, pool.to_owned()))
                    .map_err(|e| e.to_string())?,
                // The certificate's holder is checked by role and name, not by host.
                server_name: ServerName::try_from("quoin").expect("a valid name"),
                mode: *mode,
            }),
        }
    }
}

impl Reach {
    /// Accepts a newer term of a pool than the grant's: the target learns of it, and its controller
    /// by the target.
    fn overtaken(&self, proof: &[u8]) -> String {
        let Reach::Tls { identity, .. } = self else {
            return "the pool showed a term without TLS".to_owned();
        };
        match identity.accept_term(proof).and_then(|_| identity.verify_term(proof)) {
            Ok(term) => format!(
                "it goes by term {term} of the controller, and the grant is of another one: the \
                 cluster's records were recovered elsewhere"
            ),
            Err(error) => format!("it goes by another term of the controller: {error}"),
        }
    }
}

/// One connection to make.
pub struct Dial {
    pub volume: VolumeId,
    pub session: SessionKey,
    /// Number of the bulk connection; `None`: the session's own connection.
    pub bulk: Option<u64>,
    pub hello: Hello,
    pub pool: String,
    /// host:port
    pub address: String,
}

/// The dials of a process.
#[derive(Clone)]
pub struct Dials(Arc<Inner>);

struct Inner {
    reach: Mutex<Reach>,
    queue: Mutex<Queue<Waiting>>,
    /// Dials under way or waiting, for `/metrics`.
    count: Gauge,
}

/// The dials of one shard.
#[derive(Clone)]
pub struct Dialler {
    dials: Dials,
    outcomes: Outcomes,
}

/// Destination of a dial's outcome.
#[derive(Clone)]
struct Outcomes {
    inputs: Sender<Input>,
    waker: Waker,
}

struct Waiting {
    dial: Dial,
    outcomes: Outcomes,
}

impl Dials {
    /// Returns an empty set of dials. `count` shows how many are under way or wait.
    pub fn new(reach: Reach, count: Gauge) -> Self {
        Dials(Arc::new(Inner { reach: Mutex::new(reach), queue: Mutex::default(), count }))
    }

    /// Sets the protection of connections from now on.
    pub fn set_reach(&self, reach: Reach) {
        *self.0.reach.lock().unwrap_or_else(PoisonError::into_inner) = reach;
    }

    /// Returns the dialler of a shard, which receives the outcomes as its inputs.
    pub(crate) fn of_shard(&self, inputs: Sender<Input>, waker: Waker) -> Dialler {
        Dialler { dials: self.clone(), outcomes: Outcomes { inputs, waker } }
    }

    fn queue(&self) -> MutexGuard<'_, Queue<Waiting>> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins what may begin after `change`, each dial on a thread of its own.
    fn change(&self, change: impl FnOnce(&mut Queue<Waiting>)) {
        let mut queue = self.queue();
        change(&mut queue);
        while let Some(waiting) = queue.begin_next() {
            let (dials, outcomes) = (self.clone(), waiting.outcomes.clone());
            let Dial { volume, session, bulk, pool, address, .. } = &waiting.dial;
            let (volume, session, bulk) = (*volume, *session, *bulk);
            let (pool, address) = (pool.clone(), address.clone());
            let thread = std::thread::Builder::new().name("dial".into()).stack_size(STACK_BYTES);
            if let Err(error) = thread.spawn(move || dials.make(waiting)) {
                queue.ended(&address, false);
                let why = format!("no thread to connect with: {error}");
                outcomes.tell(volume, session, bulk, pool, Err(why.into()));
            }
        }
        self.0.count.set(queue.len() as i64);
    }

    fn make(&self, Waiting { dial, outcomes }: Waiting) {
        let began = Instant::now();
        let outcome = self.connect(&dial);
        let Dial { volume, session, bulk, pool, address, .. } = dial;
        let proven = is_answered(outcome.is_ok(), began.elapsed());
        self.change(|queue| queue.ended(&address, proven));
        outcomes.tell(volume, session, bulk, pool, outcome);
    }

    fn connect(&self, to: &Dial) -> Result<Connection, Undialled> {
        let reach = self.0.reach.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let security = reach.security(&to.pool)?;
        let addresses: Vec<SocketAddr> = to
            .address
            .to_socket_addrs()
            .map_err(|e| format!("cannot resolve {}: {e}", to.address))?
            .collect();
        let mut last = format!("{} has no address", to.address);
        for address in addresses {
            match dial(&to.pool, address, &security, to.session, &to.hello) {
                Ok(connection) => return Ok(connection),
                Err(EstablishError::FormerTerm(proof)) => {
                    return Err(Undialled { why: reach.overtaken(&proof), is_former: true });
                }
                Err(error) => last = error.to_string(),
            }
        }
        Err(last.into())
    }
}

/// Why a connection was not made.
#[derive(Debug)]
pub struct Undialled {
    pub why: String,
    /// The grant is of a former term.
    pub is_former: bool,
}

impl From<String> for Undialled {
    fn from(why: String) -> Self {
        Self { why, is_former: false }
    }
}

impl Dialler {
    /// Starts a dial; the outcome arrives as [`Input::Dialled`].
    pub(crate) fn start(&self, dial: Dial) {
        let (address, outcomes) = (dial.address.clone(), self.outcomes.clone());
        self.dials.change(|queue| queue.add(&address, Waiting { dial, outcomes }));
    }

    /// Reports at once that a connection cannot be made.
    pub(crate) fn fail(
        &self,
        volume: VolumeId,
        session: SessionKey,
        bulk: Option<u64>,
        why: String,
    ) {
        self.outcomes.tell(volume, session, bulk, String::new(), Err(why.into()));
    }

    /// Gives connections up: their dials are not made any more if they wait. A connection is a
    /// session's own, or the bulk connection of a number.
    pub(crate) fn give_up(
        &self,
        volume: VolumeId,
        which: impl Fn(SessionKey, Option<u64>) -> bool,
    ) {
        let is_one = |dial: &Dial| dial.volume == volume && which(dial.session, dial.bulk);
        self.dials.change(|queue| queue.retain(|waiting| !is_one(&waiting.dial)));
    }

    /// Gives up all dials of a volume that is not served any more.
    pub(crate) fn give_up_all(&self, volume: VolumeId) {
        self.give_up(volume, |_, _| true);
    }
}

impl Outcomes {
    fn tell(
        &self,
        volume: VolumeId,
        session: SessionKey,
        bulk: Option<u64>,
        pool: String,
        outcome: Result<Connection, Undialled>,
    ) {
        let outcome = outcome.map(Box::new);
        // The send fails only when the shard is gone.
        let _ = self.inputs.send(Input::Dialled { volume, session, bulk, pool, outcome });
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use bytes::Bytes;
    use quoin_reactor::Reactor;
    use quoin_types::ids::{Epoch, Incarnation};
    use quoin_types::{ReplicaGuid, ReplicaId};
    use quoin_wire::establish::answer;
    use quoin_wire::handshake::ServerSecurity;
    use quoin_wire::same_host::{PeerAddress, Stream};

    use super::*;

    /// Addresses of hosts that drop packets, as far as a client can tell: a connection to a
    /// listener whose queue is full gets no answer.
    struct BlackHole {
        listener: TcpListener,
        _filling: Vec<rustix::fd::OwnedFd>,
    }

    impl BlackHole {
        fn new() -> Self {
            use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            rustix::net::listen(&listener, 0).unwrap();
            let address = listener.local_addr().unwrap();
            let fill = |_| {
                let (family, flags) = (AddressFamily::INET, SocketFlags::NONBLOCK);
                let socket = socket_with(family, SocketType::STREAM, flags, None).unwrap();
                let _ = connect(&socket, &address);
                socket
            };
            let filling = (0..4).map(fill).collect();
            Self { listener, _filling: filling }
        }

        fn address(&self) -> String {
            self.listener.local_addr().unwrap().to_string()
        }
    }

    /// A pool, as far as a dial sees it.
    fn answering() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            while let Ok((tcp, from)) = listener.accept() {
                let from = PeerAddress::Network(from);
                let security = ServerSecurity::PlainLoopback;
                let _ = answer(Stream::Tcp(tcp), from, &security, |_, _, _| Ok(()));
            }
        });
        address
    }

    fn dialler() -> (Dialler, Receiver<Input>, Gauge, Reactor) {
        let (sender, inputs) = channel();
        let (reactor, count) = (Reactor::new().unwrap(), Gauge::default());
        let dials = Dials::new(Reach::PlainLoopback, count.clone());
        (dials.of_shard(sender, reactor.waker()), inputs, count, reactor)
    }

    fn session(nonce: u64) -> SessionKey {
        SessionKey { epoch: Epoch(1), incarnation: Incarnation(1), nonce }
    }

    fn to(address: &str, n: u64) -> Dial {
        let volume = VolumeId(n.into());
        Dial {
            volume,
            session: session(n),
            bulk: None,
            hello: Hello::new(volume, ReplicaId(1), ReplicaGuid(1), Bytes::new()),
            pool: format!("p of {address}"),
            address: address.to_owned(),
        }
    }

    fn outcome(inputs: &Receiver<Input>) -> bool {
        match inputs.recv_timeout(Duration::from_secs(60)).expect("an outcome") {
            Input::Dialled { outcome, .. } => outcome.is_ok(),
            _ => panic!("something else than an outcome"),
        }
    }

    #[test]
    fn a_host_that_answers_is_dialled_at_once_however_many_dials_one_that_does_not_has() {
        let (dialler, inputs, count, _reactor) = dialler();
        let (hole, healthy) = (BlackHole::new(), answering());
        (0..150).for_each(|n| dialler.start(to(&hole.address(), n)));
        // The first of them has failed: from now on the host counts as not answering.
        assert!(!outcome(&inputs));
        (150..300).for_each(|n| dialler.start(to(&healthy, n)));
        let failed = (0..150).filter(|_| !outcome(&inputs)).count();
        assert!(failed <= 3, "{failed} dials to the host that does not answer came first");
        assert!(count.get() >= 140, "{}", count.get());
    }

    #[test]
    fn a_dial_that_waits_goes_away_with_its_session_or_its_volume() {
        let (dialler, inputs, count, _reactor) = dialler();
        let hole = BlackHole::new();
        (0..150).for_each(|n| dialler.start(to(&hole.address(), n)));
        assert_eq!(count.get(), 150);
        dialler.give_up(VolumeId(7), |of, _| of == session(8));
        assert_eq!(count.get(), 150, "no dial has both");
        (1..149).for_each(|n| dialler.give_up(VolumeId(n.into()), |of, _| of == session(n)));
        dialler.give_up_all(VolumeId(149));
        assert_eq!(count.get(), 1);
        assert!(!outcome(&inputs));
        assert!(inputs.recv_timeout(Duration::from_millis(200)).is_err(), "another one was made");
    }

    #[test]
    fn a_term_that_a_pool_shows_is_no_reason_without_a_proof() {
        let plain = Reach::PlainLoopback.overtaken(b"proof");
        assert_eq!(plain, "the pool showed a term without TLS");
        let dir = tempfile::tempdir().unwrap();
        let authority = quoin_identity::Authority::create(dir.path(), Default::default()).unwrap();
        let node = dir.path().join("n");
        let identity = authority.issue_identity(&node, Role::Node, "n1").unwrap();
        let tls = Reach::Tls { identity, mode: quoin_wire::security::Mode::Authenticate };
        let said = tls.overtaken(b"proof");
        assert!(said.starts_with("it goes by another term of the controller: "), "{said}");
    }
}
