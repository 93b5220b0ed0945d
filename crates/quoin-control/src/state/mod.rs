//! State of the cluster: the records with their store, what is observed, events, and changes of all
//! of them. [`State`] is what all parts of the controller share.

pub(crate) mod census;
pub mod changes;
pub mod events;
mod fences;
pub(crate) mod mirrored;
pub(crate) mod observed;
pub(crate) mod own_term;
pub(crate) mod pulls;
pub(crate) mod reach;
mod ruling;
pub(crate) mod snapshot_tables;
pub mod store;
pub(crate) mod table;

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use quoin_api::control::{RecordsStore, VolumeRef};
use quoin_cluster::ownership::change;
use quoin_cluster::ownership::epochs::is_written;
use quoin_cluster::records::{
    Concerned, CordonRecord, FenceRecord, MemberOfCluster, MirrorAddressRecord, NameRecord,
    NodeRecord, Nodes, PeerRecord, PoolRecord, TokenRecord, VerifyRecord, VolumeRecord,
};
use quoin_identity::Identity;
use quoin_types::VolumeId;
use rand::RngCore;
use tokio::sync::watch;

use crate::Error;
use crate::settings::Settings;
use crate::state::changes::{Changes, Concern, Follower};
use crate::state::events::{Events, Object, Severity};
use crate::state::mirrored::Mirrored;
use crate::state::observed::Observed;
use crate::state::own_term::OwnTerm;
use crate::state::snapshot_tables::SnapshotTables;
use crate::state::store::{LeaseHeld, Store, Watched, Writes};
use crate::state::table::Table;
use crate::volume::policy::ReplaceAfter;

/// Records, what is observed, and what all parts share.
pub struct State {
    pub(crate) settings: Settings,
    pub(crate) storage: Storage,
    pub(crate) identity: Identity,
    pub(crate) volumes: Table<VolumeRecord>,
    pub(crate) names: Table<NameRecord>,
    pub(crate) pools: Table<PoolRecord>,
    pub(crate) nodes: Table<NodeRecord>,
    pub(crate) joined: Joined,
    pub(crate) cordons: Table<CordonRecord>,
    pub(crate) verifications: Table<VerifyRecord>,
    pub(crate) snapshots: SnapshotTables,
    pub(crate) mirrored: Mirrored,
    pub(crate) term: OwnTerm,
    pub(crate) events: Events,
    pub(crate) observed: Mutex<Observed>,
    /// Makes the check of a free name and its use one step.
    pub(crate) creating: tokio::sync::Mutex<()>,
    changes: Changes,
}

/// The store of all records.
pub(crate) struct Storage {
    pub(crate) store: Arc<dyn Store>,
    /// Results of the last writes of records.
    pub(crate) writes: Arc<Writes>,
    /// Number of times the store had been opened again at the last event about it.
    opened_again: AtomicU64,
}

impl Storage {
    fn new(store: Arc<dyn Store>) -> Self {
        let writes = Arc::new(Writes::default());
        let store: Arc<dyn Store> = Arc::new(Watched::new(store, writes.clone()));
        Self { store, writes, opened_again: AtomicU64::new(0) }
    }

    /// Time since the store answered, a renewal of its lease included.
    pub(crate) fn since_answer(&self, lease: Option<&LeaseHeld>) -> Option<Duration> {
        let renewed = lease.map(|lease| lease.since_renewal);
        [self.writes.latency().since_answer(), renewed].into_iter().flatten().min()
    }

    /// The store in words for people.
    pub(crate) fn shown(&self) -> RecordsStore {
        let about = self.store.about();
        let lease = about.lease.as_ref();
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        RecordsStore {
            engine: about.engine.to_owned(),
            place: about.place,
            leader: lease.map(|lease| lease.holder.clone()).unwrap_or_default(),
            lease_ms: lease.map_or(0, |lease| ms(lease.lasts)),
            lease_left_ms: lease.map_or(0, |lease| ms(lease.left())),
            latency_us: self.writes.latency().last().map_or(0, us),
            answered_ms: self.since_answer(lease).map_or(0, ms),
            failing: self.writes.latency().failing().unwrap_or_default(),
        }
    }

    /// Returns whether the store was opened again since the last call.
    fn was_opened_again(&self) -> bool {
        let times = self.store.opened_again();
        self.opened_again.swap(times, Ordering::Relaxed) < times
    }
}

/// The members of the cluster, the tokens with which others may join it, other clusters, and the
/// addresses that are shut out.
pub(crate) struct Joined {
    pub(crate) members: Table<MemberOfCluster>,
    pub(crate) tokens: Table<TokenRecord>,
    /// Other clusters.
    pub(crate) peers: Table<PeerRecord>,
    /// Where those reach this one's mirrors.
    pub(crate) mirror_addresses: Table<MirrorAddressRecord>,
    pub(crate) fences: Table<FenceRecord>,
    /// Held for writing while a fence is recorded: what is granted is granted before it or sees it.
    pub(crate) fencing: tokio::sync::RwLock<()>,
}

impl Joined {
    async fn load(store: Arc<dyn Store>, changes: Changes) -> Result<Self, Error> {
        Ok(Self {
            members: Table::load(store.clone(), changes.clone()).await?,
            tokens: Table::load(store.clone(), changes.clone()).await?,
            peers: Table::load(store.clone(), changes.clone()).await?,
            mirror_addresses: Table::load(store.clone(), changes.clone()).await?,
            fences: Table::load(store, changes).await?,
            fencing: tokio::sync::RwLock::default(),
        })
    }

    async fn read_unanswered(&self) -> Result<(), Error> {
        self.tokens.read_unanswered().await?;
        self.peers.read_unanswered().await?;
        self.mirror_addresses.read_unanswered().await?;
        self.fences.read_unanswered().await?;
        self.members.read_unanswered().await
    }
}

impl State {
    /// Reads all records.
    pub async fn open(
        store: Arc<dyn Store>,
        identity: Identity,
        settings: Settings,
    ) -> Result<Self, Error> {
        let storage = Storage::new(store);
        let (store, changes) = (&storage.store, Changes::default());
        let state = Self {
            volumes: Table::load(store.clone(), changes.clone()).await?,
            names: Table::load(store.clone(), changes.clone()).await?,
            pools: Table::load(store.clone(), changes.clone()).await?,
            nodes: Table::load(store.clone(), changes.clone()).await?,
            joined: Joined::load(store.clone(), changes.clone()).await?,
            cordons: Table::load(store.clone(), changes.clone()).await?,
            verifications: Table::load(store.clone(), changes.clone()).await?,
            snapshots: SnapshotTables::load(store, &changes).await?,
            mirrored: Mirrored::load(store, &changes).await?,
            term: OwnTerm::load(store.clone(), changes.clone()).await?,
            events: Events::load(store.clone()).await?,
            observed: Mutex::new(Observed::new()),
            creating: tokio::sync::Mutex::new(()),
            storage,
            identity,
            settings,
            changes,
        };
        state.drop_unused_names().await?;
        state.snapshots.drop_unused_names().await?;
        Ok(state)
    }

    /// Reads the results of changes that the store did not answer. Records an event where the store
    /// was opened again.
    pub async fn read_unanswered(&self) -> Result<(), Error> {
        if self.storage.was_opened_again() {
            let message = "a write failed; the records were opened again, and what was answered before \
                           is there. Look at the disk of the controller's directory";
            let cluster = Object::new("cluster", "", "");
            self.events.record(Severity::Warning, cluster, "RecordsOpenedAgain", message);
        }
        self.volumes.read_unanswered().await?;
        self.names.read_unanswered().await?;
        self.pools.read_unanswered().await?;
        self.nodes.read_unanswered().await?;
        self.joined.read_unanswered().await?;
        self.cordons.read_unanswered().await?;
        self.verifications.read_unanswered().await?;
        self.snapshots.read_unanswered().await?;
        self.mirrored.read_unanswered().await?;
        self.term.read_unanswered().await
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Counter that grows whenever an assignment or a status may have changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.any()
    }

    /// Returns whether an older state of the pool's disk came back. Such a pool is used for nothing.
    pub fn is_rolled_back(&self, pool: &str) -> bool {
        self.pools.get(pool).is_some_and(|pool| pool.rolled_back)
    }

    /// Policy of a volume: its own, or the cluster's.
    pub fn replace_after(&self, volume: &VolumeRecord) -> ReplaceAfter {
        volume.spec.options.replace_after.unwrap_or(self.settings.replace_after)
    }

    /// Follows what may change the assignment of a pool or a node.
    pub(crate) fn changes_of(&self, concern: Concern) -> Follower {
        self.changes.of(concern)
    }

    /// Announces a change of observed state; changes of records are announced by their tables.
    pub(crate) fn announce(&self, concerned: &Concerned) {
        self.changes.wake(concerned, None);
    }

    /// Wakes the streams of the node whose target has the volume: there is something to do with it.
    pub(crate) fn tell_target(&self, volume: VolumeId) {
        let owner = self.volumes.get(&volume.to_string()).and_then(|v| v.opened.owner.clone());
        let nodes = Nodes::These(owner.into_iter().collect());
        self.changes.wake(&Concerned::Some { pools: BTreeSet::new(), nodes }, Some(volume));
        self.changes.hurry(volume);
    }

    /// Returns true if the target of a volume has to change its content.
    pub(crate) fn is_written(&self, volume: &VolumeRecord) -> bool {
        let revert = self.snapshots.reverts.get(&volume.id.0.to_string());
        let goes_back = revert.is_some_and(|revert| revert.is_open());
        is_written(volume, goes_back || self.mirrored.is_fed(volume))
    }

    /// Has each volume whose users wait for its target put into a queue.
    pub(crate) fn queue_urgent(&self, queue: impl Fn(VolumeId) + Send + Sync + 'static) {
        self.changes.queue_urgent(queue);
    }

    /// Has each volume that changes put into a queue.
    pub(crate) fn queue_volumes(&self, queue: impl Fn(VolumeId) + Send + Sync + 'static) {
        self.changes.queue(queue);
    }

    /// Queues volumes of which something else is observed than before.
    pub(crate) fn look_at(&self, volumes: &[Arc<VolumeRecord>]) {
        volumes.iter().for_each(|volume| self.changes.look_at(volume.id.0));
    }

    /// Volumes with a replica in one of these pools, or one that it is to remove, in the order of
    /// their ids.
    pub(crate) fn volumes_of_pools(&self, pools: &HashSet<String>) -> Vec<Arc<VolumeRecord>> {
        let mut names = BTreeSet::new();
        self.volumes.index(|index| {
            let of_pools = pools.iter().filter_map(|pool| index.of_pool(pool));
            names.extend(of_pools.flatten().cloned());
        });
        names.iter().filter_map(|name| self.volumes.get(name)).collect()
    }

    /// Volumes with a replica in the pool, or one that it is to remove.
    pub(crate) fn volumes_of_pool(&self, pool: &str) -> Vec<Arc<VolumeRecord>> {
        self.volumes.indexed(|index| index.of_pool(pool))
    }

    /// Volumes that the node owns or has attached.
    pub(crate) fn volumes_of_node(&self, node: &str) -> Vec<Arc<VolumeRecord>> {
        self.volumes.indexed(|index| index.of_node(node))
    }

    pub(crate) fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().expect("no holder of this lock panics")
    }

    /// Finds the volume of a reference: by id or, where the id is empty, by name.
    pub(crate) fn volume(&self, reference: Option<&VolumeRef>) -> Result<Arc<VolumeRecord>, Error> {
        let Some(reference) = reference else {
            return Err(Error::invalid("volume", "an id or a name is needed"));
        };
        // A volume that is missing in records that do not rule may still exist.
        self.check_ruling()?;
        let missing = || missing(Some(reference));
        if !reference.id.is_empty() {
            // Each id has one text form only, so equal ids have equal text.
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

    /// Changes a volume's record, with what follows from the change ([`change::complete`]).
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
            change::complete(&before, volume, is_confirmed, term)?;
            Ok(value)
        };
        let updated = self.volumes.update(&name, change).await?;
        updated.ok_or_else(|| Error::missing("volume", name))
    }

    /// Removes names without a volume: a name is written before its volume, and a crash in between
    /// leaves the name only.
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

/// Error for a reference that leads to no volume; it repeats the reference.
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
