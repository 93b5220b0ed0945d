//! Block devices that lost their server and are still in use.
//!
//! When the attach process is killed, its devices fail all IO, and the kernel keeps each of them
//! until its last user closes it. The kernel no longer shows which volume such a device was, so the
//! process that starts the next attach process checks first and records it here, for the commands
//! that users run.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

use super::loop_devices::{Device, Mount};

fn file(run: &Path) -> PathBuf {
    run.join("lost-devices.json")
}

/// Adds `devices` to those that are remembered and still there.
pub fn remember(run: &Path, devices: Vec<Device>) -> Result<()> {
    let mut all = recall(run);
    all.retain(|known| !devices.iter().any(|device| device.path == known.path));
    all.extend(devices);
    let path = file(run);
    if all.is_empty() {
        return match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", path.display()))
            }
            _ => Ok(()),
        };
    }
    let text = serde_json::to_vec_pretty(&all)?;
    std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}

/// Devices that are still in use. A file that cannot be read names none.
pub fn recall(run: &Path) -> Vec<Device> {
    let text = std::fs::read(file(run)).unwrap_or_default();
    let known: Vec<Device> = serde_json::from_slice(&text).unwrap_or_default();
    known.into_iter().filter(Device::still_there).collect()
}

/// Where the lost devices of `volume` are still mounted.
pub fn mounts_of(run: &Path, volume: &str) -> Vec<(Device, Mount)> {
    let lost = recall(run).into_iter().filter(|device| device.volume == volume);
    lost.flat_map(|device| {
        let mounts = device.mounts().unwrap_or_default();
        mounts.into_iter().map(move |mount| (device.clone(), mount))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_or_reused_device_is_forgotten_and_a_damaged_file_names_none() {
        let directory = tempfile::tempdir().unwrap();
        let gone =
            r#"{"path":"/dev/no-such-loop","file":"/f","volume":"7","number":"7:99","sequence":3}"#;
        let device: Device = serde_json::from_str(gone).unwrap();
        remember(directory.path(), vec![device]).unwrap();
        assert!(file(directory.path()).exists());
        assert!(recall(directory.path()).is_empty());
        remember(directory.path(), Vec::new()).unwrap();
        assert!(!file(directory.path()).exists());
        std::fs::write(file(directory.path()), "{").unwrap();
        assert!(recall(directory.path()).is_empty());
    }
}
