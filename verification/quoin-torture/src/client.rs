//! Clients that record their calls and answers, and the check of these histories.
//!
//! On a volume of one host each block has one writer at a time, since the NBD client sends a request
//! again when the target was restarted. On one that hosts share every client of every host writes
//! any block: a request that is sent again takes effect once. Any client reads. The histories of all
//! blocks must be linearizable, by the checker that the simulator uses.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use quoin_nbd::client::{Address, Client, ClientOptions};
use quoin_sim::content::{SECTORS, Tags, ZERO, make, tags_of_block};
use quoin_sim::linear::{Act, BlockOp, NEVER, Verdict, check, describe};
use quoin_types::BLOCK_SIZE;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub const BLOCKS: u64 = 512;
const WORKERS: u64 = 4;
/// Longest history; a longer one is checked and begun anew.
const HISTORY_MAX: usize = 4000;

struct Block {
    /// Content of the block at the instant `since`.
    initial: Tags,
    since: u64,
    ops: Vec<BlockOp>,
}

struct Shared {
    /// One of each host.
    clients: Vec<Client>,
    run: u64,
    clock: AtomicU64,
    tags: AtomicU32,
    stop: AtomicBool,
    blocks: Vec<Mutex<Block>>,
    /// Held by each writer of a block, alone where the volume has one client.
    writing: Vec<RwLock<()>>,
    slowest_us: AtomicU64,
    checked: AtomicU64,
    undecided: AtomicU64,
    wrong: Mutex<Option<String>>,
}

pub struct Clients {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// Totals of the work of clients.
#[derive(Debug, Default)]
pub struct Judgement {
    pub checked: u64,
    pub undecided: u64,
    pub longest_pause: Duration,
}

impl Clients {
    /// `sockets`: of the volume, one of each host that has it.
    pub fn start(sockets: &[std::path::PathBuf], seed: u64) -> Result<Self> {
        let connect = |socket: &std::path::PathBuf| {
            Client::connect(ClientOptions::new(Address::Unix(socket.clone())))
        };
        let clients: Vec<Client> = sockets.iter().map(connect).collect::<Result<_, _>>()?;
        let block = || Mutex::new(Block { initial: ZERO, since: 0, ops: Vec::new() });
        let shared = Arc::new(Shared {
            clients,
            run: seed,
            clock: AtomicU64::new(1),
            tags: AtomicU32::new(1),
            stop: AtomicBool::new(false),
            blocks: (0..BLOCKS).map(|_| block()).collect(),
            writing: (0..BLOCKS).map(|_| RwLock::new(())).collect(),
            slowest_us: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            undecided: AtomicU64::new(0),
            wrong: Mutex::new(None),
        });
        let workers = (0..WORKERS)
            .map(|worker| {
                let shared = shared.clone();
                std::thread::spawn(move || {
                    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ worker);
                    while !shared.stop.load(Ordering::SeqCst) {
                        if let Err(error) = step(&shared, worker, &mut rng) {
                            shared.report(format!("{error:#}"));
                            return;
                        }
                    }
                })
            })
            .collect();
        Ok(Self { shared, workers })
    }

    /// # Errors
    /// The first failure.
    pub fn check(&self) -> Result<()> {
        match &*lock(&self.shared.wrong) {
            Some(wrong) => bail!("{wrong}"),
            None => Ok(()),
        }
    }

    pub fn checked(&self) -> u64 {
        self.shared.checked.load(Ordering::SeqCst)
    }

    /// Waits until some requests that began after now are answered.
    pub fn flows(&self, budget: Duration) -> Result<()> {
        let (began, before) = (Instant::now(), self.shared.clock.load(Ordering::SeqCst));
        while self.shared.clock.load(Ordering::SeqCst) < before + 40 {
            self.check()?;
            if began.elapsed() > budget {
                bail!("IO makes no progress for {} s", budget.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Ends the clients, reads every block once more, and checks all histories.
    pub fn finish(mut self) -> Result<Judgement> {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                self.shared.report("a client panicked".into());
            }
        }
        self.check()?;
        for block in 0..BLOCKS {
            read(&self.shared, 0, block)?;
            judge(&self.shared, block, &lock(&self.shared.blocks[block as usize]))?;
        }
        Ok(Judgement {
            checked: self.checked(),
            undecided: self.shared.undecided.load(Ordering::SeqCst),
            longest_pause: Duration::from_micros(self.shared.slowest_us.load(Ordering::SeqCst)),
        })
    }
}

impl Shared {
    fn report(&self, wrong: String) {
        lock(&self.wrong).get_or_insert(wrong);
    }

    fn client(&self, worker: u64) -> &Client {
        &self.clients[worker as usize % self.clients.len()]
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn answered(&self, began: Instant) {
        let took = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.slowest_us.fetch_max(took, Ordering::SeqCst);
        self.checked.fetch_add(1, Ordering::SeqCst);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn step(shared: &Shared, worker: u64, rng: &mut ChaCha8Rng) -> Result<()> {
    // A hot tenth gets half of the requests, so that writes meet reads.
    let block =
        if rng.random() { rng.random_range(0..BLOCKS / 10) } else { rng.random_range(0..BLOCKS) };
    match rng.random_range(0..100) {
        0..2 => shared.client(worker).flush().context("flush"),
        2..55 => write(shared, worker, rng, block),
        _ => read(shared, worker, block).map(drop),
    }
}

fn write(shared: &Shared, worker: u64, rng: &mut ChaCha8Rng, block: u64) -> Result<()> {
    let writing = &shared.writing[block as usize];
    let (alone, beside) = match shared.clients.len() {
        1 => (writing.try_write().ok(), None),
        _ => (None, writing.try_read().ok()),
    };
    if alone.is_none() && beside.is_none() {
        return Ok(());
    }
    let first = rng.random_range(0..SECTORS as u64);
    let (first, sectors) = match rng.random_range(0..4) {
        0 => (first, rng.random_range(1..=SECTORS as u64 - first)),
        _ => (0, SECTORS as u64),
    };
    let tag = shared.tags.fetch_add(1, Ordering::SeqCst);
    let sector = block * SECTORS as u64 + first;
    let data = make(shared.run, tag, sector, sectors);
    let mask = (((1u16 << sectors) - 1) << first) as u8;
    let (invoked, began) = (shared.now(), Instant::now());
    let op = BlockOp { op: tag, invoked, answered: NEVER, act: Act::Write { mask, tag } };
    let at = {
        let mut block = lock(&shared.blocks[block as usize]);
        block.ops.push(op);
        block.ops.len() - 1
    };
    let fua = rng.random_range(0..20) == 0;
    shared.client(worker).write(sector * 512, data, fua).context("write")?;
    shared.answered(began);
    let answered = shared.now();
    let is_long = {
        let mut history = lock(&shared.blocks[block as usize]);
        history.ops[at].answered = answered;
        history.ops.len() > HISTORY_MAX
    };
    drop((alone, beside));
    // Without any writer what a read shows is the content of the block.
    if is_long && let Ok(_alone) = writing.try_write() {
        let content = read(shared, worker, block)?;
        let mut history = lock(&shared.blocks[block as usize]);
        judge(shared, block, &history)?;
        *history = Block { initial: content, since: shared.now(), ops: Vec::new() };
    }
    Ok(())
}

/// Returns what the block showed.
fn read(shared: &Shared, worker: u64, block: u64) -> Result<Tags> {
    let (invoked, began) = (shared.now(), Instant::now());
    let offset = block * BLOCK_SIZE as u64;
    let data = shared.client(worker).read(offset, BLOCK_SIZE as u32).context("read")?;
    shared.answered(began);
    let answered = shared.now();
    let tags = match tags_of_block(shared.run, block, &data) {
        Ok(tags) => tags,
        Err(wrong) => bail!("block {block}: {wrong:?}"),
    };
    let op = shared.tags.fetch_add(1, Ordering::SeqCst);
    let mut history = lock(&shared.blocks[block as usize]);
    // A call from before this history began may have seen earlier content.
    if invoked > history.since {
        history.ops.push(BlockOp { op, invoked, answered, act: Act::Read { mask: 0xff, tags } });
    }
    Ok(tags)
}

fn judge(shared: &Shared, number: u64, block: &Block) -> Result<()> {
    match check(block.initial, &block.ops) {
        Verdict::Linearizable => Ok(()),
        Verdict::Undecided => {
            shared.undecided.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
        Verdict::Violated { stuck } => {
            bail!("not linearizable: {}", describe(number, block.initial, &block.ops, stuck))
        }
    }
}
