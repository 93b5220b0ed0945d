//! One attached volume: link, FUSE file, loop device. Everything here may block.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::Error;
use super::holder::{Held, Holder};
use super::metrics::Metrics;
use super::protocol::{AttachVolume, Attached};
use crate::fuse::Server;
use crate::fuse::server::Shape;
use crate::loopdev::{LoopDevice, LoopError};
use crate::nbd::client::{Address, ClientOptions, ExportInfo, Link, Pipe};

/// How long a device may take to go before its IO is failed, and again after that.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct Device {
    asked: AttachVolume,
    server: Server,
    /// `None`: only the file.
    device: Option<LoopDevice>,
    holder: Arc<Holder>,
}

impl Device {
    /// Makes the whole stack, or nothing.
    pub(super) fn attach(
        mounts: &Path,
        asked: AttachVolume,
        holder: &Arc<Holder>,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        let link = Link::connect(client_options(&asked))?;
        let info = link.info();
        if info.size_bytes < asked.size {
            let (volume, is, wanted) = (asked.volume, info.size_bytes, asked.size);
            return Err(Error::Size { volume, is, wanted });
        }
        if info.block_size_min > asked.block_size {
            return Err(Error::Invalid(format!(
                "the target of volume {} has blocks of {} bytes, not {}",
                asked.volume, info.block_size_min, asked.block_size
            )));
        }
        if info.read_only() && !asked.read_only {
            return Err(Error::Invalid(format!(
                "the target of volume {} offers it read-only: attach it read-only",
                asked.volume
            )));
        }
        let path = mounts.join(&asked.volume);
        let server = Server::start(&path, &asked.volume, &shape(&asked), link, metrics)?;
        let device = if asked.file_only {
            None
        } else {
            // A failure here drops the server, which unmounts.
            Some(LoopDevice::attach(&path, asked.block_size, asked.read_only)?)
        };
        // The kernel has told by now whether it can send again: it was asked for the file's size.
        let _ = crate::apart::look(&path, asked.size);
        let device = Self { asked, server, device, holder: holder.clone() };
        // Before anybody is told of it: from then on its IO must not depend on this process.
        if device.server.connection().is_none() {
            tracing::warn!(
                volume = %device.asked.volume,
                "this kernel cannot send FUSE requests again (Linux 6.9 can): if this process \
                 dies, the IO of its devices fails"
            );
        } else if !device.hold() {
            tracing::warn!(
                volume = %device.asked.volume,
                "no holder is there yet: if this process dies before one is, the IO of its \
                 devices fails"
            );
        }
        Ok(device)
    }

    /// Serves again what an earlier daemon left; its IO goes on.
    ///
    /// The mount and the loop device must be as they were left: a half of them is of no use.
    pub(super) fn take_over(
        mounts: &Path,
        held: Held,
        connection: OwnedFd,
        holder: &Arc<Holder>,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        let Held { asked, device } = held;
        check(&asked)?;
        let path = mounts.join(&asked.volume);
        let gone = |what: &str| {
            Error::Invalid(format!("the {what} of volume {} is not there any more", asked.volume))
        };
        let mounted = crate::fuse::mount::mounts_under(&path).map_err(|source| Error::Io {
            doing: "look at",
            path: path.clone(),
            source,
        })?;
        if mounted.is_empty() {
            return Err(gone("mount"));
        }
        let device = device.map(LoopDevice::at);
        if device.as_ref().is_some_and(|d| d.backing_file().as_ref() != Some(&path)) {
            return Err(gone("loop device"));
        }
        let link = Link::resume(client_options(&asked), ExportInfo::of_size(asked.size));
        let server =
            Server::take_over(&path, connection, &asked.volume, &shape(&asked), link, metrics)?;
        let device = Self { asked, server, device, holder: holder.clone() };
        device.hold();
        // The last daemon may have died when the file had grown and the loop device not yet.
        if let Some(loop_device) = &device.device
            && loop_device.size() != Some(device.asked.size)
            && let Err(error) = loop_device.update_size()
        {
            tracing::warn!(volume = %device.asked.volume, %error, "keeps its old size");
        }
        Ok(device)
    }

    /// Gives the kernel's side to the holder, so that it outlives this process. Whether it does.
    fn hold(&self) -> bool {
        match self.server.connection() {
            Some(Ok(connection)) => {
                let device = self.device.as_ref().map(|device| device.path().to_owned());
                self.holder.hold(Held { asked: self.asked.clone(), device }, connection)
            }
            Some(Err(error)) => {
                tracing::warn!(volume = %self.asked.volume, %error, "cannot be held");
                false
            }
            None => false,
        }
    }

    /// Ends this process's part and leaves the rest to the next daemon; gives the device back
    /// where nobody could take it over.
    pub(super) fn leave(self) -> Result<(), Box<Self>> {
        // Given once more, and taken: a holder that has just died is not one to leave it to.
        if !self.hold() {
            return Err(Box::new(self));
        }
        self.server.leave();
        Ok(())
    }

    /// Whether `asked` is what is attached, but for its size.
    pub(super) fn check_same(&self, asked: &AttachVolume) -> Result<(), Error> {
        let same = AttachVolume { size: self.asked.size, ..asked.clone() };
        if same == self.asked {
            return Ok(());
        }
        let what = format!(
            "socket {}, blocks of {} bytes, {}{}",
            self.asked.nbd_socket.display(),
            self.asked.block_size,
            if self.asked.read_only { "read-only" } else { "writable" },
            if self.asked.file_only { ", as a file" } else { "" },
        );
        Err(Error::Conflict { volume: self.asked.volume.clone(), what })
    }

    pub(super) fn size(&self) -> u64 {
        self.asked.size
    }

    pub(super) fn show(&self) -> Attached {
        Attached {
            volume: self.asked.volume.clone(),
            device: self.path(),
            nbd_socket: self.asked.nbd_socket.clone(),
            size: self.asked.size,
            block_size: self.asked.block_size,
            read_only: self.asked.read_only,
            file_only: self.asked.file_only,
            connected: self.server.connected(),
            in_flight: self.server.in_flight(),
        }
    }

    /// Grows file and device; the target must have grown before.
    pub(super) fn resize(&mut self, size: u64) -> Result<(), Error> {
        if size < self.asked.size {
            return Err(Error::Invalid(format!(
                "volume {} has {} bytes and cannot shrink to {size}",
                self.asked.volume, self.asked.size
            )));
        }
        check_size(size, self.asked.block_size)?;
        // A connection of its own, because only a negotiation tells the size.
        let mut pipe = Pipe::connect(&client_options(&self.asked))?;
        let is = pipe.info().size_bytes;
        pipe.disconnect();
        if is < size {
            let volume = self.asked.volume.clone();
            return Err(Error::Size { volume, is, wanted: size });
        }
        let io =
            |source| Error::Io { doing: "resize", path: self.server.path().to_owned(), source };
        self.server.resize(size).map_err(io)?;
        self.asked.size = size;
        // Before the device has it: a daemon that takes over never serves less than is in use.
        self.hold();
        if let Some(device) = &self.device {
            device.update_size()?;
        }
        Ok(())
    }

    pub(super) fn in_use(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.in_use().unwrap_or(true))
    }

    /// Takes the stack apart, or gives it back with the reason: it is in use.
    pub(super) fn detach(self) -> Result<(), (Box<Self>, Error)> {
        if let Some(device) = &self.device {
            let busy = |this: &Self| Error::Busy {
                volume: this.asked.volume.clone(),
                device: this.path(),
            };
            match device.detach(DETACH_TIMEOUT) {
                Ok(true) => {}
                Ok(false) if self.server.in_flight() > 0 => {
                    // Nobody has it open any more, and IO of a target that is away holds it.
                    tracing::warn!(volume = %self.asked.volume, in_flight = self.server.in_flight(),
                        "detaching with IO that waits for the target: it fails");
                    self.server.abort();
                    match device.detach(DETACH_TIMEOUT) {
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

    /// Ends the stack whoever uses it: IO fails, the loop device goes with its last user.
    pub(super) fn force(self) {
        if let Some(device) = &self.device
            && let Err(error) = device.release()
        {
            tracing::warn!(volume = %self.asked.volume, %error, "cannot release");
        }
        self.stop();
    }

    fn stop(self) {
        let Self { asked, server, holder, .. } = self;
        let stopped = server.stop();
        holder.release(&asked.volume);
        if let Err(error) = stopped {
            tracing::warn!(volume = %asked.volume, %error, "cannot unmount");
        }
    }

    fn path(&self) -> PathBuf {
        match &self.device {
            Some(device) => device.path().to_owned(),
            None => self.server.path().to_owned(),
        }
    }
}

/// What can be said about a request without the target.
pub(super) fn check(asked: &AttachVolume) -> Result<(), Error> {
    check_name(&asked.volume)?;
    if !matches!(asked.block_size, 512 | 4096) {
        return Err(Error::Invalid(format!(
            "blocks of {} bytes are not possible: 512 or 4096",
            asked.block_size
        )));
    }
    if !asked.nbd_socket.is_absolute() {
        let socket = asked.nbd_socket.display();
        return Err(Error::Invalid(format!("the NBD socket {socket} is not an absolute path")));
    }
    check_size(asked.size, asked.block_size)
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
            "a size of {size} bytes is not possible: a multiple of {block_size}, above 0, below 2^63"
        )));
    }
    Ok(())
}

fn shape(asked: &AttachVolume) -> Shape {
    Shape { size_bytes: asked.size, block_size: asked.block_size, read_only: asked.read_only }
}

fn client_options(asked: &AttachVolume) -> ClientOptions {
    ClientOptions::new(Address::Unix(asked.nbd_socket.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> AttachVolume {
        AttachVolume {
            volume: "db".into(),
            nbd_socket: "/run/db.sock".into(),
            size: 1 << 30,
            block_size: 4096,
            read_only: false,
            file_only: false,
        }
    }

    #[test]
    fn names_that_could_leave_the_directory_are_refused() {
        for name in ["", ".", "..", "../x", "a/b", "a\0b", ".hidden", "ü", &"x".repeat(129)] {
            let request = AttachVolume { volume: name.into(), ..asked() };
            assert!(matches!(check(&request), Err(Error::Name(_))), "{name:?}");
        }
        assert!(check(&AttachVolume { volume: "x".repeat(128), ..asked() }).is_ok());
    }

    #[test]
    fn sizes_and_blocks_that_no_device_can_have_are_refused() {
        for size in [0, 4095, 4097, 1 << 63, u64::MAX] {
            assert!(check(&AttachVolume { size, ..asked() }).is_err(), "{size}");
        }
        for block_size in [0, 1, 1024, 8192] {
            assert!(check(&AttachVolume { block_size, ..asked() }).is_err(), "{block_size}");
        }
        assert!(check(&AttachVolume { nbd_socket: "relative".into(), ..asked() }).is_err());
        assert!(check(&asked()).is_ok());
    }
}
