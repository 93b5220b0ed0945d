//! Interface of a pool for its driver. Two types implement it: the real [`crate::Pool`] and the
//! model ([`crate::testing::model::ModelPool`]). Replicas themselves are used through [`ReplicaStore`].

use bytes::Bytes;
use quoin_replication::replica::store::{
    BootCookie, FetchTicket, IoFault, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError,
    SyncTicket,
};
use quoin_types::ReplicaGuid;

use crate::disk::Reader;
use crate::disk::fetch::{Fetch, Owner};
use crate::disk::read_ring::ReadRing;

/// A pool of replicas as its one driver thread sees it.
///
/// **Syncing.** After each round of events the driver asks [`ReplicaPool::sync_wanted`]; with a
/// ticket it has the disk synced on another thread (one sync at a time) and reports the result
/// with [`ReplicaPool::sync_finished`]; then the replicas of [`ReplicaPool::take_served`] get `Synced`
/// with that ticket, which covers all smaller ones, and with what that call gave. **A failed sync
/// ends the pool**, and so does one after which the pool cannot write down what waited for it: every
/// replica is told of it, every later write is refused, and the driver opens the pool anew from its
/// media.
///
/// **Reads that nobody waits for.** After each round of events the driver has the reads of
/// [`ReplicaPool::next_fetch`] made by a ring ([`ReplicaPool::read_ring`]) or on other threads
/// ([`ReplicaPool::reader`]) and reports each with [`ReplicaPool::fetched`]. Then the replicas whose
/// sessions [`ReplicaPool::take_fetched`] names get `Fetched`, and background work and a scrub that it
/// names go on.
///
/// **Background work** (checkpoints, clean-up, scrub) is done in steps by
/// [`ReplicaPool::background`], whenever the driver is idle and whenever
/// [`ReplicaPool::background_due`] says that it cannot wait.
pub trait ReplicaPool {
    type Handle<'a>: ReplicaStore
    where
        Self: 'a;

    /// GUIDs of all replicas, in ascending order.
    fn replicas(&self) -> Vec<ReplicaGuid>;
    fn replica(&mut self, guid: ReplicaGuid) -> Option<Self::Handle<'_>>;

    /// Makes an empty replica of `blocks` blocks; durable with the next requested sync. The GUID
    /// must be new to this pool: one that was deleted here never comes back.
    fn create(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
    ) -> Result<(), StoreError>;
    /// Makes a replica of `blocks` blocks that begins with the content of a snapshot of another
    /// volume's replica in this pool, and shares it; durable with the next requested sync. Its
    /// history begins at (epoch 0, the snapshot's LSN). Refused where the pool does not have the
    /// snapshot, or has it damaged.
    fn create_clone(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
        source: &CloneSource,
    ) -> Result<Cloned, StoreError>;
    /// Has a clone take over the blocks that it shares with its source, as background work; until the
    /// next start. Of other replicas there is nothing to do.
    fn flatten(&mut self, guid: ReplicaGuid);
    /// Whether a replica shares blocks with the source that it was made from.
    fn is_clone(&self, guid: ReplicaGuid) -> bool;
    /// Replaces what a replica keeps about its volume ([`ReplicaIdentity::volume_spec`]); durable
    /// with the next requested sync. Refused where the pool has no room for it.
    fn describe(&mut self, guid: ReplicaGuid, volume_spec: Bytes) -> Result<(), StoreError>;
    /// Removes a replica, retires its GUID and frees its space; durable with the next requested
    /// sync. Has room even in a full pool. `Ok(false)`: there is none.
    fn delete(&mut self, guid: ReplicaGuid) -> Result<bool, StoreError>;
    /// Whether a replica with this GUID was deleted here.
    fn is_retired(&self, guid: ReplicaGuid) -> bool;
    /// All GUIDs that were deleted here, as far as they are remembered.
    fn retired(&self) -> Vec<ReplicaGuid>;

    /// A ticket for what was created or deleted.
    fn request_sync(&mut self) -> SyncTicket;
    /// The sync to begin now, if one is wanted and none is under way.
    fn sync_wanted(&mut self) -> Option<SyncTicket>;
    /// Reports the outcome of the sync. Returns the outcome of records that waited for the sync.
    fn sync_finished(
        &mut self,
        ticket: SyncTicket,
        result: Result<(), IoFault>,
    ) -> Result<(), StoreError>;
    /// Replicas that asked for a sync which ended well since the last call, in ascending order. In
    /// no other replica anything waited for it.
    fn take_served(&mut self) -> Vec<ReplicaGuid>;

    /// Makes the reads of [`ReplicaPool::next_fetch`]; `None`: there are none, ever.
    fn reader(&self) -> Option<Reader> {
        None
    }
    /// Makes them without other threads; the error says why there is no such way.
    fn read_ring(&self) -> std::io::Result<ReadRing> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
    /// The next read to be made beside the pool's thread, if another one may begin.
    fn next_fetch(&mut self) -> Option<Fetch> {
        None
    }
    /// Takes the result of such a read, by its number.
    fn fetched(&mut self, _id: u64, _result: Result<Bytes, IoFault>) {}
    /// The next call that can be made again, and whose it is.
    fn take_fetched(&mut self) -> Option<(Owner, FetchTicket)> {
        None
    }

    /// Does about `budget_bytes` of background work; true if there is more to do.
    fn background(&mut self, budget_bytes: u64) -> Result<bool, StoreError>;
    fn background_due(&self) -> Due;

    /// Under which boot and device this pool was opened.
    fn cookie(&self) -> BootCookie;
}

/// Records in every replica that it may have lost entries that it applied: it is unknown what a
/// failed disk dropped, and the boot cookie is the same as before. The record is on media once the
/// ticket is done.
pub fn give_up_continuity<P: ReplicaPool>(pool: &mut P) -> Result<SyncTicket, StoreError> {
    for guid in pool.replicas() {
        let Some(mut replica) = pool.replica(guid) else { continue };
        let meta = ReplicaMeta {
            cookie: BootCookie::default(),
            closed_continuous: false,
            ..replica.meta().clone()
        };
        replica.put_meta(meta)?;
    }
    Ok(pool.request_sync())
}

pub use quoin_replication::replica::store::CloneSource;

/// Outcome of an attempt to make a clone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cloned {
    /// It is there; durable with the next requested sync.
    Made,
    /// The snapshot is not yet recorded in the map of its replica, which was told to see to that:
    /// the attempt is made again later.
    NotYet,
}

/// How urgent background work is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Due {
    /// Nothing to do.
    Idle,
    /// When there is time.
    Relaxed,
    /// Between clients' requests: space or recovery time is getting short.
    Soon,
    /// Before the clients' next writes, which will be refused otherwise.
    Urgent,
}
