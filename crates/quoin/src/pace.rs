//! Waiting for what goes on by itself, with how far it is and how long it still takes at its pace.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::client::ClientOptions;

/// Between two looks at what is waited for, and between two lines about it.
const LOOK_EVERY: Duration = Duration::from_millis(250);
const SAY_EVERY: Duration = Duration::from_secs(2);

/// Something under way in the cluster, as it was seen last.
pub trait UnderWay {
    fn is_done(&self) -> bool;
    /// Bytes that it has still to go through.
    fn left_bytes(&self) -> u64;
    /// How far it is, in words; `left`: how long it takes at its pace, once it has one.
    fn progress(&self, left: Option<Duration>) -> String;
}

/// Looks until it is done.
///
/// # Errors
/// Where a look fails, and where it takes longer than the user waits: it goes on all the same.
pub async fn follow<U: UnderWay>(
    first: U,
    client: &ClientOptions,
    mut look: impl AsyncFnMut() -> Result<U>,
) -> Result<U> {
    let mut seen = first;
    let began = Instant::now();
    let mut said = None::<Instant>;
    let mut pace = Pace::default();
    while !seen.is_done() {
        pace.saw(seen.left_bytes(), began.elapsed());
        if said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
            eprintln!("{}", seen.progress(pace.left()));
            said = Some(Instant::now());
        }
        if began.elapsed() > client.timeout() {
            bail!(
                "{} after {} s; it goes on by itself (--timeout waits longer)",
                seen.progress(pace.left()),
                client.timeout
            );
        }
        tokio::time::sleep(LOOK_EVERY).await;
        seen = look().await?;
    }
    Ok(seen)
}

/// Bytes that rebuilds have still to go through, now and when first seen.
#[derive(Default)]
struct Pace {
    first: Option<(u64, Duration)>,
    last: (u64, Duration),
}

impl Pace {
    fn saw(&mut self, left: u64, at: Duration) {
        if self.first.is_none_or(|(first, _)| left > first) && left > 0 {
            self.first = Some((left, at));
        }
        self.last = (left, at);
    }

    /// How long it takes at the pace so far; nothing before there is one.
    fn left(&self) -> Option<Duration> {
        let (first, since) = self.first?;
        let (left, now) = self.last;
        let took = now.checked_sub(since).filter(|took| *took >= Duration::from_secs(1))?;
        let done = first.checked_sub(left).filter(|done| *done > 0 && left > 0)?;
        Some(Duration::from_secs_f64(took.as_secs_f64() * left as f64 / done as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_long_it_takes_is_told_from_the_pace_so_far_and_a_longer_way_begins_anew() {
        let mut pace = Pace::default();
        let second = Duration::from_secs;
        pace.saw(1000, second(10));
        assert_eq!(pace.left(), None);
        pace.saw(750, second(15));
        assert_eq!(pace.left(), Some(second(15)));
        pace.saw(2000, second(16));
        assert_eq!(pace.left(), None);
        pace.saw(0, second(20));
        assert_eq!(pace.left(), None);
    }

    struct Steps(u64);

    impl UnderWay for Steps {
        fn is_done(&self) -> bool {
            self.0 == 0
        }
        fn left_bytes(&self) -> u64 {
            self.0
        }
        fn progress(&self, _left: Option<Duration>) -> String {
            format!("{} steps left", self.0)
        }
    }

    #[tokio::test]
    async fn what_is_waited_for_is_looked_at_until_it_is_done_or_the_user_waits_no_longer() {
        let mut client = ClientOptions { socket: None, timeout: 600, run: None };
        let mut steps = 3;
        let done = follow(Steps(3), &client, async || {
            steps -= 1;
            Ok(Steps(steps))
        });
        assert_eq!(done.await.unwrap().0, 0);
        client.timeout = 0;
        let never = follow(Steps(3), &client, async || Ok(Steps(3))).await;
        let text = never.err().unwrap().to_string();
        assert!(text.contains("3 steps left") && text.contains("--timeout"), "{text}");
    }
}
