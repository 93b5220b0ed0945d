//! `quoin-mutants`: breaks every named rule and shows what catches it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use quoin_sim::hunt::{By, Hunt, Limits, hunt};
use quoin_sim::mutants::{self, ALL, Book, Defect, Known, NOT_BUILT};

/// Breaks one rule of the documents at a time and shows what catches it: a seed of the simulator,
/// the model, a test of the store or the core.
#[derive(Parser)]
#[command(name = "quoin-mutants", version)]
struct Arguments {
    /// Only defects whose name holds this.
    #[arg(long)]
    only: Option<String>,
    /// Only what a seed of the simulator is known to catch: that seed, and few others.
    #[arg(long)]
    quick: bool,
    /// Seeds for one defect at most.
    #[arg(long, default_value_t = 20_000)]
    seeds_max: u64,
    /// Seconds in the simulator for one defect at most.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// The first seed of each hunt.
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// Begin no further hunt after so many minutes.
    #[arg(long, default_value_t = 30)]
    minutes: u64,
    /// Hunts at the same time.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Hunt as if no catch were known.
    #[arg(long)]
    afresh: bool,
    /// Leave out the model.
    #[arg(long)]
    no_model: bool,
    /// Test binaries built with the feature `mutants` (`cargo xtask mutants` builds them).
    #[arg(long)]
    tests: Vec<PathBuf>,
    /// Write what caught each defect to this file.
    #[arg(long)]
    record: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let disagreements = mutants::disagreements();
    if !disagreements.is_empty() {
        eprintln!("error: docs/proof.md: {}", disagreements.join("\n  "));
        return ExitCode::FAILURE;
    }
    // A panic is how an assertion of the core catches a defect.
    std::panic::set_hook(Box::new(|_| {}));
    let by_seed = |d: &&Defect| {
        mutants::known(d.name).first().is_some_and(|k| matches!(k, Known::Seed { .. }))
    };
    let chosen: Vec<&Defect> = ALL
        .iter()
        .filter(|d| arguments.only.as_ref().is_none_or(|word| d.name.contains(word.as_str())))
        .filter(|d| !arguments.quick || by_seed(d))
        .collect();
    let limits = Limits {
        first_seed: arguments.first_seed,
        seeds: if arguments.quick { 300 } else { arguments.seeds_max },
        time: Duration::from_secs(arguments.seconds),
        tests: arguments.tests.clone(),
        model: !arguments.quick && !arguments.no_model,
        afresh: arguments.afresh,
    };
    let ends = Instant::now() + Duration::from_secs(arguments.minutes * 60);
    let next = AtomicUsize::new(0);
    let hunts = Mutex::new(Vec::new());
    println!("{:<42} {:<52} {:>7} {:>9}  invariant", "defect", "caught by", "runs", "reached");
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads.clamp(1, 16) {
            scope.spawn(|| {
                while let Some(defect) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if Instant::now() >= ends {
                        println!("{:<42} not hunted: the time is over", defect.name);
                        continue;
                    }
                    let found = hunt(defect, &limits);
                    print!("{}", lines(defect, &found));
                    let _ = std::io::stdout().flush();
                    if let Ok(mut hunts) = hunts.lock() {
                        hunts.push((defect.name, found));
                    }
                }
            });
        }
    });
    for (what, feature) in NOT_BUILT {
        println!("{what:<54} not built yet: {feature}");
    }
    let hunts = hunts.into_inner().unwrap_or_default();
    if let Some(path) = &arguments.record
        && let Err(error) = record(path, &hunts)
    {
        eprintln!("error: {} cannot be written: {error}", path.display());
        return ExitCode::FAILURE;
    }
    verdict(&chosen, &hunts)
}

fn verdict(chosen: &[&Defect], hunts: &[(&str, Hunt)]) -> ExitCode {
    let caught = |name: &str| hunts.iter().any(|(n, h)| *n == name && !h.catches.is_empty());
    let missed: Vec<&str> = chosen.iter().map(|d| d.name).filter(|n| !caught(n)).collect();
    println!("{} of {} caught", chosen.len() - missed.len(), chosen.len());
    for (swarm, violation) in hunts.iter().flat_map(|(_, h)| &h.false_alarms) {
        let (seed, rule) = (violation.seed, &violation.rule);
        println!("without any defect: --swarm {} --seed {seed}: {rule}", swarm.name());
    }
    if missed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("not caught: {}", missed.join(", "));
    ExitCode::FAILURE
}

fn lines(defect: &Defect, found: &Hunt) -> String {
    let book = match defect.book {
        Book::Replication => "",
        Book::Store => "store: ",
        Book::Mirror => "mirror: ",
        Book::Model => "model: ",
    };
    let name = format!("{book}{}", defect.name);
    let reached = format!("{}/{}", found.reached.0, found.reached.1);
    let mut out = String::new();
    if found.catches.is_empty() {
        let _ = writeln!(out, "{name:<42} {:<52} {:>7} {reached:>9}  -", "NOT CAUGHT", "");
    }
    for catch in &found.catches {
        let by = match &catch.by {
            By::Known(Known::Seed { swarm, seed }) => {
                format!("--swarm {} --seed {seed}", swarm.name())
            }
            By::Known(Known::Test { module, test }) => format!("test {module} {test}"),
            By::Model { like } => format!("model --mutant {like}"),
        };
        let (runs, rule) = (catch.runs, &catch.rule);
        let _ = writeln!(out, "{name:<42} {by:<52} {runs:>7} {reached:>9}  {rule}");
    }
    out
}

fn record(path: &std::path::Path, hunts: &[(&str, Hunt)]) -> std::io::Result<()> {
    let mut text = String::from(
        "# What caught each defect: `cargo xtask mutants --record FILE` writes it, and tries it first.\n",
    );
    for defect in ALL {
        let fresh = hunts.iter().find(|(name, _)| *name == defect.name).map(|(_, h)| h);
        let caught = fresh.into_iter().flat_map(|h| &h.catches).find_map(|c| match &c.by {
            By::Known(known) => Some(known.clone()),
            By::Model { .. } => None,
        });
        // The catch of a defect that was not hunted this time stays.
        let kept = match fresh {
            Some(_) => caught.into_iter().collect(),
            None => mutants::known(defect.name),
        };
        for known in kept {
            text.push_str(&mutants::line(defect.name, &known));
            text.push('\n');
        }
    }
    std::fs::write(path, text)
}
