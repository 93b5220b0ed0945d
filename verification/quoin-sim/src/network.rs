//! Connections between targets and pools, and the faults of the network.
//!
//! A connection keeps its messages in order in each direction, as a stream does; between
//! connections nothing is ordered, a session's own and its bulk connection included. A blocked direction holds what was sent (the kernel would
//! retransmit) until it heals or the connection is cut; a cut loses the tail of what is under way
//! in both directions, perhaps from the middle of a frame, and each end learns of it in its own
//! time. What travels are the bytes of real frames ([`crate::wire`]).

use std::collections::{BTreeMap, VecDeque};

use bytes::{Bytes, BytesMut};
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::{Member, SessionKey};
use quoin_wire::WireError;
use quoin_wire::encode::FrameBuffer;
use quoin_wire::frame::HEADER_LEN;

use crate::random::Random;
use crate::schedule::{Instant, MICROSECOND};
use crate::stats::MessageCounts;
use crate::wire::{self, Payload, Receiver};

pub type ConnectionId = u64;

/// Which way a message goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    ToPool,
    ToTarget,
}

/// Item that one end reads from its stream.
#[derive(Debug)]
pub enum Item {
    Bytes(Bytes),
    /// The other end closed after all that came before.
    End,
}

/// Outcome of reading a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// Nothing is due.
    Nothing,
    Some,
    End,
    /// The bytes are no frame: the connection must end.
    Refused,
}

#[derive(Debug, Default)]
pub struct Stream {
    items: VecDeque<(Instant, u64, Item)>,
    last_due: Instant,
    /// Nothing is delivered to this end any more.
    pub deaf: bool,
    pub receiver: Receiver,
    /// A byte of it was changed on its way.
    pub spoiled: bool,
}

impl Stream {
    fn push(&mut self, due: Instant, sent: u64, item: Item) -> Instant {
        self.last_due = self.last_due.max(due);
        self.items.push_back((self.last_due, sent, item));
        self.last_due
    }

    fn take_due<M: Payload>(
        &mut self,
        now: Instant,
        each: impl FnMut(SessionKey, M),
    ) -> (u64, Taken) {
        if self.items.front().is_none_or(|(due, ..)| *due > now) {
            return (0, Taken::Nothing);
        }
        match self.items.pop_front() {
            Some((_, sent, Item::Bytes(bytes))) => {
                self.receiver.take(bytes, each);
                let refused = self.receiver.is_refused();
                (sent, if refused { Taken::Refused } else { Taken::Some })
            }
            Some((_, sent, Item::End)) => (sent, Taken::End),
            None => (0, Taken::Nothing),
        }
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.items.front().map(|i| i.0)
    }

    /// Loses a tail; what is left may end within a frame.
    fn lose_tail(&mut self, random: &mut Random, counts: &mut MessageCounts) {
        let keep = random.index(self.items.len() + 1);
        counts.lost += (self.items.len() - keep) as u64;
        let torn = self.items.get(keep).and_then(|(due, sent, item)| match item {
            Item::Bytes(bytes) if random.percent(60) => {
                Some((*due, *sent, bytes.slice(..random.index(bytes.len()))))
            }
            _ => None,
        });
        self.items.truncate(keep);
        if let Some((due, sent, part)) = torn {
            counts.frames_cut += 1;
            self.items.push_back((due, sent, Item::Bytes(part)));
        }
    }

    /// Changes a byte of something that is under way; false if nothing is. Blocks of answers are
    /// left alone: their damage is found block by block and is no reason to end the connection.
    fn spoil(&mut self, random: &mut Random, heads_only: bool) -> bool {
        if self.items.is_empty() {
            return false;
        }
        let index = random.index(self.items.len());
        let Some((_, _, Item::Bytes(bytes))) = self.items.get_mut(index) else { return false };
        // A frame may have been cut off before its first byte.
        if bytes.is_empty() {
            return false;
        }
        let until = if heads_only { bytes.len().min(HEADER_LEN) } else { bytes.len() };
        let mut changed = BytesMut::from(&bytes[..]);
        changed[random.index(until)] ^= 1 << random.below(8);
        *bytes = changed.freeze();
        self.spoiled = true;
        true
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
    /// The bulk connection of that number, not the session's own.
    pub bulk: Option<u64>,
    pub established: bool,
    pub to_pool: Stream,
    pub to_target: Stream,
    /// Which ends still have it open.
    pub target_open: bool,
    pub pool_open: bool,
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
    /// The same of bulk connections alone.
    pub bulk_storm: u64,
    pub counts: MessageCounts,
    random: Random,
    frame: FrameBuffer,
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
            bulk_storm: 1,
            counts: MessageCounts::default(),
            random,
            frame: FrameBuffer::default(),
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
        (self.storm, self.bulk_storm) = (1, 1);
    }

    pub fn is_blocked(&self, from: usize, to: usize) -> bool {
        self.blocked[from][to] > 0
    }

    fn send_item(
        &mut self,
        now: Instant,
        way: Way,
        id: ConnectionId,
        item: Item,
    ) -> Option<Instant> {
        let mut delay = self.delay();
        self.sent += 1;
        self.counts.sent += 1;
        let sent = self.sent;
        let connection = self.connections.get_mut(&id)?;
        if connection.bulk.is_some() {
            delay *= self.bulk_storm;
        }
        let stream = match way {
            Way::ToPool => &mut connection.to_pool,
            Way::ToTarget => &mut connection.to_target,
        };
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
        session: SessionKey,
        message: &ToReplica,
    ) -> Result<Option<Instant>, WireError> {
        let bytes = wire::frames(session, message, &mut self.frame)?;
        Ok(self.send_item(now, Way::ToPool, id, Item::Bytes(bytes)))
    }

    pub fn send_to_target(
        &mut self,
        now: Instant,
        id: ConnectionId,
        session: SessionKey,
        message: &FromReplica,
    ) -> Result<Option<Instant>, WireError> {
        let bytes = wire::frames(session, message, &mut self.frame)?;
        Ok(self.send_item(now, Way::ToTarget, id, Item::Bytes(bytes)))
    }

    /// An orderly close: the other end reads it after all that came before.
    pub fn send_end(&mut self, now: Instant, way: Way, id: ConnectionId) -> Option<Instant> {
        self.send_item(now, way, id, Item::End)
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
        each: impl FnMut(SessionKey, ToReplica),
    ) -> Taken {
        let Some(connection) = self.connections.get_mut(&id) else { return Taken::Nothing };
        let sender = connection.target;
        let (sent, taken) = connection.to_pool.take_due(now, each);
        if taken != Taken::Nothing {
            self.note_order(Way::ToPool, sender, sent);
        }
        taken
    }

    pub fn take_for_target(
        &mut self,
        now: Instant,
        id: ConnectionId,
        each: impl FnMut(SessionKey, FromReplica),
    ) -> Taken {
        let Some(connection) = self.connections.get_mut(&id) else { return Taken::Nothing };
        let sender = connection.pool;
        let (sent, taken) = connection.to_target.take_due(now, each);
        if taken != Taken::Nothing {
            self.note_order(Way::ToTarget, sender, sent);
        }
        taken
    }

    /// Loses a random tail of what is under way in both directions.
    pub fn lose_tail(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.to_pool.lose_tail(&mut self.random, &mut self.counts);
        connection.to_target.lose_tail(&mut self.random, &mut self.counts);
    }

    /// Changes a byte of what is under way on this connection; false if nothing is.
    pub fn spoil(&mut self, id: ConnectionId) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        connection.to_pool.spoil(&mut self.random, false)
            || connection.to_target.spoil(&mut self.random, true)
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
    use quoin_types::message::Ping;
    use quoin_types::{Epoch, Lsn};

    fn network() -> (Network, ConnectionId) {
        let mut network = Network::new(4, 100 * MICROSECOND, Random::new(3));
        let id = network.add(Connection {
            target: 3,
            target_life: 0,
            pool: 0,
            pool_life: 0,
            member: Member::default(),
            session: SessionKey { epoch: Epoch(1), ..Default::default() },
            bulk: None,
            established: true,
            to_pool: Stream::default(),
            to_target: Stream::default(),
            target_open: true,
            pool_open: true,
        });
        (network, id)
    }

    fn send(network: &mut Network, now: Instant, id: ConnectionId, n: u64) {
        let message = ToReplica::Sync { lsn: Lsn(n), ping: Ping(n) };
        network.send_to_pool(now, id, SessionKey::default(), &message).unwrap();
    }

    fn drain(network: &mut Network, id: ConnectionId) -> Vec<u64> {
        let mut seen = Vec::new();
        while network.take_for_pool(u64::MAX, id, |_, message| match message {
            ToReplica::Sync { lsn, .. } => seen.push(lsn.0),
            other => panic!("{other:?}"),
        }) != Taken::Nothing
        {}
        seen
    }

    #[test]
    fn one_connection_keeps_its_order_whatever_the_delays() {
        let (mut network, id) = network();
        for n in 0..200 {
            send(&mut network, n, id, n);
        }
        assert_eq!(drain(&mut network, id), (0..200).collect::<Vec<_>>());
    }

    #[test]
    fn a_cut_loses_a_tail_and_nothing_from_the_middle() {
        let (mut network, id) = network();
        for n in 0..100 {
            send(&mut network, n, id, n);
        }
        network.lose_tail(id);
        let kept = drain(&mut network, id);
        assert!(kept.len() < 100, "this seed cuts in the middle");
        assert_eq!(kept, (0..kept.len() as u64).collect::<Vec<_>>());
        assert_eq!(network.counts.lost, 100 - kept.len() as u64);
    }
}
