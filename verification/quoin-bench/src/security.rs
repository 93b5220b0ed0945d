//! Cost of security on data connections between hosts: TCP with a proof of each frame, and with
//! encryption.
//!
//! The same case as `write-128k-qd8`, where bytes count most, with pools that are reached over the
//! network only, as on other hosts; beside the same floor, so the ratios compare all three.

use std::path::Path;

use crate::cases::CaseResult;
use crate::compare::{Side, compare};
use crate::floor::Floor;
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options};

/// The cases, and the setting of each one's cluster.
const CASES: [(&str, &str); 2] =
    [("write-128k-qd8-authenticated", "authenticate"), ("write-128k-qd8-encrypted", "encrypt")];

/// Runs the selected cases.
pub fn run(options: &Options, quoin: &Path, scratch: &Path) -> Result<Vec<CaseResult>, Error> {
    let wanted = CASES.iter().filter(|(name, _)| options.wants(name));
    wanted.map(|(name, mode)| measure(options, quoin, &scratch.join(mode), name, mode)).collect()
}

fn measure(
    options: &Options,
    quoin: &Path,
    directory: &Path,
    name: &'static str,
    mode: &str,
) -> Result<CaseResult, Error> {
    let size_bytes = options.measure.size_mib << 20;
    let flags = ["--network-only", "--data-security", mode];
    let product = Product::start_with(quoin, &directory.join("quoin"), &flags)?;
    eprintln!("preparing {name}: filling both sides");
    let floor = Floor::start(quoin, &directory.join("floor"), Class::Cache, size_bytes)?;
    let mut floor_load = Generator::connect(&floor.socket)?;
    let socket = product.volume("bench-network", Class::Cache, size_bytes)?;
    let mut quoin_load = Generator::connect(&socket)?;
    quoin_load.fill(128 << 10)?;
    eprintln!("measuring {name}");
    let load = Load {
        writes_percent: 100,
        pattern: Pattern::Sequential,
        block_bytes: 128 << 10,
        depth: 8,
        time: options.time(),
    };
    let mut floor_side = Side { generator: &mut floor_load, pids: floor.pids() };
    let mut quoin_side = Side { generator: &mut quoin_load, pids: product.pids() };
    let comparison = compare(&mut floor_side, Some(&mut quoin_side), load, options.measure.pairs)?;
    Ok(CaseResult { name, comparison })
}
