//! The controller: records, what is observed, and what follows from both.
//!
//! The other modules add its parts: [`crate::volumes`] (create, delete, resize), attach,
//! epochs (the compare-and-swaps that targets ask for), reports, assignments, status,
//! reconcile, members (tokens and certificates). gRPC is a thin layer above.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use quoin_api::control::VolumeRef;
use quoin_identity::{Authority, Identity};
use quoin_types::VolumeId;
use rand::RngCore;
use tokio::sync::watch;

use crate::Error;
use crate::admission::Replaced;
use crate::changes::{Changes, Concern, Concerned};
use crate::dying::{DyingLimits, DyingPolicy};
use crate::events::{Events, Object, Severity};
use crate::observed::Observed;
use crate::policy::{RebalanceAt, ReplaceAfter};
use crate::records::{
    CordonRecord, MemberOfCluster, NameRecord, NodeRecord, PoolRecord, RecoveryRecord, TokenRecord,
    VolumeRecord,
};
use crate::salvage::Salvage;
use crate::spec::Defaults;
use crate::store::{Store, Watched, Writes};
use crate::table::Table;
use crate::term::OwnTerm;
use crate::verification::VerifyRecord;

/// What a controller is told once, at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    pub defaults: Defaults,
    /// "authenticate" or "encrypt".
    pub data_security: String,
    /// A pool or node that has not reported for so long is offline.
    pub offline_after: Duration,
    /// When replicas that are gone are replaced, where a volume does not say.
    pub replace_after: ReplaceAfter,
    /// Rebuilds into one pool at a time, of those that nobody asked for.
    pub heals_per_pool: u32,
    /// What becomes of pools whose disks are failing.
    pub dying_pools: DyingPolicy,
    /// When a pool's disk is taken to be failing.
    pub dying_limits: DyingLimits,
    /// How unevenly pools may fill before replicas move.
    pub rebalance_at: RebalanceAt,
    /// Replicas of one volume at most.
    pub replicas_max: u32,
}

/// The cluster's records and the logic over them.
pub struct Controller {
    pub(crate) settings: Settings,
    /// All records, for a copy of them.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) identity: Identity,
    pub(crate) authority: Mutex<Authority>,
    pub(crate) replaced: Replaced,
    pub(crate) volumes: Table<VolumeRecord>,
    pub(crate) names: Table<NameRecord>,
    pub(crate) pools: Table<PoolRecord>,
    pub(crate) nodes: Table<NodeRecord>,
    pub(crate) tokens: Table<TokenRecord>,
    pub(crate) members: Table<MemberOfCluster>,
    pub(crate) cordons: Table<CordonRecord>,
    pub(crate) verifications: Table<VerifyRecord>,
    pub(crate) recovery: Table<RecoveryRecord>,
    pub(crate) salvage: Salvage,
    pub(crate) term: OwnTerm,
    pub(crate) events: Events,
    pub(crate) observed: Mutex<Observed>,
    /// Makes "is the name free" and "take it" one step.
    pub(crate) creating: tokio::sync::Mutex<()>,
    /// How writing records went last.
    pub(crate) writes: Arc<Writes>,
    /// How often the store had been opened again when that was told of last.
    opened_again: AtomicU64,
    changes: Changes,
}

impl Controller {
    /// Reads all records. What a crash left half done is completed by [`Controller::reconcile`].
    pub async fn open(
        store: Arc<dyn Store>,
        identity: Identity,
        authority: Authority,
        settings: Settings,
    ) -> Result<Self, Error> {
        let writes = Arc::new(Writes::default());
        let store: Arc<dyn Store> = Arc::new(Watched::new(store, writes.clone()));
        let changes = Changes::default();
        let controller = Self {
            volumes: Table::load(store.clone(), changes.clone()).await?,
            names: Table::load(store.clone(), changes.clone()).await?,
            pools: Table::load(store.clone(), changes.clone()).await?,
            nodes: Table::load(store.clone(), changes.clone()).await?,
            tokens: Table::load(store.clone(), changes.clone()).await?,
            members: Table::load(store.clone(), changes.clone()).await?,
            cordons: Table::load(store.clone(), changes.clone()).await?,
            verifications: Table::load(store.clone(), changes.clone()).await?,
            recovery: Table::load(store.clone(), changes.clone()).await?,
            salvage: Salvage::default(),
            term: OwnTerm::load(store.clone(), changes.clone()).await?,
            events: Events::load(store.clone()).await?,
            store,
            observed: Mutex::new(Observed::new()),
            creating: tokio::sync::Mutex::new(()),
            writes,
            opened_again: AtomicU64::new(0),
            authority: Mutex::new(authority),
            replaced: Replaced::default(),
            identity,
            settings,
            changes,
        };
        controller.drop_unused_names().await?;
        Ok(controller)
    }

    /// Reads what came of changes that the store did not answer, and tells that it was opened again.
    pub async fn read_unanswered(&self) -> Result<(), Error> {
        let times = self.store.opened_again();
        if self.opened_again.swap(times, Ordering::Relaxed) < times {
            let message = "a write failed; the records were opened again, and what was answered before \
                           is there. Look at the disk of the controller's directory";
            let cluster = Object::new("cluster", "", "");
            self.events.record(Severity::Warning, cluster, "RecordsOpenedAgain", message);
        }
        self.volumes.read_unanswered().await?;
        self.names.read_unanswered().await?;
        self.pools.read_unanswered().await?;
        self.nodes.read_unanswered().await?;
        self.tokens.read_unanswered().await?;
        self.members.read_unanswered().await?;
        self.cordons.read_unanswered().await?;
        self.verifications.read_unanswered().await?;
        self.recovery.read_unanswered().await?;
        self.term.read_unanswered().await
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Grows whenever an assignment or a status may have changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.any()
    }

    /// Grows whenever the assignment of a pool or a node may have changed.
    pub fn changes_of(&self, concern: Concern) -> watch::Receiver<u64> {
        self.changes.of(concern)
    }

    /// For changes of what is observed; those of records announce themselves.
    pub(crate) fn announce(&self, concerned: &Concerned) {
        self.changes.wake(concerned);
    }

    pub(crate) fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().expect("no holder of this lock panics")
    }

    /// The volume of a reference: by id or, where that is empty, by name.
    pub(crate) fn volume(&self, reference: Option<&VolumeRef>) -> Result<Arc<VolumeRecord>, Error> {
        let Some(reference) = reference else {
            return Err(Error::invalid("volume", "an id or a name is needed"));
        };
        // What is missing in records that do not rule may exist all the same.
        self.check_ruling()?;
        let missing = || missing(Some(reference));
        if !reference.id.is_empty() {
            // Ids are written in one way only, so that equal text and equal id are the same.
            match self.volumes.get(&reference.id) {
                Some(volume) => return Ok(volume),
                None if reference.name.is_empty() => {
                    return Err(missing());
                }
                None => {}
            }
        }
        if reference.name.is_empty() {
            return Err(Error::invalid("volume", "an id or a name is needed"));
        }
        self.names
            .get(&reference.name)
            .and_then(|name| self.volumes.get(&name.volume_id.0.to_string()))
            .ok_or_else(missing)
    }

    /// Changes a volume's record. Where that takes it from the node that owned it, that node's grants
    /// are taken back. Where that takes a newcomer off it, the membership goes to its
    /// next version: a joint View that names the newcomer can never come to rule then, so nobody
    /// who opens the volume waits for what is being deleted. Not so where nothing has confirmed yet
    /// that the record is no old copy: there that View may have ruled for long.
    pub(crate) async fn update_volume<T>(
        &self,
        id: VolumeId,
        mut change: impl FnMut(&mut VolumeRecord) -> Result<T, Error>,
    ) -> Result<(Arc<VolumeRecord>, T), Error> {
        self.check_ruling()?;
        self.check_term()?;
        let (name, term) = (id.to_string(), self.term());
        let is_confirmed = {
            let observed = self.observed();
            observed.confirmed.contains(&id) && !observed.behind.contains(&id)
        };
        let change = |volume: &mut VolumeRecord| {
            let before = volume.clone();
            let value = change(volume)?;
            if before.owner.is_some() && before.owner != volume.owner {
                volume.fence(false, term)?;
            }
            volume.membership.version += u64::from(is_confirmed && volume.takes_back(&before));
            volume.generation += u64::from(volume.differs(&before));
            Ok(value)
        };
        let updated = self.volumes.update(&name, change).await?;
        updated.ok_or_else(|| Error::missing("volume", name))
    }

    /// A name is taken before its volume is written, so a crash in between leaves it alone.
    async fn drop_unused_names(&self) -> Result<(), Error> {
        for name in self.names.list() {
            let volume = self.volumes.get(&name.volume_id.0.to_string());
            if volume.is_none_or(|volume| volume.spec.name != name.volume_name) {
                self.names.remove(&name.volume_name, |found| *found == *name).await?;
            }
        }
        Ok(())
    }
}

/// Answer for a reference that leads to no volume: it repeats the reference.
pub(crate) fn missing(reference: Option<&VolumeRef>) -> Error {
    let VolumeRef { id, name } = reference.cloned().unwrap_or_default();
    let text = if name.is_empty() { id } else { name };
    Error::missing("volume", text.chars().take(160).collect::<String>())
}

pub(crate) fn random_id() -> u128 {
    let mut bytes = [0; 16];
    rand::rng().fill_bytes(&mut bytes);
    u128::from_le_bytes(bytes)
}

pub(crate) fn about(volume: &VolumeRecord) -> Object {
    Object::new("volume", volume.id.0, &volume.spec.name)
}
