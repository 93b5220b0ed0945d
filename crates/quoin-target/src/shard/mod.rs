//! One thread of the target: an epoll loop that owns whole volumes, with their clients' sockets and
//! their connections to replicas.
//!
//! A round is: wait, take inputs of other threads, read every readable socket, `flush` each touched
//! volume's state machine (there entries become messages), write each touched socket once: replicas
//! first, replies after. No lock, no hand-over and no timer per request; an idle volume costs
//! nothing.

mod clients;
mod links;
mod memory;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

use bytes::Bytes;
use quoin_reactor::descriptors::Shortage;
use quoin_reactor::{Reactor, Ready, Timers, Waker, now};
use quoin_replication::primary::{
    Primary, PrimaryAction, PrimaryConfig, PrimaryEvent, PrimaryNote, PrimaryStatus, VerifyOrder,
};
use quoin_replication::target_host::memory::Memory;
use quoin_replication::target_host::round::Round;
pub use quoin_replication::target_host::throttle::Limits;
use quoin_replication::target_host::throttle::Throttle;
use quoin_telemetry::notices::{Notices, Severity};
use quoin_types::block::{DeviceInfo, Request};
use quoin_types::ids::{Epoch, Incarnation, SessionKey};
use quoin_types::key_map::KeyMap;
use quoin_types::membership::{Desired, Member, Membership};
use quoin_types::{BLOCK_SIZE, Time, VolumeId};
use quoin_wire::Connection;

use crate::client::Client;
use crate::dial::{Dialler, Dials, Undialled};
use crate::listen::Socket;
use crate::metrics::Metrics;
use crate::nbd_listener::NewClient;
use crate::tokens::Tokens;
use links::{Link, LinkName};

/// Inputs of other threads to a shard.
pub enum Input {
    Open(Box<VolumeSetup>),
    /// A client opened this volume over TCP.
    Client(VolumeId, Box<NewClient>),
    Update(Box<VolumeUpdate>),
    /// Drain, sync, close.
    Close(VolumeId),
    Dialled {
        volume: VolumeId,
        session: SessionKey,
        /// Number of the bulk connection; `None`: the session's own connection.
        bulk: Option<u64>,
        pool: String,
        outcome: Result<Box<Connection>, Undialled>,
    },
    Granted(VolumeId, Incarnation, Grant),
    /// The grant signed anew, for pools that come back later.
    Regranted(VolumeId, Epoch, Bytes),
    Swapped {
        volume: VolumeId,
        version: u64,
        membership: Option<Membership>,
    },
    Status(tokio::sync::oneshot::Sender<Vec<(VolumeId, PrimaryStatus)>>),
    /// Close all volumes, then end.
    Shutdown,
}

/// Outcome of a request for an epoch.
pub enum Grant {
    Given { epoch: Epoch, membership: Membership, bytes: Bytes },
    NotOwner,
    Failed,
}

/// A volume to serve.
pub struct VolumeSetup {
    pub config: PrimaryConfig,
    pub info: DeviceInfo,
    /// The first epoch of this node's use of the volume; 0: unknown.
    pub since_epoch: u64,
    pub limits: Limits,
    /// `None`: no client is accepted.
    pub socket: Option<PathBuf>,
    pub replicas: Vec<ReplicaPlace>,
    pub desired: Desired,
    pub verify: Option<VerifyOrder>,
    /// Seed of incarnations: random, never repeated.
    pub seed: u64,
}

/// Location of a replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaPlace {
    pub member: Member,
    pub pool: String,
    /// host:port
    pub address: String,
}

/// Settings that may change while a volume is served.
pub struct VolumeUpdate {
    pub volume: VolumeId,
    pub socket: Option<PathBuf>,
    pub read_only: bool,
    pub since_epoch: u64,
    pub size_bytes: u64,
    pub replicas: Vec<ReplicaPlace>,
    pub desired: Desired,
    pub verify: Option<VerifyOrder>,
}

/// Requests of a shard to the control thread.
#[derive(Debug)]
pub enum Ask {
    Epoch {
        volume: VolumeId,
        incarnation: Incarnation,
        at_least: Epoch,
    },
    Swap {
        volume: VolumeId,
        incarnation: Incarnation,
        epoch: Epoch,
        version: u64,
        next: Membership,
    },
    /// A change that is worth a report soon.
    Changed,
    /// The volume is not served here any more; true: because a newer epoch fenced it.
    Stopped {
        volume: VolumeId,
        fenced: bool,
    },
}

struct Volume {
    target: Primary,
    info: DeviceInfo,
    /// As in [`VolumeSetup`].
    since_epoch: u64,
    /// Listener and its reactor key; `None` while the volume accepts no clients.
    listener: Option<(Socket, u64)>,
    timer_key: u64,
    /// Limits, and the key of the timer that releases waiting requests.
    throttle: Option<(Throttle, u64)>,
    clients: Vec<u64>,
    links: Vec<(LinkName, u64)>,
    places: Vec<ReplicaPlace>,
    desired: Desired,
    verify: Option<VerifyOrder>,
    tokens: Tokens,
    grant: Bytes,
    incarnation: Incarnation,
    /// Epoch of `grant`.
    epoch: Epoch,
    fenced: bool,
    /// True once this target has served IO.
    served: bool,
    stopped: bool,
    touched: bool,
    /// Bytes of entries that it kept at its shard's last count.
    retained_bytes: usize,
    /// Pools that could not be reached, so that each is reported once and not at each attempt.
    unreachable: Vec<String>,
}

enum Slot {
    Listener(VolumeId),
    Timer(VolumeId),
    Throttle(VolumeId),
    Client(Box<Client>),
    Link(Box<Link>),
}

/// Mark in the keys of bulk connections: their messages wait for all other work of a round.
const BULK: u64 = 1 << 62;

type Slots = KeyMap<Slot>;

/// Handle to a running shard.
#[derive(Clone)]
pub struct ShardHandle {
    inputs: Sender<Input>,
    waker: Waker,
}

impl ShardHandle {
    pub fn send(&self, input: Input) {
        // The send fails only after the shard ended.
        let _ = self.inputs.send(input);
        self.waker.wake();
    }
}

pub struct Shard {
    reactor: Reactor,
    inputs: Receiver<Input>,
    asks: tokio::sync::mpsc::UnboundedSender<Ask>,
    notices: Notices,
    metrics: Metrics,
    dialler: Dialler,
    volumes: BTreeMap<VolumeId, Volume>,
    slots: Slots,
    timers: Timers,
    next_key: u64,
    touched: Vec<VolumeId>,
    dirty_links: Vec<u64>,
    dirty_clients: Vec<u64>,
    crowd: clients::Crowd,
    shortage: Shortage,
    memory: Memory,
    actions: Vec<PrimaryAction>,
    requests: Vec<Request>,
    stopping: bool,
    /// Latencies are counted from the begin of a round to that of another, which costs no clock.
    round: Round,
}

impl Shard {
    /// Makes a shard. `catch_up_bytes`: memory that all its volumes may use for replicas that are
    /// away or behind.
    pub fn new(
        dials: &Dials,
        catch_up_bytes: usize,
        asks: tokio::sync::mpsc::UnboundedSender<Ask>,
        notices: Notices,
        metrics: Metrics,
    ) -> std::io::Result<(Self, ShardHandle)> {
        let reactor = Reactor::new()?;
        let (sender, inputs) = channel();
        let dialler = dials.of_shard(sender.clone(), reactor.waker());
        let handle = ShardHandle { inputs: sender, waker: reactor.waker() };
        let shard = Shard {
            reactor,
            inputs,
            asks,
            notices,
            metrics,
            dialler,
            volumes: BTreeMap::new(),
            slots: Slots::default(),
            timers: Timers::default(),
            next_key: 0,
            touched: Vec::new(),
            dirty_links: Vec::new(),
            dirty_clients: Vec::new(),
            crowd: clients::Crowd::default(),
            shortage: Shortage::default(),
            memory: Memory::new(catch_up_bytes),
            actions: Vec::new(),
            requests: Vec::new(),
            stopping: false,
            round: Round::begin(now()),
        };
        Ok((shard, handle))
    }

    /// Serves until it is stopped and all volumes are closed.
    pub fn run(mut self) -> std::io::Result<()> {
        let mut ready = Vec::new();
        loop {
            let timeout = self.timers.until_next(now());
            let woken = self.reactor.wait(timeout, &mut ready)?;
            let now = now();
            self.round = Round::begin(now);
            // A client that is gone goes first: its unread requests must not be taken after
            // those of the connection that replaces it.
            for ready in ready.iter().filter(|r| r.broken) {
                self.broken(self.now(), ready.key);
            }
            if woken {
                while let Ok(input) = self.inputs.try_recv() {
                    self.input(self.now(), input);
                }
            }
            let copying = |ready: &&Ready| ready.key & BULK != 0;
            for ready in ready.iter().filter(|r| !copying(r)) {
                self.ready(self.now(), *ready);
            }
            for ready in ready.iter().filter(copying) {
                self.ready(self.now(), *ready);
            }
            while let Some(key) = self.timers.pop(now) {
                match self.slots.get(&key) {
                    Some(Slot::Timer(volume)) => {
                        let volume = *volume;
                        self.event(self.now(), volume, PrimaryEvent::Timer);
                    }
                    Some(Slot::Throttle(volume)) => {
                        let volume = *volume;
                        self.release(self.now(), volume);
                    }
                    // The client's certificate has expired.
                    Some(Slot::Client(_)) => self.client_lost(key),
                    Some(Slot::Listener(volume)) => {
                        let volume = *volume;
                        self.listen_again(volume);
                    }
                    _ => {}
                }
            }
            self.finish_round();
            if self.stopping && self.volumes.is_empty() {
                return Ok(());
            }
        }
    }

    /// The time of what this round does now.
    fn now(&self) -> Time {
        self.round.at(now())
    }

    fn insert(&mut self, slot: Slot) -> u64 {
        let key = self.key(false);
        self.slots.insert(key, slot);
        key
    }

    fn key(&mut self, bulk: bool) -> u64 {
        self.next_key += 1;
        if bulk { self.next_key | BULK } else { self.next_key }
    }

    fn input(&mut self, now: Time, input: Input) {
        match input {
            Input::Open(setup) => self.open(now, *setup),
            Input::Client(volume, client) => self.adopt(now, volume, *client),
            Input::Update(update) => self.update(now, *update),
            Input::Close(volume) => self.event(now, volume, PrimaryEvent::Shutdown),
            Input::Dialled { volume, session, bulk, pool, outcome } => {
                self.dialled(now, volume, LinkName { session, bulk }, pool, outcome);
            }
            Input::Granted(volume, incarnation, grant) => {
                let event = match grant {
                    Grant::Given { epoch, membership, bytes } => {
                        if let Some(v) = self.volumes.get_mut(&volume)
                            && v.incarnation == incarnation
                        {
                            v.grant = bytes;
                            v.epoch = epoch;
                        }
                        PrimaryEvent::Granted { incarnation, epoch, membership }
                    }
                    Grant::NotOwner => PrimaryEvent::NotOwner { incarnation },
                    Grant::Failed => PrimaryEvent::GrantFailed { incarnation },
                };
                self.event(now, volume, event);
            }
            Input::Regranted(volume, epoch, bytes) => {
                if let Some(volume) = self.volumes.get_mut(&volume)
                    && volume.epoch == epoch
                {
                    volume.grant = bytes;
                }
            }
            Input::Swapped { volume, version, membership } => {
                self.event(now, volume, PrimaryEvent::Swapped { version, membership });
            }
            Input::Status(answer) => {
                let all = self.volumes.iter().map(|(id, v)| (*id, v.target.status())).collect();
                // The caller may have stopped waiting.
                let _ = answer.send(all);
            }
            Input::Shutdown => {
                self.stopping = true;
                for volume in self.volumes.keys().copied().collect::<Vec<_>>() {
                    self.event(now, volume, PrimaryEvent::Shutdown);
                }
            }
        }
    }

    fn open(&mut self, now: Time, setup: VolumeSetup) {
        let VolumeSetup { config, info, since_epoch, limits, socket, .. } = setup;
        let VolumeSetup { replicas, desired, verify, seed, .. } = setup;
        let id = config.volume;
        if self.stopping || self.volumes.contains_key(&id) {
            return;
        }
        let listener = match socket.map(|path| self.listen(id, &path)).transpose() {
            Ok(listener) => listener,
            Err(error) => {
                self.notices.push(Severity::Error, id, "", "CannotServe", error);
                let _ = self.asks.send(Ask::Stopped { volume: id, fenced: false });
                return;
            }
        };
        let timer_key = self.insert(Slot::Timer(id));
        let throttle = Throttle::new(now, limits);
        let throttle = throttle.map(|throttle| (throttle, self.insert(Slot::Throttle(id))));
        let mut target = Primary::new(now, config, seed);
        let retain = PrimaryEvent::Retain { bytes_max: self.memory.limit_bytes() };
        target.on(now, retain, &mut self.actions);
        let volume = Volume {
            target,
            info,
            since_epoch,
            listener,
            timer_key,
            throttle,
            clients: Vec::new(),
            links: Vec::new(),
            places: Vec::new(),
            desired: Desired::default(),
            verify: None,
            tokens: Tokens::default(),
            grant: Bytes::new(),
            incarnation: Incarnation::default(),
            epoch: Epoch::ZERO,
            fenced: false,
            served: false,
            stopped: false,
            touched: false,
            retained_bytes: 0,
            unreachable: Vec::new(),
        };
        self.volumes.insert(id, volume);
        self.metrics.volumes.inc();
        self.places(id, replicas);
        self.desire(now, id, desired);
        self.verify(now, id, verify);
        self.touch(id);
    }

    fn update(&mut self, now: Time, update: VolumeUpdate) {
        let VolumeUpdate { volume: id, socket, read_only, size_bytes, .. } = update;
        self.places(id, update.replicas);
        self.desire(now, id, update.desired);
        self.verify(now, id, update.verify);
        if let Some(volume) = self.volumes.get_mut(&id) {
            // The setting is for later clients: it changes only while there are none.
            volume.info.read_only = read_only;
            volume.since_epoch = update.since_epoch;
        }
        self.serve(id, socket.as_deref());
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if size_bytes > volume.info.size_bytes {
            volume.info.size_bytes = size_bytes;
            for key in &volume.clients {
                if let Some(Slot::Client(client)) = self.slots.get_mut(key) {
                    client.device_changed(&volume.info);
                }
            }
            let blocks = size_bytes.div_ceil(BLOCK_SIZE as u64);
            self.event(now, id, PrimaryEvent::Resize { blocks });
        }
    }

    fn places(&mut self, id: VolumeId, places: Vec<ReplicaPlace>) {
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.places = places;
        }
    }

    fn desire(&mut self, now: Time, id: VolumeId, desired: Desired) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if volume.desired != desired {
            volume.desired = desired.clone();
            self.event(now, id, PrimaryEvent::Desired(desired));
        }
    }

    fn verify(&mut self, now: Time, id: VolumeId, order: Option<VerifyOrder>) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if volume.verify != order {
            volume.verify = order;
            self.event(now, id, PrimaryEvent::Verify(order));
        }
    }

    fn event(&mut self, now: Time, id: VolumeId, event: PrimaryEvent) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if matches!(event, PrimaryEvent::Revert { .. }) && !volume.clients.is_empty() {
            // A client would see other content than it wrote. The wish is said again.
            return;
        }
        volume.target.on(now, event, &mut self.actions);
        self.touch(id);
        self.act(id);
    }

    fn touch(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get_mut(&id)
            && !volume.touched
        {
            volume.touched = true;
            self.touched.push(id);
        }
    }

    fn act(&mut self, id: VolumeId) {
        if self.actions.is_empty() {
            return;
        }
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                PrimaryAction::Send { session, message } => {
                    self.send(id, LinkName::own(session), &message);
                }
                PrimaryAction::SendBulk { bulk, message } => {
                    self.send(id, LinkName::bulk(bulk), &message);
                }
                PrimaryAction::Reply(reply) => self.reply(id, reply),
                // Nobody asks this driver for changes.
                PrimaryAction::Changes { .. } => {}
                PrimaryAction::Timer { at } => {
                    if let Some(volume) = self.volumes.get(&id) {
                        self.timers.set(volume.timer_key, at);
                    }
                }
                PrimaryAction::Connect { member, session } => {
                    self.connect(id, member, LinkName::own(session));
                }
                PrimaryAction::ConnectBulk { member, bulk } => {
                    self.connect(id, member, LinkName::bulk(bulk));
                }
                PrimaryAction::Disconnect { session } => {
                    self.disconnect(id, |of| of.session == session);
                }
                PrimaryAction::DisconnectBulk { bulk } => {
                    self.disconnect(id, |of| of == LinkName::bulk(bulk));
                }
                PrimaryAction::AcquireEpoch { incarnation, at_least } => {
                    if let Some(volume) = self.volumes.get_mut(&id) {
                        volume.incarnation = incarnation;
                    }
                    // The control thread outlives the shards.
                    let _ = self.asks.send(Ask::Epoch { volume: id, incarnation, at_least });
                }
                PrimaryAction::SwapMembership { epoch, version, next } => {
                    let Some(volume) = self.volumes.get(&id) else { continue };
                    let incarnation = volume.incarnation;
                    let _ =
                        self.asks.send(Ask::Swap { volume: id, incarnation, epoch, version, next });
                }
                PrimaryAction::Note(note) => self.note(id, note),
                PrimaryAction::Stopped => {
                    if let Some(volume) = self.volumes.get_mut(&id) {
                        volume.stopped = true;
                    }
                }
            }
        }
        // No action gives the state machine an event at once, so no action was added meanwhile.
        self.actions = actions;
    }

    fn broken(&mut self, now: Time, key: u64) {
        match self.slots.get(&key) {
            Some(Slot::Client(_)) => self.client_lost(key),
            Some(Slot::Link(_)) => self.read_link(now, key),
            _ => {}
        }
    }

    fn ready(&mut self, now: Time, ready: Ready) {
        match self.slots.get(&ready.key) {
            Some(Slot::Client(_)) => {
                if ready.writable {
                    self.write_client(now, ready.key);
                }
                if ready.readable {
                    self.read_client(now, ready.key);
                }
            }
            Some(Slot::Link(_)) => {
                if ready.writable {
                    self.write_link(now, ready.key);
                }
                if ready.readable {
                    self.read_link(now, ready.key);
                }
            }
            Some(Slot::Listener(volume)) => {
                let volume = *volume;
                self.accept(volume);
            }
            Some(Slot::Timer(_) | Slot::Throttle(_)) | None => {}
        }
    }

    fn finish_round(&mut self) {
        // Writing may take further requests, which touch their volume again.
        while !self.touched.is_empty() || !self.dirty_clients.is_empty() {
            let now = self.now();
            while let Some(id) = self.touched.pop() {
                if let Some(volume) = self.volumes.get_mut(&id) {
                    volume.touched = false;
                    volume.target.flush(now, &mut self.actions);
                    self.count_retained(id);
                    self.act(id);
                }
                self.remove_stopped(id);
            }
            self.share_memory(now);
            let mut copying = Vec::new();
            while let Some(key) = self.dirty_links.pop() {
                if key & BULK != 0 {
                    copying.push(key);
                } else if let Some(Slot::Link(link)) = self.slots.get_mut(&key) {
                    link.dirty = false;
                    self.write_link(now, key);
                }
            }
            while let Some(key) = self.dirty_clients.pop() {
                if let Some(Slot::Client(client)) = self.slots.get_mut(&key) {
                    client.dirty = false;
                    self.write_client(now, key);
                }
            }
            for key in copying {
                if let Some(Slot::Link(link)) = self.slots.get_mut(&key) {
                    link.dirty = false;
                    self.write_link(now, key);
                }
            }
        }
    }

    /// Removes a stopped volume, with its clients and its socket.
    fn remove_stopped(&mut self, id: VolumeId) {
        if !self.volumes.get(&id).is_some_and(|v| v.stopped) {
            return;
        }
        let Some(volume) = self.volumes.remove(&id) else { return };
        if let Some((socket, key)) = volume.listener {
            self.reactor.deregister(&socket.listener);
            self.slots.remove(&key);
        }
        self.timers.set(volume.timer_key, None);
        self.slots.remove(&volume.timer_key);
        if let Some((_, key)) = volume.throttle {
            self.timers.set(key, None);
            self.slots.remove(&key);
        }
        for key in volume.clients {
            if let Some(Slot::Client(client)) = self.slots.get_mut(&key) {
                let _ = client.flush();
            }
            self.client_lost(key);
        }
        for (_, key) in volume.links {
            if let Some(Slot::Link(mut link)) = self.slots.remove(&key) {
                let _ = link.connection.flush();
                self.reactor.deregister(link.connection.socket());
            }
        }
        self.dialler.give_up_all(id);
        self.metrics.volumes.dec();
        self.count_kept(volume.retained_bytes, 0);
        let _ = self.asks.send(Ask::Stopped { volume: id, fenced: volume.fenced });
    }

    fn note(&mut self, id: VolumeId, note: PrimaryNote) {
        if let PrimaryNote::Fenced { .. } = note
            && let Some(volume) = self.volumes.get_mut(&id)
        {
            volume.fenced = true;
        }
        let served = match self.volumes.get_mut(&id) {
            Some(volume) => {
                volume.served |= matches!(note, PrimaryNote::Serving { .. });
                volume.served
            }
            None => false,
        };
        if let PrimaryNote::Rebuilt { moved_bytes, .. } = note {
            self.metrics.moved.inc_by(moved_bytes);
        }
        crate::notes::tell(&self.notices, id, note, served);
        let _ = self.asks.send(Ask::Changed);
    }
}
