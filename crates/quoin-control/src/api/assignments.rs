//! Assignments of pools and nodes, always complete, made anew from the records each time.

use std::collections::{HashMap, HashSet};

use quoin_api::control::{
    self as api, NodeAssignment, PoolAssignment, ReplicaAddress, ReplicaAssignment,
    TargetAssignment, VolumeSpec,
};
use quoin_identity::convert::membership_message;

use crate::Error;
use crate::controller::Controller;
use crate::state::records::{PoolRecord, ReplicaPhase, VolumePhase, VolumeRecord};

pub(crate) fn membership(record: &VolumeRecord) -> api::Membership {
    membership_message(&(&record.membership).into())
}

pub(crate) fn spec(record: &VolumeRecord) -> VolumeSpec {
    VolumeSpec { size_bytes: record.size_bytes, ..VolumeSpec::from(&record.spec) }
}

impl Controller {
    /// All replicas that a pool is to hold or to remove. `complete` stays unset: the pool keeps
    /// replicas that are not listed, and each deletion is named.
    pub fn pool_assignment(&self, pool: &str) -> PoolAssignment {
        let mut replicas = Vec::new();
        // Records that do not rule order nothing.
        let volumes = match self.check_ruling() {
            Ok(()) => self.volumes.indexed(|index| index.of_pool(pool)),
            Err(_) => Vec::new(),
        };
        for volume in volumes {
            let assignment = |id: String, guid: String, phase: ReplicaPhase| ReplicaAssignment {
                volume_id: volume.id.0.to_string(),
                replica_id: id,
                guid,
                size_bytes: volume.size_bytes,
                phase: phase.as_str().to_owned(),
                membership: Some(membership(&volume)),
                volume_spec: Some(spec(&volume)),
                // `tell_records` fills it in where the pool has not received it.
                record: Vec::new(),
                generation: volume.generation,
                fence_epoch: volume.fenced,
                fence_at_once: volume.fenced_at_once,
            };
            let held = volume.replicas.iter().filter(|replica| replica.pool == pool);
            let held = held.map(|r| assignment(r.id.0.to_string(), r.guid.0.to_string(), r.phase));
            replicas.extend(held);
            let gone = volume.discarded.iter().filter(|discarded| discarded.pool == pool);
            replicas.extend(gone.map(|d| {
                assignment(d.id.0.to_string(), d.guid.0.to_string(), ReplicaPhase::Delete)
            }));
        }
        PoolAssignment {
            replicas,
            complete: false,
            data_security: self.settings.data_security.clone(),
            scrub_request: self.pools.get(pool).map_or(0, |pool| pool.scrub_request),
            holdings_request: self.salvage.request(),
            term: self.term_proof().into(),
            does_not_rule: !self.claims_its_term(),
        }
    }

    /// Adds the records that pools keep, for the volumes that changed since the pool's last
    /// assignment. `told` holds the last generation sent for each replica. Most changes are of one
    /// volume, and a pool may have thousands.
    pub(crate) fn tell_records(
        &self,
        assignment: &mut PoolAssignment,
        told: &mut HashMap<String, u64>,
    ) {
        let assigned: HashSet<&str> = assignment.replicas.iter().map(|r| r.guid.as_str()).collect();
        told.retain(|guid, _| assigned.contains(guid.as_str()));
        for replica in &mut assignment.replicas {
            let last = told.insert(replica.guid.clone(), replica.generation);
            let Some(volume) = self.volumes.get(&replica.volume_id) else { continue };
            if last != Some(replica.generation) && volume.generation == replica.generation {
                replica.record = volume.keepsake();
            }
        }
    }

    /// Requests a scrub of a pool. Returns the request's number, which the pool's report names once
    /// the scrub has begun. A pool that is offline begins when it is back.
    pub async fn request_scrub(&self, pool: &str) -> Result<u64, Error> {
        let running = {
            let observed = self.observed();
            let seen = observed.online_pool(pool, self.settings.offline_after);
            seen.map(|seen| seen.scrub).filter(|scrub| scrub.running).map(|scrub| scrub.request)
        };
        let change = |record: &mut PoolRecord| {
            // A scrub that is requested and has not ended also answers this request.
            if record.scrub_request == 0 || running != Some(record.scrub_request) {
                record.scrub_request += 1;
            }
            Ok(record.scrub_request)
        };
        let updated = self.pools.update(pool, change).await?;
        updated.map(|(_, request)| request).ok_or_else(|| Error::missing("pool", pool))
    }

    /// All volumes that a node's target is to serve; the target closes others.
    pub fn node_assignment(&self, node: &str) -> NodeAssignment {
        let volumes = self.volumes.indexed(|index| index.of_node(node));
        let served = volumes.iter().filter(|volume| {
            volume.phase == VolumePhase::Ready && volume.owner.as_deref() == Some(node)
        });
        let target = |volume: &std::sync::Arc<VolumeRecord>| TargetAssignment {
            volume_id: volume.id.0.to_string(),
            name: volume.spec.name.clone(),
            size_bytes: volume.size_bytes,
            read_only: volume.attachments.iter().any(|a| a.node == node && a.read_only),
            spec: Some(spec(volume)),
            replicas: self.addresses(volume, node),
            desired_replication_factor: volume.membership.drf.into(),
            consistency_factor: volume.desired_cf().into(),
            maintenance: volume.attachments.is_empty(),
            verify: self.verify_order(volume.id.0),
            membership_version: volume.membership.version,
            device: volume.attachments.iter().any(|a| a.node == node && a.device),
            used_since_epoch: volume.used.since_of(node),
        };
        // Targets go on serving their volumes until the records rule again.
        let rules = self.check_ruling().is_ok();
        NodeAssignment {
            targets: served.filter(|_| rules).map(target).collect(),
            complete: rules,
            data_security: self.settings.data_security.clone(),
            served_elsewhere: self.served_elsewhere(node),
            term: self.term_proof().into(),
            does_not_rule: !self.claims_its_term(),
        }
    }

    /// Addresses of the replicas. The address is empty where a pool must not be used: an older
    /// image of its disk may lack promises.
    fn addresses(&self, volume: &VolumeRecord, node: &str) -> Vec<ReplicaAddress> {
        let address = |replica: &crate::state::records::ReplicaRecord| {
            let pool = self.pools.get(&replica.pool);
            let usable = pool.as_ref().filter(|pool| !pool.rolled_back);
            ReplicaAddress {
                replica_id: replica.id.0.to_string(),
                guid: replica.guid.0.to_string(),
                pool: replica.pool.clone(),
                address: usable.map(|pool| pool.address.clone()).unwrap_or_default(),
                same_host: pool.is_some_and(|pool| pool.node == node),
                candidate: !volume.is_known(replica),
                beside: !volume.is_known(replica)
                    && volume.replicas.iter().any(|r| r.id == replica.id && volume.is_known(r)),
                leaving: replica.leaving,
            }
        };
        // A target cannot rebuild a candidate that its pool has not made yet.
        let made = |r: &&crate::state::records::ReplicaRecord| r.phase == ReplicaPhase::Keep;
        volume.replicas.iter().filter(made).map(address).collect()
    }
}
