//! The rule of the node: no thread of its runtime touches a device or a file of a volume.
//!
//! A function that does takes a `DeviceThread`, which only the threads of `device_calls` have. The
//! compiler holds its callers to that; this holds the functions themselves to it: the calls that can
//! wait for a volume stand in few files, and every public function of these has the parameter, or a
//! reason to have none.

use std::path::Path;

use anyhow::Result;

use crate::run::workspace_root;
use crate::trace::collect_files;

const NODE: &str = "crates/quoin-node/src";

/// Calls that wait for a volume where their path is one of its.
const CALLS: [&str; 6] =
    ["std::fs::", "File::", "rustix::fs::", "rustix::mount::", "spawn_blocking", "libc::ioctl"];

/// Files whose paths are the host's own, each with their subject.
const OF_THE_HOST: [(&str, &str); 5] = [
    ("records.rs", "the node's records"),
    ("mountinfo.rs", "the kernel's tables"),
    ("tools.rs", "programs of the host"),
    ("device_reports.rs", "the attach process"),
    ("host/paths.rs", "the orchestrator's paths, where nothing is mounted"),
];

/// Files that touch devices and files of volumes, with the public functions that do not.
const OF_VOLUMES: [(&str, &[&str]); 7] = [
    // They read the kernel's tables and the nodes in /dev.
    (
        "device.rs",
        &[
            "size_bytes",
            "number",
            "major_minor",
            "numbers_with_partitions",
            "backing_file",
            "is_node_at",
            "is_of_nodes",
            "is_named_node",
        ],
    ),
    ("superblock.rs", &[]),
    ("probe.rs", &[]),
    ("mount.rs", &["parse_flags", "while_busy"]),
    // They run tools, which are processes, and work on an image of the host.
    ("format.rs", &["repair_tool", "name", "make", "check", "grow", "may_resize_ext4"]),
    ("group.rs", &[]),
    // They read the kernel's tables of processes, and of an open file what the kernel has of it.
    ("holders.rs", &["all", "own", "root", "has_open", "other_tables"]),
];

/// Returns all violations of the rule.
pub fn violations() -> Result<Vec<String>> {
    let root = workspace_root().join(NODE);
    let mut files = Vec::new();
    collect_files(&root, &mut files)?;
    let mut found = Vec::new();
    for path in files {
        let name = path.strip_prefix(&root)?.to_string_lossy().into_owned();
        found.extend(violations_in(&name, &std::fs::read_to_string(&path)?));
    }
    Ok(found)
}

fn violations_in(name: &str, text: &str) -> Vec<String> {
    let is_test = Path::new(name).components().any(|part| {
        let part = part.as_os_str();
        part == "tests" || part == "tests.rs"
    });
    if is_test || OF_THE_HOST.iter().any(|(file, _)| *file == name) {
        return Vec::new();
    }
    let shipped = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    if let Some((_, exempt)) = OF_VOLUMES.iter().find(|(file, _)| *file == name) {
        return signatures(shipped)
            .filter(|(name, signature)| {
                !signature.contains("&DeviceThread") && !exempt.contains(name)
            })
            .map(|(function, _)| {
                format!(
                    "{NODE}/{name}: {function} takes no &DeviceThread, and its file is of volumes"
                )
            })
            .collect();
    }
    let lines = shipped.lines().enumerate();
    let called = lines.filter_map(|(index, line)| {
        let is_comment = line.trim_start().starts_with("//");
        let call = CALLS.iter().find(|call| !is_comment && line.contains(**call))?;
        Some(format!(
            "{NODE}/{name}:{}: `{call}` may wait for a volume: files of `OF_VOLUMES` alone have it",
            index + 1
        ))
    });
    called.collect()
}

/// The public functions of a source file, and their parameters.
fn signatures(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let starts = ["pub fn ", "pub async fn ", "pub(crate) fn ", "pub(crate) async fn "];
    let after = move |at: usize| {
        let line = text[at..].trim_start();
        starts.iter().find_map(|start| line.strip_prefix(start))
    };
    let lines = text.split_inclusive('\n').scan(0, |at, line| {
        let begin = *at;
        *at += line.len();
        Some(begin)
    });
    lines.filter_map(after).filter_map(|rest| {
        let name = rest.split(['(', '<']).next()?;
        Some((name, rest.split('{').next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_of_the_runtime_touches_a_volume_and_one_that_did_would_be_found() {
        assert_eq!(violations().unwrap(), Vec::<String>::new());
        let opens = "fn a(p: &Path) {\n    let f = File::open(p);\n}\n";
        assert!(violations_in("host/new.rs", opens)[0].contains("host/new.rs:2: `File::`"));
        assert!(violations_in("records.rs", opens).is_empty());
        let plain = "pub fn erase(\n    device: &Path,\n) -> bool {\n}\n";
        assert!(violations_in("device.rs", plain)[0].contains("erase takes no &DeviceThread"));
        let held = "    pub fn erase<T>(_: &DeviceThread, device: &Path) {\n    }\n";
        assert!(violations_in("device.rs", held).is_empty());
    }

    #[test]
    fn every_file_of_the_lists_is_there() {
        let lists = OF_THE_HOST.iter().map(|(file, _)| file);
        for file in lists.chain(OF_VOLUMES.iter().map(|(file, _)| file)) {
            assert!(workspace_root().join(NODE).join(file).exists(), "{file}");
        }
    }
}
