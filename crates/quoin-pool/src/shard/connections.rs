//! The connections of a shard, each under its key: what they owe together, which ones are to be
//! written to, and which sessions they belong to.

use quoin_replication::pool_host::access::{Claim, Lane, OpenSession, UNOPENED_MAX};
use quoin_replication::pool_host::answers::Answers;
use quoin_types::ids::SessionKey;
use quoin_types::key_map::KeyMap;
use quoin_types::message::FromReplica;
use quoin_wire::connection_slots::ConnectionSlots;
use quoin_wire::frame::WireError;

use super::sessions::Peer;
use super::{BULK, LISTENERS};

pub(super) struct Connections {
    peers: KeyMap<Peer>,
    /// Connections that are written to at the end of the round.
    dirty: Vec<u64>,
    /// Names connections and timers; 0 is the listeners.
    next_key: u64,
    pub(super) answers: Answers,
    /// Of sessions that have opened nothing yet.
    pub(super) unopened: ConnectionSlots,
}

impl Connections {
    pub(super) fn new() -> Self {
        Self {
            peers: KeyMap::default(),
            dirty: Vec::new(),
            next_key: LISTENERS + 1,
            answers: Answers::default(),
            unopened: ConnectionSlots::new(UNOPENED_MAX),
        }
    }

    /// A name that no connection and no timer has had yet.
    pub(super) fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    pub(super) fn get(&self, key: u64) -> Option<&Peer> {
        self.peers.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut Peer> {
        self.peers.get_mut(&key)
    }

    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Connections that are no bulk connections: a session has one.
    pub(super) fn sessions(&self) -> usize {
        self.peers.keys().filter(|key| *key & BULK == 0).count()
    }

    pub(super) fn insert(&mut self, key: u64, peer: Peer) {
        self.peers.insert(key, peer);
    }

    /// A connection that is gone owes nothing any more.
    pub(super) fn remove(&mut self, key: u64) -> Option<Peer> {
        let peer = self.peers.remove(&key)?;
        self.answers.changed(peer.connection.queued_bytes(), 0);
        Some(peer)
    }

    /// Keys of the connections that are so.
    pub(super) fn keys_of(&self, is_so: impl Fn(&Peer) -> bool) -> Vec<u64> {
        self.peers.iter().filter(|(_, peer)| is_so(peer)).map(|(key, _)| *key).collect()
    }

    /// The session of this connection as a new bulk connection of `session` finds it. One that is
    /// ending takes none.
    pub(super) fn open_session(
        &self,
        key: u64,
        open: SessionKey,
        session: SessionKey,
    ) -> Option<OpenSession> {
        let peer = self.peers.get(&key).filter(|peer| !peer.ending)?;
        let of_it = |peer: &&Peer| peer.lane == Lane::Bulk && peer.session == session;
        let bulks = self.peers.values().filter(of_it).count();
        Some(OpenSession { session: open, claim: peer.claim, bulks })
    }

    /// Bulk connections of a session that are not ending yet.
    pub(super) fn bulks_of(&self, session: SessionKey, claim: Claim) -> Vec<u64> {
        self.keys_of(|peer| {
            peer.lane == Lane::Bulk
                && (peer.session, peer.claim) == (session, claim)
                && !peer.ending
        })
    }

    /// Looks whether a connection owes too much to be read from, and keeps that for [`Self::goes_on`].
    /// `None`: nothing is read from it, as it is gone or ends.
    pub(super) fn stalls(&mut self, key: u64) -> Option<bool> {
        let peer = self.peers.get_mut(&key).filter(|peer| !peer.ending)?;
        peer.stalled = self.answers.stalls(peer.connection.queued_bytes());
        Some(peer.stalled)
    }

    /// Returns true if a connection that was not read from has taken enough to be read again.
    pub(super) fn goes_on(&self, key: u64) -> bool {
        let stalled = self.peers.get(&key).filter(|peer| peer.stalled);
        stalled.is_some_and(|peer| self.answers.goes_on(peer.connection.queued_bytes()))
    }

    /// Queues an answer. `None`: nobody takes it, as the connection is gone or ends.
    pub(super) fn send(
        &mut self,
        key: u64,
        session: SessionKey,
        message: &FromReplica,
    ) -> Option<Result<(), WireError>> {
        let peer = self.peers.get_mut(&key).filter(|peer| !peer.ending)?;
        let before = peer.connection.queued_bytes();
        let sent = peer.connection.send_from_replica(session, message);
        self.answers.changed(before, peer.connection.queued_bytes());
        if sent.is_ok() {
            self.mark_dirty(key);
        }
        Some(sent)
    }

    /// Hands over what is queued, as far as the socket takes it; true if all was taken. `None`: there
    /// is no such connection.
    pub(super) fn flush(&mut self, key: u64) -> Option<Result<bool, WireError>> {
        let peer = self.peers.get_mut(&key)?;
        let before = peer.connection.queued_bytes();
        let flushed = peer.connection.flush();
        self.answers.changed(before, peer.connection.queued_bytes());
        Some(flushed)
    }

    pub(super) fn mark_dirty(&mut self, key: u64) {
        if let Some(peer) = self.peers.get_mut(&key)
            && !peer.dirty
        {
            peer.dirty = true;
            self.dirty.push(key);
        }
    }

    pub(super) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The next connection to write to, which is not listed any more.
    pub(super) fn next_dirty(&mut self) -> Option<u64> {
        self.dirty.pop()
    }

    /// Records that the queue of a connection is about to be written.
    pub(super) fn mark_clean(&mut self, key: u64) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.dirty = false;
        }
    }
}
