//! A plugin on a real socket, over a real controller, with loop devices instead of the attach
//! process.
#![allow(dead_code)]

pub mod control;
pub mod log;
pub mod loop_attacher;
pub mod peer;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::identity_client::IdentityClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::volume_capability::{self, AccessType, BlockVolume, MountVolume};
use quoin_api::csi::*;
use quoin_csi::{Backend, Callers, Edition, Mode, NodeSide, Plugin, PluginOptions};
use quoin_identity::unix_channel;
use quoin_node::{HostOptions, NodeHost};
use quoin_testkit::skipped;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

pub use control::ControlPlane;
pub use log::Log;
pub use loop_attacher::LoopAttacher;

pub const NODE: &str = "node-a";
/// Most volumes of the node.
pub const VOLUMES_MAX: u32 = 2;
pub const MIB: i64 = 1 << 20;
/// An id of a form that Quoin never issues, as conformance clients use them.
pub const UNKNOWN: &str = "fake-vol-id-0123456789";

pub struct World {
    pub root: tempfile::TempDir,
    pub cluster: ControlPlane,
    pub attacher: Arc<LoopAttacher>,
    pub identity: IdentityClient<Channel>,
    pub controller: ControllerClient<Channel>,
    pub node: NodeClient<Channel>,
    pub channel: Channel,
    /// To the socket of CSI-Addons.
    pub addons: Channel,
    plugin_stop: watch::Sender<bool>,
    plugin: tokio::task::JoinHandle<()>,
}

impl World {
    pub async fn start() -> Self {
        Self::start_in(Mode::ALL).await
    }

    pub async fn start_in(mode: Mode) -> Self {
        Self::start_with(mode, Callers::default()).await
    }

    pub async fn start_with(mode: Mode, callers: Callers) -> Self {
        Self::start_of(Edition::NEWEST, mode, callers).await
    }

    pub async fn start_of(edition: Edition, mode: Mode, callers: Callers) -> Self {
        log::keep_lines();
        let root = tempfile::Builder::new().prefix("quoin csi ").tempdir().unwrap();
        for directory in
            ["run/nbd", "other-node/nbd", "state", "devices", "stage", "pods", "socket"]
        {
            std::fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        let home = root.path().join("controller");
        let mut cluster = ControlPlane::start(home, root.path().join("run/admin.sock")).await;
        cluster.add_node(NODE, VOLUMES_MAX, &root.path().join("run"));
        cluster.add_node(control::OTHER_NODE, 0, &root.path().join("other-node"));
        cluster.wait_for_nodes(2).await;
        let attacher = Arc::new(LoopAttacher::new(root.path().join("devices")));
        let (plugin_stop, _) = watch::channel(false);
        let socket = root.path().join("socket/csi.sock");
        let stop = plugin_stop.subscribe();
        let plugin = start_plugin(root.path(), mode, callers, edition, true, &attacher, stop).await;
        let channel = unix_channel(&socket);
        let addons = unix_channel(&root.path().join("addons/csi-addons.sock"));
        Self {
            identity: IdentityClient::new(channel.clone()),
            controller: ControllerClient::new(channel.clone()),
            node: NodeClient::new(channel.clone()),
            channel,
            addons,
            root,
            cluster,
            attacher,
            plugin_stop,
            plugin,
        }
    }

    /// Ends the plugin and starts a new one on the same socket and state.
    pub async fn restart_plugin(&mut self) {
        self.restart_plugin_of(true).await;
    }

    /// The same, with or without groups for the files of volumes.
    pub async fn restart_plugin_of(&mut self, volume_mount_group: bool) {
        self.stop_plugin().await;
        self.plugin_stop.send_replace(false);
        let stop = self.plugin_stop.subscribe();
        self.plugin = start_plugin(
            self.root.path(),
            Mode::ALL,
            Callers::default(),
            Edition::NEWEST,
            volume_mount_group,
            &self.attacher,
            stop,
        )
        .await;
    }

    /// Ends the plugin.
    pub async fn stop_plugin(&mut self) {
        self.plugin_stop.send_replace(true);
        if !self.plugin.is_finished() {
            (&mut self.plugin).await.unwrap();
        }
    }

    /// Ends the control plane; its records stay.
    pub async fn stop_control(&mut self) {
        self.cluster.stop().await;
    }

    /// Starts the control plane again.
    pub async fn start_control(&mut self) {
        self.cluster.serve().await;
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub async fn create(&mut self, name: &str, size_bytes: i64) -> Volume {
        let request = create(name, size_bytes);
        self.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap()
    }

    /// Creates a volume and publishes it to this node; returns the stage request for it.
    pub async fn published(&mut self, capability: VolumeCapability) -> NodeStageVolumeRequest {
        let volume = self.create("db", 64 * MIB).await;
        self.controller
            .controller_publish_volume(ControllerPublishVolumeRequest {
                volume_id: volume.volume_id.clone(),
                node_id: NODE.to_owned(),
                volume_capability: Some(capability.clone()),
                ..Default::default()
            })
            .await
            .unwrap();
        NodeStageVolumeRequest {
            volume_id: volume.volume_id,
            staging_target_path: self.text("stage"),
            volume_capability: Some(capability),
            volume_context: volume.volume_context,
            ..Default::default()
        }
    }

    pub fn publish_at(
        &self,
        stage: &NodeStageVolumeRequest,
        target: &str,
    ) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: stage.volume_id.clone(),
            staging_target_path: stage.staging_target_path.clone(),
            target_path: self.text(target),
            volume_capability: stage.volume_capability.clone(),
            volume_context: stage.volume_context.clone(),
            ..Default::default()
        }
    }

    pub fn mounts(&self) -> Vec<quoin_node::Mount> {
        let mut mounts = quoin_node::read_mountinfo().unwrap();
        mounts.retain(|mount| mount.mount_point.starts_with(self.root.path()));
        mounts
    }

    pub fn assert_node_is_clean(&self) {
        assert!(self.mounts().is_empty(), "{:?}", self.mounts());
        assert!(self.attacher.attached().is_empty());
        assert_eq!(std::fs::read_dir(self.path("state/volumes")).unwrap().count(), 0);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for mount in self.mounts().iter().rev() {
            let _ = std::process::Command::new("umount").arg("-l").arg(&mount.mount_point).status();
        }
        self.attacher.detach_all();
    }
}

async fn start_plugin(
    root: &Path,
    mode: Mode,
    callers: Callers,
    edition: Edition,
    volume_mount_group: bool,
    attacher: &Arc<LoopAttacher>,
    stop: watch::Receiver<bool>,
) -> tokio::task::JoinHandle<()> {
    let options = HostOptions {
        state_directory: root.join("state"),
        run_directory: root.join("run"),
        target_deadline_ms: 5000,
    };
    let host = Arc::new(NodeHost::new(options, attacher.clone()).unwrap());
    let plugin = Plugin::new(PluginOptions {
        metrics: quoin_csi::Metrics::default(),
        callers,
        driver_name: quoin_csi::DRIVER_NAME.to_owned(),
        mode,
        edition,
        volume_mount_group,
        backend: Backend::new(unix_channel(&root.join("run/admin.sock"))),
        node: Some(NodeSide {
            name: NODE.to_owned(),
            volumes_max: VOLUMES_MAX,
            topology: BTreeMap::from([("quoin.io/zone".to_owned(), "z1".to_owned())]),
            host,
            attacher: attacher.clone(),
        }),
    })
    .unwrap();
    let (listener, socket) = quoin_csi::listen(&root.join("socket/csi.sock")).await.unwrap();
    let (addons, addons_socket) =
        quoin_csi::listen(&root.join("addons/csi-addons.sock")).await.unwrap();
    tokio::spawn(async move {
        let _sockets = (socket, addons_socket);
        let csi = plugin.serve(listener, stop.clone());
        tokio::try_join!(csi, plugin.serve_addons(addons, stop)).unwrap();
    })
}

/// Returns true where mounts can be made; otherwise prints why not.
pub fn can_mount() -> bool {
    let can = LoopAttacher::is_possible();
    if !can {
        skipped("needs root and /dev/loop-control");
    }
    can
}

pub fn mount_capability(fs_type: &str, mode: AccessMode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            fs_type: fs_type.to_owned(),
            mount_flags: Vec::new(),
            volume_mount_group: String::new(),
        })),
        access_mode: Some(volume_capability::AccessMode { mode: mode.into() }),
    }
}
pub fn block_capability(mode: AccessMode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: Some(volume_capability::AccessMode { mode: mode.into() }),
    }
}
pub fn writer() -> VolumeCapability {
    mount_capability("ext4", AccessMode::SingleNodeWriter)
}
/// Returns capabilities that are malformed, one way each.
pub fn malformed() -> Vec<Option<VolumeCapability>> {
    vec![
        None,
        Some(VolumeCapability { access_type: None, ..writer() }),
        Some(VolumeCapability { access_mode: None, ..writer() }),
        Some(VolumeCapability {
            access_mode: Some(volume_capability::AccessMode { mode: 0 }),
            ..writer()
        }),
        Some(VolumeCapability {
            access_mode: Some(volume_capability::AccessMode { mode: 99 }),
            ..writer()
        }),
    ]
}

pub fn range(required_bytes: i64, limit_bytes: i64) -> CapacityRange {
    CapacityRange { required_bytes, limit_bytes }
}
pub fn create(name: &str, size_bytes: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(range(size_bytes, 0)),
        volume_capabilities: vec![writer()],
        ..Default::default()
    }
}
pub fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// Returns the code of an answer; every refusal must be plain: a message, no details.
pub fn code<T>(answer: &Result<Response<T>, Status>) -> Code {
    match answer {
        Ok(_) => Code::Ok,
        Err(status) => {
            assert!(!status.message().is_empty());
            assert!(status.details().is_empty());
            status.code()
        }
    }
}
