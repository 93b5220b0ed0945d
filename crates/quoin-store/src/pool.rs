//! A pool: opening it, its replicas, syncing, background work.

use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;

use bytes::Bytes;
use quoin_replication::replica::store::{
    BootCookie, FetchTicket, IoFault, PullChunk, ReplicaIdentity, ReplicaMeta, ReplicaStore,
    StoreError, StoreState, SyncTicket, Upcoming,
};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{
    CutHead, EpochEnd, IncrementEnd, ReadView, RoomGrant, Slot, SnapshotHead, SnapshotInfo, Takes,
};
use quoin_types::{BLOCK_SIZE, ClientTable, Epoch, Lsn, PoolId, ReplicaGuid, mutant};

use crate::api::{CloneSource, Cloned, Due, ReplicaPool};
use crate::background::checkpoint;
use crate::background::due_work::DueWork;
use crate::background::look_ahead::{self, LookAhead};
use crate::background::repair;
use crate::background::scheduler::{self, CLEAN_BELOW_PERCENT, Victim};
use crate::background::scrub::{self, MetadataScrubbed, ScrubAt, Scrubbed, Scrubbing};
use crate::clones::bases::Bases;
use crate::clones::creation;
use crate::clones::flatten;
use crate::core::{BadBlock, Buffers, Core, Faults, PoolOptions};
use crate::disk::contents::Content;
use crate::disk::fetch::{Fetch, Fetches, Owner, name_of};
use crate::disk::read_ring::ReadRing;
use crate::disk::{Disk, Medium, Reader, Syncer};
use crate::error::PoolError;
use crate::format::checkpoint::Checkpoint;
use crate::format::record::{Record, UNKNOWN_RECORD};
use crate::format::relatives::BaseId;
use crate::format::superblock::{FORMAT_VERSION, FormatOptions, Superblock};
use crate::map::node_cache::Cache;
use crate::metadata::mark::Mark;
use crate::metadata::ring::Ring;
use crate::metadata::state::DurableState;
use crate::metadata::tickets::Tickets;
use crate::rebuild::{sending, shadow};
use crate::recovery::recover;
use crate::replica::{Replica, payload};
use crate::space::freed::{self, Freed};
use crate::space::segments::Allocator;
use crate::space::table;

/// Assumed cost of a step of a checkpoint or a count, in bytes.
pub(crate) const STEP_BYTES: u64 = 1 << 20;
/// Bytes of Views and the like in one answer to a fetch. A frame's head has room for twice as many
/// beside the fields that every entry has there.
const FETCHED_PAYLOADS_MAX: usize = 512 << 10;
/// Part of the metadata ring that the whole state may take before no replica is added, in
/// percent: the rest is for what changes.
const RING_FULL_PERCENT: usize = 40;
/// Taken for the records of a new replica, beside the description of its volume.
pub(crate) const CREATION_BYTES: usize = 4096;

/// Space and memory of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    pub size_bytes: u64,
    /// Bytes that clients may still fill, the reserve not counted.
    pub free_bytes: u64,
    pub used_bytes: u64,
    pub reserve_bytes: u64,
    pub replicas: usize,
    /// How often the pool was opened.
    pub starts: u64,
    pub log_bytes: u64,
}

/// Space of one replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplicaStats {
    /// Bytes of its segments.
    pub allocated_bytes: u64,
    /// About how much of that a view still needs.
    pub live_bytes: u64,
    /// Log that is not folded yet.
    pub log_bytes: u64,
    pub snapshots: usize,
}

/// Many replicas in one file or device.
pub struct Pool<D> {
    pub(crate) core: Core<D>,
    pub(crate) replicas: BTreeMap<ReplicaGuid, Replica>,
    /// Background work found no free unit, and none has been given back since.
    pub(crate) starved: bool,
    /// The segment to empty next, as it was chosen last.
    pub(crate) victim: Victim,
    /// Something else was done since the last step of a count.
    pub(crate) counts_next: bool,
    /// Background work that is due for each replica.
    pub(crate) due_work: RefCell<DueWork>,
    /// What the next step of background work waits for.
    pub(crate) look_ahead: LookAhead,
    scrubbing: Scrubbing,
}

impl<D: Disk> Pool<D> {
    /// Makes an empty pool of the whole disk, durably.
    pub fn format(disk: &D, options: &FormatOptions) -> Result<(), PoolError> {
        if !options.overwrite {
            match Superblock::read(disk) {
                Err(PoolError::Foreign) => {}
                Err(
                    known @ (PoolError::Newer { .. }
                    | PoolError::Older { .. }
                    | PoolError::Store(_)),
                ) => return Err(known),
                Ok(_) | Err(_) => return Err(PoolError::NotEmpty),
            }
            match crate::disk::contents::content_of(disk)? {
                Content::Blank => {}
                content => return Err(PoolError::Holds(content.words())),
            }
        }
        let superblock = Superblock::new(disk.size(), options)?;
        let mut ring = Ring::format(disk, &superblock)?;
        ring.restate(disk, &DurableState::default().encode())?;
        // Both slots: an older pool's newer start must not shine through.
        superblock.write(disk)?;
        Superblock { starts: 1, ..superblock }.write(disk)?;
        disk.sync()?;
        Ok(())
    }

    /// Opens a pool and recovers its replicas. Everything found is durable afterwards.
    pub fn open(disk: D, options: PoolOptions) -> Result<Self, PoolError> {
        // The sync of a fresh descriptor reports write errors that no call has reported yet.
        disk.sync()?;
        let mut superblock = Superblock::read(&disk)?;
        let (ring, records) = Ring::open(&disk, &superblock)?;
        let durable = DurableState::decode(records).map_err(|malformed| match malformed {
            // An operator removes a pool that reports lost metadata.
            UNKNOWN_RECORD => PoolError::Newer { version: FORMAT_VERSION },
            _ => PoolError::MetadataLost,
        })?;
        superblock.starts += 1;
        let pool_bytes =
            u64::from(superblock.units()) * u64::from(superblock.unit_blocks) * BLOCK_SIZE as u64;
        let options = PoolOptions {
            checkpoint_bytes: options.checkpoint_bytes.min(pool_bytes / 16),
            log_keep_bytes: options.log_keep_bytes.min(pool_bytes / 64),
            ..options
        };
        // Space that an earlier process left behind in free units is given back again.
        let swept = disk.next_space(superblock.unit_start(0) * BLOCK_SIZE as u64);
        let freed = Freed::new(if swept.is_some() { 0 } else { superblock.units() });
        let mut core = Core {
            disk,
            allocator: Allocator::new(superblock.units()),
            sequence: superblock.starts << 32,
            superblock,
            cache: Cache::new(options.cache_bytes),
            bases: Bases::default(),
            logical: BTreeMap::new(),
            fetches: Fetches::default(),
            writes_in_place: 0,
            options,
            ring,
            mark: Mark::found(durable.mark),
            durable: DurableState::default(),
            tickets: Tickets::default(),
            freed,
            faults: Faults::default(),
            buffers: Buffers::default(),
        };
        core.claim_ring();
        let (mut replicas, mut wiped, mut lost) = (BTreeMap::new(), Vec::new(), Vec::new());
        let mut corrected = durable;
        crate::clones::creation::read_bases(&mut core, &corrected)?;
        corrected.with_each(|guid, durable| {
            let (replica, stale, found) = recover(&mut core, durable)?;
            replicas.insert(guid, replica);
            wiped.extend(stale);
            lost.push((guid, found));
            Ok::<_, PoolError>(())
        })?;
        for (guid, found) in lost {
            if let Some(replica) = replicas.get_mut(&guid) {
                table::search_lost(replica, &mut core, &found)?;
            }
        }
        crate::clones::creation::check_bases(&mut core, &mut replicas, &mut corrected);
        core.durable = corrected;
        core.restate()?;
        // The findings are on media. Only now may their sources go: stale headers, and the number
        // of the process that wrote them as the last one.
        for block in wiped {
            core.write(block, &[std::io::IoSlice::new(&[0; BLOCK_SIZE])])?;
        }
        core.superblock.write(&core.disk)?;
        core.disk.sync()?;
        while freed::release(&mut core, 0) {}
        core.share_among(replicas.len());
        let mut pool = Pool {
            core,
            replicas,
            starved: false,
            victim: Victim::default(),
            counts_next: true,
            due_work: RefCell::default(),
            look_ahead: LookAhead::default(),
            scrubbing: Scrubbing::default(),
        };
        pool.touch_all();
        creation::drop_unused_bases(&mut pool)?;
        creation::drop_empty_remnants(&mut pool)?;
        Ok(pool)
    }

    /// Whose pool a disk holds, without opening it.
    pub fn peek(disk: &D) -> Result<PoolId, PoolError> {
        Ok(Superblock::read(disk)?.pool)
    }

    pub fn id(&self) -> PoolId {
        self.core.superblock.pool
    }

    /// How often the pool was opened: smaller than what the control plane knows means that the
    /// disk was rolled back.
    pub fn starts(&self) -> u64 {
        self.core.superblock.starts
    }

    /// The highest mark that is on media ([`quoin_replication::recognition`]).
    pub fn mark(&self) -> u64 {
        self.core.mark.on_media
    }

    /// Whether something was promised or acknowledged since the mark was raised last.
    pub fn has_changed_since_mark(&self) -> bool {
        self.core.mark.has_changed()
    }

    /// Whether the next mark was asked for and is not on media yet.
    pub fn is_mark_rising(&self) -> bool {
        self.core.mark.is_rising()
    }

    /// Has the next mark recorded behind all that is there now: by a sync, the record, and
    /// another sync.
    pub fn raise_mark(&mut self) -> Result<(), StoreError> {
        self.core.check_usable()?;
        if !self.core.mark.is_rising() {
            let ticket = self.core.tickets.request();
            self.core.mark.covers(ticket);
        }
        Ok(())
    }

    fn record_mark(&mut self) -> Result<(), StoreError> {
        self.core.append_records([Record::Mark(self.core.mark.on_media + 1)])?;
        let ticket = self.core.tickets.request();
        self.core.mark.recorded(ticket);
        Ok(())
    }

    pub fn syncer(&self) -> Syncer {
        self.core.disk.syncer()
    }

    fn unit_bytes(&self) -> u64 {
        u64::from(self.core.superblock.unit_blocks) * BLOCK_SIZE as u64
    }

    /// Bytes of all units.
    pub fn capacity_bytes(&self) -> u64 {
        u64::from(self.core.allocator.units()) * self.unit_bytes()
    }

    /// Bytes of units that are taken.
    pub fn used_bytes(&self) -> u64 {
        let allocator = &self.core.allocator;
        u64::from(allocator.units() - allocator.free_units()) * self.unit_bytes()
    }

    /// All figures. It walks all replicas.
    pub fn stats(&self) -> PoolStats {
        let unit = self.unit_bytes();
        let allocator = &self.core.allocator;
        PoolStats {
            size_bytes: self.capacity_bytes(),
            free_bytes: u64::from(allocator.free_for_clients()) * unit,
            used_bytes: self.used_bytes(),
            reserve_bytes: u64::from(allocator.reserve_units) * unit,
            replicas: self.replicas.values().filter(|r| !creation::is_remnant(r)).count(),
            starts: self.starts(),
            log_bytes: self.replicas.values().map(|r| r.log.bytes).sum(),
        }
    }

    /// Returns about how many of the used bytes are data, or nodes of maps, that a view still needs.
    pub fn live_bytes(&self) -> u64 {
        self.replicas.values().map(|replica| replica.family.segments.live_bytes()).sum()
    }

    /// Has the space that is dead of a replica given back as background work, though space is plenty; until
    /// that is done, or the next start.
    pub fn reclaim(&mut self, guid: ReplicaGuid) {
        self.touch(guid);
        if let Some(replica) = self.replicas.get_mut(&guid) {
            scheduler::begin_reclaim(replica);
        }
    }

    /// Returns true while space of a replica is given back. Once it is not, nothing more is to be gained.
    pub fn is_reclaiming(&self, guid: ReplicaGuid) -> bool {
        scheduler::is_reclaiming(self, guid)
    }

    /// Leaves what becomes dead of a replica to the clean-up of all.
    pub fn end_reclaim(&mut self, guid: ReplicaGuid) {
        self.touch(guid);
        if let Some(replica) = self.replicas.get_mut(&guid) {
            replica.maintenance.reclaims = false;
        }
    }

    pub fn replica_stats(&self, guid: ReplicaGuid) -> Option<ReplicaStats> {
        let replica = self.replicas.get(&guid)?;
        let segments = &replica.family.segments;
        Some(ReplicaStats {
            allocated_bytes: segments.units() * self.unit_bytes(),
            live_bytes: segments.live_bytes(),
            log_bytes: replica.log.bytes,
            snapshots: replica.snapshots.len(),
        })
    }

    /// Blocks found bad since the last call, by reads, clean-up or scrub.
    pub fn take_bad_blocks(&mut self) -> Vec<BadBlock> {
        let mut bad = std::mem::take(&mut self.core.faults.bad);
        // A node may reach beyond the volume's end.
        bad.retain(|bad| {
            let of =
                self.replicas.get(&bad.replica).filter(|replica| !creation::is_remnant(replica));
            of.is_some_and(|replica| bad.lba < replica.head.volume_blocks)
        });
        bad
    }

    /// Replicas that background work found damaged since the last call, and what of them. Each
    /// is left alone until it was rebuilt; the others go on.
    pub fn take_damaged(&mut self) -> Vec<(ReplicaGuid, &'static str)> {
        std::mem::take(&mut self.core.faults.damaged)
    }

    /// Whether the metadata ring has no room for the records of another replica.
    pub fn is_ring_full(&self) -> bool {
        self.ring_lacks(CREATION_BYTES)
    }

    /// Whether so much more takes the whole state beyond its part of the metadata ring.
    pub(crate) fn ring_lacks(&self, bytes: usize) -> bool {
        let limit = self.core.ring.capacity() / 100 * RING_FULL_PERCENT;
        self.core.durable.encoded_len() + bytes > limit
    }

    /// Why the pool takes no more writes, if it does not.
    pub fn failure(&self) -> Option<IoFault> {
        self.core.faults.failed
    }

    pub fn identity(&self, guid: ReplicaGuid) -> Option<&ReplicaIdentity> {
        self.replicas.get(&guid).map(|r| &r.identity)
    }

    /// The disk, for simulators and tools.
    pub fn disk(&self) -> &D {
        &self.core.disk
    }

    /// Removes a replica, or a remnant, with all that it has.
    pub(crate) fn remove(&mut self, guid: ReplicaGuid) -> Result<(), StoreError> {
        self.core.record(Record::Delete(guid))?;
        self.victim.set(None);
        let ticket = self.core.tickets.request().0;
        self.touch(guid);
        self.drop_calls(guid);
        if let Some(Replica { family, maintenance, .. }) = self.replicas.remove(&guid) {
            for (unit, units) in maintenance.into_frees() {
                self.core.freed.add(ticket, unit, units);
            }
            self.core.freed.add_all(ticket, family.segments.leave());
        }
        self.core.logical.remove(&guid);
        self.core.share_among(self.replicas.len());
        Ok(())
    }

    /// No call that waits for a read of the disk is made again for this replica.
    pub(crate) fn drop_calls(&mut self, guid: ReplicaGuid) {
        let owners =
            [Owner::Sessions, Owner::Copying, Owner::Background, Owner::Scrub].map(|of| of(guid));
        for owner in owners {
            self.core.fetches.drop_calls(owner);
        }
    }

    /// Records what this sync was needed for, and frees what that allows.
    fn record_what_waited(&mut self, ticket: SyncTicket) {
        if self.core.mark.synced(ticket)
            && let Err(StoreError::Io(fault)) = self.record_mark()
        {
            self.core.faults.failed = Some(fault);
            return;
        }
        scheduler::release_some(self);
        if let Err(StoreError::Io(fault)) = creation::drop_unused_bases(self) {
            self.core.faults.failed = Some(fault);
            return;
        }
        for guid in self.core.tickets.written.end() {
            // How much may be folded follows what is durable.
            self.touch(guid);
            if let Some(replica) = self.replicas.get_mut(&guid) {
                replica.synced.finish();
            }
        }
        for guid in self.core.tickets.committing.end() {
            self.touch(guid);
            let Some(replica) = self.replicas.get_mut(&guid) else { continue };
            if let Err(StoreError::Io(fault)) =
                checkpoint::finish_commit(replica, &mut self.core, ticket.0)
            {
                self.core.faults.failed = Some(fault);
            }
        }
    }

    /// Notes that a replica is used now, which may change what is due of it.
    pub(crate) fn touch(&self, guid: ReplicaGuid) {
        self.due_work.borrow_mut().touch(guid);
    }

    pub(crate) fn touch_all(&self) {
        let mut due_work = self.due_work.borrow_mut();
        self.replicas.keys().for_each(|guid| due_work.touch(*guid));
    }

    /// Work that is due of all replicas as they are now.
    pub(crate) fn due_work(&self) -> Ref<'_, DueWork> {
        // A call inside of another finds nothing to update.
        let is_stale = self.due_work.borrow().is_stale();
        if is_stale {
            self.due_work.borrow_mut().update(&self.replicas, &self.core.options);
        }
        let due_work = self.due_work.borrow();
        debug_assert!(
            due_work.agrees_with(&self.replicas, &self.core.options),
            "a replica was changed without a note of it"
        );
        due_work
    }

    /// Returns true if the pool can take little more: next to nothing is free, and no work that is done
    /// or waited for gains anything. `was`: the last answer, for hysteresis.
    pub fn is_short(&self, was: bool) -> bool {
        let margin = scheduler::short_below_units(self);
        let free = self.core.allocator.free_for_clients();
        let gains = || {
            scheduler::coming_units(self) > 0
                || !self.starved && scheduler::next_step(self).is_some()
        };
        match was {
            // Where nothing more is gained, what there is has to do.
            true => free < margin || free < 2 * margin && gains(),
            false => free < margin && !gains(),
        }
    }

    /// What targets may sequence; `was`: what they were told last, for hysteresis. It is told before
    /// they hear of what was applied since it was told last. So what they still sequence until
    /// then is within the shares that are kept.
    pub fn room(&self, was: RoomGrant) -> RoomGrant {
        let allocator = &self.core.allocator;
        let margin = scheduler::short_below_units(self);
        let enough = if was.takes == Takes::Writes { margin } else { margin + 1 };
        let takes = match () {
            _ if !allocator.grants_holes() => Takes::Nothing,
            _ if allocator.free_for_clients() < enough => Takes::Holes,
            _ => Takes::Writes,
        };
        RoomGrant { takes, share_blocks: allocator.shares.share_blocks }
    }

    /// Bytes that are free before the pool grants no more room for writes.
    pub fn granted_bytes(&self) -> u64 {
        let free = self.core.allocator.free_for_clients() + 1;
        let units = free.saturating_sub(scheduler::short_below_units(self));
        u64::from(units) * self.unit_bytes()
    }

    /// Looks whether the file below was cut, or has lost its name.
    pub fn medium(&self) -> Medium {
        self.core.disk.medium()
    }

    /// Looks whether the file system below is short of room, or has it again.
    pub fn look_below(&mut self) {
        self.core.look_below();
    }

    /// Returns true if the file system below is short of room, and not the pool.
    pub fn is_short_below(&self) -> bool {
        self.core.allocator.short_below
    }

    /// Replicas that were set aside for what could not be read are worked on again: now and then
    /// it can be.
    pub fn look_again(&mut self) {
        self.victim.set(None);
        self.touch_all();
        for replica in self.replicas.values_mut() {
            replica.maintenance.try_again();
            replica.maintenance.commit_waits = false;
        }
        // Segments that could not be read wait for the next commit. Where they are all that could
        // give room there is none: a full pool takes nothing that would need it.
        let short =
            scheduler::percent(self, self.core.allocator.free_for_clients()) < CLEAN_BELOW_PERCENT;
        if short && scheduler::next_step(self).is_none() {
            for replica in self.replicas.values_mut() {
                replica.family.segments.try_again();
            }
            self.touch_all();
            self.victim.set(None);
        }
    }

    /// Whether the next background work waits for reads of the disk.
    pub fn background_waits(&self) -> bool {
        look_ahead::waits_for_disk(self)
    }

    /// Has it wait no more, as the disk does not answer; the replica that it is of has no background
    /// work until [`Pool::look_again`].
    pub fn give_up_background_wait(&mut self) -> Option<ReplicaGuid> {
        look_ahead::give_up(self)
    }

    /// Writes everything that is foldable and recorded in one go: for a clean shutdown, so that
    /// the next start has nothing to replay. Syncs on this thread.
    pub fn settle(&mut self) -> Result<(), StoreError> {
        self.victim.set(None);
        self.touch_all();
        for replica in self.replicas.values_mut() {
            if !replica.is_prepared() {
                checkpoint::run_now(replica, &mut self.core, replica.stable.0)?;
            }
            replica.family.segments.recorded.write_drifted();
        }
        // Nodes, then the record, then what it frees.
        for _ in 0..3 {
            for replica in self.replicas.values_mut() {
                while replica.maintenance.dirty
                    && !replica.is_prepared()
                    && replica.maintenance.commit.is_none()
                {
                    checkpoint::begin_commit(replica, &mut self.core)?;
                }
            }
            self.touch_all();
            self.core.tickets.request();
            use crate::api::ReplicaPool;
            if let Some(ticket) = self.sync_wanted() {
                let result = self.core.disk.sync();
                self.sync_finished(ticket, result)?;
            }
        }
        Ok(())
    }

    /// Reads about `budget_bytes` of a replica from its media; bad blocks come with
    /// [`Pool::take_bad_blocks`].
    pub fn scrub(
        &mut self,
        guid: ReplicaGuid,
        at: ScrubAt,
        budget_bytes: u64,
    ) -> Result<Scrubbed, StoreError> {
        self.scrub_as(guid, at, budget_bytes, false)
    }

    /// Scrubs as [`Pool::scrub`] without waiting for the disk: `Pending` where it lacks something, which
    /// is fetched beside.
    pub fn try_scrub(
        &mut self,
        guid: ReplicaGuid,
        at: ScrubAt,
        budget_bytes: u64,
    ) -> Result<Scrubbed, StoreError> {
        self.scrub_as(guid, at, budget_bytes, true)
    }

    /// Whether a replica shows a base that no scrub of its keeper reads: the keeper is gone, or the snapshot
    /// is, or a rebuild gave the keeper another copy of it.
    fn shows_unread_base(&self, guid: ReplicaGuid) -> bool {
        let first = self.replicas.get(&guid).and_then(|replica| replica.family.relatives.base);
        self.core.bases.line(first).any(|(id, base)| {
            let keeper = self.replicas.get(&id.replica);
            if mutant::is("base-without-its-snapshot-not-scrubbed") {
                return keeper.is_none_or(creation::is_remnant);
            }
            let mut snapshots = keeper.iter().flat_map(|keeper| &keeper.folded.snapshots);
            !snapshots.any(|s| s.info.id == id.snapshot && s.root == base.root)
        })
    }

    fn scrub_as(
        &mut self,
        guid: ReplicaGuid,
        at: ScrubAt,
        budget_bytes: u64,
        may_wait: bool,
    ) -> Result<Scrubbed, StoreError> {
        let mut done = Scrubbed { next: Some(at), ..Scrubbed::default() };
        self.touch(guid);
        let reads_bases = self.shows_unread_base(guid);
        let Some(replica) = self.replicas.get_mut(&guid) else {
            return Ok(Scrubbed::default());
        };
        self.core.check_usable()?;
        if at == ScrubAt::default() {
            // A new pass reads all of it.
            self.scrubbing.listing = None;
        }
        while done.read_bytes < budget_bytes.max(1)
            && let Some(at) = done.next
        {
            let (read_bytes, known) = (done.read_bytes, self.core.faults.bad.len());
            self.scrubbing.begin(&mut self.core, Owner::Scrub(guid), may_wait);
            let listing = &mut self.scrubbing.listing;
            let part =
                scrub::scrub_part(replica, &mut self.core, at, reads_bases, &mut done, listing);
            if let Err(lacking) = self.scrubbing.end(&mut self.core) {
                // The part is done anew, and finds the same.
                self.core.faults.bad.truncate(known);
                done.read_bytes = read_bytes;
                let is_step = done.read_bytes > 0 || done.headers > 0;
                return if is_step { Ok(done) } else { Err(lacking) };
            }
            done.next = part?;
        }
        Ok(done)
    }

    /// Compares both copies of superblock and metadata ring with what they must say, and writes
    /// them again where one does not; how many were bad.
    pub fn scrub_metadata(&mut self) -> Result<u32, StoreError> {
        let (mut bad, mut at) = (0, None);
        loop {
            let done = scrub::scrub_metadata(&mut self.core, at)?;
            bad += done.bad;
            match done.next {
                Some(next) => at = Some(next),
                None => return Ok(bad),
            }
        }
    }

    /// Does a part of that without waiting for the disk, from this place on; `None`: from the beginning.
    pub fn try_scrub_metadata(&mut self, at: Option<u64>) -> Result<MetadataScrubbed, StoreError> {
        self.scrubbing.begin(&mut self.core, Owner::Scrub(ReplicaGuid(0)), true);
        let done = scrub::scrub_metadata(&mut self.core, at);
        self.scrubbing.end(&mut self.core)?;
        done
    }
}

impl<D: Disk> ReplicaPool for Pool<D> {
    type Handle<'a>
        = Handle<'a, D>
    where
        D: 'a;

    fn replicas(&self) -> Vec<ReplicaGuid> {
        let there = self.replicas.iter().filter(|(_, replica)| !creation::is_remnant(replica));
        there.map(|(guid, _)| *guid).collect()
    }

    fn replica(&mut self, guid: ReplicaGuid) -> Option<Handle<'_, D>> {
        self.touch(guid);
        let replica =
            self.replicas.get_mut(&guid).filter(|replica| !creation::is_remnant(replica))?;
        Some(Handle { core: &mut self.core, replica })
    }

    fn create(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
    ) -> Result<(), StoreError> {
        self.core.check_usable()?;
        let guid = identity.guid;
        if self.is_retired(guid) || self.replicas.contains_key(&guid) {
            return Err(StoreError::Rule("a GUID is born once"));
        }
        if blocks == 0 || blocks > quoin_types::VOLUME_BLOCKS_MAX {
            return Err(StoreError::Rule("a volume's size must be 1 to 2^44 blocks"));
        }
        if self.ring_lacks(identity.volume_spec.len() + CREATION_BYTES) {
            return Err(StoreError::RingFull);
        }
        let replica =
            Replica::new(identity.clone(), meta.clone(), blocks, self.core.superblock.unit_blocks);
        let checkpoint = Checkpoint {
            head: replica.folded.head.clone(),
            sequence: self.core.sequence,
            ..Checkpoint::default()
        };
        // A single record, so that half a replica is never found.
        self.core.record_all([
            Record::Create(identity),
            Record::Meta(guid, Box::new(meta), Lsn::ZERO),
            Record::Checkpoint(guid, checkpoint.encode()),
        ])?;
        self.replicas.insert(guid, replica);
        self.core.share_among(self.replicas.len());
        self.touch(guid);
        Ok(())
    }

    fn create_clone(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
        source: &CloneSource,
    ) -> Result<Cloned, StoreError> {
        creation::make_clone(self, identity, meta, blocks, source)
    }

    fn flatten(&mut self, guid: ReplicaGuid) {
        self.touch(guid);
        if let Some(replica) = self.replicas.get_mut(&guid) {
            flatten::begin(replica);
        }
    }

    fn is_clone(&self, guid: ReplicaGuid) -> bool {
        let is_it = |replica: &Replica| flatten::shows_a_base(replica);
        self.replicas.get(&guid).is_some_and(is_it)
    }

    fn describe(&mut self, guid: ReplicaGuid, volume_spec: Bytes) -> Result<(), StoreError> {
        self.core.check_usable()?;
        if self.ring_lacks(volume_spec.len()) {
            return Err(StoreError::RingFull);
        }
        let Some(replica) = self.replicas.get_mut(&guid) else {
            return Err(StoreError::Rule("what is described must exist"));
        };
        self.core.record(Record::Describe(guid, volume_spec.clone()))?;
        replica.identity.volume_spec = volume_spec;
        Ok(())
    }

    fn delete(&mut self, guid: ReplicaGuid) -> Result<bool, StoreError> {
        let Some(replica) =
            self.replicas.get(&guid).filter(|replica| !creation::is_remnant(replica))
        else {
            return Ok(false);
        };
        let is_kept = creation::keeps_bases(replica);
        let mut shown: Vec<BaseId> = replica.family.relatives.base.into_iter().collect();
        if let Some(replica) = self.replicas.get_mut(&guid) {
            shown.extend(replica.maintenance.take_given_up_bases());
        }
        let ring_bytes = self.core.ring.capacity();
        self.core.durable.make_room_for_deleted(guid, ring_bytes);
        match is_kept && !mutant::is("deleted-with-what-clones-show") {
            true => creation::leave_remnant(self, guid)?,
            false => self.remove(guid)?,
        }
        shown.into_iter().for_each(|base| self.core.bases.end_use(base));
        creation::drop_unused_bases(self)?;
        Ok(true)
    }

    fn is_retired(&self, guid: ReplicaGuid) -> bool {
        let is_left = |replica: &Replica| creation::is_remnant(replica);
        self.core.durable.retired.contains(&guid) || self.replicas.get(&guid).is_some_and(is_left)
    }

    fn retired(&self) -> Vec<ReplicaGuid> {
        self.core.durable.retired.iter().copied().collect()
    }

    fn request_sync(&mut self) -> SyncTicket {
        self.core.tickets.request()
    }

    fn sync_wanted(&mut self) -> Option<SyncTicket> {
        if self.core.faults.failed.is_some() {
            return None;
        }
        let ticket = self.core.tickets.begin()?;
        for guid in self.core.tickets.written.begun() {
            if let Some(replica) = self.replicas.get_mut(guid) {
                replica.synced.syncing = replica.head.position.lsn;
            }
        }
        Some(ticket)
    }

    fn sync_finished(
        &mut self,
        ticket: SyncTicket,
        result: Result<(), IoFault>,
    ) -> Result<(), StoreError> {
        self.core.tickets.finish(result.is_ok().then_some(ticket));
        if !self.core.tickets.committing.is_empty() {
            self.victim.set(None);
        }
        if let Err(fault) = result {
            if !mutant::is("sync-error-retried") {
                // The kernel may have dropped writes of any kind: nothing after them may count.
                self.core.faults.failed = Some(fault);
            }
            return Err(StoreError::Io(fault));
        }
        self.core.ring_synced(ticket);
        self.record_what_waited(ticket);
        if mutant::is("failed-record-not-told") {
            return Ok(());
        }
        self.core.check_usable()
    }

    fn take_served(&mut self) -> Vec<ReplicaGuid> {
        self.core.tickets.take_served()
    }

    fn reader(&self) -> Option<Reader> {
        self.core.disk.reader()
    }

    fn read_ring(&self) -> std::io::Result<ReadRing> {
        self.core.disk.read_ring()
    }

    fn next_fetch(&mut self) -> Option<Fetch> {
        self.core.fetches.next_fetch()
    }

    fn fetched(&mut self, id: u64, result: Result<Bytes, IoFault>) {
        self.core.fetches.arrived(id, result);
    }

    fn take_fetched(&mut self) -> Option<(Owner, FetchTicket)> {
        self.core.fetches.take_ready()
    }

    fn background(&mut self, budget_bytes: u64) -> Result<bool, StoreError> {
        scheduler::work(self, budget_bytes)
    }

    fn background_due(&self) -> Due {
        scheduler::due(self)
    }

    fn cookie(&self) -> BootCookie {
        self.core.disk.cookie()
    }
}

/// Kinds of calls that copy, in their names.
const VERIFY: u8 = 0;
const FETCH: u8 = 1;
const PULL: u8 = 2;
const BEGIN: u8 = 3;
const FEED: u8 = 4;
const REPAIR: u8 = 5;
const MEND: u8 = 6;

/// A replica of a pool.
pub struct Handle<'a, D> {
    core: &'a mut Core<D>,
    replica: &'a mut Replica,
}

impl<D: Disk> ReplicaStore for Handle<'_, D> {
    fn identity(&self) -> &ReplicaIdentity {
        &self.replica.identity
    }

    fn meta(&self) -> &ReplicaMeta {
        &self.replica.meta
    }

    fn put_meta(&mut self, meta: ReplicaMeta) -> Result<(), StoreError> {
        let guid = self.replica.identity.guid;
        let watermark = self.replica.stable.min(self.replica.synced.durable);
        self.core.record(Record::Meta(guid, Box::new(meta.clone()), watermark))?;
        self.replica.meta = meta;
        Ok(())
    }

    fn state(&self) -> StoreState {
        self.replica.state()
    }

    fn epoch_table(&self) -> Vec<EpochEnd> {
        self.replica.head.epoch_table.clone()
    }
    fn clients(&self) -> ClientTable {
        self.replica.head.clients.clone()
    }

    fn snapshots(&self) -> Vec<SnapshotInfo> {
        self.replica.snapshots.clone()
    }

    fn snapshot_heads(&self) -> Vec<SnapshotHead> {
        self.replica.snapshot_heads()
    }

    fn append(&mut self, entries: &[SharedEntry]) -> Result<(), StoreError> {
        self.replica.append(self.core, entries)
    }

    fn owe_before(&mut self, epoch: Epoch) {
        self.replica.owed_before = epoch;
    }

    fn truncate(&mut self, keep: Lsn) -> Result<(), StoreError> {
        self.replica.truncate(self.core, keep)
    }

    fn set_stable(&mut self, stable: Lsn) {
        let position = self.replica.head.position.lsn;
        self.replica.stable = self.replica.stable.max(stable.min(position));
    }

    fn request_sync(&mut self) -> SyncTicket {
        self.replica.family.flushes.asked();
        self.core.tickets.request_for(self.replica.identity.guid)
    }

    fn read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.replica.read(self.core, view, lba, blocks, want_data, out)
    }

    fn try_read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let before = out.len();
        let name = name_of((view, lba, blocks, want_data));
        self.core.fetches.begin(Owner::Sessions(self.replica.identity.guid), name);
        let read = self.replica.read(self.core, view, lba, blocks, want_data, out);
        let Some(ticket) = self.core.fetches.end() else { return read };
        out.truncate(before);
        Err(StoreError::Pending(ticket))
    }

    fn verify(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        if !self.core.fetches.is_open() {
            // It may have waited for the disk before, and reads all of it anew.
            let owner = Owner::Copying(self.replica.identity.guid);
            self.core.fetches.give_up(owner, name_of((VERIFY, view, lba, blocks)));
        }
        repair::verify(self.replica, self.core, view, lba, blocks, bytes_max, note, out)
    }

    fn try_verify(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        bytes_max: u32,
        note: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        let before = out.len();
        let name = name_of((VERIFY, view, lba, blocks));
        self.core.fetches.begin(Owner::Copying(self.replica.identity.guid), name);
        let verified = self.verify(view, lba, blocks, bytes_max, note, out);
        let Some(ticket) = self.core.fetches.end() else { return verified };
        out.truncate(before);
        Err(StoreError::Pending(ticket))
    }

    fn fetch(
        &mut self,
        after: Lsn,
        bytes_max: u32,
    ) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        if after.0 + 1 < self.replica.log.first_lsn() {
            return Ok(None);
        }
        let (mut entries, mut bytes, mut payloads) = (Vec::new(), 0, 0);
        let mut lacking = Ok(());
        for lsn in after.0 + 1..self.replica.log.next_lsn() {
            let entry = match self.replica.entry(self.core, lsn) {
                // What later entries lack is fetched at the same time.
                Err(error @ StoreError::Pending(_)) if bytes <= bytes_max as usize => {
                    let blocks = self.replica.log.get(lsn).map_or(0, |record| record.blocks);
                    bytes += blocks as usize * BLOCK_SIZE;
                    lacking = Err(error);
                    continue;
                }
                entry => entry?,
            };
            bytes += entry.weight();
            payloads += payload(&entry).len();
            let is_full = bytes > bytes_max as usize || payloads > FETCHED_PAYLOADS_MAX;
            if is_full && !entries.is_empty() {
                break;
            }
            entries.push(entry);
        }
        lacking.map(|()| Some(entries))
    }

    fn try_fetch(
        &mut self,
        after: Lsn,
        bytes_max: u32,
    ) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        let name = name_of((FETCH, after, bytes_max));
        self.core.fetches.begin(Owner::Copying(self.replica.identity.guid), name);
        let fetched = self.fetch(after, bytes_max);
        self.core.fetches.end().map_or(fetched, |ticket| Err(StoreError::Pending(ticket)))
    }

    fn pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError> {
        sending::pull(self.replica, self.core, session, view, from, cursor, bytes_max, want_data)
    }

    fn try_pull(
        &mut self,
        session: u64,
        view: ReadView,
        from: Lsn,
        cursor: u64,
        bytes_max: u32,
        want_data: bool,
    ) -> Result<Option<PullChunk>, StoreError> {
        let name = name_of((PULL, session, view, cursor));
        self.core.fetches.begin(Owner::Copying(self.replica.identity.guid), name);
        let pulled = sending::pull(
            self.replica,
            self.core,
            session,
            view,
            from,
            cursor,
            bytes_max,
            want_data,
        );
        self.core.fetches.end().map_or(pulled, |ticket| Err(StoreError::Pending(ticket)))
    }

    fn unpin(&mut self, session: u64) {
        self.replica.pins.remove(&session);
        self.replica.maintenance.fold_for_increment = None;
        let guid = self.replica.identity.guid;
        self.core.fetches.drop_calls(Owner::Sessions(guid));
        self.core.fetches.drop_calls(Owner::Copying(guid));
    }

    fn look_ahead(&mut self, upcoming: Upcoming<'_>) -> Result<(), StoreError> {
        if !self.core.disk.may_lack() {
            return Ok(());
        }
        let (replica, core) = (&mut *self.replica, &mut *self.core);
        let name = match &upcoming {
            Upcoming::Begin { from } => name_of((BEGIN, from)),
            Upcoming::Feed { .. } | Upcoming::Merge => name_of(FEED),
            Upcoming::Repair { view, lba } => name_of((REPAIR, view, lba)),
            Upcoming::Mend { view, lba, .. } => name_of((MEND, view, lba)),
        };
        core.fetches.begin(Owner::Copying(replica.identity.guid), name);
        // Whatever else is wrong with it the work itself comes to.
        let _ = match upcoming {
            Upcoming::Begin { from } => shadow::look_ahead_of_begin(replica, core, from),
            Upcoming::Feed { slots } => shadow::look_ahead_of_feed(replica, core, slots),
            Upcoming::Merge => shadow::look_ahead_of_end(replica, core),
            Upcoming::Repair { view, lba } => repair::look_ahead(replica, core, view, lba),
            Upcoming::Mend { view, lba, blocks } => {
                repair::look_ahead_of_mend(replica, core, view, lba, blocks)
            }
        };
        core.fetches.end().map_or(Ok(()), |ticket| Err(StoreError::Pending(ticket)))
    }

    fn shadow(&self) -> Option<(u64, Lsn, u64)> {
        self.replica.shadow.as_ref().map(|s| s.progress())
    }

    fn shadow_cut(&self) -> Option<Lsn> {
        self.replica.shadow.as_ref().map(|s| s.cut())
    }

    fn increment_begin(&mut self, rebuild: u64, from: Lsn) -> Result<bool, StoreError> {
        shadow::begin(self.replica, self.core, rebuild, from)
    }

    fn increment_feed(
        &mut self,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
    ) -> Result<(), StoreError> {
        shadow::feed(self.replica, self.core, rebuild, slots, cursor)
    }

    fn increment_cut(
        &mut self,
        rebuild: u64,
        snapshot: SnapshotInfo,
        head: &CutHead,
    ) -> Result<(), StoreError> {
        shadow::cut(self.replica, self.core, rebuild, snapshot, head)
    }

    fn increment_prepare(&mut self, rebuild: u64, end: &IncrementEnd) -> Result<(), StoreError> {
        shadow::prepare(self.replica, self.core, rebuild, end)
    }

    fn increment_flip(&mut self, rebuild: u64) -> Result<(), StoreError> {
        shadow::flip(self.replica, self.core, rebuild)
    }

    fn repair(
        &mut self,
        view: ReadView,
        lba: u64,
        version: Lsn,
        crc: u32,
        data: &bytes::Bytes,
    ) -> Result<bool, StoreError> {
        repair::repair(self.replica, self.core, view, lba, version, crc, data)
    }

    fn mend(&mut self, view: ReadView, lba: u64, slots: &[Slot]) -> Result<bool, StoreError> {
        repair::mend(self.replica, self.core, view, lba, slots)
    }
}
