//! The attach process of this host as an [`Attacher`].

use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use quoin_attach::AttachClient;
use quoin_attach::protocol::{AttachVolume, Kind};

use crate::attach::{AttachRequest, Attacher, Session};
use crate::error::Error;

/// Time for which a device that was just unmounted may still be held by others: the kernel's own
/// clean-up, or a program that probes every new device.
const RELEASE_TIME: Duration = Duration::from_secs(3);

/// Client of the daemon behind a control socket, with one connection a call.
pub struct AttachProcess {
    client: AttachClient,
}

impl AttachProcess {
    /// Connects only when called; the daemon may start later.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { client: AttachClient::new(socket) }
    }
}

/// Longest wait for an answer of the daemon. It works on behind: a device that waits for the IO of
/// its volume holds up the calls of that volume alone.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Waits for an answer about a volume.
async fn answered<T>(
    volume: &str,
    what: &str,
    answer: impl Future<Output = Result<T, quoin_attach::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(ANSWER_MAX, answer).await {
        Ok(answer) => answer.map_err(refused),
        Err(_) => Err(Error::Waiting {
            what: format!("the attach process {what} the device of volume {volume}"),
            waited_ms: u64::try_from(ANSWER_MAX.as_millis()).unwrap_or(u64::MAX),
            way_out: "it goes on with that, and this call may be repeated; `quoin volume doctor` \
                      says what the volume's IO waits for",
        }),
    }
}

#[async_trait]
impl Attacher for AttachProcess {
    async fn attach(&self, request: &AttachRequest) -> Result<PathBuf, Error> {
        let wanted = AttachVolume {
            volume: request.volume.clone(),
            nbd_socket: request.nbd_socket.clone(),
            size: request.size_bytes,
            block_size: request.block_size,
            read_only: request.read_only,
            file_only: false,
            key: request.key.clone(),
        };
        let attached = answered(&request.volume, "to make", self.client.attach(wanted)).await?;
        Ok(attached.device)
    }

    async fn detach(&self, volume: &str) -> Result<(), Error> {
        let started = Instant::now();
        let detach = async || loop {
            match self.client.detach(volume).await {
                Err(quoin_attach::Error::Refused { kind: Kind::Busy, .. })
                    if started.elapsed() < RELEASE_TIME =>
                {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                outcome => return outcome,
            }
        };
        answered(volume, "to remove", detach()).await
    }

    async fn resize(&self, volume: &str, size_bytes: u64) -> Result<(), Error> {
        if self.device(volume).await?.is_none() {
            return Ok(());
        }
        answered(volume, "to resize", self.client.resize(volume, size_bytes)).await.map(drop)
    }

    async fn device(&self, volume: &str) -> Result<Option<PathBuf>, Error> {
        Ok(self.session(volume).await?.device)
    }

    async fn session(&self, volume: &str) -> Result<Session, Error> {
        let Some(own) = answered(volume, "to name", self.client.find(volume)).await? else {
            return Ok(Session::default());
        };
        let dead = Some(own.dead).filter(|why| !why.is_empty());
        Ok(Session { device: Some(own.device), is_connected: own.connected, dead })
    }

    async fn dead(&self, volume: &str) -> Result<Option<String>, Error> {
        Ok(self.session(volume).await?.dead)
    }
}

fn refused(error: quoin_attach::Error) -> Error {
    let message = error.to_string();
    match error {
        // Missing /dev/fuse, loop devices or privileges: no retry helps.
        quoin_attach::Error::Refused { kind: Kind::Host | Kind::Conflict, .. } => {
            Error::AttachImpossible(message)
        }
        _ => Error::Attach(message),
    }
}

#[cfg(test)]
mod tests {
    use quoin_attach::protocol::Kind as AttachKind;

    use super::*;
    use crate::Kind;

    #[tokio::test]
    async fn a_missing_attach_process_is_reported_with_its_socket_and_the_way_out() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("attach.sock");
        let error = AttachProcess::new(&socket).device("v").await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("attach.sock") && text.contains("quoin attach"), "{text}");
    }

    #[tokio::test]
    async fn a_device_is_dead_only_if_its_own_volume_is_reported_dead() {
        use quoin_attach::protocol::{Attached, Request, Response};
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("attach.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let attached = |volume: &str, dead: &str| Attached {
            volume: volume.into(),
            device: format!("/dev/of-{volume}").into(),
            nbd_socket: "/run/db.sock".into(),
            size: 4096,
            block_size: 4096,
            read_only: false,
            file_only: false,
            connected: true,
            in_flight: 0,
            link: None,
            dead: dead.into(),
        };
        let all = [attached("1", "another node has it"), attached("2", "")];
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = Vec::new();
                while let Ok(byte) = stream.read_u8().await {
                    request.push(byte);
                    if byte == b'\n' {
                        break;
                    }
                }
                let Ok(Request::Find { volume }) = serde_json::from_slice(&request) else { return };
                let found = all.iter().filter(|one| one.volume == volume).cloned().collect();
                let answer = serde_json::to_string(&Response::List(found)).unwrap();
                stream.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        let process = AttachProcess::new(&socket);
        assert_eq!(process.dead("1").await.unwrap().as_deref(), Some("another node has it"));
        assert_eq!(process.dead("2").await.unwrap(), None);
        assert_eq!(process.dead("3").await.unwrap(), None);
        assert_eq!(process.device("2").await.unwrap(), Some("/dev/of-2".into()));
        let session = process.session("1").await.unwrap();
        assert_eq!(session.device, Some("/dev/of-1".into()));
        assert_eq!(session.dead.as_deref(), Some("another node has it"));
        assert!(session.is_connected && process.session("2").await.unwrap().dead.is_none());
        assert_eq!(process.session("3").await.unwrap(), Session::default());
    }

    /// A daemon that answers each request with the next of these answers, and keeps the requests.
    async fn daemon(
        directory: &std::path::Path,
        answers: Vec<quoin_attach::protocol::Response>,
    ) -> (AttachProcess, std::sync::Arc<std::sync::Mutex<Vec<quoin_attach::protocol::Request>>>)
    {
        use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
        let socket = directory.join("attach.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let heard = asked.clone();
        tokio::spawn(async move {
            for answer in answers {
                let mut stream = BufReader::new(listener.accept().await.unwrap().0);
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                heard.lock().unwrap().push(serde_json::from_str(&line).unwrap());
                let mut reply = serde_json::to_vec(&answer).unwrap();
                reply.push(b'\n');
                stream.get_mut().write_all(&reply).await.unwrap();
            }
        });
        (AttachProcess::new(&socket), asked)
    }

    #[tokio::test]
    async fn every_property_of_a_volume_is_asked_for_as_it_was_given() {
        use quoin_attach::protocol::{Attached, Request, Response};
        for read_only in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let attached = Attached {
                volume: "v".into(),
                device: "/dev/loop7".into(),
                nbd_socket: "/run/v.sock".into(),
                size: 8192,
                block_size: 512,
                read_only,
                file_only: false,
                connected: true,
                in_flight: 0,
                link: None,
                dead: String::new(),
            };
            let (process, asked) = daemon(directory.path(), vec![Response::Ok(attached)]).await;
            let request = AttachRequest {
                volume: "v".into(),
                nbd_socket: "/run/v.sock".into(),
                size_bytes: 8192,
                block_size: 512,
                read_only,
                key: None,
            };
            assert_eq!(process.attach(&request).await.unwrap(), PathBuf::from("/dev/loop7"));
            let expected = AttachVolume {
                volume: "v".into(),
                nbd_socket: "/run/v.sock".into(),
                size: 8192,
                block_size: 512,
                read_only,
                file_only: false,
                key: None,
            };
            assert_eq!(*asked.lock().unwrap(), [Request::Attach(expected)]);
        }
    }

    #[tokio::test]
    async fn a_device_that_is_busy_is_asked_for_again_and_any_other_refusal_is_told_at_once() {
        use quoin_attach::protocol::{Request, Response};
        let refusal = |kind| Response::Error { kind, message: "why".into() };
        let directory = tempfile::tempdir().unwrap();
        let answers =
            vec![refusal(AttachKind::Busy), refusal(AttachKind::Busy), Response::Detached {}];
        let (process, asked) = daemon(directory.path(), answers).await;
        process.detach("v").await.unwrap();
        let once = || Request::Detach { volume: "v".into() };
        assert_eq!(*asked.lock().unwrap(), [once(), once(), once()]);
        for kind in [AttachKind::Host, AttachKind::Unavailable, AttachKind::Conflict] {
            let directory = tempfile::tempdir().unwrap();
            let answers = vec![refusal(kind), Response::Detached {}];
            let (process, asked) = daemon(directory.path(), answers).await;
            process.detach("v").await.unwrap_err();
            assert_eq!(asked.lock().unwrap().len(), 1, "{kind:?}");
        }
    }

    #[tokio::test]
    async fn only_a_volume_that_is_attached_is_resized() {
        use quoin_attach::protocol::{Request, Response};
        let directory = tempfile::tempdir().unwrap();
        let (process, asked) =
            daemon(directory.path(), vec![Response::List(Vec::new()), Response::Detached {}]).await;
        process.resize("v", 8192).await.unwrap();
        assert_eq!(*asked.lock().unwrap(), [Request::Find { volume: "v".into() }]);
    }

    /// The orchestrator retries what is unavailable, and reports everything else to a user.
    #[test]
    fn what_the_host_lacks_is_a_failed_precondition_and_not_retried() {
        let of = |kind: AttachKind| {
            let message = "no /dev/fuse: `modprobe fuse`".to_owned();
            let error = refused(quoin_attach::Error::Refused { kind, message });
            assert!(error.to_string().contains("modprobe fuse"), "{error}");
            error.kind()
        };
        assert_eq!(of(AttachKind::Host), Kind::FailedPrecondition);
        assert_eq!(of(AttachKind::Conflict), Kind::FailedPrecondition);
        assert_eq!(of(AttachKind::Unavailable), Kind::Unavailable);
        assert_eq!(of(AttachKind::Busy), Kind::Unavailable);
    }
}
