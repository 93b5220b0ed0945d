//! The session against third-party clients, over real sockets.

use std::path::Path;
use std::process::{Command, Output};

use quoin_testkit::have;
use quoin_testkit::nbd_server::{Server, ServerOptions, volume};

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?} failed: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn uri(path: &Path) -> String {
    format!("nbd+unix:///vol?socket={}", path.display())
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4096 * 31 + at % 251 + 1) as u8).collect()
}

#[test]
fn nbdinfo_sees_the_export_as_it_is() {
    if !have("nbdinfo") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let server = Server::start(&path, volume(8 << 20), ServerOptions::default());
    let output = run(Command::new("nbdinfo").arg("--json").arg(uri(&path)));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["structured"], true);
    let export = &json["exports"][0];
    assert_eq!(export["export-size"], 8 << 20);
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 4096);
    assert_eq!(export["block_size_preferred"], 4096);
    assert_eq!(export["block_size_maximum"], 32 << 20);
    for can in ["flush", "fua", "trim", "zero", "fast_zero", "multi_conn", "df", "cache"] {
        assert_eq!(export[format!("can_{can}")], true, "can_{can} of {export}");
    }
    assert_eq!(export["contexts"][0], "base:allocation");
    let listed = run(Command::new("nbdinfo").arg("--list").arg(uri(&path)));
    assert!(String::from_utf8_lossy(&listed.stdout).contains("export=\"vol\""));
    server.stop();
}

#[test]
fn nbdcopy_writes_an_image_and_reads_it_back_and_its_holes_show() {
    if !have("nbdcopy") || !have("nbdinfo") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let memory = volume(8 << 20);
    let server = Server::start(&path, memory.clone(), ServerOptions::default());
    let (image, back) = (directory.path().join("image"), directory.path().join("back"));
    let mut bytes = pattern(8 << 20);
    bytes[2 << 20..4 << 20].fill(0);
    std::fs::write(&image, &bytes).unwrap();
    run(Command::new("nbdcopy").args(["--flush", "--allocated"]).arg(&image).arg(uri(&path)));
    assert_eq!(memory.lock().unwrap().bytes(), bytes);
    assert!(memory.lock().unwrap().flushes > 0);
    run(Command::new("nbdcopy").arg(uri(&path)).arg(&back));
    assert_eq!(std::fs::read(&back).unwrap(), bytes);

    memory
        .lock()
        .unwrap()
        .apply(&quoin_types::block::Operation::Trim {
            offset: 1 << 20,
            length: 1 << 20,
            fua: false,
        })
        .unwrap();
    let map = run(Command::new("nbdinfo").args(["--map", "--json"]).arg(uri(&path)));
    let map: serde_json::Value = serde_json::from_slice(&map.stdout).unwrap();
    assert_eq!(map[0]["length"], 1 << 20);
    assert_eq!(map[0]["type"], 0);
    assert_eq!(map[1]["offset"], 1 << 20);
    assert_eq!(map[1]["type"], 3);
    server.stop();
}

#[test]
fn qemu_io_writes_with_fua_trims_zeroes_and_is_refused_beyond_the_end() {
    if !have("qemu-io") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let memory = volume(4 << 20);
    let server = Server::start(&path, memory.clone(), ServerOptions::default());
    let output = run(Command::new("qemu-io")
        .args(["-f", "raw", "-d", "unmap"])
        .args([
            "-c",
            "write -f -P 0x5a 0 1M",
            "-c",
            "aio_write -P 0x33 1M 64k",
            "-c",
            "aio_flush",
            "-c",
            "discard 0 64k",
            "-c",
            "write -z 128k 64k",
            "-c",
            "write -z -u 256k 64k",
            "-c",
            "read -P 0x5a 64k 64k",
            "-c",
            "read -P 0 128k 64k",
            "-c",
            "read -P 0 256k 64k",
            "-c",
            "read -P 0x33 1M 64k",
            "-c",
            "flush",
        ])
        .arg(uri(&path)));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!text.contains("verification failed") && !text.contains("failed:"), "{text}");
    let memory = memory.lock().unwrap();
    assert!(memory.flushes > 0 && memory.trims >= 2);
    assert!(memory.bytes()[..64 << 10].iter().all(|byte| *byte == 0));
    drop(memory);
    server.stop();
}

#[test]
fn fio_verifies_what_it_wrote_at_depth_32() {
    if !have("fio") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let server = Server::start(&path, volume(16 << 20), ServerOptions::default());
    run(Command::new("fio")
        .current_dir(directory.path())
        .args(["--name=t", "--ioengine=nbd"])
        .arg(format!("--uri={}", uri(&path)))
        .args(["--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=16m", "--verify=crc32c"])
        .args(["--do_verify=1", "--verify_fatal=1", "--minimal"]));
    server.stop();
}

#[test]
fn a_read_only_volume_is_exported_read_only_and_refuses_writes() {
    if !have("nbdinfo") || !have("qemu-io") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let options = ServerOptions { read_only: true, block_size: 512, ..Default::default() };
    let server = Server::start(&path, volume(1 << 20), options);
    let output = run(Command::new("nbdinfo").arg("--json").arg(uri(&path)));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["exports"][0]["is_read_only"], true);
    assert_eq!(json["exports"][0]["can_trim"], false);
    assert_eq!(json["exports"][0]["block_size_minimum"], 512);
    let refused = Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write 0 4k"])
        .arg(uri(&path))
        .output()
        .unwrap();
    assert!(!refused.status.success());
    server.stop();
}
