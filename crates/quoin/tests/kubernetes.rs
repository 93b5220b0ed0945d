//! The chart for Kubernetes, by the real helm and the types of the API's own client.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::dev::{python_with, skipped};

#[test]
fn the_chart_renders_objects_of_the_types_of_kubernetes_and_commands_of_this_binary() {
    let Some(python) = python_with("kubernetes, yaml", "the client of Kubernetes") else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../kubernetes");
    let mut command = Command::new(python);
    command.arg(root.join("tests/kubernetes/chart.py")).arg("--home").arg(home);
    let output = command.args(["--quoin", env!("CARGO_BIN_EXE_quoin")]).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
}

/// Packages that the recipe of the image installs into what runs.
fn packages_of_the_image() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let recipe = std::fs::read_to_string(root.join("deploy/image/Containerfile")).unwrap();
    let (_, runs) = recipe.split_once("FROM docker.io/library/debian:").unwrap();
    let (_, installed) = runs.split_once("--no-install-recommends ").unwrap();
    let (installed, _) = installed.split_once(" \\\n").unwrap();
    installed.split(' ').map(str::to_owned).collect()
}

#[test]
fn the_recipe_of_the_image_has_the_tools_that_a_node_calls_and_is_small() {
    let packages = packages_of_the_image();
    let tools = [
        quoin_node::MKFS_EXT4,
        quoin_node::E2FSCK,
        quoin_node::RESIZE2FS,
        quoin_node::MKFS_XFS,
        quoin_node::XFS_GROWFS,
    ];
    for tool in tools {
        assert!(packages.iter().any(|package| package == tool.package), "{}", tool.name);
    }
    // blkid and partx; mount(8), which this tree calls by systemd's units alone.
    assert!(["util-linux", "mount"].iter().all(|name| packages.iter().any(|one| one == name)));
    let mut command = Command::new("dpkg-query");
    command.args(["--show", "--showformat", "${Installed-Size}\n"]).args(&packages);
    match command.stderr(Stdio::null()).output() {
        // KiB of all packages, of which the base image has a part.
        Ok(output) if output.status.success() => {
            let sizes = String::from_utf8(output.stdout).unwrap();
            let kib: u64 = sizes.lines().map(|size| size.parse::<u64>().unwrap()).sum();
            assert!(kib < 30 << 10, "{kib} KiB beside the binary");
        }
        _ => skipped("not all of the image's packages are installed here"),
    }
}

#[test]
fn the_bill_of_materials_names_every_crate_of_the_lock_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let lock = root.join("Cargo.lock");
    let mut command = Command::new("python3");
    let output = command.arg(root.join("deploy/image/sbom.py")).arg("--lock").arg(&lock).output();
    let Some(output) = output.ok().filter(|output| output.status.success()) else {
        skipped("needs python3 of 3.11 or later");
        return;
    };
    let bill: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let named = bill["components"].as_array().unwrap().len();
    let locked = std::fs::read_to_string(lock).unwrap().matches("[[package]]").count();
    assert!(locked > 100 && named == locked, "{named} of {locked}");
    assert_eq!(bill["metadata"]["component"]["name"], "quoin");
}
