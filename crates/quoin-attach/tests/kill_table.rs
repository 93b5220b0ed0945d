//! The daemon, killed before each of the system calls that change the host, through a whole life of a device: its
//! successor finds what is left, and makes the device as it was meant. strace(1) kills it, so that nothing of
//! this is in the daemon. This test needs root, FUSE, loop devices and strace, and reports it if they are missing.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::daemon::{Daemon, KILLABLE_DIRECTORY, Killable, SIZE, asked, have_requirements};
use quoin_attach::fuse::mount::mounts_under;
use quoin_attach::loopdev::LoopDevice;
use quoin_attach::{AttachClient, holder, made_in};
use quoin_testkit::have;
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};

/// System calls that change the host, or give what was made to another process.
const CALLS: [&str; 7] = ["mount", "umount2", "ioctl", "rename", "symlink", "unlink", "sendmsg"];
/// Size after the growth.
const GROWN: u64 = SIZE + (16 << 20);
/// More calls than a life has.
const CALLS_MAX: usize = 400;

/// A daemon that is killed at a call of this name and number, in whichever thread or child that is.
struct Doomed(Child);

impl Doomed {
    fn start(directory: &Path, call: &str, number: usize) -> Self {
        let mut command = Command::new("strace");
        let inject = format!("inject={call}:signal=KILL:when={number}");
        command.args([
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-e",
            &format!("trace={call}"),
            "-e",
            &inject,
        ]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", "daemon::the_daemon_that_is_killed"]);
        let command = command.env(KILLABLE_DIRECTORY, directory);
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Leads a device through its life. False: the daemon died on the way, or one of its children.
    async fn lives(&mut self, client: &AttachClient, socket: &Path) -> bool {
        while client.list().await.is_err() {
            if self.has_ended() {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let life = async {
            client.attach(asked("17", socket)).await?;
            client.link("17", "db").await?;
            client.resize("17", GROWN).await?;
            client.detach("17").await
        };
        life.await.is_ok()
    }

    /// Ends the daemon, if it lives still.
    fn end(mut self) {
        if !self.has_ended() {
            let children = format!("/proc/{0}/task/{0}/children", self.0.id());
            let children = std::fs::read_to_string(children).unwrap_or_default();
            for child in children.split_whitespace() {
                let _ = Command::new("kill").args(["-9", child]).stderr(Stdio::null()).status();
            }
        }
        self.0.wait().unwrap();
    }
}

/// Returns all that the kernel and the directories have of the daemon.
fn left(directory: &Path) -> Vec<String> {
    let mut left: Vec<_> = made_in(directory).iter().map(|made| format!("{made:?}")).collect();
    let devices = LoopDevice::list_under(directory).unwrap();
    left.extend(devices.iter().map(|device| device.path().display().to_string()));
    left.extend(mounts_under(directory).unwrap().iter().map(|path| path.display().to_string()));
    for within in ["volumes", "links", "udev"] {
        let entries = std::fs::read_dir(directory.join(within)).into_iter().flatten().flatten();
        left.extend(entries.map(|entry| entry.path().display().to_string()));
    }
    left
}

fn attribute(device: &Path, name: &str) -> String {
    let device = Path::new("/sys/block").join(device.file_name().unwrap());
    std::fs::read_to_string(device.join(name)).unwrap().trim().to_owned()
}

/// Way in which a doomed daemon begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// Without a holder.
    Alone,
    WithHolder,
    /// It takes a device over that another one left at the holder.
    TakeOver,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_before_any_call_that_changes_the_host_leaves_nothing_that_its_successor_does_not_mend()
 {
    if !have_requirements() || !have("strace") {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("nbd.sock");
    let _server = Server::start(&socket, volume(GROWN as usize), ServerOptions::default());
    for begin in [Begin::Alone, Begin::WithHolder, Begin::TakeOver] {
        let directory = scratch.path().canonicalize().unwrap().join(format!("{begin:?}"));
        if begin != Begin::Alone {
            std::fs::create_dir(&directory).unwrap();
            let holder = directory.join("holder.sock");
            std::thread::spawn(move || holder::serve(&holder).map(|never| match never {}));
        }
        let mut deaths = 0;
        for call in CALLS {
            for number in 1..CALLS_MAX {
                if begin == Begin::TakeOver {
                    let mut first = Killable::start(&directory).await;
                    first.client.attach(asked("17", &socket)).await.unwrap();
                    first.process.kill().unwrap();
                    first.process.wait().unwrap();
                }
                let mut doomed = Doomed::start(&directory, call, number);
                let client = AttachClient::new(directory.join("attach.sock"));
                let has_lived = doomed.lives(&client, &socket).await;
                doomed.end();
                let what = format!("{begin:?}, killed at {call} {number}");
                let next = Daemon::start(&directory).await;
                successor_mends(&next, begin, &socket, &what).await;
                next.stop().await.unwrap();
                if has_lived {
                    break;
                }
                deaths += 1;
                assert!(number + 1 < CALLS_MAX, "it dies for ever: {what}");
            }
        }
        assert!(deaths > 12, "{begin:?}: calls that were interrupted: {deaths}");
    }
}

/// Leads the device through its life at the successor of a daemon that was killed.
async fn successor_mends(next: &Daemon, begin: Begin, socket: &Path, what: &str) {
    let (client, directory) = (&next.client, &next.directory);
    let taken_over = client.list().await.unwrap();
    if taken_over.is_empty() {
        assert_eq!(left(directory), Vec::<String>::new(), "{what}");
    }
    assert!(begin != Begin::Alone || taken_over.is_empty(), "{what}");
    let device = client.attach(asked("17", socket)).await.unwrap().device;
    if let Some(one) = taken_over.first() {
        assert_eq!(one.device, device, "{what}: its users have the device");
    }
    let link = client.link("17", "db").await.unwrap().link.unwrap();
    assert_eq!(std::fs::read_link(&link).unwrap(), device);
    let is = |name: &str| attribute(&device, name);
    let sectors = [SIZE / 512, GROWN / 512].map(|sectors| sectors.to_string());
    let sizes = if taken_over.is_empty() { &sectors[..1] } else { &sectors[..] };
    assert!(sizes.contains(&is("size")), "{what}: {}", is("size"));
    assert_eq!((is("ro"), is("queue/logical_block_size")), ("0".into(), "4096".into()));
    assert_eq!(is("loop/backing_file"), directory.join("volumes/17").to_str().unwrap());
    let path = device.clone();
    let read = tokio::task::spawn_blocking(move || {
        let device = std::fs::File::open(path)?;
        device.read_exact_at(&mut [0; 4096], 0)?;
        device.read_exact_at(&mut [0; 4096], SIZE - 4096)
    });
    read.await.unwrap().unwrap_or_else(|error| panic!("{what}: {error}"));
    client.resize("17", GROWN).await.unwrap();
    assert_eq!(is("size"), sectors[1], "{what}");
    client.detach("17").await.unwrap();
    assert_eq!(left(directory), Vec::<String>::new(), "{what}");
}
