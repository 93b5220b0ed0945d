//! The holder: keeps the kernel's side of attached volumes while the attach daemon is away.
//!
//! A FUSE connection exists as long as a process has its descriptor. The daemon gives each one to a
//! process that does nothing else, with the data needed to serve it again; a new daemon requests
//! them back. Unanswered requests of the kernel stay with the descriptor, and the kernel sends them
//! again when the new daemon asks for that. So a daemon that is killed or replaced only pauses IO.
//!
//! The protocol uses a unix socket of sequenced packets: one JSON object for each packet, with the
//! descriptor beside it ([`Ask`], [`Told`]). [`serve`] is the holder, [`Holder`] the daemon's side.
//! The daemon sends everything again to a holder that was restarted.
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
pub struct Held {
    pub asked: AttachVolume,
    /// The loop device on its file.
    pub device: Option<PathBuf>,
    /// Sequence number of its binding; absent: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// Name of the volume for people; empty: unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The first epoch of the node's use of the volume that it was made for; 0: unknown.
    #[serde(default)]
    pub since_epoch: u64,
}

/// Message of a daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ask {
    /// Keep this descriptor; it replaces the one held for the volume.
    Hold(Box<Held>),
    Drop {
        volume: String,
    },
    /// Send everything: one [`Told::Held`] for each volume, then [`Told::Done`].
    Take {},
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Told {
    Held(Box<Held>),
    Done {},
}

type Table = BTreeMap<String, (Held, OwnedFd)>;

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
                tracing::warn!(%error, "a connection was not accepted");
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
    while let Some((ask, descriptor)) = receive::<Ask>(client)? {
        match (ask, descriptor) {
            (Ask::Hold(held), Some(descriptor)) => {
                lock(table).insert(held.asked.volume.clone(), (*held, descriptor));
            }
            (Ask::Hold(held), None) => {
                let volume = held.asked.volume;
                return Err(io::Error::other(format!("no descriptor came for {volume}")));
            }
            (Ask::Drop { volume }, _) => {
                lock(table).remove(&volume);
            }
            (Ask::Take {}, _) => {
                for (held, descriptor) in lock(table).values() {
                    let told = Told::Held(Box::new(held.clone()));
                    send(client, &told, Some(descriptor.as_fd()))?;
                }
            }
        }
        send(client, &Told::Done {}, None)?;
    }
    Ok(())
}

/// Returns true if a holder serves `path`.
#[must_use]
pub fn is_at(path: &Path) -> bool {
    dial(path).is_ok()
}

/// Returns the volumes that a holder at `path` keeps; none if there is no holder.
#[must_use]
pub fn held_at(path: &Path) -> Vec<String> {
    let Ok(connection) = dial(path) else { return Vec::new() };
    let held = everything(&connection).0;
    held.into_iter().map(|(held, _)| held.asked.volume).collect()
}

/// Requests everything held. Returns it with the error that ended the transfer early, if any.
fn everything(connection: &OwnedFd) -> (Vec<(Held, OwnedFd)>, io::Result<()>) {
    let mut found = Vec::new();
    let outcome = send(connection, &Ask::Take {}, None).and_then(|()| {
        loop {
            match receive(connection)? {
                Some((Told::Held(held), Some(descriptor))) => found.push((*held, descriptor)),
                Some((Told::Done {}, _)) => return Ok(()),
                _ => return Err(io::Error::other("the holder broke off")),
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
    pub(super) fn find(path: &Path, metrics: &Metrics) -> io::Result<Arc<Self>> {
        let holder = Arc::new(Self {
            path: path.to_owned(),
            inner: Mutex::default(),
            up: metrics.holder_up.clone(),
        });
        lock(&holder.inner).connection = dial(path).ok().map(Arc::new);
        holder.up.set(i64::from(holder.is_there()));
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
                    holder.lost(&connection);
                }
            }
        })?;
        Ok(holder)
    }

    pub(super) fn is_there(&self) -> bool {
        lock(&self.inner).connection.is_some()
    }

    /// Returns what an earlier daemon left, to be served again.
    pub(super) fn take(&self) -> Vec<(Held, OwnedFd)> {
        let inner = lock(&self.inner);
        let Some(connection) = inner.connection.as_ref() else { return Vec::new() };
        let (found, outcome) = everything(connection);
        if let Err(error) = outcome {
            tracing::error!(%error, "not all of what the last daemon left can be taken over");
        }
        found
    }

    /// Holds a volume from now on, also at the holder while there is one; replaces the one held
    /// before. Returns true if the holder has it now.
    pub(super) fn hold(&self, held: Held, descriptor: OwnedFd) -> bool {
        let mut inner = lock(&self.inner);
        let ask = Ask::Hold(Box::new(held.clone()));
        let volume = held.asked.volume.clone();
        inner.tell(&ask, Some(descriptor.as_fd()));
        inner.table.insert(volume, (held, descriptor));
        // With no holder, or one that died a moment ago, this connects to its successor and sends
        // everything.
        self.connect(&mut inner);
        inner.connection.is_some()
    }

    pub(super) fn release(&self, volume: &str) {
        let mut inner = lock(&self.inner);
        inner.table.remove(volume);
        inner.tell(&Ask::Drop { volume: volume.to_owned() }, None);
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
        for (held, descriptor) in table.values() {
            inner.tell(&Ask::Hold(Box::new(held.clone())), Some(descriptor.as_fd()));
        }
        // A dying holder may have accepted the connection and nothing else.
        if inner.connection.is_some() {
            self.up.set(1);
            let volumes = table.len();
            tracing::info!(volumes, "the holder is here and holds what is attached");
        }
        inner.table = table;
    }

    /// Forgets a connection that ended, unless there is a newer one already.
    fn lost(&self, connection: &Arc<OwnedFd>) {
        let mut inner = lock(&self.inner);
        if inner.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            tracing::warn!("the holder is gone; looking for it");
            inner.connection = None;
            self.up.set(0);
        }
    }
}

impl Inner {
    /// Sends a message. A holder that does not accept it counts as absent; [`Holder::connect`]
    /// finds the next.
    fn tell(&mut self, ask: &Ask, descriptor: Option<BorrowedFd<'_>>) {
        let Some(connection) = self.connection.as_ref() else { return };
        let outcome =
            send(connection, ask, descriptor).and_then(|()| match receive::<Told>(connection)? {
                Some((Told::Done {}, _)) => Ok(()),
                _ => Err(io::Error::other("the holder broke off")),
            });
        if let Err(error) = outcome {
            tracing::warn!(%error, "the holder did not take it");
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
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        beside.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a packet. `None`: the other side is gone.
fn receive<T: serde::de::DeserializeOwned>(
    socket: &OwnedFd,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut bytes = vec![0; PACKET_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
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
    let mut descriptor = None;
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptor = descriptors.last();
        }
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("a packet that is too long"));
    }
    Ok(Some((serde_json::from_slice(&bytes[..got.bytes])?, descriptor)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn held(volume: &str) -> Held {
        let asked = AttachVolume {
            volume: volume.into(),
            nbd_socket: "/run/v.sock".into(),
            size: 4096,
            block_size: 4096,
            read_only: false,
            file_only: false,
        };
        Held {
            asked,
            device: Some("/dev/loop7".into()),
            sequence: Some(3),
            name: "db".into(),
            since_epoch: 5,
        }
    }

    fn find(path: &Path) -> io::Result<Arc<Holder>> {
        Holder::find(path, &Metrics::default())
    }

    fn served() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("holder.sock");
        let theirs = path.clone();
        std::thread::spawn(move || serve(&theirs).map(|never| match never {}));
        while dial(&path).is_err() {
            std::thread::sleep(Duration::from_millis(2));
        }
        (directory, path)
    }

    #[test]
    fn descriptors_that_a_daemon_held_are_usable_by_the_next_one() {
        let (_directory, path) = served();
        let (ours, mut other) = UnixStream::pair().unwrap();
        let first = find(&path).unwrap();
        assert!(first.is_there() && first.take().is_empty());
        first.hold(held("a"), ours.into());
        first.hold(held("b"), UnixStream::pair().unwrap().0.into());
        first.release("b");
        drop(first);
        assert_eq!(held_at(&path), ["a"]);

        let mut taken = find(&path).unwrap().take();
        assert_eq!(taken.len(), 1);
        let (what, descriptor) = taken.pop().unwrap();
        assert_eq!(what, held("a"));
        UnixStream::from(descriptor).write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn a_holder_that_comes_later_is_given_what_is_attached_already() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("holder.sock");
        let daemon = find(&path).unwrap();
        assert!(!daemon.is_there() && !is_at(&path));
        daemon.hold(held("a"), UnixStream::pair().unwrap().0.into());
        let theirs = path.clone();
        std::thread::spawn(move || serve(&theirs).map(|never| match never {}));
        while !daemon.is_there() {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(is_at(&path));
        assert_eq!(find(&path).unwrap().take().len(), 1);
        assert!(matches!(serve(&path), Err(Error::Invalid(_))), "a second one was let in");
    }

    #[test]
    fn an_attached_volume_is_held_at_once_by_a_holder_that_was_just_started_or_restarted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("holder.sock");
        let daemon = find(&path).unwrap();
        let pair = || OwnedFd::from(UnixStream::pair().unwrap().0);
        assert!(!daemon.hold(held("a"), pair()), "there is none yet");
        let theirs = path.clone();
        std::thread::spawn(move || serve(&theirs).map(|never| match never {}));
        while dial(&path).is_err() {}
        assert!(daemon.hold(held("b"), pair()));
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
        assert!(daemon.hold(held("c"), pair()));
        assert_eq!(held_at(&path), ["a", "b", "c"]);
    }

    #[test]
    fn nonsense_ends_its_connection_and_nothing_else() {
        let (_directory, path) = served();
        let daemon = find(&path).unwrap();
        daemon.hold(held("a"), UnixStream::pair().unwrap().0.into());
        let stranger = dial(&path).unwrap();
        send(&stranger, &"hello", None).unwrap();
        assert!(receive::<Told>(&stranger).unwrap().is_none());
        let without = dial(&path).unwrap();
        send(&without, &Ask::Hold(Box::new(held("c"))), None).unwrap();
        assert!(receive::<Told>(&without).unwrap().is_none());
        assert_eq!(find(&path).unwrap().take().len(), 1);
    }
}
