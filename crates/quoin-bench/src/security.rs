//! What proving alone costs on data connections, beside encrypting, which is the default.
//!
//! The same case as `write-128k-qd8`, where bytes count most, on a Quoin whose cluster only
//! authenticates; beside the same floor, so the two ratios compare both.

use std::path::Path;

use crate::cases::CaseResult;
use crate::compare::{Side, compare};
use crate::floor::Floor;
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options};

pub const NAME: &str = "write-128k-qd8-authenticated";

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<CaseResult, Error> {
    let size_bytes = options.size_mib << 20;
    let flags = ["--data-security", "authenticate"];
    let product = Product::start_with(quoin, &directory.join("quoin"), &flags)?;
    eprintln!("preparing {NAME}: filling both sides");
    let floor = Floor::start(quoin, &directory.join("floor"), Class::Cache, size_bytes)?;
    let mut floor_load = Generator::connect(&floor.socket)?;
    let socket = product.volume("bench-authenticated", Class::Cache, size_bytes)?;
    let mut quoin_load = Generator::connect(&socket)?;
    quoin_load.fill(128 << 10)?;
    eprintln!("measuring {NAME}");
    let load = Load {
        write: true,
        pattern: Pattern::Sequential,
        block_bytes: 128 << 10,
        depth: 8,
        time: options.time(),
    };
    let mut floor_side = Side { generator: &mut floor_load, pids: floor.pids() };
    let mut quoin_side = Side { generator: &mut quoin_load, pids: product.pids() };
    let comparison = compare(&mut floor_side, Some(&mut quoin_side), load, options.pairs)?;
    Ok(CaseResult { name: NAME, comparison })
}
