//! Files in a controller's directory.

use std::path::Path;

use crate::Error;

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
