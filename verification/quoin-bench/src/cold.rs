//! Random reads of data that no cache holds, beside the bare device: as many direct reads at a time
//! of a pool's own file, with nothing of Quoin between. And what such reads do to another
//! volume's writes, whose floor is the same writes alone.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use crate::cases::CaseResult;
use crate::compare::{Comparison, Figures, Side, figures};
use crate::further::free_bytes;
use crate::load::{Generator, Load, Outcome, Pattern, next};
use crate::product::Product;
use crate::{Class, Error, Options, usage};

pub const READ: &str = "cold-read-4k-qd32";
pub const BESIDE: &str = "write-4k-qd1-beside-cold-reads";

/// Data that are read: of far more than one measurement reads, so that each of its reads is cold.
const VOLUME_BYTES: u64 = 4 << 30;
const OTHER_BYTES: u64 = 256 << 20;
/// Space that the three pools need.
const ROOM_BYTES: u64 = (3 * 7) << 30;
const DEPTH: usize = 32;
const BLOCK: usize = 4096;
const POOLS: [&str; 3] = ["pool-a", "pool-b", "pool-c"];

pub fn run(options: &Options, quoin: &Path, directory: &Path) -> Result<Vec<CaseResult>, Error> {
    if !options.wants(READ) && !options.wants(BESIDE) {
        return Ok(Vec::new());
    }
    let room = free_bytes(directory)?;
    if room < ROOM_BYTES {
        eprintln!(
            "leaving out {READ}: {} has {} GiB free and {} are needed; use --dir",
            directory.display(),
            room >> 30,
            ROOM_BYTES >> 30
        );
        return Ok(Vec::new());
    }
    let product = Product::start_with(quoin, directory, &["--pool-size", "7GiB"])?;
    let socket = product.volume("cold", Class::Cache, VOLUME_BYTES)?;
    let other = product.volume("other", Class::Cache, OTHER_BYTES)?;
    let mut reader = Generator::connect(&socket)?;
    reader.fill(1 << 20)?;
    let mut writer = Generator::connect(&other)?;
    writer.fill(1 << 20)?;
    let cold = Cold { product: &product, time: options.time(), pairs: options.measure.pairs };
    let mut results = Vec::new();
    if options.wants(READ) {
        eprintln!("measuring {READ}");
        results.push(cold.reads(&mut reader)?);
    }
    if options.wants(BESIDE) {
        eprintln!("measuring {BESIDE}");
        results.push(cold.writes_beside(&mut reader, &mut writer)?);
    }
    Ok(results)
}

struct Cold<'a> {
    product: &'a Product,
    time: Duration,
    pairs: usize,
}

impl Cold<'_> {
    fn reads(&self, reader: &mut Generator) -> Result<CaseResult, Error> {
        let load = load(0, DEPTH, self.time);
        let (mut floors, mut quoins) = (Vec::new(), Vec::new());
        for pair in 0..self.pairs as u64 {
            self.drop_cached()?;
            floors.push(self.bare(pair)?);
            let mut side = Side { generator: reader, pids: self.product.pids() };
            quoins.push(figures(&mut side, |generator| generator.run(load))?);
        }
        Ok(CaseResult { name: READ, comparison: Comparison::of(&floors, &quoins) })
    }

    fn writes_beside(
        &self,
        reader: &mut Generator,
        writer: &mut Generator,
    ) -> Result<CaseResult, Error> {
        let load_of_writes = load(100, 1, self.time);
        // They begin before the writes and end after them.
        let load_of_reads = load(0, DEPTH, self.time + self.time / 4);
        let (mut alone, mut beside) = (Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            self.drop_cached()?;
            let mut side = Side { generator: writer, pids: self.product.pids() };
            alone.push(figures(&mut side, |generator| generator.run(load_of_writes))?);
            let (written, read) = std::thread::scope(|scope| {
                let reads = scope.spawn(|| reader.run(load_of_reads));
                std::thread::sleep(self.time / 8);
                let written = figures(&mut side, |generator| generator.run(load_of_writes));
                (written, reads.join())
            });
            read.map_err(|_| Error::Failed("the reader panicked".into()))??;
            beside.push(written?);
        }
        Ok(CaseResult { name: BESIDE, comparison: Comparison::of(&alone, &beside) })
    }

    /// Has the next reads wait for the disk.
    fn drop_cached(&self) -> Result<(), Error> {
        POOLS.iter().try_for_each(|pool| self.product.drop_cached(pool))
    }

    /// Reads of the bare device: the file of one pool, [`DEPTH`] at a time, past the page cache.
    fn bare(&self, seed: u64) -> Result<Figures, Error> {
        let path = self.product.pool_file(POOLS[0]);
        let stop = AtomicBool::new(false);
        let (stop, own) = (&stop, [std::process::id()]);
        let before = usage::cpu(&own);
        let parts = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..DEPTH as u64)
                .map(|thread| {
                    let path = path.clone();
                    scope.spawn(move || read_bare(&path, seed * 64 + thread + 1, stop))
                })
                .collect();
            std::thread::sleep(self.time);
            stop.store(true, Ordering::Relaxed);
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
        });
        let used = usage::cpu(&own).saturating_sub(before);
        let parts = parts
            .into_iter()
            .map(|part| part.map_err(|_| Error::Failed("a reader panicked".into()))?)
            .collect::<Result<Vec<_>, Error>>()?;
        Figures::of(&Outcome::merge_beside(parts), &[("readers".to_owned(), used)].into())
    }
}

fn load(writes_percent: u64, depth: usize, time: Duration) -> Load {
    Load { writes_percent, pattern: Pattern::Random, block_bytes: BLOCK as u32, depth, time }
}

/// Reads random blocks of the file's first bytes, as many as the volume has, until it is told to stop.
fn read_bare(path: &PathBuf, seed: u64, stop: &AtomicBool) -> Result<Outcome, Error> {
    let failed = || Error::io(format!("read {}", path.display()));
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        .map(File::from)
        .map_err(|error| failed()(error.into()))?;
    let mut memory = vec![0; 2 * BLOCK];
    let address = memory.as_ptr().addr();
    let start = address.next_multiple_of(BLOCK) - address;
    let buffer = &mut memory[start..start + BLOCK];
    let (mut random, mut latencies_ns) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), Vec::new());
    let began = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let offset = next(&mut random) % (VOLUME_BYTES / BLOCK as u64) * BLOCK as u64;
        let asked = Instant::now();
        rustix::io::pread(&file, &mut *buffer, offset).map_err(|error| failed()(error.into()))?;
        latencies_ns.push(u32::try_from(asked.elapsed().as_nanos()).unwrap_or(u32::MAX));
    }
    Ok(Outcome::of(began.elapsed(), latencies_ns))
}
