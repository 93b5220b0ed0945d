//! Two or three controllers of one volume, each with a target on its host, and three pools: every
//! order of recoveries, grants, Hellos, Opens and restarts within bounds. The rules are those of
//! "Two controllers" in `docs/replication.md`.
//!
//! A target serves once OQ pools have it open by one grant. That is all of the data path here: the
//! other modules define what an epoch is good for.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet, VecDeque};

const POOLS: usize = 3;
const OPEN_QUORUM: usize = 2;
/// The former controller, and two that may be restored from its records.
const CONTROLLERS: usize = 3;

/// A rule of terms that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// A pool takes a grant of a former term.
    FormerBelieved,
    /// A pool takes the second of one number as well.
    RivalBelieved,
    /// A pool forgets over a restart the term that it received.
    Forgotten,
    /// A pool holds the grant against its term at the Hello alone.
    NotAtTheOpen,
    /// Epochs of all terms are counted on from the record.
    NotInTheEpoch,
    /// A controller that received a higher term grants on.
    GoesOn,
}

impl Broken {
    pub const ALL: &'static [Broken] = &[
        Broken::FormerBelieved,
        Broken::RivalBelieved,
        Broken::Forgotten,
        Broken::NotAtTheOpen,
        Broken::NotInTheEpoch,
        Broken::GoesOn,
    ];
}

/// A term; two controllers may begin the same number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Term {
    number: u8,
    id: u8,
}

/// How a term stands to the highest that was heard of.
#[derive(PartialEq, Eq)]
enum Standing {
    Same,
    Higher,
    Former,
    Rival,
}

impl Term {
    fn standing(self, known: Term) -> Standing {
        match self.number.cmp(&known.number) {
            Ordering::Greater => Standing::Higher,
            Ordering::Less => Standing::Former,
            Ordering::Equal if self.id == known.id => Standing::Same,
            Ordering::Equal => Standing::Rival,
        }
    }

    fn is_over_for(self, known: Term) -> bool {
        matches!(self.standing(known), Standing::Former | Standing::Rival)
    }
}

/// Compared in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
struct Epoch {
    term: u8,
    opening: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Controller {
    term: Term,
    epoch: Epoch,
    rules: bool,
    ended: bool,
    /// The controller received a higher term than its own.
    told: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Pool {
    /// On its media.
    heard: Term,
    /// Term that the pool's process knows.
    known: Term,
    promised: Epoch,
    /// The target that promised it, and has it open; and the term of its grant.
    open: Option<(usize, Term)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Grant {
    epoch: Epoch,
    term: Term,
}

/// The target of the host with this controller: it asks no other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Target {
    heard: Term,
    grant: Option<Grant>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct State {
    controllers: [Controller; CONTROLLERS],
    pools: [Pool; POOLS],
    targets: [Target; CONTROLLERS],
    /// A target that this pool let in by a grant, and of which it has not seen the Open: one at a
    /// time.
    let_in: Option<(usize, usize, Grant)>,
    /// The newest term in which a target served.
    served: Term,
    grants: u8,
    restarts: u8,
}

/// Result of a search of all states.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Terms {
    pub states: usize,
    /// The invariant that broke, and what happened until then.
    pub violation: Option<(&'static str, Vec<String>)>,
}

/// How far a search goes.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub grants: u8,
    pub restarts: u8,
}

impl Bounds {
    pub const GOAL: Bounds = Bounds { grants: 4, restarts: 1 };
}

type Next = (String, State, Option<&'static str>);

struct World {
    bounds: Bounds,
    broken: Option<Broken>,
}

impl World {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    /// Returns true if a pool refuses the term of a grant.
    fn refuses(&self, term: Term, known: Term) -> bool {
        match term.standing(known) {
            Standing::Former => !self.is(Broken::FormerBelieved),
            Standing::Rival => !self.is(Broken::RivalBelieved),
            Standing::Same | Standing::Higher => false,
        }
    }

    fn hear(pool: &mut Pool, term: Term) {
        if term.standing(pool.known) == Standing::Higher {
            pool.known = term;
        }
        if term.standing(pool.heard) == Standing::Higher {
            pool.heard = term;
        }
    }

    fn steps(&self, state: &State) -> Vec<Next> {
        let mut next = Vec::new();
        for c in 1..CONTROLLERS {
            self.recover(state, c, &mut next);
        }
        for t in 0..CONTROLLERS {
            self.ask(state, t, &mut next);
            for p in 0..POOLS {
                self.hello(state, t, p, &mut next);
            }
        }
        self.open(state, &mut next);
        if state.restarts < self.bounds.restarts {
            for p in 0..POOLS {
                let mut after = *state;
                after.restarts += 1;
                let pool = &mut after.pools[p];
                pool.known = if self.is(Broken::Forgotten) { Term::default() } else { pool.heard };
                pool.open = None;
                after.let_in = after.let_in.filter(|(_, at, _)| *at != p);
                next.push((format!("pool {p} starts again"), after, None));
            }
        }
        next
    }

    /// The records are recovered from what these pools tell: they hear of the term before they
    /// tell.
    fn recover(&self, state: &State, c: usize, next: &mut Vec<Next>) {
        if state.controllers[c].rules {
            return;
        }
        for told in 1..1u8 << POOLS {
            let tells = |p: &usize| told & (1 << p) != 0;
            let heard = (0..POOLS).filter(tells).map(|p| state.pools[p].heard);
            let number = heard.map(|term| term.number).max().unwrap_or_default() + 1;
            let term = Term { number, id: c as u8 };
            let mut after = *state;
            let promised = (0..POOLS).filter(tells).map(|p| state.pools[p].promised).max();
            let epoch = promised.unwrap_or_default();
            after.controllers[c] = Controller { term, epoch, rules: true, ..Controller::default() };
            for p in (0..POOLS).filter(tells) {
                Self::hear(&mut after.pools[p], term);
            }
            next.push((format!("controller {c} recovers from pools {told:03b}"), after, None));
        }
    }

    /// A target asks for an epoch, and shows the highest term that it heard of.
    fn ask(&self, state: &State, t: usize, next: &mut Vec<Next>) {
        let controller = state.controllers[t];
        if !controller.rules || controller.ended || state.grants == self.bounds.grants {
            return;
        }
        let mut after = *state;
        let heard = after.targets[t].heard;
        let there = &mut after.controllers[t];
        if heard.number > controller.term.number {
            there.told = true;
            if !self.is(Broken::GoesOn) {
                there.ended = true;
                next.push((format!("controller {t} hears of term {}", heard.number), after, None));
                return;
            }
        }
        let last = controller.epoch;
        let counted_on = last.term == controller.term.number || self.is(Broken::NotInTheEpoch);
        let epoch = match counted_on {
            true => Epoch { opening: last.opening + 1, ..last },
            false => Epoch { term: controller.term.number, opening: 1 },
        };
        let told = there.told;
        (there.epoch, after.grants) = (epoch, state.grants + 1);
        let term = controller.term;
        let target = &mut after.targets[t];
        target.grant = Some(Grant { epoch, term });
        if term.standing(target.heard) == Standing::Higher {
            target.heard = term;
        }
        let violation = told.then_some("OldControllerEnds");
        next.push((
            format!("controller {t} grants epoch {}/{}", epoch.term, epoch.opening),
            after,
            violation,
        ));
    }

    fn hello(&self, state: &State, t: usize, p: usize, next: &mut Vec<Next>) {
        let Some(grant) = state.targets[t].grant.filter(|_| state.let_in.is_none()) else { return };
        let mut after = *state;
        let pool = &mut after.pools[p];
        Self::hear(pool, grant.term);
        let known = pool.known;
        if self.refuses(grant.term, known) {
            let target = &mut after.targets[t];
            if known.standing(target.heard) != Standing::Higher {
                return;
            }
            target.heard = known;
            return next.push((
                format!("pool {p} shows target {t} term {}", known.number),
                after,
                None,
            ));
        }
        after.let_in = Some((t, p, grant));
        next.push((format!("pool {p} lets target {t} in"), after, None));
    }

    fn open(&self, state: &State, next: &mut Vec<Next>) {
        let Some((t, p, grant)) = state.let_in else { return };
        let mut after = *state;
        after.let_in = None;
        let pool = &mut after.pools[p];
        let late = self.refuses(grant.term, pool.known) && !self.is(Broken::NotAtTheOpen);
        let again = pool.open == Some((t, grant.term)) && pool.promised == grant.epoch;
        if late || (grant.epoch <= pool.promised && !again) {
            return next.push((format!("pool {p} refuses target {t}"), after, None));
        }
        let heard = pool.heard;
        (pool.promised, pool.open) = (grant.epoch, Some((t, grant.term)));
        let has = |pool: &&Pool| pool.open == Some((t, grant.term)) && pool.promised == grant.epoch;
        let serves = after.pools.iter().filter(has).count() >= OPEN_QUORUM;
        let overtaken = grant.term.is_over_for(state.served);
        // Two that began one number may grant one epoch: neither has OQ pools by it then.
        let same = |(other, pool): (usize, &Pool)| {
            let by_another = pool.open.is_some_and(|(_, by)| by.number != grant.term.number);
            pool.promised == grant.epoch && by_another && other != p
        };
        let violation = if grant.term.is_over_for(heard) {
            Some("TermRefused")
        } else if after.pools.iter().enumerate().any(same) {
            Some("TermsApart")
        } else if serves && overtaken {
            Some("OneTermServes")
        } else {
            None
        };
        if serves && !overtaken {
            after.served = grant.term;
        }
        next.push((format!("target {t} opens pool {p}"), after, violation));
    }
}

/// Visits every state within the bounds, or stops at the first that an invariant forbids.
pub fn search(bounds: Bounds, broken: Option<Broken>) -> Terms {
    let world = World { bounds, broken };
    let mut first = State::default();
    first.controllers[0].rules = true;
    let (mut visited, mut waiting) = (HashSet::from([first]), VecDeque::from([first]));
    // A trace is wanted of mutants alone, whose searches are short.
    let mut came_from: HashMap<State, (State, String)> = HashMap::new();
    while let Some(state) = waiting.pop_front() {
        for (step, after, violation) in world.steps(&state) {
            if let Some(invariant) = violation {
                let mut trace = vec![step];
                let mut at = state;
                while let Some((before, how)) = came_from.get(&at) {
                    trace.push(how.clone());
                    at = *before;
                }
                trace.reverse();
                return Terms { states: visited.len(), violation: Some((invariant, trace)) };
            }
            if visited.insert(after) {
                if broken.is_some() {
                    came_from.insert(after, (state, step));
                }
                waiting.push_back(after);
            }
        }
    }
    Terms { states: visited.len(), violation: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_order_of_recoveries_grants_and_opens_breaks_a_term() {
        for bounds in [Bounds { grants: 2, restarts: 1 }, Bounds { grants: 3, restarts: 0 }] {
            let found = search(bounds, None);
            println!("{bounds:?}: {} states", found.states);
            assert_eq!(found.violation, None);
            assert!(found.states > 10_000, "{} states", found.states);
        }
    }

    #[test]
    fn each_rule_of_terms_is_needed() {
        for broken in Broken::ALL {
            let found = search(Bounds::GOAL, Some(*broken));
            let (invariant, trace) =
                found.violation.unwrap_or_else(|| panic!("{broken:?} breaks nothing"));
            println!("{broken:?}: {invariant} after {} states: {trace:#?}", found.states);
        }
    }
}
