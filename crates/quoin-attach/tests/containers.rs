//! Daemon and holder in containers: each in a mount namespace of its own, which ends with it. These tests need root,
//! FUSE, loop devices and unshare(1), and report it if they are missing.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use quoin_attach::loopdev::LoopDevice;
use quoin_attach::{AttachClient, Error, Options, holder, run};
use quoin_testkit::have;
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};
use tokio::sync::watch;

use crate::daemon::{KILLABLE_DIRECTORY, SIZE, asked, blocking, have_requirements};

const HOLDER: &str = "QUOIN_TEST_HOLDER_SOCKET";
const GROWN: u64 = SIZE + (16 << 20);

/// Not a test of its own: the holder of the tests below.
#[test]
fn the_holder_in_a_container() {
    let Some(socket) = std::env::var_os(HOLDER) else { return };
    panic!("{}", holder::serve(Path::new(&socket)).unwrap_err());
}

/// A process that is alone in its mount namespace.
struct Container(Child);

impl Container {
    /// Runs a test of this program, by its name, with one variable. `propagation` is that of all mounts.
    fn start(propagation: &str, test: &str, variable: (&str, &Path)) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", propagation]);
        command.arg(std::env::current_exe().unwrap()).args(["--exact", test]);
        command.env(variable.0, variable.1).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }

    async fn daemon(directory: &Path) -> (Self, AttachClient) {
        let test = "daemon::the_daemon_that_is_killed";
        let mut this = Self::start("private", test, (KILLABLE_DIRECTORY, directory));
        let client = AttachClient::new(directory.join("attach.sock"));
        while client.list().await.is_err() {
            assert!(this.0.try_wait().unwrap().is_none());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        (this, client)
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_ends_with_its_mount_namespace_costs_its_devices_a_pause_and_no_error() {
    if !have_requirements() || !have("unshare") {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().canonicalize().unwrap();
    let socket = directory.join("nbd.sock");
    let _server = Server::start(&socket, volume(GROWN as usize), ServerOptions::default());
    let held = directory.join("holder.sock");
    let _holder =
        Container::start("private", "containers::the_holder_in_a_container", (HOLDER, &held));
    while !held.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (mut daemon, client) = Container::daemon(&directory).await;
    let device = client.attach(asked("17", &socket)).await.unwrap().device;
    let (ends, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (ends, written, device) = (ends.clone(), written.clone(), device.clone());
        std::thread::spawn(move || -> std::io::Result<()> {
            let file = std::fs::File::options().write(true).open(device)?;
            while !ends.load(Ordering::Relaxed) {
                let number = written.load(Ordering::Relaxed);
                file.write_all_at(&[number as u8; 4096], (number % 1000) * 4096)?;
                file.sync_data()?;
                written.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        })
    };
    // The second death meets a daemon that took the device over without its mount.
    for _ in 0..2 {
        daemon.kill();
        daemon = Container::daemon(&directory).await.0;
        let listed = client.list().await.unwrap();
        assert_eq!(listed.first().map(|one| &one.device), Some(&device), "it is taken over");
        let before = written.load(Ordering::Relaxed);
        while written.load(Ordering::Relaxed) < before + 3 {
            assert!(!writer.is_finished(), "{:?}", writer.join());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    // A kernel before Linux 6.17 does not ask for the size by itself, and the answer says the way out.
    let grown = client.resize("17", GROWN).await;
    let sectors = std::fs::read_to_string(
        Path::new("/sys/block").join(device.file_name().unwrap()).join("size"),
    );
    match grown {
        Ok(_) => assert_eq!(sectors.unwrap().trim(), (GROWN / 512).to_string()),
        Err(error) => assert!(error.to_string().contains("detached and attached"), "{error}"),
    }
    ends.store(true, Ordering::Relaxed);
    blocking(move || writer.join().unwrap()).await.unwrap();

    // The same volume is detached and attached by the successor as by any daemon.
    client.detach("17").await.unwrap();
    assert_eq!(LoopDevice::at(device).backing_file(), None);
    let again = client.attach(asked("17", &socket)).await.unwrap();
    assert_eq!(again.size, SIZE);
    // Freed by another program where its file is mounted no more, it is made anew as a whole.
    daemon.kill();
    let (_daemon, client) = Container::daemon(&directory).await;
    LoopDevice::at(again.device.clone()).release().unwrap();
    while LoopDevice::at(again.device.clone()).backing_file().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let anew = client.attach(asked("17", &socket)).await.unwrap();
    let path = anew.device.clone();
    let read = blocking(move || std::fs::File::open(path)?.read_exact_at(&mut [0; 4096], 0));
    read.await.unwrap();
    client.detach("17").await.unwrap();
}

const UNSHARED: &str = "QUOIN_TEST_UNSHARED_DIRECTORY";

/// Not a test of its own: a daemon that wants a shared directory, in a namespace that has none.
#[tokio::test]
async fn the_daemon_that_expects_shared_mounts() {
    let Some(directory) = std::env::var_os(UNSHARED) else { return };
    let mut options = Options::new(directory);
    options.expects_shared_mounts = true;
    let (shutdown, watched) = watch::channel(false);
    drop(shutdown);
    let ended = run(options, watched).await;
    let is_shared = std::env::var_os("SHARED").is_some();
    match ended {
        Ok(()) => assert!(is_shared),
        Err(Error::NotShared { directory }) => assert!(!is_shared, "{}", directory.display()),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_daemon_that_expects_shared_mounts_is_refused_where_its_directory_is_on_none() {
    if !have_requirements() || !have("unshare") {
        return;
    }
    for (propagation, shared) in [("private", None), ("slave", None), ("shared", Some("yes"))] {
        let scratch = tempfile::tempdir().unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", propagation]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", "containers::the_daemon_that_expects_shared_mounts"]);
        command.env(UNSHARED, scratch.path()).stdout(Stdio::null());
        if let Some(shared) = shared {
            command.env("SHARED", shared);
        }
        assert!(command.status().unwrap().success(), "{propagation}");
    }
}
