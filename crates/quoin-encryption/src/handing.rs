//! Handing a data key to the target of this host, over a unix socket beside the volumes' own; and having it
//! wrap one that it has.
//!
//! One JSON object a line, one answer a line. The socket is open to the user of the target alone,
//! and keys cross it and nothing else: they are in no file, no record and no message to another
//! host. A data key never comes back: for another key of its user the target makes a slot of it. A target keeps a key in memory only; one that was restarted must be handed it again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use zeroize::Zeroizing;

use crate::written::{bare_key, bare_user_key};
use crate::{DataKey, KeySlot, UserKey};

/// Name of the socket, in the directory of the volumes' sockets.
pub const SOCKET: &str = "keys.sock";

const LINE_BYTES_MAX: u64 = 4096;
const CLIENTS_MAX: usize = 16;
/// Longest time that a client may take, and that an answer is waited for.
const CALL_MAX: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(100);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Unlock {
        volume: String,
        #[serde(with = "bare_key")]
        key: DataKey,
    },
    Wrap {
        volume: String,
        #[serde(with = "bare_user_key")]
        user: UserKey,
        slot: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Unlocked {},
    Wrapped(KeySlot),
    Refused(Refusal),
}

/// Refusal of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The volume is not assigned to this host, or not yet.
    #[error("its target does not serve the volume yet")]
    NotServed,
    #[error("the volume is not encrypted")]
    NotEncrypted,
    #[error("the key is not that of the volume")]
    WrongKey,
    #[error("the target does not understand the message")]
    Malformed,
    #[error("the target could not use the key")]
    Failed,
}

/// Failure of a hand-over.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the target cannot be reached at {socket}: {source}")]
    Target { socket: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl Error {
    /// Returns whether waiting may help: the target starts, or learns of the volume.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Target { .. } | Self::Refused(Refusal::NotServed))
    }
}

/// Hands a volume's key to the target.
///
/// # Errors
/// [`Error`].
pub async fn hand_over(socket: &Path, volume: &str, key: &DataKey) -> Result<(), Error> {
    let request = Request::Unlock { volume: volume.to_owned(), key: key.clone() };
    match ask(socket, &request).await? {
        Answer::Unlocked {} => Ok(()),
        Answer::Refused(refusal) => Err(refusal.into()),
        Answer::Wrapped(_) => Err(Refusal::Malformed.into()),
    }
}

/// Has the target wrap the data key of a volume, which it has, for another key of a user.
///
/// # Errors
/// [`Error`]; [`Refusal::NotServed`] where the target does not have the data key.
pub async fn wrap(
    socket: &Path,
    volume: &str,
    user: &UserKey,
    slot: &str,
) -> Result<KeySlot, Error> {
    let (volume, user, slot) = (volume.to_owned(), user.clone(), slot.to_owned());
    match ask(socket, &Request::Wrap { volume, user, slot }).await? {
        Answer::Wrapped(slot) => Ok(slot),
        Answer::Refused(refusal) => Err(refusal.into()),
        Answer::Unlocked {} => Err(Refusal::Malformed.into()),
    }
}

async fn ask(socket: &Path, request: &Request) -> Result<Answer, Error> {
    let failed = |source| Error::Target { socket: socket.to_owned(), source };
    let timed_out = |_| failed(std::io::ErrorKind::TimedOut.into());
    let call = async {
        // The line has its largest size at once: a reallocation would leave a copy of the key behind.
        let mut line = Zeroizing::new(Vec::with_capacity(LINE_BYTES_MAX as usize));
        serde_json::to_writer(&mut *line, request).map_err(std::io::Error::from)?;
        line.push(b'\n');
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(&line).await?;
        let mut answer = String::new();
        BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut answer).await?;
        serde_json::from_str(&answer).map_err(std::io::Error::from)
    };
    tokio::time::timeout(CALL_MAX, call).await.map_err(timed_out)?.map_err(failed)
}

/// Hands a key over as [`hand_over`] does, and tries again for so long where waiting may help.
///
/// # Errors
/// The last error.
pub async fn hand_over_within(
    time: Duration,
    socket: &Path,
    volume: &str,
    key: &DataKey,
) -> Result<(), Error> {
    let until = tokio::time::Instant::now() + time;
    loop {
        match hand_over(socket, volume, key).await {
            Err(error) if error.is_temporary() && tokio::time::Instant::now() < until => {
                tokio::time::sleep(RETRY).await;
            }
            done => return done,
        }
    }
}

/// Binds the socket in `directory`; one that a dead target left is replaced.
///
/// # Errors
/// Errors of the system.
pub fn bind(directory: &Path) -> std::io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let path = directory.join(SOCKET);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Target that is handed keys.
pub trait KeyHolder: Send + Sync + 'static {
    /// Takes the data key of a volume, by its id.
    ///
    /// # Errors
    /// The reason why it is not taken.
    fn take(&self, volume: &str, key: DataKey) -> Result<(), Refusal>;

    /// Returns the data key of a volume that was handed over.
    ///
    /// # Errors
    /// [`Refusal::NotServed`]: there is none.
    fn key(&self, volume: &str) -> Result<DataKey, Refusal>;
}

/// Takes keys and wraps them until `shutdown`.
pub async fn serve(
    listener: UnixListener,
    holder: impl KeyHolder,
    mut shutdown: watch::Receiver<bool>,
) {
    let (holder, places) = (Arc::new(holder), Arc::new(Semaphore::new(CLIENTS_MAX)));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = shutdown.wait_for(|down| *down) => return,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(RETRY).await;
            continue;
        };
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let holder = holder.clone();
        tokio::spawn(async move {
            let _place = place;
            // A client that is gone needs no answer.
            let _ = tokio::time::timeout(CALL_MAX, answer(stream, &*holder)).await;
        });
    }
}

async fn answer(stream: UnixStream, holder: &impl KeyHolder) -> std::io::Result<()> {
    let (mut read, mut write) = stream.into_split();
    // Of its largest size at once: a reallocation would leave a copy of the key behind.
    let mut line = Zeroizing::new(vec![0; LINE_BYTES_MAX as usize]);
    let mut filled = 0;
    while filled < line.len() && !line[..filled].ends_with(b"\n") {
        match read.read(&mut line[filled..]).await? {
            0 => break,
            read => filled += read,
        }
    }
    line.truncate(filled);
    let answered = match serde_json::from_slice(&line) {
        Ok(Request::Unlock { volume, key }) => {
            holder.take(&volume, key).map(|()| Answer::Unlocked {})
        }
        Ok(Request::Wrap { volume, user, slot }) => match holder.key(&volume) {
            Ok(key) => wrapped(key, user, slot).await,
            Err(refusal) => Err(refusal),
        },
        Err(_) => Err(Refusal::Malformed),
    };
    let answer = answered.unwrap_or_else(Answer::Refused);
    let mut answer = serde_json::to_vec(&answer)?;
    answer.push(b'\n');
    write.write_all(&answer).await
}

/// The derivation of a key takes some tenths of a second.
async fn wrapped(key: DataKey, user: UserKey, slot: String) -> Result<Answer, Refusal> {
    let wrap = move || KeySlot::wrap(&key, &user, &slot);
    let done = tokio::task::spawn_blocking(wrap).await.map_err(|_| Refusal::Failed)?;
    done.map(Answer::Wrapped).map_err(|error| match error {
        crate::Error::SlotName => Refusal::Malformed,
        _ => Refusal::Failed,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::Encryption;

    /// Target that has the key of volume "v", and serves it from the third request on.
    struct Holder {
        key: DataKey,
        calls: Mutex<u32>,
    }

    impl KeyHolder for Holder {
        fn take(&self, volume: &str, given: DataKey) -> Result<(), Refusal> {
            let mut calls = self.calls.lock().unwrap();
            *calls += 1;
            match volume {
                "v" if *calls < 3 => Err(Refusal::NotServed),
                "v" if given == self.key => Ok(()),
                "v" => Err(Refusal::WrongKey),
                _ => Err(Refusal::NotEncrypted),
            }
        }

        fn key(&self, volume: &str) -> Result<DataKey, Refusal> {
            if volume == "v" { Ok(self.key.clone()) } else { Err(Refusal::NotServed) }
        }
    }

    #[tokio::test]
    async fn the_target_wraps_the_key_that_it_has_for_another_one_and_gives_no_data_key_away() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join(SOCKET);
        let user = |text: &str| UserKey::parse(text.as_bytes()).unwrap();
        let (old, raw, text) =
            (user("correct horse"), user(&"0f".repeat(32)), user("correct\\ \"house\" ü"));
        let mut encryption = Encryption::create(&old, "csi").unwrap();
        let key = encryption.unlock(&old).unwrap().key;
        let (_stop, stopped) = watch::channel(false);
        let holder = Holder { key: key.clone(), calls: Mutex::new(9) };
        tokio::spawn(serve(bind(directory.path()).unwrap(), holder, stopped));
        for new in [&raw, &text] {
            let slot = wrap(&socket, "v", new, "csi").await.unwrap();
            encryption = encryption.with_slot(slot, new).unwrap();
            assert!(encryption.unlock(new).unwrap().key == key);
            assert_eq!(encryption.unlock(&old).unwrap_err(), crate::Error::WrongKey);
        }
        let long = user(&"x".repeat(1024));
        assert!(wrap(&socket, "v", &long, "csi").await.is_ok(), "the longest key fits a line");
        let error = wrap(&socket, "w", &raw, "csi").await.unwrap_err();
        assert!(matches!(error, Error::Refused(Refusal::NotServed)), "{error}");
    }

    #[tokio::test]
    async fn a_key_is_handed_over_once_the_target_serves_the_volume_and_refusals_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join(SOCKET);
        let key = DataKey::random().unwrap();
        let error = hand_over(&socket, "v", &key).await.unwrap_err();
        assert!(error.is_temporary() && error.to_string().contains(SOCKET), "{error}");

        let calls = Mutex::new(0);
        let holder = Holder { key: key.clone(), calls };
        // A file that a dead target left is in the way of nothing.
        std::fs::write(&socket, "").unwrap();
        let (stop, stopped) = watch::channel(false);
        let listener = bind(directory.path()).unwrap();
        let serving = tokio::spawn(serve(listener, holder, stopped));
        hand_over_within(Duration::from_secs(30), &socket, "v", &key).await.unwrap();
        let other = DataKey::random().unwrap();
        for (volume, key, refusal) in
            [("v", &other, Refusal::WrongKey), ("w", &key, Refusal::NotEncrypted)]
        {
            let time = Duration::from_secs(30);
            let error = hand_over_within(time, &socket, volume, key).await.unwrap_err();
            assert!(matches!(error, Error::Refused(found) if found == refusal), "{error}");
        }
        stop.send_replace(true);
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn a_line_that_is_no_request_or_has_no_end_is_refused_and_repeats_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (_stop, stopped) = watch::channel(false);
        let key = DataKey::random().unwrap();
        let holder = Holder { key, calls: Mutex::new(9) };
        tokio::spawn(serve(bind(directory.path()).unwrap(), holder, stopped));
        let secret = "5ec7e7".repeat(30);
        let long = "x".repeat(9000);
        for line in [
            "hello\n".to_owned(),
            format!("{{\"unlock\":{{\"volume\":\"v\",\"key\":\"{secret}\"}}}}\n"),
            format!(
                "{{\"wrap\":{{\"volume\":\"v\",\"user\":{{\"raw\":\"{secret}\"}},\"slot\":\"s\"}}}}\n"
            ),
            format!(
                "{{\"wrap\":{{\"volume\":\"v\",\"user\":{{\"passphrase\":\"{secret}\"}},\"slot\":\"a b\"}}}}\n"
            ),
            long,
        ] {
            let mut stream = UnixStream::connect(directory.path().join(SOCKET)).await.unwrap();
            // The target may answer before it has read everything.
            let _ = stream.write_all(line.as_bytes()).await;
            let mut answer = String::new();
            let _ = BufReader::new(stream).read_line(&mut answer).await;
            assert!(answer.is_empty() || answer.contains("malformed"), "{answer}");
            assert!(!answer.contains("5ec7e7"), "{answer}");
        }
    }
}
