//! The note that a pool's disk failed, for the process that comes next.
//!
//! A kernel tells of a failed write-out once. The next process would hear nothing of it, find the
//! cache that it was left with and take it for whole. So the note is kept in two places: beside
//! the identity, on media, and in memory that lasts as long as the boot. The former may lie on the
//! disk that fails, and the latter goes with the boot, as the caches do that it is about.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Exists from a disk failure until every claim was withdrawn.
const FILE: &str = "disk-failed";
/// Directories of file systems in memory, the first of them that can be written is taken.
const MEMORY: [&str; 2] = ["/run", "/dev/shm"];

/// Where the failure of one pool's disk is noted.
#[derive(Clone, Debug)]
pub(crate) struct Doubt {
    places: Vec<PathBuf>,
}

impl Doubt {
    /// Of the pool whose identity is in `dir`.
    pub fn beside(dir: &Path) -> Self {
        let whole = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
        let name: String = whole.to_string_lossy().replace('%', "%25").replace('/', "%");
        // File systems take no longer name.
        let start = name.len().saturating_sub(200);
        let name = name.get(start..).unwrap_or_default();
        let user = rustix::process::geteuid().as_raw();
        let memory = |root: &str| Path::new(root).join(format!("quoin-{FILE}-{user}-{name}"));
        let places = std::iter::once(dir.join(FILE)).chain(MEMORY.map(memory));
        Doubt { places: places.collect() }
    }

    #[cfg(test)]
    pub fn in_places(places: &[&Path]) -> Self {
        Doubt { places: places.iter().map(|place| place.to_path_buf()).collect() }
    }

    /// Whether the disk failed and claims may be left.
    pub fn exists(&self) -> bool {
        // What cannot be looked at may be there.
        self.places.iter().any(|place| place.try_exists().unwrap_or(true))
    }

    /// Notes that the disk failed, where that can be noted; an error names each place where not.
    pub fn begin(&self) -> Result<(), String> {
        let (mut noted, mut refused) = (false, Vec::new());
        for place in &self.places {
            match note(place) {
                Ok(()) => noted = true,
                Err(error) => refused.push(format!("{}: {error}", place.display())),
            }
        }
        if noted { Ok(()) } else { Err(refused.join(", ")) }
    }

    /// Every claim was withdrawn.
    pub fn settle(&self) {
        for place in &self.places {
            match std::fs::remove_file(place) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // Costs the replicas' claims once more at the next start, nothing else.
                Err(error) => {
                    tracing::warn!(path = %place.display(), %error, "cannot be removed");
                }
            }
        }
    }
}

/// Makes an empty file that a power cut does not take.
fn note(place: &Path) -> io::Result<()> {
    match File::options().write(true).create_new(true).open(place) {
        Ok(file) => file.sync_all()?,
        // One of another user may be gone at any moment.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_ours(place) => {}
        Err(error) => return Err(error),
    }
    match place.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

fn is_ours(place: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let owner = std::fs::symlink_metadata(place).map(|found| found.uid());
    owner.is_ok_and(|owner| owner == rustix::process::geteuid().as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_noted_where_one_of_the_places_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let (lost, kept) = (folder.path().join("gone/note"), folder.path().join("note"));
        let doubt = Doubt::in_places(&[&lost, &kept]);
        assert!(!doubt.exists());
        doubt.begin().unwrap();
        doubt.begin().unwrap();
        assert!(kept.exists() && doubt.exists());
        doubt.settle();
        assert!(!doubt.exists() && !kept.exists());
        let refused = Doubt::in_places(&[&lost]).begin().unwrap_err();
        assert!(refused.contains("gone/note"), "{refused}");
    }

    #[test]
    fn the_places_of_two_identities_are_apart_and_one_is_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("a"), folder.path().join("b"));
        let of = |dir: &Path| Doubt::beside(dir).places;
        assert!(of(&one).iter().all(|place| !of(&two).contains(place)));
        assert_eq!(of(&one), of(&one));
        assert!(of(&one).iter().skip(1).all(|place| !place.starts_with(folder.path())));
    }
}
