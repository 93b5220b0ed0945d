//! A shard's connections to replicas.

use quoin_core::ids::SessionKey;
use quoin_core::membership::Member;
use quoin_core::message::ToReplica;
use quoin_core::target::TargetEvent;
use quoin_core::{Time, VolumeId};
use quoin_wire::frame::WireError;
use quoin_wire::hello::FEATURE_VERIFY;
use quoin_wire::notices::Severity;
use quoin_wire::reactor::Interest;
use quoin_wire::{Connection, Frame, Hello, ReadOutcome};

use super::{Shard, Slot};
use crate::dial::Dial;

pub(super) struct Link {
    pub(super) connection: Connection,
    pub(super) session: SessionKey,
    pub(super) volume: VolumeId,
    pub(super) interest: Interest,
    pub(super) dirty: bool,
}

impl Shard {
    pub(super) fn send(&mut self, id: VolumeId, session: SessionKey, message: &ToReplica) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let Some((_, key)) = volume.links.iter().find(|(s, _)| *s == session) else { return };
        let key = *key;
        let Some(Slot::Link(link)) = self.slots.get_mut(&key) else { return };
        if let Err(error) = link.connection.send_to_replica(session, message) {
            tracing::error!(volume = %id, %error, "a message could not be framed");
            return;
        }
        if !link.dirty {
            link.dirty = true;
            self.dirty_links.push(key);
        }
    }

    pub(super) fn connect(&mut self, id: VolumeId, member: Member, session: SessionKey) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let Some(place) = volume.places.iter().find(|p| p.member == member) else {
            // Reported on the next round, since the state machine is in the middle of this one.
            self.dialler.fail(id, session, "no address is known for this replica".into());
            return;
        };
        self.dialler.start(Dial {
            volume: id,
            session,
            hello: Hello::new(id, member.id, member.guid, volume.grant.clone()),
            pool: place.pool.clone(),
            address: place.address.clone(),
        });
    }

    pub(super) fn dialled(
        &mut self,
        now: Time,
        id: VolumeId,
        session: SessionKey,
        pool: String,
        outcome: Result<Box<Connection>, String>,
    ) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        match outcome {
            Ok(connection) => {
                if volume.unreachable.contains(&pool) {
                    volume.unreachable.retain(|p| *p != pool);
                    let message = format!("pool {pool} answers again");
                    self.notices.push(Severity::Normal, id, "", "PoolReachable", message);
                }
                let key = self.next_key + 1;
                if let Err(error) = self.reactor.register(connection.socket(), key, Interest::READ)
                {
                    tracing::warn!(%error, "cannot watch a connection");
                    return self.event(now, id, TargetEvent::Disconnected { session });
                }
                let interest = Interest::READ;
                let verifies = connection.has(FEATURE_VERIFY);
                let link =
                    Link { connection: *connection, session, volume: id, interest, dirty: false };
                let key = self.insert(Slot::Link(Box::new(link)));
                if let Some(volume) = self.volumes.get_mut(&id) {
                    volume.links.push((session, key));
                }
                self.event(now, id, TargetEvent::Connected { session, verifies });
            }
            Err(why) => {
                if !pool.is_empty() && !volume.unreachable.contains(&pool) {
                    let message = format!("pool {pool}: {why}");
                    volume.unreachable.push(pool);
                    self.notices.push(Severity::Warning, id, "", "PoolUnreachable", message);
                }
                self.event(now, id, TargetEvent::Disconnected { session });
            }
        }
    }

    pub(super) fn disconnect(&mut self, id: VolumeId, session: SessionKey) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let Some(at) = volume.links.iter().position(|(s, _)| *s == session) else {
            return self.dialler.give_up(id, session);
        };
        let (_, key) = volume.links.swap_remove(at);
        if let Some(Slot::Link(mut link)) = self.slots.remove(&key) {
            // What was said before (a Close) goes out as far as the socket takes it.
            let _ = link.connection.flush();
            self.reactor.deregister(link.connection.socket());
        }
    }

    fn link_lost(&mut self, now: Time, key: u64, why: &WireError) {
        let Some(Slot::Link(link)) = self.slots.remove(&key) else { return };
        self.reactor.deregister(link.connection.socket());
        let (id, session) = (link.volume, link.session);
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.links.retain(|(_, k)| *k != key);
        }
        if !matches!(why, WireError::Closed) {
            tracing::warn!(volume = %id, error = %why, "the connection to a replica failed");
        }
        self.event(now, id, TargetEvent::Disconnected { session });
    }

    pub(super) fn read_link(&mut self, now: Time, key: u64) {
        let Some(Slot::Link(link)) = self.slots.get_mut(&key) else { return };
        let (id, session) = (link.volume, link.session);
        let outcome = link.connection.receive();
        loop {
            let Some(Slot::Link(link)) = self.slots.get_mut(&key) else { return };
            match link.connection.next_frame() {
                Ok(Some(incoming)) => match incoming.frame {
                    Frame::FromReplica(message) if incoming.session == session => {
                        if let Some(volume) = self.volumes.get_mut(&id) {
                            let event = TargetEvent::Message { session, message };
                            volume.target.on(now, event, &mut self.actions);
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
        let Some(Slot::Link(link)) = self.slots.get_mut(&key) else { return };
        if let Err(error) = link.connection.flush() {
            return self.link_lost(now, key, &error);
        }
        let interest = Interest { read: true, write: link.connection.queued_bytes() > 0 };
        if interest != link.interest {
            link.interest = interest;
            if let Err(error) = self.reactor.modify(link.connection.socket(), key, interest) {
                tracing::warn!(%error, "cannot watch a connection");
            }
        }
    }
}
