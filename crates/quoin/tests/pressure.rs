//! A host whose memory is short: Quoin has a memory cgroup, as in a pod of its own, and the writer
//! to its volume has another one; more is written than fits. The writer gets memory by writing back
//! dirty pages, through Quoin, whose pools are on the same host.

use crate::common::dev;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dev::{BUDGET, Dev, Scratch, can_attach, have, is_online, is_root, run, skipped};

const ALLOWED_BYTES: u64 = 1 << 30;
/// Twice the limit.
const WRITTEN_BYTES: u64 = 2 << 30;
/// Text that never repeats, fast to make twice.
const NUMBERS: &str = "seq 100000000 999999999 | head -c";

/// Hierarchy of cgroups in which this machine limits memory.
struct Hierarchy {
    root: PathBuf,
    limit_file: &'static str,
    /// Value that removes a limit.
    unlimited: &'static str,
    is_mounted_here: bool,
}

impl Hierarchy {
    /// Finds the hierarchy; `None` where memory cannot be limited, with a printed reason.
    fn find(scratch: &Scratch) -> Option<Self> {
        if !is_root() {
            skipped("a memory cgroup needs root");
            return None;
        }
        let unified = PathBuf::from("/sys/fs/cgroup");
        let controllers = std::fs::read_to_string(unified.join("cgroup.controllers"));
        if controllers.is_ok_and(|all| all.contains("memory")) {
            // The write fails where it is enabled already and where it may not be: the limit's file
            // decides.
            let _ = std::fs::write(unified.join("cgroup.subtree_control"), "+memory");
            let (limit_file, unlimited) = ("memory.max", "max");
            return Some(Self { root: unified, limit_file, unlimited, is_mounted_here: false });
        }
        let root = scratch.0.join("cgroup");
        std::fs::create_dir(&root).unwrap();
        let mount = ["-t", "cgroup", "-o", "memory", "none", root.to_str().unwrap()];
        let output = Command::new("mount").args(mount).output().unwrap();
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            skipped(&format!("no memory cgroups here: {}", why.trim()));
            return None;
        }
        let (limit_file, unlimited) = ("memory.limit_in_bytes", "-1");
        Some(Self { root, limit_file, unlimited, is_mounted_here: true })
    }

    /// Makes a cgroup; `None` where it cannot be made, with a printed reason.
    fn cgroup(&self, name: &str) -> Option<Cgroup<'_>> {
        let directory = self.root.join(format!("quoin-test-{name}-{}", std::process::id()));
        let cgroup = Cgroup { hierarchy: self, directory };
        let limit = cgroup.directory.join(self.limit_file);
        let made = std::fs::create_dir(&cgroup.directory)
            .and_then(|()| std::fs::write(limit, ALLOWED_BYTES.to_string()));
        if let Err(error) = made {
            skipped(&format!("no memory cgroup can be made here: {error}"));
            return None;
        }
        Some(cgroup)
    }
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        if self.is_mounted_here {
            let _ = Command::new("umount").arg(&self.root).status();
        }
    }
}

/// A memory cgroup, removed with the test.
struct Cgroup<'a> {
    hierarchy: &'a Hierarchy,
    directory: PathBuf,
}

impl Cgroup<'_> {
    /// Returns a command that runs in the cgroup from its first instruction.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        let enter = "echo $$ > \"$0\"/cgroup.procs && exec \"$@\"";
        command.args(["-c", enter]).arg(&self.directory).arg(program);
        command
    }

    fn has(&self, pid: i64) -> bool {
        let text = std::fs::read_to_string(self.directory.join("cgroup.procs")).unwrap();
        text.lines().any(|line| line == pid.to_string())
    }
}

impl Drop for Cgroup<'_> {
    fn drop(&mut self) {
        // A process that hangs for lack of memory continues, and can be ended.
        let limit = self.directory.join(self.hierarchy.limit_file);
        let _ = std::fs::write(limit, self.hierarchy.unlimited);
        let began = Instant::now();
        while std::fs::remove_dir(&self.directory).is_err() && began.elapsed().as_secs() < 10 {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A mounted file system, unmounted with the test.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn must_end(dev: &Dev, what: &str, mut child: Child) {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return assert!(status.success(), "{what}: {status}");
        }
        if began.elapsed() > BUDGET {
            dev.show_logs();
            let state = std::fs::read_to_string(format!("/proc/{}/stack", child.id()));
            panic!("{what} does not end; the kernel's stack: {}", state.unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Capability to request the kernel's service for processes that writeback waits for.
const CAP_SYS_RESOURCE: u32 = 24;
/// Flag from the kernel's `linux/sched.h`: no memory is reclaimed by waiting for IO.
const PF_MEMALLOC_NOIO: u64 = 0x0008_0000;

/// Returns a field of a process' or thread's status, by its name.
fn status(of: &str, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{of}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name));
    line.unwrap_or_else(|| panic!("{name} in {text}")).split_whitespace().nth(1).unwrap().into()
}

/// Returns the kernel's flags of a thread.
fn flags(path: &Path) -> u64 {
    let stat = std::fs::read_to_string(path.join("stat")).unwrap();
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    rest.split(' ').nth(6).unwrap().parse().unwrap()
}

/// Asserts that touched memory stays, and that no thread waits for IO to get some.
fn assert_is_safe_from_itself(name: &str, pid: i64) {
    let locked = status(&pid.to_string(), "VmLck:");
    assert!(locked.parse::<u64>().unwrap() > 0, "the memory of {name} is not locked");
    let rights = u64::from_str_radix(&status("self", "CapEff:"), 16).unwrap();
    let may_ask = rights >> CAP_SYS_RESOURCE & 1 == 1;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let is_flusher = flags(&thread.path()) & PF_MEMALLOC_NOIO != 0;
        assert_eq!(is_flusher, may_ask, "{name}, thread {:?}", thread.path());
    }
}

/// Proves: PR_SET_IO_FLUSHER, locked memory (the store's "Same host, no deadlock").
#[test]
fn writes_of_twice_the_memory_limit_to_pools_of_the_same_host_succeed() {
    let tools = ["mkfs.ext4", "seq", "dd", "cmp"].map(have);
    if !can_attach() || tools.contains(&false) {
        return;
    }
    let scratch = Scratch::new("pressure");
    let Some(hierarchy) = Hierarchy::find(&scratch) else { return };
    let Some(of_quoin) = hierarchy.cgroup("quoin") else { return };
    let Some(of_writer) = hierarchy.cgroup("writer") else { return };
    let quoin = of_quoin.command(env!("CARGO_BIN_EXE_quoin"));
    let dev = Dev::start_by(quoin, &scratch.cluster(), &["--pool-size", "5GiB"]);
    dev.ok(&["volume", "create", "db", "--size", "3GiB", "--replicas", "2"]);
    let device = dev.device("db");
    dev.wait_for_volume("db", "online", is_online);
    for name in ["pool-a", "pool-b", "pool-c", "target", "attach", "attach-holder"] {
        let pid = dev.pid(name).unwrap_or_else(|| panic!("{name} in {:?}", dev.processes()));
        assert!(of_quoin.has(pid), "{name} is not in the cgroup");
        assert_is_safe_from_itself(name, pid);
    }

    run("mkfs.ext4", &["-q", &device]);
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mount", &[&device, mount.to_str().unwrap()]);
    let mounted = Mounted(mount.clone());
    let file = mount.join("file");
    let file = file.to_str().unwrap();
    let shell = |script: String| {
        let mut command = of_writer.command("sh");
        command.args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap()
    };
    let dd = format!("dd of={file} bs=1M iflag=fullblock conv=fsync");
    must_end(&dev, "dd", shell(format!("{NUMBERS} {WRITTEN_BYTES} | {dd}")));
    must_end(&dev, "cmp", shell(format!("{NUMBERS} {WRITTEN_BYTES} | cmp - {file}")));
    drop(mounted);
    dev.ok(&["volume", "detach", "db"]);
    dev.stop();
}
