//! Cost of the encryption of volumes: an encrypted volume beside one that is not, of one cluster.
//!
//! In this case the volume without encryption stands where the floor stands in others, so the ratio
//! is what encryption leaves of its speed.

use std::path::Path;

use crate::cases::CaseResult;
use crate::compare::{Side, compare};
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options};

pub const NAME: &str = "write-4k-qd32-encrypted";

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<CaseResult, Error> {
    let size_bytes = options.measure.size_mib << 20;
    let product = Product::start(quoin, &directory.join("quoin"))?;
    let key_file = directory.join("key");
    let key = "5a".repeat(32);
    std::fs::write(&key_file, key).map_err(Error::io("write a key"))?;
    eprintln!("preparing {NAME}: filling both volumes");
    let plain = product.volume("bench-plain", Class::Cache, size_bytes)?;
    let encrypted = product.encrypted_volume("bench-encrypted", &key_file, size_bytes)?;
    let (mut plain, mut encrypted) = (Generator::connect(&plain)?, Generator::connect(&encrypted)?);
    for generator in [&mut plain, &mut encrypted] {
        generator.fill(128 << 10)?;
        generator.wear_in()?;
    }
    eprintln!("measuring {NAME}");
    let load = Load {
        writes_percent: 100,
        pattern: Pattern::Random,
        block_bytes: 4096,
        depth: 32,
        time: options.time(),
    };
    let mut plain_side = Side { generator: &mut plain, pids: product.pids() };
    let mut encrypted_side = Side { generator: &mut encrypted, pids: product.pids() };
    let comparison =
        compare(&mut plain_side, Some(&mut encrypted_side), load, options.measure.pairs)?;
    Ok(CaseResult { name: NAME, comparison })
}
