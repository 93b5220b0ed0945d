//! `quoin-fuzz`: mutations for any length of time; each input is written to a file before it runs.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use quoin_fuzz::mutate::mutate;
use quoin_fuzz::{TARGETS, Target, target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Feeds hostile input to whatever reads networks, disks and records
#[derive(Parser)]
struct Options {
    /// Target to feed; all in turn if not given
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 30, value_name = "N")]
    seconds: u64,
    /// Seed of the mutations; the same seed makes the same inputs
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Run only this input (with one target)
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Directory for inputs that failed
    #[arg(long, default_value = "target/fuzz", value_name = "DIR")]
    failures: PathBuf,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let mut chosen: Vec<&Target> = Vec::new();
    for name in &options.targets {
        let Some(one) = target(name) else {
            let known: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
            eprintln!("error: no target {name}; there are {}", known.join(", "));
            return ExitCode::from(2);
        };
        chosen.push(one);
    }
    if chosen.is_empty() {
        chosen.extend(&TARGETS);
    }
    if let Some(path) = &options.input {
        let [one] = chosen[..] else {
            eprintln!("error: --input goes with exactly one target");
            return ExitCode::from(2);
        };
        return match std::fs::read(path) {
            Ok(input) => {
                (one.run)(&input);
                println!("{}: {} held", one.name, path.display());
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("error: {}: {error}", path.display());
                ExitCode::from(2)
            }
        };
    }
    for one in chosen {
        if let Err(error) = feed(one, &options) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn feed(target: &Target, options: &Options) -> std::io::Result<()> {
    std::fs::create_dir_all(&options.failures)?;
    let file = options.failures.join(format!("{}.input", target.name));
    let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
    let mut inputs = (target.seeds)();
    let (end, mut fed) = (Instant::now() + Duration::from_secs(options.seconds), 0u64);
    while Instant::now() < end {
        let from = rng.random_range(0..inputs.len());
        let other = rng.random_range(0..inputs.len());
        let input = mutate(&mut rng, &inputs[from], &inputs[other]);
        // Written before it is run, so that it is there afterwards even if this process dies.
        std::fs::write(&file, &input)?;
        (target.run)(&input);
        fed += 1;
        if fed.is_multiple_of(16) && inputs.len() < 1000 {
            inputs.push(input);
        }
    }
    std::fs::remove_file(&file)?;
    println!("{}: {fed} inputs, none failed ({})", target.name, target.about);
    Ok(())
}
