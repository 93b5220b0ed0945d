//! Two clients of one volume that send again what has no answer: every order of requests, lost
//! answers, commits, takeovers and ends within bounds. The rules are those of "Clients that send
//! again" in `docs/replication.md`.
//!
//! The history is a list of entries of which a prefix is committed. A takeover keeps any prefix that
//! has all that is committed: the other modules define why. Requests that waited at a target are
//! gone after it, or wait at the same target in its next epoch.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

const CLIENTS: usize = 2;
/// Parts of each request of a client: a long one becomes several entries.
const REQUESTS: [&[u8]; CLIENTS] = [&[2, 1], &[1]];

/// A rule of clients that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// A request that took effect is done again.
    NoTable,
    /// A takeover keeps the clients, and forgets what took effect.
    ForgottenAtTakeover,
    /// A request that took effect in part is done again from its first part.
    PartsForgotten,
    /// A request that took effect in part counts as done.
    PartIsWhole,
    /// A repeat is answered though the first one is not committed.
    AnsweredBeforeCommit,
    /// A request below the lowest one without an answer is taken for a new one.
    BelowLowIsNew,
    /// A client that ended may change the volume.
    UsedAfterEnd,
    /// A client sends requests before its beginning is committed.
    SendsBeforeBegun,
}

impl Broken {
    pub const ALL: &'static [Broken] = &[
        Broken::NoTable,
        Broken::ForgottenAtTakeover,
        Broken::PartsForgotten,
        Broken::PartIsWhole,
        Broken::AnsweredBeforeCommit,
        Broken::BelowLowIsNew,
        Broken::UsedAfterEnd,
        Broken::SendsBeforeBegun,
    ];
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Entry {
    Begin(u8),
    End(u8),
    Part { client: u8, number: u8, part: u8, low: u8 },
}

/// A request at the target that serves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Request {
    client: u8,
    number: u8,
    low: u8,
    /// Which of the repeats it is; 0: the first one.
    copy: u8,
}

/// Verdict of the table on a request.
enum Judged {
    /// The next part to do.
    New(u8),
    /// The entry that ended it, counted from one.
    Executed(usize),
    OutOfWindow,
    NoClient,
}

#[derive(Clone, PartialEq, Eq, Hash, Default)]
struct State {
    log: Vec<Entry>,
    committed: usize,
    waiting: BTreeSet<Request>,
    /// Requests of each client that were sent, and that were answered: one bit each.
    sent: [u8; CLIENTS],
    answered: [u8; CLIENTS],
    /// The client has received the answer to the flush behind its beginning.
    begun: [bool; CLIENTS],
    detached: [bool; CLIENTS],
    /// Entries before this one say nothing of requests: the target forgot them.
    forgotten: usize,
    repeats: u8,
    takeovers: u8,
}

/// Result of a search of all states.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Clients {
    pub states: usize,
    /// The invariant that broke, and what happened until then.
    pub violation: Option<(&'static str, Vec<String>)>,
}

/// How far a search goes.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Requests that are sent again.
    pub repeats: u8,
    pub takeovers: u8,
}

impl Bounds {
    pub const GOAL: Bounds = Bounds { repeats: 2, takeovers: 2 };
}

type Next = (String, State, Option<&'static str>);

struct World {
    bounds: Bounds,
    broken: Option<Broken>,
}

impl State {
    fn parts(request: Request) -> u8 {
        REQUESTS[usize::from(request.client)][usize::from(request.number)]
    }

    fn low(&self, client: usize) -> u8 {
        self.answered[client].trailing_ones() as u8
    }

    fn has_row(&self, client: u8) -> bool {
        let of_it =
            |entry: &&Entry| matches!(entry, Entry::Begin(c) | Entry::End(c) if *c == client);
        matches!(self.log.iter().rev().find(of_it), Some(Entry::Begin(_)))
    }

    /// Clients that detached end whenever a target serves.
    fn end_detached(&mut self) {
        for client in 0..CLIENTS as u8 {
            if self.detached[usize::from(client)] && self.has_row(client) {
                self.log.push(Entry::End(client));
            }
        }
    }
}

impl World {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn judge(&self, state: &State, request: Request) -> Judged {
        let Request { client, number, low, .. } = request;
        if !state.has_row(client) && !self.is(Broken::UsedAfterEnd) {
            return Judged::NoClient;
        }
        if self.is(Broken::NoTable) {
            return Judged::New(0);
        }
        let known = state.log.iter().enumerate().skip(state.forgotten);
        let of_it = known.filter_map(|(at, entry)| match *entry {
            Entry::Part { client: c, number, part, low } if c == client => {
                Some((at + 1, number, part, low))
            }
            _ => None,
        });
        let of_it: Vec<_> = of_it.collect();
        let low = of_it.iter().map(|(.., low)| *low).max().unwrap_or_default().max(low);
        if number < low {
            return match self.is(Broken::BelowLowIsNew) {
                true => Judged::New(0),
                false => Judged::OutOfWindow,
            };
        }
        match of_it.iter().rev().find(|(_, n, ..)| *n == number) {
            None => Judged::New(0),
            Some((at, _, part, _)) if part + 1 == State::parts(request) => Judged::Executed(*at),
            Some((at, ..)) if self.is(Broken::PartIsWhole) => Judged::Executed(*at),
            Some(_) if self.is(Broken::PartsForgotten) => Judged::New(0),
            Some((_, _, part, _)) => Judged::New(part + 1),
        }
    }

    fn steps(&self, state: &State) -> Vec<Next> {
        let mut next = Vec::new();
        for client in 0..CLIENTS {
            self.begin(state, client, &mut next);
            self.send(state, client, &mut next);
            self.detach(state, client, &mut next);
        }
        for request in &state.waiting {
            self.execute(state, *request, &mut next);
        }
        if state.committed < state.log.len() {
            let mut after = state.clone();
            after.committed += 1;
            next.push((format!("entry {} is committed", after.committed), after, None));
        }
        self.take_over(state, &mut next);
        next
    }

    fn begin(&self, state: &State, client: usize, next: &mut Vec<Next>) {
        if state.begun[client] || state.detached[client] {
            return;
        }
        let begins = Entry::Begin(client as u8);
        let at = state.log.iter().position(|entry| *entry == begins);
        let mut after = state.clone();
        match at {
            None => {
                after.log.push(begins);
                next.push((format!("client {client} begins"), after, None));
            }
            Some(at) if at < state.committed || self.is(Broken::SendsBeforeBegun) => {
                after.begun[client] = true;
                next.push((format!("client {client} has begun"), after, None));
            }
            Some(_) => {}
        }
    }

    /// A client sends a request, for the first time or again: the former one may wait still.
    fn send(&self, state: &State, client: usize, next: &mut Vec<Next>) {
        if !state.begun[client] || state.detached[client] {
            return;
        }
        for number in 0..REQUESTS[client].len() as u8 {
            let bit = 1 << number;
            let is_next = state.sent[client] + 1 == bit;
            let is_repeat = state.sent[client] & bit != 0 && state.answered[client] & bit == 0;
            if !is_next && (!is_repeat || state.repeats == self.bounds.repeats) {
                continue;
            }
            let mut after = state.clone();
            after.sent[client] |= bit;
            after.repeats += u8::from(is_repeat);
            let low = state.low(client);
            let copy = if is_repeat { after.repeats } else { 0 };
            after.waiting.insert(Request { client: client as u8, number, low, copy });
            next.push((format!("client {client} sends request {number}, low {low}"), after, None));
        }
    }

    fn detach(&self, state: &State, client: usize, next: &mut Vec<Next>) {
        // One is enough for all that an end does.
        if client == 0 && state.begun[client] && !state.detached[client] {
            let mut after = state.clone();
            after.detached[client] = true;
            after.end_detached();
            next.push((format!("client {client} is detached"), after, None));
        }
    }

    fn execute(&self, state: &State, request: Request, next: &mut Vec<Next>) {
        let Request { client, number, low, .. } = request;
        let name = format!("request {number} of client {client}");
        let mut after = state.clone();
        match self.judge(state, request) {
            Judged::New(part) => {
                let entry = Entry::Part { client, number, part, low };
                let is_same = |other: &Entry| {
                    matches!(*other, Entry::Part { client: c, number: n, part: p, .. }
                        if (c, n, p) == (client, number, part))
                };
                let violation = if state.log.iter().any(is_same) {
                    Some("RepeatOnce")
                } else if state.log.contains(&Entry::End(client)) {
                    Some("EndIsTheEnd")
                } else {
                    None
                };
                after.log.push(entry);
                next.push((format!("part {part} of {name} takes effect"), after, violation));
            }
            Judged::Executed(at) => {
                if at > state.committed && !self.is(Broken::AnsweredBeforeCommit) {
                    return;
                }
                after.waiting.remove(&request);
                next.push((format!("the answer to {name} is lost"), after.clone(), None));
                if state.detached[usize::from(client)] {
                    return;
                }
                after.answered[usize::from(client)] |= 1 << number;
                let violation = (!Self::holds(&after.log, request)).then_some("AnsweredWhole");
                next.push((format!("{name} is answered"), after, violation));
            }
            Judged::OutOfWindow => {
                after.waiting.remove(&request);
                let has = state.answered[usize::from(client)] & 1 << number != 0;
                let violation = (!has).then_some("RepeatRefused");
                next.push((format!("{name} is out of the window"), after, violation));
            }
            Judged::NoClient => {
                after.waiting.remove(&request);
                let lives = !state.detached[usize::from(client)];
                let violation = lives.then_some("ClientKept");
                next.push((format!("{name} is refused: no such client"), after, violation));
            }
        }
    }

    /// Returns true if all parts of a request are in this history.
    fn holds(log: &[Entry], request: Request) -> bool {
        (0..State::parts(request)).all(|part| {
            log.iter().any(|entry| {
                matches!(*entry, Entry::Part { client: c, number: n, part: p, .. }
                    if (c, n, p) == (request.client, request.number, part))
            })
        })
    }

    /// Another target serves, or the same one in another epoch.
    fn take_over(&self, state: &State, next: &mut Vec<Next>) {
        if state.takeovers == self.bounds.takeovers {
            return;
        }
        for kept in state.committed..=state.log.len() {
            for is_same in [false, true] {
                let mut after = state.clone();
                after.takeovers += 1;
                after.log.truncate(kept);
                if self.is(Broken::ForgottenAtTakeover) {
                    after.forgotten = kept;
                }
                if !is_same {
                    after.waiting.clear();
                }
                after.end_detached();
                let lost = (0..CLIENTS as u8).any(|client| {
                    let answered = state.answered[usize::from(client)];
                    let numbers = 0..REQUESTS[usize::from(client)].len() as u8;
                    numbers.filter(|number| answered & 1 << number != 0).any(|number| {
                        !Self::holds(&after.log, Request { client, number, low: 0, copy: 0 })
                    })
                });
                let violation = lost.then_some("CommitSurvives");
                let who = if is_same { "the same target" } else { "another target" };
                next.push((format!("{who} opens with {kept} entries"), after, violation));
            }
        }
    }
}

/// Visits every state within the bounds, or stops at the first that an invariant forbids.
pub fn search(bounds: Bounds, broken: Option<Broken>) -> Clients {
    let world = World { bounds, broken };
    let first = State::default();
    let (mut visited, mut waiting) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    // A trace is wanted of mutants alone, whose searches are short.
    let mut came_from: HashMap<State, (State, String)> = HashMap::new();
    while let Some(state) = waiting.pop_front() {
        for (step, after, violation) in world.steps(&state) {
            if let Some(invariant) = violation {
                let mut trace = vec![step];
                let mut at = state;
                while let Some((before, how)) = came_from.remove(&at) {
                    trace.push(how);
                    at = before;
                }
                trace.reverse();
                return Clients { states: visited.len(), violation: Some((invariant, trace)) };
            }
            if visited.insert(after.clone()) {
                if broken.is_some() {
                    came_from.insert(after.clone(), (state.clone(), step));
                }
                waiting.push_back(after);
            }
        }
    }
    Clients { states: visited.len(), violation: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_order_of_repeats_and_takeovers_has_a_request_take_effect_twice() {
        for bounds in [Bounds { repeats: 2, takeovers: 1 }, Bounds { repeats: 1, takeovers: 2 }] {
            let found = search(bounds, None);
            println!("{bounds:?}: {} states", found.states);
            assert_eq!(found.violation, None);
            assert!(found.states > 10_000, "{} states", found.states);
        }
    }

    #[test]
    fn each_rule_of_clients_is_needed() {
        for broken in Broken::ALL {
            let found = search(Bounds::GOAL, Some(*broken));
            let (invariant, trace) =
                found.violation.unwrap_or_else(|| panic!("{broken:?} breaks nothing"));
            println!("{broken:?}: {invariant} after {} states: {trace:#?}", found.states);
        }
    }
}
