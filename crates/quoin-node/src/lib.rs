//! Volumes on one host: attach, format, mount, publish, grow, measure.
//!
//! A library of the node role without gRPC. The CSI service ([`quoin-csi`], which also runs the
//! `quoin node` process, as services depend on roles) asks a [`NodeHost`] to stage and publish, and
//! a [`NodeHost`] asks an [`Attacher`] for block devices.
//!
//! Promises: every call is idempotent; a kill at any step is followed by success of the same call
//! or of its opposite; a device is formatted only where `probe` finds it blank; a mount of another
//! owner is never unmounted; mount flags appear in no message; no volume that hangs holds up another.
//!
//! [`quoin-csi`]: https://docs.rs/quoin-csi

mod allocation;
mod attach;
mod attach_process;
mod device;
mod device_calls;
mod device_reports;
mod error;
mod format;
mod group;
mod holders;
mod host;
mod host_addresses;
mod mount;
mod mountinfo;
mod probe;
mod reconcile;
mod records;
mod superblock;
mod tools;

pub use attach::{AttachRequest, Attacher, Session, wait_for_socket};
pub use attach_process::AttachProcess;
pub use device_reports::{DeviceReports, DeviceUse, Followed, Reported};
pub use error::{Error, Kind};
pub use format::FileSystem;
pub use holders::{OtherTable, Process, Use, other_tables};
pub use host::{
    FaultKind, HealRequest, Healed, HostOptions, NodeHost, PublishRequest, StageRequest, Standing,
    VolumeFault, VolumeStats, staged_at,
};
pub use host_addresses::host_addresses;
pub use mount::parse_flags as parse_mount_flags;
pub use mountinfo::{Mount, parse as parse_mountinfo, read as read_mountinfo};
pub use reconcile::{Standing as StandingHere, Word};
pub use records::Access;
pub use tools::{E2FSCK, MKFS_EXT4, MKFS_XFS, RESIZE2FS, Tool, Tools, XFS_GROWFS};
