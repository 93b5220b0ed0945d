//! A `quoin dev` of its own for a test, which ends it in every case.

#![allow(dead_code, unused_imports)] // Each test binary uses its part.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub use super::base::*;
use quoin_nbd::client::{Address, Client, ClientOptions};

pub struct Dev {
    pub child: Child,
    pub directory: PathBuf,
    user: User,
    /// The line by which it reported that it is up, and its output since.
    pub greeting: String,
    lines: mpsc::Receiver<String>,
}

impl Dev {
    pub fn start(directory: &Path, flags: &[&str]) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_quoin")), directory, flags)
    }

    /// Starts as [`Self::start`] does, by a command that becomes `quoin`.
    pub fn start_by(mut command: Command, directory: &Path, flags: &[&str]) -> Self {
        let mut child = command
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
        let admin_socket = directory.join("run/admin.sock");
        let user = User { admin_socket, logs: directory.join("logs") };
        let (directory, greeting) = (directory.into(), String::new());
        let mut dev = Self { child, directory, user, greeting, lines };
        dev.greeting = dev.wait_for_line("Quoin is up");
        dev
    }

    /// Waits until the output has these words; returns the whole line.
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

    /// Returns an NBD client of the volume; it holds IO while the target is away.
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

    pub fn processes(&self) -> serde_json::Map<String, serde_json::Value> {
        let text = std::fs::read(self.directory.join("run/processes.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    pub fn pid(&self, name: &str) -> Option<i64> {
        self.processes().get(name).and_then(serde_json::Value::as_i64)
    }

    pub fn is_running(&self) -> bool {
        !std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))
            .is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
    }

    /// Sends Ctrl-C, and checks its clean end.
    pub fn stop(self) {
        signal(self.child.id(), "INT");
        self.ended();
    }

    /// Checks the clean end that was requested.
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
            // A process that has ended may wait to be reaped by the one that adopted it.
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let is_there = stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'));
            assert!(!is_there, "process {pid} is left: {stat}");
        }
    }
}

impl std::ops::Deref for Dev {
    type Target = User;

    fn deref(&self) -> &User {
        &self.user
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        // A failed test leaves nothing behind either; a second signal ends it even with a mount in
        // use.
        for _ in 0..2 {
            if self.child.try_wait().is_ok_and(|status| status.is_none()) {
                signal(self.child.id(), "TERM");
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

pub fn is_online(volume: &serde_json::Value) -> bool {
    volume["health"] == "Online"
}

/// Checks that no mounts and loop devices below `directory` are left after an end.
pub fn assert_nothing_is_left(directory: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(directory.to_str().unwrap()), "{mounts}");
    for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
        let backing = std::fs::read_to_string(entry.path().join("loop/backing_file"));
        assert!(!backing.is_ok_and(|path| path.contains(directory.to_str().unwrap())));
    }
}
