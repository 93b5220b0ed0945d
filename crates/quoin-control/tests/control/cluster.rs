//! A cluster without disks: pools that obey assignments in memory, a store that can crash.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_api::control::{
    NodeReport, PoolReport, ReplicaProgress, ReplicaReport, VolumeRef, VolumeReport, VolumeSpec,
    replica_report,
};
use quoin_api::volume::Spread;
use quoin_cluster::records::VolumeRecord;
use quoin_control::store::{Change, Entry, Put, Store, StoreError, Swap};
use quoin_control::{Controller, Error, MembershipSwap, Settings};
use quoin_identity::{Authority, Identity, Lifetimes, Role};
use quoin_types::membership::default_cf;
use quoin_types::{Epoch, Incarnation, Member, Membership, VolumeId};
use tokio::sync::broadcast;

pub const GIB: u64 = 1 << 30;

/// A store in memory. It survives controllers; `crash_after` makes it fail from some write on.
pub struct Memory {
    records: Mutex<(u64, BTreeMap<String, Entry>)>,
    changes: broadcast::Sender<Change>,
    writes_left: AtomicI64,
    /// True if the write at which it fails is still carried out, unanswered.
    last_write_lands: AtomicBool,
    /// True if nothing works after that write, as for a process that died.
    crashes: AtomicBool,
    /// Number of re-openings that it reports.
    pub opened_again: AtomicU64,
}

/// Outcome of a write.
#[derive(PartialEq)]
enum Fate {
    Done,
    Unanswered,
    Lost,
}

impl Memory {
    pub fn new() -> Arc<Self> {
        Self::crashing(i64::MAX, false)
    }

    pub fn crashing(writes: i64, last_write_lands: bool) -> Arc<Self> {
        Arc::new(Self {
            records: Mutex::default(),
            changes: broadcast::channel(64).0,
            writes_left: AtomicI64::new(writes),
            last_write_lands: AtomicBool::new(last_write_lands),
            crashes: AtomicBool::new(true),
            opened_again: AtomicU64::new(0),
        })
    }

    /// Lets so many more writes succeed; the next one is not answered, whether it lands or not.
    pub fn fail_at(&self, writes: i64, lands: bool, crashes: bool) {
        self.last_write_lands.store(lands, Ordering::SeqCst);
        self.crashes.store(crashes, Ordering::SeqCst);
        self.writes_left.store(writes, Ordering::SeqCst);
    }

    pub fn writes_left(&self) -> i64 {
        self.writes_left.load(Ordering::SeqCst)
    }

    /// Returns whether a write has failed.
    pub fn failed(&self) -> bool {
        self.writes_left() < 0
    }

    fn fate(&self) -> Fate {
        let left = self.writes_left.fetch_sub(1, Ordering::SeqCst);
        match left {
            1.. => Fate::Done,
            0 if self.last_write_lands.load(Ordering::SeqCst) => Fate::Unanswered,
            0 => Fate::Lost,
            _ if self.crashes.load(Ordering::SeqCst) => Fate::Lost,
            _ => Fate::Done,
        }
    }

    pub fn recover(&self) {
        self.writes_left.store(i64::MAX, Ordering::SeqCst);
    }

    pub fn crashed(&self) -> bool {
        self.writes_left.load(Ordering::SeqCst) <= 0
    }

    /// A record as it is now.
    pub fn entry(&self, key: &str) -> Entry {
        self.records.lock().unwrap().1[key].clone()
    }

    /// An older record takes the place of a newer one, as where a backup is restored.
    pub fn put_back(&self, entry: Entry) {
        self.records.lock().unwrap().1.insert(entry.key.clone(), entry);
    }

    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let records = self.records.lock().unwrap();
        records.1.keys().filter(|key| key.starts_with(prefix)).cloned().collect()
    }
}

#[tonic::async_trait]
impl Store for Memory {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        Ok(self.records.lock().unwrap().1.get(key).cloned())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, StoreError> {
        let records = self.records.lock().unwrap();
        Ok(records.1.values().filter(|e| e.key.starts_with(prefix)).cloned().collect())
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: u64,
        value: Option<Vec<u8>>,
    ) -> Result<Swap, StoreError> {
        let fate = self.fate();
        if fate == Fate::Lost {
            return Err(StoreError::Failed("crashed".into()));
        }
        let mut records = self.records.lock().unwrap();
        let found = records.1.get(key).cloned();
        if found.as_ref().map_or(0, |entry| entry.revision) != expected {
            return Ok(Swap::Conflict(found));
        }
        records.0 += 1;
        let revision = records.0;
        match value {
            Some(value) => {
                let entry = Entry { key: key.into(), revision, value };
                records.1.insert(key.into(), entry)
            }
            None => records.1.remove(key),
        };
        let _ = self.changes.send(Change { key: key.into(), revision });
        match fate {
            Fate::Done => Ok(Swap::Done(revision)),
            _ => Err(StoreError::Failed("crashed".into())),
        }
    }

    async fn put_all(&self, puts: Vec<Put>) -> Result<(), StoreError> {
        if puts.is_empty() {
            return Ok(());
        }
        let fate = self.fate();
        if fate == Fate::Lost {
            return Err(StoreError::Failed("crashed".into()));
        }
        let mut records = self.records.lock().unwrap();
        for (key, value) in puts {
            records.0 += 1;
            let revision = records.0;
            match value {
                Some(value) => {
                    let entry = Entry { key: key.clone(), revision, value };
                    records.1.insert(key.clone(), entry)
                }
                None => records.1.remove(&key),
            };
            let _ = self.changes.send(Change { key, revision });
        }
        match fate {
            Fate::Done => Ok(()),
            _ => Err(StoreError::Failed("crashed".into())),
        }
    }

    fn watch(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    fn opened_again(&self) -> u64 {
        self.opened_again.load(Ordering::SeqCst)
    }
}

/// A pool that carries out its orders, remembers every GUID that it ever created, and fails the
/// test when it is ordered to create one twice.
pub struct SimPool {
    pub name: String,
    pub node: String,
    pub id: String,
    pub start_counter: u64,
    pub start_nonce: u64,
    pub mark: u64,
    /// Used bytes beside its replicas, and by each of them.
    pub used_bytes: u64,
    pub replica_bytes: u64,
    /// Its metadata ring has no room for another replica.
    pub ring_full: bool,
    pub online: bool,
    /// GUID → (volume, quorum).
    pub holds: HashMap<String, (String, bool)>,
    /// Epochs that it promised, by GUID.
    pub promised: HashMap<String, u64>,
    /// Word of it that no target's lease lives.
    pub is_silent: bool,
    /// No target has a replica open.
    pub is_closed: bool,
    /// GUIDs of those that share blocks with their source.
    pub clones: std::collections::HashSet<String>,
    born: Vec<String>,
    told: Vec<(String, String, String)>,
}

impl SimPool {
    pub fn new(name: &str, node: &str) -> Self {
        Self {
            name: name.into(),
            node: node.into(),
            id: format!("{name}-1"),
            start_counter: 1,
            start_nonce: 1,
            mark: 0,
            used_bytes: 0,
            replica_bytes: 0,
            ring_full: false,
            online: true,
            holds: HashMap::new(),
            promised: HashMap::new(),
            is_silent: false,
            is_closed: false,
            clones: Default::default(),
            born: Vec::new(),
            told: Vec::new(),
        }
    }

    /// Returns the GUIDs of all replicas that it ever made.
    pub fn born(&self) -> &[String] {
        &self.born
    }

    pub fn wipe(&mut self) {
        self.holds.clear();
    }

    pub fn obey(&mut self, controller: &Controller) {
        let assignment = controller.assignments.of_pool(&self.name);
        assert!(!assignment.complete, "deletions are named one by one");
        self.told.clear();
        for told in assignment.replicas {
            let formed = told.membership.as_ref().unwrap().formed;
            let missing = !self.holds.contains_key(&told.guid);
            match told.phase.as_str() {
                "Clone" if missing && !self.holds_source(told.source.as_ref()) => {}
                "Init" | "Clone" | "Recreate" if missing => {
                    assert!(told.phase == "Recreate" || !formed, "Init after the volume formed");
                    assert!(!self.born.contains(&told.guid), "a GUID was born twice");
                    let quorum = told.phase != "Recreate";
                    if told.phase == "Clone" {
                        self.clones.insert(told.guid.clone());
                    }
                    self.holds.insert(told.guid.clone(), (told.volume_id.clone(), quorum));
                    self.born.push(told.guid.clone());
                }
                "Delete" => drop(self.holds.remove(&told.guid)),
                _ => {}
            }
            if self.holds.contains_key(&told.guid) {
                let promised = self.promised.entry(told.guid.clone()).or_default();
                *promised = told.fence_epoch.max(*promised);
            }
            self.told.push((told.volume_id, told.replica_id, told.guid));
        }
    }

    /// Returns true if it has a replica of the volume that a clone is made from.
    fn holds_source(&self, source: Option<&quoin_api::control::CloneSource>) -> bool {
        let source = source.expect("a clone has a source");
        self.holds.values().any(|(volume, _)| *volume == source.volume_id)
    }

    pub fn report(&self) -> PoolReport {
        let replica = |(volume, replica, guid): &(String, String, String)| {
            let held = self.holds.get(guid);
            ReplicaReport {
                replica_id: replica.clone(),
                guid: guid.clone(),
                volume_id: volume.clone(),
                state: match held {
                    None => "gone",
                    Some(_) if self.is_closed => "closed",
                    Some(_) => "created",
                }
                .into(),
                quorum: held.is_some_and(|held| held.1),
                is_clone: self.clones.contains(guid),
                used_bytes: held.map_or(0, |_| self.replica_bytes),
                promised_epoch: self.promised.get(guid).copied().unwrap_or(0),
                hearing: match self.is_silent {
                    true => replica_report::Hearing::Silent.into(),
                    false => replica_report::Hearing::Unknown.into(),
                },
                ..ReplicaReport::default()
            }
        };
        let mut replicas: Vec<_> = self.told.iter().map(replica).collect();
        for (guid, (volume, quorum)) in &self.holds {
            if !replicas.iter().any(|r| r.guid == *guid) {
                replicas.push(ReplicaReport {
                    replica_id: "0".repeat(32),
                    guid: guid.clone(),
                    volume_id: volume.clone(),
                    state: "closed".into(),
                    quorum: *quorum,
                    ..ReplicaReport::default()
                });
            }
        }
        let used = self.used_bytes + self.replica_bytes * self.holds.len() as u64;
        PoolReport {
            pool: self.name.clone(),
            pool_id: self.id.clone(),
            node: self.node.clone(),
            address: "127.0.0.1:7000".into(),
            capacity_bytes: 100 * GIB,
            used_bytes: used,
            free_bytes: 100 * GIB - used,
            start_counter: self.start_counter,
            start_nonce: self.start_nonce,
            mark: self.mark,
            ring_full: self.ring_full,
            replicas,
            ..PoolReport::default()
        }
    }
}

/// Returns identity and authority of all tests; made once.
pub fn pki() -> (Identity, Authority) {
    static DIR: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
    let dir: &Path = DIR
        .get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
            let home = dir.path().join("identity");
            authority.issue_identity(&home, Role::Controller, "controller").unwrap();
            dir
        })
        .path();
    let identity = Identity::load(&dir.join("identity")).unwrap();
    (identity, Authority::load(dir, Lifetimes::default()).unwrap())
}

pub struct Cluster {
    pub store: Arc<Memory>,
    pub controller: Controller,
    pub pools: Vec<SimPool>,
    pub offline_after: Duration,
}

/// Returns p1 on host h1, p2 on h2 and so on.
pub fn pools(numbers: std::ops::RangeInclusive<usize>) -> Vec<SimPool> {
    numbers.map(|n| SimPool::new(&format!("p{n}"), &format!("h{n}"))).collect()
}

pub fn spec(name: &str) -> VolumeSpec {
    VolumeSpec { name: name.into(), size_bytes: GIB, ..VolumeSpec::default() }
}

pub fn by_name(name: &str) -> Option<VolumeRef> {
    Some(VolumeRef { id: String::new(), name: name.into() })
}

impl Cluster {
    /// Makes three pools on three hosts, and node n1 and n2, all online.
    pub async fn new() -> Self {
        Self::of(3).await
    }

    /// Makes so many [`pools`], and node n1 and n2, all online.
    pub async fn of(pools: usize) -> Self {
        Self::with(Memory::new(), self::pools(1..=pools)).await
    }

    /// Ends a pool, which reports that it leaves.
    pub async fn goes(&mut self, pool: &str) {
        let pool = self.pools.iter_mut().find(|p| p.name == pool).unwrap();
        pool.online = false;
        let last_words = PoolReport { leaving: true, ..pool.report() };
        self.controller.reports.pool(&last_words).await.unwrap();
    }

    pub async fn with(store: Arc<Memory>, pools: Vec<SimPool>) -> Self {
        let offline_after = Duration::from_secs(3600);
        let controller = open(&store, offline_after).await.unwrap();
        let mut cluster = Self { store, controller, pools, offline_after };
        // A crash in here is repaired by the next controller.
        let _ = cluster.settle().await;
        cluster
    }

    /// Ends the controller process; another one takes over.
    pub async fn restart(&mut self) {
        self.store.recover();
        self.controller = open(&self.store, self.offline_after).await.unwrap();
    }

    /// Lets all members obey and report until nothing changes any more.
    pub async fn settle(&mut self) -> Result<(), Error> {
        for node in ["n1", "n2"] {
            let report = NodeReport { node: node.into(), ..NodeReport::default() };
            self.controller.reports.node(&report).await?;
        }
        for _ in 0..6 {
            for pool in self.pools.iter_mut().filter(|pool| pool.online) {
                pool.obey(&self.controller);
                self.controller.reports.pool(&pool.report()).await?;
            }
        }
        self.controller.work.lifecycle.reconcile_all().await
    }

    pub async fn create(&mut self, name: &str) -> Arc<VolumeRecord> {
        self.controller.volumes.catalog.create(&spec(name), 0).await.unwrap();
        self.settle().await.unwrap();
        self.volume(name)
    }

    pub fn volume(&self, name: &str) -> Arc<VolumeRecord> {
        self.controller.volumes.catalog.get(by_name(name).as_ref()).unwrap()
    }

    pub fn shown(&self, name: &str) -> quoin_api::control::Volume {
        self.controller.status.volume(&self.volume(name))
    }

    pub async fn attach(&self, name: &str, node: &str) -> Result<Arc<VolumeRecord>, Error> {
        let publish = quoin_control::Publish { node: node.into(), ..Default::default() };
        self.controller.volumes.attachments.publish(by_name(name).as_ref(), &publish).await
    }

    pub async fn open_volume(&self, id: VolumeId, node: &str, incarnation: u128) -> Epoch {
        let incarnation = Incarnation(incarnation);
        let acquired =
            self.controller.volumes.epochs.acquire(id, node, incarnation, Epoch(0)).await;
        acquired.unwrap().unwrap().epoch
    }

    /// Opens the volume as its target would; returns true if that may change its content, as its pools
    /// and the target itself are told.
    pub async fn opens_to_write(&self, name: &str, node: &str, incarnation: u128) -> bool {
        let id = self.volume(name).id.0;
        let incarnation = Incarnation(incarnation);
        let acquired =
            self.controller.volumes.epochs.acquire(id, node, incarnation, Epoch(0)).await;
        let grant = acquired.unwrap().unwrap().grant;
        let writes = self.controller.state.identity().verify_grant(&grant).unwrap().writes;
        let targets = self.controller.assignments.of_node(node).targets;
        let target = targets.iter().find(|target| target.volume_id == id.to_string()).unwrap();
        let shared = target.sharers.iter().any(|sharer| !sharer.read_only);
        assert_eq!(writes, !target.read_only || shared, "{target:?}");
        writes
    }

    /// Returns the swap that a volume's target would request: the present known list, changed.
    pub fn swap(
        &self,
        name: &str,
        epoch: Epoch,
        incarnation: u128,
        change: impl FnOnce(&mut Vec<Member>),
    ) -> MembershipSwap {
        let volume = self.volume(name);
        let mut membership = Membership::from(&volume.membership);
        let before = membership.known.len();
        change(&mut membership.known);
        if membership.known.len() != before {
            membership.rf = membership.known.len() as u8;
            membership.cf = default_cf(membership.rf);
        }
        MembershipSwap {
            volume: volume.id.0,
            node: volume.opened.owner.clone().unwrap_or_default(),
            epoch,
            incarnation: Incarnation(incarnation),
            version: membership.version,
            rf: membership.rf,
            cf: membership.cf,
            known: membership.known,
        }
    }

    /// Reports as the target that it serves, with these replicas in this state.
    pub async fn serving(&self, name: &str, states: &[(&str, &str)]) -> Vec<u8> {
        let progress = |(guid, state): &(&str, &str)| ReplicaProgress {
            guid: (*guid).into(),
            state: (*state).into(),
            ..ReplicaProgress::default()
        };
        let replicas = states.iter().map(progress).collect();
        self.reports(name, "serving", |report| report.replicas = replicas).await
    }

    /// Reports this as the target, which uses the record's present membership.
    pub async fn reports(
        &self,
        name: &str,
        state: &str,
        more: impl FnOnce(&mut VolumeReport),
    ) -> Vec<u8> {
        let mut report = self.report_of(name, state);
        more(&mut report);
        self.controller.reports.volume(&report).await.unwrap()
    }

    pub fn report_of(&self, name: &str, state: &str) -> VolumeReport {
        let volume = self.volume(name);
        VolumeReport {
            volume_id: volume.id.0.to_string(),
            node: volume.opened.owner.clone().unwrap(),
            epoch: volume.opened.epoch,
            state: state.into(),
            membership_version: volume.membership.version,
            ..VolumeReport::default()
        }
    }

    pub fn reasons(&self) -> Vec<String> {
        self.controller.state.events().after(0).into_iter().map(|event| event.reason).collect()
    }
}

pub async fn open(store: &Arc<Memory>, offline_after: Duration) -> Result<Controller, Error> {
    open_on(store.clone(), offline_after).await
}

pub async fn open_on(store: Arc<dyn Store>, offline_after: Duration) -> Result<Controller, Error> {
    let (identity, authority) = pki();
    let settings = Settings {
        defaults: quoin_control::spec::Defaults { replicas: 3, spread: Spread::Host },
        data_security: "authenticate".into(),
        offline_after,
        node_timeout: offline_after,
        replace_after: quoin_control::policy::ReplaceAfter::DEFAULT,
        heals_per_pool: 2,
        dying_pools: quoin_control::dying::DyingPolicy::Drain,
        dying_limits: quoin_control::dying::DyingLimits::default(),
        rebalance_at: quoin_control::policy::RebalanceAt::DEFAULT,
        replicas_max: 5,
    };
    Controller::open(store, identity, authority, settings).await
}
