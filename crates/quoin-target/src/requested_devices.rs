//! Block devices that were requested from another host.
//!
//! A command on the host itself calls the attach process there. A command on another host calls the
//! controller, whose request comes to this target with the volume: the target then calls the attach
//! process of its host, and reports the outcome. A requested device is made anew where it is gone,
//! as after a restart of the host. One that is not requested any more is removed before its volume
//! is closed, while the data that the kernel still holds for it can be written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_attach::protocol::{AttachVolume, Kind};
use quoin_attach::{AttachClient, Error};
use quoin_types::VolumeId;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Pause between two attempts.
const RETRY: Duration = Duration::from_millis(500);
/// Pause after a refusal that waiting does not change by itself.
const REFUSED: Duration = Duration::from_secs(15);
/// Interval of checks of a device that was made.
const LOOK: Duration = Duration::from_secs(10);
/// Longest wait for one answer of the attach process, which waits for the volume itself.
const CALL_MAX: Duration = Duration::from_secs(60);
/// Longest wait for the removal of a device before its volume is closed.
const DETACH_MAX: Duration = Duration::from_secs(10);

/// State of one device, as reported to the controller.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct DeviceState {
    /// Empty while there is none.
    pub path: String,
    /// Reason why there is none yet.
    pub message: String,
    /// This host cannot make one.
    pub refused: bool,
}

impl DeviceState {
    fn waits(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::default() }
    }
}

struct Wanted {
    volume: watch::Sender<AttachVolume>,
    task: JoinHandle<()>,
}

/// The devices of one host.
pub(crate) struct RequestedDevices {
    daemon: AttachClient,
    socket: PathBuf,
    wanted: Mutex<BTreeMap<VolumeId, Wanted>>,
    /// Devices that are being removed. One that is requested again is made afterwards, or the removal
    /// would take it away.
    removing: Arc<Mutex<BTreeMap<VolumeId, watch::Receiver<()>>>>,
    states: Arc<Mutex<BTreeMap<VolumeId, DeviceState>>>,
    /// Notified of every change.
    changed: Arc<Notify>,
}

impl RequestedDevices {
    /// Returns the socket of the attach process.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn new(run_dir: &Path, changed: Arc<Notify>) -> Self {
        let socket = run_dir.join("attach").join("attach.sock");
        let daemon = AttachClient::new(&socket);
        Self {
            daemon,
            socket,
            wanted: Mutex::default(),
            removing: Arc::default(),
            states: Arc::default(),
            changed,
        }
    }

    /// Returns the state of a volume's device; empty where none is requested.
    pub fn state(&self, volume: VolumeId) -> DeviceState {
        let states = self.states.lock().expect("never held across a panic");
        states.get(&volume).cloned().unwrap_or_default()
    }

    /// Requests a device, with a link to it under the volume's name, or its growth to a new size.
    pub fn want(&self, id: VolumeId, name: &str, asked: AttachVolume) {
        let mut wanted = self.wanted.lock().expect("never held across a panic");
        if let Some(known) = wanted.get(&id) {
            let is_news = |known: &mut AttachVolume| {
                let differs = *known != asked;
                *known = asked;
                differs
            };
            known.volume.send_if_modified(is_news);
            return;
        }
        let (volume, asked) = watch::channel(asked);
        let keeper = Keeper {
            id,
            name: name.to_owned(),
            daemon: self.daemon.clone(),
            socket: self.socket.clone(),
            states: self.states.clone(),
            changed: self.changed.clone(),
        };
        let removing = self.removing.lock().expect("never held across a panic").get(&id).cloned();
        let task = tokio::spawn(async move {
            if let Some(mut removing) = removing {
                // Ends with its sender.
                let _ = removing.changed().await;
            }
            keeper.keep(asked).await;
        });
        wanted.insert(id, Wanted { volume, task });
    }

    /// Removes the device, where one was requested, and then calls `closed`. IO that the kernel
    /// holds for it is written meanwhile, within a bound.
    pub fn release(&self, id: VolumeId, closed: impl FnOnce() + Send + 'static) {
        let mut all = self.wanted.lock().expect("never held across a panic");
        let Some(wanted) = all.remove(&id) else { return closed() };
        drop(all);
        self.states.lock().expect("never held across a panic").remove(&id);
        wanted.task.abort();
        let (daemon, removing) = (self.daemon.clone(), self.removing.clone());
        let (removal, removed) = watch::channel(());
        removing.lock().expect("never held across a panic").insert(id, removed.clone());
        tokio::spawn(async move {
            // A pending request of the task is answered first.
            let _ = wanted.task.await;
            let detached = tokio::time::timeout(DETACH_MAX, daemon.detach(&id.to_string())).await;
            match detached {
                Ok(Ok(()) | Err(Error::Daemon { .. })) => {}
                Ok(Err(error)) => {
                    tracing::warn!(volume = %id, %error, "detached, and its device is still there");
                }
                Err(_) => {
                    tracing::warn!(volume = %id, "detached, and its device does not go away");
                }
            }
            {
                let mut removing = removing.lock().expect("never held across a panic");
                if removing.get(&id).is_some_and(|last| last.same_channel(&removed)) {
                    removing.remove(&id);
                }
            }
            drop(removal);
            closed();
        });
    }

    #[cfg(test)]
    fn has(&self, id: VolumeId) -> bool {
        self.wanted.lock().unwrap().contains_key(&id)
    }
}

/// Task that keeps one device.
struct Keeper {
    id: VolumeId,
    name: String,
    daemon: AttachClient,
    socket: PathBuf,
    states: Arc<Mutex<BTreeMap<VolumeId, DeviceState>>>,
    changed: Arc<Notify>,
}

impl Keeper {
    async fn keep(self, mut asked: watch::Receiver<AttachVolume>) {
        self.tell(DeviceState::waits("its target opens the volume"));
        loop {
            let volume = asked.borrow_and_update().clone();
            // A killed target leaves the file behind.
            let serves = tokio::net::UnixStream::connect(&volume.nbd_socket).await.is_ok();
            let pause = match serves {
                true => self.make(volume).await,
                false => RETRY,
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                changed = asked.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Makes the device, or checks the present one; returns the pause afterwards.
    async fn make(&self, volume: AttachVolume) -> Duration {
        let (size, id) = (volume.size, volume.volume.clone());
        let Ok(answer) = tokio::time::timeout(CALL_MAX, self.daemon.attach(volume)).await else {
            self.tell(DeviceState::waits(
                "the attach process waits for the kernel, or for the volume's IO",
            ));
            return RETRY;
        };
        match answer {
            Ok(attached) => {
                // An older attach process makes no link; the device exists all the same.
                let linked =
                    tokio::time::timeout(CALL_MAX, self.daemon.link(&id, &self.name)).await;
                let link = linked.ok().and_then(|linked| linked.ok()?.link);
                let path = link.unwrap_or(attached.device).display().to_string();
                self.tell(DeviceState { path, ..DeviceState::default() });
                if attached.size < size && self.daemon.resize(&id, size).await.is_err() {
                    return RETRY;
                }
                LOOK
            }
            Err(Error::Refused { kind, message }) => {
                let refused = matches!(kind, Kind::Host | Kind::Invalid | Kind::Conflict);
                self.tell(DeviceState { path: String::new(), message, refused });
                if refused { REFUSED } else { RETRY }
            }
            Err(Error::Daemon { .. }) => {
                self.tell(DeviceState::waits(format!(
                    "no `quoin attach` serves {} on that host: start it there",
                    self.socket.display()
                )));
                RETRY
            }
            Err(error) => {
                self.tell(DeviceState::waits(error.to_string()));
                RETRY
            }
        }
    }

    fn tell(&self, state: DeviceState) {
        let mut states = self.states.lock().expect("never held across a panic");
        if states.insert(self.id, state.clone()) != Some(state) {
            self.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_attach::protocol::{Attached, Request, Response};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;

    /// Time that the removal of a device takes.
    const REMOVAL: Duration = Duration::from_millis(100);

    /// An attach process that answers each request as the test chooses, and records the requests in
    /// the order of their answers.
    fn attach_process(
        run: &Path,
        answer: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> Arc<Mutex<Vec<Request>>> {
        std::fs::create_dir_all(run.join("attach")).unwrap();
        let listener = UnixListener::bind(run.join("attach/attach.sock")).unwrap();
        let asked: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (noted, answer) = (asked.clone(), Arc::new(answer));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (noted, answer) = (noted.clone(), answer.clone());
                tokio::spawn(async move {
                    let mut stream = BufReader::new(stream);
                    let mut line = String::new();
                    stream.read_line(&mut line).await.unwrap();
                    let request: Request = serde_json::from_str(&line).unwrap();
                    if matches!(request, Request::Detach { .. }) {
                        tokio::time::sleep(REMOVAL).await;
                    }
                    let mut text = serde_json::to_string(&answer(&request)).unwrap();
                    noted.lock().unwrap().push(request);
                    text.push('\n');
                    let _ = stream.get_mut().write_all(text.as_bytes()).await;
                });
            }
        });
        asked
    }

    fn volume(run: &Path) -> AttachVolume {
        AttachVolume {
            volume: VolumeId(7).to_string(),
            nbd_socket: run.join("7.sock"),
            size: 1 << 20,
            block_size: 4096,
            read_only: false,
            file_only: false,
            key: None,
        }
    }

    fn attached(asked: &AttachVolume) -> Response {
        Response::Ok(Attached {
            volume: asked.volume.clone(),
            device: "/dev/loop7".into(),
            nbd_socket: asked.nbd_socket.clone(),
            size: asked.size,
            block_size: asked.block_size,
            read_only: false,
            file_only: false,
            connected: true,
            in_flight: 0,
            link: None,
            dead: String::new(),
        })
    }

    async fn until(devices: &RequestedDevices, is_so: impl Fn(&DeviceState) -> bool) {
        let waited = async {
            while !is_so(&devices.state(VolumeId(7))) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), waited).await;
        waited.unwrap_or_else(|_| panic!("{:?}", devices.state(VolumeId(7))));
    }

    #[tokio::test]
    async fn a_device_is_made_once_the_volume_is_served_and_taken_away_before_it_is_closed() {
        let run = tempfile::tempdir().unwrap();
        let asked = attach_process(run.path(), |request| match request {
            Request::Attach(volume) => attached(volume),
            Request::Link { name, .. } => {
                let Response::Ok(device) = attached(&volume(Path::new("/run"))) else { panic!() };
                Response::Ok(Attached { link: Some(Path::new("/dev/quoin").join(name)), ..device })
            }
            _ => Response::Detached {},
        });
        let devices = RequestedDevices::new(run.path(), Arc::default());
        devices.want(VolumeId(7), "db", volume(run.path()));
        until(&devices, |state| state.message.contains("opens")).await;
        let _served = UnixListener::bind(run.path().join("7.sock")).unwrap();
        until(&devices, |state| state.path == "/dev/quoin/db").await;
        let (closed, is_closed) = tokio::sync::oneshot::channel();
        devices.release(VolumeId(7), move || closed.send(()).unwrap());
        is_closed.await.unwrap();
        assert!(!devices.has(VolumeId(7)));
        let asked = asked.lock().unwrap();
        assert!(matches!(asked.last(), Some(Request::Detach { .. })), "{asked:?}");
    }

    #[tokio::test]
    async fn a_device_that_is_requested_again_is_made_once_the_former_one_is_gone() {
        let run = tempfile::tempdir().unwrap();
        let asked = attach_process(run.path(), |request| match request {
            Request::Attach(volume) => attached(volume),
            Request::Link { .. } => attached(&volume(Path::new("/run"))),
            _ => Response::Detached {},
        });
        let devices = RequestedDevices::new(run.path(), Arc::default());
        let _served = UnixListener::bind(run.path().join("7.sock")).unwrap();
        devices.want(VolumeId(7), "db", volume(run.path()));
        until(&devices, |state| !state.path.is_empty()).await;
        let (closed, is_closed) = tokio::sync::oneshot::channel();
        devices.release(VolumeId(7), move || closed.send(()).unwrap());
        devices.want(VolumeId(7), "db", volume(run.path()));
        until(&devices, |state| !state.path.is_empty()).await;
        is_closed.await.unwrap();
        let asked = asked.lock().unwrap();
        let steps: String = asked
            .iter()
            .map(|request| match request {
                Request::Attach(_) => 'a',
                Request::Detach { .. } => 'd',
                _ => 'l',
            })
            .collect();
        assert_eq!(steps, "aldal");
        assert!(devices.removing.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_host_that_can_make_none_says_so_and_one_without_an_attach_process_what_to_start() {
        let run = tempfile::tempdir().unwrap();
        let _served = UnixListener::bind(run.path().join("7.sock")).unwrap();
        let devices = RequestedDevices::new(run.path(), Arc::default());
        devices.want(VolumeId(7), "db", volume(run.path()));
        until(&devices, |state| state.message.contains("quoin attach")).await;
        assert!(!devices.state(VolumeId(7)).refused);
        let refusal = |_: &Request| Response::Error {
            kind: Kind::Host,
            message: "there is no /dev/fuse".into(),
        };
        attach_process(run.path(), refusal);
        until(&devices, |state| state.refused && state.message.contains("/dev/fuse")).await;
    }

    #[tokio::test]
    async fn a_volume_without_a_device_is_closed_at_once() {
        let run = tempfile::tempdir().unwrap();
        let devices = RequestedDevices::new(run.path(), Arc::default());
        let (closed, is_closed) = std::sync::mpsc::channel();
        devices.release(VolumeId(7), move || closed.send(()).unwrap());
        is_closed.try_recv().expect("nothing was waited for");
    }
}
