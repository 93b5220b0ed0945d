//! The controller's half of reclaiming space: what is dead in a volume's replicas is given back.

use std::time::Duration;

use quoin_api::csi_addons::reclaimspace::reclaim_space_controller_server::ReclaimSpaceController;
use quoin_api::csi_addons::reclaimspace::{
    ControllerReclaimSpaceRequest, ControllerReclaimSpaceResponse, StorageConsumption,
};
use tonic::{Request, Response, Status};

use crate::{Plugin, addons, limits, refusal};

/// Longest wait of one call to the control plane.
const STEP: Duration = Duration::from_secs(20);
/// Steps of a call: it ends within two minutes, also where its caller is gone.
const STEPS_MAX: usize = 6;

/// Serves the call in the modes that have the controller.
pub(crate) struct ReclaimService(pub Plugin);

fn consumption(bytes: u64) -> Option<StorageConsumption> {
    Some(StorageConsumption { usage_bytes: i64::try_from(bytes).unwrap_or(i64::MAX) })
}

#[tonic::async_trait]
impl ReclaimSpaceController for ReclaimService {
    async fn controller_reclaim_space(
        &self,
        request: Request<ControllerReclaimSpaceRequest>,
    ) -> Result<Response<ControllerReclaimSpaceResponse>, Status> {
        let backend = self.0.served_by_controller("ControllerReclaimSpace")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        // A volume's context comes as parameters, and nothing of it is needed.
        let _secrets = self.0.admit("ControllerReclaimSpace", &mut request.secrets)?;
        let held = self.0.begin("reclaimed volume", &request.volume_id).await?;
        addons::run("ControllerReclaimSpace", async move {
            let _held = held;
            let volume = backend.volume(&request.volume_id).await?;
            // The work goes on where the time of the call is over, and a repeat tells how it ended.
            for _ in 0..STEPS_MAX {
                let told = backend.reclaim_volume(&volume.id, STEP).await?;
                if told.done {
                    return Ok(Response::new(ControllerReclaimSpaceResponse {
                        pre_usage: consumption(told.before_bytes),
                        post_usage: consumption(told.bytes),
                    }));
                }
            }
            Err(refusal::still_reclaimed(&volume.id))
        })
        .await
    }
}
