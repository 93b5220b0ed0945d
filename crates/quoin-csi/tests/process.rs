//! The node process as `quoin node` runs it: joined with a token, over mutual TLS, known by its own
//! reports.

use std::io::{Read, Write};
use std::time::Duration;

use crate::common::*;
use quoin_api::control::CreateJoinTokenRequest;
use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::identity_client::IdentityClient;
use quoin_api::csi::node_client::NodeClient;
use quoin_api::csi::*;
use quoin_api::csi_addons::identity::{
    self, identity_client::IdentityClient as AddonsIdentityClient,
};
use quoin_csi::{Mode, Options};
use quoin_identity::{Role, join, unix_channel};
use tokio::sync::watch;
use tonic::Code;

/// Proves CSI-SERVICES-01, CSI-SERVICES-02, CSI-OPS-01, CSI-SECURITY-04, CSI-SECURITY-05, CSI-CTRLPUBLISH-03,
/// CSI-NODEINFO-05, CSI-PACKAGING-05: the face reaches a controller elsewhere over mutual TLS, and its node is known
/// by its own reports.
/// Proves ADDONS-IDENTITY-01, ADDONS-IDENTITY-09: of the process as it is run, on the socket of CSI-Addons.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joined_process_serves_volumes_over_mutual_tls_and_leaves_no_socket_behind() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    for directory in ["run", "csi"] {
        std::fs::create_dir(path(directory)).unwrap();
    }
    let mut cluster = ControlPlane::start(path("controller"), path("run/admin.sock")).await;
    cluster.wait_for_nodes(0).await;
    let asked =
        CreateJoinTokenRequest { role: "node".into(), manages_volumes: true, ..Default::default() };
    let token = cluster.client().create_join_token(asked).await.unwrap().into_inner();
    let (address, token) = (cluster.address(), token.token.parse().unwrap());
    join(&address, &token, Role::Node, NODE, &path("node")).await.unwrap();

    let socket = path("csi/csi.sock");
    let endpoint = format!("unix://{}", socket.display());
    let options = Options::new(path("node"), path("run"), address, endpoint);
    let addons = path("addons/csi-addons.sock");
    let options = Options {
        mode: Mode::ALL,
        csi_addons_endpoint: Some(format!("unix://{}", addons.display())),
        ..options
    };
    let (stop, stopped) = watch::channel(false);
    let process = tokio::spawn(quoin_csi::run(options, stopped));
    cluster.wait_for_nodes(1).await;

    let channel = unix_channel(&socket);
    let mut controller = ControllerClient::new(channel.clone());
    let info = NodeClient::new(channel.clone()).node_get_info(NodeGetInfoRequest {}).await;
    assert_eq!(info.unwrap().into_inner().node_id, NODE, "the name in the certificate");
    let probe = IdentityClient::new(channel).probe(ProbeRequest {}).await;
    assert_eq!(code(&probe), Code::FailedPrecondition, "no attach process runs");
    assert!(probe.unwrap_err().message().contains("attach.sock"));
    let mut identity = AddonsIdentityClient::new(unix_channel(&addons));
    let probe = identity.probe(identity::ProbeRequest {}).await;
    assert_eq!(code(&probe), Code::FailedPrecondition, "no attach process runs");
    assert!(probe.unwrap_err().message().contains("attach.sock"));

    let made = controller.create_volume(create("db", 64 * MIB)).await.unwrap().into_inner();
    let volume_id = made.volume.unwrap().volume_id;
    let publish = ControllerPublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: NODE.into(),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    controller.controller_publish_volume(publish).await.unwrap();
    let get = ControllerGetVolumeRequest { volume_id: volume_id.clone() };
    let shown = controller.controller_get_volume(get.clone()).await.unwrap().into_inner();
    assert_eq!(shown.status.unwrap().published_node_ids, [NODE]);
    let unpublish =
        ControllerUnpublishVolumeRequest { volume_id: volume_id.clone(), ..Default::default() };
    controller.controller_unpublish_volume(unpublish).await.unwrap();
    let delete = DeleteVolumeRequest { volume_id, ..Default::default() };
    controller.delete_volume(delete).await.unwrap();
    assert_eq!(code(&controller.controller_get_volume(get).await), Code::NotFound);

    assert!(!process.is_finished(), "an idle process keeps running");
    // A caller that sends nothing more, and does not notice the end of the process either.
    let mut silent = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    silent.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    // The server's settings arrive once the connection is served.
    silent.read_exact(&mut [0; 9]).unwrap();
    stop.send_replace(true);
    let ended = tokio::time::timeout(Duration::from_secs(30), process).await;
    ended.expect("the process ends").unwrap().unwrap();
    for directory in ["csi", "addons"] {
        let left = std::fs::read_dir(path(directory)).unwrap().count();
        assert_eq!(left, 0, "the socket in {directory} is removed");
    }
    cluster.stop().await;
}

/// Proves CSI-SECURITY-02: of the node process, which serves on no TCP port.
/// Proves ADDONS-IDENTITY-02: of a socket of CSI-Addons that breaks a rule; no variable names one
/// (CSI-ENV-02).
#[tokio::test]
async fn wrong_options_end_the_process_with_their_reason() {
    let directory = tempfile::tempdir().unwrap();
    let options = |endpoint: &str| {
        Options::new(directory.path().join("node"), directory.path(), "127.0.0.1:1", endpoint)
    };
    let (_stop, stopped) = watch::channel(false);
    let good = format!("unix://{}/csi.sock", directory.path().display());
    for (endpoint, word) in [
        ("", "CSI_ENDPOINT"),
        ("tcp://127.0.0.1:1", "unix://"),
        ("unix:///run/x", ".sock"),
        (good.as_str(), "node"),
    ] {
        let error = quoin_csi::run(options(endpoint), stopped.clone()).await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    let beside = format!("unix://{}/csi-addons.sock", directory.path().display());
    for (addons, word) in [
        ("", "--csi-addons-endpoint is not set"),
        ("unix://addons.sock", "--csi-addons-endpoint is \"unix://addons.sock\""),
        ("unix:///run/addons", ".sock"),
        ("tcp://127.0.0.1:1", "unix://"),
        (beside.as_str(), "another directory"),
    ] {
        let options = Options { csi_addons_endpoint: Some(addons.to_owned()), ..options(&good) };
        let error = quoin_csi::run(options, stopped.clone()).await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}
