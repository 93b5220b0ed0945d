//! Pools that are reached where they say they are, as far as it is known.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Time until a pool that was reached is dialled again; one that was not is dialled again sooner.
const AGAIN: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_secs(2);
/// Failures in a row by which a pool that was reached counts as unreachable: so many that one that
/// died is offline before.
const FAILURES: u32 = 5;

/// How one pool stands.
#[derive(Clone, Debug)]
struct Standing {
    address: String,
    /// `None`: it was not dialled yet.
    reached: Option<bool>,
    why: String,
    failures: u32,
    due: Instant,
    under_way: bool,
}

/// A turn that is worth an event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    Reached,
    Unreachable(String),
}

/// The ways to all pools, as far as they are known.
#[derive(Debug, Default)]
pub struct Reach {
    /// True if this controller dials; one that does not takes every address as it is told.
    pub(crate) dials: bool,
    pools: HashMap<String, Standing>,
    /// Notified when a pool is to be dialled now.
    pub(crate) news: Arc<Notify>,
}

impl Reach {
    /// A pool told its address.
    pub(crate) fn told(&mut self, pool: &str, address: &str) {
        if !self.dials || self.pools.get(pool).is_some_and(|known| known.address == address) {
            return;
        }
        let standing = Standing {
            address: address.to_owned(),
            reached: None,
            why: format!("it has not been reached at {address} yet"),
            failures: 0,
            due: Instant::now(),
            under_way: false,
        };
        self.pools.insert(pool.to_owned(), standing);
        self.news.notify_one();
    }

    pub(crate) fn forget(&mut self, pool: &str) {
        self.pools.remove(pool);
    }

    /// A target has a connection to it. Returns whether that is news.
    pub(crate) fn served(&mut self, pool: &str) -> bool {
        let Some(known) = self.pools.get_mut(pool) else { return false };
        known.failures = 0;
        if known.reached == Some(true) {
            known.due = Instant::now() + AGAIN;
            return false;
        }
        // The dial that is due tells of the turn.
        known.reached = Some(true);
        true
    }

    /// Why the pool is of no use; `None`: it is reached, or nothing is known yet. `starting`: the
    /// controller has just started, and pools that were reached before have not been dialled.
    pub(crate) fn why_not(&self, pool: &str, starting: bool) -> Option<&str> {
        let known = self.pools.get(pool)?;
        match known.reached {
            Some(true) => None,
            None if starting => None,
            Some(false) | None => Some(&known.why),
        }
    }

    /// Pools to be dialled, of those that are alive.
    pub(crate) fn due(
        &mut self,
        now: Instant,
        is_alive: impl Fn(&str) -> bool,
    ) -> Vec<(String, String)> {
        let mut due = Vec::new();
        for (pool, known) in &mut self.pools {
            if known.due <= now && !known.under_way && is_alive(pool) {
                known.under_way = true;
                due.push((pool.clone(), known.address.clone()));
            }
        }
        due
    }

    pub(crate) fn dialled(
        &mut self,
        pool: &str,
        address: &str,
        outcome: Result<(), String>,
        now: Instant,
    ) -> Option<Turn> {
        let known = self.pools.get_mut(pool).filter(|known| known.address == address)?;
        known.under_way = false;
        let before = known.reached;
        match outcome {
            Ok(()) => {
                known.failures = 0;
                known.reached = Some(true);
                known.due = now + AGAIN;
                (before == Some(false)).then_some(Turn::Reached)
            }
            Err(why) => {
                known.failures += 1;
                known.due = now + RETRY;
                if before == Some(true) && known.failures < FAILURES {
                    return None;
                }
                known.reached = Some(false);
                known.why = format!("it cannot be reached at {address}: {why}");
                (before != Some(false)).then(|| Turn::Unreachable(known.why.clone()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dialling() -> Reach {
        Reach { dials: true, ..Reach::default() }
    }

    #[test]
    fn a_pool_counts_once_it_was_reached_and_until_it_was_missed_several_times() {
        let mut reach = dialling();
        let now = Instant::now();
        assert_eq!(reach.why_not("a", false), None, "nothing is known of it");
        reach.told("a", "h1:7401");
        assert!(reach.why_not("a", false).unwrap().contains("h1:7401"));
        assert_eq!(reach.why_not("a", true), None, "the controller has just started");
        assert!(reach.due(Instant::now(), |_| false).is_empty(), "it is away");
        let due = reach.due(Instant::now(), |_| true);
        assert_eq!(due, [("a".to_owned(), "h1:7401".to_owned())]);
        assert!(reach.due(Instant::now(), |_| true).is_empty(), "one dial at a time");
        assert_eq!(reach.dialled("a", "h1:7401", Ok(()), now), None);
        assert_eq!(reach.why_not("a", false), None);
        for _ in 1..FAILURES {
            assert_eq!(reach.dialled("a", "h1:7401", Err("refused".into()), now), None);
            assert_eq!(reach.why_not("a", false), None);
        }
        let turn = reach.dialled("a", "h1:7401", Err("refused".into()), now);
        let why = "it cannot be reached at h1:7401: refused";
        assert_eq!(turn, Some(Turn::Unreachable(why.into())));
        assert_eq!(reach.why_not("a", true), Some(why));
        assert_eq!(reach.dialled("a", "h1:7401", Err("refused".into()), now), None, "told once");
        assert_eq!(reach.dialled("a", "h1:7401", Ok(()), now), Some(Turn::Reached));
    }

    #[test]
    fn a_pool_that_was_never_reached_is_unreachable_at_the_first_failure() {
        let mut reach = dialling();
        reach.told("a", "h1:7401");
        let turn = reach.dialled("a", "h1:7401", Err("refused".into()), Instant::now());
        assert!(matches!(turn, Some(Turn::Unreachable(_))));
        // The answer of an address that it has left does not count.
        reach.told("a", "h2:7401");
        assert_eq!(reach.dialled("a", "h1:7401", Ok(()), Instant::now()), None);
        assert!(reach.why_not("a", false).unwrap().contains("h2:7401"));
    }

    #[test]
    fn a_targets_connection_counts_where_the_controller_is_kept_out() {
        let mut reach = dialling();
        reach.told("a", "h1:7401");
        reach.dialled("a", "h1:7401", Err("no answer".into()), Instant::now());
        reach.served("a");
        assert_eq!(reach.why_not("a", false), None);
        for _ in 1..FAILURES {
            reach.dialled("a", "h1:7401", Err("no answer".into()), Instant::now());
            reach.served("a");
        }
        assert_eq!(reach.why_not("a", false), None);
    }
}
