//! Connections between targets and pools, and the faults of the network.
//!
//! A connection keeps its messages in order in each direction, as a stream does; between
//! connections nothing is ordered. A blocked direction holds what was sent (the kernel would
//! retransmit) until it heals or the connection is cut; a cut loses the tail of what is under way
//! in both directions, and each end learns of it in its own time.

use std::collections::{BTreeMap, VecDeque};

use quoin_core::message::{FromReplica, ToReplica};
use quoin_core::{Member, SessionKey};

use crate::random::Random;
use crate::schedule::{Instant, MICROSECOND};

pub type ConnectionId = u64;

/// Which way a message goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    ToPool,
    ToTarget,
}

/// What one end reads from its stream.
#[derive(Debug)]
pub enum Item<M> {
    Message(M),
    /// The other end closed after all that came before.
    End,
}

#[derive(Debug)]
pub struct Stream<M> {
    items: VecDeque<(Instant, u64, Item<M>)>,
    last_due: Instant,
    /// Nothing is delivered to this end any more.
    pub deaf: bool,
}

impl<M> Default for Stream<M> {
    fn default() -> Self {
        Self { items: VecDeque::new(), last_due: 0, deaf: false }
    }
}

impl<M> Stream<M> {
    fn push(&mut self, due: Instant, sent: u64, item: Item<M>) -> Instant {
        self.last_due = self.last_due.max(due);
        self.items.push_back((self.last_due, sent, item));
        self.last_due
    }

    fn take_due(&mut self, now: Instant) -> Option<(u64, Item<M>)> {
        if self.items.front()?.0 > now {
            return None;
        }
        self.items.pop_front().map(|(_, sent, item)| (sent, item))
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.items.front().map(|i| i.0)
    }
}

/// One connection: from a life of a target to a life of a pool.
#[derive(Debug)]
pub struct Connection {
    pub target: usize,
    pub target_life: u32,
    pub pool: usize,
    pub pool_life: u32,
    pub member: Member,
    pub session: SessionKey,
    pub established: bool,
    pub to_pool: Stream<(SessionKey, ToReplica)>,
    pub to_target: Stream<(SessionKey, FromReplica)>,
    /// Which ends still have it open.
    pub target_open: bool,
    pub pool_open: bool,
}

#[derive(Default, Debug, Clone, Copy)]
pub struct NetworkCounts {
    pub messages: u64,
    /// Messages delivered after one that was sent later by the same process to another one.
    pub reordered: u64,
    pub lost: u64,
}

pub struct Network {
    pub connections: BTreeMap<ConnectionId, Connection>,
    next: ConnectionId,
    sent: u64,
    newest_delivered: [Vec<u64>; 2],
    /// `blocked[a][b]`: how many faults keep packets of host a from host b.
    blocked: Vec<Vec<u32>>,
    typical_delay: u64,
    /// A delay storm multiplies every delay by this.
    pub storm: u64,
    pub counts: NetworkCounts,
    random: Random,
}

impl Network {
    pub fn new(hosts: usize, typical_delay: u64, random: Random) -> Self {
        Self {
            connections: BTreeMap::new(),
            next: 1,
            sent: 0,
            newest_delivered: [vec![0; hosts], vec![0; hosts]],
            blocked: vec![vec![0; hosts]; hosts],
            typical_delay: typical_delay.max(MICROSECOND),
            storm: 1,
            counts: NetworkCounts::default(),
            random,
        }
    }

    pub fn delay(&mut self) -> u64 {
        self.random.delay(self.typical_delay) * self.storm
    }

    pub fn add(&mut self, connection: Connection) -> ConnectionId {
        let id = self.next;
        self.next += 1;
        self.connections.insert(id, connection);
        id
    }

    pub fn block(&mut self, from: usize, to: usize) {
        self.blocked[from][to] += 1;
    }

    pub fn unblock(&mut self, from: usize, to: usize) {
        self.blocked[from][to] = self.blocked[from][to].saturating_sub(1);
    }

    pub fn unblock_all(&mut self) {
        self.blocked.iter_mut().flatten().for_each(|b| *b = 0);
        self.storm = 1;
    }

    pub fn is_blocked(&self, from: usize, to: usize) -> bool {
        self.blocked[from][to] > 0
    }

    fn send_item<M>(
        &mut self,
        now: Instant,
        stream: impl FnOnce(&mut Connection) -> &mut Stream<M>,
        id: ConnectionId,
        item: Item<M>,
    ) -> Option<Instant> {
        let delay = self.delay();
        self.sent += 1;
        self.counts.messages += 1;
        let sent = self.sent;
        let stream = stream(self.connections.get_mut(&id)?);
        if stream.deaf {
            self.counts.lost += 1;
            return None;
        }
        Some(stream.push(now + delay, sent, item))
    }

    /// When the delivery of what was sent is to be looked at; `None` if it goes nowhere.
    pub fn send_to_pool(
        &mut self,
        now: Instant,
        id: ConnectionId,
        item: Item<(SessionKey, ToReplica)>,
    ) -> Option<Instant> {
        self.send_item(now, |c| &mut c.to_pool, id, item)
    }

    pub fn send_to_target(
        &mut self,
        now: Instant,
        id: ConnectionId,
        item: Item<(SessionKey, FromReplica)>,
    ) -> Option<Instant> {
        self.send_item(now, |c| &mut c.to_target, id, item)
    }

    fn note_order(&mut self, way: Way, sender: usize, sent: u64) {
        let newest = &mut self.newest_delivered[way as usize][sender];
        if sent < *newest {
            self.counts.reordered += 1;
        }
        *newest = (*newest).max(sent);
    }

    pub fn take_for_pool(
        &mut self,
        now: Instant,
        id: ConnectionId,
    ) -> Option<Item<(SessionKey, ToReplica)>> {
        let connection = self.connections.get_mut(&id)?;
        let sender = connection.target;
        let (sent, item) = connection.to_pool.take_due(now)?;
        self.note_order(Way::ToPool, sender, sent);
        Some(item)
    }

    pub fn take_for_target(
        &mut self,
        now: Instant,
        id: ConnectionId,
    ) -> Option<Item<(SessionKey, FromReplica)>> {
        let connection = self.connections.get_mut(&id)?;
        let sender = connection.pool;
        let (sent, item) = connection.to_target.take_due(now)?;
        self.note_order(Way::ToTarget, sender, sent);
        Some(item)
    }

    /// Loses a random tail of what is under way in both directions.
    pub fn lose_tail(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let keep = self.random.index(connection.to_pool.items.len() + 1);
        self.counts.lost += (connection.to_pool.items.len() - keep) as u64;
        connection.to_pool.items.truncate(keep);
        let keep = self.random.index(connection.to_target.items.len() + 1);
        self.counts.lost += (connection.to_target.items.len() - keep) as u64;
        connection.to_target.items.truncate(keep);
    }

    /// Drops connections that neither end has open.
    pub fn forget_closed(&mut self, id: ConnectionId) {
        if self.connections.get(&id).is_some_and(|c| !c.target_open && !c.pool_open) {
            self.connections.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_core::message::Ping;
    use quoin_core::{Epoch, Lsn};

    fn network() -> (Network, ConnectionId) {
        let mut network = Network::new(4, 100 * MICROSECOND, Random::new(3));
        let id = network.add(Connection {
            target: 3,
            target_life: 0,
            pool: 0,
            pool_life: 0,
            member: Member::default(),
            session: SessionKey { epoch: Epoch(1), ..Default::default() },
            established: true,
            to_pool: Stream::default(),
            to_target: Stream::default(),
            target_open: true,
            pool_open: true,
        });
        (network, id)
    }

    fn ping(n: u64) -> Item<(SessionKey, ToReplica)> {
        let message = ToReplica::Sync { lsn: Lsn(n), ping: Ping(n) };
        Item::Message((SessionKey::default(), message))
    }

    fn drain(network: &mut Network, id: ConnectionId) -> Vec<u64> {
        std::iter::from_fn(|| network.take_for_pool(u64::MAX, id))
            .map(|item| match item {
                Item::Message((_, ToReplica::Sync { lsn, .. })) => lsn.0,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn one_connection_keeps_its_order_whatever_the_delays() {
        let (mut network, id) = network();
        for n in 0..200 {
            network.send_to_pool(n, id, ping(n));
        }
        assert_eq!(drain(&mut network, id), (0..200).collect::<Vec<_>>());
    }

    #[test]
    fn a_cut_loses_a_tail_and_nothing_from_the_middle() {
        let (mut network, id) = network();
        for n in 0..100 {
            network.send_to_pool(n, id, ping(n));
        }
        network.lose_tail(id);
        let kept = drain(&mut network, id);
        assert!(kept.len() < 100, "this seed cuts in the middle");
        assert_eq!(kept, (0..kept.len() as u64).collect::<Vec<_>>());
        assert_eq!(network.counts.lost, 100 - kept.len() as u64);
    }
}
