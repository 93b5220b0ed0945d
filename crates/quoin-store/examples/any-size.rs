//! How long a pool of very many units takes to open, and how much memory.
//!
//! `cargo run --release -p quoin-store --example any-size -- [FOLDER] [SEGMENTS]`: a sparse pool
//! of as many units as 100 TiB have, each of 64 KiB so that few bytes fill one. So many segments
//! of it are written, the file takes 64 KiB for each. Figures are printed, nothing is judged.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_store::{Due, FileDisk, FormatOptions, Pool, PoolOptions, ReplicaPool};
use quoin_types::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, ReplicaGuid};

/// Units of 4 MiB in 100 TiB.
const UNITS: u64 = 100 << 18;
const UNIT_BLOCKS: u32 = 16;
const GUID: ReplicaGuid = ReplicaGuid(1);
/// An entry and its header leave room for no second one in a unit.
const ENTRY_BLOCKS: u32 = 14;
const REPLICAS: u64 = 1000;

fn identity(guid: ReplicaGuid) -> ReplicaIdentity {
    ReplicaIdentity { guid, ..ReplicaIdentity::default() }
}

fn work(pool: &mut Pool<FileDisk>) {
    while pool.background_due() != Due::Idle {
        pool.background(8 << 20).expect("background work");
        while let Some(ticket) = pool.sync_wanted() {
            let result = (pool.syncer())();
            pool.sync_finished(ticket, result).expect("a sync");
        }
    }
}

fn write(pool: &mut Pool<FileDisk>, segments: u64) {
    let data = Bytes::from(vec![0x5a; ENTRY_BLOCKS as usize * BLOCK_SIZE]);
    let mut chain = Chain(0);
    for lsn in 1..=segments {
        let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
        let (lba, kind) = ((lsn - 1) * u64::from(ENTRY_BLOCKS), EntryKind::Write);
        let entry = Entry::after(chain, position, kind, lba, ENTRY_BLOCKS, data.clone(), false);
        chain = entry.chain;
        let mut replica = pool.replica(GUID).expect("the replica");
        replica.append(&[Arc::new(entry)]).expect("room");
        replica.set_stable(Lsn(lsn));
        if lsn % 1024 == 0 {
            work(pool);
        }
    }
    pool.settle().expect("recorded");
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let segments: u64 = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let path = folder.join(format!("quoin-any-size-{}", std::process::id()));
    let size = (UNITS + (1 << 15)) * u64::from(UNIT_BLOCKS) * BLOCK_SIZE as u64;
    let disk = FileDisk::create(&path, size, true).expect("a file for the benchmark");
    let format = FormatOptions { unit_blocks: UNIT_BLOCKS, ..FormatOptions::new(PoolId(1)) };
    Pool::format(&disk, &format).expect("a pool");
    let timed = |what: &str, start: Instant| {
        let took = start.elapsed().as_secs_f64() * 1e3;
        println!("{what}: {took:.0} ms, {} MiB of memory", resident_bytes() >> 20);
    };
    let start = Instant::now();
    let mut pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
    timed("open, empty", start);
    let start = Instant::now();
    for guid in 2..REPLICAS + 2 {
        let identity = identity(ReplicaGuid(guid.into()));
        pool.create(identity, ReplicaMeta::default(), 1 << 18).expect("room");
    }
    for guid in 2..REPLICAS + 2 {
        pool.delete(ReplicaGuid(guid.into())).expect("room");
    }
    timed("1,000 replicas made and deleted", start);
    pool.create(identity(GUID), ReplicaMeta::default(), 1 << 30).expect("room");
    let start = Instant::now();
    write(&mut pool, segments);
    timed(&format!("{segments} segments written"), start);
    drop(pool);
    let start = Instant::now();
    let disk = FileDisk::open(&path).expect("the file");
    let mut pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
    timed("open, with these segments", start);
    let start = Instant::now();
    pool.delete(GUID).expect("room");
    work(&mut pool);
    timed("deleted", start);
    drop(pool);
    std::fs::remove_file(&path).expect("the benchmark's own file");
}

/// Memory of this process that is in use.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let resident = pages.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    resident.unwrap_or(0) * 4096
}
