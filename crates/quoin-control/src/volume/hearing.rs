//! Silence of nodes, by what is observed of them ([`liveness`]).

use quoin_cluster::ownership::liveness::{self, Silence};
use quoin_cluster::records::{ReplicaRecord, VolumeRecord};

use crate::state::events::Severity;
use crate::state::{State, about};
use crate::time;

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
