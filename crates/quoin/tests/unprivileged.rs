//! A cluster of a user who is not root: everything but block devices works, and each refusal has
//! its reason.

use crate::common;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;

use common::{BUDGET, Scratch, eventually, is_root, signal};
use quoin_nbd::client::{Address, Client, ClientOptions};
use quoin_types::block::{Operation, Payload};
use rustix::process::{Pid, Signal, kill_process_group};

const NOBODY: u32 = 65_534;

/// Ends the supervisor, and with it all its children.
struct Dev(Child);

impl Drop for Dev {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Returns this program run by a user who is not root, whoever runs the test.
fn command(program: &Path, home: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("HOME", home).env("QUOIN_SOCKET", home.join("c/run/admin.sock"));
    if is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// Copies the program to where that user may run it; returns it and a directory that they may
/// write.
fn prepare(scratch: &Scratch) -> (PathBuf, PathBuf) {
    // The build directory may be unreadable for others.
    let program = scratch.0.join("quoin");
    // Another process copies it: a file that this one has open for writing, and with it any process
    // that another test starts at that moment, is busy and cannot be executed.
    let mut install = Command::new("install");
    install.args(["-m", "755", env!("CARGO_BIN_EXE_quoin")]).arg(&program);
    assert!(install.status().unwrap().success());
    let home = scratch.0.join("h");
    std::fs::create_dir(&home).unwrap();
    if is_root() {
        std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    (program, home)
}

#[test]
fn without_root_volumes_are_used_over_nbd_and_block_devices_are_refused() {
    let scratch = Scratch::new("nobody");
    let (program, home) = prepare(&scratch);
    let mut dev = command(&program, &home);
    dev.args(["dev", "--dir"]).arg(home.join("c")).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut dev = Dev(dev.spawn().unwrap());
    let output = BufReader::new(dev.0.stdout.take().unwrap());
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            println!("dev: {line}");
            let _ = sender.send(line);
        }
    });
    let first = lines.recv_timeout(BUDGET).unwrap();
    assert!(first.contains("NBD sockets only") && first.contains("root"), "{first}");
    while !lines.recv_timeout(BUDGET).expect("it does not come up").starts_with("Quoin is up") {}

    let quoin = |arguments: &[&str]| -> Output {
        command(&program, &home).args(arguments).stdin(Stdio::null()).output().unwrap()
    };
    let ok = |arguments: &[&str]| {
        let output = quoin(arguments);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {printed}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    for pool in ["pool-a", "pool-b", "pool-c"] {
        let data = home.join("c/pools").join(pool).join("data");
        let data = std::fs::metadata(&data).unwrap_or_else(|e| panic!("{}: {e}", data.display()));
        let taken = data.blocks() * 512;
        assert!(taken <= data.len() / 100, "{pool} takes {taken} of {} at once", data.len());
    }
    ok(&["volume", "create", "db", "--size", "64MiB"]);
    let refused = quoin(&["volume", "attach", "db"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--nbd"));
    // Nothing is half-made: no node has it, and none waits for it.
    let shown = ok(&["volume", "get", "db", "-o", "json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&shown["use"], &shown["phase"]), (&"detached".into(), &"Ready".into()), "{shown}");
    assert_eq!(shown["nodes"], serde_json::json!([]), "{shown}");
    let address = ok(&["volume", "attach", "db", "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1;
    let client = Client::connect(ClientOptions::new(Address::Unix(socket.into()))).unwrap();
    let data = bytes::Bytes::from(vec![9; 8192]);
    client.call(Operation::Write { offset: 4096, data, fua: true }).unwrap();
    let read = client.call(Operation::Read { offset: 4096, length: 8192 }).unwrap();
    let Payload::Data(pieces) = read else { panic!("no data: {read:?}") };
    assert_eq!(pieces.concat(), vec![9; 8192]);
    drop(client);
    ok(&["volume", "detach", "db"]);
    ok(&["volume", "delete", "db", "--yes"]);
    signal(dev.0.id(), "INT");
    let status = eventually("it ends", || dev.0.try_wait().unwrap());
    assert!(status.success(), "{status}");
}

/// Returns the demo as it is without root, with no flag for it.
fn demo(program: &Path, home: &Path) -> Command {
    let mut demo = command(program, home);
    demo.args(["demo", "--size", "256MiB"]).env("TMPDIR", home).stdin(Stdio::null());
    demo.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    demo
}

/// Asserts that there is no file of the demo's and none of its processes.
fn assert_clean(home: &Path) {
    let left: Vec<_> = std::fs::read_dir(home).unwrap().flatten().map(|e| e.path()).collect();
    assert!(left.is_empty(), "{left:?}");
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        assert!(!line.contains(home.to_str().unwrap()), "{line} is left");
    }
}

#[test]
fn the_demo_without_root_uses_nbd_and_survives_all_faults() {
    let scratch = Scratch::new("nd");
    let (program, home) = prepare(&scratch);

    let mut given_up = demo(&program, &home).spawn().unwrap();
    let mut lines = BufReader::new(given_up.stdout.take().unwrap()).lines().map_while(Result::ok);
    let harms = lines.any(|line| line.contains("kill -9 of a pool"));
    if !harms {
        let output = given_up.wait_with_output().unwrap();
        panic!("it never did any harm: {}", String::from_utf8_lossy(&output.stderr));
    }
    kill_process_group(Pid::from_child(&given_up), Signal::INT).unwrap();
    assert!(lines.any(|line| line.contains("cleaned up")), "it did not clean up");
    let status = eventually("it ends", || given_up.try_wait().unwrap());
    assert_eq!(status.code(), Some(130));
    assert_clean(&home);

    let output = demo(&program, &home).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    for words in [
        "over NBD by a client in this process: attaching a block device needs root",
        "kill -9 of a pool",
        "wiped with its pool",
        "kill -9 of the target",
        "kill -9 of the controller",
        "kill -9 of all of them at once",
        "a replica is added",
        "a replica is removed",
        "a replica moves to another pool",
        "while its pool is down",
        "cold start",
        "errors seen by the application: none",
        "as root the same demo mounts it",
        "nothing is left behind",
    ] {
        assert!(printed.contains(words), "it does not say {words:?}: {printed}");
    }
    assert_clean(&home);
}
