//! Operators who grow the volume while everything else goes on.
//!
//! Clients learn of a new size as a device does: from the records, once a target has it. From then
//! on no request within it may be refused as out of range by any target that received the size.
//! (One that is not the owner any more may not have been: a device finds that as it connects.)

use quoin_replication::primary::PrimaryEvent;

use super::{Event, World};
use crate::random::Random;
use crate::schedule::{MILLISECOND, SECOND};
use crate::swarm::Swarm;

/// Of a hundred runs so many have operators who grow the volume.
const RUNS_OF_HUNDRED: u64 = 30;
/// How often the volume is grown at most, each time by up to half of its first size.
const TIMES_MAX: u64 = 4;
const SEND_AGAIN: u64 = 200 * MILLISECOND;

pub(crate) struct Growth {
    random: Random,
    step_blocks: u64,
    times_left: u64,
}

impl Growth {
    /// By a chance of its own: the other runs stay what they were.
    pub fn draw(seed: u64, swarm: Swarm, volume_blocks: u64) -> Self {
        let mut random = Random::new(seed ^ 0x6772_6f77_7468);
        let may = matches!(swarm, Swarm::Broad | Swarm::Members | Swarm::Churn);
        let on = random.percent(RUNS_OF_HUNDRED) && may;
        let times_left = if on { random.between(1, TIMES_MAX) } else { 0 };
        Self { random, step_blocks: volume_blocks / 2, times_left }
    }
}

impl World {
    pub(crate) fn plan_growth(&mut self) {
        if self.operators.growth.times_left > 0 {
            let delay = self.operators.growth.random.between(500, 9000) * MILLISECOND;
            self.schedule.after(delay / self.setup.haste, Event::Grow);
        }
    }

    /// The records have a new size from here on: targets that start receive it.
    pub(crate) fn grow(&mut self) {
        if self.faults.over {
            return;
        }
        self.operators.growth.times_left -= 1;
        self.setup.config.volume_blocks +=
            self.operators.growth.random.between(1, self.operators.growth.step_blocks);
        let blocks = self.setup.config.volume_blocks;
        self.trace.line(self.schedule.now(), || format!("the volume is to have {blocks} blocks"));
        self.stats.operators.growths += 1;
        self.send_size();
        self.plan_growth();
    }

    /// A target has the size that the records have, from its grant or by this: also one that ran as
    /// another was the owner, and becomes it.
    pub(crate) fn send_size_to(&mut self, target: usize) {
        let blocks = self.setup.config.volume_blocks;
        let there = &mut self.targets[target];
        if let Some(process) = there.process.as_mut().filter(|_| !there.paused) {
            process.known_blocks = blocks;
            self.feed_target(target, vec![PrimaryEvent::Resize { blocks }]);
        }
    }

    /// Sends the size to the owner's target until it has it; then the clients learn of it.
    pub(crate) fn send_size(&mut self) {
        let blocks = self.setup.config.volume_blocks;
        if self.setup.volume_blocks >= blocks {
            return;
        }
        let owner = self.control.record.owner;
        self.send_size_to(owner);
        let process = self.targets[owner].process.as_ref();
        let has = process.filter(|p| p.serving.is_some()).map(|p| p.target.status().volume_blocks);
        if has.is_some_and(|has| has >= blocks) {
            self.trace.line(self.schedule.now(), || format!("the volume has {blocks} blocks"));
            self.setup.volume_blocks = blocks;
            self.clients.workload.grow(blocks);
        } else {
            let delay = if self.faults.over { SECOND } else { SEND_AGAIN };
            self.schedule.after(delay, Event::SendSize);
        }
    }
}
