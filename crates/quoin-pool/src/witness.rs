//! The file in memory that keeps a pool's number for its next process
//! ([`quoin_replication::pool_host::restart`]).
//!
//! Where there is no file system in memory that can be written, and after a boot, each process has
//! another number.

use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use quoin_replication::pool_host::restart::{Claims, File};
use quoin_replication::replica::store::BootCookie;

/// Directories of file systems in memory; the first of them that takes the file keeps it.
const MEMORY: [&str; 2] = ["/run", "/dev/shm"];
/// The types of file systems that lie in memory (`linux/magic.h`: tmpfs, ramfs).
const MEMORY_TYPES: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// Bytes of a file name at most, less those of the prefix.
const NAME_BYTES_MAX: usize = 200;

/// The claims of one pool's process, and the file that keeps its number for the next one.
#[derive(Debug)]
pub struct Witness {
    places: Vec<PathBuf>,
    claims: Claims,
    kept: Option<PathBuf>,
}

impl Witness {
    /// Returns the witness of the pool whose identity is in `dir`: the number that the process before
    /// left, or a new one.
    pub fn of(dir: &Path) -> Self {
        let whole = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
        let name: String = whole.to_string_lossy().replace('%', "%25").replace('/', "%");
        let mut start = name.len().saturating_sub(NAME_BYTES_MAX);
        while !name.is_char_boundary(start) {
            start += 1;
        }
        let user = rustix::process::geteuid().as_raw();
        let file = format!("quoin-witness-{user}-{}", &name[start..]);
        let memory = MEMORY.iter().map(Path::new).filter(|folder| lies_in_memory(folder));
        Self::in_places(memory.map(|folder| folder.join(&file)).collect())
    }

    /// In the first of `places` that has it or takes it.
    pub fn in_places(places: Vec<PathBuf>) -> Self {
        let found = places.iter().find_map(|place| Some((place.clone(), read(place)?)));
        let (kept, number) = found.unzip();
        let (claims, file) = Claims::at_start(number, rand::random());
        let mut witness = Witness { places, claims, kept };
        // Nothing is there to be removed.
        let _ = witness.change(file);
        witness
    }

    /// The cookie of a cache, as far as no disk failed.
    pub fn cookie(&self, cache: BootCookie) -> BootCookie {
        self.claims.cookie(cache)
    }

    /// Takes the file away, as the disk failed. An error says that the next process will find it.
    pub fn disk_failed(&mut self) -> Result<(), String> {
        let file = self.claims.disk_failed();
        self.change(file)
    }

    /// See [`Claims::must_withdraw`].
    pub fn must_withdraw(&self) -> bool {
        self.claims.must_withdraw()
    }

    /// Every claim of the caches before a failure was withdrawn on media.
    pub fn withdrawn(&mut self) {
        let file = self.claims.withdrawn();
        // A file that could not be removed has this number still.
        let _ = self.change(file);
    }

    fn change(&mut self, file: File) -> Result<(), String> {
        match file {
            File::Leave => Ok(()),
            File::Keep => {
                self.keep();
                Ok(())
            }
            File::Remove => self.remove(),
        }
    }

    fn remove(&mut self) -> Result<(), String> {
        match self.kept.as_deref().map(|place| (place, std::fs::remove_file(place))) {
            Some((place, Err(error))) if error.kind() != io::ErrorKind::NotFound => {
                Err(format!("{}: {error}", place.display()))
            }
            _ => {
                self.kept = None;
                Ok(())
            }
        }
    }

    /// Keeps the number for the next process.
    fn keep(&mut self) {
        if self.kept.is_some() {
            return;
        }
        self.kept =
            self.places.iter().find(|place| write(place, self.claims.number()).is_ok()).cloned();
        if self.kept.is_none() {
            tracing::warn!(
                places = ?self.places,
                "no file system in memory takes a file: after a restart of this process its \
                 replicas are caught up as after a loss of power (mount a tmpfs at /run or /dev/shm)"
            );
        }
    }
}

fn lies_in_memory(folder: &Path) -> bool {
    let found = rustix::fs::statfs(folder);
    #[allow(clippy::cast_sign_loss, reason = "a magic number of 32 bits, of whatever type")]
    found.is_ok_and(|found| MEMORY_TYPES.contains(&(found.f_type as u64 & 0xffff_ffff)))
}

/// The number in a file that is this user's and whole.
fn read(place: &Path) -> Option<u128> {
    let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let file = std::fs::File::options().read(true).custom_flags(flags).open(place).ok()?;
    let found = file.metadata().ok()?;
    if found.uid() != rustix::process::geteuid().as_raw() || !found.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(17).read_to_end(&mut bytes).ok()?;
    bytes.try_into().ok().map(u128::from_le_bytes)
}

fn write(place: &Path, number: u128) -> io::Result<()> {
    if std::fs::symlink_metadata(place).is_ok() {
        // A file that could not be read as a whole.
        std::fs::remove_file(place)?;
    }
    let mut options = std::fs::File::options();
    let mut file = options.write(true).create_new(true).mode(0o600).open(place)?;
    let written = file.write_all(&number.to_le_bytes());
    if written.is_err() {
        // Part of a number is none.
        let _ = std::fs::remove_file(place);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: BootCookie = BootCookie(7);

    #[test]
    fn the_next_process_has_the_same_cookie_until_the_disk_fails() {
        let folder = tempfile::tempdir().unwrap();
        let places = vec![folder.path().join("gone/file"), folder.path().join("file")];
        let of = || Witness::in_places(places.clone());
        let mut one = of();
        assert_eq!(one.cookie(CACHE), of().cookie(CACHE));
        assert_ne!(one.cookie(CACHE), one.cookie(BootCookie(8)));
        one.disk_failed().unwrap();
        one.disk_failed().unwrap();
        let next = of();
        assert_ne!(one.cookie(CACHE), next.cookie(CACHE));
        drop(next);
        std::fs::remove_file(folder.path().join("file")).unwrap();
        one.withdrawn();
        assert_eq!(one.cookie(CACHE), of().cookie(CACHE));
    }

    #[test]
    fn a_witness_that_nothing_keeps_or_that_is_not_whole_is_another_for_each_process() {
        let folder = tempfile::tempdir().unwrap();
        let nowhere = || Witness::in_places(vec![folder.path().join("gone/file")]);
        assert_ne!(nowhere().cookie(CACHE), nowhere().cookie(CACHE));
        nowhere().disk_failed().unwrap();
        let place = folder.path().join("file");
        for bytes in [&[][..], &[0; 15], &[0; 17]] {
            std::fs::write(&place, bytes).unwrap();
            let one = Witness::in_places(vec![place.clone()]);
            assert_ne!(one.cookie(CACHE), CACHE, "{bytes:?}");
            assert_eq!(std::fs::read(&place).unwrap(), one.claims.number().to_le_bytes());
        }
        std::fs::remove_file(&place).unwrap();
        std::fs::write(folder.path().join("other"), [0; 16]).unwrap();
        std::os::unix::fs::symlink(folder.path().join("other"), &place).unwrap();
        assert_ne!(Witness::in_places(vec![place]).cookie(CACHE), CACHE);
    }

    #[test]
    fn the_number_is_for_its_user_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("file");
        Witness::in_places(vec![place.clone()]);
        assert_eq!(std::fs::metadata(place).unwrap().permissions().mode() & 0o7777, 0o600);
    }

    #[test]
    fn a_file_that_cannot_be_taken_away_is_named_and_one_that_is_gone_is_not_missed() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("file");
        let mut one = Witness::in_places(vec![place.clone()]);
        std::fs::remove_file(&place).unwrap();
        one.disk_failed().unwrap();
        one.withdrawn();
        std::fs::remove_file(&place).unwrap();
        std::fs::create_dir(&place).unwrap();
        let error = one.disk_failed().unwrap_err();
        assert!(error.contains(&*place.to_string_lossy()), "{error}");
    }

    #[test]
    fn the_files_of_two_identities_are_apart_and_lie_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("a"), folder.path().join("b"));
        let of = |dir: &Path| {
            let mut witness = Witness::of(dir);
            witness.disk_failed().unwrap();
            witness.places
        };
        assert!(of(&one).iter().all(|place| !of(&two).contains(place)));
        assert_eq!(of(&one), of(&one));
        assert!(of(&one).iter().all(|place| lies_in_memory(place.parent().unwrap())));
    }
}
