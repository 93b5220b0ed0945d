//! CPU time and allocations of the store for each 4 KiB write, without a real disk.
//!
//! `cargo run --release -p quoin-store --example map-bench -- [WRITES]`: random blocks in batches
//! of 32 go to a volume, and background work is done as it falls due. The disk keeps nothing of
//! the data but a mark, so its own time is small, and that time is measured and left out. Figures
//! are printed, nothing is judged: compare runs of one machine.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use quoin_replication::replica::store::{
    BootCookie, IoFault, ReplicaIdentity, ReplicaMeta, ReplicaStore,
};
use quoin_store::disk::Syncer;
use quoin_store::{Disk, Due, FormatOptions, Pool, PoolOptions, ReplicaPool};
use quoin_types::entry::SharedEntry;
use quoin_types::message::ReadView;
use quoin_types::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, ReplicaGuid};

const GUID: ReplicaGuid = ReplicaGuid(1);
const BATCH: usize = 32;
/// Batches between two syncs.
const BATCHES_A_SYNC: usize = 16;
const POOL_BYTES: u64 = 64 << 30;

/// Counts calls that take memory from the system's allocator.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes on to the system's allocator as it is; only a number is counted beside
// it. No other way shows how often a piece of code allocates.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promises are those of the allocator that is asked.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

type Block = [u8; BLOCK_SIZE];

/// What a block of the disk holds: zeros, the data that every write has, or another block.
const ZEROS: u32 = 0;
const DATA: u32 = 1;
const FIRST_OTHER: u32 = 2;

struct Blocks {
    held: Vec<u32>,
    others: Vec<Block>,
    free: Vec<u32>,
}

impl Blocks {
    fn release(&mut self, number: usize) {
        if self.held[number] >= FIRST_OTHER {
            self.free.push(self.held[number]);
        }
        self.held[number] = ZEROS;
    }
}

/// A disk in memory that knows the one block of data by its address.
struct MarkDisk {
    blocks: RefCell<Blocks>,
    data: Bytes,
    spent: Cell<Duration>,
    reads: Cell<u64>,
}

impl MarkDisk {
    fn new(bytes: u64, data: Bytes) -> Self {
        let held = vec![ZEROS; (bytes / BLOCK_SIZE as u64) as usize];
        let blocks = Blocks { held, others: Vec::new(), free: Vec::new() };
        MarkDisk {
            blocks: RefCell::new(blocks),
            data,
            spent: Cell::default(),
            reads: Cell::default(),
        }
    }

    fn timed<T>(&self, work: impl FnOnce(&mut Blocks) -> T) -> T {
        let (start, before) = (cpu(), ALLOCATIONS.load(Relaxed));
        let done = work(&mut self.blocks.borrow_mut());
        ALLOCATIONS.store(before, Relaxed);
        self.spent.set(self.spent.get() + cpu() - start);
        done
    }
}

impl Disk for MarkDisk {
    fn size(&self) -> u64 {
        POOL_BYTES
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.reads.set(self.reads.get() + 1);
        self.timed(|blocks| {
            let first = (offset / BLOCK_SIZE as u64) as usize;
            for (number, chunk) in (first..).zip(buffer.chunks_mut(BLOCK_SIZE)) {
                match blocks.held[number] {
                    ZEROS => chunk.fill(0),
                    DATA => chunk.copy_from_slice(&self.data),
                    other => chunk.copy_from_slice(&blocks.others[(other - FIRST_OTHER) as usize]),
                }
            }
        });
        Ok(())
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
        self.timed(|blocks| {
            let mut number = (offset / BLOCK_SIZE as u64) as usize;
            for part in parts {
                let is_data = part.as_ptr() == self.data.as_ptr();
                for chunk in part.chunks(BLOCK_SIZE) {
                    blocks.release(number);
                    // Moved blocks are copies of the data.
                    blocks.held[number] = if is_data || *chunk == *self.data {
                        DATA
                    } else {
                        let at = blocks.free.pop().unwrap_or_else(|| {
                            blocks.others.push([0; BLOCK_SIZE]);
                            blocks.others.len() as u32 - 1 + FIRST_OTHER
                        });
                        blocks.others[(at - FIRST_OTHER) as usize].copy_from_slice(chunk);
                        at
                    };
                    number += 1;
                }
            }
        });
        Ok(())
    }

    fn sync(&self) -> Result<(), IoFault> {
        Ok(())
    }

    fn syncer(&self) -> Syncer {
        Box::new(|| Ok(()))
    }

    fn write_out(&self, _offset: u64, _length: u64) {}

    fn discard(&self, offset: u64, length: u64) {
        self.timed(|blocks| {
            let first = (offset / BLOCK_SIZE as u64) as usize;
            (first..first + length as usize / BLOCK_SIZE).for_each(|number| blocks.release(number));
        });
    }

    fn cookie(&self) -> BootCookie {
        BootCookie::default()
    }
}

/// CPU time of this thread.
fn cpu() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// A part of the work: its CPU time without the disk's, and its allocations.
#[derive(Clone, Copy, Default)]
struct Cost {
    spent: Duration,
    allocations: u64,
}

impl Cost {
    fn line(&self, what: &str, count: u64) {
        println!(
            "  {what:32} {:7.0} ns, {:6.3} allocations",
            self.spent.as_secs_f64() * 1e9 / count as f64,
            self.allocations as f64 / count as f64
        );
    }
}

struct Bench {
    pool: Pool<MarkDisk>,
    chain: Chain,
    lsn: u64,
    random: u64,
    data: Bytes,
    blocks: u64,
}

impl Bench {
    fn new(blocks: u64) -> Self {
        let data = Bytes::from(vec![0x5a; BLOCK_SIZE]);
        let disk = MarkDisk::new(POOL_BYTES, data.clone());
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a pool");
        let mut pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
        let identity = ReplicaIdentity { guid: GUID, ..ReplicaIdentity::default() };
        pool.create(identity, ReplicaMeta::default(), blocks).expect("room");
        Bench { pool, chain: Chain(0), lsn: 0, random: 88172645463325252, data, blocks }
    }

    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn measured<T>(&mut self, cost: &mut Cost, work: impl FnOnce(&mut Self) -> T) -> T {
        let disk = self.pool.disk().spent.get();
        let (start, before) = (cpu(), ALLOCATIONS.load(Relaxed));
        let done = work(self);
        cost.allocations += ALLOCATIONS.load(Relaxed) - before;
        let disk = self.pool.disk().spent.get() - disk;
        cost.spent += (cpu() - start).saturating_sub(disk);
        done
    }

    fn entries(&mut self, out: &mut Vec<SharedEntry>) {
        out.clear();
        for _ in 0..BATCH {
            let lba = self.next_random() % self.blocks;
            self.lsn += 1;
            let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn) };
            let data = self.data.clone();
            let entry = Entry::after(self.chain, position, EntryKind::Write, lba, 1, data, false);
            self.chain = entry.chain;
            out.push(Arc::new(entry));
        }
    }

    /// Appends so many blocks, and does what falls due meanwhile.
    fn writes(&mut self, count: u64) -> [Cost; 4] {
        let mut costs = [Cost::default(); 4];
        let [append, look, background, sync] = &mut costs;
        let mut entries = Vec::new();
        for batch in 0..count as usize / BATCH {
            self.entries(&mut entries);
            self.measured(append, |bench| {
                let mut replica = bench.pool.replica(GUID).expect("the replica");
                replica.append(&entries).expect("an append");
                replica.set_stable(Lsn(bench.lsn));
            });
            if self.measured(look, |bench| bench.pool.background_due()) > Due::Idle {
                self.measured(background, |bench| bench.pool.background(1).expect("room"));
            }
            if batch.is_multiple_of(BATCHES_A_SYNC) {
                self.measured(sync, |bench| {
                    bench.pool.request_sync();
                    let ticket = bench.pool.sync_wanted().expect("none is under way");
                    bench.pool.sync_finished(ticket, Ok(())).expect("a sync");
                });
            }
        }
        costs
    }

    fn reads(&mut self, count: u64) -> Cost {
        let (mut cost, mut slots) = (Cost::default(), Vec::new());
        self.measured(&mut cost, |bench| {
            for _ in 0..count {
                let lba = bench.next_random() % bench.blocks;
                slots.clear();
                let mut replica = bench.pool.replica(GUID).expect("the replica");
                replica.read(ReadView::Live, lba, 1, false, &mut slots).expect("a read");
            }
        });
        cost
    }
}

fn main() {
    let count = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1 << 20);
    for gib in [1u64, 64] {
        let mut bench = Bench::new(gib << 18);
        // Until then nothing was folded, and the cache is empty.
        bench.writes(count / 4);
        println!("a volume of {gib} GiB, {count} writes of 4 KiB, of each:");
        let reads = bench.pool.disk().reads.get();
        let costs = bench.writes(count);
        let reads = (bench.pool.disk().reads.get() - reads) as f64 / count as f64;
        let names = ["append", "look for background work", "background work", "sync"];
        for (cost, name) in costs.iter().zip(names) {
            cost.line(name, count);
        }
        let all = Cost {
            spent: costs.iter().map(|cost| cost.spent).sum(),
            allocations: costs.iter().map(|cost| cost.allocations).sum(),
        };
        all.line("in all", count);
        println!("  {:32} {reads:7.2}", "reads of the disk");
        bench.reads(count / 4).line("a read without its data", count / 4);
    }
}
