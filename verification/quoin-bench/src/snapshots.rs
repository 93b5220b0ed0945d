//! Cost of snapshots: to clients while one is made and afterwards, of many of them, of their
//! deletion, and of a return to one.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::clones::{time, used_bytes};
use crate::compare::median;
use crate::further::{Fact, largest_mib};
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options};

pub const MADE: &str = "snapshot-made";
pub const HUNDRED: &str = "snapshot-hundred";
pub const MANY: &str = "snapshot-many";
pub const DELETED: &str = "snapshot-deleted";
pub const REVERTED: &str = "snapshot-reverted";

const VOLUME_BYTES: u64 = 1 << 30;
const REPLICAS: f64 = 3.0;
/// Snapshots that are made under load, one each [`EVERY`].
const UNDER_LOAD: usize = 100;
pub const EVERY: Duration = Duration::from_millis(400);
/// A pause of clients counts for a snapshot until so long after its answer.
pub const ECHO: Duration = Duration::from_millis(50);
const HUNDRED_SNAPSHOTS: usize = 100;
/// Share of the volume that is written between two of those.
const CHANGED: f64 = 0.01;
const PAIRS: usize = 3;
/// Pairs before and after a snapshot. The kernel's write-back makes any one of them a third faster or
/// slower.
const AFTER_PAIRS: usize = 7;
const OPENINGS: usize = 5;
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(120);

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let mut cases = Cases { options, quoin, directory, pool_size: "16GiB", facts: Vec::new() };
    cases.measure(MADE, |product| made(product, options.time()))?;
    cases.measure(HUNDRED, |product| hundred(product, options.time()))?;
    cases.measure(MANY, |product| many(product, options.further.snapshots))?;
    cases.measure(DELETED, deleted)?;
    cases.measure(REVERTED, reverted)?;
    Ok(cases.facts)
}

/// Cases that each have a Quoin of their own.
pub struct Cases<'a> {
    pub options: &'a Options,
    pub quoin: &'a Path,
    pub directory: &'a Path,
    pub pool_size: &'a str,
    pub facts: Vec<Fact>,
}

impl Cases<'_> {
    /// Measures a case, if it is one of those that were chosen.
    pub fn measure(
        &mut self,
        name: &str,
        case: impl FnOnce(&Product) -> Result<Vec<Fact>, Error>,
    ) -> Result<(), Error> {
        if self.options.wants(name) {
            eprintln!("measuring {name}");
            let flags = ["--pool-size", self.pool_size];
            let product = Product::start_with(self.quoin, self.directory, &flags)?;
            self.facts.extend(case(&product)?);
        }
        Ok(())
    }
}

fn load(writes_percent: u64, time: Duration) -> Load {
    Load { writes_percent, pattern: Pattern::Random, block_bytes: 4096, depth: 32, time }
}

/// A volume that was written whole.
pub fn full(product: &Product, name: &str, bytes: u64) -> Result<Generator, Error> {
    let socket = product.volume(name, Class::Cache, bytes)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(1 << 20)?;
    Ok(generator)
}

pub fn cut(product: &Product, volume: &str, name: &str) -> Result<(), Error> {
    product.command(&["snapshot", "create", volume, "--name", name]).map(drop)
}

/// Longest time without an answer while snapshots are made, and the rate behind one.
fn made(product: &Product, seconds: Duration) -> Result<Vec<Fact>, Error> {
    let mut generator = full(product, "made", VOLUME_BYTES)?;
    generator.wear_in()?;
    let began = Instant::now();
    let whole = EVERY * (UNDER_LOAD as u32 + 5);
    let (spans, outcome) = std::thread::scope(|scope| {
        let running = scope.spawn(|| generator.run(load(100, whole)));
        let mut spans = Vec::new();
        for number in 0..UNDER_LOAD {
            std::thread::sleep(EVERY);
            let from = began.elapsed();
            cut(product, "made", &format!("gap-{number}"))?;
            spans.push(from..began.elapsed() + ECHO);
        }
        let outcome = running.join().map_err(|_| Error::Failed("the load panicked".into()))??;
        Ok::<_, Error>((spans, outcome))
    })?;
    let mut gaps: Vec<f64> =
        spans.iter().map(|span| outcome.longest_gap(span).as_secs_f64() * 1e3).collect();
    gaps.sort_unstable_by(f64::total_cmp);
    let mut slower = Vec::new();
    for pair in 0..AFTER_PAIRS {
        let before = generator.run(load(100, seconds))?;
        cut(product, "made", &format!("pair-{pair}"))?;
        let after = generator.run(load(100, seconds))?;
        slower.push(before.per_second() / after.per_second());
    }
    let fact = |what: &str, value, unit, goal| Fact::of(MADE, what, value, unit, goal);
    Ok(vec![
        fact("gap-p99", nearest_rank(&gaps, 0.99), "ms", 50.0),
        fact("gap-median", nearest_rank(&gaps, 0.5), "ms", 10.0),
        fact("writes-after", median(slower), "× slower than before", 1.05),
    ])
}

/// Returns the smallest of sorted figures which at least this share of them do not exceed.
pub fn nearest_rank(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted[rank.saturating_sub(1)]
}

/// Reads and writes of a volume with a hundred snapshots, beside one that has none.
fn hundred(product: &Product, seconds: Duration) -> Result<Vec<Fact>, Error> {
    let (mut plain, mut kept) =
        (full(product, "plain", VOLUME_BYTES)?, full(product, "kept", VOLUME_BYTES)?);
    let changed_bytes = (VOLUME_BYTES as f64 * CHANGED) as u64;
    for number in 0..HUNDRED_SNAPSHOTS {
        plain.sustain(load(100, seconds), changed_bytes)?;
        kept.sustain(load(100, seconds), changed_bytes)?;
        cut(product, "kept", &format!("kept-{number}"))?;
    }
    let mut slower = |writes_percent| {
        let mut ratios = Vec::new();
        // Each is measured first as often as the other: what the first one left to be written out
        // slows the second one down.
        for pair in 0..2 * PAIRS {
            let load = load(writes_percent, seconds);
            let (without, with) = match pair % 2 {
                0 => (plain.run(load)?, kept.run(load)?),
                _ => {
                    let with = kept.run(load)?;
                    (plain.run(load)?, with)
                }
            };
            ratios.push(without.per_second() / with.per_second());
        }
        Ok::<_, Error>(median(ratios))
    };
    let (reads, writes) = (slower(0)?, slower(100)?);
    let fact = |what: &str, value, unit, goal| Fact::of(HUNDRED, what, value, unit, goal);
    Ok(vec![
        fact("reads", reads, "× slower than without", 1.05),
        fact("writes", writes, "× slower than without", 1.11),
        fact("memory-pool", largest_mib(product, "pool"), "MiB", 300.0),
    ])
}

/// A volume with many snapshots: listing them, and opening it beside one that has none.
fn many(product: &Product, count: usize) -> Result<Vec<Fact>, Error> {
    let (plain, mut kept) =
        (full(product, "plain", VOLUME_BYTES)?, full(product, "kept", VOLUME_BYTES)?);
    let making = time(|| {
        for number in 0..count {
            kept.sustain(load(100, EVERY), 64 << 10)?;
            cut(product, "kept", &format!("many-{number}"))?;
        }
        Ok(String::new())
    })?;
    drop((plain, kept));
    let listing = time(|| product.command(&["snapshot", "list", "kept", "-o", "json"]))?;
    let opening = |volume: &str| {
        product.command(&["volume", "detach", volume])?;
        time(|| {
            let socket = product.attach(volume)?;
            Generator::connect(&socket)?.read_one()?;
            Ok(String::new())
        })
    };
    let mut ratios = Vec::new();
    for _ in 0..OPENINGS {
        let without = opening("plain")?;
        ratios.push(opening("kept")?.as_secs_f64() / without.as_secs_f64());
    }
    let fact = |what: &str, value, unit, goal| {
        Fact::of(format!("{MANY}-{count}"), what, value, unit, goal)
    };
    Ok(vec![
        fact("made", making.as_secs_f64() * 1e3 / count.max(1) as f64, "ms each", 150.0),
        fact("listed", listing.as_secs_f64(), "s", 1.0),
        fact("opened", median(ratios), "× without", 1.1),
    ])
}

/// Deletion of a snapshot of a volume that is not used: the answer, and the time until nine tenths
/// of the space that only it had are free.
fn deleted(product: &Product) -> Result<Vec<Fact>, Error> {
    const EXCLUSIVE_BYTES: u64 = 256 << 20;
    let mut generator = full(product, "deleted", VOLUME_BYTES)?;
    cut(product, "deleted", "old")?;
    generator.write_first(EXCLUSIVE_BYTES, 1 << 20)?;
    // The pools report what they have in use every two seconds.
    std::thread::sleep(Duration::from_secs(5));
    let before = used_bytes(product)?;
    let began = Instant::now();
    let answer = time(|| product.command(&["snapshot", "delete", "old", "--yes"]))?;
    let enough = EXCLUSIVE_BYTES as f64 * REPLICAS * 0.9;
    while before - used_bytes(product)? < enough && began.elapsed() < GIVEN_BACK_WITHIN {
        std::thread::sleep(Duration::from_millis(100));
    }
    let fact = |what: &str, value, unit, goal| Fact::of(DELETED, what, value, unit, goal);
    Ok(vec![
        fact("answer", answer.as_secs_f64() * 1e3, "ms", 150.0),
        fact("space", began.elapsed().as_secs_f64(), "s until it is free", 60.0),
    ])
}

/// Return of a volume whose content was written anew since the snapshot.
fn reverted(product: &Product) -> Result<Vec<Fact>, Error> {
    let mut generator = full(product, "reverted", VOLUME_BYTES)?;
    cut(product, "reverted", "old")?;
    generator.fill(1 << 20)?;
    drop(generator);
    product.command(&["volume", "detach", "reverted"])?;
    let revert = ["snapshot", "revert", "reverted", "old", "--yes"];
    let reverting = time(|| product.command(&revert))?;
    let name = format!("{REVERTED}-1-gib");
    Ok(vec![Fact { name, value: reverting.as_secs_f64(), unit: "s", goal: 1.0 }])
}
