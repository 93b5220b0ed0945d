//! The control plane as the CSI services see it: a handful of calls on the Cluster service.

mod mirrors;

pub(crate) use mirrors::Source;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::{self as api, VolumeRef};
use quoin_identity::TermChannel;
use tonic::{Code, Request, Response, Status};

use crate::refusal::from_control;

/// Deadline of one call to the control plane. Callers' own deadlines are usually shorter; this one
/// ends calls whose caller has gone.
const DEADLINE: Duration = Duration::from_secs(60);

/// A client that all services share. The channel reconnects by itself.
#[derive(Clone)]
pub struct Backend {
    client: ClusterClient<TermChannel>,
    contact: Arc<Mutex<Contact>>,
}

/// Answers of the control plane, and failures of checks of it.
#[derive(Default)]
struct Contact {
    has_answered: bool,
    /// Since when checks of it fail. A process that asked nothing for long knows of no silence.
    fails_since: Option<Instant>,
}

impl Contact {
    fn answered(&mut self) {
        *self = Self { has_answered: true, fails_since: None };
    }

    fn failed(&mut self, now: Instant) {
        self.fails_since.get_or_insert(now);
    }

    fn silence(&self, now: Instant) -> Option<Duration> {
        let lasts = self.fails_since.map_or(Duration::ZERO, |since| now.duration_since(since));
        self.has_answered.then_some(lasts)
    }
}

impl Backend {
    /// Returns a client over a channel that may connect later.
    #[must_use]
    pub fn new(channel: impl Into<TermChannel>) -> Self {
        Self { client: ClusterClient::new(channel.into()), contact: Arc::default() }
    }

    fn request<T>(message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(DEADLINE);
        request
    }

    fn contact(&self) -> MutexGuard<'_, Contact> {
        self.contact.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time for which checks of the control plane fail; `None`: it never answered.
    pub fn silence(&self) -> Option<Duration> {
        self.contact().silence(Instant::now())
    }

    /// Notes that the control plane was reached, and returns its answer in the interface's codes.
    fn answered<T>(&self, answer: Result<Response<T>, Status>) -> Result<T, Status> {
        let answer = answer.map_err(|status| from_control(&status))?;
        self.contact().answered();
        Ok(answer.into_inner())
    }

    /// Checks that the control plane answers.
    pub async fn ping(&self) -> Result<(), Status> {
        let asked = Instant::now();
        let answer = self.answered(self.ask().await).map(drop);
        if answer.is_err() {
            self.contact().failed(asked);
        }
        answer
    }

    /// Asks the controller for nothing in particular; a refusal is as it came.
    pub async fn ask(&self) -> Result<Response<api::ClusterInfo>, Status> {
        let mut request = Request::new(api::GetClusterInfoRequest {});
        request.set_timeout(Duration::from_secs(5));
        self.client.clone().get_cluster_info(request).await
    }

    pub async fn create_volume(
        &self,
        wanted: api::CreateVolumeRequest,
    ) -> Result<api::Volume, Status> {
        let answer = self.client.clone().create_volume(Self::request(wanted)).await;
        self.answered(answer)
    }

    /// Returns the volume, or `None` if it does not exist (or is being deleted). An id of unknown
    /// form is an unknown id.
    pub async fn find_volume(&self, id: &str) -> Result<Option<api::Volume>, Status> {
        if !is_id(id) {
            return Ok(None);
        }
        let found = self.recorded_volume(by_id(id)).await?;
        Ok(found.filter(|one| !matches!(one.phase.as_str(), "Deleting" | "Retained")))
    }

    /// Returns the volume if it has a record, whether or not it is deleted: its snapshots may stay.
    async fn recorded_volume(
        &self,
        volume: Option<VolumeRef>,
    ) -> Result<Option<api::Volume>, Status> {
        let wanted = api::GetVolumeRequest { volume };
        match self.client.clone().get_volume(Self::request(wanted)).await {
            Ok(answer) => self.answered(Ok(answer)).map(Some),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(from_control(&status)),
        }
    }

    /// Returns the volume whose data key a new volume of this name and source is to have; `None`: it gets a
    /// data key of its own, or a volume of the name exists, or nothing can be made of the source.
    pub async fn key_source(
        &self,
        name: &str,
        source: Option<&api::VolumeSource>,
    ) -> Result<Option<api::Volume>, Status> {
        let Some(source) = source else { return Ok(None) };
        let named = Some(VolumeRef { name: name.to_owned(), ..VolumeRef::default() });
        if self.recorded_volume(named).await?.is_some() {
            return Ok(None);
        }
        let volume = match &source.snapshot {
            Some(snapshot) => self.find_snapshot(&snapshot.id).await?.map(|s| s.volume_id),
            None => source.volume.as_ref().map(|volume| volume.id.clone()),
        };
        let Some(volume) = volume else { return Ok(None) };
        let found = self.recorded_volume(by_id(&volume)).await?;
        Ok(found.filter(|one| one.spec.as_ref().is_some_and(|spec| spec.encryption.is_some())))
    }

    /// Returns what a volume waits for, or what is wrong with it, in words.
    pub async fn waits(&self, volume: VolumeRef) -> Option<String> {
        let wanted = api::GetVolumeRequest { volume: Some(volume) };
        let answer = self.client.clone().get_volume(Self::request(wanted)).await;
        let volume = answer.ok()?.into_inner();
        if !volume.waiting_for.is_empty() {
            return Some(volume.waiting_for);
        }
        volume.conditions.into_iter().next().map(|worst| worst.message)
    }

    /// Returns the volume, or 5 NOT_FOUND.
    pub async fn volume(&self, id: &str) -> Result<api::Volume, Status> {
        self.find_volume(id).await?.ok_or_else(|| crate::refusal::no_volume(id))
    }

    /// Deletes a volume; an unknown one counts as deleted.
    pub async fn delete_volume(&self, id: &str) -> Result<(), Status> {
        if !is_id(id) {
            return Ok(());
        }
        let wanted = api::DeleteVolumeRequest { volume: by_id(id) };
        match self.client.clone().delete_volume(Self::request(wanted)).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(from_control(&status)),
        }
    }

    /// Returns one page of volumes and the token of the next, empty at the end.
    pub async fn list_volumes(
        &self,
        max_entries: u32,
        starting_token: &str,
    ) -> Result<(Vec<api::Volume>, String), Status> {
        self.list(max_entries, starting_token, false).await
    }

    /// As [`Self::list_volumes`], of those with a condition and those that cannot be judged.
    pub async fn list_ill_volumes(
        &self,
        max_entries: u32,
        starting_token: &str,
    ) -> Result<(Vec<api::Volume>, String), Status> {
        self.list(max_entries, starting_token, true).await
    }

    async fn list(
        &self,
        max_entries: u32,
        starting_token: &str,
        ill_only: bool,
    ) -> Result<(Vec<api::Volume>, String), Status> {
        let starting_token = starting_token.to_owned();
        let is_first = starting_token.is_empty();
        let wanted =
            api::ListVolumesRequest { max_entries, starting_token, ill_only, ..Default::default() };
        let answer = self.client.clone().list_volumes(Self::request(wanted)).await;
        let page = answer
            .map_err(|status| match status.code() {
                // Only the token can be wrong here, whatever code the control plane chose.
                Code::InvalidArgument | Code::NotFound | Code::OutOfRange if !is_first => {
                    crate::refusal::bad_token()
                }
                _ => from_control(&status),
            })?
            .into_inner();
        Ok((page.volumes, page.next_token))
    }

    /// Makes a snapshot of a volume, or finds the one of this name and volume.
    pub async fn create_snapshot(
        &self,
        volume_id: &str,
        name: &str,
        accessible_topology: Vec<api::Topology>,
    ) -> Result<api::Snapshot, Status> {
        if !is_id(volume_id) {
            return Err(crate::refusal::no_volume(volume_id));
        }
        let wanted = api::CreateSnapshotRequest {
            volume: by_id(volume_id),
            name: name.to_owned(),
            accessible_topology,
        };
        let answer = self.client.clone().create_snapshot(Self::request(wanted)).await;
        self.answered(answer)
    }

    /// Deletes a snapshot; an unknown one counts as deleted.
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), Status> {
        if !is_id(id) {
            return Ok(());
        }
        let wanted = api::DeleteSnapshotRequest { snapshot: snapshot_by_id(id) };
        match self.client.clone().delete_snapshot(Self::request(wanted)).await {
            Ok(_) => Ok(()),
            Err(status) => Err(from_control(&status)),
        }
    }

    /// Returns the snapshot, or `None` if it does not exist.
    pub async fn find_snapshot(&self, id: &str) -> Result<Option<api::Snapshot>, Status> {
        if !is_id(id) {
            return Ok(None);
        }
        let wanted = api::GetSnapshotRequest { snapshot: snapshot_by_id(id) };
        match self.client.clone().get_snapshot(Self::request(wanted)).await {
            Ok(answer) => Ok(Some(answer.into_inner())),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(from_control(&status)),
        }
    }

    /// Returns the part of a snapshot's allocated ranges that begins at `offset`, or of those that
    /// changed since another snapshot; without data.
    pub async fn pull_snapshot(
        &self,
        id: &str,
        since: Option<&str>,
        offset: u64,
    ) -> Result<api::SnapshotPart, Status> {
        let wanted = api::PullSnapshotRequest {
            snapshot: snapshot_by_id(id),
            since: since.and_then(snapshot_by_id),
            offset,
            want_data: false,
        };
        match self.client.clone().pull_snapshot(Self::request(wanted)).await {
            Ok(part) => Ok(part.into_inner()),
            Err(status) => Err(from_control(&status)),
        }
    }

    /// Returns one page of snapshots that are cut, and the token of the next. An empty `volume_id`
    /// stands for all volumes.
    pub async fn list_snapshots(
        &self,
        volume_id: &str,
        max_entries: u32,
        starting_token: &str,
    ) -> Result<(Vec<api::Snapshot>, String), Status> {
        let is_first = starting_token.is_empty();
        let wanted = api::ListSnapshotsRequest {
            volume: by_id(volume_id).filter(|_| !volume_id.is_empty()),
            max_entries,
            starting_token: starting_token.to_owned(),
            cut_only: true,
        };
        let answer = self.client.clone().list_snapshots(Self::request(wanted)).await;
        let page = answer
            .map_err(|status| match status.code() {
                Code::InvalidArgument | Code::NotFound | Code::OutOfRange if !is_first => {
                    crate::refusal::bad_token()
                }
                _ => from_control(&status),
            })?
            .into_inner();
        Ok((page.snapshots, page.next_token))
    }

    /// Makes snapshots of these volumes at one point, or finds the group of this name and volumes.
    pub async fn create_group_snapshot(
        &self,
        name: &str,
        volume_ids: &[String],
    ) -> Result<api::GroupSnapshot, Status> {
        if let Some(unknown) = volume_ids.iter().find(|id| !is_id(id)) {
            return Err(crate::refusal::no_volume(unknown));
        }
        let volumes = volume_ids.iter().filter_map(|id| by_id(id)).collect();
        let wanted = api::CreateGroupSnapshotRequest { name: name.to_owned(), volumes };
        let answer = self.client.clone().create_group_snapshot(Self::request(wanted)).await;
        Ok(answer.map_err(|status| from_control(&status))?.into_inner())
    }

    /// Deletes a group snapshot with its members; an unknown one counts as deleted.
    pub async fn delete_group_snapshot(&self, id: &str) -> Result<(), Status> {
        let wanted = api::DeleteGroupSnapshotRequest { group: group_by_id(id) };
        match self.client.clone().delete_group_snapshot(Self::request(wanted)).await {
            Ok(_) => Ok(()),
            Err(status) => Err(from_control(&status)),
        }
    }

    /// Returns the group snapshot, or `None` if it does not exist.
    pub async fn find_group_snapshot(
        &self,
        id: &str,
    ) -> Result<Option<api::GroupSnapshot>, Status> {
        if !is_id(id) {
            return Ok(None);
        }
        let wanted = api::GetGroupSnapshotRequest { group: group_by_id(id) };
        match self.client.clone().get_group_snapshot(Self::request(wanted)).await {
            Ok(answer) => Ok(Some(answer.into_inner())),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(from_control(&status)),
        }
    }

    pub async fn publish_volume(
        &self,
        wanted: api::PublishVolumeRequest,
    ) -> Result<api::Attachment, Status> {
        let answer = self.client.clone().publish_volume(Self::request(wanted)).await;
        self.answered(answer)
    }

    /// Ends a node's leave to write to a volume that it has read-only: the journal of the file
    /// system is replayed.
    pub async fn confirm_replay(&self, id: &str, node: &str) -> Result<(), Status> {
        let wanted = api::ConfirmReplayRequest { volume: by_id(id), node: node.to_owned() };
        let answer = self.client.clone().confirm_replay(Self::request(wanted)).await;
        self.answered(answer).map(drop)
    }

    /// Unpublishes a volume from a node, or from all. An unknown volume has no attachments: they
    /// are stored with their volume.
    pub async fn unpublish_volume(&self, id: &str, node: &str) -> Result<(), Status> {
        if !is_id(id) {
            return Ok(());
        }
        let wanted = api::UnpublishVolumeRequest {
            volume: by_id(id),
            node: node.to_owned(),
            // The caller has unstaged the volume there, or considers the node gone.
            ..Default::default()
        };
        match self.client.clone().unpublish_volume(Self::request(wanted)).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(from_control(&status)),
        }
    }

    pub async fn resize_volume(
        &self,
        id: &str,
        size_bytes: u64,
        limit_bytes: u64,
    ) -> Result<api::Volume, Status> {
        let wanted = api::ResizeVolumeRequest { volume: by_id(id), size_bytes, limit_bytes };
        let answer = self.client.clone().resize_volume(Self::request(wanted)).await;
        self.answered(answer)
    }

    /// Changes options of a volume, and how many replicas it is to have.
    pub async fn modify_volume(
        &self,
        id: &str,
        spec: api::VolumeSpec,
        dry_run: bool,
    ) -> Result<api::ModifyVolumeResponse, Status> {
        if !is_id(id) {
            return Err(crate::refusal::no_volume(id));
        }
        let wanted = api::ModifyVolumeRequest { volume: by_id(id), spec: Some(spec), dry_run };
        let answer = self.client.clone().modify_volume(Self::request(wanted)).await;
        self.answered(answer)
    }

    /// Replaces the key slots of a volume as it was read.
    pub async fn set_key_slots(
        &self,
        volume: &api::Volume,
        slots: api::Encryption,
    ) -> Result<(), Status> {
        let wanted = api::SetKeySlotsRequest {
            volume: by_id(&volume.id),
            encryption: Some(slots),
            resource_version: volume.resource_version,
        };
        let answer = self.client.clone().set_key_slots(Self::request(wanted)).await;
        self.answered(answer).map(drop)
    }

    /// Has the space that is dead in a volume's replicas given back, and waits for so long at most.
    pub async fn reclaim_volume(
        &self,
        id: &str,
        wait: Duration,
    ) -> Result<api::ReclaimVolumeResponse, Status> {
        let wait_ms = wait.as_millis().try_into().unwrap_or(u32::MAX);
        let wanted = api::ReclaimVolumeRequest { volume: by_id(id), wait_ms };
        let answer = self.client.clone().reclaim_volume(Self::request(wanted)).await;
        self.answered(answer)
    }

    /// Fences blocks of addresses; 14 while that does not hold yet.
    pub async fn add_fences(&self, blocks: Vec<String>) -> Result<(), Status> {
        let wanted = Self::request(api::AddFencesRequest { blocks });
        let answer = self.client.clone().add_fences(wanted).await;
        self.answered(answer).map(drop)
    }

    pub async fn remove_fences(&self, blocks: Vec<String>) -> Result<(), Status> {
        let wanted = Self::request(api::RemoveFencesRequest { blocks });
        let answer = self.client.clone().remove_fences(wanted).await;
        self.answered(answer).map(drop)
    }

    pub async fn fences(&self) -> Result<Vec<api::Fence>, Status> {
        let wanted = Self::request(api::ListFencesRequest {});
        let answer = self.client.clone().list_fences(wanted).await;
        Ok(self.answered(answer)?.fences)
    }

    pub async fn nodes(&self) -> Result<Vec<api::Node>, Status> {
        let answer = self.client.clone().list_nodes(Self::request(api::ListNodesRequest {})).await;
        Ok(self.answered(answer)?.nodes)
    }

    /// Returns the addresses of all pools.
    pub async fn pool_addresses(&self) -> Result<Vec<String>, Status> {
        let answer = self.client.clone().list_pools(Self::request(api::ListPoolsRequest {})).await;
        let pools = self.answered(answer)?.pools;
        Ok(pools.into_iter().map(|pool| pool.address).collect())
    }

    pub async fn capacity(
        &self,
        spec: api::VolumeSpec,
    ) -> Result<api::GetCapacityResponse, Status> {
        let wanted = api::GetCapacityRequest { spec: Some(spec) };
        let answer = self.client.clone().get_capacity(Self::request(wanted)).await;
        self.answered(answer)
    }
}

/// Returns a volume reference of the control API by id.
pub fn by_id(id: &str) -> Option<VolumeRef> {
    Some(VolumeRef { id: id.to_owned(), name: String::new() })
}

fn group_by_id(id: &str) -> Option<api::GroupSnapshotRef> {
    Some(api::GroupSnapshotRef { id: id.to_owned(), name: String::new() })
}

fn snapshot_by_id(id: &str) -> Option<api::SnapshotRef> {
    Some(api::SnapshotRef { id: id.to_owned(), name: String::new() })
}

/// Returns whether the text is 32 lower-case hex digits, the form of all issued ids.
pub fn is_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_from_the_first_check_that_failed_since_the_last_answer() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut contact = Contact::default();
        contact.failed(at(0));
        assert_eq!(contact.silence(at(60)), None, "it never answered");
        contact.answered();
        // Nobody asked for an hour.
        assert_eq!(contact.silence(at(3600)), Some(Duration::ZERO));
        contact.failed(at(3600));
        contact.failed(at(3610));
        assert_eq!(contact.silence(at(3630)), Some(Duration::from_secs(30)));
        contact.answered();
        assert_eq!(contact.silence(at(3640)), Some(Duration::ZERO));
    }
}
