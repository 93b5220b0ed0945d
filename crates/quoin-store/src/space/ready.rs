//! Space made ready ahead of logs whose writes wait for their sync (durability `media`).
//!
//! A file system notes down each first write to a place, and a sync waits for the note: two more
//! writes, one after the other, beside the one that was asked for. Measured with three processes
//! on one disk, appends of 33 blocks each with a sync: 590 µs on space that was only allocated,
//! 233 µs where something was written before. So such a log writes to units that were used before
//! where there are some, and while it fills one, the next is filled with zeros on another thread.
//! A unit belongs to no log until that is done, and is just a free one after a crash.

use quoin_types::BLOCK_SIZE;

use crate::core::Core;
use crate::disk::Disk;
use crate::format::superblock::LARGE_UNITS;

/// With so many free units that were used before nothing is made ready; of large segments so many
/// times more.
const WARM_UNITS: u32 = 2;

impl<D: Disk> Core<D> {
    /// Makes the unit that is ready free, as a used one.
    pub fn take_ready(&mut self) {
        let Some((unit, units)) = self.allocator.readying else { return };
        match self.disk.made_ready() {
            None => return,
            Some(true) => self.allocator.give_warm(unit, units),
            Some(false) => self.allocator.give(unit, units),
        }
        self.allocator.readying = None;
    }

    /// Begins to make ready what a log needs next, where room is plenty.
    pub fn ready_next(&mut self, large: bool) {
        let warm_enough = WARM_UNITS * if large { LARGE_UNITS } else { 1 };
        if self.allocator.readying.is_some()
            || !self.disk.notes_space()
            || self.allocator.warm_units() >= warm_enough
            || self.allocator.short_below
            || self.allocator.free_for_clients() <= 4 * LARGE_UNITS
        {
            return;
        }
        let Some((unit, units, is_warm)) = self.allocate(large, false, false) else { return };
        if is_warm {
            return self.allocator.give_warm(unit, units);
        }
        let offset = self.superblock.unit_start(unit) * BLOCK_SIZE as u64;
        let length = u64::from(units) * u64::from(self.superblock.unit_blocks) * BLOCK_SIZE as u64;
        match self.disk.make_ready(offset, length) {
            true => self.allocator.readying = Some((unit, units)),
            false => self.allocator.give(unit, units),
        }
    }
}
