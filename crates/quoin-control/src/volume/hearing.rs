//! Silence of nodes, and ends of their sessions, by what is observed of them ([`liveness`],
//! [`network_fences`]).

use std::time::Duration;

use quoin_cluster::ownership::liveness::{self, Hearing, Silence};
use quoin_cluster::ownership::network_fences::{self, Bounds, Promised};
use quoin_cluster::records::{ReplicaRecord, VolumeRecord};
use quoin_replication::replica::{FENCED_SESSION, LEASE_MS};
use quoin_types::Epoch;

use crate::state::events::Severity;
use crate::state::observed::{Observed, ReplicaState};
use crate::state::{State, about};
use crate::time;

/// How long sessions last without their target's cooperation.
const BOUNDS: Bounds =
    Bounds { lease: Duration::from_millis(LEASE_MS as u64), closing: FENCED_SESSION };

/// Checks that a quorum has not heard of a node for its time-out, so that the volume may be taken from
/// it.
///
/// # Errors
/// Names the pools that heard of it, or says why they are not known.
pub(crate) fn check_silent(
    state: &State,
    volume: &VolumeRecord,
    node: &str,
) -> Result<Silence, String> {
    let observed = state.observed();
    let last = observed.nodes.get(node).map_or(observed.started, |seen| seen.last);
    let word = |replica: &ReplicaRecord| {
        let pool = observed.heard_pool(&replica.pool, state.settings.offline_after);
        let seen = pool.and_then(|pool| pool.replicas.get(&replica.guid.0));
        seen.map(|seen| seen.hearing).unwrap_or_default()
    };
    liveness::check_silent(volume, time::of(last), word, state.settings.node_timeout, time::now())
}

/// The promise of the pool of a replica, where it is heard of.
fn promised(state: &State, observed: &Observed, replica: &ReplicaRecord) -> Option<Promised> {
    let pool = observed.heard_pool(&replica.pool, state.settings.offline_after)?;
    let seen = pool.replicas.get(&replica.guid.0)?;
    if seen.state == ReplicaState::Gone {
        return Some(Promised::removed(seen.promised_since));
    }
    let is_silent = matches!(seen.hearing, Hearing::Silent(_));
    let (since, closed_since) = (seen.promised_since, seen.closed_since);
    Some(Promised { epoch: seen.promised, since, is_silent, closed_since })
}

/// Checks that nothing is acknowledged any more under this epoch of a volume and earlier ones. Returns what
/// its pools have promised.
///
/// # Errors
/// Says what is waited for.
pub(crate) fn check_ended(
    state: &State,
    volume: &VolumeRecord,
    last: u64,
) -> Result<Epoch, String> {
    let observed = state.observed();
    let word = |replica: &ReplicaRecord| promised(state, &observed, replica);
    network_fences::check_ended(volume, last, word, BOUNDS, time::now())
}

/// Returns true if no target's lease on the volume lives, by the word of a quorum of its pools.
pub(crate) fn is_silent(state: &State, volume: &VolumeRecord) -> bool {
    let observed = state.observed();
    network_fences::is_silent(volume, |replica| promised(state, &observed, replica))
}

/// Names the pools that say that they hear a node from which a volume was taken: they have it wrong, or
/// lie.
pub(crate) fn tell_dissent(state: &State, volume: &VolumeRecord, node: &str, silence: &Silence) {
    if silence.dissent.is_empty() {
        return;
    }
    let message = format!(
        "{}, while neither the controller nor a quorum of its pools has heard of node {node} for {} s; \
         it was taken from that node all the same: look at the pool and its clock",
        silence.dissent,
        silence.lasts.as_secs()
    );
    state.events.record(Severity::Warning, about(volume), "PoolDissents", message);
}
