//! Snapshots: requests are checked here, and the control plane does the work.
//!
//! A snapshot's id is handed out once it is cut, so an answer has its time and every listed snapshot
//! is whole.

use quoin_api::control as api;
use quoin_api::csi::*;
use tonic::{Response, Status};

use super::{ControllerService, response};
use crate::backend::is_id;
use crate::edition::Edition;
use crate::in_flight::run_to_completion;
use crate::refusal::{invalid, no_snapshot, not_cut};
use crate::{limits, parameters, topology};

impl ControllerService {
    pub(super) async fn make_snapshot(
        &self,
        mut request: CreateSnapshotRequest,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        let backend = self.0.served_by_controller("CreateSnapshot")?;
        limits::required("source_volume_id", &request.source_volume_id)?;
        limits::name("name", &request.name)?;
        self.0.admit("CreateSnapshot", &mut request.secrets)?;
        limits::map("parameters", &request.parameters)?;
        parameters::of_snapshot(&request.parameters)?;
        // A snapshot lies where its volume does, so what is preferred is no choice.
        let given = request.accessibility_requirements.as_ref();
        let requisite = topology::of_requirement(given)?.requisite;
        let held = self.0.begin("snapshot name", &request.name).await?;
        run_to_completion("CreateSnapshot", async move {
            let _held = held;
            let source = &request.source_volume_id;
            let snapshot = backend.create_snapshot(source, &request.name, requisite).await?;
            match snapshot.phase.as_str() {
                "Ready" => {
                    let snapshot = Some(response::snapshot(&snapshot));
                    Ok(Response::new(CreateSnapshotResponse { snapshot }))
                }
                // Its id may be given up until it is cut. The next call finds it by its name.
                _ => Err(not_cut(&request.name, &snapshot.waiting_for)),
            }
        })
        .await
    }

    pub(super) async fn remove_snapshot(
        &self,
        mut request: DeleteSnapshotRequest,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        let backend = self.0.served_by_controller("DeleteSnapshot")?;
        limits::required("snapshot_id", &request.snapshot_id)?;
        self.0.admit("DeleteSnapshot", &mut request.secrets)?;
        let held = self.0.begin("snapshot", &request.snapshot_id).await?;
        run_to_completion("DeleteSnapshot", async move {
            let _held = held;
            backend.delete_snapshot(&request.snapshot_id).await?;
            Ok(Response::new(DeleteSnapshotResponse {}))
        })
        .await
    }

    pub(super) async fn snapshot_list(
        &self,
        mut request: ListSnapshotsRequest,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        let backend = self.0.served_by_controller("ListSnapshots")?;
        let max_entries = u32::try_from(request.max_entries)
            .map_err(|_| invalid("max_entries", "is negative"))?;
        limits::optional("starting_token", &request.starting_token)?;
        limits::optional("source_volume_id", &request.source_volume_id)?;
        limits::optional("snapshot_id", &request.snapshot_id)?;
        self.0.admit("ListSnapshots", &mut request.secrets)?;
        run_to_completion("ListSnapshots", async move {
            let source = &request.source_volume_id;
            if !request.snapshot_id.is_empty() {
                let found = backend.find_snapshot(&request.snapshot_id).await?;
                let is_listed = |s: &api::Snapshot| {
                    s.phase == "Ready" && (source.is_empty() || s.volume_id == *source)
                };
                let entries = found.iter().filter(|s| is_listed(s)).map(response::snapshot_entry);
                let (entries, next_token) = (entries.collect(), String::new());
                return Ok(Response::new(ListSnapshotsResponse { entries, next_token }));
            }
            // Neither is an error: such a volume has no snapshots.
            if !source.is_empty() && !is_id(source) {
                return Ok(Response::new(ListSnapshotsResponse::default()));
            }
            let (mut entries, mut token) = (Vec::new(), request.starting_token.clone());
            loop {
                let (page, next) = backend.list_snapshots(source, max_entries, &token).await?;
                entries.extend(page.iter().map(response::snapshot_entry));
                token = next;
                // All are requested without a bound, whatever the control plane's page size.
                if max_entries != 0 || token.is_empty() {
                    break;
                }
            }
            Ok(Response::new(ListSnapshotsResponse { entries, next_token: token }))
        })
        .await
    }

    pub(super) async fn one_snapshot(
        &self,
        mut request: GetSnapshotRequest,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        let backend = self.served_since("GetSnapshot", Edition::V1_12)?;
        limits::required("snapshot_id", &request.snapshot_id)?;
        self.0.admit("GetSnapshot", &mut request.secrets)?;
        run_to_completion("GetSnapshot", async move {
            let id = &request.snapshot_id;
            // Before its cut nobody was given its id.
            let found = backend.find_snapshot(id).await?.filter(|s| s.phase == "Ready");
            let found = found.ok_or_else(|| no_snapshot(id))?;
            let snapshot = Some(response::snapshot(&found));
            Ok(Response::new(GetSnapshotResponse { snapshot }))
        })
        .await
    }
}
