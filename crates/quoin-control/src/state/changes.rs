//! Changes of records wake only the streams of the pools and nodes that they concern, and queue the
//! volumes that they concern for those who look after volumes.
//!
//! A cluster has as many streams as pools and nodes. If each change woke each stream, or had one
//! make its assignment anew, the cost of making one volume would grow with the number of all
//! replicas. So a stream is told which volumes changed.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use quoin_cluster::records::{Concerned, Nodes};
use quoin_types::VolumeId;
use tokio::sync::watch;

/// Volumes that a stream is told of one by one; where more changed, it looks at all.
const VOLUMES_MAX: usize = 4096;

/// Pool or node whose assignment a change may alter.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Concern {
    Pool(String),
    Node(String),
}

/// Objects that a stream is to look at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum News {
    All,
    Volumes(BTreeSet<VolumeId>),
}

impl News {
    fn none() -> Self {
        Self::Volumes(BTreeSet::new())
    }

    /// `None`: all volumes may have changed.
    fn add(&mut self, volume: Option<VolumeId>) {
        match (&mut *self, volume) {
            (Self::Volumes(volumes), Some(volume)) if volumes.len() < VOLUMES_MAX => {
                volumes.insert(volume);
            }
            _ => *self = Self::All,
        }
    }
}

/// Counters that rise with each change. All clones share them.
#[derive(Clone, Default)]
pub(crate) struct Changes(Arc<Counters>);

type Queues = RwLock<Vec<Box<dyn Fn(VolumeId) + Send + Sync>>>;

#[derive(Default)]
struct Counters {
    any: watch::Sender<u64>,
    of: Mutex<HashMap<Concern, Vec<Arc<Stream>>>>,
    queues: Queues,
    /// Of those who have to do with a volume at once where users wait for its target.
    urgent: Queues,
}

/// One stream of assignments.
struct Stream {
    counter: watch::Sender<u64>,
    news: Mutex<News>,
}

fn raise(counter: &watch::Sender<u64>) {
    counter.send_modify(|count| *count += 1);
}

impl Stream {
    fn wake(&self, volume: Option<VolumeId>) {
        self.news.lock().unwrap_or_else(PoisonError::into_inner).add(volume);
        raise(&self.counter);
    }
}

/// A stream's end of its changes.
pub(crate) struct Follower {
    stream: Arc<Stream>,
    counter: watch::Receiver<u64>,
}

impl Follower {
    /// Waits for a change, and takes all that changed.
    pub async fn news(&mut self) -> News {
        // The sender lives in the stream, which is held here.
        let _ = self.counter.changed().await;
        let mut news = self.stream.news.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *news, News::none())
    }
}

impl Changes {
    /// Receiver for every change.
    pub fn any(&self) -> watch::Receiver<u64> {
        self.0.any.subscribe()
    }

    /// Follows the changes that may alter one assignment.
    pub fn of(&self, concern: Concern) -> Follower {
        let mut all = self.lock();
        // Removes the streams that ended.
        all.retain(|_, streams| {
            streams.retain(|stream| stream.counter.receiver_count() > 0);
            !streams.is_empty()
        });
        let stream =
            Arc::new(Stream { counter: watch::Sender::default(), news: Mutex::new(News::none()) });
        all.entry(concern).or_default().push(stream.clone());
        let counter = stream.counter.subscribe();
        Follower { stream, counter }
    }

    /// Has each volume that changes put into a queue.
    pub fn queue(&self, queue: impl Fn(VolumeId) + Send + Sync + 'static) {
        self.0.queues.write().unwrap_or_else(PoisonError::into_inner).push(Box::new(queue));
    }

    /// Has each volume whose users wait for its target put into a queue.
    pub fn queue_urgent(&self, queue: impl Fn(VolumeId) + Send + Sync + 'static) {
        self.0.urgent.write().unwrap_or_else(PoisonError::into_inner).push(Box::new(queue));
    }

    /// Puts a volume into the queues of those who act at once.
    pub fn hurry(&self, volume: VolumeId) {
        let queues = self.0.urgent.read().unwrap_or_else(PoisonError::into_inner);
        queues.iter().for_each(|queue| queue(volume));
    }

    /// Puts a volume into the queues: what is observed of it changed, and no assignment.
    pub fn look_at(&self, volume: VolumeId) {
        let queues = self.0.queues.read().unwrap_or_else(PoisonError::into_inner);
        queues.iter().for_each(|queue| queue(volume));
    }

    /// `volume`: the one that changed, where the change is of a single one.
    pub fn wake(&self, concerned: &Concerned, volume: Option<VolumeId>) {
        if *concerned == Concerned::Nobody {
            return;
        }
        if let Some(volume) = volume {
            self.look_at(volume);
        }
        {
            let all = self.lock();
            let wake = |streams: &Vec<Arc<Stream>>| streams.iter().for_each(|s| s.wake(volume));
            match concerned {
                Concerned::Everybody => all.values().for_each(wake),
                Concerned::Some { pools, nodes } => {
                    let pools = pools.iter().map(|pool| Concern::Pool(pool.clone()));
                    pools.filter_map(|pool| all.get(&pool)).for_each(wake);
                    match nodes {
                        Nodes::All => all
                            .iter()
                            .filter(|(concern, _)| matches!(concern, Concern::Node(_)))
                            .for_each(|(_, streams)| wake(streams)),
                        Nodes::These(nodes) => nodes
                            .iter()
                            .filter_map(|node| all.get(&Concern::Node(node.clone())))
                            .for_each(wake),
                    }
                }
                Concerned::Status | Concerned::Nobody => {}
            }
        }
        raise(&self.0.any);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Concern, Vec<Arc<Stream>>>> {
        self.0.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(pool: &str, nodes: Nodes) -> Concerned {
        Concerned::Some { pools: [pool.to_owned()].into(), nodes }
    }

    #[test]
    fn a_change_wakes_the_streams_that_it_concerns_and_those_who_wait_for_any() {
        let changes = Changes::default();
        let pool = |name: &str| Concern::Pool(name.to_owned());
        let node = |name: &str| Concern::Node(name.to_owned());
        let mut streams = [pool("p1"), pool("p2"), node("n1"), node("n2")].map(|c| changes.of(c));
        let mut any = changes.any();
        let mut woken = |concerned: Concerned| {
            changes.wake(&concerned, None);
            let woken = streams.each_mut().map(|stream| {
                let woken = stream.counter.has_changed().unwrap();
                stream.counter.mark_unchanged();
                woken
            });
            let all = any.has_changed().unwrap();
            any.mark_unchanged();
            (woken, all)
        };
        let these = || Nodes::These(["n1".to_owned()].into());
        assert_eq!(woken(some("p1", Nodes::none())), ([true, false, false, false], true));
        assert_eq!(woken(some("p1", these())), ([true, false, true, false], true));
        assert_eq!(woken(some("p1", Nodes::All)), ([true, false, true, true], true));
        assert_eq!(woken(Concerned::Everybody), ([true; 4], true));
        assert_eq!(woken(Concerned::Status), ([false; 4], true));
        assert_eq!(woken(Concerned::Nobody), ([false; 4], false));
    }

    #[test]
    fn a_stream_that_ended_is_forgotten() {
        let changes = Changes::default();
        for n in 0..100 {
            drop(changes.of(Concern::Pool(format!("p{}", n % 2))));
        }
        assert!(changes.lock().values().map(Vec::len).sum::<usize>() <= 1);
    }

    #[tokio::test]
    async fn a_stream_is_told_which_volumes_changed_and_looks_at_all_where_it_is_not_known_which() {
        let changes = Changes::default();
        let mut stream = changes.of(Concern::Pool("p1".to_owned()));
        let change = |volume| changes.wake(&some("p1", Nodes::none()), volume);
        for n in [1, 2, 1] {
            change(Some(VolumeId(n)));
        }
        let volumes = [VolumeId(1), VolumeId(2)].into();
        assert_eq!(stream.news().await, News::Volumes(volumes));
        change(Some(VolumeId(3)));
        change(None);
        change(Some(VolumeId(4)));
        assert_eq!(stream.news().await, News::All);
        for n in 0..=VOLUMES_MAX {
            change(Some(VolumeId(n as u128)));
        }
        assert_eq!(stream.news().await, News::All, "they are too many to be named");
    }

    #[test]
    fn the_volume_of_a_change_is_queued() {
        let (changes, queued) = (Changes::default(), Arc::new(Mutex::new(Vec::new())));
        let queue = queued.clone();
        changes.queue(move |volume| queue.lock().unwrap().push(volume));
        changes.wake(&Concerned::Status, Some(VolumeId(7)));
        changes.wake(&Concerned::Status, None);
        changes.look_at(VolumeId(8));
        assert_eq!(*queued.lock().unwrap(), [VolumeId(7), VolumeId(8)]);
    }
}
