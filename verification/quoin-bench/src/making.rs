//! The time in which volumes are made beside thousands of others, as a multiple of the time beside few.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::further::Fact;
use crate::product::Product;
use crate::{Error, Options};

pub const NAME: &str = "making";
/// Volumes that are made at a time, and measured.
const VOLUMES: usize = 300;
/// Pools record for a moment what was made, which is not part of what comes next.
const SETTLE: Duration = Duration::from_secs(4);

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    // Sparse files: their size decides how many volumes they take, and none is written.
    let product = Product::start_with(quoin, directory, &["--pool-size", "64GiB"])?;
    let list = directory.join("volumes.yaml");
    // A new product warms up with the first ones.
    let first = make(&product, &list, 0, VOLUMES)?;
    std::thread::sleep(SETTLE);
    let beside_few = first.min(make(&product, &list, VOLUMES, VOLUMES)?);
    let mut there = 2 * VOLUMES;
    let beside = options.further.beside as usize;
    while there < beside {
        let count = VOLUMES.min(beside - there);
        make(&product, &list, there, count)?;
        there += count;
    }
    std::thread::sleep(SETTLE);
    let beside_many = make(&product, &list, there, VOLUMES)?;
    let ratio = beside_many.as_secs_f64() / beside_few.as_secs_f64();
    Ok(vec![Fact::of(NAME, &format!("beside-{there}"), ratio, "× beside few", 1.3)])
}

/// Makes volumes by one list, and returns the time until all of them are there.
fn make(product: &Product, list: &Path, first: usize, count: usize) -> Result<Duration, Error> {
    let mut text = String::new();
    for number in first..first + count {
        let _ = write!(
            text,
            "---\napiVersion: quoin/v1\nkind: Volume\nmetadata:\n  name: made-{number}\n\
             spec:\n  size: 1MiB\n  desiredReplicationFactor: 3\n"
        );
    }
    std::fs::write(list, text).map_err(Error::io("write a list of volumes"))?;
    let began = Instant::now();
    product.command(&["apply", "-f", &list.to_string_lossy()])?;
    Ok(began.elapsed())
}
