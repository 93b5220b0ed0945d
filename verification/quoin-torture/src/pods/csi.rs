//! An orchestrator's calls for the volumes of one node.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use quoin_api::csi::{
    ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use quoin_api::csi_addons::healer::NodeHealerRequest;
use quoin_api::csi_addons::healer::healer_node_client::HealerNodeClient;
use tonic::Request;
use tonic::transport::Channel;

/// Longest wait for the answer to a call: longer than any call takes.
const ANSWER_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    Ext4,
    Xfs,
    Block,
}

impl Content {
    pub fn name(self) -> String {
        format!("pod-{self:?}").to_lowercase()
    }
}

/// A volume, and where it is used.
#[derive(Clone, Debug)]
pub struct Volume {
    pub id: String,
    pub name: String,
    pub content: Content,
    pub staging: PathBuf,
    pub target: PathBuf,
}

impl Volume {
    pub fn new(id: String, name: &str, content: Content, directory: &Path) -> Result<Self> {
        let staging = directory.join(format!("{name}-staging"));
        std::fs::create_dir_all(&staging)?;
        let target = directory.join(format!("{name}-target"));
        Ok(Self { id, name: name.to_owned(), content, staging, target })
    }

    fn capability(&self) -> VolumeCapability {
        let mounted = |fs_type: &str| {
            AccessType::Mount(MountVolume { fs_type: fs_type.to_owned(), ..Default::default() })
        };
        let access = match self.content {
            Content::Ext4 => mounted("ext4"),
            Content::Xfs => mounted("xfs"),
            Content::Block => AccessType::Block(BlockVolume {}),
        };
        let mode = AccessMode { mode: Mode::SingleNodeWriter.into() };
        VolumeCapability { access_type: Some(access), access_mode: Some(mode) }
    }
}

pub struct Csi {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
    node: String,
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn within<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(ANSWER_MAX);
    request
}

impl Csi {
    pub fn new(socket: &Path, node: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("a runtime")?;
        let channel = {
            let _context = runtime.enter();
            quoin_identity::unix_channel(socket)
        };
        Ok(Self { runtime, channel, node: node.to_owned() })
    }

    fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    pub fn publish_to_node(&self, volume: &Volume) -> Result<()> {
        let request = within(ControllerPublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.node.clone(),
            volume_capability: Some(volume.capability()),
            ..Default::default()
        });
        self.runtime.block_on(self.controller().controller_publish_volume(request))?;
        Ok(())
    }

    pub fn take_from_node(&self, volume: &Volume) -> Result<()> {
        let request = within(ControllerUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            node_id: self.node.clone(),
            ..Default::default()
        });
        self.runtime.block_on(self.controller().controller_unpublish_volume(request))?;
        Ok(())
    }

    pub fn stage(&self, volume: &Volume) -> Result<()> {
        let request = within(NodeStageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(&volume.staging),
            volume_capability: Some(volume.capability()),
            ..Default::default()
        });
        self.runtime.block_on(self.node().node_stage_volume(request))?;
        Ok(())
    }

    pub fn publish(&self, volume: &Volume) -> Result<()> {
        let request = within(NodePublishVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(&volume.staging),
            target_path: text(&volume.target),
            volume_capability: Some(volume.capability()),
            ..Default::default()
        });
        self.runtime.block_on(self.node().node_publish_volume(request))?;
        Ok(())
    }

    pub fn unpublish(&self, volume: &Volume) -> Result<()> {
        let request = within(NodeUnpublishVolumeRequest {
            volume_id: volume.id.clone(),
            target_path: text(&volume.target),
        });
        self.runtime.block_on(self.node().node_unpublish_volume(request))?;
        Ok(())
    }

    pub fn unstage(&self, volume: &Volume) -> Result<()> {
        let request = within(NodeUnstageVolumeRequest {
            volume_id: volume.id.clone(),
            staging_target_path: text(&volume.staging),
        });
        self.runtime.block_on(self.node().node_unstage_volume(request))?;
        Ok(())
    }

    /// Heals a volume; `None`: it is well. Else what is wrong.
    pub fn heal(&self, volume: &Volume) -> Result<Option<String>> {
        let request = within(NodeHealerRequest {
            volume_id: volume.id.clone(),
            volume_path: text(&volume.target),
            staging_target_path: text(&volume.staging),
            volume_capability: Some(volume.capability()),
            ..Default::default()
        });
        let mut healer = HealerNodeClient::new(self.channel.clone());
        let told = self.runtime.block_on(healer.node_healer(request))?.into_inner();
        Ok(told.abnormal.then_some(told.message))
    }

    /// Makes a call beside `meanwhile`; how the call ends does not matter.
    pub fn begin(&self, call: &super::Call, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        std::thread::scope(|scope| {
            let called = scope.spawn(|| drop(call()));
            let outcome = meanwhile();
            // A scope would pass its panic on.
            let _ = called.join();
            outcome
        })
    }
}
