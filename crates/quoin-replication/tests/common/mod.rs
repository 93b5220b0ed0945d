//! A whole volume in one thread: one target, pools with the in-memory store, messages delivered in
//! order, time that advances only when nothing else can happen. Hostile conditions are left to the
//! simulator; here the test controls each step.

#![allow(dead_code)] // Each of the tests uses a part of it.

mod bounded;
pub mod filled;

use crate::broken;
use std::collections::VecDeque;
use std::time::Duration;

pub use bounded::Bounded;
use bytes::Bytes;
use quoin_replication::primary::{
    ChangesAnswer, OnFull, OnQuorumLoss, Primary, PrimaryAction, PrimaryConfig, PrimaryEvent,
    PrimaryNote, ReadMode,
};
use quoin_replication::replica::store::{
    CloneSource, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreState, SyncTicket,
};
use quoin_replication::replica::{LEASE_MS, Replica, ReplicaAction, ReplicaEvent, ReplicaNote};
use quoin_store::model::ModelPool;
use quoin_store::{Cloned, ReplicaPool};
use quoin_types::block::{Operation, Payload, Reply, Request};
use quoin_types::membership::default_cf;
use quoin_types::message::{BadCopy, Content, FromReplica, ReadView, RoomGrant, Takes, ToReplica};
use quoin_types::*;

pub const BLOCKS: u64 = 1024;
const VOLUME: VolumeId = VolumeId(7);

/// Marks the connections that are bulk connections.
const BULK: u64 = 1 << 63;

fn bulk_connection(bulk: BulkKey) -> u64 {
    BULK | bulk.number
}

pub struct Host {
    pub pool: ModelPool,
    pub member: Member,
    pub replica: Option<Replica>,
    /// Set while the host is cut off: connections end and cannot be made.
    pub cut: bool,
    /// Limit of data blocks that still fit; `None`: no limit.
    pub room: Option<u64>,
    /// Reserve for full pools: blocks, and the epoch before which entries may use them.
    pub reserve: (u64, Epoch),
    /// Set while its disk refuses to read the log and the map.
    pub unreadable: bool,
    /// Set while syncs that its disk was asked for do not end.
    pub holds_syncs: bool,
    /// Reads received, and the time that passes before one is answered.
    pub reads: u64,
    /// Frames that carried only the target's own state.
    pub pings: u64,
    pub read_takes: Duration,
    /// Pulls of increments received.
    pub pulls: u64,
}

/// Outcome of a compare-and-swap that a target requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapFate {
    /// The swap succeeds, and the answer is lost.
    LandsUnheard,
    /// The request never arrives.
    Lost,
    Refused,
}

enum Event {
    ToTarget(PrimaryEvent),
    ToReplica(usize, ReplicaEvent),
}

pub struct Cluster {
    pub now: Time,
    pub hosts: Vec<Host>,
    pub target: Primary,
    pub membership: Membership,
    pub epoch: Epoch,
    pub replies: Vec<Reply>,
    pub notes: Vec<PrimaryNote>,
    /// Invariants that replicas refused to break.
    pub refused: Vec<&'static str>,
    pub changes: Vec<(u64, ChangesAnswer)>,
    /// No sync ends while it is set.
    pub hold_syncs: bool,
    pub stopped: bool,
    /// Host that is cut off when the target requests a change of the record.
    pub cut_at_swap: Option<usize>,
    /// Outcomes of changes of the record, the next one first; further changes succeed.
    pub swaps: VecDeque<SwapFate>,
    pub desired: Desired,
    /// Open bulk connections, each with its host.
    bulks: Vec<(BulkKey, usize)>,
    /// Set while bulk connections cannot be made.
    pub bulk_cut: bool,
    /// Selects messages on bulk connections that are lost, together with the connection.
    pub lose_bulk: fn(&ToReplica) -> bool,
    sessions: Vec<(SessionKey, usize)>,
    queue: VecDeque<Event>,
    target_timer: Option<Time>,
    replica_timers: Vec<Option<Time>>,
    next_token: u64,
    targets: u64,
}

pub fn config() -> PrimaryConfig {
    PrimaryConfig {
        volume: VOLUME,
        volume_blocks: BLOCKS,
        logical_block_size: 512,
        durability: Durability::Cache,
        on_quorum_loss: OnQuorumLoss::Wait,
        on_full: OnFull::Wait,
        reads: ReadMode::Leased,
        read_only: false,
        lease_ms: LEASE_MS,
        open_grace_ms: 300,
        drop_after_ms: 3000,
        window_bytes: 256 << 10,
        sync_bytes: 1 << 20,
        sync_after_ms: 1000,
        local: None,
    }
}

impl Host {
    fn new(member: Member, membership: &Membership, quorum: bool) -> Self {
        let mut pool = ModelPool::new();
        let identity = ReplicaIdentity {
            volume: VOLUME,
            replica: member.id,
            guid: member.guid,
            volume_spec: Bytes::new(),
        };
        let meta = ReplicaMeta {
            membership: membership.clone(),
            quorum,
            closed_continuous: true,
            ..ReplicaMeta::default()
        };
        pool.create(identity, meta, BLOCKS).unwrap();
        Host {
            pool,
            member,
            replica: None,
            cut: false,
            room: None,
            reserve: (0, Epoch::ZERO),
            unreadable: false,
            holds_syncs: false,
            reads: 0,
            pulls: 0,
            pings: 0,
            read_takes: Duration::ZERO,
        }
    }

    fn start(&mut self, now: Time) {
        let cookie = self.pool.cookie();
        let store = self.pool.replica(self.member.guid).unwrap();
        self.replica = Some(Replica::new(now, cookie, &store));
    }

    pub fn meta(&mut self) -> ReplicaMeta {
        self.pool.replica(self.member.guid).unwrap().meta().clone()
    }

    pub fn last_view(&mut self) -> View {
        let state = self.pool.replica(self.member.guid).unwrap().state();
        state.last_view.unwrap().1
    }

    /// Marks the replica damaged, like a scrub or a start that found rot.
    pub fn damage(&mut self) {
        let mut store = self.pool.replica(self.member.guid).unwrap();
        let meta = ReplicaMeta { damaged: true, ..store.meta().clone() };
        store.put_meta(meta).unwrap();
    }

    /// Damages one block of the live view.
    pub fn spoil(&mut self, lba: u64) {
        assert!(self.pool.replica(self.member.guid).unwrap().spoil(lba));
    }

    /// Replaces the content of a block without changing its version.
    pub fn forge(&mut self, lba: u64, fill: u8) {
        assert!(self.pool.replica(self.member.guid).unwrap().forge(lba, fill));
    }

    /// Returns whether the live copy of a block is bad, and its version.
    pub fn look(&mut self, lba: u64) -> (bool, Lsn) {
        let mut slots = Vec::new();
        let mut store = self.pool.replica(self.member.guid).unwrap();
        store.read(ReadView::Live, lba, 1, true, &mut slots).unwrap();
        (slots[0].content == Content::Bad, slots[0].version)
    }

    pub fn state(&mut self) -> StoreState {
        self.pool.replica(self.member.guid).unwrap().state()
    }

    /// Number of snapshots, boundaries of rebuilds included.
    pub fn snapshots(&mut self) -> usize {
        self.pool.replica(self.member.guid).unwrap().snapshots().len()
    }

    pub fn position(&mut self) -> Position {
        self.state().position
    }
}

impl Cluster {
    pub fn new(rf: u8, config: PrimaryConfig) -> Self {
        broken::break_a_rule();
        let known: Vec<Member> = (1..=u128::from(rf))
            .map(|i| Member { id: ReplicaId(i), guid: ReplicaGuid(100 + i) })
            .collect();
        let membership = Membership {
            version: 1,
            rf,
            cf: default_cf(rf),
            drf: rf,
            known: known.clone(),
            retired: Vec::new(),
            formed: true,
        };
        let mut hosts: Vec<Host> = known.iter().map(|m| Host::new(*m, &membership, true)).collect();
        let now = Time::from_millis(1_000_000);
        for host in &mut hosts {
            host.start(now);
        }
        let timers = vec![None; hosts.len()];
        Self {
            now,
            hosts,
            target: Primary::new(now, config, 1),
            membership,
            epoch: Epoch(0),
            replies: Vec::new(),
            notes: Vec::new(),
            refused: Vec::new(),
            changes: Vec::new(),
            hold_syncs: false,
            stopped: false,
            cut_at_swap: None,
            swaps: VecDeque::new(),
            desired: Desired { drf: rf, ..Desired::default() },
            bulks: Vec::new(),
            bulk_cut: false,
            lose_bulk: |_| false,
            sessions: Vec::new(),
            queue: VecDeque::new(),
            target_timer: Some(now),
            replica_timers: timers,
            next_token: 1,
            targets: 1,
        }
    }

    /// Has the volume begin with a snapshot of another one, which holds these bytes in these blocks:
    /// before anything of it was opened.
    pub fn begin_with(&mut self, content: &[(u64, u8)]) {
        let now = self.now;
        for host in &mut self.hosts {
            host.pool = ModelPool::new();
            let guid = ReplicaGuid(900);
            let identity = ReplicaIdentity { volume: VolumeId(9), guid, ..Default::default() };
            host.pool.create(identity, ReplicaMeta::default(), BLOCKS).unwrap();
            let mut source = host.pool.replica(guid).unwrap();
            let id = SnapshotId(0x5a);
            let (mut chain, mut lsn) = (Chain::default(), Lsn::ZERO);
            let mut append = |kind, lba, blocks, data| {
                lsn = lsn.next();
                let position = Position { epoch: Epoch(3), lsn };
                let entry = Entry::after(chain, position, kind, lba, blocks, data, false);
                chain = entry.chain;
                source.append(&[entry.into()]).unwrap();
            };
            for (lba, fill) in content {
                append(EntryKind::Write, *lba, 1, Bytes::from(vec![*fill; BLOCK_SIZE]));
            }
            append(EntryKind::Snapshot { id, hidden: false }, 0, 0, Bytes::new());
            let identity = ReplicaIdentity {
                volume: VOLUME,
                replica: host.member.id,
                guid: host.member.guid,
                volume_spec: Bytes::new(),
            };
            let meta = ReplicaMeta {
                membership: self.membership.clone(),
                quorum: true,
                ..ReplicaMeta::default()
            };
            let source = CloneSource { volume: VolumeId(9), snapshot: id };
            let made = host.pool.create_clone(identity, meta, BLOCKS, &source);
            assert_eq!(made, Ok(Cloned::Made));
            host.start(now);
        }
    }

    /// Ends the target process and starts another one.
    pub fn replace_target(&mut self, config: PrimaryConfig) {
        for (bulk, host) in std::mem::take(&mut self.bulks) {
            self.bulk_ends_at(host, bulk);
        }
        for (session, host) in std::mem::take(&mut self.sessions) {
            let event = ReplicaEvent::Disconnected { connection: session.nonce };
            self.queue.push_back(Event::ToReplica(host, event));
        }
        self.targets += 1;
        self.queue.retain(|e| matches!(e, Event::ToReplica(..)));
        self.target = Primary::new(self.now, config, self.targets);
        self.target_timer = Some(self.now);
        self.stopped = false;
        self.want(|_| {});
    }

    pub fn crash_replica(&mut self, host: usize) {
        self.hosts[host].replica = None;
        self.hosts[host].pool.restart();
        self.replica_timers[host] = None;
        self.disconnect(host);
    }

    pub fn start_replica(&mut self, host: usize) {
        let now = self.now;
        self.hosts[host].start(now);
    }

    fn bulk_ends_at(&mut self, host: usize, bulk: BulkKey) {
        let event = ReplicaEvent::Disconnected { connection: bulk_connection(bulk) };
        self.queue.push_back(Event::ToReplica(host, event));
    }

    /// Closes the bulk connections of this host; its session continues. Returns how many there
    /// were.
    pub fn disconnect_bulk(&mut self, host: usize) -> usize {
        let (gone, kept) = self.bulks.iter().partition(|(_, h)| *h == host);
        self.bulks = kept;
        let gone: Vec<(BulkKey, usize)> = gone;
        for (bulk, _) in &gone {
            self.queue.push_back(Event::ToTarget(PrimaryEvent::BulkDisconnected { bulk: *bulk }));
            self.bulk_ends_at(host, *bulk);
        }
        gone.len()
    }

    /// The sessions that are open with this host.
    pub fn sessions_with(&self, host: usize) -> Vec<SessionKey> {
        self.sessions.iter().filter(|(_, h)| *h == host).map(|(s, _)| *s).collect()
    }

    pub fn bulks_with(&self, host: usize) -> usize {
        self.bulks.iter().filter(|(_, h)| *h == host).count()
    }

    pub fn disconnect(&mut self, host: usize) {
        self.disconnect_bulk(host);
        let (gone, kept) = self.sessions.iter().partition(|(_, h)| *h == host);
        self.sessions = kept;
        let gone: Vec<(SessionKey, usize)> = gone;
        for (session, _) in gone {
            self.queue.push_back(Event::ToTarget(PrimaryEvent::Disconnected { session }));
            let event = ReplicaEvent::Disconnected { connection: session.nonce };
            self.queue.push_back(Event::ToReplica(host, event));
        }
    }

    /// Changes what the control plane desires.
    pub fn want(&mut self, change: impl FnOnce(&mut Desired)) {
        change(&mut self.desired);
        self.event(PrimaryEvent::Desired(self.desired.clone()));
    }

    /// Adds a replica as its pool creates it in phase Recreate, named in the records.
    pub fn add_candidate(&mut self, member: Member) -> usize {
        self.add_newcomer(member, false)
    }

    pub fn add_newcomer(&mut self, member: Member, beside: bool) -> usize {
        let mut host = Host::new(member, &self.membership, false);
        host.start(self.now);
        self.hosts.push(host);
        self.replica_timers.push(None);
        self.want(|desired| desired.newcomers.push(Newcomer { member, beside }));
        self.hosts.len() - 1
    }

    pub fn submit(&mut self, operation: Operation) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        let request = Request { token, operation, origin: None };
        self.queue.push_back(Event::ToTarget(PrimaryEvent::Submit(request)));
        token
    }

    /// Delivers a bad copy that a pool's scrub found.
    pub fn found_bad(&mut self, host: usize, lba: u64, version: Lsn) {
        let event = ReplicaEvent::BadCopy(BadCopy { lba, blocks: 1, version, snapshot: None });
        self.queue.push_back(Event::ToReplica(host, event));
    }

    /// The same of a block that a snapshot shows.
    pub fn found_bad_in(&mut self, host: usize, snapshot: SnapshotId, lba: u64, version: Lsn) {
        let copy = BadCopy { lba, blocks: 1, version, snapshot: Some(snapshot) };
        self.queue.push_back(Event::ToReplica(host, ReplicaEvent::BadCopy(copy)));
    }

    /// Lets pools report whether they are short of room.
    pub fn say_short(&mut self, hosts: std::ops::Range<usize>, short: bool) {
        let takes = if short { Takes::Holes } else { Takes::Writes };
        self.say_room(hosts, RoomGrant { takes, ..RoomGrant::UNBOUNDED });
    }

    /// Lets pools grant room.
    pub fn say_room(&mut self, hosts: std::ops::Range<usize>, room: RoomGrant) {
        for host in hosts {
            self.queue.push_back(Event::ToReplica(host, ReplicaEvent::Room(room)));
        }
    }

    pub fn event(&mut self, event: PrimaryEvent) {
        self.queue.push_back(Event::ToTarget(event));
    }

    /// Handles everything that needs no time.
    pub fn settle(&mut self) {
        for _ in 0..1_000_000 {
            if let Some(event) = self.queue.pop_front() {
                self.handle(event);
            } else if !self.sync_all() && !self.fire_timers() {
                return;
            }
        }
        panic!("the cluster never comes to rest");
    }

    pub fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        loop {
            self.settle();
            let next = self.replica_timers.iter().chain([&self.target_timer]).flatten().min();
            match next {
                Some(at) if *at <= end => self.now = self.now.max(*at),
                _ => break,
            }
        }
        self.now = end;
        self.settle();
    }

    /// Runs until the request is answered, for 30 s of simulated time at most.
    pub fn answer(&mut self, token: u64) -> Option<Reply> {
        for _ in 0..300 {
            self.settle();
            if let Some(i) = self.replies.iter().position(|r| r.token == token) {
                return Some(self.replies.remove(i));
            }
            self.run(Duration::from_millis(100));
        }
        None
    }

    pub fn wait_for_version(&mut self, version: u64) {
        for _ in 0..600 {
            if self.membership.version == version {
                return;
            }
            self.run(Duration::from_millis(100));
        }
        panic!("never version {version}: {:?} {:?}", self.membership, self.target.status());
    }

    pub fn do_ok(&mut self, operation: Operation) {
        let token = self.submit(operation.clone());
        let reply = self.answer(token).unwrap_or_else(|| panic!("no answer to {operation:?}"));
        assert!(reply.result.is_ok(), "{operation:?}: {:?}", reply.result);
    }

    pub fn write(&mut self, block: u64, fill: u8) {
        self.do_ok(Operation::Write {
            offset: block * 4096,
            data: Bytes::from(vec![fill; 4096]),
            fua: false,
        });
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        let token = self.submit(Operation::Read { offset, length });
        match self.answer(token).expect("a read is answered").result {
            Ok(Payload::Data(chunks)) => chunks.concat(),
            other => panic!("read: {other:?}"),
        }
    }

    pub fn wait_in_sync(&mut self, members: usize) {
        for _ in 0..300 {
            self.run(Duration::from_millis(100));
            let status = self.target.status();
            let in_sync = status
                .replicas
                .iter()
                .filter(|r| r.standing == quoin_replication::primary::ReplicaStanding::InSync)
                .count();
            if status.serving && in_sync == members {
                return;
            }
        }
        panic!("never {members} in sync: {:?}", self.target.status());
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::ToTarget(event) => {
                let mut actions = Vec::new();
                self.target.on(self.now, event, &mut actions);
                self.target.flush(self.now, &mut actions);
                self.target_actions(actions);
            }
            Event::ToReplica(host, event) => {
                let state = &mut self.hosts[host];
                match &event {
                    ReplicaEvent::Message { message: ToReplica::Read { .. }, .. } => {
                        state.reads += 1;
                        self.now = self.now + state.read_takes;
                    }
                    ReplicaEvent::Message { message: ToReplica::Pull { .. }, .. } => {
                        state.pulls += 1;
                    }
                    ReplicaEvent::Message { message: ToReplica::Ping { .. }, .. } => {
                        state.pings += 1;
                    }
                    _ => {}
                }
                let Some(replica) = &mut state.replica else { return };
                let inner = state.pool.replica(state.member.guid).unwrap();
                let unreadable = state.unreadable;
                let (room, reserve) = (&mut state.room, &mut state.reserve);
                let mut store = Bounded { inner, room, reserve, unreadable, ring_full: false };
                let mut actions = Vec::new();
                replica.on(self.now, event, &mut store, &mut actions);
                replica.flush(&mut actions);
                self.replica_actions(host, actions);
            }
        }
    }

    fn sync_all(&mut self) -> bool {
        let mut any = false;
        for host in 0..self.hosts.len() {
            if self.hold_syncs || self.hosts[host].holds_syncs {
                continue;
            }
            let wanted: Option<SyncTicket> = self.hosts[host].pool.sync_wanted();
            if let Some(ticket) = wanted {
                self.hosts[host].pool.sync_finished(ticket, Ok(())).expect("a sync");
                let event = ReplicaEvent::Synced { ticket, result: Ok(()) };
                self.queue.push_back(Event::ToReplica(host, event));
                any = true;
            }
        }
        any
    }

    fn fire_timers(&mut self) -> bool {
        let mut any = false;
        if self.target_timer.is_some_and(|t| t <= self.now) {
            self.target_timer = None;
            self.queue.push_back(Event::ToTarget(PrimaryEvent::Timer));
            any = true;
        }
        for host in 0..self.hosts.len() {
            if self.replica_timers[host].is_some_and(|t| t <= self.now) {
                self.replica_timers[host] = None;
                self.queue.push_back(Event::ToReplica(host, ReplicaEvent::Timer));
                any = true;
            }
        }
        any
    }

    fn target_actions(&mut self, actions: Vec<PrimaryAction>) {
        for action in actions {
            match action {
                PrimaryAction::AcquireEpoch { incarnation, at_least } => {
                    self.epoch = Epoch(self.epoch.0.max(at_least.0) + 1);
                    self.event(PrimaryEvent::Granted {
                        incarnation,
                        epoch: self.epoch,
                        membership: self.membership.clone(),
                    });
                }
                PrimaryAction::SwapMembership { epoch, version, next } => {
                    if let Some(host) = self.cut_at_swap.take() {
                        self.hosts[host].cut = true;
                        self.disconnect(host);
                    }
                    let fate = self.swaps.pop_front();
                    let lands = !matches!(fate, Some(SwapFate::Lost | SwapFate::Refused));
                    if lands && epoch == self.epoch && version == self.membership.version {
                        self.membership = next;
                    }
                    let heard = !matches!(fate, Some(SwapFate::LandsUnheard | SwapFate::Lost));
                    let membership = heard.then(|| self.membership.clone());
                    self.event(PrimaryEvent::Swapped { version, membership });
                }
                PrimaryAction::Connect { member, session } => {
                    let host = self.hosts.iter().position(|h| h.member == member);
                    match host.filter(|h| !self.hosts[*h].cut && self.hosts[*h].replica.is_some()) {
                        Some(host) => {
                            self.sessions.push((session, host));
                            self.event(PrimaryEvent::Connected { session });
                        }
                        None => self.event(PrimaryEvent::Disconnected { session }),
                    }
                }
                PrimaryAction::ConnectBulk { member, bulk } => {
                    let open = self.sessions.iter().find(|(s, _)| *s == bulk.session);
                    match open.map(|(_, host)| *host).filter(|_| !self.bulk_cut) {
                        Some(host) => {
                            assert_eq!(self.hosts[host].member, member);
                            self.bulks.push((bulk, host));
                            self.event(PrimaryEvent::BulkConnected { bulk });
                        }
                        None => self.event(PrimaryEvent::BulkDisconnected { bulk }),
                    }
                }
                PrimaryAction::DisconnectBulk { bulk } => self.close_bulks(|of| *of == bulk),
                PrimaryAction::SendBulk { bulk, message } => {
                    let to = self.bulks.iter().find(|(b, _)| *b == bulk).map(|(_, h)| *h);
                    match to {
                        Some(host) if (self.lose_bulk)(&message) => {
                            self.lose_bulk = |_| false;
                            self.disconnect_bulk(host);
                        }
                        Some(host) => {
                            let (connection, session) = (bulk_connection(bulk), bulk.session);
                            let event = ReplicaEvent::Message { connection, session, message };
                            self.queue.push_back(Event::ToReplica(host, event));
                        }
                        None => {}
                    }
                }
                PrimaryAction::Disconnect { session } => {
                    self.close_bulks(|of| of.session == session);
                    if let Some(i) = self.sessions.iter().position(|(s, _)| *s == session) {
                        let (_, host) = self.sessions.remove(i);
                        let event = ReplicaEvent::Disconnected { connection: session.nonce };
                        self.queue.push_back(Event::ToReplica(host, event));
                    }
                }
                PrimaryAction::Send { session, message } => {
                    if let Some((_, host)) = self.sessions.iter().find(|(s, _)| *s == session) {
                        let connection = session.nonce;
                        let event = ReplicaEvent::Message { connection, session, message };
                        self.queue.push_back(Event::ToReplica(*host, event));
                    }
                }
                PrimaryAction::Reply(reply) => self.replies.push(reply),
                PrimaryAction::Changes { token, answer } => self.changes.push((token, answer)),
                PrimaryAction::Timer { at } => self.target_timer = at,
                PrimaryAction::Note(note) => self.notes.push(note),
                PrimaryAction::Stopped => self.stopped = true,
            }
        }
    }

    /// Closes bulk connections from the target's side: messages already sent still arrive.
    fn close_bulks(&mut self, which: impl Fn(&BulkKey) -> bool) {
        let (gone, kept) = self.bulks.iter().partition(|(bulk, _)| which(bulk));
        self.bulks = kept;
        let gone: Vec<(BulkKey, usize)> = gone;
        for (bulk, host) in gone {
            self.bulk_ends_at(host, bulk);
        }
    }

    fn replica_actions(&mut self, host: usize, actions: Vec<ReplicaAction>) {
        for action in actions {
            match action {
                ReplicaAction::Send { connection, message, .. } if connection & BULK != 0 => {
                    let open = self.bulks.iter().find(|(b, _)| bulk_connection(*b) == connection);
                    if let Some((bulk, _)) = open {
                        self.event(PrimaryEvent::BulkMessage { bulk: *bulk, message });
                    }
                }
                ReplicaAction::Disconnect { connection } if connection & BULK != 0 => {
                    let is_it = |(b, _): &(BulkKey, usize)| bulk_connection(*b) == connection;
                    if let Some(i) = self.bulks.iter().position(is_it) {
                        let (bulk, _) = self.bulks.remove(i);
                        self.event(PrimaryEvent::BulkDisconnected { bulk });
                    }
                }
                ReplicaAction::Send { connection: _, session, message } => {
                    let open = self.sessions.iter().any(|(s, h)| *s == session && *h == host);
                    if open {
                        self.forward(session, message);
                    }
                }
                ReplicaAction::Disconnect { connection } => {
                    let at =
                        self.sessions.iter().position(|(s, h)| s.nonce == connection && *h == host);
                    if let Some(i) = at {
                        let (session, _) = self.sessions.remove(i);
                        self.event(PrimaryEvent::Disconnected { session });
                    }
                }
                ReplicaAction::Timer { at } => self.replica_timers[host] = at,
                ReplicaAction::Note(ReplicaNote::InvariantRefused(what)) => {
                    self.refused.push(what);
                }
                ReplicaAction::Note(_) => {}
            }
        }
    }

    fn forward(&mut self, session: SessionKey, message: FromReplica) {
        self.event(PrimaryEvent::Message { session, message });
    }
}

impl Cluster {
    pub fn target_has_timer(&self) -> bool {
        self.target_timer.is_some()
    }
}
