//! Common parts of all tests of real processes: a directory, waiting, signals, and a user's command
//! line on its cluster.

#![allow(dead_code)] // Each test binary uses its part.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

pub use quoin_testkit::{have, skipped};

/// Far more than any step here takes: reached only when a process hangs.
pub const BUDGET: Duration = Duration::from_secs(180);

/// A directory with a path short enough for sockets, removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let is_new = NAMES.lock().unwrap().insert(name.to_owned());
        assert!(is_new, "two tests share the directory {name}");
        allow_descriptors();
        let path = std::env::temp_dir().join(format!("quoin-test-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn cluster(&self) -> PathBuf {
        self.0.join("cluster")
    }
}

/// Raises the limit: all tests of this program have their connections at the same time.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Root may raise its hard limit; other users have theirs.
    for wanted in [maximum, maximum.map(|given| given.max(1 << 17))] {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: wanted, maximum: wanted });
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A user of one cluster, on its command line.
pub struct User {
    pub admin_socket: PathBuf,
    /// Directory in which the processes of the cluster write their output, each into `NAME.log`.
    pub logs: PathBuf,
}

impl User {
    pub fn quoin(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(arguments)
            .env("QUOIN_SOCKET", &self.admin_socket)
            .env_remove("QUOIN_JOIN_TOKEN")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Runs a command that must succeed, and returns its output.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.quoin(arguments);
        if !output.status.success() {
            self.show_logs();
            panic!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        String::from_utf8(output.stdout).unwrap().trim().to_string()
    }

    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut arguments = arguments.to_vec();
        arguments.extend(["-o", "json"]);
        serde_json::from_str(&self.ok(&arguments)).unwrap()
    }

    /// Attaches a volume; returns its block device by the kernel's name.
    pub fn device(&self, volume: &str) -> String {
        self.json(&["volume", "attach", volume])["device"].as_str().unwrap().to_owned()
    }

    /// Waits for an expected result, and shows the logs where it does not come.
    #[track_caller]
    pub fn eventually<T>(&self, what: &str, mut found: impl FnMut() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(found) = found() {
                return found;
            }
            if began.elapsed() > BUDGET {
                self.show_logs();
                panic!("never: {what}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn wait_for_volume(
        &self,
        name: &str,
        what: &str,
        holds: impl Fn(&serde_json::Value) -> bool,
    ) {
        let mut last = String::new();
        let began = Instant::now();
        while began.elapsed() < BUDGET {
            let output = self.quoin(&["volume", "get", name, "-o", "json"]);
            if serde_json::from_slice(&output.stdout).is_ok_and(|volume| holds(&volume)) {
                return;
            }
            last = String::from_utf8_lossy(&output.stdout).into_owned();
            std::thread::sleep(Duration::from_millis(100));
        }
        self.show_logs();
        panic!("{name} is not {what}: {last}");
    }

    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.logs.join(format!("{name}.log"))).unwrap_or_default()
    }

    pub fn show_logs(&self) {
        for entry in std::fs::read_dir(&self.logs).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "log") {
                println!("--- {}", entry.path().display());
                println!("{}", std::fs::read_to_string(entry.path()).unwrap_or_default());
            }
        }
    }
}

/// Waits for an expected result.
#[track_caller]
pub fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(began.elapsed() < BUDGET, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Sends a signal; a process that is to stop has stopped when this returns.
pub fn signal(pid: impl Display, name: &str) {
    // Some versions of `kill` take a group's number, which is negative, for that of all processes.
    assert!(pid.to_string().parse::<u32>().is_ok_and(|pid| pid > 1), "{pid} is no process");
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
    if name == "STOP" {
        // The signal goes to one thread; the others run until that one had its turn.
        eventually("the process stands still", || is_stopped(&pid.to_string()).then_some(()));
    }
}

fn is_stopped(pid: &str) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // A process that ended meanwhile, or that waits in the kernel, does no work either.
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 't', 'D', 'Z', 'X']))
    })
}

/// Script that lazily unmounts the mounts of other tests than that of the directory `$0`.
pub const FORGET_MOUNTS: &str = r#"grep -o ' /[^ ]*/quoin-test-[^ ]*' /proc/self/mounts |
grep -vF " $0/" | while read -r mount; do umount -l "$mount" 2>&-; done; "#;

/// Returns a command in a mount table of its own, without the mounts of other tests than that of
/// `scratch`: a copy of theirs would keep their devices busy after they unmounted them.
pub fn isolated_command(scratch: &Path) -> Command {
    let mut command = Command::new("unshare");
    let script = format!("{FORGET_MOUNTS} exec \"$@\"");
    command.args(["--mount", "sh", "-c", &script]).arg(scratch);
    command
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {printed}");
}

/// Unmounts, with retries: a process that another test has just forked has this one's files open
/// until it becomes its program.
pub fn unmount(mount: &Path) {
    eventually("it can be unmounted", || {
        let status = Command::new("umount").arg(mount).status().unwrap();
        status.success().then_some(())
    });
}

/// Returns a port of the loopback that is free, and that no outgoing connection gets before it is
/// used.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // The process number separates it from other tests' ports, the range from those of `quoin dev`.
    let first = std::process::id().wrapping_mul(101);
    let next = || 10_000 + (first.wrapping_add(NEXT.fetch_add(1, Relaxed)) % 10_000) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(next).take(10_000).find(is_free).expect("a free port")
}

pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Returns whether this is root, with the requirements of a block device.
pub fn can_attach() -> bool {
    let can = is_root() && Path::new("/dev/fuse").exists();
    if !can {
        skipped("a block device needs root and /dev/fuse");
    }
    can
}

/// Returns a Python that imports these modules, which a skip calls `what`: the one that `QUOIN_PYTHON` names (which
/// must work then), the one that `cargo xtask test` made, or the system's if it happens to have them.
pub fn python_with(modules: &str, what: &str) -> Option<String> {
    if let Ok(named) = std::env::var("QUOIN_PYTHON") {
        return Some(named);
    }
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../python/bin/python");
    for candidate in [made.to_str().unwrap(), "python3"] {
        let probe = Command::new(candidate)
            .args(["-c", &format!("import {modules}")])
            .stderr(std::process::Stdio::null())
            .status();
        if probe.is_ok_and(|status| status.success()) {
            return Some(candidate.to_owned());
        }
    }
    quoin_testkit::skipped(&format!("no Python with {what}; `cargo xtask test` makes one"));
    None
}
