//! Choice of the connections that a round serves, where all that are ready would make it too long.
//!
//! A round serves one connection after the other, each up to a limit of its own, and answers all of
//! them in the end. With many busy connections that end would be far away. So once a round has
//! taken [`SERVING_MAX`] the rest is passed over: the next round begins at once, and serves them first.
//! No connection is passed over for ever: those that were come before those that were not. The property
//! test below holds that; the simulator, whose pools have a replica each, does not drive this.
//!
//! Requests of rebuilds and background work come after the connections, and are put off by a long round.
//! The next round serves one connection and does them, so that they have every other round at least.

use std::time::Duration;

use quoin_types::time::Time;

/// Time after which a round serves no further connection.
const SERVING_MAX: Duration = Duration::from_millis(6);

/// Work of a round that comes after the connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    Copying,
    Background,
}

/// Connections by their keys.
#[derive(Debug, Default)]
pub struct Turns {
    /// In the order in which they were to be served.
    passed_over: Vec<u64>,
    /// Work that the last round put off.
    put_off: Vec<Work>,
}

impl Turns {
    /// Brings those that are ready into the order in which they are served: first those that the last
    /// round passed over, as it would have served them, and what copies behind all else.
    pub fn order<T>(
        &mut self,
        ready: &mut [T],
        key: impl Fn(&T) -> u64,
        copies: impl Fn(&T) -> bool,
    ) {
        let first = std::mem::take(&mut self.passed_over);
        if first.is_empty() {
            return ready.sort_by_key(copies);
        }
        let place = |one: &T| first.iter().position(|passed| *passed == key(one));
        ready.sort_by_cached_key(|one| (place(one).unwrap_or(first.len()), copies(one)));
    }

    /// Returns true if the round that began then serves no further connection at `now`.
    pub fn is_enough(&self, began: Time, now: Time) -> bool {
        is_long(began, now) || !self.put_off.is_empty()
    }

    /// Returns true if the round that began then leaves this work to the next one.
    pub fn puts_off(&mut self, work: Work, began: Time, now: Time) -> bool {
        let was = self.put_off.contains(&work);
        self.put_off.retain(|other| *other != work);
        let puts_off = !was && is_long(began, now);
        if puts_off {
            self.put_off.push(work);
        }
        puts_off
    }

    /// These were not served.
    pub fn pass_over(&mut self, keys: impl Iterator<Item = u64>) {
        self.passed_over.extend(keys);
    }
}

fn is_long(began: Time, now: Time) -> bool {
    now.since(began) >= SERVING_MAX
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_long_round_serves_nobody_else_and_puts_off_other_work_once() {
        let began = Time::from_millis(100);
        let (short, long) = (began + SERVING_MAX / 2, began + SERVING_MAX);
        let mut turns = Turns::default();
        assert!(!turns.is_enough(began, short) && turns.is_enough(began, long));
        assert!(!turns.puts_off(Work::Copying, began, short));
        assert!(turns.puts_off(Work::Copying, began, long));
        assert!(turns.puts_off(Work::Background, began, long));
        assert!(turns.is_enough(long, long), "the next round has other work");
        assert!(!turns.puts_off(Work::Copying, began, long), "it waited for a round");
        assert!(!turns.puts_off(Work::Background, began, long));
        assert!(!turns.is_enough(long, long));
    }

    proptest! {
        /// All are ready in every round, and each round serves at least one of them.
        #[test]
        fn nobody_is_passed_over_more_often_than_there_are_others(
            served in prop::collection::vec(1usize..9, 100),
            copies in prop::collection::vec(any::<bool>(), 8),
        ) {
            let mut turns = Turns::default();
            let mut waits: BTreeMap<u64, usize> = (0..8).map(|key| (key, 0)).collect();
            for served in served {
                // The system reports them in the same order each time.
                let mut ready: Vec<u64> = (0..8).collect();
                turns.order(&mut ready, |key| *key, |key| copies[*key as usize]);
                let (now, later) = ready.split_at(served.min(8));
                for key in now {
                    waits.insert(*key, 0);
                }
                later.iter().for_each(|key| *waits.entry(*key).or_default() += 1);
                turns.pass_over(later.iter().copied());
                prop_assert!(waits.values().all(|rounds| *rounds < 8), "{waits:?}");
            }
        }
    }
}
