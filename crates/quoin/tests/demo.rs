//! The demo as a person runs it without root: whole, and given up in the middle.

#[path = "common/dev.rs"]
mod running;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use running::{Scratch, assert_nothing_is_left, eventually, signal};

fn demo(under: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["demo", "--user-space", "--size", "256MiB", "--under"])
        .arg(under)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
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
    let child = demo(&scratch.0);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
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
    assert_clean(&scratch.0);
}

#[test]
fn a_demo_that_is_interrupted_under_load_cleans_everything_up() {
    let scratch = Scratch::new("demo-int");
    let mut child = demo(&scratch.0);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let at_work = lines.find(|line| line.contains("starting the application"));
    assert!(at_work.is_some(), "it never came so far");
    signal(child.id(), "INT");
    let rest: Vec<_> = lines.collect();
    let status = eventually("it ends", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(130), "{rest:?}");
    assert!(rest.iter().any(|line| line.contains("cleaned up")), "{rest:?}");
    assert_clean(&scratch.0);
}
