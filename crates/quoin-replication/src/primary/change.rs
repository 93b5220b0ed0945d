//! Execution of one change of membership with the volume in use: feed, go joint, compare-and-swap,
//! adopt (`docs/replication.md`, "Changing the membership").
//!
//! All kinds of change use these steps: [`super::plan`] turns what is desired into another
//! membership, and the steps from one to the other are the same. While the change is joint, entries
//! are counted under both rules. A replica that leaves stays in the in-sync set until the record
//! has the change, as long as it keeps up: under the old rule it may be needed.
//!
//! The record may advance by itself, to a higher version with the same list (a newcomer was
//! removed), or refuse a change that is no longer desired. Then the target requests the present
//! membership under the next version. Once the record has that version, no older swap can succeed
//! any more, and the joint rule ends without a new epoch.

use std::time::Duration;

use super::peer::{Link, Peer};
use super::plan::{Next, Plan, Standing, plan};
use super::{Phase, Primary, PrimaryAction, PrimaryNote};
use quoin_types::entry::Rule;
use quoin_types::ids::Lsn;
use quoin_types::membership::{Member, Membership};
use quoin_types::mutant;
use quoin_types::time::Time;

const RETRY: Duration = Duration::from_secs(1);
/// Pause before a change that was given up or refused is begun again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Longest time that an answer to a swap can be under way.
const LATE_AFTER: Duration = Duration::from_secs(10);
/// Time that additions which are ready wait for other desired ones.
const TOGETHER: Duration = Duration::from_secs(10);

#[derive(Default)]
enum State {
    #[default]
    None,
    /// The joint View is on its way to CF under both rules and to the newcomers.
    Joint { lsn: Lsn, next: Box<Next> },
    /// The swap was sent. Both rules hold until its outcome is known.
    Swapping { next: Box<Next>, retry_at: Time },
    /// The record has advanced, or has refused the swap: the present membership was requested under
    /// the next version. The planned one remains a rule while older requests may be on their way.
    Asking { next: Option<Box<Next>>, since: Time, retry_at: Time },
}

#[derive(Default)]
pub(super) struct Change {
    state: State,
    not_before: Time,
    /// Time until which additions wait for others.
    hold_until: Option<Time>,
    /// Time at which a replica that has heard of a newer term first turned this epoch away.
    turned_away: Option<Time>,
}

impl Change {
    /// Ends the change: a new epoch decides on an unfinished one by the record and the last View.
    pub fn reset(&mut self) {
        self.state = State::None;
        self.hold_until = None;
        self.turned_away = None;
    }

    fn next(&self) -> Option<&Next> {
        match &self.state {
            State::None => None,
            State::Joint { next, .. } | State::Swapping { next, .. } => Some(next),
            State::Asking { next, .. } => next.as_deref(),
        }
    }

    /// The second rule while a change is joint.
    pub fn joint(&self) -> Option<Rule> {
        self.next().map(|next| rule_of(&next.membership))
    }

    /// Returns true if a second rule is in force that knows this replica.
    fn knows(&self, member: Member) -> bool {
        self.next().is_some_and(|next| next.membership.contains(member))
    }

    pub fn is_joint(&self) -> bool {
        matches!(self.state, State::Joint { .. })
    }

    pub fn is_swapping(&self) -> bool {
        matches!(self.state, State::Swapping { .. } | State::Asking { .. })
    }

    pub fn due(&self, now: Time) -> Option<Time> {
        match &self.state {
            State::Swapping { retry_at, .. } | State::Asking { retry_at, .. } => Some(*retry_at),
            State::Joint { .. } => None,
            State::None => {
                let held = self.hold_until.filter(|at| *at > now);
                held.or(Some(self.not_before).filter(|at| *at > now))
            }
        }
    }
}

pub(super) fn rule_of(membership: &Membership) -> Rule {
    Rule {
        membership_version: membership.version,
        rf: membership.rf,
        cf: membership.cf,
        known: membership.known.clone(),
    }
}

impl Primary {
    pub(super) fn step_change(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.admit_newcomers(now, actions);
        match &self.change.state {
            State::None if self.members.desired.version > self.members.membership.version => {
                self.ask_record(now, None, now, actions);
            }
            State::None => self.begin_change(now),
            State::Joint { lsn, next } => {
                let durable = self.commit.views.active.as_ref().is_some_and(|(at, _)| at >= lsn)
                    && next
                        .newcomers
                        .iter()
                        .all(|m| self.live(*m).is_some_and(|p| p.progress.durable >= *lsn));
                // A newcomer that receives the joint View while catching up does not adopt it: its
                // quorum stays off.
                let learns = |m: &Member| self.live(*m).is_some_and(|p| p.progress.tip < *lsn);
                let live = next.newcomers.iter().all(learns);
                if live && (durable || mutant::is("swap-before-durable")) {
                    let held =
                        |m: &Member| self.live(*m).is_some_and(|p| p.progress.durable >= *lsn);
                    assert!(next.newcomers.iter().all(held), "DurableBeforeCAS");
                    let next = next.clone();
                    self.swap(now, next, actions);
                } else if (!live || !self.could_rule(next))
                    && !mutant::is("joint-change-not-given-up")
                {
                    self.give_up(now, actions);
                }
            }
            State::Swapping { next, retry_at } if now >= *retry_at => {
                let next = next.clone();
                self.swap(now, next, actions);
            }
            State::Asking { next, since, retry_at } if now >= *retry_at => {
                let (next, since) = (next.clone(), *since);
                self.ask_record(now, next, since, actions);
            }
            State::Swapping { .. } | State::Asking { .. } => {}
        }
    }

    fn live(&self, member: Member) -> Option<&Peer> {
        self.members.peers.iter().find(|p| p.member == member && p.is_live())
    }

    /// Returns true if CF replicas of the new rule are there to count. Without them, the change
    /// would stop a volume that the old rule alone could serve.
    fn could_rule(&self, next: &Next) -> bool {
        let membership = &next.membership;
        let there = membership.known.iter().filter(|m| self.live(**m).is_some()).count();
        there >= usize::from(membership.cf)
    }

    /// Connects the newcomers that get a seat and ends the sessions of those that lost theirs.
    fn admit_newcomers(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let keeps = |member| self.change.knows(member);
        let Some(seating) = self.members.seat_newcomers(self.config.volume, keeps) else { return };
        for member in &seating.gone {
            self.part_with(*member, actions);
        }
        self.members.admit(now, &seating);
        for (member, refusal) in seating.news {
            actions.push(PrimaryAction::Note(PrimaryNote::NotAdmitted { member, refusal }));
        }
    }

    fn part_with(&mut self, member: Member, actions: &mut Vec<PrimaryAction>) {
        let Some(index) = self.members.position(member) else { return };
        if self.members[index].link != Link::Down {
            let session = self.key(self.members[index].nonce);
            actions.push(PrimaryAction::Disconnect { session });
        }
        self.cancel_rebuilds_from(index);
        self.reissue_reads(index);
        self.members.peers.remove(index);
    }

    fn standing(&self, member: Member, now: Time) -> Standing {
        let Some(peer) = self.members.get(member) else {
            return Standing::Away;
        };
        let small_lag =
            self.history.weight_after(peer.progress.applied) <= self.config.window_bytes / 4;
        match peer.link {
            Link::Fed if self.commit.views.counts(member) => Standing::InSync,
            Link::Fed
                if peer.progress.applied >= peer.progress.tip
                    && now >= peer.lasting.return_at
                    && small_lag =>
            {
                Standing::Ready
            }
            Link::Down | Link::Connecting => Standing::Away,
            _ => Standing::Coming,
        }
    }

    /// Goes joint with the next membership, if there is one and both rules have their CF.
    fn begin_change(&mut self, now: Time) {
        if !self.commit.views.pending.is_empty() || now < self.change.not_before {
            return;
        }
        let next = match plan(&self.members.membership, &self.members.desired, |m| {
            self.standing(m, now)
        }) {
            Plan::Go(next) => next,
            Plan::Hold(next) => {
                let until = *self.change.hold_until.get_or_insert(now + TOGETHER);
                if now < until {
                    return;
                }
                next
            }
            Plan::Nothing => {
                self.change.hold_until = None;
                return;
            }
        };
        let membership = &next.membership;
        assert!(membership.check().is_ok(), "KnownAtMostRF");
        let Some((_, view)) = &self.commit.views.active else { return };
        let fed =
            |m: &Member| self.members.peers.iter().any(|p| p.member == *m && p.link == Link::Fed);
        let mut in_sync = view.in_sync.clone();
        in_sync.retain(|m| membership.contains(*m) || fed(m));
        in_sync.extend(&next.newcomers);
        // Both rules must find CF at once: a change never stops a volume that serves.
        let enough = [self.members.rule(), rule_of(membership)].iter().all(|rule| {
            let live = |m: &&Member| rule.known.contains(m) && fed(m);
            in_sync.iter().filter(live).count() >= usize::from(rule.cf)
        });
        if !enough {
            return;
        }
        let joint = Some(rule_of(membership)).filter(|_| !mutant::is("joint-rule-left-out"));
        self.append_view(in_sync, joint);
        let lsn = self.history.last.lsn;
        self.change.hold_until = None;
        self.change.state = State::Joint { lsn, next };
    }

    /// Gives up the change, which is possible before the swap was sent: a View without the
    /// newcomers ends the joint rule. The entries that they hold make them unlisted with quorum on.
    fn give_up(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let State::Joint { next, .. } = std::mem::take(&mut self.change.state) else { return };
        let newcomers = next.newcomers;
        self.change.not_before = now + AGAIN_AFTER;
        if let Some(newest) = self.commit.views.newest() {
            let in_sync = newest.in_sync.iter().copied().filter(|m| !newcomers.contains(m));
            self.append_view(in_sync.collect(), None);
        }
        actions.push(PrimaryAction::Note(PrimaryNote::ChangeGivenUp { newcomers }));
    }

    fn swap(&mut self, now: Time, next: Box<Next>, actions: &mut Vec<PrimaryAction>) {
        actions.push(PrimaryAction::SwapMembership {
            epoch: self.opening.epoch,
            version: self.members.membership.version,
            next: next.membership.clone(),
        });
        self.change.state = State::Swapping { next, retry_at: now + RETRY };
    }

    /// Handles a replica that has heard of a newer term, beside a quorum that has not. A record that
    /// has this epoch grants it anew with the target's next report. Where that does not help for
    /// long, a late request of this target may have taken another epoch there: the record is asked,
    /// and IO continues meanwhile.
    pub(super) fn turned_away(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let since = *self.change.turned_away.get_or_insert(now);
        let is_long = now >= since + LATE_AFTER;
        let is_free = matches!(self.change.state, State::None) && self.phase == Phase::Serving;
        if is_long && is_free && !mutant::is("record-not-asked-when-turned-away") {
            self.change.turned_away = Some(now);
            self.ask_record(now, None, now, actions);
        }
    }

    /// Reads the record in a way that prevents older swaps from succeeding after the answer.
    fn ask_record(
        &mut self,
        now: Time,
        next: Option<Box<Next>>,
        since: Time,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let version = self.members.membership.version;
        let same = Membership { version: version + 1, ..self.members.membership.clone() };
        actions.push(PrimaryAction::SwapMembership {
            epoch: self.opening.epoch,
            version,
            next: same,
        });
        self.change.state = State::Asking { next, since, retry_at: now + RETRY };
    }

    pub(super) fn swapped(
        &mut self,
        now: Time,
        version: u64,
        membership: Option<Membership>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let (wanted, asked) = match &self.change.state {
            State::None | State::Joint { .. } => return,
            State::Swapping { next, .. } => (Some(next.clone()), None),
            State::Asking { next, since, .. } => (next.clone(), Some(*since)),
        };
        if let Some(next) = wanted.as_ref().filter(|_| membership.is_none())
            && mutant::is("joint-dropped-on-unknown-outcome")
        {
            self.change.state = State::Joint { lsn: Lsn::ZERO, next: next.clone() };
            return self.give_up(now, actions);
        }
        let Some(record) = membership else { return };
        // Answers are in no order: this one may belong to an earlier change, and the record may
        // have advanced since.
        let late = version != self.members.membership.version || record.version < version;
        if late && !mutant::is("late-answer-to-a-swap-believed") {
            return;
        }
        if record.version == version {
            return self.refused(now, wanted, asked, actions);
        }
        let made = wanted.as_ref().is_some_and(|next| is_same(&record, &next.membership));
        if !made && !is_same(&record, &self.members.membership) {
            // Another writer changed the membership: a new epoch settles it.
            self.change.not_before = now + AGAIN_AFTER;
            return self.reopen(now, actions);
        }
        // Every swap that is still on its way named the version that is over.
        self.adopt(record);
        if made {
            let membership = self.members.membership.clone();
            actions.push(PrimaryAction::Note(PrimaryNote::Changed { membership }));
        } else if let Some(next) = wanted {
            let newcomers = next.newcomers;
            self.change.not_before = now + AGAIN_AFTER;
            actions.push(PrimaryAction::Note(PrimaryNote::ChangeGivenUp { newcomers }));
        }
        self.admit_newcomers(now, actions);
    }

    /// Handles a record that did not change. `asked`: time since which the present membership is
    /// requested.
    fn refused(
        &mut self,
        now: Time,
        wanted: Option<Box<Next>>,
        asked: Option<Time>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        match asked {
            None if mutant::is("joint-dropped-on-refusal") => {
                self.adopt(self.members.membership.clone());
                self.change.not_before = now + AGAIN_AFTER;
            }
            // The change is not desired (any more), or a late request of this target took another
            // epoch.
            None => self.ask_record(now, wanted, now, actions),
            // Possibly the answer to an earlier request.
            Some(since) if now < since + LATE_AFTER => {}
            // The record has advanced to another epoch: no older swap succeeds under a new one.
            Some(_) => {
                self.change.not_before = now + AGAIN_AFTER;
                self.reopen(now, actions);
            }
        }
    }

    /// Adopts the record's membership as the only rule from here on.
    fn adopt(&mut self, record: Membership) {
        self.change.state = State::None;
        let in_sync = self.commit.views.newest().map(|view| {
            let stays = |m: &&Member| record.contains(**m);
            view.in_sync.iter().filter(stays).copied().collect()
        });
        self.members.membership = record;
        if let Some(in_sync) = in_sync {
            self.append_view(in_sync, None);
        }
    }
}

fn is_same(one: &Membership, other: &Membership) -> bool {
    one.known == other.known && (one.rf, one.cf) == (other.rf, other.cf)
}
