//! Requests of the clients: several queues, one outstanding operation each, hot and random blocks,
//! every kind of request, unique contents.

use std::collections::VecDeque;

use bytes::Bytes;
use quoin_types::BLOCK_SIZE;
use quoin_types::block::Operation;

use crate::content::{self, SECTOR, SECTORS, Tag};
use crate::random::Random;
use crate::shape::LoadShape;

/// One request as drawn, in sectors of 512 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Draft {
    Read { sector: u64, sectors: u64 },
    Write { sector: u64, sectors: u64, fua: bool },
    Trim { sector: u64, sectors: u64, fua: bool },
    Zero { sector: u64, sectors: u64, fua: bool, no_hole: bool },
    Flush,
}

impl Draft {
    pub fn range(&self) -> Option<(u64, u64)> {
        match *self {
            Draft::Read { sector, sectors }
            | Draft::Write { sector, sectors, .. }
            | Draft::Trim { sector, sectors, .. }
            | Draft::Zero { sector, sectors, .. } => Some((sector, sectors)),
            Draft::Flush => None,
        }
    }

    /// The request for the target; a write's bytes name `tag`.
    pub fn operation(&self, run: u64, tag: Tag) -> Operation {
        let offset = |sector: u64| sector * SECTOR as u64;
        match *self {
            Draft::Read { sector, sectors } => {
                Operation::Read { offset: offset(sector), length: offset(sectors) as u32 }
            }
            Draft::Write { sector, sectors, fua } => {
                let data: Bytes = content::make(run, tag, sector, sectors);
                Operation::Write { offset: offset(sector), data, fua }
            }
            Draft::Trim { sector, sectors, fua } => {
                Operation::Trim { offset: offset(sector), length: offset(sectors), fua }
            }
            Draft::Zero { sector, sectors, fua, no_hole } => {
                let (offset, length) = (offset(sector), offset(sectors));
                Operation::WriteZeroes { offset, length, fua, no_hole }
            }
            Draft::Flush => Operation::Flush,
        }
    }
}

/// Access pattern of the clients of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Habit {
    /// Anything anywhere, some blocks hot.
    Any,
    /// Everybody at the same one or two blocks.
    Hot,
    /// A file system: journal blocks, a flush, a commit block with FUA, then the blocks in place.
    Journal,
    /// Long stretches, one after the other.
    Sequential,
    /// Much is given back.
    Trims,
}

/// How the requests of one run are drawn.
#[derive(Clone, Debug)]
pub struct Workload {
    pub blocks: u64,
    pub habit: Habit,
    /// Planned requests of each client.
    scripts: Vec<VecDeque<Draft>>,
    /// Where the next stretch of each client begins.
    heads: Vec<u64>,
    hot: Vec<u64>,
    hot_percent: u64,
    /// 512-byte requests are allowed and made.
    sub_block: bool,
    long_blocks: u64,
    /// Reads, writes, trims, zeroes, flushes.
    weights: [u32; 5],
    fua_percent: u64,
}

impl Workload {
    pub fn draw(blocks: u64, sub_block: bool, random: &mut Random) -> Self {
        use Habit::{Any, Hot, Journal, Sequential, Trims};
        let habit = *random.pick(&[Any, Any, Any, Hot, Journal, Journal, Sequential, Trims]);
        let spots = if habit == Hot { 2 } else { random.between(2, 12) };
        let hot = (0..spots).map(|_| random.below(blocks)).collect();
        let holes = if habit == Trims { 30 } else { random.below(6) as u32 };
        Self {
            blocks,
            habit,
            scripts: Vec::new(),
            heads: Vec::new(),
            hot,
            hot_percent: if habit == Hot { 97 } else { random.between(20, 80) },
            sub_block,
            long_blocks: *random.pick(&[2, 8, 16, 64, 300]),
            weights: [
                random.between(20, 60) as u32,
                random.between(30, 60) as u32,
                holes,
                holes,
                random.between(1, 8) as u32,
            ],
            fua_percent: random.below(15),
        }
    }

    /// A small world's habits in the place of what was drawn.
    pub fn take(&mut self, shape: &LoadShape) {
        self.long_blocks = self.long_blocks.min(shape.long_blocks);
        self.fua_percent = self.fua_percent.max(shape.fua_percent);
        self.weights[4] = self.weights[4].max(shape.flushes);
        for hole in [2, 3] {
            self.weights[hole] = self.weights[hole].max(shape.holes);
        }
    }

    /// Of one request.
    pub fn longest_bytes(&self) -> usize {
        self.long_blocks.min(self.blocks) as usize * BLOCK_SIZE
    }

    /// The volume has more blocks now: its end is where growth goes wrong, so it is visited.
    pub fn grow(&mut self, blocks: u64) {
        self.hot.extend([self.blocks, blocks - 1]);
        self.blocks = blocks;
    }

    fn range(&self, random: &mut Random) -> (u64, u64) {
        let whole = SECTORS as u64;
        let block = if random.percent(self.hot_percent) {
            *random.pick(&self.hot)
        } else {
            random.below(self.blocks)
        };
        if self.sub_block && random.percent(30) {
            let sector = block * whole + random.below(whole);
            let longest = (self.blocks * whole - sector).min(12);
            return (sector, random.between(1, longest));
        }
        let longest = self.blocks - block;
        let blocks = match random.below(20) {
            0 => random.between(1, self.long_blocks),
            1..=4 => random.between(2, 6),
            _ => 1,
        };
        (block * whole, blocks.min(longest) * whole)
    }

    /// The next request of this client.
    pub fn next(&mut self, client: usize, random: &mut Random) -> Draft {
        if self.scripts.len() <= client {
            self.scripts.resize(client + 1, VecDeque::new());
            self.heads.resize(client + 1, random.below(self.blocks));
        }
        if let Some(draft) = self.scripts[client].pop_front() {
            return draft;
        }
        match self.habit {
            Habit::Journal if random.percent(80) => self.write_journal(client, random),
            Habit::Sequential if random.percent(80) => self.go_on(client, random),
            _ => self.draw_one(random),
        }
    }

    /// One transaction; its first request is returned, the rest waits in the script.
    fn write_journal(&mut self, client: usize, random: &mut Random) -> Draft {
        let whole = SECTORS as u64;
        let journal = (self.blocks / 4).max(2);
        let at = |n: u64| (n % journal) * whole;
        let count = random.between(1, 4);
        let head = self.heads[client];
        self.heads[client] = (head + count + 1) % journal;
        let write = |sector: u64, fua: bool| Draft::Write { sector, sectors: whole, fua };
        let mut script: VecDeque<Draft> = (0..count).map(|n| write(at(head + n), false)).collect();
        script.push_back(Draft::Flush);
        script.push_back(write(at(head + count), true));
        for _ in 0..count {
            let block = journal + random.below(self.blocks - journal);
            script.push_back(write(block * whole, false));
        }
        if random.percent(50) {
            script.push_back(Draft::Read { sector: at(head), sectors: whole });
        }
        let first = script.pop_front().unwrap_or(Draft::Flush);
        self.scripts[client] = script;
        first
    }

    fn go_on(&mut self, client: usize, random: &mut Random) -> Draft {
        let whole = SECTORS as u64;
        let block = self.heads[client] % self.blocks;
        let count = self.long_blocks.min(32).min(self.blocks - block);
        self.heads[client] = block + count;
        let (sector, sectors) = (block * whole, count * whole);
        if random.percent(70) {
            Draft::Write { sector, sectors, fua: false }
        } else {
            Draft::Read { sector, sectors }
        }
    }

    fn draw_one(&self, random: &mut Random) -> Draft {
        let fua = random.percent(self.fua_percent);
        let kind = random.weighted(&self.weights);
        let (sector, sectors) = self.range(random);
        match kind {
            0 => Draft::Read { sector, sectors },
            1 => Draft::Write { sector, sectors, fua },
            2 => Draft::Trim { sector, sectors, fua },
            3 => Draft::Zero { sector, sectors, fua, no_hole: random.percent(50) },
            _ => Draft::Flush,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_request_is_drawn_and_stays_inside_the_volume() {
        let mut seen = [0u32; 5];
        for seed in 0..50 {
            let mut random = Random::new(seed);
            let mut workload = Workload::draw(64, true, &mut random);
            for n in 0..500 {
                let draft = workload.next(n % 3, &mut random);
                if let Some((sector, sectors)) = draft.range() {
                    assert!(sectors > 0 && sector + sectors <= 64 * SECTORS as u64);
                }
                seen[match draft {
                    Draft::Read { .. } => 0,
                    Draft::Write { .. } => 1,
                    Draft::Trim { .. } => 2,
                    Draft::Zero { .. } => 3,
                    Draft::Flush => 4,
                }] += 1;
            }
        }
        assert!(seen.iter().all(|n| *n > 100), "{seen:?}");
    }
}
