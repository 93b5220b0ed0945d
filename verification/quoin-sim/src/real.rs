//! The real store on a simulated disk, driven as `quoin-pool` drives it.

use std::collections::BTreeMap;

use bytes::Bytes;
use quoin_replication::recognition::PoolCounts;
use quoin_replication::replica::store::{
    BootCookie, FetchTicket, IoFault, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError,
    SyncTicket,
};
use quoin_store::disk::fetch::{Fetch, Owner};
use quoin_store::{
    BadBlock, Cloned, Due, FormatOptions, Pool, PoolError, PoolOptions, ReplicaPool, ScrubAt,
    ScrubStage,
};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{BadCopy, RoomGrant};
use quoin_types::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, ReplicaGuid};

use crate::content::SECTOR;
use crate::disk::{DiskCounts, Failing, Lie, SimDisk};
use crate::neighbours::Neighbours;
use crate::random::Random;
use crate::shape::PoolShape;
use crate::source::{Living, Source, Turn};
use crate::storage::{Faults, Faulty, Outage, Scrubbed, Space, Storage};

/// Small enough that checkpoints and clean-up happen within a run.
const DISK_BYTES: u64 = 64 << 20;
/// Blocks of one write of the volume that fills a pool.
const BALLAST_BLOCKS: u32 = 64;
/// GUIDs this near to the end are of volumes that fill a pool.
const BALLASTS_MAX: u128 = 1 << 32;
/// An entry of 1 MiB must fit in a segment.
const UNIT_BLOCKS: u32 = 512;
/// The stream of a batch that holds nodes of a map.
const NODES: u8 = 2;
const BACKGROUND_BYTES: u64 = 1 << 20;
const ROUNDS_OF_CLEAN_UP: u32 = 4;
const CLONE_ATTEMPTS_MAX: u32 = 100;
/// Reads of a hundred that wait for the medium, where some do.
const UNCACHED_PERCENT: u64 = 40;

pub struct RealStorage {
    disk: SimDisk,
    shape: Option<PoolShape>,
    is_cold: bool,
    options: PoolOptions,
    pool: Option<Pool<SimDisk>>,
    /// Where the sync under way began.
    sync_from: u64,
    /// Reads under way, with the result of those that the medium has answered already; the others
    /// are answered at their end.
    under_way: BTreeMap<u64, (Fetch, Option<Result<Bytes, IoFault>>)>,
    faults: Faults,
    /// Other volumes' replicas take all the room there is.
    full: bool,
    filled: bool,
    ballasts: u128,
    /// Volumes that fill the pool instead of a ballast.
    neighbours: Option<Neighbours>,
    /// The source that the replica is a clone of, where there is one.
    source: Option<Living>,
    /// Reads that the disk takes at the same time.
    queue_depth: usize,
    /// Counts of the kept image.
    image: Option<PoolCounts>,
    chance: Random,
}

impl RealStorage {
    /// A new pool on a disk of its own.
    /// `is_cold`: the kernel has not all of it in its cache.
    pub fn new(
        shape: Option<PoolShape>,
        is_cold: bool,
        random: &mut Random,
    ) -> Result<Self, StoreError> {
        let disk_bytes = shape.map_or(DISK_BYTES, |s| s.disk_bytes);
        let disk = SimDisk::new(disk_bytes, u128::from(random.draw()));
        let mut format = FormatOptions::new(PoolId(random.wide()));
        format.unit_blocks = shape.map_or(UNIT_BLOCKS, |s| s.unit_blocks);
        let mut options = PoolOptions {
            cache_bytes: *random.pick(&[64 << 10, 1 << 20, 16 << 20]),
            checkpoint_bytes: *random.pick(&[128 << 10, 1 << 20, 4 << 20]),
            log_keep_bytes: *random.pick(&[64 << 10, 512 << 10, 4 << 20]),
            // Small volumes have few nodes: half of the pools stop in the middle of them.
            step_nodes: if format.pool.0.is_multiple_of(2) { 4 } else { 64 },
            ..PoolOptions::default()
        };
        if let Some(shape) = shape {
            options.cache_bytes = shape.cache_bytes;
            options.checkpoint_bytes = shape.checkpoint_bytes;
            options.log_keep_bytes = shape.log_keep_bytes;
        }
        Pool::format(&disk, &format).map_err(store_error)?;
        if is_cold {
            // Small volumes have few nodes: the least that a pool keeps of them.
            options.cache_bytes = 0;
            disk.set_uncached(Random::new(format.pool.0 as u64), UNCACHED_PERCENT);
        }
        let pool = Pool::open(disk.clone(), options).map_err(store_error)?;
        // From a disk of one arm to one that takes all that a pool has under way.
        let queue_depth = [1, 2, 64][format.pool.0 as usize % 3];
        Ok(Self {
            disk,
            shape,
            is_cold,
            options,
            pool: Some(pool),
            sync_from: 0,
            under_way: BTreeMap::new(),
            faults: Faults::default(),
            full: false,
            filled: false,
            ballasts: 0,
            neighbours: shape
                .filter(|shape| shape.neighbours > 0)
                .map(|shape| Neighbours::new(shape.neighbours, random)),
            source: None,
            queue_depth,
            image: None,
            chance: random.fork(),
        })
    }

    /// Fills the pool up to its last free unit, or gives that room back. What a power cut brings
    /// back or takes away is looked for, not remembered.
    fn fill_or_free(&mut self) -> Result<(), StoreError> {
        if let (Some(neighbours), Some(pool)) = (&mut self.neighbours, &mut self.pool) {
            if self.full && !std::mem::replace(&mut self.filled, true) {
                return neighbours.fill(pool);
            }
            if !self.full && std::mem::take(&mut self.filled) {
                neighbours.begin_to_give_back(pool);
            }
            return Ok(());
        }
        match (self.full, self.filled) {
            (true, false) => {
                self.ballasts += 1;
                let guid = ReplicaGuid(u128::MAX - self.ballasts);
                let identity = ReplicaIdentity { guid, ..ReplicaIdentity::default() };
                let blocks = quoin_store::Disk::size(&self.disk) / BLOCK_SIZE as u64;
                self.pool()?.create(identity, ReplicaMeta::default(), blocks)?;
                self.filled = true;
                self.fill(guid, blocks)
            }
            (false, _) => {
                let pool = self.pool()?;
                let ballast = |guid: &ReplicaGuid| guid.0 > u128::MAX - BALLASTS_MAX;
                for guid in pool.replicas().into_iter().filter(ballast) {
                    pool.delete(guid)?;
                    pool.request_sync();
                }
                self.filled = false;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn gives_back(&self) -> bool {
        self.neighbours.as_ref().is_some_and(Neighbours::gives_back)
    }

    /// Neighbours give some room back.
    fn give_back(&mut self) -> Result<(), StoreError> {
        let (Some(neighbours), Some(pool)) = (&mut self.neighbours, &mut self.pool) else {
            return Ok(());
        };
        if let Some(entry) = neighbours.give_back(pool)? {
            let words = format!("a full pool never took what frees room: {entry}");
            self.faults.broken = Some(("FreeingPasses", words));
        }
        Ok(())
    }

    fn fill(&mut self, guid: ReplicaGuid, blocks: u64) -> Result<(), StoreError> {
        let pool = self.pool()?;
        let data = Bytes::from(vec![0xb; BALLAST_BLOCKS as usize * BLOCK_SIZE]);
        let (mut chain, mut lsn, mut lba) = (Chain::default(), Lsn(0), 0);
        while lba + u64::from(BALLAST_BLOCKS) <= blocks {
            let position = Position { epoch: Epoch(1), lsn: lsn.next() };
            let data = data.clone();
            let entry =
                Entry::after(chain, position, EntryKind::Write, lba, BALLAST_BLOCKS, data, false);
            let Some(mut replica) = pool.replica(guid) else { break };
            (chain, lsn) = (entry.chain, entry.lsn);
            lba += u64::from(BALLAST_BLOCKS);
            match replica.append(&[SharedEntry::new(entry)]) {
                Ok(()) => {}
                Err(StoreError::Full) => break,
                Err(error) => return Err(error),
            }
        }
        pool.request_sync();
        Ok(())
    }

    fn read(&self, fetch: Fetch) -> Result<Bytes, IoFault> {
        self.disk.fetch_beside(&fetch)
    }

    fn pool(&mut self) -> Result<&mut Pool<SimDisk>, StoreError> {
        let closed = IoFault { operation: "open", offset: 0, errno: 5 };
        self.pool.as_mut().ok_or(StoreError::Io(closed))
    }

    /// After a disk error the kernel's pages cannot be trusted, whatever the boot says: this is
    /// written down before anything is answered again.
    fn give_up_continuity(&mut self) -> Result<(), StoreError> {
        let pool = self.pool()?;
        quoin_store::give_up_continuity(pool)?;
        self.sync_now()
    }

    fn sync_now(&mut self) -> Result<(), StoreError> {
        let pool = self.pool()?;
        while let Some(ticket) = pool.sync_wanted() {
            let result = quoin_store::Disk::sync(pool.disk());
            pool.sync_finished(ticket, result)?;
        }
        Ok(())
    }

    /// Has all reads answered that nobody waits for.
    fn end_fetches(&mut self) {
        while self.fetch_begin().is_some() {}
        while let Some(id) = self.under_way.keys().next().copied() {
            self.fetch_end(id);
            while self.fetch_begin().is_some() {}
        }
    }

    /// The source of a clone goes on, whatever room and disk let it do.
    fn live_on(&mut self) {
        let (Some(source), Some(pool)) = (&mut self.source, &mut self.pool) else { return };
        let Some(mut replica) = pool.replica(Living::guid()) else { return };
        match source.turn() {
            Turn::Nothing => {}
            Turn::Append(entry) => {
                if replica.append(std::slice::from_ref(&entry)).is_ok() {
                    replica.set_stable(entry.lsn);
                }
                let state = replica.state();
                source.stands_at(state.chain, state.position.lsn);
            }
            Turn::Delete => {
                let _ = pool.delete(Living::guid());
                pool.request_sync();
            }
        }
    }
}

fn store_error(error: PoolError) -> StoreError {
    match error {
        PoolError::Store(error) => error,
        _ => StoreError::Damaged("the pool does not open"),
    }
}

impl Storage for RealStorage {
    fn create(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
    ) -> Result<(), StoreError> {
        let pool = self.pool()?;
        pool.create(identity, meta, blocks)?;
        pool.request_sync();
        Ok(())
    }

    fn create_clone(
        &mut self,
        source: &Source,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
        random: &mut Random,
    ) -> Result<(), StoreError> {
        let guid = Source::identity().guid;
        let pool = self.pool()?;
        pool.create(Source::identity(), ReplicaMeta::default(), source.blocks)?;
        if let Some(mut replica) = pool.replica(guid) {
            replica.append(&source.entries)?;
            replica.set_stable(replica.state().position.lsn);
        }
        self.source = Some(Living::new(source, random));
        for _ in 0..CLONE_ATTEMPTS_MAX {
            let (identity, meta) = (identity.clone(), meta.clone());
            if self.pool()?.create_clone(identity, meta, blocks, &Source::point())? == Cloned::Made
            {
                self.pool()?.request_sync();
                return Ok(());
            }
            self.pool()?.background(BACKGROUND_BYTES)?;
            self.end_fetches();
            self.sync_now()?;
        }
        Err(StoreError::Rule("the snapshot of a clone is never recorded"))
    }

    fn delete(&mut self, guid: ReplicaGuid) -> Result<(), StoreError> {
        let pool = self.pool()?;
        pool.delete(guid)?;
        pool.request_sync();
        // The world says "wiped" from here on, so it must be on the media.
        self.sync_now()
    }

    fn with(&mut self, guid: ReplicaGuid, work: &mut dyn FnMut(&mut dyn ReplicaStore)) -> bool {
        let Some(pool) = &mut self.pool else { return false };
        let Some(inner) = pool.replica(guid) else { return false };
        work(&mut Faulty { inner, faults: &mut self.faults });
        true
    }

    fn cookie(&self) -> BootCookie {
        quoin_store::Disk::cookie(&self.disk)
    }

    fn sync_begin(&mut self) -> Option<SyncTicket> {
        let ticket = self.pool.as_mut()?.sync_wanted()?;
        self.sync_from = self.disk.begin_sync();
        Some(ticket)
    }

    fn sync_end(&mut self, ticket: SyncTicket, random: &mut Random) -> Result<(), StoreError> {
        let result = self.disk.end_sync(self.sync_from, random);
        self.pool()?.sync_finished(ticket, result)
    }

    fn take_served(&mut self) -> Vec<ReplicaGuid> {
        self.pool.as_mut().map(Pool::take_served).unwrap_or_default()
    }

    fn take_broken(&mut self) -> Option<(&'static str, String)> {
        self.faults.broken.take()
    }

    fn sync_lie(&mut self, ticket: SyncTicket) {
        if let Some(pool) = &mut self.pool {
            let _ = pool.sync_finished(ticket, Ok(()));
        }
    }

    fn forget(&mut self) {
        self.pool = None;
        self.disk.forget();
        self.pool = Pool::open(self.disk.clone(), self.options).ok();
    }

    fn reopen(
        &mut self,
        outage: Outage,
        withdraw: bool,
        random: &mut Random,
    ) -> Result<(), StoreError> {
        self.pool = None;
        self.under_way.clear();
        if outage != Outage::Power {
            self.disk.drop_held(random);
        }
        match outage {
            Outage::Process => self.disk.drop_orphans(false, random),
            Outage::Power => self.disk.power_cut(random),
            Outage::DiskFailed => self.disk.drop_orphans(true, random),
        }
        let pool = Pool::open(self.disk.clone(), self.options).map_err(store_error)?;
        self.pool = Some(pool);
        if let (Some(source), Some(pool)) = (&mut self.source, &mut self.pool)
            && let Some(replica) = pool.replica(Living::guid())
        {
            source.stands_at(replica.state().chain, replica.state().position.lsn);
        }
        // A ballast that a power cut left is found; of neighbours it may bring back what was given back.
        self.filled = self.neighbours.is_some();
        if withdraw {
            self.give_up_continuity()?;
        }
        // Room that cannot be given back now is given back at the next start.
        let _ = self.fill_or_free();
        Ok(())
    }

    fn fetch_begin(&mut self) -> Option<Fetch> {
        // Wanted reads stay listed while the disk's queue is full, over the re-use of units too.
        if self.under_way.len() >= self.queue_depth {
            return None;
        }
        let fetch = self.pool.as_mut()?.next_fetch()?;
        // Every other one: the medium is read at once, and the result is told at the end.
        let early = fetch.id.is_multiple_of(2).then(|| self.read(fetch));
        self.under_way.insert(fetch.id, (fetch, early));
        Some(fetch)
    }

    fn fetch_end(&mut self, id: u64) {
        let Some((fetch, early)) = self.under_way.remove(&id) else { return };
        let result = early.unwrap_or_else(|| self.read(fetch));
        if let Some(pool) = &mut self.pool {
            pool.fetched(id, result);
        }
    }

    fn take_blocked_reads(&mut self) -> u64 {
        self.disk.take_blocked_reads()
    }

    fn take_fetched(&mut self) -> Option<(Owner, FetchTicket)> {
        self.pool.as_mut()?.take_fetched()
    }

    fn background(&mut self) -> Result<(), StoreError> {
        self.live_on();
        self.give_back()?;
        self.pool()?.background(BACKGROUND_BYTES).map(|_| ())
    }

    fn wants_background(&self) -> bool {
        self.gives_back() || self.pool.as_ref().is_some_and(|p| p.background_due() != Due::Idle)
    }

    fn look_again(&mut self) {
        if let Some(pool) = &mut self.pool {
            pool.look_again();
        }
    }

    fn set_failing(&mut self, failing: Failing) {
        self.disk.set_failing(failing);
    }

    /// Another volume takes all the room, until it is deleted.
    fn set_full(&mut self, full: bool) {
        self.full = full;
        let _ = self.fill_or_free();
    }

    fn lie(&mut self, lie: Lie) -> bool {
        self.disk.lie(lie, self.chance.draw());
        true
    }

    fn scrub(
        &mut self,
        guid: ReplicaGuid,
        (stage, cursor): (u64, u64),
        budget_bytes: u64,
    ) -> Result<Scrubbed, StoreError> {
        let done = self.pool()?.try_scrub(
            guid,
            ScrubAt { stage: ScrubStage::of(stage), cursor },
            budget_bytes,
        )?;
        let next = done.next.map(|at| (at.stage.number(), at.cursor));
        Ok(Scrubbed { next, read_bytes: done.read_bytes })
    }

    fn take_bad_blocks(&mut self) -> Vec<(ReplicaGuid, BadCopy)> {
        let bad = self.pool.as_mut().map(Pool::take_bad_blocks).unwrap_or_default();
        let copy = |bad: BadBlock| {
            let BadBlock { lba, blocks, version, snapshot, .. } = bad;
            (bad.replica, BadCopy { lba, blocks, version, snapshot })
        };
        bad.into_iter().map(copy).collect()
    }

    fn keep_image(&mut self) {
        if let Some(pool) = self.pool.as_ref().filter(|pool| !pool.is_mark_rising()) {
            let (starts, mark) = (pool.starts(), pool.mark());
            self.image = Some(PoolCounts { starts, nonce: 0, mark });
            self.disk.keep_image();
        }
    }

    /// The last mark is raised as a report to the controller would have it raised.
    fn roll_back(&mut self, more_starts: u64) -> Result<Option<PoolCounts>, StoreError> {
        let Some(then) = self.image.take() else { return Ok(None) };
        while self.starts() < then.starts + more_starts {
            self.pool = None;
            self.pool = Some(Pool::open(self.disk.clone(), self.options).map_err(store_error)?);
        }
        let pool = self.pool()?;
        if pool.has_changed_since_mark() {
            pool.raise_mark()?;
        }
        while let Some(ticket) = pool.sync_wanted() {
            let result = quoin_store::Disk::sync(pool.disk());
            pool.sync_finished(ticket, result)?;
        }
        let now = PoolCounts { starts: pool.starts(), nonce: 0, mark: pool.mark() };
        Ok((now != then && self.disk.roll_back()).then_some(now))
    }

    fn replace(&mut self, random: &mut Random) -> Result<(), StoreError> {
        let (full, ballasts) = (self.full, self.ballasts);
        *self = Self::new(self.shape, self.is_cold, random)?;
        (self.full, self.ballasts) = (full, ballasts);
        Ok(())
    }

    fn room(&self, was: RoomGrant) -> RoomGrant {
        self.pool.as_ref().map_or(was, |pool| pool.room(was))
    }

    fn space_at_rest(&mut self, emptied: ReplicaGuid) -> Result<Option<Space>, StoreError> {
        let unit_blocks = self.shape.map_or(UNIT_BLOCKS, |s| s.unit_blocks);
        // Everything is in a cache, but for what is read past it.
        self.disk.set_uncached(Random::new(0), 0);
        if self.source.is_some() {
            // The source's blocks stay for the clone, trimmed or not.
            return Ok(None);
        }
        while self.gives_back() {
            self.give_back()?;
            if self.faults.broken.is_some() {
                return Err(StoreError::Rule("a full pool takes what frees room"));
            }
            self.sync_now()?;
            self.end_fetches();
            self.pool()?.background(BACKGROUND_BYTES)?;
        }
        self.pool()?.look_again();
        // The next round may write to units that one round frees, and records those that it
        // empties.
        for _ in 0..ROUNDS_OF_CLEAN_UP {
            self.pool()?.settle()?;
            loop {
                self.end_fetches();
                let pool = self.pool()?;
                if pool.background_due() == Due::Idle {
                    break;
                }
                pool.background(BACKGROUND_BYTES)?;
            }
        }
        let pool = self.pool()?;
        let stats = pool.stats();
        let of = |guid| pool.replica_stats(guid).unwrap_or_default();
        let guids = pool.replicas();
        let is_left = |guid: &&ReplicaGuid| **guid != emptied && !Neighbours::has(**guid);
        let left: Vec<_> = guids.iter().filter(is_left).map(|guid| of(*guid)).collect();
        let replicas: Vec<_> = guids.into_iter().map(of).collect();
        Ok(Some(Space {
            unit_bytes: u64::from(unit_blocks) * BLOCK_SIZE as u64,
            used_bytes: stats.used_bytes,
            allocated_bytes: replicas.iter().map(|r| r.allocated_bytes).sum(),
            live_bytes: replicas.iter().map(|r| r.live_bytes).sum(),
            replicas: (replicas.len() - left.len()) as u64,
            left_bytes: left.iter().map(|r| r.allocated_bytes).sum(),
        }))
    }

    fn starts(&self) -> u64 {
        self.pool.as_ref().map_or(0, Pool::starts)
    }

    fn mark(&self) -> u64 {
        self.pool.as_ref().map_or(0, Pool::mark)
    }

    fn has_changed_since_mark(&self) -> bool {
        self.pool.as_ref().is_some_and(Pool::has_changed_since_mark)
    }

    fn is_mark_rising(&self) -> bool {
        self.pool.as_ref().is_some_and(Pool::is_mark_rising)
    }

    fn raise_mark(&mut self) -> Result<(), StoreError> {
        self.pool()?.raise_mark()
    }

    /// Spoils one page of clients' data; now and then any page, the store's own included.
    fn rot(&mut self, _guid: ReplicaGuid, random: &mut Random) -> bool {
        if self.shape.is_some() && random.percent(20) {
            let nodes = self.disk.runs(|page| match page {
                page if page.starts_with(b"QBAT") && page[18] == NODES => {
                    u32::from_le_bytes(page[72..76].try_into().expect("4 bytes")).into()
                }
                _ => 0,
            });
            return self.disk.rot(random, |number, _| nodes.contains(&number)).is_some();
        }
        if random.percent(self.shape.map_or(20, |s| s.rot_any_percent)) {
            return self.disk.rot(random, |number, _| number > 0).is_some();
        }
        let is_data = |_: u64, page: &[u8]| {
            page.chunks(SECTOR).all(|sector| {
                let place = u64::from_le_bytes(sector[8..16].try_into().expect("8 bytes"));
                let tag = u64::from_le_bytes(sector[..8].try_into().expect("8 bytes"));
                tag != 0 && tag < 1 << 32 && place < 1 << 32 && sector[16..24] == sector[24..32]
            })
        };
        self.disk.rot(random, is_data).is_some()
    }

    fn counts(&self) -> DiskCounts {
        let changes_waited = self.faults.changes_waited;
        DiskCounts { changes_waited, ..self.disk.counts() }
    }
}
