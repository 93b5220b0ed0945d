//! The kernel's side of a FUSE file system: `/dev/fuse`, mount, unmount. Needs root.

use std::ffi::CString;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const DEVICE: &str = "/dev/fuse";
/// Type in the table of mounts; the daemon finds its own mounts by it when it cleans up.
pub const FILE_SYSTEM_TYPE: &str = "fuse.quoin";

#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error(
        "/dev/fuse is missing: load the kernel's fuse module (modprobe fuse) or pass the \
             device into this container, or use the volume through its NBD socket"
    )]
    NoFuse,
    #[error(
        "/dev/fuse is not the kernel's device: move it away and make it with \
             `mknod /dev/fuse c 10 229`, or use the volume through its NBD socket"
    )]
    NotFuse,
    #[error(
        "mounting needs root (CAP_SYS_ADMIN): run attach as root, or use the volume through \
             its NBD socket"
    )]
    NotPermitted,
    #[error("cannot mount a volume at {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// A mounted file; unmounted when dropped.
pub struct Mount {
    path: PathBuf,
    mounted: bool,
}

impl Mount {
    /// Creates the file `path` (its directory exists) and mounts a file system on it whose messages
    /// come from the returned, non-blocking descriptor.
    pub fn new(path: &Path, source: &str) -> Result<(Self, OwnedFd), MountError> {
        let failed = |source| match source {
            error if permission(&error) => MountError::NotPermitted,
            source => MountError::Io { path: path.to_owned(), source },
        };
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(DEVICE)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => MountError::NoFuse,
                _ => failed(error),
            })?;
        // Mounting with another device is refused as well, but without a useful error.
        if !is_fuse(&device.metadata().map_err(failed)?) {
            return Err(MountError::NotFuse);
        }
        File::create(path).map_err(failed)?;
        let options = format!(
            "fd={},rootmode={:o},user_id=0,group_id=0",
            device.as_raw_fd(),
            libc::S_IFREG | 0o600
        );
        let result = mount(source, path, &options);
        if let Err(error) = result {
            // A failed attempt leaves nothing behind.
            let _ = std::fs::remove_file(path);
            return Err(failed(error));
        }
        Ok((Self { path: path.to_owned(), mounted: true }, device.into()))
    }

    /// The mount that an earlier process made at `path` and left.
    pub fn existing(path: &Path) -> Self {
        Self { path: path.to_owned(), mounted: true }
    }

    /// Leaves the mount as it is, for the next process.
    pub fn leave(mut self) {
        self.mounted = false;
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the mount from the tree (programs that have the file open keep it, and get errors) and
    /// removes the file under it.
    pub fn unmount(mut self) -> io::Result<()> {
        self.mounted = false;
        unmount(&self.path)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = unmount(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot unmount");
        }
    }
}

/// Returns true for the real device: containers are given other files of that name, or empty ones.
fn is_fuse(found: &Metadata) -> bool {
    found.file_type().is_char_device() && found.rdev() == libc::makedev(10, 229)
}

/// Unmounts and removes the file under the mount. All requests of its file fail from then on: the
/// connection to the kernel would otherwise last until its last descriptor is closed, and a child that
/// this process is just making has one, without an answer for anybody.
pub fn unmount(path: &Path) -> io::Result<()> {
    let target = c_string(path.as_os_str().as_bytes())?;
    // SAFETY: the pointer is to a valid string that outlives the call.
    let result = unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH | libc::MNT_FORCE) };
    if result != 0 {
        let error = io::Error::last_os_error();
        // The path is not a mount (any more).
        if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) {
            return Err(error);
        }
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the mount points of type [`FILE_SYSTEM_TYPE`] directly or deeper under `directory`.
pub fn mounts_under(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(parse_mounts(&table).into_iter().filter(|path| path.starts_with(directory)).collect())
}

/// Returns true if a mount below `directory` is seen by the mount namespaces beside this one, and so
/// outlives it.
pub fn is_shared(directory: &Path) -> io::Result<bool> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(is_shared_in(&table, directory))
}

/// Same as [`is_shared`], by a table of mounts. The mount of a directory is the last one of those with the longest
/// path above it.
#[must_use]
pub fn is_shared_in(table: &str, directory: &Path) -> bool {
    let fields = |line: &str| {
        let (before, _) = line.split_once(" - ")?;
        let point = PathBuf::from(unescape(before.split(' ').nth(4)?));
        let is_shared = before.split(' ').skip(6).any(|tag| tag.starts_with("shared:"));
        directory.starts_with(&point).then(|| (point.components().count(), is_shared))
    };
    let above = table.lines().filter_map(fields);
    above.max_by_key(|(depth, _)| *depth).is_some_and(|(_, is_shared)| is_shared)
}

fn parse_mounts(table: &str) -> Vec<PathBuf> {
    let point = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        if after.split(' ').next()? != FILE_SYSTEM_TYPE {
            return None;
        }
        Some(PathBuf::from(unescape(before.split(' ').nth(4)?)))
    };
    table.lines().filter_map(point).collect()
}

/// Decodes a path: the kernel writes blanks and backslashes as three octal digits.
fn unescape(text: &str) -> std::ffi::OsString {
    use std::os::unix::ffi::OsStringExt;
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = (bytes[at] == b'\\')
            .then(|| text.get(at + 1..at + 4))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(octal.unwrap_or(bytes[at]));
        at += if octal.is_some() { 4 } else { 1 };
    }
    std::ffi::OsString::from_vec(plain)
}

fn mount(source: &str, path: &Path, options: &str) -> io::Result<()> {
    let source = c_string(source.as_bytes())?;
    let target = c_string(path.as_os_str().as_bytes())?;
    let kind = c_string(FILE_SYSTEM_TYPE.as_bytes())?;
    let options = c_string(options.as_bytes())?;
    // SAFETY: all pointers are to valid strings that outlive the call; the data of a FUSE mount
    // is its option string.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
            options.as_ptr().cast(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn permission(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_that_is_left_stays_and_a_dropped_one_is_unmounted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("db");
        File::create(&path).unwrap();
        Mount::existing(&path).leave();
        assert!(path.exists());
        drop(Mount::existing(&path));
        assert!(!path.exists());
    }

    #[test]
    fn missing_privileges_are_distinguished_from_other_failures() {
        let is_permission = |number| permission(&io::Error::from_raw_os_error(number));
        assert!(is_permission(libc::EPERM) && is_permission(libc::EACCES));
        assert!(!is_permission(libc::ENOENT) && !is_permission(libc::EBUSY));
    }

    #[test]
    fn a_directory_is_shared_as_the_mount_that_it_is_on() {
        let table = "22 1 0:21 / / rw shared:1 - ext4 x rw\n\
            90 22 0:50 / /run rw,nosuid - tmpfs tmpfs rw\n\
            91 90 0:51 /q /run/quoin rw shared:7 master:1 - tmpfs tmpfs rw\n\
            92 22 0:52 / /srv rw shared:8 - xfs x rw\n93 22 0:53 / /srv rw master:4 - xfs y rw\n";
        let is_shared = |path: &str| is_shared_in(table, Path::new(path));
        assert!(is_shared("/run/quoin/attach/volumes") && is_shared("/var"));
        assert!(!is_shared("/run/other"), "of a mount that is private");
        assert!(!is_shared("/srv/quoin"), "of the mount on top, which is a slave");
        // A mount above another one may be told of after it.
        let table = "91 90 0:51 / /run/quoin rw shared:7 - tmpfs tmpfs rw\n\
            90 22 0:50 / /run rw - tmpfs tmpfs rw\n22 1 0:21 / / rw - ext4 x rw\n";
        assert!(is_shared_in(table, Path::new("/run/quoin/attach")));
        assert!(
            !is_shared_in(table, Path::new("/run/quoin2")) && !is_shared_in("", "/run".as_ref())
        );
    }

    #[test]
    fn only_mounts_of_our_type_are_listed_and_escaped_blanks_are_decoded() {
        let table = "22 1 0:21 / /proc rw - proc proc rw\n\
            90 1 0:50 / /run/a\\040b/volumes/db rw,nosuid shared:9 - fuse.quoin quoin:db rw\n\
            91 1 0:51 / /run/other rw - fuse.sshfs x rw\nnonsense\n";
        assert_eq!(parse_mounts(table), vec![PathBuf::from("/run/a b/volumes/db")]);
    }
}
