//! The real controller, in this process: its records on disk, its sockets, its rules.
//!
//! Its cluster is small: three pools that obey and report as pools do and store no data, and a
//! target that listens where it is ordered to serve and answers nothing. The data of a volume does
//! not concern the CSI services; `quoin dev` with real pools and targets is driven by the same
//! clients elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::*;
use quoin_identity::unix_channel;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tonic::Status;
use tonic::transport::Channel;

/// Size of each of the three pools; 80 % of it may be used.
pub const POOL_BYTES: u64 = 100 << 30;
/// A node other than the plugin's own.
pub const OTHER_NODE: &str = "node-b";
/// Addresses of the hosts of both nodes.
pub const ADDRESSES: [(&str, &str); 2] = [("node-a", "192.0.2.11"), (OTHER_NODE, "192.0.2.12")];
/// Bytes of each replica, before space was given back and after.
pub const REPLICA_BYTES: [u64; 2] = [10 << 20, 6 << 20];
const HEARTBEAT: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(10);

pub struct ControlPlane {
    home: PathBuf,
    socket: PathBuf,
    running: Option<Running>,
    agents: BTreeMap<String, JoinHandle<()>>,
    /// Digest of the fences that the targets have carried out.
    fences: Arc<AtomicU64>,
    client: ClusterClient<Channel>,
    /// Pools say that they have the records of their volumes on media.
    pub keeps_records: Arc<AtomicBool>,
}

struct Running {
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
    /// Address at which agents connect over mutual TLS.
    address: String,
}

impl ControlPlane {
    /// Starts a new cluster, served on `socket`, and waits for reports of its pools and nodes.
    pub async fn start(home: PathBuf, socket: PathBuf) -> Self {
        quoin_control::init(&home, Default::default()).await.unwrap();
        let client = ClusterClient::new(unix_channel(&socket));
        let (agents, fences, keeps_records) = (BTreeMap::new(), Arc::default(), Arc::default());
        let mut control =
            Self { home, socket, running: None, agents, fences, client, keeps_records };
        control.serve().await;
        for index in 0..3 {
            let agent = tokio::spawn(pool(
                unix_channel(&control.socket),
                index,
                control.keeps_records.clone(),
            ));
            control.agents.insert(format!("pool-{index}"), agent);
        }
        control
    }

    /// Starts the controller's process, with the records that the last one left.
    pub async fn serve(&mut self) {
        let mut options = quoin_control::Options::new(&self.home);
        options.admin_socket = self.socket.clone();
        // The last one's connections may take a moment to release the records.
        let controller = loop {
            match quoin_control::open(&options).await {
                Ok(controller) => break Arc::new(controller),
                Err(quoin_control::Error::Store(_)) => tokio::time::sleep(RETRY).await,
                Err(error) => panic!("{error}"),
            }
        };
        let _ = std::fs::remove_file(&self.socket);
        let local = UnixListener::bind(&self.socket).unwrap();
        let agents = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = agents.local_addr().unwrap().to_string();
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(async move {
            let served = quoin_control::serve(controller, local, Some(agents), stopped);
            served.await.unwrap();
        });
        self.running = Some(Running { stop, serving, address });
    }

    /// Puts records where the next process finds them; this one has ended.
    pub async fn put(&self, records: Vec<(String, Vec<u8>)>) {
        assert!(self.running.is_none(), "the process has its records");
        let store = loop {
            match quoin_control::store::Embedded::open(&self.home.join("records.redb")) {
                Ok(store) => break store,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        };
        let records = records.into_iter().map(|(key, value)| (key, Some(value))).collect();
        quoin_control::store::Store::put_all(&store, records).await.unwrap();
    }

    /// Returns a record of the last process.
    pub async fn record(&self, key: &str) -> Vec<u8> {
        assert!(self.running.is_none(), "the process has its records");
        let store = loop {
            match quoin_control::store::Embedded::open(&self.home.join("records.redb")) {
                Ok(store) => break store,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        };
        let found = quoin_control::store::Store::get(&store, key).await.unwrap();
        found.unwrap_or_else(|| panic!("there is no record {key}")).value
    }

    pub fn agent(&self) -> AgentClient<Channel> {
        AgentClient::new(unix_channel(&self.socket))
    }

    /// Ends the process; its records stay.
    pub async fn stop(&mut self) {
        let Some(running) = self.running.take() else { return };
        running.stop.send_replace(true);
        running.serving.await.unwrap();
    }

    pub fn address(&self) -> String {
        self.running.as_ref().unwrap().address.clone()
    }

    pub async fn cluster_id(&self) -> String {
        let answer = self.client().get_cluster_info(GetClusterInfoRequest {}).await.unwrap();
        answer.into_inner().cluster_id
    }

    pub fn client(&self) -> ClusterClient<Channel> {
        self.client.clone()
    }

    /// Adds a node whose target listens on `<run>/nbd/<volume id>.sock` for volumes assigned to it.
    pub fn add_node(&mut self, name: &str, volumes_max: u32, run: &Path) {
        let report = NodeReport { node: name.to_owned(), volumes_max, ..Default::default() };
        let admin = unix_channel(&self.socket);
        let agent = tokio::spawn(node(admin, report, run.join("nbd"), self.fences.clone()));
        self.agents.insert(name.to_owned(), agent);
        self.start_obeying(name);
    }

    /// From now on the node's target carries out all commands.
    pub fn start_obeying(&mut self, name: &str) {
        let obeying = tokio::spawn(obey(unix_channel(&self.socket), name.to_owned()));
        self.agents.insert(format!("{name}-commands"), obeying);
    }

    /// Stops all reports of the node and its target.
    pub fn kill_node(&mut self, name: &str) {
        self.agents.remove(name).unwrap().abort();
        self.stop_obeying(name);
    }

    /// From now on the node's target carries out no command.
    pub fn stop_obeying(&mut self, name: &str) {
        if let Some(obeying) = self.agents.remove(&format!("{name}-commands")) {
            obeying.abort();
        }
    }

    /// Waits until all three pools and these nodes have reported.
    pub async fn wait_for_nodes(&mut self, nodes: usize) {
        loop {
            let pools = self.client.list_pools(ListPoolsRequest {}).await.unwrap().into_inner();
            let known = self.client.list_nodes(ListNodesRequest {}).await.unwrap().into_inner();
            if pools.pools.len() == 3 && known.nodes.len() == nodes {
                return;
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Returns the existing volumes; one that is being deleted does not exist for the CSI services.
    pub async fn volumes(&self) -> Vec<Volume> {
        let answer = self.client().list_volumes(ListVolumesRequest::default()).await.unwrap();
        let mut volumes = answer.into_inner().volumes;
        volumes.retain(|volume| volume.phase != "Deleting");
        volumes
    }

    /// Makes a target of the volume that opens it and reports the newest options as in force, for as
    /// long as the test runs.
    pub fn serve_volume(&mut self, id: &str, node: &str) {
        let admin = unix_channel(&self.socket);
        let (key, id, node) = (format!("target of {id}"), id.to_owned(), node.to_owned());
        let fences = self.fences.clone();
        let serving = tokio::spawn(async move {
            let mut agent = AgentClient::new(admin);
            for incarnation in 1_u64.. {
                let asked = AcquireEpochRequest {
                    volume_id: id.clone(),
                    node: node.clone(),
                    incarnation: format!("{incarnation:032x}"),
                    at_least: 0,
                    fences_digest: fences.load(Ordering::SeqCst),
                };
                if let Ok(granted) = agent.acquire_epoch(asked).await {
                    let granted = granted.into_inner();
                    let report = VolumeReport {
                        volume_id: id.clone(),
                        node: node.clone(),
                        epoch: granted.epoch,
                        state: "serving".to_owned(),
                        options_version: granted.options_version,
                        ..Default::default()
                    };
                    let _taken = agent.report_volume(report).await;
                }
                tokio::time::sleep(10 * RETRY).await;
            }
        });
        self.agents.insert(key, serving);
    }

    /// Makes the volume's target open it and report that one replica lags.
    pub async fn degrade(&self, id: &str, node: &str) {
        let mut agent = AgentClient::new(unix_channel(&self.socket));
        let asked = AcquireEpochRequest {
            volume_id: id.to_owned(),
            node: node.to_owned(),
            incarnation: format!("{:032x}", 7),
            at_least: 0,
            ..AcquireEpochRequest::default()
        };
        let granted = agent.acquire_epoch(asked).await.unwrap().into_inner();
        let known = granted.membership.unwrap().known;
        let state = |index: usize| if index == 0 { "disconnected" } else { "in-sync" };
        let progress = |(index, member): (usize, Member)| ReplicaProgress {
            replica_id: member.replica_id,
            guid: member.guid,
            state: state(index).to_owned(),
            ..Default::default()
        };
        let report = VolumeReport {
            volume_id: id.to_owned(),
            node: node.to_owned(),
            epoch: granted.epoch,
            state: "serving".to_owned(),
            replicas: known.into_iter().enumerate().map(progress).collect(),
            ..Default::default()
        };
        agent.report_volume(report).await.unwrap();
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.agents.values().for_each(JoinHandle::abort);
    }
}

/// A pool of a host of its own, for as long as the test runs.
async fn pool(admin: Channel, index: u32, keeps_records: Arc<AtomicBool>) {
    let mut agent = AgentClient::new(admin);
    let mut report = PoolReport {
        pool: format!("pool-{index}"),
        pool_id: format!("{:032x}", index + 1),
        node: format!("host-{index}"),
        // Nobody listens there.
        address: format!("127.0.0.1:{}", 1 + index),
        capacity_bytes: POOL_BYTES,
        free_bytes: POOL_BYTES,
        start_counter: 1,
        topology: [
            ("quoin.io/zone".to_owned(), "z1".to_owned()),
            ("quoin.io/rack".to_owned(), format!("r{index}")),
        ]
        .into(),
        ..Default::default()
    };
    let mut held = BTreeSet::new();
    loop {
        let _gone = apply_assignments(&mut agent, &mut report, &mut held, &keeps_records).await;
        tokio::time::sleep(RETRY).await;
    }
}

/// Carries out the controller's orders and reports, until the controller is away.
async fn apply_assignments(
    agent: &mut AgentClient<Channel>,
    report: &mut PoolReport,
    held: &mut BTreeSet<String>,
    keeps_records: &AtomicBool,
) -> Result<(), Status> {
    agent.report_pool(report.clone()).await?;
    let watched = agent.watch_pool(WatchPoolRequest { pool: report.pool.clone() }).await?;
    let mut assignments = watched.into_inner();
    loop {
        match tokio::time::timeout(HEARTBEAT, assignments.message()).await {
            Err(_) => {}
            Ok(assignment) => {
                let Some(assignment) = assignment? else { return Ok(()) };
                let told = |guid: &String| {
                    !assignment.partial || assignment.replicas.iter().any(|one| one.guid == *guid)
                };
                let removed = |guid: &String| assignment.removed.contains(guid);
                report.replicas.retain(|one| !told(&one.guid) && !removed(&one.guid));
                let replicas = assignment.replicas.into_iter();
                let keeps = keeps_records.load(Ordering::Relaxed);
                let replicas = replicas.map(|one| apply_replica(one, held, keeps));
                report.replicas.extend(replicas);
                for order in assignment.reclaims {
                    let ordered = report.replicas.iter_mut().filter(|one| one.guid == order.guid);
                    ordered.for_each(|one| {
                        (one.reclaimed, one.used_bytes) = (order.request, REPLICA_BYTES[1]);
                    });
                }
            }
        }
        agent.report_pool(report.clone()).await?;
    }
}

fn apply_replica(
    assignment: ReplicaAssignment,
    held: &mut BTreeSet<String>,
    keeps_records: bool,
) -> ReplicaReport {
    match assignment.phase.as_str() {
        "Delete" => drop(held.remove(&assignment.guid)),
        "Init" | "Clone" | "Recreate" => drop(held.insert(assignment.guid.clone())),
        _ => {}
    }
    let state = if held.contains(&assignment.guid) { "created" } else { "gone" };
    ReplicaReport {
        state: state.to_owned(),
        quorum: assignment.phase != "Recreate",
        record_generation: if keeps_records { assignment.generation } else { 0 },
        replica_id: assignment.replica_id,
        guid: assignment.guid,
        volume_id: assignment.volume_id,
        used_bytes: REPLICA_BYTES[0],
        promised_epoch: assignment.fence_epoch,
        ..Default::default()
    }
}

/// Target that takes every key, and wraps those that it has.
#[derive(Default)]
struct Keys(std::sync::Mutex<BTreeMap<String, quoin_encryption::DataKey>>);

impl quoin_encryption::handing::KeyHolder for Keys {
    fn take(
        &self,
        volume: &str,
        key: quoin_encryption::DataKey,
    ) -> Result<(), quoin_encryption::handing::Refusal> {
        self.0.lock().unwrap().insert(volume.to_owned(), key);
        Ok(())
    }

    fn key(
        &self,
        volume: &str,
    ) -> Result<quoin_encryption::DataKey, quoin_encryption::handing::Refusal> {
        let keys = self.0.lock().unwrap();
        keys.get(volume).cloned().ok_or(quoin_encryption::handing::Refusal::NotServed)
    }
}

async fn node(admin: Channel, report: NodeReport, sockets: PathBuf, fences: Arc<AtomicU64>) {
    let mut agent = AgentClient::new(admin);
    let mut serving = BTreeMap::new();
    let (_stop, stopped) = watch::channel(false);
    let mut keys = JoinSet::new();
    let listener = quoin_encryption::handing::bind(&sockets).unwrap();
    keys.spawn(quoin_encryption::handing::serve(listener, Keys::default(), stopped));
    loop {
        let _gone = listen(&mut agent, &report, &sockets, &mut serving, &fences).await;
        tokio::time::sleep(RETRY).await;
    }
}

async fn listen(
    agent: &mut AgentClient<Channel>,
    report: &NodeReport,
    sockets: &Path,
    serving: &mut BTreeMap<String, JoinSet<()>>,
    fences: &AtomicU64,
) -> Result<(), Status> {
    agent.report_node(report.clone()).await?;
    let watched = agent.watch_node(WatchNodeRequest { node: report.node.clone() }).await?;
    let mut assignments = watched.into_inner();
    loop {
        match tokio::time::timeout(HEARTBEAT, assignments.message()).await {
            Err(_) => drop(agent.report_node(report.clone()).await?),
            Ok(assignment) => {
                let Some(assignment) = assignment? else { return Ok(()) };
                let told = assignment.fences.as_ref().map_or(0, |fences| fences.digest);
                fences.store(told, Ordering::SeqCst);
                let own = ADDRESSES.iter().filter(|(node, _)| *node == report.node);
                let lives = TargetReport {
                    node: report.node.clone(),
                    addresses: own.map(|(_, address)| (*address).to_owned()).collect(),
                    fences_digest: told,
                    ..Default::default()
                };
                agent.report_target(lives).await?;
                let wanted: BTreeSet<_> =
                    assignment.targets.into_iter().map(|target| target.volume_id).collect();
                match assignment.partial {
                    true => serving.retain(|id, _| !assignment.removed.contains(id)),
                    false => serving.retain(|id, _| wanted.contains(id)),
                }
                for id in wanted {
                    let path = sockets.join(format!("{id}.sock"));
                    serving.entry(id).or_insert_with(|| {
                        let _ = std::fs::remove_file(&path);
                        let listener = UnixListener::bind(&path).unwrap();
                        let mut connections = JoinSet::new();
                        connections.spawn(async move {
                            // Every client is disconnected: there is no volume behind it.
                            while let Ok(client) = listener.accept().await {
                                drop(client);
                            }
                        });
                        connections
                    });
                }
            }
        }
    }
}

/// Carries out all commands, as a target does that serves all of its volumes.
async fn obey(admin: Channel, name: String) {
    let mut agent = AgentClient::new(admin);
    let mut lsn = 0;
    loop {
        let _gone = obey_stream(&mut agent, &name, &mut lsn).await;
        tokio::time::sleep(RETRY).await;
    }
}

async fn obey_stream(
    agent: &mut AgentClient<Channel>,
    name: &str,
    lsn: &mut u64,
) -> Result<(), Status> {
    use command_outcome::What as Ended;
    use target_command::What as Told;
    let watched = agent.watch_commands(WatchCommandsRequest { node: name.to_owned() }).await?;
    let mut commands = watched.into_inner();
    let mut cuts = BTreeMap::new();
    while let Some(command) = commands.message().await? {
        *lsn += 1;
        let what = match command.what {
            Some(Told::MakeSnapshot(make)) => Ended::SnapshotMade(SnapshotMade {
                snapshot_id: make.snapshot_id,
                lsn: *lsn,
                size_bytes: 64 << 20,
                cut_at: Some(std::time::SystemTime::now().into()),
                ..Default::default()
            }),
            Some(Told::RemoveSnapshot(remove)) => {
                Ended::SnapshotRemoved(SnapshotRemoved { snapshot_id: remove.snapshot_id })
            }
            Some(Told::HoldPoint(_)) => Ended::PointHeld(PointHeld {}),
            Some(Told::CutPoint(cut)) => {
                // A repeat is answered as the first time.
                let lsn = *cuts.entry(cut.snapshot_id.clone()).or_insert(*lsn);
                Ended::PointCut(PointCut { snapshot_id: cut.snapshot_id, lsn, epoch: 1 })
            }
            Some(Told::ReleasePoint(_)) => Ended::PointReleased(PointReleased { unbroken: true }),
            Some(Told::ConfirmSnapshot(confirm)) => Ended::SnapshotMade(SnapshotMade {
                lsn: cuts.get(&confirm.snapshot_id).copied().unwrap_or(0),
                snapshot_id: confirm.snapshot_id,
                size_bytes: 64 << 20,
                epoch: Some(1),
                chain: Some(7),
                ..Default::default()
            }),
            Some(Told::RevertTo(_)) => Ended::VolumeReverted(VolumeReverted { lsn: *lsn }),
            Some(Told::PullPart(pull)) => {
                let part = PulledPart {
                    id: command.id,
                    node: name.to_owned(),
                    volume_id: command.volume_id,
                    ..content(&pull)
                };
                agent.report_part(part).await?;
                continue;
            }
            None => continue,
        };
        let outcome = CommandOutcome {
            id: command.id,
            node: name.to_owned(),
            volume_id: command.volume_id,
            what: Some(what),
        };
        agent.report_outcome(outcome).await?;
    }
    Ok(())
}

/// Blocks of a snapshot, and of one part of its content.
pub const SNAPSHOT_BLOCKS: u64 = (64 << 20) / 4096;
const PART_BLOCKS: u64 = 1000;

/// Returns true if the block is in the answer to a pull, of what is allocated or what changed.
pub fn is_pulled(block: u64, since: bool) -> bool {
    block.is_multiple_of(if since { 5 } else { 3 })
}

/// A part of a snapshot, as a target would tell it.
fn content(pull: &PullPart) -> PulledPart {
    let since = !pull.since_snapshot_id.is_empty();
    let end = (pull.cursor_block + PART_BLOCKS).min(SNAPSHOT_BLOCKS);
    let range = |block: u64| SnapshotRange {
        offset: block * 4096,
        length: 4096,
        hole: since && block.is_multiple_of(2),
        ..SnapshotRange::default()
    };
    let blocks = (pull.cursor_block..end).filter(|block| is_pulled(*block, since));
    PulledPart {
        ranges: blocks.map(range).collect(),
        next_block: (end < SNAPSHOT_BLOCKS).then_some(end),
        ..PulledPart::default()
    }
}
