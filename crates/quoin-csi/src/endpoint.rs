//! The socket that the supervisor names, and no other file beside it.
//!
//! `CSI_ENDPOINT` is `unix:///absolute/path.sock`. An existing file is removed only if it is a
//! socket on which no process listens, which a connection attempt shows: a lock file in that
//! directory would violate the interface's rules.

use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// Why there is no socket to serve on.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    #[error("CSI_ENDPOINT is not set; set it to unix:///absolute/path.sock")]
    Missing,
    #[error("CSI_ENDPOINT is {0:?}; only unix:///absolute/path.sock is served")]
    Form(String),
    #[error("CSI_ENDPOINT is {0:?}; the path of a socket ends in .sock")]
    Suffix(String),
    #[error("CSI_ENDPOINT is {0:?}; the system allows 107 bytes for the path of a socket")]
    TooLong(String),
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

/// Returns the path in an endpoint.
///
/// # Errors
/// See [`EndpointError`].
pub fn parse(endpoint: &str) -> Result<PathBuf, EndpointError> {
    if endpoint.is_empty() {
        return Err(EndpointError::Missing);
    }
    let path = endpoint
        .strip_prefix("unix://")
        .filter(|path| path.starts_with('/') && !path.contains('\0'))
        .ok_or_else(|| EndpointError::Form(endpoint.to_owned()))?;
    if !path.ends_with(".sock") {
        return Err(EndpointError::Suffix(endpoint.to_owned()));
    }
    if path.len() > 107 {
        return Err(EndpointError::TooLong(endpoint.to_owned()));
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
        }
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
