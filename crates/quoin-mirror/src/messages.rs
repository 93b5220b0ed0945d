//! Messages of the controllers of two clusters, which mirrors carry and do not read.
//!
//! The controllers say everything again each second, so a queue that is full drops its oldest message.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use quoin_api::control::PeerMessage;
use quoin_identity::ClusterId;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::frame::{Frame, MESSAGE_BYTES_MAX};

/// Messages that wait for a link to one peer.
const OUT_MAX: usize = 4096;
const OUT_BYTES_MAX: usize = 8 << 20;
/// Messages that wait for the controller of this cluster.
const IN_MAX: usize = 1024;
const IN_BYTES_MAX: usize = 4 << 20;
/// Bytes of messages in one report, well below what a call may have.
const REPORT_BYTES_MAX: usize = 1 << 20;
/// Age at which a message is given up whose report failed.
const IN_AGE_MAX: Duration = Duration::from_secs(5);
/// A link that heard nothing for so long is passed over. The other side pings each second.
const ALIVE: Duration = Duration::from_secs(3);

/// Messages for the controllers of peers, and the links that may carry them.
#[derive(Default, Debug)]
pub struct Outbox(Mutex<BTreeMap<u128, Peer>>);

#[derive(Default, Debug)]
struct Peer {
    queue: VecDeque<(u128, Bytes)>,
    bytes: usize,
    links: Vec<Link>,
    links_made: u64,
    news: watch::Sender<()>,
}

#[derive(Debug)]
struct Link {
    id: u64,
    /// This mirror made it. A link that the peer's mirror made is used where there is no such one.
    is_dialled: bool,
    heard: Option<Instant>,
}

impl Peer {
    /// The link that carries what waits now.
    fn carrier(&self) -> Option<u64> {
        let is_alive = |link: &&Link| link.heard.is_some_and(|heard| heard.elapsed() < ALIVE);
        let alive = self.links.iter().filter(is_alive);
        alive.max_by_key(|link| (link.is_dialled, link.id)).map(|link| link.id)
    }
}

impl Outbox {
    /// Puts a message into the queue of its peer.
    pub fn push(&self, peer: ClusterId, group: u128, body: Bytes) {
        if body.len() > MESSAGE_BYTES_MAX {
            tracing::error!(%peer, bytes = body.len(), "a message is too long, and not sent");
            return;
        }
        let mut peers = self.lock();
        let peer = peers.entry(peer.0).or_default();
        peer.bytes += body.len();
        peer.queue.push_back((group, body));
        while peer.queue.len() > OUT_MAX || peer.bytes > OUT_BYTES_MAX {
            let Some((_, dropped)) = peer.queue.pop_front() else { break };
            peer.bytes -= dropped.len();
        }
        peer.news.send_replace(());
    }

    /// Forgets what waits for other clusters than these.
    pub fn keep(&self, peers: &[ClusterId]) {
        self.lock().retain(|id, peer| {
            let stays = peers.contains(&ClusterId(*id));
            if !stays {
                peer.queue.clear();
                peer.bytes = 0;
            }
            stays || !peer.links.is_empty()
        });
    }

    /// Takes a link in, until the place is dropped.
    pub fn link(&self, peer: ClusterId, is_dialled: bool) -> LinkPlace<'_> {
        let mut peers = self.lock();
        let of = peers.entry(peer.0).or_default();
        of.links_made += 1;
        let id = of.links_made;
        of.links.push(Link { id, is_dialled, heard: None });
        let news = of.news.subscribe();
        LinkPlace { outbox: self, peer, id, news }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u128, Peer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Place of a link among those that lead to a peer.
#[derive(Debug)]
pub struct LinkPlace<'a> {
    outbox: &'a Outbox,
    peer: ClusterId,
    id: u64,
    news: watch::Receiver<()>,
}

impl LinkPlace<'_> {
    /// A frame came by this link.
    pub fn heard(&self) {
        let mut peers = self.outbox.lock();
        let links = peers.get_mut(&self.peer.0).map(|peer| &mut peer.links);
        if let Some(link) = links.and_then(|links| links.iter_mut().find(|link| link.id == self.id))
        {
            link.heard = Some(Instant::now());
        }
    }

    /// The next message, where this link is the one to carry it.
    pub fn next(&self) -> Option<Frame> {
        let mut peers = self.outbox.lock();
        let peer = peers.get_mut(&self.peer.0).filter(|peer| peer.carrier() == Some(self.id))?;
        let (group, body) = peer.queue.pop_front()?;
        peer.bytes -= body.len();
        Some(Frame::Group { group, body })
    }

    /// Changes whenever there may be a message.
    pub fn news(&self) -> watch::Receiver<()> {
        self.news.clone()
    }
}

impl Drop for LinkPlace<'_> {
    fn drop(&mut self) {
        let mut peers = self.outbox.lock();
        if let Some(peer) = peers.get_mut(&self.peer.0) {
            peer.links.retain(|link| link.id != self.id);
            // Another link carries what waits.
            peer.news.send_replace(());
        }
    }
}

/// Messages of the controllers of peers for the one of this cluster.
#[derive(Default, Debug)]
pub struct Inbox {
    queue: Mutex<Queue>,
    news: Notify,
}

#[derive(Default, Debug)]
struct Queue {
    messages: VecDeque<Said>,
    bytes: usize,
    /// Number of the next one.
    next: u64,
}

#[derive(Debug)]
struct Said {
    number: u64,
    came: Instant,
    peer: ClusterId,
    group: u128,
    body: Bytes,
}

impl Queue {
    /// Drops the oldest message of the peer that has the most of them here.
    fn drop_oldest(&mut self) {
        let mut counts = BTreeMap::<u128, usize>::new();
        self.messages.iter().for_each(|said| *counts.entry(said.peer.0).or_default() += 1);
        let of = counts.into_iter().max_by_key(|(_, count)| *count).map(|(peer, _)| peer);
        let oldest = self.messages.iter().position(|said| Some(said.peer.0) == of);
        if let Some(dropped) = oldest.and_then(|oldest| self.messages.remove(oldest)) {
            self.bytes -= dropped.body.len();
        }
    }

    fn retain(&mut self, stays: impl Fn(&Said) -> bool) {
        self.messages.retain(stays);
        self.bytes = self.messages.iter().map(|said| said.body.len()).sum();
    }
}

impl Inbox {
    pub fn push(&self, peer: ClusterId, group: u128, body: Bytes) {
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        queue.bytes += body.len();
        queue.messages.push_back(Said { number, came: Instant::now(), peer, group, body });
        while queue.messages.len() > IN_MAX || queue.bytes > IN_BYTES_MAX {
            queue.drop_oldest();
        }
        drop(queue);
        self.news.notify_one();
    }

    /// Waits until there is a message.
    pub async fn news(&self) {
        while self.lock().messages.is_empty() {
            self.news.notified().await;
        }
    }

    /// Returns the oldest messages, as many as one report may have, and the number behind the last of them.
    pub fn first(&self) -> (Vec<PeerMessage>, u64) {
        let queue = self.lock();
        let (mut bytes, mut end) = (0, 0);
        let fits = |said: &&Said| {
            bytes += said.body.len();
            bytes <= REPORT_BYTES_MAX
        };
        let told = |said: &Said| {
            end = said.number + 1;
            PeerMessage {
                peer_cluster_id: said.peer.to_string(),
                group_id: format!("{:032x}", said.group),
                body: said.body.to_vec(),
            }
        };
        let messages = queue.messages.iter().take_while(fits).map(told).collect();
        (messages, end)
    }

    /// The controller took the messages before this number.
    pub fn took(&self, end: u64) {
        self.lock().retain(|said| said.number >= end);
    }

    /// A report failed: the older messages are given up.
    pub fn failed(&self) {
        self.lock().retain(|said| said.came.elapsed() < IN_AGE_MAX);
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: ClusterId = ClusterId(7);

    fn carried(frame: Option<Frame>) -> Option<u128> {
        match frame? {
            Frame::Group { group, .. } => Some(group),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_dialled_link_carries_messages_and_one_of_the_peer_where_that_is_silent() {
        let outbox = Outbox::default();
        (1..=4).for_each(|group| outbox.push(PEER, group, Bytes::new()));
        let (theirs, own) = (outbox.link(PEER, false), outbox.link(PEER, true));
        assert_eq!(carried(own.next()), None, "it may not be let in");
        theirs.heard();
        assert_eq!(carried(theirs.next()), Some(1));
        own.heard();
        assert_eq!((carried(theirs.next()), carried(own.next())), (None, Some(2)));
        tokio::time::advance(ALIVE).await;
        theirs.heard();
        assert_eq!((carried(own.next()), carried(theirs.next())), (None, Some(3)));
        own.heard();
        let mut news = theirs.news();
        drop(own);
        news.changed().await.unwrap();
        assert_eq!(carried(theirs.next()), Some(4));
        assert_eq!(carried(theirs.next()), None);
    }

    #[test]
    fn a_queue_that_is_full_drops_its_oldest_message() {
        let outbox = Outbox::default();
        (0..=OUT_MAX as u128).for_each(|group| outbox.push(PEER, group, Bytes::new()));
        let longest = Bytes::from(vec![0; MESSAGE_BYTES_MAX]);
        let link = outbox.link(PEER, true);
        link.heard();
        assert_eq!(carried(link.next()), Some(1));
        for group in 0..OUT_MAX as u128 {
            outbox.push(PEER, group, longest.clone());
        }
        let first = OUT_MAX - OUT_BYTES_MAX / MESSAGE_BYTES_MAX;
        assert_eq!(carried(link.next()), Some(first as u128));
        outbox.push(PEER, 1, Bytes::from(vec![0; MESSAGE_BYTES_MAX + 1]));
        outbox.keep(&[]);
        assert_eq!(carried(link.next()), None);
        drop(link);
        outbox.keep(&[]);
        assert!(outbox.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn messages_stay_until_a_report_took_them_or_failed_too_long() {
        let inbox = Inbox::default();
        assert_eq!(inbox.first(), (Vec::new(), 0));
        inbox.push(PEER, 5, Bytes::from_static(b"one"));
        let (messages, end) = inbox.first();
        assert_eq!(messages[0].group_id, format!("{:032x}", 5));
        assert_eq!(messages[0].peer_cluster_id, PEER.to_string());
        inbox.push(PEER, 6, Bytes::from_static(b"two"));
        inbox.failed();
        inbox.took(end);
        let (messages, _) = inbox.first();
        assert_eq!(messages.iter().map(|said| &said.body[..]).collect::<Vec<_>>(), [b"two"]);
        tokio::time::advance(IN_AGE_MAX).await;
        inbox.failed();
        assert_eq!(inbox.first().0, []);
    }

    #[test]
    fn a_peer_that_says_too_much_drops_nothing_of_another_one_and_reports_are_bounded() {
        let inbox = Inbox::default();
        inbox.push(ClusterId(1), 1, Bytes::new());
        for _ in 0..2 * IN_MAX {
            inbox.push(PEER, 2, Bytes::from(vec![0; MESSAGE_BYTES_MAX]));
        }
        let (messages, end) = inbox.first();
        assert_eq!(messages[0].peer_cluster_id, ClusterId(1).to_string());
        assert_eq!(messages.len(), 1 + REPORT_BYTES_MAX / MESSAGE_BYTES_MAX);
        assert!(inbox.lock().bytes <= IN_BYTES_MAX);
        inbox.took(end);
        assert_eq!(inbox.lock().messages.len(), 63 - 16 + 1);
    }
}
