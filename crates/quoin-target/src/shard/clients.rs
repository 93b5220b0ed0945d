//! A shard's clients: their requests go to the state machines, the replies to them.

use std::path::Path;
use std::time::Duration;

use quoin_nbd::{Description, Limits, Numbering, Session, TlsPolicy, VolumeExport};
use quoin_reactor::descriptors::LISTENER_REST;
use quoin_reactor::{Interest, Reactor, now};
use quoin_replication::primary::{PrimaryAction, PrimaryEvent};
use quoin_replication::target_host::throttle::Throttle;
use quoin_types::block::{BlockError, DeviceInfo, Frontend, Operation, Reply, Request, Token};
use quoin_types::{ClientId, Time, VolumeId};

use super::sources::{Slot, Sources};
use super::{Shard, Volume, feeding};
use crate::assignment::Sharer;
use crate::client::{Client, SharedUse, Turn, User};
use crate::fences::Fences;
use crate::listen::Socket;
use crate::nbd_listener::NewClient;
use crate::standing::{Holder, Openers};
use crate::tokens::{Origin, Tokens};
use crate::volume_metrics::Counts;

/// Most clients of one volume.
const CLIENTS_MAX: usize = 64;
/// Send buffer for a client's replies, as far as the kernel's own limit allows: a few large reads,
/// so that answering them does not wait for the client between parts.
const SEND_BUFFER_BYTES: usize = 2 << 20;

/// Most bytes that the clients of a shard may hold together: beyond it a client that holds any is
/// not read from, and the others are given one request at a time.
const HELD_MAX: usize = 256 << 20;

/// Time between the test of a lease and the writing of an answer after which the lease is tested again.
const ANSWERS_LATE: Duration = Duration::from_millis(10);

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

/// Returns true if a node that shares a volume may use it as agreed, by the key that it showed.
fn lets_in(sharer: &Sharer, holder: &Holder, shares: &SharedUse) -> bool {
    sharer.node == holder.name
        && sharer.read_only == shares.read_only
        && sharer.client == shares.client
        && sharer.key_hashes.contains(&holder.key_hash)
}

/// The face of a volume towards its clients, and these clients.
pub(super) struct Export {
    pub(super) info: DeviceInfo,
    /// As in [`super::VolumeSetup`].
    pub(super) since_epoch: u64,
    /// Listener and its key; `None` while the volume accepts no clients.
    listener: Option<(Socket, u64)>,
    /// Limits, and the key of the timer that releases waiting requests.
    throttle: Option<(Throttle, u64)>,
    /// Keys of the clients.
    clients: Vec<u64>,
    /// Number of this node's attachment, as in [`super::VolumeSetup`].
    pub(super) client: u64,
    /// Version of the record that has it and the other nodes.
    pub(super) version: u64,
    /// Other nodes that are let in.
    pub(super) sharers: Vec<Sharer>,
    pub(super) tokens: Tokens,
    pub(super) counts: Counts,
}

impl Export {
    pub(super) fn new(
        info: DeviceInfo,
        since_epoch: u64,
        listener: Option<(Socket, u64)>,
        throttle: Option<(Throttle, u64)>,
    ) -> Self {
        Self {
            info,
            since_epoch,
            listener,
            throttle,
            clients: Vec::new(),
            client: 0,
            version: 0,
            sharers: Vec::new(),
            tokens: Tokens::default(),
            counts: Counts::default(),
        }
    }

    /// The attachments whose clients may change the volume.
    fn attachments(&self) -> impl Iterator<Item = u64> + '_ {
        let all = std::iter::once(self.client).chain(self.sharers.iter().map(|s| s.client));
        all.filter(|attachment| *attachment != 0)
    }

    /// Returns true if several hosts may change the volume: each numbers its requests.
    fn is_shared(&self) -> bool {
        self.attachments().next().is_some()
    }

    pub(super) fn grant(&self) -> PrimaryEvent {
        PrimaryEvent::Clients { attachments: self.attachments().collect(), version: self.version }
    }

    pub(super) fn has_clients(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Tells the clients of a larger size; false: it is none.
    pub(super) fn grow(&mut self, size_bytes: u64, sources: &mut Sources) -> bool {
        if size_bytes <= self.info.size_bytes {
            return false;
        }
        self.info.size_bytes = size_bytes;
        for key in &self.clients {
            if let Some(Slot::Client(client)) = sources.slots.get_mut(key) {
                client.device_changed(&self.info);
            }
        }
        true
    }

    /// Changes the limits; requests that wait for the former ones go under the present ones, at the
    /// next release.
    pub(super) fn limit(
        &mut self,
        now: Time,
        id: VolumeId,
        limits: super::Limits,
        sources: &mut Sources,
    ) {
        match &mut self.throttle {
            Some((throttle, _)) => throttle.change(now, limits),
            None => {
                let throttle = Throttle::new(now, limits);
                self.throttle = throttle.map(|it| (it, sources.insert(Slot::Throttle(id))));
            }
        }
    }

    /// Accepts no client from now on; returns the present ones, which are to be disconnected.
    fn stop_listening(&mut self, sources: &mut Sources) -> Vec<u64> {
        if let Some(listener) = self.listener.take() {
            sources.remove_listener(&listener);
        }
        std::mem::take(&mut self.clients)
    }

    /// Releases no waiting request either; for a volume that is removed.
    pub(super) fn close(&mut self, sources: &mut Sources) -> Vec<u64> {
        if let Some((_, key)) = self.throttle.take() {
            sources.remove_timer(key);
        }
        self.stop_listening(sources)
    }

    #[cfg(test)]
    pub(super) fn clients(&self) -> &[u64] {
        &self.clients
    }

    /// Sets the timer of the requests that wait for the limits.
    fn set_timer(&self, sources: &mut Sources) {
        if let Some((throttle, key)) = &self.throttle {
            sources.timers.set(*key, throttle.due());
        }
    }

    /// Forgets a client; returns its requests that were submitted.
    fn forget(&mut self, client: u64, sources: &mut Sources) -> Vec<Token> {
        self.clients.retain(|key| *key != client);
        if let Some((throttle, _)) = &mut self.throttle {
            throttle.forget(client);
        }
        self.set_timer(sources);
        self.tokens.of(client)
    }
}

impl Volume {
    fn accepts_clients(&self) -> bool {
        self.export.clients.len() < CLIENTS_MAX && !self.stage.stopped
    }

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
        request.token = self.export.tokens.issue(origin);
        let changes = matches!(
            request.operation,
            Operation::Write { .. } | Operation::Trim { .. } | Operation::WriteZeroes { .. }
        );
        if changes && request.origin.is_none() && self.export.is_shared() {
            // It could be sent again after another host has changed the same blocks.
            let reply = Reply { token: request.token, result: Err(BlockError::NoClient) };
            return actions.push(PrimaryAction::Reply(reply));
        }
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
        let key = self.sources.add_listener(id, &socket).map_err(|error| error.to_string())?;
        Ok((socket, key))
    }

    /// Accepts clients from now on, or disconnects the present ones.
    pub(super) fn serve(&mut self, id: VolumeId, path: Option<&Path>) {
        let Some(volume) = self.volumes.get_mut(&id).filter(|volume| !volume.stage.stopped) else {
            return;
        };
        match (path, volume.export.listener.is_some()) {
            (Some(path), false) => match self.listen(id, path) {
                Ok(listener) => {
                    if let Some(volume) = self.volumes.get_mut(&id) {
                        volume.export.listener = Some(listener);
                    }
                }
                Err(error) => self.reports.cannot_serve(id, error),
            },
            (None, true) => {
                for key in volume.export.stop_listening(&mut self.sources) {
                    self.client_lost(key);
                }
            }
            _ => {}
        }
    }

    pub(super) fn accept(&mut self, id: VolumeId) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let Some((socket, key)) = &volume.export.listener else { return };
        let accepted = match socket.listener.accept() {
            Ok((socket, _)) => socket.set_nonblocking(true).map(|()| socket),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Err(error) => Err(error),
        };
        let socket = match accepted {
            Ok(socket) if volume.accepts_clients() => socket,
            Ok(_) => return,
            // The listener stays readable: the loop would do nothing but fail.
            Err(error) if self.shortage.is_behind(&error) => {
                self.sources.timers.set(*key, Some(now() + LISTENER_REST));
                let rest = Interest { read: false, write: false };
                return watch(&self.sources.reactor, socket, *key, rest);
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
        let description = Description { since_epoch: volume.export.since_epoch };
        let numbering = Numbering { attachment: volume.export.client, random: rand::random() };
        let device = volume.export.info.clone();
        let export = VolumeExport { device, description, numbering };
        let session = Session::over(Box::new(export), TlsPolicy::Plain, Limits::default());
        let client = Client::new(socket.into(), id, Box::new(session));
        if let Some(key) = self.settle(client) {
            // A session may have something to say first (NBD greets).
            self.take_client(self.now(), key);
        }
    }

    /// Listens again after a pause of the listener.
    pub(super) fn listen_again(&mut self, id: VolumeId) {
        if let Some((socket, key)) = self.volumes.get(&id).and_then(|v| v.export.listener.as_ref())
        {
            watch(&self.sources.reactor, socket, *key, Interest::READ);
        }
    }

    /// Adopts a client that opened this volume over TCP.
    pub(super) fn adopt(&mut self, now: Time, id: VolumeId, new: NewClient) {
        let Some(volume) = self.volumes.get(&id) else { return };
        if !volume.accepts_clients() || volume.sealing.is_locked() {
            return;
        }
        let NewClient { socket, mut session, input, mut requests, life, user, from } = new;
        if let Some(user) = &user
            && let Some(shares) = &user.shares
        {
            // It may have lost the volume since it was let in.
            if !volume.export.sharers.iter().any(|sharer| lets_in(sharer, &user.holder, shares)) {
                return;
            }
            // Requests that lie unread in an older connection of the node may have been sent again
            // by this one: they must not be carried out later.
            self.end_sharers(id, |older, _| older.name == user.holder.name);
        }
        let Some(volume) = self.volumes.get(&id) else { return };
        // The volume may have grown between the negotiation and now.
        session.device_changed(&volume.export.info);
        let mut client = Client::new(socket.into(), id, Box::new(session));
        client.give_input(input);
        (client.user, client.from) = (user, from);
        let Some(key) = self.settle(client) else { return };
        if let Some(life) = life {
            self.sources.timers.set(key, Some(now + life));
        }
        self.begin_numbering(now, key);
        self.submit(now, id, key, &mut requests);
        self.take_client(now, key);
    }

    /// Lets these other nodes use a volume, and no others.
    ///
    /// `version`: that of the record that names them.
    pub(super) fn let_in(
        &mut self,
        now: Time,
        id: VolumeId,
        client: u64,
        sharers: Vec<Sharer>,
        version: u64,
    ) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let is_same = volume.export.sharers == sharers && volume.export.client == client;
        if is_same && volume.export.version == version {
            return;
        }
        let begins_to_number = volume.export.client == 0 && client != 0;
        (volume.export.client, volume.export.version) = (client, version);
        volume.export.sharers.clone_from(&sharers);
        let grant = volume.export.grant();
        let is_let_in = |holder: &Holder, shares: &SharedUse| {
            sharers.iter().any(|sharer| lets_in(sharer, holder, shares))
        };
        self.end_sharers(id, |holder, shares| !is_let_in(holder, shares));
        if begins_to_number {
            // Connections of before have no numbers, and their changes are refused from here on.
            self.end_own(id);
        }
        self.event(now, id, grant);
    }

    /// Takes note of a client that numbers its requests, before the first of them. Older connections
    /// of its attachment end: requests that lie unread there may have been sent again by this one.
    fn begin_numbering(&mut self, now: Time, key: u64) {
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) else { return };
        let id = client.volume;
        let Some((numbered, begins)) = client.newly_numbered() else { return };
        let Some(volume) = self.volumes.get(&id) else { return };
        let shares = client.user.as_ref().and_then(|user| user.shares.as_ref());
        let granted = shares.map_or(volume.export.client, |shares| shares.client);
        if granted != numbered.attachment() {
            // The attachment has ended since the negotiation.
            return self.client_lost(key);
        }
        let is_older = |other: &&u64| {
            let Some(Slot::Client(client)) = self.sources.slots.get(*other) else { return false };
            let of = client.numbered.map(|(client, _)| client.attachment());
            **other != key && of == Some(numbered.attachment())
        };
        let older: Vec<u64> = volume.export.clients.iter().filter(is_older).copied().collect();
        for other in older {
            self.client_lost(other);
        }
        if begins {
            self.event(now, id, PrimaryEvent::BeginClient { client: numbered });
        }
    }

    /// Ends the connection of a client that may not begin; it tries again.
    pub(super) fn refuse_client(&mut self, id: VolumeId, refused: ClientId) {
        let Some(volume) = self.volumes.get(&id) else { return };
        for key in volume.export.clients.clone() {
            let Some(Slot::Client(client)) = self.sources.slots.get(&key) else { continue };
            if client.numbered == Some((refused, true)) {
                // At once: the flush behind its beginning must not be answered.
                self.client_lost(key);
            }
        }
    }

    /// Ends the connections of sharers.
    fn end_sharers(&mut self, id: VolumeId, ends: impl Fn(&Holder, &SharedUse) -> bool) {
        self.end_users(id, |user| {
            user.shares.as_ref().is_some_and(|shares| ends(&user.holder, shares))
        });
    }

    /// Ends the connections of those who opened a volume by a key that counts no more.
    pub(super) fn end_disowned(&mut self, openers: &Openers) {
        for id in self.volumes.keys().copied().collect::<Vec<_>>() {
            self.end_users(id, |user| user.shares.is_none() && !openers.admit(&user.holder));
        }
    }

    /// Ends the connections of those who are let in no more. Nothing is acknowledged to them from here on.
    pub(super) fn end_fenced(&mut self, fences: &Fences) {
        for id in self.volumes.keys().copied().collect::<Vec<_>>() {
            self.end_clients(id, |client| {
                let holder = client.user.as_ref().map(|user| &user.holder);
                let is_over = fences.cover(client.from, holder);
                if is_over {
                    // Answers that the kernel has not sent yet are not sent any more.
                    let at_once = Some(Duration::ZERO);
                    let _ = rustix::net::sockopt::set_socket_linger(client.socket(), at_once);
                }
                is_over
            });
        }
    }

    /// Ends the connections of all who are no sharers: they may have been told that they may write.
    pub(super) fn end_own(&mut self, id: VolumeId) {
        self.end_clients(id, |client| {
            client.user.as_ref().is_none_or(|user| user.shares.is_none())
        });
    }

    fn end_users(&mut self, id: VolumeId, ends: impl Fn(&User) -> bool) {
        self.end_clients(id, |client| client.user.as_ref().is_some_and(&ends));
    }

    fn end_clients(&mut self, id: VolumeId, ends: impl Fn(&Client) -> bool) {
        let Some(volume) = self.volumes.get(&id) else { return };
        let is_over = |key: &&u64| {
            let Some(Slot::Client(client)) = self.sources.slots.get(*key) else { return false };
            ends(client)
        };
        let over: Vec<u64> = volume.export.clients.iter().filter(is_over).copied().collect();
        for key in over {
            self.client_lost(key);
        }
    }

    fn settle(&mut self, client: Client) -> Option<u64> {
        let id = client.volume;
        let key = self.sources.insert(Slot::Client(Box::new(client)));
        let Some(Slot::Client(client)) = self.sources.slots.get(&key) else { return None };
        if let Err(error) = self.sources.reactor.register(client.socket(), key, Interest::READ) {
            tracing::warn!(volume = %id, %error, "cannot watch a client");
            self.sources.slots.remove(&key);
            return None;
        }
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.export.clients.push(key);
        }
        self.reports.metrics.clients.connected.inc();
        Some(key)
    }

    pub(super) fn read_client(&mut self, now: Time, key: u64) {
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) else { return };
        let id = client.volume;
        client.set_crowded(self.crowd.is_dense());
        let mut requests = std::mem::take(&mut self.requests);
        let turn = client.read(&mut requests);
        self.count(key);
        self.begin_numbering(now, key);
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
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) else { return };
        let id = client.volume;
        let mut requests = std::mem::take(&mut self.requests);
        client.take(&mut requests);
        self.count(key);
        self.begin_numbering(now, key);
        self.submit(now, id, key, &mut requests);
        self.requests = requests;
        self.client_dirty(key);
    }

    /// Counts a client's bytes; clients that wait for space are retried if there is some.
    fn count(&mut self, key: u64) {
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) else { return };
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
            if let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) {
                client.waits = false;
                self.client_dirty(key);
            }
        }
    }

    fn submit(&mut self, now: Time, id: VolumeId, key: u64, requests: &mut Vec<Request>) {
        if requests.is_empty() {
            return;
        }
        if let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) {
            client.has_requested = true;
        }
        if let Some(volume) = self.volumes.get_mut(&id) {
            for request in requests.drain(..) {
                let request = match &mut volume.export.throttle {
                    None => Some(request),
                    Some((throttle, _)) => throttle.admit(now, key, request),
                };
                if let Some(request) = request {
                    let clients = &self.reports.metrics.clients;
                    let kind = clients.requested(&request, &mut volume.export.counts);
                    volume.submit(now, key, kind, request, &mut self.actions);
                }
            }
            volume.export.set_timer(&mut self.sources);
        }
        requests.clear();
        self.touch(id);
        self.act(id);
    }

    /// Releases the requests that a volume's limits held back until now.
    pub(super) fn release(&mut self, now: Time, id: VolumeId) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        while let Some((throttle, _)) = &mut volume.export.throttle
            && let Some((client, request)) = throttle.next(now)
        {
            let clients = &self.reports.metrics.clients;
            let kind = clients.requested(&request, &mut volume.export.counts);
            volume.submit(now, client, kind, request, &mut self.actions);
        }
        volume.export.set_timer(&mut self.sources);
        self.touch(id);
        self.act(id);
    }

    fn client_dirty(&mut self, key: u64) {
        if let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key)
            && !client.dirty
        {
            client.dirty = true;
            self.unfinished.clients.push(key);
        }
    }

    pub(super) fn write_client(&mut self, now: Time, key: u64) {
        let Some(Slot::Client(client)) = self.sources.slots.get(&key) else { return };
        // A volume that opens has no lease yet: what its clients are told of it acknowledges nothing.
        if client.has_output() && client.has_requested && self.is_late(client.volume) {
            // It sends its requests again.
            tracing::info!("answers came too late, after a pause of this process");
            return self.client_lost(key);
        }
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) else { return };
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
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) else { return };
        client.set_crowded(crowded);
        if client.holds_input() {
            self.take_client(now, key);
        }
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) else { return };
        let interest = client.wanted();
        if crowded && !interest.read && !client.waits {
            client.waits = true;
            self.crowd.waiting.push(key);
        }
        if interest != client.interest {
            client.interest = interest;
            if let Err(error) = self.sources.reactor.modify(client.socket(), key, interest) {
                tracing::warn!(%error, "cannot watch a client");
            }
        }
    }

    /// Returns true if this process was stopped since it tested the leases of the answers that it is about
    /// to write, and the volume's is over: another target may have acknowledged other things meanwhile.
    fn is_late(&self, id: VolumeId) -> bool {
        let now = now();
        now.since(self.answers_at) >= ANSWERS_LATE
            && self.volumes.get(&id).is_some_and(|volume| !volume.target.holds_lease(now))
    }

    pub(super) fn reply(&mut self, id: VolumeId, mut reply: Reply) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let Some(origin) = volume.export.tokens.redeem(reply.token) else { return };
        if origin.client == feeding::CLIENT {
            volume.feeding.replied(origin.token, reply.result.is_ok());
            return self.touch(id);
        }
        let Some(Slot::Client(client)) = self.sources.slots.get_mut(&origin.client) else { return };
        reply.result = volume.sealing.open(origin.offset, reply.result);
        self.reports.metrics.clients.replied(
            &reply,
            origin.kind,
            self.round.began().since(origin.came),
            &mut volume.export.counts,
        );
        reply.token = origin.token;
        client.complete(reply);
        if !client.dirty {
            client.dirty = true;
            self.unfinished.clients.push(origin.client);
        }
    }

    pub(super) fn client_lost(&mut self, key: u64) {
        let Some(Slot::Client(client)) = self.sources.slots.remove(&key) else { return };
        self.sources.reactor.deregister(client.socket());
        self.sources.timers.set(key, None);
        self.crowd.held_bytes -= client.counted_bytes;
        self.wake_those_who_wait();
        if let Some(volume) = self.volumes.get_mut(&client.volume) {
            let left = volume.export.forget(key, &mut self.sources);
            if !left.is_empty() {
                self.event(self.now(), client.volume, PrimaryEvent::Abandon(left));
            }
            if let Some((numbered, true)) = client.numbered {
                let event = PrimaryEvent::ForgetClient { client: numbered };
                self.event(self.now(), client.volume, event);
            }
        }
        self.reports.metrics.clients.connected.dec();
    }
}
