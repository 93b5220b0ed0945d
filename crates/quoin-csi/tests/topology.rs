//! Topology through the Controller and Node services.

use quoin_api::csi::*;
use quoin_csi::Mode;
use tonic::Code;

use crate::common::*;

fn topology(pairs: &[(&str, &str)]) -> Topology {
    Topology { segments: map(pairs) }
}

fn zone(name: &str) -> Topology {
    topology(&[("quoin.io/zone", name)])
}

fn rack(name: &str) -> Topology {
    topology(&[("quoin.io/rack", name), ("quoin.io/zone", "z1")])
}

fn needs(requisite: &[Topology], preferred: &[Topology]) -> Option<TopologyRequirement> {
    Some(TopologyRequirement { requisite: requisite.to_vec(), preferred: preferred.to_vec() })
}

/// A request for a volume of this class and these requirements.
fn asked(
    name: &str,
    parameters: &[(&str, &str)],
    accessibility_requirements: Option<TopologyRequirement>,
) -> CreateVolumeRequest {
    let parameters = map(parameters);
    CreateVolumeRequest { parameters, accessibility_requirements, ..create(name, 64 * MIB) }
}

fn snapshot(volume_id: &str, name: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest {
        source_volume_id: volume_id.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    }
}

impl World {
    async fn made(&mut self, request: CreateVolumeRequest) -> Volume {
        self.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap()
    }

    /// Publishes a volume to this node, so that a target serves it.
    async fn used(&mut self, volume: &Volume, context: &[(&str, &str)]) -> Code {
        let mut volume_context = volume.volume_context.clone();
        volume_context.extend(map(context));
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            node_id: NODE.to_owned(),
            volume_capability: Some(writer()),
            volume_context,
            ..Default::default()
        };
        code(&self.controller.controller_publish_volume(request).await)
    }
}

/// Proves CSI-VOLUME-15, CSI-TOPOLOGY-06, CSI-CREATEVOLUME-24, CSI-CREATEVOLUME-02,
/// CSI-CREATEVOLUME-38: the same topology in every answer, and in a repeat.
#[tokio::test]
async fn a_volume_reports_the_topologies_that_were_chosen_in_every_answer() {
    let mut world = World::start().await;
    let list = ["r0", "r1", "r2"].map(rack);
    let class = [("replicas", "2"), ("spread", "rack"), ("local", "pinned")];
    let request = asked("db", &class, needs(&list, &[rack("r2"), rack("r0")]));
    let volume = world.made(request.clone()).await;
    assert_eq!(volume.accessible_topology, [rack("r2"), rack("r0")]);
    assert_eq!(world.made(request).await, volume);
    // The order of a repeat does not matter, nor does what it prefers.
    let repeat = asked("db", &class, needs(&list, &[rack("r1")]));
    assert_eq!(world.made(repeat).await, volume);
    let elsewhere = asked("db", &class, needs(&[rack("r1")], &[]));
    assert_eq!(code(&world.controller.create_volume(elsewhere).await), Code::AlreadyExists);
    let request = ControllerGetVolumeRequest { volume_id: volume.volume_id.clone() };
    let found = world.controller.controller_get_volume(request).await.unwrap().into_inner();
    assert_eq!(found.volume.as_ref(), Some(&volume));
    let listed = world.controller.list_volumes(ListVolumesRequest::default()).await.unwrap();
    assert_eq!(listed.into_inner().entries[0].volume.as_ref(), Some(&volume));
    let record = world.cluster.volumes().await.remove(0);
    let pools: Vec<_> = record.replicas.iter().map(|replica| replica.pool.as_str()).collect();
    assert_eq!(pools, ["pool-2", "pool-0"]);
    let too_many = asked("more", &[("replicas", "3"), ("spread", "zone")], None);
    let refused = world.controller.create_volume(too_many).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("zones"), "{}", refused.message());
    // Every node reaches a volume without topologies, as one of the orchestrator's default.
    let nodes = [NODE, control::OTHER_NODE].map(|name| topology(&[("quoin.io/node", name)]));
    let everywhere = world.made(asked("any", &[], needs(&nodes, &nodes[..1]))).await;
    assert!(everywhere.accessible_topology.is_empty());
    for wrong in ["rooms", "Zone", ""] {
        let request = asked("wrong", &[("spread", wrong)], None);
        assert_eq!(code(&world.controller.create_volume(request).await), Code::InvalidArgument);
    }
}

/// Proves CSI-CREATEVOLUME-40, CSI-TOPOLOGY-12: for a class whose volumes are used where a replica is.
#[tokio::test]
async fn a_local_volume_needs_a_pool_on_a_node() {
    let mut world = World::start().await;
    // No pool of this cluster is on a node.
    let class = [("local", "required")];
    let refused = world.controller.create_volume(asked("db", &class, None)).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("local: required"), "{}", refused.message());
    let nodes = [topology(&[("quoin.io/node", NODE)])];
    let request = asked("db", &class, needs(&nodes, &nodes));
    assert_eq!(code(&world.controller.create_volume(request).await), Code::ResourceExhausted);
    assert!(world.cluster.volumes().await.is_empty());
    let preferred = [("local", "preferred")];
    let volume = world.made(asked("db", &preferred, needs(&nodes, &nodes))).await;
    assert!(volume.accessible_topology.is_empty());
}

/// Proves CSI-VOLUME-09, CSI-NODEINFO-03: a volume that another cluster, or an early version, gave
/// its context.
#[tokio::test]
async fn contexts_and_topologies_name_no_cluster_and_those_that_do_are_accepted() {
    let mut world = World::start_in(Mode::ALL).await;
    let volume = world.made(asked("db", &[], None)).await;
    let keys = |pairs: &std::collections::HashMap<String, String>| {
        pairs.keys().any(|key| key.contains("cluster"))
    };
    assert!(!keys(&volume.volume_context));
    let info = world.node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert!(!keys(&info.accessible_topology.unwrap().segments));
    // A call for each node is enough: a new process is not asked again.
    world.restart_plugin().await;
    assert_eq!(world.used(&volume, &[("quoin.io/cluster", "another")]).await, Code::Ok);
    let old = [topology(&[("quoin.io/cluster", "another")])];
    let volume = world.made(asked("old", &[], needs(&old, &old))).await;
    assert!(volume.accessible_topology.is_empty());
    let request = ValidateVolumeCapabilitiesRequest {
        volume_id: volume.volume_id.clone(),
        volume_context: map(&[("quoin.io/cluster", "c"), ("quoin.io/block-size", "4096")]),
        volume_capabilities: vec![writer()],
        ..Default::default()
    };
    let answer = world.controller.validate_volume_capabilities(request).await.unwrap();
    let confirmed = answer.into_inner().confirmed.unwrap();
    assert_eq!(confirmed.volume_context, volume.volume_context);
}

/// A class whose volumes are used in the topologies of their requests alone.
const PINNED: [(&str, &str); 1] = [("local", "pinned")];

/// Proves CSIN-SNAPTOPO-01, CSIN-SNAPTOPO-02, CSIN-SNAPTOPO-03, CSIN-SNAPTOPO-04,
/// CSIN-SNAPTOPO-05, CSIN-SNAPTOPO-06, CSIN-SNAPTOPO-07.
#[tokio::test]
async fn a_snapshot_has_the_topology_of_its_volume_for_life() {
    let mut world = World::start().await;
    let volume = world.made(asked("db", &PINNED, needs(&[zone("z1")], &[]))).await;
    assert_eq!(world.used(&volume, &[]).await, Code::Ok);
    let id = volume.volume_id.clone();
    let with = |name: &str, accessibility_requirements| CreateSnapshotRequest {
        accessibility_requirements,
        ..snapshot(&id, name)
    };
    let far = needs(&[zone("z9")], &[]);
    let refused = world.controller.create_snapshot(with("far", far.clone())).await;
    assert_eq!(code(&refused), Code::ResourceExhausted);
    let listed = world.controller.list_snapshots(ListSnapshotsRequest::default()).await.unwrap();
    assert!(listed.into_inner().entries.is_empty());
    for malformed in [
        needs(&[], &[]),
        needs(&[topology(&[])], &[]),
        needs(&[topology(&[("a/b/c", "d")])], &[]),
        needs(&[], &[topology(&[("quoin.io/zone", "-")])]),
    ] {
        let answer = world.controller.create_snapshot(with("bad", malformed)).await;
        assert_eq!(code(&answer), Code::InvalidArgument);
    }
    let near = needs(&[zone("z9"), zone("z1")], &[zone("z9")]);
    let made = world.controller.create_snapshot(with("s", near)).await.unwrap().into_inner();
    let made = made.snapshot.unwrap();
    assert_eq!(made.accessible_topology, volume.accessible_topology);
    assert_eq!(made.accessible_topology, [zone("z1")]);
    let source = volume_content_source::SnapshotSource { snapshot_id: made.snapshot_id.clone() };
    let source =
        VolumeContentSource { r#type: Some(volume_content_source::Type::Snapshot(source)) };
    let copy = |name: &str, zones: &[Topology]| CreateVolumeRequest {
        volume_content_source: Some(source.clone()),
        ..asked(name, &PINNED, needs(zones, &[]))
    };
    let elsewhere = world.controller.create_volume(copy("copy", &[zone("z2")])).await;
    assert_eq!(code(&elsewhere), Code::ResourceExhausted, "{elsewhere:?}");
    assert_eq!(world.cluster.volumes().await.len(), 1);
    let copied = world.made(copy("copy", &[zone("z2"), zone("z1")])).await;
    assert_eq!(copied.accessible_topology, [zone("z1")]);
    let preferred = needs(&[], &[zone("z9")]);
    let again = world.controller.create_snapshot(with("s", preferred)).await.unwrap();
    assert_eq!(again.into_inner().snapshot.as_ref(), Some(&made));
    let other = world.controller.create_snapshot(with("s", far)).await;
    assert_eq!(code(&other), Code::AlreadyExists);
    let unpublish =
        ControllerUnpublishVolumeRequest { volume_id: id.clone(), ..Default::default() };
    world.controller.controller_unpublish_volume(unpublish).await.unwrap();
    let delete = DeleteVolumeRequest { volume_id: id, ..Default::default() };
    world.controller.delete_volume(delete).await.unwrap();
    let get = GetSnapshotRequest { snapshot_id: made.snapshot_id.clone(), ..Default::default() };
    let found = world.controller.get_snapshot(get).await.unwrap().into_inner().snapshot;
    assert_eq!(found.as_ref(), Some(&made));
    let listed = world.controller.list_snapshots(ListSnapshotsRequest::default()).await.unwrap();
    assert_eq!(listed.into_inner().entries[0].snapshot.as_ref(), Some(&made));
}
