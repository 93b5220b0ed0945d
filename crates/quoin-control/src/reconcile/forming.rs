//! Volumes that are being made: a replica whose pool cannot make it is made elsewhere.
//!
//! A volume is ready once every pool that was chosen for it has made its replica. What a pool was
//! chosen for may be over by then: it is cut off, cordoned or removed, its metadata ring is full, or it
//! lost the replica whose snapshot the new one begins with. Nobody can use the volume yet and nothing
//! was ever written, so other pools are chosen by the rules of a new volume. The replica there has a
//! GUID of its own, and the pool of before deletes what it may have made meanwhile.
//!
//! Of a clone, what no pool can begin with the snapshot any more is rebuilt from the others, as where
//! there were too few such pools at first. The last one of them waits, and so does a replica whose
//! pool a person named, or that is bound to its place.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use quoin_cluster::records::{Discarded, ReplicaPhase, Text, VolumePhase, VolumeRecord};
use quoin_types::membership::default_cf;
use quoin_types::{ReplicaGuid, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::reconcile::{LOOK_EVERY, Next, Queue, Reconciler, queue_of_volumes};
use crate::state::events::Severity;
use crate::state::observed::ReplicaState;
use crate::state::{State, about, random_id};
use crate::volume::clones;
use crate::volume::placement::{Candidate, Taken, place_beside};

/// Time that a pool has to become able to make its replica.
const UNABLE_FOR: Duration = Duration::from_secs(30);

/// Reconciler of volumes that are being made.
pub struct Forming {
    state: Arc<State>,
    queue: Arc<Queue<VolumeId>>,
    /// Since when pools are known to be unable to make these.
    unable: Mutex<HashMap<VolumeId, HashMap<ReplicaGuid, Instant>>>,
}

/// Pools for the replicas of one volume.
struct Pools {
    all: Vec<Candidate>,
    /// With what keeps a replica from beginning with the snapshot there.
    of_clones: Vec<Candidate>,
}

#[async_trait]
impl Reconciler for Forming {
    type Key = VolumeId;
    const NAME: &'static str = "forming";

    fn queue(&self) -> &Queue<VolumeId> {
        &self.queue
    }

    async fn reconcile(&self, volume: &VolumeId, now: Instant) -> Result<Next, Error> {
        let waits = match self.state.volumes.get(&volume.to_string()) {
            Some(volume) if self.state.check_ruling().is_ok() => self.look(&volume, now).await?,
            _ => self.are_able(*volume),
        };
        Ok(if waits { Next::After(LOOK_EVERY) } else { Next::Rest })
    }
}

impl Forming {
    pub(crate) fn new(state: Arc<State>) -> Self {
        let queue = queue_of_volumes(&state, Duration::ZERO);
        Self { state, queue, unable: Mutex::default() }
    }

    /// Looks at all volumes that are being made.
    pub async fn look_at_all(&self, now: Instant) -> Result<(), Error> {
        for volume in self.state.volumes.list() {
            self.look(&volume, now).await?;
        }
        Ok(())
    }

    /// Returns true if some pool cannot make its replica now.
    async fn look(&self, volume: &Arc<VolumeRecord>, now: Instant) -> Result<bool, Error> {
        if volume.phase != VolumePhase::Pending {
            return Ok(self.are_able(volume.id.0));
        }
        let pools = self.pools_for(volume);
        let unable = self.unable(volume, &pools);
        if unable.is_empty() {
            return Ok(self.are_able(volume.id.0));
        }
        let given_up: Vec<ReplicaGuid> = {
            let mut all = self.unable.lock().expect("no holder of this lock panics");
            let since = all.entry(volume.id.0).or_default();
            since.retain(|guid, _| unable.contains_key(guid));
            let since = unable.keys().map(|guid| (*guid, *since.entry(*guid).or_insert(now)));
            since.filter(|(_, since)| now - *since >= UNABLE_FOR).map(|(guid, _)| guid).collect()
        };
        for guid in given_up {
            self.make_elsewhere(volume, guid, &pools, &unable[&guid]).await?;
        }
        Ok(true)
    }

    fn are_able(&self, volume: VolumeId) -> bool {
        self.unable.lock().expect("no holder of this lock panics").remove(&volume);
        false
    }

    fn pools_for(&self, volume: &VolumeRecord) -> Pools {
        let all = crate::volume::volumes::candidates(&self.state);
        let source = volume.source.as_ref();
        let source = source.and_then(|source| self.state.volumes.get(&source.volume.0.to_string()));
        let holding = source.map(|source| clones::pools_in_sync(&self.state, &source));
        let of_clones = clones::with_source(&all, &holding.unwrap_or_default());
        Pools { all, of_clones }
    }

    /// Replicas that were not made yet, and what keeps their pools from it.
    fn unable(&self, volume: &VolumeRecord, pools: &Pools) -> HashMap<ReplicaGuid, String> {
        let observed = self.state.observed();
        let mut unable = HashMap::new();
        for replica in volume.replicas.iter().filter(|replica| !replica.placed) {
            let seen = observed.heard_pool(&replica.pool, self.state.settings.offline_after);
            let state = seen.and_then(|seen| seen.replicas.get(&replica.guid.0));
            let why = match state.map(|held| held.state) {
                Some(ReplicaState::Present | ReplicaState::Damaged) => continue,
                Some(ReplicaState::Gone) => "it has deleted one of this GUID".to_owned(),
                None => match pools.of(replica.phase).iter().find(|p| p.name == replica.pool) {
                    None => "it was removed".to_owned(),
                    Some(pool) if !pool.unusable.is_empty() => pool.unusable.clone(),
                    Some(pool) if pool.ring_full => "its metadata ring is full".to_owned(),
                    Some(_) => continue,
                },
            };
            unable.insert(replica.guid.0, why);
        }
        unable
    }

    async fn make_elsewhere(
        &self,
        volume: &VolumeRecord,
        guid: ReplicaGuid,
        pools: &Pools,
        why: &str,
    ) -> Result<(), Error> {
        let change = |volume: &mut VolumeRecord| make_elsewhere(volume, guid, pools);
        let message = match self.state.update_volume(volume.id.0, change).await {
            Ok((_, Some((from, to)))) => {
                format!("pool {from} cannot make its replica ({why}): it is made on pool {to}")
            }
            Ok((_, None)) | Err(Error::NotFound { .. }) => return Ok(()),
            // Other pools may come.
            Err(refused @ (Error::Exhausted(_) | Error::Busy(_))) => {
                tracing::debug!(volume = %volume.id.0, %guid, why, %refused, "it waits");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.state.events.record(Severity::Warning, about(volume), "ReplicaMadeElsewhere", message);
        Ok(())
    }
}

impl Pools {
    /// Pools for replicas of this phase.
    fn of(&self, phase: ReplicaPhase) -> &[Candidate] {
        if phase == ReplicaPhase::Clone { &self.of_clones } else { &self.all }
    }
}

/// Has a replica of a volume that is being made be made in another pool. Returns the pools before and
/// after it; `None`: it is not wanted any more.
fn make_elsewhere(
    volume: &mut VolumeRecord,
    guid: ReplicaGuid,
    pools: &Pools,
) -> Result<Option<(String, String)>, Error> {
    let at = volume.replicas.iter().position(|replica| replica.guid.0 == guid);
    let Some(at) = at.filter(|_| volume.phase == VolumePhase::Pending) else { return Ok(None) };
    let taken: Vec<&str> = volume.replicas.iter().map(|r| r.pool.as_str()).collect();
    let (before, after) = (&taken[..at], &taken[at + 1..]);
    let hosts_of = [before, after].concat();
    let taken = Taken { pools: &taken, hosts_of: &hosts_of };
    let place =
        |pools: &[Candidate]| place_beside(&volume.spec, volume.size_bytes, pools, &taken, 1, &[]);
    let was = volume.replicas[at].clone();
    let begins = |volume: &VolumeRecord| volume.membership.known.len();
    let (chosen, phase) = match place(pools.of(was.phase)) {
        Ok(chosen) => (chosen, was.phase),
        // The others have what it would have begun with.
        Err(_) if was.phase == ReplicaPhase::Clone && begins(volume) > 1 => {
            (place(&pools.all)?, ReplicaPhase::Recreate)
        }
        Err(refused) => return Err(refused),
    };
    let Some(pool) = chosen.into_iter().next() else { return Ok(None) };
    let membership = &mut volume.membership;
    let new = Text(ReplicaGuid(random_id()));
    if was.phase != ReplicaPhase::Recreate {
        membership.retired.push(was.guid);
        membership.version += 1;
    }
    if phase == ReplicaPhase::Recreate {
        membership.known.retain(|member| member.guid != was.guid);
        membership.rf = membership.known.len() as u8;
        membership.cf = default_cf(membership.rf);
    }
    let named = membership.known.iter_mut().filter(|member| member.guid == was.guid);
    named.for_each(|member| member.guid = new);
    let replica = &mut volume.replicas[at];
    (replica.guid, replica.phase) = (new, phase);
    let from = std::mem::replace(&mut replica.pool, pool.clone());
    volume.discarded.push(Discarded { id: was.id, guid: was.guid, pool: from.clone() });
    Ok(Some((from, pool)))
}
