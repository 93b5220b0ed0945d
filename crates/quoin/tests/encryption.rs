//! Encrypted volumes on a cluster of real processes: what reaches disks and logs, which key is
//! taken, and what a restarted target needs.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::dev::*;
use quoin_api::control::GetVolumeRequest;
use quoin_api::control::cluster_client::ClusterClient;
use quoin_attach::protocol::AttachVolume;
use quoin_encryption::{Encryption, UserKey};
use quoin_nbd::client::{Address, Client, ClientOptions};

const PASSPHRASE: &str = "correct horse battery staple";
const OTHER: &str = "another horse battery staple";
const CLEAR_TEXT: &[u8] = b"the clear text of a volume: nobody but its user reads it";

struct Keys {
    directory: tempfile::TempDir,
}

impl Keys {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

/// The data key of a volume in hex digits, and its raw bytes.
fn data_key(dev: &Dev, volume: &str) -> (String, Vec<u8>) {
    let socket = dev.directory.join("run/admin.sock");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let found = runtime.block_on(async {
        let mut cluster = ClusterClient::new(quoin_identity::unix_channel(&socket));
        let reference = quoin_api::control::VolumeRef { id: String::new(), name: volume.into() };
        let request = GetVolumeRequest { volume: Some(reference) };
        cluster.get_volume(request).await.unwrap().into_inner()
    });
    let encryption = Encryption::try_from(&found.spec.unwrap().encryption.unwrap()).unwrap();
    let user = UserKey::parse(PASSPHRASE.as_bytes()).unwrap();
    let request = AttachVolume {
        volume: found.id,
        nbd_socket: "/none".into(),
        size: 4096,
        block_size: 4096,
        read_only: false,
        file_only: false,
        key: Some(encryption.unlock(&user).unwrap().key),
    };
    let written = serde_json::to_value(&request).unwrap();
    let digits = written["key"].as_str().unwrap().to_owned();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    let raw = (0..digits.len()).step_by(2).map(byte).collect();
    (digits, raw)
}

/// Returns true if a file contains these bytes; what it never wrote is left out.
fn has(path: &Path, pattern: &[u8]) -> bool {
    use rustix::fs::{SeekFrom, seek};

    let Ok(mut file) = std::fs::File::open(path) else { return false };
    let (mut held, mut piece, mut at) = (Vec::new(), vec![0; 1 << 20], 0);
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        let end = seek(&file, SeekFrom::Hole(start)).unwrap();
        seek(&file, SeekFrom::Start(start)).unwrap();
        held.clear();
        at = start;
        while at < end {
            let length = piece.len().min((end - at) as usize);
            let read = file.read(&mut piece[..length]).unwrap();
            if read == 0 {
                return false;
            }
            at += read as u64;
            held.extend_from_slice(&piece[..read]);
            let mut starts = (0..held.len()).filter(|at| held[*at] == pattern[0]);
            if starts.any(|at| held[at..].starts_with(pattern)) {
                return true;
            }
            let kept = held.len().saturating_sub(pattern.len());
            held.drain(..kept);
        }
    }
    false
}

/// Files below a directory that contain these bytes.
fn files_with(directory: &Path, pattern: &[u8]) -> Vec<PathBuf> {
    let (mut directories, mut found) = (vec![directory.to_owned()], Vec::new());
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() {
                directories.push(entry.path());
                continue;
            }
            if kind.is_file() && has(&entry.path(), pattern) {
                found.push(entry.path());
            }
        }
    }
    found
}

fn fails(dev: &Dev, arguments: &[&str]) -> String {
    let output = dev.quoin(arguments);
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn nbd_client(address: &str) -> Client {
    let socket = address.split_once("socket=").unwrap().1;
    let options = ClientOptions::new(Address::Unix(socket.into()));
    eventually("its target accepts clients", || Client::connect(options.clone()).ok())
}

/// Proves CSI-SECRET-01: for the processes of a cluster, with what they write on disks and in logs.
#[test]
fn disks_records_and_logs_have_no_clear_text_and_no_key_and_a_wrong_key_reads_nothing() {
    let (scratch, keys) = (Scratch::new("no-clear-text"), Keys::new());
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    let (right, wrong) = (keys.file("right", PASSPHRASE), keys.file("wrong", OTHER));
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--encrypt", "--key-file", &right]);
    let shown = dev.json(&["volume", "get", "db"]);
    assert_eq!(shown["encryption"]["cipher"], "aes-256-xts");
    assert_eq!(shown["encryption"]["keySlots"][0]["name"], "default");

    assert!(fails(&dev, &["volume", "attach", "db", "--nbd"]).contains("--key-file"));
    let refused = fails(&dev, &["volume", "attach", "db", "--nbd", "--key-file", &wrong]);
    assert!(refused.contains("opens no key slot") && !refused.contains(OTHER), "{refused}");
    let nodes = dev.json(&["volume", "get", "db"])["nodes"].clone();
    assert_eq!(nodes.as_array().map(Vec::len), Some(0), "a wrong key attaches nothing");

    let attach = ["volume", "attach", "db", "--nbd", "--key-file", &right];
    let client = nbd_client(&dev.ok(&attach));
    let mut block = vec![0; 4096];
    block[..CLEAR_TEXT.len()].copy_from_slice(CLEAR_TEXT);
    client.write(8192, block.clone().into(), false).unwrap();
    client.flush().unwrap();
    assert_eq!(client.read(8192, 4096).unwrap(), block);
    assert_eq!(client.read(0, 4096).unwrap(), vec![0; 4096], "a hole");

    // Replicas agree on ciphertext, without a key.
    dev.ok(&["volume", "verify", "db"]);
    let (digits, raw) = data_key(&dev, "db");
    for secret in [CLEAR_TEXT, PASSPHRASE.as_bytes(), OTHER.as_bytes(), digits.as_bytes(), &raw] {
        let files = files_with(&scratch.cluster(), secret);
        assert!(files.is_empty(), "{files:?}");
    }
    // Without encryption it is found there.
    dev.ok(&["volume", "create", "plain", "--size", "16MiB"]);
    let client = dev.client("plain");
    client.write(8192, block.into(), true).unwrap();
    assert!(!files_with(&scratch.cluster(), CLEAR_TEXT).is_empty());
    dev.stop();
}

#[test]
fn a_restarted_target_serves_an_encrypted_volume_once_it_has_its_key_again() {
    let (scratch, keys) = (Scratch::new("key-again"), Keys::new());
    let dev = Dev::start(&scratch.cluster(), &["--no-attach", "--pool-size", "512MiB"]);
    let (key, new) = (keys.file("key", &"5c".repeat(32)), keys.file("new", PASSPHRASE));
    let create = ["volume", "create", "db", "--size", "16MiB", "--encrypt", "--key-file", &key];
    dev.ok(&create);
    dev.ok(&create);
    let attach = |file: &str| dev.ok(&["volume", "attach", "db", "--nbd", "--key-file", file]);
    let client = nbd_client(&attach(&key));
    client.write(0, vec![7; 8192].into(), true).unwrap();

    let before = dev.pid("target").unwrap();
    signal(before, "KILL");
    dev.eventually("another target runs", || dev.pid("target").filter(|pid| *pid != before));
    dev.wait_for_volume("db", "waiting for its key", |volume| {
        volume["waitingFor"].as_str().is_some_and(|reason| reason.contains("its key"))
    });

    // The key that opens it may be another one by now.
    let files = ["--key-file", key.as_str(), "--new-key-file", new.as_str()];
    dev.ok(&[&["volume", "key", "rotate", "db"], &files[..]].concat());
    assert!(
        fails(&dev, &["volume", "attach", "db", "--nbd", "--key-file", &key])
            .contains("opens no key slot")
    );
    drop(client);
    let client = nbd_client(&attach(&new));
    assert_eq!(client.read(0, 8192).unwrap(), vec![7; 8192]);
    dev.ok(&["volume", "resize", "db", "--size", "32MiB"]);
    drop(client);
    let client = dev.eventually("it has grown", || {
        let client = nbd_client(&attach(&new));
        (client.info().size_bytes == 32 << 20).then_some(client)
    });
    client.write(24 << 20, vec![8; 4096].into(), true).unwrap();
    assert_eq!(client.read(24 << 20, 4096).unwrap(), vec![8; 4096]);
    drop(client);
    dev.ok(&["volume", "detach", "db"]);
    assert!(fails(&dev, &["volume", "attach", "db", "--nbd"]).contains("--key-file"));
    dev.stop();
}

/// The device's daemon has the key from its attachment.
#[test]
fn io_of_an_encrypted_device_goes_on_after_its_target_was_killed_and_no_user_gives_the_key_again() {
    if !can_attach() {
        return;
    }
    let (scratch, keys) = (Scratch::new("encrypted-device"), Keys::new());
    let dev = Dev::start(&scratch.cluster(), &["--pool-size", "512MiB"]);
    let key = keys.file("key", PASSPHRASE);
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--encrypt", "--key-file", &key]);
    let attached = dev.json(&["volume", "attach", "db", "--key-file", &key]);
    let device = attached["device"].as_str().unwrap().to_owned();
    let mut file = std::fs::File::options().read(true).write(true).open(&device).unwrap();
    file.write_all(&[9; 65536]).unwrap();
    file.sync_all().unwrap();
    let before = dev.pid("target").unwrap();
    signal(before, "KILL");
    let status = Command::new("blockdev").args(["--flushbufs", &device]).status().unwrap();
    assert!(status.success());
    let mut read = vec![0; 65536];
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_exact(&mut read).unwrap();
    assert_eq!(read, vec![9; 65536]);
    drop(file);
    dev.ok(&["volume", "detach", "db"]);
    dev.stop();
    assert_nothing_is_left(&scratch.cluster());
}
