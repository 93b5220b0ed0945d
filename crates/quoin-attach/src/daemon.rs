//! The daemon: the control socket, the table of attachments, start and shutdown.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, watch};
use zeroize::Zeroizing;

use super::abort::{self, AbortHandles};
use super::created::Created;
use super::device::{Device, Host, check, check_name};
use super::holder::Holder;
use super::keys;
use super::protocol::{
    AttachVolume, Attached, DetachedHere, Kind, LINE_BYTES_MAX, Request, Response, ServedElsewhere,
    Usage,
};
use super::{AtShutdown, Error, Options};
use crate::fuse::mount;
use crate::loopdev::LoopError;

const DRAIN_POLL: Duration = Duration::from_millis(100);
const CLIENTS_MAX: usize = 64;
/// Time that a device of a detached volume has to go: a program that has it open keeps it.
const REMOVAL_MAX: Duration = Duration::from_millis(300);
/// Limit of a volume's name.
const LINK_NAME_BYTES_MAX: usize = 128;

/// One slot for each volume, locked during work on it, so that volumes do not wait for each other.
type Slot = Arc<Mutex<Option<Device>>>;

#[derive(Clone)]
pub(super) struct Daemon {
    host: Host,
    slots: Arc<std::sync::Mutex<BTreeMap<String, Slot>>>,
}

/// Serves until `shutdown` becomes true. An error at the end names devices that were in use.
pub async fn run(options: Options, mut shutdown: watch::Receiver<bool>) -> Result<(), Error> {
    let io = |doing, path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { doing, path, source }
    };
    let mounts = options.directory.join("volumes");
    std::fs::create_dir_all(&mounts).map_err(io("create", &mounts))?;
    let mounts = mounts.canonicalize().map_err(io("resolve", &mounts))?;
    if options.expects_shared_mounts
        && !mount::is_shared(&mounts).map_err(io("look at", &mounts))?
    {
        return Err(Error::NotShared { directory: mounts });
    }
    let lock_path = options.directory.join("lock");
    let lock = File::create(&lock_path).map_err(io("create", &lock_path))?;
    if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(Error::Locked { directory: options.directory });
    }
    let holder = Holder::start(&options.holder, &options.metrics)
        .map_err(io("start a thread for", &options.holder))?;
    let created = Arc::new(Created::open(&options.directory, &options.links));
    let (metrics, abort_handles) = (options.metrics.clone(), AbortHandles::default());
    let host = Host { mounts, holder, metrics, created, abort_handles };
    let daemon = Daemon { host, slots: Arc::default() };
    daemon.take_over().await;
    daemon.clean_up()?;
    match std::fs::remove_file(&options.socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(io("replace", &options.socket)(error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&options.socket).map_err(io("bind", &options.socket))?;
    // Access to the socket gives read and write access to every attached volume.
    std::fs::set_permissions(&options.socket, std::fs::Permissions::from_mode(0o600))
        .map_err(io("protect", &options.socket))?;
    tracing::info!(socket = %options.socket.display(), "attach is ready");

    let keys = tokio::spawn(keys::keep_handing(daemon.clone()));
    let clients = Arc::new(tokio::sync::Semaphore::new(CLIENTS_MAX));
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let (daemon, clients) = (daemon.clone(), clients.clone());
                    tokio::spawn(async move {
                        // The semaphore is never closed, so this fails only if the daemon is gone.
                        let Ok(_permit) = clients.acquire().await else { return };
                        if let Err(error) = daemon.serve(stream).await {
                            tracing::debug!(%error, "a client of the control socket disconnected");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept on the control socket");
                    tokio::time::sleep(DRAIN_POLL).await;
                }
            },
            changed = shutdown.changed() => {
                // A dropped sender has the same effect: nothing could stop the daemon later.
                if changed.is_err() || *shutdown.borrow() {
                    break;
                }
            }
        }
    }
    keys.abort();
    drop(listener);
    let _ = std::fs::remove_file(&options.socket);
    let result = daemon.shut_down(options.at_shutdown, options.drain_timeout).await;
    drop(lock);
    result
}

impl Daemon {
    /// Takes over what the last daemon left at the holder, before any other work.
    async fn take_over(&self) {
        let this = self.clone();
        let taken_over = tokio::task::spawn_blocking(move || {
            let mut devices = Vec::new();
            for (held, connection) in this.host.holder.take() {
                let volume = held.request.volume.clone();
                match Device::take_over(&this.host, held, connection) {
                    Ok(device) => {
                        tracing::info!(volume, "taken over; its IO continues");
                        this.host.metrics.taken_over.inc();
                        devices.push((volume, device));
                    }
                    Err(error) => {
                        tracing::warn!(volume, %error, "cannot be taken over; its IO fails");
                        this.host.holder.release(&volume);
                    }
                }
            }
            devices
        });
        for (volume, device) in taken_over.await.unwrap_or_default() {
            let mut slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            slots.insert(volume, Arc::new(Mutex::new(Some(device))));
        }
    }

    /// Removes the loop devices, links and mounts that a daemon made here before it died, and that
    /// no holder kept. Their IO failed when it died; a loop device that is still in use is removed
    /// with its last user. Devices that it did not make are left alone, whatever their path.
    fn clean_up(&self) -> Result<(), Error> {
        let Host { mounts, created, .. } = &self.host;
        let failed = |source| Error::Io { doing: "clean up", path: mounts.clone(), source };
        let volumes: Vec<String> = {
            let slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            slots.keys().cloned().collect()
        };
        let attached_paths: Vec<PathBuf> =
            volumes.iter().map(|volume| mounts.join(volume)).collect();
        for device in created.devices_but(&volumes, mounts).map_err(failed)? {
            let file = device.backing_file().unwrap_or_default();
            if !device.is_bound_to(&file) {
                continue;
            }
            tracing::warn!(device = %device.path().display(), "left by a daemon that died: detaching");
            device.release()?;
        }
        created.remove_all_but(&volumes);
        for path in mount::mounts_under(mounts).map_err(failed)? {
            if !attached_paths.contains(&path) {
                tracing::warn!(path = %path.display(), "left by a daemon that died: unmounting");
                mount::unmount(&path).map_err(failed)?;
            }
        }
        for entry in std::fs::read_dir(mounts).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if !attached_paths.contains(&path) {
                std::fs::remove_file(path).map_err(failed)?;
            }
        }
        Ok(())
    }

    async fn serve(&self, stream: UnixStream) -> std::io::Result<()> {
        let (read, mut write) = stream.into_split();
        let mut reader = BufReader::new(read);
        loop {
            let mut line = Zeroizing::new(Vec::new());
            let mut limited = (&mut reader).take(LINE_BYTES_MAX);
            if limited.read_until(b'\n', &mut line).await? == 0 {
                return Ok(());
            }
            let complete = line.ends_with(b"\n");
            let response = match serde_json::from_slice(&line) {
                Ok(request) => self.answer(request).await,
                Err(error) => Response::Error {
                    kind: Kind::Invalid,
                    message: format!("this line is not a request: {error}"),
                },
            };
            let mut bytes = serde_json::to_vec(&response)?;
            bytes.push(b'\n');
            write.write_all(&bytes).await?;
            if !complete {
                return Ok(());
            }
        }
    }

    async fn answer(&self, request: Request) -> Response {
        let result = match request {
            Request::Attach(request) => self.attach(request).await.map(Response::Ok),
            Request::Detach { volume } => self.detach(volume).await.map(|()| Response::Detached {}),
            Request::Resize { volume, size } => self.resize(volume, size).await.map(Response::Ok),
            Request::List {} => Ok(Response::List(listed(self.slots()).await)),
            Request::Find { volume } => Ok(Response::List(listed(self.slot(&volume)).await)),
            Request::Link { volume, name } => self.link(volume, name).await.map(Response::Ok),
            Request::End { volume } => self.end(volume).await.map(|did| Response::Ended { did }),
            Request::ServedElsewhere(served) => self.served_elsewhere(served).await,
            Request::Detached(detached) => self.detached(detached),
            Request::Sweep { volume } => self.sweep(volume).await,
            Request::Usage {} => Ok(Response::Usage(self.usage().await)),
        };
        result.unwrap_or_else(|error| Response::Error {
            kind: kind(&error),
            message: error.to_string(),
        })
    }

    async fn attach(&self, request: AttachVolume) -> Result<Attached, Error> {
        check(&request)?;
        self.host.abort_handles.is_asked_for(&request.volume);
        let this = self.clone();
        self.with_slot(request.volume.clone(), move |slot| {
            // Nothing can put a device on a file that is mounted nowhere any more.
            if slot.as_ref().is_some_and(Device::is_lost)
                && let Some(lost) = slot.take()
            {
                lost.force_detach();
            }
            // A dead device without users serves no purpose.
            if let Some(why) = slot.as_ref().and_then(Device::dead)
                && let Some(dead) = slot.take()
                && let Err((dead, _)) = dead.detach()
            {
                *slot = Some(*dead);
                return Err(Error::Dead { volume: request.volume, why });
            }
            let device = match slot.take() {
                Some(device) => {
                    let device = slot.insert(device);
                    device.check_same(&request)?;
                    device.take_key(request.key);
                    device.ensure_device()?;
                    if request.size > device.size() {
                        device.resize(request.size)?;
                    }
                    device
                }
                None => slot.insert(Device::attach(&this.host, request)?),
            };
            Ok(device.show())
        })
        .await
    }

    async fn detach(&self, volume: String) -> Result<(), Error> {
        check_name(&volume)?;
        self.with_slot(volume, |slot| {
            let Some(device) = slot.take() else { return Ok(()) };
            device.detach().map_err(|(device, error)| {
                *slot = Some(*device);
                error
            })
        })
        .await
    }

    async fn resize(&self, volume: String, size: u64) -> Result<Attached, Error> {
        check_name(&volume)?;
        self.with_slot(volume.clone(), move |slot| {
            let device = slot.as_mut().ok_or_else(|| {
                Error::Invalid(format!("volume {volume} is not attached: attach it first"))
            })?;
            device.resize(size)?;
            Ok(device.show())
        })
        .await
    }

    async fn link(&self, volume: String, name: String) -> Result<Attached, Error> {
        check_name(&volume)?;
        if name.is_empty() || name.len() > LINK_NAME_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "the name of volume {volume} must have 1 to {LINK_NAME_BYTES_MAX} bytes"
            )));
        }
        self.with_slot(volume.clone(), move |slot| {
            let device = slot.as_mut().ok_or_else(|| {
                Error::Invalid(format!("volume {volume} is not attached: attach it first"))
            })?;
            device.link(&name);
            Ok(device.show())
        })
        .await
    }

    /// Ends a device, even in use. Its IO fails first, so that no user waits for IO while this call
    /// waits for that user.
    async fn end(&self, volume: String) -> Result<Vec<String>, Error> {
        check_name(&volume)?;
        self.host
            .abort_handles
            .end(&volume, "the device was ended by `quoin volume detach --force`");
        self.with_slot(volume, |slot| Ok(slot.take().map(Device::force_detach).unwrap_or_default()))
            .await
    }

    /// Returns what a target must be handed now: keys of volumes whose connection is down. Devices
    /// that are worked on are left out.
    pub(super) fn keys_to_hand(&self) -> Vec<keys::ToHand> {
        let slots = {
            let slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            slots.values().cloned().collect::<Vec<Slot>>()
        };
        let to_hand = |slot: &Slot| slot.try_lock().ok()?.as_ref()?.key_to_hand();
        slots.iter().filter_map(to_hand).collect()
    }

    async fn served_elsewhere(&self, served: ServedElsewhere) -> Result<Response, Error> {
        check_name(&served.volume)?;
        let ServedElsewhere { volume, name, node, since_epoch } = served;
        let why = abort::served_elsewhere(&node, since_epoch);
        // A device of a later use was made while this message was on its way.
        if self.host.abort_handles.end_before(&volume, since_epoch, &why) {
            tracing::error!(volume = name, id = volume, why, "its IO fails from now on");
            self.host.metrics.call(&volume, &name);
        }
        Ok(Response::Ended { did: Vec::new() })
    }

    /// Removes a device whose volume is not attached to this host any more. One that is in use stays
    /// until it is not, and its IO fails once no target serves it: nothing would end its wait.
    fn detached(&self, detached: DetachedHere) -> Result<Response, Error> {
        let DetachedHere { volume, asked, why } = detached;
        check_name(&volume)?;
        let next = self.host.abort_handles.detached(&volume, asked, &why, Instant::now());
        if next.is_ended {
            tracing::error!(volume, why, "its IO fails from now on");
        }
        if next.may_go {
            let this = self.clone();
            // Behind the answer: a device that is being used may take a moment to say so.
            tokio::spawn(async move { this.remove_detached(volume, asked).await });
        }
        Ok(Response::Ended { did: Vec::new() })
    }

    /// Removes what was made for a volume and belongs to no attachment of it: what an attachment that failed
    /// half-way left, and devices that their last user has closed since.
    async fn sweep(&self, volume: String) -> Result<Response, Error> {
        check_name(&volume)?;
        let Host { mounts, created, .. } = self.host.clone();
        let named = volume.clone();
        self.with_slot(volume, move |slot| {
            if slot.is_some() {
                created.remove_spent();
                return Ok(());
            }
            let path = mounts.join(&named);
            if let Some(device) = created.device_of(&named)
                && device.is_bound_to(&path)
            {
                device.release()?;
            }
            mount::unmount(&path).map_err(|source| Error::Io { doing: "unmount", path, source })?;
            created.remove(&named);
            Ok(())
        })
        .await?;
        Ok(Response::Ended { did: Vec::new() })
    }

    async fn remove_detached(&self, volume: String, asked: u64) {
        if self.slot(&volume).is_none() {
            return;
        }
        let handles = self.host.abort_handles.clone();
        let (named, shown) = (volume.clone(), volume.clone());
        let removed = self.with_slot(volume, move |slot| {
            let Some(device) = slot.take() else { return Ok(false) };
            if device.is_busy() || !handles.tries_removal(&named, asked, Instant::now()) {
                *slot = Some(device);
                return Ok(false);
            }
            match device.detach_within(REMOVAL_MAX) {
                Ok(()) => Ok(true),
                Err((device, _)) => {
                    *slot = Some(*device);
                    Ok(false)
                }
            }
        });
        if matches!(removed.await, Ok(true)) {
            tracing::warn!(
                volume = shown,
                "not attached to this host any more: its device is removed"
            );
        }
    }

    /// Returns the attached volumes and whether they are used; does not block.
    async fn usage(&self) -> Vec<Usage> {
        let slots: Vec<(String, Slot)> = {
            let slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            slots.iter().map(|(volume, slot)| (volume.clone(), slot.clone())).collect()
        };
        let query = move || {
            let usage = |(volume, slot): (String, Slot)| match slot.try_lock() {
                Ok(slot) => slot.as_ref().map(Device::usage),
                // Work on the device is under way, which may wait for its IO.
                Err(_) => Some(Usage {
                    volume,
                    device: PathBuf::new(),
                    in_use: true,
                    since_epoch: 0,
                    dead: String::new(),
                    size: 0,
                    asked: 0,
                }),
            };
            slots.into_iter().filter_map(usage).collect()
        };
        tokio::task::spawn_blocking(query).await.unwrap_or_default()
    }

    /// Ends everything as [`AtShutdown`] requires; devices that must become idle first get
    /// `drain_timeout`.
    async fn shut_down(&self, how: AtShutdown, drain_timeout: Duration) -> Result<(), Error> {
        let until = Instant::now() + drain_timeout;
        let mut busy = Vec::new();
        for slot in self.slots() {
            let mut slot = slot.lock_owned().await;
            while how != AtShutdown::LeaveAll
                && slot.as_ref().is_some_and(Device::in_use)
                && Instant::now() < until
            {
                tokio::time::sleep(DRAIN_POLL).await;
            }
            let ended = tokio::task::spawn_blocking(move || end(slot.take()?, how));
            match ended.await {
                Ok(name) => busy.extend(name),
                Err(error) => tracing::error!(%error, "ending a device panicked"),
            }
        }
        if busy.is_empty() { Ok(()) } else { Err(Error::BusyAtShutdown(busy)) }
    }

    /// Runs a function that may block on one volume, exclusively.
    async fn with_slot<T: Send + 'static>(
        &self,
        volume: String,
        act: impl FnOnce(&mut Option<Device>) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            slots.entry(volume.clone()).or_default().clone()
        };
        let mut held = slot.clone().lock_owned().await;
        let result = tokio::task::spawn_blocking(move || act(&mut held))
            .await
            .unwrap_or_else(|error| Err(Error::Invalid(format!("the request failed: {error}"))));
        let mut slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Two references, the table's and this one, mean that no other call waits for the slot; an
        // empty slot is removed.
        if Arc::strong_count(&slot) == 2 && slot.try_lock().is_ok_and(|slot| slot.is_none()) {
            slots.remove(&volume);
        }
        result
    }

    fn slot(&self, volume: &str) -> Option<Slot> {
        let slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        slots.get(volume).cloned()
    }

    fn slots(&self) -> Vec<Slot> {
        let slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        slots.values().cloned().collect()
    }
}

/// Returns the devices in these slots; each one is waited for while it is worked on.
async fn listed(slots: impl IntoIterator<Item = Slot>) -> Vec<Attached> {
    let mut list = Vec::new();
    for slot in slots {
        let slot = slot.lock().await;
        // A device that was taken by another program is not of this volume.
        list.extend(slot.as_ref().filter(|device| device.has_its_device()).map(Device::show));
    }
    list
}

/// Ends one device at a shutdown; returns its name if its IO fails now.
fn end(device: Device, how: AtShutdown) -> Option<String> {
    let name = device.show().device.display().to_string();
    let mut device = Box::new(device);
    if how == AtShutdown::LeaveInUse {
        device = device.detach().err()?.0;
    }
    if how != AtShutdown::DetachAll {
        match device.leave() {
            Ok(()) => {
                tracing::info!(device = name, "left to the next daemon: its IO waits for it");
                return None;
            }
            Err(back) => device = back,
        }
        tracing::error!(
            device = name,
            "cannot be left to the next daemon: there is no holder, or the kernel cannot send \
             requests again"
        );
    }
    let (device, error) = device.detach().err()?;
    tracing::error!(device = name, %error, "in use at shutdown: its IO fails now");
    device.force_detach();
    Some(name)
}

fn kind(error: &Error) -> Kind {
    match error {
        Error::Conflict { .. } => Kind::Conflict,
        Error::Busy { .. } | Error::Dead { .. } | Error::Loop(LoopError::Waits { .. }) => {
            Kind::Busy
        }
        Error::Size { .. } | Error::Client(_) => Kind::Unavailable,
        Error::Mount(_) | Error::Loop(_) | Error::Io { .. } | Error::Unmounted { .. } => Kind::Host,
        _ => Kind::Invalid,
    }
}
