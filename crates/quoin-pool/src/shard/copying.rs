//! Serving of what rebuilds ask of the pool, one chunk a round ([`quoin_replication::pool_host::copying`]).

use quoin_reactor::now;
use quoin_replication::pool_host::copying::{Spare, spare};
use quoin_replication::replica::store::ReplicaStore;
use quoin_store::ReplicaPool;
use quoin_types::ReplicaGuid;

use super::Shard;
use crate::facts::PoolFacts;

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    /// Copies of this replica's volume that it could lose.
    pub(super) fn spare(&mut self, guid: ReplicaGuid) -> Spare {
        let Some(store) = self.pool.replica(guid) else { return 0 };
        spare(store.state().last_view.as_ref().map(|(_, view)| view))
    }

    /// One step of the rebuilds that wait. It renews the lease too, from after its receipt.
    pub(super) fn copy(&mut self) {
        let now = now();
        let Some((connection, message)) = self.copying.next(now) else { return };
        let Some(peer) = self.connections.get(connection).filter(|peer| !peer.ending) else {
            return;
        };
        let (guid, session) = (peer.claim.guid, peer.session);
        let began = std::time::Instant::now();
        self.message(now, connection, guid, session, message);
        self.copying.served(now, began.elapsed());
    }
}
