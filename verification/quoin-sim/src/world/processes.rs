//! Surroundings of a volume in the processes that it shares with others, for the swarm `hosts`: dials
//! of hundreds of volumes to a host that drops packets, chunks of other volumes' rebuilds, threads
//! that stand still in the middle of a round, weeks in which nothing happens, and orders that were
//! meant for another volume. What the processes decide is the product's code
//! ([`quoin_replication::pool_host`], [`quoin_replication::target_host`]).

use std::collections::BTreeMap;

use quoin_replication::target_host::dial::{Queue, is_answered};
use quoin_replication::target_host::round::Round;

use super::checkers::Observation;
use super::{Event, Mend, World};
use crate::disk::Failing;
use crate::faults::FaultKind;
use crate::network::ConnectionId;
use crate::random::Random;
use crate::schedule::{Instant, MICROSECOND, MILLISECOND, SECOND};
use crate::storage::Outage;
use crate::swarm::Swarm;

/// Percentage of disk failures that end the pool's process too.
const ENDS_OF_HUNDRED: u64 = 60;
/// Volumes beside this one with a replica on a host that drops packets: more than there may be dials.
const NEIGHBOURS: u64 = 150;
/// A dial to a host that drops packets.
const UNANSWERED: Instant = 3 * SECOND;
/// Other volumes that are rebuilt from a pool.
const REBUILT_MAX: u64 = 6;
const DAY: Instant = 24 * 3600 * SECOND;

#[derive(Debug)]
pub(crate) enum ProcessEvent {
    /// A chunk's turn.
    Copy { pool: usize, life: u32 },
    /// A look at the health of what a pool holds.
    Health { pool: usize, life: u32 },
    /// A dial of another volume to this pool ended.
    NeighbourDialled { target: usize, life: u32, pool: usize },
    /// A host that dropped packets is back.
    HoleEnds { pool: usize },
    /// The owner is cut off, and the volume goes to the other target.
    Isolate { target: usize },
    /// A disk refuses reads from now on.
    ReadsFail { pool: usize },
    /// Weeks have passed.
    Weeks,
    /// A volume's limits let requests pass that waited.
    Release { target: usize, life: u32, arm: u32 },
    /// Users trim blocks.
    MakeHoles,
}

#[derive(Clone, Copy, Debug)]
enum Dial {
    Own { id: ConnectionId, added: Instant },
    Neighbour { pool: usize },
}

/// The dials of one target process.
#[derive(Default)]
struct Dials {
    queue: Queue<Dial>,
    /// This volume's that are under way: pool, and when each began.
    begun: BTreeMap<ConnectionId, (usize, Instant)>,
}

pub(crate) struct Processes {
    random: Random,
    pub on: bool,
    dials: BTreeMap<usize, Dials>,
    /// Pools on hosts that drop packets.
    holes: Vec<usize>,
    /// Other volumes that are rebuilt from each pool: their chunks go before this volume's.
    pub rebuilt: u64,
}

impl Processes {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let mut random = Random::new(seed ^ 0x686f_7374_7321);
        let on = swarm == Swarm::Hosts;
        let rebuilt = if on && random.percent(50) { random.between(1, REBUILT_MAX) } else { 0 };
        Self { random, on, dials: BTreeMap::new(), holes: Vec::new(), rebuilt }
    }

    /// Returns true if a process ends with its disk, before it can open the pool anew.
    pub fn process_ends(&mut self) -> bool {
        self.on && self.random.percent(ENDS_OF_HUNDRED)
    }

    /// How long serving a chunk keeps a pool's thread.
    pub fn chunk_takes(&mut self) -> Instant {
        self.random.between(100, 600) * MICROSECOND
    }

    /// By how much a report of a pool whose disk was put back is later: less than a start waits.
    pub fn report_takes(&mut self) -> Instant {
        if self.on { self.random.between(0, 1200) * MILLISECOND } else { 0 }
    }

    /// Returns true if a disk is put back under its pool's running process, which takes it for a
    /// failure.
    pub fn is_put_back_in_place(&mut self) -> bool {
        self.on && self.random.percent(50)
    }
}

fn address(pool: usize) -> String {
    format!("pool {pool}")
}

impl World {
    pub(crate) fn process_event(&mut self, event: ProcessEvent) {
        match event {
            ProcessEvent::Copy { pool, life } => self.copy(pool, life),
            ProcessEvent::Health { pool, life } => self.keep_healthy(pool, life),
            ProcessEvent::NeighbourDialled { target, life, pool } => {
                self.neighbour_dialled(target, life, pool);
            }
            ProcessEvent::HoleEnds { pool } => self.hole_ends(pool),
            ProcessEvent::Isolate { target } => {
                if self.control.record.owner == target && !self.faults.over {
                    self.isolate_owner();
                }
            }
            ProcessEvent::ReadsFail { pool } => self.reads_fail(pool),
            ProcessEvent::Weeks => self.weeks_pass(),
            ProcessEvent::Release { target, life, arm } => self.release(target, life, arm),
            ProcessEvent::MakeHoles => self.make_holes(),
        }
    }

    /// False if there was nothing to hit.
    pub(super) fn inject_in_process(&mut self, kind: FaultKind) -> bool {
        match kind {
            FaultKind::PoolStalls => {
                let pool = self.random.index(self.pools.len());
                if self.pools[pool].process.is_none() || self.pools[pool].paused {
                    return false;
                }
                self.stall_round(pool);
                self.pools[pool].paused = true;
                self.lasting(16_000, Mend::ResumePool(pool));
                true
            }
            FaultKind::TargetStalls => {
                let target = self.control.record.owner;
                let local = self.local(self.targets[target].host);
                let arrives = self.random.between(0, 20) * MILLISECOND;
                let arrived = self.schedule.now() + arrives;
                let there = &mut self.targets[target];
                let Some(process) = there.process.as_mut().filter(|_| !there.paused) else {
                    return false;
                };
                process.stalled = Some((Round::begin(local), arrived));
                there.paused = true;
                self.lasting(16_000, Mend::ResumeTarget(target));
                if self.random.percent(70) {
                    self.schedule.after(arrives, Event::Process(ProcessEvent::Isolate { target }));
                }
                true
            }
            FaultKind::BlackHole => self.black_hole(),
            FaultKind::ReadErrorsApart => {
                // Another replica is copied anew meanwhile, so that this one's log and map are read.
                let (pool, other) = (self.victim(), self.random.index(self.pools.len()));
                let away = self.random.between(500, 1500) * MILLISECOND;
                if other != pool && self.pools[other].process.is_some() {
                    self.kill_pool(other, Outage::Process, away);
                }
                let begins = away + self.random.between(0, 300) * MILLISECOND;
                self.schedule.after(begins, Event::Process(ProcessEvent::ReadsFail { pool }));
                true
            }
            FaultKind::OrderForAnother => self.order_for_another(),
            _ => false,
        }
    }

    /// Takes in the messages that waited while a round of the target stood still.
    pub(super) fn stalled_round_ends(&mut self, target: usize) {
        let process = self.targets[target].process.as_ref().filter(|p| p.stalled.is_some());
        let Some(id) = process.and_then(|p| p.sessions.values().next().copied()) else { return };
        let by = process.and_then(|p| p.stalled).map(|(_, arrived)| arrived);
        self.deliver_arrived(id, by);
        if let Some(process) = &mut self.targets[target].process {
            process.stalled = None;
        }
    }

    /// The disk refuses reads for some moments, in the middle of which weeks pass.
    fn reads_fail(&mut self, pool: usize) {
        if self.faults.over {
            return;
        }
        self.pools[pool].reads_failed = true;
        self.pools[pool].storage.set_failing(Failing { reads: true, ..Failing::default() });
        let until_then = self.processes.random.between(50, 900) * MILLISECOND;
        self.schedule.after(until_then, Event::Process(ProcessEvent::Weeks));
        let ends = until_then + self.processes.random.between(100, 2500) * MILLISECOND;
        self.schedule.after(ends, Event::Mend(Mend::Disk(pool)));
    }

    /// All clocks go on by weeks in which nothing was sent, asked or read.
    fn weeks_pass(&mut self) {
        let (now, ahead) = (self.schedule.now(), self.processes.random.between(7, 40) * DAY);
        for host in 0..self.hosts.clocks.len() {
            self.hosts.clocks[host].jump(now, ahead);
            self.clock_changed(host);
        }
        self.trace.line(now, || format!("{} days pass", ahead / DAY));
    }

    /// Orders and opens that were meant for another volume, and name this one's replica by mistake
    /// or by malice, reach its pool: by a grant for the other volume, or in an assignment.
    fn order_for_another(&mut self) -> bool {
        let pool = self.random.index(self.pools.len());
        let there = &mut self.pools[pool];
        let member = there.member;
        if there.process.is_none() || there.gone || there.is_foreign {
            return false;
        }
        let mut held = None;
        there.storage.with(member.guid, &mut |store| held = Some(store.identity().clone()));
        let Some(held) = held else { return false };
        self.observe(&Observation::OrderedForAnother { pool, member, held: &held });
        true
    }

    /// A host of replicas answers no peer, and hundreds of volumes dial it again and again.
    fn black_hole(&mut self) -> bool {
        let pool = self.random.index(self.pools.len());
        let host = self.pools[pool].host;
        let is_target = self.targets.iter().any(|target| target.host == host);
        if is_target || self.processes.holes.contains(&pool) {
            return false;
        }
        let others = (0..self.hosts.clocks.len()).filter(|other| *other != host);
        let blocked: Vec<(usize, usize)> =
            others.flat_map(|other| [(host, other), (other, host)]).collect();
        for (from, to) in &blocked {
            self.network.block(*from, *to);
        }
        for id in self.connections_across(&blocked) {
            if self.random.percent(50) {
                self.cut(id);
            }
        }
        self.processes.holes.push(pool);
        let lasts = self.random.between(2, 12) * SECOND;
        self.schedule.after(lasts, Event::Mend(Mend::Unblock(blocked)));
        self.schedule.after(lasts, Event::Process(ProcessEvent::HoleEnds { pool }));
        for target in 0..self.targets.len() {
            self.neighbours_dial(target, pool);
        }
        true
    }

    pub(crate) fn hole_ends(&mut self, pool: usize) {
        self.processes.holes.retain(|hole| *hole != pool);
        for dials in self.processes.dials.values_mut() {
            dials.queue.retain(|dial| !matches!(dial, Dial::Neighbour { pool: at } if *at == pool));
        }
    }

    fn neighbours_dial(&mut self, target: usize, pool: usize) {
        if self.targets[target].process.is_none() {
            return;
        }
        let queue = &mut self.processes.dials.entry(target).or_default().queue;
        (0..NEIGHBOURS).for_each(|_| queue.add(&address(pool), Dial::Neighbour { pool }));
        self.begin_dials(target);
    }

    /// A target's process begins, among the volumes of its host.
    pub(super) fn dials_begin(&mut self, target: usize) {
        if self.processes.on {
            self.processes.dials.remove(&target);
            for pool in self.processes.holes.clone() {
                self.neighbours_dial(target, pool);
            }
        }
    }

    pub(super) fn dials_end(&mut self, target: usize) {
        self.processes.dials.remove(&target);
    }

    /// A connection of this volume's is to be made when its turn comes.
    pub(super) fn dial(&mut self, target: usize, pool: usize, id: ConnectionId) {
        let added = self.schedule.now();
        let queue = &mut self.processes.dials.entry(target).or_default().queue;
        queue.add(&address(pool), Dial::Own { id, added });
        self.begin_dials(target);
    }

    fn begin_dials(&mut self, target: usize) {
        let (now, life) = (self.schedule.now(), self.targets[target].life);
        loop {
            let Some(dials) = self.processes.dials.get_mut(&target) else { return };
            let Some(next) = dials.queue.begin_next() else { return };
            match next {
                Dial::Own { id, added } => {
                    let connection = self.network.connections.get(&id);
                    let pool = connection.map_or(usize::MAX, |connection| connection.pool);
                    let is_over = connection.is_none_or(|connection| !connection.target_open);
                    dials.begun.insert(id, (pool, now));
                    self.observe(&Observation::DialBegins { target, pool, added, is_over });
                    let delay = self.network.delay() * 2;
                    self.schedule.after(delay, Event::Connecting { connection: id });
                }
                Dial::Neighbour { pool } => {
                    self.observe(&Observation::NeighbourDials { target, pool });
                    let is_hole = self.processes.holes.contains(&pool);
                    let takes = if is_hole { UNANSWERED } else { MILLISECOND };
                    let ended = ProcessEvent::NeighbourDialled { target, life, pool };
                    self.schedule.after(takes, Event::Process(ended));
                }
            }
        }
    }

    fn neighbour_dialled(&mut self, target: usize, life: u32, pool: usize) {
        if self.targets[target].life != life {
            return;
        }
        let is_hole = self.processes.holes.contains(&pool);
        self.ended_at(target, pool, !is_hole);
        if is_hole && let Some(dials) = self.processes.dials.get_mut(&target) {
            dials.queue.add(&address(pool), Dial::Neighbour { pool });
        }
        self.begin_dials(target);
    }

    fn ended_at(&mut self, target: usize, pool: usize, proven: bool) {
        let Some(dials) = self.processes.dials.get_mut(&target) else { return };
        dials.queue.ended(&address(pool), proven);
        self.observe(&Observation::DialEnded { target, pool });
    }

    /// A dial of this volume's came to its end.
    pub(super) fn dial_ended(&mut self, target: usize, id: ConnectionId, connected: bool) {
        let Some(dials) = self.processes.dials.get_mut(&target) else { return };
        let Some((pool, began)) = dials.begun.remove(&id) else { return };
        let took = std::time::Duration::from_nanos(self.schedule.now() - began);
        self.ended_at(target, pool, is_answered(connected, took));
        self.begin_dials(target);
    }

    /// A dial ended whose connection was given up meanwhile.
    pub(super) fn dial_forgotten(&mut self, id: ConnectionId) {
        let mut all = self.processes.dials.iter();
        let of = all.find(|(_, dials)| dials.begun.contains_key(&id)).map(|(target, _)| *target);
        if let Some(target) = of {
            self.dial_ended(target, id, false);
        }
    }

    /// Connections are given up; those whose turn has not come are not made.
    pub(super) fn give_up_dials(&mut self, target: usize, ids: &[ConnectionId]) {
        if let Some(dials) = self.processes.dials.get_mut(&target) {
            dials.queue.retain(|dial| !matches!(dial, Dial::Own { id, .. } if ids.contains(id)));
        }
    }
}
