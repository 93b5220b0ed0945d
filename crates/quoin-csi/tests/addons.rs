//! The Identity service of CSI-Addons, over its own socket.

use std::sync::atomic::Ordering;

use quoin_api::csi::GetPluginInfoRequest;
use quoin_api::csi_addons::healer::NodeHealerRequest;
use quoin_api::csi_addons::healer::healer_node_client::HealerNodeClient;
use quoin_api::csi_addons::identity::capability::{Type, service};
use quoin_api::csi_addons::identity::identity_client::IdentityClient;
use quoin_api::csi_addons::identity::{GetCapabilitiesRequest, GetIdentityRequest, ProbeRequest};
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
}
