//! Statements of the shipped documents and sources, compared with the driver.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Proves CSI-CREATEVOLUME-25, CSI-PROBE-05, CSI-SECRET-05, CSI-SECRET-03: parameters, topology
/// keys, guidance on Probe, and the secret that is read, with its rule and its encoding.
#[test]
fn the_document_names_every_parameter_the_topology_key_and_how_to_probe() {
    let text = std::fs::read_to_string(root().join("docs/csi.md")).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for key in quoin_csi::parameter_keys() {
        assert!(text.contains(&format!("`{key}`")), "{key}");
    }
    for words in [
        "`quoin.io/node`",
        "`quoin.io/rack`",
        "`quoin.io/zone`",
        "keys under `quoin.io/`",
        "once every ten seconds is plenty",
        "One secret is looked at for keys, `encryptionKey`",
        "a passphrase of 8 to 1024 bytes of text, or 64 hex digits",
    ] {
        assert!(text.contains(words), "{words}");
    }
}

/// Proves CSIN-HEALTH-06: for the reasons of a node and of its storage.
#[test]
fn the_document_of_health_lists_every_reason_of_a_node() {
    let text = std::fs::read_to_string(root().join("docs/health.md")).unwrap();
    for kind in quoin_node::FaultKind::ALL {
        let severity = if kind.is_degraded() { "degraded" } else { "inaccessible" };
        let row = format!("| `{}` | {severity} | ", kind.as_str());
        assert!(text.contains(&row), "{row}");
    }
    for reason in [quoin_csi::CONTROLLER_UNREACHABLE, quoin_csi::NO_POOL_REACHED] {
        assert!(text.contains(&format!("| `{reason}` | ")), "{reason}");
    }
    let text = std::fs::read_to_string(root().join("docs/csi.md")).unwrap();
    let mutable: Vec<_> =
        quoin_csi::mutable_parameter_keys().map(|key| format!("`{key}`")).collect();
    assert!(text.contains(&mutable.join(", ")), "{mutable:?}");
}

/// Proves ADDONS-IDENTITY-10.
#[test]
fn the_document_of_csi_addons_says_what_probe_checks_and_how_often_it_may_be_called() {
    let text = std::fs::read_to_string(root().join("docs/csi-addons.md")).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "`Probe` checks that the attach process and the tools of a node are there and that the \
         controller was reached",
        "out of reach for 30 seconds",
        "Once every ten seconds is plenty",
    ] {
        assert!(text.contains(words), "{words}");
    }
}

/// Proves CSI-LOG-03.
#[test]
fn the_document_says_where_logs_go_and_who_keeps_them() {
    let text = std::fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "writes its log to standard error, a line each, and nowhere else",
        "$ QUOIN_LOG=info,quoin_csi=debug quoin node",
        "The default is `info`",
        "keeps the log, limits its size and rate, rolls it over and removes it",
    ] {
        assert!(text.contains(words), "{words}");
    }
}

/// Proves CSI-FILESYSTEM-01: staging and target paths come with each call, all others are settings.
#[test]
fn no_path_of_an_orchestrator_is_in_the_driver_or_its_document() {
    let mut directories =
        vec![root().join("crates/quoin-csi/src"), root().join("crates/quoin-node/src")];
    let mut files = vec![root().join("docs/csi.md")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { directories.push(path) } else { files.push(path) }
        }
    }
    assert!(files.len() > 30, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for theirs in ["/var/lib/kubelet", "/etc/kubernetes", "/etc/nomad", "/var/lib/docker"] {
            assert!(!text.contains(theirs), "{} names {theirs}", file.display());
        }
    }
}

/// Proves CSI-ENV-02.
#[test]
fn no_variable_of_quoin_starts_with_the_prefix_of_the_interface() {
    // The text is assembled here, so that this file does not match.
    let start = format!("\"{}_", "CSI");
    let mut directories = vec![root().join("crates")];
    let mut found = 0;
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                for (at, _) in text.match_indices(&start) {
                    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
                    let name = text[at + 1..].split(|c| !is_part(c)).next().unwrap();
                    assert_eq!(name, "CSI_ENDPOINT", "{}", path.display());
                    found += 1;
                }
            }
        }
    }
    assert!(found > 0);
}
