//! Wall-clock times as records and messages carry them, and the times of this process.

use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

use prost_types::Timestamp;
use quoin_types::Time;
use tokio::time::Instant;

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

pub(crate) fn timestamp(ms: u64) -> Timestamp {
    Timestamp { seconds: (ms / 1000) as i64, nanos: (ms % 1000) as i32 * 1_000_000 }
}

/// A day before the first use of [`of`], so that times before it can be told too.
const DAY: Time = Time(86_400_000_000_000);

/// The time of the core at a moment of this process.
pub(crate) fn of(moment: Instant) -> Time {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    match moment.checked_duration_since(*BEGIN) {
        Some(since) => DAY + since,
        None => DAY - BEGIN.duration_since(moment),
    }
}

pub(crate) fn now() -> Time {
    of(Instant::now())
}
