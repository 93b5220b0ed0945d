//! The shard's connections: what comes in becomes messages for replicas, what they answer goes
//! out. Nothing piles up: who does not take answers is not read from.

use quoin_reactor::{Interest, now};
use quoin_replication::pool_host::access::{
    CONNECTIONS_MAX, Claim, Lane, OPEN_MAX, appends as appends_by, takes_bulk,
};
use quoin_replication::replica::ReplicaEvent;
use quoin_replication::replica::appends::{Append, Appends};
use quoin_store::ReplicaPool;
use quoin_types::ids::SessionKey;
use quoin_types::message::{Failure, FromReplica, ToReplica};
use quoin_types::{Epoch, Term, Time};
use quoin_wire::connection_slots::ConnectionSlot;
use quoin_wire::establish::Accepted;
use quoin_wire::frame::WireError;
use quoin_wire::{Connection, ConnectionKind, Frame, Hello, ReadOutcome};
use rustix::net::Shutdown;

use super::stop::StopStep;
use super::{BULK, EARLY_BYTES, ENDING_MAX, LINGER, Recognition, Shard};
use crate::accept::Leave;
use crate::facts::PoolFacts;

fn claim_of(hello: &Hello) -> Claim {
    Claim { volume: hello.volume, replica: hello.replica, guid: hello.guid }
}

fn lane_of(kind: ConnectionKind) -> Lane {
    match kind {
        ConnectionKind::Log => Lane::Log,
        ConnectionKind::Bulk => Lane::Bulk,
    }
}

/// One believed connection.
pub(super) struct Peer {
    pub(super) connection: Connection,
    pub(super) session: SessionKey,
    pub(super) claim: Claim,
    /// By its grant.
    leave: Leave,
    pub(super) lane: Lane,
    pub(super) interest: Interest,
    /// Whole frames may wait in its buffer: its answers were not taken fast enough.
    pub(super) stalled: bool,
    /// To be closed: what is queued is written, what still comes is not looked at.
    pub(super) ending: bool,
    /// It took all of what is said last, and was told so.
    shut: bool,
    /// Listed in `dirty`.
    pub(super) dirty: bool,
    /// Until its Open.
    unopened: Option<ConnectionSlot>,
}

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    /// Nobody is let in any more: a target that opened a replica now would leave it open, and the next
    /// start would find that it may lack something.
    pub(super) fn begin_stop(&mut self, now: Time) {
        self.shut();
        for guid in self.replicas.guids() {
            self.deliver(now, guid, ReplicaEvent::Shutdown);
        }
        self.raise_last_mark();
        self.stop.begin(now, self.pool.request_sync());
    }

    /// Returns true if a stop is complete.
    pub(super) fn has_stopped(&mut self, now: Time) -> bool {
        let all_taken = self.connections.answers.is_empty();
        match self.stop.step(now, |ticket| self.disk.syncs.covers(ticket), all_taken) {
            StopStep::Waits => false,
            StopStep::Ended => true,
            StopStep::Records => {
                self.stop.records(self.pool.request_sync());
                self.begin_sync();
                false
            }
        }
    }

    pub(super) fn admit(&mut self, now: Time, answered: Accepted, leave: Leave) {
        let Accepted { connection, session, hello, peer_address } = answered;
        let refused = self.parts.recognition == Recognition::Refused;
        if self.connections.len() >= CONNECTIONS_MAX || self.stop.has_begun() || refused {
            return;
        }
        let (lane, claim) = (lane_of(hello.kind), claim_of(&hello));
        let mut key = self.connections.key();
        let unopened = match lane {
            Lane::Bulk if !self.takes_bulk(session, claim) => {
                // Its target comes again if the session does.
                return tracing::info!(%peer_address, "a bulk connection of no open session");
            }
            Lane::Bulk => {
                key |= BULK;
                None
            }
            Lane::Log => {
                let place = self.connections.unopened.acquire(peer_address);
                if place.is_none() {
                    tracing::warn!(
                        %peer_address,
                        "opens nothing in too many sessions: one more is refused"
                    );
                    self.parts.metrics.connections_refused.inc();
                    return;
                }
                place
            }
        };
        if let Err(error) = self.parts.reactor.register(connection.socket(), key, Interest::READ) {
            tracing::warn!(%error, %peer_address, "cannot watch a data connection");
            return;
        }
        let peer = Peer {
            connection,
            session,
            claim,
            leave,
            lane,
            interest: Interest::READ,
            stalled: false,
            ending: false,
            shut: false,
            dirty: false,
            unopened,
        };
        self.connections.insert(key, peer);
        self.timers.set(key, Some(now + OPEN_MAX));
        self.count_sessions();
    }

    fn count_sessions(&self) {
        self.parts.metrics.sessions.set(self.connections.sessions() as i64);
    }

    fn takes_bulk(&self, session: SessionKey, claim: Claim) -> bool {
        let held = self.replicas.get(claim.guid).and_then(|held| held.replica.session());
        let open = held.and_then(|(key, open)| self.connections.open_session(key, open, session));
        takes_bulk(session, claim, open)
    }

    pub(super) fn read(&mut self, key: u64) {
        let Some(peer) = self.connections.get_mut(key) else { return };
        let outcome = peer.connection.receive();
        if peer.ending {
            peer.connection.discard_input();
        } else {
            self.take_frames(key);
        }
        let now = now();
        match outcome {
            Ok(ReadOutcome::End) => self.lost(now, key, &WireError::Closed),
            Ok(_) => {}
            Err(error) => self.lost(now, key, &error),
        }
    }

    /// Handles the whole frames that a connection has read, as long as its answers are taken.
    ///
    /// They renew leases from their receipt, not from the start of the round.
    fn take_frames(&mut self, key: u64) {
        let now = self.round.receipt(now());
        let mut appends = Appends::default();
        let mut takes_more = true;
        loop {
            match self.connections.stalls(key) {
                None => return,
                Some(true) => break,
                Some(false) => {}
            }
            let Some(peer) = self.connections.get_mut(key) else { return };
            let (claim, session, lane) = (peer.claim, peer.session, peer.lane);
            let writes = peer.leave.writes;
            let message = match peer.connection.next_frame() {
                Ok(Some(incoming)) => match incoming.frame {
                    Frame::ToReplica(message) if incoming.session == session => message,
                    _ => return self.lost(now, key, &WireError::Malformed("session")),
                },
                Ok(None) => break,
                Err(error) => {
                    self.append(now, key, &mut appends);
                    return self.lost(now, key, &error);
                }
            };
            let ToReplica::Append { entries, stable, sync, ping } = message else {
                self.append(now, key, &mut appends);
                if !lane.carries(&message) {
                    return self.lost(
                        now,
                        key,
                        &WireError::Malformed("connection for its message"),
                    );
                }
                if !claim.allows(&message) {
                    return self.refuse_claim(key, session, claim);
                }
                if let ToReplica::Open { .. } = message {
                    if !self.still_opens(key) {
                        return self.refuse_claim(key, session, claim);
                    }
                    self.has_opened(key);
                }
                if let ToReplica::OpenBulk { .. } = message {
                    self.timers.set(key, None);
                }
                self.take(now, key, claim.guid, session, message);
                takes_more = takes_more && self.write_early(now, key);
                continue;
            };
            if lane == Lane::Bulk {
                return self.lost(now, key, &WireError::Malformed("connection for its message"));
            }
            if !writes && !entries.iter().all(|entry| appends_by(writes, session.epoch, entry)) {
                self.append(now, key, &mut appends);
                return self.refuse_write(key, session, claim);
            }
            if let Some(before) = appends.add(Append { entries, stable, sync, ping }) {
                self.take(now, key, claim.guid, session, before);
            }
        }
        self.append(now, key, &mut appends);
        self.watch(key);
    }

    /// It has a place of its own from now on, for as long as it likes.
    fn has_opened(&mut self, key: u64) {
        if let Some(peer) = self.connections.get_mut(key)
            && peer.unopened.take().is_some()
        {
            self.timers.set(key, None);
        }
    }

    /// Its grant may have become one of a former term since it was let in.
    fn still_opens(&self, key: u64) -> bool {
        let term = self.connections.get(key).map_or_else(Term::default, |peer| peer.leave.term);
        self.parts.acceptor.still_opens(term)
    }

    /// Ends a session that opens another replica than its Hello named, or by a grant of a former term.
    fn refuse_claim(&mut self, key: u64, session: SessionKey, claim: Claim) {
        tracing::error!(
            volume = %claim.volume, guid = %claim.guid,
            "a target asked to open another replica than it was let in for, or by a grant of a former \
             term of the controller; its session was ended"
        );
        self.refuse(key, session);
    }

    /// Ends a session that changes the volume's content by a grant that lets it read alone.
    fn refuse_write(&mut self, key: u64, session: SessionKey, claim: Claim) {
        tracing::error!(
            volume = %claim.volume, guid = %claim.guid,
            "a target asked to write a volume that its node has read-only, or only for work that reads; \
             its session was ended"
        );
        self.refuse(key, session);
    }

    fn refuse(&mut self, key: u64, session: SessionKey) {
        let failure = Failure::Protocol;
        self.send(key, session, &FromReplica::Refuse { promised: Epoch::ZERO, failure });
        self.end(key);
    }

    /// Answers that make a good piece go out while the next are being made, so that the target works
    /// on them meanwhile: a batch would go through one process after the other otherwise. False
    /// once the socket takes no more.
    fn write_early(&mut self, now: Time, key: u64) -> bool {
        let Some(peer) = self.connections.get(key) else { return false };
        if peer.connection.queued_bytes() < EARLY_BYTES || peer.ending {
            return true;
        }
        match self.connections.flush(key) {
            Some(Ok(all)) => all,
            Some(Err(error)) => {
                self.lost(now, key, &error);
                false
            }
            None => false,
        }
    }

    fn append(&mut self, now: Time, key: u64, appends: &mut Appends) {
        let Some(message) = appends.take() else { return };
        let Some(peer) = self.connections.get(key) else { return };
        let (guid, session) = (peer.claim.guid, peer.session);
        self.take(now, key, guid, session, message);
    }

    pub(super) fn send(&mut self, connection: u64, session: SessionKey, message: &FromReplica) {
        if let Some(Err(error)) = self.connections.send(connection, session, message) {
            tracing::error!(%error, "an answer could not be framed");
            // Never silently less: a smaller answer says how far it goes, and what has no smaller
            // one ends the connection.
            match smaller(message) {
                Some(message) => self.send(connection, session, &message),
                None => self.end(connection),
            }
        }
    }

    /// Closes a connection after what was sent before, and its session's bulk connections with it.
    pub(super) fn end(&mut self, connection: u64) {
        let Some(peer) = self.connections.get_mut(connection) else { return };
        if std::mem::replace(&mut peer.ending, true) {
            return;
        }
        let (lane, session, claim) = (peer.lane, peer.session, peer.claim);
        // Whatever it does not take is not kept for it.
        self.timers.set(connection, Some(now() + ENDING_MAX));
        self.connections.mark_dirty(connection);
        self.end_bulks(lane, session, claim);
    }

    /// Ends the bulk connections of a session, also those that its replica was not told of yet.
    fn end_bulks(&mut self, lane: Lane, session: SessionKey, claim: Claim) {
        if lane == Lane::Bulk {
            return;
        }
        for key in self.connections.bulks_of(session, claim) {
            self.end(key);
        }
    }

    pub(super) fn write(&mut self, now: Time, key: u64) {
        match self.connections.flush(key) {
            None => return,
            Some(Err(error)) => return self.lost(now, key, &error),
            Some(Ok(true)) => self.took_all(now, key),
            Some(Ok(false)) => {}
        }
        if self.connections.goes_on(key) {
            self.take_frames(key);
        }
        self.watch(key);
    }

    /// A connection that is ending took its last answers. The peer must be able to read what was said
    /// last, so the socket is not torn down under it: it is given a moment to close its side.
    fn took_all(&mut self, now: Time, key: u64) {
        if let Some(peer) = self.connections.get_mut(key)
            && peer.ending
            && !std::mem::replace(&mut peer.shut, true)
        {
            let _ = rustix::net::shutdown(peer.connection.socket(), Shutdown::Write);
            self.timers.set(key, Some(now + LINGER));
        }
    }

    /// Asks for exactly the readiness that this connection can use.
    fn watch(&mut self, key: u64) {
        let Some(peer) = self.connections.get_mut(key) else { return };
        let interest = Interest {
            read: !peer.stalled,
            write: peer.connection.queued_bytes() > 0 && !peer.dirty,
        };
        if interest != peer.interest {
            peer.interest = interest;
            if let Err(error) = self.parts.reactor.modify(peer.connection.socket(), key, interest) {
                tracing::warn!(%error, "cannot watch a data connection");
            }
        }
    }

    pub(super) fn lost(&mut self, now: Time, key: u64, why: &WireError) {
        let Some(peer) = self.connections.remove(key) else { return };
        self.parts.reactor.deregister(peer.connection.socket());
        self.timers.set(key, None);
        self.copying.forget(key);
        self.count_sessions();
        if !peer.ending && !matches!(why, WireError::Closed) {
            tracing::warn!(error = %why, guid = %peer.claim.guid, "a session's connection failed");
        }
        self.end_bulks(peer.lane, peer.session, peer.claim);
        self.deliver(now, peer.claim.guid, ReplicaEvent::Disconnected { connection: key });
    }
}

/// An answer about half of what this one is about, if there is one: the asker goes on behind it.
fn smaller(message: &FromReplica) -> Option<FromReplica> {
    match message {
        FromReplica::Pulled { id, slots, .. } if slots.len() > 1 => {
            let (first, rest) = slots.split_at(slots.len() / 2);
            let (id, slots, cursor) = (*id, first.to_vec(), Some(rest[0].lba));
            Some(FromReplica::Pulled { id, slots, cursor, end: None, gone: false })
        }
        // It must be its state that is too long: this one cannot be copied from.
        FromReplica::Pulled { id, gone: false, .. } => {
            let (id, slots) = (*id, Vec::new());
            Some(FromReplica::Pulled { id, slots, cursor: None, end: None, gone: true })
        }
        FromReplica::Fetched { id, entries, gone } if entries.len() > 1 => {
            let entries = entries[..entries.len() / 2].to_vec();
            Some(FromReplica::Fetched { id: *id, entries, gone: *gone })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use quoin_types::entry::{Chain, Entry, EntryKind, SharedEntry};
    use quoin_types::message::{Content, Slot};
    use quoin_types::{Lsn, Position};

    use super::*;

    fn pulled(lbas: std::ops::Range<u64>) -> FromReplica {
        let slot = |lba| Slot { lba, blocks: 1, version: Lsn(1), content: Content::Hole };
        let slots = lbas.map(slot).collect();
        FromReplica::Pulled { id: 5, slots, cursor: Some(99), end: None, gone: false }
    }

    #[test]
    fn an_increment_that_is_too_long_ends_where_its_second_half_begins() {
        let of = |message: FromReplica| match smaller(&message) {
            Some(FromReplica::Pulled { id: 5, slots, cursor, end: None, gone }) => {
                Some((slots.iter().map(|slot| slot.lba).collect::<Vec<_>>(), cursor, gone))
            }
            Some(other) => panic!("{other:?}"),
            None => None,
        };
        assert_eq!(of(pulled(10..17)), Some((vec![10, 11, 12], Some(13), false)));
        assert_eq!(of(pulled(10..12)), Some((vec![10], Some(11), false)));
        assert_eq!(of(pulled(10..11)), Some((vec![], None, true)), "it cannot be copied from");
        let gone =
            FromReplica::Pulled { id: 5, slots: vec![], cursor: None, end: None, gone: true };
        assert_eq!(of(gone), None);
    }

    #[test]
    fn entries_that_are_too_long_together_become_the_first_half_and_one_alone_nothing() {
        let entry = |lsn: u64| {
            let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
            let (kind, data) = (EntryKind::Trim, Bytes::new());
            Arc::new(Entry::after(Chain::default(), position, kind, 0, 1, data, false))
        };
        let of = |count: u64| {
            let entries: Vec<SharedEntry> = (1..=count).map(entry).collect();
            let half = smaller(&FromReplica::Fetched { id: 5, entries, gone: false });
            half.map(|message| match message {
                FromReplica::Fetched { id: 5, entries, gone: false } => entries.len(),
                other => panic!("{other:?}"),
            })
        };
        assert_eq!([of(1), of(2), of(3), of(8)], [None, Some(1), Some(1), Some(4)]);
        assert_eq!(smaller(&FromReplica::Closed), None);
    }
}
