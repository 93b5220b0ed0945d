//! Users who read snapshots part by part, with and without data, while everything else goes on.
//!
//! A request is sent to the owner's target until some target answers it, and the next part is asked
//! for where the last one ended. What was answered is compared at rest with what the history held.

use quoin_replication::primary::{ChangesAnswer, ChangesRequest, PrimaryEvent};
use quoin_types::Lsn;

use super::{Event, World};
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;

const SEND_AGAIN: u64 = 50 * MILLISECOND;

/// A part that was asked for, and the LSNs that it is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub request: ChangesRequest,
    pub from: Lsn,
    pub to: Lsn,
}

pub(crate) struct Pulls {
    random: Random,
    /// Chance of a request about the volume as it is.
    of_now: Random,
    times_left: u64,
    token: u64,
    open: Option<Asked>,
    answered: Vec<(Asked, ChangesAnswer)>,
}

impl Pulls {
    /// By a chance of its own: the other runs stay what they were.
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let mut random = Random::new(seed ^ 0x7075_6c6c);
        let times_left = if swarm == Swarm::Exports { random.between(4, 24) } else { 0 };
        let of_now = Random::new(seed ^ 0x6c69_7665);
        Self { random, of_now, times_left, token: 0, open: None, answered: Vec::new() }
    }

    pub fn settled(&self) -> Result<(), String> {
        match self.open {
            Some(asked) => Err(format!("{asked:?} was never answered")),
            None => Ok(()),
        }
    }

    /// All parts that were answered.
    pub fn answered(&self) -> &[(Asked, ChangesAnswer)] {
        &self.answered
    }
}

impl World {
    pub(crate) fn plan_pulls(&mut self) {
        if self.operators.pulls.times_left > 0 {
            let delay = self.operators.pulls.random.between(50, 1500) * MILLISECOND;
            self.schedule.after(delay / self.setup.haste, Event::Pull);
        }
    }

    /// A user begins to read a snapshot, or what changed in it since another one.
    pub(crate) fn request_pull(&mut self) {
        if self.faults.over {
            return;
        }
        let made = self.operators.snapshots.made();
        let pulls = &mut self.operators.pulls;
        pulls.times_left -= 1;
        if pulls.open.is_none() && !made.is_empty() {
            let (id, to) = *pulls.random.pick(&made);
            let older: Vec<_> = made.iter().filter(|(_, lsn)| *lsn < to).copied().collect();
            let since = match !older.is_empty() && pulls.random.percent(60) {
                true => Some(*pulls.random.pick(&older)),
                false => None,
            };
            pulls.token += 1;
            let mut request = ChangesRequest {
                token: pulls.token,
                from: since.map(|(id, _)| id),
                to: Some(id),
                cursor: 0,
                want_data: pulls.random.percent(70),
            };
            if !request.want_data && pulls.of_now.percent(25) {
                request = ChangesRequest { from: Some(id), to: None, ..request };
            }
            pulls.open = Some(Asked { request, from: since.map_or(Lsn::ZERO, |(_, l)| l), to });
            self.trace.line(self.schedule.now(), || format!("{request:?}"));
            self.stats.operators.pulls += 1;
            self.send_pull();
        }
        self.plan_pulls();
    }

    /// Sends what is asked for to the owner's target until it is answered.
    pub(crate) fn send_pull(&mut self) {
        let Some(Asked { request, .. }) = self.operators.pulls.open else { return };
        let owner = self.control.record.owner;
        if self.targets[owner].process.is_some() && !self.targets[owner].paused {
            self.feed_target(owner, vec![PrimaryEvent::Changes(request)]);
        }
        self.schedule.after(SEND_AGAIN, Event::SendPull);
    }

    /// A target answers a part.
    pub(crate) fn pulled(&mut self, token: u64, answer: ChangesAnswer) {
        let pulls = &mut self.operators.pulls;
        let Some(asked) = pulls.open.take_if(|asked| asked.request.token == token) else { return };
        match &answer {
            ChangesAnswer::Part { next, .. } => {
                if let Some(cursor) = *next {
                    pulls.token += 1;
                    let request = ChangesRequest { token: pulls.token, cursor, ..asked.request };
                    pulls.open = Some(Asked { request, ..asked });
                }
                pulls.answered.push((asked, answer));
            }
            ChangesAnswer::Busy => pulls.open = Some(asked),
            ChangesAnswer::NoSnapshot => {
                let there = self.operators.snapshots.made();
                let is_there = |id| there.iter().any(|(made, _)| *made == id);
                let ChangesRequest { from, to, .. } = asked.request;
                if to.is_none_or(is_there) && from.is_none_or(is_there) {
                    self.violate("SnapshotSurvives", format!("{asked:?} is of no snapshot"));
                }
            }
            // Nothing rots in these worlds.
            ChangesAnswer::Damaged { lba } => {
                self.violate("SnapshotComplete", format!("{asked:?}: block {lba} is damaged"));
            }
        }
    }
}
