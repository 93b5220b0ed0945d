//! Cost of a clone of a full volume, beside an empty volume: the time until it is ready, and the space
//! that each of its replicas takes.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::compare::median;
use crate::further::Fact;
use crate::load::Generator;
use crate::product::Product;
use crate::{Class, Error, Options};

pub const NAME: &str = "clone";
const PAIRS: usize = 9;
const REPLICAS: f64 = 3.0;

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let gib = options.further.clone_gib;
    eprintln!("measuring {NAME} with {gib} GiB");
    let pool_size = format!("{}GiB", 2 * gib + 1);
    let product = Product::start_with(quoin, directory, &["--pool-size", &pool_size])?;
    let socket = product.volume("source", Class::Cache, gib << 30)?;
    Generator::connect(&socket)?.fill(1 << 20)?;
    let (size, mut ratios) = ((gib << 30).to_string(), Vec::new());
    let mut taken = 0.0_f64;
    for pair in 0..PAIRS {
        let (empty, copy, snapshot) =
            (format!("empty-{pair}"), format!("copy-{pair}"), format!("snapshot-{pair}"));
        let plain = time(|| product.command(&["volume", "create", &empty, "--size", &size]))?;
        product.command(&["snapshot", "create", "source", "--name", &snapshot])?;
        let before = used_bytes(&product)?;
        let clone =
            time(|| product.command(&["volume", "create", &copy, "--from-snapshot", &snapshot]))?;
        taken = taken.max((used_bytes(&product)? - before).max(0.0));
        ratios.push(clone.as_secs_f64() / plain.as_secs_f64());
        for volume in [&empty, &copy] {
            product.command(&["volume", "delete", volume, "--yes"])?;
        }
    }
    let fact = |what: &str, value, unit, goal| Fact::of(NAME, what, value, unit, goal);
    Ok(vec![
        fact("made", median(ratios), "× an empty volume", 1.2),
        fact("space", taken / REPLICAS / f64::from(1 << 20), "MiB a replica", 12.0),
    ])
}

pub fn time(work: impl FnOnce() -> Result<String, Error>) -> Result<Duration, Error> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed())
}

/// Space that all pools have in use.
pub fn used_bytes(product: &Product) -> Result<f64, Error> {
    let text = product.command(&["pool", "list", "-o", "json"])?;
    let pools: Vec<serde_json::Value> =
        serde_json::from_str(&text).map_err(|error| Error::Failed(error.to_string()))?;
    Ok(pools.iter().filter_map(|pool| pool["usedBytes"].as_f64()).sum())
}
