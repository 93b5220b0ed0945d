//! The GroupController service: snapshots of several volumes at one point.
//!
//! A group's id is handed out once all members are cut. Clients of 1.8, where the service was an alpha
//! feature, and of 1.11 and later, where it is stable, send the same messages.

use std::collections::BTreeSet;

use quoin_api::control as api;
use quoin_api::csi::group_controller_server::GroupController;
use quoin_api::csi::group_controller_service_capability::{Rpc, Type, rpc};
use quoin_api::csi::*;
use tonic::{Request, Response, Status};

use crate::backend::Backend;
use crate::controller::group_snapshot;
use crate::in_flight::run_to_completion;
use crate::refusal::{group_not_cut, missing, no_group_snapshot, other_members};
use crate::{Plugin, limits, parameters};

/// Group snapshots, in the modes that have the controller.
pub(crate) struct GroupService(pub Plugin);

/// Checks the list of members that a caller gives with a group's id: all of those that exist, and
/// none that never was one. Members that a recovery of the records did not find may be named.
fn check_members(group: &api::GroupSnapshot, given: &[String]) -> Result<(), Status> {
    if given.is_empty() {
        return Err(missing("snapshot_ids"));
    }
    let given: BTreeSet<&str> = given.iter().map(String::as_str).collect();
    let of_all = |is: fn(&&api::GroupSnapshotMember) -> bool| -> BTreeSet<&str> {
        group.members.iter().filter(is).map(|member| member.snapshot_id.as_str()).collect()
    };
    let (all, present) = (of_all(|_| true), of_all(|member| member.snapshot.is_some()));
    match given.is_subset(&all) && present.is_subset(&given) {
        true => Ok(()),
        false => Err(other_members(&group.id)),
    }
}

fn check_ids(ids: &[String]) -> Result<(), Status> {
    ids.iter().try_for_each(|id| limits::required("snapshot_ids", id))
}

/// The group, if it is cut: before that nobody was given its id.
async fn find(backend: &Backend, id: &str) -> Result<Option<api::GroupSnapshot>, Status> {
    Ok(backend.find_group_snapshot(id).await?.filter(|group| group.phase != "Wished"))
}

#[tonic::async_trait]
impl GroupController for GroupService {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<GroupControllerGetCapabilitiesResponse>, Status> {
        self.0.served_by_controller("GroupControllerGetCapabilities")?;
        let rpc = Rpc { r#type: rpc::Type::CreateDeleteGetVolumeGroupSnapshot.into() };
        let capability = GroupControllerServiceCapability { r#type: Some(Type::Rpc(rpc)) };
        let capabilities = vec![capability];
        Ok(Response::new(GroupControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<CreateVolumeGroupSnapshotResponse>, Status> {
        let backend = self.0.served_by_controller("CreateVolumeGroupSnapshot")?;
        let mut request = request.into_inner();
        limits::name("name", &request.name)?;
        if request.source_volume_ids.is_empty() {
            return Err(missing("source_volume_ids"));
        }
        for id in &request.source_volume_ids {
            limits::required("source_volume_ids", id)?;
        }
        self.0.admit("CreateVolumeGroupSnapshot", &mut request.secrets)?;
        limits::map("parameters", &request.parameters)?;
        parameters::of_snapshot(&request.parameters)?;
        let held = self.0.begin("group snapshot name", &request.name).await?;
        run_to_completion("CreateVolumeGroupSnapshot", async move {
            let _held = held;
            let group =
                backend.create_group_snapshot(&request.name, &request.source_volume_ids).await?;
            if group.phase == "Wished" {
                return Err(group_not_cut(&request.name, &group.waiting_for));
            }
            let group_snapshot = Some(group_snapshot(&group));
            Ok(Response::new(CreateVolumeGroupSnapshotResponse { group_snapshot }))
        })
        .await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<DeleteVolumeGroupSnapshotResponse>, Status> {
        let backend = self.0.served_by_controller("DeleteVolumeGroupSnapshot")?;
        let mut request = request.into_inner();
        limits::required("group_snapshot_id", &request.group_snapshot_id)?;
        check_ids(&request.snapshot_ids)?;
        self.0.admit("DeleteVolumeGroupSnapshot", &mut request.secrets)?;
        let held = self.0.begin("group snapshot", &request.group_snapshot_id).await?;
        run_to_completion("DeleteVolumeGroupSnapshot", async move {
            let _held = held;
            if let Some(group) = find(&backend, &request.group_snapshot_id).await? {
                check_members(&group, &request.snapshot_ids)?;
                backend.delete_group_snapshot(&group.id).await?;
            }
            Ok(Response::new(DeleteVolumeGroupSnapshotResponse {}))
        })
        .await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<GetVolumeGroupSnapshotResponse>, Status> {
        let backend = self.0.served_by_controller("GetVolumeGroupSnapshot")?;
        let mut request = request.into_inner();
        limits::required("group_snapshot_id", &request.group_snapshot_id)?;
        check_ids(&request.snapshot_ids)?;
        self.0.admit("GetVolumeGroupSnapshot", &mut request.secrets)?;
        run_to_completion("GetVolumeGroupSnapshot", async move {
            let id = &request.group_snapshot_id;
            let group = find(&backend, id).await?.ok_or_else(|| no_group_snapshot(id))?;
            check_members(&group, &request.snapshot_ids)?;
            let group_snapshot = Some(group_snapshot(&group));
            Ok(Response::new(GetVolumeGroupSnapshotResponse { group_snapshot }))
        })
        .await
    }
}
