//! The one queue of everything that is going to happen, in order of simulated time; what is due
//! at the same instant happens in the order in which it was planned, so that a run is one run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Nanoseconds of simulated time since the run began.
pub type Instant = u64;

pub const MICROSECOND: u64 = 1_000;
pub const MILLISECOND: u64 = 1_000_000;
pub const SECOND: u64 = 1_000_000_000;

struct Due<E> {
    at: Instant,
    order: u64,
    event: E,
}

impl<E> PartialEq for Due<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl<E> Eq for Due<E> {}
impl<E> PartialOrd for Due<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for Due<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

pub struct Schedule<E> {
    now: Instant,
    planned: u64,
    heap: BinaryHeap<Reverse<Due<E>>>,
}

impl<E> Default for Schedule<E> {
    fn default() -> Self {
        Self { now: 0, planned: 0, heap: BinaryHeap::new() }
    }
}

impl<E> Schedule<E> {
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Plans `event` at `at`, or at once if that has passed.
    pub fn at(&mut self, at: Instant, event: E) {
        self.planned += 1;
        self.heap.push(Reverse(Due { at: at.max(self.now), order: self.planned, event }));
    }

    pub fn after(&mut self, delay: u64, event: E) {
        self.at(self.now.saturating_add(delay), event);
    }

    /// Time of the next event.
    pub fn next_at(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse(due)| due.at)
    }

    /// Moves time on to an instant before the next event.
    pub fn move_to(&mut self, at: Instant) {
        let next = self.next_at().unwrap_or(at);
        self.now = self.now.max(at.min(next));
    }

    /// The next event; time moves to it.
    pub fn take(&mut self) -> Option<E> {
        let Reverse(due) = self.heap.pop()?;
        self.now = due.at;
        Some(due.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_happen_in_time_order_and_ties_in_the_order_planned() {
        let mut schedule = Schedule::default();
        for (at, name) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b')] {
            schedule.at(at, name);
        }
        let mut seen = String::new();
        while let Some(name) = schedule.take() {
            if name == 'b' {
                schedule.at(0, 'x');
            }
            seen.push(name);
        }
        assert_eq!(seen, "abxcd");
        assert_eq!(schedule.now(), 5);
    }
}
