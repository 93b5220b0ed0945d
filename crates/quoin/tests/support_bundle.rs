//! `quoin support-bundle`: all that helps is in it, and nothing that is secret.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::dev::*;

/// Parts of a bundle by their names.
fn parts(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let decoder = zstd::Decoder::new(fs::File::open(path).unwrap()).unwrap();
    let mut archive = tar::Archive::new(decoder);
    let part = |entry: std::io::Result<tar::Entry<'_, _>>| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (name, bytes)
    };
    archive.entries().unwrap().map(part).collect()
}

fn holds(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|window| window == word)
}

/// Lines of all private keys below a directory, without their frames.
fn key_lines(directory: &Path, lines: &mut Vec<String>) {
    for entry in fs::read_dir(directory).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            key_lines(&path, lines);
        } else if let Ok(text) = fs::read_to_string(&path)
            && text.contains("PRIVATE KEY")
        {
            let body = text.lines().filter(|line| line.len() > 20 && !line.starts_with('-'));
            lines.extend(body.map(str::to_owned));
        }
    }
}

#[test]
fn a_support_bundle_has_the_cluster_and_the_host_and_no_secret() {
    let scratch = Scratch::new("support-bundle");
    let dev = Dev::start(&scratch.0.join("dev"), &["--no-attach", "--pool-size", "512MiB"]);
    let key = scratch.0.join("key");
    let passphrase = "correct horse battery staple";
    fs::write(&key, passphrase).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let key = key.to_str().unwrap();
    dev.ok(&["volume", "create", "db", "--size", "16MiB", "--encrypt", "--key-file", key]);
    dev.ok(&["volume", "attach", "db", "--nbd", "--key-file", key]);
    let token = dev.ok(&["token", "create", "--role", "pool", "--name", "p9"]);
    let token = token.split_whitespace().find(|word| word.starts_with("quoin-join-")).unwrap();
    let log = scratch.0.join("container.log");
    fs::write(&log, format!("joins with {token}\nserves\n")).unwrap();

    let path = scratch.0.join("case.tar.zst");
    let (into, log) = (path.to_str().unwrap(), log.to_str().unwrap());
    let command = ["-o", "json", "support-bundle", "--into", into, "--log", log];
    let told: serde_json::Value = serde_json::from_str(&dev.ok(&command)).unwrap();
    let parts = parts(&path);
    assert_eq!(told["parts"], parts.len(), "{told}");
    assert_eq!(
        told["missing"].as_object().unwrap().keys().find(|k| k.starts_with("cluster/")),
        None
    );
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let part = |name: &str| -> &[u8] {
        let found = parts.get(&format!("quoin-support/{name}"));
        found.unwrap_or_else(|| panic!("{name} is not in it: {:?}", parts.keys()))
    };
    let volumes: serde_json::Value = serde_json::from_slice(part("cluster/volumes.json")).unwrap();
    assert_eq!(volumes[0]["name"], "db");
    for (name, word) in [
        ("cluster/status.json", "clusterId"),
        ("cluster/replicas.json", "InSync"),
        ("cluster/pools.json", "capacityBytes"),
        ("cluster/events.json", "VolumeCreated"),
        ("host/preflight.json", "verdict"),
        ("host/kernel.txt", "Linux"),
        ("logs/0-container.log", "serves"),
        ("about.json", env!("CARGO_PKG_VERSION")),
    ] {
        assert!(holds(part(name), word.as_bytes()), "{name} has no {word}");
    }

    let mut secrets = vec![passphrase.to_owned(), token.to_owned(), "PRIVATE KEY".to_owned()];
    key_lines(&scratch.0.join("dev"), &mut secrets);
    assert!(secrets.len() > 5, "no key was found to look for");
    for (name, bytes) in &parts {
        for secret in &secrets {
            assert!(!holds(bytes, secret.as_bytes()), "{name} has {secret}");
        }
    }

    let again = dev.quoin(&command);
    assert!(!again.status.success(), "it is not overwritten");
    let why = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(why.contains("not overwritten") && why.contains("--into"), "{why}");
}

#[test]
fn a_support_bundle_without_a_controller_has_the_host_and_says_what_is_missing() {
    let scratch = Scratch::new("support-bundle-alone");
    let path = scratch.0.join("case.tar.zst");
    let socket = scratch.0.join("no.sock");
    let made = std::process::Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["--socket", socket.to_str().unwrap(), "support-bundle", "--into"])
        .arg(&path)
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success(), "{told}");
    assert!(told.contains("not in it: cluster/volumes.json"), "{told}");
    let parts = parts(&path);
    assert!(parts.contains_key("quoin-support/host/memory.txt"));
    let missing: BTreeMap<String, String> =
        serde_json::from_slice(&parts["quoin-support/missing.json"]).unwrap();
    assert!(missing["cluster/status.json"].contains("no.sock"), "{missing:?}");
}
