//! Shared state of all services of one process, and their server.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::VolumeRef;
use quoin_api::csi::controller_server::ControllerServer;
use quoin_api::csi::group_controller_server::GroupControllerServer;
use quoin_api::csi::identity_server::IdentityServer;
use quoin_api::csi::node_server::NodeServer;
use quoin_api::csi::snapshot_metadata_server::SnapshotMetadataServer;
use quoin_api::csi_addons::healer::healer_node_server::HealerNodeServer;
use quoin_node::{Attacher, Healed, NodeHost};
use quoin_telemetry::notices::{Notices, Severity};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::addons::{self, HealerService};
use crate::authority::Connection;
use crate::backend::Backend;
use crate::callers::Callers;
use crate::controller::ControllerService;
use crate::deadline::Deadlines;
use crate::edition::Edition;
use crate::group_controller::GroupService;
use crate::health::Pools;
use crate::identity::IdentityService;
use crate::in_flight::{Guard, InFlight};
use crate::left::Left;
use crate::metadata::MetadataService;
use crate::metrics::Metrics;
use crate::node::NodeService;
use crate::secrets::Secrets;
use crate::{limits, refusal};

/// Reasons for which a process serves no call of the other side.
const NODE_ONLY: &str =
    "this process runs in node mode: the call is for one with `--mode controller` or `all`";
const CONTROLLER_ONLY: &str = "this process runs in controller mode: nodes run with `--mode node` \
     or `all`; `quoin dev` runs so where volumes cannot be attached (no root, no /dev/fuse) and \
     printed why at its start";

/// Interval of checks for calls under way while the process ends.
const IDLE_LOOK: Duration = Duration::from_millis(500);

/// Longest search for the reason of a wait.
const REASON_MAX: Duration = Duration::from_secs(1);

/// Kind of the object of calls that change a volume's replication.
pub(crate) const REPLICATION_OF_VOLUME: &str = "replication of volume";

/// The object of a call: one call at a time works on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Subject {
    /// `volume`, `volume name`, `snapshot`, …
    pub what: &'static str,
    pub key: String,
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.what, self.key)
    }
}

/// Services that are active; Identity always is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    pub controller: bool,
    pub node: bool,
}

impl Mode {
    pub const ALL: Self = Self { controller: true, node: true };
    pub const CONTROLLER: Self = Self { controller: true, node: false };
    pub const NODE: Self = Self { controller: false, node: true };
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self::ALL),
            "controller" => Ok(Self::CONTROLLER),
            "node" => Ok(Self::NODE),
            other => Err(format!("mode {other:?} is not all, controller or node")),
        }
    }
}

/// This host, for the Node service.
pub struct NodeSide {
    /// The node id; also the node's name in the control plane.
    pub name: String,
    /// Most volumes that may be attached here; 0: the orchestrator decides.
    pub volumes_max: u32,
    /// The operator's own segments (`quoin.io/zone`, …).
    pub topology: BTreeMap<String, String>,
    pub host: Arc<NodeHost>,
    pub attacher: Arc<dyn Attacher>,
}

/// Parts of a plugin.
pub struct PluginOptions {
    pub driver_name: String,
    pub mode: Mode,
    pub backend: Backend,
    /// Needed in the modes that have the Node service.
    pub node: Option<NodeSide>,
    pub metrics: Metrics,
    /// Callers that are known by a secret; by default no token is needed.
    pub callers: Callers,
    /// The newest edition of the interface whose capabilities are advertised.
    pub edition: Edition,
    /// Gives the files of a volume to the group that its publication names, for orchestrators that do
    /// not do it themselves.
    pub volume_mount_group: bool,
}

/// A configuration that cannot work; the process should report it and end.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(
        "driver name {0:?} is not a domain name of at most 63 characters that starts and ends \
         with a letter"
    )]
    DriverName(String),
    #[error("node id {0:?} is empty or longer than 256 bytes")]
    NodeId(String),
    #[error("the node mode needs a node name and an attach process")]
    NoNode,
    #[error("{0}")]
    Topology(String),
}

/// All services of one process. Clones share everything.
#[derive(Clone)]
pub struct Plugin {
    inner: Arc<Inner>,
}

struct Inner {
    driver_name: String,
    mode: Mode,
    backend: Backend,
    node: Option<NodeSide>,
    metrics: Metrics,
    notices: Notices,
    callers: Callers,
    edition: Edition,
    volume_mount_group: bool,
    pools: Pools,
    controller_calls: InFlight,
    node_calls: InFlight,
    left: Left,
}

impl Plugin {
    /// Makes a plugin after a check of the options.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(options: PluginOptions) -> Result<Self, ConfigError> {
        if !crate::is_driver_name(&options.driver_name) {
            return Err(ConfigError::DriverName(options.driver_name));
        }
        if let Some(node) = &options.node {
            if node.name.is_empty() || node.name.len() > 256 {
                return Err(ConfigError::NodeId(node.name.clone()));
            }
            crate::topology::of_node(&node.name, &node.topology)
                .map_err(|status| ConfigError::Topology(status.message().to_owned()))?;
        }
        if options.mode.node && options.node.is_none() {
            return Err(ConfigError::NoNode);
        }
        let inner = Inner {
            driver_name: options.driver_name,
            mode: options.mode,
            backend: options.backend,
            node: options.node.filter(|_| options.mode.node),
            metrics: options.metrics,
            notices: Notices::default(),
            callers: options.callers,
            edition: options.edition,
            volume_mount_group: options.volume_mount_group,
            pools: Pools::default(),
            controller_calls: InFlight::default(),
            node_calls: InFlight::default(),
            left: Left::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Takes the secrets of a call and checks them, and whether their caller may make it.
    pub(crate) fn admit(
        &self,
        call: &'static str,
        secrets: &mut HashMap<String, String>,
    ) -> Result<Secrets, Status> {
        let secrets = Secrets::take(secrets);
        limits::secrets(&secrets)?;
        self.inner.callers.check(call, &secrets)?;
        Ok(secrets)
    }

    pub(crate) fn driver_name(&self) -> &str {
        &self.inner.driver_name
    }
    pub(crate) fn mode(&self) -> Mode {
        self.inner.mode
    }
    pub(crate) fn backend(&self) -> &Backend {
        &self.inner.backend
    }
    pub(crate) fn node(&self) -> Option<&NodeSide> {
        self.inner.node.as_ref()
    }
    /// Events that wait for the next report.
    pub(crate) fn notices(&self) -> &Notices {
        &self.inner.notices
    }
    /// Counts a heal and tells of it, if it did something.
    pub(crate) fn note_heal(&self, volume: &str, node: &str, healed: &Healed) {
        if healed.did.is_empty() {
            return;
        }
        let is_well = healed.faults.is_empty();
        self.inner.metrics.record_heal(is_well);
        let left: Vec<&str> = healed.faults.iter().map(|fault| fault.kind.as_str()).collect();
        let left = if is_well { String::new() } else { format!("; left: {}", left.join(", ")) };
        let message = format!("on node {node}: {}{left}", healed.did.join(", "));
        let severity = if is_well { Severity::Normal } else { Severity::Warning };
        self.inner.notices.push(severity, volume, "", "VolumeHealed", message);
    }
    /// The control plane, for a call of the controller. Asked before anything else of a call is read.
    ///
    /// # Errors
    /// 12 in a mode without the controller.
    pub(crate) fn served_by_controller(&self, rpc: &'static str) -> Result<Backend, Status> {
        match self.mode().controller {
            true => Ok(self.backend().clone()),
            false => Err(refusal::not_served(rpc, NODE_ONLY)),
        }
    }
    /// The control plane and this host, for a call of the node. Asked before anything else of a call is read.
    ///
    /// # Errors
    /// 12 in a mode without the node.
    pub(crate) fn served_by_node(&self, rpc: &'static str) -> Result<(Backend, &NodeSide), Status> {
        match self.node() {
            Some(node) => Ok((self.backend().clone(), node)),
            None => Err(refusal::not_served(rpc, CONTROLLER_ONLY)),
        }
    }
    /// This node's way to the pools.
    pub(crate) fn pools(&self) -> &Pools {
        &self.inner.pools
    }
    /// Refuses a call of a later edition than the one that is served.
    pub(crate) fn serves_since(&self, rpc: &'static str, since: Edition) -> Result<(), Status> {
        let edition = self.inner.edition;
        if edition < since {
            return Err(refusal::not_served(
                rpc,
                &format!(
                    "it came with edition {since} of CSI, and this plugin is to serve {edition}: \
                     start it with --csi-edition {since}"
                ),
            ));
        }
        Ok(())
    }
    /// Returns those that the served edition has, of a list with the edition of each.
    pub(crate) fn of_edition<T: Copy>(&self, all: &[(Edition, T)]) -> Vec<T> {
        let has = |(since, _): &&(Edition, T)| *since <= self.inner.edition;
        all.iter().filter(has).map(|(_, one)| *one).collect()
    }
    pub(crate) fn gives_groups(&self) -> bool {
        self.inner.volume_mount_group
    }

    /// Takes a key of the controller calls. Controller and node calls are tracked separately: they may
    /// run in different processes anyway.
    pub(crate) async fn begin(&self, what: &'static str, key: &str) -> Result<Guard, Status> {
        self.begin_in(&self.inner.controller_calls, Subject { what, key: key.to_owned() }).await
    }

    /// Takes a volume for a call of the node.
    pub(crate) async fn begin_on_node(&self, volume_id: &str) -> Result<Guard, Status> {
        let subject = Subject { what: "volume", key: volume_id.to_owned() };
        self.begin_in(&self.inner.node_calls, subject).await
    }

    /// Same as [`Self::begin_on_node`]; `None`: a call works on it.
    pub(crate) fn try_begin_on_node(&self, volume_id: &str) -> Option<Guard> {
        let subject = Subject { what: "volume", key: volume_id.to_owned() };
        self.inner.node_calls.begin(&subject).ok()
    }

    /// Mounts that stay of volumes that the records have here no more.
    pub(crate) fn left(&self) -> &Left {
        &self.inner.left
    }

    async fn begin_in(&self, calls: &InFlight, subject: Subject) -> Result<Guard, Status> {
        match calls.begin(&subject) {
            Ok(guard) => {
                crate::deadline::is_about(&subject);
                Ok(guard)
            }
            Err(since) => {
                let reason = self.reason(&subject).await;
                Err(refusal::pending(&subject.to_string(), since, reason.as_deref()))
            }
        }
    }

    /// Returns what a call under way waits for, in words, as far as it is known within a second.
    pub(crate) async fn reason(&self, subject: &Subject) -> Option<String> {
        let is_volume = subject.what == "volume";
        let progress =
            self.node().filter(|_| is_volume).and_then(|n| n.host.progress(&subject.key));
        let asked = match subject.what {
            "volume" | REPLICATION_OF_VOLUME | "reclaimed volume" => {
                crate::backend::by_id(&subject.key)
            }
            "volume name" => Some(VolumeRef { name: subject.key.clone(), ..Default::default() }),
            _ => None,
        };
        let waits = async {
            let waits = self.backend().waits(asked?).await?;
            Some(format!("the volume waits: {waits}"))
        };
        let waits = tokio::time::timeout(REASON_MAX, waits).await.ok().flatten();
        let parts: Vec<String> = progress.into_iter().chain(waits).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// Checks the node's requirements: its tools and the attach process.
    pub(crate) async fn check_node(&self) -> Result<(), Status> {
        let Some(node) = self.node() else { return Ok(()) };
        for tool in [quoin_node::MKFS_EXT4, quoin_node::E2FSCK] {
            node.host.tools().find(tool).map_err(refusal::precondition)?;
        }
        // Any volume will do: an answer is proof enough.
        match node.attacher.device("00000000000000000000000000000000").await {
            Ok(_) => Ok(()),
            Err(error) => Err(refusal::precondition(error)),
        }
    }

    /// Serves CSI on a socket until `shutdown` is true, then lets calls that are under way end. A
    /// caller that only holds its connection open does not delay the end.
    ///
    /// # Errors
    /// If the transport fails.
    pub async fn serve(
        &self,
        listener: UnixListener,
        shutdown: watch::Receiver<bool>,
    ) -> Result<(), tonic::transport::Error> {
        let services = Routes::new(IdentityServer::new(IdentityService(self.clone())))
            .add_service(ControllerServer::new(ControllerService(self.clone())))
            .add_service(NodeServer::new(NodeService(self.clone())))
            .add_service(GroupControllerServer::new(GroupService(self.clone())))
            .add_service(SnapshotMetadataServer::new(MetadataService(self.clone())))
            .add_service(HealerNodeServer::new(HealerService(self.clone())));
        self.serve_routes(services, listener, shutdown).await
    }

    /// Serves CSI-Addons on a socket of its own, as [`Self::serve`] serves CSI.
    ///
    /// # Errors
    /// If the transport fails.
    pub async fn serve_addons(
        &self,
        listener: UnixListener,
        shutdown: watch::Receiver<bool>,
    ) -> Result<(), tonic::transport::Error> {
        self.serve_routes(addons::services(self).into_routes(), listener, shutdown).await
    }

    async fn serve_routes(
        &self,
        services: Routes,
        listener: UnixListener,
        shutdown: watch::Receiver<bool>,
    ) -> Result<(), tonic::transport::Error> {
        let stopped = |mut shutdown: watch::Receiver<bool>| async move {
            // A dropped sender counts as a stop.
            let _ = shutdown.wait_for(|stop| *stop).await;
        };
        let connections =
            UnixListenerStream::new(listener).map(|accepted| accepted.map(Connection::new));
        let served = Server::builder()
            .layer(self.inner.metrics.clone())
            .layer(Deadlines::of(self.clone()))
            .add_routes(services)
            .serve_with_incoming_shutdown(connections, stopped(shutdown.clone()));
        tokio::select! {
            served = served => served,
            () = async { stopped(shutdown).await; self.until_idle().await } => Ok(()),
        }
    }

    /// Waits until no call works on a volume, and the last answer had the time to leave.
    async fn until_idle(&self) {
        let mut idle_looks = 0;
        while idle_looks < 2 {
            tokio::time::sleep(IDLE_LOOK).await;
            let is_idle = self.inner.controller_calls.is_idle() && self.inner.node_calls.is_idle();
            idle_looks = if is_idle { idle_looks + 1 } else { 0 };
        }
    }
}
