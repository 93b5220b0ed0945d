//! Faults are injected, and those that last are mended.

use quoin_replication::Step;
use quoin_replication::primary::PrimaryEvent;
use quoin_types::Member;

use super::{Event, Mend, Mutant, World};
use crate::clock::RATE_EXACT;
use crate::disk::{Failing, Lie};
use crate::faults::{FaultKind, Planned, Profile};
use crate::network::ConnectionId;
use crate::schedule::{MILLISECOND, SECOND};
use crate::storage::Outage;

/// Events for which an aimed fault waits for its step.
const AIM_PATIENCE: u64 = 8000;

#[derive(Default)]
pub(crate) struct Faults {
    /// Each with the event number at which it is injected at the latest.
    armed: Vec<(u64, Planned)>,
    /// No more faults from here on.
    pub over: bool,
}

impl Faults {
    pub fn is_any_armed(&self) -> bool {
        !self.armed.is_empty()
    }

    pub fn end(&mut self) {
        self.over = true;
        self.armed.clear();
    }
}

impl World {
    /// The fault's time has come: requests begin to pour in, and some events later it is injected.
    pub(crate) fn arm(&mut self, planned: Planned) {
        if self.faults.over {
            return;
        }
        if self.random.percent(80) {
            self.burst();
        }
        if planned.kind == FaultKind::DiskRolledBack {
            let pool = self.victim();
            self.pools[pool].storage.keep_image();
        }
        let patience = if planned.aim.is_some() { AIM_PATIENCE } else { 0 };
        self.faults.armed.push((self.stats.events + planned.countdown + patience, planned));
    }

    pub(crate) fn count_down(&mut self) {
        let events = self.stats.events;
        // A check at every event would cost more than the event.
        let steps =
            if events.is_multiple_of(3) && self.faults.armed.iter().any(|a| a.1.aim.is_some()) {
                self.steps_now()
            } else {
                Vec::new()
            };
        let due = |(at, planned): &(u64, Planned)| {
            *at <= events || planned.aim.is_some_and(|aim| steps.contains(&aim))
        };
        while let Some(index) = self.faults.armed.iter().position(due) {
            let (_, planned) = self.faults.armed.swap_remove(index);
            let steps = self.steps_now();
            // Each fault has its own chance: one that is left out does not change the others.
            let own = crate::random::Random::new(planned.seed);
            let shared = std::mem::replace(&mut self.random, own);
            let injected = self.inject(planned.kind);
            self.random = shared;
            if injected {
                self.stats.faults.add(planned.kind);
                for step in steps {
                    self.stats.coverage.add(planned.kind, step);
                }
                let name = planned.kind.name();
                self.trace.line(self.schedule.now(), || format!("*** {name}"));
            }
        }
    }

    /// Returns the steps that targets and replicas are in the middle of.
    fn steps_now(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        for target in &self.targets {
            if let Some(process) = &target.process {
                steps.extend(process.target.steps());
            }
        }
        for pool in &mut self.pools {
            if let Some(process) = &pool.process {
                let guid = pool.member.guid;
                pool.storage.with(guid, &mut |store| steps.extend(process.steps(&*store)));
            }
        }
        steps.sort_unstable();
        steps.dedup();
        steps
    }

    pub(super) fn lasting(&mut self, longest_ms: u64, mend: Mend) {
        let typical = self.random.between(20, longest_ms / 3);
        let lasts = if self.random.percent(30) { longest_ms } else { typical };
        self.schedule.after(lasts * MILLISECOND / self.setup.haste, Event::Mend(mend));
    }

    /// A pool whose disk or data this profile may hurt.
    pub(super) fn victim(&mut self) -> usize {
        match self.setup.profile {
            Profile::Media { victim } | Profile::Liar { victim } => victim,
            Profile::Power => self.random.index(self.pools.len()),
        }
    }

    pub(super) fn a_target(&mut self) -> usize {
        let alive: Vec<usize> =
            (0..self.targets.len()).filter(|t| self.targets[*t].process.is_some()).collect();
        if alive.is_empty() { self.control.record.owner } else { *self.random.pick(&alive) }
    }

    /// False if there was nothing to hit.
    fn inject(&mut self, kind: FaultKind) -> bool {
        match kind {
            FaultKind::TargetCrash => {
                let target = self.a_target();
                let alive = self.targets[target].process.is_some();
                self.kill_target(target);
                alive
            }
            FaultKind::ReplicaCrash => {
                // Where a disk lies, the others must be there to say so.
                let lies = matches!(self.setup.profile, Profile::Liar { .. });
                let any = self.random.index(self.pools.len());
                let pool = if lies { self.victim() } else { any };
                let alive = self.pools[pool].process.is_some();
                let restart = self.random.between(20, 6000) * MILLISECOND / self.setup.haste;
                if alive {
                    self.kill_pool(pool, Outage::Process, restart);
                }
                alive
            }
            FaultKind::PowerOne => {
                let pool = self.victim();
                self.power_cut(&[pool]);
                true
            }
            FaultKind::PowerSome => {
                let mut pools: Vec<usize> = (0..self.pools.len()).collect();
                pools.retain(|_| self.random.percent(60));
                self.power_cut(&pools);
                !pools.is_empty()
            }
            FaultKind::PowerAll if !self.one_more_loss_is_promised() => false,
            FaultKind::PowerAll => {
                let pools: Vec<usize> = (0..self.pools.len()).collect();
                self.power_cut(&pools);
                true
            }
            FaultKind::PowerAllFull => self.power_cut_and_full(),
            FaultKind::Partition | FaultKind::PartitionOneWay => {
                self.partition(kind == FaultKind::PartitionOneWay)
            }
            FaultKind::DelayStorm => {
                self.network.storm = self.random.between(3, 60);
                self.lasting(4000, Mend::Storm);
                true
            }
            FaultKind::ConnectionCut => self.cut_some(),
            FaultKind::BulkCut => self.cut_bulk(),
            FaultKind::BulkSlow => self.slow_bulk(),
            FaultKind::ClockDrift => {
                let host = self.random.index(self.hosts.clocks.len());
                let rate = self.random.between(976_000, 1_024_000);
                self.set_clock_rate(host, rate);
                true
            }
            FaultKind::ClockJump => self.jump_clock(),
            FaultKind::ClockStop => {
                let target = self.a_target();
                let host = self.targets[target].host;
                self.set_clock_rate(host, 0);
                self.lasting(6000, Mend::Clock(host));
                if self.setup.mutant == Some(Mutant::ClocksStop) {
                    self.stale_answers_for(host);
                }
                true
            }
            FaultKind::TargetPause => {
                let target = self.a_target();
                if self.targets[target].process.is_none() || self.targets[target].paused {
                    return false;
                }
                self.targets[target].paused = true;
                self.lasting(8000, Mend::ResumeTarget(target));
                true
            }
            FaultKind::ReplicaPause => {
                let pool = self.random.index(self.pools.len());
                if self.pools[pool].process.is_none() || self.pools[pool].paused {
                    return false;
                }
                self.pools[pool].paused = true;
                self.lasting(8000, Mend::ResumePool(pool));
                true
            }
            FaultKind::SlowDisk => {
                let pool = self.random.index(self.pools.len());
                self.pools[pool].slow = self.random.between(10, 500);
                self.lasting(5000, Mend::Disk(pool));
                true
            }
            FaultKind::StuckDisk => {
                let pool = self.random.index(self.pools.len());
                self.pools[pool].stuck = true;
                self.lasting(9000, Mend::Disk(pool));
                true
            }
            FaultKind::LostWrite | FaultKind::MisdirectedWrite => {
                let pool = self.victim();
                let lost = kind == FaultKind::LostWrite;
                self.pools[pool].reads_failed = true;
                self.pools[pool].hurt = true;
                self.pools[pool].storage.lie(if lost { Lie::Lost } else { Lie::Misdirected })
            }
            FaultKind::DiskRolledBack => self.roll_back_disk(),
            FaultKind::ControlRolledBack => self.roll_back_control(),
            FaultKind::SpoiledFrame => {
                let ids: Vec<ConnectionId> = self.network.connections.keys().copied().collect();
                ids.into_iter().any(|id| self.network.spoil(id))
            }
            FaultKind::Operator => self.operator(),
            FaultKind::DiskWriteError | FaultKind::DiskReadError | FaultKind::DiskSyncError => {
                let pool = self.victim();
                let failing = Failing {
                    writes: kind == FaultKind::DiskWriteError,
                    reads: kind == FaultKind::DiskReadError,
                    syncs: kind == FaultKind::DiskSyncError,
                };
                if kind == FaultKind::DiskReadError {
                    self.pools[pool].reads_failed = true;
                } else {
                    self.pools[pool].cache_lost = true;
                }
                self.pools[pool].storage.set_failing(failing);
                self.lasting(1500, Mend::Disk(pool));
                true
            }
            FaultKind::Rot => {
                let pool = self.victim();
                let guid = self.pools[pool].member.guid;
                self.pools[pool].hurt = true;
                let times = self.random.between(1, 6);
                (0..times).filter(|_| self.pools[pool].storage.rot(guid, &mut self.random)).count()
                    > 0
            }
            FaultKind::FullPool => {
                let pool = self.random.index(self.pools.len());
                self.set_full(pool, true);
                self.lasting(4000, Mend::Disk(pool));
                true
            }
            FaultKind::Failover => self.failover(),
            FaultKind::OwnerIsolated => self.isolate_owner(),
            FaultKind::ControlLost => {
                self.control.lossy = true;
                self.lasting(8000, Mend::ControlPlane);
                true
            }
            FaultKind::ControlLate => {
                self.control.late = true;
                self.lasting(8000, Mend::ControlPlane);
                true
            }
            FaultKind::Wipe => self.wipe(),
            FaultKind::PoolStalls
            | FaultKind::TargetStalls
            | FaultKind::BlackHole
            | FaultKind::ReadErrorsApart
            | FaultKind::OrderForAnother => self.inject_in_process(kind),
            FaultKind::TargetShutdown => {
                let target = self.a_target();
                self.stop_target(target)
            }
            FaultKind::ReplicaShutdown => {
                let pool = self.random.index(self.pools.len());
                if self.pools[pool].process.is_none() || self.pools[pool].paused {
                    return false;
                }
                let restart = self.random.between(20, 3000) * MILLISECOND;
                let (then_power, all) = (self.random.percent(50), self.random.percent(30));
                if !all {
                    self.stop_pool(pool, restart, then_power);
                    return true;
                }
                // A whole machine room is shut down, each part as it is ordered to.
                for target in 0..self.targets.len() {
                    self.stop_target(target);
                }
                for pool in 0..self.pools.len() {
                    if self.pools[pool].process.is_some() && !self.pools[pool].paused {
                        self.stop_pool(pool, restart, then_power);
                    }
                }
                true
            }
        }
    }

    /// A target process ends as people end it.
    fn stop_target(&mut self, target: usize) -> bool {
        let there = &self.targets[target];
        if there.process.is_none() || there.paused {
            return false;
        }
        let life = there.life;
        self.feed_target(target, vec![PrimaryEvent::Shutdown]);
        // A supervisor waits some seconds and then kills.
        self.lasting(9000, Mend::KillTarget { target, life });
        true
    }

    /// These pools' hosts lose their power, with whatever else runs there.
    pub(super) fn power_cut(&mut self, pools: &[usize]) {
        for pool in pools {
            let host = self.pools[*pool].host;
            self.hosts.powered[host] = false;
            let off = self.random.between(50, 4000) * MILLISECOND / self.setup.haste;
            self.kill_pool(*pool, Outage::Power, off);
            for target in 0..self.targets.len() {
                if self.targets[target].host == host {
                    self.kill_target(target);
                    self.schedule.after(off + SECOND, Event::StartTarget { target });
                }
            }
            self.schedule.after(off.saturating_sub(1), Event::Mend(Mend::Clock(host)));
        }
    }

    /// All pools lose their power, and other volumes have taken their room when they are back.
    /// Meanwhile the owner changes and changes back: the target that lives opens again, and what it
    /// had acknowledged is in its memory alone.
    fn power_cut_and_full(&mut self) -> bool {
        let pools: Vec<usize> = (0..self.pools.len()).collect();
        self.power_cut(&pools);
        for pool in pools {
            self.set_full(pool, true);
            self.lasting(40_000, Mend::Disk(pool));
        }
        self.failover();
        let (back, seed) = (self.random.between(100, 1500) * MILLISECOND, self.random.draw());
        let kind = FaultKind::Failover;
        let again = Planned { at: 0, kind, countdown: 0, aim: None, seed };
        self.schedule.after(back, Event::Fault(again));
        true
    }

    fn partition(&mut self, one_way: bool) -> bool {
        let hosts = self.hosts.clocks.len();
        let alone = self.random.index(hosts);
        let others: Vec<usize> = if self.random.percent(50) {
            (0..hosts).filter(|h| *h != alone).collect()
        } else {
            let other = self.random.index(hosts);
            vec![other].into_iter().filter(|h| *h != alone).collect()
        };
        let mut blocked = Vec::new();
        let outward = self.random.percent(50);
        for other in others {
            if !one_way || outward {
                blocked.push((alone, other));
            }
            if !one_way || !outward {
                blocked.push((other, alone));
            }
        }
        for (from, to) in &blocked {
            self.network.block(*from, *to);
        }
        // Some connections do not outlive it: an end gives up before the network is whole again.
        for id in self.connections_across(&blocked) {
            if self.random.percent(50) {
                let after = self.random.between(200, 6000) * MILLISECOND;
                self.schedule.after(after, Event::Mend(Mend::Cut(id)));
            }
        }
        let any = !blocked.is_empty();
        self.lasting(9000, Mend::Unblock(blocked));
        any
    }

    pub(super) fn connections_across(&self, blocked: &[(usize, usize)]) -> Vec<ConnectionId> {
        self.network
            .connections
            .iter()
            .filter(|(_, c)| c.established)
            .filter(|(_, c)| {
                let (a, b) = (self.targets[c.target].host, self.pools[c.pool].host);
                blocked.contains(&(a, b)) || blocked.contains(&(b, a))
            })
            .map(|(id, _)| *id)
            .collect()
    }

    fn cut_some(&mut self) -> bool {
        let ids: Vec<ConnectionId> = self
            .network
            .connections
            .iter()
            .filter(|(_, c)| c.established && c.target_open)
            .map(|(id, _)| *id)
            .collect();
        if ids.is_empty() {
            return false;
        }
        let all = self.random.percent(25);
        let chosen = *self.random.pick(&ids);
        for id in ids.into_iter().filter(|id| all || *id == chosen) {
            self.cut(id);
        }
        true
    }

    /// A tail of what is under way is lost, and each end learns of it in its own time.
    pub(super) fn cut(&mut self, id: ConnectionId) {
        self.network.lose_tail(id);
        let Some(connection) = self.network.connections.get_mut(&id) else { return };
        connection.to_pool.deaf = true;
        connection.to_target.deaf = true;
        // Bytes that were not lost arrive before the end does.
        let due = connection.to_pool.next_due().max(connection.to_target.next_due());
        let due = due.unwrap_or(0).max(self.schedule.now());
        let spread = if self.random.percent(60) { MILLISECOND } else { 3 * SECOND };
        let a = self.random.below(spread);
        let b = self.random.below(spread);
        self.schedule.at(due + a, Event::TargetEndLost { connection: id });
        self.schedule.at(due + b, Event::PoolEndLost { connection: id });
    }

    /// The controller gives the volume to the other host; the old target still runs, and some of
    /// its clients still use it.
    pub(super) fn failover(&mut self) -> bool {
        let old = self.control.record.owner;
        let new = 1 - old;
        if self.control.fences.refuses(new) {
            return false;
        }
        self.recover_elsewhere();
        self.give_volume_to(new);
        self.trace.line(self.schedule.now(), || format!("target {new} is to own the volume"));
        let delay = self.random.between(1, 500) * MILLISECOND;
        self.schedule.after(delay, Event::StartTarget { target: new });
        for queue in 0..self.clients.queues.len() {
            let delay = self.random.between(0, 4000) * MILLISECOND / self.setup.haste;
            self.schedule.after(delay, Event::MoveClient { queue });
        }
        let life = self.targets[old].life;
        if self.setup.haste > 1 && self.random.percent(35) {
            // And back to the first, which may live and have requests of its own waiting.
            let back = self.random.between(100, 2500) * MILLISECOND;
            let seed = self.random.draw();
            let kind = FaultKind::Failover;
            let again = Planned { at: 0, kind, countdown: 0, aim: None, seed };
            self.schedule.after(back, Event::Fault(again));
        } else if self.random.percent(60) {
            self.lasting(9000, Mend::KillTarget { target: old, life });
        }
        true
    }

    /// Nothing that the owner sends arrives, or nothing reaches it, and the volume goes to the other host.
    pub(super) fn isolate_owner(&mut self) -> bool {
        let host = self.targets[self.control.record.owner].host;
        let (outward, inward) = *self.random.pick(&[(true, true), (true, false), (false, true)]);
        let mut blocked = Vec::new();
        for other in (0..self.hosts.clocks.len()).filter(|h| *h != host) {
            blocked.extend(outward.then_some((host, other)));
            blocked.extend(inward.then_some((other, host)));
        }
        for (from, to) in &blocked {
            self.network.block(*from, *to);
        }
        self.lasting(9000, Mend::Unblock(blocked));
        self.failover()
    }

    /// Where data has been lost with a disk, the power may fail everywhere only once all replicas
    /// are in sync again: the contract covers CF-1 failure domains. The target may count one whose
    /// disk is lost until a View without it is active.
    fn one_more_loss_is_promised(&self) -> bool {
        let process = self.targets[self.control.record.owner].process.as_ref();
        let in_sync = process.map_or(0, |p| p.in_sync.len());
        let known = &self.control.record.membership.known;
        let is_there = |member: &Member| {
            let holds = |p: &&super::PoolHost| p.member == *member && !p.gone;
            self.pools.iter().find(holds).is_some_and(|p| p.rolled_back.is_none())
        };
        let is_whole = in_sync == known.len() && known.iter().all(is_there);
        self.setup.profile == Profile::Power || is_whole
    }

    /// The control plane is restored from an old copy, and some time later a person puts the
    /// newest one back, with whatever epoch was granted since.
    fn roll_back_control(&mut self) -> bool {
        if self.control.backup.is_some() {
            return false;
        }
        let Some(old) = self.control.old_record.take() else { return false };
        self.control.rolled_back = true;
        self.control.backup = Some(self.control.record.clone());
        let owner = self.control.record.owner;
        self.control.record = old.owned_by(owner);
        self.lasting(8000, Mend::ControlRecord);
        true
    }

    /// Whatever can be asked for again is asked for again.
    fn operator(&mut self) -> bool {
        for _ in 0..self.random.between(2, 6) {
            let delay = self.random.between(0, 2000) * MILLISECOND;
            let pool = self.random.index(self.pools.len());
            let target = self.random.index(self.targets.len());
            let event = match self.random.below(5) {
                0 => Event::StartTarget { target },
                1 => Event::StartPool { pool },
                2 => Event::Recreate { pool },
                3 => Event::SendDesired,
                _ => Event::MoveClient { queue: self.random.index(self.clients.queues.len()) },
            };
            self.schedule.after(delay, event);
        }
        let owner = self.control.record.owner;
        let alive = self.targets[owner].process.is_some() && !self.targets[owner].paused;
        if alive {
            // An old list of replacements, and a size that the volume has had for long.
            let blocks = self.setup.volume_blocks;
            let mut desired = self.control.record.desired.clone();
            let membership = &self.control.record.membership;
            for (known, guid) in membership.known.iter().zip(&membership.retired) {
                let member = quoin_types::Member { id: known.id, guid: *guid };
                desired.newcomers.push(quoin_types::Newcomer { member, beside: false });
            }
            let events = vec![PrimaryEvent::Resize { blocks }, PrimaryEvent::Desired(desired)];
            self.feed_target(owner, events);
        }
        true
    }

    pub(crate) fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Unblock(blocked) => {
                for (from, to) in blocked {
                    self.network.unblock(from, to);
                }
                self.redeliver();
            }
            Mend::Storm => self.network.storm = 1,
            Mend::ResumeTarget(target) => {
                self.targets[target].paused = false;
                self.stalled_round_ends(target);
                self.plan_target_timer(target);
                self.redeliver();
            }
            Mend::ResumePool(pool) => {
                self.pools[pool].paused = false;
                self.round_goes_on(pool);
                self.plan_pool_timer(pool);
                self.redeliver();
            }
            Mend::Disk(pool) => {
                self.pools[pool].storage.set_failing(Failing::default());
                self.pools[pool].slow = 1;
                self.pools[pool].stuck = false;
                self.set_full(pool, false);
            }
            Mend::ControlRecord => self.restore_record(),
            Mend::Clock(host) => {
                self.hosts.powered[host] = true;
                let rate = self.random.between(RATE_EXACT - 20_000, RATE_EXACT + 20_000);
                self.set_clock_rate(host, rate);
            }
            Mend::ControlPlane => {
                self.control.lossy = false;
                self.control.late = false;
            }
            Mend::KillTarget { target, life } => {
                if self.targets[target].life == life {
                    self.kill_target(target);
                }
            }
            Mend::KillPool { pool, life } => {
                if self.pools[pool].life == life {
                    self.kill_pool(pool, Outage::Process, 20 * MILLISECOND);
                }
            }
            Mend::BulkStorm => self.network.bulk_storm = 1,
            Mend::Cut(id) => self.cut(id),
        }
    }

    /// The newest copy of the record is back. What the old one granted meanwhile stays granted.
    fn restore_record(&mut self) {
        let Some(newest) = self.control.backup.take() else { return };
        let newest = newest.owned_by(self.control.record.owner);
        let meanwhile = std::mem::replace(&mut self.control.record, newest);
        let epoch = meanwhile.epoch.0;
        self.control.record.edit(|volume| volume.opened.epoch = volume.opened.epoch.max(epoch));
        if meanwhile.membership.version > self.control.record.membership.version {
            self.control.record.set_membership(&meanwhile.membership);
        }
        let known = self.control.record.membership.known.clone();
        for newcomer in &meanwhile.desired.newcomers {
            // Replicas that pools have made meanwhile for those that they lost.
            let member = newcomer.member;
            let desired = &self.control.record.desired;
            let needed = known.iter().any(|m| m.id == member.id)
                || desired.newcomers.iter().any(|n| n.member.id == member.id);
            let pool = self.pools.iter().position(|p| p.member == member);
            if needed && pool.is_some() && desired.newcomer(member).is_none() {
                self.control.record.name(member, pool);
            }
        }
        let held = |m| self.pools.iter().any(|p| p.member == m);
        self.control.record.edit(|volume| {
            let retired = volume.membership.retired.clone();
            volume.replicas.retain(|replica| {
                // An old copy names some that have been and gone.
                known.contains(&replica.member())
                    || (held(replica.member()) && !retired.contains(&replica.guid))
            });
        });
        self.send_desired();
    }

    /// Messages that waited for a network or a process are looked at again.
    fn redeliver(&mut self) {
        let ids: Vec<ConnectionId> = self.network.connections.keys().copied().collect();
        for connection in ids {
            let delay = self.random.below(MILLISECOND);
            self.schedule.after(delay, Event::ToPool { connection });
            self.schedule.after(delay, Event::ToTarget { connection });
        }
    }

    /// Everything is whole again; what is down comes back by itself.
    pub(crate) fn mend_all(&mut self) {
        self.network.unblock_all();
        self.spread_term();
        self.restore_record();
        self.control.lossy = false;
        self.control.late = false;
        self.end_network_fences();
        for host in 0..self.hosts.clocks.len() {
            self.hosts.powered[host] = true;
            self.set_clock_rate(host, RATE_EXACT);
        }
        for pool in 0..self.pools.len() {
            let there = &mut self.pools[pool];
            there.storage.set_failing(Failing::default());
            there.slow = 1;
            there.stuck = false;
            there.paused = false;
            self.round_goes_on(pool);
            self.set_full(pool, false);
            self.plan_pool_timer(pool);
            let delay = self.random.below(SECOND);
            self.schedule.after(delay, Event::StartPool { pool });
            self.schedule.after(delay, Event::Recreate { pool });
        }
        for target in 0..self.targets.len() {
            self.targets[target].paused = false;
            self.stalled_round_ends(target);
            self.plan_target_timer(target);
            let delay = self.random.below(SECOND);
            self.schedule.after(delay, Event::StartTarget { target });
        }
        for queue in 0..self.clients.queues.len() {
            self.move_client(queue);
        }
        self.redeliver();
    }
}
