//! The segments of a replica in memory, and which of them clean-up may empty.
//!
//! Segments that still change are few: the open ones, and the log that is not folded. They are
//! kept whole. Each of the others takes 24 bytes, in pages of 256 units.
//!
//! **Candidates.** A segment that no batch is added to any more is in the class of its live
//! percent and its size. Of each page the oldest segment of each class is known, so the oldest of a
//! class is found without a look at the others. A change of a class costs a look at one page. So
//! the choice of the next victim compares one segment for each class, however many there are.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use quoin_types::{BLOCK_SIZE, mutant};

use crate::background::relocation::packed_blocks;
use crate::format::batch::Stream;
use crate::format::checkpoint::SegmentState;
use crate::format::superblock::LARGE_UNITS;
use crate::space::segments::Segment;
use crate::space::table::{NextTable, Recorded, Successor};

/// Live percent (of what a segment can hold, rounded down) above which none is emptied however short
/// space is: at 95, clean-up writes 24 blocks at most for each one gained.
pub const MOST_LIVE_PERCENT: u64 = 95;

/// Units of a page. A large segment lies within one, since it begins at a multiple of its size.
pub const PAGE_UNITS: u32 = 256;
/// Pages looked at in one step of the next table.
const PAGES_A_LOOK: usize = 4096;
/// Times in a row that count when a segment is left alone: it waits for 1,024 commits at most.
const FAILURES_MAX: u32 = 10;

/// Attempts to empty a segment that could not be read.
#[derive(Default)]
struct Failures {
    times: u32,
    /// Commits until it is tried again.
    commits_left: u32,
}

/// Blocks of the largest segment.
const BLOCKS_MAX: u32 = LARGE_UNITS << 16;

/// A segment to which nothing is added any more.
#[derive(Clone, Copy)]
struct Packed {
    sequence: u64,
    live_bytes: u32,
    /// The lowest 8 bits: its first unit within the page. Then flags, the stream in two bits, and
    /// the blocks that were written.
    bits: u32,
    logical: u32,
}

const IS_LARGE: u32 = 1 << 8;
const IS_ASIDE: u32 = 1 << 9;
const STREAM_SHIFT: u32 = 10;
const USED_SHIFT: u32 = 12;
const _: () = assert!(BLOCKS_MAX < 1 << (32 - USED_SHIFT));

impl Packed {
    fn new(state: &SegmentState, is_aside: bool) -> Self {
        let flag = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
        Packed {
            sequence: state.sequence,
            live_bytes: u32::try_from(state.live_bytes).unwrap_or(u32::MAX),
            bits: (state.unit % PAGE_UNITS)
                | flag(state.units == LARGE_UNITS, IS_LARGE)
                | flag(is_aside, IS_ASIDE)
                | (state.stream as u32) << STREAM_SHIFT
                | state.used_blocks.min(BLOCKS_MAX) << USED_SHIFT,
            logical: state.logical,
        }
    }

    fn unit_in_page(self) -> u32 {
        self.bits % PAGE_UNITS
    }

    fn units(self) -> u32 {
        if self.bits & IS_LARGE == 0 { 1 } else { LARGE_UNITS }
    }

    fn stream(self) -> Stream {
        match self.bits >> STREAM_SHIFT & 3 {
            0 => Stream::Log,
            1 => Stream::Moved,
            _ => Stream::Nodes,
        }
    }

    fn is_aside(self) -> bool {
        self.bits & IS_ASIDE != 0
    }

    fn state(self, page: u32) -> SegmentState {
        SegmentState {
            unit: page * PAGE_UNITS + self.unit_in_page(),
            units: self.units(),
            stream: self.stream(),
            sequence: self.sequence,
            used_blocks: self.bits >> USED_SHIFT,
            live_bytes: self.live_bytes.into(),
            // Asked only of log that is not folded.
            last_lsn: 0,
            last_index: 0,
            logical: self.logical,
        }
    }
}

/// Segments that are alike to clean-up, but for their age.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Class {
    pub live_percent: u8,
    /// Some of it is live. A segment with nothing live is free for the asking.
    pub has_live: bool,
    pub is_large: bool,
    pub has_nodes: bool,
}

/// Bytes of data that segments can hold, and that are live in them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held {
    pub capacity: u64,
    pub live: u64,
}

/// Segments that a replica gave up as a whole, and everything that was known of them. Both are let
/// go a little at a time, since they may be millions.
pub struct Leaving {
    busy: BTreeMap<u32, Segment>,
    pages: BTreeMap<u32, Vec<Packed>>,
    classes: BTreeMap<Class, BTreeSet<(u64, u32)>>,
    units: u32,
}

impl Leaving {
    /// Units of those that are left.
    pub fn units(&self) -> u32 {
        self.units
    }

    /// The first unit of another one, and its units.
    pub fn next(&mut self) -> Option<(u32, u32)> {
        let (unit, units) = match self.busy.pop_first() {
            Some((unit, segment)) => (unit, segment.state.units),
            None => self.next_packed()?,
        };
        self.units -= units;
        Some((unit, units))
    }

    fn next_packed(&mut self) -> Option<(u32, u32)> {
        let mut page = self.pages.first_entry()?;
        let entry = page.get_mut().pop()?;
        let unit = page.key() * PAGE_UNITS + entry.unit_in_page();
        if page.get().is_empty() {
            page.remove();
            // With each page no more than it has had.
            for _ in 0..PAGE_UNITS {
                let Some(mut class) = self.classes.first_entry() else { break };
                class.get_mut().pop_first();
                if class.get().is_empty() {
                    class.remove();
                }
            }
        }
        Some((unit, entry.units()))
    }
}

pub struct Segments {
    /// Bytes of data that a small and a large segment can hold.
    capacity: [u64; 2],
    /// Those that change.
    busy: BTreeMap<u32, Segment>,
    /// The others, by page, in the order of their units.
    pages: BTreeMap<u32, Vec<Packed>>,
    /// Sequence number and page of the oldest candidate of each page and class.
    classes: BTreeMap<Class, BTreeSet<(u64, u32)>>,
    /// Sums of all candidates, those that are too full to be emptied included.
    candidates: Held,
    /// Sums of all segments in pages.
    packed_units: u64,
    packed_live: u64,
    /// Segments that could not be read lately.
    aside: BTreeSet<u32>,
    /// How often each of them, and of those that are tried again, was left alone in a row.
    failures: BTreeMap<u32, Failures>,
    /// How often that changed.
    aside_changes: u64,
    /// What the table on disk has of the pages.
    pub recorded: Recorded,
    /// Tables that take its place, by [`Successor`].
    pub next: [Option<NextTable>; 2],
}

impl Segments {
    pub fn new(unit_blocks: u32) -> Self {
        let capacity = |units: u32| {
            (packed_blocks(units.saturating_mul(unit_blocks)) * BLOCK_SIZE as u64).max(1)
        };
        Segments {
            capacity: [capacity(1), capacity(LARGE_UNITS)],
            busy: BTreeMap::new(),
            pages: BTreeMap::new(),
            classes: BTreeMap::new(),
            candidates: Held::default(),
            packed_units: 0,
            packed_live: 0,
            aside: BTreeSet::new(),
            failures: BTreeMap::new(),
            aside_changes: 0,
            recorded: Recorded::default(),
            next: [None, None],
        }
    }

    /// Whether a segment of such a place and size can be.
    pub fn is_possible(unit: u32, units: u32) -> bool {
        units == 1 || (units == LARGE_UNITS && unit.is_multiple_of(LARGE_UNITS))
    }

    /// Bytes of data that a segment of so many units can hold.
    pub fn capacity(&self, units: u32) -> u64 {
        self.capacity[usize::from(units == LARGE_UNITS)]
    }

    /// Bytes that all of them take, entries of trees counted twice: their nodes are half full.
    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        let page = |entries: &Vec<Packed>| {
            2 * size_of::<(u32, Vec<Packed>)>() + entries.capacity() * size_of::<Packed>()
        };
        let pages: usize = self.pages.values().map(page).sum();
        let oldest: usize = self.classes.values().map(BTreeSet::len).sum();
        let busy = self.busy.len() * 2 * size_of::<(u32, Segment)>();
        pages + busy + oldest * 2 * size_of::<(u64, u32)>()
    }

    /// A segment that changes.
    pub fn busy(&self, unit: u32) -> Option<&Segment> {
        self.busy.get(&unit)
    }

    pub fn busy_mut(&mut self, unit: u32) -> Option<&mut Segment> {
        self.busy.get_mut(&unit)
    }

    pub fn all_busy(&self) -> impl Iterator<Item = &Segment> {
        self.busy.values()
    }

    /// Adds a segment that changes.
    pub fn insert(&mut self, segment: Segment) -> &mut Segment {
        self.busy.entry(segment.state.unit).or_insert(segment)
    }

    /// Adds a segment to which nothing is added any more.
    pub fn insert_settled(&mut self, state: &SegmentState) {
        self.recorded.added(state.unit);
        for next in self.next.iter_mut().flatten() {
            next.added(state.unit, state.sequence);
        }
        self.insert_packed(state);
    }

    /// Adds a segment as the table on disk has it.
    pub fn insert_recorded(&mut self, state: &SegmentState) {
        self.insert_packed(state);
    }

    fn insert_packed(&mut self, state: &SegmentState) {
        let packed = Packed::new(state, self.aside.contains(&state.unit));
        let page = state.unit / PAGE_UNITS;
        let entries = self.pages.entry(page).or_default();
        let at = entries.partition_point(|e| e.unit_in_page() < packed.unit_in_page());
        if entries.len() == entries.capacity() {
            // Few bytes for each, where there are many pages.
            entries.reserve_exact((entries.len() / 4).max(1));
        }
        entries.insert(at, packed);
        self.packed_units += u64::from(packed.units());
        self.packed_live += u64::from(packed.live_bytes);
        self.count(packed);
        let before = self.class_of(packed).and_then(|class| self.oldest(page, class, Some(at)));
        self.entered(page, packed, before);
    }

    /// Nothing is added to this segment any more.
    pub fn settle(&mut self, unit: u32) {
        if let Some(segment) = self.busy.remove(&unit) {
            self.insert_settled(&segment.state);
        }
    }

    pub fn remove(&mut self, unit: u32) -> Option<SegmentState> {
        self.aside.remove(&unit);
        self.failures.remove(&unit);
        if let Some(segment) = self.busy.remove(&unit) {
            return Some(segment.state);
        }
        let (page, at) = self.find(unit)?;
        self.recorded.removed(unit);
        let entries = self.pages.get_mut(&page)?;
        let packed = entries.remove(at);
        for next in self.next.iter_mut().flatten() {
            next.removed(unit, packed.sequence);
        }
        if entries.is_empty() {
            self.pages.remove(&page);
        }
        self.packed_units -= u64::from(packed.units());
        self.packed_live -= u64::from(packed.live_bytes);
        self.discount(packed);
        let after = self.class_of(packed).and_then(|class| self.oldest(page, class, None));
        self.left(page, packed, after);
        Some(packed.state(page))
    }

    /// Gives up all of them.
    pub fn leave(self) -> Leaving {
        let busy_units: u32 = self.busy.values().map(|s| s.state.units).sum();
        Leaving {
            units: self.packed_units as u32 + busy_units,
            busy: self.busy,
            pages: self.pages,
            classes: self.classes,
        }
    }

    /// Gives up those that are older than all others. The table on disk is another one from here
    /// on: what the one before has of them is not noted.
    pub fn leave_older(&mut self, first_sequence: u64) -> Leaving {
        let mut older = Segments::new(1);
        let is_old = |segment: &Segment| segment.state.sequence < first_sequence;
        older.busy = self.busy.extract_if(.., |_, segment| is_old(segment)).collect();
        self.aside.retain(|unit| !older.busy.contains_key(unit));
        self.failures.clear();
        for (page, entries) in &mut self.pages {
            let old: Vec<Packed> =
                entries.extract_if(.., |entry| entry.sequence < first_sequence).collect();
            if old.is_empty() {
                continue;
            }
            for entry in &old {
                self.aside.remove(&(page * PAGE_UNITS + entry.unit_in_page()));
            }
            let units: u64 = old.iter().map(|entry| u64::from(entry.units())).sum();
            self.packed_units -= units;
            older.packed_units += units;
            older.pages.insert(*page, old);
        }
        self.pages.retain(|_, entries| !entries.is_empty());
        self.class_anew();
        older.leave()
    }

    /// The first unit of the segment that this unit is in.
    pub fn containing(&self, unit: u32) -> Option<u32> {
        let segment = self.busy.range(..=unit).next_back().map(|(_, segment)| &segment.state);
        if let Some(state) = segment.filter(|state| unit < state.unit + state.units) {
            return Some(state.unit);
        }
        let page = unit / PAGE_UNITS;
        let entries = self.pages.get(&page)?;
        let until = entries.partition_point(|e| e.unit_in_page() <= unit % PAGE_UNITS);
        let entry = entries.get(until.checked_sub(1)?)?;
        (unit % PAGE_UNITS < entry.unit_in_page() + entry.units())
            .then_some(page * PAGE_UNITS + entry.unit_in_page())
    }

    /// A segment by its first unit.
    pub fn state_of(&self, unit: u32) -> Option<SegmentState> {
        let busy = self.busy.get(&unit).map(|segment| segment.state);
        busy.or_else(|| {
            let (page, at) = self.find(unit)?;
            Some(self.pages.get(&page)?.get(at)?.state(page))
        })
    }

    /// The first segment from this unit on.
    pub fn next_from(&self, unit: u32) -> Option<SegmentState> {
        let busy = self.busy.range(unit..).next().map(|(_, segment)| segment.state);
        let first_page = unit / PAGE_UNITS;
        let packed = self.pages.range(first_page..).find_map(|(page, entries)| {
            let from = if *page == first_page { unit % PAGE_UNITS } else { 0 };
            let at = entries.partition_point(|e| e.unit_in_page() < from);
            entries.get(at).map(|e| e.state(*page))
        });
        busy.into_iter().chain(packed).min_by_key(|state| state.unit)
    }

    /// Those to which nothing is added any more, of one page.
    pub fn settled_of(&self, page: u32) -> impl Iterator<Item = SegmentState> + '_ {
        self.pages.get(&page).into_iter().flatten().map(move |e| e.state(page))
    }

    /// Those that the table on disk does not have as they are, in the order of their units.
    pub fn unrecorded(&self) -> Vec<SegmentState> {
        let changed = self.recorded.changed();
        let settled = changed.filter_map(|unit| {
            let (page, at) = self.find(unit)?;
            Some(self.pages.get(&page)?.get(at)?.state(page))
        });
        let busy = self.busy.values().map(|segment| segment.state);
        let mut all: Vec<SegmentState> = settled.chain(busy).collect();
        all.sort_unstable_by_key(|state| state.unit);
        all
    }

    /// Those that a rebuild from nothing wrote and that its table does not have as they are, in the
    /// order of their units.
    pub fn unrecorded_at_flip(&self) -> Vec<SegmentState> {
        let Some(next) = &self.next[Successor::AtFlip as usize] else { return Vec::new() };
        let settled = next.changed().filter_map(|unit| {
            let (page, at) = self.find(unit)?;
            Some(self.pages.get(&page)?.get(at)?.state(page))
        });
        let busy = self.busy.values().map(|segment| segment.state);
        let busy = busy.filter(|state| state.sequence >= next.first_sequence);
        let mut all: Vec<SegmentState> = settled.chain(busy).collect();
        all.sort_unstable_by_key(|state| state.unit);
        all
    }

    /// Notes segments for another table, of pages that were not looked at yet, until these are more
    /// than a record is to have.
    pub fn look_on(&mut self, which: Successor, unrecorded_max: usize) {
        let Some(next) = &mut self.next[which as usize] else { return };
        let mut pages = self.pages.range(next.looked_at..).take(PAGES_A_LOOK);
        while next.changes() <= unrecorded_max {
            let Some((page, entries)) = pages.next() else {
                let behind = self.pages.range(next.looked_at..).next();
                next.looked_at = behind.map_or(u32::MAX, |_| next.looked_at);
                return;
            };
            next.looked_at = page + 1;
            for entry in entries {
                next.added(page * PAGE_UNITS + entry.unit_in_page(), entry.sequence);
            }
        }
    }

    /// Another table takes the place of the one in use.
    pub fn change_tables(&mut self, which: Successor) {
        if let Some(next) = self.next[which as usize].take() {
            self.recorded = next.recorded;
        }
    }

    /// Those to which nothing is added any more, in the order of their units.
    pub fn settled(&self) -> impl Iterator<Item = SegmentState> + '_ {
        let of_pages = self.pages.iter().map(|(page, entries)| (*page, entries));
        of_pages.flat_map(|(page, entries)| entries.iter().map(move |e| e.state(page)))
    }

    /// All of them, in the order of their units.
    pub fn iter(&self) -> impl Iterator<Item = SegmentState> + '_ {
        let mut busy = self.busy.values().map(|segment| segment.state).peekable();
        let mut packed = self.settled().peekable();
        std::iter::from_fn(move || match (busy.peek(), packed.peek()) {
            (Some(changes), Some(rests)) if changes.unit < rests.unit => busy.next(),
            (_, Some(_)) => packed.next(),
            _ => busy.next(),
        })
    }

    pub fn units(&self) -> u64 {
        self.packed_units + self.busy.values().map(|s| u64::from(s.state.units)).sum::<u64>()
    }

    pub fn live_bytes(&self) -> u64 {
        self.packed_live + self.busy.values().map(|s| s.state.live_bytes).sum::<u64>()
    }

    pub fn add_live(&mut self, unit: u32, bytes: u64) {
        self.set_live(unit, |live| live.saturating_add(bytes));
    }

    pub fn sub_live(&mut self, unit: u32, bytes: u64) {
        self.set_live(unit, |live| live.saturating_sub(bytes));
    }

    fn set_live(&mut self, unit: u32, change: impl FnOnce(u64) -> u64) {
        if let Some(segment) = self.busy.get_mut(&unit) {
            segment.state.live_bytes = change(segment.state.live_bytes);
            return;
        }
        self.change(unit, |packed| {
            let live = change(packed.live_bytes.into());
            packed.live_bytes = u32::try_from(live).unwrap_or(u32::MAX);
        });
    }

    /// Gives each segment the live bytes that a count has found for it, if it has.
    pub fn recounted(&mut self, mut counted: impl FnMut(&SegmentState) -> Option<u64>) {
        for segment in self.busy.values_mut() {
            segment.state.live_bytes = counted(&segment.state).unwrap_or(segment.state.live_bytes);
        }
        for (page, entries) in &mut self.pages {
            let (mut drift, whole) = (0, entries.len() as u64 * self.capacity[0]);
            for entry in entries {
                if let Some(live) = counted(&entry.state(*page)) {
                    let live = u32::try_from(live).unwrap_or(u32::MAX);
                    drift += u64::from(live.abs_diff(entry.live_bytes));
                    entry.live_bytes = live;
                }
            }
            if drift > 0 {
                self.recorded.drifted(*page, drift, whole);
                for next in self.next.iter_mut().flatten() {
                    next.drifted(*page, drift, whole);
                }
            }
        }
        self.class_anew();
    }

    // ---- candidates ----------------------------------------------------------------------

    /// Leaves a segment alone, since it could not be read, or not all of it as it was written. Each time
    /// it waits for twice as many commits: what was moved of it each time was for nothing.
    pub fn set_aside(&mut self, unit: u32) {
        self.aside.insert(unit);
        let failures = self.failures.entry(unit).or_default();
        failures.commits_left = 1 << failures.times;
        failures.times = (failures.times + 1).min(FAILURES_MAX);
        self.aside_changes += 1;
        self.change(unit, |packed| packed.bits |= IS_ASIDE);
    }

    /// A commit is done: ends that for those that waited for enough of them.
    pub fn try_some_again(&mut self) {
        let mut due = Vec::new();
        for unit in &self.aside {
            let Some(failures) = self.failures.get_mut(unit) else { continue };
            failures.commits_left = failures.commits_left.saturating_sub(1);
            if failures.commits_left == 0 {
                due.push(*unit);
            }
        }
        self.release(due);
    }

    /// Ends that for all of them: it may have passed.
    pub fn try_again(&mut self) {
        let all = self.aside.iter().copied().collect();
        self.release(all);
    }

    fn release(&mut self, units: Vec<u32>) {
        self.aside_changes += 1;
        for unit in units {
            self.aside.remove(&unit);
            self.change(unit, |packed| packed.bits &= !IS_ASIDE);
        }
    }

    /// Differs whenever other segments are left alone.
    pub fn aside_changes(&self) -> u64 {
        self.aside_changes
    }

    #[cfg(any(test, debug_assertions))]
    pub fn is_aside(&self, unit: u32) -> bool {
        self.aside.contains(&unit)
    }

    /// What all candidates can hold and what is live of it.
    pub fn candidates(&self) -> Held {
        self.candidates
    }

    /// The oldest candidate of each class, those with the least to move first.
    pub fn oldest_of_classes(&self) -> impl Iterator<Item = (Class, SegmentState)> + '_ {
        self.classes.iter().filter_map(|(class, pages)| {
            let (sequence, page) = pages.first()?;
            let entry = self.pages.get(page)?.iter().find(|e| e.sequence == *sequence)?;
            Some((*class, entry.state(*page)))
        })
    }

    /// Live percent of the candidate with the least to move.
    pub fn least_live_percent(&self) -> Option<u8> {
        self.classes.keys().next().map(|class| class.live_percent)
    }

    fn find(&self, unit: u32) -> Option<(u32, usize)> {
        let page = unit / PAGE_UNITS;
        let entries = self.pages.get(&page)?;
        let at = entries.binary_search_by_key(&(unit % PAGE_UNITS), |e| e.unit_in_page()).ok()?;
        Some((page, at))
    }

    /// Class of a candidate; none of one that is never emptied.
    fn class_of(&self, packed: Packed) -> Option<Class> {
        let live = u64::from(packed.live_bytes);
        let live_percent = (live * 100 / self.capacity(packed.units())).min(100);
        (live_percent <= MOST_LIVE_PERCENT && !packed.is_aside()).then_some(Class {
            live_percent: live_percent as u8,
            has_live: live > 0,
            is_large: packed.units() == LARGE_UNITS,
            has_nodes: packed.stream() == Stream::Nodes,
        })
    }

    /// Live bytes of the segments of a class.
    fn live_of(&self, class: Class) -> Range<u64> {
        let capacity = self.capacity[usize::from(class.is_large)];
        let from = |percent: u64| (percent * capacity).div_ceil(100);
        match (class.live_percent, class.has_live) {
            (_, false) => 0..1,
            (0, true) => 1..from(1),
            (percent, true) => from(percent.into())..from(u64::from(percent) + 1),
        }
    }

    /// Sequence number of the oldest segment of a class in a page, but for one of them.
    fn oldest(&self, page: u32, class: Class, without: Option<usize>) -> Option<u64> {
        let live = self.live_of(class);
        let entries = self.pages.get(&page)?.iter().enumerate();
        let of_class = entries.filter(|(at, e)| {
            live.contains(&u64::from(e.live_bytes))
                && e.bits & (IS_LARGE | IS_ASIDE) == if class.is_large { IS_LARGE } else { 0 }
                && (e.stream() == Stream::Nodes) == class.has_nodes
                && without != Some(*at)
        });
        of_class.map(|(_, e)| e.sequence).min()
    }

    fn change(&mut self, unit: u32, change: impl FnOnce(&mut Packed)) {
        let Some((page, at)) = self.find(unit) else { return };
        let Some(entry) = self.pages.get_mut(&page).and_then(|entries| entries.get_mut(at)) else {
            return;
        };
        let before = *entry;
        change(entry);
        let after = *entry;
        self.packed_live -= u64::from(before.live_bytes);
        self.packed_live += u64::from(after.live_bytes);
        self.discount(before);
        self.count(after);
        let drift = before.live_bytes.abs_diff(after.live_bytes);
        if drift > 0 {
            let whole = self.pages.get(&page).map_or(0, |entries| entries.len() as u64);
            self.recorded.drifted(page, drift.into(), whole * self.capacity[0]);
            for next in self.next.iter_mut().flatten() {
                next.drifted(page, drift.into(), whole * self.capacity[0]);
            }
        }
        let (was, is) = (self.class_of(before), self.class_of(after));
        if was != is {
            let others = was.and_then(|class| self.oldest(page, class, Some(at)));
            self.left(page, before, others);
            let others = is.and_then(|class| self.oldest(page, class, Some(at)));
            self.entered(page, after, others);
        }
    }

    fn count(&mut self, packed: Packed) {
        if !packed.is_aside() {
            self.candidates.capacity += self.capacity(packed.units());
            self.candidates.live += u64::from(packed.live_bytes);
        }
    }

    fn discount(&mut self, packed: Packed) {
        if !packed.is_aside() {
            self.candidates.capacity -= self.capacity(packed.units());
            self.candidates.live -= u64::from(packed.live_bytes);
        }
    }

    /// A segment joined its class, of whose others in this page the oldest is `others`.
    fn entered(&mut self, page: u32, packed: Packed, others: Option<u64>) {
        let Some(class) = self.class_of(packed) else { return };
        if mutant::is("candidate-forgotten-by-its-class") && !packed.sequence.is_multiple_of(4) {
            return;
        }
        if others.is_none_or(|oldest| packed.sequence < oldest) {
            let pages = self.classes.entry(class).or_default();
            if let Some(oldest) = others {
                pages.remove(&(oldest, page));
            }
            pages.insert((packed.sequence, page));
        }
    }

    /// A segment left its class, of whose others in this page the oldest is `others`.
    fn left(&mut self, page: u32, packed: Packed, others: Option<u64>) {
        let Some(class) = self.class_of(packed) else { return };
        if others.is_none_or(|oldest| packed.sequence < oldest)
            && let Some(pages) = self.classes.get_mut(&class)
        {
            pages.remove(&(packed.sequence, page));
            pages.extend(others.map(|oldest| (oldest, page)));
            if pages.is_empty() {
                self.classes.remove(&class);
            }
        }
    }

    /// Makes classes and sums from the segments.
    fn class_anew(&mut self) {
        self.classes.clear();
        (self.candidates, self.packed_live) = (Held::default(), 0);
        for (page, entries) in std::mem::take(&mut self.pages) {
            let mut oldest = BTreeMap::<Class, u64>::new();
            for entry in &entries {
                self.packed_live += u64::from(entry.live_bytes);
                self.count(*entry);
                if let Some(class) = self.class_of(*entry) {
                    let known = oldest.entry(class).or_insert(entry.sequence);
                    *known = entry.sequence.min(*known);
                }
            }
            for (class, sequence) in oldest {
                self.classes.entry(class).or_default().insert((sequence, page));
            }
            self.pages.insert(page, entries);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNIT_BLOCKS: u32 = 32;

    fn state(unit: u32, units: u32, sequence: u64, live_bytes: u64) -> SegmentState {
        SegmentState {
            unit,
            units,
            stream: if sequence.is_multiple_of(3) { Stream::Nodes } else { Stream::Moved },
            sequence,
            used_blocks: units * UNIT_BLOCKS,
            live_bytes,
            last_lsn: 0,
            last_index: 0,
            logical: sequence as u32,
        }
    }

    /// By a pass over all: the oldest of each class.
    fn oldest_of_all(segments: &Segments) -> Vec<(Class, u64)> {
        let mut oldest = BTreeMap::<Class, u64>::new();
        for s in segments.iter().filter(|s| !segments.is_aside(s.unit)) {
            let percent = (s.live_bytes * 100 / segments.capacity(s.units)).min(100);
            if percent <= MOST_LIVE_PERCENT {
                let (live_percent, has_live) = (percent as u8, s.live_bytes > 0);
                let (is_large, has_nodes) = (s.units > 1, s.stream == Stream::Nodes);
                let class = Class { live_percent, has_live, is_large, has_nodes };
                let known = oldest.entry(class).or_insert(s.sequence);
                *known = s.sequence.min(*known);
            }
        }
        oldest.into_iter().collect()
    }

    fn check(segments: &Segments, model: &BTreeMap<u32, SegmentState>) {
        assert!(segments.iter().eq(model.values().copied()));
        assert_eq!(segments.live_bytes(), model.values().map(|s| s.live_bytes).sum::<u64>());
        assert_eq!(segments.units(), model.values().map(|s| u64::from(s.units)).sum::<u64>());
        let found: Vec<_> =
            segments.oldest_of_classes().map(|(class, s)| (class, s.sequence)).collect();
        assert_eq!(found, oldest_of_all(segments));
        let candidates = model.values().filter(|s| !segments.is_aside(s.unit));
        let (capacity, live) =
            candidates.fold((0, 0), |(c, l), s| (c + segments.capacity(s.units), l + s.live_bytes));
        assert_eq!(segments.candidates(), Held { capacity, live });
    }

    #[test]
    fn a_segment_that_cannot_be_emptied_waits_for_twice_as_many_commits_each_time() {
        let mut segments = Segments::new(UNIT_BLOCKS);
        for expected in [1, 2, 4, 8] {
            segments.set_aside(3);
            let waited = (1..100).find(|_| {
                segments.try_some_again();
                !segments.is_aside(3)
            });
            assert_eq!(waited, Some(expected));
        }
        segments.set_aside(3);
        segments.try_again();
        assert!(!segments.is_aside(3), "a look at all ends it at once");
    }

    proptest! {
        #[test]
        fn the_oldest_of_each_class_is_known_whatever_changes(
            steps in prop::collection::vec((0u8..8, 0u32..80, 0u64..35), 1..300),
        ) {
            let mut segments = Segments::new(UNIT_BLOCKS);
            let mut model = BTreeMap::<u32, SegmentState>::new();
            // Ages are not in the order of the units.
            let mut sequence = 1 << 32;
            for (kind, place, blocks) in steps {
                let (large, bytes) = (place % 3 == 0, blocks * BLOCK_SIZE as u64);
                let (unit, units) = if large { (place * 8, 8) } else { (place * 8 + 5, 1) };
                let bytes = if large { 8 * bytes } else { bytes };
                let known = model.contains_key(&unit);
                match kind {
                    0..=2 if !known => {
                        sequence += 1;
                        let (live_bytes, age) = (bytes, sequence ^ 7);
                        let state = state(unit, units, age, live_bytes);
                        segments.insert(Segment::opened(state));
                        prop_assert_eq!(segments.state_of(unit), Some(state));
                        segments.settle(unit);
                        model.insert(unit, state);
                    }
                    3 => prop_assert_eq!(segments.remove(unit), model.remove(&unit)),
                    4 if known => segments.set_aside(unit),
                    5 if place < 8 => segments.try_again(),
                    6 if place < 4 => {
                        segments.recounted(|s| (s.unit % 2 == 0).then_some(s.live_bytes / 2));
                        for s in model.values_mut().filter(|s| s.unit % 2 == 0) {
                            s.live_bytes /= 2;
                        }
                    }
                    _ => {
                        segments.sub_live(unit, bytes / 3);
                        if let Some(s) = model.get_mut(&unit) {
                            s.live_bytes = s.live_bytes.saturating_sub(bytes / 3);
                        }
                    }
                }
                check(&segments, &model);
                let inside = unit + units / 2;
                prop_assert_eq!(segments.containing(inside), model.get(&unit).map(|s| s.unit));
                let next = model.range(inside..).next().map(|(_, s)| *s);
                prop_assert_eq!(segments.next_from(inside), next);
            }
        }
    }

    #[test]
    fn a_settled_segment_takes_24_bytes_and_keeps_all_but_its_place_in_the_log() {
        assert_eq!(size_of::<Packed>(), 24);
        let largest = SegmentState {
            used_blocks: BLOCKS_MAX,
            live_bytes: u64::from(BLOCKS_MAX) * BLOCK_SIZE as u64,
            ..state(248, LARGE_UNITS, u64::MAX, 0)
        };
        for stream in [Stream::Log, Stream::Moved, Stream::Nodes] {
            let state = SegmentState { stream, last_lsn: 7, last_index: 9, ..largest };
            let mut segments = Segments::new(1 << 16);
            segments.insert_settled(&state);
            let kept = SegmentState { last_lsn: 0, last_index: 0, ..state };
            assert_eq!(segments.state_of(248), Some(kept));
        }
    }
}
