//! CSI against real processes, by a client that is not Rust: Python's grpcio with stubs made from
//! the project's own `.proto`.

use crate::common::dev as cluster;

use std::path::Path;
use std::process::Command;

use cluster::{Dev, Scratch, can_attach, python_with};

/// The clients ask for the health of volumes, which came with edition 1.13.
const NEWEST_EDITION: &[&str] = &["--csi-edition", "1.13"];

/// The rows that a client can see, as docs/conformance.md lists them.
#[test]
fn a_python_client_asserts_the_rows_of_the_document_of_conformance() {
    let Some(python) = python_with("grpc, grpc_tools", "grpcio") else { return };
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("conformance");
    let dev = Dev::start(&scratch.cluster(), NEWEST_EDITION);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(python);
    command.arg(root.join("tests/python/conformance.py")).arg("--dev").arg(&dev.directory);
    let output = command.arg("--check").arg(root.join("docs/conformance.md")).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    println!("{text}");
    if !output.status.success() {
        dev.show_logs();
        panic!("{text}");
    }
    assert!(dev.ok(&["volume", "list"]).contains("no volumes"));
    dev.stop();
}

/// Proves CSI-CTRLPUBLISH-13, CSI-CREATEVOLUME-06: with real pools, target and devices; without root
/// the controller's part.
#[test]
fn a_python_client_passes_all_csi_steps_on_real_processes() {
    let Some(python) = python_with("grpc, grpc_tools", "grpcio") else { return };
    let scratch = Scratch::new("csi");
    let mut flags = NEWEST_EDITION.to_vec();
    if !can_attach() {
        flags.push("--no-attach");
    }
    let dev = Dev::start(&scratch.cluster(), &flags);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/python/csi_client.py");
    let mut command = Command::new(python);
    command.arg(script).arg("--socket").arg(dev.directory.join("run/csi/csi.sock"));
    if !can_attach() {
        let node = dev.json(&["node", "list"])[0]["name"].as_str().unwrap().to_owned();
        command.args(["--controller-only", &node]);
    }
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    println!("{text}");
    if !output.status.success() || !text.contains("all answers were as the interface asks") {
        dev.show_logs();
        panic!("{text}");
    }
    assert!(dev.ok(&["volume", "list"]).contains("no volumes"));
    dev.stop();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(scratch.0.to_str().unwrap()), "{mounts}");
}
