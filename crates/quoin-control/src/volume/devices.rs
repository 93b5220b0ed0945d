//! Block devices of volumes on the nodes: the use of the volume to which each device belongs
//! (`quoin_cluster::records::Use`), and whether a process has the device in use. A device is made for one
//! use and fails after it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use quoin_api::control::{self as api, ServedElsewhere};
use quoin_cluster::ownership::devices::{self, DeviceSeen, NodeReports, is_over};
use quoin_cluster::records::{Concerned, VolumeRecord};
use quoin_types::VolumeId;

use crate::Error;
use crate::fields::{id, sentence, short};
use crate::state::events::Severity;
use crate::state::observed::NodeSeen;
use crate::state::{State, about};
use crate::time;

/// Most devices in one report.
const DEVICES_MAX: usize = 4096;
const MOUNTS_MAX: usize = 8;

/// Checks the devices that a node reports.
pub(crate) fn seen(devices: &[api::DeviceReport]) -> Result<Vec<DeviceSeen>, Error> {
    if devices.len() > DEVICES_MAX {
        return Err(Error::invalid("devices", format!("at most {DEVICES_MAX}")));
    }
    let seen = |device: &api::DeviceReport| {
        if device.mounts.len() > MOUNTS_MAX {
            return Err(Error::invalid("mounts", format!("at most {MOUNTS_MAX}")));
        }
        short("device", &device.device)?;
        let mounts = device.mounts.iter().map(|mount| sentence("mounts", mount));
        let mounts = mounts.collect::<Result<_, _>>()?;
        Ok(DeviceSeen {
            volume: id("volume_id", &device.volume_id)?,
            device: device.device.clone(),
            in_use: device.in_use,
            mounts,
            since_epoch: device.since_epoch,
        })
    };
    devices.iter().map(seen).collect()
}

/// Devices of volumes, as nodes report them.
pub struct Devices {
    state: Arc<State>,
    /// Devices whose volume another node has used since, each told once: node, volume and its use.
    known: Mutex<HashSet<(String, VolumeId, u64)>>,
}

impl Devices {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, known: Mutex::default() }
    }

    /// Returns [`Self::served_elsewhere`], and records one event for each device.
    pub(crate) fn announce(&self, node: &str) -> Vec<ServedElsewhere> {
        let served = self.served_elsewhere(node);
        let mut news = Vec::new();
        let changed = {
            let now: Vec<_> = served
                .iter()
                .filter_map(|served| {
                    let volume = served.volume_id.parse().ok()?;
                    Some((node.to_owned(), volume, served.since_epoch))
                })
                .collect();
            let mut known = self.known.lock().expect("no holder of this lock panics");
            let before = known.len();
            known.retain(|dead| dead.0 != node || now.contains(dead));
            let are_gone = known.len() != before;
            for (dead, served) in now.into_iter().zip(&served) {
                if known.insert(dead) {
                    news.push(served);
                }
            }
            are_gone || !news.is_empty()
        };
        for ServedElsewhere { volume_id, node: by, since_epoch, .. } in news {
            let Some(volume) = self.state.volumes.get(volume_id) else { continue };
            let message = format!(
                "served by {by} since epoch {since_epoch}: mounts of an earlier use on node {node} \
                 are dead and fail their IO; end their users and unmount them, or run `quoin volume \
                 detach --force` there"
            );
            self.state.events.record(Severity::Warning, about(&volume), "MountsDead", message);
        }
        if changed {
            self.state.announce(&Concerned::all_nodes());
        }
        served
    }

    /// Devices of a node that belong to an earlier use of their volume.
    pub(crate) fn served_elsewhere(&self, node: &str) -> Vec<ServedElsewhere> {
        // Records that do not rule may not know which node had a volume last.
        if self.state.check_ruling().is_err() {
            return Vec::new();
        }
        let observed = self.state.observed();
        let devices = observed.nodes.get(node).map_or(&[][..], |seen| seen.devices());
        let over = |device: &DeviceSeen| {
            let volume = self.state.volumes.get(&device.volume.to_string())?;
            let (by, since_epoch) = volume.used.last_opened(volume.opened.epoch);
            is_over(&volume, node, device.since_epoch).then(|| ServedElsewhere {
                volume_id: volume.id.0.to_string(),
                name: volume.spec.name.clone(),
                node: by.to_owned(),
                since_epoch,
            })
        };
        devices.iter().filter_map(over).collect()
    }

    /// Devices that nodes report of a volume.
    pub(crate) fn of(&self, volume: &VolumeRecord) -> Vec<api::VolumeDevice> {
        let observed = self.state.observed();
        let of_it = |(node, seen): (&String, &NodeSeen)| {
            let devices = seen.devices().iter().filter(|d| d.volume == volume.id.0);
            let message = |device: &DeviceSeen| {
                let (by, since_epoch) = volume.used.last_opened(volume.opened.epoch);
                let is_dead = is_over(volume, node, device.since_epoch);
                api::VolumeDevice {
                    node: node.clone(),
                    device: device.device.clone(),
                    in_use: device.in_use,
                    mounts: device.mounts.clone(),
                    dead: match is_dead {
                        true => format!("served by {by} since epoch {since_epoch}"),
                        false => String::new(),
                    },
                }
            };
            devices.map(message).collect::<Vec<_>>()
        };
        observed.nodes.iter().flat_map(of_it).collect()
    }

    /// Refuses to detach a volume from a node that uses it, or may use it without having reported that.
    pub fn check_unused(&self, volume: &VolumeRecord, on: &str) -> Result<(), Error> {
        let observed = self.state.observed();
        let after = self.state.settings.offline_after;
        let seen = observed.nodes.get(on);
        let reports = NodeReports {
            is_online: observed.node_online(on, after),
            last: seen.map(|seen| time::of(seen.last)),
            devices_told: seen.and_then(|seen| Some(time::of(seen.devices.as_ref()?.told))),
            devices: seen.map_or(&[], NodeSeen::devices),
        };
        let at = (self.state.term(), time::now());
        Ok(devices::check_unused(volume, on, reports, after, at)?)
    }
}
