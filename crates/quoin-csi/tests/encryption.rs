//! Encrypted volumes through the services: which calls demand the key, and that it stays where it
//! is.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::common::*;
use quoin_api::csi::*;
use tonic::Code;

const KEY: &str = "correct horse battery";
const OTHER: &str = "incorrect horse battery";

fn encrypted(key: Option<&str>) -> CreateVolumeRequest {
    CreateVolumeRequest {
        parameters: map(&[("encrypted", "true")]),
        secrets: key.map(|key| map(&[("encryptionKey", key)])).unwrap_or_default(),
        ..create("db", 64 * MIB)
    }
}

/// Proves CSI-ERR-11: for CreateVolume.
#[tokio::test]
async fn an_encrypted_volume_is_made_with_its_key_and_found_again_with_it_alone() {
    let mut world = World::start().await;
    let absent = world.controller.create_volume(encrypted(None)).await;
    assert_eq!(code(&absent), Code::Unauthenticated);
    let short = world.controller.create_volume(encrypted(Some("hunter2"))).await;
    assert_eq!(code(&short), Code::InvalidArgument);
    assert!(world.cluster.volumes().await.is_empty());
    let mut ids = Vec::new();
    for _ in 0..2 {
        let made = world.controller.create_volume(encrypted(Some(KEY))).await.unwrap();
        ids.push(made.into_inner().volume.unwrap().volume_id);
    }
    assert_eq!(ids[0], ids[1]);
    let other = world.controller.create_volume(encrypted(Some(OTHER))).await;
    assert_eq!(code(&other), Code::Unauthenticated);
    let plain = world.controller.create_volume(create("db", 64 * MIB)).await;
    assert_eq!(code(&plain), Code::AlreadyExists);
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn files_with(directory: PathBuf, words: &str) -> Vec<PathBuf> {
    let (mut directories, mut found) = (vec![directory], Vec::new());
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file() {
                let content = std::fs::read(entry.path()).unwrap();
                if content.windows(words.len()).any(|window| window == words.as_bytes()) {
                    found.push(entry.path());
                }
            }
        }
    }
    found
}

/// Proves CSI-ERR-11, CSI-SECRET-01: for NodeStageVolume, and that the key is in no log message, no
/// refusal and no file of the driver, the node or the controller.
#[tokio::test]
async fn staging_demands_the_key_before_anything_is_attached_and_it_stays_in_memory() {
    let log = Log::default();
    let writer_of_log = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer_of_log.clone())
        .finish();
    // One thread runs all of this test, the server included.
    let _guard = tracing::subscriber::set_default(subscriber);
    tracing::info!("entries are kept");
    let mut world = World::start().await;
    let made = world.controller.create_volume(encrypted(Some(KEY))).await.unwrap();
    let volume_id = made.into_inner().volume.unwrap().volume_id;
    world
        .controller
        .controller_publish_volume(ControllerPublishVolumeRequest {
            volume_id: volume_id.clone(),
            node_id: NODE.into(),
            volume_capability: Some(writer()),
            ..Default::default()
        })
        .await
        .unwrap();
    let stage = |key: Option<&str>, staging_target_path: String| NodeStageVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path,
        volume_capability: Some(writer()),
        secrets: key.map(|key| map(&[("encryptionKey", key)])).unwrap_or_default(),
        ..Default::default()
    };
    let mut messages = String::new();
    for (key, expected) in [
        (None, Code::Unauthenticated),
        (Some(OTHER), Code::Unauthenticated),
        (Some("hunter2"), Code::InvalidArgument),
    ] {
        let answer = world.node.node_stage_volume(stage(key, world.text("stage"))).await;
        assert_eq!(code(&answer), expected, "{key:?}");
        messages += answer.unwrap_err().message();
        assert!(world.attacher.attached().is_empty());
    }
    if can_mount() {
        for _ in 0..2 {
            world.node.node_stage_volume(stage(Some(KEY), world.text("stage"))).await.unwrap();
        }
        let wrong = world.node.node_stage_volume(stage(Some(OTHER), world.text("stage"))).await;
        assert_eq!(code(&wrong), Code::Unauthenticated, "staged, and the key is wrong");
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("entries are kept"), "{log}");
    for key in [KEY, OTHER, "hunter2"] {
        assert!(!messages.contains(key) && !log.contains(key), "{key}");
        let files = files_with(world.path(""), key);
        assert!(files.is_empty(), "{files:?}");
    }
}
