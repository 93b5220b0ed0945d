//! Block devices of volumes on the nodes: the use of the volume to which each device belongs, and
//! whether a process has the device in use.
//!
//! A device is made for one use of its volume ([`crate::records::Use`]) and fails after it.

use std::time::Duration;

use quoin_types::{Time, VolumeId};

use crate::Refusal;
use crate::records::VolumeRecord;

/// Device as its node reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSeen {
    pub volume: VolumeId,
    pub device: String,
    pub in_use: bool,
    pub mounts: Vec<String>,
    pub since_epoch: u64,
}

/// Returns true if a device on a node was made for a use of the volume that is over.
pub fn is_over(volume: &VolumeRecord, node: &str, made_for: u64) -> bool {
    let is_attached = volume.attachments.iter().any(|a| a.node == node);
    volume.used.is_over(node, made_for, volume.opened.epoch, is_attached)
}

/// Reports of a node since the controller started.
#[derive(Clone, Copy, Debug)]
pub struct NodeReports<'a> {
    pub is_online: bool,
    /// When the last one came; `None`: none did.
    pub last: Option<Time>,
    /// When it said last which devices it has; `None`: it did not say.
    pub devices_told: Option<Time>,
    pub devices: &'a [DeviceSeen],
}

/// Refuses to detach a volume from a node that uses it, or may use it without having reported that.
/// `offline_after`: reports that are older say nothing.
///
/// # Errors
/// Says what uses it, or why that is not known.
pub fn check_unused(
    volume: &VolumeRecord,
    on: &str,
    reports: NodeReports<'_>,
    offline_after: Duration,
    now: Time,
) -> Result<(), Refusal> {
    let name = &volume.spec.name;
    let is_there = reports.is_online;
    let used = reports.devices.iter().filter(|_| is_there).find(|device| {
        let is_over = is_over(volume, on, device.since_epoch);
        device.volume == volume.id.0 && device.in_use && !is_over
    });
    if let Some(DeviceSeen { device, mounts, .. }) = used {
        let device = if device.is_empty() { "a device" } else { device };
        let how = match mounts.as_slice() {
            [] => format!("as {device}: close it there"),
            mounts => format!("as {device}, mounted at {}: unmount it there", mounts.join(", ")),
        };
        return Err(Refusal::Precondition(format!(
            "volume {name:?} is in use on node {on} {how} first. With --node {on} --force it is \
             taken away all the same, and what uses it there loses what it has not synced"
        )));
    }
    // A node that cannot have opened the volume has nothing of it in its caches, unless it reaches it
    // at another one.
    if !volume.may_be_held_by(on) && !volume.used.is_shared() {
        return Ok(());
    }
    let since = |last: Option<Time>| match last {
        Some(last) => format!("for {} s", now.since(last).as_secs()),
        None => "since the controller started".to_owned(),
    };
    let why = match (is_there, reports.devices_told) {
        (true, Some(told)) if now.since(told) < offline_after => return Ok(()),
        (true, told) => format!(
            "node {on} has not said {} which devices it has (its attach process does not answer)",
            since(told)
        ),
        (false, _) => format!("node {on} has not reported {}", since(reports.last)),
    };
    Err(Refusal::Precondition(format!(
        "{why}, and may have volume {name:?} in use. See that it is down, or that its programs may \
         lose what they have not synced, and detach with --node {on} --force: from then on nothing \
         of that node reaches the volume"
    )))
}
