//! Two controllers of one volume, in the swarm `controllers`: as the volume goes to the other host, its
//! record is recovered there, in a term of its own. The former controller is on the host that lost the
//! volume and goes on: its target asks it alone, until a pool shows the newer term.
//! Pools learn of that by the recovery, or later by the grants that are shown to them. At times both
//! controllers recover their records at once: two terms of one number, of which each pool believes
//! the one that it learns of first. A person recovers once more at the end.

use std::collections::{BTreeMap, BTreeSet};

use quoin_types::message::{Failure, FromReplica};
use quoin_types::term::TermOrder;
use quoin_types::{Epoch, Incarnation, SessionKey, Term, TermId, mutant};

use super::World;
use super::checkers::Observation;
use crate::control::{Answer, Question, Record};
use crate::network::ConnectionId;
use crate::random::Random;
use crate::swarm::Swarm;

pub(crate) struct Terms {
    random: Random,
    /// Draws recoveries at two controllers at once.
    rivals: Random,
    on: bool,
    former: Option<Former>,
    /// By pool.
    pools: BTreeMap<usize, KnownTerms>,
    /// By target host, the highest term that it knows.
    targets: BTreeMap<usize, Term>,
    /// By incarnation, the term of its grant.
    grants: BTreeMap<u128, Term>,
    /// Incarnations of grants of a controller that began its term beside another one.
    of_rivals: BTreeSet<u128>,
    /// Connections that a pool did not believe.
    turned_away: BTreeSet<ConnectionId>,
}

/// The terms that a pool knows.
#[derive(Clone, Copy, Default)]
struct KnownTerms {
    /// The highest that it was ever shown.
    highest: Term,
    /// The one in force in its process.
    known: Term,
}

/// The controller whose record was recovered elsewhere.
struct Former {
    record: Record,
    /// The target that asks it.
    target: usize,
    /// It knows of a higher term.
    is_informed: bool,
    ended: bool,
}

impl Terms {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        Self {
            random: Random::new(seed ^ 0x0074_6572_6d73),
            rivals: Random::new(seed ^ 0x7269_7661_6c73),
            on: swarm == Swarm::Controllers,
            former: None,
            pools: BTreeMap::new(),
            targets: BTreeMap::new(),
            grants: BTreeMap::new(),
            of_rivals: BTreeSet::new(),
            turned_away: BTreeSet::new(),
        }
    }

    /// Returns true if this target's questions go to the former controller.
    pub fn asks_former(&self, target: usize) -> bool {
        self.former.as_ref().is_some_and(|former| former.target == target && !former.ended)
    }

    pub fn was_turned_away(&mut self, id: ConnectionId) -> bool {
        self.turned_away.remove(&id)
    }

    /// The term of the grant that made this incarnation.
    pub fn grant_of(&self, incarnation: Incarnation) -> Term {
        self.grants.get(&incarnation.0).copied().unwrap_or_default()
    }

    pub fn is_on(&self) -> bool {
        self.on
    }

    pub fn is_of_a_rival(&self, session: SessionKey) -> bool {
        self.of_rivals.contains(&session.incarnation.0)
    }

    /// By the controller's orders, or by a grant.
    pub fn pool_learns(&mut self, pool: usize, term: Term) {
        let learned = self.pools.entry(pool).or_default();
        if term.compare_with(learned.known) == TermOrder::Higher {
            learned.known = term;
        }
        if term.number > learned.highest.number {
            learned.highest = term;
        }
    }

    /// A pool goes by what it has on its disk.
    pub fn pool_restarts(&mut self, pool: usize) {
        if let Some(learned) = self.pools.get_mut(&pool) {
            learned.known = match mutant::is("term-not-remembered") {
                true => Term::default(),
                false => learned.highest,
            };
        }
    }

    /// The term that a pool's process goes by.
    fn known_at(&self, pool: usize) -> Term {
        self.pools.get(&pool).map(|learned| learned.known).unwrap_or_default()
    }

    /// A session that was let in opens nothing once its pool knows a newer term.
    pub fn may_open(&self, pool: usize, session: SessionKey) -> bool {
        !self.grant_of(session.incarnation).compare_with(self.known_at(pool)).is_refused()
    }

    /// Returns true if the controller of this term orders anything at the pool.
    pub fn orders(&self, pool: usize, term: Term) -> bool {
        !term.compare_with(self.known_at(pool)).is_refused()
    }

    /// The highest term that a pool was ever shown.
    pub fn highest_at(&self, pool: usize) -> Term {
        self.pools.get(&pool).map(|known| known.highest).unwrap_or_default()
    }

    pub fn former_term(&self) -> Term {
        self.former.as_ref().map(|former| former.record.term).unwrap_or_default()
    }

    /// The former controller knows of a higher term.
    pub fn is_former_informed(&self) -> bool {
        self.former.as_ref().is_some_and(|former| former.is_informed)
    }
}

impl World {
    /// The volume is about to go to the other host: its record may be recovered there.
    pub(crate) fn recover_elsewhere(&mut self) {
        let terms = &mut self.control.terms;
        if !terms.on || terms.random.percent(40) {
            return;
        }
        let target = self.control.record.owner;
        terms.former = Some(Former {
            record: self.control.record.clone(),
            target,
            is_informed: false,
            ended: false,
        });
        let number = Term::next_number([self.control.record.term]).unwrap_or(u64::MAX);
        let id = TermId(u128::from(terms.random.draw()));
        self.control.record.term = Term { number, id };
        self.stats.control.terms += 1;
        let term = self.control.record.term;
        self.trace.line(self.schedule.now(), || format!("the record is recovered in term {term}"));
        let rival = self.begin_rival_term();
        for pool in 0..self.pools.len() {
            let is_here = self.pools[pool].process.is_some() && !self.pools[pool].paused;
            if is_here
                && let Some(rival) = rival
                && self.control.terms.rivals.percent(40)
            {
                self.control.terms.pool_learns(pool, rival);
            }
            if is_here && self.control.terms.random.percent(70) {
                self.control.terms.pool_learns(pool, term);
            }
        }
    }

    /// A person may recover the record of the former controller as well, at the same time.
    fn begin_rival_term(&mut self) -> Option<Term> {
        let terms = &mut self.control.terms;
        let former = terms.former.as_mut().filter(|_| terms.rivals.percent(30))?;
        let id = TermId(u128::from(terms.rivals.draw()));
        let rival = Term { number: self.control.record.term.number, id };
        former.record.term = rival;
        self.stats.control.rival_terms += 1;
        let what = format!("the former controller begins term {rival} as well");
        self.trace.line(self.schedule.now(), || what);
        Some(rival)
    }

    /// A pool checks the grant that a Hello shows. False: it turns the session away, and shows the
    /// newer term.
    pub(crate) fn accepts_grant(
        &mut self,
        id: ConnectionId,
        target: usize,
        pool: usize,
        session: SessionKey,
    ) -> bool {
        if !self.control.terms.on {
            return true;
        }
        let term = self.control.terms.grant_of(session.incarnation);
        self.control.terms.pool_learns(pool, term);
        let known = self.control.terms.known_at(pool);
        if !term.compare_with(known).is_refused() {
            self.observe(&Observation::LetIn { pool, term });
            return true;
        }
        self.stats.control.terms_refused += 1;
        self.control.terms.turned_away.insert(id);
        self.target_learns(target, known);
        self.grant_again(target, session);
        false
    }

    /// A target that owns the volume by the record of the newer term reports, and is granted its very
    /// epoch anew; one that no record knows of is found by another recovery.
    fn grant_again(&mut self, target: usize, session: SessionKey) {
        let owns = self.control.record.owner == target && !self.control.terms.asks_former(target);
        let is_newest = session.epoch >= self.control.record.epoch
            && session.epoch >= self.checkers.durability.served_epoch();
        if owns && is_newest && self.control.terms.random.percent(50) {
            self.control.record.edit(|volume| {
                volume.opened.epoch = session.epoch.0;
                volume.opened.incarnation.0 = session.incarnation;
            });
            self.control.terms.grants.insert(session.incarnation.0, self.control.record.term);
        }
    }

    /// The target keeps the term, and its controller learns of it with the next call.
    fn target_learns(&mut self, target: usize, term: Term) {
        let learned = self.control.terms.targets.entry(target).or_default();
        if term.compare_with(*learned) == TermOrder::Higher {
            *learned = term;
        }
        let Some(former) =
            self.control.terms.former.as_mut().filter(|former| former.target == target)
        else {
            return;
        };
        if term.number > former.record.term.number {
            former.is_informed = true;
        }
        if former.record.term.is_ended_by(term) && !former.ended {
            former.ended = true;
            self.stats.control.controllers_ended += 1;
            let what = format!("the former controller hears of term {term} and ends");
            self.trace.line(self.schedule.now(), || what);
        }
    }

    /// The former controller's compare-and-swap. Nothing: it cannot grant what is asked for.
    pub(crate) fn asked_of_former(&mut self, target: usize, question: &Question) -> Option<Answer> {
        let former = self.control.terms.former.as_mut()?;
        let own = former.record.term;
        if let Question::Acquire { at_least, .. } = question
            && at_least.term_number() > own.number
        {
            return None;
        }
        let answer = former.record.execute(target, question).ok().flatten()?;
        if let Answer::Granted { incarnation, epoch, .. } = &answer {
            self.note_grant(true, *incarnation, *epoch);
        }
        self.trace.line(self.schedule.now(), || format!("former controller answers {answer:?}"));
        Some(answer)
    }

    /// An epoch was granted: of the term of the controller that did, and apart from all others.
    pub(crate) fn note_grant(&mut self, by_former: bool, incarnation: Incarnation, epoch: Epoch) {
        if !self.control.terms.on {
            return;
        }
        let term = self.control.term_of(by_former);
        self.control.terms.grants.insert(incarnation.0, term);
        if by_former && term.number == self.control.record.term.number {
            self.control.terms.of_rivals.insert(incarnation.0);
        }
        self.observe(&Observation::EpochGranted { by_former, epoch });
    }

    /// The name of the controller leads all to the one that rules, and all learn its term.
    pub(crate) fn spread_term(&mut self) {
        let own = self.control.record.term;
        let former = self.control.terms.former_term();
        if former.number == own.number && former.id != own.id {
            let number = Term::next_number([own]).unwrap_or(u64::MAX);
            let id = TermId(u128::from(self.control.terms.rivals.draw()));
            self.control.record.term = Term { number, id };
            self.stats.control.terms += 1;
        }
        let term = self.control.record.term;
        for target in 0..self.targets.len() {
            self.target_learns(target, term);
        }
        for pool in 0..self.pools.len() {
            if self.control.terms.on && self.pools[pool].process.is_some() {
                self.control.terms.pool_learns(pool, term);
            }
        }
    }

    /// For a pool that turns a session away at its Open.
    pub(crate) fn refuse_former(&mut self, id: ConnectionId, session: SessionKey) {
        let message = FromReplica::Refuse { promised: Epoch::ZERO, failure: Failure::Protocol };
        self.pool_sends(id, session, &message);
        self.pool_closes(id);
    }
}
