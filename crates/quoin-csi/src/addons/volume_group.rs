//! The VolumeGroup service: named sets of volumes, each of which is replicated as one.

use std::collections::{BTreeSet, HashMap};

use quoin_api::control as api;
use quoin_api::csi_addons::identity::capability::volume_group::Type as Can;
use quoin_api::csi_addons::identity::capability::{Type as Capability, VolumeGroup as Told};
use quoin_api::csi_addons::volumegroup::controller_server::Controller;
use quoin_api::csi_addons::volumegroup::list_volume_groups_response::Entry;
use quoin_api::csi_addons::volumegroup::*;
use tonic::{Code, Request, Response, Status};

use super::replication::class_of_group;
use crate::backend::{Backend, is_id};
use crate::controller::volume;
use crate::refusal::{invalid, no_volume};
use crate::{Plugin, addons, limits};

/// Members from whose count on all volumes are listed at once, not asked for one after the other.
const LISTED_FROM: usize = 32;

/// Serves VolumeGroup in the modes that have the controller.
pub(crate) struct VolumeGroupService(pub Plugin);

/// Returns what is told of the service.
pub(super) fn capabilities() -> [Capability; 6] {
    [
        Can::VolumeGroup,
        Can::LimitVolumeToOneVolumeGroup,
        Can::DoNotAllowVgToDeleteVolumes,
        Can::ModifyVolumeGroup,
        Can::GetVolumeGroup,
        Can::ListVolumeGroups,
    ]
    .map(|can| Capability::VolumeGroup(Told { r#type: can.into() }))
}

/// Reads a list of members, whose order and repetitions mean nothing. The first one of unknown form is unknown.
fn members(given: &[String]) -> Result<Vec<String>, Status> {
    given.iter().try_for_each(|id| limits::required("volume_ids", id))?;
    if let Some(unknown) = given.iter().find(|id| !is_id(id)) {
        return Err(no_volume(unknown));
    }
    let all: BTreeSet<&String> = given.iter().collect();
    Ok(all.into_iter().cloned().collect())
}

/// Returns the message of a group. A member that is gone meanwhile is none.
async fn shown(backend: &Backend, group: api::VolumeGroup) -> Result<VolumeGroup, Status> {
    Ok(all_shown(backend, vec![group]).await?.pop().unwrap_or_default())
}

/// As [`shown`], of many groups.
async fn all_shown(
    backend: &Backend,
    groups: Vec<api::VolumeGroup>,
) -> Result<Vec<VolumeGroup>, Status> {
    let members: BTreeSet<&String> =
        groups.iter().flat_map(|group| group.volumes.iter().map(|member| &member.id)).collect();
    let mut volumes = HashMap::new();
    if members.len() < LISTED_FROM {
        for id in members {
            let found = backend.find_volume(id).await?;
            volumes.extend(found.as_ref().map(|one| (one.id.clone(), volume(one))));
        }
    } else {
        let mut token = String::new();
        loop {
            let (page, next) = backend.list_volumes(0, &token).await?;
            let of_groups = page.iter().filter(|one| members.contains(&one.id));
            volumes.extend(of_groups.map(|one| (one.id.clone(), volume(one))));
            token = next;
            if token.is_empty() {
                break;
            }
        }
    }
    let shown = groups.into_iter().map(|group| {
        let members = group.volumes.iter().filter_map(|member| volumes.get(&member.id).cloned());
        VolumeGroup {
            volumes: members.collect(),
            volume_group_id: group.id,
            volume_group_context: HashMap::new(),
        }
    });
    Ok(shown.collect())
}

#[tonic::async_trait]
impl Controller for VolumeGroupService {
    async fn create_volume_group(
        &self,
        request: Request<CreateVolumeGroupRequest>,
    ) -> Result<Response<CreateVolumeGroupResponse>, Status> {
        const RPC: &str = "CreateVolumeGroup";
        let backend = self.0.served_by_controller(RPC)?;
        let mut request = request.into_inner();
        limits::name("name", &request.name)?;
        self.0.admit(RPC, &mut request.secrets)?;
        let prefix = class_of_group(&request.parameters)?;
        limits::name("name", &format!("{prefix}{}", request.name))?;
        let volume_ids = members(&request.volume_ids)?;
        let held = self.0.begin("group name", &request.name).await?;
        addons::run(RPC, async move {
            let _held = held;
            let named = (request.name.as_str(), prefix.as_str());
            let group = backend.create_volume_group(named, &volume_ids).await?;
            let volume_group = Some(shown(&backend, group).await?);
            Ok(Response::new(CreateVolumeGroupResponse { volume_group }))
        })
        .await
    }

    async fn modify_volume_group_membership(
        &self,
        request: Request<ModifyVolumeGroupMembershipRequest>,
    ) -> Result<Response<ModifyVolumeGroupMembershipResponse>, Status> {
        const RPC: &str = "ModifyVolumeGroupMembership";
        let backend = self.0.served_by_controller(RPC)?;
        let mut request = request.into_inner();
        limits::required("volume_group_id", &request.volume_group_id)?;
        self.0.admit(RPC, &mut request.secrets)?;
        class_of_group(&request.parameters)?;
        let held = self.0.begin("group", &request.volume_group_id).await?;
        addons::run(RPC, async move {
            let _held = held;
            let before = backend.volume_group(&request.volume_group_id).await?;
            let volume_ids = members(&request.volume_ids)?;
            let modified = backend.modify_volume_group(&before.id, &volume_ids).await;
            let group = modified.map_err(|why| match why.code() {
                // The table has 3 for a volume that cannot be a member.
                Code::FailedPrecondition if !volume_ids.is_empty() => {
                    invalid("volume_ids", why.message())
                }
                _ => why,
            })?;
            let volume_group = Some(shown(&backend, group).await?);
            Ok(Response::new(ModifyVolumeGroupMembershipResponse { volume_group }))
        })
        .await
    }

    async fn delete_volume_group(
        &self,
        request: Request<DeleteVolumeGroupRequest>,
    ) -> Result<Response<DeleteVolumeGroupResponse>, Status> {
        const RPC: &str = "DeleteVolumeGroup";
        let backend = self.0.served_by_controller(RPC)?;
        let mut request = request.into_inner();
        limits::required("volume_group_id", &request.volume_group_id)?;
        self.0.admit(RPC, &mut request.secrets)?;
        let held = self.0.begin("group", &request.volume_group_id).await?;
        addons::run(RPC, async move {
            let _held = held;
            backend.delete_volume_group(&request.volume_group_id).await?;
            Ok(Response::new(DeleteVolumeGroupResponse {}))
        })
        .await
    }

    async fn list_volume_groups(
        &self,
        request: Request<ListVolumeGroupsRequest>,
    ) -> Result<Response<ListVolumeGroupsResponse>, Status> {
        const RPC: &str = "ListVolumeGroups";
        let backend = self.0.served_by_controller(RPC)?;
        let mut request = request.into_inner();
        let max_entries = u32::try_from(request.max_entries)
            .map_err(|_| invalid("max_entries", "is negative"))?;
        limits::optional("starting_token", &request.starting_token)?;
        self.0.admit(RPC, &mut request.secrets)?;
        addons::run(RPC, async move {
            let listed = backend.volume_groups(max_entries, &request.starting_token).await?;
            let (groups, next_token) = listed;
            let entry = |group| Entry { volume_group: Some(group) };
            let entries = all_shown(&backend, groups).await?.into_iter().map(entry).collect();
            Ok(Response::new(ListVolumeGroupsResponse { entries, next_token }))
        })
        .await
    }

    async fn controller_get_volume_group(
        &self,
        request: Request<ControllerGetVolumeGroupRequest>,
    ) -> Result<Response<ControllerGetVolumeGroupResponse>, Status> {
        const RPC: &str = "ControllerGetVolumeGroup";
        let backend = self.0.served_by_controller(RPC)?;
        let mut request = request.into_inner();
        limits::required("volume_group_id", &request.volume_group_id)?;
        self.0.admit(RPC, &mut request.secrets)?;
        addons::run(RPC, async move {
            let group = backend.volume_group(&request.volume_group_id).await?;
            let volume_group = Some(shown(&backend, group).await?);
            Ok(Response::new(ControllerGetVolumeGroupResponse { volume_group }))
        })
        .await
    }
}
