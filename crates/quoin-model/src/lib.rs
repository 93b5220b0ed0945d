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
//!
//! What steps are merged, and why that hides nothing, stands in `docs/proof.md`.

pub mod bounds;
mod change;
pub mod explore;
mod faults;
mod history;
mod io;
pub mod mutants;
mod open;
mod settle;
pub mod state;
pub mod step;
mod visited;

use bounds::Model;
use explore::{Limits, after, explore};
use mutants::Mutant;
use std::time::Duration;

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
    Mutant::ALL.iter().map(|mutant| mutant.name())
}

/// Explores the world of a mutant until an invariant breaks. `None`: no mutant of that name, or
/// it was not caught within its bounds (which is a defect of the model).
pub fn check_mutant(name: &str) -> Option<Caught> {
    let mutant = Mutant::named(name)?;
    let model = Model { bounds: mutant.bounds(), mutant: Some(mutant) };
    let limits = Limits {
        states: 60_000_000,
        time: Duration::from_secs(900),
        threads: threads(),
        traces: true,
    };
    let mut from = model.initial();
    let mut way = Vec::new();
    let mut states = 0;
    if let Some(way_point) = mutant.way_point() {
        let explored = explore(&model, &from, limits, Some(way_point));
        states += explored.states;
        way = explored.found?.steps;
        from = after(&model, &way)?;
    }
    let explored = explore(&model, &from, limits, None);
    let found = explored.found?;
    way.extend(found.steps);
    let trace = way.iter().map(ToString::to_string).collect();
    Some(Caught { invariant: found.invariant, states: states + explored.states, trace })
}

/// How many threads a search uses: two at most, so that it can run beside other work.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(2))
}
