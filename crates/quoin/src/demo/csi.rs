//! The orchestrator of the demo: a gRPC client of the CSI socket, calling in the order in which
//! Kubernetes does.

use anyhow::{Context, Result, bail};
use quoin_api::control::ListNodesRequest;
use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use quoin_api::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest,
    DeleteSnapshotRequest, DeleteVolumeRequest, ListSnapshotsRequest, NodeExpandVolumeRequest,
    NodeGetInfoRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability, VolumeContentSource,
    volume_content_source,
};
use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::interrupt;
use crate::client;

/// The longest calls, those of replication, end by themselves within 35 s.
const ANSWER_BUDGET: Duration = Duration::from_secs(45);
/// Orchestrators repeat calls for minutes; the demo for this long.
const RETRY_BUDGET: Duration = Duration::from_secs(60);

pub struct Orchestrator {
    runtime: Runtime,
    channel: Channel,
    staging: PathBuf,
    target: PathBuf,
    /// Directory of the sockets of the node's target.
    nbd: PathBuf,
    /// Parameters of the class of its volumes.
    parameters: HashMap<String, String>,
}

/// Refusal for the present state of a volume (FAILED_PRECONDITION): another node has it, or it is a copy.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StillHeld(String);

/// A volume as CSI names it.
#[derive(Clone)]
pub struct Claim {
    pub volume_id: String,
    volume_context: HashMap<String, String>,
    publish_context: HashMap<String, String>,
}

fn capability() -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume {
            fs_type: "ext4".into(),
            ..MountVolume::default()
        })),
    }
}

fn parameters(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

impl Orchestrator {
    /// `directory` gets the staging and target paths.
    pub fn new(socket: &Path, directory: &Path, nbd: PathBuf) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (staging, target) = (directory.join("staging"), directory.join("pods").join("demo"));
        std::fs::create_dir_all(&staging)?;
        std::fs::create_dir_all(directory.join("pods"))?;
        let channel = {
            let _context = runtime.enter();
            quoin_identity::unix_channel(socket)
        };
        let parameters = parameters(&[("replicas", "3"), ("spread", "pool")]);
        Ok(Self { runtime, channel, staging, target, nbd, parameters })
    }

    /// One whose volumes have one replica each.
    pub fn of_single_replicas(self) -> Self {
        Self { parameters: parameters(&[("replicas", "1")]), ..self }
    }

    /// Another socket of the same node or controller.
    pub fn channel_of(&self, socket: &Path) -> Channel {
        let _context = self.runtime.enter();
        quoin_identity::unix_channel(socket)
    }

    /// Makes one call, and gives its answer as it is.
    ///
    /// # Errors
    /// Only Ctrl-C.
    pub fn once<T>(
        &self,
        attempt: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<Result<T, Status>> {
        interrupt::check()?;
        let limited = async { tokio::time::timeout(ANSWER_BUDGET, attempt).await };
        Ok(match self.runtime.block_on(limited) {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "no answer within {} s",
                ANSWER_BUDGET.as_secs()
            ))),
        })
    }

    /// Where the application finds its file system.
    pub fn mount(&self) -> &Path {
        &self.target
    }

    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// Where the target of the node serves the volume.
    pub fn nbd_socket(&self, claim: &Claim) -> PathBuf {
        self.nbd.join(format!("{}.sock", claim.volume_id))
    }

    /// Calls until it works, as orchestrators do: an unavailable or busy plugin is no failure.
    fn call<T, F>(&self, what: &str, mut attempt: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let began = Instant::now();
        loop {
            let status = match self.once(attempt())? {
                Ok(answer) => return Ok(answer),
                Err(status) => status,
            };
            let wrong = [Code::InvalidArgument, Code::OutOfRange, Code::ResourceExhausted];
            if wrong.contains(&status.code()) {
                return Err(super::Refused(format!("{what}: {}", status.message())).into());
            }
            let again = [Code::Unavailable, Code::Aborted, Code::DeadlineExceeded, Code::Unknown];
            if status.code() == Code::FailedPrecondition {
                return Err(StillHeld(format!("{what}: {}", status.message())).into());
            }
            if !again.contains(&status.code()) || began.elapsed() > RETRY_BUDGET {
                bail!("{what}: {} ({:?})", status.message(), status.code());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    pub fn create(&self, name: &str, bytes: u64) -> Result<Claim> {
        self.create_from(name, bytes, None)
    }

    /// A volume with the content of a snapshot, where one is given.
    pub fn create_from(&self, name: &str, bytes: u64, snapshot: Option<&str>) -> Result<Claim> {
        let source = snapshot.map(|id| VolumeContentSource {
            r#type: Some(volume_content_source::Type::Snapshot(
                volume_content_source::SnapshotSource { snapshot_id: id.to_owned() },
            )),
        });
        let request = CreateVolumeRequest {
            volume_content_source: source,
            name: name.into(),
            capacity_range: Some(CapacityRange { required_bytes: bytes as i64, limit_bytes: 0 }),
            volume_capabilities: vec![capability()],
            parameters: self.parameters.clone(),
            ..CreateVolumeRequest::default()
        };
        let answer = self.call("CreateVolume", || {
            let (mut client, request) = (self.controller(), request.clone());
            async move { client.create_volume(request).await }
        })?;
        let volume = answer.volume.unwrap_or_default();
        Ok(Claim {
            volume_id: volume.volume_id,
            volume_context: volume.volume_context,
            publish_context: HashMap::new(),
        })
    }

    /// ControllerPublishVolume to `node`.
    pub fn publish(&self, claim: &mut Claim, node: &str) -> Result<()> {
        let request = ControllerPublishVolumeRequest {
            volume_id: claim.volume_id.clone(),
            node_id: node.into(),
            volume_capability: Some(capability()),
            volume_context: claim.volume_context.clone(),
            ..ControllerPublishVolumeRequest::default()
        };
        let answer = self.call("ControllerPublishVolume", || {
            let (mut client, request) = (self.controller(), request.clone());
            async move { client.controller_publish_volume(request).await }
        })?;
        claim.publish_context = answer.publish_context;
        Ok(())
    }

    /// ControllerPublishVolume to `node`, repeated until the node that has the volume is given up.
    pub fn take_over(&self, claim: &mut Claim, node: &str) -> Result<()> {
        let began = Instant::now();
        loop {
            match self.publish(claim, node) {
                Err(error) if error.is::<StillHeld>() && began.elapsed() < RETRY_BUDGET => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                outcome => return outcome,
            }
        }
    }

    pub fn node_id(&self) -> Result<String> {
        let answer = self.call("NodeGetInfo", || {
            let mut client = self.node();
            async move { client.node_get_info(NodeGetInfoRequest {}).await }
        })?;
        Ok(answer.node_id)
    }

    /// The node of the cluster with this admin socket, whose process serves no calls of nodes.
    pub fn node_at(&self, admin_socket: &Path) -> Result<String> {
        self.ask(async {
            let mut cluster = client::connect(admin_socket).await?;
            let request = ListNodesRequest {};
            let answer = cluster.list_nodes(request).await.map_err(client::refusal)?;
            Ok(answer.into_inner().nodes.first().context("no node")?.name.clone())
        })
    }

    /// NodeStageVolume: attach and format (only when there is nothing on it yet).
    pub fn stage(&self, claim: &Claim) -> Result<()> {
        let request = NodeStageVolumeRequest {
            volume_id: claim.volume_id.clone(),
            publish_context: claim.publish_context.clone(),
            volume_context: claim.volume_context.clone(),
            staging_target_path: self.staging.to_string_lossy().into_owned(),
            volume_capability: Some(capability()),
            ..NodeStageVolumeRequest::default()
        };
        self.call("NodeStageVolume", || {
            let (mut client, request) = (self.node(), request.clone());
            async move { client.node_stage_volume(request).await }
        })?;
        Ok(())
    }

    /// NodePublishVolume: the mount that the application sees.
    pub fn node_publish(&self, claim: &Claim) -> Result<()> {
        let request = NodePublishVolumeRequest {
            volume_id: claim.volume_id.clone(),
            publish_context: claim.publish_context.clone(),
            volume_context: claim.volume_context.clone(),
            staging_target_path: self.staging.to_string_lossy().into_owned(),
            target_path: self.target.to_string_lossy().into_owned(),
            volume_capability: Some(capability()),
            ..NodePublishVolumeRequest::default()
        };
        self.call("NodePublishVolume", || {
            let (mut client, request) = (self.node(), request.clone());
            async move { client.node_publish_volume(request).await }
        })?;
        Ok(())
    }

    /// NodeUnpublishVolume and NodeUnstageVolume.
    pub fn unmount(&self, claim: &Claim) -> Result<()> {
        let unpublish = NodeUnpublishVolumeRequest {
            volume_id: claim.volume_id.clone(),
            target_path: self.target.to_string_lossy().into_owned(),
        };
        self.call("NodeUnpublishVolume", || {
            let (mut client, request) = (self.node(), unpublish.clone());
            async move { client.node_unpublish_volume(request).await }
        })?;
        let unstage = NodeUnstageVolumeRequest {
            volume_id: claim.volume_id.clone(),
            staging_target_path: self.staging.to_string_lossy().into_owned(),
        };
        self.call("NodeUnstageVolume", || {
            let (mut client, request) = (self.node(), unstage.clone());
            async move { client.node_unstage_volume(request).await }
        })?;
        Ok(())
    }

    /// A snapshot of the volume; returns its id.
    pub fn snapshot(&self, claim: &Claim, name: &str) -> Result<String> {
        let request = CreateSnapshotRequest {
            source_volume_id: claim.volume_id.clone(),
            name: name.into(),
            ..CreateSnapshotRequest::default()
        };
        let answer = self.call("CreateSnapshot", || {
            let (mut client, request) = (self.controller(), request.clone());
            async move { client.create_snapshot(request).await }
        })?;
        Ok(answer.snapshot.unwrap_or_default().snapshot_id)
    }

    /// Ids of the volume's snapshots that are ready.
    pub fn snapshots(&self, claim: &Claim) -> Result<Vec<String>> {
        let request = ListSnapshotsRequest {
            source_volume_id: claim.volume_id.clone(),
            ..ListSnapshotsRequest::default()
        };
        let answer = self.call("ListSnapshots", || {
            let (mut client, request) = (self.controller(), request.clone());
            async move { client.list_snapshots(request).await }
        })?;
        let snapshots = answer.entries.into_iter().filter_map(|entry| entry.snapshot);
        let ready = snapshots.filter(|snapshot| snapshot.ready_to_use);
        Ok(ready.map(|snapshot| snapshot.snapshot_id).collect())
    }

    pub fn delete_snapshot(&self, snapshot_id: &str) -> Result<()> {
        let request = DeleteSnapshotRequest {
            snapshot_id: snapshot_id.to_owned(),
            ..DeleteSnapshotRequest::default()
        };
        self.call("DeleteSnapshot", || {
            let (mut client, request) = (self.controller(), request.clone());
            async move { client.delete_snapshot(request).await }
        })?;
        Ok(())
    }

    /// ControllerExpandVolume, and NodeExpandVolume where the volume is mounted. False: its file
    /// system cannot grow while it is mounted here, and grows with the next staging.
    pub fn grow(&self, claim: &Claim, bytes: u64, is_mounted: bool) -> Result<bool> {
        let expand = ControllerExpandVolumeRequest {
            volume_id: claim.volume_id.clone(),
            capacity_range: Some(CapacityRange { required_bytes: bytes as i64, limit_bytes: 0 }),
            ..ControllerExpandVolumeRequest::default()
        };
        self.call("ControllerExpandVolume", || {
            let (mut client, request) = (self.controller(), expand.clone());
            async move { client.controller_expand_volume(request).await }
        })?;
        if !is_mounted {
            return Ok(true);
        }
        let expand = NodeExpandVolumeRequest {
            volume_id: claim.volume_id.clone(),
            volume_path: self.target.to_string_lossy().into_owned(),
            staging_target_path: self.staging.to_string_lossy().into_owned(),
            ..NodeExpandVolumeRequest::default()
        };
        self.call("NodeExpandVolume", || {
            let (mut client, request) = (self.node(), expand.clone());
            async move {
                match client.node_expand_volume(request).await {
                    Ok(_) => Ok(tonic::Response::new(true)),
                    Err(status) if status.code() == Code::FailedPrecondition => {
                        Ok(tonic::Response::new(false))
                    }
                    Err(status) => Err(status),
                }
            }
        })
    }

    /// ControllerUnpublishVolume.
    pub fn unpublish(&self, claim: &Claim, node: &str) -> Result<()> {
        let unpublish = ControllerUnpublishVolumeRequest {
            volume_id: claim.volume_id.clone(),
            node_id: node.into(),
            ..ControllerUnpublishVolumeRequest::default()
        };
        self.call("ControllerUnpublishVolume", || {
            let (mut client, request) = (self.controller(), unpublish.clone());
            async move { client.controller_unpublish_volume(request).await }
        })?;
        Ok(())
    }

    /// ControllerUnpublishVolume and DeleteVolume.
    pub fn delete(&self, claim: &Claim, node: &str) -> Result<()> {
        self.unpublish(claim, node)?;
        self.give_back(claim)
    }

    /// DeleteVolume.
    pub fn give_back(&self, claim: &Claim) -> Result<()> {
        let delete = DeleteVolumeRequest {
            volume_id: claim.volume_id.clone(),
            ..DeleteVolumeRequest::default()
        };
        self.call("DeleteVolume", || {
            let (mut client, request) = (self.controller(), delete.clone());
            async move { client.delete_volume(request).await }
        })?;
        Ok(())
    }

    /// Queries the admin socket beside CSI, for information that only an operator sees.
    pub fn ask<T>(&self, question: impl Future<Output = Result<T>>) -> Result<T> {
        let limited = async { tokio::time::timeout(Duration::from_secs(10), question).await };
        match self.runtime.block_on(limited) {
            Ok(answer) => answer,
            Err(_) => bail!("the controller does not answer within 10 s"),
        }
    }
}
