//! Taking pools and nodes that are away for good out of the cluster.
//!
//! A removed pool or node is no member any more: its certificate permits nothing, and a new one under
//! its name needs a new token. A pool that a volume needs is not removed, since the
//! volume's membership would name a replica that is nowhere; what only waits for the pool in
//! order to be deleted is taken to have gone with it.

use std::sync::Arc;

use quoin_cluster::records::{Concerned, VolumePhase, VolumeRecord};
use quoin_identity::Role;

use crate::Error;
use crate::membership::admission::Admission;
use crate::reconcile::absence::Absence;
use crate::reconcile::dying::DyingPools;
use crate::reconcile::lifecycle::Lifecycle;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::volume::fencing::Fences;

/// Names of volumes in one message; the others are counted.
const NAMES_MAX: usize = 5;

/// Takes pools and nodes out of the cluster.
pub struct Removals {
    state: Arc<State>,
    lifecycle: Arc<Lifecycle>,
    absence: Arc<Absence>,
    dying: Arc<DyingPools>,
    admission: Arc<Admission>,
    fences: Fences,
}

impl Removals {
    pub(crate) fn new(
        state: Arc<State>,
        lifecycle: Arc<Lifecycle>,
        absence: Arc<Absence>,
        dying: Arc<DyingPools>,
        admission: Arc<Admission>,
    ) -> Self {
        let fences = Fences::new(state.clone());
        Self { state, lifecycle, absence, dying, admission, fences }
    }

    /// Removes a pool that is offline and that no volume needs; with `force` also one that may be
    /// online still.
    pub async fn pool(&self, name: &str, force: bool) -> Result<(), Error> {
        self.state.check_ruling()?;
        // No volume is placed on it meanwhile.
        let _one_at_a_time = self.state.creating.lock().await;
        let shown: String = name.chars().take(160).collect();
        let pool = self.state.pools.get(name).ok_or_else(|| Error::missing("pool", shown))?;
        let online = {
            let observed = self.state.observed();
            observed.starting(self.state.settings.offline_after)
                && !observed.pools.contains_key(name)
                || observed.heard_pool(name, self.state.settings.offline_after).is_some()
        };
        if online && !force {
            return Err(Error::Precondition(format!(
                "pool {name:?} is online, or may be: stop its process first; one that has ended is \
                 removed with --wait, as soon as it is known to be offline, or at once with --force"
            )));
        }
        let volumes = self.state.volumes_of_pool(name);
        let needed = |volume: &&Arc<VolumeRecord>| {
            volume.phase != VolumePhase::Deleting && volume.replicas.iter().any(|r| r.pool == name)
        };
        let needed: Vec<_> = volumes.iter().filter(needed).map(|v| v.spec.name.clone()).collect();
        if !needed.is_empty() {
            return Err(Error::Precondition(format!(
                "pool {name:?} holds replicas of {}: they would miss it for good; start the pool \
                 again, or have them made elsewhere with `quoin pool drain`",
                listed(&needed)
            )));
        }
        self.admission.expel(Role::Pool, name).await?;
        for volume in volumes {
            let gone = |volume: &mut VolumeRecord| {
                volume.discarded.retain(|discarded| discarded.pool != name);
                if volume.phase == VolumePhase::Deleting {
                    volume.replicas.retain(|replica| replica.pool != name);
                }
                Ok(())
            };
            match self.state.update_volume(volume.id.0, gone).await {
                Err(Error::NotFound { .. }) => {}
                outcome => drop(outcome?),
            }
        }
        self.state.cordons.remove(&format!("pool/{name}"), |_| true).await?;
        self.state.pools.remove(name, |_| true).await?;
        {
            let mut observed = self.state.observed();
            observed.pools.remove(name);
            observed.reach.forget(name);
        }
        self.absence.ends("pool", name);
        self.dying.forget(name);
        let about = Object::new("pool", &pool.pool_id, name);
        self.state.events.record(
            Severity::Normal,
            about,
            "PoolRemoved",
            "it is no member any more",
        );
        self.state.announce(&Concerned::Everybody);
        self.lifecycle.reconcile_all().await
    }

    /// Removes a node that is offline and has no volume attached; `force` as of a pool.
    pub async fn node(&self, name: &str, force: bool) -> Result<(), Error> {
        self.state.check_ruling()?;
        let shown: String = name.chars().take(160).collect();
        self.state.nodes.get(name).ok_or_else(|| Error::missing("node", shown))?;
        let used = self.state.volumes_of_node(name);
        let attached: Vec<_> = used
            .iter()
            .filter(|volume| volume.attachments.iter().any(|a| a.node == name))
            .map(|volume| volume.spec.name.clone())
            .collect();
        if !attached.is_empty() {
            return Err(Error::Precondition(format!(
                "node {name:?} has volumes attached ({}): detach them first",
                listed(&attached)
            )));
        }
        let online = {
            let observed = self.state.observed();
            observed.starting(self.state.settings.offline_after)
                && !observed.nodes.contains_key(name)
                || observed.node_online(name, self.state.settings.offline_after)
        };
        if online && !force {
            return Err(Error::Precondition(format!(
                "node {name:?} is online, or may be: stop its processes (target and node) first; one \
                 whose processes have ended is removed with --wait, as soon as it is known to be \
                 offline, or at once with --force"
            )));
        }
        self.admission.expel(Role::Node, name).await?;
        self.fences.node(name, true).await?;
        self.state.cordons.remove(&format!("node/{name}"), |_| true).await?;
        self.state.nodes.remove(name, |_| true).await?;
        self.state.observed().nodes.remove(name);
        self.absence.ends("node", name);
        let about = Object::new("node", name, name);
        self.state.events.record(
            Severity::Normal,
            about,
            "NodeRemoved",
            "it is no member any more",
        );
        self.state.announce(&Concerned::Everybody);
        Ok(())
    }
}

fn listed(names: &[String]) -> String {
    let shown: Vec<_> = names.iter().take(NAMES_MAX).map(|name| format!("{name:?}")).collect();
    match names.len().saturating_sub(NAMES_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
