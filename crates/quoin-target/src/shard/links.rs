//! A shard's connections to replicas.

use quoin_reactor::Interest;
use quoin_replication::primary::PrimaryEvent;
use quoin_telemetry::notices::Severity;
use quoin_types::ids::{BulkKey, SessionKey};
use quoin_types::membership::Member;
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::{Time, VolumeId};
use quoin_wire::frame::WireError;
use quoin_wire::{Connection, ConnectionKind, Frame, Hello, ReadOutcome};

use super::sources::{Slot, Sources};
use super::{ReplicaPlace, Shard};
use crate::dial::{Dial, Undialled};

/// Names a connection to a replica: a session's own, or the bulk connection of that number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LinkName {
    pub(super) session: SessionKey,
    pub(super) bulk: Option<u64>,
}

impl LinkName {
    pub(super) fn own(session: SessionKey) -> Self {
        Self { session, bulk: None }
    }

    pub(super) fn bulk(bulk: BulkKey) -> Self {
        Self { session: bulk.session, bulk: Some(bulk.number) }
    }

    fn connected(self) -> PrimaryEvent {
        let session = self.session;
        match self.bulk {
            None => PrimaryEvent::Connected { session },
            Some(number) => PrimaryEvent::BulkConnected { bulk: BulkKey { session, number } },
        }
    }

    fn disconnected(self) -> PrimaryEvent {
        let session = self.session;
        match self.bulk {
            None => PrimaryEvent::Disconnected { session },
            Some(number) => PrimaryEvent::BulkDisconnected { bulk: BulkKey { session, number } },
        }
    }

    fn message(self, message: FromReplica) -> PrimaryEvent {
        let session = self.session;
        match self.bulk {
            None => PrimaryEvent::Message { session, message },
            Some(number) => {
                PrimaryEvent::BulkMessage { bulk: BulkKey { session, number }, message }
            }
        }
    }
}

pub(super) struct Link {
    pub(super) connection: Connection,
    pub(super) name: LinkName,
    pub(super) volume: VolumeId,
    pub(super) interest: Interest,
    pub(super) dirty: bool,
}

/// A volume's connections to its replicas, and where these are.
pub(super) struct Links {
    /// Open connections with their keys.
    open: Vec<(LinkName, u64)>,
    pub(super) places: Vec<ReplicaPlace>,
    /// Pools that could not be reached, so that each is reported once and not at each attempt.
    unreachable: Vec<String>,
}

impl Links {
    pub(super) fn new(places: Vec<ReplicaPlace>) -> Self {
        Self { open: Vec::new(), places, unreachable: Vec::new() }
    }

    fn key_of(&self, name: LinkName) -> Option<u64> {
        self.open.iter().find(|(of, _)| *of == name).map(|(_, key)| *key)
    }

    fn place_of(&self, member: Member) -> Option<&ReplicaPlace> {
        self.places.iter().find(|place| place.member == member)
    }

    /// Notes that a pool was reached; true if it had not been before.
    fn reached(&mut self, pool: &str) -> bool {
        let before = self.unreachable.len();
        self.unreachable.retain(|of| of != pool);
        self.unreachable.len() < before
    }

    /// Notes that a pool was not reached; true if this is new.
    fn not_reached(&mut self, pool: &str) -> bool {
        let is_new = !pool.is_empty() && !self.unreachable.iter().any(|of| of == pool);
        if is_new {
            self.unreachable.push(pool.to_owned());
        }
        is_new
    }

    /// Closes the connections that `which` selects.
    pub(super) fn close(&mut self, which: impl Fn(LinkName) -> bool, sources: &mut Sources) {
        for (_, key) in self.open.extract_if(.., |(name, _)| which(*name)) {
            if let Some(Slot::Link(mut link)) = sources.slots.remove(&key) {
                // Pending output (a Close) is sent as far as the socket accepts it.
                let _ = link.connection.flush();
                sources.reactor.deregister(link.connection.socket());
            }
        }
    }
}

impl Shard {
    pub(super) fn send(&mut self, id: VolumeId, name: LinkName, message: &ToReplica) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let Some(key) = volume.links.key_of(name) else { return };
        let Some(Slot::Link(link)) = self.sources.slots.get_mut(&key) else { return };
        if let Err(error) = link.connection.send_to_replica(name.session, message) {
            // The state machine relies on what it sent, so the connection is over, as if it were
            // cut here. The end is reported in the next round, since the state machine is in the
            // middle of this one.
            tracing::error!(volume = %id, %error, "a message could not be framed");
            self.disconnect(id, |of| of == name);
            self.dialler.fail(id, name.session, name.bulk, error.to_string());
            return;
        }
        if !link.dirty {
            link.dirty = true;
            self.unfinished.links.push(key);
        }
    }

    pub(super) fn connect(&mut self, id: VolumeId, member: Member, name: LinkName) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let session = name.session;
        let Some(place) = volume.links.place_of(member) else {
            // Reported on the next round, since the state machine is in the middle of this one.
            let why = "no address is known for this replica".into();
            self.dialler.fail(id, session, name.bulk, why);
            return;
        };
        let kind = match name.bulk {
            None => ConnectionKind::Log,
            Some(_) => ConnectionKind::Bulk,
        };
        let hello = Hello::new(id, member.id, member.guid, volume.grant.bytes.clone());
        self.dialler.start(Dial {
            volume: id,
            session,
            bulk: name.bulk,
            hello: Hello { kind, ..hello },
            pool: place.pool.clone(),
            address: place.address.clone(),
        });
    }

    pub(super) fn dialled(
        &mut self,
        now: Time,
        id: VolumeId,
        name: LinkName,
        pool: String,
        outcome: Result<Box<Connection>, Undialled>,
    ) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        match outcome {
            Ok(connection) => {
                if volume.links.reached(&pool) {
                    let message = format!("pool {pool} answers again");
                    self.reports.notices.push(Severity::Normal, id, "", "PoolReachable", message);
                }
                let key = self.sources.key(name.bulk.is_some());
                let reactor = &self.sources.reactor;
                if let Err(error) = reactor.register(connection.socket(), key, Interest::READ) {
                    tracing::warn!(%error, "cannot watch a connection");
                    return self.event(now, id, name.disconnected());
                }
                let interest = Interest::READ;
                let link =
                    Link { connection: *connection, name, volume: id, interest, dirty: false };
                self.sources.slots.insert(key, Slot::Link(Box::new(link)));
                if let Some(volume) = self.volumes.get_mut(&id) {
                    volume.links.open.push((name, key));
                }
                self.event(now, id, name.connected());
            }
            Err(Undialled { why, is_former }) => {
                if name.bulk.is_some() {
                    // The session's own connection decides whether the pool is reachable.
                    tracing::info!(volume = %id, %pool, why, "no bulk connection");
                } else if volume.links.not_reached(&pool) {
                    let message = format!("pool {pool}: {why}");
                    let reason = if is_former { "TermRefused" } else { "PoolUnreachable" };
                    self.reports.notices.push(Severity::Warning, id, "", reason, message);
                }
                let session = name.session;
                self.event(
                    now,
                    id,
                    match name.bulk {
                        None if is_former => PrimaryEvent::FormerTerm { session },
                        _ => name.disconnected(),
                    },
                );
            }
        }
    }

    /// Closes the connections that `which` selects.
    pub(super) fn disconnect(&mut self, id: VolumeId, which: impl Fn(LinkName) -> bool) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        self.dialler.give_up(id, |session, bulk| which(LinkName { session, bulk }));
        volume.links.close(which, &mut self.sources);
    }

    fn link_lost(&mut self, now: Time, key: u64, why: &WireError) {
        let Some(Slot::Link(link)) = self.sources.slots.remove(&key) else { return };
        self.sources.reactor.deregister(link.connection.socket());
        let (id, name) = (link.volume, link.name);
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.links.open.retain(|(_, k)| *k != key);
        }
        if !matches!(why, WireError::Closed) {
            tracing::warn!(volume = %id, error = %why, "the connection to a replica failed");
        }
        self.event(now, id, name.disconnected());
    }

    pub(super) fn read_link(&mut self, now: Time, key: u64) {
        let Some(Slot::Link(link)) = self.sources.slots.get_mut(&key) else { return };
        let (id, name) = (link.volume, link.name);
        let outcome = link.connection.receive();
        loop {
            let Some(Slot::Link(link)) = self.sources.slots.get_mut(&key) else { return };
            match link.connection.next_frame() {
                Ok(Some(incoming)) => match incoming.frame {
                    Frame::FromReplica(message) if incoming.session == name.session => {
                        if let Some(volume) = self.volumes.get_mut(&id) {
                            volume.target.on(now, name.message(message), &mut self.actions);
                        }
                        self.touch(id);
                        self.act(id);
                    }
                    _ => return self.link_lost(now, key, &WireError::Malformed("session")),
                },
                Ok(None) => break,
                Err(error) => return self.link_lost(now, key, &error),
            }
        }
        match outcome {
            Ok(ReadOutcome::End) => self.link_lost(now, key, &WireError::Closed),
            Ok(_) => {}
            Err(error) => self.link_lost(now, key, &error),
        }
    }

    pub(super) fn write_link(&mut self, now: Time, key: u64) {
        let Some(Slot::Link(link)) = self.sources.slots.get_mut(&key) else { return };
        if let Err(error) = link.connection.flush() {
            return self.link_lost(now, key, &error);
        }
        let interest = Interest { read: true, write: link.connection.queued_bytes() > 0 };
        if interest != link.interest {
            link.interest = interest;
            if let Err(error) = self.sources.reactor.modify(link.connection.socket(), key, interest)
            {
                tracing::warn!(%error, "cannot watch a connection");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use quoin_types::Lsn;
    use quoin_types::message::{Content, Slot as BlockSlot};
    use quoin_wire::security::{Opener, Sealer};

    use super::*;
    use crate::shard::Input;
    use crate::shard::tests::{VOLUME, setup, shard};

    #[test]
    fn a_message_that_cannot_be_framed_ends_its_connection_and_the_state_machine_is_told() {
        for bulk in [None, Some(3)] {
            let (mut shard, _handle) = shard();
            shard.open(Time::default(), setup());
            let name = LinkName { session: SessionKey::default(), bulk };
            let (here, there) = UnixStream::pair().unwrap();
            here.set_nonblocking(true).unwrap();
            there.set_nonblocking(true).unwrap();
            let connection = Connection::new(here.into(), Sealer::plain(), Opener::plain());
            let key = shard.sources.key(bulk.is_some());
            shard.sources.reactor.register(connection.socket(), key, Interest::READ).unwrap();
            let interest = Interest::READ;
            let link = Link { connection, name, volume: VOLUME, interest, dirty: false };
            shard.sources.slots.insert(key, Slot::Link(Box::new(link)));
            shard.volumes.get_mut(&VOLUME).unwrap().links.open.push((name, key));

            let hole = |lba| BlockSlot { lba, blocks: 1, version: Lsn(1), content: Content::Hole };
            let slots: Vec<BlockSlot> = (0..200_000).map(hole).collect();
            let feed = ToReplica::IncrementFeed { rebuild: 1, slots, cursor: 200_000, after: 0 };
            shard.send(VOLUME, name, &feed);
            shard.send(VOLUME, name, &ToReplica::Close);
            assert!(!shard.sources.slots.contains_key(&key));
            let told = shard.inputs.try_recv();
            assert!(
                matches!(&told, Ok(Input::Dialled { bulk: of, outcome: Err(_), .. }) if *of == bulk)
            );
            // Messages sent behind it do not arrive without it.
            let mut to = Connection::new(there.into(), Sealer::plain(), Opener::plain());
            assert!(matches!(to.receive(), Ok(ReadOutcome::End)));
            assert_eq!(to.buffered_bytes(), 0);
        }
    }
}
