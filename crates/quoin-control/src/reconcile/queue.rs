//! Keyed queue of work: each key is in it once, with the time at which it is due.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Time after the first failure of a key until it is tried again. It doubles with each further one.
const BACKOFF: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(64);

/// Keys that are to be worked on, the one that is due first in front.
pub(crate) struct Queue<K> {
    keys: Mutex<Keys<K>>,
    /// Notified where the first key may be due earlier than before.
    earlier: Notify,
    most: usize,
}

struct Keys<K> {
    due: HashMap<K, Instant>,
    order: BTreeSet<(Instant, K)>,
    /// Failures in a row.
    failures: HashMap<K, u32>,
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    /// `most`: keys that it holds at most. Those beyond are refused, so they must come again.
    pub fn new(most: usize) -> Self {
        let keys = Keys { due: HashMap::new(), order: BTreeSet::new(), failures: HashMap::new() };
        Self { keys: Mutex::new(keys), earlier: Notify::new(), most }
    }

    /// Makes a key due after this time, unless it is due earlier already.
    pub fn add(&self, key: K, after: Duration) {
        let at = Instant::now() + after;
        let mut keys = self.lock();
        match keys.due.get(&key) {
            Some(due) if *due <= at => return,
            None if keys.due.len() >= self.most => return,
            None => {}
            Some(due) => {
                let due = *due;
                keys.order.remove(&(due, key.clone()));
            }
        }
        keys.due.insert(key.clone(), at);
        keys.order.insert((at, key));
        drop(keys);
        self.earlier.notify_one();
    }

    /// Takes the key that is due first, once it is due. One that is added while it is worked on is
    /// in the queue again.
    pub async fn next(&self) -> K {
        loop {
            let due = {
                let mut keys = self.lock();
                match keys.order.first().cloned() {
                    Some((at, key)) if at <= Instant::now() => {
                        keys.order.pop_first();
                        keys.due.remove(&key);
                        return key;
                    }
                    first => first.map(|(at, _)| at),
                }
            };
            match due {
                Some(at) => tokio::select! {
                    () = tokio::time::sleep_until(at) => {}
                    () = self.earlier.notified() => {}
                },
                None => self.earlier.notified().await,
            }
        }
    }

    /// The work on a key failed: it is due again, later with each failure.
    pub fn failed(&self, key: K) {
        let pause = {
            let mut keys = self.lock();
            let failures = keys.failures.entry(key.clone()).or_default();
            *failures = failures.saturating_add(1);
            BACKOFF.saturating_mul(1 << (*failures - 1).min(16)).min(BACKOFF_MAX)
        };
        self.add(key, pause);
    }

    /// The work on a key did not fail.
    pub fn succeeded(&self, key: &K) {
        self.lock().failures.remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, Keys<K>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    pub fn len(&self) -> usize {
        self.lock().due.len()
    }

    /// Keys in their order, and the seconds until each is due.
    fn order(&self) -> Vec<(K, u64)> {
        let seconds = |at: Instant| at.duration_since(Instant::now()).as_secs_f64().round() as u64;
        self.lock().order.iter().map(|(at, key)| (key.clone(), seconds(*at))).collect()
    }

    /// Makes every key due now.
    fn rush(&self) {
        let keys: Vec<K> = self.lock().due.keys().cloned().collect();
        keys.into_iter().for_each(|key| self.add(key, Duration::ZERO));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_key_is_queued_once_and_the_earliest_time_counts() {
        let queue = Queue::new(10);
        queue.add("later", 500 * SECOND);
        queue.add("first", 900 * SECOND);
        queue.add("first", 100 * SECOND);
        queue.add("first", 700 * SECOND);
        assert_eq!(queue.order(), [("first", 100), ("later", 500)]);
    }

    #[tokio::test]
    async fn a_key_that_comes_while_another_is_waited_for_goes_first() {
        let queue = Queue::new(10);
        queue.add("far", 3600 * SECOND);
        let add = async {
            tokio::task::yield_now().await;
            queue.add("near", Duration::from_millis(10));
        };
        let (next, ()) = tokio::join!(queue.next(), add);
        assert_eq!((next, queue.len()), ("near", 1));
    }

    #[tokio::test]
    async fn a_key_that_fails_comes_again_later_each_time_and_one_that_succeeds_begins_anew() {
        let queue = Queue::new(10);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            queue.failed("key");
            pauses.push(queue.order()[0].1);
            queue.rush();
            assert_eq!(queue.next().await, "key");
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64]);
        queue.succeeded(&"key");
        queue.failed("key");
        assert_eq!(queue.order(), [("key", 1)]);
    }

    #[tokio::test]
    async fn a_full_queue_refuses_new_keys_and_takes_those_that_it_has() {
        let queue = Queue::new(3);
        for key in 0..5 {
            queue.add(key, 100 * SECOND);
        }
        assert_eq!(queue.len(), 3);
        queue.add(2, Duration::ZERO);
        assert_eq!(queue.next().await, 2);
        queue.add(4, SECOND);
        assert_eq!(queue.order(), [(4, 1), (0, 100), (1, 100)]);
    }
}
