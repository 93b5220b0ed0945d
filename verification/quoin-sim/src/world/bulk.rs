//! Bulk connections, which end and are slow without their sessions.

use quoin_replication::primary::PrimaryEvent;
use quoin_types::{BulkKey, SessionKey};

use super::{Mend, World};
use crate::network::ConnectionId;

impl World {
    /// Bulk connections end, and what their sessions send to each other goes on.
    pub(super) fn cut_bulk(&mut self) -> bool {
        let connections = self.network.connections.iter();
        let open = connections.filter(|(_, c)| c.bulk.is_some() && c.established && c.target_open);
        let ids: Vec<ConnectionId> = open.map(|(id, _)| *id).collect();
        for id in &ids {
            if self.random.percent(60) {
                self.cut(*id);
            }
        }
        !ids.is_empty()
    }

    /// Delays messages of rebuilds for a while, so that all others overtake them.
    pub(super) fn slow_bulk(&mut self) -> bool {
        self.network.bulk_storm = self.random.between(2, 2000);
        self.lasting(8000, Mend::BulkStorm);
        true
    }

    /// A target's session goes on, whatever becomes of what was copied: it may be one that counts.
    pub(super) fn target_loses_bulk(&mut self, target: usize, bulk: BulkKey) {
        let now = self.local(self.targets[target].host);
        let process = self.targets[target].process.as_ref();
        let before = process.is_some_and(|process| process.has_session(bulk.session));
        let sessions = process.map_or(0, |process| process.own_connections());
        // Whatever else is due now is done in the same batch.
        let due = process.is_some_and(|process| process.is_due(now));
        self.feed_target(target, vec![PrimaryEvent::BulkDisconnected { bulk }]);
        let process = self.targets[target].process.as_ref();
        let after = process.is_some_and(|process| process.has_session(bulk.session));
        // A target that was without a quorum for long opens again at whatever happens next, and ends all
        // sessions, not this one alone.
        let opens_again =
            sessions > 1 && process.is_some_and(|process| process.sessions.is_empty());
        if before && !after && !due && !opens_again {
            self.violate("BulkApart", format!("target {target} ends a session for its bulk one"));
        }
    }

    /// The session that a pool's replica has open, with its own connection.
    pub(super) fn session_at(&self, pool: usize) -> Option<(u64, SessionKey)> {
        self.pools[pool].process.as_ref()?.replica.as_ref()?.session()
    }
}
