//! The unix socket on which a volume is served.
//!
//! The socket appears with mode 0600 and listening, never half-made: bound under another name, then
//! renamed. A path that a dead process left is replaced; one with a listener is not.

use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("{0} is in use by another process: is another target running on this node?")]
    InUse(PathBuf),
    #[error("cannot {operation} {path}: {source}")]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
}

/// A listening socket whose path is removed with it.
#[derive(Debug)]
pub struct Socket {
    pub listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        Ok(Socket { listener: bind(path)?, path: path.to_owned() })
    }
}

/// Listens at a path. A path that a dead process left is replaced.
pub fn bind(path: &Path) -> Result<UnixListener, ListenError> {
    let failed = |operation, path: &Path| {
        let path = path.to_owned();
        move |source| ListenError::Io { operation, path, source }
    };
    match knock(path) {
        // A full queue has a listener behind it.
        Ok(()) | Err(Errno::AGAIN) => return Err(ListenError::InUse(path.to_owned())),
        Err(Errno::NOENT | Errno::CONNREFUSED) => {}
        Err(errno) => return Err(failed("look at", path)(errno.into())),
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
    Ok(listener)
}

/// Connects to find a listener, without waiting: the calling shard serves volumes.
fn knock(path: &Path) -> rustix::io::Result<()> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A path that is left behind is stale, and the next bind replaces it.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

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

    #[test]
    fn a_path_whose_listener_takes_nobody_in_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let hung = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&hung, 0).unwrap();
        let mut waiting = Vec::new();
        while knock(&path).is_ok() {
            // A connection that is not accepted waits in the queue as long as the listener lives.
            waiting.push(());
            assert!(waiting.len() < 100, "the queue has no end");
        }
        assert!(matches!(Socket::bind(&path), Err(ListenError::InUse(_))));
        drop(hung);
        Socket::bind(&path).unwrap();
    }
}
