//! The group of a volume's files, where the orchestrator leaves that to the node.
//!
//! Every file and directory gets the group and its right to read and write; new entries of a
//! directory inherit the group. The root directory comes last: where it has the group, all below has
//! it, and a walk that was cut short begins again. Nothing is followed out of the volume: names are
//! resolved one by one, links are given themselves, and mounts within are left alone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags};
use rustix::io::Errno;

use crate::device_calls::DeviceThread;
use crate::error::Error;

/// Rights of the group on a directory: read, write and search; new entries inherit it.
const DIRECTORY_MODE: u32 = 0o2070;
/// Rights of the group on a file.
const FILE_MODE: u32 = 0o060;
/// Most directories that are open at once.
const DEPTH_MAX: usize = 256;

/// Gives the file system whose root is `target` to a group, unless its root has that group already.
///
/// # Errors
/// The kernel's; [`Error::Path`] for a tree of more than 256 levels.
pub fn give(_: &DeviceThread, target: &Path, group: u32) -> Result<(), Error> {
    let failed = |errno: Errno| Error::io("giving to a group", target)(errno.into());
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(target, flags, Mode::empty()).map_err(failed)?;
    let stat = rustix::fs::fstat(&root).map_err(failed)?;
    if stat.st_gid == group && stat.st_mode & DIRECTORY_MODE == DIRECTORY_MODE {
        return Ok(());
    }
    let mut walk = Walk { group: Gid::from_raw(group), device: stat.st_dev, open: Vec::new() };
    walk.enter(root.as_fd()).map_err(failed)?;
    while let Some(directory) = walk.open.last_mut() {
        match directory.entries.read() {
            Some(entry) => {
                let entry = entry.map_err(failed)?;
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    walk.give(entry.file_name()).map_err(failed)?;
                }
            }
            None => walk.leave().map_err(failed)?,
        }
        if walk.open.len() > DEPTH_MAX {
            let why = "has more than 256 levels of directories: give it to the group by hand";
            return Err(Error::Path { path: target.to_owned(), why });
        }
    }
    Ok(())
}

/// A directory whose entries are being given away.
struct Open {
    directory: OwnedFd,
    entries: Dir,
}

/// A walk over one file system; each directory is given away after all that is in it.
struct Walk {
    group: Gid,
    device: u64,
    /// The root first.
    open: Vec<Open>,
}

impl Walk {
    fn enter(&mut self, directory: BorrowedFd<'_>) -> Result<(), Errno> {
        let entries = Dir::read_from(directory)?;
        let directory = rustix::io::fcntl_dupfd_cloexec(directory, 0)?;
        self.open.push(Open { directory, entries });
        Ok(())
    }

    fn leave(&mut self) -> Result<(), Errno> {
        let Some(Open { directory, .. }) = self.open.pop() else { return Ok(()) };
        self.give_open(directory.as_fd(), DIRECTORY_MODE)
    }

    fn give_open(&self, file: BorrowedFd<'_>, rights: u32) -> Result<(), Errno> {
        rustix::fs::fchown(file, None, Some(self.group))?;
        let mode = rustix::fs::fstat(file)?.st_mode & 0o7777;
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode | rights))
    }

    /// Gives one entry of the innermost directory away, or enters it.
    fn give(&mut self, name: &std::ffi::CStr) -> Result<(), Errno> {
        let Some(parent) = self.open.last() else { return Ok(()) };
        let parent = parent.directory.as_fd();
        let stat = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            // It was removed meanwhile.
            Err(Errno::NOENT) => return Ok(()),
            other => other?,
        };
        if stat.st_dev != self.device {
            return Ok(());
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let flags = flags | OFlags::DIRECTORY;
                let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
                self.enter(directory.as_fd())
            }
            FileType::RegularFile => {
                let file = rustix::fs::openat(parent, name, flags, Mode::empty())?;
                self.give_open(file.as_fd(), FILE_MODE)
            }
            // Opening a device or a pipe has effects of its own.
            _ => {
                let how = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::chownat(parent, name, None, Some(self.group), how)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use quoin_testkit::skipped;

    use super::*;

    fn give_to(target: &Path, group: u32) -> Result<(), Error> {
        DeviceThread::of_test(|thread| give(thread, target, group))
    }

    fn of(path: &Path) -> (u32, u32) {
        let metadata = std::fs::symlink_metadata(path).unwrap();
        (metadata.gid(), metadata.mode() & 0o7777)
    }

    /// Proves CSI-VOLCAP-06.
    #[test]
    fn a_tree_whose_root_lacks_the_group_is_given_to_it_whole_and_links_are_not_followed() {
        if !rustix::process::geteuid().is_root() {
            skipped("needs root");
            return;
        }
        let world = tempfile::tempdir().unwrap();
        let (root, outside) = (world.path().join("volume"), world.path().join("outside"));
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/b/f"), "x").unwrap();
        std::fs::write(&outside, "x").unwrap();
        symlink(&outside, root.join("a/link")).unwrap();
        for (path, mode) in [(root.join("a"), 0o700), (root.join("a/b/f"), 0o640)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let before = of(&outside);
        give_to(&root, 2000).unwrap();
        assert_eq!(of(&root).0, 2000);
        assert_eq!(of(&root.join("a")), (2000, 0o2770));
        assert_eq!(of(&root.join("a/b/f")), (2000, 0o660));
        assert_eq!(of(&root.join("a/link")).0, 2000);
        assert_eq!(of(&outside), before);

        // A root that has the group already ends the matter.
        std::fs::write(root.join("a/later"), "x").unwrap();
        std::os::unix::fs::chown(root.join("a/later"), None, Some(0)).unwrap();
        give_to(&root, 2000).unwrap();
        assert_eq!(of(&root.join("a/later")).0, 0);
        give_to(&root, 2001).unwrap();
        assert_eq!(of(&root.join("a/later")), (2001, 0o664));
    }

    /// Kinds of entries beside files and directories, and what a mount within the volume has.
    #[test]
    fn pipes_and_sockets_are_given_themselves_and_a_mount_within_is_left_alone() {
        if !rustix::process::geteuid().is_root() {
            skipped("needs root");
            return;
        }
        let world = tempfile::tempdir().unwrap();
        let root = world.path().join("volume");
        std::fs::create_dir_all(root.join("mounted")).unwrap();
        let pipe = rustix::fs::FileType::Fifo;
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, root.join("pipe"), pipe, mode, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
        let program = root.join("program");
        std::fs::write(&program, "x").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
        let inner = root.join("mounted");
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", &inner, "tmpfs", flags, c"size=64k,mode=700").unwrap();
        std::fs::write(inner.join("f"), "x").unwrap();
        let given = give_to(&root, 2000);
        let left = (of(&inner), of(&inner.join("f")));
        rustix::mount::unmount(&inner, rustix::mount::UnmountFlags::empty()).unwrap();
        given.unwrap();
        assert_eq!((left.0, left.1.0), ((0, 0o700), 0), "of another file system");
        // A pipe has no rights that its group needs to be given, and opening it would wait.
        assert_eq!(of(&root.join("pipe")), (2000, 0o600));
        assert_eq!(of(&root.join("socket")).0, 2000);
        // The kernel takes the right of its owner from a program that changes its group.
        let (group, mode) = of(&program);
        assert_eq!((group, mode & 0o777), (2000, 0o775));
        assert_eq!(of(&root).0, 2000);
    }

    #[test]
    fn a_tree_is_given_at_its_deepest_and_no_deeper() {
        if !rustix::process::geteuid().is_root() {
            skipped("needs root");
            return;
        }
        // The root is one of the directories that are open.
        for (levels, is_given) in [(DEPTH_MAX - 2, true), (DEPTH_MAX - 1, true), (DEPTH_MAX, false)]
        {
            let root = tempfile::tempdir().unwrap();
            let deep = (0..levels).fold(root.path().to_owned(), |path, _| path.join("d"));
            std::fs::create_dir_all(&deep).unwrap();
            assert_eq!(give_to(root.path(), 2000).is_ok(), is_given, "{levels} levels");
            assert_eq!(of(root.path()).0 == 2000, is_given);
            assert_eq!(of(&deep).0 == 2000, is_given);
        }
        // A root with the group and without its rights was not given away whole.
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("f"), "x").unwrap();
        std::os::unix::fs::chown(root.path(), None, Some(2000)).unwrap();
        give_to(root.path(), 2000).unwrap();
        assert_eq!(of(&root.path().join("f")).0, 2000);
    }

    #[test]
    fn a_tree_that_is_too_deep_is_refused_and_its_root_is_not_given_away() {
        if !rustix::process::geteuid().is_root() {
            skipped("needs root");
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let deep = (0..DEPTH_MAX).fold(root.path().to_owned(), |path, _| path.join("d"));
        std::fs::create_dir_all(deep).unwrap();
        let error = give_to(root.path(), 2000).unwrap_err();
        assert!(error.to_string().contains("256 levels"), "{error}");
        assert_ne!(of(root.path()).0, 2000);
    }
}
