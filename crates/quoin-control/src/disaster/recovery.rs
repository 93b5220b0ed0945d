//! Requests to go on with the replicas that are left ([`recovery`]).

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::VolumeRef;
use quoin_cluster::ownership::recovery::{self, Recovery, Seen, Word};
use quoin_cluster::records::{ReplicaRecord, VolumeRecord};
use quoin_types::{ReplicaGuid, ReplicaId};

use crate::Error;
use crate::state::events::Severity;
use crate::state::observed::{ReplicaState, VolumeSeen};
use crate::state::{State, about};
use crate::time::now_ms;
use crate::volume::scale::{self, Scale};

/// Longer than a replica holds the lease of any target ([`quoin_replication::replica::LEASE_MS`]), by
/// its own clock.
pub const LEASES_OVER_AFTER: Duration = Duration::from_secs(3);

/// Recovery of a volume by hand.
pub struct ForcedRecovery {
    state: Arc<State>,
}

impl ForcedRecovery {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Makes the replicas that are left the whole volume.
    ///
    /// # Errors
    /// Where a target could open it, where one that is there is not kept, where one that is not
    /// kept may live, and where the loss was not accepted.
    pub async fn recover(
        &self,
        reference: Option<&VolumeRef>,
        asked: &Recovery,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        self.check(&volume, asked)?;
        tokio::time::sleep(LEASES_OVER_AFTER).await;
        let _one_at_a_time = self.state.creating.lock().await;
        let now = self.state.volume(reference)?;
        self.check(&now, asked)?;
        let candidates = crate::volume::volumes::candidates(&self.state);
        let seen = now.membership.version;
        let (silent, term) = (silent(&self.state, &now), self.state.term());
        let change = |volume: &mut VolumeRecord| {
            if volume.membership.version != seen || !volume.phase.is_kept() {
                return Err(Error::Aborted("the volume changed meanwhile; look again".to_owned()));
            }
            recovery::reduce(volume, &asked.keep, &silent, now_ms(), term)?;
            // As many as are desired, as far as there is room; the rest is asked for by hand.
            let _ = scale::scale(volume, &Scale::default(), &candidates);
            Ok(())
        };
        let (volume, ()) = self.state.update_volume(now.id.0, change).await?;
        let message = format!(
            "by hand, from {} of {} replicas: acknowledged writes that only the others held are lost",
            asked.keep.len(),
            now.membership.rf
        );
        self.state.events.record(Severity::Error, about(&volume), "VolumeRecovered", message);
        Ok(volume)
    }

    fn check(&self, volume: &VolumeRecord, asked: &Recovery) -> Result<(), Error> {
        let silent = silent(&self.state, volume);
        let word = |pool: &str, guid: ReplicaGuid| {
            let observed = self.state.observed();
            let seen = observed.online_pool(pool, self.state.settings.offline_after)?;
            Some(match seen.replicas.get(&guid)?.state {
                ReplicaState::Present if self.state.is_rolled_back(pool) => Word::RolledBack,
                ReplicaState::Present => Word::Present,
                ReplicaState::Gone => Word::Gone,
                ReplicaState::Damaged => Word::Damaged,
            })
        };
        let seen = Seen {
            serves: of_its_target(&self.state, volume, |seen| seen.state == "serving")
                == Some(true),
            silent: &silent,
            word: &word,
            further: &|| self.further_than(volume, &asked.keep),
        };
        Ok(recovery::check(volume, asked, &seen)?)
    }

    /// In words, the newcomers that hold more than those that are kept do: they do not count yet, and
    /// are copied anew.
    fn further_than(&self, volume: &VolumeRecord, keep: &[ReplicaId]) -> String {
        let observed = self.state.observed();
        let position = |replica: &ReplicaRecord| {
            let pool = observed.online_pool(&replica.pool, self.state.settings.offline_after)?;
            pool.replicas.get(&replica.guid.0).map(|seen| seen.position)
        };
        let (known, newcomers): (Vec<_>, Vec<_>) =
            volume.replicas.iter().partition(|replica| volume.is_known(replica));
        let kept = known.iter().filter(|replica| keep.contains(&replica.id.0));
        let newest = kept.filter_map(|replica| position(replica)).max();
        let further = newcomers.iter().filter(|replica| position(replica) > newest);
        further
            .map(|replica| {
                format!(
                    ", also what replica {} on pool {} holds, which is further than they are and on its \
                     way in (`quoin pool export` saves it)",
                    replica.id.0, replica.pool
                )
            })
            .collect()
    }
}

/// Replicas that its target waits for, since they may know of a change that the record lacks.
pub(crate) fn silent(state: &State, volume: &VolumeRecord) -> Vec<ReplicaGuid> {
    of_its_target(state, volume, |seen| seen.silent.clone()).unwrap_or_default()
}

/// Returns a part of the latest report of the target that has the volume under the record's epoch.
fn of_its_target<T>(
    state: &State,
    volume: &VolumeRecord,
    what: impl FnOnce(&VolumeSeen) -> T,
) -> Option<T> {
    let observed = state.observed();
    let seen = observed.volumes.get(&volume.id.0)?;
    let is_there = observed.node_online(&seen.node, state.settings.offline_after);
    (is_there && seen.epoch == volume.opened.epoch).then(|| what(seen))
}

#[cfg(test)]
mod tests {
    use super::LEASES_OVER_AFTER;
    use quoin_replication::replica::{LEASE_MS, granted_lease};

    #[test]
    fn a_recovery_waits_out_every_lease_that_a_target_may_have_taken() {
        assert!(LEASES_OVER_AFTER > granted_lease(LEASE_MS));
    }
}
