//! Wall-clock times as records and messages carry them.

use std::time::{SystemTime, UNIX_EPOCH};

use prost_types::Timestamp;

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

pub(crate) fn timestamp(ms: u64) -> Timestamp {
    Timestamp { seconds: (ms / 1000) as i64, nanos: (ms % 1000) as i32 * 1_000_000 }
}
