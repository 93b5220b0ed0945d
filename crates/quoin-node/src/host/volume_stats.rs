//! Usage and health of a volume as this node sees them, and its growth.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{NodeHost, is_of_device};
use crate::error::Error;
use crate::records::Access;
use crate::{device, mount, mountinfo};

/// Time within which a device shows the size of its volume.
const RESIZE_DEADLINE: Duration = Duration::from_secs(10);

/// Figures of one volume at one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeStats {
    pub total_bytes: u64,
    /// Unknown for a raw block device.
    pub used_bytes: Option<u64>,
    pub available_bytes: Option<u64>,
    /// Total, used, available; for file systems that count them.
    pub inodes: Option<(u64, u64, u64)>,
    /// The fault as this node sees it; `None` if all is well.
    pub abnormal: Option<String>,
}

impl NodeHost {
    /// Measures a volume at its staging path or one of its targets.
    ///
    /// # Errors
    /// [`Error::NotPresent`] if it is not at that path.
    pub async fn stats(&self, volume: &str, path: &Path) -> Result<VolumeStats, Error> {
        let (_, path_use) = self.path_use(volume, path)?;
        let device = self.attacher.device(volume).await?;
        let missing =
            || Error::NotPresent { volume: volume.to_owned(), path: path_use.path.clone() };
        let device = device.ok_or_else(missing)?;
        if path_use.access == Access::Block {
            return Ok(VolumeStats {
                total_bytes: device::size_bytes(&device)?,
                used_bytes: None,
                available_bytes: None,
                inodes: None,
                abnormal: self.abnormal(volume).await?,
            });
        }
        let mounts = mountinfo::read()?;
        mountinfo::at(&mounts, &path_use.path)
            .filter(|mount| is_of_device(mount, &device))
            .ok_or_else(missing)?;
        let figures = self.measure(volume, &path_use.path).await?;
        let bytes = |blocks: u64| blocks.saturating_mul(figures.f_frsize);
        Ok(VolumeStats {
            total_bytes: bytes(figures.f_blocks),
            used_bytes: Some(bytes(figures.f_blocks.saturating_sub(figures.f_bfree))),
            available_bytes: Some(bytes(figures.f_bavail)),
            inodes: (figures.f_files > 0).then(|| {
                let used = figures.f_files.saturating_sub(figures.f_ffree);
                (figures.f_files, used, figures.f_ffree)
            }),
            abnormal: self.abnormal(volume).await?,
        })
    }

    /// Returns what is wrong with a volume, in words.
    async fn abnormal(&self, volume: &str) -> Result<Option<String>, Error> {
        let faults = self.health(volume, None, None, None).await?.unwrap_or_default();
        let texts: Vec<_> = faults
            .iter()
            .map(|fault| format!("{}: {}", fault.kind.as_str(), fault.message))
            .collect();
        Ok((!texts.is_empty()).then(|| texts.join("; ")))
    }

    /// Grows device and file system to the volume's size in the control plane's records. Returns
    /// the device's size.
    ///
    /// # Errors
    /// [`Error::NotPresent`], [`Error::TooSmall`] if the device does not come to that size,
    /// [`Error::ReadOnlyGrow`].
    pub async fn expand(&self, volume: &str, path: &Path, volume_bytes: u64) -> Result<u64, Error> {
        let expansion = self.expand_steps(volume, path, volume_bytes);
        self.steps.reported(volume, "expanding", expansion).await
    }

    async fn expand_steps(
        &self,
        volume: &str,
        path: &Path,
        volume_bytes: u64,
    ) -> Result<u64, Error> {
        let (record, path_use) = self.path_use(volume, path)?;
        let missing =
            || Error::NotPresent { volume: volume.to_owned(), path: path_use.path.clone() };
        let device = self.attacher.device(volume).await?.ok_or_else(missing)?;
        let staging = record.staging.ok_or_else(missing)?;
        self.step("growing the device")?;
        if device::size_bytes(&device)? < volume_bytes {
            self.attacher.resize(volume, volume_bytes).await?;
        }
        let started = Instant::now();
        let has_bytes = loop {
            let has_bytes = device::size_bytes(&device)?;
            if has_bytes >= volume_bytes {
                break has_bytes;
            }
            if started.elapsed() > RESIZE_DEADLINE {
                let (volume, want_bytes) = (volume.to_owned(), volume_bytes);
                return Err(Error::TooSmall { volume, device, has_bytes, want_bytes });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        self.step("growing the file system")?;
        if let Access::Mount { file_system, .. } = &staging.access
            && self.file_system_bytes(volume, &device).await? < has_bytes
        {
            if staging.read_only || staged_read_only(&staging.access) {
                return Err(Error::ReadOnlyGrow { volume: volume.to_owned() });
            }
            self.grow(volume, &device, Some(&staging.path), *file_system).await?;
        }
        Ok(has_bytes)
    }
}

impl NodeHost {
    /// Gives the blocks back that the file system of a volume does not use. Nothing is done to a block
    /// volume: its owner alone knows what is used there.
    ///
    /// # Errors
    /// [`Error::NotPresent`] if it is not mounted at that path, [`Error::NotTrimmed`],
    /// [`Error::ReadOnlyTrim`], or [`Error::Waiting`] where the trim goes on behind the call.
    pub async fn trim(&self, volume: &str, path: &Path) -> Result<(), Error> {
        let trimming = self.trim_steps(volume, path);
        self.steps.reported(volume, "trimming", trimming).await
    }

    async fn trim_steps(&self, volume: &str, path: &Path) -> Result<(), Error> {
        let (_, path_use) = self.path_use(volume, path)?;
        if path_use.access == Access::Block {
            return Ok(());
        }
        let missing =
            || Error::NotPresent { volume: volume.to_owned(), path: path_use.path.clone() };
        let device = self.attacher.device(volume).await?.ok_or_else(missing)?;
        let mounts = mountinfo::read()?;
        let mount = mountinfo::at(&mounts, &path_use.path)
            .filter(|mount| is_of_device(mount, &device))
            .ok_or_else(missing)?;
        if super::health::is_stopped(mount) {
            return Err(Error::ReadOnlyTrim { volume: volume.to_owned() });
        }
        self.step("trimming the file system")?;
        let (name, path) = (volume.to_owned(), path_use.path);
        self.calls
            .change(volume, "trimming its file system", move |thread| {
                mount::trim(thread, &name, &path)
            })
            .await
    }
}

/// Returns whether the user's own flags requested `ro`.
pub(super) fn staged_read_only(access: &Access) -> bool {
    match access {
        Access::Mount { flags, .. } => {
            crate::mount::parse_flags(flags).is_ok_and(|parsed| parsed.read_only)
        }
        Access::Block => false,
    }
}
