//! The hunt for one defect: seeds of the simulator, the model, tests of the crates themselves.
//!
//! A catch is one only if the same seed, or the same test, finds nothing without the defect.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use quoin_types::mutant;

use crate::mutants::{Book, Defect, Known};
use crate::swarm::Swarm;
use crate::{RunOptions, Violation, run};

/// How long one test may take before it counts as hung, which is a catch too.
const TEST_MAX: Duration = Duration::from_secs(120);

/// Modules of tests that are asked about rules of the protocol; the others are the store's.
const CORE_TESTS: [&str; 5] = ["hostile", "replica", "volume", "membership", "codec"];

/// The test binary of the protocol's crate.
const CORE_BINARY: &str = "replication";
/// The tests of the cluster's decisions: asked where they are recorded.
const CLUSTER_BINARY: &str = "quoin_cluster";
const NEEDS_A_DEVICE: &str = "device";

/// How far a hunt goes.
#[derive(Clone, Debug)]
pub struct Limits {
    pub first_seed: u64,
    /// Seeds of the simulator at most, and their time.
    pub seeds: u64,
    pub time: Duration,
    /// Test binaries of the crates, built with the defects.
    pub tests: Vec<PathBuf>,
    /// True if the model is asked as well.
    pub model: bool,
    /// Hunts as if nothing were known.
    pub afresh: bool,
}

/// The seed, test or model that found a defect.
#[derive(Clone, Debug)]
pub struct Catch {
    pub by: By,
    /// The invariant, or the words of the assertion.
    pub rule: String,
    /// Seeds, states or tests until then.
    pub runs: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum By {
    Known(Known),
    Model { like: &'static str },
}

/// Result of a hunt.
#[derive(Clone, Debug, Default)]
pub struct Hunt {
    pub catches: Vec<Catch>,
    /// Seeds that came to the place of the defect, of those that ran.
    pub reached: (u64, u64),
    /// Seeds that break a rule without the defect too: findings of their own.
    pub false_alarms: Vec<(Swarm, Violation)>,
}

/// Hunts until something finds the defect; the model is asked in any case.
pub fn hunt(defect: &Defect, limits: &Limits) -> Hunt {
    let mut found = Hunt::default();
    let known = if limits.afresh { Vec::new() } else { crate::mutants::known(defect.name) };
    for known in &known {
        match known {
            Known::Seed { swarm, seed } => found.try_seed(defect, *swarm, *seed),
            Known::Test { module, test } => {
                found.try_tests(defect, limits, Some((module, test)));
            }
        }
        if !found.catches.is_empty() {
            break;
        }
    }
    if found.catches.is_empty() {
        match defect.book {
            Book::Store => {
                found.try_tests(defect, limits, None);
                if found.catches.is_empty() {
                    found.try_seeds(defect, limits);
                }
            }
            Book::Model => {}
            Book::Mirror | Book::Replication => {
                found.try_seeds(defect, limits);
                if found.catches.is_empty() {
                    found.try_tests(defect, limits, None);
                }
            }
        }
    }
    if let Some(like) = defect.like.filter(|_| limits.model)
        && let Some(caught) = quoin_model::check_mutant(like)
    {
        found.catches.push(Catch {
            by: By::Model { like },
            rule: caught.invariant.to_owned(),
            runs: caught.states as u64,
        });
    }
    found
}

impl Hunt {
    /// The swarm that is likeliest gets every second seed, the others share the rest.
    fn try_seeds(&mut self, defect: &Defect, limits: &Limits) {
        let ends = Instant::now() + limits.time;
        // A swarm of two clusters does not come to the rules of one, nor the other way round.
        let is_mirrored = defect.swarm.is_mirrored();
        let others: Vec<Swarm> = Swarm::ALL
            .iter()
            .copied()
            .filter(|swarm| *swarm != defect.swarm && swarm.is_mirrored() == is_mirrored)
            .collect();
        for n in 0..limits.seeds {
            if !self.catches.is_empty() || Instant::now() >= ends {
                return;
            }
            let (swarm, seed) = match n % 2 {
                0 => (defect.swarm, n / 2),
                _ => (others[n as usize / 2 % others.len()], n / 2 / others.len() as u64),
            };
            self.try_seed(defect, swarm, limits.first_seed + seed);
        }
    }

    fn try_seed(&mut self, defect: &Defect, swarm: Swarm, seed: u64) {
        let options = RunOptions { seed, swarm, ..RunOptions::default() };
        mutant::set(Some(defect.name));
        let report = run(options);
        self.reached.0 += u64::from(mutant::was_reached());
        self.reached.1 += 1;
        mutant::set(None);
        let Some(violation) = report.violation else { return };
        if let Some(violation) = run(options).violation {
            self.false_alarms.push((swarm, violation));
            return;
        }
        self.catches.push(Catch {
            by: By::Known(Known::Seed { swarm, seed }),
            rule: named(&violation.rule, &violation.detail),
            runs: self.reached.1,
        });
    }

    /// All tests, or one.
    fn try_tests(&mut self, defect: &Defect, limits: &Limits, only: Option<(&str, &str)>) {
        let is_core = defect.book == Book::Replication;
        let all = limits
            .tests
            .iter()
            .flat_map(|path| modules_of(path).into_iter().map(move |m| (path, m)));
        for (path, module) in all {
            let binary = binary_name(path);
            let of_the_core = binary == CORE_BINARY;
            let asked = match (only, binary.as_str()) {
                (Some((wanted, _)), _) => wanted == module,
                (None, CLUSTER_BINARY) => defect.book == Book::Mirror,
                (None, CORE_BINARY) => CORE_TESTS.contains(&module.as_str()),
                (None, _) => defect.book == Book::Store,
            };
            if !asked || of_the_core != is_core {
                continue;
            }
            let scope = Scope { module: &module, test: only.map(|(_, test)| test) };
            let Some(failed) = run_tests(path, Some(defect.name), &scope) else {
                continue;
            };
            let alone = Scope { module: &module, test: Some(&failed.test) };
            // A machine under load may make many tests slow; one alone must hang again.
            if failed.hung && run_tests(path, Some(defect.name), &alone).is_none() {
                continue;
            }
            // Without the defect it passes: else it would show nothing.
            if run_tests(path, None, &alone).is_some() {
                continue;
            }
            self.catches.push(Catch {
                by: By::Known(Known::Test { module: module.clone(), test: failed.test.clone() }),
                rule: failed.words,
                runs: 1,
            });
            return;
        }
    }
}

/// The invariant; of an assertion, the first words.
fn named(rule: &str, detail: &str) -> String {
    if rule != "Panic" {
        return rule.to_owned();
    }
    first_words(detail)
}

fn first_words(text: &str) -> String {
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    line.trim().chars().take(48).collect()
}

/// Cargo's name of a test binary without its hash.
fn binary_name(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    file.rsplit_once('-').map_or(file.as_ref(), |(name, _)| name).to_owned()
}

/// Which tests of a binary are run: those of a module, or one of them.
struct Scope<'a> {
    module: &'a str,
    test: Option<&'a str>,
}

/// The modules of tests that a binary holds, without those that need a block device of the machine.
fn modules_of(path: &Path) -> Vec<String> {
    let listed = Command::new(path).args(["--list", "--format", "terse"]).output();
    let text = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let text = text.unwrap_or_default();
    let mut modules: Vec<String> =
        text.lines().filter_map(|line| Some(line.split_once("::")?.0.to_owned())).collect();
    modules.dedup();
    modules.retain(|module| module != NEEDS_A_DEVICE);
    modules
}

struct Failed {
    test: String,
    hung: bool,
    words: String,
}

/// The first test that fails. A hang fails, with the test that was under way.
fn run_tests(path: &Path, defect: Option<&str>, scope: &Scope<'_>) -> Option<Failed> {
    let mut command = Command::new(path);
    command.args(["--test-threads", "1", "--nocapture"]);
    match scope.test {
        Some(test) => command.arg(format!("{}::{test}", scope.module)).arg("--exact"),
        None => command.arg(format!("{}::", scope.module)),
    };
    command.env_remove("QUOIN_MUTANT").env("RUST_BACKTRACE", "0");
    // More images of a crash than an ordinary run of the tests looks at.
    command.env("QUOIN_CRASH_IMAGES", "500");
    if let Some(defect) = defect {
        command.env("QUOIN_MUTANT", defect);
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()?;
    let (stdout, stderr) = (child.stdout.take()?, child.stderr.take()?);
    let reader = |mut from: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = from.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let (out, err) = (reader(Box::new(stdout)), reader(Box::new(stderr)));
    let ends = Instant::now() + TEST_MAX;
    let mut hung = false;
    let status = loop {
        if let Ok(Some(status)) = child.try_wait() {
            break Some(status);
        }
        if Instant::now() >= ends {
            hung = true;
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    if status.is_some_and(|status| status.success()) {
        return None;
    }
    let named = failed_test(&out).or_else(|| last_test(&out))?;
    let test = named.split_once("::").map_or(named.as_str(), |(_, test)| test).to_owned();
    let words = if hung { "does not end".into() } else { panic_words(&err) };
    Some(Failed { test, hung, words })
}

fn failed_test(out: &str) -> Option<String> {
    let names = out.lines().filter_map(|line| line.strip_prefix("    "));
    let mut listed = names.filter(|name| !name.contains(' ') && out.contains("failures:"));
    listed.next().map(str::to_owned)
}

fn last_test(out: &str) -> Option<String> {
    let name = |line: &str| Some(line.strip_prefix("test ")?.split(' ').next()?.to_owned());
    out.lines().filter_map(name).next_back()
}

/// Returns the message of the first panic.
fn panic_words(err: &str) -> String {
    let mut lines = err.lines().skip_while(|line| !line.contains("panicked at"));
    lines.next();
    first_words(&lines.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_failing_test_is_read_from_what_libtest_prints() {
        let out = "running 2 tests\ntest a_b ... ok\ntest c_d ... FAILED\n\nfailures:\n\n\
                   failures:\n    c_d\n\ntest result: FAILED.";
        assert_eq!(failed_test(out).as_deref(), Some("c_d"));
        assert_eq!(last_test("test a ... ok\ntest b_c ... ").as_deref(), Some("b_c"));
        let err = "thread 'c_d' (7) panicked at x.rs:1:2:\n3 is left, 5 was durable\nnote: run";
        assert_eq!(panic_words(err), "3 is left, 5 was durable");
        assert_eq!(binary_name(Path::new("/t/deps/crash_enumeration-0a1b")), "crash_enumeration");
    }
}
