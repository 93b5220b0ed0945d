//! One pool's storage as the world drives it: the model of the store, or the real one.
//!
//! The model has no disk under it; its faults are put in at the trait ([`Faulty`]) and its power
//! cut keeps a prefix of operations. The real pool gets its faults from [`crate::disk::SimDisk`].

use bytes::Bytes;
use quoin_replication::recognition::PoolCounts;
use quoin_replication::replica::store::{
    BootCookie, FetchTicket, IoFault, PullChunk, ReplicaIdentity, ReplicaMeta, ReplicaStore,
    StoreError, StoreState, SyncTicket, Upcoming,
};
use quoin_store::disk::fetch::{Fetch, Owner};
use quoin_store::model::ModelPool;
use quoin_store::{Due, ReplicaPool};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{
    BadCopy, CutHead, EpochEnd, IncrementEnd, ReadView, RoomGrant, Slot, SnapshotHead, SnapshotInfo,
};
use quoin_types::{ClientTable, Epoch, Lsn, ReplicaGuid};

use crate::disk::{DiskCounts, Failing, Lie};
use crate::random::Random;
use crate::source::Source;

/// How a pool lost its process or its power.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outage {
    /// The process died; what the kernel holds is still there.
    Process,
    /// The power went.
    Power,
    /// A write or a sync failed and the pool is opened anew from its media.
    DiskFailed,
}

/// Use of a pool's space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    pub unit_bytes: u64,
    pub used_bytes: u64,
    /// In segments of its replicas.
    pub allocated_bytes: u64,
    /// Bytes that a view of a replica needs.
    pub live_bytes: u64,
    /// Replicas that were emptied.
    pub replicas: u64,
    /// Of the allocated bytes, those of others: retired ones, and newcomers that were taken back.
    pub left_bytes: u64,
}

/// Result of a step of a scrub.
#[derive(Clone, Copy, Default, Debug)]
pub struct Scrubbed {
    /// Where to go on; `None`: the replica was read to its end.
    pub next: Option<(u64, u64)>,
    pub read_bytes: u64,
}

/// A pool's storage. All times are the caller's; nothing here waits.
pub trait Storage {
    fn create(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
    ) -> Result<(), StoreError>;
    /// Makes a replica of the source, and the replica as a clone of its snapshot.
    fn create_clone(
        &mut self,
        source: &Source,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
        random: &mut Random,
    ) -> Result<(), StoreError>;
    fn delete(&mut self, guid: ReplicaGuid) -> Result<(), StoreError>;
    /// Runs `work` on the replica; false if the pool does not have it (or is not open).
    fn with(&mut self, guid: ReplicaGuid, work: &mut dyn FnMut(&mut dyn ReplicaStore)) -> bool;
    fn cookie(&self) -> BootCookie;

    /// A sync that is to begin now.
    fn sync_begin(&mut self) -> Option<SyncTicket>;
    fn sync_end(&mut self, ticket: SyncTicket, random: &mut Random) -> Result<(), StoreError>;
    /// Replicas that asked for a sync which ended well since the last call.
    fn take_served(&mut self) -> Vec<ReplicaGuid>;
    /// A disk that says that the sync is done and did nothing: for a mutant.
    fn sync_lie(&mut self, ticket: SyncTicket);
    /// Loses everything that was not synced and shows the same boot as before: for a mutant.
    fn forget(&mut self);
    /// Opens the pool again after an outage; an error is tried again later. `withdraw`: it is
    /// written on media first that no replica is known to hold everything it ever applied.
    fn reopen(
        &mut self,
        outage: Outage,
        withdraw: bool,
        random: &mut Random,
    ) -> Result<(), StoreError>;
    /// A read of the disk to begin now, which nobody waits for.
    fn fetch_begin(&mut self) -> Option<Fetch> {
        None
    }
    /// It ends.
    fn fetch_end(&mut self, _id: u64) {}
    /// Reads that the pool's thread waited for since the last call.
    fn take_blocked_reads(&mut self) -> u64 {
        0
    }
    /// The next call that can be made again, and whose it is.
    fn take_fetched(&mut self) -> Option<(Owner, FetchTicket)> {
        None
    }
    /// Checkpoints, clean-up and the like, between events.
    fn background(&mut self) -> Result<(), StoreError>;
    fn wants_background(&self) -> bool;
    /// Now and then what the disk refused to read can be read.
    fn look_again(&mut self) {}

    fn set_failing(&mut self, failing: Failing);
    /// The next write is lost, or goes to another place. False: no such disk here.
    fn lie(&mut self, _lie: Lie) -> bool {
        false
    }
    /// Reads about so many bytes of a replica from media, from a stage and a cursor in it on.
    fn scrub(
        &mut self,
        _guid: ReplicaGuid,
        _at: (u64, u64),
        _budget_bytes: u64,
    ) -> Result<Scrubbed, StoreError> {
        Ok(Scrubbed::default())
    }
    /// Blocks found bad since the last call.
    fn take_bad_blocks(&mut self) -> Vec<(ReplicaGuid, BadCopy)> {
        Vec::new()
    }
    /// Remembers the disk as it is now, to be rolled back to.
    fn keep_image(&mut self) {}
    /// Puts the remembered image back after the pool was opened so often more, and tells the
    /// counts of the state that is gone. `None`: there is no image, or nothing changed since.
    /// After an error the pool is closed.
    fn roll_back(&mut self, _more_starts: u64) -> Result<Option<PoolCounts>, StoreError> {
        Ok(None)
    }
    /// An empty disk in the place of one that cannot be read any more.
    fn replace(&mut self, _random: &mut Random) -> Result<(), StoreError> {
        Ok(())
    }
    /// The room that the pool grants; `was`: what it granted last.
    fn room(&self, _was: RoomGrant) -> RoomGrant {
        RoomGrant::UNBOUNDED
    }
    /// Returns the use of the space once this replica was emptied and all useful clean-up is done and recorded; `None`: this storage
    /// has no space that could be lost.
    fn space_at_rest(&mut self, _emptied: ReplicaGuid) -> Result<Option<Space>, StoreError> {
        Ok(None)
    }
    /// How often the pool was opened, as its disk says.
    fn starts(&self) -> u64 {
        0
    }
    /// The highest mark that is on the media of the pool.
    fn mark(&self) -> u64 {
        0
    }
    /// Returns true if something was promised or acknowledged since the mark was raised last.
    fn has_changed_since_mark(&self) -> bool {
        false
    }
    /// Returns true if the next mark was asked for and is not on media yet.
    fn is_mark_rising(&self) -> bool {
        false
    }
    fn raise_mark(&mut self) -> Result<(), StoreError> {
        Ok(())
    }
    /// A rule of the store that was broken at the trait since the last call.
    fn take_broken(&mut self) -> Option<(&'static str, String)> {
        None
    }
    fn set_full(&mut self, full: bool);
    /// Spoils a random block of data at rest; false if there was none to spoil.
    fn rot(&mut self, guid: ReplicaGuid, random: &mut Random) -> bool;
    fn counts(&self) -> DiskCounts;
}

/// Faults at the store's trait, for the model.
#[derive(Clone, Default, Debug)]
pub(crate) struct Faults {
    pub failing: Failing,
    pub full: bool,
    /// Entries of epochs before this one were owed to the replica when its session began.
    pub owed_before: Epoch,
    pub errors: u64,
    /// Parts of increments and repairs that waited for the disk.
    pub changes_waited: u64,
    /// Rule that the store broke, with the details.
    pub broken: Option<(&'static str, String)>,
}

pub(crate) struct Faulty<'a, S> {
    pub inner: S,
    pub faults: &'a mut Faults,
}

impl<S> Faulty<'_, S> {
    fn write(&mut self, room_needed: bool) -> Result<(), StoreError> {
        if self.faults.failing.writes {
            self.faults.errors += 1;
            return Err(StoreError::Io(IoFault { operation: "write", offset: 0, errno: 5 }));
        }
        if room_needed && self.faults.full { Err(StoreError::Full) } else { Ok(()) }
    }

    fn reading(&mut self) -> Result<(), StoreError> {
        if self.faults.failing.reads {
            self.faults.errors += 1;
            return Err(StoreError::Io(IoFault { operation: "read", offset: 0, errno: 5 }));
        }
        Ok(())
    }
}

impl<S: ReplicaStore> ReplicaStore for Faulty<'_, S> {
    fn identity(&self) -> &ReplicaIdentity {
        self.inner.identity()
    }
    fn meta(&self) -> &ReplicaMeta {
        self.inner.meta()
    }
    fn put_meta(&mut self, meta: ReplicaMeta) -> Result<(), StoreError> {
        self.write(false)?;
        self.inner.put_meta(meta)
    }
    fn state(&self) -> StoreState {
        self.inner.state()
    }
    fn epoch_table(&self) -> Vec<EpochEnd> {
        self.inner.epoch_table()
    }
    fn clients(&self) -> ClientTable {
        self.inner.clients()
    }
    fn snapshots(&self) -> Vec<SnapshotInfo> {
        self.inner.snapshots()
    }
    fn snapshot_heads(&self) -> Vec<SnapshotHead> {
        self.inner.snapshot_heads()
    }
    fn append(&mut self, entries: &[SharedEntry]) -> Result<(), StoreError> {
        // The reserve takes Views and deletes of snapshots in a full pool, and what was owed to it
        // before its session began.
        let (full, owed) = (self.faults.full, self.faults.owed_before);
        let fits = |e: &&SharedEntry| !full || e.data.is_empty() || e.epoch < owed;
        let taken = entries.iter().take_while(fits).count();
        self.write(false)?;
        self.inner.append(&entries[..taken])?;
        self.write(taken < entries.len())
    }
    fn owe_before(&mut self, epoch: Epoch) {
        self.faults.owed_before = epoch;
        self.inner.owe_before(epoch);
    }
    fn truncate(&mut self, keep: Lsn) -> Result<(), StoreError> {
        self.write(false)?;
        let stable = self.inner.state().stable;
        self.inner.truncate(keep)?;
        if keep < stable {
            let detail = format!("a log that is stable up to {stable} was cut to {keep}");
            self.faults.broken = Some(("StableNeverCut", detail));
        }
        Ok(())
    }
    fn set_stable(&mut self, stable: Lsn) {
        self.inner.set_stable(stable);
    }
    fn request_sync(&mut self) -> SyncTicket {
        self.inner.request_sync()
    }
    fn read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.reading()?;
        self.inner.read(view, lba, blocks, want_data, out)
    }
    fn try_read(
        &mut self,
        view: ReadView,
        lba: u64,
        blocks: u32,
        want_data: bool,
        out: &mut Vec<Slot>,
    ) -> Result<(), StoreError> {
        self.reading()?;
        self.inner.try_read(view, lba, blocks, want_data, out)
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
        self.reading()?;
        self.inner.verify(view, lba, blocks, bytes_max, note, out)
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
        self.reading()?;
        self.inner.try_verify(view, lba, blocks, bytes_max, note, out)
    }
    fn fetch(
        &mut self,
        after: Lsn,
        bytes_max: u32,
    ) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        self.reading()?;
        self.inner.fetch(after, bytes_max)
    }
    fn try_fetch(
        &mut self,
        after: Lsn,
        bytes_max: u32,
    ) -> Result<Option<Vec<SharedEntry>>, StoreError> {
        self.reading()?;
        self.inner.try_fetch(after, bytes_max)
    }
    fn look_ahead(&mut self, upcoming: Upcoming<'_>) -> Result<(), StoreError> {
        let looked = self.inner.look_ahead(upcoming);
        self.faults.changes_waited += u64::from(looked.is_err());
        looked
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
        self.reading()?;
        self.inner.try_pull(session, view, from, cursor, bytes_max, want_data)
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
        self.reading()?;
        self.inner.pull(session, view, from, cursor, bytes_max, want_data)
    }
    fn unpin(&mut self, session: u64) {
        self.inner.unpin(session);
    }
    fn shadow(&self) -> Option<(u64, Lsn, u64)> {
        self.inner.shadow()
    }
    fn shadow_cut(&self) -> Option<Lsn> {
        self.inner.shadow_cut()
    }
    fn increment_begin(&mut self, rebuild: u64, from: Lsn) -> Result<bool, StoreError> {
        self.write(false)?;
        self.inner.increment_begin(rebuild, from)
    }
    fn increment_feed(
        &mut self,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
    ) -> Result<(), StoreError> {
        self.write(true)?;
        self.inner.increment_feed(rebuild, slots, cursor)
    }
    fn increment_cut(
        &mut self,
        rebuild: u64,
        snapshot: SnapshotInfo,
        head: &CutHead,
    ) -> Result<(), StoreError> {
        self.write(false)?;
        self.inner.increment_cut(rebuild, snapshot, head)
    }
    fn increment_prepare(&mut self, rebuild: u64, end: &IncrementEnd) -> Result<(), StoreError> {
        self.write(false)?;
        self.inner.increment_prepare(rebuild, end)
    }
    fn increment_flip(&mut self, rebuild: u64) -> Result<(), StoreError> {
        self.write(false)?;
        self.inner.increment_flip(rebuild)
    }
    fn repair(
        &mut self,
        view: ReadView,
        lba: u64,
        version: Lsn,
        crc: u32,
        data: &Bytes,
    ) -> Result<bool, StoreError> {
        self.write(true)?;
        let mut before = Vec::new();
        let known = self.inner.read(view, lba, 1, false, &mut before);
        let done = self.inner.repair(view, lba, version, crc, data)?;
        if let (true, Ok(()), Some(slot)) = (done, known, before.first())
            && slot.version != version
        {
            let held = slot.version;
            let detail = format!("block {lba} of version {held} was repaired with {version}");
            self.faults.broken = Some(("SameBytesEverywhere", detail));
        }
        Ok(done)
    }
    fn mend(&mut self, view: ReadView, lba: u64, slots: &[Slot]) -> Result<bool, StoreError> {
        self.write(true)?;
        self.inner.mend(view, lba, slots)
    }
}

/// The model store.
#[derive(Default)]
pub struct ModelStorage {
    pool: ModelPool,
    faults: Faults,
    lost: u64,
    /// Power cuts that the pool does not know of.
    hidden_cuts: u128,
}

impl Storage for ModelStorage {
    fn create(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
    ) -> Result<(), StoreError> {
        self.pool.create(identity, meta, blocks)
    }

    fn create_clone(
        &mut self,
        source: &Source,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
        _random: &mut Random,
    ) -> Result<(), StoreError> {
        let guid = Source::identity().guid;
        self.pool.create(Source::identity(), ReplicaMeta::default(), source.blocks)?;
        if let Some(mut replica) = self.pool.replica(guid) {
            replica.append(&source.entries)?;
        }
        self.pool.create_clone(identity, meta, blocks, &Source::point()).map(|_| ())
    }

    fn delete(&mut self, guid: ReplicaGuid) -> Result<(), StoreError> {
        self.pool.delete(guid).map(|_| ())
    }

    fn with(&mut self, guid: ReplicaGuid, work: &mut dyn FnMut(&mut dyn ReplicaStore)) -> bool {
        let Some(inner) = self.pool.replica(guid) else { return false };
        work(&mut Faulty { inner, faults: &mut self.faults });
        true
    }

    fn take_broken(&mut self) -> Option<(&'static str, String)> {
        self.faults.broken.take()
    }

    fn cookie(&self) -> BootCookie {
        BootCookie(self.pool.cookie().0 - self.hidden_cuts)
    }

    fn sync_begin(&mut self) -> Option<SyncTicket> {
        self.pool.sync_wanted()
    }

    fn sync_end(&mut self, ticket: SyncTicket, _random: &mut Random) -> Result<(), StoreError> {
        let fault = IoFault { operation: "sync", offset: 0, errno: 5 };
        let result = if self.faults.failing.syncs { Err(fault) } else { Ok(()) };
        self.faults.errors += u64::from(result.is_err());
        self.pool.sync_finished(ticket, result)
    }

    fn take_served(&mut self) -> Vec<ReplicaGuid> {
        self.pool.take_served()
    }

    fn sync_lie(&mut self, ticket: SyncTicket) {
        // With nothing taken as begun, finishing makes nothing durable.
        self.pool.restart();
        let _ = self.pool.sync_finished(ticket, Ok(()));
    }

    fn forget(&mut self) {
        self.pool.power_cut(|_| 0);
        self.hidden_cuts += 1;
    }

    /// Its cookie is another one after a disk failure, so there is nothing to withdraw.
    fn reopen(
        &mut self,
        outage: Outage,
        _withdraw: bool,
        random: &mut Random,
    ) -> Result<(), StoreError> {
        if outage == Outage::Process {
            self.pool.restart();
            return Ok(());
        }
        // A device whose write or sync failed has another identity when it is opened again: the
        // model knows no pages that could be asked one by one.
        let mut lost = 0;
        self.pool.power_cut(|n| {
            let kept = match random.below(4) {
                0 => 0,
                1 => n,
                _ => random.index(n + 1),
            };
            lost += (n - kept) as u64;
            kept
        });
        self.lost += lost;
        if outage == Outage::Power {
            self.faults.failing = Failing::default();
        }
        Ok(())
    }

    fn background(&mut self) -> Result<(), StoreError> {
        self.pool.background(0).map(|_| ())
    }

    fn wants_background(&self) -> bool {
        self.pool.background_due() != Due::Idle
    }

    fn set_failing(&mut self, failing: Failing) {
        self.faults.failing = failing;
    }

    fn set_full(&mut self, full: bool) {
        self.faults.full = full;
    }

    fn rot(&mut self, guid: ReplicaGuid, random: &mut Random) -> bool {
        let Some(mut replica) = self.pool.replica(guid) else { return false };
        let blocks = replica.state().volume_blocks;
        (0..32).any(|_| replica.spoil(random.below(blocks)))
    }

    fn counts(&self) -> DiskCounts {
        let (sectors_lost, errors) = (self.lost, self.faults.errors);
        DiskCounts { sectors_lost, errors, ..DiskCounts::default() }
    }
}
