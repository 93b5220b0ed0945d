//! The deterministic simulator: the real core and store under one scheduler with simulated
//! clocks, network, disks, control plane and clients.
//!
//! A run is a function of its seed. [`run`] builds a world, injects faults, lets everything
//! recover, and reports the first thing that the contract does not allow, if there is one:
//!
//! | checker | finds |
//! |---|---|
//! | [`linear`] | reads and writes of a 4 KiB block that no order explains |
//! | [`lineage`] | acknowledged, read or flushed entries that a later history lacks; two contents for one position |
//! | `world::checkers::durability` | answers under an old epoch or of what is not held, wrong bytes, errors without a cause |
//! | `world::checkers::assertions` | replicas and targets that break what they reported before |
//! | `world::checkers::admissions` | replicas let in, counted or made known against the rules of [`scaleup`] |
//! | `world::checkers::at_rest` | replicas that differ at rest, room that does not come back |
//! | `cluster::truth` | grants, devices, tokens and copies of which the records say what is not so |
//! | `world::quiesce` | IO or replicas that do not come back after the last fault |
//! | `world::mirrors` | two clusters that break what a mirror promises |
//! | `world::copies` | a copy in another cluster that is not the point that it says, or told as stable before it is |
//! | the core itself | assertions of its invariants (a panic is a violation with its seed) |
//! | [`storage`] | a cut below stable, a repair with another version |
//!
//! [`coverage`] counts which faults were injected at which steps of the protocol, [`shrink`] makes a
//! failing run small and draws it.
//!
//! The world around the core is adversarial within what `docs/replication.md` assumes, and no
//! further: clocks drift less than ε, disks lose what was not synced, streams keep their order.

pub mod clock;
mod cluster;
pub mod content;
pub mod control;
pub mod coverage;
pub mod disk;
pub mod faults;
pub mod fresh;
pub mod history;
#[cfg(feature = "mutants")]
pub mod hunt;
pub mod kept;
pub mod lineage;
pub mod linear;
mod map;
#[cfg(feature = "mutants")]
pub mod mutants;
pub mod neighbours;
pub mod network;
pub mod random;
pub mod real;
pub mod scaleup;
pub mod schedule;
pub mod shape;
pub mod shrink;
pub mod source;
pub mod stats;
pub mod storage;
pub mod swarm;
pub mod trace;
pub mod wire;
pub mod workload;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

pub use stats::{Stats, Summary, Violation};
pub use swarm::Swarm;
pub use world::{FAULTS_MAX, Mutant, RunOptions, StoreKind};

/// Result of one seed.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub stats: Stats,
    pub violation: Option<Violation>,
    /// Equal for equal runs.
    pub fingerprint: u64,
    /// The trace, where it was asked to be kept.
    pub lines: Vec<(schedule::Instant, String)>,
}

/// Runs one seed. A panic of the core or the store is a violation like any other.
pub fn run(options: RunOptions) -> Report {
    match options.swarm {
        Swarm::Groups => return run_group(options),
        Swarm::Control => return run_control(options),
        Swarm::Copies | Swarm::Disasters => return run_copies(options),
        _ => {}
    }
    if options.swarm.is_mirrored() {
        return run_mirror(options);
    }
    let mut world = None;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        world.insert(world::World::new(options)).run();
    }));
    let mut report = match &world {
        Some(world) => Report {
            stats: world.stats.clone(),
            violation: world.checkers.violation.clone(),
            fingerprint: world.trace.fingerprint(),
            lines: world.trace.lines().to_vec(),
        },
        None => Report::default(),
    };
    if let Err(panic) = outcome {
        report.panicked(options.seed, panic.as_ref());
    }
    report
}

impl Report {
    fn panicked(&mut self, seed: u64, panic: &(dyn std::any::Any + Send)) {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
            .unwrap_or_else(|| "a panic without words".into());
        self.stats.seeds = 1;
        self.violation = Some(Violation { seed, rule: "Panic".into(), detail: text });
    }
}

/// Runs one seed of several volumes.
fn run_group(options: RunOptions) -> Report {
    let mut groups = None;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        groups.insert(world::Groups::new(options)).run();
    }));
    let mut report = groups.map_or_else(Report::default, |groups| groups.report(options.seed));
    if let Err(panic) = outcome {
        report.panicked(options.seed, panic.as_ref());
    }
    report
}

/// Runs one seed of a volume and its copy.
fn run_copies(options: RunOptions) -> Report {
    let mut copies = None;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        copies.insert(world::Copies::new(options)).run();
    }));
    let mut report = copies.map_or_else(Report::default, |copies| copies.report(options.seed));
    if let Err(panic) = outcome {
        report.panicked(options.seed, panic.as_ref());
    }
    report
}

/// Runs one seed of two clusters.
fn run_mirror(options: RunOptions) -> Report {
    let mut mirrors = None;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        mirrors.insert(world::Mirrors::new(options)).run();
    }));
    let mut report = mirrors.map_or_else(Report::default, |mirrors| mirrors.report(options.seed));
    if let Err(panic) = outcome {
        report.panicked(options.seed, panic.as_ref());
    }
    report
}

/// Runs one seed of a control plane without a data path.
fn run_control(options: RunOptions) -> Report {
    let mut cluster = cluster::Cluster::new(options);
    let outcome = catch_unwind(AssertUnwindSafe(|| cluster.run()));
    let mut report = cluster.report();
    if let Err(panic) = outcome {
        report.panicked(options.seed, panic.as_ref());
    }
    report
}

/// Runs `count` seeds from `first` on; `each` hears of every one.
pub fn run_many(
    first: u64,
    count: u64,
    options: RunOptions,
    mut each: impl FnMut(u64, &Report),
) -> Summary {
    let mut summary = Summary::default();
    let began = cpu_time();
    for seed in first..first.saturating_add(count) {
        let report = run(RunOptions { seed, ..options });
        each(seed, &report);
        summary.merge(Summary {
            ios_checked_least: Some(report.stats.ios.checked),
            stats: report.stats,
            violations: report.violation.into_iter().collect(),
            cpu: Duration::ZERO,
        });
    }
    summary.cpu = cpu_time().saturating_sub(began);
    summary
}

/// CPU time of this process, from `/proc` (a simulator needs no more exact clock than its ticks).
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let field = |n: usize| -> u64 {
        after_name.split_whitespace().nth(n).and_then(|f| f.parse().ok()).unwrap_or(0)
    };
    // utime and stime, in ticks of 10 ms.
    Duration::from_millis((field(11) + field(12)) * 10)
}
