//! NodeReclaimSpace: blocks that the file system of a volume does not use go back to the pools.
//!
//! A block volume is left as it is: a discard would take what its owner keeps there. A trim that takes
//! longer than the call goes on behind it, and a repeat waits for it.

use quoin_api::csi_addons::reclaimspace::reclaim_space_node_server::ReclaimSpaceNode;
use quoin_api::csi_addons::reclaimspace::{NodeReclaimSpaceRequest, NodeReclaimSpaceResponse};
use tonic::{Request, Response, Status};

use crate::refusal::{from_node, missing};
use crate::{Plugin, addons, limits};

/// Serves the reclaims of mounted volumes in the modes that have the node.
pub(crate) struct ReclaimNodeService(pub Plugin);

#[tonic::async_trait]
impl ReclaimSpaceNode for ReclaimNodeService {
    async fn node_reclaim_space(
        &self,
        request: Request<NodeReclaimSpaceRequest>,
    ) -> Result<Response<NodeReclaimSpaceResponse>, Status> {
        let (backend, node) = self.0.served_by_node("NodeReclaimSpace")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        let path = limits::optional_path("volume_path", &request.volume_path)?;
        let staging = limits::optional_path("staging_target_path", &request.staging_target_path)?;
        // The field's sidecar names the staging path alone.
        let Some(place) = staging.clone().or_else(|| path.clone()) else {
            return Err(missing("one of volume_path and staging_target_path"));
        };
        self.0.admit("NodeReclaimSpace", &mut request.secrets)?;
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let host = node.host.clone();
        addons::run("NodeReclaimSpace", async move {
            let _held = held;
            let volume_id = request.volume_id;
            addons::known(&backend, &host, &volume_id).await?;
            for one in path.iter().chain(&staging) {
                host.check_place(&volume_id, one).map_err(|error| from_node(&error))?;
            }
            host.trim(&volume_id, &place).await.map_err(|error| from_node(&error))?;
            // Pools free trimmed blocks in the background, so there is no figure of this call.
            Ok(Response::new(NodeReclaimSpaceResponse::default()))
        })
        .await
    }
}
