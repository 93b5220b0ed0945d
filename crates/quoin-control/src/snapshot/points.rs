//! Points over several volumes that are under way: what the targets are told, and what they answer.
//!
//! All of it is memory of this process. Which snapshots belong to an attempt is recorded before the
//! first hold, so a controller that starts finds them, deletes them and begins no attempt again.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};

use quoin_replication::group_point::attempts::Attempts;
use quoin_replication::group_point::{Broken, PointAnswer, PointCommand, PointVerdict};
use quoin_types::ids::{GroupId, PointId, SnapshotId};
use quoin_types::{Time, VolumeId};
use tokio::time::Instant;

use crate::time::now_ms;

/// Attempts under way, one a group at most.
pub(crate) struct Points {
    begin: Instant,
    running: Mutex<Running>,
    /// Nodes whose targets follow their commands, and whether those know points.
    nodes: Mutex<HashSet<String>>,
}

#[derive(Default)]
struct Running {
    attempts: Attempts,
    seen: HashMap<GroupId, Seen>,
}

/// Facts of an attempt that the core does not know.
#[derive(Clone, Default)]
struct Seen {
    /// Sizes of the volumes at their cuts.
    sizes: HashMap<SnapshotId, u64>,
    /// When all were cut, by this clock.
    cut_ms: u64,
}

/// How an attempt ended, with what the core does not know.
pub(crate) struct Ended {
    pub verdict: PointVerdict,
    pub sizes: HashMap<SnapshotId, u64>,
    pub cut_ms: u64,
}

impl Points {
    pub fn new() -> Self {
        let begin = Instant::now();
        Self { begin, running: Mutex::default(), nodes: Mutex::default() }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().expect("no holder of this lock panics")
    }

    fn nodes(&self) -> MutexGuard<'_, HashSet<String>> {
        self.nodes.lock().expect("no holder of this lock panics")
    }

    fn time(&self, now: Instant) -> Time {
        let nanoseconds = now.saturating_duration_since(self.begin).as_nanos();
        Time(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// A node's target follows its commands from here on.
    pub fn follows(&self, node: &str) {
        self.nodes().insert(node.to_owned());
    }

    /// Returns true if the node's target has asked for commands.
    pub fn is_followed_by(&self, node: &str) -> bool {
        self.nodes().contains(node)
    }

    /// Begins an attempt, unless one of its volumes is in another one that is under way.
    pub fn begin(
        &self,
        now: Instant,
        group: GroupId,
        point: PointId,
        hold_ms: u32,
        members: Vec<(VolumeId, SnapshotId)>,
    ) -> bool {
        let time = self.time(now);
        let mut running = self.running();
        let Running { attempts, seen } = &mut *running;
        let has_begun = attempts.begin(time, group, point, hold_ms, members);
        seen.retain(|group, _| attempts.is_running(*group));
        has_begun
    }

    pub fn is_running(&self, group: GroupId) -> bool {
        self.running().attempts.is_running(group)
    }

    /// Gives an attempt up: its holds are released, then it ends.
    pub fn give_up(&self, now: Instant, group: GroupId) {
        self.running().attempts.give_up(self.time(now), group);
    }

    /// Gives an attempt up that nobody waits for.
    pub fn leave(&self, now: Instant, group: GroupId) {
        self.running().attempts.leave(self.time(now), group);
    }

    /// The end of an attempt; `None`: it is under way.
    pub fn ended(&self, now: Instant, group: GroupId) -> Option<Ended> {
        let mut running = self.running();
        let verdict = running.attempts.verdict(self.time(now), group)?;
        let Seen { sizes, cut_ms } = running.seen.get(&group).cloned().unwrap_or_default();
        Some(Ended { verdict, sizes, cut_ms })
    }

    /// Forgets an attempt that has ended.
    pub fn forget(&self, group: GroupId) {
        self.running().attempts.forget(group);
    }

    /// Commands for the volumes that `is_served` says are.
    pub fn commands(
        &self,
        is_served: impl Fn(VolumeId) -> bool,
    ) -> Vec<(PointId, VolumeId, PointCommand)> {
        self.running().attempts.commands().filter(|(_, volume, _)| is_served(*volume)).collect()
    }

    /// Takes in what a target answered for a point. Returns the group and its volumes, whose targets
    /// may have something new to do; `None`: no such attempt is under way.
    pub fn answered(
        &self,
        now: Instant,
        volume: VolumeId,
        point: PointId,
        answer: PointAnswer,
    ) -> Option<(GroupId, Vec<VolumeId>)> {
        let time = self.time(now);
        let mut running = self.running();
        let group = running.attempts.answered(time, volume, point, answer)?;
        running.note_cut(group);
        Some((group, running.attempts.volumes(group).to_vec()))
    }

    /// The same of the snapshot of a volume.
    pub fn snapshot_answered(
        &self,
        now: Instant,
        volume: VolumeId,
        group: GroupId,
        answer: PointAnswer,
        size_bytes: u64,
    ) -> Option<Vec<VolumeId>> {
        let time = self.time(now);
        let mut running = self.running();
        if !running.attempts.snapshot_answered(time, volume, group, answer) {
            return None;
        }
        if let PointAnswer::Snapshot { id, .. } = answer {
            running.seen.entry(group).or_default().sizes.insert(id, size_bytes);
        }
        running.note_cut(group);
        Some(running.attempts.volumes(group).to_vec())
    }
}

impl Running {
    fn note_cut(&mut self, group: GroupId) {
        let is_cut = self.attempts.is_cut(group);
        let seen = self.seen.entry(group).or_default();
        if seen.cut_ms == 0 && is_cut {
            seen.cut_ms = now_ms();
        }
    }
}

/// Why an attempt does not count, in words.
pub(crate) fn in_words(broken: Broken, volume_name: impl Fn(VolumeId) -> String) -> String {
    match broken.volume() {
        Some(volume) => format!("volume {:?}: {broken}", volume_name(volume)),
        None => broken.to_string(),
    }
}
