//! A disk in memory that can lose its power: for tests and for the simulator.
//!
//! Unsynced 512-byte sectors are remembered with what is on the media; a power cut lets the
//! caller choose, sector by sector, which of the unsynced writes reached it. That covers lost,
//! torn (at 512 bytes) and reordered writes. Clones share the disk, as two descriptors would.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::sync::{Arc, Mutex, MutexGuard};

use quoin_replication::replica::store::{BootCookie, IoFault};
use quoin_types::BLOCK_SIZE;

use crate::disk::{Disk, Syncer};

/// The unit that a disk writes atomically.
pub const SECTOR_SIZE: usize = 512;
const SECTORS: usize = BLOCK_SIZE / SECTOR_SIZE;
const EIO: i32 = 5;

type Block = Box<[u8; BLOCK_SIZE]>;

/// Operation on a disk, for tests that rebuild the disk from other selections of operations.
#[derive(Clone, Debug)]
pub enum DiskEvent {
    Write { offset: u64, bytes: Arc<[u8]> },
    Discard { offset: u64, length: u64 },
    Sync,
}

#[derive(Default)]
struct State {
    /// Bytes that reads return; absent blocks are zeroes.
    cached: BTreeMap<u64, Block>,
    /// For each block with unsynced writes: the media's content and which sectors differ.
    unsynced: BTreeMap<u64, (Option<Block>, u8)>,
    /// Media contents of blocks that a failed sync left in the cache: no later sync writes them.
    orphans: BTreeMap<u64, Option<Block>>,
    /// Blocks whose newest content only the writing process has (`write_with_sync`).
    held: BTreeSet<u64>,
    boot: u128,
    writes: u64,
    written_bytes: u64,
    /// Fail every write (and sync) after this many writes.
    fail_after: Option<u64>,
    /// Everything done since [`MemoryDisk::record`].
    events: Option<Vec<DiskEvent>>,
    /// The next syncs fail, and what they would have made durable is lost with the next cut.
    fail_syncs: bool,
    fail_reads: bool,
    reads: u64,
    discarded_bytes: u64,
    written_out_bytes: u64,
    /// These reads fail, counted from the first one.
    refused_reads: std::ops::Range<u64>,
    /// Blocks that cannot be read until they are written again.
    broken: BTreeSet<u64>,
    /// Bytes free below the disk, where it shares that space with others.
    room_below: Option<u64>,
}

impl State {
    /// Decides which unsynced sectors of a block are on the media.
    fn settle(&mut self, number: u64, survives: &mut impl FnMut() -> bool) {
        let Some((media, sectors)) = self.unsynced.remove(&number) else { return };
        let mut block = media.unwrap_or_else(|| Box::new([0u8; BLOCK_SIZE]));
        let cached = self.cached.remove(&number);
        for sector in (0..SECTORS).filter(|s| sectors & (1 << s) != 0) {
            if survives() {
                let range = sector * SECTOR_SIZE..(sector + 1) * SECTOR_SIZE;
                match &cached {
                    Some(cached) => block[range.clone()].copy_from_slice(&cached[range]),
                    None => block[range].fill(0),
                }
            }
        }
        self.cached.insert(number, block);
    }
}

#[derive(Clone)]
pub struct MemoryDisk {
    size: u64,
    state: Arc<Mutex<State>>,
}

impl MemoryDisk {
    /// An empty disk of `size` bytes, a multiple of the block size.
    pub fn new(size: u64) -> Self {
        assert!(size.is_multiple_of(BLOCK_SIZE as u64), "the size is a multiple of the block size");
        let state = State { boot: 1, ..State::default() };
        Self { size, state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Power is lost and comes back: `survives` is asked once for each unsynced sector, in
    /// order of offset, whether its last write reached the media.
    pub fn power_cut(&self, mut survives: impl FnMut() -> bool) {
        let mut state = self.state();
        let unsynced: Vec<u64> = state.unsynced.keys().copied().collect();
        for number in unsynced {
            state.settle(number, &mut survives);
        }
        for (number, media) in std::mem::take(&mut state.orphans) {
            state.cached.insert(number, media.unwrap_or_else(|| Box::new([0; BLOCK_SIZE])));
        }
        state.held.clear();
        state.boot += 1;
        state.fail_after = None;
        state.fail_syncs = false;
    }

    /// The writing process died, the system did not: everything that the kernel was given is
    /// still there. Of what waited for a sync, `survives` is asked, sector by sector: a sync may
    /// have begun with it.
    pub fn process_crash(&self, mut survives: impl FnMut() -> bool) {
        let mut state = self.state();
        for number in std::mem::take(&mut state.held) {
            state.settle(number, &mut survives);
        }
        state.fail_after = None;
        state.fail_syncs = false;
    }

    /// Sets the bytes free below the disk from now on; `None`: all of its space is its own.
    pub fn set_room_below(&self, bytes: Option<u64>) {
        self.state().room_below = bytes;
    }

    /// Fails every write after the next `writes` ones; `None` mends the disk.
    pub fn fail_after(&self, writes: Option<u64>) {
        let mut state = self.state();
        state.fail_after = writes.map(|n| state.writes + n);
    }

    /// Makes syncs fail from now on; a crash mends the disk. What a failed one was to write stays
    /// in the cache and never reaches the media.
    pub fn fail_syncs(&self) {
        self.state().fail_syncs = true;
    }

    /// The system writes these blocks out by itself, as it may at any time.
    pub fn write_back(&self, wanted: impl Fn(&[u8; BLOCK_SIZE]) -> bool) {
        let mut state = self.state();
        let State { cached, unsynced, held, .. } = &mut *state;
        unsynced.retain(|number, _| held.contains(number) || !wanted(&cached[number]));
    }

    /// Makes every read fail, until told otherwise; what is on the media is not touched.
    pub fn fail_reads(&self, fail: bool) {
        self.state().fail_reads = fail;
    }

    /// Makes these reads fail, counted from now on; the next one is number 0.
    pub fn refuse_reads(&self, numbers: std::ops::Range<u64>) {
        let mut state = self.state();
        (state.reads, state.refused_reads) = (0, numbers);
    }

    /// Number of read calls so far, or since reads were last refused by their numbers.
    pub fn reads(&self) -> u64 {
        self.state().reads
    }

    /// Reads that touch this block fail until it is written again: a bad sector.
    pub fn break_block(&self, number: u64) {
        self.state().broken.insert(number);
    }

    /// Remembers from now on what is done to the disk.
    pub fn record(&self) {
        self.state().events = Some(Vec::new());
    }

    /// Operations since [`MemoryDisk::record`], in order.
    pub fn events(&self) -> Vec<DiskEvent> {
        self.state().events.clone().unwrap_or_default()
    }

    /// Number of operations since then.
    pub fn event_count(&self) -> usize {
        self.state().events.as_ref().map_or(0, Vec::len)
    }

    /// Number of write calls so far.
    pub fn writes(&self) -> u64 {
        self.state().writes
    }

    /// Bytes whose space was given back so far.
    pub fn discarded_bytes(&self) -> u64 {
        self.state().discarded_bytes
    }

    /// Bytes of all calls of [`Disk::write_out`] so far.
    pub fn written_out_bytes(&self) -> u64 {
        self.state().written_out_bytes
    }

    /// Bytes written so far.
    pub fn written_bytes(&self) -> u64 {
        self.state().written_bytes
    }

    /// Flips bits of one byte on the media: rot.
    pub fn rot(&self, offset: u64, mask: u8) {
        let mut state = self.state();
        let block = state
            .cached
            .entry(offset / BLOCK_SIZE as u64)
            .or_insert_with(|| Box::new([0; BLOCK_SIZE]));
        block[offset as usize % BLOCK_SIZE] ^= mask;
    }

    /// A copy of the whole disk at rest, as a process crash would leave it.
    pub fn fork(&self) -> Self {
        let state = self.state();
        let copy = State {
            cached: state.cached.clone(),
            unsynced: state.unsynced.clone(),
            orphans: state.orphans.clone(),
            held: state.held.clone(),
            broken: state.broken.clone(),
            boot: state.boot,
            writes: state.writes,
            ..State::default()
        };
        Self { size: self.size, state: Arc::new(Mutex::new(copy)) }
    }

    /// Numbers of the blocks that were ever written, in order.
    pub fn written_blocks(&self) -> Vec<u64> {
        self.state().cached.keys().copied().collect()
    }

    /// Bytes that are backed by memory: what a sparse file would take.
    pub fn allocated_bytes(&self) -> u64 {
        self.state().cached.len() as u64 * BLOCK_SIZE as u64
    }

    fn check(&self, operation: &'static str, offset: u64, length: usize) -> Result<(), IoFault> {
        let aligned = offset.is_multiple_of(BLOCK_SIZE as u64) && length.is_multiple_of(BLOCK_SIZE);
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= self.size);
        if aligned && inside { Ok(()) } else { Err(IoFault { operation, offset, errno: 22 }) }
    }
}

impl Disk for MemoryDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.check("read", offset, buffer.len())?;
        let mut state = self.state();
        let number = state.reads;
        state.reads += 1;
        let first = offset / BLOCK_SIZE as u64;
        let blocks = first..first + (buffer.len() / BLOCK_SIZE) as u64;
        let refused = state.fail_reads || state.refused_reads.contains(&number);
        if refused || state.broken.range(blocks).next().is_some() {
            return Err(IoFault { operation: "read", offset, errno: EIO });
        }
        for (number, chunk) in (offset / BLOCK_SIZE as u64..).zip(buffer.chunks_mut(BLOCK_SIZE)) {
            match state.cached.get(&number) {
                Some(block) => chunk.copy_from_slice(&block[..]),
                None => chunk.fill(0),
            }
        }
        Ok(())
    }

    fn read_media(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.read_at(offset, buffer)?;
        let state = self.state();
        for (number, chunk) in (offset / BLOCK_SIZE as u64..).zip(buffer.chunks_mut(BLOCK_SIZE)) {
            match state.orphans.get(&number) {
                Some(Some(media)) => chunk.copy_from_slice(&media[..]),
                Some(None) => chunk.fill(0),
                None => {}
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
        let total: usize = parts.iter().map(|p| p.len()).sum();
        self.check("write", offset, total)?;
        let mut state = self.state();
        if state.fail_after.is_some_and(|limit| state.writes >= limit) {
            return Err(IoFault { operation: "write", offset, errno: EIO });
        }
        if let Some(events) = &mut state.events {
            let bytes: Vec<u8> = parts.iter().flat_map(|p| p.iter().copied()).collect();
            events.push(DiskEvent::Write { offset, bytes: bytes.into() });
        }
        state.writes += 1;
        state.written_bytes += total as u64;
        let mut bytes = parts.iter().flat_map(|p| p.chunks(SECTOR_SIZE));
        let first = offset / BLOCK_SIZE as u64;
        for number in first..first + (total / BLOCK_SIZE) as u64 {
            state.broken.remove(&number);
            let old = state.cached.get(&number).cloned();
            let mut block = old.clone().unwrap_or_else(|| Box::new([0; BLOCK_SIZE]));
            let mut changed = 0u8;
            for (i, sector) in block.chunks_mut(SECTOR_SIZE).enumerate() {
                let new = bytes.next().expect("parts are whole sectors");
                if sector != new {
                    changed |= 1 << i;
                    sector.copy_from_slice(new);
                }
            }
            if changed == 0 && old.is_none() {
                // Zeros where nothing is: an absent block reads as such.
                continue;
            }
            if changed != 0 {
                // Written anew, it will be written out.
                let old = state.orphans.remove(&number).unwrap_or(old);
                state.unsynced.entry(number).or_insert((old, 0)).1 |= changed;
            }
            state.cached.insert(number, block);
        }
        Ok(())
    }

    fn write_with_sync(
        &self,
        offset: u64,
        parts: &[IoSlice<'_>],
        spare: usize,
    ) -> Result<(), IoFault> {
        self.write_at(offset, parts)?;
        let blocks = parts.iter().map(|p| p.len()).sum::<usize>() / BLOCK_SIZE;
        let first = offset / BLOCK_SIZE as u64;
        let mut state = self.state();
        state.held.extend((first..).take(blocks));
        // The most that a disk may do: what was there before is gone at once, from the media too.
        for number in (first + blocks as u64..).take(spare / BLOCK_SIZE) {
            state.cached.insert(number, Box::new([0; BLOCK_SIZE]));
            state.unsynced.remove(&number);
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), IoFault> {
        let mut state = self.state();
        let failing = state.fail_syncs || state.fail_after.is_some_and(|n| state.writes >= n);
        if failing {
            // The pages stay readable and are marked clean, as Linux does it.
            for (number, (media, _)) in std::mem::take(&mut state.unsynced) {
                state.orphans.entry(number).or_insert(media);
            }
            return Err(IoFault { operation: "sync", offset: 0, errno: EIO });
        }
        state.unsynced.clear();
        state.held.clear();
        if let Some(events) = &mut state.events {
            events.push(DiskEvent::Sync);
        }
        Ok(())
    }

    fn syncer(&self) -> Syncer {
        let disk = self.clone();
        Box::new(move || disk.sync())
    }

    fn write_out(&self, _offset: u64, length: u64) {
        self.state().written_out_bytes += length;
    }

    fn claim(&self, _offset: u64, length: u64, spare_bytes: u64) -> bool {
        let mut state = self.state();
        let Some(room) = state.room_below else { return true };
        let claimed = room.checked_sub(length).filter(|left| *left >= spare_bytes);
        state.room_below = claimed.or(Some(room));
        claimed.is_some()
    }

    fn room_below(&self) -> Option<u64> {
        self.state().room_below
    }

    fn discard(&self, offset: u64, length: u64) {
        let mut state = self.state();
        state.room_below = state.room_below.map(|room| room + length);
        state.discarded_bytes += length;
        let blocks = offset / BLOCK_SIZE as u64..(offset + length) / BLOCK_SIZE as u64;
        if let Some(events) = &mut state.events {
            events.push(DiskEvent::Discard { offset, length });
        }
        for number in blocks {
            state.cached.remove(&number);
            state.unsynced.remove(&number);
            state.held.remove(&number);
            state.orphans.remove(&number);
        }
    }

    fn next_space(&self, offset: u64) -> Option<u64> {
        let state = self.state();
        state.cached.range(offset / BLOCK_SIZE as u64..).next().map(|(n, _)| n * BLOCK_SIZE as u64)
    }

    fn cookie(&self) -> BootCookie {
        BootCookie(self.state().boot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(byte: u8) -> Vec<u8> {
        vec![byte; BLOCK_SIZE]
    }

    fn read(disk: &MemoryDisk, number: u64) -> Vec<u8> {
        let mut buffer = block(0xff);
        disk.read_at(number * BLOCK_SIZE as u64, &mut buffer).expect("inside the disk");
        buffer
    }

    #[test]
    fn a_power_cut_keeps_what_was_synced_and_tears_the_rest_by_sectors() {
        let disk = MemoryDisk::new(1 << 20);
        disk.write_at(0, &[IoSlice::new(&block(1))]).expect("a write");
        disk.sync().expect("a sync");
        disk.write_at(0, &[IoSlice::new(&block(2))]).expect("a write");
        disk.write_at(4096, &[IoSlice::new(&block(3))]).expect("a write");
        assert_eq!(read(&disk, 0), block(2));
        let mut n = 0;
        disk.power_cut(|| {
            n += 1;
            n <= 3
        });
        let torn = read(&disk, 0);
        assert!(torn[..1536].iter().all(|b| *b == 2) && torn[1536..].iter().all(|b| *b == 1));
        assert_eq!(read(&disk, 1), block(0));
    }

    #[test]
    fn what_waited_for_a_sync_may_be_lost_with_the_process_and_nothing_else() {
        let disk = MemoryDisk::new(1 << 20);
        disk.write_with_sync(0, &[IoSlice::new(&block(1))], 0).expect("a write");
        disk.sync().expect("a sync");
        disk.write_with_sync(0, &[IoSlice::new(&block(2))], 0).expect("a write");
        disk.write_at(4096, &[IoSlice::new(&block(3))]).expect("a write");
        assert_eq!(read(&disk, 0), block(2), "reads see it at once");
        disk.process_crash(|| false);
        assert_eq!((read(&disk, 0), read(&disk, 1)), (block(1), block(3)));
    }

    #[test]
    fn a_disk_that_fails_says_so_and_changes_nothing() {
        let disk = MemoryDisk::new(1 << 20);
        disk.fail_after(Some(1));
        disk.write_at(0, &[IoSlice::new(&block(1))]).expect("one write is granted");
        assert_eq!(disk.write_at(0, &[IoSlice::new(&block(2))]).unwrap_err().errno, EIO);
        assert!(disk.sync().is_err());
        assert_eq!(read(&disk, 0), block(1));
        assert_eq!(disk.write_at(1, &[IoSlice::new(&block(2))]).unwrap_err().errno, 22);
        assert!(disk.write_at(1 << 20, &[IoSlice::new(&block(2))]).is_err());
    }
}
