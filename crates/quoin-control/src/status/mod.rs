//! Records and observations as people see them: phase, health, use, and what is waited for.

pub mod health;
pub(crate) mod metrics;
pub(crate) mod target_config;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control as api;
use quoin_api::volume::Spread;
use quoin_cluster::ownership::{network_fences, replay};
use quoin_cluster::records::{
    AttachmentRecord, Cause, NodeRecord, PoolRecord, Replay, ReplicaPhase, ReplicaRecord,
    VolumePhase, VolumeRecord,
};
use quoin_identity::Role;
use quoin_types::membership::open_quorum;
use quoin_types::{Epoch, Position, VolumeId};
use tokio::time::Instant;

use crate::membership::admission::Admission;
use crate::membership::clocks::Clocks;
use crate::messages;
use crate::reconcile::rebalance::Balancer;
use crate::state::State;
use crate::state::observed::{Observed, ReplicaState, VolumeSeen};
use crate::status::health::{Conditions, Judgement};
use crate::time::timestamp;
use crate::volume::devices::Devices;
use crate::volume::verification::Verifier;
use crate::{membership, reconcile, volume};

/// A target that has not opened a volume after so long has met with something.
const OPENING_MAX: Duration = Duration::from_secs(8);

/// Status of one replica.
pub(crate) struct ReplicaStatus {
    pub phase: &'static str,
    pub message: String,
    pub known: bool,
    /// Known to be bad and not repaired yet.
    pub bad_blocks: u64,
    /// It is not reachable, which may pass.
    pub gone: bool,
    /// It could have everything again, had it a target.
    pub lags: bool,
}

/// Status of a volume.
pub(crate) struct VolumeStatus {
    pub health: &'static str,
    pub waiting_for: String,
    pub replicas: Vec<ReplicaStatus>,
}

pub(crate) fn waiting_for(state: &State, volume: &VolumeRecord) -> String {
    of(state, volume).waiting_for
}

pub(crate) fn of(state: &State, volume: &VolumeRecord) -> VolumeStatus {
    let observed = state.observed();
    let serving = serving(state, &observed, volume);
    by(state, &observed, volume, serving, u64::MAX)
}

/// Returns the status that people are shown. A target that has just begun to open a volume has reached
/// no replica yet, which proves nothing about the replicas; their pools report them. No decision uses
/// this status.
pub(crate) fn shown(state: &State, volume: &VolumeRecord) -> VolumeStatus {
    let observed = state.observed();
    let serving = serving(state, &observed, volume);
    if is_opening(&observed, volume, serving) {
        // Some pools hold the beginning of the epoch that is opened, and others not yet.
        let before = volume.opened.epoch.saturating_sub(1);
        let status = by(state, &observed, volume, None, before);
        if status.health == "Online" {
            let waits = serving.is_none_or(|seen| seen.state != "serving");
            let waiting_for = if waits { status.waiting_for } else { String::new() };
            return VolumeStatus { health: "Opening", waiting_for, ..status };
        }
    }
    let status = by(state, &observed, volume, serving, u64::MAX);
    match health::is_inaccessible(serving) {
        true if status.health != "Unknown" => VolumeStatus { health: "Faulted", ..status },
        _ => status,
    }
}

/// `epoch_max`: where no target tells, a replica lags that missed an epoch up to this one.
fn by(
    state: &State,
    observed: &Observed,
    volume: &VolumeRecord,
    serving: Option<&VolumeSeen>,
    epoch_max: u64,
) -> VolumeStatus {
    let replica = |r| replica_status(state, observed, volume, r, serving, epoch_max);
    let replicas: Vec<_> = volume.replicas.iter().map(replica).collect();
    let health = health(state, observed, volume, &replicas, serving);
    let waiting_for = waits(volume, &replicas, serving, health);
    VolumeStatus { health, waiting_for, replicas }
}

/// A target begins to open a volume.
pub(crate) fn opening_begins(state: &State, id: VolumeId) {
    state.observed().openings.insert(id, Instant::now());
}

/// The report of the target that owns the volume now.
pub(crate) fn serving<'a>(
    state: &State,
    observed: &'a Observed,
    volume: &VolumeRecord,
) -> Option<&'a VolumeSeen> {
    let seen = observed.volumes.get(&volume.id.0)?;
    let owner = volume.opened.owner.as_deref()?;
    let current =
        seen.node == owner && seen.epoch == volume.opened.epoch && seen.state != "stopped";
    (current && observed.node_online(owner, state.settings.offline_after)).then_some(seen)
}

fn replica_status(
    state: &State,
    observed: &Observed,
    volume: &VolumeRecord,
    replica: &ReplicaRecord,
    serving: Option<&VolumeSeen>,
    epoch_max: u64,
) -> ReplicaStatus {
    let known = volume.is_known(replica);
    let bad_blocks = observed
        .pools
        .get(&replica.pool)
        .and_then(|pool| pool.replicas.get(&replica.guid.0))
        .map_or(0, |held| held.bad_blocks);
    let status = |phase, message: &str| {
        let message = match (message.is_empty(), bad_blocks) {
            (true, 1..) => format!("bad: {}", blocks(bad_blocks)),
            _ => message.to_owned(),
        };
        ReplicaStatus { phase, message, known, bad_blocks, gone: false, lags: false }
    };
    let gone = |message: &str| ReplicaStatus { gone: true, ..status("Offline", message) };
    let lags = |phase, message| ReplicaStatus { lags: true, ..status(phase, message) };
    let pool = &replica.pool;
    let progress = serving.and_then(|serving| serving.replicas.get(&replica.guid.0));
    if replica.phase == ReplicaPhase::Delete {
        return status("Deleting", "");
    }
    if state.is_rolled_back(pool) {
        return gone("an older state of the pool's disk came back");
    }
    let after = state.settings.offline_after;
    let Some(seen) = observed.online_pool(pool, after) else {
        // It may only be the pool's reports that do not come, or not yet.
        let reached = progress.is_some_and(|progress| progress.state != "disconnected");
        let unheard = observed.starting(after) && !observed.pools.contains_key(pool);
        let message = match observed.unreachable(pool, after) {
            Some(why) => format!("its pool is unreachable: {why}"),
            None => "its pool is offline".to_owned(),
        };
        return match reached || unheard {
            true => status("Offline", &message),
            false => gone(&message),
        };
    };
    let held = seen.replicas.get(&replica.guid.0);
    match (replica.phase, held.map(|held| held.state)) {
        // The target rebuilds a damaged one in place, and then knows best how it stands.
        (_, Some(ReplicaState::Damaged)) if progress.is_none() => {
            return lags("Offline", "it is damaged");
        }
        (_, Some(ReplicaState::Damaged)) => {}
        (ReplicaPhase::Keep, Some(ReplicaState::Gone)) => {
            return status("Gone", "the pool has lost it");
        }
        (_, Some(ReplicaState::Present)) => {}
        (ReplicaPhase::Keep, None) => {
            return status("Offline", &format!("pool {pool} has not opened it yet"));
        }
        _ => return status("Creating", ""),
    }
    match progress.map(|progress| progress.state.as_str()) {
        Some("in-sync") if known => status("InSync", ""),
        Some("in-sync" | "rebuilding") => status("Rebuilding", ""),
        Some("catching-up") => status("CatchingUp", ""),
        Some("disconnected") => gone("the target does not reach it"),
        Some(other) => status("Offline", &format!("the target says: {other}")),
        None if !known && serving.is_none() => {
            status("Rebuilding", "it is rebuilt as soon as a target opens the volume")
        }
        None if !known => status("Rebuilding", ""),
        None if serving.is_some() => gone("the target does not reach it"),
        None => {
            let best = volume.replicas.iter().filter(|r| volume.is_known(r)).filter_map(|r| {
                let pool = observed.pools.get(&r.pool)?;
                pool.replicas.get(&r.guid.0).map(|held| held.position)
            });
            let (own, best) = (held.map(|held| held.position), best.max());
            // While a target writes that has not reported yet (the controller has just
            // started), pools tell positions of different moments: only an epoch that a
            // replica missed says that it lags.
            let behind = match volume.opened.owner {
                Some(_) => {
                    let epoch = |p: Position| p.epoch.min(Epoch(epoch_max));
                    own.map(epoch) < best.map(epoch)
                }
                None => own < best,
            };
            match behind {
                true => lags(
                    "CatchingUp",
                    "it lags; it catches up as soon as a target opens the volume",
                ),
                false => status("InSync", ""),
            }
        }
    }
}

fn health(
    state: &State,
    observed: &Observed,
    volume: &VolumeRecord,
    replicas: &[ReplicaStatus],
    serving: Option<&VolumeSeen>,
) -> &'static str {
    if !volume.phase.is_kept() {
        return "Unknown";
    }
    let unheard = volume.replicas.iter().any(|r| !observed.pools.contains_key(&r.pool));
    if unheard && observed.starting(state.settings.offline_after) {
        return "Unknown";
    }
    let known = |r: &&ReplicaStatus| r.known;
    let count = |phases: &[&str]| {
        replicas.iter().filter(known).filter(|r| phases.contains(&r.phase)).count()
    };
    let rf = usize::from(volume.membership.rf);
    let needed = usize::from(open_quorum(volume.membership.rf, volume.membership.cf));
    let present = count(&["InSync", "CatchingUp", "Rebuilding"]);
    let serves = serving.is_some_and(|serving| serving.state == "serving");
    if count(&["InSync"]) == rf && (serves || serving.is_none()) {
        "Online"
    } else if serves || present >= needed {
        "Degraded"
    } else {
        "Faulted"
    }
}

/// Failures that the volume survives, in words: by the places of its replicas, not by its options.
pub(crate) fn contract(state: &State, volume: &VolumeRecord) -> String {
    let (rf, cf) = (volume.membership.rf, volume.membership.cf);
    let lost = cf.saturating_sub(1);
    let mut hosts: Vec<_> = volume
        .replicas
        .iter()
        .filter(|replica| volume.membership.known.iter().any(|m| m.id == replica.id))
        .filter_map(|replica| state.pools.get(&replica.pool).map(|pool| pool.node.clone()))
        .collect();
    hosts.sort();
    hosts.dedup();
    let plural = |count: u8, what: &str| match count {
        0 => format!("no {what}"),
        1 => format!("one {what}"),
        n => format!("{n} {what}s"),
    };
    if lost == 0 {
        return "acknowledged writes are lost with the pool that holds them".to_owned();
    }
    let domain = match volume.spec.options.spread {
        Spread::Zone => Some("zone"),
        Spread::Rack => Some("rack"),
        Spread::Host => Some("host"),
        Spread::Pool => (hosts.len() == usize::from(rf)).then_some("host"),
    };
    if let Some(domain) = domain {
        return format!("acknowledged writes survive the loss of {}", plural(lost, domain));
    }
    format!(
        "acknowledged writes survive the loss of {}, not of one host: its {rf} replicas are \
         on {}",
        plural(lost, "pool"),
        plural(hosts.len() as u8, "host")
    )
}

/// Messages about volumes, pools and nodes, as people see them.
pub struct Status {
    state: Arc<State>,
    verifier: Arc<Verifier>,
    balancer: Arc<Balancer>,
    devices: Arc<Devices>,
    admission: Arc<Admission>,
    conditions: Arc<Conditions>,
    clocks: Arc<Clocks>,
}

impl Status {
    pub(crate) fn new(
        state: Arc<State>,
        work: &reconcile::Parts,
        volumes: &volume::Parts,
        members: &membership::Parts,
    ) -> Self {
        Self {
            verifier: volumes.verifier.clone(),
            balancer: work.balancer.clone(),
            devices: volumes.devices.clone(),
            admission: members.admission.clone(),
            clocks: members.clocks.clone(),
            conditions: work.conditions.clone(),
            state,
        }
    }

    pub fn volume(&self, volume: &VolumeRecord) -> api::Volume {
        let status = shown(&self.state, volume);
        let (conditions, not_judged) = self.conditions.messages(volume);
        let revision = self.state.volumes.versioned(&volume.id.0.to_string()).map_or(0, |v| v.0);
        let phase = match volume.phase {
            VolumePhase::Pending => "Pending",
            VolumePhase::Ready => "Ready",
            VolumePhase::Retained => "Retained",
            VolumePhase::Deleting => "Deleting",
        };
        let (snapshots, newest_snapshot) =
            crate::snapshot::view::of_volume(&self.state, volume.id.0);
        api::Volume {
            id: volume.id.0.to_string(),
            spec: Some(messages::spec(volume)),
            size_bytes: volume.size_bytes,
            phase: phase.to_owned(),
            health: status.health.to_owned(),
            r#use: if volume.attachments.is_empty() { "detached" } else { "attached" }.to_owned(),
            waiting_for: status.waiting_for,
            epoch: volume.opened.epoch,
            membership: Some(messages::membership(volume)),
            attachments: volume
                .attachments
                .iter()
                .map(|attachment| self.attachment(volume, attachment))
                .collect(),
            replicas: self.replica_messages(volume, &status.replicas),
            created_at: Some(timestamp(volume.created_ms)),
            contract: match volume.may_have_lost_ms {
                0 => contract(&self.state, volume),
                _ => format!(
                    "{}; it was recovered by hand, and what only the replicas held that were given \
                     up then is lost",
                    contract(&self.state, volume)
                ),
            },
            resource_version: revision,
            changing: volume.changing(),
            desired_consistency_factor: volume.consistency_factor.into(),
            replace_after: self.state.replace_after(volume).to_string(),
            verification: self.verifier.message(volume),
            devices: self.devices.of(volume),
            conditions,
            not_judged,
            snapshots,
            newest_snapshot,
            made_from: volume.source.as_ref().map(crate::volume::clones::message),
            revert: self
                .state
                .snapshots
                .reverts
                .get(&volume.id.0.to_string())
                .map(|revert| crate::snapshot::reverts::view(&self.state, &revert)),
            mirror: crate::mirror::view::of_volume(&self.state, volume),
        }
    }

    /// Judges the health of a volume.
    pub fn judge(&self, volume: &VolumeRecord) -> Judgement {
        self.conditions.judge(volume)
    }

    /// Returns true if a volume has a condition, or cannot be judged.
    pub(crate) fn is_ill(&self, volume: &VolumeRecord) -> bool {
        self.conditions.is_ill(volume)
    }

    pub fn attachment(
        &self,
        volume: &VolumeRecord,
        attachment: &AttachmentRecord,
    ) -> api::Attachment {
        let observed = self.state.observed();
        let serving = serving(&self.state, &observed, volume);
        let online = observed.node_online(&attachment.node, self.state.settings.offline_after);
        let (phase, message) = match serving {
            Some(seen) if seen.state == "serving" && seen.waiting_for.is_empty() => {
                ("Attached", String::new())
            }
            Some(seen) => ("Attaching", seen.waiting_for.clone()),
            None if online => ("Attaching", "the node's target opens it".to_owned()),
            None => ("Attaching", format!("node {} is offline", attachment.node)),
        };
        let owner = volume.opened.owner.as_deref().unwrap_or_default();
        let is_away = owner != attachment.node && !owner.is_empty();
        let has_address =
            || observed.nodes.get(owner).is_some_and(|seen| !seen.share_address.is_empty());
        let (phase, message) = match is_away && !has_address() {
            true => {
                let why =
                    format!("node {owner}, whose target serves it, to open its port for others");
                ("Attaching", why)
            }
            false => (phase, message),
        };
        let of_node = serving.filter(|seen| seen.node == attachment.node && attachment.device);
        let mut device = of_node.map(|seen| seen.device.clone()).unwrap_or_default();
        // A target reports of the volumes that it serves; a node that shares one reports its devices.
        if attachment.device && volume.opened.owner.as_deref() != Some(&attachment.node) {
            let seen = observed.nodes.get(&attachment.node).map_or(&[][..], |seen| seen.devices());
            let of_it = seen.iter().find(|device| device.volume == volume.id.0);
            device.path = of_it.map(|device| device.device.clone()).unwrap_or_default();
        }
        let context = [("volumeId", volume.id.0.to_string()), ("node", attachment.node.clone())];
        api::Attachment {
            volume_id: volume.id.0.to_string(),
            node: attachment.node.clone(),
            read_only: attachment.read_only,
            replays: attachment.replay == Replay::Due,
            replay_is_late: attachment.replay == Replay::Late,
            phase: phase.to_owned(),
            message: match replay::in_words(attachment.replay) {
                Some(replay) if message.is_empty() => replay,
                _ => message,
            },
            publish_context: context.map(|(key, value)| (key.to_owned(), value)).into(),
            usage: attachment.usage.clone(),
            nbd_uri: serving
                .filter(|seen| seen.node == attachment.node)
                .map(|seen| seen.nbd_uri.clone())
                .unwrap_or_default(),
            device: device.path,
            device_message: device.message,
            device_refused: device.refused,
            sharing: attachment.sharing.as_str().to_owned(),
            served_by: owner.to_owned(),
        }
    }

    pub fn replicas(&self, volume: &VolumeRecord) -> Vec<api::Replica> {
        let status = shown(&self.state, volume);
        self.replica_messages(volume, &status.replicas)
    }

    fn replica_messages(
        &self,
        volume: &VolumeRecord,
        status: &[ReplicaStatus],
    ) -> Vec<api::Replica> {
        let observed = self.state.observed();
        let serving = serving(&self.state, &observed, volume);
        let message = |(replica, status): (&ReplicaRecord, &ReplicaStatus)| {
            let pool = observed.pools.get(&replica.pool);
            let held = pool.and_then(|pool| pool.replicas.get(&replica.guid.0));
            let progress = serving.and_then(|serving| serving.replicas.get(&replica.guid.0));
            api::Replica {
                replica_id: replica.id.0.to_string(),
                guid: replica.guid.0.to_string(),
                volume_id: volume.id.0.to_string(),
                volume_name: volume.spec.name.clone(),
                pool: replica.pool.clone(),
                node: self.state.pools.get(&replica.pool).map_or(String::new(), |p| p.node.clone()),
                phase: status.phase.to_owned(),
                quorum: held.map_or(status.known, |held| held.quorum),
                position_epoch: held.map_or(0, |held| held.position.epoch.0),
                position_lsn: progress
                    .map(|progress| progress.applied_lsn)
                    .or(held.map(|held| held.position.lsn.0))
                    .unwrap_or(0),
                rebuilt_bytes: progress.map_or(0, |progress| progress.rebuilt_bytes),
                rebuild_total_bytes: progress.map_or(0, |progress| progress.rebuild_total_bytes),
                write_us: progress.map_or(0, |progress| progress.write_us),
                slow: progress.is_some_and(|progress| progress.slow),
                message: status.message.clone(),
                used_bytes: held.map_or(0, |held| held.used_bytes),
                bad_blocks: status.bad_blocks,
                known: status.known,
                leaving: replica.leaving || volume.is_followed(replica),
                repaired: held.map_or(0, |held| held.repaired),
                is_clone: held.is_some_and(|held| held.is_clone),
                cause: match replica.cause {
                    _ if status.known => "",
                    Cause::Asked => "",
                    Cause::Healing => "healing",
                    Cause::Drain => "drain",
                    Cause::Balance => "balance",
                }
                .to_owned(),
            }
        };
        volume.replicas.iter().zip(status).map(message).collect()
    }

    pub fn pools(&self) -> Vec<api::Pool> {
        let mut replicas = std::collections::HashMap::<String, u32>::new();
        for volume in self.state.volumes.list() {
            for replica in &volume.replicas {
                *replicas.entry(replica.pool.clone()).or_default() += 1;
            }
        }
        let balancing = self.balancer.words();
        let clock = |pool: &PoolRecord| self.clocks.message(Role::Pool, &pool.name);
        let listed = self.state.pools.list();
        let clocks: BTreeMap<_, _> =
            listed.iter().filter_map(|pool| Some((pool.name.as_str(), clock(pool)?))).collect();
        let observed = self.state.observed();
        let message = |pool: &PoolRecord| {
            let seen = observed.pools.get(&pool.name);
            let online =
                observed.online_pool(&pool.name, self.state.settings.offline_after).is_some();
            let unreachable = observed.unreachable(&pool.name, self.state.settings.offline_after);
            let (capacity, used) = seen.map_or((0, 0), |s| (s.capacity_bytes, s.used_bytes));
            let dying =
                crate::reconcile::dying::why_dying(&self.state, &pool.name).unwrap_or_default();
            let (state, message) = match seen {
                _ if pool.rolled_back => {
                    ("Failed", "an older state of its disk came back; wipe it to rebuild")
                }
                Some(seen) if !seen.error.is_empty() => ("Failed", seen.error.as_str()),
                Some(seen) if seen.leaving => ("Offline", "it was shut down"),
                Some(_) if unreachable.is_some() => {
                    ("Unreachable", unreachable.unwrap_or_default())
                }
                Some(_) if !online => ("Offline", "it has not reported for a while"),
                Some(seen) if seen.free_bytes == 0 => match seen.warning.as_str() {
                    "" => ("Full", "no bytes are free"),
                    warning => ("Full", warning),
                },
                Some(_) if !dying.is_empty() => ("Dying", dying.as_str()),
                Some(seen) => match (seen.warning.as_str(), balancing.get(&pool.name)) {
                    ("", _) if clocks.contains_key(pool.name.as_str()) => {
                        ("Online", clocks[pool.name.as_str()].as_str())
                    }
                    ("", Some(words)) => ("Online", words.as_str()),
                    (warning, _) => ("Online", warning),
                },
                None => ("Offline", "it has not reported since the controller started"),
            };
            api::Pool {
                name: pool.name.clone(),
                id: pool.pool_id.clone(),
                node: pool.node.clone(),
                address: pool.address.clone(),
                capacity_bytes: capacity,
                used_bytes: used,
                live_bytes: seen.map_or(0, |seen| seen.live_bytes),
                free_bytes: seen.map_or(0, |seen| seen.free_bytes),
                replicas: replicas.get(&pool.name).copied().unwrap_or(0),
                state: state.to_owned(),
                message: message.to_owned(),
                dying: dying.clone(),
                topology: crate::volume::topology::of_pool(&self.state, pool).into_iter().collect(),
                scrub: seen.map(|seen| seen.scrub),
                cordon: crate::reconcile::cordon::of_pool(&self.state, &observed, pool).to_owned(),
            }
        };
        listed.iter().map(|pool| message(pool)).collect()
    }

    pub fn nodes(&self) -> Vec<api::Node> {
        let mut attached = std::collections::HashMap::<String, u32>::new();
        for volume in self.state.volumes.list() {
            for attachment in &volume.attachments {
                *attached.entry(attachment.node.clone()).or_default() += 1;
            }
        }
        let fences = self.state.fences();
        let fenced_by = |node: &NodeRecord| {
            let block = network_fences::of_node(fences.iter().map(|fence| &**fence), node);
            block.map(|block| block.to_string()).unwrap_or_default()
        };
        let observed = self.state.observed();
        let message = |node: &NodeRecord| api::Node {
            name: node.name.clone(),
            address: node.address.clone(),
            state: match observed.node_online(&node.name, self.state.settings.offline_after) {
                true => "Online".to_owned(),
                false => "Offline".to_owned(),
            },
            attached: attached.get(&node.name).copied().unwrap_or(0),
            topology: topology_of_node(node).into_iter().collect(),
            volumes_max: node.volumes_max,
            version: node.version.clone(),
            cordon: crate::reconcile::cordon::of_node(&self.state, &observed, &node.name)
                .to_owned(),
            manages_volumes: self.admission.manages_volumes(&node.name),
            host_addresses: addresses_of(node),
            fenced_by: fenced_by(node),
        };
        self.state.nodes.list().iter().map(|node| message(node)).collect()
    }
}

/// Addresses of a node's host, in their order.
fn addresses_of(node: &NodeRecord) -> Vec<String> {
    let all: std::collections::BTreeSet<_> = node.addresses().collect();
    all.iter().map(ToString::to_string).collect()
}

/// Segments of a node, its own name among them.
fn topology_of_node(node: &NodeRecord) -> std::collections::BTreeMap<String, String> {
    let mut segments = node.topology.clone();
    segments.insert(quoin_api::topology::NODE_KEY.to_owned(), node.name.clone());
    segments
}

/// Returns true if a target has just begun to open the volume for its users, and has not come to
/// its replicas yet. One that waits for a person, or changes its replicas, has more to tell.
fn is_opening(observed: &Observed, volume: &VolumeRecord, serving: Option<&VolumeSeen>) -> bool {
    let began = observed.openings.get(&volume.id.0);
    let is_new = began.is_some_and(|began| began.elapsed() < OPENING_MAX);
    let has = |state| {
        let mut all = serving.iter().flat_map(|seen| seen.replicas.values());
        all.any(|progress| progress.state == state)
    };
    let is_done = serving.is_some_and(|seen| seen.state == "serving")
        && (has("disconnected") || !has("catching-up"));
    let waits_for_a_person = serving.is_some_and(|seen| !seen.silent.is_empty());
    is_new
        && !is_done
        && !waits_for_a_person
        && !volume.attachments.is_empty()
        && volume.changing().is_empty()
}

fn blocks(count: u64) -> String {
    if count == 1 { "1 block".to_owned() } else { format!("{count} blocks") }
}

/// Returns the reason why a volume waits; empty where it does not wait.
fn waits(
    volume: &VolumeRecord,
    replicas: &[ReplicaStatus],
    serving: Option<&VolumeSeen>,
    health: &str,
) -> String {
    let pools = |phases: &[&str]| -> Vec<&str> {
        let pairs = volume.replicas.iter().zip(replicas);
        pairs.filter(|(_, s)| phases.contains(&s.phase)).map(|(r, _)| r.pool.as_str()).collect()
    };
    let offline = pools(&["Offline"]);
    let mut waits = Vec::new();
    match volume.phase {
        VolumePhase::Pending => {
            let creating = pools(&["Creating"]);
            if !creating.is_empty() {
                waits.push(format!("pool {} to create its replica", creating.join(", ")));
            }
            if !offline.is_empty() {
                waits.push(format!("pool {} to come online", offline.join(", ")));
            }
        }
        VolumePhase::Deleting => {
            let mut held = pools(&["Deleting"]);
            held.extend(volume.discarded.iter().map(|d| d.pool.as_str()));
            held.sort_unstable();
            held.dedup();
            waits.push(format!("pool {} to remove its replica", held.join(", ")));
        }
        VolumePhase::Ready | VolumePhase::Retained => {
            if let Some(serving) = serving.filter(|serving| !serving.waiting_for.is_empty()) {
                let way_out = match serving.silent.is_empty() {
                    true => "",
                    false => " (where they are gone for good: `quoin volume recover`)",
                };
                waits.push(serving.waiting_for.clone() + way_out);
            }
            for (replica, status) in volume.replicas.iter().zip(replicas) {
                let pool = &replica.pool;
                match status.phase {
                    "Offline" | "Gone" => {
                        waits.push(format!("the replica on pool {pool}: {}", status.message));
                    }
                    "Creating" => waits.push(format!("pool {pool} to create a new replica")),
                    "CatchingUp" => waits.push(format!("pool {pool} to catch up")),
                    "Rebuilding" if serving.is_none() => {
                        waits.push(format!("a target to rebuild the replica on pool {pool}"))
                    }
                    "Rebuilding" => waits.push(format!("the rebuild on pool {pool}")),
                    _ if status.bad_blocks > 0 && serving.is_none() => waits.push(format!(
                        "an attachment, while which {} on pool {pool} are repaired",
                        blocks(status.bad_blocks)
                    )),
                    _ if status.bad_blocks > 0 => waits.push(format!(
                        "the repair of {} on pool {pool}",
                        blocks(status.bad_blocks)
                    )),
                    _ => {}
                }
            }
            waits.extend(volume.is_full_of_retired());
            if let (Some(owner), None) = (volume.opened.owner.as_deref(), serving)
                && health != "Unknown"
            {
                waits.push(format!("the target on node {owner} to open it"));
            }
        }
    }
    waits.join("; ")
}
