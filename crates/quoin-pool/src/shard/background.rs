//! When the pool's thread does background work, and for how long at a time.
//!
//! A step of the store's is bounded work and says nothing of time: a node may be in memory, or on
//! a slow disk. So steps are done one by one until their time is over. A turn takes so much longer
//! by them, and by the last step at most.

use std::time::Duration;

use quoin_reactor::now;
use quoin_replication::replica::ReplicaEvent;
use quoin_replication::replica::store::StoreError;
use quoin_store::{Due, ReplicaPool};
use quoin_types::Time;

use super::{STOP_MAX, Shard};
use crate::facts::PoolFacts;

/// Time that steps are begun in between two looks at the sockets.
const TURN: Duration = Duration::from_millis(2);
/// The same where clients are refused unless it goes on: what a turn takes in must not outgrow
/// what is done for it.
const URGENT_TURN: Duration = Duration::from_millis(10);
/// Beside clients who never pause, relaxed work takes one part of so many: what they overwrite
/// would pile up for as long as they go on.
const RELAXED_PART: u32 = 8;
/// Between attempts at background work that found nothing it could do.
const REST: Duration = Duration::from_millis(20);

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    pub(super) fn background(&mut self, now: Time, quiet: bool) {
        if now < self.rest_until {
            return;
        }
        let steps = match self.pool.background_due() {
            Due::Idle => return,
            Due::Relaxed if !quiet && now < self.relaxed_from => return,
            Due::Relaxed | Due::Soon => self.background_steps(TURN),
            Due::Urgent => self.background_steps(URGENT_TURN),
        };
        match steps {
            Ok(true) => {}
            // A full pool is what clients are told when they write; nothing is broken.
            Ok(false) | Err(StoreError::Full) => self.rest_until = now + REST,
            Err(error @ StoreError::Io(_)) => return self.fail(error),
            // Not the disk's failure: the sessions go on, the store tries again later.
            Err(error @ (StoreError::Damaged(_) | StoreError::Rule(_))) => {
                tracing::error!(%error, "background work failed");
                self.rest_until = now + STOP_MAX;
            }
        }
        for (guid, what) in self.pool.take_damaged() {
            self.deliver(now, guid, ReplicaEvent::Damaged(what));
        }
        self.begin_sync();
    }

    /// Does steps until their time is over or there is none to do.
    fn background_steps(&mut self, most: Duration) -> Result<bool, StoreError> {
        let began = now();
        loop {
            let step = self.pool.background(1);
            let ended = now();
            let took = ended.since(began);
            if took >= most || !matches!(step, Ok(true)) {
                self.relaxed_from = ended + took * (RELAXED_PART - 1);
                return step;
            }
        }
    }
}
