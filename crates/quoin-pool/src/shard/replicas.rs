//! The replicas that a shard holds, by GUID and by timer, and what became of its orders about them.

use std::collections::BTreeMap;

use quoin_replication::replica::store::SyncTicket;
use quoin_types::ReplicaGuid;
use quoin_types::key_map::KeyMap;

use super::holdings::{Held, Undone};
use crate::assignment::ReplicaState;

#[derive(Default)]
pub(super) struct Replicas {
    held: BTreeMap<ReplicaGuid, Held>,
    by_timer: KeyMap<ReplicaGuid>,
    /// Replicas that have something to acknowledge at the end of the round.
    touched: Vec<ReplicaGuid>,
    /// Replicas that were used since they were told of last.
    used: Vec<ReplicaGuid>,
    /// Replicas that were assigned here but are not held.
    pub(super) gone: Vec<ReplicaState>,
    /// Replicas whose creation or deletion failed.
    pub(super) undone: Undone,
    /// The last deletion is not on media before this ticket is done.
    pub(super) deleted: SyncTicket,
    /// Nor is the last creation or deletion before this one; `None`: all are.
    pub(super) untold: Option<SyncTicket>,
}

impl Replicas {
    pub(super) fn get(&self, guid: ReplicaGuid) -> Option<&Held> {
        self.held.get(&guid)
    }

    pub(super) fn get_mut(&mut self, guid: ReplicaGuid) -> Option<&mut Held> {
        let held = self.held.get_mut(&guid)?;
        if !std::mem::replace(&mut held.used, true) {
            self.used.push(guid);
        }
        Some(held)
    }

    /// Begins a report of all replicas, or of those that were used since the last report.
    pub(super) fn take_untold(&mut self, all: bool) -> Vec<ReplicaGuid> {
        let mut used = std::mem::take(&mut self.used);
        used.retain(|guid| match self.held.get_mut(guid) {
            Some(held) => std::mem::take(&mut held.used),
            None => false,
        });
        if all { self.guids() } else { used }
    }

    pub(super) fn contains(&self, guid: ReplicaGuid) -> bool {
        self.held.contains_key(&guid)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ReplicaGuid, &Held)> {
        self.held.iter().map(|(guid, held)| (*guid, held))
    }

    pub(super) fn guids(&self) -> Vec<ReplicaGuid> {
        self.held.keys().copied().collect()
    }

    /// Replicas that a target has open.
    pub(super) fn in_session(&self) -> Vec<ReplicaGuid> {
        let open = self.held.iter().filter(|(_, held)| held.replica.is_open());
        open.map(|(guid, _)| *guid).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// The first one from this GUID on.
    pub(super) fn next_from(&self, guid: ReplicaGuid) -> Option<ReplicaGuid> {
        self.held.range(guid..).next().map(|(guid, _)| *guid)
    }

    pub(super) fn insert(&mut self, guid: ReplicaGuid, held: Held) {
        self.by_timer.insert(held.timer_key, guid);
        self.held.insert(guid, held);
        self.get_mut(guid);
    }

    pub(super) fn remove(&mut self, guid: ReplicaGuid) -> Option<Held> {
        let held = self.held.remove(&guid)?;
        self.by_timer.remove(&held.timer_key);
        Some(held)
    }

    /// The replica whose timer has this key.
    pub(super) fn of_timer(&self, key: u64) -> Option<ReplicaGuid> {
        self.by_timer.get(&key).copied()
    }

    pub(super) fn touch(&mut self, guid: ReplicaGuid) {
        if let Some(held) = self.get_mut(guid)
            && !held.touched
        {
            held.touched = true;
            self.touched.push(guid);
        }
    }

    pub(super) fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// The next replica that was touched, which is not listed any more; one that was deleted since is
    /// left out.
    pub(super) fn next_touched(&mut self) -> Option<(ReplicaGuid, &mut Held)> {
        let guid = loop {
            let guid = self.touched.pop()?;
            if self.held.contains_key(&guid) {
                break guid;
            }
        };
        let held = self.held.get_mut(&guid)?;
        held.touched = false;
        Some((guid, held))
    }
}
