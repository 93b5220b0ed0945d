//! Volumes and replicas as commands print them.

use quoin_api::control::{
    Attachment, MadeFrom, MirrorOfVolume, Topology, Volume, VolumeDevice, VolumeSpec,
};
use quoin_api::volume::{OPTIONS, Values, VolumeOption};
use quoin_types::Epoch;
use serde::Serialize;
use std::collections::BTreeMap;

use super::keys::EncryptionView;
use super::replica_view::ReplicaView;
use super::verify::VerificationView;
use crate::output::{Row, fields};
use crate::size::show_size;
use crate::snapshot::{RevertView, SnapshotView};

/// A volume as `-o json` has it; sizes in bytes, times in RFC 3339.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeView {
    pub name: String,
    pub id: String,
    pub size_bytes: u64,
    #[serde(flatten)]
    pub state: StateView,
    #[serde(flatten)]
    pub access: AccessView,
    #[serde(flatten)]
    pub membership: MembershipView,
    /// Every option by its key; one that names nothing is left out.
    #[serde(flatten)]
    pub options: BTreeMap<&'static str, serde_json::Value>,
    /// How it is encrypted; none: it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionView>,
    pub created_at: String,
    /// Names of it by its orchestrator: `pvc/name` and the like.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub claim: BTreeMap<String, String>,
    pub snapshots: SnapshotsView,
    /// Source that it was made from; absent: it began empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub made_from: Option<MadeFromView>,
    /// The last return to a snapshot, or the one under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revert: Option<RevertView>,
    /// Its place in a mirror; absent: it is not mirrored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorOfVolumeView>,
    pub replicas: Vec<ReplicaView>,
    /// The comparison of all replicas that is under way, or the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verification: Option<VerificationView>,
    /// State of it on this host, where that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub here: Option<LocalDeviceView>,
}

/// Role of a volume in its mirror, and what is mirrored: the volume itself, or its group.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MirrorOfVolumeView {
    /// Empty: the other cluster has not named the mirror yet, or its record is lost.
    pub role: String,
    pub group: String,
    pub group_id: String,
}

impl From<MirrorOfVolume> for MirrorOfVolumeView {
    fn from(mirror: MirrorOfVolume) -> Self {
        Self { role: mirror.role, group: mirror.group_name, group_id: mirror.group_id }
    }
}

impl MirrorOfVolumeView {
    fn sentence(&self, volume_id: &str) -> String {
        match self.role.as_str() {
            "" => format!("no record of it ({})", self.group_id),
            role if self.group_id == volume_id => role.to_owned(),
            role => format!("{role}, in group {}", self.group),
        }
    }
}

/// Source of a volume, with the names of that time.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MadeFromView {
    /// Empty: the volume as it was.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub snapshot: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub snapshot_id: String,
    pub volume: String,
    pub volume_id: String,
    /// It takes over the blocks that it shares with it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub flattening: bool,
    /// It did so.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shares_nothing: bool,
}

impl From<MadeFrom> for MadeFromView {
    fn from(made: MadeFrom) -> Self {
        let of_snapshot = |text: String| if made.of_volume { String::new() } else { text };
        Self {
            snapshot: of_snapshot(made.snapshot_name),
            snapshot_id: of_snapshot(made.snapshot_id),
            volume: made.volume_name,
            volume_id: made.volume_id,
            flattening: made.flattening,
            shares_nothing: made.shares_nothing,
        }
    }
}

impl MadeFromView {
    fn sentence(&self) -> String {
        let sharing = match (self.flattening, self.shares_nothing) {
            (true, _) => ", being flattened",
            (false, true) => ", shares nothing any more",
            (false, false) => "",
        };
        match self.snapshot.as_str() {
            "" => format!("volume {}{sharing}", self.volume),
            snapshot => format!("snapshot {snapshot} of volume {}{sharing}", self.volume),
        }
    }
}

/// Snapshots of a volume.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotsView {
    pub count: u32,
    /// The last one that was cut; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub newest: Option<SnapshotView>,
}

impl SnapshotsView {
    fn sentence(&self) -> String {
        match (&self.newest, self.count) {
            (_, 0) => String::new(),
            (None, count) => format!("{count}, none of them cut yet"),
            (Some(newest), 1) => format!("1: {} of {}", newest.name, newest.cut_at),
            (Some(newest), count) => {
                format!("{count}, the newest {} of {}", newest.name, newest.cut_at)
            }
        }
    }
}

/// How a volume is.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StateView {
    pub phase: String,
    pub health: String,
    #[serde(rename = "use")]
    pub usage: String,
    pub waiting_for: String,
    pub contract: String,
}

/// Where a volume is used, and can be.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AccessView {
    pub nodes: Vec<String>,
    /// Devices of it as nodes report them, in use or dead.
    pub devices: Vec<DeviceView>,
    /// Where targets serve it over TCP.
    pub nbd: Vec<String>,
    /// Block devices that nodes made when another host asked for them.
    pub devices_made: Vec<String>,
    /// Where it can be used; none: everywhere.
    pub topology: Vec<BTreeMap<String, String>>,
}

impl AccessView {
    /// Where it can be used, in words.
    fn places(&self) -> String {
        let of = |one: &BTreeMap<String, String>| {
            let pairs: Vec<_> = one.iter().map(|(key, value)| format!("{key}={value}")).collect();
            pairs.join(",")
        };
        self.topology.iter().map(of).collect::<Vec<_>>().join(" or ")
    }
}

/// How many replicas a volume has, and by which rule they count.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MembershipView {
    pub epoch: u64,
    pub replication_factor: u32,
    pub consistency_factor: u32,
    pub desired_replication_factor: u32,
    /// Change of its replicas that is under way; empty: none.
    pub changing: String,
    pub membership_version: u64,
    /// When a replica that is gone is replaced, or "off".
    pub replace_after: String,
}

/// A block device of a volume, as its node reports it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    pub node: String,
    pub device: String,
    pub in_use: bool,
    pub mounts: Vec<String>,
    /// Why its IO fails; empty: it does not.
    pub dead: String,
}

impl From<VolumeDevice> for DeviceView {
    fn from(found: VolumeDevice) -> Self {
        let VolumeDevice { node, device, in_use, mounts, dead } = found;
        Self { node, device, in_use, mounts, dead }
    }
}

impl DeviceView {
    fn sentence(&self) -> String {
        let mut text = self.node.clone();
        if !self.device.is_empty() {
            text += &format!(" as {}", self.device);
        }
        if !self.mounts.is_empty() {
            text += &format!(", mounted at {}", self.mounts.join(", "));
        }
        if !self.dead.is_empty() {
            text += &format!(" ({}; mounts there are dead)", self.dead);
        }
        text
    }
}

/// A volume's block device on this host.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalDeviceView {
    /// Empty: there is none.
    pub device: String,
    /// The link to it under the volume's name; empty: there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub link: String,
    pub mounts: Vec<String>,
    /// Why all its IO fails; empty: it does not.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ended: String,
    /// Why no block device can be made or changed here, where that is so; empty: it can.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub blocked: String,
    /// Mounts of a device that was lost with the process that served it.
    pub dead_mounts: Vec<String>,
}

impl LocalDeviceView {
    fn device(&self) -> String {
        let device = match self.link.as_str() {
            "" => self.device.clone(),
            link => format!("{link} ({})", self.device),
        };
        let ended = if self.ended.is_empty() { String::new() } else { format!("; {}", self.ended) };
        match self.mounts.as_slice() {
            [] => device + &ended,
            mounts => format!("{device}, mounted at {}{ended}", mounts.join(", ")),
        }
    }

    fn dead(&self) -> String {
        match self.dead_mounts.as_slice() {
            [] => String::new(),
            mounts => format!("{}: umount them, then attach and mount again", mounts.join(", ")),
        }
    }
}

impl AccessView {
    fn new(
        attachments: &[Attachment],
        devices: Vec<VolumeDevice>,
        topologies: &[Topology],
    ) -> Self {
        let served = attachments.iter().filter(|attachment| !attachment.nbd_uri.is_empty());
        let made = attachments.iter().filter(|attachment| !attachment.device.is_empty());
        Self {
            topology: topologies
                .iter()
                .map(|one| one.segments.clone().into_iter().collect())
                .collect(),
            nodes: attachments.iter().map(|attachment| attachment.node.clone()).collect(),
            devices: devices.into_iter().map(DeviceView::from).collect(),
            nbd: served.map(|attachment| attachment.nbd_uri.clone()).collect(),
            devices_made: made
                .map(|attachment| format!("{} on node {}", attachment.device, attachment.node))
                .collect(),
        }
    }

    fn devices_that(&self, is_it: impl Fn(&DeviceView) -> bool) -> String {
        let shown: Vec<_> =
            self.devices.iter().filter(|device| is_it(device)).map(DeviceView::sentence).collect();
        shown.join("; ")
    }
}

impl From<Volume> for VolumeView {
    fn from(volume: Volume) -> Self {
        let spec = volume.spec.unwrap_or_default();
        let membership = volume.membership.unwrap_or_default();
        Self {
            options: options(&spec),
            claim: spec.claim.clone().into_iter().collect(),
            encryption: spec.encryption.as_ref().map(EncryptionView::from),
            name: spec.name,
            id: volume.id,
            size_bytes: volume.size_bytes,
            state: StateView {
                phase: volume.phase,
                health: volume.health,
                usage: volume.r#use,
                waiting_for: volume.waiting_for,
                contract: volume.contract,
            },
            access: AccessView::new(&volume.attachments, volume.devices, &spec.accessible_topology),
            membership: MembershipView {
                epoch: volume.epoch,
                replication_factor: membership.rf,
                consistency_factor: membership.cf,
                desired_replication_factor: membership.drf,
                changing: volume.changing,
                membership_version: membership.version,
                replace_after: volume.replace_after,
            },
            created_at: volume
                .created_at
                .map(|time| crate::events::show_time(&time))
                .unwrap_or_default(),
            snapshots: SnapshotsView {
                count: volume.snapshots,
                newest: volume.newest_snapshot.map(SnapshotView::from),
            },
            made_from: volume.made_from.map(MadeFromView::from),
            revert: volume.revert.map(RevertView::from),
            mirror: volume.mirror.map(MirrorOfVolumeView::from),
            replicas: volume.replicas.into_iter().map(ReplicaView::from).collect(),
            verification: volume.verification.map(VerificationView::from),
            here: None,
        }
    }
}

/// Returns true if a claim is in this namespace and has this name; `None`: any.
fn is_claim_of(
    claim: &BTreeMap<String, String>,
    namespace: Option<&str>,
    name: Option<&str>,
) -> bool {
    [("pvc/namespace", namespace), ("pvc/name", name)]
        .into_iter()
        .all(|(key, wanted)| wanted.is_none() || claim.get(key).map(String::as_str) == wanted)
}

/// Namespace and name of the claim of Kubernetes that has a volume; empty: none that is known.
pub fn claim_in_words(claim: &BTreeMap<String, String>) -> String {
    let named = ["pvc/namespace", "pvc/name"].iter().filter_map(|key| claim.get(*key));
    named.map(String::as_str).collect::<Vec<_>>().join("/")
}

/// The options of a volume by their keys; `replaceAfter` has a field of its own, with the value in
/// force.
fn options(spec: &VolumeSpec) -> BTreeMap<&'static str, serde_json::Value> {
    let shown = OPTIONS.iter().filter(|option| option.key != "replaceAfter");
    let value = |option: &VolumeOption, given: String| match option.values {
        Values::Rate { .. } => given.parse::<u64>().map_or(given.into(), Into::into),
        _ => given.into(),
    };
    shown.filter_map(|o| Some((o.key, value(o, o.given(spec)?)))).collect()
}

impl VolumeView {
    fn option(&self, key: &str) -> String {
        self.options.get(key).and_then(|value| value.as_str()).unwrap_or_default().to_owned()
    }

    fn in_sync(&self) -> usize {
        self.replicas.iter().filter(|replica| replica.counts_and_is_in_sync()).count()
    }

    /// Pools whose replicas take writes much later than the others.
    fn slow_pools(&self) -> String {
        let slow = self.replicas.iter().filter(|replica| replica.is_slow());
        slow.map(|replica| replica.pool.as_str()).collect::<Vec<_>>().join(",")
    }

    pub fn is_of(&self, namespace: Option<&str>, name: Option<&str>) -> bool {
        is_claim_of(&self.claim, namespace, name)
    }

    /// The claim of Kubernetes that has it, as in `shop/orders`.
    pub fn claim(&self) -> String {
        claim_in_words(&self.claim)
    }

    /// The volume whole, for people.
    pub fn text(&self) -> String {
        let mut text = fields(&[
            ("name", self.name.clone()),
            ("id", self.id.clone()),
            ("size", show_size(self.size_bytes)),
            ("phase", self.state.phase.clone()),
            ("health", self.state.health.clone()),
            (
                "use",
                [self.state.usage.as_str(), &self.access.nodes.join(", ")].join(" ").trim().into(),
            ),
            ("in use", self.access.devices_that(|device| device.dead.is_empty() && device.in_use)),
            ("dead on", self.access.devices_that(|device| !device.dead.is_empty())),
            ("nbd", self.access.nbd.join(", ")),
            (
                "device",
                match &self.here {
                    Some(here) => here.device(),
                    None => self.access.devices_made.join(", "),
                },
            ),
            ("blocked", self.here.as_ref().map(|here| here.blocked.clone()).unwrap_or_default()),
            ("dead mounts", self.here.as_ref().map(LocalDeviceView::dead).unwrap_or_default()),
            ("changing", self.membership.changing.clone()),
            ("waits for", self.state.waiting_for.clone()),
            ("contract", self.state.contract.clone()),
            ("durability", self.option("durability")),
            ("spread", self.option("spread")),
            ("topology", self.access.places()),
            (
                "encrypted",
                self.encryption.as_ref().map(EncryptionView::sentence).unwrap_or_default(),
            ),
            (
                "replicas",
                format!("{} in sync of {}", self.in_sync(), self.membership.replication_factor),
            ),
            ("writes need", format!("{} of them", self.membership.consistency_factor)),
            ("replaceAfter", self.membership.replace_after.clone()),
            (
                "verified",
                self.verification.as_ref().map(VerificationView::sentence).unwrap_or_default(),
            ),
            ("snapshots", self.snapshots.sentence()),
            ("made from", self.made_from.as_ref().map(MadeFromView::sentence).unwrap_or_default()),
            ("went back", self.revert.as_ref().map(RevertView::line).unwrap_or_default()),
            (
                "mirror",
                self.mirror.as_ref().map(|mirror| mirror.sentence(&self.id)).unwrap_or_default(),
            ),
            ("epoch", Epoch(self.membership.epoch).to_string()),
            ("claim", self.claim()),
            ("persistent volume", self.claim.get("pv/name").cloned().unwrap_or_default()),
            ("created", self.created_at.clone()),
        ]);
        for replica in &self.replicas {
            text += &format!("\n  {}", replica.sentence());
        }
        text
    }
}

impl Row for VolumeView {
    const HEADER: &'static [&'static str] = &[
        "NAME",
        "SIZE",
        "HEALTH",
        "USE",
        "IN SYNC",
        "NODE",
        "WAITS FOR",
        "SLOW",
        "PHASE",
        "EPOCH",
        "CONTRACT",
        "CLAIM",
        "ID",
    ];
    const NARROW: usize = 7;

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            show_size(self.size_bytes),
            self.state.health.clone(),
            self.state.usage.clone(),
            format!("{}/{}", self.in_sync(), self.membership.replication_factor),
            self.access.nodes.join(","),
            self.state.waiting_for.clone(),
            self.slow_pools(),
            self.state.phase.clone(),
            Epoch(self.membership.epoch).to_string(),
            self.state.contract.clone(),
            self.claim(),
            self.id.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_found_by_the_namespace_and_the_name_of_their_claim() {
        let claim = |namespace: &str, name: &str| {
            let named = [("pvc/namespace", namespace), ("pvc/name", name)];
            named.into_iter().map(|(key, name)| (key.to_owned(), name.to_owned())).collect()
        };
        let orders = claim("shop", "orders");
        assert!(is_claim_of(&orders, Some("shop"), None));
        assert!(is_claim_of(&orders, Some("shop"), Some("orders")));
        assert!(is_claim_of(&orders, None, Some("orders")));
        assert!(!is_claim_of(&orders, Some("shop2"), Some("orders")));
        assert!(!is_claim_of(&orders, Some("shop"), Some("order")));
        assert!(!is_claim_of(&BTreeMap::new(), Some("shop"), None), "it has no claim");
        assert!(is_claim_of(&BTreeMap::new(), None, None));
    }
}
