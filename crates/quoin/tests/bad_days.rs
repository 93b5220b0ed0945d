//! Faults of pools, as real processes: each refusal names the thing and the way out, ends with an
//! exit code above 0, and leaves nothing half-made.

use crate::support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use support::{BUDGET, Dev, Scratch, signal, skipped};

/// Arguments of a pool beside `quoin dev`.
struct SparePool<'a> {
    dev: &'a Dev,
    state: PathBuf,
}

impl<'a> SparePool<'a> {
    fn new(dev: &'a Dev, scratch: &Scratch, name: &str) -> Self {
        SparePool { dev, state: scratch.0.join(name) }
    }

    fn command(&self, data: &Path, flags: &[&str]) -> Command {
        let settings = std::fs::read(self.dev.directory.join("dev.json")).unwrap();
        let settings: serde_json::Value = serde_json::from_slice(&settings).unwrap();
        let name = self.state.file_name().unwrap().to_str().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_quoin"));
        command
            .args(["pool", "run", "--name", name, "--state"])
            .arg(&self.state)
            .arg("--data")
            .arg(data)
            .args(["--controller", settings["controller"]["listen"].as_str().unwrap()])
            .args(flags)
            .stdin(Stdio::null());
        if !flags.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        if !self.state.exists() {
            let token = self.dev.ok(&["token", "create", "--role", "pool", "--name", name]);
            command.env("QUOIN_JOIN_TOKEN", token);
        }
        command
    }

    fn start(&self, data: &Path, flags: &[&str]) -> Running {
        let log = std::fs::File::create(self.state.with_extension("log")).unwrap();
        Running(self.command(data, flags).stderr(log).spawn().unwrap())
    }

    /// Runs a pool that must end by itself with exit code 1; returns its message.
    fn refused(&self, data: &Path, flags: &[&str]) -> String {
        let child = self.command(data, flags).stderr(Stdio::piped()).spawn().unwrap();
        let output = within_budget(child);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{printed}");
        printed
    }

    fn is_online(&self) -> Option<()> {
        let name = self.state.file_name().unwrap().to_str().unwrap();
        let pools = self.dev.json(&["pool", "list"]);
        let of_it = pools.as_array().unwrap().iter().find(|p| p["name"] == name)?;
        (of_it["state"] == "Online").then_some(())
    }
}

struct Running(Child);

impl Running {
    fn terminate(mut self) {
        signal(i64::from(self.0.id()), "TERM");
        assert!(self.0.wait().unwrap().success(), "SIGTERM is a clean end");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn within_budget(mut child: Child) -> Output {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > BUDGET {
            let _ = child.kill();
            panic!("it neither ends nor says anything");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {printed}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Proves: a pool directory that is missing, foreign, locked by another process, full, read-only,
/// from a newer format, and ports in use: a message that names the thing and the way out.
#[test]
fn each_unusable_pool_is_refused_by_name_and_leaves_nothing_incomplete() {
    let scratch = Scratch::new("days");
    let dev =
        Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB", "--pools", "1"]);
    let pool = SparePool::new(&dev, &scratch, "spare");
    let whole = scratch.0.join("whole");
    let assert_names = |printed: &str, data: &Path, words: &[&str]| {
        let named = printed.contains(data.to_str().unwrap());
        assert!(named && words.iter().all(|word| printed.contains(word)), "{words:?}: {printed}");
    };
    let nothing_made = || {
        let pools = dev.json(&["pool", "list"]);
        assert_eq!(pools.as_array().unwrap().len(), 1, "{pools}");
        assert!(!pool.state.exists(), "an identity was made for a pool that cannot be");
    };

    let missing = scratch.0.join("nowhere/at/all");
    assert_names(&pool.refused(&missing, &["--capacity", "256MiB"]), &missing, &["mend the path"]);
    assert!(!scratch.0.join("nowhere").exists());
    assert_names(&pool.refused(&missing, &[]), &missing, &["mend the path"]);

    let foreign = scratch.0.join("letters");
    std::fs::write(&foreign, "dear all, ".repeat(40_000)).unwrap();
    assert_names(
        &pool.refused(&foreign, &["--capacity", "256MiB"]),
        &foreign,
        &["not a Quoin pool"],
    );
    assert_names(&pool.refused(&foreign, &["--format"]), &foreign, &["not a Quoin pool"]);
    assert!(std::fs::read_to_string(&foreign).unwrap().starts_with("dear all"));

    let huge = scratch.0.join("huge");
    let printed = pool.refused(&huge, &["--capacity", "4PiB", "--preallocate"]);
    assert_names(&printed, &huge, &["room"]);
    assert!(!huge.exists(), "a file was half made");
    let tiny = scratch.0.join("tiny");
    assert_names(&pool.refused(&tiny, &["--capacity", "1MiB"]), &tiny, &["at least"]);
    assert!(!tiny.exists());
    nothing_made();

    // The directory holds a pool from here on.
    std::fs::create_dir(&whole).unwrap();
    let running = pool.start(&whole, &["--capacity", "256MiB"]);
    dev.eventually("the spare pool is online", || pool.is_online());
    assert_names(&pool.refused(&whole, &[]), &whole, &["in use by quoin", "stop that first"]);
    let taken = dev.json(&["pool", "list"])[0]["address"].as_str().unwrap().to_owned();
    running.terminate();
    let printed = pool.refused(&whole, &["--listen", &taken]);
    assert!(printed.contains(&taken) && printed.contains("--listen"), "{printed}");

    // A newer format, with a checksum that fits.
    let file = whole.join("pool.quoin");
    let bytes = std::fs::read(&file).unwrap();
    let mut newer = bytes.clone();
    for at in [0, 4096, bytes.len() - 8192, bytes.len() - 4096] {
        newer[at + 32..at + 40].copy_from_slice(&64u64.to_le_bytes());
        let crc = quoin_types::crc32c(&newer[at..at + 92]);
        newer[at + 92..at + 96].copy_from_slice(&crc.to_le_bytes());
    }
    std::fs::write(&file, &newer).unwrap();
    assert_names(&pool.refused(&whole, &[]), &file, &["newer", "start the newer one"]);
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    assert_names(&pool.refused(&whole, &[]), &file, &["restore the whole"]);
    std::fs::write(&file, &bytes).unwrap();

    if is_root() {
        // Root may write to everything but a read-only file system.
        let path = whole.to_str().unwrap();
        run("mount", &["--bind", path, path]);
        run("mount", &["-o", "remount,bind,ro", path]);
        let printed = pool.refused(&whole, &[]);
        run("umount", &[path]);
        assert_names(&printed, &file, &["read-write"]);
    } else {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o400)).unwrap();
        assert_names(&pool.refused(&whole, &[]), &file, &["read-write"]);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    }

    // The pool is unchanged after all refusals.
    let running = pool.start(&whole, &[]);
    dev.eventually("the spare pool is online again", || pool.is_online());
    running.terminate();
    dev.stop();
}

/// Proves: a socket path left by a dead process is taken over, and that of a live one is not.
#[test]
fn a_socket_of_a_dead_process_is_replaced() {
    let scratch = Scratch::new("socket");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "256MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let address = dev.ok(&["volume", "attach", "db", "--nbd"]);
    let socket = PathBuf::from(address.split("socket=").nth(1).unwrap());
    // Only a kill leaves a socket behind.
    std::fs::write(dev.directory.join("run/hold-target"), "").unwrap();
    signal(dev.pid("target").unwrap(), "KILL");
    assert!(socket.exists());
    assert!(std::os::unix::net::UnixStream::connect(&socket).is_err() || socket.exists());
    std::fs::remove_file(dev.directory.join("run/hold-target")).unwrap();
    let client = dev.client("db");
    client.write(0, bytes::Bytes::from(support::block(0, 1)), false).unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), support::block(0, 1));
    client.stop();
    dev.kill("controller");
    dev.eventually("the controller answers on its socket again", || {
        dev.quoin(&["volume", "list"]).status.success().then_some(())
    });
    dev.stop();
}

/// Proves: raw-device pools.
#[test]
fn a_raw_device_is_a_pool_only_on_request_and_serves_like_a_file() {
    if !is_root() {
        return skipped("a block device can only be made by root");
    }
    let scratch = Scratch::new("device");
    let image = scratch.0.join("image");
    std::fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
    let device = LoopDevice(run("losetup", &["-f", "--show", image.to_str().unwrap()]));
    let path = PathBuf::from(&device.0);
    let flags = ["--no-attach", "--pool-size", "512MiB", "--pools", "2"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    let pool = SparePool::new(&dev, &scratch, "raw");
    let printed = pool.refused(&path, &[]);
    assert!(printed.contains(&device.0) && printed.contains("not a Quoin pool"), "{printed}");

    let mut running = pool.start(&path, &["--format"]);
    dev.eventually("the raw pool is online", || pool.is_online());
    // Three replicas need all three pools.
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let client = dev.client("db");
    for lba in 0..200 {
        client
            .write(lba * 4096, bytes::Bytes::from(support::block(lba, 1)), lba % 10 == 0)
            .unwrap();
    }
    signal(i64::from(running.0.id()), "KILL");
    running.0.wait().unwrap();
    client.write(7 * 4096, bytes::Bytes::from(support::block(7, 2)), false).unwrap();
    // A device that holds a pool is not blank: --format changes nothing.
    let running = pool.start(&path, &["--format"]);
    dev.wait_for_volume("db", "whole again", |volume| {
        volume["replicas"].as_array().unwrap().iter().all(|r| r["phase"] == "InSync")
    });
    dev.ok(&["pool", "scrub", "raw", "--wait"]);
    // The pool serves the volume with one of the others.
    std::fs::write(dev.directory.join("run/hold-pool-a"), "").unwrap();
    signal(dev.pid("pool-a").unwrap(), "KILL");
    for lba in 0..200 {
        let version = if lba == 7 { 2 } else { 1 };
        assert_eq!(client.read(lba * 4096, 4096).unwrap(), support::block(lba, version));
    }
    std::fs::remove_file(dev.directory.join("run/hold-pool-a")).unwrap();
    dev.wait_for_volume("db", "online", support::is_online);
    client.stop();
    running.terminate();
    let check =
        Command::new(env!("CARGO_BIN_EXE_quoin")).args(["pool", "check", &device.0]).output();
    assert!(check.unwrap().status.success());
    dev.stop();
}

struct LoopDevice(String);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}
