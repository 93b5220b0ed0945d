//! Oracles about a change: single tests, and the simulator's seeds.
//!
//! The woven code records the changes that it reached (`QUOIN_WOVEN_REACHED`). Each test runs once
//! on sound code, and its duration and reached changes are kept beside the build, so that a change
//! is tried only with tests that reach it.

use super::confined::{Ending, Program};
use super::{NOT_ASKED, SEEDS, Subject};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Minimum limit of CPU time. A change that makes a test run without end, or take memory without
/// bound, is noticed by a multiple of the sound code's usage, and at least this.
const CPU_MIN: Duration = Duration::from_secs(10);
/// Minimum limit of the clock: a test that waits without end uses no CPU.
const WALL_MIN: Duration = Duration::from_secs(30);
const TIMES_MAX: u32 = 6;
/// Limit for a test on sound code.
const SOUND_MAX: Duration = Duration::from_secs(3600);
/// Duration above which a test is listed.
const SLOW: Duration = Duration::from_secs(5);
/// Tests of the store that use a block device of the machine.
const NEEDS_A_DEVICE: &str = "device::";
/// Number of changes that are tried at a time, as most tests wait.
pub const WORKERS: usize = 2;

pub struct Oracle {
    /// `PACKAGE TARGET: TEST`.
    pub name: String,
    program: PathBuf,
    arguments: Vec<String>,
    pub on_sound: OnSound,
}

/// Result of a test on sound code.
#[derive(Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct OnSound {
    /// Build time of its program, in nanoseconds.
    built: u128,
    pub time: Duration,
    /// Numbers of the changes that it reached.
    pub reached: BTreeSet<u32>,
}

#[derive(Debug, PartialEq)]
pub enum Said {
    Nothing,
    Noticed(String),
    EndsNot,
}

impl Oracle {
    /// Returns the package: tests find their data from their crate.
    pub fn package(&self) -> &str {
        self.name.split(' ').next().unwrap_or_default()
    }

    /// Runs the oracle on a change; `None`: on the sound code.
    pub fn ask(&self, change: Option<u32>, tree: &Path) -> Result<Said> {
        let time = self.on_sound.time * TIMES_MAX;
        let woven = ("QUOIN_WOVEN", change.unwrap_or(u32::MAX).to_string());
        self.run(woven, CPU_MIN + time, WALL_MIN + time, tree)
    }

    fn run(
        &self,
        variable: (&'static str, String),
        cpu: Duration,
        wall: Duration,
        tree: &Path,
    ) -> Result<Said> {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        // A short path: sockets are made below it.
        let scratch = std::env::temp_dir().join(format!("qm-{}-{run}", std::process::id()));
        let program = Program {
            name: &self.name,
            path: &self.program,
            arguments: &self.arguments,
            folder: folder_of(tree, &format!("quoin-{}", self.package())),
            variables: vec![variable],
            cpu,
            wall,
        };
        let output = program.run(&scratch)?;
        Ok(match output.ending {
            Ending::Success => Said::Nothing,
            Ending::Late => Said::EndsNot,
            Ending::Failure(status) => {
                let swarm = output.text.lines().find(|line| line.starts_with("--swarm "));
                Said::Noticed(swarm.map_or(status, |line| line.chars().take(60).collect()))
            }
        })
    }

    fn try_on_sound(&mut self, tree: &Path, reached: &Path) -> Result<Said> {
        let _ = std::fs::remove_file(reached);
        let variable = ("QUOIN_WOVEN_REACHED", reached.display().to_string());
        let start = Instant::now();
        let said = self.run(variable, SOUND_MAX, SOUND_MAX, tree)?;
        self.on_sound.time = start.elapsed();
        let text = std::fs::read_to_string(reached).unwrap_or_default();
        self.on_sound.reached = text.lines().filter_map(|line| line.parse().ok()).collect();
        let _ = std::fs::remove_file(reached);
        Ok(said)
    }
}

/// Returns all oracles, the quickest first. Each must pass on sound code.
pub fn all(
    subject: &Subject,
    messages: &[serde_json::Value],
    tree: &Path,
    folder: &Path,
    by: &str,
) -> Result<Vec<Oracle>> {
    let mut oracles = listed(subject, messages, tree, by)?;
    let path = folder.join("tests.json");
    let mut known: BTreeMap<String, OnSound> = std::fs::read(&path)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default();
    let (mut ready, mut new) = (Vec::new(), Vec::new());
    for mut oracle in oracles.drain(..) {
        let built = std::fs::metadata(&oracle.program)?.modified()?;
        oracle.on_sound.built = built.duration_since(UNIX_EPOCH)?.as_nanos();
        match known.get(&oracle.name) {
            Some(there) if there.built == oracle.on_sound.built => {
                oracle.on_sound = there.clone();
                ready.push(oracle);
            }
            _ => new.push(oracle),
        }
    }
    println!("{} tests are known on sound code, {} are tried", ready.len(), new.len());
    let start = Instant::now();
    let discontent = Mutex::new(Vec::new());
    each(new.iter_mut(), |oracle, worker| {
        let reached = folder.join(format!("reached-{worker}"));
        let mut said = oracle.try_on_sound(tree, &reached)?;
        if said != Said::Nothing {
            println!("{} on sound code: {said:?}; it is tried again", oracle.name);
            said = oracle.try_on_sound(tree, &reached)?;
        }
        if oracle.on_sound.time > SLOW {
            println!("{}: {} s on sound code", oracle.name, oracle.on_sound.time.as_secs());
        }
        if said != Said::Nothing {
            discontent.lock().unwrap_or_else(PoisonError::into_inner).push(oracle.name.clone());
        }
        Ok(())
    })?;
    let discontent = discontent.into_inner().unwrap_or_else(PoisonError::into_inner);
    for oracle in new.iter().filter(|oracle| !discontent.contains(&oracle.name)) {
        known.insert(oracle.name.clone(), oracle.on_sound.clone());
    }
    std::fs::write(&path, serde_json::to_vec(&known)?)?;
    if !discontent.is_empty() {
        bail!("these are not content with sound code: {}", discontent.join(", "));
    }
    ready.extend(new);
    ready.sort_by_key(|oracle| oracle.on_sound.time);
    let whole: Duration = ready.iter().map(|oracle| oracle.on_sound.time).sum();
    println!(
        "{} tests take {} s one by one on sound code ({} s for those that were tried)",
        ready.len(),
        whole.as_secs(),
        start.elapsed().as_secs()
    );
    Ok(ready)
}

/// Returns the tests of the built programs, and the simulator's seeds.
fn listed(
    subject: &Subject,
    messages: &[serde_json::Value],
    tree: &Path,
    by: &str,
) -> Result<Vec<Oracle>> {
    let mut oracles = Vec::new();
    let mut simulator = None;
    for message in messages {
        let Some(executable) = message["executable"].as_str() else { continue };
        let target = &message["target"];
        let name = target["name"].as_str().unwrap_or_default();
        let home = message["manifest_path"].as_str().unwrap_or_default();
        let package = subject.packages.iter().find(|p| home.contains(&format!("/{p}/")));
        match (package, target["kind"][0].as_str()) {
            // Cargo builds two; this is the program and not its tests.
            (Some(&"quoin-sim"), Some("bin"))
                if name == "quoin-sim" && message["profile"]["test"] == false =>
            {
                simulator = Some(PathBuf::from(executable));
            }
            // The program `quoin` has no library, and its tests in itself.
            (Some(package), Some(kind @ ("lib" | "test" | "bin")))
                if kind != "bin" || *package == "quoin" && message["profile"]["test"] == true =>
            {
                let short = package.trim_start_matches("quoin-");
                let folder = folder_of(tree, package);
                let tests = tests_of(executable, &folder)?;
                for test in tests.into_iter().filter(|test| !test.starts_with(NEEDS_A_DEVICE)) {
                    oracles.push(Oracle {
                        name: format!("{short} {name}: {test}"),
                        program: executable.into(),
                        arguments: vec!["--exact".into(), test, "--test-threads=1".into()],
                        on_sound: OnSound::default(),
                    });
                }
            }
            _ => {}
        }
    }
    oracles.retain(|oracle| !NOT_ASKED.iter().any(|first| oracle.name.starts_with(first)));
    if subject.has_seeds && simulator.is_none() && by.is_empty() {
        bail!("cargo built no simulator");
    }
    for (program, arguments) in simulator.iter().flat_map(|s| SEEDS.map(|seeds| (s, seeds))) {
        oracles.push(Oracle {
            name: format!("sim {}", arguments.join(" ")),
            program: program.clone(),
            arguments: arguments.iter().map(|a| (*a).to_owned()).collect(),
            on_sound: OnSound::default(),
        });
    }
    oracles.retain(|oracle| oracle.name.starts_with(by));
    Ok(oracles)
}

/// Returns a crate's folder in the copied tree.
fn folder_of(tree: &Path, package: &str) -> PathBuf {
    let in_product = tree.join("crates").join(package);
    if in_product.exists() { in_product } else { tree.join("verification").join(package) }
}

fn tests_of(executable: &str, folder: &Path) -> Result<Vec<String>> {
    let mut list = Command::new(executable);
    list.args(["--list", "--format", "terse"]).current_dir(folder);
    let output = list.output().with_context(|| format!("cannot start {executable}"))?;
    if !output.status.success() {
        bail!("{executable} does not list its tests ({})", output.status);
    }
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Does the work for each, some at a time; `work` gets the number of its worker as well.
pub fn each<T: Send>(
    items: impl Iterator<Item = T> + Send,
    work: impl Fn(T, usize) -> Result<()> + Sync,
) -> Result<()> {
    let items = Mutex::new(items);
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    std::thread::scope(|scope| {
        let worker = |number| {
            let (next, work) = (&next, &work);
            scope.spawn(move || -> Result<()> {
                while let Some(item) = next() {
                    work(item, number)?;
                }
                Ok(())
            })
        };
        let workers: Vec<_> = (0..WORKERS).map(worker).collect();
        for worker in workers {
            worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        }
        Ok(())
    })
}
