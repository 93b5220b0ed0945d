//! The pool's listeners: open once the pool is recognised, at rest while the system has no
//! descriptors, shut at the end.

use quoin_reactor::Interest;
use quoin_reactor::descriptors::LISTENER_REST;
use quoin_replication::pool_host::recognition::Change;
use quoin_store::ReplicaPool;
use quoin_types::Time;

use super::{LISTENERS, Shard};
use crate::facts::PoolFacts;

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    pub(super) fn let_in(&mut self) -> std::io::Result<()> {
        for listener in self.parts.acceptor.listeners() {
            self.parts.reactor.register(listener, LISTENERS, Interest::READ)?;
        }
        Ok(())
    }

    /// Takes who waits. Where the system has no descriptors the listeners stay readable, and this
    /// thread would do nothing but fail: they rest.
    pub(super) fn accept(&mut self, now: Time) {
        if !self.parts.acceptor.accept() {
            self.shut();
            self.timers.set(LISTENERS, Some(now + LISTENER_REST));
        }
    }

    /// After a rest, or when the controller's word is not waited for any longer.
    pub(super) fn listen_again(&mut self, now: Time) {
        let change = self.start.waited();
        if change != Change::Nothing {
            tracing::warn!(
                "no controller says whether this pool's disk is as it was left: it is taken to be"
            );
            return self.recognised(now, change);
        }
        // One of them may listen already, where the other could not.
        self.shut();
        if let Err(error) = self.let_in() {
            tracing::warn!(%error, "cannot listen yet");
            self.timers.set(LISTENERS, Some(now + LISTENER_REST));
        }
    }

    pub(super) fn shut(&mut self) {
        for listener in self.parts.acceptor.listeners() {
            self.parts.reactor.deregister(listener);
        }
        self.timers.set(LISTENERS, None);
    }
}
