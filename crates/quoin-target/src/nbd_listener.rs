//! NBD over TCP: one port for every volume that this node serves, exported by its name.
//!
//! Only `STARTTLS` is accepted, with a certificate of this cluster whose key counts ([`crate::standing`]):
//! an admin's, that of the node itself, to which the volumes behind this port are attached, or that of
//! another node that shares a volume with it, for that volume and as it may use it; by the port that
//! is for nodes that share volumes, theirs alone. Any other proven member gets a
//! refusal with the reason; an unproven client learns nothing. A plain port must be requested and
//! is opened on loopback alone, which is open to the host's own users anyway.
//!
//! Negotiation runs on helper threads, a bounded number at a time, shared by source address, and
//! each with a deadline, so a slow or malformed client costs a volume nothing, nor another client
//! its turn. A client that has opened its export is handed to the volume's shard, and from there on
//! is like one of the unix socket. Its connection ends when its certificate does, and when the key of
//! that counts no more.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use bytes::BytesMut;
use quoin_identity::{Identity, valid_until};
use quoin_nbd::{Description, Exports, Limits, Numbering, Proven, Refused, Session, TlsPolicy};
use quoin_reactor::descriptors::{LISTENER_REST, Shortage};
use quoin_types::ClientId;
use quoin_types::block::{DeviceInfo, Frontend, Request};
use quoin_wire::connection_slots::{ConnectionSlot, ConnectionSlots};
use quoin_wire::handshake;
use quoin_wire::same_host::PeerAddress;
use tokio::sync::watch;

use crate::client::{SharedUse, User};
use crate::control::{Control, Offered};
use crate::standing::{Holder, Port, Standing};

/// Most negotiations under way at once.
const NEGOTIATIONS_MAX: usize = 64;
/// Most clients that wait for theirs, as all those of a host do when a target has started; one
/// without a place is closed unread.
const WAITING_MAX: usize = 256;
/// Interval of checks for a place.
const LOOK: Duration = Duration::from_millis(10);
/// Longest time from the first byte to an open export.
const NEGOTIATION_MAX: Duration = Duration::from_secs(20);
/// Silence after which probes are sent; a client whose host is gone is noticed a few probes later.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Address and protection of volumes over TCP.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    pub listen: SocketAddr,
    /// `HOST:PORT` that users get; the node's name and the port where it is `None`.
    pub advertise: Option<String>,
    /// No TLS; loopback only.
    pub plain: bool,
}

/// Why the port is not opened.
#[derive(Debug, thiserror::Error)]
pub enum NbdListenerError {
    #[error(
        "plain NBD on {0} would give every volume to whoever reaches that address: only loopback \
         (127.0.0.1 or ::1) may be plain; leave the flag away to have TLS with client certificates"
    )]
    PlainBeyondLoopback(SocketAddr),
    #[error("cannot listen on {address} for NBD ({source}): choose another --nbd-listen")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Identity(#[from] quoin_identity::Error),
}

/// A client that has opened a volume, on its way to the volume's shard.
pub struct NewClient {
    pub socket: TcpStream,
    pub session: Session,
    /// Bytes that arrived after the negotiation.
    pub input: BytesMut,
    /// Requests among them.
    pub requests: Vec<Request>,
    /// Remaining validity of the client's certificate.
    pub life: Option<Duration>,
    /// `None`: it came without TLS.
    pub user: Option<User>,
    /// Address by which it came; `None`: not over the network.
    pub from: Option<IpAddr>,
}

/// The open port.
pub(crate) struct NbdListener {
    listener: TcpListener,
    policy: TlsPolicy,
    scheme: &'static str,
    authority: String,
    port: u16,
    advertise: Option<String>,
}

impl NbdListener {
    pub fn open(options: &NbdOptions, identity: &Identity) -> Result<Self, NbdListenerError> {
        if options.plain && !options.listen.ip().is_loopback() {
            return Err(NbdListenerError::PlainBeyondLoopback(options.listen));
        }
        let failed = |source| NbdListenerError::Listen { address: options.listen, source };
        let listener = TcpListener::bind(options.listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let (policy, scheme) = if options.plain {
            (TlsPolicy::Plain, "nbd")
        } else {
            (TlsPolicy::Required(identity.server_config()?), "nbds")
        };
        // The name is the one that the node's certificate shows to clients that check host names.
        let named = || match options.plain {
            true => bound.to_string(),
            false => format!("{}:{}", identity.peer().name, bound.port()),
        };
        let authority = options.advertise.clone().unwrap_or_else(named);
        tracing::info!(%bound, tls = !options.plain, "NBD is served over TCP");
        let (port, advertise) = (bound.port(), options.advertise.clone());
        Ok(NbdListener { listener, policy, scheme, authority, port, advertise })
    }

    pub fn is_tls(&self) -> bool {
        matches!(self.policy, TlsPolicy::Required(_))
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns where other nodes reach it: what is advertised, or this address of the host.
    pub fn address(&self, ip: Option<IpAddr>) -> Option<String> {
        let here = || ip.map(|ip| SocketAddr::new(ip, self.port).to_string());
        self.advertise.clone().or_else(here)
    }

    /// Returns the address of a volume, as NBD clients take it.
    pub fn uri(&self, volume: &str) -> String {
        let mut uri = format!("{}://{}/", self.scheme, self.authority);
        for byte in volume.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    uri.push(char::from(byte));
                }
                other => uri += &format!("%{other:02X}"),
            }
        }
        uri
    }

    /// Accepts clients by this port until `shutdown`.
    pub async fn serve(
        &self,
        port: Port,
        control: Arc<Control>,
        mut shutdown: watch::Receiver<bool>,
    ) -> std::io::Result<()> {
        let listener = tokio::net::TcpListener::from_std(self.listener.try_clone()?)?;
        let (waiting, negotiations) =
            (ConnectionSlots::new(WAITING_MAX), ConnectionSlots::new(NEGOTIATIONS_MAX));
        let mut shortage = Shortage::default();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = shutdown.wait_for(|down| *down) => return Ok(()),
            };
            let (socket, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if !shortage.is_behind(&error) {
                        tracing::warn!(%error, "an NBD client was not accepted");
                    }
                    tokio::time::sleep(LISTENER_REST).await;
                    continue;
                }
            };
            let Some(wait) = waiting.acquire(PeerAddress::Network(from)) else {
                control.options.metrics.clients.refused();
                continue;
            };
            let (control, policy) = (control.clone(), self.policy.clone());
            let negotiations = negotiations.clone();
            tokio::spawn(async move {
                let place = place(&negotiations, from).await;
                drop(wait);
                let Some(place) = place else { return control.options.metrics.clients.refused() };
                tokio::task::spawn_blocking(move || {
                    let _place = place;
                    if let Err(why) = hear(socket.into_std(), from.ip(), policy, port, &control) {
                        control.options.metrics.clients.refused();
                        tracing::info!(%from, why, "an NBD client was turned away");
                    }
                });
            });
        }
    }
}

/// Waits for a place to negotiate in, no longer than the client may be silent.
async fn place(negotiations: &ConnectionSlots, from: SocketAddr) -> Option<ConnectionSlot> {
    let until = Instant::now() + handshake::SILENCE_MAX;
    loop {
        let place = negotiations.acquire(PeerAddress::Network(from));
        if place.is_some() || Instant::now() >= until {
            return place;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Negotiates with one client and hands it to its volume.
fn hear(
    socket: std::io::Result<TcpStream>,
    from: IpAddr,
    policy: TlsPolicy,
    port: Port,
    control: &Arc<Control>,
) -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut socket = socket.map_err(failed)?;
    if control.is_fenced(from, None) {
        return Err(format!("address {from} is fenced"));
    }
    socket.set_nonblocking(false).map_err(failed)?;
    socket.set_nodelay(true).map_err(failed)?;
    keep_alive(&socket).map_err(failed)?;
    let standing = match policy {
        TlsPolicy::Plain => Standing::Opener(None),
        TlsPolicy::Required(_) => Standing::Unknown,
    };
    let learned =
        Arc::new(Mutex::new(Learned { standing, until: None, secret: None, proof: None }));
    let found = Arc::new(Mutex::default());
    let pending = PendingClient {
        control: control.clone(),
        port,
        learned: learned.clone(),
        found: found.clone(),
    };
    let mut session = Session::over(Box::new(pending), policy, Limits::default());
    let (mut input, mut requests, mut output) = (BytesMut::new(), Vec::new(), Vec::new());
    let (deadline, mut heard) = (Instant::now() + NEGOTIATION_MAX, false);
    loop {
        let taken = session.receive(&mut input, &mut requests, &mut output);
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("no export was opened in time".to_owned());
        }
        socket.set_write_timeout(Some(left)).map_err(failed)?;
        for piece in output.drain(..) {
            socket.write_all(&piece).map_err(failed)?;
        }
        taken.map_err(|closed| closed.0)?;
        if session.device().is_some() {
            break;
        }
        // A client answers the greeting at once; one that does not keeps its place no longer.
        let patience = if heard { left } else { left.min(handshake::SILENCE_MAX) };
        socket.set_read_timeout(Some(patience)).map_err(failed)?;
        let mut piece = [0; 16 << 10];
        match socket.read(&mut piece).map_err(failed)? {
            0 => return Err("it closed the connection".to_owned()),
            read => {
                heard = true;
                input.extend_from_slice(&piece[..read]);
            }
        }
    }
    socket.set_nonblocking(true).map_err(failed)?;
    // A client that gave up meanwhile has another connection by now, which this one must not follow.
    if matches!(socket.peek(&mut [0]), Ok(0)) {
        return Err("it closed the connection".to_owned());
    }
    let name = session.device().map(|device| device.name.clone()).unwrap_or_default();
    let learned = learned.lock().expect("never held across a panic").clone();
    let life = learned.until.map(|at| at.duration_since(SystemTime::now()).unwrap_or_default());
    let read_only = session.device().is_some_and(|device| device.read_only);
    let user = match learned.standing {
        Standing::Opener(None) => None,
        Standing::Opener(Some(holder)) => Some(User { holder, shares: None }),
        Standing::Sharer(holder) => {
            let (_, client) = *found.lock().expect("never held across a panic");
            Some(User { holder, shares: Some(SharedUse { read_only, client }) })
        }
        Standing::Unknown | Standing::Forbidden(_) => {
            return Err("nothing is open to it".to_owned());
        }
    };
    let from = Some(from);
    let client = NewClient { socket, session, input, requests, life, user, from };
    if control.adopt(&name, client) { Ok(()) } else { Err(format!("volume {name} has just left")) }
}

fn keep_alive(socket: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(socket.as_fd(), true)?;
    sockopt::set_tcp_keepidle(socket.as_fd(), SILENCE_MAX)?;
    sockopt::set_tcp_keepintvl(socket.as_fd(), SILENCE_MAX / 6)?;
    Ok(())
}

/// Facts about a client.
#[derive(Clone)]
struct Learned {
    standing: Standing,
    /// End of its certificate.
    until: Option<SystemTime>,
    /// Secret that the two ends of the connection alone have.
    secret: Option<[u8; 32]>,
    /// Proof that it showed of a volume's key.
    proof: Option<[u8; 32]>,
}

/// A client whose certificate may be unknown yet, and the volumes that it may see.
struct PendingClient {
    control: Arc<Control>,
    port: Port,
    learned: Arc<Mutex<Learned>>,
    /// First epoch of the use of the export that was found last, and the number of the attachment.
    found: Arc<Mutex<(u64, u64)>>,
}

impl PendingClient {
    fn learned(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().expect("never held across a panic")
    }

    /// Returns what the client may open.
    fn exports(&self) -> Result<Vec<Offered>, Refused> {
        let Learned { standing, secret, proof, .. } = self.learned().clone();
        match standing {
            Standing::Opener(_) => {
                let all = self.control.exports().into_iter();
                Ok(all.map(|info| Offered { info, since_epoch: 0, client: 0 }).collect())
            }
            Standing::Sharer(holder) => Ok(self.control.exports_to(&holder, secret.zip(proof))),
            Standing::Unknown => Err(Refused::Unknown),
            Standing::Forbidden(why) => Err(Refused::Forbidden(why)),
        }
    }
}

impl PendingClient {
    fn offered(&self, name: &[u8]) -> Result<Option<Offered>, Refused> {
        Ok(self.exports()?.into_iter().find(|offered| offered.info.name.as_bytes() == name))
    }
}

impl Exports for PendingClient {
    fn identify(&mut self, proven: &Proven<'_>) {
        let Some(leaf) = proven.certificates.first() else { return };
        let standing = match Holder::of(leaf) {
            Ok(holder) => {
                let node = &self.control.options.node;
                Standing::of(holder, node, self.port, &self.control.openers())
            }
            Err(error) => Standing::Forbidden(error.to_string()),
        };
        if let Standing::Forbidden(why) = &standing {
            tracing::warn!(why, "an NBD client with a certificate that is not for this");
        }
        let (until, secret) = (valid_until(leaf), Some(proven.secret));
        *self.learned() = Learned { standing, until, secret, proof: None };
    }

    fn prove(&self, proof: [u8; 32]) {
        self.learned().proof = Some(proof);
    }

    fn description(&self) -> String {
        let (since_epoch, _) = *self.found.lock().expect("never held across a panic");
        Description { since_epoch }.to_string()
    }

    fn list(&self) -> Result<Vec<String>, Refused> {
        Ok(self.exports()?.into_iter().map(|offered| offered.info.name).collect())
    }

    fn client(&self, name: &[u8], shown: ClientId) -> Result<Option<(ClientId, bool)>, Refused> {
        let Offered { client: attachment, .. } = self.offered(name)?.ok_or(Refused::Unknown)?;
        Numbering { attachment, random: rand::random() }.client(shown)
    }

    fn find(&self, name: &[u8]) -> Result<DeviceInfo, Refused> {
        let standing = self.learned().standing.clone();
        match (self.offered(name)?, standing) {
            (Some(offered), _) => {
                let mut found = self.found.lock().expect("never held across a panic");
                *found = (offered.since_epoch, offered.client);
                Ok(offered.info)
            }
            (None, Standing::Sharer(holder)) => Err(Refused::Forbidden(format!(
                "{holder} may not use that volume of node {}: it does not share it by the key of this \
                 certificate, has not proven the key of its encryption, or the volume is not served \
                 there",
                self.control.options.node
            ))),
            (None, _) if name.is_empty() => Err(Refused::Forbidden(
                "this port serves volumes by name: put the volume's name at the end of the address"
                    .to_owned(),
            )),
            (None, _) => Err(Refused::Unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use quoin_identity::Role;

    use super::*;

    #[test]
    fn a_client_that_is_silent_is_asked_for_a_sign_of_life_and_again_six_times_as_often() {
        use rustix::net::sockopt;

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        keep_alive(&socket).unwrap();
        assert!(sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), Duration::from_secs(60));
        assert_eq!(sockopt::tcp_keepintvl(&socket).unwrap(), Duration::from_secs(10));
    }

    #[test]
    fn a_port_that_would_be_open_to_everybody_or_is_taken_is_refused_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let authority = quoin_identity::Authority::create(
            &dir.path().join("ca"),
            quoin_identity::Lifetimes::default(),
        );
        let identity = authority.unwrap().issue_identity(&dir.path().join("n"), Role::Node, "n1");
        let identity = identity.unwrap();
        let open = |listen: SocketAddr, plain| {
            NbdListener::open(&NbdOptions { listen, advertise: None, plain }, &identity)
        };
        for beyond in ["0.0.0.0:0", "[::]:0", "192.0.2.7:10809"] {
            let refused = open(beyond.parse().unwrap(), true).err().unwrap();
            assert!(matches!(refused, NbdListenerError::PlainBeyondLoopback(_)), "{refused}");
        }
        let first = open("127.0.0.1:0".parse().unwrap(), true).unwrap();
        let taken = first.listener.local_addr().unwrap();
        assert_eq!(first.uri("a/b"), format!("nbd://{taken}/a%2Fb"));
        let refused = open(taken, false).err().unwrap().to_string();
        assert!(
            refused.contains(&taken.to_string()) && refused.contains("--nbd-listen"),
            "{refused}"
        );
        let second = open("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let port = second.listener.local_addr().unwrap().port();
        assert_eq!(second.uri("db 1"), format!("nbds://n1:{port}/db%201"));
    }
}
