//! Changes of membership: joint through a running target, forced where none can open.

use crate::bounds::Model;
use crate::explore::Steps;
use crate::mutants::Mutant;
use crate::state::*;
use crate::step::Step;

/// floor(RF/2)+1.
fn default_cf(rf: u8) -> u8 {
    rf / 2 + 1
}

impl Model {
    pub(crate) fn change_steps(&self, s: &State, steps: &mut Steps) {
        for a in 0..ATTEMPTS {
            if s.attempts[a].phase == SERVING {
                self.go_joint(s, a, steps);
                self.give_up(s, a, steps);
                self.send_swap(s, a, steps);
                self.learn_swap(s, a, steps);
                self.learn_taken_back(s, a, steps);
                self.forget_old(s, a, steps);
            }
            self.swap(s, a, steps);
        }
        self.take_back(s, steps);
        self.force(s, steps);
        if s.record.old.known != 0 && s.budget.forced_consents > 0 {
            let mut next = *s;
            next.budget.forced_consents -= 1;
            next.record.old = Rule::default();
            next.consented = 1;
            steps.push(self, Step::Consent, next);
        }
    }

    /// Steps a and b: with a newcomer that has caught up, or without one.
    fn go_joint(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        if s.budget.changes == 0
            || attempt.change.stage != NO_CHANGE
            || attempt.pending_views().next().is_some()
        {
            return;
        }
        let known = attempt.rule.known;
        let changes = self.bounds.changes;
        for newcomer in members(self.candidates(s)) {
            let fed = attempt.links[newcomer].state == LINK_FED;
            if !fed || attempt.links[newcomer].applied < attempt.links[newcomer].tip {
                continue;
            }
            let new = 1 << newcomer;
            for old in members(known).filter(|_| changes.replace) {
                self.joint(s, a, known & !(1 << old) | new, attempt.rule.cf, steps);
            }
            if changes.add {
                self.joint(s, a, known | new, default_cf(attempt.rule.rf + 1), steps);
            }
            for other in members(self.candidates(s) & !(2 * new - 1)).filter(|_| changes.pair) {
                let fed = attempt.links[other].state == LINK_FED;
                if fed && attempt.links[other].applied >= attempt.links[other].tip {
                    let pair = new | 1 << other;
                    self.joint(s, a, known | pair, default_cf(attempt.rule.rf + 2), steps);
                }
            }
        }
        for cf in (1..=attempt.rule.rf).filter(|cf| changes.factor && *cf != attempt.rule.cf) {
            self.joint(s, a, known, cf, steps);
        }
        for old in members(known).filter(|_| changes.remove && attempt.rule.rf > 1) {
            self.joint(s, a, known & !(1 << old), default_cf(attempt.rule.rf - 1), steps);
        }
    }

    fn joint(&self, s: &State, a: usize, joint_known: Set, joint_cf: u8, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        let Some(newest) = attempt.newest_view() else { return };
        let removed = attempt.rule.known & !joint_known;
        let added = joint_known & !attempt.rule.known;
        // A leaving replica stays in sync until the record has the change, if it keeps up.
        let kept = newest.in_sync | added;
        for in_sync in [kept & !removed, kept] {
            self.joint_with(s, a, in_sync, joint_known, joint_cf, steps);
            if in_sync == kept {
                return;
            }
        }
    }

    fn joint_with(
        &self,
        s: &State,
        a: usize,
        in_sync: Set,
        joint_known: Set,
        joint_cf: u8,
        steps: &mut Steps,
    ) {
        let attempt = &s.attempts[a];
        let Some(newest) = attempt.newest_view() else { return };
        let view = Entry { kind: VIEW, in_sync, joint_known, joint_cf, ..*newest };
        if usize::from(attempt.length) == ENTRIES
            || view.rules().any(|(known, cf)| count(in_sync & known) < cf)
        {
            return;
        }
        let mut next = *s;
        next.budget.changes -= 1;
        let attempt = &mut next.attempts[a];
        attempt.append(view);
        attempt.change.stage = JOINT;
        attempt.change.joint_at = attempt.length;
        let lsn = attempt.last();
        let step = Step::Joint { attempt: a, lsn, in_sync, known: joint_known, cf: joint_cf };
        steps.push(self, step, next);
    }

    /// Before the compare-and-swap was sent: a View without the newcomer ends the joint rule.
    fn give_up(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        let possible = match attempt.change.stage {
            JOINT => !self.is(Mutant::CannotGiveUp),
            SWAP_SENT | SWAP_DONE => self.is(Mutant::JointDropped),
            _ => false,
        };
        if possible {
            let mut next = *s;
            if self.end_joint(&mut next, a) {
                steps.push(self, Step::GiveUp { attempt: a }, next);
            }
        }
    }

    fn end_joint(&self, s: &mut State, a: usize) -> bool {
        let attempt = &mut s.attempts[a];
        let Some(newest) = attempt.newest_view().copied() else { return false };
        if usize::from(attempt.length) == ENTRIES {
            return false;
        }
        attempt.append(Entry {
            kind: VIEW,
            in_sync: newest.in_sync & attempt.rule.known,
            known: attempt.rule.known,
            cf: attempt.rule.cf,
            version: attempt.version,
            ..Entry::default()
        });
        attempt.change = Change::default();
        true
    }

    /// Step c, once the joint View is durable on CF under both rules and on the newcomer.
    fn send_swap(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        if attempt.change.stage != JOINT {
            return;
        }
        let joint = attempt.entries[usize::from(attempt.change.joint_at) - 1];
        let lsn = attempt.start + attempt.change.joint_at;
        let mut newcomers = members(joint.joint_known & !attempt.rule.known);
        let durable = attempt.active >= attempt.change.joint_at
            && newcomers
                .all(|r| attempt.links[r].state == LINK_FED && attempt.links[r].durable >= lsn);
        let mut next = *s;
        next.attempts[a].change.stage = SWAP_SENT;
        let step = Step::SendSwap { attempt: a };
        if durable {
            steps.push(self, step, next);
        } else if self.is(Mutant::SwapBeforeDurable) {
            steps.broken(step, next, "DurableBeforeCAS");
        }
    }

    /// The record takes the swap, at any time after it was sent or never.
    fn swap(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        let record = s.record;
        if attempt.change.stage != SWAP_SENT
            || (record.epoch, record.version) != (attempt.epoch, attempt.version)
        {
            return;
        }
        let joint = attempt.entries[usize::from(attempt.change.joint_at) - 1];
        let mut next = *s;
        next.attempts[a].change.stage = SWAP_DONE;
        let known = joint.joint_known;
        let rf = if self.is(Mutant::KnownAboveRf) { attempt.rule.rf } else { count(known) };
        next.record = Record {
            version: record.version + 1,
            rule: Rule { known, cf: joint.joint_cf, rf },
            retired: record.retired | (record.rule.known & !known),
            ..record
        };
        let step = Step::Swap { attempt: a };
        if count(known) > rf {
            return steps.broken(step, next, "KnownAtMostRF");
        }
        if known & record.retired != 0 {
            return steps.broken(step, next, "RetiredNeverBack");
        }
        steps.push(self, step, next);
        if attempt.phase == SERVING {
            // A competing swap with the old list comes first: the late one is dead.
            let mut next = *s;
            next.record.version += 1;
            next.attempts[a].version += 1;
            if self.end_joint(&mut next, a) {
                steps.push(self, Step::Compete { attempt: a }, next);
            }
        }
    }

    /// Step d: the target has read v+1 with its list.
    fn learn_swap(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        if attempt.change.stage != SWAP_DONE || usize::from(attempt.length) == ENTRIES {
            return;
        }
        let joint = attempt.entries[usize::from(attempt.change.joint_at) - 1];
        let Some(newest) = attempt.newest_view().copied() else { return };
        let mut next = *s;
        let attempt = &mut next.attempts[a];
        attempt.version += 1;
        let known = joint.joint_known;
        attempt.rule = Rule { known, cf: joint.joint_cf, rf: count(known) };
        attempt.change = Change::default();
        attempt.append(Entry {
            kind: VIEW,
            in_sync: newest.in_sync & attempt.rule.known,
            known: attempt.rule.known,
            cf: attempt.rule.cf,
            version: attempt.version,
            ..Entry::default()
        });
        steps.push(self, Step::LearnSwap { attempt: a }, next);
    }

    /// The control plane takes a newcomer off the record, which goes to the next version with that.
    /// A record that is an old copy may not be changed.
    fn take_back(&self, s: &State, steps: &mut Steps) {
        let trusted =
            s.budget.rollbacks == self.bounds.budget.rollbacks || self.is(Mutant::OldCopyChanged);
        if s.budget.drops > 0 && trusted && s.record.old.known == 0 {
            let mut next = *s;
            next.budget.drops -= 1;
            next.record.version += 1;
            steps.push(self, Step::TakeBack, next);
        }
    }

    /// The target reads a later version with the list that it knows: all its own swaps are dead.
    fn learn_taken_back(&self, s: &State, a: usize, steps: &mut Steps) {
        let (attempt, record) = (&s.attempts[a], &s.record);
        let same = (record.rule.known, record.rule.cf) == (attempt.rule.known, attempt.rule.cf);
        if record.version <= attempt.version || !same {
            return;
        }
        let mut next = *s;
        next.attempts[a].version = record.version;
        if self.end_joint(&mut next, a) {
            steps.push(self, Step::LearnTakenBack { attempt: a }, next);
        }
    }

    /// The control plane lowers RF where no target can open. The epoch that it takes is spent on
    /// fencing the dropped members: each has answered an Open of it, or is declared gone and a
    /// full lease was waited out.
    fn force(&self, s: &State, steps: &mut Steps) {
        let Some(fence) = s.unused_attempt(self.bounds.attempts.into()) else { return };
        if s.budget.forced == 0 || s.record.old.known != 0 {
            return;
        }
        let known = s.record.rule.known;
        for keep in (1..known).filter(|keep| keep & !known == 0) {
            for gone in [false, true] {
                self.force_to(s, fence, keep, gone, steps);
            }
        }
    }

    fn force_to(&self, s: &State, fence: usize, keep: Set, gone: bool, steps: &mut Steps) {
        let mut next = *s;
        let record = s.record;
        let dropped = record.rule.known & !keep;
        let waits = match self.mutant {
            Some(Mutant::FencedAtPromise) => gone,
            Some(Mutant::LeaseNotWaitedWhenGone) => !gone,
            _ => true,
        };
        next.budget.forced -= 1;
        next.attempts[fence] = Attempt {
            phase: ENDED,
            epoch: record.epoch + 1,
            incarnation: fence as u8 + 1,
            ..Attempt::default()
        };
        for r in members(dropped) {
            let replica = &mut next.replicas[r];
            if replica.gone == 1 && !gone {
                return;
            }
            if !waits && replica.promised > 0 {
                next.attempts[usize::from(replica.promised) - 1].late_grants |= 1 << r;
            }
            let replica = &mut next.replicas[r];
            replica.promised = fence as u8 + 1;
            replica.session = 0;
            if gone {
                let Replica { promised, newcomer, .. } = *replica;
                *replica = Replica { gone: 1, promised, newcomer, ..Replica::default() };
            }
        }
        let rf = count(keep);
        next.record = Record {
            epoch: record.epoch + 1,
            version: record.version + 1,
            rule: Rule { known: keep, cf: default_cf(rf), rf },
            retired: record.retired | dropped,
            ..record
        };
        if !self.is(Mutant::ForcedWithoutOld) {
            next.record.old = record.rule;
        }
        steps.push(self, Step::Force { keep, gone }, next);
    }

    /// A target that has started IO removes the old membership.
    fn forget_old(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        if s.record.old.known == 0 || attempt.io.served == 0 || s.record.epoch != attempt.epoch {
            return;
        }
        let mut next = *s;
        next.record.old = Rule::default();
        steps.push(self, Step::ForgetOld { attempt: a }, next);
    }
}
