//! Every state within bounds, and whether a mirror is complete again once faults stop.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hash, Hasher};

use super::state::{Role, State};
use super::step::World;
use super::{Bounds, Broken};

/// Result of a search.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explored {
    pub states: usize,
    /// States from which it was looked whether the mirror is complete again.
    pub settled: usize,
    /// Every state within the bounds was visited.
    pub complete: bool,
    /// The invariant that broke, and what happened until then.
    pub violation: Option<(&'static str, Vec<String>)>,
}

/// Folds what it is given into 64 bits; a fingerprint goes through it once more as a key.
#[derive(Default)]
struct Folding(u64);

impl Folding {
    fn fold(&mut self, word: u64) {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        let product = u128::from(self.0.rotate_left(29) ^ word ^ ODD) * u128::from(ODD | 1 << 63);
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }
}

impl Hasher for Folding {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.fold(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, byte: u8) {
        self.fold(byte.into());
    }
    fn write_u64(&mut self, word: u64) {
        self.fold(word);
    }
    fn write_isize(&mut self, word: isize) {
        self.fold(word as u64);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

fn fingerprint(state: &State) -> u64 {
    let mut hasher = Folding::default();
    state.hash(&mut hasher);
    hasher.finish()
}

type Folded = BuildHasherDefault<Folding>;
type Parents = HashMap<u64, (u64, &'static str, u8), Folded>;

fn way(parents: &Parents, mut at: u64) -> Vec<String> {
    let mut steps = Vec::new();
    while let Some((before, how, side)) = parents.get(&at) {
        steps.push(format!("{}: {how}", if *side == 0 { 'A' } else { 'B' }));
        at = *before;
    }
    steps.reverse();
    steps
}

/// States of which each is followed on; of later ones one of so many is.
const FOLLOWED_ALL: usize = 100_000;
const FOLLOWED_OF: u64 = 32;

/// Visits every state within the bounds, or stops at the first that an invariant forbids. With
/// `progress`, each state is also followed on without callers and faults until nothing is left to do.
pub fn search(
    bounds: Bounds,
    broken: Option<Broken>,
    states_max: usize,
    progress: bool,
) -> Explored {
    let world = World { bounds, broken };
    let first = State::first(&bounds);
    let mut visited = HashSet::<u64, Folded>::default();
    visited.insert(fingerprint(&first));
    let mut waiting = VecDeque::from([first]);
    let mut parents = Parents::default();
    let mut steps = Vec::new();
    let mut settled = 0;
    while let Some(state) = waiting.pop_front() {
        let key = fingerprint(&state);
        if visited.len() > states_max {
            return Explored { states: visited.len(), settled, complete: false, violation: None };
        }
        let is_followed = progress && (settled < FOLLOWED_ALL || key.is_multiple_of(FOLLOWED_OF));
        if is_followed {
            settled += 1;
            if let Some(stuck) = stuck(&world, &state) {
                let violation = Some((stuck, way(&parents, key)));
                return Explored { states: visited.len(), settled, complete: false, violation };
            }
        }
        steps.clear();
        world.steps(&state, &mut steps);
        for (how, side, after) in &steps {
            let to = fingerprint(after);
            if !visited.insert(to) {
                continue;
            }
            if broken.is_some() || progress {
                parents.insert(to, (key, *how, *side as u8));
            }
            if let Some(invariant) = after.judge() {
                let mut trace = way(&parents, key);
                trace.push(format!("{}: {how}", if *side == 0 { 'A' } else { 'B' }));
                let violation = Some((invariant, trace));
                return Explored { states: visited.len(), settled, complete: false, violation };
            }
            waiting.push_back(*after);
        }
    }
    Explored { states: visited.len(), settled, complete: true, violation: None }
}

/// Steps after which a run that does not come to rest counts as one that never does.
const STEPS_MAX: usize = 400;

/// Follows one run on: nothing is lost any more, and whatever can be done is done.
fn stuck(world: &World, from: &State) -> Option<&'static str> {
    let mut state = *from;
    let mut steps = Vec::new();
    for _ in 0..STEPS_MAX {
        steps.clear();
        (0..2).for_each(|x| world.goes_on(&state, x, &mut steps));
        let next = steps.iter().find(|(how, _, _)| *how != "a word is lost");
        let Some((_, _, after)) = next else { return verdict(&state) };
        state = *after;
        if let Some(broken) = state.judge() {
            return Some(broken);
        }
    }
    Some("Progress: it never comes to rest")
}

/// At rest: where one side is Primary and the other one follows it, the copy has the last point; where both
/// were demoted, both hold the final one. Everything else waits for a person.
fn verdict(state: &State) -> Option<&'static str> {
    let [a, b] = &state.sides;
    let is_person = |role| matches!(role, Role::Diverged);
    if is_person(a.record.role) || is_person(b.record.role) {
        return None;
    }
    let both = a.record.role == Role::Primary && b.record.role == Role::Primary;
    if both {
        return state.was_forced.then_some(()).map_or(Some("Progress: two primaries"), |()| None);
    }
    let at_rest = |role| matches!(role, Role::Primary | Role::Secondary);
    if !at_rest(a.record.role) || !at_rest(b.record.role) {
        return Some("Progress: a transition does not end");
    }
    if a.record.is_unsure || b.record.is_unsure {
        return Some("Progress: unsure for ever");
    }
    if a.record.chain.top() != b.record.chain.top() {
        let is_primary = |role| role == Role::Primary;
        if state.was_forced && (is_primary(a.record.role) || is_primary(b.record.role)) {
            return None;
        }
        return Some("Progress: chains differ and nobody diverged");
    }
    let source = usize::from(a.record.chain.top().generation.cluster);
    let (from, to) = (&state.sides[source], &state.sides[1 - source]);
    let is_behind = to.record.receiving.is_some() && to.record.complete != from.record.common;
    if from.record.offered != 0 || from.record.cutting != 0 || is_behind {
        return Some("Progress: a point is never complete");
    }
    if from.record.last != 0 && to.record.complete != from.record.last {
        return Some("Progress: the final point is not there");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mirror::WORLDS;

    #[test]
    fn small_worlds_of_two_clusters_are_visited_whole_without_a_violation() {
        for bounds in WORLDS.iter().filter(|bounds| bounds.is_small()) {
            let found = search(*bounds, None, 1_000_000, true);
            assert_eq!(found.violation, None, "{}", bounds.name);
            assert!(found.complete && found.settled > 10_000, "{found:?}");
        }
    }

    #[test]
    fn each_rule_of_the_mirror_is_needed() {
        // Two that are only seen deep are left to the command.
        let deep = [Broken::InFlightBelieved, Broken::CompleteOfRestoredBelieved];
        for broken in Broken::ALL.iter().filter(|broken| !deep.contains(broken)) {
            let found = search(broken.bounds(), Some(*broken), 3_000_000, false);
            let states = found.states;
            assert!(found.violation.is_some(), "{broken:?} breaks nothing in {states} states");
        }
    }
}
