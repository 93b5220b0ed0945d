//! The demo as a user runs it as root, with a mounted file system: whole, and ended at each of its
//! steps, which are those that it prints, so that a new one is included. Without root:
//! `unprivileged.rs`.

use crate::common::dev as running;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use running::{Scratch, assert_nothing_is_left, can_attach, eventually, have, skipped};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

const OVER_NBD: &[&str] = &["--user-space"];
const MOUNTED: &[&str] = &[];
/// The story of two clusters, which has one size and no single parts.
const DR: &[&str] = &["dr"];
/// The same as an orchestrator tells it.
const DR_BY_CALLS: &[&str] = &["dr", "--csi"];

fn is_dr(how: &[&str]) -> bool {
    how.first() == Some(&"dr")
}

fn demo(under: &Path, how: &[&str]) -> Child {
    let size: &[&str] = if is_dr(how) { &[] } else { &["--size", "256MiB"] };
    Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["demo", "--under"])
        .arg(under)
        .args(size)
        .args(how)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // A process group as in a terminal: Ctrl-C reaches all of a job and nothing beside it.
        .process_group(0)
        .spawn()
        .unwrap()
}

/// Returns whether this machine can mount a volume; otherwise records that a test proves nothing.
fn can_mount() -> bool {
    let can = can_attach() && Path::new("/dev/loop-control").exists() && have("mkfs.ext4");
    if !can {
        skipped("the mounted demo needs root, /dev/fuse, /dev/loop-control and mkfs.ext4");
    }
    can
}

/// Ways in which a user ends it early.
#[derive(Clone, Copy, PartialEq)]
enum End {
    /// Ctrl-C.
    Once,
    /// Ctrl-C, and twice more while the first is being handled.
    Impatient,
    /// `kill` of the demo alone.
    Terminate,
    /// The reader of its output goes away.
    Closed,
}

const ENDS: [End; 4] = [End::Once, End::Impatient, End::Terminate, End::Closed];

/// Runs the demo until a line has these words, ends it after this delay, and checks that nothing
/// stays. Of its faults it injects only that of the line.
fn interrupt_at(words: &str, under: &Path, how: &[&str], end: End, after: Duration) {
    let only = ["--only", words];
    let mut child = demo(under, &[how, if is_dr(how) { &[] } else { &only }].concat());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut before = Vec::new();
    let reached = lines.by_ref().any(|line| {
        before.push(line);
        before.last().is_some_and(|line| line.contains(words))
    });
    assert!(reached, "it never came to {words:?}: {before:?}");
    std::thread::sleep(after);
    let group = Pid::from_child(&child);
    let mut printed = Vec::new();
    match end {
        End::Once => kill_process_group(group, Signal::INT).unwrap(),
        End::Terminate => kill_process(group, Signal::TERM).unwrap(),
        End::Closed => {}
        End::Impatient => {
            kill_process_group(group, Signal::INT).unwrap();
            for answer in ["interrupted: ", "still taking"] {
                let answered = lines.by_ref().any(|line| {
                    printed.push(line);
                    printed.last().is_some_and(|line| line.starts_with(answer))
                });
                // The demo may be gone before the second at its very end.
                assert!(
                    answered || printed.last().is_some_and(|line| is_over(line)),
                    "{printed:?}"
                );
                let _ = kill_process_group(group, Signal::INT);
            }
        }
    }
    match end {
        End::Closed => drop(lines),
        _ => printed.extend(lines),
    }
    let status = eventually("it ends", || child.try_wait().unwrap());
    let reported = |words| printed.iter().any(|line: &String| line.contains(words));
    // A signal near its end may find all of it done.
    let came_too_late =
        status.success() && (reported("nothing is left behind") || end == End::Closed);
    if !came_too_late {
        assert_eq!(status.code(), Some(130), "at {words:?}: {printed:?}");
        assert!(reported("cleaned up") || end == End::Closed, "at {words:?}: {printed:?}");
    }
    assert_clean(under);
}

fn is_over(line: &str) -> bool {
    line.contains("cleaned up") || line.contains("nothing is left behind")
}

/// Ends a demo at each of these steps, by various ways, two at a time.
fn interrupt_at_each(steps: &[String], under: &Path, how: &[&str]) {
    let next = AtomicUsize::new(0);
    let one_after_another = |under: &Path| {
        std::fs::create_dir(under).unwrap();
        while let Some((index, step)) = {
            let index = next.fetch_add(1, Ordering::SeqCst);
            steps.get(index).map(|step| (index, step))
        } {
            // Signals come at once, and in the middle of the step.
            let after = Duration::from_millis([0, 400, 150, 50, 1000][index % 5]);
            println!("{:?} after {step:?}", after);
            interrupt_at(step, under, how, ENDS[index % ENDS.len()], after);
        }
        std::fs::remove_dir(under).unwrap();
    };
    std::thread::scope(|scope| {
        for lane in ["a", "b"] {
            let under = under.join(lane);
            scope.spawn(move || one_after_another(&under));
        }
    });
}

/// Returns the lines by which it announces its steps.
fn steps(printed: &str) -> Vec<String> {
    let step = |line: &str| Some(line.strip_prefix('[')?.split_once(" s] ")?.1.to_owned());
    printed.lines().filter_map(step).collect()
}

/// Runs it to its end; returns its output.
fn run_whole(under: &Path, how: &[&str]) -> String {
    let output = demo(under, how).wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}");
    assert_clean(under);
    printed
}

/// Asserts that there is no directory, mount or loop device, and no process whose command line
/// names the place.
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
fn the_mounted_demo_is_ended_at_each_of_its_steps_and_leaves_nothing_behind() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("demo-mnt");
    let printed = run_whole(&scratch.0, MOUNTED);
    for words in [
        "published, staged (ext4) and mounted",
        "kill -9 of a pool",
        "wiped with its pool",
        "kill -9 of the target",
        "kill -9 of the controller",
        "a replica is added",
        "a replica is removed",
        "a replica moves to another pool",
        "while its pool is down",
        "a copy twice as large used beside the volume",
        "the volume grows under the application",
        "kill -9 of all of them at once",
        "with the mount in place, then a cold start",
        "errors seen by the application: none",
        "nothing is left behind",
    ] {
        assert!(printed.contains(words), "it does not say {words:?}: {printed}");
    }
    assert!(!printed.contains("over NBD"), "it did not mount: {printed}");
    let steps = steps(&printed);
    assert!(steps.len() >= 17, "{steps:?}");
    interrupt_at_each(&steps, &scratch.0, MOUNTED);
    let printed = run_whole(&scratch.0, &["--only", "the target"]);
    assert!(printed.contains("higher epoch"), "{printed}");
}

/// Ends it in slow starts and within steps, which have no line of their own.
#[test]
fn an_interrupted_demo_over_nbd_leaves_nothing_behind() {
    let scratch = Scratch::new("demo-int");
    for (end, after_ms) in [(End::Once, 20), (End::Impatient, 700), (End::Closed, 1500)] {
        let after = Duration::from_millis(after_ms);
        interrupt_at("starting an all-in-one", &scratch.0, OVER_NBD, end, after);
    }
    let now = Duration::ZERO;
    interrupt_at("undisturbed: ", &scratch.0, OVER_NBD, End::Impatient, now);
    interrupt_at("served over NBD", &scratch.0, OVER_NBD, End::Terminate, now);
}

/// Proves that every claim of the story holds, from a loss of a cluster to the way back.
#[test]
fn the_demo_of_a_lost_cluster_tells_its_story_and_leaves_nothing_behind() {
    let scratch = Scratch::new("dr");
    let printed = run_whole(&scratch.0, DR);
    for words in [
        "two clusters that are paired",
        "all that was acknowledged before",
        "the first cluster is lost",
        "only force promotes",
        "told: at most the last",
        "are of one instant",
        "split brain",
        "discards nothing without force",
        "kept: lost-",
        "first is secondary",
        "none is lost",
        "nothing is left behind",
    ] {
        assert!(printed.contains(words), "it does not say {words:?}: {printed}");
    }
    assert!(steps(&printed).len() >= 9, "{printed}");
}

/// Ends it while two clusters start, and while one of them is lost.
#[test]
fn an_interrupted_demo_of_a_lost_cluster_leaves_nothing_behind() {
    let scratch = Scratch::new("dr-cut");
    let after = Duration::from_millis(1500);
    interrupt_at("starting two clusters", &scratch.0, DR, End::Impatient, after);
    interrupt_at("the first cluster is lost", &scratch.0, DR, End::Once, after);
}

/// The rest of the story is the order of calls of `orchestrators.rs`.
#[test]
fn the_demo_by_calls_deploys_a_database_that_is_lost_and_leaves_nothing_behind_when_it_is_interrupted()
 {
    let scratch = Scratch::new("dr-calls");
    let after = Duration::from_millis(400);
    interrupt_at("the database ended; ", &scratch.0, DR_BY_CALLS, End::Once, after);
}

#[test]
fn a_directory_name_too_long_for_sockets_is_refused_with_the_way_out() {
    let scratch = Scratch::new("demo-long");
    let long = scratch.0.join("x".repeat(60));
    std::fs::create_dir(&long).unwrap();
    let mut demo = Command::new(env!("CARGO_BIN_EXE_quoin"));
    let output = demo.args(["demo", "--under"]).arg(&long).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("too long") && printed.contains("--under"), "{printed}");
    assert_clean(&long);
}
