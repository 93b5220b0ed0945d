//! A volume's limits: IOs and bytes a second, enforced by delaying requests.
//!
//! Two buckets fill at the limits' rates and hold a second's worth, so that a burst after a rest
//! passes at once. A request passes while neither bucket is in debt and then pays in full: one that
//! is larger than a second's worth passes too, and those behind it wait for it. No request is
//! refused, and none overtakes: a later client must not see an earlier one's write land after its
//! own. The number of waiting requests is bounded by the requests that the clients' sessions allow
//! under way, which is the back-pressure.

use std::collections::VecDeque;

use quoin_types::block::{Operation, Request};
use quoin_types::mutant;
use quoin_types::time::Time;

const UNIT: i128 = 1_000_000_000;

/// A second's worth of each; 0: no limit.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Limits {
    pub ios_per_s: u64,
    pub bytes_per_s: u64,
}

/// Remainder of a rate, in billionths of a unit, so that a nanosecond counts.
struct Bucket {
    per_s: i128,
    level: i128,
}

impl Bucket {
    fn new(per_s: u64) -> Self {
        let per_s = i128::from(per_s);
        Self { per_s, level: per_s * UNIT }
    }

    fn change(&mut self, per_s: u64) {
        let per_s = i128::from(per_s);
        if per_s != self.per_s {
            let is_new = self.per_s == 0;
            let most = per_s * UNIT;
            *self = Self { per_s, level: if is_new { most } else { self.level.clamp(0, most) } };
        }
    }

    fn fill(&mut self, elapsed_ns: u128) {
        let more = self.per_s.saturating_mul(i128::try_from(elapsed_ns).unwrap_or(i128::MAX));
        self.level = self.level.saturating_add(more);
        if !mutant::is("burst-without-a-bound") {
            self.level = self.level.min(self.per_s * UNIT);
        }
    }

    fn is_open(&self) -> bool {
        self.per_s == 0 || self.level > 0
    }

    fn pay(&mut self, cost: u64) {
        if self.per_s != 0 {
            self.level -= i128::from(cost) * UNIT;
        }
    }

    /// Returns the time until it is open, in nanoseconds.
    fn opens_in_ns(&self) -> u64 {
        if self.is_open() {
            return 0;
        }
        let least = i128::from(!mutant::is("limits-wake-for-nothing"));
        u64::try_from((-self.level) / self.per_s + least).unwrap_or(u64::MAX)
    }
}

/// The limits of one volume, and the requests that wait for them.
pub struct Throttle {
    ios: Bucket,
    bytes: Bucket,
    filled: Time,
    /// Waiting requests, each with its client.
    waiting: VecDeque<(u64, Request)>,
}

impl Throttle {
    /// Returns the throttle; `None` where there is no limit.
    pub fn new(now: Time, limits: Limits) -> Option<Self> {
        (limits != Limits::default()).then(|| Self {
            ios: Bucket::new(limits.ios_per_s),
            bytes: Bucket::new(limits.bytes_per_s),
            filled: now,
            waiting: VecDeque::new(),
        })
    }

    /// Changes the limits. A debt to the former ones is forgotten, and so is what they saved up
    /// beyond a second's worth of the new ones; what waits keeps its order.
    pub fn change(&mut self, now: Time, limits: Limits) {
        self.fill(now);
        self.ios.change(limits.ios_per_s);
        self.bytes.change(limits.bytes_per_s);
    }

    /// Returns the request if it may pass now, and keeps it if not.
    pub fn admit(&mut self, now: Time, client: u64, request: Request) -> Option<Request> {
        self.waiting.push_back((client, request));
        if self.waiting.len() > 1 {
            return None;
        }
        self.next(now).map(|(_, request)| request)
    }

    /// Returns the next request that waited long enough, with its client.
    pub fn next(&mut self, now: Time) -> Option<(u64, Request)> {
        self.fill(now);
        if !self.ios.is_open() || !self.bytes.is_open() {
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.ios.pay(1);
        self.bytes.pay(bytes_of(&next.1.operation));
        Some(next)
    }

    /// Returns when [`Self::next`] may have a request.
    pub fn due(&self) -> Option<Time> {
        let wait_ns = self.ios.opens_in_ns().max(self.bytes.opens_in_ns());
        (!self.waiting.is_empty()).then(|| Time(self.filled.0.saturating_add(wait_ns)))
    }

    /// Drops the waiting requests of a client that is gone.
    pub fn forget(&mut self, client: u64) {
        self.waiting.retain(|(from, _)| *from != client);
    }

    fn fill(&mut self, now: Time) {
        let elapsed_ns = now.since(self.filled).as_nanos();
        self.ios.fill(elapsed_ns);
        self.bytes.fill(elapsed_ns);
        self.filled = self.filled.max(now);
    }
}

/// Returns the bytes that are moved; trims and zeroes move none.
pub fn bytes_of(operation: &Operation) -> u64 {
    match operation {
        Operation::Read { length, .. } => u64::from(*length),
        Operation::Write { data, .. } => data.len() as u64,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn read(length: u32) -> Request {
        Request { token: 0, operation: Operation::Read { offset: 0, length }, origin: None }
    }
    fn limits(ios_per_s: u64, bytes_per_s: u64) -> Limits {
        Limits { ios_per_s, bytes_per_s }
    }
    /// Offers all requests at once and returns when each passed.
    fn times(limits: Limits, lengths: &[u32]) -> Vec<u64> {
        let mut throttle = Throttle::new(Time(0), limits).unwrap();
        let mut times = Vec::new();
        for length in lengths {
            if throttle.admit(Time(0), 1, read(*length)).is_some() {
                times.push(0);
            }
        }
        while let Some(due) = throttle.due() {
            let before = times.len();
            while throttle.next(due).is_some() {
                times.push(due.0);
            }
            assert!(times.len() > before, "woken for nothing");
        }
        times
    }

    #[test]
    fn a_second_s_worth_passes_at_once_and_the_rest_at_the_limit_s_rate() {
        let times = times(limits(100, 0), &[4096; 300]);
        assert_eq!(times.iter().filter(|at| **at == 0).count(), 100);
        let last = *times.last().unwrap();
        assert!((2 * SECOND - SECOND / 50..=2 * SECOND).contains(&last), "{last}");
        assert!(times.is_sorted());
    }

    #[test]
    fn a_request_larger_than_a_second_passes_and_those_behind_wait_for_it() {
        let times = times(limits(0, 1 << 20), &[4 << 20, 4096]);
        assert_eq!(times[0], 0);
        assert!((3 * SECOND..3 * SECOND + 10).contains(&times[1]), "{}", times[1]);
    }

    #[test]
    fn without_limits_there_is_no_throttle_and_a_lost_client_has_nothing_waiting() {
        assert!(Throttle::new(Time(0), Limits::default()).is_none());
        let mut throttle = Throttle::new(Time(0), limits(1, 0)).unwrap();
        assert!(throttle.admit(Time(0), 1, read(1)).is_some());
        assert!(throttle.admit(Time(0), 1, read(2)).is_none());
        assert!(throttle.admit(Time(0), 2, read(3)).is_none());
        throttle.forget(1);
        let due = throttle.due().unwrap();
        assert_eq!(throttle.next(due), Some((2, read(3))));
        assert_eq!(throttle.due(), None);
    }

    #[test]
    fn changed_limits_rule_at_once_and_what_waits_keeps_its_order() {
        let mut throttle = Throttle::new(Time(0), limits(0, 1 << 20)).unwrap();
        assert!(throttle.admit(Time(0), 1, read(100 << 20)).is_some());
        for length in 1..=20 {
            assert!(throttle.admit(Time(0), 1, read(length)).is_none(), "99 s of debt");
        }
        let same = throttle.due();
        throttle.change(Time(0), limits(0, 1 << 20));
        assert_eq!(throttle.due(), same, "the same limits change nothing");
        throttle.change(Time(0), limits(10, 2 << 20));
        let mut passed = Vec::new();
        while let Some(due) = throttle.due().filter(|due| due.0 < SECOND / 2) {
            while let Some((_, request)) = throttle.next(due) {
                passed.push(request);
            }
        }
        let lengths: Vec<Request> = (1..=passed.len() as u32).map(read).collect();
        assert_eq!(passed, lengths);
        assert!((10..=16).contains(&passed.len()), "{}", passed.len());
        throttle.change(Time(SECOND / 2), Limits::default());
        let left = std::iter::from_fn(|| throttle.next(Time(SECOND / 2))).count();
        assert_eq!(left + passed.len(), 20, "without limits nothing waits");
        assert!(throttle.admit(Time(SECOND / 2), 1, read(1 << 30)).is_some());
        assert_eq!(throttle.due(), None);
    }

    proptest! {
        #[test]
        fn everything_goes_in_order_and_never_faster_than_the_limits(
            ios in 0_u64..200,
            bytes in 0_u64..1 << 20,
            lengths in proptest::collection::vec(1_u32..1 << 18, 1..80),
        ) {
            prop_assume!(ios + bytes > 0);
            let times = times(limits(ios, bytes), &lengths);
            prop_assert_eq!(times.len(), lengths.len());
            prop_assert!(times.is_sorted());
            let total: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
            let last = u128::from(*lengths.last().unwrap());
            let elapsed = u128::from(*times.last().unwrap());
            if ios > 0 {
                let allowed = u128::from(ios) * (elapsed + u128::from(SECOND));
                prop_assert!((lengths.len() as u128 - 1) * u128::from(SECOND) <= allowed);
            }
            if bytes > 0 {
                let allowed = u128::from(bytes) * (elapsed + u128::from(SECOND));
                prop_assert!((u128::from(total) - last) * u128::from(SECOND) <= allowed);
            }
        }
    }
}
