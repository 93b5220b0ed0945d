//! Which streams to a peer run, where more are to run than may at a time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quoin_identity::ClusterId;
use tokio::sync::oneshot;

/// Streams to one peer at a time.
pub const STREAMS_A_PEER_MAX: usize = 8;

/// Places of the streams to all peers.
#[derive(Default, Debug)]
pub struct Places(Mutex<BTreeMap<u128, Peer>>);

#[derive(Default, Debug)]
struct Peer {
    /// Number of the streams of each group that run.
    running: BTreeMap<u128, usize>,
    /// When each group with somebody waiting was given a place last, as a count of places given.
    served: BTreeMap<u128, u64>,
    given: u64,
    waiting: BTreeMap<Who, oneshot::Sender<()>>,
    asked: u64,
}

/// Group, volume, and a number that tells those of one volume from each other.
type Who = (u128, u128, u64);

impl Peer {
    fn running(&self) -> usize {
        self.running.values().sum()
    }

    /// The group with the fewest streams is next; of several the one that was served least recently, and then
    /// the order of groups and volumes.
    fn next(&self) -> Option<Who> {
        let order = |who: &&Who| {
            let of = |counts: &BTreeMap<u128, u64>| counts.get(&who.0).copied().unwrap_or(0);
            (self.running.get(&who.0).copied().unwrap_or(0), of(&self.served), **who)
        };
        self.waiting.keys().min_by_key(order).copied()
    }

    fn give(&mut self) {
        while self.running() < STREAMS_A_PEER_MAX {
            let Some(who) = self.next() else { return };
            let Some(waits) = self.waiting.remove(&who) else { return };
            self.given += 1;
            self.served.insert(who.0, self.given);
            *self.running.entry(who.0).or_default() += 1;
            if waits.send(()).is_err() {
                self.end(who.0);
            }
        }
    }

    fn end(&mut self, group: u128) {
        if let Some(count) = self.running.get_mut(&group) {
            *count = count.saturating_sub(1);
        }
        self.running.retain(|_, count| *count > 0);
    }
}

impl Places {
    /// Waits for a place, which lasts until it is dropped.
    pub async fn take(self: &Arc<Self>, peer: ClusterId, group: u128, volume: u128) -> Place {
        let (sender, given) = oneshot::channel();
        let who = {
            let mut peers = self.lock();
            let of = peers.entry(peer.0).or_default();
            of.asked += 1;
            let who = (group, volume, of.asked);
            of.waiting.insert(who, sender);
            who
        };
        // From here on the place is given back also where nobody waits for it any more.
        let mut place =
            Place { places: self.clone(), peer, who, is_given: false, given: Some(given) };
        place.change(Peer::give);
        if let Some(given) = place.given.as_mut() {
            // Its sender is dropped by nobody but the place itself.
            let _ = given.await;
        }
        place.given = None;
        place.is_given = true;
        place
    }

    /// Returns true if some stream to the peer waits for a place.
    pub fn are_wanted(&self, peer: ClusterId) -> bool {
        self.lock().get(&peer.0).is_some_and(|peer| !peer.waiting.is_empty())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u128, Peer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Place of a stream.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    peer: ClusterId,
    who: Who,
    is_given: bool,
    given: Option<oneshot::Receiver<()>>,
}

impl Place {
    fn change(&self, change: impl FnOnce(&mut Peer)) {
        let mut peers = self.places.lock();
        if let Some(peer) = peers.get_mut(&self.peer.0) {
            change(peer);
            if peer.waiting.is_empty() && peer.running.is_empty() {
                peers.remove(&self.peer.0);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A place that was given in the very moment counts too.
        let was_sent = self.given.as_mut().is_some_and(|given| given.try_recv().is_ok());
        self.change(|peer| {
            peer.waiting.remove(&self.who);
            if self.is_given || was_sent {
                peer.end(self.who.0);
            }
            peer.give();
        });
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const PEER: ClusterId = ClusterId(1);

    #[tokio::test]
    async fn groups_share_the_places_and_those_of_one_group_wait_for_each_other() {
        let places = Arc::new(Places::default());
        let mut running = Vec::new();
        for volume in 0..STREAMS_A_PEER_MAX as u128 {
            running.push(places.take(PEER, 1, volume).now_or_never().unwrap());
        }
        let mut of_first = Box::pin(places.take(PEER, 1, 100));
        let mut of_second = Box::pin(places.take(PEER, 2, 101));
        let mut of_third = Box::pin(places.take(PEER, 3, 102));
        assert!(of_first.as_mut().now_or_never().is_none());
        assert!(of_third.as_mut().now_or_never().is_none());
        assert!(of_second.as_mut().now_or_never().is_none() && places.are_wanted(PEER));
        let other_peer = places.take(ClusterId(2), 1, 1).now_or_never();
        assert!(other_peer.is_some());
        running.pop();
        assert!(of_first.as_mut().now_or_never().is_none());
        let second = of_second.as_mut().now_or_never().unwrap();
        drop(of_third);
        drop(second);
        running.push(of_first.now_or_never().unwrap());
        assert!(!places.are_wanted(PEER));
        drop((running, other_peer));
        assert!(places.lock().is_empty());
    }

    #[tokio::test]
    async fn a_place_that_was_given_to_one_that_left_is_given_on() {
        let places = Arc::new(Places::default());
        let mut running = Vec::new();
        for volume in 0..STREAMS_A_PEER_MAX as u128 {
            running.push(places.take(PEER, 1, volume).await);
        }
        let mut left = Box::pin(places.take(PEER, 1, 100));
        assert!(left.as_mut().now_or_never().is_none());
        running.pop();
        drop(left);
        assert!(places.take(PEER, 1, 101).now_or_never().is_some());
        drop(running);
        assert!(places.lock().is_empty());
    }
}
