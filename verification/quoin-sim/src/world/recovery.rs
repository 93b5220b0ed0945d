//! More replicas are destroyed than an open can do without, and a person goes on with those that
//! are left (`quoin volume recover`), while everything else goes on.
//!
//! The person does only what the product allows: all replicas that are left are there, the others
//! never answer again, no target serves that is seen, and every lease that a destroyed one
//! granted has run out ([`Membership::reduced_to`](quoin_types::Membership::reduced_to) is the
//! change itself). What is left then holds all that any of it held, and what was acknowledged and
//! is lost with the others may never come back: some time later they turn up, with what they held.

use quoin_cluster::Refusal;
use quoin_cluster::ownership::recovery::{Recovery as Asked, Seen, Word};
use quoin_replication::replica::granted_lease;
use quoin_types::{Epoch, Member, Position, ReplicaGuid};

use super::checkers::Observation;
use super::{Event, Mend, World};
use crate::control::{Record, View};
use crate::lineage::Path;
use crate::random::Random;
use crate::schedule::{MILLISECOND, SECOND};
use crate::storage::Outage;
use crate::swarm::Swarm;

/// How often the person checks.
const CHECK_EVERY: u64 = 300 * MILLISECOND;
/// Answers of the control plane come later than this never: what was destroyed may turn up.
const FORGOTTEN: u64 = 10 * SECOND;
/// Within that a target has seen that the volume is not its any more.
const CLOSES_WITHIN: u64 = 3 * SECOND;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Stage {
    #[default]
    Off,
    Whole,
    /// Before the blow, under this version of the record.
    Chosen(u64),
    /// Some are destroyed, and the volume is not whole without them.
    Lost,
    /// The person has decided under this version of the record, and waits leases out.
    Decided(u64),
    /// The volume does without those that were destroyed.
    Done,
    /// They have turned up.
    Over,
}

pub(crate) struct Recovery {
    random: Random,
    stage: Stage,
    /// Pools that were destroyed, as everybody thinks.
    away: Vec<usize>,
    forced: Option<Forced>,
    /// Members that were kept the last time.
    kept: Vec<Member>,
    /// When the person went on, and the version of the record since.
    at: u64,
    version: u64,
    /// Lives of targets that do not know yet that the volume was taken from them.
    to_end: Vec<(usize, u32)>,
}

/// A change that was forced and under which no target has served yet.
#[derive(Clone, Debug)]
pub(crate) struct Forced {
    after: Epoch,
    /// The lowest CF under which an older target may still serve.
    cf: usize,
    /// How far those that were kept were.
    kept: Vec<(usize, Position)>,
}

impl Recovery {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let random = Random::new(seed ^ 0x7265_636f_7665_7279);
        let stage = if swarm == Swarm::Recoveries { Stage::Whole } else { Stage::Off };
        Self {
            random,
            stage,
            away: Vec::new(),
            forced: None,
            kept: Vec::new(),
            at: 0,
            version: 0,
            to_end: Vec::new(),
        }
    }

    pub fn is_away(&self, pool: usize) -> bool {
        self.away.contains(&pool)
    }

    /// Nothing else is changed meanwhile.
    pub fn is_under_way(&self) -> bool {
        matches!(self.stage, Stage::Lost | Stage::Decided(_))
    }

    /// Notes that a pool may have lost what it held when a change was forced.
    pub fn cache_is_lost(&mut self, pool: usize) {
        if let Some(forced) = &mut self.forced {
            forced.kept.retain(|(kept, _)| *kept != pool);
        }
    }

    /// A pool that was kept starts again at this position. What it had appended as the change was forced, and
    /// not acknowledged, may have been in its memory alone; that it lost nothing of what it acknowledged is
    /// checked with its next answer.
    pub fn starts_at(&mut self, pool: usize, position: Position) {
        let kept = self.forced.iter_mut().flat_map(|forced| &mut forced.kept);
        for (_, at) in kept.filter(|(kept, _)| *kept == pool) {
            *at = position.min(*at);
        }
    }

    /// Returns true if this one may hold, and call stable, what was given up: it was not one of
    /// those that were kept, as a newcomer on its way in. It is damaged then, and copied anew.
    pub fn may_hold_what_is_lost(&self, member: Member) -> bool {
        !self.kept.is_empty() && !self.kept.contains(&member)
    }

    pub fn cf_before(&self) -> Option<usize> {
        self.forced.as_ref().map(|forced| forced.cf)
    }

    /// An epoch starts IO: the change that was forced before it, if it is the first since.
    pub fn takes_effect(&mut self, epoch: Epoch) -> Option<Forced> {
        self.forced.take_if(|forced| forced.after < epoch)
    }
}

impl World {
    pub(crate) fn plan_recovery(&mut self) {
        if self.operators.recovery.stage == Stage::Whole {
            let delay = self.operators.recovery.random.between(500, 8000) * MILLISECOND;
            self.schedule.after(delay / self.setup.haste, Event::Recovery);
        }
    }

    pub(crate) fn recovery(&mut self) {
        self.end_former_targets();
        self.give_volume_back();
        match self.operators.recovery.stage {
            Stage::Whole if !self.faults.over => self.choose_victims(),
            Stage::Chosen(version) => self.destroy_some(version),
            Stage::Lost => self.check_loss(),
            Stage::Decided(version) => self.force_change(version),
            Stage::Done => self.reappear(),
            Stage::Off | Stage::Whole | Stage::Over => {}
        }
    }

    fn check_later(&mut self) {
        self.schedule.after(CHECK_EVERY, Event::Recovery);
    }

    /// Chooses so many that those that are left are too few for an open, sometimes newcomers with
    /// them. Before they go, the network takes the owner from those that are left, but for one at
    /// most: what is acknowledged meanwhile is on few.
    fn choose_victims(&mut self) {
        let membership = &self.control.record.membership;
        let known = membership.known.len();
        let least = (known + 1).saturating_sub(membership.open_quorum());
        if known < 2 || least >= known {
            return self.check_later();
        }
        let mut pools: Vec<usize> = (0..self.pools.len())
            .filter(|p| membership.contains(self.pools[*p].member) && !self.pools[*p].gone)
            .collect();
        // One is left that stays, whichever changes come true meanwhile.
        let stays =
            |p: &usize| !self.control.record.desired.leaving.contains(&self.pools[*p].member);
        let staying: Vec<usize> = pools.iter().copied().filter(stays).collect();
        if staying.is_empty() || pools.len() < known {
            return self.check_later();
        }
        let left = *self.operators.recovery.random.pick(&staying);
        pools.retain(|pool| *pool != left);
        let count = self.operators.recovery.random.between(least as u64, known as u64 - 1);
        for _ in 0..count {
            let chosen = self.operators.recovery.random.index(pools.len());
            self.operators.recovery.away.push(pools.swap_remove(chosen));
        }
        // Not one that may have taken the place of a replica that is left.
        let known = &self.control.record.membership.known;
        let is_kept = |m: &Member| known.iter().any(|k| k.id == m.id && !self.is_destroyed(k));
        let newcomers = self.control.record.desired.newcomers.iter().map(|n| n.member);
        let newcomers: Vec<Member> = newcomers.filter(|m| !is_kept(m)).collect();
        for member in newcomers {
            let pool = self.pools.iter().position(|p| p.member == member && !p.gone);
            if let Some(pool) = pool.filter(|_| self.operators.recovery.random.percent(50)) {
                self.operators.recovery.away.push(pool);
            }
        }
        self.operators.recovery.stage = Stage::Chosen(self.control.record.membership.version);
        let lasts =
            self.operators.recovery.random.between(20, 900) * MILLISECOND / self.setup.haste;
        self.schedule.after(lasts, Event::Recovery);
        if self.operators.recovery.random.percent(40) {
            return;
        }
        self.burst();
        let host = self.targets[self.control.record.owner].host;
        let near = self.operators.recovery.random.percent(50).then_some(left);
        let unheard = self.operators.recovery.random.percent(60).then_some(self.control.host);
        let is_left = |p: &super::PoolHost| self.control.record.membership.contains(p.member);
        let far = (0..self.pools.len())
            .filter(|pool| is_left(&self.pools[*pool]) && !self.operators.recovery.is_away(*pool))
            .filter(|pool| Some(*pool) != near)
            .map(|pool| self.pools[pool].host);
        let cut = far.chain(unheard).flat_map(|other| [(host, other), (other, host)]);
        let cut: Vec<_> = cut.filter(|(a, b)| a != b).collect();
        cut.iter().for_each(|(from, to)| self.network.block(*from, *to));
        let mended = lasts + self.operators.recovery.random.between(100, 3000) * MILLISECOND;
        self.schedule.after(mended, Event::Mend(Mend::Unblock(cut)));
    }

    fn destroy_some(&mut self, version: u64) {
        let View { membership, desired, .. } = &*self.control.record;
        let stays = |m: &&Member| !self.is_destroyed(m) && !desired.leaving.contains(m);
        let none_stays = !membership.known.iter().any(|m| stays(&m));
        if membership.version != version || none_stays || self.faults.over {
            for pool in std::mem::take(&mut self.operators.recovery.away) {
                self.schedule.after(0, Event::StartPool { pool });
            }
            self.operators.recovery.stage = Stage::Whole;
            return self.check_later();
        }
        for pool in self.operators.recovery.away.clone() {
            self.kill_pool(pool, Outage::Process, 0);
        }
        if self.operators.recovery.random.percent(40) {
            // With what some of those that are left have, and others were yet to be sent.
            self.kill_target(self.control.record.owner);
        }
        let away = &self.operators.recovery.away;
        self.trace.line(self.schedule.now(), || format!("*** pools {away:?} are destroyed"));
        self.operators.recovery.stage = Stage::Lost;
        self.check_later();
    }

    fn is_destroyed(&self, member: &Member) -> bool {
        self.operators.recovery.away.iter().any(|pool| self.pools[*pool].member == *member)
    }

    /// The owner's target, where its reports reach the controller.
    fn reachable_target(&self) -> Option<&super::targets::Process> {
        let there = &self.targets[self.control.record.owner];
        let heard = !self.network.is_blocked(there.host, self.control.host) && !there.paused;
        there.process.as_ref().filter(|_| heard)
    }

    fn is_reported_serving(&self) -> bool {
        let serves = |status: quoin_replication::primary::PrimaryStatus| {
            status.serving && status.waiting.is_empty() && status.epoch == self.control.record.epoch
        };
        self.reachable_target().is_some_and(|process| serves(process.target.status()))
    }

    /// The volume is taken from its node first; only then a target opens it anew.
    fn end_former_targets(&mut self) {
        for (target, life) in std::mem::take(&mut self.operators.recovery.to_end) {
            let there = &self.targets[target];
            let hears = !self.network.is_blocked(self.control.host, there.host) && !there.paused;
            if there.life == life && hears {
                self.kill_target(target);
            } else if there.life == life {
                self.operators.recovery.to_end.push((target, life));
            }
        }
    }

    /// The volume was taken from its target, which has seen that by now.
    fn give_volume_back(&mut self) {
        let is_due = self.now() >= self.operators.recovery.at + CLOSES_WITHIN / self.setup.haste;
        if is_due && self.control.record.volume().opened.owner.is_none() {
            self.control.record.give_back();
            self.schedule.after(0, Event::StartTarget { target: self.control.record.owner });
        }
    }

    fn check_loss(&mut self) {
        let known = &self.control.record.membership.known;
        let lost: Vec<Member> = known.iter().filter(|m| self.is_destroyed(m)).copied().collect();
        let newcomers = self.control.record.desired.newcomers.iter().map(|n| n.member);
        let not_coming: Vec<Member> = newcomers.filter(|m| self.is_destroyed(m)).collect();
        let serves = self.is_reported_serving();
        if serves && lost.is_empty() && not_coming.is_empty() {
            self.operators.recovery.stage = Stage::Done;
        } else if serves {
            // Nothing has to be given up: they are taken off the list with the volume in use.
            self.remove_destroyed(&lost, &not_coming);
        } else if self.may_force() {
            self.operators.recovery.stage = Stage::Decided(self.control.record.membership.version);
            let lease = granted_lease(self.setup.config.lease_ms).as_nanos() as u64;
            self.schedule.after(lease * 10 / 7, Event::Recovery);
            return;
        }
        self.check_later();
    }

    fn remove_destroyed(&mut self, lost: &[Member], not_coming: &[Member]) {
        for member in not_coming {
            self.forget_newcomer(*member);
        }
        let View { membership, desired, .. } = &*self.control.record;
        let followed = |m: &&Member| desired.newcomers.iter().any(|n| n.member.id == m.id);
        let leaving: Vec<Member> = lost.iter().filter(|m| !followed(m)).copied().collect();
        let is_listed = |m: &Member| membership.known.iter().any(|k| k.id == m.id);
        let added = desired.newcomers.iter().filter(|n| !is_listed(&n.member)).count();
        let drf = (membership.known.len() - leaving.len() + added) as u8;
        self.control.record.edit(|volume| {
            volume.membership.drf = drf;
            for replica in &mut volume.replicas {
                replica.leaving = leaving.contains(&replica.member());
            }
        });
        self.send_desired();
    }

    /// Members for whom the owner's target waits, since they may know of a change that the record
    /// lacks.
    fn silent(&self) -> Vec<Member> {
        let status = self.reachable_target().map(|process| process.target.status());
        let here = status.filter(|status| status.epoch == self.control.record.epoch);
        here.map(|status| status.silent).unwrap_or_default()
    }

    /// Request of a person, who knows which replicas are destroyed.
    fn asked_to_recover(&self) -> Asked {
        let known = &self.control.record.membership.known;
        let (lost, kept): (Vec<&Member>, Vec<&Member>) =
            known.iter().partition(|m| self.is_destroyed(m));
        let ids = |members: Vec<&Member>| members.into_iter().map(|m| m.id).collect();
        Asked {
            keep: ids(kept),
            destroyed: ids(lost),
            accept_loss_of: self.control.record.volume().spec.name.clone(),
        }
    }

    /// A pool's word on a replica, where it runs.
    fn word(&self, guid: ReplicaGuid) -> Option<Word> {
        let there = self.pools.iter().find(|p| p.member.guid == guid && p.process.is_some())?;
        Some(match (there.gone, there.rolled_back == Some(guid)) {
            (true, _) => Word::Gone,
            (false, true) => Word::RolledBack,
            (false, false) => Word::Present,
        })
    }

    /// Has the controller go on with what is left, or only asks whether it would.
    fn force(&self, record: &mut Record) -> Result<(), Refusal> {
        let silent: Vec<ReplicaGuid> = self.silent().into_iter().map(|m| m.guid).collect();
        let seen = Seen {
            serves: self.is_reported_serving(),
            silent: &silent,
            word: &|_, guid| self.word(guid),
            further: &String::new,
        };
        record.recover(&self.asked_to_recover(), &seen)
    }

    fn may_force(&self) -> bool {
        self.force(&mut self.control.record.clone()).is_ok()
    }

    fn force_change(&mut self, version: u64) {
        self.operators.recovery.stage = Stage::Lost;
        let mut record = self.control.record.clone();
        if record.membership.version != version || self.force(&mut record).is_err() {
            return self.check_later();
        }
        let before = self.control.record.membership.clone();
        let next = record.membership.clone();
        let mut kept = Vec::new();
        for member in &next.known {
            let Some(pool) = self.pools.iter().position(|p| p.member == *member) else { continue };
            self.pools[pool].storage.with(member.guid, &mut |store| {
                kept.push((pool, store.state().position));
            });
        }
        self.control.record = record;
        let (retired, epoch) = (&next.retired[..], self.control.record.epoch);
        self.observe(&Observation::RecordForced { retired, epoch });
        self.desire_what_is_left();
        self.trace.line(self.schedule.now(), || format!("a person goes on with {next:?}"));
        self.operators.recovery.kept = next.known.clone();
        let cf = self.operators.recovery.cf_before().unwrap_or(usize::MAX).min(before.cf.into());
        self.operators.recovery.forced =
            Some(Forced { after: self.control.record.epoch, cf, kept: kept.clone() });
        self.operators.recovery.at = self.schedule.now();
        self.operators.recovery.version = self.control.record.membership.version;
        self.stats.operators.recoveries += 1;
        self.operators.recovery.to_end =
            (0..).zip(self.targets.iter().map(|target| target.life)).collect();
        if self.operators.recovery.random.percent(50) {
            self.failover();
        }
        // No sooner is it decided than one of them is away for a while.
        if !kept.is_empty() && self.operators.recovery.random.percent(60) {
            let (pool, _) = *self.operators.recovery.random.pick(&kept);
            let restart = self.operators.recovery.random.between(1000, 4000) * MILLISECOND;
            self.kill_pool(pool, Outage::Process, restart);
        }
        self.send_desired();
        self.check_later();
    }

    /// Operators ask for the replicas that are there or come, and for no other.
    fn desire_what_is_left(&mut self) {
        let View { membership, desired, .. } = &*self.control.record;
        let newcomers = desired.newcomers.iter().map(|n| n.member);
        let (lost, come): (Vec<Member>, Vec<Member>) =
            newcomers.partition(|m| self.is_destroyed(m));
        let known = membership.known.clone();
        let is_listed = |m: &Member| known.iter().any(|k| k.id == m.id);
        let added = come.iter().filter(|m| !is_listed(m)).count();
        let leaving = desired.leaving.len() % known.len();
        self.control.record.edit(|volume| {
            volume.replicas.retain(|replica| !lost.contains(&replica.member()));
            if leaving == 0 {
                volume.replicas.iter_mut().for_each(|replica| replica.leaving = false);
            }
            volume.membership.drf = (known.len() - leaving + added) as u8;
        });
    }

    /// Returns the histories that the kept replicas held then; the first epoch after the change starts
    /// IO on a history with all of them.
    pub(crate) fn held_by_kept(&self, forced: &Forced) -> Vec<Path> {
        forced.kept.iter().filter_map(|(_, at)| self.checkers.lineage.path_at(*at)).collect()
    }

    /// No target knows the old list any more: even those that were declared destroyed may turn up.
    fn reappear(&mut self) {
        let version = self.operators.recovery.version;
        let knows = |t: &super::TargetHost| {
            t.process.as_ref().is_none_or(|p| p.grant.membership.version >= version)
        };
        if self.now() < self.operators.recovery.at + FORGOTTEN || !self.targets.iter().all(knows) {
            return self.check_later();
        }
        self.operators.recovery.stage = Stage::Over;
        for pool in std::mem::take(&mut self.operators.recovery.away) {
            self.trace.line(self.schedule.now(), || format!("pool {pool} turns up"));
            self.schedule.after(0, Event::StartPool { pool });
        }
    }
}
