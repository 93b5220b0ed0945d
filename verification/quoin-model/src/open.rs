//! From an epoch to the first View: steps 1 to 6 of an open, and the replica's side of them (R1,
//! R3).

use crate::bounds::Model;
use crate::explore::Steps;
use crate::history::EMPTY;
use crate::mutants::Mutant;
use crate::settle::Violation;
use crate::state::*;
use crate::step::Step;

/// Result of a try to open a replica.
enum Answer {
    /// Refused, or nothing new.
    No,
    Yes,
    Broken(Violation),
}

/// Decision that the answers so far allow.
enum Verdict {
    Wait,
    Go,
    Unflushed,
}

impl Model {
    pub(crate) fn open_steps(&self, s: &State, steps: &mut Steps) {
        if let Some(a) = s.unused_attempt(self.bounds.attempts.into()) {
            self.acquire(s, a, steps);
        }
        for a in 0..ATTEMPTS {
            match s.attempts[a].phase {
                OPENING => {
                    let set = s.attempts[a].rule.known | self.joint_members(s, a);
                    self.open_each(s, a, set, steps);
                    self.decide(s, a, steps);
                }
                RECOVERING => {
                    self.open_each(s, a, s.attempts[a].rule.known, steps);
                    self.cut_each(s, a, steps);
                }
                SERVING => {
                    let attempt = &s.attempts[a];
                    let joint = attempt.newest_view().map_or(0, |view| view.joint_known);
                    let set = attempt.rule.known | joint | self.candidates(s);
                    self.open_each(s, a, set, steps);
                    self.cut_each(s, a, steps);
                }
                _ => {}
            }
        }
    }

    /// Whom the second rule of a joint View knows that an answer shows: they are asked as well.
    fn joint_members(&self, s: &State, a: usize) -> Set {
        let attempt = &s.attempts[a];
        let voters = (0..REPLICAS).filter(|r| self.is_voter(attempt, *r));
        let views = voters.filter_map(|r| s.last_view(attempt.links[r].ack));
        let set = views.fold(0, |set, (_, view)| set | view.joint_known);
        set & !s.record.retired
    }

    /// Replicas that may become known: new GUIDs, never retired ones.
    pub(crate) fn candidates(&self, s: &State) -> Set {
        let newcomer = |r: &usize| s.replicas[*r].newcomer == 1;
        let newcomers = (0..REPLICAS).filter(newcomer).fold(0, |set, r| set | 1 << r);
        newcomers & !s.record.retired & !s.record.rule.known
    }

    /// Step 1. The compare-and-swap reads the membership in the same transaction. Merged with the
    /// first Open: until then no other process learns of the attempt.
    fn acquire(&self, s: &State, a: usize, steps: &mut Steps) {
        let mut epochs = vec![s.record.epoch + 1];
        // A Refuse taught the target a higher epoch than a restored record knows.
        for replica in &s.replicas[..self.bounds.replicas()] {
            if replica.promised > 0 {
                let heard = s.attempt(replica.promised).epoch + 1;
                if heard > s.record.epoch + 1 && !epochs.contains(&heard) {
                    epochs.push(heard);
                }
            }
        }
        let restarted = self.is(Mutant::EpochReused).then(|| a.checked_sub(1)).flatten();
        let ways = epochs
            .into_iter()
            .map(|epoch| (epoch, a as u8 + 1))
            .chain(restarted.map(|old| (s.attempts[old].epoch, s.attempts[old].incarnation)));
        for (epoch, incarnation) in ways {
            let mut next = *s;
            let record = s.record;
            next.record.epoch = epoch.max(record.epoch);
            let attempt = &mut next.attempts[a];
            *attempt = Attempt {
                phase: OPENING,
                epoch,
                incarnation,
                version: record.version,
                rule: record.rule,
                old: record.old,
                ..Attempt::default()
            };
            if self.is(Mutant::RetiredAdmitted) {
                attempt.rule.known |= record.retired;
            }
            if self.is(Mutant::FormationOpen) {
                attempt.rule.known |= self.candidates(s);
            }
            for r in members(next.attempts[a].rule.known) {
                if has(record.retired, r) {
                    let step = Step::Acquire { attempt: a, replica: r };
                    steps.broken(step, next, "RetiredNeverBack");
                    continue;
                }
                self.open(&next, a, r, Step::Acquire { attempt: a, replica: r }, steps);
            }
        }
    }

    fn open_each(&self, s: &State, a: usize, set: Set, steps: &mut Steps) {
        for r in members(set) {
            self.open(s, a, r, Step::Open { attempt: a, replica: r }, steps);
        }
    }

    fn open(&self, s: &State, a: usize, r: usize, step: Step, steps: &mut Steps) {
        let mut next = *s;
        match self.answer(&mut next, a, r) {
            Answer::No => {}
            Answer::Yes => {
                self.freeze_powerless(s, &mut next, a);
                steps.push(self, step, next);
            }
            Answer::Broken(invariant) => steps.broken(step, next, invariant),
        }
    }

    /// R1. Promise, wait for leases and answer are one step: the promise's earlier moment gives
    /// older targets nothing that they could not do before it, and the step itself stands at the
    /// moment of the answer (`docs/proof.md`).
    fn answer(&self, s: &mut State, a: usize, r: usize) -> Answer {
        let attempt = s.attempts[a];
        let replica = s.replicas[r];
        if replica.gone == 1 {
            return Answer::No;
        }
        if attempt.phase != OPENING && replica.version > attempt.version {
            return Answer::No;
        }
        let other = replica.promised > 0 && usize::from(replica.promised) != a + 1;
        if other {
            let promised = s.attempt(replica.promised);
            let same = promised.epoch == attempt.epoch
                && (promised.incarnation == attempt.incarnation
                    || self.is(Mutant::EqualEpochAccepted));
            if attempt.epoch < promised.epoch || (attempt.epoch == promised.epoch && !same) {
                return Answer::No;
            }
            let forgets = match self.mutant {
                Some(Mutant::LeaseFromReceipt | Mutant::LeaseForgottenByOpen) => true,
                Some(Mutant::LeaseForgottenByRestart) => replica.session == 0,
                _ => false,
            };
            if forgets {
                s.attempts[usize::from(replica.promised) - 1].late_grants |= 1 << r;
            }
        } else if replica.promised > 0 && replica.session == 1 {
            return Answer::No;
        }
        let replica = &mut s.replicas[r];
        replica.promised = a as u8 + 1;
        replica.session = 1;
        replica.closed = 0;
        replica.version = replica.version.max(attempt.version);
        if attempt.phase != OPENING {
            let tip = if attempt.phase == RECOVERING { attempt.start } else { attempt.last() };
            return match self.feed(s, a, r, tip) {
                Ok(()) => Answer::Yes,
                Err(invariant) => Answer::Broken(invariant),
            };
        }
        let replica = s.replicas[r];
        let attempt = &mut s.attempts[a];
        attempt.links[r].state = LINK_ANSWERED;
        attempt.links[r].ack = replica.log;
        attempt.links[r].ack_flags =
            replica.continuous * CONTINUOUS + replica.quorum * QUORUM + replica.damaged * DAMAGED;
        Answer::Yes
    }

    /// Step 5: cuts a replica to what it has in common with the history, and feeds it from there.
    fn feed(&self, s: &mut State, a: usize, r: usize, tip: u8) -> Result<(), Violation> {
        let history = Place { attempt: a as u8 + 1, count: s.attempts[a].length };
        let log = s.replicas[r].log;
        let keep = s.common(log, history);
        let stable = s.common(log, s.flushed);
        if keep < stable {
            if !self.bounds.lying_disks || self.is(Mutant::CutBelowStable) {
                return Err("StableNeverCut");
            }
            // R3: never executed; the replica reports Damaged and counts nowhere.
            let replica = &mut s.replicas[r];
            replica.damaged = 1;
            replica.session = 0;
            s.attempts[a].links[r].state = LINK_NONE;
            return Ok(());
        }
        if s.replicas[r].hollow > keep && self.is(Mutant::FoldAboveStable) {
            return Err("PrefixAlways");
        }
        let log = s.prefix(log, keep);
        let replica = &mut s.replicas[r];
        replica.log = log;
        replica.durable = replica.durable.min(keep);
        let durable = replica.durable;
        let attempt = &mut s.attempts[a];
        attempt.links[r].state = LINK_FED;
        attempt.links[r].applied = keep;
        attempt.links[r].durable = durable;
        attempt.links[r].tip = tip;
        Ok(())
    }

    fn cut_each(&self, s: &State, a: usize, steps: &mut Steps) {
        for r in 0..self.bounds.replicas() {
            if s.attempts[a].links[r].state != LINK_ANSWERED || !s.is_live(a, r) {
                continue;
            }
            let history = Place { attempt: a as u8 + 1, count: s.attempts[a].length };
            let keep = s.common(s.replicas[r].log, history);
            let step = Step::Cut { attempt: a, replica: r, keep };
            let mut next = *s;
            let tip = s.attempts[a].start;
            match self.feed(&mut next, a, r, tip) {
                Ok(()) => steps.push(self, step, next),
                Err(invariant) => steps.broken(step, next, invariant),
            }
        }
    }

    fn is_voter(&self, attempt: &Attempt, r: usize) -> bool {
        has(attempt.rule.known, r) && self.is_sound(attempt, r)
    }

    /// Answered, quorum on, undamaged.
    fn is_sound(&self, attempt: &Attempt, r: usize) -> bool {
        let flags = attempt.links[r].ack_flags;
        let sound =
            self.is(Mutant::QuorumOffCounted) || (flags & QUORUM != 0 && flags & DAMAGED == 0);
        attempt.links[r].state == LINK_ANSWERED && sound
    }

    /// Steps 3 to 6, as soon as the answers allow it, or later.
    fn decide(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        let voters = (0..REPLICAS).filter(|r| self.is_voter(attempt, *r));
        let voters: Set = voters.fold(0, |set, r| set | 1 << r);
        let answered = (0..REPLICAS).filter(|r| attempt.links[*r].state == LINK_ANSWERED);
        let newest = answered.map(|r| s.replicas[r].version).max().unwrap_or(0);
        if newest > attempt.version && !self.is(Mutant::RollbackIgnored) {
            // ControlPlaneBehind.
            return;
        }
        if count(voters) < open_quorum(attempt.rule.rf, attempt.rule.cf) {
            return;
        }
        let Some(authority) = self.authority(s, attempt, a, voters) else { return };
        let mut marked = s.ends_marked(authority);
        let mut verdicts =
            vec![self.verdict(s, attempt, voters, authority, attempt.rule.known, attempt.rule.cf)];
        if attempt.old.known != 0 && !self.is(Mutant::ForcedWithoutOld) {
            // A forced change: all of the new K, and the whole of step 3 under the old one.
            if attempt.rule.known & !voters != 0
                || (count(voters & attempt.old.known) < open_quorum(attempt.old.rf, attempt.old.cf)
                    && !self.is(Mutant::ForcedWithoutQuorum))
            {
                return;
            }
            let (known, cf) = (attempt.old.known, attempt.old.cf);
            verdicts.push(self.verdict(s, attempt, voters, authority, known, cf));
        }
        // A restored record may name the first rule of a joint View although the second ruled for
        // long. Its first View alone was then on the media of CF' of its K', and any of them would
        // say so; until then everything was counted under both.
        // A record that has reached its version by another way (a forced change) lets it never
        // rule.
        let open = |view: &Entry| view.joint_cf > 0 && view.version >= attempt.version;
        let joint = s.last_view(authority).filter(|(_, view)| open(view));
        if let Some((_, view)) = joint.filter(|_| !self.is(Mutant::JointNotJudged)) {
            let answered = |r: &usize| {
                attempt.links[*r].state == LINK_ANSWERED
                    && attempt.links[*r].ack_flags & DAMAGED == 0
            };
            let silent = members(view.joint_known).filter(|r| !answered(r)).count();
            if silent >= usize::from(view.joint_cf) {
                return;
            }
        }
        for verdict in verdicts {
            match verdict {
                Verdict::Wait => return,
                Verdict::Go => {}
                Verdict::Unflushed => marked = true,
            }
        }
        let step = Step::Decide { attempt: a, in_sync: voters, marked };
        let mut next = *s;
        if members(voters).any(|r| s.replicas[r].mixed == 1) {
            return steps.broken(step, next, "IncrementAtomic");
        }
        let same_epoch = |other: &Attempt| other.epoch == attempt.epoch && other.length > 0;
        if s.attempts.iter().any(same_epoch) {
            return steps.broken(step, next, "OneContent");
        }
        let start = s.lsn(authority);
        let attempt = &mut next.attempts[a];
        attempt.phase = RECOVERING;
        attempt.base = authority;
        attempt.start = start;
        attempt.marked = u8::from(marked);
        attempt.length = 1;
        attempt.entries[0] = Entry {
            kind: if marked { MARKED_VIEW } else { VIEW },
            in_sync: voters,
            known: attempt.rule.known,
            cf: attempt.rule.cf,
            version: attempt.version,
            ..Entry::default()
        };
        for link in &mut attempt.links {
            (link.ack, link.ack_flags) = (EMPTY, 0);
        }
        for r in 0..REPLICAS {
            if next.attempts[a].links[r].state != LINK_ANSWERED {
                continue;
            }
            if !next.is_live(a, r) {
                next.attempts[a].links[r].state = LINK_NONE;
            } else if next.contains(authority, next.replicas[r].log) {
                // Nothing to cut: the Truncate changes nothing but the link.
                if let Err(invariant) = self.feed(&mut next, a, r, start) {
                    return steps.broken(step, next, invariant);
                }
            }
        }
        steps.push(self, step, next);
    }

    /// Step 4: the highest position in V, of one that can still be read where that is needed.
    fn authority(&self, s: &State, attempt: &Attempt, a: usize, voters: Set) -> Option<Place> {
        let position = |at: Place| {
            s.position(if self.is(Mutant::ViewOutOfPosition) { s.last_write(at) } else { at })
        };
        let highest = members(voters).map(|r| position(attempt.links[r].ack)).max()?;
        let mut authority = None;
        for r in members(voters).filter(|r| position(attempt.links[*r].ack) == highest) {
            let complete =
                members(voters).all(|v| s.contains(attempt.links[v].ack, attempt.links[r].ack));
            if s.is_live(a, r) || complete {
                authority = Some(attempt.links[r].ack);
            }
        }
        authority
    }

    /// Step 3: whether enough of the last in-sync set kept all that they ever applied.
    fn verdict(
        &self,
        s: &State,
        attempt: &Attempt,
        voters: Set,
        authority: Place,
        known: Set,
        cf: u8,
    ) -> Verdict {
        // No View in V: nothing was ever acknowledged.
        let Some((_, view)) = s.last_view(authority) else { return Verdict::Go };
        if self.is(Mutant::NoContinuousRule) {
            return Verdict::Go;
        }
        let kept = (0..REPLICAS)
            .filter(|r| attempt.links[*r].ack_flags & CONTINUOUS != 0)
            .fold(0, |set, r| set | 1 << r);
        let owed = view.in_sync & known;
        if count(voters & kept & owed) + cf > count(owed) {
            Verdict::Go
        } else if count(voters & !kept & owed) >= cf {
            Verdict::Unflushed
        } else {
            Verdict::Wait
        }
    }

    /// An attempt that can never again hold CF promises can acknowledge nothing, and whatever
    /// else it does to other replicas it could have done before it lost its last promise. So it
    /// takes no more steps (the argument stands in `docs/proof.md`, "What is merged").
    fn freeze_powerless(&self, before: &State, s: &mut State, by: usize) {
        // A failed sync and rot take more from a replica than a cut that keeps what it likes.
        let faults = before.budget.damages + before.budget.sync_failures;
        if faults > 0 || self.mutant.is_some_and(Mutant::gives_power) {
            return;
        }
        for a in (0..ATTEMPTS).filter(|a| *a != by) {
            if !matches!(s.attempts[a].phase, OPENING | RECOVERING | SERVING)
                || s.attempts[a].change.stage != NO_CHANGE
                || is_powerful(s, a)
                || !is_powerful(before, a)
            {
                continue;
            }
            let old = s.attempts[a];
            s.attempts[a] = Attempt {
                phase: ENDED,
                epoch: old.epoch,
                incarnation: old.incarnation,
                base: old.base,
                start: old.start,
                length: old.length,
                io: Io { served: old.io.served, ..Io::default() },
                entries: old.entries,
                ..Attempt::default()
            };
            for replica in &mut s.replicas {
                if usize::from(replica.promised) == a + 1 {
                    replica.session = 0;
                }
            }
        }
    }
}

/// Returns true if CF of its known list have not promised a newer epoch.
fn is_powerful(s: &State, a: usize) -> bool {
    let attempt = &s.attempts[a];
    let free = members(attempt.rule.known).filter(|r| {
        let promised = s.replicas[*r].promised;
        promised == 0 || s.attempt(promised).epoch <= attempt.epoch
    });
    free.count() >= usize::from(attempt.rule.cf)
}

/// max(CF, RF − CF + 1).
fn open_quorum(rf: u8, cf: u8) -> u8 {
    cf.max(rf - cf + 1)
}
