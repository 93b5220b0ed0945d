//! The devices of this host as its node reports them: their volumes, and whether they are in use. The
//! controller's answer says what the records have of them, and this host follows: a device of a
//! volume that is detached or deleted goes, or fails its IO; one that is too small grows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quoin_attach::protocol::{DetachedHere, ServedElsewhere, Usage};
use quoin_attach::{AttachClient, Error, holder};

use quoin_api::control::{DeviceReport, ReportAnswer};

use crate::{device, mountinfo};

/// Longest wait for the attach process. One that takes longer is busy with its devices.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Most mounts that are listed of each device.
const MOUNTS_MAX: usize = 4;

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceUse {
    pub volume: String,
    /// Empty while it is being made, or its process is away.
    pub device: PathBuf,
    /// Some process holds it, or has done IO within the last moments.
    pub in_use: bool,
    /// Mount points of its file system, as this process sees them; the first ones.
    pub mounts: Vec<PathBuf>,
    /// The first epoch of the use that it was made for; 0: unknown.
    pub since_epoch: u64,
    /// Why all its IO fails; empty while it does not.
    pub dead: String,
    /// 0: unknown.
    pub size_bytes: u64,
    /// Which request to attach it was the last one; 0: unknown.
    asked: u64,
}

/// The devices of one report, to which an answer refers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reported {
    devices: BTreeMap<String, DeviceUse>,
}

impl Reported {
    /// Returns them as they are reported to the controller.
    #[must_use]
    pub fn reports(&self) -> Vec<DeviceReport> {
        self.devices.values().cloned().map(DeviceReport::from).collect()
    }
}

/// Client that asks the attach process of this host for its devices.
#[derive(Debug, Clone)]
pub struct DeviceReports {
    client: AttachClient,
    holder: PathBuf,
}

impl DeviceReports {
    /// Asks the attach process behind this socket, which may start later.
    #[must_use]
    pub fn of(attach_socket: &Path) -> Self {
        let holder = attach_socket.with_file_name("holder.sock");
        Self { client: AttachClient::new(attach_socket), holder }
    }

    async fn query(&self) -> Option<Vec<DeviceUse>> {
        match tokio::time::timeout(ANSWER_MAX, self.client.usage()).await {
            Ok(Ok(usage)) => {
                // No mount is named where the table cannot be read.
                let mounts = mountinfo::read().unwrap_or_default();
                Some(usage.into_iter().map(|usage| with_mounts(usage, &mounts)).collect())
            }
            // The holder keeps these devices for the next process.
            Ok(Err(Error::Daemon { .. })) => {
                let holder = self.holder.clone();
                let held = tokio::task::spawn_blocking(move || holder::held_at(&holder)).await;
                Some(held.ok()?.into_iter().map(held_device).collect())
            }
            // An older process does not know the request; one that hangs does not answer.
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// Returns all devices as they are now; `None`: unknown.
    pub async fn report(&self) -> Option<Reported> {
        let devices = self.query().await?;
        let named = devices.into_iter().map(|device| (device.volume.clone(), device));
        Some(Reported { devices: named.collect() })
    }

    /// Follows what the controller answered to a report. All IO fails of devices whose volume another
    /// node has used since: nothing of theirs may reach the volume any more. Those of volumes that are
    /// not attached here any more are removed, or fail their IO; those that are too small grow. Returns
    /// the volumes of which something is left here that should not be, and what.
    pub async fn follow(
        &self,
        reported: Option<&Reported>,
        answer: &ReportAnswer,
    ) -> Vec<(String, String)> {
        let none = Reported::default();
        let reported = &reported.unwrap_or(&none).devices;
        let mut ended = Vec::new();
        for served in &answer.served_elsewhere {
            let (name, node, since) = (&served.name, &served.node, served.since_epoch);
            self.served_elsewhere(&served.volume_id, name, node, since).await;
            ended.push((name.clone(), quoin_attach::served_elsewhere(node, since)));
        }
        for detached in &answer.detached {
            let Some(device) = reported.get(&detached.volume_id) else { continue };
            let is_deleted = detached.name.is_empty();
            let name = if is_deleted { &detached.volume_id } else { &detached.name };
            let why = match is_deleted {
                true => "its volume is deleted",
                false => "its volume is not attached to this host any more",
            };
            if device.asked != 0 {
                let why = why.to_owned();
                let (volume, asked) = (detached.volume_id.clone(), device.asked);
                let told = self.client.detached(DetachedHere { volume, asked, why });
                self.tell(name, told).await;
            }
            let is_told = |(told, _): &(String, String)| told == name;
            if device.in_use && !ended.iter().any(is_told) {
                ended.push((name.clone(), left_over(device, why)));
            }
        }
        for size in &answer.sizes {
            if reported.get(&size.volume_id).is_some_and(|device| device.dead.is_empty()) {
                let resized = self.client.resize(&size.volume_id, size.size_bytes);
                self.tell(&size.volume_id, async { resized.await.map(drop) }).await;
            }
        }
        ended
    }

    async fn tell(&self, volume: &str, told: impl Future<Output = Result<(), Error>>) {
        if let Ok(Err(error)) = tokio::time::timeout(ANSWER_MAX, told).await {
            tracing::debug!(volume, %error, "the attach process does not follow yet; retrying");
        }
    }

    async fn served_elsewhere(&self, volume: &str, name: &str, node: &str, since_epoch: u64) {
        let served = ServedElsewhere {
            volume: volume.to_owned(),
            name: name.to_owned(),
            node: node.to_owned(),
            since_epoch,
        };
        self.tell(name, self.client.served_elsewhere(served)).await;
    }
}

/// Text about a device whose volume is attached here no more, with the way out.
fn left_over(device: &DeviceUse, why: &str) -> String {
    let shown = device.device.display();
    let way_out = match device.mounts.as_slice() {
        [] => "end the programs that have it open".to_owned(),
        mounts => {
            let mounts: Vec<_> = mounts.iter().map(|mount| mount.display().to_string()).collect();
            format!("end the users of {} and unmount it", mounts.join(" and "))
        }
    };
    format!("{shown} is still in use and {why}: {way_out}, and it goes by itself")
}

impl From<DeviceUse> for DeviceReport {
    fn from(device_use: DeviceUse) -> Self {
        let shown = |path: &PathBuf| path.display().to_string();
        DeviceReport {
            device: shown(&device_use.device),
            in_use: device_use.in_use,
            mounts: device_use.mounts.iter().map(shown).collect(),
            since_epoch: device_use.since_epoch,
            volume_id: device_use.volume,
            size_bytes: device_use.size_bytes,
            dead: device_use.dead,
        }
    }
}

fn with_mounts(usage: Usage, mounts: &[mountinfo::Mount]) -> DeviceUse {
    let number = device::major_minor(&usage.device);
    let of_device = |mount: &&mountinfo::Mount| Some((mount.major, mount.minor)) == number;
    let points = mounts.iter().filter(of_device).map(|mount| mount.mount_point.clone());
    DeviceUse {
        mounts: points.take(MOUNTS_MAX).collect(),
        volume: usage.volume,
        device: usage.device,
        in_use: usage.in_use,
        since_epoch: usage.since_epoch,
        dead: usage.dead,
        size_bytes: usage.size,
        asked: usage.asked,
    }
}

/// A device whose process is away: its users wait for the next one.
fn held_device(volume: String) -> DeviceUse {
    DeviceUse {
        volume,
        device: PathBuf::new(),
        in_use: true,
        mounts: Vec::new(),
        since_epoch: 0,
        dead: String::new(),
        size_bytes: 0,
        asked: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn without_attach_process_and_holder_there_are_no_devices() {
        let directory = tempfile::tempdir().unwrap();
        let devices = DeviceReports::of(&directory.path().join("attach.sock"));
        assert_eq!(devices.query().await, Some(Vec::new()));
        assert_eq!(devices.report().await, Some(Reported::default()));
        // A process that hangs is not a process without devices.
        let _listener =
            tokio::net::UnixListener::bind(directory.path().join("attach.sock")).unwrap();
        assert_eq!(devices.query().await, None);
    }
}
