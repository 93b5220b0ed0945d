//! `quoin-sim`: run seeds, or replay one with its trace.

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use quoin_sim::{RunOptions, StoreKind, Swarm, run, run_many};

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
    /// What replicas keep their data in.
    #[arg(long, value_enum, default_value = "real")]
    store: Store,
    /// Print which faults struck at which steps of the protocol, and which never did.
    #[arg(long)]
    coverage: bool,
    /// Small worlds in which few kinds of faults strike often, by name (`--swarm few`); `all`
    /// runs the seeds in each of them.
    #[arg(long, default_value = "broad")]
    swarm: String,
    /// Stop at the first violation.
    #[arg(long)]
    stop: bool,
}

fn swarms_named(name: &str) -> Result<Vec<Swarm>, String> {
    if name == "all" {
        return Ok(Swarm::ALL.to_vec());
    }
    let names = || Swarm::ALL.iter().map(|s| s.name()).collect::<Vec<_>>().join(", ");
    let found = Swarm::named(name).map(|swarm| vec![swarm]);
    found.ok_or_else(|| format!("no swarm of the name {name}; there are {}, all", names()))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let store = match arguments.store {
        Store::Model => StoreKind::Model,
        Store::Real => StoreKind::Real,
    };
    let swarms = match swarms_named(&arguments.swarm) {
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
                println!("seed {seed}: {} IOs checked, no violation", report.stats.ios_checked);
                ExitCode::SUCCESS
            }
        };
    }
    let step = if arguments.stop { 1 } else { count };
    let mut summary = quoin_sim::Summary::default();
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
