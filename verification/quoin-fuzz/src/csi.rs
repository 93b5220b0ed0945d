//! Requests of the CSI controller, identity and snapshot metadata services, over a socket, to a plugin whose
//! controller is the real one with no pools (so nothing is ever made). Node requests are left out:
//! they would mount on this host by the fuzzer's choice.

use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use prost::Message;
use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::identity_client::IdentityClient;
use quoin_api::csi::snapshot_metadata_client::SnapshotMetadataClient;
use quoin_api::csi::*;
use quoin_csi::{Backend, Mode, Plugin, PluginOptions};
use quoin_identity::unix_channel;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Code, Status};

struct World {
    runtime: Runtime,
    channel: Channel,
    // Both are removed at the end of the process.
    _directory: tempfile::TempDir,
    _running: watch::Sender<bool>,
}

/// Panics counted: one in a service ends only a task of the runtime.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            before(info);
        }));
        let runtime = Runtime::new().expect("a runtime");
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (running, stopped) = watch::channel(false);
        let channel = runtime.block_on(start(directory.path(), stopped));
        World { runtime, channel, _directory: directory, _running: running }
    })
}

async fn start(directory: &std::path::Path, stopped: watch::Receiver<bool>) -> Channel {
    let home = directory.join("controller");
    quoin_control::init(&home, Default::default()).await.expect("a cluster");
    let options = quoin_control::Options::new(&home);
    let controller = Arc::new(quoin_control::open(&options).await.expect("its controller"));
    let admin = directory.join("admin.sock");
    let listener = UnixListener::bind(&admin).expect("the admin socket");
    let until = stopped.clone();
    tokio::spawn(async move { quoin_control::serve(controller, listener, None, until).await });
    let plugin = Plugin::new(PluginOptions {
        metrics: quoin_csi::Metrics::default(),
        callers: quoin_csi::Callers::default(),
        driver_name: quoin_csi::DRIVER_NAME.to_owned(),
        mode: Mode::CONTROLLER,
        backend: Backend::new(unix_channel(&admin)),
        node: None,
        edition: quoin_csi::Edition::NEWEST,
        volume_mount_group: true,
    })
    .expect("a plugin");
    let socket = directory.join("csi.sock");
    let listener = UnixListener::bind(&socket).expect("the CSI socket");
    tokio::spawn(async move { plugin.serve(listener, stopped).await });
    unix_channel(&socket)
}

/// The first byte chooses the call; the rest is its request.
pub fn run(input: &[u8]) {
    let Some((call, rest)) = input.split_first() else { return };
    let world = world();
    let answer = world.runtime.block_on(ask(world.channel.clone(), *call, rest));
    assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a service panicked");
    if let Some(Err(status)) = answer {
        let allowed = !matches!(status.code(), Code::Unknown | Code::Internal | Code::DataLoss);
        assert!(allowed, "hostile input is answered {status:?}");
    }
}

/// Sends one request; `None`: the bytes do not decode as a request.
async fn ask(channel: Channel, call: u8, bytes: &[u8]) -> Option<Result<(), Status>> {
    fn parsed<T: Message + Default>(bytes: &[u8]) -> Option<T> {
        T::decode(bytes).ok()
    }
    let mut to = ControllerClient::new(channel.clone());
    Some(match call % 13 {
        0 => to.create_volume(parsed::<CreateVolumeRequest>(bytes)?).await.map(drop),
        1 => to.delete_volume(parsed::<DeleteVolumeRequest>(bytes)?).await.map(drop),
        2 => {
            let request = parsed::<ControllerPublishVolumeRequest>(bytes)?;
            to.controller_publish_volume(request).await.map(drop)
        }
        3 => {
            let request = parsed::<ControllerUnpublishVolumeRequest>(bytes)?;
            to.controller_unpublish_volume(request).await.map(drop)
        }
        4 => {
            let request = parsed::<ValidateVolumeCapabilitiesRequest>(bytes)?;
            to.validate_volume_capabilities(request).await.map(drop)
        }
        5 => to.list_volumes(parsed::<ListVolumesRequest>(bytes)?).await.map(drop),
        6 => to.get_capacity(parsed::<GetCapacityRequest>(bytes)?).await.map(drop),
        7 => {
            let request = parsed::<ControllerGetVolumeRequest>(bytes)?;
            to.controller_get_volume(request).await.map(drop)
        }
        8 => {
            let request = parsed::<ControllerExpandVolumeRequest>(bytes)?;
            to.controller_expand_volume(request).await.map(drop)
        }
        9 => to.create_snapshot(parsed::<CreateSnapshotRequest>(bytes)?).await.map(drop),
        11 => {
            let request = parsed::<GetMetadataAllocatedRequest>(bytes)?;
            SnapshotMetadataClient::new(channel).get_metadata_allocated(request).await.map(drop)
        }
        12 => {
            let request = parsed::<GetMetadataDeltaRequest>(bytes)?;
            SnapshotMetadataClient::new(channel).get_metadata_delta(request).await.map(drop)
        }
        _ => {
            let request = parsed::<GetPluginInfoRequest>(bytes)?;
            IdentityClient::new(channel).get_plugin_info(request).await.map(drop)
        }
    })
}

pub fn seeds() -> Vec<Vec<u8>> {
    let capability = VolumeCapability {
        access_mode: Some(volume_capability::AccessMode { mode: 1 }),
        access_type: Some(volume_capability::AccessType::Mount(volume_capability::MountVolume {
            fs_type: "ext4".into(),
            ..Default::default()
        })),
    };
    let id = "0123456789abcdef0123456789abcdef".to_owned();
    let create = CreateVolumeRequest {
        name: "pvc-1".into(),
        capacity_range: Some(CapacityRange { required_bytes: 1 << 30, limit_bytes: 2 << 30 }),
        volume_capabilities: vec![capability.clone()],
        parameters: [("replicas".to_owned(), "3".to_owned())].into(),
        ..Default::default()
    };
    let publish = ControllerPublishVolumeRequest {
        volume_id: id.clone(),
        node_id: "node".into(),
        volume_capability: Some(capability.clone()),
        ..Default::default()
    };
    let validate = ValidateVolumeCapabilitiesRequest {
        volume_id: id.clone(),
        volume_capabilities: vec![capability.clone()],
        ..Default::default()
    };
    let capacity =
        GetCapacityRequest { volume_capabilities: vec![capability], ..Default::default() };
    let expand = ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(CapacityRange { required_bytes: 5 << 30, limit_bytes: 0 }),
        ..Default::default()
    };
    let list = ListVolumesRequest { max_entries: 3, starting_token: "x".into() };
    let mut seeds: Vec<Vec<u8>> = vec![
        create.encode_to_vec(),
        DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() }.encode_to_vec(),
        publish.encode_to_vec(),
        ControllerUnpublishVolumeRequest { volume_id: id.clone(), ..Default::default() }
            .encode_to_vec(),
        validate.encode_to_vec(),
        list.encode_to_vec(),
        capacity.encode_to_vec(),
        ControllerGetVolumeRequest { volume_id: id }.encode_to_vec(),
        expand.encode_to_vec(),
        Vec::new(),
        Vec::new(),
    ];
    for (call, seed) in (0u8..).zip(&mut seeds) {
        seed.insert(0, call);
    }
    seeds
}
