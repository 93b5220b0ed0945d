//! Syncs and reads that are made beside the shard.

use std::collections::VecDeque;
use std::time::Duration;

use quoin_replication::replica::store::SyncTicket;
use quoin_store::disk::Reader;
use quoin_store::disk::read_ring::ReadRing;
use quoin_types::Time;

use crate::fetcher::Fetchers;
use crate::syncer::Syncer;

pub(super) struct DiskThreads {
    syncer: Syncer,
    pub(super) fetchers: Fetchers,
    pub(super) syncs: Syncs,
}

impl DiskThreads {
    /// With the pool's ring, and where there is none its reader, for threads.
    pub(super) fn new(
        syncer: Syncer,
        ring: std::io::Result<ReadRing>,
        reader: Option<Reader>,
    ) -> Self {
        let fetchers = match ring {
            Ok(ring) => Fetchers::Ring(Box::new(ring)),
            Err(error) => {
                tracing::info!(%error, "no io_uring: threads read from the disk");
                Fetchers::Threads(syncer.readers(reader))
            }
        };
        Self { syncer, fetchers, syncs: Syncs::default() }
    }

    pub(super) fn begin_sync(&mut self, now: Time, ticket: SyncTicket) {
        self.syncs.began(now, ticket);
        self.syncer.begin(ticket);
    }
}

/// Syncs under way, and what the ended ones have put on media.
#[derive(Default)]
pub(super) struct Syncs {
    done: SyncTicket,
    /// Each with the time of its begin.
    under_way: VecDeque<(SyncTicket, Time)>,
}

impl Syncs {
    fn began(&mut self, now: Time, ticket: SyncTicket) {
        self.under_way.push_back((ticket, now));
    }

    /// The sync of this ticket ended, whatever its outcome; earlier ones are covered by it. Returns
    /// how long it took.
    pub(super) fn ended(&mut self, now: Time, ticket: SyncTicket) -> Option<Duration> {
        let mut took = None;
        while let Some((begun, at)) = self.under_way.pop_front_if(|(begun, _)| *begun <= ticket) {
            if begun == ticket {
                took = Some(now.since(at));
            }
        }
        took
    }

    /// Everything up to this ticket is on media.
    pub(super) fn succeeded(&mut self, ticket: SyncTicket) {
        self.done = self.done.max(ticket);
    }

    pub(super) fn covers(&self, ticket: SyncTicket) -> bool {
        ticket <= self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_covers_those_that_began_before_it_and_one_that_fails_covers_nothing() {
        let at = Time::from_millis;
        let mut syncs = Syncs::default();
        for (now, ticket) in [(10, 1), (20, 3), (30, 4)] {
            syncs.began(at(now), SyncTicket(ticket));
        }
        assert_eq!(syncs.ended(at(50), SyncTicket(3)), Some(Duration::from_millis(30)));
        assert!(!syncs.covers(SyncTicket(1)), "its outcome is not told yet");
        syncs.succeeded(SyncTicket(3));
        assert!(syncs.covers(SyncTicket(3)) && !syncs.covers(SyncTicket(4)));
        assert_eq!(syncs.ended(at(60), SyncTicket(3)), None, "it ended before");
        assert_eq!(syncs.ended(at(60), SyncTicket(4)), Some(Duration::from_millis(30)));
        syncs.succeeded(SyncTicket(2));
        assert!(syncs.covers(SyncTicket(3)), "media keep what they have");
    }
}
