//! Writes that go on for longer than a page cache takes them, to three copies that are synced in the
//! end. The floor does the same with three files. A third of the data fits the volume, so it is
//! overwritten twice and clean-up is part of the measurement.

use std::path::Path;

use crate::cases::CaseResult;
use crate::compare::{Comparison, Figures, Side, figures};
use crate::floor::Floor;
use crate::further::free_bytes;
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options};

/// Times that the volume is written.
const TIMES: u64 = 3;
const FULL_MIB: u64 = 12 << 10;
const QUICK_MIB: u64 = 1536;

struct Case {
    name: &'static str,
    pattern: Pattern,
    block_bytes: u32,
    depth: usize,
}

const CASES: [Case; 2] = [
    Case {
        name: "sustained-128k-qd8",
        pattern: Pattern::Sequential,
        block_bytes: 128 << 10,
        depth: 8,
    },
    Case { name: "sustained-4k-qd32", pattern: Pattern::Random, block_bytes: 4096, depth: 32 },
];

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<CaseResult>, Error> {
    let mib = options.sustained_mib.unwrap_or(if options.quick { QUICK_MIB } else { FULL_MIB });
    let size_bytes = (mib / TIMES) << 20;
    let bytes = size_bytes * TIMES;
    let wanted = CASES.iter().filter(|case| options.wants(case.name));
    let mut results = Vec::new();
    for case in wanted {
        // One side after the other, so the larger one counts: a pool has room for clean-up.
        let (room, needed) = (free_bytes(directory)?, 3 * (size_bytes * 3 / 2 + (2 << 30)));
        if room < needed {
            eprintln!(
                "leaving out {}: {} has {} GiB free and {} are needed; use --dir or a smaller \
                 --sustained-mib",
                case.name,
                directory.display(),
                room >> 30,
                needed >> 30
            );
            continue;
        }
        eprintln!("measuring {} with {} MiB", case.name, bytes >> 20);
        let floor = floor(case, quoin, &directory.join("floor"), size_bytes, bytes)?;
        let measured = product(case, quoin, &directory.join("quoin"), size_bytes, bytes)?;
        let ratio = measured.per_second / floor.per_second;
        let comparison = Comparison { floor, quoin: Some(measured), ratio };
        results.push(CaseResult { name: case.name, comparison });
    }
    Ok(results)
}

fn floor(
    case: &Case,
    quoin: &Path,
    directory: &Path,
    size_bytes: u64,
    bytes: u64,
) -> Result<Figures, Error> {
    let floor = Floor::start(quoin, directory, Class::Cache, size_bytes)?;
    let mut generator = Generator::connect(&floor.socket)?;
    let mut side = Side { generator: &mut generator, pids: floor.pids() };
    let measured = sustain(case, &mut side, bytes);
    drop(floor);
    remove(directory);
    measured
}

fn product(
    case: &Case,
    quoin: &Path,
    directory: &Path,
    size_bytes: u64,
    bytes: u64,
) -> Result<Figures, Error> {
    let pool_mib = (size_bytes >> 20) * 3 / 2 + 1024;
    let product =
        Product::start_with(quoin, directory, &["--pool-size", &format!("{pool_mib}MiB")])?;
    let socket = product.volume("sustained", Class::Cache, size_bytes)?;
    let mut generator = Generator::connect(&socket)?;
    let mut side = Side { generator: &mut generator, pids: product.pids() };
    let measured = sustain(case, &mut side, bytes);
    drop(product);
    remove(directory);
    measured
}

fn sustain(case: &Case, side: &mut Side<'_>, bytes: u64) -> Result<Figures, Error> {
    let load = Load {
        writes_percent: 100,
        pattern: case.pattern,
        block_bytes: case.block_bytes,
        depth: case.depth,
        time: std::time::Duration::ZERO,
    };
    figures(side, |generator| generator.sustain(load, bytes))
}

/// The next side needs the room.
fn remove(directory: &Path) {
    // The directory is temporary, and goes with the benchmark at the latest.
    let _ = std::fs::remove_dir_all(directory);
}
