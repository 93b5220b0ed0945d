//! Very many small holes, for the swarm `holes`: a replica is away while every second block of a
//! volume is trimmed, each by an entry of its own, and comes back to copy them all.

use quoin_replication::primary::PrimaryEvent;
use quoin_types::block::Request;

use super::processes::ProcessEvent;
use super::{Event, World};
use crate::content::SECTORS;
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, SECOND};
use crate::storage::Outage;
use crate::swarm::Swarm;
use crate::workload::Draft;

/// The queue that the answers to trims are for; no client has it.
pub(super) const HOLES_QUEUE: usize = usize::MAX;
/// Holes of most runs: more than one chunk of a rebuild has room for.
const HOLES: (u64, u64) = (5_000, 8_000);
/// Holes of one run in so many.
const HOLES_MANY: u64 = 100_000;
const MANY_ONE_IN: u64 = 64;
/// Trims under way at a time.
const UNDER_WAY_MAX: usize = 256;
const PAUSE: Instant = 4 * MILLISECOND;
/// A replica that is away stays so until all holes are made, but not longer.
const AWAY_MAX: Instant = 60 * SECOND;

pub(crate) struct Holes {
    random: Random,
    /// Holes to make; none in other swarms.
    count: u64,
    made: u64,
    /// Trims that were not answered, and the life of the target that has them.
    under_way: usize,
    asked: (usize, u32),
    /// The pool that is away.
    away: Option<usize>,
}

impl Holes {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let mut random = Random::new(seed ^ 0x686f_6c65_7321);
        let count = match swarm {
            Swarm::Holes if random.below(MANY_ONE_IN) == 0 => HOLES_MANY,
            Swarm::Holes => random.between(HOLES.0, HOLES.1),
            _ => 0,
        };
        Self { random, count, made: 0, under_way: 0, asked: (0, 0), away: None }
    }

    /// The size of a volume that the holes fit in; `None`: as it is drawn.
    pub fn volume_blocks(&self) -> Option<u64> {
        (self.count > 0).then_some(2 * self.count)
    }

    pub fn answered(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
    }

    fn is_done(&self) -> bool {
        self.made == self.count
    }
}

impl World {
    pub(super) fn plan_holes(&mut self) {
        if !self.operators.holes.is_done() {
            let delay = self.operators.holes.random.between(300, 1500) * MILLISECOND;
            self.schedule.after(delay, Event::Process(ProcessEvent::MakeHoles));
        }
    }

    pub(super) fn make_holes(&mut self) {
        if self.faults.over || self.operators.holes.is_done() {
            return self.holes_are_made();
        }
        self.schedule.after(PAUSE, Event::Process(ProcessEvent::MakeHoles));
        let target = self.control.record.owner;
        let there = &self.targets[target];
        let serves = there.process.as_ref().is_some_and(|process| process.serving.is_some());
        if !serves || there.paused {
            return;
        }
        let asked = (target, there.life);
        let holes = &mut self.operators.holes;
        if holes.asked != asked {
            // Requests to a former target stay unanswered.
            self.stats.ios.open += holes.under_way as u64;
            (holes.asked, holes.under_way) = (asked, 0);
        }
        if holes.away.is_none() {
            let pool = holes.random.index(self.pools.len());
            holes.away = Some(pool);
            self.kill_pool(pool, Outage::Process, AWAY_MAX);
        }
        let mut submitted = Vec::new();
        while self.operators.holes.under_way < UNDER_WAY_MAX && !self.operators.holes.is_done() {
            submitted.push(PrimaryEvent::Submit(self.next_hole(asked)));
        }
        self.stats.operators.holes += submitted.len() as u64;
        if !submitted.is_empty() {
            self.feed_target(target, submitted);
        }
    }

    fn next_hole(&mut self, asked: (usize, u32)) -> Request {
        let holes = &mut self.operators.holes;
        let block = 2 * holes.made;
        (holes.made, holes.under_way) = (holes.made + 1, holes.under_way + 1);
        let whole = SECTORS as u64;
        let draft = Draft::Trim { sector: block * whole, sectors: whole, fua: false };
        let tag = self.checkers.history.invoke(draft, asked);
        self.clients.tokens.insert(u64::from(tag), HOLES_QUEUE);
        let operation = draft.operation(self.setup.run, tag);
        Request { token: u64::from(tag), operation, origin: None }
    }

    /// The replica that was away comes back.
    fn holes_are_made(&mut self) {
        self.operators.holes.made = self.operators.holes.count;
        if let Some(pool) = self.operators.holes.away.take() {
            self.schedule.after(0, Event::StartPool { pool });
        }
    }
}
