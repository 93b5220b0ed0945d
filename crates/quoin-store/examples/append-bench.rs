//! Appends and reads per second of one pool on a real file, and how long a cold open takes.
//!
//! `cargo run --release -p quoin-store --example append-bench -- [FOLDER] [GIB]`: figures are
//! printed, nothing is judged: compare runs on one quiet machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_store::{FileDisk, FormatOptions, Pool, PoolOptions, ReplicaPool};
use quoin_types::entry::SharedEntry;
use quoin_types::message::ReadView;
use quoin_types::{Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, ReplicaGuid};

const GUID: ReplicaGuid = ReplicaGuid(1);
const VOLUME_BLOCKS: u64 = 1 << 18;

struct Bench {
    pool: Pool<FileDisk>,
    chain: Chain,
    lsn: u64,
    random: u64,
    data: Bytes,
}

impl Bench {
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn entry(&mut self, lba: u64, blocks: u32) -> SharedEntry {
        self.lsn += 1;
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn) };
        let data = self.data.slice(..blocks as usize * 4096);
        let entry = Entry::after(self.chain, position, EntryKind::Write, lba, blocks, data, false);
        self.chain = entry.chain;
        Arc::new(entry)
    }

    fn appends(&mut self, batch: usize, time: Duration) {
        // Entries are made before the clock runs: checksums are the target's work.
        let (mut count, mut spent) = (0u64, Duration::ZERO);
        let mut slowest = Duration::ZERO;
        let before = cpu();
        let mut made_cpu = Duration::ZERO;
        while spent < time {
            let made = cpu();
            let entries: Vec<SharedEntry> = (0..batch)
                .map(|_| {
                    let lba = self.next_random() % VOLUME_BLOCKS;
                    self.entry(lba, 1)
                })
                .collect();
            made_cpu += cpu() - made;
            let start = Instant::now();
            let mut replica = self.pool.replica(GUID).expect("the replica");
            replica.append(&entries).expect("an append");
            let took = start.elapsed();
            spent += took;
            slowest = slowest.max(took);
            count += batch as u64;
            if count.is_multiple_of(4096) {
                self.housekeeping();
            }
        }
        let cpu = (cpu() - before - made_cpu).as_secs_f64() * 1e6 / count as f64;
        println!(
            "append batch {batch:2}: {:9.0} writes/s, {cpu:6.2} us CPU a write with housekeeping, slowest {:.1} ms",
            count as f64 / spent.as_secs_f64(),
            slowest.as_secs_f64() * 1e3
        );
    }

    fn housekeeping(&mut self) {
        self.pool.replica(GUID).expect("the replica").set_stable(Lsn(self.lsn));
        self.pool.background(8 << 20).expect("background work");
        while let Some(ticket) = self.pool.sync_wanted() {
            let result = (self.pool.syncer())();
            self.pool.sync_finished(ticket, result).expect("a sync");
        }
    }

    fn reads(&mut self, time: Duration) {
        let (start, mut count, before) = (Instant::now(), 0u64, cpu());
        let mut slots = Vec::new();
        while start.elapsed() < time {
            for _ in 0..64 {
                let lba = self.next_random() % VOLUME_BLOCKS;
                slots.clear();
                let mut replica = self.pool.replica(GUID).expect("the replica");
                replica.read(ReadView::Live, lba, 1, true, &mut slots).expect("a read");
                count += 1;
            }
        }
        let cpu = (cpu() - before).as_secs_f64() * 1e6 / count as f64;
        let rate = count as f64 / start.elapsed().as_secs_f64();
        println!("read 4 KiB random:   {rate:9.0} reads/s, {cpu:6.2} us CPU a read");
    }
}

/// CPU time of this process.
fn cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let gib: u64 = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let path = folder.join(format!("quoin-append-bench-{}", std::process::id()));
    let size = (8 + gib * 3 / 2) << 30;
    let disk = FileDisk::create(&path, size, true).expect("a file for the benchmark");
    Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a pool");
    let mut pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
    let identity = ReplicaIdentity { guid: GUID, ..ReplicaIdentity::default() };
    let blocks = VOLUME_BLOCKS.max(gib << 18);
    pool.create(identity, ReplicaMeta::default(), blocks).expect("room");
    let data = Bytes::from(vec![0x5a; 1 << 20]);
    let mut bench = Bench { pool, chain: Chain(0), lsn: 0, random: 88172645463325252, data };
    for batch in [1, 8, 32] {
        bench.appends(batch, Duration::from_secs(2));
    }
    bench.reads(Duration::from_secs(2));
    let start = Instant::now();
    for lba in (0..gib << 18).step_by(256) {
        let entry = bench.entry(lba, 256);
        bench.pool.replica(GUID).expect("the replica").append(&[entry]).expect("an append");
        if lba.is_multiple_of(256 * 64) {
            bench.housekeeping();
        }
    }
    if gib > 0 {
        let rate = (gib << 10) as f64 / start.elapsed().as_secs_f64();
        println!("write 1 MiB in turn: {rate:9.0} MiB/s");
    }
    bench.housekeeping();
    let unfolded = bench.pool.stats().log_bytes >> 20;
    drop(bench);
    drop_caches(&path);
    let start = Instant::now();
    let disk = FileDisk::open(&path).expect("the file");
    let pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
    println!(
        "cold open: {:.0} ms with {unfolded} MiB of log to replay",
        start.elapsed().as_secs_f64() * 1e3
    );
    drop(pool);
    std::fs::remove_file(&path).expect("the benchmark's own file");
}

/// Makes the file's pages leave the cache, so that the open reads the media.
fn drop_caches(path: &std::path::Path) {
    let file = std::fs::File::open(path).expect("the file");
    file.sync_all().expect("a sync");
    let advice = rustix::fs::Advice::DontNeed;
    rustix::fs::fadvise(&file, 0, None, advice).expect("advice");
}
