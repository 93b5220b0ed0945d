//! Looking again for a moment before a thread goes to sleep.
//!
//! To be woken costs more than most waits of a busy data path take: the one who wakes interrupts
//! another core, which leaves its idle state, perhaps by way of a hypervisor. So a thread whose
//! last waits were mostly short looks for up to [`SPIN_MAX`] whether it has work, and gives its
//! core to any other that is ready between two looks. One whose waits are long (an idle volume, a
//! slow disk) goes to sleep at once: an idle Quoin uses no CPU. So does one that gave its core away
//! to somebody who had use for it: where there is more work than cores, none is idle and being
//! woken costs little, while those who sleep find more work at once when they wake.

use std::time::{Duration, Instant};

/// The longest that is looked before a sleep.
const SPIN_MAX: Duration = Duration::from_micros(50);
/// Giving the core away takes so long only if somebody else had use for it.
const GIVEN_AWAY: Duration = Duration::from_micros(10);
/// All of the last waits, of which each counts a sixteenth.
const ALL: u32 = 1024;

/// Whether a thread's waits are short, learnt from them.
#[derive(Debug)]
pub struct Spin {
    /// How many of the last waits were no longer than [`SPIN_MAX`], up to [`ALL`].
    short: u32,
    /// With one core there is nobody to wait for while looking.
    alone: bool,
}

impl Default for Spin {
    fn default() -> Self {
        let cores = std::thread::available_parallelism();
        Spin { short: 0, alone: cores.is_ok_and(|cores| cores.get() == 1) }
    }
}

impl Spin {
    /// Begins a wait that takes no longer than `limit`.
    pub fn begin(&mut self, limit: Option<Duration>) -> Wait<'_> {
        let limit = limit.map_or(SPIN_MAX, |limit| limit.min(SPIN_MAX));
        Wait { spin: self, limit, began: Instant::now(), looked: false, crowded: false }
    }

    fn is_worth_it(&self) -> bool {
        !self.alone && self.short >= ALL / 2
    }

    fn took(&mut self, wait: Duration) {
        let is_short = if wait <= SPIN_MAX { ALL } else { 0 };
        self.short = (15 * self.short + is_short) / 16;
    }
}

/// One wait, from its beginning to its [`Wait::end`].
pub struct Wait<'a> {
    spin: &'a mut Spin,
    limit: Duration,
    began: Instant,
    looked: bool,
    /// Somebody else had use for the core.
    crowded: bool,
}

impl Wait<'_> {
    /// Whether to look (again) before sleeping. Others that are ready have their turn in between.
    pub fn looks(&mut self) -> bool {
        if !self.looked {
            self.looked = self.spin.is_worth_it() && !self.limit.is_zero();
            return self.looked;
        }
        let before = self.began.elapsed();
        rustix::thread::sched_yield();
        let after = self.began.elapsed();
        self.crowded = after - before > GIVEN_AWAY;
        !self.crowded && after < self.limit
    }

    /// Something was found, or the sleep is over.
    pub fn end(self) {
        // What could not take longer teaches nothing.
        if !self.limit.is_zero() {
            let wait = if self.crowded { Duration::MAX } else { self.began.elapsed() };
            self.spin.took(wait);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(waits: impl IntoIterator<Item = u64>) -> Spin {
        let mut spin = Spin { short: 0, alone: false };
        for micros in waits {
            spin.took(Duration::from_micros(micros));
        }
        spin
    }

    /// How often one wait looks that finds nothing, and sleeps then.
    fn looks_in_vain(spin: &mut Spin) -> u32 {
        let mut wait = spin.begin(None);
        let mut looks = 0;
        while wait.looks() {
            looks += 1;
        }
        std::thread::sleep(2 * SPIN_MAX);
        wait.end();
        looks
    }

    #[test]
    fn a_thread_whose_waits_are_long_sleeps_at_once() {
        for mut idle in [after([]), after([1000; 100]), after((0..100).chain([70; 12]))] {
            assert_eq!(looks_in_vain(&mut idle), 0);
        }
    }

    #[test]
    fn a_thread_whose_waits_were_short_looks_for_a_moment_and_then_sleeps() {
        assert!(looks_in_vain(&mut after([5; 16])) > 0);
    }

    #[test]
    fn waits_that_become_long_end_the_looking() {
        let mut busy = after([5; 1000]);
        let in_vain = (0..100).filter(|_| looks_in_vain(&mut busy) > 0).count();
        assert!(in_vain < 16, "looked in {in_vain} of 100 waits in vain");
    }

    #[test]
    fn a_wait_that_may_take_no_time_is_not_looked_in() {
        let mut busy = after([5; 16]);
        assert!(!busy.begin(Some(Duration::ZERO)).looks());
    }

    #[test]
    fn a_core_that_others_have_use_for_ends_the_looking() {
        let mut busy = after([5; 1000]);
        for _ in 0..16 {
            let mut wait = busy.begin(None);
            wait.crowded = true;
            wait.end();
        }
        assert_eq!(looks_in_vain(&mut busy), 0);
    }

    #[test]
    fn on_one_core_nobody_looks() {
        let mut alone = Spin { alone: true, ..after([5; 16]) };
        assert_eq!(looks_in_vain(&mut alone), 0);
    }
}
