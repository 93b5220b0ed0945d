//! Several volumes on pools that they share and fill, with snapshots that are deleted, trims, moves,
//! pools that are joined, and processes that are killed: when the last snapshot is deleted, everything
//! gets through, whichever pool ran full for whichever volume before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use quoin_replication::primary::{
    Primary, PrimaryAction, PrimaryConfig, PrimaryEvent, PrimaryNote, ReplicaStanding,
    SnapshotOutcome, SnapshotWish,
};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, SyncTicket};
use quoin_replication::replica::{Replica, ReplicaAction, ReplicaEvent};
use quoin_store::{Disk, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};
use quoin_types::block::{Operation, Request};
use quoin_types::message::{FromReplica, RoomGrant, Takes, ToReplica};
use quoin_types::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::config;

const VOLUMES: usize = 3;
const POOLS: usize = 3;
/// All volumes fit into a pool without their snapshots, and far from it with them.
const VOLUME_BLOCKS: u64 = 800;
const UNIT_BLOCKS: u32 = 64;
const POOL_BYTES: u64 = 18 << 20;
const WRITE_BLOCKS: u64 = 16;
/// Requests of a volume that are under way.
const DEPTH: usize = 64;
const SNAPSHOTS_MAX: usize = 3;
/// Rounds in which everything happens at once.
const ROUNDS: u64 = 12_000;
/// Simulated time in which everything gets through after the last snapshot is deleted.
const LIVENESS: Duration = Duration::from_secs(300);
const BULK: u64 = 1 << 63;

struct Shelf {
    disk: MemoryDisk,
    /// `None`: its process was killed.
    pool: Option<Pool<MemoryDisk>>,
    replicas: BTreeMap<ReplicaGuid, Replica>,
    timers: BTreeMap<ReplicaGuid, Time>,
    told: RoomGrant,
    sync: Option<(Time, SyncTicket)>,
    back_at: Time,
}

impl Shelf {
    fn new(id: u128) -> Self {
        let disk = MemoryDisk::new(POOL_BYTES);
        let mut format = FormatOptions::new(PoolId(id));
        format.unit_blocks = UNIT_BLOCKS;
        Pool::format(&disk, &format).unwrap();
        Shelf {
            disk,
            pool: None,
            replicas: BTreeMap::new(),
            timers: BTreeMap::new(),
            told: RoomGrant::UNBOUNDED,
            sync: None,
            back_at: Time::ZERO,
        }
    }

    fn start(&mut self, now: Time) {
        let options = PoolOptions {
            checkpoint_bytes: 512 << 10,
            log_keep_bytes: 128 << 10,
            ..PoolOptions::default()
        };
        self.pool = Some(Pool::open(self.disk.clone(), options).unwrap());
        self.told = RoomGrant::UNBOUNDED;
        for guid in self.pool().replicas() {
            self.hold(now, guid);
        }
    }

    fn pool(&mut self) -> &mut Pool<MemoryDisk> {
        self.pool.as_mut().unwrap()
    }

    fn hold(&mut self, now: Time, guid: ReplicaGuid) {
        let pool = self.pool.as_mut().unwrap();
        let (cookie, room) = (pool.cookie(), pool.room(self.told));
        let mut store = pool.replica(guid).unwrap();
        let mut replica = Replica::new(now, cookie, &store);
        replica.on(now, ReplicaEvent::Room(room), &mut store, &mut Vec::new());
        self.replicas.insert(guid, replica);
    }

    fn create(&mut self, now: Time, volume: usize, member: Member, membership: &Membership) {
        let identity = ReplicaIdentity {
            volume: VolumeId(volume as u128 + 1),
            replica: member.id,
            guid: member.guid,
            volume_spec: Bytes::new(),
        };
        let meta = ReplicaMeta {
            membership: membership.clone(),
            quorum: membership.contains(member),
            closed_continuous: true,
            ..ReplicaMeta::default()
        };
        self.pool().create(identity, meta, VOLUME_BLOCKS).unwrap();
        self.pool().request_sync();
        self.hold(now, member.guid);
    }
}

/// A connection of a target with a replica.
struct Link {
    session: SessionKey,
    bulk: Option<BulkKey>,
    shelf: usize,
    guid: ReplicaGuid,
    to_pool: VecDeque<ToReplica>,
    to_target: VecDeque<FromReplica>,
}

struct Volume {
    target: Primary,
    timer: Option<Time>,
    membership: Membership,
    /// Where each replica is.
    places: BTreeMap<ReplicaGuid, usize>,
    desired: Desired,
    epoch: Epoch,
    targets: u64,
    open: BTreeSet<u64>,
    snapshots: BTreeMap<SnapshotId, SnapshotWish>,
    made: BTreeSet<SnapshotId>,
}

struct Crowd {
    now: Time,
    random: ChaCha8Rng,
    shelves: Vec<Shelf>,
    volumes: Vec<Volume>,
    links: BTreeMap<(usize, u64), Link>,
    next: u64,
    was_short: u64,
}

fn primary_config(volume: usize) -> PrimaryConfig {
    PrimaryConfig {
        volume: VolumeId(volume as u128 + 1),
        volume_blocks: VOLUME_BLOCKS,
        window_bytes: 4 << 20,
        sync_bytes: 4 << 20,
        ..config()
    }
}

impl Crowd {
    fn new(seed: u64) -> Self {
        crate::broken::break_a_rule();
        let now = Time::from_millis(1_000_000);
        let mut shelves: Vec<Shelf> = (1..=POOLS as u128).map(Shelf::new).collect();
        shelves.iter_mut().for_each(|shelf| shelf.start(now));
        let mut volumes = Vec::new();
        for volume in 0..VOLUMES {
            let member = |at: usize| Member {
                id: ReplicaId((10 * volume + at + 1) as u128),
                guid: ReplicaGuid((1000 * (volume + 1) + at) as u128),
            };
            let known: Vec<Member> = (0..POOLS).map(member).collect();
            let rf = POOLS as u8;
            let cf = quoin_types::membership::default_cf(rf);
            let membership = Membership {
                version: 1,
                rf,
                cf,
                drf: rf,
                known: known.clone(),
                retired: Vec::new(),
                formed: true,
            };
            for (at, member) in known.iter().enumerate() {
                shelves[at].create(now, volume, *member, &membership);
            }
            volumes.push(Volume {
                target: Primary::new(now, primary_config(volume), 1),
                timer: Some(now),
                membership,
                places: known.iter().enumerate().map(|(at, m)| (m.guid, at)).collect(),
                desired: Desired { drf: rf, ..Desired::default() },
                epoch: Epoch(0),
                targets: 1,
                open: BTreeSet::new(),
                snapshots: BTreeMap::new(),
                made: BTreeSet::new(),
            });
        }
        let random = ChaCha8Rng::seed_from_u64(seed);
        let links = BTreeMap::new();
        Crowd { now, random, shelves, volumes, links, next: 1, was_short: 0 }
    }

    fn chance(&mut self, of: u32) -> bool {
        self.random.random_range(0..of) == 0
    }

    // ---- targets -------------------------------------------------------------------------

    fn feed_target(&mut self, volume: usize, event: PrimaryEvent) {
        let mut actions = Vec::new();
        let target = &mut self.volumes[volume].target;
        target.on(self.now, event, &mut actions);
        target.flush(self.now, &mut actions);
        for action in actions {
            self.target_action(volume, action);
        }
    }

    fn target_action(&mut self, volume: usize, action: PrimaryAction) {
        let of = &mut self.volumes[volume];
        match action {
            PrimaryAction::AcquireEpoch { incarnation, at_least } => {
                of.epoch = Epoch(of.epoch.0.max(at_least.0) + 1);
                let (epoch, membership) = (of.epoch, of.membership.clone());
                self.feed_target(volume, PrimaryEvent::Granted { incarnation, epoch, membership });
            }
            PrimaryAction::SwapMembership { epoch, version, next } => {
                if epoch == of.epoch && version == of.membership.version {
                    of.membership = next;
                }
                let membership = Some(of.membership.clone());
                self.feed_target(volume, PrimaryEvent::Swapped { version, membership });
                self.delete_retired(volume);
            }
            PrimaryAction::Connect { member, session } => {
                let shelf = of.places.get(&member.guid).copied();
                match shelf.filter(|shelf| self.shelves[*shelf].pool.is_some()) {
                    Some(shelf) => {
                        self.connect(volume, session.nonce, session, None, shelf, member.guid);
                        self.feed_target(volume, PrimaryEvent::Connected { session });
                    }
                    None => self.feed_target(volume, PrimaryEvent::Disconnected { session }),
                }
            }
            PrimaryAction::ConnectBulk { member, bulk } => {
                let own = self.links.get(&(volume, bulk.session.nonce)).map(|link| link.shelf);
                match own {
                    Some(shelf) => {
                        let connection = BULK | bulk.number;
                        let session = bulk.session;
                        self.connect(volume, connection, session, Some(bulk), shelf, member.guid);
                        self.feed_target(volume, PrimaryEvent::BulkConnected { bulk });
                    }
                    None => self.feed_target(volume, PrimaryEvent::BulkDisconnected { bulk }),
                }
            }
            PrimaryAction::DisconnectBulk { bulk } => self.close(volume, BULK | bulk.number, false),
            PrimaryAction::Disconnect { session } => self.close(volume, session.nonce, false),
            PrimaryAction::Send { session, message } => {
                if let Some(link) = self.links.get_mut(&(volume, session.nonce)) {
                    link.to_pool.push_back(message);
                }
            }
            PrimaryAction::SendBulk { bulk, message } => {
                if let Some(link) = self.links.get_mut(&(volume, BULK | bulk.number)) {
                    link.to_pool.push_back(message);
                }
            }
            PrimaryAction::Reply(reply) => {
                assert!(reply.result.is_ok(), "{reply:?}");
                of.open.remove(&reply.token);
            }
            PrimaryAction::Timer { at } => of.timer = at,
            PrimaryAction::Note(PrimaryNote::Snapshot { id, outcome }) => match outcome {
                SnapshotOutcome::Made { .. } => {
                    if of.snapshots.get(&id) == Some(&SnapshotWish::Make) {
                        of.snapshots.remove(&id);
                        of.made.insert(id);
                    }
                }
                SnapshotOutcome::Deleted => {
                    if of.snapshots.get(&id) == Some(&SnapshotWish::Delete) {
                        of.snapshots.remove(&id);
                    }
                }
                other => panic!("{other:?}"),
            },
            PrimaryAction::Note(PrimaryNote::InvariantRefused { invariant, .. }) => {
                panic!("{invariant}");
            }
            PrimaryAction::Note(_) | PrimaryAction::Changes { .. } | PrimaryAction::Stopped => {}
        }
    }

    fn connect(
        &mut self,
        volume: usize,
        connection: u64,
        session: SessionKey,
        bulk: Option<BulkKey>,
        shelf: usize,
        guid: ReplicaGuid,
    ) {
        let (to_pool, to_target) = (VecDeque::new(), VecDeque::new());
        let link = Link { session, bulk, shelf, guid, to_pool, to_target };
        self.links.insert((volume, connection), link);
    }

    /// Ends a connection; `is_told`: the target has to hear of it.
    fn close(&mut self, volume: usize, connection: u64, is_told: bool) {
        let Some(link) = self.links.remove(&(volume, connection)) else { return };
        if link.bulk.is_none() {
            let session = link.session;
            let of_it = |(key, l): (&(usize, u64), &Link)| {
                (key.0 == volume && l.session == session).then_some(key.1)
            };
            let bulks: Vec<u64> = self.links.iter().filter_map(of_it).collect();
            bulks.into_iter().for_each(|bulk| self.close(volume, bulk, is_told));
        }
        self.feed_pool(link.shelf, link.guid, ReplicaEvent::Disconnected { connection });
        if is_told {
            let session = link.session;
            self.feed_target(
                volume,
                match link.bulk {
                    Some(bulk) => PrimaryEvent::BulkDisconnected { bulk },
                    None => PrimaryEvent::Disconnected { session },
                },
            );
        }
    }

    fn replace_target(&mut self, volume: usize) {
        let ends: Vec<u64> =
            self.links.keys().filter(|(of, _)| *of == volume).map(|(_, c)| *c).collect();
        ends.into_iter().for_each(|connection| self.close(volume, connection, false));
        let of = &mut self.volumes[volume];
        of.targets += 1;
        of.open.clear();
        of.target = Primary::new(self.now, primary_config(volume), of.targets);
        of.timer = Some(self.now);
        let desired = of.desired.clone();
        self.feed_target(volume, PrimaryEvent::Desired(desired));
    }

    // ---- pools ---------------------------------------------------------------------------

    fn feed_pool(&mut self, at: usize, guid: ReplicaGuid, event: ReplicaEvent) {
        let shelf = &mut self.shelves[at];
        let Some(pool) = &mut shelf.pool else { return };
        let Some(replica) = shelf.replicas.get_mut(&guid) else { return };
        let mut actions = Vec::new();
        if let Some(mut store) = pool.replica(guid) {
            replica.on(self.now, event, &mut store, &mut actions);
        }
        // The end of a round: the room first, then what was applied.
        let mut all = vec![(guid, actions)];
        let room = pool.room(shelf.told);
        if room != shelf.told {
            shelf.told = room;
            self.was_short += u64::from(room.takes < Takes::Writes);
            for (other, replica) in &mut shelf.replicas {
                let mut actions = Vec::new();
                if let Some(mut store) = pool.replica(*other) {
                    replica.on(self.now, ReplicaEvent::Room(room), &mut store, &mut actions);
                }
                all.push((*other, actions));
            }
        }
        let mut actions = Vec::new();
        shelf.replicas.get_mut(&guid).unwrap().flush(&mut actions);
        all.push((guid, actions));
        for (guid, actions) in all {
            for action in actions {
                self.pool_action(at, guid, action);
            }
        }
        self.begin_sync(at);
    }

    fn begin_sync(&mut self, at: usize) {
        let took = Duration::from_millis(self.random.random_range(1..20));
        let shelf = &mut self.shelves[at];
        if let (None, Some(pool)) = (shelf.sync, &mut shelf.pool)
            && let Some(ticket) = pool.sync_wanted()
        {
            shelf.sync = Some((self.now + took, ticket));
        }
    }

    fn end_sync(&mut self, at: usize) {
        let shelf = &mut self.shelves[at];
        let Some((_, ticket)) = shelf.sync.take() else { return };
        let pool = shelf.pool.as_mut().unwrap();
        let result = pool.disk().sync();
        pool.sync_finished(ticket, result).unwrap();
        for guid in pool.take_served() {
            self.feed_pool(at, guid, ReplicaEvent::Synced { ticket, result: Ok(()) });
        }
        self.begin_sync(at);
    }

    fn pool_action(&mut self, at: usize, guid: ReplicaGuid, action: ReplicaAction) {
        let volume = (guid.0 / 1000) as usize - 1;
        match action {
            ReplicaAction::Send { connection, message, .. } => {
                if let Some(link) = self.links.get_mut(&(volume, connection)) {
                    link.to_target.push_back(message);
                }
            }
            ReplicaAction::Disconnect { connection } => {
                // Messages that were sent before arrive first.
                while let Some(link) = self.links.get_mut(&(volume, connection))
                    && let Some(message) = link.to_target.pop_front()
                {
                    self.tell_target(volume, connection, message);
                }
                self.close(volume, connection, true);
            }
            ReplicaAction::Timer { at: when } => {
                match when {
                    Some(when) => self.shelves[at].timers.insert(guid, when),
                    None => self.shelves[at].timers.remove(&guid),
                };
            }
            ReplicaAction::Note(_) => {}
        }
    }

    fn kill_pool(&mut self, at: usize) {
        let shelf = &mut self.shelves[at];
        shelf.pool = None;
        shelf.sync = None;
        shelf.replicas.clear();
        shelf.timers.clear();
        let random = &mut self.random;
        shelf.disk.process_crash(|| random.random_bool(0.5));
        shelf.back_at = self.now + Duration::from_millis(self.random.random_range(1..400));
        let ends: Vec<(usize, u64)> =
            self.links.iter().filter(|(_, l)| l.shelf == at).map(|(key, _)| *key).collect();
        ends.into_iter().for_each(|(volume, connection)| self.close(volume, connection, true));
    }

    /// Another pool is joined, and a replica of each volume moves there.
    fn join_a_pool_and_move(&mut self) {
        let at = self.shelves.len();
        self.shelves.push(Shelf::new(at as u128 + 1));
        let now = self.now;
        self.shelves[at].start(now);
        for volume in 0..VOLUMES {
            let membership = self.volumes[volume].membership.clone();
            let from = membership.known[volume % POOLS];
            let guid = ReplicaGuid((1000 * (volume + 1) + 500) as u128);
            let member = Member { id: from.id, guid };
            self.shelves[at].create(now, volume, member, &membership);
            let of = &mut self.volumes[volume];
            of.places.insert(guid, at);
            of.desired.newcomers.push(Newcomer { member, beside: true });
            let desired = of.desired.clone();
            self.feed_target(volume, PrimaryEvent::Desired(desired));
        }
    }

    fn delete_retired(&mut self, volume: usize) {
        let of = &mut self.volumes[volume];
        let is_known = |guid: &ReplicaGuid| of.membership.known.iter().any(|m| m.guid == *guid);
        let is_awaited =
            |guid: &ReplicaGuid| of.desired.newcomers.iter().any(|n| n.member.guid == *guid);
        let gone: Vec<ReplicaGuid> =
            of.places.keys().filter(|g| !is_known(g) && !is_awaited(g)).copied().collect();
        let known = of.membership.known.clone();
        of.desired.newcomers.retain(|n| !known.contains(&n.member));
        let desired = of.desired.clone();
        self.feed_target(volume, PrimaryEvent::Desired(desired));
        for guid in gone {
            let Some(at) = self.volumes[volume].places.remove(&guid) else { continue };
            let ends: Vec<u64> =
                self.links.iter().filter(|(_, l)| l.guid == guid).map(|(key, _)| key.1).collect();
            ends.into_iter().for_each(|connection| self.close(volume, connection, true));
            let shelf = &mut self.shelves[at];
            shelf.replicas.remove(&guid);
            if let Some(pool) = &mut shelf.pool {
                pool.delete(guid).unwrap();
                pool.request_sync();
            }
            self.begin_sync(at);
        }
    }

    // ---- time ----------------------------------------------------------------------------

    fn tell_target(&mut self, volume: usize, connection: u64, message: FromReplica) {
        let Some(link) = self.links.get(&(volume, connection)) else { return };
        let (session, bulk) = (link.session, link.bulk);
        self.feed_target(
            volume,
            match bulk {
                Some(bulk) => PrimaryEvent::BulkMessage { bulk, message },
                None => PrimaryEvent::Message { session, message },
            },
        );
    }

    /// One message of a connection that is drawn, or what is due by time. False: nothing is.
    fn step(&mut self) -> bool {
        let waiting: Vec<(usize, u64, bool)> = self
            .links
            .iter()
            .flat_map(|((volume, connection), link)| {
                let down = (!link.to_pool.is_empty()).then_some((*volume, *connection, true));
                let up = (!link.to_target.is_empty()).then_some((*volume, *connection, false));
                down.into_iter().chain(up)
            })
            .collect();
        if waiting.is_empty() {
            return false;
        }
        let (volume, connection, down) = waiting[self.random.random_range(0..waiting.len())];
        let Some(link) = self.links.get_mut(&(volume, connection)) else { return true };
        let (session, shelf, guid) = (link.session, link.shelf, link.guid);
        if !down {
            let message = link.to_target.pop_front().unwrap();
            self.tell_target(volume, connection, message);
            return true;
        }
        let message = link.to_pool.pop_front().unwrap();
        self.feed_pool(shelf, guid, ReplicaEvent::Message { connection, session, message });
        true
    }

    fn work(&mut self) {
        for at in 0..self.shelves.len() {
            if self.shelves[at].pool.is_none() && self.now >= self.shelves[at].back_at {
                let now = self.now;
                self.shelves[at].start(now);
            }
            if self.shelves[at].sync.is_some_and(|(end, _)| self.now >= end) {
                self.end_sync(at);
            }
            if let Some(pool) = &mut self.shelves[at].pool {
                match pool.background(64 << 10) {
                    Ok(_) | Err(quoin_replication::replica::store::StoreError::Full) => {}
                    Err(error) => panic!("{error:?}"),
                }
                self.begin_sync(at);
                let any = self.shelves[at].replicas.keys().next().copied();
                // The end of a round in which nothing came.
                if let Some(guid) = any {
                    let told = self.shelves[at].told;
                    if self.shelves[at].pool().room(told) != told {
                        let connection = u64::MAX;
                        self.feed_pool(at, guid, ReplicaEvent::Disconnected { connection });
                    }
                }
            }
            let due: Vec<ReplicaGuid> = self.shelves[at]
                .timers
                .iter()
                .filter(|(_, when)| **when <= self.now)
                .map(|(guid, _)| *guid)
                .collect();
            for guid in due {
                self.shelves[at].timers.remove(&guid);
                self.feed_pool(at, guid, ReplicaEvent::Timer);
            }
        }
        for volume in 0..VOLUMES {
            if self.volumes[volume].timer.is_some_and(|when| when <= self.now) {
                self.volumes[volume].timer = None;
                self.feed_target(volume, PrimaryEvent::Timer);
            }
        }
    }

    /// A moment goes by: more of it where nothing is under way.
    fn round(&mut self) {
        let is_busy = (0..8).fold(false, |busy, _| self.step() | busy);
        let micros = self.random.random_range(if is_busy { 20..400 } else { 1_000..10_000 });
        self.now = self.now + Duration::from_micros(micros);
        self.work();
    }

    fn submit(&mut self, volume: usize, operation: Operation) {
        let token = self.next;
        self.next += 1;
        self.volumes[volume].open.insert(token);
        self.feed_target(volume, PrimaryEvent::Submit(Request { token, operation, origin: None }));
    }

    fn draw(&mut self) -> Operation {
        let blocks = self.random.random_range(1..=WRITE_BLOCKS);
        let offset = self.random.random_range(0..VOLUME_BLOCKS - blocks) * 4096;
        let length = blocks * 4096;
        match self.random.random_range(0..20) {
            0 => Operation::Trim { offset, length, fua: false },
            1 => Operation::WriteZeroes { offset, length, fua: false, no_hole: false },
            2 => Operation::Flush,
            3 => {
                let data = Bytes::from(vec![7; 1024]);
                Operation::Write { offset: offset + 512, data, fua: false }
            }
            fill => {
                let data = Bytes::from(vec![fill as u8; length as usize]);
                Operation::Write { offset, data, fua: self.random.random_bool(0.05) }
            }
        }
    }

    fn wish(&mut self, volume: usize) {
        let of = &mut self.volumes[volume];
        let wished: Vec<(SnapshotId, SnapshotWish)> =
            of.snapshots.iter().map(|(id, wish)| (*id, *wish)).collect();
        for (id, wish) in wished {
            self.feed_target(volume, PrimaryEvent::Snapshot { id, wish });
        }
    }

    fn snapshot(&mut self, volume: usize) {
        let id = SnapshotId(u128::from(self.next));
        self.next += 1;
        let of = &mut self.volumes[volume];
        match of.made.pop_first() {
            Some(oldest) if of.made.len() + 1 >= SNAPSHOTS_MAX => {
                of.snapshots.insert(oldest, SnapshotWish::Delete);
            }
            kept => {
                of.made.extend(kept);
                of.snapshots.insert(id, SnapshotWish::Make);
            }
        }
    }

    fn delete_all(&mut self) {
        for of in &mut self.volumes {
            for id in std::mem::take(&mut of.made) {
                of.snapshots.insert(id, SnapshotWish::Delete);
            }
            of.snapshots.values_mut().for_each(|wish| *wish = SnapshotWish::Delete);
        }
    }

    /// Work that has not come through.
    fn stays(&self) -> Option<String> {
        for (at, of) in self.volumes.iter().enumerate() {
            let status = of.target.status();
            let in_sync = |r: &&quoin_replication::primary::ReplicaStatus| {
                r.standing == ReplicaStanding::InSync
            };
            if !of.open.is_empty() || !of.snapshots.is_empty() || !of.desired.newcomers.is_empty() {
                return Some(format!(
                    "volume {at}: {} requests, snapshots {:?}, newcomers {:?}; {status:?}",
                    of.open.len(),
                    of.snapshots,
                    of.desired.newcomers
                ));
            }
            if status.replicas.iter().filter(in_sync).count() < POOLS {
                return Some(format!("volume {at}: {status:?}"));
            }
        }
        None
    }

    /// A replica that lags and whose pool has no room for a rebuild beside its old content is made anew,
    /// as people do: it counts for nothing, and all that the volume's clients wait for came through.
    fn replace_laggards(&mut self) {
        for volume in 0..VOLUMES {
            let of = &self.volumes[volume];
            if !of.open.is_empty() || !of.snapshots.is_empty() {
                continue;
            }
            let status = of.target.status();
            let lags = |r: &&quoin_replication::primary::ReplicaStatus| {
                r.standing != ReplicaStanding::InSync && of.places.contains_key(&r.member.guid)
            };
            let Some(old) = status.replicas.iter().find(lags).map(|r| r.member) else { continue };
            let at = of.places[&old.guid];
            let membership = of.membership.clone();
            let ends: Vec<u64> =
                self.links.iter().filter(|(_, l)| l.guid == old.guid).map(|(k, _)| k.1).collect();
            ends.into_iter().for_each(|connection| self.close(volume, connection, true));
            self.volumes[volume].places.remove(&old.guid);
            self.shelves[at].replicas.remove(&old.guid);
            self.shelves[at].timers.remove(&old.guid);
            if self.shelves[at].pool.is_none() {
                let now = self.now;
                self.shelves[at].start(now);
            }
            self.shelves[at].pool().delete(old.guid).unwrap();
            let member = Member { id: old.id, guid: ReplicaGuid(old.guid.0 + 20) };
            let now = self.now;
            self.shelves[at].create(now, volume, member, &membership);
            self.begin_sync(at);
            let of = &mut self.volumes[volume];
            of.places.insert(member.guid, at);
            of.desired.newcomers.retain(|n| n.member != old);
            of.desired.newcomers.push(Newcomer { member, beside: false });
            let desired = of.desired.clone();
            self.feed_target(volume, PrimaryEvent::Desired(desired));
        }
    }

    fn rooms(&mut self) -> Vec<String> {
        let shelves = self.shelves.iter_mut().filter_map(|shelf| {
            let told = shelf.told;
            shelf.pool.as_ref().map(|pool| format!("{told:?} {:?}", pool.stats()))
        });
        shelves.collect()
    }
}

/// Runs a seed; returns how often a pool ran full.
fn run(seed: u64) -> u64 {
    let mut crowd = Crowd::new(seed);
    let joins = seed % 3 == 1;
    for round in 0..ROUNDS {
        crowd.round();
        let volume = crowd.random.random_range(0..VOLUMES);
        if crowd.volumes[volume].open.len() < DEPTH {
            let operation = crowd.draw();
            crowd.submit(volume, operation);
        }
        if crowd.chance(400) {
            crowd.snapshot(volume);
        }
        if round % 50 == 0 {
            crowd.wish(volume);
        }
        match crowd.random.random_range(0..6000) {
            0 | 1 => {
                let at = crowd.random.random_range(0..crowd.shelves.len());
                crowd.kill_pool(at);
            }
            2 => crowd.replace_target(volume),
            3 => (0..POOLS).for_each(|at| crowd.kill_pool(at)),
            4..10 => {
                let of_it = crowd.links.keys().find(|(of, c)| *of == volume && c & BULK == 0);
                if let Some((volume, connection)) = of_it.copied() {
                    crowd.close(volume, connection, true);
                }
            }
            _ => {}
        }
        if joins && round == ROUNDS * 3 / 4 {
            crowd.join_a_pool_and_move();
        }
    }
    crowd.delete_all();
    let end = crowd.now + LIVENESS;
    let (mut rounds, mut is_replaced) = (0_u64, false);
    while let Some(what) = crowd.stays() {
        assert!(crowd.now < end, "seed {seed}: never: {what}; pools: {:#?}", crowd.rooms());
        if rounds.is_multiple_of(50) {
            (0..VOLUMES).for_each(|volume| crowd.wish(volume));
        }
        if crowd.now + LIVENESS / 2 >= end && !std::mem::replace(&mut is_replaced, true) {
            crowd.replace_laggards();
        }
        rounds += 1;
        crowd.round();
    }
    crowd.was_short
}

#[test]
fn volumes_that_share_full_pools_all_get_through_once_their_snapshots_are_deleted() {
    let seeds = std::env::var("QUOIN_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let short: u64 = (1..=seeds).map(run).sum();
    assert!(short > seeds, "pools ran full {short} times in {seeds} seeds");
}
