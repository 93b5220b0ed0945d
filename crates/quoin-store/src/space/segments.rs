//! Space: which units are free, and a replica's segments.

use std::collections::VecDeque;
use std::io::IoSlice;

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, ReplicaGuid, mutant};

use crate::clones::Relatives;
use crate::core::Core;
use crate::disk::Disk;
use crate::format::batch::{Stream, batch_blocks_max, guid_hash};
use crate::format::checkpoint::SegmentState;
use crate::format::record::Record;
use crate::format::segment::segment_header;
use crate::format::superblock::{LARGE_UNITS, Superblock};
use crate::log::flushes::Flushes;
use crate::space::bit_set::BitSet;
use crate::space::ready;
use crate::space::segment_table::Segments;
use crate::space::shares::Shares;
use crate::space::uses::Uses;

/// Volumes of at least this many blocks (16 GiB) take large segments.
const LARGE_FROM_BLOCKS: u64 = 1 << 22;
/// Part of the pool that only Views, deletes, clean-up and map nodes may use, in percent.
const RESERVE_PERCENT: u32 = 7;

/// Divisor: entries that other replicas hold already may take this part of the reserve, and at
/// least `OWED_UNITS_MIN` units.
const OWED_PART: u32 = 4;
const OWED_UNITS_MIN: u32 = 2;

/// Divisor: this part of a pool may stay warm while free, but no more than what is in use. A warm
/// unit keeps its space in the file system, and its cache: writing there again costs a copy. Space
/// that was given back costs finding it, clearing it and noting it down each time.
const WARM_PART: u32 = 4;

/// Units reserved for the cleaner when the backing file system is full.
const WARM_RESERVE_UNITS: u32 = 6;

/// Warm units among which a large segment is looked for.
const WARM_LOOKED_AT: usize = 1024;

/// Free units. Small segments fill groups of eight before they break up another one.
pub struct Allocator {
    free: BitSet,
    units: u32,
    /// Free units whose space was not given back since they were used.
    warm: BitSet,
    /// Aligned groups of eight of which a part is free, and all.
    partial: BitSet,
    whole: BitSet,
    pub reserve_units: u32,
    /// The file system below has little room: only what is warm has its space for sure.
    pub short_below: bool,
    /// The file system below has no room for clients: they get only warm units.
    pub full_below: bool,
    /// Units that are being made ready: the first and how many.
    pub readying: Option<(u32, u32)>,
    /// What is kept for entries that targets have sequenced.
    pub shares: Shares,
    /// Uses of each unit so far.
    pub uses: Uses,
}

/// Room that something may be written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// All there is: what frees space, opens or heals.
    Reserve,
    /// All but the reserve: what a target has sequenced.
    Granted,
    /// Nor what is kept for that: what can come later.
    Spare,
}

impl Allocator {
    pub fn new(units: u32) -> Self {
        let groups = units.div_ceil(LARGE_UNITS);
        let reserve_units = u64::from(units) * u64::from(RESERVE_PERCENT) / 100;
        let mut allocator = Allocator {
            free: BitSet::full(units),
            units,
            warm: BitSet::new(units),
            partial: BitSet::new(groups),
            whole: BitSet::full(groups),
            reserve_units: (reserve_units as u32).max(6).min(units / 3),
            short_below: false,
            full_below: false,
            readying: None,
            shares: Shares::default(),
            uses: Uses::default(),
        };
        if let Some(last) = groups.checked_sub(1) {
            allocator.recount(last);
        }
        allocator
    }

    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        [&self.free, &self.warm, &self.partial, &self.whole].map(BitSet::held_bytes).iter().sum()
    }

    pub fn units(&self) -> u32 {
        self.units
    }

    pub fn free_units(&self) -> u32 {
        self.free.len()
    }

    /// Free units that clients may use.
    pub fn free_for_clients(&self) -> u32 {
        let free = self.free_units().saturating_sub(self.reserve_units);
        if self.short_below { free.min(self.sure_units()) } else { free }
    }

    /// Whether trims and zeroes may take of the reserve: they are the way out of a full pool, but
    /// clean-up needs room to follow them.
    pub fn takes_holes(&self) -> bool {
        self.free_units() > self.reserve_units / 2
    }

    /// Whether targets may sequence them. Those that are on their way then still fit.
    pub fn grants_holes(&self) -> bool {
        let half = self.reserve_units / 2;
        self.free_units() > half + (self.reserve_units - half) / 2
    }

    /// Whether no more is free than is kept for what targets have sequenced.
    pub fn is_tight(&self) -> bool {
        self.free_for_clients() < self.shares.kept_units
    }

    /// Whether entries that other replicas hold may: a quarter of it, and what is left has room
    /// for trims still. What recovery brings is stable soon after, and is folded then.
    pub fn takes_owed(&self) -> bool {
        let part = (self.reserve_units / OWED_PART).max(OWED_UNITS_MIN);
        let floor = self.reserve_units.saturating_sub(part).max(self.reserve_units / 2 + 1);
        self.free_units() > floor
            && (!self.short_below || self.warm_units() > WARM_RESERVE_UNITS / 2)
    }

    /// Warm ones that clients may use.
    pub fn sure_units(&self) -> u32 {
        self.warm.len().saturating_sub(WARM_RESERVE_UNITS)
    }

    /// Whether clients get nothing any more. A pool says that it is short of room before, so that
    /// what is on its way still finds some.
    fn reserve_only(&self) -> bool {
        self.free_units() <= self.reserve_units || (self.full_below && self.sure_units() == 0)
    }

    /// Allocates a unit whose space was not given back.
    pub fn allocate_warm(&mut self) -> Option<u32> {
        let unit = self.warm.first()?;
        self.take(unit, 1).then_some(unit)
    }

    /// Allocates the units of a segment, all of whose space was not given back.
    pub fn allocate_warm_segment(&mut self, large: bool) -> Option<(u32, u32)> {
        if !large {
            return self.allocate_warm().map(|unit| (unit, 1));
        }
        let whole = |first: &u32| {
            first.is_multiple_of(LARGE_UNITS) && self.warm.eight_from(*first) == u8::MAX
        };
        let first = self.warm.iter().take(WARM_LOOKED_AT).find(whole)?;
        self.take(first, LARGE_UNITS).then_some((first, LARGE_UNITS))
    }

    /// Free units whose space was not given back.
    pub fn warm_units(&self) -> u32 {
        self.warm.len()
    }

    fn recount(&mut self, group: u32) {
        self.partial.remove(group);
        self.whole.remove(group);
        match self.free.eight_from(group * LARGE_UNITS) {
            0 => {}
            u8::MAX => self.whole.insert(group),
            _ => self.partial.insert(group),
        }
    }

    /// Marks units as used; false if one of them was used already.
    pub fn take(&mut self, unit: u32, units: u32) -> bool {
        let range = unit..unit.saturating_add(units);
        if units == 0 || !range.clone().all(|unit| self.free.contains(unit)) {
            return false;
        }
        for unit in range {
            self.warm.remove(unit);
            self.free.remove(unit);
            self.recount(unit / LARGE_UNITS);
        }
        true
    }

    pub fn give(&mut self, unit: u32, units: u32) {
        for unit in unit..unit + units {
            debug_assert!(!self.free.contains(unit));
            self.free.insert(unit);
            self.recount(unit / LARGE_UNITS);
        }
    }

    /// Takes back what was written to, which makes it warm.
    pub fn give_warm(&mut self, unit: u32, units: u32) {
        self.give(unit, units);
        (unit..unit + units).for_each(|unit| self.warm.insert(unit));
    }

    /// The last unit of more than may stay warm: its space is to be given back. The first ones are
    /// used again first, so these stay warm for good while as much is in use.
    pub fn to_cool(&self) -> Option<u32> {
        self.warm.last().filter(|_| self.is_too_warm())
    }

    /// The space of a unit is given back.
    pub fn cool(&mut self, unit: u32) {
        self.warm.remove(unit);
    }

    /// Whether more is warm than may stay so.
    pub fn is_too_warm(&self) -> bool {
        let in_use = self.units() - self.free_units();
        self.warm.len() > in_use.min(self.units() / WARM_PART)
    }

    /// Whether a unit is free and was not used since the start, as far as is known.
    pub fn is_cold(&self, unit: u32) -> bool {
        self.free.contains(unit) && !self.warm.contains(unit)
    }

    /// First unit, units, and whether all of them are warm.
    pub fn allocate(&mut self, large: bool) -> Option<(u32, u32, bool)> {
        let found = match large.then(|| self.whole.first()).flatten() {
            Some(group) => (group * LARGE_UNITS, LARGE_UNITS),
            None => {
                let group = self.partial.first().or(self.whole.first())?;
                (self.free.next(group * LARGE_UNITS)?, 1)
            }
        };
        let is_warm = (found.0..found.0 + found.1).all(|unit| self.warm.contains(unit));
        self.take(found.0, found.1);
        Some((found.0, found.1, is_warm))
    }
}

/// A segment in use.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub state: SegmentState,
    /// End of the chain of its batches, for streams that are chained within a segment.
    pub next_index: u64,
    pub previous: u64,
    /// Clients may write here only while more than the reserve is free.
    pub from_reserve: bool,
    /// Blocks from its start that the file system has given space for, as far as is known.
    pub ready_blocks: u32,
    /// Blocks from its start that the disk was told to write out, or writes with a sync.
    pub written_out_blocks: u32,
}

/// How much of a log is made ready at once for small writes with a sync. Each of them would have
/// its file system note down a piece of new space, which costs more syncs than the write's own.
const READY_BLOCKS: u32 = 64;

/// Position of the next batch of the log in its chain.
#[derive(Clone, Copy, Default)]
pub struct LogEnd {
    pub next_index: u64,
    /// The check of the batch before it.
    pub previous: u64,
}

/// A replica's segments. Its clones show blocks in them and own none.
pub struct Family {
    pub guid: ReplicaGuid,
    pub guid_hash: u64,
    pub large: bool,
    pub relatives: Relatives,
    pub segments: Segments,
    pub open: [Option<u32>; 3],
    /// Appends to the log wait for the next sync anyway (durability `media`).
    pub log_waits: bool,
    pub flushes: Flushes,
    /// Segments of the log, oldest first, by sequence number and unit; may name some that are
    /// gone.
    pub log_order: VecDeque<(u64, u32)>,
    pub log_end: LogEnd,
    /// Grows with everything that may make another segment worth emptying.
    pub changes: u64,
}

impl Segment {
    /// A segment of which no more is known than its state.
    pub fn opened(state: SegmentState) -> Self {
        Segment {
            state,
            next_index: 0,
            previous: 0,
            from_reserve: false,
            ready_blocks: 0,
            written_out_blocks: state.used_blocks,
        }
    }

    /// Has the disk write out what was appended, once it is a whole stretch: so a later sync finds
    /// little, and the disk is never idle beside a writer.
    pub fn write_out<D: Disk>(&mut self, core: &Core<D>) {
        let blocks = self.state.used_blocks.saturating_sub(self.written_out_blocks);
        if u64::from(blocks) * BLOCK_SIZE as u64 >= core.options.write_out_bytes {
            self.write_out_rest(core);
        }
    }

    /// Has the disk write out all that was appended.
    pub fn write_out_rest<D: Disk>(&mut self, core: &Core<D>) {
        let blocks = self.state.used_blocks.saturating_sub(self.written_out_blocks);
        if blocks > 0 {
            let first = core.superblock.unit_start(self.state.unit);
            let offset = (first + u64::from(self.written_out_blocks)) * BLOCK_SIZE as u64;
            core.disk.write_out(offset, u64::from(blocks) * BLOCK_SIZE as u64);
            self.written_out_blocks = self.state.used_blocks;
        }
    }

    /// How many blocks behind the next `blocks` are to be made ready with them, which counts them
    /// as such: none behind large writes, whose own space is worth a note.
    pub fn make_ready(&mut self, superblock: &Superblock, blocks: u32) -> u32 {
        let end = self.state.used_blocks + blocks;
        if blocks >= READY_BLOCKS / 4 || end <= self.ready_blocks {
            return 0;
        }
        let whole = self.state.units * superblock.unit_blocks;
        self.ready_blocks = end.next_multiple_of(READY_BLOCKS).min(whole);
        self.ready_blocks - end
    }
}

impl Family {
    pub fn new(guid: ReplicaGuid, volume_blocks: u64, unit_blocks: u32) -> Self {
        Family {
            guid,
            guid_hash: guid_hash(guid),
            large: volume_blocks >= LARGE_FROM_BLOCKS,
            relatives: Relatives::default(),
            segments: Segments::new(unit_blocks),
            open: [None; 3],
            log_waits: false,
            flushes: Flushes::default(),
            log_order: VecDeque::new(),
            log_end: LogEnd::default(),
            changes: 0,
        }
    }

    pub fn open_segment(&self, stream: Stream) -> Option<&Segment> {
        self.segments.busy(self.open[stream as usize]?)
    }

    /// Ends the open segment of a stream. One of the log goes on to change until it is folded.
    pub fn close(&mut self, stream: Stream) {
        let unit = self.open[stream as usize].take();
        if let Some(unit) = unit
            && (stream != Stream::Log || mutant::is("cleaned-above-stable"))
        {
            self.segments.settle(unit);
        }
    }

    /// Blocks left in the open segment of a stream.
    pub fn room(&self, superblock: &Superblock, stream: Stream) -> u32 {
        self.open_segment(stream)
            .map_or(0, |s| s.state.units * superblock.unit_blocks - s.state.used_blocks)
    }

    /// The open segment of a stream with room for `blocks`, opening one where needed.
    pub fn segment_for<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        stream: Stream,
        blocks: u32,
        claim: Claim,
    ) -> Result<&mut Segment, StoreError> {
        let unit_blocks = core.superblock.unit_blocks;
        if blocks > batch_blocks_max(unit_blocks) {
            return Err(StoreError::Rule("a batch larger than a segment of this pool"));
        }
        let reserve_only = core.allocator.reserve_only() && !mutant::is("reserve-given-to-clients");
        if let Some(open) = self.open_segment(stream)
            && open.state.units * unit_blocks - open.state.used_blocks >= blocks
        {
            if open.from_reserve && reserve_only && claim != Claim::Reserve {
                return Err(StoreError::Full);
            }
            let unit = open.state.unit;
            return Ok(self.segments.busy_mut(unit).expect("an open segment is listed"));
        }
        let is_refused = match claim {
            Claim::Reserve => false,
            Claim::Granted => reserve_only,
            Claim::Spare => reserve_only || core.allocator.is_tight(),
        };
        if is_refused {
            return Err(StoreError::Full);
        }
        // A clone may change little for ever.
        let is_small = self.relatives.base.is_some() && self.segments.units() < LARGE_UNITS.into();
        let large = self.large
            && !is_small
            && core.allocator.free_for_clients()
                > 4 * LARGE_UNITS + core.allocator.shares.kept_units;
        let waits = self.log_waits && stream == Stream::Log;
        // A sync of what is written to new space waits for the file system's note of it.
        let is_synced_often =
            (self.log_waits || self.flushes.are_expected()) && stream == Stream::Log;
        ready::take_ready(core);
        let warm_first = is_synced_often && core.disk.notes_space();
        let allocated = core.allocate(large, claim == Claim::Reserve, warm_first);
        let (unit, units, is_warm) = allocated.ok_or(StoreError::Full)?;
        core.sequence += 1;
        let logical = match stream {
            Stream::Log | Stream::Moved => core.logical_of(self.guid).number(units),
            Stream::Nodes => 0,
        };
        let state = SegmentState {
            unit,
            units,
            stream,
            sequence: core.sequence,
            used_blocks: 1,
            live_bytes: 0,
            last_lsn: 0,
            last_index: 0,
            logical,
        };
        let header = segment_header(&core.superblock, self.guid, &state);
        let offset = core.superblock.unit_start(unit) * BLOCK_SIZE as u64;
        let parts = [IoSlice::new(&header)];
        core.will_append(core.superblock.unit_start(unit), 1);
        let mut written = match waits {
            true => core.disk.write_with_sync(offset, &parts, 0).map_err(StoreError::Io),
            false => core.disk.write_at(offset, &parts).map_err(StoreError::Io),
        };
        if written.is_ok() && stream == Stream::Log {
            written = core.record(Record::LogSegment(self.guid, state));
        }
        if let Err(error) = written {
            core.allocator.give(unit, units);
            return Err(error);
        }
        core.logical_of(self.guid).insert(&state);
        let from_reserve = reserve_only;
        let ready_blocks = if is_warm { units * unit_blocks } else { 0 };
        let written_out_blocks = if waits { state.used_blocks } else { 0 };
        let opened = Segment::opened(state);
        let segment = Segment { from_reserve, ready_blocks, written_out_blocks, ..opened };
        if let Some(before) = self.open[stream as usize].and_then(|u| self.segments.busy_mut(u)) {
            before.write_out_rest(core);
        }
        self.close(stream);
        self.open[stream as usize] = Some(unit);
        self.changes += 1;
        if stream == Stream::Log {
            self.log_order.push_back((state.sequence, unit));
        }
        if is_synced_often {
            ready::ready_next(core, large);
        }
        Ok(self.segments.insert(segment))
    }

    /// Bytes that begin at this place, which may be a logical one, are live.
    pub fn add_live<D>(&mut self, core: &Core<D>, place: u64, bytes: u64) {
        if let Some((unit, _)) = self.holder_of(core, place) {
            self.segments.add_live(unit, bytes);
        }
    }

    /// The log's segments that hold batches from `index` on, newest first.
    pub fn log_from(&self, index: u64) -> impl Iterator<Item = &Segment> {
        self.log_order
            .iter()
            .rev()
            .filter_map(|(sequence, unit)| {
                self.segments.busy(*unit).filter(|s| s.state.sequence == *sequence)
            })
            // An open one may hold nothing yet.
            .take_while(move |s| {
                s.state.last_index >= index || self.open.contains(&Some(s.state.unit))
            })
    }

    /// No batch of the log before `index` is needed any more: its segments change no more.
    pub fn forget_log_before(&mut self, index: u64) {
        let open = self.open;
        let is_folded = |s: &&Segment| {
            let state = &s.state;
            state.stream == Stream::Log
                && (state.last_index < index || mutant::is("cleaned-above-stable"))
                && !open.contains(&Some(state.unit))
        };
        let folded: Vec<u32> =
            self.segments.all_busy().filter(is_folded).map(|s| s.state.unit).collect();
        for unit in folded {
            self.segments.settle(unit);
        }
        let segments = &self.segments;
        self.log_order.retain(|(sequence, unit)| {
            segments.busy(*unit).is_some_and(|s| s.state.sequence == *sequence)
        });
        self.changes += 1;
    }

    /// The segment that this was in, by its first unit; and the block of the pool, where that is
    /// known.
    pub fn sub_live<D>(
        &mut self,
        core: &Core<D>,
        place: u64,
        bytes: u64,
    ) -> Option<(u32, Option<u64>)> {
        self.changes += 1;
        let held = self.holder_of(core, place)?;
        self.segments.sub_live(held.0, bytes);
        Some(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_segments_fill_broken_groups_and_large_ones_take_whole_groups() {
        let mut allocator = Allocator::new(36);
        assert_eq!(allocator.allocate(true), Some((0, 8, false)));
        // The last group has four units only: it is used for small ones first.
        assert_eq!(allocator.allocate(false), Some((32, 1, false)));
        assert_eq!(allocator.allocate(true), Some((8, 8, false)));
        allocator.give(8, 8);
        assert_eq!(allocator.free_units(), 27);
        assert!(!allocator.take(0, 1) && !allocator.take(35, 2) && allocator.take(35, 1));
        let mut all = 0;
        while allocator.allocate(false).is_some() {
            all += 1;
        }
        assert_eq!((all, allocator.free_units()), (26, 0));
    }

    fn cool_one(allocator: &mut Allocator) -> Option<u32> {
        let unit = allocator.to_cool()?;
        allocator.cool(unit);
        Some(unit)
    }

    #[test]
    fn few_free_units_stay_warm_and_those_used_again_last_are_given_back() {
        let mut allocator = Allocator::new(16);
        assert_eq!(cool_one(&mut allocator), None, "what was never used has no space to give back");
        assert!(allocator.take(0, 12));
        allocator.give_warm(3, 2);
        allocator.give_warm(0, 3);
        assert!(allocator.take(4, 1), "which is not warm any more");
        assert_eq!(cool_one(&mut allocator), None);
        allocator.give_warm(4, 2);
        assert_eq!([cool_one(&mut allocator), cool_one(&mut allocator)], [Some(5), Some(4)]);
        assert_eq!(cool_one(&mut allocator), None);
        allocator.give_warm(6, 6);
        assert_eq!(allocator.allocate(false), Some((0, 1, true)));
        allocator.give_warm(0, 1);
        let cooled = std::iter::from_fn(|| cool_one(&mut allocator)).count();
        assert_eq!((cooled, allocator.free_units()), (10, 16), "nothing is in use any more");
    }

    #[test]
    fn a_warm_segment_has_all_its_units_used_before_and_none_is_made_up() {
        let mut allocator = Allocator::new(40);
        assert_eq!(allocator.allocate_warm_segment(false), None);
        for unit in 3..20 {
            assert!(allocator.take(unit, 1));
            allocator.give_warm(unit, 1);
        }
        assert_eq!(allocator.warm_units(), 17);
        assert_eq!(allocator.allocate_warm_segment(true), Some((8, 8)));
        assert_eq!(allocator.allocate_warm_segment(true), None, "the other groups are part cold");
        assert_eq!(allocator.allocate_warm_segment(false), Some((3, 1)));
        assert_eq!((allocator.warm_units(), allocator.free_units()), (8, 31));
    }
}
