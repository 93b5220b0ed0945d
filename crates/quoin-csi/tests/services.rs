//! Rules of all services together: identity, modes, unserved calls, secrets.

use std::sync::atomic::Ordering;

use crate::common::*;
use quoin_api::csi::group_controller_client::GroupControllerClient;
use quoin_api::csi::*;
use quoin_csi::{Callers, Edition, Mode};
use tonic::Code;

/// Proves CSI-PLUGININFO-06, CSI-PLUGININFO-07, CSI-PLUGINCAPS-01, CSI-PLUGINCAPS-05,
/// CSI-PLUGINCAPS-09, CSI-PROBE-01, CSI-PROBE-08, CSI-PROTOCOL-07, CSI-SERVICES-08,
/// CSI-CTRLCAPS-01, CSI-CTRLCAPS-13, CSI-NODECAPS-01, CSI-NODEINFO-01, CSI-NODEINFO-04,
/// CSI-NODEINFO-05, CSI-NODEINFO-07, CSI-NODEINFO-10, CSI-NODEINFO-11,
/// CSI-PLUGINCAPS-13, CSI-CREATEVOLUME-28, CSI-CTRLPUBLISH-15: OFFLINE is not advertised at all, and the
/// capabilities are there whose lack the last two are about.
#[tokio::test]
async fn one_socket_reports_identity_and_capabilities() {
    let mut world = World::start().await;
    let info = world.identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.name, "csi.quoin.io");
    assert!(!info.vendor_version.is_empty());
    let plugin = world.identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await;
    let plugin = plugin.unwrap().into_inner().capabilities;
    use plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
    let service = |kind: service::Type| Some(Type::Service(Service { r#type: kind.into() }));
    let has = |kind| plugin.iter().any(|one| one.r#type == kind);
    assert!(has(service(service::Type::ControllerService)));
    assert!(has(service(service::Type::VolumeAccessibilityConstraints)));
    assert!(has(service(service::Type::SnapshotAccessibilityConstraints)));
    let online = VolumeExpansion { r#type: volume_expansion::Type::Online.into() };
    assert!(has(Some(Type::VolumeExpansion(online))));
    let offline = VolumeExpansion { r#type: volume_expansion::Type::Offline.into() };
    assert!(
        !has(Some(Type::VolumeExpansion(offline))),
        "volumes grow online, so OFFLINE is not advertised"
    );
    let ready = world.identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
    assert_eq!(ready, Some(true));

    use controller_service_capability::rpc::Type as Rpc;
    let answer = world
        .controller
        .controller_get_capabilities(ControllerGetCapabilitiesRequest::default())
        .await
        .unwrap();
    let controller: Vec<_> = answer
        .into_inner()
        .capabilities
        .iter()
        .map(|one| match one.r#type.as_ref().unwrap() {
            controller_service_capability::Type::Rpc(rpc) => rpc.r#type(),
        })
        .collect();
    for kind in [
        Rpc::ExpandVolume,
        Rpc::PublishReadonly,
        Rpc::PublishUnpublishVolume,
        Rpc::ListVolumesPublishedNodes,
    ] {
        assert!(controller.contains(&kind));
    }
    assert!(!controller.contains(&Rpc::Unknown));
    let node = world
        .node
        .node_get_capabilities(NodeGetCapabilitiesRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(!node.capabilities.is_empty());
    let info = world.node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), (NODE, 2));
    let segments = info.accessible_topology.unwrap().segments;
    assert_eq!(segments, map(&[("quoin.io/node", NODE), ("quoin.io/zone", "z1")]));
    let volume_id = world.create("db", 64 * MIB).await.volume_id;
    let request = ControllerPublishVolumeRequest {
        volume_id,
        node_id: info.node_id.clone(),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    world.controller.controller_publish_volume(request).await.unwrap();
    world.restart_plugin().await;
    let again = world.node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(again.node_id, info.node_id);
}

/// Proves CSI-ERR-10, CSI-SERVICES-06, CSI-SERVICES-07: by a handler of its own (which gives a
/// reason, where the transport gives none), before validation, for every RPC that is not served.
#[tokio::test]
async fn every_unserved_call_returns_unimplemented() {
    let world = World::start_in(Mode::NODE).await;
    let mut group = GroupControllerClient::new(world.channel.clone());
    let refused = [
        group
            .group_controller_get_capabilities(GroupControllerGetCapabilitiesRequest {})
            .await
            .map(drop),
        group
            .create_volume_group_snapshot(CreateVolumeGroupSnapshotRequest::default())
            .await
            .map(drop),
        group
            .delete_volume_group_snapshot(DeleteVolumeGroupSnapshotRequest::default())
            .await
            .map(drop),
        group.get_volume_group_snapshot(GetVolumeGroupSnapshotRequest::default()).await.map(drop),
    ];
    for answer in refused {
        let status = answer.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented);
        assert!(status.message().contains("node mode"), "{status}");
    }
}

/// Proves CSI-OPS-04, CSI-PLUGINCAPS-02, CSI-SERVICES-05, CSI-PROTOCOL-03, CSIN-HEALTH-02,
/// CSIN-MODIFY-01, CSI-CTRLCAPS-20, CSI-NODECAPS-09: modes differ in active
/// services, not in the plugin's identity.
#[tokio::test]
async fn each_mode_serves_its_own_services_and_reports_the_same_capabilities() {
    let mut capabilities = Vec::new();
    for mode in [Mode::ALL, Mode::CONTROLLER, Mode::NODE] {
        let mut world = World::start_in(mode).await;
        world.identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap();
        world.identity.probe(ProbeRequest {}).await.unwrap();
        let answer = world
            .identity
            .get_plugin_capabilities(GetPluginCapabilitiesRequest::default())
            .await
            .unwrap();
        capabilities.push(answer.into_inner());
        let served = |answer: Code| answer != Code::Unimplemented;
        let controller = &mut world.controller;
        for answer in [
            code(
                &controller
                    .controller_get_capabilities(ControllerGetCapabilitiesRequest::default())
                    .await,
            ),
            code(&controller.create_volume(CreateVolumeRequest::default()).await),
            code(&controller.delete_volume(DeleteVolumeRequest::default()).await),
            code(
                &controller
                    .controller_publish_volume(ControllerPublishVolumeRequest::default())
                    .await,
            ),
            code(
                &controller
                    .controller_unpublish_volume(ControllerUnpublishVolumeRequest::default())
                    .await,
            ),
            code(
                &controller
                    .validate_volume_capabilities(ValidateVolumeCapabilitiesRequest::default())
                    .await,
            ),
            code(&controller.list_volumes(ListVolumesRequest::default()).await),
            code(&controller.get_capacity(GetCapacityRequest::default()).await),
            code(
                &controller
                    .controller_expand_volume(ControllerExpandVolumeRequest::default())
                    .await,
            ),
            code(&controller.controller_get_volume(ControllerGetVolumeRequest::default()).await),
            code(
                &controller
                    .controller_modify_volume(ControllerModifyVolumeRequest::default())
                    .await,
            ),
            code(
                &controller
                    .controller_list_volume_health(ControllerListVolumeHealthRequest::default())
                    .await,
            ),
            code(
                &controller
                    .controller_get_volume_health(ControllerGetVolumeHealthRequest::default())
                    .await,
            ),
        ] {
            assert_eq!(served(answer), mode.controller, "{mode:?}");
        }
        for answer in [
            code(&world.node.node_get_capabilities(NodeGetCapabilitiesRequest::default()).await),
            code(&world.node.node_get_info(NodeGetInfoRequest::default()).await),
            code(&world.node.node_stage_volume(NodeStageVolumeRequest::default()).await),
            code(&world.node.node_unstage_volume(NodeUnstageVolumeRequest::default()).await),
            code(&world.node.node_publish_volume(NodePublishVolumeRequest::default()).await),
            code(&world.node.node_unpublish_volume(NodeUnpublishVolumeRequest::default()).await),
            code(&world.node.node_get_volume_stats(NodeGetVolumeStatsRequest::default()).await),
            code(&world.node.node_expand_volume(NodeExpandVolumeRequest::default()).await),
            code(&world.node.node_get_volume_health(NodeGetVolumeHealthRequest::default()).await),
            code(&world.node.node_get_storage_health(NodeGetStorageHealthRequest::default()).await),
        ] {
            assert_eq!(served(answer), mode.node, "{mode:?}");
        }
    }
    assert!(capabilities.windows(2).all(|pair| pair[0] == pair[1]));
}

/// Proves CSI-PROBE-07, CSI-PROBE-06, CSI-PROBE-10, CSI-PROBE-11, CSI-PROBE-12.
#[tokio::test]
async fn a_plugin_whose_controller_is_away_is_not_ready_and_one_of_a_node_does_not_care() {
    let mut world = World::start().await;
    world.stop_control().await;
    world.restart_plugin().await;
    let ready = world.identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
    assert_eq!(ready, Some(false), "the controller has not started yet");
    world.start_control().await;
    let ready = world.identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready;
    assert_eq!(ready, Some(true));
    world.stop_control().await;
    assert!(!sidecar_goes_on(&mut world).await && !liveness_is_well(&mut world).await);
    world.start_control().await;
    assert!(sidecar_goes_on(&mut world).await);

    // A livenessprobe beside the node plugin has nothing to restart, whatever the controller does.
    let mut world = World::start_in(Mode::NODE).await;
    for _ in 0..2 {
        assert!(liveness_is_well(&mut world).await && sidecar_goes_on(&mut world).await);
        world.stop_control().await;
    }
    // Its needs on its own host are another matter.
    world.attacher.is_away.store(true, Ordering::Relaxed);
    let answer = world.identity.probe(ProbeRequest {}).await;
    assert_eq!(code(&answer), Code::FailedPrecondition);
}

/// ProbeForever of csi-lib-utils, one turn: a sidecar ends at any error but DEADLINE_EXCEEDED, and asks again while the
/// driver is not ready.
async fn sidecar_goes_on(world: &mut World) -> bool {
    match world.identity.probe(ProbeRequest {}).await {
        Ok(answer) => answer.into_inner().ready.unwrap_or(true),
        Err(status) => {
            assert_eq!(status.code(), Code::DeadlineExceeded, "the sidecar ends: {status}");
            false
        }
    }
}

/// The answer of livenessprobe: an error and a driver that is not ready are both 500.
async fn liveness_is_well(world: &mut World) -> bool {
    let answer = world.identity.probe(ProbeRequest {}).await;
    answer.is_ok_and(|answer| answer.into_inner().ready.unwrap_or(true))
}

/// Proves CSI-PLUGININFO-09, CSI-PLUGINCAPS-14: by a plugin that has ended.
#[tokio::test]
async fn a_plugin_that_cannot_answer_gives_no_empty_answer() {
    let mut world = World::start().await;
    world.stop_plugin().await;
    let info = world.identity.get_plugin_info(GetPluginInfoRequest {}).await;
    let capabilities =
        world.identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await;
    assert_eq!([code(&info), code(&capabilities)], [Code::Unavailable; 2]);
    world.restart_plugin().await;
    world.identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap();
}

/// Proves CSI-ERR-05, CSI-ERR-06, CSI-ERR-12, CSI-ERR-14: an empty request of every RPC.
#[tokio::test]
async fn empty_requests_are_refused_before_any_change() {
    let mut world = World::start().await;
    let controller = &mut world.controller;
    let codes = [
        code(&controller.create_volume(CreateVolumeRequest::default()).await),
        code(&controller.delete_volume(DeleteVolumeRequest::default()).await),
        code(
            &controller.controller_publish_volume(ControllerPublishVolumeRequest::default()).await,
        ),
        code(
            &controller
                .controller_unpublish_volume(ControllerUnpublishVolumeRequest::default())
                .await,
        ),
        code(
            &controller
                .validate_volume_capabilities(ValidateVolumeCapabilitiesRequest::default())
                .await,
        ),
        code(&controller.controller_expand_volume(ControllerExpandVolumeRequest::default()).await),
        code(&controller.controller_get_volume(ControllerGetVolumeRequest::default()).await),
        code(&world.node.node_stage_volume(NodeStageVolumeRequest::default()).await),
        code(&world.node.node_unstage_volume(NodeUnstageVolumeRequest::default()).await),
        code(&world.node.node_publish_volume(NodePublishVolumeRequest::default()).await),
        code(&world.node.node_unpublish_volume(NodeUnpublishVolumeRequest::default()).await),
        code(&world.node.node_get_volume_stats(NodeGetVolumeStatsRequest::default()).await),
        code(&world.node.node_expand_volume(NodeExpandVolumeRequest::default()).await),
    ];
    assert_eq!(codes, [Code::InvalidArgument; 13]);
    assert!(world.cluster.volumes().await.is_empty());
}

/// Proves CSI-SECRET-01, CSI-VOLCAP-03, CSI-SECRET-06: at the most verbose level, in refusals, and
/// in the records.
#[tokio::test]
async fn secrets_and_mount_flags_are_in_no_log_message_or_record() {
    let log = Log::default();
    let writer_of_log = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer_of_log.clone())
        .finish();
    // One thread runs all of this test, the server included.
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut world = World::start().await;
    let secrets = map(&[("passphrase", "hunter2"), ("user.name", "hunter2")]);
    let mut capability = writer();
    if let Some(volume_capability::AccessType::Mount(mount)) = &mut capability.access_type {
        mount.mount_flags = vec!["data=hunter2".into()];
    }
    let mut messages = String::new();
    let request = CreateVolumeRequest { secrets: secrets.clone(), ..create("db", 64 * MIB) };
    let volume =
        world.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap();
    let request = ControllerPublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        node_id: NODE.into(),
        volume_capability: Some(capability.clone()),
        secrets: secrets.clone(),
        ..Default::default()
    };
    world.controller.controller_publish_volume(request).await.unwrap();
    let stage = NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: world.text("stage"),
        volume_capability: Some(capability),
        secrets: secrets.clone(),
        ..Default::default()
    };
    if can_mount() {
        // ext4 refuses the flag.
        messages += world.node.node_stage_volume(stage.clone()).await.unwrap_err().message();
        let record = world.path(&format!("state/volumes/{}.json", volume.volume_id));
        assert!(!record.exists(), "a staging that is refused leaves no record");
        let plain = NodeStageVolumeRequest { volume_capability: Some(writer()), ..stage.clone() };
        world.node.node_stage_volume(plain).await.unwrap();
        let kept = std::fs::read_to_string(&record).unwrap();
        assert!(!kept.contains("passphrase") && !kept.contains("hunter2"), "{kept}");
        let unstage = NodeUnstageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: world.text("stage"),
        };
        world.node.node_unstage_volume(unstage).await.unwrap();
    }
    let request = NodeStageVolumeRequest { staging_target_path: "x".into(), ..stage };
    messages += world.node.node_stage_volume(request).await.unwrap_err().message();
    let request = DeleteVolumeRequest { volume_id: volume.volume_id, secrets };
    messages += world.controller.delete_volume(request).await.unwrap_err().message();
    assert!(!messages.contains("hunter2"), "{messages}");
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("DeleteVolume"), "the log has entries");
    assert!(!log.contains("hunter2"));
    assert!(!log.contains("passphrase"));
}

/// Proves CSI-ERR-07: and that a call that was refused changed nothing.
#[tokio::test]
async fn a_caller_makes_the_calls_that_its_token_is_for_and_no_others() {
    let directory = tempfile::tempdir().unwrap();
    let list = directory.path().join("callers.yaml");
    // Of the token "token-of-the-maker".
    let digest = "d4a26405d4dcb879fe866f60cfe43b346a3cdd8b555ef5854210ed3abb3ebdc4";
    let text = format!("callers:\n- name: maker\n  tokenSha256: {digest}\n  may: [CreateVolume]\n");
    std::fs::write(&list, text).unwrap();
    let callers = quoin_csi::Callers::read(&list).unwrap();
    let mut world = World::start_with(Mode::ALL, callers).await;
    let token = |token: &str| map(&[(quoin_csi::CALLER_TOKEN, token)]);
    let made = |secrets| CreateVolumeRequest { secrets, ..create("db", 64 * MIB) };
    for secrets in [map(&[]), token("token-of-nobody-here")] {
        let answer = world.controller.create_volume(made(secrets)).await;
        assert_eq!(code(&answer), Code::Unauthenticated);
    }
    assert!(world.cluster.volumes().await.is_empty());
    let answer = world.controller.create_volume(made(token("token-of-the-maker"))).await.unwrap();
    let volume_id = answer.into_inner().volume.unwrap().volume_id;
    let remove = |secrets| DeleteVolumeRequest { volume_id: volume_id.clone(), secrets };
    let answer = world.controller.delete_volume(remove(token("token-of-the-maker"))).await;
    assert_eq!(code(&answer), Code::PermissionDenied);
    let answer = world.controller.delete_volume(remove(map(&[]))).await;
    assert_eq!(code(&answer), Code::Unauthenticated);
    assert_eq!(world.cluster.volumes().await.len(), 1);
    let publish = ControllerPublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: NODE.into(),
        volume_capability: Some(writer()),
        secrets: token("token-of-the-maker"),
        ..Default::default()
    };
    let answer = world.controller.controller_publish_volume(publish).await;
    assert_eq!(code(&answer), Code::PermissionDenied);
    // Calls without secrets are for all who reach the socket.
    world.controller.list_volumes(ListVolumesRequest::default()).await.unwrap();
}

/// Parallel calls end as some order of them would.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_calls_on_one_volume_are_aborted_or_agree() {
    let world = World::start().await;
    let calls = (0..16).map(|_| {
        let mut controller = world.controller.clone();
        tokio::spawn(async move { controller.create_volume(create("db", 64 * MIB)).await })
    });
    let mut ids = std::collections::BTreeSet::new();
    for call in calls.collect::<Vec<_>>() {
        match call.await.unwrap() {
            Ok(answer) => drop(ids.insert(answer.into_inner().volume.unwrap().volume_id)),
            Err(status) => assert_eq!(status.code(), Code::Aborted),
        }
    }
    assert_eq!(ids.len(), 1);
    assert_eq!(world.cluster.volumes().await.len(), 1);
}

/// A client of an edition takes capabilities of a later one for faults.
#[tokio::test]
async fn no_capability_of_a_later_edition_is_advertised_and_its_calls_are_not_served() {
    use controller_service_capability::rpc::Type as OfController;
    use node_service_capability::rpc::Type as OfNode;
    use plugin_capability::{Type, service::Type as OfPlugin};
    for (edition, later) in [(Edition::default(), true), (Edition::NEWEST, false)] {
        let mut world = World::start_of(edition, Mode::ALL, Callers::default()).await;
        let answer = world
            .controller
            .controller_get_capabilities(ControllerGetCapabilitiesRequest::default());
        let of_controller: Vec<_> = answer.await.unwrap().into_inner().capabilities;
        let has = |wanted: OfController| {
            of_controller.iter().any(|one| match one.r#type.as_ref().unwrap() {
                controller_service_capability::Type::Rpc(rpc) => rpc.r#type() == wanted,
            })
        };
        assert!(has(OfController::ModifyVolume) && has(OfController::GetSnapshot), "{edition}");
        assert_eq!(has(OfController::GetVolumeHealth), !later, "{edition}");
        assert_eq!(has(OfController::ListVolumeHealth), !later, "{edition}");
        let answer = world.node.node_get_capabilities(NodeGetCapabilitiesRequest::default());
        let of_node = answer.await.unwrap().into_inner().capabilities;
        let has_health = of_node.iter().any(|one| match one.r#type.as_ref().unwrap() {
            node_service_capability::Type::Rpc(rpc) => {
                matches!(rpc.r#type(), OfNode::GetVolumeHealth | OfNode::GetStorageHealth)
            }
        });
        assert_eq!(has_health, !later, "{edition}");
        let answer = world.identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {});
        let of_plugin = answer.await.unwrap().into_inner().capabilities;
        let has_topology = of_plugin.iter().any(|one| match one.r#type.as_ref().unwrap() {
            Type::Service(one) => one.r#type() == OfPlugin::SnapshotAccessibilityConstraints,
            Type::VolumeExpansion(_) => false,
        });
        assert_eq!(has_topology, !later, "{edition}");

        // Before any argument is read.
        let refused = |code: Code| (code == Code::Unimplemented) == later;
        let answer = world
            .controller
            .controller_get_volume_health(ControllerGetVolumeHealthRequest::default())
            .await;
        assert!(refused(code(&answer)), "{edition}");
        let answer = world
            .controller
            .controller_list_volume_health(ControllerListVolumeHealthRequest::default())
            .await;
        assert!(refused(code(&answer)), "{edition}");
        let answer = world.node.node_get_volume_health(NodeGetVolumeHealthRequest::default()).await;
        assert!(refused(code(&answer)), "{edition}");
        let answer =
            world.node.node_get_storage_health(NodeGetStorageHealthRequest::default()).await;
        assert!(refused(code(&answer)), "{edition}");
    }
    let mut oldest = World::start_of(Edition::OLDEST, Mode::ALL, Callers::default()).await;
    let answer =
        oldest.controller.controller_modify_volume(ControllerModifyVolumeRequest::default()).await;
    assert_eq!(code(&answer), Code::Unimplemented);
    assert!(answer.unwrap_err().message().contains("--csi-edition 1.9"));
    let answer = oldest.controller.get_snapshot(GetSnapshotRequest::default()).await;
    assert_eq!(code(&answer), Code::Unimplemented);
}
