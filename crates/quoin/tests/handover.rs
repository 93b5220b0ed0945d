//! The attach process dies, or is replaced by its next version, below a mounted file system under
//! load: IO pauses and no application sees an error. Needs root, /dev/fuse and loop devices.

use crate::common;
use crate::common::dev as running;

use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Cluster, Place, Process};
use quoin_nbd::client::{Address, Client, ClientOptions};
use running::{
    Dev, Scratch, assert_nothing_is_left, eventually, is_root, run, signal, skipped, unmount,
};

fn is_supported() -> bool {
    let devices = ["/dev/fuse", "/dev/loop-control"].iter().all(|path| Path::new(path).exists());
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let is_new = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 9);
    if !is_root() || !devices || !is_new {
        let why = format!("needs root, /dev/fuse, /dev/loop-control and Linux 6.9 ({release})");
        skipped(&why);
    }
    is_root() && devices && is_new
}

/// Ends a process by a signal, and waits for its successor.
fn end(dev: &Dev, name: &str, by: &str) {
    let old = eventually("it runs", || dev.pid(name));
    signal(old, by);
    eventually("it is started again", || dev.pid(name).filter(|pid| *pid != old));
}

fn kill(dev: &Dev, name: &str) {
    end(dev, name, "KILL");
}

/// Makes a file system on the device, mounted in the scratch directory.
fn mounted(scratch: &Scratch, device: &str) -> PathBuf {
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", device]);
    run("mount", &[device, mount.to_str().unwrap()]);
    mount
}

/// The attach process and its holder as processes of the test, beside a cluster without them.
struct Attaching {
    dev: Dev,
    scratch: Scratch,
}

impl Attaching {
    fn start(name: &str) -> (Self, Process) {
        let scratch = Scratch::new(name);
        let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
        let this = Self { dev, scratch };
        let holder = this.process("attach-holder", &[]);
        let socket = this.dev.directory.join("run/attach/holder.sock");
        eventually("the holder listens", || socket.exists().then_some(()));
        (this, holder)
    }

    fn attach(&self, flags: &[&str]) -> Process {
        let process = self.process("attach", flags);
        let socket = self.dev.directory.join("run/attach/attach.sock");
        eventually("attach listens", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok().then_some(())
        });
        process
    }

    fn process(&self, name: &str, flags: &[&str]) -> Process {
        let run = self.dev.directory.join("run");
        let mut arguments = vec![name, "--run", run.to_str().unwrap()];
        arguments.extend(flags);
        let arguments: Vec<String> = arguments.into_iter().map(String::from).collect();
        Process::start(&self.scratch.0, &Place::here(), name, &arguments)
    }
}

/// An application that writes, syncs and reads back without end, and stops at its first error.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<Result<(), String>>,
}

impl Load {
    fn start(directory: &Path, name: &str) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (path, stopped, counted) = (directory.join(name), stop.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            // The page cache is bypassed, so that reads come from the volume.
            let direct = std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .custom_flags(libc::O_DIRECT)
                .open(&path)
                .map_err(|e| e.to_string())?;
            let mut file = direct;
            let layout = std::alloc::Layout::from_size_align(64 << 10, 4096).unwrap();
            for round in 0u64.. {
                if stopped.load(Ordering::Relaxed) {
                    return Ok(());
                }
                // SAFETY: the layout has a size; the buffer is freed below with the same layout.
                let buffer = unsafe {
                    std::slice::from_raw_parts_mut(std::alloc::alloc_zeroed(layout), layout.size())
                };
                let at = (round * 7919 % 256) * (64 << 10);
                let outcome = (|| -> std::io::Result<bool> {
                    buffer.fill(round as u8);
                    file.seek(SeekFrom::Start(at))?;
                    file.write_all(buffer)?;
                    if round % 8 == 0 {
                        file.sync_all()?;
                    }
                    buffer.fill(!(round as u8));
                    file.seek(SeekFrom::Start(at))?;
                    file.read_exact(buffer)?;
                    Ok(buffer.iter().all(|byte| *byte == round as u8))
                })();
                // SAFETY: allocated above with this layout, and not used after this.
                unsafe { std::alloc::dealloc(buffer.as_mut_ptr(), layout) };
                match outcome {
                    Ok(true) => counted.fetch_add(1, Ordering::Relaxed),
                    Ok(false) => return Err(format!("round {round} read something else")),
                    Err(error) => return Err(format!("round {round}: {error}")),
                };
            }
            Ok(())
        });
        Self { stop, done, thread }
    }

    /// Waits until the application has completed so many more rounds.
    fn assert_progress(&self, rounds: u64) {
        let from = self.done.load(Ordering::Relaxed);
        eventually("IO goes on", || {
            let on = self.done.load(Ordering::Relaxed) >= from + rounds;
            (on || self.thread.is_finished()).then_some(())
        });
        assert!(!self.thread.is_finished(), "the application has seen an error");
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap().unwrap();
    }
}

#[test]
fn repeated_kills_of_the_attach_process_cause_no_error() {
    if !is_supported() {
        return;
    }
    let scratch = Scratch::new("handover");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "256MiB"]);
    let device = dev.device("db");
    let mount = mounted(&scratch, &device);
    // Several at once, so that the kernel has more than one request to send again.
    let others: Vec<_> =
        ["a", "b", "c"].into_iter().map(|name| Load::start(&mount, name)).collect();
    let load = Load::start(&mount, "load");
    load.assert_progress(8);
    for _ in 0..4 {
        let began = Instant::now();
        kill(&dev, "attach");
        load.assert_progress(8);
        println!("killed, and on after {:?}", began.elapsed());
    }
    // The holder may die too, as long as the two do not die together. The message is printed at
    // each connection, so the wait is for the one after the kill.
    let times_given = || dev.log("attach").matches("connected to the holder").count();
    let before = times_given();
    kill(&dev, "attach-holder");
    eventually("the holder has everything again", || (times_given() > before).then_some(()));
    load.assert_progress(8);
    kill(&dev, "attach");
    load.assert_progress(8);
    // The target below it dies at the same time.
    signal(dev.pid("target").unwrap(), "KILL");
    kill(&dev, "attach");
    load.assert_progress(8);
    load.end();
    for other in others {
        other.assert_progress(1);
        other.end();
    }

    // Adopted devices are used and ended like any other.
    let same = dev.device("db");
    assert_eq!(same, device);
    dev.ok(&["volume", "resize", "db", "--size", "384MiB"]);
    let shown = Path::new("/sys/block").join(device.trim_start_matches("/dev/")).join("size");
    assert_eq!(std::fs::read_to_string(shown).unwrap().trim(), (384 << 11).to_string());
    let in_use = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(in_use.contains(mount.to_str().unwrap()));
    unmount(&mount);
    run("e2fsck", &["-f", "-n", &device]);
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    dev.stop();
    assert_nothing_is_left(&scratch.0);
}

#[test]
fn kills_at_any_moment_of_a_takeover_cause_no_error() {
    const KILLS: u64 = 120;
    if !is_supported() {
        return;
    }
    let (attaching, _holder) = Attaching::start("storm");
    let dev = &attaching.dev;
    let mut attach = attaching.attach(&[]);
    dev.ok(&["volume", "create", "db", "--size", "256MiB"]);
    let device = dev.device("db");
    let mount = mounted(&attaching.scratch, &device);
    let loads = ["a", "b", "c", "d"].map(|name| Load::start(&mount, name));
    loads[0].assert_progress(8);
    for kill in 0..KILLS {
        // The drop kills it.
        drop(attach);
        attach = attaching.process("attach", &[]);
        let mixed = kill.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Every second kill comes while it serves already: messages are on their way then.
        if kill % 2 == 0 {
            loads[0].assert_progress(1);
            std::thread::sleep(Duration::from_micros(mixed >> 52));
        } else {
            std::thread::sleep(Duration::from_micros(mixed >> 49));
        }
        assert!(loads.iter().all(|load| !load.thread.is_finished()), "failed by kill {kill}");
    }
    for load in loads {
        load.assert_progress(1);
        load.end();
    }
    unmount(&mount);
    run("e2fsck", &["-f", "-n", &device]);
    attach.stop();
    let Attaching { dev, scratch } = attaching;
    dev.stop();
    assert_nothing_is_left(&scratch.0);
}

#[test]
fn an_attach_process_that_is_stopped_keeps_only_devices_in_use() {
    if !is_supported() {
        return;
    }
    let scratch = Scratch::new("ended");
    let dev = Dev::start(&scratch.cluster(), &[]);
    let [device, raw, _] = ["db", "raw", "idle"].map(|volume| {
        dev.ok(&["volume", "create", volume, "--size", "128MiB"]);
        dev.device(volume)
    });
    let mount = mounted(&scratch, &device);
    let load = Load::start(&mount, "load");
    // A device is in use without a mount: a program has it open.
    let other = Load::start(Path::new("/dev"), raw.trim_start_matches("/dev/"));
    load.assert_progress(8);
    other.assert_progress(8);
    end(&dev, "attach", "TERM");
    load.assert_progress(8);
    other.assert_progress(8);
    let printed = dev.log("attach");
    assert_eq!(printed.matches("left to the next daemon").count(), 2, "{printed}");
    assert_eq!(printed.matches("taken over").count(), 2, "{printed}");
    load.end();
    other.end();
    unmount(&mount);
    run("e2fsck", &["-f", "-n", &device]);
    for volume in ["db", "raw"] {
        dev.ok(&["volume", "detach", volume]);
    }
    dev.stop();
    assert_nothing_is_left(&scratch.0);
}

#[test]
fn an_attach_process_with_detach_at_shutdown_leaves_nothing() {
    if !is_supported() {
        return;
    }
    let (attaching, _holder) = Attaching::start("detached");
    let dev = &attaching.dev;
    let mut attach = attaching.attach(&["--detach"]);
    dev.ok(&["volume", "create", "db", "--size", "128MiB"]);
    let device = dev.device("db");
    let mount = mounted(&attaching.scratch, &device);
    let load = Load::start(&mount, "load");
    load.assert_progress(8);
    signal(attach.pid(), "TERM");
    eventually("the application is told", || load.thread.is_finished().then_some(()));
    eventually("attach ends", || (!attach.is_alive()).then_some(()));
    assert!(load.thread.join().unwrap().is_err());
    unmount(&mount);
    let Attaching { dev, scratch } = attaching;
    dev.stop();
    assert_nothing_is_left(&scratch.0);
}

#[test]
fn an_update_of_the_attach_process_continues_its_devices() {
    if !is_supported() {
        return;
    }
    let (attaching, _holder) = Attaching::start("update");
    let dev = &attaching.dev;
    let first = attaching.attach(&["--keep"]);
    let [device, idle] = ["db", "idle"].map(|volume| {
        dev.ok(&["volume", "create", volume, "--size", "128MiB"]);
        dev.device(volume)
    });
    let mount = mounted(&attaching.scratch, &device);
    let load = Load::start(&mount, "load");
    load.assert_progress(8);

    first.stop();
    std::thread::sleep(Duration::from_millis(300));
    let before = load.done.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(load.done.load(Ordering::Relaxed), before, "IO waits while nobody serves it");
    let next = attaching.attach(&[]);
    load.assert_progress(8);
    load.end();
    assert_eq!(dev.device("idle"), idle);
    unmount(&mount);
    dev.ok(&["volume", "detach", "db"]);
    next.stop();
    let Attaching { dev, scratch } = attaching;
    dev.stop();
    assert_nothing_is_left(&scratch.0);
}

/// A host that is lost, or an upgrade that restarts pool and target together.
#[test]
fn a_target_that_starts_while_one_pool_is_away_does_not_wait_for_it() {
    let mut cluster = Cluster::start("without-one", &Place::here(), &[]);
    for name in ["p1", "p2", "p3"] {
        cluster.pool(&Place::here(), name, &[]);
    }
    cluster.node(&Place::here(), "n1", &[], &[]);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let address = cluster.ok(&["volume", "attach", "db", "--node", "n1", "--nbd"]);
    let socket = PathBuf::from(address.trim().split_once("socket=").unwrap().1);
    let client = eventually("the volume is served", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.clone()))).ok()
    });
    client.write(0, Bytes::from_static(&[7; 4096]), true).unwrap();
    // A process that stands still answers nothing, and refuses no connection.
    let away = cluster.process("p3").pid();
    signal(away, "STOP");
    let target = cluster.processes.iter().position(|process| process.name == "target").unwrap();
    cluster.processes.remove(target).stop();
    let (state, run) = (cluster.path("node"), cluster.path("run"));
    let controller = cluster.controller.clone();
    let again = ["target", "--state", &state, "--run", &run, "--name", "n1", "--controller"];
    let again = again.iter().map(ToString::to_string).chain([controller]).collect();
    let began = Instant::now();
    cluster.run(&Place::here(), "target", again);
    assert_eq!(client.read(0, 4096).unwrap(), [7; 4096].as_slice());
    let pause = began.elapsed();
    signal(away, "CONT");
    assert!(pause < Duration::from_millis(1700), "{pause:?}");
}
