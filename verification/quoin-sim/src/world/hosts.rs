//! The hosts: which have power, and their clocks, which drift, jump and stop as faults have it.

use quoin_types::Time;

use super::{Event, Mend, World};
use crate::clock::HostClock;
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, SECOND};

/// Clocks drift apart by up to 4 %, and a lease allows for 10: two jumps within one lease fit.
const LEASE_JUMP_DIVISOR: u64 = 40;

pub(crate) struct Hosts {
    pub clocks: Vec<HostClock>,
    pub powered: Vec<bool>,
}

impl Hosts {
    pub fn draw(count: usize, random: &mut Random) -> Self {
        let mut clock =
            |_| HostClock::new(random.below(1 << 50), random.between(980_000, 1_020_000));
        Self { clocks: (0..count).map(&mut clock).collect(), powered: vec![true; count] }
    }

    pub fn local(&self, host: usize, now: Instant) -> Time {
        self.clocks[host].local(now)
    }
}

impl World {
    /// Only forward: by any time where a lease may end early, at targets; at hosts of replicas by
    /// what a lease's share for skewed clocks still covers beside their drift.
    pub(super) fn jump_clock(&mut self) -> bool {
        let target = self.a_target();
        let mut host = self.targets[target].host;
        let mut ahead = self.random.between(1, 10_000) * MILLISECOND;
        if self.random.percent(40) {
            host = self.pools[self.random.index(self.pools.len())].host;
        }
        if self.pools.iter().any(|p| p.host == host) {
            ahead = u64::from(self.setup.config.lease_ms) * MILLISECOND / LEASE_JUMP_DIVISOR;
        }
        self.hosts.clocks[host].jump(self.schedule.now(), ahead);
        self.clock_changed(host);
        true
    }

    /// Holds answers back until another target serves; only then the defect shows.
    pub(super) fn stale_answers_for(&mut self, host: usize) {
        let hosts: Vec<usize> = self.pools.iter().map(|p| p.host).filter(|h| *h != host).collect();
        let blocked: Vec<(usize, usize)> = hosts.into_iter().map(|h| (h, host)).collect();
        for (from, to) in &blocked {
            self.network.block(*from, *to);
        }
        self.schedule.after(5 * SECOND, Event::Mend(Mend::Unblock(blocked)));
        self.failover();
    }

    pub(super) fn set_clock_rate(&mut self, host: usize, rate_ppm: u64) {
        self.hosts.clocks[host].set_rate(self.schedule.now(), rate_ppm);
        self.clock_changed(host);
    }

    pub(super) fn clock_changed(&mut self, host: usize) {
        for target in 0..self.targets.len() {
            if self.targets[target].host == host {
                self.plan_target_timer(target);
            }
        }
        for pool in 0..self.pools.len() {
            if self.pools[pool].host == host {
                self.plan_pool_timer(pool);
            }
        }
    }
}
