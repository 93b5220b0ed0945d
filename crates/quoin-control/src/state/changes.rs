//! Changes of records wake only the streams of the pools and nodes that they concern.
//!
//! A cluster has as many streams as pools and nodes, and a woken stream makes its assignment anew.
//! If each change woke each stream, the cost of making one volume would grow with the number of all
//! replicas.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Pool or node whose assignment a change may alter.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Concern {
    Pool(String),
    Node(String),
}

/// Pools and nodes whose assignments contain a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Concerned {
    Everybody,
    /// These pools, and every node where `nodes` is set.
    Some {
        pools: BTreeSet<String>,
        nodes: bool,
    },
    /// No assignment; only callers that wait for a status.
    Status,
    /// No assignment and no status.
    Nobody,
}

impl Concerned {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Everybody, _) | (_, Self::Everybody) => Self::Everybody,
            (Self::Nobody, other) | (other, Self::Nobody) => other,
            (Self::Status, other) | (other, Self::Status) => other,
            (Self::Some { mut pools, nodes }, Self::Some { pools: more, nodes: also }) => {
                pools.extend(more);
                Self::Some { pools, nodes: nodes || also }
            }
        }
    }

    /// Pools and nodes that a record concerns before or after a change.
    pub fn by(before: Option<Self>, after: Option<Self>) -> Self {
        before.unwrap_or(Self::Nobody).and(after.unwrap_or(Self::Nobody))
    }
}

/// Counters that rise with each change. All clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    any: watch::Sender<u64>,
    of: Mutex<HashMap<Concern, watch::Sender<u64>>>,
}

fn raise(counter: &watch::Sender<u64>) {
    counter.send_modify(|count| *count += 1);
}

impl Changes {
    /// Receiver for every change.
    pub fn any(&self) -> watch::Receiver<u64> {
        self.0.any.subscribe()
    }

    /// Receiver for changes that may alter one assignment.
    pub fn of(&self, concern: Concern) -> watch::Receiver<u64> {
        let mut streams = self.lock();
        // Removes the counters of streams that ended.
        streams.retain(|_, counter| counter.receiver_count() > 0);
        streams.entry(concern).or_default().subscribe()
    }

    pub fn wake(&self, concerned: &Concerned) {
        if *concerned == Concerned::Nobody {
            return;
        }
        for (stream, counter) in self.lock().iter() {
            let wakes = match (concerned, stream) {
                (Concerned::Everybody, _) => true,
                (Concerned::Some { pools, .. }, Concern::Pool(name)) => pools.contains(name),
                (Concerned::Some { nodes, .. }, Concern::Node(_)) => *nodes,
                (Concerned::Status | Concerned::Nobody, _) => false,
            };
            if wakes {
                raise(counter);
            }
        }
        raise(&self.0.any);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Concern, watch::Sender<u64>>> {
        self.0.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_wakes_the_streams_that_it_concerns_and_those_who_wait_for_any() {
        let changes = Changes::default();
        let pool = |name: &str| Concern::Pool(name.to_owned());
        let mut streams = [
            changes.of(pool("p1")),
            changes.of(pool("p2")),
            changes.of(Concern::Node("n1".into())),
            changes.any(),
        ];
        let mut woken = |concerned: Concerned| {
            changes.wake(&concerned);
            streams.each_mut().map(|stream| {
                let woken = stream.has_changed().unwrap();
                stream.mark_unchanged();
                woken
            })
        };
        let some = |nodes| Concerned::Some { pools: ["p1".to_owned()].into(), nodes };
        assert_eq!(woken(some(false)), [true, false, false, true]);
        assert_eq!(woken(some(true)), [true, false, true, true]);
        assert_eq!(woken(Concerned::Everybody), [true; 4]);
        assert_eq!(woken(Concerned::Status), [false, false, false, true]);
        assert_eq!(woken(Concerned::Nobody), [false; 4]);
    }

    #[test]
    fn a_change_concerns_those_before_it_and_those_after_it() {
        let of =
            |name: &str| Concerned::Some { pools: [name.to_owned()].into(), nodes: name == "b" };
        let both = Concerned::by(Some(of("a")), Some(of("b")));
        let pools = ["a".to_owned(), "b".to_owned()].into();
        assert_eq!(both, Concerned::Some { pools, nodes: true });
        assert_eq!(Concerned::by(None, Some(of("a"))), of("a"));
        assert_eq!(Concerned::by(Some(Concerned::Everybody), Some(of("a"))), Concerned::Everybody);
    }

    #[test]
    fn a_stream_that_ended_is_forgotten() {
        let changes = Changes::default();
        for n in 0..100 {
            drop(changes.of(Concern::Pool(format!("p{n}"))));
        }
        assert!(changes.lock().len() <= 1);
    }
}
