//! Clients that are not Rust: the whole flow, driven by Python's grpcio with stubs made from
//! the project's own `.proto`.

mod common;

use std::path::Path;
use std::process::Stdio;

use common::*;

/// A Python that has grpcio and grpcio-tools: the one that `QUOIN_PYTHON` names (which must
/// work then), or the system's if it happens to have them.
async fn python() -> Option<String> {
    if let Ok(named) = std::env::var("QUOIN_PYTHON") {
        return Some(named);
    }
    let probe = tokio::process::Command::new("python3")
        .args(["-c", "import grpc, grpc_tools"])
        .stderr(Stdio::null())
        .status()
        .await;
    if probe.is_ok_and(|status| status.success()) {
        return Some("python3".to_owned());
    }
    eprintln!(
        "skipped: no Python with grpcio; make one with `python3 -m venv V && V/bin/pip install -r \
         tests/python/requirements.txt` and set QUOIN_PYTHON=V/bin/python"
    );
    None
}

/// Proves CSI-LIFECYCLE-02: and that messages and statuses are those of other libraries, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_python_client_drives_volumes_through_their_whole_life() {
    let Some(python) = python().await else { return };
    let world = World::start().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/python/csi_client.py");
    let mut command = tokio::process::Command::new(python);
    command.arg(script).arg("--socket").arg(world.path("socket/csi.sock"));
    if !can_mount() {
        command.arg("--no-mount");
    }
    let output = command.output().await.unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{text}");
    assert!(text.contains("all answers were as the interface asks"), "{text}");
    assert!(world.cluster.volumes().await.is_empty());
    world.assert_node_is_clean();
}
