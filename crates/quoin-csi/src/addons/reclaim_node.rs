//! NodeReclaimSpace: blocks that the file system of a volume does not use go back to the pools.
//!
//! A block volume is left as it is: a discard would take what its owner keeps there. A trim that takes
//! longer than the call goes on behind it, and a repeat waits for it.

use std::time::Duration;

use quoin_api::csi_addons::reclaimspace::reclaim_space_node_server::ReclaimSpaceNode;
use quoin_api::csi_addons::reclaimspace::{NodeReclaimSpaceRequest, NodeReclaimSpaceResponse};
use tonic::{Request, Response, Status};

use crate::refusal::{from_node, missing, no_answer_in_time, no_volume, not_judged, not_served};
use crate::{Plugin, addons, limits};

/// Longest wait for the controller's word on whether there is such a volume.
const CONTROLLER_MAX: Duration = Duration::from_secs(5);

/// Serves the reclaims of mounted volumes in the modes that have the node.
pub(crate) struct ReclaimNodeService(pub Plugin);

#[tonic::async_trait]
impl ReclaimSpaceNode for ReclaimNodeService {
    async fn node_reclaim_space(
        &self,
        request: Request<NodeReclaimSpaceRequest>,
    ) -> Result<Response<NodeReclaimSpaceResponse>, Status> {
        let Some(node) = self.0.node() else {
            return Err(not_served("NodeReclaimSpace", crate::node::CONTROLLER_ONLY));
        };
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
        let (backend, host) = (self.0.backend().clone(), node.host.clone());
        addons::run("NodeReclaimSpace", async move {
            let _held = held;
            let volume_id = request.volume_id;
            let asked = tokio::time::timeout(CONTROLLER_MAX, backend.find_volume(&volume_id)).await;
            match asked.unwrap_or_else(|_| Err(no_answer_in_time(CONTROLLER_MAX))) {
                Ok(Some(_)) => {}
                Ok(None) => return Err(no_volume(&volume_id)),
                Err(status) => {
                    if !host.has_record(&volume_id).map_err(|error| from_node(&error))? {
                        let what = format!("volume {volume_id}, of which nothing is here,");
                        return Err(not_judged(&what, status.message()));
                    }
                }
            }
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
