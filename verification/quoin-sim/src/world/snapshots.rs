//! Users who make snapshots and delete them while everything else goes on.
//!
//! A wish is sent to the owner's target until some target answers it. At rest every replica lists
//! the same snapshots, those of the history; what was answered is among them or is not, and each
//! holds what the history held at its LSN, slot by slot.

use std::collections::BTreeMap;

use quoin_replication::primary::{PrimaryEvent, SnapshotOutcome, SnapshotWish};
use quoin_types::{Lsn, SnapshotId};

use super::{Event, World};
use crate::random::Random;
use crate::schedule::{MILLISECOND, SECOND};
use crate::swarm::Swarm;

const SEND_AGAIN: u64 = 200 * MILLISECOND;
/// At a time.
const KEPT_MAX: usize = 4;

/// The wish of users for a snapshot, and its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Wished(SnapshotWish),
    Made(Lsn),
    Deleted,
}

pub(crate) struct Snapshots {
    random: Random,
    times_left: u64,
    known: BTreeMap<SnapshotId, State>,
}

impl Snapshots {
    /// By a chance of its own: the other runs stay what they were.
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let mut random = Random::new(seed ^ 0x736e_6170);
        let times_left = if swarm == Swarm::Snapshots { random.between(3, 14) } else { 0 };
        Self { random, times_left, known: BTreeMap::new() }
    }

    fn open(&self) -> impl Iterator<Item = (SnapshotId, SnapshotWish)> {
        self.known.iter().filter_map(|(id, state)| match state {
            State::Wished(wish) => Some((*id, *wish)),
            State::Made(_) | State::Deleted => None,
        })
    }
}

impl Snapshots {
    /// A target's answer; an error says how it contradicts an earlier one.
    pub fn answered(&mut self, id: SnapshotId, outcome: SnapshotOutcome) -> Result<(), String> {
        let Some(state) = self.known.get_mut(&id) else { return Ok(()) };
        match (*state, outcome) {
            (State::Wished(SnapshotWish::Make), SnapshotOutcome::Made { lsn }) => {
                *state = State::Made(lsn);
            }
            (State::Wished(SnapshotWish::Delete), SnapshotOutcome::Deleted) => {
                *state = State::Deleted;
            }
            (State::Made(lsn), SnapshotOutcome::Made { lsn: now }) if lsn != now => {
                return Err(format!("snapshot {id} was made at {lsn} and at {now}"));
            }
            // An answer to what was wished before.
            _ => {}
        }
        Ok(())
    }

    /// Whether all that was wished is answered.
    pub fn settled(&self) -> Result<(), String> {
        match self.open().next() {
            Some((id, wish)) => Err(format!("snapshot {id}: {wish:?} was never answered")),
            None => Ok(()),
        }
    }

    /// How what was answered differs from the snapshots of the history.
    pub fn differs_from(&self, listed: &[(SnapshotId, Lsn)]) -> Option<String> {
        self.known.iter().find_map(|(id, state)| {
            let there = listed.iter().find(|(listed, _)| listed == id).map(|(_, lsn)| *lsn);
            let differs = match state {
                State::Made(lsn) => there != Some(*lsn),
                State::Deleted => there.is_some(),
                State::Wished(_) => false,
            };
            let what = || format!("snapshot {id} was answered {state:?} and is at {there:?}");
            differs.then(what)
        })
    }
}

impl World {
    pub(crate) fn plan_snapshots(&mut self) {
        if self.operators.snapshots.times_left > 0 {
            let delay = self.operators.snapshots.random.between(50, 2500) * MILLISECOND;
            self.schedule.after(delay / self.setup.haste, Event::Snapshot);
        }
    }

    /// A user wishes for one more or one less.
    pub(crate) fn request_snapshot(&mut self) {
        if self.faults.over {
            return;
        }
        let snapshots = &mut self.operators.snapshots;
        snapshots.times_left -= 1;
        let is_made = |state: &State| matches!(state, State::Made(_));
        let made: Vec<SnapshotId> =
            snapshots.known.iter().filter(|(_, s)| is_made(s)).map(|(id, _)| *id).collect();
        let full = made.len() >= KEPT_MAX;
        let (id, wish) = if !made.is_empty() && (full || snapshots.random.percent(35)) {
            (*snapshots.random.pick(&made), SnapshotWish::Delete)
        } else {
            (SnapshotId(snapshots.known.len() as u128 + 1), SnapshotWish::Make)
        };
        snapshots.known.insert(id, State::Wished(wish));
        self.trace.line(self.schedule.now(), || format!("snapshot {id} is wished: {wish:?}"));
        self.stats.operators.snapshots += 1;
        self.send_snapshots();
        self.plan_snapshots();
    }

    /// Faults are over and everything was compared: all are deleted.
    pub(crate) fn delete_snapshots(&mut self) {
        for state in self.operators.snapshots.known.values_mut() {
            if *state != State::Deleted {
                *state = State::Wished(SnapshotWish::Delete);
            }
        }
        self.send_snapshots();
    }

    /// Sends what is wished to the owner's target until it is answered.
    pub(crate) fn send_snapshots(&mut self) {
        let events: Vec<PrimaryEvent> = self
            .operators
            .snapshots
            .open()
            .map(|(id, wish)| PrimaryEvent::Snapshot { id, wish })
            .collect();
        if events.is_empty() {
            return;
        }
        let owner = self.control.record.owner;
        if self.targets[owner].process.is_some() && !self.targets[owner].paused {
            self.feed_target(owner, events);
        }
        let delay = if self.faults.over { SECOND } else { SEND_AGAIN };
        self.schedule.after(delay, Event::SendSnapshots);
    }
}
