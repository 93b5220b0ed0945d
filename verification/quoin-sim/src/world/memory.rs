//! Targets whose memory for replicas that are away or behind gets scarce and plentiful again while
//! everything else goes on, as hundreds of other volumes of their shard need more or less of it. The
//! product shares it out ([`quoin_replication::target_host::memory`]). It must never cost data, and a
//! limit that stays must not keep a replica out.

use quoin_replication::primary::PrimaryEvent;
use quoin_replication::target_host::memory::Memory as Shared;

use super::{Event, World};
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;

/// Volumes beside this one on a target's shard, each of which keeps more than it may.
const NEIGHBOURS: usize = 300;

pub(crate) struct Memory {
    random: Random,
    on: bool,
    /// Approximate share of each volume; `None`: there is enough for all.
    share_bytes: Option<usize>,
}

impl Memory {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let random = Random::new(seed ^ 0x6d65_6d6f_7279);
        Self { random, on: swarm == Swarm::Memory, share_bytes: None }
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
        memory.share_bytes = (part > 0).then_some((window * 2) >> (2 * part));
        for target in 0..self.targets.len() {
            if self.targets[target].process.is_some() && !self.targets[target].paused {
                let bytes_max = self.limit_of(target);
                self.trace.line(self.schedule.now(), || {
                    format!("target {target} may keep {bytes_max} bytes")
                });
                self.feed_target(target, vec![PrimaryEvent::Retain { bytes_max }]);
            }
        }
        self.plan_memory();
    }

    /// Returns the bytes that this volume may keep on a shard that it shares with its neighbours.
    fn limit_of(&self, target: usize) -> usize {
        let Some(share) = self.operators.memory.share_bytes else { return usize::MAX };
        let process = self.targets[target].process.as_ref();
        let own = process.map_or(0, |process| process.target.retained_bytes());
        let each = [vec![share * 2; NEIGHBOURS], vec![own]].concat();
        let mut shared = Shared::new(share * NEIGHBOURS / 7 * 8);
        each.iter().for_each(|bytes| shared.count(0, *bytes));
        shared.share(self.local(self.targets[target].host), each.into_iter());
        shared.limit_bytes()
    }

    /// Returns the limit for a target that starts; `None` where memory is not limited.
    pub(crate) fn memory_limit(&self, target: usize) -> Option<PrimaryEvent> {
        let bytes_max = self.limit_of(target);
        self.operators.memory.on.then_some(PrimaryEvent::Retain { bytes_max })
    }
}
