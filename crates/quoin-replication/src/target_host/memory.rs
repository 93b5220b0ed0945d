//! Memory that the volumes of a shard share for replicas that are away or behind.
//!
//! One volume keeps a window of entries for a replica that is away, and four for one that is
//! rebuilt. Where a pool goes away that hundreds of volumes have a replica on, that would be more
//! than the host has. So beyond a budget all of them get one limit, which those that keep less do
//! not notice: the replicas of the others are brought back by increments, which need no memory.

use std::time::Duration;

use quoin_types::time::Time;

/// Between two looks at all volumes.
const SHARE_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
pub struct Memory {
    budget_bytes: usize,
    retained_bytes: usize,
    /// Bytes that each volume may keep now.
    limit_bytes: usize,
    next_at: Time,
}

impl Memory {
    pub fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, retained_bytes: 0, limit_bytes: usize::MAX, next_at: Time::ZERO }
    }

    /// Bytes that each volume may keep, also one that is opened now.
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    /// Bytes that all volumes keep.
    pub fn retained_bytes(&self) -> usize {
        self.retained_bytes
    }

    /// A volume kept `before` when it was counted last, and keeps `now`; 0 where it is not served
    /// any more.
    pub fn count(&mut self, before: usize, now: usize) {
        self.retained_bytes = self.retained_bytes - before + now;
    }

    /// A new limit, where there is to be one. `each`: what each volume keeps.
    pub fn share(&mut self, now: Time, each: impl Iterator<Item = usize>) -> Option<usize> {
        if now < self.next_at {
            return None;
        }
        let limit = if self.retained_bytes > self.budget_bytes {
            // Less than all of it, so that the next look is not due with the next entry.
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

/// The limit under which all of these are no more than `budget` together.
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
        let mut memory = Memory::new(800);
        memory.count(0, 700);
        memory.count(0, 100);
        let at = Time::from_millis;
        assert_eq!(memory.share(at(1), [700, 100].into_iter()), None);
        memory.count(100, 200);
        assert_eq!(memory.share(at(1), [700, 200].into_iter()), Some(500));
        assert_eq!(memory.share(at(2), [700, 200].into_iter()), None, "just now");
        memory.count(700, 500);
        assert_eq!(memory.share(at(200), [500, 200].into_iter()), None, "neither nor");
        memory.count(500, 0);
        assert_eq!(memory.share(at(300), [200].into_iter()), Some(usize::MAX));
        assert_eq!(memory.share(at(600), [200].into_iter()), None);
        assert_eq!((memory.retained_bytes(), memory.limit_bytes()), (200, usize::MAX));
    }
}
