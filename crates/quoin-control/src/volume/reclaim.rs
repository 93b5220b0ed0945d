//! Space that is dead in a volume's replicas is given back at once, beside the clean-up of their pools.
//!
//! An order is no record: pools go on with it while the controller is away, and one that is asked for again
//! finds little to do.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quoin_api::control::{self as api, VolumeRef};
use quoin_cluster::records::{Concerned, Nodes, VolumePhase, VolumeRecord};
use quoin_types::{ReplicaGuid, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::state::events::Severity;
use crate::state::observed::ReplicaSeen;
use crate::state::{State, about, random_id};

/// Most volumes of which space is given back at once.
const UNDER_WAY_MAX: usize = 64;
/// Longest wait of one call.
const WAIT_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest time that an order is under way: pools that are busy may not come to it.
const ORDER_MAX: Duration = Duration::from_secs(6 * 3600);
/// Time for which the outcome of an order is kept for a caller that has not heard it.
const KEPT_FOR: Duration = Duration::from_secs(3600);

/// One order.
#[derive(Clone, Debug)]
struct Order {
    request: u64,
    began: Instant,
    /// Replicas that it is of, with their pools, and the bytes that each held before.
    replicas: BTreeMap<ReplicaGuid, (String, u64)>,
    /// Bytes after it, and since when that is known; `None`: it is under way.
    ended: Option<(u64, Instant)>,
    /// True if a caller has heard the outcome: the next call is of an order of its own.
    is_told: bool,
}

impl Order {
    fn before_bytes(&self) -> u64 {
        self.replicas.values().map(|(_, bytes)| bytes).sum()
    }
}

/// Orders to give space back.
pub struct Reclaims {
    state: Arc<State>,
    orders: Mutex<BTreeMap<VolumeId, Order>>,
    reclaimed_bytes: AtomicU64,
}

impl Reclaims {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, orders: Mutex::default(), reclaimed_bytes: AtomicU64::new(0) }
    }

    fn orders(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Order>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that were given back by orders since the start.
    pub(crate) fn reclaimed_bytes(&self) -> u64 {
        self.reclaimed_bytes.load(Ordering::Relaxed)
    }

    /// Orders of the replicas in a pool.
    pub(crate) fn of_pool(&self, pool: &str) -> Vec<api::ReclaimOrder> {
        let orders = self.orders();
        let under_way = orders.values().filter(|order| order.ended.is_none());
        let here = under_way.flat_map(|order| {
            let replicas = order.replicas.iter().filter(|(_, (of, _))| of == pool);
            replicas.map(|(guid, _)| api::ReclaimOrder {
                guid: guid.to_string(),
                request: order.request,
            })
        });
        here.collect()
    }

    /// Has the space of a volume given back, and waits for that. A call while that is under way joins it,
    /// and one after it tells how the last one ended where nobody has heard that yet.
    ///
    /// # Errors
    /// There is no such volume; no pool of it is heard of; too much of the kind is under way.
    pub async fn reclaim(
        self: &Arc<Self>,
        reference: Option<&VolumeRef>,
        wait: Duration,
    ) -> Result<api::ReclaimVolumeResponse, Error> {
        let volume = self.state.volume(reference)?;
        if matches!(volume.phase, VolumePhase::Deleting | VolumePhase::Retained) {
            return Err(crate::state::missing(reference));
        }
        self.state.check_term()?;
        let id = volume.id.0;
        let (request, begun) = self.begin(&volume)?;
        if begun {
            self.tell_pools(&volume);
            let (reclaims, volume) = (self.clone(), volume.clone());
            tokio::spawn(async move { reclaims.follow(&volume).await });
        }
        let until = Instant::now() + wait.min(WAIT_MAX);
        loop {
            {
                let mut orders = self.orders();
                let order = orders.get_mut(&id).filter(|order| order.request == request);
                let Some(order) = order else {
                    let why = "the outcome was told to another caller: ask again";
                    return Err(Error::Aborted(why.to_owned()));
                };
                let before_bytes = order.before_bytes();
                if let Some((bytes, _)) = order.ended {
                    order.is_told = true;
                    return Ok(api::ReclaimVolumeResponse { done: true, before_bytes, bytes });
                }
                if Instant::now() >= until {
                    let bytes = self.bytes_now(order);
                    return Ok(api::ReclaimVolumeResponse { done: false, before_bytes, bytes });
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Returns the order that a call is of, and true if the call begins it.
    fn begin(&self, volume: &VolumeRecord) -> Result<(u64, bool), Error> {
        let replicas: BTreeMap<_, _> = {
            let observed = self.state.observed();
            let after = self.state.settings.offline_after;
            let held = volume.replicas.iter().filter_map(|replica| {
                let seen = observed.heard_pool(&replica.pool, after)?;
                let bytes = seen.replicas.get(&replica.guid.0)?.used_bytes;
                Some((replica.guid.0, (replica.pool.clone(), bytes)))
            });
            held.collect()
        };
        let mut orders = self.orders();
        orders.retain(|_, order| order.ended.is_none_or(|(_, at)| at.elapsed() < KEPT_FOR));
        if let Some(order) = orders.get(&volume.id.0).filter(|order| !order.is_told) {
            return Ok((order.request, false));
        }
        if orders.values().filter(|order| order.ended.is_none()).count() >= UNDER_WAY_MAX {
            return Err(Error::Exhausted(format!(
                "space of {UNDER_WAY_MAX} volumes is given back now, the most at once: try again once \
                 some are done"
            )));
        }
        if replicas.is_empty() {
            let name = &volume.spec.name;
            return Err(Error::Busy(format!("no pool of volume {name:?} is heard of; try again")));
        }
        // Pools tell orders from each other by it, also over restarts of the controller; 0 is none.
        let request = (random_id() as u64).max(1);
        let order = Order { request, began: Instant::now(), replicas, ended: None, is_told: false };
        orders.insert(volume.id.0, order);
        Ok((request, true))
    }

    fn tell_pools(&self, volume: &VolumeRecord) {
        let pools = volume.replicas.iter().map(|replica| replica.pool.clone()).collect();
        self.state.announce(&Concerned::Some { pools, nodes: Nodes::none() });
    }

    /// Looks at an order until it has ended.
    async fn follow(&self, volume: &VolumeRecord) {
        let id = volume.id.0;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let Some(order) = self.orders().get(&id).cloned() else { return };
            if !self.has_ended(id, &order) && order.began.elapsed() < ORDER_MAX {
                continue;
            }
            let (before, bytes) = (order.before_bytes(), self.bytes_now(&order));
            if let Some(order) = self.orders().get_mut(&id) {
                order.ended = Some((bytes, Instant::now()));
            }
            self.reclaimed_bytes.fetch_add(before.saturating_sub(bytes), Ordering::Relaxed);
            let message = format!(
                "its replicas held {before} bytes before, and hold {bytes} after that of which is dead \
                 was given back"
            );
            self.state.events.record(Severity::Normal, about(volume), "SpaceReclaimed", message);
            return self.tell_pools(volume);
        }
    }

    /// Returns true if no pool has anything to do for an order any more. A replica that is gone, and one
    /// whose pool is away, are not waited for.
    fn has_ended(&self, id: VolumeId, order: &Order) -> bool {
        let Some(volume) = self.state.volumes.get(&id.to_string()) else { return true };
        let held = volume.replicas.iter().filter(|r| order.replicas.contains_key(&r.guid.0));
        let is_done = |guid: &ReplicaGuid, pool: &str| {
            let observed = self.state.observed();
            let Some(pool) = observed.heard_pool(pool, self.state.settings.offline_after) else {
                return true;
            };
            pool.replicas.get(guid).is_none_or(|seen| seen.reclaimed == order.request)
        };
        held.into_iter().all(|replica| is_done(&replica.guid.0, &replica.pool))
    }

    /// Bytes that the replicas of an order hold, by the last word of their pools.
    fn bytes_now(&self, order: &Order) -> u64 {
        let observed = self.state.observed();
        let of = |(guid, (pool, before)): (&ReplicaGuid, &(String, u64))| {
            let seen: Option<&ReplicaSeen> =
                observed.pools.get(pool).and_then(|pool| pool.replicas.get(guid));
            seen.map_or(*before, |seen| seen.used_bytes)
        };
        order.replicas.iter().map(of).sum()
    }
}
