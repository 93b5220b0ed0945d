//! Consequences of a step: Views become active, commit and stable move, IO starts, clients are
//! answered; and the invariants that all of these must keep.
//!
//! Knowledge and answers are as early as they can be. A target that receives an acknowledgement
//! later, or answers later, does nothing that a target without this delay does not do: its guards
//! only ever ask for more acknowledgements, and an answer changes nothing but what is owed. So the
//! earliest run contains every later one (`docs/proof.md`, "What is merged").

use crate::bounds::Model;
use crate::history::EMPTY;
use crate::mutants::Mutant;
use crate::state::*;

pub type Violation = &'static str;

impl Model {
    /// Lets everything follow that follows. The error names the invariant that broke.
    pub(crate) fn settle(&self, s: &mut State) -> Result<(), Violation> {
        self.settle_media(s);
        for a in 0..ATTEMPTS {
            if s.attempts[a].phase == RECOVERING && self.is_active(s, a, 1) {
                self.start(&mut s.attempts[a]);
            }
        }
        for a in 0..ATTEMPTS {
            if s.attempts[a].phase == SERVING {
                self.progress(s, a)?;
            }
        }
        self.forget_what_is_equal(s);
        Ok(())
    }

    /// With no power cut left, what is applied might as well be durable.
    fn settle_media(&self, s: &mut State) {
        let budget = &s.budget;
        let lossy = budget.power_cuts + budget.sync_failures + budget.damages;
        if lossy > 0 || self.is(Mutant::FoldAboveStable) {
            return;
        }
        for r in 0..REPLICAS {
            s.replicas[r].durable = s.lsn(s.replicas[r].log);
            let promised = s.replicas[r].promised;
            if promised > 0 && s.is_live(usize::from(promised) - 1, r) {
                let attempt = &mut s.attempts[usize::from(promised) - 1];
                if attempt.links[r].state == LINK_FED {
                    attempt.links[r].durable = attempt.links[r].applied;
                }
            }
        }
    }

    /// Returns true if the View at this index is durable on CF of its own in-sync set, under its
    /// rules.
    fn is_active(&self, s: &State, a: usize, index: u8) -> bool {
        self.is_active_by(s, a, index, s.attempts[a].entries[usize::from(index) - 1].in_sync)
    }

    fn is_active_by(&self, s: &State, a: usize, index: u8, by: Set) -> bool {
        let attempt = &s.attempts[a];
        let view = &attempt.entries[usize::from(index) - 1];
        let lsn = attempt.start + index;
        view.rules().all(|(known, cf)| {
            let holders = members(by & known).filter(|r| {
                attempt.links[*r].state == LINK_FED && attempt.links[*r].durable >= lsn
            });
            holders.count() >= usize::from(cf)
        })
    }

    /// Counted: in the in-sync set of the active View and of every pending one.
    fn counted(&self, attempt: &Attempt) -> Set {
        if self.is(Mutant::DroppedCounted) {
            return !0;
        }
        attempt.open_views().fold(!0, |set, (_, view)| set & view.in_sync)
    }

    /// The highest value that CF counted members have reached, under every rule.
    pub(crate) fn reached(&self, attempt: &Attempt, value: impl Fn(&Link) -> u8) -> Option<u8> {
        let counted = self.counted(attempt);
        let mut lowest = u8::MAX;
        for (_, view) in attempt.open_views() {
            for (known, cf) in view.rules() {
                let mut reached = [0u8; REPLICAS];
                let mut n = 0;
                for r in members(counted & known).filter(|r| attempt.links[*r].state == LINK_FED) {
                    reached[n] = value(&attempt.links[r]);
                    n += 1;
                }
                let cf = self.needed(attempt, known, cf);
                if n < cf {
                    return None;
                }
                reached[..n].sort_unstable();
                lowest = lowest.min(reached[n - cf]);
            }
        }
        Some(lowest)
    }

    fn needed(&self, attempt: &Attempt, known: Set, cf: u8) -> usize {
        let left = attempt.newest_view().map_or(cf, |view| count(view.in_sync & known));
        usize::from(if self.is(Mutant::DropBelowCf) { cf.min(left) } else { cf })
    }

    /// CF counted members answered a ping of this attempt and have answered no newer Open since:
    /// a replica answers one only when the leases it granted to others are over.
    fn has_lease(&self, s: &State, a: usize) -> bool {
        let attempt = &s.attempts[a];
        let counted = self.counted(attempt);
        let granted = |r: &usize| {
            usize::from(s.replicas[*r].promised) == a + 1 || has(attempt.late_grants, *r)
        };
        self.is(Mutant::AckWithoutLease)
            || attempt.open_views().flat_map(|(_, view)| view.rules()).all(|(known, cf)| {
                let grants = members(counted & known).filter(granted).count();
                grants >= self.needed(attempt, known, cf)
            })
    }

    /// Step 6 of an open: the first View is active. The target starts IO; whether any of it is
    /// ever seen depends on its lease.
    fn start(&self, attempt: &mut Attempt) {
        attempt.phase = SERVING;
        attempt.active = 1;
        attempt.io.commit = attempt.start + 1;
    }

    /// The first moment at which a client could be answered under this epoch: all answers that
    /// clients received must be in its history.
    fn first_answer(&self, s: &mut State, a: usize) -> Result<(), Violation> {
        let history = Place { attempt: a as u8 + 1, count: 1 };
        if !s.contains(history, s.flushed) {
            if s.consented == 0 {
                return Err("StableSurvives");
            }
            s.flushed = s.prefix(history, s.common(history, s.flushed));
        }
        if !s.contains(history, s.owed) {
            if s.consented == 0 && !s.tail_may_be_lost(history) {
                return Err("CommitSurvives");
            }
            s.owed = s.last_write(s.prefix(history, s.common(history, s.owed)));
        }
        s.consented = 0;
        s.attempts[a].io.served = 1;
        Ok(())
    }

    fn progress(&self, s: &mut State, a: usize) -> Result<(), Violation> {
        let pending: Vec<u8> = s.attempts[a].pending_views().map(|(index, _)| index).collect();
        for index in pending.into_iter().rev() {
            let own = self.is_active(s, a, index);
            if self.is(Mutant::ForeignActivation) {
                let active = usize::from(s.attempts[a].active) - 1;
                let by = s.attempts[a].entries[active].in_sync;
                if self.is_active_by(s, a, index, by) && !own {
                    return Err("OwnActivation");
                }
            }
            if own {
                s.attempts[a].active = index;
                break;
            }
        }
        let attempt = &s.attempts[a];
        let applied = self.reached(attempt, |link| link.applied);
        let commit = attempt.io.commit.max(applied.unwrap_or(0));
        let stable = self.reached(attempt, |link| link.durable).unwrap_or(0).min(commit);
        s.attempts[a].io.commit = commit;
        let history = Place { attempt: a as u8 + 1, count: s.attempts[a].length };
        let lying = self.bounds.lying_disks;
        let settled = if self.is(Mutant::FlushAtApplied) { commit } else { stable };
        let flush = s.attempts[a].io.flush;
        let held = applied.is_some_and(|applied| applied >= commit);
        if lying {
            // Entries that may be lost are not checked; below them nothing may be cut all the same.
            let settled = s.prefix(history, settled);
            if s.contains(settled, s.flushed) {
                s.flushed = settled;
            }
            return Ok(());
        }
        if !held || !self.has_lease(s, a) {
            return Ok(());
        }
        let epoch = s.attempts[a].epoch;
        if s.attempts.iter().any(|other| other.io.served == 1 && other.epoch > epoch) {
            return Err("LeaseExcludes");
        }
        if s.attempts[a].io.served == 0 {
            self.first_answer(s, a)?;
        }
        let media = self.bounds.durability_media && !self.is(Mutant::ReadAtCommitUnderMedia);
        let mut shown = if media { stable } else { commit };
        if self.is(Mutant::ReadNotHeld) {
            let attempt = &s.attempts[a];
            let set = self.counted(attempt);
            let fed = members(set).filter(|r| attempt.links[*r].state == LINK_FED);
            shown = fed.map(|r| attempt.links[r].applied).max().unwrap_or(0).max(shown);
        }
        if flush > 0 && settled >= flush {
            s.attempts[a].io.flush = 0;
        }
        let settled = s.prefix(history, settled);
        s.flushed = self.deeper(s, settled, s.flushed, "StableSurvives")?;
        let shown = s.last_write(s.prefix(history, shown));
        s.owed = self.deeper(s, shown, s.owed, "CommitSurvives")?;
        Ok(())
    }

    /// The deeper of two histories that a client knows of; one must begin with the other.
    fn deeper(
        &self,
        s: &State,
        new: Place,
        known: Place,
        invariant: Violation,
    ) -> Result<Place, Violation> {
        if s.contains(new, known) || self.bounds.lying_disks {
            Ok(new)
        } else if s.contains(known, new) {
            Ok(known)
        } else {
            Err(invariant)
        }
    }

    /// Makes states equal that differ only in values that no later step reads.
    fn forget_what_is_equal(&self, s: &mut State) {
        for a in 0..ATTEMPTS {
            if s.attempts[a].phase == UNUSED {
                break;
            }
            for r in 0..REPLICAS {
                let continuous = s.replicas[r].continuous == 1 || !s.is_live(a, r);
                let attempt = &mut s.attempts[a];
                if attempt.phase == OPENING {
                    continue;
                }
                attempt.links[r].ack = EMPTY;
                attempt.links[r].ack_flags = 0;
                if attempt.links[r].state != LINK_FED {
                    (attempt.links[r].applied, attempt.links[r].durable, attempt.links[r].tip) =
                        (0, 0, 0);
                } else if continuous && attempt.links[r].applied >= attempt.links[r].tip {
                    attempt.links[r].tip = 0;
                }
            }
        }
        // Entries of an ended attempt that no history reaches any more.
        for a in (0..ATTEMPTS).rev() {
            if s.attempts[a].phase != ENDED {
                continue;
            }
            let number = a as u8 + 1;
            let mut used = 0;
            let mut seen = |at: Place| {
                if at.attempt == number {
                    used = used.max(at.count);
                }
            };
            seen(s.owed);
            seen(s.flushed);
            s.replicas.iter().for_each(|replica| seen(replica.log));
            for attempt in &s.attempts {
                seen(attempt.base);
                attempt.links.iter().for_each(|link| seen(link.ack));
            }
            let attempt = &mut s.attempts[a];
            for entry in &mut attempt.entries[usize::from(used)..] {
                *entry = Entry::default();
            }
            attempt.length = used;
            if used == 0 {
                attempt.base = EMPTY;
                attempt.start = 0;
            }
        }
    }
}
