//! A control plane that takes back what a target was granted when its host loses the volume, in the
//! swarms `detaches` and `controllers`. Pools are told so late, each by itself, and again whenever they start; the target
//! that lost the volume lives on, and comes back with the grant that it has.

use std::collections::BTreeMap;

use quoin_replication::replica::{FENCED_SESSION, ReplicaEvent};
use quoin_types::message::FromReplica;
use quoin_types::{Epoch, Incarnation, SessionKey, Time};

use super::{Event, World};
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;

pub(crate) struct Fences {
    random: Random,
    on: bool,
    /// The control plane is at times of a version that takes nothing back.
    may_be_old: bool,
    /// What pools are told now.
    current: Option<Fence>,
    /// By GUID, what its replica was told, and when by its own clock.
    delivered: BTreeMap<u128, (Fence, Time)>,
}

#[derive(Clone, Copy)]
struct Fence {
    epoch: Epoch,
    at_once: bool,
}

impl Fences {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let random = Random::new(seed ^ 0x6665_6e63_6573);
        let on = matches!(swarm, Swarm::Detaches | Swarm::Controllers);
        let may_be_old = swarm == Swarm::Detaches;
        Self { random, on, may_be_old, current: None, delivered: BTreeMap::new() }
    }
}

impl World {
    /// The volume is another host's from now on. An epoch is used up that no target is granted.
    pub(crate) fn fence_former_owner(&mut self) {
        if !self.control.fences.on || self.control.record.epoch == Epoch::ZERO {
            return;
        }
        if self.control.fences.may_be_old && self.control.fences.random.percent(20) {
            return;
        }
        let Some(next) = self.control.record.term.next_epoch(self.control.record.epoch) else { return };
        self.control.record.epoch = next;
        self.control.record.incarnation = Incarnation(0);
        let (epoch, at_once) = (self.control.record.epoch, self.control.fences.random.percent(50));
        self.control.fences.current = Some(Fence { epoch, at_once });
        self.trace.line(self.schedule.now(), || format!("all up to epoch {epoch} is taken back"));
        for pool in 0..self.pools.len() {
            self.plan_fence(pool, 1500);
        }
    }

    fn plan_fence(&mut self, pool: usize, within_ms: u64) {
        let delay = self.control.fences.random.between(1, within_ms) * MILLISECOND;
        self.schedule.after(delay, Event::DeliverFence { pool });
    }

    /// A pool that starts hears of it again; until then it goes by what it has on its disk.
    pub(crate) fn restart_fences(&mut self, pool: usize) {
        if !self.control.fences.on {
            return;
        }
        let here = &mut self.pools[pool];
        let mut promised = Epoch::ZERO;
        here.storage.with(here.member.guid, &mut |store| promised = store.meta().promised);
        let guid = here.member.guid.0;
        self.control.fences
            .delivered
            .retain(|delivered, (current, _)| *delivered != guid || current.epoch <= promised);
        if self.control.fences.current.is_some() {
            self.plan_fence(pool, 400);
        }
    }

    pub(crate) fn deliver_fence(&mut self, pool: usize) {
        let Some(Fence { epoch, at_once }) = self.control.fences.current else { return };
        if self.pools[pool].paused {
            return self.plan_fence(pool, 50);
        }
        let here = &self.pools[pool];
        if here.process.is_none() || here.gone {
            return;
        }
        let (guid, now) = (here.member.guid.0, self.local(here.host));
        self.pool_learns(pool, self.control.record.term);
        if !self.orders(pool, self.control.record.term) {
            // Its reports are heard by a controller that it believes, once one rules there.
            return self.plan_fence(pool, 1500);
        }
        self.feed_pool(pool, vec![ReplicaEvent::Fence { epoch, at_once }]);
        let delivered =
            self.control.fences.delivered.entry(guid).or_insert((Fence { epoch, at_once }, now));
        if delivered.0.epoch < epoch {
            *delivered = (Fence { epoch, at_once }, now);
        }
        self.stats.fences += 1;
    }

    /// Nothing is opened by a grant that was taken back, and what was open ends in its time.
    pub(crate) fn check_fenced(&mut self, pool: usize, session: SessionKey, message: &FromReplica) {
        let here = &self.pools[pool];
        let Some((current, since)) = self.control.fences.delivered.get(&here.member.guid.0).copied() else {
            return;
        };
        // An epoch is used up for the word: where a session has that number, a rival granted it.
        let is_another = session.epoch == current.epoch && self.is_of_a_rival(session);
        if session.epoch > current.epoch || is_another {
            return;
        }
        let is_over = current.at_once || self.local(here.host) > since + FENCED_SESSION;
        let what = match message {
            FromReplica::OpenAck(_) => "opened",
            FromReplica::Refuse { .. } | FromReplica::Failed(_) => return,
            _ if is_over => "served",
            _ => return,
        };
        let detail = format!(
            "pool {pool} {what} epoch {} after all up to {} was taken back",
            session.epoch, current.epoch
        );
        self.violate("TakenBack", detail);
    }
}
