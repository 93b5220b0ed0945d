//! Starts of a pool: whether it may serve, and what its replicas claim of their caches. What a pool
//! tells of a start, when it lets targets in, when it raises its mark and what its next process
//! finds is decided by the product's own code ([`quoin_replication::pool_host`]); how the controller
//! compares the counts, too. A pool that is found to be in an older state serves no target until a
//! person has given it an empty disk.
//!
//! A pool that cannot reach the controller for so long serves what it has. Where its disk is an
//! older one that is no promise of the contract, so no run asks it: the word of such a pool, and the
//! answer, come through. What the controller knows of pools is not put back with an old copy of the
//! volume's record, for the same reason.

use quoin_replication::pool_host::recognition::{AWAITED_MAX, Change, Recognition, Start};
use quoin_replication::pool_host::restart::{Claims, File};
use quoin_replication::recognition::PoolCounts;
use quoin_replication::replica::store::BootCookie;

use super::{Event, World};
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, SECOND};
use crate::storage::Outage;

/// As the product's pools do.
const REPORT_EVERY: Instant = 2 * SECOND;
/// Between the numbers of two processes of a pool.
const NUMBERS_APART: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// State of a pool that outlives its processes, with the counts of its starts at the controller.
pub(crate) struct Starts {
    random: Random,
    /// The newest that the controller was told.
    known: PoolCounts,
    is_rolled_back: bool,
    start: Start,
    claims: Claims,
    /// The number in the file that the pool keeps in the memory of its host.
    kept: Option<u128>,
    /// Processes of the pool: each draws another number.
    processes: u128,
    /// Its process ended after its disk failed: the next start is another process.
    process_ended: bool,
}

impl Starts {
    pub fn new(seed: u64, pool: usize) -> Self {
        let (claims, _) = Claims::at_start(Some(0), 0);
        Starts {
            random: Random::new(seed ^ 0x7265_636f_676e_6973 ^ (pool as u64) << 56),
            known: PoolCounts::default(),
            is_rolled_back: false,
            start: Start::new(Recognition::Awaited, 1),
            claims,
            kept: None,
            processes: 0,
            process_ended: false,
        }
    }

    pub fn recognition(&self) -> Recognition {
        self.start.recognition()
    }

    /// The cookie of a cache, as the replicas compare it.
    pub fn cookie(&self, cache: BootCookie) -> BootCookie {
        self.claims.cookie(cache)
    }

    /// A process begins, or goes on with a pool whose disk failed. True: the claims of its replicas
    /// have to be withdrawn on media before it answers anything.
    pub fn begins(&mut self, outage: Outage) -> bool {
        // A loss of power empties the memory too, or its host was not restarted: a file system that
        // was mounted anew lost as much. The harder case is drawn.
        let ended = std::mem::take(&mut self.process_ended);
        if outage != Outage::DiskFailed || ended {
            self.processes += 1;
            // Far apart, as drawn ones are: caches have cookies like 1, 2 and 3 here.
            let fresh = self.processes.wrapping_mul(NUMBERS_APART);
            let (claims, file) = Claims::at_start(self.kept, fresh);
            self.claims = claims;
            self.change(file);
            self.start = Start::new(Recognition::Awaited, 1);
        }
        self.claims.must_withdraw()
    }

    /// The pool is open, and what had to be withdrawn is.
    pub fn opened(&mut self) {
        let file = self.claims.withdrawn();
        self.change(file);
    }

    /// The disk failed; `ends`: so did the process, before it could open the pool anew.
    pub fn disk_failed(&mut self, ends: bool) {
        let file = self.claims.disk_failed();
        self.change(file);
        self.process_ended |= ends;
    }

    fn change(&mut self, file: File) {
        match file {
            File::Leave => {}
            File::Keep => self.kept = Some(self.claims.number()),
            File::Remove => self.kept = None,
        }
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
        self.start = Start::new(Recognition::Awaited, 1);
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
        let recognition = starts.recognition().after_disk_failure(Recognition::Awaited);
        starts.start = Start::new(recognition, starts.random.draw() | 1);
        let awaited = AWAITED_MAX.as_nanos() as Instant;
        self.schedule.after(awaited, Event::PoolWaited { pool, life });
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
        let counts = here.starts.start.counts(starts, mark);
        self.schedule.after(pause, Event::PoolReport { pool, life });
        if let Some(delay) = self.way_to_the_controller(pool, true) {
            self.schedule.after(delay, Event::PoolTold { pool, life, counts });
        }
    }

    fn raise_mark(&mut self, pool: usize) {
        let now = self.local(self.pools[pool].host);
        let here = &mut self.pools[pool];
        let changed = here.storage.has_changed_since_mark();
        if here.starts.start.raises_mark(now, here.storage.mark(), changed) {
            // The next use of a failed disk finds the failure.
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
            return Some(delay + self.processes.report_takes());
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
        let start = &mut self.pools[pool].starts.start;
        // An answer about a former start ends with its life.
        let nonce = start.counts(0, 0).nonce;
        if start.answered(rolled_back, nonce, mark) == Change::ShutOut {
            self.trace.line(self.schedule.now(), || format!("pool {pool} is rolled back"));
            self.end_sessions_of(pool);
            let delay = self.pools[pool].starts.random.between(500, 4000) * MILLISECOND;
            self.schedule.after(delay, Event::PoolWiped { pool });
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
        let _ = here.starts.start.waited();
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
