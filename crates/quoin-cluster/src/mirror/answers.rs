//! The table of calls: what a group answers in each role, and what a call begins.
//!
//! A call that has an effect begins it by a change of the record, and is answered OK once that is there; until
//! then it is to be made again. No wish is kept beside the record.

use quoin_types::ids::{PointId, VolumeId};
use quoin_types::mutant;

use super::NO_PROGRESS_AFTER;
use super::brain::{Action, Brain, Now};
use super::chain::Relation;
use super::record::{Claim, Record, Role};
use super::word::Word;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    Enable,
    Disable,
    Promote {
        force: bool,
    },
    /// A person names the point of a copy whose records do not know it.
    PromoteAt(PointId),
    /// A person takes what diverged for the truth.
    AcceptDiverged,
    Demote {
        force: bool,
    },
    Resync {
        force: bool,
    },
    Publish(VolumeId),
    /// Calls of an orchestrator that would end a volume or its place in the group.
    Delete(VolumeId),
    RemoveMembers,
    DeleteGroup,
    /// Calls that change a volume: Expand, CreateSnapshot, EncryptionKeyRotate.
    Change(VolumeId),
}

/// Reason of a call that is not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum No {
    #[error("the group is not mirrored")]
    NotMirrored,
    #[error("the group is mirrored: disable it first")]
    Mirrored,
    #[error("it is a copy: only the side that is primary changes it")]
    Copy,
    #[error("it is a copy without a primary: promote or delete it first")]
    Orphan,
    #[error("the other cluster is silent: only force promotes this copy")]
    Silent,
    #[error("the other cluster is primary: demote it first")]
    PeerPrimary,
    #[error("the other cluster is primary: with force it is asked to step down")]
    PeerStepsDownOnlyByForce,
    #[error(
        "both sides wrote since the last common point: a resync with force discards what this one wrote"
    )]
    Diverged,
    #[error("a volume is published: unpublish it first")]
    Published,
    #[error("it is primary")]
    IsPrimary,
}

/// Code of an answer, as gRPC has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    Ok,
    /// Ready, or not: of a Resync alone.
    Ready(bool),
    /// FAILED_PRECONDITION (9)
    Precondition(No),
    /// ABORTED (10)
    Aborted(No),
    /// UNAVAILABLE (14): to be asked again.
    NotYet,
}

/// State of a mirrored group, as its primary has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    Healthy,
    Degraded,
    Error,
}

impl Brain {
    /// Answers a call, and begins what it asks for.
    pub fn call(&mut self, now: Now, call: Call, out: &mut Vec<Action>) -> Answer {
        if self.is_storing() {
            return Answer::NotYet;
        }
        let (answer, change) = self.judge(now, call);
        if let Some(record) = change {
            self.store(record, out);
        }
        answer
    }

    fn judge(&self, now: Now, call: Call) -> (Answer, Option<Record>) {
        let role = self.record.role;
        let rest = |answer| (answer, None);
        match call {
            Call::Enable => rest(match role {
                Role::Off => Answer::Precondition(No::NotMirrored),
                Role::Primary if !self.record.is_paired => Answer::NotYet,
                Role::Orphan => Answer::Precondition(No::Orphan),
                _ => Answer::Ok,
            }),
            Call::Disable => self.disable(),
            Call::Promote { force } => self.promote(now, force),
            Call::PromoteAt(point) => self.promote_at(now, point),
            Call::AcceptDiverged => self.accept_diverged(now),
            Call::Demote { force } => self.demote(now, force),
            Call::Resync { force } => self.resync(now, force),
            Call::Publish(_) => rest(self.publish()),
            // A member that leaves an orphan keeps its view, and its points go.
            Call::RemoveMembers if role == Role::Orphan && !self.is_left_whole() => {
                rest(Answer::NotYet)
            }
            Call::Delete(_) | Call::RemoveMembers | Call::DeleteGroup => self.clean_up(),
            Call::Change(_) => {
                rest(if role.is_copy() { Answer::Precondition(No::Copy) } else { Answer::Ok })
            }
        }
    }

    fn disable(&self) -> (Answer, Option<Record>) {
        let ended = || Record { role: Role::Off, ..self.record.clone() };
        match self.record.role {
            Role::Primary => (Answer::NotYet, Some(ended())),
            Role::Demoting => (Answer::NotYet, None),
            Role::Secondary if mutant::is("disable-of-a-copy-ends-it") => {
                (Answer::Ok, Some(ended()))
            }
            _ => (Answer::Ok, None),
        }
    }

    fn is_left_whole(&self) -> bool {
        self.is_settled() || mutant::is("orphan-emptied-before-it-is-settled")
    }

    /// A copy is the mirror's, whatever an orchestrator cleans up.
    fn clean_up(&self) -> (Answer, Option<Record>) {
        match self.record.role {
            Role::Primary | Role::Demoting => (Answer::Precondition(No::Mirrored), None),
            role if role.is_copy() && mutant::is("delete-of-a-copy-deletes") => {
                let mut record = self.record.clone();
                record.role = Role::Off;
                record.members.clear();
                (Answer::Ok, Some(record))
            }
            _ => (Answer::Ok, None),
        }
    }

    /// A volume is published where the group's record and the pools say Primary.
    fn publish(&self) -> Answer {
        match self.record.role {
            Role::Off => Answer::Ok,
            // It is on its way to its last point, and a client's writes would be taken back with the rest.
            Role::Orphan => Answer::Precondition(No::Orphan),
            Role::Primary if !self.pools_have_it() => Answer::NotYet,
            Role::Primary => Answer::Ok,
            Role::Demoting => Answer::NotYet,
            _ => Answer::Precondition(No::Copy),
        }
    }

    fn demote(&self, now: Now, force: bool) -> (Answer, Option<Record>) {
        match self.record.role {
            Role::Off => (Answer::Precondition(No::NotMirrored), None),
            Role::Primary => {
                let is_published = self.record.members.iter().any(|member| {
                    self.members.get(&member.volume).is_some_and(|seen| seen.is_published)
                });
                if is_published && !force {
                    return (Answer::Precondition(No::Published), None);
                }
                if !self.pools_have_it() || self.record.is_unsure && self.heard.is_none() && !force
                {
                    return (Answer::NotYet, None);
                }
                (Answer::NotYet, self.demoted(now))
            }
            Role::Demoting | Role::Promoting | Role::Resyncing => (Answer::NotYet, None),
            Role::Secondary if !self.pools_have_it() => (Answer::NotYet, None),
            Role::Secondary | Role::Diverged | Role::Orphan => (Answer::Ok, None),
        }
    }

    /// The number of the next generation.
    fn next_number(&self) -> u64 {
        let record = &self.record;
        let heard = self.heard.as_ref().map_or(0, |word| word.chain.top().generation.number);
        let yielded = record.claims.yielded.map_or(0, |claim| claim.number);
        record.chain.top().generation.number.max(heard).max(yielded) + 1
    }

    /// The last whole point of this side.
    fn whole_point(&self) -> Option<PointId> {
        let points = &self.record.points;
        let point = if self.record.is_own() { points.last } else { self.fed().or(points.complete) };
        let is_known =
            !self.record.is_unsure || mutant::is("complete-of-restored-records-believed");
        point.filter(|point| is_known && self.holds(*point))
    }

    fn claim(&self, now: Now, point: PointId) -> Claim {
        Claim { number: self.next_number(), point, id: now.draw }
    }

    fn promote(&self, now: Now, force: bool) -> (Answer, Option<Record>) {
        let record = &self.record;
        match record.role {
            Role::Off => return (Answer::Precondition(No::NotMirrored), None),
            Role::Primary if self.pools_have_it() => return (Answer::Ok, None),
            Role::Primary | Role::Demoting | Role::Promoting | Role::Resyncing => {
                return (Answer::NotYet, None);
            }
            Role::Diverged => return (Answer::Aborted(No::Diverged), None),
            // From there on it is an ordinary volume: nothing takes it back to its point.
            Role::Orphan if self.is_settled() => {
                return (Answer::Ok, Some(Record { role: Role::Off, ..record.clone() }));
            }
            Role::Orphan => return (Answer::NotYet, None),
            Role::Secondary => {}
        }
        let point = self.whole_point();
        let forced = |point| (Answer::NotYet, self.begun(now, self.claim(now, point), true));
        if !self.has_own_mirror() {
            return (Answer::NotYet, None);
        }
        if self.is_silent(now.time) {
            return match point {
                None => (Answer::NotYet, None),
                Some(_) if !force => (Answer::Precondition(No::Silent), None),
                Some(point) => forced(point),
            };
        }
        let Some(word) = &self.heard else { return (Answer::NotYet, None) };
        if word.role == Role::Primary {
            return self.promote_beside(word, force);
        }
        // A side that discards its own waits for a primary, and becomes none before that; one that diverged
        // may have no final point, and waits for a primary as well.
        let waits = match word.role {
            Role::Resyncing => !mutant::is("resync-of-the-peer-waited-for"),
            Role::Diverged => !mutant::is("diverged-peer-waited-for"),
            _ => false,
        };
        if waits
            && force
            && record.is_own()
            && let Some(point) = point
        {
            return forced(point);
        }
        if word.role != Role::Secondary || record.chain.relation(&word.chain) != Relation::Same {
            return (Answer::NotYet, None);
        }
        let is_final = |point: &PointId| {
            record.is_own() || word.last == Some(*point) || mutant::is("claimed-point-not-compared")
        };
        let top = record.chain.top().generation.number;
        let is_free = record.claims.yielded.is_none_or(|claim| claim.number <= top);
        if let Some(point) = point.filter(is_final)
            && is_free
            && !record.is_unsure
        {
            if mutant::is("promoted-without-a-claim") {
                return (Answer::NotYet, self.begun(now, self.claim(now, point), false));
            }
            let is_claimed = record.claims.own.is_some_and(|claim| claim.point == point);
            if !is_claimed {
                let mut claiming = record.clone();
                claiming.claims.own = Some(self.claim(now, point));
                return (Answer::NotYet, Some(claiming));
            }
        }
        let is_stuck = now.time.since(self.progress_at) >= NO_PROGRESS_AFTER;
        match point.filter(|_| force && is_stuck) {
            Some(point) => forced(point),
            None => (Answer::NotYet, None),
        }
    }

    /// The other side is primary, and was heard.
    fn promote_beside(&self, word: &Word, force: bool) -> (Answer, Option<Record>) {
        let may = self.record.parameters.may_take_over && word.parameters.may_take_over;
        if mutant::is("taken-over-before-its-final-point")
            && may
            && force
            && self.record.asks_step_down
            && let Some(point) = self.whole_point()
        {
            let claim = Claim { number: self.next_number(), point, id: 1 };
            let mut record = self.record.clone();
            record.role = Role::Promoting;
            record.claims.promoting = Some(claim);
            record.fence = 0;
            return (Answer::NotYet, Some(record));
        }
        if !may {
            return (Answer::Aborted(No::PeerPrimary), None);
        }
        if !force {
            return (Answer::Precondition(No::PeerStepsDownOnlyByForce), None);
        }
        let asking = Record { asks_step_down: true, ..self.record.clone() };
        (Answer::Aborted(No::PeerPrimary), (!self.record.asks_step_down).then_some(asking))
    }

    fn promote_at(&self, now: Now, point: PointId) -> (Answer, Option<Record>) {
        if self.record.role != Role::Secondary || !self.is_silent(now.time) || !self.holds(point) {
            return (Answer::NotYet, None);
        }
        (Answer::NotYet, self.begun(now, self.claim(now, point), true))
    }

    fn accept_diverged(&self, now: Now) -> (Answer, Option<Record>) {
        let point = self.record.points.last.filter(|point| self.holds(*point));
        match point.filter(|_| self.record.role == Role::Diverged) {
            Some(point) => (Answer::NotYet, self.begun(now, self.claim(now, point), true)),
            None => (Answer::NotYet, None),
        }
    }

    fn resync(&self, now: Now, force: bool) -> (Answer, Option<Record>) {
        let record = &self.record;
        match record.role {
            Role::Off => (Answer::Precondition(No::NotMirrored), None),
            Role::Orphan => (Answer::Precondition(No::Orphan), None),
            Role::Primary | Role::Demoting => (Answer::Precondition(No::IsPrimary), None),
            Role::Promoting | Role::Resyncing => (Answer::NotYet, None),
            Role::Diverged if force && self.is_beside_a_primary() => {
                let mut resyncing = record.clone();
                resyncing.role = Role::Resyncing;
                resyncing.fence = now.draw;
                resyncing.lost = Some(PointId(now.draw));
                (Answer::Ready(false), Some(resyncing))
            }
            Role::Diverged => (Answer::Ready(false), None),
            Role::Secondary => (Answer::Ready(self.is_ready(now)), None),
        }
    }

    /// Only a primary is followed: of two sides that diverged a person promotes one first.
    fn is_beside_a_primary(&self) -> bool {
        let beside = mutant::is("resync-beside-a-resync");
        self.heard.as_ref().is_some_and(|word| word.role == Role::Primary || beside)
    }

    fn is_ready(&self, now: Now) -> bool {
        let record = &self.record;
        let points = &record.points;
        if record.is_own() {
            return points.last.is_some() && points.common == points.last;
        }
        let Some(word) = self.heard.as_ref().filter(|_| !self.is_silent(now.time)) else {
            return false;
        };
        let is_same = record.chain.relation(&word.chain) == Relation::Same;
        let has_newest =
            word.offer.is_none() && points.complete.is_some() && record.receiving.is_none();
        is_same && has_newest && !record.is_unsure
    }

    /// The newest moment for which all that was acknowledged before it is durable on the other side, by the wall
    /// clock of this one. `None`: nothing is known yet, or this side is not primary.
    pub fn synced_ms(&self, now: Now) -> Option<u64> {
        let record = &self.record;
        if record.role != Role::Primary {
            return None;
        }
        if mutant::is("sync-time-is-the-arrival") {
            return record.points.common.map(|_| now.wall_ms);
        }
        let generation = record.chain.top().generation;
        let noted = self.synced.filter(|(of, _)| *of == generation).map(|(_, ms)| ms);
        // A clock that was ahead told of moments that have not been yet.
        noted.max(self.synced_now_ms(now)).filter(|ms| *ms <= now.wall_ms)
    }

    /// The same, as far as it is known by what is seen now.
    fn synced_now_ms(&self, now: Now) -> Option<u64> {
        let record = &self.record;
        let common = record.points.common.filter(|_| record.role == Role::Primary)?;
        let cut_ms = record.points.common_cut_ms;
        let is_whole = record.members.iter().all(|member| member.has_base);
        let seen = record.members.iter().map(|member| {
            let seen = self.members.get(&member.volume)?;
            (seen.at == Some(common)).then_some(seen.seen_ms)
        });
        let idle = seen.min().flatten().filter(|_| is_whole && !self.is_silent(now.time));
        let synced = idle.map_or(cut_ms, |seen_ms| seen_ms.max(cut_ms));
        (synced != 0).then_some(synced)
    }

    pub(super) fn note_synced(&mut self, now: Now) {
        let generation = self.record.chain.top().generation;
        self.synced = self.synced.filter(|(of, ms)| *of == generation && *ms <= now.wall_ms);
        let noted = self.synced.map(|(_, ms)| ms);
        self.synced = self.synced_now_ms(now).max(noted).map(|ms| (generation, ms));
    }

    pub fn health(&self, now: Now) -> Health {
        let word = self.heard.as_ref();
        let is_split = word.is_some_and(|word| {
            let relation = self.record.chain.relation(&word.chain);
            let is_rival = word.role == Role::Primary && self.record.role == Role::Primary;
            is_rival || word.role == Role::Diverged || relation == Relation::Forked
        });
        if is_split {
            return Health::Error;
        }
        let lag_ms = self.synced_ms(now).map(|synced| now.wall_ms.saturating_sub(synced));
        let bound = 2000 * self.record.parameters.interval_s;
        match lag_ms {
            Some(lag_ms) if lag_ms <= bound => Health::Healthy,
            _ => Health::Degraded,
        }
    }
}
