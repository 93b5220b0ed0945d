//! Nothing is opened by a grant that was taken back, and what was open ends in its time.

use std::collections::BTreeMap;

use quoin_replication::replica::FENCED_SESSION;
use quoin_types::message::FromReplica;
use quoin_types::{Epoch, SessionKey, Time};

use super::{Broken, Checker, Observation, Scene, broken};

#[derive(Default)]
pub(crate) struct FenceRules {
    /// By GUID, the fence that its replica was given, and when by its own clock.
    delivered: BTreeMap<u128, (Fence, Time)>,
}

#[derive(Clone, Copy)]
struct Fence {
    epoch: Epoch,
    at_once: bool,
}

impl Checker for FenceRules {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match *seen {
            // A pool applies what it has on its disk until it receives the fence again.
            Observation::PoolStarts { pool, promised, .. } => {
                let own = scene.pools[pool].member.guid.0;
                self.delivered.retain(|guid, (fence, _)| *guid != own || fence.epoch <= promised);
                Ok(())
            }
            Observation::FenceDelivered { pool, epoch, at_once } => {
                let here = &scene.pools[pool];
                let (guid, now) = (here.member.guid.0, scene.local(here.host));
                let fence = Fence { epoch, at_once };
                let delivered = self.delivered.entry(guid).or_insert((fence, now));
                if delivered.0.epoch < epoch {
                    *delivered = (fence, now);
                }
                Ok(())
            }
            Observation::PoolSends { pool, session, message } => {
                self.check(scene, pool, session, message)
            }
            _ => Ok(()),
        }
    }
}

impl FenceRules {
    fn check(
        &self,
        scene: &Scene<'_>,
        pool: usize,
        session: SessionKey,
        message: &FromReplica,
    ) -> Result<(), Broken> {
        let here = &scene.pools[pool];
        let Some((fence, since)) = self.delivered.get(&here.member.guid.0) else { return Ok(()) };
        // The fence uses an epoch up: where a session has that number, a rival granted it.
        let is_another = session.epoch == fence.epoch && scene.control.terms.is_of_a_rival(session);
        if session.epoch > fence.epoch || is_another {
            return Ok(());
        }
        let is_over = fence.at_once || scene.local(here.host) > *since + FENCED_SESSION;
        let what = match message {
            FromReplica::OpenAck(_) => "opened",
            FromReplica::Refuse { .. } | FromReplica::Failed(_) => return Ok(()),
            _ if is_over => "served",
            _ => return Ok(()),
        };
        let (epoch, upto) = (session.epoch, fence.epoch);
        broken(
            "TakenBack",
            format!("pool {pool} {what} epoch {epoch} after all up to {upto} was taken back"),
        )
    }
}
