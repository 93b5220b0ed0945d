//! `quoin-sim`: run seeds, or replay one with its trace.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use quoin_sim::fresh::{self, Fresh};
use quoin_sim::kept::{self, KeptSeed};
use quoin_sim::{RunOptions, StoreKind, Summary, Swarm, run, run_many};

#[derive(Clone, Copy, ValueEnum)]
enum Store {
    /// The real store on simulated disks.
    Real,
    /// The in-memory model of the store: finds faults of the core alone.
    Model,
}

/// Runs simulated clusters and checks what they promise; a seed replays exactly.
#[derive(Parser)]
#[command(name = "quoin-sim", version)]
struct Arguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 100, conflicts_with = "seed")]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 1, conflicts_with = "seed")]
    first_seed: u64,
    /// Run this seed alone.
    #[arg(long)]
    seed: Option<u64>,
    /// Print everything that happens; for one seed.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Leave out faults and clients of this failing seed while it still fails; draw what is left.
    #[arg(long, requires = "seed")]
    shrink: bool,
    /// Store of the replicas.
    #[arg(long, value_enum, default_value = "real")]
    store: Store,
    /// Print which faults were injected at which steps of the protocol, and which never were.
    #[arg(long)]
    coverage: bool,
    /// Small worlds in which few kinds of faults are injected often, by name (`--swarm few`); `all`
    /// runs the seeds in each of them. Default: `broad`; `all` with --fresh.
    #[arg(long)]
    swarm: Option<String>,
    /// Stop at the first violation.
    #[arg(long)]
    stop: bool,
    /// Run N seeds that were never run before, over all swarms (or those of --swarm), on all cores.
    #[arg(long, value_name = "N", conflicts_with_all = ["seeds", "first_seed", "seed", "stop"])]
    fresh: Option<u64>,
    /// Repeat the fresh seeds that follow from this base (each run prints its own).
    #[arg(long, value_name = "BASE", requires = "fresh")]
    fresh_base: Option<u64>,
    /// Add fresh seeds that find something to this list.
    #[arg(long, value_name = "FILE", requires = "fresh")]
    keep: Option<PathBuf>,
    /// Run the kept seeds, which once found something.
    #[arg(long, conflicts_with_all = ["seeds", "first_seed", "seed", "stop", "fresh", "swarm"])]
    kept: bool,
}

fn swarms_named(name: &str) -> Result<Vec<Swarm>, String> {
    if name == "all" {
        return Ok(Swarm::ALL.to_vec());
    }
    let names = || Swarm::ALL.iter().map(|s| s.name()).collect::<Vec<_>>().join(", ");
    let found = Swarm::named(name).map(|swarm| vec![swarm]);
    found.ok_or_else(|| format!("no swarm of the name {name}; there are {}, all", names()))
}

/// Runs fresh seeds, and says how far it is every ten seconds.
fn run_fresh(fresh: &Fresh, keep: Option<PathBuf>) -> ExitCode {
    let names = fresh.swarms.iter().map(|s| s.name()).collect::<Vec<_>>().join(", ");
    println!("{} fresh seeds from --fresh-base {} of: {names}", fresh.count, fresh.base);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let found = |seed: &KeptSeed| {
        println!("--swarm {} --seed {}: {}", seed.swarm.name(), seed.seed, seed.finding);
        if let Some(Err(error)) = keep.as_ref().map(|path| seed.append_to(path)) {
            eprintln!("error: {error}");
        }
    };
    let began = Instant::now();
    let told = std::sync::Mutex::new(began);
    let ran = |count: u64| {
        let Ok(mut told) = told.try_lock() else { return };
        if told.elapsed() < Duration::from_secs(10) {
            return;
        }
        *told = Instant::now();
        let left = began.elapsed().mul_f64((fresh.count - count) as f64 / count as f64);
        eprintln!("{count} of {} seeds, {} s left", fresh.count, left.as_secs());
    };
    let summary = fresh.run(threads, found, ran);
    print!("{summary}");
    if summary.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Repeats the kept seeds.
fn run_kept() -> ExitCode {
    let seeds = match KeptSeed::parse(kept::LIST) {
        Ok(seeds) => seeds,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = 0;
    for seed in &seeds {
        if let Some(violation) = seed.run().violation {
            println!("{seed}: now {}: {}", violation.rule, violation.detail);
            failed += 1;
        }
    }
    println!("{} kept seeds, {failed} violations", seeds.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let store = match arguments.store {
        Store::Model => StoreKind::Model,
        Store::Real => StoreKind::Real,
    };
    let all_by_default = if arguments.fresh.is_some() { "all" } else { "broad" };
    let swarms = match swarms_named(arguments.swarm.as_deref().unwrap_or(all_by_default)) {
        Ok(swarms) => swarms,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let swarm = swarms[0];
    let options = RunOptions { store, swarm, trace: arguments.trace, ..RunOptions::default() };
    // A panic in the core is reported as a violation with its seed; its place helps to find it.
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    if arguments.kept {
        return run_kept();
    }
    if let Some(count) = arguments.fresh {
        let base = match arguments.fresh_base.map_or_else(fresh::draw_base, Ok) {
            Ok(base) => base,
            Err(error) => {
                eprintln!("error: cannot draw a base for fresh seeds from /dev/urandom: {error}");
                return ExitCode::FAILURE;
            }
        };
        return run_fresh(&Fresh { base, count, swarms, store }, arguments.keep);
    }
    let (first, count) = match arguments.seed {
        Some(seed) => (seed, 1),
        None => (arguments.first_seed, arguments.seeds),
    };
    if let Some(seed) = arguments.seed.filter(|_| arguments.shrink) {
        let options = RunOptions { seed, trace: false, ..options };
        let Some(shrunk) = quoin_sim::shrink::shrink(options) else {
            println!("seed {seed}: no violation to shrink");
            return ExitCode::SUCCESS;
        };
        let left_out = shrunk.options.dropped.count_ones();
        println!("{}", shrunk.draw());
        println!("seed {seed}: smallest of {} runs; {left_out} faults left out", shrunk.runs);
        return ExitCode::FAILURE;
    }
    if let Some(seed) = arguments.seed {
        let report = run(RunOptions { seed, ..options });
        println!("fingerprint {:016x}", report.fingerprint);
        return match report.violation {
            Some(violation) => {
                println!("seed {seed}: {}: {}", violation.rule, violation.detail);
                ExitCode::FAILURE
            }
            None => {
                println!("seed {seed}: {} IOs checked, no violation", report.stats.ios.checked);
                ExitCode::SUCCESS
            }
        };
    }
    let step = if arguments.stop { 1 } else { count };
    let mut summary = Summary::default();
    let mut failed = None;
    'all: for swarm in swarms {
        let mut next = first;
        while next < first + count {
            let options = RunOptions { swarm, ..options };
            let part = run_many(next, step.min(first + count - next), options, |seed, report| {
                if let Some(violation) = &report.violation {
                    let (rule, detail) = (&violation.rule, &violation.detail);
                    println!("--swarm {} --seed {seed}: {rule}: {detail}", swarm.name());
                    failed.get_or_insert((swarm, seed));
                }
            });
            summary.merge(part);
            if arguments.stop && failed.is_some() {
                break 'all;
            }
            next += step;
        }
    }
    print!("{summary}");
    if arguments.coverage {
        print!("{}", summary.stats.coverage);
        println!("situations of the scale-up document: {:?}", summary.stats.situations);
    }
    let Some((swarm, seed)) = failed else { return ExitCode::SUCCESS };
    println!("replay the first: quoin-sim --swarm {} --seed {seed} --trace", swarm.name());
    ExitCode::FAILURE
}
