//! Cost of an overwrite in a pool of which four fifths and more are live: blocks
//! that the pool writes for each block that a client overwrites. Alone, and beside a hundred snapshots of
//! which the oldest goes as a new one comes.

use std::path::Path;

use crate::clones::used_bytes;
use crate::further::{Fact, scrape};
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::snapshots::cut;
use crate::{Class, Error, Options, usage};

pub const NAME: &str = "overwrites";

const POOL_BYTES: u64 = 3 << 30;
/// Part of the pool that a volume takes which is alone: no larger one may be made.
const LIVE: f64 = 0.79;
/// Snapshots that are kept beside the volume, and the share of it that is overwritten between two of them.
const KEPT: usize = 100;
const BETWEEN: f64 = 0.005;
/// Size of the volume beside them: their data are half of it, and with their nodes at least as much of
/// the pool is live as in the other case.
const BESIDE_BYTES: u64 = (POOL_BYTES as f64 * LIVE / 1.8) as u64 & !((1 << 20) - 1);
/// Times that the kept ones are all replaced before anything is measured, and while it is.
const WARM_UPS: usize = 2;
const MEASURED: usize = 1;

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    if !options.wants(NAME) {
        return Ok(Vec::new());
    }
    eprintln!("measuring {NAME}");
    let alone_bytes = (POOL_BYTES as f64 * LIVE) as u64 & !((1 << 20) - 1);
    let alone = measure(quoin, directory, alone_bytes, false)?;
    let beside = measure(quoin, directory, BESIDE_BYTES, true)?;
    let name = format!("{NAME}-beside-snapshots");
    Ok(vec![Fact { name, value: beside / alone, unit: "× alone", goal: 2.0 }])
}

/// Returns the bytes written to the pool's disk for each byte that is overwritten.
fn measure(quoin: &Path, directory: &Path, bytes: u64, snapshots: bool) -> Result<f64, Error> {
    const VOLUME: &str = "overwritten";
    let pool_size = format!("{}MiB", POOL_BYTES >> 20);
    let flags = ["--pools", "1", "--pool-size", &pool_size];
    let product = Product::start_with(quoin, directory, &flags)?;
    let socket = product.volume_with(VOLUME, Class::Cache, bytes, 1)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(1 << 20)?;
    let (pattern, time) = (Pattern::Random, std::time::Duration::ZERO);
    let random = Load { writes_percent: 100, pattern, block_bytes: 4096, depth: 32, time };
    let step_bytes = (BESIDE_BYTES as f64 * BETWEEN) as u64;
    let written = || {
        let pids = product.pids_of("pool");
        pids.iter().filter_map(|pid| usage::written_bytes(*pid)).sum::<u64>()
    };
    let mut before = 0;
    for number in 0..KEPT * (WARM_UPS + MEASURED) {
        if number == KEPT * WARM_UPS {
            before = written();
        }
        generator.sustain(random, step_bytes)?;
        if snapshots {
            rotate(&product, VOLUME, number)?;
        }
    }
    let live =
        product.pids_of("pool").first().and_then(|pid| scrape(*pid, "quoin_pool_live_bytes"));
    eprintln!(
        "{} % of the pool are live, {} % in use",
        (live.unwrap_or_default() / POOL_BYTES as f64 * 100.0).round(),
        (used_bytes(&product)? / POOL_BYTES as f64 * 100.0).round(),
    );
    let overwritten = step_bytes * (KEPT * MEASURED) as u64;
    Ok((written() - before) as f64 / overwritten as f64)
}

/// Makes the snapshot of this number, and deletes the oldest one that is too many.
fn rotate(product: &Product, volume: &str, number: usize) -> Result<(), Error> {
    cut(product, volume, &format!("kept-{number}"))?;
    if let Some(old) = number.checked_sub(KEPT) {
        product.command(&["snapshot", "delete", &format!("kept-{old}"), "--yes"])?;
    }
    Ok(())
}
