//! The holder: keeps the kernel's side of attached volumes while the attach daemon is away.
//!
//! A FUSE connection exists as long as a process has its descriptor. The daemon gives each one to a
//! process that does nothing else, with the data needed to serve it again and the memory in which
//! its requests have their numbers; a new daemon asks for
//! them. Unanswered requests of the kernel stay with the descriptor, and the kernel sends them
//! again when the new daemon asks for that. So a daemon that is killed or replaced only pauses IO.
//!
//! The protocol uses a unix socket of sequenced packets: one JSON object for each packet, with the
//! descriptors beside it ([`HolderRequest`], [`HolderReply`]). [`serve`] is the holder, [`Holder`]
//! the daemon's side. The daemon sends everything again to a holder that was restarted.
//!
//! A caller that attaches a device must be able to rely on it at once: a daemon without a
//! connection connects to the holder before it answers ([`Holder::hold`]), not only periodically.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::Error;
use super::metrics::Metrics;
use super::protocol::AttachVolume;

const PACKET_BYTES_MAX: usize = 64 << 10;
/// Pause between attempts to reach an absent holder: until it is reached, the daemon's death fails
/// the IO of its devices.
const RETRY: Duration = Duration::from_millis(50);

/// Pause after a connection could not be accepted, for lack of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(500);

/// One attached volume, with the data that a daemon needs to serve it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDevice {
    #[serde(rename = "asked")]
    pub request: AttachVolume,
    /// The loop device on its file.
    pub device: Option<PathBuf>,
    /// Sequence number of its binding; absent: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// Name of the volume for people; empty: unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The first epoch of the node's use of the volume that it was made for; 0: unknown.
    pub since_epoch: u64,
}

/// Message of a daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HolderRequest {
    /// Keep this descriptor; it replaces the one held for the volume.
    Hold(Box<HeldDevice>),
    Drop {
        volume: String,
    },
    /// Send everything: one [`HolderReply::Held`] for each volume, then [`HolderReply::Done`].
    Take {},
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum HolderReply {
    Held(Box<HeldDevice>),
    Done {},
}

/// Memory of a volume that outlives its daemon.
#[derive(Debug)]
pub struct Kept {
    /// The kernel's side of its file.
    pub connection: OwnedFd,
    /// The memory in which its requests have their numbers.
    pub numbers: OwnedFd,
}

impl Kept {
    fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.connection.as_fd(), self.numbers.as_fd()]
    }

    /// `None`: a packet came with other descriptors.
    fn of(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let [connection, numbers] = descriptors.try_into().ok()?;
        Some(Self { connection, numbers })
    }
}

type Table = BTreeMap<String, (HeldDevice, Kept)>;

/// Serves at `path` until the process ends; held descriptors end with it.
///
/// # Errors
/// [`Error`] if the socket cannot be created, or another holder serves it.
pub fn serve(path: &Path) -> Result<std::convert::Infallible, Error> {
    let failed = |doing| {
        let path = path.to_owned();
        move |error: rustix::io::Errno| Error::Io { doing, path, source: error.into() }
    };
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(|source| Error::Io {
            doing: "create",
            path: directory.to_owned(),
            source,
        })?;
    }
    if dial(path).is_ok() {
        return Err(Error::Invalid(format!("another holder serves {}", path.display())));
    }
    let _ = std::fs::remove_file(path);
    let listener = packet_socket().map_err(failed("make a socket for"))?;
    let address = SocketAddrUnix::new(path).map_err(failed("name"))?;
    // The mode is set before any process can connect: the descriptors give access to the volumes.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = bind(&listener, &address);
    rustix::process::umask(before);
    bound.map_err(failed("bind"))?;
    listen(&listener, 16).map_err(failed("listen on"))?;
    let table: Arc<Mutex<Table>> = Arc::default();
    tracing::info!(socket = %path.display(), "holding descriptors for the attach daemon");
    loop {
        let client = match accept_with(&listener, SocketFlags::CLOEXEC) {
            Ok(client) => client,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::sleep(ACCEPT_RETRY);
                continue;
            }
        };
        let table = table.clone();
        let spawned = std::thread::Builder::new().name("holder".into()).spawn(move || {
            if let Err(error) = answer(&client, &table) {
                tracing::warn!(%error, "the attach daemon's connection failed");
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for a connection");
        }
    }
}

fn answer(client: &OwnedFd, table: &Mutex<Table>) -> io::Result<()> {
    while let Some((request, descriptors)) = receive::<HolderRequest>(client)? {
        match (request, Kept::of(descriptors)) {
            (HolderRequest::Hold(held), Some(kept)) => {
                lock(table).insert(held.request.volume.clone(), (*held, kept));
            }
            (HolderRequest::Hold(held), None) => {
                let volume = held.request.volume;
                return Err(io::Error::other(format!(
                    "the message for {volume} came without its two descriptors"
                )));
            }
            (HolderRequest::Drop { volume }, _) => {
                lock(table).remove(&volume);
            }
            (HolderRequest::Take {}, _) => {
                for (held, kept) in lock(table).values() {
                    let reply = HolderReply::Held(Box::new(held.clone()));
                    send(client, &reply, &kept.descriptors())?;
                }
            }
        }
        send(client, &HolderReply::Done {}, &[])?;
    }
    Ok(())
}

/// Returns true if a holder serves `path`.
#[must_use]
pub fn is_served(path: &Path) -> bool {
    dial(path).is_ok()
}

/// Returns the volumes that a holder at `path` keeps; none if there is no holder.
#[must_use]
pub fn held_at(path: &Path) -> Vec<String> {
    let Ok(connection) = dial(path) else { return Vec::new() };
    let held = request_all(&connection).0;
    held.into_iter().map(|(held, _)| held.request.volume).collect()
}

/// Requests everything held. Returns it with the error that ended the transfer early, if any.
fn request_all(connection: &OwnedFd) -> (Vec<(HeldDevice, Kept)>, io::Result<()>) {
    let mut found = Vec::new();
    let outcome = send(connection, &HolderRequest::Take {}, &[]).and_then(|()| {
        loop {
            match receive(connection)?.map(|(reply, beside)| (reply, Kept::of(beside))) {
                Some((HolderReply::Held(held), Some(kept))) => found.push((*held, kept)),
                Some((HolderReply::Done {}, _)) => return Ok(()),
                _ => return Err(io::Error::other("the holder ended the transfer")),
            }
        }
    });
    (found, outcome)
}

/// The daemon's side: everything that it serves is kept here, and at the holder while there is one.
pub(super) struct Holder {
    path: PathBuf,
    inner: Mutex<Inner>,
    up: Gauge,
}

#[derive(Default)]
struct Inner {
    table: Table,
    connection: Option<Arc<OwnedFd>>,
}

impl Holder {
    /// Connects to a holder at `path`, and keeps trying on a thread of its own, for one that starts
    /// later or is restarted.
    pub(super) fn start(path: &Path, metrics: &Metrics) -> io::Result<Arc<Self>> {
        let holder = Arc::new(Self {
            path: path.to_owned(),
            inner: Mutex::default(),
            up: metrics.holder_up.clone(),
        });
        lock(&holder.inner).connection = dial(path).ok().map(Arc::new);
        holder.up.set(i64::from(holder.is_connected()));
        let watched = Arc::downgrade(&holder);
        std::thread::Builder::new().name("holder".into()).spawn(move || {
            while let Some(holder) = watched.upgrade() {
                let connection = {
                    let mut inner = lock(&holder.inner);
                    holder.connect(&mut inner);
                    inner.connection.clone()
                };
                drop(holder);
                let Some(connection) = connection else {
                    std::thread::sleep(RETRY);
                    continue;
                };
                let mut fds = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::RDHUP)];
                // An interrupted wait only repeats the check.
                let _ = poll(&mut fds, None);
                if fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP)
                    && let Some(holder) = watched.upgrade()
                {
                    holder.disconnected(&connection);
                }
            }
        })?;
        Ok(holder)
    }

    pub(super) fn is_connected(&self) -> bool {
        lock(&self.inner).connection.is_some()
    }

    /// Returns what an earlier daemon left, to be served again.
    pub(super) fn take(&self) -> Vec<(HeldDevice, Kept)> {
        let inner = lock(&self.inner);
        let Some(connection) = inner.connection.as_ref() else { return Vec::new() };
        let (found, outcome) = request_all(connection);
        if let Err(error) = outcome {
            tracing::error!(%error, "not all devices of the last daemon can be taken over");
        }
        found
    }

    /// Holds a volume from now on, also at the holder while there is one; replaces the one held
    /// before. Returns true if the holder has it now.
    pub(super) fn hold(&self, held: HeldDevice, kept: Kept) -> bool {
        let mut inner = lock(&self.inner);
        let request = HolderRequest::Hold(Box::new(held.clone()));
        let volume = held.request.volume.clone();
        inner.send_request(&request, &kept.descriptors());
        inner.table.insert(volume, (held, kept));
        // With no holder, or one that died a moment ago, this connects to its successor and sends
        // everything.
        self.connect(&mut inner);
        inner.connection.is_some()
    }

    pub(super) fn release(&self, volume: &str) {
        let mut inner = lock(&self.inner);
        inner.table.remove(volume);
        inner.send_request(&HolderRequest::Drop { volume: volume.to_owned() }, &[]);
    }

    /// Connects to the holder if there is no connection, and sends it everything.
    fn connect(&self, inner: &mut Inner) {
        if inner.connection.is_some() {
            return;
        }
        let Ok(connection) = dial(&self.path) else {
            self.up.set(0);
            return;
        };
        inner.connection = Some(Arc::new(connection));
        let table = std::mem::take(&mut inner.table);
        for (held, kept) in table.values() {
            let request = HolderRequest::Hold(Box::new(held.clone()));
            inner.send_request(&request, &kept.descriptors());
        }
        // A dying holder may have accepted the connection and nothing else.
        if inner.connection.is_some() {
            self.up.set(1);
            let volumes = table.len();
            tracing::info!(volumes, "connected to the holder, which holds the attached volumes");
        }
        inner.table = table;
    }

    /// Forgets a connection that ended, unless there is a newer one already.
    fn disconnected(&self, connection: &Arc<OwnedFd>) {
        let mut inner = lock(&self.inner);
        if inner.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            tracing::warn!("the connection to the holder ended; trying to reconnect");
            inner.connection = None;
            self.up.set(0);
        }
    }
}

impl Inner {
    /// Sends a message. A holder that does not accept it counts as absent; [`Holder::connect`]
    /// finds the next.
    fn send_request(&mut self, request: &HolderRequest, descriptors: &[BorrowedFd<'_>]) {
        let Some(connection) = self.connection.as_ref() else { return };
        let outcome = send(connection, request, descriptors).and_then(|()| {
            match receive::<HolderReply>(connection)? {
                Some((HolderReply::Done {}, _)) => Ok(()),
                _ => Err(io::Error::other("the holder ended the transfer")),
            }
        });
        if let Err(error) = outcome {
            tracing::warn!(%error, "the holder did not accept the message");
            self.connection = None;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn packet_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn dial(path: &Path) -> io::Result<OwnedFd> {
    let socket = packet_socket()?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn send(
    socket: &OwnedFd,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = Zeroizing::new(serde_json::to_vec(message)?);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        beside.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a packet. `None`: the other side is gone.
fn receive<T: serde::de::DeserializeOwned>(
    socket: &OwnedFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = Zeroizing::new(vec![0; PACKET_BYTES_MAX]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let got = loop {
        match recvmsg(socket, &mut slices, &mut beside, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut beside_it = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            beside_it.extend(descriptors);
        }
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("a packet that is too long"));
    }
    Ok(Some((serde_json::from_slice(&bytes[..got.bytes])?, beside_it)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn held(volume: &str) -> HeldDevice {
        let request = AttachVolume {
            volume: volume.into(),
            nbd_socket: "/run/v.sock".into(),
            size: 4096,
            block_size: 4096,
            read_only: false,
            file_only: false,
            key: None,
        };
        HeldDevice {
            request,
            device: Some("/dev/loop7".into()),
            sequence: Some(3),
            name: "db".into(),
            since_epoch: 5,
        }
    }

    fn kept(connection: OwnedFd) -> Kept {
        let numbers = UnixStream::pair().unwrap().0.into();
        Kept { connection, numbers }
    }

    fn any() -> Kept {
        kept(UnixStream::pair().unwrap().0.into())
    }

    fn start(path: &Path) -> io::Result<Arc<Holder>> {
        Holder::start(path, &Metrics::default())
    }

    fn served() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("holder.sock");
        let path_of_holder = path.clone();
        std::thread::spawn(move || serve(&path_of_holder).map(|never| match never {}));
        while dial(&path).is_err() {
            std::thread::sleep(Duration::from_millis(2));
        }
        (directory, path)
    }

    #[test]
    fn descriptors_held_for_a_daemon_are_usable_by_the_next_daemon() {
        let (_directory, path) = served();
        let (ours, mut other) = UnixStream::pair().unwrap();
        let first = start(&path).unwrap();
        assert!(first.is_connected() && first.take().is_empty());
        first.hold(held("a"), kept(ours.into()));
        first.hold(held("b"), any());
        first.release("b");
        drop(first);
        assert_eq!(held_at(&path), ["a"]);

        let mut taken = start(&path).unwrap().take();
        assert_eq!(taken.len(), 1);
        let (what, kept) = taken.pop().unwrap();
        assert_eq!(what, held("a"));
        UnixStream::from(kept.connection).write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn the_socket_of_the_descriptors_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let (_directory, path) = served();
        let mode = std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn a_volume_that_was_released_goes_to_no_later_holder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("holder.sock");
        let daemon = start(&path).unwrap();
        daemon.hold(held("a"), any());
        daemon.hold(held("b"), any());
        daemon.release("a");
        let path_of_holder = path.clone();
        std::thread::spawn(move || serve(&path_of_holder).map(|never| match never {}));
        while !daemon.is_connected() {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(daemon.hold(held("c"), any()));
        assert_eq!(held_at(&path), ["b", "c"]);
    }

    #[test]
    fn a_holder_that_starts_later_receives_the_attached_volumes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("holder.sock");
        let daemon = start(&path).unwrap();
        assert!(!daemon.is_connected() && !is_served(&path));
        daemon.hold(held("a"), any());
        let path_of_holder = path.clone();
        std::thread::spawn(move || serve(&path_of_holder).map(|never| match never {}));
        while !daemon.is_connected() {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(is_served(&path));
        assert_eq!(start(&path).unwrap().take().len(), 1);
        assert!(matches!(serve(&path), Err(Error::Invalid(_))), "a second holder started");
    }

    #[test]
    fn an_attached_volume_is_held_at_once_by_a_started_or_restarted_holder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("holder.sock");
        let daemon = start(&path).unwrap();
        assert!(!daemon.hold(held("a"), any()), "no holder runs yet");
        let path_of_holder = path.clone();
        std::thread::spawn(move || serve(&path_of_holder).map(|never| match never {}));
        while dial(&path).is_err() {}
        assert!(daemon.hold(held("b"), any()));
        assert_eq!(held_at(&path), ["a", "b"]);

        // A dead holder whose end the daemon has not detected yet.
        let (dead, other) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        drop(other);
        lock(&daemon.inner).connection = Some(Arc::new(dead));
        assert!(daemon.hold(held("c"), any()));
        assert_eq!(held_at(&path), ["a", "b", "c"]);
    }

    #[test]
    fn an_invalid_message_ends_only_its_own_connection() {
        let (_directory, path) = served();
        let daemon = start(&path).unwrap();
        daemon.hold(held("a"), any());
        let stranger = dial(&path).unwrap();
        send(&stranger, &"hello", &[]).unwrap();
        assert!(receive::<HolderReply>(&stranger).unwrap().is_none());
        let without = dial(&path).unwrap();
        send(&without, &HolderRequest::Hold(Box::new(held("c"))), &[]).unwrap();
        assert!(receive::<HolderReply>(&without).unwrap().is_none());
        assert_eq!(start(&path).unwrap().take().len(), 1);
    }
}
