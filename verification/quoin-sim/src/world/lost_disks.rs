//! Disks that are lost, or go back to an older state of themselves.

use super::{Event, World};
use crate::schedule::MILLISECOND;
use crate::storage::Outage;

impl World {
    /// An old image of the disk is put back, of an older life of the pool or of the present one. Its
    /// counts show it to the controller: it serves no target, and its replica is made anew under another
    /// GUID on another disk.
    pub(super) fn roll_back_disk(&mut self) -> bool {
        let pool = self.victim();
        let adopted = self.control.record.membership.known.contains(&self.pools[pool].member);
        if !self.is_one_dispensable()
            || self.pools.iter().any(|p| p.cache_lost)
            || self.pools[pool].gone
            || !adopted
        {
            return false;
        }
        let more = self.pools[pool].starts.more_starts();
        let counts = match self.pools[pool].storage.roll_back(more) {
            Ok(Some(counts)) => counts,
            Ok(None) => return false,
            Err(_) => {
                self.kill_pool(pool, Outage::DiskFailed, 300 * MILLISECOND);
                return false;
            }
        };
        self.pools[pool].starts.told_before(counts);
        let in_place = self.processes.is_put_back_in_place();
        let outage = if in_place { Outage::DiskFailed } else { Outage::Process };
        self.kill_pool(pool, outage, 300 * MILLISECOND);
        let there = &mut self.pools[pool];
        there.cache_lost = true;
        there.rolled_back = Some(there.member.guid);
        true
    }

    /// The replica's disk is replaced by an empty one; the pool says so from now on.
    pub(super) fn wipe(&mut self) -> bool {
        let pool = self.victim();
        if !self.is_one_dispensable() || self.pools.iter().any(|p| p.cache_lost) {
            return false;
        }
        if quoin_types::mutant::is("guid-born-twice") {
            return self.wipe_and_make_the_same(pool);
        }
        let there = &mut self.pools[pool];
        let adopted = self.control.record.membership.known.contains(&there.member);
        if there.gone || !adopted || there.storage.delete(there.member.guid).is_err() {
            return false;
        }
        there.gone = true;
        self.kill_pool(pool, Outage::Process, 100 * MILLISECOND);
        let delay = self.random.between(500, 8000) * MILLISECOND / self.setup.haste;
        self.schedule.after(delay, Event::Recreate { pool });
        true
    }

    /// For the mutant: an empty replica takes the name of the one that was lost.
    fn wipe_and_make_the_same(&mut self, pool: usize) -> bool {
        let member = self.pools[pool].member;
        let membership = self.control.record.membership.clone();
        let (identity, meta) = self.setup.newborn(member, true, membership);
        self.kill_pool(pool, Outage::Process, 100 * MILLISECOND);
        let blocks = self.setup.config.volume_blocks;
        let here = &mut self.pools[pool];
        here.starts.of_a_new_disk();
        here.storage.replace(&mut self.random).is_ok()
            && here.storage.create(identity, meta, blocks).is_ok()
    }
}
