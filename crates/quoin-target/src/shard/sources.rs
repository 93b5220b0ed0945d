//! Sources of a shard's events: sockets and timers, each under a key of its own.

use std::io;

use quoin_reactor::{Interest, Reactor, Timers};
use quoin_types::VolumeId;
use quoin_types::key_map::KeyMap;

use super::links::Link;
use crate::client::Client;
use crate::listen::Socket;

/// Mark in the keys of bulk connections: their messages wait for all other work of a round.
const BULK: u64 = 1 << 62;

/// Returns whether the key is one of a bulk connection.
pub(super) fn is_bulk(key: u64) -> bool {
    key & BULK != 0
}

/// Owner of a key.
pub(super) enum Slot {
    Listener(VolumeId),
    Timer(VolumeId),
    Throttle(VolumeId),
    Client(Box<Client>),
    Link(Box<Link>),
}

pub(super) struct Sources {
    pub(super) reactor: Reactor,
    pub(super) timers: Timers,
    pub(super) slots: KeyMap<Slot>,
    /// The key that was used last; none is used twice.
    last_key: u64,
}

impl Sources {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            reactor: Reactor::new()?,
            timers: Timers::default(),
            slots: KeyMap::default(),
            last_key: 0,
        })
    }

    /// Adds an owner and returns its key.
    pub(super) fn insert(&mut self, slot: Slot) -> u64 {
        let key = self.key(false);
        self.slots.insert(key, slot);
        key
    }

    /// Returns a new key.
    pub(super) fn key(&mut self, bulk: bool) -> u64 {
        self.last_key += 1;
        if bulk { self.last_key | BULK } else { self.last_key }
    }

    /// Watches a listener for the clients of a volume.
    pub(super) fn add_listener(&mut self, id: VolumeId, socket: &Socket) -> io::Result<u64> {
        let key = self.insert(Slot::Listener(id));
        self.reactor.register(&socket.listener, key, Interest::READ).inspect_err(|_| {
            self.slots.remove(&key);
        })?;
        Ok(key)
    }

    pub(super) fn remove_listener(&mut self, (socket, key): &(Socket, u64)) {
        self.reactor.deregister(&socket.listener);
        self.remove_timer(*key);
    }

    /// Removes a key that has only a timer.
    pub(super) fn remove_timer(&mut self, key: u64) {
        self.timers.set(key, None);
        self.slots.remove(&key);
    }
}
