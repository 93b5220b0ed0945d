//! Memory that the volumes of a shard use together for replicas that are away or behind.
//!
//! One volume keeps a window of entries for a replica that is away, and four for one that is
//! rebuilt. When a pool with replicas of hundreds of volumes goes away, that would exceed the
//! host's memory. So beyond a budget all of them get one limit, which does not affect those that
//! keep less: the replicas of the others are brought back by increments, which need no memory.

use std::time::Duration;

use quoin_replication::primary::PrimaryEvent;
use quoin_types::{Time, VolumeId};

use super::{Metrics, Shard};

/// Interval of shares.
const SHARE_EVERY: Duration = Duration::from_millis(100);

pub(super) struct Memory {
    budget_bytes: usize,
    retained_bytes: usize,
    /// Limit of each volume now.
    limit_bytes: usize,
    next_at: Time,
}

impl Memory {
    pub fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, retained_bytes: 0, limit_bytes: usize::MAX, next_at: Time::ZERO }
    }

    /// Returns the limit of each volume, also of one that is opened now.
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    fn count(&mut self, before: &mut usize, now: usize, metrics: &Metrics) {
        let change = now as i64 - *before as i64;
        if change != 0 {
            self.retained_bytes = self.retained_bytes - *before + now;
            *before = now;
            metrics.retained.inc_by(change);
        }
    }

    /// Removes the share of a volume that is not served any more.
    pub fn gone(&mut self, mut counted: usize, metrics: &Metrics) {
        self.count(&mut counted, 0, metrics);
    }

    /// Returns a new limit, where it changes. `each`: the bytes that each volume keeps.
    fn share(&mut self, now: Time, each: impl Iterator<Item = usize>) -> Option<usize> {
        if now < self.next_at {
            return None;
        }
        let limit = if self.retained_bytes > self.budget_bytes {
            // The share is less than all of it, so that the next one is not due with the next
            // entry.
            fair_share(self.budget_bytes / 8 * 7, each.collect())
        } else if self.retained_bytes < self.budget_bytes / 2 {
            usize::MAX
        } else {
            return None;
        };
        if limit == self.limit_bytes {
            return None;
        }
        self.next_at = now + SHARE_EVERY;
        self.limit_bytes = limit;
        Some(limit)
    }
}

/// Returns the limit under which all of these are no more than `budget` together.
fn fair_share(budget: usize, mut each: Vec<usize>) -> usize {
    each.sort_unstable();
    let (mut rest, mut many) = (budget, each.len());
    for bytes in each {
        let share = rest / many;
        if bytes > share {
            return share;
        }
        rest -= bytes;
        many -= 1;
    }
    usize::MAX
}

impl Shard {
    pub(super) fn count_retained(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get_mut(&id) {
            let now = volume.target.retained_bytes();
            self.memory.count(&mut volume.retained_bytes, now, &self.metrics);
        }
    }

    /// Sets each volume's limit once a round, if it changes.
    pub(super) fn share_memory(&mut self, now: Time) {
        let each = self.volumes.values().map(|volume| volume.retained_bytes);
        let Some(bytes_max) = self.memory.share(now, each) else { return };
        let limited = bytes_max < usize::MAX;
        if limited {
            tracing::info!(
                bytes_max,
                volumes = self.volumes.len(),
                "the memory for replicas that are away or behind is used up: volumes that keep \
                 more for them copy what they lack anew"
            );
        }
        for (id, volume) in &mut self.volumes {
            volume.target.on(now, PrimaryEvent::Retain { bytes_max }, &mut self.actions);
            // An idle volume would otherwise keep its entries.
            if volume.retained_bytes > bytes_max && !volume.touched {
                volume.touched = true;
                self.touched.push(*id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_as_high_as_the_budget_allows_and_those_below_it_keep_all() {
        assert_eq!(fair_share(100, vec![]), usize::MAX);
        assert_eq!(fair_share(100, vec![50, 50]), usize::MAX);
        assert_eq!(fair_share(100, vec![200]), 100);
        assert_eq!(fair_share(100, vec![10, 500, 20, 400]), 35);
        assert_eq!(fair_share(100, vec![0, 0, 90, 90]), 50);
        assert_eq!(fair_share(0, vec![1, 0]), 0);
        for budget in [1, 7, 64, 1000] {
            let each = vec![3, 900, 41, 41, 0, 77, 1];
            let limit = fair_share(budget, each.clone());
            assert!(each.iter().map(|bytes| bytes.min(&limit)).sum::<usize>() <= budget);
        }
    }

    #[test]
    fn the_limit_falls_beyond_the_budget_and_ends_well_below_it() {
        let metrics = Metrics::new();
        let mut memory = Memory::new(800);
        let (mut one, mut other) = (0, 0);
        memory.count(&mut one, 700, &metrics);
        memory.count(&mut other, 100, &metrics);
        let at = Time::from_millis;
        assert_eq!(memory.share(at(1), [700, 100].into_iter()), None);
        memory.count(&mut other, 200, &metrics);
        assert_eq!(memory.share(at(1), [700, 200].into_iter()), Some(500));
        assert_eq!(memory.share(at(2), [700, 200].into_iter()), None, "just now");
        memory.count(&mut one, 500, &metrics);
        assert_eq!(memory.share(at(200), [500, 200].into_iter()), None, "neither nor");
        memory.gone(one, &metrics);
        assert_eq!(memory.share(at(300), [200].into_iter()), Some(usize::MAX));
        assert_eq!(memory.share(at(600), [200].into_iter()), None);
        assert_eq!(metrics.retained.get(), 200);
    }
}
