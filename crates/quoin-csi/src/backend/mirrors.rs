//! Calls for mirrors and for groups of volumes.

use std::time::Duration;

use quoin_api::control::call_mirror_request::Call;
use quoin_api::control::{self as api, MirrorRef, VolumeGroupRef};
use tonic::{Code, Request, Status};

use super::{Backend, by_id, is_id};
use crate::refusal::{self, from_control};

/// The controller answers such a call within 30 s, whatever the peer does.
const DEADLINE: Duration = Duration::from_secs(35);

/// Object of a replication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    Volume(String),
    Group(String),
}

impl Source {
    pub fn id(&self) -> &str {
        match self {
            Self::Volume(id) | Self::Group(id) => id,
        }
    }

    fn reference(&self) -> Option<MirrorRef> {
        Some(match self {
            Self::Volume(id) => MirrorRef { volume: by_id(id), ..Default::default() },
            Self::Group(id) => MirrorRef { group: group_ref(id), ..Default::default() },
        })
    }
}

fn group_ref(id: &str) -> Option<VolumeGroupRef> {
    Some(VolumeGroupRef { id: id.to_owned(), name: String::new() })
}

fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

impl Backend {
    /// Begins a mirror, or finds the one that is there with the same settings.
    pub(crate) async fn enable_mirror(
        &self,
        source: &Source,
        settings: api::EnableMirrorRequest,
    ) -> Result<(), Status> {
        let wanted = api::EnableMirrorRequest { of: source.reference(), ..settings };
        let answer = self.client.clone().enable_mirror(request(wanted)).await;
        self.answered(answer).map(drop)
    }

    pub(crate) async fn mirror(&self, source: &Source) -> Result<api::Mirror, Status> {
        let wanted = api::GetMirrorRequest { of: source.reference() };
        let answer = self.client.clone().get_mirror(request(wanted)).await;
        self.answered(answer)
    }

    /// Changes the role of this side, or ends the mirror. Returns whether a copy is ready.
    pub(crate) async fn call_mirror(
        &self,
        source: &Source,
        call: Call,
        force: bool,
    ) -> Result<bool, Status> {
        let wanted = api::CallMirrorRequest {
            of: source.reference(),
            call: call.into(),
            force,
            ..Default::default()
        };
        let answer = self.client.clone().call_mirror(request(wanted)).await;
        Ok(self.answered(answer)?.ready)
    }

    /// Returns the group, or 5 NOT_FOUND. An id of unknown form is an unknown id.
    pub(crate) async fn volume_group(&self, id: &str) -> Result<api::VolumeGroup, Status> {
        if !is_id(id) {
            return Err(refusal::no_group(id));
        }
        let wanted = api::GetVolumeGroupRequest { group: group_ref(id) };
        match self.client.clone().get_volume_group(request(wanted)).await {
            Err(status) if status.code() == Code::NotFound => Err(refusal::no_group(id)),
            answer => self.answered(answer),
        }
    }

    /// Makes a group, or finds the one that has this name here, or the mirrored one of these volumes.
    pub(crate) async fn create_volume_group(
        &self,
        (name, name_prefix): (&str, &str),
        volume_ids: &[String],
    ) -> Result<api::VolumeGroup, Status> {
        let wanted = api::CreateVolumeGroupRequest {
            name: name.to_owned(),
            name_prefix: name_prefix.to_owned(),
            claims: true,
            volumes: volume_ids.iter().filter_map(|id| by_id(id)).collect(),
        };
        let answer = self.client.clone().create_volume_group(request(wanted)).await;
        self.answered(answer)
    }

    /// Gives a group these members and no others.
    pub(crate) async fn modify_volume_group(
        &self,
        id: &str,
        volume_ids: &[String],
    ) -> Result<api::VolumeGroup, Status> {
        let volumes = volume_ids.iter().filter_map(|id| by_id(id)).collect();
        let wanted = api::ModifyVolumeGroupRequest { group: group_ref(id), volumes };
        let answer = self.client.clone().modify_volume_group(request(wanted)).await;
        self.answered(answer)
    }

    /// Deletes a group without members; an unknown one counts as deleted.
    pub(crate) async fn delete_volume_group(&self, id: &str) -> Result<(), Status> {
        if !is_id(id) {
            return Ok(());
        }
        let wanted = api::DeleteVolumeGroupRequest { group: group_ref(id), only_empty: true };
        let answer = self.client.clone().delete_volume_group(request(wanted)).await;
        self.answered(answer).map(drop)
    }

    /// Returns one page of groups, and the token of the next.
    pub(crate) async fn volume_groups(
        &self,
        max_entries: u32,
        starting_token: &str,
    ) -> Result<(Vec<api::VolumeGroup>, String), Status> {
        let is_first = starting_token.is_empty();
        let wanted = api::ListVolumeGroupsRequest {
            max_entries,
            starting_token: starting_token.to_owned(),
            by_id: true,
        };
        let answer = self.client.clone().list_volume_groups(request(wanted)).await;
        let page = answer
            .map_err(|status| match status.code() {
                Code::Aborted if !is_first => refusal::bad_token(),
                _ => from_control(&status),
            })?
            .into_inner();
        Ok((page.groups, page.next_token))
    }
}
