//! Pools whose disks are failing: detected from their reports, and emptied before the disk is lost.
//!
//! A pool reports how often its disk refused, how many bad copies it found, and how often a read or
//! a sync took far too long. [`Wear`] compares this with the limits over the last minutes. A pool
//! that reaches a limit is called dying: it is cordoned, and if the policy is `drain`, its replicas
//! are made elsewhere as in every drain ([`crate::reconcile::cordon`]), one change at a time and never the
//! last good copy. It stays dying until an operator uncordons it (`quoin pool uncordon`), also if
//! the errors end: a disk that recovers by itself has only found a spare sector. If more than half
//! of the pools would be dying, their disks are not the cause (hosts that stood still look the same
//! way): an event is recorded and nothing is emptied, since no pool could take the replicas.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use quoin_api::control as api;
use quoin_cluster::records::CordonRecord;
use tokio::time::Instant;

use crate::Error;
pub use crate::settings::{DyingLimits, DyingPolicy, NotAPolicy};
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::now_ms;

/// Samples kept of a whole window.
const SAMPLES: u32 = 60;

/// Recent reports of one pool since the start of its process.
#[derive(Clone, Debug, Default)]
pub struct Wear {
    /// Samples, oldest first. Only the first one may be older than the window.
    samples: VecDeque<(Instant, api::PoolWear)>,
    /// An event was recorded that too many pools fail together for the disk to be the cause.
    told: bool,
}

impl Wear {
    /// Adds a report. Returns the reason if the pool is dying.
    pub fn saw(
        &mut self,
        now: Instant,
        wear: api::PoolWear,
        limits: &DyingLimits,
    ) -> Option<String> {
        let window = limits.within.0;
        let restarted = self.samples.back().is_some_and(|(_, last)| {
            wear.operations < last.operations
                || wear.errors < last.errors
                || wear.bad < last.bad
                || wear.stalls < last.stalls
        });
        if restarted {
            // All counts of the report are from after the restart.
            self.samples.clear();
            self.samples.push_back((now, api::PoolWear::default()));
        }
        if self.samples.back().is_some_and(|(at, _)| now >= *at + window) {
            // The time of the errors within a long silence is unknown.
            self.samples.clear();
        }
        if self.samples.back().is_none_or(|(at, _)| now >= *at + window / SAMPLES) {
            self.samples.push_back((now, wear));
        }
        while self.samples.len() > 1 && self.samples[1].0 + window <= now {
            self.samples.pop_front();
        }
        let base = self.samples.front().map_or(wear, |(_, first)| *first);
        let rose = |of: fn(&api::PoolWear) -> u64| of(&wear).saturating_sub(of(&base));
        let (errors, operations) = (rose(|w| w.errors), rose(|w| w.operations));
        let within = limits.within;
        if errors >= limits.errors && errors.saturating_mul(limits.one_in) >= operations {
            return Some(format!(
                "its disk refused {errors} of {operations} operations within {within}"
            ));
        }
        let (bad, stalls) = (rose(|w| w.bad), rose(|w| w.stalls));
        if bad >= limits.bad {
            return Some(format!("{bad} bad copies were found within {within}"));
        }
        (stalls >= limits.stalls)
            .then(|| format!("{stalls} reads or syncs took far too long within {within}"))
    }
}

/// Pools' disks: what they did lately, and what follows from it.
pub struct DyingPools {
    state: Arc<State>,
    wear: Mutex<HashMap<String, Wear>>,
}

impl DyingPools {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, wear: Mutex::default() }
    }

    fn wear(&self) -> MutexGuard<'_, HashMap<String, Wear>> {
        self.wear.lock().expect("no holder of this lock panics")
    }

    /// Checks a pool's report, and applies the policy if the pool is dying.
    pub(crate) async fn judge(&self, pool: &str, wear: api::PoolWear) -> Result<(), Error> {
        let policy = self.state.settings.dying_pools;
        let limits = &self.state.settings.dying_limits;
        let why = {
            let mut all = self.wear();
            all.entry(pool.to_owned()).or_default().saw(Instant::now(), wear, limits)
        };
        let (Some(why), false) = (why, policy == DyingPolicy::Off) else { return Ok(()) };
        if self.state.check_ruling().is_err() || why_dying(&self.state, pool).is_some() {
            return Ok(());
        }
        let pools = self.state.pools.list();
        let others = pools
            .iter()
            .filter(|p| p.name != pool && why_dying(&self.state, &p.name).is_some())
            .count();
        let id = self.state.pools.get(pool).map(|pool| pool.pool_id.clone()).unwrap_or_default();
        let about = Object::new("pool", id, pool);
        if pools.len() > 1 && (others + 1) * 2 > pools.len() {
            let told = |seen: &mut Wear| std::mem::replace(&mut seen.told, true);
            if !self.wear().get_mut(pool).is_some_and(told) {
                let message = format!(
                    "{why}, and so it is with {others} others of {} pools: what they share fails, not \
                     their disks, and nothing is done; `quoin pool drain` empties one",
                    pools.len()
                );
                self.state.events.record(Severity::Error, about, "PoolsFailTogether", message);
            }
            return Ok(());
        }
        let drain = policy == DyingPolicy::Drain;
        let name = CordonRecord::name_of("pool", pool);
        let record = CordonRecord {
            kind: "pool".to_owned(),
            holder: pool.to_owned(),
            drain,
            told: false,
            since_ms: now_ms(),
            dying: why.clone(),
        };
        if self.state.cordons.create(record).await?.is_err() {
            let mark = |cordon: &mut CordonRecord| {
                cordon.dying.clone_from(&why);
                cordon.told &= cordon.drain;
                cordon.drain |= drain;
                Ok(())
            };
            self.state.cordons.update(&name, mark).await?;
        }
        self.state.look_at(&self.state.volumes_of_pool(pool));
        let then = match policy {
            DyingPolicy::Drain => "its replicas are made elsewhere",
            _ => "it takes no new replicas; `quoin pool drain` moves those it has",
        };
        let message = format!("{why}: {then}, until `quoin pool uncordon`");
        self.state.events.record(Severity::Error, about, "PoolDying", message);
        Ok(())
    }

    /// Discards the reports of a pool so far, since an operator uncordoned it.
    pub(crate) fn forgive(&self, pool: &str) {
        if let Some(wear) = self.wear().get_mut(pool)
            && let Some((_, last)) = wear.samples.back().copied()
        {
            *wear = Wear { samples: [(Instant::now(), last)].into(), told: false };
        }
    }

    /// The pool is no member any more.
    pub(crate) fn forget(&self, pool: &str) {
        self.wear().remove(pool);
    }
}

/// Reason why a pool is called dying, if it is.
pub(crate) fn why_dying(state: &State, pool: &str) -> Option<String> {
    let cordon = state.cordons.get(&CordonRecord::name_of("pool", pool))?;
    Some(cordon.dying.clone()).filter(|why| !why.is_empty())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn wear(operations: u64, errors: u64, bad: u64, stalls: u64) -> api::PoolWear {
        api::PoolWear { operations, errors, bad, stalls }
    }

    fn saw(seen: &mut Wear, now: Instant, wear: api::PoolWear) -> Option<String> {
        seen.saw(now, wear, &DyingLimits::default())
    }

    fn minutes(n: u64) -> Duration {
        Duration::from_secs(60 * n)
    }

    #[test]
    fn a_few_errors_among_many_operations_are_no_death_and_a_share_of_them_is() {
        let (mut seen, now) = (Wear::default(), Instant::now());
        assert_eq!(saw(&mut seen, now, wear(1_000_000, 4, 0, 0)), None);
        assert_eq!(saw(&mut seen, now + minutes(1), wear(1_100_000, 50, 0, 0)), None);
        let why = saw(&mut seen, now + minutes(2), wear(1_100_100, 900, 0, 0)).unwrap();
        assert!(why.contains("896 of 100100"), "{why}");
    }

    #[test]
    fn stalls_and_bad_copies_count_together_within_ten_minutes_and_not_over_days() {
        let (mut seen, now) = (Wear::default(), Instant::now());
        for hour in 0..200 {
            let at = now + minutes(60 * hour);
            assert_eq!(saw(&mut seen, at, wear(hour * 1000, 0, hour * 20, hour)), None, "{hour}");
        }
        let at = now + minutes(60 * 200);
        assert_eq!(saw(&mut seen, at, wear(200_000, 0, 3980, 200)), None);
        assert!(saw(&mut seen, at + minutes(5), wear(200_001, 0, 3980, 203)).is_some());
        let mut seen = Wear::default();
        assert_eq!(saw(&mut seen, now, wear(10, 0, 99, 0)), None);
        assert!(saw(&mut seen, now + minutes(1), wear(20, 0, 199, 0)).is_some());
    }

    #[test]
    fn a_process_that_began_anew_is_judged_by_what_it_did_itself() {
        let (mut seen, now) = (Wear::default(), Instant::now());
        assert_eq!(saw(&mut seen, now, wear(1000, 0, 0, 2)), None);
        assert_eq!(saw(&mut seen, now + minutes(1), wear(5, 0, 0, 1)), None);
        assert_eq!(saw(&mut seen, now + minutes(2), wear(6, 0, 0, 2)), None);
        assert!(saw(&mut seen, now + minutes(3), wear(7, 0, 0, 4)).is_some());
    }

    #[test]
    fn limits_and_the_time_in_which_they_count_can_be_others_and_none_is_zero() {
        let within = "1m".parse().unwrap();
        let limits = DyingLimits { within, errors: 2, one_in: 10, bad: 7, stalls: 1 };
        limits.check().unwrap();
        let now = Instant::now();
        let dies = |at: Duration, second: api::PoolWear| {
            let mut seen = Wear::default();
            assert_eq!(seen.saw(now, wear(0, 0, 0, 0), &limits), None);
            assert_eq!(seen.saw(now + at / 2, wear(0, 0, 0, 0), &limits), None);
            seen.saw(now + at, second, &limits)
        };
        let second = Duration::from_secs(1);
        assert!(dies(second, wear(20, 2, 0, 0)).is_some_and(|why| why.ends_with("within 1m")));
        assert_eq!(dies(second, wear(21, 2, 0, 0)), None, "less than one in ten");
        assert!(dies(second, wear(0, 0, 7, 0)).is_some());
        assert!(dies(second, wear(0, 0, 0, 1)).is_some());
        assert_eq!(dies(3 * minutes(1), wear(0, 0, 7, 1)), None, "a long silence");
        let of: [fn(&mut DyingLimits) -> &mut u64; 4] =
            [|l| &mut l.errors, |l| &mut l.one_in, |l| &mut l.bad, |l| &mut l.stalls];
        for of in of {
            let mut limits = limits;
            *of(&mut limits) = 0;
            assert!(limits.check().is_err(), "{limits:?}");
        }
    }

    proptest! {
        /// No sequence of reports panics, and the number of samples is bounded.
        #[test]
        fn no_report_panics_and_what_is_kept_is_bounded(
            reports in proptest::collection::vec((0u64..100, any::<[u64; 4]>()), 0..200),
        ) {
            let (mut seen, mut now) = (Wear::default(), Instant::now());
            for (seconds, [a, b, c, d]) in reports {
                now += Duration::from_secs(seconds);
                saw(&mut seen, now, wear(a, b, c, d));
                prop_assert!(seen.samples.len() <= 62);
            }
        }

        #[test]
        fn a_pool_without_errors_is_never_dying(steps in proptest::collection::vec(0u64..1_000_000, 1..100)) {
            let (mut seen, mut now, mut operations) = (Wear::default(), Instant::now(), 0);
            for step in steps {
                operations += step;
                now += Duration::from_secs(step % 900);
                prop_assert_eq!(saw(&mut seen, now, wear(operations, 0, 0, 0)), None);
            }
        }
    }
}
