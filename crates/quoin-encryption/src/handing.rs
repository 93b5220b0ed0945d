//! Handing a data key to the target of this host, over a unix socket beside the volumes' own.
//!
//! One JSON object a line, one answer a line. The socket is open to the user of the target alone,
//! and a key crosses it and nothing else: it is in no file, no record and no message to another
//! host. A target keeps a key in memory only; one that was restarted must be handed it again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use zeroize::Zeroizing;

use crate::DataKey;
use crate::written::bare_key;

/// Name of the socket, in the directory of the volumes' sockets.
pub const SOCKET: &str = "keys.sock";

const LINE_BYTES_MAX: u64 = 1024;
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
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Unlocked {},
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
    let failed = |source| Error::Target { socket: socket.to_owned(), source };
    let timed_out = |_| failed(std::io::ErrorKind::TimedOut.into());
    let call = async {
        let request = Request::Unlock { volume: volume.to_owned(), key: key.clone() };
        let line = serde_json::to_vec(&request).map_err(std::io::Error::from)?;
        let mut line = Zeroizing::new(line);
        line.push(b'\n');
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(&line).await?;
        let mut answer = String::new();
        BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut answer).await?;
        serde_json::from_str(&answer).map_err(std::io::Error::from)
    };
    match tokio::time::timeout(CALL_MAX, call).await.map_err(timed_out)?.map_err(failed)? {
        Answer::Unlocked {} => Ok(()),
        Answer::Refused(refusal) => Err(refusal.into()),
    }
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

/// Takes keys until `shutdown`. `take` is given the volume's id and the key.
pub async fn serve(
    listener: UnixListener,
    take: impl Fn(&str, DataKey) -> Result<(), Refusal> + Send + Sync + 'static,
    mut shutdown: watch::Receiver<bool>,
) {
    let (take, places) = (Arc::new(take), Arc::new(Semaphore::new(CLIENTS_MAX)));
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
        let take = take.clone();
        tokio::spawn(async move {
            let _place = place;
            // A client that is gone needs no answer.
            let _ = tokio::time::timeout(CALL_MAX, answer(stream, &*take)).await;
        });
    }
}

async fn answer(
    stream: UnixStream,
    take: &(impl Fn(&str, DataKey) -> Result<(), Refusal> + Sync),
) -> std::io::Result<()> {
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
    let taken = match serde_json::from_slice(&line) {
        Ok(Request::Unlock { volume, key }) => take(&volume, key),
        Err(_) => Err(Refusal::Malformed),
    };
    let answer = match taken {
        Ok(()) => Answer::Unlocked {},
        Err(refusal) => Answer::Refused(refusal),
    };
    let mut answer = serde_json::to_vec(&answer)?;
    answer.push(b'\n');
    write.write_all(&answer).await
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn a_key_is_handed_over_once_the_target_serves_the_volume_and_refusals_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join(SOCKET);
        let key = DataKey::random().unwrap();
        let error = hand_over(&socket, "v", &key).await.unwrap_err();
        assert!(error.is_temporary() && error.to_string().contains(SOCKET), "{error}");

        let calls = Mutex::new(0);
        let expected = key.clone();
        let take = move |volume: &str, given: DataKey| {
            let mut calls = calls.lock().unwrap();
            *calls += 1;
            match volume {
                "v" if *calls < 3 => Err(Refusal::NotServed),
                "v" if given == expected => Ok(()),
                "v" => Err(Refusal::WrongKey),
                _ => Err(Refusal::NotEncrypted),
            }
        };
        // A file that a dead target left is in the way of nothing.
        std::fs::write(&socket, "").unwrap();
        let (stop, stopped) = watch::channel(false);
        let listener = bind(directory.path()).unwrap();
        let serving = tokio::spawn(serve(listener, take, stopped));
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
        tokio::spawn(serve(bind(directory.path()).unwrap(), |_, _| Ok(()), stopped));
        let secret = "5ec7e7".repeat(30);
        let long = "x".repeat(5000);
        for line in [
            "hello\n".to_owned(),
            format!("{{\"unlock\":{{\"volume\":\"v\",\"key\":\"{secret}\"}}}}\n"),
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
