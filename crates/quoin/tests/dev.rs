//! `quoin dev` as real processes: up, in use, harmed, down, up again, with nothing left behind.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Far more than anything here takes: reached only when something hangs.
const BUDGET: Duration = Duration::from_secs(180);

/// A directory short enough for sockets, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quoin-test-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
    fn cluster(&self) -> PathBuf {
        self.0.join("cluster")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

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
        let output = child.stdout.take().unwrap();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                println!("dev: {line}");
                let _ = sender.send(line);
            }
        });
        let dev = Self { child, directory: directory.into() };
        let began = Instant::now();
        while began.elapsed() < BUDGET {
            match lines.recv_timeout(Duration::from_secs(1)) {
                Ok(line) if line.starts_with("Quoin is up") => return dev,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                _ => {}
            }
        }
        dev.show_logs();
        panic!("quoin dev did not come up");
    }

    fn show_logs(&self) {
        for entry in std::fs::read_dir(self.directory.join("logs")).into_iter().flatten().flatten()
        {
            println!("--- {}", entry.path().display());
            println!("{}", std::fs::read_to_string(entry.path()).unwrap_or_default());
        }
    }

    /// Runs a command on this cluster.
    fn quoin(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(arguments)
            .env("QUOIN_SOCKET", self.directory.join("run/admin.sock"))
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Runs a command that must work, and gives what it printed.
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.quoin(arguments);
        if !output.status.success() {
            self.show_logs();
            panic!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        String::from_utf8(output.stdout).unwrap().trim().to_string()
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut arguments = arguments.to_vec();
        arguments.extend(["-o", "json"]);
        serde_json::from_str(&self.ok(&arguments)).unwrap()
    }

    fn processes(&self) -> serde_json::Map<String, serde_json::Value> {
        let text = std::fs::read(self.directory.join("run/processes.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn pid(&self, name: &str) -> Option<i64> {
        self.processes().get(name).and_then(serde_json::Value::as_i64)
    }

    fn wait_for_volume(&self, name: &str, what: &str, holds: impl Fn(&serde_json::Value) -> bool) {
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

    /// Ctrl-C, and its clean end.
    fn stop(mut self) {
        let pids: Vec<_> =
            self.processes().values().filter_map(serde_json::Value::as_i64).collect();
        signal(i64::from(self.child.id()), "INT");
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
        // A failed test leaves nothing behind either.
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            signal(i64::from(self.child.id()), "TERM");
            let _ = self.child.wait();
        }
    }
}

fn signal(pid: i64, name: &str) {
    let status =
        Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
}

fn is_online(volume: &serde_json::Value) -> bool {
    volume["health"] == "Online"
}

#[test]
fn a_cluster_without_root_serves_volumes_heals_what_dies_and_goes_on_at_its_second_start() {
    let scratch = Scratch::new("nbd");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);

    // A second one in the same directory is refused, and harms nothing.
    let second = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["dev", "--no-attach", "--dir"])
        .arg(scratch.cluster())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another `quoin dev`"));

    let pools = dev.json(&["pool", "list"]);
    assert_eq!(pools.as_array().unwrap().len(), 3);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let address = dev.ok(&["volume", "attach", "db", "--nbd"]);
    assert!(address.starts_with("nbd+unix:///"), "{address}");
    assert_eq!(dev.ok(&["volume", "attach", "db", "--nbd"]), address, "attach is not idempotent");
    dev.wait_for_volume("db", "online", is_online);
    let volume = dev.json(&["volume", "get", "db"]);
    assert_eq!(volume["sizeBytes"], 64 << 20);
    assert!(volume["contract"].as_str().unwrap().contains("pool"), "{volume}");

    for name in ["pool-b", "target", "controller", "node"] {
        let old = dev.pid(name).unwrap();
        signal(old, "KILL");
        let began = Instant::now();
        while dev.pid(name).is_none_or(|pid| pid == old) {
            assert!(began.elapsed() < BUDGET, "{name} is not started again");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    dev.wait_for_volume("db", "online again", is_online);
    dev.stop();

    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    let volumes = dev.json(&["volume", "list"]);
    assert_eq!(volumes[0]["name"], "db");
    dev.wait_for_volume("db", "online after a clean restart", is_online);
    assert!(dev.ok(&["replica", "list"]).contains("pool-c"));
    assert!(dev.ok(&["events"]).contains("volume/db"));
    let refused = dev.quoin(&["volume", "delete", "db", "--yes"]);
    assert_eq!(refused.status.code(), Some(1), "an attached volume was deleted");
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    assert!(dev.ok(&["volume", "list"]).contains("no volumes"));
    dev.stop();
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

#[test]
fn as_root_a_volume_is_a_block_device_and_ctrl_c_leaves_no_mount_and_no_loop_device() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        // The message is the proof that nothing is pretended.
        let scratch = Scratch::new("plain");
        let dev = Dev::start(&scratch.cluster(), &[]);
        dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
        let refused = dev.quoin(&["volume", "attach", "db"]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("--nbd"));
        return dev.stop();
    }
    let scratch = Scratch::new("root");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let device = dev.ok(&["volume", "attach", "db"]);
    assert!(device.starts_with("/dev/loop"), "{device}");
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    std::fs::write(mount.join("letter"), "kept").unwrap();
    dev.stop();

    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(scratch.0.to_str().unwrap()), "{mounts}");
    for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
        let backing = std::fs::read_to_string(entry.path().join("loop/backing_file"));
        assert!(!backing.is_ok_and(|path| path.contains(scratch.0.to_str().unwrap())));
    }

    let dev = Dev::start(&scratch.cluster(), &[]);
    let device = dev.ok(&["volume", "attach", "db"]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(mount.join("letter")).unwrap(), "kept");
    run("umount", &[mount.to_str().unwrap()]);
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    dev.stop();
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_directory_that_is_foreign_or_cannot_be_made_is_refused_by_name() {
    let scratch = Scratch::new("bad");
    std::fs::write(scratch.0.join("letter"), "dear").unwrap();
    for directory in [scratch.0.clone(), scratch.0.join("letter/below-a-file")] {
        let output = Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(["dev", "--dir"])
            .arg(&directory)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(directory.to_str().unwrap()) && said.contains("--dir"), "{said}");
    }
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1, "something was half made");
}
