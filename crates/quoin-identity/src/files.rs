//! Small files that are either the old or the new ones after a crash, never a part.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use crate::Error;

pub const PRIVATE: u32 = 0o600;
pub const PUBLIC: u32 = 0o644;
/// Largest file of an identity; a larger one is not Quoin's and is not read into memory.
const FILE_BYTES_MAX: u64 = 1 << 20;

fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |source| Error::File { path: path.to_owned(), source }
}

/// Makes `dir` (mode 0700) and its parents where they are missing.
pub fn make_dir(dir: &Path) -> Result<(), Error> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed(dir))
}

/// Writes a file that only its owner may read; a crash leaves the old one or the new one.
///
/// # Errors
/// Names the path.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write(path, bytes, PRIVATE)
}

/// Writes a temporary file, syncs it, renames it, syncs the directory.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    // The parent of a bare name is "", which cannot be opened.
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Two processes may share an identity, so each writes a file of its own first.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = dir.join(format!(".{name}.{}", std::process::id()));
    let attempt = || -> std::io::Result<()> {
        let _ = fs::remove_file(&beside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)?;
        File::open(dir)?.sync_all()
    };
    let done = attempt();
    if done.is_err() {
        let _ = fs::remove_file(&beside);
    }
    done.map_err(failed(path))
}

/// Reads a file; `None` where there is no such file.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match fs::metadata(path) {
        Ok(meta) if meta.len() > FILE_BYTES_MAX => Err(Error::Damaged {
            path: path.to_owned(),
            reason: format!("{} bytes are more than such a file may have", meta.len()),
        }),
        Ok(_) => fs::read(path).map(Some).map_err(failed(path)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_above_the_size_limit_is_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert!(matches!(read(&path), Ok(None)));
        let of = |bytes: u64| {
            File::create(&path).unwrap().set_len(bytes).unwrap();
            read(&path)
        };
        for bytes in [0, 1, FILE_BYTES_MAX] {
            assert_eq!(of(bytes).unwrap().map(|text| text.len() as u64), Some(bytes));
        }
        for bytes in [FILE_BYTES_MAX + 1, FILE_BYTES_MAX * 2] {
            assert!(matches!(of(bytes), Err(Error::Damaged { .. })), "{bytes}");
        }
        assert!(read(&path.join("below")).is_err(), "a file is not a directory");
    }
}
