//! Reads of the disk that the shard does not wait for.

use std::time::Duration;

use bytes::Bytes;
use quoin_replication::replica::ReplicaEvent;
use quoin_replication::replica::store::IoFault;
use quoin_store::ReplicaPool;
use quoin_store::disk::fetch::Owner;
use quoin_store::disk::read_ring::EndedRead;
use quoin_types::Time;

use super::Shard;
use crate::facts::PoolFacts;

impl<P: ReplicaPool + PoolFacts> Shard<'_, P> {
    /// Makes the calls again that lack nothing any more, and hands over as many reads as may be
    /// under way.
    pub(super) fn begin_fetches(&mut self, now: Time) {
        self.make_again(now);
        while let Some(fetch) = self.pool.next_fetch() {
            self.disk.fetchers.begin(fetch);
        }
        self.disk.fetchers.submit();
    }

    /// Takes what the ring has read.
    pub(super) fn take_read(&mut self, now: Time) {
        while let Some(EndedRead { id, result, took }) = self.disk.fetchers.next_ended() {
            self.fetched(now, id, result, took);
        }
    }

    /// Takes the result of a read. The calls that lacked it are made again.
    pub(super) fn fetched(
        &mut self,
        now: Time,
        id: u64,
        result: Result<Bytes, IoFault>,
        took: Duration,
    ) {
        self.parts.metrics.disk.fetch_duration.observe(took.as_secs_f64());
        self.took(took);
        self.pool.fetched(id, result);
        self.make_again(now);
    }

    fn make_again(&mut self, now: Time) {
        while let Some((owner, ticket)) = self.pool.take_fetched() {
            match owner {
                Owner::Sessions(guid) | Owner::Copying(guid) => {
                    self.deliver(now, guid, ReplicaEvent::Fetched { ticket });
                }
                Owner::Background(_) => self.background.disk_answered(now),
                Owner::Scrub(_) => self.health.scrub.answered(now),
            }
        }
    }
}
