//! The thread of one mounted volume, between the kernel and the target.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::buffer::Buffer;
use super::filesystem::{Answer, Filesystem, IO_BYTES_MAX, Outcome};
use super::mount::{Mount, MountError};
use super::wire::{NOTIFY_RESEND, WRITE_HEADER_BYTES, notification};
use crate::Metrics;
use crate::child;
use crate::metrics::VolumeStatus;
use quoin_nbd::client::{Done, Keyed, Link};

/// Limit of messages read from the kernel before the target has its turn.
const MESSAGES_PER_TURN: usize = 64;
/// Size of the buffer; the kernel refuses buffers that could not hold its largest message.
const BUFFER_BYTES: usize = IO_BYTES_MAX + 4096 + WRITE_HEADER_BYTES;
/// Slices of one vectored write.
const SLICES_MAX: usize = 512;

/// Properties that the file of a volume shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub size_bytes: u64,
    pub block_size: u32,
    pub read_only: bool,
}

/// A mounted volume and its thread; unmounted when stopped or dropped.
pub struct Server {
    mount: Option<Mount>,
    /// The kernel's side, beside the thread's own descriptor of it: the part that outlives this
    /// process.
    connection: OwnedFd,
    volume: String,
    metrics: Metrics,
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Handle that ends a volume's IO permanently.
#[derive(Clone)]
pub(crate) struct AbortHandle(Weak<Shared>);

impl AbortHandle {
    /// Fails waiting and later IO. Returns true the first time.
    pub(crate) fn end(&self, why: &str) -> bool {
        self.0.upgrade().is_some_and(|shared| shared.abort(why))
    }

    /// Returns true while a target answers.
    pub(crate) fn connected(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| shared.connected.load(Ordering::Relaxed))
    }

    pub(crate) fn since_epoch(&self) -> u64 {
        self.0.upgrade().map_or(u64::MAX, |shared| shared.since_epoch.load(Ordering::Relaxed))
    }
}

/// A device without a mount, for tests of those that end one.
#[cfg(test)]
pub(crate) struct Unmounted(Arc<Shared>);

#[cfg(test)]
impl Unmounted {
    pub(crate) fn new(is_connected: bool, since_epoch: u64) -> Self {
        Self(Arc::new(Shared {
            commands: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(),
            connected: AtomicBool::new(is_connected),
            in_flight: AtomicU64::new(0),
            resends: AtomicBool::new(false),
            since_epoch: AtomicU64::new(since_epoch),
            active: AtomicU64::new(0),
            dead: OnceLock::new(),
        }))
    }

    pub(crate) fn abort_handle(&self) -> AbortHandle {
        AbortHandle(Arc::downgrade(&self.0))
    }

    pub(crate) fn is_connected(&self, is_connected: bool) {
        self.0.connected.store(is_connected, Ordering::Relaxed);
    }

    pub(crate) fn dead(&self) -> Option<&str> {
        self.0.dead.get().map(String::as_str)
    }
}

struct Shared {
    commands: Mutex<Commands>,
    wake: OwnedFd,
    connected: AtomicBool,
    in_flight: AtomicU64,
    resends: AtomicBool,
    /// The first epoch of this use of the volume; 0: unknown.
    since_epoch: AtomicU64,
    /// Number of turns in which the kernel requested IO.
    active: AtomicU64,
    /// Reason for which all IO fails; unset: it does not.
    dead: OnceLock<String>,
}

#[derive(Default)]
struct Commands {
    resize: Option<u64>,
    /// Fails waiting and later IO.
    abort: bool,
    stop: bool,
    /// Ends the thread without answering.
    leave: bool,
}

impl Server {
    /// Mounts `link`'s volume on the file `path` and serves it.
    pub fn start(
        path: &Path,
        volume: &str,
        geometry: &Geometry,
        link: Link,
        metrics: &Metrics,
    ) -> Result<Self, MountError> {
        let (mount, device) = Mount::new(path, &format!("quoin:{volume}"))?;
        Self::serve(mount, device, volume, geometry, link, metrics)
    }

    /// Continues to serve what another process mounted on the file `path`: `device` is its
    /// connection to the kernel, which sends unanswered requests again.
    pub fn take_over(
        path: &Path,
        device: OwnedFd,
        volume: &str,
        geometry: &Geometry,
        link: Link,
        metrics: &Metrics,
    ) -> Result<Self, MountError> {
        let failed =
            |source: Errno| MountError::Io { path: path.to_owned(), source: source.into() };
        rustix::io::write(&device, &notification(NOTIFY_RESEND)).map_err(failed)?;
        let server = Self::serve(Mount::existing(path), device, volume, geometry, link, metrics)?;
        server.shared.resends.store(true, Ordering::Relaxed);
        Ok(server)
    }

    fn serve(
        mount: Mount,
        device: OwnedFd,
        volume: &str,
        geometry: &Geometry,
        link: Link,
        metrics: &Metrics,
    ) -> Result<Self, MountError> {
        let path = mount.path().to_owned();
        let failed = |source| MountError::Io { path: path.clone(), source };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed(error.into()))?;
        let connection = device.try_clone().map_err(failed)?;
        let shared = Arc::new(Shared {
            commands: Mutex::default(),
            wake,
            connected: AtomicBool::new(link.connected()),
            in_flight: AtomicU64::new(0),
            resends: AtomicBool::new(false),
            since_epoch: AtomicU64::new(link.info().since_epoch),
            active: AtomicU64::new(0),
            dead: OnceLock::new(),
        });
        let mut filesystem =
            Filesystem::new(geometry.size_bytes, geometry.block_size, geometry.read_only)
                .with_metrics(metrics.clone());
        filesystem.go_on_at(link.reached());
        let buffer = Buffer::new(BUFFER_BYTES).map_err(failed)?;
        let thread_shared = shared.clone();
        let name = volume.to_owned();
        let thread = std::thread::Builder::new()
            .name("attach-volume".into())
            .spawn(move || {
                VolumeLoop::new(name, device, filesystem, link, thread_shared, buffer).run()
            })
            .map_err(failed)?;
        let status_shared = shared.clone();
        let status = move || VolumeStatus {
            connected: status_shared.connected.load(Ordering::Relaxed),
            in_flight: status_shared.in_flight.load(Ordering::Relaxed),
            dead: status_shared.dead.get().cloned(),
        };
        metrics.serve(volume, Arc::new(status));
        Ok(Self {
            mount: Some(mount),
            connection,
            volume: volume.to_owned(),
            metrics: metrics.clone(),
            path,
            shared,
            thread: Some(thread),
        })
    }

    /// Returns the kernel's side, for a process that keeps it while this one is away; `None` if the
    /// kernel could not send unanswered requests again (before Linux 6.9). Known once the file's
    /// attributes were read.
    pub fn connection(&self) -> Option<io::Result<OwnedFd>> {
        let resends = self.shared.resends.load(Ordering::Relaxed);
        resends.then(|| self.connection.try_clone())
    }

    /// Ends the thread and leaves everything else as it is: the next process answers the requests
    /// that the kernel waits for.
    pub fn leave(mut self) {
        self.shared.command(|commands| commands.leave = true);
        self.join();
        if let Some(mount) = self.mount.take() {
            mount.leave();
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true while the target answers; IO waits otherwise.
    pub fn connected(&self) -> bool {
        self.shared.connected.load(Ordering::Relaxed)
    }

    /// Number of kernel requests that wait for the target.
    pub fn in_flight(&self) -> u64 {
        self.shared.in_flight.load(Ordering::Relaxed)
    }

    /// Changes the file's size; the kernel reads it when it asks for it.
    pub fn set_size(&self, size_bytes: u64) {
        self.shared.command(|commands| commands.resize = Some(size_bytes));
    }

    /// Changes the file's size and makes the kernel read it.
    pub fn resize(&self, size_bytes: u64) -> io::Result<()> {
        self.set_size(size_bytes);
        // The kernel never caches the attributes, so it asks the thread, which handles commands
        // before messages.
        child::check_file_size(&self.path, size_bytes).map_err(|error| match error.raw_os_error() {
            Some(libc::ERANGE) => io::Error::other("the file still shows its old size"),
            _ => error,
        })
    }

    /// Fails waiting and later IO: the only way to remove a device whose target will not come back.
    /// `why` is for people.
    pub fn abort(&self, why: &str) {
        self.shared.abort(why);
    }

    /// Returns a handle for [`Server::abort`], for callers that may not wait for the owner of this
    /// value.
    pub(crate) fn abort_handle(&self) -> AbortHandle {
        AbortHandle(Arc::downgrade(&self.shared))
    }

    /// Reason for which all IO fails, if it does.
    pub fn dead(&self) -> Option<String> {
        self.shared.dead.get().cloned()
    }

    /// The first epoch of this use of the volume; 0: unknown.
    pub fn since_epoch(&self) -> u64 {
        self.shared.since_epoch.load(Ordering::Relaxed)
    }

    /// Counter that grows while the kernel requests IO.
    pub fn activity(&self) -> u64 {
        self.shared.active.load(Ordering::Relaxed)
    }

    /// Ends the thread and unmounts. Requests that wait for the target fail.
    pub fn stop(mut self) -> io::Result<()> {
        self.halt()
    }

    fn halt(&mut self) -> io::Result<()> {
        let Some(mount) = self.mount.take() else { return Ok(()) };
        self.shared.command(|commands| commands.stop = true);
        self.join();
        // Requests in between wait for a moment, and fail with the unmounting.
        mount.unmount()
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(path = %self.path.display(), "the volume's thread panicked");
        }
        self.metrics.forget(&self.volume);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.halt() {
            tracing::warn!(path = %self.path.display(), %error, "cannot unmount");
        }
    }
}

impl Shared {
    /// Fails all IO; returns true the first time.
    fn abort(&self, why: &str) -> bool {
        // The first reason is kept, since it names the cause.
        let is_news = self.dead.set(why.to_owned()).is_ok();
        self.command(|commands| commands.abort = true);
        is_news
    }

    fn command(&self, change: impl FnOnce(&mut Commands)) {
        change(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner));
        // Full means that the thread has been woken already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

struct VolumeLoop {
    volume: String,
    device: OwnedFd,
    filesystem: Filesystem,
    /// `None` after an abort.
    link: Option<Link>,
    shared: Arc<Shared>,
    buffer: Buffer,
    is_all_sent_again: bool,
}

impl VolumeLoop {
    fn new(
        volume: String,
        device: OwnedFd,
        filesystem: Filesystem,
        link: Link,
        shared: Arc<Shared>,
        buffer: Buffer,
    ) -> Self {
        let link = Some(link);
        Self { volume, device, filesystem, link, shared, buffer, is_all_sent_again: false }
    }

    fn run(mut self) {
        let mut done = Vec::new();
        let mut ready = Ready { commands: true, kernel: true, target: true };
        loop {
            self.filesystem.begin_turn(Instant::now());
            if ready.commands && !self.commands(&mut done) {
                return;
            }
            if ready.kernel {
                match self.messages() {
                    Ok(()) => {}
                    Err(Errno::NODEV) => {
                        tracing::debug!(volume = %self.volume, "unmounted");
                        return;
                    }
                    Err(error) => {
                        tracing::error!(volume = %self.volume, %error, "cannot read /dev/fuse");
                        return;
                    }
                }
            }
            let mut superseded = None;
            if let Some(link) = &mut self.link {
                if ready.target {
                    link.drive(Instant::now(), &mut done);
                }
                link.send();
                self.shared.since_epoch.store(link.info().since_epoch, Ordering::Relaxed);
                superseded = link.superseded().map(str::to_owned);
            }
            if let Some(why) = superseded {
                self.fail(why, &mut done);
            }
            self.answer(&mut done);
            self.report();
            ready = self.wait();
        }
    }

    /// Runs queued commands. Returns false if the thread is to end.
    fn commands(&mut self, done: &mut Vec<Done>) -> bool {
        let mut count = [0; 8];
        // The counter is empty on the first turn.
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        let commands = std::mem::take(
            &mut *self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner),
        );
        if commands.leave {
            return false;
        }
        if let Some(size_bytes) = commands.resize {
            self.filesystem.resize(size_bytes);
        }
        if commands.abort || commands.stop {
            if let Some(link) = self.link.take() {
                done.extend(link.stop());
            }
            self.answer(done);
        }
        !commands.stop
    }

    /// Fails waiting and later IO.
    fn fail(&mut self, why: String, done: &mut Vec<Done>) {
        tracing::error!(volume = %self.volume, why, "mounts here are dead: their IO fails now");
        let _ = self.shared.dead.set(why);
        if let Some(link) = self.link.take() {
            done.extend(link.stop());
        }
    }

    fn messages(&mut self) -> Result<(), Errno> {
        let before = self.filesystem.submitted();
        let taken = self.take_messages();
        let is_io = self.filesystem.submitted() != before;
        self.shared.active.fetch_add(u64::from(is_io), Ordering::Relaxed);
        taken
    }

    fn take_messages(&mut self) -> Result<(), Errno> {
        for _ in 0..MESSAGES_PER_TURN {
            match rustix::io::read(&self.device, &mut *self.buffer) {
                Ok(read) => {
                    let outcome = self.filesystem.message(&self.buffer[..read]);
                    // Set before the answer is written: the reader of the answer may check this
                    // next.
                    if self.filesystem.resends() {
                        self.shared.resends.store(true, Ordering::Relaxed);
                    }
                    self.handle(outcome, None);
                }
                Err(Errno::AGAIN) => {
                    self.all_sent_again();
                    return Ok(());
                }
                // ENOENT: the request was interrupted before it was read.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn answer(&mut self, done: &mut Vec<Done>) {
        for one in done.drain(..) {
            let outcome = self.filesystem.complete(one.token, one.result);
            self.handle(outcome, Some(one.token));
        }
    }

    /// Ends what the last process left: the kernel has sent again all that it had no answer to.
    fn all_sent_again(&mut self) {
        if !std::mem::replace(&mut self.is_all_sent_again, true)
            && let Some(link) = &mut self.link
        {
            link.forget_left();
            self.filesystem.go_on_at(HashMap::new());
        }
    }

    /// `follows`: the operation whose result led to this.
    fn handle(&mut self, mut outcome: Outcome, follows: Option<u64>) {
        loop {
            match outcome {
                Outcome::Answer(answer) => {
                    let is_taken = self.write(&answer);
                    // Not before: the kernel would send the request to the next process again.
                    if let (Some(link), Some(answered), true) = (&mut self.link, follows, is_taken)
                    {
                        link.release(answered);
                    }
                    return;
                }
                Outcome::Submit { token, operation } => match &mut self.link {
                    Some(link) => {
                        return match self.filesystem.key(token, &operation) {
                            Some(key) => {
                                link.submit_keyed(token, operation, Keyed { key, follows });
                            }
                            None => link.submit(token, operation),
                        };
                    }
                    None => {
                        let stopped = Err(quoin_nbd::client::RequestError::Stopped);
                        outcome = self.filesystem.complete(token, stopped);
                    }
                },
                Outcome::Nothing => return,
            }
        }
    }

    /// Returns true if the kernel has the answer, or wants none any more.
    fn write(&self, answer: &Answer) -> bool {
        let joined: Vec<Bytes>;
        let data = if answer.data.len() < SLICES_MAX {
            &answer.data
        } else {
            joined = vec![answer.data.concat().into()];
            &joined
        };
        let mut slices = Vec::with_capacity(1 + data.len());
        slices.push(IoSlice::new(&answer.head));
        slices.extend(data.iter().map(|bytes| IoSlice::new(bytes)));
        match rustix::io::writev(&self.device, &slices) {
            // ENOENT: the request has no waiter any more. ENODEV: unmounted, which the next read
            // reports.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => true,
            Err(error) => {
                tracing::error!(volume = %self.volume, %error, "the kernel refused an answer");
                false
            }
        }
    }

    fn report(&self) {
        let (connected, in_flight) = match &self.link {
            Some(link) => (link.connected(), link.in_flight() as u64),
            None => (false, 0),
        };
        self.shared.connected.store(connected, Ordering::Relaxed);
        self.shared.in_flight.store(in_flight, Ordering::Relaxed);
    }

    fn wait(&self) -> Ready {
        let timeout = self.link.as_ref().and_then(Link::deadline).map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        let mut fds = vec![
            PollFd::new(&self.shared.wake, PollFlags::IN),
            PollFd::from_borrowed_fd(self.device.as_fd(), PollFlags::IN),
        ];
        if let Some((link, fd)) = self.link.as_ref().and_then(|link| Some((link, link.fd()?))) {
            let write = if link.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN | write));
        }
        match poll(&mut fds, timeout.as_ref()) {
            // An interrupted wait costs one turn without work.
            Err(_) => Ready { commands: true, kernel: true, target: true },
            // Only the time-out passed: the link must be driven.
            Ok(0) => Ready { commands: false, kernel: false, target: true },
            Ok(_) => Ready {
                commands: !fds[0].revents().is_empty(),
                kernel: !fds[1].revents().is_empty(),
                target: timeout.is_some() || fds.get(2).is_some_and(|fd| !fd.revents().is_empty()),
            },
        }
    }
}

struct Ready {
    commands: bool,
    kernel: bool,
    target: bool,
}
