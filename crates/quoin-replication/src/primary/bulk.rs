//! Bulk connections: the second connection of a session, which carries rebuild data.
//!
//! A rebuild requests one from the receiver and from each possible source. It is closed once no
//! rebuild has needed it for a while. Client traffic never queues behind rebuild data. The loss of
//! a bulk connection does not end the session; the end of a session ends its bulk connection. A
//! source whose bulk connection is lost gets no requests until it has another one. A receiver is
//! asked how far its shadow is complete, and feeding continues from there.

use std::time::Duration;

use super::rebuild::Rebuild;
use super::{Link, Peer, Primary, PrimaryAction};
use quoin_types::ids::BulkKey;
use quoin_types::message::{Failure, FromReplica, ToReplica};
use quoin_types::mutant;
use quoin_types::time::Time;

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(5);
/// Timeout of a bulk connection that is not established, or that owes an answer and sends nothing.
/// Pools serve rebuilds behind clients, but each request within moments.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time that an unneeded bulk connection is kept.
const IDLE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Closed { retry_at: Time },
    Connecting { since: Time },
    Open { idle_since: Option<Time> },
}

/// The bulk connection of one session.
pub(super) struct Bulk {
    state: State,
    number: u64,
    retry: Duration,
    /// Set if a rebuild needs the connection.
    needed: bool,
    /// Number of outstanding answers, and the time since which none has arrived.
    owed: u32,
    heard: Time,
}

impl Default for Bulk {
    fn default() -> Self {
        let state = State::Closed { retry_at: Time::ZERO };
        let (retry, heard) = (RETRY_FIRST, Time::ZERO);
        Self { state, number: 0, retry, needed: false, owed: 0, heard }
    }
}

impl Bulk {
    /// Returns true if rebuild data can be sent now.
    pub fn carries(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// Counts a message that will be answered.
    fn owes(&mut self, now: Time) {
        if self.owed == 0 {
            self.heard = now;
        }
        self.owed += 1;
    }

    fn answered(&mut self, now: Time) {
        self.owed = self.owed.saturating_sub(1);
        self.heard = now;
        self.retry = RETRY_FIRST;
    }

    fn lost(&mut self, now: Time) {
        self.state = State::Closed { retry_at: now + self.retry };
        self.retry = (self.retry * 2).min(RETRY_LAST);
        self.owed = 0;
    }

    /// Time at which the connection is given up unless a message arrives.
    fn dead_at(&self) -> Option<Time> {
        match self.state {
            State::Connecting { since } => Some(since + PATIENCE),
            State::Open { .. } => (self.owed > 0).then(|| self.heard + PATIENCE),
            State::Closed { .. } => None,
        }
    }

    /// Time of the next action on the connection.
    pub fn due(&self) -> Option<Time> {
        match self.state {
            State::Closed { retry_at } => self.needed.then_some(retry_at),
            State::Open { idle_since: Some(since) } => Some(since + IDLE),
            _ => self.dead_at(),
        }
    }
}

impl Primary {
    fn bulk_key(&self, index: usize) -> BulkKey {
        let peer = &self.members[index];
        BulkKey { session: self.key(peer.nonce), number: peer.bulk.number }
    }

    /// Returns the peer whose newest bulk connection this is.
    fn bulk_peer(&self, bulk: BulkKey) -> Option<usize> {
        let index = self.peer_of(bulk.session)?;
        let of = &self.members[index].bulk;
        let there = !matches!(of.state, State::Closed { .. });
        (there && of.number == bulk.number).then_some(index)
    }

    /// Returns true if a rebuild copies from this peer or to it, or may do so soon.
    fn needs_bulk(&self, peer: &Peer) -> bool {
        let may_source = |r: &Rebuild| r.may_copy_from(peer.member);
        match peer.link {
            Link::Rebuilding => peer.rebuild.is_some(),
            Link::Fed if self.commit.views.counts(peer.member) => {
                self.members.peers.iter().filter_map(|p| p.rebuild.as_ref()).any(may_source)
            }
            _ => false,
        }
    }

    /// Requests the bulk connections that are needed. Closes those that are unneeded or silent.
    pub(super) fn step_bulk(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        for index in 0..self.members.len() {
            let needed = self.needs_bulk(&self.members[index]);
            let bulk = &mut self.members[index].bulk;
            bulk.needed = needed;
            if bulk.dead_at().is_some_and(|at| now >= at) {
                self.hang_up_bulk(now, index, actions);
                continue;
            }
            match bulk.state {
                State::Closed { retry_at } if needed && now >= retry_at => {
                    bulk.state = State::Connecting { since: now };
                    self.members[index].bulk.number = self.members.nonce();
                    let (bulk, member) = (self.bulk_key(index), self.members[index].member);
                    actions.push(PrimaryAction::ConnectBulk { member, bulk });
                }
                State::Open { idle_since: Some(since) } if !needed && now >= since + IDLE => {
                    bulk.state = State::Closed { retry_at: now };
                    actions.push(PrimaryAction::DisconnectBulk { bulk: self.bulk_key(index) });
                }
                State::Open { idle_since } => {
                    let since = (!needed && bulk.owed == 0).then(|| idle_since.unwrap_or(now));
                    bulk.state = State::Open { idle_since: since };
                }
                _ => {}
            }
        }
    }

    pub(super) fn bulk_connected(&mut self, bulk: BulkKey, actions: &mut Vec<PrimaryAction>) {
        let Some(index) = self.bulk_peer(bulk) else {
            return actions.push(PrimaryAction::DisconnectBulk { bulk });
        };
        self.members[index].bulk.state = State::Open { idle_since: None };
        let message = ToReplica::OpenBulk { number: bulk.number };
        actions.push(PrimaryAction::SendBulk { bulk, message });
    }

    pub(super) fn bulk_disconnected(
        &mut self,
        now: Time,
        bulk: BulkKey,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Some(index) = self.bulk_peer(bulk) else { return };
        if mutant::is("bulk-failure-ends-the-session") {
            return self.hang_up(now, index, actions);
        }
        self.bulk_lost(now, index);
    }

    fn hang_up_bulk(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) {
        actions.push(PrimaryAction::DisconnectBulk { bulk: self.bulk_key(index) });
        self.bulk_lost(now, index);
    }

    /// Plans again the work that the lost connection carried; the session continues.
    fn bulk_lost(&mut self, now: Time, index: usize) {
        let peer = &mut self.members[index];
        peer.bulk.lost(now);
        if let Some(rebuild) = &mut peer.rebuild {
            rebuild.lost_receiver();
        }
        let member = peer.member;
        for rebuild in self.members.peers.iter_mut().filter_map(|p| p.rebuild.as_mut()) {
            rebuild.lost_source(member);
        }
    }

    pub(super) fn on_bulk_message(
        &mut self,
        now: Time,
        bulk: BulkKey,
        message: FromReplica,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Some(index) = self.bulk_peer(bulk) else { return };
        if !matches!(message, FromReplica::Failed(_)) {
            self.members[index].bulk.answered(now);
        }
        match message {
            FromReplica::Pulled { id, slots, cursor, end, gone } => {
                self.on_pulled(now, index, id, slots, cursor, end, gone, actions);
            }
            FromReplica::IncrementFed { rebuild, cursor } => {
                self.on_increment_fed(index, rebuild, cursor);
            }
            FromReplica::IncrementBegun { rebuild, cursor, cut } => {
                self.on_increment_begun(now, index, rebuild, cursor, cut, actions);
            }
            FromReplica::Failed(Failure::Protocol) | FromReplica::Refuse { .. }
                if self.members[index].link == Link::Rebuilding =>
            {
                // The replica reports the state of its shadow when the session is opened again.
                self.hang_up(now, index, actions);
            }
            // The connection failed, or the message is not valid on it.
            _ => self.hang_up_bulk(now, index, actions),
        }
    }

    /// Sends a part of a rebuild; `answered` if the replica answers this message.
    pub(super) fn send_copying(
        &mut self,
        now: Time,
        index: usize,
        answered: bool,
        message: ToReplica,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if answered {
            self.members[index].bulk.owes(now);
        }
        actions.push(PrimaryAction::SendBulk { bulk: self.bulk_key(index), message });
    }

    /// Closes the bulk connection of a session that is over.
    pub(super) fn end_bulk(&mut self, index: usize, actions: &mut Vec<PrimaryAction>) {
        if !matches!(self.members[index].bulk.state, State::Closed { .. }) {
            actions.push(PrimaryAction::DisconnectBulk { bulk: self.bulk_key(index) });
        }
    }
}
