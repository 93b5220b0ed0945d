//! Cost of clean-up of one volume with one view, by how full the pool is, how the load is skewed,
//! and how the victim is chosen.
//!
//! Only placement is modelled: three streams of segments, log segments that cannot be cleaned
//! before a checkpoint, leaves written at checkpoints, and space that is free only afterwards.

const SEGMENT_BLOCKS: u32 = 1024;
const LEAF_LBAS: u32 = 256;
/// A leaf of random single blocks takes 5 KiB.
const LEAF_QUARTER_BLOCKS: u64 = 5;
/// Entries a batch: one header block for so many data blocks.
const BATCH: u64 = 32;
const VOLUME_BLOCKS: u32 = 1 << 19;
const RESERVE_PERCENT: u32 = 7;

#[derive(Clone, Copy, PartialEq)]
enum Policy {
    /// The fewest live blocks.
    Emptiest,
    /// The fewest live blocks in steps of four percent, of those the oldest: what the store does.
    EmptiestOldest,
    /// Free space gained times age, by the cost of gaining it.
    CostBenefit,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Free,
    Open,
    /// Log above the checkpoint.
    Log,
    Closed,
    /// Emptied, free after the next checkpoint.
    PendingFree,
}

struct Pool {
    state: Vec<State>,
    live: Vec<u32>,
    age: Vec<u64>,
    contents: Vec<Vec<u32>>,
    place: Vec<u32>,
    open: [usize; 2],
    dirty_leaves: Vec<bool>,
    checkpoint_blocks: u64,
    since_checkpoint: u64,
    policy: Policy,
    streams: bool,
    clock: u64,
    data_written: u64,
    leaf_quarters: u64,
    random: u64,
}

impl Pool {
    fn new(fill_percent: u32, checkpoint_blocks: u64, policy: Policy, streams: bool) -> Self {
        let usable = u64::from(VOLUME_BLOCKS) * 100 / u64::from(fill_percent);
        let segments = (usable / u64::from(SEGMENT_BLOCKS)) as usize + 1;
        let mut pool = Pool {
            state: vec![State::Free; segments],
            live: vec![0; segments],
            age: vec![0; segments],
            contents: vec![Vec::new(); segments],
            place: vec![u32::MAX; VOLUME_BLOCKS as usize],
            open: [0, 1],
            dirty_leaves: vec![false; (VOLUME_BLOCKS / LEAF_LBAS) as usize],
            checkpoint_blocks,
            since_checkpoint: 0,
            policy,
            streams,
            clock: 0,
            data_written: 0,
            leaf_quarters: 0,
            random: 0x2545_f491_4f6c_dd1d,
        };
        pool.state[0] = State::Open;
        pool.state[1] = State::Open;
        pool
    }

    fn random(&mut self, below: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as u32 % below
    }

    fn free(&self) -> usize {
        self.state.iter().filter(|s| **s == State::Free).count()
    }

    fn put(&mut self, lba: u32, moved: bool) {
        let stream = usize::from(moved && self.streams);
        let mut segment = self.open[stream];
        if self.contents[segment].len() as u32 == SEGMENT_BLOCKS {
            self.state[segment] = if moved { State::Closed } else { State::Log };
            self.age[segment] = self.clock;
            segment = self.state.iter().position(|s| *s == State::Free).expect("a free segment");
            self.state[segment] = State::Open;
            self.open[stream] = segment;
        }
        let old = self.place[lba as usize];
        if old != u32::MAX {
            self.live[old as usize] -= 1;
        }
        self.place[lba as usize] = segment as u32;
        self.live[segment] += 1;
        self.contents[segment].push(lba);
        self.dirty_leaves[(lba / LEAF_LBAS) as usize] = true;
        self.data_written += 1;
        self.clock += 1;
    }

    fn write(&mut self, lba: u32) {
        self.put(lba, false);
        self.since_checkpoint += 1;
        if self.since_checkpoint >= self.checkpoint_blocks {
            self.checkpoint();
        }
        let reserve = self.state.len() * RESERVE_PERCENT as usize / 100;
        if self.contents[self.open[0]].len() as u32 == SEGMENT_BLOCKS {
            while self.free() <= reserve.max(3) {
                self.clean();
            }
        }
    }

    fn checkpoint(&mut self) {
        self.since_checkpoint = 0;
        let dirty = self.dirty_leaves.iter().filter(|d| **d).count() as u64;
        self.leaf_quarters += dirty * LEAF_QUARTER_BLOCKS;
        self.dirty_leaves.fill(false);
        for segment in 0..self.state.len() {
            match self.state[segment] {
                State::Log => self.state[segment] = State::Closed,
                State::PendingFree => self.state[segment] = State::Free,
                _ => {}
            }
        }
    }

    fn victim(&self) -> Option<usize> {
        let score = |s: usize| -> f64 {
            let used = f64::from(self.live[s]) / f64::from(SEGMENT_BLOCKS);
            let age = (self.clock - self.age[s]) as f64 + 1.0;
            match self.policy {
                Policy::Emptiest => -used,
                Policy::EmptiestOldest => -(used * 25.0).floor() + age / 1e12,
                Policy::CostBenefit => (1.0 - used) * age / (1.0 + used),
            }
        };
        (0..self.state.len())
            .filter(|s| self.state[*s] == State::Closed && self.live[*s] < SEGMENT_BLOCKS)
            .max_by(|a, b| score(*a).total_cmp(&score(*b)))
    }

    fn clean(&mut self) {
        let gained: u32 = (0..self.state.len())
            .filter(|s| self.state[*s] == State::PendingFree)
            .map(|_| SEGMENT_BLOCKS)
            .sum();
        let Some(victim) = self.victim().filter(|_| gained < 8 * SEGMENT_BLOCKS) else {
            return self.checkpoint();
        };
        let mut lbas = std::mem::take(&mut self.contents[victim]);
        lbas.retain(|lba| self.place[*lba as usize] == victim as u32);
        lbas.sort_unstable();
        lbas.dedup();
        self.state[victim] = State::PendingFree;
        for lba in lbas {
            self.put(lba, true);
        }
    }

    fn amplification(&mut self, skewed: bool) -> f64 {
        for lba in 0..VOLUME_BLOCKS {
            self.write(lba);
        }
        let rounds = 3 * u64::from(VOLUME_BLOCKS);
        for round in 0..2 * rounds {
            if round == rounds {
                (self.data_written, self.leaf_quarters) = (0, 0);
            }
            let hot = VOLUME_BLOCKS / 10;
            let lba = match skewed && self.random(10) != 0 {
                true => self.random(hot),
                false => self.random(VOLUME_BLOCKS),
            };
            self.write(lba);
        }
        let headers = self.data_written as f64 / BATCH as f64;
        let leaves = self.leaf_quarters as f64 / 4.0;
        (self.data_written as f64 + headers + leaves) / rounds as f64
    }
}

pub fn print() {
    println!(
        "| full | load | one stream, emptiest | emptiest | emptiest, then oldest | cost-benefit |"
    );
    println!("|---|---|---|---|---|---|");
    // The checkpoint is a sixteenth of the pool, as in the store.
    let checkpoint = u64::from(VOLUME_BLOCKS) / 16;
    let columns = [
        (Policy::Emptiest, false),
        (Policy::Emptiest, true),
        (Policy::EmptiestOldest, true),
        (Policy::CostBenefit, true),
    ];
    for fill in [70, 80, 85] {
        for skewed in [false, true] {
            let load = if skewed { "90/10 skew" } else { "uniform" };
            print!("| {fill} % | {load} ");
            for (policy, streams) in columns {
                let mut pool = Pool::new(fill, checkpoint, policy, streams);
                print!("| {:.2} ", pool.amplification(skewed));
            }
            println!("|");
        }
    }
}
