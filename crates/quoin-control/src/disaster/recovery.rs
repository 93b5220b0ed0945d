//! Going on with the replicas that are left, where too few are for any target to open a volume.
//!
//! This is the forced change of membership (`docs/replication.md`) in the form that a person
//! consents to: in one compare-and-swap the epoch and the version grow, the known list becomes
//! those that are left, RF its length, and the others are retired for good. Nobody can prove that
//! those that are left hold all that was acknowledged, so the volume's name is typed and the
//! record says from then on that something may have been lost. CF is as high as RF until the first
//! open has heard all that are left: what any of them holds is not lost. DRF stays as it was: the
//! target raises RF again with new replicas.
//!
//! The others must not serve on anywhere: each must be proven gone, by its pool
//! that is there without it, or declared destroyed. A lease that one of them granted before is
//! waited out before the swap.
//!
//! The same ends the wait for a change of membership that only replicas know of which do not answer
//! (an old copy of the record ruled, or a newcomer was lost as the change was under way): though
//! enough of the known ones are there. A newcomer that the record still names must not be there
//! then, and none of those waited for comes back.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::VolumeRef;
use quoin_types::membership::open_quorum;
use quoin_types::{Membership, ReplicaGuid, ReplicaId, Term};

use crate::Error;
use crate::state::events::Severity;
use crate::state::observed::{ReplicaState, VolumeSeen};
use crate::state::records::{Discarded, MembershipRecord, ReplicaRecord, VolumeRecord};
use crate::state::{State, about};
use crate::time::now_ms;
use crate::volume::scale::{self, Scale};

/// Longer than a replica holds the lease of any target ([`quoin_replication::replica::LEASE_MS`]), by
/// its own clock.
pub const LEASES_OVER_AFTER: Duration = Duration::from_secs(3);

/// Decision of a person.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Recovery {
    /// All replicas that are left.
    pub keep: Vec<ReplicaId>,
    /// Replicas that will never be started again with what they hold.
    pub destroyed: Vec<ReplicaId>,
    /// The volume's name, typed.
    pub accept_loss_of: String,
}

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
        recovery: &Recovery,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        self.check(&volume, recovery)?;
        tokio::time::sleep(LEASES_OVER_AFTER).await;
        let _one_at_a_time = self.state.creating.lock().await;
        let now = self.state.volume(reference)?;
        self.check(&now, recovery)?;
        let candidates = crate::volume::volumes::candidates(&self.state);
        let seen = now.membership.version;
        let (silent, term) = (silent(&self.state, &now), self.state.term());
        let change = |volume: &mut VolumeRecord| {
            if volume.membership.version != seen || !volume.phase.is_kept() {
                return Err(Error::Aborted("the volume changed meanwhile; look again".to_owned()));
            }
            reduce(volume, &recovery.keep, &silent, term)?;
            // As many as are desired, as far as there is room; the rest is asked for by hand.
            let _ = scale::scale(volume, &Scale::default(), &candidates);
            Ok(())
        };
        let (volume, ()) = self.state.update_volume(now.id.0, change).await?;
        let message = format!(
            "by hand, from {} of {} replicas: acknowledged writes that only the others held are lost",
            recovery.keep.len(),
            now.membership.rf
        );
        self.state.events.record(Severity::Error, about(&volume), "VolumeRecovered", message);
        Ok(volume)
    }

    fn check(&self, volume: &VolumeRecord, recovery: &Recovery) -> Result<(), Error> {
        let name = &volume.spec.name;
        let refuse = |why: String| Err(Error::Precondition(format!("volume {name:?}: {why}")));
        if !volume.phase.is_kept() {
            return refuse("it is not ready".to_owned());
        }
        if recovery.keep.is_empty() {
            return Err(Error::invalid("keep", "name the replicas that are left, all of them"));
        }
        let known = |id: &ReplicaId| volume.known_guid(*id).is_some();
        if let Some(other) = recovery.keep.iter().chain(&recovery.destroyed).find(|id| !known(id)) {
            return Err(Error::missing("known replica", format!("{other} of volume {name:?}")));
        }
        let serves =
            of_its_target(&self.state, volume, |seen| seen.state == "serving") == Some(true);
        let silent = silent(&self.state, volume);
        let newcomers = volume.replicas.iter().filter(|r| !volume.is_known(r));
        for newcomer in newcomers.filter(|r| silent.contains(&r.guid.0)) {
            let observed = self.state.observed();
            let pool = observed.online_pool(&newcomer.pool, self.state.settings.offline_after);
            if pool.and_then(|pool| pool.replicas.get(&newcomer.guid.0)).is_some() {
                return refuse(format!(
                    "replica {} on pool {} is there and may know of the change that is waited for: \
                     let the target reach that pool",
                    newcomer.id.0, newcomer.pool
                ));
            }
        }
        let (rf, cf) = (volume.membership.rf, volume.membership.cf);
        let needed = usize::from(open_quorum(rf, cf));
        let mut there = 0;
        for member in &volume.membership.known {
            let id = member.id.0;
            let record = volume.replicas.iter().find(|r| r.guid == member.guid);
            let pool = record.or_else(|| volume.replicas.iter().find(|r| r.id.0 == id));
            let pool = pool.map(|r| r.pool.as_str()).unwrap_or_default();
            let held = {
                let observed = self.state.observed();
                let seen = observed.online_pool(pool, self.state.settings.offline_after);
                seen.and_then(|seen| seen.replicas.get(&member.guid.0)).map(|held| held.state)
            };
            // Its pool says so, or said so: then the record of it has another GUID since. That a
            // pool does not mention it proves nothing, for it may only just have started.
            let proven = held == Some(ReplicaState::Gone) || record.is_none();
            let rolled_back = self.state.is_rolled_back(pool);
            let present = held == Some(ReplicaState::Present) && !rolled_back;
            there += usize::from(present);
            match (recovery.keep.contains(&id), present) {
                (true, true) => {}
                (true, false) => {
                    return refuse(format!("replica {id} on pool {pool} is not there to be kept"));
                }
                (false, true) => {
                    return refuse(format!(
                        "replica {id} on pool {pool} is there and may hold what the others lack: \
                         keep it too"
                    ));
                }
                (false, false) if proven || recovery.destroyed.contains(&id) => {}
                (false, false) => {
                    return refuse(format!(
                        "replica {id} on pool {pool} may live on where nobody sees it: start the \
                         pool, or declare the replica destroyed if it never will be again"
                    ));
                }
            }
        }
        if serves || (there >= needed && silent.is_empty()) {
            return refuse(format!(
                "{there} of {rf} replicas are there, {needed} are needed to open it: nothing must \
                 be given up; to have fewer, `quoin replica remove`"
            ));
        }
        if recovery.accept_loss_of != *name && there >= needed {
            return refuse(format!(
                "{} replicas that do not answer may know of a change, and may serve on where nobody \
                 sees it: what was written there is lost for good; accept that by the volume's name \
                 (--accept-loss-of {name:?})",
                silent.len()
            ));
        }
        if recovery.accept_loss_of != *name {
            let further = self.further_than(volume, &recovery.keep);
            return refuse(format!(
                "{there} of {rf} replicas are left, which may lack acknowledged writes: those are \
                 lost for good{further}; accept that by the volume's name (--accept-loss-of {name:?})"
            ));
        }
        Ok(())
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

/// The membership becomes [`Membership::reduced_to`] those that are kept; what the others hold is
/// deleted should it turn up.
fn reduce(
    volume: &mut VolumeRecord,
    keep: &[ReplicaId],
    silent: &[ReplicaGuid],
    term: Term,
) -> Result<(), Error> {
    let next =
        Membership::from(&volume.membership).reduced_to(|member| keep.contains(&member.id), silent);
    let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut volume.replicas)
        .into_iter()
        .partition(|replica| next.retired.contains(&replica.guid.0));
    volume.replicas = stay;
    volume.discarded.extend(gone.into_iter().map(Discarded::from));
    volume.membership = MembershipRecord::from(&next);
    volume.forget_retired();
    volume.fence(false, term)?;
    // A target that has it open finds that it is not its own any more, and opens it anew.
    volume.opened.owner = None;
    volume.may_have_lost_ms = now_ms();
    Ok(())
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
