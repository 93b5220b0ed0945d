//! The Replication service: a volume or a group of them is mirrored to a second cluster, and changes sides.
//!
//! The controller has the roles and all decisions (docs/mirror.md). Here a source becomes a mirror's name,
//! a class its settings, and an answer its code. Each call is bounded; one that goes on answers 14.

mod class;
mod source;

pub(in crate::addons) use class::of_group as class_of_group;

use quoin_api::control as api;
use quoin_api::control::call_mirror_request::Call;
use quoin_api::csi_addons::identity::capability::volume_replication::Type as Can;
use quoin_api::csi_addons::identity::capability::{Type as Capability, VolumeReplication};
use quoin_api::csi_addons::replication::controller_server::Controller;
use quoin_api::csi_addons::replication::get_volume_replication_info_response::Status as State;
use quoin_api::csi_addons::replication::replication_destination::{
    Type as Kind, VolumeDestination, VolumeGroupDestination,
};
use quoin_api::csi_addons::replication::*;
use tonic::{Code, Request, Response, Status};

use crate::backend::{Backend, Source};
use crate::in_flight::Guard;
use crate::plugin::REPLICATION_OF_VOLUME;
use crate::refusal;
use crate::{Plugin, addons};

/// Serves Replication in the modes that have the controller.
pub(crate) struct ReplicationService(pub Plugin);

/// Returns what is told of the service.
pub(super) fn capabilities() -> [Capability; 2] {
    [Can::VolumeReplication, Can::GetReplicationDestinationInfo]
        .map(|can| Capability::VolumeReplication(VolumeReplication { r#type: can.into() }))
}

/// Head of a call, which is alike in all: the mode is checked, then the source is read, then the caller is admitted.
struct Asked<M> {
    rpc: &'static str,
    backend: Backend,
    source: Source,
    request: M,
}

/// Makes an [`Asked`] of a request. Its fields have the same names in each message of the interface.
macro_rules! asked {
    ($service:ident, $rpc:literal, $request:ident) => {{
        let backend = $service.0.served_by_controller($rpc)?;
        let mut request = $request.into_inner();
        let given = request.replication_source.as_ref();
        let source = source::read(&request.volume_id, given, &request.replication_id)?;
        $service.0.admit($rpc, &mut request.secrets)?;
        Asked { rpc: $rpc, backend, source, request }
    }};
}

impl ReplicationService {
    /// Carries out a call that changes something: one at a time of a source, and to its end.
    async fn change<M, T, F>(
        &self,
        asked: Asked<M>,
        work: impl FnOnce(Backend, Source, M) -> F,
    ) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Status>> + Send + 'static,
    {
        let Asked { rpc, backend, source, request } = asked;
        let held = self.begin(&source).await?;
        let work = work(backend, source, request);
        addons::run(rpc, async move {
            let _held = held;
            work.await.map(Response::new)
        })
        .await
    }

    /// Takes the source for a call that changes something.
    async fn begin(&self, source: &Source) -> Result<Guard, Status> {
        let what = match source {
            Source::Volume(_) => REPLICATION_OF_VOLUME,
            Source::Group(_) => "replication of group",
        };
        self.0.begin(what, source.id()).await
    }
}

/// Returns the role of this side; empty: it is not mirrored.
///
/// # Errors
/// 5 for an unknown source, 9 for a volume that is mirrored with its group.
async fn role(backend: &Backend, source: &Source) -> Result<String, Status> {
    match source {
        Source::Volume(id) => {
            let Some(mirror) = backend.volume(id).await?.mirror else { return Ok(String::new()) };
            if mirror.group_id != *id {
                return Err(refusal::replicated_with_group(id, &mirror.group_id));
            }
            // Records of the mirror are lost, or a copy is being made: its controller says which.
            Ok(if mirror.role.is_empty() { "unknown".to_owned() } else { mirror.role })
        }
        Source::Group(id) => Ok(backend.volume_group(id).await?.role),
    }
}

/// Returns the role of a side that is mirrored.
///
/// # Errors
/// As [`role`]; 9 where it is not.
async fn mirrored(backend: &Backend, source: &Source) -> Result<String, Status> {
    match role(backend, source).await? {
        role if is_off(&role) => Err(refusal::not_replicated(source.id())),
        role => Ok(role),
    }
}

fn is_off(role: &str) -> bool {
    matches!(role, "" | "off")
}

/// Ends the replication; a source that has none is at its end.
async fn disable(backend: &Backend, source: &Source) -> Result<(), Status> {
    if is_off(&role(backend, source).await?) {
        return Ok(());
    }
    match backend.call_mirror(source, Call::Disable, false).await {
        Ok(_) => Ok(()),
        // The mirror may have ended meanwhile.
        Err(why) if why.code() == Code::FailedPrecondition => match role(backend, source).await? {
            role if is_off(&role) => Ok(()),
            _ => Err(why),
        },
        Err(why) => Err(why),
    }
}

async fn call(backend: &Backend, source: &Source, call: Call, force: bool) -> Result<bool, Status> {
    mirrored(backend, source).await?;
    backend.call_mirror(source, call, force).await
}

/// Returns the answer of a primary.
///
/// # Errors
/// 5 where the other side has nothing yet.
fn info(source: &Source, mirror: api::Mirror) -> Result<GetVolumeReplicationInfoResponse, Status> {
    let status = match mirror.health.as_str() {
        "healthy" => State::Healthy,
        "error" => State::Error,
        _ => State::Degraded,
    };
    let Some(synced) = mirror.synced_at else {
        return Err(refusal::nothing_synced(source.id(), &mirror.message));
    };
    Ok(GetVolumeReplicationInfoResponse {
        last_sync_time: Some(synced),
        last_sync_duration: None,
        last_sync_bytes: 0,
        status: status.into(),
        status_message: mirror.message,
    })
}

/// Returns the ids of the other side: they are those of this one, once that side has the copies.
///
/// # Errors
/// 14 as long as one of them is not known to be there.
async fn destination(backend: &Backend, source: &Source) -> Result<ReplicationDestination, Status> {
    mirrored(backend, source).await?;
    let mirror = backend.mirror(source).await?;
    let check = |id: &str| {
        let member = mirror.members.iter().find(|member| member.volume_id == id);
        match member.is_some_and(|member| member.confirmed) {
            true => Ok(()),
            false => Err(refusal::no_destination_yet(id)),
        }
    };
    let kind = match source {
        Source::Volume(id) => {
            check(id)?;
            Kind::Volume(VolumeDestination { volume_id: id.clone() })
        }
        Source::Group(id) => {
            let group = backend.volume_group(id).await?;
            group.volumes.iter().try_for_each(|volume| check(&volume.id))?;
            let same = |volume: api::VolumeRef| (volume.id.clone(), volume.id);
            let volume_ids = group.volumes.into_iter().map(same).collect();
            Kind::Volumegroup(VolumeGroupDestination { volume_group_id: id.clone(), volume_ids })
        }
    };
    Ok(ReplicationDestination { r#type: Some(kind) })
}

#[tonic::async_trait]
impl Controller for ReplicationService {
    async fn enable_volume_replication(
        &self,
        request: Request<EnableVolumeReplicationRequest>,
    ) -> Result<Response<EnableVolumeReplicationResponse>, Status> {
        let asked = asked!(self, "EnableVolumeReplication", request);
        let settings = class::read(&asked.request.parameters)?;
        self.change(asked, |backend, source, _| async move {
            role(&backend, &source).await?;
            let enabled = backend.enable_mirror(&source, settings).await;
            enabled.map_err(refusal::not_enabled)?;
            Ok(EnableVolumeReplicationResponse {})
        })
        .await
    }

    async fn disable_volume_replication(
        &self,
        request: Request<DisableVolumeReplicationRequest>,
    ) -> Result<Response<DisableVolumeReplicationResponse>, Status> {
        let asked = asked!(self, "DisableVolumeReplication", request);
        class::read(&asked.request.parameters)?;
        self.change(asked, |backend, source, _| async move {
            disable(&backend, &source).await?;
            Ok(DisableVolumeReplicationResponse {})
        })
        .await
    }

    async fn promote_volume(
        &self,
        request: Request<PromoteVolumeRequest>,
    ) -> Result<Response<PromoteVolumeResponse>, Status> {
        let asked = asked!(self, "PromoteVolume", request);
        class::read(&asked.request.parameters)?;
        self.change(asked, |backend, source, request| async move {
            call(&backend, &source, Call::Promote, request.force).await?;
            Ok(PromoteVolumeResponse {})
        })
        .await
    }

    async fn demote_volume(
        &self,
        request: Request<DemoteVolumeRequest>,
    ) -> Result<Response<DemoteVolumeResponse>, Status> {
        let asked = asked!(self, "DemoteVolume", request);
        class::read(&asked.request.parameters)?;
        self.change(asked, |backend, source, request| async move {
            call(&backend, &source, Call::Demote, request.force).await?;
            Ok(DemoteVolumeResponse {})
        })
        .await
    }

    async fn resync_volume(
        &self,
        request: Request<ResyncVolumeRequest>,
    ) -> Result<Response<ResyncVolumeResponse>, Status> {
        let asked = asked!(self, "ResyncVolume", request);
        class::read(&asked.request.parameters)?;
        self.change(asked, |backend, source, request| async move {
            let ready = call(&backend, &source, Call::Resync, request.force).await?;
            Ok(ResyncVolumeResponse { ready })
        })
        .await
    }

    async fn get_volume_replication_info(
        &self,
        request: Request<GetVolumeReplicationInfoRequest>,
    ) -> Result<Response<GetVolumeReplicationInfoResponse>, Status> {
        let Asked { rpc, backend, source, .. } = asked!(self, "GetVolumeReplicationInfo", request);
        addons::run(rpc, async move {
            match mirrored(&backend, &source).await?.as_str() {
                "primary" => {}
                role => return Err(refusal::not_primary(source.id(), role)),
            }
            let mirror = backend.mirror(&source).await?;
            Ok(Response::new(info(&source, mirror)?))
        })
        .await
    }

    async fn get_replication_destination_info(
        &self,
        request: Request<GetReplicationDestinationInfoRequest>,
    ) -> Result<Response<GetReplicationDestinationInfoResponse>, Status> {
        const RPC: &str = "GetReplicationDestinationInfo";
        let backend = self.0.served_by_controller(RPC)?;
        let mut request = request.into_inner();
        let source = source::of_source(request.replication_source.as_ref())?;
        self.0.admit(RPC, &mut request.secrets)?;
        addons::run(RPC, async move {
            let replication_destination = Some(destination(&backend, &source).await?);
            Ok(Response::new(GetReplicationDestinationInfoResponse { replication_destination }))
        })
        .await
    }
}
