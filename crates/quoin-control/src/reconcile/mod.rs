//! Work that makes the cluster follow its records, without a request.
//!
//! Each reconciler owns what it remembers, works on the keys of its queue one after the other, and
//! runs in a task of its own, so that a slow one delays no other. What changed is queued: by the
//! tables of records, and where what is observed of a volume changed. Beside that each volume comes
//! by in a slow full round ([`rounds`]), for what nothing announces.

use std::sync::Arc;
use std::time::Duration;

use quoin_types::VolumeId;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::Error;
use crate::state::State;
use crate::status::health::Conditions;
use crate::volume::verification::Verifier;

pub(crate) mod absence;
pub(crate) mod balance;
pub(crate) mod cordon;
pub mod dying;
pub(crate) mod failover;
pub(crate) mod forming;
pub(crate) mod heal;
pub(crate) mod lifecycle;
pub(crate) mod queue;
pub(crate) mod reach;
pub(crate) mod rebalance;
pub(crate) mod tending;

pub(crate) use queue::Queue;

/// Changes that come within this time are one look.
pub(crate) const SETTLES_WITHIN: Duration = Duration::from_secs(1);
/// Time between two looks at a volume that is not at rest.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Most volumes in one queue.
pub(crate) const VOLUMES_MAX: usize = 1 << 16;
/// Volumes of the full round in each second.
const ROUND_VOLUMES: usize = 256;

/// When a key is to be worked on again, beside what changes bring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Only when something changes.
    Rest,
    After(Duration),
}

/// One kind of work.
#[async_trait::async_trait]
pub(crate) trait Reconciler: Send + Sync + 'static {
    type Key: Clone + Eq + std::hash::Hash + Ord + std::fmt::Debug + Send + Sync;
    /// In messages.
    const NAME: &'static str;

    fn queue(&self) -> &Queue<Self::Key>;

    /// Brings what the key names one step on. It reads the present state, so it may be called at
    /// any time. A failure has the key tried again, later each time.
    async fn reconcile(&self, key: &Self::Key, now: Instant) -> Result<Next, Error>;
}

/// Works on the queue of a reconciler, for ever.
pub(crate) async fn work<R: Reconciler>(reconciler: Arc<R>) {
    loop {
        let key = reconciler.queue().next().await;
        match reconciler.reconcile(&key, Instant::now()).await {
            Ok(next) => {
                reconciler.queue().succeeded(&key);
                if let Next::After(pause) = next {
                    reconciler.queue().add(key, pause);
                }
            }
            Err(error) => {
                tracing::error!(%error, what = R::NAME, ?key, "not done this time, trying again");
                reconciler.queue().failed(key);
            }
        }
        // A long queue must not hold up the other tasks of this thread.
        tokio::task::yield_now().await;
    }
}

/// Brings each volume into the queues, again and again, at most so many in a second.
pub(crate) async fn rounds(state: Arc<State>) {
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut after = String::new();
    loop {
        tick.tick().await;
        let page = state.volumes.page_of(&after, ROUND_VOLUMES, |_| true);
        after = match page.last() {
            Some(last) if page.len() == ROUND_VOLUMES => last.id.0.to_string(),
            _ => String::new(),
        };
        state.look_at(&page);
    }
}

/// A queue of volumes that is filled by whatever changes, after a pause.
pub(crate) fn queue_of_volumes(state: &State, pause: Duration) -> Arc<Queue<VolumeId>> {
    let queue = Arc::new(Queue::new(VOLUMES_MAX));
    let filled = queue.clone();
    state.queue_volumes(move |volume| filled.add(volume, pause));
    queue
}

/// Reconcilers, and who acts with them.
pub struct Parts {
    pub lifecycle: Arc<lifecycle::Lifecycle>,
    pub healer: Arc<heal::Healer>,
    pub forming: Arc<forming::Forming>,
    pub balancer: Arc<rebalance::Balancer>,
    pub tender: Arc<tending::Tender>,
    pub cordons: cordon::Cordons,
    pub(crate) conditions: Arc<Conditions>,
    pub(crate) absence: Arc<absence::Absence>,
    pub failover: failover::Failover,
    pub(crate) dying: Arc<dying::DyingPools>,
}

impl Parts {
    pub(crate) fn new(state: &Arc<State>, verifier: &Arc<Verifier>) -> Self {
        let balancer = Arc::new(rebalance::Balancer::new(state.clone()));
        let healer = Arc::new(heal::Healer::new(state.clone(), balancer.clone()));
        let dying = Arc::new(dying::DyingPools::new(state.clone()));
        let conditions = Arc::new(Conditions::new(state.clone()));
        let lifecycle =
            lifecycle::Lifecycle::new(state.clone(), verifier.clone(), conditions.clone());
        Self {
            lifecycle: Arc::new(lifecycle),
            forming: Arc::new(forming::Forming::new(state.clone())),
            conditions,
            tender: Arc::new(tending::Tender::new(state.clone(), verifier.clone())),
            cordons: cordon::Cordons::new(state.clone(), healer.clone(), dying.clone()),
            absence: Arc::new(absence::Absence::new(state.clone())),
            failover: failover::Failover::new(state.clone()),
            balancer,
            healer,
            dying,
        }
    }

    /// Records an event for each pool and node that has not reported for too long.
    pub fn announce_absent(&self) {
        for volume in self.absence.announce() {
            self.lifecycle.announce_health(&volume);
        }
    }

    /// Works on what changes, each kind in a task of its own, until the tasks are dropped.
    pub(crate) fn spawn(&self, state: &Arc<State>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let evening = Arc::new(rebalance::Evening::new(self.balancer.clone(), self.healer.clone()));
        tasks.spawn(work(self.lifecycle.clone()));
        tasks.spawn(work(self.forming.clone()));
        tasks.spawn(work(self.healer.clone()));
        tasks.spawn(work(self.tender.clone()));
        tasks.spawn(work(evening));
        tasks.spawn(rounds(state.clone()));
        // Work that the last process left over comes first.
        for volume in state.volumes.list() {
            self.lifecycle.queue().add(volume.id.0, Duration::ZERO);
            self.forming.queue().add(volume.id.0, Duration::ZERO);
            state.look_at(&[volume]);
        }
        tasks
    }
}

#[cfg(test)]
mod tests;
