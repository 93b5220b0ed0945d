//! How long a store takes to answer, and when it last did.

use std::sync::Mutex;
use std::time::Duration;

use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;

use super::StoreError;

/// Upper bounds of the histograms' buckets, in seconds: from a commit on a fast disk to a call's deadline.
const BUCKETS: [f64; 12] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0];

/// Kind of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    Read,
    Write,
}

/// Latency of a store's calls, and how the last one went.
#[derive(Debug)]
pub struct Latency {
    reads: Histogram,
    writes: Histogram,
    last: Mutex<Last>,
}

#[derive(Clone, Debug, Default)]
struct Last {
    took: Option<Duration>,
    answered: Option<Instant>,
    failing: Option<String>,
}

impl Default for Latency {
    fn default() -> Self {
        let histogram = || Histogram::new(BUCKETS);
        Self { reads: histogram(), writes: histogram(), last: Mutex::default() }
    }
}

impl Latency {
    /// The histograms of reads and of writes, which share their content with these.
    #[must_use]
    pub fn histograms(&self) -> [Histogram; 2] {
        [self.reads.clone(), self.writes.clone()]
    }

    /// Latency of the last call that was answered.
    #[must_use]
    pub fn last(&self) -> Option<Duration> {
        self.last_call().took
    }

    /// Time since the last answer; `None`: there was none yet.
    #[must_use]
    pub fn since_answer(&self) -> Option<Duration> {
        self.last_call().answered.map(|answered| answered.elapsed())
    }

    /// Why the last call failed; `None`: it was answered.
    #[must_use]
    pub fn failing(&self) -> Option<String> {
        self.last_call().failing
    }

    fn last_call(&self) -> Last {
        self.last.lock().expect("no holder of this lock panics").clone()
    }

    /// Measures a call.
    pub(super) async fn of<T>(
        &self,
        call: Call,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let outcome = work.await;
        let took = began.elapsed();
        let mut last = self.last.lock().expect("no holder of this lock panics");
        match &outcome {
            Err(error @ (StoreError::Away { .. } | StoreError::Failed(_))) => {
                last.failing = Some(error.to_string());
            }
            // The store answers, whatever it says.
            _ => {
                let histogram = if call == Call::Read { &self.reads } else { &self.writes };
                histogram.observe(took.as_secs_f64());
                *last = Last { took: Some(took), answered: Some(Instant::now()), failing: None };
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_that_fails_leaves_when_the_store_last_answered_and_says_why() {
        let latency = Latency::default();
        assert_eq!((latency.last(), latency.since_answer()), (None, None));
        let some = Duration::from_millis(30);
        let slow = async {
            tokio::time::sleep(some).await;
            Ok(())
        };
        latency.of(Call::Write, slow).await.unwrap();
        let took = latency.last();
        assert!(took.is_some_and(|took| took >= some), "{took:?}");
        tokio::time::sleep(some).await;
        let away = async { Err::<(), _>(StoreError::Away { why: "it is cut off".to_owned() }) };
        latency.of(Call::Read, away).await.unwrap_err();
        assert_eq!(latency.last(), took);
        assert!(latency.since_answer().is_some_and(|since| since >= some));
        assert!(latency.failing().unwrap().contains("it is cut off"));
        // A refusal is an answer.
        let refused = async { Err::<(), _>(StoreError::NotLeading) };
        latency.of(Call::Write, refused).await.unwrap_err();
        assert_eq!(latency.failing(), None);
    }
}
