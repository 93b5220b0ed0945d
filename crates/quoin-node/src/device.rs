//! The kernel's facts about a block device, and the one switch that is needed of it.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::error::Error;

/// `BLKROSET` of linux/fs.h: takes a pointer to an int, non-zero makes the device read-only.
const BLKROSET: libc::Ioctl = 0x125d;

/// Returns the size of a block device (or file) in bytes.
///
/// # Errors
/// If it cannot be opened.
pub fn size_bytes(device: &Path) -> Result<u64, Error> {
    let mut file = File::open(device).map_err(Error::io("opening", device))?;
    file.seek(SeekFrom::End(0)).map_err(Error::io("measuring", device))
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

/// Returns true if a file system on the device is mounted, in any table of mounts, or a device mapper
/// or a swap holds it: no tool that is meant for an unmounted device may run on it.
///
/// # Errors
/// If it cannot be opened.
pub fn is_held(device: &Path) -> Result<bool, Error> {
    match File::options().read(true).custom_flags(libc::O_EXCL).open(device) {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => Ok(true),
        Err(error) => Err(Error::io("opening", device)(error)),
    }
}

/// Makes the kernel refuse (or accept) writes to the device.
///
/// A read-only bind mount of a device node does not do that: it protects the node, not the device.
///
/// # Errors
/// If the device cannot be opened, is not a block device, or the caller is not root.
pub fn set_read_only(device: &Path, read_only: bool) -> Result<(), Error> {
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
