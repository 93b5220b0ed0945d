//! Space that no replica needs any more. It is free once the record that gives it up is on media,
//! and later goes back to the file system below. A deleted replica, and one that was rebuilt from
//! nothing, gives up its segments as a whole: they are looked at only as they become free.
//!
//! Both are done a bounded number of units at a time. A file system takes about half a millisecond
//! to give up a unit of 4 MiB, a large replica has tens of thousands of them, and the thread that
//! does it serves every volume of the pool.

use std::collections::VecDeque;

use quoin_types::{BLOCK_SIZE, mutant};

use crate::core::Core;
use crate::disk::Disk;
use crate::space::segment_table::Leaving;

/// Units that become free in one step.
const FREED_A_STEP: u32 = 4096;
/// Units whose space goes back in one step, at most: neighbours, in one call. A file system whose
/// journal is busy may take milliseconds over each call.
const DISCARDED_A_STEP: usize = 8;
/// Units that one step passes over on its way to space that an earlier life left behind.
const SWEPT_A_STEP: u32 = 4096;
/// Free units of which one step asks the disk whether they hold space.
const ASKED_A_STEP: usize = 64;

/// Segments on their way to be free units, and how far the pool was looked through for space that
/// an earlier life did not give back.
pub struct Freed {
    /// The sync that makes the removal durable, the first unit, and how many; in the order of the
    /// syncs.
    waiting: VecDeque<(u64, u32, u32)>,
    /// The same for all segments that a replica gave up at once.
    leaving: VecDeque<(u64, Leaving)>,
    /// Units of all of them: asked for at every turn.
    waiting_units: u32,
    /// Free units below this one hold no space but what is warm.
    swept_units: u32,
}

impl Freed {
    /// `swept_units`: where the disk may hold space of an earlier life.
    pub fn new(swept_units: u32) -> Self {
        Freed { waiting: VecDeque::new(), leaving: VecDeque::new(), waiting_units: 0, swept_units }
    }

    /// These units are free once the sync of `ticket` is done.
    pub fn add(&mut self, ticket: u64, unit: u32, units: u32) {
        let at = self.waiting.partition_point(|(t, ..)| *t <= ticket);
        self.waiting.insert(at, (ticket, unit, units));
        self.waiting_units += units;
    }

    /// All of these segments are free once the sync of `ticket` is done.
    pub fn add_all(&mut self, ticket: u64, segments: Leaving) {
        if segments.units() > 0 {
            self.waiting_units += segments.units();
            let at = self.leaving.partition_point(|(t, _)| *t <= ticket);
            self.leaving.insert(at, (ticket, segments));
        }
    }

    /// Whether something is free by the syncs up to `ticket` that was not made so yet.
    pub fn is_due(&self, ticket: u64) -> bool {
        self.waiting.front().is_some_and(|(t, ..)| *t <= ticket)
            || self.leaving.front().is_some_and(|(t, _)| *t <= ticket)
    }

    /// The next segment that is free by the syncs up to `ticket`.
    fn next(&mut self, ticket: u64) -> Option<(u32, u32)> {
        let waiting = self.waiting.pop_front_if(|(t, ..)| *t <= ticket);
        let (unit, units) = match waiting {
            Some((_, unit, units)) => (unit, units),
            None => {
                let (_, segments) = self.leaving.front_mut().filter(|(t, _)| *t <= ticket)?;
                let next = segments.next();
                if segments.units() == 0 {
                    self.leaving.pop_front();
                }
                next?
            }
        };
        self.waiting_units -= units;
        Some((unit, units))
    }

    /// Units that wait for their sync, or to be made free after it.
    pub fn units(&self) -> u32 {
        self.waiting_units
    }
}

/// Frees some of what the finished syncs allow; whether more is left of it.
pub fn release<D: Disk>(core: &mut Core<D>, ticket: u64) -> bool {
    let mut freed = 0;
    while freed < FREED_A_STEP
        && let Some((unit, units)) = core.freed.next(ticket)
    {
        core.allocator.give_warm(unit, units);
        freed += units;
    }
    core.freed.is_due(ticket)
}

fn gives_back<D: Disk>(core: &Core<D>) -> bool {
    !core.keeps_space() && core.disk.gives_back()
}

/// Returns true if free units hold more space than stays warm, or may hold some of an earlier life.
pub fn discard_due<D: Disk>(core: &Core<D>) -> bool {
    gives_back(core)
        && (core.allocator.is_too_warm() || core.freed.swept_units < core.allocator.units())
}

/// Gives the space of a few free units back.
pub fn discard_some<D: Disk>(core: &mut Core<D>) {
    if !gives_back(core) {
        return;
    }
    let all = mutant::is("space-given-back-in-one-step");
    let most = if all { usize::MAX } else { DISCARDED_A_STEP };
    // The last ones first, so in descending order.
    let mut units: Vec<u32> = Vec::new();
    while units.len() < most
        && let Some(unit) = core.allocator.to_cool()
        && (all || units.last().is_none_or(|last| unit + 1 == *last))
    {
        core.allocator.cool(unit);
        units.push(unit);
    }
    units.reverse();
    if units.is_empty() {
        sweep(core, &mut units);
    }
    let unit_bytes = u64::from(core.superblock.unit_blocks) * BLOCK_SIZE as u64;
    for run in units.chunk_by(|a, b| a + 1 == *b) {
        let offset = core.superblock.unit_start(run[0]) * BLOCK_SIZE as u64;
        core.disk.discard(offset, run.len() as u64 * unit_bytes);
    }
}

/// Looks on for free units with space that was not given back before the last start. They are
/// not warm: a start may have been cut off in the middle of giving them back.
fn sweep<D: Disk>(core: &mut Core<D>, found: &mut Vec<u32>) {
    let units = core.allocator.units();
    let until = core.freed.swept_units.saturating_add(SWEPT_A_STEP).min(units);
    let mut asked = 0;
    while core.freed.swept_units < until && found.len() < DISCARDED_A_STEP && asked < ASKED_A_STEP {
        let unit = core.freed.swept_units;
        core.freed.swept_units += 1;
        if !core.allocator.is_cold(unit) {
            continue;
        }
        asked += 1;
        let start = core.superblock.unit_start(unit) * BLOCK_SIZE as u64;
        let next = core.disk.next_space(start);
        match next.map(|offset| core.superblock.unit_of(offset / BLOCK_SIZE as u64)) {
            Some(Some(at)) if at == unit => {
                if found.last().is_some_and(|last| last + 1 != unit) {
                    core.freed.swept_units = unit;
                    return;
                }
                found.push(unit);
            }
            Some(Some(at)) => core.freed.swept_units = at.max(unit + 1),
            _ => core.freed.swept_units = units,
        }
    }
}

#[cfg(test)]
mod tests {
    use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta};
    use quoin_types::PoolId;

    use super::*;
    use crate::format::batch::Stream;
    use crate::format::checkpoint::SegmentState;
    use crate::space::segments::Segment;
    use crate::{FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

    const UNITS: u32 = 12_000;

    fn segment(unit: u32) -> SegmentState {
        SegmentState {
            unit,
            units: 1,
            stream: Stream::Moved,
            sequence: u64::from(unit) + 1,
            used_blocks: 16,
            live_bytes: u64::from(unit % 13) * BLOCK_SIZE as u64,
            last_lsn: 0,
            last_index: 0,
            logical: 0,
        }
    }

    #[test]
    fn the_segments_of_a_deleted_replica_become_free_a_bounded_number_at_a_time() {
        let disk = MemoryDisk::new(1 << 30);
        let format = FormatOptions { unit_blocks: 16, ..FormatOptions::new(PoolId(1)) };
        Pool::format(&disk, &format).expect("a fit disk");
        let mut pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
        let (identity, guid) = (ReplicaIdentity::default(), ReplicaIdentity::default().guid);
        pool.create(identity, ReplicaMeta::default(), 1 << 20).expect("room");
        let free = |pool: &Pool<MemoryDisk>| pool.core.allocator.free_units();
        let before = free(&pool);
        let replica = pool.replicas.get_mut(&guid).expect("it");
        for unit in 0..UNITS {
            assert!(pool.core.allocator.take(unit, 1));
            match unit % 100 {
                0 => drop(replica.family.segments.insert(Segment::opened(segment(unit)))),
                _ => replica.family.segments.insert_settled(&segment(unit)),
            }
        }
        assert_eq!(pool.delete(guid), Ok(true));
        assert_eq!((free(&pool), pool.core.freed.units()), (before - UNITS, UNITS));
        let ticket = pool.sync_wanted().expect("a delete is to be durable");
        let mut steps = 0;
        let mut last = free(&pool);
        pool.sync_finished(ticket, Ok(())).expect("a sync");
        while last < before {
            let now = free(&pool);
            assert!(now > last && now - last <= FREED_A_STEP, "{} units in a step", now - last);
            (last, steps) = (now, steps + 1);
            pool.background(1).expect("background work");
        }
        assert_eq!((steps, pool.core.freed.units()), (3, 0));
        assert!(!pool.core.freed.is_due(u64::MAX));
    }

    #[test]
    fn space_goes_back_to_the_disk_in_one_call_a_step() {
        let disk = MemoryDisk::new(256 << 20);
        Pool::format(&disk, &FormatOptions::new(PoolId(1))).expect("a fit disk");
        let mut pool = Pool::open(disk.clone(), PoolOptions::default()).expect("a pool");
        let allocator = &mut pool.core.allocator;
        for (unit, units) in [(0, 1), (2, 3), (9, 1), (20, 10)] {
            assert!(allocator.take(unit, units));
            allocator.give_warm(unit, units);
        }
        let unit_bytes = u64::from(pool.core.superblock.unit_blocks) * BLOCK_SIZE as u64;
        let mut given = disk.discarded_bytes();
        let steps = [8, 2, 1, 3, 1].map(|_| {
            discard_some(&mut pool.core);
            let before = std::mem::replace(&mut given, disk.discarded_bytes());
            (given - before) / unit_bytes
        });
        assert_eq!(steps, [8, 2, 1, 3, 1]);
    }
}
