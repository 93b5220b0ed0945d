//! The clocks of hosts: each runs at its own rate, may jump ahead and may stand still.
//!
//! The simulator's own time is "global" and never shown to the core. A clock here stands for
//! CLOCK_BOOTTIME: it never goes back. Drift stays below the protocol's ε (5 %); what may jump or
//! stop without breaking the lease's assumption is decided by the fault plan, not here.

use quoin_types::Time;

/// One host's clock as a function of global nanoseconds.
#[derive(Clone, Debug)]
pub struct HostClock {
    global_base: u64,
    local_base: u64,
    /// Local nanoseconds per million global ones; 0 while the clock stands still.
    rate_ppm: u64,
}

pub const RATE_EXACT: u64 = 1_000_000;

impl HostClock {
    /// Starts at `local_base` (hosts do not agree) with this rate.
    pub fn new(local_base: u64, rate_ppm: u64) -> Self {
        Self { global_base: 0, local_base, rate_ppm }
    }

    pub fn local(&self, global: u64) -> Time {
        let passed = u128::from(global - self.global_base) * u128::from(self.rate_ppm);
        Time(self.local_base + (passed / u128::from(RATE_EXACT)) as u64)
    }

    /// The first global instant at which the clock shows `local`; `None` while it stands still.
    pub fn global(&self, local: Time, now: u64) -> Option<u64> {
        if local <= self.local(now) {
            return Some(now);
        }
        if self.rate_ppm == 0 {
            return None;
        }
        let ahead = u128::from(local.0 - self.local_base) * u128::from(RATE_EXACT);
        Some(self.global_base + ahead.div_ceil(u128::from(self.rate_ppm)) as u64)
    }

    pub fn set_rate(&mut self, now: u64, rate_ppm: u64) {
        self.local_base = self.local(now).0;
        self.global_base = now;
        self.rate_ppm = rate_ppm;
    }

    pub fn jump(&mut self, now: u64, ahead: u64) {
        self.local_base = self.local(now).0 + ahead;
        self.global_base = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_never_early_on_its_own_clock() {
        for rate in [950_000, 999_983, 1_000_000, 1_048_577] {
            let mut clock = HostClock::new(77, rate);
            clock.jump(1_000, 5_000);
            for local in [7_000, 123_456, 9_999_999_999] {
                let global = clock.global(Time(local), 1_000).unwrap();
                assert!(clock.local(global) >= Time(local));
                assert!(clock.local(global - 2) < Time(local));
            }
        }
    }

    #[test]
    fn a_stopped_clock_shows_one_time_and_then_goes_on_from_it() {
        let mut clock = HostClock::new(0, RATE_EXACT);
        clock.set_rate(500, 0);
        assert_eq!(clock.local(9_000), Time(500));
        assert_eq!(clock.global(Time(501), 9_000), None);
        clock.set_rate(9_000, RATE_EXACT);
        assert_eq!(clock.global(Time(501), 9_000), Some(9_001));
    }
}
