//! Targets that are told, while everything else goes on, how much they may keep in memory for
//! replicas that are away or behind, as one is that serves many volumes: now nothing, now as much
//! as it likes. It must never cost data, and a limit that stays must not keep a replica out.

use quoin_replication::primary::PrimaryEvent;

use super::{Event, World};
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;

pub(crate) struct Memory {
    random: Random,
    on: bool,
    /// The limit of now: a target that starts is told of it.
    bytes_max: usize,
}

impl Memory {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let random = Random::new(seed ^ 0x6d65_6d6f_7279);
        Self { random, on: swarm == Swarm::Memory, bytes_max: usize::MAX }
    }
}

impl World {
    pub(crate) fn plan_memory(&mut self) {
        if self.operators.memory.on && !self.faults.over {
            let delay = self.operators.memory.random.between(5, 400) * MILLISECOND;
            self.schedule.after(delay, Event::LimitMemory);
        }
    }

    pub(crate) fn limit_memory(&mut self) {
        let window = self.setup.config.window_bytes;
        let memory = &mut self.operators.memory;
        // The last limit stays when faults end, so that some runs must come to rest under each.
        let part = memory.random.below(7) as u32;
        memory.bytes_max = if part == 0 { usize::MAX } else { (window * 2) >> (2 * part) };
        let bytes_max = memory.bytes_max;
        self.trace.line(self.schedule.now(), || format!("targets may keep {bytes_max} bytes"));
        for target in 0..self.targets.len() {
            if self.targets[target].process.is_some() && !self.targets[target].paused {
                self.feed_target(target, vec![PrimaryEvent::Retain { bytes_max }]);
            }
        }
        self.plan_memory();
    }

    /// What a target that starts is told; nothing where it has all the memory that it likes.
    pub(crate) fn memory_limit(&self) -> Option<PrimaryEvent> {
        let bytes_max = self.operators.memory.bytes_max;
        self.operators.memory.on.then_some(PrimaryEvent::Retain { bytes_max })
    }
}
