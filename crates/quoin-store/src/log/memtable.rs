//! The log above the folded map, in memory. Which entry is newest where is in
//! [`crate::log::memtable_tree`].

use std::collections::{BTreeMap, VecDeque};

use quoin_types::entry::SharedEntry;
use quoin_types::{Chain, Entry, EntryKind, Epoch, Lsn, Part, Position};

use crate::format::checkpoint::LogStart;

/// Entry of the log; its LSN is its index.
#[derive(Clone, Copy, Debug)]
pub struct LogRecord {
    pub epoch: u64,
    pub chain: u64,
    pub lba: u64,
    /// First data block; 0 without data.
    pub place: u64,
    pub blocks: u32,
    pub kind: u8,
    pub fua: bool,
    crc_at: u64,
}

impl LogRecord {
    pub fn position(&self, lsn: u64) -> Position {
        Position { epoch: Epoch(self.epoch), lsn: Lsn(lsn) }
    }

    pub fn end(&self) -> u64 {
        self.lba + u64::from(self.blocks)
    }

    /// Write, Trim and Zero: the kinds with a range.
    pub fn has_range(&self) -> bool {
        self.kind <= 3
    }
}

/// A batch that the log still needs.
#[derive(Clone, Copy, Debug)]
pub struct LogBatch {
    pub last_lsn: u64,
    pub start: LogStart,
}

/// The entries above the folded map, in order, without their data.
#[derive(Default, Debug)]
pub struct Log {
    /// LSN of the first record, or the next one to come.
    first: u64,
    records: VecDeque<LogRecord>,
    crcs: VecDeque<u32>,
    crcs_first: u64,
    /// Entries without a range.
    special: BTreeMap<u64, EntryKind>,
    /// Parts of requests of clients that number them.
    parts: BTreeMap<u64, Part>,
    /// LSNs of the Reverts.
    reverts: VecDeque<u64>,
    /// LSNs of the deletions of users' snapshots.
    deletions: VecDeque<u64>,
    batches: VecDeque<LogBatch>,
    /// Bytes of all records, about.
    pub bytes: u64,
    /// Blocks that its holes cover: what folding them may free.
    pub hole_blocks: u64,
}

impl Log {
    pub fn after(lsn: Lsn) -> Self {
        Log { first: lsn.0 + 1, ..Log::default() }
    }

    pub fn next_lsn(&self) -> u64 {
        self.first + self.records.len() as u64
    }

    pub fn first_lsn(&self) -> u64 {
        self.first
    }

    pub fn push(&mut self, entry: &Entry, place: u64) {
        let record = LogRecord {
            epoch: entry.epoch.0,
            chain: entry.chain.0,
            lba: entry.lba,
            place,
            blocks: entry.blocks,
            kind: entry.kind.code(),
            fua: entry.fua,
            crc_at: self.crcs_first + self.crcs.len() as u64,
        };
        self.crcs.extend(&entry.crcs);
        if !matches!(entry.kind, EntryKind::Write | EntryKind::Trim) {
            self.special.insert(entry.lsn.0, entry.kind.clone());
        }
        if let Some(part) = entry.part {
            self.parts.insert(entry.lsn.0, part);
        }
        match entry.kind {
            EntryKind::Revert { .. } => self.reverts.push_back(entry.lsn.0),
            EntryKind::DeleteSnapshot { id } if !id.is_of_boundary() => {
                self.deletions.push_back(entry.lsn.0);
            }
            _ => {}
        }
        self.bytes += bytes_of(&record);
        self.hole_blocks += holes_of(&record);
        self.records.push_back(record);
    }

    pub fn push_batch(&mut self, last_lsn: u64, start: LogStart) {
        self.batches.push_back(LogBatch { last_lsn, start });
    }

    pub fn get(&self, lsn: u64) -> Option<&LogRecord> {
        self.records.get(usize::try_from(lsn.checked_sub(self.first)?).ok()?)
    }

    pub fn crc(&self, record: &LogRecord, block: u64) -> u32 {
        let at = record.crc_at + block - self.crcs_first;
        self.crcs.get(at as usize).copied().unwrap_or(0)
    }

    pub fn crcs<'a>(&'a self, record: &LogRecord) -> impl Iterator<Item = u32> + use<'a> {
        let at = (record.crc_at - self.crcs_first) as usize;
        let count = if record.place == 0 { 0 } else { record.blocks as usize };
        self.crcs.range(at..at + count).copied()
    }

    pub fn kind(&self, lsn: u64, record: &LogRecord) -> EntryKind {
        match record.kind {
            1 => EntryKind::Write,
            2 => EntryKind::Trim,
            _ => self.special.get(&lsn).cloned().unwrap_or(EntryKind::Trim),
        }
    }

    /// The part of a client's request that an entry is.
    pub fn part(&self, lsn: u64) -> Option<&Part> {
        self.parts.get(&lsn)
    }

    /// LSNs of the Reverts, oldest first.
    pub fn reverts(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.reverts.iter().copied()
    }

    /// LSN of the oldest entry by which a view goes, and with it what only that view shows.
    pub fn first_view_gone(&self) -> Option<u64> {
        let firsts = [self.reverts.front(), self.deletions.front()];
        firsts.into_iter().flatten().min().copied()
    }

    /// Entries that are neither Write nor Trim, from `lsn` on.
    pub fn special_from(&self, lsn: u64) -> impl Iterator<Item = (u64, &EntryKind)> {
        self.special.range(lsn..).map(|(l, k)| (*l, k))
    }

    /// Removes the entries after `keep`. Their batches stay as a part of the chain for as long as
    /// one before them is needed, and hold nothing themselves: entries that follow may never reach
    /// the LSNs that they once had.
    pub fn cut_after(&mut self, keep: u64) {
        for batch in self.batches.iter_mut().rev().take_while(|batch| batch.last_lsn > keep) {
            batch.last_lsn = keep;
        }
        while self.next_lsn() > keep + 1
            && let Some(record) = self.records.pop_back()
        {
            self.bytes -= bytes_of(&record);
            self.hole_blocks -= holes_of(&record);
            let crcs = (record.crc_at - self.crcs_first) as usize;
            self.crcs.truncate(crcs);
        }
        self.special.split_off(&(keep + 1));
        self.parts.split_off(&(keep + 1));
        for lsns in [&mut self.reverts, &mut self.deletions] {
            lsns.truncate(lsns.partition_point(|lsn| *lsn <= keep));
        }
    }

    /// Removes the entries up to `lsn` and the batches that hold no later one.
    pub fn drop_through(&mut self, lsn: u64) {
        while self.first <= lsn
            && let Some(record) = self.records.pop_front()
        {
            self.first += 1;
            self.bytes -= bytes_of(&record);
            self.hole_blocks -= holes_of(&record);
            if record.place != 0 {
                self.crcs.drain(..record.blocks as usize);
                self.crcs_first += u64::from(record.blocks);
            }
        }
        self.special = self.special.split_off(&(lsn + 1));
        self.parts = self.parts.split_off(&(lsn + 1));
        for lsns in [&mut self.reverts, &mut self.deletions] {
            lsns.drain(..lsns.partition_point(|at| *at <= lsn));
        }
        while self.batches.front().is_some_and(|b| b.last_lsn <= lsn) {
            self.batches.pop_front();
        }
    }

    /// Where a replay of these entries has to begin; `None`: nothing to replay.
    pub fn start(&self) -> Option<LogStart> {
        self.batches.front().map(|b| b.start)
    }

    /// The highest LSN up to which at least `keep` bytes of log stay.
    pub fn lsn_before_last(&self, keep: u64) -> u64 {
        let mut bytes = 0;
        let kept = self.records.iter().rev().take_while(|r| {
            bytes += bytes_of(r);
            bytes <= keep
        });
        self.next_lsn() - 1 - kept.count() as u64
    }

    pub fn entry(&self, lsn: u64, data: bytes::Bytes) -> Option<SharedEntry> {
        let record = self.get(lsn)?;
        Some(SharedEntry::new(Entry {
            epoch: Epoch(record.epoch),
            lsn: Lsn(lsn),
            kind: self.kind(lsn, record),
            lba: record.lba,
            blocks: record.blocks,
            crcs: self.crcs(record).collect(),
            data,
            chain: Chain(record.chain),
            fua: record.fua,
            part: self.part(lsn).copied(),
        }))
    }
}

fn holes_of(record: &LogRecord) -> u64 {
    if record.place == 0 { u64::from(record.blocks) } else { 0 }
}

/// Weight of an entry beside its data. In memory and in a replay an entry costs about as much
/// whatever it carries, so trims alone must make a fold due after some hundred thousand.
const ENTRY_WEIGHT: u64 = 1024;

fn bytes_of(record: &LogRecord) -> u64 {
    ENTRY_WEIGHT + if record.place == 0 { 0 } else { u64::from(record.blocks) * 4096 }
}
