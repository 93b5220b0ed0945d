//! A control plane that takes back what a target was granted when its host loses the volume, in the
//! swarms `detaches` and `controllers`. Each pool receives the fence late, by itself, and again whenever it starts; the target
//! that lost the volume lives on, and comes back with the grant that it has.

use quoin_replication::replica::ReplicaEvent;
use quoin_types::Epoch;

use super::checkers::Observation;
use super::{Event, World};
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;

pub(crate) struct Fences {
    random: Random,
    on: bool,
    /// One controller alone takes grants back, so its record says who had one.
    pub by_one_controller: bool,
    /// The fence that pools receive now.
    current: Option<Fence>,
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
        Self { random, on, by_one_controller: swarm == Swarm::Detaches, current: None }
    }
}

impl World {
    /// The volume is another host's from now on. An epoch is used up that no target is granted.
    pub(crate) fn give_volume_to(&mut self, host: usize) {
        let at_once = self.control.fences.on && self.control.fences.random.percent(50);
        if !self.control.record.give_to(host, at_once) || !self.control.fences.on {
            return;
        }
        let (epoch, at_once) = self.control.record.fence();
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

    /// A pool that starts receives the fence again; until then it applies what it has on its disk.
    pub(crate) fn restart_fences(&mut self, pool: usize) {
        if !self.control.fences.on {
            return;
        }
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
        let term = self.control.record.term;
        self.control.terms.pool_learns(pool, term);
        if !self.control.terms.orders(pool, term) {
            // The pool accepts orders again once a controller of a term that it accepts rules there.
            return self.plan_fence(pool, 1500);
        }
        self.feed_pool(pool, vec![ReplicaEvent::Fence { epoch, at_once }]);
        self.observe(&Observation::FenceDelivered { pool, epoch, at_once });
        self.stats.control.fences += 1;
    }
}
