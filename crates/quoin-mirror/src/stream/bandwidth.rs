//! The limit of bytes in a second of each group, all its members together.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Pause after which a limit is looked at again: it may have been raised.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Bucket of one group.
#[derive(Debug)]
pub struct Bucket {
    /// Bytes in a second; 0: no limit.
    limit: AtomicU64,
    /// Held by the one that is next; the others wait in their order.
    level: tokio::sync::Mutex<Level>,
}

#[derive(Debug)]
struct Level {
    /// Bytes that may go at once; below 0: that went ahead of their time.
    bytes: f64,
    at: Instant,
}

impl Bucket {
    fn new(limit: u64) -> Self {
        let level = tokio::sync::Mutex::new(Level { bytes: 0.0, at: Instant::now() });
        Self { limit: AtomicU64::new(limit), level }
    }

    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Waits until so many bytes may go.
    pub async fn take(&self, bytes: usize) {
        if self.limit() == 0 {
            return;
        }
        let mut level = self.level.lock().await;
        loop {
            let limit = self.limit() as f64;
            if limit == 0.0 {
                return;
            }
            let passed = level.at.elapsed().as_secs_f64();
            level.at = Instant::now();
            // A group that was idle gains nothing by it but the bytes of a moment.
            level.bytes = (level.bytes + passed * limit).min(limit / 10.0);
            if level.bytes >= 0.0 {
                level.bytes -= bytes as f64;
                return;
            }
            let wait = Duration::try_from_secs_f64(-level.bytes / limit).unwrap_or(LOOK_AGAIN);
            // A millisecond more than the time of the bytes that are missing ends the wait for sure.
            tokio::time::sleep(wait.min(LOOK_AGAIN) + Duration::from_millis(1)).await;
        }
    }
}

/// Buckets of all groups.
#[derive(Default, Debug)]
pub struct Bandwidth(Mutex<BTreeMap<u128, Arc<Bucket>>>);

impl Bandwidth {
    /// The bucket of a group.
    pub fn of(&self, group: u128) -> Arc<Bucket> {
        self.lock().entry(group).or_insert_with(|| Arc::new(Bucket::new(0))).clone()
    }

    /// Sets the limits of all groups, and forgets those of others.
    pub fn set(&self, limits: &BTreeMap<u128, u64>) {
        let mut buckets = self.lock();
        buckets.retain(|group, _| limits.contains_key(group));
        for (group, limit) in limits {
            let bucket = buckets.entry(*group).or_insert_with(|| Arc::new(Bucket::new(*limit)));
            bucket.limit.store(*limit, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u128, Arc<Bucket>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn all_members_of_a_group_together_keep_to_its_limit() {
        let bandwidth = Bandwidth::default();
        bandwidth.set(&BTreeMap::from([(1, 1_000_000), (2, 0)]));
        let begin = Instant::now();
        let member = |bucket: Arc<Bucket>| async move {
            for _ in 0..50 {
                bucket.take(100_000).await;
            }
        };
        tokio::join!(member(bandwidth.of(1)), member(bandwidth.of(1)), member(bandwidth.of(2)));
        let took = begin.elapsed().as_secs_f64();
        assert!((9.5..10.5).contains(&took), "10 MB at 1 MB/s took {took} s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_that_is_raised_counts_at_once_and_idle_time_is_not_saved_up() {
        let bandwidth = Bandwidth::default();
        bandwidth.set(&BTreeMap::from([(1, 1)]));
        let bucket = bandwidth.of(1);
        bucket.take(1_000_000).await;
        let begin = Instant::now();
        let raised = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            bandwidth.set(&BTreeMap::from([(1, 1_000_000)]));
        };
        tokio::join!(bucket.take(1), raised);
        assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let begin = Instant::now();
        for _ in 0..20 {
            bucket.take(100_000).await;
        }
        assert!(begin.elapsed() > Duration::from_millis(1500), "{:?}", begin.elapsed());
    }
}
