//! Users who make snapshots and delete them while everything else goes on.
//!
//! Sometimes all clients are detached, and the volume goes back to a snapshot: then what they read
//! must be what the history held there.
//!
//! A wish is sent to the owner's target until some target answers it. At rest every replica lists
//! the same snapshots, those of the history; what was answered is among them or is not, and each
//! holds what the history held at its LSN, slot by slot.

use std::collections::BTreeMap;

use quoin_replication::primary::{PrimaryEvent, RevertOutcome, SnapshotOutcome, SnapshotWish};
use quoin_types::{Epoch, Lsn, SnapshotId};

use super::checkers::Observation;
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
    reverts_left: u64,
    /// The Revert that the clients wait for, once they are detached.
    reverting: Option<Revert>,
    /// The snapshot that the volume went back to last, and the LSN at which that was done.
    pub reverted: Option<(SnapshotId, Lsn)>,
    /// Epochs in which snapshots were cut.
    pub epochs: BTreeMap<SnapshotId, Epoch>,
}

/// A Revert that is wished for.
#[derive(Clone, Copy, Debug)]
struct Revert {
    snapshot: SnapshotId,
    attempt: SnapshotId,
}

impl Snapshots {
    /// By a chance of its own: the other runs stay what they were.
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let mut random = Random::new(seed ^ 0x736e_6170);
        let has_them =
            matches!(swarm, Swarm::Snapshots | Swarm::Clones | Swarm::Exports | Swarm::ManyVolumes);
        let times_left = if has_them { random.between(3, 14) } else { 0 };
        let reverts_left = if has_them { random.between(0, 4) } else { 0 };
        Self {
            random,
            times_left,
            known: BTreeMap::new(),
            reverts_left,
            reverting: None,
            reverted: None,
            epochs: BTreeMap::new(),
        }
    }

    fn open(&self) -> impl Iterator<Item = (SnapshotId, SnapshotWish)> {
        self.known.iter().filter_map(|(id, state)| match state {
            State::Wished(wish) => Some((*id, *wish)),
            State::Made(_) | State::Deleted => None,
        })
    }
}

impl Snapshots {
    /// A point made it, at this LSN.
    pub fn was_cut(&mut self, id: SnapshotId, lsn: Lsn) {
        self.known.insert(id, State::Made(lsn));
    }

    /// A target's answer; an error says how it contradicts an earlier one.
    pub fn answered(&mut self, id: SnapshotId, outcome: SnapshotOutcome) -> Result<(), String> {
        let Some(state) = self.known.get_mut(&id) else { return Ok(()) };
        if let SnapshotOutcome::Made { head: Some(head), .. } = outcome {
            self.epochs.insert(id, head.epoch);
        }
        match (*state, outcome) {
            (State::Wished(SnapshotWish::Make), SnapshotOutcome::Made { lsn, .. }) => {
                *state = State::Made(lsn);
            }
            (State::Wished(SnapshotWish::Delete), SnapshotOutcome::Deleted) => {
                *state = State::Deleted;
            }
            (State::Made(lsn), SnapshotOutcome::Made { lsn: now, .. }) if lsn != now => {
                return Err(format!("snapshot {id} was made at {lsn} and at {now}"));
            }
            // An answer to what was wished before.
            _ => {}
        }
        Ok(())
    }

    /// Returns true if it was ever wished for.
    pub fn knows(&self, id: SnapshotId) -> bool {
        self.known.contains_key(&id)
    }

    /// Snapshots that are there, with their LSNs.
    pub fn made(&self) -> Vec<(SnapshotId, Lsn)> {
        let made = self.known.iter().filter_map(|(id, state)| match state {
            State::Made(lsn) => Some((*id, *lsn)),
            State::Wished(_) | State::Deleted => None,
        });
        made.collect()
    }

    /// Returns true if clients are detached, or are to be.
    pub fn detaches_clients(&self) -> bool {
        self.reverting.is_some()
    }

    /// A target's answer to a Revert; true if the volume shows the snapshot now.
    pub fn reverted(&mut self, attempt: SnapshotId, outcome: RevertOutcome) -> bool {
        let Some(revert) = self.reverting.take_if(|revert| revert.attempt == attempt) else {
            return false;
        };
        let is_done = matches!(outcome, RevertOutcome::Done { .. });
        if let RevertOutcome::Done { lsn, .. } = outcome {
            self.reverted = Some((revert.snapshot, lsn));
            // Its record in the history is not needed any more.
            self.known.insert(attempt, State::Wished(SnapshotWish::Delete));
        }
        is_done
    }

    /// Succeeds if all that was wished is answered.
    pub fn settled(&self) -> Result<(), String> {
        if let Some(revert) = self.reverting {
            return Err(format!("{revert:?} was never answered"));
        }
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

    pub(crate) fn plan_revert(&mut self) {
        if self.operators.snapshots.reverts_left > 0 {
            let delay = self.operators.snapshots.random.between(500, 5000) * MILLISECOND;
            self.schedule.after(delay / self.setup.haste, Event::Revert);
        }
    }

    /// A user detaches the volume and goes back to a snapshot.
    pub(crate) fn request_revert(&mut self) {
        if self.faults.over || self.operators.snapshots.reverting.is_some() {
            return;
        }
        let snapshots = &mut self.operators.snapshots;
        snapshots.reverts_left -= 1;
        let is_made = |state: &State| matches!(state, State::Made(_));
        let made: Vec<SnapshotId> =
            snapshots.known.iter().filter(|(_, s)| is_made(s)).map(|(id, _)| *id).collect();
        if !made.is_empty() {
            let snapshot = *snapshots.random.pick(&made);
            let attempt = SnapshotId(1 << 32 | u128::from(snapshots.reverts_left));
            snapshots.reverting = Some(Revert { snapshot, attempt });
            self.trace.line(self.schedule.now(), || format!("Revert {attempt} to {snapshot}"));
            self.stats.operators.reverts += 1;
            self.send_revert();
        }
        self.plan_revert();
    }

    /// Sends the Revert that is wished to the owner's target, while no client has anything open,
    /// until it is answered.
    pub(crate) fn send_revert(&mut self) {
        let Some(Revert { snapshot, attempt }) = self.operators.snapshots.reverting else { return };
        let owner = self.control.record.owner;
        let is_detached = self.clients.queues.iter().all(|queue| queue.open.is_none());
        if is_detached && self.targets[owner].process.is_some() && !self.targets[owner].paused {
            self.feed_target(owner, vec![PrimaryEvent::Revert { snapshot, attempt }]);
        }
        self.schedule.after(SEND_AGAIN, Event::SendRevert);
    }

    /// A target says how a Revert ended.
    pub(crate) fn revert_ended(
        &mut self,
        target: usize,
        attempt: SnapshotId,
        outcome: RevertOutcome,
    ) {
        if self.operators.snapshots.reverted(attempt, outcome) {
            let life = self.targets[target].life;
            self.observe(&Observation::Reverted { target, life });
            // Not at once: what the target's round sends besides is on its way first.
            self.schedule.after(MILLISECOND, Event::SendSnapshots);
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

    /// A mirror wishes for a snapshot.
    pub(crate) fn wish_for_snapshot(&mut self, id: SnapshotId) {
        let known = &self.operators.snapshots.known;
        if known.get(&id).is_some_and(|state| *state != State::Deleted) {
            return;
        }
        self.operators.snapshots.known.insert(id, State::Wished(SnapshotWish::Make));
        self.send_snapshots();
    }

    /// A mirror has the volume go back to a snapshot, once at a time.
    pub(crate) fn wish_for_revert(&mut self, snapshot: SnapshotId, attempt: SnapshotId) {
        if self.operators.snapshots.reverting.is_none() {
            self.operators.snapshots.reverting = Some(Revert { snapshot, attempt });
            self.send_revert();
        }
    }

    /// A snapshot that no point counts is deleted, whether it was made or not.
    pub(crate) fn delete_snapshot(&mut self, id: SnapshotId) {
        self.operators.snapshots.known.insert(id, State::Wished(SnapshotWish::Delete));
        self.send_snapshots();
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
