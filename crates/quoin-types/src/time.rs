//! Time in the core: a number that the driver passes in.

use std::ops::{Add, Sub};
use std::time::Duration;

/// Nanoseconds of a clock that also counts suspend (CLOCK_BOOTTIME), of one host only: never
/// compared between hosts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Time(pub u64);

impl Time {
    pub const ZERO: Self = Self(0);

    pub fn from_millis(ms: u64) -> Self {
        Self(ms * 1_000_000)
    }

    /// Returns the time since `earlier`; zero if `earlier` is later than `self`.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, d: Duration) -> Time {
        Time(self.0.saturating_add(d.as_nanos() as u64))
    }
}

impl Sub<Duration> for Time {
    type Output = Time;
    fn sub(self, d: Duration) -> Time {
        Time(self.0.saturating_sub(d.as_nanos() as u64))
    }
}
