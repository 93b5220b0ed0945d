//! Pools that take nothing new, and pools that are emptied so that they can be taken away.
//!
//! A cordon is a record of its own, so it outlives this controller and the pool's reports. A
//! drain is a cordon from which self-healing ([`crate::reconcile::heal`]) moves replicas away, with its
//! rules: made elsewhere first, one at a time for each volume. A drain is refused at the start
//! where a replica has no other pool to go to, or no good copy to be made from. Later failures are
//! reported as an event and in the status, and the drain tries again.

use std::collections::HashSet;
use std::sync::Arc;

use quoin_api::control as api;
use quoin_cluster::records::{
    Cause, CordonRecord, PoolRecord, ReplicaRecord, VolumePhase, VolumeRecord,
};

use crate::Error;
use crate::reconcile::dying::DyingPools;
use crate::reconcile::heal::{Healer, in_sync, rebuildable, without};
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::state::observed::Observed;
use crate::status::VolumeStatus;
use crate::time::now_ms;
use crate::volume::placement::Candidate;
use crate::volume::scale::relocate;

/// Volumes that one refusal lists, up to about the length below; the others are counted.
const VOLUMES_MAX: usize = 20;
const REFUSAL_BYTES_MAX: usize = 4096;

/// Pool or node that is cordoned.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scope {
    Pool(String),
    /// All pools on the node.
    Node(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cordoning {
    Uncordon,
    Cordon,
    Drain,
}

impl Scope {
    fn kind(&self) -> &'static str {
        match self {
            Self::Pool(_) => "pool",
            Self::Node(_) => "node",
        }
    }

    fn holder(&self) -> &str {
        let (Self::Pool(holder) | Self::Node(holder)) = self;
        holder
    }

    fn key(&self) -> String {
        CordonRecord::name_of(self.kind(), self.holder())
    }
}

impl From<&CordonRecord> for Scope {
    fn from(record: &CordonRecord) -> Self {
        let holder = record.holder.clone();
        match record.kind.as_str() {
            "node" => Self::Node(holder),
            _ => Self::Pool(holder),
        }
    }
}

/// Cordons and drains, as users ask for them.
pub struct Cordons {
    state: Arc<State>,
    healer: Arc<Healer>,
    dying: Arc<DyingPools>,
}

impl Cordons {
    pub(crate) fn new(state: Arc<State>, healer: Arc<Healer>, dying: Arc<DyingPools>) -> Self {
        Self { state, healer, dying }
    }

    /// Cordons, drains, or uncordons; with `dry_run` only returns the result that this would have.
    ///
    /// # Errors
    /// Some volumes do not allow the drain; the error has the reason for each.
    pub async fn set(
        &self,
        scope: &Scope,
        action: Cordoning,
        dry_run: bool,
    ) -> Result<api::CordonStatus, Error> {
        let object = object(&self.state, scope)?;
        let pools = pools_of(&self.state, scope);
        let before = self.state.cordons.get(&scope.key());
        if action == Cordoning::Drain && before.as_ref().is_none_or(|cordon| !cordon.drain) {
            let _one_at_a_time = self.state.creating.lock().await;
            let planned = self.plan(&pools);
            if dry_run {
                return Ok(self.message(scope, "", &pools, planned));
            }
            refuse(scope, &planned)?;
        }
        if dry_run {
            return self.status(scope);
        }
        let drain = action == Cordoning::Drain;
        let told = |reason: &str, message: &str| {
            self.state.events.record(Severity::Normal, object.clone(), reason, message);
        };
        match (action, before) {
            (Cordoning::Uncordon, None) => {}
            (Cordoning::Uncordon, Some(_)) => {
                self.state.cordons.remove(&scope.key(), |_| true).await?;
                if let Scope::Pool(pool) = scope {
                    self.dying.forgive(pool);
                }
                told("Uncordoned", "it takes new replicas again");
            }
            (_, Some(before)) if before.drain == drain => {}
            (_, before) => {
                let (exists, before) = (before.is_some(), before.as_ref());
                let record = CordonRecord {
                    kind: scope.kind().to_owned(),
                    holder: scope.holder().to_owned(),
                    drain,
                    told: false,
                    since_ms: now_ms(),
                    dying: before.map(|before| before.dying.clone()).unwrap_or_default(),
                };
                if exists || self.state.cordons.create(record.clone()).await?.is_err() {
                    let replace = |found: &mut CordonRecord| {
                        *found = record.clone();
                        Ok(())
                    };
                    self.state.cordons.update(&scope.key(), replace).await?;
                }
                match drain {
                    true => told("DrainBegun", "its replicas are made elsewhere"),
                    false => told("Cordoned", "it takes no new replicas"),
                }
            }
        }
        // Heals now instead of at the next check, a second later.
        self.healer.heal(&self.state.volumes_of_pools(&pools)).await?;
        self.status(scope)
    }

    /// Status of a cordon: the replicas still there, where they go and what they wait for.
    pub fn status(&self, scope: &Scope) -> Result<api::CordonStatus, Error> {
        object(&self.state, scope)?;
        let pools = pools_of(&self.state, scope);
        let scopes = std::slice::from_ref(scope);
        let state = standing(&self.state, &self.state.observed(), scopes, || pools.clone());
        let mut replicas = Vec::new();
        for volume in self.state.volumes_of_pools(&pools) {
            let status = crate::status::of(&self.state, &volume);
            for replica in volume.replicas.iter().filter(|r| pools.contains(&r.pool)) {
                replicas.push(self.drained(&volume, &status, replica, &pools, state));
            }
        }
        Ok(self.message(scope, state, &pools, replicas))
    }

    fn message(
        &self,
        scope: &Scope,
        state: &str,
        pools: &HashSet<String>,
        replicas: Vec<(i16, api::DrainedReplica)>,
    ) -> api::CordonStatus {
        let mut replicas = replicas;
        replicas.sort_by(|(spare, a), (other, b)| {
            (spare, &a.volume_name, &a.pool).cmp(&(other, &b.volume_name, &b.pool))
        });
        let mut pools: Vec<_> = pools.iter().cloned().collect();
        pools.sort();
        let volumes = match scope {
            Scope::Pool(_) => Vec::new(),
            Scope::Node(node) => self.state.volumes_of_node(node),
        };
        let uses = |volume: &&Arc<VolumeRecord>| {
            volume.attachments.iter().any(|a| a.node == scope.holder())
        };
        let attached = volumes.iter().filter(uses).map(|v| v.spec.name.clone()).collect();
        let replicas = replicas.into_iter().map(|(_, replica)| replica).collect();
        api::CordonStatus { state: state.to_owned(), pools, replicas, attached }
    }

    /// Status of one replica that is to be drained, or would be.
    fn drained(
        &self,
        volume: &VolumeRecord,
        status: &VolumeStatus,
        replica: &ReplicaRecord,
        pools: &HashSet<String>,
        state: &str,
    ) -> (i16, api::DrainedReplica) {
        let spare = in_sync(volume, status) as i16 - i16::from(volume.membership.cf);
        let next = volume.replicas.iter().find(|r| r.id == replica.id && r.guid != replica.guid);
        let next = next.filter(|_| volume.is_followed(replica));
        let stuck = self.healer.why_stuck(replica.guid.0).filter(|_| next.is_none());
        let (standing, message) = match (next, stuck) {
            (Some(_), _) => ("moving", status.waiting_for.clone()),
            (None, Some(why)) if state == "draining" => ("stuck", why),
            _ if replica.leaving => ("moving", "it leaves the volume".to_owned()),
            _ if !volume.phase.is_kept() => ("waits", status.waiting_for.clone()),
            _ => ("waits", String::new()),
        };
        let observed = self.state.observed();
        let held = observed.pools.get(&replica.pool).and_then(|p| p.replicas.get(&replica.guid.0));
        let seen = observed.volumes.get(&volume.id.0);
        let progress = next.and_then(|next| seen?.replicas.get(&next.guid.0));
        let message = api::DrainedReplica {
            volume_id: volume.id.0.to_string(),
            volume_name: volume.spec.name.clone(),
            replica_id: replica.id.0.to_string(),
            pool: replica.pool.clone(),
            to: next.map(|next| next.pool.clone()).unwrap_or_default(),
            state: standing.to_owned(),
            message,
            without: without(volume, status, pools),
            rebuilt_bytes: progress.map_or(0, |progress| progress.rebuilt_bytes),
            rebuild_total_bytes: progress.map_or(0, |progress| progress.rebuild_total_bytes),
            used_bytes: held.map_or(0, |held| held.used_bytes),
        };
        (spare, message)
    }

    /// Destination of each replica in these pools, or the reason why it has none. Room that one
    /// replica takes is not available for the next.
    fn plan(&self, pools: &HashSet<String>) -> Vec<(i16, api::DrainedReplica)> {
        let mut candidates = crate::volume::volumes::candidates(&self.state);
        for candidate in candidates.iter_mut().filter(|c| pools.contains(&c.name)) {
            candidate.unusable = "it is to be drained".to_owned();
        }
        let mut planned = Vec::new();
        for volume in self.state.volumes_of_pools(pools) {
            let mut trial = VolumeRecord::clone(&volume);
            let status = crate::status::of(&self.state, &volume);
            for replica in volume.replicas.iter().filter(|r| pools.contains(&r.pool)) {
                let (spare, mut message) = self.drained(&volume, &status, replica, pools, "");
                let goes_anyway = replica.leaving || volume.phase == VolumePhase::Deleting;
                if !goes_anyway && message.to.is_empty() {
                    let used = message.used_bytes;
                    let possible = rebuildable(&volume, &status)
                        .and_then(|()| go(&mut trial, replica, &mut candidates, used));
                    match possible {
                        Ok(to) => message.to = to,
                        Err(why) => {
                            message.state = "stuck".to_owned();
                            message.message = why;
                        }
                    }
                }
                planned.push((spare, message));
            }
        }
        planned
    }
}

fn object(state: &State, scope: &Scope) -> Result<Object, Error> {
    let shown: String = scope.holder().chars().take(160).collect();
    match scope {
        Scope::Pool(name) => match state.pools.get(name) {
            Some(pool) => Ok(Object::new("pool", &pool.pool_id, name)),
            None => Err(Error::missing("pool", shown)),
        },
        // A node without a record may have pools: it uses no volumes.
        Scope::Node(name) => {
            let known = state.nodes.get(name).is_some() || !pools_of(state, scope).is_empty();
            known.then(|| Object::new("node", name, name)).ok_or(Error::missing("node", shown))
        }
    }
}

fn pools_of(state: &State, scope: &Scope) -> HashSet<String> {
    match scope {
        Scope::Pool(name) => HashSet::from([name.clone()]),
        Scope::Node(node) => {
            let pools = state.pools.list();
            pools.iter().filter(|p| p.node == *node).map(|p| p.name.clone()).collect()
        }
    }
}

/// Returns true if these pools hold no replica any more. Former ones stay on the disk of a pool that is gone: no
/// process can clear them away, and they are not waited for.
fn is_emptied(state: &State, observed: &Observed, pools: &HashSet<String>) -> bool {
    let after = state.settings.offline_after;
    pools.iter().all(|pool| {
        let has_none = state.volumes.index(|index| index.of_pool(pool).is_none());
        let has_left = || {
            let volumes = state.volumes_of_pool(pool);
            let mut replicas = volumes.iter().flat_map(|volume| &volume.replicas);
            !replicas.any(|replica| replica.pool == *pool)
        };
        has_none || observed.heard_pool(pool, after).is_none() && has_left()
    })
}

/// Returns "cordoned", "draining" or "drained"; empty where none of these scopes is cordoned.
/// `pools`: pools that a drain is to empty.
fn standing(
    state: &State,
    observed: &Observed,
    scopes: &[Scope],
    pools: impl FnOnce() -> HashSet<String>,
) -> &'static str {
    let cordons = scopes.iter().filter_map(|scope| state.cordons.get(&scope.key()));
    let cordons: Vec<_> = cordons.collect();
    if cordons.is_empty() {
        ""
    } else if !cordons.iter().any(|cordon| cordon.drain) {
        "cordoned"
    } else if is_emptied(state, observed, &pools()) {
        "drained"
    } else {
        "draining"
    }
}

/// State of a pool by its own cordon and its node's.
pub(crate) fn of_pool(state: &State, observed: &Observed, pool: &PoolRecord) -> &'static str {
    let scopes = [Scope::Pool(pool.name.clone()), Scope::Node(pool.node.clone())];
    standing(state, observed, &scopes, || HashSet::from([pool.name.clone()]))
}

pub(crate) fn of_node(state: &State, observed: &Observed, node: &str) -> &'static str {
    let scope = Scope::Node(node.to_owned());
    standing(state, observed, std::slice::from_ref(&scope), || pools_of(state, &scope))
}

/// Pools whose replicas are to move away.
pub(crate) fn draining(state: &State) -> HashSet<String> {
    let cordons = state.cordons.list();
    let drains = cordons.iter().filter(|cordon| cordon.drain);
    drains.flat_map(|cordon| pools_of(state, &Scope::from(&**cordon))).collect()
}

/// Records one event for each drain that is done.
pub(crate) async fn tell_drained(state: &State) -> Result<(), Error> {
    for cordon in state.cordons.list() {
        let scope = Scope::from(&*cordon);
        let pools = pools_of(state, &scope);
        let is_done = || is_emptied(state, &state.observed(), &pools);
        if cordon.told || !cordon.drain || !is_done() {
            continue;
        }
        let tell = |cordon: &mut CordonRecord| {
            cordon.told = true;
            Ok(())
        };
        state.cordons.update(&scope.key(), tell).await?;
        if let Ok(object) = object(state, &scope) {
            let message = "it holds no replica any more and can be taken away";
            state.events.record(Severity::Normal, object, "Drained", message);
        }
    }
    Ok(())
}

/// Moves one replica in a trial record, and subtracts its used bytes from the destination's room.
fn go(
    trial: &mut VolumeRecord,
    replica: &ReplicaRecord,
    candidates: &mut [Candidate],
    used_bytes: u64,
) -> Result<String, String> {
    let moved = relocate(trial, replica.guid.0, "", candidates, Cause::Drain);
    let (_, pool) = moved.map_err(|refusal| refusal.to_string())?;
    // The trial record drops the old replica, so that the volume's next one may use its host.
    trial.replicas.retain(|r| r.guid != replica.guid);
    if let Some(candidate) = candidates.iter_mut().find(|c| c.name == pool) {
        candidate.used_bytes = candidate.used_bytes.saturating_add(used_bytes);
        candidate.promised_bytes = candidate.promised_bytes.saturating_add(trial.size_bytes);
    }
    Ok(pool)
}

fn refuse(scope: &Scope, planned: &[(i16, api::DrainedReplica)]) -> Result<(), Error> {
    let stuck: Vec<_> = planned.iter().filter(|(_, r)| r.state == "stuck").collect();
    if stuck.is_empty() {
        return Ok(());
    }
    let mut told = HashSet::new();
    let volumes: Vec<_> =
        stuck.iter().filter(|(_, replica)| told.insert(&replica.volume_id)).collect();
    let (kind, holder) = (scope.kind(), scope.holder());
    let mut text = format!("{kind} {holder:?} cannot be drained, nothing was begun:");
    let mut listed = 0;
    for (_, replica) in &volumes {
        let (name, without) = (&replica.volume_name, &replica.without);
        // The line names the volume already.
        let own = format!("volume {name:?}: ");
        let why = replica.message.strip_prefix(&own).unwrap_or(&replica.message);
        let line = format!("\n  volume {name:?} would be left with {without}: {why}");
        // The text is sent as a gRPC status message, which has little room.
        if listed == VOLUMES_MAX || (listed > 0 && text.len() + line.len() > REFUSAL_BYTES_MAX) {
            break;
        }
        text += &line;
        listed += 1;
    }
    if let more @ 1.. = volumes.len() - listed {
        text += &format!("\n  and {more} more; `quoin {kind} drain --dry-run` shows all");
    }
    Err(Error::Precondition(text))
}
