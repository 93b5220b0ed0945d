//! Background work of the pool's thread ([`quoin_replication::pool_host::background`]).

use std::time::Duration;

use quoin_reactor::now;
use quoin_replication::pool_host::background::{HUNG_AFTER, Outcome, Urgency};
use quoin_replication::replica::ReplicaEvent;
use quoin_replication::replica::store::StoreError;
use quoin_store::{Due, ReplicaPool};
use quoin_telemetry::notices::Severity;
use quoin_types::Time;

use super::Shard;
use crate::facts::PoolFacts;

pub(super) fn urgency(due: Due) -> Urgency {
    match due {
        Due::Idle => Urgency::Idle,
        Due::Relaxed => Urgency::Relaxed,
        Due::Soon => Urgency::Soon,
        Due::Urgent => Urgency::Urgent,
    }
}

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    pub(super) fn background(&mut self, now: Time, quiet: bool) {
        let waits = self.pool.background_waits();
        if self.background.hangs(now, waits)
            && let Some(guid) = self.pool.give_up_background_wait()
        {
            let message = format!(
                "a read of the disk for background work does not end since {} s: the replica has no \
                 background work for now, the others have",
                HUNG_AFTER.as_secs()
            );
            self.tell_of(guid, Severity::Warning, "BackgroundReadHangs", message);
        }
        let urgency = urgency(self.pool.background_due());
        let Some(most) = self.background.turn(now, urgency, quiet) else { return };
        if let Err(error) = self.background_steps(now, most) {
            return self.fail(error);
        }
        for (guid, what) in self.pool.take_damaged() {
            self.deliver(now, guid, ReplicaEvent::Damaged(what));
        }
        self.begin_fetches(now);
        self.begin_sync();
    }

    /// Does steps until their time is over or there is none to do.
    fn background_steps(&mut self, turn: Time, most: Duration) -> Result<(), StoreError> {
        let began = now();
        loop {
            let step = self.pool.background(1);
            let ended = now();
            let took = ended.since(began);
            let outcome = match step {
                Ok(true) if took < most => continue,
                Ok(true) => Outcome::WentOn,
                // A full pool is what clients are told when they write; nothing is broken.
                Ok(false) | Err(StoreError::Full | StoreError::RingFull) => Outcome::NothingToDo,
                Err(error @ StoreError::Io(_)) => return Err(error),
                // Not the disk's failure: the sessions go on, the store tries again later.
                Err(
                    error @ (StoreError::Damaged(_) | StoreError::Rule(_) | StoreError::Pending(_)),
                ) => {
                    tracing::error!(%error, "background work failed");
                    Outcome::Failed
                }
            };
            self.background.stepped(turn, ended, took, outcome);
            return Ok(());
        }
    }
}
