//! Replicas that connect unasked: started by mistake, copied from others, of another
//! volume, replaced long ago. Operators of the swarm `unexpected-peers` name them beside all that other
//! operators do; before the run ends whatever there is no room for is taken off the record again.
//!
//! Some of these runs begin with a list that lacks an entry, which a newcomer has to fill.

use quoin_types::{Member, ReplicaGuid, ReplicaId, VolumeId};

use super::members::RF_MAX;
use super::{Event, World};
use crate::control::View;
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::storage::Outage;
use crate::swarm::Swarm;

/// Of a hundred turns of the operators so many bring an unexpected peer.
const TURNS_OF_HUNDRED: u64 = 60;
/// Named at the same time, at most.
const NAMED_MAX: usize = 5;
/// Of a hundred runs so many begin with a list that lacks an entry.
const SHORT_OF_HUNDRED: u64 = 25;

#[derive(Default)]
pub(crate) struct UnexpectedPeers {
    pub on: bool,
    pub list_is_short: bool,
    /// Named without a raise of what is desired.
    invited: Vec<Member>,
    /// The entry that the list lacks, before it is named.
    missing: Option<Member>,
    /// To be named at the next turn, and the factor that was desired before the crowd came.
    late: Option<Member>,
    drf_before: Option<u8>,
}

impl UnexpectedPeers {
    pub fn draw(swarm: Swarm, random: &mut Random) -> Self {
        if swarm != Swarm::UnexpectedPeers {
            return Self::default();
        }
        let list_is_short = random.percent(SHORT_OF_HUNDRED);
        Self { on: true, list_is_short, ..Self::default() }
    }

    /// Returns true if the member has a replica and no name yet.
    pub fn is_to_come(&self, member: Member) -> bool {
        [self.missing, self.late].contains(&Some(member))
    }

    /// Returns true if it was an unexpected one.
    pub fn forget(&mut self, member: Member) -> bool {
        let before = self.invited.len();
        self.invited.retain(|m| *m != member);
        self.invited.len() < before
    }
}

impl World {
    /// The list lacks this one, whose replica is empty and does not count.
    pub(crate) fn begin_with_a_short_list(&mut self, missing: Member) {
        self.operators.members.unexpected.missing = Some(missing);
        if self.operators.members.random.percent(50) {
            self.control.record.desire(self.control.record.desired.drf + 1);
        }
        self.keep_sending_desired();
    }

    /// Returns true if this turn of the operators was for unexpected peers. While the list is
    /// short, all are.
    pub(super) fn unexpected_turn(&mut self) -> bool {
        self.continue_crowd();
        let membership = &self.control.record.membership;
        let short = membership.known.len() < usize::from(membership.rf);
        if short && self.operators.members.random.percent(25) {
            self.name_missing();
            return true;
        }
        if !short && !self.operators.members.random.percent(TURNS_OF_HUNDRED) {
            return false;
        }
        if self.control.record.desired.newcomers.len() < NAMED_MAX {
            if !short && self.operators.members.random.percent(30) {
                self.crowd();
            } else {
                self.invite();
            }
        }
        true
    }

    fn name(&mut self, member: Member) {
        let pool = self.pools.iter().position(|p| p.member == member);
        self.control.record.name(member, pool);
    }

    fn name_missing(&mut self) {
        if let Some(member) = self.operators.members.unexpected.missing.take() {
            self.name(member);
        }
    }

    /// Known replicas go for a while, and as many others as there is room for come in their place.
    fn crowd(&mut self) {
        let known = self.control.record.membership.known.clone();
        let drf = self.control.record.desired.drf;
        if self.operators.members.unexpected.drf_before.is_some() || drf >= RF_MAX {
            return;
        }
        self.operators.members.unexpected.drf_before = Some(drf);
        let away = self.operators.members.random.between(1, known.len() as u64) as usize;
        for member in &known[..away] {
            if let Some(pool) = self.pools.iter().position(|p| p.member == *member && !p.gone) {
                let restart = self.operators.members.random.between(1500, 4000) * MILLISECOND;
                self.kill_pool(pool, Outage::Process, restart);
            }
        }
        let stand_in =
            Member { id: known[0].id, guid: ReplicaGuid(self.operators.members.random.wide() | 1) };
        let busy = self.control.record.desired.newcomers.iter().any(|n| n.member.id == stand_in.id);
        if !busy && self.make_unexpected(stand_in, false, false) {
            self.operators.members.unexpected.late = Some(stand_in);
        }
        let mut made = 0;
        let all = self.operators.members.random.percent(60);
        loop {
            let random = &mut self.operators.members.random;
            let member =
                Member { id: ReplicaId(random.wide() | 1), guid: ReplicaGuid(random.wide() | 1) };
            let quorum = all || random.percent(50);
            if !self.make_unexpected(member, quorum, false) {
                break;
            }
            made += 1;
            self.name(member);
            self.operators.members.unexpected.invited.push(member);
        }
        let full = (known.len() - away + made) as u8;
        self.control.record.desire(full.clamp(drf + 1, RF_MAX));
    }

    /// Continues what the last turn began with a crowd: one more comes, or fewer are desired again.
    fn continue_crowd(&mut self) {
        let fewer = self.operators.members.unexpected.drf_before.is_some()
            && self.operators.members.random.percent(50);
        if let Some(member) = self.operators.members.unexpected.late.take_if(|_| !fewer) {
            let desired = &self.control.record.desired;
            let busy = desired.newcomers.iter().any(|n| n.member.id == member.id)
                || desired.leaving.iter().any(|m| m.id == member.id);
            if busy {
                return;
            }
            self.name(member);
            self.operators.members.unexpected.invited.push(member);
        } else if let Some(drf) = self.operators.members.unexpected.drf_before.take() {
            self.control.record.desire(drf.max(self.control.record.membership.rf));
        }
    }

    fn invite(&mut self) {
        let known = self.control.record.membership.known.clone();
        let random = &mut self.operators.members.random;
        let like = *random.pick(&known);
        let (new_id, new_guid) = (ReplicaId(random.wide() | 1), ReplicaGuid(random.wide() | 1));
        let fresh = Member { id: new_id, guid: new_guid };
        // While the list is short one with quorum on would only be sent away again and again.
        let short = known.len() < usize::from(self.control.record.membership.rf);
        let quorum = random.percent(40) && !short;
        let turn = random.below(10);
        let is_made = match turn {
            0..=4 => self.make_unexpected(fresh, quorum, false).then_some(fresh),
            // A copied data set.
            5 => Some(Member { id: new_id, guid: like.guid }),
            // A replica that was replaced comes back.
            6 => {
                let retired = self.control.record.membership.retired.last();
                retired.map(|guid| Member { id: new_id, guid: *guid })
            }
            // A second one of a listed id.
            7..=8 => {
                let second = Member { id: like.id, guid: new_guid };
                let desired = &self.control.record.desired;
                let busy = desired.newcomers.iter().any(|n| n.member.id == like.id)
                    || desired.leaving.contains(&like);
                (!busy && self.make_unexpected(second, quorum, false)).then_some(second)
            }
            _ => self.make_unexpected(fresh, quorum, true).then_some(fresh),
        };
        let Some(member) = is_made else { return };
        self.name(member);
        self.operators.members.unexpected.invited.push(member);
        self.trace.line(self.schedule.now(), || format!("operators bring {member:?} by mistake"));
    }

    /// An empty replica in a pool that has none.
    fn make_unexpected(&mut self, member: Member, quorum: bool, foreign: bool) -> bool {
        let has_room = |p: &super::PoolHost| p.is_spare() && p.process.is_some();
        let Some(pool) = self.pools.iter().position(has_room) else { return false };
        let (mut identity, meta) =
            self.setup.newborn(member, quorum, self.control.record.membership.clone());
        if foreign {
            identity.volume = VolumeId(!self.setup.config.volume.0);
        }
        self.make_born(pool, member, (identity, meta))
    }

    /// Takes replicas without a place off the record. An addition that had to turn back half way may
    /// count itself by now, and is made anew: it does not fill the list.
    pub(crate) fn remove_unexpected(&mut self) {
        if !self.operators.members.unexpected.on {
            return;
        }
        self.continue_crowd();
        let list = &self.control.record.membership;
        if list.known.len() < usize::from(list.rf) {
            self.name_missing();
        }
        let held = |member: &Member| self.pools.iter().any(|p| p.member == *member && !p.gone);
        let foreign =
            |member: &Member| self.pools.iter().any(|p| p.member == *member && p.is_foreign);
        let list = &self.control.record.membership;
        let desired = &self.control.record.desired;
        let (known, leaving) = (list.known.len(), desired.leaving.len());
        let room = (usize::from(desired.drf) + leaving).saturating_sub(known);
        let mut ids: Vec<ReplicaId> = Vec::new();
        let mut stays = Vec::new();
        let mut added = 0;
        for newcomer in &desired.newcomers {
            let member = newcomer.member;
            let is_listed = list.known.iter().any(|entry| entry.id == member.id);
            let is_copy = list.known.iter().any(|entry| entry.guid == member.guid);
            // A replica that its pool lost is made anew there.
            let is_sound = self.pools.iter().any(|p| p.member == member)
                && !foreign(&member)
                && !is_copy
                && !list.retired.contains(&member.guid)
                && !ids.contains(&member.id);
            let place = list.known.iter().find(|entry| entry.id == member.id);
            let is_needed = newcomer.beside || place.is_none_or(|entry| !held(entry));
            if is_sound && is_needed && (is_listed || added < room) {
                added += usize::from(!is_listed);
                ids.push(member.id);
                stays.push(*newcomer);
            }
        }
        let rf = list.rf;
        let is_short = known < usize::from(rf);
        let again: Vec<Member> = stays.iter().map(|n| n.member).filter(|_| is_short).collect();
        let stays = |member: Member| stays.iter().any(|newcomer| newcomer.member == member);
        self.control.record.edit(|volume| {
            // No change that is under way comes true.
            volume.membership.version += 1;
            volume.membership.drf = ((known + added).max(rf.into()) - leaving) as u8;
            let known = volume.membership.known.clone();
            volume.replicas.retain(|r| {
                let is_known = known.iter().any(|m| (m.id, m.guid) == (r.id, r.guid));
                is_known || stays(r.member())
            });
        });
        for member in again {
            self.make_again(member);
        }
        self.keep_sending_desired();
    }

    /// A target has no place for one that was to fill the list: it turned back half way once more.
    pub(crate) fn refill(&mut self, member: Member) {
        let View { membership, desired, .. } = &*self.control.record;
        let is_short = membership.known.len() < usize::from(membership.rf);
        let is_meant = desired.newcomer(member).is_some();
        if self.operators.members.unexpected.on && self.faults.over && is_short && is_meant {
            self.make_again(member);
        }
    }

    fn make_again(&mut self, member: Member) {
        let is_here = |p: &super::PoolHost| p.member == member && !p.gone;
        let Some(pool) = self.pools.iter().position(is_here) else { return };
        if self.pools[pool].storage.delete(member.guid).is_ok() {
            self.pools[pool].gone = true;
            self.end_sessions_of_deleted(pool);
            let delay = self.operators.members.random.between(500, 2000) * MILLISECOND;
            self.schedule.after(delay, Event::Recreate { pool });
        }
    }
}
