//! Points over several volumes that are under way: what the targets are told, and what they answer.
//!
//! All of it is memory of this process. Which snapshots belong to an attempt is recorded before the
//! first hold, so a controller that starts finds them, deletes them and begins no attempt again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};

use quoin_replication::group_point::{Broken, GroupPoint, PointAnswer, PointCommand, PointVerdict};
use quoin_types::ids::{GroupId, PointId, SnapshotId};
use quoin_types::{Time, VolumeId};
use tokio::time::Instant;

use crate::time::now_ms;

/// Attempts under way, one a group at most.
pub(crate) struct Points {
    begin: Instant,
    running: Mutex<BTreeMap<GroupId, Running>>,
    /// Nodes whose targets follow their commands, and whether those know points.
    nodes: Mutex<HashSet<String>>,
}

struct Running {
    attempt: GroupPoint,
    volumes: Vec<VolumeId>,
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

    fn running(&self) -> MutexGuard<'_, BTreeMap<GroupId, Running>> {
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
        let volumes: Vec<VolumeId> = members.iter().map(|(volume, _)| *volume).collect();
        let mut running = self.running();
        let is_busy = running.values().any(|r| r.volumes.iter().any(|v| volumes.contains(v)));
        if is_busy || running.contains_key(&group) {
            return false;
        }
        let attempt = GroupPoint::begin(self.time(now), point, hold_ms, members);
        let (sizes, cut_ms) = (HashMap::new(), 0);
        running.insert(group, Running { attempt, volumes, sizes, cut_ms });
        true
    }

    pub fn is_running(&self, group: GroupId) -> bool {
        self.running().contains_key(&group)
    }

    /// Gives an attempt up: its holds are released, then it ends.
    pub fn give_up(&self, now: Instant, group: GroupId) {
        let time = self.time(now);
        if let Some(running) = self.running().get_mut(&group) {
            running.attempt.give_up(time);
        }
    }

    /// The end of an attempt; `None`: it is under way.
    pub fn ended(&self, now: Instant, group: GroupId) -> Option<Ended> {
        let time = self.time(now);
        let mut all = self.running();
        let running = all.get_mut(&group)?;
        running.attempt.tick(time);
        let verdict = running.attempt.verdict()?;
        Some(Ended { verdict, sizes: running.sizes.clone(), cut_ms: running.cut_ms })
    }

    /// Forgets an attempt that has ended.
    pub fn forget(&self, group: GroupId) {
        let is_over = |running: &mut Running| running.attempt.verdict().is_some();
        if let std::collections::btree_map::Entry::Occupied(mut found) = self.running().entry(group)
            && is_over(found.get_mut())
        {
            found.remove();
        }
    }

    /// Commands for the volumes that `is_served` says are.
    pub fn commands(
        &self,
        is_served: impl Fn(VolumeId) -> bool,
    ) -> Vec<(PointId, VolumeId, PointCommand)> {
        let running = self.running();
        let all = running.values().flat_map(|running| {
            let point = running.attempt.point();
            running.attempt.commands().into_iter().map(move |(volume, what)| (point, volume, what))
        });
        all.filter(|(_, volume, _)| is_served(*volume)).collect()
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
        let is_it = |running: &Running| running.attempt.point() == point;
        let (group, running) = running.iter_mut().find(|(_, running)| is_it(running))?;
        running.on(time, volume, answer);
        Some((*group, running.volumes.clone()))
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
        let mut all = self.running();
        let running = all.get_mut(&group)?;
        if let PointAnswer::Snapshot { id, .. } = answer {
            running.sizes.insert(id, size_bytes);
        }
        running.on(time, volume, answer);
        Some(running.volumes.clone())
    }
}

impl Running {
    fn on(&mut self, time: Time, volume: VolumeId, answer: PointAnswer) {
        self.attempt.on(time, volume, answer);
        if self.cut_ms == 0 && self.attempt.is_cut() {
            self.cut_ms = now_ms();
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
