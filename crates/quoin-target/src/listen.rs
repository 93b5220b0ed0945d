//! The unix socket on which a volume is served.
//!
//! It appears with mode 0600 and listening, never half-made: bound under another name, then
//! renamed. A path that a dead process left is replaced; one that somebody listens on is not.

use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("{0} is in use by another process: is another target running on this node?")]
    InUse(PathBuf),
    #[error("cannot {operation} {path}: {source}")]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
}

/// A listening socket whose path goes away with it.
#[derive(Debug)]
pub struct Socket {
    pub listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let failed = |operation, path: &Path| {
            let path = path.to_owned();
            move |source| ListenError::Io { operation, path, source }
        };
        match UnixStream::connect(path) {
            Ok(_) => return Err(ListenError::InUse(path.to_owned())),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {}
            Err(source) => return Err(failed("look at", path)(source)),
        }
        let temporary = path.with_extension("new");
        match std::fs::remove_file(&temporary) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(failed("remove", &temporary)(e));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&temporary).map_err(failed("bind", &temporary))?;
        listener.set_nonblocking(true).map_err(failed("prepare", &temporary))?;
        std::fs::set_permissions(&temporary, Permissions::from_mode(0o600))
            .map_err(failed("protect", &temporary))?;
        std::fs::rename(&temporary, path).map_err(failed("put in place", path))?;
        Ok(Socket { listener, path: path.to_owned() })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Left behind it is stale, and the next bind replaces it.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_left_by_a_dead_process_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let stale = UnixListener::bind(&path).unwrap();
        drop(stale);
        assert!(path.exists());
        let socket = Socket::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_somebody_listens_on_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let _other = UnixListener::bind(&path).unwrap();
        assert!(matches!(Socket::bind(&path), Err(ListenError::InUse(_))));
        UnixStream::connect(&path).unwrap();
    }
}
