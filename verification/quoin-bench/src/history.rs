//! Cost of history: the changed blocks of two snapshots beside all blocks of one, and the rebuild of a
//! replica whose volume has snapshots, gets and loses them meanwhile, or whose pool is killed.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::clones::time;
use crate::compare::median;
use crate::further::Fact;
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options};

pub const DIFF: &str = "snapshot-diff";
pub const REBUILD: &str = "snapshot-rebuild";

/// Size of the volume whose blocks are listed; one block of each MiB is written.
const SPARSE_BYTES: u64 = 32 << 30;
/// Share of it that is changed between two snapshots.
const CHANGED: f64 = 0.01;
const PAIRS: usize = 5;
const REBUILT_BYTES: u64 = 512 << 20;
const SNAPSHOTS: usize = 100;
/// Share of the volume that is written between two of those.
const BETWEEN: f64 = 0.01;
const POOL: &str = "pool-c";
const EVERY: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(20);

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let mut facts = Vec::new();
    let mut measure = |name, case: &dyn Fn(&Product) -> Result<Vec<Fact>, Error>| {
        if options.wants(name) {
            eprintln!("measuring {name}");
            let product = Product::start_with(quoin, directory, &["--pool-size", "48GiB"])?;
            facts.extend(case(&product)?);
        }
        Ok::<(), Error>(())
    };
    measure(DIFF, &diff)?;
    measure(REBUILD, &rebuild)?;
    Ok(facts)
}

fn cut(product: &Product, volume: &str, name: &str) -> Result<(), Error> {
    product.command(&["snapshot", "create", volume, "--name", name]).map(drop)
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
fn rebuild(product: &Product) -> Result<Vec<Fact>, Error> {
    let volume = |name: &str| {
        let socket = product.volume(name, Class::Cache, REBUILT_BYTES)?;
        let mut generator = Generator::connect(&socket)?;
        generator.fill(1 << 20)?;
        Ok::<_, Error>(generator)
    };
    let mut kept = volume("kept")?;
    let random = |time| Load {
        writes_percent: 100,
        pattern: Pattern::Random,
        block_bytes: 4096,
        depth: 32,
        time,
    };
    let between = (REBUILT_BYTES as f64 * BETWEEN) as u64;
    for number in 0..SNAPSHOTS {
        kept.sustain(random(TIMEOUT), between)?;
        cut(product, "kept", &format!("kept-{number}"))?;
    }
    let held = REBUILT_BYTES as f64 * (1.0 + BETWEEN * SNAPSHOTS as f64);
    let with_snapshots = rebuilt(product, "kept", |_| Ok(()))? / held;
    product.command(&["volume", "detach", "kept"])?;
    drop(kept);

    let _changing = volume("changing")?;
    let mut last = Instant::now();
    let meanwhile = rebuilt(product, "changing", |number| {
        if last.elapsed() >= EVERY {
            let name = format!("changing-{number}");
            cut(product, "changing", &name)?;
            product.command(&["snapshot", "delete", &name, "--yes"])?;
            last = Instant::now();
        }
        Ok(())
    })?;
    let meanwhile = meanwhile / REBUILT_BYTES as f64;
    let fact = |what: &str, value, goal| Fact::of(REBUILD, what, value, "× what it held", goal);
    Ok(vec![fact("hundred", with_snapshots, 1.3), fact("meanwhile", meanwhile, 1.3)])
}

/// Loses a replica with its pool; returns the bytes that were copied for the new one. `meanwhile` is
/// called again and again until it is in sync.
fn rebuilt(
    product: &Product,
    volume: &str,
    mut meanwhile: impl FnMut(u64) -> Result<(), Error>,
) -> Result<f64, Error> {
    let old = product.replica(volume, POOL)?;
    product.wipe_pool(POOL)?;
    let began = Instant::now();
    for number in 0.. {
        let now = product.replica(volume, POOL)?;
        if now.guid != old.guid && now.phase == "InSync" {
            return Ok(now.rebuilt_bytes as f64);
        }
        if began.elapsed() > TIMEOUT {
            break;
        }
        meanwhile(number)?;
        std::thread::sleep(POLL);
    }
    Err(Error::Failed(format!("the replica of {volume} in {POOL} is not rebuilt")))
}
