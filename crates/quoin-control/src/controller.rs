//! The controller: the state, and the parts that work on it.
//!
//! gRPC is a thin layer above. Each reconciler owns its memory and runs in a task of its own
//! ([`crate::reconcile`]).

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use quoin_identity::{Authority, Identity};

use tokio::task::JoinSet;

use crate::Error;
use crate::api::assignments::Assignments;
use crate::api::reports::Reports;
use crate::disaster::salvage::Recoveries;
use crate::membership::removal::Removals;
use crate::reconcile::absence::Absence;
use crate::reconcile::cordon::Cordons;
use crate::reconcile::dying::{DyingLimits, DyingPolicy, DyingPools};
use crate::reconcile::heal::Healer;
use crate::reconcile::lifecycle::Lifecycle;
use crate::reconcile::rebalance::{Balancer, Evening};
use crate::reconcile::tending::Tender;
use crate::reconcile::{self, Reconciler};
use crate::state::State;
use crate::state::store::Store;
use crate::status::Status;
use crate::volume::policy::{RebalanceAt, ReplaceAfter};
use crate::volume::spec::Defaults;
use crate::volume::verification::Verifier;

/// Settings of a controller, fixed at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    pub defaults: Defaults,
    /// "authenticate" or "encrypt".
    pub data_security: String,
    /// Time without a report after which a pool or node is offline.
    pub offline_after: Duration,
    /// Time after which a missing replica is replaced, for volumes without their own setting.
    pub replace_after: ReplaceAfter,
    /// Rebuilds into one pool at a time, counting only those that no user requested.
    pub heals_per_pool: u32,
    /// Action on pools whose disks are failing.
    pub dying_pools: DyingPolicy,
    /// Limits at which a pool's disk counts as failing.
    pub dying_limits: DyingLimits,
    /// Difference of the pools' used shares above which replicas move.
    pub rebalance_at: RebalanceAt,
    /// Most replicas that one volume may have.
    pub replicas_max: u32,
}

/// State of a cluster, and all that is done with it.
pub struct Controller {
    pub(crate) state: Arc<State>,
    pub assignments: Assignments,
    pub reports: Reports,
    pub status: Status,
    pub cordons: Cordons,
    pub verifier: Arc<Verifier>,
    pub lifecycle: Arc<Lifecycle>,
    pub healer: Arc<Healer>,
    pub balancer: Arc<Balancer>,
    pub tender: Arc<Tender>,
    pub(crate) absence: Arc<Absence>,
    pub removals: Removals,
    pub salvage: Recoveries,
}

impl Controller {
    /// Reads all records. [`Lifecycle::reconcile_all`] completes changes that a crash interrupted.
    pub async fn open(
        store: Arc<dyn Store>,
        identity: Identity,
        authority: Authority,
        settings: Settings,
    ) -> Result<Self, Error> {
        let state = Arc::new(State::open(store, identity, authority, settings).await?);
        let verifier = Arc::new(Verifier::new(state.clone()));
        let lifecycle = Arc::new(Lifecycle::new(state.clone(), verifier.clone()));
        let balancer = Arc::new(Balancer::new(state.clone()));
        let healer = Arc::new(Healer::new(state.clone(), balancer.clone()));
        let tender = Arc::new(Tender::new(state.clone(), verifier.clone()));
        let dying = Arc::new(DyingPools::new(state.clone()));
        let absence = Arc::new(Absence::new(state.clone()));
        let reports = Reports::new(
            state.clone(),
            lifecycle.clone(),
            verifier.clone(),
            dying.clone(),
            absence.clone(),
        );
        Ok(Self {
            assignments: Assignments::new(state.clone(), verifier.clone()),
            status: Status::new(state.clone(), verifier.clone(), balancer.clone()),
            cordons: Cordons::new(state.clone(), healer.clone(), dying.clone()),
            removals: Removals::new(state.clone(), lifecycle.clone(), absence.clone(), dying),
            salvage: Recoveries::new(state.clone(), lifecycle.clone()),
            reports,
            verifier,
            lifecycle,
            healer,
            balancer,
            tender,
            absence,
            state,
        })
    }

    /// Records an event for each pool and node that has not reported for too long.
    pub fn announce_absent(&self) {
        for volume in self.absence.announce() {
            self.lifecycle.announce_health(&volume);
        }
    }

    /// Works on what changes, each kind in a task of its own, until the tasks are dropped.
    pub(crate) fn work(&self) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let evening = Arc::new(Evening::new(self.balancer.clone(), self.healer.clone()));
        tasks.spawn(reconcile::work(self.lifecycle.clone()));
        tasks.spawn(reconcile::work(self.healer.clone()));
        tasks.spawn(reconcile::work(self.tender.clone()));
        tasks.spawn(reconcile::work(evening));
        tasks.spawn(reconcile::rounds(self.state.clone()));
        // What was left over by the last process comes first.
        for volume in self.state.volumes.list() {
            self.lifecycle.queue().add(volume.id.0, Duration::ZERO);
            self.state.look_at(&[volume]);
        }
        tasks
    }
}

impl Deref for Controller {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}
