//! Difference of a member's clock from the controller's.
//!
//! The controller's answers show its time. A member takes half of the round trip into account, and tells
//! the difference with its next request. It decides nothing: it is for people, who are to find the host
//! whose clock is wrong before its certificates and its names of backups do.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tonic::codegen::http::{HeaderMap, HeaderValue};

/// Header of an answer: the controller's time in milliseconds since 1970.
const TIME: &str = "quoin-time-ms";
/// Header of a request: `AHEAD/UNCERTAIN` in milliseconds.
const DIFFERENCE: &str = "quoin-clock-ahead-ms";
/// A call that took longer measures nothing: the answer may have been made at either end of it.
const ROUND_TRIP_MAX: Duration = Duration::from_secs(2);

/// A difference, as it was measured with one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockDifference {
    /// By so much the member's clock is ahead of the controller's; negative: behind.
    pub ahead_ms: i64,
    /// The true difference is within so much of it.
    pub uncertain_ms: u32,
}

impl ClockDifference {
    fn measured(ended: SystemTime, round_trip: Duration, controller_ms: i64) -> Option<Self> {
        if round_trip > ROUND_TRIP_MAX {
            return None;
        }
        let ended_ms = i64::try_from(ended.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()?;
        let half_ms = u32::try_from(round_trip.as_millis()).ok()? / 2;
        let middle_ms = ended_ms.checked_sub(half_ms.into())?;
        Some(Self { ahead_ms: middle_ms.checked_sub(controller_ms)?, uncertain_ms: half_ms + 1 })
    }

    /// Measures by an answer that ended a call of so long just now. `None`: it shows no time, or the
    /// call was too long.
    pub(crate) fn by_answer(headers: &HeaderMap, round_trip: Duration) -> Option<Self> {
        let shown = headers.get(TIME)?.to_str().ok()?.parse().ok()?;
        Self::measured(SystemTime::now(), round_trip, shown)
    }

    pub(crate) fn show(self, headers: &mut HeaderMap) {
        let Self { ahead_ms, uncertain_ms } = self;
        if let Ok(value) = HeaderValue::try_from(format!("{ahead_ms}/{uncertain_ms}")) {
            headers.insert(DIFFERENCE, value);
        }
    }

    /// Returns the difference that a request reports; `None`: none, or none that a call can have
    /// measured.
    #[must_use]
    pub fn shown(headers: &HeaderMap) -> Option<Self> {
        let (ahead, uncertain) = headers.get(DIFFERENCE)?.to_str().ok()?.split_once('/')?;
        let told = Self { ahead_ms: ahead.parse().ok()?, uncertain_ms: uncertain.parse().ok()? };
        (u128::from(told.uncertain_ms) <= ROUND_TRIP_MAX.as_millis()).then_some(told)
    }

    /// Returns whether the clocks are further apart than `limit`, for certain.
    #[must_use]
    pub fn is_beyond(self, limit: Duration) -> bool {
        let apart_ms = self.ahead_ms.unsigned_abs().saturating_sub(self.uncertain_ms.into());
        u128::from(apart_ms) > limit.as_millis()
    }
}

/// Shows the controller's time in an answer.
pub fn show_time(headers: &mut HeaderMap) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    if let Ok(value) = HeaderValue::try_from(now.to_string()) {
        headers.insert(TIME, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_round_trip_is_taken_into_account_and_a_long_one_measures_nothing() {
        let ended = UNIX_EPOCH + Duration::from_millis(1_000_000);
        let measured = |trip_ms, controller_ms| {
            ClockDifference::measured(ended, Duration::from_millis(trip_ms), controller_ms)
        };
        // The answer was made in the middle of the call.
        let same = measured(400, 999_800).unwrap();
        assert_eq!((same.ahead_ms, same.uncertain_ms), (0, 201));
        let behind = measured(400, 1_009_800).unwrap();
        assert_eq!(behind.ahead_ms, -10_000);
        let limit = Duration::from_secs(5);
        assert!(behind.is_beyond(limit) && !same.is_beyond(limit));
        // 5.1 s with an uncertainty of 0.2 s may be 4.9 s.
        assert!(!measured(400, 994_700).unwrap().is_beyond(limit));
        assert!(measured(400, 994_500).unwrap().is_beyond(limit));
        assert_eq!(measured(2_001, 1_000_000), None);
        assert_eq!(measured(1, i64::MIN), None);
    }

    #[test]
    fn a_difference_is_read_as_it_was_told_and_nonsense_is_none() {
        let mut headers = HeaderMap::new();
        assert_eq!(ClockDifference::shown(&headers), None);
        let told = ClockDifference { ahead_ms: -86_400_000, uncertain_ms: 3 };
        told.show(&mut headers);
        assert_eq!(ClockDifference::shown(&headers), Some(told));
        for nonsense in ["", "7", "/", "1/-1", "x/1", "1/2001", "99999999999999999999/1"] {
            headers.insert(DIFFERENCE, HeaderValue::from_static(nonsense));
            assert_eq!(ClockDifference::shown(&headers), None, "{nonsense}");
        }
        headers.insert(DIFFERENCE, HeaderValue::from_static("-9223372036854775808/0"));
        assert!(ClockDifference::shown(&headers).unwrap().is_beyond(Duration::from_secs(5)));
        show_time(&mut headers);
        let here = ClockDifference::by_answer(&headers, Duration::ZERO).unwrap();
        assert!(!here.is_beyond(Duration::from_secs(5)), "{here:?}");
    }
}
