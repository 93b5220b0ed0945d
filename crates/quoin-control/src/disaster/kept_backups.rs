//! Directory of backups of the records: each run adds one backup and deletes the oldest ones.
//!
//! Only files with names that this module makes are ever deleted, and only after the new backup
//! is complete.

use std::path::{Path, PathBuf};

use prost_types::Timestamp;

use crate::Error;

const PREFIX: &str = "quoin-records-";

/// File of a backup that is made at `seconds` since 1970. Names sort by time.
pub fn file_of(directory: &Path, seconds: i64) -> PathBuf {
    let time = Timestamp { seconds, nanos: 0 }.to_string();
    let digits: String = time.chars().filter(|c| !matches!(c, '-' | ':')).collect();
    directory.join(format!("{PREFIX}{digits}"))
}

/// File of a backup that is made now: the first free name from `seconds` on, since an operator and
/// the controller may both write a backup within the same second. It sorts behind all that are there,
/// also where one was made by a clock that was ahead: the last name is the newest backup, always.
pub fn new_file(directory: &Path, seconds: i64) -> PathBuf {
    let newest = newest(directory).ok().flatten().unwrap_or(i64::MIN);
    let from = seconds.max(newest.saturating_add(1));
    let mut files = (from..).map(|time| file_of(directory, time));
    files.find(|file| !file.exists()).unwrap_or_else(|| file_of(directory, seconds))
}

/// Returns true if this module made the name: the prefix and `YYYYMMDDTHHMMSSZ`.
fn is_ours(name: &str) -> bool {
    let Some(time) = name.strip_prefix(PREFIX) else { return false };
    let form = b"DDDDDDDDTDDDDDDZ";
    time.len() == form.len()
        && time.bytes().zip(form).all(|(byte, form)| match form {
            b'D' => byte.is_ascii_digit(),
            letter => byte == *letter,
        })
}

/// Time at which the backup of this name was made, in seconds since 1970.
fn time_of(name: &str) -> Option<i64> {
    let digits = name.strip_prefix(PREFIX).filter(|_| is_ours(name))?;
    let part = |range: std::ops::Range<usize>| &digits[range];
    let (year, month, day) = (part(0..4), part(4..6), part(6..8));
    let (hour, minute, second) = (part(9..11), part(11..13), part(13..15));
    let time: Timestamp = format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z").parse().ok()?;
    Some(time.seconds)
}

/// Names of the backups in a directory, the oldest first.
fn names_in(directory: &Path) -> Result<Vec<String>, Error> {
    let failed = |source| Error::File { path: directory.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().into_string().unwrap_or_default();
        if is_ours(&name) && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Time of the newest backup in a directory, in seconds since 1970. `None`: there is no backup.
///
/// # Errors
/// The directory cannot be read.
pub fn newest(directory: &Path) -> Result<Option<i64>, Error> {
    Ok(names_in(directory)?.iter().rev().find_map(|name| time_of(name)))
}

/// Deletes the oldest backups beyond `keep`. Returns the deleted files.
///
/// # Errors
/// The directory cannot be read, or an old backup cannot be deleted.
pub fn rotate(directory: &Path, keep: usize) -> Result<Vec<PathBuf>, Error> {
    if keep == 0 {
        let rule = "0 would delete the backup that was just made: keep at least 1";
        return Err(Error::invalid("kept backups", rule));
    }
    let mut names = names_in(directory)?;
    let old = names.len().saturating_sub(keep);
    let mut deleted = Vec::new();
    for name in names.drain(..old) {
        let path = directory.join(name);
        std::fs::remove_file(&path).map_err(|source| Error::File { path: path.clone(), source })?;
        deleted.push(path);
    }
    Ok(deleted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_is_named_after_its_time_and_later_names_sort_later() {
        let at = |seconds| file_of(Path::new("/b"), seconds).display().to_string();
        assert_eq!(at(1_700_000_000), "/b/quoin-records-20231114T221320Z");
        assert!(at(1_700_000_000) < at(1_700_000_001));
        assert!(at(1_700_000_000) < at(1_900_000_000));
        assert_eq!(time_of("quoin-records-20231114T221320Z"), Some(1_700_000_000));
        assert_eq!(time_of("quoin-records-20239914T221320Z"), None);
    }

    #[test]
    fn the_newest_backups_stay_and_foreign_files_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let foreign = [
            "quoin-records-",
            "quoin-records-2023111-T221320Z",
            "quoin-records-20231114T221320Z.old",
            "authority.json",
        ];
        for name in foreign {
            std::fs::write(path.join(name), "x").unwrap();
        }
        let backups: Vec<_> = (0..5).map(|n| file_of(path, 1_700_000_000 + n * 86_400)).collect();
        for backup in &backups {
            std::fs::write(backup, "x").unwrap();
        }
        assert_eq!(newest(path).unwrap(), Some(1_700_000_000 + 4 * 86_400));
        assert_eq!(rotate(path, 2).unwrap(), backups[..3]);
        assert_eq!(rotate(path, 2).unwrap(), Vec::<PathBuf>::new());
        assert!(backups[3..].iter().all(|backup| backup.exists()));
        assert!(foreign.iter().all(|name| path.join(name).exists()));
    }

    #[test]
    fn a_backup_made_after_one_of_a_clock_that_was_ahead_is_the_last_by_name_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let (now, ahead) = (1_700_000_000, 1_700_000_000 + 25 * 86_400);
        std::fs::write(file_of(path, ahead), "x").unwrap();
        for n in 1..4 {
            let file = new_file(path, now + n);
            std::fs::write(&file, "x").unwrap();
            assert_eq!(newest(path).unwrap(), Some(ahead + n));
            rotate(path, 2).unwrap();
            assert!(file.exists());
        }
        // As the clock comes to that time, names are those of the time again.
        assert_eq!(new_file(path, ahead + 86_400), file_of(path, ahead + 86_400));
    }

    #[test]
    fn nothing_is_deleted_where_nothing_would_be_kept() {
        let directory = tempfile::tempdir().unwrap();
        let backup = file_of(directory.path(), 1_700_000_000);
        std::fs::write(&backup, "x").unwrap();
        let next = new_file(directory.path(), 1_700_000_000);
        assert_eq!(next, file_of(directory.path(), 1_700_000_001), "no backup is written over");
        assert!(rotate(directory.path(), 0).unwrap_err().to_string().contains("at least 1"));
        assert!(backup.exists());
    }
}
