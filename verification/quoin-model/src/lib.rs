//! The replication protocol of `docs/replication.md` as an explicit-state model.
//!
//! A [`bounds::Bounds`] says how large a world is: replicas, attempts to open the volume (each
//! an epoch of its own; several targets are alive at once), writes, flushes, power cuts, changes
//! of membership. [`explore::explore`] visits every state within it, [`explore::walk`] walks at
//! random where that is too much. Each state is held to the invariants by name.
//!
//! | module | idea |
//! |---|---|
//! | [`state`] | what a state is, and which states are one under exchanged replicas |
//! | `open`, `io`, `change`, `faults` | the steps |
//! | `settle` | what follows from a step at once, and the invariants |
//! | [`mutants`] | each rule as a switch that breaks it |
//! | [`explore`] | search, traces, walks |
//! | [`terms`] | two controllers: a model of its own |
//! | [`points`] | points over several volumes: a model of its own |
//! | [`mirror`] | two clusters and one mirrored group: a model of its own |
//! | [`clients`] | clients of a shared volume that send again: a model of its own |
//!
//! `docs/proof.md` states which steps are merged, and why that hides nothing.

pub mod bounds;
mod change;
pub mod clients;
pub mod explore;
mod faults;
mod frontier;
mod history;
mod io;
pub mod mirror;
pub mod mutants;
mod open;
pub mod points;
mod settle;
pub mod state;
pub mod step;
pub mod terms;
mod visited;

use bounds::Model;
use explore::{GOAL_REACHED, Limits, after, explore};
use mutants::Mutant;
use state::State;
use std::time::Duration;
use step::Step;

/// A mutant that the model caught.
#[derive(Clone, Debug)]
pub struct Caught {
    /// The invariant that broke.
    pub invariant: &'static str,
    /// States visited until then.
    pub states: usize,
    /// The shortest way to it, a sentence a step.
    pub trace: Vec<String>,
}

/// The names of all mutants that the model can express.
pub fn mutant_names() -> impl Iterator<Item = &'static str> {
    let of_mirrors = mirror::Broken::ALL.iter().map(|broken| broken.name());
    Mutant::ALL.iter().map(|mutant| mutant.name()).chain(of_mirrors)
}

/// States after which the search for what a broken rule of a mirror does ends.
const MIRROR_STATES_MAX: usize = 3_000_000;

/// Explores the world of a mutant until an invariant breaks. `None`: no mutant of that name, or
/// it was not caught within its bounds (which is a defect of the model).
pub fn check_mutant(name: &str) -> Option<Caught> {
    if let Some(broken) = mirror::Broken::ALL.iter().find(|broken| broken.name() == name) {
        let found = mirror::search(broken.bounds(), Some(*broken), MIRROR_STATES_MAX, false);
        let (invariant, trace) = found.violation?;
        return Some(Caught { invariant, states: found.states, trace });
    }
    let mutant = Mutant::named(name)?;
    let model = Model { bounds: mutant.bounds(), mutant: Some(mutant) };
    let limits = Limits {
        memory_bytes: 4 << 30,
        time: Duration::from_secs(900),
        threads: threads(),
        traces: true,
        progress: None,
    };
    if let Some(stuck) = mutant.stuck() {
        let (states, way, goes_on) = progress(&model, stuck, limits)?;
        let mut trace: Vec<String> = way.iter().map(ToString::to_string).collect();
        trace.push("no step that is left leads to an acknowledged write".into());
        return (!goes_on).then_some(Caught { invariant: "Progress", states, trace });
    }
    let mut from = model.initial();
    let mut way = Vec::new();
    let mut states = 0;
    if let Some(way_point) = mutant.way_point() {
        let explored = explore(&model, &from, limits, Some(way_point));
        states += explored.states;
        let found = explored.found?;
        way = found.steps;
        if found.invariant != GOAL_REACHED {
            let trace = way.iter().map(ToString::to_string).collect();
            return Some(Caught { invariant: found.invariant, states, trace });
        }
        from = after(&model, &way)?;
    }
    let explored = explore(&model, &from, limits, None);
    let found = explored.found?;
    way.extend(found.steps);
    let trace = way.iter().map(ToString::to_string).collect();
    Some(Caught { invariant: found.invariant, states: states + explored.states, trace })
}

/// From the nearest stuck state: the states looked at, the way to it, and whether a write can
/// still be acknowledged from there.
fn progress(
    model: &Model,
    stuck: fn(&State) -> bool,
    limits: Limits,
) -> Option<(usize, Vec<Step>, bool)> {
    let to_stuck = explore(model, &model.initial(), limits, Some(stuck));
    let way = to_stuck.found?.steps;
    let from = after(model, &way)?;
    let onwards = explore(model, &from, limits, Some(|s| s.owed != history::EMPTY));
    let goes_on = onwards.found.is_some_and(|found| found.invariant == GOAL_REACHED);
    (goes_on || onwards.complete).then_some((to_stuck.states + onwards.states, way, goes_on))
}

/// How many threads a search uses: two at most, so that it can run beside other work.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bounds::{Bounds, WORLDS};

    const LIMITS: Limits = Limits {
        memory_bytes: 1 << 30,
        time: Duration::from_secs(300),
        threads: 2,
        traces: true,
        progress: None,
    };

    #[test]
    fn every_mutant_is_caught_and_its_trace_ends_in_the_harm() {
        // Each within a second or so of a release build; the deepest are left to the command.
        let deep = [
            Mutant::JointDropped,
            Mutant::SyncRetried,
            Mutant::CloseMakesContinuous,
            Mutant::RollbackIgnored,
        ];
        for mutant in Mutant::ALL.iter().filter(|mutant| !deep.contains(mutant)) {
            let caught = check_mutant(mutant.name());
            let caught = caught.unwrap_or_else(|| panic!("{} is not caught", mutant.name()));
            assert!(caught.trace.len() > 4, "{}: {:?}", mutant.name(), caught.trace);
        }
    }

    #[test]
    fn a_dead_newcomer_and_a_stuck_view_are_passed_by_the_rules_themselves() {
        for mutant in [Mutant::CannotGiveUp, Mutant::StuckView] {
            let model = Model { bounds: mutant.bounds(), mutant: None };
            let stuck = mutant.stuck().expect("a rule of progress");
            let (_, _, goes_on) = progress(&model, stuck, LIMITS).expect("the state exists");
            assert!(goes_on, "{}", mutant.name());
        }
    }

    #[test]
    fn small_worlds_are_visited_whole_without_a_violation() {
        let small = Bounds::GOAL.attempts(2).writes(1);
        let worlds = [
            small,
            small.flushes(0).views(1).power_cuts(0),
            small.rf(2, 1),
            small.power_cuts(0).flushes(0).attempts(1).add(1),
        ];
        for bounds in worlds {
            let model = Model { bounds, mutant: None };
            let explored = explore(&model, &model.initial(), LIMITS, None);
            assert!(explored.complete, "{bounds}: {:?}", explored.found);
        }
    }

    #[test]
    fn a_search_visits_as_many_states_with_one_thread_as_with_two() {
        let model = Model { bounds: WORLDS[0], mutant: None };
        let of = |threads| {
            let limits = Limits { threads, traces: false, ..LIMITS };
            let explored = explore(&model, &model.initial(), limits, None);
            (explored.states, explored.transitions, explored.depth)
        };
        assert_eq!(of(1), of(2));
    }
}
