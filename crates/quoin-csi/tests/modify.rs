//! Mutable parameters: at creation, at any later time, and in a validation.

use crate::common::*;
use quoin_api::control as api;
use quoin_api::csi::*;
use tonic::Code;

fn modify(volume_id: &str, parameters: &[(&str, &str)]) -> ControllerModifyVolumeRequest {
    ControllerModifyVolumeRequest {
        volume_id: volume_id.to_owned(),
        mutable_parameters: map(parameters),
        ..Default::default()
    }
}

async fn spec(world: &World) -> api::VolumeSpec {
    world.cluster.volumes().await[0].spec.clone().unwrap()
}

/// Proves CSIN-MODIFY-01, CSIN-MODIFY-07, CSIN-MODIFY-08, CSIN-MODIFY-09, CSIN-MODIFY-10,
/// CSIN-MODIFY-11, CSIN-MODIFY-14, CSIN-MODIFY-15.
#[tokio::test]
async fn a_volume_takes_all_of_a_change_or_nothing() {
    let mut world = World::start().await;
    let request = ControllerGetCapabilitiesRequest::default();
    let answer = world.controller.controller_get_capabilities(request).await.unwrap();
    let has = answer.into_inner().capabilities.iter().any(|one| match one.r#type {
        Some(controller_service_capability::Type::Rpc(rpc)) => rpc.r#type == 14,
        None => false,
    });
    assert!(has, "MODIFY_VOLUME is advertised");
    let volume = world.create("db", 64 * MIB).await;
    let id = volume.volume_id.as_str();
    let before = spec(&world).await;
    let odd = [("iopsLimit", "500"), ("colour", "red")];
    for (request, expected) in [
        (modify("", &[]), Code::InvalidArgument),
        (modify("", &[("iopsLimit", "500")]), Code::InvalidArgument),
        (modify(UNKNOWN, &[]), Code::NotFound),
        (modify(UNKNOWN, &[("iopsLimit", "500")]), Code::NotFound),
        (modify(&"0".repeat(32), &[("iopsLimit", "500")]), Code::NotFound),
        (modify(id, &odd), Code::InvalidArgument),
        (modify(id, &[("iopsLimit", "500"), ("durability", "disk")]), Code::InvalidArgument),
        (modify(id, &[("iopsLimit", "500"), ("blockSize", "512")]), Code::InvalidArgument),
        (modify(id, &[("iopsLimit", "500"), ("replicas", "2")]), Code::InvalidArgument),
        (modify(id, &[("iopsLimit", "500"), ("replicas", "5")]), Code::ResourceExhausted),
        (modify(id, &[]), Code::Ok),
    ] {
        let answer = world.controller.controller_modify_volume(request.clone()).await;
        assert_eq!(code(&answer), expected, "{:?}", request.mutable_parameters);
        assert_eq!(spec(&world).await, before);
    }
    let refused = world.controller.controller_modify_volume(modify(id, &odd)).await.unwrap_err();
    assert!(refused.message().contains("\"colour\""), "{refused}");
    for _ in 0..2 {
        let change = modify(id, &[("iopsLimit", "500"), ("durability", "media")]);
        world.controller.controller_modify_volume(change).await.unwrap();
        let expected = api::VolumeSpec {
            iops_limit: 500,
            durability: api::Durability::Media.into(),
            ..before.clone()
        };
        assert_eq!(spec(&world).await, expected, "nothing else");
    }
    let off = modify(id, &[("iopsLimit", "off"), ("csi.storage.k8s.io/pvc/name", "claim")]);
    world.controller.controller_modify_volume(off).await.unwrap();
    assert_eq!(spec(&world).await.iops_limit, 0);
    let get = ControllerGetVolumeRequest { volume_id: id.to_owned() };
    let got = world.controller.controller_get_volume(get).await.unwrap().into_inner();
    assert_eq!(got.volume.unwrap().volume_context, volume.volume_context);
    let deleted = id.to_owned();
    let delete = DeleteVolumeRequest { volume_id: deleted.clone(), ..Default::default() };
    world.controller.delete_volume(delete).await.unwrap();
    let answer = world.controller.controller_modify_volume(modify(&deleted, &[])).await;
    assert_eq!(code(&answer), Code::NotFound);
}

/// Proves CSIN-MODIFY-02, CSIN-MODIFY-03, CSIN-MODIFY-04, CSIN-MODIFY-05.
#[tokio::test]
async fn a_volume_is_made_with_mutable_parameters_and_its_repeat_outlives_their_change() {
    let mut world = World::start().await;
    let with = |mutable: &[(&str, &str)]| CreateVolumeRequest {
        parameters: map(&[("durability", "cache"), ("spread", "pool")]),
        mutable_parameters: map(mutable),
        ..create("db", 64 * MIB)
    };
    for bad in [("colour", "red"), ("durability", "disk"), ("spread", "host")] {
        let refused = world.controller.create_volume(with(&[bad])).await;
        assert_eq!(code(&refused), Code::InvalidArgument);
        assert!(refused.unwrap_err().message().contains(bad.0));
        assert!(world.cluster.volumes().await.is_empty());
    }
    let asked = [("durability", "media"), ("iopsLimit", "100"), ("replicas", "2")];
    let first = world.controller.create_volume(with(&asked)).await.unwrap().into_inner().volume;
    let id = first.as_ref().unwrap().volume_id.clone();
    let made = spec(&world).await;
    assert_eq!((made.durability(), made.iops_limit), (api::Durability::Media, 100));
    assert_eq!(world.cluster.volumes().await[0].replicas.len(), 2);
    let change = modify(&id, &[("iopsLimit", "900"), ("durability", "cache"), ("replicas", "3")]);
    world.controller.controller_modify_volume(change).await.unwrap();
    let again = world.controller.create_volume(with(&asked)).await.unwrap().into_inner().volume;
    assert_eq!(again, first);
    for other in [&[][..], &[("durability", "media")], &[("iopsLimit", "900")]] {
        let answer = world.controller.create_volume(with(other)).await;
        assert_eq!(code(&answer), Code::AlreadyExists, "{other:?}");
    }
    assert_eq!(spec(&world).await.iops_limit, 900);
}

/// Proves CSIN-MODIFY-06.
#[tokio::test]
async fn a_validation_confirms_the_mutable_parameters_that_the_volume_can_take() {
    let mut world = World::start().await;
    let volume_id = world.create("db", 64 * MIB).await.volume_id;
    let before = spec(&world).await;
    let ask = |mutable: &[(&str, &str)]| ValidateVolumeCapabilitiesRequest {
        volume_id: volume_id.clone(),
        volume_capabilities: vec![writer()],
        mutable_parameters: map(mutable),
        ..Default::default()
    };
    let good = [("iopsLimit", "500"), ("repl", "3"), ("csi.storage.k8s.io/x", "y")];
    let answer = world.controller.validate_volume_capabilities(ask(&good)).await.unwrap();
    let confirmed = answer.into_inner().confirmed.expect("it can take them");
    assert_eq!(confirmed.mutable_parameters, map(&good[..2]), "what was checked");
    for bad in [("colour", "red"), ("iopsLimit", "-1"), ("blockSize", "512"), ("replicas", "5")] {
        let answer = world.controller.validate_volume_capabilities(ask(&[bad])).await.unwrap();
        let answer = answer.into_inner();
        assert_eq!(answer.confirmed, None, "{bad:?}");
        assert!(!answer.message.is_empty() && answer.message.len() <= 128);
    }
    assert_eq!(spec(&world).await, before, "a validation changes nothing");
}

/// Proves CSIN-MODIFY-12, CSIN-MODIFY-13.
#[tokio::test]
async fn a_change_of_an_attached_volume_is_answered_once_its_target_has_it_in_force() {
    let mut world = World::start().await;
    let volume = world.create("db", 64 * MIB).await;
    let id = volume.volume_id.as_str();
    let publish = ControllerPublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: NODE.to_owned(),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    world.controller.controller_publish_volume(publish).await.unwrap();
    let change = modify(id, &[("durability", "media")]);
    let answer = world.controller.controller_modify_volume(change.clone()).await;
    assert_eq!(code(&answer), Code::Unavailable, "its target has not reported it");
    assert_eq!(spec(&world).await.durability(), api::Durability::Media, "recorded all the same");
    world.stop_control().await;
    world.start_control().await;
    world.cluster.serve_volume(id, NODE);
    world.controller.controller_modify_volume(change).await.unwrap();
}
