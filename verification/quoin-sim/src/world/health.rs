//! Work of a pool between requests, in the swarm `hosts`: steps of its scrub, and requests to targets
//! for good copies of bad blocks. The product's code decides when each is done
//! ([`quoin_replication::pool_host`]).

use std::time::Duration;

use quoin_replication::pool_host::repairs::Repairs;
use quoin_replication::pool_host::scrub::{Moment, Place, Scrub};
use quoin_replication::replica::store::StoreError;
use quoin_replication::replica::{Replica, ReplicaEvent, ReplicaNote};
use quoin_types::ReplicaGuid;

use super::processes::ProcessEvent;
use super::{Event, World};
use crate::schedule::{Instant, MILLISECOND};
use crate::storage::Outage;

/// Time between two looks at a pool's health.
const LOOK_EVERY: Instant = 20 * MILLISECOND;
/// From the end of a scrub to the begin of the next: much less than a product's week.
const PERIOD: Duration = Duration::from_secs(2);
/// Read in one step.
const STEP_BYTES: u64 = 512 << 10;

/// The health of what one process of a pool holds.
pub(super) struct Health {
    pub repairs: Repairs,
    pub scrub: Scrub,
}

impl Health {
    pub fn new(wall_s: u64) -> Self {
        Self { repairs: Repairs::default(), scrub: Scrub::new(wall_s, Some(PERIOD), "") }
    }
}

impl World {
    pub(super) fn plan_health(&mut self, pool: usize) {
        if self.processes.on {
            let life = self.pools[pool].life;
            self.schedule.after(LOOK_EVERY, Event::Process(ProcessEvent::Health { pool, life }));
        }
    }

    /// Simulated clocks stand for the wall clock as well.
    fn moment(&self, pool: usize) -> Moment {
        let now = self.local(self.pools[pool].host);
        Moment { now, wall_s: now.0 / 1_000_000_000 }
    }

    pub(super) fn keep_healthy(&mut self, pool: usize, life: u32) {
        let there = &self.pools[pool];
        if there.life != life || there.process.is_none() {
            return;
        }
        if !there.paused {
            self.step_scrub(pool);
        }
        if self.pools[pool].life == life {
            if !self.pools[pool].paused {
                self.ask_for_copies(pool);
            }
            self.plan_health(pool);
        }
    }

    fn step_scrub(&mut self, pool: usize) {
        let (moment, guid) = (self.moment(pool), self.pools[pool].member.guid);
        let here = &mut self.pools[pool];
        let Some(process) = &mut here.process else { return };
        let Some(place) = process.health.scrub.step(moment, 0) else { return };
        if here.gone || place.replica > guid {
            process.health.scrub.ended(moment);
            return;
        }
        let place = if place.replica == guid { place } else { Place::default() };
        let done = match here.storage.scrub(guid, (place.stage, place.cursor), STEP_BYTES) {
            Ok(done) => done,
            Err(StoreError::Io(_)) => {
                return self.kill_pool(pool, Outage::DiskFailed, 50 * MILLISECOND);
            }
            Err(StoreError::Damaged(what)) => {
                return self.feed_pool(pool, vec![ReplicaEvent::Damaged(what)]);
            }
            Err(StoreError::Pending(_)) => {
                process.health.scrub.wait(moment.now);
                return self.plan_fetches(pool);
            }
            Err(StoreError::Full | StoreError::RingFull | StoreError::Rule(_)) => {
                return process.health.scrub.postpone(moment.now, Duration::from_secs(10));
            }
        };
        let next = match done.next {
            Some((stage, cursor)) => Place { replica: guid, stage, cursor },
            None => Place { replica: ReplicaGuid(guid.0.saturating_add(1)), ..Place::default() },
        };
        process.health.scrub.stepped(moment.now, Duration::ZERO, done.read_bytes, next);
        self.plan_sync(pool);
    }

    fn ask_for_copies(&mut self, pool: usize) {
        let now = self.local(self.pools[pool].host);
        let here = &mut self.pools[pool];
        let Some(process) = &mut here.process else { return };
        for (replica, copy) in here.storage.take_bad_blocks() {
            if replica == here.member.guid {
                process.health.repairs.found(now, copy);
            }
        }
        // A replica that is open but not fed yet is looked at again.
        if process.replica.as_ref().is_some_and(Replica::is_fed) {
            let copies = std::iter::from_fn(|| process.health.repairs.next(now));
            let events: Vec<ReplicaEvent> = copies.map(ReplicaEvent::BadCopy).collect();
            if !events.is_empty() {
                self.feed_pool(pool, events);
            }
        }
    }

    /// Notes the outcome of requested copies.
    pub(super) fn note_repair(&mut self, pool: usize, note: &ReplicaNote) {
        let now = self.local(self.pools[pool].host);
        let Some(process) = &mut self.pools[pool].process else { return };
        match note {
            ReplicaNote::Opened { .. } => process.health.repairs.opened(now),
            ReplicaNote::Repaired(repaired) => {
                process.health.repairs.answered(now, *repaired);
            }
            _ => {}
        }
    }
}
