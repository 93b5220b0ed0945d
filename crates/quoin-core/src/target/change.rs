//! Replacing a known replica whose data is gone by a new one with the same ReplicaId, under both
//! rules: feed, go joint, compare-and-swap, adopt (`docs/replication.md`, "Membership change").

use std::time::Duration;

use super::peer::{Link, Peer};
use super::{Target, TargetAction, TargetNote};
use crate::entry::Rule;
use crate::ids::Lsn;
use crate::membership::{Member, Membership, RETIRED_MAX};
use crate::mutant;
use crate::time::Time;

const RETRY: Duration = Duration::from_secs(1);

#[derive(Default)]
enum State {
    #[default]
    None,
    /// The joint View is on its way to CF under both rules and to the newcomer.
    Joint { lsn: Lsn, newcomer: Member, next: Membership },
    /// The swap was sent. Whatever happens, both rules hold until its outcome is known.
    Swapping { newcomer: Member, next: Membership, retry_at: Time },
}

#[derive(Default)]
pub(super) struct Change {
    state: State,
}

impl Change {
    /// A new epoch judges an unfinished change by the record and the last View.
    pub fn reset(&mut self) {
        self.state = State::None;
    }

    /// The second rule while a change is joint.
    pub fn joint(&self) -> Option<Rule> {
        match &self.state {
            State::None => None,
            State::Joint { next, .. } | State::Swapping { next, .. } => Some(rule_of(next)),
        }
    }

    pub fn is_joint(&self) -> bool {
        matches!(self.state, State::Joint { .. })
    }

    pub fn is_swapping(&self) -> bool {
        matches!(self.state, State::Swapping { .. })
    }

    pub fn retry_at(&self) -> Option<Time> {
        match &self.state {
            State::Swapping { retry_at, .. } => Some(*retry_at),
            _ => None,
        }
    }
}

fn rule_of(membership: &Membership) -> Rule {
    Rule {
        membership_version: membership.version,
        rf: membership.rf,
        cf: membership.cf,
        known: membership.known.clone(),
    }
}

impl Target {
    pub(super) fn step_change(&mut self, now: Time, actions: &mut Vec<TargetAction>) {
        self.admit_candidates(now, actions);
        match &mut self.change.state {
            State::None => self.begin_change(now),
            State::Joint { lsn, newcomer, next } => {
                let (lsn, newcomer) = (*lsn, *newcomer);
                let active = self.views.active.as_ref().is_some_and(|(l, _)| *l >= lsn);
                match self.peers.iter().find(|p| p.member == newcomer) {
                    Some(peer)
                        if peer.is_live()
                            && ((peer.durable >= lsn && active)
                                || mutant::is("swap-before-durable")) =>
                    {
                        // DurableBeforeCAS holds from here on.
                        let next = next.clone();
                        self.swap(now, newcomer, next, actions);
                    }
                    Some(peer) if peer.is_live() => {}
                    _ if mutant::is("joint-change-not-given-up") => {}
                    _ => self.give_up(),
                }
            }
            State::Swapping { newcomer, next, retry_at } if now >= *retry_at => {
                let (newcomer, next) = (*newcomer, next.clone());
                self.swap(now, newcomer, next, actions);
            }
            State::Swapping { .. } => {}
        }
    }

    /// Candidates get sessions like known replicas, but count nowhere. Only a new incarnation of
    /// a known ReplicaId is admitted here (decision A33, replacement), one per ReplicaId.
    fn admit_candidates(&mut self, now: Time, actions: &mut Vec<TargetAction>) {
        for index in 0..self.candidates.len() {
            let candidate = self.candidates[index];
            let replaces = self
                .membership
                .known
                .iter()
                .any(|m| m.id == candidate.id && m.guid != candidate.guid);
            let retired = self.membership.retired.contains(&candidate.guid);
            let retired = retired && !mutant::is("retired-admitted");
            let there = self.peers.iter().any(|p| p.member == candidate);
            if replaces && !retired && !there {
                self.peers.push(Peer::new(candidate, now));
            }
        }
        let stale = |p: &Peer| {
            !self.membership.contains(p.member)
                && !self.candidates.contains(&p.member)
                && !self.change.joint().is_some_and(|rule| rule.known.contains(&p.member))
        };
        let gone: Vec<Member> = self.peers.iter().filter(|p| stale(p)).map(|p| p.member).collect();
        for member in gone {
            let Some(index) = self.peers.iter().position(|p| p.member == member) else { continue };
            if self.peers[index].link != Link::Down {
                let session = self.key(self.peers[index].nonce);
                actions.push(TargetAction::Disconnect { session });
            }
            self.cancel_rebuilds_from(index);
            self.reissue_reads(index);
            self.peers.remove(index);
        }
    }

    /// Goes joint with a newcomer that has caught up.
    fn begin_change(&mut self, now: Time) {
        if !self.views.pending.is_empty() || self.membership.retired.len() >= RETIRED_MAX {
            return;
        }
        let ready = self.peers.iter().find(|p| {
            p.link == Link::Fed
                && !self.membership.contains(p.member)
                && self.candidates.contains(&p.member)
                && p.applied >= p.tip
                && now >= p.return_at
                && self.history.weight_after(p.applied) <= self.config.window_bytes / 4
        });
        let Some(newcomer) = ready.map(|p| p.member) else { return };
        let Some(old) = self.membership.known.iter().find(|m| m.id == newcomer.id).copied() else {
            return;
        };
        let Some((_, view)) = &self.views.active else { return };
        let mut next = self.membership.clone();
        next.version += 1;
        for member in &mut next.known {
            if *member == old && !mutant::is("two-replicas-of-one-id") {
                *member = newcomer;
            }
        }
        if mutant::is("two-replicas-of-one-id") {
            next.rf += 1;
            next.known.push(newcomer);
        }
        if mutant::is("more-known-than-rf") {
            next.known.push(old);
        }
        next.retired.push(old.guid);
        assert!(next.check().is_ok(), "KnownAtMostRF");
        let mut in_sync = view.in_sync.clone();
        in_sync.retain(|m| *m != old);
        in_sync.push(newcomer);
        // Without the old copy both rules must still find CF: its data may be the last good one.
        let enough = [self.rule(), rule_of(&next)].iter().all(|rule| {
            let live = |m: &&Member| {
                rule.known.contains(m)
                    && self.peers.iter().any(|p| p.member == **m && p.link == Link::Fed)
            };
            in_sync.iter().filter(live).count() >= usize::from(rule.cf)
        });
        if !enough {
            return;
        }
        let joint = Some(rule_of(&next));
        self.append_view(in_sync, joint);
        let lsn = self.history.last.lsn;
        self.change.state = State::Joint { lsn, newcomer, next };
    }

    /// Before the swap was sent, the change may be given up: a View without the newcomer ends
    /// the joint rule. What it holds makes it unlisted with quorum on (decision A34).
    fn give_up(&mut self) {
        let State::Joint { newcomer, .. } = std::mem::take(&mut self.change.state) else { return };
        let Some(newest) = self.views.newest() else { return };
        let in_sync = newest.in_sync.iter().copied().filter(|m| *m != newcomer).collect();
        self.append_view(in_sync, None);
    }

    fn swap(
        &mut self,
        now: Time,
        newcomer: Member,
        next: Membership,
        actions: &mut Vec<TargetAction>,
    ) {
        actions.push(TargetAction::SwapMembership {
            epoch: self.epoch,
            version: self.membership.version,
            next: next.clone(),
        });
        self.change.state = State::Swapping { newcomer, next, retry_at: now + RETRY };
    }

    pub(super) fn swapped(
        &mut self,
        now: Time,
        version: u64,
        membership: Option<Membership>,
        actions: &mut Vec<TargetAction>,
    ) {
        let State::Swapping { next, .. } = &self.change.state else { return };
        if membership.is_none() && mutant::is("joint-dropped-on-unknown-outcome") {
            let newcomer = match &self.change.state {
                State::Swapping { newcomer, .. } => *newcomer,
                _ => return,
            };
            let next = Membership::default();
            self.change.state = State::Joint { lsn: Lsn::ZERO, newcomer, next };
            return self.give_up();
        }
        let Some(record) = membership else { return };
        if version != self.membership.version || record.version < version {
            return;
        }
        if record.version == next.version && record.known == next.known {
            self.change.state = State::None;
            self.membership = record;
            let Some(newest) = self.views.newest() else { return };
            let in_sync = newest.in_sync.clone();
            self.append_view(in_sync, None);
            let members = self.membership.known.clone();
            actions.push(TargetAction::Note(TargetNote::InSync { members }));
        } else {
            // Not swapped. Either somebody else changed the membership, or the record has gone on
            // to another epoch (perhaps by a late request of our own): both are settled by a new
            // epoch, under which no older swap can succeed any more.
            self.reopen(now, actions);
        }
    }
}
