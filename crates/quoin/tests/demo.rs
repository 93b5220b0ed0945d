//! The demo as a person runs it, with a mounted file system as root and over NBD without: whole,
//! and given up in the middle.

#[path = "common/dev.rs"]
mod running;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use running::{Scratch, assert_nothing_is_left, can_attach, eventually, have, skipped};
use rustix::process::{Pid, Signal, kill_process_group};

const OVER_NBD: &[&str] = &["--user-space"];
const MOUNTED: &[&str] = &[];

fn demo(under: &Path, how: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["demo", "--size", "256MiB", "--under"])
        .arg(under)
        .args(how)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // As a terminal has it: Ctrl-C reaches all of a job and nothing beside it.
        .process_group(0)
        .spawn()
        .unwrap()
}

/// Whether this machine can mount a volume; where it cannot, says that a test proves nothing.
fn can_mount() -> bool {
    let can = can_attach() && Path::new("/dev/loop-control").exists() && have("mkfs.ext4");
    if !can {
        skipped("the mounted demo needs root, /dev/fuse, /dev/loop-control and mkfs.ext4");
    }
    can
}

/// Runs the demo until a line has these words, presses Ctrl-C, and sees that nothing stays.
fn interrupt_at(words: &str, under: &Path, how: &[&str]) {
    let mut child = demo(under, how);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut before = Vec::new();
    let reached = lines.by_ref().any(|line| {
        before.push(line);
        before.last().is_some_and(|line| line.contains(words))
    });
    assert!(reached, "it never came to {words:?}: {before:?}");
    kill_process_group(Pid::from_child(&child), Signal::INT).unwrap();
    let rest: Vec<_> = lines.collect();
    let status = eventually("it ends", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(130), "at {words:?}: {rest:?}");
    assert!(rest.iter().any(|line| line.contains("cleaned up")), "at {words:?}: {rest:?}");
    assert_clean(under);
}

/// Runs it to its end; what it said.
fn run_whole(under: &Path, how: &[&str]) -> String {
    let output = demo(under, how).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    assert_clean(under);
    said
}

/// No directory, mount or loop device, and no process whose command line names the place.
fn assert_clean(under: &Path) {
    let left: Vec<_> = std::fs::read_dir(under).unwrap().flatten().map(|e| e.path()).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_nothing_is_left(under);
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let is_ours = line.contains("quoin-demo-") && line.contains(under.to_str().unwrap());
        assert!(!is_ours, "{line} is left");
    }
}

#[test]
fn the_demo_over_nbd_survives_every_harm_and_leaves_nothing_behind() {
    let scratch = Scratch::new("demo");
    let said = run_whole(&scratch.0, OVER_NBD);
    for words in [
        "the volume is used over NBD",
        "kill -9 of a pool",
        "wiped with its pool",
        "kill -9 of the target",
        "kill -9 of the controller",
        "a replica is added",
        "one is taken away",
        "one goes to another pool",
        "while its pool is down",
        "cold start",
        "errors seen by the application: none",
        "nothing is left behind",
    ] {
        assert!(said.contains(words), "it does not say {words:?}: {said}");
    }
}

#[test]
fn a_demo_that_is_interrupted_under_load_cleans_everything_up() {
    let scratch = Scratch::new("demo-int");
    interrupt_at("starting the application", &scratch.0, OVER_NBD);
}

#[test]
fn the_mounted_demo_works_after_ones_that_were_interrupted_and_none_leaves_anything_behind() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("demo-mnt");
    for words in [
        "starting an all-in-one Quoin",
        "creating a volume",
        "published, staged (ext4) and mounted",
        "kill -9 of a pool",
        "a replica wiped with its pool",
    ] {
        interrupt_at(words, &scratch.0, MOUNTED);
    }
    let said = run_whole(&scratch.0, MOUNTED);
    for words in [
        "published, staged (ext4) and mounted",
        "kill -9 of a pool",
        "wiped with its pool",
        "kill -9 of the target",
        "kill -9 of the controller",
        "kill -9 of all of them at once",
        "with the mount in place, then a cold start",
        "errors seen by the application: none",
        "nothing is left behind",
    ] {
        assert!(said.contains(words), "it does not say {words:?}: {said}");
    }
    assert!(!said.contains("over NBD"), "it did not mount: {said}");
}

/// The worst moment: the mount is there, and all that could take it away was killed.
#[test]
fn a_mounted_demo_that_is_interrupted_in_its_cold_start_cleans_up_what_the_crash_left() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("demo-cold");
    interrupt_at("then a cold start", &scratch.0, MOUNTED);
    interrupt_at("published, staged (ext4) and mounted", &scratch.0, MOUNTED);
}
