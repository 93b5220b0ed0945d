//! The `quoin node` process: the sockets of CSI and of CSI-Addons, the reports of the node, renewal of its certificate.
//!
//! The process is in this crate and not in `quoin-node`, because a face may depend on a role and
//! not the other way round. It may be killed and started at any time: volumes are served by the
//! target, devices by the attach process, and mounts belong to the kernel.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{AgentEvent, NodeReport};
use quoin_identity::{Identity, TermChannel, is_member_removed};
use quoin_node::{AttachProcess, Attacher, DeviceReports, HostOptions, NodeHost};
use quoin_telemetry::notices::Notice;
use tokio::sync::watch;
use tonic::Request;

use crate::metrics::Metrics;
use crate::{
    Backend, Callers, CallersError, ConfigError, Edition, EndpointError, Mode, NodeSide, Plugin,
    PluginOptions,
};

/// Interval of reports. The control plane considers a node offline after slightly more than three.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Reports between two questions for the addresses of the pools.
const LEARN_POOLS_EVERY: u64 = 15;

/// Name of the state directory in that of the identity.
const STATE: &str = "volumes";

/// Options of `quoin node`.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's identity (certificate, key); its name is the node id.
    pub identity_directory: PathBuf,
    /// `host:port` of the controller.
    pub controller: String,
    /// `unix:///absolute/path.sock`, as in `CSI_ENDPOINT`.
    pub csi_endpoint: String,
    /// The same of CSI-Addons, in another directory; `None`: CSI-Addons are not served.
    pub csi_addons_endpoint: Option<String>,
    /// Services that are active.
    pub mode: Mode,
    /// Name of the plugin for orchestrators.
    pub driver_name: String,
    /// Records of staged and published volumes; private, survives restarts and reboots.
    pub state_directory: PathBuf,
    /// Targets listen on `<run>/nbd/<volume id>.sock`.
    pub run_directory: PathBuf,
    /// Socket of the attach process.
    pub attach_socket: PathBuf,
    /// Files by which volumes are attached at boot; only read here.
    pub at_boot_directory: PathBuf,
    /// Most volumes that may be attached here; 0: the orchestrator decides.
    pub volumes_max: u32,
    /// The operator's segments, keys under `quoin.io/`.
    pub topology: BTreeMap<String, String>,
    /// Address at which others reach this host; for display, may be empty.
    pub address: String,
    /// Longest wait of staging for the volume's target.
    pub target_deadline_ms: u64,
    /// Metrics of the caller, who serves them.
    pub metrics: Metrics,
    /// List of callers that are known by a secret; `None`: no token is needed.
    pub callers: Option<PathBuf>,
    /// The newest edition of CSI whose capabilities are advertised.
    pub edition: Edition,
    /// Advertises VOLUME_MOUNT_GROUP, and gives the files of a volume to the group that is named.
    pub volume_mount_group: bool,
}

impl Options {
    /// Returns options with the usual layout: records beside the identity, the attach process's
    /// socket in the run directory, all services.
    #[must_use]
    pub fn new(
        directory: impl Into<PathBuf>,
        run_directory: impl Into<PathBuf>,
        controller: impl Into<String>,
        csi_endpoint: impl Into<String>,
    ) -> Self {
        let (directory, run_directory) = (directory.into(), run_directory.into());
        Self {
            state_directory: directory.join(STATE),
            identity_directory: directory,
            controller: controller.into(),
            csi_endpoint: csi_endpoint.into(),
            csi_addons_endpoint: None,
            mode: Mode::ALL,
            driver_name: crate::DRIVER_NAME.to_owned(),
            attach_socket: run_directory.join("attach").join("attach.sock"),
            at_boot_directory: "/etc/quoin/volumes".into(),
            run_directory,
            volumes_max: 0,
            topology: BTreeMap::new(),
            address: String::new(),
            target_deadline_ms: 30_000,
            metrics: Metrics::default(),
            callers: None,
            edition: Edition::default(),
            volume_mount_group: false,
        }
    }
}

/// Why the process cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Callers(#[from] CallersError),
    #[error(transparent)]
    Identity(#[from] quoin_identity::Error),
    #[error(transparent)]
    Node(#[from] quoin_node::Error),
    #[error("serving CSI: {0}")]
    Serve(#[from] tonic::transport::Error),
    /// The controller's statement, with the way back.
    #[error("{0}")]
    Removed(String),
    #[error("{path} cannot be made absolute: {source}")]
    Path { path: PathBuf, source: std::io::Error },
}

/// Serves until `shutdown` is true. Wrong options end it at once; an absent control plane does not.
///
/// # Errors
/// [`Error`].
pub async fn run(options: Options, shutdown: watch::Receiver<bool>) -> Result<(), Error> {
    // Checks that need no other process come first.
    let socket_path = crate::parse_endpoint(&options.csi_endpoint)?;
    let addons_path = match &options.csi_addons_endpoint {
        Some(endpoint) => Some(crate::parse_addons_endpoint(endpoint, &socket_path)?),
        None => None,
    };
    let identity = Identity::load(&options.identity_directory)?;
    let channel = identity.controller(&options.controller)?;
    let attacher: Arc<dyn Attacher> = Arc::new(AttachProcess::new(&options.attach_socket));
    let name = identity.peer().name.clone();
    let node = if options.mode.node {
        let host_options = HostOptions {
            state_directory: absolute(&options.state_directory)?,
            run_directory: absolute(&options.run_directory)?,
            target_deadline_ms: options.target_deadline_ms,
        };
        Some(NodeSide {
            name: name.clone(),
            volumes_max: options.volumes_max,
            topology: options.topology.clone(),
            host: Arc::new(NodeHost::new(host_options, attacher.clone())?),
            attacher,
        })
    } else {
        None
    };
    let callers = match &options.callers {
        Some(path) => Callers::read(path)?,
        None => Callers::default(),
    };
    let plugin = Plugin::new(PluginOptions {
        driver_name: options.driver_name.clone(),
        mode: options.mode,
        backend: Backend::new(channel.clone()),
        node,
        metrics: options.metrics.clone(),
        callers,
        edition: options.edition,
        volume_mount_group: options.volume_mount_group,
    })?;
    let (listener, _socket) = crate::listen(&socket_path).await?;
    tracing::info!(node = name, socket = %socket_path.display(), mode = ?options.mode, "serving CSI");
    let addons = match &addons_path {
        Some(path) => {
            let addons = crate::listen(path).await?;
            tracing::info!(socket = %path.display(), "serving CSI-Addons");
            Some(addons)
        }
        None => None,
    };

    let report = NodeReport {
        node: name,
        address: options.address,
        topology: options.topology.into_iter().collect(),
        volumes_max: options.volumes_max,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Default::default()
    };
    let controller = options.controller;
    let stop = shutdown.clone();
    let renewal = tokio::spawn(async move { identity.keep_renewed(controller, stop).await });
    let mut heartbeat = tokio::spawn(keep_reporting(
        channel,
        // A process that serves no node is none, whatever its certificate says.
        options.mode.node.then_some(report),
        DeviceReports::of(&options.attach_socket)
            .with_host(plugin.node().map(|node| node.host.clone()), &options.at_boot_directory),
        plugin.clone(),
        options.metrics,
        shutdown.clone(),
    ));
    let served = async {
        let csi = plugin.serve(listener, shutdown.clone());
        match addons {
            Some((listener, _socket)) => {
                tokio::try_join!(csi, plugin.serve_addons(listener, shutdown)).map(drop)
            }
            None => csi.await,
        }
    };
    let ended = tokio::select! {
        served = served => served.map_err(Error::from),
        Some(why) = async { (&mut heartbeat).await.ok().flatten() } => Err(Error::Removed(why)),
    };
    renewal.abort();
    heartbeat.abort();
    ended
}

/// Reports the node until `shutdown`. A report that fails is repeated at the next interval; the
/// loss of the controller is logged once. Returns the controller's statement that the node was
/// removed.
async fn keep_reporting(
    channel: TermChannel,
    report: Option<NodeReport>,
    devices: DeviceReports,
    plugin: Plugin,
    metrics: Metrics,
    mut shutdown: watch::Receiver<bool>,
) -> Option<String> {
    let Some(report) = report else {
        return keep_asking(plugin, metrics, shutdown).await;
    };
    let mut client = AgentClient::new(channel);
    let mut is_reachable = true;
    let mut reports = 0u64;
    loop {
        let reported = devices.report().await;
        let notices = plugin.notices().take();
        let mut request = Request::new(NodeReport {
            events: notices.iter().map(event).collect(),
            knows_devices: reported.is_some(),
            devices: reported.as_ref().map(quoin_node::Reported::reports).unwrap_or_default(),
            ..report.clone()
        });
        request.set_timeout(REPORT_EVERY * 2);
        let outcome = client.report_node(request).await;
        if outcome.is_err() {
            plugin.notices().restore(notices);
        }
        if let Ok(answer) = &outcome {
            let learned = plugin.learn_of(reported.as_ref(), reports).await;
            let followed = devices.follow(reported.as_ref(), answer.get_ref(), learned).await;
            let mut left = followed.left;
            left.extend(plugin.take_down_left(followed.to_take_down));
            metrics.health.replace("volume ", left);
        }
        let problem = |status: &tonic::Status| format!("out of reach ({})", status.message());
        metrics.record_report(outcome.as_ref().err().map(problem));
        let fit = plugin.check_node().await;
        metrics.health.set("node", fit.err().map(|status| status.message().to_owned()));
        if outcome.is_ok() && reports.is_multiple_of(LEARN_POOLS_EVERY) {
            // So that their reach can be judged while the controller is away.
            let _ = plugin.pools().learn(plugin.backend()).await;
        }
        reports += 1;
        match outcome {
            Ok(_) if !is_reachable => {
                tracing::info!("the controller is reachable again");
                is_reachable = true;
            }
            Ok(_) => {}
            Err(status) if is_member_removed(&status) => return Some(status.message().to_owned()),
            Err(status) if is_reachable => {
                let (code, message) = (status.code(), status.message());
                tracing::warn!(?code, message, "the controller is not reachable; retrying");
                is_reachable = false;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = tokio::time::sleep(REPORT_EVERY) => {}
            _ = shutdown.wait_for(|stop| *stop) => return None,
        }
    }
}

fn event(notice: &Notice) -> AgentEvent {
    AgentEvent {
        severity: notice.severity.as_str().into(),
        volume_id: notice.volume.clone(),
        replica_id: notice.replica.clone(),
        reason: notice.reason.clone(),
        message: notice.message.clone(),
    }
}

/// Looks whether the controller answers, until `shutdown`. Returns its statement that the member was removed.
async fn keep_asking(
    plugin: Plugin,
    metrics: Metrics,
    mut shutdown: watch::Receiver<bool>,
) -> Option<String> {
    loop {
        let answer = plugin.backend().ask().await;
        if let Err(status) = &answer
            && is_member_removed(status)
        {
            return Some(status.message().to_owned());
        }
        metrics.record_report(answer.err().map(|why| format!("out of reach ({})", why.message())));
        tokio::select! {
            () = tokio::time::sleep(REPORT_EVERY) => {}
            _ = shutdown.wait_for(|stop| *stop) => return None,
        }
    }
}

/// Returns where the node whose directory this is has a volume staged; `None`: it has no record of that.
///
/// # Errors
/// If there is a record and it cannot be read.
pub fn staged_at(directory: &Path, volume: &str) -> Result<Option<PathBuf>, quoin_node::Error> {
    quoin_node::staged_at(&directory.join(STATE), volume)
}

fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::Path { path: path.to_owned(), source })
}
