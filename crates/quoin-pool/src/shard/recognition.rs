//! Recognition of this start by the controller, which alone can tell that the pool's disk was put
//! back to an older state ([`quoin_replication::recognition`]).

use quoin_replication::recognition::{MarkSchedule, PoolCounts};
use quoin_replication::replica::store::{IoFault, StoreError};
use quoin_store::ReplicaPool;
use quoin_types::Time;
use quoin_wire::frame::WireError;

use super::{LISTENERS, Shard};
use crate::facts::PoolFacts;

/// Whether targets may open replicas here. A pool cannot see that its disk was put back to an
/// older state, in which its replicas lack what they acknowledged; the controller can, by the
/// pool's counts. So no target is let in before the controller has seen this start, or could not
/// be reached for [`super::RECOGNISED_AFTER`]: its absence must not keep a volume from its
/// replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recognition {
    Awaited,
    /// Also of pools that no controller knows, in tests and benchmarks.
    Given,
    /// An older state of the disk: what is here must not be read.
    Refused,
}

/// What this start of the pool tells of itself.
pub(super) struct Start {
    nonce: u64,
    marks: MarkSchedule,
}

impl Start {
    pub fn new() -> Self {
        Start { nonce: rand::random(), marks: MarkSchedule::default() }
    }
}

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    /// The controller's answer to a report with this mark. One about a former start of the process
    /// says nothing of what its disk holds now.
    pub(super) fn answered(&mut self, now: Time, rolled_back: bool, nonce: u64, mark: u64) {
        if nonce != self.start.nonce {
            return;
        }
        if !rolled_back {
            self.start.marks.heard(mark);
        }
        self.judged(now, rolled_back);
    }

    /// Accepts targets, or ends all sessions.
    pub(super) fn judged(&mut self, now: Time, rolled_back: bool) {
        match (self.parts.recognition, rolled_back) {
            (Recognition::Given, false) | (Recognition::Refused, true) => {}
            (_, false) => {
                self.timers.set(LISTENERS, None);
                if let Err(error) = self.let_in() {
                    self.fail(StoreError::Io(IoFault {
                        operation: "listen",
                        offset: 0,
                        errno: error.raw_os_error().unwrap_or_default(),
                    }));
                }
            }
            (_, true) => {
                tracing::error!(
                    "an older state of this pool's disk came back: it serves nobody; wipe it to \
                     have its replicas rebuilt"
                );
                self.shut();
                self.parts.recognition = Recognition::Refused;
                for key in self.peers.keys().copied().collect::<Vec<_>>() {
                    self.lost(now, key, &WireError::Closed);
                }
            }
        }
    }

    fn counts(&self) -> PoolCounts {
        PoolCounts {
            starts: self.pool.start_counter(),
            nonce: self.start.nonce,
            mark: self.pool.mark(),
        }
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
        if self.start.marks.is_due(now, self.pool.mark(), changed) {
            self.start.marks.raised(now);
            self.raise();
            self.begin_sync();
        }
    }

    /// Raises the mark at the end of a process, so that its last report covers all that it did.
    pub(super) fn raise_last_mark(&mut self) {
        if self.pool.has_changed_since_mark() && self.start.marks.is_heard(self.pool.mark()) {
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
