//! Views above the folded map: the log's newest entries, and the Reverts among them.
//!
//! A Revert is a write (`docs/replication.md`): every block whose version is above its snapshot's
//! LSN has the snapshot's content, with the Revert's own LSN as version. Above the folded map that
//! is computed where a block is looked up, so a Revert stands as soon as it is appended, whatever
//! the number of changed blocks, and a truncation forgets it like any other entry. The fold writes
//! the changed slots into the map once ([`crate::background::reverts`]).

use quoin_replication::replica::store::StoreError;
use quoin_types::{EntryKind, Lsn, mutant};

use crate::clones::lookup;
use crate::core::NodeIo;
use crate::disk::Disk;
use crate::format::checkpoint::SnapshotState;
use crate::format::node::{BAD_PLACE, BlockAt, LOST_PLACE, Root};
use crate::log::memtable::Log;
use crate::log::memtable_tree::Memtable;
use crate::replica::{Image, Replica, may_lack};

/// Reverts that the log may hold above the folded map. Each costs a lookup of its own in every read
/// until it is folded; more wait until some are.
pub const REVERTS_UNFOLDED_MAX: usize = 16;

/// The log above the folded map as one view of it.
#[derive(Clone, Default)]
pub struct Upper {
    /// Newest entries after the last Revert, or of all.
    pub memtable: Memtable,
    /// The Reverts among the entries, oldest first.
    reverts: Vec<Unfolded>,
}

/// A Revert above the folded map.
#[derive(Clone)]
struct Unfolded {
    lsn: u64,
    /// LSN of its snapshot: blocks of later versions change.
    since: u64,
    /// Newest entries between the Revert before it and this one.
    before: Memtable,
    kept: Kept,
}

/// Place of the content that a Revert goes back to.
#[derive(Clone)]
enum Kept {
    /// The snapshot is folded: its map has it.
    Folded,
    /// The snapshot is above the folded map too: it has the state after so many Reverts, and these
    /// entries on top of it.
    Log { reverts: usize, entries: Memtable },
}

impl Upper {
    pub fn has_reverts(&self) -> bool {
        !self.reverts.is_empty()
    }

    /// First block from `cursor` on, and before `until`, that an entry may have given a version
    /// above `from`.
    pub fn next(&self, cursor: u64, until: u64, from: u64) -> Option<u64> {
        let first = |table: &Memtable, from| table.next(cursor, until, from).map(|(at, _)| at);
        let mut nearest = first(&self.memtable, from);
        let mut from = from;
        for revert in self.reverts.iter().rev() {
            // What came before the Revert is older than it.
            if revert.lsn <= from {
                break;
            }
            from = from.min(revert.since);
            nearest = nearest.into_iter().chain(first(&revert.before, from)).min();
        }
        nearest
    }

    /// Version above which blocks of the folded map may show with one above `from`; `None`: none
    /// of them does.
    pub fn folded_from(&self, mut from: u64) -> Option<u64> {
        for revert in self.reverts.iter().rev() {
            if revert.lsn <= from {
                return None;
            }
            from = from.min(revert.since);
        }
        Some(from)
    }

    /// Fills `found` with what the view says of the blocks from `lba` on.
    pub fn find<D: Disk>(
        &self,
        io: &mut NodeIo<'_, D>,
        log: &Log,
        folded: &Image,
        lba: u64,
        found: &mut [BlockAt],
    ) -> Result<(), StoreError> {
        if self.reverts.is_empty() {
            return find_above(io, log, folded.root, &self.memtable, lba, found);
        }
        // The states after no Revert, after the first one, and so on.
        let mut states = Vec::with_capacity(self.reverts.len() + 1);
        let mut lacking = may_lack(lookup::blocks(io, folded.root, lba, found))?;
        states.push(found.to_vec());
        for revert in &self.reverts {
            overlay(log, &revert.before, lba, found)?;
            let kept = revert.apply(io, log, &folded.snapshots, &states, lba, found);
            lacking = lacking.and(may_lack(kept)?);
            states.push(found.to_vec());
        }
        overlay(log, &self.memtable, lba, found)?;
        lacking
    }
}

impl Unfolded {
    fn apply<D: Disk>(
        &self,
        io: &mut NodeIo<'_, D>,
        log: &Log,
        snapshots: &[SnapshotState],
        states: &[Vec<BlockAt>],
        lba: u64,
        found: &mut [BlockAt],
    ) -> Result<(), StoreError> {
        const GONE: StoreError = StoreError::Damaged("the snapshot of a Revert");
        if found.iter().all(|block| block.version <= self.since) {
            return Ok(());
        }
        let mut kept = vec![BlockAt::default(); found.len()];
        match &self.kept {
            Kept::Folded => {
                let snapshot = snapshots.iter().find(|s| s.info.lsn.0 == self.since).ok_or(GONE)?;
                lookup::blocks(io, snapshot.root, lba, &mut kept)?;
            }
            Kept::Log { reverts, entries } => {
                kept.copy_from_slice(states.get(*reverts).ok_or(GONE)?);
                overlay(log, entries, lba, &mut kept)?;
            }
        }
        for (block, kept) in found.iter_mut().zip(kept) {
            *block = reverted(*block, kept, self.since, self.lsn);
        }
        Ok(())
    }
}

/// What a Revert at `lsn` to the state as of `since` makes of a block.
pub fn reverted(block: BlockAt, kept: BlockAt, since: u64, lsn: u64) -> BlockAt {
    if block.version <= since {
        return block;
    }
    // Of a block whose map is lost the version is unknown, and so whether the Revert changes it.
    let is_lost = |block: BlockAt| matches!(block.place, BAD_PLACE | LOST_PLACE);
    let version = if mutant::is("revert-without-a-version") { kept.version } else { lsn };
    match is_lost(block) || is_lost(kept) {
        true => BlockAt { version, place: LOST_PLACE, crc: 0 },
        false => BlockAt { version, ..kept },
    }
}

/// The folded map with newer entries on top; where those cover it, it is not looked at. Fails with
/// what is lacking only after all of it was looked for.
fn find_above<D: Disk>(
    io: &mut NodeIo<'_, D>,
    log: &Log,
    root: Root,
    memtable: &Memtable,
    lba: u64,
    found: &mut [BlockAt],
) -> Result<(), StoreError> {
    let (end, mut at, mut lacking) = (lba + found.len() as u64, lba, Ok(()));
    for (from, to, lsn) in memtable.range(lba, end) {
        if from > at {
            let gap = &mut found[(at - lba) as usize..(from - lba) as usize];
            lacking = lacking.and(may_lack(lookup::blocks(io, root, at, gap))?);
        }
        fill(log, lsn, from, &mut found[(from - lba) as usize..(to - lba) as usize])?;
        at = to;
    }
    if at < end {
        lookup::blocks(io, root, at, &mut found[(at - lba) as usize..])?;
    }
    lacking
}

/// Newer entries on top of what was found.
fn overlay(
    log: &Log,
    memtable: &Memtable,
    lba: u64,
    found: &mut [BlockAt],
) -> Result<(), StoreError> {
    let end = lba + found.len() as u64;
    for (from, to, lsn) in memtable.range(lba, end) {
        fill(log, lsn, from, &mut found[(from - lba) as usize..(to - lba) as usize])?;
    }
    Ok(())
}

/// The blocks from `first` on of one entry.
fn fill(log: &Log, lsn: u64, first: u64, found: &mut [BlockAt]) -> Result<(), StoreError> {
    let record = log.get(lsn).ok_or(StoreError::Damaged("the log in memory"))?;
    for (lba, block) in (first..).zip(found) {
        let offset = lba - record.lba;
        *block = match record.place {
            0 if mutant::is("trim-without-version") => BlockAt::default(),
            0 => BlockAt { version: lsn, place: 0, crc: 0 },
            place => {
                let crc = log.crc(record, offset);
                BlockAt { version: lsn, place: place + offset, crc }
            }
        };
    }
    Ok(())
}

impl Replica {
    /// The view of the log's entries up to `lsn`.
    pub fn upper_at(&self, lsn: Lsn) -> Upper {
        let end = lsn.0.min(self.log.next_lsn() - 1);
        let mut upper = Upper::default();
        // The first entry after each number of Reverts.
        let mut starts = vec![self.log.first_lsn()];
        for at in self.log.reverts().take_while(|at| *at <= end) {
            // Reverting to what does not exist changes nothing.
            let Some(since) = self.snapshot_of_revert(at) else { continue };
            let first = starts[starts.len() - 1];
            let kept = if since < self.log.first_lsn() {
                Kept::Folded
            } else {
                let reverts = starts.partition_point(|start| *start <= since) - 1;
                Kept::Log { reverts, entries: self.newest_of(starts[reverts], since) }
            };
            let before = self.newest_of(first, at - 1);
            upper.reverts.push(Unfolded { lsn: at, since, before, kept });
            starts.push(at + 1);
        }
        upper.memtable = self.newest_of(starts[starts.len() - 1], end);
        upper
    }

    /// LSN of the snapshot that the Revert at `lsn` goes back to.
    fn snapshot_of_revert(&self, lsn: u64) -> Option<u64> {
        let EntryKind::Revert { id } = self.log.kind(lsn, self.log.get(lsn)?) else { return None };
        let folded = self.folded.snapshots.iter().find(|s| s.info.id == id);
        let mut found = folded.map(|s| s.info.lsn.0);
        for (at, kind) in self.log.special_from(0).take_while(|(at, _)| *at < lsn) {
            match kind {
                EntryKind::Snapshot { id: made, .. } if *made == id => found = Some(at),
                EntryKind::DeleteSnapshot { id: gone } if *gone == id => found = None,
                _ => {}
            }
        }
        found
    }

    /// Which entry of the log from `first` to `last` is the newest where.
    fn newest_of(&self, first: u64, last: u64) -> Memtable {
        let mut memtable = Memtable::default();
        for lsn in first..=last {
            if let Some(record) = self.log.get(lsn).filter(|r| r.has_range()) {
                memtable.insert(record.lba, record.end(), lsn);
            }
        }
        memtable
    }
}
