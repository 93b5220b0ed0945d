//! Common parts of tests of pools beside a running cluster: reading pool files, faults, kills.

#![allow(dead_code, unused_imports, reason = "each test takes what it needs")]

pub mod etcd;
pub mod faulty;
pub mod load;
pub mod orchestrator;
pub mod stories;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use crate::common::dev::*;

impl Dev {
    /// Returns the replica of a volume that a pool holds.
    pub fn replica(&self, volume: &str, pool: &str) -> serde_json::Value {
        let replicas = self.json(&["replica", "list", volume]);
        let all = replicas.as_array().unwrap();
        all.iter().find(|r| r["pool"] == pool).cloned().unwrap_or_default()
    }

    pub fn pool_file(&self, pool: &str) -> PathBuf {
        self.directory.join("pools").join(pool).join("data")
    }

    /// Kills a process and waits until its successor runs.
    pub fn kill(&self, name: &str) {
        let old = self.pid(name);
        if let Some(old) = old {
            signal(old, "KILL");
        }
        self.runs_again(name, old);
    }

    /// Kills as [`Dev::kill`] does, with all of them gone before the first is there again: they are
    /// stopped before they are killed, because a pool is started and healed within two tenths of a
    /// second.
    pub fn kill_together(&self, names: &[&str]) {
        let old: Vec<_> = names.iter().map(|name| self.pid(name).unwrap()).collect();
        for what in ["STOP", "KILL"] {
            old.iter().for_each(|pid| signal(*pid, what));
        }
        for (name, old) in names.iter().zip(old) {
            self.runs_again(name, Some(old));
        }
    }

    fn runs_again(&self, name: &str, old: Option<i64>) {
        self.eventually(&format!("{name} is started again"), || {
            self.pid(name).filter(|pid| Some(*pid) != old)
        });
        if name == "controller" {
            self.eventually("the controller answers", || {
                self.quoin(&["cluster", "info"]).status.success().then_some(())
            });
        }
    }
}

/// Returns a block of the tests. Its first 24 bytes are a mark, its position, and its version.
pub fn block(lba: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![(lba ^ version) as u8; 4096];
    bytes[..8].copy_from_slice(b"TESTDATA");
    bytes[8..16].copy_from_slice(&lba.to_le_bytes());
    bytes[16..24].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Returns every block of a sparse file that `wanted` accepts, with its offset.
pub fn blocks_of<T>(path: &Path, mut wanted: impl FnMut(&[u8]) -> Option<T>) -> Vec<(u64, T)> {
    use rustix::fs::SeekFrom;
    let file = std::fs::File::open(path).unwrap();
    let (mut found, mut at) = (Vec::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    while let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(at)) {
        let end = rustix::fs::seek(&file, SeekFrom::Hole(data)).unwrap();
        at = data / 4096 * 4096;
        while at < end {
            let length = file.read_at(&mut buffer, at).unwrap() / 4096 * 4096;
            if length == 0 {
                return found;
            }
            for (i, block) in buffer[..length].chunks(4096).enumerate() {
                if let Some(it) = wanted(block) {
                    found.push((at + i as u64 * 4096, it));
                }
            }
            at += length as u64;
        }
    }
    found
}

/// Returns the offsets of the test's blocks in a pool file, by LBA and version.
pub fn test_blocks(path: &Path) -> BTreeMap<(u64, u64), Vec<u64>> {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let found = blocks_of(path, |block| {
        block.starts_with(b"TESTDATA").then(|| (number(&block[8..16]), number(&block[16..24])))
    });
    let mut offsets = BTreeMap::<_, Vec<u64>>::new();
    for (offset, key) in found {
        offsets.entry(key).or_default().push(offset);
    }
    offsets
}

/// Flips bits of one byte of a file.
pub fn damage(path: &Path, offset: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], offset).unwrap();
}
