//! Block devices of volumes on the nodes: the use of the volume to which each device belongs
//! (`quoin_cluster::records::Use`), and whether a process has the device in use. A device is made for one
//! use and fails after it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quoin_api::control::{self as api, DetachedDevice, DeviceSize, ReportAnswer, ServedElsewhere};
use quoin_cluster::ownership::devices::{self, DeviceSeen, NodeReports, is_detached, is_over};
use quoin_cluster::records::{Concerned, VolumeRecord};
use quoin_types::{Epoch, VolumeId};

use crate::Error;
use crate::fields::{id, sentence, short};
use crate::state::events::{Object, Severity};
use crate::state::observed::NodeSeen;
use crate::state::{State, about};
use crate::time;

/// Most devices in one report.
const DEVICES_MAX: usize = 4096;
const MOUNTS_MAX: usize = 8;
/// Time that users of a device have after its volume was detached, before an event names them. Their
/// host gives them a little more, and then fails their IO.
const IN_USE_FOR: Duration = Duration::from_secs(3);

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
            size_bytes: device.size_bytes,
            dead: sentence("dead", &device.dead)?,
        })
    };
    devices.iter().map(seen).collect()
}

/// Devices of volumes, as nodes report them.
pub struct Devices {
    state: Arc<State>,
    /// Devices whose volume another node has used since, each told once: node, volume and its use.
    known: Mutex<HashSet<(String, VolumeId, u64)>>,
    /// Devices in use of volumes that are detached from their node, by node and volume: since when, and
    /// whether an event tells of it.
    left: Mutex<HashMap<(String, VolumeId), (Instant, bool)>>,
}

/// Answer to a report of devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DevicesAnswer {
    /// Devices of an earlier use of their volume.
    pub served_elsewhere: Vec<ServedElsewhere>,
    /// Devices of volumes that are not attached to the node.
    pub detached: Vec<DetachedDevice>,
    /// Devices that are smaller than their volume.
    pub sizes: Vec<DeviceSize>,
}

impl From<DevicesAnswer> for ReportAnswer {
    fn from(answer: DevicesAnswer) -> Self {
        let DevicesAnswer { served_elsewhere, detached, sizes } = answer;
        Self { served_elsewhere, detached, sizes, ..Self::default() }
    }
}

impl Devices {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, known: Mutex::default(), left: Mutex::default() }
    }

    /// Returns what the records have of the devices that a node reported just now, and records events of
    /// those that are dead.
    pub(crate) fn answer(&self, node: &str) -> DevicesAnswer {
        // Records that do not order may lack a volume, and where it is attached.
        if !self.state.orders_nodes() {
            return DevicesAnswer::default();
        }
        let devices = self.state.observed().nodes.get(node).map(|seen| seen.devices().to_vec());
        let devices = devices.unwrap_or_default();
        let (mut detached, mut sizes, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for device in &devices {
            let volume = self.state.volumes.get(&device.volume.to_string());
            let volume_id = device.volume.to_string();
            if is_detached(volume.as_deref(), node) {
                if device.in_use {
                    left.push((device, volume.clone()));
                }
                let name = volume.map(|volume| volume.spec.name.clone()).unwrap_or_default();
                detached.push(DetachedDevice { volume_id, name });
            } else if let Some(volume) = volume
                && (1..volume.size_bytes).contains(&device.size_bytes)
            {
                sizes.push(DeviceSize { volume_id, size_bytes: volume.size_bytes });
            }
        }
        self.tell_of_the_left(node, &left);
        DevicesAnswer { served_elsewhere: self.announce(node), detached, sizes }
    }

    /// Records an event of each device whose users were not done within some seconds after its volume was
    /// detached: their IO fails.
    fn tell_of_the_left(&self, node: &str, left: &[(&DeviceSeen, Option<Arc<VolumeRecord>>)]) {
        let now = Instant::now();
        let news = {
            let mut known = self.left.lock().expect("no holder of this lock panics");
            known.retain(|(on, volume), _| {
                on != node || left.iter().any(|(device, _)| device.volume == *volume)
            });
            let is_news = |(device, _): &&(&DeviceSeen, _)| {
                let key = (node.to_owned(), device.volume);
                let (since, told) = known.entry(key).or_insert((now, false));
                let lasts = now.duration_since(*since) >= IN_USE_FOR || !device.dead.is_empty();
                lasts && !std::mem::replace(told, true)
            };
            left.iter().filter(is_news).collect::<Vec<_>>()
        };
        for (device, volume) in news {
            let id = device.volume.to_string();
            let object =
                volume.as_ref().map_or_else(|| Object::new("volume", &id, &id), |v| about(v));
            let state = if volume.is_some() { "detached from" } else { "deleted, and left on" };
            let way_out = match device.mounts.as_slice() {
                [] => format!("end the programs that have {} open", device.device),
                mounts => format!("end the users of {} and unmount it", mounts.join(", ")),
            };
            let message = format!(
                "{state} node {node}, where its device {} is in use, and fails its IO, as nothing will \
                 answer it: {way_out}, or run `quoin volume detach --force {id}` there",
                device.device
            );
            self.state.events.record(Severity::Warning, object, "DeviceLeft", message);
        }
    }

    /// Returns [`Self::served_elsewhere`], and records one event for each device.
    fn announce(&self, node: &str) -> Vec<ServedElsewhere> {
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
            let since_epoch = Epoch(*since_epoch);
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
        // Records that do not order may not know which node had a volume last.
        if !self.state.orders_nodes() {
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
                        true => format!("served by {by} since epoch {}", Epoch(since_epoch)),
                        false => device.dead.clone(),
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
