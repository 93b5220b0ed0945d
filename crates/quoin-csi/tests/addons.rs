//! The Identity service of CSI-Addons, over its own socket.

use std::sync::atomic::Ordering;

use quoin_api::csi::GetPluginInfoRequest;
use quoin_api::csi_addons::encryptionkeyrotation::encryption_key_rotation_controller_client::EncryptionKeyRotationControllerClient;
use quoin_api::csi_addons::fence::fence_controller_client::FenceControllerClient;
use quoin_api::csi_addons::healer::NodeHealerRequest;
use quoin_api::csi_addons::healer::healer_node_client::HealerNodeClient;
use quoin_api::csi_addons::identity::capability::{Type, service};
use quoin_api::csi_addons::identity::identity_client::IdentityClient;
use quoin_api::csi_addons::identity::{GetCapabilitiesRequest, GetIdentityRequest, ProbeRequest};
use quoin_api::csi_addons::reclaimspace::reclaim_space_controller_client::ReclaimSpaceControllerClient;
use quoin_api::csi_addons::reclaimspace::reclaim_space_node_client::ReclaimSpaceNodeClient;
use quoin_api::csi_addons::{encryptionkeyrotation, fence, reclaimspace, replication, volumegroup};
use quoin_csi::Mode;
use tonic::Code;
use tonic::transport::Channel;

use crate::common::*;

/// Returns what a process says of itself, by the names of the interface.
pub async fn capabilities(channel: &Channel) -> Vec<String> {
    let mut identity = IdentityClient::new(channel.clone());
    let answer = identity.get_capabilities(GetCapabilitiesRequest {}).await.unwrap().into_inner();
    let name = |kind: Type| match kind {
        Type::Service(one) => one.r#type().as_str_name(),
        Type::ReclaimSpace(one) => one.r#type().as_str_name(),
        Type::NetworkFence(one) => one.r#type().as_str_name(),
        Type::VolumeReplication(one) => one.r#type().as_str_name(),
        Type::VolumeGroup(one) => one.r#type().as_str_name(),
        Type::EncryptionKeyRotation(one) => one.r#type().as_str_name(),
    };
    answer.capabilities.into_iter().map(|one| name(one.r#type.unwrap()).to_owned()).collect()
}

/// Proves ADDONS-IDENTITY-01, ADDONS-IDENTITY-03, ADDONS-IDENTITY-06, ADDONS-IDENTITY-08.
#[tokio::test]
async fn every_process_tells_its_name_its_own_capabilities_and_that_it_is_ready() {
    let controller = service::Type::ControllerService.as_str_name().to_owned();
    let node = service::Type::NodeService.as_str_name().to_owned();
    for mode in [Mode::ALL, Mode::CONTROLLER, Mode::NODE] {
        let mut world = World::start_in(mode).await;
        let mut identity = IdentityClient::new(world.addons.clone());
        let told = identity.get_identity(GetIdentityRequest {}).await.unwrap().into_inner();
        let info = world.identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap();
        let info = info.into_inner();
        assert_eq!((&told.name, &told.vendor_version), (&info.name, &info.vendor_version));
        assert!(!told.name.is_empty() && told.name.len() <= 63 && told.name.contains('.'));
        assert!(!told.vendor_version.is_empty());

        let mut told = capabilities(&world.addons).await;
        assert_eq!(told.contains(&controller), mode.controller, "{told:?}");
        assert_eq!(told.contains(&node), mode.node, "{told:?}");
        assert!(!told.contains(&"UNKNOWN".to_owned()), "{told:?}");
        let all = told.len();
        told.sort_unstable();
        told.dedup();
        assert_eq!(told.len(), all, "nothing is told twice: {told:?}");

        let ready = identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
        assert_eq!(ready, Some(true));
        let request = NodeHealerRequest {
            volume_id: UNKNOWN.into(),
            volume_path: "/somewhere".into(),
            ..Default::default()
        };
        let answer = HealerNodeClient::new(world.addons.clone()).node_healer(request).await;
        let expected = if mode.node { Code::NotFound } else { Code::Unimplemented };
        assert_eq!(code(&answer), expected, "{mode:?}");
    }
}

/// Proves ADDONS-IDENTITY-08, ADDONS-IDENTITY-09.
#[tokio::test]
async fn a_process_is_starting_until_it_reached_the_controller_and_ill_without_its_attach_process()
{
    let mut world = World::start().await;
    let mut identity = IdentityClient::new(world.addons.clone());
    world.stop_control().await;
    world.restart_plugin().await;
    let ready = identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
    assert_eq!(ready, Some(false), "it has not reached the controller yet");
    world.start_control().await;
    let ready = identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
    assert_eq!(ready, Some(true));
    world.stop_control().await;
    let ready = identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
    assert_eq!(ready, Some(true), "a controller may restart");
    world.attacher.is_away.store(true, Ordering::Relaxed);
    let ill = identity.probe(ProbeRequest {}).await;
    assert_eq!(code(&ill), Code::FailedPrecondition);
    assert!(ill.unwrap_err().message().contains("attach process"));

    // A process of the node alone does not depend on the controller.
    let mut world = World::start_in(Mode::NODE).await;
    world.stop_control().await;
    let mut identity = IdentityClient::new(world.addons.clone());
    let ready = identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
    assert_eq!(ready, Some(true), "it never asked");
}

/// Returns the code of each call of the interface with nothing in it, by the capability that stands for it.
async fn codes(channel: &Channel) -> Vec<(&'static str, &'static str, Code)> {
    let channel = || channel.clone();
    let mut found = Vec::new();
    macro_rules! ask {
        ($client:ty: $($capability:literal $call:ident $request:ty),+) => {$(
            let answer = <$client>::new(channel()).$call(<$request>::default()).await;
            found.push(($capability, stringify!($call), code(&answer)));
        )+};
    }
    ask!(FenceControllerClient<Channel>:
        "NETWORK_FENCE" fence_cluster_network fence::FenceClusterNetworkRequest,
        "NETWORK_FENCE" unfence_cluster_network fence::UnfenceClusterNetworkRequest,
        "NETWORK_FENCE" list_cluster_fence fence::ListClusterFenceRequest,
        "GET_CLIENTS_TO_FENCE" get_fence_clients fence::GetFenceClientsRequest);
    ask!(ReclaimSpaceControllerClient<Channel>:
        "OFFLINE" controller_reclaim_space reclaimspace::ControllerReclaimSpaceRequest);
    ask!(ReclaimSpaceNodeClient<Channel>:
        "ONLINE" node_reclaim_space reclaimspace::NodeReclaimSpaceRequest);
    ask!(EncryptionKeyRotationControllerClient<Channel>:
        "ENCRYPTIONKEYROTATION" encryption_key_rotate
            encryptionkeyrotation::EncryptionKeyRotateRequest);
    ask!(replication::controller_client::ControllerClient<Channel>:
        "VOLUME_REPLICATION" enable_volume_replication replication::EnableVolumeReplicationRequest,
        "VOLUME_REPLICATION" disable_volume_replication replication::DisableVolumeReplicationRequest,
        "VOLUME_REPLICATION" promote_volume replication::PromoteVolumeRequest,
        "VOLUME_REPLICATION" demote_volume replication::DemoteVolumeRequest,
        "VOLUME_REPLICATION" resync_volume replication::ResyncVolumeRequest,
        "VOLUME_REPLICATION" get_volume_replication_info
            replication::GetVolumeReplicationInfoRequest,
        "GET_REPLICATION_DESTINATION_INFO" get_replication_destination_info
            replication::GetReplicationDestinationInfoRequest);
    ask!(volumegroup::controller_client::ControllerClient<Channel>:
        "VOLUME_GROUP" create_volume_group volumegroup::CreateVolumeGroupRequest,
        "VOLUME_GROUP" delete_volume_group volumegroup::DeleteVolumeGroupRequest,
        "MODIFY_VOLUME_GROUP" modify_volume_group_membership
            volumegroup::ModifyVolumeGroupMembershipRequest,
        "GET_VOLUME_GROUP" controller_get_volume_group volumegroup::ControllerGetVolumeGroupRequest,
        "LIST_VOLUME_GROUPS" list_volume_groups volumegroup::ListVolumeGroupsRequest);
    found
}

/// Proves ADDONS-IDENTITY-04, ADDONS-IDENTITY-05, ADDONS-IDENTITY-07.
#[tokio::test]
async fn a_process_tells_exactly_the_capabilities_of_its_sides_and_serves_no_other_call() {
    let of_controller = [
        "CONTROLLER_SERVICE",
        "OFFLINE",
        "NETWORK_FENCE",
        "VOLUME_REPLICATION",
        "GET_REPLICATION_DESTINATION_INFO",
        "VOLUME_GROUP",
        "LIMIT_VOLUME_TO_ONE_VOLUME_GROUP",
        "DO_NOT_ALLOW_VG_TO_DELETE_VOLUMES",
        "MODIFY_VOLUME_GROUP",
        "GET_VOLUME_GROUP",
        "LIST_VOLUME_GROUPS",
    ];
    let of_node = ["NODE_SERVICE", "ONLINE", "GET_CLIENTS_TO_FENCE", "ENCRYPTIONKEYROTATION"];
    for mode in [Mode::ALL, Mode::CONTROLLER, Mode::NODE] {
        let world = World::start_in(mode).await;
        let controller = of_controller.iter().filter(|_| mode.controller);
        let mut expected: Vec<&str> =
            controller.chain(of_node.iter().filter(|_| mode.node)).copied().collect();
        expected.sort_unstable();
        let mut told = capabilities(&world.addons).await;
        told.sort_unstable();
        assert_eq!(told, expected, "{mode:?}");
        for (capability, call, code) in codes(&world.addons).await {
            let is_told = expected.contains(&capability);
            assert_eq!(code != Code::Unimplemented, is_told, "{mode:?} {call}: {code:?}");
        }
    }
}
