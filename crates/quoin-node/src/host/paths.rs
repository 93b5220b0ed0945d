//! Paths of the orchestrator at which volumes are shown. They are looked at only where nothing is
//! mounted: what is mounted there is the volume's.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::mountinfo::{self, Mount};
use crate::records::Access;

pub(super) fn foreign(mount: &Mount) -> Error {
    let source_name = format!("{} {}", mount.fs_type, mount.source);
    Error::ForeignMount { path: mount.mount_point.clone(), source_name }
}

/// Returns the path as the kernel writes it in mountinfo: the parent without symbolic links, the
/// last name as given. A path whose parent does not exist stays as it is (nothing is mounted
/// there).
pub(super) fn resolve(path: &Path) -> PathBuf {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => {
            parent.canonicalize().map_or_else(|_| path.to_owned(), |parent| parent.join(name))
        }
        _ => path.to_owned(),
    }
}

pub(super) fn existing_directory(path: &Path) -> Result<PathBuf, Error> {
    let path = resolve(path);
    // What is mounted there is a directory, and looking at it would look at the volume.
    if mountinfo::at(&mountinfo::read()?, &path).is_some() {
        return Ok(path);
    }
    match std::fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_dir() => Ok(path),
        Ok(_) => Err(Error::Path { path, why: "is not a directory" }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Error::Path { path, why: "does not exist; the caller creates this directory" })
        }
        Err(error) => Err(Error::io("looking at", &path)(error)),
    }
}

pub(super) fn check_target(target: &Path, access: &Access, mounts: &[Mount]) -> Result<(), Error> {
    let refuse = |why| Err(Error::Path { path: target.to_owned(), why });
    if let Some(present) = mountinfo::at(mounts, target) {
        return Err(foreign(present));
    }
    if !target.parent().is_some_and(Path::is_dir) {
        return refuse("its parent directory does not exist; the caller creates it");
    }
    match (std::fs::symlink_metadata(target), access) {
        (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        (Err(error), _) => Err(Error::io("looking at", target)(error)),
        (Ok(present), Access::Mount { .. }) if !present.is_dir() => {
            refuse("already exists and is not a directory")
        }
        (Ok(present), Access::Block) if !present.is_file() => {
            refuse("already exists and is not a regular file")
        }
        (Ok(_), _) => Ok(()),
    }
}

pub(super) fn make_target(target: &Path, access: &Access) -> Result<(), Error> {
    let result = match access {
        Access::Mount { .. } => std::fs::create_dir(target),
        Access::Block => std::fs::File::create_new(target).map(drop),
    };
    match result {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::io("creating", target)(error))
        }
        _ => Ok(()),
    }
}

/// Removes an empty directory or an empty file, never anything that holds data.
pub(super) fn remove_target(target: &Path) -> Result<(), Error> {
    let metadata = match std::fs::symlink_metadata(target) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io("looking at", target)(error)),
    };
    let result = if metadata.is_dir() {
        std::fs::remove_dir(target)
    } else if metadata.is_file() && metadata.len() == 0 {
        std::fs::remove_file(target)
    } else {
        Ok(())
    };
    result.map_err(Error::io("removing", target))
}
