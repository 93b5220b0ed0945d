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
    // A mount there is a directory, and looking at it would look at the volume.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::FileSystem;

    fn mount() -> Access {
        Access::Mount { file_system: FileSystem::Ext4, flags: Vec::new() }
    }

    /// The table: what is at a target, for either kind of use, and what becomes of it.
    #[test]
    fn a_target_is_taken_as_it_may_be_and_only_what_is_empty_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir_all(at("empty")).unwrap();
        std::fs::create_dir_all(at("full/of")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        std::fs::write(at("data"), "kept").unwrap();
        std::os::unix::fs::symlink(at("empty"), at("to directory")).unwrap();
        std::os::unix::fs::symlink(at("file"), at("to file")).unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        for (name, as_mount, as_block) in [
            ("none", true, true),
            ("none/none", false, false),
            ("file/none", false, false),
            ("empty", true, false),
            ("full", true, false),
            ("file", false, true),
            ("data", false, true),
            ("to directory", false, false),
            ("to file", false, false),
            ("dangling", false, false),
            ("socket", false, false),
        ] {
            let check = |access: &Access| check_target(&at(name), access, &[]);
            assert_eq!(check(&mount()).is_ok(), as_mount, "{name} for a mount");
            assert_eq!(check(&Access::Block).is_ok(), as_block, "{name} for a device");
            for refused in
                [check(&mount()), check(&Access::Block)].into_iter().flat_map(Result::err)
            {
                assert_eq!(refused.kind(), crate::Kind::InvalidArgument, "{name}: {refused}");
            }
        }
        for (name, is_removed) in [
            ("none", true),
            ("none/none", true),
            ("empty", true),
            ("file", true),
            ("data", false),
            ("to directory", false),
            ("to file", false),
            ("dangling", false),
            ("socket", false),
        ] {
            remove_target(&at(name)).unwrap();
            let is_there = std::fs::symlink_metadata(at(name)).is_ok();
            assert_eq!(!is_there, is_removed, "{name}");
        }
        assert!(remove_target(&at("full")).is_err() && at("full/of").exists());
        assert_eq!(std::fs::read(at("data")).unwrap(), b"kept");
        for (access, is_directory) in [(mount(), true), (Access::Block, false)] {
            for _ in 0..2 {
                make_target(&at("made"), &access).unwrap();
                assert_eq!(at("made").is_dir(), is_directory);
            }
            remove_target(&at("made")).unwrap();
            assert!(make_target(&at("none/made"), &access).is_err());
        }
    }

    #[test]
    fn a_path_is_resolved_but_for_its_last_name() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("real")).unwrap();
        std::os::unix::fs::symlink(root.join("real"), root.join("link")).unwrap();
        for (given, found) in [
            ("link/a", "real/a"),
            ("real/../link/a", "real/a"),
            ("link", "link"),
            ("none/a", "none/a"),
        ] {
            assert_eq!(resolve(&root.join(given)), root.join(found), "{given}");
        }
        assert_eq!(resolve(Path::new("/")), Path::new("/"));
        for (name, is_taken) in [("real", true), ("link", false), ("none", false)] {
            assert_eq!(existing_directory(&root.join(name)).is_ok(), is_taken, "{name}");
        }
    }
}
