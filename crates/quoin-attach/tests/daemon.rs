//! An attach daemon in a test's own process.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use quoin_attach::fuse::mount::mounts_under;
use quoin_attach::loopdev::LoopDevice;
use quoin_attach::protocol::AttachVolume;
use quoin_attach::{AttachClient, Error, Options, run};
use tokio::sync::watch;

use quoin_testkit::skipped;

pub const SIZE: u64 = 64 << 20;

pub fn have_requirements() -> bool {
    let root = rustix::process::geteuid().is_root();
    let devices = ["/dev/fuse", "/dev/loop-control"].iter().all(|path| Path::new(path).exists());
    if !root || !devices {
        skipped("needs root, /dev/fuse and /dev/loop-control");
    }
    root && devices
}

/// A daemon in this process.
pub struct Daemon {
    pub directory: PathBuf,
    pub client: AttachClient,
    shutdown: watch::Sender<bool>,
    task: tokio::task::JoinHandle<Result<(), Error>>,
}

impl Daemon {
    pub async fn start(directory: &Path) -> Self {
        let mut options = Options::new(directory);
        // The host's own directory of links is for its real devices.
        options.links = directory.join("links");
        let client = AttachClient::new(&options.socket);
        let (shutdown, watched) = watch::channel(false);
        let task = tokio::spawn(run(options, watched));
        while client.list().await.is_err() {
            assert!(!task.is_finished(), "{:?}", task.await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let directory = directory.canonicalize().unwrap();
        Self { directory, client, shutdown, task }
    }

    pub async fn stop(self) -> Result<(), Error> {
        self.shutdown.send(true).unwrap();
        let result = self.task.await.unwrap();
        assert!(mounts_under(&self.directory).unwrap().is_empty(), "a mount is left");
        result
    }
}

pub const KILLABLE_DIRECTORY: &str = "QUOIN_TEST_ATTACH_DIRECTORY";

/// Not a test of its own: the process of a [`Killable`].
#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_that_is_killed() {
    let Some(directory) = std::env::var_os(KILLABLE_DIRECTORY) else { return };
    let (_shutdown, watched) = watch::channel(false);
    run(Options::new(directory), watched).await.unwrap();
}

/// A daemon in a process of its own, which a test kills.
pub struct Killable {
    pub process: Child,
    pub client: AttachClient,
}

impl Killable {
    pub async fn start(directory: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "daemon::the_daemon_that_is_killed"])
            .env(KILLABLE_DIRECTORY, directory)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let client = AttachClient::new(directory.join("attach.sock"));
        while client.list().await.is_err() {
            assert!(process.try_wait().unwrap().is_none());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Self { process, client }
    }
}

/// A loop device and the file that it was bound to. Once it is free another test may have it.
pub struct Bound(LoopDevice, PathBuf);

impl Bound {
    pub fn of(device: &Path) -> Self {
        let device = LoopDevice::at(device.to_owned());
        let file = device.backing_file().unwrap();
        Self(device, file)
    }

    /// Returns whether a device is bound to any file: another program may have been given its number.
    pub fn of_any(device: &Path) -> bool {
        LoopDevice::at(device.to_owned()).backing_file().is_some()
    }

    pub fn is_left(&self) -> bool {
        self.0.backing_file().is_some_and(|file| file == self.1)
    }
}

pub fn asked(volume: &str, socket: &Path) -> AttachVolume {
    AttachVolume {
        volume: volume.into(),
        nbd_socket: socket.to_owned(),
        size: SIZE,
        block_size: 4096,
        read_only: false,
        file_only: false,
        key: None,
    }
}

pub fn sh(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{command}: {said}");
    said
}

pub async fn blocking<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(act).await.unwrap()
}
