//! The Controller service over a real socket: codes, idempotency, lists, capacity.

use crate::common::*;
use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::*;
use tonic::Code;

fn publish(volume_id: &str, node_id: &str) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: volume_id.to_owned(),
        node_id: node_id.to_owned(),
        volume_capability: Some(writer()),
        ..Default::default()
    }
}
fn unpublish(volume_id: &str, node_id: &str) -> ControllerUnpublishVolumeRequest {
    ControllerUnpublishVolumeRequest {
        volume_id: volume_id.to_owned(),
        node_id: node_id.to_owned(),
        ..Default::default()
    }
}
fn delete(volume_id: &str) -> DeleteVolumeRequest {
    DeleteVolumeRequest { volume_id: volume_id.to_owned(), ..Default::default() }
}
fn expand(volume_id: &str, required: i64, limit: i64) -> ControllerExpandVolumeRequest {
    ControllerExpandVolumeRequest {
        volume_id: volume_id.to_owned(),
        capacity_range: Some(range(required, limit)),
        ..Default::default()
    }
}

/// Proves CSI-CREATEVOLUME-01, CSI-CREATEVOLUME-02, CSI-CREATEVOLUME-30, CSI-VOLUME-03,
/// CSI-VOLUME-04, CSI-VOLUME-12, CSI-CREATEVOLUME-16.
#[tokio::test]
async fn a_repeated_create_returns_the_same_volume() {
    let mut world = World::start().await;
    let first = world.create("db", 64 * MIB).await;
    assert_eq!(world.create("db", 64 * MIB).await, first);
    assert!(!first.volume_id.is_empty() && first.volume_id.len() <= 128);
    assert!(first.capacity_bytes >= 64 * MIB);
    let other = world.create("web", 64 * MIB).await;
    assert_ne!(other.volume_id, first.volume_id);
    assert_eq!(world.cluster.volumes().await.len(), 2);

    let get = ControllerGetVolumeRequest { volume_id: first.volume_id.clone() };
    let got = world.controller.controller_get_volume(get).await.unwrap().into_inner();
    assert_eq!(got.volume.unwrap(), first);
    let listed = world.controller.list_volumes(ListVolumesRequest::default()).await.unwrap();
    let listed = listed.into_inner().entries;
    assert_eq!(listed[0].volume.as_ref().unwrap().volume_context, first.volume_context);
}

/// Proves CSI-CREATEVOLUME-35, CSI-CREATEVOLUME-36, CSI-CREATEVOLUME-37, CSI-CREATEVOLUME-38,
/// CSI-CAPACITY-01: a compatible request stays compatible.
#[tokio::test]
async fn the_name_of_another_volume_is_refused() {
    let mut world = World::start().await;
    let first = world.create("db", 64 * MIB).await;
    let wanted = |capacity_range| CreateVolumeRequest {
        capacity_range: Some(capacity_range),
        ..create("db", 0)
    };
    for fits in
        [range(0, 64 * MIB), range(0, 4096 * MIB), range(32 * MIB, 0), range(64 * MIB, 64 * MIB)]
    {
        let again = world.controller.create_volume(wanted(fits)).await.unwrap().into_inner();
        assert_eq!(again.volume.unwrap().volume_id, first.volume_id);
    }
    for other in [range(65 * MIB, 0), range(0, 63 * MIB), range(32 * MIB, 32 * MIB)] {
        let answer = world.controller.create_volume(wanted(other)).await;
        assert_eq!(code(&answer), Code::AlreadyExists, "{other:?}");
    }
    let parameters = map(&[("replicas", "2")]);
    let request = CreateVolumeRequest { parameters, ..create("db", 64 * MIB) };
    assert_eq!(code(&world.controller.create_volume(request).await), Code::AlreadyExists);
    let pinned = CreateVolumeRequest {
        parameters: map(&[("local", "pinned")]),
        ..create("pinned", 64 * MIB)
    };
    world.controller.create_volume(pinned.clone()).await.unwrap();
    for (named, zone, expected) in [
        (&pinned, "z1", Code::Ok),
        (&pinned, "z9", Code::AlreadyExists),
        // A volume that is used anywhere meets every list.
        (&create("db", 64 * MIB), "z9", Code::Ok),
    ] {
        let zone = Topology { segments: map(&[("quoin.io/zone", zone)]) };
        let needs = TopologyRequirement { requisite: vec![zone], preferred: vec![] };
        let accessibility_requirements = Some(needs);
        let request = CreateVolumeRequest { accessibility_requirements, ..named.clone() };
        assert_eq!(code(&world.controller.create_volume(request).await), expected);
    }
    let too_small_for_xfs = CreateVolumeRequest {
        capacity_range: None,
        volume_capabilities: vec![writer(), mount_capability("xfs", AccessMode::SingleNodeWriter)],
        ..create("db", 0)
    };
    let answer = world.controller.create_volume(too_small_for_xfs).await;
    assert_eq!(code(&answer), Code::AlreadyExists, "the volume cannot be used so");
    let any_size = CreateVolumeRequest { capacity_range: None, ..create("db", 0) };
    let again = world.controller.create_volume(any_size).await.unwrap().into_inner();
    assert_eq!(again.volume.unwrap(), first, "without a range, any size matches");
    assert_eq!(world.cluster.volumes().await.len(), 2);
}

#[tokio::test]
async fn the_claim_of_kubernetes_is_kept_with_its_volume_and_never_compared() {
    let mut world = World::start().await;
    let of = |claim: &str| CreateVolumeRequest {
        parameters: map(&[
            ("replicas", "2"),
            ("csi.storage.k8s.io/pvc/name", claim),
            ("csi.storage.k8s.io/pvc/namespace", "shop"),
            ("csi.storage.k8s.io/pv/name", "pvc-1"),
            ("csi.storage.k8s.io/fstype", "ext4"),
        ]),
        ..create("pvc-1", 64 * MIB)
    };
    let made = world.controller.create_volume(of("orders")).await.unwrap().into_inner();
    let again = world.controller.create_volume(of("renamed")).await.unwrap().into_inner();
    assert_eq!(made.volume, again.volume);
    let spec = world.cluster.volumes().await.remove(0).spec.unwrap();
    let named = [("pvc/name", "orders"), ("pvc/namespace", "shop"), ("pv/name", "pvc-1")];
    assert_eq!(spec.claim, map(&named));
    assert_eq!(spec.parameters, map(&[("replicas", "2")]));
}

/// Proves CSI-CREATEVOLUME-08, CSI-CREATEVOLUME-13, CSI-CREATEVOLUME-14, CSI-CREATEVOLUME-20,
/// CSI-CREATEVOLUME-21, CSI-CAPACITY-02, CSI-CAPACITY-04, CSI-CAPACITY-06, CSI-SOURCE-01,
/// CSI-SOURCE-02, CSI-SOURCE-04, CSI-CREATEVOLUME-32, CSI-SECRET-02, CSI-SIZE-03,
/// CSI-TOPOLOGY-01.
#[tokio::test]
async fn an_invalid_create_request_creates_nothing() {
    let mut world = World::start().await;
    let good = || create("db", 64 * MIB);
    let source = |kind| Some(VolumeContentSource { r#type: kind });
    use volume_content_source::{SnapshotSource, Type, VolumeSource};
    let snapshot = |id: &str| Some(Type::Snapshot(SnapshotSource { snapshot_id: id.into() }));
    let volume = |id: &str| Some(Type::Volume(VolumeSource { volume_id: id.into() }));
    let mut bad = vec![
        CreateVolumeRequest { name: String::new(), ..good() },
        CreateVolumeRequest { name: "a\u{7f}".into(), ..good() },
        CreateVolumeRequest { name: "x".repeat(129), ..good() },
        CreateVolumeRequest { volume_capabilities: vec![], ..good() },
        CreateVolumeRequest { parameters: map(&[("colour", "red")]), ..good() },
        CreateVolumeRequest { parameters: map(&[("replicas", "zero")]), ..good() },
        CreateVolumeRequest { parameters: map(&[("k", &"v".repeat(4096))]), ..good() },
        CreateVolumeRequest { mutable_parameters: map(&[("spread", "pool")]), ..good() },
        CreateVolumeRequest { secrets: map(&[("pass word", "x")]), ..good() },
        CreateVolumeRequest { capacity_range: Some(range(0, 0)), ..good() },
        CreateVolumeRequest { capacity_range: Some(range(-1, 0)), ..good() },
        CreateVolumeRequest { capacity_range: Some(range(0, -1)), ..good() },
        CreateVolumeRequest { volume_content_source: source(None), ..good() },
        CreateVolumeRequest { volume_content_source: source(snapshot("")), ..good() },
        CreateVolumeRequest { volume_content_source: source(volume("")), ..good() },
        CreateVolumeRequest {
            accessibility_requirements: Some(TopologyRequirement::default()),
            ..good()
        },
    ];
    for capability in malformed().into_iter().flatten() {
        bad.push(CreateVolumeRequest { volume_capabilities: vec![capability], ..good() });
    }
    for (index, request) in bad.into_iter().enumerate() {
        let answer = world.controller.create_volume(request).await;
        assert_eq!(code(&answer), Code::InvalidArgument, "request {index}");
    }
    assert!(world.cluster.volumes().await.is_empty());
}

/// Proves CSI-CREATEVOLUME-17, CSI-CREATEVOLUME-18, CSI-CREATEVOLUME-19,
/// CSI-VOLCAP-02, CSI-FIELD-02: at create time, and with any of them it is published.
#[tokio::test]
async fn one_unsupported_capability_among_several_refuses_the_volume() {
    let mut world = World::start().await;
    for unsupported in [
        mount_capability("ext4", AccessMode::MultiNodeMultiWriter),
        mount_capability("xfs", AccessMode::MultiNodeSingleWriter),
        mount_capability("btrfs", AccessMode::SingleNodeWriter),
    ] {
        let volume_capabilities = vec![writer(), unsupported];
        let request = CreateVolumeRequest { volume_capabilities, ..create("db", 64 * MIB) };
        assert_eq!(code(&world.controller.create_volume(request).await), Code::InvalidArgument);
    }
    assert!(world.cluster.volumes().await.is_empty());
    let volume_capabilities = vec![
        writer(),
        mount_capability("", AccessMode::SingleNodeReaderOnly),
        mount_capability("xfs", AccessMode::SingleNodeSingleWriter),
        block_capability(AccessMode::SingleNodeMultiWriter),
        mount_capability("ext4", AccessMode::MultiNodeReaderOnly),
        block_capability(AccessMode::MultiNodeReaderOnly),
        block_capability(AccessMode::MultiNodeSingleWriter),
        block_capability(AccessMode::MultiNodeMultiWriter),
    ];
    let request = CreateVolumeRequest {
        volume_capabilities: volume_capabilities.clone(),
        ..create("db", 300 * MIB)
    };
    let answer = world.controller.create_volume(request).await.unwrap().into_inner();
    let id = answer.volume.unwrap().volume_id;
    for capability in volume_capabilities {
        let volume_capability = Some(capability);
        let request = ControllerPublishVolumeRequest { volume_capability, ..publish(&id, NODE) };
        world.controller.controller_publish_volume(request).await.unwrap();
        world.controller.controller_unpublish_volume(unpublish(&id, NODE)).await.unwrap();
    }
}

/// Proves CSI-CREATEVOLUME-41, CSI-CREATEVOLUME-12, CSI-CREATEVOLUME-40, CSI-TOPOLOGY-12,
/// CSI-CREATEVOLUME-24, CSI-TOPOLOGY-02, CSI-TOPOLOGY-03.
#[tokio::test]
async fn sizes_names_and_topologies_have_their_own_codes() {
    let mut world = World::start().await;
    let far = [range(i64::MAX, 0), range(1 << 60, 0), range(81 << 30, 0)];
    let empty = [range(1, 4095), range(2 * MIB, MIB), range(0, MIB - 1), range(1, MIB / 2)];
    for outside in far.into_iter().chain(empty) {
        let request = CreateVolumeRequest { capacity_range: Some(outside), ..create("x", 0) };
        let answer = world.controller.create_volume(request).await;
        assert_eq!(code(&answer), Code::OutOfRange, "{outside:?}");
    }
    for name in [&"x".repeat(128), "a b\tc\nd\re/f'g\"h", "größe 🦀", "../../etc"] {
        let first = world.create(name, 64 * MIB).await;
        assert_eq!(world.create(name, 64 * MIB).await, first);
    }
    let xfs = |size| CreateVolumeRequest {
        volume_capabilities: vec![mount_capability("xfs", AccessMode::SingleNodeWriter)],
        ..create("x", size)
    };
    let answer = world.controller.create_volume(xfs(299 * MIB)).await;
    assert_eq!(code(&answer), Code::OutOfRange, "mkfs.xfs would refuse it at the first mount");
    world.controller.create_volume(xfs(300 * MIB)).await.unwrap();
    let least = world.create("least", 1).await;
    assert_eq!(least.capacity_bytes, MIB);
    assert!(least.accessible_topology.is_empty(), "every node reaches it");
    let needs = |zone: &str| {
        let zone = Topology { segments: map(&[("quoin.io/zone", zone)]) };
        Some(TopologyRequirement { requisite: vec![zone], preferred: vec![] })
    };
    let pinned = |name: &str, zone| CreateVolumeRequest {
        accessibility_requirements: needs(zone),
        parameters: map(&[("local", "pinned")]),
        ..create(name, 64 * MIB)
    };
    let request = pinned("far", "z9");
    assert_eq!(code(&world.controller.create_volume(request).await), Code::ResourceExhausted);
    let request = CreateVolumeRequest { parameters: map(&[]), ..pinned("anywhere", "z9") };
    let answer = world.controller.create_volume(request).await.unwrap().into_inner();
    assert!(answer.volume.unwrap().accessible_topology.is_empty(), "the list is a wish");
    let request = pinned("near", "z1");
    let answer = world.controller.create_volume(request).await.unwrap().into_inner();
    let reported = answer.volume.unwrap().accessible_topology;
    let info = world.node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    let of_node = info.accessible_topology.unwrap().segments;
    assert_eq!(reported.len(), 1);
    assert_eq!(reported[0].segments["quoin.io/zone"], "z1");
    assert!(reported[0].segments.iter().all(|(key, value)| of_node.get(key) == Some(value)));
}

/// Proves CSI-DELETEVOLUME-01, CSI-DELETEVOLUME-02, CSI-DELETEVOLUME-09, CSI-DELETEVOLUME-12.
#[tokio::test]
async fn a_volume_is_deleted_once_and_not_under_a_workload() {
    let mut world = World::start().await;
    let id = world.create("db", 64 * MIB).await.volume_id;
    world.controller.controller_publish_volume(publish(&id, NODE)).await.unwrap();
    let answer = world.controller.delete_volume(delete(&id)).await;
    assert_eq!(code(&answer), Code::FailedPrecondition);
    assert_eq!(world.cluster.volumes().await.len(), 1);
    world.controller.controller_unpublish_volume(unpublish(&id, NODE)).await.unwrap();
    for id in [id.as_str(), &id, UNKNOWN, &"0".repeat(32), "../x", &"x".repeat(128)] {
        assert_eq!(code(&world.controller.delete_volume(delete(id)).await), Code::Ok, "{id}");
    }
    for id in ["", &"x".repeat(129)] {
        let answer = world.controller.delete_volume(delete(id)).await;
        assert_eq!(code(&answer), Code::InvalidArgument);
    }
    assert!(world.cluster.volumes().await.is_empty());
    let again = world.create("db", 64 * MIB).await;
    assert_ne!(again.volume_id, id, "the name is free, and the id is not used again");
}

/// Proves CSI-CTRLPUBLISH-01, CSI-CTRLPUBLISH-04, CSI-CTRLPUBLISH-08, CSI-CTRLPUBLISH-09,
/// CSI-CTRLPUBLISH-11, CSI-CTRLPUBLISH-12, CSI-CTRLPUBLISH-17, CSI-CTRLPUBLISH-25,
/// CSI-CTRLPUBLISH-26, CSI-CTRLPUBLISH-27, CSI-CTRLPUBLISH-28, CSI-CTRLPUBLISH-30,
/// CSI-ACCESSMODE-02.
#[tokio::test]
async fn a_volume_is_published_to_one_node_in_one_way() {
    let mut world = World::start().await;
    let volume = world.create("db", 64 * MIB).await;
    let id = volume.volume_id.as_str();
    let good = || publish(id, NODE);
    let mut bad = vec![
        (publish("", NODE), Code::InvalidArgument),
        (publish(id, ""), Code::InvalidArgument),
        (publish(UNKNOWN, NODE), Code::NotFound),
        (publish(id, "nowhere"), Code::NotFound),
        (
            ControllerPublishVolumeRequest {
                volume_capability: Some(mount_capability("ext4", AccessMode::MultiNodeMultiWriter)),
                ..good()
            },
            Code::InvalidArgument,
        ),
    ];
    for volume_capability in malformed() {
        let request = ControllerPublishVolumeRequest { volume_capability, ..good() };
        bad.push((request, Code::InvalidArgument));
    }
    let mut volume_context = volume.volume_context.clone();
    volume_context.values_mut().for_each(|value| *value = "other".to_owned());
    let request = ControllerPublishVolumeRequest { volume_context, ..good() };
    bad.push((request, Code::InvalidArgument));
    for (index, (request, expected)) in bad.into_iter().enumerate() {
        let answer = world.controller.controller_publish_volume(request).await;
        assert_eq!(code(&answer), expected, "request {index}");
    }
    let mut volume_context = volume.volume_context.clone();
    volume_context.insert("storage.kubernetes.io/csiProvisionerIdentity".into(), "x".into());
    let request = ControllerPublishVolumeRequest { volume_context, ..good() };
    let first = world.controller.controller_publish_volume(request).await.unwrap().into_inner();
    let again = world.controller.controller_publish_volume(good()).await.unwrap().into_inner();
    assert_eq!(first, again);
    for other in [
        ControllerPublishVolumeRequest { readonly: true, ..good() },
        ControllerPublishVolumeRequest {
            volume_capability: Some(block_capability(AccessMode::SingleNodeWriter)),
            ..good()
        },
        ControllerPublishVolumeRequest {
            volume_capability: Some(mount_capability("ext4", AccessMode::SingleNodeReaderOnly)),
            ..good()
        },
    ] {
        let answer = world.controller.controller_publish_volume(other).await;
        assert_eq!(code(&answer), Code::AlreadyExists);
    }
    let other_request =
        world.controller.controller_publish_volume(publish(id, control::OTHER_NODE)).await;
    assert_eq!(code(&other_request), Code::FailedPrecondition);
    assert!(
        other_request.unwrap_err().message().contains(NODE),
        "the error names the node with the volume"
    );
    assert_eq!(world.cluster.volumes().await[0].attachments.len(), 1);

    for name in ["second", "third"] {
        let id = world.create(name, 64 * MIB).await.volume_id;
        let answer = world.controller.controller_publish_volume(publish(&id, NODE)).await;
        let expected = if name == "second" { Code::Ok } else { Code::ResourceExhausted };
        assert_eq!(code(&answer), expected);
    }
}

/// Proves CSI-CTRLUNPUBLISH-01, CSI-CTRLUNPUBLISH-05, CSI-CTRLUNPUBLISH-08,
/// CSI-CTRLUNPUBLISH-10, CSI-CTRLUNPUBLISH-13, CSI-CTRLUNPUBLISH-14.
#[tokio::test]
async fn unpublishing_always_ends_with_an_unpublished_volume() {
    let mut world = World::start().await;
    let id = world.create("db", 64 * MIB).await.volume_id;
    for (volume, node) in
        [(id.as_str(), NODE), (&id, "nowhere"), (UNKNOWN, NODE), (UNKNOWN, ""), (&id, "")]
    {
        let answer = world.controller.controller_unpublish_volume(unpublish(volume, node)).await;
        assert_eq!(code(&answer), Code::Ok, "{volume} {node}");
    }
    let answer = world.controller.controller_unpublish_volume(unpublish("", NODE)).await;
    assert_eq!(code(&answer), Code::InvalidArgument);
    for node in [NODE, ""] {
        world.controller.controller_publish_volume(publish(&id, NODE)).await.unwrap();
        world.controller.controller_unpublish_volume(unpublish(&id, node)).await.unwrap();
        assert!(world.cluster.volumes().await[0].attachments.is_empty());
    }
}

/// Proves CSI-VALIDATE-01, CSI-VALIDATE-02, CSI-VALIDATE-03, CSI-VALIDATE-05, CSI-VALIDATE-06,
/// CSI-VALIDATE-07, CSI-VALIDATE-11, CSI-VALIDATE-13, CSI-VALIDATE-17.
#[tokio::test]
async fn capabilities_are_confirmed_all_or_none() {
    let mut world = World::start().await;
    let volume = world.create("db", 64 * MIB).await;
    let good = || ValidateVolumeCapabilitiesRequest {
        volume_id: volume.volume_id.clone(),
        volume_context: volume.volume_context.clone(),
        volume_capabilities: vec![writer(), block_capability(AccessMode::SingleNodeWriter)],
        ..Default::default()
    };
    let call = |request| world.controller.clone().validate_volume_capabilities_of(request);
    for _ in 0..2 {
        let answer = call(good()).await.unwrap().into_inner();
        let confirmed = answer.confirmed.unwrap();
        assert_eq!(confirmed.volume_capabilities, good().volume_capabilities);
        assert_eq!(confirmed.volume_context, volume.volume_context);
    }
    let mut other_context = good();
    other_context.volume_context.values_mut().for_each(|value| value.push('x'));
    let mut unsupported = good();
    unsupported
        .volume_capabilities
        .push(mount_capability("ext4", AccessMode::MultiNodeMultiWriter));
    let parameters =
        ValidateVolumeCapabilitiesRequest { parameters: map(&[("replicas", "2")]), ..good() };
    for request in [other_context, unsupported, parameters] {
        let answer = call(request).await.unwrap().into_inner();
        assert_eq!(answer.confirmed, None);
        assert!(!answer.message.is_empty() && answer.message.len() <= 128);
    }
    let foreign = map(&[("csi.storage.k8s.io/pod.name", "web")]);
    let request = ValidateVolumeCapabilitiesRequest { volume_context: foreign, ..good() };
    assert!(call(request).await.unwrap().into_inner().confirmed.is_some());
    for (request, expected) in [
        (
            ValidateVolumeCapabilitiesRequest { volume_id: String::new(), ..good() },
            Code::InvalidArgument,
        ),
        (
            ValidateVolumeCapabilitiesRequest { volume_capabilities: vec![], ..good() },
            Code::InvalidArgument,
        ),
        (ValidateVolumeCapabilitiesRequest { volume_id: UNKNOWN.into(), ..good() }, Code::NotFound),
    ] {
        assert_eq!(code(&call(request).await), expected);
    }
}

/// A call on a client that is moved, for closures.
trait Owned {
    async fn validate_volume_capabilities_of(
        self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> Result<tonic::Response<ValidateVolumeCapabilitiesResponse>, tonic::Status>;
}
impl Owned for controller_client::ControllerClient<tonic::transport::Channel> {
    async fn validate_volume_capabilities_of(
        mut self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> Result<tonic::Response<ValidateVolumeCapabilitiesResponse>, tonic::Status> {
        self.validate_volume_capabilities(request).await
    }
}

/// Proves CSI-LISTVOLUMES-01, CSI-LISTVOLUMES-02, CSI-LISTVOLUMES-04, CSI-LISTVOLUMES-05,
/// CSI-LISTVOLUMES-07, CSI-LISTVOLUMES-11, CSI-LISTVOLUMES-12, CSI-LISTVOLUMES-13,
/// CSI-LISTVOLUMES-16.
#[tokio::test]
async fn all_volumes_are_listed_once_in_pages_of_any_size() {
    let mut world = World::start().await;
    let mut ids = Vec::new();
    for index in 0..5 {
        ids.push(world.create(&format!("v{index}"), 64 * MIB).await.volume_id);
    }
    ids.sort();
    world.controller.controller_publish_volume(publish(&ids[3], NODE)).await.unwrap();
    for max_entries in [0, 1, 2, 3, 10] {
        let (mut seen, mut starting_token) = (Vec::new(), String::new());
        loop {
            let request = ListVolumesRequest { max_entries, starting_token };
            let page = world.controller.list_volumes(request).await.unwrap().into_inner();
            assert!(
                max_entries == 0 || page.entries.len() <= usize::try_from(max_entries).unwrap()
            );
            for entry in page.entries {
                let volume = entry.volume.unwrap();
                let status = entry.status.unwrap();
                let published = volume.volume_id == ids[3];
                assert_eq!(status.published_node_ids == [NODE], published);
                assert!(!status.volume_condition.unwrap().message.is_empty());
                seen.push(volume.volume_id);
            }
            starting_token = page.next_token;
            assert!(starting_token.len() <= 128);
            if starting_token.is_empty() {
                break;
            }
        }
        seen.sort();
        assert_eq!(seen, ids, "pages of {max_entries}");
    }
    let request = ListVolumesRequest { max_entries: -1, ..Default::default() };
    assert_eq!(code(&world.controller.list_volumes(request).await), Code::InvalidArgument);
    let page = |starting_token: &str| ListVolumesRequest {
        starting_token: starting_token.to_owned(),
        max_entries: 2,
    };
    let token = world.controller.list_volumes(page("")).await.unwrap().into_inner().next_token;
    let unknown = "0".repeat(token.len());
    for token in ["invalid-token", &ids[0], &unknown, &token[1..], &token.to_uppercase()] {
        let answer = world.controller.list_volumes(page(token)).await;
        assert_eq!(code(&answer), Code::Aborted, "{token}");
    }
    // A token outlives the volume after which it continues, and the controller that issued it.
    world.controller.delete_volume(delete(&ids[1])).await.unwrap();
    world.stop_control().await;
    world.start_control().await;
    let rest = world.controller.list_volumes(page(&token)).await.unwrap().into_inner().entries;
    let rest: Vec<_> = rest.into_iter().map(|entry| entry.volume.unwrap().volume_id).collect();
    assert_eq!(rest, ids[2..4]);
}

/// Proves CSI-GETVOLUME-01, CSI-GETVOLUME-02, CSI-GETVOLUME-04, CSI-GETVOLUME-05,
/// CSI-GETVOLUME-06, CSI-GETVOLUME-07, CSI-GETVOLUME-09.
#[tokio::test]
async fn a_volume_is_shown_in_its_present_state() {
    let mut world = World::start().await;
    let id = world.create("db", 64 * MIB).await.volume_id;
    let get = |id: &str| ControllerGetVolumeRequest { volume_id: id.to_owned() };
    let answer = world.controller.controller_get_volume(get(&id)).await.unwrap().into_inner();
    let status = answer.status.unwrap();
    assert!(status.published_node_ids.is_empty());
    assert!(!status.volume_condition.unwrap().abnormal);
    world.controller.controller_publish_volume(publish(&id, NODE)).await.unwrap();
    world.controller.controller_expand_volume(expand(&id, 128 * MIB, 0)).await.unwrap();
    world.cluster.degrade(&id, NODE).await;
    let answer = world.controller.controller_get_volume(get(&id)).await.unwrap().into_inner();
    assert_eq!(answer.volume.unwrap().capacity_bytes, 128 * MIB);
    let status = answer.status.unwrap();
    assert_eq!(status.published_node_ids, [NODE]);
    let condition = status.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("Degraded"));
    assert_eq!(code(&world.controller.controller_get_volume(get("")).await), Code::InvalidArgument);
    let unknown = world.controller.controller_get_volume(get(UNKNOWN)).await;
    assert_eq!(code(&unknown), Code::NotFound);
}

/// Proves CSI-GETCAPACITY-01, CSI-GETCAPACITY-02, CSI-GETCAPACITY-03, CSI-GETCAPACITY-04,
/// CSI-GETCAPACITY-06, CSI-GETCAPACITY-07, CSI-GETCAPACITY-08, CSI-GETCAPACITY-09,
/// CSI-GETCAPACITY-11, CSI-GETCAPACITY-12.
#[tokio::test]
async fn capacity_is_the_largest_size_of_a_volume_of_that_kind() {
    let mut world = World::start().await;
    let ask = |parameters: &[(&str, &str)]| GetCapacityRequest {
        parameters: map(parameters),
        ..Default::default()
    };
    let three = world.controller.get_capacity(ask(&[])).await.unwrap().into_inner();
    let one = world.controller.get_capacity(ask(&[("replicas", "1")])).await.unwrap().into_inner();
    assert_eq!(one.available_capacity / 3, three.available_capacity);
    world.create("db", 64 * MIB).await;
    let after = world.controller.get_capacity(ask(&[])).await.unwrap().into_inner();
    assert!(after.available_capacity < three.available_capacity);
    let unsupported = GetCapacityRequest {
        volume_capabilities: vec![mount_capability("", AccessMode::MultiNodeMultiWriter)],
        ..ask(&[])
    };
    let none = world.controller.get_capacity(unsupported).await.unwrap().into_inner();
    assert_eq!(none.available_capacity, 0);
    for (key, value, has) in [
        ("quoin.io/zone", "z1", true),
        ("quoin.io/zone", "z9", false),
        ("quoin.io/cluster", "c9", true),
    ] {
        let topology = Topology { segments: map(&[(key, value)]) };
        for (local, has) in [("pinned", has), ("any", true)] {
            let accessible_topology = Some(topology.clone());
            let request = GetCapacityRequest { accessible_topology, ..ask(&[("local", local)]) };
            let there = world.controller.get_capacity(request).await.unwrap().into_inner();
            assert_eq!(there.available_capacity > 0, has, "{local} {key}={value}");
        }
    }
    let (most, least) = (three.maximum_volume_size.unwrap(), three.minimum_volume_size.unwrap());
    for (capacity_range, expected) in [
        (range(most, 0), Code::Ok),
        (range(most + 1, 0), Code::OutOfRange),
        (range(0, least), Code::Ok),
        (range(0, least - 1), Code::OutOfRange),
    ] {
        let name = format!("{capacity_range:?}");
        let request =
            CreateVolumeRequest { capacity_range: Some(capacity_range), ..create(&name, 0) };
        assert_eq!(code(&world.controller.create_volume(request).await), expected, "{name}");
    }
    // The largest volume took all, and with the others more is promised than available.
    let after = world.controller.get_capacity(ask(&[])).await.unwrap().into_inner();
    assert_eq!(after.available_capacity, 0);
    assert_eq!((after.maximum_volume_size, after.minimum_volume_size), (Some(most), Some(least)));
}

/// Proves CSI-CTRLEXPAND-01, CSI-CTRLEXPAND-02, CSI-CTRLEXPAND-12, CSI-CTRLEXPAND-13,
/// CSI-CTRLEXPAND-16, CSI-CTRLEXPAND-17, CSI-CTRLEXPAND-18, CSI-CTRLEXPAND-19,
/// CSI-CTRLEXPAND-20, CSI-CTRLEXPAND-21, CSI-PLUGINCAPS-10, CSI-PLUGINCAPS-12: the controller's part;
/// expansion is ONLINE, so a published volume grows.
#[tokio::test]
async fn a_volume_grows_also_while_published_and_never_shrinks() {
    let mut world = World::start().await;
    let id = world.create("db", 64 * MIB).await.volume_id;
    world.controller.controller_publish_volume(publish(&id, NODE)).await.unwrap();
    for _ in 0..2 {
        let request = expand(&id, 100 * MIB + 1, 0);
        let answer = world.controller.controller_expand_volume(request).await.unwrap().into_inner();
        assert_eq!(answer.capacity_bytes, 100 * MIB + 4096);
        assert!(answer.node_expansion_required);
    }
    let smaller = world.controller.controller_expand_volume(expand(&id, MIB, 0)).await.unwrap();
    assert_eq!(smaller.into_inner().capacity_bytes, 100 * MIB + 4096);
    let no_range = ControllerExpandVolumeRequest { capacity_range: None, ..expand(&id, 1, 0) };
    let capability = |volume_capability| ControllerExpandVolumeRequest {
        volume_capability: Some(volume_capability),
        ..expand(&id, 200 * MIB, 0)
    };
    for (request, expected) in [
        (expand("", 200 * MIB, 0), Code::InvalidArgument),
        (no_range, Code::InvalidArgument),
        (expand(&id, 0, 0), Code::InvalidArgument),
        (expand(&id, -1, 0), Code::InvalidArgument),
        (capability(mount_capability("", AccessMode::MultiNodeMultiWriter)), Code::InvalidArgument),
        (expand(UNKNOWN, 200 * MIB, 0), Code::NotFound),
        (expand(&id, i64::MAX, 0), Code::OutOfRange),
        (expand(&id, 0, 50 * MIB), Code::OutOfRange),
        (expand(&id, 81 << 30, 0), Code::OutOfRange),
    ] {
        let answer = world.controller.controller_expand_volume(request).await;
        assert_eq!(code(&answer), expected);
    }
    let size = u64::try_from(100 * MIB + 4096).unwrap();
    assert_eq!(world.cluster.volumes().await[0].size_bytes, size);
}

/// Proves CSI-ACCESSMODE-04, CSI-ACCESSMODE-05, CSI-CTRLUNPUBLISH-09, CSI-CTRLUNPUBLISH-10: which
/// nodes get it, and which of them write.
#[tokio::test]
async fn a_volume_is_published_to_several_nodes_as_far_as_its_mode_allows() {
    let mut world = World::start().await;
    let id = world.create("db", 64 * MIB).await.volume_id;
    let ask = |node: &str, mode, readonly| ControllerPublishVolumeRequest {
        volume_capability: Some(block_capability(mode)),
        readonly,
        ..publish(&id, node)
    };
    use AccessMode::{
        MultiNodeMultiWriter, MultiNodeReaderOnly, MultiNodeSingleWriter, SingleNodeWriter,
    };
    for (first, second, readonly, expected) in [
        (MultiNodeMultiWriter, MultiNodeMultiWriter, false, Code::Ok),
        (MultiNodeSingleWriter, MultiNodeSingleWriter, false, Code::FailedPrecondition),
        (MultiNodeSingleWriter, MultiNodeSingleWriter, true, Code::Ok),
        (MultiNodeReaderOnly, MultiNodeReaderOnly, false, Code::Ok),
        (MultiNodeReaderOnly, MultiNodeMultiWriter, false, Code::FailedPrecondition),
        (SingleNodeWriter, MultiNodeMultiWriter, true, Code::FailedPrecondition),
        (MultiNodeMultiWriter, SingleNodeWriter, false, Code::FailedPrecondition),
    ] {
        let controller = &mut world.controller;
        controller.controller_publish_volume(ask(NODE, first, false)).await.unwrap();
        let second = ask(control::OTHER_NODE, second, readonly);
        for _ in 0..2 {
            let answer = controller.controller_publish_volume(second.clone()).await;
            assert_eq!(code(&answer), expected, "{first:?}, {second:?}");
            if let Err(refused) = answer {
                assert!(refused.message().contains(NODE), "{}", refused.message());
            }
        }
        let volume = world.cluster.volumes().await.remove(0);
        let is_reader = first == MultiNodeReaderOnly;
        assert!(volume.attachments.iter().all(|a| a.read_only == is_reader || a.node != NODE));
        let get = ControllerGetVolumeRequest { volume_id: id.clone() };
        let got = world.controller.controller_get_volume(get).await.unwrap().into_inner();
        let both = [NODE, control::OTHER_NODE];
        let nodes = if expected == Code::Ok { &both[..] } else { &both[..1] };
        assert_eq!(got.status.unwrap().published_node_ids, nodes);
        if expected == Code::Ok {
            let one = unpublish(&id, NODE);
            world.controller.controller_unpublish_volume(one).await.unwrap();
            let volume = world.cluster.volumes().await.remove(0);
            assert_eq!(volume.attachments[0].node, control::OTHER_NODE);
        }
        world.controller.controller_unpublish_volume(unpublish(&id, "")).await.unwrap();
        assert!(world.cluster.volumes().await[0].attachments.is_empty());
    }
}
