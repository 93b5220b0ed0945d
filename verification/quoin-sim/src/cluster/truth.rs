//! The true course of things, whatever the records say of it.

use std::collections::{BTreeMap, BTreeSet};

use quoin_cluster::records::VolumeRecord;
use quoin_types::{Membership, ReplicaGuid, VolumeId};

use super::Cluster;
use super::members::Device;
use crate::schedule::SECOND;

#[derive(Default)]
pub(super) struct Truth {
    /// Epochs that nodes acquired.
    pub granted: BTreeMap<(VolumeId, u64), String>,
    /// The newest membership of each volume.
    pub memberships: BTreeMap<VolumeId, Membership>,
    /// Volumes that users deleted.
    pub deleted: BTreeSet<VolumeId>,
    /// The last acknowledged IO of each node by a use that it had alone.
    pub used: BTreeMap<(VolumeId, String), u64>,
    /// Keys that used a token, by its hash; `None`: it was revoked.
    pub tokens: BTreeMap<String, Option<String>>,
    /// When the records were recovered last.
    pub recovered: u64,
    /// Hashes of all tokens that were ever made.
    pub all_tokens: BTreeSet<String>,
}

impl Truth {
    /// Another node has used the volume alone since the device was made.
    pub fn is_over(&self, volume: VolumeId, node: &str, device: &Device) -> bool {
        let of_it = self.used.iter().filter(|((of, _), _)| *of == volume);
        of_it
            .into_iter()
            .any(|((_, by), at)| by != node && device.used.is_some_and(|used| *at > used))
    }
}

impl Cluster {
    /// Holds each record that is written against what must be so in all of them.
    pub(super) fn check_record(&mut self, before: &VolumeRecord, after: &VolumeRecord) {
        let id = after.id.0;
        let broken = |rule: &'static str, detail: String| Some((rule, detail));
        let owner = after.opened.owner.as_deref();
        let holder = &after.grants.holder;
        let attached = &after.attachments;
        let writers = attached.iter().filter(|a| !a.writes_nothing()).count();
        let has = |word: &str| attached.iter().any(|a| a.sharing.as_str() == word);
        let dues =
            attached.iter().filter(|a| a.replay == quoin_cluster::records::Replay::Due).count();
        let is_kept_by_another = |volume: &VolumeRecord| {
            let (holder, owner) = (&volume.grants.holder, volume.opened.owner.as_deref());
            volume.is_granted() && !holder.is_empty() && Some(holder.as_str()) != owner
        };
        let found = if is_kept_by_another(after) && !is_kept_by_another(before) {
            broken("TakenBack", format!("{holder:?} keeps its grant, the owner is {owner:?}"))
        } else if after.opened.epoch < before.opened.epoch {
            broken("EpochsGrow", format!("{} after {}", after.epoch(), before.epoch()))
        } else if attached.len() > 1 && has("") {
            broken("Alone", format!("{attached:?}"))
        } else if writers > 1 && has("single-writer") || writers > dues && has("read-only") {
            broken("Writers", format!("{attached:?}"))
        } else if dues > 1 {
            broken("OneReplays", format!("{attached:?}"))
        } else if owner
            .is_some_and(|o| !attached.is_empty() && attached.iter().all(|a| a.node != o))
        {
            broken("OwnerIsAttached", format!("{owner:?} of {attached:?}"))
        } else if after.membership.version < before.membership.version {
            broken("MembershipMonotone", format!("{:?}", after.membership))
        } else {
            None
        };
        if let Some((rule, detail)) = found {
            self.violate(rule, format!("volume {id}: {detail}"));
        }
    }

    /// A node acquired an epoch: nobody else ever did, and nothing was taken back up to it.
    pub(super) fn check_granted(&mut self, volume: VolumeId, node: &str) {
        let Some(record) = self.records.volumes.get(&volume) else { return };
        let (epoch, fenced) = (record.opened.epoch, record.grants.fenced);
        let owner = record.opened.owner.clone();
        let before = self.truth.granted.insert((volume, epoch), node.to_owned());
        if before.is_some() || epoch <= fenced || owner.as_deref() != Some(node) {
            let detail = format!(
                "volume {volume}: {node} is granted {epoch}, which {before:?} has; up to {fenced} is \
                 taken back, and {owner:?} owns it"
            );
            self.violate("GrantedOnce", detail);
        }
    }

    /// The grant of an epoch is signed once more: for the node that acquired it.
    pub(super) fn check_signed(&mut self, volume: VolumeId, node: &str, epoch: u64) {
        // Records that were recovered do not know whose their epoch is: it is the owner's.
        if self.records.volumes.get(&volume).is_some_and(|r| r.grants.holder.is_empty()) {
            return;
        }
        if self.truth.granted.get(&(volume, epoch)).map(String::as_str) != Some(node) {
            let detail = format!("volume {volume}: {node} gets a grant for {epoch} of nobody");
            self.violate("GrantOfAnEpochOfNobody", detail);
        }
    }

    /// A node lost the volume though nobody used force.
    pub(super) fn check_detached(&mut self, volume: VolumeId, node: &str) {
        let (now, index) = (self.now(), self.index_of(node));
        let Some(device) = self.nodes[index].devices.get(&volume) else { return };
        let Some(since) = device.in_use_since else { return };
        // It may begin to use it between a report and the detaching.
        let is_known = since + super::OFFLINE_AFTER.as_nanos() as u64 + 3 * SECOND < now;
        // By the record it is of an earlier use, and is dead as soon as the node hears that.
        let record = self.records.volumes.get(&volume);
        let is_present = record.is_some_and(|r| r.used.since_of(node) == device.since_epoch);
        let is_dead = device.dead || !is_present || self.truth.is_over(volume, node, device);
        if is_known && !is_dead && device.made > self.truth.recovered {
            let detail =
                format!("volume {volume}: {node} uses it since {} s", (now - since) / SECOND);
            self.violate("DetachedInUse", detail);
        }
    }

    /// A node is taken for lost, and with it the volume: a quorum does not hear its target.
    pub(super) fn check_lost(&mut self, volume: &VolumeRecord, node: &str) {
        let now = self.now();
        let known = &volume.membership.known;
        let heard = known.iter().filter(|member| {
            let held = self.pools.iter().find_map(|pool| pool.replicas.get(&member.guid.0));
            let heard = held.and_then(|replica| replica.heard.as_ref());
            heard.is_some_and(|heard| {
                heard.by == node && heard.last + 4 * SECOND > now && heard.since + 5 * SECOND < now
            })
        });
        let heard = heard.count();
        let membership = Membership::from(&volume.membership);
        if known.len() - heard < membership.open_quorum() {
            let detail = format!("volume {}: {heard} pools hear {node}", volume.id.0);
            self.violate("TakenFromTheLiving", detail);
        }
    }

    /// A pool deletes a replica by order.
    pub(super) fn check_deleted(&mut self, volume: VolumeId, guid: ReplicaGuid) {
        let is_known = self.truth.memberships.get(&volume);
        let is_known = is_known.is_some_and(|m| m.known.iter().any(|m| m.guid == guid));
        if is_known && !self.truth.deleted.contains(&volume) {
            self.violate("KnownIsKept", format!("volume {volume}: {guid} is known and is deleted"));
        }
    }
}
