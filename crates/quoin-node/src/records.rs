//! Records of this node's staged and published volumes, on disk: one small file a volume.
//!
//! A record is written before the first step that it describes and removed after the last step that
//! undoes it, so that a node that was killed in between knows what to search for. The record is an
//! intent, not a proof: whether a mount is there is always asked of the kernel. A power cut ends all
//! mounts and devices, so that nothing is lost with a record that it takes: only a removal is
//! synced, so that no record of a volume comes back that this node has no more.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::format::FileSystem;

/// Kind of use of a volume on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Raw block device.
    Block,
    /// Mounted file system.
    Mount { file_system: FileSystem, flags: Vec<String> },
}

impl Access {
    /// Returns the text for messages.
    #[must_use]
    pub fn description(&self) -> String {
        match self {
            Self::Block => "block".to_owned(),
            Self::Mount { file_system, .. } => format!("mount ({})", file_system.name()),
        }
    }
}

/// One staging: at most one a volume and node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staging {
    pub path: PathBuf,
    pub access: Access,
    /// The access mode's name; it is used in comparisons only.
    pub mode: String,
    pub read_only: bool,
    /// True once every step was completed.
    pub complete: bool,
}

/// One publication of a staged volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    pub target: PathBuf,
    pub access: Access,
    pub mode: String,
    pub read_only: bool,
}

/// Record of one volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub format: u32,
    pub volume: String,
    pub staging: Option<Staging>,
    pub publications: Vec<Publication>,
}

const FORMAT: u32 = 1;

impl Record {
    /// Returns an empty record.
    #[must_use]
    pub fn new(volume: &str) -> Self {
        Self { format: FORMAT, volume: volume.to_owned(), staging: None, publications: Vec::new() }
    }
}

/// The directory of records.
#[derive(Debug, Clone)]
pub struct Records {
    directory: PathBuf,
}

impl Records {
    /// Opens (and makes) the directory.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn open(directory: PathBuf) -> Result<Self, Error> {
        std::fs::create_dir_all(&directory).map_err(Error::io("creating", &directory))?;
        Ok(Self::within(directory))
    }

    /// Returns the records in a directory, which may not be there.
    #[must_use]
    pub fn within(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Returns the record's path. A volume id is a file name only in the form that Quoin gives ids;
    /// any other belongs to no volume that could have a record.
    fn path(&self, volume: &str) -> Option<PathBuf> {
        let plain = !volume.is_empty()
            && volume.len() <= 64
            && volume.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        plain.then(|| self.directory.join(format!("{volume}.json")))
    }

    /// Returns the volumes that have a record.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn volumes(&self) -> Result<Vec<String>, Error> {
        let entries =
            std::fs::read_dir(&self.directory).map_err(Error::io("reading", &self.directory))?;
        let name = |entry: std::fs::DirEntry| {
            Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned())
        };
        let mut volumes: Vec<_> = entries.flatten().filter_map(name).collect();
        volumes.sort();
        Ok(volumes)
    }

    /// Returns the record of a volume, if it has one. A power cut leaves a file without content of a
    /// record that was not written out.
    ///
    /// # Errors
    /// If the file is there, has content and does not hold a record of this volume.
    pub fn load(&self, volume: &str) -> Result<Option<Record>, Error> {
        let Some(path) = self.path(volume) else { return Ok(None) };
        let text = match std::fs::read(&path) {
            Ok(text) if text.is_empty() => return Ok(None),
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("reading", &path)(error)),
        };
        let record: Record = serde_json::from_slice(&text)
            .map_err(|error| Error::Record { path: path.clone(), why: error.to_string() })?;
        if record.format != FORMAT || record.volume != volume {
            let why = format!("format {} of volume {}", record.format, record.volume);
            return Err(Error::Record { path, why });
        }
        Ok(Some(record))
    }

    /// Writes a record so that a kill leaves the old one or the new one, and removes the file of a
    /// record that names nothing.
    ///
    /// # Errors
    /// If the file cannot be written, or the volume id is not valid.
    pub fn save(&self, record: &Record) -> Result<(), Error> {
        let Some(path) = self.path(&record.volume) else {
            let why = "is not a volume id of Quoin";
            return Err(Error::Path { path: record.volume.clone().into(), why });
        };
        if record.staging.is_none() && record.publications.is_empty() {
            match std::fs::remove_file(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io("removing", &path)(error)),
            }
            return self.sync();
        }
        let temporary = path.with_extension("new");
        let text = serde_json::to_vec_pretty(record).expect("a record is plain data");
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            // Mount flags may be sensitive.
            .mode(0o600)
            .open(&temporary)
            .map_err(Error::io("creating", &temporary))?;
        file.write_all(&text).map_err(Error::io("writing", &temporary))?;
        std::fs::rename(&temporary, &path).map_err(Error::io("renaming", &path))
    }

    fn sync(&self) -> Result<(), Error> {
        let directory: &Path = &self.directory;
        File::open(directory)
            .and_then(|file| file.sync_all())
            .map_err(Error::io("syncing", directory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let access = Access::Mount { file_system: FileSystem::Xfs, flags: vec!["noatime".into()] };
        Record {
            staging: Some(Staging {
                path: "/stage".into(),
                access: access.clone(),
                mode: "SINGLE_NODE_WRITER".into(),
                read_only: false,
                complete: true,
            }),
            publications: vec![Publication {
                target: "/target".into(),
                access,
                mode: "SINGLE_NODE_WRITER".into(),
                read_only: true,
            }],
            ..Record::new("ab12")
        }
    }

    #[test]
    fn a_record_is_read_back_as_saved_and_an_empty_one_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().join("volumes")).unwrap();
        records.save(&record()).unwrap();
        let again = Records::open(directory.path().join("volumes")).unwrap();
        assert_eq!(again.load("ab12").unwrap(), Some(record()));
        again.save(&Record::new("ab12")).unwrap();
        assert_eq!(again.load("ab12").unwrap(), None);
        assert_eq!(std::fs::read_dir(directory.path().join("volumes")).unwrap().count(), 0);
    }

    #[test]
    fn an_empty_record_that_was_never_written_is_saved_like_any_other() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().join("volumes")).unwrap();
        records.save(&Record::new("ab12")).unwrap();
        // A directory cannot be removed as a file.
        let path = records.path("ab12").unwrap();
        std::fs::create_dir(&path).unwrap();
        let error = records.save(&Record::new("ab12")).unwrap_err();
        assert!(error.to_string().contains("ab12"), "{error}");
    }

    #[test]
    fn a_record_is_its_owners_alone_and_is_written_beside_before_it_takes_its_place() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().to_owned()).unwrap();
        // A kill may have left one that was half written, and longer.
        std::fs::write(directory.path().join("ab12.new"), "x".repeat(1 << 16)).unwrap();
        std::fs::remove_file(directory.path().join("ab12.new")).unwrap();
        records.save(&record()).unwrap();
        let path = directory.path().join("ab12.json");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "mount flags may be sensitive: {mode:o}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        std::fs::write(directory.path().join("ab12.new"), "x".repeat(1 << 16)).unwrap();
        records.save(&record()).unwrap();
        assert_eq!(records.load("ab12").unwrap(), Some(record()));
        let other = Record { volume: "ab13".into(), ..record() };
        records.save(&other).unwrap();
        assert_eq!(records.volumes().unwrap(), ["ab12", "ab13"]);
        // The file of another volume under this one's name is no record of it.
        std::fs::rename(directory.path().join("ab13.json"), &path).unwrap();
        let error = records.load("ab12").unwrap_err().to_string();
        assert!(error.contains("ab12.json") && error.contains("of volume ab13"), "{error}");
    }

    #[test]
    fn an_id_is_taken_at_its_longest_and_no_longer() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().to_owned()).unwrap();
        for (bytes, is_taken) in [(1, true), (63, true), (64, true), (65, false)] {
            let of = Record { volume: "f".repeat(bytes), ..record() };
            assert_eq!(records.save(&of).is_ok(), is_taken, "{bytes} bytes");
            let loaded = records.load(&of.volume).unwrap();
            assert_eq!(loaded.is_some(), is_taken, "{bytes} bytes");
        }
        for id in ["ab_12", "ab 12", "ab.12", "ä", "ab12\n"] {
            assert!(records.save(&Record { volume: id.into(), ..record() }).is_err(), "{id:?}");
        }
    }

    #[test]
    fn a_volume_id_never_names_a_path_outside_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().join("volumes")).unwrap();
        for id in ["../../etc/passwd", "a/b", "", ".", "a\0b", &"x".repeat(65)] {
            assert_eq!(records.load(id).unwrap(), None);
            assert!(records.save(&Record { volume: id.into(), ..record() }).is_err());
        }
    }

    #[test]
    fn damaged_and_foreign_records_are_errors_that_name_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().to_owned()).unwrap();
        std::fs::write(directory.path().join("ab12.json"), "").unwrap();
        assert_eq!(records.load("ab12").unwrap(), None, "a power cut took its content");
        for text in ["{", "[1]", r#"{"format":9,"volume":"ab12","staging":null,"publications":[]}"#]
        {
            std::fs::write(directory.path().join("ab12.json"), text).unwrap();
            let error = records.load("ab12").unwrap_err().to_string();
            assert!(error.contains("ab12.json"), "{error}");
        }
    }
}
