//! The attach process dies, or makes room for its next version, below a mounted file system under
//! load: IO pauses and no application sees an error. Needs root, /dev/fuse and loop devices.

mod common;

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{BUDGET, Place, Process, Scratch, eventually, is_root, signal};

fn possible() -> bool {
    let devices = ["/dev/fuse", "/dev/loop-control"].iter().all(|path| Path::new(path).exists());
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let is_new = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 9);
    if !is_root() || !devices || !is_new {
        println!("skipped: needs root, /dev/fuse, /dev/loop-control and Linux 6.9 ({release})");
    }
    is_root() && devices && is_new
}

/// A running `quoin dev`.
struct Dev {
    child: Child,
    directory: PathBuf,
}

impl Dev {
    fn start(directory: &Path, flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(["dev", "--dir"])
            .arg(directory)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (up, is_up) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                println!("dev: {line}");
                if line.starts_with("Quoin is up") {
                    let _ = up.send(());
                }
            }
        });
        let dev = Self { child, directory: directory.into() };
        is_up.recv_timeout(BUDGET).expect("quoin dev does not come up");
        dev
    }

    fn pid(&self, name: &str) -> Option<u32> {
        let text = std::fs::read(self.directory.join("run/processes.json")).ok()?;
        let pids: serde_json::Value = serde_json::from_slice(&text).ok()?;
        pids.get(name)?.as_u64().map(|pid| pid as u32)
    }

    /// `kill -9`, and the process that follows.
    fn kill(&self, name: &str) -> u32 {
        let old = eventually("it runs", || self.pid(name));
        signal(old, "KILL");
        eventually("it is started again", || self.pid(name).filter(|pid| *pid != old))
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(arguments)
            .env("QUOIN_SOCKET", self.directory.join("run/admin.sock"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {said}\n{}", self.log("attach"));
        String::from_utf8(output.stdout).unwrap().trim().into()
    }

    fn log(&self, name: &str) -> String {
        let path = self.directory.join("logs").join(format!("{name}.log"));
        std::fs::read_to_string(path).unwrap_or_default()
    }

    fn stop(mut self) {
        signal(self.child.id(), "INT");
        let status = eventually("dev ends", || self.child.try_wait().unwrap());
        assert!(status.success(), "{status}");
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            println!("--- attach\n{}", self.log("attach"));
            let _ = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
            let _ = self.child.wait();
        }
    }
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
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
            // Around the page cache, so that what is read was read from the volume.
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

    /// Waits until the application has got on by as much.
    fn goes_on(&self, rounds: u64) {
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
fn the_attach_process_is_killed_again_and_again_and_no_application_sees_an_error() {
    if std::env::var_os("QUOIN_UNFINISHED").is_none() {
        println!(
            "left out, QUOIN_UNFINISHED=1 runs it: it fails now and then, and nobody knows yet why"
        );
        return;
    }
    if !possible() {
        return;
    }
    let scratch = Scratch::new("handover");
    let dev = Dev::start(&scratch.0.join("cluster"), &[]);
    dev.ok(&["volume", "create", "db", "--size", "256MiB"]);
    let device = dev.ok(&["volume", "attach", "db"]);
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    // Several at once, so that the kernel has more than one request to send again.
    let others: Vec<_> =
        ["a", "b", "c"].into_iter().map(|name| Load::start(&mount, name)).collect();
    let load = Load::start(&mount, "load");
    load.goes_on(8);
    for _ in 0..4 {
        let began = Instant::now();
        dev.kill("attach");
        load.goes_on(8);
        println!("killed, and on after {:?}", began.elapsed());
    }
    // The holder may die too, as long as the two do not die together.
    // Said at each connection, so that the one after the kill is what is waited for.
    let times_given = || dev.log("attach").matches("the holder is here").count();
    let before = times_given();
    dev.kill("attach-holder");
    eventually("the holder has everything again", || (times_given() > before).then_some(()));
    load.goes_on(8);
    dev.kill("attach");
    load.goes_on(8);
    // And the target below it, at the same time.
    signal(dev.pid("target").unwrap(), "KILL");
    dev.kill("attach");
    load.goes_on(8);
    load.end();
    for other in others {
        other.goes_on(1);
        other.end();
    }

    // What was taken over is used and ended like any other.
    let same = dev.ok(&["volume", "attach", "db"]);
    assert_eq!(same, device);
    dev.ok(&["volume", "resize", "db", "--size", "384MiB"]);
    let shown = Path::new("/sys/block").join(device.trim_start_matches("/dev/")).join("size");
    assert_eq!(std::fs::read_to_string(shown).unwrap().trim(), (384 << 11).to_string());
    let in_use = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(in_use.contains(mount.to_str().unwrap()));
    run("umount", &[mount.to_str().unwrap()]);
    run("e2fsck", &["-f", "-n", &device]);
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    dev.stop();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(scratch.0.to_str().unwrap()), "{mounts}");
}

#[test]
fn an_update_of_the_attach_process_leaves_its_devices_and_the_next_one_goes_on() {
    if !possible() {
        return;
    }
    let scratch = Scratch::new("update");
    let dev = Dev::start(&scratch.0.join("cluster"), &["--no-attach"]);
    let run_directory = dev.directory.join("run").to_str().unwrap().to_owned();
    let start = |name: &str, flags: &[&str]| {
        let mut arguments = vec![name.to_owned(), "--run".into(), run_directory.clone()];
        arguments.extend(flags.iter().map(ToString::to_string));
        Process::start(&scratch.0, &Place::here(), name, &arguments)
    };
    let holder = start("attach-holder", &[]);
    let holder_socket = dev.directory.join("run/attach/holder.sock");
    eventually("the holder listens", || holder_socket.exists().then_some(()));
    let first = start("attach", &["--keep"]);
    let socket = dev.directory.join("run/attach/attach.sock");
    eventually("attach listens", || socket.exists().then_some(()));
    dev.ok(&["volume", "create", "db", "--size", "128MiB"]);
    let device = dev.ok(&["volume", "attach", "db"]);
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    let load = Load::start(&mount, "load");
    load.goes_on(8);

    first.stop();
    std::thread::sleep(Duration::from_millis(300));
    let before = load.done.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(load.done.load(Ordering::Relaxed), before, "IO waits while nobody serves it");
    let next = start("attach", &[]);
    load.goes_on(8);
    load.end();
    run("umount", &[mount.to_str().unwrap()]);
    eventually("attach listens again", || socket.exists().then_some(()));
    dev.ok(&["volume", "detach", "db"]);
    next.stop();
    drop(holder);
    dev.stop();
}
