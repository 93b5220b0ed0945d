//! Whether a pool may serve, as in the product: each start is told to the controller, with a number
//! drawn for it and with the pool's mark, and nobody is let in before the controller has seen it or
//! could not be reached for a while. The controller alone notices that an older state of a disk
//! came back; such a pool serves nobody until a person has given it an empty disk. How the counts
//! are compared, and when a mark is raised, is the product's ([`quoin_replication::recognition`]).
//!
//! A pool that cannot reach the controller for so long serves what it has. Where its disk is an
//! older one that is no promise of the contract, so no run asks it: the word of such a pool, and the
//! answer, come through. What the controller knows of pools is not put back with an old copy of the
//! volume's record, for the same reason.

use quoin_replication::recognition::{MarkSchedule, PoolCounts};

use super::{Event, World};
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, SECOND};
use crate::storage::Outage;

/// As the product's pools do.
const REPORT_EVERY: Instant = 2 * SECOND;
const RECOGNISED_AFTER: Instant = 3 * SECOND;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Recognition {
    Awaited,
    Given,
    Refused,
}

/// How the controller and a pool's starts stand.
pub(crate) struct Starts {
    random: Random,
    /// The newest that the controller was told.
    known: PoolCounts,
    is_rolled_back: bool,
    /// Of the present start.
    nonce: u64,
    marks: MarkSchedule,
    recognition: Recognition,
}

impl Starts {
    pub fn new(seed: u64, pool: usize) -> Self {
        Starts {
            random: Random::new(seed ^ 0x7265_636f_676e_6973 ^ (pool as u64) << 56),
            known: PoolCounts::default(),
            is_rolled_back: false,
            nonce: 0,
            marks: MarkSchedule::default(),
            recognition: Recognition::Awaited,
        }
    }

    pub fn recognition(&self) -> Recognition {
        self.recognition
    }

    /// How often a disk is opened between its image and the day that this is put back.
    pub fn more_starts(&mut self) -> u64 {
        self.random.between(0, 3)
    }

    /// Counts that the controller was told before a disk was put back.
    pub fn told_before(&mut self, counts: PoolCounts) {
        self.known = PoolCounts { nonce: self.random.draw() | 1, ..counts };
    }

    /// Another pool by its disk: the controller makes a new record.
    pub fn of_a_new_disk(&mut self) {
        (self.known, self.is_rolled_back) = (PoolCounts::default(), false);
    }

    /// The controller's part.
    fn judge(&mut self, told: PoolCounts) -> bool {
        self.is_rolled_back |= told.are_older_than(&self.known);
        if !self.is_rolled_back && told.starts != 0 {
            self.known = told.after(&self.known);
        }
        self.is_rolled_back
    }
}

impl World {
    /// A pool's process is there: it says so, and waits to be recognised.
    pub(super) fn pool_began(&mut self, pool: usize, life: u32) {
        let starts = &mut self.pools[pool].starts;
        (starts.nonce, starts.marks) = (starts.random.draw() | 1, MarkSchedule::default());
        starts.recognition = Recognition::Awaited;
        self.schedule.after(RECOGNISED_AFTER, Event::PoolWaited { pool, life });
        self.pool_report(pool, life);
    }

    /// As the product's driver does with each of its reports, whether the controller hears it or
    /// not: what was set aside because the disk refused to read is worked on again.
    pub(crate) fn pool_report(&mut self, pool: usize, life: u32) {
        if !self.is_life(pool, life) {
            return;
        }
        if self.pools[pool].paused {
            return self.schedule.after(REPORT_EVERY, Event::PoolReport { pool, life });
        }
        self.pools[pool].storage.look_again();
        self.plan_idle(pool);
        self.raise_mark(pool);
        let here = &self.pools[pool];
        let pause = if here.storage.is_mark_rising() { REPORT_EVERY / 8 } else { REPORT_EVERY };
        let (starts, mark) = (here.storage.starts(), here.storage.mark());
        let counts = PoolCounts { starts, nonce: here.starts.nonce, mark };
        self.schedule.after(pause, Event::PoolReport { pool, life });
        if let Some(delay) = self.way_to_the_controller(pool, true) {
            self.schedule.after(delay, Event::PoolTold { pool, life, counts });
        }
    }

    fn raise_mark(&mut self, pool: usize) {
        let now = self.local(self.pools[pool].host);
        let here = &mut self.pools[pool];
        let changed = here.storage.has_changed_since_mark();
        if here.starts.marks.is_due(now, here.storage.mark(), changed) {
            here.starts.marks.raised(now);
            // A disk that fails is found by whoever uses it next.
            let _ = here.storage.raise_mark();
            self.plan_sync(pool);
        }
    }

    /// How long a word takes, if it arrives.
    fn way_to_the_controller(&mut self, pool: usize, there: bool) -> Option<Instant> {
        let (here, control) = (self.pools[pool].host, self.control.host);
        let (from, to) = if there { (here, control) } else { (control, here) };
        let blocked = self.network.is_blocked(from, to);
        let is_older = self.pools[pool].rolled_back.is_some();
        let starts = &mut self.pools[pool].starts;
        let lost = self.control.lossy && starts.random.percent(40);
        let mut delay = starts.random.between(50, 2000) * 1000;
        if is_older {
            return Some(delay);
        }
        if self.control.late && starts.random.percent(60) {
            delay += starts.random.between(100, 6000) * MILLISECOND;
        }
        (!blocked && !lost).then_some(delay)
    }

    pub(crate) fn pool_told(&mut self, pool: usize, life: u32, counts: PoolCounts) {
        if !self.is_life(pool, life) {
            return;
        }
        let rolled_back = self.pools[pool].starts.judge(counts);
        if let Some(delay) = self.way_to_the_controller(pool, false) {
            let judged = Event::PoolJudged { pool, life, rolled_back, mark: counts.mark };
            self.schedule.after(delay, judged);
        }
    }

    pub(crate) fn pool_judged(&mut self, pool: usize, life: u32, rolled_back: bool, mark: u64) {
        if !self.is_life(pool, life) {
            return;
        }
        if self.pools[pool].paused {
            let again = Event::PoolJudged { pool, life, rolled_back, mark };
            return self.schedule.after(20 * MILLISECOND, again);
        }
        let starts = &mut self.pools[pool].starts;
        if !rolled_back {
            starts.marks.heard(mark);
        }
        match (starts.recognition, rolled_back) {
            (Recognition::Refused, true) => {}
            (_, false) => starts.recognition = Recognition::Given,
            (_, true) => {
                starts.recognition = Recognition::Refused;
                self.trace.line(self.schedule.now(), || format!("pool {pool} is rolled back"));
                self.end_sessions_of(pool);
                let delay = self.pools[pool].starts.random.between(500, 4000) * MILLISECOND;
                self.schedule.after(delay, Event::PoolWiped { pool });
            }
        }
    }

    /// Nothing was heard of the controller.
    pub(crate) fn pool_waited(&mut self, pool: usize, life: u32) {
        if !self.is_life(pool, life) {
            return;
        }
        let here = &mut self.pools[pool];
        if here.paused || here.rolled_back.is_some() {
            return self.schedule.after(20 * MILLISECOND, Event::PoolWaited { pool, life });
        }
        if here.starts.recognition == Recognition::Awaited {
            here.starts.recognition = Recognition::Given;
        }
    }

    /// A person does what the controller asks for: the pool gets an empty disk.
    pub(crate) fn pool_wiped(&mut self, pool: usize) {
        if self.pools[pool].starts.is_rolled_back {
            self.kill_pool(pool, Outage::Process, MILLISECOND);
            self.replace_disk(pool);
        }
    }

    fn is_life(&self, pool: usize, life: u32) -> bool {
        self.pools[pool].life == life && self.pools[pool].process.is_some()
    }
}
