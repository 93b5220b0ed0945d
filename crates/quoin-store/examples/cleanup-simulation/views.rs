//! Cost of clean-up where many views share the blocks: rotating snapshots of one volume, or
//! clones of one image.
//!
//! Two ways to name a block are compared. With **addresses in leaves** every leaf copy that names
//! a block is written again when the block moves, and the path above it in every view. With
//! **logical segments** a leaf names (segment, block) for ever; a table of the pool says where the
//! blocks of each logical segment lie now (destination and a bitmap of those that were moved), so
//! that a move writes a table entry. A logical segment of which little is left costs an entry for
//! few blocks: below a limit the blocks get new names, which changes their leaves.

use std::collections::{BTreeMap, BTreeSet};

const SEGMENT_BLOCKS: usize = 1024;
const LEAF_BLOCKS: u32 = 256;
/// Leaves of one node above them.
const FANOUT: u32 = 128;
/// A leaf of random single blocks takes 5 KiB.
const LEAF_BYTES: u64 = 5 * 1024;
const NODE_BYTES: u64 = 128 * 29;
/// Destination, sequence and a bitmap of 1,024 blocks.
const ENTRY_BYTES: u64 = 160;
const RESERVE_PERCENT: usize = 7;
/// Entries a batch: one header block for so many data blocks.
const BATCH: f64 = 32.0;

/// How a leaf names a block.
#[derive(Clone, Copy)]
pub enum Naming {
    Address,
    /// Blocks of a logical segment with fewer live ones than this get new names when they move.
    Logical {
        renamed_below: usize,
    },
}

/// Who shares the blocks.
#[derive(Clone, Copy)]
pub enum Sharing {
    /// The newest so many snapshots are kept; `changed_permille` of the volume is written between
    /// two of them.
    Snapshots { kept: u32, changed_permille: u32 },
    /// So many clones of one image, each of which overwrites `changed_permille` of its own.
    Clones { count: u32, changed_permille: u32 },
}

/// One version of one block. Views are numbered: snapshots in the order of their making (the live
/// view has the next number), clones from 1 with the image as 0.
#[derive(Clone, Copy)]
struct Block {
    lba: u32,
    /// First and last view that show it. The views of an image's block are all clones but those
    /// that overwrote it.
    first: u32,
    last: u32,
    segment: u32,
    logical: u32,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Free,
    Open,
    /// Written since the last checkpoint.
    Log,
    Closed,
    /// Emptied, free after the next checkpoint.
    PendingFree,
}

#[derive(Default)]
pub struct Written {
    pub clients: u64,
    pub moved: u64,
    pub map_bytes: u64,
    pub table_bytes: u64,
    /// Live logical segments at the end, for each segment of the pool.
    pub entries_per_segment: f64,
    pub full_percent: f64,
}

impl Written {
    /// Blocks written for each block that a client overwrote.
    pub fn amplification(&self) -> f64 {
        let data = (self.clients + self.moved) as f64;
        let bytes = (self.map_bytes + self.table_bytes) as f64;
        (data * (1.0 + 1.0 / BATCH) + bytes / 4096.0) / self.clients as f64
    }
}

const LIVE: u32 = u32::MAX;

pub struct Pool {
    naming: Naming,
    sharing: Sharing,
    volume_blocks: u32,
    state: Vec<State>,
    live: Vec<u32>,
    age: Vec<u64>,
    /// Ids of blocks in each segment, dead ones included.
    contents: Vec<Vec<u32>>,
    open: [usize; 2],
    blocks: Vec<Block>,
    free_ids: Vec<u32>,
    /// The block that shows at each LBA: of the live view, or of (clone, LBA).
    current: Vec<u32>,
    own: BTreeMap<(u32, u32), u32>,
    /// Blocks by the last view that shows them: they die with it.
    deaths: BTreeMap<u32, Vec<u32>>,
    /// Views in which each leaf, and each node above, differs from the view before.
    leaf_changes: Vec<BTreeSet<u32>>,
    node_changes: Vec<BTreeSet<u32>>,
    view: u32,
    oldest: u32,
    /// Leaves (and view) that the next checkpoint writes.
    dirty: BTreeSet<(u32, u32)>,
    logical_live: Vec<u32>,
    free_logicals: Vec<u32>,
    logical_of_open: u32,
    logical_of_moved: u32,
    /// Table entries that the next checkpoint writes.
    dirty_entries: BTreeSet<u32>,
    since_checkpoint: u64,
    clock: u64,
    written: Written,
    random: u64,
}

impl Pool {
    pub fn new(volume_blocks: u32, fill_percent: u32, sharing: Sharing, naming: Naming) -> Self {
        let shared = match sharing {
            // A block that is overwritten twice between two snapshots takes room once.
            Sharing::Snapshots { kept, changed_permille } => {
                let once = 1.0 - (-f64::from(changed_permille) / 1000.0).exp();
                1.0 + f64::from(kept) * once
            }
            Sharing::Clones { count, changed_permille } => {
                1.0 + f64::from(count) * f64::from(changed_permille) / 1000.0
            }
        };
        let live = f64::from(volume_blocks) * shared;
        let segments =
            (live * 100.0 / f64::from(fill_percent) / SEGMENT_BLOCKS as f64) as usize + 1;
        let leaves = volume_blocks.div_ceil(LEAF_BLOCKS);
        let mut pool = Pool {
            naming,
            sharing,
            volume_blocks,
            state: vec![State::Free; segments],
            live: vec![0; segments],
            age: vec![0; segments],
            contents: vec![Vec::new(); segments],
            open: [0, 1],
            blocks: Vec::new(),
            free_ids: Vec::new(),
            current: vec![u32::MAX; volume_blocks as usize],
            own: BTreeMap::new(),
            deaths: BTreeMap::new(),
            leaf_changes: vec![BTreeSet::new(); leaves as usize],
            node_changes: vec![BTreeSet::new(); leaves.div_ceil(FANOUT) as usize],
            view: 0,
            oldest: 0,
            dirty: BTreeSet::new(),
            logical_live: Vec::new(),
            free_logicals: Vec::new(),
            logical_of_open: 0,
            logical_of_moved: 0,
            dirty_entries: BTreeSet::new(),
            since_checkpoint: 0,
            clock: 0,
            written: Written::default(),
            random: 0x2545_f491_4f6c_dd1d,
        };
        pool.state[0] = State::Open;
        pool.state[1] = State::Open;
        pool.logical_of_open = pool.new_logical();
        pool.logical_of_moved = pool.new_logical();
        pool
    }

    fn random(&mut self, below: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as u32 % below
    }

    fn new_logical(&mut self) -> u32 {
        self.free_logicals.pop().unwrap_or_else(|| {
            self.logical_live.push(0);
            self.logical_live.len() as u32 - 1
        })
    }

    fn free(&self) -> usize {
        self.state.iter().filter(|s| **s == State::Free).count()
    }

    /// Puts a block at the end of a stream; `renamed`: under a new name.
    fn put(&mut self, id: u32, moved: bool, renamed: bool) {
        let stream = usize::from(moved);
        let mut segment = self.open[stream];
        if self.contents[segment].len() == SEGMENT_BLOCKS {
            self.state[segment] = if moved { State::Closed } else { State::Log };
            self.age[segment] = self.clock;
            segment = self.state.iter().position(|s| *s == State::Free).expect("a free segment");
            self.state[segment] = State::Open;
            self.contents[segment].clear();
            self.open[stream] = segment;
            match moved {
                true => self.logical_of_moved = self.new_logical(),
                false => self.logical_of_open = self.new_logical(),
            }
        }
        if renamed {
            let logical = if moved { self.logical_of_moved } else { self.logical_of_open };
            self.blocks[id as usize].logical = logical;
            self.logical_live[logical as usize] += 1;
        }
        self.blocks[id as usize].segment = segment as u32;
        self.live[segment] += 1;
        self.contents[segment].push(id);
        self.clock += 1;
    }

    fn drop_block(&mut self, id: u32) {
        let block = self.blocks[id as usize];
        self.live[block.segment as usize] -= 1;
        self.drop_name(block.logical);
        self.blocks[id as usize].segment = u32::MAX;
    }

    fn drop_name(&mut self, logical: u32) {
        self.logical_live[logical as usize] -= 1;
        let is_open = logical == self.logical_of_open || logical == self.logical_of_moved;
        if self.logical_live[logical as usize] == 0 && !is_open {
            self.dirty_entries.insert(logical);
            self.free_logicals.push(logical);
        }
    }

    fn new_block(&mut self, lba: u32, first: u32, last: u32) -> u32 {
        let block = Block { lba, first, last, segment: u32::MAX, logical: 0 };
        // The id of a dead block is free once its segment was emptied.
        match self.free_ids.pop() {
            Some(id) => {
                self.blocks[id as usize] = block;
                id
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() as u32 - 1
            }
        }
    }

    /// A client of `view` overwrites a block.
    fn write(&mut self, view: u32, lba: u32) {
        self.make_room();
        let clones = matches!(self.sharing, Sharing::Clones { .. });
        let id = match clones && view > 0 {
            true => {
                let id = self.new_block(lba, view, view);
                if let Some(old) = self.own.insert((view, lba), id) {
                    self.drop_block(old);
                }
                id
            }
            false => {
                let id = self.new_block(lba, view, LIVE);
                let old = std::mem::replace(&mut self.current[lba as usize], id);
                if old != u32::MAX {
                    self.supersede(old, view);
                }
                id
            }
        };
        self.put(id, false, true);
        let leaf = lba / LEAF_BLOCKS;
        self.leaf_changes[leaf as usize].insert(view);
        self.node_changes[(leaf / FANOUT) as usize].insert(view);
        self.dirty.insert((leaf, view));
        self.written.clients += 1;
        self.since_checkpoint += 1;
        // A sixteenth of the pool, as in the store.
        if self.since_checkpoint >= (self.state.len() * SEGMENT_BLOCKS / 16) as u64 {
            self.checkpoint();
        }
    }

    fn supersede(&mut self, old: u32, view: u32) {
        let first = self.blocks[old as usize].first;
        if first.max(self.oldest) >= view {
            return self.drop_block(old);
        }
        self.blocks[old as usize].last = view - 1;
        self.deaths.entry(view - 1).or_default().push(old);
    }

    fn snapshot(&mut self, kept: u32) {
        self.view += 1;
        while self.view - self.oldest > kept {
            for id in self.deaths.remove(&self.oldest).unwrap_or_default() {
                self.drop_block(id);
            }
            self.oldest += 1;
        }
        let oldest = self.oldest;
        if oldest > 0 && oldest.is_multiple_of(16) {
            let changes = self.leaf_changes.iter_mut().chain(&mut self.node_changes);
            changes.for_each(|set| *set = set.split_off(&oldest));
        }
    }

    fn checkpoint(&mut self) {
        self.since_checkpoint = 0;
        let mut nodes = BTreeSet::new();
        for (leaf, view) in &self.dirty {
            nodes.insert((leaf / FANOUT, *view));
        }
        self.written.map_bytes += self.dirty.len() as u64 * LEAF_BYTES;
        self.written.map_bytes += nodes.len() as u64 * NODE_BYTES;
        if matches!(self.naming, Naming::Logical { .. }) {
            self.written.table_bytes += self.dirty_entries.len() as u64 * ENTRY_BYTES;
        }
        self.dirty.clear();
        self.dirty_entries.clear();
        for segment in 0..self.state.len() {
            match self.state[segment] {
                State::Log => self.state[segment] = State::Closed,
                State::PendingFree => self.state[segment] = State::Free,
                _ => {}
            }
        }
    }

    fn make_room(&mut self) {
        if self.contents[self.open[0]].len() < SEGMENT_BLOCKS {
            return;
        }
        let reserve = (self.state.len() * RESERVE_PERCENT / 100).max(3);
        while self.free() <= reserve {
            self.clean();
        }
    }

    fn victim(&self) -> Option<usize> {
        let score = |s: usize| -> f64 {
            let used = f64::from(self.live[s]) / SEGMENT_BLOCKS as f64;
            let age = (self.clock - self.age[s]) as f64 + 1.0;
            (1.0 - used) * age / (1.0 + used)
        };
        (0..self.state.len())
            .filter(|s| self.state[*s] == State::Closed && self.live[*s] < SEGMENT_BLOCKS as u32)
            .max_by(|a, b| score(*a).total_cmp(&score(*b)))
    }

    fn clean(&mut self) {
        let pending = self.state.iter().filter(|s| **s == State::PendingFree).count();
        let Some(victim) = self.victim().filter(|_| pending < 8) else {
            return self.checkpoint();
        };
        let ids = std::mem::take(&mut self.contents[victim]);
        self.state[victim] = State::PendingFree;
        self.live[victim] = 0;
        for id in ids {
            let block = self.blocks[id as usize];
            if block.segment == u32::MAX {
                self.free_ids.push(id);
                continue;
            }
            let renamed = match self.naming {
                Naming::Address => true,
                Naming::Logical { renamed_below } => {
                    (self.logical_live[block.logical as usize] as usize) < renamed_below
                }
            };
            if renamed {
                self.drop_name(block.logical);
                self.dirty_every_copy(block);
            } else {
                self.dirty_entries.insert(block.logical);
            }
            self.put(id, true, renamed);
            self.written.moved += 1;
        }
    }

    /// Each copy of the leaf that names the block is written at the next checkpoint.
    fn dirty_every_copy(&mut self, block: Block) {
        let leaf = block.lba / LEAF_BLOCKS;
        let changes = &self.leaf_changes[leaf as usize];
        match self.sharing {
            Sharing::Clones { .. } if block.first == 0 => {
                self.dirty.insert((leaf, 0));
                for clone in changes.range(1..) {
                    if !self.own.contains_key(&(*clone, block.lba)) {
                        self.dirty.insert((leaf, *clone));
                    }
                }
            }
            Sharing::Clones { .. } => {
                self.dirty.insert((leaf, block.first));
            }
            Sharing::Snapshots { .. } => {
                let from = block.first.max(self.oldest);
                let last = block.last.min(self.view);
                // The copy that the oldest of these views shares with those before it.
                self.dirty.insert((leaf, from));
                for view in changes.range(from + 1..=last.max(from + 1)) {
                    if *view <= last {
                        self.dirty.insert((leaf, *view));
                    }
                }
            }
        }
    }

    /// Fills the pool, wears it in, and measures.
    pub fn measure(mut self) -> Written {
        for lba in 0..self.volume_blocks {
            self.write(0, lba);
        }
        match self.sharing {
            Sharing::Snapshots { kept, changed_permille } => {
                let changed = (self.volume_blocks / 1000 * changed_permille).max(1);
                let worn_in = u64::from(kept) * u64::from(changed) + u64::from(self.volume_blocks);
                let measured = u64::from(self.volume_blocks).max(worn_in / 4);
                for round in 0..worn_in + measured {
                    if round == worn_in {
                        self.written = Written::default();
                    }
                    if kept > 0 && round.is_multiple_of(u64::from(changed)) {
                        self.snapshot(kept);
                    }
                    let lba = self.random(self.volume_blocks);
                    let view = self.view;
                    self.write(view, lba);
                }
            }
            Sharing::Clones { count, changed_permille } => {
                let own = (self.volume_blocks / 1000 * changed_permille).max(1);
                let spread = self.volume_blocks / own;
                let all = u64::from(count) * u64::from(own);
                let measured = u64::from(self.volume_blocks).max(all);
                for round in 0..all + 2 * measured {
                    if round == all + measured {
                        self.written = Written::default();
                    }
                    let (clone, at) = match round < all {
                        true => {
                            ((round % u64::from(count)) as u32, (round / u64::from(count)) as u32)
                        }
                        false => (self.random(count), self.random(own)),
                    };
                    // The blocks that a clone overwrites are its own choice, and stay the same ones.
                    let lba = (at * spread + clone * 7919 % spread) % self.volume_blocks;
                    self.write(clone + 1, lba);
                }
            }
        }
        let live: u64 = self.live.iter().map(|l| u64::from(*l)).sum();
        let logicals = self.logical_live.iter().filter(|l| **l > 0).count();
        self.written.full_percent =
            100.0 * live as f64 / (self.state.len() * SEGMENT_BLOCKS) as f64;
        self.written.entries_per_segment = logicals as f64 / self.state.len() as f64;
        self.written
    }
}
