//! Breadth-first search over all states within bounds, and random walks beyond them.

use crate::bounds::Model;
use crate::frontier::{Chunk, Packed, Room, Spill};
use crate::mutants::Mutant;
use crate::settle::Violation;
use crate::state::State;
use crate::step::Step;
use crate::visited::{Visited, fingerprint};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Step and the state that it leads to.
pub struct Next {
    pub step: Step,
    pub state: State,
    pub violation: Option<Violation>,
}

/// The steps that one state allows.
#[derive(Default)]
pub struct Steps {
    pub next: Vec<Next>,
}

impl Steps {
    pub(crate) fn push(&mut self, model: &Model, step: Step, mut state: State) {
        let violation = model.settle(&mut state).err();
        self.next.push(Next { step, state, violation });
    }

    /// The step itself is what an invariant forbids.
    pub(crate) fn broken(&mut self, step: Step, state: State, invariant: Violation) {
        self.next.push(Next { step, state, violation: Some(invariant) });
    }
}

impl Model {
    pub fn initial(&self) -> State {
        let mut state = State { budget: self.bounds.budget, ..State::default() };
        for (r, replica) in state.replicas.iter_mut().enumerate().take(self.bounds.replicas()) {
            replica.continuous = 1;
            replica.newcomer = u8::from(r >= usize::from(self.bounds.rf));
            replica.quorum = 1 - replica.newcomer;
            if self.is(Mutant::FormationOpen) {
                // Created by a pool that takes the volume for a new one.
                replica.quorum = 1;
            }
        }
        state.record = self.first_record(&state);
        state
    }

    pub fn steps(&self, state: &State, steps: &mut Steps) {
        steps.next.clear();
        self.open_steps(state, steps);
        self.io_steps(state, steps);
        self.change_steps(state, steps);
        self.fault_steps(state, steps);
    }

    fn key(&self, state: &State) -> (State, u64) {
        let canonical = state.canonical(self.bounds.replicas());
        let key = fingerprint(canonical.as_bytes());
        (canonical, key)
    }
}

/// How much to explore, and with what.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory for states that were visited and states that wait to be explored; waiting states
    /// beyond it are in a file.
    pub memory_bytes: usize,
    pub time: Duration,
    pub threads: usize,
    /// Remember how each state was reached, which doubles the memory.
    pub traces: bool,
    /// Told every [`TOLD_EVERY`] how far it is, and how many states wait.
    pub progress: Option<fn(&Explored, usize)>,
}

/// Interval at which a long search reports its progress.
pub const TOLD_EVERY: Duration = Duration::from_secs(15);

/// A violation and the way to it.
#[derive(Clone, Debug)]
pub struct Found {
    pub invariant: Violation,
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug)]
pub struct Explored {
    pub states: usize,
    pub transitions: usize,
    pub depth: usize,
    /// Every state within the bounds was visited.
    pub complete: bool,
    pub time: Duration,
    pub found: Option<Found>,
}

const CHUNK_STATES: usize = 2048;
const CHUNKS_A_ROUND: usize = 32;
/// More states than one round can come to: a state has some ten successors.
const ROUND_STATES_MAX: usize = CHUNK_STATES * CHUNKS_A_ROUND * 8;

/// State that the threads of one search share.
struct Shared<'a, 'room> {
    model: &'a Model,
    visited: &'a Visited,
    goal: Option<fn(&State) -> bool>,
    room: &'room Room,
    spill: &'a Spill,
    transitions: AtomicUsize,
    next_chunk: AtomicUsize,
    /// The violation, the state it was stepped from and, for a goal, that state itself.
    found: Mutex<Option<(Violation, u64)>>,
    out: Mutex<Vec<Chunk<'room>>>,
}

impl Shared<'_, '_> {
    fn keep(&self, packed: Packed) {
        let chunk = self.room.put(packed, self.spill);
        self.out.lock().expect("no thread panics").push(chunk);
    }
}

/// Name that [`explore`] gives to the state that it was asked to find.
pub const GOAL_REACHED: Violation = "goal";

/// Visits every state within the bounds, nearest first, until an invariant breaks or (with a
/// goal) a state is found that the goal accepts.
pub fn explore(
    model: &Model,
    from: &State,
    limits: Limits,
    goal: Option<fn(&State) -> bool>,
) -> Explored {
    let began = Instant::now();
    let mut told = began;
    // An eighth for what waits.
    let room = Room::new(limits.memory_bytes / 8);
    let mut visited = Visited::new(1 << 16, limits.memory_bytes / 8 * 7, limits.traces);
    let (first, first_key) = model.key(from);
    visited.insert(first_key, 0);
    let mut packed = Packed::default();
    packed.push(&first);
    let mut explored = Explored {
        states: 1,
        transitions: 0,
        depth: 0,
        complete: false,
        time: Duration::ZERO,
        found: None,
    };
    let Ok(spill) = Spill::new() else { return explored };
    let mut frontier = vec![room.put(packed, &spill)];
    'levels: while !frontier.is_empty() {
        let mut next_frontier = Vec::new();
        let Ok(spill) = Spill::new() else { break };
        while !frontier.is_empty() {
            let round = frontier.split_off(frontier.len().saturating_sub(CHUNKS_A_ROUND));
            if !visited.make_room(ROUND_STATES_MAX) {
                break 'levels;
            }
            let shared = Shared {
                model,
                visited: &visited,
                goal,
                room: &room,
                spill: &spill,
                transitions: AtomicUsize::new(0),
                next_chunk: AtomicUsize::new(0),
                found: Mutex::new(None),
                out: Mutex::new(Vec::new()),
            };
            std::thread::scope(|scope| {
                for _ in 1..limits.threads {
                    scope.spawn(|| expand(&shared, &round));
                }
                expand(&shared, &round);
            });
            explored.transitions += shared.transitions.into_inner();
            next_frontier.append(&mut shared.out.into_inner().unwrap_or_default());
            explored.states = visited.len();
            explored.time = began.elapsed();
            if let Some((invariant, key)) = shared.found.into_inner().unwrap_or_default() {
                let steps = trace(model, from, &visited, key, invariant, goal);
                explored.found = Some(Found { invariant, steps });
                break 'levels;
            }
            if explored.time >= limits.time {
                break 'levels;
            }
            if let Some(progress) = limits.progress.filter(|_| told.elapsed() >= TOLD_EVERY) {
                told = Instant::now();
                let waiting = frontier.iter().chain(&next_frontier).map(|chunk| chunk.states);
                progress(&explored, waiting.sum());
            }
        }
        frontier = next_frontier;
        explored.depth += usize::from(!frontier.is_empty());
        explored.complete = frontier.is_empty();
    }
    explored
}

fn expand(shared: &Shared, chunks: &[Chunk]) {
    let mut steps = Steps::default();
    let mut out = Packed::default();
    let mut transitions = 0;
    while let Some(chunk) = chunks.get(shared.next_chunk.fetch_add(1, Ordering::Relaxed)) {
        for state in chunk.states() {
            let key = fingerprint(state.as_bytes());
            if let Some(goal) = shared.goal
                && goal(&state)
            {
                *shared.found.lock().expect("no thread panics") = Some((GOAL_REACHED, key));
                return;
            }
            shared.model.steps(&state, &mut steps);
            transitions += steps.next.len();
            for next in &steps.next {
                if let Some(invariant) = next.violation {
                    *shared.found.lock().expect("no thread panics") = Some((invariant, key));
                    return;
                }
                let (canonical, next_key) = shared.model.key(&next.state);
                if shared.visited.insert(next_key, key) {
                    out.push(&canonical);
                    if out.states == CHUNK_STATES {
                        shared.keep(std::mem::take(&mut out));
                    }
                }
            }
        }
    }
    shared.transitions.fetch_add(transitions, Ordering::Relaxed);
    if out.states > 0 {
        shared.keep(out);
    }
}

/// The way to a state, replayed with replicas under the names that they begin with.
fn trace(
    model: &Model,
    from: &State,
    visited: &Visited,
    last: u64,
    invariant: Violation,
    goal: Option<fn(&State) -> bool>,
) -> Vec<Step> {
    let mut keys = vec![last];
    while let Some(parent) = keys.last().and_then(|key| visited.parent(*key))
        && parent != 0
    {
        keys.push(parent);
    }
    keys.reverse();
    let mut state = *from;
    let mut way = Vec::new();
    let mut steps = Steps::default();
    for key in &keys[1..] {
        model.steps(&state, &mut steps);
        let Some(next) = steps.next.iter().find(|n| model.key(&n.state).1 == *key) else {
            return way;
        };
        way.push(next.step);
        state = next.state;
    }
    if goal.is_none() || invariant != GOAL_REACHED {
        model.steps(&state, &mut steps);
        way.extend(steps.next.iter().find(|n| n.violation == Some(invariant)).map(|n| n.step));
    }
    way
}

/// The state that these steps lead to; `None` where one of them is not possible.
pub fn after(model: &Model, way: &[Step]) -> Option<State> {
    let mut state = model.initial();
    let mut steps = Steps::default();
    for step in way {
        model.steps(&state, &mut steps);
        state = steps.next.iter().find(|next| next.step == *step)?.state;
    }
    Some(state)
}

/// Result of random walks.
#[derive(Clone, Debug, Default)]
pub struct Walked {
    pub walks: usize,
    pub steps: usize,
    pub time: Duration,
    pub found: Option<(u64, Found)>,
}

/// Walks at random, each from the beginning to a state without steps (or `steps_max`), until an
/// invariant breaks or the time is over. Walk `n` is a function of `seed + n`.
pub fn walk(model: &Model, seed: u64, walks: usize, steps_max: usize, time: Duration) -> Walked {
    let began = Instant::now();
    let mut walked = Walked::default();
    let mut steps = Steps::default();
    while walked.walks < walks && began.elapsed() < time {
        let own_seed = seed.wrapping_add(walked.walks as u64);
        let mut random = own_seed;
        let mut state = model.initial();
        let mut way = Vec::new();
        walked.walks += 1;
        for _ in 0..steps_max {
            model.steps(&state, &mut steps);
            if steps.next.is_empty() {
                break;
            }
            random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let pick = fingerprint(&random.to_le_bytes()) % steps.next.len() as u64;
            let next = steps.next.swap_remove(pick as usize);
            walked.steps += 1;
            way.push(next.step);
            if let Some(invariant) = next.violation {
                walked.found = Some((own_seed, Found { invariant, steps: way }));
                walked.time = began.elapsed();
                return walked;
            }
            state = next.state;
        }
    }
    walked.time = began.elapsed();
    walked
}
