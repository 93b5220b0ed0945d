//! The place where a pool's data lies: whose it is, and whether it is the right one.
//!
//! A pool is made only where there are no other data: in an empty directory, under a new file
//! name, or on a blank device that was asked to be formatted. Which pool an identity serves is
//! remembered beside it, since a cluster takes another pool under the same name for the loss of
//! all its replicas: a disk that was not mounted, or a path mistyped, must not cause that.

use std::path::{Path, PathBuf};

use quoin_replication::replica::store::StoreError;
use quoin_store::contents::{Content, content_of};
use quoin_store::{
    Disk, Exposed, FileDisk, FileDiskError, FormatOptions, Pool, PoolError, PoolOptions,
};
use quoin_types::{BLOCK_SIZE, PoolId};

use crate::{Error, Opened};

/// The file of a pool that is given as a directory.
pub const POOL_FILE: &str = "pool.quoin";
/// Beside the identity: the id of the pool that it serves.
const SERVED_FILE: &str = "pool-id";
/// Directory that a new file system has at its root.
const LOST_AND_FOUND: &str = "lost+found";

/// Pool to be opened, and permission to make it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub path: PathBuf,
    pub size_bytes: Option<u64>,
    pub sparse: bool,
    pub format: bool,
    /// Another pool may take the place of the one that this identity served.
    pub replace: bool,
    pub cache_bytes: u64,
    /// Where the identity is.
    pub identity: PathBuf,
}

/// The file or device that a pool's data is in: itself, or a file of a fixed name in a directory.
pub fn data_path(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(POOL_FILE) } else { path.to_owned() }
}

impl Place {
    fn failed(&self, reason: impl Into<String>) -> Error {
        Error::Open { path: self.path.clone(), reason: reason.into() }
    }

    /// Returns the error for a refusal of the file or device itself.
    fn refused(&self, error: &dyn std::error::Error) -> Error {
        let reason = match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        Error::Open { path: data_path(&self.path), reason }
    }

    /// Finds out, without making anything, what would be refused: before a token is used up. Returns
    /// the disk that is there, locked for [`Self::open`]: what the host's tools do with one that is
    /// closed must not have it refused after the token is gone.
    pub fn check(&self) -> Result<Option<FileDisk>, Error> {
        let path = data_path(&self.path);
        match (std::fs::metadata(&path), self.size_bytes) {
            (Ok(_), _) => {
                let disk = FileDisk::open(&path).map_err(|error| self.refused(&error))?;
                if self.is_to_be_made(&disk)? {
                    let shape = FormatOptions::new(PoolId(0));
                    shape.check(disk.size()).map_err(|error| self.refused(&error))?;
                } else {
                    Pool::peek(&disk).map_err(|error| self.refused(&error))?;
                }
                Ok(Some(disk))
            }
            (Err(error), None) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(self
                    .failed("there is no pool yet: --capacity SIZE makes one, or mend the path"))
            }
            (Err(_), Some(size)) if self.may_make_another() => {
                self.check_empty()?;
                let shape = FormatOptions::new(PoolId(0));
                shape.check(size).map_err(|error| self.refused(&error))?;
                FileDisk::rehearse(&path, size, self.sparse)
                    .map_err(|error| self.refused(&error))?;
                Ok(None)
            }
            (Err(_), Some(_)) => Err(self.other("no pool")),
            (Err(error), None) => Err(self.failed(error.to_string())),
        }
    }

    /// Opens the pool, on the disk that was checked; makes it first where there is none and that was
    /// asked for.
    pub fn open(&self, checked: Option<FileDisk>) -> Result<Opened<Pool<FileDisk>>, Error> {
        let path = data_path(&self.path);
        let opened = checked.map_or_else(|| FileDisk::open(&path), Ok);
        let (disk, empty) = match (opened, self.size_bytes) {
            (Err(FileDiskError::Missing { .. }), Some(size)) => {
                self.check()?;
                let made = FileDisk::create(&path, size, self.sparse);
                (made.map_err(|error| self.refused(&error))?, true)
            }
            (opened, _) => (opened.map_err(|error| self.refused(&error))?, false),
        };
        self.tell_exposed(&disk);
        if empty || self.is_to_be_made(&disk)? {
            if !self.may_make_another() {
                return Err(self.other("blank"));
            }
            let shape = FormatOptions {
                keeps_space: !self.sparse,
                ..FormatOptions::new(PoolId(rand::random()))
            };
            let made = Pool::format(&disk, &shape);
            if let Err(error) = made {
                if empty {
                    // Nothing half-made stays behind.
                    let _ = std::fs::remove_file(&path);
                }
                return Err(match error {
                    PoolError::Store(StoreError::Io(fault)) if fault.errno == libc::ENOSPC => self
                        .failed(
                            "the file system below it has no room for even an empty pool: free \
                             some, or choose another --data",
                        ),
                    error => self.refused(&error),
                });
            }
        } else if let Some(wanted) = self.size_bytes.map(|size| size & !(BLOCK_SIZE as u64 - 1))
            && wanted != disk.size()
        {
            let (has, path) = (disk.size(), path.display());
            tracing::warn!(
                "the pool {path} has {has} bytes; --capacity ({wanted}) is for making one and \
                 changes nothing"
            );
        }
        let options = PoolOptions { cache_bytes: self.cache_bytes, ..PoolOptions::default() };
        let pool = Pool::open(disk, options).map_err(|error| self.refused(&error))?;
        self.check_served(&pool.id().to_string())?;
        Ok(Opened { id: pool.id().to_string(), syncer: pool.syncer(), pool })
    }

    /// Returns true if a pool is to be made on a disk that is there: it was asked for, and the disk
    /// is blank. One that holds something else than a pool is refused, with the name of that.
    fn is_to_be_made(&self, disk: &FileDisk) -> Result<bool, Error> {
        if !self.format || !matches!(Pool::peek(disk), Err(PoolError::Foreign)) {
            return Ok(false);
        }
        let found = content_of(disk).map_err(|fault| self.refused(&PoolError::from(fault)))?;
        match found {
            Content::Blank => Ok(true),
            content => Err(self.refused(&PoolError::Holds(content.words()))),
        }
    }

    fn tell_exposed(&self, disk: &FileDisk) {
        let Some(Exposed { mode, is_closed }) = disk.exposed() else { return };
        let path = data_path(&self.path);
        let path = path.display();
        match is_closed {
            true => tracing::warn!(
                "other users of this host could open {path} (mode {mode:o}); they cannot any more"
            ),
            false => tracing::error!(
                "other users of this host can open {path} (mode {mode:o}), which holds the data of \
                 all volumes, and the system does not let its mode be changed: chmod 600 it"
            ),
        }
    }

    /// Checks that the directory for a new pool holds no other files.
    fn check_empty(&self) -> Result<(), Error> {
        if !self.path.is_dir() {
            let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
            return match parent.is_none_or(Path::is_dir) {
                true => Ok(()),
                false => {
                    Err(self.failed("its directory does not exist: make it, or mend the path"))
                }
            };
        }
        let entries = std::fs::read_dir(&self.path).map_err(|e| self.failed(e.to_string()))?;
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        match names.into_iter().find(|name| name != LOST_AND_FOUND) {
            None => Ok(()),
            Some(name) => Err(self.failed(format!(
                "the directory holds other files ({}): choose an empty one, or name the pool's \
                 own file, as in --data {}",
                name.to_string_lossy(),
                self.path.join(POOL_FILE).display()
            ))),
        }
    }

    fn served(&self) -> Option<String> {
        let text = std::fs::read_to_string(self.identity.join(SERVED_FILE)).ok()?;
        Some(text.trim().to_owned())
    }

    fn may_make_another(&self) -> bool {
        self.replace || self.served().is_none()
    }

    fn other(&self, found: &str) -> Error {
        self.failed(format!(
            "here is {found}, but the identity in {} serves pool {}: mount its disk or mend --data. \
             If that pool is lost, --replace lets this one take its place, and its replicas are \
             rebuilt",
            self.identity.display(),
            self.served().unwrap_or_default()
        ))
    }

    /// Remembers which pool the identity serves, and refuses another one.
    fn check_served(&self, id: &str) -> Result<(), Error> {
        match self.served() {
            Some(served) if served == id => return Ok(()),
            Some(_) if !self.replace => return Err(self.other(&format!("pool {id}"))),
            _ => {}
        }
        let path = self.identity.join(SERVED_FILE);
        let beside = path.with_extension("new");
        std::fs::write(&beside, format!("{id}\n"))
            .and_then(|()| std::fs::rename(&beside, &path))
            .map_err(|error| self.failed(format!("cannot write {}: {error}", path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 256 << 20;

    fn place(data: &Path, identity: &Path) -> Place {
        Place {
            path: data.to_owned(),
            size_bytes: Some(SIZE),
            sparse: true,
            format: false,
            replace: false,
            cache_bytes: 16 << 20,
            identity: identity.to_owned(),
        }
    }

    /// Returns the text of a refusal.
    fn refusal<T>(outcome: Result<T, Error>) -> String {
        outcome.map(drop).expect_err("a refusal").to_string()
    }

    #[test]
    fn a_directory_with_other_files_gets_no_pool_and_a_new_file_system_does() {
        let folder = tempfile::tempdir().unwrap();
        let identity = tempfile::tempdir().unwrap();
        let place = place(folder.path(), identity.path());
        std::fs::write(folder.path().join("passwd"), "x").unwrap();
        let said = refusal(place.open(None));
        assert!(said.contains("passwd") && said.contains("--data"), "{said}");
        assert_eq!(refusal(place.check()), said, "told before a token is spent");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "something was made");
        std::fs::remove_file(folder.path().join("passwd")).unwrap();
        std::fs::create_dir(folder.path().join(LOST_AND_FOUND)).unwrap();
        place.check().unwrap();
        place.open(None).unwrap();
        // Once it is there, what lies beside it is no reason to refuse it.
        std::fs::write(folder.path().join("notes"), "x").unwrap();
        place.open(None).unwrap();
    }

    #[test]
    fn another_pool_under_the_same_identity_is_refused_unless_it_is_to_replace_it() {
        let folder = tempfile::tempdir().unwrap();
        let identity = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("one"), folder.path().join("two"));
        let id = place(&first, identity.path()).open(None).unwrap().id;
        assert_eq!(place(&first, identity.path()).open(None).unwrap().id, id);
        // A disk that was not mounted: nothing is made in its place.
        let said = refusal(place(&second, identity.path()).open(None));
        assert!(said.contains(&id) && said.contains("--replace"), "{said}");
        assert!(!second.exists());
        // A pool of another identity.
        let elsewhere = tempfile::tempdir().unwrap();
        let other = place(&second, elsewhere.path()).open(None).unwrap().id;
        let said = refusal(place(&second, identity.path()).open(None));
        assert!(said.contains(&id) && said.contains(&other), "{said}");
        let replacing = Place { replace: true, ..place(&second, identity.path()) };
        assert_eq!(replacing.open(None).unwrap().id, other);
        assert_eq!(place(&second, identity.path()).open(None).unwrap().id, other, "remembered");
    }

    #[test]
    fn a_device_that_holds_data_is_not_formatted_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let last = SIZE - 512;
        for (at, bytes, name) in [
            (65_600, &b"_BHRfS_M"[..], "btrfs"),
            (512, b"EFI PART", "GPT"),
            (last, b"EFI PART", "GPT"),
            (SIZE - 8192, b"\xfc\x4e\x2b\xa9", "RAID"),
            (last, b"x", "unknown kind"),
        ] {
            let file = std::fs::File::create(&path).unwrap();
            file.set_len(SIZE).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).unwrap();
            let place = Place { format: true, ..place(&path, folder.path()) };
            for said in [refusal(place.check()), refusal(place.open(None))] {
                assert!(said.contains(name) && said.contains("blkdiscard"), "{said}");
            }
            let content = std::fs::read(&path).unwrap();
            let written = content.iter().filter(|byte| **byte != 0).count();
            assert_eq!(written, bytes.iter().filter(|byte| **byte != 0).count(), "{name}");
        }
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        Place { format: true, ..place(&path, folder.path()) }.open(None).unwrap();
    }

    #[test]
    fn a_missing_pool_is_named_with_the_flag_that_makes_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut missing = place(&folder.path().join("none"), folder.path());
        missing.size_bytes = None;
        assert!(refusal(missing.check()).contains("--capacity"));
        assert!(refusal(missing.open(None)).contains("no pool"));
    }

    #[test]
    fn a_capacity_that_differs_changes_nothing_of_a_pool_that_exists() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        place(&path, folder.path()).open(None).unwrap();
        let other = Place { size_bytes: Some(1024), ..place(&path, folder.path()) };
        other.open(None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
    }

    /// Between both the cluster is joined, and the token spent.
    #[test]
    fn a_disk_that_was_checked_stays_locked_until_it_is_opened() {
        let (folder, identity) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = folder.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let place = Place { format: true, ..place(&path, identity.path()) };
        let checked = place.check().unwrap();
        assert!(matches!(FileDisk::open(&path), Err(FileDiskError::Locked { .. })));
        place.open(checked).unwrap();
    }
}
