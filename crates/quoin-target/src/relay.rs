//! Volumes that the target of another node serves: their unix sockets here lead there, over TLS.
//!
//! The attach process of a host connects to the socket of a volume and need not know where the
//! volume's target is. While that is another node's, a relay listens on the socket. It opens the
//! volume at that node with this node's certificate, and then passes bytes on. The address moves
//! with the target: the relay's connections end, and their clients connect again.
//!
//! The target there ends the older connection of this node when it takes a newer one, so that a
//! request that lies unread in the older one is never carried out after it was sent again.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quoin_encryption::DataKey;
use quoin_identity::{Expected, Identity, Role};
use quoin_nbd::protocol::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, be32, be64,
    option, reply,
};
use quoin_types::VolumeId;
use rustix::net::sockopt;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsConnector;

use crate::listen::{self, ListenError};
use crate::standing::Holder;

/// Most clients of one volume.
const CLIENTS_MAX: usize = 16;
/// Time to reach the target, with the negotiation up to TLS.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Time for a client to answer the greeting.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time after which the path to the target counts as dead.
const PATH_SILENCE_MAX: Duration = Duration::from_secs(4);
/// Time for the target to close a connection that the client has ended.
const CLOSE_MAX: Duration = Duration::from_secs(10);
/// Pause after a client that was not accepted.
const REST: Duration = Duration::from_millis(100);
/// Longest data of an option; no client has a longer one.
const OPTION_BYTES_MAX: usize = 16 << 10;
/// Buffer of each direction.
const BUFFER_BYTES: usize = 256 << 10;

/// Target of another node, and the name of the volume there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Destination {
    pub node: String,
    /// `HOST:PORT`.
    pub address: String,
    pub export: String,
    /// Hashes of the keys by which that node is known.
    pub key_hashes: Vec<String>,
    /// The key of an encrypted volume, which that target asks proof of.
    pub key: Option<DataKey>,
}

struct Relay {
    /// Use that it serves. The end of one use does not end the relay of the next one.
    generation: u64,
    /// The volume was detached, and its device goes away.
    leaving: bool,
    path: PathBuf,
    destination: watch::Sender<Destination>,
    task: JoinHandle<()>,
}

impl Relay {
    /// Ends the relay. The path is free when this returns.
    fn end(self) {
        let _ = std::fs::remove_file(&self.path);
        self.task.abort();
    }
}

/// The relays of one host.
pub(crate) struct Relays {
    identity: Identity,
    running: Mutex<BTreeMap<VolumeId, Relay>>,
    generations: AtomicU64,
}

impl Relays {
    pub fn new(identity: Identity) -> Self {
        Self { identity, running: Mutex::default(), generations: AtomicU64::default() }
    }

    /// Relays a volume from now on, or to another place than before.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn want(&self, id: VolumeId, path: &Path, to: Destination) -> Result<(), ListenError> {
        let mut running = self.running.lock().expect("never held across a panic");
        if let Some(relay) = running.get_mut(&id) {
            if std::mem::take(&mut relay.leaving) {
                relay.generation = self.next_generation();
            }
            let is_news = |known: &mut Destination| {
                let differs = *known != to;
                *known = to;
                differs
            };
            relay.destination.send_if_modified(is_news);
            return Ok(());
        }
        let listener = listen::bind(path)?;
        let listener = UnixListener::from_std(listener).map_err(|source| ListenError::Io {
            operation: "watch",
            path: path.to_owned(),
            source,
        })?;
        tracing::info!(volume = %id, node = to.node, address = to.address, "is reached at another node");
        let (destination, moves) = watch::channel(to);
        let task = tokio::spawn(serve(listener, moves, self.identity.clone()));
        let (generation, path) = (self.next_generation(), path.to_owned());
        running.insert(id, Relay { generation, leaving: false, path, destination, task });
        Ok(())
    }

    fn next_generation(&self) -> u64 {
        self.generations.fetch_add(1, Ordering::Relaxed)
    }

    /// Begins the end of a volume's use, for [`Self::end_use`]; `None`: that is under way.
    pub fn begin_end(&self, id: VolumeId) -> Option<u64> {
        let mut running = self.running.lock().expect("never held across a panic");
        let relay = running.get_mut(&id).filter(|relay| !relay.leaving)?;
        relay.leaving = true;
        Some(relay.generation)
    }

    /// Ends the relay of a volume, unless it was attached again since.
    pub fn end_use(&self, id: VolumeId, generation: u64) {
        let mut running = self.running.lock().expect("never held across a panic");
        if running.get(&id).is_some_and(|relay| relay.generation == generation)
            && let Some(relay) = running.remove(&id)
        {
            relay.end();
        }
    }

    /// Ends the relay of a volume where it leads to another node than this.
    pub fn leave(&self, id: VolumeId, unless: &str) {
        let leads_there = {
            let running = self.running.lock().expect("never held across a panic");
            running.get(&id).is_some_and(|relay| relay.destination.borrow().node == unless)
        };
        if !leads_there {
            self.release(id);
        }
    }

    /// Ends the relay of a volume, if there is one.
    pub fn release(&self, id: VolumeId) {
        let relay = self.running.lock().expect("never held across a panic").remove(&id);
        if let Some(relay) = relay {
            relay.end();
        }
    }

    /// Volumes that are relayed now.
    pub fn ids(&self) -> Vec<VolumeId> {
        self.running.lock().expect("never held across a panic").keys().copied().collect()
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        self.ids().into_iter().for_each(|id| self.release(id));
    }
}

/// Accepts clients, and ends them when the target moves.
async fn serve(
    listener: UnixListener,
    mut moves: watch::Receiver<Destination>,
    identity: Identity,
) {
    let mut clients = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if clients.len() < CLIENTS_MAX => match accepted {
                Ok((client, _)) => {
                    let (to, identity) = (moves.borrow().clone(), identity.clone());
                    clients.spawn(async move {
                        if let Err(error) = relay(client, &to, &identity).await {
                            tracing::info!(node = to.node, address = to.address, %error,
                                "a client of a volume at another node is not served");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client");
                    tokio::time::sleep(REST).await;
                }
            },
            Some(_) = clients.join_next() => {}
            moved = moves.changed() => match moved {
                Ok(()) => clients.abort_all(),
                Err(_) => return,
            },
        }
    }
}

/// Connects one client with the target, until either ends.
async fn relay(mut client: UnixStream, to: &Destination, identity: &Identity) -> io::Result<()> {
    let greeted = tokio::time::timeout(SILENCE_MAX, greet(&mut client));
    let flags = greeted.await.map_err(|_| late("the client"))??;
    let reached = tokio::time::timeout(CONNECT_MAX, reach(to, identity, flags));
    let target = reached.await.map_err(|_| late("the target"))??;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_target, mut to_target) = tokio::io::split(target);
    let up = async {
        name_export(&mut from_client, &mut to_target, &to.export).await?;
        copy(&mut from_client, &mut to_target).await?;
        to_target.shutdown().await
    };
    let down = copy(&mut from_target, &mut to_client);
    tokio::pin!(up, down);
    tokio::select! {
        ended = &mut down => return ended,
        ended = &mut up => ended?,
    }
    // The client waits until the target has read everything, which its end tells.
    tokio::time::timeout(CLOSE_MAX, down).await.map_err(|_| late("the target"))?
}

fn late(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("{what} did not answer in time"))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Greets a client as a server does; returns its flags.
async fn greet(client: &mut UnixStream) -> io::Result<[u8; 4]> {
    let mut greeting = MAGIC.to_be_bytes().to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    client.write_all(&greeting).await?;
    let mut flags = [0; 4];
    client.read_exact(&mut flags).await?;
    Ok(flags)
}

/// Has the kernel end a connection whose path is dead, whether it rests or has data on the way.
fn end_if_silent(target: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(target, true)?;
    sockopt::set_tcp_keepidle(target, PATH_SILENCE_MAX / 2)?;
    sockopt::set_tcp_keepintvl(target, PATH_SILENCE_MAX / 4)?;
    sockopt::set_tcp_user_timeout(target, PATH_SILENCE_MAX.as_millis() as u32)?;
    Ok(())
}

/// Connects to the target of another node, up to TLS; the negotiation of the export follows.
async fn reach(
    to: &Destination,
    identity: &Identity,
    flags: [u8; 4],
) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut target = TcpStream::connect(&to.address).await?;
    target.set_nodelay(true)?;
    end_if_silent(&target)?;
    let mut greeting = [0; 18];
    target.read_exact(&mut greeting).await?;
    if be64(&greeting, 0) != MAGIC || be64(&greeting, 8) != OPTION_MAGIC {
        return Err(invalid("this is no NBD server"));
    }
    let mut begin = flags.to_vec();
    begin.extend(OPTION_MAGIC.to_be_bytes());
    begin.extend(option::STARTTLS.to_be_bytes());
    begin.extend(0_u32.to_be_bytes());
    target.write_all(&begin).await?;
    let mut answer = [0; 20];
    target.read_exact(&mut answer).await?;
    let is_ack = be64(&answer, 0) == OPTION_REPLY_MAGIC && be32(&answer, 12) == reply::ACK;
    if !is_ack || be32(&answer, 16) != 0 {
        return Err(invalid("the target does not begin TLS"));
    }
    let expected = Expected::Named(Role::Node, to.node.clone());
    let config = identity.client_config(expected).map_err(io::Error::other)?;
    let name = ServerName::try_from("quoin").expect("a valid name");
    let mut target = TlsConnector::from(config).connect(name, target).await?;
    let (_, connection) = target.get_ref();
    let leaf = connection.peer_certificates().and_then(|chain| chain.first());
    let holder = leaf.map(Holder::of).transpose().map_err(io::Error::other)?;
    let Some(holder) = holder.filter(|holder| to.key_hashes.contains(&holder.key_hash)) else {
        let why =
            format!("node {} shows a certificate with a key that is not its own now", to.node);
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    };
    tracing::debug!(node = holder.name, "reached");
    if let Some(key) = &to.key {
        let secret = quoin_nbd::connection_secret(connection).map_err(io::Error::other)?;
        let proof = key.proof(&secret).map_err(io::Error::other)?;
        prove(&mut target, &proof).await?;
    }
    Ok(target)
}

/// Shows the target that this host has the volume's key.
async fn prove(
    target: &mut (impl AsyncRead + AsyncWrite + Unpin),
    proof: &[u8; 32],
) -> io::Result<()> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option::PROVE_KEY.to_be_bytes());
    bytes.extend((proof.len() as u32).to_be_bytes());
    bytes.extend(proof);
    target.write_all(&bytes).await?;
    target.flush().await?;
    let mut answer = [0; 20];
    target.read_exact(&mut answer).await?;
    let is_ack = be64(&answer, 0) == OPTION_REPLY_MAGIC && be32(&answer, 12) == reply::ACK;
    if !is_ack || be32(&answer, 16) != 0 {
        return Err(invalid("the target takes no proof of the volume's key"));
    }
    Ok(())
}

/// Passes options on until the client's first request, with the volume's name where they name the
/// default export. The bytes of the request that were read are passed on too.
async fn name_export(
    client: &mut (impl AsyncRead + Unpin),
    target: &mut (impl AsyncWrite + Unpin),
    export: &str,
) -> io::Result<()> {
    let magic = OPTION_MAGIC.to_be_bytes();
    loop {
        let mut first = [0; 4];
        if client.read_exact(&mut first).await.is_err() {
            // The client ended within the negotiation.
            return Ok(());
        }
        if first != magic[..4] {
            target.write_all(&first).await?;
            return target.flush().await;
        }
        let mut rest = [0; 12];
        client.read_exact(&mut rest).await?;
        if rest[..4] != magic[4..] {
            return Err(invalid("the client sent no option"));
        }
        let (code, length) = (be32(&rest, 4), be32(&rest, 8) as usize);
        if length > OPTION_BYTES_MAX {
            return Err(invalid("the client sent an option that is too long"));
        }
        let mut data = vec![0; length];
        client.read_exact(&mut data).await?;
        let data = with_name(code, data, export);
        let mut bytes = magic.to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        target.write_all(&bytes).await?;
        target.flush().await?;
    }
}

/// Puts the name of the export into an option that names the default one.
fn with_name(code: u32, data: Vec<u8>, export: &str) -> Vec<u8> {
    match code {
        option::EXPORT_NAME if data.is_empty() => export.as_bytes().to_vec(),
        option::GO
        | option::INFO
        | option::SET_META_CONTEXT
        | option::LIST_META_CONTEXT
        | option::CLIENT
            if data.len() >= 4 && be32(&data, 0) == 0 =>
        {
            let mut named = (export.len() as u32).to_be_bytes().to_vec();
            named.extend(export.as_bytes());
            named.extend(&data[4..]);
            named
        }
        _ => data,
    }
}

/// Passes bytes on until the end, each piece at once.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..read]).await?;
        to.flush().await?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn relays(dir: &Path) -> Relays {
        let authority =
            quoin_identity::Authority::create(dir, quoin_identity::Lifetimes::default()).unwrap();
        Relays::new(authority.issue_identity(&dir.join("n1"), Role::Node, "n1").unwrap())
    }

    #[tokio::test]
    async fn a_late_end_of_one_use_does_not_end_the_relay_of_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let (relays, id, path) = (relays(dir.path()), VolumeId(7), dir.path().join("7.sock"));
        let to = Destination {
            node: "n2".into(),
            address: "127.0.0.1:1".into(),
            export: "db".into(),
            key_hashes: Vec::new(),
            key: None,
        };
        relays.want(id, &path, to.clone()).unwrap();
        let first = relays.begin_end(id).expect("its device goes away");
        assert_eq!(relays.begin_end(id), None, "once, while that is under way");
        relays.want(id, &path, to.clone()).unwrap();
        relays.end_use(id, first);
        assert_eq!(relays.ids(), [id]);
        UnixStream::connect(&path).await.expect("the volume is reached again");
        let second = relays.begin_end(id).expect("the next use ends too");
        relays.end_use(id, second);
        assert!(relays.ids().is_empty() && !path.exists());
        // A socket that was made anew is of a use of its own.
        relays.want(id, &path, to).unwrap();
        relays.end_use(id, second);
        assert_eq!(relays.ids(), [id]);
    }

    /// Everything by which a target is reached, changed one after the other below a client that is connected.
    #[tokio::test]
    async fn a_client_is_ended_when_the_volume_is_reached_otherwise_and_by_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (relays, id, path) = (relays(dir.path()), VolumeId(7), dir.path().join("7.sock"));
        let user = quoin_encryption::UserKey::parse("ab".repeat(32).as_bytes()).unwrap();
        let encryption = quoin_encryption::Encryption::create(&user, "a").unwrap();
        let key = encryption.unlock(&user).unwrap().key;
        let mut to = Destination {
            node: "n2".into(),
            address: "192.0.2.2:1".into(),
            export: "db".into(),
            key_hashes: vec!["a".into()],
            key: None,
        };
        relays.want(id, &path, to.clone()).unwrap();
        let changes: [fn(&mut Destination, &DataKey); 7] = [
            |to, _| to.address = "192.0.2.3:1".into(),
            |to, _| to.key_hashes = vec!["b".into()],
            |to, _| to.key_hashes.push("c".into()),
            |to, key| to.key = Some(key.clone()),
            |to, _| to.key = None,
            |to, _| to.export = "renamed".into(),
            |to, _| to.node = "n3".into(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut client = UnixStream::connect(&path).await.unwrap();
            client.read_exact(&mut [0; 18]).await.unwrap();
            relays.want(id, &path, to.clone()).unwrap();
            let patience = Duration::from_millis(30);
            let ended = tokio::time::timeout(patience, client.read(&mut [0])).await;
            assert!(ended.is_err(), "change {number}: the same as before");
            change(&mut to, &key);
            relays.want(id, &path, to.clone()).unwrap();
            let ended = tokio::time::timeout(Duration::from_secs(30), client.read(&mut [0])).await;
            assert_eq!(ended.unwrap().unwrap_or(0), 0, "change {number}");
        }
    }

    #[tokio::test]
    async fn options_pass_up_to_their_longest_and_as_many_clients_as_are_allowed() {
        let max = 16 << 10;
        for (bytes, is_passed) in [(max - 1, true), (max, true), (max + 1, false)] {
            let sent = option(77, &vec![7; bytes]);
            let outcome = passed(&sent).await;
            assert_eq!(outcome.is_ok(), is_passed, "{bytes} bytes");
            assert!(outcome.is_err() || outcome.unwrap() == sent);
        }
        // Options without a name where one is, and one that is cut off.
        for data in [&b"\0\0\0"[..], b"", b"\0\0\0\x01x"] {
            let sent = option(option::GO, data);
            assert_eq!(passed(&sent).await.unwrap(), sent);
        }
        assert_eq!(
            passed(&option(option::GO, b"\0\0\0\0")).await.unwrap(),
            option(option::GO, &named(b"db", b""))
        );
        assert_eq!(passed(b"IHA").await.unwrap(), b"");
        assert!(passed(&option(option::GO, b"1234")[..18]).await.is_err());
        let other = option(option::EXPORT_NAME, b"other");
        assert_eq!(passed(&other).await.unwrap(), other);
    }

    fn option(code: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn named(name: &[u8], rest: &[u8]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name);
        data.extend(rest);
        data
    }

    async fn passed(input: &[u8]) -> io::Result<Vec<u8>> {
        let (mut from, mut to) = (input, Vec::new());
        name_export(&mut from, &mut to, "db").await?;
        copy(&mut from, &mut to).await?;
        Ok(to)
    }

    #[tokio::test]
    async fn the_default_export_gets_the_volumes_name_and_all_else_passes_as_it_is() {
        let requests = b"\x25\x60\x95\x13 and whatever follows: IHAVEOPT";
        let sent = [
            option(option::STRUCTURED_REPLY, b""),
            option(option::SET_META_CONTEXT, &named(b"", b"context")),
            option(option::CLIENT, &named(b"", &[7; 16])),
            option(option::GO, &named(b"", b"\0\x01\0\x03")),
            requests.to_vec(),
        ];
        let expected = [
            option(option::STRUCTURED_REPLY, b""),
            option(option::SET_META_CONTEXT, &named(b"db", b"context")),
            option(option::CLIENT, &named(b"db", &[7; 16])),
            option(option::GO, &named(b"db", b"\0\x01\0\x03")),
            requests.to_vec(),
        ];
        assert_eq!(passed(&sent.concat()).await.unwrap(), expected.concat());
        let other = option(option::GO, &named(b"other", b"\0\0"));
        assert_eq!(passed(&other).await.unwrap(), other);
        let old = option(option::EXPORT_NAME, b"");
        assert_eq!(passed(&old).await.unwrap(), option(option::EXPORT_NAME, b"db"));
    }

    #[tokio::test]
    async fn a_path_to_the_target_that_is_dead_is_noticed_within_five_seconds() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let dir = tempfile::tempdir().unwrap();
        let authority = quoin_identity::Authority::create(dir.path(), Default::default()).unwrap();
        let identity = authority.issue_identity(&dir.path().join("n"), Role::Node, "n1").unwrap();
        let to = Destination {
            address,
            node: "n2".into(),
            export: "db".into(),
            key_hashes: Vec::new(),
            key: None,
        };
        let reaching = reach(&to, &identity, [0; 4]);
        let accepted = async {
            let (accepted, from) = listener.accept().await.unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
            // The kernel shows the timer of the connection's other end: 02 is that of keepalive.
            let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
            let local = format!("0100007F:{:04X}", from.port());
            let line = table.lines().find(|line| line.split_whitespace().nth(1) == Some(&local));
            let timer = line.unwrap().split_whitespace().nth(5).unwrap().to_owned();
            drop(accepted);
            timer
        };
        let (reached, timer) = tokio::join!(reaching, accepted);
        assert!(reached.is_err());
        let (kind, ticks) = timer.split_once(':').unwrap();
        let left = Duration::from_millis(u64::from_str_radix(ticks, 16).unwrap() * 10);
        assert_eq!(kind, "02");
        assert!(left + 2 * (PATH_SILENCE_MAX / 4) <= Duration::from_secs(5), "{left:?}");
    }

    #[tokio::test]
    async fn an_option_that_is_too_long_or_none_ends_the_client() {
        let mut long = option(option::GO, b"");
        long[12..].copy_from_slice(&(1_u32 << 30).to_be_bytes());
        assert!(passed(&long).await.is_err());
        assert!(passed(b"IHAVEBAD\0\0\0\0\0\0\0\0").await.is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_client_make_the_relay_panic(input: Vec<u8>) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let begun = [OPTION_MAGIC.to_be_bytes().to_vec(), input.clone()].concat();
            let _ = runtime.block_on(passed(&input));
            let _ = runtime.block_on(passed(&begun));
        }
    }
}
