//! `quoin-model`: visits the states of the replication protocol.

use clap::Parser;
use quoin_model::bounds::{Bounds, LARGE_WORLDS, Model, WORLDS};
use quoin_model::explore::{Explored, Found, Limits, explore, walk};
use quoin_model::mirror::{self, Broken};
use quoin_model::mutants::Mutant;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Parser)]
#[command(name = "quoin-model", about = "Visit every state of the replication protocol in bounds")]
struct Arguments {
    /// Also the large worlds, and longer walks (hours).
    #[arg(long)]
    full: bool,
    /// Only the small worlds, half a minute at most in a debug build.
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// Only this world (see --list).
    #[arg(long)]
    world: Option<String>,
    /// Break one rule and show how it is caught; `all` shows each in a line.
    #[arg(long)]
    mutant: Option<String>,
    /// List worlds and mutants.
    #[arg(long)]
    list: bool,
    /// Memory for visited states and those that wait, in GiB; what waits beyond it lies in a file
    /// in the directory for temporary ones.
    #[arg(long, default_value_t = 8)]
    memory_gib: usize,
    /// Ends a world after so many seconds, and says how far it came.
    #[arg(long)]
    seconds: Option<u64>,
    /// First seed of the random walks.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        list();
        return ExitCode::SUCCESS;
    }
    let sound = match &arguments.mutant {
        Some(name) => show_mutants(name),
        None => {
            let is_mirror = |name: &String| {
                mirror::WORLDS.iter().chain(mirror::LARGE_WORLDS).any(|w| w.name == name)
            };
            let of_mirrors = arguments.world.as_ref().is_none_or(is_mirror);
            let of_volumes = arguments.world.as_ref().is_none_or(|name| !is_mirror(name));
            let is_sound = !of_mirrors || show_mirrors(&arguments);
            is_sound & (!of_volumes || show_worlds(&arguments))
        }
    };
    if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn list() {
    println!("worlds:");
    for world in WORLDS.iter().chain(LARGE_WORLDS) {
        println!("  {:<18} {world}", world.name);
    }
    for world in mirror::WORLDS.iter().chain(mirror::LARGE_WORLDS) {
        println!("  {:<28} {world}", world.name);
    }
    println!("mutants:");
    for broken in Broken::ALL {
        println!("  {:<28} {} (of a mirror)", broken.name(), broken.breaks());
    }
    for mutant in Mutant::ALL {
        println!("  {:<28} {}", mutant.name(), mutant.breaks());
    }
}

fn show_mutants(name: &str) -> bool {
    let all = name == "all";
    let names: Vec<&str> = quoin_model::mutant_names().filter(|m| all || *m == name).collect();
    if names.is_empty() {
        eprintln!("error: no mutant of that name; --list shows them");
        return false;
    }
    let mut missed = 0;
    for name in names {
        let began = Instant::now();
        match quoin_model::check_mutant(name) {
            Some(caught) => {
                let (states, took) = (caught.states, began.elapsed().as_secs_f64());
                println!("{name:<28} {:<18} {states:>9} states {took:>6.1} s", caught.invariant);
                if !all {
                    caught.trace.iter().for_each(|step| println!("  {step}"));
                }
            }
            None => {
                println!("{name:<28} NOT CAUGHT");
                missed += 1;
            }
        }
    }
    missed == 0
}

/// The worlds of a mirror, two at a time.
fn show_mirrors(arguments: &Arguments) -> bool {
    let large = mirror::LARGE_WORLDS.iter();
    let is_asked = |world: &&mirror::Bounds| match &arguments.world {
        Some(name) => world.name == name,
        None => arguments.full || !mirror::LARGE_WORLDS.contains(world),
    };
    let quick = if arguments.quick { 1 } else { usize::MAX };
    let worlds: Vec<_> = mirror::WORLDS.iter().chain(large).filter(is_asked).take(quick).collect();
    // A state that waits has about a kilobyte.
    let states_max = arguments.memory_gib << 20;
    let next = std::sync::atomic::AtomicUsize::new(0);
    let sound = std::sync::atomic::AtomicBool::new(true);
    let work = || {
        while let Some(world) = worlds.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
        {
            let began = Instant::now();
            let found = mirror::search(**world, None, states_max, true);
            let whole = if found.complete { "all states" } else { "NOT ALL states" };
            println!(
                "{}: {world}\n  {whole}: {} visited, {} followed to their rest, {:.1} s",
                world.name,
                found.states,
                found.settled,
                began.elapsed().as_secs_f64()
            );
            if let Some((invariant, trace)) = found.violation {
                println!("  VIOLATION of {invariant}:");
                trace.iter().for_each(|step| println!("    {step}"));
                sound.store(false, std::sync::atomic::Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..quoin_model::threads() {
            scope.spawn(work);
        }
    });
    sound.into_inner()
}

fn show_worlds(arguments: &Arguments) -> bool {
    let mut worlds: Vec<Bounds> = match &arguments.world {
        Some(name) => {
            WORLDS.iter().chain(LARGE_WORLDS).filter(|w| w.name == name).copied().collect()
        }
        None if arguments.quick => WORLDS[..1].to_vec(),
        None => WORLDS.to_vec(),
    };
    if arguments.full && arguments.world.is_none() {
        worlds.extend(LARGE_WORLDS);
    }
    if worlds.is_empty() {
        eprintln!("error: no world of that name; --list shows them");
        return false;
    }
    let each = arguments.seconds.unwrap_or(match (arguments.full, arguments.quick) {
        (true, _) => 4 * 3600,
        (_, true) => 20,
        _ if arguments.world.is_some() => 3600,
        _ => 300,
    });
    // An ordinary run is over within a quarter of an hour, walks included.
    let all = Duration::from_secs(if arguments.full { u64::MAX / 4 } else { 13 * 60 });
    let all = if arguments.world.is_some() { Duration::from_secs(each) } else { all };
    let began = Instant::now();
    let mut sound = true;
    for (index, world) in worlds.iter().enumerate() {
        let left = all.saturating_sub(began.elapsed());
        // Each world may use half of what is left, and the last all of it.
        let share = if index + 1 == worlds.len() { left } else { left / 2 };
        let limits = Limits {
            memory_bytes: arguments.memory_gib << 30,
            time: share.min(Duration::from_secs(each)),
            threads: quoin_model::threads(),
            traces: false,
            progress: Some(tell),
        };
        let model = Model { bounds: *world, mutant: None };
        println!("{}: {world}", world.name);
        let explored = explore(&model, &model.initial(), limits, None);
        sound &= report(&model, &explored, limits);
    }
    if arguments.world.is_none() {
        let each = Duration::from_secs(match (arguments.full, arguments.quick) {
            (true, _) => 1800,
            (_, true) => 2,
            _ => 10,
        });
        for world in LARGE_WORLDS {
            let model = Model { bounds: *world, mutant: None };
            let walked = walk(&model, arguments.seed, usize::MAX, 400, each);
            let (walks, steps) = (walked.walks, walked.steps);
            println!("random walks in {}: {walks} walks, {steps} steps", world.name);
            if let Some((seed, found)) = walked.found {
                println!("  VIOLATION in the walk of seed {seed}");
                show(&found);
                sound = false;
            }
        }
    }
    sound
}

fn tell(explored: &Explored, waiting: usize) {
    let Explored { states, depth, time, .. } = explored;
    let (seconds, pace) = (time.as_secs(), *states as f64 / time.as_secs_f64().max(1e-6));
    eprintln!(
        "  {seconds} s: depth {depth}, {states} visited, {waiting} wait ({pace:.0} states/s)"
    );
}

fn report(model: &Model, explored: &Explored, limits: Limits) -> bool {
    let seconds = explored.time.as_secs_f64();
    let state = if explored.complete { "all states" } else { "NOT ALL states" };
    println!(
        "  {state}: {} visited, {} steps, depth {}, {seconds:.1} s ({:.0} states/s)",
        explored.states,
        explored.transitions,
        explored.depth,
        explored.states as f64 / seconds.max(1e-6),
    );
    let Some(found) = &explored.found else { return true };
    println!("  VIOLATION of {}; searched again for the way to it", found.invariant);
    let again = explore(model, &model.initial(), Limits { traces: true, ..limits }, None);
    show(again.found.as_ref().unwrap_or(found));
    false
}

fn show(found: &Found) {
    println!("  {}:", found.invariant);
    found.steps.iter().for_each(|step| println!("    {step}"));
}
