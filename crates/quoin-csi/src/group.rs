//! Services of the interface that this version does not offer: registered, so that a call gets an
//! answer (12) instead of a transport error, and nothing more.

use quoin_api::csi::snapshot_metadata_server::SnapshotMetadata;
use quoin_api::csi::*;
use tonic::{Request, Response, Status};

use crate::refusal::not_served;

const NO_METADATA: &str = "the plugin does not advertise SNAPSHOT_METADATA_SERVICE";

/// Block metadata of snapshots.
pub(crate) struct MetadataService;

type Nothing<T> = tokio_stream::Empty<Result<T, Status>>;

#[tonic::async_trait]
impl SnapshotMetadata for MetadataService {
    type GetMetadataAllocatedStream = Nothing<GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Nothing<GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        _: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        Err(not_served("GetMetadataAllocated", NO_METADATA))
    }
    async fn get_metadata_delta(
        &self,
        _: Request<GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        Err(not_served("GetMetadataDelta", NO_METADATA))
    }
}
