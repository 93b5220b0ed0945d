//! The sockets that the supervisor and the operator name, and no other file beside either.
//!
//! `CSI_ENDPOINT` is `unix:///absolute/path.sock`, and so is `--csi-addons-endpoint`. An existing file is removed only if it is a
//! socket on which no process listens, which a connection attempt shows: a lock file in that
//! directory would violate the interface's rules.

use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// Names of the endpoints.
const ENDPOINT: &str = "CSI_ENDPOINT";
const ADDONS_ENDPOINT: &str = "--csi-addons-endpoint";

/// Why there is no socket to serve on.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    #[error("{0} is not set; set it to unix:///absolute/path.sock")]
    Missing(&'static str),
    #[error("{0} is {1:?}; only unix:///absolute/path.sock is served")]
    Form(&'static str, String),
    #[error("{0} is {1:?}; the path of a socket ends in .sock")]
    Suffix(&'static str, String),
    #[error("{0} is {1:?}; the system allows 107 bytes for the path of a socket")]
    TooLong(&'static str, String),
    #[error(
        "{ADDONS_ENDPOINT} is in {0}, the directory of CSI_ENDPOINT, which holds that socket alone; \
         name another directory"
    )]
    SameDirectory(PathBuf),
    #[error("{0} is already served by a running process; stop it first")]
    InUse(PathBuf),
    #[error("{0} exists and is not a socket; move it away")]
    NotASocket(PathBuf),
    #[error("{operation} {path}: {source}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// Returns the path in the endpoint of CSI.
///
/// # Errors
/// See [`EndpointError`].
pub fn parse(endpoint: &str) -> Result<PathBuf, EndpointError> {
    parse_named(ENDPOINT, endpoint)
}

/// Returns the path in the endpoint of CSI-Addons, which is not beside the socket of CSI.
///
/// # Errors
/// See [`EndpointError`].
pub fn parse_addons(endpoint: &str, csi: &Path) -> Result<PathBuf, EndpointError> {
    let path = parse_named(ADDONS_ENDPOINT, endpoint)?;
    // Links are followed as far as the directories exist.
    let directory = |path: &Path| {
        let parent = path.parent().unwrap_or(path);
        parent.canonicalize().unwrap_or_else(|_| parent.components().collect())
    };
    if directory(&path) == directory(csi) {
        return Err(EndpointError::SameDirectory(directory(csi)));
    }
    Ok(path)
}

fn parse_named(name: &'static str, endpoint: &str) -> Result<PathBuf, EndpointError> {
    if endpoint.is_empty() {
        return Err(EndpointError::Missing(name));
    }
    let path = endpoint
        .strip_prefix("unix://")
        .filter(|path| path.starts_with('/') && !path.contains('\0'))
        .ok_or_else(|| EndpointError::Form(name, endpoint.to_owned()))?;
    if !path.ends_with(".sock") {
        return Err(EndpointError::Suffix(name, endpoint.to_owned()));
    }
    if path.len() > 107 {
        return Err(EndpointError::TooLong(name, endpoint.to_owned()));
    }
    Ok(path.into())
}

/// A bound socket, removed when it is dropped (unless another process has replaced it since).
pub struct Socket {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for Socket {
    fn drop(&mut self) {
        if identity(&self.path) == Some(self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Binds and listens; the directory is made where it is missing, as after a restart of the host
/// where it is in memory. Readable and writable for its owner and group.
///
/// # Errors
/// See [`EndpointError`].
pub async fn listen(path: &Path) -> Result<(UnixListener, Socket), EndpointError> {
    let failed = |operation: &'static str| {
        move |source| EndpointError::Io { operation, path: path.to_owned(), source }
    };
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(directory)
            .map_err(failed("making the directory of"))?;
    }
    match std::fs::symlink_metadata(path) {
        Ok(present) if !present.file_type().is_socket() => {
            return Err(EndpointError::NotASocket(path.to_owned()));
        }
        Ok(_) => match tokio::net::UnixStream::connect(path).await {
            Ok(_) => return Err(EndpointError::InUse(path.to_owned())),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(failed("removing the dead socket"))?;
            }
            // A full backlog, for example: a process listens there.
            Err(_) => return Err(EndpointError::InUse(path.to_owned())),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed("looking at")(error)),
    }
    let listener = UnixListener::bind(path).map_err(failed("listening on"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .map_err(failed("setting the permissions of"))?;
    let identity = identity(path).unwrap_or_default();
    Ok((listener, Socket { path: path.to_owned(), identity }))
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves CSI-ENV-04, CSI-ENV-05, CSI-ENV-06, CSI-PROTOCOL-06: accepted and refused endpoints.
    #[test]
    fn only_absolute_unix_sockets_that_end_in_sock_are_endpoints() {
        assert_eq!(parse("unix:///run/csi/csi.sock").unwrap(), Path::new("/run/csi/csi.sock"));
        for bad in [
            "",
            "tcp://127.0.0.1:10000",
            "unix://csi.sock",
            "unix:/run/csi.sock",
            "/run/csi.sock",
            "unix:///run/csi",
            "unix:///run/csi.sock/",
            "http:///run/csi.sock",
            &format!("unix:///{}.sock", "x".repeat(120)),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains("CSI_ENDPOINT"), "{error}");
            let error = parse_addons(bad, Path::new("/run/csi/csi.sock")).unwrap_err().to_string();
            assert!(error.starts_with("--csi-addons-endpoint"), "{error}");
        }
    }

    #[test]
    fn a_path_of_a_socket_is_as_long_as_the_system_takes_and_no_longer() {
        for (bytes, is_taken) in [(106, true), (107, true), (108, false)] {
            let path = format!("/{}.sock", "x".repeat(bytes - 6));
            assert_eq!(path.len(), bytes);
            assert_eq!(parse(&format!("unix://{path}")).is_ok(), is_taken, "{bytes} bytes");
        }
        assert_eq!(parse("unix:///.sock").unwrap(), Path::new("/.sock"));
        assert!(parse("unix:///a\0.sock").is_err());
    }

    /// A program that may open the socket may do with volumes what the orchestrator may.
    #[tokio::test]
    async fn a_socket_is_open_to_its_owner_and_its_group_alone_and_taken_away_by_its_own_process() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        let (listener, socket) = listen(&path).await.unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o660, "{mode:o}");
        // Another process has replaced it since: that one stays.
        std::fs::remove_file(&path).unwrap();
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop((listener, socket));
        assert!(path.exists());
        drop(other);
        let (_listener, socket) = listen(&path).await.unwrap();
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn the_socket_of_csi_addons_is_not_beside_that_of_csi_by_whatever_name_its_directory_has() {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(directory.path(), directory.path().join("link")).unwrap();
        let csi = directory.path().join("csi.sock");
        let in_it = |name: &str| format!("unix://{}/{name}/a.sock", directory.path().display());
        for beside in ["", ".", "link", "./link/."] {
            let error = parse_addons(&in_it(beside), &csi).unwrap_err();
            assert!(matches!(error, EndpointError::SameDirectory(_)), "{error}");
        }
        assert!(parse_addons(&in_it("addons"), &csi).is_ok());
        let none = Path::new("/nowhere/csi/csi.sock");
        assert!(parse_addons("unix:///nowhere/csi/./addons.sock", none).is_err());
        assert!(parse_addons("unix:///nowhere/csi-addons/addons.sock", none).is_ok());
    }

    /// Proves CSI-PROTOCOL-05, CSI-FILESYSTEM-02.
    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left behind, as by a killed process");
        let (listener, socket) = listen(&path).await.unwrap();
        assert!(matches!(listen(&path).await, Err(EndpointError::InUse(_))));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        drop((listener, socket));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);

        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(listen(&path).await, Err(EndpointError::NotASocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        let below_a_file = path.join("csi.sock");
        assert!(matches!(listen(&below_a_file).await, Err(EndpointError::Io { .. })));
    }

    #[tokio::test]
    async fn a_missing_socket_directory_is_created_and_closed_to_other_users() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/csi/csi.sock");
        let _served = listen(&path).await.unwrap();
        let mode = std::fs::metadata(path.parent().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o007, 0, "{mode:o}");
    }
}
