//! Fences: grants that the control plane took back, enforced without the target's cooperation.

use std::time::Duration;

use super::store::{ReplicaMeta, ReplicaStore, StoreError};
use super::{Replica, ReplicaAction, ReplicaNote};
use quoin_types::message::{Failure, FromReplica};
use quoin_types::mutant;
use quoin_types::time::Time;
use quoin_types::{Epoch, Incarnation, Lsn};

/// Time for which a fenced session may continue: its target drains, syncs and closes.
pub const FENCED_SESSION: Duration = Duration::from_secs(30);

impl Replica {
    /// Promises the epoch to no target. The promise is kept on media, so that a grant that was
    /// taken back opens nothing after a restart either.
    pub(super) fn fence(
        &mut self,
        now: Time,
        epoch: Epoch,
        at_once: bool,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if mutant::is("fence-not-promised") {
            return;
        }
        let meta = store.meta();
        if epoch > meta.promised {
            let untouched = meta.promised == Epoch::ZERO && store.state().position.lsn == Lsn::ZERO;
            let next = ReplicaMeta {
                promised: epoch,
                promised_incarnation: Incarnation(0),
                // An empty replica lacks nothing. Its promise would make it look like one that was
                // opened.
                closed_continuous: meta.closed_continuous || untouched,
                ..meta.clone()
            };
            match store.put_meta(next) {
                Ok(()) => drop(store.request_sync()),
                // It is told again with each assignment.
                Err(StoreError::RingFull) => {
                    return actions.push(ReplicaAction::Note(ReplicaNote::RingFull));
                }
                Err(error) => return self.disk_failed(error, store, actions),
            }
        }
        if let Some(pending) = self.pending.take_if(|pending| pending.key.epoch < epoch) {
            let message = FromReplica::Refuse { promised: epoch, failure: Failure::Fenced };
            let connection = pending.connection;
            actions.push(ReplicaAction::Send { connection, session: pending.key, message });
            actions.push(ReplicaAction::Disconnect { connection });
        }
        if self.session.as_ref().is_some_and(|session| session.key.epoch < epoch) {
            let until = if at_once { now } else { now + FENCED_SESSION };
            let until = self.fenced_until.map_or(until, |before| before.min(until));
            self.fenced_until = Some(until);
            self.end_fenced(now, store, actions);
        }
    }

    /// Ends a fenced session once its time is over.
    pub(super) fn end_fenced(
        &mut self,
        now: Time,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Some(until) = self.fenced_until else { return };
        let promised = store.meta().promised;
        let is_fenced = self.session.as_ref().is_some_and(|session| session.key.epoch < promised);
        if !is_fenced {
            self.fenced_until = None;
        } else if now < until {
            self.wake(until, actions);
        } else if !mutant::is("fenced-session-goes-on") {
            self.fenced_until = None;
            let session = self.take_session(store, actions).expect("looked at above");
            actions.push(ReplicaAction::Disconnect { connection: session.connection });
        }
    }
}
