//! The controller: the state, and the parts that work on it.
//!
//! gRPC is a thin layer above. Each reconciler owns its memory and runs in a task of its own
//! ([`crate::reconcile`]).

use std::sync::Arc;

use quoin_identity::{Authority, Identity};
use tokio::sync::watch;

use crate::Error;
use crate::api::assignments::Assignments;
use crate::api::reports::Reports;
use crate::kubernetes_api::ApiOptions;
use crate::kubernetes_events::KubernetesEvents;
use crate::membership::removal::Removals;
use crate::settings::Settings;
use crate::state::State;
use crate::state::store::Store;
use crate::status::Status;
use crate::{disaster, membership, mirror, reconcile, snapshot, volume};

/// State of a cluster, and the parts that work on it.
pub struct Controller {
    pub state: Arc<State>,
    pub volumes: volume::Parts,
    pub snapshots: snapshot::Parts,
    pub mirror: mirror::Parts,
    pub membership: membership::Parts,
    pub removals: Removals,
    pub work: reconcile::Parts,
    pub disaster: disaster::Parts,
    pub assignments: Assignments,
    pub reports: Reports,
    pub status: Status,
}

impl Controller {
    /// Tells events from now on at the objects of Kubernetes that they concern, until `shutdown` is true.
    pub fn tell_events_to_kubernetes(
        &self,
        api: ApiOptions,
        shutdown: watch::Receiver<bool>,
    ) -> impl Future<Output = ()> + Send + use<> {
        KubernetesEvents::new(api, self.state.clone()).keep_told(shutdown)
    }

    /// Reads all records. [`reconcile::lifecycle::Lifecycle::reconcile_all`] completes changes that
    /// a crash interrupted.
    pub async fn open(
        store: Arc<dyn Store>,
        identity: Identity,
        authority: Authority,
        settings: Settings,
    ) -> Result<Self, Error> {
        let state = Arc::new(State::open(store, identity, settings).await?);
        let membership = membership::Parts::new(&state, authority);
        let volumes = volume::Parts::new(&state, &membership.terms);
        let work = reconcile::Parts::new(&state, &volumes.verifier);
        let disaster = disaster::Parts::new(&state, &membership, &work.lifecycle);
        let snapshots = snapshot::Parts::new(&state);
        let mirror = mirror::Parts::new(&state, &membership.peers, &volumes.catalog, &snapshots);
        Ok(Self {
            assignments: Assignments::new(
                state.clone(),
                volumes.verifier.clone(),
                volumes.devices.clone(),
                volumes.reclaims.clone(),
                membership.terms.clone(),
                disaster.salvage.clone(),
            ),
            reports: Reports::new(state.clone(), &work, &volumes, mirror.driver.clone()),
            snapshots,
            mirror,
            status: Status::new(state.clone(), &work, &volumes, &membership),
            removals: membership.removals(&state, &work),
            disaster,
            work,
            membership,
            volumes,
            state,
        })
    }
}
