//! The Node service: checks requests, passes them to the node library and converts its outcomes
//! into codes.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control as api;
use quoin_api::csi::node_server::Node;
use quoin_api::csi::node_service_capability::{Rpc, Type, rpc};
use quoin_api::csi::volume_usage::Unit;
use quoin_api::csi::*;
use quoin_node::{FileSystem, NodeHost, PublishRequest, StageRequest};
use tonic::{Code, Request, Response, Status};

use crate::backend::Backend;
use crate::capability::{Capability, CapabilityError};
use crate::capacity::{Range, signed};
use crate::controller::cut;
use crate::edition::Edition;
use crate::in_flight::run_to_completion;
use crate::refusal::{self, from_node, invalid, missing, no_volume, out_of_range};
use crate::{NodeSide, Plugin, context, encryption, health, limits, topology};

/// Serves Node in the modes that have it.
pub(crate) struct NodeService(pub Plugin);

/// Longest wait for the controller's word of a volume whose health is asked for; without it, the node
/// judges alone.
const STANDING_MAX: Duration = Duration::from_secs(1);

/// Capabilities of a node and the edition that brought each. VOLUME_MOUNT_GROUP is an option: an
/// orchestrator with a group of its own for files leaves them alone where it is advertised.
const CAPABILITIES: &[(Edition, rpc::Type)] = &[
    (Edition::OLDEST, rpc::Type::StageUnstageVolume),
    (Edition::OLDEST, rpc::Type::GetVolumeStats),
    (Edition::OLDEST, rpc::Type::ExpandVolume),
    (Edition::OLDEST, rpc::Type::VolumeCondition),
    (Edition::OLDEST, rpc::Type::SingleNodeMultiWriter),
    (Edition::OLDEST, rpc::Type::VolumeMountGroup),
    (Edition::NEWEST, rpc::Type::GetVolumeHealth),
    (Edition::NEWEST, rpc::Type::GetStorageHealth),
];

impl NodeService {
    /// As [`Plugin::served_by_node`], of a call that came with a later edition.
    fn served_since(
        &self,
        rpc: &'static str,
        since: Edition,
    ) -> Result<(Backend, &NodeSide), Status> {
        let served = self.0.served_by_node(rpc)?;
        self.0.serves_since(rpc, since)?;
        Ok(served)
    }
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let (backend, node) = self.0.served_by_node("NodeStageVolume")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        let staging_path = limits::path("staging_target_path", &request.staging_target_path)?;
        let capability = Capability::read("volume_capability", request.volume_capability.as_ref());
        // A malformed capability is refused at once; an unsupported one after the volume was found.
        let capability = match capability {
            Err(CapabilityError::Malformed(status)) => return Err(status),
            other => other,
        };
        let secrets = self.0.admit("NodeStageVolume", &mut request.secrets)?;
        limits::map("publish_context", &request.publish_context)?;
        limits::map("volume_context", &request.volume_context)?;
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let (host, name) = (node.host.clone(), node.name.clone());
        run_to_completion("NodeStageVolume", async move {
            let _held = held;
            let volume = backend.volume(&request.volume_id).await?;
            let own = context::of_volume(&volume);
            context::compare(&request.volume_context, &own)
                .map_err(|why| invalid("volume_context", why))?;
            let capability = capability.map_err(CapabilityError::into_precondition_status)?;
            let attachment = volume
                .attachments
                .iter()
                .find(|attachment| attachment.node == name && attachment.phase != "Detaching");
            let Some(attachment) = attachment else {
                return Err(refusal::precondition(format!(
                    "volume {} is not published to node {name}; call ControllerPublishVolume \
                     first",
                    request.volume_id
                )));
            };
            let key = encryption::of_stage(&volume, &secrets).await?;
            let is_mounted = !capability.is_block();
            let other = volume.attachments.iter().find(|other| other.replays && other.node != name);
            if let Some(other) = other.filter(|_| is_mounted) {
                return Err(refusal::replays_elsewhere(&request.volume_id, &other.node));
            }
            if is_mounted && attachment.replay_is_late {
                return Err(refusal::late_with_the_replay(&request.volume_id, &name));
            }
            let replays = is_mounted && attachment.replays;
            let wanted = StageRequest {
                key,
                access: capability.access(default_file_system(&volume)),
                mode: capability.mode_name().to_owned(),
                read_only: attachment.read_only || capability.is_reader_only(),
                size_bytes: volume.size_bytes,
                block_size: context::block_size(&volume),
                volume: request.volume_id,
                staging_path,
            };
            if replays {
                host.replay(&wanted).await.map_err(|error| from_node(&error))?;
                backend.confirm_replay(&wanted.volume, &name).await?;
            }
            host.stage(&wanted).await.map_err(|error| from_node(&error))?;
            Ok(Response::new(NodeStageVolumeResponse {}))
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let (backend, node) = self.0.served_by_node("NodeUnstageVolume")?;
        let request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        let staging_path = limits::path("staging_target_path", &request.staging_target_path)?;
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let host = node.host.clone();
        run_to_completion("NodeUnstageVolume", async move {
            let _held = held;
            let removed = host
                .unstage(&request.volume_id, &staging_path)
                .await
                .map_err(|error| from_node(&error))?;
            if !removed {
                refuse_if_unknown(&backend, &request.volume_id).await?;
            }
            Ok(Response::new(NodeUnstageVolumeResponse {}))
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let (backend, node) = self.0.served_by_node("NodePublishVolume")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        let target = limits::path("target_path", &request.target_path)?;
        let capability = Capability::read("volume_capability", request.volume_capability.as_ref());
        let capability = match capability {
            Err(CapabilityError::Malformed(status)) => return Err(status),
            other => other,
        };
        let staging_path =
            limits::optional_path("staging_target_path", &request.staging_target_path)?;
        self.0.admit("NodePublishVolume", &mut request.secrets)?;
        limits::map("publish_context", &request.publish_context)?;
        limits::map("volume_context", &request.volume_context)?;
        let staging_path = staging_path.ok_or_else(|| {
            refusal::precondition(
                "staging_target_path is empty; the plugin stages volumes, so call \
                 NodeStageVolume first and name its path here",
            )
        })?;
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let (host, gives_groups) = (node.host.clone(), self.0.gives_groups());
        run_to_completion("NodePublishVolume", async move {
            let _held = held;
            let known = look_up(&backend, &host, &request.volume_id).await?;
            let mut default = FileSystem::default();
            if let Some(volume) = known {
                let own = context::of_volume(&volume);
                context::compare(&request.volume_context, &own)
                    .map_err(|why| invalid("volume_context", why))?;
                default = default_file_system(&volume);
            }
            let capability = capability.map_err(CapabilityError::into_precondition_status)?;
            if capability.group().is_some() && !gives_groups {
                return Err(refusal::exceeds_capabilities(
                    "volume_capability has a volume_mount_group, and this node does not advertise \
                     VOLUME_MOUNT_GROUP: the orchestrator gives files to groups, or `quoin node run` \
                     is started with --volume-mount-group",
                ));
            }
            let wanted = PublishRequest {
                access: capability.access(default),
                mode: capability.mode_name().to_owned(),
                read_only: request.readonly || capability.is_reader_only(),
                several_targets: capability.several_targets(),
                group: capability.group(),
                volume: request.volume_id,
                staging_path,
                target,
            };
            host.publish(&wanted).await.map_err(|error| from_node(&error))?;
            Ok(Response::new(NodePublishVolumeResponse {}))
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let (backend, node) = self.0.served_by_node("NodeUnpublishVolume")?;
        let request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        let target = limits::path("target_path", &request.target_path)?;
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let host = node.host.clone();
        run_to_completion("NodeUnpublishVolume", async move {
            let _held = held;
            let removed = host
                .unpublish(&request.volume_id, &target)
                .await
                .map_err(|error| from_node(&error))?;
            if !removed {
                refuse_if_unknown(&backend, &request.volume_id).await?;
            }
            Ok(Response::new(NodeUnpublishVolumeResponse {}))
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let (_, node) = self.0.served_by_node("NodeGetVolumeStats")?;
        let request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        if request.volume_path.is_empty() {
            return Err(missing("volume_path"));
        }
        limits::optional_path("staging_target_path", &request.staging_target_path)?;
        let path = local_path(&request.volume_id, &request.volume_path)?;
        let host = node.host.clone();
        run_to_completion("NodeGetVolumeStats", async move {
            let stats =
                host.stats(&request.volume_id, &path).await.map_err(|error| from_node(&error))?;
            let mut usage = vec![VolumeUsage {
                total: signed(stats.total_bytes),
                used: signed(stats.used_bytes.unwrap_or(0)),
                available: signed(stats.available_bytes.unwrap_or(0)),
                unit: Unit::Bytes.into(),
            }];
            if let Some((total, used, available)) = stats.inodes {
                usage.push(VolumeUsage {
                    total: signed(total),
                    used: signed(used),
                    available: signed(available),
                    unit: Unit::Inodes.into(),
                });
            }
            let condition = VolumeCondition {
                abnormal: stats.abnormal.is_some(),
                message: cut(stats
                    .abnormal
                    .unwrap_or_else(|| "present and usable on this node".into())),
            };
            let volume_condition = Some(condition);
            Ok(Response::new(NodeGetVolumeStatsResponse { usage, volume_condition }))
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let (backend, node) = self.0.served_by_node("NodeExpandVolume")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        if request.volume_path.is_empty() {
            return Err(missing("volume_path"));
        }
        limits::optional_path("staging_target_path", &request.staging_target_path)?;
        self.0.admit("NodeExpandVolume", &mut request.secrets)?;
        let range = request.capacity_range.map(Range::read).transpose()?;
        if request.volume_capability.is_some() {
            Capability::read("volume_capability", request.volume_capability.as_ref())
                .map_err(CapabilityError::invalid)?;
        }
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let host = node.host.clone();
        run_to_completion("NodeExpandVolume", async move {
            let _held = held;
            let volume = backend.volume(&request.volume_id).await?;
            let path = local_path(&request.volume_id, &request.volume_path)?;
            if let Some(range) = range {
                let has = volume.size_bytes;
                if range.required_bytes > has {
                    return Err(out_of_range(format!(
                        "the volume has {has} bytes and {} are requested; call \
                         ControllerExpandVolume first",
                        range.required_bytes
                    )));
                }
                if range.limit_bytes != 0 && range.limit_bytes < has {
                    return Err(out_of_range(format!(
                        "the volume has {has} bytes, more than the limit of {}; volumes do not \
                         shrink",
                        range.limit_bytes
                    )));
                }
            }
            let size_bytes = host
                .expand(&request.volume_id, &path, volume.size_bytes)
                .await
                .map_err(|error| from_node(&error))?;
            Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes: signed(size_bytes) }))
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        self.0.served_by_node("NodeGetCapabilities")?;
        let is_on =
            |kind: &rpc::Type| *kind != rpc::Type::VolumeMountGroup || self.0.gives_groups();
        let capability = |kind: rpc::Type| NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let all = self.0.of_edition(CAPABILITIES).into_iter();
        let capabilities = all.filter(is_on).map(capability).collect();
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let (_, node) = self.0.served_by_node("NodeGetInfo")?;
        Ok(Response::new(NodeGetInfoResponse {
            node_id: node.name.clone(),
            max_volumes_per_node: node.volumes_max.into(),
            accessible_topology: Some(topology::of_node(&node.name, &node.topology)?),
        }))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        let (backend, node) = self.served_since("NodeGetVolumeHealth", Edition::NEWEST)?;
        let request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        let target = limits::optional_path("volume_publish_path", &request.volume_publish_path)?;
        let staging = limits::optional_path("staging_target_path", &request.staging_target_path)?;
        let (host, name) = (node.host.clone(), node.name.clone());
        run_to_completion("NodeGetVolumeHealth", async move {
            let volume_id = request.volume_id;
            let asked = tokio::time::timeout(STANDING_MAX, backend.find_volume(&volume_id)).await;
            let standing = match &asked {
                Ok(Ok(Some(volume))) => Some(health::standing(volume, &name)),
                _ => None,
            };
            let (staging, target) = (staging.as_deref(), target.as_deref());
            let found = host.health(&volume_id, staging, target, standing.as_ref()).await;
            let faults = match found.map_err(|error| from_node(&error))? {
                Some(faults) => faults,
                // Nothing of it is here: is there such a volume?
                None => {
                    match asked.unwrap_or_else(|_| Err(refusal::no_answer_in_time(STANDING_MAX))) {
                        Ok(Some(_)) => Vec::new(),
                        Ok(None) => return Err(no_volume(&volume_id)),
                        Err(status) => {
                            let what = format!("volume {volume_id}, of which nothing is here,");
                            return Err(refusal::not_judged(&what, status.message()));
                        }
                    }
                }
            };
            let volume_health = Some(health::of_node(volume_id, &faults));
            Ok(Response::new(NodeGetVolumeHealthResponse { volume_health }))
        })
        .await
    }
    async fn node_get_storage_health(
        &self,
        request: Request<NodeGetStorageHealthRequest>,
    ) -> Result<Response<NodeGetStorageHealthResponse>, Status> {
        let (backend, _) = self.served_since("NodeGetStorageHealth", Edition::NEWEST)?;
        self.0.admit("NodeGetStorageHealth", &mut request.into_inner().secrets)?;
        let plugin = self.0.clone();
        run_to_completion("NodeGetStorageHealth", async move {
            let backend_health = plugin.pools().health(&backend).await?;
            Ok(Response::new(NodeGetStorageHealthResponse { backend_health }))
        })
        .await
    }
}

/// Returns the volume, unless the control plane does not answer and this node has it anyway: a pod
/// on a node that holds the volume must start while the control plane is down.
async fn look_up(
    backend: &Backend,
    host: &Arc<NodeHost>,
    volume_id: &str,
) -> Result<Option<api::Volume>, Status> {
    let is_here = host.has_record(volume_id).map_err(|error| from_node(&error))?;
    match backend.volume(volume_id).await {
        Ok(volume) => Ok(Some(volume)),
        Err(status) if status.code() == Code::Unavailable && is_here => Ok(None),
        Err(status) => Err(status),
    }
}

/// Chooses the answer after nothing was found to remove: 5 only if the volume is known not to
/// exist.
async fn refuse_if_unknown(backend: &Backend, volume_id: &str) -> Result<(), Status> {
    match backend.find_volume(volume_id).await {
        Ok(None) => Err(no_volume(volume_id)),
        Ok(Some(_)) | Err(_) => Ok(()),
    }
}

/// Parses a path. A volume of this node is never at a relative one.
fn local_path(volume_id: &str, path: &str) -> Result<std::path::PathBuf, Status> {
    limits::path("volume_path", path).map_err(|status| refusal::not_at_path(volume_id, &status))
}

fn default_file_system(volume: &api::Volume) -> FileSystem {
    volume.spec.as_ref().and_then(|spec| spec.fs_type.parse().ok()).unwrap_or_default()
}
