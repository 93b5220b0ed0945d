//! Times of the wall clock, in milliseconds since 1970, as records carry them.

/// Longest step back of a clock that is taken for a correction, in milliseconds.
pub const CORRECTION_MS: u64 = 300_000;

/// Returns whether a recorded time lies ahead by more than a correction: a clock was wrong then, or is
/// now. Such a time binds nothing.
pub fn is_ahead(at_ms: u64, now_ms: u64) -> bool {
    at_ms > now_ms.saturating_add(CORRECTION_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_ahead_where_no_correction_of_a_clock_explains_it() {
        let now = 1_700_000_000_000;
        assert!(!is_ahead(0, now) && !is_ahead(now, now) && !is_ahead(now + CORRECTION_MS, now));
        assert!(is_ahead(now + CORRECTION_MS + 1, now) && is_ahead(u64::MAX, now));
        assert!(!is_ahead(u64::MAX, u64::MAX));
    }
}
