//! Services of CSI-Addons that the control plane carries out, over their own socket: fences, space that is
//! given back, and the rotation of keys.

use quoin_api::control as api;
use quoin_api::csi::*;
use quoin_api::csi_addons::encryptionkeyrotation::EncryptionKeyRotateRequest;
use quoin_api::csi_addons::encryptionkeyrotation::encryption_key_rotation_controller_client::EncryptionKeyRotationControllerClient;
use quoin_api::csi_addons::fence::fence_controller_client::FenceControllerClient;
use quoin_api::csi_addons::fence::*;
use quoin_api::csi_addons::identity::GetCapabilitiesRequest;
use quoin_api::csi_addons::identity::capability::Type;
use quoin_api::csi_addons::identity::identity_client::IdentityClient;
use quoin_api::csi_addons::reclaimspace::ControllerReclaimSpaceRequest;
use quoin_api::csi_addons::reclaimspace::reclaim_space_controller_client::ReclaimSpaceControllerClient;
use quoin_csi::{Callers, Mode};
use tonic::{Code, Response, Status};

use crate::common::control::{ADDRESSES, OTHER_NODE, REPLICA_BYTES};
use crate::common::*;

const KEY: &str = "correct horse battery";
const NEXT: &str = "correct mouse battery";
const LAST: &str = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f";

fn cidrs(blocks: &[&str]) -> Vec<Cidr> {
    blocks.iter().map(|block| Cidr { cidr: (*block).to_owned() }).collect()
}

impl World {
    fn fencing(&self) -> FenceControllerClient<tonic::transport::Channel> {
        FenceControllerClient::new(self.addons.clone())
    }

    async fn fence(
        &self,
        blocks: &[&str],
    ) -> Result<Response<FenceClusterNetworkResponse>, Status> {
        // Parameters that a class has left over say nothing to Quoin.
        let parameters = map(&[("clusterID", "rook-ceph"), ("", "x")]);
        let request =
            FenceClusterNetworkRequest { parameters, secrets: map(&[]), cidrs: cidrs(blocks) };
        self.fencing().fence_cluster_network(request).await
    }

    async fn unfence(
        &self,
        blocks: &[&str],
    ) -> Result<Response<UnfenceClusterNetworkResponse>, Status> {
        let parameters = map(&[("driver", "other")]);
        let request =
            UnfenceClusterNetworkRequest { parameters, secrets: map(&[]), cidrs: cidrs(blocks) };
        self.fencing().unfence_cluster_network(request).await
    }

    async fn fenced(&self) -> Vec<String> {
        let request = ListClusterFenceRequest { parameters: map(&[("x", "y")]), secrets: map(&[]) };
        let fenced = self.fencing().list_cluster_fence(request).await.unwrap().into_inner();
        fenced.cidrs.into_iter().map(|cidr| cidr.cidr).collect()
    }

    async fn publish(
        &mut self,
        volume_id: &str,
        node: &str,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(writer()),
            ..Default::default()
        };
        self.controller.controller_publish_volume(request).await
    }

    async fn reclaim(
        &self,
        volume_id: &str,
    ) -> Result<Response<quoin_api::csi_addons::reclaimspace::ControllerReclaimSpaceResponse>, Status>
    {
        let request = ControllerReclaimSpaceRequest {
            volume_id: volume_id.to_owned(),
            parameters: map(&[("storage.kubernetes.io/csiProvisionerIdentity", "1-x")]),
            secrets: map(&[]),
        };
        ReclaimSpaceControllerClient::new(self.addons.clone())
            .controller_reclaim_space(request)
            .await
    }

    async fn rotate(
        &self,
        volume_id: &str,
        key: &str,
        secret: &str,
    ) -> Result<
        Response<quoin_api::csi_addons::encryptionkeyrotation::EncryptionKeyRotateResponse>,
        Status,
    > {
        let secrets = if secret.is_empty() { map(&[]) } else { map(&[("encryptionKey", secret)]) };
        let request = EncryptionKeyRotateRequest {
            volume_id: volume_id.to_owned(),
            // The sidecar sends neither a path nor an access type, and what the volume came with.
            volume_path: String::new(),
            encryption_key: key.to_owned(),
            parameters: map(&[("storage.kubernetes.io/csiProvisionerIdentity", "1-x")]),
            secrets,
            volume_capability: Some(VolumeCapability::default()),
        };
        EncryptionKeyRotationControllerClient::new(self.addons.clone())
            .encryption_key_rotate(request)
            .await
    }

    async fn capabilities(&self) -> Vec<Type> {
        let mut identity = IdentityClient::new(self.addons.clone());
        let told = identity.get_capabilities(GetCapabilitiesRequest {}).await.unwrap();
        told.into_inner().capabilities.into_iter().filter_map(|one| one.r#type).collect()
    }

    /// Makes an encrypted volume with this key.
    async fn encrypted(&mut self, name: &str) -> Volume {
        let request = CreateVolumeRequest {
            parameters: map(&[("encrypted", "true")]),
            secrets: map(&[("encryptionKey", KEY)]),
            ..create(name, 64 * MIB)
        };
        self.controller.create_volume(request).await.unwrap().into_inner().volume.unwrap()
    }

    /// Returns the code of an attempt to stage a volume with a key, and unstages it.
    async fn stage_with(&mut self, volume: &Volume, key: &str) -> Code {
        let stage = NodeStageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: self.text("stage"),
            volume_capability: Some(block(writer())),
            volume_context: volume.volume_context.clone(),
            secrets: map(&[("encryptionKey", key)]),
            ..Default::default()
        };
        let staged = code(&self.node.node_stage_volume(stage.clone()).await);
        let unstage = NodeUnstageVolumeRequest {
            volume_id: stage.volume_id,
            staging_target_path: stage.staging_target_path,
        };
        self.node.node_unstage_volume(unstage).await.unwrap();
        staged
    }
}

/// The same capability for a raw device.
fn block(capability: VolumeCapability) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(volume_capability::AccessType::Block(Default::default())),
        ..capability
    }
}

/// Proves ADDONS-FENCE-01, ADDONS-FENCE-02, ADDONS-RECLAIM-01, ADDONS-KEYROTATE-01: of the controller's half
/// of reclaiming space.
#[tokio::test]
async fn each_process_serves_and_tells_what_is_of_its_mode_and_the_rest_is_unimplemented() {
    use quoin_api::csi_addons::identity::capability::{
        encryption_key_rotation, network_fence, reclaim_space,
    };
    for mode in [Mode::ALL, Mode::CONTROLLER, Mode::NODE] {
        let world = World::start_in(mode).await;
        let told = world.capabilities().await;
        let fence = |kind: network_fence::Type| {
            told.iter().filter(|t| matches!(t, Type::NetworkFence(f) if f.r#type() == kind)).count()
        };
        assert_eq!(fence(network_fence::Type::NetworkFence), usize::from(mode.controller));
        assert_eq!(fence(network_fence::Type::GetClientsToFence), usize::from(mode.node));
        let offline = |t: &&Type| matches!(t, Type::ReclaimSpace(r) if r.r#type() == reclaim_space::Type::Offline);
        assert_eq!(told.iter().filter(offline).count(), usize::from(mode.controller));
        let rotation = encryption_key_rotation::Type::Encryptionkeyrotation;
        let rotates =
            |t: &&Type| matches!(t, Type::EncryptionKeyRotation(r) if r.r#type() == rotation);
        assert_eq!(told.iter().filter(rotates).count(), usize::from(mode.node));

        let of = |served: bool, code: Code| if served { code } else { Code::Unimplemented };
        let controller = [
            code(&world.fence(&[]).await),
            code(&world.unfence(&[]).await),
            code(&world.reclaim("").await),
        ];
        assert_eq!(controller, [of(mode.controller, Code::InvalidArgument); 3], "{mode:?}");
        let listed = world.fencing().list_cluster_fence(ListClusterFenceRequest::default()).await;
        assert_eq!(code(&listed), of(mode.controller, Code::Ok));
        let clients = world.fencing().get_fence_clients(GetFenceClientsRequest::default()).await;
        assert_eq!(code(&clients), of(mode.node, Code::Ok));
        let rotated = world.rotate("", "", "").await;
        assert_eq!(code(&rotated), of(mode.node, Code::InvalidArgument));
    }
}

/// Proves ADDONS-FENCE-03, ADDONS-FENCE-04, ADDONS-FENCE-06, ADDONS-FENCE-07, ADDONS-FENCE-08, ADDONS-FENCE-09,
/// ADDONS-FENCE-10, ADDONS-FENCE-11, ADDONS-FENCE-12, ADDONS-FENCE-14: of volumes that were never written; what
/// becomes of writers is proven with real processes.
#[tokio::test]
async fn a_fenced_node_has_no_volume_before_its_fence_is_lifted_and_others_are_not_disturbed() {
    let mut world = World::start().await;
    let (own, other) = (ADDRESSES[0].1, ADDRESSES[1].1);
    let block = format!("{own}/32");
    for wrong in [&[][..], &["192.0.2.11"], &["192.0.2.0/24", "2001:db8::/129"], &["node-a/32"]] {
        for refused in [code(&world.fence(wrong).await), code(&world.unfence(wrong).await)] {
            assert_eq!(refused, Code::InvalidArgument, "{wrong:?}");
        }
    }
    assert_eq!(world.fenced().await, Vec::<String>::new(), "no part of a call takes effect");

    // The node has a volume that its target has opened, and dies.
    let db = world.create("db", 64 * MIB).await.volume_id;
    world.publish(&db, NODE).await.unwrap();
    world.cluster.serve_volume(&db, NODE);
    let opened = |volume: &api::Volume| volume.health == "Online" || volume.epoch > 0;
    while !opened(&world.cluster.volumes().await[0]) {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    world.cluster.kill_node(NODE);
    world.fence(&[&block, "2001:db8::/64", &block]).await.unwrap();
    world.fence(&[&block]).await.unwrap();
    assert_eq!(world.fenced().await, [block.as_str(), "2001:db8::/64"]);

    for restarts in [false, true] {
        if restarts {
            world.stop_control().await;
            world.start_control().await;
            world.cluster.wait_for_nodes(2).await;
        }
        let more = world.create("more", 64 * MIB).await.volume_id;
        let refused = world.publish(&more, NODE).await;
        assert_eq!(code(&refused), Code::FailedPrecondition);
        assert!(refused.unwrap_err().message().contains(&block), "it names the fence");
        // Neither another node nor any pool is disturbed.
        world.publish(&more, OTHER_NODE).await.unwrap();
        let pools = world.cluster.client().list_pools(api::ListPoolsRequest {}).await.unwrap();
        let pools = pools.into_inner().pools;
        assert!(pools.iter().all(|pool| pool.state == "Online"), "{pools:?}");
        assert_eq!(world.fenced().await.len(), 2, "a fence outlives the controller's process");
    }
    // An address that another block covers stays fenced, and a block that is not fenced counts as lifted.
    let wider = "192.0.2.8/29";
    world.fence(&[wider]).await.unwrap();
    world.unfence(&[&block, "198.51.100.0/24", &format!("{other}/32")]).await.unwrap();
    let third = world.create("third", 64 * MIB).await.volume_id;
    assert_eq!(code(&world.publish(&third, NODE).await), Code::FailedPrecondition);
    assert_eq!(code(&world.publish(&third, OTHER_NODE).await), Code::FailedPrecondition, "it too");
    world.unfence(&[wider]).await.unwrap();
    world.unfence(&[wider]).await.unwrap();
    assert_eq!(world.fenced().await, ["2001:db8::/64"]);
    world.publish(&third, NODE).await.expect("without a restart of anything");
}

/// Proves ADDONS-FENCE-13, ADDONS-FENCE-14: of clients.
#[tokio::test]
async fn a_node_names_itself_and_its_own_addresses_to_whoever_may_fence_it() {
    let mut world = World::start().await;
    let request =
        GetFenceClientsRequest { parameters: map(&[("clusterID", "x")]), secrets: map(&[]) };
    let own = format!("{}/32", ADDRESSES[0].1);
    let began = std::time::Instant::now();
    // The first report of its target may be on its way.
    let told = loop {
        let told = world.fencing().get_fence_clients(request.clone()).await.unwrap().into_inner();
        let is_told = told.clients.iter().any(|one| one.addresses.iter().any(|c| c.cidr == own));
        if is_told || began.elapsed() > std::time::Duration::from_secs(20) {
            break told;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    let info = world.node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    let [client] = told.clients.as_slice() else { panic!("{told:?}") };
    assert_eq!(client.id, info.node_id);
    let blocks: Vec<&str> = client.addresses.iter().map(|cidr| cidr.cidr.as_str()).collect();
    assert!(!blocks.is_empty());
    for block in &blocks {
        assert!(block.ends_with("/32") || block.ends_with("/128"), "{block}");
        assert!(!block.starts_with("127.") && !block.starts_with("::1/"), "{block}");
    }
    assert!(blocks.contains(&own.as_str()), "{blocks:?}");
    assert!(!blocks.contains(&format!("{}/32", ADDRESSES[1].1).as_str()), "{blocks:?}");
    // Which addresses other nodes have too is the controller's to tell: a fence of those would cover them.
    world.stop_control().await;
    assert_eq!(code(&world.fencing().get_fence_clients(request).await), Code::Unavailable);
}

/// Proves ADDONS-FENCE-15, ADDONS-RECLAIM-13, ADDONS-KEYROTATE-09: where the deployment demands secrets; of the
/// controller's half of reclaiming space.
#[tokio::test]
async fn calls_without_the_secrets_that_are_demanded_are_not_authenticated_and_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let list = directory.path().join("callers.yaml");
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, b"token-of-the-maker");
    let text = format!(
        "callers:\n- name: maker\n  tokenSha256: {}\n  may: ['*']\n",
        hex::encode(digest.as_ref())
    );
    std::fs::write(&list, text).unwrap();
    let world = World::start_with(Mode::ALL, Callers::read(&list).unwrap()).await;
    let token = |token: &str| map(&[(quoin_csi::CALLER_TOKEN, token)]);
    for secrets in [map(&[]), token("token-of-nobody-here")] {
        let fence = FenceClusterNetworkRequest {
            secrets: secrets.clone(),
            cidrs: cidrs(&["192.0.2.0/24"]),
            ..Default::default()
        };
        let unfence = UnfenceClusterNetworkRequest {
            secrets: secrets.clone(),
            cidrs: cidrs(&["192.0.2.0/24"]),
            ..Default::default()
        };
        let list = ListClusterFenceRequest { secrets: secrets.clone(), ..Default::default() };
        let clients = GetFenceClientsRequest { secrets: secrets.clone(), ..Default::default() };
        let reclaim = ControllerReclaimSpaceRequest {
            volume_id: UNKNOWN.to_owned(),
            secrets: secrets.clone(),
            ..Default::default()
        };
        let mut fencing = world.fencing();
        let mut reclaiming = ReclaimSpaceControllerClient::new(world.addons.clone());
        let codes = [
            code(&fencing.fence_cluster_network(fence).await),
            code(&fencing.unfence_cluster_network(unfence).await),
            code(&fencing.list_cluster_fence(list).await),
            code(&fencing.get_fence_clients(clients).await),
            code(&reclaiming.controller_reclaim_space(reclaim).await),
            code(&world.rotate(UNKNOWN, NEXT, "").await),
        ];
        assert_eq!(codes, [Code::Unauthenticated; 6]);
    }
    let list =
        ListClusterFenceRequest { secrets: token("token-of-the-maker"), ..Default::default() };
    let fenced = world.fencing().list_cluster_fence(list).await.unwrap().into_inner();
    assert!(fenced.cidrs.is_empty());
}

/// Proves ADDONS-RECLAIM-02, ADDONS-RECLAIM-03, ADDONS-RECLAIM-05, ADDONS-RECLAIM-11, ADDONS-RECLAIM-12: of the
/// controller's half.
#[tokio::test]
async fn space_is_given_back_with_the_pools_figures_of_before_and_after() {
    let mut world = World::start().await;
    assert_eq!(code(&world.reclaim("").await), Code::InvalidArgument);
    assert_eq!(code(&world.reclaim(UNKNOWN).await), Code::NotFound);
    let db = world.create("db", 64 * MIB).await.volume_id;
    let answer = world.reclaim(&db).await.unwrap().into_inner();
    let (pre, post) = (answer.pre_usage.unwrap(), answer.post_usage.unwrap());
    assert_eq!(pre.usage_bytes, 3 * REPLICA_BYTES[0] as i64);
    assert_eq!(post.usage_bytes, 3 * REPLICA_BYTES[1] as i64);
    // Again, and beside each other: one at a time is carried out, and none harms another.
    let (one, two) = tokio::join!(world.reclaim(&db), world.reclaim(&db));
    let mut codes = [code(&one), code(&two)];
    codes.sort_by_key(|code| *code as i32);
    assert_eq!(codes, [Code::Ok, Code::Aborted]);
    let again = world.reclaim(&db).await.unwrap().into_inner();
    assert_eq!(again.pre_usage.unwrap(), again.post_usage.unwrap());
    // A caller whose time is over has begun it all the same, and its repeat succeeds.
    let mut request = tonic::Request::new(ControllerReclaimSpaceRequest {
        volume_id: db.clone(),
        ..Default::default()
    });
    request.set_timeout(std::time::Duration::from_millis(1));
    let _late = ReclaimSpaceControllerClient::new(world.addons.clone())
        .controller_reclaim_space(request)
        .await;
    loop {
        match world.reclaim(&db).await {
            Ok(_) => break,
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Proves ADDONS-KEYROTATE-02, ADDONS-KEYROTATE-03, ADDONS-KEYROTATE-04, ADDONS-KEYROTATE-05,
/// ADDONS-KEYROTATE-08, ADDONS-KEYROTATE-09, ADDONS-KEYROTATE-10, ADDONS-IDENTITY-12: of its keys.
#[tokio::test]
async fn a_rotated_key_opens_the_volume_at_once_and_the_former_one_no_more() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    // One thread runs all of this test, the server included.
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut world = World::start().await;
    assert_eq!(code(&world.rotate("", NEXT, "").await), Code::InvalidArgument);
    assert_eq!(code(&world.rotate(UNKNOWN, NEXT, "").await), Code::NotFound);
    let plain = world.create("plain", 64 * MIB).await;
    assert_eq!(code(&world.rotate(&plain.volume_id, NEXT, "").await), Code::FailedPrecondition);

    let volume = world.encrypted("db").await;
    let id = volume.volume_id.clone();
    world.publish(&id, NODE).await.unwrap();
    // Nothing here opens it yet, or there is no new key: the key that it has stays in force.
    assert_eq!(code(&world.rotate(&id, "", "").await), Code::Unauthenticated);
    assert_eq!(code(&world.rotate(&id, NEXT, "").await), Code::Unauthenticated);
    assert_eq!(code(&world.rotate(&id, "", NEXT).await), Code::Unauthenticated);
    assert_eq!(code(&world.rotate(&id, NEXT, LAST).await), Code::Unauthenticated);
    assert_eq!(code(&world.rotate(&id, "short", "").await), Code::InvalidArgument);
    assert_eq!(world.stage_with(&volume, KEY).await, Code::Ok);
    assert_eq!(world.stage_with(&volume, NEXT).await, Code::Unauthenticated);

    // The target has the data key since the volume was staged: the new key alone is sent, as the secret.
    world.rotate(&id, "", NEXT).await.unwrap();
    assert_eq!(world.stage_with(&volume, KEY).await, Code::Unauthenticated);
    assert_eq!(world.stage_with(&volume, NEXT).await, Code::Ok);
    world.rotate(&id, "", NEXT).await.expect("it is in force already");
    world.rotate(&id, NEXT, "").await.expect("it is in force already");
    // A key of another kind, in the field that is meant for it, beside the one that opens the volume.
    world.rotate(&id, LAST, NEXT).await.unwrap();
    assert_eq!(world.stage_with(&volume, NEXT).await, Code::Unauthenticated);
    assert_eq!(world.stage_with(&volume, LAST).await, Code::Ok);

    // A volume that is in use nowhere: the key that opens it comes too.
    let other = world.encrypted("other").await;
    assert_eq!(code(&world.rotate(&other.volume_id, NEXT, "").await), Code::Unauthenticated);
    world.rotate(&other.volume_id, NEXT, KEY).await.unwrap();
    let volumes = world.cluster.volumes().await;
    let slots = |volume: &api::Volume| {
        let spec = volume.spec.as_ref().unwrap();
        let slots = &spec.encryption.as_ref().unwrap().slots;
        slots.iter().map(|slot| slot.name.clone()).collect::<Vec<_>>()
    };
    let encrypted = volumes.iter().filter(|v| v.spec.as_ref().unwrap().encryption.is_some());
    for volume in encrypted {
        assert_eq!(slots(volume), ["csi"], "no former slot stays");
    }
    let request = EncryptionKeyRotateRequest {
        encryption_key: LAST.to_owned(),
        secrets: map(&[("encryptionKey", NEXT)]),
        ..Default::default()
    };
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("EncryptionKeyRotate"), "the log has the calls");
    for (what, text) in [("log", text), ("message", format!("{request:?}"))] {
        for key in [KEY, NEXT, LAST] {
            assert!(!text.contains(key), "a key is in the {what}");
        }
    }
}
