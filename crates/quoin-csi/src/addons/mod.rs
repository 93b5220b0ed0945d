//! CSI-Addons: the services beside CSI that sidecars call on a socket of their own.
//!
//! [`services`] is the one place where each is registered, with the capabilities that its process
//! tells of it. A service is registered in every mode and answers 12 in one that it is not of, before any
//! argument is read. All else is as on the socket of CSI: callers, secrets, limits, one call a
//! volume at a time, deadlines. One rule differs: a failure that no table has is 2, not 13 ([`run`]).

mod fence;
mod healer;
mod identity;
mod reclaim;
mod reclaim_node;
mod replication;
mod rotation;
mod volume_group;

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use quoin_api::control as api;
use quoin_api::csi_addons;
use quoin_api::csi_addons::encryptionkeyrotation::encryption_key_rotation_controller_server::EncryptionKeyRotationControllerServer;
use quoin_api::csi_addons::fence::fence_controller_server::FenceControllerServer;
use quoin_api::csi_addons::healer::healer_node_server::HealerNodeServer;
use quoin_api::csi_addons::identity::capability::{
    EncryptionKeyRotation, NetworkFence, ReclaimSpace, Service as ServiceOf, Type,
    encryption_key_rotation, network_fence, reclaim_space, service,
};
use quoin_api::csi_addons::identity::identity_server::IdentityServer;
use quoin_api::csi_addons::reclaimspace::reclaim_space_controller_server::ReclaimSpaceControllerServer;
use quoin_api::csi_addons::reclaimspace::reclaim_space_node_server::ReclaimSpaceNodeServer;
use quoin_api::csi_addons::replication::controller_server::ControllerServer as ReplicationServer;
use quoin_api::csi_addons::volumegroup::controller_server::ControllerServer as VolumeGroupServer;
use quoin_node::NodeHost;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Code, Status};
use tower::Service;

use fence::FenceService;
pub(crate) use healer::HealerService;
use identity::IdentityService;
use reclaim::ReclaimService;
use reclaim_node::ReclaimNodeService;
use replication::ReplicationService;
use rotation::RotationService;
use volume_group::VolumeGroupService;

use crate::backend::Backend;
use crate::in_flight::run_to_completion;
use crate::plugin::Mode;
use crate::{Plugin, refusal};

/// Longest wait of a node's call for the controller's word of a volume: a heal ends within 45 s, and 30 are its own.
const CONTROLLER_MAX: Duration = Duration::from_secs(5);

/// Side of a driver that a service belongs to.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Controller,
    Node,
}

impl Side {
    fn is_of(self, mode: Mode) -> bool {
        match self {
            Self::Controller => mode.controller,
            Self::Node => mode.node,
        }
    }
}

/// Returns all services of the socket.
pub(crate) fn services(plugin: &Plugin) -> Services {
    let own = || plugin.clone();
    let fence =
        |kind: network_fence::Type| Type::NetworkFence(NetworkFence { r#type: kind.into() });
    let fences = fence(network_fence::Type::NetworkFence);
    let fenced_clients = fence(network_fence::Type::GetClientsToFence);
    let reclaims = Type::ReclaimSpace(ReclaimSpace { r#type: reclaim_space::Type::Offline.into() });
    let rotates = Type::EncryptionKeyRotation(EncryptionKeyRotation {
        r#type: encryption_key_rotation::Type::Encryptionkeyrotation.into(),
    });
    Services::of(plugin)
        // No capability stands for the healer.
        .serve(HealerNodeServer::new(HealerService(own())), Side::Node, &[])
        .serve(
            ReclaimSpaceNodeServer::new(ReclaimNodeService(own())),
            Side::Node,
            &[Type::ReclaimSpace(ReclaimSpace { r#type: reclaim_space::Type::Online.into() })],
        )
        .serve(
            ReplicationServer::new(ReplicationService(own())),
            Side::Controller,
            &replication::capabilities(),
        )
        .serve(
            VolumeGroupServer::new(VolumeGroupService(own())),
            Side::Controller,
            &volume_group::capabilities(),
        )
        .serve(FenceControllerServer::new(FenceService(own())), Side::Controller, &[fences])
        .tell(Side::Node, fenced_clients)
        .serve(
            ReclaimSpaceControllerServer::new(ReclaimService(own())),
            Side::Controller,
            &[reclaims],
        )
        .serve(
            EncryptionKeyRotationControllerServer::new(RotationService(own())),
            Side::Node,
            &[rotates],
        )
}

/// The services of one process, and what it tells of them.
pub(crate) struct Services {
    plugin: Plugin,
    routes: Routes,
    capabilities: Vec<Type>,
}

impl Services {
    fn of(plugin: &Plugin) -> Self {
        let kinds = [
            (Side::Controller, service::Type::ControllerService),
            (Side::Node, service::Type::NodeService),
        ];
        let of_mode = kinds.into_iter().filter(|(side, _)| side.is_of(plugin.mode()));
        let told = of_mode.map(|(_, kind)| Type::Service(ServiceOf { r#type: kind.into() }));
        Self { plugin: plugin.clone(), capabilities: told.collect(), routes: Routes::default() }
    }

    /// Adds a service, and its capabilities where the process has its side.
    fn serve<S>(mut self, service: S, side: Side, capabilities: &[Type]) -> Self
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        self.routes = self.routes.add_service(service);
        if side.is_of(self.plugin.mode()) {
            self.capabilities.extend_from_slice(capabilities);
        }
        self
    }

    /// Tells of a capability of a service that has calls of both sides.
    fn tell(mut self, side: Side, capability: Type) -> Self {
        if side.is_of(self.plugin.mode()) {
            self.capabilities.push(capability);
        }
        self
    }

    /// Adds the Identity service, which tells of all others.
    pub fn into_routes(self) -> Routes {
        let Self { plugin, routes, capabilities } = self;
        routes.add_service(IdentityServer::new(IdentityService { plugin, capabilities }))
    }
}

/// Returns whether the path of a call is one of CSI-Addons.
pub(crate) fn has(path: &str) -> bool {
    let package = path.strip_prefix('/').and_then(|path| path.split_once('.'));
    package.is_some_and(|(package, _)| csi_addons::PACKAGES.contains(&package))
}

/// Returns a volume that the controller knows; `None`: it does not answer, and this host has a record of the volume.
///
/// # Errors
/// 5 for a volume that does not exist, 14 where that cannot be told.
async fn known(
    backend: &Backend,
    host: &NodeHost,
    volume_id: &str,
) -> Result<Option<api::Volume>, Status> {
    let asked = tokio::time::timeout(CONTROLLER_MAX, backend.find_volume(volume_id)).await;
    match asked.unwrap_or_else(|_| Err(refusal::no_answer_in_time(CONTROLLER_MAX))) {
        Ok(Some(volume)) => Ok(Some(volume)),
        Ok(None) => Err(refusal::no_volume(volume_id)),
        Err(away) if matches!(away.code(), Code::Unavailable | Code::DeadlineExceeded) => {
            match host.has_record(volume_id).map_err(|error| refusal::from_node(&error))? {
                true => Ok(None),
                false => Err(refusal::not_known(volume_id, away.message())),
            }
        }
        Err(status) => Err(status),
    }
}

/// Runs a call to its end, as [`run_to_completion`] does. A failure that fits no row of the
/// interface's tables is 2.
///
/// # Errors
/// The call's own; 2 if it panicked.
pub(crate) async fn run<T: Send + 'static>(
    rpc: &'static str,
    call: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    run_to_completion(rpc, call).await.map_err(refusal::unclassified)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    /// Proves HEAL-ERR-08, ADDONS-IDENTITY-11: of every call that goes by `run`.
    #[tokio::test]
    async fn a_failure_of_no_table_is_unknown_and_tells_where_to_look() {
        let panicked = run::<()>("Test", async { panic!("inner detail") }).await.unwrap_err();
        assert_eq!(panicked.code(), Code::Unknown);
        assert!(panicked.message().contains("the log"), "{panicked}");
        assert!(!panicked.message().contains("inner detail"));
        for code in [Code::Unavailable, Code::DeadlineExceeded, Code::NotFound, Code::Aborted] {
            let kept = run::<()>("Test", async move { Err(Status::new(code, "why")) }).await;
            assert_eq!(kept.unwrap_err().code(), code);
        }
    }

    #[test]
    fn paths_of_calls_are_told_from_those_of_csi_and_of_strangers() {
        assert!(has("/healer.HealerNode/NodeHealer") && has("/identity.Identity/Probe"));
        for other in ["/csi.v1.Identity/Probe", "/Identity/Probe", "identity.Identity/Probe", ""] {
            assert!(!has(other), "{other}");
        }
    }
}
