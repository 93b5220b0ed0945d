//! The source of a node's block devices.
//!
//! The attach process serves FUSE files and loop devices and outlives this process; [`Attacher`] is
//! all that the node needs of it, so that tests can use a plain loop device instead.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use quoin_encryption::handing::{self, Refusal};
use quoin_encryption::{DataKey, KeySlot, UserKey};
use tokio::io::AsyncReadExt;

use crate::error::Error;

/// Shortest and longest time between two looks for a target that does not listen yet.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Volume to be attached as a block device of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachRequest {
    /// 32 hex digits.
    pub volume: String,
    /// Socket on which the target serves the volume.
    pub nbd_socket: PathBuf,
    pub size_bytes: u64,
    /// Logical block: 512 or 4096.
    pub block_size: u32,
    pub read_only: bool,
    /// Key of an encrypted volume.
    pub key: Option<DataKey>,
}

/// A volume's block device, and the way of its IO.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Session {
    /// `None`: it has none.
    pub device: Option<PathBuf>,
    /// The target answers; IO waits otherwise.
    pub is_connected: bool,
    /// Why all its IO fails for good.
    pub dead: Option<String>,
}

/// Attaches and detaches block devices. Every call is idempotent. Devices outlive their caller.
#[async_trait]
pub trait Attacher: Send + Sync {
    /// Returns the device of the volume; makes it if it is not there yet.
    async fn attach(&self, request: &AttachRequest) -> Result<PathBuf, Error>;
    /// Removes the volume's device, if there is one. The caller ensures that nothing uses it.
    async fn detach(&self, volume: &str) -> Result<(), Error>;
    /// Makes the device show a new size; no effect on a volume that is not attached.
    async fn resize(&self, volume: &str, size_bytes: u64) -> Result<(), Error>;
    /// Returns the device of the volume, if it is attached.
    async fn device(&self, volume: &str) -> Result<Option<PathBuf>, Error>;
    /// Returns the device of the volume and whether its IO gets through now.
    async fn session(&self, volume: &str) -> Result<Session, Error> {
        let device = self.device(volume).await?;
        Ok(Session { device, is_connected: true, dead: self.dead(volume).await? })
    }
    /// Returns why all IO of the volume's device fails for good: another node has used the volume
    /// since the device was made. `None`: the device is usable.
    async fn dead(&self, _volume: &str) -> Result<Option<String>, Error> {
        Ok(None)
    }
}

/// Hands a volume's key to the target whose sockets are in `directory`.
///
/// # Errors
/// [`Error::WrongKey`], or [`Error::Waiting`] after `deadline_ms`.
pub async fn hand_key(
    volume: &str,
    directory: &Path,
    key: &DataKey,
    deadline_ms: u64,
) -> Result<(), Error> {
    let (socket, time) = (directory.join(handing::SOCKET), Duration::from_millis(deadline_ms));
    match handing::hand_over_within(time, &socket, volume, key).await {
        Ok(()) => Ok(()),
        Err(handing::Error::Refused(Refusal::WrongKey | Refusal::NotEncrypted)) => {
            Err(Error::WrongKey { volume: volume.to_owned() })
        }
        Err(error) => Err(Error::Waiting {
            what: format!("the target of volume {volume} to take its key: {error}"),
            waited_ms: deadline_ms,
            way_out: "`quoin volume get` shows the reason, and this call may be repeated",
        }),
    }
}

/// Has the target whose sockets are in `directory` wrap a volume's key for another key of a user. `None`: no
/// target there has the volume's key.
///
/// # Errors
/// [`Error::Waiting`] where the target could not do it.
pub async fn wrap_key(
    volume: &str,
    directory: &Path,
    user: &UserKey,
    slot: &str,
) -> Result<Option<KeySlot>, Error> {
    match handing::wrap(&directory.join(handing::SOCKET), volume, user, slot).await {
        Ok(slot) => Ok(Some(slot)),
        Err(handing::Error::Refused(Refusal::NotServed | Refusal::NotEncrypted)) => Ok(None),
        Err(handing::Error::Target { .. }) => Ok(None),
        Err(error) => Err(Error::Waiting {
            what: format!("the target of volume {volume} to wrap its key: {error}"),
            waited_ms: 0,
            way_out: "this call may be repeated",
        }),
    }
}

/// Waits until a target listens on `socket`.
///
/// # Errors
/// [`Error::Waiting`] after `deadline_ms`, with what was waited for.
pub async fn wait_for_socket(volume: &str, socket: &Path, deadline_ms: u64) -> Result<(), Error> {
    let started = Instant::now();
    let deadline = Duration::from_millis(deadline_ms);
    loop {
        // The file alone proves nothing: a killed target leaves it behind.
        if tokio::net::UnixStream::connect(socket).await.is_ok() {
            return Ok(());
        }
        if started.elapsed() >= deadline {
            return Err(Error::Waiting {
                what: format!("the target of volume {volume} to listen on {}", socket.display()),
                waited_ms: deadline_ms,
                way_out: "`quoin volume get` shows the reason, and this call may \
                          be repeated",
            });
        }
        // Most targets listen within some milliseconds, and the others may take long.
        let pause = started.elapsed() / 8;
        tokio::time::sleep(pause.clamp(PAUSE_MIN, PAUSE_MAX)).await;
    }
}

/// Returns whether the listener of `socket` takes connections and says nothing, as a process that was
/// stopped. A target greets each client at once; one that is away is no case of this.
pub async fn is_frozen(socket: &Path, deadline: Duration) -> bool {
    let greeted = async {
        match tokio::net::UnixStream::connect(socket).await {
            // The first byte is proof enough, and so is the end of the connection.
            Ok(mut stream) => drop(stream.read_u8().await),
            // A full queue has a listener behind it, which takes no client from it.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::future::pending().await
            }
            Err(_) => {}
        }
    };
    tokio::time::timeout(deadline, greeted).await.is_err()
}

#[cfg(test)]
mod tests {
    use quoin_encryption::handing::KeyHolder;

    use super::*;

    /// A target that serves one encrypted volume, "v", and one that is not, "plain".
    struct Holder(DataKey);

    impl KeyHolder for Holder {
        fn take(&self, volume: &str, given: DataKey) -> Result<(), Refusal> {
            match volume {
                "v" if given == self.0 => Ok(()),
                "v" => Err(Refusal::WrongKey),
                "plain" => Err(Refusal::NotEncrypted),
                _ => Err(Refusal::NotServed),
            }
        }

        fn key(&self, volume: &str) -> Result<DataKey, Refusal> {
            match volume {
                "v" => Ok(self.0.clone()),
                "plain" => Err(Refusal::NotEncrypted),
                "broken" => Err(Refusal::Failed),
                _ => Err(Refusal::NotServed),
            }
        }
    }

    /// The table of a target's answers, and of one that is away.
    #[tokio::test]
    async fn each_answer_to_a_key_is_told_for_what_it_is() {
        use crate::Kind;
        let directory = tempfile::tempdir().unwrap();
        let user = UserKey::parse("ab".repeat(32).as_bytes()).unwrap();
        let drawn = || {
            let encryption = quoin_encryption::Encryption::create(&user, "csi").unwrap();
            encryption.unlock(&user).unwrap().key
        };
        let (key, other) = (drawn(), drawn());
        let away = hand_key("v", directory.path(), &key, 20).await.unwrap_err();
        assert_eq!(away.kind(), Kind::Unavailable, "{away}");
        assert!(wrap_key("v", directory.path(), &user, "csi").await.unwrap().is_none(), "away");
        let (_stop, stopped) = tokio::sync::watch::channel(false);
        let listener = handing::bind(directory.path()).unwrap();
        tokio::spawn(handing::serve(listener, Holder(key.clone()), stopped));
        for (volume, given, kind) in [
            ("v", &key, None),
            ("v", &other, Some(Kind::Unauthenticated)),
            ("plain", &key, Some(Kind::Unauthenticated)),
            ("nowhere", &key, Some(Kind::Unavailable)),
        ] {
            let handed = hand_key(volume, directory.path(), given, 120).await;
            assert_eq!(handed.err().map(|error| error.kind()), kind, "{volume}");
        }
        for (volume, is_wrapped) in
            [("v", Ok(true)), ("plain", Ok(false)), ("nowhere", Ok(false)), ("broken", Err(()))]
        {
            let wrapped = wrap_key(volume, directory.path(), &user, "csi").await;
            let found = wrapped.map(|slot| slot.is_some()).map_err(|error| {
                assert_eq!(error.kind(), Kind::Unavailable);
            });
            assert_eq!(found, is_wrapped, "{volume}");
        }
    }

    #[tokio::test]
    async fn a_listener_that_says_nothing_is_frozen_and_one_that_is_away_or_greets_is_not() {
        use tokio::io::AsyncWriteExt;
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("v.sock");
        let short = Duration::from_millis(50);
        assert!(!is_frozen(&socket, short).await, "away");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        assert!(is_frozen(&socket, short).await);
        let full = directory.path().join("full.sock");
        let stopped = std::os::unix::net::UnixListener::bind(&full).unwrap();
        rustix::net::listen(&stopped, 0).unwrap();
        for look in 0..3 {
            assert!(is_frozen(&full, short).await, "look {look}");
        }
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(b"NBDMAGIC").await;
            }
        });
        assert!(!is_frozen(&socket, Duration::from_secs(30)).await);
    }

    #[tokio::test]
    async fn a_target_that_never_listens_is_reported_with_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("v.sock");
        let started = Instant::now();
        let error = wait_for_socket("v", &socket, 30).await.unwrap_err();
        let waited = Duration::from_millis(30)..Duration::from_secs(10);
        assert!(waited.contains(&started.elapsed()), "{:?}", started.elapsed());
        assert!(error.to_string().contains("v.sock"), "{error}");
        assert_eq!(error.kind(), crate::Kind::Unavailable);
    }

    #[tokio::test]
    async fn a_socket_file_of_a_dead_target_is_not_taken_for_a_listener() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("v.sock");
        drop(tokio::net::UnixListener::bind(&socket).unwrap());
        assert!(socket.exists());
        assert!(wait_for_socket("v", &socket, 30).await.is_err());
        std::fs::remove_file(&socket).unwrap();
        let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
        wait_for_socket("v", &socket, 1000).await.unwrap();
    }
}
