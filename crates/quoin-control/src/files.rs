//! Files in a controller's directory.

use std::path::{Path, PathBuf};

use crate::Error;
use crate::state::store::SharedOptions;

/// The cluster's authority, and its records, in a controller's directory.
pub(crate) const AUTHORITY_FILE: &str = "authority.json";
pub(crate) const RECORDS_FILE: &str = "records.redb";
/// Says in the directory of one of several controllers which engine has the records, by the rest of its name.
pub(crate) const ENGINE_FILES: [&str; 2] = ["records.etcd", "records.kubernetes"];

/// Returns true if `dir` holds a cluster: what [`crate::init`] does last is there.
pub fn is_initialised(dir: &Path) -> bool {
    dir.join(RECORDS_FILE).exists() || is_one_of_several(dir)
}

/// Returns true if `dir` is of one of several controllers: what [`crate::join_controllers`] does last is there.
pub(crate) fn is_one_of_several(dir: &Path) -> bool {
    ENGINE_FILES.iter().any(|name| dir.join(name).exists())
}

/// Refuses a directory with other contents than an unfinished cluster of [`crate::init`].
pub(crate) fn refuse_foreign(dir: &Path) -> Result<(), Error> {
    const OWN: [&str; 4] = [AUTHORITY_FILE, "identity", RECORDS_FILE, "records."];
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        listed => listed.map_err(|source| Error::File { path: dir.to_owned(), source })?,
    };
    for entry in entries {
        let entry = entry.map_err(|source| Error::File { path: dir.to_owned(), source })?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // A copy that is written beside a file before it takes its name has a dot before that name.
        if !OWN.iter().any(|own| name.trim_start_matches('.').starts_with(own)) {
            return Err(Error::Foreign { path: dir.to_owned(), entry: name });
        }
    }
    Ok(())
}

/// Takes a controller's directory from other users of the host, who might read what is written
/// there with a mode that some tool or backup chose.
pub(crate) fn close_to_others(dir: &Path) -> Result<(), Error> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |source| Error::File { path: dir.to_owned(), source };
    let mode = std::fs::metadata(dir).map_err(failed)?.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        let closed = std::fs::Permissions::from_mode(mode & 0o7700);
        std::fs::set_permissions(dir, closed).map_err(failed)?;
        let dir = dir.display();
        tracing::warn!("other users could enter {dir} (mode {mode:o}); they cannot any more");
    }
    Ok(())
}

/// Says in the directory where the records are: its last file.
pub(crate) fn mark_one_of_several(dir: &Path, options: &SharedOptions) -> Result<(), Error> {
    use std::io::Write;
    let path = engine_file(dir, options);
    if path.exists() {
        return Ok(());
    }
    let made = std::fs::File::options().write(true).create_new(true).open(&path);
    let written = made.and_then(|mut file| {
        writeln!(file, "{}", options.engine.place())?;
        file.sync_all()
    });
    written.map_err(|source| Error::File { path, source })
}

pub(crate) fn engine_file(dir: &Path, options: &SharedOptions) -> PathBuf {
    dir.join(format!("records.{}", options.engine.name()))
}
