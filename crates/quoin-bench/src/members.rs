//! What clients notice while replicas come and go: how much a rebuild takes from their IO, and how
//! long a change of the membership holds it up.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::further::Fact;
use crate::load::{Generator, Load, Outcome, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options};

pub const REBUILD: &str = "io-during-rebuild";
pub const CHANGE: &str = "membership-change";
const VOLUME: &str = "members";
const POOL: &str = "pool-c";
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(5);
const CHANGE_VOLUME_BYTES: u64 = 256 << 20;

fn load(depth: usize, time: Duration) -> Load {
    Load { write: true, pattern: Pattern::Random, block_bytes: 4096, depth, time }
}

/// Random writes of 4 KiB at depth 8 before and while a replica is rebuilt.
pub fn during_rebuild(
    options: &Options,
    quoin: &Path,
    directory: &Path,
) -> Result<Vec<Fact>, Error> {
    eprintln!("measuring {REBUILD} with {} MiB", options.rebuild_mib);
    let product = Product::start(quoin, directory)?;
    let socket = product.volume(VOLUME, Class::Cache, options.rebuild_mib << 20)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(128 << 10)?;
    generator.flush()?;
    let load = load(8, options.time());
    generator.run(load)?;
    let undisturbed = generator.run(load)?;
    let old = product.replica(VOLUME, POOL)?;
    product.wipe_pool(POOL)?;
    let is_rebuilding = || {
        let now = product.replica(VOLUME, POOL)?;
        Ok::<bool, Error>(now.guid != old.guid && now.phase == "Rebuilding")
    };
    let began = Instant::now();
    while !is_rebuilding()? {
        if began.elapsed() > TIMEOUT {
            return Err(Error::Failed(format!("no rebuild began in {POOL}")));
        }
        std::thread::sleep(POLL);
    }
    let mut disturbed: Vec<Outcome> = Vec::new();
    while began.elapsed() < TIMEOUT {
        let window = generator.run(load)?;
        if !is_rebuilding()? {
            break;
        }
        disturbed.push(window);
    }
    if disturbed.is_empty() {
        return Err(Error::Failed(
            "the rebuild was over before it could be timed: use a larger --rebuild-mib, or fewer \
             --seconds"
                .into(),
        ));
    }
    let worst = |of: fn(&Outcome) -> f64, better: fn(f64, f64) -> f64| {
        disturbed.iter().map(of).reduce(better).unwrap_or_default()
    };
    let kept = worst(Outcome::per_second, f64::min) / undisturbed.per_second();
    let p99 = |outcome: &Outcome| outcome.percentile_us(0.99);
    let slower = worst(p99, f64::max) / p99(&undisturbed);
    let fact = |what: &str, value, unit, goal| Fact {
        name: format!("{REBUILD}-{what}"),
        value,
        unit,
        goal,
    };
    Ok(vec![
        fact("rate-lost", (1.0 - kept).max(0.0) * 100.0, "%", 30.0),
        fact("p99", slower, "x", 3.0),
    ])
}

/// The longest that one of many writes at depth 1 took while a replica went to another pool.
pub fn change(quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    eprintln!("measuring {CHANGE}");
    let product = Product::start_with(quoin, directory, &["--pools", "4"])?;
    let socket = product.volume(VOLUME, Class::Cache, CHANGE_VOLUME_BYTES)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(128 << 10)?;
    generator.flush()?;
    let replicas = product.replicas(VOLUME)?;
    let pool = replicas.first().ok_or_else(|| Error::Failed("a volume without replicas".into()))?;
    let pool = &*pool.pool;
    let mut longest_us = 0.0;
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| product.command(&["replica", "move", VOLUME, pool, "--wait"]));
        while !moved.is_finished() {
            let outcome = generator.run(load(1, Duration::from_millis(200)))?;
            longest_us = outcome.percentile_us(1.0).max(longest_us);
        }
        moved.join().map_err(|_| Error::Failed("the change panicked".into()))?
    })?;
    let name = format!("{CHANGE}-pause");
    Ok(vec![Fact { name, value: longest_us / 1000.0, unit: "ms", goal: 100.0 }])
}
