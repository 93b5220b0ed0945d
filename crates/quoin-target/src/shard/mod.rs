//! One thread of the target: an epoll loop that owns whole volumes, with their clients' sockets and
//! their connections to replicas.
//!
//! A round is: wait, take inputs of other threads, read every readable socket, `flush` each touched
//! volume's state machine (there entries become messages), write each touched socket once: replicas
//! first, replies after. No lock, no hand-over and no timer per request; an idle volume costs
//! nothing.

mod clients;
mod feeding;
mod links;
mod memory;
mod sealing;
mod snapshots;
mod sources;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use bytes::Bytes;
use quoin_encryption::DataKey;
use quoin_reactor::descriptors::Shortage;
use quoin_reactor::{Ready, Waker, now};
use quoin_replication::primary::{
    ChangesAnswer, LiveOptions, PointOutcome, Primary, PrimaryAction, PrimaryConfig, PrimaryEvent,
    PrimaryNote, PrimaryStatus, RevertOutcome, VerifyOrder,
};
use quoin_replication::target_host::memory::Memory;
use quoin_replication::target_host::orders::Orders;
use quoin_replication::target_host::round::Round;
pub use quoin_replication::target_host::throttle::Limits;
use quoin_replication::target_host::throttle::Throttle;
use quoin_telemetry::notices::{Notices, Severity};
use quoin_types::block::{DeviceInfo, Request};
use quoin_types::ids::{Epoch, Incarnation, PointId, SessionKey, SnapshotId};
use quoin_types::membership::{Desired, Member, Membership};
use quoin_types::{BLOCK_SIZE, Time, VolumeId};
use quoin_wire::Connection;

use crate::assignment::{FeedOrder, Sharer};
use crate::commands::{Answer, Command};
use crate::dial::{Dialler, Dials, Undialled};
use crate::feed::FeedInput;
use crate::fences::Fences;
use crate::history::{Pull, Pulls};
use crate::metrics::Metrics;
use crate::nbd_listener::NewClient;
use crate::standing::Openers;
use crate::volume_metrics::Counts;
use clients::Export;
use feeding::Feeding;
use links::{LinkName, Links};
pub use quoin_cluster::mirror::feeding::FeedProgress;
use sealing::Sealing;
use snapshots::Wished;
use sources::{Slot, Sources};

/// From so many requests under way on, waits do not poll. Measured with reads of 4 KiB at depth 32: a target uses
/// 3.7 instead of 6.5 µs each, and serves 5 % more.
const POLLED_REQUESTS: usize = 8;

/// Inputs of other threads to a shard.
pub enum Input {
    Open(Box<VolumeSetup>),
    /// A client opened this volume over TCP.
    Client(VolumeId, Box<NewClient>),
    Update(Box<VolumeUpdate>),
    /// Members whose certificates open all volumes; the connections of others end.
    Openers(Openers),
    /// Clients that are let in no more, whose connections end; the sender is told once they have ended.
    Fences(Fences, tokio::sync::oneshot::Sender<()>),
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
    /// The controller wants something done once.
    Command {
        volume: VolumeId,
        command: Command,
    },
    /// A stream of the history socket wants a part.
    Pull(VolumeId, Pull),
    /// The stream that asked for this part does not wait for it any more.
    PullGivenUp(VolumeId, u64),
    /// A stream of the history socket into a copy.
    Feed(VolumeId, FeedInput),
    Status(tokio::sync::oneshot::Sender<Vec<Told>>),
    /// Keep the leases of idle volumes too, or no more.
    KeepLeases(bool),
    /// Close all volumes, then end.
    Shutdown,
}

/// State of a volume.
pub struct Told {
    pub volume: VolumeId,
    pub status: PrimaryStatus,
    /// Progress of the transfer that it takes.
    pub feed: Option<FeedProgress>,
    pub counts: Counts,
}

/// Outcome of a request for an epoch.
pub enum Grant {
    Given {
        epoch: Epoch,
        membership: Membership,
        bytes: Bytes,
        /// Options of the record that granted it; `None`: they were not sent.
        options: Option<LiveOptions>,
    },
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
    /// Version of the options in `config`.
    pub options_version: u64,
    /// `None`: no client is accepted.
    pub socket: Option<PathBuf>,
    pub is_encrypted: bool,
    /// Key of an encrypted volume; `None`: it is not here yet.
    pub key: Option<DataKey>,
    pub replicas: Vec<ReplicaPlace>,
    pub desired: Desired,
    pub verify: Option<VerifyOrder>,
    /// As in [`Assigned`](crate::assignment::Assigned).
    pub client: u64,
    /// Other nodes that use it.
    pub sharers: Vec<Sharer>,
    /// As in [`Assigned`](crate::assignment::Assigned).
    pub feed: Option<FeedOrder>,
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
    /// As in [`VolumeSetup`].
    pub key: Option<DataKey>,
    pub read_only: bool,
    pub since_epoch: u64,
    pub size_bytes: u64,
    pub limits: Limits,
    pub options: LiveOptions,
    pub replicas: Vec<ReplicaPlace>,
    pub desired: Desired,
    pub verify: Option<VerifyOrder>,
    pub client: u64,
    pub sharers: Vec<Sharer>,
    pub feed: Option<FeedOrder>,
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
    /// The outcome of a command.
    Answered {
        volume: VolumeId,
        answer: Answer,
    },
    /// The outcome of a step of a point.
    Stepped {
        volume: VolumeId,
        point: PointId,
        outcome: PointOutcome,
    },
    /// The outcome of a Revert.
    Reverted {
        volume: VolumeId,
        attempt: SnapshotId,
        outcome: RevertOutcome,
    },
    /// The answer to a pull.
    Pulled {
        volume: VolumeId,
        token: u64,
        answer: ChangesAnswer,
    },
    /// The volume is not served here any more; true: because a newer epoch fenced it.
    Stopped {
        volume: VolumeId,
        fenced: bool,
    },
}

/// A served volume: its state machine, and what the shard keeps around it.
struct Volume {
    target: Primary,
    export: Export,
    links: Links,
    grant: Granted,
    orders: Orders,
    stage: Stage,
    wished: Wished,
    pulls: Pulls,
    feeding: Feeding,
    sealing: Sealing,
    timer_key: u64,
    touched: bool,
    /// Bytes of entries that it kept at its shard's last count.
    retained_bytes: usize,
    /// Requests without a reply at its shard's last count.
    counted_requests: usize,
}

/// The controller's last grant of an epoch.
#[derive(Default)]
struct Granted {
    /// Incarnation that asked for an epoch last.
    incarnation: Incarnation,
    epoch: Epoch,
    /// Signed grant, which pools ask for.
    bytes: Bytes,
}

impl Granted {
    /// Keeps a grant if it answers the newest request; returns whether it does.
    fn given(&mut self, incarnation: Incarnation, epoch: Epoch, bytes: Bytes) -> bool {
        let is_newest = self.incarnation == incarnation;
        if is_newest {
            (self.epoch, self.bytes) = (epoch, bytes);
        }
        is_newest
    }

    /// Keeps the grant of the same epoch in its newly signed form.
    fn renewed(&mut self, epoch: Epoch, bytes: Bytes) {
        if self.epoch == epoch {
            self.bytes = bytes;
        }
    }
}

/// How far a volume has come between its opening and its removal.
#[derive(Default)]
struct Stage {
    /// True once this target has served IO.
    served: bool,
    /// True if a newer epoch has ended it.
    fenced: bool,
    stopped: bool,
}

impl Stage {
    fn note(&mut self, note: &PrimaryNote) {
        self.fenced |= matches!(note, PrimaryNote::Fenced { .. });
        self.served |= matches!(note, PrimaryNote::Serving { .. });
    }
}

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

/// Recipients of a shard's reports.
struct Reports {
    asks: tokio::sync::mpsc::UnboundedSender<Ask>,
    notices: Notices,
    metrics: Metrics,
}

impl Reports {
    /// Sends a request to the control thread, which outlives the shards.
    fn ask(&self, ask: Ask) {
        let _ = self.asks.send(ask);
    }

    fn cannot_serve(&self, id: VolumeId, error: String) {
        self.notices.push(Severity::Error, id, "", "CannotServe", error);
    }
}

/// Work that a round leaves to its end.
#[derive(Default)]
struct Unfinished {
    /// Volumes whose state machine is to be flushed.
    volumes: Vec<VolumeId>,
    /// Sockets with output, by their keys.
    links: Vec<u64>,
    clients: Vec<u64>,
}

pub struct Shard {
    inputs: Receiver<Input>,
    reports: Reports,
    dialler: Dialler,
    volumes: BTreeMap<VolumeId, Volume>,
    sources: Sources,
    unfinished: Unfinished,
    crowd: clients::Crowd,
    shortage: Shortage,
    memory: Memory,
    actions: Vec<PrimaryAction>,
    requests: Vec<Request>,
    stopping: bool,
    /// Leases of idle volumes are kept too.
    keeps_leases: bool,
    /// Requests of all volumes without a reply.
    open_requests: usize,
    /// Latencies are counted from the begin of a round to that of another, which costs no clock.
    round: Round,
    /// Time at which the leases of the answers that are written now were tested.
    answers_at: Time,
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
        let sources = Sources::new()?;
        let (sender, inputs) = channel();
        let dialler = dials.of_shard(sender.clone(), sources.reactor.waker());
        let handle = ShardHandle { inputs: sender, waker: sources.reactor.waker() };
        let shard = Shard {
            inputs,
            reports: Reports { asks, notices, metrics },
            dialler,
            volumes: BTreeMap::new(),
            sources,
            unfinished: Unfinished::default(),
            crowd: clients::Crowd::default(),
            shortage: Shortage::default(),
            memory: Memory::new(catch_up_bytes),
            actions: Vec::new(),
            requests: Vec::new(),
            stopping: false,
            keeps_leases: false,
            open_requests: 0,
            round: Round::begin(now()),
            answers_at: now(),
        };
        Ok((shard, handle))
    }

    /// Returns what other threads have told it since, for tests that run no rounds.
    #[cfg(test)]
    pub(crate) fn told(&self) -> Vec<Input> {
        self.inputs.try_iter().collect()
    }

    /// Serves until it is stopped and all volumes are closed.
    pub fn run(mut self) -> std::io::Result<()> {
        let mut ready = Vec::new();
        loop {
            let timeout = self.sources.timers.until_next(now());
            self.serve_round(timeout, &mut ready)?;
            if self.stopping && self.volumes.is_empty() {
                return Ok(());
            }
        }
    }

    /// Waits for one round's events, at most for `timeout`, and does what they ask for.
    fn serve_round(
        &mut self,
        timeout: Option<Duration>,
        ready: &mut Vec<Ready>,
    ) -> std::io::Result<()> {
        let woken = self.sources.reactor.wait(timeout, ready)?;
        let now = now();
        self.round = Round::begin(now);
        // A client that is gone goes first: its unread requests must not be taken after those of
        // the connection that replaces it.
        for ready in ready.iter().filter(|r| r.broken) {
            self.broken(self.now(), ready.key);
        }
        if woken {
            while let Ok(input) = self.inputs.try_recv() {
                self.input(self.now(), input);
            }
        }
        let copying = |ready: &&Ready| sources::is_bulk(ready.key);
        for ready in ready.iter().filter(|r| !copying(r)) {
            self.ready(self.now(), *ready);
        }
        for ready in ready.iter().filter(copying) {
            self.ready(self.now(), *ready);
        }
        while let Some(key) = self.sources.timers.pop(now) {
            self.timer(key);
        }
        self.finish_round();
        Ok(())
    }

    fn timer(&mut self, key: u64) {
        match self.sources.slots.get(&key) {
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
            Some(Slot::Link(_)) | None => {}
        }
    }

    /// The time of what this round does now.
    fn now(&self) -> Time {
        self.round.at(now())
    }

    fn input(&mut self, now: Time, input: Input) {
        match input {
            Input::Open(setup) => self.open(now, *setup),
            Input::Client(volume, client) => self.adopt(now, volume, *client),
            Input::Update(update) => self.update(now, *update),
            Input::Openers(openers) => self.end_disowned(&openers),
            Input::Fences(fences, done) => {
                self.end_fenced(&fences);
                // The answer is dropped at the end of the process.
                let _ = done.send(());
            }
            Input::Close(volume) => self.event(now, volume, PrimaryEvent::Shutdown),
            Input::Dialled { volume, session, bulk, pool, outcome } => {
                self.dialled(now, volume, LinkName { session, bulk }, pool, outcome);
            }
            Input::Granted(volume, incarnation, grant) => {
                let event = match grant {
                    Grant::Given { epoch, membership, bytes, options } => {
                        if let Some(volume) = self.volumes.get_mut(&volume)
                            && volume.grant.given(incarnation, epoch, bytes)
                            && let Some(options) = options
                        {
                            let event = PrimaryEvent::Options(options);
                            volume.target.on(now, event, &mut self.actions);
                        }
                        PrimaryEvent::Granted { incarnation, epoch, membership }
                    }
                    Grant::NotOwner => PrimaryEvent::NotOwner { incarnation },
                    Grant::Failed => PrimaryEvent::GrantFailed { incarnation },
                };
                self.event(now, volume, event);
            }
            Input::Regranted(volume, epoch, bytes) => {
                if let Some(volume) = self.volumes.get_mut(&volume) {
                    volume.grant.renewed(epoch, bytes);
                }
            }
            Input::Swapped { volume, version, membership } => {
                self.event(now, volume, PrimaryEvent::Swapped { version, membership });
            }
            Input::Command { volume, command } => self.command(now, volume, command),
            Input::Pull(volume, pull) => self.pull(now, volume, pull),
            Input::PullGivenUp(volume, token) => {
                if let Some(volume) = self.volumes.get_mut(&volume) {
                    volume.pulls.give_up(token);
                }
            }
            Input::Feed(volume, input) => self.feed(volume, input),
            Input::Status(answer) => {
                let told = |(id, volume): (&VolumeId, &Volume)| Told {
                    volume: *id,
                    status: volume.target.status(),
                    feed: volume.feeding.progress(),
                    counts: volume.export.counts.clone(),
                };
                let all = self.volumes.iter().map(told).collect();
                // The caller may have stopped waiting.
                let _ = answer.send(all);
            }
            Input::KeepLeases(keeps) => {
                self.keeps_leases = keeps;
                for volume in self.volumes.keys().copied().collect::<Vec<_>>() {
                    self.event(now, volume, PrimaryEvent::KeepLease(keeps));
                }
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
        let VolumeSetup { replicas, desired, verify, seed, options_version, .. } = setup;
        let VolumeSetup { is_encrypted, key, client, sharers, feed, .. } = setup;
        let id = config.volume;
        if self.stopping || self.volumes.contains_key(&id) {
            return;
        }
        let listener = match socket.map(|path| self.listen(id, &path)).transpose() {
            Ok(listener) => listener,
            Err(error) => {
                self.reports.cannot_serve(id, error);
                return self.reports.ask(Ask::Stopped { volume: id, fenced: false });
            }
        };
        let timer_key = self.sources.insert(Slot::Timer(id));
        let throttle = Throttle::new(now, limits);
        let throttle = throttle.map(|it| (it, self.sources.insert(Slot::Throttle(id))));
        let options = LiveOptions::of(&config, options_version);
        let feeding = Feeding::new(feed, config.read_only);
        let mut target = Primary::new(now, config, seed);
        let retain = PrimaryEvent::Retain { bytes_max: self.memory.limit_bytes() };
        target.on(now, retain, &mut self.actions);
        target.on(now, PrimaryEvent::Options(options), &mut self.actions);
        target.on(now, PrimaryEvent::KeepLease(self.keeps_leases), &mut self.actions);
        let mut export = Export::new(info, since_epoch, listener, throttle);
        (export.client, export.sharers, export.version) = (client, sharers, options_version);
        target.on(now, export.grant(), &mut self.actions);
        let volume = Volume {
            target,
            export,
            links: Links::new(replicas),
            grant: Granted::default(),
            orders: Orders::new(options),
            stage: Stage::default(),
            wished: Wished::default(),
            pulls: Pulls::default(),
            feeding,
            sealing: Sealing::new(is_encrypted, key.as_ref()),
            timer_key,
            touched: false,
            retained_bytes: 0,
            counted_requests: 0,
        };
        self.volumes.insert(id, volume);
        self.reports.metrics.volumes.inc();
        self.order(now, id, desired, verify);
        self.touch(id);
    }

    fn update(&mut self, now: Time, update: VolumeUpdate) {
        let VolumeUpdate { volume: id, socket, read_only, size_bytes, .. } = update;
        let writers_leave =
            self.volumes.get(&id).is_some_and(|v| read_only && !v.export.info.read_only);
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.links.places = update.replicas;
            // The setting is for later clients; one that is there keeps what it was told.
            volume.export.info.read_only = read_only;
            volume.export.since_epoch = update.since_epoch;
            volume.export.limit(now, id, update.limits, &mut self.sources);
            if update.key.is_some() {
                volume.sealing.update(update.key.as_ref());
            }
        }
        if writers_leave {
            self.end_own(id);
        }
        self.let_in(now, id, update.client, update.sharers, update.options.version);
        self.release(now, id);
        self.change_options(now, id, update.options);
        self.order(now, id, update.desired, update.verify);
        self.order_feed(id, update.feed, read_only);
        self.serve(id, socket.as_deref());
        if update.key.is_none()
            && let Some(volume) = self.volumes.get_mut(&id)
        {
            // Its clients, which had the key's use, are gone.
            volume.sealing.update(None);
        }
        if let Some(volume) = self.volumes.get_mut(&id)
            && volume.export.grow(size_bytes, &mut self.sources)
        {
            let blocks = size_bytes.div_ceil(BLOCK_SIZE as u64);
            self.event(now, id, PrimaryEvent::Resize { blocks });
        }
    }

    fn change_options(&mut self, now: Time, id: VolumeId, options: LiveOptions) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if let Some(event) = volume.orders.change_options(options) {
            self.event(now, id, event);
            // The controller waits for the report that they are in force.
            self.reports.ask(Ask::Changed);
        }
    }

    /// Passes the controller's orders on, as far as they are new.
    fn order(&mut self, now: Time, id: VolumeId, desired: Desired, verify: Option<VerifyOrder>) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let new = [volume.orders.desire(desired), volume.orders.verify(verify)];
        for event in new.into_iter().flatten() {
            self.event(now, id, event);
        }
    }

    fn event(&mut self, now: Time, id: VolumeId, event: PrimaryEvent) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if matches!(event, PrimaryEvent::Revert { .. }) && volume.export.has_clients() {
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
            self.unfinished.volumes.push(id);
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
                PrimaryAction::Changes { token, answer } => {
                    self.reports.metrics.pulled.inc_by(snapshots::data_bytes(&answer));
                    let Some(volume) = self.volumes.get_mut(&id) else { continue };
                    if let Some(answer) = volume.pulls.answer(token, answer) {
                        self.reports.ask(Ask::Pulled { volume: id, token, answer });
                    }
                }
                PrimaryAction::Timer { at } => {
                    if let Some(volume) = self.volumes.get(&id) {
                        self.sources.timers.set(volume.timer_key, at);
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
                        volume.grant.incarnation = incarnation;
                    }
                    self.reports.ask(Ask::Epoch { volume: id, incarnation, at_least });
                }
                PrimaryAction::SwapMembership { epoch, version, next } => {
                    let Some(volume) = self.volumes.get(&id) else { continue };
                    let incarnation = volume.grant.incarnation;
                    self.reports.ask(Ask::Swap { volume: id, incarnation, epoch, version, next });
                }
                PrimaryAction::Note(note) => self.note(id, note),
                PrimaryAction::Stopped => {
                    if let Some(volume) = self.volumes.get_mut(&id) {
                        volume.stage.stopped = true;
                    }
                }
            }
        }
        // No action gives the state machine an event at once, so no action was added meanwhile.
        self.actions = actions;
    }

    fn broken(&mut self, now: Time, key: u64) {
        match self.sources.slots.get(&key) {
            Some(Slot::Client(_)) => self.client_lost(key),
            Some(Slot::Link(_)) => self.read_link(now, key),
            _ => {}
        }
    }

    fn ready(&mut self, now: Time, ready: Ready) {
        match self.sources.slots.get(&ready.key) {
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
        while !self.unfinished.volumes.is_empty() || !self.unfinished.clients.is_empty() {
            let now = self.now();
            self.answers_at = now;
            while let Some(id) = self.unfinished.volumes.pop() {
                if let Some(volume) = self.volumes.get_mut(&id) {
                    volume.touched = false;
                    if volume.feed_on(now, &mut self.actions) {
                        self.reports.ask(Ask::Changed);
                    }
                    volume.target.flush(now, &mut self.actions);
                    if !volume.target.is_serving() {
                        volume.pulls.end();
                    }
                    self.count_retained(id);
                    self.act(id);
                }
                self.count_requests(id);
                self.remove_stopped(id);
            }
            self.share_memory(now);
            let mut copying = Vec::new();
            while let Some(key) = self.unfinished.links.pop() {
                if sources::is_bulk(key) {
                    copying.push(key);
                } else if let Some(Slot::Link(link)) = self.sources.slots.get_mut(&key) {
                    link.dirty = false;
                    self.write_link(now, key);
                }
            }
            while let Some(key) = self.unfinished.clients.pop() {
                if let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) {
                    client.dirty = false;
                    self.write_client(now, key);
                }
            }
            for key in copying {
                if let Some(Slot::Link(link)) = self.sources.slots.get_mut(&key) {
                    link.dirty = false;
                    self.write_link(now, key);
                }
            }
        }
    }

    /// Waits poll only while few requests are under way.
    fn count_requests(&mut self, id: VolumeId) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let open = volume.export.tokens.open();
        let before = std::mem::replace(&mut volume.counted_requests, open);
        self.open_requests = self.open_requests + open - before;
        self.sources.reactor.set_polls(self.open_requests < POLLED_REQUESTS);
    }

    /// Removes a stopped volume, with its clients and its socket.
    fn remove_stopped(&mut self, id: VolumeId) {
        if !self.volumes.get(&id).is_some_and(|v| v.stage.stopped) {
            return;
        }
        let Some(mut volume) = self.volumes.remove(&id) else { return };
        self.sources.remove_timer(volume.timer_key);
        for key in volume.export.close(&mut self.sources) {
            if let Some(Slot::Client(client)) = self.sources.slots.get_mut(&key) {
                let _ = client.flush();
            }
            self.client_lost(key);
        }
        volume.links.close(|_| true, &mut self.sources);
        self.dialler.give_up_all(id);
        self.reports.metrics.volumes.dec();
        self.count_kept(volume.retained_bytes, 0);
        self.open_requests -= volume.counted_requests;
        self.reports.ask(Ask::Stopped { volume: id, fenced: volume.stage.fenced });
    }

    fn note(&mut self, id: VolumeId, note: PrimaryNote) {
        let served = self.volumes.get_mut(&id).is_some_and(|volume| {
            volume.stage.note(&note);
            volume.stage.served
        });
        self.note_feed(id, &note);
        if let PrimaryNote::Snapshot { id: snapshot, outcome } = note {
            self.answer_snapshot(id, snapshot, outcome);
        }
        if let PrimaryNote::Point { point, outcome } = note {
            // A volume that is held for a moment changes nothing that is reported.
            return self.reports.ask(Ask::Stepped { volume: id, point, outcome });
        }
        if let PrimaryNote::Reverted { attempt, outcome } = note {
            self.reports.ask(Ask::Reverted { volume: id, attempt, outcome });
        }
        if let PrimaryNote::ClientRefused { client } = note {
            self.refuse_client(id, client);
        }
        if let PrimaryNote::Rebuilt { moved_bytes, .. } = note {
            self.reports.metrics.moved.inc_by(moved_bytes);
        }
        crate::notes::tell(&self.reports.notices, id, note, served);
        self.reports.ask(Ask::Changed);
    }
}

#[cfg(test)]
mod tests;
