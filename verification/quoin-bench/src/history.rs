//! Cost of history: the changed blocks of two snapshots beside all blocks of one, and the rebuild of a
//! replica whose volume has snapshots, gets and loses them meanwhile, or whose pool is killed.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::absence::copied_bytes;
use crate::clones::time;
use crate::compare::median;
use crate::further::Fact;
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::snapshots::{Cases, cut, full};
use crate::{Class, Error, Options, usage};

pub const DIFF: &str = "snapshot-diff";
pub const REBUILD: &str = "snapshot-replica-lost";

/// Size of the volume whose blocks are listed; one block of each MiB is written.
const SPARSE_BYTES: u64 = 32 << 30;
/// Share of it that is changed between two snapshots.
const CHANGED: f64 = 0.01;
const PAIRS: usize = 5;
const REBUILT_BYTES: u64 = 512 << 20;
/// Size of the volume whose rebuild is cut off, and how often it is.
const CUT_BYTES: u64 = 2 << 30;
const CUTS: usize = 10;
const BETWEEN_CUTS: Duration = Duration::from_millis(600);
const SNAPSHOTS: usize = 100;
/// Share of the volume that is written between two of those.
const BETWEEN: f64 = 0.01;
const POOL: &str = "pool-c";
const EVERY: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(20);

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let mut cases = Cases { options, quoin, directory, pool_size: "48GiB", facts: Vec::new() };
    cases.measure(DIFF, diff)?;
    cases.measure(REBUILD, of_many_snapshots)?;
    cases.measure(REBUILD, beside_snapshots)?;
    cases.measure(REBUILD, through_kills)?;
    Ok(cases.facts)
}

/// Lists what two snapshots differ in, beside all that the newer one has.
fn diff(product: &Product) -> Result<Vec<Fact>, Error> {
    const VOLUME: &str = "listed";
    let mut generator = Generator::connect(&product.volume(VOLUME, Class::Cache, SPARSE_BYTES)?)?;
    cut(product, VOLUME, "empty")?;
    generator.touch_each_mib(true, 1)?;
    cut(product, VOLUME, "old")?;
    let changed_bytes = (SPARSE_BYTES as f64 * CHANGED) as u64;
    generator.touch_first_mib(changed_bytes)?;
    cut(product, VOLUME, "new")?;
    let list = |from: &str| time(|| product.command(&["snapshot", "diff", VOLUME, from, "new"]));
    let mut ratios = Vec::new();
    for _ in 0..PAIRS {
        let whole = list("empty")?;
        ratios.push(list("old")?.as_secs_f64() / whole.as_secs_f64());
    }
    Ok(vec![Fact::of(DIFF, "time", median(ratios), "of a full walk", 0.05)])
}

/// Bytes that the rebuild of one of three replicas copies, as a multiple of what that replica held.
fn moved(what: &str, value: f64, goal: f64) -> Vec<Fact> {
    vec![Fact::of(REBUILD, what, value, "× what it held", goal)]
}

fn of_many_snapshots(product: &Product) -> Result<Vec<Fact>, Error> {
    const VOLUME: &str = "kept";
    let mut generator = full(product, VOLUME, REBUILT_BYTES)?;
    let (pattern, time) = (Pattern::Random, TIMEOUT);
    let random = Load { writes_percent: 100, pattern, block_bytes: 4096, depth: 32, time };
    let between = (REBUILT_BYTES as f64 * BETWEEN) as u64;
    for number in 0..SNAPSHOTS {
        generator.sustain(random, between)?;
        cut(product, VOLUME, &format!("{VOLUME}-{number}"))?;
    }
    let held = REBUILT_BYTES as f64 * (1.0 + BETWEEN * SNAPSHOTS as f64);
    Ok(moved("hundred", rebuilt(product, VOLUME, || Ok(()))? / held, 1.3))
}

fn beside_snapshots(product: &Product) -> Result<Vec<Fact>, Error> {
    const VOLUME: &str = "changing";
    let _generator = full(product, VOLUME, REBUILT_BYTES)?;
    let (mut number, mut last) = (0, Instant::now());
    let copied = rebuilt(product, VOLUME, || {
        if last.elapsed() >= EVERY {
            number += 1;
            let name = format!("{VOLUME}-{number}");
            cut(product, VOLUME, &name)?;
            product.command(&["snapshot", "delete", &name, "--yes"])?;
            last = Instant::now();
        }
        Ok(())
    })?;
    Ok(moved("meanwhile", copied / REBUILT_BYTES as f64, 1.3))
}

fn through_kills(product: &Product) -> Result<Vec<Fact>, Error> {
    const VOLUME: &str = "cut-off";
    let _generator = full(product, VOLUME, CUT_BYTES)?;
    let (mut cuts, mut last) = (0, Instant::now());
    let copied = rebuilt(product, VOLUME, || {
        if cuts < CUTS && last.elapsed() >= BETWEEN_CUTS {
            usage::end(&product.pids_of_pool(POOL));
            (cuts, last) = (cuts + 1, Instant::now());
        }
        Ok(())
    })?;
    if cuts < CUTS {
        return Err(Error::Failed(format!("the rebuild was over after {cuts} of {CUTS} cuts")));
    }
    Ok(moved("cut-off", copied / CUT_BYTES as f64, 1.1))
}

/// Loses a replica with its pool; returns the bytes that were copied for the new one. `meanwhile` is
/// called again and again until it is in sync.
fn rebuilt(
    product: &Product,
    volume: &str,
    mut meanwhile: impl FnMut() -> Result<(), Error>,
) -> Result<f64, Error> {
    let old = product.replica(volume, POOL)?;
    let before = copied_bytes(product)?;
    product.wipe_pool(POOL)?;
    let began = Instant::now();
    loop {
        let now = product.replica(volume, POOL)?;
        if now.guid != old.guid && now.phase == "InSync" {
            return Ok(copied_bytes(product)? - before);
        }
        if began.elapsed() > TIMEOUT {
            let phase = now.phase;
            return Err(Error::Failed(format!("the replica of {volume} in {POOL} stays {phase}")));
        }
        meanwhile()?;
        std::thread::sleep(POLL);
    }
}
