//! Memory that the volumes of a shard share for replicas that are away or behind
//! ([`quoin_replication::target_host::memory`]).

use quoin_replication::primary::PrimaryEvent;
use quoin_types::{Time, VolumeId};

use super::Shard;

impl Shard {
    pub(super) fn count_retained(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get_mut(&id) {
            let now = volume.target.retained_bytes();
            let before = std::mem::replace(&mut volume.retained_bytes, now);
            self.count_kept(before, now);
        }
    }

    /// A volume keeps `now` instead of `before`.
    pub(super) fn count_kept(&mut self, before: usize, now: usize) {
        if now != before {
            self.memory.count(before, now);
            self.reports.metrics.retained.inc_by(now as i64 - before as i64);
        }
    }

    /// Sets each volume's limit once a round, if it changes.
    pub(super) fn share_memory(&mut self, now: Time) {
        let each = self.volumes.values().map(|volume| volume.retained_bytes);
        let Some(bytes_max) = self.memory.share(now, each) else { return };
        let limited = bytes_max < usize::MAX;
        if limited {
            tracing::info!(
                bytes_max,
                volumes = self.volumes.len(),
                "the memory for replicas that are away or behind is used up: volumes that keep \
                 more for them copy what they lack anew"
            );
        }
        for (id, volume) in &mut self.volumes {
            volume.target.on(now, PrimaryEvent::Retain { bytes_max }, &mut self.actions);
            // An idle volume would otherwise keep its entries.
            if volume.retained_bytes > bytes_max && !volume.touched {
                volume.touched = true;
                self.unfinished.volumes.push(*id);
            }
        }
    }
}
