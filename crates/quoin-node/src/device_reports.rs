//! The devices of this host as its node reports them: their volumes, and whether they are in use.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quoin_attach::protocol::{ServedElsewhere, Usage};
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

    /// Returns all devices as they are reported to the controller; `None`: unknown.
    pub async fn report(&self) -> Option<Vec<DeviceReport>> {
        Some(self.query().await?.into_iter().map(DeviceReport::from).collect())
    }

    /// Makes all IO fail of those devices whose volume another node has used since, by the
    /// controller's answer: no pending IO of theirs may reach the volume any more. Returns the
    /// volumes and the reasons.
    pub async fn end_served_elsewhere(&self, answer: &ReportAnswer) -> Vec<(String, String)> {
        let mut ended = Vec::new();
        for served in &answer.served_elsewhere {
            let (name, node, since) = (&served.name, &served.node, served.since_epoch);
            self.served_elsewhere(&served.volume_id, name, node, since).await;
            let why = format!("served by {node} since epoch {since}; mounts here are dead");
            ended.push((name.clone(), why));
        }
        ended
    }

    async fn served_elsewhere(&self, volume: &str, name: &str, node: &str, since_epoch: u64) {
        let served = ServedElsewhere {
            volume: volume.to_owned(),
            name: name.to_owned(),
            node: node.to_owned(),
            since_epoch,
        };
        let outcome = tokio::time::timeout(ANSWER_MAX, self.client.served_elsewhere(served)).await;
        if let Ok(Err(error)) = outcome {
            tracing::debug!(volume = name, %error, "cannot notify the attach process; retrying");
        }
    }
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
        assert_eq!(devices.report().await, Some(Vec::new()));
        // A process that hangs is not a process without devices.
        let _listener =
            tokio::net::UnixListener::bind(directory.path().join("attach.sock")).unwrap();
        assert_eq!(devices.query().await, None);
    }
}
