//! Looks ahead of background work, so that a step of it finds at hand what it reads.
//!
//! Before a step is done, what it is going to read is looked up, and nothing is changed. What the
//! disk does not have at hand is fetched, all of it at once, and meanwhile the pool has no
//! background work. Then the step is chosen again: it is another one if something more useful has
//! come, and it is done once nothing is lacking. A node that left the caches in between is read
//! by the step itself.

use quoin_replication::replica::store::{FetchTicket, StoreError};
use quoin_types::ReplicaGuid;

use crate::background::checkpoint;
use crate::background::cleaner;
use crate::background::difference;
use crate::background::listing::Listing;
use crate::background::maintenance::Cause;
use crate::background::recount;
use crate::background::scheduler::Step;
use crate::clones::flatten;
use crate::core::Core;
use crate::disk::Disk;
use crate::disk::fetch::Owner;
use crate::format::checkpoint::SegmentState;
use crate::pool::Pool;
use crate::rebuild::shadow;
use crate::replica::Replica;
use crate::space::segments::Family;

/// Looks for one step that found nothing new of a segment's headers: each may find a level of the map
/// that is not in memory. A step that lacks something still is done as it is, since caches may have
/// no room for all that it needs.
const LOOKS_MAX: u8 = 16;

/// What background work waits for.
#[derive(Default)]
pub struct LookAhead {
    waits_for: Option<FetchTicket>,
    /// The replica that it is for.
    replica: ReplicaGuid,
    /// Looks that lacked something, one after the other.
    looks: u8,
    /// Contents of the segment that is to be emptied next, as far as it was looked at.
    listing: Option<Listing>,
}

impl LookAhead {
    /// Gives away the list of a segment, as far as it is made.
    pub fn listing<D>(
        &mut self,
        core: &Core<D>,
        family: &Family,
        segment: SegmentState,
    ) -> Listing {
        let listing = self.listing.take().filter(|listing| listing.is_of(&segment));
        listing.unwrap_or_else(|| Listing::of(core, family, segment))
    }

    /// How far that segment was looked through.
    fn reached(&self) -> u32 {
        self.listing.as_ref().map_or(0, Listing::reached)
    }
}

/// Returns true if the next step waits for the disk.
pub fn waits_for_disk<D: Disk>(pool: &Pool<D>) -> bool {
    pool.look_ahead.waits_for.is_some_and(|ticket| pool.core.fetches.waits(ticket))
}

/// Gives up what the next step waits for, since its reads do not end. The replica has no background
/// work until the pool looks again ([`Pool::look_again`]).
pub fn give_up<D: Disk>(pool: &mut Pool<D>) -> Option<ReplicaGuid> {
    if !waits_for_disk(pool) {
        return None;
    }
    let guid = pool.look_ahead.replica;
    pool.look_ahead = LookAhead::default();
    pool.core.fetches.drop_calls(Owner::Background(guid));
    pool.touch(guid);
    pool.victim.set(None);
    let replica = pool.replicas.get_mut(&guid)?;
    replica.maintenance.quarantined.get_or_insert(Cause::Unreadable);
    Some(guid)
}

/// Looks ahead of a step; true if it has to wait for the disk.
pub fn lacks<D: Disk>(pool: &mut Pool<D>, guid: ReplicaGuid, step: &Step) -> bool {
    let mut ahead = std::mem::take(&mut pool.look_ahead);
    if ahead.looks >= LOOKS_MAX || !pool.core.disk.may_lack() {
        pool.look_ahead.listing = ahead.listing;
        return false;
    }
    let Some(replica) = pool.replicas.get_mut(&guid) else { return false };
    // Of any other segment nothing is kept. A list that is under way stays through other steps: where
    // writes go on, one of these is always due before a large segment is looked through.
    if let Step::Empty(_, segment) = step {
        ahead.listing = Some(ahead.listing(&pool.core, &replica.family, *segment));
    }
    let reached = ahead.reached();
    // A list that is under way goes on after other steps, and finds then what was read for it.
    let name = u64::from(matches!(step, Step::Empty(..)));
    pool.core.fetches.begin(Owner::Background(guid), name);
    // Whatever else is wrong with it the step itself comes to.
    let _ = look_ahead(replica, &mut pool.core, step, &mut ahead.listing);
    (ahead.waits_for, ahead.replica) = (pool.core.fetches.end(), guid);
    let lacks = ahead.waits_for.is_some();
    ahead.looks = match ahead.reached() > reached {
        _ if !lacks => 0,
        true => 1,
        false => ahead.looks + 1,
    };
    pool.look_ahead = ahead;
    lacks
}

fn look_ahead<D: Disk>(
    replica: &mut Replica,
    core: &mut Core<D>,
    step: &Step,
    listing: &mut Option<Listing>,
) -> Result<(), StoreError> {
    match step {
        Step::Release | Step::Discard | Step::Fold(..) => Ok(()),
        Step::GoOn(_) if replica.maintenance.checkpoint.is_some() => {
            checkpoint::look_ahead(replica, core)
        }
        Step::GoOn(_) => {
            shadow::look_ahead(replica, core)?;
            cleaner::look_ahead(replica, core)
        }
        Step::Commit(_) => checkpoint::look_ahead_of_commit(replica, core),
        Step::Empty(..) => {
            let lacking = shadow::look_ahead(replica, core);
            let listed = listing.as_mut().map_or(Ok(true), |listing| listing.go_on(core));
            lacking.and(listed.map(drop))
        }
        Step::Difference(_) => difference::look_ahead(replica, core),
        Step::Recount(_) => recount::look_ahead(replica, core),
        Step::Flatten(_) => flatten::look_ahead(replica, core),
    }
}
