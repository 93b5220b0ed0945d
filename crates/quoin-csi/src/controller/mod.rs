//! The Controller service: checks requests, passes them to the control plane and converts the
//! answers. It holds no state of volumes, so it runs on any host, in any number.

mod modify;
mod response;
mod snapshots;

pub(crate) use response::{cut, group_snapshot, volume};

use quoin_api::control as api;
use quoin_api::csi::controller_server::Controller;
use quoin_api::csi::controller_service_capability::{Rpc, Type, rpc};
use quoin_api::csi::volume_content_source::Type as Source;
use quoin_api::csi::*;
use tonic::{Request, Response, Status};

use crate::backend::{Backend, by_id, is_id};
use crate::capability::{self, Capability, CapabilityError};
use crate::capacity::{Range, signed};
use crate::edition::Edition;
use crate::in_flight::run_to_completion;
use crate::plugin::REPLICATION_OF_VOLUME;
use crate::refusal::{self, invalid, missing, out_of_range};
use crate::{Plugin, context, encryption, health, limits, parameters, topology};

/// Serves Controller in the modes that have it.
pub(crate) struct ControllerService(pub Plugin);

/// Capabilities of this controller and the edition that brought each, in the order of the interface's
/// numbers.
const CAPABILITIES: &[(Edition, rpc::Type)] = &[
    (Edition::OLDEST, rpc::Type::CreateDeleteVolume),
    (Edition::OLDEST, rpc::Type::PublishUnpublishVolume),
    (Edition::OLDEST, rpc::Type::ListVolumes),
    (Edition::OLDEST, rpc::Type::GetCapacity),
    (Edition::OLDEST, rpc::Type::CreateDeleteSnapshot),
    (Edition::OLDEST, rpc::Type::ListSnapshots),
    (Edition::OLDEST, rpc::Type::CloneVolume),
    (Edition::OLDEST, rpc::Type::PublishReadonly),
    (Edition::OLDEST, rpc::Type::ExpandVolume),
    (Edition::OLDEST, rpc::Type::ListVolumesPublishedNodes),
    (Edition::OLDEST, rpc::Type::VolumeCondition),
    (Edition::OLDEST, rpc::Type::GetVolume),
    (Edition::OLDEST, rpc::Type::SingleNodeMultiWriter),
    (Edition::V1_9, rpc::Type::ModifyVolume),
    (Edition::NEWEST, rpc::Type::GetVolumeHealth),
    (Edition::NEWEST, rpc::Type::ListVolumeHealth),
    (Edition::V1_12, rpc::Type::GetSnapshot),
];

impl ControllerService {
    /// As [`Plugin::served_by_controller`], of a call that came with a later edition.
    fn served_since(&self, rpc: &'static str, since: Edition) -> Result<Backend, Status> {
        let backend = self.0.served_by_controller(rpc)?;
        self.0.serves_since(rpc, since)?;
        Ok(backend)
    }
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let backend = self.0.served_by_controller("CreateVolume")?;
        let mut request = request.into_inner();
        limits::name("name", &request.name)?;
        let secrets = self.0.admit("CreateVolume", &mut request.secrets)?;
        limits::map("parameters", &request.parameters)?;
        limits::map("mutable_parameters", &request.mutable_parameters)?;
        let capabilities =
            capability::read_all(&request.volume_capabilities).map_err(CapabilityError::invalid)?;
        let source = read_source(request.volume_content_source.as_ref())?;
        let (size_bytes, range) = Range::of_new_volume(request.capacity_range)?;
        refuse_too_small(&capabilities, size_bytes)?;
        let mut spec = parameters::read_new(&request.parameters, &request.mutable_parameters)?;
        spec.claim = parameters::claim(&request.parameters);
        let wanted = topology::of_requirement(request.accessibility_requirements.as_ref())?;
        (spec.accessible_topology, spec.preferred_topology) = (wanted.requisite, wanted.preferred);
        let key = encryption::of_new_volume(&spec, &secrets)?;
        let held = self.0.begin("volume name", &request.name).await?;
        run_to_completion("CreateVolume", async move {
            let _held = held;
            spec.name = request.name;
            spec.size_bytes = size_bytes;
            if let Some(key) = &key {
                // A caller that gets 16 asks no more, and deletes nothing: nothing may be made before.
                spec.encryption = match backend.key_source(&spec.name, source.as_ref()).await? {
                    Some(source) => {
                        encryption::check(&source, key.clone()).await?;
                        // A copy has the data key of its source.
                        source.spec.and_then(|spec| spec.encryption)
                    }
                    None => Some(encryption::create(key.clone()).await?),
                };
            }
            let wanted = api::CreateVolumeRequest {
                spec: Some(spec),
                limit_bytes: range.limit_bytes,
                any_size: range.required_bytes == 0,
                source,
            };
            let volume = backend.create_volume(wanted).await?;
            refuse_not_offered(&capabilities, &volume)?;
            if let Some(key) = key {
                // It may have been made before, with another key.
                encryption::check(&volume, key).await?;
            }
            let volume = Some(response::volume(&volume));
            Ok(Response::new(CreateVolumeResponse { volume }))
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let backend = self.0.served_by_controller("DeleteVolume")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        self.0.admit("DeleteVolume", &mut request.secrets)?;
        let held = self.0.begin("volume", &request.volume_id).await?;
        // A promotion or demotion meanwhile would change the rule by which it is deleted.
        let held = (held, self.0.begin(REPLICATION_OF_VOLUME, &request.volume_id).await?);
        run_to_completion("DeleteVolume", async move {
            let _held = held;
            backend.delete_volume(&request.volume_id).await?;
            Ok(Response::new(DeleteVolumeResponse {}))
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        let backend = self.0.served_by_controller("ControllerPublishVolume")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        if request.node_id.is_empty() {
            return Err(missing("node_id"));
        }
        limits::node_id("node_id", &request.node_id)?;
        self.0.admit("ControllerPublishVolume", &mut request.secrets)?;
        limits::map("volume_context", &request.volume_context)?;
        let capability = Capability::read("volume_capability", request.volume_capability.as_ref())
            .map_err(CapabilityError::invalid)?;
        let held = self.0.begin("volume", &request.volume_id).await?;
        run_to_completion("ControllerPublishVolume", async move {
            let _held = held;
            let volume = backend.volume(&request.volume_id).await?;
            let own = context::of_volume(&volume);
            context::compare(&request.volume_context, &own)
                .map_err(|why| invalid("volume_context", why))?;
            let attachment = backend
                .publish_volume(api::PublishVolumeRequest {
                    volume: crate::backend::by_id(&request.volume_id),
                    node: request.node_id,
                    read_only: request.readonly || capability.is_reader_only(),
                    usage: capability.usage(request.readonly),
                    sharing: capability.sharing().to_owned(),
                    replays: !capability.is_block(),
                    // The node's CSI service makes the device.
                    ..Default::default()
                })
                .await?;
            let publish_context = attachment.publish_context;
            Ok(Response::new(ControllerPublishVolumeResponse { publish_context }))
        })
        .await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        let backend = self.0.served_by_controller("ControllerUnpublishVolume")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        limits::node_id("node_id", &request.node_id)?;
        self.0.admit("ControllerUnpublishVolume", &mut request.secrets)?;
        let held = self.0.begin("volume", &request.volume_id).await?;
        run_to_completion("ControllerUnpublishVolume", async move {
            let _held = held;
            backend.unpublish_volume(&request.volume_id, &request.node_id).await?;
            Ok(Response::new(ControllerUnpublishVolumeResponse {}))
        })
        .await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let backend = self.0.served_by_controller("ValidateVolumeCapabilities")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        self.0.admit("ValidateVolumeCapabilities", &mut request.secrets)?;
        limits::map("volume_context", &request.volume_context)?;
        limits::map("parameters", &request.parameters)?;
        limits::map("mutable_parameters", &request.mutable_parameters)?;
        let supported = match capability::read_all(&request.volume_capabilities) {
            Ok(_) => Ok(()),
            Err(CapabilityError::Malformed(status)) => return Err(status),
            Err(CapabilityError::Unsupported(why)) => Err(why),
        };
        run_to_completion("ValidateVolumeCapabilities", async move {
            let volume = backend.volume(&request.volume_id).await?;
            let own = context::of_volume(&volume);
            let verdict = supported
                .and_then(|()| {
                    context::compare(&request.volume_context, &own)
                        .map_err(|why| format!("volume_context {why}"))
                })
                .and_then(|()| response::same_parameters(&volume, &request.parameters));
            let verdict = match verdict {
                Ok(()) => {
                    modify::is_possible(&backend, &volume, &request.mutable_parameters).await?
                }
                refused => refused,
            };
            let answer = match verdict {
                Ok(()) => ValidateVolumeCapabilitiesResponse {
                    confirmed: Some(validate_volume_capabilities_response::Confirmed {
                        volume_context: context::issued(&request.volume_context, &own),
                        volume_capabilities: request.volume_capabilities,
                        parameters: request.parameters,
                        mutable_parameters: modify::checked(request.mutable_parameters),
                    }),
                    message: String::new(),
                },
                Err(message) => ValidateVolumeCapabilitiesResponse {
                    confirmed: None,
                    message: response::cut(message),
                },
            };
            Ok(Response::new(answer))
        })
        .await
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let backend = self.0.served_by_controller("ListVolumes")?;
        let request = request.into_inner();
        let max_entries = u32::try_from(request.max_entries)
            .map_err(|_| invalid("max_entries", "is negative"))?;
        limits::optional("starting_token", &request.starting_token)?;
        run_to_completion("ListVolumes", async move {
            let (mut entries, mut token) = (Vec::new(), request.starting_token);
            loop {
                let (page, next) = backend.list_volumes(max_entries, &token).await?;
                entries.extend(page.iter().filter(is_listed).map(response::entry));
                token = next;
                // All volumes are requested without a bound, whatever the control plane's page
                // size.
                if max_entries != 0 || token.is_empty() {
                    break;
                }
            }
            Ok(Response::new(ListVolumesResponse { entries, next_token: token }))
        })
        .await
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        let backend = self.0.served_by_controller("GetCapacity")?;
        let request = request.into_inner();
        limits::map("parameters", &request.parameters)?;
        let mut spec = parameters::read(&request.parameters)?;
        spec.accessible_topology = topology::of_one(request.accessible_topology.as_ref())?;
        let supported = match request.volume_capabilities.as_slice() {
            [] => true,
            given => match capability::read_all(given) {
                Ok(_) => true,
                Err(CapabilityError::Malformed(status)) => return Err(status),
                Err(CapabilityError::Unsupported(_)) => false,
            },
        };
        run_to_completion("GetCapacity", async move {
            if !supported {
                return Ok(Response::new(GetCapacityResponse::default()));
            }
            let capacity = backend.capacity(spec).await?;
            let size = |bytes: u64| (bytes != 0).then(|| signed(bytes));
            Ok(Response::new(GetCapacityResponse {
                available_capacity: signed(capacity.available_bytes),
                maximum_volume_size: size(capacity.maximum_volume_bytes),
                minimum_volume_size: size(capacity.minimum_volume_bytes),
            }))
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        self.0.served_by_controller("ControllerGetCapabilities")?;
        let capability = |kind: rpc::Type| ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let capabilities = self.0.of_edition(CAPABILITIES).into_iter().map(capability).collect();
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let backend = self.0.served_by_controller("ControllerExpandVolume")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        self.0.admit("ControllerExpandVolume", &mut request.secrets)?;
        let range = request.capacity_range.ok_or_else(|| missing("capacity_range"))?;
        let range = Range::read(range)?;
        let is_block = match &request.volume_capability {
            None => false,
            given => Capability::read("volume_capability", given.as_ref())
                .map_err(CapabilityError::invalid)?
                .is_block(),
        };
        let held = self.0.begin("volume", &request.volume_id).await?;
        run_to_completion("ControllerExpandVolume", async move {
            let _held = held;
            let mut volume = backend.volume(&request.volume_id).await?;
            let present = volume.size_bytes;
            if range.limit_bytes != 0 && range.limit_bytes < present {
                return Err(out_of_range(format!(
                    "the volume has {present} bytes, more than the limit of {}; volumes do not \
                     shrink",
                    range.limit_bytes
                )));
            }
            if range.required_bytes > present {
                let size_bytes = range.rounded()?;
                volume = backend
                    .resize_volume(&request.volume_id, size_bytes, range.limit_bytes)
                    .await?;
            }
            // A raw device that is attached nowhere gets its size at the next attachment.
            let node_expansion_required = !(is_block && volume.attachments.is_empty());
            Ok(Response::new(ControllerExpandVolumeResponse {
                capacity_bytes: signed(volume.size_bytes),
                node_expansion_required,
            }))
        })
        .await
    }

    async fn controller_get_volume(
        &self,
        request: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        let backend = self.0.served_by_controller("ControllerGetVolume")?;
        let request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        run_to_completion("ControllerGetVolume", async move {
            let volume = backend.volume(&request.volume_id).await?;
            Ok(Response::new(ControllerGetVolumeResponse {
                status: Some(controller_get_volume_response::VolumeStatus {
                    published_node_ids: response::nodes(&volume),
                    volume_condition: Some(response::condition(&volume)),
                }),
                volume: Some(response::volume(&volume)),
            }))
        })
        .await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        let backend = self.served_since("ControllerModifyVolume", Edition::V1_9)?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        self.0.admit("ControllerModifyVolume", &mut request.secrets)?;
        limits::map("mutable_parameters", &request.mutable_parameters)?;
        let change = parameters::read_change(&request.mutable_parameters)?;
        let held = self.0.begin("volume", &request.volume_id).await?;
        run_to_completion("ControllerModifyVolume", async move {
            let _held = held;
            modify::modify(&backend, &request.volume_id, change).await?;
            Ok(Response::new(ControllerModifyVolumeResponse {}))
        })
        .await
    }
    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        self.make_snapshot(request.into_inner()).await
    }
    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        self.remove_snapshot(request.into_inner()).await
    }
    async fn list_snapshots(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        self.snapshot_list(request.into_inner()).await
    }
    async fn get_snapshot(
        &self,
        request: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        self.one_snapshot(request.into_inner()).await
    }
    async fn controller_list_volume_health(
        &self,
        request: Request<ControllerListVolumeHealthRequest>,
    ) -> Result<Response<ControllerListVolumeHealthResponse>, Status> {
        let backend = self.served_since("ControllerListVolumeHealth", Edition::NEWEST)?;
        let mut request = request.into_inner();
        let max_entries = u32::try_from(request.max_entries)
            .map_err(|_| invalid("max_entries", "is negative"))?;
        limits::optional("starting_token", &request.starting_token)?;
        self.0.admit("ControllerListVolumeHealth", &mut request.secrets)?;
        run_to_completion("ControllerListVolumeHealth", async move {
            let page = backend.list_ill_volumes(max_entries, &request.starting_token).await?;
            let (volumes, next_token) = page;
            let listed = volumes.iter().filter(is_listed);
            let entries = listed.map(health::of_controller).collect::<Result<_, _>>()?;
            Ok(Response::new(ControllerListVolumeHealthResponse { entries, next_token }))
        })
        .await
    }
    async fn controller_get_volume_health(
        &self,
        request: Request<ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<ControllerGetVolumeHealthResponse>, Status> {
        let backend = self.served_since("ControllerGetVolumeHealth", Edition::NEWEST)?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        self.0.admit("ControllerGetVolumeHealth", &mut request.secrets)?;
        run_to_completion("ControllerGetVolumeHealth", async move {
            let volume = backend.volume(&request.volume_id).await?;
            let volume_health = Some(health::of_controller(&volume)?);
            Ok(Response::new(ControllerGetVolumeHealthResponse { volume_health }))
        })
        .await
    }
}

/// Returns false for a copy that was deleted here: it belongs to its mirror and stays, and this side does not count it.
fn is_listed(volume: &&api::Volume) -> bool {
    !volume.mirror.as_ref().is_some_and(|mirror| mirror.released)
}

/// Refuses a volume that is too small for its file system; otherwise the node alone would find out.
fn refuse_too_small(capabilities: &[Capability], size_bytes: u64) -> Result<(), Status> {
    let is_xfs = |c: &Capability| c.file_system() == Some(quoin_node::FileSystem::Xfs);
    if size_bytes < api::XFS_BYTES_MIN && capabilities.iter().any(is_xfs) {
        return Err(out_of_range(format!(
            "capacity_range: {size_bytes} bytes are too little for xfs, which needs {}: ask for \
             more, or for ext4",
            api::XFS_BYTES_MIN
        )));
    }
    Ok(())
}

/// Refuses an existing volume that cannot be used as the request wants it: a new one could.
fn refuse_not_offered(capabilities: &[Capability], volume: &api::Volume) -> Result<(), Status> {
    match refuse_too_small(capabilities, volume.size_bytes) {
        Ok(()) => Ok(()),
        Err(why) => Err(refusal::exists_without(why.message())),
    }
}

/// Reads the content that a new volume is to begin with. An id of unknown form is an unknown id.
fn read_source(given: Option<&VolumeContentSource>) -> Result<Option<api::VolumeSource>, Status> {
    const FIELD: &str = "volume_content_source";
    let Some(given) = given else { return Ok(None) };
    let source = match &given.r#type {
        None => return Err(invalid(FIELD, "has neither a snapshot nor a volume")),
        Some(Source::Snapshot(source)) => {
            let id = &source.snapshot_id;
            limits::required("volume_content_source.snapshot.snapshot_id", id)?;
            if !is_id(id) {
                return Err(refusal::no_snapshot(id));
            }
            let snapshot = Some(api::SnapshotRef { id: id.clone(), name: String::new() });
            api::VolumeSource { snapshot, ..Default::default() }
        }
        Some(Source::Volume(source)) => {
            let id = &source.volume_id;
            limits::required("volume_content_source.volume.volume_id", id)?;
            if !is_id(id) {
                return Err(refusal::no_volume(id));
            }
            api::VolumeSource { volume: by_id(id), ..Default::default() }
        }
    };
    Ok(Some(source))
}

#[cfg(test)]
mod tests {
    use quoin_api::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
    use tonic::Code;

    use super::*;

    #[test]
    fn xfs_is_refused_below_its_smallest_size_and_no_other_use_of_a_volume_is() {
        let mount = |fs_type: &str| {
            let fs_type = fs_type.to_owned();
            AccessType::Mount(MountVolume { fs_type, ..MountVolume::default() })
        };
        let read = |access_type| {
            let access_mode = Some(AccessMode { mode: 1 });
            let given = VolumeCapability { access_type: Some(access_type), access_mode };
            Capability::read("c", Some(&given)).unwrap()
        };
        let (xfs, ext4) = (read(mount("xfs")), read(mount("ext4")));
        let block = read(AccessType::Block(BlockVolume {}));
        let least = api::XFS_BYTES_MIN;
        for (size_bytes, is_taken) in [(least - 4096, false), (least - 1, false), (least, true)] {
            for capabilities in [vec![xfs.clone()], vec![ext4.clone(), block.clone(), xfs.clone()]]
            {
                let refused = refuse_too_small(&capabilities, size_bytes).err();
                let wanted = (!is_taken).then_some(Code::OutOfRange);
                assert_eq!(refused.map(|status| status.code()), wanted, "{size_bytes}");
            }
            assert!(refuse_too_small(&[ext4.clone(), block.clone()], size_bytes).is_ok());
        }
    }
}
