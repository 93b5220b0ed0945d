//! Nothing is opened by a grant that was taken back, and what was open ends in its time. Once a fence of the
//! nodes that had the volume before, or of a node that is fenced by its network, would be answered, their targets
//! answer nothing any more.

use std::collections::BTreeMap;
use std::time::Duration;

use quoin_cluster::ownership::network_fences::{self, Bounds, Promised};
use quoin_cluster::records::ReplicaRecord;
use quoin_replication::primary::ReadMode;
use quoin_replication::replica::FENCED_SESSION;
use quoin_types::message::FromReplica;
use quoin_types::{Epoch, SessionKey, Time};

use super::{Broken, Checker, Observation, Scene, broken};
use crate::control::node_name;

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

/// Interval of looks at the words of the pools.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The answer to a fence of former nodes, by the product's own rule, held against what their targets do.
#[derive(Default)]
pub(crate) struct FormerTargets {
    looked: Time,
    /// By GUID, what the pool of a replica says that it promised, and since when.
    words: BTreeMap<u128, Promised>,
    /// Nothing is answered any more under this epoch and earlier ones.
    over: u64,
    /// Number of the fence of a network that was answered last: nothing is answered any more by its host.
    answered: u64,
}

impl FormerTargets {
    /// Takes the pools' reports in, and asks the rule.
    fn look(&mut self, scene: &Scene<'_>, now: Time) {
        for pool in scene.pools.iter().filter(|pool| !pool.gone && !pool.paused) {
            let Some(process) = &pool.process else { continue };
            let Some(replica) = &process.replica else { continue };
            let is_silent = !replica.hears_target(scene.local(pool.host));
            let closed_since = (!replica.is_open()).then_some(now);
            let word = Promised { epoch: process.promised, since: now, is_silent, closed_since };
            let before = self.words.entry(pool.member.guid.0).or_insert(word);
            let since = if before.epoch == word.epoch { before.since } else { now };
            let closed_since = closed_since.map(|now| before.closed_since.unwrap_or(now));
            *before = Promised { since, closed_since, ..word };
        }
        let volume = scene.control.record.volume();
        let lease = Duration::from_millis(scene.setup.config.lease_ms.into());
        let bounds = Bounds { lease, closing: FENCED_SESSION };
        let word = |replica: &ReplicaRecord| self.words.get(&replica.guid.0.0).copied();
        let has_ended = |last| network_fences::check_ended(volume, last, word, bounds, now).is_ok();
        if let Some(last) = network_fences::last_former_epoch(volume)
            && has_ended(last)
        {
            self.over = self.over.max(last);
        }
        if let Some(fence) = scene.control.fences.of_network() {
            let node = node_name(fence.host);
            let last = network_fences::last_epoch(volume, |name| name == node);
            if last.is_none_or(has_ended) {
                self.answered = fence.number;
            }
        }
    }
}

impl Checker for FormerTargets {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        // Where clocks stop, leases do not end.
        let is_meant = scene.control.fences.by_one_controller;
        if !is_meant || scene.setup.config.reads == ReadMode::Confirmed {
            return Ok(());
        }
        if let Observation::Answers { target, .. } = *seen {
            let serving = scene.process(target).and_then(|process| process.serving);
            if let Some(epoch) = serving.filter(|epoch| epoch.0 <= self.over) {
                let detail = format!(
                    "target {target} answers in epoch {epoch} after a fence of all up to {} held",
                    Epoch(self.over)
                );
                return broken("FenceHolds", detail);
            }
            let fence = scene.control.fences.of_network();
            if fence.is_some_and(|f| f.host == target && f.number == self.answered) {
                let detail = format!("target {target} answers after a fence of its network held");
                return broken("FenceHolds", detail);
            }
        }
        let now = scene.local(scene.control.host);
        if now.since(self.looked) >= LOOK_EVERY {
            self.looked = now;
            self.look(scene, now);
        }
        Ok(())
    }
}
