//! One attached volume: link, FUSE file, loop device. All functions here may block.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Error;
use super::abort::AbortHandles;
use super::created::Created;
use super::holder::{HeldDevice, Holder, Kept};
use super::keys::ToHand;
use super::metrics::Metrics;
use super::numbers;
use super::protocol::{AttachVolume, Attached, Usage};
use crate::fuse::Server;
use crate::fuse::server::Geometry;
use crate::loopdev::{LoopDevice, LoopError};
use quoin_encryption::DataKey;
use quoin_nbd::client::{Address, ClientOptions, ExportInfo, Link, Pipe};

/// Time for a device to be released before its IO is failed, and again after that.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after the last IO for which a device counts as used.
const RECENT: Duration = Duration::from_secs(2);

/// State that all devices of a daemon share.
#[derive(Clone)]
pub(super) struct Host {
    /// Directory of the files.
    pub mounts: PathBuf,
    pub holder: Arc<Holder>,
    pub metrics: Metrics,
    pub created: Arc<Created>,
    pub abort_handles: AbortHandles,
}

pub(super) struct Device {
    request: AttachVolume,
    server: Server,
    /// The memory in which its requests have their numbers.
    numbers: OwnedFd,
    /// `None`: the attachment is the file alone.
    device: Option<LoopDevice>,
    /// Name of the volume for people; empty: unknown.
    name: String,
    /// Activity of the kernel at the last check, and the time at which it last grew.
    active: Mutex<(u64, Option<Instant>)>,
    host: Host,
}

impl Device {
    /// Creates the whole stack, or nothing.
    pub(super) fn attach(host: &Host, request: AttachVolume) -> Result<Self, Error> {
        let path = host.mounts.join(&request.volume);
        let failed = {
            let path = path.clone();
            |source| Error::Io { doing: "keep the numbers of requests of", path, source }
        };
        let (numbers, register) = numbers::create()
            .and_then(|memory| numbers::register(&memory).map(|register| (memory, register)))
            .map_err(failed)?;
        let link = Link::connect_with(client_options(&request), register)?;
        let info = link.info();
        if info.size_bytes < request.size {
            let (volume, is, wanted) = (request.volume, info.size_bytes, request.size);
            return Err(Error::Size { volume, is, wanted });
        }
        if info.block_size_min > request.block_size {
            return Err(Error::Invalid(format!(
                "the target of volume {} has blocks of {} bytes, not {}",
                request.volume, info.block_size_min, request.block_size
            )));
        }
        if info.read_only() && !request.read_only {
            return Err(Error::Invalid(format!(
                "the target of volume {} offers it read-only: attach it read-only",
                request.volume
            )));
        }
        let server =
            Server::start(&path, &request.volume, &geometry(&request), link, &host.metrics)?;
        host.abort_handles.add(&request.volume, server.abort_handle());
        let mut device = Self {
            request,
            server,
            numbers,
            device: None,
            name: String::new(),
            active: Mutex::default(),
            host: host.clone(),
        };
        if !device.request.file_only
            && let Err(error) = device.put_on_loop()
        {
            device.stop();
            return Err(error);
        }
        // The kernel has reported by now whether it can send again: it was asked for the file's
        // size.
        let _ = crate::child::check_file_size(&path, device.request.size);
        // The device is held before it is reported: from then on its IO must not depend on this
        // process.
        if device.server.connection().is_none() {
            tracing::warn!(
                volume = %device.request.volume,
                "this kernel cannot send FUSE requests again (Linux 6.9 can): if this process \
                 dies, the IO of its devices fails"
            );
        } else if !device.hold() {
            tracing::warn!(
                volume = %device.request.volume,
                "no holder runs yet: if this process dies before one starts, the IO of its \
                 devices fails"
            );
        }
        Ok(device)
    }

    /// Serves again what an earlier daemon left; its IO continues.
    ///
    /// The loop device is known by its number. It holds the FUSE file, also where the mount namespace
    /// in which that was mounted ended with the daemon, as a container's does. A file that is used by its path must be mounted.
    pub(super) fn take_over(host: &Host, held: HeldDevice, kept: Kept) -> Result<Self, Error> {
        let Kept { connection, numbers } = kept;
        let HeldDevice { request, device, sequence, name, since_epoch } = held;
        check(&request)?;
        let path = host.mounts.join(&request.volume);
        let gone = |what: &str| {
            Error::Invalid(format!("the {what} of volume {} no longer exists", request.volume))
        };
        let is_numbered = device.is_some() && sequence.is_some();
        if !is_numbered && !is_mounted(&path)? {
            return Err(gone("mount"));
        }
        let device = device.map(|path| LoopDevice::of(path, sequence));
        if device.as_ref().is_some_and(|device| !device.is_bound_to(&path)) {
            return Err(gone("loop device"));
        }
        let known = ExportInfo { since_epoch, ..ExportInfo::of_size(request.size) };
        let register =
            numbers::register(&numbers).map_err(|_| gone("memory for the numbers of requests"))?;
        let link = Link::resume(client_options(&request), known, register);
        let (volume, metrics) = (&request.volume, &host.metrics);
        let server =
            Server::take_over(&path, connection, volume, &geometry(&request), link, metrics)?;
        host.abort_handles.add(volume, server.abort_handle());
        let (active, host) = (Mutex::default(), host.clone());
        let device = Self { request, server, numbers, device, name, active, host };
        if !device.name.is_empty() {
            device.host.metrics.call(&device.request.volume, &device.name);
        }
        if let Some(loop_device) = &device.device
            && let Err(error) = device.host.created.add(&device.request.volume, loop_device)
        {
            tracing::warn!(volume = %device.request.volume, %error, "cannot be recorded as created \
                                                                     here");
        }
        device.hold();
        // The last daemon may have died after the file had grown and before the loop device had.
        if let Some(loop_device) = &device.device
            && loop_device.size() != Some(device.request.size)
            && let Err(error) = loop_device.update_size()
        {
            tracing::warn!(volume = %device.request.volume, %error, "keeps its old size");
        }
        Ok(device)
    }

    /// Creates the block device, and records it as made here before it is reported.
    fn put_on_loop(&mut self) -> Result<(), Error> {
        let path = self.server.path().to_owned();
        let written =
            |source| Error::Io { doing: "record the device of", path: path.clone(), source };
        self.host.created.record_intent(&self.request.volume).map_err(written)?;
        let device = LoopDevice::attach(&path, self.request.block_size, self.request.read_only)?;
        if let Err(error) = self.host.created.add(&self.request.volume, &device) {
            device.release()?;
            return Err(written(error));
        }
        self.device = Some(device);
        Ok(())
    }

    /// Ensures that the block device belongs to this attachment. Another program may have freed it,
    /// and a third may have it since: that one is not touched.
    pub(super) fn ensure_device(&mut self) -> Result<(), Error> {
        if self.has_its_device() {
            return Ok(());
        }
        let lost = self.path();
        if !is_mounted(self.server.path())? {
            return Err(Error::Unmounted { volume: self.request.volume.clone(), device: lost });
        }
        self.put_on_loop()?;
        tracing::warn!(
            volume = %self.request.volume, lost = %lost.display(), device = %self.path().display(),
            "the device was freed by another program; a new one is made"
        );
        self.hold();
        if !self.name.is_empty() {
            self.link(&self.name.clone());
        }
        Ok(())
    }

    /// Returns true if the device that was made here still exists.
    pub(super) fn has_its_device(&self) -> bool {
        self.device.as_ref().is_none_or(|device| device.is_bound_to(self.server.path()))
    }

    /// Returns true if the device is gone, and its file is mounted nowhere to make another one on it.
    pub(super) fn is_lost(&self) -> bool {
        !self.has_its_device() && !is_mounted(self.server.path()).unwrap_or(true)
    }

    /// Links the device under the volume's name, unless the name is taken.
    pub(super) fn link(&mut self, name: &str) {
        self.name = name.to_owned();
        self.host.metrics.call(&self.request.volume, name);
        if let Some(device) = &self.device
            && let Err(why) = self.host.created.link(&self.request.volume, name, device.path())
        {
            tracing::warn!(volume = %self.request.volume, why, "the device has no link with the \
                                                                name of the volume");
        }
        self.hold();
    }

    /// Reason for which all its IO fails, if it does.
    pub(super) fn dead(&self) -> Option<String> {
        self.server.dead()
    }

    /// The first epoch of the use of the volume that this was made for; 0: unknown.
    pub(super) fn since_epoch(&self) -> u64 {
        self.server.since_epoch()
    }

    /// Keeps the key of an encrypted volume where it had none.
    pub(super) fn take_key(&mut self, key: Option<DataKey>) {
        if key.is_some() && self.request.key != key {
            self.request.key = key;
            self.hold();
        }
    }

    /// The key, where the target may lack it: the connection to it is down.
    pub(super) fn key_to_hand(&self) -> Option<ToHand> {
        let key = self.request.key.clone().filter(|_| !self.server.connected())?;
        let AttachVolume { volume, nbd_socket, .. } = &self.request;
        Some(ToHand { volume: volume.clone(), nbd_socket: nbd_socket.clone(), key })
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            volume: self.request.volume.clone(),
            device: self.path(),
            in_use: self.is_busy(),
            since_epoch: self.since_epoch(),
            dead: self.server.dead().unwrap_or_default(),
            size: self.request.size,
            asked: self.host.abort_handles.asked(&self.request.volume),
        }
    }

    /// Returns true if a mount or the like holds the device, or IO was done recently. Neither
    /// blocks nor touches the device.
    pub(super) fn is_busy(&self) -> bool {
        if self.server.in_flight() > 0 {
            return true;
        }
        let (activity, now) = (self.server.activity(), Instant::now());
        if self.server.dead().is_none() {
            let mut active = self.active.lock().unwrap_or_else(PoisonError::into_inner);
            if active.0 != activity {
                *active = (activity, Some(now));
            }
            if active.1.is_some_and(|at| now.duration_since(at) < RECENT) {
                return true;
            }
        }
        self.device.as_ref().is_some_and(LoopDevice::is_held)
    }

    /// Gives the kernel's side to the holder, so that it outlives this process; returns whether it
    /// does.
    fn hold(&self) -> bool {
        let kept = self.server.connection().map(|connection| -> std::io::Result<Kept> {
            Ok(Kept { connection: connection?, numbers: self.numbers.try_clone()? })
        });
        match kept {
            Some(Ok(kept)) => {
                let device = self.device.as_ref();
                let held = HeldDevice {
                    request: self.request.clone(),
                    device: device.map(|device| device.path().to_owned()),
                    sequence: device.and_then(LoopDevice::sequence),
                    name: self.name.clone(),
                    since_epoch: self.since_epoch(),
                };
                self.host.holder.hold(held, kept)
            }
            Some(Err(error)) => {
                tracing::warn!(volume = %self.request.volume, %error, "the holder cannot keep the \
                                                                       device");
                false
            }
            None => false,
        }
    }

    /// Ends this process's part and leaves the rest to the next daemon; returns the device if no
    /// daemon could take it over.
    pub(super) fn leave(self) -> Result<(), Box<Self>> {
        // The descriptor is given once more, and must be accepted: a holder that has just died
        // cannot keep it.
        if !self.hold() {
            return Err(Box::new(self));
        }
        self.host.abort_handles.forget(&self.request.volume);
        self.server.leave();
        Ok(())
    }

    /// Checks that `request` equals the attachment, except for its size and its key: who knows that
    /// the target has the key names none.
    pub(super) fn check_same(&self, request: &AttachVolume) -> Result<(), Error> {
        let (size, key) = (self.request.size, self.request.key.clone());
        let same = AttachVolume { size, key, ..request.clone() };
        if same == self.request {
            return Ok(());
        }
        let what = format!(
            "socket {}, blocks of {} bytes, {}{}",
            self.request.nbd_socket.display(),
            self.request.block_size,
            if self.request.read_only { "read-only" } else { "writable" },
            if self.request.file_only { ", as a file" } else { "" },
        );
        Err(Error::Conflict { volume: self.request.volume.clone(), what })
    }

    pub(super) fn size(&self) -> u64 {
        self.request.size
    }

    pub(super) fn show(&self) -> Attached {
        Attached {
            volume: self.request.volume.clone(),
            device: self.path(),
            nbd_socket: self.request.nbd_socket.clone(),
            size: self.request.size,
            block_size: self.request.block_size,
            read_only: self.request.read_only,
            file_only: self.request.file_only,
            connected: self.server.connected(),
            in_flight: self.server.in_flight(),
            link: self.host.created.link_of(&self.request.volume, &self.path()),
            dead: self.server.dead().unwrap_or_default(),
        }
    }

    /// Grows file and device; the target must have grown before.
    pub(super) fn resize(&mut self, size: u64) -> Result<(), Error> {
        if size < self.request.size {
            return Err(Error::Invalid(format!(
                "volume {} has {} bytes and cannot shrink to {size}",
                self.request.volume, self.request.size
            )));
        }
        check_size(size, self.request.block_size)?;
        // A separate connection, because only a negotiation reports the size.
        let mut pipe = Pipe::connect(&client_options(&self.request))?;
        let is = pipe.info().size_bytes;
        pipe.disconnect();
        if is < size {
            let volume = self.request.volume.clone();
            return Err(Error::Size { volume, is, wanted: size });
        }
        let io =
            |source| Error::Io { doing: "resize", path: self.server.path().to_owned(), source };
        let is_mounted = is_mounted(self.server.path())?;
        match is_mounted {
            true => self.server.resize(size).map_err(io)?,
            false => self.server.set_size(size),
        }
        self.request.size = size;
        // Before the device has it: a daemon that takes over never serves less than is in use.
        self.hold();
        if let Some(device) = &self.device {
            device.update_size()?;
            // The kernel was not made to read the file's size, and asks for it itself since Linux 6.17.
            if !is_mounted && device.size().is_some_and(|is| is < size) {
                let (volume, device) = (self.request.volume.clone(), device.path().to_owned());
                return Err(Error::Unmounted { volume, device });
            }
        }
        Ok(())
    }

    pub(super) fn in_use(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.in_use().unwrap_or(true))
    }

    /// Removes the stack, or returns it with the reason: it is in use.
    pub(super) fn detach(self) -> Result<(), (Box<Self>, Error)> {
        self.detach_within(DETACH_TIMEOUT)
    }

    /// Same as [`Device::detach`], and waits for so long alone.
    pub(super) fn detach_within(self, timeout: Duration) -> Result<(), (Box<Self>, Error)> {
        if let Some(device) = &self.device {
            let busy = |this: &Self| Error::Busy {
                volume: this.request.volume.clone(),
                device: this.path(),
            };
            match device.detach(timeout) {
                Ok(true) => {}
                Ok(false) if self.server.in_flight() > 0 => {
                    // No program has it open any more, and IO that waits for an absent target keeps
                    // it.
                    tracing::warn!(volume = %self.request.volume, in_flight = self.server.in_flight(),
                        "detaching with IO that waits for the target: it fails");
                    self.server.abort("the device was detached while its target was away");
                    match device.detach(timeout) {
                        Ok(true) => {}
                        _ => {
                            let error = busy(&self);
                            return Err((Box::new(self), error));
                        }
                    }
                }
                Ok(false) | Err(LoopError::Busy { .. }) => {
                    let error = busy(&self);
                    return Err((Box::new(self), error));
                }
                Err(error) => return Err((Box::new(self), error.into())),
            }
        }
        self.stop();
        Ok(())
    }

    /// Ends the stack, even in use: IO fails, and the loop device is removed with its last user.
    /// Returns the actions taken, as text.
    pub(super) fn force_detach(self) -> Vec<String> {
        let mut did = vec!["its IO fails from now on".to_owned()];
        if let Some(device) = &self.device {
            let path = device.path().display().to_string();
            match device.release() {
                Err(error) => {
                    tracing::warn!(volume = %self.request.volume, %error, "cannot release");
                    did.push(format!("{path} is not freed: {error}"));
                }
                Ok(()) if device.is_bound_to(self.server.path()) => {
                    did.push(format!("{path} goes with its last user: unmount it, end its users"));
                }
                Ok(()) => did.push(format!("{path} is freed")),
            }
        }
        self.stop();
        did
    }

    fn stop(self) {
        let Self { request, server, host, .. } = self;
        let stopped = server.stop();
        host.abort_handles.forget(&request.volume);
        host.holder.release(&request.volume);
        host.created.remove(&request.volume);
        if let Err(error) = stopped {
            tracing::warn!(volume = %request.volume, %error, "cannot unmount");
        }
    }

    fn path(&self) -> PathBuf {
        match &self.device {
            Some(device) => device.path().to_owned(),
            None => self.server.path().to_owned(),
        }
    }
}

/// Returns true if the file system of a volume is mounted at `path`, in this mount namespace.
fn is_mounted(path: &Path) -> Result<bool, Error> {
    let mounted = crate::fuse::mount::mounts_under(path).map_err(|source| Error::Io {
        doing: "look at",
        path: path.to_owned(),
        source,
    })?;
    Ok(!mounted.is_empty())
}

/// Checks the parts of a request that need no target.
pub(super) fn check(request: &AttachVolume) -> Result<(), Error> {
    check_name(&request.volume)?;
    if !matches!(request.block_size, 512 | 4096) {
        return Err(Error::Invalid(format!(
            "blocks of {} bytes are not supported, only 512 or 4096",
            request.block_size
        )));
    }
    if !request.nbd_socket.is_absolute() {
        let socket = request.nbd_socket.display();
        return Err(Error::Invalid(format!("the NBD socket {socket} is not an absolute path")));
    }
    check_size(request.size, request.block_size)
}

pub(super) fn check_name(volume: &str) -> Result<(), Error> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=128).contains(&volume.len()) && !volume.starts_with('.') && volume.bytes().all(good) {
        Ok(())
    } else {
        Err(Error::Name(volume.chars().take(200).collect()))
    }
}

fn check_size(size: u64, block_size: u32) -> Result<(), Error> {
    // The kernel's file sizes are signed.
    if size == 0 || !size.is_multiple_of(u64::from(block_size)) || i64::try_from(size).is_err() {
        return Err(Error::Invalid(format!(
            "{size} bytes is not a valid size: a multiple of {block_size}, above 0, below 2^63"
        )));
    }
    Ok(())
}

fn geometry(request: &AttachVolume) -> Geometry {
    Geometry {
        size_bytes: request.size,
        block_size: request.block_size,
        read_only: request.read_only,
    }
}

fn client_options(request: &AttachVolume) -> ClientOptions {
    let read_only = request.read_only;
    ClientOptions { read_only, ..ClientOptions::new(Address::Unix(request.nbd_socket.clone())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> AttachVolume {
        AttachVolume {
            volume: "db".into(),
            nbd_socket: "/run/db.sock".into(),
            size: 1 << 30,
            block_size: 4096,
            read_only: false,
            file_only: false,
            key: None,
        }
    }

    #[test]
    fn names_that_could_leave_the_directory_are_refused() {
        for name in ["", ".", "..", "../x", "a/b", "a\0b", ".hidden", "ü", &"x".repeat(129)] {
            let request = AttachVolume { volume: name.into(), ..request() };
            assert!(matches!(check(&request), Err(Error::Name(_))), "{name:?}");
        }
        assert!(check(&AttachVolume { volume: "x".repeat(128), ..request() }).is_ok());
    }

    #[test]
    fn impossible_sizes_and_block_sizes_are_refused() {
        for size in [0, 4095, 4097, 1 << 63, u64::MAX] {
            assert!(check(&AttachVolume { size, ..request() }).is_err(), "{size}");
        }
        for block_size in [0, 1, 1024, 8192] {
            assert!(check(&AttachVolume { block_size, ..request() }).is_err(), "{block_size}");
        }
        assert!(check(&AttachVolume { nbd_socket: "relative".into(), ..request() }).is_err());
        assert!(check(&request()).is_ok());
    }
}
