//! Files that commands write where a user says: images of volumes and what lies beside them.
//!
//! They hold a volume's data, so only their owner may read them. The directory may be one in which
//! others write too: no file that is there is written through or removed, nor one that a link names.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

/// A file beside, which others cannot foresee the name of, until it is whole.
pub struct Beside {
    pub file: File,
    path: PathBuf,
}

/// Makes a file that only its owner may read, where there is none and no link.
pub fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Opens a file of this user that is there; a link is refused.
pub fn open_own(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::other("it is a link, which is not followed"),
        _ => error,
    })?;
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it is no file of this user"));
    }
    Ok(file)
}

/// Reads a small file of this user.
pub fn read_own(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_own(path)?.take(1 << 20).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes a small file: others see the old one or the new one.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = Beside::of(path)?;
    beside.file.write_all(bytes)?;
    std::fs::rename(&beside.path, path)
}

impl Beside {
    pub fn of(path: &Path) -> io::Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let random: u64 = rand::random();
        let beside = path.with_file_name(format!(".{name}.{random:016x}"));
        Ok(Self { file: create_new(&beside)?, path: beside })
    }

    /// Gives it its name, where there is nothing of that name.
    pub fn keep_as(self, path: &Path) -> io::Result<()> {
        match rustix::fs::renameat_with(CWD, &self.path, CWD, path, RenameFlags::NOREPLACE) {
            // Some file systems cannot refuse: a link is as good, and is refused.
            Err(Errno::INVAL | Errno::NOSYS) => std::fs::hard_link(&self.path, path),
            outcome => outcome.map_err(Into::into),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // After it got its name there is none of this one.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn no_file_of_another_is_written_through_and_only_its_owner_reads_a_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("precious"), "kept").unwrap();
        symlink(path("precious"), path("link")).unwrap();
        assert!(create_new(&path("link")).is_err() && open_own(&path("link")).is_err());
        assert!(open_own(directory.path()).is_err());
        replace(&path("link"), b"new").unwrap();
        assert_eq!(std::fs::read(path("precious")).unwrap(), b"kept");
        assert_eq!(read_own(&path("link")).unwrap(), b"new");

        let mut beside = Beside::of(&path("image")).unwrap();
        beside.file.write_all(b"data").unwrap();
        beside.keep_as(&path("image")).unwrap();
        for name in ["image", "link"] {
            let mode = std::fs::metadata(path(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        assert!(Beside::of(&path("image")).unwrap().keep_as(&path("precious")).is_err());
        assert_eq!(std::fs::read(path("precious")).unwrap(), b"kept");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 3, "nothing is left");
    }

    /// Where a file is opened for writing though it may be there, with the directory that only this
    /// process's user writes in.
    const IN_OWN_DIRECTORIES: &[(&str, usize, &str)] = &[
        ("quoin-attach/src/created.rs", 3, "run/attach, and the kernel's uevent"),
        ("quoin-attach/src/daemon.rs", 1, "run/attach"),
        ("quoin-attach/src/fuse/mount.rs", 1, "run/attach/volumes"),
        ("quoin-control/src/state/store/embedded.rs", 1, "the controller's data, mode 0600"),
        ("quoin-control/src/state/store/embedded/outages.rs", 1, "a test's own"),
        ("quoin-identity/src/terms.rs", 1, "the identity, mode 0700"),
        ("quoin-node/src/format.rs", 1, "the node's state"),
        ("quoin-node/src/records.rs", 1, "the node's state"),
        ("quoin-pool/src/place.rs", 1, "the identity, mode 0700"),
        ("quoin-pool/src/scrub.rs", 1, "the identity, mode 0700"),
        ("quoin-target/src/lib.rs", 2, "the run directory, mode 0700"),
        ("quoin-wire/src/security.rs", 1, "the identity, mode 0700"),
        ("quoin/src/demo/cluster.rs", 1, "the demo's own cluster"),
        ("quoin/src/demo/second_node.rs", 1, "the demo's own cluster"),
        ("quoin/src/dev/keeper.rs", 2, "the directory of `quoin dev`"),
        ("quoin/src/dev/layout.rs", 1, "the directory of `quoin dev`"),
        ("quoin/src/dev/lock.rs", 1, "the directory of `quoin dev`"),
        ("quoin/src/dev/settings.rs", 1, "the directory of `quoin dev`"),
        ("quoin/src/host/at_boot.rs", 1, "/etc"),
        ("quoin/src/host/lost.rs", 1, "the run directory"),
    ];

    fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            let path = entry.path();
            match path.extension() {
                _ if path.is_dir() && !path.ends_with("testing") => sources(&path, found),
                Some(extension) if extension == "rs" && !path.ends_with("tests.rs") => {
                    found.push(path);
                }
                _ => {}
            }
        }
    }

    #[test]
    fn every_other_file_that_is_written_is_a_new_one_or_in_a_directory_of_its_own() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(crates).unwrap().flatten() {
            if entry.path().join("src").is_dir() {
                sources(&entry.path().join("src"), &mut files);
            }
        }
        let mut found = Vec::new();
        // Modules of tests have directories of their own.
        files.retain(|file| file.components().all(|part| part.as_os_str() != "tests"));
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let text = text.split("#[cfg(test)]").next().unwrap();
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            let opens = ["fs::write(", "File::create(", ".create(true)"];
            let count: usize =
                code.map(|line| opens.iter().filter(|open| line.contains(**open)).count()).sum();
            if count > 0 {
                let name = file.strip_prefix(crates).unwrap().display().to_string();
                found.push((name, count));
            }
        }
        found.sort();
        let known = IN_OWN_DIRECTORIES.iter().map(|(file, count, _)| (file.to_string(), *count));
        assert_eq!(
            found,
            known.collect::<Vec<_>>(),
            "a file of a user's directory is written by \
                    `create_new`, or through `private_file`"
        );
    }
}
