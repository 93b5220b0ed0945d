//! `quoin-mutants`: hunts every named defect with the simulator until it is caught.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use quoin_sim::mutants::{ALL, Book, Catch, Defect, NOT_BUILT, hunt};

/// Breaks one rule of the documents at a time and shows which check finds it.
#[derive(Parser)]
#[command(name = "quoin-mutants", version)]
struct Arguments {
    /// Only defects whose name holds this.
    #[arg(long)]
    only: Option<String>,
    /// Only the few that the tests hunt each time.
    #[arg(long)]
    quick: bool,
    /// Seeds for one defect at most.
    #[arg(long, default_value_t = 1000)]
    seeds_max: u64,
    /// The first seed of each hunt.
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// Begin no further hunt after so many minutes.
    #[arg(long, default_value_t = 30)]
    minutes: u64,
    /// Hunts at the same time.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

/// Caught within a few seeds, each by another check.
const QUICK: [&str; 3] = ["read-before-commit", "dropped-acks-counted", "epoch-reused"];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // A panic is how an assertion of the core catches a defect.
    std::panic::set_hook(Box::new(|_| {}));
    let chosen: Vec<&Defect> = ALL
        .iter()
        .filter(|d| arguments.only.as_ref().is_none_or(|word| d.name.contains(word.as_str())))
        .filter(|d| !arguments.quick || QUICK.contains(&d.name))
        .collect();
    let ends = Instant::now() + Duration::from_secs(arguments.minutes * 60);
    let next = AtomicUsize::new(0);
    let uncaught = Mutex::new(Vec::new());
    println!(
        "{:<42} {:<11} {:<22} {:>6} {:>5} {:>7}",
        "defect", "document", "caught by", "seed", "runs", "reached"
    );
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads.clamp(1, 16) {
            scope.spawn(|| {
                while let Some(defect) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let late = Instant::now() >= ends;
                    let runs = if late { 0 } else { arguments.seeds_max };
                    let caught = hunt(defect, arguments.first_seed, runs);
                    println!("{}", line(defect, &caught));
                    let _ = std::io::stdout().flush();
                    if caught.violation.is_none()
                        && let Ok(mut uncaught) = uncaught.lock()
                    {
                        uncaught.push(defect.name);
                    }
                }
            });
        }
    });
    for (what, feature) in NOT_BUILT {
        println!("{what:<54} not built yet: {feature}");
    }
    let uncaught = uncaught.into_inner().unwrap_or_default();
    println!("{} of {} caught", chosen.len() - uncaught.len(), chosen.len());
    if uncaught.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("not caught: {}", uncaught.join(", "));
    ExitCode::FAILURE
}

fn line(defect: &Defect, caught: &Catch) -> String {
    let book = match defect.book {
        Book::Replication => "replication",
        Book::Store => "store",
    };
    let (rule, seed) = match &caught.violation {
        Some(found) => (named(&found.rule, &found.detail), found.seed.to_string()),
        None => ("NOT CAUGHT".into(), "-".into()),
    };
    format!(
        "{:<42} {book:<11} {rule:<22} {seed:>6} {:>5} {:>7}",
        defect.name, caught.runs, caught.reached
    )
}

/// The invariant; of an assertion, the first words.
fn named(rule: &str, detail: &str) -> String {
    if rule != "Panic" {
        return rule.to_owned();
    }
    let words: String = detail.lines().next().unwrap_or_default().chars().take(40).collect();
    format!("assertion: {words}")
}
