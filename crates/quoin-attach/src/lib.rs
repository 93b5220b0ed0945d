//! The attach daemon: turns volumes into block devices of this host, and keeps them while targets,
//! nodes and controllers come and go.
//!
//! Each volume has an NBD link to the target's unix socket, a FUSE file on top of it, and a loop
//! device on that. IO waits while the target is away and never fails for that reason. The daemon is
//! controlled by a unix socket ([`protocol`]; [`AttachClient`] is its client).
//!
//! * Attach, detach and resize are idempotent; there is one attachment for each volume.
//! * After another node used a volume, it is not the one that the host's caches know: the device is
//!   dead permanently, and all its IO fails ([`abort`]). A device waits for a target that is only
//!   away.
//! * A device belongs to this daemon if the daemon recorded that it made it (`created.json`); it
//!   neither shows nor removes other devices.
//! * A clean shutdown detaches idle devices. It waits for those in use (`drain_timeout`) and then
//!   leaves them to the next daemon ([`AtShutdown`] has the other ways).
//! * A daemon that dies or leaves its devices only pauses IO if a [`holder`] keeps the kernel's
//!   side and the kernel can send requests again (Linux 6.9): the next daemon takes over. Otherwise
//!   the daemon reports, when it attaches them, that its death fails the IO of its devices. Then
//!   the next start removes what is left in the directory, and a shutdown fails the IO of devices
//!   in use: the loop device is removed with its last user, and the shutdown's error names it. A
//!   loop device or mount that no holder keeps does not outlive its users.
//!
//! File systems on the daemon's devices write back to it when memory is short, so it must not wait
//! for memory that only it can free. Its threads are marked as IO flushers, whose allocations do
//! not start writeback, and its memory is locked, so that no page of it must be read from a disk.
//! Both need privileges and are skipped where they are refused.

mod abort;
mod child;
mod client;
mod created;
mod daemon;
mod device;
pub mod fuse;
pub mod holder;
mod keys;
pub mod loopdev;
mod metrics;
mod numbers;
pub mod protocol;

use std::path::PathBuf;
use std::time::Duration;

pub use abort::served_elsewhere;
pub use client::AttachClient;
pub use created::{Made, MadeKind, file_name, made_in};
pub use daemon::run;
pub use metrics::Metrics;

use crate::fuse::MountError;
use crate::loopdev::LoopError;
use quoin_nbd::client::ClientError;

/// Options of the daemon.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon's own directory: lock, mount points. Created if missing.
    pub directory: PathBuf,
    /// The control socket; a file that a dead daemon left there is replaced.
    pub socket: PathBuf,
    /// Time that a shutdown waits for devices in use.
    pub drain_timeout: Duration,
    /// Socket of the holder, if there is one.
    pub holder: PathBuf,
    pub at_shutdown: AtShutdown,
    /// Directory of the links to devices under their volumes' names.
    pub links: PathBuf,
    /// A start is refused where mounts in `directory` would stay within this mount namespace.
    pub expects_shared_mounts: bool,
    /// Created by the caller, who renders them.
    pub metrics: Metrics,
}

/// Action of a shutdown on the devices, once `drain_timeout` has passed.
///
/// Devices that are to be left and cannot be (no holder, an older kernel) are detached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtShutdown {
    /// Idle devices are detached; those in use are left to the next daemon.
    #[default]
    LeaveInUse,
    /// Everything is left to the next daemon.
    LeaveAll,
    /// Everything is detached; the IO of devices in use fails.
    DetachAll,
}

impl Options {
    /// Default options: `directory`/attach.sock as the control socket, no wait at shutdown.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        let directory = directory.into();
        let socket = directory.join("attach.sock");
        let holder = directory.join("holder.sock");
        Self {
            directory,
            socket,
            drain_timeout: Duration::ZERO,
            holder,
            at_shutdown: AtShutdown::default(),
            links: PathBuf::from("/dev/quoin"),
            expects_shared_mounts: false,
            metrics: Metrics::default(),
        }
    }
}

/// Failures of the daemon, and its answers.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another attach daemon runs in {directory}: stop it, or use another directory")]
    Locked { directory: PathBuf },
    #[error("cannot {doing} {path}: {source}")]
    Io { doing: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{0:?} cannot be a volume's name: 1 to 128 of A-Z a-z 0-9 . _ -, no dot first")]
    Name(String),
    #[error("{0}")]
    Invalid(String),
    #[error("volume {volume} is already attached with {what}: detach it first")]
    Conflict { volume: String, what: String },
    #[error(
        "volume {volume} cannot be attached: the device of an earlier use is still here and dead \
             ({why}). Unmount it, or end it with `quoin volume detach --force`"
    )]
    Dead { volume: String, why: String },
    #[error(
        "volume {volume} has {device} from a container that ended with the mount of its file: it keeps \
             its size and its IO, and is made anew once it is detached and attached again"
    )]
    Unmounted { volume: String, device: PathBuf },
    #[error(
        "{directory} is on no shared mount, so devices that are made here could not be grown or made \
             again by the next `quoin attach`: give this container the directory with bidirectional \
             propagation (mount --make-rshared), or leave --expect-shared-mounts out"
    )]
    NotShared { directory: PathBuf },
    #[error("volume {volume} is in use as {device}: unmount it and close it first")]
    Busy { volume: String, device: PathBuf },
    #[error("these devices were still in use at shutdown, and their IO fails now: {0:?}")]
    BusyAtShutdown(Vec<String>),
    #[error(
        "the target of volume {volume} offers {is} bytes and {wanted} are requested: not resized \
             yet, or another volume"
    )]
    Size { volume: String, is: u64, wanted: u64 },
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Loop(#[from] LoopError),
    #[error("cannot reach the attach daemon at {socket}: {source}; is `quoin attach` running?")]
    Daemon { socket: PathBuf, source: std::io::Error },
    #[error("unexpected reply of the attach daemon: {0:?}")]
    Answer(String),
    /// The daemon's answer to a request of [`AttachClient`].
    #[error("{message}")]
    Refused { kind: protocol::Kind, message: String },
}
