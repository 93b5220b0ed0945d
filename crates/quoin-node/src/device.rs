//! The kernel's facts about a block device, and the one switch that is needed of it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::device_calls::DeviceThread;
use crate::error::Error;
use crate::mount::while_busy;
use crate::mountinfo::Mount;

/// `BLKROSET` of linux/fs.h: takes a pointer to an int, non-zero makes the device read-only.
const BLKROSET: libc::Ioctl = 0x125d;

/// Unit of the size in `/sys`, whatever the device's block size.
const SECTOR_BYTES: u64 = 512;

/// Returns the size of a block device in bytes. The kernel's table is read and the device is not
/// opened, so nothing of the volume is waited for.
///
/// # Errors
/// If it is no block device, or the kernel does not list it.
pub fn size_bytes(device: &Path) -> Result<u64, Error> {
    let measuring = || Error::io("measuring", device);
    let Some((major, minor)) = major_minor(device) else {
        return Err(measuring()(std::io::ErrorKind::NotFound.into()));
    };
    let listed = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size"));
    let sectors = listed.map_err(measuring())?.trim().parse::<u64>();
    let unreadable = |_| measuring()(std::io::ErrorKind::InvalidData.into());
    Ok(sectors.map_err(unreadable)?.saturating_mul(SECTOR_BYTES))
}

/// Returns the device number of a block device node; `None` for anything else.
#[must_use]
pub fn number(device: &Path) -> Option<u64> {
    let metadata = std::fs::metadata(device).ok()?;
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

/// Returns major and minor of a block device node.
#[must_use]
pub fn major_minor(device: &Path) -> Option<(u32, u32)> {
    number(device).map(|number| (libc::major(number), libc::minor(number)))
}

/// Returns major and minor of a block device node and of its partitions.
#[must_use]
pub fn numbers_with_partitions(device: &Path) -> Vec<(u32, u32)> {
    let Some((major, minor)) = major_minor(device) else { return Vec::new() };
    let entries = std::fs::read_dir(format!("/sys/dev/block/{major}:{minor}"));
    let partitions = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    let number = |partition: PathBuf| {
        let text = std::fs::read_to_string(partition.join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let is_partition = |path: &PathBuf| path.join("partition").exists();
    std::iter::once((major, minor))
        .chain(partitions.filter(is_partition).filter_map(number))
        .collect()
}

/// Returns the file that a loop device of this number is bound to, as the kernel names it; `None`: it is bound to
/// none.
#[must_use]
pub fn backing_file(major: u32, minor: u32) -> Option<PathBuf> {
    let attribute = format!("/sys/dev/block/{major}:{minor}/loop/backing_file");
    let file = std::fs::read_to_string(attribute).ok()?;
    Some(file.trim_end_matches('\n').into())
}

/// Returns true if a file system on the device is mounted, in any table of mounts, or a device mapper
/// or a swap holds it: no tool that is meant for an unmounted device may run on it.
///
/// # Errors
/// If it cannot be opened.
pub fn is_held(_: &DeviceThread, device: &Path) -> Result<bool, Error> {
    use rustix::fs::{Mode, OFlags};

    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    // A process that was just forked may hold it for an instant.
    match while_busy(|| rustix::fs::open(device, flags, Mode::empty())) {
        Ok(_) => Ok(false),
        Err(Errno::BUSY) => Ok(true),
        Err(errno) => Err(Error::io("opening", device)(errno.into())),
    }
}

/// Returns true if a mount is of the file system that this path is on.
fn is_of_file_system(mount: &Mount, path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| {
        let of = found.dev();
        (libc::major(of), libc::minor(of)) == (mount.major, mount.minor)
    })
}

/// Returns true if a mount is of the file system that holds the nodes of devices, as a bind of any node is.
#[must_use]
pub fn is_of_nodes(mount: &Mount) -> bool {
    is_of_file_system(mount, Path::new("/dev"))
}

/// Returns whether a mount is a bind of the device's own node.
#[must_use]
pub fn is_node_at(mount: &Mount, device: &Path) -> bool {
    // A mount of another file system is not looked at: its server may be away.
    let is_beside = is_of_file_system(mount, device);
    is_beside && number(device).is_some_and(|own| number(&mount.mount_point) == Some(own))
}

/// Returns whether a mount is a bind of the device's own node by its name, whatever is mounted above it.
#[must_use]
pub fn is_named_node(mount: &Mount, device: &Path) -> bool {
    is_of_nodes(mount)
        && device.file_name().is_some()
        && mount.root.file_name() == device.file_name()
}

/// Makes the kernel refuse (or accept) writes to the device.
///
/// A read-only bind mount of a device node does not do that: it protects the node, not the device.
///
/// # Errors
/// If the device cannot be opened, is not a block device, or the caller is not root.
pub fn set_read_only(_: &DeviceThread, device: &Path, read_only: bool) -> Result<(), Error> {
    let file = File::open(device).map_err(Error::io("opening", device))?;
    let value = libc::c_int::from(read_only);
    // SAFETY: BLKROSET reads one int through the pointer, which outlives the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKROSET, &raw const value) };
    if result < 0 {
        return Err(Error::io("setting the read-only state of", device)(
            std::io::Error::last_os_error(),
        ));
    }
    Ok(())
}
