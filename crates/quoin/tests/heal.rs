//! Permanent loss of a pool with replicas of many volumes, as `quoin bench --only heal` measures it
//! with two hundred of them.

use std::process::{Command, Stdio};

/// The benchmark itself fails where a volume is not whole in time or has wrong content.
#[test]
fn a_lost_pool_is_healed_in_all_volumes_with_a_bounded_number_of_records_written() {
    let directory = tempfile::tempdir().unwrap();
    let figures = directory.path().join("figures.json");
    let output = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["bench", "--only", "heal", "--heal-volumes", "12", "--heal-mib", "1", "--dir"])
        .arg(directory.path())
        .arg("--json")
        .arg(&figures)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    let figures: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&figures).unwrap()).unwrap();
    let figure = |what: &str| figures[format!("heal-12-volumes-{what}")]["quoin"].as_f64().unwrap();
    assert!(figure("replicas-lost") >= 3.0, "{figures}");
    // The new replica, its creation, the change of membership; and the events of each second.
    let writes = figure("record-writes");
    assert!((1.0..=10.0).contains(&writes), "{figures}");
}
