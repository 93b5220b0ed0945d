//! `quoin dev` as real processes: up, in use, harmed, down, up again, with nothing left behind.

#[path = "common/dev.rs"]
mod cluster;

use std::process::Command;
use std::time::{Duration, Instant};

use cluster::{BUDGET, Dev, Scratch, can_attach, is_online, signal};

#[test]
fn a_cluster_without_root_serves_volumes_heals_what_dies_and_goes_on_at_its_second_start() {
    let scratch = Scratch::new("nbd");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);

    // A second one in the same directory is refused, and harms nothing.
    let second = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["dev", "--no-attach", "--dir"])
        .arg(scratch.cluster())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another `quoin dev`"));

    let pools = dev.json(&["pool", "list"]);
    assert_eq!(pools.as_array().unwrap().len(), 3);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let address = dev.ok(&["volume", "attach", "db", "--nbd"]);
    assert!(address.starts_with("nbd+unix:///"), "{address}");
    assert_eq!(dev.ok(&["volume", "attach", "db", "--nbd"]), address, "attach is not idempotent");
    dev.wait_for_volume("db", "online", is_online);
    let volume = dev.json(&["volume", "get", "db"]);
    assert_eq!(volume["sizeBytes"], 64 << 20);
    assert!(volume["contract"].as_str().unwrap().contains("pool"), "{volume}");

    for name in ["pool-b", "target", "controller", "node"] {
        let old = dev.pid(name).unwrap();
        signal(old, "KILL");
        let began = Instant::now();
        while dev.pid(name).is_none_or(|pid| pid == old) {
            assert!(began.elapsed() < BUDGET, "{name} is not started again");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    dev.wait_for_volume("db", "online again", is_online);
    dev.stop();

    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    let volumes = dev.json(&["volume", "list"]);
    assert_eq!(volumes[0]["name"], "db");
    dev.wait_for_volume("db", "online after a clean restart", is_online);
    assert!(dev.ok(&["replica", "list"]).contains("pool-c"));
    assert!(dev.ok(&["events"]).contains("volume/db"));
    let refused = dev.quoin(&["volume", "delete", "db", "--yes"]);
    assert_eq!(refused.status.code(), Some(1), "an attached volume was deleted");
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    assert!(dev.ok(&["volume", "list"]).contains("no volumes"));
    dev.stop();
}

#[test]
fn as_root_a_volume_is_a_block_device_and_ctrl_c_leaves_no_mount_and_no_loop_device() {
    if !can_attach() {
        // The message is the proof that nothing is pretended.
        let scratch = Scratch::new("plain");
        let dev = Dev::start(&scratch.cluster(), &[]);
        dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
        let refused = dev.quoin(&["volume", "attach", "db"]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("--nbd"));
        return dev.stop();
    }
    let scratch = Scratch::new("root");
    let dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let device = dev.ok(&["volume", "attach", "db"]);
    assert!(device.starts_with("/dev/loop"), "{device}");
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    std::fs::write(mount.join("letter"), "kept").unwrap();
    dev.stop();

    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(scratch.0.to_str().unwrap()), "{mounts}");
    for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
        let backing = std::fs::read_to_string(entry.path().join("loop/backing_file"));
        assert!(!backing.is_ok_and(|path| path.contains(scratch.0.to_str().unwrap())));
    }

    let dev = Dev::start(&scratch.cluster(), &[]);
    let device = dev.ok(&["volume", "attach", "db"]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(mount.join("letter")).unwrap(), "kept");
    run("umount", &[mount.to_str().unwrap()]);
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    dev.stop();
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_directory_that_is_foreign_or_cannot_be_made_is_refused_by_name() {
    let scratch = Scratch::new("bad");
    std::fs::write(scratch.0.join("letter"), "dear").unwrap();
    for directory in [scratch.0.clone(), scratch.0.join("letter/below-a-file")] {
        let output = Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(["dev", "--dir"])
            .arg(&directory)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(directory.to_str().unwrap()) && said.contains("--dir"), "{said}");
    }
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1, "something was half made");
}
