//! Effects on clients while replicas and targets change: the share of IO that a rebuild takes, the
//! pause at a change of the membership, and at the death of the target.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::further::Fact;
use crate::load::{Generator, Load, Outcome, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options, usage};

pub const REBUILD: &str = "io-during-rebuild";
pub const MIXED_REBUILD: &str = "mixed-io-during-rebuild";
pub const CHANGE: &str = "membership-change";
pub const DEATH: &str = "target-death";
const VOLUME: &str = "members";
const POOL: &str = "pool-c";
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(5);
/// Measurements before the rebuild; their median is the baseline.
const UNDISTURBED: usize = 5;
/// Largest multiple of the data with which a rebuild is repeated that ended before it could be
/// timed; each repeat takes twice the data.
const GROWN_MAX: u64 = 8;
const CHANGE_VOLUME_BYTES: u64 = 256 << 20;

fn load(writes_percent: u64, depth: usize, time: Duration) -> Load {
    Load { writes_percent, pattern: Pattern::Random, block_bytes: 4096, depth, time }
}

/// Random IO of 4 KiB at depth 8 before and while a replica is rebuilt: under `name` so many of a
/// hundred requests are writes. Writes alone, all over the volume and as fast as they are answered,
/// are the worst case of a rebuild, as each of its rounds leaves nearly as much behind as it
/// copies.
pub fn during_rebuild(
    name: &str,
    writes_percent: u64,
    options: &Options,
    quoin: &Path,
    directory: &Path,
) -> Result<Vec<Fact>, Error> {
    let mut mib = options.rebuild.rebuild_mib;
    loop {
        eprintln!("measuring {name} with {mib} MiB");
        if let Some(facts) =
            during_rebuild_of(mib, name, writes_percent, options, quoin, directory)?
        {
            return Ok(facts);
        }
        if mib >= GROWN_MAX * options.rebuild.rebuild_mib {
            return Err(Error::Failed(format!(
                "the rebuild of {mib} MiB was over before it could be timed: use a larger \
                 --rebuild-mib, or fewer --seconds"
            )));
        }
        mib *= 2;
    }
}

/// Measures one such rebuild; `None`: it was over before it could be timed.
fn during_rebuild_of(
    mib: u64,
    name: &str,
    writes_percent: u64,
    options: &Options,
    quoin: &Path,
    directory: &Path,
) -> Result<Option<Vec<Fact>>, Error> {
    let product = Product::start(quoin, directory)?;
    let socket = product.volume(VOLUME, Class::Cache, mib << 20)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(128 << 10)?;
    generator.flush()?;
    // A new log has no clean-up: the baseline is one in use.
    generator.wear_in()?;
    let load = load(writes_percent, 8, options.time());
    generator.run(load)?;
    let mut undisturbed =
        (0..UNDISTURBED).map(|_| generator.run(load)).collect::<Result<Vec<_>, Error>>()?;
    undisturbed.sort_by(|a, b| a.per_second().total_cmp(&b.per_second()));
    let undisturbed = undisturbed.swap_remove(UNDISTURBED / 2);
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
        eprintln!(
            "  {:.0} of {:.0} requests a second, p99 {:.0} of {:.0} µs",
            window.per_second(),
            undisturbed.per_second(),
            window.percentile_us(0.99),
            undisturbed.percentile_us(0.99)
        );
        disturbed.push(window);
    }
    if disturbed.is_empty() {
        return Ok(None);
    }
    let lost = |rate: f64| (1.0 - rate / undisturbed.per_second()).max(0.0) * 100.0;
    let worst = disturbed.iter().map(Outcome::per_second).reduce(f64::min).unwrap_or_default();
    let all = Outcome::merge(disturbed);
    let slower = all.percentile_us(0.99) / undisturbed.percentile_us(0.99);
    let fact = |what: &str, value, unit, goal| Fact::of(name, what, value, unit, goal);
    Ok(Some(vec![
        fact("rate-lost", lost(all.per_second()), "%", 30.0),
        fact("p99", slower, "x", 3.0),
        // The measurement with the largest loss.
        fact("rate-lost-worst", lost(worst), "%", 60.0),
    ]))
}

/// Measures the longest of many writes at depth 1, for each kind of change of the replicas.
pub fn change(quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    eprintln!("measuring {CHANGE}");
    let product = Product::start_with(quoin, directory, &["--pools", "5"])?;
    let socket = product.volume(VOLUME, Class::Cache, CHANGE_VOLUME_BYTES)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(128 << 10)?;
    generator.flush()?;
    let replicas = product.replicas(VOLUME)?;
    let [first, second, ..] = &replicas[..] else {
        return Err(Error::Failed("a volume without replicas".into()));
    };
    let changes: [(&str, &[&str]); 4] = [
        ("add", &["volume", "scale", VOLUME, "--replicas", "4", "--wait"]),
        ("remove", &["replica", "remove", VOLUME, &second.pool, "--wait"]),
        ("move", &["replica", "move", VOLUME, &first.pool, "--wait"]),
        ("cf", &["volume", "scale", VOLUME, "--consistency-factor", "3", "--wait"]),
    ];
    let pause = |(name, command): (&str, &[&str])| {
        let mut longest_us = 0.0;
        std::thread::scope(|scope| {
            let changed = scope.spawn(|| product.command(command));
            while !changed.is_finished() {
                let outcome = generator.run(load(100, 1, Duration::from_millis(200)))?;
                longest_us = outcome.percentile_us(1.0).max(longest_us);
            }
            changed.join().map_err(|_| Error::Failed("the change panicked".into()))?
        })?;
        let name = format!("{CHANGE}-pause-{name}");
        Ok(Fact { name, value: longest_us / 1000.0, unit: "ms", goal: 100.0 })
    };
    changes.into_iter().map(pause).collect()
}

/// Measures from the death of a target to the first write that its successor answers: the successor
/// waits until the lease of the dead one is over.
pub fn target_death(quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    eprintln!("measuring {DEATH}");
    let product = Product::start(quoin, directory)?;
    let socket = product.volume(VOLUME, Class::Cache, CHANGE_VOLUME_BYTES)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(128 << 10)?;
    drop(generator);
    usage::end(&product.pids_of("target"));
    let died = Instant::now();
    let one = load(100, 1, Duration::from_millis(1));
    // Connections are refused while there is no target, and wait until it may answer.
    while Generator::connect(&socket).and_then(|mut generator| generator.run(one)).is_err() {
        if died.elapsed() > TIMEOUT {
            return Err(Error::Failed("no other target served the volume".into()));
        }
        std::thread::sleep(POLL);
    }
    let value = died.elapsed().as_secs_f64();
    Ok(vec![Fact { name: format!("{DEATH}-pause"), value, unit: "s", goal: 3.0 }])
}
