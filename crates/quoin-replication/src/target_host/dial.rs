//! Which connections to replicas are made next.
//!
//! A host that drops packets holds each dial up for seconds, and every volume with a replica there
//! dials it again and again. So each address has a limit of dials under way, which is one where the
//! last dial was not answered; such addresses together have a limit too. A dial that waits for its
//! turn goes away with its session.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use quoin_types::mutant;

/// Dials under way at once, of all shards.
pub const DIALS_MAX: usize = 128;
/// Of those, at addresses where the last dial was not answered.
pub const UNPROVEN_MAX: usize = 96;
/// Dials under way at one address. A pool takes four times as many from one host.
pub const DIALS_PER_ADDRESS: usize = 4;
/// A dial that took longer was held up by the network or a process that hangs.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// Returns true if a dial shows that its address answers, with whatever answer.
pub fn is_answered(connected: bool, took: Duration) -> bool {
    connected || took < ANSWERS_WITHIN
}

/// Dials by their address; one at which there are none is not kept.
#[derive(Clone, Debug)]
pub struct Queue<D> {
    addresses: BTreeMap<String, Address<D>>,
    /// The address at which the last dial began: addresses take turns.
    last: String,
}

#[derive(Clone, Debug)]
struct Address<D> {
    waiting: VecDeque<D>,
    under_way: usize,
    /// The last dial was answered.
    proven: bool,
}

impl<D> Default for Queue<D> {
    fn default() -> Self {
        Self { addresses: BTreeMap::new(), last: String::new() }
    }
}

impl<D> Default for Address<D> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), under_way: 0, proven: false }
    }
}

impl<D> Address<D> {
    fn may_begin(&self, unproven: usize) -> bool {
        let limit = match self.proven {
            _ if mutant::is("dials-not-shared-by-address") => DIALS_MAX,
            true => DIALS_PER_ADDRESS,
            false if unproven < UNPROVEN_MAX => 1,
            false => 0,
        };
        !self.waiting.is_empty() && self.under_way < limit
    }
}

impl<D> Queue<D> {
    /// Dials that wait or are under way.
    pub fn len(&self) -> usize {
        self.addresses.values().map(|a| a.waiting.len() + a.under_way).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    pub fn add(&mut self, address: &str, dial: D) {
        self.addresses.entry(address.to_owned()).or_default().waiting.push_back(dial);
    }

    /// The next dial that may begin; it is under way from now on.
    pub fn begin_next(&mut self) -> Option<D> {
        let under_way = |of: &Address<D>| of.under_way;
        if self.addresses.values().map(under_way).sum::<usize>() >= DIALS_MAX {
            return None;
        }
        let unproven = self.addresses.values().filter(|a| !a.proven).map(under_way).sum();
        let later = self.addresses.range::<str, _>((Excluded(self.last.as_str()), Unbounded));
        let mut in_turn = later.chain(&self.addresses);
        let (name, _) = in_turn.find(|(_, address)| address.may_begin(unproven))?;
        self.last = name.clone();
        let address = self.addresses.get_mut(&self.last)?;
        address.under_way += 1;
        address.waiting.pop_front()
    }

    /// A dial at this address ended; `proven`: as [`is_answered`] has it.
    pub fn ended(&mut self, address: &str, proven: bool) {
        if let Some(of) = self.addresses.get_mut(address) {
            of.under_way -= 1;
            of.proven = proven;
        }
        self.forget_empty();
    }

    /// Takes out what waits and is not wanted any more.
    pub fn retain(&mut self, wanted: impl Fn(&D) -> bool) {
        if mutant::is("stale-dials-kept") {
            return;
        }
        for address in self.addresses.values_mut() {
            address.waiting.retain(&wanted);
        }
        self.forget_empty();
    }

    fn forget_empty(&mut self) {
        self.addresses.retain(|_, a| a.under_way > 0 || !a.waiting.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(queue: &mut Queue<u64>) -> usize {
        std::iter::from_fn(|| queue.begin_next()).count()
    }

    #[test]
    fn an_address_that_answered_is_dialled_for_several_sessions_at_a_time_and_others_for_one() {
        let mut queue = Queue::default();
        for n in 0..200 {
            queue.add("a", n);
            queue.add("b", n);
            queue.add(&format!("dead {n}"), n);
        }
        assert_eq!(begun(&mut queue), UNPROVEN_MAX);
        assert_eq!((queue.addresses["a"].under_way, queue.addresses["b"].under_way), (1, 1));
        queue.ended("a", true);
        assert_eq!(begun(&mut queue), DIALS_PER_ADDRESS + 1, "its own, and one that waited");
        assert_eq!(queue.addresses["a"].under_way, DIALS_PER_ADDRESS);
        queue.ended("a", false);
        assert_eq!(begun(&mut queue), 0, "three are under way at an address that hangs");
    }

    #[test]
    fn an_address_keeps_its_order_and_loses_what_is_not_wanted_any_more() {
        let mut queue = Queue::default();
        (0..10).for_each(|n| queue.add("a", n));
        assert_eq!((queue.begin_next(), queue.begin_next()), (Some(0), None));
        queue.retain(|n| n % 2 == 1);
        assert_eq!(queue.len(), 6, "the one under way goes on");
        queue.ended("a", true);
        assert_eq!(std::iter::from_fn(|| queue.begin_next()).collect::<Vec<_>>(), [1, 3, 5, 7]);
        queue.retain(|_| false);
        (0..4).for_each(|_| queue.ended("a", true));
        assert!(queue.is_empty(), "an address without dials is forgotten");
    }

    #[test]
    fn a_dial_that_failed_at_once_was_answered() {
        let table = [(true, 5000, true), (false, 10, true), (false, 1000, false)];
        for (connected, ms, answered) in table {
            assert_eq!(is_answered(connected, Duration::from_millis(ms)), answered);
        }
    }
}
