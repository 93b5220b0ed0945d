//! Operators who change the membership: scale up (one replica or several at once), move, remove,
//! change CF, take back what is on its way, in the middle of everything else and sometimes one on
//! top of the other.
//!
//! A broad run has them or not by a chance of its own, so that runs without them stay what they
//! were; of the swarms one has them always, the others never.
//! They ask for what the contract can promise: where a replica's data may be lost, never for a
//! membership that a loss would stop for good. When faults are over everything that was asked for
//! has to come true.

use quoin_replication::replica::Replica;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_types::{Member, Newcomer, ReplicaGuid, ReplicaId};

use super::checkers::Observation;
use super::unexpected_peers::UnexpectedPeers;
use super::{Event, PoolHost, World};
use crate::control::View;
use crate::faults::Profile;
use crate::random::Random;
use crate::schedule::{MILLISECOND, SECOND};
use crate::storage::Outage;
use crate::swarm::Swarm;

/// Of a hundred runs so many have operators who change the membership.
const RUNS_OF_HUNDRED: u64 = 30;
/// Pools without a replica at the start of such a run.
const SPARE_POOLS: usize = 2;
/// Of an operator's turns so many are spent on taking a newcomer back, where there is one.
const TAKEN_BACK_PERCENT: u64 = 15;
/// Replicas of a volume at most.
pub(super) const RF_MAX: u8 = 5;

pub(crate) struct Members {
    pub(super) random: Random,
    pub on: bool,
    is_sending: bool,
    pub unexpected: UnexpectedPeers,
}

impl Members {
    pub fn draw(seed: u64, swarm: Swarm, profile: Profile) -> Self {
        let mut random = Random::new(seed ^ 0x6d65_6d62_6572_7368);
        let lies = matches!(profile, Profile::Liar { .. });
        let drawn = random.percent(RUNS_OF_HUNDRED);
        let always = matches!(
            swarm,
            Swarm::Members | Swarm::UnexpectedPeers | Swarm::Recoveries | Swarm::ManyVolumes
        );
        let on = !lies && (always || (swarm == Swarm::Broad && drawn));
        let unexpected = UnexpectedPeers::draw(swarm, &mut random);
        Self { random, on, is_sending: false, unexpected }
    }

    pub fn spare_pools(&self) -> usize {
        match (self.on, self.unexpected.on) {
            (false, _) => 0,
            (true, false) => SPARE_POOLS,
            (true, true) => 2 * SPARE_POOLS,
        }
    }
}

impl PoolHost {
    /// It holds no replica and is to make none.
    pub(crate) fn is_spare(&self) -> bool {
        self.member == Member::default()
    }
}

impl World {
    pub(crate) fn plan_operators(&mut self) {
        if self.operators.members.on {
            let delay = self.operators.members.random.between(500, 6000) * MILLISECOND;
            self.schedule.after(delay / self.setup.haste, Event::Operate);
        }
    }

    /// The controller sends what is desired to the owner's target until it is so.
    pub(crate) fn send_desired(&mut self) {
        let owner = self.control.record.owner;
        if self.targets[owner].process.is_some() && !self.targets[owner].paused {
            let desired = self.control.desired();
            self.feed_target(owner, vec![desired]);
        }
        self.operators.members.is_sending = false;
        self.keep_sending_desired();
    }

    pub(crate) fn keep_sending_desired(&mut self) {
        if self.control.desired_reached().is_err()
            && !std::mem::replace(&mut self.operators.members.is_sending, true)
        {
            self.schedule.after(SECOND, Event::SendDesired);
        }
    }

    /// One operator's turn.
    pub(crate) fn operate(&mut self) {
        if self.faults.over {
            return;
        }
        let pause = self.operators.members.random.between(700, 6000) * MILLISECOND;
        self.schedule.after(pause / self.setup.haste, Event::Operate);
        self.clear_retired();
        // An old copy of the records is not changed.
        let busy =
            self.control.desired_reached().is_err() && !self.operators.members.random.percent(25);
        if self.control.backup.is_some() || self.operators.recovery.is_under_way() {
            return;
        }
        if self.operators.members.unexpected.on && self.unexpected_turn() {
            return self.send_desired();
        }
        if self.operators.members.random.percent(TAKEN_BACK_PERCENT) && self.take_back() {
            return self.send_desired();
        }
        if busy {
            return;
        }
        match self.operators.members.random.below(8) {
            0..=2 => {
                let several = if self.operators.members.random.percent(40) { 2 } else { 1 };
                self.scale_up(several);
            }
            3..=4 => self.move_one(),
            5..=6 => self.remove_some(),
            _ => self.change_cf(),
        }
        let desired = self.control.record.desired.clone();
        self.trace.line(self.schedule.now(), || format!("operators desire {desired:?}"));
        self.send_desired();
    }

    fn scale_up(&mut self, count: usize) {
        for _ in 0..count {
            let drf = self.control.record.desired.drf + 1;
            if drf > RF_MAX || !self.setup.is_promised(drf, self.control.record.desired.cf_of(drf))
            {
                return;
            }
            let id = ReplicaId(self.operators.members.random.wide() | 1);
            if self.make_newcomer(id) {
                self.control.record.desire(drf);
                self.stats.operators.scale_ups += 1;
            }
        }
    }

    /// A newcomer is not wanted any more. The record goes on with it, so that no joint View that
    /// names it comes to rule, and its pool deletes it at some time.
    fn take_back(&mut self) -> bool {
        // A newcomer that takes the place of a lost member is needed.
        let known = &self.control.record.membership.known;
        let held = |m: &Member| self.pools.iter().any(|p| p.member == *m && !p.gone);
        let dispensable = |n: &&Newcomer| {
            let old = known.iter().find(|known| known.id == n.member.id);
            old.is_none_or(held)
        };
        let newcomers: Vec<Newcomer> =
            self.control.record.desired.newcomers.iter().filter(dispensable).copied().collect();
        if newcomers.is_empty() {
            return false;
        }
        let member = self.operators.members.random.pick(&newcomers).member;
        self.forget_newcomer(member);
        self.stats.operators.taken_back += 1;
        true
    }

    pub(super) fn forget_newcomer(&mut self, member: Member) {
        let drf = self.control.record.desired.drf;
        self.control.record.take_back(member);
        if self.operators.members.unexpected.forget(member) {
            self.control.record.desire(drf);
        }
        self.trace.line(self.schedule.now(), || format!("operators take {member:?} back"));
    }

    fn move_one(&mut self) {
        let known = self.control.record.membership.known.clone();
        let member = *self.operators.members.random.pick(&known);
        let desired = &self.control.record.desired;
        let busy = desired.newcomers.iter().any(|n| n.member.id == member.id)
            || desired.leaving.contains(&member);
        if !busy && self.make_newcomer(member.id) {
            self.stats.operators.moves += 1;
        }
    }

    fn remove_some(&mut self) {
        let known = self.control.record.membership.known.clone();
        let count = if self.operators.members.random.percent(25) { 2 } else { 1 };
        for _ in 0..count {
            let member = *self.operators.members.random.pick(&known);
            let desired = &self.control.record.desired;
            let busy = desired.newcomers.iter().any(|n| n.member.id == member.id)
                || desired.leaving.contains(&member);
            let Some(drf) = desired.drf.checked_sub(1).filter(|drf| *drf > 0) else { return };
            // A known member stays, as the product demands.
            let stays = known.iter().filter(|m| !desired.leaving.contains(m)).count() > 1;
            if busy || !stays || !self.setup.is_promised(drf, desired.cf_of(drf)) {
                return;
            }
            self.control.record.leave(member);
            self.stats.operators.removals += 1;
        }
    }

    fn change_cf(&mut self) {
        let rf = self.control.record.membership.rf;
        let cf = self.operators.members.random.between(0, u64::from(rf)) as u8;
        if self.setup.is_promised(rf, if cf == 0 { self.control.record.membership.cf } else { cf })
        {
            self.control.record.set_factor(cf);
            self.stats.operators.cf_changes += 1;
        }
    }

    /// Returns true if one replica may be lost at this moment, also while those that leave are off
    /// the list and those that fill it are not yet on it.
    pub(crate) fn is_one_dispensable(&self) -> bool {
        let View { membership, desired, .. } = &*self.control.record;
        match desired.leaving.len() as u8 {
            0 => self.setup.is_promised(membership.rf, membership.cf),
            leaving => {
                let rf = membership.rf.saturating_sub(leaving);
                rf > 0 && self.setup.is_promised(rf, desired.cf_of(rf))
            }
        }
    }

    /// A spare pool makes a replica, quorum off, and the records name it.
    fn make_newcomer(&mut self, id: ReplicaId) -> bool {
        let spare: Vec<usize> = (0..self.pools.len())
            .filter(|p| self.pools[*p].is_spare() && self.pools[*p].process.is_some())
            .collect();
        if spare.is_empty() {
            return false;
        }
        let pool = *self.operators.members.random.pick(&spare);
        let guid = ReplicaGuid(self.operators.members.random.wide() | 1);
        let member = Member { id, guid };
        if !self.make_replica(pool, member) {
            return false;
        }
        self.control.record.name(member, Some(pool));
        true
    }

    /// An empty replica with quorum off in this pool, whose process runs.
    pub(crate) fn make_replica(&mut self, pool: usize, member: Member) -> bool {
        let newborn = self.setup.newborn(member, false, self.control.record.membership.clone());
        self.make_born(pool, member, newborn)
    }

    pub(super) fn make_born(
        &mut self,
        pool: usize,
        member: Member,
        (identity, meta): (ReplicaIdentity, ReplicaMeta),
    ) -> bool {
        let foreign = identity.volume != self.setup.config.volume;
        let blocks = self.setup.config.volume_blocks;
        let local = self.local(self.pools[pool].host);
        let here = &mut self.pools[pool];
        if here.storage.create(identity, meta, blocks).is_err() {
            return false;
        }
        let boot = here.starts.cookie(here.storage.cookie());
        let mut replica = None;
        here.storage.with(member.guid, &mut |store: &mut dyn ReplicaStore| {
            replica = Some(Replica::new(local, boot, &*store));
        });
        here.member = member;
        here.gone = false;
        here.is_foreign = foreign;
        here.cache_lost = false;
        if let Some(process) = &mut here.process {
            process.replica = replica;
        }
        self.observe(&Observation::ReplicaMade { pool });
        self.trace.line(self.schedule.now(), || format!("pool {pool} makes {member:?}"));
        self.plan_sync(pool);
        true
    }

    /// Pools delete what is retired or was taken back, now or later: until then it may try to
    /// come back.
    pub(super) fn clear_retired(&mut self) {
        for pool in 0..self.pools.len() {
            let here = &self.pools[pool];
            let View { membership, desired, .. } = &*self.control.record;
            let wanted = membership.contains(here.member)
                || desired.newcomer(here.member).is_some()
                || self.operators.members.unexpected.is_to_come(here.member);
            if self.control.backup.is_some() || here.is_spare() || wanted || here.process.is_none()
            {
                continue;
            }
            if self.operators.members.random.percent(50) {
                let here = &mut self.pools[pool];
                if !here.gone && here.storage.delete(here.member.guid).is_err() {
                    continue;
                }
                here.member = Member::default();
                here.gone = true;
                here.cache_lost = false;
                self.kill_pool(pool, Outage::Process, 100 * MILLISECOND);
            }
        }
    }

    /// Returns true if a record names this pool's replica. Where none does the pool was told to
    /// delete it, which may have come true though the disk refused it.
    pub(crate) fn is_needed(&self, pool: usize) -> bool {
        let member = self.pools[pool].member;
        let records = [Some(&self.control.record), self.control.backup.as_ref()];
        records.into_iter().flatten().any(|record| {
            record.membership.contains(member) || record.desired.newcomer(member).is_some()
        })
    }

    /// A pool that has lost its replica makes another one under the same id, if that id still
    /// needs one there.
    pub(crate) fn replacement_for(&mut self, pool: usize) -> Option<Member> {
        let lost = self.pools[pool].member;
        let newest = self.control.backup.as_ref().unwrap_or(&self.control.record);
        if newest.membership.retired.contains(&lost.guid) {
            return None;
        }
        let guid = ReplicaGuid(self.random.wide() | 1);
        self.control.record.lost(pool, lost, guid)
    }
}
