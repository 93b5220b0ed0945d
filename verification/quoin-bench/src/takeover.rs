//! Time until a volume of a node that is lost is served by another one.

use std::path::Path;
use std::time::Instant;

use crate::further::Fact;
use crate::load::Generator;
use crate::nodes::{Target, repeat};
use crate::product::Product;
use crate::{Class, Error};

pub const NAME: &str = "takeover";
const VOLUME: &str = "taken";
const VOLUME_BYTES: u64 = 64 << 20;
/// The default of `--node-timeout`, a lease with its share for skewed clocks, and a second.
const BOUND_S: f64 = 10.0 + 2.1 + 1.0;

/// Kills all of a node that uses a volume, and has another node attach it.
pub fn run(quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    eprintln!("measuring {NAME}");
    let product = Product::start(quoin, directory)?;
    let mut generator = Generator::connect(&product.volume(VOLUME, Class::Cache, VOLUME_BYTES)?)?;
    generator.fill(1 << 20)?;
    let second = Target::start(quoin, &product, directory, "second")?;
    let _away = [product.take_away_role("target")?, product.take_away_role("node")?];
    let began = Instant::now();
    let socket = repeat(began, || second.attach(&product, VOLUME))?;
    repeat(began, || Generator::connect(&socket)?.read_one())?;
    let taken = began.elapsed();
    Ok(vec![Fact { name: NAME.to_owned(), value: taken.as_secs_f64(), unit: "s", goal: BOUND_S }])
}
