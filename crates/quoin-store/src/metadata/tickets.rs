//! Syncs of a pool: what was asked for, what is under way, and who waits for it.
//!
//! One sync serves all that asked before it began. What it did is told only to those that wait for
//! it: a pool may hold thousands of replicas of which few write.

use std::collections::BTreeSet;

use quoin_replication::replica::store::SyncTicket;
use quoin_types::ReplicaGuid;

/// Replicas that wait for a sync.
#[derive(Clone, Debug, Default)]
pub struct Waiting {
    /// Replicas for the next sync.
    next: BTreeSet<ReplicaGuid>,
    /// Replicas for the sync under way.
    now: BTreeSet<ReplicaGuid>,
}

impl Waiting {
    pub fn add(&mut self, guid: ReplicaGuid) {
        self.next.insert(guid);
    }

    pub fn is_empty(&self) -> bool {
        self.next.is_empty() && self.now.is_empty()
    }

    /// A sync begins, and with it these wait for it.
    fn begin(&mut self) {
        self.now.append(&mut self.next);
    }

    /// Returns the replicas that the sync under way serves.
    pub fn begun(&self) -> &BTreeSet<ReplicaGuid> {
        &self.now
    }

    /// The sync under way is done.
    pub fn end(&mut self) -> BTreeSet<ReplicaGuid> {
        std::mem::take(&mut self.now)
    }
}

/// The tickets of one pool.
#[derive(Clone, Debug, Default)]
pub struct Tickets {
    requested: u64,
    begun: u64,
    under_way: bool,
    /// The highest ticket whose sync succeeded.
    pub synced: u64,
    /// Replicas that asked for a sync.
    asked: Waiting,
    /// Replicas whose sync succeeded since [`Tickets::take_served`].
    served: BTreeSet<ReplicaGuid>,
    /// Replicas whose log has entries that no sync covers.
    pub written: Waiting,
    /// Replicas with a commit under way.
    pub committing: Waiting,
}

impl Tickets {
    pub fn request(&mut self) -> SyncTicket {
        self.requested += 1;
        SyncTicket(self.requested)
    }

    pub fn request_for(&mut self, guid: ReplicaGuid) -> SyncTicket {
        self.asked.add(guid);
        self.request()
    }

    pub fn begin(&mut self) -> Option<SyncTicket> {
        if self.under_way || self.begun == self.requested {
            return None;
        }
        self.under_way = true;
        self.begun = self.requested;
        for waiting in [&mut self.asked, &mut self.written, &mut self.committing] {
            waiting.begin();
        }
        Some(SyncTicket(self.begun))
    }

    pub fn finish(&mut self, done: Option<SyncTicket>) {
        self.under_way = false;
        if let Some(ticket) = done {
            self.synced = self.synced.max(ticket.0);
            self.served.append(&mut self.asked.end());
        }
    }

    /// Replicas that asked for a sync which succeeded since the last call, in ascending order.
    pub fn take_served(&mut self) -> Vec<ReplicaGuid> {
        std::mem::take(&mut self.served).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_serves_those_that_asked_before_it_began_and_each_once() {
        let [one, two, three] = [1, 2, 3].map(ReplicaGuid);
        let mut tickets = Tickets::default();
        tickets.request_for(two);
        tickets.request_for(one);
        tickets.request_for(two);
        let ticket = tickets.begin().expect("a sync is wanted");
        assert_eq!(tickets.begin(), None, "one at a time");
        let later = tickets.request_for(one);
        tickets.request_for(three);
        assert!(tickets.take_served().is_empty(), "it goes on");
        tickets.finish(Some(ticket));
        assert!(later > ticket && tickets.take_served() == [one, two]);
        assert!(tickets.take_served().is_empty());
        let ticket = tickets.begin().expect("a sync is wanted");
        tickets.finish(None);
        assert!(tickets.take_served().is_empty(), "it failed");
        assert_eq!((tickets.synced, tickets.begin()), (ticket.0 - 2, None));
    }
}
