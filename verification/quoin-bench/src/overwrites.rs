//! Cost of an overwrite in a pool that is four fifths full of what volumes and snapshots have: blocks
//! that the pool writes for each block that a client overwrites. Alone, beside a hundred snapshots of
//! which the oldest goes as a new one comes, and beside as many clones.

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
/// Views that are kept beside the volume, and the share of it that is overwritten between two of them.
const KEPT: usize = 100;
const BETWEEN: f64 = 0.005;
/// Size of the volume beside them, so that about as much of the pool is live: their data are half of
/// it, and their nodes some three tenths.
const BESIDE_BYTES: u64 = (POOL_BYTES as f64 * LIVE / 1.8) as u64 & !((1 << 20) - 1);
/// Times that the kept views are all replaced before anything is measured, and while it is.
const WARM_UPS: usize = 2;
const MEASURED: usize = 1;

/// Views that come and go beside a volume.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    Snapshots,
    Clones,
}

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let cases = [("snapshots", Beside::Snapshots), ("clones", Beside::Clones)];
    let name = |what: &str| format!("{NAME}-beside-{what}");
    let wanted: Vec<_> = cases.into_iter().filter(|(what, _)| options.wants(&name(what))).collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    eprintln!("measuring {NAME} of a volume alone");
    let alone = measure(quoin, directory, Beside::Nothing)?;
    let mut facts = Vec::new();
    for (what, beside) in wanted {
        eprintln!("measuring {}", name(what));
        let measured = measure(quoin, directory, beside)?;
        facts.push(Fact { name: name(what), value: measured / alone, unit: "× alone", goal: 2.0 });
    }
    Ok(facts)
}

/// Returns the bytes written to the pool's disk for each byte that is overwritten.
fn measure(quoin: &Path, directory: &Path, beside: Beside) -> Result<f64, Error> {
    const VOLUME: &str = "overwritten";
    let pool_size = format!("{}MiB", POOL_BYTES >> 20);
    let flags = ["--pools", "1", "--pool-size", &pool_size];
    let product = Product::start_with(quoin, directory, &flags)?;
    let bytes = match beside {
        Beside::Nothing => (POOL_BYTES as f64 * LIVE) as u64 & !((1 << 20) - 1),
        Beside::Snapshots | Beside::Clones => BESIDE_BYTES,
    };
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
        rotate(&product, VOLUME, beside, number)?;
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

/// Makes the view of this number, and removes the oldest one that is too many.
fn rotate(product: &Product, volume: &str, beside: Beside, number: usize) -> Result<(), Error> {
    let (new, old) = (format!("view-{number}"), number.checked_sub(KEPT));
    let old = old.map(|number| format!("view-{number}"));
    match beside {
        Beside::Nothing => {}
        Beside::Snapshots => {
            cut(product, volume, &new)?;
            if let Some(old) = old {
                product.command(&["snapshot", "delete", &old, "--yes"])?;
            }
        }
        Beside::Clones => {
            product.command(&["volume", "create", &new, "--from-volume", volume])?;
            if let Some(old) = old {
                product.command(&["volume", "delete", &old, "--yes"])?;
            }
        }
    }
    Ok(())
}
