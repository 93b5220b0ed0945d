//! Devices whose volume another node has used since, devices that another program has taken, and
//! devices that are ended by force. These tests need root, FUSE and loop devices, and report it if
//! they are missing.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::daemon::{Bound, Daemon, SIZE, asked, blocking, have_requirements, sh};
use quoin_attach::loopdev::LoopDevice;
use quoin_attach::protocol::{Kind, ServedElsewhere};
use quoin_attach::{AttachClient, Error, Options, made_in, run};
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};
use quoin_testkit::{attempts_while_processes_start, have};
use tokio::sync::watch;

fn since(epoch: u64) -> ServerOptions {
    ServerOptions { since_epoch: epoch, ..ServerOptions::default() }
}

fn elsewhere(volume: &str, since_epoch: u64) -> ServedElsewhere {
    let (volume, name, node) = (volume.to_owned(), "db".to_owned(), "h2".to_owned());
    ServedElsewhere { volume, name, node, since_epoch }
}

/// Writes one block and waits until it is on the volume.
fn write(device: &Path, byte: u8) -> std::thread::JoinHandle<std::io::Result<()>> {
    let device = device.to_owned();
    std::thread::spawn(move || {
        let file = OpenOptions::new().write(true).open(device)?;
        file.write_all_at(&[byte; 4096], 0)?;
        file.sync_all()
    })
}

async fn until_it_waits(daemon: &Daemon) {
    while daemon.client.list().await.unwrap()[0].in_flight == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Mounts a file system on the device, and starts a program that waits for a write to it.
fn mounted(device: &Path, at: &Path) {
    std::fs::create_dir_all(at).unwrap();
    let (device, at) = (device.display(), at.display());
    sh(&format!("mkfs.ext4 -q {device} && mount {device} {at} && sync -f {at}"));
}

fn waiting_program(at: &Path) -> Child {
    let script =
        format!("exec dd if=/dev/zero of={}/file bs=64k count=64 conv=fsync", at.display());
    let quiet = || Stdio::null();
    Command::new("sh").args(["-c", &script]).stdout(quiet()).stderr(quiet()).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn users_of_a_device_whose_volume_moved_to_another_node_get_errors() {
    if !have_requirements() || !have("mkfs.ext4") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let server = Server::start(&socket, volume(SIZE as usize), since(5));
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let device = daemon.client.attach(asked("17", &socket)).await.unwrap().device;
    let bound = Bound::of(&device);
    let at = directory.path().join("mounted");
    let (on, under) = (device.clone(), at.clone());
    blocking(move || mounted(&on, &under)).await;
    let usage = daemon.client.usage().await.unwrap();
    assert!(usage[0].in_use && usage[0].since_epoch == 5, "{usage:?}");
    blocking(move || server.stop()).await;
    let mut program = waiting_program(&at);
    until_it_waits(&daemon).await;

    // A use that is no later than the device's own did not overtake it.
    daemon.client.served_elsewhere(elsewhere("17", 5)).await.unwrap();
    assert_eq!(daemon.client.list().await.unwrap()[0].dead, "");
    assert!(program.try_wait().unwrap().is_none(), "the program waits for the target");

    daemon.client.served_elsewhere(elsewhere("17", 31)).await.unwrap();
    let status = blocking(move || program.wait().unwrap()).await;
    assert!(!status.success(), "the lost write must be reported to the program");
    let dead = daemon.client.list().await.unwrap().remove(0).dead;
    assert!(dead.contains("served by h2 since epoch 31"), "{dead}");
    let again = daemon.client.attach(asked("17", &socket)).await;
    assert!(matches!(again, Err(Error::Refused { kind: Kind::Busy, .. })), "{again:?}");
    blocking(move || sh(&format!("umount {}", at.display()))).await;
    daemon.client.detach("17").await.unwrap();
    assert!(!bound.is_left());
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_are_sent_only_to_the_same_use_of_a_volume() {
    if !have_requirements() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let memory = volume(SIZE as usize);
    let server = Server::start(&socket, memory.clone(), since(5));
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let device = daemon.client.attach(asked("17", &socket)).await.unwrap().device;

    blocking(move || server.stop()).await;
    let waits = write(&device, 1);
    until_it_waits(&daemon).await;
    let server = Server::start(&socket, memory.clone(), since(5));
    blocking(move || waits.join().unwrap()).await.unwrap();
    assert_eq!(memory.lock().unwrap().bytes()[..4096], [1; 4096]);

    // Another node has written meanwhile, and the volume is back.
    blocking(move || server.stop()).await;
    let waits = write(&device, 2);
    until_it_waits(&daemon).await;
    let other_use = volume(SIZE as usize);
    let server = Server::start(&socket, other_use.clone(), since(12));
    let error = blocking(move || waits.join().unwrap()).await.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(other_use.lock().unwrap().writes, 0, "a write of the former use reached the volume");
    assert!(daemon.client.list().await.unwrap()[0].dead.contains("another node"));

    // The dead device has no users, so the volume's present use gets another one.
    let device = daemon.client.attach(asked("17", &socket)).await.unwrap().device;
    let fine = write(&device, 3);
    blocking(move || fine.join().unwrap()).await.unwrap();
    assert_eq!(other_use.lock().unwrap().bytes()[..4096], [3; 4096]);
    daemon.client.detach("17").await.unwrap();
    blocking(move || server.stop()).await;
    daemon.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_in_use_is_ended_by_force_and_the_actions_are_reported() {
    if !have_requirements() || !have("mkfs.ext4") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let server = Server::start(&socket, volume(SIZE as usize), since(5));
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    assert_eq!(daemon.client.end("17").await.unwrap(), Vec::<String>::new());
    daemon.client.attach(asked("17", &socket)).await.unwrap();
    // A process that starts is a user of the device for a moment.
    let mut did = String::new();
    for () in attempts_while_processes_start() {
        did = daemon.client.end("17").await.unwrap().join("; ");
        if !did.contains("last user") {
            break;
        }
        daemon.client.attach(asked("17", &socket)).await.unwrap();
    }
    assert!(did.contains("is freed") && !did.contains("last user"), "{did}");
    let device = daemon.client.attach(asked("17", &socket)).await.unwrap().device;
    let at = directory.path().join("mounted");
    let (bound, under) = (Bound::of(&device), at.clone());
    blocking(move || mounted(&device, &under)).await;
    blocking(move || server.stop()).await;
    let mut program = waiting_program(&at);
    until_it_waits(&daemon).await;

    let did = daemon.client.end("17").await.unwrap().join("; ");
    assert!(did.contains("its IO fails") && did.contains("last user"), "{did}");
    assert!(!blocking(move || program.wait().unwrap()).await.success());
    assert!(daemon.client.list().await.unwrap().is_empty());
    blocking(move || sh(&format!("umount {}", at.display()))).await;
    while bound.is_left() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The kernel's device of that number is left, with what the kernel keeps by it.
    let made = || made_in(&daemon.directory);
    let left = made();
    assert!(left.iter().all(|one| one.volume == "17" && !one.is_used), "{left:?}");
    daemon.client.sweep("17").await.unwrap();
    assert_eq!(made(), []);
    for one in left {
        assert!(!one.path.exists() || Bound::of_any(&one.path), "{one:?} is left");
    }
    daemon.stop().await.unwrap();
}

/// Frees a loop device and binds it to another file. Returns false if a concurrent test was given
/// the number in between.
async fn is_taken_for(device: &Path, file: &Path) -> bool {
    let take = format!("losetup -d {0} && losetup {0} {1}", device.display(), file.display());
    blocking(move || Command::new("sh").args(["-ec", &take]).status().unwrap().success()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loop_device_rebound_by_another_program_is_neither_returned_nor_detached() {
    if !have_requirements() || !have("losetup") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd.sock");
    let memory = volume(SIZE as usize);
    let _server = Server::start(&socket, memory.clone(), since(5));
    let daemon = Daemon::start(&directory.path().join("attach")).await;
    let foreign = directory.path().join("foreign.img");
    std::fs::write(&foreign, vec![7; 1 << 20]).unwrap();
    let first = loop {
        daemon.client.attach(asked("17", &socket)).await.unwrap();
        let first = daemon.client.link("17", "db").await.unwrap();
        assert_eq!(std::fs::read_link(first.link.as_ref().unwrap()).unwrap(), first.device);
        if is_taken_for(&first.device, &foreign).await {
            break first;
        }
    };
    let link = first.link.clone().unwrap();
    let file_of_device = || LoopDevice::at(first.device.clone()).backing_file();
    assert_eq!(file_of_device().as_deref(), Some(&*foreign));

    assert!(
        daemon.client.list().await.unwrap().is_empty(),
        "the list has a device of another program"
    );
    let second = daemon.client.attach(asked("17", &socket)).await.unwrap();
    assert_ne!(second.device, first.device);
    assert_eq!(
        std::fs::read_link(&link).unwrap(),
        second.device,
        "the link points to the new device"
    );
    let fine = write(&second.device, 9);
    blocking(move || fine.join().unwrap()).await.unwrap();
    assert_eq!(memory.lock().unwrap().bytes()[..4096], [9; 4096]);
    daemon.client.detach("17").await.unwrap();
    assert!(std::fs::symlink_metadata(&link).is_err(), "the link is removed with the device");

    // The same holds if the daemon itself still knows the number of the first one.
    let third = loop {
        let third = daemon.client.attach(asked("17", &socket)).await.unwrap().device;
        if is_taken_for(&third, &foreign).await {
            break third;
        }
    };
    daemon.client.detach("17").await.unwrap();
    assert_eq!(LoopDevice::at(third.clone()).backing_file().as_deref(), Some(&*foreign));
    daemon.stop().await.unwrap();
    assert_eq!(file_of_device().as_deref(), Some(&*foreign));
    for device in [first.device, third] {
        sh(&format!("losetup -d {}", device.display()));
    }
    assert_eq!(std::fs::read(&foreign).unwrap(), vec![7; 1 << 20]);
}

const DAEMON_DIRECTORY: &str = "QUOIN_TEST_ATTACH_DIRECTORY_APART";

/// Not a test of its own: the process that the test below runs in another mount namespace.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_in_a_mount_namespace_of_its_own() {
    let Some(directory) = std::env::var_os(DAEMON_DIRECTORY) else { return };
    let (_shutdown, watched) = watch::channel(false);
    let mut options = Options::new(&directory);
    options.links = PathBuf::from(&directory).join("links");
    run(options, watched).await.unwrap();
}

/// A daemon on a file system of its own at `run`, which no other process sees.
struct IsolatedDaemon(Child, AttachClient);

impl IsolatedDaemon {
    async fn start(run: &Path) -> Self {
        let script = "mount -t tmpfs none \"$1\" && exec \"$0\" --exact \
                      another_use::a_daemon_in_a_mount_namespace_of_its_own";
        let child = Command::new("unshare")
            .args(["--mount", "sh", "-c", script])
            .arg(std::env::current_exe().unwrap())
            .arg(run)
            .env(DAEMON_DIRECTORY, run)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let root = PathBuf::from(format!("/proc/{}/root", child.id()));
        let socket = root.join(run.strip_prefix("/").unwrap()).join("attach.sock");
        let mut daemon = Self(child, AttachClient::new(socket));
        while daemon.1.list().await.is_err() {
            assert!(daemon.0.try_wait().unwrap().is_none());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        daemon
    }
}

impl Drop for IsolatedDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_with_one_path_in_two_mount_namespaces_keep_their_own_devices() {
    if !have_requirements() || !have("unshare") {
        return;
    }
    // The path is short, because it follows `/proc/PID/root` in the path of a socket.
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    let socket = directory.path().join("nbd.sock");
    let memory = volume(SIZE as usize);
    let _server = Server::start(&socket, memory.clone(), since(5));
    let run_directory = directory.path().join("run");
    std::fs::create_dir(&run_directory).unwrap();

    let first = IsolatedDaemon::start(&run_directory).await;
    let device = first.1.attach(asked("17", &socket)).await.unwrap().device;
    let second = IsolatedDaemon::start(&run_directory).await;
    assert!(second.1.list().await.unwrap().is_empty());
    let bound = Bound::of(&device);
    let backing = LoopDevice::at(device.clone()).backing_file();
    assert_eq!(backing.as_deref(), Some(&*run_directory.join("volumes/17")));
    let other = second.1.attach(asked("17", &socket)).await.unwrap().device;
    assert_ne!(other, device);
    // The next daemon of the second namespace removes what the second left, and nothing else.
    drop(second);
    let fine = write(&device, 4);
    blocking(move || fine.join().unwrap()).await.unwrap();
    let mut block = [0; 4096];
    let read = device.clone();
    let block = blocking(move || {
        std::fs::File::open(read).unwrap().read_exact(&mut block).unwrap();
        block
    })
    .await;
    assert_eq!(block, [4; 4096]);
    first.1.detach("17").await.unwrap();
    assert!(!bound.is_left());
    // The killed daemon's devices ended with its connection; this device is removed by hand.
    let left = LoopDevice::at(other);
    left.release().unwrap();
    while left.backing_file().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
