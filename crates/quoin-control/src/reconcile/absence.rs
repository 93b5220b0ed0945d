//! Pools and nodes that have not reported for too long, each announced once.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use quoin_cluster::records::{Concerned, VolumeRecord};

use crate::state::State;
use crate::state::events::{Object, Severity};

/// Members that are away, by the events so far.
pub struct Absence {
    state: Arc<State>,
    /// ("pool" or "node", name).
    absent: Mutex<HashSet<(&'static str, String)>>,
}

impl Absence {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, absent: Mutex::default() }
    }

    fn absent(&self) -> MutexGuard<'_, HashSet<(&'static str, String)>> {
        self.absent.lock().expect("no holder of this lock panics")
    }

    /// It reports, or is no member any more. Whether its absence had been announced.
    pub(crate) fn ends(&self, kind: &'static str, name: &str) -> bool {
        self.absent().remove(&(kind, name.to_owned()))
    }

    /// Records an event for each that has not reported for too long since the last call. Returns the
    /// volumes of which more is missing now, and queues them.
    pub(crate) fn announce(&self) -> Vec<Arc<VolumeRecord>> {
        let state = &self.state;
        let after = state.settings.offline_after;
        let (mut events, mut volumes) = (Vec::new(), Vec::new());
        {
            let observed = state.observed();
            if observed.starting(after) {
                return volumes;
            }
            let mut absent = self.absent();
            for pool in state.pools.list() {
                if observed.heard_pool(&pool.name, after).is_none()
                    && absent.insert(("pool", pool.name.clone()))
                {
                    events.push((Object::new("pool", &pool.pool_id, &pool.name), "PoolOffline"));
                    volumes.extend(state.volumes_of_pool(&pool.name));
                }
            }
            for node in state.nodes.list() {
                if !observed.node_online(&node.name, after)
                    && absent.insert(("node", node.name.clone()))
                {
                    events.push((Object::new("node", &node.name, &node.name), "NodeOffline"));
                    volumes.extend(state.volumes_of_node(&node.name));
                }
            }
        }
        let some = !events.is_empty();
        for (object, reason) in events {
            let message = format!("no report for {} ms", after.as_millis());
            state.events.record(Severity::Warning, object, reason, message);
        }
        if some {
            state.announce(&Concerned::Status);
            volumes.sort_by_key(|volume| volume.id);
            volumes.dedup_by_key(|volume| volume.id);
            state.look_at(&volumes);
        }
        volumes
    }
}
