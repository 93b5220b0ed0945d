//! Orphans that are deleted after a time, where the limits of their peer say so.
//!
//! The time is that for which controllers that ran have seen it as an orphan, so no clock that jumps ends it early.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{VolumeGroupRef, VolumeRef};
use quoin_cluster::records::{MirrorRecord, Record, VolumeRecord};
use tokio::time::Instant;

use super::driver::Mirrors;
use super::memory::Seen;
use crate::Error;
use crate::state::events::{Object, Severity};

/// Most time that a restart of the controller adds, and the least between two changes of the record.
const RECORDED_WITHIN: Duration = Duration::from_secs(600);
const RECORDED_APART: Duration = Duration::from_secs(5);

/// Steps that are due for an orphan of this age.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Due {
    is_over: bool,
    tells: bool,
    records: bool,
}

fn due(seen: &Seen, age: Duration, limit: Duration) -> Due {
    let apart = (limit / 20).clamp(RECORDED_APART, RECORDED_WITHIN);
    Due {
        is_over: age >= limit,
        tells: !seen.is_told,
        records: age.saturating_sub(seen.recorded) >= apart,
    }
}

impl Mirrors {
    /// Deletes an orphan whose time is over.
    pub(super) async fn expire(&self, record: &MirrorRecord) -> Result<(), Error> {
        let group = record.id.0;
        let peer = self.state.joined.peers.get(&record.brain().peer.to_string());
        let Some(limit_s) = peer.and_then(|peer| peer.limits.orphans_s) else {
            self.orphans.forget(group);
            return Ok(());
        };
        let limit = Duration::from_secs(limit_s);
        let (due, age) = {
            let mut all = self.orphans.lock();
            let before = Duration::from_secs(record.orphan_s);
            let is_told = record.orphan_s != 0;
            let since = Instant::now();
            let new = || Seen { since, before, recorded: before, is_told };
            let seen = all.entry(group).or_insert_with(new);
            let age = seen.before + seen.since.elapsed();
            let due = due(seen, age, limit);
            seen.is_told = true;
            if due.records {
                seen.recorded = age;
            }
            (due, age)
        };
        let about = || Object::new("mirror", group, &record.group_name);
        if due.tells {
            let left = limit.saturating_sub(age).as_secs();
            let message = format!(
                "the orphan is deleted in {left} s, as the limits of its peer say (`quoin mirror quota`): \
                 promote it to keep it"
            );
            self.state.events.record(Severity::Warning, about(), "OrphanExpires", message);
        }
        if due.records {
            let change = |record: &mut MirrorRecord| {
                record.orphan_s = age.as_secs();
                Ok(())
            };
            self.state.mirrored.records.update(&record.name(), change).await?;
        }
        let volumes = record.brain().members.iter();
        let volumes = volumes.filter_map(|m| self.state.volumes.get(&m.volume.to_string()));
        // A volume that left the group is an ordinary one, and lives on.
        let is_of_it = |volume: &Arc<VolumeRecord>| {
            volume.mirror.as_ref().is_some_and(|mirror| mirror.group.0 == group)
        };
        let volumes: Vec<_> = volumes.filter(is_of_it).collect();
        // A volume that is used is wanted.
        let is_used = volumes.iter().any(|volume| !volume.attachments.is_empty());
        if !due.is_over || is_used {
            return Ok(());
        }
        // The group goes first, as a volume of one is not deleted.
        if !record.is_volume {
            let named = VolumeGroupRef { id: group.to_string(), name: String::new() };
            super::groups::VolumeGroups::new(self.state.clone())
                .delete(Some(&named), false)
                .await?;
        }
        for volume in &volumes {
            let named = VolumeRef { id: volume.id.0.to_string(), name: String::new() };
            self.catalog.delete(Some(&named)).await?;
        }
        let message = format!("it was an orphan for {} s, and nobody used it", age.as_secs());
        self.state.events.record(Severity::Warning, about(), "OrphanDeleted", message);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orphan_is_told_of_once_recorded_now_and_then_and_over_after_its_time() {
        let second = Duration::from_secs;
        let mut seen = Seen {
            since: Instant::now(),
            before: Duration::ZERO,
            recorded: Duration::ZERO,
            is_told: false,
        };
        let week = second(7 * 24 * 3600);
        assert_eq!(due(&seen, second(1), week), Due { tells: true, ..Due::default() });
        seen.is_told = true;
        assert_eq!(due(&seen, second(599), week), Due::default());
        assert_eq!(due(&seen, second(600), week), Due { records: true, ..Due::default() });
        seen.recorded = second(600);
        assert!(due(&seen, week, week).is_over);
        assert!(due(&seen, second(606), second(60)).records);
    }
}
