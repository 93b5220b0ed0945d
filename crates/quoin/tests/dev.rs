//! `quoin dev` as real processes: up, in use, with faults, down, up again, with nothing left
//! behind.

use crate::common::dev as running;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use quoin_types::block::{Operation, Payload};
use running::{BUDGET, Dev, Scratch, assert_nothing_is_left, can_attach, eventually, is_online};
use running::{run, signal, unmount};

#[test]
fn a_cluster_without_root_serves_volumes_recovers_from_kills_and_restarts() {
    let scratch = Scratch::new("nbd");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);

    // A second one in the same directory is refused, and changes nothing.
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
    let again = dev.json(&["volume", "attach", "db", "--nbd"]);
    assert_eq!((&again["volume"], &again["nbdUri"]), (&"db".into(), &address.trim().into()));
    let detached = dev.json(&["volume", "detach", "db"]);
    assert_eq!((&detached["state"], &detached["id"]), (&"detached".into(), &again["id"]));
    assert_eq!(dev.json(&["volume", "delete", "db", "--yes"])["state"], "deleted");
    assert!(dev.ok(&["volume", "list"]).contains("no volumes"));
    dev.stop();
}

#[test]
fn a_removed_pool_is_not_restarted_until_its_files_are_deleted() {
    let scratch = Scratch::new("removed");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    let hold = scratch.cluster().join("run/hold-pool-c");
    std::fs::write(&hold, "").unwrap();
    signal(dev.pid("pool-c").unwrap(), "TERM");
    dev.eventually("pool-c can be removed", || {
        dev.quoin(&["pool", "remove", "pool-c"]).status.success().then_some(())
    });
    dev.wait_for_line("pool-c was removed from the cluster and is ended");
    std::fs::remove_file(&hold).unwrap();
    // Ten times the interval at which a held pool is checked.
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(dev.pid("pool-c"), None);
    dev.stop();

    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    assert_eq!(dev.pid("pool-c"), None);
    assert_eq!(dev.json(&["pool", "list"]).as_array().unwrap().len(), 2);
    dev.stop();
    std::fs::remove_dir_all(scratch.cluster().join("pools/pool-c")).unwrap();
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    assert_eq!(dev.json(&["pool", "list"]).as_array().unwrap().len(), 3);
    dev.stop();
}

#[test]
fn a_pool_with_a_truncated_file_does_not_block_the_others() {
    let scratch = Scratch::new("short");
    let flags = ["--no-attach", "--pool-size", "256MiB"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "8MiB"]);
    let file = scratch.cluster().join("pools/pool-b/data");
    dev.stop();
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(128 << 20).unwrap();

    // The cluster starts, though one pool's process ends at each of its starts.
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    let client = dev.client("db");
    let data = bytes::Bytes::from(vec![3; 4096]);
    client.call(Operation::Write { offset: 0, data: data.clone(), fua: true }).unwrap();
    let read = client.call(Operation::Read { offset: 0, length: 4096 }).unwrap();
    assert!(matches!(read, Payload::Data(pieces) if pieces.concat() == data));
    let pools = dev.json(&["pool", "list"]);
    let pool = pools.as_array().unwrap().iter().find(|pool| pool["name"] == "pool-b").unwrap();
    assert_eq!(pool["state"], "Offline", "{pool}");
    drop(client);
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
    let device = dev.device("db");
    assert!(device.starts_with("/dev/loop"), "{device}");
    // The printed link leads to it, where no other cluster of this host has that name.
    let printed = dev.ok(&["volume", "attach", "db"]);
    assert_eq!(std::fs::canonicalize(printed).unwrap(), Path::new(&device));
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    std::fs::write(mount.join("letter"), "kept").unwrap();
    dev.stop();

    assert_nothing_is_left(&scratch.0);

    let dev = Dev::start(&scratch.cluster(), &[]);
    let device = dev.device("db");
    run("mount", &[&device, mount.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(mount.join("letter")).unwrap(), "kept");
    unmount(&mount);
    dev.ok(&["volume", "detach", "db"]);
    dev.ok(&["volume", "delete", "db", "--yes"]);
    dev.stop();
}

/// Mounts a volume as an ext4 file system.
fn mounted(dev: &Dev, scratch: &Scratch) -> (String, std::path::PathBuf) {
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let device = dev.device("db");
    let mount = scratch.0.join("mount");
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);
    (device, mount)
}

#[test]
fn a_stop_waits_for_the_users_of_a_mount_and_a_second_signal_keeps_the_data() {
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("busy");
    let dev = Dev::start(&scratch.cluster(), &[]);
    let (device, mount) = mounted(&dev, &scratch);
    // A directory other than the cluster's does not count as an absent device.
    let refused = dev.quoin(&["volume", "detach", "db", "--run", "/nonexistent"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && text.contains("--run"), "{text}");
    let refused = dev.quoin(&["volume", "detach", "db"]);
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        printed.contains("volume db") && printed.contains(mount.to_str().unwrap()),
        "{printed}"
    );
    let shown = dev.json(&["volume", "get", "db"]);
    assert_eq!(shown["here"]["device"], device.as_str());
    let grown = dev.ok(&["volume", "resize", "db", "--size", "96MiB"]);
    assert!(grown.contains(&format!("resize2fs {device}")), "{grown}");

    let open = std::fs::File::create(mount.join("letter")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&open, b"not synced by its writer", 0).unwrap();
    signal(dev.child.id(), "INT");
    let line = dev.wait_for_line("waiting: ");
    assert!(line.contains(mount.to_str().unwrap()), "{line}");
    assert!(line.contains(&format!("process {}", std::process::id())), "{line}");
    // The volume is still served: the application continues.
    std::fs::write(mount.join("second"), "while it waits").unwrap();
    signal(dev.child.id(), "INT");
    eventually("it ends", || (!dev.is_running()).then_some(()));
    drop(open);
    drop(dev);
    assert_nothing_is_left(&scratch.0);

    let dev = Dev::start(&scratch.cluster(), &[]);
    let device = dev.device("db");
    run("mount", &[&device, mount.to_str().unwrap()]);
    let letter = std::fs::read_to_string(mount.join("letter")).unwrap();
    assert_eq!(letter, "not synced by its writer");
    assert_eq!(std::fs::read_to_string(mount.join("second")).unwrap(), "while it waits");
    // The mount is in use when the stop is requested, and released in time.
    let open = std::fs::File::open(mount.join("letter")).unwrap();
    signal(dev.child.id(), "INT");
    dev.wait_for_line("waiting: ");
    drop(open);
    dev.ended();
    assert_nothing_is_left(&scratch.0);
}

/// A container that began after the mount, as any service with a mount table of its own.
#[test]
fn a_mount_copied_to_another_namespace_is_written_back_and_named_while_waiting() {
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("copied");
    let dev = Dev::start(&scratch.cluster(), &[]);
    let (device, mount) = mounted(&dev, &scratch);
    let mut container = std::process::Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sleep", "600"])
        .spawn()
        .unwrap();
    let table = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap();
    let pid = container.id().to_string();
    eventually("it has its own table", || (table(&pid) != table("self")).then_some(()));
    std::fs::write(mount.join("letter"), "not synced by its writer").unwrap();
    signal(dev.child.id(), "INT");
    let line = dev.wait_for_line("waiting: ");
    assert!(line.contains(&device) && line.contains("mount namespace"), "{line}");
    assert!(line.contains(&format!("process {pid}")), "{line}");
    // The container's program continues meanwhile.
    let inside = format!("/proc/{pid}/root{}", mount.join("second").display());
    std::fs::write(&inside, "while it waits").unwrap();
    signal(container.id(), "KILL");
    container.wait().unwrap();
    dev.ended();
    assert_nothing_is_left(&scratch.0);

    let dev = Dev::start(&scratch.cluster(), &[]);
    run("mount", &[&dev.device("db"), mount.to_str().unwrap()]);
    let letter = std::fs::read_to_string(mount.join("letter")).unwrap();
    assert_eq!(letter, "not synced by its writer");
    assert_eq!(std::fs::read_to_string(mount.join("second")).unwrap(), "while it waits");
    dev.stop();
}

#[test]
fn pools_that_were_suspended_end_with_the_cluster() {
    let scratch = Scratch::new("suspended");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    let pools = ["pool-a", "pool-b"].map(|name| dev.pid(name).unwrap());
    pools.iter().for_each(|pid| signal(pid, "STOP"));
    dev.stop();
}

#[test]
fn a_device_without_progress_is_detached_by_force_at_shutdown() {
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("bare");
    let mut dev = Dev::start(&scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let device = dev.device("db");
    let pools = ["pool-a", "pool-b"].map(|name| dev.pid(name).unwrap());
    pools.iter().for_each(|pid| signal(pid, "STOP"));
    let to = format!("of={device}");
    let mut writer = std::process::Command::new("dd")
        .args(["if=/dev/zero", &to, "bs=1M", "count=8", "oflag=direct"])
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(writer.try_wait().unwrap().is_none(), "one of three pools acknowledges nothing");
    signal(dev.child.id(), "INT");
    let line = dev.wait_for_line("waiting: ");
    assert!(line.contains(&device) && line.contains("waits for quorum"), "{line}");
    assert!(line.contains("20 s") && line.contains("Ctrl-C again"), "{line}");
    let line = dev.wait_for_line("makes no progress and is detached by force");
    assert!(line.contains(&device), "{line}");
    assert!(!writer.wait().unwrap().success(), "it is told that its writes failed");
    pools.iter().for_each(|pid| signal(pid, "CONT"));
    let status = dev.child.wait().unwrap();
    assert_eq!(status.code(), Some(1), "that it took something away is no clean end");
    drop(dev);
    assert_nothing_is_left(&scratch.0);
}

#[test]
fn a_device_that_a_program_keeps_open_is_named_at_shutdown() {
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("open");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" 2>&1", env!("CARGO_BIN_EXE_quoin")]);
    let mut dev = Dev::start_by(command, &scratch.cluster(), &[]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let device = dev.device("db");
    let open = std::fs::File::open(&device).unwrap();
    signal(dev.child.id(), "INT");
    let line = dev.wait_for_line("attach did not stop cleanly");
    assert!(line.contains("in use") && line.contains(&device), "{line}");
    drop(open);
    assert_eq!(dev.child.wait().unwrap().code(), Some(1));
    drop(dev);
    assert_nothing_is_left(&scratch.0);
}

#[test]
fn a_mounted_volume_survives_a_killed_dev_and_a_dead_mount_is_reported() {
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("killed");
    let mut dev = Dev::start(&scratch.cluster(), &[]);
    let (_, mount) = mounted(&dev, &scratch);
    let writer = {
        let path = mount.join("log");
        std::thread::spawn(move || {
            let file = std::fs::File::create(path).unwrap();
            for number in 0..64u64 {
                // The IO waits while there is no target, and sees no error.
                let bytes = number.to_le_bytes();
                std::os::unix::fs::FileExt::write_all_at(&file, &bytes, number * 8).unwrap();
                file.sync_all().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        })
    };
    dev.child.kill().unwrap();
    dev.child.wait().unwrap();
    drop(dev);
    let dev = Dev::start(&scratch.cluster(), &[]);
    writer.join().unwrap();
    assert_eq!(std::fs::metadata(mount.join("log")).unwrap().len(), 64 * 8);
    let shown = dev.json(&["volume", "get", "db"]);
    assert_eq!(shown["here"]["mounts"][0], mount.to_str().unwrap());

    // Attach and its holder end at once: their devices are dead, and nothing pretends otherwise,
    // also where no process has them open: a write must not land in the directory below.
    signal(dev.pid("attach-holder").unwrap(), "KILL");
    signal(dev.pid("attach").unwrap(), "KILL");
    let line = dev.wait_for_line("is dead");
    assert!(line.contains(mount.to_str().unwrap()) && line.contains("umount"), "{line}");
    let shown = dev.json(&["volume", "get", "db"]);
    assert_eq!(shown["here"]["deadMounts"][0], mount.to_str().unwrap(), "{shown}");
    let below = mount.join("below");
    // The write reaches the memory of the dead file system, if that accepts it at all.
    drop(std::fs::write(&below, "lost"));
    unmount(&mount);
    assert!(!below.exists(), "it was written to the directory below");
    let device = eventually("attach is back", || {
        let output = dev.quoin(&["volume", "attach", "db"]);
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    });
    run("mount", &[device.trim(), mount.to_str().unwrap()]);
    assert_eq!(std::fs::metadata(mount.join("log")).unwrap().len(), 64 * 8, "it was synced");
    dev.stop();
    assert_nothing_is_left(&scratch.0);
}

#[test]
fn an_offline_pool_shows_its_volumes_with_name_and_present_size() {
    let scratch = Scratch::new("inside");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pools", "1"]);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "1"]);
    dev.ok(&["volume", "create", "log", "--size", "4MiB", "--replicas", "1"]);
    dev.ok(&["volume", "resize", "db", "--size", "12MiB"]);
    let refused = dev.quoin(&["volume", "create", "db", "--size", "4MiB", "--replicas", "1"]);
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(printed.contains("it has 12 MiB, at most 4 MiB are asked for"), "{printed}");
    assert_eq!(refused.status.code(), Some(1));
    dev.stop();

    let pool = scratch.cluster().join("pools/pool-a");
    let quoin = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quoin"));
        command.args(arguments).arg(&pool).output().unwrap()
    };
    let text = String::from_utf8(quoin(&["pool", "inspect"]).stdout).unwrap();
    let has = |line: &str| ["db", "12.0 MiB"].iter().all(|word| line.contains(word));
    assert!(text.contains("GUID") && text.lines().any(has), "{text}");
    let json = quoin(&["pool", "inspect", "-o", "json"]).stdout;
    let held: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let db = held.as_array().unwrap().iter().find(|replica| replica["volume"] == "db").unwrap();
    assert_eq!(db["sizeBytes"], 12 << 20);
    let image = scratch.0.join("db.img");
    let prefix = &db["guid"].as_str().unwrap()[..8];
    let to = ["--to", image.to_str().unwrap(), "-o", "json", "--replica"];
    let export = |replica: &str| quoin(&[&["pool", "export"], &to[..], &[replica]].concat());
    for wrong in ["1", "cache"] {
        let refused = export(wrong);
        let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1));
        assert!(printed.contains("it holds") && printed.contains("of volume log"), "{printed}");
        assert!(!image.exists(), "something was made");
    }
    let exported = export(prefix);
    assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    let exported: serde_json::Value = serde_json::from_slice(&exported.stdout).unwrap();
    assert_eq!((&exported["sizeBytes"], &exported["dataBytes"]), (&(12 << 20).into(), &0.into()));
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 12 << 20);
}

/// A supervisor that starts after a stuck attach process does not pretend that all is well.
#[test]
fn a_stuck_attach_process_is_named_with_its_volume_until_it_continues() {
    if !can_attach() {
        return;
    }
    let scratch = Scratch::new("stuck");
    let mut dev = Dev::start(&scratch.cluster(), &[]);
    assert!(dev.greeting.starts_with("Quoin is up: 3 pools"), "{}", dev.greeting);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let device = dev.device("db");
    let attach = dev.pid("attach").unwrap();
    dev.child.kill().unwrap();
    dev.child.wait().unwrap();
    // The stop comes only now: the kernel continues stopped processes whose parent ends.
    signal(attach, "STOP");
    drop(dev);
    let dev = Dev::start(&scratch.cluster(), &[]);
    let in_the_way = format!("process {attach} (`quoin attach`) was stopped by a signal");
    for words in [&*in_the_way, "block devices cannot be made", "volume db", &device, "kill -CONT"]
    {
        assert!(dev.greeting.contains(words), "{words}: {}", dev.greeting);
    }
    let shown = dev.json(&["volume", "get", "db"])["here"].clone();
    assert_eq!(shown["device"], device.as_str());
    assert!(shown["blocked"].as_str().unwrap().contains(&in_the_way), "{shown}");
    let events = dev.ok(&["events", "--volume", "db"]);
    let event = events.lines().find(|line| line.contains("CannotAttach")).unwrap();
    assert!(event.contains("volume/db") && event.contains(&in_the_way), "{event}");
    let refused = dev.quoin(&["volume", "attach", "db"]);
    assert_eq!(refused.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(printed.contains(&in_the_way) && printed.contains("--nbd"), "{printed}");
    signal(attach, "CONT");
    dev.wait_for_line("block devices can be made again");
    assert_eq!(dev.device("db"), device);
    assert!(dev.json(&["volume", "get", "db"])["here"].get("blocked").is_none());
    dev.stop();
    assert_nothing_is_left(&scratch.0);
}

/// A laptop that is closed on Friday and opened a month later finds all parts at work.
#[test]
fn a_cluster_recovers_by_itself_after_its_certificates_expired() {
    const LIFE: Duration = Duration::from_secs(10);
    let scratch = Scratch::new("lid");
    let flags = ["--no-attach", "--network-only", "--certificate-lifetime-s", "10"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let written = bytes::Bytes::from(vec![7; 4096]);
    let client = dev.client("db");
    client.write(0, written.clone(), true).unwrap();

    // Suspended: all processes stand still, longer than a certificate is valid.
    let all: Vec<i64> = dev.processes().values().filter_map(serde_json::Value::as_i64).collect();
    let all = [&all[..], &[i64::from(dev.child.id())]].concat();
    all.iter().for_each(|pid| signal(pid, "STOP"));
    std::thread::sleep(LIFE + Duration::from_secs(2));
    all.iter().for_each(|pid| signal(pid, "CONT"));
    dev.wait_for_line("had run out while this machine slept; it has a new one");
    dev.wait_for_volume("db", "online after its sleep", is_online);
    assert_eq!(client.read(0, 4096).unwrap(), written);
    // New connections are made with new certificates.
    signal(dev.pid("target").unwrap(), "KILL");
    let written = bytes::Bytes::from(vec![8; 4096]);
    client.write(4096, written.clone(), true).unwrap();
    client.stop();
    dev.stop();

    // Switched off for as long.
    std::thread::sleep(LIFE + Duration::from_secs(2));
    let node = quoin_identity::Identity::load(&scratch.cluster().join("node")).unwrap();
    assert!(node.has_run_out());
    let dev = Dev::start(&scratch.cluster(), &flags);
    let client = dev.client("db");
    assert_eq!(client.read(4096, 4096).unwrap(), written);
    client.stop();
    dev.stop();
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
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            printed.contains(directory.to_str().unwrap()) && printed.contains("--dir"),
            "{printed}"
        );
    }
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1, "something was half made");
}
