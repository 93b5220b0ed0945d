//! Block devices of volumes on the nodes: the use of the volume to which each device belongs, and
//! whether a process has the device in use.
//!
//! The caches of a node hold the volume's state as that node left it. Once another node has used
//! the volume, nothing from these caches may reach it, also when the first node has the volume
//! again. So a record numbers its uses ([`Use`]): a use is the time in which one node alone has the
//! volume, over any number of attachments and openings. A device is made for one use and fails
//! after it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use quoin_api::control::{self as api, ServedElsewhere, VolumeRef};
use quoin_types::VolumeId;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::Error;
use crate::api::reports::{id, sentence, short};
use crate::state::changes::Concerned;
use crate::state::events::Severity;
use crate::state::observed::NodeSeen;
use crate::state::records::VolumeRecord;
use crate::state::{State, about};

/// Most devices in one report.
const DEVICES_MAX: usize = 4096;
const MOUNTS_MAX: usize = 8;

/// Use of a volume by one node.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Use {
    /// Node that had the volume attached last; empty: not known.
    #[serde(default, rename = "used_by", skip_serializing_if = "String::is_empty")]
    pub by: String,
    /// Lower limit of the epochs of this use; all epochs of earlier uses are lower.
    #[serde(default, rename = "used_since_epoch", skip_serializing_if = "is_zero")]
    pub since_epoch: u64,
}

/// Stands for the nodes of a use that several share; no node has this name.
const SHARED: &str = "*";

pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Use {
    /// Begins the use of a node. `since_epoch` is above all epochs of other nodes' uses.
    pub(crate) fn begin(&mut self, node: &str, since_epoch: u64) {
        if self.by != node {
            node.clone_into(&mut self.by);
            self.since_epoch = since_epoch;
        }
    }

    /// Begins a use by several nodes. It lasts as long as nodes that share the volume follow each
    /// other: what one of them has cached is its own affair.
    pub(crate) fn begin_shared(&mut self, since_epoch: u64) {
        self.begin(SHARED, since_epoch);
    }

    /// Ends the use without a next one: the next one is new, whoever begins it.
    pub(crate) fn end(&mut self) {
        self.by.clear();
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.by == SHARED
    }

    /// Node that has it, in words.
    fn user(&self) -> &str {
        if self.is_shared() { "other nodes" } else { &self.by }
    }

    /// First epoch of this node's use; 0 where the use is another node's.
    pub(crate) fn since_of(&self, node: &str) -> u64 {
        if self.by == node || self.is_shared() { self.since_epoch } else { 0 }
    }

    /// Returns true if a device on a node was made for an earlier use, and this use has begun with an
    /// opening. `is_attached`: the node has the volume.
    fn is_over(&self, node: &str, made_for: u64, epoch: u64, is_attached: bool) -> bool {
        let is_another = match self.is_shared() {
            true => !is_attached,
            false => self.by != node,
        };
        let is_earlier = is_another || (made_for != 0 && made_for < self.since_epoch);
        !self.by.is_empty() && is_earlier && epoch >= self.since_epoch
    }
}

/// Device as its node reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceSeen {
    pub volume: VolumeId,
    pub device: String,
    pub in_use: bool,
    pub mounts: Vec<String>,
    pub since_epoch: u64,
}

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

/// Returns true if a device on a node was made for a use of the volume that is over.
fn is_over(volume: &VolumeRecord, node: &str, made_for: u64) -> bool {
    let is_attached = volume.attachments.iter().any(|a| a.node == node);
    volume.used.is_over(node, made_for, volume.opened.epoch, is_attached)
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
            is_over(&volume, node, device.since_epoch).then(|| ServedElsewhere {
                volume_id: volume.id.0.to_string(),
                name: volume.spec.name.clone(),
                node: volume.used.user().to_owned(),
                since_epoch: volume.used.since_epoch,
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
                let (by, since_epoch) = (volume.used.user(), volume.used.since_epoch);
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

    /// Refuses to detach a volume that a node uses, or may use without having reported it. `node`:
    /// the node to check; empty: all nodes to which the volume is attached.
    pub fn check_unused(&self, reference: Option<&VolumeRef>, node: &str) -> Result<(), Error> {
        let volume = match self.state.volume(reference) {
            Err(Error::NotFound { .. }) => return Ok(()),
            found => found?,
        };
        let observed = self.state.observed();
        let nodes = volume.attachments.iter().map(|attachment| &attachment.node);
        for on in nodes.filter(|on| node.is_empty() || *on == node) {
            let is_there = observed.node_online(on, self.state.settings.offline_after);
            self.check_unused_on(&volume, on, observed.nodes.get(on), is_there)?;
        }
        Ok(())
    }

    /// Checks one node. `seen`: its reports since the controller started.
    fn check_unused_on(
        &self,
        volume: &VolumeRecord,
        on: &str,
        seen: Option<&NodeSeen>,
        is_there: bool,
    ) -> Result<(), Error> {
        let name = &volume.spec.name;
        let used =
            seen.into_iter().filter(|_| is_there).flat_map(NodeSeen::devices).find(|device| {
                let is_over = is_over(volume, on, device.since_epoch);
                device.volume == volume.id.0 && device.in_use && !is_over
            });
        if let Some(DeviceSeen { device, mounts, .. }) = used {
            let device = if device.is_empty() { "a device" } else { device };
            let how = match mounts.as_slice() {
                [] => format!("as {device}: close it there"),
                mounts => {
                    format!("as {device}, mounted at {}: unmount it there", mounts.join(", "))
                }
            };
            return Err(Error::Precondition(format!(
                "volume {name:?} is in use on node {on} {how} first. With --node {on} --force it is \
                 taken away all the same, and what uses it there loses what it has not synced"
            )));
        }
        // A node that cannot have opened the volume has nothing of it in its caches, unless it reaches it
        // at another one.
        if !volume.may_be_held_by(on) && !volume.used.is_shared() {
            return Ok(());
        }
        let since = |last: Option<Instant>| match last {
            Some(last) => format!("for {} s", last.elapsed().as_secs()),
            None => "since the controller started".to_owned(),
        };
        let told = seen.and_then(|seen| seen.devices.as_ref()).map(|devices| devices.told);
        let why = match (is_there, told) {
            (true, Some(told)) if told.elapsed() < self.state.settings.offline_after => {
                return Ok(());
            }
            (true, told) => format!(
                "node {on} has not said {} which devices it has (its attach process does not answer)",
                since(told)
            ),
            (false, _) => {
                format!("node {on} has not reported {}", since(seen.map(|seen| seen.last)))
            }
        };
        Err(Error::Precondition(format!(
            "{why}, and may have volume {name:?} in use. See that it is down, or that its programs may \
             lose what they have not synced, and detach with --node {on} --force: from then on nothing \
             of that node reaches the volume"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_lasts_over_attachments_of_one_node_and_ends_with_another_ones_opening() {
        let mut used = Use::default();
        assert!(!used.is_over("h1", 0, 9, true), "records of former versions say nothing");
        used.begin("h1", 5);
        used.begin("h1", 9);
        assert_eq!((used.since_of("h1"), used.since_of("h2")), (5, 0));
        assert!(!used.is_over("h1", 5, 7, true));

        used.begin("h2", 8);
        assert!(!used.is_over("h1", 5, 7, false), "nobody has opened it there yet");
        assert!(used.is_over("h1", 5, 8, false));
        assert!(used.is_over("h1", 0, 8, false), "also where its use was not told");
        assert!(!used.is_over("h2", 8, 8, true));

        // Back on the first node: a device of its former use does not belong to its new use.
        used.begin("h1", 8);
        assert!(used.is_over("h1", 5, 9, true));
        assert!(!used.is_over("h1", 9, 9, true));
    }

    #[test]
    fn a_shared_use_lasts_over_the_nodes_that_have_it_and_ends_for_each_one_that_leaves() {
        let mut used = Use::default();
        used.begin("h1", 5);
        used.begin_shared(8);
        used.begin_shared(11);
        assert_eq!((used.since_of("h1"), used.since_of("h2")), (8, 8));
        assert!(used.is_over("h1", 5, 8, true), "of the use that it had alone");
        assert!(!used.is_over("h1", 8, 12, true) && !used.is_over("h2", 0, 12, true));
        assert!(used.is_over("h2", 8, 12, false), "it is not attached there any more");
        used.begin("h1", 14);
        assert!(used.is_over("h1", 8, 14, true) && used.is_over("h2", 8, 14, false));
    }
}
