//! Facts of a pool beside its replicas: space, and how often it was opened.

use quoin_replication::replica::store::StoreError;
use quoin_store::{BadBlock, Medium, MetadataScrubbed, ScrubAt, Scrubbed};
use quoin_types::ReplicaGuid;
use quoin_types::message::RoomGrant;

/// Space, as a pool reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    /// Bytes that clients may still fill.
    pub free_bytes: u64,
}

/// Facts of a pool beside its replicas.
pub trait PoolFacts {
    fn space(&self) -> Space;
    /// About how many of the used bytes volumes and snapshots need; clean-up gains from the others.
    fn live_bytes(&self) -> u64 {
        0
    }
    /// Bytes that this replica takes.
    fn replica_bytes(&self, guid: ReplicaGuid) -> u64;
    /// Has the dead space of a replica given back as background work.
    fn reclaim(&mut self, _guid: ReplicaGuid) {}
    /// Returns true while that is under way.
    fn is_reclaiming(&self, _guid: ReplicaGuid) -> bool {
        false
    }
    fn end_reclaim(&mut self, _guid: ReplicaGuid) {}
    /// Times the pool was opened.
    fn start_counter(&self) -> u64;
    /// The highest mark that is on media ([`quoin_replication::recognition`]).
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
    /// Has the next mark recorded behind all that is there now, with the next syncs.
    fn raise_mark(&mut self) -> Result<(), StoreError> {
        Ok(())
    }
    /// Blocks found bad since the last call.
    fn take_bad_blocks(&mut self) -> Vec<BadBlock>;
    /// Replicas that background work found damaged since the last call, and what of them.
    fn take_damaged(&mut self) -> Vec<(ReplicaGuid, &'static str)>;
    /// Reads about so many bytes of a replica from media and compares checksums. `Pending`: it waits
    /// for the disk.
    fn scrub(
        &mut self,
        guid: ReplicaGuid,
        at: ScrubAt,
        budget_bytes: u64,
    ) -> Result<Scrubbed, StoreError>;
    /// Returns true if the pool can take little more; `was`: what it said last.
    fn is_short(&self, was: bool) -> bool;
    /// Returns the grant to targets; `was`: the one that they were sent last.
    fn room(&self, was: RoomGrant) -> RoomGrant;
    /// Looks whether the file below was cut, or has lost its name.
    fn medium(&self) -> Medium {
        Medium::Whole
    }
    /// Looks whether the file system below the pool is short of room.
    fn look_below(&mut self) {}
    /// Returns true if that is why the pool is short.
    fn is_short_below(&self) -> bool {
        false
    }
    /// Returns true if the metadata ring has no room for another replica.
    fn is_ring_full(&self) -> bool {
        false
    }
    /// Allows another attempt at what could not be read.
    fn look_again(&mut self);
    /// Returns true if the next background work waits for reads of the disk.
    fn background_waits(&self) -> bool {
        false
    }
    /// Has it wait no more; the replica that it is of has no background work until another look.
    fn give_up_background_wait(&mut self) -> Option<ReplicaGuid> {
        None
    }
    /// The same for what the pool holds beside its replicas, from this place on; `None`: from the
    /// beginning.
    fn scrub_metadata(&mut self, at: Option<u64>) -> Result<MetadataScrubbed, StoreError>;
}

/// The reference model holds its replicas in memory: it has no size and is opened once.
impl PoolFacts for quoin_store::model::ModelPool {
    fn space(&self) -> Space {
        Space::default()
    }
    fn replica_bytes(&self, _guid: ReplicaGuid) -> u64 {
        0
    }
    fn start_counter(&self) -> u64 {
        1
    }
    fn take_bad_blocks(&mut self) -> Vec<BadBlock> {
        Vec::new()
    }
    fn take_damaged(&mut self) -> Vec<(ReplicaGuid, &'static str)> {
        Vec::new()
    }
    fn scrub(&mut self, _: ReplicaGuid, _: ScrubAt, _: u64) -> Result<Scrubbed, StoreError> {
        Ok(Scrubbed::default())
    }
    fn is_short(&self, _: bool) -> bool {
        false
    }
    fn room(&self, _: RoomGrant) -> RoomGrant {
        RoomGrant::UNBOUNDED
    }
    fn look_again(&mut self) {}
    fn scrub_metadata(&mut self, _: Option<u64>) -> Result<MetadataScrubbed, StoreError> {
        Ok(MetadataScrubbed::default())
    }
}

impl<D: quoin_store::Disk> PoolFacts for quoin_store::Pool<D> {
    fn space(&self) -> Space {
        Space {
            capacity_bytes: self.capacity_bytes(),
            used_bytes: self.used_bytes(),
            free_bytes: self.granted_bytes(),
        }
    }
    fn live_bytes(&self) -> u64 {
        self.live_bytes()
    }
    fn replica_bytes(&self, guid: ReplicaGuid) -> u64 {
        self.replica_stats(guid).map_or(0, |stats| stats.allocated_bytes)
    }
    fn reclaim(&mut self, guid: ReplicaGuid) {
        self.reclaim(guid);
    }
    fn is_reclaiming(&self, guid: ReplicaGuid) -> bool {
        self.is_reclaiming(guid)
    }
    fn end_reclaim(&mut self, guid: ReplicaGuid) {
        self.end_reclaim(guid);
    }
    fn start_counter(&self) -> u64 {
        self.starts()
    }
    fn mark(&self) -> u64 {
        self.mark()
    }
    fn has_changed_since_mark(&self) -> bool {
        self.has_changed_since_mark()
    }
    fn is_mark_rising(&self) -> bool {
        self.is_mark_rising()
    }
    fn raise_mark(&mut self) -> Result<(), StoreError> {
        self.raise_mark()
    }
    fn take_bad_blocks(&mut self) -> Vec<BadBlock> {
        self.take_bad_blocks()
    }
    fn take_damaged(&mut self) -> Vec<(ReplicaGuid, &'static str)> {
        self.take_damaged()
    }
    fn scrub(
        &mut self,
        guid: ReplicaGuid,
        at: ScrubAt,
        budget_bytes: u64,
    ) -> Result<Scrubbed, StoreError> {
        self.try_scrub(guid, at, budget_bytes)
    }
    fn is_short(&self, was: bool) -> bool {
        self.is_short(was)
    }
    fn room(&self, was: RoomGrant) -> RoomGrant {
        self.room(was)
    }
    fn medium(&self) -> Medium {
        self.medium()
    }
    fn look_below(&mut self) {
        self.look_below();
    }
    fn is_short_below(&self) -> bool {
        self.is_short_below()
    }
    fn is_ring_full(&self) -> bool {
        self.is_ring_full()
    }
    fn look_again(&mut self) {
        self.look_again();
    }
    fn background_waits(&self) -> bool {
        self.background_waits()
    }
    fn give_up_background_wait(&mut self) -> Option<ReplicaGuid> {
        self.give_up_background_wait()
    }
    fn scrub_metadata(&mut self, at: Option<u64>) -> Result<MetadataScrubbed, StoreError> {
        self.try_scrub_metadata(at)
    }
}
