//! Speed of the rebuild of a replica whose pool was lost, beside the sequential floor: both are
//! counted in blocks of 128 KiB a second, the floor's written by a client to all its sinks, Quoin's
//! copied by a rebuild that no client disturbs.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::cases::CaseResult;
use crate::compare::{Comparison, Figures, Side, compare};
use crate::floor::Floor;
use crate::load::{Generator, Load, Pattern};
use crate::product::Product;
use crate::{Class, Error, Options, usage};

pub const NAME: &str = "rebuild-128k";
const BLOCK_BYTES: u32 = 128 << 10;
const POOL: &str = "pool-c";
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(20);

/// Sizes of the cases in which a replica is rebuilt.
#[derive(clap::Args, Clone, Debug)]
pub struct RebuildOptions {
    /// Data of the rebuild case, in MiB
    #[arg(long, default_value_t = 4096, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub rebuild_mib: u64,
    /// Data that changes while a replica is away in the case delta-rebuild, in MiB
    #[arg(long, default_value_t = 256, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 18))]
    pub delta_mib: u64,
    /// Seconds of the replica's absence
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", value_parser = crate::seconds)]
    pub absence: f64,
}

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<CaseResult, Error> {
    let size_bytes = options.rebuild.rebuild_mib << 20;
    eprintln!("measuring {NAME} with {} MiB", options.rebuild.rebuild_mib);
    let floor = sequential_floor(options, quoin, &directory.join("floor"), size_bytes)?;
    let product = Product::start(quoin, &directory.join("quoin"))?;
    let socket = product.volume("rebuild", Class::Cache, size_bytes)?;
    let mut generator = Generator::connect(&socket)?;
    generator.fill(BLOCK_BYTES)?;
    generator.flush()?;
    let rebuilt = rebuild(&product, size_bytes)?;
    let ratio = rebuilt.per_second / floor.per_second;
    let comparison = Comparison { floor, quoin: Some(rebuilt), ratio };
    Ok(CaseResult { name: NAME, comparison })
}

fn sequential_floor(
    options: &Options,
    quoin: &Path,
    directory: &Path,
    size_bytes: u64,
) -> Result<Figures, Error> {
    let floor = Floor::start(quoin, directory, Class::Cache, size_bytes)?;
    let mut generator = Generator::connect(&floor.socket)?;
    let load = Load {
        writes_percent: 100,
        pattern: Pattern::Sequential,
        block_bytes: BLOCK_BYTES,
        depth: 8,
        time: options.time(),
    };
    let mut side = Side { generator: &mut generator, pids: floor.pids() };
    Ok(compare(&mut side, None, load, options.measure.pairs)?.floor)
}

/// Measures from the first report of the new replica, so that no restart is counted, until it is in
/// sync.
fn rebuild(product: &Product, size_bytes: u64) -> Result<Figures, Error> {
    let old = product.replica("rebuild", POOL)?;
    product.wipe_pool(POOL)?;
    let began = Instant::now();
    let mut first = None;
    loop {
        let now = product.replica("rebuild", POOL)?;
        let new = now.guid != old.guid;
        if new && first.is_none() && (now.rebuilt_bytes > 0 || now.phase == "InSync") {
            let pids = product.pids();
            first = Some((Instant::now(), now.rebuilt_bytes, usage::cpu(&pids), pids));
        }
        if new && now.phase == "InSync" {
            break;
        }
        if began.elapsed() > TIMEOUT {
            return Err(Error::Failed(format!(
                "the replica in {POOL} was not rebuilt within {} s; it is {}",
                TIMEOUT.as_secs(),
                now.phase
            )));
        }
        std::thread::sleep(POLL);
    }
    let Some((at, bytes, cpu, pids)) = first else {
        return Err(Error::Failed("the rebuild was never seen".into()));
    };
    let blocks = size_bytes.saturating_sub(bytes) as f64 / f64::from(BLOCK_BYTES);
    if blocks < 1.0 {
        return Err(Error::Failed(
            "the rebuild was over before it could be timed: use a larger --rebuild-mib".into(),
        ));
    }
    let used = usage::cpu(&pids).saturating_sub(cpu);
    Ok(Figures {
        per_second: blocks / at.elapsed().as_secs_f64(),
        cpu_us: used.as_secs_f64() * 1e6 / blocks,
        ..Figures::default()
    })
}
