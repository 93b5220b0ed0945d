//! Polling for a moment before a thread sleeps.
//!
//! Waking a thread costs more than most waits of a busy data path: the waker interrupts another
//! core, which leaves its idle state, perhaps through a hypervisor. So a thread whose last waits
//! were mostly short polls for work for up to [`SPIN_MAX`], and yields its core to any other ready
//! thread between two polls. A thread whose waits are long (an idle volume, a slow disk) sleeps at
//! once: an idle Quoin uses no CPU. So does a thread that yielded its core to one that used it:
//! with more work than cores, none is idle and waking costs little, while a thread that sleeps
//! finds more work at once when it wakes.

use std::time::{Duration, Instant};

/// Longest time of polling before a sleep.
const SPIN_MAX: Duration = Duration::from_micros(50);
/// A yield takes this long only if another thread used the core.
const GIVEN_AWAY: Duration = Duration::from_micros(10);
/// Weight of all last waits; each counts a sixteenth.
const ALL: u32 = 1024;

/// Estimate of whether a thread's waits are short, from its last waits.
#[derive(Debug)]
pub struct Spin {
    /// Share of the last waits that were no longer than [`SPIN_MAX`], up to [`ALL`].
    short: u32,
    /// Set with one core: no other core can produce work during polling.
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
        Wait { spin: self, limit, began: Instant::now(), polling: false, crowded: false }
    }

    fn is_worthwhile(&self) -> bool {
        !self.alone && self.short >= ALL / 2
    }

    fn record_wait(&mut self, wait: Duration) {
        let is_short = if wait <= SPIN_MAX { ALL } else { 0 };
        self.short = (15 * self.short + is_short) / 16;
    }
}

/// One wait, from its beginning to its [`Wait::end`].
pub struct Wait<'a> {
    spin: &'a mut Spin,
    limit: Duration,
    began: Instant,
    polling: bool,
    /// Set if another thread used the core.
    crowded: bool,
}

impl Wait<'_> {
    /// Returns true if the thread should poll (again) before it sleeps. Other ready threads run in
    /// between.
    pub fn should_poll(&mut self) -> bool {
        if !self.polling {
            self.polling = self.spin.is_worthwhile() && !self.limit.is_zero();
            return self.polling;
        }
        let before = self.began.elapsed();
        rustix::thread::sched_yield();
        let after = self.began.elapsed();
        self.crowded = after - before > GIVEN_AWAY;
        !self.crowded && after < self.limit
    }

    /// Ends the wait: work was found, or the sleep is over.
    pub fn end(self) {
        // A wait with a limit of zero is no evidence.
        if !self.limit.is_zero() {
            let wait = if self.crowded { Duration::MAX } else { self.began.elapsed() };
            self.spin.record_wait(wait);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(waits: impl IntoIterator<Item = u64>) -> Spin {
        let mut spin = Spin { short: 0, alone: false };
        for micros in waits {
            spin.record_wait(Duration::from_micros(micros));
        }
        spin
    }

    /// Number of polls of one wait that finds no work, and then sleeps.
    fn polls_in_vain(spin: &mut Spin) -> u32 {
        let mut wait = spin.begin(None);
        let mut polls = 0;
        while wait.should_poll() {
            polls += 1;
        }
        std::thread::sleep(2 * SPIN_MAX);
        wait.end();
        polls
    }

    #[test]
    fn a_thread_with_long_waits_sleeps_at_once() {
        for mut idle in [after([]), after([1000; 100]), after((0..100).chain([70; 12]))] {
            assert_eq!(polls_in_vain(&mut idle), 0);
        }
    }

    #[test]
    fn a_thread_with_short_waits_polls_for_a_moment_and_then_sleeps() {
        assert!(polls_in_vain(&mut after([5; 16])) > 0);
    }

    #[test]
    fn long_waits_end_the_polling() {
        let mut busy = after([5; 1000]);
        let in_vain = (0..100).filter(|_| polls_in_vain(&mut busy) > 0).count();
        assert!(in_vain < 16, "{in_vain} of 100 waits polled without a result");
    }

    #[test]
    fn a_wait_with_a_limit_of_zero_does_not_poll() {
        let mut busy = after([5; 16]);
        assert!(!busy.begin(Some(Duration::ZERO)).should_poll());
    }

    #[test]
    fn a_core_used_by_other_threads_ends_the_polling() {
        let mut busy = after([5; 1000]);
        for _ in 0..16 {
            let mut wait = busy.begin(None);
            wait.crowded = true;
            wait.end();
        }
        assert_eq!(polls_in_vain(&mut busy), 0);
    }

    #[test]
    fn no_thread_polls_on_one_core() {
        let mut alone = Spin { alone: true, ..after([5; 16]) };
        assert_eq!(polls_in_vain(&mut alone), 0);
    }
}
