//! Wall-clock times as records and messages carry them.

use std::time::{SystemTime, UNIX_EPOCH};

use prost_types::Timestamp;

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Longest step back of a clock that is taken for a correction, in milliseconds.
pub(crate) const CORRECTION_MS: u64 = 300_000;

/// Returns whether a recorded time lies ahead by more than a correction: a clock was wrong then, or is
/// now. Such a time binds nothing.
pub(crate) fn is_ahead(at_ms: u64, now_ms: u64) -> bool {
    at_ms > now_ms.saturating_add(CORRECTION_MS)
}

pub(crate) fn timestamp(ms: u64) -> Timestamp {
    Timestamp { seconds: (ms / 1000) as i64, nanos: (ms % 1000) as i32 * 1_000_000 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_ahead_where_no_correction_of_a_clock_explains_it() {
        let now = now_ms();
        assert!(!is_ahead(0, now) && !is_ahead(now, now) && !is_ahead(now + CORRECTION_MS, now));
        assert!(is_ahead(now + CORRECTION_MS + 1, now) && is_ahead(u64::MAX, now));
        assert!(!is_ahead(u64::MAX, u64::MAX));
    }
}
