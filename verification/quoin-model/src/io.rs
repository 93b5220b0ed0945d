//! Entries on their way: writes, what replicas apply and sync, Views that drop and return
//! members, an orderly end.

use crate::bounds::Model;
use crate::explore::Steps;
use crate::mutants::Mutant;
use crate::state::*;
use crate::step::Step;

impl Model {
    pub(crate) fn io_steps(&self, s: &State, steps: &mut Steps) {
        for a in 0..ATTEMPTS {
            match s.attempts[a].phase {
                RECOVERING => self.apply_each(s, a, steps),
                SERVING => {
                    self.apply_each(s, a, steps);
                    self.write(s, a, steps);
                    self.flush(s, a, steps);
                    self.change_views(s, a, steps);
                    self.shut_down(s, a, steps);
                }
                ENDED => self.close_each(s, a, steps),
                _ => {}
            }
        }
    }

    /// R2: strictly by LSN. The acknowledgement is received at once ("What is merged").
    fn apply_each(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        let history = Place { attempt: a as u8 + 1, count: attempt.length };
        for r in 0..self.bounds.replicas() {
            if attempt.links[r].state != LINK_FED || !s.is_live(a, r) {
                continue;
            }
            let lsn = s.lsn(s.replicas[r].log);
            if lsn < attempt.last() {
                let next = self.applied(s, a, r, s.prefix(history, lsn + 1));
                steps.push(self, Step::Apply { attempt: a, replica: r, lsn: lsn + 1 }, next);
            }
            if attempt.links[r].durable < attempt.io.flush && attempt.io.flush <= lsn {
                let mut next = *s;
                next.replicas[r].durable = lsn;
                next.attempts[a].links[r].durable = lsn;
                steps.push(self, Step::Sync { attempt: a, replica: r, lsn }, next);
            }
            if self.is(Mutant::FoldAboveStable) && s.replicas[r].hollow < lsn {
                let mut next = *s;
                next.replicas[r].hollow = lsn;
                steps.push(self, Step::Fold { replica: r }, next);
            }
            if self.is(Mutant::IncrementBeforeFlip) {
                self.increment(s, a, r, history, steps);
            }
        }
    }

    fn applied(&self, s: &State, a: usize, r: usize, at: Place) -> State {
        let mut next = *s;
        let lsn = s.lsn(at);
        let entry = *s.entry(at);
        let replica = &mut next.replicas[r];
        replica.log = at;
        if entry.is_view() {
            // Durable before it is acknowledged, with all before it.
            replica.durable = lsn;
            replica.version = replica.version.max(entry.version);
            // An older View met while catching up teaches it nothing.
            let taught = lsn > s.attempts[a].links[r].tip || self.is(Mutant::OldViewTeaches);
            replica.continuous |= u8::from(taught);
            let listed = has(entry.in_sync, r) && entry.rules().any(|(known, _)| has(known, r));
            if taught && listed {
                replica.quorum = 1;
                replica.damaged = 0;
            }
        }
        let durable = replica.durable;
        next.attempts[a].links[r].applied = lsn;
        next.attempts[a].links[r].durable = durable;
        next
    }

    /// The mutant's increment: the receiver claims to be at the boundary before it is.
    fn increment(&self, s: &State, a: usize, r: usize, history: Place, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        let replica = &s.replicas[r];
        let counted = attempt.open_views().any(|(_, view)| has(view.in_sync, r));
        let stable = self.reached(attempt, |link| link.durable).unwrap_or(0).min(attempt.io.commit);
        if attempt.phase == SERVING && !counted && replica.mixed == 0 && s.lsn(replica.log) < stable
        {
            let mut next = *s;
            let replica = &mut next.replicas[r];
            (replica.log, replica.durable, replica.mixed) = (s.prefix(history, stable), stable, 1);
            next.attempts[a].links[r].applied = stable;
            next.attempts[a].links[r].durable = stable;
            let step = Step::ShowIncrement { attempt: a, replica: r, lsn: stable };
            steps.push(self, step, next);
        }
        if replica.mixed == 1 {
            let mut next = *s;
            next.replicas[r].mixed = 0;
            steps.push(self, Step::FinishIncrement { attempt: a, replica: r }, next);
        }
    }

    fn write(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        if s.budget.writes == 0 || usize::from(attempt.length) == ENTRIES {
            return;
        }
        let mut next = *s;
        next.budget.writes -= 1;
        let attempt = &mut next.attempts[a];
        attempt.entries[usize::from(attempt.length)] = Entry { kind: WRITE, ..Entry::default() };
        attempt.length += 1;
        let lsn = attempt.last();
        steps.push(self, Step::Write { attempt: a, lsn }, next);
    }

    /// Flush by a client of all that is sequenced, or a sync that starts by itself: done when
    /// stable reaches it. Between flushes no process need sync: a power cut leaves what happened
    /// to be written back, and a target that knows no more than that promises nothing.
    fn flush(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        if s.budget.flushes == 0 || attempt.io.flush > 0 {
            return;
        }
        let mut next = *s;
        next.budget.flushes -= 1;
        next.attempts[a].io.flush = attempt.last();
        steps.push(self, Step::Flush { attempt: a, lsn: attempt.last() }, next);
    }

    /// Drop, return, and the View that makes a member continuous again. A target may take any
    /// member for lost or slow at any time, so each is tried.
    fn change_views(&self, s: &State, a: usize, steps: &mut Steps) {
        let attempt = &s.attempts[a];
        let Some(newest) = attempt.newest_view() else { return };
        if s.budget.views == 0 || usize::from(attempt.length) == ENTRIES {
            return;
        }
        if self.is(Mutant::StuckView) && attempt.pending_views().next().is_some() {
            return;
        }
        let listed = newest.rules().fold(0, |set, (known, _)| set | known);
        for r in 0..self.bounds.replicas() {
            let caught_up = attempt.links[r].state == LINK_FED
                && attempt.links[r].applied >= attempt.links[r].tip;
            let in_sync = if has(newest.in_sync, r) {
                newest.in_sync & !(1 << r)
            } else if caught_up && has(listed, r) {
                newest.in_sync | 1 << r
            } else {
                continue;
            };
            let enough = newest.rules().all(|(known, cf)| count(in_sync & known) >= cf);
            if enough || (self.is(Mutant::DropBelowCf) && in_sync != 0) {
                self.append_view(s, a, in_sync, steps);
            }
        }
        let renews = members(newest.in_sync).any(|r| {
            s.is_live(a, r)
                && attempt.links[r].state == LINK_FED
                && s.replicas[r].continuous == 0
                && attempt.links[r].applied >= attempt.links[r].tip
        });
        if renews {
            self.append_view(s, a, newest.in_sync, steps);
        }
    }

    fn append_view(&self, s: &State, a: usize, in_sync: Set, steps: &mut Steps) {
        let mut next = *s;
        next.budget.views -= 1;
        let attempt = &mut next.attempts[a];
        let Some(newest) = attempt.newest_view() else { return };
        attempt.append(Entry { kind: VIEW, in_sync, ..*newest });
        let lsn = attempt.last();
        steps.push(self, Step::View { attempt: a, lsn, in_sync }, next);
    }

    /// The target is no more: it has drained and closes its sessions, or a supervisor that saw it
    /// die does so on its behalf. The second is the first at any moment, so the second is modelled.
    fn shut_down(&self, s: &State, a: usize, steps: &mut Steps) {
        if s.budget.closes == 0 {
            return;
        }
        let mut next = *s;
        next.budget.closes -= 1;
        next.attempts[a].phase = ENDED;
        steps.push(self, Step::Shutdown { attempt: a }, next);
    }

    /// The close keeps the continuous flag, it never sets it.
    fn close_each(&self, s: &State, a: usize, steps: &mut Steps) {
        for r in 0..self.bounds.replicas() {
            if s.attempts[a].links[r].state != LINK_FED || !s.is_live(a, r) {
                continue;
            }
            let mut next = *s;
            next.attempts[a].links[r].state = LINK_NONE;
            let lsn = s.lsn(s.replicas[r].log);
            let replica = &mut next.replicas[r];
            replica.durable = lsn;
            replica.session = 0;
            replica.closed = 1;
            if self.is(Mutant::CloseMakesContinuous) {
                replica.continuous = 1;
            }
            steps.push(self, Step::Close { attempt: a, replica: r }, next);
        }
    }
}

impl Attempt {
    pub(crate) fn append(&mut self, entry: Entry) {
        self.entries[usize::from(self.length)] = entry;
        self.length += 1;
    }
}
