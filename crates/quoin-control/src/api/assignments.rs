//! Assignments of pools and nodes: whole, as they are at a moment, and in part, as they change.
//!
//! A stream sends its member the whole assignment first, and then only changes: the cost of a
//! change, for the controller and on the wire, does not grow with the number of volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use quoin_api::control::{
    self as api, MemberKeys, NodeAssignment, PoolAssignment, ReplicaAddress, ReplicaAssignment,
    ServedAt, Sharer, TargetAssignment,
};
use quoin_cluster::ownership::replicas;
use quoin_cluster::records::{
    AttachmentRecord, BaseUse, MemberOfCluster, PoolRecord, ReplicaPhase, ReplicaRecord,
    VolumeRecord,
};
use quoin_identity::Role;
use quoin_types::VolumeId;

use crate::Error;
use crate::disaster::salvage::Salvage;
use crate::membership::term::Terms;
use crate::messages::{membership, spec};
use crate::state::State;
use crate::state::changes::News;
use crate::volume::devices::Devices;
use crate::volume::reclaim::Reclaims;
use crate::volume::verification::Verifier;

/// Replicas of a volume that a pool is to hold or to remove.
fn replicas_of(volume: &VolumeRecord, pool: &str) -> Vec<ReplicaAssignment> {
    let assignment = |id: String, guid: String, phase: ReplicaPhase| ReplicaAssignment {
        volume_id: volume.id.0.to_string(),
        replica_id: id,
        guid,
        size_bytes: volume.size_bytes,
        phase: phase.as_str().to_owned(),
        membership: Some(membership(volume)),
        volume_spec: Some(spec(volume)),
        // Filled in where the pool has not received it.
        record: Vec::new(),
        generation: volume.generation,
        fence_epoch: volume.grants.fenced,
        fence_at_once: volume.grants.fenced_at_once,
        flatten: volume.source.as_ref().is_some_and(|s| s.base == BaseUse::Flattening),
        source: volume.source.as_ref().filter(|_| phase == ReplicaPhase::Clone).map(|source| {
            api::CloneSource {
                volume_id: source.volume.0.to_string(),
                snapshot_id: source.snapshot.0.to_string(),
            }
        }),
    };
    let held = volume.replicas.iter().filter(|replica| replica.pool == pool);
    let held = held.map(|r| assignment(r.id.0.to_string(), r.guid.0.to_string(), r.phase));
    let gone = volume.discarded.iter().filter(|discarded| discarded.pool == pool);
    let gone =
        gone.map(|d| assignment(d.id.0.to_string(), d.guid.0.to_string(), ReplicaPhase::Delete));
    held.chain(gone).collect()
}

/// Number of an attachment whose requests are numbered, or 0.
fn client_of(attachment: &AttachmentRecord) -> u64 {
    if attachment.writes_nothing() { 0 } else { attachment.client }
}

/// Makes assignments.
#[derive(Clone)]
pub struct Assignments {
    state: Arc<State>,
    verifier: Arc<Verifier>,
    devices: Arc<Devices>,
    reclaims: Arc<Reclaims>,
    terms: Arc<Terms>,
    salvage: Arc<Salvage>,
}

impl Assignments {
    pub(crate) fn new(
        state: Arc<State>,
        verifier: Arc<Verifier>,
        devices: Arc<Devices>,
        reclaims: Arc<Reclaims>,
        terms: Arc<Terms>,
        salvage: Arc<Salvage>,
    ) -> Self {
        Self { state, verifier, devices, reclaims, terms, salvage }
    }

    /// All replicas that a pool is to hold or to remove. `complete` stays unset: the pool keeps
    /// replicas that are not listed, and each deletion is named.
    pub fn of_pool(&self, pool: &str) -> PoolAssignment {
        // Records that do not rule order nothing.
        let volumes = match self.state.check_ruling() {
            Ok(()) => self.state.volumes_of_pool(pool),
            Err(_) => Vec::new(),
        };
        let replicas = volumes.iter().flat_map(|volume| replicas_of(volume, pool)).collect();
        PoolAssignment { replicas, ..self.head_of_pool(pool) }
    }

    /// A pool's assignment without its replicas.
    fn head_of_pool(&self, pool: &str) -> PoolAssignment {
        let state = &self.state;
        PoolAssignment {
            data_security: state.settings.data_security.clone(),
            scrub_request: state.pools.get(pool).map_or(0, |pool| pool.scrub_request),
            holdings_request: self.salvage.request(),
            term: self.terms.proof().into(),
            does_not_rule: !self.terms.claims(),
            reclaims: match state.check_ruling() {
                Ok(()) => self.reclaims.of_pool(pool),
                Err(_) => Vec::new(),
            },
            ..PoolAssignment::default()
        }
    }

    /// All volumes that a node's target is to serve; the target closes others.
    pub fn of_node(&self, node: &str) -> NodeAssignment {
        // Targets go on serving their volumes until the records rule.
        let rules = self.state.orders_nodes();
        let volumes = match rules {
            true => self.state.volumes_of_node(node),
            false => Vec::new(),
        };
        let targets = volumes.iter().filter_map(|volume| self.target(volume, node)).collect();
        NodeAssignment { targets, complete: rules, ..self.head_of_node(node) }
    }

    /// A node's assignment without its volumes.
    fn head_of_node(&self, node: &str) -> NodeAssignment {
        let state = &self.state;
        NodeAssignment {
            data_security: state.settings.data_security.clone(),
            served_elsewhere: self.devices.served_elsewhere(node),
            members: self.openers(node),
            fences: state.fences_told().filter(|_| state.check_ruling().is_ok()),
            term: self.terms.proof().into(),
            does_not_rule: !self.terms.claims(),
            ..NodeAssignment::default()
        }
    }

    /// Members whose certificates open all that a node's target serves.
    fn openers(&self, node: &str) -> Vec<MemberKeys> {
        // Records that do not rule may be an old copy, which knows admins that were removed since.
        if self.state.check_ruling().is_err() {
            return Vec::new();
        }
        let opens = |member: &&Arc<MemberOfCluster>| {
            let is_itself = member.role == Role::Node.as_str() && member.holder == node;
            member.role == Role::Admin.as_str() || is_itself
        };
        let members = self.state.joined.members.list();
        let keys = members.iter().filter(opens).map(|member| MemberKeys {
            role: member.role.clone(),
            name: member.holder.clone(),
            key_hashes: member.key_hashes(),
        });
        keys.filter(|member| !member.key_hashes.is_empty()).collect()
    }

    /// Hashes of the keys by which a node is known.
    fn key_hashes_of(&self, node: &str) -> Vec<String> {
        let member = self.state.joined.members.get(&format!("{}/{node}", Role::Node));
        member.map(|member| member.key_hashes()).unwrap_or_default()
    }

    /// Nodes that share a volume with the one that serves it.
    fn sharers(&self, volume: &VolumeRecord, owner: &str) -> Vec<Sharer> {
        let others = volume.attachments.iter().filter(|a| a.node != owner);
        let sharers = others.map(|a| Sharer {
            node: a.node.clone(),
            read_only: a.writes_nothing(),
            key_hashes: self.key_hashes_of(&a.node),
            client: client_of(a),
        });
        sharers.collect()
    }

    /// The assignment of a volume to a node's target; `None`: it has nothing to do with it.
    fn target(&self, volume: &VolumeRecord, node: &str) -> Option<TargetAssignment> {
        let owner = volume.opened.owner.as_deref().filter(|_| volume.phase.is_kept())?;
        let attachment = volume.attachments.iter().find(|a| a.node == node);
        let is_owner = owner == node;
        if !is_owner && attachment.is_none() {
            return None;
        }
        Some(TargetAssignment {
            volume_id: volume.id.0.to_string(),
            name: volume.spec.name.clone(),
            size_bytes: volume.size_bytes,
            read_only: attachment.map_or(!self.state.is_written(volume), |a| a.writes_nothing()),
            spec: Some(spec(volume)),
            replicas: if is_owner { self.addresses(volume, node) } else { Vec::new() },
            sharers: if is_owner { self.sharers(volume, node) } else { Vec::new() },
            served_at: (!is_owner).then(|| self.served_at(owner)),
            desired_replication_factor: volume.membership.drf.into(),
            consistency_factor: volume.desired_cf().into(),
            maintenance: volume.attachments.is_empty(),
            verify: self.verifier.order(volume.id.0),
            membership_version: volume.membership.version,
            device: attachment.is_some_and(|a| a.device),
            used_since_epoch: volume.used.since_of(node),
            options_version: self.state.term().version_of(volume.generation),
            client: attachment.map_or(0, client_of),
            feed: self.state.mirrored.feed(volume.id.0).filter(|_| {
                // A client may change what it shows.
                is_owner && volume.attachments.is_empty()
            }),
        })
    }

    /// Where the target of a node is reached by others.
    fn served_at(&self, node: &str) -> ServedAt {
        let observed = self.state.observed();
        let seen = observed.nodes.get(node);
        let address = seen.map(|seen| seen.share_address.clone()).unwrap_or_default();
        ServedAt { node: node.to_owned(), address, key_hashes: self.key_hashes_of(node) }
    }

    /// Addresses of the replicas. The address is empty where a pool must not be used: an older
    /// image of its disk may lack promises.
    fn addresses(&self, volume: &VolumeRecord, node: &str) -> Vec<ReplicaAddress> {
        let desired = replicas::desired(volume);
        let address = |replica: &ReplicaRecord| {
            let newcomer = desired.newcomer(replica.member());
            let pool = self.state.pools.get(&replica.pool);
            let usable = pool.as_ref().filter(|pool| !pool.rolled_back);
            ReplicaAddress {
                replica_id: replica.id.0.to_string(),
                guid: replica.guid.0.to_string(),
                pool: replica.pool.clone(),
                address: usable.map(|pool| pool.address.clone()).unwrap_or_default(),
                same_host: pool.is_some_and(|pool| pool.node == node),
                candidate: newcomer.is_some(),
                beside: newcomer.is_some_and(|newcomer| newcomer.beside),
                leaving: desired.leaving.contains(&replica.member()),
            }
        };
        // A target cannot rebuild a candidate that its pool has not made yet.
        let made = |r: &&ReplicaRecord| r.phase == ReplicaPhase::Keep;
        volume.replicas.iter().filter(made).map(address).collect()
    }

    /// Requests a scrub of a pool. Returns the request's number, which the pool's report names once
    /// the scrub has begun. A pool that is offline begins when it is back.
    pub async fn request_scrub(&self, pool: &str) -> Result<u64, Error> {
        let state = &self.state;
        let running = {
            let observed = state.observed();
            let seen = observed.online_pool(pool, state.settings.offline_after);
            seen.map(|seen| seen.scrub).filter(|scrub| scrub.running).map(|scrub| scrub.request)
        };
        let change = |record: &mut PoolRecord| {
            // A scrub that is requested and has not ended also answers this request.
            if record.scrub_request == 0 || running != Some(record.scrub_request) {
                record.scrub_request += 1;
            }
            Ok(record.scrub_request)
        };
        let updated = state.pools.update(pool, change).await?;
        updated.map(|(_, request)| request).ok_or_else(|| Error::missing("pool", pool))
    }
}

/// Assignment of a pool as one stream has told it.
pub struct PoolStream {
    assignments: Assignments,
    pool: String,
    /// The pool takes changes alone.
    /// The records that its replicas were told by.
    told: BTreeMap<VolumeId, Arc<VolumeRecord>>,
    /// The rest of what was told last; `None`: nothing was told yet.
    head: Option<PoolAssignment>,
    ruled: bool,
}

impl PoolStream {
    pub fn new(assignments: Assignments, pool: &str) -> Self {
        let (pool, told) = (pool.to_owned(), BTreeMap::new());
        Self { assignments, pool, told, head: None, ruled: false }
    }

    /// The next message, if there is something to tell. `news`: what may have changed since the last
    /// call.
    pub fn next(&mut self, news: News) -> Option<PoolAssignment> {
        let state = self.assignments.state.clone();
        let head = self.assignments.head_of_pool(&self.pool);
        let before = self.head.replace(head.clone());
        // Records that do not rule order nothing. The first list after that is whole.
        let rules = state.check_ruling().is_ok();
        let ruled = std::mem::replace(&mut self.ruled, rules);
        let begins = before.is_none() || !ruled;
        if !rules {
            self.told.clear();
            return (ruled || before.as_ref() != Some(&head)).then_some(head);
        }
        let (mut changed, mut removed) = (Vec::new(), Vec::new());
        for id in self.concerned(&state, if begins { News::All } else { news }) {
            let now = state.volumes.get(&id.to_string());
            let now = now.filter(|volume| volume.pools().any(|pool| *pool == self.pool));
            let was = match &now {
                Some(now) => self.told.insert(id, now.clone()),
                None => self.told.remove(&id),
            };
            if let (Some(now), Some(was)) = (&now, &was)
                && Arc::ptr_eq(now, was)
            {
                continue;
            }
            let of = |volume: &Option<Arc<VolumeRecord>>| {
                volume.as_ref().map_or(Vec::new(), |volume| replicas_of(volume, &self.pool))
            };
            let (old, new) = (of(&was), of(&now));
            let is_listed =
                |replica: &&ReplicaAssignment| new.iter().any(|n| n.guid == replica.guid);
            removed.extend(old.iter().filter(|r| !is_listed(r)).map(|r| r.guid.clone()));
            let told = |guid: &str| old.iter().find(|replica| replica.guid == guid);
            for mut replica in new.iter().filter(|new| told(&new.guid) != Some(new)).cloned() {
                // Most changes are of one volume, and a pool may have thousands.
                let generation = told(&replica.guid).map(|told| told.generation);
                if let Some(now) = now.as_ref().filter(|_| generation != Some(replica.generation)) {
                    replica.record = now.keepsake();
                }
                changed.push(replica);
            }
        }
        if !begins && changed.is_empty() && removed.is_empty() && before.as_ref() == Some(&head) {
            return None;
        }
        if !begins {
            return Some(PoolAssignment { replicas: changed, removed, partial: true, ..head });
        }
        Some(PoolAssignment { replicas: changed, ..head })
    }

    /// Volumes whose assignment may be another one than was told.
    fn concerned(&self, state: &State, news: News) -> BTreeSet<VolumeId> {
        match news {
            News::Volumes(volumes) => volumes,
            News::All => {
                let here = state.volumes_of_pool(&self.pool);
                self.told.keys().copied().chain(here.iter().map(|volume| volume.id.0)).collect()
            }
        }
    }
}

/// Assignment of a node as one stream has told it.
pub struct NodeStream {
    assignments: Assignments,
    node: String,
    told: BTreeMap<VolumeId, TargetAssignment>,
    head: Option<NodeAssignment>,
    ruled: bool,
}

impl NodeStream {
    pub fn new(assignments: Assignments, node: &str) -> Self {
        Self { assignments, node: node.to_owned(), told: BTreeMap::new(), head: None, ruled: false }
    }

    /// As [`PoolStream::next`].
    pub fn next(&mut self, news: News) -> Option<NodeAssignment> {
        let state = self.assignments.state.clone();
        let head = self.assignments.head_of_node(&self.node);
        let before = self.head.replace(head.clone());
        let rules = state.orders_nodes();
        let ruled = std::mem::replace(&mut self.ruled, rules);
        let begins = before.is_none() || !ruled;
        if !rules {
            // Not complete: what is served goes on.
            self.told.clear();
            return (ruled || before.as_ref() != Some(&head)).then_some(head);
        }
        let (mut changed, mut removed) = (Vec::new(), Vec::new());
        for id in self.concerned(&state, if begins { News::All } else { news }) {
            let volume = state.volumes.get(&id.to_string());
            match volume.and_then(|volume| self.assignments.target(&volume, &self.node)) {
                Some(target) if self.told.get(&id) == Some(&target) => {}
                Some(target) => {
                    self.told.insert(id, target.clone());
                    changed.push(target);
                }
                None => removed.extend(self.told.remove(&id).map(|_| id.to_string())),
            }
        }
        if !begins && changed.is_empty() && removed.is_empty() && before.as_ref() == Some(&head) {
            return None;
        }
        if !begins {
            return Some(NodeAssignment { targets: changed, removed, partial: true, ..head });
        }
        Some(NodeAssignment { targets: changed, complete: true, ..head })
    }

    /// Volumes whose assignment may be another one than was told.
    fn concerned(&self, state: &State, news: News) -> BTreeSet<VolumeId> {
        match news {
            News::Volumes(volumes) => volumes,
            News::All => {
                let here = state.volumes_of_node(&self.node);
                self.told.keys().copied().chain(here.iter().map(|volume| volume.id.0)).collect()
            }
        }
    }
}
