//! A `quoin dev` of its own for a test, which it ends whatever comes.

#![allow(dead_code)] // Each test binary uses its part.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use quoin_frontend::nbd::client::{Address, Client, ClientOptions};

/// Far more than anything here takes: reached only when something hangs.
pub const BUDGET: Duration = Duration::from_secs(180);

/// A directory short enough for sockets, removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quoin-test-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
    pub fn cluster(&self) -> PathBuf {
        self.0.join("cluster")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub struct Dev {
    pub child: Child,
    pub directory: PathBuf,
    /// What it said since it was up.
    lines: mpsc::Receiver<String>,
}

impl Dev {
    pub fn start(directory: &Path, flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(["dev", "--dir"])
            .arg(directory)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.stdout.take().unwrap();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                println!("dev: {line}");
                let _ = sender.send(line);
            }
        });
        let dev = Self { child, directory: directory.into(), lines };
        dev.wait_for_line("Quoin is up");
        dev
    }

    /// Waits until it says this; gives the whole line.
    pub fn wait_for_line(&self, words: &str) -> String {
        let began = Instant::now();
        while began.elapsed() < BUDGET {
            match self.lines.recv_timeout(Duration::from_secs(1)) {
                Ok(line) if line.contains(words) => return line,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                _ => {}
            }
        }
        self.show_logs();
        panic!("quoin dev did not say: {words}");
    }

    /// An NBD client of the volume; it holds IO while the target is away.
    pub fn client(&self, volume: &str) -> Client {
        let address = self.ok(&["volume", "attach", volume, "--nbd"]);
        let socket = address.split_once("socket=").unwrap().1;
        let began = Instant::now();
        loop {
            match Client::connect(ClientOptions::new(Address::Unix(socket.into()))) {
                Ok(client) => return client,
                Err(error) => assert!(began.elapsed() < BUDGET, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn show_logs(&self) {
        for entry in std::fs::read_dir(self.directory.join("logs")).into_iter().flatten().flatten()
        {
            println!("--- {}", entry.path().display());
            println!("{}", std::fs::read_to_string(entry.path()).unwrap_or_default());
        }
    }

    /// Runs a command on this cluster.
    pub fn quoin(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(arguments)
            .env("QUOIN_SOCKET", self.directory.join("run/admin.sock"))
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

    pub fn processes(&self) -> serde_json::Map<String, serde_json::Value> {
        let text = std::fs::read(self.directory.join("run/processes.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    pub fn pid(&self, name: &str) -> Option<i64> {
        self.processes().get(name).and_then(serde_json::Value::as_i64)
    }

    pub fn wait_for_volume(
        &self,
        name: &str,
        what: &str,
        holds: impl Fn(&serde_json::Value) -> bool,
    ) {
        let began = Instant::now();
        loop {
            let output = self.quoin(&["volume", "get", name, "-o", "json"]);
            if let Ok(volume) = serde_json::from_slice(&output.stdout)
                && holds(&volume)
            {
                return;
            }
            if began.elapsed() > BUDGET {
                self.show_logs();
                panic!("{name} is not {what}: {}", String::from_utf8_lossy(&output.stdout));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn is_running(&self) -> bool {
        !std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))
            .is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
    }

    /// Ctrl-C, and its clean end.
    pub fn stop(self) {
        signal(i64::from(self.child.id()), "INT");
        self.ended();
    }

    /// Its clean end, which was asked for.
    pub fn ended(mut self) {
        let pids: Vec<_> =
            self.processes().values().filter_map(serde_json::Value::as_i64).collect();
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < BUDGET, "quoin dev does not stop");
            std::thread::sleep(Duration::from_millis(20));
        };
        if !status.success() {
            self.show_logs();
            panic!("quoin dev ended with {status}");
        }
        for pid in pids {
            assert!(!Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is left");
        }
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        // A failed test leaves nothing behind either; asked twice, not even a mount in use.
        for _ in 0..2 {
            if self.child.try_wait().is_ok_and(|status| status.is_none()) {
                signal(i64::from(self.child.id()), "TERM");
                let began = Instant::now();
                while self.child.try_wait().is_ok_and(|status| status.is_none())
                    && began.elapsed() < Duration::from_secs(30)
                {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn signal(pid: i64, name: &str) {
    let status =
        Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
}

pub fn is_online(volume: &serde_json::Value) -> bool {
    volume["health"] == "Online"
}

/// Root, with what a block device needs.
pub fn can_attach() -> bool {
    is_root() && Path::new("/dev/fuse").exists()
}

pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

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

/// Mounts and loop devices below `directory`: there must be none after an end.
pub fn assert_nothing_is_left(directory: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(directory.to_str().unwrap()), "{mounts}");
    for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
        let backing = std::fs::read_to_string(entry.path().join("loop/backing_file"));
        assert!(!backing.is_ok_and(|path| path.contains(directory.to_str().unwrap())));
    }
}
