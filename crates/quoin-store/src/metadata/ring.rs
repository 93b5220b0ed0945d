//! The metadata ring: small durable state outside the segments, so that it has room in a full
//! pool. It is mirrored at both ends of the pool and has two halves.
//!
//! A half begins with one record that holds the whole state; what changes is appended behind it.
//! When half of it is used, the whole state is written ahead to the other one under the next
//! generation, while records go on to the former; once that is synced, the records that came since
//! are appended behind it, and the other half is in use. So no request waits for that sync. A state
//! that was written ahead counts only with a record behind it: the former half has all that it
//! says, and perhaps more. Where a half is full before, and when a pool is opened, the state is
//! written and synced before anything follows. A record is one or more blocks; a block counts if
//! either copy is good, and the first one that is good in neither ends the half (a torn tail). One
//! that the disk refuses to read ends nothing where the other copy is not good either: what it says
//! may be a promise, so the ring is not opened.
//!
//! A half whose first record is broken, or was never written, was being written when the power
//! went, and the half before it holds the same. That half itself proves otherwise: it ends with a
//! **note** once the other one has taken over, written before anything is appended there. So the
//! newer state was whole once, the older half is out of date, and the metadata are lost. An open
//! that finds a note and goes on with its half all the same, since the newer state does not count
//! yet, removes the note before it writes that state anew.
//!
//! Blocks of states that were never finished stay where they are. So a start writes its state under
//! a generation that none of them has, even where no first block tells of it any more.

use std::io::IoSlice;

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::{IoFault, StoreError, SyncTicket};
use quoin_types::{BLOCK_SIZE, mutant};

use crate::disk::Disk;
use crate::error::PoolError;
use crate::format::record::LOG_SEGMENT_LENGTH_MAX;
use crate::format::ring_block::{
    AHEAD, FIRST, LAST, PAYLOAD, RingBlock, SUCCEEDED, blocks_of, encode,
};
use crate::format::superblock::Superblock;

pub struct Ring {
    starts: [u64; 2],
    half_blocks: u32,
    generation: u64,
    next: u32,
    /// Blocks of the state that the half in use begins with.
    state_blocks: u32,
    /// Highest generation that the first blocks of the halves tell of.
    generation_max: u64,
    /// Until a state was written: blocks of states that an earlier process did not finish may be there,
    /// under generations that nothing tells of.
    has_leftovers: bool,
    /// Where the half in use has a note of a switch that does not count.
    void_note_at: Option<u32>,
    ahead: Option<Ahead>,
    /// Records since a state was written ahead did not fit behind it.
    ahead_failed: bool,
    /// Ticket with which the half in use is sure to count; until then the other half is left as it
    /// is.
    counts_with: Option<SyncTicket>,
}

/// The state in the other half, which is not in use yet.
struct Ahead {
    generation: u64,
    next: u32,
    /// Ticket with which the state is on media.
    with: SyncTicket,
    /// Records that were appended to the half in use since.
    since: Vec<u8>,
}

/// Contents of a half.
#[derive(Default)]
struct Half {
    records: Vec<Bytes>,
    next: u32,
    state_blocks: u32,
    is_ahead: bool,
    /// Where the note is that the other half has taken over.
    succeeded_at: Option<u32>,
}

/// Generations that a start leaves out: one process leaves no more states unfinished than that.
const LEAP_MIN: u64 = 64;
/// Generations of which a start takes one by its state. A ring is stated anew for thousands of years
/// before the numbers run out.
const LEAPS: u32 = 1 << 24;

/// Block that a half keeps for its note.
const NOTE_BLOCKS: u32 = 1;

impl Ring {
    fn blank(superblock: &Superblock) -> Self {
        let half_blocks = superblock.ring_blocks / 2;
        Ring {
            starts: superblock.rings(),
            half_blocks,
            generation: 0,
            next: half_blocks,
            state_blocks: half_blocks,
            generation_max: 0,
            has_leftovers: false,
            void_note_at: None,
            ahead: None,
            ahead_failed: false,
            counts_with: None,
        }
    }

    /// A ring without records: the first [`Ring::restate`] makes it one.
    pub fn format<D: Disk>(disk: &D, superblock: &Superblock) -> Result<Self, StoreError> {
        let zeroes = vec![0; BLOCK_SIZE];
        for start in superblock.rings() {
            for block in start..start + u64::from(superblock.ring_blocks) {
                write(disk, block, &zeroes)?;
            }
        }
        Ok(Self::blank(superblock))
    }

    /// Bytes that the whole state may take.
    pub fn capacity(&self) -> usize {
        (self.half_blocks - NOTE_BLOCKS) as usize * PAYLOAD
    }

    /// Segments of which a record may state each, where there is no room for their table: a quarter
    /// of what the ring holds is left to other replicas.
    pub fn segments_in_a_record(&self) -> usize {
        self.capacity() / 4 * 3 / LOG_SEGMENT_LENGTH_MAX
    }

    /// Reads the records of the newest complete half, oldest first.
    pub fn open<D: Disk>(
        disk: &D,
        superblock: &Superblock,
    ) -> Result<(Self, Vec<Bytes>), PoolError> {
        let mut ring = Ring { has_leftovers: true, ..Self::blank(superblock) };
        let mut firsts = [None; 2];
        for (first, half) in firsts.iter_mut().zip(0..) {
            *first = ring.read_block(disk, half, 0, None)?.map(|block| block.generation);
        }
        let mut generations: Vec<u64> = firsts.into_iter().flatten().collect();
        generations.sort_unstable();
        ring.generation_max = generations.last().copied().unwrap_or_default();
        let mut ahead = None;
        while let Some(generation) = generations.pop() {
            ring.generation = generation;
            let half = ring.read_half(disk)?;
            if half.records.is_empty() {
                continue;
            }
            if half.is_ahead && half.records.len() == 1 && !mutant::is("state-ahead-counts") {
                ahead = Some((generation, half));
                continue;
            }
            // However old its first block looks: the disk may have lost what was written there.
            let is_forgotten = mutant::is("newer-half-of-the-ring-forgotten");
            if ahead.is_none() && half.succeeded_at.is_some() && !is_forgotten {
                return Err(PoolError::MetadataLost);
            }
            ring.void_note_at = half.succeeded_at;
            return Ok(ring.found(half));
        }
        // The half before it is lost, and had nothing that is known to be newer.
        let (generation, half) = ahead.ok_or(PoolError::MetadataLost)?;
        ring.generation = generation;
        Ok(ring.found(half))
    }

    fn found(mut self, half: Half) -> (Self, Vec<Bytes>) {
        (self.next, self.state_blocks) = (half.next, half.state_blocks);
        (self, half.records)
    }

    fn read_half<D: Disk>(&self, disk: &D) -> Result<Half, IoFault> {
        let (mut found, mut open) = (Half::default(), None::<BytesMut>);
        for index in 0..self.half_blocks {
            let half = self.generation % 2;
            let Some(block) = self.read_block(disk, half, index, Some(self.generation))? else {
                break;
            };
            if block.flags & SUCCEEDED != 0 {
                found.succeeded_at = Some(index);
                break;
            }
            if block.flags & FIRST != 0 {
                open = Some(BytesMut::new());
            }
            let Some(record) = &mut open else { break };
            record.extend_from_slice(&block.payload);
            if block.flags & LAST != 0
                && let Some(record) = open.take()
            {
                found.records.push(record.freeze());
                found.next = index + 1;
                if found.records.len() == 1 {
                    found.state_blocks = found.next;
                    found.is_ahead = block.flags & AHEAD != 0;
                }
            }
        }
        Ok(found)
    }

    fn block_of(&self, copy: usize, half: u64, index: u32) -> u64 {
        self.starts[copy] + half * u64::from(self.half_blocks) + u64::from(index)
    }

    /// A block that is good in either copy, of this generation, or of the newer one of the two
    /// copies: where one of them lost a write it shows the state before.
    fn read_block<D: Disk>(
        &self,
        disk: &D,
        half: u64,
        index: u32,
        generation: Option<u64>,
    ) -> Result<Option<RingBlock>, IoFault> {
        let mut buffer = vec![0; BLOCK_SIZE];
        let (mut refused, mut is_older) = (None, false);
        let mut newest: Option<RingBlock> = None;
        for copy in 0..2 {
            let offset = self.block_of(copy, half, index) * BLOCK_SIZE as u64;
            if let Err(fault) = disk.read_at(offset, &mut buffer) {
                refused = Some(fault);
                continue;
            }
            let Some(block) = RingBlock::decode(&buffer) else {
                is_older |= buffer.iter().all(|byte| *byte == 0);
                continue;
            };
            if block.index != index || block.generation % 2 != half {
                continue;
            }
            if generation.is_none_or(|wanted| wanted == block.generation) {
                let first = mutant::is("older-copy-of-the-ring-believed");
                if newest.as_ref().is_none_or(|n| n.generation < block.generation && !first) {
                    newest = Some(block);
                }
            } else {
                is_older = true;
            }
        }
        if newest.is_some() {
            return Ok(newest);
        }
        // A copy that shows the old contents proves that nothing was written.
        match refused {
            Some(fault) if !is_older && !mutant::is("refused-copy-ends-the-ring") => Err(fault),
            _ => Ok(None),
        }
    }

    /// The place of these blocks of the records that count, in one copy, and how many of them there
    /// are; `None`: none.
    pub fn used(&self, copy: usize, first: u32, blocks_max: u32) -> Option<(u64, u32)> {
        let blocks = self.next.saturating_sub(first).min(blocks_max);
        (blocks > 0 && copy < self.starts.len())
            .then(|| (self.block_of(copy, self.generation % 2, first), blocks))
    }

    /// Whether these are the bytes of this block of the records that count.
    pub fn is_block(&self, index: u32, bytes: &[u8]) -> bool {
        let block = RingBlock::decode(bytes);
        block.is_some_and(|block| (block.generation, block.index) == (self.generation, index))
    }

    /// Whether a copy of this block is good on media.
    pub fn is_good_copy<D: Disk>(&self, disk: &D, copy: usize, index: u32) -> bool {
        let mut bytes = vec![0; BLOCK_SIZE];
        let offset = self.block_of(copy, self.generation % 2, index) * BLOCK_SIZE as u64;
        disk.forget_cached(offset, BLOCK_SIZE as u64);
        disk.read_at(offset, &mut bytes).is_ok() && self.is_block(index, &bytes)
    }

    /// Appends a record to both copies; `Ok(false)`: no room, restate first.
    pub fn append<D: Disk>(&mut self, disk: &D, record: &[u8]) -> Result<bool, StoreError> {
        let blocks = blocks_of(record);
        if self.next + blocks + NOTE_BLOCKS > self.half_blocks {
            return Ok(false);
        }
        self.put(disk, (self.generation, self.next), record, 0)?;
        self.next += blocks;
        if let Some(ahead) = &mut self.ahead {
            ahead.since.extend_from_slice(record);
        }
        Ok(true)
    }

    fn put<D: Disk>(
        &self,
        disk: &D,
        (generation, first): (u64, u32),
        record: &[u8],
        flags: u8,
    ) -> Result<(), StoreError> {
        let bytes = encode(record, generation, first, flags);
        for copy in 0..2 {
            write(disk, self.block_of(copy, generation % 2, first), &bytes)?;
        }
        Ok(())
    }

    /// Notes in the half in use that the other one takes over: its state is on media.
    fn note_successor<D: Disk>(&self, disk: &D) -> Result<(), StoreError> {
        // A ring that was just formatted has no half in use.
        match self.next < self.half_blocks && !mutant::is("switch-of-the-ring-not-noted") {
            true => self.put(disk, (self.generation, self.next), &[], SUCCEEDED),
            false => Ok(()),
        }
    }

    /// A generation for this state, of the half that is not in use: above all that are known. After a
    /// start it is one that no unfinished state has, unless it is the same state: blocks of two states
    /// under one generation would be taken for one, and records behind the first for those of both.
    fn next_generation(&self, state: &[u8]) -> u64 {
        let is_safe =
            !self.has_leftovers || mutant::is("generation-of-an-unfinished-state-used-again");
        let leap = match is_safe {
            true => 0,
            false => LEAP_MIN + 2 * u64::from(quoin_types::crc32c(state) % LEAPS),
        };
        // A number near the end of all numbers is an image's that somebody made up.
        let next = self.generation_max.max(self.generation).saturating_add(1 + leap);
        if next % 2 == self.generation % 2 { next.checked_add(1).unwrap_or(next - 1) } else { next }
    }

    /// Writes the whole state to the other half, durably.
    pub fn restate<D: Disk>(&mut self, disk: &D, state: &[u8]) -> Result<(), StoreError> {
        if state.len() > self.capacity() {
            return Err(StoreError::RingFull);
        }
        let generation = self.next_generation(state);
        if self.counts_with.is_some() {
            disk.sync().map_err(StoreError::Io)?;
        }
        if let Some(at) = self.void_note_at {
            self.remove_note(disk, at)?;
        }
        (self.generation_max, self.ahead) = (generation, None);
        self.put(disk, (generation, 0), state, 0)?;
        disk.sync().map_err(StoreError::Io)?;
        self.note_successor(disk)?;
        self.in_use(generation, blocks_of(state), 0);
        Ok(())
    }

    fn in_use(&mut self, generation: u64, state_blocks: u32, more_blocks: u32) {
        (self.generation, self.next) = (generation, state_blocks + more_blocks);
        (self.state_blocks, self.ahead_failed) = (state_blocks, false);
        (self.void_note_at, self.counts_with) = (None, None);
        self.has_leftovers = false;
    }

    /// Whether the state is to be written ahead now: half of the room behind the state is used.
    pub fn is_restatement_due(&self) -> bool {
        let (room, left) = (self.half_blocks - self.state_blocks, self.half_blocks - self.next);
        let may = self.ahead.is_none() && !self.ahead_failed && self.void_note_at.is_none();
        may && self.counts_with.is_none() && left < room / 2
    }

    /// Writes the whole state to the other half, which is in use once [`Ring::synced`] gets the
    /// ticket `with`.
    pub fn restate_ahead<D: Disk>(
        &mut self,
        disk: &D,
        state: &[u8],
        with: SyncTicket,
    ) -> Result<(), StoreError> {
        let (generation, next) = (self.next_generation(state), blocks_of(state));
        if next + NOTE_BLOCKS >= self.half_blocks {
            self.ahead_failed = true;
            return Ok(());
        }
        self.generation_max = generation;
        self.put(disk, (generation, 0), state, AHEAD)?;
        self.ahead = Some(Ahead { generation, next, with, since: Vec::new() });
        Ok(())
    }

    /// Everything up to this ticket is on media. `request` makes a ticket for what is written then.
    pub fn synced<D: Disk>(
        &mut self,
        disk: &D,
        ticket: SyncTicket,
        request: impl FnOnce() -> SyncTicket,
    ) -> Result<(), StoreError> {
        self.counts_with = self.counts_with.filter(|with| *with > ticket);
        let Some(ahead) = self.ahead.take_if(|ahead| ahead.with <= ticket) else { return Ok(()) };
        let mut since = &ahead.since[..];
        if mutant::is("records-behind-a-state-ahead-left-out") {
            since = &[];
        }
        let more = blocks_of(since);
        if ahead.next + more + NOTE_BLOCKS > self.half_blocks {
            self.ahead_failed = true;
            return Ok(());
        }
        self.note_successor(disk)?;
        self.put(disk, (ahead.generation, ahead.next), since, 0)?;
        self.in_use(ahead.generation, ahead.next, more);
        self.counts_with = Some(request());
        Ok(())
    }

    /// Removes the note of a switch that does not count: once the newer state is written over, it
    /// would say that a state was whole which never was.
    fn remove_note<D: Disk>(&self, disk: &D, at: u32) -> Result<(), StoreError> {
        if mutant::is("note-of-a-switch-that-does-not-count-kept") {
            return Ok(());
        }
        for copy in 0..2 {
            write(disk, self.block_of(copy, self.generation % 2, at), &[0; BLOCK_SIZE])?;
        }
        disk.sync().map_err(StoreError::Io)
    }
}

fn write<D: Disk>(disk: &D, block: u64, bytes: &[u8]) -> Result<(), StoreError> {
    disk.write_at(block * BLOCK_SIZE as u64, &[IoSlice::new(bytes)]).map_err(StoreError::Io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDisk;
    use crate::format::superblock::FormatOptions;
    use quoin_types::PoolId;

    fn ring() -> (MemoryDisk, Superblock, Ring) {
        let disk = MemoryDisk::new(16 << 20);
        let options = FormatOptions { unit_blocks: 16, ..FormatOptions::new(PoolId(1)) };
        let superblock = Superblock::new(disk.size(), &options).expect("a fit pool");
        let ring = Ring::format(&disk, &superblock).expect("a ring");
        (disk, superblock, ring)
    }

    #[test]
    fn records_come_back_in_order_through_many_turns_and_the_loss_of_one_copy() {
        let (disk, superblock, mut ring) = ring();
        let mut expected = vec![];
        for i in 0..500u32 {
            let record = vec![i as u8; 1 + (i as usize * 37) % 9000];
            if !ring.append(&disk, &record).expect("a write") {
                let state = vec![0xee; 5000];
                ring.restate(&disk, &state).expect("a restatement");
                expected = vec![state];
                assert!(ring.append(&disk, &record).expect("a write"));
            }
            expected.push(record);
            let (_, found) = Ring::open(&disk, &superblock).expect("a ring");
            assert_eq!(found, expected);
        }
        for block in 0..u64::from(superblock.ring_blocks) {
            disk.rot((superblock.rings()[0] + block) * BLOCK_SIZE as u64 + 100, 3);
        }
        let (_, found) = Ring::open(&disk, &superblock).expect("the mirror");
        assert_eq!(found, expected);
    }

    #[test]
    fn an_open_reads_what_is_in_use_and_not_the_ring() {
        let disk = MemoryDisk::new(4 << 30);
        let superblock = Superblock::new(disk.size(), &FormatOptions::new(PoolId(1)));
        let superblock = superblock.expect("a fit pool");
        assert_eq!(superblock.ring_blocks, 2048);
        let mut ring = Ring::format(&disk, &superblock).expect("a ring");
        for round in 0..4 {
            ring.restate(&disk, &counted(round)).expect("a restatement");
            for _ in 0..100 {
                assert!(ring.append(&disk, &[1; 100]).expect("a write"));
            }
            let before = disk.reads();
            let (_, found) = Ring::open(&disk, &superblock).expect("a ring");
            let reads = disk.reads() - before;
            assert_eq!(found.len(), 101);
            assert!(reads < 2 * (103 + 4), "{reads} reads in round {round}");
        }
        // The newer half is lost: the older one says so itself.
        let lost = disk.fork();
        let start = u64::from(superblock.ring_blocks / 2) * (ring.generation % 2);
        for ring in superblock.rings() {
            lost.rot((ring + start) * BLOCK_SIZE as u64 + 100, 3);
        }
        let before = lost.reads();
        assert!(matches!(Ring::open(&lost, &superblock), Err(PoolError::MetadataLost)));
        let reads = lost.reads() - before;
        assert!(reads < 2 * (103 + 4), "{reads} reads of what was lost");
    }

    /// A state that says how many records there were, in three blocks.
    fn counted(count: u64) -> Vec<u8> {
        count.to_le_bytes().repeat(1200)
    }

    /// Number of records in a ring, which are numbered: states and records must form one sequence.
    fn count(found: &[Bytes]) -> u64 {
        let numbers = |bytes: &Bytes| -> Vec<u64> {
            bytes.chunks(8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes"))).collect()
        };
        let state = numbers(&found[0]);
        assert!(state.len() == 1200 && state.iter().all(|n| *n == state[0]), "a whole state");
        let all = found[1..].iter().flat_map(numbers);
        all.fold(state[0], |count, number| {
            assert_eq!(number, count + 1, "a record is missing or stands twice");
            number
        })
    }

    fn write_and_cut_power(seed: u64) {
        let mut state = seed;
        let mut below = |limit: u64| {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ (mixed >> 31)) % limit
        };
        let (disk, superblock, mut ring) = ring();
        ring.restate(&disk, &counted(0)).expect("a restatement");
        let (mut last, mut acknowledged, mut tickets) = (0, 0, 0);
        let mut under_way = None;
        for _ in 0..400 {
            match below(100) {
                // Records that are appended while a sync is under way are not acknowledged with it.
                0..=19 => match under_way.take() {
                    None => {
                        disk.sync().expect("a sync");
                        under_way = Some((last, SyncTicket(tickets)));
                    }
                    Some((began, ticket)) => {
                        acknowledged = began.max(acknowledged);
                        tickets += 1;
                        let with = SyncTicket(tickets);
                        ring.synced(&disk, ticket, || with).expect("a write");
                    }
                },
                20..=25 => {
                    under_way = None;
                    // An open restates what it finds, and may be cut off at any write of that.
                    loop {
                        disk.power_cut(|| below(2) == 0);
                        let (found, records) = Ring::open(&disk, &superblock).expect("a ring");
                        let back = count(&records);
                        assert!(
                            back >= acknowledged && back <= last,
                            "{back} are back of {acknowledged} to {last}"
                        );
                        (ring, last) = (found, back);
                        disk.fail_after((below(2) == 0).then_some(below(10)));
                        if ring.restate(&disk, &counted(last)).is_ok() {
                            break;
                        }
                    }
                    disk.fail_after(None);
                    acknowledged = last;
                }
                _ => {
                    let many = if below(4) == 0 { 1 + below(6000) } else { 1 };
                    let record: Vec<u8> =
                        (last + 1..=last + many).flat_map(u64::to_le_bytes).collect();
                    last += many;
                    if !ring.append(&disk, &record).expect("a write") {
                        ring.restate(&disk, &counted(last)).expect("a restatement");
                        acknowledged = last;
                    } else if ring.is_restatement_due() {
                        tickets += 1;
                        let with = SyncTicket(tickets);
                        ring.restate_ahead(&disk, &counted(last), with).expect("a write");
                    }
                }
            }
        }
    }

    #[test]
    fn a_power_cut_at_any_moment_of_a_restatement_loses_nothing_that_was_synced() {
        for seed in 0..300 {
            write_and_cut_power(seed);
        }
    }

    #[test]
    fn a_restatement_that_was_cut_off_leaves_the_half_before_it() {
        let (disk, superblock, mut ring) = ring();
        ring.restate(&disk, &[1; 9000]).expect("a restatement");
        disk.fail_after(Some(0));
        assert!(ring.restate(&disk, &[2; 9000]).is_err());
        disk.fail_after(None);
        disk.fail_syncs();
        assert!(ring.restate(&disk, &[2; 9000]).is_err());
        disk.power_cut(|| false);
        let (_, found) = Ring::open(&disk, &superblock).expect("the half before");
        assert_eq!(found, vec![Bytes::from(vec![1; 9000])]);
    }
}
