//! Permanent loss of a pool with a share of many volumes: the time until every volume has all its
//! replicas again, the peak of memory, and the number of records that the controller writes.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::further::{Fact, scrape};
use crate::product::Product;
use crate::{Class, Error, Options, nbd, usage};

pub const NAME: &str = "heal";
const POOLS: &str = "6";
const LOST: &str = "pool-c";
const REPLACE_AFTER: Duration = Duration::from_secs(5);
/// Time limit for each replica; far more than it may take on a busy machine.
const TIMEOUT_EACH: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(500);
const CHUNK_BYTES: u64 = 1 << 20;
/// Size of each volume, where the data is not larger.
const VOLUME_BYTES: u64 = 16 << 20;

/// Size of the case.
#[derive(clap::Args, Clone, Debug)]
pub struct HealOptions {
    /// Volumes of the case that loses a pool
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u64).range(3..=10_000))]
    pub heal_volumes: u64,
    /// Data in each of them, in MiB
    #[arg(long, default_value_t = 8, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub heal_mib: u64,
}

/// A volume with known content.
struct Filled {
    name: String,
    number: u64,
    stream: UnixStream,
}

impl Filled {
    fn make(product: &Product, number: u64, bytes: u64) -> Result<Self, Error> {
        let name = format!("heal-{number}");
        let socket = product.volume(&name, Class::Cache, VOLUME_BYTES.max(bytes))?;
        let mut stream = UnixStream::connect(&socket)
            .map_err(Error::io(format!("connect to {}", socket.display())))?;
        nbd::negotiate(&mut stream)?;
        let mut filled = Self { name, number, stream };
        for offset in (0..bytes).step_by(CHUNK_BYTES as usize) {
            filled.ask(nbd::WRITE, offset, &filled.content(offset))?;
        }
        filled.ask(nbd::FLUSH, 0, &[])?;
        Ok(filled)
    }

    /// Returns the content; each word encodes its position and its volume.
    fn content(&self, offset: u64) -> Vec<u8> {
        let words = (offset..offset + CHUNK_BYTES).step_by(8);
        words.flat_map(|at| (self.number << 40 | at).to_le_bytes()).collect()
    }

    fn ask(&mut self, command: u16, offset: u64, data: &[u8]) -> Result<(), Error> {
        let length = if command == nbd::FLUSH { 0 } else { CHUNK_BYTES as u32 };
        let request = nbd::Request { command, handle: offset, offset, length };
        nbd::ask(&mut self.stream, &request, data)
    }

    fn check(&mut self, bytes: u64) -> Result<(), Error> {
        for offset in (0..bytes).step_by(CHUNK_BYTES as usize) {
            self.ask(nbd::READ, offset, &[])?;
            let mut data = vec![0; CHUNK_BYTES as usize];
            self.stream.read_exact(&mut data).map_err(Error::io("read"))?;
            if data != self.content(offset) {
                let name = &self.name;
                return Err(Error::Failed(format!("{name} at {offset} is not what was written")));
            }
        }
        Ok(())
    }
}

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<Fact>, Error> {
    let (volumes, bytes) = (options.heal.heal_volumes, options.heal.heal_mib << 20);
    eprintln!("measuring {NAME} with {volumes} volumes of {} MiB of data", options.heal.heal_mib);
    // Placement counts whole volumes; the files are sparse.
    let pool_mib = (volumes * (VOLUME_BYTES >> 20).max(options.heal.heal_mib)).max(1024);
    let (size, after) = (format!("{pool_mib}MiB"), format!("{}s", REPLACE_AFTER.as_secs()));
    let flags = ["--pools", POOLS, "--pool-size", &size, "--replace-after", &after];
    let product = Product::start_with(quoin, directory, &flags)?;
    let made = Instant::now();
    let filled = (0..volumes).map(|number| Filled::make(&product, number, bytes));
    let mut filled = filled.collect::<Result<Vec<_>, Error>>()?;
    let making = made.elapsed();
    let before = Before::of(&product)?;
    let _lost = product.take_away(LOST)?;
    let began = Instant::now();
    let timeout = TIMEOUT_EACH * u32::try_from(before.lost).unwrap_or(u32::MAX);
    while whole(&product)? < 3 * volumes as usize {
        if began.elapsed() > timeout {
            return Err(Error::Failed(format!(
                "{} of {} replicas are in sync {} s after a pool was lost",
                whole(&product)?,
                3 * volumes,
                timeout.as_secs()
            )));
        }
        std::thread::sleep(POLL);
    }
    let took = began.elapsed();
    let writes = record_writes(&product)? - before.writes;
    let cpu = usage::cpu(&product.pids()).saturating_sub(before.cpu);
    for volume in &mut filled {
        volume.check(bytes)?;
    }
    let peak = |role: &str| {
        let bytes = product.pids_of(role).into_iter().filter_map(usage::peak_bytes).max();
        bytes.unwrap_or_default() as f64 / f64::from(1 << 20)
    };
    let lost = before.lost as f64;
    let fact = |what: &str, value, unit, goal| {
        Fact::of(format!("{NAME}-{volumes}-volumes"), what, value, unit, goal)
    };
    Ok(vec![
        fact("made", making.as_secs_f64(), "s", volumes as f64),
        fact("replicas-lost", lost, "replicas", 3.0 * volumes as f64),
        // The delay of the policy is not counted.
        fact("time", took.saturating_sub(REPLACE_AFTER).as_secs_f64(), "s", 2.0 * lost),
        fact("cpu", cpu.as_secs_f64(), "s", lost),
        fact("record-writes", writes / lost, "a replica", 10.0),
        fact("memory-controller", peak("controller"), "MiB", 300.0),
        fact("memory-pool", peak("pool"), "MiB", 600.0),
        fact("memory-target", peak("target"), "MiB", 600.0),
    ])
}

/// Counts from before the loss, which are not part of the healing.
struct Before {
    lost: usize,
    writes: f64,
    cpu: Duration,
}

impl Before {
    fn of(product: &Product) -> Result<Self, Error> {
        let lost = product.all_replicas()?.iter().filter(|r| r.pool == LOST).count();
        if lost == 0 {
            return Err(Error::Failed(format!("{LOST} has no replicas: use more --heal-volumes")));
        }
        Ok(Self { lost, writes: record_writes(product)?, cpu: usage::cpu(&product.pids()) })
    }
}

/// Returns the number of replicas in sync, without those on the lost pool.
fn whole(product: &Product) -> Result<usize, Error> {
    let all = product.all_replicas()?;
    Ok(all.iter().filter(|r| r.pool != LOST && r.phase == "InSync").count())
}

/// Returns how often the controller has written a record since its start.
fn record_writes(product: &Product) -> Result<f64, Error> {
    let controllers = product.pids_of("controller");
    let writes = controllers.first().and_then(|pid| scrape(*pid, "quoin_record_writes_total"));
    writes.ok_or_else(|| Error::Failed("the controller does not tell its writes".into()))
}
