//! What every test of real processes needs: a directory of its own, patience, signals, and a
//! user's command line on its cluster.

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

/// Far more than anything here takes: reached only when something hangs.
pub const BUDGET: Duration = Duration::from_secs(180);

/// A directory short enough for sockets, removed at the end.
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

/// All tests of this program have their connections at a time.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Root may have more than it was given; others have what they have.
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
    /// Where the processes of the cluster write what they say, each into `NAME.log`.
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

    /// Runs a command that must work, and gives what it printed.
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

    /// Attaches a volume; its block device as the kernel calls it.
    pub fn device(&self, volume: &str) -> String {
        self.json(&["volume", "attach", volume])["device"].as_str().unwrap().to_owned()
    }

    /// Waits for something that must come, and shows the logs where it does not.
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

/// Waits for something that must come.
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

/// A process that is to stop has stopped when this returns.
pub fn signal(pid: impl Display, name: &str) {
    // A group's number, which is negative, some `kill` take for that of all processes there are.
    assert!(pid.to_string().parse::<u32>().is_ok_and(|pid| pid > 1), "{pid} is no process");
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
    if name == "STOP" {
        // The signal goes to one thread; the others work on until that one had its turn.
        eventually("the process stands still", || is_stopped(&pid.to_string()).then_some(()));
    }
}

fn is_stopped(pid: &str) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // One that ended meanwhile, or that waits in the kernel, works no more either.
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 't', 'D', 'Z', 'X']))
    })
}

/// Lazily takes away what other tests than the one of the directory `$0` have mounted.
pub const FORGET_MOUNTS: &str = r#"grep -o ' /[^ ]*/quoin-test-[^ ]*' /proc/self/mounts |
grep -vF " $0/" | while read -r mount; do umount -l "$mount" 2>&-; done; "#;

/// A command in a table of mounts of its own, without the mounts of other tests than that of
/// `scratch`: a copy of theirs would keep their devices busy after they unmounted them.
pub fn apart(scratch: &Path) -> Command {
    let mut command = Command::new("unshare");
    let script = format!("{FORGET_MOUNTS} exec \"$@\"");
    command.args(["--mount", "sh", "-c", &script]).arg(scratch);
    command
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
}

/// A port of the loopback that nobody has, and that no outgoing connection gets before it is used.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Apart from other tests' by the process, from `quoin dev`'s by the range.
    let first = std::process::id().wrapping_mul(101);
    let next = || 10_000 + (first.wrapping_add(NEXT.fetch_add(1, Relaxed)) % 10_000) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(next).take(10_000).find(is_free).expect("a free port")
}

pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Root, with what a block device needs.
pub fn can_attach() -> bool {
    let can = is_root() && Path::new("/dev/fuse").exists();
    if !can {
        skipped("a block device needs root and /dev/fuse");
    }
    can
}
