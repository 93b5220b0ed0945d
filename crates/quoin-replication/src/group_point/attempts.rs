//! Attempts of one coordinator that are under way: one a group, and one over a volume, at a time.
//!
//! An attempt has an owner, who begins it, asks for its verdict and forgets it. An owner that has gone on to something
//! else leaves it: its holds are released, and then it is forgotten by itself. One that stayed would keep every other
//! point from its volumes for as long as the coordinator lives.

use std::collections::BTreeMap;

use quoin_types::ids::{GroupId, PointId, SnapshotId, VolumeId};
use quoin_types::time::Time;

use super::{GroupPoint, PointAnswer, PointCommand, PointVerdict};

#[derive(Debug)]
struct Running {
    attempt: GroupPoint,
    volumes: Vec<VolumeId>,
    is_left: bool,
}

/// Attempts under way, and those whose verdict was not taken yet.
#[derive(Debug, Default)]
pub struct Attempts(BTreeMap<GroupId, Running>);

impl Attempts {
    /// Begins an attempt, unless one of its volumes is in another one that is under way.
    pub fn begin(
        &mut self,
        now: Time,
        group: GroupId,
        point: PointId,
        hold_ms: u32,
        members: Vec<(VolumeId, SnapshotId)>,
    ) -> bool {
        self.forget_left(now);
        let volumes: Vec<VolumeId> = members.iter().map(|(volume, _)| *volume).collect();
        let is_busy = self.0.values().any(|r| r.volumes.iter().any(|v| volumes.contains(v)));
        if is_busy || self.0.contains_key(&group) {
            return false;
        }
        let attempt = GroupPoint::begin(now, point, hold_ms, members);
        self.0.insert(group, Running { attempt, volumes, is_left: false });
        true
    }

    pub fn is_running(&self, group: GroupId) -> bool {
        self.0.contains_key(&group)
    }

    /// Returns true once every volume is cut.
    pub fn is_cut(&self, group: GroupId) -> bool {
        self.0.get(&group).is_some_and(|running| running.attempt.is_cut())
    }

    /// Volumes of an attempt.
    pub fn volumes(&self, group: GroupId) -> &[VolumeId] {
        self.0.get(&group).map_or(&[], |running| &running.volumes)
    }

    /// Gives an attempt up: its holds are released, then it ends. Its owner waits for that.
    pub fn give_up(&mut self, now: Time, group: GroupId) {
        if let Some(running) = self.0.get_mut(&group) {
            running.attempt.give_up(now);
        }
    }

    /// Gives an attempt up that nobody waits for.
    pub fn leave(&mut self, now: Time, group: GroupId) {
        self.give_up(now, group);
        if let Some(running) = self.0.get_mut(&group) {
            running.is_left = true;
        }
        self.forget_left(now);
    }

    /// The end of an attempt; `None`: it is under way.
    pub fn verdict(&mut self, now: Time, group: GroupId) -> Option<PointVerdict> {
        let running = self.0.get_mut(&group)?;
        running.attempt.tick(now);
        running.attempt.verdict()
    }

    /// Forgets an attempt that has ended.
    pub fn forget(&mut self, group: GroupId) {
        if self.0.get(&group).is_some_and(|running| running.attempt.verdict().is_some()) {
            self.0.remove(&group);
        }
    }

    fn forget_left(&mut self, now: Time) {
        self.0.retain(|_, running| {
            if running.is_left {
                running.attempt.tick(now);
            }
            !running.is_left || running.attempt.verdict().is_none()
        });
    }

    /// All that targets are to be told now, and again until it is answered.
    pub fn commands(&self) -> impl Iterator<Item = (PointId, VolumeId, PointCommand)> + '_ {
        self.0.values().flat_map(|running| {
            let point = running.attempt.point();
            running.attempt.commands().into_iter().map(move |(volume, what)| (point, volume, what))
        })
    }

    /// Takes in what a target answered for a point. Returns its group; `None`: no such attempt is under way.
    pub fn answered(
        &mut self,
        now: Time,
        volume: VolumeId,
        point: PointId,
        answer: PointAnswer,
    ) -> Option<GroupId> {
        let is_it = |running: &Running| running.attempt.point() == point;
        let (group, running) = self.0.iter_mut().find(|(_, running)| is_it(running))?;
        running.attempt.on(now, volume, answer);
        Some(*group)
    }

    /// The same of the snapshot of a volume; false: no such attempt is under way.
    pub fn snapshot_answered(
        &mut self,
        now: Time,
        volume: VolumeId,
        group: GroupId,
        answer: PointAnswer,
    ) -> bool {
        let Some(running) = self.0.get_mut(&group) else { return false };
        running.attempt.on(now, volume, answer);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::primary::PointOutcome;
    use std::time::Duration;

    const NOW: Time = Time(1_000_000_000);
    const VOLUME: VolumeId = VolumeId(1);

    fn begin(attempts: &mut Attempts, now: Time, number: u128) -> bool {
        let members = vec![(VOLUME, SnapshotId(number))];
        attempts.begin(now, GroupId(number), PointId(number), 1000, members)
    }

    #[test]
    fn an_attempt_that_its_owner_left_keeps_no_later_one_from_its_volumes() {
        let mut attempts = Attempts::default();
        assert!(begin(&mut attempts, NOW, 1));
        assert!(!begin(&mut attempts, NOW, 2), "the volume is being cut");
        attempts.leave(NOW, GroupId(1));
        let told: Vec<_> = attempts.commands().collect();
        assert_eq!(told, [(PointId(1), VOLUME, PointCommand::Release)]);
        assert!(!begin(&mut attempts, NOW, 2), "its target may hold still");
        let released = PointAnswer::Step(PointOutcome::Released { unbroken: true });
        attempts.answered(NOW, VOLUME, PointId(1), released);
        assert!(begin(&mut attempts, NOW, 2));
        // A target that never answers holds nobody up for ever.
        attempts.leave(NOW, GroupId(2));
        assert!(begin(&mut attempts, NOW + Duration::from_secs(3), 3));
    }

    #[test]
    fn an_attempt_that_is_given_up_stays_for_its_owner() {
        let mut attempts = Attempts::default();
        assert!(begin(&mut attempts, NOW, 1));
        attempts.give_up(NOW, GroupId(1));
        attempts.forget(GroupId(1));
        assert!(attempts.is_running(GroupId(1)), "its holds are not released");
        let later = NOW + Duration::from_secs(3);
        assert!(matches!(attempts.verdict(later, GroupId(1)), Some(PointVerdict::Broken(_))));
        attempts.forget(GroupId(1));
        assert!(!attempts.is_running(GroupId(1)));
    }
}
