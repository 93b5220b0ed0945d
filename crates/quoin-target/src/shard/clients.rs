//! A shard's clients: their requests go to the state machines, the replies to them.

use std::path::Path;

use quoin_nbd::{Description, Limits, Session, TlsPolicy, VolumeExport};
use quoin_reactor::descriptors::LISTENER_REST;
use quoin_reactor::{Interest, Reactor, now};
use quoin_replication::primary::{PrimaryAction, PrimaryEvent};
use quoin_telemetry::notices::Severity;
use quoin_types::block::{Frontend, Reply, Request};
use quoin_types::{Time, VolumeId};

use super::{Shard, Slot, Volume};
use crate::client::{Client, Turn};
use crate::listen::Socket;
use crate::nbd_listener::NewClient;
use crate::tokens::Origin;

/// Most clients of one volume.
const CLIENTS_MAX: usize = 64;
/// Send buffer for a client's replies, as far as the kernel's own limit allows: a few large reads,
/// so that answering them does not wait for the client between parts.
const SEND_BUFFER_BYTES: usize = 2 << 20;

/// Most bytes that the clients of a shard may hold together: beyond it a client that holds any is
/// not read from, and the others are given one request at a time.
const HELD_MAX: usize = 256 << 20;

/// Bytes that all clients of a shard hold, and the clients that wait for space.
#[derive(Default)]
pub(super) struct Crowd {
    held_bytes: usize,
    waiting: Vec<u64>,
}

impl Crowd {
    fn is_dense(&self) -> bool {
        self.held_bytes >= HELD_MAX
    }
}

fn watch(reactor: &Reactor, socket: &Socket, key: u64, interest: Interest) {
    if let Err(error) = reactor.modify(&socket.listener, key, interest) {
        tracing::warn!(%error, "cannot watch for clients");
    }
}

impl Volume {
    fn submit(
        &mut self,
        now: Time,
        client: u64,
        kind: u8,
        mut request: Request,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let sealed = self.sealing.seal(&mut request.operation);
        let offset = *sealed.as_ref().unwrap_or(&0);
        let origin = Origin { client, token: request.token, kind, came: now, offset };
        request.token = self.tokens.issue(origin);
        match sealed {
            Ok(_) => self.target.on(now, PrimaryEvent::Submit(request), actions),
            Err(error) => {
                let reply = Reply { token: request.token, result: Err(error) };
                actions.push(PrimaryAction::Reply(reply));
            }
        }
    }
}

impl Shard {
    /// Listens for clients of a volume.
    pub(super) fn listen(&mut self, id: VolumeId, path: &Path) -> Result<(Socket, u64), String> {
        let socket = Socket::bind(path).map_err(|error| error.to_string())?;
        let key = self.insert(Slot::Listener(id));
        match self.reactor.register(&socket.listener, key, Interest::READ) {
            Ok(()) => Ok((socket, key)),
            Err(error) => {
                self.slots.remove(&key);
                Err(error.to_string())
            }
        }
    }

    /// Accepts clients from now on, or disconnects the present ones.
    pub(super) fn serve(&mut self, id: VolumeId, path: Option<&Path>) {
        let Some(volume) = self.volumes.get_mut(&id).filter(|volume| !volume.stopped) else {
            return;
        };
        match (path, volume.listener.is_some()) {
            (Some(path), false) => match self.listen(id, path) {
                Ok(listener) => {
                    if let Some(volume) = self.volumes.get_mut(&id) {
                        volume.listener = Some(listener);
                    }
                }
                Err(error) => self.notices.push(Severity::Error, id, "", "CannotServe", error),
            },
            (None, true) => {
                if let Some((socket, key)) = volume.listener.take() {
                    self.reactor.deregister(&socket.listener);
                    self.slots.remove(&key);
                }
                for key in std::mem::take(&mut volume.clients) {
                    self.client_lost(key);
                }
            }
            _ => {}
        }
    }

    pub(super) fn accept(&mut self, id: VolumeId) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let Some((socket, key)) = &volume.listener else { return };
        let accepted = match socket.listener.accept() {
            Ok((socket, _)) => socket.set_nonblocking(true).map(|()| socket),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Err(error) => Err(error),
        };
        let socket = match accepted {
            Ok(socket) if volume.clients.len() < CLIENTS_MAX && !volume.stopped => socket,
            Ok(_) => return,
            // The listener stays readable: the loop would do nothing but fail.
            Err(error) if self.shortage.is_behind(&error) => {
                self.timers.set(*key, Some(now() + LISTENER_REST));
                let rest = Interest { read: false, write: false };
                return watch(&self.reactor, socket, *key, rest);
            }
            Err(error) => {
                tracing::warn!(volume = %id, %error, "cannot accept a client");
                return;
            }
        };
        if let Err(error) =
            rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES)
        {
            tracing::debug!(volume = %id, %error, "a client keeps the kernel's send buffer");
        }
        let description = Description { since_epoch: volume.since_epoch };
        let export = VolumeExport { device: volume.info.clone(), description };
        let session = Session::over(Box::new(export), TlsPolicy::Plain, Limits::default());
        let client = Client::new(socket.into(), id, Box::new(session));
        if let Some(key) = self.settle(client) {
            // A session may have something to say first (NBD greets).
            self.take_client(self.now(), key);
        }
    }

    /// Listens again after a pause of the listener.
    pub(super) fn listen_again(&mut self, id: VolumeId) {
        if let Some((socket, key)) = self.volumes.get(&id).and_then(|v| v.listener.as_ref()) {
            watch(&self.reactor, socket, *key, Interest::READ);
        }
    }

    /// Adopts a client that opened this volume over TCP.
    pub(super) fn adopt(&mut self, now: Time, id: VolumeId, new: NewClient) {
        let Some(volume) = self.volumes.get(&id) else { return };
        if volume.clients.len() >= CLIENTS_MAX || volume.stopped || volume.sealing.is_locked() {
            return;
        }
        let NewClient { socket, mut session, input, mut requests, life } = new;
        // The volume may have grown between the negotiation and now.
        session.device_changed(&volume.info);
        let mut client = Client::new(socket.into(), id, Box::new(session));
        client.give_input(input);
        let Some(key) = self.settle(client) else { return };
        if let Some(life) = life {
            self.timers.set(key, Some(now + life));
        }
        self.submit(now, id, key, &mut requests);
        self.take_client(now, key);
    }

    fn settle(&mut self, client: Client) -> Option<u64> {
        let id = client.volume;
        let key = self.insert(Slot::Client(Box::new(client)));
        let Some(Slot::Client(client)) = self.slots.get(&key) else { return None };
        if let Err(error) = self.reactor.register(client.socket(), key, Interest::READ) {
            tracing::warn!(volume = %id, %error, "cannot watch a client");
            self.slots.remove(&key);
            return None;
        }
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.clients.push(key);
        }
        self.metrics.clients.inc();
        Some(key)
    }

    pub(super) fn read_client(&mut self, now: Time, key: u64) {
        let Some(Slot::Client(client)) = self.slots.get_mut(&key) else { return };
        let id = client.volume;
        client.set_crowded(self.crowd.is_dense());
        let mut requests = std::mem::take(&mut self.requests);
        let turn = client.read(&mut requests);
        self.count(key);
        self.submit(now, id, key, &mut requests);
        self.requests = requests;
        match turn {
            Ok(Turn::Goes) => self.client_dirty(key),
            Ok(Turn::End) => self.client_lost(key),
            Err(error) => {
                tracing::debug!(volume = %id, %error, "a client's connection failed");
                self.client_lost(key);
            }
        }
    }

    /// Takes requests that wait in a client's buffer.
    fn take_client(&mut self, now: Time, key: u64) {
        let Some(Slot::Client(client)) = self.slots.get_mut(&key) else { return };
        let id = client.volume;
        let mut requests = std::mem::take(&mut self.requests);
        client.take(&mut requests);
        self.count(key);
        self.submit(now, id, key, &mut requests);
        self.requests = requests;
        self.client_dirty(key);
    }

    /// Counts a client's bytes; clients that wait for space are retried if there is some.
    fn count(&mut self, key: u64) {
        let Some(Slot::Client(client)) = self.slots.get_mut(&key) else { return };
        let held = client.held_bytes();
        self.crowd.held_bytes -= std::mem::replace(&mut client.counted_bytes, held);
        self.crowd.held_bytes += held;
        self.wake_those_who_wait();
    }

    fn wake_those_who_wait(&mut self) {
        if self.crowd.waiting.is_empty() || self.crowd.is_dense() {
            return;
        }
        for key in std::mem::take(&mut self.crowd.waiting) {
            if let Some(Slot::Client(client)) = self.slots.get_mut(&key) {
                client.waits = false;
                self.client_dirty(key);
            }
        }
    }

    fn submit(&mut self, now: Time, id: VolumeId, key: u64, requests: &mut Vec<Request>) {
        if requests.is_empty() {
            return;
        }
        if let Some(volume) = self.volumes.get_mut(&id) {
            for request in requests.drain(..) {
                let request = match &mut volume.throttle {
                    None => Some(request),
                    Some((throttle, _)) => throttle.admit(now, key, request),
                };
                if let Some(request) = request {
                    let kind = self.metrics.requested(&request);
                    volume.submit(now, key, kind, request, &mut self.actions);
                }
            }
            if let Some((throttle, key)) = &volume.throttle {
                self.timers.set(*key, throttle.due());
            }
        }
        requests.clear();
        self.touch(id);
        self.act(id);
    }

    /// Releases the requests that a volume's limits held back until now.
    pub(super) fn release(&mut self, now: Time, id: VolumeId) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        while let Some((throttle, _)) = &mut volume.throttle
            && let Some((client, request)) = throttle.next(now)
        {
            let kind = self.metrics.requested(&request);
            volume.submit(now, client, kind, request, &mut self.actions);
        }
        if let Some((throttle, key)) = &volume.throttle {
            self.timers.set(*key, throttle.due());
        }
        self.touch(id);
        self.act(id);
    }

    fn client_dirty(&mut self, key: u64) {
        if let Some(Slot::Client(client)) = self.slots.get_mut(&key)
            && !client.dirty
        {
            client.dirty = true;
            self.dirty_clients.push(key);
        }
    }

    pub(super) fn write_client(&mut self, now: Time, key: u64) {
        let Some(Slot::Client(client)) = self.slots.get_mut(&key) else { return };
        if client.has_output()
            && let Err(error) = client.flush()
        {
            tracing::debug!(volume = %client.volume, %error, "a client's connection failed");
            return self.client_lost(key);
        }
        if client.ending && !client.has_output() {
            return self.client_lost(key);
        }
        self.count(key);
        let crowded = self.crowd.is_dense();
        let Some(Slot::Client(client)) = self.slots.get_mut(&key) else { return };
        client.set_crowded(crowded);
        if client.holds_input() {
            self.take_client(now, key);
        }
        let Some(Slot::Client(client)) = self.slots.get_mut(&key) else { return };
        let interest = client.wanted();
        if crowded && !interest.read && !client.waits {
            client.waits = true;
            self.crowd.waiting.push(key);
        }
        if interest != client.interest {
            client.interest = interest;
            if let Err(error) = self.reactor.modify(client.socket(), key, interest) {
                tracing::warn!(%error, "cannot watch a client");
            }
        }
    }

    pub(super) fn reply(&mut self, id: VolumeId, mut reply: Reply) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let Some(origin) = volume.tokens.redeem(reply.token) else { return };
        let Some(Slot::Client(client)) = self.slots.get_mut(&origin.client) else { return };
        reply.result = volume.sealing.open(origin.offset, reply.result);
        self.metrics.replied(&reply, origin.kind, self.round.began().since(origin.came));
        reply.token = origin.token;
        client.complete(reply);
        if !client.dirty {
            client.dirty = true;
            self.dirty_clients.push(origin.client);
        }
    }

    pub(super) fn client_lost(&mut self, key: u64) {
        let Some(Slot::Client(client)) = self.slots.remove(&key) else { return };
        self.reactor.deregister(client.socket());
        self.timers.set(key, None);
        self.crowd.held_bytes -= client.counted_bytes;
        self.wake_those_who_wait();
        if let Some(volume) = self.volumes.get_mut(&client.volume) {
            volume.clients.retain(|k| *k != key);
            if let Some((throttle, timer)) = &mut volume.throttle {
                throttle.forget(key);
                self.timers.set(*timer, throttle.due());
            }
            let left = volume.tokens.of(key);
            if !left.is_empty() {
                self.event(self.now(), client.volume, PrimaryEvent::Abandon(left));
            }
        }
        self.metrics.clients.dec();
    }
}
