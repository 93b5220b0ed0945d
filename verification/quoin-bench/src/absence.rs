//! Cost of the return of a replica that was away for a while: the bytes that are moved to it,
//! beside those that changed meanwhile. The volume is a multiple of the change, so that a full
//! rebuild would be visible.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::further::{Fact, scrape};
use crate::load::Generator;
use crate::product::Product;
use crate::{Class, Error, Options};

pub const NAME: &str = "delta-rebuild";
const VOLUME: &str = "absence";
const POOL: &str = "pool-c";
/// Size of the volume as a multiple of the changed data.
const VOLUME_SHARE: u64 = 4;
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(20);

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let (changed, absence) = (options.rebuild.delta_mib << 20, options.rebuild.absence);
    eprintln!("measuring {NAME} with {} MiB changed in {absence} s", options.rebuild.delta_mib);
    let product = Product::start(quoin, directory)?;
    let socket = product.volume(VOLUME, Class::Cache, changed * VOLUME_SHARE)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(128 << 10)?;
    let copied_before = copied_bytes(&product)?;
    let held = product.take_away(POOL)?;
    let gone = Instant::now();
    await_phase(&product, |phase| phase != "InSync")?;
    generator.write_first(changed, 128 << 10)?;
    std::thread::sleep(Duration::from_secs_f64(absence).saturating_sub(gone.elapsed()));
    held.give_back()?;
    let back = Instant::now();
    await_phase(&product, |phase| phase == "InSync")?;
    let took = back.elapsed();
    // Data from the log alone arrived as entries, which its pool counts since its start.
    let entries = sum(product.pids_of_pool(POOL), "quoin_pool_written_bytes_total")?;
    let moved = copied_bytes(&product)? - copied_before + entries;
    let mib = f64::from(1 << 20);
    let fact = |what: &str, value, unit, goal| Fact::of(NAME, what, value, unit, goal);
    Ok(vec![
        // The goal allows for the map's rounding, but not for the three quarters that did not
        // change.
        fact("moved", moved / mib, "MiB", options.rebuild.delta_mib as f64 * 1.1),
        // Most of the time passes until the pool runs and the target has connected to it again.
        fact("time", took.as_secs_f64(), "s", 10.0 + options.rebuild.delta_mib as f64 / 100.0),
    ])
}

/// Returns the bytes that targets copied for replicas which lacked them.
pub fn copied_bytes(product: &Product) -> Result<f64, Error> {
    sum(product.pids_of("target"), "quoin_target_rebuild_moved_bytes_total")
}

/// Returns a counter of all these processes. A counter that none of them has is an error, not zero.
fn sum(pids: Vec<u32>, counter: &str) -> Result<f64, Error> {
    let counts = pids.iter().filter_map(|pid| scrape(*pid, counter));
    counts
        .reduce(|sum, count| sum + count)
        .ok_or_else(|| Error::Failed(format!("no process tells its {counter}")))
}

fn await_phase(product: &Product, is: impl Fn(&str) -> bool) -> Result<(), Error> {
    let began = Instant::now();
    loop {
        let phase = product.replica(VOLUME, POOL)?.phase;
        if is(&phase) {
            return Ok(());
        }
        if began.elapsed() > TIMEOUT {
            return Err(Error::Failed(format!("the replica in {POOL} stays {phase}")));
        }
        std::thread::sleep(POLL);
    }
}
