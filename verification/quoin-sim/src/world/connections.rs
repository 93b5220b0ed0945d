//! Connections of targets: they are dialled, let in or refused, and end.

use quoin_replication::pool_host::recognition::Recognition;
use quoin_replication::primary::PrimaryEvent;
use quoin_types::{BulkKey, Member, SessionKey};

use super::checkers::Observation;
use super::{Event, World};
use crate::network::{Connection, ConnectionId, Stream, Way};
use crate::schedule::{MILLISECOND, SECOND};

/// Incarnation and nonce of a session, and the number of a bulk connection of it.
pub(super) type Name = (u128, u64, Option<u64>);

pub(super) fn name(key: SessionKey, bulk: Option<u64>) -> Name {
    (key.incarnation.0, key.nonce, bulk)
}

impl World {
    /// Closes this target's connections of which this is so.
    pub(super) fn target_hangs_up(&mut self, target: usize, which: impl Fn(&Connection) -> bool) {
        let Some(process) = &mut self.targets[target].process else { return };
        let connections = &self.network.connections;
        let is_it = |id: &ConnectionId| connections.get(id).is_some_and(&which);
        let ids: Vec<ConnectionId> = process.sessions.values().copied().filter(is_it).collect();
        process.sessions.retain(|_, id| !ids.contains(id));
        self.give_up_dials(target, &ids);
        for id in ids {
            self.target_closes(id);
        }
    }

    pub(super) fn connect(
        &mut self,
        target: usize,
        member: Member,
        session: SessionKey,
        bulk: Option<u64>,
    ) {
        let life = self.targets[target].life;
        let is_bulk = bulk.is_some();
        self.observe(&Observation::Dialled { target, member, session, is_bulk });
        let pool = self.pool_of(member);
        let id = self.network.add(Connection {
            target,
            target_life: life,
            pool: pool.unwrap_or(usize::MAX),
            pool_life: 0,
            member,
            session,
            bulk,
            established: false,
            to_pool: Stream::default(),
            to_target: Stream::default(),
            target_open: true,
            pool_open: false,
        });
        if let Some(process) = &mut self.targets[target].process {
            process.sessions.insert(name(session, bulk), id);
        }
        if let Some(pool) = pool.filter(|_| self.processes.on) {
            return self.dial(target, pool, id);
        }
        let delay = self.network.delay() * 2;
        self.schedule.after(delay, Event::Connecting { connection: id });
    }

    /// The handshake is over, or it never will be.
    pub(crate) fn connecting(&mut self, id: ConnectionId) {
        let Some(connection) = self.network.connections.get(&id) else {
            return self.dial_forgotten(id);
        };
        let (target, life, pool) = (connection.target, connection.target_life, connection.pool);
        let (session, bulk, member) = (connection.session, connection.bulk, connection.member);
        if !connection.target_open || self.targets[target].life != life {
            self.network.connections.remove(&id);
            return self.dial_ended(target, id, false);
        }
        let from = self.targets[target].host;
        let Some(there) = self.pools.get(pool) else { return };
        let to = there.host;
        let cut = self.network.is_blocked(from, to) || self.network.is_blocked(to, from);
        if cut || !self.hosts.powered[to] {
            let delay = self.random.between(1, 3) * SECOND;
            self.schedule.after(delay, Event::Refused { target, life, connection: id });
            return;
        }
        if there.process.as_ref().is_none_or(|process| process.is_stopping()) {
            let delay = self.network.delay();
            self.schedule.after(delay, Event::Refused { target, life, connection: id });
            return;
        }
        match there.starts.recognition() {
            Recognition::Given => {}
            // It is dialled, and has not been answered yet.
            Recognition::Awaited => {
                self.schedule.after(20 * MILLISECOND, Event::Connecting { connection: id });
                return;
            }
            Recognition::Refused => {
                let delay = self.random.between(1, 3) * SECOND;
                self.schedule.after(delay, Event::Refused { target, life, connection: id });
                return;
            }
        }
        if !self.accepts_grant(id, target, pool, session) {
            let delay = self.network.delay();
            self.schedule.after(delay, Event::Refused { target, life, connection: id });
            return;
        }
        let pool_life = self.pools[pool].life;
        if bulk.is_some() && !self.takes_bulk(pool, session, member) {
            // The pool takes one for a session that is open, and for no other.
            let delay = self.network.delay();
            self.schedule.after(delay, Event::Refused { target, life, connection: id });
            return;
        }
        if self.targets[target].paused {
            self.schedule.after(10 * MILLISECOND, Event::Connecting { connection: id });
            return;
        }
        let connection = self.network.connections.get_mut(&id).expect("looked up above");
        connection.pool_life = pool_life;
        connection.established = true;
        connection.pool_open = true;
        self.dial_ended(target, id, true);
        let event = match bulk {
            None => PrimaryEvent::Connected { session },
            Some(number) => PrimaryEvent::BulkConnected { bulk: BulkKey { session, number } },
        };
        self.feed_target(target, vec![event]);
    }

    pub(crate) fn refused(&mut self, target: usize, life: u32, id: ConnectionId) {
        if self.targets[target].life == life {
            self.dial_ended(target, id, false);
            self.target_end_lost(id);
        }
    }

    /// The target's end of the connection is over.
    pub(crate) fn target_end_lost(&mut self, id: ConnectionId) {
        let Some(connection) = self.network.connections.get_mut(&id) else { return };
        if !connection.target_open {
            return;
        }
        let (target, life) = (connection.target, connection.target_life);
        if self.targets[target].life == life && self.targets[target].paused {
            self.schedule.after(20 * MILLISECOND, Event::TargetEndLost { connection: id });
            return;
        }
        connection.target_open = false;
        connection.to_target.deaf = true;
        let (session, bulk) = (connection.session, connection.bulk);
        self.network.forget_closed(id);
        if self.targets[target].life != life {
            return;
        }
        let Some(process) = &mut self.targets[target].process else { return };
        let was_there = process.sessions.remove(&name(session, bulk)).is_some();
        if let Some(number) = bulk.filter(|_| was_there) {
            self.target_loses_bulk(target, BulkKey { session, number });
        } else if was_there {
            let off = self.is_quorum_off(target, session);
            self.observe(&Observation::SessionEnded { target, session });
            let event = match self.control.terms.was_turned_away(id) {
                true => PrimaryEvent::FormerTerm { session },
                false => PrimaryEvent::Disconnected { session },
            };
            self.feed_target(target, vec![event]);
            if off {
                self.observe(&Observation::QuorumOffLost { target });
            }
        }
    }

    /// The target closed its end: what it had sent still arrives, then the end.
    fn target_closes(&mut self, id: ConnectionId) {
        let now = self.schedule.now();
        if let Some(connection) = self.network.connections.get_mut(&id) {
            connection.target_open = false;
            connection.to_target.deaf = true;
        }
        if let Some(due) = self.network.send_end(now, Way::ToPool, id) {
            self.schedule.at(due, Event::ToPool { connection: id });
        }
        self.network.forget_closed(id);
    }

    /// The process or the host of the target died.
    pub(super) fn end_of_target_dies(&mut self, id: ConnectionId, polite: bool) {
        let Some(connection) = self.network.connections.get_mut(&id) else { return };
        connection.target_open = false;
        connection.to_target.deaf = true;
        if polite {
            self.target_closes(id);
        } else {
            self.network.lose_tail(id);
            let delay = self.random.between(1000, 8000) * MILLISECOND;
            self.schedule.after(delay, Event::PoolEndLost { connection: id });
        }
    }

    /// A session ends whose replica has its quorum off, and IO is under way.
    fn is_quorum_off(&self, target: usize, session: SessionKey) -> bool {
        let process = self.targets[target].process.as_ref();
        process.is_some_and(|p| p.serving.is_some() && p.waiting.is_empty())
            && self.checkers.admissions.is_quorum_off(target, session)
    }
}
