//! One point over two volumes: every order of requests, reads, takeovers, deadlines, losses of messages
//! and deaths of the coordinator within bounds. The rules are those of "Points over several volumes" in
//! `docs/replication.md`.
//!
//! A volume is its log here, with the target that serves it and the one before, which does not know
//! that its lease is over. All clients are one: it knows whatever any of them was shown, and each write
//! has all of that as its cause.

use std::collections::{HashMap, HashSet, VecDeque};

const VOLUMES: usize = 2;

/// A rule of points that is broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// A held volume answers writes.
    WritesAnswered,
    /// A held volume shows writes that came after its hold began.
    ReadsAnswered,
    /// A cut is made where no hold is.
    CutWithoutHold,
    /// A volume is released while another one is not cut.
    ReleasedEarly,
    /// A release without a lease counts.
    LeaseNotLooked,
    /// A hold that its deadline ended counts.
    DeadlineNotLooked,
    /// A hold outlives its epoch.
    OutlivesItsEpoch,
    /// A point counts though a hold of it was broken.
    BrokenCounts,
    /// A point counts before its cuts are on media.
    NotConfirmed,
}

impl Broken {
    /// The smallest bounds that are known to show it.
    pub fn bounds(self) -> Bounds {
        let takeovers = match self {
            Broken::LeaseNotLooked | Broken::NotConfirmed => 1,
            Broken::OutlivesItsEpoch => 2,
            _ => 0,
        };
        Bounds { writes: 2, takeovers, attempts: 1 }
    }

    pub const ALL: &'static [Broken] = &[
        Broken::WritesAnswered,
        Broken::ReadsAnswered,
        Broken::CutWithoutHold,
        Broken::ReleasedEarly,
        Broken::LeaseNotLooked,
        Broken::DeadlineNotLooked,
        Broken::OutlivesItsEpoch,
        Broken::BrokenCounts,
        Broken::NotConfirmed,
    ];
}

/// An entry of a log.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Entry {
    Write(u8),
    Cut(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Hold {
    point: u8,
    /// Length of the log when it began: entries up to there may be shown.
    from: u8,
    is_cut: bool,
}

/// One target of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Target {
    hold: Option<Hold>,
    /// The last hold that ended, and whether it was unbroken.
    ended: Option<(u8, bool)>,
}

#[derive(Clone, PartialEq, Eq, Hash, Default)]
struct Volume {
    log: Vec<Entry>,
    /// Entries that no takeover loses.
    stable: u8,
    epoch: u8,
    target: Target,
    /// The former target, which lives on and has no lease.
    former: Option<Target>,
}

/// What the coordinator knows of one volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Member {
    held: bool,
    /// Epoch of its cut.
    cut: Option<u8>,
    released: bool,
    confirmed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Attempt {
    point: u8,
    members: [Member; VOLUMES],
    given_up: bool,
    made: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    volumes: [Volume; VOLUMES],
    attempt: Attempt,
    /// Writes that a client was shown.
    shown: u8,
    /// Of each write, those that were shown when it was issued.
    causes: Vec<u8>,
    takeovers: u8,
}

/// How far a search goes.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub writes: u8,
    pub takeovers: u8,
    pub attempts: u8,
}

/// States after which a search ends without a result.
const STATES_MAX: usize = 4_000_000;

/// Result of a search of all states.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Points {
    pub states: usize,
    /// States in which a point was made.
    pub made: usize,
    /// Every state within the bounds was visited.
    pub complete: bool,
    /// The invariant that broke, and what happened until then.
    pub violation: Option<(&'static str, Vec<String>)>,
}

type Next = (String, State);

struct World {
    bounds: Bounds,
    broken: Option<Broken>,
}

impl World {
    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn steps(&self, state: &State) -> Vec<Next> {
        let mut next = Vec::new();
        for v in 0..VOLUMES {
            self.requests(state, v, &mut next);
            self.faults(state, v, &mut next);
            self.coordinate(state, v, &mut next);
        }
        self.coordinator_dies(state, &mut next);
        next
    }

    fn requests(&self, state: &State, v: usize, next: &mut Vec<Next>) {
        if (state.causes.len() as u8) < self.bounds.writes {
            let mut after = state.clone();
            let write = state.causes.len() as u8;
            after.causes.push(state.shown);
            after.volumes[v].log.push(Entry::Write(write));
            next.push((format!("write {write} is issued to volume {v}"), after));
        }
        let volume = &state.volumes[v];
        for (at, entry) in volume.log.iter().enumerate() {
            let Entry::Write(write) = *entry else { continue };
            if state.shown & 1 << write != 0 {
                continue;
            }
            let hold = volume.target.hold;
            let answered = hold.is_none() || self.is(Broken::WritesAnswered);
            let read = hold.is_none_or(|hold| at < usize::from(hold.from))
                || self.is(Broken::ReadsAnswered);
            for (allowed, how) in [(answered, "answered"), (read, "read")] {
                if allowed {
                    let mut after = state.clone();
                    after.shown |= 1 << write;
                    next.push((format!("write {write} is {how}"), after));
                }
            }
        }
    }

    /// What happens to a volume by itself.
    fn faults(&self, state: &State, v: usize, next: &mut Vec<Next>) {
        let volume = &state.volumes[v];
        // Of an entry that was not synced with those before it a takeover may keep as much.
        if usize::from(volume.stable) < volume.log.len() {
            let mut after = state.clone();
            after.volumes[v].stable = volume.log.len() as u8;
            next.push((format!("volume {v} syncs"), after));
        }
        if let Some(hold) = volume.target.hold {
            let mut after = state.clone();
            let unbroken = self.is(Broken::DeadlineNotLooked) && hold.is_cut;
            let ended = Some((hold.point, unbroken));
            after.volumes[v].target = Target { hold: None, ended };
            next.push((format!("the hold of volume {v} ends by itself"), after));
        }
        if state.takeovers < self.bounds.takeovers {
            // What a client was shown is never lost, nor what is stable.
            let is_shown = |entry: &Entry| match entry {
                Entry::Write(write) => state.shown & 1 << write != 0,
                Entry::Cut(_) => false,
            };
            let shown = volume.log.iter().rposition(is_shown).map_or(0, |at| at + 1);
            let least = shown.max(volume.stable.into());
            let new =
                [Target::default()].into_iter().chain(volume.former.map(|t| self.reopened(t)));
            for (kept, target) in
                new.flat_map(|target| (least..=volume.log.len()).map(move |kept| (kept, target)))
            {
                let mut after = state.clone();
                after.takeovers += 1;
                let taken = &mut after.volumes[v];
                taken.log.truncate(kept);
                taken.epoch += 1;
                taken.former = Some(std::mem::replace(&mut taken.target, target));
                next.push((format!("volume {v} is taken over with {kept} entries"), after));
            }
        }
    }

    /// The same target with another epoch.
    fn reopened(&self, target: Target) -> Target {
        match target.hold {
            Some(hold) if !self.is(Broken::OutlivesItsEpoch) => {
                Target { hold: None, ended: Some((hold.point, false)) }
            }
            _ => target,
        }
    }

    /// A command of the coordinator reaches a target of the volume, the former one or the present one,
    /// and its answer arrives or is lost.
    fn coordinate(&self, state: &State, v: usize, next: &mut Vec<Next>) {
        let attempt = state.attempt;
        if attempt.given_up || attempt.made {
            return;
        }
        let all = |is: fn(&Member) -> bool| attempt.members.iter().all(is);
        let member = attempt.members[v];
        let is_former = [false, true];
        for former in
            is_former.into_iter().filter(|former| !former || state.volumes[v].former.is_some())
        {
            // A lost answer to these is a command that comes later: a repeat finds what the first one did.
            if !member.held {
                self.hold(state, v, former, next);
            } else if all(|m| m.held) && member.cut.is_none() {
                self.cut(state, v, former, next);
            }
            let early = self.is(Broken::ReleasedEarly) && member.cut.is_some();
            if (all(|m| m.cut.is_some()) || early) && !member.released {
                for arrives in [true, false] {
                    self.release(state, v, former, arrives, next);
                }
            }
        }
        if all(|m| m.released) && !member.confirmed {
            self.confirm(state, v, next);
        }
    }

    fn target(state: &mut State, v: usize, former: bool) -> &mut Target {
        let volume = &mut state.volumes[v];
        match (former, &mut volume.former) {
            (true, Some(former)) => former,
            _ => &mut volume.target,
        }
    }

    fn hold(&self, state: &State, v: usize, former: bool, next: &mut Vec<Next>) {
        let mut after = state.clone();
        let point = state.attempt.point;
        let from = state.volumes[v].log.len() as u8;
        let target = Self::target(&mut after, v, former);
        if target.ended.is_some_and(|(ended, _)| ended == point) {
            after.attempt.given_up = true;
            return next.push((format!("volume {v} says that its hold has ended"), after));
        }
        match target.hold {
            Some(hold) if hold.point != point => return,
            Some(_) => {}
            None => target.hold = Some(Hold { point, from, is_cut: false }),
        }
        after.attempt.members[v].held = true;
        next.push((format!("volume {v} holds ({})", told(former, true)), after));
    }

    fn cut(&self, state: &State, v: usize, former: bool, next: &mut Vec<Next>) {
        let mut after = state.clone();
        let point = state.attempt.point;
        let epoch = state.volumes[v].epoch - u8::from(former);
        let target = Self::target(&mut after, v, former);
        let is_held = target.hold.is_some_and(|hold| hold.point == point);
        if !is_held && !self.is(Broken::CutWithoutHold) {
            after.attempt.given_up = true;
            return next.push((format!("volume {v} says that it is not held"), after));
        }
        let was_cut = target.hold.is_some_and(|hold| hold.is_cut);
        if let Some(hold) = &mut target.hold {
            hold.is_cut = true;
        }
        // What a former target appends is in no history.
        let is_there = state.volumes[v].log.contains(&Entry::Cut(point));
        if !former && !was_cut && !is_there {
            after.volumes[v].log.push(Entry::Cut(point));
        }
        after.attempt.members[v].cut = Some(epoch);
        next.push((format!("volume {v} is cut ({})", told(former, true)), after));
    }

    fn release(&self, state: &State, v: usize, former: bool, arrives: bool, next: &mut Vec<Next>) {
        let mut after = state.clone();
        let point = state.attempt.point;
        let target = Self::target(&mut after, v, former);
        let has_lease = !former || self.is(Broken::LeaseNotLooked);
        let unbroken = match (target.hold, target.ended) {
            // Without a lease nothing is said before the deadline.
            (Some(hold), _) if hold.point == point && !has_lease => return,
            (Some(hold), _) if hold.point == point => {
                *target = Target { hold: None, ended: Some((point, hold.is_cut)) };
                hold.is_cut
            }
            (_, Some((ended, unbroken))) if ended == point => unbroken,
            _ => self.is(Broken::CutWithoutHold),
        };
        let counts = unbroken || self.is(Broken::BrokenCounts);
        if !counts {
            after.attempt.given_up = true;
        } else if arrives {
            after.attempt.members[v].released = true;
        }
        let how = if unbroken { "unbroken" } else { "broken" };
        next.push((format!("volume {v} is released {how} ({})", told(former, arrives)), after));
    }

    fn confirm(&self, state: &State, v: usize, next: &mut Vec<Next>) {
        let mut after = state.clone();
        let point = state.attempt.point;
        let volume = &state.volumes[v];
        let at = volume.log.iter().position(|entry| *entry == Entry::Cut(point));
        let is_stable = at.is_some_and(|at| at < usize::from(volume.stable));
        if at.is_none() && !self.is(Broken::NotConfirmed) {
            after.attempt.given_up = true;
            return next.push((format!("the cut of volume {v} is lost"), after));
        }
        if !is_stable && !self.is(Broken::NotConfirmed) {
            return;
        }
        after.attempt.members[v].confirmed = true;
        after.attempt.made = after.attempt.members.iter().all(|member| member.confirmed);
        next.push((format!("the cut of volume {v} is confirmed"), after));
    }

    /// The next one begins an attempt of its own.
    fn coordinator_dies(&self, state: &State, next: &mut Vec<Next>) {
        if state.attempt.point < self.bounds.attempts && !state.attempt.made {
            let mut after = state.clone();
            let point = state.attempt.point + 1;
            after.attempt = Attempt { point, ..Attempt::default() };
            next.push((format!("another coordinator begins point {point}"), after));
        }
    }

    /// The invariant that a state breaks.
    fn judge(&self, state: &State) -> Option<&'static str> {
        if !state.attempt.made {
            return None;
        }
        let mut held = 0u8;
        for volume in &state.volumes {
            let cut = Entry::Cut(state.attempt.point);
            let Some(at) = volume.log.iter().position(|entry| *entry == cut) else {
                return Some("SnapshotSurvives");
            };
            for entry in &volume.log[..at] {
                if let Entry::Write(write) = entry {
                    held |= 1 << write;
                }
            }
        }
        let lacks_a_cause = (0..state.causes.len())
            .any(|write| held & 1 << write != 0 && state.causes[write] & !held != 0);
        lacks_a_cause.then_some("GroupCut")
    }
}

fn told(former: bool, arrives: bool) -> &'static str {
    match (former, arrives) {
        (false, true) => "told",
        (false, false) => "its answer is lost",
        (true, true) => "told by its former target",
        (true, false) => "its former target's answer is lost",
    }
}

/// Visits every state within the bounds, or stops at the first that an invariant forbids.
pub fn search(bounds: Bounds, broken: Option<Broken>) -> Points {
    let world = World { bounds, broken };
    let first = State {
        volumes: Default::default(),
        attempt: Attempt { point: 1, ..Attempt::default() },
        shown: 0,
        causes: Vec::new(),
        takeovers: 0,
    };
    let (mut visited, mut waiting) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    let mut came_from: HashMap<State, (State, String)> = HashMap::new();
    let mut made = 0;
    while let Some(state) = waiting.pop_front() {
        if visited.len() > STATES_MAX {
            return Points { states: visited.len(), made, complete: false, violation: None };
        }
        for (step, after) in world.steps(&state) {
            if let Some(invariant) = world.judge(&after) {
                let mut trace = vec![step];
                let mut at = state;
                while let Some((before, how)) = came_from.remove(&at) {
                    trace.push(how);
                    at = before;
                }
                trace.reverse();
                let violation = Some((invariant, trace));
                return Points { states: visited.len(), made, complete: false, violation };
            }
            if visited.insert(after.clone()) {
                made += usize::from(after.attempt.made);
                // A trace is wanted of mutants alone, whose searches are short.
                if broken.is_some() {
                    came_from.insert(after.clone(), (state.clone(), step));
                }
                waiting.push_back(after);
            }
        }
    }
    Points { states: visited.len(), made, complete: true, violation: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves CSI-GROUPCREATE-02: in every order of events within the bounds.
    #[test]
    fn no_order_of_events_makes_a_point_that_has_an_effect_without_its_cause() {
        for bounds in [
            Bounds { writes: 2, takeovers: 1, attempts: 1 },
            Bounds { writes: 2, takeovers: 0, attempts: 2 },
        ] {
            let found = search(bounds, None);
            println!("{bounds:?}: {} states, made in {}", found.states, found.made);
            assert_eq!(found.violation, None);
            assert!(found.complete && found.states > 10_000 && found.made > 100, "{found:?}");
        }
    }

    #[test]
    fn each_rule_of_points_is_needed() {
        for broken in Broken::ALL {
            let found = search(broken.bounds(), Some(*broken));
            let (invariant, trace) =
                found.violation.unwrap_or_else(|| panic!("{broken:?} breaks nothing"));
            println!("{broken:?}: {invariant} after {} states: {trace:#?}", found.states);
        }
    }
}
