//! Managers and a disaster-recovery orchestrator, as the services of CSI-Addons know them: the object of each side says
//! what it is to be, and turns of managers, often two at once, make it so. A failed precondition of a promotion is
//! answered by force at once. The side that was left is cleaned up in any order and again, and in the end the
//! application may be deleted, which leaves an orphan.
//!
//! | checker | finds |
//! |---|---|
//! | ToldTimeIsKept | a failover to a point that lacks what was told to be on this side |
//! | OrphanShowsCompletePoint | an orphan that is promoted or emptied while it shows anything else |

use std::collections::BTreeMap;

use quoin_cluster::mirror::answers::{Answer, Call};
use quoin_cluster::mirror::{Generation, Record, Role};
use quoin_types::ids::VolumeId;

use super::volume::{Content, is_same};
use super::{MirrorEvent, Mirrors};
use crate::schedule::{Instant, SECOND};

/// Wishes of the objects of both sides, and counts of what came of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Managers {
    /// Side whose object says primary.
    pub primary: usize,
    /// The other side is taken for dead until then: its manager makes no turn, and its application goes on.
    pub dead_until: Instant,
    pub is_deleted: bool,
    /// Side where the application is being deployed again, and whether its mirror was enabled there.
    pub again: Option<(usize, bool)>,
    /// Moves so far.
    pub moves: u64,
    pub orphans: u64,
    /// Mirrors that were paired again after an end, from the other side and from the side of the former primary.
    pub again_from: [u64; 2],
}

impl Mirrors {
    /// Where the application may run.
    pub(super) fn runs_at(&self, side: usize) -> bool {
        let Some(managers) = &self.managers else { return true };
        if let Some((to, _)) = managers.again {
            return side == to;
        }
        let is_there = side == managers.primary || self.now() < managers.dead_until;
        is_there && !managers.is_deleted
    }

    pub(super) fn turns(&mut self) {
        self.change_objects();
        for _ in 0..self.random.between(1, 4) {
            let side = self.random.index(2);
            self.turn(side);
        }
        self.deploy_again();
        let (low, high) = self.settings.calls_every;
        let next = self.random.between(low * SECOND / 4, high * SECOND / 4);
        self.schedule.after(next, MirrorEvent::Orchestrate);
    }

    /// A relocation, a failover, or the end of the application.
    fn change_objects(&mut self) {
        let now = self.now();
        let Some(managers) = self.managers.as_mut().filter(|managers| !managers.is_deleted) else {
            return;
        };
        if now < managers.dead_until || !self.random.percent(12) {
            return;
        }
        if now > 60 * SECOND && self.random.percent(if self.ends_often { 40 } else { 4 }) {
            managers.is_deleted = true;
            return self.say(|| "the application is deleted".into());
        }
        let is_failover = self.random.percent(50);
        managers.primary = 1 - managers.primary;
        managers.moves += 1;
        if is_failover {
            // Long enough for the silence to count, or not.
            let dead = self.random.between(5, 80) * SECOND;
            managers.dead_until = now + dead;
            self.link = [false; 2];
            (0..2).for_each(|side| self.schedule.after(dead, MirrorEvent::LinkBack(side)));
        }
        let to = self.managers.as_ref().map(|managers| managers.primary);
        self.say(|| format!("{to:?} is to be primary, by a failover: {is_failover}"));
    }

    fn turn(&mut self, side: usize) {
        let Some(managers) = self.managers.clone() else { return };
        if let Some((to, is_enabled)) = managers.again {
            return self.deploy(to, is_enabled);
        }
        if managers.is_deleted {
            return self.delete_application(side);
        }
        if side == managers.primary {
            self.call(side, Call::Enable);
            if let Some(Answer::Precondition(_)) = self.call(side, Call::Promote { force: false }) {
                self.call(side, Call::Promote { force: true });
            }
            return;
        }
        if self.now() < managers.dead_until {
            return;
        }
        for target in self.sides[side].volumes.values_mut() {
            target.client = None;
        }
        let members: Vec<VolumeId> = self.sides[side].volumes.keys().copied().collect();
        members.into_iter().for_each(|member| self.poll(side, member));
        self.call(side, Call::Demote { force: false });
        let force = self.random.percent(80);
        self.call(side, Call::Resync { force });
        if self.random.percent(50) {
            self.clean_up(side);
        }
    }

    /// The primary's side is disabled; the other one is told, and its orphan emptied or promoted.
    fn delete_application(&mut self, side: usize) {
        if !self.sides[side].is_recorded {
            return;
        }
        let role = self.sides[side].stored().role;
        match role {
            Role::Primary => {
                self.call(side, Call::Disable);
            }
            Role::Orphan => {
                if self.random.percent(60)
                    && self.is_current(side)
                    && self.call(side, Call::RemoveMembers) == Some(Answer::Ok)
                {
                    self.check_orphan(side, "emptied");
                    self.forget(side);
                } else if self.is_calm || self.random.percent(20) {
                    self.call(side, Call::Promote { force: false });
                }
            }
            Role::Off => {}
            role if role.is_copy() => self.clean_up(side),
            _ => {}
        }
    }

    /// In the calm, what was begun comes to its end.
    pub(super) fn end_application(&mut self) {
        let managers = self.managers.as_ref().filter(|managers| managers.is_deleted);
        if let Some((to, is_enabled)) = managers.and_then(|managers| managers.again) {
            self.deploy(to, is_enabled);
        } else if managers.is_some() {
            for side in 0..2 {
                self.delete_application(side);
            }
        }
    }

    pub(super) fn is_ended(&self) -> bool {
        self.managers.as_ref().is_some_and(|managers| managers.is_deleted)
            && self.sides.iter().any(|side| matches!(side.stored().role, Role::Off))
    }

    /// OrphanShowsCompletePoint: from here on nothing takes its volumes back to a point.
    pub(super) fn check_orphan(&mut self, side: usize, what: &str) {
        if let Some(managers) = &mut self.managers {
            managers.orphans += 1;
        }
        let record = self.sides[side].stored();
        let Some(complete) = record.points.complete else { return };
        let mut shown = BTreeMap::new();
        for member in record.members.iter().filter(|member| member.has_base) {
            let live = self.sides[side].volumes[&member.volume].live.clone();
            let promised = self.checks.content(complete, member.volume);
            if !promised.is_some_and(|promised| is_same(promised, &live)) {
                let detail = format!(
                    "{side}: {:?} is {what} with {live:?}, {complete:?} is {promised:?}",
                    member.volume
                );
                return self.violate("OrphanShowsCompletePoint", detail);
            }
            shown.insert(member.volume, live);
        }
        self.check_told(side, record.chain.top().generation, &shown);
    }

    /// ToldTimeIsKept: whatever was told while a generation ruled holds for the view that a later failover shows.
    pub(super) fn check_told(
        &mut self,
        side: usize,
        former: Generation,
        shown: &BTreeMap<VolumeId, Content>,
    ) {
        let Some(told_ms) = self.checks.told_ms(former) else { return };
        self.checks.checked += 1;
        if let Some((volume, block, tag)) = self.checks.lacking(former, told_ms, shown) {
            let detail =
                format!("{side}: {told_ms} was told, {volume:?} block {block} lacks {tag}");
            self.violate("ToldTimeIsKept", detail);
        }
    }

    pub(super) fn check_ended(&mut self, side: usize, before: &Record, after: &Record) {
        if before.role == Role::Orphan && after.role == Role::Off {
            self.check_orphan(side, "promoted");
        }
    }
}
