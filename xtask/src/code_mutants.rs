//! `cargo xtask mutants --code`: breaks the code, not the rules.
//!
//! cargo-mutants lists its changes to functions and operators of one [`Subject`]: the core with the
//! store's recovery, the hosts (the drivers' decisions), the drivers around them, or what people and
//! orchestrators meet. One build for each of thousands of changes would take days, so a shard of them
//! is woven into one copy of the tree, each behind a switch (`xtask/weave`), and is one build. Then a test of the subject's crates must notice each: the
//! tests that reach the change are run one by one, those of the changed crate first, the quickest
//! first; for the core the simulator's seeds are among them. Changes that do not compile are
//! unviable; the few that the compiler evaluates (constants) have no switch and are listed as not
//! tried.
//!
//! Results are kept in the tree ([`LEDGER`]), under names that survive an edit elsewhere in the
//! file (equal changes in one function are distinguished by their number), and another run
//! continues where the last one ended, on any machine. A shard is drawn by these names, so that it
//! is the same sample after such an edit. A change that was noticed once is tried again with
//! `--anew` only. For a change without any effect a developer writes `same`, a tab and the reason:
//! it is not tried.

mod confined;
mod oracle;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use oracle::{Oracle, Said};

use crate::{packages, run};

/// A part of the code that is broken, and the tests that must notice.
struct Subject {
    name: &'static str,
    /// Files, as cargo-mutants takes them.
    code: &'static [&'static str],
    /// Crates whose tests are run.
    packages: &'static [&'static str],
    /// A sample of about two hundred.
    shard: &'static str,
    /// True if the simulator's seeds are run as well.
    has_seeds: bool,
}

const SUBJECTS: [Subject; 4] = [
    Subject {
        name: "core",
        code: &[
            "crates/quoin-types/src/**/*.rs",
            "crates/quoin-replication/src/**/*.rs",
            "crates/quoin-store/src/recovery.rs",
            "crates/quoin-store/src/metadata/ring.rs",
            "crates/quoin-store/src/metadata/state.rs",
            "crates/quoin-store/src/format/*.rs",
            "crates/quoin-store/src/log/history.rs",
        ],
        packages: &["quoin-types", "quoin-replication", "quoin-store", "quoin-sim"],
        shard: "0/13",
        has_seeds: true,
    },
    Subject {
        name: "hosts",
        code: &[
            "crates/quoin-replication/src/pool_host/*.rs",
            "crates/quoin-replication/src/target_host/*.rs",
        ],
        packages: &["quoin-replication", "quoin-sim", "quoin-pool", "quoin-target"],
        shard: "0/4",
        has_seeds: true,
    },
    Subject {
        name: "drivers",
        code: &[
            "crates/quoin-pool/src/**/*.rs",
            "crates/quoin-target/src/**/*.rs",
            "crates/quoin-wire/src/**/*.rs",
            "crates/quoin-reactor/src/**/*.rs",
            "crates/quoin-nbd/src/**/*.rs",
            "crates/quoin-attach/src/**/*.rs",
            "crates/quoin-identity/src/**/*.rs",
            "crates/quoin-node/src/**/*.rs",
            "crates/quoin-cluster/src/**/*.rs",
        ],
        packages: &[
            "quoin-pool",
            "quoin-target",
            "quoin-wire",
            "quoin-reactor",
            "quoin-nbd",
            "quoin-attach",
            "quoin-identity",
            "quoin-node",
            "quoin-cluster",
            "quoin-control",
            "quoin-csi",
        ],
        shard: "0/19",
        has_seeds: false,
    },
    Subject {
        name: "faces",
        code: &[
            "crates/quoin-csi/src/**/*.rs",
            "crates/quoin-export/src/**/*.rs",
            "crates/quoin/src/host/*.rs",
            "crates/quoin/src/snapshot/*.rs",
        ],
        packages: &["quoin-csi", "quoin-export", "quoin"],
        shard: "0/7",
        has_seeds: false,
    },
];
/// The switches of the other kind of mutants belong to no product.
const NOT_CODE: &str = "crates/quoin-types/src/mutant.rs";
/// File beside a shard's list: the names of the changes that do not compile.
const UNVIABLE: &str = "unviable.json";
/// Result of each change that was tried.
const LEDGER: &str = "docs/code-mutants.tsv";
/// Tests that are not asked, by the first words of their names: the simulator is an oracle of its
/// own by its seeds, and tests of whole processes would take days.
const NOT_ASKED: [&str; 4] =
    ["sim sim: seeds::", "sim sim: mutants::", "sim quoin_sim:", "quoin processes:"];
/// Arguments of the simulator: a hundred seeds of the swarms, which find most for their time, then
/// broad ones.
const SEEDS: [&[&str]; 2] =
    [&["--swarm", "all", "--seeds", "7", "--stop"], &["--seeds", "30", "--stop"]];
/// `[--of SUBJECT] [--shard K/N] [--anew] [--by TESTS] [--only CHANGE]`: runs the sample, resumed;
/// ends with the changes that no test has noticed.
pub fn run(arguments: &[String]) -> Result<()> {
    let mut subject = &SUBJECTS[0];
    let (mut shard, mut anew, mut by, mut only) = (None, false, "", "");
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match (argument.as_str(), arguments.as_slice()) {
            ("--anew", _) => anew = true,
            ("--of", [value, ..]) => {
                let named = SUBJECTS.iter().find(|subject| subject.name == value);
                subject = named.with_context(|| {
                    let names: Vec<_> = SUBJECTS.iter().map(|subject| subject.name).collect();
                    format!("--of {value}: there are {}", names.join(", "))
                })?;
                arguments.next();
            }
            ("--shard", [value, ..]) => {
                shard = Some(value.as_str());
                arguments.next();
            }
            ("--by", [value, ..]) => {
                by = value;
                arguments.next();
            }
            ("--only", [value, ..]) => {
                only = value;
                arguments.next();
            }
            _ => bail!(
                "--code takes --of SUBJECT (core, hosts, drivers, faces), --shard K/N (K of N equal parts, as in 3/100), --anew (asks again \
                 about what was noticed before), --by TESTS (asks those alone whose name begins \
                 so, as in `replication` or `replication replication: edges`) and --only CHANGE (those whose name has that), \
                 and not {argument}"
            ),
        }
    }
    // A test that finds no tool is skipped, and notices nothing.
    packages::provide(&packages::OF_TESTS)?;
    let there = run::cargo().args(["mutants", "--version"]).output();
    if !there.is_ok_and(|output| output.status.success()) {
        run::check(run::cargo().args(["install", "--locked", "--quiet", "cargo-mutants"]))?;
    }
    let shard = shard.unwrap_or(subject.shard);
    let shared = run::target_directory()?.join("code-mutants");
    let folder = shared.join(format!("{}-{}", subject.name, shard.replace('/', "-of-")));
    std::fs::create_dir_all(&folder)?;
    let (list, names) = listed(subject, shard, &folder)?;
    if anew && only.is_empty() {
        let _ = std::fs::remove_file(folder.join(UNVIABLE));
    }
    // One tree for all shards, so that unchanged parts are built once.
    let tree = shared.join("tree");
    let woven = weave(subject, &list, &tree, &shared, &names, by)?;
    let oracles = oracle::all(subject, &woven.executables, &tree, &folder, by)?;
    let mut ledger = Ledger::read(&run::workspace_root().join(LEDGER))?;
    if anew {
        let asked = names.iter().filter(|name| name.contains(only));
        for name in asked {
            if ledger.known.get(name).is_some_and(|said| !said.starts_with("same")) {
                ledger.known.remove(name);
            }
        }
    }
    let is_asked = |n: &u32| usize::try_from(*n).is_ok_and(|n| names[n].contains(only));
    let asked: Vec<u32> = woven.tried.iter().copied().filter(is_asked).collect();
    let trial = Trial { names: &names, oracles: &oracles, tree: &tree, is_whole: by.is_empty() };
    let ledger = Mutex::new(ledger);
    let alone = RwLock::new(());
    oracle::each(asked.iter(), |number, _| trial.of(*number, &ledger, &alone))?;
    report(&names, &woven, &held(&ledger))
}

fn held(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the changes of a shard by cargo-mutants: its list, and a name of each.
fn listed(subject: &Subject, shard: &str, folder: &Path) -> Result<(PathBuf, Vec<String>)> {
    let parts = shard.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    let Some((part, parts)) = parts.filter(|(k, n): &(u64, u64)| k < n) else {
        bail!("--shard {shard}: it is K/N with K below N, as in 3/100");
    };
    let mut cargo = run::cargo();
    cargo.args(["mutants", "--list", "--json", "--no-shuffle", "--exclude", NOT_CODE]);
    cargo.args(subject.code.iter().flat_map(|file| ["--file", file]));
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo mutants")?;
    if !output.status.success() {
        bail!("`{}` failed ({})", run::show(&cargo), output.status);
    }
    let all: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)?;
    let mut seen = BTreeMap::new();
    let named = all.into_iter().map(|change| {
        let name = lasting_name(change["name"].as_str().unwrap_or_default(), &mut seen);
        (change, name)
    });
    let (drawn, names): (Vec<_>, Vec<_>) =
        named.filter(|(_, name)| fnv(name) % parts == part).unzip();
    let list = folder.join("list.json");
    std::fs::write(&list, serde_json::to_vec(&drawn)?)?;
    Ok((list, names))
}

/// Returns the name without line and column; the second of one name in a file gets a number.
fn lasting_name(name: &str, seen: &mut BTreeMap<String, u32>) -> String {
    let lasting = match name.splitn(4, ':').collect::<Vec<_>>()[..] {
        [file, _line, _column, what] => format!("{file}:{what}"),
        _ => name.to_owned(),
    };
    let count = seen.entry(lasting.clone()).or_default();
    *count += 1;
    if *count == 1 { lasting } else { format!("{lasting} #{count}") }
}

/// FNV-1a: the same on every machine and in every version.
fn fnv(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Copies the files that git knows, in their present state, except those that weaving writes.
fn copy(tree: &Path, list: &Path) -> Result<()> {
    let list: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(list)?)?;
    let changed = || list.iter().filter_map(|m| m["file"].as_str());
    // A crate with a change has the switch in its root file.
    let roots = changed().filter_map(|f| f.split_once("/src/")).filter_map(|(home, _)| {
        let mut roots = ["lib.rs", "main.rs"].map(|root| format!("{home}/src/{root}")).into_iter();
        roots.find(|root| run::workspace_root().join(root).exists())
    });
    let woven: BTreeSet<String> = changed().map(str::to_owned).chain(roots).collect();
    let output = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(run::workspace_root())
        .output()
        .context("cannot start git")?;
    for file in String::from_utf8(output.stdout)?.split('\0').filter(|f| !f.is_empty()) {
        let Ok(now) = std::fs::read(run::workspace_root().join(file)) else { continue };
        let to = tree.join(file);
        // An unchanged file keeps its time, and is not built again.
        if woven.contains(file) && to.exists() || std::fs::read(&to).is_ok_and(|old| old == now) {
            continue;
        }
        std::fs::create_dir_all(to.parent().context("a file lies in a directory")?)?;
        std::fs::write(to, now)?;
    }
    Ok(())
}

struct Woven {
    tried: Vec<u32>,
    unviable: Vec<u32>,
    not_tried: Vec<(u32, String)>,
    executables: Vec<serde_json::Value>,
}

/// Weaves and builds; changes that do not compile are left out, until the rest does.
fn weave(
    subject: &Subject,
    list: &Path,
    tree: &Path,
    shared: &Path,
    names: &[String],
    by: &str,
) -> Result<Woven> {
    let manifest = run::workspace_root().join("xtask/weave/Cargo.toml");
    // Each change that does not compile costs a build. Known ones are left out, as long as their
    // names are the same.
    let kept = list.with_file_name(UNVIABLE);
    let known: BTreeSet<String> = std::fs::read(&kept)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default();
    let numbered = (0..).zip(names).filter(|(_, name)| known.contains(*name));
    let mut unviable: BTreeSet<u32> = numbered.map(|(number, _)| number).collect();
    loop {
        let without = unviable.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        copy(tree, list)?;
        let mut weave = run::cargo();
        weave.args(["run", "--quiet", "--manifest-path"]).arg(&manifest);
        weave.arg("--target-dir").arg(shared.join("weave")).arg("--");
        weave.arg(list).arg(run::workspace_root()).arg(tree).arg(&without);
        let output = weave.output().context("cannot start cargo")?;
        if !output.status.success() {
            bail!("weaving failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let left_out = String::from_utf8_lossy(&output.stdout).into_owned();
        let left_out: Vec<(u32, String)> = left_out
            .lines()
            .filter_map(|l| l.split_once(' '))
            .filter_map(|(n, why)| Some((n.parse().ok()?, why.to_owned())))
            .collect();
        let mut build = run::cargo();
        build.current_dir(tree).args(["test", "--no-run", "--lib", "--tests", "--bins"]);
        let of_those = |package: &&&str| {
            let short = package.trim_start_matches("quoin-");
            by.starts_with(short) || short.starts_with(by)
        };
        let packages = subject.packages.iter().filter(of_those);
        build.args(packages.flat_map(|package| ["--package", package]));
        build.args(["--message-format", "json", "--quiet", "--target-dir"]);
        // Optimised, as a run takes ten times as long as the build; with the checks that tests
        // have.
        build.arg(shared.join("target")).env("CARGO_PROFILE_DEV_OPT_LEVEL", "2");
        let output = build.stderr(Stdio::null()).output().context("cannot start cargo")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let messages: Vec<serde_json::Value> =
            text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect();
        if output.status.success() {
            let named = |n: &u32| names.get(usize::try_from(*n).ok()?);
            let all: BTreeSet<_> = unviable.iter().filter_map(named).collect();
            std::fs::write(&kept, serde_json::to_vec(&all)?)?;
            let not = |n: &u32| unviable.contains(n) || left_out.iter().any(|(m, _)| m == n);
            let all = 0..u32::try_from(names.len())?;
            let (never, not_tried): (Vec<_>, Vec<_>) =
                left_out.iter().cloned().partition(|(_, why)| why.starts_with("unviable"));
            let tried = all.filter(|n| !not(n)).collect();
            let unviable = unviable.iter().copied().chain(never.iter().map(|(n, _)| *n)).collect();
            return Ok(Woven { tried, unviable, not_tried, executables: messages });
        }
        let before = unviable.len();
        unviable.extend(messages.iter().filter_map(|m| blamed(m, tree)));
        if unviable.len() == before {
            bail!("the woven tree does not build: see `{}`", run::show(&build));
        }
    }
}

/// Returns the change that contains an error of the compiler: the last switch before it.
fn blamed(message: &serde_json::Value, tree: &Path) -> Option<u32> {
    let message = &message["message"];
    if message["level"] != "error" {
        return None;
    }
    let span = message["spans"].as_array()?.iter().find(|span| span["is_primary"] == true)?;
    let text = std::fs::read(tree.join(span["file_name"].as_str()?)).ok()?;
    let start = usize::try_from(span["byte_start"].as_u64()?).ok()?;
    let before = String::from_utf8_lossy(text.get(..start)?).into_owned();
    let (_, rest) = before.rsplit_once("woven::on(")?;
    rest.split_once("u32)")?.0.trim().parse().ok()
}

/// Lines of a change's name, a tab, and its result.
struct Ledger {
    path: PathBuf,
    known: BTreeMap<String, String>,
}

impl Ledger {
    fn read(path: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let line = |l: &str| l.split_once('\t').map(|(name, said)| (name.into(), said.into()));
        Ok(Self { path: path.to_owned(), known: text.lines().filter_map(line).collect() })
    }

    /// Writes a new file whole and renames it, so that a run may be ended at any moment.
    fn keep(&mut self, name: &str, said: String) -> Result<()> {
        self.known.insert(name.to_owned(), said);
        let mut text = String::new();
        for (name, said) in &self.known {
            text.push_str(&format!("{name}\t{said}\n"));
        }
        let new = self.path.with_extension("new");
        std::fs::write(&new, text)?;
        std::fs::rename(&new, &self.path).context("cannot write the ledger")
    }
}

/// Tries one change after the other.
struct Trial<'a> {
    names: &'a [String],
    /// The quickest first.
    oracles: &'a [Oracle],
    tree: &'a Path,
    /// True if all tests are run: only then a change that none noticed counts as missed.
    is_whole: bool,
}

impl Trial<'_> {
    /// Tries one change. Others may be tried at the same time, except by the holder of `alone`.
    fn of(&self, number: u32, ledger: &Mutex<Ledger>, alone: &RwLock<()>) -> Result<()> {
        let name = &self.names[usize::try_from(number)?];
        let before = held(ledger).known.get(name).cloned();
        // Missed changes are tried again: there may be a new test.
        let is_open = |said: &String| said.starts_with("missed") || said == "open";
        if before.as_ref().is_some_and(|said| !is_open(said)) {
            return Ok(());
        }
        let start = Instant::now();
        let reaching: Vec<_> =
            self.oracles.iter().filter(|o| o.on_sound.reached.contains(&number)).collect();
        let mut said = match reaching.len() {
            _ if !self.is_whole => before.unwrap_or_else(|| "open".into()),
            0 => "missed\treached by no test".into(),
            count => format!("missed\ttests that reach it: {count}"),
        };
        let own = |o: &&Oracle| name.starts_with(&format!("crates/quoin-{}/", o.package()));
        let (first, others): (Vec<_>, Vec<_>) = reaching.into_iter().partition(own);
        for oracle in first.into_iter().chain(others) {
            if let Some(noticed) = self.noticed(number, oracle, alone)? {
                said = noticed;
                break;
            }
        }
        println!("{said}\t{name} ({} s)", start.elapsed().as_secs());
        held(ledger).keep(name, said)
    }

    /// Returns the ledger's text if a test notices. It must fail twice and pass on sound code in
    /// between: a busy machine, and not the change, may have been the cause.
    fn noticed(&self, number: u32, oracle: &Oracle, alone: &RwLock<()>) -> Result<Option<String>> {
        let shared = || alone.read().unwrap_or_else(PoisonError::into_inner);
        let first = {
            let _others_may = shared();
            oracle.ask(Some(number), self.tree)?
        };
        let (sound, again) = match first {
            Said::Nothing => return Ok(None),
            Said::Noticed(_) => {
                let _others_may = shared();
                (oracle.ask(None, self.tree)?, oracle.ask(Some(number), self.tree)?)
            }
            Said::EndsNot => {
                let _alone = alone.write().unwrap_or_else(PoisonError::into_inner);
                (oracle.ask(None, self.tree)?, oracle.ask(Some(number), self.tree)?)
            }
        };
        Ok(match again {
            _ if sound != Said::Nothing => {
                println!("{} is not content with sound code at this time: {sound:?}", oracle.name);
                None
            }
            Said::Nothing => {
                let name = &self.names[usize::try_from(number)?];
                println!("{} noticed once of twice: {first:?}\t{name}", oracle.name);
                None
            }
            Said::Noticed(what) if oracle.name.starts_with("sim --") => {
                Some(format!("caught\t{}: {what}", oracle.name))
            }
            Said::Noticed(_) => Some(format!("caught\t{}", oracle.name)),
            Said::EndsNot => Some(format!("endless\t{}", oracle.name)),
        })
    }
}

fn report(names: &[String], woven: &Woven, ledger: &Ledger) -> Result<()> {
    let is_tried = |(name, _): &(&String, &String)| names.contains(name);
    let known: BTreeMap<&String, &String> = ledger.known.iter().filter(is_tried).collect();
    let count = |what: &str| known.values().filter(|said| said.starts_with(what)).count();
    let name = |n: u32| usize::try_from(n).ok().and_then(|n| names.get(n));
    for number in &woven.unviable {
        println!("unviable: {}", name(*number).context("a listed change")?);
    }
    for (number, why) in &woven.not_tried {
        println!("not tried ({why}): {}", name(*number).context("a listed change")?);
    }
    for (name, said) in &known {
        if !["caught", "endless", "same"].iter().any(|settled| said.starts_with(settled)) {
            println!("{said}: {name}");
        }
    }
    let (caught, endless) = (count("caught"), count("endless"));
    let viable = known.len();
    println!(
        "{} changes: {caught} caught, {endless} never end, {} change nothing, {} missed, {} open; \
         {} unviable, {} not tried; noticed {:.1} % of {viable}",
        names.len(),
        count("same"),
        count("missed"),
        count("open"),
        woven.unviable.len(),
        woven.not_tried.len(),
        100.0 * (caught + endless) as f64 / viable.max(1) as f64,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the function of a change's name, without its type.
    fn function_of(what: &str) -> Option<&str> {
        let what = what.rsplit_once(" #").map_or(what, |(what, _)| what);
        let whole = match what.rsplit_once(" in ") {
            Some((_, function)) => function,
            None => {
                let function = what.strip_prefix("replace ")?.split_once(" with ")?.0;
                function.split_once(" -> ").map_or(function, |(function, _)| function)
            }
        };
        whole.rsplit("::").next()
    }

    #[test]
    fn the_ledger_names_files_and_functions_that_there_are() {
        let root = run::workspace_root();
        let ledger = Ledger::read(&root.join(LEDGER)).unwrap();
        assert!(!ledger.known.is_empty());
        let mut texts = BTreeMap::new();
        let mut gone = Vec::new();
        for name in ledger.known.keys() {
            let (file, what) = name.split_once(": ").unwrap();
            let text = texts
                .entry(file.to_owned())
                .or_insert_with(|| std::fs::read_to_string(root.join(file)).unwrap_or_default());
            let function = function_of(what).unwrap();
            let has = |open: &str| text.contains(&format!("fn {function}{open}"));
            if !has("(") && !has("<") {
                gone.push(name);
            }
        }
        assert!(
            gone.is_empty(),
            "{LEDGER} names what is gone; rename or remove its lines: {gone:#?}"
        );
    }

    #[test]
    fn a_change_keeps_its_name_when_lines_above_it_move_and_no_two_share_one() {
        let mut seen = BTreeMap::new();
        let mut name = |name| lasting_name(name, &mut seen);
        assert_eq!(name("src/a.rs:10:5: replace f with ()"), "src/a.rs: replace f with ()");
        assert_eq!(
            name("src/a.rs:12:5: replace == with != in g"),
            "src/a.rs: replace == with != in g"
        );
        assert_eq!(
            name("src/a.rs:13:9: replace == with != in g"),
            "src/a.rs: replace == with != in g #2"
        );
        assert_eq!(
            name("src/b.rs:12:5: replace == with != in g"),
            "src/b.rs: replace == with != in g"
        );
    }
}
