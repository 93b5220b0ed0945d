//! Configuration of a volume's target as the target reports it, beside the requested one.

use std::sync::Arc;

use quoin_api::control as api;
use quoin_cluster::records::{ReplicaPhase, VolumeRecord};
use quoin_types::membership::open_quorum;

use super::Status;
use crate::Error;

impl Status {
    /// Only what the target told under the record's epoch is its own; the records alone are shown
    /// by the volume.
    pub fn target_config(&self, volume: &Arc<VolumeRecord>) -> Result<api::TargetConfig, Error> {
        let name = &volume.spec.name;
        let Some(owner) = volume.opened.owner.as_deref().filter(|_| volume.phase.is_kept()) else {
            return Err(Error::Precondition(format!(
                "volume {name:?} is attached nowhere, so no target holds it: attach it (`quoin volume \
                 attach`), or see what the next one will be given with `quoin volume get`"
            )));
        };
        let observed = self.state.observed();
        let Some(seen) = crate::status::serving(&self.state, &observed, volume) else {
            let why = match observed.node_online(owner, self.state.settings.offline_after) {
                true => "has not told yet how it holds it: ask again",
                false => "does not report: see whether it runs there, and `quoin node list`",
            };
            return Err(Error::Busy(format!(
                "volume {name:?} is at node {owner}, whose target {why}"
            )));
        };
        let Some(goes_by) = &seen.goes_by else {
            return Err(Error::Precondition(format!(
                "the target of node {owner} has had no epoch of volume {name:?} yet: ask again"
            )));
        };
        let held = goes_by.held.clone().unwrap_or_default();
        let granted = goes_by.granted.iter().flat_map(|granted| &granted.known);
        let mut guids: Vec<&str> =
            held.known.iter().chain(granted).map(|member| member.guid.as_str()).collect();
        guids.sort_unstable();
        guids.dedup();
        let replica = |guid: &str| {
            let here = volume.replicas.iter().map(|r| (r.guid, &r.pool));
            let gone = volume.discarded.iter().map(|d| (d.guid, &d.pool));
            let mut all = here.chain(gone);
            let pool = all.find(|(found, _)| found.0.to_string() == guid);
            let state = guid.parse().ok().and_then(|guid| seen.replicas.get(&guid));
            api::TargetReplica {
                guid: guid.to_owned(),
                pool: pool.map(|(_, pool)| pool.clone()).unwrap_or_default(),
                state: state.map(|progress| progress.state.clone()).unwrap_or_default(),
            }
        };
        Ok(api::TargetConfig {
            volume_id: volume.id.0.to_string(),
            volume_name: name.clone(),
            node: seen.node.clone(),
            state: seen.state.clone(),
            waiting_for: seen.waiting_for.clone(),
            epoch: seen.epoch,
            open_quorum: open_quorum(held.rf as u8, held.cf as u8).into(),
            replicas: guids.into_iter().map(replica).collect(),
            asked: asked(volume, goes_by, &held),
            goes_by: Some(api::GoesBy::clone(goes_by)),
        })
    }
}

/// Returns the record's request, where the target has not reached it yet.
fn asked(
    volume: &VolumeRecord,
    goes_by: &api::GoesBy,
    held: &api::Membership,
) -> Option<api::AskedOfTarget> {
    let (membership, changing) = (&volume.membership, volume.changing());
    let same_factors = goes_by.desired_replication_factor == u32::from(membership.drf)
        && goes_by.desired_consistency_factor == u32::from(volume.desired_cf());
    let is_there = changing.is_empty() && same_factors && held.version == membership.version;
    if is_there {
        return None;
    }
    // A replica that its pool has not made yet is nothing that a target is told.
    let named = volume.replicas.iter().all(|replica| {
        let guid = replica.guid.0.to_string();
        match volume.is_known(replica) {
            true => !replica.leaving || goes_by.leaving.contains(&guid),
            false => replica.phase != ReplicaPhase::Keep || goes_by.newcomers.contains(&guid),
        }
    });
    Some(api::AskedOfTarget {
        rf: membership.drf.into(),
        cf: volume.cf_of(membership.drf).into(),
        membership_version: membership.version,
        changing,
        told: same_factors && named,
    })
}
