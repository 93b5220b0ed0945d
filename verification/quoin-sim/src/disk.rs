//! A disk with a volatile cache: what is written is seen at once and on the media only after a
//! sync that began later; a power cut keeps any part of the rest.
//!
//! Every write since the last completed sync is remembered. When the power goes, each 512-byte
//! sector becomes what any of those writes, or none, left there: lost, torn and reordered writes
//! in one rule. A failed sync leaves pages that look written and will never be (as Linux does):
//! they are seen until the kernel drops them, which it may at any reopening. What the store asked
//! to be written with the next sync is lost with the process too, whole or in part.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use bytes::Bytes;
use quoin_replication::replica::store::{BootCookie, IoFault};
use quoin_store::disk::fetch::Fetch;
use quoin_store::disk::{Disk, Syncer};
use quoin_store::{CacheIdentity, Mounted};
use quoin_types::BLOCK_SIZE;

use crate::content::{SECTOR, SECTORS};
use crate::map::FixedMap;
use crate::random::Random;

/// One block's bytes, which the cache, the media and an image of the disk share until one changes.
type Page = Arc<[u8]>;

static ZEROES: LazyLock<Page> = LazyLock::new(|| Arc::from([0; BLOCK_SIZE]));

/// Contents of a disk by page; a page that was never written is zeroes.
#[derive(Clone, Default)]
struct Pages(Vec<Option<Page>>);

impl Pages {
    fn get(&self, number: u64) -> Option<&Page> {
        self.0.get(number as usize)?.as_ref()
    }

    /// Returns the former page.
    fn set(&mut self, number: u64, page: Option<Page>) -> Option<Page> {
        let place = number as usize;
        if self.0.len() <= place {
            self.0.resize(place + 1, None);
        }
        std::mem::replace(&mut self.0[place], page)
    }

    /// The pages that were written, in order.
    fn written(&self) -> impl Iterator<Item = (u64, &Page)> {
        let pages = (0..).zip(&self.0);
        pages.filter_map(|(number, page)| Some((number, page.as_ref()?)))
    }
}

/// Pages that are kept to be written again: the allocator's way takes as long as the copy.
const SPARE_MAX: usize = 256;

/// `errno` of a failing medium.
const EIO: i32 = 5;
const EINVAL: i32 = 22;

/// A page with writes that no completed sync covers.
struct Dirty {
    /// On the media; `None` reads as zeroes.
    media: Option<Page>,
    /// The writes since, oldest first, by their numbers.
    writes: Vec<(u64, Page)>,
    /// A sync failed: no later sync writes these any more.
    orphaned: bool,
}

impl Dirty {
    /// How many of the writes a sync that began at `mark` puts on the media.
    fn covered(&self, mark: u64) -> usize {
        if self.orphaned {
            return 0;
        }
        self.writes.iter().take_while(|(n, _)| *n <= mark).count()
    }

    /// The first so many writes are on the media; whether that is all of them. What they were
    /// written over is spare.
    fn reached_the_media(&mut self, covered: usize, spare: &mut Vec<Page>) -> bool {
        for (_, page) in self.writes.drain(..covered) {
            let over = self.media.replace(page);
            if spare.len() < SPARE_MAX {
                spare.extend(over);
            }
        }
        self.writes.is_empty()
    }
}

/// Which operations fail from now on.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Failing {
    pub reads: bool,
    pub writes: bool,
    pub syncs: bool,
}

/// Fate of a write that the disk reports as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    Lost,
    Misdirected,
}

/// Counters of power cuts, failed syncs and slow reads.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct DiskCounts {
    pub sectors_lost: u64,
    pub pages_torn: u64,
    pub errors: u64,
    /// Reads that requests waited for.
    pub reads_waited_for: u64,
    /// Parts of increments and repairs that waited for reads.
    pub changes_waited: u64,
}

impl DiskCounts {
    pub fn merge(&mut self, other: &Self) {
        self.sectors_lost += other.sectors_lost;
        self.pages_torn += other.pages_torn;
        self.errors += other.errors;
        self.reads_waited_for += other.reads_waited_for;
        self.changes_waited += other.changes_waited;
    }
}

#[derive(Default)]
struct State {
    pages: Pages,
    dirty: FixedMap<u64, Dirty>,
    /// Writes that only the writing process holds: their numbers, and their pages'.
    held: Vec<(u64, u64)>,
    written: u64,
    boot: u128,
    /// Times that the cache was lost.
    mount: u64,
    failing: Failing,
    /// Fate of the next write, and the random number that selects its place.
    lie: Option<(Lie, u64)>,
    image: Option<Pages>,
    /// Reads that the pool's thread waited for since they were last asked for.
    blocked_reads: u64,
    /// Chance that decides what the kernel has cached, and the percent of reads that it has not.
    uncached: Option<(Random, u64)>,
    /// Pages that are not referenced any more, for reuse.
    spare: Vec<Page>,
    counts: DiskCounts,
}

impl State {
    /// A page of these bytes.
    fn page(&mut self, bytes: &[u8]) -> Page {
        while let Some(mut page) = self.spare.pop() {
            if let Some(room) = Arc::get_mut(&mut page) {
                room.copy_from_slice(bytes);
                return page;
            }
        }
        Arc::from(bytes)
    }
}

/// Clones are the same disk, as two descriptors are.
#[derive(Clone)]
pub struct SimDisk {
    size: u64,
    state: Arc<Mutex<State>>,
}

/// How a power cut chooses among unsynced writes.
#[derive(Clone, Copy, Debug)]
enum Survival {
    Nothing,
    Everything,
    /// Writes before one instant: a cache that kept its order.
    Prefix(u64),
    /// Page by page.
    Pages,
    /// Sector by sector.
    Sectors,
}

impl SimDisk {
    pub fn new(size: u64, boot: u128) -> Self {
        let state = State { boot, ..State::default() };
        Self { size, state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn counts(&self) -> DiskCounts {
        self.state().counts
    }

    pub fn set_failing(&self, failing: Failing) {
        self.state().failing = failing;
    }

    pub fn failing(&self) -> Failing {
        self.state().failing
    }

    /// So many of a hundred reads have to wait for the medium from now on.
    pub fn set_uncached(&self, chance: Random, percent: u64) {
        self.state().uncached = Some((chance, percent));
    }

    /// Reads of a cold disk that the pool's thread waited for, since the last call.
    pub fn take_blocked_reads(&self) -> u64 {
        std::mem::take(&mut self.state().blocked_reads)
    }

    /// A read without a waiting caller.
    pub fn fetch_beside(&self, fetch: &Fetch) -> Result<Bytes, IoFault> {
        let before = self.state().blocked_reads;
        let read = self.fetch(fetch);
        self.state().blocked_reads = before;
        read
    }

    /// The next write is not done where it should be.
    pub fn lie(&self, lie: Lie, chance: u64) {
        self.state().lie = Some((lie, chance));
    }

    /// Remembers what is on the media.
    pub fn keep_image(&self) {
        let mut state = self.state();
        let mut image = state.pages.clone();
        for (number, dirty) in &state.dirty {
            image.set(*number, dirty.media.clone());
        }
        state.image = Some(image);
    }

    /// The disk is again what it was; false if no image was kept.
    pub fn roll_back(&self) -> bool {
        let mut state = self.state();
        let Some(image) = state.image.take() else { return false };
        state.pages = image;
        state.dirty.clear();
        state.held.clear();
        state.boot += 1;
        true
    }

    /// A sync that covers all writes until now begins; ends with [`SimDisk::end_sync`].
    pub fn begin_sync(&self) -> u64 {
        self.state().written
    }

    /// Ends a sync: writes up to `mark` are on the media or, if it failed, perhaps never will be.
    pub fn end_sync(&self, mark: u64, random: &mut Random) -> Result<(), IoFault> {
        let mut state = self.state();
        let held_before = state.held.len();
        state.held.retain(|(n, _)| *n > mark);
        let wrote_held = state.held.len() < held_before;
        let failed = state.failing.syncs || (state.failing.writes && wrote_held);
        if !failed {
            let State { dirty, spare, .. } = &mut *state;
            dirty.retain(|_, dirty| !dirty.reached_the_media(dirty.covered(mark), spare));
            return Ok(());
        }
        // Chance is asked for in an order that does not depend on the map's.
        let mut numbers: Vec<u64> = state.dirty.keys().copied().collect();
        numbers.sort_unstable();
        let state = &mut *state;
        for number in numbers {
            let Some(dirty) = state.dirty.get_mut(&number) else { continue };
            let covered = dirty.covered(mark);
            if covered == 0 {
                continue;
            }
            if random.percent(60) {
                dirty.orphaned = covered == dirty.writes.len();
            } else if dirty.reached_the_media(covered, &mut state.spare) {
                state.dirty.remove(&number);
            }
        }
        state.counts.errors += 1;
        Err(IoFault { operation: "sync", offset: 0, errno: EIO })
    }

    /// The cache is lost, and of what was not synced whatever chance left is there: the power went,
    /// or, every other time, the device was detached and attached and its file system mounted anew
    /// within one boot.
    pub fn power_cut(&self, random: &mut Random) {
        let mut state = self.state();
        state.held.clear();
        let survival = match random.below(6) {
            0 => Survival::Nothing,
            1 => Survival::Everything,
            2 => {
                let oldest = state.dirty.values().filter_map(|d| d.writes.first()).map(|w| w.0);
                let oldest = oldest.min().unwrap_or(0);
                Survival::Prefix(random.between(oldest.saturating_sub(1), state.written))
            }
            3 => Survival::Pages,
            _ => Survival::Sectors,
        };
        let mut dirty: Vec<(u64, Dirty)> = state.dirty.drain().collect();
        dirty.sort_unstable_by_key(|(number, _)| *number);
        for (number, dirty) in dirty {
            let count = dirty.writes.len();
            let whole = match survival {
                Survival::Nothing | Survival::Sectors => 0,
                Survival::Everything => count,
                Survival::Prefix(last) => dirty.writes.iter().take_while(|w| w.0 <= last).count(),
                Survival::Pages => random.index(count + 1),
            };
            let whole = if dirty.orphaned { 0 } else { whole };
            let media = dirty.media.unwrap_or_else(|| ZEROES.clone());
            let version = |v: usize| if v == 0 { &media } else { &dirty.writes[v - 1].1 };
            let mut page = [0; BLOCK_SIZE];
            let (mut lost, mut kept) = (0, 0);
            for sector in 0..SECTORS {
                let chosen = match survival {
                    Survival::Sectors if !dirty.orphaned => random.index(count + 1),
                    _ => whole,
                };
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                page[range.clone()].copy_from_slice(&version(chosen)[range]);
                if chosen == count { kept += 1 } else { lost += 1 }
            }
            state.counts.sectors_lost += lost;
            state.counts.pages_torn += u64::from(lost > 0 && kept > 0);
            state.pages.set(number, Some(Arc::from(page)));
        }
        state.mount += 1;
        state.boot += u128::from(state.mount % 2);
        state.failing = Failing::default();
    }

    /// The writing process is dead: of what it held for the next sync some may have been written.
    pub fn drop_held(&self, random: &mut Random) {
        let mut state = self.state();
        let mut numbers: Vec<u64> = state.held.drain(..).map(|(_, page)| page).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let survival = random.below(3);
        for number in numbers {
            let Some(dirty) = state.dirty.get_mut(&number) else { continue };
            let mut page = [0; BLOCK_SIZE];
            let whole = random.index(dirty.writes.len() + 1);
            for sector in 0..SECTORS {
                let chosen = match survival {
                    0 => 0,
                    1 => whole,
                    _ => random.index(dirty.writes.len() + 1),
                };
                let range = sector * SECTOR..(sector + 1) * SECTOR;
                let version = match chosen {
                    0 => dirty.media.as_ref(),
                    n => Some(&dirty.writes[n - 1].1),
                };
                if let Some(version) = version {
                    page[range.clone()].copy_from_slice(&version[range]);
                }
            }
            let last = dirty.writes.last().map_or(0, |(n, _)| *n);
            let page: Page = Arc::from(page);
            dirty.writes = vec![(last, page.clone())];
            state.pages.set(number, Some(page));
        }
    }

    /// Everything that was not synced is gone and the boot is the same: for a mutant.
    pub fn forget(&self) {
        let mut state = self.state();
        state.held.clear();
        let dirty = std::mem::take(&mut state.dirty);
        for (number, dirty) in dirty {
            state.pages.set(number, dirty.media.or_else(|| Some(ZEROES.clone())));
        }
    }

    /// The kernel drops pages that a failed sync left behind: all of them, or any.
    pub fn drop_orphans(&self, all: bool, random: &mut Random) {
        let mut state = self.state();
        let mut numbers: Vec<u64> =
            state.dirty.iter().filter(|(_, d)| d.orphaned).map(|(n, _)| *n).collect();
        numbers.sort_unstable();
        for number in numbers {
            if all || random.percent(50) {
                let media = state.dirty.remove(&number).and_then(|d| d.media);
                state.counts.sectors_lost += SECTORS as u64;
                state.pages.set(number, media.or_else(|| Some(ZEROES.clone())));
            }
        }
    }

    /// The pages behind those that `length` says begin a run of so many.
    pub fn runs(&self, length: impl Fn(&[u8]) -> u64) -> BTreeSet<u64> {
        let state = self.state();
        let runs = state.pages.written().map(|(number, page)| (number, length(page)));
        runs.flat_map(|(number, length)| number + 1..=number + length).collect()
    }

    /// Flips one bit of a random written page that passes `choose`; returns its number.
    pub fn rot(&self, random: &mut Random, choose: impl Fn(u64, &[u8]) -> bool) -> Option<u64> {
        let mut state = self.state();
        let pages = state.pages.written();
        let clean = pages.filter(|(n, page)| !state.dirty.contains_key(n) && choose(*n, page));
        let numbers: Vec<u64> = clean.map(|(number, _)| number).collect();
        if numbers.is_empty() {
            return None;
        }
        let number = *random.pick(&numbers);
        let bit = random.index(BLOCK_SIZE * 8);
        let mut page = state.pages.get(number).expect("picked among them").to_vec();
        page[bit / 8] ^= 1 << (bit % 8);
        state.pages.set(number, Some(Arc::from(page)));
        Some(number)
    }

    fn take(&self, offset: u64, parts: &[IoSlice<'_>], held: bool) -> Result<(), IoFault> {
        let total: usize = parts.iter().map(|p| p.len()).sum();
        self.check("write", offset, total)?;
        let mut state = self.state();
        let state = &mut *state;
        let mut offset = offset;
        if let Some((lie, chance)) = state.lie.take() {
            if lie == Lie::Lost {
                return Ok(());
            }
            let last = (self.size - total as u64) / BLOCK_SIZE as u64;
            offset = chance % (last + 1) * BLOCK_SIZE as u64;
        }
        let mut parts = parts.iter().map(|p| &p[..]);
        let mut part: &[u8] = &[];
        for number in (offset / BLOCK_SIZE as u64..).take(total / BLOCK_SIZE) {
            while part.is_empty() {
                part = parts.next().expect("the lengths were added up");
            }
            let page: Page = if let Some((whole, rest)) = part.split_at_checked(BLOCK_SIZE) {
                part = rest;
                state.page(whole)
            } else {
                let mut page = [0; BLOCK_SIZE];
                let mut filled = 0;
                while filled < BLOCK_SIZE {
                    if part.is_empty() {
                        part = parts.next().expect("the lengths were added up");
                        continue;
                    }
                    let take = part.len().min(BLOCK_SIZE - filled);
                    page[filled..filled + take].copy_from_slice(&part[..take]);
                    part = &part[take..];
                    filled += take;
                }
                state.page(&page)
            };
            state.written += 1;
            if held {
                state.held.push((state.written, number));
            }
            let before = state.pages.set(number, Some(page.clone()));
            let dirty = state.dirty.entry(number).or_insert_with(|| Dirty {
                media: before,
                writes: Vec::new(),
                orphaned: false,
            });
            dirty.orphaned = false;
            dirty.writes.push((state.written, page));
        }
        Ok(())
    }

    fn check(&self, operation: &'static str, offset: u64, length: usize) -> Result<(), IoFault> {
        let aligned = offset.is_multiple_of(BLOCK_SIZE as u64) && length.is_multiple_of(BLOCK_SIZE);
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= self.size);
        if aligned && inside { Ok(()) } else { Err(IoFault { operation, offset, errno: EINVAL }) }
    }
}

impl Disk for SimDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.check("read", offset, buffer.len())?;
        let mut state = self.state();
        if state.failing.reads {
            state.counts.errors += 1;
            return Err(IoFault { operation: "read", offset, errno: EIO });
        }
        state.blocked_reads += u64::from(state.uncached.is_some());
        for (number, chunk) in (offset / BLOCK_SIZE as u64..).zip(buffer.chunks_mut(BLOCK_SIZE)) {
            match state.pages.get(number) {
                Some(page) => chunk.copy_from_slice(page),
                None => chunk.fill(0),
            }
        }
        Ok(())
    }

    fn read_media(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.read_at(offset, buffer)?;
        let state = self.state();
        for (number, chunk) in (offset / BLOCK_SIZE as u64..).zip(buffer.chunks_mut(BLOCK_SIZE)) {
            match state.dirty.get(&number).filter(|dirty| dirty.orphaned) {
                Some(Dirty { media: Some(media), .. }) => chunk.copy_from_slice(&media[..]),
                Some(_) => chunk.fill(0),
                None => {}
            }
        }
        Ok(())
    }

    fn may_lack(&self) -> bool {
        self.state().uncached.is_some()
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, IoFault> {
        let waits = |(chance, percent): &mut (Random, u64)| chance.percent(*percent);
        {
            let mut state = self.state();
            if state.uncached.as_mut().is_some_and(waits) {
                state.counts.reads_waited_for += 1;
                return Ok(false);
            }
        }
        let before = self.state().blocked_reads;
        let read = self.read_at(offset, buffer).map(|()| true);
        self.state().blocked_reads = before;
        read
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
        if self.state().failing.writes {
            self.state().counts.errors += 1;
            return Err(IoFault { operation: "write", offset, errno: EIO });
        }
        self.take(offset, parts, false)
    }

    /// The sync reports the disk's faults.
    fn write_with_sync(
        &self,
        offset: u64,
        parts: &[IoSlice<'_>],
        _spare: usize,
    ) -> Result<(), IoFault> {
        self.take(offset, parts, true)
    }

    fn sync(&self) -> Result<(), IoFault> {
        let mark = self.begin_sync();
        self.end_sync(mark, &mut Random::new(mark))
    }

    fn syncer(&self) -> Syncer {
        let disk = self.clone();
        Box::new(move || disk.sync())
    }

    fn write_out(&self, _offset: u64, _length: u64) {}

    fn discard(&self, offset: u64, length: u64) {
        let mut state = self.state();
        for number in offset / BLOCK_SIZE as u64..(offset + length) / BLOCK_SIZE as u64 {
            let page = state.pages.set(number, None);
            state.dirty.remove(&number);
            if state.spare.len() < SPARE_MAX {
                state.spare.extend(page);
            }
        }
        let pages = offset / BLOCK_SIZE as u64..(offset + length) / BLOCK_SIZE as u64;
        state.held.retain(|(_, page)| !pages.contains(page));
    }

    fn cookie(&self) -> BootCookie {
        let state = self.state();
        let mount = Some(Mounted::Numbered(state.mount));
        CacheIdentity { boot: state.boot, mount, ..CacheIdentity::default() }.cookie()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(disk: &SimDisk, number: u64, byte: u8) {
        let page = [byte; BLOCK_SIZE];
        disk.write_at(number * BLOCK_SIZE as u64, &[IoSlice::new(&page)]).unwrap();
    }

    fn read(disk: &SimDisk, number: u64) -> [u8; BLOCK_SIZE] {
        let mut page = [0; BLOCK_SIZE];
        disk.read_at(number * BLOCK_SIZE as u64, &mut page).unwrap();
        page
    }

    #[test]
    fn a_power_cut_never_touches_what_a_sync_covered() {
        for seed in 0..200 {
            let disk = SimDisk::new(1 << 20, 1);
            write(&disk, 0, 1);
            disk.sync().unwrap();
            disk.power_cut(&mut Random::new(seed));
            assert_eq!(read(&disk, 0), [1; BLOCK_SIZE]);
        }
    }

    #[test]
    fn a_power_cut_loses_keeps_tears_and_reorders_what_is_unsynced() {
        let (mut lost, mut kept, mut torn, mut reordered) = (0, 0, 0, 0);
        for seed in 0..300 {
            let disk = SimDisk::new(1 << 20, 1);
            let mark = disk.begin_sync();
            write(&disk, 0, 1);
            write(&disk, 0, 2);
            write(&disk, 1, 3);
            disk.end_sync(mark, &mut Random::new(seed)).unwrap();
            disk.power_cut(&mut Random::new(seed));
            let (a, b) = (read(&disk, 0), read(&disk, 1));
            for sector in a.chunks(SECTOR) {
                assert!(sector.iter().all(|x| *x == sector[0]), "a sector is never torn");
            }
            lost += u32::from(a == [0; BLOCK_SIZE]);
            kept += u32::from(a == [2; BLOCK_SIZE]);
            torn += u32::from(a.iter().any(|x| *x != a[0]));
            reordered += u32::from(a == [0; BLOCK_SIZE] && b == [3; BLOCK_SIZE]);
        }
        assert!(lost > 10 && kept > 10 && torn > 10 && reordered > 2);
    }

    #[test]
    fn a_write_that_came_after_the_sync_began_is_not_covered_by_it() {
        let mut lost = 0;
        for seed in 0..50 {
            let disk = SimDisk::new(1 << 20, 1);
            write(&disk, 0, 1);
            let mark = disk.begin_sync();
            write(&disk, 0, 2);
            disk.end_sync(mark, &mut Random::new(seed)).unwrap();
            disk.power_cut(&mut Random::new(seed));
            let page = read(&disk, 0);
            assert!(page.iter().all(|b| *b == 1 || *b == 2));
            lost += u32::from(page == [1; BLOCK_SIZE]);
        }
        assert!(lost > 5);
    }

    #[test]
    fn what_waits_for_a_sync_can_be_lost_with_the_process_and_nothing_else_can() {
        let mut lost = 0;
        for seed in 0..100 {
            let disk = SimDisk::new(1 << 20, 1);
            let mark = disk.begin_sync();
            disk.write_with_sync(0, &[IoSlice::new(&[1; BLOCK_SIZE])], 0).unwrap();
            write(&disk, 1, 2);
            disk.end_sync(mark, &mut Random::new(seed)).unwrap();
            assert_eq!(read(&disk, 0), [1; BLOCK_SIZE], "reads see it at once");
            disk.drop_held(&mut Random::new(seed));
            assert_eq!(read(&disk, 1), [2; BLOCK_SIZE]);
            lost += u32::from(read(&disk, 0) == [0; BLOCK_SIZE]);
        }
        assert!((20..80).contains(&lost), "{lost} of 100");
    }

    #[test]
    fn a_failed_sync_is_not_healed_by_the_next_one() {
        let mut dropped = 0;
        for seed in 0..50 {
            let disk = SimDisk::new(1 << 20, 1);
            write(&disk, 0, 1);
            disk.set_failing(Failing { syncs: true, ..Failing::default() });
            let mut random = Random::new(seed);
            let mark = disk.begin_sync();
            assert!(disk.end_sync(mark, &mut random).is_err());
            disk.set_failing(Failing::default());
            assert_eq!(read(&disk, 0), [1; BLOCK_SIZE], "the cache still shows it");
            disk.sync().unwrap();
            disk.power_cut(&mut random);
            dropped += u32::from(read(&disk, 0) == [0; BLOCK_SIZE]);
        }
        assert!(dropped > 10, "a retried sync says yes and the data is gone all the same");
    }
}
