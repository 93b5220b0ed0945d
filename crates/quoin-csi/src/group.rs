//! Services of the interface that this version does not offer: registered, so that a call gets an
//! answer (12) instead of a transport error, and nothing more.

use quoin_api::csi::group_controller_server::GroupController;
use quoin_api::csi::*;
use tonic::{Request, Response, Status};

use crate::refusal::not_served;

const NO_GROUPS: &str = "the plugin does not advertise GROUP_CONTROLLER_SERVICE";

/// Group snapshots.
pub(crate) struct GroupService;

#[tonic::async_trait]
impl GroupController for GroupService {
    async fn group_controller_get_capabilities(
        &self,
        _: Request<GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<GroupControllerGetCapabilitiesResponse>, Status> {
        Err(not_served("GroupControllerGetCapabilities", NO_GROUPS))
    }
    async fn create_volume_group_snapshot(
        &self,
        _: Request<CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<CreateVolumeGroupSnapshotResponse>, Status> {
        Err(not_served("CreateVolumeGroupSnapshot", NO_GROUPS))
    }
    async fn delete_volume_group_snapshot(
        &self,
        _: Request<DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<DeleteVolumeGroupSnapshotResponse>, Status> {
        Err(not_served("DeleteVolumeGroupSnapshot", NO_GROUPS))
    }
    async fn get_volume_group_snapshot(
        &self,
        _: Request<GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<GetVolumeGroupSnapshotResponse>, Status> {
        Err(not_served("GetVolumeGroupSnapshot", NO_GROUPS))
    }
}
