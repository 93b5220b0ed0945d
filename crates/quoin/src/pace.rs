//! How long a rebuild still takes, told from its pace so far.

use std::time::Duration;

/// Bytes that rebuilds have still to go through, now and when first seen.
#[derive(Default)]
pub struct Pace {
    first: Option<(u64, Duration)>,
    last: (u64, Duration),
}

impl Pace {
    pub fn saw(&mut self, left: u64, at: Duration) {
        if self.first.is_none_or(|(first, _)| left > first) && left > 0 {
            self.first = Some((left, at));
        }
        self.last = (left, at);
    }

    /// How long it takes at the pace so far; nothing before there is one.
    pub fn left(&self) -> Option<Duration> {
        let (first, since) = self.first?;
        let (left, now) = self.last;
        let took = now.checked_sub(since).filter(|took| *took >= Duration::from_secs(1))?;
        let done = first.checked_sub(left).filter(|done| *done > 0 && left > 0)?;
        Some(Duration::from_secs_f64(took.as_secs_f64() * left as f64 / done as f64))
    }
}
