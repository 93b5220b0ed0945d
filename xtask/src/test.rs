//! `cargo xtask test`: all tests, in parts, each with a time budget.
//!
//! A part that overruns its budget is ended and counts as failed: a test that hangs must not block
//! its user. A test that cannot prove its claim on this machine (no root, no /dev/fuse) is listed
//! as skipped, and is not counted as passed. `--repeat` runs all parts several times, and lists the
//! tests that failed with their counts: one that fails by chance is a defect of the test or of the
//! product. The last line is `N passed, N failed` over all parts and runs.

use crate::{packages, python, run};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Options {
    /// Only parts whose name holds this word (build, unit, integration, processes, simulator,
    /// mutants, model).
    #[arg(long)]
    only: Option<String>,
    /// Install nothing, even as root, and make no Python environment.
    #[arg(long)]
    no_install: bool,
    /// A missing preparation is a failure, and so is a test that is skipped (for CI).
    #[arg(long, conflicts_with = "no_install")]
    complete: bool,
    /// Run everything so many times, and list the tests that failed, with their counts.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Keep every core busy meanwhile; each part has twice its time.
    #[arg(long)]
    under_load: bool,
}

/// One part of the whole.
struct Part {
    name: &'static str,
    /// Budget for a machine with two cores that has other work to do as well.
    budget: Duration,
    arguments: &'static [&'static str],
    /// True if the program is a test, or a build, as a whole (its exit code is the verdict).
    is_single: bool,
}

/// Each command selects the whole workspace: what is built for one part then serves the others, as
/// every dependency has the same features. `--package` would build most of them once more.
const PARTS: [Part; 7] = [
    Part {
        name: "build",
        budget: Duration::from_secs(25 * 60),
        arguments: &["test", "--workspace", "--lib", "--bins", "--test", "*", "--no-run"],
        is_single: true,
    },
    Part {
        name: "unit and property tests",
        budget: Duration::from_secs(10 * 60),
        arguments: &["test", "--workspace", "--lib", "--bins", "--no-fail-fast"],
        is_single: false,
    },
    Part {
        name: "simulator",
        budget: Duration::from_secs(5 * 60),
        arguments: &["run", "--quiet", "--bin", "quoin-sim", "--", "--seeds", "60"],
        is_single: true,
    },
    Part {
        name: "mutants",
        budget: Duration::from_secs(8 * 60),
        arguments: &[
            "run",
            "--quiet",
            "--features",
            "quoin-sim/mutants",
            "--bin",
            "quoin-mutants",
            "--",
            "--quick",
        ],
        is_single: true,
    },
    Part {
        name: "model",
        budget: Duration::from_secs(5 * 60),
        arguments: &["run", "--quiet", "--bin", "quoin-model", "--", "--quick"],
        is_single: true,
    },
    Part {
        name: "integration tests",
        budget: Duration::from_secs(15 * 60),
        // Every one but the tests of real processes.
        arguments: &[
            "test",
            "--workspace",
            "--test",
            "[!p]*",
            "--no-fail-fast",
            "--",
            "--test-threads=3",
        ],
        is_single: false,
    },
    Part {
        name: "tests of real processes",
        budget: Duration::from_secs(20 * 60),
        // More threads than cores: these tests wait for processes most of their time.
        arguments: &["test", "--workspace", "--test", "processes", "--", "--test-threads=5"],
        is_single: false,
    },
];

/// Result of one part.
#[derive(Default, Debug, PartialEq)]
struct Tally {
    passed: u64,
    failed: u64,
    /// Names of the tests that failed, as far as the output has them.
    names: Vec<String>,
}

/// Threads that keep every core busy until this is dropped.
struct Load {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn new() -> Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let spin = || {
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..std::thread::available_parallelism()?.get()).map(|_| spin()).collect();
        Ok(Self { is_over, threads })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

pub fn run(options: &Options) -> Result<()> {
    let chosen: Vec<_> = PARTS
        .iter()
        .filter(|part| options.only.as_ref().is_none_or(|word| part.name.contains(word.as_str())))
        .collect();
    if chosen.is_empty() {
        let names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        bail!("no part of that name; there are {}", names.join(", "));
    }
    let python = if options.no_install { None } else { prepare(options.complete)? };
    let skips = Skips::new()?;
    let load = options.under_load.then(Load::new).transpose()?;
    let mut all = Tally::default();
    let mut failures: BTreeMap<String, u32> = BTreeMap::new();
    for round in 1..=options.repeat {
        if options.repeat > 1 {
            println!("\n=== run {round} of {} ===", options.repeat);
        }
        for name in run_parts(&chosen, python.as_deref(), &skips, load.is_some(), &mut all)? {
            *failures.entry(name).or_default() += 1;
        }
    }
    drop(load);
    let skipped = skips.read()?;
    drop(skips);
    for line in &skipped {
        println!("skipped: {line}");
    }
    let skips = u64::from(options.repeat) * skipped.len() as u64;
    all.passed = all.passed.saturating_sub(skips);
    if options.complete {
        all.failed += skips;
    }
    if options.repeat > 1 {
        for (name, times) in &failures {
            println!("failed {times} of {} times: {name}", options.repeat);
        }
    }
    println!("{} passed, {} failed", all.passed, all.failed);
    if all.failed > 0 {
        // The counts are the message and must stay the last line.
        std::process::exit(1);
    }
    Ok(())
}

/// Runs each part once, prints its result and adds it to `all`; returns the names of the failures.
fn run_parts(
    parts: &[&Part],
    python: Option<&Path>,
    skips: &Skips,
    is_loaded: bool,
    all: &mut Tally,
) -> Result<BTreeSet<String>> {
    let mut rows = Vec::new();
    for part in parts {
        println!("\n=== {} ===", part.name);
        let began = Instant::now();
        let (tally, problem) = run_part(part, python, skips, is_loaded)?;
        rows.push((part.name, tally, problem, began.elapsed()));
    }
    println!("\n=== summary ===");
    let mut failed = BTreeSet::new();
    for (name, tally, problem, took) in rows {
        println!(
            "{name:<26} {:>5} passed {:>3} failed {:>6.1} s  {}",
            tally.passed,
            tally.failed,
            took.as_secs_f64(),
            problem.as_deref().unwrap_or("")
        );
        all.passed += tally.passed;
        all.failed += tally.failed;
        if tally.failed > 0 && tally.names.is_empty() {
            failed.insert(format!("({name})"));
        }
        failed.extend(tally.names);
    }
    Ok(failed)
}

/// Installs what the tests need of the machine; returns the Python that CSI clients run in.
fn prepare(complete: bool) -> Result<Option<PathBuf>> {
    packages::provide(&packages::OF_TESTS)?;
    match python::provide() {
        Ok(python) => Ok(Some(python)),
        Err(error) if complete => Err(error.context("the tests of Python clients cannot run")),
        Err(error) => {
            println!("\nNOTE: the tests of Python clients are SKIPPED: {error:#}\n");
            Ok(None)
        }
    }
}

/// File with the reports of tests that prove less than their names claim.
struct Skips(PathBuf);

impl Skips {
    fn new() -> Result<Self> {
        let directory = run::target_directory()?;
        std::fs::create_dir_all(&directory)?;
        let list = Self(directory.join(format!("skipped-{}", std::process::id())));
        let _ = std::fs::remove_file(&list.0);
        Ok(list)
    }

    /// Returns one line for each test that was skipped, with its reasons.
    fn read(&self) -> Result<Vec<String>> {
        let text = match std::fs::read_to_string(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("cannot read {}", self.0.display()))?,
        };
        let mut tests: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (test, why) in text.lines().filter_map(|line| line.split_once(": ")) {
            tests.entry(test).or_default().insert(why);
        }
        let line = |(test, why): (&&str, &BTreeSet<&str>)| {
            format!("{test}: {}", why.iter().copied().collect::<Vec<_>>().join("; "))
        };
        Ok(tests.iter().map(line).collect())
    }
}

impl Drop for Skips {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn run_part(
    part: &Part,
    python: Option<&Path>,
    skips: &Skips,
    is_loaded: bool,
) -> Result<(Tally, Option<String>)> {
    let budget = part.budget * if is_loaded { 2 } else { 1 };
    let mut command = run::with_own_mounts(run::cargo());
    command.env("QUOIN_SKIPPED", &skips.0);
    if let Some(python) = python {
        command.env(python::VARIABLE, python);
    }
    command.args(part.arguments);
    let (mut tally, status) = watch(&mut command, budget)?;
    if part.is_single {
        tally = Tally { passed: u64::from(status == Ending::Success), ..Tally::default() };
    }
    let problem = match status {
        Ending::Success => None,
        Ending::Failure => Some(format!("`{}` failed", run::show(&command))),
        Ending::OverBudget => Some(format!("ended after its budget of {} s", budget.as_secs())),
    };
    if problem.is_some() && tally.failed == 0 {
        // A build that fails or a test that hangs prints no count of its own.
        tally.failed = 1;
    }
    Ok((tally, problem))
}

#[derive(Debug, PartialEq)]
enum Ending {
    Success,
    Failure,
    OverBudget,
}

/// Runs `command`, shows its output as it arrives and counts cargo test's result lines.
fn watch(command: &mut Command, budget: Duration) -> Result<(Tally, Ending)> {
    let shown = run::show(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // A group of its own, so that ending it ends the tests' own processes as well.
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start `{shown}`"))?;
    let output = child.stdout.take().context("no output to read")?;
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    let ends_at = Instant::now() + budget;
    let mut tally = Tally::default();
    loop {
        let left = ends_at.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) => {
                println!("{line}");
                if let Some((passed, failed)) = result_line(&line) {
                    tally.passed += passed;
                    tally.failed += failed;
                }
                tally.names.extend(failed_test(&line).map(str::to_owned));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                end_group(&mut child);
                return Ok((tally, Ending::OverBudget));
            }
        }
    }
    let status = child.wait()?;
    Ok((tally, if status.success() { Ending::Success } else { Ending::Failure }))
}

fn end_group(child: &mut Child) {
    let group = format!("-{}", child.id());
    let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
    let _ = child.wait();
}

/// Returns the name in `test a::b ... FAILED`.
fn failed_test(line: &str) -> Option<&str> {
    let name = line.strip_suffix(" ... FAILED")?.strip_prefix("test ")?;
    Some(name.split(" - should panic").next().unwrap_or(name))
}

/// Returns the passed and failed counts of `test result: ok. 12 passed; 0 failed; …`.
fn result_line(line: &str) -> Option<(u64, u64)> {
    let counts = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |word: &str| {
        counts.split(';').find_map(|part| part.trim().strip_suffix(word)?.trim().parse().ok())
    };
    Some((count("passed")?, count("failed")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_was_skipped_twice_is_one_and_keeps_both_reasons() {
        let skips = Skips::new().unwrap();
        assert_eq!(skips.read().unwrap(), Vec::<String>::new());
        let lines = "a::b: no root\nc: fio is not installed\na::b: no root\na::b: no fuse\n";
        std::fs::write(&skips.0, lines).unwrap();
        let told = ["a::b: no fuse; no root", "c: fio is not installed"];
        assert_eq!(skips.read().unwrap(), told);
    }

    #[test]
    fn cargo_tests_result_line_is_counted_and_other_lines_are_not() {
        let line =
            "test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(result_line(line), Some((12, 3)));
        assert_eq!(result_line("test a::b ... ok"), None);
        assert_eq!(result_line("test result: ok"), None);
    }

    #[test]
    fn each_test_program_runs_in_one_part() {
        let metadata = run::metadata().unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let targets = packages.iter().flat_map(|package| package["targets"].as_array().unwrap());
        let is_test = |target: &&serde_json::Value| target["kind"][0] == "test";
        let names = targets.filter(is_test).map(|target| target["name"].as_str().unwrap());
        let not_integration: Vec<_> = names.filter(|name| name.starts_with('p')).collect();
        assert_eq!(not_integration, ["processes"], "the pattern `[!p]*` leaves out the others");
    }

    #[test]
    fn a_part_that_overruns_its_budget_is_ended_with_its_children() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'test result: ok. 2 passed; 0 failed;'; sleep 600 & wait"]);
        let (tally, ending) = watch(&mut command, Duration::from_millis(300)).unwrap();
        assert_eq!((tally.passed, tally.failed, ending), (2, 0, Ending::OverBudget));
    }

    #[test]
    fn tests_that_fail_are_known_by_their_names() {
        let mut command = Command::new("printf");
        command.arg(
            "test a::b ... ok\ntest a::c ... FAILED\ntest d - should panic ... FAILED\n\
             failures:\n    a::c\ntest result: FAILED. 1 passed; 2 failed;\n",
        );
        let (tally, _) = watch(&mut command, Duration::from_secs(60)).unwrap();
        let names = ["a::c", "d"].map(str::to_owned).to_vec();
        assert_eq!(tally, Tally { passed: 1, failed: 2, names });
    }

    #[test]
    fn load_ends_when_it_is_dropped() {
        let load = Load::new().unwrap();
        let ended = load.is_over.clone();
        assert!(!load.threads.is_empty());
        drop(load);
        assert!(ended.load(Ordering::Relaxed));
        assert_eq!(Arc::strong_count(&ended), 1, "a thread goes on");
    }

    #[test]
    fn a_program_that_fails_is_a_failure_even_without_a_count() {
        let (tally, ending) =
            watch(Command::new("sh").args(["-c", "exit 3"]), Duration::from_secs(60)).unwrap();
        assert_eq!((tally, ending), (Tally::default(), Ending::Failure));
    }
}
