//! NodeReclaimSpace, with real file systems on loop devices.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use quoin_api::csi::volume_capability::access_mode::Mode as AccessMode;
use quoin_api::csi::*;
use quoin_api::csi_addons::reclaimspace::reclaim_space_node_client::ReclaimSpaceNodeClient;
use quoin_api::csi_addons::reclaimspace::{NodeReclaimSpaceRequest, NodeReclaimSpaceResponse};
use quoin_csi::{Callers, Mode};
use tonic::{Code, Response, Status};

use crate::common::*;

async fn reclaim(
    world: &World,
    request: NodeReclaimSpaceRequest,
) -> Result<Response<NodeReclaimSpaceResponse>, Status> {
    ReclaimSpaceNodeClient::new(world.addons.clone()).node_reclaim_space(request).await
}

/// Returns a call as the field's sidecar makes it: with the staging path alone.
fn request(stage: &NodeStageVolumeRequest) -> NodeReclaimSpaceRequest {
    NodeReclaimSpaceRequest {
        volume_id: stage.volume_id.clone(),
        staging_target_path: stage.staging_target_path.clone(),
        volume_capability: stage.volume_capability.clone(),
        ..Default::default()
    }
}

/// Returns the bytes that the file below the volume's device has on the disk.
fn used_bytes(world: &World, volume: &str) -> u64 {
    fs::metadata(world.path("devices").join(volume)).unwrap().blocks() * 512
}

fn write_synced(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    fs::File::open(path).unwrap().sync_all().unwrap();
}

/// Proves ADDONS-RECLAIM-02, ADDONS-RECLAIM-03, ADDONS-RECLAIM-05, ADDONS-RECLAIM-06, ADDONS-RECLAIM-08,
/// ADDONS-RECLAIM-09: by the blocks below the device; pools have no figure of the call.
#[tokio::test]
async fn a_mounted_volume_gives_back_what_its_files_left_and_keeps_all_else() {
    const MIB: usize = 1 << 20;
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(writer()).await;
    let good = request(&stage);
    let with = |change: &dyn Fn(&mut NodeReclaimSpaceRequest)| {
        let mut request = good.clone();
        change(&mut request);
        request
    };
    assert_eq!(code(&reclaim(&world, good.clone()).await), Code::NotFound, "not staged here");
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let publish = world.publish_at(&stage, "pods/a");
    world.node.node_publish_volume(publish.clone()).await.unwrap();
    let (kept, gone) = (world.path("pods/a/kept"), world.path("pods/a/gone"));
    let content: Vec<u8> = (0..MIB).map(|at| (at / 4096) as u8 ^ at as u8 | 1).collect();
    write_synced(&kept, &content);
    write_synced(&gone, &vec![0xa5; 16 * MIB]);
    fs::remove_file(&gone).unwrap();
    // ext4 trims only blocks that its journal has released.
    rustix::fs::syncfs(fs::File::open(world.path("pods/a")).unwrap()).unwrap();
    let full = used_bytes(&world, &stage.volume_id);
    let foreign = world.text("pods/other");
    for (what, request, expected) in [
        ("no volume_id", with(&|one| one.volume_id.clear()), Code::InvalidArgument),
        ("unknown", with(&|one| one.volume_id = UNKNOWN.into()), Code::NotFound),
        ("no path", with(&|one| one.staging_target_path.clear()), Code::InvalidArgument),
        ("relative", with(&|one| one.staging_target_path = "x".into()), Code::InvalidArgument),
        ("relative", with(&|one| one.volume_path = "x".into()), Code::InvalidArgument),
        ("foreign", with(&|one| one.staging_target_path = foreign.clone()), Code::NotFound),
        ("foreign", with(&|one| one.volume_path = foreign.clone()), Code::NotFound),
    ] {
        assert_eq!(code(&reclaim(&world, request).await), expected, "{what}");
    }
    assert_eq!(used_bytes(&world, &stage.volume_id), full, "nothing was trimmed");
    let answer = reclaim(&world, good.clone()).await.unwrap().into_inner();
    assert_eq!((answer.pre_usage, answer.post_usage), (None, None), "there is no figure of it");
    let now = used_bytes(&world, &stage.volume_id);
    assert!(now + 15 * MIB as u64 <= full, "{full} {now}");
    // A repeat, by the target's path and with any capability, does no harm.
    let repeat = with(&|one| {
        one.volume_path = publish.target_path.clone();
        one.staging_target_path.clear();
        one.volume_capability.as_mut().unwrap().access_type = None;
    });
    reclaim(&world, repeat).await.unwrap();
    assert!(fs::read(&kept).unwrap() == content, "what was kept is another");
}

/// Proves ADDONS-RECLAIM-10: files of a ramfs cannot get holes, so devices over them take no discards.
#[tokio::test]
async fn a_file_system_that_cannot_be_trimmed_is_refused_as_not_served() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let devices = world.path("devices");
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("none", &devices, "ramfs", flags, None).unwrap();
    let stage = world.published(writer()).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let refused = reclaim(&world, request(&stage)).await;
    assert_eq!(code(&refused), Code::Unimplemented);
    assert!(refused.unwrap_err().message().contains("cannot be trimmed"));
    let unstage = NodeUnstageVolumeRequest {
        volume_id: stage.volume_id.clone(),
        staging_target_path: stage.staging_target_path.clone(),
    };
    world.node.node_unstage_volume(unstage).await.unwrap();
}

/// Proves ADDONS-RECLAIM-07, ADDONS-RECLAIM-12: calls at the same time, too.
#[tokio::test]
async fn no_block_of_a_block_volume_is_discarded() {
    if !can_mount() {
        return;
    }
    let mut world = World::start().await;
    let stage = world.published(block_capability(AccessMode::SingleNodeWriter)).await;
    world.node.node_stage_volume(stage.clone()).await.unwrap();
    let device = world.attacher.attached().remove(0);
    write_synced(&device, &[0; 1 << 20]);
    let full = used_bytes(&world, &stage.volume_id);
    assert!(full >= 1 << 20);
    let [one, other] = [(); 2].map(|()| reclaim(&world, request(&stage)));
    for answer in <[_; 2]>::from(tokio::join!(one, other)) {
        assert!(matches!(code(&answer), Code::Ok | Code::Aborted));
    }
    assert_eq!(code(&reclaim(&world, request(&stage)).await), Code::Ok, "a later repeat");
    assert_eq!(used_bytes(&world, &stage.volume_id), full);
    world.attacher.is_cut_off.store(true, Ordering::Relaxed);
    assert_eq!(code(&reclaim(&world, request(&stage)).await), Code::Ok);
}

/// Proves ADDONS-RECLAIM-01, ADDONS-RECLAIM-13: of the node's call.
#[tokio::test]
async fn the_node_alone_serves_its_call_and_a_stranger_trims_nothing() {
    let world = World::start_in(Mode::CONTROLLER).await;
    let answer = reclaim(&world, NodeReclaimSpaceRequest::default()).await;
    assert_eq!(code(&answer), Code::Unimplemented);
    let list = tempfile::NamedTempFile::new().unwrap();
    fs::write(list.path(), "callers: []").unwrap();
    let world = World::start_with(Mode::NODE, Callers::read(list.path()).unwrap()).await;
    let request = NodeReclaimSpaceRequest {
        volume_id: UNKNOWN.into(),
        volume_path: "/somewhere".into(),
        ..Default::default()
    };
    assert_eq!(code(&reclaim(&world, request).await), Code::Unauthenticated);
}
