//! A control plane that takes back what a target was granted when its host loses the volume, in the
//! swarms `detaches` and `controllers`. Each pool receives the fence late, by itself, and again whenever it starts; the target
//! that lost the volume lives on, and comes back with the grant that it has. In half of the runs of `detaches` an
//! operator fences the network of a target's host too, and lifts that again.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use quoin_cluster::ownership::network_fences;
use quoin_cluster::records::{Block, FenceRecord, NodeRecord, Text};
use quoin_replication::replica::ReplicaEvent;
use quoin_types::Epoch;

use super::checkers::Observation;
use super::{Event, World};
use crate::control::node_name;
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
    operator: Random,
    /// Fences of the network are made.
    fences_network: bool,
    /// Number of the last one, for it to be told from others.
    number: u64,
    /// The one in force.
    network: Option<NetworkFence>,
    /// The target that was granted an epoch last.
    last_granted: Option<usize>,
}

/// A fence of the address of a target's host.
#[derive(Clone, Copy)]
pub(crate) struct NetworkFence {
    pub number: u64,
    pub host: usize,
}

/// Interval in which what a fenced node was granted is taken back, as long as there is any.
const ENFORCE_EVERY: u64 = 100 * MILLISECOND;

fn address_of(host: usize) -> IpAddr {
    Ipv4Addr::from_bits(0xc000_0200 + host as u32).into()
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
        let mut operator = Random::new(seed ^ 0x006e_6574_776f_726b);
        let fences_network = swarm == Swarm::Detaches && operator.percent(50);
        Self {
            random,
            on,
            by_one_controller: swarm == Swarm::Detaches,
            current: None,
            operator,
            fences_network,
            number: 0,
            network: None,
            last_granted: None,
        }
    }

    /// The fence of a network that is in force.
    pub fn of_network(&self) -> Option<NetworkFence> {
        self.network
    }

    /// Returns true if the controller gives the host no volume, and its target no epoch.
    pub fn refuses(&self, host: usize) -> bool {
        let Some(fence) = self.network else { return false };
        let record = FenceRecord {
            block: Text(Block::of(address_of(fence.host))),
            since_ms: 0,
            nodes: BTreeSet::new(),
            volumes: BTreeSet::new(),
        };
        let node = NodeRecord {
            name: node_name(host),
            address: String::new(),
            topology: Default::default(),
            volumes_max: 0,
            version: String::new(),
            host_addresses: [address_of(host)].into(),
        };
        network_fences::check_node([&record], &node).is_err()
    }
}

impl World {
    /// The volume is another host's from now on. An epoch is used up that no target is granted.
    pub(crate) fn give_volume_to(&mut self, host: usize) {
        let at_once = self.control.fences.on && self.control.fences.random.percent(50);
        if self.control.record.give_to(host, at_once) && self.control.fences.on {
            self.tell_fence();
        }
    }

    /// The pools are told the fence of the record, each in its time.
    fn tell_fence(&mut self) {
        let (epoch, at_once) = self.control.record.fence();
        self.control.fences.current = Some(Fence { epoch, at_once });
        self.trace.line(self.schedule.now(), || format!("all up to epoch {epoch} is taken back"));
        for pool in 0..self.pools.len() {
            self.plan_fence(pool, 1500);
        }
    }

    /// The first fence of a network, where this run has some.
    pub(crate) fn plan_network_fence(&mut self) {
        if self.control.fences.fences_network {
            let delay = self.control.fences.operator.between(200, 6000) * MILLISECOND;
            self.schedule.after(delay, Event::FenceNetwork);
        }
    }

    /// An operator fences the network of a host.
    pub(crate) fn fence_network(&mut self) {
        if !self.control.fences.fences_network || self.control.fences.network.is_some() {
            return;
        }
        let owner = self.control.record.owner;
        let is_owner = self.control.fences.operator.percent(60);
        self.fence_network_of(if is_owner { owner } else { 1 - owner });
    }

    /// Another target was granted an epoch: the host that had the volume may be fenced right then, while its
    /// target goes on.
    pub(crate) fn fence_former(&mut self, granted: usize) {
        let fences = &mut self.control.fences;
        let former = fences.last_granted.replace(granted).filter(|last| *last != granted);
        let may = fences.fences_network && fences.network.is_none();
        if let Some(former) = former.filter(|_| may)
            && fences.operator.percent(50)
        {
            self.fence_network_of(former);
        }
    }

    fn fence_network_of(&mut self, host: usize) {
        let fences = &mut self.control.fences;
        fences.number += 1;
        fences.network = Some(NetworkFence { number: fences.number, host });
        let lasts = fences.operator.between(1000, 9000) * MILLISECOND;
        self.trace.line(self.schedule.now(), || format!("the network of target {host} is fenced"));
        self.stats.control.network_fences += 1;
        self.schedule.after(lasts, Event::LiftFence);
        self.enforce_fence();
    }

    pub(crate) fn lift_fence(&mut self) {
        if self.control.fences.network.take().is_some() {
            self.trace.line(self.schedule.now(), || "the fence is lifted".into());
            self.plan_network_fence();
        }
    }

    /// Takes back what the fenced node was granted.
    pub(crate) fn enforce_fence(&mut self) {
        let Some(NetworkFence { host, .. }) = self.control.fences.network else { return };
        if self.control.record.fence_node(host) {
            self.tell_fence();
        }
        self.schedule.after(ENFORCE_EVERY, Event::EnforceFence);
    }

    /// No fence of a network is left, and none is made any more.
    pub(crate) fn end_network_fences(&mut self) {
        (self.control.fences.network, self.control.fences.fences_network) = (None, false);
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
