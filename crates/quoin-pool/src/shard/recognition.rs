//! Recognition of this start by the controller
//! ([`quoin_replication::pool_host::recognition`]): sockets are opened and closed as it decides.

use quoin_replication::pool_host::recognition::Change;
pub use quoin_replication::pool_host::recognition::Recognition;
use quoin_replication::recognition::PoolCounts;
use quoin_replication::replica::store::{IoFault, StoreError};
use quoin_store::ReplicaPool;
use quoin_types::Time;
use quoin_wire::frame::WireError;

use super::{LISTENERS, Shard};
use crate::facts::PoolFacts;

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    /// The controller's answer to a report with this mark.
    pub(super) fn answered(&mut self, now: Time, rolled_back: bool, nonce: u64, mark: u64) {
        let change = self.start.answered(rolled_back, nonce, mark);
        self.recognised(now, change);
    }

    /// Accepts targets, or ends all sessions.
    pub(super) fn recognised(&mut self, now: Time, change: Change) {
        match change {
            Change::Nothing => {}
            Change::LetIn => {
                self.timers.set(LISTENERS, None);
                if let Err(error) = self.let_in() {
                    self.fail(StoreError::Io(IoFault {
                        operation: "listen",
                        offset: 0,
                        errno: error.raw_os_error().unwrap_or_default(),
                    }));
                }
            }
            Change::ShutOut => {
                tracing::error!(
                    "an older state of this pool's disk came back: it serves nobody; wipe it to \
                     have its replicas rebuilt"
                );
                self.shut();
                for key in self.connections.keys_of(|_| true) {
                    self.lost(now, key, &WireError::Closed);
                }
            }
        }
        self.parts.recognition = self.start.recognition();
    }

    fn counts(&self) -> PoolCounts {
        self.start.counts(self.pool.start_counter(), self.pool.mark())
    }

    /// Leaves the counts for the last report of the process.
    pub(super) fn tell_counts(&self) -> PoolCounts {
        let counts = self.counts();
        *self.parts.counts.lock().expect("never held across a panic") = counts;
        counts
    }

    /// Raises the mark where that is due, before a report.
    pub(super) fn raise_mark(&mut self, now: Time) {
        let changed = self.pool.has_changed_since_mark();
        if self.start.raises_mark(now, self.pool.mark(), changed) {
            self.raise();
            self.begin_sync();
        }
    }

    /// Raises the mark at the end of a process.
    pub(super) fn raise_last_mark(&mut self) {
        let changed = self.pool.has_changed_since_mark();
        if self.start.raises_last_mark(self.pool.mark(), changed) {
            self.raise();
        }
    }

    fn raise(&mut self) {
        match self.pool.raise_mark() {
            Ok(()) => {}
            Err(error @ StoreError::Io(_)) => self.fail(error),
            // The mark stays as it is, and is raised with a later report.
            Err(error) => tracing::warn!(%error, "the pool's mark cannot be recorded"),
        }
    }
}
